"""Parts known as (epsilon, delta)-DP, by Rényi divergences, or as zCDP."""

import mpmath
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt
from jaxdp_episodic.bounds import RandomizedResponse

GAUSSIAN = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.01), noise_multiplier=1.0
)


def test_rdp_against_the_closed_form():
    pure, orders = np.geomspace(1e-3, 20, 7), np.array([1 + 1e-6, 1.5, 2, 30, 4096])
    found = jde.rdp(jde.ApproximateDP(pure), orders)
    expected = RandomizedResponse(pure).rdp(orders)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.all(np.isinf(jde.rdp(jde.ApproximateDP(pure, 1e-9), orders)))
    np.testing.assert_allclose(
        jde.rdp(jde.ApproximateDP(pure), np.inf), pure, rtol=2e-12
    )


METHODS = ("exact", "pld", "rdp")


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("steps", "size"), [(1, 0.0), (100, 0.1)])
def test_failure_is_accounted_by_hand(steps, size, method):
    """delta = 1 - k + k delta', where k is the probability that no part fails."""
    parts = [jde.ApproximateDP(size, failure) for failure in (1e-7, 0.0)]
    failing, pure = (jde.compose((GAUSSIAN, steps), (part, 20)) for part in parts)
    kept = (1 - 1e-7) ** 20
    left = (1e-5 - (1 - kept)) / kept
    found = jde.epsilon(failing, delta=1e-5, method=method)
    expected = jde.epsilon(pure, delta=left, method=method)
    assert found == pytest.approx(expected, rel=1e-6)
    back = jde.delta(failing, epsilon=1.0, method=method)
    hoped = jde.delta(pure, epsilon=1.0, method=method)
    assert back == pytest.approx(-np.expm1(20 * np.log1p(-1e-7)) + kept * hoped)


@pytest.mark.parametrize("method", METHODS)
def test_delta_that_does_not_cover_the_failure(method):
    release = jde.ApproximateDP(0.5, 1e-5)
    few = [0.0, 1e-9, 0.99e-5, 1e-5]
    assert np.all(np.isinf(jde.epsilon(release, num_steps=1, delta=few, method=method)))
    more = jde.epsilon(release, num_steps=1, delta=1e-5 * (1 + 1e-6), method=method)
    assert more == pytest.approx(0.5, abs=1e-9)
    sure = jde.ApproximateDP(0.5, 1.0)
    assert np.isinf(jde.epsilon(sure, num_steps=1, delta=0.5, method=method))
    assert jde.delta(sure, num_steps=1, epsilon=0.1, method=method) == 1
    assert jde.epsilon(sure, num_steps=0, delta=0.5, method=method) == 0
    bare, way = jde.ApproximateDP(np.inf), "backward"
    assert np.all(jde.privacy_profile(bare, [0, np.inf], direction=way) == 1)


def test_failure_is_rounded_to_the_safe_side():
    """If delta is close to the failure probability, the difference cancels."""
    rng = np.random.default_rng(5)
    for _ in range(100):
        failure = 10 ** rng.uniform(-12, -0.5)
        count = int(rng.integers(1, 1000))
        with mpmath.workdps(50):
            kept = (1 - mpmath.mpf(failure)) ** count
            delta = float((1 - kept) * (1 + mpmath.mpf(10) ** rng.uniform(-14, 1)))
            if not 0 < delta < 1:
                continue
            left = (mpmath.mpf(delta) - (1 - kept)) / kept
            true = float(mpmath.log(left)) if left > 0 else -np.inf
        log_kept = np.array(count * np.log1p(-failure))
        question = EpsilonAt(np.log(np.array(delta)))
        assert question.given_kept(log_kept, up=True).target <= true
        assert question.given_kept(log_kept, up=False).target >= true
        # and back
        log_delta = np.array(rng.uniform(-40, 0))
        with mpmath.workdps(50):
            whole = mpmath.log(1 - kept + kept * mpmath.exp(mpmath.mpf(log_delta[()])))
        at = DeltaAt(np.ones(()))
        assert at.with_failure(log_delta, log_kept, up=True) >= min(float(whole), 0)
        assert at.with_failure(log_delta, log_kept, up=False) <= float(whole)


def test_one_part_gives_its_claim():
    release = jde.ApproximateDP(np.array([0.1, 1.0]), 1e-6)
    claim = jde.delta(release, num_steps=1, epsilon=[0.1, 1.0])
    np.testing.assert_allclose(claim, 1e-6, rtol=1e-9)
    assert np.all(claim >= 1e-6)


def test_mixed_with_a_gaussian_against_the_mixture():
    """Given the answers' loss, the remaining delta is the Gaussian's."""
    pure, count, noise, delta = 0.4, 6, 1.5, 1e-6
    part, gaussian = jde.ApproximateDP(pure), jde.ZeroConcentratedDP.of_gaussian(noise)
    run = jde.compose((part, count), (gaussian, 1))
    low, high = jde.epsilon_interval(run, delta=delta)
    assert low < high < low * (1 + 1e-4) and jde.epsilon(run, delta=delta) == high
    with mpmath.workdps(40):
        truth, mu = 1 / (1 + mpmath.exp(-mpmath.mpf(pure))), 1 / mpmath.mpf(noise)

        def delta_at(epsilon: float) -> float:
            total = mpmath.mpf(0)
            for j in range(count + 1):
                mass = mpmath.binomial(count, j) * truth**j * (1 - truth) ** (count - j)
                left = mpmath.mpf(epsilon) - (2 * j - count) * mpmath.mpf(pure)
                below = mpmath.exp(left) * mpmath.ncdf(-mu / 2 - left / mu)
                total += mass * (mpmath.ncdf(mu / 2 - left / mu) - below)
            return float(total)

        assert delta_at(high) <= delta <= delta_at(low)
    run = jde.compose((GAUSSIAN, 1), (jde.ApproximateDP(0.24), 2))
    low, high = jde.delta_interval(run, epsilon=0.52)  # above all backward losses
    assert low <= high <= low * (1 + 1e-3)


# --- Rényi divergences at some orders ---


ORDERS = 1 + np.geomspace(1e-3, 1e4, 300)


def test_between_orders_the_chord_is_used():
    rho, orders = 0.3, np.array([1.5, 3.0, 9.0])
    part = jde.RenyiDP(orders, rho * orders)
    np.testing.assert_allclose(jde.rdp(part, orders), rho * orders, rtol=1e-14)
    t, least = orders - 1, 1.5
    middle = 0.5 * (t[0] + t[1])
    chord = 0.5 * rho * (t[0] * orders[0] + t[1] * orders[1])
    assert jde.rdp(part, 1 + middle) == pytest.approx(chord / middle, rel=1e-14)
    # Divergences increase: below the first order its value is used.
    assert jde.rdp(part, 1.1) == pytest.approx(rho * least, rel=1e-14)
    assert np.isinf(jde.rdp(part, 9.1))
    assert np.isinf(jde.rdp(part, np.inf))


def test_no_chord_is_below_the_curve():
    dense = jde.RenyiDP(ORDERS, jde.rdp(GAUSSIAN, ORDERS))
    asked = 1 + np.geomspace(1e-4, 1e4, 50)
    bound, truth = jde.rdp(dense, asked), jde.rdp(GAUSSIAN, asked)
    assert np.all(bound >= truth * (1 - 1e-12))
    run = {"num_steps": 500, "delta": 1e-6, "method": "rdp"}
    value, exact = jde.epsilon(dense, **run), jde.epsilon(GAUSSIAN, **run)
    assert exact * (1 - 1e-9) <= value <= exact * 1.001
    value = jde.delta(dense, num_steps=500, epsilon=2.0, method="rdp")
    exact = jde.delta(GAUSSIAN, num_steps=500, epsilon=2.0, method="rdp")
    assert exact * (1 - 1e-9) <= value <= exact * 1.01


def test_a_pure_part():
    pure = jde.RenyiDP([2.0, np.inf], [0.5, 0.7])
    assert jde.rdp(pure, 2.0) == 0.5
    assert jde.rdp(pure, 100.0) == pytest.approx(0.7, rel=1e-14)
    assert jde.epsilon(pure, num_steps=3, delta=0, method="rdp") == pytest.approx(2.1)
    only = jde.RenyiDP([np.inf], [0.7])
    assert jde.rdp(only, 5.0) == pytest.approx(0.7, rel=1e-14)
    # A value larger than one at a higher order is lowered to it.
    assert jde.rdp(jde.RenyiDP([2.0, 4.0], [0.9, 0.5]), 2.0) == 0.5
    free = jde.RenyiDP([2.0], [0.0])
    assert jde.epsilon(free, num_steps=3, delta=1e-3, method="rdp") < 6
    with pytest.raises(NotImplementedError, match="RenyiCurve.*method='rdp' covers it"):
        jde.epsilon(pure, num_steps=1, delta=1e-5)


def test_of_different_lengths_in_one_run():
    one, two = jde.RenyiDP([2.0, 8.0], [0.1, 0.3]), jde.RenyiDP(ORDERS, 0.2 * ORDERS)
    run = jde.compose((one, 2), (two, 1), (GAUSSIAN, 5))
    for order in (2.0, 8.0):
        parts = (
            2 * jde.rdp(one, order) + jde.rdp(two, order) + 5 * jde.rdp(GAUSSIAN, order)
        )
        assert jde.rdp(run, order) == pytest.approx(parts, rel=1e-12)
    assert np.isinf(jde.rdp(run, 8.1))


@pytest.mark.parametrize(
    ("orders", "rdp", "words"),
    [
        ([1.0, 2.0], [0.1, 0.2], "orders must be > 1"),
        ([3.0, 2.0], [0.1, 0.2], "orders must be ascending"),
        ([2.0, 3.0], [0.1], "rdp must have as many numbers as orders"),
        ([2.0], [-0.1], "rdp must be >= 0"),
        ([], [], "orders must be a list of numbers"),
    ],
)
def test_wrong_curves_are_refused(orders, rdp, words):
    with pytest.raises(ValueError, match=words):
        jde.RenyiDP(orders, rdp)


# --- zCDP ---


def test_rdp_of_zcdp_is_linear():
    rho, orders = np.array([1e-6, 0.1, 30.0]), np.array([1 + 1e-6, 1.5, 2, 64, 4096])
    found = jde.rdp(jde.ZeroConcentratedDP(rho), orders)
    np.testing.assert_allclose(found, rho[:, None] * orders, rtol=1e-12)
    assert np.isinf(jde.rdp(jde.ZeroConcentratedDP(0.1), np.inf))
    assert jde.rdp(jde.ZeroConcentratedDP(0.0), np.inf) == 0


def test_epsilon_is_that_of_the_gaussian_by_rdp():
    noise = np.array([0.5, 2.0, 20.0])
    gaussian = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=1.0), noise_multiplier=noise
    )
    run = {"num_steps": 7, "delta": 1e-6}
    known = jde.ZeroConcentratedDP(0.5 / noise**2)
    same = jde.ZeroConcentratedDP.of_gaussian(noise)
    by_rdp = jde.epsilon(gaussian, method="rdp", **run)
    np.testing.assert_allclose(
        jde.epsilon(known, method="rdp", **run), by_rdp, rtol=1e-12
    )
    exact = jde.epsilon(gaussian, **run)
    np.testing.assert_allclose(jde.epsilon(same, **run), exact, rtol=1e-12)
    assert np.all(exact < by_rdp)


def test_other_methods_refuse_it_by_name():
    release = jde.ZeroConcentratedDP(0.1)
    message = "ZeroConcentrated.* Rényi divergence alone.* method='rdp' covers it"
    run = {"num_steps": 5}
    for ask in (
        lambda: jde.epsilon(release, delta=1e-5, num_steps=0),
        lambda: jde.epsilon(release, delta=1e-5, method="pld", **run),
        lambda: jde.delta_interval(release, epsilon=1.0, **run),
        lambda: jde.privacy_profile(release, 1.0),
        lambda: jde.epsilon(jde.compose((GAUSSIAN, 3), (release, 1)), delta=1e-5),
        lambda: jde.calibrate_num_steps(release, epsilon=1.0, delta=1e-5),
    ):
        with pytest.raises(NotImplementedError, match=message):
            ask()

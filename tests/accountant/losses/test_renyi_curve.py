"""Parts known by Rényi divergences: at some orders, or as zCDP."""

import numpy as np
import pytest

import jaxdp_episodic as jde

GAUSSIAN = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.01), noise_multiplier=1.0
)
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
    odd = jde.RenyiDP([2.0, 4.0], [0.9, 0.5])
    assert jde.rdp(odd, 2.0) == 0.5
    assert (
        jde.epsilon(jde.RenyiDP([2.0], [0.0]), num_steps=3, delta=1e-3, method="rdp")
        < 6
    )
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
        ([], [], "orders must be ascending"),
    ],
)
def test_wrong_curves_are_refused(orders, rdp, words):
    with pytest.raises(ValueError, match=words):
        jde.RenyiDP(orders, rdp)


# --- zCDP ---


def test_rdp_is_linear():
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
        lambda: jde.delta(release, epsilon=1.0, **run),
        lambda: jde.delta_interval(release, epsilon=1.0, **run),
        lambda: jde.privacy_profile(release, 1.0),
        lambda: jde.epsilon(jde.compose((GAUSSIAN, 3), (release, 1)), delta=1e-5),
        lambda: jde.calibrate_num_steps(release, epsilon=1.0, delta=1e-5),
    ):
        with pytest.raises(NotImplementedError, match=message):
            ask()

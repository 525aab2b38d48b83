"""Targets at the ends of their range, runs that lose nothing, and ``engine=``."""

import itertools
import math

import numpy as np
import pytest

import jaxdp_episodic as jde

METHODS = ("exact", "pld", "rdp")
STEP = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.1), noise_multiplier=1.0
)
NEVER = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.0), noise_multiplier=1.0
)
BARE = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.1), noise_multiplier=0.0
)
LAPLACE = jde.LaplaceRelease(2.0)
PART = jde.ApproximateDP(0.3, 1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_delta_zero_and_one(method):
    def ask(step, steps):
        return jde.epsilon(step, delta=[0.0, 1.0], num_steps=steps, method=method)

    np.testing.assert_array_equal(ask(STEP, 10), [np.inf, 0])
    np.testing.assert_array_equal(ask(BARE, 10), [np.inf, 0])
    np.testing.assert_array_equal(ask(NEVER, 10), [0, 0])
    np.testing.assert_array_equal(ask(STEP, 0), [0, 0])
    np.testing.assert_array_equal(ask(PART, 10), [np.inf, 0])
    np.testing.assert_allclose(ask(LAPLACE, 10), [5.0, 0], rtol=2e-12)
    np.testing.assert_allclose(ask(jde.ApproximateDP(0.3), 10), [3.0, 0], rtol=2e-12)


@pytest.mark.parametrize("method", METHODS)
def test_delta_at_infinite_epsilon(method):
    def ask(step, steps):
        return jde.delta(step, epsilon=np.inf, num_steps=steps, method=method)

    assert ask(STEP, 10) == 0
    assert ask(BARE, 10) == 1
    assert ask(BARE, 0) == 0
    assert ask(LAPLACE, 10) == 0
    assert ask(PART, 10) == pytest.approx(1e-6, rel=1e-6)
    assert ask(PART, 10) >= -np.expm1(10 * np.log1p(-1e-7))


@pytest.mark.parametrize("method", METHODS)
def test_delta_of_no_loss_is_zero(method):
    for step, steps in ((NEVER, 10), (STEP, 0), (jde.ApproximateDP(0.0), 3)):
        assert jde.delta(step, epsilon=0.0, num_steps=steps, method=method) == 0
        assert jde.delta(step, epsilon=2.0, num_steps=steps, method=method) == 0
    assert jde.delta(LAPLACE, epsilon=5.1, num_steps=10, method=method) == 0


def test_intervals_at_the_ends():
    lower, upper = jde.epsilon_interval(STEP, delta=[0, 1e-5, 1], num_steps=10)
    np.testing.assert_array_equal(lower[[0, 2]], [np.inf, 0])
    np.testing.assert_array_equal(upper[[0, 2]], [np.inf, 0])
    assert 0 < lower[1] < upper[1]
    lower, upper = jde.epsilon_interval(LAPLACE, delta=0.0, num_steps=10)
    assert lower == 0
    assert upper == pytest.approx(5.0)
    for step, known in ((STEP, 0), (BARE, 1), (LAPLACE, 0)):
        assert jde.delta_interval(step, epsilon=np.inf, num_steps=3) == (known, known)


def test_order_infinity_is_the_largest_loss():
    assert np.isinf(jde.rdp(STEP, np.inf))
    backward = jde.rdp(STEP, np.inf, direction="backward")
    assert backward == pytest.approx(-np.log1p(-0.1), rel=2e-12)
    assert np.isinf(jde.rdp(BARE, np.inf))
    assert jde.rdp(NEVER, np.inf) == 0
    assert jde.rdp(LAPLACE, [2.0, np.inf]).shape == (2,)
    with pytest.raises(ValueError, match="orders must be > 1, got 1.0"):
        jde.rdp(STEP, 1.0)


def test_orders_with_extremes():
    run = {"num_steps": 10, "method": "rdp", "orders": [1.5, 2.0, 4.0, 8.0, 32.0]}
    found = jde.epsilon(STEP, delta=[0.0, 1e-5, 1.0], **run)
    assert np.isinf(found[0])
    assert found[2] == 0
    assert jde.epsilon(NEVER, delta=0.0, **run) == 0


def every_question(**engine):
    plain = {"num_steps": 10, "delta": 1e-5, **engine}
    one = {"num_steps": 10, "epsilon": 1.0, **engine}
    target = {"epsilon": 2.0, "delta": 1e-5, "method": "rdp", **engine}
    return [
        jde.epsilon(STEP, **plain),
        jde.delta(STEP, **one),
        jde.rdp(STEP, 3.0, **engine),
        jde.epsilon_interval(STEP, **plain),
        jde.delta_interval(STEP, **one),
        jde.privacy_profile(STEP, 1.0, **engine),
        jde.calibrate_noise_multiplier(STEP, num_steps=10, **target),
        jde.calibrate_num_steps(STEP, **target),
        jde.calibrate_rate(STEP, level="example", num_steps=10, **target),
    ]


@pytest.mark.slow
def test_engine_of_every_question(monkeypatch):
    monkeypatch.setenv("JAXDP_EPISODIC_ENGINE", "numpy")
    plain = every_question()
    assert plain[-1] > 0
    for engine in ("auto", "numpy", None):
        assert every_question(engine=engine) == plain


def test_unknown_engines_are_refused():
    for ask in (
        lambda **e: jde.epsilon(STEP, num_steps=10, delta=1e-5, **e),
        lambda **e: jde.rdp(STEP, 3.0, **e),
        lambda **e: jde.privacy_profile(STEP, 1.0, **e),
        lambda **e: jde.calibrate_num_steps(STEP, epsilon=1.0, delta=1e-5, **e),
    ):
        with pytest.raises(ValueError, match="engine must be one of .*got 'cuda'"):
            ask(engine="cuda")
        with pytest.raises(TypeError, match="engine must be a name or None, got 3"):
            ask(engine=3)


@pytest.mark.parametrize(
    ("ask", "points"),
    [
        (jde.privacy_profile, [0.5, 2.0]),
        pytest.param(jde.rdp, [1.5, 8.0], marks=pytest.mark.slow),  # a long compilation
    ],
)
def test_both_engines_give_the_same(ask, points):
    values = [ask(STEP, points, engine=e) for e in ("numpy", "jax")]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-12)


# --- Epsilon just below the largest loss ---


def enumerated_delta(epsilons, at):
    """Delta of composed pure DP: every combination of the losses +e and -e."""
    total = 0.0
    for signs in itertools.product((1, -1), repeat=len(epsilons)):
        pairs = list(zip(signs, epsilons, strict=True))
        loss = math.fsum(s * e for s, e in pairs)
        chance = math.prod(1 / (1 + math.exp(-s * e)) for s, e in pairs)
        total += chance * max(0.0, -math.expm1(at - loss))
    return total


@pytest.mark.parametrize("epsilons", [(1.0, 2.0), (0.3, 0.3, 0.3), (2.0, 0.5, 0.5)])
@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-3, 0.1, 0.29])
def test_pure_dp_up_to_its_largest_loss(epsilons, gap):
    run = jde.compose(*((jde.ApproximateDP(e), 1) for e in epsilons))
    at = sum(epsilons) - gap
    truth = enumerated_delta(epsilons, at)
    # For every method: with one other sign the loss is below epsilon.
    value = jde.delta(run, epsilon=at, method="rdp")
    assert truth * (1 - 1e-12) <= value <= truth * (1 + 1e-9) + 1e-11


def test_laplace_and_failures_near_the_end():
    """Values of dp-accounting's tests."""
    run = jde.compose((jde.LaplaceRelease(1.0), 3), (jde.LaplaceRelease(2.0), 2))
    assert 0 <= jde.delta(run, epsilon=4.0, method="rdp") < 1e-11
    drawn = jde.LaplaceRelease(0.5, sampling_probability=0.2)
    most = 3 * math.log1p(0.2 * math.expm1(2.0))
    gap = np.array([1e-9, 1e-6])
    # All three draws are on one side; the largest loss is less by the gap.
    beyond = (0.8 * math.exp(-2) + 0.2) / 2
    value = jde.delta(drawn, epsilon=most - gap, num_steps=3, method="rdp")
    assert np.all(value <= gap * beyond**3 * 1.01 + 1e-14)
    failing = jde.compose(
        (jde.ApproximateDP(1.0, 0.1), 1), (jde.ApproximateDP(2.0, 0.2), 1)
    )
    assert 0.28 <= jde.delta(failing, epsilon=3.0, method="rdp") < 0.28 + 1e-11


def test_a_setting_without_loss_does_not_affect_others():
    # Gaussian losses are unbounded: delta near 1 was called a certified bound.
    step = jde.GaussianStep(
        jde.Poisson("unit", sampling_probability=0.5), noise_multiplier=2.0
    )
    asked = {"epsilon": 5.0, "return_info": True, "engine": "numpy"}
    alone, info = jde.delta(step, num_steps=10_000, **asked)
    both, infos = jde.delta(step, num_steps=[10_000, 0], **asked)
    assert both.tolist() == [alone, 0.0]
    assert not info.is_certified_bound
    assert infos.is_certified_bound.tolist() == [False, False]

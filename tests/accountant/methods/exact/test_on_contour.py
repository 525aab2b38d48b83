"""Exact answers without a host: those of the method, or NaN; on NumPy, uncompiled."""

from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import integral, on_contour
from jaxdp_episodic.accountant.methods.run import Group

NOISES = np.array([0.7, 0.9, 1.1, 2.0, 4.0, 1.3])
RATES = np.array([0.01, 0.002, 0.05, 0.1, 0.02, 0.3])
COUNTS = np.array([1000.0, 20000.0, 300.0, 5000.0, 100.0, 50.0])
DELTAS = np.array([1e-5, 1e-7, 1e-4, 1e-6, 1e-5, 1e-9])
# Of the settings, which are random ones.
RANDOM = np.random.default_rng(31)
MANY = 60


@pytest.fixture(autouse=True)
def _branches_not_taken():
    with np.errstate(all="ignore"):
        yield


def groups(noise: Any, rate: Any, count: Any) -> tuple[Group, ...]:
    """Steps of arrays (n,), or several of each setting, (K, n)."""
    noise, rate, count = np.broadcast_arrays(*map(np.atleast_2d, (noise, rate, count)))
    loss = SampledGaussianLoss(np.ones(rate.shape), rate, 1 / noise)
    return (Group(loss, np.asarray(count, np.float64)),)


def step(noise: Any, rate: Any) -> jde.GaussianStep:
    scheme = jde.Poisson("example", sampling_probability=rate)
    return jde.GaussianStep(scheme, noise_multiplier=noise)


def epsilon(noise, rate, count, delta):
    return on_contour.bound(
        "epsilon", np.log(delta), groups(noise, rate, count), np.size(delta)
    )


def delta(noise, rate, count, epsilon):
    given = groups(noise, rate, count)
    value, held = on_contour.bound("delta", epsilon, given, np.size(epsilon))
    return np.exp(value), held


def check(found: np.ndarray, true: np.ndarray, least_known: float) -> None:
    """Equal to what "exact" promises, where it is known: both are one pass or more."""
    known = ~np.isnan(found)
    assert np.mean(known) >= least_known
    np.testing.assert_allclose(found[known], true[known], rtol=1e-6)


def test_they_are_the_methods() -> None:
    found, _ = epsilon(NOISES, RATES, COUNTS, DELTAS)
    asked = {"num_steps": COUNTS, "engine": "numpy"}
    true = jde.epsilon(step(NOISES, RATES), delta=DELTAS, **asked)
    check(found, true, 1.0)
    found, _ = delta(NOISES, RATES, COUNTS, true)
    check(found, jde.delta(step(NOISES, RATES), epsilon=true, **asked), 0.8)


def test_of_random_settings() -> None:
    noise = RANDOM.uniform(0.6, 4.0, MANY)
    rate = np.exp(RANDOM.uniform(np.log(1e-4), np.log(0.3), MANY))
    count = np.round(np.exp(RANDOM.uniform(np.log(20), np.log(20_000), MANY)))
    target = np.exp(RANDOM.uniform(np.log(1e-9), np.log(1e-3), MANY))
    asked = {"num_steps": count, "engine": "numpy"}
    found, _ = epsilon(noise, rate, count, target)
    true = jde.epsilon(step(noise, rate), delta=target, **asked)
    check(found, true, 0.8)
    target = true * RANDOM.uniform(0.7, 1.4, MANY)
    found, _ = delta(noise, rate, count, target)
    check(found, jde.delta(step(noise, rate), epsilon=target, **asked), 0.6)


def test_composed_runs() -> None:
    first, second = step(NOISES, RATES), step(2.0, 0.02)
    run = jde.compose((first, COUNTS), (second, 200))
    both = np.stack([NOISES, 0 * NOISES + 2.0]), np.stack([RATES, 0 * RATES + 0.02])
    found, _ = epsilon(*both, np.stack([COUNTS, 0 * COUNTS + 200]), DELTAS)
    check(found, jde.epsilon(run, delta=DELTAS, engine="numpy"), 0.8)


@pytest.mark.parametrize(
    "what",
    [
        {"count": 1.0},  # a profile
        {"rate": 1.0},  # one Gaussian
        {"noise": 0.05},  # densities are rounded
        {"delta": 0.9},  # total variation
    ],
    ids=str,
)
def test_what_another_rule_answers_is_nan(what) -> None:
    arrays = {"noise": NOISES, "rate": RATES, "count": COUNTS, "delta": DELTAS}
    before, _ = epsilon(**arrays)
    ((name, value),) = what.items()
    other = {**arrays, name: np.where(np.arange(6) == 2, value, arrays[name])}
    found, _ = epsilon(**other)
    np.testing.assert_array_equal(np.isnan(found), np.arange(6) == 2)
    np.testing.assert_array_equal(np.delete(found, 2), np.delete(before, 2))


def test_errors_and_the_other_direction_leave_no_answer(monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(on_contour, "TOLERANCE", 0.0)
        for ask in (epsilon, delta):
            assert np.isnan(ask(NOISES, RATES, COUNTS, DELTAS)[0]).all()
    monkeypatch.setattr(on_contour, "_backward_is_less", lambda e, *_: e != e)
    for ask in (epsilon, delta):
        assert np.isnan(ask(NOISES, RATES, COUNTS, DELTAS)[0]).all()


def test_the_other_direction_is_never_said_to_be_less_where_it_is_not() -> None:
    """Next to its own delta, where that is known."""
    given = groups(NOISES, RATES, COUNTS)
    at, held = epsilon(NOISES, RATES, COUNTS, DELTAS)
    steps = on_contour._steps(given, held.log_cut, backward=False)
    others = on_contour._steps(given, held.log_cut, backward=True)
    laid = contours.lay_contour(at, others)
    true = integral.log_delta(at, laid, others, num_nodes=449)
    known = true.log_error < 1e-5
    assert np.sum(known) >= 3
    order = 1 + 10.0 ** np.arange(-1, 3, 0.25)[:, None] + 0 * at

    def less(log_delta, order):
        asked = at, log_delta, order, held.log_cut, given, steps
        return on_contour._backward_is_less(*asked)

    for one in order:
        assert not np.any(less(true.value - 1e-4, one)[known])
    assert np.all(less(true.value + 0.5, order[0])[known])


def difference(function, h):
    """Of fourth order."""
    near, far = function(h) - function(-h), function(2 * h) - function(-2 * h)
    return (8 * near - far) / (12 * h)


@pytest.mark.parametrize("kind", ["epsilon", "delta"])
def test_derivatives(kind) -> None:
    """What is held need not move: differences of it are those of the answer."""
    ask = epsilon if kind == "epsilon" else delta
    at = NOISES, RATES, COUNTS
    target = np.log(DELTAS) if kind == "epsilon" else epsilon(*at, DELTAS)[0]
    value, held = ask(*at, DELTAS if kind == "epsilon" else target)
    value = value if kind == "epsilon" else np.log(value)
    size = target.size

    def moved(h):
        given = groups(NOISES * (1 + h), RATES, COUNTS)
        return on_contour.at_contour(kind, target, given, size, held)

    np.testing.assert_allclose(moved(0.0), value, rtol=1e-6)
    h = 1e-4
    slope = difference(moved, h)
    known = ~np.isnan(slope)
    assert np.mean(known) > 0.8

    def plain(h):
        asked = {"num_steps": COUNTS, "engine": "numpy"}
        one = step(NOISES * (1 + h), RATES)
        if kind == "epsilon":
            return jde.epsilon(one, delta=DELTAS, **asked)
        return np.log(jde.delta(one, epsilon=target, **asked))

    # Answers are known to 1e-9, and differences to less.
    true = difference(plain, 1e-2)
    np.testing.assert_allclose(slope[known], true[known], rtol=1e-5)


def test_derivatives_of_poor_answers_are_nan() -> None:
    _, held = epsilon(NOISES, RATES, COUNTS, DELTAS)
    held = held._replace(error=np.where(np.arange(6) == 1, 2e-7, held.error))
    given = groups(NOISES, RATES, COUNTS)
    found = on_contour.at_contour("epsilon", np.log(DELTAS), given, 6, held)
    np.testing.assert_array_equal(np.isnan(found), np.arange(6) == 1)

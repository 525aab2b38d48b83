"""Tiny deltas and extreme noises: errors must be stated."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.gaussian_mixtures import GaussianMixtureLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.exact import contour, integral, mgf, solver
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound, rdp_curve
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Run


def sampled(rate, noise):
    scheme = jde.Poisson("user", sampling_probability=rate)
    return jde.GaussianStep(scheme, noise_multiplier=noise)


def test_a_tiny_delta_has_an_honest_error():
    # Regression: 0.033097 with a stated error of 6e-15; by mpmath it is 0.017833.
    truth, run = 0.017833, {"num_steps": 2, "delta": 1e-195}
    value, info = jde.epsilon(sampled(1e-6, 3.0), **run, return_info=True)
    assert truth * (1 - 1e-4) <= value <= 0.0283
    assert info.is_certified_bound and info.error >= value - truth


@pytest.mark.slow
def test_rare_units_at_a_tiny_delta_get_the_lowest_certified_end():
    # Regression: 6.5284, above the certified end.
    step = jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("a", sampling_probability=1e-5),
            jde.WithoutReplacement("b", size=10, population=100),
        ),
        noise_multiplier=1.5634543719362126,
        clip_unit="a",
        privacy_unit="b",
    )
    run = {"num_steps": 100_000, "delta": 1e-200}
    value, info = jde.epsilon(step, **run, return_info=True)
    assert info.is_certified_bound and value <= 6.32
    assert value <= jde.epsilon_interval(step, **run)[1] * (1 + 1e-12)
    assert value < jde.epsilon(step, **run, method="rdp")


def test_nearly_zero_noise():
    """Only the number of draws counts: at most six with probability 1 - 1e-5."""
    rate, noise, steps, delta = 0.1, 1e-3, 10, 1e-5
    left = delta - binom.sf(6, steps, rate)
    place = norm.isf(left / binom.pmf(6, steps, rate))
    truth = 6 * (0.5 / noise**2 + np.log(rate)) + 4 * np.log1p(-rate)
    truth += np.sqrt(6) / noise * place
    step = sampled(rate, noise)
    value, info = jde.epsilon(step, num_steps=steps, delta=delta, return_info=True)
    assert truth * (1 - 1e-4) <= value <= truth * (1 + 1e-4)  # regression: 3.689e6
    assert info.is_certified_bound and value - info.error <= truth <= value


def test_a_far_too_large_guess_is_dropped_quickly():
    """The contour at 4e-5 only shows that epsilon is far below it."""
    step, run = sampled(2.26e-10, 2.007), {"num_steps": 74006, "delta": 4.41e-9}
    value, info = jde.epsilon(step, **run, return_info=True)
    assert not info.is_certified_bound and info.error <= 1e-9
    assert jde.delta(step, num_steps=74006, epsilon=value) == pytest.approx(4.41e-9)
    lower, upper = jde.epsilon_interval(step, **run)
    assert lower <= value <= upper


def test_an_epsilon_of_0_by_its_own_bound_is_exact():
    """Where the bound is 0 there is no contour, and none is needed."""
    step, run = sampled(1.127e-6, 9.8455), {"num_steps": 11_520, "delta": 2.55e-5}
    value, info = jde.epsilon(step, **run, return_info=True)
    assert value == 0 and info.error == 0 and not info.is_certified_bound
    assert jde.delta(step, num_steps=11_520, epsilon=0.0) < 2.55e-5


@pytest.mark.parametrize(
    ("size", "noise", "num_steps", "delta"),
    # The kernel's own bound, at orders without truncation, does not hold here.
    [(22, 0.8953, 276, 0.12), (10, 0.5, 100, 1e-5), (1, 0.49796, 6, 1e-3)],
)
def test_classes_of_every_step_at_large_epsilons(size, noise, num_steps, delta):
    """The run's losses are large where their distribution is cut."""
    examples = jde.WithoutReplacement("example", size=size, population=50)
    episodes = jde.Poisson("episode", sampling_probability=1.0)
    design = jde.GroupedClasses(
        num_classes=5, ways=5, episodes=episodes, examples=examples
    )
    step = jde.GaussianStep(design, noise_multiplier=noise)
    run = {"num_steps": num_steps, "delta": delta}
    value, info = jde.epsilon(step, **run, return_info=True)
    assert not info.is_certified_bound and info.error <= 1e-6 * value
    assert jde.delta(step, num_steps=num_steps, epsilon=value) == pytest.approx(delta)
    lower, upper = jde.epsilon_interval(step, **run)
    assert lower - info.error <= value <= upper + info.error


@pytest.mark.few(1)
@pytest.mark.parametrize("nodes", [96, 128, 160])
def test_a_sum_above_1_is_no_delta(nodes, monkeypatch):
    """Regression: 128 nodes gave e^89 with a stated error of 3e-7; the truth is 1."""
    every = tuple(effort._replace(contour_nodes=nodes) for effort in solver.PASSES[:1])
    monkeypatch.setattr(solver, "PASSES", every)
    step = sampled(0.8573658, 0.32763965)
    found, info = jde.delta(step, num_steps=2_656, epsilon=0.01564951, return_info=True)
    assert found == pytest.approx(1.0) and info.is_certified_bound


# --- The trapezoidal rule's error, and the search at kinks ---


@pytest.mark.parametrize("rare", [0.0, 1e-4])
def test_the_error_estimate_has_no_coincidental_zeros(rare):
    """Bumps ``1 / cosh`` on both sides of 0, and rare ones a tenth as wide."""
    step = 0.45
    place = step * np.arange(4.0, 9.0, 1 / 8)
    u = step * np.arange(97)[:, None]
    weight = step * np.where(u > 0, 1.0, 0.5)

    def bumps(width: float) -> np.ndarray:
        below, above = ((u + sign * place) / width for sign in (1, -1))
        return (1 / np.cosh(below) + 1 / np.cosh(above)) / width

    values = weight * (bumps(1.0) + rare * bumps(0.1))
    error = np.abs(values.sum(axis=0) - np.pi * (1 + rare))
    halved = np.abs(values.sum(axis=0) - 2 * values[::2].sum(axis=0))
    stated = integral._aliasing(integral._waves(97, 1)[0] @ values)
    assert np.any(halved < 0.5 * error)  # the estimate by one difference
    assert np.all(stated > error)
    # At most nine times the largest change by halving the nodes.
    assert np.all(stated < 9 * halved.max())


@pytest.mark.parametrize("guess", [0.9999, 1.0003])
def test_the_search_does_not_stop_across_an_atom(guess, monkeypatch):
    """The slope jumps there, which no curvature before it announces."""

    def kinked(_, __, x):
        value = np.where(x < 1, -x, -1 - 4 * (x - 1))
        return value, np.where(x < 1, 1.0, 4.0), 0 * x, np.full_like(x, 1e-6), 0 * x

    monkeypatch.setattr(integral, "_prepare", lambda *_: None)
    monkeypatch.setattr(integral, "_integrate", kinked)
    steps: Any = SimpleNamespace(count=np.ones((1, 1)), is_discrete=True)
    true = 1.0001 if guess < 1 else 0.9999  # beyond the kink
    goal, start, highest = (np.array([x]) for x in (kinked(0, 0, true)[0], guess, 2.0))
    line = contours.Contour(*[np.ones(1)] * 6)
    found = integral.search(
        goal, start, highest, line, (steps,), integral.Blocks(1, 2, 1)
    )
    assert abs(found.value[0] - true) * 4 <= found.log_error[0] <= 2e-6


# --- The first bound of epsilon, before any contour ---


def sampled_loss(rate, noise, outer=1.0):
    return SampledGaussianLoss(*np.array([[outer], [rate], [1 / noise]]))


def mixture(rate, noise):
    shifts = (np.array([0.5 / noise]), np.array([1 / noise]))
    weights = (np.log([0.7]), np.log([0.3]))
    return GaussianMixtureLoss(np.ones(1), np.array([rate]), shifts, weights)


SETTINGS = [
    (sampled_loss(0.01, 1.0), 1_000.0, 1e-5),
    (sampled_loss(0.3, 0.8), 20.0, 1e-8),
    (sampled_loss(0.02, 0.6, outer=0.1), 5_000.0, 1e-6),
    (sampled_loss(0.97, 3.0), 50.0, 1e-5),
    (mixture(0.05, 1.2), 300.0, 1e-5),
]


def steps_of(loss, count, log_delta):
    run = Run((loss,), (np.array([count]),))
    cut, nothing = np.array([log_delta - np.log(count) - 50]), np.zeros(1)
    (group,) = run.groups()
    kinds = {"num_nodes": 112, "num_terms": 2}
    return run, group, mgf.steps_of(group, nothing, cut, **kinds)


@pytest.mark.parametrize("loss, count, delta", SETTINGS)
def test_moments_of_the_exchanged_pair_are_bounded(loss, count, delta):
    run, _, steps = steps_of(loss, count, np.log(delta))
    c = np.geomspace(0.1, 300, 24)[:, None]
    with np.errstate(all="ignore"):
        bound = mgf.exchanged_moments(c, steps)
    truth = c * rdp_curve(1 + c, run, "backward")
    known = np.isfinite(bound)
    assert np.all(truth <= bound)
    # Close enough to be useful, at least at small orders.
    assert known[0] and np.all(
        bound[:8][known[:8]] <= 1.01 * truth[:8][known[:8]] + 0.01
    )


def test_moments_of_truncated_terms_are_unknown():
    """The integrand of a high order is far left of where the nodes begin."""
    _, _, steps = steps_of(*SETTINGS[3][:2], np.log(1e-5))
    with np.errstate(all="ignore"):
        bound = mgf.exchanged_moments(np.array([[1.0], [1e3]]), steps)
    assert np.isfinite(bound[0]) and np.isinf(bound[1])


@pytest.mark.parametrize("loss, count, delta", SETTINGS)
def test_the_bound_is_above_the_best_one(loss, count, delta):
    log_delta = np.log([delta])
    run, group, steps = steps_of(loss, count, log_delta[0])
    with np.errstate(all="ignore"):
        first = contour.first_epsilon(log_delta, np.array([np.inf]), (group,), (steps,))
    best, _ = rdp_bound(EpsilonAt(log_delta), run)
    c = first.order - 1
    curve = rdp_curve(first.order, run, "forward")
    there = curve + np.log1p(-1 / first.order) - (log_delta + np.log1p(c)) / c
    assert first.highest == pytest.approx(there, rel=1e-8)
    assert best * (1 - 1e-9) <= first.highest <= 3 * best
    assert 0.3 * best < first.epsilon < best

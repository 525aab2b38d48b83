"""Tiny deltas and extreme noises: errors must be stated."""

import numpy as np
import pytest
from scipy.stats import binom, norm

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.methods.exact import solver


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

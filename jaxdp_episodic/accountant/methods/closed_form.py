"""Runs with a closed form: one step, or Gaussian steps alone."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import Profile
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Question, Run
from jaxdp_episodic.accountant.numerics.loops import Array, namespace
from jaxdp_episodic.accountant.numerics.roots import smallest_within

# Nats of delta, the largest stated error, within which directions count as equal.
_ALIKE = 1e-6


def solve_single_step(question: Question, run: Run) -> np.ndarray:
    """Returns epsilon or log(delta) of runs of one step, which may differ in it."""
    solve = epsilon_of_profile if isinstance(question, EpsilonAt) else delta_of_profile
    value = np.full(question.target.shape, question.nothing)
    for loss, count in run.uses:
        taken = np.flatnonzero(count == 1)
        if taken.size:
            one = loss.map(lambda field, taken=taken: field[taken]).kept_in_range()
            value[taken] = solve(question.target[taken], one)
    return value


def error_in_nats(
    error: np.ndarray, epsilon: np.ndarray, question: Question, run: Run
) -> np.ndarray:
    """Returns the error of a single step's epsilon, given the relative one of delta."""
    # From the slope of log(delta), which is far below 1 / epsilon at large deltas.
    inside = np.isfinite(epsilon) & (epsilon >= 0)
    at = np.where(inside, epsilon, 1.0)
    log_delta, slope = np.zeros(epsilon.shape), np.ones(epsilon.shape)
    for loss, count in run.uses:
        taken = np.flatnonzero(count == 1)
        if taken.size:
            one = loss.map(lambda field, taken=taken: field[taken]).kept_in_range()
            log_delta[taken], slope[taken] = slope_of_profile(at[taken], one)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nats = error * np.maximum(np.maximum(epsilon, 0.0), 1 / slope)
        private = (epsilon <= 0) & (log_delta + error < question.target)
    return np.where(inside, np.where(private, 0.0, nats), error)


def _log_delta(epsilon: Array, loss: Profile) -> Array:
    xp = namespace(epsilon, loss.outer_rate)
    (forward, _), (backward, _) = loss.log_tails(epsilon)
    return xp.minimum(xp.maximum(forward, backward), 0.0)


def _epsilon(log_delta: Array, loss: Profile) -> Array:
    """Returns the epsilon at which the profile, as computed, is at most delta."""
    xp = namespace(log_delta, loss.outer_rate)

    def excess(x: Array) -> Array:
        return _log_delta(x, loss) - log_delta

    at_zero = excess(xp.zeros_like(log_delta)) <= 0
    found = smallest_within(excess, xp.where(at_zero, 0.0, 1.0))
    return xp.where(at_zero, 0.0, found)


def _slope(epsilon: Array, loss: Profile) -> tuple[Array, Array]:
    """Returns ``log(delta)`` and minus its derivative, of the larger direction."""
    # If both are equal, as at 0, the one with the smaller slope is larger further on.
    xp = namespace(epsilon, loss.outer_rate)
    (forward, tail_forward), (backward, tail_backward) = loss.log_tails(epsilon)
    profile = xp.maximum(forward, backward)
    tail = xp.where(forward >= backward, tail_forward, tail_backward)
    are_alike = xp.minimum(forward, backward) > profile - _ALIKE
    tail = xp.where(are_alike, xp.minimum(tail_forward, tail_backward), tail)
    # Beyond the largest loss profile and tail are 0.
    slope = xp.exp(xp.where(xp.isfinite(profile), tail - profile, 0.0))
    return profile, slope


delta_of_profile = float64_boundary(_log_delta)
epsilon_of_profile = float64_boundary(_epsilon)
slope_of_profile = float64_boundary(_slope)


# Relative rounding error of the shift of composed Gaussians, for each step.
_SHIFT_ROUNDING = 4e-16


def one_gaussian(shift: np.ndarray) -> SampledGaussianLoss:
    """Returns the one step that Gaussian steps compose to; see `Run.gaussian_shift`."""
    always = np.ones(np.shape(shift))
    return SampledGaussianLoss(always, always, shift)


def shift_error(run: Run) -> float:
    """Bounds the relative rounding error of `Run.gaussian_shift`."""
    return _SHIFT_ROUNDING * (2 + len(run.losses))

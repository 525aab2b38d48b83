"""Runs with a closed form: one step, one mechanism, or few losses."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.finite import tails_of_values
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import FiniteValues, Profile
from jaxdp_episodic.accountant.losses.randomized_response import RandomizedResponseLoss
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Question, Run
from jaxdp_episodic.accountant.numerics.binomial import log_binomial
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
# Largest number of losses of a run that are listed: 1 to 2 ms. And for steps with two
# losses each, such as randomized response, which are listed faster: half a second.
_MOST_LOSSES = 4096
_MOST_OF_TWO = 2**17
# Rounding of a loss, or of a log-probability, relative to 1 plus its absolute value.
_ROUNDING = 1e-15


def have_closed_form(run: Run) -> np.ndarray:
    """Whether all steps have finitely many losses, and the run not too many."""
    number, of_two = np.ones(run.shape), np.ones(run.shape, bool)
    for loss, count in run.uses:
        taken = (count > 0) & ~loss.loses_nothing
        ways, values = np.inf, 0
        if isinstance(loss, FiniteValues):
            ways, values = 1.0, loss.num_values
            for i in range(1, values):  # (count + values - 1)! / (count! (values - 1)!)
                ways = np.minimum(ways * (count + i) / i, 1e9)
        number = np.where(taken, number * ways, number)
        of_two &= ~taken | (values == 2)
    return number <= np.where(of_two, _MOST_OF_TWO, _MOST_LOSSES)


@np.errstate(all="ignore")
def composed(question: Question, run: Run) -> tuple[float, float]:
    """Returns the answer of one setting by sums over all losses; its error, nats."""
    taken: list[tuple[Any, float]] = [
        (loss.kept_in_range(), float(count))
        for loss, count in run.uses
        if count > 0 and not loss.loses_nothing
    ]
    target, of_epsilon = float(question.target), question.is_epsilon
    if not of_epsilon and all(
        isinstance(loss, RandomizedResponseLoss) for loss, _ in taken
    ):
        # Exact arithmetic decides for randomized response.
        largest = [float(loss.largest_loss(backward=False)) for loss, _ in taken]
        counts = [int(count) for _, count in taken]
        most = sum(Fraction(a) * n for a, n in zip(largest, counts, strict=True))
        if Fraction(target) >= most:
            return -np.inf, 0.0
    loss, log_mass = np.zeros(1), np.zeros(1)
    off = move = 0.0
    for one, count in taken:
        once, log_once = one.values()
        values, log_masses = _repeated(once, log_once, int(count))
        loss = (loss[:, None] + values).reshape(-1)
        log_mass = (log_mass[:, None] + log_masses).reshape(-1)
        most, size = np.abs(values).max(), np.abs(log_masses).max()
        off += float(one.profile_error()) * (count + size + most)
        move += _ROUNDING * most

    def tails(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the log-profile and log-tail of the larger direction, at (1,) u."""
        both = (
            tails_of_values(u, loss[:, None], log_mass[:, None]),
            tails_of_values(u, -loss[:, None], (log_mass - loss)[:, None]),
        )
        return max(both, key=lambda tail: float(tail[0][0]))

    value = target
    if of_epsilon:
        zero = np.zeros(1)
        profile, fall = (float(tail[0]) for tail in tails(zero))
        if profile <= target:
            # Because of rounding the true profile may be above the target.
            unsure = profile + off > target
            return 0.0, off * math.exp(min(target - fall, 700.0)) if unsure else 0.0
        value = float(smallest_within(lambda u: tails(u)[0] - target, zero + 1.0)[0])
    profile, fall = (float(tail[0]) for tail in tails(np.array([value])))
    move += _ROUNDING * abs(value)
    if of_epsilon:
        return value, off * math.exp(min(target - fall, 700.0)) + move
    if profile == -np.inf:  # next to the largest loss rounding decides
        return profile, (0.0 if value > loss.max() + 2 * move else np.inf)
    return min(profile, 0.0), off + move * math.exp(min(fall - profile, 700.0))


def _repeated(
    loss: np.ndarray, log_mass: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the losses of ``count`` equal steps, and their log-probabilities."""
    size = len(loss)
    if size == 1:
        return count * loss, count * log_mass
    if size == 2:
        first = np.arange(count + 1)
        times = np.stack([first, count - first], axis=1)
    else:
        # Stars and bars: the stars between two bars are how often a value occurs.
        bars = np.array(list(combinations(range(count + size - 1), size - 1)))
        ends = np.full((len(bars), 1), count + size - 1)
        times = np.diff(np.hstack([0 * ends - 1, bars, ends]), axis=1) - 1
    left = count - np.cumsum(times, axis=1) + times
    ways = log_binomial(left.astype(np.float64), times.astype(np.float64)).sum(axis=1)
    return times @ loss, ways + times @ log_mass


def one_gaussian(shift: np.ndarray) -> SampledGaussianLoss:
    """Returns the one step that Gaussian steps compose to; see `Run.gaussian_shift`."""
    always = np.ones(np.shape(shift))
    return SampledGaussianLoss(always, always, shift)


def shift_error(run: Run) -> float:
    """Bounds the relative rounding error of `Run.gaussian_shift`."""
    return _SHIFT_ROUNDING * (2 + len(run.losses))

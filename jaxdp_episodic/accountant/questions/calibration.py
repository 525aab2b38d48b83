"""Calibration: the noise, number of steps or rate that meets a target epsilon."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import asking_together
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    EpochScheme,
    GroupedClasses,
    Poisson,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.releases import RELEASES, LaplaceRelease
from jaxdp_episodic.accountant.describe.runs import refuse_disjoint
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import GaussianStep, OneStep, rate_places
from jaxdp_episodic.accountant.methods.run import EpsilonAt
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions.api import check_method, public_function
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of
from jaxdp_episodic.accountant.questions.worst_path import CONTOUR, answer

# Lower estimate of d log epsilon / d log(1 / noise).
_OF_NOISE = 0.9
# Lower estimate of d log epsilon / d log(number of steps).
OF_STEPS = 0.45
# Largest and smallest first step of a bracket, in the logarithm of the setting.
_FARTHEST = np.log(16.0)
_NEAREST = 5e-4
# Smallest and largest noise multiplier of the search.
_LEAST_NOISE = 1e-9
MOST_NOISE = 1e18
# Target epsilon, in nats, above which the Rényi bound replaces certified ends: with so
# little noise one takes up to 20 s.
_LARGE = 500.0
# The methods above it.
_QUICK = {"exact": CONTOUR, "pld": "rdp", "rdp": "rdp"}
# Relative rounding error of the Rényi bound at orders near 1, per nat of the target: a
# search cannot be more precise (from 1e12 nats it took 10, then 33 and 56 calls).
_ROUNDING_OF_ORDERS = 0.1 * 2.0**-52
# Part of the target below which epsilon counts as 0: it may be an error of rounding.
_NONE = 1e-4
# Largest relative tolerance.
COARSEST = 0.1
# Relative tolerance of a noise multiplier or a probability.
_TOLERANCE = 1e-7
_checked_tolerance = _validation.reals(
    f"lie in [{_TOLERANCE:g}, {COARSEST:g}]",
    lambda a: (a >= _TOLERANCE) & (a <= COARSEST),
)
# Approximate number of evaluations of a setting.
_EVALUATIONS = 10
# Noise multiplier below which a warning says that there is hardly any protection: the
# unit changes the sum by a thousand standard deviations.
_NEXT_TO_NONE = 1e-3
# Smallest sampling probability of the search.
_SMALLEST_PROBABILITY = 1e-15
# Largest number of steps that float64 counts exactly.
_MAX_STEPS = 2**53
# Longest epoch of the search, in steps.
_LONGEST_EPOCH = 2**30

NUM_STEPS = "num_steps"
Excess = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From numbers and elements to the elements' ``log(epsilon / target)``."""


class Targets:
    """The flattened targets of one calibration, and the runs that must meet them."""

    def __init__(
        self, step: OneStep, epsilon: Any, delta: Any, num_steps: Any, method: str
    ) -> None:
        targets = {
            "epsilon": _validation.positive_array("epsilon", epsilon),
            "delta": _validation.positive_share_array("delta", delta),
            "num_steps": _validation.integer_array("num_steps", num_steps, minimum=0),
        }
        self.shape = _validation.broadcast_shape(step=step, **targets)
        self.size = int(np.prod(self.shape))
        self.epsilon, self.delta, self.num_steps = (
            np.broadcast_to(target.astype(np.float64), self.shape).reshape(-1)
            for target in targets.values()
        )
        self.step, self.method = step, method
        self.runs = runs_of(step, targets["num_steps"])
        for run in self.runs:
            run.refuse(method)

    def smallest_noise(self, tolerance: float) -> np.ndarray:
        """Returns (n,) smallest noise within the target; inf where none is."""
        by_noise = self.excess_by("noise_multiplier")

        def excess(inverse: np.ndarray, active: np.ndarray) -> np.ndarray:
            return by_noise(1 / inverse, active)

        # Rounding at large targets may exceed the tolerance.
        rounded = np.minimum(_ROUNDING_OF_ORDERS * self.epsilon, COARSEST)
        ends = 1 / MOST_NOISE, 1 / _LEAST_NOISE
        start = self.initial_inverse_noise()
        low, high, ends = bracket(excess, start, *ends, _OF_NOISE)
        tolerances = np.maximum(tolerance, rounded)
        with np.errstate(divide="ignore"):
            return 1 / largest_within(
                excess, low, high, tolerance=tolerances, ends=ends
            )

    def excess_by(self, place: str) -> Excess:
        """Returns the excess as a function of the number at a field path."""

        def excess(value: np.ndarray, active: np.ndarray) -> np.ndarray:
            found, large = np.empty(active.size), self.epsilon[active] > _LARGE
            for method, some in ((self.method, ~large), (_QUICK[self.method], large)):
                if np.any(some):
                    asked = place, value[some], active[some], method
                    found[some] = self.excess(*asked)
            return found

        return excess

    def excess(
        self, place: str, value: np.ndarray, active: np.ndarray, method: str
    ) -> np.ndarray:
        """Returns ``log(epsilon / target)`` of some elements, one number changed."""

        def changed(where: str, number: Any) -> Any:
            if where == place or not np.ndim(number):
                return value if where == place else number
            return np.broadcast_to(number, self.shape).reshape(-1)[active]

        steps = value if place == NUM_STEPS else self.num_steps[active]
        runs = runs_of(mapped(self.step, changed), steps)
        found = answer(EpsilonAt(np.log(self.delta[active])), runs, method)
        # The estimate of its error is added; that of a bound is not known.
        is_bound = found.is_certified | (method == "rdp")
        epsilon = found.value + np.where(is_bound, 0.0, found.error)
        with np.errstate(divide="ignore", over="ignore"):
            share = epsilon / self.epsilon[active]
            return np.log(np.where(share < _NONE, 0.0, share))

    def initial_inverse_noise(self) -> np.ndarray:
        """*Estimates* the inverse noise of the targets, from which a search starts."""
        # The smaller one of two: a Gaussian with the variance of all losses has that
        # epsilon, or the furthest loss of one step, at delta over the number of draws.
        shape = (*self.shape, 1)
        epsilon, nats = self.epsilon.reshape(shape), -np.log(self.delta).reshape(shape)
        mean = _shift_of(epsilon, 2 * nats) ** 2
        found = np.full(self.shape, np.inf)
        with np.errstate(all="ignore"):
            run = self.runs[0]
            for loss, count in zip(run.losses, run.counts, strict=True):
                rate, odds, _, furthest = loss.hints()
                each, odds = mean / (count * loss.outer_rate), np.maximum(odds, 1e-60)
                # The variance is at most rate² (e^{s²} - 1) and rate (s² + s⁴/4).
                square = np.maximum(
                    np.log1p(each / rate**2), 2 * (np.sqrt(1 + each / rate) - 1)
                )
                draws = np.log(count * loss.outer_rate * rate)
                one = _shift_of(
                    epsilon - np.minimum(np.log(odds), 0.0),
                    2 * np.maximum(nats + draws, 0.0),
                )
                shift = np.fmin(np.sqrt(square), one) / furthest
                found = np.fmin(found, shift.min(axis=-1))  # NaN: no noise is needed
        return found.reshape(-1)


def _shift_of(epsilon: np.ndarray, twice_nats: np.ndarray) -> np.ndarray:
    """*Estimates* the shift of a Gaussian mechanism with that epsilon."""
    # From epsilon = mu²/2 + mu sqrt(2 l), l the negative logarithm of delta.
    return 2 * epsilon / (np.sqrt(twice_nats + 2 * epsilon) + np.sqrt(twice_nats))


def bracket(
    excess: Any, start: np.ndarray, floor: float, ceiling: float, slope: float
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Moves from ``start`` by growing factors until the sign changes.

    Returns the ends with ``excess <= 0`` and ``> 0`` (0 if none), and both excesses.
    """
    x, active = np.clip(start, floor, ceiling), np.arange(start.size)
    low, high = np.zeros((2, x.size))
    below, above = np.full((2, x.size), np.nan)
    factor = None
    while active.size:
        at = x[active]
        value = excess(at, active)
        ok = value <= 0
        for end, values, some in ((low, below, ok), (high, above, ~ok)):
            end[active[some]], values[active[some]] = at[some], value[some]
        if factor is None:
            far = np.fmin(np.abs(value) / slope, _FARTHEST)
            factor = np.exp(np.maximum(far, _NEAREST))
        going = np.where(ok, at < ceiling, at > floor)
        active = active[going & ((low[active] == 0) | (high[active] == 0))]
        grown = x[active] * np.where(low > 0, factor, 1 / factor)[active]
        grown = np.rint(grown) if floor == 1.0 else grown
        x[active] = np.clip(grown, floor, ceiling)
        factor = np.minimum(factor * factor, 1e4)
    return low, np.where(low > 0, high, 0.0), (below, above)


@public_function(None)
def calibrate_noise_multiplier(
    step: GaussianStep | LaplaceRelease,
    *,
    epsilon: Any,
    delta: Any,
    num_steps: Any,
    method: str = "exact",
    tolerance: float = _TOLERANCE,
    engine: str | None = None,
) -> np.ndarray | np.float64:
    """Returns the smallest noise multiplier that keeps epsilon within the target.

    Args:
      step: the step, or a `LaplaceRelease`; its own noise is ignored.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1]; at 1 every setting meets the target.
      num_steps: whole number >= 0.
      method: how epsilon is computed; see `epsilon`.
      tolerance: largest relative excess over the smallest noise, in [1e-7, 0.1].
      engine: see `epsilon`.

    Returns:
      float64 of the broadcast shape: a noise multiplier that was checked to meet the
      target, within ``tolerance`` of the smallest one. 0 if nothing is sampled or
      ``num_steps`` is 0; ``inf`` if a noise multiplier of 1e18 is not enough. The noise
      is larger in two cases. At target epsilons above 500 the Rényi bound replaces
      certified bounds: up to a half larger. If 2e-17 times the target exceeds the
      tolerance: by that much, at most 0.1. A warning is issued if the noise is below
      1e-3.
    """
    check_method(method)
    _check_is(step, GaussianStep, LaplaceRelease)
    _validation.one("tolerance", tolerance, _checked_tolerance)
    step = dataclasses.replace(step, noise_multiplier=1.0)
    run = Targets(step, epsilon, delta, num_steps, method)
    with asking_together(run.size * _EVALUATIONS):
        found = run.smallest_noise(tolerance)
    for each in run.runs:  # no step, or no path is sampled
        none = np.broadcast_to(each.facts.loses_nothing.all(axis=-1), run.shape)
        found[none.reshape(-1)] = 0.0
    positive = np.where(found > 0, found, np.inf)
    if np.any(positive < _NEXT_TO_NONE):
        at = np.argmin(positive)
        warnings.warn(
            f"noise_multiplier={found[at]:.3g} is next to none and protects nobody: "
            f"epsilon={run.epsilon[at]:g} and delta={run.delta[at]:g} almost permit a "
            "run without noise; use smaller targets",
            stacklevel=3,
        )
    return found.reshape(run.shape)[()]


@public_function(None)
def calibrate_num_steps(
    step: OneStep,
    *,
    epsilon: Any,
    delta: Any,
    method: str = "exact",
    engine: str | None = None,
) -> np.ndarray | np.int64:
    """Returns the largest number of steps whose epsilon is within the target.

    Args:
      step: the step.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1]; at 1 every setting meets the target.
      method: how epsilon is computed; see `epsilon`.
      engine: see `epsilon`.

    Returns:
      int64 of the broadcast shape; 0 if one step exceeds the target, 2**53 if that many
      steps are within it. At target epsilons above 500 it may be the number by the
      Rényi bound, see `calibrate_noise_multiplier`.
    """
    check_method(method)
    _check_is(step, GaussianStep, *RELEASES)
    run = Targets(step, epsilon, delta, 1, method)

    excess, ends = run.excess_by(NUM_STEPS), (1.0, float(_MAX_STEPS))
    with asking_together(run.size * _EVALUATIONS):
        low, high, ends = bracket(excess, np.ones(run.size), *ends, OF_STEPS)
        found = largest_within(excess, low, high, tolerance=0, integer=True, ends=ends)
    return found.astype(np.int64).reshape(run.shape)[()]


@public_function(None)
def calibrate_rate(
    step: GaussianStep,
    *,
    level: str,
    epsilon: Any,
    delta: Any,
    num_steps: Any,
    method: str = "exact",
    engine: str | None = None,
) -> np.ndarray | np.float64 | np.int64:
    """Returns the largest rate of one level that keeps epsilon within the target.

    Args:
      step: the step; its own rate at ``level`` is ignored.
      level: name of the level whose rate is searched: the sampling probability of
        `Poisson`, the size of `WithoutReplacement`, the epoch length of epoch schemes.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1]; at 1 every setting meets the target.
      num_steps: whole number >= 0.
      method: how epsilon is computed; see `epsilon`.
      engine: see `epsilon`.

    Returns:
      An array of the broadcast shape. For `Poisson`, float64 probabilities that meet
      the target, within 1e-7 relative of the largest. For `WithoutReplacement`, int64
      sizes, at most the population; 0 if even the smallest size (one, or as many
      classes as an episode needs) exceeds the target. For epoch schemes, int64
      steps_per_epoch that meet the target while one step less does not (usually the
      shortest such length); 0 if none up to 2**30 does. At target epsilons above 500
      it may be the rate by the Rényi bound, see `calibrate_noise_multiplier`.

    Raises:
      ValueError: an unknown level, or one without a scheme.
    """
    check_method(method)
    _check_is(step, GaussianStep)
    _validation.choice("level", level, step.design.level_names)
    scheme = next((one for one in step.design.schemes if one.name == level), None)
    if scheme is None:
        raise ValueError(f"level must be one with a scheme, got {level!r}")

    design: Any = step.design
    smallest: Any = scheme.times if isinstance(scheme, RandomAllocation) else 1
    if isinstance(scheme, WithoutReplacement) and isinstance(design, GroupedClasses):
        smallest = design.ways if scheme.name == CLASS else 1
    place = rate_places(step)[level]
    one: Any = mapped(step, lambda where, n: smallest if where == place else n)
    run = Targets(one, epsilon, delta, num_steps, method)
    everywhere = np.arange(run.size)
    initial = float(np.max(smallest, initial=1))
    excess = run.excess_by(place)
    if isinstance(scheme, EpochScheme):
        found = _shortest_epoch(excess, np.full(run.size, initial))
        return found.reshape(run.shape)[()]
    is_share = isinstance(scheme, Poisson)
    ends = (_SMALLEST_PROBABILITY, 1.0)
    if not is_share:
        if level not in (names := one.level_names_used):
            raise ValueError(
                f"level must be one of {names}, at or above the privacy unit, "
                f"got {_validation.shown(level)}"
            )
        group: Any = one.path_rates.group_sizes[names.index(level)]
        # The largest size that matters, or that ``small_units`` permits.
        refused = one.small_units == "error"
        ends = smallest, group.min(axis=-1) if refused else group.max(axis=-1)
    least, most = (
        np.broadcast_to(end, run.shape).reshape(-1).astype(np.float64) for end in ends
    )
    full = excess(most, everywhere) <= 0
    some = excess(least, everywhere) <= 0
    low = np.where(full, most, np.where(some, least, 0.0))
    high = np.where(some & ~full, most, 0.0)
    tolerance = _TOLERANCE if is_share else 0
    found = largest_within(excess, low, high, tolerance=tolerance, integer=not is_share)
    return (found if is_share else found.astype(int)).reshape(run.shape)[()]


def _shortest_epoch(excess: Any, least: np.ndarray) -> np.ndarray:
    """Doubles the epoch length until it meets the target, then bisects."""
    low, high = np.zeros(least.size), least
    active = np.arange(least.size)
    while active.size:
        enough = excess(high[active], active) <= 0
        more = active[~enough & (2 * high[active] <= _LONGEST_EPOCH)]
        high[active[~enough & (2 * high[active] > _LONGEST_EPOCH)]] = 0.0
        low[more], high[more] = high[more], 2 * high[more]
        active = more

    def shorter(inverse: np.ndarray, active: np.ndarray) -> np.ndarray:
        return excess(low[active] + high[active] - inverse, active)

    # `largest_within` needs an epsilon that grows: mirror the length.
    start, stop = np.where(low > 0, low, high), np.where(low > 0, high, 0.0)
    found = largest_within(shorter, start, stop, tolerance=0, integer=True)
    return np.where(low > 0, low + high - found, high).astype(np.int64)


def _check_is(step: Any, *kinds: type) -> None:
    refuse_disjoint(step, "calibration")
    names = " or a ".join(kind.__name__ for kind in kinds)
    _validation.instance("step", step, kinds, f"a {names}")

"""How much noise, how many steps, which rate: the settings that meet a target.

Every answer ends on the private side: it was evaluated and its epsilon is at most the
target.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import CLASS, GroupedClasses
from jaxdp_episodic.accountant.describe.mechanisms import RELEASES
from jaxdp_episodic.accountant.describe.releases import LaplaceRelease
from jaxdp_episodic.accountant.describe.schemes import (
    EpochScheme,
    Poisson,
    RandomAllocation,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import GaussianStep, OneStep, Sampling
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions.api import check_method, on_engine
from jaxdp_episodic.accountant.questions.targets import (
    COARSEST,
    MOST_NOISE,
    OF_STEPS,
    Targets,
    bracket,
)
from jaxdp_episodic.accountant.questions.worst_path import engine_for

# Relative tolerance of a noise multiplier or a probability.
_TOLERANCE = 1e-7
# Relative tolerance of a first answer by Rényi's bound.
_INITIAL_TOLERANCE = 1e-3
# About how often a setting is evaluated.
_EVALUATIONS = 10
# Tolerances of log epsilon below the target from which on a noise is searched again.
_LOOSE = 10.0
# log epsilon above the target up to which a noise is raised and not searched again.
_AS_CHECKED = 1e-9
# Noise multiplier below which nobody is protected: the unit changes the sum by a
# thousand deviations.
_NEXT_TO_NONE = 1e-3
# Smallest probability that is tried.
_SMALLEST_PROBABILITY = 1e-15
# Most steps that a float64 counts exactly.
_MAX_STEPS = 2**53
# Most steps of an epoch that are tried.
_LONGEST_EPOCH = 2**30


@on_engine
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
      step: the step, or a `LaplaceRelease`; the noise that it has is ignored.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1]; at 1 everything is within the target.
      num_steps: whole number >= 0.
      method: how epsilon is computed; see `epsilon`.
      tolerance: in [1e-7, 0.1]: how far above the smallest it may be, relative.
      engine: see `epsilon`.

    Returns:
      float64 of the broadcast shape, within ``tolerance`` of the smallest such noise
      and never below what was checked to be enough; 0 where nothing is drawn or no
      step taken, ``inf`` where a noise multiplier of 1e18 is not enough. Of targets
      above 50, of random allocation above 20, where noise is so little that "exact" and
      "pld" take seconds, it is Rényi's noise, larger by up to a third; within 1e-2 of
      0.1, below which random allocation has a looser bound; and within 2e-17 times the
      target, at most 0.1, where that is more than the tolerance. A warning says where
      it is below 1e-3, next to none.
    """
    check_method(method)
    _check_is(step, GaussianStep, LaplaceRelease)
    least = _validation.single(
        "tolerance", _validation.positive_array("tolerance", tolerance)
    )
    if not _TOLERANCE <= least <= COARSEST:
        raise ValueError(
            f"tolerance must lie in [{_TOLERANCE:g}, {COARSEST:g}], "
            f"got {_validation.shown(tolerance)}"
        )
    step = dataclasses.replace(step, noise_multiplier=1.0)
    run = Targets(step, epsilon, delta, num_steps, method)
    with engine_for(run.size * _EVALUATIONS, method):
        start = 1 / run.initial_noise()
        if method != "rdp":
            # Rényi's bound is cheap, and its answer is near the final one.
            bounded = Targets(step, epsilon, delta, num_steps, "rdp", loose=True)
            start, _ = bounded.inverse_noise(start, _INITIAL_TOLERANCE)
            start = np.where(start > 0, start, 1 / run.initial_noise())
        inverse, hopeless = run.inverse_noise(start, tolerance)
        with np.errstate(divide="ignore"):
            found = 1 / inverse

        def evaluated(elements: np.ndarray) -> np.ndarray:
            noise = found.reshape(run.shape)
            asked = dataclasses.replace(step, noise_multiplier=noise)
            return run.excess(elements, step=asked)

        # 1 / (1 / x) may round down; what is returned must be what was checked.
        checked = evaluated(np.arange(run.size))
        reached = run.reached(tolerance)
        inexact = (checked < -_LOOSE * reached) | ~(checked < _AS_CHECKED)
        loose = np.flatnonzero(np.isfinite(found) & inexact)
        if run.follows_orders and loose.size:
            # Orders followed in the search may differ from those found afresh.
            run.follows_orders = False
            again, _ = run.inverse_noise(inverse[loose], tolerance, loose)
            with np.errstate(divide="ignore"):
                found[loose] = 1 / again
            checked[loose] = evaluated(loose)
        bad, more = np.flatnonzero(~(checked <= 0)), _TOLERANCE
        # What the contour knew to be enough before it failed is asked of it again.
        run.by_renyi[bad] = False
        while (bad := bad[np.isfinite(found[bad])]).size:
            raised = found[bad] * (1 + more)
            found[bad] = np.where(raised > MOST_NOISE, np.inf, raised)
            bad, more = bad[~(evaluated(bad) <= 0)], 2 * more
    found = np.where(hopeless, np.inf, found)
    found = np.where(run.needs_no_noise(), 0.0, found)
    _warn_about_noise(run, found)
    return run.shaped(found)


@on_engine
def calibrate_num_steps(
    step: OneStep,
    *,
    epsilon: Any,
    delta: Any,
    method: str = "exact",
    engine: str | None = None,
) -> np.ndarray | np.int64:
    """Returns the largest number of steps that stays within the target epsilon.

    Args:
      step: the step.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1]; at 1 everything is within the target.
      method: how epsilon is computed; see `epsilon`.
      engine: see `epsilon`.

    Returns:
      int64 of the broadcast shape; 0 where one step is too many, 2**53 where that many
      or more are within the target. Of targets above 50 (20) at little noise Rényi's
      number, as of `calibrate_noise_multiplier`.
    """
    check_method(method)
    _check_is(step, GaussianStep, *RELEASES)
    run = Targets(step, epsilon, delta, 1, method)

    def excess(count: np.ndarray, active: np.ndarray) -> np.ndarray:
        return run.excess(active, num_steps=count)

    everywhere = np.arange(run.size)
    one = np.ones(run.size)
    with engine_for(run.size * _EVALUATIONS, method):
        too_many = ~(excess(one, everywhere) <= 0)
        low, high, ends = bracket(excess, one, 1.0, float(_MAX_STEPS), OF_STEPS)
        found = largest_within(excess, low, high, tolerance=0, integer=True, ends=ends)
    found = np.where(too_many, 0, found).astype(np.int64)
    return run.shaped(found)


@on_engine
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
      step: the step; the rate it has at ``level`` is ignored.
      level: name of the level. Where it is drawn by `Poisson`, its sampling
        probability is sought; without replacement, its size; by epochs, their length.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1]; at 1 everything is within the target.
      num_steps: whole number >= 0.
      method: how epsilon is computed; see `epsilon`.
      engine: see `epsilon`.

    Returns:
      The broadcast shape: float64 probabilities (within 1e-7 relative of the largest,
      on the private side), or int64 sizes, at most the population's, 0 where not even
      the smallest (one, or as many classes as an episode has) is within the target;
      or int64 steps_per_epoch, a length that is within the target while that of one
      step less is not (as a rule the shortest), 0 where none up to 2**30 is. Of targets
      above 50 (20) at little noise Rényi's, as of `calibrate_noise_multiplier`.

    Raises:
      ValueError: an unknown level, or one that is not drawn.
    """
    check_method(method)
    _check_is(step, GaussianStep)
    scheme = _scheme_of(step, level)

    def at_rate(rate: Any) -> GaussianStep:
        changed = dataclasses.replace(scheme, **{scheme.rate_field: rate})
        return dataclasses.replace(step, sampling=step.design.with_scheme(changed))

    smallest = _smallest_size(step.design, scheme)
    one = at_rate(smallest)
    run = Targets(one, epsilon, delta, num_steps, method)
    everywhere = np.arange(run.size)
    all_rates = np.full(run.size, np.max(smallest, initial=1), np.float64)

    def excess(rate: np.ndarray, active: np.ndarray) -> np.ndarray:
        all_rates[active] = rate
        return run.excess(active, step=at_rate(all_rates.reshape(run.shape)))

    if isinstance(scheme, EpochScheme):
        return run.shaped(_shortest_epoch(excess, all_rates.copy()))
    is_share = isinstance(scheme, Poisson)
    ends = (_SMALLEST_PROBABILITY, 1.0)
    if not is_share:
        ends = smallest, _largest_size(one, level)
    least, most = (
        np.broadcast_to(end, run.shape).reshape(-1).astype(np.float64) for end in ends
    )
    hopeless = ~(excess(least, everywhere) <= 0)
    full = excess(most, everywhere) <= 0
    low, high = np.where(full, most, least), np.where(full | hopeless, 0.0, most)
    tolerance = _TOLERANCE if is_share else 0
    found = largest_within(excess, low, high, tolerance=tolerance, integer=not is_share)
    found = np.where(full, most, np.where(hopeless, 0.0, found))
    return run.shaped(found if is_share else found.astype(int))


def _warn_about_noise(run: Targets, found: np.ndarray) -> None:
    """Warns where next to no noise meets a target."""
    next_to_none = np.flatnonzero((found > 0) & (found < _NEXT_TO_NONE))
    if next_to_none.size:
        at = next_to_none[np.argmin(found[next_to_none])]
        warnings.warn(
            f"noise_multiplier={found[at]:.3g}, next to none, protects nobody: "
            f"epsilon={run.epsilon[at]:g} and delta={run.delta[at]:g} cover what the "
            "run loses without noise; take smaller ones",
            stacklevel=4,
        )


def _shortest_epoch(excess: Any, least: np.ndarray) -> np.ndarray:
    """Steps in an epoch, doubled until they are enough, then searched between."""
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

    # Searched in the inverse: the longer an epoch, the smaller its epsilon.
    start, stop = np.where(low > 0, low, high), np.where(low > 0, high, 0.0)
    found = largest_within(shorter, start, stop, tolerance=0, integer=True)
    return np.where(low > 0, low + high - found, high).astype(np.int64)


def _scheme_of(step: GaussianStep, level: str) -> Scheme:
    """The scheme that draws a level."""
    _validation.choice("level", level, step.design.level_names)
    for scheme in step.design.schemes:
        if scheme.name == level:
            return scheme
    raise ValueError(
        f"level must be one that is drawn, got {_validation.shown(level)}, which is not"
    )


def _smallest_size(design: Sampling, scheme: Scheme) -> Any:
    """One; of classes, as many as an episode needs; of an epoch, its blocks."""
    if isinstance(scheme, RandomAllocation):
        return scheme.times
    sized = isinstance(scheme, WithoutReplacement)
    if sized and isinstance(design, GroupedClasses) and scheme.name == CLASS:
        return design.ways
    return 1


def _largest_size(step: GaussianStep, level: str) -> np.ndarray:
    """Sizes beyond this draw nothing more, or are refused where small units are."""
    names = step.level_names_used
    if level not in names:
        raise ValueError(
            f"level must be one of {names}, at or above the privacy unit, "
            f"got {_validation.shown(level)}"
        )
    group = step.path_rates.group_sizes[names.index(level)]
    assert group is not None  # a level without replacement has a size
    refused = step.small_units == "error"
    return group.min(axis=-1) if refused else group.max(axis=-1)


def _check_is(step: Any, *kinds: type) -> None:
    if not isinstance(step, kinds):
        names = " or a ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"step must be a {names}, got {_validation.shown(step)}")

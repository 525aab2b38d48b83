"""How much noise, how many steps, which rate: the settings that meet a target.

Every answer ends on the private side: it was evaluated and its epsilon is at most the
target.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.api import check_method, on_engine
from jaxdp_episodic.accounting.dominating_pair import run_of
from jaxdp_episodic.accounting.drawn_levels import (
    largest_size,
    scheme_of,
    smallest_size,
    with_rate,
)
from jaxdp_episodic.accounting.question import EpsilonAt
from jaxdp_episodic.accounting.run import Run
from jaxdp_episodic.accounting.worst_path import answer, engine_for
from jaxdp_episodic.describe.mechanisms import RELEASES
from jaxdp_episodic.describe.releases import LaplaceRelease
from jaxdp_episodic.describe.schemes import EpochScheme, Poisson
from jaxdp_episodic.describe.step import GaussianStep, OneStep
from jaxdp_episodic.numerics.roots import largest_within

_TOLERANCE = 1e-7
# Of a first answer; and how often a setting is evaluated, about.
_ROUGH, _EVALUATIONS = 1e-3, 10
_NOISE_RANGE = (1e-9, 1e18)
_SMALLEST_PROBABILITY = 1e-15
_MAX_STEPS = 2**53
_LONGEST_EPOCH = 2**30


@on_engine
def calibrate_noise_multiplier(
    step: GaussianStep | LaplaceRelease,
    *,
    epsilon: Any,
    delta: Any,
    num_steps: Any,
    method: str = "exact",
    engine: str | None = None,
) -> np.ndarray | np.float64:
    """Returns the smallest noise multiplier that keeps epsilon within the target.

    Args:
      step: the step, or a `LaplaceRelease`; the noise that it has is ignored.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1).
      num_steps: whole number >= 0.
      method: how epsilon is computed; see `epsilon`.
      engine: see `epsilon`.

    Returns:
      float64 of the broadcast shape, within 1e-7 relative of the smallest such noise
      and never below what was checked to be enough; 0 where nothing is drawn or no
      step taken, ``inf`` where a noise multiplier of 1e18 is not enough.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range.
    """
    check_method(method)
    _check_is(step, GaussianStep, LaplaceRelease)
    step = dataclasses.replace(step, noise_multiplier=1.0)
    run = _Targets(step, epsilon, delta, num_steps, method)
    with engine_for(run.size * _EVALUATIONS, method):
        start, factor = 1 / run.rough_noise(), 2.0
        if method != "rdp":
            # Rényi's bound is quick and says nearly where the answer is.
            bounded = _Targets(step, epsilon, delta, num_steps, "rdp")
            start, factor = bounded.inverse_noise(start, factor, _ROUGH)[0], 1.05
            start = np.where(start > 0, start, 1 / run.rough_noise())
        inverse, hopeless = run.inverse_noise(start, factor, _TOLERANCE)
        with np.errstate(divide="ignore"):
            found = 1 / inverse
        # 1 / (1 / x) may round down; what is returned must be what was checked.
        asked = dataclasses.replace(step, noise_multiplier=found.reshape(run.shape))
        checked = run.excess(np.arange(run.size), step=asked)
        bad = np.isfinite(found) & (checked > 0)
        found = np.where(bad, found * (1 + _TOLERANCE), found)
    found = np.where(hopeless, np.inf, found)
    found = np.where(run.is_silent(), 0.0, found)
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
      delta: in (0, 1).
      method: how epsilon is computed; see `epsilon`.
      engine: see `epsilon`.

    Returns:
      int64 of the broadcast shape; 0 where one step is too many, 2**53 where that many
      or more are within the target.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range.
    """
    check_method(method)
    _check_is(step, GaussianStep, *RELEASES)
    run = _Targets(step, epsilon, delta, 1, method)

    def excess(count: np.ndarray, active: np.ndarray) -> np.ndarray:
        return run.excess(active, num_steps=count)

    everywhere = np.arange(run.size)
    one = np.ones(run.size)
    with engine_for(run.size * _EVALUATIONS, method):
        too_many = ~(excess(one, everywhere) <= 0)
        low, high, ends = _bracket(excess, one, 1.0, float(_MAX_STEPS))
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
      delta: in (0, 1).
      num_steps: whole number >= 0.
      method: how epsilon is computed; see `epsilon`.
      engine: see `epsilon`.

    Returns:
      The broadcast shape: float64 probabilities (within 1e-7 relative of the largest,
      on the private side), or int64 sizes, at most the population's, 0 where not even
      the smallest (one, or as many classes as an episode has) is within the target;
      or int64 steps_per_epoch, a length that is within the target while that of one
      step less is not (as a rule the shortest), 0 where none up to 2**30 is.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, an unknown level, or one that is not drawn.
    """
    check_method(method)
    _check_is(step, GaussianStep)
    scheme = scheme_of(step, level)
    smallest = smallest_size(step, level)
    one = dataclasses.replace(step, sampling=with_rate(step, level, smallest))
    run = _Targets(one, epsilon, delta, num_steps, method)
    everywhere = np.arange(run.size)
    all_rates = np.full(run.size, np.max(smallest, initial=1), np.float64)

    def excess(rate: np.ndarray, active: np.ndarray) -> np.ndarray:
        all_rates[active] = rate
        shaped = all_rates.reshape(run.shape)
        changed = with_rate(step, level, shaped)
        return run.excess(active, step=dataclasses.replace(step, sampling=changed))

    if isinstance(scheme, EpochScheme):
        return run.shaped(_shortest_epoch(excess, all_rates.copy()))
    if isinstance(scheme, Poisson):
        least = np.full(run.size, _SMALLEST_PROBABILITY)
        most = np.ones(run.size)
        hopeless = ~(excess(least, everywhere) <= 0)
        full = excess(most, everywhere) <= 0
        low, high = np.where(full, 1.0, least), np.where(full | hopeless, 0.0, most)
        found = largest_within(excess, low, high, tolerance=_TOLERANCE)
        return run.shaped(np.where(hopeless, 0.0, found))
    most = np.broadcast_to(largest_size(one, level), run.shape).reshape(-1)
    most = most.astype(np.float64)
    least = np.broadcast_to(smallest, run.shape).reshape(-1).astype(np.float64)
    hopeless = ~(excess(least, everywhere) <= 0)
    full = excess(most, everywhere) <= 0
    low = np.where(full, most, least)
    high = np.where(full | hopeless, 0.0, most)
    found = largest_within(excess, low, high, tolerance=0, integer=True)
    return run.shaped(np.where(full, most, np.where(hopeless, 0, found)).astype(int))


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

    # Upside down: the longer an epoch, the less it costs.
    start, stop = np.where(low > 0, low, high), np.where(low > 0, high, 0.0)
    found = largest_within(shorter, start, stop, tolerance=0, integer=True)
    return np.where(low > 0, low + high - found, high).astype(np.int64)


class _Targets:
    """The targets of one calibration, flattened, and the run they are about."""

    def __init__(
        self,
        step: OneStep,
        epsilon: Any,
        delta: Any,
        num_steps: Any,
        method: str,
    ) -> None:
        targets = {
            "epsilon": _validation.positive_array("epsilon", epsilon),
            "delta": _validation.open_unit_array("delta", delta),
            "num_steps": _validation.integer_array("num_steps", num_steps, minimum=0),
        }
        self.shape = _validation.broadcast_shape(
            step=np.empty(step.shape, np.uint8), **targets
        )
        self.size = int(np.prod(self.shape))
        flat = {k: self._flat(v.astype(np.float64)) for k, v in targets.items()}
        self.epsilon, self.delta = flat["epsilon"], flat["delta"]
        self.num_steps = flat["num_steps"]
        self.step, self.method = step, method
        self.run = run_of(step, targets["num_steps"])
        self.run.refuse(method)

    def inverse_noise(
        self, start: np.ndarray, factor: float, tolerance: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """The largest inverse noise within the target, and where none is; (n,)."""

        def excess(inverse_noise: np.ndarray, active: np.ndarray) -> np.ndarray:
            return self.excess(active, inverse_noise=inverse_noise)

        least, most = _NOISE_RANGE
        low, high, ends = _bracket(excess, start, 1 / most, 1 / least, factor)
        found = largest_within(excess, low, high, tolerance=tolerance, ends=ends)
        return found, low == 0

    def excess(
        self,
        active: np.ndarray,
        *,
        step: OneStep | None = None,
        inverse_noise: np.ndarray | None = None,
        num_steps: np.ndarray | None = None,
    ) -> np.ndarray:
        """``log(epsilon / target)`` of some elements, with something changed."""
        run = self.run
        if step is not None or num_steps is not None:
            steps = self.num_steps.copy()
            steps[active] = self.num_steps[active] if num_steps is None else num_steps
            run = run_of(step or self.step, steps.reshape(self.shape))
        run = self._taken(run, active)
        if inverse_noise is not None:
            run = run.scaled(inverse_noise[:, None])
        question = EpsilonAt(np.log(self.delta[active]))
        found = answer(question, run, self.method)
        value = found.value
        if self.method == "exact":
            # What is only known up to an error counts as that much larger.
            value = value + np.where(found.is_certified, 0.0, found.error)
        with np.errstate(divide="ignore"):
            return np.log(value) - np.log(self.epsilon[active])

    def is_silent(self) -> np.ndarray:
        """Where no noise is needed: nothing is drawn on any path, or no step taken."""
        nothing = self.run.loses_nothing.all(axis=-1)
        return np.broadcast_to(nothing, self.shape).reshape(-1)

    def rough_noise(self) -> np.ndarray:
        """A first guess: the Gaussian mechanism with the amplified sensitivity."""
        moved = 0.0  # squared
        for loss, count in zip(self.run.losses, self.run.counts, strict=True):
            hints = loss.hints()
            moved = moved + count * np.square(hints.rate * hints.furthest)
        moved = np.broadcast_to(np.max(moved, axis=-1), self.shape).reshape(-1)
        spread = np.sqrt(2 * moved * -np.log(self.delta))
        with np.errstate(over="ignore"):  # of a target near 0: the largest guess
            return np.clip(0.5 + spread / self.epsilon, 0.1, 1e9)

    def shaped(self, values: np.ndarray) -> Any:
        """The flat answers in the targets' shape; a NumPy scalar if 0-d."""
        return values.reshape(self.shape)[()]

    def _flat(self, array: np.ndarray) -> np.ndarray:
        return np.broadcast_to(array, self.shape).reshape(-1)

    def _taken(self, run: Run, active: np.ndarray) -> Run:
        """The arrays at some of the flattened settings, (len(active), P)."""
        shape = self.shape or (1,)
        index = np.unravel_index(active, shape)

        def take(field: np.ndarray) -> np.ndarray:
            if np.size(field) == 1:
                return np.reshape(field, (1, 1))
            return np.broadcast_to(field, (*shape, field.shape[-1]))[index]

        return run.map(take)


def _bracket(
    excess: Any, start: np.ndarray, floor: float, ceiling: float, factor: float = 2.0
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Steps out from ``start`` by growing factors until the sign changes.

    Returns ``(low, high)`` and the excess at both; ``low = 0`` where even the floor
    exceeds the target, and ``high = 0`` (finished) there and where even the ceiling
    does not.
    """
    everywhere = np.arange(start.size)
    start = np.clip(start, floor, ceiling)
    value = excess(start, everywhere)
    within = value <= 0
    low, high = np.where(within, start, 0.0), np.where(within, 0.0, start)
    values = np.where(within, value, np.nan), np.where(within, np.nan, value)
    active = everywhere
    while active.size:
        upward = low[active] > 0
        edge = np.where(upward, low[active], high[active])
        x = np.where(upward, edge * factor, edge / factor)
        x = np.clip(np.rint(x) if floor == 1.0 else x, floor, ceiling)
        value = excess(x, active)
        ok = value <= 0
        low[active] = np.where(ok, x, low[active])
        high[active] = np.where(ok, high[active], x)
        values[0][active] = np.where(ok, value, values[0][active])
        values[1][active] = np.where(ok, values[1][active], value)
        at_end = np.where(upward, x >= ceiling, x <= floor)
        unfinished = (low[active] == 0) | (high[active] == 0)
        active = active[unfinished & ~at_end]
        factor = min(factor * factor, 1e4)
    never = low == 0
    return np.where(never, 0.0, low), np.where(never, 0.0, high), values


def _check_is(step: Any, *kinds: type) -> None:
    if not isinstance(step, kinds):
        names = " or a ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"step must be a {names}, got {step!r}")

"""Calibration: the noise, number of steps or rate that meets a target epsilon."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import asking_together
from jaxdp_episodic.accountant.describe import spec
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    EpochScheme,
    GroupedClasses,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.releases import RELEASES, LaplaceRelease
from jaxdp_episodic.accountant.describe.runs import refuse_disjoint
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    GaussianStep,
    OneStep,
    parts_of,
    rate_places,
)
from jaxdp_episodic.accountant.methods.run import Answer, DeltaAt, EpsilonAt, Run
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions.api import check_method, public_function
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of_parts
from jaxdp_episodic.accountant.questions.worst_path import CONTOUR, answer

# Lower estimate of d log epsilon / d log(1 / noise).
_OF_NOISE = 0.9
# Lower estimate of d log epsilon by the logarithm of a number of steps or a rate.
_OF_STEPS = 0.45
# Smallest and largest noise multiplier of the search.
_LEAST_NOISE = 1e-9
_MOST_NOISE = 1e18
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

# Kinds of questions, by their answer. All but the curve are names of numbers as well.
EPSILON = "epsilon"
DELTA = "delta"
NOISE = "noise_multiplier"
RDP = "rdp"
# Other numbers of a question.
NUM_STEPS = "num_steps"
ORDERS = "orders"
# Path of the step's own noise.
STEP_NOISE = f"step.{NOISE}"
Excess = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From numbers and elements to the elements' ``log(epsilon / target)``."""


class Question(spec.Spec, kw_only=True):
    """A question about a step, with ``...`` for numbers that are not known yet."""

    kind: str
    step: AnyStep
    delta: spec.Probabilities | None = None
    epsilon: spec.NonNegatives | None = None
    num_steps: spec.Counts | None = None
    orders: Annotated[Any, spec.numbers(_validation.order_or_inf_array)] | None = None
    option: str = "exact"  # the method; of a curve its direction

    @functools.cached_property
    def missing(self) -> tuple[str, ...]:
        """The paths of the missing numbers."""
        every = self.all_numbers.items()
        return tuple(where for where, value in every if value is ...)

    def of_some(
        self,
        index: Any,
        places: Sequence[str] = (),
        change: Callable[[Any], Any] | None = None,
        *,
        checked: bool = False,
    ) -> Question:
        """Returns the question about some flattened settings, with numbers changed."""
        # Unless they are ``checked``, sizes and counts may become real numbers.

        def taken(where: str, value: Any) -> Any:
            if np.ndim(value):
                value = np.broadcast_to(value, self.shape).reshape(-1)[index]
            return change(value) if change and where in places else value

        return spec.mapped(self, taken, checked=checked)

    def runs(self) -> tuple[Run, ...]:
        """Returns a run for each theorem; numbers of steps may be real."""
        times = np.asarray(1.0 if self.num_steps is None else self.num_steps)
        parts, counts = parts_of(self.step)
        return runs_of_parts(parts, [count * times.astype(float) for count in counts])

    def answer_by(self, method: str) -> Answer:
        """Returns epsilon or the logarithm of delta by this method."""
        asked: Any = EpsilonAt(np.log(np.asarray(self.delta, np.float64)))
        if self.kind == DELTA:
            asked = DeltaAt(np.asarray(self.epsilon, np.float64))
        return answer(asked, self.runs(), method)


class Calibration(Question, kw_only=True):
    """A question whose epsilon must be within a target."""

    delta: spec.PositiveShares | None = None
    epsilon: spec.Positives | None = None

    @classmethod
    def of(
        cls, step: OneStep, epsilon: Any, delta: Any, num_steps: Any, method: str
    ) -> Self:
        """Returns the question about a step; the method may refuse it."""
        check_method(method)
        asked = (EPSILON, epsilon), (DELTA, delta), (NUM_STEPS, num_steps)
        # Neither None nor a traced number, which a question may have.
        target: Any = {name: cls.numeric[name](name, value) for name, value in asked}
        question = cls(kind=NOISE, step=step, option=method, **target)
        for run in question.runs():
            run.refuse(method)
        return question

    @property
    def targets(self) -> np.ndarray:
        """The (n,) flattened target epsilons of all settings."""
        return np.broadcast_to(np.asarray(self.epsilon), self.shape).reshape(-1)

    def excess_by(self, place: str) -> Excess:
        """Returns the excess as a function of the number at a field path."""
        usual, targets = self.option, self.targets

        def excess(value: np.ndarray, active: np.ndarray) -> np.ndarray:
            found, large = np.empty(active.size), targets[active] > _LARGE
            for method, some in ((usual, ~large), (_QUICK[usual], large)):
                if not np.any(some):
                    continue
                to = functools.partial(lambda new, _: new, value[some])
                asked = self.of_some(active[some], [place], to, checked=True)
                epsilon, error, is_bound = asked.answer_by(method)
                # The estimate of its error is added; that of a bound is not known.
                is_bound |= method == "rdp"
                with np.errstate(divide="ignore", over="ignore"):
                    share = (epsilon + np.where(is_bound, 0.0, error)) / asked.epsilon
                    found[some] = np.log(np.where(share < _NONE, 0.0, share))
            return found

        return excess

    def initial_inverse_noise(self) -> np.ndarray:
        """*Estimates* the inverse noise of the targets, from which a search starts."""
        # That at which the losses have the variance mu² of a Gaussian mechanism with
        # this epsilon = mu²/2 + mu sqrt(2 l), l the negative logarithm of delta.
        epsilon, delta = (np.asarray(a)[..., None] for a in (self.epsilon, self.delta))
        nats = -2 * np.log(delta)
        mu = 2 * epsilon / (np.sqrt(nats + 2 * epsilon) + np.sqrt(nats))
        found = np.full(self.shape, np.inf)
        with np.errstate(all="ignore"):
            run = self.runs()[0]
            for loss, count in zip(run.losses, run.counts, strict=True):
                rate, _, _, furthest = loss.hints()
                # The variance of one loss is at most rate² (e^{s²} - 1).
                variance = mu**2 / (count * loss.outer_rate)
                shift = np.sqrt(np.log1p(variance / rate**2)) / furthest
                found = np.fmin(found, shift.min(axis=-1))  # NaN: no noise is needed
        return found.reshape(-1)


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
    _check_is(step, GaussianStep, LaplaceRelease)
    _validation.one("tolerance", tolerance, _checked_tolerance)
    step = dataclasses.replace(step, noise_multiplier=1.0)
    question = Calibration.of(step, epsilon, delta, num_steps, method)
    by_noise, targets = question.excess_by(STEP_NOISE), question.targets
    # Rounding at large targets may exceed the tolerance.
    rounded = np.minimum(_ROUNDING_OF_ORDERS * targets, COARSEST)
    with asking_together(targets.size * _EVALUATIONS):
        inverse = largest_within(
            lambda inverse, active: by_noise(1 / inverse, active),
            question.initial_inverse_noise(),
            (1 / _MOST_NOISE, 1 / _LEAST_NOISE),
            slope=_OF_NOISE,
            tolerance=np.maximum(tolerance, rounded),
        )
    with np.errstate(divide="ignore"):
        found = 1 / inverse.reshape(question.shape)
    for run in question.runs():  # no step, or no path is sampled
        found = np.where(run.facts.loses_nothing.all(axis=-1), 0.0, found)
    positive = np.where(found > 0, found, np.inf)
    if np.any(positive < _NEXT_TO_NONE):
        one: Any = question.of_some(np.argmin(positive))
        warnings.warn(
            f"noise_multiplier={positive.min():.3g} is next to none and protects "
            f"nobody: epsilon={one.epsilon:g} and delta={one.delta:g} almost permit a "
            "run without noise; use smaller targets",
            stacklevel=3,
        )
    return found[()]


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
    _check_is(step, GaussianStep, *RELEASES)
    question = Calibration.of(step, epsilon, delta, 1, method)
    excess, ends = question.excess_by(NUM_STEPS), (1.0, float(_MAX_STEPS))
    start = np.ones(question.targets.size)
    with asking_together(start.size * _EVALUATIONS):
        found = largest_within(excess, start, ends, slope=_OF_STEPS, whole=1)
    return found.astype(np.int64).reshape(question.shape)[()]


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
    _check_is(step, GaussianStep)
    _validation.choice("level", level, step.design.level_names)
    scheme = next((one for one in step.design.schemes if one.name == level), None)
    if scheme is None:
        raise ValueError(f"level must be one with a scheme, got {level!r}")

    design: Any = step.design
    smallest: Any = scheme.times if isinstance(scheme, EpochScheme) else 1
    if isinstance(scheme, WithoutReplacement) and isinstance(design, GroupedClasses):
        smallest = design.ways if scheme.name == CLASS else 1
    place = rate_places(step)[level]
    one: Any = spec.mapped(step, lambda where, n: smallest if where == place else n)
    question = Calibration.of(one, epsilon, delta, num_steps, method)
    by_rate, shape = question.excess_by(f"step.{place}"), question.shape
    whole, ends = 0, (_SMALLEST_PROBABILITY, 1.0)
    if isinstance(scheme, EpochScheme):  # the rate is the inverse of the length
        whole, ends = -1, (1 / _LONGEST_EPOCH, 1 / np.max(smallest, initial=1))
    elif isinstance(scheme, WithoutReplacement):
        names = one.level_names_used  # at or above the privacy unit
        _validation.choice("level", level, names)
        group: Any = one.path_rates.group_sizes[names.index(level)]
        # The largest size that matters, or that ``small_units`` permits.
        refused = one.small_units == "error"
        whole, most = 1, group.min(axis=-1) if refused else group.max(axis=-1)
        ends = smallest, most

    def excess(x: np.ndarray, active: np.ndarray) -> np.ndarray:
        return by_rate(np.rint(1 / x) if whole < 0 else x, active)

    least, most = (np.broadcast_to(e, shape).reshape(-1).astype(float) for e in ends)
    options: Any = {"slope": _OF_STEPS, "tolerance": _TOLERANCE, "whole": whole}
    found = largest_within(excess, most, (least, most), **options)
    if not whole:
        return found.reshape(shape)[()]
    found[found > 0] **= whole
    return np.rint(found).astype(np.int64).reshape(shape)[()]


def _check_is(step: Any, *kinds: type) -> None:
    refuse_disjoint(step, "calibration")
    names = " or a ".join(kind.__name__ for kind in kinds)
    _validation.instance("step", step, kinds, f"a {names}")

"""Derivatives of answers: differences of fourth order of the answers themselves.

An exact answer is known to some 1e-12, as its quadrature errors are smooth in the run,
so that a difference over a thousandth of a number is known to some 1e-9.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import asking_together, using_engine
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import OWNED, EpochScheme, Scheme
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
)
from jaxdp_episodic.accountant.losses.protocols import Bounds
from jaxdp_episodic.accountant.methods.question import EpsilonAt, Question
from jaxdp_episodic.accountant.questions import api, worst_path
from jaxdp_episodic.accountant.questions.dominating_pair import (
    in_one_place,
    runs_of_parts,
)

# Methods whose answers have derivatives.
METHODS = ("exact", "rdp")
# Names of the fields that every step has.
NOISE = "noise_multiplier"
NUM_STEPS = "num_steps"
# Field of a part: how often it is taken, as a real number.
COUNT = "count"
# End of a field that is a whole number, of which the rate is moved.
SIZE = ".size"
Field = tuple[int, str]
"""A number of a run: its part, and `COUNT` or the place of a field in `mapped`."""

_NAME = "epsilon_and_gradient"
# Points of the quotient in widths: about a number, and above one that is at 0.
_POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
# Weights of fourth order of the values there less that in the middle.
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
# Weights of second order.
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# Widths that are tried in turn, as shares of a number.
_SHARES = (1e-3, 1e-2, 1e-4)
# Width of differences of certified ends, which are known to some 1e-5.
_WIDTH_OF_BOUNDS = 0.04
# Relative error of a quotient over the square of what one of second order is off.
_ERROR_OVER_SQUARE = 300.0
# Relative error of answers that is not smooth.
_ROUNDING = 1e-13
# Relative error with which no other width is tried, and the largest that is returned.
_ENOUGH = 1e-8
_LARGEST_ERROR = 1e-6
# Least distance of a rate from 1 at which all widths are above its rounding.
LEAST_FROM_ONE = 1e-10


def epsilon_and_gradient(
    step: GaussianStep | ComposedSteps,
    *,
    delta: Any,
    num_steps: Any = None,
    wrt: tuple[str, ...] = ("noise_multiplier",),
    method: str = "exact",
) -> tuple[Any, dict[str, Any]]:
    """Returns epsilon and its derivatives by fields of the step, at fixed delta.

    Differences of fourth order of epsilon: relative error mostly below 1e-8
    (*estimates*; docs/proofs.md).

    What can be named, of steps in epochs only the first:

    * "noise_multiplier"; the derivative in nats per unit of it.
    * "num_steps", treated as a real number: nats per step more. M(z)^T is continued to
      real T; after very few steps the continuation is not unique.
    * "LEVEL.sampling_probability" of a Poisson level, "school.sampling_probability".
    * "LEVEL.size" of a level without replacement, treated as a real number (the rate is
      size over population; the population stays).

    Of a composed run a name moves all steps that have the field, by the same amount;
    with an index, "noise_multiplier[0]", one step's only. Levels below the privacy unit
    have no rate and cannot be named, nor can the number of independent episodes.

    The derivative is *NaN*, never a wrong number, where it is not known: where epsilon
    is ``inf`` or only a certified bound (`PrivacyInfo.is_certified_bound`), but for
    random allocation, of which differences of bounds are right to some 1e-3; where
    differences of several widths disagree by 1e-6, as beside a kink, where another path
    or direction becomes the worst; where a rate is at an end (a probability of 0, or
    within 1e-10 of 1; a size equal to the population); and where epsilon is 0 but delta
    is reached there. It is 0 where epsilon 0 needs less than delta. At a kink itself it
    is a value between those of both sides.

    Args:
      step: the step, or a run made by `compose`.
      delta: in (0, 1).
      num_steps: whole number >= 0; of a composed run as of `epsilon`.
      wrt: names of fields.
      method: "exact" or "rdp".

    Returns:
      ``(epsilon, gradient)``: float64 nats of the broadcast shape of step, ``delta``
      and ``num_steps``, and for every name in ``wrt`` the derivative, of that shape.

    Raises:
      ValueError: ``num_steps`` given twice or not at all, or a name that the step does
        not have.
      NotImplementedError: steps in epochs, and another name than "noise_multiplier".
    """
    parts = gaussian_parts(step, _NAME)  # refuses others
    _validation.open_unit_array("delta", delta)
    _validation.choice("method", method, METHODS)
    if isinstance(step, ComposedSteps) and num_steps is not None:
        step, num_steps = compose((step, num_steps)), None
    wanted = _checked_names(wrt, step)
    log_delta = np.log(np.asarray(delta, np.float64))
    runs, shape = api.checked_runs(step, num_steps, delta=log_delta)
    counts = step.counts if isinstance(step, ComposedSteps) else (num_steps,)
    counts = [np.broadcast_to(np.asarray(n, np.float64), shape) for n in counts]
    question = EpsilonAt(np.broadcast_to(log_delta, shape))
    gradient = {}
    with asking_together(math.prod(shape)):
        value, info = api.epsilon(
            step, delta=delta, num_steps=num_steps, method=method, return_info=True
        )
        bounded = any(isinstance(loss, Bounds) for run in runs for loss in run.losses)
        bounded = bounded & info.is_certified_bound & np.isfinite(value)
        for name, fields in wanted.items():
            moved = functools.partial(
                moved_answers, question, parts, counts, [(f, 1.0) for f in fields]
            )
            scale = functools.reduce(
                np.minimum, (_scale(parts, counts, field) for field in fields)
            )
            at_end = [counts[i] == 0 for i, place in fields if place == COUNT]
            row = np.where(
                info.is_certified_bound,
                np.nan,
                difference(
                    functools.partial(moved, method=method),
                    np.broadcast_to(scale, shape),
                    functools.reduce(np.logical_or, at_end, np.zeros(shape, bool)),
                ),
            )
            if np.any(bounded) and name.partition("[")[0] == NOISE:
                width = np.broadcast_to(_WIDTH_OF_BOUNDS * scale, shape)
                ends = moved(_about(_POINTS[:, 0], width), method=method, bounds=True)
                with np.errstate(invalid="ignore", divide="ignore"):
                    wide = np.tensordot(_WEIGHTS[:, 0], ends, 1) / width
                row = np.where(bounded, wide, row)
            gradient[name] = row[()]
    return value, gradient


def field_names(step: GaussianStep | ComposedSteps) -> tuple[str, ...]:
    """Returns the names of what epsilon can be differentiated by.

    Of a composed run: each name, which moves all steps that have it, then the same of
    every step alone, with its index in brackets.
    """
    return tuple(_fields(step))


# --- Differences ---


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def difference(
    function: Callable[[np.ndarray], np.ndarray],
    scale: np.ndarray,
    at_end: np.ndarray | None = None,
) -> np.ndarray:
    """The derivative of a function >= 0 at 0; NaN, never a wrong number."""
    end = np.zeros(scale.shape, int) if at_end is None else at_end.astype(int)
    points, weights, check = (
        np.moveaxis(table[:, end], 0, 0) for table in (_POINTS, _WEIGHTS, _CHECK)
    )
    found, best = np.full(scale.shape, np.nan), np.full(scale.shape, np.inf)
    # Of an infinite number as of 1: nothing changes with it.
    scale = np.where(np.isposinf(scale), 1.0, scale)
    middle = function(np.zeros((1, *scale.shape)))[0] if np.any(end) else 0.0
    for share in _SHARES:
        left = (scale > 0) & ~(best <= _ENOUGH)
        if not np.any(left):
            break
        # By a power of two a number moves exactly.
        width = np.exp2(np.floor(np.log2(np.where(left, share * scale, 1.0))))
        values = function(points * np.where(left, width, 0.0))
        most = np.abs(values).max(axis=0)
        is_kink = (values == 0).any(axis=0) & (most > 0) & (end == 0)
        values = values - np.where(end, middle, values[0])
        change, other = ((table * values).sum(axis=0) for table in (weights, check))
        size = np.abs(change)
        off = _ERROR_OVER_SQUARE * ((change - other) / size) ** 2
        off += _ROUNDING * most / size
        off = np.where((values == 0).all(axis=0), 0.0, off)
        # Where it is 0 and does not stay so, there is a kink.
        off = np.where(is_kink, np.nan, off)
        better = left & (off < best)
        found = np.where(better, change / width, found)
        best = np.where(better, off, best)
    return np.where(best <= _LARGEST_ERROR, found, np.nan)


def moved_answers(
    question: Question,
    parts: Sequence[Any],
    counts: Sequence[np.ndarray],
    fields: Sequence[tuple[Field, Any]],
    displacement: np.ndarray,
    *,
    method: str,
    bounds: bool = False,
) -> np.ndarray:
    """Answers where fields of a run are displaced by real numbers, each times a weight.

    NaN where only a bound is known, unless ``bounds``.
    """
    parts, counts = list(parts), list(counts)
    for (i, place), weight in fields:
        if place == COUNT:
            counts[i] = counts[i] + weight * displacement
        else:
            parts[i] = _moved(parts[i], place, weight * displacement)
    by = worst_path.CONTOUR if method == "exact" and not bounds else method
    with using_engine("numpy"):
        found = worst_path.answer(question, runs_of_parts(parts, counts), by)
    value = found.value if bounds else np.where(found.is_certified, np.nan, found.value)
    return np.broadcast_to(value, displacement.shape)


def _about(points: np.ndarray, width: np.ndarray) -> np.ndarray:
    return np.multiply.outer(points, width)


def scale_of(place: str, value: Any) -> np.ndarray:
    """What differences by a number are taken at shares of; 0 at an end of a rate."""
    is_rate = place.rpartition(".")[2] in ("sampling_probability", "delta")
    value = np.asarray(value, np.float64)
    return _scale_of_rate(value) if is_rate else np.abs(value)


def _scale_of_rate(rate: np.ndarray) -> np.ndarray:
    return np.where(1 - rate >= LEAST_FROM_ONE, np.minimum(rate, 1 - rate), 0.0)


def _scale(parts: Sequence[Any], counts: Sequence[np.ndarray], field: Field) -> Any:
    """The same of a field of a run."""
    i, place = field
    if place == COUNT:
        return np.maximum(counts[i], 1.0)
    if place.endswith(SIZE):
        draw, group = _drawn(parts[i], place)
        # No larger size can be drawn: nothing changes with it.
        share = np.where(draw > group, draw, group * _scale_of_rate(draw / group))
        return share.min(axis=-1)
    found: dict[str, Any] = {}
    mapped(parts[i], found.setdefault)
    return scale_of(place, found[place])


def _drawn(step: GaussianStep, place: str) -> tuple[np.ndarray, np.ndarray]:
    """How many units of a level are drawn without replacement, of how many."""
    levels = step.path_rates
    position = step.level_names_used.index(place.removesuffix(SIZE))
    draw, group = levels.draw_sizes[position], levels.group_sizes[position]
    assert draw is not None and group is not None  # it has a size
    return draw, group


def _moved(part: Any, place: str, displacement: np.ndarray) -> Any:
    """The part with a field displaced, by real numbers."""
    if not place.endswith(SIZE):

        def move(at: str, value: Any) -> Any:
            value = np.asarray(value, np.float64) if at == place else value
            return value + displacement if at == place else value

        return mapped(part, move)
    # A size is a whole number; its rate is not.
    step = in_one_place(part)
    if step.privacy_unit in OWNED:
        raise NotImplementedError(
            f"{_NAME} does not cover {place!r} with "
            f"privacy_unit={str(part.privacy_unit)!r}"
        )
    draw, group = _drawn(step, place)
    levels = step.path_rates
    position = step.level_names_used.index(place.removesuffix(SIZE))
    rates = list(levels.rates)
    # No larger size can be drawn.
    slope = np.where(draw > group, 0.0, 1.0 / group)
    rates[position] = np.minimum(rates[position] + displacement[..., None] * slope, 1.0)
    other = copy.copy(step)
    # The cached property of the copy.
    vars(other)["path_rates"] = dataclasses.replace(levels, rates=tuple(rates))
    return other


# --- Names of fields ---


def _fields(step: GaussianStep | ComposedSteps) -> dict[str, list[Field]]:
    """By name the fields that it moves."""
    if isinstance(step, GaussianStep):
        return {name: [(0, place)] for name, place in _places(step).items()}
    together: dict[str, list[Field]] = {}
    alone: dict[str, list[Field]] = {}
    for i, part in enumerate(step.gaussian_steps):
        for name, place in _places(part).items():
            together.setdefault(name, []).append((i, place))
            alone[f"{name}[{i}]"] = [(i, place)]
    return together | alone


def _places(step: GaussianStep) -> dict[str, str]:
    """By name the place of a field of one step."""
    found, used = {NOISE: NOISE, NUM_STEPS: COUNT}, step.level_names_used

    def note(where: str, value: Any) -> Any:
        *path, field = re.findall(r"\w+", where)
        owner: Any = functools.reduce(
            lambda spec, key: spec[int(key)] if key.isdigit() else getattr(spec, key),
            path,
            cast("Any", step),
        )
        # The length of an epoch is a whole number.
        is_drawn = isinstance(owner, Scheme) and not isinstance(owner, EpochScheme)
        if is_drawn and owner.name in used and field == owner.rate_field:
            name = f"{owner.name}.{field}"
            found[name] = name if name.endswith(SIZE) else where
        return value

    mapped(step, note)
    return found


def _checked_names(
    wrt: Any, step: GaussianStep | ComposedSteps
) -> dict[str, list[Field]]:
    """By name the fields of a step that are asked for; refuses other names."""
    if isinstance(wrt, str) or not isinstance(wrt, tuple | list):
        raise TypeError(f"wrt must be a tuple of names, got {_validation.shown(wrt)}")
    fields = _fields(step)
    parts = gaussian_parts(step, _NAME)
    has_epochs = any(epoch_scheme(part.design) is not None for part in parts)
    for name in wrt:
        _validation.choice("wrt", name, tuple(fields))
        if has_epochs and name.partition("[")[0] != NOISE:
            raise NotImplementedError(
                f"{_NAME} with epochs covers {NOISE!r} only, got {name!r}"
            )
    return {name: fields[name] for name in wrt}

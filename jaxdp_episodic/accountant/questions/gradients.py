"""Derivatives of epsilon: differences on one contour, or of answers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

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
from jaxdp_episodic.accountant.losses.privacy_loss import Bounds
from jaxdp_episodic.accountant.methods.exact.held import have_held_slope, held_change
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Question, Run
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
Moved = Callable[[np.ndarray], tuple[Question, tuple[Run, ...]]]
"""From displacements, (m, *shape), of a number to the question and the runs there."""


class Scale(NamedTuple):
    """What widths of differences by a number are shares of; arrays of its shape."""

    size: np.ndarray  # 0 or NaN: there is no derivative
    rises: np.ndarray  # whether the number can rise only
    # The same as `size` where the number only falls; 0: it moves both ways as well.
    falls: np.ndarray


_NAME = "epsilon_and_gradient"
# Points of a difference in widths: about a number, and to one side of it.
_POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
# Weights of fourth order of the values there less that in the middle.
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
# Weights of second order.
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# Widths that are tried in turn, as shares of a number.
_SHARES = (1e-3, 1e-2, 1e-4)
# Those of a rate next to 1, where epsilon under replace_one bends within 1e-4.
_SHARES_DOWN = (*_SHARES, 1e-5, 1e-6)
# Width of differences on one contour, as a share of a number.
_HELD_SHARE = 2e-5
# Width of differences of certified ends, which are known to some 1e-5.
_WIDTH_OF_BOUNDS = 0.04
# Relative error of a difference over the square of what one of second order is off.
_ERROR_OVER_SQUARE = 300.0
# Relative error of answers that is not smooth.
_ROUNDING = 1e-13
# Relative error with which no other width is tried, and the largest that is returned.
_ENOUGH = 1e-8
_LARGEST_ERROR = 1e-6
# Least distance of a rate from 1 at which it has a derivative, and the distance below
# which differences downwards are tried as well.
LEAST_FROM_ONE = 1e-10
_NEXT_TO_ONE = 1e-3


def epsilon_and_gradient(
    step: GaussianStep | ComposedSteps,
    *,
    delta: Any,
    num_steps: Any = None,
    wrt: tuple[str, ...] = ("noise_multiplier",),
    method: str = "exact",
) -> tuple[Any, dict[str, Any]]:
    """Returns epsilon and its derivatives by fields of the step, at fixed delta.

    Most exact derivatives are differences of log(delta) on one integration contour;
    the others are differences of epsilon. The relative error is mostly below 1e-8
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
    is the derivative of one side, or a value between both.

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
        known = np.where(info.is_certified_bound, np.nan, value)
        for name, fields in wanted.items():

            def moved(displacement: np.ndarray, fields: Any = fields) -> Any:
                return question, _moved_runs(parts, counts, fields, displacement)

            scale = _scale_of_fields(parts, counts, fields, shape)
            row = np.where(np.isnan(known), np.nan, slope(moved, known, scale, method))
            if np.any(bounded) and name.partition("[")[0] == NOISE:
                width = _WIDTH_OF_BOUNDS * scale.size
                points = np.multiply.outer(_POINTS[:, 0], width)
                ends = _answers(moved, points, method).value
                with np.errstate(invalid="ignore", divide="ignore"):
                    wide = np.tensordot(_WEIGHTS[:, 0], ends, 1) / width
                row = np.where(bounded, wide, row)
            gradient[name] = row[()]
    return value, gradient


def field_names(step: GaussianStep | ComposedSteps) -> tuple[str, ...]:
    """Returns the names of what epsilon can be differentiated by."""
    return tuple(_fields(step))


# --- Differences ---


def slope(
    moved: Moved,
    answer: np.ndarray,
    scale: Scale,
    method: str,
    *,
    held: bool = True,
) -> np.ndarray:
    """The derivative of an answer, of its shape; NaN, never a wrong number."""
    shape = np.shape(answer)
    scale = Scale(*(np.broadcast_to(part, shape) for part in scale))
    found = np.full(shape, np.nan)
    if method == "exact" and held:
        found = _held_slope(moved, answer, np.where(scale.rises, 0.0, scale.size))
    left = np.flatnonzero(np.isnan(found) & ~np.isnan(answer))
    if not left.size:
        return found

    def some(displacement: np.ndarray) -> np.ndarray:
        points = np.zeros((len(displacement), found.size))
        points[:, left] = displacement
        points = points.reshape(-1, *shape)
        by = worst_path.CONTOUR if method == "exact" else method
        value, _, is_bound = _answers(moved, points, by, left)
        return np.where(is_bound, np.nan, value)

    found = found.reshape(-1)
    found[left] = difference(some, Scale(*(a.reshape(-1)[left] for a in scale)))
    return found.reshape(shape)


def _answers(
    moved: Moved, points: np.ndarray, by: str, index: np.ndarray | None = None
) -> Any:
    """Answers where a number is displaced; of some settings, if there is an index."""
    question, runs = moved(points)

    def chosen(field: np.ndarray, *path: int) -> np.ndarray:
        whole = np.broadcast_to(field, (*points.shape, *path))
        return whole.reshape(len(points), -1, *path)[:, index]

    target = np.broadcast_to(question.target, points.shape)
    if index is not None:
        target = chosen(target)
        # An axis of length 1 stands for all paths.
        runs = [run.map(lambda f: chosen(f, *np.shape(f)[-1:] or (1,))) for run in runs]
    with using_engine("numpy"):
        found = worst_path.answer(question.at(target), runs, by)
    return type(found)(*(np.broadcast_to(field, target.shape) for field in found))


@np.errstate(divide="ignore", invalid="ignore")
def _held_slope(moved: Moved, answer: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The derivative by a difference on one contour, NaN where there is none."""
    shape = np.shape(answer)
    moves = (scale > 0) & np.isfinite(scale)
    width = np.where(moves, _power_of_two(_HELD_SHARE * scale), 0.0)
    both = [moved(sign * width[None]) for sign in (-1.0, 1.0)]
    found = np.full(shape, np.nan).reshape(-1)
    if any(len(runs) != 1 or runs[0].num_paths > 1 for _, runs in both):
        return found.reshape(shape)
    sides = [
        (
            q.at(np.broadcast_to(q.target, (1, *shape)).reshape(-1)),
            runs[0].flattened((1, *shape, 1)),
        )
        for q, runs in both
    ]
    nothing = 0.0 if sides[0][0].is_epsilon else -np.inf
    usual = (moves & (answer > nothing)).reshape(-1)
    for _, run in sides:
        usual &= have_held_slope(run)
    if (index := np.flatnonzero(usual)).size:
        some = tuple((q.take(index), run.take(index)) for q, run in sides)
        change = held_change(some, answer.reshape(-1)[index])
        found[index] = change / (2 * width.reshape(-1)[index])
    return found.reshape(shape)


def difference(
    function: Callable[[np.ndarray], np.ndarray], scale: Scale
) -> np.ndarray:
    """The derivative of a function >= 0 at 0; NaN, never a wrong number."""
    found = _difference(function, scale.size, np.where(scale.rises, 1.0, 0.0))
    falls = np.where(np.isnan(found), scale.falls, 0.0)
    if np.any(falls > 0):
        down = np.full(falls.shape, -1.0)
        down = _difference(function, falls, down, _SHARES_DOWN)
        found = np.where(np.isnan(found), down, found)
    return found


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _difference(
    function: Callable[[np.ndarray], np.ndarray],
    size: np.ndarray,
    end: np.ndarray,
    shares: Sequence[float] = _SHARES,
) -> np.ndarray:
    """The same by differences to both sides, or to that of a sign."""
    sided = (end != 0).astype(int)
    sign = np.where(sided, end, 1.0)
    points, weights, check = (
        sign * table[:, sided] for table in (_POINTS, _WEIGHTS, _CHECK)
    )
    found, best = np.full(size.shape, np.nan), np.full(size.shape, np.inf)
    # Of an infinite number as of 1: nothing changes with it.
    size = np.where(np.isposinf(size), 1.0, size)
    middle = function(np.zeros((1, *size.shape)))[0] if np.any(sided) else 0.0
    for share in shares:
        left = (size > 0) & ~(best <= _ENOUGH)
        if not np.any(left):
            break
        width = _power_of_two(np.where(left, share * size, 1.0))
        values = function(points * np.where(left, width, 0.0))
        most = np.abs(values).max(axis=0)
        is_kink = (values == 0).any(axis=0) & (most > 0) & (sided == 0)
        values = values - np.where(sided, middle, values[0])
        change, other = ((table * values).sum(axis=0) for table in (weights, check))
        moved = np.abs(change)
        off = _ERROR_OVER_SQUARE * ((change - other) / moved) ** 2
        off += _ROUNDING * most / moved
        off = np.where((values == 0).all(axis=0), 0.0, off)
        # Where it is 0 and does not stay so, there is a kink.
        off = np.where(is_kink, np.nan, off)
        better = left & (off < best)
        found = np.where(better, change / width, found)
        best = np.where(better, off, best)
    return np.where(best <= _LARGEST_ERROR, found, np.nan)


def _power_of_two(width: np.ndarray) -> np.ndarray:
    """The next smaller one, by which a number moves exactly."""
    return np.exp2(np.floor(np.log2(width)))


# --- Numbers that are moved ---


def scale_of(place: str, value: Any) -> Scale:
    """The `Scale` of a number by its place."""
    value = np.asarray(value, np.float64)
    if place.rpartition(".")[2] in ("sampling_probability", "delta"):
        return _scale_of_rate(value)
    return Scale(np.abs(value), np.zeros(value.shape, bool), np.zeros(value.shape))


def _scale_of_rate(rate: np.ndarray, most: Any = 1.0) -> Scale:
    """Of a rate, times ``most``."""
    left = 1 - rate
    inside = (left >= LEAST_FROM_ONE) & (rate > 0)
    size = np.where(inside, most * np.minimum(rate, left), 0.0)
    falls = np.where(inside & (left < _NEXT_TO_ONE), most * rate, 0.0)
    return Scale(size, np.zeros(rate.shape, bool), falls)


def _scale_of_fields(
    parts: Sequence[Any],
    counts: Sequence[np.ndarray],
    fields: Sequence[Field],
    shape: tuple[int, ...],
) -> Scale:
    """The `Scale` of fields that move together."""
    each = [_scale(parts, counts, field) for field in fields]
    size, falls = (
        functools.reduce(np.minimum, (np.broadcast_to(a, shape) for a in column))
        for column in ([s.size for s in each], [s.falls for s in each])
    )
    rises = [np.broadcast_to(s.rises, shape) for s in each]
    return Scale(size, np.logical_or.reduce(rises), falls)


def _scale(parts: Sequence[Any], counts: Sequence[np.ndarray], field: Field) -> Scale:
    """The `Scale` of a field of a run."""
    i, place = field
    if place == COUNT:
        most = np.maximum(counts[i], 1.0)
        return Scale(most, counts[i] == 0, np.zeros(most.shape))
    if place.endswith(SIZE):
        draw, group = _drawn(parts[i], place)
        # No larger size can be drawn: nothing changes with it.
        own = _scale_of_rate(np.minimum(draw / group, 1.0), group)
        size = np.where(draw > group, draw, own.size).min(axis=-1)
        return Scale(size, np.zeros(size.shape, bool), own.falls.min(axis=-1))
    found: dict[str, Any] = {}
    mapped(parts[i], found.setdefault)
    return scale_of(place, found[place])


def _moved_runs(
    parts: Sequence[Any],
    counts: Sequence[np.ndarray],
    fields: Sequence[Field],
    displacement: np.ndarray,
) -> tuple[Run, ...]:
    """The runs with fields displaced by real numbers."""
    parts, counts = list(parts), list(counts)
    for i, place in fields:
        if place == COUNT:
            counts[i] = counts[i] + displacement
        else:
            parts[i] = _moved(parts[i], place, displacement)
    return runs_of_parts(parts, counts)


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
    has_epochs = any(epoch_scheme(part.design) or part.bands for part in parts)
    for name in wrt:
        _validation.choice("wrt", name, tuple(fields))
        if has_epochs and name.partition("[")[0] != NOISE:
            raise NotImplementedError(
                f"{_NAME} with epochs or bands covers {NOISE!r} only, got {name!r}"
            )
    return {name: fields[name] for name in wrt}

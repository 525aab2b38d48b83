"""Derivatives of epsilon and others: differences of answers at displaced numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.describe import designs
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
    rate_places,
)
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.calibration import (
    DELTA,
    EPSILON,
    NOISE,
    NUM_STEPS,
    ORDERS,
    RDP,
    STEP_NOISE,
    Question,
)
from jaxdp_episodic.accountant.questions.dominating_pair import in_one_place
from jaxdp_episodic.accountant.questions.worst_path import CONTOUR

# Methods with derivatives.
METHODS = ("exact", "rdp")
_NAME = "epsilon_and_gradient"
# Points of a difference, in widths: central, and one-sided.
_POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
# Weights of fourth order for the values there minus the middle value.
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
# Weights of second order.
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# Estimated relative error of a difference, divided by the squared relative distance of
# the difference of second order.
_ERROR_OVER_SQUARE = 300.0
# Relative error that is good enough.
_ENOUGH = 1e-8
# Smallest distance of a rate from 1 at which it has a derivative, and the distance
# below which one-sided differences are tried as well.
LEAST_FROM_ONE = 1e-10
_NEXT_TO_ONE = 1e-3

Scale = Sequence[tuple[Any, Any]]
"""Differences to be tried in turn: the size of which widths are shares (0 or NaN: no
difference), and 0 for central ones, 1 or -1 for those from the number up or down."""


class _Rule(NamedTuple):
    """How a function is differentiated."""

    shares: tuple[float, ...]  # widths to be tried in turn, as shares of the size
    rounding: float  # relative error of the function
    largest_error: float  # of the derivative, relative; beyond it NaN


_EXACT = _Rule((1e-3, 1e-2, 1e-4), 1e-13, 1e-6)
# Shares of differences downwards from a rate near 1, where epsilon under replace_one
# bends within 1e-4.
_DOWN = (*_EXACT.shares, 1e-5, 1e-6)
# Of certified ends, which are accurate to about 1e-5.
_OF_BOUNDS = _Rule((0.0625, 0.03125), 1e-5, 1e-2)


def epsilon_and_gradient(
    step: GaussianStep | ComposedSteps,
    *,
    delta: Any,
    num_steps: Any = None,
    wrt: tuple[str, ...] = ("noise_multiplier",),
    method: str = "exact",
) -> tuple[Any, dict[str, Any]]:
    """Returns epsilon and its derivatives by fields of the step, at fixed delta.

    They are differences of epsilon. The relative error is mostly below 1e-8
    (*estimates*; docs/proofs.md).

    Names of fields (with epoch schemes or bands only the first one):

    * "noise_multiplier": nats per unit of it.
    * "num_steps", treated as a real number: nats per step. M(z)^T is continued to real
      T; after very few steps the continuation is not unique.
    * "LEVEL.sampling_probability" of a Poisson level, "school.sampling_probability".
    * "LEVEL.size" of a level without replacement, treated as a real number (the rate is
      size over population; the population is fixed).

    For a composed run a name changes all steps that have the field, by the same amount;
    with an index, "noise_multiplier[0]", only one step. Levels below the privacy unit
    have no rate and no name, nor has the number of independent episodes.

    The derivative is *NaN*, never a wrong number, where it is unknown:

    * epsilon is ``inf``;
    * epsilon is a certified bound (`PrivacyInfo.is_certified_bound`), differences of
      which are accurate to about 1e-3, and their estimated error is above 1e-2;
    * differences of several widths disagree by 1e-6, as next to a kink, where another
      path or direction becomes the worst;
    * a rate is at an end of its range (a probability of 0, or within 1e-10 of 1; a size
      equal to the population);
    * epsilon is 0 and delta is attained there.

    It is 0 if epsilon is 0 and needs less than delta. At a kink itself it is a
    one-sided derivative, or a value between both.

    Args:
      step: the step, or a run made by `compose`.
      delta: in (0, 1).
      num_steps: see `epsilon`.
      wrt: names of fields.
      method: "exact" or "rdp".

    Returns:
      ``(epsilon, gradient)``: float64 nats of the broadcast shape of step, ``delta``
      and ``num_steps``, and for every name in ``wrt`` the derivative, of that shape.

    Raises:
      ValueError: a step without ``num_steps``, or an unknown name.
      NotImplementedError: epoch schemes with another name than "noise_multiplier".
    """
    delta = _validation.open_unit_array("delta", delta)
    _validation.choice("method", method, METHODS)
    if isinstance(step, ComposedSteps) and num_steps is not None:
        step, num_steps = compose((step, num_steps)), None
    wanted = _checked_names(wrt, step)
    numbers: dict[str, Any] = {DELTA: delta, NUM_STEPS: num_steps}
    value = api.epsilon(step, **numbers, method=method)
    question = Question(kind=EPSILON, step=step, **numbers, option=method)
    gradient = {}
    for name, fields in wanted.items():
        tried = zip(*(field.scale(question) for field in fields), strict=True)
        scale = [
            (functools.reduce(np.minimum, sizes), functools.reduce(np.maximum, ends))
            for sizes, ends in (zip(*each, strict=True) for each in tried)
        ]
        places = [field.place for field in fields]
        with using_engine("numpy"):
            gradient[name] = slope(question, places, value, scale)[()]
    return value, gradient


# --- Differences ---


def slope(
    question: Question,
    places: Sequence[str],
    answer: Any,
    scale: Scale | None = None,
    *,
    by_bounds: bool = True,
) -> np.ndarray:
    """Returns the derivative by the numbers at some places together, or NaN."""
    # ``by_bounds``: of certified bounds, too, where there are no exact answers.
    method, is_delta = question.option, question.kind == DELTA
    if question.kind == NOISE:
        # Epsilon is fixed at its target.
        every, noise = np.arange(np.size(answer)), np.reshape(answer, -1)
        at = question.of_some(every, [STEP_NOISE], lambda _: noise)
        numbers: Any = {DELTA: at.delta, NUM_STEPS: at.num_steps}
        inner = Question(kind=EPSILON, step=at.step, option=method, **numbers)
        epsilon = inner.answer_by(method).value
        by = functools.partial(slope, inner, answer=epsilon, by_bounds=by_bounds)
        found = 1.0 if EPSILON in places else -by(places)
        return (found / by([STEP_NOISE])).reshape(np.shape(answer))
    scale = scale or scale_of(question, places[0])
    by = functools.partial(difference, question, places)
    if question.kind == RDP:
        return by(curve, scale)

    def unbounded(some: Question) -> np.ndarray:
        """Answers that are not certified bounds, else NaN."""
        found = some.answer_by(CONTOUR if method == "exact" else method)
        return np.where(found.is_certified, np.nan, found.value)

    found = by(unbounded, scale)
    known = answer > 0 if is_delta else np.isfinite(answer)
    left = np.asarray(np.isnan(found) & known)
    if method == "exact" and by_bounds and np.any(left):
        some = question.of_some(np.flatnonzero(left))
        left[left] = some.answer_by(method).is_certified
        size, end = scale[0]
        if is_count(places[0].rpartition(".")[2]):  # they have whole counts only
            left &= size >= 1 / min(_OF_BOUNDS.shares)
        wide = [(np.where(left, size, 0.0), end)]
        of_bounds = by(lambda some: some.answer_by(method).value, wide, _OF_BOUNDS)
        found = np.where(left, of_bounds, found)
    return answer * found if is_delta else found


def curve(question: Question) -> np.ndarray:
    """Returns Rényi divergences at one order for each setting."""
    orders = np.asarray(question.orders, np.float64)[..., None]
    return api.curve_of(question.runs(), orders, question.option, question.shape)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def difference(
    question: Question,
    places: Sequence[str],
    function: Callable[[Question], np.ndarray],
    scale: Scale,
    rule: _Rule = _EXACT,
) -> np.ndarray:
    """Returns the derivative of a function of the question by numbers; or NaN."""

    def moved(by: np.ndarray, index: np.ndarray) -> np.ndarray:
        return function(question.of_some(index, places, lambda x: x + by))

    shape, number = question.shape, math.prod(question.shape)
    found, best = np.full(number, np.nan), np.full(number, np.inf)
    for (size, end), shares in zip(scale, (rule.shares, _DOWN), strict=False):
        size, end = (np.broadcast_to(a, shape).reshape(-1) for a in (size, end))
        # An infinite number gets scale 1: nothing depends on it.
        size = np.where(np.isposinf(size), 1.0, size)
        middle, open_ = np.zeros(number), (size > 0) & ~(best <= _ENOUGH)
        if (sides := np.flatnonzero(open_ & (end != 0))).size:
            middle[sides] = moved(np.zeros(sides.size), sides)
        for share in shares:
            left = np.flatnonzero((size > 0) & ~(best <= _ENOUGH))
            if not left.size:
                break
            sided = np.abs(end[left]).astype(int)
            sign = np.where(sided, end[left], 1.0)
            points, weights, check = (
                sign * table[:, sided] for table in (_POINTS, _WEIGHTS, _CHECK)
            )
            # A power of two, so that displacements are exact.
            width = np.exp2(np.floor(np.log2(share * size[left])))
            values = moved(points * width, left)
            most = np.abs(values).max(axis=0)
            is_kink = (values == 0).any(axis=0) & (most > 0) & (sided == 0)
            values = values - np.where(sided, middle[left], values[0])
            change, other = ((table * values).sum(axis=0) for table in (weights, check))
            size_of_change = np.abs(change)
            off = _ERROR_OVER_SQUARE * ((change - other) / size_of_change) ** 2
            off += rule.rounding * most / size_of_change
            off = np.where((values == 0).all(axis=0), 0.0, off)
            # A value of 0 next to others means a kink.
            off = np.where(is_kink, np.nan, off)
            better = off < best[left]
            found[left] = np.where(better, change / width, found[left])
            best[left] = np.where(better, off, best[left])
    return np.where(best <= rule.largest_error, found, np.nan).reshape(shape)


def scale_of(question: Question, place: str) -> Scale:
    """Returns the `Scale` of the number with this field path."""
    value = np.asarray(question.all_numbers[place], np.float64)
    name = place.rpartition(".")[2]
    if name in ("sampling_probability", DELTA):
        return _scale_of_rate(value)
    if is_count(name):  # it can only increase from 0
        return [(np.maximum(value, 1.0), value == 0)]
    if place == ORDERS:  # each exceeds 1
        value = np.where(np.isfinite(value), value - 1, np.nan)
    return [(np.abs(value), 0)]


def is_count(name: str) -> bool:
    """Returns whether a number is a count of steps."""
    return name == NUM_STEPS or name.startswith("counts[")


def _scale_of_rate(rate: np.ndarray, most: Any = 1.0) -> Scale:
    """The `Scale` of a rate, times ``most``."""
    left = 1 - rate
    inside = (left >= LEAST_FROM_ONE) & (rate > 0)
    size = np.where(inside, most * np.minimum(rate, left), 0.0)
    return [(size, 0), (np.where(inside & (left < _NEXT_TO_ONE), most * rate, 0.0), -1)]


# --- Names of fields ---


class _Field(NamedTuple):
    """A number of a run that has a name."""

    place: str  # its path in the question
    part: GaussianStep
    scheme: designs.Scheme | None = None  # whose rate it is

    def scale(self, question: Question) -> Scale:
        """Returns its scale; for a size that of the rate, times the group's size."""
        if not isinstance(self.scheme, designs.WithoutReplacement):
            return scale_of(question, self.place)
        levels = self.part.path_rates
        position = self.part.level_names_used.index(self.scheme.name)
        draw, group = levels.draw_sizes[position], levels.group_sizes[position]
        assert draw is not None and group is not None  # it has a size
        # A size above the population has no effect.
        (size, end), (down, side) = _scale_of_rate(np.minimum(draw / group, 1.0), group)
        size = np.where(draw > group, draw, size)
        return [(size.min(axis=-1), end), (down.min(axis=-1), side)]


def _fields(step: GaussianStep | ComposedSteps) -> dict[str, list[_Field]]:
    """The fields of each name; with an index, that of one step of a run."""
    is_run, found = isinstance(step, ComposedSteps), dict[str, list[_Field]]()
    for i, part in enumerate(gaussian_parts(step, _NAME)):
        inside, count = "step.", NUM_STEPS
        if is_run:
            inside, count = f"step.steps[{i}].", f"step.counts[{i}]"
        own = {NOISE: _Field(inside + NOISE, part), NUM_STEPS: _Field(count, part)}
        places = rate_places(part)
        for scheme in part.design.schemes:
            # The length of an epoch is a whole number.
            is_used = scheme.name in part.level_names_used
            if is_used and not isinstance(scheme, designs.EpochScheme):
                field = _Field(inside + places[scheme.name], part, scheme)
                own[f"{scheme.name}.{scheme.rate_field}"] = field
        for name, field in own.items():
            found.setdefault(name, []).append(field)
            if is_run:
                found[f"{name}[{i}]"] = [field]
    return found


def _checked_names(
    wrt: Any, step: GaussianStep | ComposedSteps
) -> dict[str, list[_Field]]:
    """The fields of each name in ``wrt``; raises for unknown names."""
    _validation.instance("wrt", wrt, tuple | list, "a tuple of names")
    fields = _fields(step)
    parts = [field.part for field in fields[NOISE]]
    has_epochs = any(designs.epoch_scheme(part.design) or part.bands for part in parts)
    for name in wrt:
        _validation.choice("wrt", name, tuple(fields))
        if has_epochs and name.partition("[")[0] != NOISE:
            raise NotImplementedError(
                f"{_NAME} with epochs or bands covers {NOISE!r} only, got {name!r}"
            )
        for _, part, scheme in fields[name]:
            is_size = isinstance(scheme, designs.WithoutReplacement)
            if is_size and in_one_place(part).privacy_unit in designs.OWNED:
                raise NotImplementedError(
                    f"{_NAME} does not cover {name!r} with "
                    f"privacy_unit={str(part.privacy_unit)!r}"
                )
    return {name: fields[name] for name in wrt}

"""Derivatives of epsilon: differences on one contour, or of epsilons."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import (
    OWNED,
    EpochScheme,
    Poisson,
    Scheme,
)
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
    parts_of,
)
from jaxdp_episodic.accountant.methods.exact.held import held_change
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Question, Run
from jaxdp_episodic.accountant.questions import api, worst_path
from jaxdp_episodic.accountant.questions.dominating_pair import (
    in_one_place,
    runs_of_parts,
)

# Methods with derivatives.
METHODS = ("exact", "rdp")
# Names of arguments, and of a field that every step has.
DELTA = "delta"
EPSILON = "epsilon"
NOISE = "noise_multiplier"
NUM_STEPS = "num_steps"
ORDERS = "orders"
Field = tuple[int, str]
"""A number of a run: the index of its part and its name, see `epsilon_and_gradient`."""
Moved = Callable[[np.ndarray, np.ndarray], tuple[Question, Sequence[Run]]]
"""From displacements (..., k) of a number in flattened settings (k,) to runs there."""


class Scale(NamedTuple):
    """The scale of a number, of which widths of differences are shares; arrays."""

    size: np.ndarray  # 0 or NaN: no derivative
    rises: np.ndarray  # whether the number can only increase
    # The scale for one-sided differences downwards, tried second; 0: none.
    falls: np.ndarray

    def where(self, condition: np.ndarray) -> Scale:
        """Returns the scale with no derivatives elsewhere."""
        return Scale(*(np.where(condition, part, 0) for part in self))


_NAME = "epsilon_and_gradient"
# Points of a difference, in widths: central, and one-sided.
_POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
# Weights of fourth order for the values there minus the middle value.
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
# Weights of second order.
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# Widths to be tried in turn, as shares of the scale.
_SHARES = (1e-3, 1e-2, 1e-4)
# The same for a rate near 1, where epsilon under replace_one bends within 1e-4.
_SHARES_DOWN = (*_SHARES, 1e-5, 1e-6)
# Estimated relative error of a difference, divided by the squared relative distance of
# the difference of second order.
_ERROR_OVER_SQUARE = 300.0
# Relative rounding error of epsilons.
_ROUNDING = 1e-13
# Relative error that is good enough, and the largest that is returned.
_ENOUGH = 1e-8
_LARGEST_ERROR = 1e-6
# Width of differences on one contour, as a share of the scale.
_HELD_SHARE = 2e-5
# Widths for certified ends, which are accurate to about 1e-5; and the largest relative
# distance of the derivatives by both.
_OF_BOUNDS = (0.0625, 0.03125)
_BOUNDS_WITHIN = 1e-2
# Smallest distance of a rate from 1 at which it has a derivative, and the distance
# below which one-sided differences are tried as well.
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

    Most exact derivatives are differences of log(delta) on one integration contour; the
    others are differences of epsilon. The relative error is mostly below 1e-8
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
      which are accurate to about 1e-3, and two widths disagree by 1e-2;
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
    parts = gaussian_parts(step, _NAME)
    delta = _validation.open_unit_array("delta", delta)
    _validation.choice("method", method, METHODS)
    if isinstance(step, ComposedSteps) and num_steps is not None:
        step, num_steps = compose((step, num_steps)), None
    wanted = _checked_names(wrt, step)
    runs, shape = api.checked_runs(step, num_steps, delta=delta)
    _, counts = parts_of(step, num_steps)
    counts = [np.broadcast_to(np.asarray(n, np.float64), shape) for n in counts]
    value = api.epsilon(step, delta=delta, num_steps=num_steps, method=method)
    gradient = {}
    for name, fields in wanted.items():

        def moved(displacement: np.ndarray, index: np.ndarray, f: Any = fields) -> Any:
            some = [settings_of(part, shape, index) for part in parts]
            numbers = [taken_of(count, shape, index) for count in counts]
            question = EpsilonAt(np.log(taken_of(delta, shape, index)))
            return question, _moved_runs(some, numbers, f, displacement)

        scale = _scale_of_fields(parts, counts, fields, shape)
        gradient[name] = slope(moved, value, scale, method)[()]
    return value, gradient


# --- Differences ---


def slope(
    moved: Moved, answer: np.ndarray, scale: Scale, method: str, *, held: bool = True
) -> np.ndarray:
    """Returns the derivative of an epsilon or log(delta); NaN if it is unknown."""
    scale = Scale(*(np.broadcast_to(part, np.shape(answer)).ravel() for part in scale))
    found = np.full(np.size(answer), np.nan)
    if method == "exact" and held:
        found = _held_slope(moved, np.ravel(answer), scale)
    by = worst_path.CONTOUR if method == "exact" else method
    values = functools.partial(_answers, moved, by, is_exact=True)
    others = difference(values, scale.where(np.isnan(found)))
    found = np.where(np.isnan(found), others, found)
    if method == "exact" and held:
        unknown = np.flatnonzero(np.isnan(found) & np.isfinite(np.ravel(answer)))
        found[unknown] = _slope_of_bounds(moved, unknown, scale)
    return found.reshape(np.shape(answer))


def _slope_of_bounds(moved: Moved, index: np.ndarray, scale: Scale) -> np.ndarray:
    """The derivatives of some answers that are certified bounds; NaN for others."""
    if not index.size:
        return np.empty(0)
    with using_engine("numpy"):
        bounds = worst_path.answer(*moved(np.zeros((1, index.size)), index), "exact")
    size, rises, _ = (part[index] for part in scale)
    size = np.where(bounds.is_certified.reshape(-1), size, 0.0)
    ends = functools.partial(_answers, moved, "exact")
    wide, narrow = (
        _difference(lambda d, i: ends(d, index[i]), size, rises + 0.0, (share,), np.inf)
        for share in _OF_BOUNDS
    )
    near = np.abs(wide - narrow) <= _BOUNDS_WITHIN * np.abs(wide)
    return np.where(near, wide, np.nan)


def _answers(
    moved: Moved,
    method: str,
    displacement: np.ndarray,
    index: np.ndarray,
    *,
    is_exact: bool = False,
) -> np.ndarray:
    """Epsilons or logarithms of delta; for ``is_exact`` NaN where these are bounds."""
    with using_engine("numpy"):
        found = worst_path.answer(*moved(displacement, index), method)
    return np.where(is_exact & found.is_certified, np.nan, found.value)


@np.errstate(divide="ignore", invalid="ignore")
def _held_slope(moved: Moved, answer: np.ndarray, scale: Scale) -> np.ndarray:
    """The derivative by a difference on one contour; NaN if that does not apply."""
    usable = (scale.size > 0) & np.isfinite(scale.size) & ~scale.rises.astype(bool)
    width = np.where(usable, _power_of_two(_HELD_SHARE * scale.size), 0.0)
    sides = []
    for sign in (-1.0, 1.0):
        question, runs = moved(sign * width, np.arange(answer.size))
        if len(runs) != 1 or runs[0].num_paths > 1:
            return np.full(answer.size, np.nan)
        target = np.broadcast_to(question.target, answer.shape)
        sides.append((question.at(target), runs[0].flattened((answer.size, 1))))
    return held_change(sides, answer, usable) / (2 * width)


def difference(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
    scale: Scale,
    shares: Sequence[float] = _SHARES,
    largest_error: float = _LARGEST_ERROR,
) -> np.ndarray:
    """Returns the derivatives of functions at displacement 0; NaN if unknown."""
    shape = np.shape(scale.size)
    size, rises, falls = (np.broadcast_to(a, shape).reshape(-1) for a in scale)
    found = _difference(function, size, rises.astype(float), shares, largest_error)
    if (left := np.flatnonzero(np.isnan(found) & (falls > 0))).size:
        down = -np.ones(left.size)
        found[left] = _difference(
            lambda d, index: function(d, left[index]), falls[left], down, _SHARES_DOWN
        )
    return found.reshape(shape)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _difference(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
    size: np.ndarray,
    end: np.ndarray,
    shares: Sequence[float],
    largest_error: float = _LARGEST_ERROR,
) -> np.ndarray:
    """The same by central differences, or one-sided where ``end`` is 1 or -1."""
    found, best = np.full(size.shape, np.nan), np.full(size.shape, np.inf)
    # An infinite number gets scale 1: nothing depends on it.
    size = np.where(np.isposinf(size), 1.0, size)
    middle, sides = np.zeros(size.shape), np.flatnonzero(end)
    if sides.size:
        middle[sides] = function(np.zeros((1, sides.size)), sides)[0]
    for share in shares:
        left = np.flatnonzero((size > 0) & ~(best <= _ENOUGH))
        if not left.size:
            break
        sided = np.abs(end[left]).astype(int)
        sign = np.where(sided, end[left], 1.0)
        points, weights, check = (
            sign * table[:, sided] for table in (_POINTS, _WEIGHTS, _CHECK)
        )
        width = _power_of_two(share * size[left])
        values = function(points * width, left)
        most = np.abs(values).max(axis=0)
        is_kink = (values == 0).any(axis=0) & (most > 0) & (sided == 0)
        values = values - np.where(sided, middle[left], values[0])
        change, other = ((table * values).sum(axis=0) for table in (weights, check))
        moved = np.abs(change)
        off = _ERROR_OVER_SQUARE * ((change - other) / moved) ** 2
        off += _ROUNDING * most / moved
        off = np.where((values == 0).all(axis=0), 0.0, off)
        # A value of 0 next to others means a kink.
        off = np.where(is_kink, np.nan, off)
        better = off < best[left]
        found[left] = np.where(better, change / width, found[left])
        best[left] = np.where(better, off, best[left])
    return np.where(best <= largest_error, found, np.nan)


def _power_of_two(width: np.ndarray) -> np.ndarray:
    """Rounds a width down to a power of two, so that displacements are exact."""
    return np.exp2(np.floor(np.log2(width)))


# --- Displaced numbers ---


def taken_of(value: Any, shape: tuple[int, ...], index: np.ndarray) -> np.ndarray:
    """Returns the numbers of some of the flattened settings."""
    return np.broadcast_to(value, shape).reshape(-1)[index]


def settings_of(spec: Any, shape: tuple[int, ...], index: np.ndarray) -> Any:
    """Returns the spec of some of the flattened settings, unchecked."""

    def some(_: str, value: Any) -> Any:
        return taken_of(value, shape, index) if np.ndim(value) else value

    return mapped(spec, some, checked=False)


def scale_of(place: str, value: Any) -> Scale:
    """Returns the `Scale` of a number with this field path."""
    value = np.asarray(value, np.float64)
    if place.rpartition(".")[2] in ("sampling_probability", "delta"):
        return _scale_of_rate(value)
    if place == ORDERS:  # each exceeds 1
        value = np.where(np.isfinite(value), value - 1, np.nan)
    return Scale(np.abs(value), np.zeros(value.shape, bool), np.zeros(value.shape))


def _scale_of_rate(rate: np.ndarray, most: Any = 1.0) -> Scale:
    """The `Scale` of a rate, times ``most``."""
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
    """The `Scale` of fields that change together: the smallest."""
    each = []
    for i, name in fields:
        scheme = _schemes(parts[i]).get(name)
        if name == NOISE:
            scale = scale_of(name, parts[i].noise_multiplier)
        elif scheme is None:
            most = np.maximum(counts[i], 1.0)
            scale = Scale(most, counts[i] == 0, np.zeros(most.shape))
        elif isinstance(scheme, Poisson):
            scale = scale_of(name, scheme.sampling_probability)
        else:
            draw, group = _drawn(parts[i], scheme)
            # A size above the population has no effect.
            own = _scale_of_rate(np.minimum(draw / group, 1.0), group)
            size = np.where(draw > group, draw, own.size).min(axis=-1)
            scale = Scale(size, np.zeros(size.shape, bool), own.falls.min(axis=-1))
        each.append([np.broadcast_to(part, shape) for part in scale])
    sizes, rises, falls = zip(*each, strict=True)
    smallest = np.minimum.reduce
    return Scale(smallest(sizes), np.logical_or.reduce(rises), smallest(falls))


def _moved_runs(
    parts: Sequence[Any],
    counts: Sequence[np.ndarray],
    fields: Sequence[Field],
    displacement: np.ndarray,
) -> tuple[Run, ...]:
    """The runs with some fields displaced by real numbers."""
    parts, counts = list(parts), list(counts)
    for i, name in fields:
        part = parts[i]
        if name == NUM_STEPS:
            counts[i] = counts[i] + displacement
        elif name == NOISE:
            noise = np.asarray(part.noise_multiplier, np.float64) + displacement
            parts[i] = dataclasses.replace(part, noise_multiplier=noise)
        else:
            scheme = _schemes(part)[name]
            field, one = scheme.rate_field, in_one_place(part)
            if field == "size" and one.privacy_unit in OWNED:
                raise NotImplementedError(
                    f"{_NAME} does not cover {name!r} with "
                    f"privacy_unit={str(part.privacy_unit)!r}"
                )

            def real(where: str, value: Any, field: str = field) -> Any:
                return value + displacement if where == field else value

            # A size is a whole number: unchecked.
            moved = mapped(scheme, real, checked=False)
            drawn = one.design.with_scheme(moved)
            parts[i] = dataclasses.replace(one, sampling=drawn)
    return runs_of_parts(parts, counts)


def _drawn(step: GaussianStep, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """The draw size and the group size of a level without replacement."""
    position = step.level_names_used.index(scheme.name)
    levels = step.path_rates
    draw, group = levels.draw_sizes[position], levels.group_sizes[position]
    assert draw is not None and group is not None  # it has a size
    return draw, group


# --- Names of fields ---


def _schemes(step: GaussianStep) -> dict[str, Scheme]:
    """The schemes with a rate that has a derivative, by the name of the rate."""
    used = step.level_names_used
    return {
        f"{scheme.name}.{scheme.rate_field}": scheme
        for scheme in step.design.schemes
        # The length of an epoch is a whole number.
        if scheme.name in used and not isinstance(scheme, EpochScheme)
    }


def _fields(step: GaussianStep | ComposedSteps) -> dict[str, list[Field]]:
    """The fields of each name."""
    parts = gaussian_parts(step, _NAME)
    together: dict[str, list[Field]] = {}
    alone: dict[str, list[Field]] = {}
    for i, part in enumerate(parts):
        for name in (NOISE, NUM_STEPS, *_schemes(part)):
            together.setdefault(name, []).append((i, name))
            alone[f"{name}[{i}]"] = [(i, name)]
    return together | alone if isinstance(step, ComposedSteps) else together


def _checked_names(
    wrt: Any, step: GaussianStep | ComposedSteps
) -> dict[str, list[Field]]:
    """The fields of each name in ``wrt``; raises for unknown names."""
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

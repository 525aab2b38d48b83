"""Derivatives of an answer, by one rule.

At fixed delta ``d epsilon / d x = (d log delta / d x) / (-d log delta / d epsilon)``.
The numerator is a difference of fourth order. What the method chose for the answer is
held: its path, its direction, and its contour or order. The answer does not depend on
these, or is stationary in them, so log(delta) of moved runs is a smooth function.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.held import (
    ATTAINED,
    LARGEST_ERROR,
    LARGEST_SHARE,
    Moves,
    best_quotient,
    moves_at_order,
    moves_by_contour,
    moves_of_one_step,
)
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.method import (
    rdp_answer,
    rdp_bound,
)
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions import worst_path
from jaxdp_episodic.accountant.questions.dominating_pair import (
    in_one_place,
    runs_of_parts,
)

# Methods whose answers have derivatives.
METHODS = ("exact", "rdp")
# Field of a part: how often it is taken, as a real number.
COUNT = "count"
# End of a field that is a whole number, of which the rate is moved.
SIZE = ".size"
Field = tuple[int, str]
"""A number of a run: its part, and `COUNT` or the place of a field in `mapped`."""


# Least distance of a rate from 1 at which all widths are above its rounding.
LEAST_FROM_ONE = 1e-10
# Nats of log(delta), for a change by the whole number, that are as good as nothing.
_NOTHING = 1e-9
# Width of differences of certified ends, as a share of a number.
_WIDTH_OF_BOUNDS = 0.04
# How log(delta) near an answer is known.
_HELD = {
    "profile": moves_of_one_step,
    "exact": moves_by_contour,
    "rdp": moves_at_order,
}


def scale_of_rate(rate: Any) -> Any:
    """The scale of a probability; 0, no derivative, where it is at an end or near 1."""
    return np.where(1 - rate >= LEAST_FROM_ONE, np.minimum(rate, 1 - rate), 0.0)


def is_constant(
    epsilon: np.ndarray, log_delta: np.ndarray, runs: Sequence[Run], method: str
) -> np.ndarray:
    """Where epsilon is 0, and stays it as anything moves a little."""
    if not np.any(epsilon <= 0):
        return np.zeros(epsilon.shape, bool)
    by = worst_path.CONTOUR if method == "exact" else method
    at_zero = worst_path.answer(DeltaAt(np.zeros(epsilon.shape)), runs, by).value
    return (epsilon <= 0) & (at_zero < log_delta)


def slopes(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    parts: Sequence[Any],
    counts: Sequence[np.ndarray],
    fields: Sequence[Field],
    method: str,
) -> tuple[np.ndarray, dict[Field, np.ndarray]]:
    """``-d log(delta) / d epsilon`` and the derivatives by fields at an answer.

    *Exact* up to rounding and quadrature, mostly to 1e-8. NaN, never a wrong number,
    where the answer is 0, infinite or only a bound.

    Of epsilon and log(delta), of the settings' shape, one is the answer to the other.
    The derivatives are rows of `total`.
    """
    runs = runs_of_parts(parts, counts)
    found = np.full((1 + len(fields), 2, epsilon.size), np.nan)
    inside = (epsilon > 0) & np.isfinite(epsilon) & np.isfinite(log_delta)
    index = np.flatnonzero(inside & (log_delta < 0))
    asked = epsilon.reshape(-1)[index], log_delta.reshape(-1)[index]
    rows = _Rows(epsilon.shape or (1,), index, np.zeros(index.size, int))
    theorem, path = _attained(*asked, runs, rows, method)
    for number in np.unique(theorem).tolist():
        rows = rows._replace(path=path)
        run = runs[number].map(rows.of)
        good = ~run.is_unprotected & (run.log_kept() == 0) & (theorem == number)
        single = (run.num_steps == 1) & (method == "exact")
        for by, kind in (("profile", single), (method, ~single)):
            some = np.flatnonzero(good & kind)
            if some.size:
                moving = _Moving(parts, counts, (number, len(runs)), rows.take(some))
                at = asked[0][some], asked[1][some], run.take(some)
                found[..., index[some]] = _of_alike(*at, moving, fields, by)
    found = found.reshape(*found.shape[:2], *epsilon.shape)
    return found[0, 0], dict(zip(fields, found[1:], strict=True))


def slopes_of_bounds(
    log_delta: np.ndarray,
    parts: Sequence[Any],
    counts: Sequence[np.ndarray],
    fields: Sequence[Field],
    method: str,
) -> dict[Field, np.ndarray]:
    """``d epsilon / d field`` of certified upper ends, by wide differences.

    *Estimates*: ends are known to some 1e-5 of epsilon, these to some 1e-3. NaN by
    other numbers than noise.
    """
    found = {field: np.full(log_delta.shape, np.nan) for field in fields}
    for i, place in fields:
        if place.rpartition(".")[2] != "noise_multiplier":
            continue
        width = _WIDTH_OF_BOUNDS * np.abs(_value(parts[i], place))
        width = np.broadcast_to(width, log_delta.shape)
        ends = []
        for factor in (-2.0, -1.0, 1.0, 2.0):
            moved = list(parts)
            moved[i] = _moved(parts[i], place, factor * width)
            runs = runs_of_parts(moved, counts)
            ends.append(worst_path.answer(EpsilonAt(log_delta), runs, method).value)
        with np.errstate(invalid="ignore", divide="ignore"):  # NaN: not known
            change = ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]
            found[i, place] = change / (12 * width)
    return found


def total(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of derivatives; NaN, never a wrong number, where it is not known.

    Each row is (2, *settings): the derivative, and an estimate of its error.
    """
    value, error = np.sum(rows, axis=0)
    return np.where(error <= LARGEST_ERROR * np.abs(value), value, np.nan)


class _Rows(NamedTuple):
    """Some settings of a shape, each on one path."""

    shape: tuple[int, ...]
    index: np.ndarray  # (n,), flat
    path: np.ndarray  # (n,)

    def take(self, some: np.ndarray) -> _Rows:
        return self._replace(index=self.index[some], path=self.path[some])

    def of(self, field: np.ndarray, *ahead: int) -> np.ndarray:
        """These rows of a field, (n,), or (K n,) of one with a further axis ahead."""
        paths = np.shape(field)[-1:] or (1,)
        at = *np.unravel_index(self.index, self.shape), self.path * (paths > (1,))
        return np.broadcast_to(field, (*ahead, *self.shape, *paths))[..., *at].ravel()


class _Moving(NamedTuple):
    """What is moved: runs of parts and counts, by one of several theorems."""

    parts: Sequence[Any]
    counts: Sequence[np.ndarray]
    theorem: tuple[int, int]  # its number, of so many
    rows: _Rows

    def scale(self, field: Field) -> np.ndarray:
        """What widths are a share of; NaN or 0: there is no derivative."""
        i, place = field
        if place == COUNT:
            return np.maximum(self.count(i), 1.0)
        if place.endswith(SIZE):
            draw, group = drawn(self.parts[i], place)
            # No larger size can be drawn: nothing changes with it.
            share = np.where(draw > group, draw, group * scale_of_rate(draw / group))
            return self.rows.of(share)
        return self.rows.of(scale_of(place, _value(self.parts[i], place))[..., None])

    def count(self, i: int) -> np.ndarray:
        return self.rows.of(np.asarray(self.counts[i], np.float64)[..., None])

    def runs(self, field: Field, left: np.ndarray, displaced: np.ndarray) -> Run:
        """The runs of some rows, (K m,), at displacements of a field, (K, m)."""
        rows, (i, place) = self.rows.take(left), field
        whole = np.zeros((len(displaced), math.prod(rows.shape)))
        whole[:, rows.index] = displaced
        whole = whole.reshape(-1, *rows.shape)
        parts, counts = list(self.parts), list(self.counts)
        if place == COUNT:
            counts[i] = counts[i] + whole
        else:
            parts[i] = _moved(parts[i], place, whole)
        runs, (number, several) = runs_of_parts(parts, counts), self.theorem
        if len(runs) != several:
            raise NotImplementedError("a small move makes it a run of another kind")
        return runs[number].map(lambda values: rows.of(values, len(whole)))


def _of_alike(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    moving: _Moving,
    fields: Sequence[Field],
    by: str,
) -> np.ndarray:
    """(1 + fields, 2, n): `slopes` of (n,) settings that are computed alike."""
    asked = epsilon, log_delta, run
    held = _HELD[by](*asked)
    found = [np.array([held.slope, 0 * held.slope])]
    powers = other = held
    if by != "rdp" and any(place == COUNT for _, place in fields):
        # A profile says nothing of the powers of its step; and these depend on the
        # contour after very few steps.
        powers = held if by == "exact" else moves_by_contour(*asked)
        other = moves_by_contour(*asked, other=True)
    for field in fields:
        is_power = field[1] == COUNT and by != "rdp"
        row = _quotient(epsilon, powers if is_power else held, moving, field)
        if is_power:
            check, _ = _quotient(epsilon, other, moving, field)
            row[1] = np.maximum(row[1], np.abs(row[0] - check))
        found.append(row)
    return np.array(found)


def _quotient(
    epsilon: np.ndarray,
    held: Moves,
    moving: _Moving,
    field: Field,
) -> np.ndarray:
    """The derivative of log(delta) by a field, and its error, (2, n)."""
    scale = moving.scale(field)
    at_end = np.zeros(epsilon.size, int)
    if field[1] == COUNT:
        at_end += moving.count(field[0]) == 0

    def changes(left: np.ndarray, displaced: np.ndarray) -> np.ndarray:
        values = held.of(left, moving.runs(field, left, displaced))
        return values - held.log_delta[left]

    def width(found: np.ndarray, change: float) -> np.ndarray:
        # Epsilon changes by its own size, about, as a number does.
        guess = (1 + epsilon * held.slope) / np.maximum(scale, 1e-300)
        steep = np.where(np.abs(found) > 0, np.abs(found), guess)
        return np.minimum(change / steep, LARGEST_SHARE * scale)

    widths = [functools.partial(width, change=change) for change in held.nats]
    found, error = best_quotient(changes, widths, at_end, held.rounding)
    is_nothing = np.abs(found) * scale <= _NOTHING
    return np.array([found, np.where(is_nothing, 0.0, error * np.abs(found))])


def difference(
    function: Callable[[np.ndarray], np.ndarray], *widths: np.ndarray
) -> np.ndarray:
    """The derivative of a function that is known to rounding; NaN where it bends.

    It maps displacements (K, *settings) to (K, *settings); widths are the settings'.
    """
    shape = widths[0].shape
    flat = [lambda _, width=width: np.reshape(width, -1) for width in widths]
    size = math.prod(shape)

    def values(left: np.ndarray, displaced: np.ndarray) -> np.ndarray:
        whole = np.zeros((len(displaced), size))
        whole[:, left] = displaced
        return function(whole.reshape(-1, *shape)).reshape(whole.shape)[:, left]

    found, error = best_quotient(values, flat, np.zeros(size, int))
    return np.where(error < LARGEST_ERROR, found, np.nan).reshape(shape)


def scale_of(place: str, value: np.ndarray) -> np.ndarray:
    """What differences by a number are taken at shares of."""
    is_rate = place.rpartition(".")[2] in ("sampling_probability", "delta")
    value = np.asarray(value, np.float64)
    return scale_of_rate(value) if is_rate else np.abs(value)


def _value(part: Any, place: str) -> Any:
    """The number at a place of `mapped`."""
    found: dict[str, Any] = {}
    mapped(part, found.setdefault)
    return found[place]


def drawn(step: GaussianStep, place: str) -> tuple[np.ndarray, np.ndarray]:
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
            return (
                np.asarray(value, np.float64) + displacement if at == place else value
            )

        return mapped(part, move)
    # A size is a whole number; its rate is not.
    step = in_one_place(part)
    if step.privacy_unit == PERSON:
        raise NotImplementedError(
            f"epsilon_and_gradient does not cover {place!r} with privacy_unit='person'"
        )
    draw, group = drawn(step, place)
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


def _attained(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    runs: Sequence[Run],
    rows: _Rows,
    method: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Of each row the theorem and the path that its answer is of; (n,)."""
    paths = np.arange(max(run.num_paths for run in runs))
    if len(runs) == 1:
        paths = worst_path.undominated_paths(runs[0])
    if len(runs) == paths.size == 1 or not epsilon.size:
        return np.zeros(epsilon.size, int), np.full(epsilon.size, paths[0])
    values = np.full((len(runs), epsilon.size, paths.size), -np.inf)
    solve = rdp_answer
    if method == "exact":
        solve = functools.partial(exact_answer, certify=False)
    grid = np.repeat(rows.index, paths.size), np.tile(paths, epsilon.size)
    at, target = (np.repeat(one, paths.size) for one in (epsilon, log_delta))
    for value, run in zip(values, runs, strict=True):
        every = run.map(_Rows(rows.shape, *grid).of)
        # Rényi's bound says of most paths that they are not the worst.
        bound, _ = rdp_bound(EpsilonAt(target), every)
        near = np.flatnonzero(bound >= at * (1 - ATTAINED))
        if near.size:
            found = solve(DeltaAt(at[near]), every.take(near)).value
            value.reshape(-1)[near] = found
    # The least of the theorems counts, path by path, and the worst of the paths.
    worst = np.argmax(values.min(axis=0), axis=1)
    theorem = np.argmin(values[:, np.arange(epsilon.size), worst], axis=0)
    return theorem, paths[worst]

"""Derivatives of an answer, by one rule.

At fixed delta ``d epsilon / d x = (d log delta / d x) / (-d log delta / d epsilon)``,
where log(delta) is a method's at the contour, the direction, the path or the order of
its answer, all of them held (`methods.slopes`). The numerator is a difference quotient
of fourth order of that smooth function, checked by one of second order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.method import rdp_answer, rdp_bound
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.methods.slopes import (
    ATTAINED,
    Moves,
    moves_at_order,
    moves_by_contour,
    moves_by_profile,
)
from jaxdp_episodic.accountant.numerics.loops import namespace
from jaxdp_episodic.accountant.questions import worst_path
from jaxdp_episodic.accountant.questions.worst_path import undominated_paths

# Methods whose answers have derivatives.
METHODS = ("exact", "rdp")

# Points of the quotient, in widths: about a parameter, and above one that is at 0; and
# weights of the values there less that in the middle, of fourth and of second order.
_POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# What knows log(delta) of runs near one; the first width as a share of a parameter's
# scale, and nats by which it should change in those tried then. Rényi's bound is known
# to rounding, and at a cliff of the moments it bends within a hundredth of a nat.
_MOVES: dict[str, tuple[Callable[..., Moves], float, tuple[float, ...]]] = {
    "profile": (moves_by_profile, 1e-3, (0.1, 0.01, 1e-3)),
    "exact": (moves_by_contour, 1e-3, (0.1, 0.4, 0.01)),
    "rdp": (moves_at_order, 1e-5, (1e-3, 1e-4, 1e-5)),
}
# Nats by which log(delta) should change at first, by a guess that is too large.
_FIRST_NATS = 0.03
# The largest width, as such a share; and nats beyond which log(delta) may bend more
# than quotients of second order tell.
_LARGEST_SHARE = 2e-2
_FAR = 0.5
# Relative error of a quotient over the square of what one of second order is off: of
# log(delta) = -x²/2 - log(x), with the argument moved, 14 |log(delta)|.
_ERROR_OVER_SQUARE = 300.0
# Relative error of a quotient with which no other width is tried; the largest one with
# which it is returned, also of that on another contour; and, in nats of log(delta) as a
# parameter changes by its whole scale, what is as good as nothing.
_ENOUGH = 1e-8
_LARGEST = 1e-6
_NOTHING = 1e-9
# Least distance of a rate from 1 of which all widths are above its rounding.
_RESOLVED = 1e-10
# Rounding of log(delta), relative to 1 and its size; and as a share of its estimate.
_ROUNDING = 1e-15
_ROUNDED = 0.03


class Parameter(NamedTuple):
    """A real number of a run, in each setting, that answers are differentiated by."""

    # What widths are a share of, of the settings' shape and a last axis for the paths;
    # NaN or 0: there is no derivative.
    scale: np.ndarray
    # From displacements, (K, *settings), to the runs with these, settings as wide.
    moved: Callable[[np.ndarray], Sequence[Run]]
    # A number of steps, (*settings,): 0 where none is taken; None of other parameters.
    count: np.ndarray | None = None


def scale_of_rate(rate: Any) -> Any:
    """The scale of a probability; 0, no derivative, where it is at an end or near 1."""
    xp = namespace(rate)
    return xp.where(1 - rate >= _RESOLVED, xp.minimum(rate, 1 - rate), 0.0)


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
    runs: Sequence[Run],
    parameters: Sequence[Parameter],
    method: str,
) -> tuple[np.ndarray, np.ndarray]:
    """``-d log(delta) / d epsilon`` and the derivatives by parameters at an answer.

    *Exact* up to rounding and quadrature, mostly to 1e-8. NaN, never a wrong number,
    where the method's answer is not known to be the smooth function's: it is 0 or
    infinite, only a bound, or the two quotients do not agree.

    Of epsilon and log(delta), of the settings' shape, one is the answer to the other;
    runs are those of `worst_path.answer`, the method is one of `METHODS`. The former is
    > 0 and of the settings' shape, the latter are (parameters, *settings).
    """
    found = np.full((1 + len(parameters), epsilon.size), np.nan)
    inside = (epsilon > 0) & np.isfinite(epsilon) & np.isfinite(log_delta)
    index = np.flatnonzero(inside & (log_delta < 0))
    if index.size:
        asked = epsilon.reshape(-1)[index], log_delta.reshape(-1)[index]
        shape = epsilon.shape or (1,)
        theorem, path = _attained(*asked, runs, shape, index, method)
        for number in np.unique(theorem).tolist():
            settings = _Settings(shape, index, path, number, len(runs))
            rows = runs[number].map(settings.of)
            good = ~rows.is_unprotected & (rows.log_kept() == 0) & (theorem == number)
            single = (rows.num_steps == 1) & (method == "exact")
            for kind, by in ((single, "profile"), (~single, method)):
                part = np.flatnonzero(good & kind)
                if part.size:
                    at, target = (one[part] for one in asked)
                    some = rows.take(part), parameters, settings.take(part), by
                    found[:, index[part]] = _of_alike((at, target), *some)
    found = found.reshape(len(found), *epsilon.shape)
    return found[0], found[1:]


class _Settings(NamedTuple):
    """Some settings of a shape, each with the path and the theorem of its answer."""

    shape: tuple[int, ...]
    index: np.ndarray  # (n,), flat
    path: np.ndarray  # (n,)
    theorem: int
    num_theorems: int

    def take(self, some: np.ndarray) -> _Settings:
        return self._replace(index=self.index[some], path=self.path[some])

    def of(self, field: np.ndarray, *ahead: int) -> np.ndarray:
        """These rows of a field, (n,), or (K n,) of one with a further axis ahead."""
        paths = np.shape(field)[-1:] or (1,)
        at = *np.unravel_index(self.index, self.shape), self.path * (paths > (1,))
        return np.broadcast_to(field, (*ahead, *self.shape, *paths))[..., *at].ravel()

    def moved(self, parameter: Parameter, displacement: np.ndarray) -> Run:
        """The run at (K, n) displacements of a parameter, (K n,)."""
        whole = np.zeros((len(displacement), math.prod(self.shape)))
        whole[:, self.index] = displacement
        runs = parameter.moved(whole.reshape(-1, *self.shape))
        if len(runs) != self.num_theorems:
            raise NotImplementedError("a small move makes it a run of another kind")
        return runs[self.theorem].map(lambda field: self.of(field, len(whole)))


def _of_alike(
    asked: tuple[np.ndarray, np.ndarray],
    run: Run,
    parameters: Sequence[Parameter],
    settings: _Settings,
    method: str,
) -> np.ndarray:
    """(1 + parameters, n): `slopes` of (n,) settings that are computed alike."""
    moves = _MOVES[method][0](*asked, run)
    ways = by_counts = [(moves, method)]
    if method != "rdp" and any(one.count is not None for one in parameters):
        # A single step's profile says nothing of its powers.
        powers = moves_by_contour(*asked, run) if method == "profile" else moves
        of = functools.partial(powers.of, other=True)
        (here,) = of(np.arange(len(asked[0])), run)
        other = powers._replace(log_delta=here, of=of)
        by_counts = [(powers, "exact"), (other, "exact")]
    found = [moves.slope]
    for one in parameters:
        some = ways if one.count is None else by_counts
        row, *checks = (_quotient(asked[0], *way, one, settings) for way in some)
        for check in checks:
            row[~(np.abs(row - check) <= _LARGEST * np.abs(check))] = np.nan
        found.append(row)
    return np.array(found)


@np.errstate(divide="ignore", invalid="ignore")
def _quotient(
    epsilon: np.ndarray,
    moves: Moves,
    method: str,
    parameter: Parameter,
    settings: _Settings,
) -> np.ndarray:
    """The difference quotient of log(delta) by a parameter; NaN: not known."""
    _, first_share, tries = _MOVES[method]
    scale, at_end = settings.of(parameter.scale), np.zeros(epsilon.size, int)
    if parameter.count is not None:
        at_end += parameter.count.reshape(-1)[settings.index] == 0
    rounding = _ROUNDING * (1 + np.abs(moves.log_delta)) + _ROUNDED * moves.rounding
    found, best = np.full(scale.size, np.nan), np.full(scale.size, np.inf)
    # Epsilon changes by its own size, about, as a parameter does.
    width = np.minimum(first_share, _FIRST_NATS / (1 + epsilon * moves.slope)) * scale
    left = np.flatnonzero(np.isfinite(width) & (scale > 0))
    for nats in (*tries, math.nan):
        if not left.size:
            break
        step, end = _exact(width[left]), at_end[left]
        runs = settings.take(left).moved(parameter, _POINTS[:, end] * step)
        values = moves.of(left, runs) - moves.log_delta[left]
        change, off = _judged(values, end, rounding[left])
        size = np.abs(change)
        off = np.where(size > _FAR, np.maximum(off, _LARGEST), off)
        better = off < best[left]
        best[left] = np.where(better, off, best[left])
        found[left] = np.where(better, change / step, found[left])
        left = left[~(best[left] <= _ENOUGH)]
        steep = np.maximum(np.abs(np.nan_to_num(found, nan=1.0)), 1e-300)
        width = np.minimum(nats / steep, _LARGEST_SHARE * scale)
    small = np.abs(found) * scale <= _NOTHING
    return np.where((best < _LARGEST) | small, found, np.nan)


def _exact(width: np.ndarray) -> np.ndarray:
    """A power of two that is not larger: a number moves by exactly that."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp2(np.floor(np.log2(width)))


def _judged(values: np.ndarray, at_end: Any, rounding: Any) -> tuple[Any, Any]:
    """The quotient times the width, of (4, ..., n) changes, and its relative error."""
    change, second = (
        np.einsum("k...,k...->...", weights[:, at_end], values)
        for weights in (_WEIGHTS, _CHECK)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        size, apart = np.abs(change), np.abs(change - second)
        agree = apart <= rounding
        apart = np.where(agree, 0.0, apart / size)
        off = _ERROR_OVER_SQUARE * apart**2 + rounding / size
    # Of an infinite value it is NaN, and better than no other.
    return change, np.where((size == 0) & agree, 0.0, off)


def difference(
    function: Callable[[np.ndarray], np.ndarray], *widths: np.ndarray
) -> np.ndarray:
    """The derivative of a function that is known to rounding; NaN where it bends.

    It maps displacements (K, *settings) to (..., K, *settings); of widths, each of the
    settings' shape, the one is taken at which quotients of two orders agree best.
    """
    best, result = np.inf, np.nan
    for width in widths:
        width, inside = _exact(width), np.zeros(width.shape, int)
        values = function(_POINTS[:, inside] * width)
        values = np.moveaxis(values, -1 - width.ndim, 0)
        change, off = _judged(values, inside, 0.0)
        result = np.where(off < best, change / width, result)
        best = np.where(off < best, off, best)
        if np.all(best <= _ENOUGH):
            break
    return np.where(best < _LARGEST, result, np.nan)


def _attained(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    runs: Sequence[Run],
    shape: tuple[int, ...],
    index: np.ndarray,
    method: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Of each setting the theorem and the path that its answer is of; (n,)."""
    paths = np.arange(max(run.num_paths for run in runs))
    if len(runs) == 1:
        paths = undominated_paths(runs[0])
    if len(runs) == paths.size == 1:
        return np.zeros(index.size, np.int64), np.full(index.size, paths[0])
    values = np.full((len(runs), index.size, paths.size), -np.inf)
    solve = rdp_answer
    if method == "exact":
        solve = functools.partial(exact_answer, certify=False)
    grid = np.repeat(index, paths.size), np.tile(paths, index.size)
    at, target = (np.repeat(one, paths.size) for one in (epsilon, log_delta))
    for value, run in zip(values, runs, strict=True):
        every = run.map(_Settings(shape, *grid, 0, 1).of)
        # Rényi's bound says of most paths that they are not the worst.
        bound, _ = rdp_bound(EpsilonAt(target), every)
        near = np.flatnonzero(bound >= at * (1 - ATTAINED))
        if near.size:
            found = solve(DeltaAt(at[near]), every.take(near)).value
            value.reshape(-1)[near] = found
    # The least of the theorems counts, path by path, and the worst of the paths.
    worst = np.argmax(values.min(axis=0), axis=1)
    theorem = np.argmin(values[:, np.arange(index.size), worst], axis=0)
    return theorem, paths[worst]

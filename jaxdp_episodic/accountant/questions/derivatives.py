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

from jaxdp_episodic.accountant.losses.protocols import Tabulated
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.method import rdp_answer, rdp_bound
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.methods.slopes import (
    ATTAINED,
    Moved,
    Moves,
    moves_at_order,
    moves_by_contour,
    moves_by_profile,
)
from jaxdp_episodic.accountant.numerics.loops import namespace
from jaxdp_episodic.accountant.questions import worst_path
from jaxdp_episodic.accountant.questions.paths import undominated_paths

# Methods whose answers have derivatives.
METHODS = ("exact", "rdp")
# Points of the quotient, in widths: about a parameter, and above one that is at 0; and
# weights of the values there less that in the middle, of fourth and of second order.
_POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# The same of one side: where the nodes in the middle are others it is far off.
_ONE_SIDED = np.array([[0.0, 0.0, 2.0, -0.5], [2.0, -0.5, 0.0, 0.0]]).T

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
# Rounding of log(delta), relative to 1 and its size; and as a share of the error.
_ROUNDING = 1e-15
_ROUNDED = 0.03


class _Way(NamedTuple):
    """How log(delta) of moved runs is known."""

    moves: Callable[..., Moves]
    # The first width, as a share of a parameter's scale; and nats by which log(delta)
    # should change in those tried then.
    share: float
    nats: tuple[float, ...] = ()
    # The relative error of a quotient, of what one of second order is off: a factor of
    # a power of it; and that with which no other width is tried.
    error: tuple[float, float] = (_ERROR_OVER_SQUARE, 2.0)
    enough: float = _ENOUGH
    check: np.ndarray = _CHECK  # weights of the quotient of second order


# Nodes of losses are known to rounding, and their weights fall by up to 50 nats. Where
# the rules by which they are laid have a kink, a quotient is off by twice what the two
# differ. Rényi's bound is known to rounding too, and at a cliff of the moments it bends
# within a hundredth of a nat.
_BY_NODES = _Way(
    functools.partial(moves_by_contour, by_nodes=True),
    1.6e-5,
    error=(2.0, 1.0),
    enough=1e-7,
    check=_ONE_SIDED,
)
_WAYS = {
    "profile": _Way(moves_by_profile, 1e-3, (0.1, 0.01, 1e-3)),
    "exact": _Way(moves_by_contour, 1e-3, (0.1, 0.4, 0.01)),
    "rdp": _Way(moves_at_order, 1e-5, (1e-3, 1e-4, 1e-5)),
}


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

    *Exact* up to rounding and quadrature: relative error about 1e-8. NaN, never a wrong
    number, where the method's answer is not known to be the smooth function's: it is 0
    or infinite, only a bound, or the two quotients do not agree.

    Of epsilon and log(delta), of the settings' shape, one is the answer to the other;
    runs are those of `worst_path.answer`, the method is one of `METHODS`. The former is
    > 0 and of the settings' shape, the latter are (parameters, *settings).
    """
    found = np.full((1 + len(parameters), epsilon.size), np.nan)
    inside = (epsilon > 0) & np.isfinite(epsilon) & np.isfinite(log_delta)
    index = np.flatnonzero(inside & (log_delta < 0))
    if index.size:
        asked = epsilon.reshape(-1)[index], log_delta.reshape(-1)[index]
        theorem, path = _attained(*asked, runs, epsilon.shape, index, method)
        for number in np.unique(theorem).tolist():
            settings = _Settings(epsilon.shape, index, path, number, len(runs))
            rows = settings.of(runs[number])
            good = ~rows.is_unprotected & (rows.log_kept() == 0) & (theorem == number)
            single = (rows.num_steps == 1) & (method == "exact")
            for kind, by in ((single, "profile"), (~single, method)):
                part = np.flatnonzero(good & kind)
                if part.size:
                    at, target = (one[part] for one in asked)
                    some = rows.take(part), parameters, settings.take(part), by
                    found[:, index[part]] = _of_alike(at, target, *some)
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

    def rows(self, field: np.ndarray, paths: int, *ahead: int) -> np.ndarray:
        """Of a field with so many paths the rows of these settings, flat."""
        shape = (*ahead, *self.shape, paths)
        begins = np.arange(math.prod(ahead))[:, None] * (math.prod(self.shape) * paths)
        every = (begins + self.index * paths + self.path).reshape(-1)
        return np.broadcast_to(field, shape)[np.unravel_index(every, shape)]

    def of(self, run: Run, *ahead: int) -> Run:
        """The run in these settings, (n,), or (K n,) of one with a further axis."""
        return run.map(lambda field: self.rows(field, run.shape[-1], *ahead))

    def widths(self, parameter: Parameter) -> tuple[np.ndarray, np.ndarray]:
        """(n,) scales of a parameter, and whether it is a count of 0."""
        paths = max(parameter.scale.shape[-1], self.path.max() + 1)
        at_end = np.zeros(self.index.size, int)
        if parameter.count is not None:
            at_end += parameter.count.reshape(-1)[self.index] == 0
        return self.rows(parameter.scale, paths), at_end

    def moved(self, parameter: Parameter, displacement: np.ndarray) -> Run:
        """The run at (K, n) displacements of a parameter, (K n,)."""
        whole = np.zeros((len(displacement), math.prod(self.shape)))
        whole[:, self.index] = displacement
        runs = parameter.moved(whole.reshape(-1, *self.shape))
        if len(runs) != self.num_theorems:
            raise NotImplementedError("a small move makes it a run of another kind")
        return self.of(runs[self.theorem], len(whole))


def _of_alike(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    parameters: Sequence[Parameter],
    settings: _Settings,
    method: str,
) -> np.ndarray:
    """(1 + parameters, n): `slopes` of (n,) settings that are computed alike."""
    problem = epsilon, log_delta, run, settings, parameters
    counts = [i for i, one in enumerate(parameters) if one.count is not None]
    found = _quotients(*problem, *_ways(method, run))
    if method == "profile" and counts:
        # A single step's profile says nothing of its powers.
        powers = [parameters[i] for i in counts]
        found[[1 + i for i in counts]] = _quotients(
            *problem[:4], powers, *_ways("exact", run)
        )[1:]
    if method != "rdp" and counts:
        again = [
            way._replace(moves=functools.partial(way.moves, other=True))
            for way in _ways("exact", run)
        ]
        powers = [parameters[i] for i in counts]
        check = _quotients(*problem[:4], powers, *again)[1:]
        for i, other in zip(counts, check, strict=True):
            row = found[1 + i]
            row[~(np.abs(row - other) <= _LARGEST * np.abs(other))] = np.nan
    return found


def _ways(method: str, run: Run) -> tuple[_Way, ...]:
    """The ways to know quotients, tried in turn."""
    fixed = all(one.compiles and not isinstance(one, Tabulated) for one in run.losses)
    by_nodes = method == "exact" and fixed
    return (*((_BY_NODES,) if by_nodes else ()), _WAYS[method])


def _quotients(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    settings: _Settings,
    parameters: Sequence[Parameter],
    *ways: _Way,
) -> np.ndarray:
    """``-d log(delta) / d epsilon``, and difference quotients by the parameters."""
    shape = len(parameters), epsilon.size
    scale, at_end = np.empty(shape), np.zeros(shape, int)
    for i, parameter in enumerate(parameters):
        scale[i], at_end[i] = settings.widths(parameter)
    scale = np.where(np.isfinite(scale) & (scale > 0), scale, np.nan)
    found, best = np.full(shape, np.nan), np.full(shape, np.inf)
    by_epsilon, left = np.full(epsilon.size, np.nan), np.arange(epsilon.size)
    for way, nats in [(one, nats) for one in ways for nats in (None, *one.nats)]:
        if not left.size:
            break
        wide = way.share * scale
        if nats is not None:
            steep = np.maximum(np.abs(np.nan_to_num(found, nan=1.0)), 1e-300)
            wide = np.minimum(nats / steep, _LARGEST_SHARE * scale)
        step, ends = _exact(np.nan_to_num(wide[:, left])), at_end[:, left]
        far, some = _POINTS[:, ends] * step, settings.take(left)
        runs = [some.moved(one, far[:, i]) for i, one in enumerate(parameters)]
        weights = np.stack([_WEIGHTS[:, ends], way.check[:, ends]]).transpose(
            2, 1, 0, 3
        )
        asked = epsilon[left], log_delta[left], run.take(left)
        moves = way.moves(*asked, Moved(runs, weights))
        known = ~np.isnan(moves.log_delta)
        by_epsilon[left] = np.where(known, moves.slope, by_epsilon[left])
        fourth, second = np.moveaxis(moves.quotients, 1, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            size, apart = np.abs(fourth), np.abs(fourth - second)
            rounding = _ROUNDING * (1 + np.abs(moves.log_delta)) / size
            apart = np.where(apart / size > rounding, apart / size, 0.0)
            off = way.error[0] * apart ** way.error[1] + rounding
            off += _ROUNDED * moves.error
            off = np.where(size > _FAR, np.maximum(off, _LARGEST), off)
            off = np.where(size == 0, 0.0, off)
            better = known & (off < best[:, left])
            found[:, left] = np.where(better, fourth / step, found[:, left])
        best[:, left] = np.where(better, off, best[:, left])
        again = ~np.isnan(scale[:, left]) & ~(best[:, left] <= way.enough)
        left = left[known & again.any(axis=0)]
    good = (best < _LARGEST) | (np.abs(found) * scale <= _NOTHING)
    return np.concatenate([by_epsilon[None], np.where(good, found, np.nan)])


def _exact(width: np.ndarray) -> np.ndarray:
    """A power of two that is not larger: a number moves by exactly that."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp2(np.floor(np.log2(width)))


def _differences(values: np.ndarray, at_end: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of fourth and second order, of (4, ..., n) values less that in the middle."""
    fourth, second = _WEIGHTS[:, at_end], _CHECK[:, at_end]
    of = "k...,k...->..."
    return np.einsum(of, fourth, values), np.einsum(of, second, values)


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
        values = np.moveaxis(function(_POINTS[:, inside] * width), -1 - width.ndim, 0)
        fourth, second = _differences(values, inside)
        off = np.where(fourth == 0, 0.0, np.abs(fourth - second) / np.abs(fourth))
        off = np.where(np.isnan(off), np.inf, _ERROR_OVER_SQUARE * off**2)
        result = np.where(off < best, fourth / width, result)
        best = np.minimum(off, best)
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
        every = _Settings(shape, *grid, 0, 1).of(run)
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

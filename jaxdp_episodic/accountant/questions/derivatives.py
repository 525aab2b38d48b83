"""Derivatives of an answer, by one rule.

At fixed delta ``d epsilon / d x = (d log delta / d x) / (-d log delta / d epsilon)``,
where log(delta) is a method's at the contour, the direction, the path or the order of
its answer, all of them held (`methods.slopes`). The numerator is a difference quotient
of fourth order of that smooth function, checked by one of second order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt, Question
from jaxdp_episodic.accountant.methods.rdp.method import rdp_answer, rdp_bound
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.methods.slopes import (
    ATTAINED,
    Moves,
    moves_at_order,
    moves_by_contour,
    moves_by_profile,
)
from jaxdp_episodic.accountant.questions import worst_path
from jaxdp_episodic.accountant.questions.paths import undominated_paths

# Methods whose answers have derivatives.
METHODS = ("exact", "rdp")
# Points of the quotient, in widths: about a parameter, and above one that is at 0.
POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
# Weights, of the values at these points less that in the middle, of fourth order ...
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
# ... and of second order.
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# The largest width, as a share of a parameter's scale.
_LARGEST_SHARE = 2e-2
# First widths, as such shares, and nats by which log(delta) should change in those
# that are tried in turn. Rényi's bound is known to rounding, and at a cliff of the
# moments it bends within a hundredth of a nat.
_FIRST = {"profile": 1e-3, "exact": 1e-3, "rdp": 1e-5}
_TRIES = {
    "profile": (0.1, 0.01, 1e-3),
    "exact": (0.1, 0.4, 0.01),
    "rdp": (1e-3, 1e-4, 1e-5),
}
# Nats beyond which it may bend more than quotients of second order tell.
_FAR = 0.5
# Relative error of a quotient over the square of what one of second order is off: of
# log(delta) = -x²/2 - log(x), with the argument moved, 14 |log(delta)|.
_ERROR_OVER_SQUARE = 300.0
# Relative error of a quotient with which no other width is tried; the largest one with
# which it is returned; and, in nats of log(delta) as a parameter changes by its whole
# scale, what is as good as nothing.
_ENOUGH = 1e-8
_LARGEST = 1e-6
_NOTHING = 1e-9
# Rounding of log(delta), relative to 1 and its size; and as a share of the error.
_ROUNDING = 1e-15
_ROUNDED = 0.03
# Relative difference of the quotients on two contours up to which they are one.
_AGREEMENT = 1e-6


class Parameter(NamedTuple):
    """A real number of a run, in each setting, that answers are differentiated by."""

    # What widths are a share of, of the settings' shape and a last axis for the paths;
    # NaN: there is no derivative.
    scale: np.ndarray
    # From displacements, (K, *settings), to the runs with these, settings as wide.
    moved: Callable[[np.ndarray], Sequence[Run]]
    # A number of steps, (*settings,): 0 where none is taken; None of other parameters.
    count: np.ndarray | None = None


def gradient_of_epsilon(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    runs: Sequence[Run],
    parameters: Sequence[Parameter],
    method: str,
) -> np.ndarray:
    """(parameters, *settings) derivatives of epsilon at fixed delta; see `slopes`.

    They are 0 where epsilon 0 needs less than delta.
    """
    question = EpsilonAt(log_delta)
    found = slopes(question, epsilon, runs, parameters, method)
    gradient = found.along / found.by_epsilon
    return np.where(is_constant(epsilon, log_delta, runs, method), 0.0, gradient)


def is_constant(
    epsilon: np.ndarray, log_delta: np.ndarray, runs: Sequence[Run], method: str
) -> np.ndarray:
    """Where epsilon is 0, and stays it as anything moves a little."""
    if not np.any(epsilon <= 0):
        return np.zeros(epsilon.shape, bool)
    by = worst_path.CONTOUR if method == "exact" else method
    at_zero = worst_path.answer(DeltaAt(np.zeros(epsilon.shape)), runs, by).value
    return (epsilon <= 0) & (at_zero < log_delta)


class Slopes(NamedTuple):
    """Derivatives of log(delta), NaN where they are not known."""

    by_epsilon: np.ndarray  # -d log(delta) / d epsilon, > 0, of the settings' shape
    along: np.ndarray  # (parameters, *settings)


def slopes(
    question: Question,
    answer: np.ndarray,
    runs: Sequence[Run],
    parameters: Sequence[Parameter],
    method: str,
) -> Slopes:
    """Derivatives of log(delta) at the epsilon of an answer, or of a question.

    *Exact* up to rounding and quadrature: relative error about 1e-8. NaN, never a wrong
    number, where the method's answer is not known to be the smooth function's: it is 0
    or infinite, only a bound, or the two quotients do not agree.

    Args:
      question: its target is of the settings' shape.
      answer: epsilon, or log(delta), of the settings' shape.
      runs: as of `worst_path.answer`.
      parameters: what to differentiate by.
      method: "exact" or "rdp".

    Raises:
      NotImplementedError: a mechanism or a method without derivatives.
    """
    if method not in METHODS:
        raise NotImplementedError(
            f"answers with method={method!r} have no derivatives; those of "
            f"{METHODS} have"
        )
    epsilon, log_delta = answer, question.target
    if not question.is_epsilon:
        epsilon, log_delta = log_delta, answer
    shape = answer.shape
    result = Slopes(np.full(shape, np.nan), np.full((len(parameters), *shape), np.nan))
    inside = (epsilon > 0) & np.isfinite(epsilon) & np.isfinite(log_delta)
    index = np.flatnonzero(inside & (log_delta < 0))
    if not index.size:
        return result
    flat = result.along.reshape(len(parameters), answer.size)
    asked, known = question.at(question.target.reshape(-1)), answer.reshape(-1)
    theorem, path = _attained(
        asked.take(index), known[index], runs, shape, index, method
    )
    for number in np.unique(theorem):
        here = np.flatnonzero(theorem == number)
        settings = _Settings(shape, index[here], path[here], int(number), len(runs))
        rows = settings.of(runs[number])
        good = ~rows.is_unprotected & (rows.log_kept() == 0)
        single = (rows.num_steps == 1) & (method == "exact")
        for is_single in (False, True):
            part = np.flatnonzero(good & (single == is_single))
            if part.size:
                by_epsilon, along = _of_alike(
                    asked.take(index[here[part]]),
                    known[index[here[part]]],
                    rows.take(part),
                    parameters,
                    settings.take(part),
                    "profile" if is_single else method,
                )
                result.by_epsilon.reshape(-1)[index[here[part]]] = by_epsilon
                flat[:, index[here[part]]] = along
    return result


class _Settings(NamedTuple):
    """Some settings of a shape, each with the path and the theorem of its answer."""

    shape: tuple[int, ...]
    index: np.ndarray  # (n,), flat
    path: np.ndarray  # (n,)
    theorem: int
    num_theorems: int

    def take(self, some: np.ndarray) -> _Settings:
        return self._replace(index=self.index[some], path=self.path[some])

    def of(self, run: Run) -> Run:
        """The run in these settings, (n,), or (K, n) of one with a further axis."""
        ahead = max(len(run.shape) - len(self.shape) - 1, 0)
        where = (self.path,)
        if self.shape:
            where = (*np.unravel_index(self.index, self.shape), self.path)
        shape = (*run.shape[:ahead], *self.shape, run.shape[-1])

        def rows(field: np.ndarray) -> np.ndarray:
            return np.broadcast_to(field, shape)[(slice(None),) * ahead + where]

        return run.map(rows)

    def widths(self, parameter: Parameter) -> tuple[np.ndarray, np.ndarray]:
        """(n,) scales of a parameter, and whether it is a count of 0."""
        paths = (*self.shape, max(parameter.scale.shape[-1], self.path.max() + 1))
        scale = np.broadcast_to(parameter.scale, paths).reshape(-1, paths[-1])
        if parameter.count is None:
            at_end = np.zeros(self.index.size, bool)
        else:
            at_end = parameter.count.reshape(-1)[self.index] == 0
        return scale[self.index, self.path], at_end

    def moved(self, parameter: Parameter, displacement: np.ndarray) -> list[Run]:
        """The run at each of (K, n) displacements of a parameter."""
        whole = np.zeros((len(displacement), int(np.prod(self.shape))))
        whole[:, self.index] = displacement
        runs = parameter.moved(whole.reshape(-1, *self.shape))
        if len(runs) != self.num_theorems:
            raise NotImplementedError("a small move makes it a run of another kind")
        rows = self.of(runs[self.theorem])
        return [rows.map(lambda field, k=k: field[k]) for k in range(len(displacement))]


def _of_alike(
    question: Question,
    answer: np.ndarray,
    run: Run,
    parameters: Sequence[Parameter],
    settings: _Settings,
    method: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) and (parameters, n), of (n,) settings that are computed alike."""
    along = np.full((len(parameters), answer.size), np.nan)
    counts = [
        i for i, parameter in enumerate(parameters) if parameter.count is not None
    ]
    others = [i for i in range(len(parameters)) if i not in counts]
    # A single step's profile says nothing of its powers.
    power = "exact" if method == "profile" else method
    by_epsilon = np.full(answer.size, np.nan)
    for chosen, by in ((counts, power), (others, method)):
        if chosen or chosen is others and not counts:
            some = [parameters[i] for i in chosen]
            solve = _MOVES[by]
            problem = question, answer, run, some, settings, by
            by_epsilon, along[chosen] = _quotients(solve, *problem)
            if chosen is counts and by == "exact":
                again = functools.partial(solve, other=True)
                _, check = _quotients(again, *problem)
                apart = ~(np.abs(along[counts] - check) <= _AGREEMENT * np.abs(check))
                along[counts] = np.where(apart, np.nan, along[counts])
    return by_epsilon, along


_MOVES: dict[str, Callable[..., Moves]] = {
    "profile": moves_by_profile,
    "exact": moves_by_contour,
    "rdp": moves_at_order,
}


def _quotients(
    solve: Callable[..., Moves],
    question: Question,
    answer: np.ndarray,
    run: Run,
    parameters: Sequence[Parameter],
    settings: _Settings,
    method: str,
) -> tuple[np.ndarray, np.ndarray]:
    """``-d log(delta) / d epsilon``, and difference quotients by each parameter."""
    shape = len(parameters), answer.size
    scale, at_end = np.zeros(shape), np.zeros(shape, int)
    for i, parameter in enumerate(parameters):
        scale[i], at_end[i] = settings.widths(parameter)
    best, found = np.full(shape, np.inf), np.full(shape, np.nan)
    by_epsilon = np.full(answer.size, np.nan)
    left = np.isfinite(scale) & (scale > 0)
    for nats in (None, *_TRIES[method]):
        which = np.flatnonzero(left.any(axis=1))
        index = np.flatnonzero(left.any(axis=0))
        if nats is None:
            index = np.arange(answer.size)  # of no parameter too
        elif not index.size:
            break
        grid = np.ix_(which, index)
        ends, most = at_end[grid], np.where(left, scale, 0.0)[grid]
        width = _FIRST[method] * most
        if nats is not None:
            steep = np.abs(np.nan_to_num(found[grid], nan=1.0))
            width = np.minimum(nats / np.maximum(steep, 1e-300), _LARGEST_SHARE * most)
        some, moved = settings.take(index), []
        for row, i in enumerate(which.tolist()):
            moved += some.moved(parameters[i], POINTS[:, ends[row]] * width[row])
        moves = solve(question.take(index), answer[index], run.take(index), moved)
        if nats is None:
            by_epsilon = np.where(np.isnan(moves.log_delta), np.nan, moves.slope)
        values = moves.moved.reshape(len(which), len(POINTS), index.size)
        values = values - moves.log_delta
        fourth = np.einsum("kmn,mkn->mn", _WEIGHTS[:, ends], values)
        second = np.einsum("kmn,mkn->mn", _CHECK[:, ends], values)
        rounding = _ROUNDING * (1 + np.abs(moves.log_delta)) + _ROUNDED * moves.error
        with np.errstate(invalid="ignore", divide="ignore"):
            size, apart = np.abs(fourth), np.abs(fourth - second)
            apart = np.where(apart > rounding, apart, 0.0) / size
            off = _ERROR_OVER_SQUARE * apart**2 + rounding / size
            off = np.where(size > _FAR, np.maximum(off, _LARGEST), off)
            off = np.where(size == 0, 0.0, off)
            quotient = fourth / width
        better = left[grid] & (off < best[grid])
        best[grid] = np.where(better, off, best[grid])
        found[grid] = np.where(better, quotient, found[grid])
        left &= ~(best <= _ENOUGH) & ~np.isnan(by_epsilon)
    small = np.abs(found) * scale <= _NOTHING
    return by_epsilon, np.where((best < _LARGEST) | small, found, np.nan)


def difference(
    function: Callable[[np.ndarray], np.ndarray], *widths: np.ndarray
) -> np.ndarray:
    """The derivative of a function that is known to rounding; NaN where it bends.

    It maps displacements (K, *settings) to (..., K, *settings); of widths, each of the
    settings' shape, the one is taken at which quotients of two orders agree best.
    """
    best, result = np.inf, np.nan
    for width in widths:
        far = POINTS[:, 0].reshape(-1, *(1,) * width.ndim) * width
        values = np.moveaxis(function(far), -1 - width.ndim, 0)
        fourth = np.tensordot(_WEIGHTS[:, 0], values, 1)
        apart = np.abs(fourth - np.tensordot(_CHECK[:, 0], values, 1))
        off = np.where(fourth == 0, 0.0, apart / np.abs(fourth))
        off = np.where(np.isnan(off), np.inf, _ERROR_OVER_SQUARE * off**2)
        result = np.where(off < best, fourth / width, result)
        best = np.minimum(off, best)
        if np.all(best <= _ENOUGH):
            break
    return np.where(best < _LARGEST, result, np.nan)


def _attained(
    question: Question,
    answer: np.ndarray,
    runs: Sequence[Run],
    shape: tuple[int, ...],
    index: np.ndarray,
    method: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Of each setting the theorem and the path that its answer is of; (n,)."""
    paths = np.arange(max(run.num_paths for run in runs))
    if len(runs) == 1:
        paths = undominated_paths(runs[0])
    path, theorem = np.full(index.size, paths[0]), np.zeros(index.size, np.int64)
    if len(runs) == paths.size == 1:
        return theorem, path
    epsilon, log_delta = answer, question.target
    if not question.is_epsilon:
        epsilon, log_delta = log_delta, answer
    values = np.full((len(runs), index.size, paths.size), -np.inf)
    solve = rdp_answer
    if method == "exact":
        solve = functools.partial(exact_answer, certify=False)
    for value, run in zip(values, runs, strict=True):
        grid = np.repeat(index, paths.size), np.tile(paths, index.size)
        every = _Settings(shape, *grid, 0, 1).of(run)
        at, target = (np.repeat(a, paths.size) for a in (epsilon, log_delta))
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

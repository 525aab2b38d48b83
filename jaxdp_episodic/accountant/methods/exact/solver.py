"""Settings solved by contour integrals, with as many nodes as their error asks for.

Few nodes are enough for most settings; those whose error estimate is too large are
integrated again with more.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import (
    choose_engine,
    engine_name,
    jitted,
    on_jax,
    using_engine,
)
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import initial_epsilon, integral
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.exact.shared import (
    LARGEST_RATIO,
    NEAR,
    shared_contours,
    shared_lengths,
)
from jaxdp_episodic.accountant.methods.question import DeltaAt, Question
from jaxdp_episodic.accountant.methods.run import Group, Run

# From so many settings on compiling a pass pays: it takes about as long as they do on
# NumPy.
BREAK_EVEN = 4_000
# Largest relative error estimate of an answer that is called exact.
TOLERANCE = 1e-6
# Nats below delta at which the distributions are truncated. The later, the nearer to 0
# rare large losses keep the contour, where more of the integrand cancels.
_CUT = 50.0
# Nats by which the truncated mass must stay below delta.
_CUT_MARGIN = 30.0
# As `NEAR`, but from where on the error is unknown.
_FAR = 10.0
# With a larger error estimate of log(delta) the sum is nothing but rounding noise.
_NOISE = 10.0
# Settings with a larger error on a shared contour get their own.
_SHARED_ERROR = 1e-9
_CHUNKS = Chunks(8, (1, 8), (8, 512, 4096))
# Of a batch of many settings, with the fewest that go into such chunks: the larger the
# less of its time a chunk takes to start, but all cores want some, and few padding.
_LARGE_CHUNKS = ((256, 1024), (64, 32), (_CHUNKS.cpu[-1], 0))
# At most so many settings take less time one by one than in a padded chunk.
_ONE_BY_ONE = 3


class _Pass(NamedTuple):
    """How many nodes are spent on a setting.

    Attributes:
      loss_nodes: of the distributions of the losses.
      contour_nodes: of the contour.
      fall: nats at which it ends; see `contour.lay_contour`.
    """

    loss_nodes: int
    contour_nodes: int
    fall: float = contours.FALL


# Tried one after the other on settings whose error is too large. Hard settings need
# more nodes of the contour, hardly ever of losses.
_PASSES = (
    _Pass(112, 161, 34.0),
    _Pass(128, 353),
    _Pass(144, 705),
    _Pass(192, 1025),
    _Pass(384, 1025),
)
# Enough to compare delta with its target.
_COMPARISON = _Pass(112, 65)
# Share of the allowed error up to which an answer is settled, so that the larger of the
# two directions, whose errors add up, is too.
_SETTLED = 0.5
# From so many settings on chunks are larger.
_MANY = 512
# Passes with less than this share of the nodes that are expected to be needed are
# skipped.
_HOPEFUL_SHARE = 0.8


class ContourSolver:
    """A batch of settings solved by contour integrals, in either direction."""

    def __init__(
        self,
        question: Question,
        run: Run,
        bound: np.ndarray,
        order: np.ndarray,
        goal: np.ndarray,
        log_added: np.ndarray,
    ) -> None:
        self.question, self.run = question, run
        self.bound, self.order = bound, order
        self.goal, self.log_added = goal, log_added
        # Of chunks, by what else their kernels are compiled for.
        self._widths: dict[tuple[_Pass, int], int] = {}

    def surely_private(
        self, asked: np.ndarray, epsilon: np.ndarray, *, backward: bool
    ) -> np.ndarray:
        """Where delta at that epsilon is below its target even with its error."""
        private = np.zeros(epsilon.shape, bool)
        index = np.flatnonzero(asked & (epsilon > 0))
        if index.size:
            log_delta, error, *_ = self._solve(
                DeltaAt(epsilon[index]), index, epsilon[index], _COMPARISON, backward
            )
            # An error estimate of a nat or more is not reliable.
            below = log_delta + error < self.question.target[index]
            private[index] = below & (error < 1)
        return private

    def solve(
        self, wanted: np.ndarray, *, backward: bool, least: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values and errors of one direction, with as many nodes as it takes.

        Values surely below ``least`` are not refined.
        """
        value = np.full(self.bound.shape, np.nan)
        error = np.full(self.bound.shape, np.inf)
        # Without an initial epsilon the kernel finds one.
        initial = np.full(self.bound.shape, -1.0)
        if not self.question.is_epsilon:
            initial = self.question.target
        elif least is not None:
            initial = np.clip(least, 0.0, self.bound)
        if least is None:
            least = np.full(self.bound.shape, -np.inf)
        far = np.zeros(self.bound.shape, bool)
        alone = np.zeros(self.bound.shape, bool)
        # Nodes needed by the last error estimate, which is squared as they are doubled.
        expected = np.zeros(self.bound.shape)
        # Where the initial epsilon was poor another contour is needed, not more nodes.
        for effort, only_far in (
            (_PASSES[0], False),
            (_PASSES[0], True),
            *((effort, False) for effort in _PASSES[1:]),
        ):
            scale = self.question.scale(value)
            settled = error <= _SETTLED * TOLERANCE * scale
            # The other direction's answer is larger.
            settled |= value + error <= least
            least_nodes = np.minimum(
                _HOPEFUL_SHARE * expected, _PASSES[-1].contour_nodes
            )
            hopeless = least_nodes > effort.contour_nodes
            index = np.flatnonzero(
                wanted & ~settled & (far if only_far else far | ~hopeless)
            )
            if index.size == 0:
                continue
            new_value, log_error, slope, used = self._solve(
                self.question.take(index),
                index,
                initial[index],
                effort,
                backward,
                None if self.question.is_epsilon else alone[index],
            )
            new_error = log_error
            if not self.question.is_epsilon:
                # A delta this small may be due to the truncated mass.
                lost = new_value < self.goal[index] - _CUT + _CUT_MARGIN
                new_error = np.where(lost, np.inf, new_error)
                # Settings with a large error on a shared contour get their own.
                distance = np.abs(self.question.target[index] - used) * np.abs(slope)
                enough = new_value + new_error <= least[index]
                served = (distance <= NEAR) & (enough | (new_error <= _SHARED_ERROR))
                far[index] = ~served & (used != initial[index])
                alone[index] |= ~served
                new_error = np.where(far[index], np.inf, new_error)
            else:
                new_value = np.maximum(new_value, 0.0)
                # delta falls with epsilon: a sum that does not has not converged.
                falling = slope > 0
                off = log_error / np.where(falling, slope, 1.0)
                new_error = np.where(falling, off, np.inf)
                # 0 is exact where delta is below its target there.
                new_error = np.where(falling & (log_error == 0), 0.0, new_error)
                # A contour for a larger epsilon ends where it is nothing, and may miss
                # what the small losses give further out, where an epsilon as small as
                # they are is: such an answer is only the next initial epsilon.
                distance = np.abs(new_value - used) * np.abs(slope)
                new_error = np.where(distance > NEAR, 10.0 * new_error, new_error)
                known = np.isfinite(new_error) & (log_error < _NOISE)
                closer = np.where(known, new_value, np.nan)
                far[index] = (distance > _FAR) | (used > LARGEST_RATIO * new_value)
                new_error = np.where(far[index], np.inf, new_error)
            new_error = np.where(np.isnan(new_error), np.inf, new_error)
            size = self.question.scale(new_value)
            expected[index] = effort.contour_nodes * _growth(new_error / size)
            better = ~(new_error > error[index])
            value[index] = np.where(better, new_value, value[index])
            error[index] = np.where(better, new_error, error[index])
            if self.question.is_epsilon:
                # The first answer, even a poor one, says where the saddle point is;
                # without one the initial epsilon was too large.
                initial = initial.copy()
                initial[index] = np.where(np.isnan(closer), 0.5 * used, closer)
                initial = np.clip(initial, 0.0, self.bound)
            else:
                # An earlier truncation lets less of the integrand cancel.
                known = np.isfinite(value) & (error < 0.1)
                self.goal = np.where(known, value - 1.0, self.goal)
        return value, error

    def _solve(
        self,
        question: Question,
        index: np.ndarray,
        initial: np.ndarray,
        effort: _Pass,
        backward: bool,
        alone: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        """The kernels over chunks, on an engine that suits their number.

        Deltas of the same run at epsilons near to one another share a contour, but for
        those that are to be ``alone`` (None: all).
        """
        with using_engine(choose_engine(index.size, BREAK_EVEN)):
            return self._by_length(question, index, initial, effort, backward, alone)

    def _by_length(
        self,
        question: Question,
        index: np.ndarray,
        initial: np.ndarray,
        effort: _Pass,
        backward: bool,
        alone: np.ndarray | None,
    ) -> tuple[np.ndarray, ...]:
        """Settings of about as many terms together; see `_solve_alike`."""
        terms, sizes = shared_lengths(self.run, index, padded=index.size < _MANY)
        result: tuple[np.ndarray, ...] = ()
        for size in np.unique(sizes):
            place = np.flatnonzero(sizes == size)
            # Side by side, as a chunk's sums are as long as its longest one.
            place = place[np.argsort(terms[place], kind="stable")]
            members, middle = place[None], place
            if alone is not None:
                part, bound = self.run.take(index[place]), self.bound[index[place]]
                columns = shared_contours(
                    question.target[place], part, bound, alone[place]
                )
                members, middle = (place[column] for column in columns)
            # Settings with a contour of their own.
            if len(members) == 1:
                members = middle
            part = self._solve_alike(
                question.take(members),
                index[members],
                index[middle],
                initial[middle],
                effort,
                backward,
                int(size),
            )
            if not result:
                result = tuple(np.empty(index.shape) for _ in part)
            for whole, found in zip(result, part, strict=True):
                whole[members] = found
        return result

    def _solve_alike(
        self,
        question: Question,
        members: np.ndarray,
        index: np.ndarray,
        initial: np.ndarray,
        effort: _Pass,
        backward: bool,
        num_terms: int,
    ) -> tuple[np.ndarray, ...]:
        """Settings whose mixtures have at most so many terms, by a contour each.

        It is laid for setting ``index`` and ``initial``; the question and its
        ``members`` may be several for a contour, (E, n).
        """
        part = self.run.take(index)
        log_target, added = question.target, self.log_added[members]
        if question.is_epsilon:
            # The target is lowered by the delta of the terms that were left out.
            added = np.minimum(self.log_added[index] - log_target, -1e-12)
            log_target = log_target + np.log1p(-np.exp(added))
        arrays = (
            log_target,
            initial,
            self.bound[index],
            self.order[index],
            # The truncated mass of all steps together is far below delta.
            np.minimum(self.goal[members].reshape(-1, index.size).min(axis=0), 0.0)
            - np.log(np.maximum(part.num_steps, 1.0))
            - _CUT,
            np.full(index.shape, float(backward)),
        )
        find = bool(np.any(initial < 0))
        groups = part.groups()
        terms = tuple(
            num_terms if group.loss.num_terms.max() > 1 else 1 for group in groups
        )
        sizes = _CHUNKS
        if self.bound.size >= _MANY:  # and few shapes are compiled
            width = next(size for size, least in _LARGE_CHUNKS if index.size >= least)
            # Padding takes no time beside compiling another width.
            known = self._widths.setdefault((effort, num_terms), width)
            sizes = sizes._replace(cpu=(max(width, known),))
        elif index.size <= _ONE_BY_ONE:
            sizes = sizes._replace(cpu=sizes.cpu[:1])

        def on_chunk(chunk: Any) -> tuple[np.ndarray, ...]:
            arrays, groups = chunk
            return _solve_chunk(
                question.is_epsilon, arrays, groups, terms, effort, find
            )

        value, error, *rest = in_chunks(on_chunk, (arrays, groups), sizes)
        with np.errstate(invalid="ignore"):  # NaN: not found with these nodes
            if not question.is_epsilon:
                value = np.logaddexp(value, added)
                added = np.where(np.isneginf(added), added, added - value)
            # They may add nothing, too. Epsilon 0 is exact without them.
            counts = (error != 0) & ~np.isneginf(added)
            error = error + np.where(counts, np.exp(np.minimum(added, 0.0)), 0.0)
        return (value, error, *rest)


def _solve_chunk(
    is_epsilon: bool,
    arrays: tuple[np.ndarray, ...],
    groups: tuple[Group, ...],
    terms: tuple[int, ...],
    effort: _Pass,
    find: bool,
) -> tuple[np.ndarray, ...]:
    """Value, error, slope and initial epsilon of one chunk, on either engine.

    The kernels are compiled one by one: fused into one, XLA takes several times as
    long.
    """
    compiled = engine_name() == "jax"

    def run(kernel: Any, *static: str) -> Any:
        return jitted(kernel, static) if compiled else kernel

    def call(arrays: Any, groups: tuple[Group, ...]) -> tuple[Any, ...]:
        target, initial, highest, order, log_cut, backward = arrays
        lay_nodes = run(steps_of, "num_nodes", "num_terms")
        steps = tuple(
            lay_nodes(
                group, backward, log_cut, num_nodes=effort.loss_nodes, num_terms=number
            )
            for group, number in zip(groups, terms, strict=True)
        )
        if is_epsilon and find:
            first = run(initial_epsilon.first_epsilon)
            initial = first(target, highest, order, groups, steps)
        contour = run(contours.lay_contour)(initial, steps, effort.fall)
        nodes = effort.contour_nodes
        if is_epsilon:
            solve = run(integral.epsilon, "num_nodes")
            solution = solve(target, initial, highest, contour, steps, num_nodes=nodes)
        else:
            solve = run(integral.log_delta, "num_nodes")
            solution = solve(target, contour, steps, num_nodes=nodes)
            initial = initial + 0 * target
        return (*solution, initial)

    if compiled:
        return on_jax(call, arrays, groups)
    with np.errstate(all="ignore"):
        return call(arrays, groups)


def _growth(error: np.ndarray) -> np.ndarray:
    """How many times as many nodes the relative error asks for; 0 where it is unknown.

    Its logarithm is about proportional to their number.
    """
    known = (error > _SETTLED * TOLERANCE) & (error < 0.5)
    return np.where(
        known, math.log(_SETTLED * TOLERANCE) / np.log(np.where(known, error, 0.1)), 0.0
    )

"""Settings solved by contour integrals, with as many nodes as their error asks for.

Few nodes are enough for most settings; those whose error estimate is too large are
integrated again with more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import (
    BreakEven,
    choose_engine,
    engine_name,
    jitted,
    on_jax,
    using_choice,
)
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import initial_epsilon, integral
from jaxdp_episodic.accountant.methods.exact.batching import (
    NEAR,
    USELESS,
    judged_epsilon,
    shared_contours,
    shared_lengths,
)
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.learning import Learnable, stop_if_ended
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt, Question
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound
from jaxdp_episodic.accountant.methods.run import Group, Run

# NumPy takes 2 ms, JAX 0.4 and 25 s of CPU time to compile, or 4 s from the disk.
BREAK_EVEN = BreakEven("exact", cold=16_000, kept=2_500)
# The same of a comparison with delta: 0.6 ms, or 0.03 and 6 s of CPU time to compile.
_COMPARED = 5_000
# Settings asked for which a pass is learned: sooner, as nobody waits for it.
_ENOUGH = 2_000
# Largest relative error estimate of an answer that is called exact.
TOLERANCE = 1e-6
# Nats below delta at which loss distributions are truncated. With a later cut, rare
# large losses keep the contour nearer to 0, where more of the integrand cancels.
CUT = 50.0
# Nats by which the truncated mass must stay below delta.
CUT_MARGIN = 30.0
# Largest error on a shared contour; settings above it get one of their own.
_SHARED_ERROR = 1e-9
# Settings in a chunk: JAX compiles a kernel for each.
_CHUNKS = Chunks(numpy=8, cpu=(1, 8), accelerator=(8, 512, 4096, 16384))
_LEARNED = (64,)  # of a kernel that is learned
# Settings from which chunks on the CPU are larger; sizes, and the least number of
# settings for each: starting a chunk costs time, but all cores want one.
_LARGE_BATCH = 512
_LARGE_CHUNKS = ((256, 1024), (64, 32), (_CHUNKS.cpu[-1], 0))
# Number of settings up to which one by one is faster than in a padded chunk.
_ONE_BY_ONE = 3


class _Pass(NamedTuple):
    """Numbers of nodes of a loss distribution and of the contour, and where it ends."""

    loss_nodes: int
    contour_nodes: int
    fall: float = contours.FALL  # nats; see `contour.lay_contour`


# Tried in turn on settings whose error is too large. Hard settings need more nodes of
# the contour, hardly ever of losses. The first is enough for nine in ten.
PASSES = (
    _Pass(112, 97, 24.0),
    _Pass(128, 177, 34.0),
    _Pass(144, 449),
    _Pass(192, 1025),
    _Pass(384, 1025),
)
# Enough to compare delta with its target.
COMPARISON = _Pass(112, 21, 14.0)
# Share of `TOLERANCE` at which an answer is settled: the errors of both directions may
# add up.
SETTLED = 0.5
# Least share of the nodes expected to be needed with which a pass is tried.
_HOPEFUL_SHARE = 0.8


@dataclass
class ContourSolver:
    """A batch of (n,) settings solved by contour integrals, in either direction."""

    question: Question
    run: Run  # truncated
    bound: np.ndarray  # Rényi's; of epsilon it may be inf until there is a contour
    order: np.ndarray  # at which that is reached
    goal: np.ndarray  # log(delta), or a first guess; distributions are cut below it
    log_added: np.ndarray  # logarithm of the delta that truncation left out
    # Where Rényi's bound says so of the epsilon that was found forward.
    backward_is_less: np.ndarray = field(init=False)
    # Width of chunks, by what else their kernels are compiled for.
    _widths: dict[tuple[_Pass, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backward_is_less = np.zeros(self.bound.shape, bool)

    def surely_private(self, asked: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Where backward delta at that epsilon and its error are below the target."""
        log_delta, error = self._compared(asked, epsilon, backward=True)
        return log_delta + error < self.question.target

    def surely_above(self, asked: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Where delta at that epsilon is above its goal even without its error."""
        log_delta, error = self._compared(asked, epsilon, backward=False)
        return log_delta - error > self.goal

    def _compared(
        self, asked: np.ndarray, epsilon: np.ndarray, *, backward: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log(delta) at an epsilon > 0 by few nodes, and its error; or NaN and inf."""
        value, error = np.full(epsilon.shape, np.nan), np.full(epsilon.shape, np.inf)
        index = np.flatnonzero(asked & (epsilon > 0))
        if index.size:
            value[index], log_error, *_ = self._solve(
                DeltaAt(epsilon[index]), index, epsilon[index], COMPARISON, backward
            )
            # An error estimate of a nat or more is not reliable.
            error[index] = np.where(log_error < 1, log_error, np.inf)
        return value, error

    def solve(
        self, wanted: np.ndarray, *, backward: bool, least: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values and errors of one direction, with as many nodes as it takes.

        Values surely below ``least`` are not refined.
        """
        shape = self.bound.shape
        value, error = np.full(shape, np.nan), np.full(shape, np.inf)
        guess = self.question.guess if isinstance(self.question, EpsilonAt) else None
        guess = guess if least is None else least
        initial = np.full(shape, -1.0)  # negative: the kernel guesses
        if not self.question.is_epsilon:
            initial = self.question.target
        elif guess is not None:
            initial = np.clip(guess, 0.0, self.bound)
        least = np.full(shape, -np.inf) if least is None else least
        far, alone = np.zeros(shape, bool), np.zeros(shape, bool)
        # Nodes needed by the last error estimate, which is squared as they are doubled.
        expected = np.zeros(shape)
        efforts = [(effort, False) for effort in PASSES]
        if not self.question.is_epsilon:
            # A contour of their own is all that those far from a shared one may need.
            efforts.insert(1, (PASSES[0], True))
        elif backward:
            efforts = efforts[1:] or efforts  # a comparison has left few
        for effort, only_far in efforts:
            scale = self.question.scale(value)
            settled = error <= SETTLED * TOLERANCE * scale
            # The other direction's answer is larger.
            settled |= value + error <= least
            least_nodes = np.minimum(
                _HOPEFUL_SHARE * expected, PASSES[-1].contour_nodes
            )
            hopeless = least_nodes > effort.contour_nodes
            hopeful = far if only_far else far | ~hopeless
            index = np.flatnonzero(wanted & ~settled & hopeful)
            if index.size == 0:
                continue
            question = self.question.take(index)
            found = self._solve(
                question,
                index,
                initial[index],
                effort,
                backward,
                None if question.is_epsilon else alone[index],
            )
            if question.is_epsilon:
                # Even a poor answer says where the saddle point is.
                *found, self.bound[index], self.order[index], less = found
                self.backward_is_less[index] = less
                new_value, new_error, far[index], closer = judged_epsilon(*found)
                if np.any(initial[index] < 0):
                    self._bound_poor(index, found[1])
                closer = np.fmin(closer, self.bound[index])  # NaN: nothing is known
                initial[index] = np.maximum(closer, 0.0)
                nothing = self.bound[index] == 0  # for which there is no contour
                far[index] &= ~nothing
                new_value, new_error = np.where(nothing, 0.0, (new_value, new_error))
            else:
                new_value, new_error, slope, used = found
                # A delta this small may be due to the truncated mass.
                lost = new_value < self.goal[index] - CUT + CUT_MARGIN
                new_error = np.where(lost, np.inf, new_error)
                distance = np.abs(question.target - used) * np.abs(slope)
                enough = new_value + new_error <= least[index]
                served = (distance <= NEAR) & (enough | (new_error <= _SHARED_ERROR))
                far[index] = ~served & (used != initial[index])
                alone[index] |= ~served
            new_error = np.where(far[index] | np.isnan(new_error), np.inf, new_error)
            size = question.scale(new_value)
            expected[index] = effort.contour_nodes * _growth(new_error / size)
            better = ~(new_error > error[index])
            value[index] = np.where(better, new_value, value[index])
            error[index] = np.where(better, new_error, error[index])
            if not question.is_epsilon:
                # With an earlier cut less of the integrand cancels.
                known = np.isfinite(value) & (error < 0.1)
                self.goal = np.where(known, value - 1.0, self.goal)
        return value, error

    def _bound_poor(self, index: np.ndarray, log_error: np.ndarray) -> None:
        """Asks for Rényi's bound of epsilon where the kernel's guess led nowhere.

        At the orders of `contour.largest_center` its own may be far too large, or none.
        """
        poor = index[~(log_error < USELESS) & (self.bound[index] > 0)]
        if poor.size:
            found = rdp_bound(self.question.take(poor), self.run.take(poor), loose=True)
            self.bound[poor], self.order[poor] = found

    def _solve(
        self,
        question: Question,
        index: np.ndarray,
        initial: np.ndarray,
        effort: _Pass,
        backward: bool,
        alone: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        """The kernels over chunks of settings with about as many terms.

        Deltas of the same run at epsilons near to one another share a contour, but for
        those that are to be ``alone`` (None: all).
        """
        cold = _COMPARED if effort is COMPARISON else BREAK_EVEN.cold
        kind = f"exact {question.is_epsilon} {effort}"
        pays = BreakEven(kind, cold, BREAK_EVEN.kept)
        engine = choose_engine(index.size, pays, self.run.losses)
        with using_choice(engine):
            few = index.size < _LARGE_BATCH
            terms, sizes = shared_lengths(self.run, index, padded=few)
        result: tuple[np.ndarray, ...] = ()
        for size in np.unique(sizes):
            rows = np.flatnonzero(sizes == size)
            # Neighbours are alike: a chunk's sums are as long as its longest one.
            rows = rows[np.argsort(terms[rows], kind="stable")]
            members, middle = rows[None], rows
            if alone is not None:
                part, bound = self.run.take(index[rows]), self.bound[index[rows]]
                to = question.target[rows]
                columns = shared_contours(to, part, bound, alone[rows])
                members, middle = (rows[column] for column in columns)
            members = middle if len(members) == 1 else members
            with using_choice(engine):
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
        """Settings whose mixtures have at most ``num_terms`` terms, a contour each.

        The contour is laid for setting ``index`` at ``initial``; the question and its
        ``members`` may be several for each contour, (E, n).
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
            - CUT,
            np.full(index.shape, float(backward)),
        )
        find = bool(np.any(initial < 0))
        groups = part.groups()
        terms = tuple(
            num_terms if group.loss.num_terms.max() > 1 else 1 for group in groups
        )
        sizes = _CHUNKS
        if self.bound.size >= _LARGE_BATCH:
            width = next(size for size, least in _LARGE_CHUNKS if index.size >= least)
            # Padding costs less than compiling another width.
            known = self._widths.setdefault((effort, num_terms), width)
            sizes = sizes._replace(cpu=(max(width, known),))
        elif index.size <= _ONE_BY_ONE:
            sizes = sizes._replace(cpu=sizes.cpu[:1])

        def on_chunk(chunk: Any) -> tuple[np.ndarray, ...]:
            arrays, groups = chunk
            return _solve_chunk(
                question.is_epsilon, arrays, groups, terms, effort, find
            )

        name = (_solve_chunk, question.is_epsilon, terms, effort, find)
        learnable = Learnable(name, _LEARNED, _ENOUGH)
        value, error, *rest = in_chunks(on_chunk, (arrays, groups), sizes, learnable)
        with np.errstate(invalid="ignore"):  # NaN: not found with these nodes
            if not question.is_epsilon:
                value = np.logaddexp(value, added)
                added = np.where(np.isneginf(added), added, added - value)
            # The terms left out may add nothing. Epsilon 0 is exact without them.
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
        if compiled:
            stop_if_ended()
        return jitted(kernel, static) if compiled else kernel

    def call(arrays: Any, groups: tuple[Group, ...]) -> tuple[Any, ...]:
        target, initial, *known, log_cut, backward = arrays
        lay_nodes = run(steps_of, "num_nodes", "num_terms")
        steps = tuple(
            lay_nodes(
                group, backward, log_cut, num_nodes=effort.loss_nodes, num_terms=number
            )
            for group, number in zip(groups, terms, strict=True)
        )
        if is_epsilon and find:
            first = run(initial_epsilon.first_epsilon)
            initial, *known = first(target, known[0], groups, steps)
        contour = run(contours.lay_contour)(initial, steps, effort.fall)
        nodes = effort.contour_nodes
        if is_epsilon:
            solve = run(integral.epsilon, "num_nodes")
            solution = solve(target, initial, known[0], contour, steps, num_nodes=nodes)
            less = 0 * target
            one = groups[0] if len(groups) == 1 and len(groups[0].count) == 1 else None
            if find and one is not None and one.loss.nodes_exchange:
                compare = run(initial_epsilon.exchanged_is_less)
                less = compare(target, solution.value, known[1], steps[0])
            return (*solution[:3], initial, *known, less)
        solve = run(integral.log_delta, "num_nodes")
        solution = solve(target, contour, steps, num_nodes=nodes)
        return (*solution[:3], initial + 0 * target)

    if compiled:
        return on_jax(call, arrays, groups)
    with np.errstate(all="ignore"):
        return call(arrays, groups)


def _growth(error: np.ndarray) -> np.ndarray:
    """Factor in the number of nodes that the relative error asks for; 0 if unknown."""
    # The error's logarithm is about proportional to the number of nodes.
    known = (error > SETTLED * TOLERANCE) & (error < 0.5)
    return np.where(
        known, math.log(SETTLED * TOLERANCE) / np.log(np.where(known, error, 0.1)), 0.0
    )

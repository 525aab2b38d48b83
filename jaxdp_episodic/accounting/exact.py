"""Exact epsilon and delta of a composed run, with an error for every element.

The numbers are those of the contour integral of `contour_kernels`. Few nodes serve
most settings; those whose error estimate is too large are done again with more. What
is still not known to `TOLERANCE` then gets the certified upper end of `pld`.
A single step needs no integral: its profile is the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp_episodic._precision import float64_boundary
from jaxdp_episodic.accounting import contour_kernels, contour_layout, pld
from jaxdp_episodic.accounting.contour_steps import steps_kernel
from jaxdp_episodic.accounting.episode_terms import cut_terms
from jaxdp_episodic.accounting.evaluation import evaluate, in_chunks, step_groups
from jaxdp_episodic.accounting.rdp_kernels import StepGroup
from jaxdp_episodic.accounting.resolution import EPISODES, SAMPLED, DominatingPair
from jaxdp_episodic.accounting.single_step import solve_single_step

# Largest relative error estimate of an answer that is called exact.
TOLERANCE = 1e-6
# ... or this many nats, where epsilon is smaller than a thousandth of them.
_SMALLEST_EPSILON = 1e-3
# Nodes of the contour, and whether sums are to be accurate: tried one after the other
# on what is not settled. A contour is laid for a guess of epsilon, and the first
# guesses are poor.
_PASSES = ((97, False), (289, True), (289, True), (769, True))
# Orders at which the other direction is bounded, relative to the forward one's best.
_ORDER_FACTORS = (1.0, 1.6, 4.0)
# Nats below delta at which the laws are cut, and by how much delta may be below
# Rényi's bound of it, where it is asked for.
_CUT, _RESERVE = 70.0, 25.0
# Nats by which what is cut off must stay below delta.
_CUT_MARGIN = 30.0
# Nats of log(delta) between the epsilon that a contour is laid for and the answer.
_FAR = 10.0
_CPU_CHUNKS = (4,)
_ACCELERATOR_CHUNKS = (8, 512, 4096)
# A profile is good to 1e-14.
_PROFILE_ERROR = 1e-13


class ExactAnswer(NamedTuple):
    """Answers of `exact_epsilon` and `exact_log_delta`, of the settings' shape.

    Attributes:
      value: epsilon, or log(delta).
      error: estimate of its error: of epsilon in nats, of delta relative. Where
        ``is_certified`` the width of the certified interval.
      is_certified: whether the value is not exact but a certified upper bound.
    """

    value: np.ndarray
    error: np.ndarray
    is_certified: np.ndarray


class _Problem(NamedTuple):
    """Settings in one dimension, (n,), with their pairs' fields (n,)."""

    target: np.ndarray
    pairs: tuple[DominatingPair, ...]
    counts: tuple[np.ndarray, ...]

    def take(self, index: np.ndarray) -> _Problem:
        pairs = tuple(
            DominatingPair(pair.kind, *(field[index] for field in pair[1:]))
            for pair in self.pairs
        )
        return _Problem(
            self.target[index], pairs, tuple(count[index] for count in self.counts)
        )


def exact_epsilon(
    log_delta: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
) -> ExactAnswer:
    """Epsilon at the given delta, setting by setting; arrays broadcast together.

    *Exact* for the composed dominating pair up to the stated error, or a certified
    *upper bound* where `ExactAnswer.is_certified` says so.
    """
    return _answer("epsilon", log_delta, pairs, counts)


def exact_log_delta(
    epsilon: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
) -> ExactAnswer:
    """``log(delta)`` at the given epsilon; see `exact_epsilon`."""
    return _answer("log_delta", epsilon, pairs, counts)


def _answer(
    quantity: str,
    target: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
) -> ExactAnswer:
    """Sorts out what needs no integral, and answers the rest."""
    shape = np.broadcast_shapes(
        np.shape(target), *(p.shape for p in pairs), *(np.shape(c) for c in counts)
    )
    nothing, everything = (0.0, np.inf) if quantity == "epsilon" else (-np.inf, 0.0)
    if 0 in shape:
        return ExactAnswer(np.zeros(shape), np.zeros(shape), np.zeros(shape, bool))
    _, _, silent, unprotected = step_groups(pairs, counts, shape)
    value = np.where(silent, nothing, everything).reshape(-1)
    error, certified = np.zeros(value.shape), np.zeros(value.shape, bool)
    problem = _flattened(target, pairs, counts, shape)
    open_ = ~(silent | unprotected).reshape(-1)
    single = open_ & (sum(problem.counts) == 1)
    chosen = np.flatnonzero(single)
    if chosen.size:
        value[chosen] = solve_single_step(quantity, *problem.take(chosen))
        error[chosen] = _PROFILE_ERROR
        if quantity == "epsilon":
            error[chosen] *= value[chosen]
    chosen = np.flatnonzero(open_ & ~single)
    if chosen.size:
        part = _of_many_steps(quantity, problem.take(chosen))
        value[chosen], error[chosen], certified[chosen] = part
    if quantity == "epsilon":
        value = np.maximum(value, 0.0)
    return ExactAnswer(*(a.reshape(shape) for a in (value, error, certified)))


def _flattened(
    target: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    shape: tuple[int, ...],
) -> _Problem:
    def flat(array: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(array, np.float64), shape).reshape(-1)

    return _Problem(
        flat(target),
        tuple(DominatingPair(p.kind, *map(flat, p[1:])) for p in pairs),
        tuple(map(flat, counts)),
    )


def _of_many_steps(quantity: str, problem: _Problem) -> ExactAnswer:
    """The contour integral, in both directions where they differ."""
    kernel = "best_epsilon" if quantity == "epsilon" else "best_log_delta"
    given = problem
    bound, order = evaluate(kernel, problem.target, problem.pairs, problem.counts)
    goal = problem.target if quantity == "epsilon" else bound - _RESERVE
    pairs, log_added, too_many = cut_terms(goal, problem.pairs, problem.counts)
    problem = problem._replace(pairs=pairs)
    state = _State(quantity, problem, bound, goal, log_added)
    value, error = state.solve(~too_many & np.isfinite(bound), backward=False)
    if any(pair.kind == SAMPLED for pair in problem.pairs):
        # Where Rényi's bound settles it, the other direction is not looked at.
        least = np.where(np.isnan(value), 0.0 if quantity == "epsilon" else -1e9, value)
        rival = _may_exceed(quantity, given, least, order)
        rival &= ~too_many & np.isfinite(bound)
        other, other_error = state.solve(rival, backward=True, start=least)
        value, error = _larger(value, error, other, other_error, rival)
    scale = np.maximum(value, _SMALLEST_EPSILON) if quantity == "epsilon" else 1.0
    unsure = ~(error <= TOLERANCE * scale) | too_many | ~np.isfinite(value)
    chosen = np.flatnonzero(unsure)
    if chosen.size:
        upper, width = _certified(quantity, problem.take(chosen), bound[chosen])
        value[chosen], error[chosen] = upper, width
    return ExactAnswer(value, error, unsure)


def _larger(
    value: np.ndarray,
    error: np.ndarray,
    other: np.ndarray,
    other_error: np.ndarray,
    rival: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The larger of two answers, where the other one counts; and its error.

    The smaller one counts as much as its error allows: what is poorly known must not
    hide behind a larger value that is well known.
    """
    most = np.where(
        rival, np.maximum(value + error, other + other_error), value + error
    )
    value = np.where(rival & (other > value), other, value)
    # Where an answer is missing nothing is known.
    return value, np.where(np.isnan(most), np.inf, most - value)


def _may_exceed(
    quantity: str, problem: _Problem, least: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Where the backward direction's Rényi bound is above a known answer.

    At a few orders about the best one of the forward direction.
    """
    if quantity == "epsilon":
        epsilon, goal = np.maximum(least, 0.0), problem.target
    else:
        epsilon, goal = problem.target, least
    settled = np.zeros(least.shape, bool)
    for factor in _ORDER_FACTORS:
        index = np.flatnonzero(~settled & np.isfinite(order))
        if index.size == 0:
            break
        part, c = problem.take(index), factor * (order[index] - 1)
        curve, _ = evaluate("rdp", 1 + c, part.pairs, part.counts, direction="backward")
        # max over x of e^{-c x} (1 - e^{-x})
        payoff = -np.log1p(c) - c * np.log1p(1 / c)
        settled[index] = c * (curve - epsilon[index]) + payoff < goal[index]
    return ~settled


class _State:
    """Settings that are solved by contours, in either direction."""

    def __init__(
        self,
        quantity: str,
        problem: _Problem,
        bound: np.ndarray,
        goal: np.ndarray,
        log_added: np.ndarray,
    ) -> None:
        self.quantity, self.problem, self.bound = quantity, problem, bound
        self.goal, self.log_added = goal, log_added

    def solve(
        self, wanted: np.ndarray, *, backward: bool, start: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values and errors of one direction, with as many nodes as it takes."""
        value = np.full(self.bound.shape, np.nan)
        error = np.full(self.bound.shape, np.inf)
        # Without a guess the kernel makes its own.
        guess = np.full(self.bound.shape, -1.0)
        if self.quantity == "log_delta":
            guess = self.problem.target
        elif start is not None:
            guess = np.clip(start, 0.0, self.bound)
        for num_nodes, accurate in _PASSES:
            scale = 1.0
            if self.quantity == "epsilon":
                scale = np.maximum(np.abs(value), _SMALLEST_EPSILON)
            # A tenth of what is allowed, so that the larger direction does not matter.
            index = np.flatnonzero(wanted & ~(error <= 0.1 * TOLERANCE * scale))
            if index.size == 0:
                break
            new_value, log_error, slope, _, used = self._run(
                index, guess[index], (num_nodes, accurate), backward
            )
            new_error = log_error
            if self.quantity == "log_delta":
                # So small a delta may be in what was cut off.
                lost = new_value < self.goal[index] - _CUT + _CUT_MARGIN
                new_error = np.where(lost, np.inf, new_error)
            if self.quantity == "epsilon":
                new_value = np.maximum(new_value, 0.0)
                # delta falls with epsilon: a sum that does not has not converged.
                falling = slope > 0
                off = log_error / np.where(falling, slope, 1.0)
                new_error = np.where(falling, off, np.inf)
                # On a contour for an epsilon six deviations away the sum cancels: its
                # error was seen to be seven times the estimate.
                far = np.abs(new_value - used) * np.abs(slope) > _FAR
                new_error = np.where(far, 10.0 * new_error, new_error)
                # 0 is exact where delta is below its target there, on a contour that
                # was laid for it; another one is laid first.
                near = falling & ~far
                new_error = np.where(
                    log_error == 0, np.where(near, 0.0, 1.0), new_error
                )
            new_error = np.where(np.isnan(new_error), np.inf, new_error)
            better = ~(new_error > error[index])
            value[index] = np.where(better, new_value, value[index])
            error[index] = np.where(better, new_error, error[index])
            if self.quantity == "epsilon":
                # The first answer, even a poor one, says where the saddle point is;
                # without one the guess was too large.
                found = np.isfinite(new_value) & (new_error < np.inf)
                guess = guess.copy()
                guess[index] = np.where(found, new_value, 0.5 * used)
                guess = np.clip(guess, 0.0, self.bound)
            else:
                # The nearer the cut is, the less cancels.
                known = np.isfinite(value) & (error < 0.1)
                self.goal = np.where(known, value - 1.0, self.goal)
        return value, error

    def _run(
        self,
        index: np.ndarray,
        guess: np.ndarray,
        nodes: tuple[int, bool] | None,
        backward: bool,
    ) -> tuple[np.ndarray, ...]:
        """The kernels over chunks; without nodes only the contour is laid."""
        part = self.problem.take(index)
        shape = index.shape
        kinds, groups, _, _ = step_groups(part.pairs, part.counts, shape)
        log_target = part.target
        if self.quantity == "epsilon":
            # What the terms left out may add comes off the target.
            added = np.minimum(self.log_added[index] - log_target, -1e-12)
            log_target = log_target + np.log1p(-np.exp(added))
        arrays = (
            log_target,
            guess,
            self.bound[index],
            # What is cut off the laws is far below delta, even all of it together.
            np.minimum(self.goal[index], 0.0)
            - np.log(np.maximum(sum(part.counts), 1.0))
            - _CUT,
            np.full(shape, float(backward)),
        )
        most = [
            int(g.num_episodes.max()) if k == EPISODES else 1
            for k, g in zip(kinds, groups, strict=True)
        ]
        # Powers of two, each of which is compiled.
        terms = tuple(1 << (m - 1).bit_length() for m in most)
        find = bool(np.any(guess < 0))
        kernel = float64_boundary(
            _chunk_kernel(self.quantity, kinds, terms, nodes, find)
        )
        on_cpu = jax.default_backend() == "cpu"
        sizes = _CPU_CHUNKS if on_cpu else _ACCELERATOR_CHUNKS

        def on_chunk(chunk: Any) -> tuple[np.ndarray, ...]:
            return kernel(*chunk)

        result = in_chunks(on_chunk, (arrays, groups), sizes)
        if self.quantity == "log_delta":
            with np.errstate(invalid="ignore"):  # NaN: not found with these nodes
                value = np.logaddexp(result[0], self.log_added[index])
            result = (value, *result[1:])
        return result


def _chunk_kernel(
    quantity: str,
    kinds: tuple[str, ...],
    terms: tuple[int, ...],
    nodes: tuple[int, bool] | None,
    find: bool,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Laws, contour and answer of one chunk: jitted one by one."""

    def call(arrays: Any, groups: tuple[StepGroup, ...]) -> tuple[jax.Array, ...]:
        target, guess, highest, log_cut, backward = arrays
        steps = tuple(
            steps_kernel(kind, count)(group, backward, log_cut)
            for kind, count, group in zip(kinds, terms, groups, strict=True)
        )
        if quantity == "epsilon" and find:
            guess = _jitted("first_epsilon")(target, highest, steps)
        contour = _jitted("lay_contour")(guess, steps)
        if nodes is None:
            return guess, guess, guess, contour.log_chernoff, guess
        if quantity == "epsilon":
            solution = _jitted("epsilon")(
                *nodes, target, guess, highest, contour, steps
            )
        else:
            solution = _jitted("log_delta")(*nodes, guess, contour, steps)
        return (*solution, contour.log_chernoff, guess)

    return call


@functools.cache
def _jitted(name: str) -> Callable[..., Any]:
    if name in ("epsilon", "log_delta"):
        return jax.jit(getattr(contour_kernels, name), static_argnums=(0, 1))
    return jax.jit(getattr(contour_layout, name))


def _certified(
    quantity: str, problem: _Problem, bound: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Certified upper ends, or Rényi's bound where that is lower; and the widths."""
    pairs = tuple(
        pair
        if pair.kind != EPISODES
        else pair._replace(
            num_episodes=pair.inner_rate, inner_rate=np.ones_like(pair.inner_rate)
        )
        for pair in problem.pairs
    )
    solve = pld.epsilon_bounds if quantity == "epsilon" else pld.log_delta_bounds
    lower, upper = solve(problem.target, pairs, problem.counts)
    upper = np.minimum(upper, bound)
    if quantity == "epsilon":
        return upper, upper - lower
    return upper, -np.expm1(np.minimum(lower - upper, 0.0))

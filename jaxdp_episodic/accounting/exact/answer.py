"""Exact epsilon and delta of a composed run, with an error for every element.

The numbers are those of the contour integral (`contour_solver`). What is not known to
`TOLERANCE` by it gets the certified upper end of `pld`.
A single step needs no integral: its profile is the answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accounting.evaluation import evaluate, step_groups
from jaxdp_episodic.accounting.exact.episode_terms import cut_terms
from jaxdp_episodic.accounting.exact.single_step import solve_single_step
from jaxdp_episodic.accounting.exact.solver import (
    SMALLEST_EPSILON,
    TOLERANCE,
    ContourSolver,
    Problem,
)
from jaxdp_episodic.accounting.pld import interval
from jaxdp_episodic.accounting.run import EPISODES, SAMPLED, DominatingPair

# Orders at which the other direction is bounded, relative to the forward one's best.
_ORDER_FACTORS = (1.0, 1.6, 4.0)
# By how many nats delta may be below Rényi's bound of it, where it is asked for.
_RESERVE = 25.0
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
) -> Problem:
    def flat(array: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(array, np.float64), shape).reshape(-1)

    return Problem(
        flat(target),
        tuple(DominatingPair(p.kind, *map(flat, p[1:])) for p in pairs),
        tuple(map(flat, counts)),
    )


def _of_many_steps(quantity: str, problem: Problem) -> ExactAnswer:
    """The contour integral, in both directions where they differ."""
    kernel = "best_epsilon" if quantity == "epsilon" else "best_log_delta"
    given = problem
    bound, order = evaluate(kernel, problem.target, problem.pairs, problem.counts)
    goal = problem.target if quantity == "epsilon" else bound - _RESERVE
    pairs, log_added, too_many = cut_terms(goal, problem.pairs, problem.counts)
    problem = problem._replace(pairs=pairs)
    state = ContourSolver(quantity, problem, bound, order, goal, log_added)
    value, error = state.solve(~too_many & np.isfinite(bound), backward=False)
    if any(pair.kind == SAMPLED for pair in problem.pairs):
        # Where Rényi's bound settles it, the other direction is not looked at.
        least = np.where(np.isnan(value), 0.0 if quantity == "epsilon" else -1e9, value)
        rival = _may_exceed(quantity, given, least, order)
        rival &= ~too_many & np.isfinite(bound)
        asked = least if quantity == "epsilon" else problem.target
        rival &= asked < _most_backward(problem)
        if quantity == "epsilon":
            rival &= ~state.surely_private(rival, least, backward=True)
        other, other_error = state.solve(rival, backward=True, least=least)
        value, error = _larger(value, error, other, other_error, rival)
    scale = np.maximum(value, SMALLEST_EPSILON) if quantity == "epsilon" else 1.0
    unsure = ~(error <= TOLERANCE * scale) | too_many | ~np.isfinite(value)
    chosen = np.flatnonzero(unsure)
    if chosen.size:
        upper, width = _certified(quantity, problem.take(chosen), bound[chosen])
        value[chosen], error[chosen] = upper, width
    return ExactAnswer(value, error, unsure)


def _most_backward(problem: Problem) -> np.ndarray:
    """The most that a run can lose backward, (n,): delta is 0 from there on.

    The density of a sampled pair with the unit is at least ``1 - p`` of that without.
    """
    most = np.zeros(problem.target.shape)
    for pair, count in zip(problem.pairs, problem.counts, strict=True):
        bounded = (pair.kind == SAMPLED) & (pair.rate < 1)
        loss = -np.log1p(-np.where(bounded, pair.rate, 0.0))
        taken = np.where(bounded, count * loss, np.inf)
        most += np.where(count > 0, taken, 0.0)
    return most * (1 + 1e-12)


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
    quantity: str, problem: Problem, least: np.ndarray, order: np.ndarray
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
        # At c = 0 the payoff is NaN, which settles nothing; far off -inf, which does.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            payoff = -np.log1p(c) - c * np.log1p(1 / c)
            settled[index] = c * (curve - epsilon[index]) + payoff < goal[index]
    return ~settled


def _certified(
    quantity: str, problem: Problem, bound: np.ndarray
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
    solve = (
        interval.epsilon_bounds if quantity == "epsilon" else interval.log_delta_bounds
    )
    lower, upper = solve(problem.target, pairs, problem.counts)
    upper = np.minimum(upper, bound)
    if quantity == "epsilon":
        return upper, upper - lower
    return upper, -np.expm1(np.minimum(lower - upper, 0.0))

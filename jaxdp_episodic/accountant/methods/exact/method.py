"""The "exact" method: a contour integral with an error estimate for every setting.

If the error exceeds `TOLERANCE`, the answer is the certified upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.losses.excess import LARGE_LOSS, ROUNDING
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Bounds,
    FiniteValues,
    Nodes,
    Profile,
)
from jaxdp_episodic.accountant.methods import rdp
from jaxdp_episodic.accountant.methods.certified.lattice import loss_rounding
from jaxdp_episodic.accountant.methods.certified.method import pld_answer, rdp_end
from jaxdp_episodic.accountant.methods.exact.solver import (
    ORDER_FACTORS,
    TOLERANCE,
    ContourSolver,
)
from jaxdp_episodic.accountant.methods.run import (
    Answer,
    Question,
    Run,
    delta_of_profile,
    epsilon_of_profile,
    one_gaussian,
    shift_error,
    slope_of_profile,
)

# First guess of log(Rényi bound / delta), if delta is the question.
LOG_BOUND_OVER_DELTA = 25.0
# Logarithm below which exp is 0 in float64: such a Rényi bound is the answer.
_UNDERFLOW = -746.0
# Bound of the relative error of a profile: 1e-14, with a margin.
_PROFILE_ERROR = 1e-13
# Rounding error of losses, relative to 1 or their size.
_ROUNDING = 4e-16
_EPS = np.finfo(np.float64).eps


def exact_answer(question: Question, run: Run, *, certify: bool = True) -> Answer:
    """Epsilon or log(delta) at every setting and path; arrays broadcast.

    Without ``certify`` answers that are not exact are Rényi bounds, except those of
    single steps and of finitely many losses.
    """
    shape = np.broadcast_shapes(np.shape(question.target), run.shape)
    target = np.broadcast_to(np.asarray(question.target, np.float64), shape)
    question, run = question.at(target.reshape(-1)), run.flattened(shape)
    no_loss, _, too_little, *_ = run.facts
    value = np.where(no_loss, question.nothing, question.everything)
    # If there is noise, but too little to compute with, the bound is inf.
    certified = too_little & ~no_loss
    answer = Answer(value, np.where(certified, np.inf, 0.0), certified)
    for some, solve in _ways(question, run, answer, certify):
        index = np.flatnonzero(some)
        if index.size:
            found = solve(question.at(question.target[index]), run.take(index))
            for field, part in zip(answer, found, strict=True):
                field[index] = part
    value, error, certified = answer
    value = np.maximum(value, 0.0) if question.is_epsilon else value
    return Answer(value.reshape(shape), error.reshape(shape), certified.reshape(shape))


def _ways(
    question: Question, run: Run, answer: Answer, certify: bool
) -> Iterator[tuple[np.ndarray, Callable[[Question, Run], Answer]]]:
    """Yields settings and what computes their ``answer``; bounds where it is poor."""
    asked = ~(run.facts.loses_nothing | run.facts.is_unprotected)
    one = sum(run.counts) == 1
    gaussian = ~one & (run.gaussian_shift() > 0)
    yield asked & one, _of_one_step
    yield asked & gaussian, _of_gaussians
    yield asked & ~one & ~gaussian, _of_many_steps
    good = answer.error <= TOLERANCE * question.scale(answer.value)
    poor = asked & (answer.is_certified | ~good)
    if np.any(poor):
        # Certified ends take milliseconds for finitely many losses and for single
        # steps, but seconds for random allocation.
        quick = one & (not any(isinstance(loss, Bounds) for loss in run.losses))
        quick |= all(isinstance(loss, FiniteValues) for loss in run.losses)
        yield poor & (certify | quick), _certified
        yield poor & ~(certify | quick), _bounded


def _certified(question: Question, run: Run) -> Answer:
    """The certified upper bound, or the Rényi bound if that is smaller."""
    with rdp.bounding_few(question.target.size):
        found = pld_answer(question, run)
        return found._replace(value=np.minimum(found.value, rdp_end(question, run)))


def _bounded(question: Question, run: Run) -> Answer:
    """The Rényi bound."""
    with rdp.bounding_few(question.target.size):
        found = rdp.rdp_answer(question, run)
    return found._replace(is_certified=np.ones(found.value.shape, bool))


def _of_one_step(question: Question, run: Run) -> Answer:
    """Answers for a single step, which may differ between settings, by its profile."""
    value = np.full(question.target.shape, question.everything)
    error = np.zeros(value.shape)
    for loss, count in zip(run.losses, run.counts, strict=True):
        taken = np.flatnonzero(count == 1)
        if taken.size:
            one: Any = loss.map(lambda field, taken=taken: field[taken])
            answer = _by_profile(question.at(question.target[taken]), one)
            value[taken], error[taken] = answer
    return Answer(value, error, np.isposinf(value))


def _by_profile(question: Question, loss: Profile) -> tuple[np.ndarray, np.ndarray]:
    """The answer for one step of a mechanism, and its error."""
    # The profiles of some mechanisms are upper bounds, with an unknown error.
    error = np.inf if isinstance(loss, Bounds) else _PROFILE_ERROR
    kept = loss.kept_in_range()
    if not question.is_epsilon:
        epsilon = question.target
        value = delta_of_profile(epsilon, kept)
        # Rounding of the losses. Without atoms only that of large ones matters.
        moved = loss_rounding(epsilon)
        with np.errstate(all="ignore"):
            tails = loss.log_tails(epsilon)
            slope = np.fmax(*(np.exp(tail - profile) for profile, tail in tails))
        off = _ROUNDING * (1 + epsilon) + moved
        counts = np.isfinite(slope) & ((moved > 0) | loss.may_have_atoms)
        return value, error + off * np.where(counts, slope, 0.0)
    value = epsilon_of_profile(question.target, kept)
    # From the slope of log(delta), which is far below 1 / epsilon at large deltas.
    inside = np.isfinite(value)
    log_delta, slope = slope_of_profile(np.where(inside, value, 1.0), kept)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nats = error * np.maximum(value, 1 / slope)
        private = (value <= 0) & (log_delta + error < question.target)
    return value, np.where(inside, np.where(private, 0.0, nats), error)


def _of_gaussians(question: Question, run: Run) -> Answer:
    """Answers for Gaussian steps that always see the unit: one step of joint shift."""
    shift = run.gaussian_shift()
    solve = epsilon_of_profile if question.is_epsilon else delta_of_profile
    value = solve(question.target, one_gaussian(shift).kept_in_range())
    # The derivative of the answer by log(shift).
    size = np.abs(value)
    moved = size + shift**2 if question.is_epsilon else (1 + size) * (1 + shift)
    scale = size if question.is_epsilon else 1.0
    error = _PROFILE_ERROR * scale + 4 * shift_error(run) * moved
    return Answer(value, error, np.zeros(value.shape, bool))


def _of_many_steps(question: Question, run: Run) -> Answer:
    """Answers by the contour integral, in both directions if they differ."""
    if question.is_epsilon:  # before the first pass
        bound, order = np.full((2, question.target.size), np.inf)
        bound = rdp.at_most_total_variation(question, run, bound)
    else:
        with rdp.bounding_few(question.target.size):
            bound, order = rdp.rdp_bound(question, run, loose=True)
    goal = question.target if question.is_epsilon else bound - LOG_BOUND_OVER_DELTA
    cut, log_added, too_many, of_densities = _truncated(goal, run)
    # Densities must not be rounded by more than the tolerance of the answer.
    wanted = ~too_many & (of_densities <= TOLERANCE)
    # Epsilon is 0 where delta is at least the total variation distance.
    nothing = question.is_epsilon & (bound == 0)
    wanted &= ~nothing
    if not question.is_epsilon:
        wanted &= np.isfinite(bound) & (bound > _UNDERFLOW)
    none = np.zeros((2, *bound.shape), bool)
    state = ContourSolver(question, cut, bound, order, goal, log_added, *none)
    value, error = state.solve(wanted, backward=False)
    may_be_larger = wanted & ~state.backward_is_less
    if np.any(may_be_larger) and not run.is_symmetric:
        forward = value, error
        value, error = _of_both_directions(question, run, state, forward, may_be_larger)
    if np.any(of_densities):
        at = state.bound, state.order
        error = error + _of_composed_profiles(question, of_densities, *at)
    value, error = np.where(nothing, 0.0, (value, error))
    return Answer(value, error, ~(wanted | nothing) | ~np.isfinite(value))


def _of_both_directions(
    question: Question,
    run: Run,
    state: ContourSolver,
    forward: tuple[np.ndarray, np.ndarray],
    may_be_larger: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The larger answer, and its error, where the backward one ``may_be_larger``.

    It is integrated only where neither a sum of few nodes nor a Rényi bound shows that
    it is not.
    """
    value, error = forward
    least = np.where(np.isnan(value), 0.0 if question.is_epsilon else -1e9, value)
    epsilon, log_delta = question.target, least
    if question.is_epsilon:
        epsilon, log_delta = least, question.target
    may_be_larger &= epsilon < run.facts.largest_losses[True]
    may_be_larger &= ~state.surely_less(may_be_larger, least)
    left = np.flatnonzero(may_be_larger)
    with np.errstate(all="ignore"), rdp.bounding_few(left.size):
        # 1 + c is representable, and above 1.
        c = 1 + np.maximum(ORDER_FACTORS * (state.order[left] - 1), _EPS) - 1
        moment = c * rdp.rdp_curve(1 + c, run.take(left), "backward")
        bounds = rdp.log_delta_at(np.maximum(epsilon[left], 0.0), c, moment)
    may_be_larger[left] = ~np.any(bounds < log_delta[left], axis=0)
    other, other_error = state.solve(may_be_larger, backward=True, least=least)
    return _larger(value, error, other, other_error, may_be_larger)


def _larger(
    value: np.ndarray,
    error: np.ndarray,
    other: np.ndarray,
    other_error: np.ndarray,
    may_be_larger: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The larger answer of both directions, where the other may be; and its error."""
    # An accurate larger value must not hide the error of the other one.
    most = np.where(may_be_larger, other + other_error, -np.inf)
    most = np.maximum(value + error, most)
    value = np.where(may_be_larger & (other > value), other, value)
    # If an answer is missing, the error is unknown.
    return value, np.where(np.isnan(most), np.inf, most - value)


def _of_composed_profiles(
    question: Question, error: np.ndarray, bound: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Error of the answer of many steps due to the relative error e of densities.

    e is assumed to have one sign.
    """
    # If total and mean are right, M(c) is wrong by at most e (M(c) - 1), and log(delta)
    # by e times the logarithm of the run's moment, which gave the Rényi bound.
    c, epsilon, log_delta = order - 1, question.target, bound
    if question.is_epsilon:
        epsilon, log_delta = bound, question.target
    with np.errstate(divide="ignore", invalid="ignore"):
        moment = c * (epsilon + np.log1p(1 / c)) + log_delta + np.log1p(c)
        added = error * (1 + np.maximum(moment, 0.0))
        added = np.where(error > 0, added / (c if question.is_epsilon else 1.0), 0.0)
    return added


def _truncated(goal: np.ndarray, run: Run) -> tuple[Run, *tuple[np.ndarray, ...]]:
    """The run without terms of negligible delta; see `Nodes.truncated`.

    Also the log of the delta left out; where there are too many terms; and the relative
    error of densities at large losses, due to rounding of logarithms.
    """
    # Steps of mechanisms without nodes count as too many terms.
    log_added, largest = np.full(goal.shape, -np.inf), np.zeros(goal.shape)
    too_many = np.zeros(goal.shape, bool)
    losses, counts = [], []
    for loss, count in zip(run.losses, run.counts, strict=True):
        taken = (count > 0) & ~loss.loses_nothing & ~loss.is_unprotected
        square = np.where(taken, np.minimum(loss.hints().furthest, 1e150) ** 2, 0.0)
        largest = np.maximum(largest, square)
        if not isinstance(loss, Nodes):
            too_many |= count > 0
            continue
        if np.any(loss.num_terms > 1):
            mixture: Any = loss
            loss, added, many = mixture.truncated(goal, count)
            log_added, too_many = np.logaddexp(log_added, added), too_many | many
        losses.append(loss)
        counts.append(count)
    of_densities = np.where(largest > 2 * LARGE_LOSS, ROUNDING * largest, 0.0)
    return Run(tuple(losses), tuple(counts)), log_added, too_many, of_densities

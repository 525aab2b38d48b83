"""Rényi DP of composed steps, and the best order: pure kernels.

References: docs/theory.md, "From profiles to answers"; Canonne, Kamath, Steinke (2020),
arXiv:2004.00010, Proposition 12.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    by_blocks,
    namespace,
    sigmoid,
    while_each,
)

# Shift beyond which no order has a moment that small losses dominate.
_LARGE_SHIFT = 1e3


def first_order(groups: tuple[Group, ...], budget: Array | float) -> Array:
    """Returns an initial log t of the best order: the smaller of two approximations."""
    # One is where small losses spend the budget. The other is where rate^alpha e^{alpha
    # (alpha-1) shift²/2} dominates; from beyond that jump a search would have to
    # bisect.
    xp = namespace(groups[0].count)
    curvature, jump = 0.0, xp.inf
    for group in groups:
        hints = group.loss.hints()
        rate, s = hints.rate, hints.shift
        # The variance of the privacy loss is of order rate² if losses are small. For
        # large shifts a loss of s²/2 has the probability `rate`.
        growth = xp.expm1(xp.minimum(s * s, 30.0))
        variance = rate * (s**2 + 0.25 * s**4)
        small = xp.minimum(rate**2 * growth, variance)
        variance = xp.where(s > _LARGE_SHIFT, variance, small)
        curvature += xp.sum(group.count * group.loss.outer_rate * variance, axis=0)
        last = _jump_order(xp.log(hints.odds), s, group, budget)
        # Below order 2 small losses dominate the moment.
        jump = xp.minimum(jump, xp.min(xp.where(last > 2, last, xp.inf), axis=0))
    smooth = 0.5 * (xp.log(2.0 * budget) - xp.log(curvature))
    return xp.minimum(smooth, xp.log(jump - 1))


def _jump_order(
    log_rate: Array, s: Array, group: Group, budget: Array | float
) -> Array:
    """Returns the order at which the jump of L(t) has spent the budget, or inf."""
    xp = namespace(log_rate, s, group.count)
    half = 0.5 * s * s

    def reaching(log_excess: Array) -> Array:
        """Solves ``alpha log_rate + alpha (alpha-1) s²/2 = log_excess``."""
        b = log_rate - half
        root = xp.sqrt(xp.maximum(b * b + 4 * half * log_excess, 0.0))
        return xp.where(b < 0, (root - b) / (2 * half), xp.inf)

    counts = xp.maximum(group.count, 1e-300)
    log_outer = xp.log(group.loss.outer_rate)
    top = reaching(-log_outer)  # where M - 1 = 1, and growth slows down
    steepness = xp.maximum((top - 1) * (log_rate + top * s * s), 1.0)
    # t L' = count M steepness = budget; plus one nat, to start on the steep side.
    needed = xp.log(budget) - xp.log(counts * steepness) + 1.0
    beyond = xp.maximum(top, xp.sqrt(2 * budget / counts) / s)
    return xp.where(needed > 0, beyond, reaching(xp.minimum(needed, 0.0) - log_outer))


# The direction of reported values: the larger one of each step, a bound of both.
LARGER = "larger"


def log_moment(
    t: Array, groups: tuple[Group, ...], rule: MomentRule
) -> tuple[Array, ...]:
    """Returns ``L(t)`` of the whole run, (n,) >= 0; exact up to quadrature.

    For the direction `LARGER` it is an upper bound of both directions' values.
    """
    xp = namespace(t, groups[0].count)
    totals: list[Array] = [xp.zeros_like(t)] * (3 if rule.with_derivatives else 1)
    for group in groups:
        shape = group.count.shape
        loss = group.loss.map(lambda a: a.reshape(-1))
        orders = xp.broadcast_to(t, shape).reshape(-1)
        excess, *ratios = _log_excess(loss, orders, rule)
        log_odds = excess + xp.log(loss.outer_rate)
        parts = [xp.logaddexp(0.0, log_odds)]
        if rule.with_derivatives:
            # M = 1 + r E: M'/M = E'/E (1 - 1/M), and so on
            first, second = ratios
            slope = sigmoid(log_odds) * first
            curvature = sigmoid(log_odds) * second - slope * slope
            parts += [slope, xp.maximum(curvature, 0.0)]
        for i, part in enumerate(parts):
            totals[i] = totals[i] + xp.sum(group.count * part.reshape(shape), axis=0)
    return tuple(totals)


def _log_excess(loss: Any, t: Array, rule: MomentRule) -> tuple[Array, ...]:
    """Computes `Moments.log_excess`; the larger one for `LARGER`."""
    if rule.direction != LARGER:
        return loss.log_excess(t, rule)
    forward = loss.log_excess(t, rule._replace(direction="forward"))
    if loss.is_symmetric or loss.forward_is_larger:
        return forward
    backward = loss.log_excess(t, rule._replace(direction="backward"))
    xp = namespace(t)
    is_forward = forward[0] >= backward[0]
    slopes = zip(forward[1:], backward[1:], strict=True)
    # (The maximum with NaN is NaN.)
    return xp.maximum(forward[0], backward[0]), *(
        xp.where(is_forward, one, other) for one, other in slopes
    )


# Quadrature of the answer: relative error 1e-10 in rdp.
FINE = Quadrature(32, 16)
_ANSWER = MomentRule(LARGER, FINE)
# Quadrature of the search for the order: it resolves the phase transition of the
# sampled Gaussian, a cliff of L(t) with the best order at its foot.
COARSE = Quadrature(16, 10)


# Trapezoidal rules in place of these, if every mechanism has one. With 32 nats a moment
# at rate 1e-12 and noise 0.4 has a relative error of -4e-10, with 40 nats of -1e-12.
LATTICE = Quadrature(0, 0, 40.0)
LATTICE_ANSWER = MomentRule(LARGER, LATTICE)
_COARSE_LATTICE = Quadrature(0, 0, 18.0)


class _NewtonRule(NamedTuple):
    """How log t is searched: in three or four steps usually, in dozens at a cliff."""

    quadrature: Quadrature
    most_steps: int
    first_step: float  # largest first step; a long one might cross a cliff
    tolerance: float  # error of log t after the last step


_PANEL_SEARCH = _NewtonRule(COARSE, 48, 1.0, 1e-10)
_LATTICE_SEARCH = _NewtonRule(_COARSE_LATTICE, 40, 1.0, 1e-9)
_NARROW = 1e-9  # width of a bracket of log t that ends the search
# Largest logarithm of the derivative over its target for a last step.
_CLOSE = 0.1
_LOOSE = 1e-2  # error of log t after the last step of a loose search
# Range of log t; e^90 is beyond every useful order.
_LOG_T_RANGE = (-90.0, 90.0)


def rdp(
    orders: Array,
    groups: tuple[Group, ...],
    *,
    direction: str,
    on_lattice: bool,
    block: int,
) -> tuple[Array, Array]:
    """Returns ``rdp(alpha)`` in nats, (n,), for one order each, and the orders."""
    rule = MomentRule(direction, LATTICE if on_lattice else FINE)

    def curve(orders: Array, groups: tuple[Group, ...]) -> tuple[Array, Array]:
        xp, t = namespace(orders, groups[0].count), orders - 1
        (value,) = log_moment(t, groups, rule)
        if on_lattice:
            within = xp.log(t) < _log_lattice_end(groups)
            value = xp.where(within & xp.isfinite(value), value, xp.nan)
        return value / t, orders

    return by_blocks(curve, (orders, groups), block)


def epsilon_at(log_delta: Array, t: Array, value: Array) -> Array:
    """*Upper bound* of epsilon that follows from ``value``, L(t)."""
    xp = namespace(log_delta, t, value)
    return (value - log_delta - xp.log1p(t)) / t - xp.log1p(1 / t)


def log_delta_at(epsilon: Array, t: Array, value: Array) -> Array:
    """*Upper bound* of log(delta) that follows from ``value``, L(t)."""
    xp = namespace(epsilon, t, value)
    return value - t * (epsilon + xp.log1p(1 / t)) - xp.log1p(t)


def best_epsilon(
    log_delta: Array,
    groups: tuple[Group, ...],
    near: Array | None = None,
    *,
    loose: bool = False,
    on_lattice: bool = False,
    block: int = 0,
) -> tuple[Array, Array]:
    """Returns the smallest epsilon at ``delta`` over orders > 1, and the order."""
    xp = namespace(log_delta, groups[0].count)

    def residual(
        log_delta: Array, t: Array, value: Array, first: Array, second: Array
    ) -> tuple[Array, Array]:
        spent = xp.maximum(t * first - value, 0.0) + xp.log1p(t)
        slope = t * (t * second + 1 / (1 + t)) / spent
        return xp.log(spent) - xp.log(-log_delta), slope

    problem = log_delta, groups, epsilon_at, residual
    t, value = _search(*problem, -log_delta, -log_delta, block, on_lattice, near, loose)
    return xp.maximum(epsilon_at(log_delta, t, value), 0.0), 1 + t


def best_log_delta(
    epsilon: Array,
    groups: tuple[Group, ...],
    *,
    loose: bool = False,
    on_lattice: bool = False,
    block: int = 0,
) -> tuple[Array, Array]:
    """Returns the smallest log(delta) at ``epsilon`` over orders > 1, and the order."""
    xp = namespace(epsilon, groups[0].count)

    def residual(
        epsilon: Array, t: Array, value: Array, first: Array, second: Array
    ) -> tuple[Array, Array]:
        del value
        paid = epsilon + xp.log1p(1 / t)
        slope = t * second / first + 1 / ((1 + t) * paid)
        return xp.log(first) - xp.log(paid), slope

    problem = epsilon, groups, log_delta_at, residual
    t, value = _search(*problem, _LOG_T_RANGE[1], 10.0, block, on_lattice, loose=loose)
    return xp.minimum(log_delta_at(epsilon, t, value), 0.0), 1 + t


def _search(
    target: Array,
    groups: tuple[Group, ...],
    objective: Callable[[Array, Array, Array], Array],
    residual: Callable[..., tuple[Array, Array]],
    highest: Array | float,
    budget: Array | float,
    block: int,
    on_lattice: bool,
    near: Array | None = None,
    loose: bool = False,
) -> tuple[Array, Array]:
    """Returns the t that minimises the objective, and `log_moment` there."""
    # Newton's method in log t for the objective's derivative, which increases, within a
    # bracket. Any order gives a valid bound, so an error of the search only raises it.
    xp = namespace(groups[0].count)
    example = groups[0].count[0]
    block = block or example.size
    low = xp.full_like(example, _LOG_T_RANGE[0])
    high = xp.broadcast_to(xp.minimum(highest, _LOG_T_RANGE[1]), example.shape)
    rule, end = _PANEL_SEARCH, high + 1
    if on_lattice:
        rule = _LATTICE_SEARCH
        end = _log_lattice_end(groups)
        high = xp.minimum(high, end)
    log_t = xp.clip(first_order(groups, budget), low, high)
    if near is not None:
        known = near > 1
        log_t = np.where(known, np.log(np.where(known, near, 2.0) - 1), log_t)
        log_t = np.clip(log_t, low, high)
    if loose:
        rule = rule._replace(tolerance=_LOOSE)

    def improve(
        given: tuple[Array, tuple[Group, ...], Array], state: _Search
    ) -> _Search:
        target, groups, end = given
        log_t, low, high = state.log_t, state.low, state.high
        t, quadrature = xp.exp(log_t), rule.quadrature
        if on_lattice:
            nats = xp.where(
                xp.any(state.is_answer), LATTICE.lattice, quadrature.lattice
            )
            quadrature = quadrature._replace(lattice=nats)
        moment = log_moment(t, groups, MomentRule(LARGER, quadrature, True))
        cost = objective(target, t, moment[0])
        value, slope = residual(target, t, *moment)
        better = cost < state.best
        too_high = ~(value <= 0)  # NaN is an overflow
        low = xp.where(too_high, low, log_t)
        high = xp.where(too_high, log_t, high)
        # Near a cliff the slope of the part behind it would stop the search far away.
        most = xp.clip(2 * xp.abs(state.step), rule.first_step, 4.0)
        step = xp.clip(-value / xp.maximum(slope, 0.05), -most, most)
        proposal = log_t + xp.where(xp.isfinite(step), step, -1.0)
        inside = (proposal > low) & (proposal < high)
        # Newton's method may alternate between two points: after a change of sign a
        # step must be at most half of the last one.
        alternates = state.step * step < 0
        alternates &= 2 * xp.abs(step) > xp.abs(state.step)
        proposal = xp.where(inside & ~alternates, proposal, 0.5 * (low + high))
        # Newton's last step has an error of about its square, at a cliff too.
        newton = -value / slope
        near = log_t + newton
        last = (near > low) & (near < high) & (xp.abs(value) < _CLOSE)
        last &= newton * newton * xp.maximum(slope, 1.0) < rule.tolerance
        best = xp.where(better, log_t, state.best_log_t)
        # The best order needs more nodes than there are, or another scale.
        beyond = log_t + step >= end
        if on_lattice:
            beyond |= ~xp.isfinite(moment[0])
        best = xp.where(last, near, xp.where(beyond, end, best))
        return _Search(
            state.count + 1,
            proposal,
            proposal - log_t,
            low,
            high,
            xp.where(better, cost, state.best),
            xp.where(state.is_answer, log_t, best),
            state.is_answer | last | beyond | (high - low < _NARROW),
            state.is_answer,
            moment[0],
        )

    def answered(state: _Search) -> _Search:
        """The state of a last evaluation, with the answer's rule."""
        return state._replace(
            count=xp.where(state.is_answer, state.count, 0),
            log_t=state.best_log_t,
            settled=state.is_answer,
            is_answer=xp.ones_like(state.is_answer),
        )

    def unfinished(state: _Search) -> Array:
        return (state.count < rule.most_steps) & ~state.settled

    # Without steps all orders are equally good.
    idle = xp.asarray(sum(xp.sum(group.count, axis=0) for group in groups)) == 0
    none, worst = xp.zeros_like(log_t), xp.full_like(log_t, xp.inf)
    ends = low, high, worst, log_t, idle
    state = _Search(none, log_t, none, *ends, xp.zeros_like(idle), none)
    last, given = answered if on_lattice else None, (target, groups, end)
    state = while_each(xp, unfinished, improve, given, state, block, last)
    t = xp.exp(state.best_log_t)
    if on_lattice:
        found = (state.best_log_t < end) & xp.isfinite(state.value)
        return t, xp.where(found | idle, state.value, xp.nan)
    moment = functools.partial(log_moment, rule=_ANSWER)
    return t, *by_blocks(moment, (t, groups), block)


def _log_lattice_end(groups: tuple[Group, ...]) -> Array:
    """Returns (n,) the log of the largest t for which all trapezoidal rules hold."""
    # Finite: with little noise there is none, and it is below any order.
    xp = namespace(groups[0].count)
    ends = [xp.min(g.loss.largest_on_lattice(LATTICE), axis=0) for g in groups]
    return xp.log(xp.maximum(functools.reduce(xp.minimum, ends), 1e-40))


class _Search(NamedTuple):
    """State of the search for the best order; arrays are (n,)."""

    count: Array
    log_t: Array
    step: Array
    low: Array
    high: Array
    best: Array
    best_log_t: Array
    settled: Array
    is_answer: Array  # whether the best order's value is computed, by the answer's rule
    value: Array

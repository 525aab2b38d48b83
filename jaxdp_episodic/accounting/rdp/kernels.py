"""Rényi-DP of composed steps, and the best order, for a batch of settings.

Pure kernels: the batch is the last axis of every array. ``L(t) = log E[(P/Q)^{1+t}]``
of a whole run is the sum of the steps' logarithms; ``rdp(1 + t) = L(t) / t``.

The best order is a root, not a search over a grid. With the conversion of Canonne,
Kamath and Steinke (2020, arXiv:2004.00010, Proposition 12), with ``alpha = 1 + t``,

    eps(t)     = (L(t) - log(delta) - log(1 + t)) / t + log(t / (1 + t)),
    t² eps'(t) = t L'(t) - L(t) + log(1 + t) + log(delta),

and the last line increases in t, because L is convex: one sign change, at t below
``1/delta``. In the same way ``log delta(t) = L(t) - t eps + t log(t/(1+t)) - log(1+t)``
is convex with derivative ``L'(t) - eps + log(t/(1+t))``. The root is found with a
coarse quadrature; the bound itself is then evaluated at that order with the fine one.
Any order gives a valid bound, so the search can only err upwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.losses import moments


class Resolution(NamedTuple):
    """Size of a quadrature: panels and Gauss–Legendre nodes in each."""

    num_panels: int
    nodes_per_panel: int


FINE = Resolution(32, 16)  # 1e-10 relative in rdp
# The search for the order: good enough to resolve the phase transition of the sampled
# Gaussian, where the best order sits at the foot of a cliff.
COARSE = Resolution(12, 8)
# At a cliff of very high order the coarse rule may be off by a few per cent: it leads
# to the neighbourhood, and a few steps with this one to the best order.
MEDIUM = Resolution(16, 10)
# At a cliff Newton's method creeps; elsewhere it is there after five or six steps.
# The steps allowed with a rule, and the change of log t that ends them.
_SEARCHES = ((COARSE, 20, 1e-5), (MEDIUM, 14, 1e-5))
_LOG_T_RANGE = (-90.0, 90.0)


class StepGroup(NamedTuple):
    """K steps of one kind; every array is (K, n).

    NumPy arrays on the host, JAX arrays in the kernels, hence the open types.
    """

    outer_rate: Any
    rate: Any
    inner_rate: Any
    shift: Any
    num_episodes: Any
    count: Any


def log_excess(
    kind: str,
    direction: str,
    t: Array,
    group: StepGroup,
    resolution: Resolution,
    with_derivatives: bool,
) -> tuple[Array, ...]:
    """``log(M - 1)`` of one step of each kind, without the outer rate; all (n,)."""
    sizes = {**resolution._asdict(), "with_derivatives": with_derivatives}
    if kind == "sampled":
        return moments.log_excess_sampled(
            t, group.rate, group.shift, direction=direction, **sizes
        )
    if kind == "swapped":
        return moments.log_excess_sampled(
            t, group.rate, group.shift, direction="symmetric", **sizes
        )
    if kind == "antipodal":
        return moments.log_excess_antipodal(
            t, group.rate, group.inner_rate, group.shift, **sizes
        )
    return moments.log_excess_episodes(
        t, group.rate, group.shift, group.num_episodes, **sizes
    )


def log_moment(
    kinds: tuple[str, ...],
    direction: str,
    t: Array,
    groups: tuple[StepGroup, ...],
    resolution: Resolution,
    *,
    with_derivatives: bool = False,
) -> tuple[Array, ...]:
    """``L(t)`` of the whole run, (n,) >= 0; upper bound, exact up to quadrature.

    With derivatives ``(L, L', L'')``, else ``(L,)``.
    """
    totals: list[Array] = [jnp.zeros_like(t)] * (3 if with_derivatives else 1)
    for kind, group in zip(kinds, groups, strict=True):
        shape = group.count.shape
        flat = StepGroup(*(a.reshape(-1) for a in group))
        orders = jnp.broadcast_to(t, shape).reshape(-1)
        excess, *ratios = log_excess(
            kind, direction, orders, flat, resolution, with_derivatives
        )
        log_odds = excess + jnp.log(flat.outer_rate)
        parts = [jnp.logaddexp(0.0, log_odds)]
        if with_derivatives:
            # M = 1 + r E: M'/M = E'/E (1 - 1/M), and so on
            first, second = ratios
            slope = jax.nn.sigmoid(log_odds) * first
            curvature = jax.nn.sigmoid(log_odds) * second - slope * slope
            parts += [slope, jnp.maximum(curvature, 0.0)]
        for i, part in enumerate(parts):
            totals[i] = totals[i] + jnp.sum(group.count * part.reshape(shape), axis=0)
    return tuple(totals)


def rdp(
    kinds: tuple[str, ...],
    direction: str,
    orders: Array,
    groups: tuple[StepGroup, ...],
) -> Array:
    """``rdp(alpha)`` in nats, (n,), for one order each."""
    t = orders - 1
    (value,) = log_moment(kinds, direction, t, groups, FINE)
    return value / t


def best_epsilon(
    kinds: tuple[str, ...], log_delta: Array, groups: tuple[StepGroup, ...]
) -> tuple[Array, Array]:
    """Smallest epsilon at ``delta`` over all orders > 1, and the order; each (n,)."""

    def objective(t: Array, value: Array) -> Array:
        return (value - log_delta - jnp.log1p(t)) / t - jnp.log1p(1 / t)

    def residual(t: Array, value: Array, first: Array, second: Array):
        spent = jnp.maximum(t * first - value, 0.0) + jnp.log1p(t)
        slope = t * (t * second + 1 / (1 + t)) / spent
        return jnp.log(spent) - jnp.log(-log_delta), slope

    t = _search(kinds, groups, objective, residual, -log_delta, -log_delta)
    (value,) = log_moment(kinds, "forward", t, groups, FINE)
    return jnp.maximum(objective(t, value), 0.0), 1 + t


def best_log_delta(
    kinds: tuple[str, ...], epsilon: Array, groups: tuple[StepGroup, ...]
) -> tuple[Array, Array]:
    """Smallest log(delta) at ``epsilon`` over all orders > 1, and the order."""

    def objective(t: Array, value: Array) -> Array:
        return value - t * (epsilon + jnp.log1p(1 / t)) - jnp.log1p(t)

    def residual(t: Array, value: Array, first: Array, second: Array):
        del value
        paid = epsilon + jnp.log1p(1 / t)
        slope = t * second / first + 1 / ((1 + t) * paid)
        return jnp.log(first) - jnp.log(paid), slope

    t = _search(kinds, groups, objective, residual, _LOG_T_RANGE[1], 10.0)
    (value,) = log_moment(kinds, "forward", t, groups, FINE)
    return jnp.minimum(objective(t, value), 0.0), 1 + t


def _search(
    kinds: tuple[str, ...],
    groups: tuple[StepGroup, ...],
    objective: Callable[[Array, Array], Array],
    residual: Callable[..., tuple[Array, Array]],
    highest: Array | float,
    budget: Array | float,
) -> Array:
    """The t that minimises the objective, found with the coarse quadrature.

    Newton's method in log t on the objective's derivative (``residual``, increasing,
    with its own slope), kept inside a bracket. The best t visited is returned.
    """
    example = groups[0].count[0]
    low = jnp.full_like(example, _LOG_T_RANGE[0])
    high = jnp.broadcast_to(jnp.minimum(highest, _LOG_T_RANGE[1]), example.shape)
    log_t = jnp.clip(_first_order(kinds, groups, budget), low, high)

    def improve(state: _Search, rule: Resolution, tolerance: float) -> _Search:
        log_t, low, high = state.log_t, state.low, state.high
        t = jnp.exp(log_t)
        moment = log_moment(kinds, "forward", t, groups, rule, with_derivatives=True)
        cost = objective(t, moment[0])
        value, slope = residual(t, *moment)
        better = ~state.settled & (cost < state.best)
        # Not a number is an overflow: t is far too large.
        too_high = ~(value <= 0)
        low = jnp.where(too_high, low, log_t)
        high = jnp.where(too_high, log_t, high)
        # Near a cliff the slope of what lies behind it would stop the search far off.
        step = jnp.clip(-value / jnp.clip(slope, 0.05, 1e3), -4.0, 4.0)
        proposal = log_t + jnp.where(jnp.isfinite(step), step, -1.0)
        inside = (proposal > low) & (proposal < high)
        # Newton may go to and fro between two points for ever: after a turn only a
        # step of half the last move or less is taken.
        turned = state.move * step < 0
        hops = turned & (2 * jnp.abs(step) > jnp.abs(state.move))
        proposal = jnp.where(inside & ~hops, proposal, 0.5 * (low + high))
        # Once settled an element stays as it is, so that its answer does not depend on
        # what it shares a block with.
        near = (jnp.abs(step) < tolerance) | (high - low < tolerance)
        settled = state.settled | near
        return _Search(
            state.count + 1,
            jnp.where(settled, log_t, proposal),
            proposal - log_t,
            low,
            high,
            jnp.where(better, cost, state.best),
            jnp.where(better, log_t, state.best_log_t),
            settled,
        )

    # Without steps there is nothing to search, and no order is better than another.
    idle = jnp.asarray(sum(jnp.sum(group.count, axis=0) for group in groups)) == 0
    for rule, most, tolerance in _SEARCHES:

        def unfinished(state: _Search, most: int = most) -> Array:
            return (state.count < most) & ~jnp.all(state.settled)

        worst = jnp.full_like(log_t, jnp.inf)
        start = jnp.zeros((), jnp.int32), log_t, jnp.zeros_like(log_t)
        state = _Search(*start, low, high, worst, log_t, idle)
        step = functools.partial(improve, rule=rule, tolerance=tolerance)
        log_t = jax.lax.while_loop(unfinished, step, state).best_log_t
    return jnp.exp(log_t)


class _Search(NamedTuple):
    """State of the search for the best order; arrays are (n,)."""

    count: Array
    log_t: Array
    move: Array
    low: Array
    high: Array
    best: Array
    best_log_t: Array
    settled: Array


def _first_order(
    kinds: tuple[str, ...], groups: tuple[StepGroup, ...], budget: Array | float
) -> Array:
    """A rough log t of the best order: the smaller of two simple answers.

    One is where a run spends ``budget`` nats at the curvature of small rates,
    ``rate² (e^{shift²} - 1) t²``. The other is where the term ``rate^alpha
    e^{alpha (alpha-1) shift²/2}`` takes over: beyond it L(t) jumps by orders of
    magnitude within a thousandth of log t, and a search that starts on the wrong side
    of the jump would have to bisect.
    """
    curvature, jump = 0.0, jnp.inf
    for kind, group in zip(kinds, groups, strict=True):
        rate, s = group.rate * group.inner_rate, group.shift
        # The variance of the privacy loss: of order rate² where losses are small; for
        # large shifts a loss of s²/2 comes up with probability `rate`.
        growth = jnp.expm1(jnp.minimum(s * s, 30.0))
        variance = jnp.minimum(rate**2 * growth, rate * (s**2 + 0.25 * s**4))
        curvature += jnp.sum(group.count * group.outer_rate * variance, axis=0)
        log_rate = jnp.log(rate)
        if kind == "antipodal":  # P/Q grows like r p/(1-p) e^{sx}
            log_rate -= jnp.maximum(jnp.log1p(-group.rate), -50.0)
        last = _jump_order(log_rate, s, group, budget)
        jump = jnp.minimum(jump, jnp.min(last, axis=0))
    smooth = 0.5 * (jnp.log(2.0 * budget) - jnp.log(curvature))
    return jnp.minimum(smooth, jnp.log(jnp.maximum(jump - 1, 1e-3)))


def _jump_order(
    log_rate: Array, s: Array, group: StepGroup, budget: Array | float
) -> Array:
    """The order at which the jump of L(t) has spent the budget; inf without a jump."""
    half = 0.5 * s * s

    def reaching(log_excess: Array) -> Array:
        """Alpha with ``alpha log_rate + alpha (alpha-1) s²/2 = log_excess``."""
        b = log_rate - half
        root = jnp.sqrt(jnp.maximum(b * b + 4 * half * log_excess, 0.0))
        return jnp.where(b < 0, (root - b) / (2 * half), jnp.inf)

    counts = jnp.maximum(group.count, 1e-300)
    log_outer = jnp.log(group.outer_rate)
    top = reaching(-log_outer)  # where M - 1 = 1 and growth slows down
    steepness = jnp.maximum((top - 1) * (log_rate + top * s * s), 1.0)
    # t L' = count M steepness = budget; one nat more, to start on the steep side.
    needed = jnp.log(budget) - jnp.log(counts * steepness) + 1.0
    beyond = jnp.maximum(top, jnp.sqrt(2 * budget / counts) / s)
    return jnp.where(needed > 0, beyond, reaching(jnp.minimum(needed, 0.0) - log_outer))

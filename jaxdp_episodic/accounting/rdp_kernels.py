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

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.amplification import moments


class Resolution(NamedTuple):
    """Size of a quadrature: panels and Gauss–Legendre nodes in each."""

    num_panels: int
    nodes_per_panel: int


FINE = Resolution(16, 16)  # 1e-10 relative in rdp
COARSE = Resolution(9, 6)  # 1e-3 or so: good enough to find the order

_SEARCH_STEPS = 11
_LOG_T_RANGE = (-90.0, 90.0)
_LARGEST_SEARCH_STEP = 3.0


class StepGroup(NamedTuple):
    """K steps of one kind; every array is (K, n)."""

    outer_rate: Array
    rate: Array
    inner_rate: Array
    shift: Array
    num_episodes: Array
    count: Array


def log_excess(
    kind: str, direction: str, t: Array, group: StepGroup, resolution: Resolution
) -> Array:
    """``log(M - 1)`` of one step of each kind, without the outer rate; all (n,)."""
    sizes = resolution._asdict()
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
) -> Array:
    """``L(t)`` of the whole run, (n,) >= 0; upper bound, exact up to quadrature."""
    total = jnp.zeros_like(t)
    for kind, group in zip(kinds, groups, strict=True):
        flat = StepGroup(*(a.reshape(-1) for a in group))
        orders = jnp.broadcast_to(t, group.count.shape).reshape(-1)
        excess = log_excess(kind, direction, orders, flat, resolution)
        one_step = jnp.logaddexp(0.0, excess + jnp.log(flat.outer_rate))
        total = total + jnp.sum(group.count * one_step.reshape(group.count.shape), 0)
    return total


def rdp(
    kinds: tuple[str, ...],
    direction: str,
    orders: Array,
    groups: tuple[StepGroup, ...],
) -> Array:
    """``rdp(alpha)`` in nats, (n,), for one order each."""
    t = orders - 1
    return log_moment(kinds, direction, t, groups, FINE) / t


def best_epsilon(
    kinds: tuple[str, ...], log_delta: Array, groups: tuple[StepGroup, ...]
) -> tuple[Array, Array]:
    """Smallest epsilon at ``delta`` over all orders > 1, and the order; each (n,)."""

    def residual(t: Array, value: Array, slope: Array) -> Array:
        curvature = jnp.maximum(t * slope - value, 0.0) + jnp.log1p(t)
        return jnp.log(curvature) - jnp.log(-log_delta)

    t = _search(kinds, groups, residual, highest=-log_delta)
    value = log_moment(kinds, "forward", t, groups, FINE)
    return epsilon_at(t, value, log_delta), 1 + t


def best_log_delta(
    kinds: tuple[str, ...], epsilon: Array, groups: tuple[StepGroup, ...]
) -> tuple[Array, Array]:
    """Smallest log(delta) at ``epsilon`` over all orders > 1, and the order."""

    def residual(t: Array, value: Array, slope: Array) -> Array:
        del value
        return jnp.log(slope) - jnp.log(epsilon + jnp.log1p(1 / t))

    t = _search(kinds, groups, residual, highest=_LOG_T_RANGE[1])
    value = log_moment(kinds, "forward", t, groups, FINE)
    return log_delta_at(t, value, epsilon), 1 + t


def epsilon_at(t: Array, value: Array, log_delta: Array) -> Array:
    """Epsilon from ``L(t)`` at one order; upper bound, at least 0."""
    epsilon = (value - log_delta - jnp.log1p(t)) / t - jnp.log1p(1 / t)
    return jnp.maximum(epsilon, 0.0)


def log_delta_at(t: Array, value: Array, epsilon: Array) -> Array:
    """log(delta) from ``L(t)`` at one order; upper bound, at most 0."""
    log_delta = value - t * (epsilon + jnp.log1p(1 / t)) - jnp.log1p(t)
    return jnp.minimum(log_delta, 0.0)


def _search(
    kinds: tuple[str, ...],
    groups: tuple[StepGroup, ...],
    residual: Callable[[Array, Array, Array], Array],
    highest: Array | float,
) -> Array:
    """The t where an increasing residual of log t changes sign; coarse quadrature.

    A secant in log t, kept inside a bracket and to steps of a factor e³. The residuals
    behave as a power of t with exponent about 2 away from the phase transition of the
    sampled Gaussian, whence the first slope.
    """

    def evaluate(log_t: Array) -> Array:
        t = jnp.exp(log_t)
        value, slope = jax.jvp(
            lambda t: log_moment(kinds, "forward", t, groups, COARSE),
            (t,),
            (jnp.ones_like(t),),
        )
        result = residual(t, value, slope)
        # An overflow means that t is far too large.
        return jnp.where(jnp.isnan(result), jnp.inf, result)

    def improve(_: int, state: tuple[Array, ...]) -> tuple[Array, ...]:
        log_t, low, high, last_log_t, last, slope = state
        value = evaluate(log_t)
        low = jnp.where(value <= 0, log_t, low)
        high = jnp.where(value > 0, log_t, high)
        moved = jnp.abs(log_t - last_log_t) > 1e-9
        gap = jnp.where(moved, log_t - last_log_t, 1.0)
        secant = (value - last) / gap
        slope = jnp.where(moved & jnp.isfinite(secant), secant, slope)
        slope = jnp.clip(slope, 0.05, 1e6)
        step = jnp.clip(-value / slope, -_LARGEST_SEARCH_STEP, _LARGEST_SEARCH_STEP)
        proposal = log_t + step
        bracketed = (low > _LOG_T_RANGE[0]) & (high < highest)
        inside = (proposal > low) & (proposal < high)
        fallback = jnp.where(bracketed, 0.5 * (low + high), jnp.clip(proposal, low, high))
        return (
            jnp.where(inside, proposal, fallback),
            low,
            high,
            log_t,
            jnp.where(jnp.isfinite(value), value, last),
            slope,
        )

    example = groups[0].count[0]
    low = jnp.full_like(example, _LOG_T_RANGE[0])
    high = jnp.broadcast_to(jnp.minimum(highest, _LOG_T_RANGE[1]), example.shape)
    start = jnp.clip(_first_order(kinds, groups), low, high)
    # The first secant has nothing to compare with: `last` equal to the start.
    state = (start, low, high, start, jnp.zeros_like(start), jnp.full_like(start, 2.0))
    log_t, *_ = jax.lax.fori_loop(0, _SEARCH_STEPS, improve, state)
    return jnp.exp(log_t)


def _first_order(kinds: tuple[str, ...], groups: tuple[StepGroup, ...]) -> Array:
    """A rough log t: where a run with the small-rate curvature spends 10 nats."""
    total = 0.0
    for _, group in zip(kinds, groups, strict=True):
        rate = group.rate * group.inner_rate
        growth = jnp.expm1(jnp.minimum(group.shift**2, 30.0))
        total = total + jnp.sum(
            group.count * group.outer_rate * (rate**2 * growth), axis=0
        )
    return 0.5 * (jnp.log(20.0) - jnp.log(total))

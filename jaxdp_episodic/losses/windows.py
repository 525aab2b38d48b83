"""Where the integrands of the moments have their weight.

A moment of order ``alpha`` of a privacy loss is an integral over a handful of Gaussian
bumps and of transitions of the log-ratio, whose places are known in closed form or as
the root of a slope. The functions here return windows ``(low, high, density)`` around
them, for `numerics.quadrature.lay_panels`, and the centers of the bumps.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

# Half-width, in standard deviations, of the window around a Gaussian bump, and the
# panels per standard deviation there: 16 nodes resolve 4 deviations to 1e-13.
_BUMP_HALF_WIDTH = 9.2
_BUMP_DENSITY = 0.25
_LONGEST_STRETCH = 500.0
# Panels around a transition of the log-ratio, in units of 1/shift: (half-width,
# density). Its singularities lie at a distance of pi.
_TRANSITION = ((6.0, 0.4), (16.0, 0.15), (50.0, 0.05))


def _bumps(centers: list[Array]) -> tuple[list[Array], list[Array], list[Array]]:
    low = [c - _BUMP_HALF_WIDTH for c in centers]
    high = [c + _BUMP_HALF_WIDTH for c in centers]
    return low, high, [jnp.full_like(c, _BUMP_DENSITY) for c in centers]


def _transitions(
    first: Array, last: Array, s: Array
) -> tuple[list[Array], list[Array], list[Array]]:
    """Graded windows around the stretch from ``first`` to ``last``."""
    low = [first - half / s for half, _ in _TRANSITION]
    high = [last + half / s for half, _ in _TRANSITION]
    return low, high, [density * s for _, density in _TRANSITION]


def _windows(
    centers: list[Array], *transitions: tuple[list[Array], list[Array], list[Array]]
) -> tuple[tuple[Array, Array, Array], Array]:
    """Windows (low, high, density), each (J, n), and the centers (K, n).

    Transitions matter only where a bump reaches: they are cut to the bumps' extent.
    """
    bumps = jnp.stack(centers)
    bottom = jnp.min(bumps, axis=0) - _BUMP_HALF_WIDTH
    top = jnp.max(bumps, axis=0) + _BUMP_HALF_WIDTH
    # Two bumps that are about to merge leave weight between them, spread over many
    # deviations: where they are not far apart the whole stretch is one window.
    span = top - bottom
    end = jnp.where(span < _LONGEST_STRETCH, top, bottom)
    near = jnp.where(span < 60.0, _BUMP_DENSITY, 0.3 * _BUMP_DENSITY)
    stretch = ([bottom], [end], [near])
    groups = (_bumps(centers), stretch, *transitions)
    low, high, density = (
        jnp.stack([a for group in groups for a in group[i]]) for i in range(3)
    )
    return (jnp.clip(low, bottom, top), jnp.clip(high, bottom, top), density), bumps


def sampled_windows(t: Array, turn: Array, s: Array, direction: str):
    """Where the integrand of the sampled pair has weight.

    ``turn`` is where p e^l = 1 - p. The logarithm of (1+v)^alpha has slope 0 left of
    it and alpha·s right of it; v² (small v) has slope 2s; v (P's own bump) slope s.
    A Gaussian with slope m peaks at m, and a bump between two slopes sits between.
    """
    alpha = 1 + t
    zero = jnp.zeros_like(s)
    knee = turn - jnp.log(alpha) / s  # alpha v = 1
    centers = [zero]
    if direction != "backward":

        def rise(x: Array) -> Array:
            return alpha * s * jax.nn.sigmoid(s * (x - turn))

        low, high = jnp.minimum(alpha, 2) * s, jnp.maximum(alpha, 2) * s
        steepest = alpha * s
        settled = _settle(rise, jnp.stack([steepest, zero]), zero, steepest)
        centers += [steepest, *settled, jnp.clip(turn, low, high), 2 * s]
    if direction != "forward":
        centers += [jnp.clip(knee, s, 2 * s)]
    if direction == "backward":

        def fall(x: Array) -> Array:
            return -t * s * jax.nn.sigmoid(s * (x - turn))

        centers += [_only_root(fall, -t * s, zero)]
    return _windows(centers, _transitions(knee, turn, s))


def antipodal_turns(
    log_p: Array, log_q: Array, log_r: Array, s: Array
) -> tuple[Array, Array]:
    """Where Q's density changes its bump, and where P/Q starts to rise."""
    # Q's density leaves N(-s) for N(0) where p e^{-sx-s²/2} = 1 - p.
    base_turn = jnp.clip((log_p - log_q) / s - 0.5 * s, -1e300, 1e300)
    # r w = 1, a quadratic in e^{sx - s²/2} once e^{-2sx} is neglected
    log_a = log_p + log_r
    root = jnp.logaddexp(
        log_q, 0.5 * jnp.logaddexp(2 * log_q, math.log(4.0) + log_a + log_p - s * s)
    )
    turn = (root - math.log(2.0) - log_a) / s + 0.5 * s
    return base_turn, turn


def antipodal_windows(t: Array, log_p: Array, log_q: Array, log_r: Array, s: Array):
    """Where the integrand of the antipodal pair has weight; x > 0."""
    alpha = 1 + t
    zero = jnp.zeros_like(s)
    base_turn, turn = antipodal_turns(log_p, log_q, log_r, s)
    knee = jnp.maximum(turn - jnp.log(alpha) / s, 0.0)

    log_stay = jnp.log1p(-jnp.exp(log_r))  # log(1 - r)

    def slope(x: Array) -> Array:
        """Slope of log(Q (P/Q)^alpha) plus x."""
        base_weight = jax.nn.sigmoid(s * (base_turn - x))
        terms = jnp.stack(
            [
                log_q + 0 * x,
                log_stay + log_p - s * (x + 0.5 * s),
                log_r + log_p + s * (x - 0.5 * s),
            ]
        )
        _, down, up = jax.nn.softmax(jnp.maximum(terms, -1e300), axis=0)
        return s * (t * base_weight + alpha * (up - down))

    top_slope = (2 * alpha - 1) * s
    centers = [
        zero,
        jnp.clip(base_turn, 2 * s, 3 * s),
        jnp.clip(knee, s, 3 * s),
        top_slope,
        *_settle(slope, jnp.stack([top_slope, alpha * s, zero]), zero, top_slope),
    ]
    return _windows(
        centers,
        _transitions(knee, turn, s),
        _transitions(base_turn, base_turn, s),
    )


def _settle(slope, start: Array, low: Array, high: Array) -> Array:
    """Follows ``x = slope(x)`` from starts (k, n) to the bumps of the integrand nearby.

    The exponent is ``integral(slope) - x²/2``. A Newton step where it is more concave
    than a unit Gaussian, the plain fixed-point step elsewhere, and the middle of the
    bracket where those leave it or do not halve the step: across a kink of the slope
    they would jump to and fro for ever.
    """

    def follow(_: int, state: tuple[Array, Array, Array, Array]):
        x, low, high, last_move = state
        value, derivative = jax.jvp(slope, (x,), (jnp.ones_like(x),))
        low = jnp.where(value >= x, x, low)
        high = jnp.where(value <= x, x, high)
        step = x + (value - x) / jnp.maximum(1.0 - derivative, 1.0)
        inside = (step >= low) & (step <= high)
        shrinks = 2 * jnp.abs(step - x) <= last_move
        moved = jnp.where(inside & shrinks, step, 0.5 * (low + high))
        return moved, low, high, jnp.abs(moved - x)

    low, high = (jnp.broadcast_to(end, start.shape) for end in (low, high))
    state = (start, low, high, 4 * (high - low))
    x, *_ = jax.lax.fori_loop(0, 14, follow, state)
    return x


def _only_root(slope, low: Array, high: Array) -> Array:
    """The one solution of ``x = slope(x)`` for a decreasing slope, by bisection."""

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = slope(middle) >= middle
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    low, high = jax.lax.fori_loop(0, 40, halve, (low, high))
    return 0.5 * (low + high)

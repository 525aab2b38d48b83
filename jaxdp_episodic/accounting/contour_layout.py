"""Where the contour of the exact accountant runs: crossing, scale, lean and end.

Pure kernels: the batch is the last axis of every array; nodes of the contour (K) and
of the losses (J) come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.accounting.contour_moments import (
    Pair,
    Steps,
    log_atoms,
    log_powers,
    real_moments,
)
from jaxdp_episodic.numerics.complex_exponentials import log_complex, polar

# Share of the steepest lean that is used, and the largest: at 1 a Gaussian would no
# longer fall off.
_LEAN_SHARE, _LARGEST_LEAN = 0.7, 0.6
# What is cut off the laws must stay below e^-30 on the contour.
_NEGLIGIBLE = -30.0
# The contour ends where the integrand has fallen by so many nats.
_FALL = 42.0
_NUM_SCOUTS = 24
_BISECTIONS = 18
# Nats by which delta is usually below Chernoff's bound of it.
_USUAL_GAP = 3.0
# Phase that e^{-z distance} may turn by in a unit of the trapezoidal rule's variable.
_PHASE = 6.0


class Contour(NamedTuple):
    """Parameters of the contour of each setting; (n,) arrays.

    ``z(y) = center + lean (sqrt(scale² + y²) - scale) + i y``.

    Attributes:
      center, scale, lean: of the formula.
      bend: b of ``y = scale asinh(b sinh(u)) / b``; at most 1.
      end: largest u.
      log_chernoff: logarithm of a bound of delta, at the epsilon that was guessed.
    """

    center: Array
    scale: Array
    lean: Array
    bend: Array
    end: Array
    log_chernoff: Array


def lay_contour(epsilon: Array, groups: tuple[Steps, ...]) -> Contour:
    """The contour for delta at ``epsilon``, (n,)."""
    center = _saddle(epsilon, groups)
    log_power, _, curvature = real_moments(center, groups)
    inverse = 1 / center**2 + 1 / (1 + center) ** 2
    scale = 1 / jnp.sqrt(jnp.maximum(curvature, 0.0) + inverse)
    location, spread = jnp.zeros_like(epsilon), jnp.zeros_like(epsilon)
    steepest = [jnp.full_like(epsilon, jnp.inf)] * 2
    for steps in groups:
        location += jnp.sum(steps.count * steps.spike, axis=0)
        spread += jnp.sum(steps.count * steps.spread, axis=0)
        used = steps.count > 0
        for side, ratio in enumerate((steps.law.right, steps.law.left)):
            ratio = jnp.where(used, ratio.reshape(used.shape), jnp.inf)
            steepest[side] = jnp.minimum(steepest[side], jnp.min(ratio, axis=0))
    right = epsilon >= location
    lean = jnp.where(right, steepest[0], steepest[1])
    lean = jnp.clip(_LEAN_SHARE * lean, 0.0, _LARGEST_LEAN)
    distance = jnp.maximum(jnp.abs(epsilon - location), 1e-12)
    # Where eps is far below the distance, the spike may not count at first.
    least = jnp.clip(epsilon, 0.05 * distance, distance)
    lean_signed = jnp.where(right, lean, -lean)
    bend = jnp.clip(scale * (distance + spread) / _PHASE, 1e-9, 1.0)
    furthest = jnp.clip(45.0 / jnp.maximum(lean * least * scale, 1e-200), 12.0, 1e12)
    powers = jnp.arange(_NUM_SCOUTS, dtype=epsilon.dtype)[:, None] / (_NUM_SCOUTS - 1)
    ends = jnp.exp(jnp.log(furthest) * powers)
    contour = Contour(center, scale, lean_signed, bend, furthest, log_power)
    y = scale * jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    z, log_speed = contour_points(contour, y)
    power, _ = log_powers(z, groups, accurate=False, checked=False)
    size = _log_integrand(z, log_speed, power, log_atoms(groups), epsilon)
    size = size + jnp.log(jnp.maximum(y, scale))
    large = size[1:] > size[0] - _FALL
    last = jnp.max(jnp.where(large, jnp.arange(_NUM_SCOUTS)[:, None], 0), axis=0)
    last = jnp.minimum(last + 1, _NUM_SCOUTS - 1)
    reach = jnp.take_along_axis(ends, last[None], axis=0)[0]
    reach = jnp.maximum(reach, 3.0)
    chernoff = log_power - center * epsilon + _log_payoff(center)
    return contour._replace(end=_end(bend, reach), log_chernoff=chernoff)


def _end(bend: Array, reach: Array) -> Array:
    """Where ``asinh(b sinh(u)) / b`` is ``reach``."""
    v = bend * reach
    near = jnp.arcsinh(jnp.sinh(jnp.minimum(v, 20.0)) / bend)
    return jnp.where(v > 20, v - jnp.log(bend), near)


def first_epsilon(log_delta: Array, highest: Array, groups: tuple[Steps, ...]) -> Array:
    """Roughly epsilon at the given delta, (n,), to lay a first contour for.

    Chernoff's bound at the best c, less what delta usually is below it. The laws are
    cut, so that it may be far below Rényi's bound, ``highest``.
    """

    def excess(c: Array) -> Array:
        log_power, mean, _ = real_moments(c, groups)
        weight, weight_slope = _log_payoff(c), -jnp.log1p(1 / c)
        return c * (mean + weight_slope) - log_power - weight + log_delta

    c = _last_below(excess, _largest_center(log_delta, groups))
    log_power, _, _ = real_moments(c, groups)
    bound = (log_power + _log_payoff(c) - log_delta) / c
    bound = jnp.where(bound < highest, bound, highest)
    return jnp.maximum(bound - _USUAL_GAP / c, 0.2 * bound)


def _log_payoff(c: Array) -> Array:
    """``log max_x e^{-c x}(1 - e^{-x})``."""
    return -jnp.log1p(c) - c * jnp.log1p(1 / c)


def _saddle(epsilon: Array, groups: tuple[Steps, ...]) -> Array:
    """Where ``T log M(c) - c eps - log(c (1 + c))`` is least, roughly; (n,)."""

    def slope(c: Array) -> Array:
        _, mean, _ = real_moments(c, groups)
        return mean - epsilon - 1 / c - 1 / (1 + c)

    return _last_below(slope, _largest_center(epsilon, groups))


def _last_below(function: Callable[[Array], Array], largest: Array) -> Array:
    """About the largest c up to which an increasing function is not above 0."""
    low = jnp.full_like(largest, math.log(1e-8))
    high = jnp.maximum(jnp.log(jnp.maximum(largest, 1e-300)), low)

    def halve(_: int, bracket: Pair) -> Pair:
        low, high = bracket
        middle = 0.5 * (low + high)
        below = function(jnp.exp(middle)) <= 0
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, (low, high))
    return jnp.exp(low)


def _largest_center(like: Array, groups: tuple[Steps, ...]) -> Array:
    """Up to which c the losses that are cut off do not matter; (n,)."""
    highest = jnp.full_like(like, 1e12)
    for steps in groups:
        count = (steps.count * steps.outer_rate).reshape(-1)
        log_mass = jnp.log(jnp.maximum(count, 1e-300)) + steps.law.end_log_weight
        loss = steps.law.end_loss
        limit = (_NEGLIGIBLE - log_mass) / jnp.where(loss > 0, loss, 1.0)
        limit = jnp.where((loss > 0) & (count > 0), limit, jnp.inf)
        limit = jnp.min(limit, axis=0).reshape(steps.count.shape)
        highest = jnp.minimum(highest, jnp.min(limit, axis=0))
    return highest


def contour_points(contour: Contour, y: Array) -> tuple[Pair, Pair]:
    """Points z at the heights y, and ``log(dz / dy / (i pi z (1 + z)))``."""
    root = jnp.sqrt(contour.scale**2 + y * y)
    # sqrt(scale² + y²) - scale without cancellation
    z = (contour.center + contour.lean * y * (y / (root + contour.scale)), y)
    direction = log_complex(jnp.ones_like(y), -contour.lean * y / root)
    log_z, log_z1 = log_complex(*z), log_complex(1 + z[0], z[1])
    re = direction[0] - log_z[0] - log_z1[0] - math.log(math.pi)
    return z, (re, direction[1] - log_z[1] - log_z1[1])


def _log_integrand(
    z: Pair, log_weight: Pair, log_power: Pair, log_atom: Array, epsilon: Array
) -> Array:
    """Logarithm of the integrand's absolute value, the atom subtracted; (K, n)."""
    tilt = (log_weight[0] - z[0] * epsilon, log_weight[1] - z[1] * epsilon)
    peak = jnp.maximum(log_power[0], log_atom)
    value = polar(log_power[0] - peak, log_power[1])
    re = value[0] - jnp.exp(log_atom - peak)
    return jnp.log(jnp.maximum(jnp.hypot(re, value[1]), 1e-300)) + peak + tilt[0]

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
import numpy as np
from jax import Array

from jaxdp_episodic.accounting.exact.mgf import (
    Pair,
    Steps,
    core_variance,
    log_atoms,
    log_core,
    log_powers,
    real_moments,
    without_core,
)
from jaxdp_episodic.numerics.complex_exponentials import log_complex

# Share of the steepest lean that is used, and the largest: at 1 a Gaussian would no
# longer fall off.
_LEAN_SHARE, _LARGEST_LEAN = 0.7, 0.6
# What is cut off the laws must stay below e^-40 on the contour: M^T may be 1 where what
# is left of it without the core is a millionth of it.
_NEGLIGIBLE = -40.0
# The contour ends where the integrand has fallen by so many nats.
_FALL = 42.0
_NUM_SCOUTS = 24
_BISECTIONS = 18
# Crossings that are tried, relative to the saddle point of all losses, where the core
# is subtracted; and by how many nats that must pay.
_CROSSINGS = 1.25 ** np.arange(16.0)
_LEAST_GAIN = 1.0
# How far apart M^T and its core must be for their difference to mean something, and
# that for each step.
_APART, _APART_PER_STEP = 1e-6, 1e-11
# Phase that e^{-z distance} may turn by in a unit of the trapezoidal rule's variable.
_PHASE = 6.0


class Contour(NamedTuple):
    """Parameters of the contour of each setting; (n,) arrays.

    ``z(y) = center + lean (sqrt(scale² + y²) - scale) + i y``.

    Attributes:
      center, scale, lean: of the formula.
      bend: b of ``y = scale asinh(b sinh(u)) / b``; at most 1.
      end: largest u.
      core: variance of the Gaussian that is subtracted; 0 if none is.
    """

    center: Array
    scale: Array
    lean: Array
    bend: Array
    end: Array
    core: Array


def lay_contour(epsilon: Array, groups: tuple[Steps, ...]) -> Contour:
    """The contour for delta at ``epsilon``, (n,)."""
    center, core = _crossing(epsilon, groups)
    scale = 1 / jnp.sqrt(transform(center, core, groups).curvature)
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
    contour = Contour(center, scale, lean_signed, bend, furthest, core)
    y = scale * jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    z, log_speed = contour_points(contour, y)
    power, _ = log_powers(z, groups, checked=False)
    left, _ = without_core(z, power, core, log_atoms(groups))
    size = left[0] + log_speed[0] - z[0] * epsilon + jnp.log(jnp.maximum(y, scale))
    large = size[1:] > size[0] - _FALL
    last = jnp.max(jnp.where(large, jnp.arange(_NUM_SCOUTS)[:, None], 0), axis=0)
    last = jnp.minimum(last + 1, _NUM_SCOUTS - 1)
    reach = jnp.take_along_axis(ends, last[None], axis=0)[0]
    reach = jnp.maximum(reach, 3.0)
    return contour._replace(end=_end(bend, reach))


def _end(bend: Array, reach: Array) -> Array:
    """Where ``asinh(b sinh(u)) / b`` is ``reach``."""
    v = bend * reach
    near = jnp.arcsinh(jnp.sinh(jnp.minimum(v, 20.0)) / bend)
    return jnp.where(v > 20, v - jnp.log(bend), near)


def _crossing(epsilon: Array, groups: tuple[Steps, ...]) -> Pair:
    """Where the contour crosses the axis, and the core that is subtracted; (n,)."""
    largest = largest_center(epsilon, groups)

    def slope(c: Array) -> Array:
        _, mean, _ = real_moments(c, groups)
        return mean - epsilon - 1 / c - 1 / (1 + c)

    plain = _last_below(slope, largest)
    core = core_variance(groups)
    c = jnp.minimum(plain * _CROSSINGS[:, None], jnp.maximum(largest, plain))
    nothing = jnp.zeros_like(core)
    whole = transform(plain, nothing, groups).log_value - plain * epsilon
    left = transform(c, core, groups)
    size = jnp.where(left.valid, left.log_value - c * epsilon, jnp.inf)
    best = jnp.argmin(size, axis=0)[None]
    gained = jnp.take_along_axis(size, best, axis=0)[0] < whole - _LEAST_GAIN
    center = jnp.take_along_axis(c, best, axis=0)[0]
    return jnp.where(gained, center, plain), jnp.where(gained, core, 0.0)


class Transform(NamedTuple):
    """``F(c) = (M(c)^T - core) / (c (1 + c))`` at real c; arrays of the shape of c.

    Attributes:
      log_value: log F.
      slope: ``(log F)'``, the epsilon whose saddle point is c.
      curvature: ``(log F)''``, > 0.
      valid: whether rounding leaves anything of it.
    """

    log_value: Array
    slope: Array
    curvature: Array
    valid: Array


def transform(c: Array, core: Array, groups: tuple[Steps, ...]) -> Transform:
    """F and its derivatives at real c, (..., n); a Gaussian core of 0 is none."""
    log_power, mean, curvature = real_moments(c, groups)
    log_core_, _ = log_core((c, jnp.zeros_like(c)), core, log_atoms(groups))
    inverse = 1 / c**2 + 1 / (1 + c) ** 2
    share = jnp.exp(jnp.minimum(log_core_ - log_power, 0.0))
    left = jnp.where(core > 0, -jnp.expm1(jnp.minimum(log_core_ - log_power, 0.0)), 1.0)
    steps = sum(jnp.sum(group.count, axis=0) for group in groups)
    valid = left > _APART + _APART_PER_STEP * steps
    left = jnp.where(valid, left, 1.0)
    share = jnp.where(core > 0, share, 0.0)
    core_mean = core * (c + 0.5)
    slope = (mean - share * core_mean) / left
    second = (curvature + mean**2 - share * (core + core_mean**2)) / left
    return Transform(
        log_power + jnp.log(left) - jnp.log(c) - jnp.log1p(c),
        slope - 1 / c - 1 / (1 + c),
        jnp.maximum(second - slope**2, 0.0) + inverse,
        valid,
    )


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


def largest_center(like: Array, groups: tuple[Steps, ...]) -> Array:
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

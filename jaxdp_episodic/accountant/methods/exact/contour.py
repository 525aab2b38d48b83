"""The contour of the "exact" method: where it crosses the real axis, bends and ends.

Pure kernels: the batch is the last axis of every array; nodes of the contour (K) and
of the losses (J) come first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.exact.mgf import (
    Pair,
    Steps,
    core_variance,
    first_return,
    have_atoms,
    last_imaginary_part,
    log_atoms,
    log_core,
    log_envelope,
    log_powers,
    real_moments,
    without_core,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import divided, log_size
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, where_needed
from jaxdp_episodic.accountant.numerics.roots import log_crossing

# The contour's ends lean towards the side on which the integrand falls. Share of the
# steepest lean that is used, and the largest: at 1 a Gaussian would no longer fall off.
# Nor must the terms of the nodes that check grow, on their lower path.
_LEAN_SHARE, _CHECK_SHARE, _LARGEST_LEAN = 0.7, 0.9, 0.6
# Truncated losses must contribute less than e^-40 on the contour: M^T may be 1, and a
# millionth of it be left without the core.
_NEGLIGIBLE = -40.0
# The contour ends where the integrand has fallen by so many nats.
FALL = 42.0
# The same, and the furthest end in units of the scale, on vertical lines. There nodes
# are equally spaced: atoms' phases agree again where y is a few 1 / loss, as narrowly.
_VERTICAL_FALL, _VERTICAL_END = 26.0, 300.0
_NUM_PROBES = 16
# The saddle point is known to some percent of its logarithm's spacing.
_SADDLE_POINTS, _SADDLE_REFINEMENTS = 6, 3
# Crossings tried where the core is subtracted, relative to the saddle point of all
# losses; and by how many nats the integrand must be smaller for the core to be used.
_CROSSINGS = 1.6 ** np.arange(8.0)
_LEAST_GAIN = 1.0
# Least relative difference of M^T and its core above rounding errors, and for each
# step.
_APART, _APART_PER_STEP = 1e-6, 1e-11
# Phase that the integrand may turn by in a unit of the trapezoidal rule's variable.
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


def lay_contour(
    epsilon: Array, groups: tuple[Steps, ...], fall: Array | float = FALL
) -> Contour:
    """The contour for delta at ``epsilon``, (n,), up to a fall by so many nats."""
    xp = namespace(epsilon, groups[0].count)
    center, core, slope, curvature = _crossing(epsilon, groups)
    # Away from the saddle point the integrand's phase turns this fast: nodes further
    # apart would alias it.
    turning = xp.abs(epsilon - slope) / _PHASE
    scale = 1 / xp.maximum(xp.sqrt(curvature), turning)
    location, spread = xp.zeros_like(epsilon), xp.zeros_like(epsilon)
    steepest = [xp.full_like(epsilon, xp.inf)] * 2
    for steps in groups:
        location += xp.sum(steps.count * steps.spike, axis=0)
        spread += xp.sum(steps.count * steps.spread, axis=0)
        used = steps.count > 0
        for nodes, share in ((steps.nodes, _LEAN_SHARE), (steps.check, _CHECK_SHARE)):
            for side, ratio in enumerate((nodes.right, nodes.left)):
                ratio = xp.where(used, share * ratio.reshape(used.shape), xp.inf)
                steepest[side] = xp.minimum(steepest[side], xp.min(ratio, axis=0))
    right = epsilon >= location
    lean = xp.clip(xp.where(right, *steepest), 0.0, _LARGEST_LEAN)
    distance = xp.maximum(xp.abs(epsilon - location), 1e-12)
    # Where eps is far below the distance, the spike may be negligible at first.
    least = xp.clip(epsilon, 0.05 * distance, distance)
    lean_signed = xp.where(right, lean, -lean)
    bend = xp.clip(scale * (distance + spread) / _PHASE, 1e-9, 1.0)
    bend = xp.where(lean > 0, bend, 1.0)
    furthest = xp.clip(45.0 / xp.maximum(lean * least * scale, 1e-200), 12.0, 1e12)
    returns = first_return(groups)
    furthest = xp.where(
        lean > 0, furthest, xp.maximum(_VERTICAL_END, 1.1 * returns / scale)
    )
    furthest = xp.minimum(
        furthest, xp.maximum(last_imaginary_part(groups) / scale, 3.1)
    )
    powers = xp.arange(_NUM_PROBES, dtype=epsilon.dtype)[:, None] / (_NUM_PROBES - 1)
    ends = xp.exp(xp.log(furthest) * powers)
    contour = Contour(center, scale, lean_signed, bend, furthest, core)
    y = scale * xp.concatenate([xp.zeros_like(ends[:1]), ends])
    z, speed = contour_points(contour, y)
    power, _ = log_powers(z, groups, checked=False)
    difference, left = without_core(z, power, core, log_atoms(groups))
    left = left + log_size(difference)
    if have_atoms(groups):
        left = where_needed(
            (lean > 0) | (y < returns), left, lambda: envelope(z, core, groups)
        )
    size = left + log_size(speed) - z[0] * epsilon + xp.log(xp.maximum(y, scale))
    spare = size[1:] - size[0] + xp.where(lean > 0, fall, _VERTICAL_FALL)
    last = xp.max(xp.where(spare > 0, xp.arange(_NUM_PROBES)[:, None], 0), axis=0)
    sides = xp.stack([last, xp.minimum(last + 1, _NUM_PROBES - 1)])
    before, behind = xp.take_along_axis(spare, sides, axis=0)
    share = before / (before - behind)
    # Along a vertical line it may rise again.
    falls = (lean > 0) & (share >= 0) & (share <= 1)
    share = xp.where(falls, share, 1.0)
    reach = xp.take_along_axis(ends, sides, axis=0)
    reach = xp.exp(xp.log(reach[0]) + share * xp.log(reach[1] / reach[0]))
    reach = xp.maximum(reach, 3.0)
    return contour._replace(end=_end(bend, reach))


def envelope(z: Pair, core: Array, groups: tuple[Steps, ...]) -> Array:
    """Upper bound of ``log |M^T - atom - core|``; see `mgf.log_envelope`."""
    xp = namespace(z[0], core, groups[0].count)
    log_atom = log_atoms(groups)
    less = xp.maximum(log_core(z, core, log_atom)[0], log_atom)
    return xp.logaddexp(log_envelope(z, groups), math.log(2.0) + less)


def _end(bend: Array, reach: Array) -> Array:
    """Where ``asinh(b sinh(u)) / b`` is ``reach``."""
    xp = namespace(bend, reach)
    v = bend * reach
    near = xp.arcsinh(xp.sinh(xp.minimum(v, 20.0)) / bend)
    return xp.where(v > 20, v - xp.log(bend), near)


def _crossing(epsilon: Array, groups: tuple[Steps, ...]) -> tuple[Array, ...]:
    """Where the contour crosses the axis, the core that is subtracted, and `Transform`.

    Of that slope and curvature there; each (n,).
    """
    xp = namespace(epsilon, groups[0].count)
    largest = largest_center(epsilon, groups)

    def slope(c: Array) -> Array:
        _, mean, _ = real_moments(c, groups)
        return mean - epsilon - 1 / c - 1 / (1 + c)

    plain = log_crossing(
        lambda c: -slope(c),
        xp.full_like(largest, 1e-8),
        xp.maximum(largest, 1e-8),
        num_points=_SADDLE_POINTS,
        num_refinements=_SADDLE_REFINEMENTS,
    )
    core = core_variance(groups)
    # The first is the saddle point itself.
    c = xp.minimum(plain * _CROSSINGS[:, None], xp.maximum(largest, plain))
    moments = real_moments(c, groups)
    nothing = xp.zeros_like(core)
    whole = transform(plain, nothing, groups, tuple(part[0] for part in moments))
    left = transform(c, core, groups, moments)
    size = xp.where(left.valid, left.log_value - c * epsilon, xp.inf)
    best = xp.argmin(size, axis=0)
    found = xp.stack([size, c, left.slope, left.curvature])
    size, *found = xp.take_along_axis(found, best[None, None], axis=1)[:, 0]
    gained = size < whole.log_value - plain * epsilon - _LEAST_GAIN
    there = zip(found, (plain, whole.slope, whole.curvature), strict=True)
    center, slope_there, curvature = (xp.where(gained, a, b) for a, b in there)
    return center, xp.where(gained, core, 0.0), slope_there, curvature


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


def transform(
    c: Array,
    core: Array,
    groups: tuple[Steps, ...],
    moments: tuple[Array, ...],
) -> Transform:
    """F and its derivatives at real c, (..., n), where `real_moments` are known.

    A Gaussian core of 0 is none.
    """
    xp = namespace(c, core, groups[0].count)
    log_power, mean, curvature = moments
    log_core_, _ = log_core((c, xp.zeros_like(c)), core, log_atoms(groups))
    inverse = 1 / c**2 + 1 / (1 + c) ** 2
    share = xp.exp(xp.minimum(log_core_ - log_power, 0.0))
    left = xp.where(core > 0, -xp.expm1(xp.minimum(log_core_ - log_power, 0.0)), 1.0)
    steps = sum(xp.sum(group.count, axis=0) for group in groups)
    valid = left > _APART + _APART_PER_STEP * steps
    left = xp.where(valid, left, 1.0)
    share = xp.where(core > 0, share, 0.0)
    core_mean = core * (c + 0.5)
    slope = (mean - share * core_mean) / left
    second = (curvature + mean**2 - share * (core + core_mean**2)) / left
    return Transform(
        log_power + xp.log(left) - xp.log(c) - xp.log1p(c),
        slope - 1 / c - 1 / (1 + c),
        xp.maximum(second - slope**2, 0.0) + inverse,
        valid,
    )


def largest_center(like: Array, groups: tuple[Steps, ...]) -> Array:
    """The largest real c at which the truncated losses are negligible; (n,)."""
    xp = namespace(like, groups[0].count)
    highest = xp.full_like(like, 1e12)
    for steps in groups:
        count = (steps.count * steps.outer_rate).reshape(-1)
        log_mass = xp.log(xp.maximum(count, 1e-300)) + steps.nodes.end_log_weight
        loss = steps.nodes.end_loss
        limit = (_NEGLIGIBLE - log_mass) / xp.where(loss > 0, loss, 1.0)
        limit = xp.where((loss > 0) & (count > 0), limit, xp.inf)
        limit = xp.min(limit, axis=0).reshape(steps.count.shape)
        highest = xp.minimum(highest, xp.min(limit, axis=0))
    return highest


def contour_points(contour: Contour, y: Array) -> tuple[Pair, Pair]:
    """Points z with imaginary parts y, and ``dz / dy / (i pi z (1 + z))``."""
    xp = namespace(contour.center, y)
    root = xp.sqrt(contour.scale**2 + y * y)
    # sqrt(scale² + y²) - scale without cancellation
    z = (contour.center + contour.lean * y * (y / (root + contour.scale)), y)
    direction = (xp.full_like(y, 1 / math.pi), -contour.lean / math.pi * y / root)
    return z, divided(divided(direction, z), (1 + z[0], z[1]))

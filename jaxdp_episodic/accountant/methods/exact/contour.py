"""The contour of the "exact" method, a hyperbola through the saddle point."""

# Pure kernels. Reference: docs/theory.md, "Exact".

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.exact.mgf import (
    Pair,
    Steps,
    bulk_variance,
    first_realignment,
    log_atoms,
    log_bulk,
    log_powers,
    log_realigned,
    real_moments,
    without_bulk,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import divided, log_size
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    namespace,
    rows_at,
    where_needed,
)
from jaxdp_episodic.accountant.numerics.roots import log_crossing

# Shares of the steepest lean at which the terms of the nodes still decay: of the nodes
# and of those that check them. At 1 a Gaussian's would not.
_LEAN_SHARE = 0.7
_CHECK_LEAN_SHARE = 0.9
_LARGEST_LEAN = 0.6
# Leans tried, relative to the steepest one, where parts of the losses lie far apart.
_STEEPER = 0.5 ** np.arange(5.0)
# Log of the largest contribution of the truncated losses on the contour: M^T may be 1,
# and a millionth of it be left without the bulk.
_TRUNCATED = -40.0
# Nats by which the integrand falls along the contour.
FALL = 42.0
# The same along vertical lines, and their least end in units of the scale. Nodes there
# are equally spaced, and phases of atoms agree again where y is a few 1 / loss.
_VERTICAL_FALL = 26.0
_VERTICAL_END = 300.0
# Points at which the end is searched for.
_NUM_PROBES = 16
# Search for the saddle point: to some percent of the logarithm's spacing.
_SADDLE_POINTS = 6
_SADDLE_REFINEMENTS = 3
# Crossings tried where the bulk is subtracted, relative to the saddle point with it.
_CROSSINGS = 1.6 ** np.arange(8.0)
# Nats by which the integrand must be smaller without the bulk for it to be subtracted.
_LEAST_GAIN = 1.0
# Least relative difference of M^T and the bulk above rounding errors, and per step.
_LEAST_DIFFERENCE = 1e-6
_LEAST_DIFFERENCE_PER_STEP = 1e-11
# Radians that the integrand's phase may change in a unit of u.
_PHASE = 6.0


class Contour(NamedTuple):
    """Parameters of the contour of each setting; (n,) arrays."""

    center: Array  # of z(y), see above
    scale: Array
    lean: Array
    bend: Array  # of y(u); at most 1
    end: Array  # largest u
    bulk: Array  # variance of the Gaussian that is subtracted; 0 if none is


def lay_contour(
    epsilon: Array,
    groups: tuple[Steps, ...],
    fall: Array | float = FALL,
    bulk: Array | None = None,
) -> Contour:
    """The contour for delta at ``epsilon``, (n,); the integrand falls by ``fall``."""
    xp = namespace(epsilon, groups[0].count)
    bulk = bulk_variance(groups) if bulk is None else bulk
    center, bulk, size, slope, curvature = _crossing(epsilon, bulk, groups)
    # Off the saddle point the phase changes at this rate: wider nodes would alias it.
    rate = xp.abs(epsilon - slope) / _PHASE
    scale = 1 / xp.maximum(xp.sqrt(curvature), rate)
    location, width, right, lean = _asymptote(epsilon, groups)
    realign = first_realignment(groups)
    alone = ~xp.isfinite(realign)
    distance = xp.maximum(xp.abs(epsilon - location), 1e-12)
    # Furthest end in units of the scale. The decay is that of epsilon's distance from
    # the bulk loss; where epsilon is far below it, perhaps that of epsilon at first.
    least = xp.clip(epsilon, 0.05 * distance, distance)

    def reach(lean: Array) -> Array:
        return xp.clip(45.0 / xp.maximum(lean * least * scale, 1e-200), 12.0, 1e12)

    def steep() -> Array:
        """The steepest lean along which what realigns is negligible in the end."""
        leans = lean * _STEEPER[:, None]
        y = scale * reach(leans)
        leaning = Contour(center, scale, xp.where(right, leans, -leans), *(scale,) * 3)
        z, _ = contour_points(leaning, y)
        left = log_realigned(z, groups) - z[0] * epsilon
        left = xp.maximum(left - size - xp.log(scale) + fall, 0.0)
        return rows_at(leans, left.argmin(axis=0)[None])[0]

    lean = where_needed(alone | (lean <= 0), lean, steep)
    bend = xp.clip(scale * (distance + width) / _PHASE, 1e-9, 1.0)
    bend = xp.where(lean > 0, bend, 1.0)
    furthest = xp.where(
        lean > 0, reach(lean), xp.maximum(_VERTICAL_END, 1.1 * realign / scale)
    )
    lean_signed = xp.where(right, lean, -lean)
    contour = Contour(center, scale, lean_signed, bend, furthest, bulk)
    return contour._replace(end=_end(epsilon, contour, realign, fall, groups))


def _asymptote(epsilon: Array, groups: tuple[Steps, ...]) -> tuple[Array, ...]:
    """Sums of bulk losses and of their widths; whether epsilon is above; lean."""
    xp = namespace(epsilon, groups[0].count)
    location, width = xp.zeros_like(epsilon), xp.zeros_like(epsilon)
    steepest = [xp.full_like(epsilon, xp.inf)] * 2
    for steps in groups:
        location += (steps.count * steps.bulk_loss).sum(axis=0)
        width += (steps.count * steps.bulk_width).sum(axis=0)
        used = steps.count > 0
        for nodes, share in (
            (steps.nodes, _LEAN_SHARE),
            (steps.check, _CHECK_LEAN_SHARE),
        ):
            for side, ratio in enumerate((nodes.right, nodes.left)):
                ratio = xp.where(used, share * ratio.reshape(used.shape), xp.inf)
                steepest[side] = xp.minimum(steepest[side], ratio.min(axis=0))
    right = epsilon >= location
    lean = xp.clip(xp.where(right, *steepest), 0.0, _LARGEST_LEAN)
    return location, width, right, lean


def _end(
    epsilon: Array,
    contour: Contour,
    realign: Array,
    fall: Array | float,
    groups: tuple[Steps, ...],
) -> Array:
    """The u at which the integrand has fallen; ``contour.end`` is the furthest y."""
    xp = namespace(epsilon, groups[0].count)
    scale, leans = contour.scale, contour.lean != 0
    powers = xp.arange(_NUM_PROBES, dtype=epsilon.dtype)[:, None] / (_NUM_PROBES - 1)
    ends = xp.exp(xp.log(contour.end) * powers)
    y = scale * xp.concatenate([xp.zeros_like(ends[:1]), ends])
    z, speed = contour_points(contour, y)
    power, _ = log_powers(z, groups, checked=False)
    difference, size = without_bulk(z, power, contour.bulk, log_atoms(groups))
    size = size + log_size(difference)
    # Phases may agree again between probes.
    size = where_needed(
        y < realign, size, lambda: xp.logaddexp(size, log_realigned(z, groups))
    )
    size = size + log_size(speed) - z[0] * epsilon + xp.log(xp.maximum(y, scale))
    above = size[1:] - size[0] + xp.where(leans, fall, _VERTICAL_FALL)
    last = xp.where(above > 0, xp.arange(_NUM_PROBES)[:, None], 0).max(axis=0)
    sides = xp.array([last, xp.minimum(last + 1, _NUM_PROBES - 1)])
    before, behind = rows_at(above, sides)
    share = before / (before - behind)
    # Along a vertical line it may rise again: there the whole interval counts.
    falls = leans & (share >= 0) & (share <= 1)
    share = xp.where(falls, share, 1.0)
    low, high = rows_at(ends, sides)
    reach = xp.exp(xp.log(low) + share * xp.log(high / low))
    reach = xp.maximum(reach, 3.0)
    # asinh(b sinh(u)) / b = reach
    v = contour.bend * reach
    near = xp.arcsinh(xp.sinh(xp.minimum(v, 20.0)) / contour.bend)
    return xp.where(v > 20, v - xp.log(contour.bend), near)


def _crossing(
    epsilon: Array, bulk: Array, groups: tuple[Steps, ...]
) -> tuple[Array, ...]:
    """Center and bulk; log of the integrand, slope and curvature there; (n,) each."""
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
    c = xp.minimum(plain * _CROSSINGS[:, None], xp.maximum(largest, plain))
    moments = real_moments(c, groups)
    nothing = xp.zeros_like(bulk)
    whole = transform(plain, nothing, groups, tuple(part[0] for part in moments))
    left = transform(c, bulk, groups, moments)
    size = xp.where(left.valid, left.log_value - c * epsilon, xp.inf)
    found = xp.array([size, c, left.slope, left.curvature])
    size, *found = rows_at(found, size.argmin(axis=0)[None])[:, 0]
    gained = size < whole.log_value - plain * epsilon - _LEAST_GAIN
    pairs = zip(found, (plain, whole.slope, whole.curvature), strict=True)
    center, slope_there, curvature = (xp.where(gained, a, b) for a, b in pairs)
    size = xp.where(gained, size, whole.log_value - plain * epsilon)
    return center, xp.where(gained, bulk, 0.0), size, slope_there, curvature


class Transform(NamedTuple):
    """``F(c) = (M(c)^T - bulk) / (c (1 + c))`` at real c; arrays of the shape of c."""

    log_value: Array  # log F
    slope: Array  # (log F)', the epsilon whose saddle point is c
    curvature: Array  # (log F)'', > 0
    valid: Array  # whether the difference is above rounding errors


def transform(
    c: Array,
    bulk: Array,
    groups: tuple[Steps, ...],
    moments: tuple[Array, ...],
) -> Transform:
    """F and its derivatives at real c, (..., n), by `real_moments` there."""
    # With the bulk B and share = B / M^T, (M^T - B)' / (M^T - B) = ((log M^T)' - share
    # (log B)') / (1 - share).
    xp = namespace(c, bulk, groups[0].count)
    log_power, mean, curvature = moments
    log_bulk_, _ = log_bulk((c, xp.zeros_like(c)), bulk, log_atoms(groups))
    inverse = 1 / c**2 + 1 / (1 + c) ** 2
    log_share = xp.minimum(log_bulk_ - log_power, 0.0)
    left = xp.where(bulk > 0, -xp.expm1(log_share), 1.0)
    steps = sum(group.count.sum(axis=0) for group in groups)
    valid = left > _LEAST_DIFFERENCE + _LEAST_DIFFERENCE_PER_STEP * steps
    left = xp.where(valid, left, 1.0)
    share = xp.where(bulk > 0, xp.exp(log_share), 0.0)
    bulk_mean = bulk * (c + 0.5)
    slope = (mean - share * bulk_mean) / left
    second = (curvature + mean**2 - share * (bulk + bulk_mean**2)) / left
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
        limit = (_TRUNCATED - log_mass) / xp.where(loss > 0, loss, 1.0)
        limit = xp.where((loss > 0) & (count > 0), limit, xp.inf)
        limit = limit.min(axis=0).reshape(steps.count.shape)
        highest = xp.minimum(highest, limit.min(axis=0))
    return highest


def contour_points(contour: Contour, y: Array) -> tuple[Pair, Pair]:
    """Points z with imaginary parts y, and ``dz / dy / (i pi z (1 + z))``."""
    xp = namespace(contour.center, y)
    root = xp.sqrt(contour.scale**2 + y * y)
    # sqrt(scale² + y²) - scale without cancellation
    z = (contour.center + contour.lean * y * (y / (root + contour.scale)), y)
    direction = (xp.full_like(y, 1 / math.pi), -contour.lean / math.pi * y / root)
    return z, divided(divided(direction, z), (1 + z[0], z[1]))

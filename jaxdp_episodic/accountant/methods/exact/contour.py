"""The contour of the "exact" method: a hyperbola through the saddle point.

Pure kernels. Reference: docs/theory.md, "Exact".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.gaussian import (
    SMALLEST,
    inner_exponent,
    near_gaussian_profile,
)
from jaxdp_episodic.accountant.methods.exact.mgf import (
    Bulk,
    Pair,
    Steps,
    bulk_of,
    checked_moment,
    exchanged_moments,
    first_realignment,
    log_bulk,
    log_powers,
    log_realigned,
    may_realign,
    real_moments,
    without_bulk,
)
from jaxdp_episodic.accountant.methods.rdp import (
    epsilon_at,
    first_order,
    log_delta_at,
)
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.complex_exponentials import divided, log_size
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    at,
    logsumexp,
    namespace,
    rows_at,
    where_needed,
)
from jaxdp_episodic.accountant.numerics.roots import log_crossing

# Lean of the contour (slope of its asymptote, dx / dy) relative to the largest at which
# the terms of the nodes decay. At 1 a Gaussian's would not.
_LEAN_SHARE = 0.7
# The same for the nodes of the checking rule.
_CHECK_LEAN_SHARE = 0.9
# Largest lean.
_LARGEST_LEAN = 0.6
# Leans tried, relative to the largest one, if parts of the losses lie far apart.
_STEEPER = 0.5 ** np.arange(5.0)
# Log of the largest contribution of the truncated losses on the contour: M^T may be 1,
# of which 1e-6 may be left without the bulk.
_TRUNCATED = -40.0
# Nats by which the integrand falls along the contour.
FALL = 42.0
# Nats by which it falls along a vertical line.
_VERTICAL_FALL = 26.0
# Least end of a vertical line in units of the scale. Nodes there are equally spaced,
# and phases of atoms agree again where y is a few times 1 / loss.
_VERTICAL_END = 300.0
# Number of points at which the end is searched for.
_NUM_PROBES = 16
# Search for the saddle point: points in a bracket, in the logarithm.
_SADDLE_POINTS = 6
# Search for the saddle point: number of rounds, each of which leaves a fifth.
_SADDLE_REFINEMENTS = 3
# Crossings of the real axis tried if the bulk is subtracted, relative to the saddle
# point of the whole integrand.
_CROSSINGS = 1.6 ** np.arange(8.0)
# The bulk is subtracted if that makes the integrand smaller by so many nats.
_LEAST_GAIN = 1.0
# Least relative difference of M^T and the bulk that is above rounding errors.
_LEAST_DIFFERENCE = 1e-6
# The same for each step, added.
_LEAST_DIFFERENCE_PER_STEP = 1e-11
# Radians by which the integrand's phase may change in a unit of u.
_PHASE = 6.0


class Contour(NamedTuple):
    """Parameters of the contour of each setting; (n,) arrays."""

    center: Array  # where it crosses the real axis
    scale: Array  # distance along which it turns from vertical to its asymptote
    lean: Array  # slope of the asymptote, dx / dy; < 0 to the left
    bend: Array  # of y(u) = scale asinh(bend sinh(u)) / bend; at most 1
    end: Array  # largest u
    bulk: Bulk  # what is subtracted; its variance is 0 if nothing is


def lay_contour(
    epsilon: Array,
    groups: tuple[Steps, ...],
    fall: Array | float = FALL,
    bulk: Bulk | None = None,
) -> Contour:
    """The contour for delta at ``epsilon``, (n,); ``fall`` is in nats."""
    xp = namespace(epsilon, groups[0].count)
    taken: Bulk = bulk_of(groups) if bulk is None else bulk
    center, variance, size, slope, curvature = _crossing(epsilon, taken, groups)
    # Away from the saddle point the phase changes at this rate, and must not alias.
    rate = xp.abs(epsilon - slope) / _PHASE
    scale = 1 / xp.maximum(xp.sqrt(curvature), rate)
    location, width, right, lean = _asymptote(epsilon, groups)
    realign = first_realignment(groups)
    alone = ~xp.isfinite(realign)
    distance = xp.maximum(xp.abs(epsilon - location), 1e-12)
    # The furthest end, in units of the scale. The rate of decay is epsilon's distance
    # from the bulk loss, or if epsilon is far below that, perhaps epsilon at first.
    least = xp.clip(epsilon, 0.05 * distance, distance)

    def reach(lean: Array) -> Array:
        return xp.clip(45.0 / xp.maximum(lean * least * scale, 1e-200), 12.0, 1e12)

    def steep() -> Array:
        """The largest lean with which the end is negligible where phases realign."""
        leans = lean * _STEEPER[:, None]
        y = scale * reach(leans)
        leaning = Contour(
            center, scale, xp.where(right, leans, -leans), scale, scale, taken
        )
        z, _ = contour_points(leaning, y)
        left = log_realigned(z, groups) - z[0] * epsilon
        left = xp.maximum(left - size - xp.log(scale) + fall, 0.0)
        return rows_at(leans, left.argmin(axis=0)[None])[0]

    if may_realign(groups):
        lean = where_needed(alone | (lean <= 0), lean, steep)
    bend = xp.clip(scale * (distance + width) / _PHASE, 1e-9, 1.0)
    bend = xp.where(lean > 0, bend, 1.0)
    furthest = xp.where(
        lean > 0, reach(lean), xp.maximum(_VERTICAL_END, 1.1 * realign / scale)
    )
    lean_signed = xp.where(right, lean, -lean)
    taken = taken._replace(variance=variance)
    contour = Contour(center, scale, lean_signed, bend, furthest, taken)
    return contour._replace(end=_end(epsilon, contour, realign, fall, groups))


def _asymptote(epsilon: Array, groups: tuple[Steps, ...]) -> tuple[Array, ...]:
    """Sum of bulk losses, sum of their widths, whether epsilon is above, lean."""
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
    difference, size = without_bulk(z, power, contour.bulk)
    size = size + log_size(difference)
    if may_realign(groups):  # it may also rise between the probes
        beside, alone = size, y < realign
        size = where_needed(
            alone, size, lambda: xp.logaddexp(beside, log_realigned(z, groups))
        )
    size = size + log_size(speed) - z[0] * epsilon + xp.log(xp.maximum(y, scale))
    above = size[1:] - size[0] + xp.where(leans, fall, _VERTICAL_FALL)
    last = xp.where(above > 0, xp.arange(_NUM_PROBES)[:, None], 0).max(axis=0)
    sides = xp.array([last, xp.minimum(last + 1, _NUM_PROBES - 1)])
    before, behind = rows_at(above, sides)
    share = before / (before - behind)
    # Along a vertical line it may rise again, so the whole interval is kept.
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
    epsilon: Array, bulk: Bulk, groups: tuple[Steps, ...]
) -> tuple[Array, ...]:
    """Center, the bulk's variance; the integrand's log, slope and curvature there."""
    xp = namespace(epsilon, groups[0].count)
    largest = largest_center(epsilon, groups)

    def fall(c: Array) -> Array:
        """Minus the slope of the integrand's logarithm."""
        _, mean, _ = real_moments(c, groups)
        return -(mean - epsilon - 1 / c - 1 / (1 + c))

    plain = log_crossing(
        fall,
        xp.full_like(largest, 1e-8),
        xp.maximum(largest, 1e-8),
        num_points=_SADDLE_POINTS,
        num_refinements=_SADDLE_REFINEMENTS,
    )
    c = xp.minimum(plain * _CROSSINGS[:, None], xp.maximum(largest, plain))
    moments = real_moments(c, groups)
    found = transform(c, bulk, groups, moments)
    left, whole = at(found, 0), at(at(found, 1), 0)
    size = xp.where(left.valid, left.log_value - c * epsilon, xp.inf)
    found = xp.array([size, c, left.slope, left.curvature])
    size, *found = rows_at(found, size.argmin(axis=0)[None])[:, 0]
    gained = size < whole.log_value - plain * epsilon - _LEAST_GAIN
    pairs = zip(found, (plain, whole.slope, whole.curvature), strict=True)
    center, slope_there, curvature = (xp.where(gained, a, b) for a, b in pairs)
    size = xp.where(gained, size, whole.log_value - plain * epsilon)
    return center, xp.where(gained, bulk.variance, 0.0), size, slope_there, curvature


class Transform(NamedTuple):
    """``F(c) = (M(c)^T - bulk) / (c (1 + c))`` at real c; arrays (2, K, n)."""

    log_value: Array  # log F
    slope: Array  # (log F)', the epsilon whose saddle point is c
    curvature: Array  # (log F)'', > 0
    valid: Array  # whether M^T - bulk is above rounding errors


def transform(
    c: Array,
    bulk: Bulk,
    groups: tuple[Steps, ...],
    moments: tuple[Array, ...],
) -> Transform:
    """F with and without the bulk, at real c, (K, n), given `real_moments` there."""
    # With the bulk B and share = B / M^T, (M^T - B)' / (M^T - B) = ((log M^T)' - share
    # (log B)') / (1 - share).
    xp, variance = namespace(c, groups[0].count), bulk.variance
    variance = xp.array([variance, xp.zeros_like(variance)])[:, None]
    log_power, mean, curvature = moments
    log_bulk_, _ = log_bulk((c, xp.zeros_like(c)), bulk._replace(variance=variance))
    inverse = 1 / c**2 + 1 / (1 + c) ** 2
    log_share = xp.minimum(log_bulk_ - log_power, 0.0)
    left = xp.where(variance > 0, -xp.expm1(log_share), 1.0)
    steps = sum(group.count.sum(axis=0) for group in groups)
    valid = left > _LEAST_DIFFERENCE + _LEAST_DIFFERENCE_PER_STEP * steps
    left = xp.where(valid, left, 1.0)
    share = xp.where(variance > 0, xp.exp(log_share), 0.0)
    bulk_mean = variance * (c + 0.5)
    slope = (mean - share * bulk_mean) / left
    second = (curvature + mean**2 - share * (variance + bulk_mean**2)) / left
    return Transform(
        log_power + xp.log(left) - xp.log(c) - xp.log1p(c),
        slope - 1 / c - 1 / (1 + c),
        xp.maximum(second - slope**2, 0.0) + inverse,
        valid,
    )


def largest_center(like: Array, groups: tuple[Steps, ...]) -> Array:
    """The largest real c at which truncated losses are negligible; (n,)."""
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


# Orders minus 1 that are tried, relative to the approximate best order minus 1. In 400
# random settings the approximation was 0.4 to 40 times the best one.
_ORDERS_TRIED = 1.75 ** np.arange(-8.0, 5.0)
# Least approximate order minus 1.
_LEAST_ORDER = 1e-12
# Largest approximate order minus 1.
_LARGEST_ORDER = 1e12
# Orders minus 1 at which the backward direction is bounded, relative to the forward
# direction's best. The best one is far above if only forward has rare large losses.
ORDER_FACTORS = np.array([1.0, 1.6, 4.0, 16.0, 64.0])[:, None]
# Smallest epsilon that is searched for, relative to the Rényi bound.
_SMALLEST = 1e-4
# Number of settings up to which one round of many points is faster on NumPy than
# several rounds of few points.
_FEW = 4
_POINTS = 5  # in a round
_ROUNDS = 3  # of so many points
_MANY_POINTS = 101  # in one round
# Stands for log(0) where -inf would make NaN.
_LOG_ZERO = -1e300


def order_near(log_delta: Array, guess: Array) -> Array:
    """The best order of Gaussian steps with the epsilon ``guess`` at that delta."""
    # Their epsilon is mu²/2 + mu sqrt(2 l) at order 1 + sqrt(2 l) / mu, l = -log delta.
    xp = namespace(log_delta, guess)
    root, guess = xp.sqrt(-log_delta), xp.maximum(guess, 1e-300)
    # sqrt(l + epsilon) - sqrt(l), without cancellation
    return 1 + root * (xp.sqrt(root * root + guess) + root) / guess


class First(NamedTuple):
    """A first epsilon, before there is a contour; (n,) arrays."""

    epsilon: Array  # an approximation, no bound
    highest: Array  # the Rényi bound of this direction, at ``order``
    order: Array  # the best of the orders tried


def first_epsilon(
    log_delta: Array,
    highest: Array,
    fields: tuple[Group, ...],
    groups: tuple[Steps, ...],
    bulk: Bulk | None = None,
) -> First:
    """An approximation of epsilon at the given delta, below ``highest``; (n,)."""
    # By the saddle-point approximation of delta. If that fails, because rare large
    # losses are far from the others, by the sum of the deltas of both parts.
    xp = namespace(log_delta, highest, fields[0].count, groups[0].count)
    bulk = bulk_of(groups) if bulk is None else bulk
    guess = xp.exp(first_order(fields, -log_delta))
    guess = xp.clip(guess, _LEAST_ORDER, _LARGEST_ORDER)
    c = xp.minimum(guess * _ORDERS_TRIED[:, None], largest_center(log_delta, groups))
    moments = real_moments(c, groups)
    bounds = epsilon_at(log_delta, c, moments[0])
    best = xp.where(xp.isnan(bounds), xp.inf, bounds).argmin(axis=0)[None]
    order, found = 1 + rows_at(c, best)[0], rows_at(moments[0], best)
    # This bound may become the answer, so it includes the quadrature error.
    bound = epsilon_at(
        log_delta, order - 1, checked_moment(order[None] - 1, found, groups)[0]
    )
    bound = xp.where(bound >= 0, bound, xp.where(bound < 0, 0.0, xp.inf))
    highest = xp.minimum(highest, bound)
    near = _by_saddle_points(log_delta, c, moments, bulk, groups)
    near = where_needed(
        (near > 0) & (near < highest),
        near,
        _by_jumps,
        (log_delta, highest, bulk.variance, fields),
    )
    return First(near, highest, order)


def exchanged_is_less(
    log_delta: Array, epsilon: Array, order: Array, steps: Steps
) -> Array:
    """Where a Rényi bound says that the exchanged pair of one step has less delta."""
    xp = namespace(log_delta, epsilon, order, steps.count)
    c = (order - 1) * ORDER_FACTORS
    bounds = log_delta_at(xp.maximum(epsilon, 0.0), c, exchanged_moments(c, steps))
    return xp.any(bounds < log_delta, axis=0)


def _by_jumps(
    log_delta: Array, highest: Array, variance: Array, fields: tuple[Group, ...]
) -> Array:
    """Epsilon at which the bulk's delta plus the steps' forward deltas is delta."""
    # Those of sampled Gaussians with similar losses.
    xp = namespace(log_delta, highest, variance, fields[0].count)
    mu = xp.sqrt(xp.maximum(variance, 0.0))
    rows = [(mu, xp.ones_like(mu), xp.where(mu > 0, 0.0, _LOG_ZERO))]
    for group in fields:
        hints, one = group.loss.hints(), xp.ones_like(group.count)
        often = group.count * group.loss.outer_rate * hints.rate
        odds = xp.maximum(hints.odds * one, SMALLEST)
        row = hints.shift * one, odds, xp.log(xp.maximum(often, 1e-300))
        rows += [at(row, k) for k in range(len(one))]
    shift, odds, often = (xp.array(row)[:, None] for row in zip(*rows, strict=True))

    def excess(epsilon: Array) -> Array:
        """log(delta) at (G, n) epsilons, minus the goal."""
        every = often + near_gaussian_profile(shift, inner_exponent(epsilon, odds))
        return logsumexp(xp.maximum(every, _LOG_ZERO)) - log_delta

    low, points, rounds = _SMALLEST * highest, _POINTS, _ROUNDS
    if xp is np and np.size(highest) <= _FEW:
        points, rounds = _MANY_POINTS, 1
    return log_crossing(excess, low, highest, num_points=points, num_refinements=rounds)


def _by_saddle_points(
    log_delta: Array,
    c: Array,
    moments: tuple[Array, ...],
    bulk: Bulk,
    groups: tuple[Steps, ...],
) -> Array:
    """Epsilon at which the saddle-point approximation equals delta; NaN if none."""
    xp, variance = namespace(log_delta, c, groups[0].count), bulk.variance
    both = transform(c, bulk, groups, moments)
    valid = both.valid[0]
    found = Transform(*(xp.where(valid, part[0], part[1]) for part in both))
    x = found.slope
    used = valid & (variance > 0)
    mu = xp.sqrt(xp.where(variance > 0, variance, 1.0))
    known = xp.where(used, near_gaussian_profile(mu, xp.maximum(x, 0.0)), _LOG_ZERO)
    approximate = found.log_value - c * x
    approximate = approximate - 0.5 * xp.log(2 * math.pi * found.curvature)
    approximate = xp.logaddexp(approximate, known)
    # delta falls with c: the last point above it, and the next one
    above = (approximate >= log_delta) & (x > 0)
    index = xp.arange(c.shape[0])[:, None]
    last = xp.where(above, index, -1).max(axis=0)
    ends = xp.array([last, xp.minimum(last + 1, c.shape[0] - 1)])
    ends = xp.maximum(ends, 0)
    (x, end), (value, other), (low, high) = (
        rows_at(a, ends) for a in (x, approximate, c)
    )
    # The slope of log(delta) is about -c, and c linear in between.
    drop = (value - log_delta) / (value - other)
    rise = (high + low) * drop
    share = rise / (low + xp.sqrt(low * low + (high - low) * rise))
    crossed = (last >= 0) & (drop >= 0) & (drop <= 1)
    return xp.where(crossed, x + share * (end - x), xp.nan)

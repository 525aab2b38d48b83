"""Exact delta and epsilon of composed steps, by a contour integral.

The contour is a hyperbola through the saddle point. Pure kernels. Reference:
docs/theory.md, "Exact"; Alghamdi et al. (2022), arXiv:2208.09595.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.gaussian import gaussian_tails
from jaxdp_episodic.accountant.methods.exact import mgf
from jaxdp_episodic.accountant.methods.exact.mgf import LOG_ZERO, Bulk, Steps
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    at,
    fori_loop,
    rows_at,
    rows_of,
    stored,
    while_loop,
)
from jaxdp_episodic.accountant.numerics.special import (
    Pair,
    log_normal_density,
    polar,
    times,
)

# Largest lean.
_LARGEST_LEAN = 0.6
# Nats by which the integrand falls along the contour.
FALL = 42.0
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
    xp: Any,
    epsilon: Array,
    groups: tuple[Steps, ...],
    fall: Array | float,
    bulk: Bulk,
    largest: Array,
) -> Contour:
    """The contour for delta at ``epsilon``, (n,); ``fall`` is in nats.

    ``largest`` is the largest real c at which truncated losses are negligible.
    """

    def falling(c: Array) -> Array:
        """Minus the slope of the integrand's logarithm."""
        _, mean, _ = mgf.real_moments(xp, c, groups)
        return -(mean - epsilon - 1 / c - 1 / (1 + c))

    # The saddle point of the whole integrand; or where the integrand is smaller without
    # the bulk.
    plain = log_crossing(
        xp,
        falling,
        xp.full_like(largest, 1e-8),
        xp.maximum(largest, 1e-8),
        num_points=_SADDLE_POINTS,
        num_refinements=_SADDLE_REFINEMENTS,
    )
    c = xp.minimum(plain * _CROSSINGS[:, None], xp.maximum(largest, plain))
    found, valid = transform(xp, c, bulk, groups, mgf.real_moments(xp, c, groups))
    log_value, *slopes = found[:, 0]
    size = xp.where(valid, log_value - c * epsilon, xp.inf)
    least = rows_at(xp.array([size, c, *slopes]), size.argmin(axis=0)[None])[:, 0]
    log_value, *slopes = found[:, 1, 0]
    whole = xp.array([log_value - plain * epsilon, plain, *slopes])
    gained = least[0] < whole[0] - _LEAST_GAIN
    size, center, slope, curvature = xp.where(gained, least, whole)
    # Away from the saddle point the phase changes at this rate, and must not alias.
    rate = xp.abs(epsilon - slope) / _PHASE
    scale = 1 / xp.maximum(xp.sqrt(curvature), rate)
    taken = bulk._replace(variance=xp.where(gained, bulk.variance, 0.0))
    vertical = Contour(center, scale, xp.zeros_like(scale), scale, scale, taken)
    return _bent(xp, epsilon, vertical, fall, groups)


def _bent(
    xp: Any,
    epsilon: Array,
    vertical: Contour,
    fall: Array | float,
    groups: tuple[Steps, ...],
) -> Contour:
    """The contour with its lean, its bend and its end."""
    scale = vertical.scale
    location, width, steepest = 0.0, 0.0, xp.inf
    for steps in groups:
        location += steps.location
        width += steps.width
        steepest = xp.minimum(steepest, steps.steepest)
    right = epsilon >= location
    lean = xp.clip(xp.where(right, *steepest), 0.0, _LARGEST_LEAN)
    distance = xp.maximum(xp.abs(epsilon - location), 1e-12)
    # The rate of decay is epsilon's distance from the bulk losses, or if epsilon is far
    # below that, perhaps epsilon at first.
    least = xp.clip(epsilon, 0.05 * distance, distance)
    bend = xp.clip(scale * (distance + width) / _PHASE, 1e-9, 1.0)
    contour = vertical._replace(lean=xp.where(right, lean, -lean), bend=bend)
    # The end is where the integrand has fallen, at most at the last y, in the scale.
    reach = xp.clip(45.0 / xp.maximum(lean * least * scale, 1e-200), 12.0, 1e12)
    powers = xp.arange(_NUM_PROBES, dtype=epsilon.dtype)[:, None] / (_NUM_PROBES - 1)
    ends = xp.exp(xp.log(reach) * powers)
    y = scale * xp.concatenate([xp.zeros_like(ends[:1]), ends])
    z, speed = contour_points(xp, contour, y)
    power, _ = mgf.log_powers(xp, z, groups, checked=False)
    difference, size = mgf.without_bulk(xp, z, power, contour.bulk)
    for re, im in (difference, speed):
        size = size + 0.5 * xp.log(re * re + im * im)
    size = size - z[0] * epsilon + xp.log(xp.maximum(y, scale))
    above = size[1:] - size[0] + fall
    last = xp.where(above > 0, xp.arange(_NUM_PROBES)[:, None], 0).max(axis=0)
    sides = xp.array([last, xp.minimum(last + 1, _NUM_PROBES - 1)])
    (before, behind), (low, high) = rows_at(xp.array([above, ends]), sides)
    share = before / (before - behind)
    share = xp.where((share >= 0) & (share <= 1), share, 1.0)
    reach = xp.exp(xp.log(low) + share * xp.log(high / low))
    # asinh(b sinh(u)) / b = reach
    v = bend * xp.maximum(reach, 3.0)
    near = xp.arcsinh(xp.sinh(xp.minimum(v, 20.0)) / bend)
    return contour._replace(end=xp.where(v > 20, v - xp.log(bend), near))


def transform(
    xp: Any, c: Array, bulk: Bulk, groups: tuple[Steps, ...], moments: Array
) -> tuple[Array, Array]:
    """``F(c) = (M(c)^T - bulk) / (c (1 + c))`` at real c, given `real_moments` there.

    Returns log F and its first two derivatives, with and without the bulk, (3, 2, K,
    n); and whether M^T - bulk is above rounding errors, (K, n). The first derivative is
    the epsilon whose saddle point is c; the second is > 0.
    """
    # With the bulk B and share = B / M^T, (M^T - B)' / (M^T - B) = ((log M^T)' - share
    # (log B)') / (1 - share).
    variance = xp.array([bulk.variance, xp.zeros_like(bulk.variance)])[:, None]
    log_power, mean, curvature = moments
    log_bulk = 0.5 * variance * (c * (1 + c)) + bulk.log_mass
    inverse = 1 / c**2 + 1 / (1 + c) ** 2
    log_share = xp.minimum(log_bulk - log_power, 0.0)
    left = xp.where(variance > 0, -xp.expm1(log_share), 1.0)
    steps = 0.0
    for group in groups:
        steps = steps + group.count.sum(axis=0)
    valid = left > _LEAST_DIFFERENCE + _LEAST_DIFFERENCE_PER_STEP * steps
    left = xp.where(valid, left, 1.0)
    share = xp.where(variance > 0, xp.exp(log_share), 0.0)
    bulk_mean = variance * (c + 0.5)
    slope = (mean - share * bulk_mean) / left
    second = (curvature + mean**2 - share * (variance + bulk_mean**2)) / left
    values = log_power + xp.log(left) - xp.log(c) - xp.log1p(c)
    curvature = xp.maximum(second - slope**2, 0.0) + inverse
    return xp.array([values, slope - 1 / c - 1 / (1 + c), curvature]), valid[0]


def contour_points(xp: Any, contour: Contour, y: Array) -> tuple[Pair, Pair]:
    """Points z with imaginary parts y, and ``dz / dy / (i pi z (1 + z))``."""
    root = xp.sqrt(contour.scale**2 + y * y)
    # sqrt(scale² + y²) - scale without cancellation
    z = (contour.center + contour.lean * y * (y / (root + contour.scale)), y)
    direction = (xp.full_like(y, 1 / math.pi), -contour.lean / math.pi * y / root)
    for real, imaginary in (z, (1 + z[0], y)):  # divided by both
        square = real * real + imaginary * imaginary
        re, im = times(direction, (real, -imaginary))
        direction = re / square, im / square
    return z, direction


def log_crossing(
    xp: Any,
    function: Callable[[Array], Array],
    low: Array,
    high: Array,
    *,
    num_points: int,
    num_refinements: int,
) -> Array:
    """Approximate root of a decreasing function, on a logarithmic scale."""
    low, high = xp.log(low), xp.log(high)
    share = np.linspace(0.0, 1.0, num_points)[:, None]
    index = np.arange(num_points)[:, None]
    bracket = xp.array([low, high])

    def narrow(i: Any, state: Array) -> Array:
        bracket, values = state
        x = bracket[0] + share * (bracket[1] - bracket[0])
        if xp is np and i:  # the values at the ends are known
            value = function(xp.exp(x[1:-1]))
            value = xp.concatenate([values[:1], value, values[1:]])
        else:
            value = function(xp.exp(x))
        last = xp.where(value > 0, index, 0).max(axis=0)
        ends = xp.array([last, xp.minimum(last + 1, num_points - 1)])
        return rows_at(xp.array([x, value]), ends)

    state = xp.array([bracket, bracket])
    if xp is np:
        for i in range(num_refinements):
            state = narrow(i, state)
    else:
        state = fori_loop(xp, 0, num_refinements, narrow, state)
    (x, end), (value, other) = state
    drop = value - other
    inside = (value > 0) & (drop > 0) & (drop < xp.inf)
    part = xp.where(inside, value / xp.where(inside, drop, 1.0), 0.0)
    return xp.exp(x + xp.clip(part, 0.0, 1.0) * (end - x))


# --- The integral along the contour ---

# Largest number of evaluations in the search for epsilon.
_MOST_STEPS = 25
# The search ends at this share of the error of log(delta), to which it is added.
_TOLERANCE_SHARE = 0.01
# Least error of log(delta), in nats, that the search may leave.
_SMALLEST_TOLERANCE = 1e-12
# Largest error of log(delta), in nats, that the search may leave.
_LARGEST_TOLERANCE = 1e-4
# Frequencies at which the summands are transformed, relative to their Nyquist frequency
# pi / h. The decay from the first one to the others is extrapolated to the frequency of
# the error; see `_aliasing`.
_FREQUENCIES = np.array([0.7, 0.92, 0.96, 1.0])
# Power of that decay in the estimate; the decay goes on four times as far.
_DECAY_POWER = 0.8
# Factor for aliases of all multiples if there is no decay. With 3, one of 6,000 random
# settings was off by 1.3 times its estimate, with the fewest nodes.
_ALIASES = 4.0
# Rounding of a phase, relative to its size.
_ROUNDING = 4e-16


class Solution(NamedTuple):
    """Answers of a batch; each (n,)."""

    value: Array  # epsilon, or log(delta)
    log_error: Array  # estimate of the error of log(delta), in nats
    slope: Array  # ``-d log(delta) / d epsilon``, > 0


class Blocks(NamedTuple):
    """The nodes of a contour, in blocks."""

    number: Array | int  # of blocks; may be traced: one program for any number of nodes
    size: int  # nodes in a block
    most: int  # number of blocks that there is memory for


def search(
    xp: Any,
    log_delta: Array,
    initial: Array,
    highest: Array,
    contour: Contour,
    groups: tuple[Steps, ...],
    blocks: Blocks,
    is_held: Array | bool,
) -> Solution:
    """Epsilon at which delta is ``e^{log_delta}``; all arrays (n,).

    Where ``is_held``, log(delta) at ``initial`` instead.
    """
    # Halley's method on log delta in a bracket from 0 to highest, on one contour.
    last = xp.asarray(blocks.number * blocks.size - 1)
    spacing = contour.end / last.astype(contour.end.dtype)
    summands = functools.partial(_summands, xp, contour, groups, spacing, blocks.size)
    integrand = _Integrand(
        rows_of(xp, summands, blocks.number, blocks.most),
        contour.bulk,
        xp.maximum(1 / spacing, 1.0),
    )

    def improve(state: _Search) -> _Search:
        x, low, high = state.x, state.low, state.high
        value, slope, curvature, error = _integrate(xp, integrand, blocks, x)
        gap = value - log_delta
        above = gap > 0
        low, high = xp.where(above, x, low), xp.where(above, high, x)
        # Halley's step: Newton's, corrected by the change of the slope.
        correction = 0.5 * curvature * gap / slope**2
        step = x + gap / slope / (1 - correction).clip(0.5, 2.0)
        inside = (step >= low) & (step <= high)
        step = xp.where(inside, step, 0.5 * (low + high))
        # 0 is tried if the bracket closes on it: delta may be less there already.
        step = xp.where((low == 0) & (step < 1e-6 * initial), 0.0, step)
        low_enough = (x <= 0) & (gap < 0)
        tolerance = _TOLERANCE_SHARE * error
        tolerance = tolerance.clip(_SMALLEST_TOLERANCE, _LARGEST_TOLERANCE)
        # After the step the gap is smaller by the correction of Newton's step, or by an
        # error of third order.
        share = xp.minimum(xp.abs(correction) + gap * gap, 1.0)
        last = inside & (step > 0) & (share * xp.abs(gap) <= tolerance)
        left = xp.abs(gap) * xp.where(last, share, 1.0)
        found = low_enough | (left <= tolerance) | is_held
        # A gap that is left is added to the error, except at epsilon 0, where delta may
        # be less than its goal.
        missed = xp.where(low_enough & (error < -gap), 0.0, error)
        missed = missed + xp.where(low_enough, 0.0, left)
        return _Search(
            state.count + 1,
            (state.count + 1 < _MOST_STEPS) & ~xp.all(found),
            xp.where(found, x, step),
            low,
            high,
            Solution(
                xp.where(is_held, value, xp.where(last, step, x)),
                xp.where(is_held, error, missed),
                slope,
            ),
        )

    nothing = xp.zeros_like(initial)
    start = _Search(
        xp.zeros((), xp.int32),
        ~xp.any(nothing),  # True, but typed within shard_map like what is found
        initial,
        nothing,
        highest,
        Solution(initial, nothing, nothing),
    )
    found = while_loop(xp, lambda state: state.is_unfinished, improve, start)
    return found.solution


class _Search(NamedTuple):
    """State of the search for epsilon; arrays are (n,)."""

    count: Array  # number of evaluations
    is_unfinished: Array  # whether any setting is
    x: Array  # the next epsilon to evaluate
    low: Array  # the bracket
    high: Array
    solution: Solution  # after the last evaluation


class _Integrand(NamedTuple):
    """What does not depend on epsilon; all but the rows are (n,)."""

    # Summands at the nodes, without ``e^{-z epsilon}``, (B, 7, K, n): real and
    # imaginary part of the node; log of the summand's modulus; real and imaginary part
    # of the summand over its modulus; the largest term of the difference from M^T, over
    # the difference; a bound of the rounding error, relative to that term.
    rows: Array
    bulk: Bulk
    # Sum of the truncated summands over the last one, if they decay as e^-u.
    density: Array


def _summands(
    xp: Any,
    contour: Contour,
    groups: tuple[Steps, ...],
    spacing: Array,
    size: int,
    block: Array,
) -> Array:
    """The rows of `_Integrand` at the ``size`` nodes of a block."""
    bulk, bend = contour.bulk, contour.bend
    k = block * size + xp.arange(size, dtype=np.int32)
    u = k.astype(spacing.dtype)[:, None] * spacing
    # y(u), and dy/du, which tends to scale / bend
    far = u > 300
    near = xp.arcsinh(bend * xp.sinh(xp.minimum(u, 300.0)))
    y = contour.scale / bend * xp.where(far, u + xp.log(bend), near)
    inverse = xp.exp(-u)
    cosh, sinh = 0.5 * (1 + inverse * inverse), 0.5 * (1 - inverse * inverse)
    speed = contour.scale * cosh / xp.sqrt(inverse * inverse + (bend * sinh) ** 2)
    y, speed = stored(xp, (y, speed))
    z, direction = stored(xp, contour_points(xp, contour, y))
    weight = speed * spacing * xp.where(u > 0, 1.0, 0.5)
    power, error = stored(xp, mgf.log_powers(xp, z, groups, checked=True))
    left, log_scale = stored(xp, mgf.without_bulk(xp, z, power, bulk))
    whole = times(left, (weight * direction[0], weight * direction[1]))
    part, length = xp.hypot(*left), xp.hypot(*whole)
    error = error + _ROUNDING * (0.5 * bulk.variance * (z[0] * z[0] + z[1] * z[1]))
    sign = whole[0] / length, whole[1] / length
    return xp.array([*z, log_scale + xp.log(length), *sign, 1 / part, error])


def _integrate(
    xp: Any, integrand: _Integrand, blocks: Blocks, epsilon: Array
) -> tuple[Array, ...]:
    """``log delta``, minus its slope, its second derivative, and the error."""
    # Of the bulk the logarithms of its delta D, of -D' and of D'' - D' are known.
    variance, log_mass = integrand.bulk.variance, integrand.bulk.log_mass
    log_known = xp.full((3, *epsilon.shape), LOG_ZERO)
    if xp is not np or np.any(variance > 0):
        mu = xp.sqrt(xp.where(variance > 0, variance, 1.0))
        profile, tail = gaussian_tails(mu, epsilon)
        density = log_normal_density(epsilon / mu - 0.5 * mu) - xp.log(mu)
        parts = xp.array([profile, tail, density]) + log_mass
        log_known = xp.where(variance > 0, parts, LOG_ZERO)
    waves = xp.asarray(_waves(blocks.size, blocks.most))

    def add(block: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds a block to the sums, which are over e^peak; the last summand's size."""
        x, y, log_size, cos, sin, lost, error = at(integrand.rows, block)
        before, log_size = state[0], log_size - x * epsilon
        peak = xp.maximum(before, log_size.max(axis=0))
        re, im = times((cos, sin), polar(log_size - peak, -y * epsilon))
        first = times((x, y), (re, im))
        second = x * first[0] - y * first[1]
        phase = xp.abs(y * epsilon) + xp.abs(x * epsilon)
        size = xp.exp(log_size - peak) * lost
        rounding = size * (error + _ROUNDING * (8 + phase))
        sums = re.sum(axis=0), first[0].sum(axis=0), second.sum(axis=0)
        parts = xp.array([*sums, rounding.sum(axis=0)])
        parts = xp.concatenate([parts, at(waves, block) @ re])
        sums = state[1] * xp.exp(before - peak) + parts
        return peak, sums, xp.hypot(re[-1], im[-1])

    zeros = xp.zeros((4 + len(_FREQUENCIES), *epsilon.shape), epsilon.dtype)
    start = log_known[0], zeros, zeros[0]
    peak, sums, last = fori_loop(xp, 0, blocks.number, add, start)
    known, known_slope, known_density = xp.exp(log_known - peak)
    total, slope = sums[0] + known, sums[1] + known_slope
    second = sums[2] + known_density - known_slope
    # The truncated sum is ``density`` times the last summand, with a margin of 10.
    truncation = 10.0 * last * integrand.density
    rounding = (sums[3] + _ROUNDING * known) / xp.abs(total)
    error = (_aliasing(xp, sums[4:]) + truncation) / xp.abs(total) + rounding
    good = total > 0
    total = xp.where(good, total, 1.0)
    value = xp.where(good, xp.log(total) + peak, xp.nan)
    slope = slope / total
    curvature = second / total - slope * slope
    # A delta above 1 has not converged, whatever its error seems to be.
    good = good & (value <= error)
    return value, slope, curvature, xp.where(good, error, xp.inf)


def _aliasing(xp: Any, transform: Array) -> Array:
    """Estimate of the trapezoidal rule's aliasing error, by the waves' sums, (4, n)."""
    # By Poisson's formula the error is the integrand's Fourier transform at 2 pi / h
    # and its multiples. The summands give the transform up to pi / h. It decays and
    # oscillates: it may vanish at one frequency by chance, but hardly at several.
    each = 2 * xp.abs(transform)
    low, high = each[0], each[1:].max(axis=0)
    decay = xp.minimum(high / xp.maximum(low, 1e-300), 1.0)
    return _ALIASES * high * decay**_DECAY_POWER


@functools.cache
def _waves(size: int, number: int) -> np.ndarray:
    """Cosines of the `_FREQUENCIES` at the summands, (number, 4, size)."""
    cycles = 0.5 * _FREQUENCIES[:, None, None] * np.arange(number * size)
    waves = np.cos(2 * math.pi * cycles).reshape(len(_FREQUENCIES), number, size)
    return np.ascontiguousarray(np.moveaxis(waves, 1, 0))

"""Exact delta and epsilon of composed steps, by a contour integral.

Pure kernels. Reference: docs/theory.md, "Exact"; Alghamdi et al. (2022),
arXiv:2208.09595.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.gaussian import gaussian_tails
from jaxdp_episodic.accountant.methods.exact.contour import (
    Contour,
    contour_points,
)
from jaxdp_episodic.accountant.methods.exact.mgf import (
    Bulk,
    Pair,
    Steps,
    first_realignment,
    log_powers,
    log_realigned,
    may_realign,
    without_bulk,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import polar, times
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    at,
    fori_loop,
    namespace,
    rows_of,
    stored,
    where_needed,
    while_loop,
)
from jaxdp_episodic.accountant.numerics.special import (
    log_normal_density,
)

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
# Stands for log(0) where -inf would make NaN.
_LOG_ZERO = -1e300


class Solution(NamedTuple):
    """Answers of a batch; each (n,)."""

    value: Array  # epsilon, or log(delta)
    log_error: Array  # estimate of the error of log(delta), in nats
    slope: Array  # ``-d log(delta) / d epsilon``, > 0
    # The part of the error due to rounding, irregular in the steps' parameters.
    rounding: Array | None = None


class Blocks(NamedTuple):
    """The nodes of a contour, in blocks."""

    number: Array | int  # of blocks; may be traced: one program for any number of nodes
    size: int  # nodes in a block
    most: int  # number of blocks that there is memory for


def search(
    log_delta: Array,
    initial: Array,
    highest: Array,
    contour: Contour,
    groups: tuple[Steps, ...],
    blocks: Blocks,
    is_held: Array | bool = False,
) -> Solution:
    """Epsilon at which delta is ``e^{log_delta}``; all arrays (n,).

    Where ``is_held``, log(delta) at ``initial`` instead.
    """
    # Halley's method on log delta in a bracket from 0 to highest, on one contour.
    xp = namespace(log_delta, initial, highest, contour.center, groups[0].count)
    integrand = _prepare(blocks, contour, groups)
    is_smooth = not any(steps.is_discrete for steps in groups)

    def improve(state: _Search) -> _Search:
        x, low, high = state.x, state.low, state.high
        value, slope, curvature, error, _ = _integrate(integrand, blocks, x)
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
        # error of third order; but atoms may change the slope abruptly.
        share = 1.0
        if is_smooth:
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
            xp.all(found),
            xp.where(found, x, step),
            low,
            high,
            Solution(
                xp.where(is_held, value, xp.where(last, step, x)),
                xp.where(is_held, error, missed),
                slope,
            ),
        )

    def unfinished(state: _Search) -> Array:
        return (state.count < _MOST_STEPS) & ~state.done

    nothing = xp.zeros_like(initial)
    start = _Search(
        xp.zeros((), xp.int32),
        xp.any(nothing),  # False, but typed within shard_map like what is found
        initial,
        nothing,
        highest,
        Solution(initial, nothing, nothing),
    )
    return while_loop(xp, unfinished, improve, start).solution


class _Search(NamedTuple):
    """State of the search for epsilon; arrays are (n,)."""

    count: Array  # number of evaluations
    done: Array  # whether all settings are
    x: Array  # the next epsilon to evaluate
    low: Array  # the bracket
    high: Array
    solution: Solution  # after the last evaluation


class _Rows(NamedTuple):
    """Summands at the nodes, without ``e^{-z epsilon}``; arrays and pairs (B, K, n)."""

    z: Pair  # nodes
    log_size: Array  # logarithms of the summands' moduli
    sign: Pair  # summands over their moduli
    lost: Array  # largest term of the difference from M^T, over the difference
    error: Array  # bound of the rounding error, relative to that term


class _Integrand(NamedTuple):
    """What does not depend on epsilon; all but the rows are (n,)."""

    rows: _Rows
    bulk: Bulk
    # Sum of the truncated summands over the last one, if they decay as e^-u, or as
    # 1 / u² on vertical lines.
    density: Array
    end: Array  # real part of the last node
    log_beyond: Array  # log of a bound of the truncated integral on vertical lines


def _prepare(blocks: Blocks, contour: Contour, groups: tuple[Steps, ...]) -> _Integrand:
    """Nodes of the trapezoidal rule, and M^T on them."""
    xp = namespace(contour.center, groups[0].count)
    last = xp.asarray(blocks.number * blocks.size - 1)
    step = contour.end / last.astype(contour.end.dtype)
    bulk = contour.bulk

    def rows(block: Array) -> _Rows:
        k = block * blocks.size + xp.arange(blocks.size, dtype=np.int32)
        u = k.astype(step.dtype)[:, None] * step
        y, speed = stored(xp, _height(contour, u))
        z, direction = stored(xp, contour_points(contour, y))
        weight = speed * step * xp.where(u > 0, 1.0, 0.5)
        power, error = stored(xp, log_powers(z, groups, checked=True))
        left, size = without_bulk(z, power, bulk)
        whole = times(left, (weight * direction[0], weight * direction[1]))
        part, length = xp.hypot(*left), xp.hypot(*whole)
        error = error + _ROUNDING * (0.5 * bulk.variance * (z[0] * z[0] + z[1] * z[1]))
        sign = whole[0] / length, whole[1] / length
        return _Rows(z, size + xp.log(length), sign, 1 / part, error)

    found = rows_of(xp, rows, blocks.number, blocks.most)
    vertical = contour.lean == 0
    density = xp.maximum(1 / step, 1.0) * xp.where(vertical, 1 + contour.end, 1.0)
    end = at(at(found.z, blocks.number - 1), -1)
    log_beyond = xp.full_like(bulk.variance, _LOG_ZERO)
    if may_realign(groups):
        # The largest integrand where phases agree again, times the integral of 1 / y².
        realign = first_realignment(groups)
        alone = ~xp.isfinite(realign)
        again = xp.maximum(end[1], xp.where(alone, end[1], realign))[None]
        z, _ = contour_points(contour, again)
        log_beyond = where_needed(
            alone,
            log_beyond,
            lambda: log_realigned(z, groups)[0] - xp.log(math.pi * again[0]),
        )
    return _Integrand(found, bulk, density, end[0], log_beyond)


def _height(contour: Contour, u: Array) -> tuple[Array, Array]:
    """The imaginary part y at u, and ``dy/du``, which tends to scale / bend."""
    xp, b = namespace(contour.center, u), contour.bend
    near = xp.arcsinh(b * xp.sinh(xp.minimum(u, 300.0)))
    y = contour.scale / b * xp.where(u > 300, u + xp.log(b), near)
    inverse = xp.exp(-u)
    cosh, sinh = 0.5 * (1 + inverse * inverse), 0.5 * (1 - inverse * inverse)
    return y, contour.scale * cosh / xp.sqrt(inverse * inverse + (b * sinh) ** 2)


def _integrate(
    integrand: _Integrand, blocks: Blocks, epsilon: Array
) -> tuple[Array, ...]:
    """``log delta``, minus its slope, its second derivative, error, rounding error."""
    xp = namespace(integrand.density, epsilon)
    log_known = _bulk_delta(integrand.bulk, epsilon)
    waves = xp.asarray(_waves(blocks.size, blocks.most))

    def add(block: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds a block to the sums, which are over e^peak; the last summand's size."""
        rows, before = at(integrand.rows, block), state[0]
        z, log_size = rows.z, rows.log_size - rows.z[0] * epsilon
        peak = xp.maximum(before, log_size.max(axis=0))
        re, im = times(rows.sign, polar(log_size - peak, -z[1] * epsilon))
        first = times(z, (re, im))
        second = z[0] * first[0] - z[1] * first[1]
        phase = xp.abs(z[1] * epsilon) + xp.abs(z[0] * epsilon)
        size = xp.exp(log_size - peak) * rows.lost
        rounding = size * (rows.error + _ROUNDING * (8 + phase))
        parts = [a.sum(axis=0) for a in (re, first[0], second, rounding)]
        parts = xp.concatenate([xp.array(parts), at(waves, block) @ re])
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
    truncation += xp.exp(integrand.log_beyond - integrand.end * epsilon - peak)
    rounding = (sums[3] + _ROUNDING * known) / xp.abs(total)
    error = (_aliasing(sums[4:]) + truncation) / xp.abs(total) + rounding
    good = total > 0
    total = xp.where(good, total, 1.0)
    value = xp.where(good, xp.log(total) + peak, xp.nan)
    slope = slope / total
    curvature = second / total - slope * slope
    # A delta above 1 has not converged, whatever its error seems to be.
    good = good & (value <= error)
    return value, slope, curvature, xp.where(good, error, xp.inf), rounding


def _aliasing(transform: Array) -> Array:
    """Estimate of the trapezoidal rule's aliasing error, by the waves' sums, (4, n)."""
    # By Poisson's formula the error is the integrand's Fourier transform at 2 pi / h
    # and its multiples. The summands give the transform up to pi / h. It decays and
    # oscillates: it may vanish at one frequency by chance, but hardly at several.
    xp = namespace(transform)
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


def _bulk_delta(bulk: Bulk, epsilon: Array) -> Array:
    """Logarithms of the bulk's delta D, of ``-D'`` and of ``D'' - D'``."""
    xp, some = namespace(bulk.variance, epsilon), bulk.variance > 0
    if xp is np and not some.any():
        return np.full((3, *epsilon.shape), _LOG_ZERO)
    mu = xp.sqrt(xp.where(some, bulk.variance, 1.0))
    profile, tail = gaussian_tails(mu, epsilon)
    density = log_normal_density(epsilon / mu - 0.5 * mu) - xp.log(mu)
    parts = xp.array([profile, tail, density]) + bulk.log_mass
    return xp.where(some, parts, _LOG_ZERO)

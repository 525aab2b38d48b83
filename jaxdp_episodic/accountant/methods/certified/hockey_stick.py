"""Certified delta and epsilon of the distribution of a sum of privacy losses.

A `Row` holds one exponentially tilted distribution on a lattice for each step; their
convolution power in a window, with bounds of its errors (rounding, truncation), is a
`CertifiedDistribution`. Its hockey-stick divergence, with those bounds added or taken
off, gives `certified_log_delta` and `certified_epsilon`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.certified import window
from jaxdp_episodic.accountant.methods.certified.lattice import (
    LatticeDistribution,
    loss_rounding,
)
from jaxdp_episodic.accountant.methods.certified.window import Direction, Estimate

# Tilt below which the answer is bracketed by bisection before it is solved for.
_SMALL_TILT = 0.05
# Nats above Chernoff's bound beyond which the answer is not searched for.
_LARGEST_EXCESS = 600.0
# Relative rounding error of one lattice mass, tilted.
_MASS_ERROR = 1e-14
# Of the sum of up to 2^22 masses, by which transforms divide once a step: NumPy adds in
# blocks of 128, eight sums side by side, then in pairs: 16 + 15 + 3 units of 1.1e-16.
_TOTAL_ERROR = 4e-15
# The same as of a mass for each nat of the exponent it was computed from.
_EXPONENT_ERROR = 1e-15
# Shares of the planned distance from the tilt at which bounds of the tails are tried.
_NEARER = np.array([1.0, 0.6, 0.35, 0.2, 0.1, 0.05])
# Logarithm of the smallest delta that is solved for: below it exponentials underflow.
_LEAST_LEVEL = -700.0
# Share of the planned precision for the frequencies that are left out.
_CUT_SHARE = 1e-4
UNDERFLOW = 1e-280  # more than all that underflows adds up to
_SUMS_ERROR = 1e-9  # relative, of sums over up to 2^22 cells: half an ulp of each
# Error of a logarithm, relative to its terms: less than 20 operations of half an ulp,
# 2e-15; for most terms this is wider, as it costs nothing.
_LOG_ERROR = 1e-12
_ADDED_ERROR = 1.2e-16  # relative, of one addition: half an ulp is 1.11e-16
# Relative, of a place ``start + i spacing - at`` whose start is a sum of two, and of a
# loss, or its multiple: at most eight operations of half an ulp, 9e-16.
_LOSS_ERROR = 1e-15


class CertifiedDistribution(NamedTuple):
    """One certified distribution of the sum, tilted, in a window of a lattice.

    Attributes:
      cells: (N,) tilted masses, estimates; cell i is at ``start + i spacing``.
      rounding: bounds of the error of each cell, and of the root of the sum of all
        errors' squares.
      truncated: bounds of the tilted mass below and above the window.
      start, spacing: of the window, nats.
      tilt: c.
      log_moment: log of the untilted mass, ``T log M(c)``.
      infinite: mass at an infinite loss.
      relative: bound of the relative error of all masses.
      shift: bound of the error of the positions, nats.
    """

    cells: np.ndarray
    rounding: tuple[float, float]
    truncated: tuple[float, float]
    start: float
    spacing: float
    tilt: float
    log_moment: float
    infinite: float
    relative: float
    shift: float


@dataclass
class Row:
    """The lattice distributions of one direction's steps, before the transform."""

    masses: list[tuple[np.ndarray, np.ndarray]]  # cell numbers and tilted masses
    counts: list[float]
    size: int
    first: int
    small_rounding: bool  # whether rounding errors of 1e-13 a step do not matter
    initial_epsilon: float  # epsilon that is expected
    precision: float  # nats of log(delta) that do not matter
    tolerance: float  # tilted delta that does not matter
    certified: CertifiedDistribution


def sum_window(
    dists: Sequence[LatticeDistribution], counts: Sequence[float], plan: Direction
) -> tuple[float, float, Direction]:
    """Ends beyond which the tilted sum is as rarely as planned, by Chernoff's bound.

    The planned epsilon is inside, unless it is further than a window away.

    Returns the ends, and the plan with the bounds' tilts: rare large losses, of which
    plans have poor estimates, ask for nearer ones than it had.
    """

    def moment(tilt: float) -> float:
        return sum(
            count * log_sum(log_mass + tilt * losses)
            for (log_mass, losses), count in zip(alive, counts, strict=True)
        )

    alive = [
        (np.log(dist.masses[dist.masses > 0]), dist.losses[dist.masses > 0])
        for dist in dists
    ]
    here, tilt = moment(plan.tilt), plan.tilt
    lows = [
        ((here - moment(t) + plan.log_cut) / (tilt - t), t)
        for t in tilt - (tilt - plan.down_tilt) * _NEARER
    ]
    highs = [
        ((moment(t) - here - plan.log_cut) / (t - tilt), t)
        for t in tilt + (plan.up_tilt - tilt) * _NEARER
    ]
    (low, down_tilt), (high, up_tilt) = max(lows), min(highs)
    if low - (high - low) < plan.epsilon < high + (high - low) or plan.given:
        low, high = min(low, plan.epsilon), max(high, plan.epsilon)
    return low, high, plan._replace(down_tilt=down_tilt, up_tilt=up_tilt)


def tilted_row(
    dists: Sequence[LatticeDistribution],
    counts: Sequence[float],
    plan: Direction,
    infinite: float,
    offset: float,
    displacement: float,
    spacing: float,
    first: int,
    size: int,
) -> Row:
    """Tilts the masses and bounds what leaves the window."""
    start = offset + first * spacing
    ends = start, start + size * spacing
    up, down = plan.up_tilt - plan.tilt, plan.tilt - plan.down_tilt
    log_moment = relative = 0.0
    shift = displacement
    truncated = [down * ends[0], -up * ends[1]]
    terms = abs(truncated[0]) + abs(truncated[1])
    masses = []
    # Of a sum over the steps, relative to its terms.
    added = _ADDED_ERROR * len(dists)
    for dist, count in zip(dists, counts, strict=True):
        alive = dist.masses > 0
        index, losses, mass = (array[alive] for array in dist[:3])
        log_mass = np.log(mass)
        exponent = log_mass + plan.tilt * losses
        total = log_sum(exponent)
        tilted = np.exp(exponent - total)
        masses.append((index, tilted))
        log_moment += count * total
        largest = float(np.abs(losses).max(initial=0.0))
        # The exponent was a sum of terms of this size.
        size_of_terms = abs(total) + plan.tilt * largest
        size_of_terms += float(np.abs(log_mass).max(initial=0.0))
        relative += count * (_MASS_ERROR + _TOTAL_ERROR + added * abs(total))
        relative += count * _EXPONENT_ERROR * size_of_terms
        # masses that meet in one cell of the circle are added up
        meeting = math.ceil((float(np.ptp(index)) + 1) / size)
        relative += count * _ADDED_ERROR * min(meeting, len(index))
        shift += count * (_LOSS_ERROR * largest + float(loss_rounding(largest)))
        log_tilted = exponent - total
        for side, tilt in ((0, -down), (1, up)):
            log_moments = count * log_sum(log_tilted + tilt * losses)
            truncated[side] += log_moments
            terms += abs(log_moments)
    # Chernoff's bound; what was added up had the size of the terms.
    rounded = _SUMS_ERROR + (_LOG_ERROR + added) * terms + relative
    below, above = (math.exp(min(x + rounded, 0.0)) + UNDERFLOW for x in truncated)
    certified = CertifiedDistribution(
        np.empty(0),
        (0.0, 0.0),
        (below, above),
        start,
        spacing,
        plan.tilt,
        log_moment,
        infinite,
        relative,
        shift + _LOSS_ERROR * (abs(start) + abs(ends[1])),
    )
    reserve = -plan.log_share if plan.log_share < -1e-9 else window.FIRST_RESERVE
    small = sum(counts) * 1e-13 * math.exp(min(reserve, 100.0)) < 1e-3
    precision = min(plan.slope * plan.width, 1.0)
    scale = float(window.log_weight(plan.tilt)) - min(reserve, 100.0)
    tolerance = _CUT_SHARE * precision * math.exp(scale)
    rest = plan.epsilon, precision, tolerance
    return Row(masses, list(counts), size, first, small, *rest, certified)


def log_sum(exponents: np.ndarray) -> float:
    """Log of the sum of exponentials; of none of them one that underflows."""
    if not len(exponents):
        return -1e4
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top).sum()))


def _slack(dist: CertifiedDistribution, *, certify_upper: bool) -> float:
    """Bound of the error of ``sum of cells e^{-c x}(1 - e^{-x})``, x the excess.

    Every weight is at most ``e^w``, w = `log_weight`; their sum over a lattice is at
    most ``e^w`` and the integral ``1 / (c (1 + c))`` over the spacing, and so is that
    of their squares, with the integral ``1 / (2 c (1 + c) (1 + 2 c))``.
    """
    c, cells = dist.tilt, len(dist.cells)
    most = float(np.exp(window.log_weight(c)))
    integral = 1 / (dist.spacing * c * (1 + c))
    weights = min(most + integral, most * cells)
    squares = min(most**2 + 0.5 * integral / (1 + 2 * c), most**2 * cells)
    single, together = dist.rounding
    rounding = min(single * weights, together * math.sqrt(squares))
    below, above = dist.truncated
    # Mass above the window is missing from it; mass outside of it has been wrapped in.
    truncated = above if certify_upper else below + above
    return (most * truncated + rounding) * (1 + _SUMS_ERROR)


def exponent_error(
    dist: CertifiedDistribution, log_delta: float, epsilon: float
) -> float:
    """Bound of the error of log(delta) from the masses and from rounded exponents."""
    if not math.isfinite(log_delta):
        return 0.0
    large = abs(dist.log_moment) + dist.tilt * abs(epsilon)
    terms = 1 + abs(log_delta) + 1e-3 * large  # of few operations
    return dist.relative + _LOG_ERROR * terms


def chernoff_log_delta(dist: CertifiedDistribution, epsilon: float) -> float:
    """Upper bound of log(delta) that needs no window."""
    bound = dist.log_moment - dist.tilt * (epsilon - dist.shift)
    bound += float(window.log_weight(dist.tilt))
    bound += exponent_error(dist, bound, epsilon)
    infinite = math.log(max(dist.infinite, 1e-300))
    return min(float(np.logaddexp(bound, infinite)) + _LOG_ERROR, 0.0)


def chernoff_epsilon(dist: CertifiedDistribution, log_delta: float) -> float:
    """Upper bound of epsilon that needs no window."""
    level = finite_level(dist, log_delta, 0.0)
    if math.isnan(level):
        return math.inf
    weight = float(window.log_weight(dist.tilt))
    bound = (dist.log_moment + weight - level) / dist.tilt
    return max(bound + _LOG_ERROR * abs(bound) + dist.shift, 0.0)


def finite_level(
    dist: CertifiedDistribution, log_delta: float, largest: float
) -> float:
    """Log of delta less the mass at infinity, of an upper distribution; NaN if none."""
    level = log_delta - exponent_error(dist, log_delta, largest)
    if not level > _LEAST_LEVEL:
        return math.nan  # rounding leaves nothing of delta
    share = 1 - dist.infinite * (1 + _SUMS_ERROR) / math.exp(level)
    return level + math.log(share) if share > 0 else math.nan


def certified_log_delta(
    dist: CertifiedDistribution, epsilon: float, *, certify_upper: bool
) -> tuple[float, Estimate]:
    """log(delta) of a distribution, rounded to the safe side, and an estimate of it."""
    bound = chernoff_log_delta(dist, epsilon)
    sign = 1 if certify_upper else -1
    epsilon -= sign * dist.shift
    # Below the window masses are missing; the profile decreases.
    at = max(epsilon, dist.start)
    begin = max(math.floor((at - dist.start) / dist.spacing), 0)
    numbers = np.arange(begin, len(dist.cells))
    excess = np.maximum(dist.start + numbers * dist.spacing - at, 0.0)
    decay = np.maximum(dist.cells[begin:], 0.0) * np.exp(-dist.tilt * excess)
    total = float(decay @ -np.expm1(-excess))
    beyond = float(decay @ np.exp(-excess))
    exponent = dist.log_moment - dist.tilt * at
    log_total = math.log(max(total, 1e-300)) + exponent
    slope = min(beyond / max(total, 1e-300), 10 / dist.spacing)
    estimate = Estimate(epsilon, log_total, slope)
    slack = sign * _slack(dist, certify_upper=certify_upper)
    total = total * (1 + sign * _SUMS_ERROR) + slack
    if total <= 0:
        return (0.0 if certify_upper else -math.inf), estimate
    log_delta = math.log(total) + exponent
    log_delta += sign * exponent_error(dist, log_delta, at)
    if not certify_upper:
        return min(log_delta, 0.0), estimate
    infinite = math.log(max(dist.infinite, 1e-300))
    log_delta = float(np.logaddexp(log_delta, infinite)) + _LOG_ERROR
    return min(log_delta, bound) if epsilon >= dist.start else bound, estimate


def _bisected_epsilon(
    dist: CertifiedDistribution, log_delta: float, highest: float
) -> float:
    """Estimate of epsilon by bisection, where Chernoff's bound may be far above it."""
    low, high = dist.start, highest
    positions = dist.start + np.arange(len(dist.cells)) * dist.spacing
    for _ in range(25):
        middle = 0.5 * (low + high)
        excess = np.maximum(positions - middle, 0.0)
        weights = -np.exp(-dist.tilt * excess) * np.expm1(-excess)
        total = max(float(np.maximum(dist.cells, 0.0) @ weights), 1e-300)
        above = math.log(total) + dist.log_moment - dist.tilt * middle > log_delta
        low, high = (middle, high) if above else (low, middle)
    return high


def certified_epsilon(
    dist: CertifiedDistribution, log_delta: float, *, certify_upper: bool
) -> tuple[float, Estimate]:
    """The epsilon at a delta, rounded to the safe side, and an estimate of it.

    The profile is evaluated at every cell of the window by two cumulated sums; within
    a cell it is linear in ``e^epsilon``.
    """
    sign = 1 if certify_upper else -1
    end = dist.start + (len(dist.cells) - 1) * dist.spacing
    largest = abs(dist.start) + abs(end)
    log_finite = log_delta + exponent_error(dist, log_delta, largest)
    bound = math.inf
    if certify_upper:
        log_finite = finite_level(dist, log_delta, largest)
        bound = chernoff_epsilon(dist, log_delta)
    if math.isnan(log_finite):
        return math.inf, Estimate(end, log_delta, dist.tilt)
    # The answer by Chernoff's bound: the sums are scaled to it.
    weight = float(window.log_weight(dist.tilt))
    center = (dist.log_moment + weight - log_finite) / dist.tilt
    center = min(max(center, dist.start), end)
    if dist.tilt < _SMALL_TILT:
        center = _bisected_epsilon(dist, log_finite, center)
    # Nothing is evaluated below 0, or far below the answer, where weights overflow.
    least = max(dist.start, -2 * dist.spacing, center - 300 / (1 + dist.tilt))
    begin = max(math.floor((least - dist.start) / dist.spacing), 0)
    # ... nor where a cell is so wide that exponentials of its ends overflow.
    first = math.ceil((center - _LARGEST_EXCESS - dist.start) / dist.spacing)
    begin = min(max(begin, first), len(dist.cells) - 1)
    excess = (dist.start - center) + np.arange(begin, len(dist.cells)) * dist.spacing
    scale = np.exp(-dist.tilt * excess)
    growth = np.exp(np.minimum(excess, _LARGEST_EXCESS))
    weights = np.maximum(dist.cells[begin:], 0.0) * scale
    # sums over all cells from each one on
    ones = np.cumsum(weights[::-1])[::-1]
    decays = np.cumsum((weights * np.exp(-excess))[::-1])[::-1]
    profile = ones - growth * decays
    exponent = log_finite - dist.log_moment + dist.tilt * center
    level = math.exp(min(max(exponent, -700.0), 700.0))
    # Chernoff's bound holds: nothing to be found far above it.
    near = excess <= _LARGEST_EXCESS
    passed = near & (profile <= level)
    n = max(int(np.argmax(passed)) - 1, 0) if np.any(passed) else len(excess) - 1
    slope = dist.tilt
    if profile[n] > 0.5 * level:
        slope = float(growth[n] * decays[n] / profile[n])
    at = max(center + float(excess[n]), 0.0)
    estimate = Estimate(at, log_delta, min(slope, 10 / dist.spacing))
    slack = _slack(dist, certify_upper=certify_upper) * scale
    # cumulated sums, and exponentials of rounded exponents
    rounded = 4e-16 * (
        len(dist.cells) + dist.tilt * (abs(dist.start) + abs(end) + center)
    )
    slack += (rounded + 1e-14) * (ones + growth * decays)
    fits = profile + slack <= level if certify_upper else profile - slack >= level
    fits &= near
    if not np.any(fits):
        return (bound if certify_upper else 0.0), estimate
    # Solved in the cell before the first that fits, or after the last.
    if certify_upper:
        n = max(int(np.argmax(fits)), 1)
    else:
        n = min(int(np.flatnonzero(fits)[-1]) + 1, len(excess) - 1)
    rest = float(ones[n]) - (level - sign * float(slack[n - 1]))
    if rest <= 0:
        solved = -math.inf  # all of the cell fits
    elif rest < math.inf and decays[n] > 0:
        solved = math.log(rest / float(decays[n]))
    else:
        # The slack at the cell's lower end is more than the level, inf or NaN, as of
        # a cell that is many nats wide: only the end that fits is certified.
        solved = sign * math.inf
    solved = min(max(solved, float(excess[n - 1])), float(excess[n]))
    epsilon = center + solved
    epsilon += sign * (dist.shift + _LOSS_ERROR * (1 + abs(center) + abs(epsilon)))
    epsilon = max(min(epsilon, bound), 0.0)
    # the estimate is that of a cell, which may be a wide one
    return epsilon, estimate._replace(epsilon=max(at, epsilon))

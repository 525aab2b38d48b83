"""Plans of privacy loss lattices: tilt, window and range of losses.

Everything here is an *estimate* from a pilot distribution of the loss: it decides how
wide the certified interval of `certified.method` becomes, never whether it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.certified.pilot import Pilot, log_moment

_TILTS = np.geomspace(1e-6, 1e8, 29)
# Smaller tilts, tried where losses of more than so many nats occur.
_SMALL_TILTS, _LARGE_LOSS = np.geomspace(1e-18, 10**-6.5, 24), 1e4
_FINER_TILTS = np.geomspace(10**-0.5, 10**0.5, 13)
_TILT_CHANGES = np.geomspace(0.01, 6.0, 14)
# Share of the planned width for the mass truncated by the window.
_CUT_SHARE = 0.01
# Share of delta's relative width for single losses beyond the lattice.
_RARE_SHARE = 0.05
# From so many nats between Chernoff's bound and delta on, single large losses make up
# the sum; and nats of the bound that are given up for a smaller tilt there.
_FAR_BOUND, _SPARED = 4.0, 2.0
# Logarithm of delta's bound above which delta is near 1.
_NEAR_ONE = 0.1
_SMALLER_TILTS = 10.0 ** (-np.arange(9) / 6)
# Share of a lower bound of the answer allowed to the errors of the other direction,
# which is only shown to lie below it.
_CEILING_SHARE = 0.1
# Tilts are at most this over the width that is enough.
_STEEPEST = 1000.0
# Nats by which delta may be below Chernoff's bound before it was computed once.
_FIRST_RESERVE = 12.0
_LEAST_LOG_DELTA = -600.0
# How many large losses make up a sum at most, where the bulk does not.
_LARGE_LOSSES = 3.0


class Target(NamedTuple):
    """What is asked of one setting: delta at an epsilon, or epsilon at a delta.

    Attributes:
      log_delta: nats, or None where epsilon is given.
      epsilon: nats, or None where delta is given.
      floor: width of epsilon that is enough, nats.
      proportion: width that is enough, as a share of epsilon or of delta.
    """

    log_delta: float | None
    epsilon: float | None
    floor: float
    proportion: float


class Estimate(NamedTuple):
    """An earlier refinement's estimate: delta at epsilon, and the slope.

    ``slope`` is ``-d log(delta) / d epsilon`` there.
    """

    epsilon: float
    log_delta: float
    slope: float


class Direction(NamedTuple):
    """Plan of one direction.

    Attributes:
      tilt: c, the exponent of the exponential tilt.
      epsilon, log_delta: the answer that is expected.
      slope: ``-d log(delta) / d epsilon`` there; c or more.
      log_share: logarithm of delta over Chernoff's bound of it, <= 0.
      width: of epsilon, aimed for.
      low, high: window of the sum, nats, by the pilot distributions.
      log_cut: logarithm of the tilted mass that may be outside of it.
      up_tilt, down_tilt: c of the bounds of what leaves the window.
      given: whether epsilon is given.
      only_bound: whether nothing but Chernoff's bound is asked for.
      ranges: for each step the lowest and highest loss needed.
      weights: for each step how often a loss occurs where the sum is as large as
        epsilon, over the count: one number for each cell of the pilot distribution.
    """

    tilt: float
    epsilon: float
    log_delta: float
    slope: float
    log_share: float
    width: float
    low: float
    high: float
    log_cut: float
    up_tilt: float
    down_tilt: float
    given: bool
    only_bound: bool
    ranges: tuple[tuple[float, float], ...]
    weights: tuple[np.ndarray, ...]


def log_weight(tilt: np.ndarray | float) -> np.ndarray:
    """``log max_x e^{-c x}(1 - e^{-x})``: what an excess of the loss gains at most."""
    c = np.asarray(tilt, np.float64)
    return -np.log1p(c) - c * np.log1p(1 / c)


def plan_direction(
    pilots: Sequence[Pilot],
    counts: Sequence[float],
    target: Target,
    scale: float,
    known: Estimate | None,
    ceiling: float | None = None,
) -> Direction:
    """Chooses the tilt and the range of one direction.

    Args:
      pilots: of the steps, in this direction.
      counts: of the steps.
      target: of the setting.
      scale: shrinks all errors.
      known: an earlier refinement's estimate.
      ceiling: the other direction's answer is surely above it: Chernoff's bound is to
        show that this direction's is below it.
    """
    if known and not known.slope > 0:
        known = None  # of a window in which there was nothing
    goal = _aim(pilots, counts, target, known)
    log_cut = goal + _log_rarity(target, scale, known)
    whole = pilots
    # every step gets an equal share of the truncated mass
    shared = [t * len(whole) for t in counts]
    pilots = [
        _up_to(pilot, _top(pilot, t, log_cut))
        for pilot, t in zip(whole, shared, strict=True)
    ]
    at = known.epsilon if known else target.epsilon
    tilt, bound = _best_tilt(pilots, counts, at, goal, ceiling)
    epsilon = at if at is not None else max(bound, 0.0)
    if known:
        # A smaller tilt keeps rare large losses rare, and the window short.
        tilt = min(tilt, known.slope)
        if bound - goal > _FAR_BOUND and ceiling is None:
            tilt = _short_tilt(pilots, counts, tilt, known, bound - goal)
    if target.log_delta is not None:
        enough = max(target.floor, target.proportion * epsilon)
        tilt = min(tilt, _STEEPEST / enough)
    elif ceiling is None:
        tilt = max(tilt, _harmless_tilt(pilots, counts, epsilon))
    here = float(_sum_moments(pilots, counts, np.array([tilt]))[0])
    bound = min(here - tilt * epsilon + float(log_weight(tilt)), 0.0)
    log_delta, slope = bound, tilt
    if known:
        log_delta, slope = known.log_delta, max(known.slope, 0.1 * tilt)
    elif target.log_delta is not None:
        log_delta = target.log_delta
    width = _width(target, epsilon, slope, known, ceiling)
    log_share = min(log_delta - bound, 0.0)
    log_cut = math.log(_CUT_SHARE * scale * min(slope * width, 1.0)) + log_share
    low, high, down_tilt, up_tilt = _window(pilots, counts, tilt, here, log_cut)
    return Direction(
        tilt=tilt,
        epsilon=epsilon,
        log_delta=log_delta,
        slope=slope,
        log_share=log_share,
        width=width * scale,
        low=low,
        high=high,
        log_cut=log_cut,
        up_tilt=up_tilt,
        down_tilt=down_tilt,
        given=target.log_delta is None,
        only_bound=ceiling is not None,
        ranges=tuple(
            (_bottom(pilot, t, tilt, log_cut), float(pilot.edges[-1]))
            for pilot, t in zip(pilots, shared, strict=True)
        ),
        weights=tuple(
            _importance(pilot, t, tilt, log_share, len(full.mass), 1 / len(pilots))
            for pilot, t, full in zip(pilots, counts, whole, strict=True)
        ),
    )


def _aim(
    pilots: Sequence[Pilot],
    counts: Sequence[float],
    target: Target,
    known: Estimate | None,
) -> float:
    """log(delta), given, known or expected."""
    goal = known.log_delta if known else target.log_delta
    if goal is not None:
        return goal
    # A first estimate of delta may be much too large.
    goal = min(_best_tilt(pilots, counts, target.epsilon, 0.0, None)[1], 0.0)
    # float64 has nothing smaller (delta is 0 if no loss is as large as epsilon)
    return max(goal - _FIRST_RESERVE, _LEAST_LOG_DELTA)


def _log_rarity(target: Target, scale: float, known: Estimate | None) -> float:
    """What is so large that it alone is rarer than delta is not waited for."""
    needed = target.proportion if target.log_delta is None else 0.02
    if known and target.log_delta is not None:
        wanted = max(target.floor, target.proportion * known.epsilon)
        needed = min(known.slope * wanted, 1.0)
    return math.log(_RARE_SHARE * needed * max(scale, 0.1))


def _width(
    target: Target,
    epsilon: float,
    slope: float,
    known: Estimate | None,
    ceiling: float | None,
) -> float:
    """Width of epsilon to aim for."""
    if target.log_delta is not None:
        width = max(target.floor, target.proportion * epsilon)
        return width if ceiling is None else max(width, _CEILING_SHARE * ceiling)
    if ceiling is not None:
        return 1 / slope
    # a first estimate of delta need not be more accurate
    return (target.proportion if known else max(target.proportion, 0.01)) / slope


def _window(
    pilots: Sequence[Pilot],
    counts: Sequence[float],
    tilt: float,
    moment: float,
    log_cut: float,
) -> tuple[float, float, float, float]:
    """Window of the tilted sum by Chernoff's bound, and the bounds' tilts."""
    ups, downs = tilt * (1 + _TILT_CHANGES), tilt * (1 - _TILT_CHANGES)
    moments = _sum_moments(pilots, counts, np.concatenate([ups, downs]))
    up, down = moments[: len(ups)], moments[len(ups) :]
    highs = (up - moment - log_cut) / (ups - tilt)
    lows = (moment - down + log_cut) / (tilt - downs)
    i, j = int(np.argmin(highs)), int(np.argmax(lows))
    return float(lows[j]), float(highs[i]), float(downs[j]), float(ups[i])


def _best_tilt(
    pilots: Sequence[Pilot],
    counts: Sequence[float],
    epsilon: float | None,
    log_delta: float,
    ceiling: float | None,
) -> tuple[float, float]:
    """The tilt of the best of Chernoff's bounds, and the bound of what is not given.

    Args:
      pilots: of the steps.
      counts: of the steps.
      epsilon: where log(delta) is to be bounded, else None.
      log_delta: where epsilon is to be bounded.
      ceiling: where it is given, the smallest tilt of which the bound is below it.
    """

    def bounds(tilts: np.ndarray) -> np.ndarray:
        exponents = _sum_moments(pilots, counts, tilts) + log_weight(tilts)
        if epsilon is not None:
            return exponents - tilts * epsilon
        return (exponents - log_delta) / tilts

    every = _TILTS
    if max(float(pilot.edges[-1]) for pilot in pilots) > _LARGE_LOSS:
        every = np.concatenate([_SMALL_TILTS, _TILTS])
    coarse = bounds(every)
    tilts = every[int(np.argmin(coarse))] * _FINER_TILTS
    finer = bounds(tilts)
    if ceiling is None or np.min(finer) > ceiling:
        i = int(np.argmin(finer))
        return float(tilts[i]), float(finer[i])
    tilts, finer = np.append(every, tilts), np.append(coarse, finer)
    below = finer <= ceiling
    i = int(np.argmin(tilts[below]))
    return float(tilts[below][i]), float(finer[below][i])


def _harmless_tilt(
    pilots: Sequence[Pilot], counts: Sequence[float], epsilon: float
) -> float:
    """The largest tilt that gives up little where delta is near 1, else 0.

    The best one is next to none there, and tells nothing of the window.
    """
    moments = _sum_moments(pilots, counts, _TILTS)
    bounds = moments + log_weight(_TILTS) - _TILTS * epsilon
    if bounds.min() < -_NEAR_ONE:
        return 0.0
    return float(_TILTS[bounds <= _NEAR_ONE].max(initial=0.0))


def _short_tilt(
    pilots: Sequence[Pilot],
    counts: Sequence[float],
    tilt: float,
    known: Estimate,
    excess: float,
) -> float:
    """A smaller tilt of the shortest window, whose bound of delta is hardly larger."""
    tilts = tilt * _SMALLER_TILTS
    moments = _sum_moments(pilots, counts, tilts)
    bounds = moments + log_weight(tilts) - tilts * known.epsilon
    best, length = tilt, math.inf
    for c, moment, bound in zip(tilts, moments, bounds, strict=True):
        low, high, _, _ = _window(pilots, counts, c, float(moment), -excess - _SPARED)
        here = max(high, known.epsilon) - min(low, known.epsilon)
        if bound <= bounds[0] + _SPARED and here < length:
            best, length = float(c), here
    return best


def _sum_moments(
    pilots: Sequence[Pilot], counts: Sequence[float], tilts: np.ndarray
) -> np.ndarray:
    total = np.zeros(len(tilts))
    for pilot, count in zip(pilots, counts, strict=True):
        total += count * log_moment(pilot, tilts)
    return total


def _top(pilot: Pilot, count: float, log_mass: float) -> float:
    """Loss above which the mass of all steps is at most this."""
    above = np.log(np.maximum(pilot.above * count, 1e-300))
    reached = np.flatnonzero(above <= log_mass)
    if not len(reached) or reached[0] == 0:
        return float(pilot.edges[-1])
    i = reached[0]
    drop = max(above[i - 1] - above[i], 1e-300)
    # The logarithm of a tail is concave, or the tail ends in this cell.
    share = 1.0 if drop > 20 else math.sqrt(min((above[i - 1] - log_mass) / drop, 1.0))
    return float(pilot.edges[i - 1] + share * (pilot.edges[i] - pilot.edges[i - 1]))


def _up_to(pilot: Pilot, top: float) -> Pilot:
    """The distribution without what is above ``top``."""
    last = max(int(np.searchsorted(pilot.edges, top)), 1)
    return Pilot(
        pilot.mass[:last],
        np.minimum(pilot.loss[:last], top),
        np.append(pilot.edges[:last], top),
        pilot.above[: last + 1],
    )


def _bottom(pilot: Pilot, count: float, tilt: float, log_mass: float) -> float:
    """Loss below which the tilted mass of all steps is at most this."""
    below = np.log(np.maximum(np.cumsum(_tilted(pilot, tilt)) * count, 1e-300))
    return float(
        pilot.edges[min(int(np.searchsorted(below, log_mass)), len(below) - 1)]
    )


def _importance(
    pilot: Pilot, count: float, tilt: float, log_share: float, size: int, part: float
) -> np.ndarray:
    """How often a loss occurs where the sum is as large as epsilon, over the count.

    The tilted distribution, but where delta is far below Chernoff's bound a single
    large loss makes up the sum: such a loss may occur as often as once, in all steps
    together.
    """
    weight = _tilted(pilot, tilt)
    rare = np.minimum(weight * math.exp(min(-log_share, 600.0)), 1 / count)
    often = count * float(rare[rare > weight].sum())
    rare *= min(1.0, _LARGE_LOSSES * part / max(often, 1e-300))
    return np.pad(np.maximum(weight, rare), (0, size - len(weight)))


def _tilted(pilot: Pilot, tilt: float) -> np.ndarray:
    exponent = tilt * pilot.loss
    alive = pilot.mass > 0
    weight = np.log(np.where(alive, pilot.mass, 1.0)) + np.where(
        alive, exponent, -np.inf
    )
    weight = np.exp(weight - weight.max())
    return weight / weight.sum()

"""Plans of privacy loss lattices: tilt, window of the sum, range of each step's losses.

S is the sum of all steps' losses, ``M(c) = E e^{c S}`` and ``c > 0`` the *tilt*. As
``e^{-c x} (1 - e^{-x}) <= e^{w(c)}`` for ``x > 0`` (`log_weight`), Chernoff's bound is

    delta(eps) = E (1 - e^{eps - S})_+ <= e^{log M(c) - c eps + w(c)}.

The lattice holds the tilted distribution ``P_c(s) = e^{c s} P(s) / M(c)``, whose mass
is where S is about eps. What lies outside of its window is bounded in the same way, by
one more tilt above c and one below it:

    P_c(S > high) <= e^{log M(up) - log M(c) - (up - c) high},       up > c,
    P_c(S < low) <= e^{log M(down) - log M(c) + (c - down) low},     down < c.

Everything here is an *estimate* from coarse distributions of the losses: it decides how
wide the certified interval of `certified.method` becomes, never whether it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.certified.coarse import CoarseLoss, log_moment

# First grid of tilts, in 1/nat, two a decade.
_TILTS = np.geomspace(1e-6, 1e8, 29)
# Tilts tried as well where losses are large.
_SMALL_TILTS = np.geomspace(1e-18, 10**-6.5, 24)
# Nats of a loss from which on the small tilts may be the best ones.
_LARGE_LOSS = 1e4
# Second grid, as factors of the best tilt of the first.
_FINER_TILTS = np.geomspace(10**-0.5, 10**0.5, 13)
# Relative distances of the tilts that bound what lies outside of the window.
_TILT_CHANGES = np.geomspace(0.01, 6.0, 14)
# Factors of tilts tried for a shorter window.
_SMALLER_TILTS = 10.0 ** (-np.arange(9) / 6)
# Share of the planned width for the mass truncated by the window.
_CUT_SHARE = 0.01
# Share of delta's relative width for single losses beyond the lattice.
_RARE_SHARE = 0.05
# Relative width of delta that truncated losses may cost where epsilon is asked for and
# the slope of delta is not known yet.
_FIRST_RELATIVE_WIDTH = 0.02
# log(Chernoff bound / delta) from which on single large losses make up the sum.
_FAR_BOUND = 4.0
# Nats of Chernoff's bound that are given up for a smaller tilt there.
_SPARED = 2.0
# Nats of log(delta) of a bound that are given up where delta is near 1.
_NEAR_ONE = 0.1
# Share of a lower bound of the answer allowed to the errors of the other direction,
# which is only shown to lie below it.
_CEILING_SHARE = 0.1
# Largest product of a tilt and the width of epsilon that is enough.
_STEEPEST = 1000.0
# First guess of log(Chernoff bound / delta).
FIRST_RESERVE = 12.0
# Smallest log(delta) that is planned for; below -745 float64 underflows.
_LEAST_LOG_DELTA = -600.0
# Most losses that make up a sum where single large losses do.
_LARGE_LOSSES = 3.0


class Target(NamedTuple):
    """What is asked of one setting: delta at an epsilon, or epsilon at a delta."""

    given: float  # log(delta), or epsilon; nats
    of_epsilon: bool  # whether epsilon is asked for, so that log(delta) is given
    absolute: float  # width of epsilon that is enough, nats
    relative: float  # width that is enough, as a share of epsilon or of delta

    def enough(self, epsilon: float) -> float:
        """The width of an interval about this epsilon that is enough, nats."""
        return max(self.absolute, self.relative * epsilon)


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
      width: of epsilon, planned for.
      low, high: window of the sum, nats, by the coarse losses.
      log_cut: logarithm of the tilted mass that may be outside of it.
      up_tilt, down_tilt: c of the bounds of what leaves the window.
      given: whether epsilon is given.
      only_bound: whether nothing but Chernoff's bound is asked for.
      ranges: for each step the lowest and highest loss needed.
      weights: for each step the probability that one of its losses is in a cell, given
        that the sum is as large as epsilon: one number for each coarse cell.
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
    """``w(c) = log max e^{-c x} (1 - e^{-x})`` over x > 0; at ``x = log(1 + 1/c)``."""
    c = np.asarray(tilt, np.float64)
    return -np.log1p(c) - c * np.log1p(1 / c)


def plan_direction(
    losses: Sequence[CoarseLoss],
    target: Target,
    scale: float,
    known: Estimate | None,
    ceiling: float | None = None,
) -> Direction:
    """Chooses the tilt and the range of one direction, of which the steps' losses are.

    ``scale`` shrinks all errors; ``known`` is an earlier refinement's estimate. Where
    the other direction's answer is surely above a ``ceiling``, Chernoff's bound is to
    show that this direction's is below it.
    """
    if known and not known.slope > 0:
        known = None  # of a window in which there was nothing
    goal = _expected_log_delta(losses, target, known)
    log_cut = goal + _log_negligible_share(target, scale, known)
    whole = losses
    # every step gets an equal share of the truncated mass
    parts = len(whole)
    losses = [_up_to(one, _upper_quantile(one, parts, log_cut)) for one in whole]
    at = None if target.of_epsilon else target.given
    at = known.epsilon if known else at
    tilt, bound = _best_tilt(losses, at, goal, ceiling)
    epsilon = at if at is not None else max(bound, 0.0)
    if known:
        # A smaller tilt keeps rare large losses rare, and the window short.
        tilt = min(tilt, known.slope)
        if bound - goal > _FAR_BOUND and ceiling is None:
            tilt = _tilt_of_short_window(losses, tilt, known, bound - goal)
    if target.of_epsilon:
        tilt = min(tilt, _STEEPEST / target.enough(epsilon))
    elif ceiling is None:
        tilt = max(tilt, _largest_cheap_tilt(losses, epsilon))
    log_moment = float(_log_moments(losses, np.array([tilt]))[0])
    bound = min(log_moment - tilt * epsilon + float(log_weight(tilt)), 0.0)
    log_delta, slope = bound, tilt
    if known:
        log_delta, slope = known.log_delta, max(known.slope, 0.1 * tilt)
    elif target.of_epsilon:
        log_delta = target.given
    width = _width(target, epsilon, slope, known, ceiling)
    log_share = min(log_delta - bound, 0.0)
    log_cut = math.log(_CUT_SHARE * scale * min(slope * width, 1.0)) + log_share
    low, high, down_tilt, up_tilt = _window(losses, tilt, log_moment, log_cut)
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
        given=not target.of_epsilon,
        only_bound=ceiling is not None,
        ranges=tuple(
            (_lower_quantile(one, parts, tilt, log_cut), float(one.edges[-1]))
            for one in losses
        ),
        weights=tuple(
            _importance(one, tilt, log_share, len(full.mass), 1 / parts)
            for one, full in zip(losses, whole, strict=True)
        ),
    )


def _expected_log_delta(
    losses: Sequence[CoarseLoss],
    target: Target,
    known: Estimate | None,
) -> float:
    if known:
        return known.log_delta
    if target.of_epsilon:
        return target.given
    # Delta may be far below Chernoff's bound, and 0 if no loss is as large as epsilon.
    bound = min(_best_tilt(losses, target.given, 0.0, None)[1], 0.0)
    return max(bound - FIRST_RESERVE, _LEAST_LOG_DELTA)


def _log_negligible_share(
    target: Target, scale: float, known: Estimate | None
) -> float:
    """Log of the share of delta that losses above the range of a lattice may be."""
    needed = _FIRST_RELATIVE_WIDTH if target.of_epsilon else target.relative
    if known and target.of_epsilon:
        needed = min(known.slope * target.enough(known.epsilon), 1.0)
    return math.log(_RARE_SHARE * needed * max(scale, 0.1))


def _width(
    target: Target,
    epsilon: float,
    slope: float,
    known: Estimate | None,
    ceiling: float | None,
) -> float:
    """Width of epsilon that is planned for."""
    if target.of_epsilon:
        width = target.enough(epsilon)
        return width if ceiling is None else max(width, _CEILING_SHARE * ceiling)
    if ceiling is not None:
        return 1 / slope
    # a first estimate of delta need not be more accurate
    return (target.relative if known else max(target.relative, 0.01)) / slope


def _window(
    losses: Sequence[CoarseLoss],
    tilt: float,
    moment: float,
    log_cut: float,
) -> tuple[float, float, float, float]:
    """Window of the tilted sum by Chernoff's bound: low, high, down, up."""
    ups, downs = tilt * (1 + _TILT_CHANGES), tilt * (1 - _TILT_CHANGES)
    moments = _log_moments(losses, np.concatenate([ups, downs]))
    up, down = moments[: len(ups)], moments[len(ups) :]
    highs = (up - moment - log_cut) / (ups - tilt)
    lows = (moment - down + log_cut) / (tilt - downs)
    i, j = int(np.argmin(highs)), int(np.argmax(lows))
    return float(lows[j]), float(highs[i]), float(downs[j]), float(ups[i])


def _best_tilt(
    losses: Sequence[CoarseLoss],
    epsilon: float | None,
    log_delta: float,
    ceiling: float | None,
) -> tuple[float, float]:
    """The tilt of the best of Chernoff's bounds, and the bound of what is not given.

    Of log(delta) at ``epsilon``, or where that is None of epsilon at ``log_delta``;
    with a ``ceiling`` the smallest tilt of which the bound is below it.
    """

    def bounds(tilts: np.ndarray) -> np.ndarray:
        exponents = _log_moments(losses, tilts) + log_weight(tilts)
        if epsilon is not None:
            return exponents - tilts * epsilon
        return (exponents - log_delta) / tilts

    every = _TILTS
    if max(float(loss.edges[-1]) for loss in losses) > _LARGE_LOSS:
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


def _largest_cheap_tilt(losses: Sequence[CoarseLoss], epsilon: float) -> float:
    """The largest tilt whose bound is near 1 too where delta is; elsewhere 0.

    The best tilt is next to 0 there, and a window of hardly tilted losses a long one.
    """
    bounds = _log_moments(losses, _TILTS) + log_weight(_TILTS) - _TILTS * epsilon
    if bounds.min() < -_NEAR_ONE:
        return 0.0
    return float(_TILTS[bounds <= _NEAR_ONE].max(initial=0.0))


def _tilt_of_short_window(
    losses: Sequence[CoarseLoss], tilt: float, known: Estimate, excess: float
) -> float:
    """Of the tilts with hardly a larger bound of delta, that of the shortest window."""
    tilts = tilt * _SMALLER_TILTS
    moments = _log_moments(losses, tilts)
    bounds = moments + log_weight(tilts) - tilts * known.epsilon
    best, length = tilt, math.inf
    for c, moment, bound in zip(tilts, moments, bounds, strict=True):
        low, high, _, _ = _window(losses, c, float(moment), -excess - _SPARED)
        here = max(high, known.epsilon) - min(low, known.epsilon)
        if bound <= bounds[0] + _SPARED and here < length:
            best, length = float(c), here
    return best


def _log_moments(losses: Sequence[CoarseLoss], tilts: np.ndarray) -> np.ndarray:
    """``log M`` of the sum at many tilts."""
    return np.sum([one.count * log_moment(one, tilts) for one in losses], axis=0)


def _upper_quantile(loss: CoarseLoss, parts: int, log_mass: float) -> float:
    """Loss above which the mass is at most a part of this, in all steps alike."""
    above = np.log(np.maximum(loss.above * (loss.count * parts), 1e-300))
    reached = np.flatnonzero(above <= log_mass)
    if not len(reached) or reached[0] == 0:
        return float(loss.edges[-1])
    i = reached[0]
    drop = max(above[i - 1] - above[i], 1e-300)
    # The logarithm of a tail is concave, or the tail ends in this cell.
    share = 1.0 if drop > 20 else math.sqrt(min((above[i - 1] - log_mass) / drop, 1.0))
    return float(loss.edges[i - 1] + share * (loss.edges[i] - loss.edges[i - 1]))


def _up_to(loss: CoarseLoss, top: float) -> CoarseLoss:
    """The distribution without what is above ``top``."""
    last = max(int(np.searchsorted(loss.edges, top)), 1)
    return CoarseLoss(
        loss.mass[:last],
        np.minimum(loss.log_ratio[:last], top),
        np.append(loss.edges[:last], top),
        loss.above[: last + 1],
        loss.count,
    )


def _lower_quantile(
    loss: CoarseLoss, parts: int, tilt: float, log_mass: float
) -> float:
    """Loss below which the tilted mass is at most a part of this, in all steps."""
    below = np.cumsum(_tilted(loss, tilt)) * (loss.count * parts)
    cell = int(np.searchsorted(np.log(np.maximum(below, 1e-300)), log_mass))
    return float(loss.edges[min(cell, len(below) - 1)])


def _importance(
    loss: CoarseLoss, tilt: float, log_share: float, size: int, part: float
) -> np.ndarray:
    """Distribution of one of the step's losses given a sum as large as epsilon.

    It is the tilted one, but where delta is far below Chernoff's bound a single large
    loss makes up the sum: that may have a probability of one over the count.
    """
    weight = _tilted(loss, tilt)
    rare = np.minimum(weight * math.exp(min(-log_share, 600.0)), 1 / loss.count)
    often = loss.count * float(rare[rare > weight].sum())
    rare *= min(1.0, _LARGE_LOSSES * part / max(often, 1e-300))
    return np.pad(np.maximum(weight, rare), (0, size - len(weight)))


def _tilted(loss: CoarseLoss, tilt: float) -> np.ndarray:
    weight = np.log(loss.mass) + tilt * loss.log_ratio
    weight = np.exp(weight - weight.max())
    return weight / weight.sum()

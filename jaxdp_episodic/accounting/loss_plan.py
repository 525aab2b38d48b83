"""Where to put a privacy loss lattice: tilt, spacing, range and knots.

Everything here is an *estimate* from a rough law of the loss: it decides how wide the
certified interval of `accounting.pld` becomes, never whether it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accounting.loss_lattice import Tails, fine_law, merged_losses

# Losses at which every step is looked at first, and up to how many standard
# deviations of the Gaussian loss others are put among them.
_ROUGH_LOSSES = np.geomspace(1e-10, 1e4, 113)
_LARGEST_DEVIATION = 12.0
_TILTS = np.geomspace(1e-6, 1e8, 101)
_TILT_CHANGES = np.geomspace(0.01, 6.0, 14)
# Of the width that is asked for, what is cut off in units of delta.
_CUT_SHARE = 0.01
# Of delta's relative width, what single losses beyond the lattice may add.
_RARE_SHARE = 0.05
# No answer is needed more accurately than its width over this.
_STEEPEST = 1000.0
# Nats by which delta may be below Chernoff's bound before it was computed once.
_FIRST_RESERVE = 12.0
_LEAST_LOG_DELTA = -600.0
# How many large losses make up a sum at most, where the bulk does not.
_LARGE_LOSSES = 3.0


class RoughLaw(NamedTuple):
    """One step's loss, coarsely: b cells in order, the atom at 0 one of them.

    Attributes:
      mass, loss: (b,) P-mass of each cell and its loss as a whole.
      edges: (b + 1,) between the cells.
      above: (b + 1,) P-mass above each edge.
    """

    mass: np.ndarray
    loss: np.ndarray
    edges: np.ndarray
    above: np.ndarray


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
    """What an earlier round found, without bounds: delta at epsilon, and the slope.

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
      yield_: logarithm of delta over Chernoff's bound of it, <= 0.
      width: of epsilon, aimed for.
      low, high: window of the sum, nats, by the rough laws.
      log_cut: logarithm of the tilted mass that may be outside of it.
      up_tilt, down_tilt: c of the bounds of what leaves the window.
      ranges: for each step the lowest and highest loss needed.
      weights: for each step how often a loss occurs where the sum is as large as
        epsilon, over the count: one number for each cell of the rough law.
    """

    tilt: float
    epsilon: float
    log_delta: float
    slope: float
    yield_: float
    width: float
    low: float
    high: float
    log_cut: float
    up_tilt: float
    down_tilt: float
    ranges: tuple[tuple[float, float], ...]
    weights: tuple[np.ndarray, ...]


def rough_points(shift: float, rate: float, num_episodes: float) -> np.ndarray:
    """Losses of either sign, 0 among them, at which a step is looked at first."""
    expected = num_episodes * rate
    draws = min(num_episodes, expected + 8 * math.sqrt(expected) + 3)
    move = min(shift * draws, 100.0)
    furthest = move * (0.5 * move + _LARGEST_DEVIATION)
    gaussian = np.linspace(0.0, furthest, 45 + 2 * int(move))[1:]
    positive = np.union1d(_ROUGH_LOSSES, gaussian)
    return np.concatenate([-positive[::-1], [0.0], positive])


def rough_law(points: np.ndarray, own: Tails, other: Tails) -> RoughLaw:
    """The law of one step's loss by cells between the points, and the atom at 0."""
    law = fine_law(points, own, other)
    mass, loss = merged_losses(points, law)
    zero = int(np.searchsorted(points, 0.0))
    above = law.above + np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    return RoughLaw(
        np.insert(mass, zero, law.atom),
        np.insert(loss, zero, 0.0),
        np.insert(points, zero, 0.0),
        np.insert(above, zero, above[zero]),
    )


def log_moment(law: RoughLaw, tilts: np.ndarray) -> np.ndarray:
    """``log E_P exp(c L)`` at many c, as accurate near 0 as the law."""
    alive = law.mass > 0
    mass, loss = law.mass[alive], law.loss[alive]
    exponent = tilts[:, None] * loss
    largest = exponent.max(-1, initial=0.0)
    # e^x - 1 keeps the digits of small moments, e^(x - largest) does not overflow.
    near = largest <= 600
    small = np.expm1(exponent[near]) @ mass
    result = np.empty(len(tilts))
    result[near] = np.log1p(np.maximum(small, -1 + 1e-15))
    largest = largest[~near]
    large = np.exp(exponent[~near] - largest[:, None]) @ mass
    result[~near] = np.log(large) + largest
    return result


def log_weight(tilt: np.ndarray | float) -> np.ndarray:
    """``log max_x e^{-c x}(1 - e^{-x})``: what an excess of the loss gains at most."""
    c = np.asarray(tilt, np.float64)
    return -np.log1p(c) - c * np.log1p(1 / c)


def plan_direction(
    laws: Sequence[RoughLaw],
    counts: Sequence[float],
    target: Target,
    scale: float,
    known: Estimate | None,
    spare: float = 0.0,
) -> Direction:
    """Chooses the tilt and the range of one direction.

    Args:
      laws: of the steps, in this direction.
      counts: of the steps.
      target: of the setting.
      scale: shrinks all errors.
      known: what an earlier round found.
      spare: where epsilon is asked for, nats by which it may be wrong, because this
        direction is as far below the other one; where delta is asked for, a value of
        ``-log(delta)`` that need only be exceeded.
    """
    at = known.epsilon if known else target.epsilon
    goal = known.log_delta if known else target.log_delta
    if goal is None:
        assert target.epsilon is not None
        # A first estimate of delta may be much too large.
        exponents = _sum_moments(laws, counts, _TILTS) + log_weight(_TILTS)
        goal = min(float(np.min(exponents - _TILTS * target.epsilon)), 0.0)
        # float64 has nothing smaller (no loss may be as large as epsilon at all)
        goal = max(goal - _FIRST_RESERVE, _LEAST_LOG_DELTA)
    # What is so large that it alone is rarer than delta is not waited for.
    needed = target.proportion if target.log_delta is None else 0.02
    if known and target.log_delta is not None:
        wanted = max(target.floor, target.proportion * known.epsilon)
        needed = min(known.slope * wanted, 1.0)
    log_cut = math.log(_RARE_SHARE * needed * max(scale, 0.1))
    whole = laws
    laws = [
        _up_to(law, _top(law, t, log_cut + goal))
        for law, t in zip(whole, counts, strict=True)
    ]
    exponents = _sum_moments(laws, counts, _TILTS) + log_weight(_TILTS)
    if at is not None:
        chernoff = exponents - _TILTS * at
        best = int(np.argmin(chernoff))
        if target.log_delta is None and spare > 0:
            # the smallest tilt that shows that this direction does not matter
            best = int(np.argmax(chernoff <= max(-spare, chernoff[best])))
        epsilon = at
    else:
        bound = (exponents - goal) / _TILTS
        best = int(np.argmin(bound))
        epsilon = max(float(bound[best]), 0.0)
    tilt = float(_TILTS[best])
    if known:
        # A smaller tilt keeps rare large losses rare, and the window short.
        tilt = min(tilt, known.slope)
    if target.log_delta is not None:
        enough = max(target.floor, target.proportion * epsilon, spare)
        tilt = min(tilt, _STEEPEST / enough)
    here = float(_sum_moments(laws, counts, np.array([tilt]))[0])
    bound = min(here - tilt * epsilon + float(log_weight(tilt)), 0.0)
    log_delta, slope = bound, tilt
    if known:
        log_delta, slope = known.log_delta, max(known.slope, 0.1 * tilt)
    elif target.log_delta is not None:
        log_delta = target.log_delta
    if target.log_delta is None:
        # a first guess of delta is not worth more
        share = target.proportion if known else max(target.proportion, 0.01)
        width = share / slope
    else:
        width = max(target.floor, target.proportion * epsilon)
    if spare > 0:
        width = max(width, spare if target.log_delta is not None else 1 / slope)
    yield_ = min(log_delta - bound, 0.0)
    log_cut = math.log(_CUT_SHARE * scale * min(slope * width, 1.0))
    width *= scale
    ranges = [
        (_bottom(law, t, tilt, log_cut + yield_), float(law.edges[-1]))
        for law, t in zip(laws, counts, strict=True)
    ]
    ups, downs = tilt * (1 + _TILT_CHANGES), tilt * (1 - _TILT_CHANGES)
    up, down = _sum_moments(laws, counts, ups), _sum_moments(laws, counts, downs)
    # Window of the sum by Chernoff's bound, to either side.
    highs = (up - here - log_cut - yield_) / (ups - tilt)
    lows = (here - down + log_cut + yield_) / (tilt - downs)
    i, j = int(np.argmin(highs)), int(np.argmax(lows))
    return Direction(
        tilt=tilt,
        epsilon=epsilon,
        log_delta=log_delta,
        slope=slope,
        yield_=yield_,
        width=width,
        low=float(lows[j]),
        high=float(highs[i]),
        log_cut=log_cut + yield_,
        up_tilt=float(ups[i]),
        down_tilt=float(downs[j]),
        ranges=tuple(ranges),
        weights=tuple(
            _importance(law, t, tilt, yield_, len(full.mass))
            for law, t, full in zip(laws, counts, whole, strict=True)
        ),
    )


def _sum_moments(
    laws: Sequence[RoughLaw], counts: Sequence[float], tilts: np.ndarray
) -> np.ndarray:
    total = np.zeros(len(tilts))
    for law, count in zip(laws, counts, strict=True):
        total += count * log_moment(law, tilts)
    return total


def _top(law: RoughLaw, count: float, log_mass: float) -> float:
    """Loss above which the mass of all steps is at most this."""
    above = np.log(np.maximum(law.above * count, 1e-300))
    reached = np.flatnonzero(above <= log_mass)
    if not len(reached) or reached[0] == 0:
        return float(law.edges[-1])
    i = reached[0]
    drop = max(above[i - 1] - above[i], 1e-300)
    # The logarithm of a tail is concave, or the tail ends in this cell.
    share = 1.0 if drop > 20 else math.sqrt(min((above[i - 1] - log_mass) / drop, 1.0))
    return float(law.edges[i - 1] + share * (law.edges[i] - law.edges[i - 1]))


def _up_to(law: RoughLaw, top: float) -> RoughLaw:
    """The law without what is above ``top``."""
    last = max(int(np.searchsorted(law.edges, top)), 1)
    return RoughLaw(
        law.mass[:last],
        np.minimum(law.loss[:last], top),
        np.append(law.edges[:last], top),
        law.above[: last + 1],
    )


def _bottom(law: RoughLaw, count: float, tilt: float, log_mass: float) -> float:
    """Loss below which the tilted mass of all steps is at most this."""
    below = np.log(np.maximum(np.cumsum(_tilted(law, tilt)) * count, 1e-300))
    return float(law.edges[min(int(np.searchsorted(below, log_mass)), len(below) - 1)])


def _importance(
    law: RoughLaw, count: float, tilt: float, yield_: float, size: int
) -> np.ndarray:
    """How often a loss occurs where the sum is as large as epsilon, over the count.

    The tilted law, but where delta is far below Chernoff's bound a single large loss
    makes up the sum: such a loss may occur as often as once.
    """
    weight = _tilted(law, tilt)
    rare = np.minimum(weight * math.exp(min(-yield_, 600.0)), 1 / count)
    often = count * float(rare[rare > weight].sum())
    rare *= min(1.0, _LARGE_LOSSES / max(often, 1e-300))
    return np.pad(np.maximum(weight, rare), (0, size - len(weight)))


def _tilted(law: RoughLaw, tilt: float) -> np.ndarray:
    exponent = tilt * law.loss
    alive = law.mass > 0
    weight = np.log(np.where(alive, law.mass, 1.0)) + np.where(alive, exponent, -np.inf)
    weight = np.exp(weight - weight.max())
    return weight / weight.sum()


def bulk(law: RoughLaw) -> float:
    """Where a spike is: the median loss, or 0 if an atom there is heavier."""
    middle = int(np.searchsorted(np.cumsum(law.mass), 0.5))
    middle = min(middle, len(law.loss) - 1)
    atom = float(law.mass[law.loss == 0].max(initial=0.0))
    return 0.0 if atom >= law.mass[middle] else float(law.loss[middle])

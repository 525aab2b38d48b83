"""Convex bounds, from above and below, of an epoch's profile under replacement.

The contribution at the secret step of the epoch flips its sign.

With ``lambda = u / 2s`` and S the sum of j terms ``2 sinh(s z)``, z ~ N(-lambda, 1),

    D_t(e^u) = e^{u/2 - s²/2} E(S - y)_+ / t,   y = 2 sinh(u/2) e^{s²/2} (t - j).

For a few u `numerics.signed_sums` bounds the mean from both sides; between them
`numerics.exponential_means`, as ``e^{j lambda²/2} E(S - y)_+`` at fixed y is a mean of
``(S - y)_+ e^{-lambda (z_1 + ... + z_j)}``, z ~ N(0, 1). Then a convex function is put
above, or below, all of ``D_t``: piecewise linear, the profile of a finite pair.

Reference: docs/proofs.md, "Random allocation".
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.exponential_means import bounds_between
from jaxdp_episodic.numerics.signed_sums import SignedSumBound, sinh_sum

# Distance of the nodes in deviations of ``z_1 + ... + z_j``; relative error allowed to
# a chord between them where log D is above `_USUAL`; by how many times more at
# `_LEAST`, beyond which there are no nodes; and the largest number of nodes.
_APART, _CHORD, _LOOSEST, _USUAL, _LEAST, _MOST = 0.28, 1e-5, 1e3, -9.0, -42.0, 400
# Relative error allowed to D where log D is above `_BULK`, above `_TAIL`, and below;
# by how many times more where D falls steeply, above and below `_RARE`; and the number
# of cells of the sums for it: at first, least and largest.
_WITHIN, _BULK, _TAIL = (1.5e-5, 2.5e-5, 1e-3), -7.0, -30.0
_STEEP, _RARE = (10.0, 5.0), -20.0
_CELLS, _FEWEST, _MOST_CELLS = 640, 256, 1024
# Losses in each cell between two nodes; how many nodes on either side a bound uses.
_FINE, _AROUND = 128, 3
# Relative rounding error of what is computed from a mean of `signed_sums`.
_ROUNDING = 1e-11
_CACHED = 256
_BOTH = (False, True)


class PiecewiseLinearPair(NamedTuple):
    """The pair of a profile that is piecewise linear in g, r = 1; symmetric.

    Attributes:
      loss: (n,) u = log g of the corners, from 0.
      profile: at the corners; 0 at the last.
      scaled: ``g Q(L >= u)`` there.
      infinite: the profile beyond the last corner, which is taken off.
    """

    loss: np.ndarray
    profile: np.ndarray
    scaled: np.ndarray
    infinite: float


class _Node(NamedTuple):
    """A loss u at which D is bounded from both sides."""

    u: float
    below: SignedSumBound
    above: SignedSumBound


@functools.lru_cache(_CACHED)
def antipodal_bounding_pair(
    bins: int, count: int, shift: float, *, above: bool
) -> PiecewiseLinearPair:
    """The pair whose profile bounds that of one setting, from above or from below."""
    u, low, high, coarse = profile_bounds(bins, count, shift)
    g, high = np.exp(u), np.minimum.accumulate(np.minimum(high, 1.0))  # D falls from 1
    if above:
        # D is convex in g: chords through upper bounds are upper bounds.
        value = high * (1 + _ROUNDING)
        return _pair_of(*_convex(g, value), float(value[-1]))
    value = np.maximum(low, _between_nodes(g, low, high, coarse)) * (1 - _ROUNDING)
    g, value = _convex(*_below_chords(g, value, high * (1 + _ROUNDING)))
    # Lowered by the rounding error of the pair's mass.
    return _pair_of(g, value * (1 - _ROUNDING), 0.0)


def _mirrored(g: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Extended to all 1/g, increasing, by ``D(g) = 1 - g + g D(1/g)``; lines stay."""
    z = np.concatenate([1 / g[:0:-1], g])
    return z, np.concatenate([(1 - 1 / g + value / g)[:0:-1], value])


@functools.lru_cache(_CACHED)
def profile_bounds(
    bins: int, count: int, shift: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Losses u, (n,) from 0, bounds of D there, and which u are nodes."""
    nodes = _nodes(bins, count, shift)
    last = len(nodes) - 1
    rows, at = [], 0
    for i in range(last):
        end = i == last - 1
        u = np.linspace(nodes[i].u, nodes[i + 1].u, _FINE + 1)[: _FINE + end]
        rows.append((u, *_cell_bounds(nodes, i, u, bins, count, shift)))
        at += len(u)
    u, low, high = (np.concatenate(part) for part in zip(*rows, strict=True))
    coarse = np.append(np.arange(0, at - 1, _FINE), at - 1)
    return u, low, high, coarse


def _scale(u: np.ndarray | float, bins: int, shift: float):
    """What a mean of S is multiplied with."""
    return np.exp(0.5 * (u - shift * shift)) / bins


def _hinge(u: np.ndarray | float, idle: float, shift: float):
    return 2 * np.sinh(0.5 * u) * math.exp(0.5 * shift * shift) * idle


def _nodes(bins: int, count: int, shift: float) -> list[_Node]:
    """Nodes as far apart as the bounds between them allow, until D is negligible."""
    nodes: list[_Node] = []
    u, last, step, slope, cells = 0.0, 0.0, 0.0, 0.0, _CELLS
    whole = bins == count  # the hinge is always 0
    # Standard deviation of the loss at much noise.
    core = 2 * shift * math.sqrt(count) / bins
    while True:
        hinge = float(_hinge(u, bins - count, shift))
        setting = count, shift, 0.5 * u / shift, hinge
        below, above = (
            sinh_sum(*setting, above=up, cells=cells, at_hinge=whole) for up in _BOTH
        )
        nodes.append(_Node(u, below, above))
        least, gain = (
            float(sums.gain(np.array([hinge]), above=up)[0])
            for sums, up in ((below, False), (above, True))
        )
        log_d = math.log(gain) + math.log(float(_scale(u, bins, shift)))
        # D falls: bounds that rise again are due to what the sums truncate.
        is_lost = last < _TAIL and log_d >= last
        if log_d < _LEAST or is_lost or len(nodes) >= _MOST:
            return nodes
        # D falls by half of what it is below 1, in g, at 1.
        slope = (last - log_d) / step if step else 0.5 * math.expm1(max(-log_d, 0.0))
        slope = max(slope, 1e-3)
        # An error of D moves the epsilon of one epoch by the error over the slope; but
        # that of many epochs by the error itself.
        within = _WITHIN[(log_d < _BULK) + (log_d < _TAIL)]
        if log_d < _BULK:
            within *= min(max(1.0, u * slope), _STEEP[log_d < _RARE])
        cells *= math.sqrt(max((1 - least / gain) / within, 1e-3))
        cells = int(min(max(cells, _FEWEST), _MOST_CELLS))
        share = min(max((log_d - _USUAL) / (_LEAST - _USUAL), 0.0), 1.0)
        chord = max(_CHORD * _LOOSEST**share, 0.5 * within)
        step = max(
            # the error of eight nodes' polynomial is of the eighth order
            2 * shift * _APART / math.sqrt(count) * (chord / _CHORD) ** 0.125,
            math.sqrt(8 * chord / (slope * (1 + slope))),
        )
        # With few taken steps among many D falls sooner.
        step = step if whole else min(step, max(core, 0.5 * u))
        u, last = u + step, log_d


def _cell_bounds(
    nodes: list[_Node], cell: int, u: np.ndarray, bins: int, count: int, shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of D at u between two nodes."""
    hinge = _hinge(u, bins - count, shift)
    tilt = 0.5 * u / shift
    middle = 0.5 * float(tilt[0] + tilt[-1])
    # Nodes below 0 are the mirror images of those above.
    numbers = range(cell - _AROUND, min(cell + 2 + _AROUND, len(nodes)))
    numbers = [i for i in numbers if -i < len(nodes)]
    places, low, high = [], [], []
    for i in numbers:
        node = nodes[abs(i)]
        place = 0.5 * node.u / shift
        sign = 1 if i >= 0 else -1
        bounds = [
            sums.gain(sign * hinge, above=up)
            for sums, up in ((node.below, False), (node.above, True))
        ]
        if i < 0:
            # E(-S - y)_+ = E(S + y)_+ - E S - y
            mean = -2 * count * math.exp(0.5 * shift**2) * math.sinh(shift * place)
            slack = _ROUNDING * (abs(mean) + hinge)
            bounds = [
                np.maximum(bound - mean - hinge + s * slack, 0.0)
                for bound, s in zip(bounds, (-1, 1), strict=True)
            ]
        places.append(sign * place)
        low.append(bounds[0])
        high.append(bounds[1])
    where = np.array(places)
    # Scaled so that F is about as large at both ends of the cell.
    away = where - middle
    one = numbers.index(cell)
    ends = [math.log(max(float(high[one + i][len(u) // 2]), 1e-300)) for i in (0, 1)]
    gap = where[one + 1] - where[one]
    center = -(ends[1] - ends[0]) / gap - count * middle

    def exponent(away: np.ndarray) -> np.ndarray:
        return away * (count * middle + 0.5 * count * away + center)

    factor = np.exp(np.minimum(exponent(away), 600.0))[:, None]
    found = bounds_between(
        where, np.stack(low) * factor, np.stack(high) * factor, one, tilt
    )
    back = _scale(u, bins, shift) * np.exp(-exponent(tilt - middle))
    return found[0] * back, found[1] * back


# --- Convex functions on either side ---


def _between_nodes(
    g: np.ndarray, low: np.ndarray, high: np.ndarray, coarse: np.ndarray
) -> np.ndarray:
    """Lower bounds at g by lines through nodes, extended to the next one."""
    z, under, over = g[coarse], low[coarse], high[coarse]
    cell = np.clip(np.searchsorted(z, g, side="right") - 1, 0, len(z) - 2)
    slope = (under[1:] - over[:-1]) / np.diff(z)  # of lines that go on to the right
    back = (over[1:] - under[:-1]) / np.diff(z)  # and to the left
    result = np.zeros_like(g)
    known = cell > 0
    at = cell[known]
    result[known] = under[at] + slope[at - 1] * (g[known] - z[at])
    known = cell < len(z) - 2
    at = cell[known] + 1
    line = under[at] + back[at] * (g[known] - z[at])
    result[known] = np.maximum(result[known], line)
    return result


def _below_chords(
    g: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Corners of a function below D, from 1 on: two lines in each cell."""
    size = len(g)
    g, low = _mirrored(g, low)
    high = _mirrored(g[size - 1 :], high)[1]
    g, low, high = (array[size - 3 :] for array in (g, low, high))
    # lines through two neighbouring places, extended to the right, and to the left
    slope = (low[1:] - high[:-1]) / np.diff(g)
    back = (high[1:] - low[:-1]) / np.diff(g)
    left, right, from_left, from_right = g[2:-2], g[3:-1], slope[1:-2], back[3:]
    bend = from_right - from_left
    with np.errstate(divide="ignore", invalid="ignore"):
        x = left + (low[2:-2] - low[3:-1] + from_right * (right - left)) / bend
    x = np.where(bend > 0, np.clip(x, left, right), right)
    y = np.maximum(
        low[2:-2] + from_left * (x - left), low[3:-1] + from_right * (x - right)
    )
    # In the last cell, and beyond it, a single line down to 0.
    end = g[-2] + low[-2] / -slope[-2] if slope[-2] < 0 else math.inf
    places = np.concatenate([g[2:-1], x, [end]])
    values = np.concatenate([low[2:-1], np.maximum(y, 0.0), [0.0]])
    order = np.argsort(places, kind="stable")
    return places[order], values[order]


def _convex(g: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the largest convex function below points and their mirror images."""
    z, y = _mirrored(g, value)
    corners: list[int] = []
    places, values = z.tolist(), y.tolist()
    for i, (place, top) in enumerate(zip(places, values, strict=True)):
        while len(corners) > 1:
            a, b = corners[-2:]
            rise, run = values[b] - values[a], places[b] - places[a]
            if rise * (place - places[b]) < (top - values[b]) * run:
                break
            corners.pop()
        if not corners or place > places[corners[-1]]:
            corners.append(i)
    kept = np.array([i for i in corners if i >= len(g) - 1])
    # 1 itself need not be a corner
    x, top = z[kept], y[kept]
    if x[0] > 1:
        before = max(i for i in corners if z[i] < 1)
        share = (1 - z[before]) / (x[0] - z[before])
        at_one = y[before] + share * (top[0] - y[before])
        x, top = np.append(1.0, x), np.append(at_one, top)
    return x, top


def _pair_of(g: np.ndarray, value: np.ndarray, infinite: float) -> PiecewiseLinearPair:
    """The pair whose profile is the convex decreasing function with these corners.

    Given that the loss is finite; with r < 1 that bounds a little from above.
    """
    value = np.maximum(value - infinite, 0.0) / (1 - infinite)
    slope = np.maximum(-np.diff(value) / np.diff(g), 0.0)
    slope = np.maximum.accumulate(slope[::-1])[::-1].astype(np.longdouble)
    gained = np.append(slope * np.diff(g.astype(np.longdouble)), 0.0)
    profile = np.cumsum(gained[::-1])[::-1]
    scaled = g * np.append(slope[0], slope)
    return PiecewiseLinearPair(
        np.log(g), profile.astype(float), scaled.astype(float), infinite
    )

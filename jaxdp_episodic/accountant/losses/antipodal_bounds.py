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
import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.antipodal_cells import (
    ROUNDING,
    Epoch,
    Node,
    aligned_step,
    cell_bounds,
)
from jaxdp_episodic.accountant.numerics.signed_sums import sinh_sum

# Distance of nodes, in standard deviations of ``z_1 + ... + z_j``, at which the
# polynomial through eight of them is off by `_CHORD_ERROR`, relative.
_NODE_DISTANCE = 0.28
# Relative error allowed to a chord between nodes where log D is above `_USUAL_LOG_D`,
# and by how many times more at `_LEAST_LOG_D`.
_CHORD_ERROR = 1e-5
_LOOSEST_CHORD = 1e3
_USUAL_LOG_D = -9.0
_LEAST_LOG_D = -42.0  # no nodes where log D is below it
_MOST_NODES = 400
# Relative error allowed to D at nodes where log D is above each of the levels, and
# below the last.
_LEVELS = (-7.0, -30.0, -37.0)
_ERROR_AT_NODES = (1.5e-5, 2.5e-5, 2e-4, 1e-3)
# The same between nodes, over that at nodes, above the first level and below it.
_BETWEEN_ABOVE = 6.0
_BETWEEN_BELOW = 3.5
# By how many times more at most, below the first level, where D falls steeply.
_STEEP_AT_NODES = 8.0
_STEEP_BETWEEN = 14.0
# A cell is halved where its bounds are further apart than that, and than this times
# what they are at both of its nodes; and how often.
_OVER_NODES = 1.7
_HALVINGS = 2
_CELLS_IN_BETWEEN = 0.55  # of the sums at a node in the middle, over those at its ends
# Below this log D bounds that rise again are due to what the sums truncate.
_TRUNCATION_LOG_D = -30.0
# Number of cells of the sums: at first, least and largest.
_CELLS = 640
_FEWEST_CELLS = 256
_MOST_CELLS = 1024
# Where the threshold moves with g (`antipodal_cells.aligned_bounds`): by how many times
# nodes must be further apart for it; by how much their distance grows from one to the
# next, and how far log D falls.
_WORTH_ALIGNING = 2.5
_GROWTH = 1.6
_MOST_FALL = 6.0
# There: a chord's error, and that of the sums, over what is allowed; largest number of
# cells of the sums.
_ALIGNED_CHORD = 0.1
_ALIGNED_SUMS = 0.7
_MOST_ALIGNED_CELLS = 1280
# Losses between two nodes: least and largest number; and the fall of log D from one to
# the next, over the root of the error allowed.
_FEWEST_LOSSES = 128
_MOST_LOSSES = 1024
_FALL = 0.25
# Over how many losses lines below D are drawn.
_BASES = (1, 2, 4, 8, 16, 32)
_LAST_RATIO = (
    1e3  # of the g at which lower bounds are 0, at the latest, to the last one
)
_LEAST_SLOPE = 1e-300  # of lower bounds, positive
_CACHED = 256  # settings


class PiecewiseLinearPair(NamedTuple):
    """The pair of a profile that is piecewise linear in g, r = 1; symmetric.

    Attributes:
      loss: (n,) u = log g of the corners, from 0.
      profile: at the corners; 0 at the last.
      scaled: ``g Q(L >= u)`` there.
      infinite: the profile beyond the last corner, which is subtracted.
    """

    loss: np.ndarray
    profile: np.ndarray
    scaled: np.ndarray
    infinite: float


@functools.lru_cache(_CACHED)
def antipodal_bounding_pair(
    steps: int, count: int, shift: float, *, above: bool
) -> PiecewiseLinearPair:
    """The pair whose profile bounds that of one setting, from above or from below."""
    u, low, high, coarse = profile_bounds(steps, count, shift)
    # D falls from 1; what is not a number is no bound.
    g, low, high = np.exp(u), np.fmax(low, 0.0), np.fmin(high, 1.0)
    high = np.minimum.accumulate(high)
    if above:
        # D is convex in g: chords through upper bounds are upper bounds.
        value = high * (1 + ROUNDING)
        return _pair_of(*_convex(g, value), float(value[-1]))
    value = np.maximum(low, _between_nodes(g, low, high, coarse)) * (1 - ROUNDING)
    g, value = _convex(*_below_chords(g, value, high * (1 + ROUNDING)))
    # Lowered by the rounding error of the pair's mass.
    return _pair_of(g, value * (1 - ROUNDING), 0.0)


def _mirrored(g: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Extended to all 1/g, increasing, by ``D(g) = 1 - g + g D(1/g)``; lines stay."""
    z = np.concatenate([1 / g[:0:-1], g])
    return z, np.concatenate([(1 - 1 / g + value / g)[:0:-1], value])


@functools.lru_cache(_CACHED)
def profile_bounds(
    steps: int, count: int, shift: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Losses u, (n,) from 0, bounds of D there, and the indices of the nodes."""
    epoch = Epoch(steps, count, shift)
    nodes = _nodes(epoch)
    rows, coarse = [], [0]
    for i, (a, b) in enumerate(itertools.pairwise(nodes)):
        end = i == len(nodes) - 2
        fall = max(a.log_d - b.log_d, 0.0)
        within = _allowed(b.u, a.log_d, fall / (b.u - a.u)).at_node
        number = math.ceil(fall / (_FALL * math.sqrt(within)))
        number = min(max(number, _FEWEST_LOSSES), _MOST_LOSSES)
        u = np.linspace(nodes[i].u, nodes[i + 1].u, number + 1)[: number + end]
        rows.append((u, *cell_bounds(nodes, i, u, epoch)))
        coarse.append(coarse[-1] + number)
    u, low, high = (np.concatenate(part) for part in zip(*rows, strict=True))
    return u, low, high, np.array(coarse)


class _Allowed(NamedTuple):
    """Relative errors of D at a loss: at a node, and between two of them."""

    at_node: float
    between: float


def _allowed(u: float, log_d: float, slope: float) -> _Allowed:
    """An error of D moves the epsilon of one epoch by the error over the slope.

    But that of many epochs by the error itself.
    """
    within = _ERROR_AT_NODES[sum(log_d < level for level in _LEVELS)]
    if log_d >= _LEVELS[0]:
        return _Allowed(within, _BETWEEN_ABOVE * within)
    steep = max(1.0, u * slope)
    return _Allowed(
        within * min(steep, _STEEP_AT_NODES),
        _BETWEEN_BELOW * within * min(steep, _STEEP_BETWEEN),
    )


def _node_at(u: float, epoch: Epoch, cells: int, *, is_whole: bool) -> Node:
    """Bounds of D at u by sums, computed with that many cells."""
    threshold = float(epoch.threshold(u))
    setting = epoch.count, epoch.shift, 0.5 * u / epoch.shift, threshold
    below, above = (
        sinh_sum(*setting, above=up, cells=cells, at_threshold=not is_whole)
        for up in (False, True)
    )
    gain = float(above.gain(np.array([threshold]), above=True)[0])
    log_d = math.log(gain) + math.log(float(epoch.scale(u)))
    return Node(u, below, above, is_whole, log_d)


def _nodes(epoch: Epoch) -> list[Node]:
    """Nodes as far apart as bounds between them allow, until D is negligible."""
    steps, count, shift = epoch
    nodes: list[Node] = []
    every: list[int] = []
    # Inferring these around the loop takes the type checker seconds.
    u: float
    last: float
    step: float
    cells: int
    u, last, step, cells = 0.0, 0.0, 0.0, _CELLS
    # Standard deviation of the loss at much noise.
    deviation = 2 * shift * math.sqrt(count) / steps
    near = 2 * shift * _NODE_DISTANCE / math.sqrt(count)
    is_aligned = (
        aligned_step(epoch, 1 / deviation, _ALIGNED_CHORD * _ERROR_AT_NODES[0])
        > _WORTH_ALIGNING * near
    )
    while True:
        # Where no step is idle the threshold is always 0.
        node = _node_at(u, epoch, cells, is_whole=is_aligned or epoch.idle > 0)
        log_d = node.log_d
        nodes.append(node)
        every.append(cells)
        # D falls: bounds that rise again are due to what the sums truncate.
        is_lost = last < _TRUNCATION_LOG_D and log_d >= last
        if log_d < _LEAST_LOG_D or is_lost or len(nodes) >= _MOST_NODES:
            return _refined(nodes, every, epoch)
        # D falls by half of what it is below 1, in g, at 1.
        slope = (last - log_d) / step if step else 0.5 * math.expm1(max(-log_d, 0.0))
        slope = max(slope, 1e-3)
        within = _allowed(u, log_d, slope).at_node
        threshold = np.array([float(epoch.threshold(u))])
        least = node.below.gain(threshold, above=False) / node.above.gain(
            threshold, above=True
        )
        most, asked = (
            (_MOST_ALIGNED_CELLS, _ALIGNED_SUMS) if is_aligned else (_MOST_CELLS, 1.0)
        )
        finer = math.sqrt(max((1 - float(least[0])) / (asked * within), 1e-3))
        cells = int(min(max(cells * finer, _FEWEST_CELLS), most))
        share = min(
            max((log_d - _USUAL_LOG_D) / (_LEAST_LOG_D - _USUAL_LOG_D), 0.0), 1.0
        )
        chord = max(_CHORD_ERROR * _LOOSEST_CHORD**share, 0.5 * within)
        near: float = max(
            # the error of eight nodes' polynomial is of the eighth order
            2
            * shift
            * _NODE_DISTANCE
            / math.sqrt(count)
            * (chord / _CHORD_ERROR) ** 0.125,
            math.sqrt(8 * chord / (slope * (1 + slope))),
        )
        # With few steps of the unit among many D falls sooner.
        near = near if not epoch.idle else min(near, max(deviation, 0.5 * u))
        far = aligned_step(epoch, slope, _ALIGNED_CHORD * within)
        is_aligned = far > _WORTH_ALIGNING * near
        if is_aligned:
            near = max(near, min(far, _GROWTH * max(step, near), _MOST_FALL / slope))
        step = near
        u, last = u + step, log_d


def _refined(nodes: list[Node], cells: list[int], epoch: Epoch) -> list[Node]:
    """With more nodes in the middle of cells whose bounds are too far apart."""
    for _ in range(_HALVINGS):
        pairs = list(itertools.pairwise(zip(nodes, cells, strict=True)))
        more = []
        for i, ((a, of_a), (b, of_b)) in enumerate(pairs):
            middle = 0.5 * (a.u + b.u)
            low, high = cell_bounds(nodes, i, np.array([a.u, middle, b.u]), epoch)
            slope = max(a.log_d - b.log_d, 0.0) / (b.u - a.u)
            allowed = _allowed(middle, 0.5 * (a.log_d + b.log_d), slope).between
            # Another node does not reduce the error of the sums themselves.
            with np.errstate(divide="ignore", invalid="ignore"):
                off = high / low - 1
            limit = max(allowed, _OVER_NODES * float(np.fmax(off[0], off[2])))
            if (
                max(b.log_d - _LEAST_LOG_D, a.log_d - _TRUNCATION_LOG_D) > 0
                and not off[1] <= limit
            ):
                new = max(int(_CELLS_IN_BETWEEN * max(of_a, of_b)), _FEWEST_CELLS)
                is_whole = a.is_whole and b.is_whole
                more.append((_node_at(middle, epoch, new, is_whole=is_whole), new))
        if not more or len(nodes) >= _MOST_NODES:
            break
        both = sorted(
            [*zip(nodes, cells, strict=True), *more], key=lambda one: one[0].u
        )
        nodes, cells = [one for one, _ in both], [number for _, number in both]
    return nodes


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
    # D is convex: its slope at each g is at least that of any chord ending there, and
    # at most that of any chord starting there.
    slope, back = np.full(len(g), -np.inf), np.full(len(g), np.inf)
    for base in (base for base in _BASES if base < len(g)):
        run = g[base:] - g[:-base]
        slope[base:] = np.fmax(slope[base:], (low[base:] - high[:-base]) / run)
        back[:-base] = np.fmin(back[:-base], (high[base:] - low[:-base]) / run)
    first = size - 1
    left, right = g[first:-2], g[first + 1 : -1]
    start, end = low[first:-2], low[first + 1 : -1]
    from_left, from_right = slope[first:-2], back[first + 1 : -1]
    bend = from_right - from_left
    with np.errstate(divide="ignore", invalid="ignore"):
        x = left + (start - end + from_right * (right - left)) / bend
    x = np.where(bend > 0, np.clip(x, left, right), right)
    y = np.maximum(start + from_left * (x - left), end + from_right * (x - right))
    # In the last cell, and beyond it, a single line down to 0; a steeper one is lower.
    steepest = max(
        -float(slope[-2]), float(low[-2] / (_LAST_RATIO * g[-1])), _LEAST_SLOPE
    )
    last = g[-2] + low[-2] / steepest
    places = np.concatenate([g[first:-1], x, [last]])
    values = np.concatenate([low[first:-1], np.maximum(y, 0.0), [0.0]])
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

"""Convex bounds, from above and below, of an epoch's profile under replace_one."""

# Reference: docs/proofs.md, "Random allocation".

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
_CHORD_ERROR = 1e-5
# Relative error of D that is aimed at; by how many times more at most where D falls
# steeply, as an epsilon moves by the error over the slope; and by how many times more
# below each of these levels of log D. A third takes three times as long.
_ERROR = 1.5e-4
_STEEPEST = 8.0
_LEVELS = (-30.0, -37.0)
_LOOSER = 8.0
_LEAST_LOG_D = -42.0  # no nodes where log D is below it
_MOST_NODES = 400
# Below this log D bounds that rise again are due to what the sums truncate.
_TRUNCATION_LOG_D = -30.0
# Number of cells of the sums: at first, least and largest.
_CELLS = 320
_FEWEST_CELLS = 96
_MOST_CELLS = 1024
# Where the threshold moves with g (`antipodal_cells.aligned_bounds`): by how many times
# nodes must be further apart for it; by how much their distance grows from one to the
# next, and how far log D falls.
_WORTH_ALIGNING = 2.5
_GROWTH = 1.6
_MOST_FALL = 6.0
# There: a chord's error over what is allowed.
_ALIGNED_CHORD = 0.1
# Losses between two nodes: least and largest number; and the fall of log D from one to
# the next, over the root of the error allowed.
_FEWEST_LOSSES = 32
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
    """The pair of a profile that is piecewise linear in g, r = 1; symmetric."""

    loss: np.ndarray  # (n,) u = log g of the corners, from 0
    profile: np.ndarray  # at the corners; 0 at the last
    scaled: np.ndarray  # ``g Q(L >= u)`` there
    infinite: float  # the profile beyond the last corner, which is subtracted


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
        within = _allowed(b.u, a.log_d, fall / (b.u - a.u))
        number = math.ceil(fall / (_FALL * math.sqrt(within)))
        number = min(max(number, _FEWEST_LOSSES), _MOST_LOSSES)
        u = np.linspace(nodes[i].u, nodes[i + 1].u, number + 1)[: number + end]
        rows.append((u, *cell_bounds(nodes, i, u, epoch)))
        coarse.append(coarse[-1] + number)
    u, low, high = (np.concatenate(part) for part in zip(*rows, strict=True))
    return u, low, high, np.array(coarse)


def _allowed(u: float, log_d: float, slope: float) -> float:
    """Relative error of D that a node may have."""
    looser = _LOOSER ** sum(log_d < level for level in _LEVELS)
    return _ERROR * looser * min(max(1.0, u * slope), _STEEPEST)


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
    u, last, step, cells = 0.0, 0.0, 0.0, _CELLS
    # Standard deviation of the loss at much noise.
    deviation = 2 * shift * math.sqrt(count) / steps
    apart = 2 * shift * _NODE_DISTANCE / math.sqrt(count)
    far = aligned_step(epoch, 1 / deviation, _ALIGNED_CHORD * _ERROR)
    is_aligned = far > _WORTH_ALIGNING * apart
    while True:
        # Where no step is idle the threshold is always 0.
        node = _node_at(u, epoch, cells, is_whole=is_aligned or epoch.idle > 0)
        log_d = node.log_d
        nodes.append(node)
        # D falls: bounds that rise again are due to what the sums truncate.
        is_lost = last < _TRUNCATION_LOG_D and log_d >= last
        if log_d < _LEAST_LOG_D or is_lost or len(nodes) >= _MOST_NODES:
            return nodes
        # D falls by half of what it is below 1, in g, at 1.
        slope = (last - log_d) / step if step else 0.5 * math.expm1(max(-log_d, 0.0))
        slope = max(slope, 1e-3)
        within = _allowed(u, log_d, slope)
        threshold = np.array([float(epoch.threshold(u))])
        least = node.below.gain(threshold, above=False)
        off = 1 - float((least / node.above.gain(threshold, above=True))[0])
        cells = int(cells * math.sqrt(max(off / within, 1e-3)))
        cells = min(max(cells, _FEWEST_CELLS), _MOST_CELLS)
        chord = 0.5 * within
        # The error of eight nodes' polynomial is of the eighth order.
        near = max(
            apart * (chord / _CHORD_ERROR) ** 0.125,
            math.sqrt(8 * chord / (slope * (1 + slope))),
        )
        # With few steps of the unit among many D falls sooner.
        near = near if not epoch.idle else min(near, max(deviation, 0.5 * u))
        far = aligned_step(epoch, slope, _ALIGNED_CHORD * within)
        is_aligned = far > _WORTH_ALIGNING * near
        if is_aligned:
            near = max(near, min(far, _GROWTH * max(step, near), _MOST_FALL / slope))
        u, last, step = u + near, log_d, near


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
    """The pair whose profile is the convex decreasing function with these corners."""
    # Given that the loss is finite; with r < 1 that bounds a little from above.
    value = np.maximum(value - infinite, 0.0) / (1 - infinite)
    slope = np.maximum(-np.diff(value) / np.diff(g), 0.0)
    slope = np.maximum.accumulate(slope[::-1])[::-1].astype(np.longdouble)
    gained = np.append(slope * np.diff(g.astype(np.longdouble)), 0.0)
    profile = np.cumsum(gained[::-1])[::-1]
    scaled = g * np.append(slope[0], slope)
    return PiecewiseLinearPair(
        np.log(g), profile.astype(float), scaled.astype(float), infinite
    )

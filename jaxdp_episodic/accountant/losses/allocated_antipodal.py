"""Random allocation where a contribution changes its sign."""
# Under replace_one, and of episodes. Reference: docs/proofs.md, "Random allocation";
# Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 2.

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.allocated import (
    LARGEST_SHIFT,
    SMALLEST_SHIFT,
    AllocatedLoss,
    BoundingLoss,
    by_setting,
    tails_between,
)
from jaxdp_episodic.accountant.losses.allocated_moments import antipodal_excess
from jaxdp_episodic.accountant.losses.gaussian import drawn_tails, inner_exponent
from jaxdp_episodic.accountant.losses.gaussian_mixtures import AntipodalGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import Profile, Tails
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1
from jaxdp_episodic.accountant.numerics.signed_sums import (
    SignedSumBound,
    bounds_between,
    sinh_sum,
)

# Reference: docs/proofs.md, "Random allocation".

# Nodes on either side of a cell that polynomials go through.
_AROUND = 3
# Largest exponent, nats, that scales the means they go through.
_LARGEST_EXPONENT = 250.0
# Relative rounding error of what is computed from a mean of `signed_sums`.
ROUNDING = 1e-11
# Relative rounding error of one operation in float64: 2^-53.
_UNIT_ROUNDOFF = 1.2e-16
# Steepest slope of the threshold in g, in means of Y, and halvings of that range.
_CELL_STEEPEST = 3.0
_HALVINGS = 40


class Node(NamedTuple):
    """A loss u at which D is bounded from both sides."""

    u: float  # ``log g``
    below: SignedSumBound  # bounds of the distribution of S
    above: SignedSumBound  # bounds of the distribution of S
    is_whole: bool  # whether they bound its means at every threshold, not only at y
    log_d: float  # upper bound of log D


class Epoch(NamedTuple):
    """The setting of an epoch's bounds."""

    steps: int
    count: int
    shift: float

    @property
    def idle(self) -> int:
        """Steps of an epoch in which the unit cannot take part."""
        return self.steps - self.count

    def scale(self, u: np.ndarray | float):
        """D over the mean of ``(S - y)_+``."""
        return np.exp(0.5 * (u - self.shift * self.shift)) / self.steps

    def threshold(self, u: np.ndarray | float):
        """y, of S."""
        return 2 * np.sinh(0.5 * u) * math.exp(0.5 * self.shift**2) * self.idle

    def rounding(self, u: float) -> float:
        """Bound of the relative rounding error of `scale` and `threshold`."""
        return _UNIT_ROUNDOFF * (16 + self.shift**2 + 2 * u)


def cell_bounds(
    nodes: list[Node], cell: int, u: np.ndarray, epoch: Epoch
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of D, lower and upper, at u between two nodes."""
    low, high = polynomial_bounds(nodes, cell, u, epoch)
    if nodes[cell].is_whole and nodes[cell + 1].is_whole:
        below, above = aligned_bounds(nodes, cell, u, epoch)
        low, high = np.fmax(low, below), np.fmin(high, above)
    return low, high


def polynomial_bounds(
    nodes: list[Node], cell: int, u: np.ndarray, epoch: Epoch
) -> tuple[np.ndarray, np.ndarray]:
    """By polynomials through means of exponentials."""
    count, shift = epoch.count, epoch.shift
    threshold = epoch.threshold(u)
    rounded = epoch.rounding(float(u[-1])) * threshold
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
            sums.gain(sign * threshold - toward * rounded, above=up)
            for sums, up, toward in ((node.below, False, -1), (node.above, True, 1))
        ]
        if i < 0:
            # E(-S - y)_+ = E(S + y)_+ - E S - y
            mean = -2 * count * math.exp(0.5 * shift**2) * math.sinh(shift * place)
            slack = ROUNDING * (abs(mean) + threshold)
            bounds = [
                np.maximum(bound - mean - threshold + s * slack, 0.0)
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

    # Beyond that range means over- or underflow, and are no bounds.
    usable = np.abs(exponent(away)) < _LARGEST_EXPONENT
    if not np.all(usable[one : one + 2]):
        return np.zeros_like(u), np.full_like(u, np.inf)
    first = one - int(np.argmin(np.append(usable[one::-1], False))) + 1
    last = one + int(np.argmin(np.append(usable[one:], False)))
    kept = slice(first, last)
    factor = np.exp(exponent(away[kept]))[:, None]
    found = bounds_between(
        where[kept],
        np.stack(low)[kept] * factor * (1 - ROUNDING),
        np.stack(high)[kept] * factor * (1 + ROUNDING),
        one - first,
        tilt,
    )
    back = epoch.scale(u) * np.exp(-exponent(tilt - middle))
    return found[0] * back, found[1] * back


# --- With thresholds that follow g ---


def aligned_step(epoch: Epoch, slope: float, error: float) -> float:
    """Distance of nodes at which the chord of `aligned_bounds` is off by ``error``."""
    # T changes with Y's deviation from its mean where V is at the threshold; terms of Y
    # are no larger there than the range over which D falls.
    square = epoch.shift**2
    largest = math.log(2 * epoch.steps / slope)
    seen = NormalDist().cdf((largest - 1.5 * square) / epoch.shift)
    # V tells of Y what is not due to the noise that raises both.
    apart = -math.expm1(-2 * square)
    variance = epoch.count * math.expm1(min(square, 600.0)) * apart * seen
    step = math.sqrt(8 * error / max(variance, 1e-300)) * epoch.steps / slope
    return math.log1p(min(step, 1e3))


def aligned_bounds(
    nodes: list[Node], cell: int, u: np.ndarray, epoch: Epoch
) -> tuple[np.ndarray, np.ndarray]:
    """By chords, and lines beyond two nodes, in g and the threshold together."""
    g, c = np.exp(u), np.expm1(u) * epoch.idle
    slope = _threshold_slope(nodes[cell], nodes[cell + 1], epoch)

    def bound(i: int, *, up: bool) -> np.ndarray:
        return _bound_at(nodes, i, g, c, slope, epoch, up=up)

    def share(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Where g is from one node to the other, and a bound of its rounding error."""
        a, b = _ratio(nodes, begin), _ratio(nodes, end)
        error = epoch.rounding(nodes[-1].u) * (a + b + g) / abs(b - a)
        return (g - a) / (b - a), error

    part, error = share(cell, cell + 1)
    start, end = bound(cell, up=True), bound(cell + 1, up=True)
    above = (1 - part + error) * start + (part + error) * end
    below = np.zeros_like(u)
    for near, far in ((cell, cell - 1), (cell + 1, cell + 2)):
        if abs(far) < len(nodes) and nodes[abs(far)].is_whole:
            part, error = share(far, near)  # more than 1: the near one lies between
            known = (part - error) * bound(near, up=False)
            taken = (part - 1 + error) * bound(far, up=True)
            below = np.fmax(below, known - taken - ROUNDING * (known + taken))
    return below, above * (1 + ROUNDING)


def _ratio(nodes: list[Node], i: int) -> float:
    """The g of a node, or of the mirror image of node -i."""
    return math.exp(nodes[i].u if i >= 0 else -nodes[-i].u)


def _bound_at(
    nodes: list[Node],
    i: int,
    g: np.ndarray,
    c: np.ndarray,
    slope: float,
    epoch: Epoch,
    *,
    up: bool,
) -> np.ndarray:
    """Bound of ``T(g_i, c + slope (g_i - g)) / steps``."""
    node, at = nodes[abs(i)], _ratio(nodes, i)
    sums, sign = (node.above, 1) if up else (node.below, -1)
    scale = float(epoch.scale(node.u))
    moved = c + slope * (at - g)
    slack = sign * epoch.rounding(nodes[-1].u) * (np.abs(c) + abs(slope) * (at + g))
    if i >= 0:
        threshold = (moved - slack) / (scale * epoch.steps)
        return scale * sums.gain(threshold, above=up)
    # E(X - Y / w - c)_+ = (E(V_w + w c)_+ - E V_w - w c) / w, exchanging X and Y.
    w = math.exp(node.u)
    moved = w * (moved - slack)
    mean = epoch.count * -math.expm1(node.u)
    gain = scale * epoch.steps * sums.gain(-moved / (scale * epoch.steps), above=up)
    rest = gain - mean - moved
    rest = rest + sign * ROUNDING * (gain + abs(mean) + np.abs(moved))
    return np.maximum(rest, 0.0) / (w * epoch.steps)


def _threshold_slope(a: Node, b: Node, epoch: Epoch) -> float:
    """Slope in g of a threshold that V exceeds with the same probability at both."""
    g = 0.5 * (math.exp(a.u) + math.exp(b.u))
    c = (g - 1) * epoch.idle

    def beyond(node: Node, slope: float) -> float:
        scale = float(epoch.scale(node.u)) * epoch.steps
        threshold = (c + slope * (math.exp(node.u) - g)) / scale
        sums = node.above
        return float(sums.beyond[np.searchsorted(sums.values, threshold)])

    low, high = -_CELL_STEEPEST * epoch.count, 0.0
    for _ in range(_HALVINGS):
        slope = 0.5 * (low + high)
        if beyond(a, slope) > beyond(b, slope):
            high = slope
        else:
            low = slope
    return 0.5 * (low + high)


# Reference: docs/proofs.md, "Random allocation".

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
# Where the threshold moves with g (`aligned_bounds`): by how many times
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


@dataclass(frozen=True)
class AllocatedAntipodalLoss(AllocatedLoss):
    """``r D_t(1 + (g - 1)/r)`` in both directions."""

    inner_rate: Array  # r in [0, 1], below the level that is allocated
    shift: Array  # s >= 0, the clip norm over the noise
    slots: Array  # t, whole number, the steps of an epoch
    steps: Array  # j, whole number, 2 <= j <= t, those that are run
    is_symmetric: ClassVar[bool] = True
    _excess = staticmethod(antipodal_excess)

    def certified(self, *, up: bool) -> Profile:
        """The finite pair of a convex function above or below the profile."""
        return self.bounding_pair(AllocatedAntipodalBoundingLoss, up=up)

    def with_little_noise(self) -> AntipodalGaussianLoss:
        """The slot revealed: see `AllocatedLoss`."""
        inner, drawn = self.inner_rate, self._drawn_rate
        return AntipodalGaussianLoss(self.outer_rate, drawn, inner, self.shift)


@dataclass(frozen=True)
class AllocatedAntipodalBoundingLoss(BoundingLoss):
    """``r D(1 + (g - 1)/r)`` in both directions, D of `antipodal_bounding_pair`."""

    inner_rate: Array  # see `AllocatedAntipodalLoss`
    shift: Array  # s > 0
    slots: Array  # see `AllocatedAntipodalLoss`
    steps: Array  # see `AllocatedAntipodalLoss`
    above: Array  # see `BoundingLoss`
    is_symmetric: ClassVar[bool] = True
    _rounding: ClassVar[float] = 8e-15

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Of the finite pair."""
        u, rate, *fields = np.broadcast_arrays(u, *self.fields[1:])
        inner = np.minimum(inner_exponent(u, rate), 1e300)
        profile, tail = by_setting(_pair_tails, inner, *fields)
        tails = drawn_tails((profile, tail), u, rate)
        return tails, tails

    @classmethod
    def _excess(cls, direction: str, order: np.ndarray, *setting: float) -> np.ndarray:
        """At the ends of the range as without sampling."""
        rate, shift = setting[:2]
        if not SMALLEST_SHIFT < shift < LARGEST_SHIFT:
            return _unsampled_excess(order, rate, shift)
        return super()._excess(direction, order, *setting)

    @staticmethod
    def _atoms(rate: float, *setting: float) -> tuple[np.ndarray, np.ndarray]:
        """Losses but for 0."""
        pair = _pair(*setting)
        mass = -np.diff(np.append(pair.scaled * np.exp(-pair.loss), 0.0))[1:]
        loss, kept = np.log1p(rate * np.expm1(pair.loss[1:])), mass > 0
        loss, mass = loss[kept], mass[kept]
        both = np.concatenate([-loss[::-1], loss])
        return both, np.concatenate([mass[::-1], mass * np.exp(loss)])

    @classmethod
    def _facts_of_setting(cls, rate: float, *setting: float) -> tuple[float, ...]:
        loss, mass = cls._atoms(rate, *setting)
        gap = float(np.sum(np.diff(loss) * mass[1:]))
        lost = float(np.log1p(-rate * _pair(*setting).infinite * (1 + 1e-9)))
        return lost, gap, float(loss.max(initial=0.0)), 0.0, 0.0


def _unsampled_excess(z: np.ndarray, rate: float, shift: float) -> np.ndarray:
    """``rate (M - 1)``, M of a shift of 2s, with derivatives over it (Jensen)."""
    growth = 2 * shift * shift
    with np.errstate(over="ignore"):
        share = 1 / -np.expm1(-growth * z * (1 + z))
    slope = growth * (1 + 2 * z)
    excess = np.log(rate) + log_expm1(growth * z * (1 + z))
    return np.stack([excess, slope * share, (2 * growth + slope**2) * share])


def _pair(
    shift: float, slots: float, steps: float, above: float
) -> PiecewiseLinearPair:
    return antipodal_bounding_pair(round(slots), round(steps), shift, above=above > 0)


def _pair_tails(u: np.ndarray, *setting: float) -> np.ndarray:
    """Both rows of `log_tails` at r = 1."""
    pair = _pair(*setting)
    return np.stack(tails_between(u, pair.loss, pair.profile, pair.scaled))

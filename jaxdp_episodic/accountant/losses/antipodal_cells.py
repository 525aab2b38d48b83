"""Bounds of an epoch's profile under replace_one between losses where it is known."""

# Reference: docs/proofs.md, "Random allocation".

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.exponential_means import bounds_between
from jaxdp_episodic.accountant.numerics.signed_sums import SignedSumBound

# Nodes on either side of a cell that polynomials go through.
_AROUND = 3
# Largest exponent, nats, that scales the means they go through.
_LARGEST_EXPONENT = 250.0
# Relative rounding error of what is computed from a mean of `signed_sums`.
ROUNDING = 1e-11
# Relative rounding error of one operation in float64: 2^-53.
_UNIT_ROUNDOFF = 1.2e-16
# Steepest slope of the threshold in g, in means of Y, and halvings of that range.
_STEEPEST = 3.0
_HALVINGS = 40


class Node(NamedTuple):
    """A loss u at which D is bounded from both sides."""

    u: float  # ``log g``
    below: SignedSumBound  # bounds of the distribution of S
    above: SignedSumBound  # bounds of the distribution of S
    is_whole: bool  # whether they bound its means at every threshold, not only at y
    log_d: float  # upper bound of log D


class Epoch(NamedTuple):
    """The setting of `antipodal_bounds`."""

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

    low, high = -_STEEPEST * epoch.count, 0.0
    for _ in range(_HALVINGS):
        slope = 0.5 * (low + high)
        if beyond(a, slope) > beyond(b, slope):
            high = slope
        else:
            low = slope
    return 0.5 * (low + high)

"""Bounds of an epoch's profile under replacement between losses where it is known.

At a node ``u = log g`` measures above and below the distribution of ``V_g = X - g Y``
are known, X and Y sums of ``count`` terms A and B. Two bounds hold between nodes:

* `polynomial_bounds`, of the mean as one of exponentials in u at a fixed hinge
  (`numerics.exponential_means`), for nodes a part of a deviation of the sum apart;
* `aligned_bounds`: ``T(g, c) = E(X - g Y - c)_+`` is convex in g and c together. With
  the hinge moved along as most of Y moves V, hardly any curvature is left on the way
  from node to node: where one large term makes up the loss, or there are many terms,
  these may be many deviations apart.

Reference: docs/proofs.md, "Random allocation".
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.exponential_means import bounds_between
from jaxdp_episodic.accountant.numerics.signed_sums import SignedSumBound

# How many nodes on either side polynomials use, and the largest exponent they see.
_AROUND, _LARGEST = 3, 250.0
# Relative rounding error of what is computed from a mean of `signed_sums`; and of one
# operation.
ROUNDING, _UNIT = 1e-11, 1.2e-16
# Most of a term B, in the mean, and halvings of that range, for the hinges' way.
_MOST_OF_Y, _HALVINGS = 3.0, 40


class Node(NamedTuple):
    """A loss u at which D is bounded from both sides.

    Attributes:
      u: of it.
      below, above: of S.
      is_whole: whether they are known at every hinge.
      log_d: upper bound of log D.
    """

    u: float
    below: SignedSumBound
    above: SignedSumBound
    is_whole: bool
    log_d: float


class Epoch(NamedTuple):
    """The setting of `antipodal_bounds`."""

    bins: int
    count: int
    shift: float

    @property
    def idle(self) -> int:
        """Steps that are not taken."""
        return self.bins - self.count

    def scale(self, u: np.ndarray | float):
        """What a mean of S is multiplied with, for D."""
        return np.exp(0.5 * (u - self.shift * self.shift)) / self.bins

    def hinge(self, u: np.ndarray | float):
        """Of S."""
        return 2 * np.sinh(0.5 * u) * math.exp(0.5 * self.shift**2) * self.idle

    def rounding(self, u: float) -> float:
        """Bound of the relative rounding error of `scale` and `hinge`, and a few more.

        An exponential is off by the rounding error of its exponent.
        """
        return _UNIT * (16 + self.shift**2 + 2 * u)


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
    hinge = epoch.hinge(u)
    rounded = epoch.rounding(float(u[-1])) * hinge
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
            sums.gain(sign * hinge - toward * rounded, above=up)
            for sums, up, toward in ((node.below, False, -1), (node.above, True, 1))
        ]
        if i < 0:
            # E(-S - y)_+ = E(S + y)_+ - E S - y
            mean = -2 * count * math.exp(0.5 * shift**2) * math.sinh(shift * place)
            slack = ROUNDING * (abs(mean) + hinge)
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

    # Others are out of float64's range then, and no bounds.
    usable = np.abs(exponent(away)) < _LARGEST
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


# --- Along the hinges' way ---


def aligned_step(epoch: Epoch, slope: float, error: float) -> float:
    """Distance of nodes at which the chord of `aligned_bounds` is off by ``error``.

    An *estimate*: T changes with Y's deviation from its mean where V is at the hinge;
    terms of Y are no larger there than what D falls over.

    Args:
      epoch: of the nodes.
      slope: ``-d log(D) / du``.
      error: relative.
    """
    square = epoch.shift**2
    largest = math.log(2 * epoch.bins / slope)
    seen = NormalDist().cdf((largest - 1.5 * square) / epoch.shift)
    # V tells of Y what is not due to the noise that raises both.
    apart = -math.expm1(-2 * square)
    variance = epoch.count * math.expm1(min(square, 600.0)) * apart * seen
    step = math.sqrt(8 * error / max(variance, 1e-300)) * epoch.bins / slope
    return math.log1p(min(step, 1e3))


def aligned_bounds(
    nodes: list[Node], cell: int, u: np.ndarray, epoch: Epoch
) -> tuple[np.ndarray, np.ndarray]:
    """By chords, and lines beyond two nodes, in g and the hinge together."""
    g, c = np.exp(u), np.expm1(u) * epoch.idle
    way = _way(nodes[cell], nodes[cell + 1], epoch)

    def bound(i: int, *, up: bool) -> np.ndarray:
        return _bound_at(nodes, i, g, c, way, epoch, up=up)

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
    way: float,
    epoch: Epoch,
    *,
    up: bool,
) -> np.ndarray:
    """Bound of ``T(g_i, c + way (g_i - g)) / bins``."""
    node, at = nodes[abs(i)], _ratio(nodes, i)
    sums, sign = (node.above, 1) if up else (node.below, -1)
    scale = float(epoch.scale(node.u))
    moved = c + way * (at - g)
    slack = sign * epoch.rounding(nodes[-1].u) * (np.abs(c) + abs(way) * (at + g))
    if i >= 0:
        hinge = (moved - slack) / (scale * epoch.bins)
        return scale * sums.gain(hinge, above=up)
    # E(X - Y / w - c)_+ = (E(V_w + w c)_+ - E V_w - w c) / w, exchanging X and Y.
    w = math.exp(node.u)
    moved = w * (moved - slack)
    mean = epoch.count * -math.expm1(node.u)
    gain = scale * epoch.bins * sums.gain(-moved / (scale * epoch.bins), above=up)
    rest = gain - mean - moved
    rest = rest + sign * ROUNDING * (gain + abs(mean) + np.abs(moved))
    return np.maximum(rest, 0.0) / (w * epoch.bins)


def _way(a: Node, b: Node, epoch: Epoch) -> float:
    """By how much the hinge moves with g, so that V is above it as often at both."""
    g = 0.5 * (math.exp(a.u) + math.exp(b.u))
    c = (g - 1) * epoch.idle

    def beyond(node: Node, way: float) -> float:
        scale = float(epoch.scale(node.u)) * epoch.bins
        hinge = (c + way * (math.exp(node.u) - g)) / scale
        sums = node.above
        return float(sums.beyond[np.searchsorted(sums.values, hinge)])

    low, high = -_MOST_OF_Y * epoch.count, 0.0
    for _ in range(_HALVINGS):
        way = 0.5 * (low + high)
        if beyond(a, way) > beyond(b, way):
            high = way
        else:
            low = way
    return 0.5 * (low + high)

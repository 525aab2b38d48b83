"""The grid of one step's loss: a lattice's spacing, and which of its points are used.

Like `certified.window` only an *estimate*: it decides how wide the certified
interval becomes, never whether it holds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxdp_episodic.accountant.methods.certified.coarse import CoarseLoss
from jaxdp_episodic.accountant.methods.certified.window import Direction

# Spacings that are tried, nats.
_SPACINGS = np.geomspace(1e-13, 4e12, 320)
# Factors of the best widths of bins that are tried.
_FACTORS = np.geomspace(1e-9, 1e3, 100)
# Share of the width asked for that the lattice may cost.
_LATTICE_SHARE = 0.4
# Share that grid points further apart than the lattice may cost.
_GRID_SHARE = 0.25
# Largest exponent of a tilt across a bin wider than a nat.
_WIDEST_TILTED = 0.1
# Spacings from the center within which every point of the lattice is a grid point:
# where the density is steep the lower distribution's error is not of second order.
_DENSE = 60.0
# Width of a bin beyond, over its distance from there.
_GROWTH = 0.2
# Most that the logarithm of the density changes within a bin.
_VARIATION = 0.6
# Spacings from the center beyond which numbers of points are not told apart.
FURTHEST = 2.0**40


def choose_spacing(
    losses: Sequence[CoarseLoss], centers: Sequence[float], plan: Direction
) -> float:
    """The largest spacing whose two distributions differ by the share of the width.

    Splitting a loss to the ends of a bin of width h adds a variance of at most h²/4,
    and of at most d h if it is at a distance d from the center, which is on the
    lattice. The tilted log-moment grows by c (1 + c) / 2 times that (the mean changes
    too, as ``E exp(-L) = 1`` is kept), and at most by c h.
    """
    parts = [
        (np.abs(one.log_ratio - center), one.count * weight)
        for one, center, weight in zip(losses, centers, plan.weights, strict=True)
    ]

    def error(spacing: float) -> float:
        half = 0.5 * (1 + plan.slope)
        total = 0.0
        for distance, weight in parts:
            variance = np.minimum(spacing**2 / 4, distance * spacing)
            total += float(np.minimum(half * variance, spacing) @ weight)
        return total

    spacing = _largest(error, _LATTICE_SHARE * plan.width, _SPACINGS)
    return min(spacing, _widest(plan))


def _widest(plan: Direction) -> float:
    """Bins within which a tilt hardly changes; wide ones where losses are large."""
    return max(1 / (1 + plan.slope), _WIDEST_TILTED / plan.slope)


def _largest(
    error: Callable[[float], float], allowed: float, candidates: np.ndarray
) -> float:
    """The largest candidate whose error, which grows, is allowed; or the smallest."""
    number = bisect.bisect_right(candidates.tolist(), allowed, key=error)
    return float(candidates[max(number - 1, 0)])


def choose_grid(
    directions: Sequence[tuple[CoarseLoss, np.ndarray, Direction, int]],
    share: float,
    spacing: float,
    center: float,
    span: tuple[float, float],
    largest: int,
) -> np.ndarray:
    """Whole numbers j of the grid points ``center + j spacing`` of one step.

    The error of bins of width w(x) is a sum of ``w² density``, their number one of
    1 / w, so that the best widths are those in proportion to ``density^(-1/3)``.

    Args:
      directions: coarse loss, weights and plan of each direction and its sign, -1
        for the mirrored one.
      share: of the width that this step may use.
      spacing: of the lattice.
      center: where the peak is.
      span: lowest and highest loss that is needed.
      largest: number of grid points; none are returned where more are needed.
    """
    edges = directions[0][0].edges  # symmetric: the same in both directions
    lengths = np.maximum(np.diff(edges), 1e-300)
    middle = 0.5 * (edges[:-1] + edges[1:])
    away = np.maximum(np.abs(middle - center) - _DENSE * spacing, 0.0)
    limit = spacing + _GROWTH * away
    widths = np.full(len(lengths), np.inf)
    for one, weight, plan, sign in directions:
        sizes = lengths[::sign]
        # where there is no mass the widths are bounded by their growth alone
        shape = np.cbrt(sizes / np.maximum(weight, 1e-60))
        most, unit = limit[::sign], one.count * (1 + plan.slope) / 8 * weight

        def error(
            factor: float,
            shape: np.ndarray = shape,
            most: np.ndarray = most,
            unit: np.ndarray = unit,
        ) -> float:
            tried = np.minimum(factor * spacing * shape, most)
            return float(np.maximum(tried**2 - spacing**2, 0.0) @ unit)

        factor = _largest(error, _GRID_SHARE * share * plan.width, _FACTORS)
        chosen = np.minimum(factor * spacing * shape, most)
        widths = np.minimum(widths, np.minimum(chosen, _widest(plan))[::sign])
        widths = np.minimum(widths, _variation(sizes, one.mass)[::sign])
    # no width more than a neighbour's and the share of the distance from it
    slope = _GROWTH * middle
    widths = slope + np.minimum.accumulate(widths - slope)
    widths = np.minimum.accumulate((widths + slope)[::-1])[::-1] - slope
    cells = np.maximum(np.floor(widths / spacing), 1.0)
    ends = [(e - center) / spacing for e in span]
    if max(-ends[0], ends[1]) > FURTHEST:
        return np.empty(0)
    positions = (middle - center) / spacing
    up = _grid_points(positions, cells, max(ends[1], 1.0), largest)
    down = _grid_points(-positions[::-1], cells[::-1], max(-ends[0], 1.0), largest)
    if len(up) + len(down) > largest:
        return np.empty(0)
    return np.concatenate([-down[:0:-1], up])


def _variation(lengths: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Widths within which the density of cells changes little."""
    # each by itself: over a far longer cell their ratio would vanish
    density = np.log(np.maximum(mass, 1e-300)) - np.log(lengths)
    between = 0.5 * (lengths[1:] + lengths[:-1])
    alive = (lengths > 1e-290) & (mass > 0)
    alive = alive[1:] & alive[:-1]
    slope = np.where(alive, np.abs(np.diff(density)) / between, 0.0)
    slope = np.maximum(np.append(0.0, slope), np.append(slope, 0.0))
    return _VARIATION / np.maximum(slope, 1e-300)


def _grid_points(
    positions: np.ndarray, cells: np.ndarray, end: float, largest: int
) -> np.ndarray:
    """Whole numbers from 0 to beyond the end, in steps of the cells' widths."""
    parts = [np.zeros(1)]
    at, width, number = 0.0, 1.0, 1
    ends, widths = positions.tolist(), cells.tolist()
    while at < end and number <= largest:
        index = min(bisect.bisect_left(ends, at), len(widths) - 1)
        # widths of neighbours within a factor of two of each other
        width = min(widths[index], 1.5 * width + 0.5)
        step, steps = math.floor(width), 1
        if width == widths[index]:  # the same step until the cell, or all, ends
            last = min(ends[index], end) if index < len(ends) - 1 else end
            steps = max(min(math.ceil((last - at) / step), largest + 1 - number), 1)
        parts.append(at + step * np.arange(1.0, steps + 1))
        at, number = at + step * steps, number + steps
    return np.concatenate(parts)


def with_splits(grid: np.ndarray) -> np.ndarray:
    """The ``(m + 1,)`` grid and a point between any two, nearer to a narrower bin."""
    if not len(grid):
        return grid
    root = np.sqrt(np.diff(grid))
    before, after = np.append(root[0], root[:-1]), np.append(root[1:], root[-1])
    points = np.empty(2 * len(grid) - 1)
    points[::2], points[1::2] = grid, grid[:-1] + root**2 * before / (before + after)
    return points

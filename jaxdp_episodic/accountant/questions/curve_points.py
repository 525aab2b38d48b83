"""Epsilons at which delta is computed so that few points give the whole curve."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# First grid of epsilons: 0 and 12 points a decade. Below the first of them delta
# changes by less than 1e-8; beyond the last e^epsilon would overflow.
_FIRST_POINTS = np.concatenate([[0.0], np.geomspace(1e-8, 700.0, 131)])
# Aim for the absolute error of the attacker's rates: above it points are added.
_ABSOLUTE = 8e-7
# The same, relative to what there is to gain or to miss.
_RELATIVE = 2e-4
# Rounds of adding points, at most.
_REFINEMENTS = 3
# Parts of an interval in each round, at most.
_MOST_PARTS = 32
# Points that a round adds to a curve, at most: more are asked for where the errors of
# nearly equal deltas look like bends, as near sampling rate 1.
_MOST_ADDED = 1500
# Where few rates are asked for, one of so many points of the first grid is used ...
_COARSER = 4
# ... and there may be so many more rounds.
_MORE_REFINEMENTS = 2


def curve_points(
    delta: Callable[[np.ndarray], np.ndarray],
    num_settings: int,
    *,
    floor: float,
    rates: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns points of privacy curves, close together where an attacker's rates bend.

    At false positive rate ``a`` a point allows the true positive rate ``delta +
    e^epsilon a``; the smallest over the points is the bound, an *upper bound* whatever
    the points are. Points are added until the bound is estimated to be within 8e-7, or
    2e-4 of what there is to gain or to miss, of that from the whole curve. That is an
    aim: after three rounds, or five where a few rates are asked for, no more are added,
    nor more than 1,500 in a round. Each round is a call for all settings at once.

    Args:
      delta: maps epsilons (K, num_settings) to upper bounds of delta, same shape.
      num_settings: number of curves.
      floor: below this delta no points are added. It does not change what is true.
      rates: (R,) a few false positive rates. The bound is aimed to be near at these
        alone; None: at all.

    Returns:
      epsilons and deltas, (K, num_settings) each: epsilons from 0 to 700 in increasing
      order, some more than once; deltas decreasing.
    """
    is_few = rates is not None
    first = _FIRST_POINTS[np.r_[0, 1 : len(_FIRST_POINTS) : _COARSER if is_few else 1]]
    epsilons = np.repeat(first[:, None], num_settings, axis=1)
    deltas = np.minimum.accumulate(delta(epsilons))
    for _ in range(_REFINEMENTS + is_few * _MORE_REFINEMENTS):
        parts = _parts(epsilons, deltas, floor, rates)
        if np.all(parts == 1):
            break
        while (parts - 1).sum(axis=0).max() > _MOST_ADDED:
            parts = np.minimum(parts, max(int(parts.max()) // 2, 1))
        more = _between(epsilons, parts)
        epsilons = np.concatenate([epsilons, more])
        deltas = np.concatenate([deltas, delta(more)])
        order = np.argsort(epsilons, axis=0, kind="stable")
        epsilons = np.take_along_axis(epsilons, order, axis=0)
        # An upper bound at some epsilon is one at every larger epsilon.
        deltas = np.minimum.accumulate(np.take_along_axis(deltas, order, axis=0))
    return epsilons, deltas


def lower_hull(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points on the largest convex curve below; x increases, not strictly."""
    kept: list[tuple[float, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        if kept and point[0] <= kept[-1][0]:
            continue
        while len(kept) > 1 and _slope(*kept[-2:]) >= _slope(kept[-1], point):
            kept.pop()
        kept.append(point)
    return np.array(kept).T[0], np.array(kept).T[1]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _parts(
    epsilons: np.ndarray, deltas: np.ndarray, floor: float, rates: np.ndarray | None
) -> np.ndarray:
    """Into how many parts each interval should be cut, (K - 1, settings).

    In ``g = e^epsilon`` the curve is convex. Over an interval it therefore lies below
    its chord and above the neighbouring chords, prolonged: in a triangle. An attacker's
    rates are taken to move by a quarter of that triangle's height, which is right for a
    parabola. This falls with the square of the number of parts.
    """
    g = np.exp(epsilons)
    width = np.diff(g, axis=0)
    fall = -np.diff(deltas, axis=0)  # minus the slope, from here on
    fall = np.divide(fall, width, out=np.zeros_like(width), where=width > 0)
    # Left of 1 the curve is mirrored: h(g) = 1 - g + g h(1/g).
    left = np.concatenate([1 - deltas[:1] - fall[:1], fall[:-1]])
    right = np.concatenate([fall[1:], np.zeros_like(fall[:1])])
    before, after = np.maximum(left - fall, 0.0), np.maximum(fall - right, 0.0)
    total = np.where(before + after > 0, before + after, 1.0)
    gap = before / total * after * width / 4
    caught = deltas[:-1] + g[:-1] * fall
    missed = np.maximum(1 - caught, 1e-12)
    # caught - fall is what is gained over guessing. Errors are relative to it where it
    # is little.
    scale = np.minimum(caught - fall, missed)
    scale = np.where(deltas[1:] > floor, scale, np.minimum(scale, floor))
    allowed = np.minimum(_ABSOLUTE, _RELATIVE * np.maximum(scale, floor))
    matters = (deltas[:-1] > floor) & (width > 0)
    if rates is not None:
        matters &= _may_be_best(g, deltas, rates, 4 * gap, allowed)
    ratio = np.divide(gap, allowed, out=np.zeros_like(gap), where=matters)
    return np.clip(np.ceil(np.sqrt(ratio)), 1, _MOST_PARTS).astype(np.int64)


def _may_be_best(
    g: np.ndarray,
    deltas: np.ndarray,
    rates: np.ndarray,
    height: np.ndarray,
    allowed: np.ndarray,
) -> np.ndarray:
    """Whether an interval may hold a lower true positive rate at one of the rates.

    Neither the curve nor its mirror image is more than ``height`` below its chord. So
    within an interval the rate is at least that of the lower end, less ``height``.
    """
    caught = deltas + g * rates[:, None, None]
    mirrored = 1 - (1 - deltas - rates[:, None, None]) / g
    best = np.minimum(caught, mirrored).min(axis=1, keepdims=True)
    ends = [np.minimum(rate[:, :-1], rate[:, 1:]) for rate in (caught, mirrored)]
    return np.any(np.minimum(*ends) - height < best - allowed, axis=0)


def _between(epsilons: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The points that cut each interval into parts; the shorter lists are filled up."""
    inner = parts - 1
    points = np.full((int(inner.sum(axis=0).max()), parts.shape[1]), _FIRST_POINTS[-1])
    for column, (eps, count) in enumerate(zip(epsilons.T, inner.T, strict=True)):
        start = np.repeat(np.cumsum(count) - count, count)
        number = np.arange(len(start)) - start + 1
        gap = np.repeat(np.diff(eps) / (count + 1), count)
        points[: len(start), column] = np.repeat(eps[:-1], count) + number * gap
    return points

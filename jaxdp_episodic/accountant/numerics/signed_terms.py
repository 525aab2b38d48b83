"""One term ``2 sinh(s z)`` of a sum, bracketed on lattices, and how these are laid.

See `numerics.signed_sums`.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.lattice_pieces import Piece

# How many times as many cells the finest lattice has as others, so that the second has
# cells of twice its width; how many deviations of a term the finest reaches.
_FINEST, _DEVIATIONS = 5 / 3, 3.0
# Where a jump is by so many nats likelier than that all terms move, the finest lattice
# is as wide as from the hinge to most terms' sum, with so many places in a deviation.
_SOONER, _ALONE, _RESOLVED = 12.0, 3.0, 30.0
# Of that way, where a lattice ends; how many times as far the last one does, or what so
# many deviations of one term make of it: beyond it values are at its ends, or at their
# mean, no further than so many times that.
_REACHED, _FURTHEST, _FAR_OUT, MEANS = 1.25, 5.0, 1.5, 8.0
# Widest panel in z; the widest cell about 0; and the finest, over a term's share of
# the hinge, beside which the ends of finer ones would be lost in rounding.
_WIDEST, _NARROW, _OF_HINGE = 0.1, 0.01, 1e-5
# Deviations of one normal variable that are looked at: below, and above one of mean s.
_LOWEST, _HIGHEST = 9.0, 9.3
# Rounding of one operation, and of a cell's end, over its width.
UNIT = 1.2e-16
_SQRT_2PI = math.sqrt(2 * math.pi)
_NODES, _WEIGHTS = (0.5 * a for a in np.polynomial.legendre.leggauss(6))
_NODES = _NODES[:, None] + 0.5
_WEIGHTS = _WEIGHTS[:, None]


class LatticeSum(NamedTuple):
    """Of a sum of ``count`` terms: pieces of rising level about ``count`` centers.

    All in units of the finest spacing, `place_error` in cells of each level.
    """

    count: int
    pieces: list[Piece]
    infinite: float
    mass_error: float
    place_error: float


class Plan(NamedTuple):
    """Of all sums of one setting: `unit` is the finest spacing of one term."""

    above: bool
    finest: int  # half of the cells of the finest lattice
    others: int  # and of the others
    center: float
    unit: float
    top: int  # level of the last one


def planned(
    count: int, shift: float, tilt: float, hinge: float, above: bool, others: int
) -> Plan:
    """Finest where each term has its share of the hinge; as wide as most terms are."""
    # Even, so that cells of the next lattice begin where these end.
    others, finest = others // 2 * 2, round(0.5 * _FINEST * others) * 2
    end = NormalDist().inv_cdf(1 - 1 / (4 * count))
    x = end * np.linspace(-1, 1, 401)
    weight = np.exp(-0.5 * x * x)
    weight, value = weight / weight.sum(), 2 * np.sinh(shift * (x - tilt))
    mean = float(value @ weight)
    deviation = math.sqrt(float((value - mean) ** 2 @ weight))
    unit = 2 * _DEVIATIONS * deviation / finest
    unit = max(min(unit, 2 * _NARROW * shift), _OF_HINGE * hinge / count)
    # All of them together lie so far from the hinge, which is a jump's way: where one
    # makes it that rarely that all would sooner move there, places are as fine as ever.
    away, base = abs(hinge - count * mean), base_level(count)
    jump = math.asinh(0.5 * away) / shift + tilt
    # Few others would move along, and far enough to be close to 0.
    alone = count > _ALONE * shift * jump
    if alone and 0.5 * count * tilt * tilt > 0.5 * jump * jump + _SOONER:
        spread = deviation * math.sqrt(count) / _RESOLVED
        unit = max(unit, min(_REACHED * away / finest, spread) / 2**base)
    # Jumps by that much have the finest places that one of the other lattices has.
    level = round(math.log2(max(_REACHED * away / (others * unit), 1.0)))
    if level > 0:
        unit = _REACHED * away / (others * 2**level)
    last = max(away, 8 * deviation * math.sqrt(count)) / (others * unit)
    last *= max(_FURTHEST, 2 * math.exp(shift * max(_FAR_OUT, 0.5 * shift)))
    gap = (2 * finest // others).bit_length() - 1
    top = max(math.ceil(math.log2(last)), base + gap)
    return Plan(above, finest, others, hinge / count, unit, top)


def base_level(count: int) -> int:
    """Level of the finest lattice of a sum: its cells grow as deviations do."""
    return (count.bit_length() - 1) // 2


def level_gap(plan: Plan) -> int:
    """By how many levels the second lattice is coarser than the finest."""
    return (2 * plan.finest // plan.others).bit_length() - 1


def one_term(shift: float, tilt: float, plan: Plan) -> LatticeSum:
    """One term, by quadrature of the normal density over each cell, in no box yet."""
    low, high = -tilt - _LOWEST, shift - tilt + _HIGHEST
    ends = [(2 * math.sinh(shift * z) - plan.center) / plan.unit for z in (low, high)]
    widest = plan.others * 2**plan.top
    rows = _cells(
        plan, max(math.floor(ends[0]), -widest), min(math.ceil(ends[1]), widest)
    )
    level = np.concatenate([np.full(number, k) for k, _, number in rows])
    start = np.concatenate([first + np.arange(number) for _, first, number in rows])
    width = plan.unit * 2.0**level
    edges = [
        np.arcsinh(0.5 * (plan.center + (start + i) * width)) / shift for i in (0, 1)
    ]
    left, right = (np.clip(edge, low, high) for edge in edges)
    parts = np.ceil(np.maximum(right - left, 0.0) / _WIDEST).astype(int)
    cell = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(cell)) - np.repeat(np.cumsum(parts) - parts, parts)
    piece = ((right - left) / np.maximum(parts, 1))[cell]
    z = left[cell] + (number + _NODES) * piece
    density = np.exp(-0.5 * (z + tilt) ** 2) / _SQRT_2PI * _WEIGHTS * piece

    def mean_gap(edge: np.ndarray) -> np.ndarray:
        """Of the distance between the value and an edge, over each cell's width."""
        from_edge, about = 0.5 * shift * (z - edge), 0.5 * shift * (z + edge)
        gap = np.abs(4 * np.cosh(about) * np.sinh(from_edge)) / width[cell]
        return np.bincount(cell, (density * gap).sum(axis=0), len(parts))

    gain = mean_gap(edges[0][cell])
    masses = np.bincount(cell, density.sum(axis=0), len(parts))
    rest = mean_gap(edges[1][cell])
    size = np.maximum(np.abs(low), np.abs(high)) + 1
    narrow = (edges[1] - edges[0])[parts > 0]
    error = 16 * UNIT * float(np.max(size / narrow))
    error += 16 * UNIT * float(np.max(1 + np.abs(start) + abs(plan.center) / width))
    over = _tail(high + tilt)
    # Values there are more than the last by e^{sz} and e^{-s high} at the most.
    over_mean = math.exp(0.5 * shift**2 - shift * tilt) * _tail(_HIGHEST)
    over_mean = (over_mean + over * math.exp(-shift * high)) / plan.unit
    pieces, at = [], 0
    for k, first, number_of in rows:
        chosen = slice(at, at + number_of)
        at += number_of
        if plan.above:
            row = np.append(rest[chosen], 0.0) + np.append(0.0, gain[chosen])
            pieces.append(Piece(k, first, row, None))
        else:
            moment = (start[chosen] * masses[chosen] + gain[chosen]) * 2.0**k
            pieces.append(Piece(k, first, masses[chosen], moment))
    term = LatticeSum(1, pieces, 0.0, error, 0.0)
    far = [
        _beyond(shift, tilt, edge, end, side)
        for edge, end, side in ((edges[0][0], low, -1), (edges[1][-1], high, 1))
    ]
    if plan.above:
        # What is below the first cell is raised to its end.
        pieces[0].masses[1] += far[0][0] + _tail(-low - tilt)
        pieces[-1].masses[-1] += far[1][0] + over
        term = term._replace(infinite=far[1][1] / plan.unit + over_mean)
        return term
    for piece, edge, (mass, gap) in zip(
        (pieces[0], pieces[-1]), (start[0], start[-1] + 1), far, strict=True
    ):
        moment = edge * 2.0**piece.level * mass + gap / plan.unit
        pieces += far_out(piece.level, mass, moment, widest)
    return term


def far_out(level: int, mass: float, moment: float, widest: int) -> list[Piece]:
    """A cell of its own, where its mean is, for what is beyond a lattice; from below.

    No further than the rounding of means is known: lower, their end, or nothing.
    """
    most = MEANS * widest * mass
    if moment < -most or not mass > 0:
        return []
    moment = min(moment, most)
    place = round(moment / mass / 2.0**level)
    return [Piece(level, place, np.array([mass]), np.array([moment]))]


def _beyond(
    shift: float, tilt: float, edge: float, end: float, side: int
) -> tuple[float, float]:
    """Mass of a term from an edge out to an end, and mean of its distance; signed."""
    if (end - edge) * side <= 0:
        return 0.0, 0.0
    parts = math.ceil(abs(end - edge) / _WIDEST)
    z = edge + (end - edge) / parts * (np.arange(parts) + _NODES)
    density = np.exp(-0.5 * (z + tilt) ** 2) / _SQRT_2PI * _WEIGHTS
    density = density * abs(end - edge) / parts
    gap = 4 * np.cosh(0.5 * shift * (z + edge)) * np.sinh(0.5 * shift * (z - edge))
    return float(density.sum()), float((density * gap).sum())


def _tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2))


def _cells(plan: Plan, low: int, high: int) -> list[tuple[int, int, int]]:
    """Level, first and number of cells from low to high, in the finest's; in order."""
    under, over = [], []
    for sign, end, rows in ((-1, -low, under), (1, high, over)):
        level, inner, outer = 0, 0, plan.finest
        while True:
            size = 2**level
            last = min(outer, -(-end // size) * size)
            number = (last - inner) // size
            if number > 0:
                first = inner if sign > 0 else -last
                rows.append((level, first // size, number))
            if last < outer or end <= outer:
                break
            level = level + 1 if level else level_gap(plan)
            inner, outer = outer, plan.others * 2**level
    return under[::-1] + over

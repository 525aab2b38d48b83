"""One term ``2 sinh(s z)`` of a sum, bracketed on lattices, and their layout."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.lattice_pieces import (
    NODES,
    SQRT_2PI,
    UNIT,
    WEIGHTS,
    Piece,
    normal_tail,
)

# Cells of the finest lattice over those of the others: cells of the second one are then
# twice as wide.
_FINEST_RATIO = 5 / 3
# Deviations of one term that the finest lattice reaches.
_DEVIATIONS = 3.0
# The finest lattice reaches from the threshold to the mean of the sum if one jump to
# the threshold is by these nats likelier than a shift of all terms, and the number of
# terms is above 3 s times the jump, so that few of the others are shifted along.
_JUMP_NATS = 12.0
_JUMP_TERMS = 3.0
# Least number of its points in a standard deviation of the sum.
_POINTS_PER_DEVIATION = 30.0
# End of a lattice, relative to the way from the mean to the threshold.
_REACH = 1.25
# End of the last lattice: five times as far, or what 1.5 deviations of one term make.
_FURTHEST = 5.0
_FURTHEST_DEVIATIONS = 1.5
# Bound of the means of cells beyond the last lattice, over its end.
MEANS = 8.0
# Widest panel of the quadrature in z.
_WIDEST_PANEL = 0.1
# Widest cell about 0, in z; and the narrowest, relative to a term's share of the
# threshold: ends of narrower ones would be lost in rounding.
_WIDEST_CELL = 0.01
_NARROWEST_CELL = 1e-5
# Truncation of the normal variable: below, and above a mean of s.
_LOWEST = 9.0
_HIGHEST = 9.3


class LatticeSum(NamedTuple):
    """Measure near the distribution of a sum of ``count`` terms, less their centers."""

    count: int
    pieces: list[Piece]
    infinite: float
    mass_error: float
    place_error: float


class Plan(NamedTuple):
    """Layout of the lattices of all partial sums."""

    above: bool  # whether the measures are above, or below
    finest: int  # half of the cells of the finest lattice
    others: int  # and of the others
    center: float  # of one term's lattices: its share of the threshold
    unit: float  # spacing of the finest lattice of one term
    top: int  # level of the last lattice


def planned(
    count: int, shift: float, tilt: float, threshold: float, above: bool, others: int
) -> Plan:
    """The layout: finest about the threshold, as wide as nearly all terms are."""
    # Even, so that cells of the next lattice begin where these end.
    others, finest = others // 2 * 2, round(0.5 * _FINEST_RATIO * others) * 2
    end = NormalDist().inv_cdf(1 - 1 / (4 * count))
    x = end * np.linspace(-1, 1, 401)
    weight = np.exp(-0.5 * x * x)
    weight, value = weight / weight.sum(), 2 * np.sinh(shift * (x - tilt))
    mean = float(value @ weight)
    deviation = math.sqrt(float((value - mean) ** 2 @ weight))
    unit = 2 * _DEVIATIONS * deviation / finest
    unit = max(min(unit, 2 * _WIDEST_CELL * shift), _NARROWEST_CELL * threshold / count)
    # Distance of the mean from the threshold, and the jump of one term that covers it.
    away, base = abs(threshold - count * mean), base_level(count)
    jump = math.asinh(0.5 * away) / shift + tilt
    by_one = count > _JUMP_TERMS * shift * jump
    if by_one and 0.5 * count * tilt * tilt > 0.5 * jump * jump + _JUMP_NATS:
        fine = deviation * math.sqrt(count) / _POINTS_PER_DEVIATION
        unit = max(unit, min(_REACH * away / finest, fine) / 2**base)
    # One lattice ends just beyond that jump: there the jump is resolved best.
    level = round(math.log2(max(_REACH * away / (others * unit), 1.0)))
    if level > 0:
        unit = _REACH * away / (others * 2**level)
    last = max(away, 8 * deviation * math.sqrt(count)) / (others * unit)
    last *= max(_FURTHEST, 2 * math.exp(shift * max(_FURTHEST_DEVIATIONS, 0.5 * shift)))
    plan = Plan(above, finest, others, threshold / count, unit, 0)
    return plan._replace(top=max(math.ceil(math.log2(last)), base + level_gap(plan)))


def base_level(count: int) -> int:
    """Level of the finest lattice of a sum: cells widen as its deviation does."""
    return (count.bit_length() - 1) // 2


def level_gap(plan: Plan) -> int:
    """Number of levels from the finest lattice to the second one."""
    return (2 * plan.finest // plan.others).bit_length() - 1


def one_term(shift: float, tilt: float, plan: Plan) -> LatticeSum:
    """One term, by quadrature of the normal density over each cell."""
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
    parts = np.ceil(np.maximum(right - left, 0.0) / _WIDEST_PANEL).astype(int)
    cell = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(cell)) - np.repeat(np.cumsum(parts) - parts, parts)
    piece = ((right - left) / np.maximum(parts, 1))[cell]
    z = left[cell] + (number + NODES) * piece
    density = np.exp(-0.5 * (z + tilt) ** 2) / SQRT_2PI * WEIGHTS * piece

    def mean_gap(edge: np.ndarray) -> np.ndarray:
        """Integral of the distance between value and edge, over each cell's width."""
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
    over = normal_tail(high + tilt)
    # Values beyond ``high`` exceed the last one by less than e^{sz} + e^{-s high}.
    over_mean = math.exp(0.5 * shift**2 - shift * tilt) * normal_tail(_HIGHEST)
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
        # Mass below the first cell is raised to its end.
        pieces[0].masses[1] += far[0][0] + normal_tail(-low - tilt)
        pieces[-1].masses[-1] += far[1][0] + over
        return term._replace(infinite=far[1][1] / plan.unit + over_mean)
    for piece, edge, (mass, gap) in zip(
        (pieces[0], pieces[-1]), (start[0], start[-1] + 1), far, strict=True
    ):
        moment = edge * 2.0**piece.level * mass + gap / plan.unit
        pieces += far_out(piece.level, mass, moment, widest)
    return term


def far_out(level: int, mass: float, moment: float, widest: int) -> list[Piece]:
    """A cell at its own mean for the mass beyond a lattice; a measure below."""
    most = MEANS * widest * mass
    if moment < -most or not mass > 0:
        return []
    moment = min(moment, most)
    place = round(moment / mass / 2.0**level)
    return [Piece(level, place, np.array([mass]), np.array([moment]))]


def _beyond(
    shift: float, tilt: float, edge: float, end: float, side: int
) -> tuple[float, float]:
    """Mass of a term between edge and end, and integral of its signed distance."""
    if (end - edge) * side <= 0:
        return 0.0, 0.0
    parts = math.ceil(abs(end - edge) / _WIDEST_PANEL)
    z = edge + (end - edge) / parts * (np.arange(parts) + NODES)
    density = np.exp(-0.5 * (z + tilt) ** 2) / SQRT_2PI * WEIGHTS
    density = density * abs(end - edge) / parts
    gap = 4 * np.cosh(0.5 * shift * (z + edge)) * np.sinh(0.5 * shift * (z - edge))
    return float(density.sum()), float((density * gap).sum())


def _cells(plan: Plan, low: int, high: int) -> list[tuple[int, int, int]]:
    """Level, first and number of cells from low to high, which are in finest cells."""
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

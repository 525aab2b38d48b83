"""Sums of independent ``2 sinh(s z)``, z normal, bracketed from both sides."""
# NumPy only. Reference: docs/proofs.md, "Random allocation".

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.convex_sums import (
    NODES,
    SQRT_2PI,
    UNIT,
    WEIGHTS,
    Piece,
    added_pieces,
    coarser,
    crowd,
    joined,
    moments_of,
    normal_tail,
    places_of,
)

# Reference: docs/proofs.md, "Random allocation"; Davis (1975), "Interpolation and
# Approximation", Theorem 3.1.1, for the error.

# Numbers of points of the polynomials that are tried.
_SIZES = (2, 4, 6, 8)
# Rounding of a polynomial's value, relative to the sum of its terms' absolute values.
_ROUNDING = 1e-14


def bounds_between(
    points: np.ndarray, low: np.ndarray, high: np.ndarray, cell: int, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of F, (m,), at x between two neighbouring points."""
    # An interpolation at 2m points is off by a derivative of even order, which is
    # positive, times prod (x - x_i) / (2m)!: points shifted by one change its sign.
    below, above = np.zeros(x.shape), np.full(x.shape, np.inf)
    for size in _SIZES:
        first = max(cell + 2 - size, 0)
        for start in range(first, min(cell, len(points) - size) + 1):
            chosen = slice(start, start + size)
            basis = _lagrange(points[chosen], x)
            least = np.where(basis > 0, low[chosen], high[chosen])
            most = np.where(basis > 0, high[chosen], low[chosen])
            slack = _ROUNDING * np.sum(np.abs(basis) * high[chosen], axis=0)
            # With an even number of points above x, F is at least the polynomial.
            if (start + size - 1 - cell) % 2 == 0:
                value = np.sum(basis * least, axis=0) - slack
                below = np.fmax(below, value)
            else:
                value = np.sum(basis * most, axis=0) + slack
                above = np.fmin(above, value)
    return below, above


def _lagrange(points: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(k, m) values of the polynomials that are 1 at one point and 0 at the others."""
    others = [np.delete(points, i)[:, None] for i in range(len(points))]
    rows = zip(points.tolist(), others, strict=True)
    return np.stack([np.prod((x - o) / (point - o), axis=0) for point, o in rows])


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


# Half of the cells of a lattice.
_CELLS = 640
# Mass times spacing below which ends of a row are dropped, or moved to infinity.
_NEGLIGIBLE = 1e-45


class SignedSumBound(NamedTuple):
    """A measure above or below the distribution of a sum S."""

    # For every convex, increasing f >= 0, e^mass_error times the mean of f over the one
    # above, moved up by place_error, is at least E f(S).

    values: np.ndarray  # (n,) increasing
    beyond: np.ndarray  # (n + 1,) masses at each of them and above
    profile: np.ndarray  # (n + 1,) E(S - value)_+
    infinite: float  # part of the mean at infinity
    mass_error: float  # *bounds* of rounding errors
    place_error: float

    def gain(self, y: np.ndarray, *, above: bool) -> np.ndarray:
        """Bound of ``E(S - y)_+`` at (m,) y, from above or from below."""
        sign = 1.0 if above else -1.0
        y = y - sign * (self.place_error + 4 * UNIT * np.abs(y))
        place = np.searchsorted(self.values, y)
        gap = self.values[np.minimum(place, len(self.values) - 1)] - y
        rest = np.maximum(gap, 0.0) * self.beyond[place]
        found = self.profile[place] + rest + self.infinite
        return found * math.exp(sign * self.mass_error)


def sinh_sum(
    count: int,
    shift: float,
    tilt: float,
    threshold: float,
    *,
    above: bool,
    cells: int = _CELLS,
) -> SignedSumBound:
    """Sum of ``2 sinh(shift z)`` over ``count >= 2`` independent z ~ N(-tilt, 1)."""
    plan = planned(count, shift, tilt, threshold, above, cells)
    power, total = _on_levels(one_term(shift, tilt, plan), plan), None
    for bit in range(count.bit_length() - 1):
        if count >> bit & 1:
            total = (
                power if total is None else _on_levels(_added(total, power, plan), plan)
            )
        if count == 2 << bit:  # the last sum need not be moved to lattices
            break
        power = _on_levels(_added(power, power, plan), plan)
    other = power if total is None else total
    total = _added(power, other, plan)
    points, masses = _atoms(total, plan)
    return _signed(points, masses, total, plan)


def _atoms(total: LatticeSum, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Values, increasing, and their masses."""
    values, masses = [], []
    for piece in total.pieces:
        kept = piece.masses > 0
        masses.append(piece.masses[kept])
        if plan.above:
            values.append(places_of(piece)[kept])
        else:
            mean = moments_of(piece)[kept] / masses[-1]
            values.append(mean - total.place_error * 2.0**piece.level)
    points = plan.unit * np.concatenate(values)
    order = np.argsort(points, kind="stable")
    return (points + total.count * plan.center)[order], np.concatenate(masses)[order]


def _signed(
    points: np.ndarray, masses: np.ndarray, total: LatticeSum, plan: Plan
) -> SignedSumBound:
    beyond = np.append(np.cumsum(masses[::-1])[::-1], 0.0)
    gained = np.cumsum((beyond[1:-1] * np.diff(points))[::-1])[::-1]
    return SignedSumBound(
        points,
        beyond,
        np.append(gained, [0.0, 0.0]),
        plan.unit * total.infinite,
        total.mass_error + (8 + 4 * len(points)) * UNIT,
        4 * UNIT * abs(total.count * plan.center),
    )


def _added(a: LatticeSum, b: LatticeSum, plan: Plan) -> LatticeSum:
    """The distribution of the sum of two independent ones; pieces may lie anywhere."""
    parts, operations = added_pieces(a.pieces, None if a is b else b.pieces)
    rounded = UNIT * operations
    return LatticeSum(
        a.count + b.count,
        [_labelled(part) for part in parts],
        a.infinite + b.infinite,
        a.mass_error + b.mass_error + rounded,
        # Means of cells are at most `MEANS` lattices' ends from 0.
        a.place_error + b.place_error + 8 * MEANS * rounded * plan.finest,
    )


def _labelled(piece: Piece) -> Piece:
    """Cells renumbered so that they lie, on average, where their means are."""
    if piece.moments is None:
        return piece
    whole = piece.masses.sum()
    if not whole > 0:
        return piece
    label = piece.masses @ (piece.first + np.arange(len(piece.masses)))
    drift = (piece.moments.sum() / 2.0**piece.level - label) / whole
    return piece._replace(first=piece.first + round(float(drift)))


def _on_levels(total: LatticeSum, plan: Plan) -> LatticeSum:
    """Moves what lies outside of its lattice's range to the next one."""
    base = base_level(total.count)
    left: dict[int, list[Piece]] = {}
    for piece in total.pieces:
        left.setdefault(_next_level(piece.level, base, plan), []).append(piece)
    pieces, infinite, operations = [], total.infinite, 0
    while left:
        level = min(left)
        whole: Piece | None = None
        for piece in left.pop(level):
            moved = coarser(piece, level)
            operations = max(operations, crowd(level - piece.level))
            whole = joined(whole, moved)
        assert whole is not None  # each list has a piece
        half = plan.finest if level == base else plan.others
        whole, sent = _trimmed(whole, plan)
        infinite += sent
        inside, outside = _cut(whole, half)
        if level == plan.top:
            inside, sent = _at_ends(inside, outside, half, plan)
            infinite, outside = infinite + sent, []
        if inside is not None:
            pieces.append(inside)
        for piece in outside:
            left.setdefault(_next_level(level + 1, base, plan), []).append(piece)
    rounded = UNIT * (operations + 40)
    place_error = total.place_error + 8 * MEANS * rounded * plan.finest
    return LatticeSum(
        total.count, pieces, infinite, total.mass_error + rounded, place_error
    )


def _at_ends(
    inside: Piece | None, outside: list[Piece], half: int, plan: Plan
) -> tuple[Piece | None, float]:
    """The last lattice with the rest on it; and the part of the mean at infinity."""
    sent = 0.0
    for piece in outside:
        if not plan.above:
            mass, moment = float(piece.masses.sum()), float(moments_of(piece).sum())
            for cell in far_out(piece.level, mass, moment, half * 2**piece.level):
                inside = joined(inside, cell)
            continue
        at = places_of(piece) / 2.0**piece.level
        end = np.array([piece.masses.sum()])
        side = half if at[0] > 0 else -half
        gap = np.maximum(at - half, 0.0) @ piece.masses
        sent += float(gap) * 2.0**piece.level * (1 + 1e-9)
        inside = joined(inside, Piece(piece.level, side, end, None))
    return inside, sent


def _next_level(level: int, base: int, plan: Plan) -> int:
    """The first level that has a lattice, from this one on."""
    return base if level <= base else max(level, base + level_gap(plan))


def _trimmed(piece: Piece, plan: Plan) -> tuple[Piece, float]:
    """Without negligible masses at both ends; and the part of the mean at infinity."""
    kept = np.flatnonzero(piece.masses * 2.0**piece.level > _NEGLIGIBLE)
    if not len(kept):
        kept = np.array([int(np.argmax(piece.masses))])
    first, last = int(kept[0]), int(kept[-1])
    kept = piece.part(first, last + 1)
    if not plan.above:
        return kept, 0.0
    masses = kept.masses.copy()
    masses[0] += piece.masses[:first].sum()
    over = piece.masses[last + 1 :]
    masses[-1] += over.sum()
    sent = float(over @ np.arange(1, len(over) + 1)) * 2.0**piece.level
    return kept._replace(masses=masses), sent * (1 + 1e-9)


def _cut(piece: Piece, half: int) -> tuple[Piece | None, list[Piece]]:
    """The part within ``half`` points of 0, and the rest on either side."""
    size = len(piece.masses)
    start = min(max(-half - piece.first, 0), size)
    end = min(max(half + 1 - piece.first, 0), size)
    inside = piece.part(start, end) if start < end else None
    outside = [piece.part(i, j) for i, j in ((0, start), (end, size)) if i < j]
    return inside, outside

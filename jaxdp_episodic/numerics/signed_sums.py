"""Sums of independent ``2 sinh(s z)``, z normal, bracketed; NumPy only.

The means ``E(S - y)_+`` of these two-sided sums from above and from below, by the laws
on lattices of `numerics.lattice_pieces`. Two measures are in order here, ``below`` and
``above``, if means of all convex, increasing f >= 0 are: so what counts besides the
steps that keep the mean is that *above* values, or masses, may only be raised, and
*below* only lowered, or lost.

Each lattice has places ``center + i 2^k w``. The finest one has all of a sum's core,
and around it each one is twice as coarse and twice as wide as the one before. What a
sum of two coarse values has in the middle stays on the coarse lattice: values are never
moved but when they leave their lattice's box, or when sums have grown.

Reference: docs/proofs.md, "Random allocation".
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.lattice_pieces import (
    Piece,
    added_pieces,
    coarser,
    crowd,
    joined,
    moments_of,
    places_of,
)

# Half of the cells of a lattice, and how many times as many the finest has, so that the
# second has cells of twice its width; how many deviations of a term the finest reaches.
_CELLS, _FINEST, _DEVIATIONS = 640, 5 / 3, 3.0
# Where a jump is by so many nats likelier than that all terms move, the finest lattice
# is as wide as from the hinge to most terms' sum, with so many places in a deviation.
_SOONER, _ALONE, _RESOLVED = 12.0, 3.0, 30.0
# Of that way, where a lattice ends; how many times as far the last one does, or what so
# many deviations of one term make of it: beyond it values are at its ends, or at their
# mean, no further than so many times that.
_REACHED, _FURTHEST, _FAR_OUT, _MEANS = 1.25, 5.0, 1.5, 8.0
# Widest panel in z; the widest cell about 0; and the finest, over a term's share of
# the hinge, beside which the ends of finer ones would be lost in rounding.
_WIDEST, _NARROW, _OF_HINGE = 0.1, 0.01, 1e-5
# Deviations of one normal variable that are looked at: below, and above one of mean s.
_LOWEST, _HIGHEST = 9.0, 9.3
# Rounding of one operation, and of a cell's end, over its width.
_UNIT = 1.2e-16
# Masses at the ends of a row that are sent away, times the distance of places.
_RARE = 1e-45
_SQRT_2PI = math.sqrt(2 * math.pi)
_NODES, _WEIGHTS = (0.5 * a for a in np.polynomial.legendre.leggauss(6))
_NODES = _NODES[:, None] + 0.5
_WEIGHTS = _WEIGHTS[:, None]


class SignedLaw(NamedTuple):
    """Measure above or below the law of a sum S; see the module.

    For every convex, increasing f >= 0, ``e^mass_error`` times the mean of f over the
    one above, moved up by ``place_error``, is at least ``E f(S)``.

    Attributes:
      values: (n,) increasing.
      beyond: (n + 1,) masses from each of them on.
      profile: (n + 1,) ``E(S - value)_+``.
      infinite: what infinity has of the mean.
      mass_error, place_error: *bounds* of rounding errors.
    """

    values: np.ndarray
    beyond: np.ndarray
    profile: np.ndarray
    infinite: float
    mass_error: float
    place_error: float

    def gain(self, y: np.ndarray, *, above: bool) -> np.ndarray:
        """Bound of ``E(S - y)_+`` at (m,) y, from above or from below."""
        sign = 1.0 if above else -1.0
        y = y - sign * (self.place_error + 4 * _UNIT * np.abs(y))
        place = np.searchsorted(self.values, y)
        gap = self.values[np.minimum(place, len(self.values) - 1)] - y
        rest = np.maximum(gap, 0.0) * self.beyond[place]
        found = self.profile[place] + rest + self.infinite
        return found * math.exp(sign * self.mass_error)


class _Law(NamedTuple):
    """Of a sum of ``count`` terms: pieces of rising level about ``count`` centers.

    All in units of the finest spacing, `place_error` in cells of each level.
    """

    count: int
    pieces: list[Piece]
    infinite: float
    mass_error: float
    place_error: float


class _Plan(NamedTuple):
    """Of all sums of one setting: `unit` is the finest spacing of one term."""

    above: bool
    finest: int  # half of the cells of the finest lattice
    others: int  # and of the others
    center: float
    unit: float
    top: int  # level of the last one


def sinh_sum(
    count: int,
    shift: float,
    tilt: float,
    hinge: float,
    *,
    above: bool,
    cells: int = _CELLS,
    at_hinge: bool = False,
) -> SignedLaw:
    """The sum of ``2 sinh(shift z)`` over ``count >= 2`` independent z ~ N(-tilt, 1).

    Its means ``E(S - y)_+`` are nearest to the truth at y about ``hinge``; one
    ``at_hinge`` bounds that mean alone as near. With half of the cells a law is four
    times as far off, and found in a third of the time.
    """
    plan = _planned(count, shift, tilt, hinge, above, cells)
    power, total = _one_term(shift, tilt, plan), None
    for bit in range(count.bit_length() - 1):
        if count >> bit & 1:
            total = (
                power if total is None else _on_levels(_added(total, power, plan), plan)
            )
        if count == 2 << bit:  # what is added last stays as it is
            break
        power = _on_levels(_added(power, power, plan), plan)
    other = power if total is None else total
    if at_hinge:
        return _at_hinge(power, other, hinge, plan)
    law = _added(power, other, plan)
    places, masses = _atoms(law, plan)
    return _signed(places, masses, law, plan)


def _atoms(law: _Law, plan: _Plan) -> tuple[np.ndarray, np.ndarray]:
    """Values, increasing, and their masses."""
    values, masses = [], []
    for piece in law.pieces:
        kept = piece.masses > 0
        masses.append(piece.masses[kept])
        if plan.above:
            values.append(places_of(piece)[kept])
        else:
            mean = moments_of(piece)[kept] / masses[-1]
            values.append(mean - law.place_error * 2.0**piece.level)
    places = plan.unit * np.concatenate(values)
    order = np.argsort(places, kind="stable")
    return (places + law.count * plan.center)[order], np.concatenate(masses)[order]


def _signed(
    places: np.ndarray, masses: np.ndarray, law: _Law, plan: _Plan
) -> SignedLaw:
    beyond = np.append(np.cumsum(masses[::-1])[::-1], 0.0)
    gained = np.cumsum((beyond[1:-1] * np.diff(places))[::-1])[::-1]
    return SignedLaw(
        places,
        beyond,
        np.append(gained, [0.0, 0.0]),
        plan.unit * law.infinite,
        law.mass_error + (8 + 4 * len(places)) * _UNIT,
        4 * _UNIT * abs(law.count * plan.center),
    )


def _at_hinge(a: _Law, b: _Law, hinge: float, plan: _Plan) -> SignedLaw:
    """Of the sum, what is known at the hinge: given the one, by the other's profile."""
    places, masses = _atoms(a, plan)
    other = _signed(*_atoms(b, plan), b, plan)
    sign = 1.0 if plan.above else -1.0
    y = hinge - sign * 8 * _UNIT * abs(hinge)
    rounded = 4 * _UNIT * (np.abs(places) + abs(a.count * plan.center))
    gains = other.gain(y - places - sign * rounded, above=plan.above)
    gain = float(masses @ gains) + plan.unit * a.infinite * (1 + 1e-9)
    known = np.array([gain, gain if plan.above else 0.0])
    beyond = np.array([1.0 + 1e-9, 0.0]) if plan.above else np.zeros(2)
    error = a.mass_error + (8 + 4 * len(places)) * _UNIT
    return SignedLaw(np.array([y]), beyond, known, 0.0, error, 0.0)


def _planned(
    count: int, shift: float, tilt: float, hinge: float, above: bool, others: int
) -> _Plan:
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
    away, base = abs(hinge - count * mean), _base(count)
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
    return _Plan(above, finest, others, hinge / count, unit, top)


def _base(count: int) -> int:
    """Level of the finest lattice of a sum: its cells grow as deviations do."""
    return (count.bit_length() - 1) // 2


def _one_term(shift: float, tilt: float, plan: _Plan) -> _Law:
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
    error = 16 * _UNIT * float(np.max(size / narrow))
    error += 16 * _UNIT * float(np.max(1 + np.abs(start) + abs(plan.center) / width))
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
    law = _Law(1, pieces, 0.0, error, 0.0)
    far = [
        _beyond(shift, tilt, edge, end, side)
        for edge, end, side in ((edges[0][0], low, -1), (edges[1][-1], high, 1))
    ]
    if plan.above:
        # What is below the first cell is raised to its end.
        pieces[0].masses[1] += far[0][0] + _tail(-low - tilt)
        pieces[-1].masses[-1] += far[1][0] + over
        law = law._replace(infinite=far[1][1] / plan.unit + over_mean)
        return _on_levels(law, plan)
    for piece, at, edge, (mass, gap) in zip(
        (pieces[0], pieces[-1]), (0, -1), (start[0], start[-1] + 1), far, strict=True
    ):
        moment = edge * 2.0**piece.level * mass + gap / plan.unit
        mass, moment = _not_too_far(mass, moment, widest)
        piece.masses[at] += mass
        moments_of(piece)[at] += moment
    return _on_levels(law, plan)


def _not_too_far(mass: float, moment: float, widest: int) -> tuple[float, float]:
    """Lower, beyond where the rounding of means is known: their end, or nothing."""
    most = _MEANS * widest * mass
    return (0.0, 0.0) if moment < -most else (mass, min(moment, most))


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


def _cells(plan: _Plan, low: int, high: int) -> list[tuple[int, int, int]]:
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
            level = level + 1 if level else _gap(plan)
            inner, outer = outer, plan.others * 2**level
    return under[::-1] + over


# --- Sums ---


def _added(a: _Law, b: _Law, plan: _Plan) -> _Law:
    """The law of the sum of two independent ones; pieces may lie anywhere."""
    parts, operations = added_pieces(a.pieces, None if a is b else b.pieces)
    rounded = _UNIT * operations
    return _Law(
        a.count + b.count,
        [_labelled(part) for part in parts],
        a.infinite + b.infinite,
        a.mass_error + b.mass_error + rounded,
        # of cells, which are no further from 0 than the widest box
        a.place_error + b.place_error + 8 * _MEANS * rounded * plan.finest,
    )


def _labelled(piece: Piece) -> Piece:
    """Cells named by where their values are, in the mean."""
    if piece.moments is None:
        return piece
    whole = piece.masses.sum()
    if not whole > 0:
        return piece
    label = piece.masses @ (piece.first + np.arange(len(piece.masses)))
    drift = (piece.moments.sum() / 2.0**piece.level - label) / whole
    return piece._replace(first=piece.first + round(float(drift)))


def _on_levels(law: _Law, plan: _Plan) -> _Law:
    """Puts what lies outside of its lattice's box on the next one."""
    base = _base(law.count)
    left: dict[int, list[Piece]] = {}
    for piece in law.pieces:
        left.setdefault(_next_level(piece.level, base, plan), []).append(piece)
    pieces, infinite, operations = [], law.infinite, 0
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
    rounded = _UNIT * (operations + 40)
    place_error = law.place_error + 8 * _MEANS * rounded * plan.finest
    return _Law(law.count, pieces, infinite, law.mass_error + rounded, place_error)


def _at_ends(
    inside: Piece | None, outside: list[Piece], half: int, plan: _Plan
) -> tuple[Piece | None, float]:
    """The last lattice with what is outside of it at its ends; what infinity gets."""
    sent = 0.0
    for piece in outside:
        at = places_of(piece) / 2.0**piece.level
        side = half if at[0] > 0 else -half
        mass, moment = float(piece.masses.sum()), None
        if plan.above:
            gap = np.maximum(at - half, 0.0) @ piece.masses
            sent += float(gap) * 2.0**piece.level * (1 + 1e-9)
        else:
            moment = float(moments_of(piece).sum())
            widest = half * 2**piece.level
            mass, moment = _not_too_far(mass, moment, widest)
            moment = np.array([moment])
        inside = joined(inside, Piece(piece.level, side, np.array([mass]), moment))
    return inside, sent


def _next_level(level: int, base: int, plan: _Plan) -> int:
    """The first level from this one on that there is."""
    return base if level <= base else max(level, base + _gap(plan))


def _gap(plan: _Plan) -> int:
    """By how many levels the second lattice is coarser than the finest."""
    return (2 * plan.finest // plan.others).bit_length() - 1


def _trimmed(piece: Piece, plan: _Plan) -> tuple[Piece, float]:
    """Without masses too rare to count at both ends, and what infinity gets of them."""
    kept = np.flatnonzero(piece.masses * 2.0**piece.level > _RARE)
    if not len(kept):
        kept = np.array([int(np.argmax(piece.masses))])
    first, last = int(kept[0]), int(kept[-1])
    masses = piece.masses[first : last + 1].copy()
    if not plan.above:
        moments = moments_of(piece)[first : last + 1]
        return Piece(piece.level, piece.first + first, masses, moments), 0.0
    masses[0] += piece.masses[:first].sum()
    over = piece.masses[last + 1 :]
    masses[-1] += over.sum()
    sent = float(over @ np.arange(1, len(over) + 1)) * 2.0**piece.level
    return Piece(piece.level, piece.first + first, masses, None), sent * (1 + 1e-9)


def _cut(piece: Piece, half: int) -> tuple[Piece | None, list[Piece]]:
    """What is within ``half`` places of 0, and the rest on either side."""
    start, end = -half - piece.first, half + 1 - piece.first
    size = len(piece.masses)
    start, end = min(max(start, 0), size), min(max(end, 0), size)

    def part(i: int, j: int) -> Piece | None:
        if i >= j:
            return None
        moments = None if piece.moments is None else piece.moments[i:j]
        return Piece(piece.level, piece.first + i, piece.masses[i:j], moments)

    outside = [p for p in (part(0, start), part(end, size)) if p is not None]
    return part(start, end), outside

"""Sums of independent ``2 sinh(s z)``, z normal, bracketed from both sides."""

# NumPy only. Reference: docs/proofs.md, "Random allocation".

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.lattice_pieces import (
    UNIT,
    Piece,
    added_pieces,
    coarser,
    crowd,
    joined,
    moments_of,
    places_of,
)
from jaxdp_episodic.accountant.numerics.signed_terms import (
    MEANS,
    LatticeSum,
    Plan,
    base_level,
    far_out,
    level_gap,
    one_term,
    planned,
)

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
    at_threshold: bool = False,
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
    if at_threshold:
        return _at_threshold(power, other, threshold, plan)
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


def _at_threshold(
    a: LatticeSum, b: LatticeSum, threshold: float, plan: Plan
) -> SignedSumBound:
    """The sum at the threshold alone: the mean over a of b's profile."""
    points, masses = _atoms(a, plan)
    other = _signed(*_atoms(b, plan), b, plan)
    sign = 1.0 if plan.above else -1.0
    y = threshold - sign * 8 * UNIT * abs(threshold)
    rounded = 4 * UNIT * (np.abs(points) + abs(a.count * plan.center))
    gains = other.gain(y - points - sign * rounded, above=plan.above)
    # Of long rows BLAS's products wake its threads; see `quadrature.in_blocks`.
    gain = float(np.sum(masses * gains)) + plan.unit * a.infinite * (1 + 1e-9)
    known = np.array([gain, gain if plan.above else 0.0])
    beyond = np.array([1.0 + 1e-9, 0.0]) if plan.above else np.zeros(2)
    error = a.mass_error + (8 + 4 * len(points)) * UNIT
    return SignedSumBound(np.array([y]), beyond, known, 0.0, error, 0.0)


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

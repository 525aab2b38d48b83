"""Distributions on nested lattices in pieces, and sums of two; NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.quadrature import gauss_legendre

# Levels by which a row is made coarser in one go: it is padded to that lattice.
_LEVELS_AT_ONCE = 4
# Points in a row without mass from which it is split in two: convolving is quadratic.
_GAP = 64
# Bound of the relative rounding error of one operation: 2^-53, and a margin.
UNIT = 1.2e-16
SQRT_2PI = math.sqrt(2 * math.pi)
# Gauss-Legendre rule on [0, 1], as columns, for the normal density over each cell.
NODES = gauss_legendre(6)[0][:, None]
WEIGHTS = gauss_legendre(6)[1][:, None]


class Piece(NamedTuple):
    """Neighbouring points ``(first + i) 2^level``, or cells that begin there."""

    level: int
    first: int
    masses: np.ndarray
    moments: np.ndarray | None  # of cells: mass times value

    def part(self, i: int, j: int) -> Piece:
        """Its points i to j - 1."""
        moments = None if self.moments is None else self.moments[i:j]
        return Piece(self.level, self.first + i, self.masses[i:j], moments)


def normal_tail(x: float) -> float:
    """``P(N(0, 1) > x)``."""
    return 0.5 * math.erfc(x / math.sqrt(2))


def places_of(piece: Piece) -> np.ndarray:
    """Values of the points."""
    return (piece.first + np.arange(len(piece.masses))) * 2.0**piece.level


def moments_of(piece: Piece) -> np.ndarray:
    """Mass times value of cells."""
    assert piece.moments is not None
    return piece.moments


def added_pieces(
    a: Sequence[Piece], b: Sequence[Piece] | None
) -> tuple[list[Piece], int]:
    """The sum of two independent ones, pairs on the coarser of their lattices."""
    same = b is None
    of_a = {piece.level: piece for piece in a}
    of_b = of_a if b is None else {piece.level: piece for piece in b}
    low_a: Piece | None = None
    low_b: Piece | None = None
    parts: list[Piece] = []
    roundings = longest = 0
    for level in sorted({*of_a, *of_b}):
        roundings += 4 if low_a is None else crowd(level - low_a.level)
        low_a = coarser(low_a, level)
        low_b = low_a if same else coarser(low_b, level)
        own_a, own_b = of_a.get(level), of_b.get(level)
        if same:
            twice = joined(low_a, low_a)
            pairs = [(own_a, joined(twice, own_a))]
        else:
            pairs = [(own_a, joined(low_b, own_b)), (low_a, own_b)]
        for one, other in pairs:
            if one is not None and other is not None:
                parts += _convolved(one, other)
                longest = max(longest, min(len(one.masses), len(other.masses)))
        low_a = joined(low_a, own_a)
        low_b = low_a if same else joined(low_b, own_b)
    return parts, longest + roundings + 8


def crowd(levels: int) -> int:
    """Number of roundings of a mass, at most, by `coarser` and `joined`."""
    return 4 + 2**_LEVELS_AT_ONCE * -(-levels // _LEVELS_AT_ONCE)


def coarser(piece: Piece | None, level: int) -> Piece | None:
    """The piece on a coarser lattice: points are spread, cells are merged."""
    if piece is None or piece.level == level:
        return piece
    if level - piece.level > _LEVELS_AT_ONCE:
        return coarser(coarser(piece, piece.level + _LEVELS_AT_ONCE), level)
    factor = 2 ** (level - piece.level)
    before = piece.first % factor
    after = -(before + len(piece.masses)) % factor
    first = piece.first // factor

    def rows(array: np.ndarray) -> np.ndarray:
        padded = np.zeros(before + len(array) + after)
        padded[before : before + len(array)] = array
        return padded.reshape(-1, factor)

    masses = rows(piece.masses)
    if piece.moments is not None:
        moments = rows(piece.moments).sum(axis=1)
        return Piece(level, first, masses.sum(axis=1), moments)
    share = np.arange(factor) / factor
    spread = np.append(masses @ (1 - share), 0.0)
    spread[1:] += masses @ share
    return Piece(level, first, spread, None)


def joined(a: Piece | None, b: Piece | None) -> Piece | None:
    """The sum of two measures on one lattice."""
    if a is None or b is None:
        return b if a is None else a
    first = min(a.first, b.first)
    size = max(a.first + len(a.masses), b.first + len(b.masses)) - first

    def both(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        result = np.zeros(size)
        result[a.first - first :][: len(x)] += x
        result[b.first - first :][: len(y)] += y
        return result

    masses, moments = both(a.masses, b.masses), None
    if a.moments is not None:
        moments = both(a.moments, moments_of(b))
    return Piece(a.level, first, masses, moments)


def _convolved(a: Piece, b: Piece) -> list[Piece]:
    rows, parts = _rows(a), []
    twin = a is b and len(rows) == 1
    for one in rows:
        for other in rows if a is b else _rows(b):
            mass, moment = np.convolve(one.masses, other.masses), None
            if one.moments is not None:
                moment = np.convolve(one.moments, other.masses)
                moment += moment if twin else np.convolve(one.masses, moments_of(other))
            parts.append(Piece(a.level, one.first + other.first, mass, moment))
    return parts


def _rows(piece: Piece) -> list[Piece]:
    """The piece, split at long gaps without mass."""
    full = np.flatnonzero(piece.masses)
    gaps = np.flatnonzero(np.diff(full) > _GAP)
    if not len(gaps):
        return [piece]
    begins = full[np.append(0, gaps + 1)].tolist()
    ends = (full[np.append(gaps, -1)] + 1).tolist()
    return [piece.part(i, j) for i, j in zip(begins, ends, strict=True)]

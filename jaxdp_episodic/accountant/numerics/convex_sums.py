"""Sums of independent lognormal terms, bounded in convex order; NumPy only.

Also the pieces of lattices that `signed_sums` shares. References: docs/proofs.md,
"Random allocation"; Shaked and Shanthikumar (2007), "Stochastic Orders", Theorem
3.A.12.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.quadrature import gauss_legendre

# Levels by which a row is made coarser at once: it is padded to that lattice.
_LEVELS_AT_ONCE = 4
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
    # (1, ..., n) probabilities of points, or (2, ..., n) those of cells and their
    # products with the values; of one measure or of many on the same lattice.
    rows: np.ndarray

    @property
    def masses(self) -> np.ndarray:
        """The probabilities."""
        return self.rows[0]

    @property
    def moments(self) -> np.ndarray:
        """The probabilities times values, of cells."""
        return self.rows[1]

    @property
    def size(self) -> int:
        """The number of points, or of cells."""
        return self.rows.shape[-1]

    @property
    def places(self) -> np.ndarray:
        """The values of points."""
        return (self.first + np.arange(self.size)) * 2.0**self.level

    def part(self, i: int, j: int) -> Piece:
        """Returns its points i to j - 1."""
        return Piece(self.level, self.first + i, self.rows[..., i:j])


@np.vectorize
def normal_tail(x: float) -> float:
    """``P(N(0, 1) > x)``."""
    return 0.5 * math.erfc(x / math.sqrt(2))


def atoms_of(pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Returns values and probabilities, (..., n); a cell is at its own mean."""
    rows = np.concatenate([piece.rows for piece in pieces], axis=-1)
    if len(rows) == 2:
        return rows[1] / np.where(rows[0] > 0, rows[0], 1.0), rows[0]
    places = np.concatenate([piece.places for piece in pieces])
    return np.broadcast_to(places, rows[0].shape), rows[0]


def added_pieces(a: Sequence[Piece], b: Sequence[Piece]) -> tuple[list[Piece], float]:
    """Returns the sum of two independent distributions, and its rounding error."""
    # Each pair of pieces is added on the coarser lattice of the two.
    same = a is b
    of_a, of_b = ({piece.level: piece for piece in pieces} for pieces in (a, b))
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
                parts.append(_convolved(one, other))
                longest = max(longest, min(one.size, other.size))
        low_a = joined(low_a, own_a)
        low_b = low_a if same else joined(low_b, own_b)
    return parts, UNIT * (longest + roundings + 8)


def crowd(levels: int) -> int:
    """Bounds the number of roundings of a probability in `coarser` and `joined`."""
    return 4 + 2**_LEVELS_AT_ONCE * -(-levels // _LEVELS_AT_ONCE)


def coarser(piece: Piece | None, level: int) -> Piece | None:
    """Moves a piece to a coarser lattice: points are spread, cells are merged."""
    if piece is None or piece.level == level:
        return piece
    if level - piece.level > _LEVELS_AT_ONCE:
        return coarser(coarser(piece, piece.level + _LEVELS_AT_ONCE), level)
    factor = 2 ** (level - piece.level)
    before = piece.first % factor
    number, first = -(-(before + piece.size) // factor), piece.first // factor
    lead = piece.rows.shape[:-1]
    padded = np.zeros((*lead, number * factor))
    padded[..., before : before + piece.size] = piece.rows
    rows = padded.reshape(*lead, number, factor)
    if len(rows) == 2:
        return Piece(level, first, rows.sum(axis=-1))
    share, spread = np.arange(factor) / factor, np.zeros((*lead, number + 1))
    spread[..., :-1] = rows @ (1 - share)
    spread[..., 1:] += rows @ share
    return Piece(level, first, spread)


def joined(a: Piece | None, b: Piece | None) -> Piece | None:
    """Returns the sum of two measures on one lattice."""
    if a is None or b is None:
        return b if a is None else a
    first = min(a.first, b.first)
    size = max(a.first + a.size, b.first + b.size) - first
    rows = np.zeros((*a.rows.shape[:-1], size))
    for piece in (a, b):
        start = piece.first - first
        rows[..., start : start + piece.size] += piece.rows
    return Piece(a.level, first, rows)


def _convolved(a: Piece, b: Piece) -> Piece:
    """Returns the sums of two distributions on one lattice."""

    def each(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if x.ndim == 1:
            return np.convolve(x, y)
        return np.stack([np.convolve(*rows) for rows in zip(x, y, strict=True)])

    rows = [each(a.masses, b.masses)]
    if len(a.rows) == 2:
        moment = each(a.moments, b.masses)
        moment += moment if a is b else each(a.masses, b.moments)
        rows.append(moment)
    return Piece(a.level, a.first + b.first, np.stack(rows))


# Spacing of points near the mean, in deviations of the logarithm; its largest value.
_SPACING = 0.0075
_WIDEST_SPACING = 0.0105
# Spacing of rare large values over their distance from the mean, and over sqrt(s).
_FAR_SPACING = 0.0033
# Largest standard deviation of a sum, over its mean, by which its spacing grows.
_LARGEST_DEVIATION = 0.3
_FURTHEST = 26.0  # truncation of one normal variable
# Probability and part of the mean of a value that may be moved to 0 and to infinity.
_TRIMMED = 1e-200
# Relative error of one term's probabilities, from quadrature.
_FIRST_ERROR = 2e-13
_CACHED = 256  # number of bounds that are cached


class ConvexOrderBound(NamedTuple):
    """A distribution that bounds a sum X, above or below it in convex order."""

    # For convex f >= 0 and Y above X, e^mass_error E f(Y), with Y moved by a share of
    # place_error, is at least E f(X). For Y below, e^-mass_error E f(Y) is at most E
    # f(X).

    count: int  # number of terms
    pieces: list[Piece]  # of increasing level, each beginning where one ends
    lost: float  # further probability of 0
    infinite: float  # part of the mean at infinity
    mass_error: float  # *bounds* of rounding errors, see above
    place_error: float

    def atoms(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns values, (n,), and probabilities; with ``lost`` they are about 1."""
        values, masses = atoms_of(self.pieces)
        kept = masses > 0
        return values[kept], masses[kept]


class _Plan(NamedTuple):
    """Which bound is wanted, and the spacing of its points; see `_panels`."""

    above: bool
    shift: float
    core: float  # spacing near the whole sum's mean
    far: float  # spacing of larger values, over their distance from the mean


@functools.lru_cache(_CACHED)
def lognormal_sum(count: int, shift: float, *, above: bool) -> ConvexOrderBound:
    """Returns a bound of the sum of ``count`` independent ``e^{s x - s²/2}``."""
    relative = min(
        math.sqrt(math.log1p(math.expm1(shift**2) / count)), _LARGEST_DEVIATION
    )
    core, far = _SPACING * count * relative, _FAR_SPACING * math.sqrt(shift)
    plan = _Plan(above, shift, core, far)
    power, total, left = _one_term(plan), None, count
    while left:
        if left % 2:
            total = power if total is None else _on_places(plan, _added(total, power))
        left //= 2
        if left:
            power = _on_places(plan, _added(power, power))
    assert total is not None  # count >= 1
    return total


def _panels(
    low: float, high: float, relative: float, mean: float, plan: _Plan
) -> list[tuple[int, int, int]]:
    """Returns level, first number and number of cells of each piece, ascending."""
    # The spacing is at most core until far times the distance from the mean is larger:
    # a large term stays on its lattice while others are added.
    core, far = plan.core, plan.far
    widest = max(min(relative * low, core), far * (low - mean))
    level = math.floor(math.log2(widest))
    panels, at = [], math.floor(low / 2.0**level) * 2.0**level
    while at < high:
        width, wider = 2.0**level, 2.0 ** (level + 1)
        # From here on the spacing may be twice as large.
        near = wider / relative if wider <= core else math.inf
        end = math.ceil(min(near, mean + wider / far) / wider) * wider
        if end >= high:
            end = math.ceil(high / width) * width
        number = round((end - at) / width)
        if number > 0:
            panels.append((level, round(at / width), number))
        at, level = max(at, end), level + 1
    return panels


def _one_term(plan: _Plan) -> ConvexOrderBound:
    """Returns one term, by quadrature of the normal density over each cell."""
    s = plan.shift
    low = math.exp(-s * (_FURTHEST + 0.5 * s))
    high = math.exp(s * (_FURTHEST + 0.5 * s))
    panels = _panels(low, high, min(_SPACING * s, _WIDEST_SPACING), 1.0, plan)
    starts = [np.arange(i, i + n) * 2.0**k for k, i, n in panels]
    level, first, number = panels[-1]
    places = np.append(np.concatenate(starts), (first + number) * 2.0**level)
    start, gap = places[:-1], np.diff(places)
    width = np.log1p(gap / start) / s
    part = NODES * width
    x = np.log(start) / s + 0.5 * s + part
    density = np.exp(-0.5 * x * x) / SQRT_2PI * WEIGHTS * width
    gain = (density * np.expm1(s * part)).sum(axis=0) * start
    ends = [math.log(value) / s + 0.5 * s for value in (places[0], places[-1])]
    ends = [-ends[0], ends[1], s - ends[0], ends[1] - s]
    under, over, under_mean, over_mean = normal_tail(ends).tolist()
    lost = infinite = 0.0
    if plan.above:
        rest = (density * -np.expm1(s * (part - width))).sum(axis=0) * places[1:]
        rows = (np.append(rest / gap, 0.0) + np.append(0.0, gain / gap))[None]
        # Values above the last point are moved to it and to infinity.
        rows[0, -1] += over
        lost, infinite = under, under_mean + over_mean
    else:
        masses = density.sum(axis=0)
        rows = np.stack([masses, gain + start * masses])
        rows[:, 0] += under, under_mean
        rows[:, -1] += over, over_mean
    pieces = _cut_up(panels, rows)
    return ConvexOrderBound(1, pieces, lost, infinite, _FIRST_ERROR, 4 * UNIT)


def _cut_up(panels: list[tuple[int, int, int]], rows: np.ndarray) -> list[Piece]:
    """Splits rows into panels; of points, the last panel has its end too."""
    cuts = np.cumsum([number for *_, number in panels])[:-1]
    parts = np.split(rows, cuts, axis=-1)
    return [Piece(*panel[:2], part) for panel, part in zip(panels, parts, strict=True)]


def _added(a: ConvexOrderBound, b: ConvexOrderBound) -> ConvexOrderBound:
    """Returns the sum of two independent ones, in pieces of any order."""
    pieces, rounded = added_pieces(a.pieces, b.pieces)
    # The sum is at 0 or infinity if one of the two is: the other's mean goes along.
    means = [float(sum(p.masses @ p.places for p in one.pieces)) for one in (a, b)]
    moved = 2 * rounded if len(pieces[0].rows) == 2 else 0.0
    return ConvexOrderBound(
        a.count + b.count,
        pieces,
        a.lost + b.lost,
        a.infinite + b.infinite + means[0] * b.lost + means[1] * a.lost,
        a.mass_error + b.mass_error + rounded,
        max(a.place_error, b.place_error) + moved,
    )


def _on_places(plan: _Plan, base: ConvexOrderBound) -> ConvexOrderBound:
    """Moves a sum to points, or into cells; negligible ends are left out."""
    values, masses = base.atoms()
    kept = masses * np.maximum(values, 1.0) > _TRIMMED
    weight, inner = masses[kept], values[kept]
    logs = np.log(inner)
    # np.sum, as long BLAS products wake its threads; see `quadrature.in_blocks`.
    middle = np.sum(weight * logs) / weight.sum()
    deviation = math.sqrt(np.sum(weight * (logs - middle) ** 2) / weight.sum())
    relative = min(_SPACING * max(deviation, 1e-9), _WIDEST_SPACING)
    ends = float(inner.min()), float(inner.max())
    panels = _panels(*ends, relative, float(base.count), plan)
    levels, firsts, numbers = np.array(panels).T
    widths, before = 2.0**levels, np.cumsum(numbers) - numbers
    total, starts = int(numbers.sum()), firsts * widths
    top = (firsts[-1] + numbers[-1]) * widths[-1]
    panel = np.clip(np.searchsorted(starts, values, side="right") - 1, 0, None)
    number = values / widths[panel]
    cell = np.floor(number)
    share = number - cell
    cell = np.clip(cell - firsts[panel], 0, numbers[panel] - 1).astype(np.intp)
    cell += before[panel]
    crowd = 4 + int(np.bincount(cell).max())
    base = base._replace(mass_error=base.mass_error + UNIT * crowd)
    moments = masses * values
    if not plan.above:
        rows = np.stack([np.bincount(cell, row, total) for row in (masses, moments)])
        place_error = base.place_error + 2 * UNIT * crowd
        return base._replace(pieces=_cut_up(panels, rows), place_error=place_error)
    under, over = values < starts[0], values >= top
    inside = ~(under | over)
    cell, share, rest = cell[inside], share[inside], masses[inside]
    spread = np.bincount(cell, rest * (1 - share), total + 1)
    spread += np.bincount(cell + 1, rest * share, total + 1)
    spread[-1] += masses[over].sum()
    sent = moments[under].sum() + (moments[over] - top * masses[over]).sum()
    return base._replace(
        pieces=_cut_up(panels, spread[None]),
        lost=base.lost + float(masses[under].sum()),
        infinite=base.infinite + float(sent),
    )

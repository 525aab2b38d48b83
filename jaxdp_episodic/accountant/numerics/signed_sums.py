"""Sums of independent ``2 sinh(s z)``, z normal, and a profile computed from them.

S is the sum of ``count`` terms with z ~ N(-tilt, 1). Its distribution is bounded by
measures *above* and *below*: the mean of every convex, increasing f >= 0 is at least,
or at most, that of f(S). Neighbouring tilts share their lattices. NumPy only.
References: docs/proofs.md, "Random allocation"; Davis (1975), "Interpolation and
Approximation", Theorem 3.1.1, for the error of interpolation.
"""

from __future__ import annotations

import functools
import itertools
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
    atoms_of,
    coarser,
    crowd,
    joined,
    normal_tail,
)

_SIZES = (2, 4, 6, 8)  # numbers of interpolated points that are tried
# Rounding of a polynomial's value, relative to the sum of its terms' absolute values.
_ROUNDING = 1e-14


def bounds_between(
    points: np.ndarray, low: np.ndarray, high: np.ndarray, cell: int, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns bounds of F, (m,), lower and upper, at x between two neighbours."""
    # F is known by bounds at the points; its derivatives of even order are positive.
    # The error of interpolation at 2m points is a derivative of even order, which is
    # positive, times prod (x - x_i) / (2m)!. Moving the points by one changes its sign.
    below, above = np.zeros(x.shape), np.full(x.shape, np.inf)
    for size in _SIZES:
        first = max(cell + 2 - size, 0)
        for start in range(first, min(cell, len(points) - size) + 1):
            chosen = slice(start, start + size)
            # Polynomials that are 1 at one of the points, 0 at the others.
            basis = np.empty((size, len(x)))
            for i, point in enumerate(points[chosen].tolist()):
                others = np.delete(points[chosen], i)[:, None]
                basis[i] = np.prod((x - others) / (point - others), axis=0)
            slack = _ROUNDING * np.sum(np.abs(basis) * high[chosen], axis=0)
            # With an even number of points above x, F is at least the polynomial.
            if (start + size - 1 - cell) % 2 == 0:
                least = np.where(basis > 0, low[chosen], high[chosen])
                below = np.fmax(below, np.sum(basis * least, axis=0) - slack)
            else:
                most = np.where(basis > 0, high[chosen], low[chosen])
                above = np.fmin(above, np.sum(basis * most, axis=0) + slack)
    return below, above


# Cells of the finest lattice over the others': the second one's are twice as wide.
_FINEST_RATIO = 5 / 3
# Standard deviations of one term that the finest lattice covers.
_DEVIATIONS = 3.0
# The finest lattice covers threshold and mean if one jump of a term to the threshold is
# by these nats likelier than a shift of all terms; few others move along, as their
# number is above 3 s times the jump; and the mean is two deviations of the sum away:
# nearer to it, the sum has many scales, and bounds became a thousand times wider.
_JUMP_NATS = 12.0
_JUMP_TERMS = 3.0
_LEAST_AWAY = 2.0
# Smallest number of its points in a standard deviation of the sum.
_POINTS_PER_DEVIATION = 30.0
# End of a lattice, relative to the distance from the mean to the threshold.
_REACH = 1.25
# End of the last lattice: five times as far, or 1.5 deviations of one term; and z = s +
# 3, tilted, beyond which a term has little of its mean.
_FURTHEST = 5.0
_FURTHEST_DEVIATIONS = 1.5
_BEYOND_MEAN = 3.0
# Bound of the means of cells beyond the last lattice, over its end.
MEANS = 8.0
_WIDEST_PANEL = 0.1  # widest panel of the quadrature in z
# Widest cell around 0, in z; and the narrowest, relative to a term's share of the
# threshold: the ends of narrower cells would be lost in rounding.
_WIDEST_CELL = 0.01
_NARROWEST_CELL = 1e-5
# Truncation of the normal variable: below, and above a mean of s.
_LOWEST = 9.0
_HIGHEST = 9.3


class LatticeSum(NamedTuple):
    """Measures near the distributions of sums of ``count`` terms minus centers."""

    count: int
    pieces: list[Piece]  # masses are (tilts, n)
    infinite: np.ndarray  # (tilts,) part of the mean at infinity
    mass_error: float  # bound of the rounding errors of probabilities, relative
    place_error: float  # and of the means of cells, in finest cells


class Plan(NamedTuple):
    """The layout of the lattices of all partial sums."""

    above: bool  # whether the measures are above, or below
    finest: int  # half of the number of cells of the finest lattice
    others: int  # and of the others
    center: float  # of one term's lattices: its share of the threshold
    unit: float  # spacing of the finest lattice of one term
    top: int  # level of the last lattice


def planned(
    count: int, shift: float, tilt: float, threshold: float, above: bool, others: int
) -> Plan:
    """Returns the layout: finest around the threshold, as wide as nearly all terms."""
    # Even, so that cells of the next lattice begin where these end.
    others, finest = others // 2 * 2, round(0.5 * _FINEST_RATIO * others) * 2
    x = NormalDist().inv_cdf(1 - 1 / (4 * count)) * np.linspace(-1, 1, 401)
    weight = np.exp(-0.5 * x * x)
    weight, value = weight / weight.sum(), 2 * np.sinh(shift * (x - tilt))
    mean = float(value @ weight)
    deviation = math.sqrt(float((value - mean) ** 2 @ weight))
    unit = 2 * _DEVIATIONS * deviation / finest
    unit = max(min(unit, 2 * _WIDEST_CELL * shift), _NARROWEST_CELL * threshold / count)
    # Distance of the mean from the threshold, and the jump of one term that covers it.
    away, base = abs(threshold - count * mean), base_level(count)
    jump = math.asinh(0.5 * away) / shift + tilt
    of_sum = deviation * math.sqrt(count)
    by_one = count > _JUMP_TERMS * shift * jump and away > _LEAST_AWAY * of_sum
    if by_one and 0.5 * count * tilt * tilt > 0.5 * jump * jump + _JUMP_NATS:
        fine = of_sum / _POINTS_PER_DEVIATION
        unit = max(unit, min(_REACH * away / finest, fine) / 2**base)
    # One lattice ends just beyond that jump, where it resolves the jump best.
    level = round(math.log2(max(_REACH * away / (others * unit), 1.0)))
    if level > 0:
        unit = _REACH * away / (others * 2**level)
    last = max(_FURTHEST, 2 * math.exp(_FURTHEST_DEVIATIONS * shift))
    last *= max(away, 8 * of_sum)
    largest = math.sinh(shift * max(shift - tilt + _BEYOND_MEAN, 0.0))
    last = max(last, 2 * largest) / (others * unit)
    top = max(math.ceil(math.log2(last)), base + 1)
    return Plan(above, finest, others, threshold / count, unit, top)


def base_level(count: int) -> int:
    """Returns the level of a sum's finest lattice: cells widen with its deviation."""
    return (count.bit_length() - 1) // 2


def one_term(shift: float, tilt: np.ndarray, plan: Plan) -> LatticeSum:
    """Returns one term, by quadrature of the normal density over each cell."""
    low = -float(tilt.max()) - _LOWEST
    high = shift - float(tilt.min()) + _HIGHEST
    ends = [(2 * math.sinh(shift * z) - plan.center) / plan.unit for z in (low, high)]
    widest = plan.others * 2**plan.top
    rows = _cells(
        plan, max(math.floor(ends[0]), -widest), min(math.ceil(ends[1]), widest)
    )
    level = np.concatenate([np.full(number, k) for k, _, number in rows])
    start = np.concatenate([first + np.arange(number) for _, first, number in rows])
    width = plan.unit * 2.0**level
    begin, end = (
        np.arcsinh(0.5 * (plan.center + (start + i) * width)) / shift for i in (0, 1)
    )
    # A cell more on either side, for what is beyond the lattices.
    lefts, rights = (np.concatenate([begin[:1], x, end[-1:]]) for x in (begin, end))
    wide = np.concatenate([[plan.unit], width, [plan.unit]])
    left, right = (np.clip(x, low, high) for x in (lefts, rights))
    left[0], right[-1] = low, high
    parts = np.ceil(np.maximum(right - left, 0.0) / _WIDEST_PANEL).astype(int)
    cell = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(cell)) - np.repeat(np.cumsum(parts) - parts, parts)
    piece = ((right - left) / np.maximum(parts, 1))[cell]
    z = left[cell] + (number + NODES) * piece
    density = np.exp(-0.5 * (z + tilt[:, None, None]) ** 2) / SQRT_2PI * WEIGHTS * piece

    def in_cells(value: np.ndarray) -> np.ndarray:
        """Integrals over each cell of a value at the nodes, (tilts, cells)."""
        each = (density * value).sum(axis=1)
        return np.stack([np.bincount(cell, row, len(parts)) for row in each])

    def mean_gap(edge: np.ndarray) -> np.ndarray:
        """Integral of the distance of values from an edge, over each cell's width."""
        from_edge, about = 0.5 * shift * (z - edge), 0.5 * shift * (z + edge)
        return in_cells(np.abs(4 * np.cosh(about) * np.sinh(from_edge)) / wide[cell])

    gain, rest = mean_gap(lefts[cell]), mean_gap(rights[cell])
    masses = in_cells(np.ones_like(z))
    narrow = (end - begin)[parts[1:-1] > 0]
    error = 16 * UNIT * float(np.max((max(abs(low), abs(high)) + 1) / narrow))
    error += 16 * UNIT * float(np.max(1 + np.abs(start) + abs(plan.center) / width))
    over = normal_tail(high + tilt)
    # Values beyond ``high`` exceed the last one by less than e^{sz} + e^{-s high}.
    over_mean = np.exp(0.5 * shift**2 - shift * tilt) * normal_tail(high + tilt - shift)
    over_mean = (over_mean + over * math.exp(-shift * high)) / plan.unit
    pieces, at = [], 0
    for k, first, number_of in rows:
        chosen = (slice(None), slice(at + 1, at + 1 + number_of))
        if plan.above:
            row = np.pad(rest[chosen], ((0, 0), (0, 1)))
            row[:, 1:] += gain[chosen]
            own = [row]
        else:
            moment = start[at : at + number_of] * masses[chosen] + gain[chosen]
            own = [masses[chosen], moment * 2.0**k]
        pieces.append(Piece(k, first, np.stack(own)))
        at += number_of
    term = LatticeSum(1, pieces, np.zeros(len(tilt)), error, 0.0)
    if plan.above:
        # Values below the first cell are raised to its end.
        pieces[0].masses[:, 1] += masses[:, 0] + normal_tail(-low - tilt)
        pieces[-1].masses[:, -1] += masses[:, -1] + over
        return term._replace(infinite=gain[:, -1] + over_mean)
    for piece, edge, mass, gap in (
        (pieces[0], start[0], masses[:, 0], -rest[:, 0]),
        (pieces[-1], start[-1] + 1, masses[:, -1], gain[:, -1]),
    ):
        moment = edge * 2.0**piece.level * mass + gap
        pieces += far_out(piece.level, mass, moment, widest)
    return term


def far_out(
    level: int, mass: np.ndarray, moment: np.ndarray, widest: int
) -> list[Piece]:
    """Returns a cell at its own mean for values beyond a lattice; a measure below."""
    most = MEANS * widest * mass
    kept = (mass > 0) & (moment >= -most)
    if not np.any(kept):
        return []
    moment = np.minimum(moment, most)
    place = np.round(moment[kept] / mass[kept] / 2.0**level).astype(int)
    first = int(place.min())
    cells = np.zeros((2, len(mass), int(place.max()) - first + 1))
    cells[:, kept, place - first] = mass[kept], moment[kept]
    return [Piece(level, first, cells)]


def _cells(plan: Plan, low: int, high: int) -> list[tuple[int, int, int]]:
    """Returns level, first and number of cells from low to high (in finest cells)."""
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
            level += 1
            inner, outer = outer, plan.others * 2**level
    return under[::-1] + over


# Probability times spacing below which ends of a row are dropped, or moved to infinity.
_NEGLIGIBLE = 1e-45


class SignedSumBound(NamedTuple):
    """A measure above or below the distribution of a sum S."""

    # For every convex, increasing f >= 0, e^mass_error times the mean of f over the
    # measure above, moved up by place_error, is at least E f(S).

    values: np.ndarray  # (n,) increasing
    beyond: np.ndarray  # (n + 1,) probability of each of them and above
    profile: np.ndarray  # (n + 1,) E(S - value)_+
    infinite: float  # part of the mean at infinity
    mass_error: float  # *bounds* of rounding errors
    place_error: float

    def gain(self, y: np.ndarray, *, above: bool) -> np.ndarray:
        """Returns a bound of ``E(S - y)_+`` at (m,) y, from above or from below."""
        sign = 1.0 if above else -1.0
        y = y - sign * (self.place_error + 4 * UNIT * np.abs(y))
        place = np.searchsorted(self.values, y)
        gap = self.values[np.minimum(place, len(self.values) - 1)] - y
        rest = np.maximum(gap, 0.0) * self.beyond[place]
        found = self.profile[place] + rest + self.infinite
        return found * math.exp(sign * self.mass_error)


def sinh_sums(
    count: int, shift: float, tilt: np.ndarray, at: float, above: bool, cells: int
) -> list[SignedSumBound]:
    """Returns bounds of a sum of ``count >= 2`` terms at each tilt, best ``at`` y."""
    plan = planned(count, shift, float(tilt.mean()), at, above, cells)
    power, total = _on_levels(one_term(shift, tilt, plan), plan), None
    for bit in range(count.bit_length() - 1):
        if count >> bit & 1:
            added = total and _on_levels(_added(total, power, plan), plan)
            total = added or power
        if count == 2 << bit:  # the last sum need not be moved to lattices
            break
        power = _on_levels(_added(power, power, plan), plan)
    other = power if total is None else total
    return _signed(_added(power, other, plan), plan)


def _signed(total: LatticeSum, plan: Plan) -> list[SignedSumBound]:
    """Returns the bounds that distributions on lattices, or in cells, are."""
    points, masses = atoms_of(total.pieces)
    if not plan.above:
        widths = [np.full(piece.size, 2.0**piece.level) for piece in total.pieces]
        points = points - total.place_error * np.concatenate(widths)
    away = total.count * plan.center
    found = []
    for mass, point, infinite in zip(masses, points, total.infinite, strict=True):
        kept = mass > 0
        mass, point = mass[kept], point[kept]
        order = np.argsort(point, kind="stable")
        values = (plan.unit * point + away)[order]
        beyond = np.append(np.cumsum(mass[order][::-1])[::-1], 0.0)
        gained = np.cumsum((beyond[1:-1] * np.diff(values))[::-1])[::-1]
        profile, far = np.append(gained, [0.0, 0.0]), plan.unit * float(infinite)
        errors = total.mass_error + (8 + 4 * len(values)) * UNIT, 4 * UNIT * abs(away)
        found.append(SignedSumBound(values, beyond, profile, far, *errors))
    return found


def _added(a: LatticeSum, b: LatticeSum, plan: Plan) -> LatticeSum:
    """Returns the distribution of the sum of two independent ones."""
    parts, rounded = added_pieces(a.pieces, b.pieces)
    for i, piece in enumerate(parts):
        whole = piece.masses.sum()
        if not plan.above and whole > 0:
            # Renumbers cells so that they lie, on average, where their means are.
            label = (piece.masses @ (piece.first + np.arange(piece.size))).sum()
            drift = (piece.moments.sum() / 2.0**piece.level - label) / whole
            parts[i] = piece._replace(first=piece.first + round(float(drift)))
    return LatticeSum(
        a.count + b.count,
        parts,
        a.infinite + b.infinite,
        a.mass_error + b.mass_error + rounded,
        # Means of cells are at most `MEANS` lattices' ends from 0.
        a.place_error + b.place_error + 8 * MEANS * rounded * plan.finest,
    )


def _on_levels(total: LatticeSum, plan: Plan) -> LatticeSum:
    """Moves what lies outside of its lattice's range to the next lattice."""
    base = base_level(total.count)
    left: dict[int, list[Piece]] = {}
    for piece in total.pieces:
        left.setdefault(max(piece.level, base), []).append(piece)
    pieces, infinite, operations = [], total.infinite, 0
    while left:
        level = min(left)
        whole: Piece | None = None
        for piece in left.pop(level):
            operations = max(operations, crowd(level - piece.level))
            whole = joined(whole, coarser(piece, level))
        assert whole is not None  # each list has a piece
        half = plan.finest if level == base else plan.others
        whole, sent = _trimmed(whole, plan)
        infinite += sent
        ends = -half - whole.first, half + 1 - whole.first
        start, end = (min(max(end, 0), whole.size) for end in ends)
        inside = whole.part(start, end) if start < end else None
        rest = (0, start), (end, whole.size)
        outside = [whole.part(i, j) for i, j in rest if i < j]
        if level == plan.top:
            inside, sent = _at_ends(inside, outside, half, plan)
            infinite, outside = infinite + sent, []
        if inside is not None:
            pieces.append(inside)
        for piece in outside:
            left.setdefault(level + 1, []).append(piece)
    rounded = UNIT * (operations + 40)
    place_error = total.place_error + 8 * MEANS * rounded * plan.finest
    return LatticeSum(
        total.count, pieces, infinite, total.mass_error + rounded, place_error
    )


def _at_ends(
    inside: Piece | None, outside: list[Piece], half: int, plan: Plan
) -> tuple[Piece | None, np.ndarray | float]:
    """Adds the rest to the last lattice; also returns the mean's part at infinity."""
    sent = 0.0
    for piece in outside:
        if not plan.above:
            mass, moment = piece.rows.sum(axis=-1)
            for cell in far_out(piece.level, mass, moment, half * 2**piece.level):
                inside = joined(inside, cell)
            continue
        at = piece.places / 2.0**piece.level
        end = piece.rows.sum(axis=-1, keepdims=True)
        side = half if at[0] > 0 else -half
        gap = piece.masses @ np.maximum(at - half, 0.0)
        sent += gap * 2.0**piece.level * (1 + 1e-9)
        inside = joined(inside, Piece(piece.level, side, end))
    return inside, sent


def _trimmed(piece: Piece, plan: Plan) -> tuple[Piece, np.ndarray | float]:
    """Removes negligible ends; and returns the part of the mean at infinity."""
    most = piece.masses.max(axis=0)
    kept = np.flatnonzero(most * 2.0**piece.level > _NEGLIGIBLE)
    if not len(kept):
        kept = np.array([int(np.argmax(most))])
    first, last = int(kept[0]), int(kept[-1])
    inner = piece.part(first, last + 1)
    if not plan.above:
        return inner, 0.0
    rows, over = inner.rows.copy(), piece.masses[:, last + 1 :]
    rows[0, :, 0] += piece.masses[:, :first].sum(axis=-1)
    rows[0, :, -1] += over.sum(axis=-1)
    sent = over @ np.arange(1, over.shape[-1] + 1) * 2.0**piece.level
    return inner._replace(rows=rows), sent * (1 + 1e-9)


# --- Bounds of the profile D_t of random allocation under replace_one ---

# Its order of losses is u = log g; ``t D(e^u) = e^{u/2 - s²/2} E(S - y)_+`` with tilt
# ``u / 2s`` and a threshold y.
# Number of settings of which the bounds are cached.
_CACHED = 256
# Nodes on either side of a cell that a polynomial interpolates.
_AROUND = 3
# Largest exponent, in nats, by which interpolated means are scaled.
_LARGEST_EXPONENT = 250.0
# Relative rounding error of values computed from `SignedSumBound.gain`.
GAIN_ROUNDING = 1e-11
# Distance of nodes, in standard deviations of ``z_1 + ... + z_j``, at which the
# polynomial through eight of them has the relative error `_CHORD_ERROR`.
_NODE_DISTANCE = 0.28
_CHORD_ERROR = 1e-5
# Target for the relative error of D. The largest factor of it where D decreases
# steeply, as epsilon's error is that of D over the slope; and the factor below each of
# these levels of log D; and in a part of an epoch.
_ERROR = 1.5e-4
_STEEPEST = 8.0
_LEVELS = (-30.0, -37.0)
_LOOSER = 8.0
_LOOSER_OF_PART = 1.4
_MOST_FALL = 6.0  # of log D between nodes of a part of an epoch, by its slope so far
_LEAST_LOG_D = -42.0  # nodes end where log D is below it
_MOST_NODES = 400
_MOST_AT_ONCE = 16  # nodes whose sums are computed at once
# Their distance: terms grow by e^{1/2} between them, or by e^{s/4} of their e^{s z}; in
# a part of an epoch, where the threshold is about as u, also a share of u.
_MOST_APART = 1.0
_NEAREST_THRESHOLDS = 0.1
# Number of cells of the sums: at first, smallest and largest.
_FIRST_CELLS = 320
_FEWEST_CELLS = 96
_MOST_CELLS = 1024
# Losses between two nodes: smallest and largest number; and the decrease of log D from
# one to the next, over the square root of the target.
_FEWEST_LOSSES = 32
_MOST_LOSSES = 1024
_FALL = 0.25


class Node(NamedTuple):
    """A loss u = log g at which D is bounded from both sides."""

    u: float
    log_d: float  # upper bound of log D
    below: SignedSumBound  # bounds of the distribution of S
    above: SignedSumBound


class SignedProfile(NamedTuple):
    """The profile D of ``count`` of ``steps`` steps of an epoch with a shift s."""

    steps: int
    count: int
    shift: float

    def scale(self, u: np.ndarray | float):
        """Returns the factor of ``E(S - y)_+`` that gives D."""
        return np.exp(0.5 * (u - self.shift * self.shift)) / self.steps

    def threshold(self, u: np.ndarray | float):
        """Returns y."""
        idle = self.steps - self.count
        return 2 * np.sinh(0.5 * u) * math.exp(0.5 * self.shift**2) * idle


def _cell_bounds(
    nodes: list[Node], cell: int, u: np.ndarray, profile: SignedProfile
) -> tuple[np.ndarray, np.ndarray]:
    """Returns bounds of D at u between two nodes, by interpolation at the nodes.

    The function F that is interpolated is ``e^{j tilt²/2} E(S - y)_+``, with the
    threshold y of u.
    """
    count, shift = profile.count, profile.shift
    threshold = profile.threshold(u)
    # Of the scale and the threshold, relatively.
    rounded = UNIT * (16 + shift**2 + 2 * float(u[-1])) * threshold
    tilt = 0.5 * u / shift
    middle = 0.5 * float(tilt[0] + tilt[-1])
    # Nodes at negative u are the mirror images of those at positive u.
    numbers = range(cell - _AROUND, min(cell + 2 + _AROUND, len(nodes)))
    numbers = [i for i in numbers if -i < len(nodes)]
    rows = []
    for i in numbers:
        node = nodes[abs(i)]
        place = 0.5 * node.u / shift
        sign = 1 if i >= 0 else -1
        bounds = [
            sums.gain(sign * threshold - toward * rounded, above=up)
            for sums, up, toward in ((node.below, False, -1), (node.above, True, 1))
        ]
        if i < 0:
            # E(-S - y)_+ = E(S + y)_+ - E S - y
            mean = -2 * count * math.exp(0.5 * shift**2) * math.sinh(shift * place)
            slack = GAIN_ROUNDING * (abs(mean) + threshold)
            bounds = [
                np.maximum(bound - mean - threshold + s * slack, 0.0)
                for bound, s in zip(bounds, (-1, 1), strict=True)
            ]
        rows.append((sign * place, *bounds))
    where, low, high = (np.stack(part) for part in zip(*rows, strict=True))
    # Scaled so that F is similar at both ends of the cell.
    away = where - middle
    one = numbers.index(cell)
    ends = [math.log(max(float(high[one + i][len(u) // 2]), 1e-300)) for i in (0, 1)]
    gap = where[one + 1] - where[one]
    center = -(ends[1] - ends[0]) / gap - count * middle

    def exponent(away: np.ndarray) -> np.ndarray:
        return away * (count * middle + 0.5 * count * away + center)

    # Beyond this range means over- or underflow, and give no bounds.
    usable = np.abs(exponent(away)) < _LARGEST_EXPONENT
    if not np.all(usable[one : one + 2]):
        return np.zeros_like(u), np.full_like(u, np.inf)
    first = one - int(np.argmin(np.append(usable[one::-1], False))) + 1
    last = one + int(np.argmin(np.append(usable[one:], False)))
    kept = slice(first, last)
    factor = np.exp(exponent(away[kept]))[:, None]
    found = bounds_between(
        where[kept],
        low[kept] * factor * (1 - GAIN_ROUNDING),
        high[kept] * factor * (1 + GAIN_ROUNDING),
        one - first,
        tilt,
    )
    back = profile.scale(u) * np.exp(-exponent(tilt - middle))
    return found[0] * back, found[1] * back


@functools.lru_cache(_CACHED)
def profile_bounds(steps: int, count: int, shift: float) -> tuple[np.ndarray, ...]:
    """Returns losses u, (n,) from 0, and bounds of D there, lower and upper."""
    profile = SignedProfile(steps, count, shift)
    nodes = _nodes(profile)
    rows = []
    for i, (a, b) in enumerate(itertools.pairwise(nodes)):
        end = i == len(nodes) - 2
        fall = max(a.log_d - b.log_d, 0.0)
        within = _allowed(profile, b.u, a.log_d, fall / (b.u - a.u))
        number = math.ceil(fall / (_FALL * math.sqrt(within)))
        number = min(max(number, _FEWEST_LOSSES), _MOST_LOSSES)
        u = np.linspace(a.u, b.u, number + 1)[: number + end]
        rows.append((u, *_cell_bounds(nodes, i, u, profile)))
    return tuple(np.concatenate(part) for part in zip(*rows, strict=True))


def _allowed(profile: SignedProfile, u: float, log_d: float, slope: float) -> float:
    """Returns the relative error of D that a node may have."""
    factor = _LOOSER if profile.count == profile.steps else _LOOSER_OF_PART
    looser = factor ** sum(log_d < level for level in _LEVELS)
    return _ERROR * looser * min(max(1.0, u * slope), _STEEPEST)


def _nodes(profile: SignedProfile) -> list[Node]:
    """Returns nodes as far apart as the target allows."""
    steps, count, shift = profile
    nodes: list[Node] = []
    gains, log_d, last = [0.0, 0.0], 0.0, 0.0
    u, step, cells = 0.0, 0.0, _FIRST_CELLS
    # Standard deviation of the loss for large noise.
    deviation = 2 * shift * math.sqrt(count) / steps
    apart = 2 * shift * _NODE_DISTANCE / math.sqrt(count)
    while True:
        near = max(_MOST_APART, 0.5 * shift)
        near = near if steps == count else min(near, _NEAREST_THRESHOLDS * u)
        most = min(len(nodes) // 2, int(near / max(step, 0.01)), _MOST_AT_ONCE - 1)
        places = u + step * np.arange(1 + most)
        at = profile.threshold(places)
        given = count, shift, 0.5 * places / shift, float(at.mean())
        every = [sinh_sums(*given, above=up, cells=cells) for up in (False, True)]
        for u, y, *sums in zip(places.tolist(), at, *every, strict=True):
            ends = zip(sums, (False, True), strict=True)
            gains = [float(one.gain(y[None], above=up)[0]) for one, up in ends]
            last = log_d
            log_d = math.log(gains[1]) + math.log(profile.scale(u))
            nodes.append(Node(u, log_d, *sums))
            # D decreases; bounds that increase again come from truncation.
            is_lost = last < _LEVELS[0] and log_d >= last
            if log_d < _LEAST_LOG_D or is_lost or len(nodes) >= _MOST_NODES:
                return nodes
        # At g = 1 D decreases with slope (1 - D) / 2 in g.
        slope = (last - log_d) / step if step else 0.5 * math.expm1(max(-log_d, 0.0))
        slope = max(slope, 1e-3)
        within = _allowed(profile, u, log_d, slope)
        cells = int(cells * math.sqrt(max((1 - gains[0] / gains[1]) / within, 1e-3)))
        cells = min(max(cells, _FEWEST_CELLS), _MOST_CELLS)
        chord = 0.5 * within
        # The error of interpolation at eight nodes is of order eight.
        step = max(
            apart * (chord / _CHORD_ERROR) ** 0.125,
            math.sqrt(8 * chord / (slope * (1 + slope))),
        )
        if steps != count:  # D decreases sooner
            step = min(step, max(deviation, 0.5 * u), _MOST_FALL / slope)
        u += step

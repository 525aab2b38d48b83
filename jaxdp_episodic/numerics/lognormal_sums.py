"""Tails of a sum X of independent lognormal terms of mean 1.

With ``A = e^{s x - s²/2}``, x standard normal, and T = X - x, or x - X, of n terms,

    E[T_+] = (1/2 pi i) int K(p)^n e^{p k} / p² dp,   K(p) = E e^{±p (A - m)},

k = ±(n m - x) for any m; P(T > 0) is the same with 1/p and the density of T at 0 with 1
in place of 1/p². For X - x the contour follows the positive axis up to c as in
`numerics.skewed_sums`, and leaves it there on a ray into the upper half plane; for
x - X, where K is entire, it crosses the axis at c.

K does not know of x, so a contour serves all places whose best c is some widths of the
integrand away: a few contours are enough for a table, and what a place costs besides is
one exponential a node.

Where contours run is decided here, for many sums side by side. What costs time are
kernels, for either engine, whose rows are independent: of K on the axis and on rays
(`numerics.lognormal_terms`, `lognormal_rays`). The tails are NumPy's.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.lognormal_rays import Path, log_law_on_rays, paths
from jaxdp_episodic.numerics.lognormal_tails import Contours, Jumps, Rays
from jaxdp_episodic.numerics.lognormal_terms import (
    AxisLaw,
    Call,
    Sums,
    by_rows,
    law_on_axis,
    log_axis_law,
)
from jaxdp_episodic.numerics.loops import complex_of
from jaxdp_episodic.numerics.quadrature import (
    between_equal,
    chebyshev_points,
    in_turn,
    side_by_side,
    through_columns,
    through_points,
)
from jaxdp_episodic.numerics.skewed_terms import (
    gauss,
    larger_saddle,
    log_last,
    place_of,
)

# Where a contour may start: logarithms of p so far apart, of which one in some is
# computed; and Gauss-Legendre rules of the law there, and of the law of jumps, whose
# errors finer sums share: below 1e-12 but where tails of two terms under much noise are
# rarer than e^-70.
_STEP, _SOME = 0.125, 3
_ROUGH, _FINE = ((24, 3), (24, 1)), ((24, 4), (40, 1))
# Contours are so many widths of the integrand apart; finer ones, that have so many
# times the nodes, lie elsewhere: with 4.5 they are off by more under little noise.
_APART, _FINER = (3.4, 3.8), 1.4
# Places, in parts of the range, for whose starts contours are chosen.
_PLACES = np.linspace(0, 1, 16) ** 2
# Of rays: slope against the vertical, nodes, twice as many of fewer terms with a light
# shift, and how many of them have one path for the law of one term.
_LEAN, _NODES, _FEW, _BLOCK = 0.4, 64, 16, 8
# Places of a ray at which the law of large sums is known, and of small ones with a
# shift below this, and of others.
_KNOWN, _SOFT = (24, 32, 48), 3.0
# Where the end of a ray is looked for, in asinh of widths, by how many of the law's
# nodes; it is so many nats down.
_SCOUTS, _ROUGHLY, _FALL = np.linspace(1.2, math.asinh(90), 16), 0.45, 37.0
# On the axis the rest does not count, or it is the ray that turns.
_NOTHING, _LARGEST_PHASE = -200.0, 6.0
# Chebyshev nodes of the law along the axis; panels of jumps, and for shifts above 2,
# over 1 + shift; and nodes of each.
_CHEBYSHEV, _PANELS, _EACH = (64, 88), ((3, 4), (4, 6)), 22
_ABSENT = -1e300  # logarithm of what is not there


class Axis(NamedTuple):
    """Where contours may start: of S sums (S, C), NaN behind the last.

    Attributes:
      terms: what is added up.
      log_p: rising.
      power, phase: real and imaginary part of ``n log K``.
      number: (S,) how many there are.
    """

    terms: Sums
    log_p: np.ndarray
    power: np.ndarray
    phase: np.ndarray
    number: np.ndarray

    def take(self, rows: np.ndarray) -> Axis:
        """Of some sums."""
        return Axis(self.terms.take(rows), *(field[rows] for field in self[1:]))


def axis_of(terms: Sums, call: Call = by_rows) -> Axis:
    """Where contours of sums may start; those that rise stand before the others."""
    s, up = terms.shift, terms.rising > 0
    with np.errstate(all="ignore"):
        low = -0.5 * np.log(terms.count * np.expm1(s * s)) - 0.5
        high = log_last(s) - 0.02
        length = np.where(up, high - low, 20 + 12 * s)
        known = np.maximum(np.ceil(length / _STEP / _SOME).astype(int), 7)
        number = _SOME * known + 1
        low = np.where(up, high - _STEP * (number - 1), low)
        log_p = low[:, None] + _STEP * np.arange(number.max())
        is_there = np.arange(number.max()) < number[:, None]
        both = np.full((2, *log_p.shape), np.nan)
        for kind in (True, False):
            row, column = np.nonzero((is_there & (up == kind)[:, None])[:, ::_SOME])
            column *= _SOME
            if not len(row):
                continue
            p = np.exp(log_p[row, column])
            law = call(law_on_axis, terms.take(row), p, rules=_ROUGH, jumps=kind)
            found = np.array(log_axis_law(AxisLaw(*law)))
            both[:, row, column] = terms.count[row] * found
        power, phase = np.where(is_there, between_equal(both, known, _SOME), np.nan)
    return Axis(terms, log_p, power, phase, number)


def contours(
    axis: Axis,
    end: np.ndarray,
    *,
    finer: np.ndarray | bool = False,
    slopes: bool = False,
    call: Call = by_rows,
) -> Contours:
    """Contours for places from 0 to ``end``, of each sum.

    Args:
      axis: by `axis_of`.
      end: (S,) >= 0.
      finer: (S,) whether other contours, with more nodes, to compare with.
      slopes: whether the tails' derivatives by the shift are asked for.
      call: how kernels are called.
    """
    terms, is_finer = axis.terms, np.broadcast_to(finer, end.shape)
    apart = np.where(is_finer, _APART[1], _APART[0])
    with np.errstate(all="ignore"):
        best = _crossing(axis, terms.constant(_PLACES[:, None] * end).T)
        # The integrand is as wide as the tilted sum's variance makes it.
        p, number = np.exp(axis.log_p), axis.number
        slope = np.diff(axis.power) / np.diff(p)
        bend = np.diff(slope) / (0.5 * (p[:, 2:] - p[:, :-2])) * p[:, 1:-1] ** 2
        bend = np.clip(np.nan_to_num(_padded(bend, number - 2)), 0.0, 1e6)
        narrowness = np.sqrt(bend + 2)
        passed = np.cumsum(narrowness, axis=1) * _STEP
        rows = []
        for i, row in enumerate(best):
            first, last = row[0], row.max()
            ends = passed[i, first], passed[i, last]
            found = np.linspace(*ends, 2 + int((ends[1] - ends[0]) / apart[i]))
            chosen = np.unique(np.searchsorted(passed[i], found).clip(first, last))
            rows.append(np.stack([np.full(len(chosen), i), chosen]))
        which, chosen = place = tuple(np.concatenate(rows, axis=1))
        # Of the places of a contour the one whose e^{pk} falls last.
        side = (terms.sign * 0.5 * apart)[:, None] * narrowness
        slope = _padded(slope, number - 1)
        slowest = (2 + side) / p - 0.5 * (slope[:, 1:] + slope[:, :-1])
        start, base = p[place], axis.power[place]
        line = _Line(terms.take(which), start, base, narrowness[place], slowest[place])
        rays = _rays(line, np.where(is_finer, _FINER, 1.0)[which], slopes, call)
        jumps = _jumps(terms, which, start, is_finer[which], slopes, call)
    first = np.searchsorted(which, np.arange(len(end)))
    table, ends = np.full((2, len(end), len(which)), np.nan), np.stack([start, base])
    table[:, which, np.arange(len(which)) - first[which]] = ends
    starts, bases = table[:, :, : np.bincount(which).max()]
    return Contours(terms, first, starts, bases, ends, rays, jumps)


def _padded(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
    """(S, C + 2) with the first again in front, and the last of ``number`` behind."""
    columns = np.minimum(np.arange(rows.shape[1] + 2), number[:, None])
    return np.take_along_axis(rows, np.maximum(columns - 1, 0), axis=1)


def _crossing(axis: Axis, constant: np.ndarray) -> np.ndarray:
    """The first minimum of ``|K(p)^n e^{pk}| / p²`` on the axis, as a number, (S, m).

    Or where that is so small that the rest does not count, or K^n begins to oscillate.
    """
    p, up = np.exp(axis.log_p), (axis.terms.rising > 0)[:, None]
    # It rises where the constant is larger, and is nothing where that is smaller.
    rises = -np.diff(axis.power - 2 * axis.log_p) / np.diff(p)
    stops = up & (np.abs(axis.phase[:, 1:]) > _LARGEST_PHASE)
    rises = np.where(stops | np.isnan(axis.power[:, 1:]), -np.inf, rises)
    small = np.where(up, (_NOTHING - axis.power) / p, -np.inf)[:, :-1, None]
    stop = (constant[:, None] > rises[:, :, None]) | (constant[:, None] < small)
    last = axis.number[:, None] - 1
    return np.minimum(np.where(stop.any(axis=1), np.argmax(stop, axis=1), last), last)


class _Line(NamedTuple):
    """Of each contour, (J,)."""

    terms: Sums
    start: np.ndarray
    base: np.ndarray
    narrowness: np.ndarray
    slowest: np.ndarray

    def power(
        self,
        away: np.ndarray,
        is_there: np.ndarray,
        fine: np.ndarray,
        call: Call,
        slopes: bool,
    ) -> list[np.ndarray]:
        """Parts of ``n log K - base`` at (N, J) distances from the start.

        And derivatives by the shift. Paths have ``fine`` times as many nodes, (J,).
        """
        size, number = away.shape
        each = np.moveaxis((self.start + away).reshape(-1, _BLOCK, number), 1, 0)
        each = each.reshape(_BLOCK, -1)
        mine = np.tile(np.arange(number), size // _BLOCK)
        kept = np.flatnonzero(is_there.reshape(-1, _BLOCK, number)[:, 0].reshape(-1))
        p, terms = each[:, kept], self.terms.take(mine[kept])
        middle = p[_BLOCK // 2]
        least = np.abs(p).min(axis=0) / np.abs(middle)
        which = np.real(middle), np.imag(middle), least, fine[mine[kept]]
        path = Path(*call(paths, terms, *which))
        # Rows with as many nodes together.
        order = np.argsort(path.number, kind="stable")
        kept, p, terms = kept[order], p[:, order], terms.take(order)
        path = Path(*(field[order] for field in path))
        p = np.real(p), np.imag(p)
        found = call(log_law_on_rays, terms, path, *p, slopes=slopes)
        result = []
        for part, empty in zip(found, (_ABSENT, 0.0, 0.0, 0.0), strict=False):
            whole = np.full(each.shape, empty)
            whole[:, kept] = part
            whole = np.moveaxis(whole.reshape(_BLOCK, -1, number), 0, 1)
            result.append(whole.reshape(size, number))
        result[0] = result[0] - self.base
        return result


def _rays(line: _Line, finer: np.ndarray, slopes: bool, call: Call) -> Rays:
    """Of rays from the starts, where the integrand is ``start / narrowness`` wide."""
    terms, start, narrowness = line.terms, line.start, line.narrowness
    # The more lean, the less K^n falls: then it is for e^{pk} to do.
    lean = np.where(terms.is_light, 0.0, _LEAN * (1 + 4 / narrowness**4))
    unit = start / narrowness * (1j + terms.sign * lean)
    away = np.sinh(_SCOUTS)[:, None] * unit
    every = np.ones(away.shape, bool)
    power = line.power(away, every, np.full(len(start), _ROUGHLY), call, False)[0]
    above = power + np.real(away) * line.slowest + _FALL
    is_gone = above < 0
    at = np.where(is_gone.any(axis=0), np.argmax(is_gone, axis=0), len(_SCOUTS) - 1)
    rows = np.arange(len(at))
    after, before = above[at, rows], above[at - 1, rows]
    share = np.where((after < 0) & (before > 0), after / (after - before), 0.0)
    end = _SCOUTS[at] - share * (_SCOUTS[1] - _SCOUTS[0])
    up, is_few = terms.rising > 0, terms.count < _FEW
    number = np.where(terms.is_light & is_few, 2, 1) * _blocks(_NODES * finer)
    # Along a ray log K is smooth, but for few terms of a light shift.
    kind = np.where(up, 0, np.where(terms.shift < _SOFT, 1, 2))
    known = _blocks(np.array(_KNOWN)[kind] * np.sqrt(finer))
    known = np.where(is_few & (terms.is_light | ~up), number, known)
    place, _ = side_by_side(known, _smooth_rule)
    same = side_by_side(number, _ray_rule)[0, : len(place)]
    place = np.where(known == number, same, place)
    is_there = np.arange(len(place))[:, None] < known
    away = np.sinh(place * end) * unit
    found = line.power(away, is_there, finer, call, slopes)
    found[1] = np.unwrap(found[1] / terms.count, axis=0) * terms.count
    power, phase, *slope = _between(found, known, number)
    place, weight = side_by_side(number, _ray_rule)
    is_there = weight > 0
    away = np.sinh(place * end) * unit
    step = np.cosh(place * end) * unit * weight * end / math.pi
    step = np.log(np.where(is_there, step, 1.0))
    over = np.where(is_there, start / (start + away), 0.0)
    power = np.where(is_there, power, _ABSENT) + np.real(step)
    rows = [power, phase + np.imag(step), np.real(away), np.imag(away), over]
    rows += [complex_of(np, *slope)] if slopes else []
    rows = [np.ascontiguousarray(row.T) for row in rows]
    return Rays(number, (rows[0], rows[1]), (rows[2], rows[3]), *rows[4:])


def _blocks(number: np.ndarray) -> np.ndarray:
    return _BLOCK * np.rint(number / _BLOCK).astype(int)


_ray_rule = functools.partial(gauss, panels=1)


def _jump_rule(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    return gauss(_EACH, nodes // _EACH)


@functools.cache
def _smooth_rule(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    place = 0.5 * (chebyshev_points(nodes) + 1)
    return place, place


def _between(
    rows: list[np.ndarray], known: np.ndarray, number: np.ndarray
) -> list[np.ndarray]:
    """Rows (N, J) at ``number`` nodes, from those at fewer ``known`` places."""
    result = np.zeros((len(rows), number.max(), len(number)))
    for few, many in set(zip(known.tolist(), number.tolist(), strict=True)):
        mine = np.flatnonzero((known == few) & (number == many))
        values = np.stack([row[:few, mine] for row in rows])
        matrix = np.eye(many) if few == many else _through(few, many)
        result[:, :many, mine] = matrix @ values
    return list(result)


@functools.lru_cache
def _through(few: int, many: int) -> np.ndarray:
    """(many, few): values at nodes of a ray, of a polynomial's at `_smooth_rule`."""
    place = 2 * _ray_rule(many)[0] - 1
    return through_points(chebyshev_points(few), np.eye(few), place).T


def _jumps(
    terms: Sums,
    which: np.ndarray,
    start: np.ndarray,
    fine: np.ndarray,
    slopes: bool,
    call: Call,
) -> Jumps:
    """Of the axis from 0 to the starts, by the larger saddle in place of p.

    Of sums that rise, which come first; the law there is interpolated.
    """
    rises = terms.take(np.flatnonzero(terms.rising > 0))
    which = which[: np.searchsorted(which, len(rises.count))]
    if not len(which):
        none = np.zeros((0, 0))
        return Jumps(np.zeros(0, int), none, none, none, none, None)
    start, fine, line = start[: len(which)], fine[: len(which)], rises.take(which)
    s, end = line.shift, line.edge
    first = larger_saddle(np.log(start), s)
    are_rare = first >= end  # too rare to count
    first = np.minimum(first, end - 1)
    panels = np.array(_PANELS)[(s > 2).astype(int), fine.astype(int)]
    panels = np.ceil(panels * (1 + s)).astype(int)
    # Nodes of all contours in turn.
    count = np.where(are_rare, 0, _EACH * panels)
    mine, rank, place, weight = in_turn(count, _jump_rule)
    s, line, length = s[mine], line.take(mine), (end - first)[mine]
    x = first[mine] + length * place
    p = np.exp(place_of(x, s))
    firsts = np.searchsorted(which, np.arange(len(rises.count)))
    low, high = np.minimum.reduceat(first, firsts), rises.edge - 1e-9
    number = np.where(fine[firsts], _CHEBYSHEV[1], _CHEBYSHEV[0])
    points, _ = side_by_side(number, _smooth_rule)
    known = row, column = np.nonzero(np.arange(len(points))[:, None] < number)
    nodes, every = low + (high - low) * points, rises.take(column)
    at_p = np.exp(place_of(nodes[known], every.shift))
    how = {"rules": _FINE, "jumps": True, "slopes": slopes}
    law = AxisLaw(*call(law_on_axis, every, at_p, **how))
    # Smooth where they are tiny, too.
    scale = np.where(every.mean > 0, at_p * at_p, at_p)
    # K turns by less than half a right angle: its real part is positive.
    real, _ = log_axis_law(law._replace(imaginary=np.zeros_like(at_p)))
    rows = [np.log(law.imaginary) - real, real / scale]
    if slopes:
        moved = law.real_slope / law.real
        rows += [law.imaginary_slope / law.imaginary - moved, moved / scale]
    values = np.zeros((len(rows), *points.shape))
    values[:, *known] = rows
    row = which[mine]
    away = np.clip(2 * (x - low[row]) / (high - low)[row] - 1, -1.0, 1.0)
    turn, real, *moved = through_columns(values, number, away, row)
    ratio, power = np.exp(turn), np.where(line.mean > 0, p * p, p)
    size = line.count * (real * power + 0.5 * np.log1p(ratio * ratio))
    size += np.log(p * (s - 1 / x) * length * weight / math.pi)
    angle = line.count * np.arctan(ratio)

    def dense(nodes: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
        result = np.full((len(count), max(count.max(), 1)), otherwise)
        result[mine, rank] = nodes
        return result

    slope = None
    if slopes:
        turned = line.count * ratio * moved[0] / (1 + ratio * ratio)
        grown = line.count * moved[1] * power + ratio * turned
        slope = dense(grown * np.sin(angle) + turned * np.cos(angle))
    size, over = dense(size, _ABSENT), dense(start[mine] / p)
    factor = dense(np.sin(angle))
    return Jumps(np.maximum(count, 1), size, dense(p), over, factor, slope)

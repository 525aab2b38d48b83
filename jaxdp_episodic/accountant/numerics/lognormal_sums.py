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
kernels whose rows are independent: of K on the axis and on rays
(`numerics.lognormal_terms`, `lognormal_rays`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.lognormal_jumps import jumps_of
from jaxdp_episodic.accountant.numerics.lognormal_rays import (
    Path,
    log_transform_on_rays,
    paths,
)
from jaxdp_episodic.accountant.numerics.lognormal_tails import (
    ABSENT,
    Contours,
    Rays,
    powers,
)
from jaxdp_episodic.accountant.numerics.lognormal_terms import (
    AxisTransform,
    Sums,
    by_rows,
    log_axis_transform,
    transform_on_axis,
)
from jaxdp_episodic.accountant.numerics.loops import complex_of
from jaxdp_episodic.accountant.numerics.quadrature import (
    between_equal,
    chebyshev_points,
    in_blocks,
    side_by_side,
    through_points,
)
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    gauss,
    log_last,
)

# Where a contour may start: logarithms of p so far apart, of which one in some is
# computed; and Gauss-Legendre rules of the transform there.
_STEP, _SOME, _COARSE = 0.125, 3, ((24, 3), (24, 1))
# Deviations of sums that are as rare as tables go; and how much further the axis does,
# over the shift if that is above 1.
_RAREST, _BEYOND = 13.5, 2.0
# Contours are so many widths of the integrand apart; finer ones, that have so many
# times the nodes, lie elsewhere: with 4.5 they are off by more under little noise.
_APART, _FINER = (3.4, 3.8), 1.25
# Places, in parts of the range, for whose starts contours are chosen.
_PLACES = np.linspace(0, 1, 16) ** 2
# Of rays: slope against the vertical, nodes, twice as many of fewer terms with a light
# shift, and how many of them have one path for the transform of one term.
_LEAN, _NODES, _FEW, _BLOCK = 0.4, 64, 16, 8
# Places of a ray at which the transform of large sums is known, and of small ones with
# a shift below this, and of others.
_KNOWN, _SOFT = (24, 32, 48), 3.0
# Where the end of a ray is looked for, in asinh of widths, by how many nodes of the
# transform; so many nats down, of one term (of 3e5 terms densities were off by 2e-10).
# Finer rays are so many times as long: even on the same one they are known elsewhere.
_PROBES, _COARSELY, _FALL = np.linspace(1.2, math.asinh(90), _BLOCK), 0.45, 37.0
_FURTHER = 1.05
# On the axis the rest does not count, or it is the ray that turns.
_NOTHING, _LARGEST_PHASE = -200.0, 6.0
# Between the logarithms of the starts of one sum and the next.
_FAR = 1e4


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


def axis_of(terms: Sums) -> Axis:
    """Where contours of sums may start; those that rise stand before the others."""
    s, up = terms.shift, terms.rising > 0
    with np.errstate(all="ignore"):
        low = -0.5 * np.log(terms.count * np.expm1(s * s)) - 0.5
        high = log_last(s) - 0.02
        # All terms low together are as rare as a table goes at this p, in logarithms.
        each = _RAREST * s / np.sqrt(terms.count)
        rarest = np.log(each) + each + 0.5 * s * s - 2 * np.log(s)
        length = np.minimum(rarest - low + _BEYOND * np.maximum(s, 1.0), 20 + 12 * s)
        length = np.where(up, high - low, length)
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
            transform = by_rows(
                transform_on_axis, terms.take(row), p, rules=_COARSE, jumps=kind
            )
            found = np.array(log_axis_transform(AxisTransform(*transform)))
            both[:, row, column] = terms.count[row] * found
        power, phase = np.where(is_there, between_equal(both, known, _SOME), np.nan)
    return Axis(terms, log_p, power, phase, number)


def contours(axis: Axis, end: np.ndarray, *, slopes: bool = False) -> Contours:
    """Contours for places from 0 to ``end``, of each sum, and others to compare with.

    Args:
      axis: by `axis_of`.
      end: (S,) >= 0.
      slopes: whether the tails' derivatives by the shift are asked for.
    """
    terms, number, rows = axis.terms, axis.number, np.arange(len(end))
    with np.errstate(all="ignore"):
        best = _crossing(axis, terms.constant(_PLACES[:, None] * end).T)
        first, last = best[:, 0], best.max(axis=1)
        # The integrand is as wide as the tilted sum's variance makes it.
        p = np.exp(axis.log_p)
        slope = np.diff(axis.power) / np.diff(p)
        bend = np.diff(slope) / (0.5 * (p[:, 2:] - p[:, :-2])) * p[:, 1:-1] ** 2
        bend = np.clip(np.nan_to_num(_padded(bend, number - 2)), 0.0, 1e6)
        narrowness = np.sqrt(bend + 2)
        passed = np.cumsum(narrowness, axis=1) * _STEP
        # All in a row, one behind the other.
        passed += rows[:, None] * (passed.max() + 1)
        begin, length = passed[rows, first], passed[rows, last] - passed[rows, first]
        # Finer ones stand behind the others of a sum.
        steps = 1 + (length[:, None] / _APART).astype(int).reshape(-1)
        kind = np.repeat(np.arange(len(steps)), steps + 1)
        rank, which = np.arange(len(kind)) - np.searchsorted(kind, kind), kind // 2
        found = begin[which] + length[which] * rank / steps[kind]
        chosen = np.searchsorted(passed.reshape(-1), found) - which * passed.shape[1]
        chosen = np.clip(chosen, first[which], last[which])
        kept = (rank == 0) | (chosen != np.roll(chosen, 1))
        kind, place = kind[kept], (which[kept], chosen[kept])
        which, fine = place[0], kind % 2
        start, base, narrow = p[place], axis.power[place], narrowness[place]
        # Of the places of a contour the one whose e^{pk} falls last.
        slope = _padded(slope, number - 1)
        slowest = 2 + 0.5 * terms.sign[which] * np.array(_APART)[fine] * narrow
        slowest = slowest / start - 0.5 * (slope[:, 1:] + slope[:, :-1])[place]
        line = _Line(terms.take(which), start, base, narrow, slowest)
        rays = _rays(line, _ends(line, which, fine == 0), fine > 0, slopes)
        jumps = jumps_of(terms, which, start, fine, slopes)
    first = np.searchsorted(kind, np.arange(len(steps)))
    column = np.arange(len(kind)) - first[kind]
    starts = np.zeros((len(steps), column.max() + 1))
    sizes = np.full_like(starts, np.inf)
    starts[kind, column], sizes[kind, column] = start, base - 2 * np.log(start)
    ends = np.stack([start, base])
    return Contours(terms, first, starts, sizes, ends, rays, jumps)


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
    small = np.where(up, (_NOTHING - axis.power) / p, -np.inf)
    # Behind the last one it stops.
    rises = np.append(rises, np.full_like(rises[:, :1], -np.inf), axis=1)
    stop = constant[..., None] > rises[:, None]
    stop |= constant[..., None] < small[:, None]
    return np.argmax(stop, axis=2)


class _Line(NamedTuple):
    """Of each contour, (J,)."""

    terms: Sums
    start: np.ndarray
    base: np.ndarray
    narrowness: np.ndarray
    slowest: np.ndarray

    def take(self, rows: np.ndarray) -> _Line:
        """Some contours."""
        return _Line(self.terms.take(rows), *(field[rows] for field in self[1:]))

    def power(
        self,
        away: np.ndarray,
        is_there: np.ndarray,
        fine: np.ndarray,
        slopes: bool,
    ) -> list[np.ndarray]:
        """Parts of ``n log K - base`` at (J, N) distances from the start.

        And derivatives by the shift. Paths have ``fine`` times as many nodes, (J,).
        """
        each = (self.start[:, None] + away).reshape(-1, _BLOCK).T
        kept = np.flatnonzero(is_there[:, ::_BLOCK])
        mine = kept // (away.shape[1] // _BLOCK)
        p, terms = each[:, kept], self.terms.take(mine)
        middle = p[_BLOCK // 2]
        least = np.abs(p).min(axis=0) / np.abs(middle)
        which = np.real(middle), np.imag(middle), least, fine[mine]
        path = Path(*by_rows(paths, terms, *which))
        # Rows with as many nodes together.
        order = np.argsort(path.number, kind="stable")
        kept, p, terms = kept[order], p[:, order], terms.take(order)
        path = Path(*(field[order] for field in path))
        p = np.real(p), np.imag(p)
        found = by_rows(log_transform_on_rays, terms, path, *p, slopes=slopes)
        result = []
        for part, empty in zip(found, (ABSENT, 0.0, 0.0, 0.0), strict=False):
            whole = np.full(each.T.shape, empty)
            whole[kept] = part.T
            result.append(whole.reshape(away.shape))
        result[0] -= self.base[:, None]
        return result


def _turn(line: _Line) -> np.ndarray:
    """Direction of each ray, where the integrand is ``start / narrowness`` wide."""
    # The more lean, the less K^n falls: then it is for e^{pk} to do.
    lean = np.where(line.terms.is_light, 0.0, _LEAN * (1 + 4 / line.narrowness**4))
    return (1j + line.terms.sign * lean) / line.narrowness


def _ends(every: _Line, which: np.ndarray, is_rough: np.ndarray) -> np.ndarray:
    """Where rays end, in asinh of widths: finer ones by the others of the sum."""
    line = every.take(is_rough)
    away = np.sinh(_PROBES) * (line.start * _turn(line))[:, None]
    fine = np.full(len(away), _COARSELY)
    power = line.power(away, away != 0, fine, False)[0]
    above = power + np.real(away) * line.slowest[:, None]
    above += _FALL + 0.5 * np.log(line.terms.count)[:, None]
    at = np.argmax((above < 0) | (_PROBES == _PROBES[-1]), axis=1)
    rows = np.arange(len(at))
    after, before = above[rows, at], above[rows, at - 1]
    share = np.where((after < 0) & (before > 0), after / (after - before), 0.0)
    end = _PROBES[at] - share * (_PROBES[1] - _PROBES[0])
    # Sums one behind the other; all begin and end with the same contours.
    place = _FAR * which + np.log(every.start)
    end = np.interp(place, place[is_rough], end)
    return np.where(is_rough, end, _FURTHER * end)


def _rays(line: _Line, end: np.ndarray, fine: np.ndarray, slopes: bool) -> Rays:
    """Of rays from the starts to the ends."""
    terms, turn, end = line.terms, _turn(line), end[:, None]
    unit, finer = (line.start * turn)[:, None], np.where(fine, _FINER, 1.0)
    up, is_few = terms.rising > 0, terms.count < _FEW
    number = np.where(terms.is_light & is_few, 2, 1) * _NODES * finer
    # Along a ray log K is smooth, but for few terms of a light shift.
    kind = np.where(up, 0, np.where(terms.shift < _SOFT, 1, 2))
    known = np.array(_KNOWN)[kind]
    number = _BLOCK * np.rint(number / _BLOCK).astype(int)
    known = np.where(is_few & (terms.is_light | ~up), number, known)
    place, _ = side_by_side(known, _smooth_rule)
    nodes, weight = side_by_side(number, _ray_rule)
    place = np.where((known == number)[:, None], nodes[:, : place.shape[1]], place)
    is_there = np.arange(place.shape[1]) < known[:, None]
    found = line.power(np.sinh(place * end) * unit, is_there, finer, slopes)
    round_ = (2 * math.pi * terms.count)[:, None]
    found[1][:, 1:] -= round_ * np.cumsum(np.rint(np.diff(found[1]) / round_), axis=1)
    power, phase, *slope = _between(found, known, number)
    along = np.sinh(nodes * end)
    # The step's logarithm: of its size, and the angle of the ray.
    size = np.sqrt(1 + along * along) * weight * (np.abs(unit) * end / math.pi)
    power = np.where(weight > 0, power + np.log(size), ABSENT)
    over = np.where(weight > 0, 1 / (1 + along * turn[:, None]), 0.0)
    real = np.stack([along * np.real(unit), power], axis=1)
    imaginary = np.stack([along * np.imag(unit), phase + np.angle(unit)], axis=1)
    share = powers(over, *([1.0, complex_of(np, *slope)] if slopes else [1.0]))
    share = [np.ascontiguousarray(part) for part in (np.imag(share), np.real(share))]
    return Rays(number, [real, imaginary], share)


_ray_rule = functools.partial(gauss, panels=1)


@functools.cache
def _smooth_rule(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    place = 0.5 * (chebyshev_points(nodes) + 1)
    return place, place


def _between(
    rows: list[np.ndarray], known: np.ndarray, number: np.ndarray
) -> list[np.ndarray]:
    """Rows (J, N) at ``number`` nodes, from those at fewer ``known`` places."""
    result = np.zeros((len(rows), len(number), number.max()))
    for few, many in set(zip(known.tolist(), number.tolist(), strict=True)):
        mine = np.flatnonzero((known == few) & (number == many))
        values = np.stack([row[mine, :few] for row in rows])
        if few < many:
            values = in_blocks(values, _through(few, many))
        result[:, mine, :many] = values
    return list(result)


@functools.lru_cache
def _through(few: int, many: int) -> np.ndarray:
    """(few, many): values at nodes of a ray, of a polynomial's at `_smooth_rule`."""
    place = 2 * _ray_rule(many)[0] - 1
    return through_points(chebyshev_points(few), np.eye(few), place)

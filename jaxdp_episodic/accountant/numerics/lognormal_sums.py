"""Tails of a sum X of independent lognormal terms of mean 1.

With ``A = e^{s x - s²/2}``, x standard normal, and ``T = X - x`` (upper tails) or
``T = x - X`` (lower tails) of n terms,

    E[T_+] = (1/2 pi i) int K(p)^n e^{p k} / p² dp,   K(p) = E e^{±p (A - m)},

k = ±(n m - x) for any m; P(T > 0) is the same with 1/p and the density of T at 0 with 1
in place of 1/p². For upper tails the contour follows the positive axis up to a start c,
as in `numerics.skewed_sums`, and leaves it there on a ray into the upper half plane;
for lower tails, where K is entire, it crosses the axis at c.

K does not depend on x, so a contour serves all x whose best c is less than a few widths
of the integrand away: a few contours are enough for a table, and what an x costs
besides is one exponential a node.

This module chooses the contours, for many sums side by side. The kernels, whose rows
are independent, are K on the axis and on rays (`numerics.lognormal_terms`,
`lognormal_rays`), and the tails from these (`lognormal_tails`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import log_near
from jaxdp_episodic.accountant.numerics.lognormal_rays import (
    Path,
    log_transform_on_rays,
    paths,
)
from jaxdp_episodic.accountant.numerics.lognormal_tails import (
    ABSENT,
    Contours,
    Rays,
    jumps_of,
    powers,
)
from jaxdp_episodic.accountant.numerics.lognormal_terms import (
    AxisTransform,
    Sums,
    by_rows,
    transform_on_axis,
)
from jaxdp_episodic.accountant.numerics.loops import at
from jaxdp_episodic.accountant.numerics.quadrature import (
    between_equal,
    chebyshev_points,
    in_blocks,
    side_by_side,
)
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    at_gauss,
    gauss,
    log_last,
)

# Spacing of log p at which contours may start; of these points one in `_KNOWN_EVERY` is
# computed, the others are interpolated.
_LOG_P_STEP = 0.125
_KNOWN_EVERY = 3
# Gauss-Legendre rules, nodes and panels, of the transform there and of its jumps.
_COARSE_RULES = ((24, 3), (24, 1))
# Rarest lower tails, in standard deviations of the sum: a probability below e^-91;
_RAREST = 13.5
# how much further log p goes, times the shift if that is above 1: with 0 lower tails of
# five terms at a shift of 7 were wrong.
_BEYOND_RAREST = 2.0
# Distance of contours in widths of the integrand, and of finer ones, which lie
# elsewhere: at 4.5 their error exceeded the others' under little noise.
_DISTANCES = np.array([3.4, 3.8])
# How many times as many nodes finer contours have.
_FINER = 1.25
# Arguments, over the last, for whose starts contours are chosen.
_ARGUMENTS = np.linspace(0, 1, 16) ** 2
# Slope of rays against the vertical.
_LEAN = 0.4
# Nodes of a ray; twice as many of fewer terms than `_FEW_TERMS` with a light shift.
_NODES = 64
_FEW_TERMS = 16
# Nodes of a ray for which the transform of one term has one path.
_BLOCK = 8
# Points of a ray at which the transform is known and then interpolated: of upper tails,
# of lower tails of shifts below `_SOFT_SHIFT`, and of others.
_KNOWN = (24, 32, 48)
_SOFT_SHIFT = 3.0
# Lengths of rays that are tried, as asinh of widths of the integrand,
_TRIED = np.linspace(1.2, math.asinh(90), _BLOCK)
# by this share of the nodes of the transform: 0.84 apart, the trapezoidal rule is off
# by 2 e^{-2 (pi / 0.84)^2} = 2e-12 of a normal density, which counts as often as there
# are terms (1.4 apart, tables of 5e5 failed);
_ROUGHLY = 0.6
# and nats by which the integrand must have fallen, for one term: of 3e5 terms densities
# had errors of 2e-10.
_FALL = 37.0
# How many times as long finer rays are: even of one start their points are others.
_FURTHER = 1.05
# Nats of the integrand on the axis below which the rest is negligible.
_NEGLIGIBLE = -200.0
# Largest phase of K^n, in radians, on the axis up to where a contour starts.
_LARGEST_PHASE = 6.0
# Between log p of one sum and the next, where all stand on one axis.
_FAR = 1e4


class Axis(NamedTuple):
    """Where contours of S sums may start; (S, C), padded by NaN."""

    terms: Sums  # (S,)
    log_p: np.ndarray  # increasing
    power: np.ndarray  # real part of n log K
    phase: np.ndarray  # imaginary part
    number: np.ndarray  # (S,) of these points


def axis_of(terms: Sums) -> Axis:
    """Where contours may start, of upper tails, which stand first, and lower ones."""
    s, upper = terms.shift, terms.upper > 0
    with np.errstate(all="ignore"):
        low = -0.5 * np.log(terms.count * np.expm1(s * s)) - 0.5
        high = log_last(s) - 0.02
        # The saddle point p of the rarest lower tail: all terms are low together.
        each = _RAREST * s / np.sqrt(terms.count)
        rarest = np.log(each) + each + 0.5 * s * s - 2 * np.log(s)
        length = rarest - low + _BEYOND_RAREST * np.maximum(s, 1.0)
        length = np.where(upper, high - low, np.minimum(length, 20 + 12 * s))
        known = np.ceil(length / _LOG_P_STEP / _KNOWN_EVERY).astype(int)
        known = np.maximum(known, 7)
        number = _KNOWN_EVERY * known + 1
        low = np.where(upper, high - _LOG_P_STEP * (number - 1), low)
        log_p = low[:, None] + _LOG_P_STEP * np.arange(number.max())
        is_there = np.arange(number.max()) < number[:, None]
        both = np.full((2, *log_p.shape), np.nan)
        for kind in (True, False):
            some = is_there & (upper == kind)[:, None]
            row, column = np.nonzero(some[:, ::_KNOWN_EVERY])
            column *= _KNOWN_EVERY
            if not len(row):
                continue
            how = {"rules": _COARSE_RULES, "jumps": kind}
            asked = at(terms, row), np.exp(log_p[row, column])
            found = AxisTransform(*by_rows(transform_on_axis, *asked, **how))
            logs = terms.count[row] * log_near(found.whole, found.excess)
            both[:, row, column] = np.real(logs), np.imag(logs)
        both = between_equal(both, known, _KNOWN_EVERY)
        power, phase = np.where(is_there, both, np.nan)
    return Axis(terms, log_p, power, phase, number)


def contours(axis: Axis, end: np.ndarray) -> Contours:
    """Contours for ``|log(x / n)|`` from 0 to ``end``, and finer ones to compare with.

    ``end`` is (S,), >= 0.
    """
    terms, number, rows = axis.terms, axis.number, np.arange(len(end))
    with np.errstate(all="ignore"):
        best = _saddle_points(axis, terms.constant(_ARGUMENTS[:, None] * end).T)
        first, last = best[:, 0], best.max(axis=1)
        # One over the integrand's width in log p: the root of p² times the tilted
        # variance, which is the second derivative of n log K, and 2 of 1/p².
        p = np.exp(axis.log_p)
        slope = np.diff(axis.power) / np.diff(p)
        bend = np.diff(slope) / (0.5 * (p[:, 2:] - p[:, :-2])) * p[:, 1:-1] ** 2
        bend = np.clip(np.nan_to_num(_padded(bend, number - 2)), 0.0, 1e6)
        narrowness = np.sqrt(bend + 2)
        # Widths passed along the axis, of all sums in one row.
        passed = np.cumsum(narrowness, axis=1) * _LOG_P_STEP
        passed += rows[:, None] * (passed.max() + 1)
        begin, length = passed[rows, first], passed[rows, last] - passed[rows, first]
        # Of each sum the contours, then the finer ones.
        steps = 1 + (length[:, None] / _DISTANCES).astype(int).reshape(-1)
        kind = np.repeat(np.arange(len(steps)), steps + 1)
        rank, which = np.arange(len(kind)) - np.searchsorted(kind, kind), kind // 2
        found = begin[which] + length[which] * rank / steps[kind]
        chosen = np.searchsorted(passed.reshape(-1), found) - which * passed.shape[1]
        chosen = np.clip(chosen, first[which], last[which])
        kept = (rank == 0) | (chosen != np.roll(chosen, 1))
        kind, chosen = kind[kept], (which[kept], chosen[kept])
        which, fine = chosen[0], kind % 2
        start, base, narrow = p[chosen], axis.power[chosen], narrowness[chosen]
        # k of that argument of a contour for which e^{pk} falls last along the ray.
        slope = _padded(slope, number - 1)
        slowest = 2 + 0.5 * terms.sign[which] * _DISTANCES[fine] * narrow
        slowest = slowest / start - 0.5 * (slope[:, 1:] + slope[:, :-1])[chosen]
        line = _Line(at(terms, which), start, base, narrow, slowest)
        rays = _rays(line, _ends(line, which, fine == 0), fine > 0)
        jumps = jumps_of(terms, which, start, fine)
    first = np.searchsorted(kind, np.arange(len(steps)))
    column = np.arange(len(kind)) - first[kind]
    starts = np.zeros((len(steps), column.max() + 1))
    sizes = np.full_like(starts, np.inf)
    starts[kind, column], sizes[kind, column] = start, base - 2 * np.log(start)
    both = np.stack([start, base])
    return Contours(terms, first, starts, sizes, both, rays, jumps)


def _padded(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Rows padded by their first element, and by the ``number``-th; (S, C + 2)."""
    columns = np.minimum(np.arange(rows.shape[1] + 2), number[:, None])
    return np.take_along_axis(rows, np.maximum(columns - 1, 0), axis=1)


def _saddle_points(axis: Axis, constant: np.ndarray) -> np.ndarray:
    """Index of the first minimum of ``|K(p)^n e^{pk}| / p²`` on the axis, (S, m).

    Or where that is negligible, or where K^n begins to oscillate, if that is before.
    """
    p, upper = np.exp(axis.log_p), (axis.terms.upper > 0)[:, None]
    # It increases where k is above the one, and is negligible where k is below another.
    increasing = -np.diff(axis.power - 2 * axis.log_p) / np.diff(p)
    stops = upper & (np.abs(axis.phase[:, 1:]) > _LARGEST_PHASE)
    increasing = np.where(stops | np.isnan(axis.power[:, 1:]), -np.inf, increasing)
    negligible = np.where(upper, (_NEGLIGIBLE - axis.power) / p, -np.inf)
    # At the last one it stops.
    increasing = np.append(increasing, np.full((len(p), 1), -np.inf), axis=1)
    stop = constant[..., None] > increasing[:, None]
    stop |= constant[..., None] < negligible[:, None]
    return np.argmax(stop, axis=2)


class _Line(NamedTuple):
    """Rays, (J,)."""

    terms: Sums
    start: np.ndarray  # p where it leaves the axis, or crosses it
    base: np.ndarray  # log |K^n| there
    narrowness: np.ndarray  # start over the integrand's width there
    slowest: np.ndarray  # k of the argument for which e^{pk} falls last

    @property
    def direction(self) -> np.ndarray:
        """Complex; the integrand is ``start |direction|`` wide at the start."""
        # The wider it is the less K^n falls, and the more e^{pk} has to: by leaning.
        lean = _LEAN * (1 + 4 / self.narrowness**4)
        lean = self.terms.sign * np.where(self.terms.is_light, 0.0, lean)
        return (1j + lean) / self.narrowness

    def power(
        self, away: np.ndarray, is_there: np.ndarray, fine: np.ndarray
    ) -> list[np.ndarray]:
        """Real and imaginary part of ``n log K - base`` at (J, N) from the start.

        Paths have ``fine`` times as many nodes, (J,).
        """
        each = (self.start[:, None] + away).reshape(-1, _BLOCK).T
        kept = np.flatnonzero(is_there[:, ::_BLOCK])
        mine = kept // (away.shape[1] // _BLOCK)
        p, terms = each[:, kept], at(self.terms, mine)
        middle = p[_BLOCK // 2]
        least = np.abs(p).min(axis=0) / np.abs(middle)
        path = Path(*by_rows(paths, terms, middle, least, fine[mine]))
        # Rows with as many nodes together.
        order = np.argsort(path.num_nodes, kind="stable")
        kept, p, terms = kept[order], p[:, order], at(terms, order)
        path = at(path, order)
        (found,) = by_rows(lambda *rows: [log_transform_on_rays(*rows)], terms, path, p)
        result = []
        for part, empty in ((np.real(found), ABSENT), (np.imag(found), 0.0)):
            whole = np.full(each.T.shape, empty)
            whole[kept] = part.T
            result.append(whole.reshape(away.shape))
        result[0] -= self.base[:, None]
        return result


def _ends(every: _Line, which: np.ndarray, is_coarse: np.ndarray) -> np.ndarray:
    """Lengths of rays as asinh of widths; of finer ones by the others of the sum."""
    line = at(every, is_coarse)
    away = np.sinh(_TRIED) * (line.start * line.direction)[:, None]
    power = line.power(away, away != 0, np.full(len(away), _ROUGHLY))[0]
    above = power + np.real(away) * line.slowest[:, None]
    above += _FALL + 0.5 * np.log(line.terms.count)[:, None]
    first = np.argmax((above < 0) | (_TRIED == _TRIED[-1]), axis=1)
    rows = np.arange(len(first))
    after, before = above[rows, first], above[rows, first - 1]
    share = np.where((after < 0) & (before > 0), after / (after - before), 0.0)
    end = _TRIED[first] - share * (_TRIED[1] - _TRIED[0])
    # All sums on one axis; each begins and ends with contours of both kinds.
    position = _FAR * which + np.log(every.start)
    end = np.interp(position, position[is_coarse], end)
    return np.where(is_coarse, end, _FURTHER * end)


def _rays(line: _Line, end: np.ndarray, fine: np.ndarray) -> Rays:
    """Nodes of rays from the starts to the ends, finer ones where ``fine``; (J,)."""
    terms, direction, end = line.terms, line.direction, end[:, None]
    unit, finer = (line.start * direction)[:, None], np.where(fine, _FINER, 1.0)
    upper, is_few = terms.upper > 0, terms.count < _FEW_TERMS
    number = np.where(terms.is_light & is_few, 2, 1) * _NODES * finer
    number = _BLOCK * np.rint(number / _BLOCK).astype(int)
    # Along a ray log K is smooth, but for few terms of a light shift.
    known = np.array(_KNOWN)[
        np.where(upper, 0, np.where(terms.shift < _SOFT_SHIFT, 1, 2))
    ]
    known = np.where(is_few & (terms.is_light | ~upper), number, known)
    points, _ = side_by_side(known, _chebyshev_rule)
    nodes, weight = side_by_side(number, _ray_rule)
    points = np.where((known == number)[:, None], nodes[:, : points.shape[1]], points)
    is_there = np.arange(points.shape[1]) < known[:, None]
    found = line.power(np.sinh(points * end) * unit, is_there, finer)
    # n arg K is known modulo 2 pi n: made continuous along the ray.
    period = (2 * math.pi * terms.count)[:, None]
    found[1][:, 1:] -= period * np.cumsum(np.rint(np.diff(found[1]) / period), axis=1)
    power, phase = _interpolated(found, known, number)
    along = np.sinh(nodes * end)
    # |dp| / pi, and its angle.
    size = np.sqrt(1 + along * along) * weight * (np.abs(unit) * end / math.pi)
    power = np.where(weight > 0, power + np.log(size), ABSENT)
    over = np.where(weight > 0, 1 / (1 + along * direction[:, None]), 0.0)
    real = np.stack([along * np.real(unit), power], axis=1)
    imaginary = np.stack([along * np.imag(unit), phase + np.angle(unit)], axis=1)
    share = powers(over)
    share = [np.ascontiguousarray(part) for part in (np.imag(share), np.real(share))]
    return Rays(number, [real, imaginary], share)


_ray_rule = functools.partial(gauss, panels=1)


@functools.cache
def _chebyshev_rule(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    points = 0.5 * (chebyshev_points(nodes) + 1)
    return points, points  # weights nobody asks for


def _interpolated(
    rows: list[np.ndarray], known: np.ndarray, number: np.ndarray
) -> list[np.ndarray]:
    """Rows (J, N) at ``number`` nodes, from those at the ``known`` points."""
    result = np.zeros((len(rows), len(number), number.max()))
    for few, many in set(zip(known.tolist(), number.tolist(), strict=True)):
        mine = np.flatnonzero((known == few) & (number == many))
        values = np.stack([row[mine, :few] for row in rows])
        if few < many:
            values = in_blocks(values, at_gauss(few, many).T)
        result[:, mine, :many] = values
    return list(result)

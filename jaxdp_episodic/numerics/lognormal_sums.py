"""Tails of a sum X of independent lognormal terms of mean 1; NumPy only.

With ``A = e^{s x - s²/2}``, x standard normal, and T = X - x, or x - X, of n terms,

    E[T_+] = (1/2 pi i) int K(p)^n e^{p k} / p² dp,   K(p) = E e^{±p (A - m)},

k = ±(n m - x) for any m; P(T > 0) is the same with 1/p and the density of T at 0 with 1
in place of 1/p². For X - x the contour follows the positive axis up to c as in
`numerics.skewed_sums`, and leaves it there on a ray into the upper half plane; for
x - X, where K is entire, it crosses the axis at c.

K does not know of x, so a contour serves all places whose best c is some widths of the
integrand away: a few contours are enough for a table, and what a place costs besides is
one exponential a node.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.quadrature import chebyshev_points, through_points
from jaxdp_episodic.numerics.skewed_terms import (
    SQRT_2PI,
    gauss,
    larger_saddle,
    log_last,
    place_of,
    steepest,
)
from jaxdp_episodic.numerics.special import log_normal_tail

# A table goes so many deviations far, in the sum or in one term that jumps; a term's
# law, tilted, is so many wide.
_REACH, _WIDE = 13.0, 8.5
# Below this shift 1 is taken off A: else what cancels in K^n e^{pk} costs digits.
_NARROW = 0.05
# From so many terms on K - 1 needs all its digits.
_MANY = 3e4
# Where a contour may start: logarithms of p so far apart; and Gauss-Legendre rules of
# the law there, and of the law of jumps.
_STEP, _ROUGH, _FINE = 0.125, ((24, 4), (24, 1)), ((24, 5), (40, 1))
# Contours are so many widths of the integrand apart; finer ones, that have so many
# times the nodes, lie elsewhere.
_APART, _FINER = (3.0, 4.5), 1.4
# Places, in parts of the range, for whose starts contours are chosen.
_PLACES = np.linspace(0, 1, 40) ** 2
# Of rays: slope against the vertical, nodes, twice as many of fewer terms with a light
# shift, and how many of them have one path for the law of one term.
_LEAN, _NODES, _FEW, _BLOCK = 0.4, 80, 16, 8
# Shifts below which rays are vertical: of X, or of more than so many terms of -X.
_LIGHT, _LIGHT_OF_FEW, _VERY_FEW = 0.35, 0.13, 5
# Nodes of the law of one term, of A or of -A, in 23 deviations; and of light shifts.
_LAW_NODES, _LAW_NODES_FALLING, _MORE = 192, 128, 1.5
# Where the end of a ray is looked for, in asinh of widths; it is so many nats down.
_SCOUTS, _SCOUT_NODES, _FALL = np.linspace(1.2, math.asinh(90), 16), 128, 37.0
# On the axis the rest does not count, or it is the ray that turns.
_NOTHING, _LARGEST_PHASE = -200.0, 6.0
# Chebyshev nodes of the law along the axis, and Gauss-Legendre panels of jumps.
_CHEBYSHEV, _JUMP_PANELS = (80, 112), (4, 6)


class _Law(NamedTuple):
    """K and K - 1 of one term."""

    whole: np.ndarray
    excess: np.ndarray


class _Sum(NamedTuple):
    """What is added up: n terms, and which tail."""

    count: float
    shift: float
    rising: bool

    @property
    def mean(self) -> float:
        """What is taken off A, the m of `constant`."""
        return 1.0 if self.shift < _NARROW else 0.0

    @property
    def lowest(self) -> float:
        """Deviation below which nothing of a term is left, though all are low."""
        return -_WIDE - _REACH / math.sqrt(self.count)

    @property
    def highest(self) -> float:
        """And above which."""
        return max(-self.lowest, _REACH) + self.shift

    @property
    def edge(self) -> float:
        """Deviation at which a jump is too rare to count."""
        return max(self.highest, _WIDE + 1.5 + 1 / self.shift)

    @property
    def is_light(self) -> bool:
        """Of these K falls off like a Gaussian's: rays are vertical."""
        is_normal = self.rising or self.count > _VERY_FEW
        return self.shift < (_LIGHT if is_normal else _LIGHT_OF_FEW)

    def beyond(self, y: np.ndarray) -> np.ndarray:
        """``±(A - m)`` at ``A = e^y``."""
        return (np.expm1(y) + (1 - self.mean)) * (1 if self.rising else -1)

    def constant(self, place: np.ndarray) -> np.ndarray:
        """Of a place, k."""
        return -self.count * self.beyond(place if self.rising else -place)


class _Nodes(NamedTuple):
    """Of a part of each contour: integrands are ``e^{power + k p}`` times factors.

    Attributes:
      power, p: (J, N); p of rays is relative to the start.
      factors: (J, N, 3), with the second, first and no power of start over p.
    """

    power: np.ndarray
    p: np.ndarray
    factors: np.ndarray


class Contours(NamedTuple):
    """Contours for all places of one tail; made by `contours`.

    Attributes:
      terms: what is added up.
      start: (J,) where they leave the axis, or cross it.
      base: (J,) logarithm of K^n there.
      rays: relative to ``e^{base + k start}``, along ``p - start``.
      jumps: along the axis; None if not rising.
    """

    terms: _Sum
    start: np.ndarray
    base: np.ndarray
    rays: _Nodes
    jumps: _Nodes | None

    def log_tails(self, place: np.ndarray) -> np.ndarray:
        """``log E(X - x)_+``, ``log P(X > x)`` and log-density at ``x = n e^place``.

        Or of ``E(x - X)_+`` and ``P(X < x)`` at ``n e^-place``, if not rising; (3, m),
        NaN where more cancels than double precision has.
        """
        result = np.empty((3, len(place)))
        with np.errstate(all="ignore"):
            constant = self.terms.constant(place)
            # Little cancels where the integrand is small.
            size = self.base + np.outer(constant, self.start) - 2 * np.log(self.start)
            mine = np.argmin(size, axis=1)
            for i in range(len(self.start)):
                cut = np.flatnonzero(mine == i)
                if len(cut):
                    result[:, cut] = self._on(i, constant[cut])
        return result

    def _on(self, i: int, constant: np.ndarray) -> np.ndarray:
        """Of places on one contour."""
        powers = np.array([[2], [1], [0]]) * math.log(self.start[i])
        rays = np.exp(self.rays.power[i] + np.outer(constant, self.rays.p[i]))
        total = np.imag(rays @ self.rays.factors[i]).T
        top = self.base[i] + self.start[i] * constant
        if self.jumps is None:
            return np.log(total) + top - powers
        size = self.jumps.power[i] + np.outer(constant, self.jumps.p[i])
        largest = np.max(size, axis=1)
        jumps = np.exp(size - largest[:, None]) @ self.jumps.factors[i]
        both = np.maximum(top, largest)
        total = total * np.exp(top - both) + jumps.T * np.exp(largest - both)
        return np.log(total) + both - powers


def contours(
    count: float, shift: float, end: float, *, rising: bool, finer: bool = False
) -> Contours:
    """Contours for places from 0 to ``end``.

    Args:
      count: n >= 2, whole.
      shift: s > 0.
      end: >= 0.
      rising: which tail.
      finer: other contours with more nodes, to compare with.
    """
    terms = _Sum(count, shift, rising)
    with np.errstate(all="ignore"):
        log_p, power = _axis(terms)
        best = _crossing(terms, log_p, power, terms.constant(end * _PLACES))
        # The integrand is as wide as the tilted sum's variance makes it.
        p, power = np.exp(log_p), np.real(power)
        slope = np.diff(power) / np.diff(p)
        bend = np.diff(slope) / (0.5 * (p[2:] - p[:-2])) * p[1:-1] ** 2
        bend = np.clip(np.nan_to_num(np.pad(bend, 1, mode="edge")), 0.0, 1e6)
        narrowness = np.sqrt(bend + 2)
        passed = np.cumsum(narrowness) * _STEP
        first, last = best[0], best.max()
        number = 2 + int((passed[last] - passed[first]) / _APART[finer])
        found = np.linspace(passed[first], passed[last], number)
        chosen = np.unique(np.searchsorted(passed, found).clip(first, last))
        start, base = p[chosen], power[chosen]
        # Of the places of a contour the one whose e^{pk} falls last.
        side = (1 if rising else -1) * 0.5 * _APART[finer] * narrowness
        slope = np.pad(slope, 1, mode="edge")
        slowest = (2 + side) / p - 0.5 * (slope[1:] + slope[:-1])
        rows = narrowness[chosen], slowest[chosen]
        rays = _rays(terms, start, base, *rows, _FINER**finer)
        jumps = _jumps(terms, start, finer) if rising else None
    return Contours(terms, start, base, rays, jumps)


def log_bounds(count: float, shift: float, place: np.ndarray) -> np.ndarray:
    """Logarithms above those of ``E(n e^-place - X)_+``: Chernoff's bound."""
    terms = _Sum(count, shift, rising=False)
    with np.errstate(all="ignore"):
        log_p, power = _axis(terms)
        size = np.real(power)[:, None] + np.outer(np.exp(log_p), terms.constant(place))
        # T_+ is at most e^{p T - 1} / p.
        size = np.where(np.isfinite(size), size - log_p[:, None], np.inf)
        return np.min(size, axis=0) - 1


@functools.lru_cache(8)
def _axis(terms: _Sum) -> tuple[np.ndarray, np.ndarray]:
    """``log p`` where contours may start, rising, and ``n log K`` there, (C,)."""
    s = terms.shift
    low = -0.5 * math.log(terms.count * math.expm1(s * s)) - 0.5
    if terms.rising:
        high = log_last(s) - 0.02
        log_p = high - _STEP * np.arange(max(high - low, 1.0) / _STEP)[::-1]
    else:
        log_p = np.arange(low, low + 20 + 12 * s, _STEP)
    law, imaginary = _law_on_axis(terms, np.exp(log_p), _ROUGH)
    law = _Law(*(part + 1j * imaginary for part in law))
    return log_p, terms.count * _log(law)


def _crossing(
    terms: _Sum, log_p: np.ndarray, power: np.ndarray, constant: np.ndarray
) -> np.ndarray:
    """The first minimum of ``|K(p)^n e^{pk}| / p²`` on the axis, as a number.

    Or where that is so small that the rest does not count, or K^n begins to oscillate.
    """
    log_p, power = log_p[:, None], power[:, None]
    size = np.real(power) + np.exp(log_p) * constant - 2 * log_p
    size = np.where(np.isnan(size), np.inf, size)
    stop = np.diff(size, axis=0) > 0
    if terms.rising:
        stop |= size[:-1] + 2 * log_p[:-1] < _NOTHING
        stop |= np.abs(np.imag(power[1:])) > _LARGEST_PHASE
    return np.where(stop.any(axis=0), np.argmax(stop, axis=0), len(size) - 1)


def _log(law: _Law) -> np.ndarray:
    """``log K`` without cancellation near 1, or near 0."""
    near = np.abs(law.excess) < 0.3
    return np.where(near, np.log1p(np.where(near, law.excess, 0)), np.log(law.whole))


def _law_on_axis(terms: _Sum, p: np.ndarray, rules: tuple) -> tuple[_Law, np.ndarray]:
    """Real and imaginary part on the upper side of the axis; the latter is positive."""
    s = terms.shift
    low, end = terms.lowest, np.full(p.shape, terms.highest)
    saddle = larger_saddle(np.log(p), s)
    if terms.rising:
        end = np.minimum(saddle, end)
    place, weight = gauss(*rules[0])
    v = low + (end - low)[:, None] * place
    normal = (end - low)[:, None] * weight * np.exp(-0.5 * v * v) / SQRT_2PI
    exponent = np.minimum(p[:, None] * terms.beyond(s * v - 0.5 * s * s), 700.0)
    excess = np.sum(np.expm1(exponent) * normal, axis=1) - np.exp(log_normal_tail(end))
    law = _Law(np.sum(np.exp(exponent) * normal, axis=1), excess)
    if not terms.rising:
        return law, np.zeros_like(p)
    _, dv, exponent = steepest(saddle, s, gauss(*rules[1]))
    exponent = np.clip(exponent - terms.mean * p[:, None], -745, 700)
    jump = np.sum(np.exp(exponent) * dv, axis=1) / SQRT_2PI
    jump = np.where(saddle < terms.edge, jump, 0.0)
    return _Law(*(part + np.real(jump) for part in law)), np.imag(jump)


def _law_on_rays(terms: _Sum, p: np.ndarray, nodes: int) -> _Law:
    """At complex p, (B, M), where each row has a path of its own.

    Bent where ``e^{±pA}`` would grow: far to the right ``±pA`` is turned to the
    negative axis, about, at all of a row.
    """
    s = terms.shift
    sizes, angles = np.log(np.abs(p)), np.angle(p)
    growth = sizes.max(axis=1) - log_last(s)
    turn = larger_saddle(np.minimum(growth, 0.0) + log_last(s), s)
    turn = np.where(growth >= 0, (1 - growth) / s, turn)
    end = (math.log(60.0) - sizes.min(axis=1) + 0.5 * s * s) / s
    high = np.minimum(np.maximum(end, turn + 3 / s), terms.highest)
    spacing = (high - terms.lowest) / (nodes - 1)
    w = terms.lowest + spacing[:, None] * np.arange(nodes)
    slope = min(2.0 * s, 2.5)
    bent = 0.5 * (1 + np.tanh(slope * (w - turn[:, None])))
    angle = 0.5 * (angles.min(axis=1) + angles.max(axis=1))
    height = (((math.pi if terms.rising else 0.0) - angle) / s)[:, None]
    if not terms.rising and terms.is_light:
        height = 0.0 * height  # rays are vertical
    v = w + 1j * height * bent
    rise = 2 * slope * height * bent * (1 - bent)
    mass = np.exp(-0.5 * v * v) * (spacing[:, None] * (1 + 1j * rise) / SQRT_2PI)
    exponent = p[:, :, None] * terms.beyond(s * v - 0.5 * s * s)[:, None, :]
    # Near 1 the law's own mass is taken off term by term, if all of it is there.
    missing = np.where(high > -terms.lowest, 0.0, mass.sum(axis=1) - 1)[:, None]
    mass = mass[:, :, None]
    if terms.count > _MANY:
        excess = (np.expm1(exponent) @ mass)[..., 0] + missing
        return _Law(excess + 1, excess)
    whole = (np.exp(exponent) @ mass)[..., 0]
    return _Law(whole, whole - mass.sum(axis=1) + missing)


def _rays(
    terms: _Sum,
    start: np.ndarray,
    base: np.ndarray,
    narrowness: np.ndarray,
    slowest: np.ndarray,
    finer: float,
) -> _Nodes:
    """Of rays from the starts, where the integrand is ``start / narrowness`` wide."""
    # The more lean, the less K^n falls: then it is for e^{pk} to do.
    lean = 0.0 if terms.is_light else _LEAN * (1 + 4 / narrowness**4)
    direction = 1j + (lean if terms.rising else -lean)
    unit = (start / narrowness * direction)[:, None]

    def power_at(away: np.ndarray, nodes: float, block: int) -> np.ndarray:
        p = (start[:, None] + away).reshape(-1, block)
        power = terms.count * _log(_law_on_rays(terms, p, round(nodes)))
        return power.reshape(away.shape) - base[:, None]

    away = np.sinh(_SCOUTS) * unit
    power = np.real(power_at(away, _SCOUT_NODES, 2))
    above = power + np.real(away) * slowest[:, None] + _FALL
    is_gone = above < 0
    at = np.where(is_gone.any(axis=1), np.argmax(is_gone, axis=1), len(_SCOUTS) - 1)
    rows = np.arange(len(at))
    after, before = above[rows, at], above[rows, at - 1]
    share = np.where((after < 0) & (before > 0), after / (after - before), 0.0)
    end = (_SCOUTS[at] - share * (_SCOUTS[1] - _SCOUTS[0]))[:, None]
    nodes = _BLOCK * round(_NODES * finer / _BLOCK)
    if terms.is_light and terms.count < _FEW:
        nodes *= 2
    law_nodes = _LAW_NODES if terms.rising else _LAW_NODES_FALLING
    more = finer * (_MORE if terms.is_light else 1.0)
    law_nodes *= more * (terms.highest - terms.lowest) / 23
    place, weight = gauss(nodes, 1)
    away = np.sinh(place * end) * unit
    step = np.cosh(place * end) * unit * weight * end / math.pi
    power = power_at(away, law_nodes, _BLOCK)
    return _nodes(start, start[:, None] + away, power + np.log(step), away, 1.0)


def _nodes(
    start: np.ndarray, p: np.ndarray, power: np.ndarray, moved: np.ndarray, factor
) -> _Nodes:
    over = start[:, None] / p
    powers = np.stack([over**2, over, np.ones_like(over)], axis=-1)
    return _Nodes(power, moved, powers * np.asarray(factor)[..., None])


def _jumps(terms: _Sum, start: np.ndarray, finer: bool) -> _Nodes:
    """Of the axis from 0 to the starts, by the larger saddle in place of p.

    The law there is interpolated.
    """
    s, n, end = terms.shift, terms.count, terms.edge
    first = larger_saddle(np.log(start), s)[:, None]
    are_rare = first >= end  # too rare to count
    first = np.minimum(first, end - 1)
    place, weight = gauss(24, _JUMP_PANELS[finer] * math.ceil(1 + s))
    x = first + (end - first) * place
    p = np.exp(place_of(x, s))
    low, high = float(first.min()), end - 1e-9
    known = chebyshev_points(_CHEBYSHEV[finer])
    nodes = 0.5 * (low + high) + 0.5 * (high - low) * known
    known = np.exp(place_of(nodes, s))
    law, imaginary = _law_on_axis(terms, known, _FINE)
    # Smooth where they are tiny, too.
    order = 2 if terms.mean else 1
    # K turns by less than half a right angle: its real part is positive.
    real = _log(law)
    rows = np.stack([np.log(imaginary) - real, real / known**order])
    turn, real = through_points(nodes, rows, np.minimum(x, high))
    ratio = np.exp(turn)
    size = n * (real * p**order + 0.5 * np.log1p(ratio * ratio))
    size = size + np.log(p * (s - 1 / x) * (end - first) * weight / math.pi)
    size = np.where(are_rare, -1e300, size)
    factor = np.where(are_rare, 0.0, np.sin(n * np.arctan(ratio)))
    return _nodes(start, p, size, p, factor)

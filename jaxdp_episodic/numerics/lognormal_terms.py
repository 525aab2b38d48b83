"""``K(p) = E e^{±p (A - m)}`` of one lognormal term, where contours of sums need it.

``A = e^{s x - s²/2}``, x standard normal; see `numerics.lognormal_sums`. Rows are
independent of one another: what they are rows of (sums, contours, parts of contours)
does not matter here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.complex_exponentials import (
    Pair,
    exp_complex,
    exp_parts,
    expm1_complex,
    expm1_in_parts,
    log1p_complex,
    log_complex,
    polar,
    times,
    versine_sine,
)
from jaxdp_episodic.numerics.loops import Array, complex_of, fori_loop, namespace
from jaxdp_episodic.numerics.skewed_terms import (
    SQRT_2PI,
    gauss,
    larger_saddle,
    log_last,
    steepest,
)
from jaxdp_episodic.numerics.special import log_normal_tail

# A table goes so many deviations far, in the sum or in one term that jumps; a term's
# law, tilted, is so many wide.
REACH, _WIDE = 13.0, 8.5
# Jumps count where one of so many deviations does, until they are so many nats rarer.
_JUMPING, _RARER = REACH, 20.0
# Below this shift 1 is taken off A: else what cancels in K^n e^{pk} costs digits.
_NARROW = 0.05
# From so many terms on K - 1 needs all its digits.
_MANY = 3e4
# Shifts below which rays are vertical: of X, or of more than so many terms of -X.
_LIGHT, _LIGHT_OF_FEW, _VERY_FEW = 0.35, 0.13, 5
# Nearer to 1 than that log K is a series in K - 1.
_NEAR = 0.3
# Elements that NumPy computes with at once.
_AT_ONCE = 6000
# Where an angle is so large its e^x is nothing.
_HUGE = 1e15


class Sums(NamedTuple):
    """What is added up, and which tail is asked for; (R,) each.

    Attributes:
      count: n terms.
      shift: s > 0.
      rising: 1 for the tail of large sums, 0 for that of small ones.
    """

    count: Array
    shift: Array
    rising: Array

    def take(self, rows: Array) -> Sums:
        """Some rows."""
        return Sums(*(field[rows] for field in self))

    @property
    def sign(self) -> Array:
        """1 of large sums, -1 of small ones."""
        return 2 * self.rising - 1

    @property
    def mean(self) -> Array:
        """What is taken off A, the m of `constant`."""
        return namespace(self.shift).where(self.shift < _NARROW, 1.0, 0.0)

    @property
    def lowest(self) -> Array:
        """Deviation below which nothing of a term is left, though all are low."""
        return -_WIDE - REACH / namespace(self.count).sqrt(self.count)

    @property
    def highest(self) -> Array:
        """And above which."""
        return namespace(self.count).maximum(-self.lowest, REACH) + self.shift

    @property
    def edge(self) -> Array:
        """Deviation at which a jump is too rare to count.

        At the larger saddle x the integrand is ``e^{x/s - x²/2}``, less what the place
        takes: of a jump to d it is ``e^{-d²/2}`` at d, and where s d < 1 it grows from
        there on and falls behind 2/s only.
        """
        xp, turn = namespace(self.count), 1 / self.shift
        least = (self.shift + _JUMPING) ** 2 + 2 * _RARER
        return xp.maximum(self.highest, turn + xp.sqrt(turn * turn + least))

    @property
    def is_light(self) -> Array:
        """Of these K falls off like a Gaussian's: rays are vertical."""
        is_normal = (self.rising > 0) | (self.count > _VERY_FEW)
        of_few = self.shift < _LIGHT_OF_FEW
        return namespace(self.count).where(is_normal, self.shift < _LIGHT, of_few)

    def beyond(self, y: Array) -> Array:
        """``±(A - m)`` at ``A = e^y``, (..., R)."""
        return (namespace(y).expm1(y) + (1 - self.mean)) * self.sign

    def constant(self, place: Array) -> Array:
        """Of a place (..., R), k."""
        return -self.count * self.beyond(self.sign * place)


class AxisLaw(NamedTuple):
    """On the upper side of the real axis; (R,) each.

    Attributes:
      real, excess: K and K - 1, without cancellation each.
      imaginary: of K; positive.
      real_slope, imaginary_slope: derivatives by the shift at fixed p; (0,) if they are
        not asked for.
    """

    real: Array
    excess: Array
    imaginary: Array
    real_slope: Array
    imaginary_slope: Array


def law_on_axis(
    terms: Sums, p: Array, *, rules: tuple, jumps: bool, slopes: bool = False
) -> AxisLaw:
    """At real p > 0, (R,).

    Args:
      terms: (R,).
      p: (R,).
      rules: Gauss–Legendre rules, nodes and panels, of the law and of its jumps.
      jumps: whether the rows rise.
      slopes: whether derivatives are asked for.
    """
    xp = namespace(p, *terms)
    s, low, end = terms.shift, terms.lowest, terms.highest
    saddle = larger_saddle(xp.log(p), s) if jumps else end
    end = xp.minimum(saddle, end)
    place, weight = (rule[:, None] for rule in gauss(*rules[0]))
    v = low + (end - low) * place
    normal = (end - low) * weight * xp.exp(-0.5 * v * v) / SQRT_2PI
    above = terms.beyond(s * v - 0.5 * s * s)
    exponent = xp.minimum(p * above, 700.0)
    excess = xp.sum(xp.expm1(exponent) * normal, axis=0)
    excess = excess - xp.exp(log_normal_tail(end))
    normal = xp.exp(exponent) * normal
    real, imaginary = xp.sum(normal, axis=0), xp.zeros_like(p)
    real_slope, imaginary_slope = xp.zeros((2, 0))
    if slopes:
        moved = (v - s) * (above + terms.sign * terms.mean)
        real_slope, imaginary_slope = p * xp.sum(moved * normal, axis=0), imaginary
    if jumps:
        v, dv, exponent = steepest(saddle, s, gauss(*rules[1]))
        exponent = xp.clip(exponent - (terms.mean * p)[:, None], -745, 700)
        size = xp.exp(exponent) / SQRT_2PI
        size = xp.where((saddle < terms.edge)[:, None], size, 0.0)
        grown = size * xp.real(dv), size * xp.imag(dv)
        jump, imaginary = (xp.sum(part, axis=1) for part in grown)
        real, excess = real + jump, excess + jump
        if slopes:
            # p A is 1/s times the saddle's, turned and grown.
            v, column = (xp.real(v), xp.imag(v)), s[:, None]
            term = polar(column * (v[0] - saddle[:, None]), column * v[1])
            moved = times(times(grown, term), (v[0] - column, v[1]))
            jump, moved = (xp.sum(part, axis=1) * saddle / s for part in moved)
            real_slope, imaginary_slope = real_slope + jump, moved
    return AxisLaw(real, excess, imaginary, real_slope, imaginary_slope)


def log_axis_law(law: AxisLaw) -> Pair:
    """``log K`` without cancellation near 1."""
    return _log((law.real, law.imaginary), (law.excess, law.imaginary))


def _log(whole: Pair, excess: Pair) -> Pair:
    """``log K`` without cancellation near 1, or near 0."""
    xp = namespace(*whole)
    near = xp.hypot(*excess) < _NEAR
    small = (xp.where(near, part, 0.0) for part in excess)
    both = zip(log1p_complex(*small), log_complex(*whole), strict=True)
    re, im = (xp.where(near, one, other) for one, other in both)
    return re, im


class _Path(NamedTuple):
    """Of each row, w -> ``w + i height / (1 + e^{-2 slope (w - turn)})``; (K,)."""

    low: Array
    spacing: Array
    turn: Array
    slope: Array
    height: Array
    misses: Array  # whether what is beyond its end counts


def log_law_on_rays(
    terms: Sums, nodes: Array, real: Array, imaginary: Array, *, slopes: bool = False
) -> tuple[Array, ...]:
    """``n log K`` at complex p, (B, K), where each of K rows has a path of its own.

    Bent where ``e^{±pA}`` would grow: far to the right ``±pA`` is turned to the
    negative axis, about, at all of a row.

    Args:
      terms: (K,).
      nodes: (K,) on each row's path.
      real: part of p.
      imaginary: the other.
      slopes: whether to append derivatives by the shift at fixed p.

    Returns:
      Real and imaginary parts, (B, K) each.
    """
    xp = namespace(real, *terms)
    path = _path_of(terms, nodes, real, imaginary)
    near_one = terms.count > _MANY
    summed = _summed_at_once if xp is np else _summed
    total, mass, moved = summed(terms, path, nodes, (real, imaginary), near_one, slopes)
    # Near 1 the law's own mass is taken off term by term, if all of it is there.
    taken = xp.where(near_one, 0.0, 1.0)
    missing = xp.where(path.misses, mass[0] - 1, 0.0), xp.where(path.misses, mass[1], 0)
    excess = tuple(
        a - taken * m + rest for a, m, rest in zip(total, mass, missing, strict=True)
    )
    whole = (xp.where(near_one, excess[0] + 1, total[0]),)
    whole = (*whole, xp.where(near_one, excess[1], total[1]))
    re, im = _log(whole, (excess[0], excess[1]))
    result = terms.count * re, terms.count * im
    if not slopes:
        return result
    size = whole[0] * whole[0] + whole[1] * whole[1]
    along = times(times((real, imaginary), moved), (whole[0] / size, -whole[1] / size))
    return (*result, terms.count * along[0], terms.count * along[1])


def _path_of(terms: Sums, nodes: Array, real: Array, imaginary: Array) -> _Path:
    xp = namespace(real, *terms)
    s = terms.shift
    sizes, angles = xp.log(xp.hypot(real, imaginary)), xp.arctan2(imaginary, real)
    growth = xp.max(sizes, axis=0) - log_last(s)
    turn = larger_saddle(xp.minimum(growth, 0.0) + log_last(s), s)
    turn = xp.where(growth >= 0, (1 - growth) / s, turn)
    end = (math.log(60.0) - xp.min(sizes, axis=0) + 0.5 * s * s) / s
    high = xp.minimum(xp.maximum(end, turn + 3 / s), terms.highest)
    angle = 0.5 * (xp.min(angles, axis=0) + xp.max(angles, axis=0))
    height = (math.pi * terms.rising - angle) / s
    height = xp.where((terms.rising > 0) | ~terms.is_light, height, 0.0)
    return _Path(
        terms.lowest,
        (high - terms.lowest) / (nodes - 1),
        turn,
        xp.minimum(2.0 * s, 2.5),
        height,
        high <= -terms.lowest,
    )


def _node(terms: Sums, path: _Path, i: Array, *, slopes: bool) -> list[Pair]:
    """Of node i, (..., 1): its mass, ``±(A - m)`` and its derivative by s; (..., K)."""
    xp = namespace(i, *path)
    s = terms.shift
    w = path.low + path.spacing * i
    bent = 1 / (1 + xp.exp(-2 * path.slope * (w - path.turn)))
    h = path.height * bent
    rise = 2 * path.slope * h * (1 - bent)
    part = path.spacing / SQRT_2PI
    mass = times(polar(0.5 * (h * h - w * w), -w * h), (part, part * rise))
    grow = expm1_complex if xp is np else expm1_in_parts
    above = grow(s * w - 0.5 * s * s, s * h)
    grown = terms.sign * (above[0] + 1), terms.sign * above[1]
    above = terms.sign * (above[0] + (1 - terms.mean)), grown[1]
    return [mass, above, times((w - s, h), grown)] if slopes else [mass, above]


def _summed(
    terms: Sums, path: _Path, nodes: Array, p: Pair, near_one: Array, slopes: bool
) -> tuple[Pair, Pair, Pair]:
    """Sums of ``e^{p(A - m)}``, less 1 where ``near_one``, times masses; (B, K).

    The masses' sum, and those with the derivatives of ``A - m``, if asked for. In JAX:
    term after term.
    """
    xp = namespace(*p)
    less = xp.where(near_one, 1.0, 0.0)

    def node(i: Array) -> list[Array]:
        # Behind its last one a row has that again, without mass.
        i = xp.asarray(i, nodes.dtype)
        kept, i = i < nodes, xp.minimum(i, nodes - 1)
        mass, above, *moved = _node(terms, path, i, slopes=slopes)
        mass = xp.where(kept, mass[0], 0.0), xp.where(kept, mass[1], 0.0)
        pairs = [mass, above, *(times(mass, part) for part in moved)]
        return [complex_of(xp, *pair) for pair in pairs]

    def add(i: Array, state: tuple[list[Array], ...]) -> tuple[list[Array], ...]:
        sums, this = state
        mass, above, *moved = ((part.real, part.imag) for part in this)
        exponent = times(p, above)
        power, part = exp_parts(exponent[0])
        is_angle = xp.abs(exponent[1]) < _HUGE
        versine, sine = versine_sine(xp.where(is_angle, exponent[1], 0.0))
        grown = part + power
        # Without cancellation near 1 where that is taken off.
        gained = (part + (power - less)) - grown * versine, grown * sine
        result = [sums[0] + complex_of(xp, *times(gained, mass)), sums[1] + this[0]]
        if slopes:
            whole = grown - grown * versine, gained[1]
            result.append(sums[2] + complex_of(xp, *times(whole, moved[0])))
        # If it were not of the turn before, XLA would compute the node for each p.
        return result, node(i + 1)

    zero, row = xp.zeros_like(p[0]), xp.zeros_like(nodes)
    start = [complex_of(xp, zero, zero), complex_of(xp, row, row)]
    start += [start[0]] * slopes
    most = xp.max(nodes).astype(xp.int32)
    total, mass, *more = fori_loop(xp, 0, most, add, (start, node(xp.int32(0))))[0]
    moved = more[0] if slopes else total
    pairs = ((part.real, part.imag) for part in (total, mass, moved))
    first, second, third = pairs
    return first, second, third


def _summed_at_once(
    terms: Sums, path: _Path, nodes: Array, p: Pair, near_one: Array, slopes: bool
) -> tuple[Pair, Pair, Pair]:
    """`_summed` in NumPy: for rows with as many nodes a matrix times the masses."""
    total, slope = np.empty((2, *p[0].shape), complex)
    whole = np.empty(nodes.shape, complex)
    for number in np.unique(nodes):
        rows = np.flatnonzero(nodes == number)
        ways = _Path(*(field[rows] for field in path))
        every = np.arange(number)[:, None]
        found = _node(terms.take(rows), ways, every, slopes=slopes)
        mass, above, *moved = (complex_of(np, *part).T for part in found)
        whole[rows] = mass.sum(axis=1)
        each = complex_of(np, p[0][:, rows].T, p[1][:, rows].T)
        # What fits the cache, and what memory is kept for.
        some = max(_AT_ONCE // int(each.shape[1] * number), 1)
        for i in range(0, len(rows), some):
            part = slice(i, i + some)
            at = rows[part]
            exponent = each[part, :, None] * above[part, None, :]
            grown = exp_complex(exponent)
            many = near_one[at]
            if np.any(many):
                pair = exponent[many].real, exponent[many].imag
                grown[many] = complex_of(np, *expm1_complex(*pair))
            total[:, at] = (grown @ mass[part, :, None])[..., 0].T
            if slopes:
                grown = grown + many[:, None, None]
                slope[:, at] = (grown @ (mass * moved[0])[part, :, None])[..., 0].T
    pairs = ((np.real(part), np.imag(part)) for part in (total, whole, slope))
    first, second, third = pairs
    return first, second, third

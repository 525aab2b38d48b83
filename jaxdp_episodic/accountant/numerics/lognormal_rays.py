"""``K(p) = E e^{±p (A - m)}`` of one lognormal term, on rays away from the real axis.

Of lower tails K(p) is ``E e^{-qA}`` at q = p, of upper ones the conjugate of that at
``q = -conj(p)``, continued through the upper half plane: ``0 <= arg q <= pi``. With W
Lambert's function and ``w = W(q s² e^{-s²/2})``, the exponent ``-qA - x²/2`` has its
saddle point at ``x = -w/s``; about it, ``x = y - w/s``,

    E e^{-qA} = e^{-(w² + 2w) / (2 s²)} G(w),
    G(w) = E e^{-w E(y)},   E(y) = (e^{sy} - 1 - s y) / s²,

y standard normal. The path of y follows that of steepest descent: through 0 in its
direction, ``-arg(1 + w)/2``, to where ``w e^{sy}`` is positive on the right and ``y -
w/s`` real on the left. Nodes are closer on the right, where ``e^{-wE}`` ends.

What is said of constants without a derivation are the errors of tails of 352 sums (2 to
1e7 terms, shifts 0.02 to 9, down to e^-36 of the largest) with another value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    exp_complex,
    exp_in_place,
    expm1_complex,
    log_near,
)
from jaxdp_episodic.accountant.numerics.lognormal_terms import Sums, similar_rows
from jaxdp_episodic.accountant.numerics.loops import at, complex_of, sigmoid
from jaxdp_episodic.accountant.numerics.skewed_terms import SQRT_2PI, larger_saddle

# Above this number of terms K - 1 needs all its digits.
_MANY_TERMS = 3e4
# Values of t at which the end of a path is looked for.
_TRIED = np.arange(-15.0, 26.0, 1.2)[:, None]
# Nats below its largest value at which the integrand counts no longer: 1e-16 of it.
_DEPTH = 37.0
# Nodes are closer on the right by this factor times the shift, if that is above 1: with
# 1 errors were 1e-6;
_REFINEMENT = 2.0
# from where e^{-wE} ends, and this y at most: with 9 they were 1e-5.
_REFINED_FROM_MOST = 6.0
# Spacing of nodes in t where the normal density decides: with 0.8 tails of 1e7 terms
# were wrong.
_SPACING = 0.5
# Above this shift it falls like the shift's root: else tables failed from 4.7 on.
_HEAVY_SHIFT = 2.0
# Largest steepness of a path's bend (1.8 and 3.5 did as well), and that over the shift
# above which it decides the spacing: with 0.8 errors were 8e-7.
_STEEPEST = 2.5
_STEEP_OF_SHIFT = 0.4
# Range of y that holds all of the normal density, to 3e-18.
_NORMAL_REACH = 8.7
# By how much the masses of the nodes of a path may sum to something else than 1.
_ROUNDING = 1e-14
# Below this |z| Padé's z / (1 + z) is nearer to W.
_SMALL_ARGUMENT = 0.12


def lambert(z: np.ndarray) -> np.ndarray:
    """Lambert's W, ``w e^w = z``, in the upper half plane; relative error 1e-14.

    Principal branch, ``0 <= arg z <= pi``; next to -1/e the digits of z do not tell
    more. By Winitzki's uniform approximation (2003), with an error below 1 %, and by
    Halley's method. SciPy's takes longer to import than an epsilon to compute.
    """
    root = np.sqrt(2 * math.e * z + 2)
    log_b, log_d = np.log(1 + 0.8842 * root), np.log(1 + 0.5106 * root)
    w = 2 * log_b - np.log(1 + 0.9294 * log_d) - 1.213
    w /= 1 + 1 / (2 * log_b + 2 * 2.344)
    w = np.where(np.abs(z) < _SMALL_ARGUMENT, z / (1 + z), w)
    for _ in range(4):
        grown = exp_complex(w)
        f, slope = w * grown - z, (1 + w) * grown
        w = w - f / (slope - f * (2 + w) / (2 + 2 * w))
    return w


class Path(NamedTuple):
    """Paths of y, of rows (K,), along t at ``first + spacing i``.

    ``Re y = t - (1 - 1/refinement) log(1 + e^t) + refined_from``, and ``Im y = height
    (sigmoid(2 steepness (Re y - bend)) - sigmoid(-2 steepness bend))``.
    """

    first: np.ndarray
    spacing: np.ndarray
    num_nodes: np.ndarray
    refinement: np.ndarray
    refined_from: np.ndarray
    height: np.ndarray
    bend: np.ndarray
    steepness: np.ndarray
    is_bounded: np.ndarray  # whether the normal density is nowhere large on it
    is_whole: np.ndarray  # whether all of the normal density is there

    def points(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The points y, and dy/dt; (..., K)."""
        coarser = 1 - 1 / self.refinement
        u = t - coarser * np.logaddexp(0.0, t) + self.refined_from
        du = 1 - coarser * sigmoid(t)
        step = sigmoid(2 * self.steepness * (u - self.bend))
        v = self.height * (step - sigmoid(-2 * self.steepness * self.bend))
        dv = du * 2 * self.steepness * self.height * step * (1 - step)
        return complex_of(np, u, v), complex_of(np, du, dv)


def _lambert_argument(terms: Sums, p: np.ndarray) -> np.ndarray:
    """``q s² e^{-s²/2}``."""
    square, q = terms.shift**2, complex_of(np, -terms.sign * np.real(p), np.imag(p))
    return square * np.exp(-0.5 * square) * q


def paths(terms: Sums, p: np.ndarray, least: np.ndarray, fine: np.ndarray) -> Path:
    """Paths for rows of neighbouring complex p, (K,), made for one of them.

    ``least`` is the size of the smallest of the neighbours over that of p; paths have
    ``fine`` times as many nodes.
    """
    s = terms.shift
    w = lambert(_lambert_argument(terms, p))
    above = np.maximum(np.imag(w), 1e-9 * (np.abs(np.real(w)) + np.imag(w)))
    w = complex_of(np, np.real(w), above)
    angle = np.angle(w)
    whole = angle + above
    slope = np.tan(0.5 * np.angle(1 + w)) * s * whole / (2 * above * angle)
    slope = np.minimum(slope, _STEEPEST)
    bend = np.log(angle / above) / (2 * slope)
    # No later than at the other saddle point, where the integrand begins to grow.
    log_p = np.log(np.abs(p))
    is_small = log_p - 0.5 * s * s + 2 * np.log(s) < -1
    other = np.maximum(larger_saddle(log_p, s) + np.real(w) / s, 0.0)
    bend = np.where(is_small, np.minimum(bend, other), bend)
    refinement = np.maximum(_REFINEMENT * s, 1.0)
    begin = np.minimum(np.log(s * s / np.abs(w)) / s, _REFINED_FROM_MOST)
    begin = np.where(refinement > 1, begin, 0.0)
    shape = refinement, begin, -whole / s, bend, slope
    none = np.zeros_like(s)
    path = Path(none, none, none, *shape, none, none)

    y, _ = path.points(_TRIED)
    lost = np.real(w * _exponent(s, y))
    normal = -0.5 * np.real(y * y)
    below = normal - np.minimum(lost, np.minimum(least, 1.0) * lost)
    below = np.where(np.isnan(below), -np.inf, below)
    left, right = np.real(y) < 0, np.real(y) >= 0
    is_out = below < -_DEPTH
    # Of many terms all of the normal density.
    covers = terms.count > _MANY_TERMS
    is_first = left & is_out & (~covers | (np.real(y) < -_NORMAL_REACH))
    first = np.max(np.where(is_first, _TRIED, _TRIED[0]), axis=0)
    # Else where it is smallest, before it grows.
    smallest = np.min(np.where(right, below, np.inf), axis=0)
    is_last = right & (is_out | (below <= smallest))
    last = np.min(np.where(is_last, _TRIED, _TRIED[-1]), axis=0)
    end = (_NORMAL_REACH + 0.1 - begin) * refinement
    last = np.where(covers, np.maximum(last, end), last)
    inside = (first <= _TRIED) & (_TRIED <= last)

    spacing = _SPACING * np.sqrt(np.minimum(1.0, _HEAVY_SHIFT / s))
    spacing = spacing * np.minimum(1.0, _STEEP_OF_SHIFT * s / slope)
    spacing = spacing * np.minimum(1.0, refinement / np.sqrt(np.abs(1 + w))) / fine
    number = 8 * np.ceil((last - first) / spacing / 8)
    reached = np.where(inside, np.real(y), 0.0)
    reached = np.minimum(-np.min(reached, axis=0), np.max(reached, axis=0))
    is_bounded = np.max(np.where(inside, normal, -1.0), axis=0) < 1
    is_whole = covers | (reached >= _NORMAL_REACH)
    return Path(
        first, (last - first) / (number - 1), number, *shape, is_bounded, is_whole
    )


def _expm1(z: np.ndarray) -> np.ndarray:
    return complex_of(np, *expm1_complex(np.real(z), np.imag(z)))


def _exponent(s: np.ndarray, y: np.ndarray) -> np.ndarray:
    """E(y)."""
    return (_expm1(s * y) - s * y) / (s * s)


def log_transform_on_rays(terms: Sums, path: Path, p: np.ndarray) -> np.ndarray:
    """``n log K`` at complex p, (B, K), where each of K rows has a path of its own."""
    square, w = terms.shift**2, lambert(_lambert_argument(terms, p))
    # K - 1 is the sum of masses times e^{-wE} less that of the masses: term by term
    # where K is near 1.
    near_one = path.is_bounded & (terms.count > _MANY_TERMS)
    total, mass = _summed(terms, path, -w, near_one)
    subtracted = np.where(near_one, 0.0, np.where(path.is_bounded, mass, 1.0))
    # On a steep path the normal density oscillates too fast for these nodes.
    is_one = path.is_whole & (np.abs(mass - 1) < _ROUNDING)
    missing = np.where(path.is_bounded & ~is_one, mass - 1, 0.0)
    excess = total - subtracted + missing
    whole = np.where(near_one, excess + 1, total)
    # -(w² + 2w) / (2 s²); and p m more, which is (w / s²) e^{w + s²/2}.
    grown = np.where(terms.mean > 0, _expm1(w + 0.5 * square), -1.0)
    logs = log_near(whole, excess) + w * (grown - 0.5 * w) / square
    return terms.count * complex_of(np, np.real(logs), -terms.sign * np.imag(logs))


def _summed(
    terms: Sums, path: Path, z: np.ndarray, near_one: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over nodes of mass times ``e^{zE}``, less 1 where ``near_one``, (B, K).

    And the masses' sum, (K,).
    """
    size = len(z)
    sums = np.empty(z.shape, complex)
    masses = np.empty(len(path.num_nodes), complex)
    for rows, most in similar_rows(path.num_nodes, size):
        column, i = rows[:, None], np.arange(most)
        some, s = at(path, column), terms.shift[column]
        # Rows with fewer nodes are padded by their last one, without mass.
        t = some.first + some.spacing * np.minimum(i, some.num_nodes - 1)
        y, dy = some.points(t)
        mass = exp_complex(-0.5 * y * y) * dy * (some.spacing / SQRT_2PI)
        mass = np.where(i < some.num_nodes, mass, 0.0)
        masses[rows] = mass.sum(axis=1)
        # As real arrays: products and exponentials are faster than of complex ones.
        columns = mass[..., None].view(float)
        grown = z[:, rows].T[..., None] * _exponent(s, y)[:, None]
        grown, many = (np.real(grown).copy(), np.imag(grown).copy()), near_one[rows]
        less = None
        if np.any(many):
            less = expm1_complex(*(part[many] for part in grown))
        exp_in_place(*grown)
        added = _product(grown, columns)
        if less is not None:
            added[many] = _product(less, columns[many])
        sums[:, rows] = added[..., 0].T
    return sums, masses


def _product(pair: tuple, columns: np.ndarray) -> np.ndarray:
    """Complex (..., B, N) by (..., N, 1), as two columns: real, imaginary part."""
    real, imaginary = (part @ columns for part in pair)
    return real.view(complex) + 1j * imaginary.view(complex)

"""``K(p) = E e^{±p (A - m)}`` of one lognormal term on the axis, for contours of sums.

``A = e^{s x - s²/2}``, x standard normal; see `numerics.lognormal_sums`. Rows are
independent of one another: what they are rows of (sums, contours, parts of contours)
does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    Pair,
    log1p_complex,
    log_complex,
    polar,
    times,
)
from jaxdp_episodic.accountant.numerics.loops import map_arrays
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    SQRT_2PI,
    gauss,
    larger_saddle,
    steepest,
    too_rare,
)
from jaxdp_episodic.accountant.numerics.special import log_normal_tail

# A table goes so many deviations far, in the sum or in one term that jumps; a term's
# distribution, tilted, is so many wide.
REACH, _WIDE = 13.0, 8.5
# Below this shift 1 is taken off A: else what cancels in K^n e^{pk} costs digits.
_NARROW = 0.05
# Shifts below which rays are vertical: of X, or of more than so many terms of -X.
_LIGHT, _LIGHT_OF_FEW, _VERY_FEW = 0.35, 0.13, 5
# Nearer to 1 than that log K is a series in K - 1.
_NEAR = 0.3
# Elements that fit the cache; and rows, of which fewer take longer to call.
_AT_ONCE, _ROWS = 2**17, 2048


class Sums(NamedTuple):
    """What is added up, and which tail is asked for; (R,) each.

    Attributes:
      count: n terms.
      shift: s > 0.
      rising: 1 for the tail of large sums, 0 for that of small ones.
    """

    count: np.ndarray
    shift: np.ndarray
    rising: np.ndarray

    def take(self, rows: np.ndarray) -> Sums:
        """Some rows."""
        return Sums(*(field[rows] for field in self))

    @property
    def sign(self) -> np.ndarray:
        """1 of large sums, -1 of small ones."""
        return 2 * self.rising - 1

    @property
    def mean(self) -> np.ndarray:
        """What is taken off A, the m of `constant`."""
        return np.where(self.shift < _NARROW, 1.0, 0.0)

    @property
    def lowest(self) -> np.ndarray:
        """Deviation below which nothing of a term is left, though all are low."""
        return -_WIDE - REACH / np.sqrt(self.count)

    @property
    def highest(self) -> np.ndarray:
        """And above which."""
        return np.maximum(-self.lowest, REACH) + self.shift

    @property
    def edge(self) -> np.ndarray:
        """Deviation at which a jump is too rare to count."""
        return np.maximum(self.highest, too_rare(self.shift))

    @property
    def is_light(self) -> np.ndarray:
        """Of these K falls off like a Gaussian's: rays are vertical."""
        is_normal = (self.rising > 0) | (self.count > _VERY_FEW)
        of_few = self.shift < _LIGHT_OF_FEW
        return np.where(is_normal, self.shift < _LIGHT, of_few)

    def beyond(self, y: np.ndarray) -> np.ndarray:
        """``±(A - m)`` at ``A = e^y``, (..., R)."""
        return (np.expm1(y) + (1 - self.mean)) * self.sign

    def constant(self, place: np.ndarray) -> np.ndarray:
        """Of a place (..., R), k, with all digits where it is far below 1 as well."""
        y = self.sign * place
        value = np.where(self.mean > 0, np.expm1(y), np.exp(y))
        return -self.count * self.sign * value


class AxisTransform(NamedTuple):
    """On the upper side of the real axis; (R,) each.

    Attributes:
      real, excess: K and K - 1, without cancellation each.
      imaginary: of K; positive.
      real_slope, imaginary_slope: derivatives by the shift at fixed p; (0,) if they are
        not asked for.
    """

    real: np.ndarray
    excess: np.ndarray
    imaginary: np.ndarray
    real_slope: np.ndarray
    imaginary_slope: np.ndarray


def transform_on_axis(
    terms: Sums, p: np.ndarray, *, rules: tuple, jumps: bool, slopes: bool = False
) -> AxisTransform:
    """At real p > 0, (R,).

    Args:
      terms: (R,).
      p: (R,).
      rules: Gauss–Legendre rules, nodes and panels, of the integral and of its jumps.
      jumps: whether the rows rise.
      slopes: whether derivatives are asked for.
    """
    s, low, end = terms.shift, terms.lowest, terms.highest
    saddle = larger_saddle(np.log(p), s) if jumps else end
    end = np.minimum(saddle, end)
    place, weight = (rule[:, None] for rule in gauss(*rules[0]))
    v = low + (end - low) * place
    normal = (end - low) * weight * np.exp(-0.5 * v * v) / SQRT_2PI
    above = terms.beyond(s * v - 0.5 * s * s)
    exponent = np.minimum(p * above, 700.0)
    grown = np.expm1(exponent) * normal
    excess = np.sum(grown, axis=0) - np.exp(log_normal_tail(end))
    # K is 1 at least, if not of small sums.
    normal = grown + normal if jumps else np.exp(exponent) * normal
    real, imaginary = np.sum(normal, axis=0), np.zeros_like(p)
    real_slope, imaginary_slope = np.zeros((2, 0))
    if slopes:
        moved = (v - s) * (above + terms.sign * terms.mean)
        real_slope, imaginary_slope = p * np.sum(moved * normal, axis=0), imaginary
    if jumps:
        v, dv, exponent = steepest(saddle, s, gauss(*rules[1]))
        exponent = np.clip(exponent - (terms.mean * p)[:, None], -745, 700)
        size = np.exp(exponent, out=exponent)
        size /= SQRT_2PI
        size[~(saddle < terms.edge)] = 0.0
        grown = size * dv[0], size * dv[1]
        jump, imaginary = (np.sum(part, axis=1) for part in grown)
        real, excess = real + jump, excess + jump
        if slopes:
            # p A is 1/s times the saddle's, turned and grown.
            column = s[:, None]
            term = polar(column * (v[0] - saddle[:, None]), column * v[1])
            moved = times(times(grown, term), (v[0] - column, v[1]))
            jump, moved = (np.sum(part, axis=1) * saddle / s for part in moved)
            real_slope, imaginary_slope = real_slope + jump, moved
    return AxisTransform(real, excess, imaginary, real_slope, imaginary_slope)


def log_axis_transform(transform: AxisTransform) -> Pair:
    """``log K`` without cancellation near 1."""
    return log_near(
        (transform.real, transform.imaginary), (transform.excess, transform.imaginary)
    )


def log_near(whole: Pair, excess: Pair) -> Pair:
    """``log K`` without cancellation near 1, or near 0."""
    near = np.hypot(*excess) < _NEAR
    small = (np.where(near, part, 0.0) for part in excess)
    both = zip(log1p_complex(*small), log_complex(*whole), strict=True)
    re, im = (np.where(near, one, other) for one, other in both)
    return re, im


def alike(number: np.ndarray, each: int) -> Iterator[tuple[np.ndarray, int]]:
    """Rows of about as many nodes, (R,), and how many: what fits the cache.

    Each row has so many elements a node.
    """
    order, begin = np.argsort(-number, kind="stable"), 0
    while begin < len(order):
        most = int(number[order[begin]])
        some = max(_AT_ONCE // (each * most), 1)
        yield order[begin : begin + some], most
        begin += some


def by_rows(kernel: Any, *arrays: Any, **static: Any) -> list[np.ndarray]:
    """``kernel(*arrays, **static)`` a few rows, of the last axis, at a time.

    What fits the cache.
    """
    parts, size = [], arrays[-1].shape[-1]
    for begin in range(0, size, _ROWS):
        rows = slice(begin, begin + _ROWS)
        some = map_arrays(lambda array, rows=rows: array[..., rows], arrays)
        parts.append(kernel(*some, **static))
    return [np.concatenate(part, axis=-1) for part in zip(*parts, strict=True)]

"""Tails of sums of lognormal terms on contours that are known; NumPy only.

See `numerics.lognormal_sums`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import exp_in_place
from jaxdp_episodic.accountant.numerics.lognormal_terms import Sums, alike

# Places of a contour that are evaluated together.
_TOGETHER = 8
ABSENT = -1e300  # logarithm of what is not there


class Rays(NamedTuple):
    """Integrands are ``e^{power + k p}`` times powers of ``start / p``.

    Attributes:
      number: (J,) of nodes; behind them nothing counts.
      parts: (J, 2, N) each, real and imaginary, of p from the start, and of the power.
      share: (J, N, 3) each, imaginary and real, of the second, first and no power; and
        (J, N, 6), of those times the power's derivative by the shift.
    """

    number: np.ndarray
    parts: list[np.ndarray]
    share: list[np.ndarray]

    def sums(self, contour: np.ndarray, constant: np.ndarray) -> np.ndarray:
        """With the second, first and no power; then their derivatives, (R, M, 3 or 6).

        Args:
          contour: (R,).
          constant: k, (R, M).
        """
        result = np.empty((*constant.shape, self.share[0].shape[-1]))
        for rows, most in alike(self.number[contour], _TOGETHER):
            at = contour[rows]
            each = _with_one(constant[rows])
            grown = [each @ part[at, :, :most] for part in self.parts]
            exp_in_place(*grown)
            first, second = (
                part @ share[at, :most]
                for part, share in zip(grown, self.share, strict=True)
            )
            result[rows] = np.add(first, second, out=first)
        return result


class Jumps(NamedTuple):
    """The same along the axis, times factors; 0 where there are none.

    All is real: (J, 2, N), and (J, N, 3), or (J, N, 6).
    """

    number: np.ndarray
    parts: np.ndarray
    share: np.ndarray

    def sums(self, contour: np.ndarray, constant: np.ndarray) -> np.ndarray:
        """As those of rays, over e to the last of all; (R, M, 4 or 7)."""
        result = np.empty((*constant.shape, self.share.shape[-1] + 1))
        for rows, most in alike(self.number[contour], _TOGETHER):
            at = contour[rows]
            grown = _with_one(constant[rows]) @ self.parts[at, :, :most]
            largest = np.max(grown, axis=-1, keepdims=True)
            grown -= largest
            np.exp(grown, out=grown)
            result[rows, :, :-1] = grown @ self.share[at, :most]
            result[rows, :, -1:] = largest
        return result


def powers(over: np.ndarray, *factors: Any) -> np.ndarray:
    """Of ``over``, the second, the first and none, times each factor, (..., 3 F)."""
    kind = np.result_type(over, *factors)
    result = np.empty((*over.shape, len(factors), 3), kind)
    for i, factor in enumerate(factors):
        result[..., i, 2] = factor
        result[..., i, 1] = over * factor
        result[..., i, 0] = over * result[..., i, 1]
    return result.reshape(*over.shape, -1)


def _with_one(constant: np.ndarray) -> np.ndarray:
    """With 1 behind each, (R, M, 2)."""
    return np.stack([constant, np.ones_like(constant)], axis=-1)


class Contours(NamedTuple):
    """Contours for all places of S sums, then finer ones; made by `contours`.

    Attributes:
      terms: what is added up.
      first: (2 S,) number of the first contour of each, and of its first finer one.
      start: (2 S, C) where these leave the axis, or cross it.
      size: (2 S, C) logarithm of ``K^n / p²`` there; inf behind the last.
      ends: (2, J) where all contours do, and the logarithm of K^n there.
      rays: of all contours, one after the other.
      jumps: of those that rise, which come first.
    """

    terms: Sums
    first: np.ndarray
    start: np.ndarray
    size: np.ndarray
    ends: np.ndarray
    rays: Rays
    jumps: Jumps

    def log_tails(
        self, which: np.ndarray, place: np.ndarray, *, finer: bool = False
    ) -> np.ndarray:
        """``log E(X - x)_+``, ``log P(X > x)`` and log-density at ``x = n e^place``.

        Or of ``E(x - X)_+`` and ``P(X < x)`` at ``n e^-place``, if not rising, of sum
        ``which``; (3, m), NaN where more cancels than double precision has. With slopes
        (6, m): the derivatives by the shift, at x.
        """
        with np.errstate(all="ignore"):
            constant = self.terms.take(which).constant(place)
            kind = 2 * which + finer
            # Little cancels where the integrand is small.
            size = self.size[kind] + constant[:, None] * self.start[kind]
            mine = np.argmin(size, axis=1)
            contour, column = _side_by_side(mine + self.first[kind])
            constant = constant[column]
            start, base = self.ends[:, contour, None]
            totals, top = self.rays.sums(contour, constant), base + start * constant
            rise = np.searchsorted(contour, len(self.jumps.number))
            if rise:
                sums = self.jumps.sums(contour[:rise], constant[:rise])
                both = np.maximum(top[:rise], sums[..., -1])
                totals[:rise] *= np.exp(top[:rise] - both)[..., None]
                totals[:rise] += sums[..., :-1] * np.exp(
                    sums[..., -1:] - both[..., None]
                )
                top[:rise] = both
            logs = np.log(totals[..., :3]) + top[..., None]
            logs -= np.log(start)[..., None] * np.array([2.0, 1.0, 0.0])
            slopes = totals[..., 3:] / totals[..., : totals.shape[-1] - 3]
            result = np.empty((len(place), totals.shape[-1]))
            result[column] = np.concatenate([logs, slopes], axis=-1)
        return result.T


def _side_by_side(contour: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a few places on one contour: (R,) contours, and (R, M) the places."""
    order = np.argsort(contour, kind="stable")
    every, number = np.unique(contour, return_counts=True)
    rows = -(-number // _TOGETHER)
    begin = np.repeat(np.cumsum(number) - number, rows)
    end = np.repeat(np.cumsum(number), rows)
    rank = np.arange(len(begin)) - np.repeat(np.cumsum(rows) - rows, rows)
    at = (begin + rank * _TOGETHER)[:, None] + np.arange(_TOGETHER)
    return np.repeat(every, rows), order[np.minimum(at, end[:, None] - 1)]

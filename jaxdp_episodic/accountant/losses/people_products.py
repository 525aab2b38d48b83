"""Sums over numbers of contributions, for all components and nodes at once."""

# Products of two matrices, with each node's largest term scaled to 1.

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    cos_sin,
    expm1_complex,
    times,
)
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks

# Least scaled sum that is exact: terms that underflow are below 1e-100 of it.
_LEAST_SUM = 1e-200
# Sums that are made one by one at once.
_AT_ONCE = 2**14
# Smallest factor whose logarithm is taken, for the sake of 0.
_TINY = 1e-300


class Factor(NamedTuple):
    """``e^exponent (re + i im)``, arrays (..., K, n); of real ones im is None."""

    exponent: Array
    re: Array
    im: Array | None = None


Points = tuple[Array, Array | None]
"""Real and imaginary part, (K, n) each; of real ones None."""


def power(w: Points, slope: Array) -> Factor:
    """``e^{slope w}``."""
    angle = None if w[1] is None else slope * w[1]
    exponent = slope * w[0]
    if angle is None:
        return Factor(exponent, np.ones_like(exponent))
    return Factor(exponent, *cos_sin(angle))


def gained(w: Points, slope: Array, offset: Array | float = 0.0) -> Factor:
    """``e^{slope w - offset} - 1``, without cancellation near 0."""
    tilt = slope * w[0] - offset
    exponent = np.maximum(tilt, 0.0)
    if w[1] is None:
        return Factor(
            exponent, np.where(tilt > 0, -np.expm1(-exponent), np.expm1(tilt))
        )
    angle = slope * w[1]
    low = np.minimum(tilt, 1.0)
    less = np.exp(-exponent)
    near = expm1_complex(low, angle)
    cosine, sine = cos_sin(angle)
    far = tilt > 1
    return Factor(
        exponent,
        np.where(far, cosine - less, near[0] * less),
        np.where(far, sine, near[1] * less),
    )


def shrunk(w: Points, slope: Array) -> Factor:
    """``1 - e^{-slope w}``, of Re w >= 0."""
    less = gained(_negative(w), slope)
    return Factor(less.exponent, -less.re, None if less.im is None else -less.im)


def turned(w: Points, slope: Array) -> Factor:
    """``e^{slope w} - e^{-slope w}``, of Re w >= 0."""
    less, grown = shrunk(w, 2 * slope), power(w, slope)
    if less.im is None or grown.im is None:
        return Factor(grown.exponent, less.re)
    product = times((less.re, less.im), (grown.re, grown.im))
    return Factor(grown.exponent, *product)


def _negative(w: Points) -> Points:
    return -w[0], None if w[1] is None else -w[1]


def log_products(
    exponent: Array, factor: Factor, *, is_rough: bool = False
) -> tuple[Array, Array | None]:
    """Logarithms of ``sum_j e^exponent factor``, (C, K, n)."""
    peak, re, im = _as_product(exponent, factor, is_rough=is_rough)
    if im is None:
        return peak + np.log(np.maximum(re, _TINY)), None
    size = np.maximum(np.hypot(re, im), _TINY)
    return peak + np.log(size), np.arctan2(im, re)


def _as_product(
    exponent: np.ndarray, factor: Factor, *, is_rough: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The sums over what they are scaled by, whose logarithms come first."""
    column = np.max(exponent, axis=1, keepdims=True)
    left = np.exp(exponent - column).transpose(2, 1, 0)
    scaled = column + factor.exponent
    peak = np.max(scaled, axis=0)
    grown = np.exp(scaled - peak)
    parts = [part for part in (factor.re, factor.im) if part is not None]
    found = [_product(left, (grown * part).transpose(2, 0, 1)) for part in parts]
    size = np.abs(found[0]) if len(found) == 1 else np.hypot(*found)
    poor = size < _LEAST_SUM
    peak = np.broadcast_to(peak, found[0].shape)
    if np.any(poor) and not is_rough:
        peak = peak.copy()
        _sum_again(np.argwhere(poor), exponent, factor, parts, (peak, *found))
    return peak, found[0], found[1] if len(found) > 1 else None


def _sum_again(
    where: np.ndarray,
    exponent: np.ndarray,
    factor: Factor,
    parts: list[np.ndarray],
    results: tuple[np.ndarray, ...],
) -> None:
    """Sums one by one, into peaks and parts; ``where`` are (m, 3) indices of them."""
    for first in range(0, len(where), _AT_ONCE):
        i, k, n = where[first : first + _AT_ONCE].T
        exact = exponent[:, i, n] + factor.exponent[:, k, n]
        top = np.max(exact, axis=0)
        peak, *values = results
        peak[i, k, n] = top
        for part, value in zip(parts, values, strict=True):
            wide = np.broadcast_to(part, factor.exponent.shape)[:, k, n]
            value[i, k, n] = np.sum(np.exp(exact - top) * wide, axis=0)


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(n, C, J) times (n, J, K) as (C, K, n)."""
    return np.ascontiguousarray(in_blocks(left, right).transpose(1, 2, 0))

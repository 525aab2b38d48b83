"""Means of ratios of sums of lognormal terms, without a contour; NumPy.

X and Y as in `numerics.mean_moments`, by the same transforms.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import logsumexp
from jaxdp_episodic.accountant.numerics.mean_moments import (
    FAR,
    FINENESS,
    WIDE,
    last_log_p,
    log_centred_transform,
    log_places,
    normal_places,
)
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks

# Highest moments, of a mean and of a ratio.
_MOST_OF_MEANS = 100
_MOST_OF_RATIO = 40
# Standard deviations at which a term's normal variable makes most of the highest moment
# of a mean, at most.
_FURTHEST = 30.0
# Standard deviations within which nearly all of a jump's contribution is: 99.7 %.
_NEAR_JUMP = 3.0
# Spacing of log p.
_SPACING = 0.2


class Moments(NamedTuple):
    """``E((W - 1) / unit)^m / m!`` of a ratio W at m = 0 .. M, (..., M + 1) each."""

    all: np.ndarray
    jumps: np.ndarray  # the parts of them that are due to single terms, each alone
    log_w: np.ndarray  # beyond the jumps that are the largest part of them


def moments_of_means(count: np.ndarray, shift: np.ndarray, unit: np.ndarray) -> Moments:
    """Of means X of terms, (S, M + 1) each; padded by -inf."""
    most = np.clip(_FURTHEST / shift, 2, _MOST_OF_MEANS).astype(int)
    result = np.full((3, len(most), most.max() + 1), -np.inf)
    settings = np.stack([count, shift, unit]).T.tolist()
    for row, last, (n, s, scale) in zip(
        result.swapaxes(0, 1), most.tolist(), settings, strict=True
    ):
        x, density = normal_places(1.0, 0.0, last * s, 0.0)
        away = np.expm1(s * x - 0.5 * s * s) / (n * scale)
        one = scaled_powers(away, density, last).sum(axis=1)
        one[1] = 0.0  # each term's mean is 1
        every = _to_power(one[None], int(n))[0]
        log_w = np.logaddexp(0.0, _log_jump(last, s) - math.log(n))
        row[:, : last + 1] = every, n * one, log_w
    return Moments(*result)


def _log_jump(most: int, s: float) -> np.ndarray:
    """Log A beyond which it hardly contributes to its moments; (most + 1,)."""
    return s * (s * np.arange(most + 1.0) + _NEAR_JUMP) - 0.5 * s * s


def moments_of_ratio(slots: int, count: int, shift: float, unit: float) -> Moments:
    """Of ``W = X / Y`` with density Y: by Mellin transforms, as `Tilted`; (M + 1,)."""
    s = shift
    most = min(_MOST_OF_RATIO, 2 + int(WIDE / s))
    top = last_log_p(most, 2 * most * s * s, slots, count, s)
    wide = max(2 * s * s + 4 * s - math.log(slots), 0.0)
    log_p, log_weight = log_places(wide, 1.0, top, FINENESS / math.sqrt(max(most, 16)))
    # One term alone is in X and in Y, and is tilted by each.
    far = most * s * (2 if count == 1 else 1)
    x, density = normal_places(s, -far, far, 0.0)
    other = np.exp(-s * x - 0.5 * s * s)
    away = (np.exp(s * x - 0.5 * s * s) - other) / (slots * unit)
    share = np.exp(log_p) / slots
    rows = scaled_powers(away, density, most)
    one = in_blocks(rows, np.exp(-np.outer(other, share)))
    mass = np.maximum(one[0], 1e-300)
    # Near 1 its rounding, times the count, would count.
    centred = np.exp(log_centred_transform(np.log(share), s)) - share
    log_mass = np.where(share < math.exp(FAR), centred, np.log(mass))
    one = (one / mass).T
    m = np.arange(most + 1.0)
    scale = np.cumsum(np.log(np.maximum(m - 2, 1.0)))
    logs = (m - 1) * log_p[:, None] - scale
    logs = logs + (count * log_mass - share * (slots - count) + log_weight)[:, None]
    every, jumps = (
        np.sum(part * np.exp(logs), axis=0)
        for part in (_to_power(one, count), count * one)
    )
    return Moments(
        every, jumps, np.logaddexp(0.0, _log_jump(most, s) - math.log(slots))
    )


def scaled_powers(away: np.ndarray, density: np.ndarray, most: int) -> np.ndarray:
    """``density away^m / m!`` at m = 0 .. most, (most + 1, n); both (n,)."""
    rows = np.multiply.outer(1 / np.maximum(np.arange(most + 1.0), 1.0), away)
    rows[0] = density
    for before, row in itertools.pairwise(rows):  # in half the time of cumprod
        np.multiply(before, row, out=row)
    return rows


def _to_power(series: np.ndarray, count: int) -> np.ndarray:
    """The series' power, of P power series (P, M), to the same order; count >= 1."""
    if count == 1:
        return series
    root = _to_power(_product(series, series), count // 2)
    return _product(root, series) if count % 2 else root


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of power series, to the same order."""
    number = a.shape[1]
    if len(a) == 1:
        return np.convolve(a[0], b[0])[None, :number]
    padded = np.pad(a, ((0, 0), (number - 1, 0)))
    rows = np.lib.stride_tricks.sliding_window_view(padded, number, axis=1)
    return (rows @ b[:, ::-1, None])[..., 0]


def log_distances(
    slots: float,
    count: float,
    shift: float,
    part: np.ndarray,
    spacing: float = _SPACING,
) -> np.ndarray:
    """``log E (X - Y)² X^{a-1} Y^-a``, 0 < a < 1, by Mellin transforms of both powers.

    With D = A - B, ``E (sum D)² e^{-pX-qY}`` is a sum of squares: nothing cancels.

    Of (m,) parts a; a ``spacing`` of log p of 0.35 has an error below 1e-10.
    """
    s = shift
    # Largest tilt of one term's x; two terms share it.
    most = 2 * float(np.maximum(part, 1 - part).max()) + 1
    top = last_log_p(1.0, (most / min(count, 2) + 0.5) * s * s, slots, count, s)
    nearest = float(np.minimum(part, 1 - part).min())
    wide = max((most - 0.5) * s * s + 4 * s - math.log(slots), 0.0)
    log_p, log_weight = log_places(wide, nearest, top, spacing)
    x, density = normal_places(s, -most * s, most * s, 0.0)
    a, b = np.exp(s * x - 0.5 * s * s), np.exp(-s * x - 0.5 * s * s)
    share = np.exp(log_p) / slots
    one, other = np.exp(-share[:, None] * a), np.exp(-share[:, None] * b)
    with np.errstate(divide="ignore", invalid="ignore"):
        mass, first, second = (
            np.log(np.abs(in_blocks(one * (density * (a - b) ** k), other.T)))
            for k in range(3)
        )
        squares = math.log(count) + second - mass
        products = 2 * (first - mass) + math.log(max(count * (count - 1), 1e-300))
        idle = (share[:, None] + share) * (slots - count)
        terms = np.logaddexp(squares, products) + count * mass - idle
        terms += log_weight[:, None] + log_weight
    terms = np.where(np.isnan(terms), -np.inf, terms)
    powers = [((1 - a) * log_p)[:, None] + a * log_p for a in part]
    sums = [logsumexp((terms + power).reshape(-1)) for power in powers]
    return np.array(sums) + np.log(np.sin(math.pi * part) / (math.pi * slots * slots))


def log_middle_distance(slots: float, count: float, shift: float) -> float:
    """``log E (X - Y)² / (X + Y)``, the integral of ``E (X - Y)² e^{-p(X+Y)}``."""
    s = shift
    top = last_log_p(1.0, 0.5 * s * s, slots, count, s)
    wide = max(2 * s * s + 4 * s - math.log(slots), 0.0)
    log_p, log_weight = log_places(wide, 1.0, top, _SPACING)
    x, density = normal_places(s, -2 * s, 2 * s, 0.0)
    a, b = np.exp(s * x - 0.5 * s * s), np.exp(-s * x - 0.5 * s * s)
    share = np.exp(log_p) / slots
    grown = np.exp(-share[:, None] * (a + b))
    with np.errstate(divide="ignore", invalid="ignore"):
        mass, second = np.log(grown @ density), np.log(grown @ (density * (a - b) ** 2))
        terms = second + (count - 1) * mass - 2 * share * (slots - count)
    # D of one term times D of another has mean 0, as x and -x are alike.
    terms = np.where(np.isnan(terms), -np.inf, terms + log_p + log_weight)
    return float(logsumexp(terms)) + math.log(count / slots**2)

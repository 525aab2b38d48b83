"""Means of ratios of sums of lognormal terms that no contour is asked for; NumPy.

X and Y as in `numerics.mean_moments`, by the same transforms.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.mean_moments import (
    FAR,
    FINENESS,
    WIDE,
    last_log_p,
    log_centred_transform,
    log_places,
    log_sum,
    normal_places,
)
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks

# Highest powers of what is centred; and deviations, of one term, where one is largest.
_MOST_POWERS, _MOST_RATIO, _FURTHEST = 100, 40, 30.0
# Nearly all of the contribution of jumps is within so many deviations.
_NEAR_JUMP = 3.0
# Spacing of log p.
_COARSE = 0.2


class Powers(NamedTuple):
    """``E((W - 1) / unit)^m / m!`` of a ratio W, m = 0 .. M, (..., M + 1) each.

    Attributes:
      all: these.
      jumps: what single terms make of them, each alone.
      place: log W, some deviations beyond the jump that is the largest part of them.
    """

    all: np.ndarray
    jumps: np.ndarray
    place: np.ndarray


def powers_of_means(count: np.ndarray, shift: np.ndarray, unit: np.ndarray) -> Powers:
    """Of means X of terms, (S, M + 1) each; -inf behind the last that is known."""
    most = np.clip(_FURTHEST / shift, 2, _MOST_POWERS).astype(int)
    result = np.full((3, len(most), most.max() + 1), -np.inf)
    # Those whose `power_factors` are alike together: none is larger for another's sake.
    root = np.sqrt(most + 1.0).astype(int)
    for each in np.unique(root).tolist():
        rows = np.flatnonzero(root == each)
        found = _powers_of_alike(count[rows], shift[rows], unit[rows], most[rows])
        result[:, rows, : found.shape[-1]] = found
    return Powers(*result)


def _powers_of_alike(
    count: np.ndarray, shift: np.ndarray, unit: np.ndarray, most: np.ndarray
) -> np.ndarray:
    """`powers_of_means`, (3, S, M + 1), of numbers of powers of about the same root."""
    x, density = normal_places(1.0, 0.0, most * shift, 0.0)
    s, n, m = shift[:, None], count[:, None], np.arange(most.max() + 1)
    away = np.expm1(s * x - 0.5 * s * s) / (n * unit[:, None])
    with np.errstate(all="ignore"):  # behind the last one
        high, low, scale = power_factors(away, density, len(m) - 1)
        one = high.swapaxes(0, 1) @ low.transpose(1, 2, 0) * scale
    one = one.reshape(len(s), -1)[:, : len(m)]
    one[:, 1] = 0.0
    every = np.empty_like(one)
    for row, powers, last, number in zip(every, one, most, count, strict=True):
        row[: last + 1] = _to_power(powers[None, : last + 1], int(number))[0]
    jump = s * (s * m + _NEAR_JUMP) - 0.5 * s * s
    place = np.logaddexp(0.0, jump - np.log(n))
    return np.where(m <= most[:, None], [every, n * one, place], -np.inf)


def powers_of_ratio(bins: int, count: int, shift: float, unit: float) -> Powers:
    """Of ``W = X / Y`` where Y is the density: by Mellin transforms, as `Tilted`."""
    s = shift
    most = min(_MOST_RATIO, 2 + int(WIDE / s))
    top = last_log_p(most, 2 * most * s * s, bins, count, s)
    wide = max(2 * s * s + 4 * s - math.log(bins), 0.0)
    log_p, log_weight = log_places(wide, 1.0, top, FINENESS / math.sqrt(max(most, 16)))
    # One term alone is in both of W, and moves as far for each.
    far = most * s * (2 if count == 1 else 1)
    x, density = normal_places(s, -far, far, 0.0)
    other = np.exp(-s * x - 0.5 * s * s)
    away = (np.exp(s * x - 0.5 * s * s) - other) / (bins * unit)
    share = np.exp(log_p) / bins
    high, low, scale = power_factors(away, density, most)
    rows = (high[:, None] * (low * scale[..., None])).reshape(-1, len(x))
    one = in_blocks(rows[: most + 1], np.exp(-np.outer(other, share)))
    mass = np.maximum(one[0], 1e-300)
    # Its rounding, times the count, tells where it is near 1.
    centred = np.exp(log_centred_transform(np.log(share), s)) - share
    log_mass = np.where(share < math.exp(FAR), centred, np.log(mass))
    one = (one / mass).T
    m = np.arange(most + 1.0)
    scale = np.cumsum(np.log(np.maximum(m - 2, 1.0)))
    logs = (m - 1) * log_p[:, None] - scale
    logs = logs + (count * log_mass - share * (bins - count) + log_weight)[:, None]
    every, jumps = (
        np.sum(part * np.exp(logs), axis=0)
        for part in (_to_power(one, count), count * one)
    )
    jump = s * (s * m + _NEAR_JUMP) - 0.5 * s * s
    return Powers(every, jumps, np.logaddexp(0.0, jump - math.log(bins)))


def power_factors(
    away: np.ndarray, density: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``away^m / m!`` times the density, m = 0 .. most or more, (..., n) each.

    As ``high[j] low[i] scale[j, i]`` for the ``j``-th rows of ``len(low)``, ``m = j
    len(low) + i``: sums over n are products of matrices that are far smaller.
    """
    each, steps, scale = _scales(most)
    each, steps = (row.reshape(-1, *(1,) * away.ndim) for row in (each, steps))
    low = away / each
    low[0] = 1.0
    _multiply_up(low)
    high = low[-1] * (away / len(each)) / steps
    high[0] = density
    _multiply_up(high)
    return high, low, scale


def _multiply_up(rows: np.ndarray) -> None:
    """Products of each row and all before, in half the time of cumprod."""
    for before, row in itertools.pairwise(rows):
        np.multiply(before, row, out=row)


@functools.lru_cache
def _scales(most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``max(i, 1)``; ways to choose b of j b, and one over those to choose i of more.

    For i below the root b of all.
    """
    each = math.isqrt(most + 1)
    rows, columns = range(0, most + 1, each), range(each)
    steps = np.array([math.comb(row, each) for row in rows], np.float64)
    ways = [[math.comb(row + i, i) for i in columns] for row in rows]
    return np.maximum(columns, 1.0), np.maximum(steps, 1.0), 1 / np.array(ways)


def _to_power(series: np.ndarray, count: int) -> np.ndarray:
    """Powers of power series (P, M), as far as these go."""
    number = series.shape[1]

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if len(a) == 1:
            return np.convolve(a[0], b[0])[None, :number]
        padded = np.zeros((len(a), 2 * number - 1))
        padded[:, number - 1 :] = a
        rows = np.lib.stride_tricks.sliding_window_view(padded, number, axis=1)
        return (rows @ b[:, ::-1, None])[..., 0]

    result: np.ndarray | None = None
    while True:
        if count % 2:
            result = series if result is None else product(result, series)
        count //= 2
        if not count:
            assert result is not None  # count >= 1
            return result
        series = product(series, series)


def log_distances(
    bins: float,
    count: float,
    shift: float,
    part: np.ndarray,
    spacing: float = _COARSE,
) -> np.ndarray:
    """``log E (X - Y)² X^{a-1} Y^-a``, 0 < a < 1, by Mellin transforms of both powers.

    With D = A - B, ``E (sum D)² e^{-pX-qY}`` is a sum of squares: nothing cancels. By
    ``spacing`` of log p (0.35: with an error below 1e-10).
    """
    s = shift
    # How far x moves in the mean, for one term, and for two that move together.
    most = 2 * float(np.maximum(part, 1 - part).max()) + 1
    top = last_log_p(1.0, (most / min(count, 2) + 0.5) * s * s, bins, count, s)
    nearest = float(np.minimum(part, 1 - part).min())
    wide = max((most - 0.5) * s * s + 4 * s - math.log(bins), 0.0)
    log_p, log_weight = log_places(wide, nearest, top, spacing)
    x, density = normal_places(s, -most * s, most * s, 0.0)
    a, b = np.exp(s * x - 0.5 * s * s), np.exp(-s * x - 0.5 * s * s)
    share = np.exp(log_p) / bins
    one, other = np.exp(-share[:, None] * a), np.exp(-share[:, None] * b)
    with np.errstate(divide="ignore", invalid="ignore"):
        mass, first, second = (
            np.log(np.abs(in_blocks(one * (density * (a - b) ** k), other.T)))
            for k in range(3)
        )
        alike = math.log(count) + second - mass
        apart = 2 * (first - mass) + math.log(max(count * (count - 1), 1e-300))
        idle = (share[:, None] + share) * (bins - count)
        terms = np.logaddexp(alike, apart) + count * mass - idle
        terms += log_weight[:, None] + log_weight
    terms = np.where(np.isnan(terms), -np.inf, terms)
    powers = [((1 - a) * log_p)[:, None] + a * log_p for a in part]
    sums = [log_sum((terms + power).reshape(-1)) for power in powers]
    return np.array(sums) + np.log(np.sin(math.pi * part) / (math.pi * bins * bins))


def log_middle_distance(bins: float, count: float, shift: float) -> float:
    """``log E (X - Y)² / (X + Y)``, the integral of ``E (X - Y)² e^{-p(X+Y)}``."""
    s = shift
    top = last_log_p(1.0, 0.5 * s * s, bins, count, s)
    wide = max(2 * s * s + 4 * s - math.log(bins), 0.0)
    log_p, log_weight = log_places(wide, 1.0, top, _COARSE)
    x, density = normal_places(s, -2 * s, 2 * s, 0.0)
    a, b = np.exp(s * x - 0.5 * s * s), np.exp(-s * x - 0.5 * s * s)
    share = np.exp(log_p) / bins
    grown = np.exp(-share[:, None] * (a + b))
    with np.errstate(divide="ignore", invalid="ignore"):
        mass, second = np.log(grown @ density), np.log(grown @ (density * (a - b) ** 2))
        terms = second + (count - 1) * mass - 2 * share * (bins - count)
    # D of one term and D of another have mean 0 together, as x and -x are alike.
    terms = np.where(np.isnan(terms), -np.inf, terms + log_p + log_weight)
    return float(log_sum(terms)) + math.log(count / bins**2)

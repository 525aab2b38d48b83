"""Hockey-stick divergences of one-dimensional normal mixtures, by their roots."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

_GRID_STEP = 0.01
_REACH = 9.0
_MOST_MEANS = 5_000

Mixture = dict[float, float]
"""Probability of each mean; the means are multiples of the clip norm."""


def hockey_stick(top: Mixture, bottom: Mixture, s: float, g: np.ndarray) -> np.ndarray:
    """H_g(top || bottom) of mixtures of N(s * mean, 1), for every g; exact."""
    return hockey_sticks(top, bottom, s, g)[0]


def hockey_sticks(one: Mixture, two: Mixture, s: float, g: np.ndarray):
    """`hockey_stick` of (one, two) and of (two, one)."""
    g = np.atleast_1d(np.asarray(g, dtype=float))
    means = np.array(sorted({*one, *two}), dtype=float)
    tops, bottoms = (np.array([law.get(m, 0.0) for m in means]) for law in (one, two))
    if means.size > _MOST_MEANS:
        raise ValueError(f"at most {_MOST_MEANS} means fit in memory, got {means.size}")
    means = means * s
    x = np.arange(means.min() - _REACH, means.max() + _REACH, _GRID_STEP)
    kernel = np.exp(-((x[:, None] - means) ** 2) / 2)
    p, q = kernel @ tops, kernel @ bottoms
    factor = g[:, None]
    above_zero = np.concatenate([p > factor * q, q > factor * p])
    signed = np.concatenate([tops - factor * bottoms, bottoms - factor * tops])
    levels, places = np.nonzero(above_zero[:, 1:] != above_zero[:, :-1])
    roots = _roots(x[places], means, signed[levels])
    out = np.empty(len(signed))
    for i, weights in enumerate(signed):
        ends = np.concatenate([[-np.inf], roots[levels == i], [np.inf]])
        # The upper tail keeps small masses accurate to the right of a mean.
        below = ndtr(ends[:, None] - means) @ weights
        above = ndtr(means - ends[:, None]) @ weights
        mass = np.where(
            np.abs(below[1:]) < np.abs(above[:-1]),
            below[1:] - below[:-1],
            above[:-1] - above[1:],
        )
        start = 0 if above_zero[i, 0] else 1
        out[i] = mass[start::2].sum()
    return tuple(np.maximum(out, 0.0).reshape(2, -1))


def convolved(one: Mixture, two: Mixture) -> Mixture:
    """Distribution of the sum of two independent values; equal sums merged."""
    result: Mixture = {}
    for a, wa in one.items():
        for b, wb in two.items():
            key = round(a + b, 12)
            result[key] = result.get(key, 0.0) + wa * wb
    return result


def _roots(left: np.ndarray, means: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Bisect the sign changes of signed mixtures, one a row, in [left, left + step]."""

    def is_positive(x: np.ndarray) -> np.ndarray:
        kernel = np.exp(-((x[:, None] - means) ** 2) / 2)
        return np.einsum("ij,ij->i", kernel, weights) > 0

    low, high = left.copy(), left + _GRID_STEP
    at_low = is_positive(low)
    for _ in range(20):
        middle = (low + high) / 2
        same = is_positive(middle) == at_low
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return (low + high) / 2

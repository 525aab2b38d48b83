"""Where the contours of `numerics.skewed_sums` start; NumPy only."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.skewed_terms import (
    Terms,
    larger_saddle,
    log_last,
    log_transform,
    transforms_on_axis,
)

# Rounds in which the place, a logarithm, is found where a contour starts.
_REFINEMENTS = (12, 8)
# Part of the axis is all that counts where the rest is so many nats down.
_NOTHING = -200.0
# Up to here K^n turns along the axis; further on it is the ray that follows it.
_LARGEST_PHASE = 6.0
# Largest log of p g B at the larger saddle.
_LOG_OPPOSITE = -0.5
# Places, in parts of the range, whose starts are found.
_PLACES = np.linspace(0, 1, 10) ** 2
# A contour serves places so many deviations of the tilted sum apart, whose x are moved
# no further than this, either way; by rays that are less than this it may be any; and
# between neighbours of those places so many serve.
_APART, _FURTHEST, _NO_RAY, _MOST = 4.0, 0.6, -128.0, 8.0
# The slope's change is found by moves of so many deviations of the sum.
_SLIGHTLY = 0.05
# Steps from a start by which derivatives are found.
AROUND = np.exp(np.array([-0.05, 0.0, 0.05]))


class Starts(NamedTuple):
    """Where contours for what is added up may start, (P,) each.

    Attributes:
      log_g: places, from 0.
      start: of their best contours.
      passed: how many contours there are to be up to there.
    """

    log_g: np.ndarray
    start: np.ndarray
    passed: np.ndarray


def starts_for(terms: Terms, end: float) -> Starts:
    """For places ``0 <= log g <= end``; n >= 2 terms, ``E T <= 0``."""
    with np.errstate(all="ignore"):
        return _starts(terms, end)


def _starts(terms: Terms, end: float) -> Starts:
    s, n = terms.shift, terms.count
    log_g = end * _PLACES
    start = _crossing(terms, log_g)
    deviation = math.sqrt(np.log1p(np.expm1(min(s * s, 700.0)) / n))
    move = _SLIGHTLY * deviation / s * np.array([-1.0, 0.0, 1.0])
    p = np.multiply.outer(start, AROUND)
    transforms = transforms_on_axis(
        p.reshape(-1), np.repeat(log_g, 3), terms, move, coarse=True
    )
    power = n * np.real(log_transform(transforms)).reshape(-1, 3, 3)
    # By how much p's best place moves, in widths of the integrand.
    slope = (power[:, 2] - power[:, 0]) / (AROUND[2] - AROUND[0])
    constant = terms.constant(log_g[:, None] + 2 * s * move)
    slope += start[:, None] * constant * np.exp(-s * move)
    turn = np.abs(slope[:, 2] - slope[:, 0]) / (move[2] - move[0]) / (2 * s)
    turn = np.nan_to_num(turn / narrowness(power[:, :, 1]))
    size = power[:, 1, 1] + start * terms.constant(log_g) - 2 * np.log(start)
    turn = np.where(size < _NO_RAY, 0.0, turn)
    density = np.maximum(turn / _APART, 1 / (4 * s * _FURTHEST))
    passed = np.minimum(0.5 * (density[1:] + density[:-1]) * np.diff(log_g), _MOST)
    return Starts(log_g, start, np.append(0.0, np.cumsum(passed)))


def narrowness(power: np.ndarray) -> np.ndarray:
    """One over the integrand's width, times c, (J,), by ``log |K^n|`` `AROUND` it.

    Second derivative from unequal steps, times c², which alone may be nothing: the
    variance of the tilted sum.
    """
    low, _, high = AROUND
    before, after = power[:, 0] - power[:, 1], power[:, 2] - power[:, 1]
    bend = 2 * (after / (high - 1) + before / (1 - low)) / (high - low)
    return np.sqrt(np.maximum(np.nan_to_num(bend), 0.0) + 2)


def _crossing(terms: Terms, log_g: np.ndarray) -> np.ndarray:
    """The first minimum of ``|K(p)^n e^{pk}| / p²`` on the axis, (E,).

    Or where that is so small that the rest does not count, or K^n begins to oscillate.
    """
    s, n = terms.shift, terms.count
    # K^n grows no faster than by its variance: no minimum before sqrt(2) deviations.
    variance = math.log(n * math.expm1(min(s * s, 700.0)))
    left = -0.5 * (variance + np.logaddexp(0.0, 2 * log_g))
    right = np.minimum(left + 90.0, log_last(s) - 0.02)
    left = np.minimum(left, right - 1.0)
    best = left
    for number in _REFINEMENTS:
        log_p = left + (right - left) * np.linspace(0, 1, number)[:, None]
        each = np.broadcast_to(log_g, log_p.shape).reshape(-1)
        p = np.exp(log_p).reshape(-1)
        transforms = transforms_on_axis(p, each, terms, np.zeros(1), coarse=True)
        index = _first(
            terms, log_g, log_p, n * log_transform(transforms).reshape(log_p.shape)
        )

        def at(move: int, log_p: np.ndarray = log_p, index: np.ndarray = index):
            place = np.clip(index + move, 0, len(log_p) - 1)
            return np.take_along_axis(log_p, place[None], axis=0)[0]

        left, best, right = at(-1), at(0), at(1)
    return np.exp(best)


def _first(
    terms: Terms, log_g: np.ndarray, log_p: np.ndarray, power: np.ndarray
) -> np.ndarray:
    """The number of the place, of rising (C, E), where `_crossing` stops."""
    s, p = terms.shift, np.exp(log_p)
    size = np.real(power) + p * terms.constant(log_g) - 2 * log_p
    size = np.where(np.isnan(size), np.inf, size)
    stop = np.diff(size, axis=0) > 0
    stop |= size[:-1] + 2 * log_p[:-1] < _NOTHING
    stop |= np.abs(np.imag(power[1:])) > _LARGEST_PHASE
    # On the path of steepest descent e^{-p g B} grows.
    x = larger_saddle(log_p[1:], s)
    stop |= log_p[1:] + log_g - s * x - 0.5 * s * s > _LOG_OPPOSITE
    return np.where(stop.any(axis=0), np.argmax(stop, axis=0), len(size) - 1)

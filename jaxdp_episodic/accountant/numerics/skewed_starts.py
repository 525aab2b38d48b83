"""Where the contours of `numerics.skewed_sums` start; NumPy only."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import log_near
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    Terms,
    larger_saddle,
    log_last,
    transforms_on_axis,
)

# Points of each round of the search for a start, over the range and between neighbours.
_SEARCH_POINTS = (12, 8)
# log |K^n| below which the integral along the axis is all that counts.
_NEGLIGIBLE = -200.0
# Largest argument of K^n up to which the contour follows the axis.
_LARGEST_PHASE = 6.0
# Largest log of p g B at the larger saddle: above it e^{-pgB} would grow on the path.
_LARGEST_LOG_PGB = -0.5
# Points of log g at which starts are searched for, as shares of its range.
_SAMPLES = np.linspace(0, 1, 10) ** 2
# Range of log g of one contour: saddle points in it are at most 4 widths of the
# integrand apart, tilts at most 0.6; with at most 8 contours between two samples.
_WIDTHS_PER_CONTOUR = 4.0
_LARGEST_TILT = 0.6
_MOST_CONTOURS = 8.0
# Log of the integrand at the start below which the ray is negligible: any serves.
_NEGLIGIBLE_RAY = -128.0
# Tilts, in deviations of the mean, by which derivatives in log g are taken.
_DIFFERENCE = 0.05
# Factors of p by which its derivatives are taken.
AROUND = np.exp(np.array([-0.05, 0.0, 0.05]))


class Starts(NamedTuple):
    """Where contours may leave the axis, (P,) each."""

    log_g: np.ndarray  # increasing, from 0
    start: np.ndarray  # p at which the best contour leaves the axis
    passed: np.ndarray  # number of contours needed from 0 to there; not whole


@np.errstate(all="ignore")
def starts_for(terms: Terms, end: float) -> Starts:
    """For ``0 <= log g <= end``; n >= 2 terms, ``E T <= 0``."""
    s, n = terms.shift, terms.count
    log_g = end * _SAMPLES
    start = _crossing(terms, log_g)
    deviation = math.sqrt(np.log1p(np.expm1(min(s * s, 700.0)) / n))
    tilt = _DIFFERENCE * deviation / s * np.array([-1.0, 0.0, 1.0])
    p = np.multiply.outer(start, AROUND)
    transforms = transforms_on_axis(
        p.reshape(-1), np.repeat(log_g, 3), terms, tilt, coarse=True
    )
    power = n * np.real(log_near(transforms.whole, transforms.excess)).reshape(-1, 3, 3)
    # Speed of the saddle point in log g, in widths of the integrand.
    slope = (power[:, 2] - power[:, 0]) / (AROUND[2] - AROUND[0])
    constant = terms.constant(log_g[:, None] + 2 * s * tilt)
    slope += start[:, None] * constant * np.exp(-s * tilt)
    speed = np.abs(slope[:, 2] - slope[:, 0]) / (tilt[2] - tilt[0]) / (2 * s)
    speed = np.nan_to_num(speed / narrowness(power[:, :, 1]))
    size = power[:, 1, 1] + start * terms.constant(log_g) - 2 * np.log(start)
    speed = np.where(size < _NEGLIGIBLE_RAY, 0.0, speed)
    density = np.maximum(speed / _WIDTHS_PER_CONTOUR, 1 / (4 * s * _LARGEST_TILT))
    passed = 0.5 * (density[1:] + density[:-1]) * np.diff(log_g)
    passed = np.minimum(passed, _MOST_CONTOURS)
    return Starts(log_g, start, np.append(0.0, np.cumsum(passed)))


def narrowness(power: np.ndarray) -> np.ndarray:
    """One over the integrand's width times c, (J,), by ``log |K^n|`` `AROUND` c.

    Its square is c² times the second derivative of ``log |K^n / p²|``: the variance of
    the tilted sum, from differences, and 2.
    """
    low, _, high = AROUND
    before, after = power[:, 0] - power[:, 1], power[:, 2] - power[:, 1]
    variance = 2 * (after / (high - 1) + before / (1 - low)) / (high - low)
    return np.sqrt(np.maximum(np.nan_to_num(variance), 0.0) + 2)


def _crossing(terms: Terms, log_g: np.ndarray) -> np.ndarray:
    """The first minimum of ``|K(p)^n e^{pk}| / p²`` on the axis, (E,).

    Or where that is negligible, or K^n begins to oscillate.
    """
    s, n = terms.shift, terms.count
    # K^n grows no faster than by its variance: no minimum before sqrt(2) deviations.
    variance = math.log(n * math.expm1(min(s * s, 700.0)))
    left = -0.5 * (variance + np.logaddexp(0.0, 2 * log_g))
    right = np.minimum(left + 90.0, log_last(s) - 0.02)
    left = np.minimum(left, right - 1.0)
    best = left
    for number in _SEARCH_POINTS:
        log_p = left + (right - left) * np.linspace(0, 1, number)[:, None]
        each = np.broadcast_to(log_g, log_p.shape).reshape(-1)
        p = np.exp(log_p).reshape(-1)
        transforms = transforms_on_axis(p, each, terms, np.zeros(1), coarse=True)
        index = _first(
            terms,
            log_g,
            log_p,
            n * log_near(transforms.whole, transforms.excess).reshape(log_p.shape),
        )

        around = np.clip(index + np.arange(-1, 2)[:, None], 0, number - 1)
        left, best, right = np.take_along_axis(log_p, around, axis=0)
    return np.exp(best)


def _first(
    terms: Terms, log_g: np.ndarray, log_p: np.ndarray, power: np.ndarray
) -> np.ndarray:
    """Index into the increasing ``log_p``, (C, E), where `_crossing` stops."""
    s, p = terms.shift, np.exp(log_p)
    size = np.real(power) + p * terms.constant(log_g) - 2 * log_p
    size = np.where(np.isnan(size), np.inf, size)
    stop = np.diff(size, axis=0) > 0
    stop |= size[:-1] + 2 * log_p[:-1] < _NEGLIGIBLE
    stop |= np.abs(np.imag(power[1:])) > _LARGEST_PHASE
    # On the path of steepest descent e^{-p g B} grows.
    x = larger_saddle(log_p[1:], s)
    stop |= log_p[1:] + log_g - s * x - 0.5 * s * s > _LARGEST_LOG_PGB
    return np.where(stop.any(axis=0), np.argmax(stop, axis=0), len(size) - 1)

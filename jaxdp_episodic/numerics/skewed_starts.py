"""Where the contours of `numerics.skewed_sums` start; NumPy only."""

from __future__ import annotations

import math

import numpy as np

from jaxdp_episodic.numerics.skewed_terms import (
    ROUGH,
    Terms,
    larger_saddle,
    law_on_axis,
    log_last,
    log_law,
)

# Rounds in which the place, a logarithm, is found where a contour starts.
_ROUNDS = (48, 24)
# Part of the axis is all that counts where the rest is so many nats down.
_NOTHING = -200.0
# Up to here K^n turns along the axis; further on it is the ray that follows it.
_LARGEST_PHASE = 6.0
# Largest log of p g B at the larger saddle.
_LOG_OPPOSITE = -0.5


def crossing(terms: Terms) -> np.ndarray:
    """The first minimum of ``|K(p)^n e^{pk}| / p²`` on the axis.

    Or where that is so small that the rest does not count, or K^n begins to oscillate.
    """
    s, n = terms.shift, terms.count
    left = math.log(1e-3) - 0.5 * math.log(n * math.expm1(s * s))
    left = left - np.maximum(terms.log_g, 0.0)
    right = np.minimum(left + 90.0, log_last(s) - 0.02)
    left = np.minimum(left, right - 1.0)
    best = left
    for number in _ROUNDS:
        log_p = left + (right - left) * np.linspace(0, 1, number)[:, None]
        log_g = np.broadcast_to(terms.log_g, log_p.shape).reshape(-1)
        spread = terms._replace(log_g=log_g)
        law = law_on_axis(np.exp(log_p).reshape(-1), spread, ROUGH)
        index = _first(terms, log_p, n * log_law(law).reshape(log_p.shape))

        def at(move: int, log_p: np.ndarray = log_p, index: np.ndarray = index):
            place = np.clip(index + move, 0, len(log_p) - 1)
            return np.take_along_axis(log_p, place[None], axis=0)[0]

        left, best, right = at(-1), at(0), at(1)
    return np.exp(best)


def _first(terms: Terms, log_p: np.ndarray, power: np.ndarray) -> np.ndarray:
    """The number of the place, of rising (C, E), where `crossing` stops."""
    s, p = terms.shift, np.exp(log_p)
    size = np.real(power) + p * terms.constant - 2 * log_p
    size = np.where(np.isnan(size), np.inf, size)
    stop = np.diff(size, axis=0) > 0
    stop |= size[:-1] + 2 * log_p[:-1] < _NOTHING
    stop |= np.abs(np.imag(power[1:])) > _LARGEST_PHASE
    # On the path of steepest descent e^{-p g B} grows.
    x = larger_saddle(log_p[1:], s)
    stop |= log_p[1:] + terms.log_g - s * x - 0.5 * s * s > _LOG_OPPOSITE
    return np.where(stop.any(axis=0), np.argmax(stop, axis=0), len(size) - 1)

"""Where the contours of `numerics.skewed_sums` start; NumPy only."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.skewed_terms import (
    FINE,
    ROUGH,
    Law,
    Terms,
    ends_of,
    gauss,
    larger_saddle,
    law_on_axis,
    log_last,
    log_law,
)

# Places where a contour may start, in logarithms: found in rounds, or so far apart.
_ROUNDS, _STEP = (48, 12, 9), 0.2
# Part of the axis is all that counts where the rest is so many nats down.
_NOTHING = -200.0
# Up to here K^n turns along the axis; further on it is the ray that follows it.
_LARGEST_PHASE = 6.0
# Largest log of p g B at the larger saddle.
_LOG_OPPOSITE = -0.5


class Axis(NamedTuple):
    """The law of A, or -A, on the axis: what all sums of one shift begin with.

    Attributes:
      log_p: (C,) rising, where a ray may start.
      log_k: (C,) ``log K`` there.
      x: (J,) larger saddles of the nodes of the jumps.
      weight: (J,) of dx.
      law: of (J, 1).
    """

    log_p: np.ndarray
    log_k: np.ndarray
    x: np.ndarray
    weight: np.ndarray
    law: Law


@functools.lru_cache(8)
def axis_of(shift: float, rising: bool, finer: bool) -> Axis:
    """Rays start where panels of the nodes do, or at p too small for a jump."""
    one = Terms(1.0, np.zeros(1), shift, None, rising, 0.0)
    low = -math.log(1e3) - 12.0 - 0.5 * math.log(math.expm1(shift * shift))
    if not rising:
        log_p = np.arange(low, low + 102.0, _STEP)
        log_k = log_law(law_on_axis(np.exp(log_p), one, ROUGH))[:, 0]
        none, no_law = np.zeros(0), np.zeros((0, 1))
        return Axis(log_p, log_k, none, none, Law(no_law, no_law, no_law, no_law))
    start = float(larger_saddle(np.array(log_last(shift) - 0.02), shift))
    end = max(start + 1, ends_of(shift, None)[1])
    panels = (24 if finer else 16) * math.ceil(1 + shift)
    x, weight = (a.copy() for a in gauss(10, panels))
    x, weight = start + (end - start) * x, (end - start) * weight
    law = law_on_axis(np.exp(place_of(x, shift)), one, FINE)
    starts = place_of(np.linspace(end, start, panels + 1), shift)
    below = np.arange(min(low, starts[0] - 1.0), starts[0] - 0.5 * _STEP, _STEP)
    log_p = np.concatenate([below, starts])
    log_k = log_law(law_on_axis(np.exp(log_p), one, ROUGH))[:, 0]
    return Axis(log_p, log_k, x, weight, law)


def place_of(x: np.ndarray, s: float) -> np.ndarray:
    """Where x is the larger saddle."""
    return np.log(x / s) - s * x + 0.5 * s * s


def crossing(terms: Terms, finer: bool) -> np.ndarray:
    """The first minimum of ``|K(p)^n e^{pk}| / p²`` on the axis.

    Or where that is so small that the rest does not count, or K^n begins to oscillate.
    """
    s, n = terms.shift, terms.count
    if terms.log_g is None:
        axis = axis_of(s, terms.rising, finer)
        power = n * axis.log_k[:, None]
        return np.exp(axis.log_p[_first(terms, axis.log_p[:, None], power)])
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
    if terms.rising:
        stop |= size[:-1] + 2 * log_p[:-1] < _NOTHING
        stop |= np.abs(np.imag(power[1:])) > _LARGEST_PHASE
        if terms.log_g is not None:
            # On the path of steepest descent e^{-p g B} grows.
            x = larger_saddle(log_p[1:], s)
            stop |= log_p[1:] + terms.log_g - s * x - 0.5 * s * s > _LOG_OPPOSITE
    return np.where(stop.any(axis=0), np.argmax(stop, axis=0), len(size) - 1)


def log_sizes(terms: Terms) -> np.ndarray:
    """Logarithms above those of ``E[T_+]`` of sums of -A: Chernoff's bound."""
    assert terms.log_g is None and not terms.rising
    axis = axis_of(terms.shift, terms.rising, finer=False)
    log_p = axis.log_p[:, None]
    size = terms.count * np.real(axis.log_k)[:, None] + np.exp(log_p) * terms.constant
    # (T)_+ is at most e^{p T - 1} / p.
    return np.min(np.where(np.isfinite(size), size - log_p, np.inf), axis=0) - 1

"""Sums of an epoch's antipodal terms by convolutions of what is positive.

``t H_g = E(sum (A - g B) - (g - 1)(t - j))_+``, where one term is ``A - g B = c sinh(s
w)`` with a normal w: distributions are held over w, and added up by doubling. Nothing
cancels, so that tails far out are as right as others, 1e-10 and better of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.interpolate import make_interp_spline

# Down to e^-140 of one term's density: e^-115 left 5e-7 out of tails of e^-87.
_FAR = math.sqrt(2 * 140.0)
_X, _W = np.polynomial.legendre.leggauss(12)


class _Density:
    """Logarithm of a density (or tail) over w, -inf beyond ``[low, high]``."""

    def __init__(self, function: Callable, low: float, high: float):
        self.function, self.low, self.high = function, low, high

    def __call__(self, w: np.ndarray) -> np.ndarray:
        inside = (w >= self.low) & (w <= self.high)
        row = self.function(np.clip(w, self.low, self.high))
        return np.where(inside, row, -np.inf)


def _table(function: Callable, low: float, high: float, nodes: int) -> _Density:
    w = np.linspace(low, high, nodes)
    row = np.array([function(v) for v in w])
    at = np.flatnonzero(np.isfinite(row))
    w, row = w[at[0] : at[-1] + 1], row[at[0] : at[-1] + 1]
    return _Density(make_interp_spline(w, row, 7), w[0], w[-1])


def _panels(low: float, high: float, width: float) -> tuple[np.ndarray, np.ndarray]:
    edges = np.linspace(low, high, max(math.ceil((high - low) / width), 1) + 1)
    half = 0.5 * np.diff(edges)[:, None]
    return (edges[:-1, None] + half * (_X + 1)).ravel(), np.log(half * _W).ravel()


def _log_cosh(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, -x) - math.log(2)


def _sinh(x: np.ndarray) -> np.ndarray:
    return np.sinh(np.clip(x, -600, 600))


def _added(
    one: _Density, other: _Density, v: float, shift: float, width: float
) -> float:
    """``log int one(x) other(V - x) dx`` at ``V = sinh(shift v)``: the larger first."""
    total = _sinh(shift * v)
    middle, sums = np.arcsinh(total / 2) / shift, [-np.inf]
    for first, second in ((one, other), (other, one)):
        low = first.low if total >= 0 else max(first.low, middle)
        high = min(first.high, middle) if total >= 0 else first.high
        if low < high:
            w, log_weight = _panels(low, high, width)
            rest = np.arcsinh(total - _sinh(shift * w)) / shift
            stretch = math.log(shift) + _log_cosh(shift * w)
            sums += list(first(w) + second(rest) + log_weight + stretch)
    return float(np.logaddexp.reduce(sums))


def log_antipodal(
    steps: int, taken: int, shift: float, epsilon: float, fineness: float = 1.0
) -> float:
    """``log H_g(P_s || P_-s)`` of so many of an epoch's steps; 1 s."""
    s, middle, width = shift, epsilon / (2 * shift), 0.3 / fineness
    nodes = int(500 * fineness)

    def density(w: np.ndarray) -> np.ndarray:
        normal = -0.5 * (w + middle) ** 2 - 0.5 * math.log(2 * math.pi)
        return normal - math.log(s) - _log_cosh(s * w)

    def tail(v: float) -> float:
        """``log E(sinh(s w) - sinh(s v))_+``, whose difference is a product."""
        low = max(v, -middle - _FAR - 4)
        w, log_weight = _panels(low, max(low, s - middle) + 16, 0.25 / max(1, s) ** 0.5)
        half = 0.5 * s * (w - v)
        rise = half + np.log(-np.expm1(-2 * half)) + _log_cosh(0.5 * s * (w + v))
        normal = -0.5 * (w + middle) ** 2 - 0.5 * math.log(2 * math.pi)
        return float(np.logaddexp.reduce(rise + normal + log_weight))

    def both(one: _Density, other: _Density, count: int) -> _Density:
        far, many = _FAR / np.sqrt(np.arange(1, count + 1)), np.arange(1, count + 1)
        low = -np.max(
            many * _sinh(s * (middle + far)) + many[::-1] * np.sinh(s * middle)
        )
        high = np.max(many * _sinh(s * (far - middle)))
        low, high = np.arcsinh(low) / s, np.arcsinh(high) / s
        return _table(lambda v: _added(one, other, v, s, width), low, high, nodes)

    power, held = _Density(density, -middle - _FAR, -middle + _FAR), 1
    total, count, left = None, 0, taken - 1
    while left:
        if left % 2:
            count += held
            total = power if total is None else both(total, power, count)
        left //= 2
        if left:
            held *= 2
            power = both(power, power, held)
    scale = math.log(2) + 0.5 * epsilon - 0.5 * s * s
    idle = np.arcsinh(math.expm1(epsilon) * (steps - taken) / math.exp(scale)) / s
    if total is None:
        return scale + tail(idle) - math.log(steps)
    gain = _table(tail, -middle - 3 * _FAR - 40 / s, _FAR - middle, 3000)
    return scale + _added(total, gain, idle, s, width) - math.log(steps)

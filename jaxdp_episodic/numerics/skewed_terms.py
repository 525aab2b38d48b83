"""The law of one lognormal term, or of two, along the real axis; NumPy only.

See `numerics.skewed_sums`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.special import log_normal_tail

SQRT_2PI = math.sqrt(2 * math.pi)
# Deviations above s where nothing is left.
EDGE = 13.0


class Terms(NamedTuple):
    """What is added up; arrays (E,).

    Attributes:
      count: n, how many terms.
      constant: k.
      shift: s > 0.
      log_g: log of g where ``U = A - g B``; None where it is A or -A.
      rising: whether A counts positive.
      idle: constant that goes along with the B in the second result.
    """

    count: np.ndarray
    constant: np.ndarray
    shift: np.ndarray
    log_g: np.ndarray | None
    rising: bool
    idle: np.ndarray


def log_last(s: np.ndarray) -> np.ndarray:
    """Log of the p at which the two saddles of ``p A - x²/2`` meet."""
    return 0.5 * s * s - 1 - 2 * np.log(s)


def larger_saddle(log_p: np.ndarray, s: np.ndarray) -> np.ndarray:
    """The x >= 1/s with ``p s A(x) = x``, for p up to `log_last`."""
    # y = s x solves log y - y = r
    r = np.minimum(log_p - 0.5 * s * s + 2 * np.log(s), -1.0)
    d = np.sqrt(2 * (-1 - r))
    y = np.where(r < -6, -r + np.log(np.maximum(-r, 1.1)), 1 + d + d * d / 3)
    for _ in range(8):
        y = np.maximum(y - (np.log(y) - y - r) / np.minimum(1 / y - 1, -1e-12), 1.0)
    return y / s


# On the upper side of the axis.


@functools.lru_cache
def gauss(nodes: int, panels: int) -> tuple[np.ndarray, np.ndarray]:
    """Composite Gauss–Legendre rule on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    places = (np.arange(panels)[:, None] + 0.5 * (x + 1)) / panels
    return places.reshape(-1), np.tile(0.5 * w / panels, panels)


ROUGH, FINE = (gauss(24, 4), gauss(12, 1)), (gauss(24, 5), gauss(40, 1))


class Law(NamedTuple):
    """K, ``K - 1``, ``E[B e^{pU}]`` and ``E[B² e^{pU}]``; complex."""

    whole: np.ndarray
    excess: np.ndarray
    first: np.ndarray
    second: np.ndarray


def _steepest(x: np.ndarray, s: np.ndarray, rule: tuple) -> tuple[np.ndarray, ...]:
    """Nodes from the larger saddle x on: v, dv with weights and the real exponent.

    On ``v = x + (zeta + i y)/s`` the imaginary part is 0 where ``e^zeta sin(y)/y = 1 +
    zeta/(s x)``.
    """
    y, w = (a[:, *(None,) * x.ndim] * math.pi for a in rule)
    product, log_sinc = s * x, np.log(np.sin(y) / y)
    zeta = 0.5 - log_sinc + np.log1p((2 - log_sinc) / product)
    for _ in range(8):
        slope = np.maximum(1 - 1 / (product + zeta), 1e-3)
        zeta = zeta - (zeta + log_sinc - np.log1p(zeta / product)) / slope
    slope = np.maximum(1 - 1 / (product + zeta), 1e-9)
    dv = ((1 / y - 1 / np.tan(y)) / slope + 1j) * w / s
    exponent = (x / s) * np.exp(zeta) * np.cos(y)
    exponent = exponent - 0.5 * ((x + zeta / s) ** 2 - (y / s) ** 2)
    return x + (zeta + 1j * y) / s, dv, exponent


def law_on_axis(p: np.ndarray, terms: Terms, rules: tuple) -> Law:
    """At real p > 0, (M, E), on the upper side of the axis."""
    s = terms.shift
    jumps = terms.rising
    end = 10.0 + 0 * p
    if jumps:
        end = larger_saddle(np.log(p), s)
    far = end >= EDGE + s
    end = np.minimum(end, EDGE + s)
    place, weight = (a[:, None, None] for a in rules[0])
    v = -10.0 + (end + 10.0) * place
    normal = (end + 10.0) * weight * np.exp(-0.5 * v * v) / SQRT_2PI
    exponent = np.exp(s * v - 0.5 * s * s) * (p if jumps else -p)
    opposite = 0.0
    if terms.log_g is not None:
        opposite = np.exp(-s * v - 0.5 * s * s)
        exponent = exponent - p * np.exp(terms.log_g) * opposite
    exponent = np.minimum(exponent, 700.0)
    excess = np.sum(np.expm1(exponent) * normal, axis=0)
    excess = excess - np.exp(log_normal_tail(end))
    grown = np.exp(exponent) * normal
    whole = np.sum(grown, axis=0)
    first, second = (np.sum(grown * opposite**k, axis=0) for k in (1, 2))
    if not jumps:
        return Law(whole, excess, first, second)
    v, dv, exponent = _steepest(end, s, rules[1])
    grown = np.where(far, 0.0, np.exp(np.clip(exponent, -745, 700)) * dv / SQRT_2PI)
    if terms.log_g is not None:
        opposite = np.exp(-s * v - 0.5 * s * s)
        grown = grown * np.exp(-p * np.exp(terms.log_g) * opposite)
    return Law(
        whole + np.sum(grown, axis=0),
        excess + np.sum(grown, axis=0),
        first + np.sum(grown * opposite, axis=0),
        second + np.sum(grown * opposite**2, axis=0),
    )


def log_law(law: Law) -> np.ndarray:
    """``log K`` without cancellation near 1, or near 0."""
    near = np.abs(law.excess) < 0.3
    small = np.where(near, law.excess, 0.0)
    return np.where(near, np.log1p(small), np.log(law.whole + 0j))

"""Transforms ``E e^{pU}`` of ``U = A - g B``, lognormal terms, along the real axis.

See `numerics.skewed_sums`.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import Pair, exp_complex
from jaxdp_episodic.accountant.numerics.loops import Array, complex_of
from jaxdp_episodic.accountant.numerics.quadrature import (
    chebyshev_shares,
    gauss_legendre,
    in_blocks,
)
from jaxdp_episodic.accountant.numerics.special import log_normal_tail

SQRT_2PI = math.sqrt(2 * math.pi)
# Truncation of the integral over x ~ N(0, 1): masses below -10 and above s + 13 are
# less than 1e-23 and e^-84.
_LOWEST = -10.0
_HIGHEST = 13.0
# Nats by which a jump is rarer than one to `_HIGHEST` where it is dropped.
_DROPPED_JUMP = 20.0
# Number of terms above which K - 1 is integrated, as n times the rounding of K counts.
_MANY_TERMS = 1e4
# Gauss-Legendre nodes of a panel along the axis.
_PANEL_NODES = 16
# Elements of an array that fits the cache.
_CACHED = 2**16
# p g B above which e^{p A - p g B} underflows, provided that p A is below the second.
_UNDERFLOWS = 800.0
_MODERATE = 50.0


class Terms(NamedTuple):
    """The sum."""

    count: float  # n, number of terms
    shift: float  # s > 0
    idle: float  # number of terms in which A and B are 1: the constant 1 - g

    def constant(self, log_g: np.ndarray) -> np.ndarray:
        """``k = (1 - g) idle``."""
        return -np.expm1(log_g) * self.idle

    @property
    def are_many(self) -> bool:
        """Whether ``K - 1`` needs all its digits."""
        return self.count > _MANY_TERMS


def log_last(s: Array) -> Array:
    """Log of the p at which the two saddles of ``p A - x²/2`` meet."""
    return 0.5 * s * s - 1 - 2 * np.log(s)


def larger_saddle(log_p: Array, s: Array) -> Array:
    """The x >= 1/s with ``p s A(x) = x``, for p up to `log_last`."""
    least = np.maximum(0.5 * s * s - log_p - 2 * np.log(s), 1.0)
    y = _near_root(least)  # of y = s x
    for _ in range(2):
        slope = np.maximum(1 - 1 / y, 1e-12)
        y = np.maximum(y - _step(y - np.log(y) - least, slope, y), 1.0)
    return y / s


def _near_root(least: np.ndarray) -> np.ndarray:
    """The y >= 1 with ``y - log y`` of at least 1, within 0.5%."""
    d, log = np.sqrt(2 * (least - 1)), np.log(least)
    near = 1 + d * (1 + d * (1 / 3 + d * (1 / 36 - d / 270)))
    return np.where(least < 3.5, near, least + log + log / least)


def _step(value: np.ndarray, slope: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Halley's, of a second derivative of ``1/y²``: two steps have all digits."""
    step = value / slope
    return step / (1 - 0.5 * step / (slope * y * y))


def place_of(x: np.ndarray, s: Array) -> np.ndarray:
    """The ``log p`` of which x is the larger saddle."""
    return np.log(x / s) - s * x + 0.5 * s * s


@functools.lru_cache
def gauss(nodes: int, panels: int) -> tuple[np.ndarray, np.ndarray]:
    """Composite Gauss–Legendre rule on [0, 1]."""
    x, w = gauss_legendre(nodes)
    points = (np.arange(panels)[:, None] + x) / panels
    return points.reshape(-1), np.tile(w / panels, panels)


@functools.lru_cache
def at_gauss(known: int, nodes: int, panels: int = 1) -> np.ndarray:
    """(nodes panels, known): values at nodes of `gauss` from those at Chebyshev points.

    These are on [0, 1] as well.
    """
    return chebyshev_shares(known, 2 * gauss(nodes, panels)[0] - 1)


class Transforms(NamedTuple):
    """K, ``K - 1``, ``E[B e^{pU}]`` and ``E[B² e^{pU}]``; complex."""

    whole: np.ndarray
    excess: np.ndarray
    first: np.ndarray
    second: np.ndarray


def ends_of(s: float, tilt: np.ndarray) -> tuple[float, float]:
    """Truncation points of the normal variable, wide enough for all tilts."""
    return _LOWEST - float(tilt.max()), _HIGHEST + s - float(tilt.min())


def too_rare(s: Array, tilt: np.ndarray | None = None) -> Array:
    """The larger saddle x beyond which a jump there is negligible.

    The integrand at it is ``e^{x/s - x²/2}`` up to what g takes: x solves ``x²/2 - x/s
    = (s + _HIGHEST)²/2 + _DROPPED_JUMP``.
    """
    peak, square = 1 / s, (s + _HIGHEST) ** 2 + 2 * _DROPPED_JUMP
    edge = peak + np.sqrt(peak * peak + square)
    return edge if tilt is None else edge - float(tilt.min())


def _contracted(
    grown: np.ndarray, less: np.ndarray | None, opposite: np.ndarray, share: np.ndarray
) -> Transforms:
    """Sums over nodes under every tilt d, (M, E) each.

    ``grown`` is mass times ``e^{pU}``, ``less`` mass times ``e^{pU} - 1``, (M, N), or
    None where K may stand for ``K - 1``; ``opposite`` is B, (N,) or (M, N); ``share``
    is ``e^{-d v - d²/2}``, (N, E) or (M, N, E).
    """
    number, (m, n) = 3 if less is None else 4, grown.shape
    rows = np.empty((number, m, n), opposite.dtype)
    rows[0] = grown
    for before, row in itertools.pairwise(rows[:3]):
        np.multiply(before, opposite, out=row)
    if less is not None:
        rows[3] = less
    if share.ndim == 2:  # one product for all
        found = in_blocks(rows.reshape(-1, n), share).reshape(number, m, -1)
    else:
        found = np.moveaxis(np.moveaxis(rows, 0, 1) @ share, 1, 0)
    whole, first, second = found[:3]
    return Transforms(whole, whole if less is None else found[3], first, second)


def steepest(x: np.ndarray, s: Array, rule: tuple) -> tuple[Pair, Pair, np.ndarray]:
    """Path of steepest descent of ``p A - v²/2`` from its larger saddle x.

    On ``v = x + (zeta + i y)/s`` the exponent is real where ``e^zeta sin(y)/y = 1 +
    zeta/(s x)``, y from 0 to pi; one s, or one for each x.

    Returns:
      Nodes v, dv times the weights of the rule, and the exponent.
    """
    y, w = (a * math.pi for a in rule)
    x, s = x[:, None], s[:, None] if np.ndim(s) else s
    product, log_sinc = s * x, np.log(np.sin(y) / y)

    zeta = _near_root(np.maximum(product - np.log(product) - log_sinc, 1.0)) - product
    for _ in range(2):
        slope = np.maximum(1 - 1 / (product + zeta), 1e-3)
        value = zeta + log_sinc - np.log1p(zeta / product)
        zeta = zeta - _step(value, slope, product + zeta)
    slope = np.maximum(1 - 1 / (product + zeta), 1e-9)
    dv = (1 / y - 1 / np.tan(y)) / slope * w / s, w / s
    right = x + zeta / s
    exponent = right / s * (y / np.tan(y)) - 0.5 * (right * right - (y / s) ** 2)
    return (right, y / s), dv, exponent


def transforms_on_axis(
    p: np.ndarray,
    log_g: np.ndarray,
    terms: Terms,
    tilt: np.ndarray,
    *,
    coarse: bool = False,
) -> Transforms:
    """K at real p > 0, (M,), on the upper side of the cut; under tilts d, (E,).

    Under a tilt d, x is ``x - d`` in the mean, which is K at another g: log g is by
    ``2 s d`` larger, log p by ``s d`` smaller, and B has the factor ``e^{s d}``.

    Below the larger saddle the integral runs along the real axis, beyond it along the
    path of steepest descent. ``coarse``: with fewer nodes, for choosing contours.
    """
    s = terms.shift
    saddle = larger_saddle(np.log(p), s)
    panels = math.ceil(4 + (1 if coarse else 8) * s)  # e^{-pgB} falls within 1/s
    low, edge = ends_of(s, tilt)
    end = np.minimum(saddle, edge)[:, None]
    against = (p * np.exp(log_g))[:, None]

    def part(
        v: np.ndarray, weight: np.ndarray, rows: slice = slice(None)
    ) -> Transforms:
        normal = weight * np.exp(-0.5 * v * v) / SQRT_2PI
        sizes = np.exp(s * v - 0.5 * s * s)
        opposite = math.exp(-s * s) / sizes
        exponent = p[rows, None] * sizes - against[rows] * opposite
        np.minimum(exponent, 700.0, out=exponent)
        less = np.expm1(exponent) * normal if terms.are_many else None
        share = np.exp(-v[..., None] * tilt - 0.5 * tilt * tilt)
        np.exp(exponent, out=exponent)
        exponent *= normal
        return _contracted(exponent, less, opposite, share)

    # All rows share the whole panels; the last part up to a row's own saddle differs.
    width = (edge - low) / panels
    place, weight = gauss(_PANEL_NODES, panels)
    whole = np.nan_to_num(np.floor((end - low) / width))
    nodes, weight = low + (edge - low) * place, (edge - low) * weight
    number = np.arange(len(nodes)) // _PANEL_NODES
    found, each = [], max(_CACHED // len(nodes), 1)
    for begin in range(0, len(p), each):
        rows = slice(begin, begin + each)
        # Nodes at which e^{pU} underflows for all rows are left out, but not of K - 1.
        gone = s * (nodes + 0.5 * s) < np.log(against[rows].min() / _UNDERFLOWS)
        gone &= s * (nodes - 0.5 * s) < np.log(_MODERATE / p[rows].max())
        first = 0 if terms.are_many else int(np.sum(gone))
        some = slice(first, int(whole[rows].max()) * _PANEL_NODES)
        if some.start < some.stop:
            is_left = number[some] < whole[rows]
            found.append(part(nodes[some], weight[some] * is_left, rows))
        else:
            found.append(Transforms(*np.zeros((4, len(p[rows]), len(tilt)))))
    sums = [Transforms(*(np.concatenate(rows) for rows in zip(*found, strict=True)))]
    place, weight = gauss(_PANEL_NODES, 1)
    rest = end - (low + whole * width)
    sums.append(part(end - rest * (1 - place), rest * weight))
    *both, exponent = steepest(saddle, s, gauss(12 if coarse else 32, 1))
    v, dv = (complex_of(np, *np.broadcast_arrays(*pair)) for pair in both)
    exponent = np.exp(np.clip(exponent, -745, 700))
    is_rare = (saddle >= too_rare(s, tilt))[:, None]
    grown = np.where(is_rare, 0.0, exponent * dv / SQRT_2PI)
    opposite = math.exp(-0.5 * s * s) * exp_complex(-s * v)
    grown = grown * exp_complex(-against * opposite)
    share = np.exp(-np.real(v)[..., None] * tilt - 0.5 * tilt * tilt)
    height = np.imag(v[0])  # the same for all rows
    share = share * exp_complex(-1j * height[:, None] * tilt)
    sums.append(_contracted(grown, None, opposite, share))
    transforms = Transforms(*(a + b + c for a, b, c in zip(*sums, strict=True)))
    beyond = np.exp(log_normal_tail(end + tilt)) if terms.are_many else 1.0
    return transforms._replace(excess=transforms.excess - beyond)

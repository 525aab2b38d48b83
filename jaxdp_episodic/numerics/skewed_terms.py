"""The law of one lognormal term, or of two, along the real axis.

See `numerics.skewed_sums`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.numerics.loops import Array, complex_of, fori_loop, namespace
from jaxdp_episodic.numerics.special import log_normal_tail

SQRT_2PI = math.sqrt(2 * math.pi)
# Deviations below 0, and above s, where nothing is left.
_LOWEST, _HIGHEST = -10.0, 13.0
# Steps of Newton's method, which converges quadratically, so short that it has ended.
_FOUND = 1e-9


class Terms(NamedTuple):
    """What is added up, at places (E,).

    Attributes:
      count: n, how many terms.
      constant: (E,) k.
      shift: s > 0.
      log_g: (E,) log of g.
      idle: constant that goes along with the B in the second result.
    """

    count: float
    constant: np.ndarray
    shift: float
    log_g: np.ndarray
    idle: float


def log_last(s: Array) -> Array:
    """Log of the p at which the two saddles of ``p A - x²/2`` meet."""
    return 0.5 * s * s - 1 - 2 * namespace(s).log(s)


def larger_saddle(log_p: Array, s: Array) -> Array:
    """The x >= 1/s with ``p s A(x) = x``, for p up to `log_last`."""
    xp = namespace(log_p, s)
    # y = s x solves log y - y = r
    r = xp.minimum(log_p - 0.5 * s * s + 2 * xp.log(s), -1.0)
    d = xp.sqrt(2 * (-1 - r))
    y = xp.where(r < -6, -r + xp.log(xp.maximum(-r, 1.1)), 1 + d + d * d / 3)

    def improve(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        y, _ = state
        step = (xp.log(y) - y - r) / xp.minimum(1 / y - 1, -1e-12)
        return xp.maximum(y - step, 1.0), step

    return _settled(xp, improve, y) / s


def _settled(xp: Any, improve: Callable[..., Any], start: Array) -> Array:
    """Eight steps of Newton's method; NumPy ends where they are short."""

    def ended(state: tuple[Array, Array]) -> bool:
        return bool(np.all(np.abs(state[1]) < _FOUND))

    return fori_loop(xp, 0, 8, improve, (start, start), ended)[0]


def place_of(x: np.ndarray, s: float) -> np.ndarray:
    """The ``log p`` of which x is the larger saddle."""
    return np.log(x / s) - s * x + 0.5 * s * s


# On the upper side of the axis.


@functools.lru_cache
def gauss(nodes: int, panels: int) -> tuple[np.ndarray, np.ndarray]:
    """Composite Gauss–Legendre rule on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    places = (np.arange(panels)[:, None] + 0.5 * (x + 1)) / panels
    return places.reshape(-1), np.tile(0.5 * w / panels, panels)


ROUGH = gauss(24, 4), gauss(12, 1)


def fine_rules(s: float) -> tuple:
    """Rules of `law_on_axis`: e^{-pgB} vanishes within 1/s."""
    return gauss(24, math.ceil(1.5 + 3.5 * s)), gauss(32, 1)


class Law(NamedTuple):
    """K, ``K - 1``, ``E[B e^{pU}]`` and ``E[B² e^{pU}]``; complex."""

    whole: np.ndarray
    excess: np.ndarray
    first: np.ndarray
    second: np.ndarray


def ends_of(s: float, move: np.ndarray | None) -> tuple[float, float]:
    """Where the normal variable's range ends, for all moves."""
    if move is None:
        return _LOWEST, _HIGHEST + s
    return _LOWEST - float(move.max()), _HIGHEST + s - float(move.min())


def contracted(
    grown: np.ndarray,
    excess: np.ndarray,
    opposite: np.ndarray,
    v: np.ndarray,
    move: np.ndarray | None,
) -> Law:
    """Sums over nodes, the last axis, each one with the weights of all moves.

    Args:
      grown: (M, N) masses times ``e^{pU}``.
      excess: (M, N) the same, less the masses.
      opposite: B, (N,) or (M, N).
      v: (N,) or (M, N) places.
      move: (E,) distances by which the normal variable is moved down, or None.

    Returns:
      (M, E) each, or (M, 1) without a move.
    """
    if move is None:
        whole, excess = (np.sum(a, axis=-1, keepdims=True) for a in (grown, excess))
        first = grown * opposite
        second = first * opposite
        first, second = (a.sum(axis=-1, keepdims=True) for a in (first, second))
        return Law(whole, excess, first, second)
    share = np.exp(-np.multiply.outer(np.real(v), move) - 0.5 * move * move)
    if np.iscomplexobj(v):
        height = np.imag(v if v.ndim == 1 else v[0])  # that of all
        share = share * np.exp(-1j * np.multiply.outer(height, move))
    first = grown * opposite
    rows = grown, excess, first, first * opposite
    if v.ndim == 1:
        return Law(*(row @ share for row in rows))
    return Law(*np.moveaxis(np.stack(rows, axis=1) @ share, 1, 0))


def steepest(x: Array, s: Array, rule: tuple) -> tuple[Array, ...]:
    """Nodes from the larger saddle x on: v, dv with weights and the real exponent.

    On ``v = x + (zeta + i y)/s`` the imaginary part is 0 where ``e^zeta sin(y)/y = 1 +
    zeta/(s x)``; one s, or one for each x.
    """
    xp = namespace(x, s)
    y, w = (a * math.pi for a in rule)
    x, s = x[:, None], s[:, None] if np.ndim(s) else s
    product, log_sinc = s * x, np.log(np.sin(y) / y)

    def improve(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        zeta, _ = state
        slope = xp.maximum(1 - 1 / (product + zeta), 1e-3)
        step = (zeta + log_sinc - xp.log1p(zeta / product)) / slope
        return zeta - step, step

    start = 0.5 - log_sinc + xp.log1p((2 - log_sinc) / product)
    zeta = _settled(xp, improve, start)
    slope = xp.maximum(1 - 1 / (product + zeta), 1e-9)
    dv = (1 / y - 1 / np.tan(y)) / slope * w / s, w / s
    exponent = (x / s) * xp.exp(zeta) * np.cos(y)
    exponent = exponent - 0.5 * ((x + zeta / s) ** 2 - (y / s) ** 2)
    v, dv = (
        complex_of(xp, *xp.broadcast_arrays(*pair))
        for pair in ((x + zeta / s, y / s), dv)
    )
    return v, dv, exponent


def law_on_axis(
    p: np.ndarray, terms: Terms, rules: tuple, move: np.ndarray | None = None
) -> Law:
    """At real p > 0, (M,), on the upper side of the axis; see `contracted`.

    ``log_g`` of the terms is one number, or one for each p.
    """
    s = terms.shift
    end = larger_saddle(np.log(p), s)
    low, edge = ends_of(s, move)
    far = end >= edge
    end = np.minimum(end, edge)
    place, weight = rules[0]
    v = low + (end - low)[:, None] * place
    normal = (end - low)[:, None] * weight * np.exp(-0.5 * v * v) / SQRT_2PI
    exponent = np.exp(s * v - 0.5 * s * s) * p[:, None]
    opposite = np.exp(-s * v - 0.5 * s * s)
    against = (p * np.exp(terms.log_g))[:, None]
    exponent = np.minimum(exponent - against * opposite, 700.0)
    grown = np.exp(exponent) * normal
    law = contracted(grown, np.expm1(exponent) * normal, opposite, v, move)
    beyond = np.add.outer(end, 0.0 if move is None else move).reshape(len(p), -1)
    law = law._replace(excess=law.excess - np.exp(log_normal_tail(beyond)))
    v, dv, exponent = steepest(end, s, rules[1])
    exponent = np.exp(np.clip(exponent, -745, 700))
    grown = np.where(far[:, None], 0.0, exponent * dv / SQRT_2PI)
    opposite = np.exp(-s * v - 0.5 * s * s)
    grown = grown * np.exp(-against * opposite)
    jump = contracted(grown, grown, opposite, v, move)
    return Law(*(a + b for a, b in zip(law, jump, strict=True)))


def log_law(law: Law) -> np.ndarray:
    """``log K`` without cancellation near 1, or near 0."""
    near = np.abs(law.excess) < 0.3
    small = np.where(near, law.excess, 0.0)
    with np.errstate(divide="ignore"):
        return np.where(near, np.log1p(small), np.log(law.whole + 0j))

"""Transforms ``E e^{pU}`` of ``U = A - g B``, lognormal terms, along the real axis.

See `numerics.skewed_sums`.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    Pair,
    exp_complex,
    log1p_complex,
    log_complex,
)
from jaxdp_episodic.accountant.numerics.loops import Array, complex_of
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks
from jaxdp_episodic.accountant.numerics.special import log_normal_tail

SQRT_2PI = math.sqrt(2 * math.pi)
# Deviations below 0, and above s, where nothing is left; and of so many nats less are
# jumps too rare to count.
_LOWEST, _HIGHEST, _RARER = -10.0, 13.0, 20.0
# From so many terms on rounding of K near 1 would count.
_MANY = 1e4


class Terms(NamedTuple):
    """What is added up.

    Attributes:
      count: n, how many terms.
      shift: s > 0.
      idle: how many bins have none; of each is 1 in the sum of the A and of the B.
    """

    count: float
    shift: float
    idle: float

    def constant(self, log_g: np.ndarray) -> np.ndarray:
        """What there is besides the terms, k."""
        return -np.expm1(log_g) * self.idle

    @property
    def are_many(self) -> bool:
        """Whether ``K - 1`` needs all its digits."""
        return self.count > _MANY


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
    """Halley's, of a second derivative of ``1/y²``: two have all digits."""
    step = value / slope
    return step / (1 - 0.5 * step / (slope * y * y))


def place_of(x: np.ndarray, s: Array) -> np.ndarray:
    """The ``log p`` of which x is the larger saddle."""
    return np.log(x / s) - s * x + 0.5 * s * s


# On the upper side of the axis.


@functools.lru_cache
def gauss(nodes: int, panels: int) -> tuple[np.ndarray, np.ndarray]:
    """Composite Gauss–Legendre rule on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    places = (np.arange(panels)[:, None] + 0.5 * (x + 1)) / panels
    return places.reshape(-1), np.tile(0.5 * w / panels, panels)


# Nodes of a panel along the axis, elements that fit the cache, and from what p g B on
# nothing is left where p A is below the last.
_NODES, _AT_ONCE, _GONE, _TAME = 16, 2**16, 800.0, 50.0


def rules(s: float, *, coarse: bool = False) -> tuple:
    """Panels of `transforms_on_axis`, as e^{-pgB} falls within 1/s, and jumps' rule."""
    return math.ceil(4 + (1 if coarse else 8) * s), gauss(12 if coarse else 32, 1)


class Transforms(NamedTuple):
    """K, ``K - 1``, ``E[B e^{pU}]`` and ``E[B² e^{pU}]``; complex."""

    whole: np.ndarray
    excess: np.ndarray
    first: np.ndarray
    second: np.ndarray


def ends_of(s: float, move: np.ndarray) -> tuple[float, float]:
    """Where the normal variable's range ends, for all moves."""
    return _LOWEST - float(move.max()), _HIGHEST + s - float(move.min())


def too_rare(s: Array, move: np.ndarray | None = None) -> Array:
    """The larger saddle at which a jump is `_RARER` than one of many deviations.

    At the larger saddle x the integrand is ``e^{x/s - x²/2}``, less what the place
    takes: of a jump to d it is ``e^{-d²/2}`` at d, and where s d < 1 it grows from
    there on and falls behind 2/s only.
    """
    turn, least = 1 / s, (s + _HIGHEST) ** 2 + 2 * _RARER
    edge = turn + np.sqrt(turn * turn + least)
    return edge if move is None else edge - float(move.min())


def _contracted(
    grown: np.ndarray, less: np.ndarray | None, opposite: np.ndarray, share: np.ndarray
) -> Transforms:
    """Sums over nodes, each one with the shares of all moves, (M, E) each.

    Args:
      grown: (M, N) masses times ``e^{pU}``.
      less: (M, N) the same, less the masses; if None K is there for ``K - 1``.
      opposite: B, (N,) or (M, N).
      share: (N, E) or (M, N, E).
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
    """Nodes from the larger saddle x on: v, dv with weights and the real exponent.

    On ``v = x + (zeta + i y)/s`` the imaginary part is 0 where ``e^zeta sin(y)/y = 1 +
    zeta/(s x)``; one s, or one for each x.
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
    move: np.ndarray,
    *,
    coarse: bool = False,
) -> Transforms:
    """At real p > 0 and g, (M,), on the upper side of the axis; for moves (E,).

    Moved by d, x is ``x - d`` under the mean: log g is by ``2 s d`` larger, log p by
    ``s d`` smaller, and B by the factor ``e^{s d}`` of what it is here.
    """
    s = terms.shift
    saddle = larger_saddle(np.log(p), s)
    panels, of_jumps = rules(s, coarse=coarse)
    low, edge = ends_of(s, move)
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
        share = np.exp(-v[..., None] * move - 0.5 * move * move)
        np.exp(exponent, out=exponent)
        exponent *= normal
        return _contracted(exponent, less, opposite, share)

    # Panels that all share, and of each its last one: so nodes differ in one alone.
    width = (edge - low) / panels
    place, weight = gauss(_NODES, panels)
    whole = np.nan_to_num(np.floor((end - low) / width))
    nodes, weight = low + (edge - low) * place, (edge - low) * weight
    number = np.arange(len(nodes)) // _NODES
    found = []
    each = max(_AT_ONCE // len(nodes), 1)
    for begin in range(0, len(p), each):
        rows = slice(begin, begin + each)
        # From where e^{-pgB} is something for one of these on, or e^{pA} is large, to
        # the last of them: of K - 1 all before is needed, too.
        gone = s * (nodes + 0.5 * s) < np.log(against[rows].min() / _GONE)
        gone &= s * (nodes - 0.5 * s) < np.log(_TAME / p[rows].max())
        first = 0 if terms.are_many else int(np.sum(gone))
        some = slice(first, int(whole[rows].max()) * _NODES)
        if some.start < some.stop:
            is_left = number[some] < whole[rows]
            found.append(part(nodes[some], weight[some] * is_left, rows))
        else:
            found.append(Transforms(*np.zeros((4, len(p[rows]), len(move)))))
    sums = [Transforms(*(np.concatenate(rows) for rows in zip(*found, strict=True)))]
    place, weight = gauss(_NODES, 1)
    rest = end - (low + whole * width)
    sums.append(part(end - rest * (1 - place), rest * weight))
    *both, exponent = steepest(saddle, s, of_jumps)
    v, dv = (complex_of(np, *np.broadcast_arrays(*pair)) for pair in both)
    exponent = np.exp(np.clip(exponent, -745, 700))
    is_rare = (saddle >= too_rare(s, move))[:, None]
    grown = np.where(is_rare, 0.0, exponent * dv / SQRT_2PI)
    opposite = math.exp(-0.5 * s * s) * exp_complex(-s * v)
    grown = grown * exp_complex(-against * opposite)
    share = np.exp(-np.real(v)[..., None] * move - 0.5 * move * move)
    height = np.imag(v[0])  # that of all
    share = share * exp_complex(-1j * height[:, None] * move)
    sums.append(_contracted(grown, None, opposite, share))
    transforms = Transforms(*(a + b + c for a, b, c in zip(*sums, strict=True)))
    beyond = np.exp(log_normal_tail(end + move)) if terms.are_many else 1.0
    return transforms._replace(excess=transforms.excess - beyond)


def log_transform(transforms: Transforms) -> np.ndarray:
    """``log K`` without cancellation near 1, or near 0."""
    near = np.abs(transforms.excess) < 0.3
    small = np.where(near, transforms.excess, 0.0)
    close = log1p_complex(np.real(small), np.imag(small))
    far = log_complex(np.real(transforms.whole), np.imag(transforms.whole))
    return np.where(near, complex_of(np, *close), complex_of(np, *far))

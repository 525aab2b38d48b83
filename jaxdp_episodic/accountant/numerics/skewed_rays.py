"""Transforms of a term ``A - g B`` on rays off the axis; see `numerics.skewed_sums`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    exp_complex,
    exp_in_place,
)
from jaxdp_episodic.accountant.numerics.loops import complex_of
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    SQRT_2PI,
    Terms,
    Transforms,
    ends_of,
    larger_saddle,
    log_last,
    log_transform,
)

# Slope of a ray against the vertical; shifts below which it has none, and of few terms.
_LEAN, _LIGHT, _LIGHT_OF_FEW, _FEW = 0.4, 0.4, 0.25, 5
# Nodes on rays, at least and at most, and of a shift of 1 in between; more for ten
# times as many terms.
_NODES, _OF_SHIFT, _MORE_NODES = (72, 160), 90, 16
# Of so few terms as many at least: with 72 tables of three end at e^-31, with 90 at
# e^-82.
_OF_FEW = 8, 110
# A path bends within this of the shift, at most so fast; where it ends p A has so much
# of half a turn. Bent within twice the shift, and to half a turn, twice as many nodes
# are needed.
_BEND, _SHARPEST, _TURNED = 0.8, 2.5, 0.8
# Nodes of a ray that share a path; nodes of paths that fit the cache.
BLOCK, _AT_ONCE = 8, 2500


class Rays(NamedTuple):
    """Of each contour, (J,): ``start + sinh(u) width direction``.

    Attributes:
      log_g: of the place that p belongs to.
    """

    log_g: np.ndarray
    start: np.ndarray
    width: np.ndarray
    direction: complex

    def at(self, u: np.ndarray) -> np.ndarray:
        """(J, N), at (N,) or (J, N) places."""
        away = np.sinh(u) * self.width[:, None] * self.direction
        return self.start[:, None] + away


def direction_of(terms: Terms) -> complex:
    """Of light tails the ray is vertical: K falls off like a Gaussian's."""
    return 1j + (0.0 if _is_light(terms) else _LEAN)


def _is_light(terms: Terms) -> bool:
    return terms.shift < (_LIGHT_OF_FEW if terms.count <= _FEW else _LIGHT)


def transforms_on_rays(
    p: np.ndarray, log_g: np.ndarray, terms: Terms, move: np.ndarray, fine: float
) -> np.ndarray:
    """``log K``, as it follows along rays, and its derivatives by g over K.

    Args:
      p: (J, N).
      log_g: (J,).
      terms: what is added up.
      move: (E,) see `skewed_terms.transforms_on_axis`.
      fine: how many times as many nodes an integral has as it needs.

    Returns:
      (3, J, N, E) complex.
    """
    least = _OF_FEW[1] if terms.count <= _OF_FEW[0] else _NODES[0]
    nodes = min(max(_OF_SHIFT * terms.shift, least), _NODES[1])
    nodes = round(fine * (nodes + _MORE_NODES * math.log10(terms.count)))
    rows, each = p.reshape(-1, BLOCK), np.repeat(log_g, p.shape[1] // BLOCK)
    v, dv = _paths(rows, each, terms, move, nodes)
    some = max(_AT_ONCE // nodes, 1)
    cuts = [slice(i, i + some) for i in range(0, len(rows), some)]
    parts = [_sums(rows[i], each[i], v[i], dv[i], terms, move) for i in cuts]
    whole, excess, first, second = (
        np.concatenate(part).reshape(*p.shape, -1) for part in zip(*parts, strict=True)
    )
    log_k = log_transform(Transforms(whole, excess, first, second))
    angle = np.imag(log_k)
    turns = np.rint(np.diff(angle, axis=1) / (2 * math.pi))
    angle[:, 1:] -= 2 * math.pi * np.cumsum(turns, axis=1)
    return np.stack([log_k, first / whole, second / whole])


def _paths(
    p: np.ndarray, log_g: np.ndarray, terms: Terms, move: np.ndarray, nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes v, (L, N), of a normal variable and dv: bent where ``e^{pA}`` would grow.

    Far to the right ``p A`` is turned towards the negative axis, at all of a row of p,
    (L, B).
    """
    s = terms.shift
    sizes, angles = np.log(np.abs(p)), np.angle(p)
    smallest, largest = sizes.min(axis=1), sizes.max(axis=1)
    angle = 0.5 * (angles.min(axis=1) + angles.max(axis=1))
    last = log_last(s)
    # Where the ray is vertical, e^{pA} is no larger than at its start.
    growth = largest
    if _is_light(terms):
        growth = np.log(np.maximum(np.real(p).max(axis=1), 1e-300))
    turn = larger_saddle(np.minimum(growth, last), s)
    turn = np.where(growth >= last, (1 - (growth - last)) / s, turn)
    slope = min(_BEND * s, _SHARPEST)
    end = (math.log(60.0) - smallest + 0.5 * s * s) / s
    low, edge = ends_of(s, move)
    high = np.minimum(np.maximum(end, turn + 3 / s), edge)
    # |e^{-p g B}| has vanished.
    fall = np.maximum(np.cos(angles), 0.3)
    gone = (sizes + log_g[:, None] - 0.5 * s * s - np.log(60.0 / fall)) / s
    low = np.maximum(low, np.minimum(gone.min(axis=1), high - 2))
    spacing = (high - low) / (nodes - 1)
    w = low[:, None] + spacing[:, None] * np.arange(nodes)
    bent = 0.5 * (1 + np.tanh(slope * (w - turn[:, None])))
    height = ((_TURNED * math.pi - angle) / s)[:, None]
    rise = 2 * slope * height * bent * (1 - bent)
    return w + 1j * height * bent, spacing[:, None] * (1 + 1j * rise)


def _sums(
    p: np.ndarray,
    log_g: np.ndarray,
    v: np.ndarray,
    dv: np.ndarray,
    terms: Terms,
    move: np.ndarray,
) -> Transforms:
    """The transforms at rows of p, (L, B), by `_paths`: (L, B, E) each."""
    s, size = terms.shift, p.shape[1]
    opposite = math.exp(-0.5 * s * s) * exp_complex(-s * v)
    exponent = math.exp(-s * s) / opposite - np.exp(log_g)[:, None] * opposite
    # At 0, too: the mass of the density.
    p = np.concatenate([p, np.zeros((len(p), 1))], axis=1)[:, :, None]
    grown = exp_complex(p * exponent[:, None] - (0.5 * v * v)[:, None])
    grown *= (dv / SQRT_2PI)[:, None]
    grown, mass = grown[:, :size], grown[:, size:]
    share = -np.real(v)[:, :, None] * move - 0.5 * move * move
    turn = -np.imag(v)[:, :, None] * move
    exp_in_place(share, turn)
    share = complex_of(np, share, turn)
    # Near 1 that mass is taken off, of many term by term, if it is all there.
    first = grown * opposite[:, None]
    less = grown - mass if terms.are_many else mass
    rows = np.concatenate([grown, first, first * opposite[:, None], less], axis=1)
    whole, first, second, less = np.split(
        in_blocks(rows, share), [size, 2 * size, 3 * size], 1
    )
    low, edge = ends_of(s, move)
    complete = (np.real(v[:, 0]) < low + 1.5) & (np.real(v[:, -1]) > edge - s - 3.8)
    excess = less if terms.are_many else whole - less
    excess = np.where(complete[:, None, None], excess, whole - 1)
    return Transforms(whole, excess, first, second)

"""Transforms of a term ``A - g B`` on rays off the axis; see `numerics.skewed_sums`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    exp_complex,
    exp_in_place,
    log_near,
)
from jaxdp_episodic.accountant.numerics.loops import complex_of
from jaxdp_episodic.accountant.numerics.quadrature import chebyshev_shares, in_blocks
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    SQRT_2PI,
    Terms,
    Transforms,
    ends_of,
    larger_saddle,
    log_last,
)

# Real over imaginary part of a ray's direction, where tails are heavy.
_SLOPE = 0.4
# Shifts below which tails count as light and rays are vertical; of few terms another.
_LIGHT = 0.4
_LIGHT_OF_FEW = 0.25
_VERY_FEW_TERMS = 5
# Nodes of the integral of one term: 90 s, within bounds, and for each factor of 10 in
# the number of terms more.
_NODES_PER_SHIFT = 90
_LEAST_NODES = 72
_MOST_NODES = 160
_NODES_PER_DECADE = 16
# Least nodes of few terms: tables of three end at e^-31 with 72, at e^-82 with 90.
_LEAST_NODES_OF_FEW = 110
_FEW_TERMS = 8
# The path of one term rises as tanh(rate w), rate = 0.8 s but at most 2.5, up to where
# arg(p A) is 0.8 pi. At 2 s, and to pi, twice as many nodes are needed.
_RATE_PER_SHIFT = 0.8
_LARGEST_RATE = 2.5
_FINAL_ARGUMENT = 0.8 * math.pi
# Exponents below -60 are negligible.
_NEGLIGIBLE = 60.0
# The end of a ray is searched for at these u, where sinh(u) is in widths of the
# integrand, with this share of the nodes of an integral.
_PROBES = np.linspace(2.2, 8.2, 16)
_PROBES_OF_MANY = np.linspace(2.2, 5.2, 8)
_PROBE_FINENESS = 0.75
_MANY_TERMS = 16
# Nats by which the integrand has fallen at the end of a ray.
_FALL = 37.0
# Neighbouring p of a ray that share one path.
BLOCK = 8
# Nodes of paths that are summed at once: they fit the cache.
_CACHED = 2500


class Rays(NamedTuple):
    """Rays ``p = start + sinh(u) width direction`` of contours, (J,), at log g."""

    log_g: np.ndarray
    start: np.ndarray
    width: np.ndarray
    direction: complex

    def at(self, u: np.ndarray) -> np.ndarray:
        """p, (J, N), at u of shape (N,) or (J, N)."""
        away = np.sinh(u) * self.width[:, None] * self.direction
        return self.start[:, None] + away


def direction_of(terms: Terms) -> complex:
    """Of light tails vertical, where K falls off as a Gaussian's."""
    return 1j + (0.0 if _is_light(terms) else _SLOPE)


def _is_light(terms: Terms) -> bool:
    return terms.shift < (_LIGHT_OF_FEW if terms.count <= _VERY_FEW_TERMS else _LIGHT)


def transforms_on_rays(
    p: np.ndarray, log_g: np.ndarray, terms: Terms, tilt: np.ndarray, fine: float
) -> np.ndarray:
    """``log K``, continuous along each ray, and two derivatives of K by g over K.

    (3, J, N, E) complex, at p of shape (J, N), log g (J,) and tilts (E,), see
    `skewed_terms.transforms_on_axis`; ``fine`` is the number of nodes of an integral
    relative to what it needs.
    """
    least = _LEAST_NODES_OF_FEW if terms.count <= _FEW_TERMS else _LEAST_NODES
    nodes = min(max(_NODES_PER_SHIFT * terms.shift, least), _MOST_NODES)
    nodes = round(fine * (nodes + _NODES_PER_DECADE * math.log10(terms.count)))
    rows, each = p.reshape(-1, BLOCK), np.repeat(log_g, p.shape[1] // BLOCK)
    v, dv = _paths(rows, each, terms, tilt, nodes)
    some = max(_CACHED // nodes, 1)
    cuts = [slice(i, i + some) for i in range(0, len(rows), some)]
    parts = [_sums(rows[i], each[i], v[i], dv[i], terms, tilt) for i in cuts]
    whole, excess, first, second = (
        np.concatenate(part).reshape(*p.shape, -1) for part in zip(*parts, strict=True)
    )
    log_k = log_near(whole, excess)
    angle = np.imag(log_k)  # modulo 2 pi; made continuous in place
    jumps = np.rint(np.diff(angle, axis=1) / (2 * math.pi))
    angle[:, 1:] -= 2 * math.pi * np.cumsum(jumps, axis=1)
    return np.stack([log_k, first / whole, second / whole])


def _paths(
    p: np.ndarray, log_g: np.ndarray, terms: Terms, tilt: np.ndarray, nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes v, (L, N), of the normal variable and dv, for rows of p, (L, B).

    Where ``e^{pA}`` would grow the path rises off the real axis by ``height``, which
    turns the argument of ``p A`` towards pi: v = w + i height (1 + tanh(rate (w -
    center))) / 2 at equally spaced w.
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
    center = larger_saddle(np.minimum(growth, last), s)
    center = np.where(growth >= last, (1 - (growth - last)) / s, center)
    rate = min(_RATE_PER_SHIFT * s, _LARGEST_RATE)
    end = (math.log(_NEGLIGIBLE) - smallest + 0.5 * s * s) / s
    low, edge = ends_of(s, tilt)
    high = np.minimum(np.maximum(end, center + 3 / s), edge)
    # Further left |e^{-p g B}| is negligible.
    fall = np.maximum(np.cos(angles), 0.3)
    first = (sizes + log_g[:, None] - 0.5 * s * s - np.log(_NEGLIGIBLE / fall)) / s
    low = np.maximum(low, np.minimum(first.min(axis=1), high - 2))
    spacing = (high - low) / (nodes - 1)
    w = low[:, None] + spacing[:, None] * np.arange(nodes)
    share = 0.5 * (1 + np.tanh(rate * (w - center[:, None])))
    height = ((_FINAL_ARGUMENT - angle) / s)[:, None]
    rise = 2 * rate * height * share * (1 - share)
    return w + 1j * height * share, spacing[:, None] * (1 + 1j * rise)


def _sums(
    p: np.ndarray,
    log_g: np.ndarray,
    v: np.ndarray,
    dv: np.ndarray,
    terms: Terms,
    tilt: np.ndarray,
) -> Transforms:
    """The transforms at rows of p, (L, B), by `_paths`: (L, B, E) each."""
    s, size = terms.shift, p.shape[1]
    opposite = math.exp(-0.5 * s * s) * exp_complex(-s * v)
    exponent = math.exp(-s * s) / opposite - np.exp(log_g)[:, None] * opposite
    # p = 0 as well: the quadrature's own mass of the density.
    p = np.concatenate([p, np.zeros((len(p), 1))], axis=1)[:, :, None]
    grown = exp_complex(p * exponent[:, None] - (0.5 * v * v)[:, None])
    grown *= (dv / SQRT_2PI)[:, None]
    grown, mass = grown[:, :size], grown[:, size:]
    share = -np.real(v)[:, :, None] * tilt - 0.5 * tilt * tilt
    phase = -np.imag(v)[:, :, None] * tilt
    exp_in_place(share, phase)
    share = complex_of(np, share, phase)
    # K - 1 is K less that mass, of many terms node by node, if the range is complete.
    first = grown * opposite[:, None]
    less = grown - mass if terms.are_many else mass
    rows = np.concatenate([grown, first, first * opposite[:, None], less], axis=1)
    whole, first, second, less = np.split(
        in_blocks(rows, share), [size, 2 * size, 3 * size], 1
    )
    low, edge = ends_of(s, tilt)
    complete = (np.real(v[:, 0]) < low + 1.5) & (np.real(v[:, -1]) > edge - s - 3.8)
    excess = less if terms.are_many else whole - less
    excess = np.where(complete[:, None, None], excess, whole - 1)
    return Transforms(whole, excess, first, second)


def ends_of_rays(
    terms: Terms,
    rays: Rays,
    ends: np.ndarray,
    at_start: np.ndarray,
    tilt: np.ndarray,
) -> np.ndarray:
    """The u at which integrands have fallen by `_FALL` at each g of a contour."""
    three = tilt[-1] * np.array([-1.0, 0.0, 1.0])
    probes = _PROBES_OF_MANY if terms.count >= _MANY_TERMS else _PROBES
    p = rays.at(probes)
    power = np.real(transforms_on_rays(p, rays.log_g, terms, three, _PROBE_FINENESS)[0])
    # Interpolated to the first log g of a contour, its own, and the last.
    log_g = np.stack([ends[:-1], rays.log_g, ends[1:]], axis=1)
    own = 0.5 * (log_g - rays.log_g[:, None]) / terms.shift
    power, base = (
        np.einsum(
            "jke,jue->juk",
            chebyshev_shares(size, own / tilt[-1]).reshape(*own.shape, size),
            rows,
        )
        for size, rows in ((3, terms.count * power), (len(tilt), at_start[:, None]))
    )
    constant = terms.constant(log_g) * np.exp(-terms.shift * own)
    fall = np.real(p) - rays.start[:, None]
    above = power + fall[..., None] * constant[:, None] - base + _FALL
    is_below = above < 0
    i = np.argmax(is_below, axis=1)[:, None]
    after, before = (
        np.take_along_axis(above, np.maximum(i - j, 0), axis=1)[:, 0] for j in (0, 1)
    )
    share = np.where((after < 0) & (before > 0), after / (after - before), 0.0)
    # No integrand falls off faster than a Gaussian's.
    square, i = np.sinh(probes) ** 2, i[:, 0]
    square = square[i] - share * (square[i] - square[np.maximum(i - 1, 0)])
    last = np.where(is_below.any(axis=1), np.arcsinh(np.sqrt(square)), probes[-1])
    return last.max(axis=1)

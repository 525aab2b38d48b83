"""Lambert's function in the upper half plane, as pairs of real arrays.

The principal branch: arg z from 0 to pi, on the upper side of its cut.
"""

from __future__ import annotations

import math

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    Pair,
    divided,
    log_complex,
    polar,
    times,
)

# Winitzki's coefficients, and below which size a quotient of polynomials is nearer.
_WINITZKI, _SMALL = (2.344, 0.8842, 0.9294, 0.5106, -1.213), 0.12


def lambert(z: Pair) -> Pair:
    """The w of ``w e^w = z``, elementwise; relative error 1e-13.

    By Winitzki's uniform approximation (2003), and two steps, of fourth order, of
    Fritsch, Shafer and Crowley (1973).
    """
    a, b, c, d, e = _WINITZKI
    root = _root((2 * math.e * z[0] + 2, 2 * math.e * z[1]))
    log_b = log_complex(1 + b * root[0], b * root[1])
    log_d = log_complex(1 + d * root[0], d * root[1])
    log_c = log_complex(1 + c * log_d[0], c * log_d[1])
    over = divided((1.0, 0.0), (2 * (log_b[0] + a), 2 * log_b[1]))
    large = (2 * log_b[0] - log_c[0] + e, 2 * log_b[1] - log_c[1])
    large = divided(large, (1 + over[0], over[1]))
    above = times(z, (1 + 4 / 3 * z[0], 4 / 3 * z[1]))
    below = times(z, (7 / 3 + 5 / 6 * z[0], 5 / 6 * z[1]))
    small = divided(above, (1 + below[0], below[1]))
    is_small = z[0] * z[0] + z[1] * z[1] < _SMALL**2
    w = tuple(np.where(is_small, *pair) for pair in zip(small, large, strict=True))
    log_z = 0.5 * np.log(z[0] * z[0] + z[1] * z[1]), np.arctan2(z[1], z[0])

    for _ in range(2):
        log_w = log_complex(*w)
        r = log_z[0] - log_w[0] - w[0], log_z[1] - log_w[1] - w[1]
        q = times((2 + 2 * w[0], 2 * w[1]), (1 + w[0] + r[0] / 1.5, w[1] + r[1] / 1.5))
        step = divided(r, (1 + w[0], w[1]))
        less, twice = (q[0] - r[0], q[1] - r[1]), (q[0] - 2 * r[0], q[1] - 2 * r[1])
        step = times(step, divided(less, twice))
        w = times(w, (1 + step[0], step[1]))
    return w


def lambert_near(z: Pair, known: Pair) -> Pair:
    """`lambert` from its value somewhere near, with all digits but next to -1/e."""
    w, e_w = known, polar(*known)
    # By the root of 1 + e z, of which it is a smooth function, then Halley's method.
    roots = [_root((2 * math.e * a + 2, 2 * math.e * b)) for a, b in (z, times(w, e_w))]
    slope = divided(roots[1], times((math.e * (1 + w[0]), math.e * w[1]), e_w))
    moved = (roots[0][0] - roots[1][0], roots[0][1] - roots[1][1])
    step = times(slope, moved)
    w = w[0] + step[0], w[1] + step[1]

    for _ in range(3):
        e_w = polar(*w)
        grown = times(w, e_w)
        f = grown[0] - z[0], grown[1] - z[1]
        half = times(f, divided((2 + w[0], w[1]), (2 + 2 * w[0], 2 * w[1])))
        slope = times(e_w, (1 + w[0], w[1]))
        step = divided(f, (slope[0] - half[0], slope[1] - half[1]))
        w = w[0] - step[0], w[1] - step[1]
    return w


def _root(z: Pair) -> Pair:
    """The square root, of an imaginary part that is not negative."""
    size = np.sqrt(z[0] * z[0] + z[1] * z[1])
    half = np.sqrt(0.5 * (size + np.abs(z[0])))
    other = 0.5 * z[1] / np.maximum(half, 1e-300)
    return np.where(z[0] >= 0, half, other), np.where(z[0] >= 0, other, half)

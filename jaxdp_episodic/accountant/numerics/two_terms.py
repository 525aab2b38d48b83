"""Tails of a sum of two independent ``A - g B``: the second one's in closed form.

See `numerics.skewed_sums`, of which contours meet too little decay where but two terms
are added and g is large. Here all that is added up but a normal tail's difference is
positive, so that rare events keep their relative precision. NumPy only.
"""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accountant.numerics.special import log_normal_tail

# Gauss-Legendre panels of the first term's normal variable: halved towards where the
# first term and the constant are 0 together, until they are so small a part of the
# stretch on which what is left to the second one turns; further away so wide, up to
# deviations where nothing is.
_NODES, _PART, _WIDTH, _REACH = 16, 0.1, 0.5, 36.0
_SQRT_2PI = float(np.sqrt(2 * np.pi))


def log_tails_of_two(
    constant: np.ndarray, shift: float, log_g: np.ndarray, idle: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `skewed_sums.log_tails`, n = 2; ``constant`` and ``log_g`` >= 0 are (E,)."""
    s, g = shift, np.exp(log_g)
    scale = np.exp(-0.5 * s * s)
    root = np.hypot(constant, 2 * scale * np.sqrt(g))
    # The first term there, and g times its opposite.
    rise = 0.5 * (root + np.abs(constant))
    fall = g * scale * scale / rise
    rise, fall = np.where(constant > 0, (fall, rise), (rise, fall))
    turn = np.log(rise) / s + 0.5 * s
    x, w = np.polynomial.legendre.leggauss(_NODES)
    sharp = float(np.min(scale * np.sqrt(g) / (rise + fall)))
    halvings = int(np.ceil(np.log2(_WIDTH * s / (_PART * sharp)).clip(1)))
    near = _WIDTH * 0.5 ** np.arange(halvings, 0, -1)
    edges = np.concatenate([[0.0], near, np.arange(_WIDTH, _REACH + 3 * s, _WIDTH)])
    half = 0.5 * np.diff(edges)[:, None]
    away = (edges[:-1, None] + half * (x + 1)).reshape(-1, 1)
    w = np.tile((half * w).reshape(-1, 1), (2, 1))
    away = np.concatenate([-away, away])
    x = turn + away
    w = w * np.exp(-0.5 * x * x) / _SQRT_2PI
    b = scale * np.exp(-s * x)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # Next to the turn with all digits.
        left = rise * np.expm1(s * away) - fall * np.expm1(-s * away)
        # Positive beyond x0, of which ``scale e^(s x0)`` is a root of a quadratic.
        root = np.hypot(left, 2 * scale * np.sqrt(g))
        rising = 2 * g * scale * scale / (left + root)
        place = np.where(left > 0, rising, 0.5 * (root - left))
        start = (np.log(place) + 0.5 * s * s) / s
        tail, more, less = (
            np.exp(log_normal_tail(start + move)) for move in (0.0, -s, s)
        )
        gain = np.maximum(left * tail + more - g * less, 0.0)
        known = b + idle
        first = known * tail + less
        other = scale * np.exp(-s * start)
        density = np.exp(-0.5 * start * start) / (_SQRT_2PI * s * (place + g * other))
        second = density * (known + other) ** 2
        # Where nothing is left of the normal density the others overflow.
        rows = (np.sum(w * row, axis=0, where=w > 0) for row in (gain, first, second))
        gained, beyond, at = (np.log(row) for row in rows)
    return gained, beyond, at

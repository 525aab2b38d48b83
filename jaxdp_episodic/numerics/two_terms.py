"""Tails of a sum of two independent ``A - g B``: the second one's in closed form.

See `numerics.skewed_sums`, of which contours meet too little decay where but two terms
are added and g is large. Here all that is added up but a normal tail's difference is
positive, so that rare events keep their relative precision. NumPy only.
"""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.numerics.special import log_normal_tail

# Gauss-Legendre panels of the first term's normal variable: halved so often towards
# where the first term and the constant are 0 together, as what is left to the second
# one turns there sharply; further away so wide, up to deviations where nothing is.
_NODES, _HALVINGS, _WIDTH, _REACH = 16, 24, 0.5, 27.0
_SQRT_2PI = float(np.sqrt(2 * np.pi))


def log_tails_of_two(
    constant: np.ndarray, shift: float, log_g: np.ndarray, idle: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `skewed_sums.log_tails`, with n = 2; ``constant`` and ``log_g`` are (E,)."""
    s, g = shift, np.exp(log_g)
    scale = np.exp(-0.5 * s * s)
    root = np.sqrt(constant * constant + 4 * scale * scale * g)
    place = np.where(
        constant > 0, 2 * g * scale**2 / (constant + root), 0.5 * (root - constant)
    )
    turn = np.log(place) / s + 0.5 * s
    x, w = np.polynomial.legendre.leggauss(_NODES)
    near = _WIDTH * 0.5 ** np.arange(_HALVINGS, 0, -1)
    edges = np.concatenate([[0.0], near, np.arange(_WIDTH, _REACH + 3 * s, _WIDTH)])
    half = 0.5 * np.diff(edges)[:, None]
    away = (edges[:-1, None] + half * (x + 1)).reshape(-1, 1)
    w = np.tile((half * w).reshape(-1, 1), (2, 1))
    x = turn + np.concatenate([-away, away])
    w = w * np.exp(-0.5 * x * x) / _SQRT_2PI
    a, b = scale * np.exp(s * x), scale * np.exp(-s * x)
    left = constant + a - g * b
    # Positive beyond x0, of which ``scale e^(s x0)`` is a root of a quadratic.
    root = np.sqrt(left * left + 4 * scale * scale * g)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
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
        rows = (np.sum(w * row, axis=0) for row in (gain, first, second))
        gained, beyond, at = (np.log(row) for row in rows)
    return gained, beyond, at

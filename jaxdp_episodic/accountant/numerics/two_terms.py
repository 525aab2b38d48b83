"""Tails of a sum of two independent ``A - g B``: the second one's in closed form.

The contours of `numerics.skewed_sums` meet too little decay where only two terms are
added and g is large. Here all summands are positive but a difference of normal tails,
so that rare events keep their relative precision. NumPy only.
"""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accountant.numerics.lattice_pieces import SQRT_2PI
from jaxdp_episodic.accountant.numerics.special import log_normal_tail

# Gauss-Legendre nodes of each panel in the first term's normal variable.
_PANEL_NODES = 16
# Panels are halved towards the point x_0 at which the first term and the constant add
# up to 0, down to 0.1 of the width over which the second term's part changes there.
_NARROWEST_PANEL = 0.1
_WIDEST_PANEL = 0.5
# Deviations beyond which the density is negligible; 3 s more under moments of B.
_FURTHEST = 36.0


def log_tails_of_two(
    constant: np.ndarray, shift: float, log_g: np.ndarray, idle: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `skewed_sums.log_tails`, n = 2; ``constant`` and ``log_g`` >= 0 are (E,)."""
    s, g = shift, np.exp(log_g)
    scale = np.exp(-0.5 * s * s)
    root = np.hypot(constant, 2 * scale * np.sqrt(g))
    # A and g B of the first term at x_0 ("root": of a quadratic in A).
    rise = 0.5 * (root + np.abs(constant))
    fall = g * scale * scale / rise
    rise, fall = np.where(constant > 0, (fall, rise), (rise, fall))
    turn = np.log(rise) / s + 0.5 * s
    x, w = np.polynomial.legendre.leggauss(_PANEL_NODES)
    sharp = float(np.min(scale * np.sqrt(g) / (rise + fall)))
    halvings = int(
        np.ceil(np.log2(_WIDEST_PANEL * s / (_NARROWEST_PANEL * sharp)).clip(1))
    )
    near = _WIDEST_PANEL * 0.5 ** np.arange(halvings, 0, -1)
    edges = np.concatenate(
        [[0.0], near, np.arange(_WIDEST_PANEL, _FURTHEST + 3 * s, _WIDEST_PANEL)]
    )
    half = 0.5 * np.diff(edges)[:, None]
    away = (edges[:-1, None] + half * (x + 1)).reshape(-1, 1)
    w = np.tile((half * w).reshape(-1, 1), (2, 1))
    away = np.concatenate([-away, away])
    x = turn + away
    w = w * np.exp(-0.5 * x * x) / SQRT_2PI
    b = scale * np.exp(-s * x)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # constant + U_1, without cancellation next to x_0.
        left = rise * np.expm1(s * away) - fall * np.expm1(-s * away)
        # The second term makes the sum positive beyond ``start``, a quadratic's root.
        root = np.hypot(left, 2 * scale * np.sqrt(g))
        root_above = 2 * g * scale * scale / (left + root)
        place = np.where(left > 0, root_above, 0.5 * (root - left))
        start = (np.log(place) + 0.5 * s * s) / s
        tail, more, less = (
            np.exp(log_normal_tail(start + move)) for move in (0.0, -s, s)
        )
        gain = np.maximum(left * tail + more - g * less, 0.0)
        known = b + idle
        first = known * tail + less
        other = scale * np.exp(-s * start)
        density = np.exp(-0.5 * start * start) / (SQRT_2PI * s * (place + g * other))
        second = density * (known + other) ** 2
        # Where the normal density is 0 the others overflow.
        rows = (np.sum(w * row, axis=0, where=w > 0) for row in (gain, first, second))
        gained, beyond, at = (np.log(row) for row in rows)
    return gained, beyond, at

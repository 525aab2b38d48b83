"""Bounds of a mean of exponentials from bounds at some points; NumPy only."""

# Reference: docs/proofs.md, "Random allocation"; Davis (1975), "Interpolation and
# Approximation", Theorem 3.1.1, for the error.

from __future__ import annotations

import numpy as np

# Numbers of points of the polynomials that are tried.
_SIZES = (2, 4, 6, 8)
# Rounding of a polynomial's value, relative to the sum of its terms' absolute values.
_ROUNDING = 1e-14


def bounds_between(
    points: np.ndarray, low: np.ndarray, high: np.ndarray, cell: int, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of F, (m,), at x between two neighbouring points."""
    # An interpolation at 2m points is off by a derivative of even order, which is
    # positive, times prod (x - x_i) / (2m)!: points shifted by one change its sign.
    below, above = np.zeros(x.shape), np.full(x.shape, np.inf)
    for size in _SIZES:
        first = max(cell + 2 - size, 0)
        for start in range(first, min(cell, len(points) - size) + 1):
            chosen = slice(start, start + size)
            basis = _lagrange(points[chosen], x)
            least = np.where(basis > 0, low[chosen], high[chosen])
            most = np.where(basis > 0, high[chosen], low[chosen])
            slack = _ROUNDING * np.sum(np.abs(basis) * high[chosen], axis=0)
            # With an even number of points above x, F is at least the polynomial.
            if (start + size - 1 - cell) % 2 == 0:
                value = np.sum(basis * least, axis=0) - slack
                below = np.fmax(below, value)
            else:
                value = np.sum(basis * most, axis=0) + slack
                above = np.fmin(above, value)
    return below, above


def _lagrange(points: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(k, m) values of the polynomials that are 1 at one point and 0 at the others."""
    others = [np.delete(points, i)[:, None] for i in range(len(points))]
    rows = zip(points.tolist(), others, strict=True)
    return np.stack([np.prod((x - o) / (point - o), axis=0) for point, o in rows])

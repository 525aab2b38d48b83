"""Bounds of a mean of exponentials from bounds at some places; NumPy only.

``F(x) = E[w e^{-x Z}]`` with w >= 0 has positive derivatives of every even order, and
so has ``F(x) e^{x c}`` for every c. The error of its interpolation by a polynomial at
2m places is its derivative of order 2m somewhere, times ``prod (x - place) / (2m)!``:
its sign is known, and between two places it is another one if the places are moved on
by one. So polynomials through different places are bounds on either side.

Reference: docs/proofs.md, "Random allocation"; Davis (1975), "Interpolation and
Approximation", Theorem 3.1.1, for the error.
"""

from __future__ import annotations

import numpy as np

# Numbers of places of a polynomial; relative rounding of its value, over the sum of the
# sizes of its terms.
_SIZES = (2, 4, 6, 8)
_ROUNDING = 1e-14


def bounds_between(
    places: np.ndarray, low: np.ndarray, high: np.ndarray, cell: int, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of F, (m,), at x between two neighbouring places.

    Args:
      places: (k,) increasing.
      low: (k, m) lower bounds of F at the places, >= 0; one F for each x.
      high: (k, m) upper ones.
      cell: x is in ``[places[cell], places[cell + 1]]``.
      x: (m,).
    """
    below, above = np.zeros(x.shape), np.full(x.shape, np.inf)
    for size in _SIZES:
        first = max(cell + 2 - size, 0)
        for start in range(first, min(cell, len(places) - size) + 1):
            chosen = slice(start, start + size)
            basis = _lagrange(places[chosen], x)
            least = np.where(basis > 0, low[chosen], high[chosen])
            most = np.where(basis > 0, high[chosen], low[chosen])
            slack = _ROUNDING * np.sum(np.abs(basis) * high[chosen], axis=0)
            # An even number of places beyond x: F is no less than the polynomial.
            if (start + size - 1 - cell) % 2 == 0:
                value = np.sum(basis * least, axis=0) - slack
                below = np.fmax(below, value)
            else:
                value = np.sum(basis * most, axis=0) + slack
                above = np.fmin(above, value)
    return below, above


def _lagrange(places: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(k, m) values of the polynomials that are 1 at one place and 0 at the others."""
    rows = []
    for i, place in enumerate(places.tolist()):
        others = np.delete(places, i)[:, None]
        rows.append(np.prod((x - others) / (place - others), axis=0))
    return np.stack(rows)

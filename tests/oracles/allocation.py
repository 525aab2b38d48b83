"""Random allocation by definition: integrals over all steps' noise but one.

The last one's integral is in closed form (a Gaussian's tail).
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr


def _panels(low: float, high: float, number: int) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.legendre.leggauss(24)
    edges = np.linspace(low, high, number + 1)
    half = 0.5 * np.diff(edges)[:, None]
    return (edges[:-1, None] + half * (x + 1)).ravel(), (half * w).ravel()


def antipodal_of_two(shift: float, epsilon: float) -> float:
    """``H_g(P_s || P_-s)`` of an epoch of two steps."""
    g, s = np.exp(epsilon), shift
    x, w = _panels(-13.0, 13.0 + 2 * s, 400)
    k = np.exp(s * x - s * s / 2) - g * np.exp(-s * x - s * s / 2)
    # E(k + A - g B)_+: positive beyond x0, e^{s x0} a root of a quadratic.
    h = np.exp(-s * s / 2)
    root = np.sqrt(k * k + 4 * h * h * g)
    with np.errstate(divide="ignore"):
        y = np.where(k > 0, 2 * g * h / (k + root), (root - k) / (2 * h))
    start = np.log(y) / s
    inner = k * ndtr(-start) + ndtr(s - start) - g * ndtr(-start - s)
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    return float(np.sum(w * density * inner) / 2)


def add_remove(
    steps: int, taken: int, shift: float, epsilon: float, direction: str
) -> float:
    """``H_g(P || Q)`` ("remove") or ``H_g(Q || P)`` of 2 or 3 of an epoch's steps."""
    s, g, idle = shift, np.exp(epsilon), steps - taken
    x, w = _panels(-12.0, 12.0 + 2 * s, 3000 if taken == 2 else 120)
    w = w * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    term = np.exp(s * x - s * s / 2)
    total, weight = term, w
    if taken == 3:
        total = (term[:, None] + term).ravel()
        weight = np.outer(w, w).ravel()
    sign = 1.0 if direction == "remove" else -1.0
    # t H = E(sign (sum - y))_+, the last term by the lognormal's closed form
    left = (g * steps if sign > 0 else steps / g) - idle - total
    with np.errstate(divide="ignore", invalid="ignore"):
        d = np.where(left > 0, (np.log(left) + s * s / 2) / s, -np.inf)
    edge = np.where(left > 0, left, 0.0)
    if sign > 0:
        gain = ndtr(s - d) - edge * ndtr(-d) + np.where(left > 0, 0.0, -left)
        return float(weight @ gain / steps)
    return float(g * (weight @ (edge * ndtr(d) - ndtr(d - s))) / steps)

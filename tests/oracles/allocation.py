"""Random allocation by definition: integrals over all steps' noise but one.

With two steps the last one's integral is in closed form (a Gaussian's tail); and for
any number of steps an inverse Laplace transform in 50 digits, on the side where the
transform of a lognormal exists, whose cancellation 50 digits survive.
"""

from __future__ import annotations

import mpmath as mp
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
) -> mp.mpf:
    """``H_g(P || Q)`` ("remove") or ``H_g(Q || P)`` of (a part of) an epoch."""
    with mp.workdps(50):
        s, g = mp.mpf(shift), mp.exp(mp.mpf(epsilon))
        idle = steps - taken
        # t H = E(X - x)_+ = E(x - X)_+ + j - x, or g E(x - X)_+
        x = g * steps - idle if direction == "remove" else steps / g - idle
        if x <= 0:
            return mp.mpf(0)
        h = mp.mpf(1) / 8
        nodes = [
            (h * mp.npdf(i * h), mp.exp(s * i * h - s * s / 2))
            for i in range(-120, 121)
        ]

        def transform(p: mp.mpc) -> mp.mpc:
            return mp.fsum(weight * mp.exp(-p * a) for weight, a in nodes)

        c = mp.mpf(2) / x
        step, total = mp.mpf(1) / 24, mp.mpf(0)
        for i in range(0, 24 * 9):
            # p = c (1 + i sinh(u)): few nodes reach far out.
            u = step * i
            p = c * mp.mpc(1, mp.sinh(u))
            term = mp.re(transform(p) ** taken * mp.exp(p * x) / p**2 * mp.cosh(u))
            total += term * (0.5 if i == 0 else 1)
            if i > 24 and abs(p) > 10 * c and abs(term) < mp.mpf(10) ** -45:
                break
        below = total * step * c / mp.pi
        if direction == "remove":
            return (below + taken - x) / steps
        return g * below / steps

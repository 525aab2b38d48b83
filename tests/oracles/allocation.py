"""Random allocation by definition: integrals over all steps' noise but one.

The last one's integral is in closed form (a Gaussian's tail).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import ndtr


def _panels(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.legendre.leggauss(24)
    half = 0.5 * np.diff(edges)[:, None]
    return (edges[:-1, None] + half * (x + 1)).ravel(), (half * w).ravel()


def antipodal(steps: int, taken: int, shift: float, epsilon: float) -> float:
    """``H_g(P_s || P_-s)`` of 2 or 3 of an epoch's steps; 20 s of 3 at shift 6."""
    s, g = shift, np.exp(epsilon)
    h, scale = np.exp(-s * s / 2), np.exp(-s * s / 2 + epsilon / 2)

    def gain(k: np.ndarray, left: int) -> np.ndarray:
        """``E(k + sum (A - g B))_+`` of so many more steps, (n,)."""
        large = 0.5 * (np.hypot(k, 2 * scale) + np.abs(k))
        small = scale**2 / large
        # k + A - g B = 0 where A is the first of these and g B the second.
        a, b = np.where(k > 0, (small, large), (large, small))
        turn = np.log(a / h) / s
        if left == 1:
            return k * ndtr(-turn) + ndtr(s - turn) - g * ndtr(-turn - s)
        turn, a, b = (part[:, None] for part in (turn, a, b))
        sharp = np.min(scale / (a + b))
        v = np.arange(np.log(sharp) - 37, 26 + 4 * s, 0.3 / max(s, 1))
        away = np.concatenate([-np.logaddexp(0, v), np.logaddexp(0, v)])
        w = np.tile((v[1] - v[0]) / (1 + np.exp(-v)), 2)
        w = w * np.exp(-((turn + away) ** 2) / 2) / np.sqrt(2 * np.pi)
        k = a * np.expm1(s * away) - b * np.expm1(-s * away)
        each = zip(k, w, w > 0, strict=True)
        return np.array([gain(row[at], left - 1) @ one[at] for row, one, at in each])

    return float(gain(np.array([(1 - g) * (steps - taken)]), taken)[0] / steps)


def add_remove(
    steps: int, taken: int, shift: float, epsilon: float, direction: str
) -> float:
    """``H_g(P || Q)`` ("remove") or ``H_g(Q || P)`` of 2 or 3 of an epoch's steps."""
    s, g, idle = shift, np.exp(epsilon), steps - taken
    sign = 1.0 if direction == "remove" else -1.0
    least = (g * steps if sign > 0 else steps / g) - idle
    low, high = -14.0, (16.0 if taken == 2 else 12.0) + 2 * s
    edges = np.linspace(low, high, 3001 if taken == 2 else 121)
    if taken == 2 and least > 0:
        kink = (np.log(least) + s * s / 2) / s
        crowd = np.append(0.0, 0.01 * 0.5 ** np.arange(40))
        edges = np.append(edges, [kink - crowd, kink + crowd])
        edges = np.unique(edges[(low <= edges) & (edges <= high)])
    x, w = _panels(edges)
    w = w * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    term = np.exp(s * x - s * s / 2)
    total, weight = term, w
    if taken == 3:
        total = (term[:, None] + term).ravel()
        weight = np.outer(w, w).ravel()
    # t H = E(sign (sum - y))_+, the last term by the lognormal's closed form
    left = least - total
    with np.errstate(divide="ignore", invalid="ignore"):
        d = np.where(left > 0, (np.log(left) + s * s / 2) / s, -np.inf)
    edge = np.where(left > 0, left, 0.0)
    if sign > 0:
        gain = ndtr(s - d) - edge * ndtr(-d) + np.where(left > 0, 0.0, -left)
        return float(weight @ gain / steps)
    return float(g * (weight @ (edge * ndtr(d) - ndtr(d - s))) / steps)


def whole_excess(steps: int, taken: int, shift: float, most: int) -> list:
    """``E W^n - 1`` up to an order, from the power of one term's series."""
    from mpmath import exp, factorial, mpf

    def product(a: list, b: list) -> list:
        return [sum(a[i] * b[k - i] for i in range(k + 1)) for k in range(most + 1)]

    s, orders = mpf(shift), range(most + 1)
    one = [exp(s**2 * k * (k - 1) / 2) / factorial(k) for k in orders]
    total = [mpf(steps - taken) ** k / factorial(k) for k in orders]
    while taken:
        total = product(total, one) if taken % 2 else total
        one, taken = product(one, one), taken // 2
    return [total[n] * factorial(n) / mpf(steps) ** n - 1 for n in orders]


def mean_of_two(function: Callable[..., np.ndarray], steps: int, shift: float) -> float:
    """``E f(W, W')`` of two of an epoch's steps, W' with the noise turned around."""
    s = shift
    x = np.arange(-13.0 - 5 * s, 13.0 + 5 * s, 0.1 / max(1, s))
    w = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
    a, b = np.exp(s * x - s * s / 2), np.exp(-s * x - s * s / 2)
    ratio = (steps - 2 + a[:, None] + a) / steps
    other = (steps - 2 + b[:, None] + b) / steps
    return float(w @ function(ratio, other) @ w)


def drawn_moment_of_two(n: int, steps: int, shift: float, r: float) -> float:
    """The moment, less 1, of a pair with ``r D_t(1 + (g-1)/r)`` both ways."""

    def excess(v: np.ndarray, order: float) -> np.ndarray:
        return (1 + v) ** order - 1 - order * v

    def both(top: np.ndarray, base: np.ndarray) -> np.ndarray:
        v = np.maximum(r * (top / base - 1), 0.0)
        return base * (excess(v, n) + excess(v, 1 - n))

    return mean_of_two(both, steps, shift)


def antipodal_of_many(
    steps: int, taken: int, shift: float, epsilon: float, fineness: float = 1.0
) -> float:
    """``H_g(P_s || P_-s)`` of any number of steps, by characteristic functions."""
    s, g = shift, np.exp(epsilon)
    middle, rise = epsilon / (2 * s), min(np.pi / (2 * s), 2.0) / fineness
    spacing = min(0.05, 0.05 / s) / fineness
    y = np.arange(-14 - middle - 6 * s, 14 - middle + 6 * s, spacing) + 1j * rise
    weight = np.exp(-((y + middle) ** 2) / 2) / np.sqrt(2 * np.pi) * spacing
    term = 2 * np.sqrt(g) * np.exp(-s * s / 2) * np.sinh(s * y)
    step = 0.05 / fineness
    # As far down as ``theta E S²`` counts beside the mean.
    lowest = -35 - epsilon - s * s - np.log(steps)
    log_theta = np.arange(lowest, 12, step)
    moved = np.array([np.expm1(1j * np.exp(v) * term) @ weight for v in log_theta])
    # |1 + z|² - 1 keeps what is small against 1.
    size = 0.5 * np.log1p(np.maximum(2 * moved.real + np.abs(moved) ** 2, -1 + 1e-16))
    angle = np.arctan2(moved.imag, 1 + moved.real)
    theta = np.exp(log_theta)
    log = taken * (size + 1j * angle) + 1j * theta * (1 - g) * (steps - taken)
    parts = -np.expm1(log).real / theta
    # Beyond the last place nothing but 1 / theta is left.
    rest = 1 / theta[-1] / np.expm1(step)
    mean = steps * (1 - g)
    return float((mean + 2 / np.pi * step * (parts.sum() + rest)) / (2 * steps))

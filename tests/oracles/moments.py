"""Renyi moments of the dominating pairs, by adaptive quadrature of the definition.

With L = P/Q, ``M(alpha) - 1 = E_Q[f(L)]``, ``f(L) = L^alpha - 1 - alpha (L - 1)``; the
half over {L > 1} is what the profile decides. In extended precision.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
from scipy import optimize

from oracles import precise

_NODES, _WEIGHTS = (
    x.astype(np.longdouble) for x in np.polynomial.legendre.leggauss(16)
)
_LOG_ROOT_2PI = np.log(2 * np.longdouble(np.pi)) / 2
# Below this size of alpha * v the power series of f replaces the direct difference,
# which would lose a factor 2 / (alpha * v) of the 64-bit mantissa.
_SERIES_BELOW = 0.05
_SERIES_TERMS = 18
_MAX_ROUNDS = 60


def _log_mixture(mixture: precise.Mixture, x: np.ndarray) -> np.ndarray:
    """Log of a mixture's density relative to N(0, 1)."""
    parts = [
        np.log(np.longdouble(float(w))) + float(m) * (x - np.longdouble(float(m)) / 2)
        for w, m in mixture
        if w > 0
    ]
    return np.logaddexp.reduce(parts)


def _turns(mixture: precise.Mixture) -> list[float]:
    """Where one component takes over from another."""
    parts = [(float(w), float(m)) for w, m in mixture if w > 0]
    return [
        (a + b) / 2 + math.log(v / w) / (b - a)
        for (v, a), (w, b) in itertools.combinations(parts, 2)
    ]


def _series(order: np.longdouble, v: np.ndarray) -> np.ndarray:
    """sum_{k>=2} C(order, k) v^k for |order * v| and |v| small."""
    total, term = np.zeros_like(v), order * v
    for k in range(2, _SERIES_TERMS):
        term = term * v * (order - (k - 1)) / k
        total = total + term
    return total


def _log_f(z: np.longdouble, v: np.ndarray, ell: np.ndarray, dual: bool) -> np.ndarray:
    """Log of f_alpha(1 + v), or of f_{1-alpha}(1 + v) when `dual`; alpha = 1 + z."""
    small = np.abs(v) * (1 + z) < _SERIES_BELOW
    series = np.log(_series(-z if dual else 1 + z, np.where(small, v, 0)))
    up = ell > 0
    e, w = np.where(small, 1, np.abs(ell)), z * np.where(small, 1, np.abs(ell))
    if dual:
        # v = e^ell (1 - e^-ell) stays in logs: it may overflow.
        log_zv = np.log(z) + e + np.log(-np.expm1(-e))
        right = log_zv + np.log1p(np.expm1(-w) * np.exp(-log_zv))
        left = w + np.log(-np.expm1(-w) + z * np.expm1(-e) * np.exp(-w))
    else:
        right = e + w + np.log(-np.expm1(-w) + z * np.expm1(-e) * np.exp(-w))
        left = np.log(np.exp(-e) * np.expm1(-w) - z * np.expm1(-e))
    return np.where(small, series, np.where(up, right, left))


def _panel_logs(logf: Callable, left: np.ndarray, right: np.ndarray):
    """Log of the Gauss-Legendre integral over each panel, and the highest logf."""
    half = (right - left) / 2
    values = logf(left[:, None] + half[:, None] * (1 + _NODES))
    top = np.max(values, axis=1, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0)
    total = np.sum(_WEIGHTS * np.exp(values - safe), axis=1) * half
    return np.log(total) + safe[:, 0], float(np.max(top))


def _log_integral(logf: Callable, left: np.ndarray, right: np.ndarray):
    """Log of the integral of exp(logf) by halving panels until they agree."""
    coarse, top = _panel_logs(logf, left, right)
    done = np.longdouble(-np.inf)
    for _ in range(_MAX_ROUNDS):
        middle = (left + right) / 2
        low, top_low = _panel_logs(logf, left, middle)
        high, top_high = _panel_logs(logf, middle, right)
        fine = np.logaddexp(low, high)
        top = max(top, top_low, top_high)
        total = np.logaddexp(done, np.logaddexp.reduce(fine))
        # The second term is the rounding of logf itself where it is of size 1e9.
        tolerance = 1e-16 + 1e-18 * abs(top)
        wrong = np.abs(np.exp(fine - total) - np.exp(coarse - total)) > tolerance
        done = np.logaddexp(done, np.logaddexp.reduce(fine[~wrong], initial=-np.inf))
        if not wrong.any():
            return done
        left, right = (
            np.concatenate([left[wrong], middle[wrong]]),
            np.concatenate([middle[wrong], right[wrong]]),
        )
        coarse = np.concatenate([low[wrong], high[wrong]])
    raise ArithmeticError("the oracle's quadrature did not converge")


def _moment(
    alpha: float,
    pair: tuple[precise.Mixture, precise.Mixture],
    change: tuple[float, float, float],
    dual: bool,
    *domain: float,
) -> np.longdouble:
    """Log of E_Q[f(L)] over a part of the line; f is f_{1-alpha} when `dual`.

    The change (w, a, b) says that ``P - Q = w (N(a) - N(b))``.
    """
    top, bottom = pair
    w, a, b = map(np.longdouble, change)

    def logf(x: np.ndarray) -> np.ndarray:
        below, far = _log_mixture(bottom, x), _log_mixture(top, x)
        d = (a - b) * (x - (a + b) / 2)
        log_v = np.log(w) + np.maximum(a * (x - a / 2), b * (x - b / 2)) - below
        v = np.sign(d) * np.exp(log_v + np.log(-np.expm1(-np.abs(d))))
        near = np.abs(v) < 0.5
        ell = np.where(near, np.log1p(np.where(near, v, 0)), far - below)
        log_density = below - x * x / 2 - _LOG_ROOT_2PI
        return log_density + _log_f(np.longdouble(alpha) - 1, v, ell, dual)

    s = float(np.ptp([float(m) for _, m in (*top, *bottom)]))
    reach = (alpha + 1) * s + 60.0
    low, high = np.clip(domain, -reach, reach)
    finest = min(1.0, 1 / (s * (1 + alpha))) / 16
    steps = np.append(0.0, finest * 4.0 ** np.arange(math.log(reach / finest, 4)))
    turns = [*_turns(top), *_turns(bottom), low, high]
    around = [turn + sign * steps for turn in turns for sign in (-1, 1)]
    grid = np.concatenate([np.arange(low, high, max(0.25, reach / 1e5)), *around])
    grid = np.unique(grid[(grid >= low) & (grid <= high)]).astype(np.longdouble)
    with np.errstate(all="ignore"):
        heights = logf(grid)
        kept = np.fmax(heights[1:], heights[:-1]) > np.nanmax(heights) - 100
        return _log_integral(logf, grid[:-1][kept], grid[1:][kept])


@functools.cache
def fine(
    name: str,
    p: float,
    shift: float,
    alpha: float,
    *,
    inner: float = 1.0,
    direction: str = "forward",
) -> np.longdouble:
    """Log of M(alpha) - 1 of a pair, from the pieces of which its profile consists.

    "swapped" and "antipodal" have one profile, H_g(P || Q) for g >= 1, both ways.
    """
    both, dual = (False, True), direction == "backward"
    sampled, change = precise.sampled_pair(p, shift), (p, shift, 0.0)
    middle, rate = shift / 2, np.longdouble(p) * inner
    upper, lower = precise.zeroed_pairs(p, inner, shift)
    antipodal = precise.symmetric_pair(p, inner, shift), (rate, shift, -shift)
    reached = rate, shift, 0.0
    pieces: Any = {
        "sampled": [(sampled, change, dual, -math.inf, math.inf)],
        "swapped": [(sampled, change, way, middle, math.inf) for way in both],
        "antipodal": [(*antipodal, way, 0.0, math.inf) for way in both],
        "zeroed": [
            (upper, reached, dual, middle, math.inf),
            (lower, reached, dual, -math.inf, middle),
        ],
    }
    return np.logaddexp.reduce([_moment(alpha, *piece) for piece in pieces[name]])


def fine_independent_episodes(
    num_episodes: int, eta: float, shift: float, alpha: float
) -> np.longdouble:
    """Log of M(alpha) - 1 for both profiles e1 sum_k w_k D(2ks, 1 + (g-1)/e1).

    w_k is P(J = k | J >= 1) and e1 is P(J >= 1), J ~ Binomial(B, eta).
    """
    with mp.workdps(40):
        rate, rest = mp.mpf(eta), 1 - mp.mpf(eta)
        some, number = 1 - rest**num_episodes, num_episodes
        shares = [
            float(mp.binomial(number, k) * rate**k * rest ** (number - k) / some)
            for k in range(1, number + 1)
        ]
    terms = [
        np.log(share) + fine("swapped", float(some), 2 * k * shift, alpha)
        for k, share in enumerate(shares, 1)
        if share > 0
    ]
    return np.logaddexp.reduce(terms)


def rdp_from_log_moment(
    log_moment_minus_one: np.longdouble, alpha: float, *, r_out: float = 1.0
) -> float:
    """RDP in nats of a profile scaled by r_out: log(1 + r_out (M-1)) / (alpha - 1)."""
    scaled = np.longdouble(log_moment_minus_one) + np.log(np.longdouble(r_out))
    return float(np.logaddexp(np.longdouble(0), scaled) / (np.longdouble(alpha) - 1))


def rdp_to_epsilon(rdp: Callable[[float], float], delta: float) -> float:
    """Smallest epsilon over real orders, if it has one minimum."""

    def epsilon(log_z: float) -> float:
        z = math.exp(log_z)
        drop = (math.log(delta) + math.log1p(z)) / z
        return rdp(1 + z) + math.log(z / (1 + z)) - drop

    bounds, options = (math.log(1e-3), math.log(1e6)), {"xatol": 1e-9}
    least = optimize.minimize_scalar(epsilon, bounds=bounds, options=options)
    return max(0.0, least.fun)

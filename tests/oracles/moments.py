"""Renyi moments of the dominating pairs, by adaptive quadrature of the definition.

With L = P/Q, ``M(alpha) - 1 = E_Q[f(L)]``, ``f(L) = L^alpha - 1 - alpha (L - 1)``; the
half over {L > 1} is what the profile decides. Extended precision; agrees with 60 digits
to 1e-13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_NODES, _WEIGHTS = (
    x.astype(np.longdouble) for x in np.polynomial.legendre.leggauss(16)
)
_LOG_ROOT_2PI = np.log(2 * np.longdouble(np.pi)) / 2
# Below this size of alpha * v the power series of f replaces the direct difference,
# which would lose a factor 2 / (alpha * v) of the 64-bit mantissa.
_SERIES_BELOW = 0.05
_SERIES_TERMS = 18
_MAX_ROUNDS = 60


class Ratio(NamedTuple):
    """A pair of densities on a line, through its ratio L = P/Q."""

    log_density: Callable[[np.ndarray], np.ndarray]
    excess: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    anchors: tuple[float, ...]
    slope: float


def sampled_ratio(sampling_probability: float, shift: float) -> Ratio:
    """P = (1-p) N(0,1) + p N(s,1) against Q = N(0,1), at x = y + s/2."""
    p, s = np.longdouble(sampling_probability), np.longdouble(shift)

    def log_density(y: np.ndarray) -> np.ndarray:
        return -((y + s / 2) ** 2) / 2 - _LOG_ROOT_2PI

    def excess(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        v = p * np.expm1(s * y)
        far = np.logaddexp(np.log1p(-p), np.log(p) + s * y)
        near = np.log1p(np.where(np.abs(v) < 0.5, v, 0))
        return v, np.where(np.abs(v) < 0.5, near, far)

    turn = float((np.log1p(-p) - np.log(p)) / s) if p < 1 else 0.0
    return Ratio(log_density, excess, (turn, -float(s) / 2), float(s))


def symmetric_ratio(p: float, r_in: float, shift: float) -> Ratio:
    """P* = (1-p) N(0) + p(1-r) N(-s) + p r N(s) against Q* = (1-p) N(0) + p N(-s)."""
    pl, rl, s = (np.longdouble(x) for x in (p, r_in, shift))

    def log_mix(y: np.ndarray) -> np.ndarray:
        return np.logaddexp(np.log1p(-pl), np.log(pl) - s * y - s * s / 2)

    def log_density(y: np.ndarray) -> np.ndarray:
        return -y * y / 2 + log_mix(y) - _LOG_ROOT_2PI

    def excess(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # P* - Q* = p r (N(s) - N(-s)), so L > 1 exactly for y > 0.
        log_v = (
            np.log(pl * rl) - s * s / 2 + s * y + np.log(-np.expm1(-2 * s * y))
        ) - log_mix(y)
        v = np.exp(log_v)
        near = np.log1p(np.where(v < 0.5, v, 0))
        return v, np.where(v < 0.5, near, np.logaddexp(np.longdouble(0), log_v))

    turn = float(s / 2 - np.log(pl * rl) / s)
    mixed = float(-s / 2 + (np.log(pl) - np.log1p(-pl)) / s) if p < 1 else 0.0
    return Ratio(log_density, excess, (turn, mixed), 2 * float(s))


def zeroed_ratios(p: float, r_in: float, shift: float) -> tuple[Ratio, Ratio]:
    """The zeroed pairs at x = y + s/2: (P1, Q1) for y > 0, (P2, Q2) for y < 0."""
    pl, rl, s = (np.longdouble(x) for x in (p, r_in, shift))
    with np.errstate(divide="ignore"):
        null, kept = np.log((1 - pl) + pl * rl), np.log(pl) + np.log1p(-rl)

    def ratio(log_mix: Callable, *anchors: np.longdouble) -> Ratio:
        def log_density(y: np.ndarray) -> np.ndarray:
            return -((y + s / 2) ** 2) / 2 + log_mix(y) - _LOG_ROOT_2PI

        def excess(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            log_v = np.log(pl * rl) + np.maximum(s * y, 0) - log_mix(y)
            log_v = log_v + np.log(-np.expm1(-np.abs(s * y)))
            up = y > 0
            v = np.where(up, 1, -1) * np.exp(log_v)
            near = np.log1p(np.where(np.abs(v) < 0.5, v, 0))
            below = np.logaddexp(np.log1p(-pl), np.log(pl) + s * y) - log_mix(y)
            far = np.where(up, np.logaddexp(np.longdouble(0), log_v), below)
            return v, np.where(np.abs(v) < 0.5, near, far)

        finite = tuple(float(a) for a in anchors if np.isfinite(a))
        return Ratio(log_density, excess, finite, 2 * float(s))

    with np.errstate(divide="ignore"):
        upper = ratio(
            lambda y: np.logaddexp(null, kept - s * y - s * s),
            -np.log(pl * rl) / s,
            (kept - null) / s - s,
            -s / 2,
        )
        lower = ratio(
            lambda y: np.logaddexp(null, kept + s * y),
            (np.log1p(-pl) - np.log(pl)) / s,
            (null - kept) / s,
            -s / 2,
        )
    return upper, lower


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


def _log_integral(logf: Callable, edges: np.ndarray) -> np.longdouble:
    """Log of the integral of exp(logf) by halving panels until they agree."""
    left, right = edges[:-1], edges[1:]
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


def _peaks(logf: Callable, grid: np.ndarray) -> list[float]:
    """Local maxima of logf, bracketed on a grid and narrowed by zooming."""
    values = logf(grid)
    inner = np.flatnonzero((values[1:-1] >= values[:-2]) & (values[1:-1] >= values[2:]))
    found = []
    for i in inner + 1:
        low, high = grid[i - 1], grid[i + 1]
        for _ in range(8):
            zoom = np.linspace(low, high, 17, dtype=np.longdouble)
            j = int(np.argmax(logf(zoom)))
            low, high = zoom[max(j - 1, 0)], zoom[min(j + 1, 16)]
        found.append(float((low + high) / 2))
    return found


def _mesh(logf: Callable, ratio: Ratio, alpha: float, side: int) -> np.ndarray:
    """Panel edges in |y|, graded towards every place where the integrand turns."""
    s = ratio.slope
    far = alpha * s + s + 60.0
    finest = min(1.0, 1 / (s * (1 + alpha))) / 16
    anchors = [0.0] + [side * t for t in ratio.anchors if 0 < side * t < far]
    geometric = np.geomspace(finest, far, 160)
    grid = np.unique(np.concatenate([geometric, np.linspace(0, far, 160)[1:]]))
    for anchor in anchors[1:]:
        grid = np.concatenate([grid, anchor - geometric, anchor + geometric])
    grid = np.unique(grid[(grid > 0) & (grid <= far)]).astype(np.longdouble)
    anchors += _peaks(logf, grid)
    steps = finest * 4.0 ** np.arange(0, math.ceil(math.log(far / finest, 4)) + 1)
    around = [t + sign * steps for t in anchors for sign in (-1, 1)]
    edges = np.concatenate([[0.0, far], anchors, *around])
    return np.unique(edges[(edges >= 0) & (edges <= far)]).astype(np.longdouble)


def _half(ratio: Ratio, alpha: float, side: int, dual: bool) -> np.longdouble:
    """Log of E_Q[f(L)] over the half line where side * y > 0."""
    z = np.longdouble(alpha) - 1

    def logf(distance: np.ndarray) -> np.ndarray:
        y = side * distance
        v, ell = ratio.excess(y)
        return ratio.log_density(y) + _log_f(z, v, ell, dual)

    with np.errstate(all="ignore"):
        return _log_integral(logf, _mesh(logf, ratio, alpha, side))


@functools.cache
def fine_sampled_gaussian(
    sampling_probability: float, shift: float, alpha: float, *, direction: str
) -> np.longdouble:
    """Log of M(alpha) - 1 for the Poisson-sampled Gaussian pair."""
    dual = {"forward": False, "backward": True}[direction]
    ratio = sampled_ratio(sampling_probability, shift)
    return np.logaddexp(_half(ratio, alpha, -1, dual), _half(ratio, alpha, 1, dual))


@functools.cache
def fine_zeroed(
    p: float, r_in: float, shift: float, alpha: float, *, direction: str
) -> np.longdouble:
    """Log of M(alpha) - 1 for the zeroed pairs of zero_out; see `zeroed_ratios`."""
    dual = {"forward": False, "backward": True}[direction]
    upper, lower = zeroed_ratios(p, r_in, shift)
    return np.logaddexp(_half(upper, alpha, 1, dual), _half(lower, alpha, -1, dual))


def _both_sides(ratio: Ratio, alpha: float) -> np.longdouble:
    """Log(M - 1) when both directions have the profile H_g(P||Q), g >= 1."""
    return np.logaddexp(_half(ratio, alpha, 1, False), _half(ratio, alpha, 1, True))


@functools.cache
def fine_swapped(eta: float, shift: float, alpha: float) -> np.longdouble:
    """Log of M(alpha) - 1 for h_fwd = h_bwd = eta D(shift, 1 + (g-1)/eta); exact."""
    return _both_sides(sampled_ratio(eta, shift), alpha)


@functools.cache
def fine_symmetric(p: float, r_in: float, shift: float, alpha: float) -> np.longdouble:
    """Log of M(alpha) - 1 for h_fwd = h_bwd = H_g(P* || Q*); exact."""
    return _both_sides(symmetric_ratio(p, r_in, shift), alpha)


@functools.cache
def fine_independent_episodes(
    num_episodes: int, eta: float, shift: float, alpha: float
) -> np.longdouble:
    """Log of M(alpha) - 1 for both profiles e1 sum_k w_k D(2ks, 1 + (g-1)/e1)."""
    log_e1, log_weights = binomial_at_least_one(num_episodes, eta)
    eta_1 = float(np.exp(log_e1))
    terms = [
        log_w + fine_swapped(eta_1, 2 * k * shift, alpha)
        for k, log_w in enumerate(log_weights, start=1)
        if log_w > -np.inf
    ]
    return np.logaddexp.reduce(terms)


def binomial_at_least_one(num_episodes: int, eta: float):
    """Log P(J >= 1) and log P(J = k | J >= 1), k = 1..B, J ~ Binomial(B, eta)."""
    rate = np.longdouble(eta)
    with np.errstate(divide="ignore"):
        log_not = np.log1p(-rate)
    log_e1 = np.log(-np.expm1(num_episodes * log_not))
    logs = []
    for k in range(1, num_episodes + 1):
        missed = num_episodes - k
        rest = missed * log_not if missed else np.longdouble(0)
        choose = np.log(np.longdouble(math.comb(num_episodes, k)))
        logs.append(choose + k * np.log(rate) + rest - log_e1)
    return log_e1, logs


def rdp_from_log_moment(
    log_moment_minus_one: np.longdouble, alpha: float, *, r_out: float = 1.0
) -> float:
    """RDP in nats of a profile scaled by r_out: log(1 + r_out (M-1)) / (alpha - 1)."""
    scaled = np.longdouble(log_moment_minus_one) + np.log(np.longdouble(r_out))
    return float(np.logaddexp(np.longdouble(0), scaled) / (np.longdouble(alpha) - 1))


def rdp_to_epsilon(
    rdp: Callable[[float], float], delta: float, *, max_alpha: float = 1e6
) -> float:
    """Smallest epsilon over real orders by a dense scan and repeated zooming."""

    @functools.cache  # both ends of a finer grid are known
    def epsilon(log_z: float) -> float:
        z = math.exp(log_z)
        alpha = 1 + z
        drop = (math.log(delta) + math.log1p(z)) / z
        return rdp(alpha) + math.log(z / alpha) - drop

    grid = np.linspace(math.log(1e-3), math.log(max_alpha - 1), 80)
    for _ in range(9):
        values = [epsilon(t) for t in grid]
        best = int(np.argmin(values))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        grid = np.linspace(low, high, 9)
    return max(0.0, min(values))

"""Upper bounds of Rényi moments of random allocation, one setting at a time.

A_i = e^{s x_i - s²/2} of independent normal x_i, B_i the same with -s; W = ((t - j) +
A_1 + ... + A_j) / t, W' the same of the B_i. Reference: docs/proofs.md, "Moments of
random allocation".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.losses.gaussian import mixture_excess
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature
from jaxdp_episodic.accountant.numerics.binomial import log_binomial
from jaxdp_episodic.accountant.numerics.mean_moments import (
    Laplace,
    Tilted,
    log_distance,
    most_orders,
    whole_orders,
)
from jaxdp_episodic.accountant.numerics.special import log_expm1

_MOST = 128  # largest whole order whose moments are summed: of W;
_MOST_TILTED = 64  # of the ratio W / W';
_MOST_BETWEEN = 32  # and of W next to a fractional power
# Whole orders of the ratio with a bound: all up to 64, then 18 in each octave.
_MOST_OF_RATIO = 4096
_FAR_ORDERS = np.geomspace(_MOST_TILTED, _MOST_OF_RATIO, 109)
_ORDERS = np.unique(np.append(np.arange(2, _MOST_TILTED), np.rint(_FAR_ORDERS)))
# Relative error charged for an integrated moment: a hundred times the measured one.
_ERROR = 1e-12
# Added to each log-excess. Of one step, which has a closed form, it was up to 4e-12 too
# small (noise 0.25 to 10,000, orders up to 2^14).
_ROUNDING = 1e-11
_NEAREST = 0.01  # powers up to this distance below 2 are integrated
# Largest z of a power -z that is integrated; and if many are.
_LARGEST_POWER = 2.0**14
_LARGEST_OF_MANY = 2.0**12
# Largest tilt z s² / t, in nats, of an integrated negative power; beyond it the bound
# by the geometric mean is close.
_LARGEST_TILT = 80.0
# Ratios a / n that are tried in Hölder's inequality.
_TRIED = (1.03, 1.1, 1.4, 2.0, 4.0)
_USELESS = 3000.0  # a moment with a larger logarithm is of no use
# Quadrature of the moments of Poisson sampling.
_POISSON = MomentRule("forward", Quadrature(32, 16))
# Step of finite differences in the order, relative to it if it is below 1.
_STEP = 1e-4
_CACHED = 128  # settings whose moments are cached, of each kind
# Values of w^{1/4} at which the maximum R of `_drawn` is searched for.
_QUARTER_POWERS = 1 + np.append(0.0, np.geomspace(1e-2, 1e9, 2000))


_laplace = functools.lru_cache(_CACHED)(Laplace)
_tilted = functools.lru_cache(_CACHED)(Tilted)
_sums = functools.lru_cache(_CACHED)(whole_orders)


def sum_excess(
    direction: str, order: np.ndarray, s: float, t: float, j: float
) -> np.ndarray:
    """Returns ``log(E W^{1+z} - 1)``, backward of W^-z, and two derivatives; (3, m)."""
    one = _excess_below if direction == "backward" else _excess_above
    return _with_slopes(lambda z: one(z, s, t, j) + _ROUNDING, order)


def antipodal_excess(
    direction: str, order: np.ndarray, s: float, t: float, j: float, r: float
) -> np.ndarray:
    """Returns the log-excess of ``r D_t(1 + (g-1)/r)`` and two derivatives; (3, m)."""
    del direction

    def excess(z: np.ndarray) -> np.ndarray:
        """Interpolates bounds at whole orders; at most ``r (M - 1)``, M of 2s."""
        bounds = log_expm1(np.interp(z, *_drawn_moments(r, s, t, j)))
        found = np.where(z <= _MOST_OF_RATIO - 1, bounds, np.inf)
        most = math.log(r) + log_expm1(2 * s * s * z * (1 + z))
        return np.minimum(found, most) + _ROUNDING

    return _with_slopes(excess, order)


def _with_slopes(
    function: Callable[[np.ndarray], np.ndarray], z: np.ndarray
) -> np.ndarray:
    """Returns a log-excess and, by differences, the excess' derivatives over it."""
    h = _STEP * np.minimum(z, 1.0)
    low, value, high = function(np.concatenate([z - h, z, z + h])).reshape(3, -1)
    with np.errstate(invalid="ignore"):
        slope = (high - low) / (2 * h)
        bend = (high - 2 * value + low) / (h * h)
    return np.stack([value, slope, np.maximum(bend + slope**2, 0.0)])


def _excess_below(
    z: np.ndarray, s: float, t: float, j: float, most: float = _LARGEST_POWER
) -> np.ndarray:
    """Returns ``log(E W^-z - 1)``."""
    # W >= (A_1 ... A_j)^{1/t} also gives a bound: e^{(z + z²/t) j s² / (2t)}.
    result = log_expm1((z + z * z / t) * (j * s * s / (2 * t)))
    known = np.flatnonzero((z > 0) & (z <= most) & (z * s * s / t <= _LARGEST_TILT))
    if known.size:
        largest = 2.0 ** max(math.ceil(math.log2(z[known].max())), 3)
        found = _laplace(t, j, s, largest, _NEAREST).log_excess_below(z[known])
        result[known] = np.minimum(found, result[known])
    return result


def _excess_above(z: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
    """Returns ``log(E W^{1+z} - 1)``; at most the value without allocation (Jensen)."""
    result, alpha, near = np.empty(z.shape), 1 + z, np.array([2 - _NEAREST])
    below = alpha <= near
    least = _laplace(t, j, s, 8.0, _NEAREST)
    result[below] = least.log_excess_between(alpha[below])
    # Log-moments are convex in the order: chords from just below 2, and of whole ones.
    floors = np.maximum(np.floor(alpha[~below]), 2.0)
    whole = np.unique(np.concatenate([floors, floors + 1]))
    logs = np.log1p(_whole_excess(whole, s, t, j))
    first = np.log1p(np.exp(least.log_excess_between(near)))
    known = np.append(near, whole), np.append(first, logs)
    result[~below] = log_expm1(np.interp(alpha[~below], *known))
    between = (alpha >= 2) & (alpha < _MOST_BETWEEN) & (alpha != np.floor(alpha))
    most = most_orders(s, _MOST_BETWEEN + 1, tilted=True)
    for i in np.flatnonzero(between).tolist():
        # E W^alpha as an integral of E W^n e^{-pW}.
        n = math.ceil(alpha[i]) + 1
        if n <= most:
            tilted = _tilted(t, j, s, most, of_other=False)
            value = tilted.log_moments_of([n], [n - alpha[i]]) + _ERROR
            result[i] = min(result[i], float(log_expm1(value)[0]))
    return np.minimum(result, log_expm1(0.5 * s * s * z * (1 + z)))


def _whole_excess(n: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
    """Returns ``E W^n - 1`` at whole n >= 2, by the multinomial sum."""
    # Beyond its range at most that of Poisson sampling at rate 1/t, since multinomial
    # counts are negatively associated.
    most = most_orders(s, _MOST, tilted=False)
    table = _sums(t, j, s, most)
    result = table[np.minimum(n, most).astype(int)]
    far = n > most
    if np.any(far):
        z = n[far] - 1
        fields = np.full(z.shape, 1 / t), np.full(z.shape, s)
        (log_excess,) = mixture_excess(z, *fields, _POISSON)
        with np.errstate(over="ignore"):
            drawn = np.expm1(j * np.logaddexp(0.0, log_excess))
            result[far] = np.minimum(drawn, np.expm1(0.5 * s * s * z * (1 + z)))
    return result


@functools.lru_cache(_CACHED)
def _drawn_moments(
    r: float, s: float, t: float, j: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns orders minus 1, from 0, and convex bounds of the log-moments."""
    logs, orders = _antipodal_moments(s, t, j), _ORDERS
    bounds = logs[orders.astype(int)]
    if r < 1:
        distance = log_distance(t, j, s) + _ERROR
        q = _QUARTER_POWERS
        # R of `_drawn`.
        peak = math.sqrt(2) * np.max((q + 1 / q) / (1 + r * (q**4 - 1))) * (1 + 1e-3)
        drawn = [_drawn(n, r, logs, distance, peak) for n in orders.astype(int)]
        cap = math.log(r) + log_expm1(2 * s * s * orders * (orders - 1.0))
        bounds = np.minimum(drawn, np.logaddexp(0.0, cap))
    # Log-moments are convex in the order, so chords between bounds are bounds.
    points, values = np.append(0.0, orders - 1.0), np.append(0.0, bounds)
    kept = lower_hull(points, values)
    return points[kept], values[kept]


def lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns which points are corners of their convex hull from below; x ascends."""
    corners: list[int] = []
    x, y = x.tolist(), y.tolist()
    for i in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            corners.pop()
        if not corners or x[i] > x[corners[-1]]:
            corners.append(i)
    return np.array(corners)


def _drawn(n: int, r: float, logs: np.ndarray, distance: float, peak: float) -> float:
    """Returns a bound of log E V^n, V = 1 + r (w - 1), w = P_s / P_-s, and r < 1."""
    # E V^n - 1 is a binomial mean of the moments of w. The profile's moment differs by
    # a Jensen gap of at most (1 - r) min(C (w-1)³ / (w V), w - 1), C = n (n-1) r² / 2.
    # Its mean is at most 1 - r times each of C R sqrt(c (d - c)), sqrt(C) c and sqrt(c
    # / 2), with 2 c = e^distance, 2 d = E (w-1)², R = peak (docs/proofs.md).
    k = np.arange(2.0, n + 1)
    with np.errstate(over="ignore"):
        chance = log_binomial(np.full(k.shape, float(n)), k)
        chance = chance + k * math.log(r) + (n - k) * math.log1p(-r)
        excess = log_expm1(logs[2 : n + 1])
    log_c = distance - math.log(2.0)
    # log(d - c), d >= c, with the errors of both.
    log_d = float(log_expm1(logs[2])) - math.log(2.0)
    log_rest = log_d + math.log(max(-math.expm1(log_c - log_d), _ERROR))
    log_rest = np.logaddexp(log_rest, math.log(_ERROR))
    log_size = math.log(0.5 * n * (n - 1) * r * r)
    gap = min(
        log_size + math.log(peak) + 0.5 * (log_c + log_rest),
        0.5 * log_size + log_c,
        0.5 * (log_c - math.log(2.0)),
        0.0,
    )
    terms = np.append(chance + excess, math.log1p(-r) + gap)
    return float(np.logaddexp.reduce(np.append(terms, 0.0)))


@functools.lru_cache(_CACHED)
def _antipodal_moments(s: float, t: float, j: float) -> np.ndarray:
    """Returns upper bounds of ``log E w^n``, w = P_s / P_-s, at n = 0 .. 4096."""
    # Beyond the range of the integrals by Hölder's inequality with w = W / W': E[W^n
    # W'^{1-n}] <= (E W^a)^{n/a} (E W^{-(n-1) a/(a-n)})^{(a-n)/a}, a > n.
    n = _ORDERS
    logs = 2 * s * s * n * (n - 1)
    known = most_orders(s, _MOST_TILTED, tilted=True)
    k = np.arange(2, known + 1)
    summed = _tilted(t, j, s, known, of_other=True).log_moments_of(k, k - 1.0)
    logs[k - 2] = np.minimum(logs[k - 2], summed + _ERROR)
    # A single term gives a lower bound of log E w^n.
    least = 0.5 * s * s * n * (n - 1) - (n - 1) * math.log(t)
    chosen = np.flatnonzero((n > known) & (least < _USELESS))
    asked = n[chosen]
    every = np.ceil(np.multiply.outer(_TRIED, asked) + 1e-9)
    moments = np.log1p(_whole_excess(every.reshape(-1), s, t, j)).reshape(every.shape)
    for a, above in zip(every, moments, strict=True) if asked.size else ():
        z = (asked - 1) * a / (a - asked)
        below = np.logaddexp(0.0, _excess_below(z, s, t, j, _LARGEST_OF_MANY))
        bound = (asked * above + (a - asked) * below) / a
        logs[chosen] = np.minimum(logs[chosen], bound * (1 + 1e-13))
    return np.interp(np.arange(_MOST_OF_RATIO + 1.0), [1.0, *n], [0.0, *logs])

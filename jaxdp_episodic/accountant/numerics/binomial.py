"""Binomial distributions: probabilities, tails and a hockey stick, in log space.

NumPy, except `log_binomial`. Costs do not grow with the number of trials.
"""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# S(n) = log(n!) - log(sqrt(2 pi n) (n / e)^n) for n = 1 .. 15, from 50 digits; the
# entry for n = 0 is never used.
# fmt: off
_STIRLING_ERROR = np.array([
    0.0, 0.08106146679532726, 0.0413406959554093, 0.02767792568499834,
    0.020790672103765093, 0.016644691189821193, 0.013876128823070748,
    0.011896709945891771, 0.010411265261972096, 0.009255462182712733,
    0.00833056343336287, 0.00757367548795184, 0.00694284010720953, 0.006408994188004207,
    0.0059513701127588475, 0.005554733551962801,
])
# fmt: on
# Exceeds the rounding error of the difference of two weights in [0, 1].
ROUNDING_OF_WEIGHTS = 1e-15


def log_binomial(n: Array, k: Array) -> Array:
    """Returns ``log(n! / (k! (n-k)!))`` for whole numbers ``0 <= k <= n``."""
    xp = namespace(n, k)
    small = xp.minimum(k, n - k)
    inside = small >= 1
    m = xp.where(inside, small, 1.0)
    rest = xp.where(inside, n - m, 1.0)
    total = m + rest
    # Not log1p(-m/n): XLA's log1p has an error of 3e-14 near -0.3.
    entropy = m * xp.log(total / m) + rest * xp.log1p(m / rest)
    spread = 0.5 * xp.log(total / (2 * np.pi * m * rest))
    correction = stirling_error(total) - stirling_error(m) - stirling_error(rest)
    edge = xp.where(small == 0, 0.0, -xp.inf)
    return xp.where(inside, entropy + (spread + correction), edge)


def stirling_error(n: Array) -> Array:
    """Returns ``S(n)`` for whole ``n >= 1``: a table, or Stirling's series to 1e-16."""
    xp = namespace(n)
    table = xp.asarray(_STIRLING_ERROR, n.dtype)
    last = len(_STIRLING_ERROR) - 1
    tabulated = table[xp.minimum(n, last).astype(int)]
    inverse = 1 / xp.maximum(n, last + 1)
    square = inverse * inverse
    series = inverse * (
        1 / 12
        - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188)))
    )
    return xp.where(n <= last, tabulated, series)


# Largest number of convergents of the continued fraction. Each one is a bound.
_MAX_CONVERGENTS = 400


def log_binomial_mass(k: np.ndarray, n: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Returns ``log P(J = k)`` for ``J ~ Binomial(n, p)``; *exact* up to rounding."""
    # Loader (2000), "Fast and accurate computation of binomial probabilities". The
    # error is below 1e-10 up to n = 1e9 within 40 deviations of the mean.
    k, n, p = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (k, n, p)))
    inner = (k > 0) & (k < n) & (p > 0) & (p < 1)
    m, total = np.where(inner, k, 1.0), np.where(inner, n, 2.0)
    chance = np.where(inner, p, 0.5)
    rest = total - m
    deviation = m - total * chance
    deviance = _deviance(m, total * chance, deviation)
    deviance += _deviance(rest, total * (1 - chance), -deviation)
    correction = stirling_error(total) - stirling_error(m) - stirling_error(rest)
    body = 0.5 * np.log(total / (2 * np.pi * m * rest)) + correction - deviance
    with np.errstate(divide="ignore", invalid="ignore"):
        none = np.where(n > 0, n * np.log1p(-p), 0.0)
        all_ = np.where(n > 0, n * np.log(p), 0.0)
    edge = np.where(k == 0, none, np.where(k == n, all_, -np.inf))
    return np.where(inner, body, edge)


def tail_over_mass(
    t: np.ndarray, n: np.ndarray, odds: np.ndarray, *, side: str
) -> np.ndarray:
    """Returns a bound of ``P(J >= t) / P(J = t)``, binomial J, from one side."""
    # Gauss's continued fraction 1 / D_1 of 2F1(t - n, 1; t + 1; -odds): D_m = 1 - a_m /
    # (1 + b_m / D_{m+1}), a_m = odds (d - m + 1) (t + m - 1) / ((t + 2m - 2)(t + 2m -
    # 1)), b_m = odds m (n + m) / ((t + 2m - 1)(t + 2m)), d = n - t. D_m decreases in
    # D_{m+1}, which is in (0, 1]. So starting with 1 bounds D_1 from above after an
    # even number of steps, from below after an odd one.
    t, n, odds = np.broadcast_arrays(t, n, odds)
    shape = t.shape
    # About 130 / z² steps are needed, z deviations right of the mean.
    p = odds / (1 + odds)
    inside = (t <= n) & (n > 0)
    spread = np.sqrt(np.maximum(n * p * (1 - p), 1e-300))
    z = np.where(inside, (t - n * p) / spread, np.inf)
    with np.errstate(divide="ignore", over="ignore"):
        wanted = 20 + 200 / np.maximum(z, 1e-3) ** 2
    exact = np.where(inside, n - t + 2, 1.0)  # where the fraction ends by itself
    steps = np.minimum(np.minimum(wanted, exact), _MAX_CONVERGENTS).astype(np.int64)
    steps = steps.reshape(-1) + 1
    steps += steps % 2 if side == "lower" else 1 - steps % 2
    # Sorted by the number of steps, the largest first, so each step updates a slice.
    order = np.argsort(-steps, kind="stable")
    t, n, odds = (np.asarray(a, np.float64).reshape(-1)[order] for a in (t, n, odds))
    in_use = np.cumsum(np.bincount(steps)[::-1])[::-1]
    rest = np.maximum(n - t, 0.0)
    bound = np.ones(t.shape)
    for m in range(len(in_use) - 1, 0, -1):
        here = slice(in_use[m])
        at, ratio = t[here], odds[here]
        low = at + (2 * m - 1)
        above = ratio * (m * (n[here] + m)) / (low * (low + 1))
        below = ratio * (np.maximum(rest[here] - (m - 1), 0.0) * (at + (m - 1)))
        below /= low * (low - 1)
        value = 1 - below / (1 + above / bound[here])
        # Not converged at the mean and left of it, but still a nonnegative bound.
        bound[here] = np.clip(value, 1e-300, 1.0)
    found = np.empty(bound.shape)
    found[order] = bound
    found = found.reshape(shape)
    return 1 / found if side == "lower" else np.where(found > 1e-290, 1 / found, np.inf)


def log_binomial_tail(
    t: np.ndarray, n: np.ndarray, p: np.ndarray, *, side: str
) -> np.ndarray:
    """Returns ``log P(J >= t)`` for ``J ~ Binomial(n, p)``, bounded from ``side``."""
    t, n, p = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (t, n, p)))
    right = t > n * p
    inside = (t >= 1) & (t <= n)
    other = {"lower": "upper", "upper": "lower"}[side]
    here = np.where(right & inside, t, n + 1.0)
    there = np.where(~right & inside, n - t + 1, n + 1.0)
    with np.errstate(all="ignore"):  # the other side's odds may be inf
        tail = log_binomial_mass(here, n, p) + np.log(
            tail_over_mass(here, n, p / (1 - p), side=side)
        )
        complement = log_binomial_mass(there, n, 1 - p) + np.log(
            tail_over_mass(there, n, (1 - p) / p, side=other)
        )
        complement = np.log1p(-np.exp(np.minimum(complement, 0.0)))
    result = np.where(right, tail, complement)
    return np.minimum(np.where(inside, result, np.where(t <= 0, 0.0, -np.inf)), 0.0)


def log_shifted_hockey_stick(
    trials: np.ndarray,
    odds: np.ndarray,
    own: np.ndarray,
    cross: np.ndarray,
    expm1_epsilon: np.ndarray,
    *,
    side: str,
) -> np.ndarray:
    """Returns the log hockey stick of a binomial moved by one, with either weight."""
    trials, odds, own, cross, rise = np.broadcast_arrays(
        trials, odds, own, cross, expm1_epsilon
    )
    sign = 1 if side == "upper" else -1
    apart = own - cross + sign * ROUNDING_OF_WEIGHTS
    gain = apart - rise * cross  # own - g cross
    loss = apart + rise * own  # g own - cross
    possible = gain > 0
    ratio = np.where(possible, gain, 1.0) / np.where(possible, loss, 1.0)
    t = np.floor((trials + 1) * odds / (ratio + odds)) + 1
    opposite = {"upper": "lower", "lower": "upper"}[side]
    step = np.maximum(trials - t + 1, 0.0) / t * odds  # f(t) / f(t-1)
    tail = step * np.where(step > 0, tail_over_mass(t, trials, odds, side=opposite), 1)
    # At most the gain itself, since the loss of the event {j >= t} is not negative.
    value = gain - rise * (own + cross) * tail + sign * 1e-13 * gain
    value = np.clip(value, 0.0, np.maximum(gain, 0.0))
    with np.errstate(divide="ignore"):
        mass = log_binomial_mass(t - 1, trials, odds / (1 + odds))
        return np.where(possible, mass + np.log(value), -np.inf)


def _deviance(x: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Returns ``x log(x / mean) - deviation`` without cancellation."""
    ratio = deviation / mean
    near = np.abs(ratio) < 0.1
    safe = np.where(near, ratio, 0.0)
    # (1+r) log(1+r) - r, of order r²/2, without losing its leading digits.
    series = np.zeros(ratio.shape)
    for k in range(18, 1, -1):
        series = 1 / (k * (k - 1)) - safe * series
    far = x * np.log(x / mean) - deviation
    return np.where(near, mean * safe * safe * series, far)

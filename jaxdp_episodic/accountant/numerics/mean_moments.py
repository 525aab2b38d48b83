"""Moments of the mean X of lognormal terms and ones, without cancellation; NumPy.

X = (slots - count + A_1 + ... + A_count) / slots with A_i = e^{s x_i - s²/2} of
independent standard normal x_i; Y is the same with B_i = e^{-s x_i - s²/2}. Reference:
docs/proofs.md, "Moments of random allocation".
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic.accountant.numerics.binomial import log_binomial
from jaxdp_episodic.accountant.numerics.loops import logsumexp
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks

# Largest logarithm of a term's moments, plain and tilted, so that sums are in range.
_LARGEST = 500.0
_LARGEST_TILTED = 220.0
# Truncation of normal variables, in standard deviations: relative error below 1e-15.
WIDE = 9.5
# Spacing of normal variables: at most this, this share of the strip pi / (2 s) in which
# e^{-e^{sx}} is bounded, and this share of the deviation of a narrower density.
_SPACING = 0.5
_STRIP_SPACING = 0.27
_NARROW_SPACING = 0.75
_FIRST_LOG_P = 37.0  # the smallest p is e^-37 of the integrand's scale
FINENESS = 0.8  # spacing of u, relative to the width of the integrand
_DISTANCE_SPACING = 0.2  # spacing of log p of `log_distance`
# Above this log q the asymptotic form is used, since e^q overflows.
FAR = math.log(300.0)
# Relative amount by which the logarithm of a transform is moved to 0 there: more than
# its error, as log q is a sum of three numbers below 64, with 7e-15 each.
_ROUNDED = 2e-14
_BLOCK = 1024  # nodes p that are computed at once, to need little memory


def most_orders(shift: float, most: int, *, tilted: bool) -> int:
    """Returns the highest order whose moments are in range, from 2 to ``most``."""
    largest = _LARGEST_TILTED if tilted else _LARGEST
    half = 0.5 + 0.5 * math.sqrt(1 + 8 * largest / max(shift * shift, 1e-12))
    return max(min(most, math.floor(half)), 2)


def whole_orders(slots: float, count: float, shift: float, most: int) -> np.ndarray:
    """Returns ``E X^n - 1`` at n = 0 .. most, (most + 1,); relative error 1e-13."""
    n = np.arange(most + 1.0)
    single = np.expm1(0.5 * shift * shift * n * (n - 1))[:, None]
    excess = _of_mean(single, count)
    if count < slots:
        # The other slots are 1: a binomial mixture of the orders of the terms' mean.
        excess = _shares(most, np.array(count / slots)) @ excess
    return excess[:, 0]


class Laplace:
    """Moments of X to powers from ``-largest`` to ``2 - nearest``, from E e^{-pX}."""

    def __init__(
        self, slots: float, count: float, shift: float, largest: float, nearest: float
    ) -> None:
        s = shift
        top = last_log_p(largest, s * s * (largest / slots + 1), slots, count, s)
        wide = max(2 * s * s + 4 * s - math.log(slots), 0.0)
        spacing = min(FINENESS / math.sqrt(largest + 4), 0.2)
        self.log_p, log_weight = log_places(wide, nearest, top, spacing)
        blocks = np.array_split(self.log_p, 1 + len(self.log_p) // _BLOCK)
        excess = [log_excess_transform(part, slots, count, s) for part in blocks]
        self.log_excess = np.concatenate(excess) + log_weight

    def log_excess_below(self, z: np.ndarray) -> np.ndarray:
        """Returns ``log(E X^-z - 1)`` for z > 0, (m,)."""
        return logsumexp(
            self.log_excess + z[:, None] * self.log_p, axis=-1
        ) - _log_gamma(z)

    def log_excess_between(self, a: np.ndarray) -> np.ndarray:
        """Returns ``log(E X^a - 1)`` for 1 < a < 2, (m,)."""
        total = logsumexp(self.log_excess - a[:, None] * self.log_p, axis=-1)
        return total + np.log(a * (a - 1)) - _log_gamma(2 - a)


class Tilted:
    """``E[X^n e^{-pY}]``, or with X in place of Y, at n = 0 .. most and nodes p."""

    def __init__(
        self, slots: float, count: float, shift: float, most: int, *, of_other: bool
    ) -> None:
        """Computes the moments; the exponent has Y if ``of_other``, else X."""
        s = shift
        # Logs of 1 / Y and of X under the tilt, from all terms and from one.
        log_growth = s * s * (2 * most if of_other else most / slots + 1)
        top = last_log_p(most, log_growth, slots, count, s)
        wide = 0.0 if of_other else max(s * s * most + 4 * s - math.log(slots), 0.0)
        spacing = FINENESS / math.sqrt(max(most, 16))
        self.log_p, log_weight = log_places(wide, 1.0, top, spacing)
        mass, mean, single = _tilted_moments(
            self.log_p - math.log(slots), s, most, -1.0 if of_other else 1.0
        )
        excess = _of_mean(single, count)
        # The transform from E e^{-q (A - 1)}, if rounding, times the count, matters.
        log_q = self.log_p - math.log(slots)
        centred = np.exp(log_centred_transform(log_q, s)) - np.exp(log_q)
        mass = np.where(log_q < FAR, centred, mass)
        idle = slots - count
        scale = mean + math.log(count / slots)
        if idle > 0:
            own = scale
            scale = np.logaddexp(own, math.log(idle / slots))
            part = np.exp(own - scale)
            # Of each order those up to it: higher ones may be infinite.
            shares = enumerate(_shares(most, part), 1)
            excess = np.stack([(row[:k] * excess[:k]).sum(axis=0) for k, row in shares])
        n = np.arange(most + 1.0)[:, None]
        rest = count * mass - np.exp(self.log_p) * (idle / slots) + log_weight
        self.log_moments = np.log1p(excess) + n * scale + rest

    def log_moments_of(self, n: ArrayLike, z: ArrayLike) -> np.ndarray:
        """Returns ``log E[X^n Y^-z]`` at whole n and z >= 1, (m,)."""
        z = np.asarray(z, np.float64)
        terms = self.log_moments[np.asarray(n)] + z[:, None] * self.log_p
        return logsumexp(terms, axis=-1) - _log_gamma(z)


def log_distance(slots: float, count: float, shift: float) -> float:
    """Returns ``log E (X - Y)² / sqrt(X Y)``, by two Mellin transforms."""
    s = shift
    # A term's x is tilted by at most 2s, which two terms share.
    top = last_log_p(1.0, (2 / min(count, 2) + 0.5) * s * s, slots, count, s)
    wide = max(1.5 * s * s + 4 * s - math.log(slots), 0.0)
    log_p, log_weight = log_places(wide, 0.5, top, _DISTANCE_SPACING)
    x, density = normal_places(s, -2 * s, 2 * s, 0.0)
    a, b = np.exp(s * x - 0.5 * s * s), np.exp(-s * x - 0.5 * s * s)
    share = np.exp(log_p) / slots
    one, other = np.exp(-share[:, None] * a), np.exp(-share[:, None] * b)
    with np.errstate(divide="ignore", invalid="ignore"):
        mass, first, second = (
            np.log(np.abs(in_blocks(one * (density * (a - b) ** k), other.T)))
            for k in range(3)
        )
        squares = math.log(count) + second - mass
        products = 2 * (first - mass) + math.log(max(count * (count - 1), 1e-300))
        idle = (share[:, None] + share) * (slots - count)
        terms = np.logaddexp(squares, products) + count * mass - idle
        each = log_weight + 0.5 * log_p
        terms += each[:, None] + each
    terms = np.where(np.isnan(terms), -np.inf, terms)
    return float(logsumexp(terms.reshape(-1))) - math.log(math.pi * slots * slots)


def last_log_p(
    z: float, log_growth: float, slots: float, count: float, shift: float
) -> float:
    """Returns the log p beyond which ``p^z e^{-pY}`` is negligible."""
    top = math.log(z + 45) + log_growth + WIDE * shift
    if count < slots:
        top = min(top, math.log((z + 45) / (1 - count / slots)))
    return top


def log_places(
    wide: float, nearest: float, top: float, spacing: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``log p`` of nodes, equally spaced above -wide, and log-weights."""
    u = np.arange(-wide - math.log(_FIRST_LOG_P / nearest), top + 1, spacing)
    left = np.exp(-(u + wide))
    return u - left, np.log1p(left) + math.log(spacing)


def _mode(log_q: np.ndarray, shift: float) -> np.ndarray:
    """Returns the minimum x of ``x²/2 + q e^{-sx - s²/2}``."""
    # Newton's method for w = log(s x): w + e^w = log(s² q) - s²/2 is convex in w.
    goal = log_q + 2 * np.log(shift) - 0.5 * shift * shift
    w = np.where(goal > 1, np.log(np.maximum(goal, 1.0)), goal)
    for _ in range(8):
        grown = np.exp(w)
        w = w - (w + grown - goal) / (1 + grown)
    return np.exp(w) / shift


def normal_places(
    shift: float, low: float, high: float, mode: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns equally spaced x, (N,), and the normal density times the spacing."""
    narrow = _NARROW_SPACING / math.sqrt(1 + shift * mode)
    spacing = min(_SPACING, _STRIP_SPACING / shift, narrow)
    low, high = low - WIDE, high + WIDE
    x = low + spacing * np.arange(math.ceil((high - low) / spacing))
    return x, np.exp(-0.5 * x * x) * (spacing / math.sqrt(2 * math.pi))


def _tilted_moments(
    log_q: np.ndarray, shift: float, most: int, sign: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ``log E e^{-qA}`` (sign 1; B: -1), A's tilted log mean, its moments."""
    s, v = shift, _mode(log_q, shift)
    # The spacing of the narrowest density; a wider one left errors of 1e-11.
    y, density = normal_places(s, 0.0, most * s, float(v.max()))
    # About the mode, -sign v, the exponent is -y²/2 - (v/s) bend.
    bend = np.maximum(np.expm1(sign * s * y) - sign * s * y, 0.0)
    n = np.arange(most + 1.0)
    powers = density[:, None] * np.exp(s * y[:, None] * n)
    with np.errstate(divide="ignore"):
        logs = np.log(in_blocks(np.exp(-(v / s)[:, None] * bend), powers)).T
    mass = logs[0] - 0.5 * v * v - v / s
    slope = logs[1] - logs[0] if most else np.zeros_like(v)
    # Of A over its mean, minus 1: (most + 1, P).
    single = np.expm1(logs - logs[0] - n[:, None] * slope)
    single[:2] = 0.0
    return mass, slope - sign * s * v - 0.5 * s * s, np.maximum(single, 0.0)


def log_centred_transform(log_q: np.ndarray, shift: float) -> np.ndarray:
    """Returns ``log log E e^{-q (A - 1)}`` at q < e^FAR, (P,)."""
    mode = float(_mode(np.array(FAR), shift))
    # The factor A² moves the density by 2s.
    x, density = normal_places(shift, -mode, 2 * shift, mode)
    away = np.expm1(shift * x - 0.5 * shift * shift)
    # E e^-y - 1 = E (e^-y - 1 + y) with y = q (A - 1), summed over q².
    y = np.exp(np.minimum(log_q, FAR))[:, None] * away
    small = np.abs(y) < 0.02
    z, y[small] = y[small], 1.0
    ratio = (np.expm1(-y) + y) / (y * y)
    ratio[small] = 1 / 2 - z * (1 / 6 - z * (1 / 24 - z / 120 * (1 - z / 6)))
    size = in_blocks(ratio, (away * away * density)[:, None])[:, 0]
    size = np.log(size) + 2 * log_q
    grown = np.log1p(np.exp(np.clip(size, -40.0, 700.0)))
    return np.where(size < -40, size, np.log(grown))


def log_excess_transform(
    log_p: np.ndarray, slots: float, count: float, shift: float
) -> np.ndarray:
    """Returns ``log(E e^{-pX} - e^{-p})`` at p > 0, (P,)."""
    p, log_q = np.exp(log_p), log_p - np.log(slots)
    far = log_q >= FAR
    exponent = np.log(count) + log_centred_transform(log_q[~far], shift)
    # log(e^{e^x} - 1), which is x for small e^x.
    grown = np.exp(np.clip(exponent, -40.0, 700.0))
    moderate = np.where(exponent < -40, exponent, grown + np.log(-np.expm1(-grown)))
    result = np.empty(log_p.shape)
    result[~far] = moderate - p[~far]
    if np.any(far):
        mass, _, _ = _tilted_moments(log_q[far], shift, 0, 1.0)
        one = p[far]
        whole = (count * mass - one * ((slots - count) / slots)) * (1 - _ROUNDED)
        # e^-p is negligible except with large noise.
        result[far] = whole + np.log(-np.expm1(-np.maximum(whole + one, 1e-300)))
    return result


def _of_mean(single: np.ndarray, count: float) -> np.ndarray:
    """Returns excess moments (K + 1, P) of the mean of ``count`` terms from one's."""
    total, number = single, 1
    for bit in bin(round(count))[3:]:
        total, number = _combined(total, number, total, number), 2 * number
        if bit == "1":
            total, number = _combined(total, number, single, 1), number + 1
    return total


def _combined(x: np.ndarray, a: float, y: np.ndarray, b: float) -> np.ndarray:
    """Returns excess moments of a mean of a + b terms, from x of a and y of b terms."""
    orders = len(x)
    share = _shares(orders - 1, np.array(a / (a + b)))
    result = np.zeros_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        for n in range(2, orders):
            one, other = x[: n + 1], y[n::-1]
            result[n] = share[n, : n + 1] @ (one + other + one * other)
    # NaN is a product of 0 and inf, which does not occur if all are finite.
    return np.where(np.isnan(result), np.inf, result)


def _shares(most: int, part: np.ndarray) -> np.ndarray:
    """Returns binomial probabilities (n, i, ...) of i in n, at rates ``part``."""
    n = np.arange(most + 1.0)
    column = (slice(None), slice(None)) + (None,) * part.ndim
    rest = np.maximum(n[:, None] - n, 0.0)
    with np.errstate(divide="ignore"):
        logs = _log_binomials(most)[column]
        logs = logs + n[None, :][column] * np.log(part)
        logs = logs + rest[column] * np.log1p(-part)
    return np.exp(logs)


@functools.cache
def _log_binomials(most: int) -> np.ndarray:
    n = np.arange(most + 1.0)
    return log_binomial(n[:, None], n)


_log_gamma = np.vectorize(math.lgamma, otypes=[np.float64])

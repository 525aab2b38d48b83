"""Tails of a sum of independent ``A - g B``, lognormal on both sides; NumPy only.

With ``A = e^{s x - s²/2}``, ``B = e^{-s x - s²/2}``, x standard normal, and the sum
``T = k + U_1 + ... + U_n`` of n copies of ``U = A - g B`` (or A, or -A),

    E[T_+] = (1/2 pi i) int K(p)^n e^{p k} / p² dp,   K(p) = E e^{p U},

P(T > 0) is the same with 1/p and the density of T at 0 with 1 in place of 1/p². K is
infinite for p > 0 where U has A in it, yet it is the boundary value of a function that
is analytic off the positive axis. So the contour comes from infinity below, runs to the
axis on its lower side, back to 0, and returns on the upper side: as the two halves are
conjugate only imaginary parts are left. Those of the part along the axis are integrals
of a positive function (`_jump`), by the path of steepest descent from the larger saddle
of ``p A - x²/2``: so what one rare large jump does keeps its *relative* precision. The
rest is a ray into the upper half plane from a point c, where the integrand is small.

Arrays are elementwise over the last axis (E,); nodes come first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxdp_episodic.numerics.skewed_terms import (
    EDGE,
    FINE,
    ROUGH,
    SQRT_2PI,
    Law,
    Terms,
    gauss,
    larger_saddle,
    law_on_axis,
    log_last,
    log_law,
)

# Slope of the ray against the vertical; shifts below it have light tails.
_LEAN, _LIGHT = 0.4, 0.25
# Nodes of the ray, and of the law of one term on it.
_NODES, _LIGHT_NODES = (64, 224), (128, 448)
_ROUNDS = (48, 12, 9)
# Furthest end of the ray in scales of the integrand, and where it has fallen enough.
_FURTHEST, _FALL = 90.0, -37.0
# More than the ray can be in units of its scale and of the integrand at c.
_LARGEST_RAY = 3.0
# Part of the axis is all that counts where the rest is so many nats down.
_NOTHING = -200.0
# Up to here K^n turns along the axis; further on it is the ray that follows it.
_LARGEST_PHASE = 6.0
# Largest log of p g B at the larger saddle; sums that are worked off at a time, to stay
# in the cache.
_LOG_OPPOSITE, _BLOCK = -0.5, 8
# Neighbours that differ in their constant only share a contour, so many at a time and
# of constants that differ by this factor at most, where no more nats cancel on it.
_SHARING, _ALIKE, _CANCELLED = 16, 1.5, 4.0


def log_tails(
    terms: Terms, *, finer: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logarithms of ``E[T_+]``, ``E[D; T > 0]`` and ``E[D² delta(T)]``.

    D is 1, or with ``log_g`` the sum of the B plus ``idle``: minus the derivative of
    T in g. n >= 2 and E T <= 0. NaN where more cancels than double precision has;
    ``finer`` takes twice the nodes, to compare with.
    """
    size = terms.count.shape[-1]
    result = np.empty((3, size))
    if terms.log_g is None and np.ptp(terms.count) == 0 == np.ptp(terms.shift):
        left = []
        for cut in _neighbours(terms.constant):
            middle = _taken(terms, cut[len(cut) // 2, None])
            result[:, cut], cancelled = _on_one_contour(
                middle, terms.constant[cut], finer
            )
            left.append(cut[cancelled & (len(cut) > 1)])
        left = np.concatenate(left)
    else:
        left = np.arange(size)
    for start in range(0, len(left), _BLOCK):
        cut = left[start : start + _BLOCK]
        own = _taken(terms, cut)
        result[:, cut], _ = _on_one_contour(own, own.constant, finer)
    return result[0], result[1], result[2]


def _neighbours(constant: np.ndarray) -> list[np.ndarray]:
    """Stretches of places whose constants are much the same."""
    groups, start = [], 0
    size = np.abs(constant)
    for end in range(1, len(size) + 1):
        is_full = end == len(size) or end - start == _SHARING
        if is_full or not 1 / _ALIKE <= size[end] / size[start] <= _ALIKE:
            groups.append(np.arange(start, end))
            start = end
    return groups


def _on_one_contour(
    terms: Terms, constant: np.ndarray, finer: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(3, E) of `log_tails`, and (E,) where much cancels: by the terms' contour.

    With one of ``terms`` its contour serves all constants; otherwise each has its own.
    """
    with np.errstate(all="ignore"):
        c, log_size = _crossing(terms)
        log_size = log_size + c * (constant - terms.constant)
        terms = terms._replace(constant=constant)
        ray, width = _ray(terms, c, log_size, finer)
        along = _jump(terms, c, finer) if terms.rising else None
        results, cancelled = [], np.zeros(constant.shape, bool)
        for m, on_ray in zip((2, 1, 0), ray, strict=True):
            scale = log_size + (2 - m) * np.log(c)
            if along is None:
                total, top = on_ray, scale
            else:
                part, log_part = along[2 - m]
                top = np.maximum(scale, log_part)
                total = on_ray * np.exp(scale - top) + part * np.exp(log_part - top)
            results.append(np.where(total > 0, np.log(total) + top, np.nan))
            cancelled |= ~(results[-1] > scale + np.log(width) - _CANCELLED)
    return np.stack(results), cancelled


def _taken(terms: Terms, cut: np.ndarray) -> Terms:
    fields: list[Any] = [f[cut] if isinstance(f, np.ndarray) else f for f in terms]
    return Terms(*fields)


def _factors(terms: Terms, law: Law) -> tuple:
    """What K^n is multiplied with in the three integrands."""
    if terms.log_g is None:
        return 1.0, 1.0, 1.0
    n, idle = terms.count, terms.idle
    first, second = law.first / law.whole, law.second / law.whole
    square = n * (n - 1) * first**2 + n * second + 2 * idle * n * first + idle**2
    return 1.0, n * first + idle, square


# --- Where the ray starts ---


def _crossing(terms: Terms) -> tuple[np.ndarray, np.ndarray]:
    """The first minimum of ``|K(p)^n e^{pk}| / p²`` on the axis, and its log there.

    Or where that is so small that the rest does not count, or K^n begins to oscillate.
    """
    s, n = terms.shift, terms.count
    deviation = np.sqrt(n * np.expm1(s * s))
    low = np.log(1e-3 / deviation)
    if terms.log_g is not None:
        low = low - np.maximum(terms.log_g, 0.0)
    high = low + 90.0
    if terms.rising:
        high = np.minimum(high, log_last(s) - 0.02)
    low = np.minimum(low, high - 1.0)
    left, right = low, high
    best = size = low
    for number in _ROUNDS:
        log_p = left + (right - left) * np.linspace(0, 1, number)[:, None]
        p = np.exp(log_p)
        law = law_on_axis(p, terms, ROUGH)
        power = n * log_law(law)
        size = np.real(power) + p * terms.constant - 2 * log_p
        size = np.where(np.isnan(size), np.inf, size)
        stop = np.diff(size, axis=0) > 0
        if terms.rising:
            stop |= size[:-1] + 2 * log_p[:-1] < _NOTHING
            stop |= np.abs(np.imag(power[1:])) > _LARGEST_PHASE
            if terms.log_g is not None:
                # On the path of steepest descent e^{-p g B} grows.
                x = larger_saddle(log_p[1:], s)
                stop |= log_p[1:] + terms.log_g - s * x - 0.5 * s * s > _LOG_OPPOSITE
        index = np.where(stop.any(axis=0), np.argmax(stop, axis=0), number - 1)

        def at(rows: np.ndarray, move: int = 0, index: np.ndarray = index):
            place = np.clip(index + move, 0, len(rows) - 1)
            return np.take_along_axis(rows, place[None], axis=0)[0]

        left, right = at(log_p, -1), at(log_p, 1)
        best, size = at(log_p), at(size)
    return np.exp(best), size


# --- The ray ---


def _path(p: np.ndarray, terms: Terms, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes v of one term's law, (N, M, E), and dv: bent where ``e^{pA}`` would grow.

    Far to the right ``p A`` is turned to the negative axis.
    """
    s = terms.shift
    log_size, angle = np.log(np.abs(p)), np.angle(p)
    last = log_last(s)
    # Where the ray is vertical, e^{pA} is no larger than at its start.
    growth = np.where(s < _LIGHT, np.log(np.maximum(np.real(p), 1e-300)), log_size)
    growth = growth if terms.rising else log_size
    turn = larger_saddle(np.minimum(growth, last), s)
    turn = np.where(growth < last, turn, (1 - (growth - last)) / s)
    slope = np.minimum(2.0 * s, 2.5)
    end = (math.log(60.0) - log_size + 0.5 * s * s) / s
    high = np.minimum(np.maximum(end, turn + 3 / s), EDGE + s)
    low = -10.0 + 0 * high
    if terms.log_g is not None:
        # |e^{-p g B}| has vanished.
        fall = np.maximum(np.cos(angle), 0.3)
        gone = (log_size + terms.log_g - 0.5 * s * s - np.log(60.0 / fall)) / s
        low = np.maximum(low, np.minimum(gone, high - 2))
    spacing = (high - low) / (nodes - 1)
    w = low + spacing * np.arange(nodes)[:, None, None]
    bent = 0.5 * (1 + np.tanh(slope * (w - turn)))
    height = ((math.pi if terms.rising else 0.0) - angle) / s
    rise = 2 * slope * height * bent * (1 - bent)
    return w + 1j * height * bent, spacing * (1 + 1j * rise)


def _law_off_axis(p: np.ndarray, terms: Terms, nodes: int) -> tuple[np.ndarray, Law]:
    """``n log K``, and what it is made of, at complex p (M, E)."""
    s = terms.shift
    v, dv = _path(p, terms, nodes)
    dv = dv / SQRT_2PI
    normal = -0.5 * v * v
    exponent = np.exp(s * v - 0.5 * s * s) * (p if terms.rising else -p)
    opposite = 0.0
    if terms.log_g is not None:
        opposite = np.exp(-s * v - 0.5 * s * s)
        exponent = exponent - p * np.exp(terms.log_g) * opposite
    grown = np.exp(normal + exponent) * dv
    whole = np.sum(grown, axis=0)
    # Near 1 the law's own mass is taken off term by term, if all of it is there.
    complete = np.real(v[-1]) > 9.2
    apart = np.sum(grown - np.exp(normal) * dv, axis=0)
    excess = np.where(complete, apart, whole - 1)
    first = second = whole
    if terms.log_g is not None:
        first, second = (np.sum(grown * opposite**k, axis=0) for k in (1, 2))
    law = Law(whole, excess, first, second)
    return terms.count * log_law(law), law


def _ray(
    terms: Terms, c: np.ndarray, log_size: np.ndarray, finer: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """The ray's shares of the three integrals, scaled by their size at c; its scale."""
    # Of light tails the ray is vertical: K falls off like a Gaussian's.
    lean = np.where(terms.shift < _LIGHT, 0.0, _LEAN)
    direction = 1j + (lean if terms.rising else -lean)
    law = law_on_axis(c[None], terms, ROUGH)
    scale = 1 / np.sqrt(_variance(terms, c, law) + 2 / c**2)
    base = log_size + 2 * np.log(c)

    def points(u: np.ndarray) -> np.ndarray:
        return c + np.sinh(u) * scale * direction

    scouts = np.linspace(1.2, math.asinh(_FURTHEST), 14)[:, None]
    p = points(scouts)
    power = _law_off_axis(p, terms, 96)[0]
    fallen = np.real(power + p * terms.constant) - base < _FALL
    index = np.where(fallen.any(axis=0), np.argmax(fallen, axis=0), len(scouts) - 1)
    end = scouts[index, 0]
    if c.size == 1:  # for all of them
        end = end.max(keepdims=True)
    ray_nodes, law_nodes = _LIGHT_NODES if np.any(lean == 0) else _NODES
    if finer:
        ray_nodes, law_nodes = 2 * ray_nodes, 2 * law_nodes
    place, weight = (a[:, None] for a in gauss(ray_nodes, 1))
    u = place * end
    p = points(u)
    power, law = _law_off_axis(p, terms, law_nodes)
    value = np.exp(power + p * terms.constant - base) * direction
    value = value * np.cosh(u) * scale * weight * end / math.pi
    used = (base > _NOTHING + 10) | (not terms.rising)
    shares = [
        np.where(used, np.sum(np.imag(value * f / (p / c) ** m), axis=0), 0.0)
        for m, f in zip((2, 1, 0), _factors(terms, law), strict=True)
    ]
    # The integrand is largest at c: a law that is not resolved shows.
    lost = ~(np.abs(shares[0]) <= _LARGEST_RAY * scale)
    return [np.where(lost, np.nan, share) for share in shares], scale


def _variance(terms: Terms, c: np.ndarray, law: Law) -> np.ndarray:
    """Of the tilted sum, by differences of ``log K`` about c."""
    step = 0.05
    moved = c * np.exp(np.array([[-step], [step]]))
    before, after = np.real(log_law(law_on_axis(moved, terms, ROUGH)))
    middle = np.real(log_law(law))[0]
    # Second derivative in p from unequal steps.
    low, high = c - moved[0], moved[1] - c
    second = 2 * ((after - middle) / high - (middle - before) / low) / (low + high)
    return terms.count * np.maximum(second, 0.0)


# --- Along the axis ---


def _jump(
    terms: Terms, c: np.ndarray, finer: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The axis' share of the three integrals: factor and logarithm of its scale."""
    s, n = terms.shift, terms.count
    # The logarithm of p falls by s as x grows by 1, and e^{pk} with it.
    panels = 4 * math.ceil(1 + s.max()) * (2 if finer else 1)
    start = larger_saddle(np.log(c), s)
    end = np.maximum(start + 1, s + EDGE)
    place, weight = (a[:, None] for a in gauss(24, panels))
    x = start + (end - start) * place
    log_p = np.log(x / s) - s * x + 0.5 * s * s
    p = np.exp(log_p)
    law = law_on_axis(p, terms, FINE)
    turned = n * np.log1p(1j * np.imag(law.whole) / np.real(law.whole))
    real = Law(*(np.real(part) for part in law))
    size = n * np.real(log_law(real)) + np.real(turned) + p * terms.constant
    size = size + np.log(p * (s - 1 / x) * (end - start) * weight / math.pi)
    phase = np.exp(1j * np.imag(turned))
    shares = []
    for m, f in zip((2, 1, 0), _factors(terms, law), strict=True):
        log_part = size - m * log_p
        top = np.max(log_part, axis=0)
        shares.append(
            (np.sum(np.exp(log_part - top) * np.imag(phase * f), axis=0), top)
        )
    return shares

"""Divergences in many digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mpmath as mp

Mixture = Sequence[tuple[Any, Any]]
"""Weights and means of unit-variance normals."""


def density(mixture: Mixture) -> Callable[[Any], Any]:
    """Density of a mixture of N(mean, 1), given as (weight, mean) pairs."""
    parts = [(mp.mpf(w), mp.mpf(m)) for w, m in mixture if w != 0]
    scale = 1 / mp.sqrt(2 * mp.pi)
    return lambda x: scale * mp.fsum(w * mp.exp(-((x - m) ** 2) / 2) for w, m in parts)


def sampled_pair(p: float, shift: float) -> tuple[Mixture, Mixture]:
    """(1-p) N(0) + p N(s) and N(0)."""
    weight, s = mp.mpf(p), mp.mpf(shift)
    return [(1 - weight, 0), (weight, s)], [(1, 0)]


def symmetric_pair(p: float, r_in: float, shift: float) -> tuple[Mixture, Mixture]:
    """(1-p) N(0) + p(1-r) N(-s) + p r N(s) and (1-p) N(0) + p N(-s)."""
    w, r, s = mp.mpf(p), mp.mpf(r_in), mp.mpf(shift)
    return [(1 - w, 0), (w * (1 - r), -s), (w * r, s)], [(1 - w, 0), (w, -s)]


def zeroed_pairs(p: float, r_in: float, shift: float):
    """The pairs of zero_out: of losses above 0 forward, and of those below 0."""
    w, r, s = mp.mpf(p), mp.mpf(r_in), mp.mpf(shift)
    null, kept, reached = 1 - w + w * r, w * (1 - r), w * r
    upper = [(1 - w, 0), (kept, -s), (reached, s)], [(null, 0), (kept, -s)]
    return upper, ([(1 - w, 0), (w, s)], [(null, 0), (kept, s)])


# --- Of mixtures of Gaussians ---


def mp_tails(top: Mixture, bottom: Mixture, u: Any) -> tuple[Any, Any]:
    """``H_g`` and ``g Q(L > u)``, ``g = e^u``, if the loss L increases along the line.

    By normal tails at the place where the loss is u; at the working precision.
    """
    pair = [[(mp.mpf(w), mp.mpf(m)) for w, m in side] for side in (top, bottom)]

    def excess(x):
        p, q = (mp.fsum(w * mp.exp(m * (x - m / 2)) for w, m in one) for one in pair)
        return mp.log(p / q) - u

    low, high = mp.mpf(-1), mp.mpf(1)
    while excess(high) <= 0:
        high *= 2
        if high > 1e30:  # no loss is as large as u
            return mp.mpf(0), mp.mpf(0)
    while excess(low) >= 0:
        low *= 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    # An error of 1e-18 at this place does not change the profile.
    x = mp.findroot(excess, (low, high), solver="illinois", tol=1e-36, maxsteps=300)
    p, q = (
        mp.fsum(w * mp.erfc((x - m) / mp.sqrt(2)) / 2 for w, m in one) for one in pair
    )
    return p - mp.exp(mp.mpf(u)) * q, mp.exp(mp.mpf(u)) * q


def mirrored(top: Mixture, bottom: Mixture) -> tuple[Mixture, Mixture]:
    """The pair of the other direction; its loss increases, too."""
    return [(w, -m) for w, m in bottom], [(w, -m) for w, m in top]


def mp_gaussian_profile(shift: Any, g: Any):
    """D(shift, g) = H_g(N(shift,1) || N(0,1)), at the working precision."""
    mu, eps = mp.mpf(shift), mp.log(g)
    return mp.ncdf(mu / 2 - eps / mu) - g * mp.ncdf(-mu / 2 - eps / mu)


def mp_sampled_profiles(u: Any, p: Any, shift: Any) -> tuple[Any, Any]:
    """Both hockey sticks at g = e^u of `sampled_pair`, at the working precision."""
    g, p = mp.exp(mp.mpf(u)), mp.mpf(p)
    forward = 1 - g
    if g > 1 - p:
        forward = p * mp_gaussian_profile(shift, 1 + (g - 1) / p)
    k = 1 - g * (1 - p)
    backward = k * mp_gaussian_profile(shift, g * p / k) if k > 0 else mp.mpf(0)
    return forward, backward


# --- Rényi divergences of named mechanisms ---


def mp_gaussian(alpha, sigma):
    return mp.mpf(alpha) / (2 * mp.mpf(sigma) ** 2)


def mp_laplace(alpha, scale):
    """From E_Q[(P/Q)^alpha], the three pieces of the line integrated by hand."""
    a, s = mp.mpf(alpha), 1 / mp.mpf(scale)
    if mp.isinf(a):
        return s
    left = mp.exp(-s * a) / 2  # x < 0, P = e^{x-s}/2, Q = e^x/2
    right = mp.exp(s * (a - 1)) / 2  # x > s: P/Q = e^s, Q(x > s) = e^{-s}/2
    # 0 < x < s: P^a Q^{1-a} = e^{a(x-s) - (1-a)x}/2 = e^{-as} e^{(2a-1)x}/2
    rate = 2 * a - 1
    middle = mp.exp(-a * s) * mp.expm1(rate * s) / rate / 2
    return mp.log(left + middle + right) / (a - 1)


def mp_response(alpha, epsilon):
    a, e = mp.mpf(alpha), mp.exp(mp.mpf(epsilon))
    if mp.isinf(a):
        return mp.mpf(epsilon)
    t, f = e / (1 + e), 1 / (1 + e)
    return mp.log(t**a * f ** (1 - a) + f**a * t ** (1 - a)) / (a - 1)

"""Rényi divergences of named mechanisms from their definitions, by mpmath."""

import mpmath as mp


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

"""Binomial coefficients in log space."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# S(n) = log(n!) - log(sqrt(2 pi n) (n / e)^n) for n = 1 .. 15, from 50 digits; the
# entry for n = 0 is never used.
_STIRLING_ERROR = np.array(
    [
        0.0,
        0.08106146679532726,
        0.0413406959554093,
        0.02767792568499834,
        0.020790672103765093,
        0.016644691189821193,
        0.013876128823070748,
        0.011896709945891771,
        0.010411265261972096,
        0.009255462182712733,
        0.00833056343336287,
        0.00757367548795184,
        0.00694284010720953,
        0.006408994188004207,
        0.0059513701127588475,
        0.005554733551962801,
    ]
)


def log_binomial(n: Array, k: Array) -> Array:
    """``log(n! / (k! (n-k)!))`` for whole numbers ``0 <= k <= n``."""
    xp = namespace(n, k)
    small = xp.minimum(k, n - k)
    inside = small >= 1
    m = xp.where(inside, small, 1.0)
    rest = xp.where(inside, n - m, 1.0)
    total = m + rest
    # -log(1 - m/n) = log(1 + m/(n-m)): XLA's log1p is poor (3e-14) near -0.3.
    entropy = m * xp.log(total / m) + rest * xp.log1p(m / rest)
    spread = 0.5 * xp.log(total / (2 * np.pi * m * rest))
    correction = stirling_error(total) - stirling_error(m) - stirling_error(rest)
    edge = xp.where(small == 0, 0.0, -xp.inf)
    return xp.where(inside, entropy + (spread + correction), edge)


def stirling_error(n: Array) -> Array:
    """``S(n)`` for whole ``n >= 1``: a table, then Stirling's series to 1e-16."""
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

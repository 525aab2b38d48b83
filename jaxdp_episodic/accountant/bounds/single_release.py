"""RDP curves and privacy profiles of one release, as pure JAX functions.

RDP functions take the orders as a vector (K,), consumed as the trailing axis, and
parameters of shape (...,); they return (..., K). Profiles are elementwise. Nothing is
validated here. A result that would underflow is rounded up to the smallest normal
number instead of down to 0.
"""

from __future__ import annotations

import math

from jaxdp_episodic.accountant.numerics.loops import Array, namespace
from jaxdp_episodic.accountant.numerics.special import log_saturating_tail

# Taylor coefficients of (e^x - 1 - x) / x² for |x| <= 1/2: the next term is < 1e-19.
_REMAINDER_COEFFICIENTS = tuple(1 / math.factorial(k) for k in range(2, 18))


def gaussian_rdp(orders: Array, noise_multiplier: Array) -> Array:
    """``alpha / (2 sigma²)``.

    Reference: Mironov (2017), arXiv:1702.07476, Proposition 7.
    """
    inverse = 1 / noise_multiplier[..., None]
    return _round_up((0.5 * orders * inverse) * inverse, inverse > 0)


def laplace_rdp(orders: Array, scale: Array) -> Array:
    """``log M / (alpha - 1)`` of two Laplace distributions at distance ``s = 1/scale``.

    ``M = (alpha e^{(alpha-1)s} + (alpha-1) e^{-alpha s}) / (2 alpha - 1)``. The linear
    terms of the exponentials cancel, and so does the 1: ``M - 1 = [alpha f((alpha-1)s)
    + (alpha-1) f(-alpha s)] / (2 alpha - 1)`` with ``f(x) = e^x - 1 - x >= 0``.

    Reference: Mironov (2017), arXiv:1702.07476, Proposition 6.
    """
    xp = namespace(orders, scale)
    shift = 1 / scale[..., None]
    t = orders - 1
    rise = t * shift
    near = rise <= 1
    rise_near = xp.where(near, rise, 0.0)
    fall_near = xp.where(near, -orders * shift, 0.0)
    excess = orders * _exp_remainder(rise_near) + t * _exp_remainder(fall_near)
    log_moment_near = xp.log1p(excess / (orders + t))
    ratio = t / orders * xp.exp(-(orders + t) * shift)  # of the two exponentials
    log_moment_far = rise + xp.log1p(ratio) - xp.log1p(t / orders)
    return _round_up(xp.where(near, log_moment_near, log_moment_far) / t, shift > 0)


def randomized_response_rdp(orders: Array, epsilon: Array) -> Array:
    """``log M / (alpha - 1)`` of a bit and its opposite, each told by its bearer.

    ``M = (e^{alpha eps} + e^{(1-alpha) eps}) / (1 + e^eps)``, in which nothing cancels
    once written
    ``M - 1 = (1 - e^{-alpha eps}) (e^{(alpha-1) eps} - 1) / (1 + e^{-eps})``.

    Reference: Mironov (2017), arXiv:1702.07476, Proposition 5.
    """
    xp = namespace(orders, epsilon)
    eps = epsilon[..., None]
    t = orders - 1
    near = t * eps <= 1
    safe = xp.where(near, eps, 0.0)
    excess = -xp.expm1(-orders * safe) * xp.expm1(t * safe)
    log_moment_near = xp.log1p(excess / (1 + xp.exp(-safe)))
    correction = xp.log1p(xp.exp(-(orders + t) * eps)) - xp.log1p(xp.exp(-eps))
    rdp = xp.where(near, log_moment_near, t * eps + correction) / t
    return _round_up(rdp, eps > 0)


def interpolated_rdp(orders: Array, values: Array) -> Array:
    """RDP between whole orders, by convexity of ``(alpha - 1) rdp(alpha)``.

    ``values`` is (..., T): upper bounds at the orders 2 … T + 1. The log-moment
    ``(alpha - 1) rdp(alpha)`` is convex and 0 at ``alpha = 1`` (van Erven and Harremoës
    2014, arXiv:1206.2459, Corollary 2), so the chord is an upper bound. Orders beyond
    T + 1 give ``inf``.
    """
    xp = namespace(orders, values)
    num_values = values.shape[-1]
    whole = xp.floor(orders)
    weight = orders - whole
    index = whole.astype(int) - 2
    below = xp.take(values, xp.clip(index, 0, num_values - 1), axis=-1)
    above = xp.take(values, xp.clip(index + 1, 0, num_values - 1), axis=-1)
    # Shares of the two ends in the log-moment, divided by alpha - 1. At whole orders
    # the upper end has no share, also if it is infinite; below 2 the lower end.
    t = orders - 1
    from_below = xp.where(index >= 0, below * ((1 - weight) * (whole - 1) / t), 0.0)
    from_above = xp.where(weight > 0, above * (weight * whole / t), 0.0)
    known = orders <= num_values + 1
    return xp.where(known, from_below + from_above, xp.inf)


def gaussian_delta(epsilon: Array, noise_multiplier: Array) -> Array:
    """``Phi(s/2 - eps/s) - e^eps Phi(-s/2 - eps/s)`` with ``s = 1/sigma``.

    The difference cancels. The same number is ``E[1 - e^{-s (Z - t)}; Z > t]``, ``t =
    eps/s - s/2``: the expectation of ``(1 - e^{eps - L})_+`` over the privacy loss L.

    Reference: Balle and Wang (2018), arXiv:1805.06530, Theorem 8.
    """
    xp = namespace(epsilon, noise_multiplier)
    shift = 1 / noise_multiplier
    regular = (shift > 0) & xp.isfinite(shift) & xp.isfinite(epsilon)
    s = xp.where(regular, shift, 1.0)
    t = xp.where(regular, epsilon, 0.0) / s - s / 2
    delta = xp.minimum(xp.exp(log_saturating_tail(t, s)), 1.0)
    limit = xp.where(xp.isinf(shift), 1.0, 0.0)
    return xp.where(regular, _round_up(delta, regular), limit)


def laplace_delta(epsilon: Array, scale: Array) -> Array:
    """``1 - e^{(epsilon - s)/2}`` for ``epsilon < s = 1/scale``, else 0.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 3.
    """
    xp = namespace(epsilon, scale)
    return -xp.expm1(_shortfall(epsilon, 1 / scale) / 2)


def randomized_response_delta(epsilon: Array, pure_epsilon: Array) -> Array:
    """``(e^eps0 - e^eps) / (1 + e^eps0)`` for ``eps < eps0``, else 0."""
    xp = namespace(epsilon, pure_epsilon)
    gap = _shortfall(epsilon, pure_epsilon)
    return -xp.expm1(gap) / (1 + xp.exp(-pure_epsilon))


def _shortfall(epsilon: Array, limit: Array) -> Array:
    """``min(epsilon - limit, 0)``; ``-inf`` at an infinite limit, also at inf - inf."""
    xp = namespace(epsilon, limit)
    finite = xp.isfinite(limit)
    gap = xp.minimum(epsilon - xp.where(finite, limit, 0.0), 0.0)
    return xp.where(finite, gap, -xp.inf)


def _round_up(value: Array, positive: Array) -> Array:
    """At least the smallest normal number where ``positive``; 0 elsewhere."""
    xp = namespace(value, positive)
    return xp.where(positive, xp.maximum(value, xp.finfo(value.dtype).tiny), 0.0)


def _exp_remainder(x: Array) -> Array:
    """``e^x - 1 - x``: Taylor near 0, where the difference cancels."""
    xp = namespace(x)
    small = xp.abs(x) <= 0.5
    near = xp.where(small, x, 0.0)
    series = xp.zeros_like(near)
    for coefficient in reversed(_REMAINDER_COEFFICIENTS):
        series = series * near + coefficient
    return xp.where(small, near * near * series, xp.expm1(x) - x)

"""The excess of a power over its tangent, ``f_a(v) = (1+v)^a - 1 - a v``.

Computed without cancellation at small v and without overflow at large powers. With
alpha = 1 + t, f is f_alpha if the direction is "forward", f_{-t} if "backward", and the
sum of both if "symmetric".
"""

from __future__ import annotations

import math

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import Array, namespace
from jaxdp_episodic.accountant.numerics.special import polynomial

# Terms of the series of f_a for |a log(1 + v)| <= 1: the next is 1e-15 of the sum.
_SERIES_TERMS = 17
SMALL = 0.1  # absolute value below which the following terms are exact to 1e-14
# ``(e^z - 1 - z) / z²`` and ``(y e^y - e^y + 1) / y²``.
REMAINDER = np.array([1 / math.factorial(k + 2) for k in range(9)])
SLOPE = np.array([(k + 1) / math.factorial(k + 2) for k in range(9)])


def scaled_power_excess(y: Array, b: Array, t: Array, direction: str) -> Array:
    """Returns ``e^b f(e^y - 1)``; e^y alone may overflow."""
    xp = namespace(y, b, t)
    alpha = 1 + t
    base = xp.exp(b)
    small = xp.abs(alpha * y) <= 1
    y_small = xp.where(small, y, 0.0)
    y_large = xp.where(small, 1.0, y)
    tilted = xp.exp(y_large + b)  # density of P
    linear = t * (tilted - base)
    near, away = 0.0, 0.0
    if direction != "backward":
        near = near + _excess_series(alpha, alpha, y_small)
        # (1+v)^alpha - 1 - alpha v = (1+v) ((1+v)^t - 1) - t v
        away = away + _times_expm1(y_large + b, tilted, t * y_large) - linear
    if direction != "forward":
        near = near + _excess_series(-t, alpha, y_small)
        # (1+v)^{-t} - 1 + t v
        away = away + _times_expm1(b, base, -t * y_large) + linear
    near = base * (t * alpha) * y_small * y_small * near
    return xp.where(small, near, away)


def scaled_power_excess_derivatives(
    y: Array, b: Array, t: Array, direction: str
) -> tuple[Array, Array, Array]:
    """Returns ``e^b f(e^y - 1)`` and its first two derivatives in t."""
    xp = namespace(y, b, t)
    x = t * y
    base, tilted = xp.exp(b), xp.exp(y + b)
    tiny, short = xp.abs(y) < SMALL, xp.abs(x) < SMALL
    square = base * (y * y)
    value = first = second = xp.zeros_like(square)
    if direction != "backward":
        # (1+v) y - v, the slope of f_alpha at t = 0
        near = square * polynomial(SLOPE, y)
        slope = xp.where(tiny, near, tilted * y - (tilted - base))
        power = xp.exp(x + y + b)
        # (1+v) (e^x - 1 - x)
        rest = xp.where(short, tilted * _exp_remainder(x), power - tilted * (1 + x))
        value, first = rest + t * slope, y * (rest + tilted * x) + slope
        second = y * y * power
    if direction != "forward":
        # v - y, the slope of f_{-t} at t = 0
        near = square * polynomial(REMAINDER, y)
        slope = xp.where(tiny, near, tilted - base * (1 + y))
        power = xp.exp(b - x)
        rest = xp.where(short, base * _exp_remainder(-x), power - base * (1 - x))
        value = value + rest + t * slope
        first = first + slope - y * (rest - base * x)
        second = second + y * y * power
    return value, first, second


def _exp_remainder(x: Array) -> Array:
    """Returns ``e^x - 1 - x`` for small x."""
    return x * x * polynomial(REMAINDER, x)


def _times_expm1(log_factor: Array, factor: Array, exponent: Array) -> Array:
    """Returns ``factor (e^exponent - 1)``; e^exponent alone may overflow."""
    xp = namespace(log_factor, factor, exponent)
    short = exponent <= 1.0
    moderate = factor * xp.expm1(xp.where(short, exponent, 0.0))
    power = xp.exp(xp.where(short, -xp.inf, exponent + log_factor))
    return xp.where(short, moderate, power - factor)


def _excess_series(power: Array, scale: Array, y: Array) -> Array:
    """Returns ``f_a(e^y - 1) / (a (a-1) y²)``; |scale y| <= 1, scale >= |a|, 1."""
    # f_a = sum_{k>=2} (a^k - a) y^k / k!, and (a^k - a)/(a (a-1)) = 1 + a + … +
    # a^{k-2}.
    xp = namespace(power, scale, y)
    z, ratio = scale * y, power / scale
    coefficient = xp.ones_like(power)
    coefficients = [coefficient / 2.0]
    inverse = 1.0
    for j in range(1, _SERIES_TERMS):
        inverse = inverse / scale
        coefficient = ratio * coefficient + inverse
        coefficients.append(coefficient / math.factorial(j + 2))
    total = coefficients[-1] * xp.ones_like(z)
    for term in reversed(coefficients[:-1]):
        total = total * z + term
    return total


def log_expm1(x: Array) -> Array:
    """Returns ``log(e^x - 1)`` for x > 0."""
    xp = namespace(x)
    return xp.where(x > 30, x, xp.log(xp.expm1(xp.minimum(x, 30.0))))

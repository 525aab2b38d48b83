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

SMALL = 0.1  # absolute value below which the following terms are exact to 1e-14
# ``(e^z - 1 - z) / z²`` and ``(y e^y - e^y + 1) / y²``.
REMAINDER = np.array([1 / math.factorial(k + 2) for k in range(9)])
SLOPE = np.array([(k + 1) / math.factorial(k + 2) for k in range(9)])


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


def log_expm1(x: Array) -> Array:
    """Returns ``log(e^x - 1)`` for x > 0."""
    xp = namespace(x)
    return xp.where(x > 30, x, xp.log(xp.expm1(xp.minimum(x, 30.0))))

"""Normal tails in log space and excesses of powers, to the last digits of float64.

m is the Mills ratio ``Q(x) / phi(x)`` and n = -m'. ``jax.scipy.special`` is not used:
its ``log_ndtr`` has an error of 2e-11 below -20, and its ``erfcx`` is 0 near 26.6.
"""

from __future__ import annotations

import math

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import Array, namespace
from jaxdp_episodic.accountant.numerics.quadrature import gauss_legendre

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)

# Coefficients of powers of tau = (x - 3) / (x + 5), which maps [-1, inf] to [-1, 1],
# for m(x) (x + 3 / (x + 3)) and n(x) (x + 3 / (x + 3))². Both are between 0.9 and 1.8
# and tend to 1. Interpolated with 40 digits at 96 Chebyshev nodes, truncated where
# coefficients fall below 3e-17, and written in powers of tau (harmless here: their
# absolute values sum to 1.8 and 2.5).
# fmt: off
_MILLS_RATIO = np.array([
    1.0660660454853614, -0.18075271781056554, 0.1723546760033981, -0.0552592076542068,
    -0.016804814519288325, 0.00046419556138037544, 0.05736571688538614,
    -0.09094426117866614, 0.07788086424433749, -0.041492259576634674,
    0.012418971555145712, -0.0008343944494972484, -0.00032048573350551514,
    -0.00042158450681707146, 0.00033055912954732184, -1.5290808008460942e-05,
    -3.855467135764731e-05, -8.56745456309666e-06, 1.166053488687616e-05,
    1.807212986653864e-06, -2.046299983156275e-06, -8.605546929750314e-07,
    4.0775280482155953e-07, 2.303420521914731e-07, -5.1589489627776953e-08,
    -4.6455394309260254e-08, 4.1486798788254785e-09, 4.406703459851821e-09,
])
# fmt: on
# fmt: off
_MILLS_SLOPE = np.array([
    1.0563065224037038, -0.07206540392380426, -0.12744127154429424, 0.2958369660958192,
    -0.1489557578412889, -0.1529941772904773, 0.29440748760324265, -0.17997576674148036,
    -0.01145222532826946, 0.0873404467265448, -0.03945789356598183,
    -0.02297913634244888, 0.034645736033211263, -0.014897901960859616,
    0.0006601995596122448, 0.0006824788163219668, 0.0009401982085742686,
    -0.0006375743151428466, -6.508970880985258e-05, 8.061669842522652e-05,
    5.354836576974497e-05, -2.45370335340224e-05, -1.3401588442502249e-05,
    2.797285997002619e-06, 4.0727509913500524e-06, -2.401146465123656e-07,
    -7.238113148084802e-07, -5.222698181292731e-08, 7.492625805643554e-08,
    7.863305587998556e-09,
])
# fmt: on
# For log(1 + x) = 2 artanh(z), z = x / (2 + x), on |z| <= 1/3: minimax in z² of
# (artanh(z) / z - 1) / z², to 5e-17, from 40 digits.
# fmt: off
_ARTANH = np.array([
    0.3333333333333333, 0.20000000000007292, 0.1428571428355438, 0.11111111358713932,
    0.09090894718066429, 0.07692785032479312, 0.06657072104827468, 0.06000536404795356,
    0.04400369243072337, 0.08082022805971766,
])
# fmt: on
# Smallest x for which the polynomials hold; below it the complement is used.
_LEFT_END = -1.0
# Number of elements up to which one matrix product is faster than Horner's scheme.
_FEW = 256
# Gauss-Legendre nodes that integrate n from x over a length max(1, x/2), to 1e-16.
_SLOPE_NODES = 8


def log1p_bounded(x: Array) -> Array:
    """Returns ``log(1 + x)`` for ``-1/2 <= x <= 1``; relative error below 1e-15."""
    # XLA's own takes six times as long on the CPU, without vector instructions.
    xp = namespace(x)
    if xp is np:
        return np.log1p(x)
    z = x / (2 + x)
    square = z * z
    return 2 * (z + z * square * polynomial(_ARTANH, square))


def log_add(x: Array, y: Array) -> Array:
    """Returns ``log(e^x + e^y)``, of which at most one may be infinite."""
    xp = namespace(x, y)
    if xp is np:
        return np.logaddexp(x, y)
    # Not by abs, whose derivative at 0 is 1 in JAX, not 0.
    down = xp.minimum(x - y, y - x)
    return xp.maximum(x, y) + log1p_bounded(xp.exp(down))


def log_normal_density(x: Array) -> Array:
    """Returns ``log phi(x)``, phi the density of N(0, 1); *exact*."""
    return -0.5 * x * x - _LOG_SQRT_2PI


def log_normal_tail(x: Array) -> Array:
    """Returns ``log Q(x)``, Q(x) = P(N(0, 1) > x); *exact* up to rounding."""
    xp = namespace(x)
    positive = x >= 0
    size = xp.where(positive, x, xp.minimum(-x, 1e150))
    density, mills = log_normal_density(size), _mills_ratio(size)
    # Q(x) = 1 - Q(-x)
    complement = xp.log1p(-xp.exp(density) * mills)
    return xp.where(positive, density + xp.log(mills), complement)


def log_mills(x: Array) -> Array:
    """Returns ``log(Q(x) / phi(x))``, the logarithm of the Mills ratio; *exact*."""
    xp = namespace(x)
    right = x >= _LEFT_END
    size = xp.where(right, x, -x)
    density, mills = log_normal_density(size), _mills_ratio(size)
    left = xp.log1p(-xp.exp(density) * mills) - density
    return xp.where(right, xp.log(mills), left)


def log_mills_difference(x: Array, width: Array) -> Array:
    """Returns ``log(m(x) - m(x + width))``; *exact*. The Mills ratio m decreases."""
    xp = namespace(x, width)
    x, width = xp.broadcast_arrays(x, width)
    near, far = _mills_ratio(xp.stack([x, x + width]))
    return xp.where(width > 0, _log_difference(x, width, near - far), -xp.inf)


def _log_difference(x: Array, width: Array, difference: Array) -> Array:
    """Computes `log_mills_difference` for widths > 0, given the difference itself."""
    # The difference of two nearly equal ratios is computed as the integral of n.
    xp = namespace(x, width)
    narrow = width <= xp.maximum(1.0, 0.5 * x)
    short = xp.where(narrow & (width > 0), width, 1.0)
    nodes, weights = gauss_legendre(_SLOPE_NODES)
    column = (_SLOPE_NODES,) + (1,) * x.ndim
    at = x + short * nodes.reshape(column)
    scale = 1 / (at + 3 / (at + 3))
    slopes = polynomial(_MILLS_SLOPE, 1 - 8 / (at + 5)) * scale * scale  # n = -m'
    mean_slope = (slopes * weights.reshape(column)).sum(axis=0)
    integral = xp.log(short) + xp.log(mean_slope)
    return xp.where(narrow, integral, xp.log(xp.where(narrow, 1.0, difference)))


def log_saturating_tail(x: Array, width: Array) -> Array:
    """Returns ``log E[1 - e^{-width (Z - x)}; Z > x]`` for Z ~ N(0, 1); *exact*."""
    return saturating_tail(x, width)[0]


def saturating_tail(x: Array, width: Array) -> tuple[Array, Array]:
    """Returns `log_saturating_tail`, and the Mills ratio at x + width >= 0."""
    # The tail is phi(x) (m(x) - m(x + width)). If x < -1, widths below -x are treated
    # as -x, which can only raise the result.
    xp = namespace(x, width)
    x, width = xp.broadcast_arrays(x, width)
    right, end = x >= _LEFT_END, x + width
    # Not a maximum, which would halve the derivative at 0 (a profile at epsilon 0).
    end = xp.where(right | (end >= 0), end, 0.0)
    near, far = _mills_ratio(xp.stack([xp.where(right, x, -x), end]))
    density = log_normal_density(x)
    above, difference = xp.where(right, x, 0.0), xp.where(right, near - far, 1.0)
    direct = density + _log_difference(above, width, difference)
    # phi(x) m(x) = Q(x) = 1 - phi(x) m(-x): the number subtracted from 1 is below 0.55.
    missing = xp.where(right, 0.0, near + far)
    complement = xp.log1p(-xp.exp(density) * missing)
    tail = xp.where(right, direct, complement)
    return xp.where(width > 0, tail, -xp.inf), far


def _mills_ratio(x: Array) -> Array:
    """Returns ``m(x)`` for x >= -1."""
    return polynomial(_MILLS_RATIO, 1 - 8 / (x + 5)) / (x + 3 / (x + 3))


def polynomial(coefficients: np.ndarray, x: Array) -> Array:
    """Evaluates a polynomial with coefficients from the lowest power on."""
    xp = np if type(x) is np.ndarray else namespace(x)
    if xp is np and np.size(x) <= _FEW:
        # All powers at once takes few calls.
        powers = np.empty((len(coefficients), np.size(x)))
        powers[0], powers[1:] = 1.0, np.reshape(x, -1)
        np.multiply.accumulate(powers, axis=0, out=powers)
        return (coefficients @ powers).reshape(np.shape(x))
    *rest, leading = coefficients.tolist()
    total = xp.full_like(x, leading)
    for coefficient in reversed(rest):
        total *= x  # in place where NumPy computes
        total += coefficient
    return total


# --- The excess of a power over its tangent, ``f_a(v) = (1+v)^a - 1 - a v`` ---

SMALL = 0.1  # absolute value below which the following terms are exact to 1e-14
# ``(e^z - 1 - z) / z²`` and ``(y e^y - e^y + 1) / y²``.
REMAINDER = np.array([1 / math.factorial(k + 2) for k in range(9)])
SLOPE = np.array([(k + 1) / math.factorial(k + 2) for k in range(9)])


def scaled_power_excess(
    y: Array, b: Array, t: Array, direction: str
) -> tuple[Array, Array, Array]:
    """Returns ``e^b f(e^y - 1)`` and its first two derivatives in t.

    f is ``f_{1+t}`` if the direction is "forward", ``f_{-t}`` if "backward", and the
    sum of both if "symmetric". Small v do not cancel, large powers do not overflow.
    """
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
        rest = xp.where(
            short, tilted * small_exp_remainder(x), power - tilted * (1 + x)
        )
        value, first = rest + t * slope, y * (rest + tilted * x) + slope
        second = y * y * power
    if direction != "forward":
        # v - y, the slope of f_{-t} at t = 0
        near = square * polynomial(REMAINDER, y)
        slope = xp.where(tiny, near, tilted - base * (1 + y))
        power = xp.exp(b - x)
        rest = xp.where(short, base * small_exp_remainder(-x), power - base * (1 - x))
        value = value + rest + t * slope
        first = first + slope - y * (rest - base * x)
        second = second + y * y * power
    return value, first, second


def small_exp_remainder(x: Array) -> Array:
    """Returns ``e^x - 1 - x`` for small x."""
    return x * x * polynomial(REMAINDER, x)


def log_expm1(x: Array) -> Array:
    """Returns ``log(e^x - 1)`` for x > 0."""
    xp = namespace(x)
    return xp.where(x > 30, x, xp.log(xp.expm1(xp.minimum(x, 30.0))))

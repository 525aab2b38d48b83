"""Special functions of real and complex numbers, to the last digits of float64.

Normal tails in log space, excesses of powers, complex exponentials and sums of them.
m is the Mills ratio ``Q(x) / phi(x)`` and n = -m'. ``jax.scipy.special`` is not used:
its ``log_ndtr`` has an error of 2e-11 below -20, and its ``erfcx`` is 0 near 26.6.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    at,
    fori_loop,
    namespace,
    stored,
)
from jaxdp_episodic.accountant.numerics.quadrature import gauss_legendre

Pair = tuple[Array, Array]
"""Real and imaginary part."""

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)

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
    return -0.5 * x * x - LOG_SQRT_2PI


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


# --- Complex exponentials, logarithms and sums of them, as pairs of real arrays ---

# XLA's own complex functions call scalar code on the CPU, and take five times as long.

# 2 pi in three parts (Cody and Waite), so that subtracting a multiple is exact: four
# times the parts of pi/2 in Sun's fdlibm.
_TWO_PI = (6.28318530693650245668, 2.43084020252158639064e-10, 8.08906499518380252e-21)
# Minimax coefficients of sin and cos on [-pi/4, pi/4], from Sun's fdlibm (public
# domain): errors below 1e-17.
_SINE = np.array(
    [
        -1.66666666666666324348e-01,
        8.33333333332248946124e-03,
        -1.98412698298579493134e-04,
        2.75573137070700676789e-06,
        -2.50507602534068634195e-08,
        1.58969099521155010221e-10,
    ]
)
_COSINE = np.array(
    [
        4.16666666666666019037e-02,
        -1.38888888888741095749e-03,
        2.48015872894767294178e-05,
        -2.75573143513906633035e-07,
        2.08757232129817482790e-09,
        -1.13596475577881948265e-11,
    ]
)

# Taylor coefficients of (e^x - 1) / x, used below |x| = 0.5: the next term is 1e-17.
_SERIES = np.array([1 / math.factorial(k) for k in range(1, 15)])
_SMALL = 0.5
# Number of these used for |x| <= log(2) / 2: the next term is 1e-17.
_REDUCED_TERMS = 13
# log(2) in two parts, so that subtracting multiples is exact, from Sun's fdlibm.
_LOG_2 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
# Elements of an array such that a few arrays fit the cache together.
_CACHED = 4096
_LARGEST_ANGLE = 1e15  # angle above which its rounding error exceeds 1
# 1.5 times 2^52: the last bits of its sum with an integer are those of the integer.
_INTEGER_BITS = 6755399441055744.0


def versine_sine(angle: Array) -> tuple[Array, Array]:
    """Returns ``1 - cos`` and ``sin`` of an angle, both without cancellation near 0."""
    # Angles are reduced exactly up to 1e6; beyond, with an error of 1e-16 of the angle.
    # From a quarter of the angle, doubled twice, which needs no case for each quadrant.
    # In NumPy only the tangent uses vector instructions: 5 ns, not 26.
    if type(angle) is np.ndarray or namespace(angle) is np:
        tangent = np.tan(0.5 * angle)
        sine = 2 * tangent / (1 + tangent * tangent)
        return tangent * sine, sine
    half_sine, half_cosine = _of_half(angle, 0.0)
    return 2 * half_sine * half_sine, 2 * half_sine * half_cosine


def _of_half(angle: Array, added: Array | float) -> tuple[Array, Array]:
    """Sine and cosine of half of the sum of two angles, the second below 2 pi."""
    xp = namespace(angle)
    cycles = xp.round((angle + added) * (0.5 / math.pi))
    rest = angle
    for part in _TWO_PI:
        rest = rest - cycles * part
    quarter = 0.25 * (rest + added)
    square = quarter * quarter
    sine = quarter + quarter * square * polynomial(_SINE, square)
    versine = square * (0.5 - square * polynomial(_COSINE, square))
    return 2 * sine * (1 - versine), 1 - 2 * sine * sine


def polar(log_size: Array, angle: Array) -> tuple[Array, Array]:
    """Returns ``e^{a + ib}``."""
    xp = np if type(angle) is np.ndarray else namespace(log_size, angle)
    size = xp.exp(log_size)
    # Huge angles could not be reduced, and the polynomials would overflow.
    angle = xp.where(xp.abs(angle) < _LARGEST_ANGLE, angle, 0.0)
    if xp is np:  # see `versine_sine`
        tangent = np.tan(0.5 * angle)
        sine = 2 * tangent / (1 + tangent * tangent)
        return size * (1 - tangent * sine), size * sine
    # As one array, so that XLA compiles the polynomials once: the cosine is a sine.
    quarters = np.reshape([0.5 * math.pi, 0.0], (2,) + (1,) * angle.ndim)
    sine, cosine = _of_half(angle, quarters)
    both = stored(xp, size * (2 * sine * cosine))
    return both[0], both[1]


def log1p_complex(real: Array, imaginary: Array) -> tuple[Array, Array]:
    """Returns ``log(1 + z)``, principal branch; absolute error a few 1e-16 |z|."""
    # The real part is at least -345, so 1 + z = 0 does not give -inf.
    xp = namespace(real, imaginary)
    near = real > -0.5
    square = 2 * real + real * real + imaginary * imaginary
    whole = (1 + real) * (1 + real) + imaginary * imaginary
    log_square = xp.where(
        near,
        xp.log1p(xp.where(near, square, 0.0)),
        xp.log(xp.maximum(xp.where(near, 1.0, whole), 1e-300)),
    )
    return 0.5 * log_square, xp.arctan2(imaginary, 1 + real)


def expm1_complex(real: Array, imaginary: Array) -> tuple[Array, Array]:
    """Returns ``e^z - 1`` without cancellation near 0; error a few 1e-16 |z| there."""
    xp = namespace(real, imaginary)
    versine, sine = versine_sine(imaginary)
    if xp is np:
        gained = np.expm1(real)
        grown = gained + 1
    else:
        grown = xp.exp(real)
        series = real * polynomial(_SERIES, real)
        gained = xp.where(xp.abs(real) < _SMALL, series, grown - 1)
    # e^a cos b - 1 = (e^a - 1) - e^a (1 - cos b)
    return gained - grown * versine, grown * sine


def log_complex(real: Array, imaginary: Array) -> tuple[Array, Array]:
    """Returns ``log z``, principal branch."""
    xp = namespace(real, imaginary)
    square = real * real + imaginary * imaginary
    return 0.5 * xp.log(square), xp.arctan2(imaginary, real)


def sum_expm1(z: Pair, weight: Pair, position: Pair) -> Pair:
    """Returns ``sum_j w_j (e^{z y_j} - 1)`` for many z."""
    if namespace(z[0], weight[0], position[0]) is not np:
        from jax import lax

        # Complex arrays take half the time on the CPU; some accelerators lack
        # complex128.
        return lax.platform_dependent(
            z, weight, position, cpu=_sum_as_complex, default=_sum_as_pairs
        )
    # In NumPy for each setting a matrix times the weights.
    # Blocks of rows that fit the cache take a third of the time.
    used = np.flatnonzero(((weight[0] != 0) | (weight[1] != 0)).any(axis=1))
    used = int(np.max(used, initial=-1)) + 1  # up to the last weight that is not 0
    rows = _CACHED // max(used, 1) + 1
    re, im = np.empty_like(z[0]), np.empty_like(z[0])
    # Stacked for all settings at once: one by one it takes as long as the sums.
    y = np.stack([position[0][:used].T, position[1][:used].T], axis=1)
    w = np.stack([weight[0][:used].T, weight[1][:used].T], axis=2)
    real = np.stack([z[0].T, -z[1].T], axis=2)
    imaginary = np.stack([z[1].T, z[0].T], axis=2)
    for i in range(z[0].shape[1]):
        for k in range(0, len(re), rows):
            block = slice(k, k + rows)
            grown = expm1_complex(real[i, block] @ y[i], imaginary[i, block] @ y[i])
            a, b = (grown[0] @ w[i]).T
            c, d = (grown[1] @ w[i]).T
            re[block, i], im[block, i] = a - d, b + c
    return re, im


def _sum_as_pairs(z: Pair, weight: Pair, position: Pair) -> Pair:
    """Computes `sum_expm1` in JAX with real arrays only, term by term."""

    def term(w: Pair, y: Pair) -> Pair:
        return times(w, expm1_complex(*times(z, y)))

    zero = namespace(z[0]).zeros_like(z[0])
    return _sum_of_rows(term, weight, position, (zero, zero), 1)


def _sum_as_complex(z: Pair, weight: Pair, position: Pair) -> Pair:
    """Computes `sum_expm1` in JAX with a complex sum."""
    # One array: XLA on the CPU computes a term again for each array that uses it.
    from jax import lax

    def term(w: Pair, y: Pair) -> Array:
        return lax.complex(*times(w, expm1_in_parts(*times(z, y))))

    zero = namespace(z[0]).zeros_like(z[0])
    total = _sum_of_rows(term, weight, position, lax.complex(zero, zero), 4)
    return total.real, total.imag


def _sum_of_rows(
    term: Callable[..., Any], weight: Pair, position: Pair, zero: Any, together: int
) -> Any:
    """The sum of ``term(w_j, y_j)`` over all rows in JAX, ``together`` in a pass."""
    # Rows are added along a new first axis: unrolled terms take longer to compile.
    import jax

    xp, (rows, size) = namespace(weight[0]), weight[0].shape
    pad = ((0, -rows % together), (0, 0))
    shape = (-1, together, *(1,) * (jax.tree.leaves(zero)[0].ndim - 1), size)
    weight, position = jax.tree.map(
        lambda a: xp.pad(a, pad).reshape(shape), (weight, position)
    )

    def add(i: Array, total: Any) -> Any:
        return jax.tree.map(operator.add, total, term(at(weight, i), at(position, i)))

    start = jax.tree.map(lambda a: xp.zeros((together, *a.shape), a.dtype), zero)
    total = fori_loop(xp, 0, -(-rows // together), add, start)
    return jax.tree.map(lambda a: a.sum(axis=0), total)


def times(a: Pair, b: Pair) -> Pair:
    """Returns the complex product."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def expm1_in_parts(real: Array, imaginary: Array) -> Pair:
    """Computes `expm1_complex` faster, with one polynomial instead of two."""
    # e^a = 2^k + part, and the part is at most half as large as the power, which is
    # made from its bits, with float64 and 64-bit integers only.
    xp = namespace(real)
    bounded = xp.clip(real, -708.0, 709.0)
    k = xp.round(bounded * (1 / math.log(2)))
    r = (bounded - k * _LOG_2[0]) - k * _LOG_2[1]
    # The last bits of the sum are the integer.
    bits = (k + _INTEGER_BITS).view(xp.int64)
    power = ((bits + 1023) << 52).view(xp.float64)
    part = power * (r * polynomial(_SERIES[:_REDUCED_TERMS], r))
    part = xp.where(real > 709.0, xp.inf, part)
    versine, sine = versine_sine(imaginary)
    grown = part + power
    return (part + (power - 1)) - grown * versine, grown * sine


def sum_exp_moments(
    c: Array, weight: Pair, position: Pair
) -> tuple[Array, Array, Array]:
    """Returns real parts of ``sum_j w_j y_j^m e^{c y_j}``, m = 0, 1, 2, for real c."""
    xp = namespace(c, weight[0], position[0])

    def terms(w: Pair, y: Pair, c: Array = c) -> tuple[Array, Array, Array]:
        value = times(w, polar(c * y[0], c * y[1]))
        first = times(value, y)
        return value[0], first[0], first[0] * y[0] - first[1] * y[1]

    if xp is np:
        s0, s1, s2 = terms(weight, position, c[..., None, :])
        return s0.sum(axis=-2), s1.sum(axis=-2), s2.sum(axis=-2)
    zero = xp.zeros_like(c)
    return _sum_of_rows(terms, weight, position, (zero, zero, zero), 8)

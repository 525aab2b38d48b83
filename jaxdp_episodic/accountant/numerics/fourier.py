"""Convolution powers of distributions on a lattice by FFT, with error bounds.

The distribution of a sum of independent losses is a convolution power of the
distribution of one. A discrete Fourier transform turns it into a pointwise power, at a
cost that does not grow with the number of summands. It has two errors: aliasing, as the
convolution is *circular* and what leaves the window comes back at its other end (the
caller bounds that); and rounding, which is bounded here.

The rounding error of every cell is about the machine precision times the *largest*
cell, which is more than a tail of size 1e-12. So the distribution is to be tilted
exponentially first, which makes the cells that matter the largest ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import Array, complex_of, namespace

# Bound of the error of one level of the transform, in machine precisions: complex
# product, twiddle factor and addition, 4.1 by Higham 2002, Theorem 24.2, doubled.
_TRANSFORM_ERROR = 8.0
# The same of logarithm, phase and exponential of one power.
POWER_ERROR = 16.0


def power_sums(masses: Array, counts: Array) -> Array:
    """What `cells_of_power` takes, summed over K distributions; batches add up.

    Args:
      masses: (..., K, N) masses >= 0 of K distributions on a lattice of N cells, each
        distribution of sum about 1; N a power of two.
      counts: (..., K) how many independent draws of each are added, whole numbers as
        floats.

    Returns:
      (..., 4, N / 2 + 1) logarithm of a bound of the power's modulus, that of the
      computed one over it, phase in cycles, and relative error.

    Reference: Higham (2002), Accuracy and Stability of Numerical Algorithms, Theorem
    24.2, for the error of the transform. With ``b`` the modulus of a coefficient and
    ``e`` the bound of its error, that of the T-th power is at most
    ``T e (b + e)^(T-1)``.
    """
    xp = namespace(masses, counts)
    machine = float(xp.finfo(masses.dtype).eps)
    error = transform_error(masses.shape[-1])
    error = error * xp.sum(masses, -1, keepdims=True)
    spectrum = xp.fft.rfft(masses)
    # The bound of a coefficient's modulus; never 0, so that its logarithm exists.
    modulus = xp.abs(spectrum) + error
    counts = counts[..., None]
    # log |b| of the computed coefficient; one too small to have a phase counts as 0
    log_ratio = xp.log1p(-xp.minimum(error / modulus, 1 - machine))
    return _summed(
        xp,
        counts * xp.log(modulus),
        counts * log_ratio,
        counts * (xp.angle(spectrum) / (2 * math.pi)),
        counts * (error / modulus + POWER_ERROR * machine),
    )


def _summed(
    xp: Any, first: Array, second: Array, cycles: Array, relative: Array
) -> Array:
    """Sums over the K distributions, with the error of the sum of phases."""
    cycles = cycles - xp.round(cycles)  # cos of a large argument is slow
    relative = relative + sum_error(first.shape[-2])
    rows = (first, second, cycles, relative)
    return xp.stack([xp.sum(xp.broadcast_to(a, first.shape), -2) for a in rows], -2)


def sum_error(steps: int) -> float:
    """Error of each term of a sum of phases, each half a cycle at most."""
    return 2 * (steps - 1) * float(np.finfo(np.float64).eps)


def cells_of_power(sums: Array, size: int) -> tuple[Array, Array, Array]:
    """The circular distribution of a sum of lattice losses, from `power_sums`.

    Returns:
      ``(cells, rounding, rounding_norm)``: (..., N) *estimate* of the cells of the
      circular convolution, and (...,) *upper bounds* of the rounding error of every
      single cell, and of the Euclidean norm of the errors of all cells.
    """
    xp = namespace(sums)
    log_size, log_ratio, cycles, relative = xp.moveaxis(sums, -2, 0)
    phase = 2 * math.pi * (cycles - xp.round(cycles))
    size_of_power = xp.exp(log_size)
    length = size_of_power * xp.exp(log_ratio)
    power = complex_of(xp, length * xp.cos(phase), length * xp.sin(phase))
    cells = xp.fft.irfft(power, size)
    return cells, *_rounding_of_cells(
        size_of_power * (xp.minimum(relative, 2.0) + transform_error(size)),
        size,
    )


def transform_error(size: int) -> float:
    """Bound of the error of one transform, relative to the sum of its masses."""
    return _TRANSFORM_ERROR * (math.log2(size) + 2) * float(np.finfo(np.float64).eps)


def prefix_sums(terms: Array) -> Array:
    """Sums of the first 1, 2, … terms along the last axis, a power of two.

    Each with two roundings a level, not one a term: pairs are added first, then the
    sums of pairs, and so on.
    """
    xp = namespace(terms)
    if terms.shape[-1] == 1:
        return terms
    even, odd = terms[..., ::2], terms[..., 1::2]
    whole = prefix_sums(even + odd)
    before = xp.concatenate([xp.zeros_like(whole[..., :1]), whole[..., :-1]], -1)
    return xp.stack([before + even, whole], -1).reshape(terms.shape)


def _rounding_of_cells(per_coefficient: Array, size: int) -> tuple[Array, Array]:
    """Bounds of a cell's error and of the errors' norm (Parseval)."""
    xp = namespace(per_coefficient)
    # Each coefficient but the first and the last stands for two conjugate ones.
    single = 2 * xp.sum(per_coefficient, -1) / size
    # another root of 2, as the norms of two kinds of errors add up
    return single, 2 * xp.sqrt(xp.sum(per_coefficient**2, -1) / size)


def difference_sums(masses: Array, counts: Array) -> Array:
    """`power_sums` of distributions that are narrow, or rarely far from cell 0.

    The transform is ``sum + (w^k - 1) Y_k``, Y that of the cumulated masses: for a
    distribution of mean distance m from cell 0 the error of coefficient k is in
    proportion to ``m |w^k - 1|``, not 1; only small k matter. The rounding error
    grows with the root of T, not with T. Cells from N / 2 on are those below 0.
    """
    xp = namespace(masses, counts)
    size = masses.shape[-1]
    levels, machine = math.log2(size) + 2, float(xp.finfo(masses.dtype).eps)
    above, below = masses[..., : size // 2], masses[..., size // 2 :]
    above = prefix_sums(above[..., ::-1])[..., ::-1]
    above = xp.concatenate([above[..., 1:], xp.zeros_like(above[..., :1])], -1)
    cumulated = xp.concatenate([above, -prefix_sums(below)], -1)
    total = xp.sum(masses, -1, keepdims=True)
    cumulated = cumulated / total
    distance = xp.sum(xp.abs(cumulated), -1, keepdims=True)
    half_angle = math.pi * xp.arange(size // 2 + 1, dtype=masses.dtype) / size
    sine = 2 * xp.sin(half_angle)
    step = complex_of(xp, -sine * xp.sin(half_angle), -sine * xp.cos(half_angle))
    z = step * xp.fft.rfft(cumulated)
    real, imaginary = xp.real(z), xp.imag(z)
    deviation = xp.hypot(real, imaginary)
    modulus = xp.maximum(xp.hypot(1 + real, imaginary), 1e-300)
    # two more roundings a level for the cumulated sums, and a few for the products
    error = (_TRANSFORM_ERROR + 2) * levels * machine * sine * distance
    error += 8 * machine * deviation
    small = deviation < 0.5
    square = xp.where(small, real * (2 + real) + imaginary * imaginary, 0.0)
    growth = xp.where(small, 0.5 * xp.log1p(square), xp.log(modulus))
    counts = counts[..., None]
    # near 1 logarithm and phase are as small as z, and so are their errors
    evaluation = POWER_ERROR * machine * xp.minimum(1.0, 4 * deviation)
    return _summed(
        xp,
        counts * (growth + xp.log1p(error / modulus) + xp.log(total)),
        -counts * xp.log1p(error / modulus),
        counts * (xp.arctan2(imaginary, 1 + real) / (2 * math.pi)),
        counts * (error / (modulus + error) + evaluation),
    )


def atom_sums(masses: Array, counts: Array) -> Array:
    """What `cells_around_atom` takes, summed over K distributions; batches add up.

    Returns:
      (..., 4, N / 2 + 1) logarithms of ``|1 + r/a|`` and of a, phase in cycles, and
      relative error.
    """
    xp = namespace(masses, counts)
    size = masses.shape[-1]
    levels, machine = math.log2(size) + 2, float(xp.finfo(masses.dtype).eps)
    atom = masses[..., :1]
    rest = xp.where(xp.arange(size) == 0, 0.0, masses)
    total = xp.sum(rest, -1, keepdims=True) / atom
    # |z| <= total < 1, so that nothing is near the logarithm's singularity
    z = xp.fft.rfft(rest / atom)
    real, imaginary = xp.real(z), xp.imag(z)
    modulus = xp.hypot(1 + real, imaginary)
    counts = counts[..., None]
    error = (_TRANSFORM_ERROR * levels + POWER_ERROR) * machine
    return _summed(
        xp,
        counts * (0.5 * xp.log1p(real * (2 + real) + imaginary * imaginary)),
        counts * xp.log(atom),
        counts * (xp.arctan2(imaginary, 1 + real) / (2 * math.pi)),
        counts * (error * total / modulus**2),
    )


def cells_around_atom(sums: Array, size: int) -> tuple[Array, Array, Array]:
    """`cells_of_power` from `atom_sums`; cell 0 has a relative error too, of a^T."""
    xp = namespace(sums)
    growth, log_atom, cycles, relative = xp.moveaxis(sums, -2, 0)
    phase = 2 * math.pi * (cycles - xp.round(cycles))
    scale = xp.exp(log_atom)
    length = xp.exp(growth + log_atom)
    half = xp.sin(0.5 * phase)
    change = scale * (xp.expm1(growth) * xp.cos(phase) - 2 * half * half)
    change = complex_of(xp, change, length * xp.sin(phase))
    cells = xp.fft.irfft(change, size)
    cells = cells + xp.where(xp.arange(size) == 0, scale[..., :1], 0.0)
    # The trivial bound beyond 1: both are powers of numbers of modulus <= 1.
    known = length * xp.minimum(relative, 1.0) * xp.exp(xp.minimum(relative, 1.0))
    per_coefficient = xp.where(relative <= 1, known, 3.0)
    per_coefficient += transform_error(size) * xp.abs(change)
    return cells, *_rounding_of_cells(per_coefficient, size)


def log_moduli(masses: Array, counts: Array, excess: Array, *, folded: bool) -> Array:
    """Logarithms of *upper bounds* of the moduli of a power's coefficients.

    Of masses (..., K, N) and counts (..., K), as in `power_sums`, (..., N / 2 + 1);
    they add up over further distributions.

    A larger circle may be ``folded`` onto one of N cells: its transform has every D-th
    of the larger one's coefficients. The squared modulus of those between two of them
    exceeds the larger one's by ``excess`` (..., K) at most, and what is returned for
    number j bounds those from ``j D`` to ``(j + 1) D - 1``.
    """
    xp = namespace(masses, counts)
    error = transform_error(masses.shape[-1]) * xp.sum(masses, -1, keepdims=True)
    spectrum = xp.fft.rfft(masses)
    real, imaginary = xp.real(spectrum), xp.imag(spectrum)
    modulus = xp.sqrt(real * real + imaginary * imaginary) + error
    if folded:
        behind = xp.concatenate([modulus[..., 1:], modulus[..., -1:]], -1)
        larger = xp.maximum(modulus, behind)
        modulus = xp.sqrt(larger * larger + excess[..., None])
    return xp.sum(counts[..., None] * xp.log(modulus), -2)


def weighted_sums(log_power: Array, decays: Array, *, size: int) -> Array:
    """Sums over all frequencies from each on, weighted by transforms of series.

    Args:
      log_power: (..., n / 2 + 1) as of `log_moduli`, each for ``D = N / n`` of them.
      decays: (..., 2) numbers d > 0. Along the circle ``e^{-d j}`` is a geometric
        series, of transform ``1 / (1 - z)`` with ``z = e^{-d + 2 pi i k / N}``.
      size: N.

    Returns:
      (..., n / 2 + 1) *upper bounds* of the sums of ``|b_k| / |(1 - z)(1 - z')|`` over
      the frequencies k from ``j D`` to N / 2, b_k the coefficients of the power and z,
      z' those of the two decays, up to the rounding of powers and sums.
    """
    xp = namespace(log_power, decays)
    number = log_power.shape[-1]
    together = size // (2 * (number - 1))
    # |1 - z|² is at least this, for the lowest of each D frequencies and so for all:
    # 2 sin(pi k / N) is at least 4 k / N
    chord = 4 * together * xp.arange(number, dtype=log_power.dtype) / size
    lost, decay = -xp.expm1(-decays[..., None]), xp.exp(-decays[..., None])
    near, far = xp.moveaxis(lost * lost + decay * chord * chord, -2, 0)
    terms = together * xp.exp(log_power) / xp.sqrt(near * far)
    return xp.cumsum(terms[..., ::-1], -1)[..., ::-1]

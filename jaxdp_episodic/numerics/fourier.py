"""Powers of probability laws on a lattice by Fourier transform, with error bounds.

The law of a sum of independent losses is a convolution power of the law of one. A
discrete Fourier transform turns it into a pointwise power, at a cost that does not
grow with the number of summands. Two errors come with it: what leaves the window comes
back at its other end (the convolution is *circular*; the caller bounds that), and
rounding, which is bounded here.

The rounding error of every cell is about the machine precision times the *largest*
cell. It would drown a tail of size 1e-12, hence the law is to be tilted exponentially
first, so that the cells that matter are the largest ones.
"""

from __future__ import annotations

import math

import numpy as np

from jaxdp_episodic.numerics.loops import Array, complex_of, namespace

# Bounds, in units of the machine precision: of one level of the transform (the
# complex multiplication, its twiddle factor and the addition, 4.1 by Higham 2002,
# Theorem 24.2, doubled), and of logarithm, phase and exponential of one power.
_TRANSFORM_ERROR = 8.0
POWER_ERROR = 16.0


def circular_power(masses: Array, counts: Array) -> tuple[Array, Array, Array]:
    """Circular convolution of powers: the law of a sum of independent lattice losses.

    Args:
      masses: (..., K, N) masses >= 0 of K laws on a lattice of N cells, each law of
        sum about 1; N a power of two.
      counts: (..., K) how many independent draws of each are added, whole numbers as
        floats.

    Returns:
      ``(cells, rounding, rounding_norm)``: (..., N) *estimate* of the cells of the
      circular convolution, and (...,) *upper bounds* of the rounding error of every
      single cell, and of the Euclidean norm of the errors of all cells.

    Reference: Higham (2002), Accuracy and Stability of Numerical Algorithms, Theorem
    24.2, for the error of the transform. With ``b`` the modulus of a coefficient and
    ``e`` the bound of its error, that of the T-th power is at most
    ``T e (b + e)^(T-1)``.
    """
    xp = namespace(masses, counts)
    size = masses.shape[-1]
    levels = math.log2(size) + 2
    machine = float(xp.finfo(masses.dtype).eps)
    error = _TRANSFORM_ERROR * levels * machine * xp.sum(masses, -1, keepdims=True)
    spectrum = xp.fft.rfft(masses)
    # The bound of a coefficient's modulus; never 0, so that its logarithm exists.
    modulus = xp.abs(spectrum) + error
    counts = counts[..., None]
    size_of_power = xp.exp(xp.sum(counts * xp.log(modulus), -2))
    # log |b| of the computed coefficient; one too small to have a phase is as good as 0
    log_ratio = xp.log1p(-xp.minimum(error / modulus, 1 - machine))
    turns = counts * (xp.angle(spectrum) / (2 * math.pi))
    # a phase of many turns is reduced here: cos of a large argument is slow
    phase = 2 * math.pi * xp.sum(turns - xp.round(turns), -2)
    length = size_of_power * xp.exp(xp.sum(counts * log_ratio, -2))
    power = complex_of(xp, length * xp.cos(phase), length * xp.sin(phase))
    cells = xp.fft.irfft(power, size)
    relative = xp.sum(counts * (error / modulus + POWER_ERROR * machine), -2)
    per_coefficient = size_of_power * (
        xp.minimum(relative, 2.0) + _TRANSFORM_ERROR * levels * machine
    )
    return cells, *_rounding_of_cells(per_coefficient, size)


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
    # another root of 2: two kinds of errors are in it, and their norms add up
    return single, 2 * xp.sqrt(xp.sum(per_coefficient**2, -1) / size)


def circular_power_by_differences(
    masses: Array, counts: Array
) -> tuple[Array, Array, Array]:
    """`circular_power` of laws that are narrow, or rarely far from cell 0.

    The transform is ``sum + (w^k - 1) Y_k``, Y that of the cumulated masses: for a law
    of mean distance m from cell 0 the error of coefficient k is one of ``m |w^k - 1|``
    in place of 1, and only small k matter for the power. The rounding error grows with
    the root of T, not with T.

    Args:
      masses: (..., K, N) as there; cells from N / 2 on are those below 0.
      counts: (..., K).

    Returns:
      As `circular_power`.
    """
    xp = namespace(masses, counts)
    size = masses.shape[-1]
    levels = math.log2(size) + 2
    machine = float(xp.finfo(masses.dtype).eps)
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
    length = xp.exp(xp.sum(counts * (growth + xp.log(total)), -2))
    turns = counts * (xp.arctan2(imaginary, 1 + real) / (2 * math.pi))
    phase = 2 * math.pi * xp.sum(turns - xp.round(turns), -2)
    power = complex_of(xp, length * xp.cos(phase), length * xp.sin(phase))
    cells = xp.fft.irfft(power, size)
    # near 1 logarithm and phase are as small as z, and so are their errors
    evaluation = POWER_ERROR * machine * xp.minimum(1.0, 4 * deviation)
    relative = xp.sum(counts * (error / (modulus + error) + evaluation), -2)
    largest = xp.sum(counts * (growth + xp.log1p(error / modulus)), -2)
    largest = xp.exp(largest + xp.sum(counts * xp.log(total), -2))
    per_coefficient = largest * (
        xp.minimum(relative, 2.0) + _TRANSFORM_ERROR * levels * machine
    )
    return cells, *_rounding_of_cells(per_coefficient, size)


def circular_power_around_atom(
    masses: Array, counts: Array
) -> tuple[Array, Array, Array]:
    """`circular_power` of laws of which most of the mass is in cell 0.

    With a the mass of cell 0 and r the transform of the rest, the power is ``a^T`` in
    cell 0 and the inverse transform of ``a^T ((1 + r/a)^T - 1)``: the rounding error is
    one of ``T |r|`` in place of T, and sums of a few rare large losses keep their
    digits.

    Args:
      masses: (..., K, N) as there; cell 0 of each law holds more than half of it.
      counts: (..., K).

    Returns:
      As `circular_power`. Cell 0 has a relative error as well, of ``a^T``: that of as
      many masses.
    """
    xp = namespace(masses, counts)
    size = masses.shape[-1]
    levels = math.log2(size) + 2
    machine = float(xp.finfo(masses.dtype).eps)
    atom = masses[..., :1]
    first = xp.arange(size) == 0
    rest = xp.where(first, 0.0, masses)
    total = xp.sum(rest, -1, keepdims=True) / atom
    # |z| <= total < 1, so that nothing is near the logarithm's singularity
    z = xp.fft.rfft(rest / atom)
    real, imaginary = xp.real(z), xp.imag(z)
    modulus = xp.hypot(1 + real, imaginary)
    counts = counts[..., None]
    growth = 0.5 * xp.log1p(real * (2 + real) + imaginary * imaginary)
    growth = xp.sum(counts * growth, -2)
    phase = xp.sum(counts * xp.arctan2(imaginary, 1 + real), -2)
    phase -= 2 * math.pi * xp.round(phase / (2 * math.pi))
    log_atom = xp.sum(counts * xp.log(atom), -2)
    scale = xp.exp(log_atom)
    length = xp.exp(growth + log_atom)
    half = xp.sin(0.5 * phase)
    change = scale * (xp.expm1(growth) * xp.cos(phase) - 2 * half * half)
    change = complex_of(xp, change, length * xp.sin(phase))
    cells = xp.fft.irfft(change, size)
    cells = cells + xp.where(first, scale, 0.0)
    error = (_TRANSFORM_ERROR * levels + POWER_ERROR) * machine * total / modulus**2
    relative = xp.sum(counts * error, -2)
    # Beyond 1 nothing is known but that both are powers of numbers of modulus <= 1.
    known = length * xp.minimum(relative, 1.0) * xp.exp(xp.minimum(relative, 1.0))
    per_coefficient = xp.where(relative <= 1, known, 3.0)
    per_coefficient += _TRANSFORM_ERROR * levels * machine * xp.abs(change)
    return cells, *_rounding_of_cells(per_coefficient, size)


def frequency_edges(size: int) -> np.ndarray:
    """Edges (m + 1,) of blocks of the frequencies 0 to ``size / 2``, for sums of them.

    The first block holds 8 frequencies, each other one half or a third of what is
    below it.
    """
    edges = [0, 8]
    while edges[-1] < size // 2:
        last = edges[-1]
        edges.append(last * 3 // 2 if last & (last - 1) == 0 else last * 4 // 3)
    return np.array([*edges[:-1], size // 2 + 1])


def low_frequencies(
    masses: Array, counts: Array, decays: Array, *, kept: int
) -> tuple[Array, Array, Array]:
    """The lowest frequencies of laws on a circle, and how much of a power others hold.

    Args:
      masses: (..., K, N) as in `circular_power`.
      counts: (..., K).
      decays: (..., 2) numbers d > 0. Along the circle ``e^{-d j}`` is a geometric
        series, of transform ``1 / (1 - z)`` with ``z = e^{-d + 2 pi i k / N}``.
      kept: number of low frequencies.

    Returns:
      ``(low, error, sums)``: (..., K, kept) complex coefficients of each law;
      (..., K, 1) *upper bounds* of their errors; and for each block between
      `frequency_edges` (..., m) *upper bounds* of the sums of
      ``|b_k| / |(1 - z)(1 - z')|``, b_k the coefficients of the power and z, z' those
      of the two decays, up to the rounding of powers and sums.
    """
    xp = namespace(masses, counts, decays)
    size = masses.shape[-1]
    levels = math.log2(size) + 2
    machine = float(xp.finfo(masses.dtype).eps)
    error = _TRANSFORM_ERROR * levels * machine * xp.sum(masses, -1, keepdims=True)
    spectrum = xp.fft.rfft(masses)
    real, imaginary = xp.real(spectrum), xp.imag(spectrum)
    modulus = xp.sqrt(real * real + imaginary * imaginary) + error
    power = xp.sum(counts[..., None] * xp.log(modulus), -2)
    # |1 - z|² is at least this: 2 sin(pi k / N) is at least 4 k / N
    chord = 4 * xp.arange(size // 2 + 1, dtype=masses.dtype) / size
    lost, decay = -xp.expm1(-decays[..., None]), xp.exp(-decays[..., None])
    near, far = xp.moveaxis(lost * lost + decay * chord * chord, -2, 0)
    terms = xp.exp(power) / xp.sqrt(near * far)
    edges = frequency_edges(size)
    sums = [
        xp.sum(terms[..., a:b], -1) for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]
    return spectrum[..., :kept], error, xp.stack(sums, -1)

"""Low Fourier coefficients of a power, with bounds of their rounding errors.

By transforms of the distributions on a circle, or by sums over their masses. The bounds
are part of certified ends: each allowance below says which operations it is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxdp_episodic.accountant.methods.certified.hockey_stick import UNDERFLOW, Row
from jaxdp_episodic.accountant.numerics import fourier

# Number of distributions whose logarithms and phases are added up at a time.
MOST_TOGETHER = 16
# Distance of 1 from the next larger float64; an operation is off by half of it.
MACHINE = float(np.finfo(np.float64).eps)
# Rounding error of a sum of n terms, over n and its size: half of that, and its powers.
_SUM_ERROR = 1.2e-16
# The same of up to 2^22 terms that NumPy adds, see `hockey_stick`: blocks of 128, eight
# sums side by side, then in pairs.
_PAIRWISE_ERROR = 4e-15
# Rounding error of one such term, relative to versine and sine together, 1.3e-15: half
# an angle by two operations, its sine and cosine by a unit in the last place more,
# their product or square, doubled; the share of the mass by two, and their product.
_TERM_ERROR = 2e-15
# Of ``e^{i x}`` and of a product with it, relative, 1.5e-15: an angle up to pi of two
# operations, a unit in the last place of cosine and sine, and a complex product.
_PHASE_ERROR = 8 * MACHINE
# Smallest modulus that is divided by: the error that is divided is above 1e-16.
_LEAST_MODULUS = 1e-300
# Deviation from 1 up to which ``|1 + z|`` is taken from ``|1 + z|^2 - 1``: beyond, that
# cancels.
_MOST_DEVIATION = 0.5
# Of a bound itself, relative: it takes some 30 operations, and of K distributions sums
# of as many positive terms; K is below a million.
_BOUND_ERROR = 1e-9


def on_circle(index: np.ndarray, mass: np.ndarray, size: int) -> np.ndarray:
    """Masses on a circle of cells, (size,), the heaviest one in cell 0."""
    cell = np.mod(index - index[np.argmax(mass)], size).astype(np.int64)
    return np.bincount(cell, mass, minlength=size)


def power_from_transform(row: Row, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The lowest coefficients of a row's power, (number,); bounds of their errors."""
    low, error = [], []
    for index, mass in row.masses:
        circle = on_circle(index, mass, row.size)
        low.append(np.fft.rfft(circle)[:number])
        error.append([fourier.transform_error(row.size) * float(circle.sum())])
    modulus = np.abs(low)
    growth = np.log(np.maximum(modulus, _LEAST_MODULUS))
    rounded = np.full(modulus.shape, fourier.POWER_ERROR * MACHINE)
    relative = np.array(error) / np.maximum(modulus, _LEAST_MODULUS)
    return _power(growth, np.angle(low), relative, rounded, row.counts)


def power_from_terms(row: Row, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The same by sums over the masses, as differences from the heaviest one.

    Their rounding errors are in proportion to how far the losses are from it, at these
    frequencies: those of a narrow distribution, or of one with an atom, are small.
    """
    frequency = np.arange(float(number))[:, None]
    parts = []
    for index, mass in row.masses:
        # in cycles, exactly: centred, so that small angles keep their digits
        cycles = frequency * ((index - index[np.argmax(mass)]) / row.size)
        turn = np.exp(1j * (math.pi * (cycles - np.rint(cycles))))
        versine, sine = 2 * turn.imag**2, 2 * turn.imag * turn.real
        # less 1, so that its logarithm keeps the digits that count T times
        surplus = math.fsum(np.append(mass, -1.0))
        share = mass / (1 + surplus)
        real, imaginary = -np.sum(versine * share, -1), -np.sum(sine * share, -1)
        size = np.sum((versine + np.abs(sine)) * share, -1)
        is_near = np.hypot(real, imaginary) < _MOST_DEVIATION
        square = np.where(is_near, real * (2 + real) + imaginary * imaginary, 0.0)
        modulus = np.maximum(np.hypot(1 + real, imaginary), _LEAST_MODULUS)
        growth = np.where(is_near, 0.5 * np.log1p(square), np.log(modulus))
        error = (min(_SUM_ERROR * len(mass), _PAIRWISE_ERROR) + _TERM_ERROR) * size
        # near 1 logarithm and phase are as small as the difference, and so are
        # their errors
        rounded = fourier.POWER_ERROR * MACHINE * np.minimum(1.0, 4 * size)
        parts.append(
            (
                growth + math.log1p(surplus),
                np.arctan2(imaginary, 1 + real),
                error / modulus,
                rounded,
            )
        )
    growth, angle, error, rounded = (np.array(p) for p in zip(*parts, strict=True))
    return _power(growth, angle, error, rounded, row.counts)


def _power(
    growth: np.ndarray,
    angle: np.ndarray,
    error: np.ndarray,
    rounded: np.ndarray,
    counts: Sequence[float],
) -> tuple[np.ndarray, np.ndarray]:
    """Products of powers of ``exp(growth + i angle)``, and bounds of their errors.

    All (steps, K): ``error`` is that of the base, over its modulus, ``rounded`` that
    of its logarithm. With ``b`` a modulus and ``e`` its error, that of the power is at
    most ``T e (b + e)^(T - 1)``, and never more than twice ``(b + e)^T``.
    """
    times = np.asarray(counts)[:, None]
    cycles = times * (angle / (2 * math.pi))  # the phase modulo 1
    cycles -= np.round(cycles)
    rounding = 2 * len(times) * fourier.sum_error(min(len(times), MOST_TOGETHER))
    while len(cycles) > 1:
        cycles = np.add.reduceat(cycles, np.arange(0, len(cycles), MOST_TOGETHER), 0)
        cycles -= np.round(cycles)
    phase = 2 * math.pi * cycles[0]
    length = np.exp(np.sum(times * growth, 0))
    # Of a logarithm times a count a unit in the last place and one operation are lost,
    # and one for each of them that is added.
    in_exponent = (2 + len(times)) * MACHINE * np.sum(times * np.abs(growth), 0)
    largest = np.sum(times * (growth + np.log1p(error) + rounded), 0) + in_exponent
    relative = np.sum(times * (error / (1 + error) + rounded), 0)
    relative += _PHASE_ERROR + in_exponent + rounding
    errors = np.exp(largest) * np.minimum(relative, 2.0) * (1 + _BOUND_ERROR)
    return length * np.exp(1j * phase), errors + UNDERFLOW

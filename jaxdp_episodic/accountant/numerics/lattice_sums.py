"""Sums of independent draws from distributions on one lattice, by Fourier transforms.

The probabilities are tilted first (multiplied by e^(c x)), so that the tail of interest
is in the bulk. Rounding errors and aliasing (what lies outside of the window, and is
wrapped into it) have proven bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Distance of 1 from the next larger float64; an operation has half of it as error.
MACHINE = float(np.finfo(np.float64).eps)
UNDERFLOW = 1e-280  # more than the sum of everything that underflows
# Bound of the error of one level of the transform, in machine precisions: complex
# product, twiddle factor and addition, 4.1 by Higham (2002), Theorem 24.2, doubled.
_TRANSFORM_ERROR = 8.0
# The same for logarithm, phase and exponential of one power.
_POWER_ERROR = 16.0
# Logarithm of a modulus below which a coefficient is treated as 0.
_NEGLIGIBLE = -120.0
# Distance from 1 within which ``|1 + z|^2 - 1`` keeps more digits than ``|1 + z|``.
_NEAR_ONE = 0.5
_LEAST_MODULUS = 1e-300  # smallest modulus by which is divided
# Relative distances from the tilt at which Chernoff's bound is evaluated.
_TILT_CHANGES = np.geomspace(0.01, 6.0, 14)
_SPARE_CELLS = 6  # cells added to a window
_FEWEST_CELLS = 256  # fewest cells of a lattice
_MASS_ERROR = 1e-14  # relative rounding error of one tilted probability
# The same for each nat of the exponent that it was computed from.
_EXPONENT_ERROR = 1e-15
# Relative error of a sum of up to 2^22 numbers. NumPy adds in blocks of 128, eight sums
# side by side, then in pairs: 16 + 15 + 3 units of 1.1e-16.
_TOTAL_ERROR = 4e-15
# Relative error of sums of exponentials over up to 2^22 terms: half an ulp of each.
SUMS_ERROR = 1e-9
# Error of a logarithm, relative to its terms: fewer than 20 operations of half an ulp
# are 2e-15. A wider bound costs nothing.
LOG_ERROR = 1e-12
# Relative error of a loss: at most eight operations of half an ulp.
LOSS_ERROR = 1e-15


class Summand(NamedTuple):
    """A distribution on lattice points, and the number of draws from it."""

    index: np.ndarray  # (m,) whole numbers of the points
    values: np.ndarray  # (m,) the points, ``offset + index * spacing`` up to rounding
    masses: np.ndarray  # (m,) probabilities >= 0
    count: float  # number of independent draws, a whole number


class LatticeSum(NamedTuple):
    """The tilted distribution of a sum in a window, with bounds of its errors."""

    cells: np.ndarray  # (N,) tilted probabilities, estimates
    rounding: tuple[float, float]  # error of a cell, and the norm of all errors
    outside: tuple[float, float]  # tilted probability below and above, aliased inside
    start: float  # of the window
    spacing: float  # of the window
    tilt: float  # c; probabilities at x are multiplied by ``e^(c x)``
    log_moment: float  # log of the mean of ``e^(c x)``, by which they are divided
    relative: float  # bound of the relative error of all probabilities
    shift: float  # bound of the rounding error of the points


def log_sum(exponents: np.ndarray) -> float:
    """Returns the log of a sum of exponentials; about log 0 for an empty one."""
    if not len(exponents):
        return -1e4
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top).sum()))


def tilted(
    summands: Sequence[Summand], tilt: float
) -> tuple[LatticeSum, list[Summand], list[np.ndarray]]:
    """Returns a sum's moment with its errors, tilted summands, log-probabilities."""
    log_moment = relative = shift = 0.0
    parts, logs = [], []
    for one in summands:
        alive = one.masses > 0
        index, values, mass = (array[alive] for array in one[:3])
        log_mass = np.log(mass)
        exponent = log_mass + tilt * values
        total = log_sum(exponent)
        logs.append(exponent - total)
        parts.append(Summand(index, values, np.exp(exponent - total), one.count))
        log_moment += one.count * total
        largest = float(np.abs(values).max(initial=0.0))
        # The exponent is a sum of terms of this size, the moment one of all summands.
        size = abs(total) + tilt * largest + float(np.abs(log_mass).max(initial=0.0))
        added = MACHINE * len(summands) * abs(total)
        relative += one.count * (_MASS_ERROR + _TOTAL_ERROR + added)
        relative += one.count * _EXPONENT_ERROR * size
        shift += one.count * LOSS_ERROR * largest
    empty = LatticeSum(
        np.empty(0), (0.0, 0.0), (1.0, 1.0), 0, 0, tilt, log_moment, relative, shift
    )
    return empty, parts, logs


def lattice_sum(
    summands: Sequence[Summand],
    spacing: float,
    offset: float,
    tilt: float,
    log_cut: float,
    inside: float,
    most_cells: int,
) -> LatticeSum | None:
    """Returns the distribution of a sum; None if it needs more than ``most_cells``."""
    # The window covers all but a share ``e^log_cut`` of the tilted probability, by
    # Chernoff's bound, and the point ``inside`` if it is not far off.
    whole, parts, logs = tilted(summands, tilt)
    changes = tilt * np.concatenate([_TILT_CHANGES, -_TILT_CHANGES])
    moments = np.zeros(len(changes))
    for one, log_mass in zip(parts, logs, strict=True):
        every = [log_sum(log_mass + c * one.values) for c in changes]
        moments += one.count * np.array(every)
    ends = (moments - log_cut) / changes
    number = len(_TILT_CHANGES)
    high, low = float(ends[:number].min()), float(ends[number:].max())
    if low - (high - low) < inside < high + (high - low):
        low, high = min(low, inside), max(high, inside)
    cells = (high - low) / spacing + _SPARE_CELLS
    if not 0 < cells <= most_cells:  # rounding of huge losses may cross the ends
        return None
    cells = math.ceil(cells)
    size = max(2 ** math.ceil(math.log2(cells)), _FEWEST_CELLS)
    # Cells added to reach a power of two are on both sides.
    first = math.floor((low - offset) / spacing) - 2 - (size - cells) // 2
    start = offset + first * spacing
    stop = start + size * spacing
    outside = []
    for side in (slice(number, None), slice(number)):
        end = start if side.start else stop
        exponents = moments[side] - changes[side] * end
        # Chernoff's bound with its rounding error, relative to the size of the terms.
        terms = np.abs(moments[side]) + np.abs(changes[side] * end)
        rounded = SUMS_ERROR + (LOG_ERROR + MACHINE * len(parts)) * terms
        exponent = float((exponents + rounded).min()) + whole.relative
        outside.append(math.exp(min(exponent, 0.0)) + UNDERFLOW)
    # Number of probabilities that are added up in one cell of the circle.
    meeting = sum(
        one.count * min(math.ceil(np.ptp(one.index) / size) + 1, len(one.index))
        for one in parts
        if len(one.index)
    )
    cells, *rounding = cells_of_sum(parts, first, size)
    return whole._replace(
        cells=cells,
        rounding=tuple(rounding),
        outside=tuple(outside),
        start=start,
        spacing=spacing,
        relative=whole.relative + MACHINE * meeting,
        shift=whole.shift + LOSS_ERROR * (abs(start) + abs(stop)),
    )


def cells_of_sum(
    parts: Sequence[Summand], first: int, size: int
) -> tuple[np.ndarray, float, float]:
    """Returns the circular distribution of a sum, an error of cells, and their norm."""
    # The heaviest point of each summand is left out of its transform. Coefficients of
    # the rest, of total probability R, have errors of at most R times the transform's
    # error (Higham 2002, Theorem 24.2), and the T-th power one of T e (b + e)^(T-1).
    error = transform_error(size)
    number, place = size // 2 + 1, 0
    log_bound, log_size, cycles, relative = np.zeros((4, number))
    for index, _, mass, count in parts:
        if not len(index):
            continue
        heaviest = int(index[np.argmax(mass)])
        place += int(count) * heaviest
        cell = np.mod(index - heaviest, size).astype(np.int64)
        circle = np.bincount(cell, mass, minlength=size)
        circle[0] = 0.0
        rest = float(circle.sum())
        z = np.fft.rfft(circle)[:number] - rest
        real, imaginary, distance = z.real, z.imag, np.abs(z)
        near = distance < _NEAR_ONE
        square = np.where(near, real * (2 + real) + imaginary * imaginary, 0.0)
        modulus = np.maximum(np.hypot(1 + real, imaginary), _LEAST_MODULUS)
        growth = np.where(near, 0.5 * np.log1p(square), np.log(modulus))
        off = (error * rest + 2 * MACHINE * distance) / modulus
        log_bound += count * (growth + np.log1p(off))
        # What is negligible after some summands is negligible after all of them.
        alive = np.flatnonzero(log_bound > _NEGLIGIBLE)
        number = int(alive[-1]) + 1 if len(alive) else 1
        log_bound, log_size, cycles, relative = (
            row[:number] for row in (log_bound, log_size, cycles, relative)
        )
        log_size += count * growth[:number]
        angle = np.arctan2(imaginary[:number], 1 + real[:number])
        cycles += count * (angle / (2 * math.pi))
        cycles -= np.round(cycles)
        # Near 1 logarithm and phase are as small as z, and so are their errors.
        evaluation = _POWER_ERROR * MACHINE * np.minimum(1.0, 4 * distance[:number])
        off = off[:number]
        relative += count * (off / (1 + off) + evaluation) + 4 * MACHINE
    power = np.zeros(size // 2 + 1, complex)
    power[:number] = np.exp(log_size + 2j * math.pi * cycles)
    cells = np.fft.irfft(power, size)
    wrong = np.exp(log_bound) * (np.minimum(relative, 2.0) + error)
    # The error of what was left out, with a margin for the errors of later factors.
    wrong = np.append(wrong, size * math.exp(_NEGLIGIBLE + 20))
    # Each coefficient except the first and the last represents two conjugate ones.
    single = 2 * float(wrong.sum()) / size
    # Another root of 2, as the norms of two kinds of errors add up.
    together = 2 * math.sqrt(float((wrong**2).sum()) / size)
    return np.roll(cells, -((first - place) % size)), single, together


def transform_error(size: int) -> float:
    """Returns a bound of a transform's error, relative to the sum of probabilities."""
    return _TRANSFORM_ERROR * (math.log2(size) + 2) * MACHINE

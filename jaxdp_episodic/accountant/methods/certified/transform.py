"""Convolution powers of tilted losses: their lowest Fourier coefficients, or all cells.

The lattice is a circle of N cells. A step of count T has Fourier coefficients f_k, the
sum ``prod f_k^T``. A sum of many losses has few coefficients that are not negligible;
with those the answer is read off without an inverse transform (`low_frequencies`). A
sum of few, or one that a single large loss makes up, is transformed back to its cells.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant._engine import engine_name, float64_boundary
from jaxdp_episodic.accountant.methods.certified.hockey_stick import (
    UNDERFLOW,
    CertifiedDistribution,
    Row,
)
from jaxdp_episodic.accountant.methods.certified.low_frequencies import LowFrequencies
from jaxdp_episodic.accountant.methods.certified.powers import (
    MACHINE,
    MOST_TOGETHER,
    on_circle,
    power_from_terms,
    power_from_transform,
)
from jaxdp_episodic.accountant.numerics import fourier

# Rows of a transform, at most; JAX's are padded, as each number is compiled.
_LARGEST_BATCH = 8
# Cells of all rows of a transform, at most.
_CELLS_OF_BATCH = 2**20
# Cells of the largest lattice: 32 MiB for an array, about 20 of them live.
LARGEST_LATTICE = 2**22
# Mass from which on an atom is split off before the transform.
_ATOM = 0.6
# log(1 / a^T) above which the power of that atom's mass a is negligible.
_LOG_NEGLIGIBLE_ATOM = 30.0
# Kernels of the power, by what keeps their rounding errors small: logarithms of the
# coefficients, of their differences from 1, or of what is beside an atom.
PLAIN = "plain"
DIFFERENCES = "differences"
AROUND_ATOM = "around atom"
# Mean distance of losses from the heaviest, in radians of the highest frequency that
# counts, below which differences from 1 keep more digits.
_SMALL_ANGLE = 0.3
# Low frequencies that are kept at least; at most: so many, or this share of all cells.
_LEAST_FREQUENCIES = 8
_LOW_FREQUENCIES = 64
_LOW_SHARE = 1 / 32
# Least cells of a folded circle, and nats of its power's logarithm that may be lost.
_LEAST_FOLDED = 1024
_MOST_EXCESS = 2.0
# Grid points times frequencies, over cells, that may be summed one by one.
_MOST_TERMS = 2.0
# Errors above this many tolerances ask for a more exact kernel.
_MOST_TOLERANCES = 100
# The next four choose a kernel, each of which bounds its own errors. Largest square of
# a distance from the heaviest loss, in cells, that counts in the variance: rare far
# losses do not make the power negligible.
_FARTHEST_SQUARED = 100.0
# Frequency from which on the power is negligible, times the sum's standard deviation.
_DEVIATIONS = 6.0
# Largest modulus of ``w^k - 1``.
_HIGHEST_FREQUENCY = 2.0
# Least variance, in squares of cells, so that it can be divided by.
_LEAST_VARIANCE = 1e-30

# --- Allowances for rounding; all are part of certified ends ---

# Absolute error of ``e^{2 pi i x}`` and of a product with it, over its size, 2e-15: an
# angle up to 2 pi of two operations (x is exact), a unit in the last place of cosine
# and sine, and a complex product.
_TURN_ERROR = 4e-15
# Largest logarithm, either way, whose exponential neither over- nor underflows, nats.
_LARGEST_EXPONENT = 745.0
# A second moment of up to 2^19 masses, relative: half an ulp of each, 6e-11.
_MOMENT_ERROR = 1e-9
# Logarithm of a modulus that has been computed by up to nine operations, absolute.
_LOG_MODULUS_ERROR = 1e-15
# A sum over frequencies, relative: one operation for each term of the largest
# lattice's half (2.4e-10), and 30 for a term and its weight.
_SUM_ERROR = 2.5e-10


_log_moduli = float64_boundary(fourier.log_moduli, static=("folded",))
_weighted_sums = float64_boundary(fourier.weighted_sums, static=("size",))
_SUMS = {
    PLAIN: float64_boundary(fourier.power_sums),
    DIFFERENCES: float64_boundary(fourier.difference_sums),
    AROUND_ATOM: float64_boundary(fourier.atom_sums),
}
_cells = float64_boundary(fourier.cells_of_power, static=("size",))
_cells_around_atom = float64_boundary(fourier.cells_around_atom, static=("size",))


def transformed(
    rows: Sequence[Row],
) -> list[LowFrequencies | CertifiedDistribution | None]:
    """The distribution of each row's sum; None where it does not fit in memory."""
    found = low_frequencies_of(rows)
    left = [x for x in found if isinstance(x, Row) and x.size <= LARGEST_LATTICE]
    powers = iter(convolution_powers(left))
    return [
        x
        if isinstance(x, LowFrequencies)
        else next(powers)
        if x.size <= LARGEST_LATTICE
        else None
        for x in found
    ]


def low_frequencies_of(rows: Sequence[Row]) -> list[LowFrequencies | Row]:
    """Low frequencies of the rows; of those that need others as well the row.

    Its `small_rounding` is false then where the plain kernel's errors would matter.
    """
    result: list[LowFrequencies | Row] = [*rows]
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i, row in enumerate(rows):
        key = (row.size, _folded_size(row), len(row.masses))
        groups.setdefault(key, []).append(i)
    for (size, folded, _), members in groups.items():
        for chosen, parts, firsts in _circles(rows, members, folded):
            log_power = np.zeros(())
            for part in parts:
                powers = _log_moduli(*part, folded=folded < size)
                log_power = log_power + np.asarray(powers)
            decays = np.zeros((len(log_power), 2))
            for j, i in enumerate(chosen):
                dist = rows[i].certified
                decays[j] = dist.tilt * dist.spacing, (dist.tilt + 1) * dist.spacing
            rest = np.asarray(_weighted_sums(log_power, decays, size=size))
            for j, i in enumerate(chosen):
                result[i] = _lowest_of(rows[i], rest[j], firsts[j])
    return result


def _folded_size(row: Row) -> int:
    """Cells onto which the circle is folded for bounds of its coefficients.

    As few as leave the bound of the power, where it is no longer 1, near to it.
    """
    spread = 0.0
    for (index, mass), count in zip(row.masses, row.counts, strict=True):
        if len(index):
            away = index - float(mass @ index)
            spread += count * float(mass @ (away * away))
    least = math.pi * math.sqrt(spread / (2 * _MOST_EXCESS))
    least = min(max(least, _LEAST_FOLDED), row.size)
    return min(1 << math.ceil(math.log2(least)), row.size)


def _excess(index: np.ndarray, mass: np.ndarray, size: int) -> float:
    """Bound of what squared moduli may exceed those of ``size`` frequencies by.

    ``|f(w)|²`` is the mean of ``cos(w (X - X'))``, X and X' two independent losses in
    cells. Its second derivative is at most twice the variance V, so that between
    frequencies at a distance of h it is at most ``h² V / 4`` above the larger one.
    """
    total = float(mass.sum())
    away = index - float(mass @ index)
    second = float(mass @ (away * away)) * (1 + _MOMENT_ERROR)
    # masses that meet in a cell are added up, which f² feels twice
    meeting = min(math.ceil((float(np.ptp(index)) + 1) / size), len(index))
    rounded = 3 * meeting * MACHINE * total
    return total * ((math.pi / size) ** 2 * second + rounded)


def _lowest_of(row: Row, rest: np.ndarray, first: int) -> LowFrequencies | Row:
    """The lowest frequencies of one row's power, as many as matter.

    ``rest`` is what all are worth from every D-th on, from 0 to ``size / 2``.
    """
    dist, together = row.certified, row.size // (2 * (len(rest) - 1))
    rounded = _SUM_ERROR + _LOG_MODULUS_ERROR * sum(row.counts)
    rounded += (2 + len(row.counts)) * MACHINE * _LARGEST_EXPONENT
    # both signs of the frequencies
    rest = rest * (2 / row.size * math.exp(rounded)) + UNDERFLOW
    beyond = dist.start + row.size * dist.spacing - row.initial_epsilon
    cost = -math.expm1(-dist.spacing) + 2 * math.exp(-dist.tilt * max(beyond, 0.0))
    # the lowest ones are kept in any case
    least = -(-_LEAST_FREQUENCIES // together)
    enough = cost * rest[least:] <= row.tolerance
    i = least + int(np.argmax(enough))
    number = i * together
    most = max(_LOW_FREQUENCIES, int(row.size * _LOW_SHARE))
    if not np.any(enough) or number > most:
        return row
    if number * sum(len(m) for _, m in row.masses) <= _MOST_TERMS * row.size:
        power, errors = power_from_terms(row, number)
    else:
        power, errors = power_from_transform(row, number)
        rounding = _rounding(row, errors)
        if not row.small_rounding or rounding > _MOST_TOLERANCES * row.tolerance:
            row = dataclasses.replace(row, small_rounding=False)
            if _kernel_name(row) != PLAIN and row.size <= LARGEST_LATTICE:
                return row  # the cells by another kernel are more exact
    angle = np.mod(np.arange(number) * float(first), row.size) / row.size
    power = power * np.exp(2j * math.pi * angle)
    errors = errors + _TURN_ERROR * np.abs(power)
    return LowFrequencies(
        dist,
        row.size,
        power,
        errors,
        float(rest[i]),
        row.initial_epsilon,
        row.precision,
    )


def _rounding(row: Row, errors: np.ndarray) -> float:
    """What errors of the lowest frequencies may change tilted delta by."""
    dist, number = row.certified, np.arange(len(errors))
    chord = (4 * number / row.size) ** 2
    lost = [-math.expm1(-c * dist.spacing) for c in (dist.tilt, dist.tilt + 1)]
    squares = [x * x + (1 - x) * chord for x in lost]
    weights = 2 / row.size / np.sqrt(squares[0] * squares[1])
    return -math.expm1(-dist.spacing) * float(weights @ errors)


def _circles(
    rows: Sequence[Row], members: Sequence[int], size: int
) -> Iterator[tuple[list[int], Iterator[tuple[np.ndarray, ...]], list[int]]]:
    """Distributions of rows of one shape on circles of N cells, a batch at a time.

    Yields:
      The rows' numbers; a few steps at a time masses (batch, steps, N), with each
      distribution's heaviest cell as number 0, counts and `_excess` (batch, steps); and
      which cell of the sum's circle is the first of the window.
    """
    steps = len(rows[members[0]].masses)
    batch = max(min(_LARGEST_BATCH, _CELLS_OF_BATCH // (size * steps)), 1)
    # a power of two, as few shapes are to be compiled
    most = max(_CELLS_OF_BATCH // (size * batch), 1)
    together = min(steps, 1 << (most.bit_length() - 1), MOST_TOGETHER)

    def parts(chosen: list[int]) -> Iterator[tuple[np.ndarray, ...]]:
        for start in range(0, steps, together):
            # rows and steps that pad the batch: no loss, no NaN
            laid = batch if engine_name() == "jax" else len(chosen)
            masses = np.zeros((laid, together, size))
            counts, excess = np.zeros((2, laid, together))
            masses[:, :, 0] = 1.0
            for j, i in enumerate(chosen):
                here = rows[i].masses[start : start + together]
                for k, (index, mass) in enumerate(here):
                    counts[j, k] = rows[i].counts[start + k]
                    if len(mass):
                        masses[j, k] = on_circle(index, mass, size)
                        excess[j, k] = _excess(index, mass, size)
            yield masses, counts, excess

    for start in range(0, len(members), batch):
        chosen = list(members[start : start + batch])
        firsts = []
        for i in chosen:
            away = sum(
                int(count) * _heaviest(*dist)
                for count, dist in zip(rows[i].counts, rows[i].masses, strict=True)
            )
            firsts.append((rows[i].first - away) % rows[i].size)
        yield chosen, parts(chosen), firsts


def _heaviest(index: np.ndarray, mass: np.ndarray) -> int:
    return int(index[np.argmax(mass)]) if len(mass) else 0


def _kernel_name(row: Row) -> str:
    """The kernel whose rounding errors are likely to be the smallest."""
    atoms = [float(m.max(initial=0.0)) for _, m in row.masses]
    # With many losses beside the atom nothing is gained, and a^T would underflow.
    if min(atoms) > _ATOM:
        log_power = sum(t * math.log(a) for t, a in zip(row.counts, atoms, strict=True))
        if -log_power < _LOG_NEGLIGIBLE_ATOM:
            return AROUND_ATOM
    if row.small_rounding:
        return PLAIN
    mean = variance = 0.0
    for (index, mass), count in zip(row.masses, row.counts, strict=True):
        if len(index):
            away = index - index[np.argmax(mass)]
            mean = max(mean, float(mass @ np.abs(away)))
            away = away - float(mass @ away)
            variance += count * float(mass @ np.minimum(away**2, _FARTHEST_SQUARED))
    # Beyond this frequency the power is negligible.
    highest = _DEVIATIONS / math.sqrt(max(variance, _LEAST_VARIANCE))
    highest = min(highest, _HIGHEST_FREQUENCY)
    return DIFFERENCES if mean * highest < _SMALL_ANGLE else PLAIN


def convolution_powers(rows: Sequence[Row]) -> list[CertifiedDistribution]:
    """Transforms all rows, those of one shape together, and back to their cells."""
    result: list[Any] = [None] * len(rows)
    groups: dict[tuple[int, int, str], list[int]] = {}
    for i, row in enumerate(rows):
        key = (row.size, len(row.masses), _kernel_name(row))
        groups.setdefault(key, []).append(i)
    for (size, _, name), members in groups.items():
        for chosen, parts, firsts in _circles(rows, members, size):
            sums = 0.0
            for part in parts:
                sums = sums + np.asarray(_SUMS[name](*part[:2]))
                # the phase modulo 1, and the rounding of one more addition
                sums[..., 2, :] -= np.round(sums[..., 2, :])
                sums[..., 3, :] += 4 * MACHINE
            finish = _cells_around_atom if name == AROUND_ATOM else _cells
            cells, *rounding = finish(sums, size=size)
            for j, i in enumerate(chosen):
                result[i] = rows[i].certified._replace(
                    cells=np.roll(cells[j], -firsts[j]),
                    rounding=(float(rounding[0][j]), float(rounding[1][j])),
                )
    return result

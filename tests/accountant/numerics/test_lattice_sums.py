"""Sums on a lattice against high-precision convolution: errors are within bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from jaxdp_episodic.accountant.numerics.lattice_sums import (
    Summand,
    cells_of_sum,
    lattice_sum,
)

SCALE = 1 << 200
SPACING = 0.01


def exact_power(parts):
    """``{lattice index: mass}`` of the sum, in 200-digit integers."""
    total = {0: SCALE}
    for index, _, masses, count in parts:
        whole = [
            (int(i), round(Fraction(float(m)) * SCALE))
            for i, m in zip(index, masses, strict=True)
        ]
        for _ in range(int(count)):
            new = {}
            for i, a in total.items():
                for j, b in whole:
                    new[i + j] = new.get(i + j, 0) + a * b // SCALE
            total = new
    return total


def on_circle(total, first, size):
    cells = [0] * size
    for i, mass in total.items():
        cells[(i - first) % size] += mass
    return np.array([c / SCALE for c in cells])


def summand(seed, atom, count):
    """Masses around an atom, some of them far smaller."""
    rng = np.random.default_rng(seed)
    index = np.arange(-4.0, 5.0)
    masses = rng.uniform(0, 1, 9) * 10.0 ** -rng.integers(0, 6, 9)
    masses[4] = 0
    masses *= (1 - atom) / masses.sum()
    masses[4] = atom
    return Summand(index, SPACING * index, masses / math.fsum(masses), count)


@pytest.mark.parametrize("counts", [(1,), (7,), (3, 5), (60,), (1,) * 12])
@pytest.mark.parametrize("atom", [0.0, 0.7, 0.999, 1 - 1e-9])
def test_rounding_is_within_its_bounds(counts, atom):
    parts = [summand(seed, atom, count) for seed, count in enumerate(counts)]
    cells, single, together = cells_of_sum(parts, -7, 32)
    error = np.abs(cells - on_circle(exact_power(parts), -7, 32))
    # masses add up to 1 up to rounding, which callers bound
    given = 2e-16 * sum(counts)
    assert np.all(error <= single + given)
    assert np.linalg.norm(error) <= together + 6 * given
    assert single <= 1e-13 * sum(counts)


def test_rounding_of_many_rare_losses_does_not_grow():
    """A million draws, nearly all at the atom, are as exact as one."""
    (part,) = [summand(0, 1 - 1e-6, 1e6)]
    _, single, _ = cells_of_sum([part], -32, 64)
    assert single < 5e-14


def test_two_opposite_halves():
    """At one frequency they cancel to 1e-7, and logarithms lose digits."""
    mass = np.array([1.0, 1 - 2e-7]) / (2 - 2e-7)
    parts = [Summand(np.array([0.0, 16.0]), np.zeros(2), mass, 3)]
    cells, single, _ = cells_of_sum(parts, 0, 32)
    assert np.all(np.abs(cells - on_circle(exact_power(parts), 0, 32)) <= single)


@pytest.mark.parametrize("tilt", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("counts", [(2,), (40,), (25, 15)])
def test_mass_outside_the_window_is_charged(tilt, counts):
    """A short window: aliasing occurs and is within its bound."""
    parts = [summand(seed, 0.2, count) for seed, count in enumerate(counts)]
    total = exact_power(parts)
    found = lattice_sum(parts, SPACING, 0.0, tilt, math.log(0.1), 0.0, 2**20)
    assert found is not None
    moment = math.fsum(
        m / SCALE * math.exp(tilt * SPACING * i) for i, m in total.items()
    )
    assert math.log(moment) == pytest.approx(found.log_moment, abs=1e-12)
    tilted = {i: m / SCALE * math.exp(tilt * SPACING * i) for i, m in total.items()}
    first = round(found.start / SPACING)
    last = first + len(found.cells)
    below = math.fsum(m for i, m in tilted.items() if i < first) / moment
    above = math.fsum(m for i, m in tilted.items() if i >= last) / moment
    assert below <= found.outside[0] and above <= found.outside[1]
    wrapped = np.zeros(len(found.cells))
    for i, m in tilted.items():
        wrapped[(i - first) % len(wrapped)] += m / moment
    assert np.all(np.abs(found.cells - wrapped) <= found.rounding[0] + 1e-13)


def test_a_lattice_that_is_too_long_is_refused():
    parts = [summand(0, 0.2, 40)]
    assert lattice_sum(parts, SPACING, 0.0, 1.0, -30.0, 0.0, 100) is None
    wide = lattice_sum(parts, SPACING, 0.0, 1.0, -30.0, 0.0, 2**20)
    assert wide is not None and max(wide.outside) <= math.exp(-30) * (1 + 1e-6)

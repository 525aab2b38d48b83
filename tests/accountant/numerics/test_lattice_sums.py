"""Sums on a lattice against high-precision convolution: errors are within bounds."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.accountant.numerics.convex_sums import lognormal_sum
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


@pytest.mark.parametrize("counts", [(1,), (3, 5), (60,), (1,) * 12])
@pytest.mark.parametrize("atom", [0.0, 0.7, 1 - 1e-9])
def test_rounding_is_within_its_bounds(counts, atom):
    parts = [summand(seed, atom, count) for seed, count in enumerate(counts)]
    cells, single, together = cells_of_sum(parts, -7, 32)
    error = np.abs(cells - on_circle(exact_power(parts), -7, 32))
    # masses add up to 1 up to rounding, which callers bound
    given = 2e-16 * sum(counts)
    assert np.all(error <= single + given)
    assert np.linalg.norm(error) <= together + 6 * given
    assert single <= 1e-13 * sum(counts)


def test_two_opposite_halves():
    """At one frequency they cancel to 1e-7, and logarithms lose digits."""
    mass = np.array([1.0, 1 - 2e-7]) / (2 - 2e-7)
    parts = [Summand(np.array([0.0, 16.0]), np.zeros(2), mass, 3)]
    cells, single, _ = cells_of_sum(parts, 0, 32)
    assert np.all(np.abs(cells - on_circle(exact_power(parts), 0, 32)) <= single)


@pytest.mark.parametrize("tilt", [0.5, 20.0])
@pytest.mark.parametrize("counts", [(2,), (25, 15)])
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
    for log_cut in (-30.0, 1e4):  # so large a cut leaves no window
        assert lattice_sum(parts, SPACING, 0.0, 1.0, log_cut, 0.0, 100) is None
    wide = lattice_sum(parts, SPACING, 0.0, 1.0, -30.0, 0.0, 2**20)
    assert wide is not None and max(wide.outside) <= math.exp(-30) * (1 + 1e-6)


# --- Lower and upper bounds of sums of lognormals ---


ROWS = json.loads((Path(__file__).parents[2] / "allocation.json").read_text())["rows"]
SINGLE = [row for row in ROWS if row[2] == 1]


def both(count, shift):
    return [lognormal_sum(count, shift, above=above) for above in (False, True)]


def gain(bound, x, *, rising):
    """``E(Y - x)_+`` (rising), or ``E(x - Y)_+``, at (m,) x, by their definition."""
    values, masses = bound.atoms()
    away = np.subtract.outer(values, x) * (1 if rising else -1)
    rest = bound.infinite if rising else bound.lost * x
    return masses @ np.maximum(away, 0.0) + rest


def ends(count, shift, x, *, rising):
    """Certified ends of ``E(X - x)_+``, or ``E(x - X)_+``."""
    low, high = both(count, shift)
    return tuple(
        float(gain(bound, np.array([x]), rising=rising)[0])
        * np.exp(sign * (bound.mass_error + 1e-11))
        for bound, sign in ((low, -1), (high, 1))
    )


@pytest.mark.parametrize("shift", [0.1, 3.3])
def test_one_term_has_the_price_of_an_option(shift):
    with mp.workdps(40):
        for deviations in (-4, -1, 0.5, 3, 6):
            x = mp.exp(mp.mpf(shift) * deviations - mp.mpf(shift) ** 2 / 2)
            call = mp.ncdf(shift - deviations) - x * mp.ncdf(-deviations)
            for rising, truth in ((True, call), (False, call - 1 + x)):
                low, high = ends(1, shift, float(x), rising=rising)
                assert low <= float(truth) <= high
                assert high < float(truth) * 1.001


@pytest.mark.parametrize(
    "row",
    [r if r[0] <= 100 else pytest.param(r, marks=pytest.mark.slow) for r in SINGLE],
    ids=lambda row: "-".join(map(str, row[:5])),
)
def test_single_epochs_of_the_reference(row):
    steps, noise, _, direction, epsilon, delta = row
    if direction == "remove":
        low, high = ends(steps, 1 / noise, steps * np.exp(epsilon), rising=True)
        truth = steps * delta
    else:
        low, high = ends(steps, 1 / noise, steps * np.exp(-epsilon), rising=False)
        truth = steps * delta * np.exp(-epsilon)
    assert low <= truth <= high
    assert np.log(high / low) < 3e-3
    # Neither bound holds as the other one.
    assert low < truth * (1 - 1e-8)
    assert high > truth * (1 + 1e-8)


SUMS = [(2, 1e-4, 1e-200), (7, 0.3, 1e-200), (3, 4.5, 1e-6), (2, 10.0, 1e-200)]


@pytest.mark.few(3)
@pytest.mark.parametrize(("count", "shift", "trimmed"), SUMS)
def test_masses_means_and_order(count, shift, trimmed, monkeypatch):
    monkeypatch.setattr(f"{lognormal_sum.__module__}._TRIMMED", trimmed)
    low, high = both(count, shift)
    found = []
    for bound in (low, high):
        values, masses = bound.atoms()
        found.append(masses @ (values - count) ** 2)
        assert np.all(masses > 0) and np.all(np.diff(values) > 0)
        assert masses.sum() + bound.lost == pytest.approx(1, abs=1e-10)
        assert masses @ values + bound.infinite == pytest.approx(count, rel=1e-10)
        assert bound.lost + bound.infinite / count < (1e-21 if trimmed < 1e-9 else 0.1)
        assert bound.mass_error + bound.place_error < 1e-8
    x = count * np.exp(np.linspace(-2, 2, 41) * shift)
    for rising in (True, False):
        least, most = (gain(bound, x, rising=rising) for bound in (low, high))
        assert np.all(least <= most * (1 + 1e-11))
    variance = count * np.expm1(shift**2)
    if shift < 4:
        assert found[0] < variance < found[1] < variance * (1 + 3e-4)

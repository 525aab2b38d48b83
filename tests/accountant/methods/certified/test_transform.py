"""What is chosen for a row, and the frequencies that are left out, to 40 digits."""

import dataclasses

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.accountant.methods.certified import hockey_stick, transform
from jaxdp_episodic.accountant.methods.certified.low_frequencies import LowFrequencies

SIZE, SPACING, TILT = 512, 0.01, 2.0


def row(counts, tolerance, seed=0):
    rng = np.random.default_rng(seed)
    index = np.arange(-6.0, 7.0)
    masses = [
        (index, mass / mass.sum()) for mass in rng.uniform(0.1, 1, (len(counts), 13))
    ]
    empty = hockey_stick.CertifiedDistribution(
        np.empty(0), (0.0, 0.0), (0.0, 0.0), -2.56, SPACING, TILT, 0.0, 0.0, 0.0, 0.0
    )
    rest = True, 0.5, 1e-6, tolerance, empty
    return hockey_stick.Row(masses, list(counts), SIZE, -256, *rest)


@pytest.mark.parametrize("counts", [(30.0,), (7.0, 40.0)])
def test_what_is_left_out_is_bounded(counts):
    """By a sum over all other frequencies, by definition."""
    given = row(counts, tolerance=1e-4)
    (low,) = transform.low_frequencies_of([given])
    assert isinstance(low, LowFrequencies)
    first = len(low.coefficients)
    assert first < SIZE // 2
    with mp.workdps(40):
        total = mp.mpf(0)
        for k in range(first, SIZE - first + 1):
            turn = mp.expjpi(mp.mpf(2 * k) / SIZE)
            power = mp.mpf(1)
            for (index, mass), count in zip(given.masses, counts, strict=True):
                one = mp.fsum(
                    mp.mpf(float(m)) * turn ** int(i)
                    for i, m in zip(index, mass, strict=True)
                )
                power *= abs(one) ** int(count)
            z, other = (mp.exp(-c * mp.mpf(SPACING)) * turn for c in (TILT, TILT + 1))
            total += power / abs((1 - z) * (1 - other))
        assert total / SIZE <= low.rest <= 3 * total / SIZE


@pytest.mark.parametrize("tolerance", [1e-4, 1e-13, 1e-30])
def test_rows_are_not_changed(tolerance):
    """A row that needs other frequencies comes back, with the kernel it needs."""
    given = row((3.0,), tolerance)
    before = dataclasses.replace(given)
    (found,) = transform.low_frequencies_of([given])
    assert given.small_rounding and given == before
    if tolerance < 1e-20:
        assert isinstance(found, hockey_stick.Row)


def test_a_row_whose_rounding_matters_is_transformed_by_another_kernel():
    """Of a narrow distribution where 1e-13 a step is too much."""
    mass = np.array([1e-7, 1.0, 1e-7])
    index = np.array([-1.0, 0.0, 1.0])
    wide = row((1.0,), 1e-30)
    given = dataclasses.replace(
        wide, masses=[(index, mass / mass.sum())], counts=[1e9], tolerance=1e-12
    )
    assert transform._kernel_name(given) == transform.PLAIN
    assert (
        transform._kernel_name(dataclasses.replace(given, small_rounding=False))
        == transform.DIFFERENCES
    )

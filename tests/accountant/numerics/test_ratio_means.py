"""Means that tables are held against: by closed forms, sums and a grid."""

import math

import numpy as np
import pytest
from mpmath import binomial, exp, factorial, log, mp, mpf

from jaxdp_episodic.accountant.numerics.ratio_means import (
    log_distances,
    log_middle_distance,
    moments_of_means,
    moments_of_ratio,
)


def of_one(shift, i, j):
    """``E A^i B^j``."""
    return exp(mpf(shift) ** 2 * ((i - j) ** 2 - i - j) / 2)


def test_as_many_powers_of_the_smallest_shifts():
    """30 over the shift is beyond all 64-bit integers."""
    one = np.array([7.0])
    found = moments_of_means(one, np.array([1e-18]), one)
    assert found.all.shape == (1, 101)


@pytest.mark.parametrize(("count", "shift"), [(7, 1.3), (40, 0.2), (3, 4.0)])
def test_powers_of_the_mean_are_those_of_raw_moments(count, shift):
    most = 12
    asked = np.array([count, 9]), np.array([shift, 0.2]), np.array([0.5, 1.0])
    (found, _) = moments_of_means(*asked).all
    found = found[np.isfinite(found)]
    with mp.workdps(60):
        one = [of_one(shift, k, 0) / factorial(k) for k in range(most + 1)]
        raw = [mpf(1)] + [mpf(0)] * most
        for _ in range(count):
            raw = [
                sum(raw[i] * one[k - i] for i in range(k + 1)) for k in range(most + 1)
            ]
        for m in range(2, min(most + 1, len(found))):
            parts = (
                (-1) ** (m - k) / factorial(m - k) * raw[k] / mpf(count) ** k
                for k in range(m + 1)
            )
            assert found[m] == pytest.approx(float(sum(parts) / mpf("0.5") ** m), 1e-11)


@pytest.mark.parametrize("shift", [0.1, 0.7, 2.0])
def test_powers_of_one_ratio_have_a_closed_form(shift):
    found = moments_of_ratio(1, 1, shift, 1.0).all
    with mp.workdps(60):
        for m in range(2, min(10, len(found))):
            parts = (
                binomial(m, k) * (-1) ** (m - k) * of_one(shift, k, 1 - k)
                for k in range(m + 1)
            )
            truth = float(sum(parts) / factorial(m))
            assert found[m] == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("shift", [0.1, 2.0, 5.0])
def test_distances_of_one_ratio_have_a_closed_form(shift):
    """At a shift of 5 the range of the integrals was too short, by 2e-4."""
    part = np.array([0.125, 0.5, 0.75])
    with mp.workdps(60):
        truth = [
            log(
                of_one(shift, a + 1, -a)
                - 2 * of_one(shift, a, 1 - a)
                + of_one(shift, a - 1, 2 - a)
            )
            for a in map(mpf, part.tolist())
        ]
    found = log_distances(1, 1, shift, part)
    np.testing.assert_allclose(found, np.array(truth, float), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("bins", "shift"),
    [(2, 0.3), pytest.param(2, 2.0, marks=pytest.mark.slow), (3, 3.0)],
)
def test_ratios_of_two_terms_are_those_on_a_grid(bins, shift):
    z = np.linspace(-3 * shift - 9, 3 * shift + 9, 1501)
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    a = np.exp(shift * z - 0.5 * shift * shift)
    x = (a[:, None] + a + bins - 2) / bins
    y = x[::-1, ::-1]
    both = density[:, None] * density

    def mean(value):
        return float(np.sum(value * both))

    distance = (x - y) ** 2
    found = math.exp(log_middle_distance(bins, 2, shift))
    assert found == pytest.approx(mean(distance / (x + y)), rel=1e-11)
    found = np.exp(log_distances(bins, 2, shift, np.array([0.5, 0.75])))
    for part, value in zip((0.5, 0.75), found.tolist(), strict=True):
        truth = mean(distance * x ** (part - 1) * y**-part)
        assert value == pytest.approx(truth, rel=1e-11)
    powers = moments_of_ratio(bins, 2, shift, 1.0).all
    for m in (2, 3):
        truth = mean((x - y) ** m * y ** (1.0 - m)) / math.factorial(m)
        assert m >= len(powers) or powers[m] == pytest.approx(truth, rel=1e-9)

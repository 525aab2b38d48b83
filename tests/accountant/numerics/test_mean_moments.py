"""Moments of means of lognormal terms, against powers of a series."""

import numpy as np
import pytest
from mpmath import exp, log, mp, mpf

from jaxdp_episodic.accountant.numerics.mean_moments import (
    FAR,
    Laplace,
    Tilted,
    log_distance,
    log_excess_transform,
    most_orders,
    whole_orders,
)
from oracles import allocation


# Few terms use doubling; order - 1 or more terms use a recurrence.
@pytest.mark.parametrize("shift", [1e-3, 3.0])
@pytest.mark.parametrize("spare", [-2, -1, 0, 300])
@pytest.mark.parametrize("idle", [0, 7])
def test_integer_orders_equal_the_power_of_a_series(shift, spare, idle):
    most = most_orders(shift, 24, tilted=False)
    count = most + spare
    found = whole_orders(count + idle, count, shift, most)
    assert found[0] == found[1] == 0
    with mp.workdps(60):
        truth = allocation.whole_excess(count + idle, count, shift, most)[2:]
        error = [abs(mpf(f) / e - 1) for f, e in zip(found[2:], truth, strict=True)]
    assert max(error) < 1e-13


def test_overflowing_moments_are_infinite():
    # Moments of one term overflow, and give neither NaN nor a finite number.
    for count in (5, 1000):
        with np.errstate(over="ignore"):
            found = whole_orders(count, count, 8.0, 8)
        assert found[-1] == np.inf and np.all(found[2:] > 0)
    # Of an incomplete epoch they made those of all lower orders NaN.
    with np.errstate(all="ignore"):
        found = Tilted(4.0, 2.0, 7.9, 3, of_other=True).log_moments
    assert np.all(np.isfinite(found[:3])) and np.all(found[3] == np.inf)


@pytest.mark.parametrize("shift", [1e-3, 0.1, 2.0])
def test_powers_of_one_term_in_closed_form(shift):
    """``E A^-z = e^{s² z (z + 1) / 2}``; the result is never too small."""
    z = np.array([0.01, 1.0, 3.7, 40.0, 400.0, 4000.0])
    z = z[z * shift**2 <= 80]
    found = Laplace(1.0, 1.0, shift, max(z), 0.01).log_excess_below(z)
    v = 0.5 * shift**2 * z * (z + 1)
    truth = v + np.log(-np.expm1(-v))
    error = (found - truth) / np.maximum(1, truth)
    assert -1e-11 < min(error) and max(error) < 1e-9


@pytest.mark.few(2)
@pytest.mark.parametrize("shift", [1e-3, 0.3])
@pytest.mark.parametrize("idle", [0, 1])
def test_far_transforms_of_a_nearly_constant_mean(shift, idle):
    """``E e^-pX`` is then near e^-p, which may not be left out."""
    slots, s = 3, mpf(shift)
    log_p = np.log(slots) + FAR + np.array([0.01, 3.0])
    found = log_excess_transform(log_p, slots, slots - idle, shift)
    with mp.workdps(40):
        for i in range(2):
            p = exp(mpf(log_p[i]))
            # Around the mode of e^{-pA/3} times the density.
            mode = -max(float(x) for x in np.linspace(0, 12, 1201) if _falls(x, p, s))
            points = [mode + mpf(k) / 40 for k in range(-480, 481)]
            one = sum(exp(-p / 3 * exp(s * x - s * s / 2) - x * x / 2) for x in points)
            one = log(one / 40 / mp.sqrt(2 * mp.pi)) * (slots - idle) - p * idle / 3
            error = found[i] - log(exp(one) - exp(-p))
            # An upper bound, up to 2e-14 of p relative to the rest of e^-p.
            assert 0 <= error < 2e-13 * p / min(one + p, 1)


def _falls(x, p, s):
    """Whether the integrand still increases left of -x."""
    return x < s * p / 3 * exp(-s * x - s * s / 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("shift", [0.1, 2.0, 5.0])
def test_distances_of_one_ratio_have_a_closed_form(shift):
    """Regression: at a shift of 5 the range of the integrals was too short by 2e-4."""

    def of_one(i, j):
        """``E A^i B^j``."""
        return exp(mpf(shift) ** 2 * ((i - j) ** 2 - i - j) / 2)

    a = mpf(1) / 2
    with mp.workdps(60):
        truth = log(of_one(a + 1, -a) - 2 * of_one(a, 1 - a) + of_one(a - 1, 2 - a))
    assert log_distance(1, 1, shift) == pytest.approx(float(truth), rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("bins", "shift"),
    [(2, 0.3), pytest.param(2, 2.0, marks=pytest.mark.slow), (3, 3.0)],
)
def test_distances_of_two_terms_are_those_on_a_grid(bins, shift):
    z = np.linspace(-3 * shift - 9, 3 * shift + 9, 1501)
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    a = np.exp(shift * z - 0.5 * shift * shift)
    x = (a[:, None] + a + bins - 2) / bins
    y = x[::-1, ::-1]
    truth = np.sum((x - y) ** 2 / np.sqrt(x * y) * density[:, None] * density)
    assert np.exp(log_distance(bins, 2, shift)) == pytest.approx(truth, rel=1e-11)

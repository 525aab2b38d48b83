"""Tails of sums of lognormals, against long integrals of the definition."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.interpolate import make_interp_spline

from jaxdp_episodic.accountant.numerics.skewed_starts import starts_for
from jaxdp_episodic.accountant.numerics.skewed_sums import contours as skewed_contours
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    Terms,
    larger_saddle,
    place_of,
    too_rare,
    transforms_on_axis,
)
from jaxdp_episodic.accountant.numerics.two_terms import log_tails_of_two
from oracles import allocation

ROWS = json.loads((Path(__file__).parents[2] / "allocation.json").read_text())["rows"]


def antipodal(count, shift, log_g, idle=0.0, *, finer=False):
    """By contours that all these places share."""
    terms, log_g = Terms(count, shift, idle), np.atleast_1d(np.float64(log_g))
    starts = starts_for(terms, log_g.max())
    return skewed_contours(terms, starts, finer=finer).log_tails(log_g)


def log_density_of_eight(shift, place):
    """Of log X at ``log 8 + place``: densities of two halves added up, three times."""

    def density(v):
        return -0.5 * (v / shift + 0.5 * shift) ** 2 - np.log(
            shift * np.sqrt(2 * np.pi)
        )

    u = np.linspace(-30, 30, 1501)
    low, high = -np.logaddexp(0, -u), -np.logaddexp(0, u)
    for count in (2, 4, 8):
        v = np.log(count) + np.linspace(-15, 16, 500) * shift
        v = v if count < 8 else np.log(8) + place
        halves = density(v[:, None] + low) + density(v[:, None] + high)
        row = np.logaddexp.reduce(halves, axis=1) + np.log(u[1] - u[0])
        density = make_interp_spline(v, row, 5)
    return row


@pytest.mark.parametrize(("shift", "epsilon"), [(0.3, 0.2), (1.0, 1.0), (2.5, 3.0)])
def test_antipodal_sums_of_two(shift, epsilon):
    ours = np.exp(antipodal(2, shift, epsilon)[0, 0]) / 2
    true = allocation.antipodal_of_two(shift, epsilon)
    assert ours == pytest.approx(true, rel=1e-11)


@pytest.mark.parametrize(("shift", "epsilon"), [(1 / 1.2, 7.5), (1.0, 14)])
def test_antipodal_sums_of_three_far_out(shift, epsilon):
    # Most of one term's density is left out where it counts nothing: not all its mass.
    ours = antipodal(3, shift, epsilon)[0, 0] - np.log(3)
    true = np.log(allocation.antipodal(3, 3, shift, epsilon))
    assert ours == pytest.approx(true, abs=3e-8)


@pytest.mark.parametrize(
    ("steps", "shift", "epsilon"), [(5, 0.3, 2.5), (30, 0.3, 0.6), (30, 0.3, 0.98)]
)
def test_rare_jumps_of_light_antipodal_terms(steps, shift, epsilon):
    # Down to e^-90: they were 5e-5 to 0.4 too small.
    ours = antipodal(3, shift, epsilon, steps - 3)[0, 0] - np.log(steps)
    true = np.log(allocation.antipodal(steps, 3, shift, epsilon))
    assert ours == pytest.approx(true, abs=1e-7)


@pytest.mark.parametrize(
    ("shift", "epsilon"), [(0.01, 0.02), (0.3, 0.2), (0.85, 8.0), (2.5, 3.0)]
)
def test_two_terms_in_closed_form(shift, epsilon):
    # At 0.01 the contour has no value.
    nothing, log_g = np.zeros(1), np.array([epsilon])
    gain, first, second = log_tails_of_two(nothing, shift, log_g, 0.0)
    true = allocation.antipodal_of_two(shift, epsilon)
    assert np.exp(gain[0]) / 2 == pytest.approx(true, rel=1e-12)
    # The second tail is minus the derivative in g of the first, the third is its own.
    step = 1e-4 * min(shift, 1.0)
    around = [
        [np.exp(row[0]) for row in log_tails_of_two(nothing, shift, log_g + d, 0.0)]
        for d in (-step, step)
    ]
    rise = (around[1][0] - around[0][0]) / (np.exp(epsilon) * 2 * np.sinh(step))
    assert -rise == pytest.approx(np.exp(first[0]), rel=1e-5)
    rise = (around[1][1] - around[0][1]) / (np.exp(epsilon) * 2 * np.sinh(step))
    assert -rise == pytest.approx(np.exp(second[0]), rel=1e-5)


@pytest.mark.parametrize(
    ("shift", "epsilon", "idle"),
    [(4.0, 20.0, 0.0), (6.25, 70.0, 0.0), (6.25, 40.0, 3.0), (10.0, 150.0, 3.0)],
)
def test_two_terms_under_little_noise_far_out(shift, epsilon, idle):
    # Where e^{-pgB} vanishes within 1/s: with five panels 2e-9 was off. Of idle steps
    # one term turns within e^-100 of a deviation: the third was off by 0.2, or NaN.
    constant, log_g = np.array([-np.expm1(epsilon) * idle]), np.array([epsilon])
    closed = log_tails_of_two(constant, shift, log_g, idle)
    contour = antipodal(2, shift, log_g, idle)
    np.testing.assert_allclose(contour, np.array(closed), rtol=0, atol=2e-10)


def test_two_terms_and_idle_steps():
    log_g = np.array([0.1, 0.5, 1.0])
    constant = -3 * np.expm1(log_g)
    ours = log_tails_of_two(constant, 1.0, log_g, 3.0)
    assert np.array(ours) == pytest.approx(antipodal(2, 1.0, log_g, 3.0), rel=1e-12)


def test_distant_neighbours_do_not():
    # K^n of small g turns where that of large g has not begun to.
    log_g = np.geomspace(0.1, 14.0, 16)
    together = antipodal(7, 1.22, log_g)
    for i in (0, 2, 8):
        alone = antipodal(7, 1.22, log_g[i])[:, 0]
        np.testing.assert_allclose(together[:, i], alone, atol=1e-11)


@pytest.mark.parametrize("shift", [0.4, 1.0, 2.5])
def test_jumps_too_rare_for_one_count_for_its_neighbours(shift):
    """Moved by d the transform is that of ``p e^-sd`` and ``g e^2sd``."""
    p = np.exp(place_of(too_rare(np.array([shift])) + np.array([0.2, 1.0]), shift))
    terms, log_g, move = Terms(3, shift, 0.0), np.full(2, 1.3), np.array([-2.0, 1.0])
    together = transforms_on_axis(p, log_g, terms, move).excess[:, 0]
    p, log_g = p * np.exp(-shift * move[0]), log_g + 2 * shift * move[0]
    alone = transforms_on_axis(p, log_g, terms, np.zeros(1)).excess[:, 0]
    # Above the axis, what the jump takes.
    np.testing.assert_allclose(np.imag(together), np.imag(alone), rtol=1e-8)
    assert np.all(np.imag(together) != 0)


def test_derivatives_in_g_are_those_of_the_profile():
    step, at = 1e-4, 1.3
    values = [antipodal(6, 1.0, np.log(at + k * step)) for k in (-1, 0, 1)]
    first = [np.exp(v[0][0]) for v in values]
    slope = (first[0] - first[2]) / (2 * step)
    bend = (first[0] - 2 * first[1] + first[2]) / step**2
    assert np.exp(values[1][1][0]) == pytest.approx(slope, rel=1e-7)
    assert np.exp(values[1][2][0]) == pytest.approx(bend, rel=1e-6)


@pytest.mark.parametrize("shift", [0.05, 0.4, 1.0, 3.0])
def test_the_larger_saddle_is_one(shift):
    log_p = 0.5 * shift**2 - 1 - 2 * np.log(shift) - np.array([0.0, 1e-6, 0.5, 30.0])
    x = larger_saddle(log_p, shift)
    assert np.all(x >= 1 / shift)
    reached = log_p + np.log(shift) + shift * x - 0.5 * shift**2
    np.testing.assert_allclose(reached, np.log(x), atol=1e-9)


def test_terms_that_turn_by_more_than_a_quarter_are_the_same_on_a_shared_contour():
    """K has a negative real part there, of which three terms have an odd power."""
    log_g = np.array([0.31, 0.55, 1.09, 2.61, 3.15, 3.77, 4.5])
    alone = [antipodal(3, 1.0, one) for one in log_g]
    together = antipodal(3, 1.0, log_g)
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), atol=1e-10)


def test_contours_that_start_at_next_to_nothing():
    """Their squares are 0; "math domain error" ended epochs at noise 0.1."""
    assert not np.isposinf(antipodal(5, 9.99, 387.5)).any()


def test_light_terms_that_both_sides_make_large():
    """Where p A and p g B are hundreds, but not their difference: all of K counts."""
    p, shift = np.array([810.0, 850.0, 900.0]), 0.003
    terms = Terms(3, shift, 0.0)
    found = transforms_on_axis(p, np.zeros(3), terms, np.zeros(1)).whole[:, 0].real
    x = np.linspace(-30.0, 40.0, 7_001)
    exponent = 2 * math.exp(-0.5 * shift**2) * np.sinh(shift * x)
    density = np.exp(p[:, None] * exponent - 0.5 * x * x) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(found, density.sum(axis=1) * 0.01, rtol=1e-12)

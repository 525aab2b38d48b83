"""Ends from low frequencies, and from cells, against exact convolution."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from jaxdp_episodic.accountant.methods.certified import (
    hockey_stick,
    low_frequencies,
    powers,
    transform,
)
from jaxdp_episodic.accountant.methods.certified.lattice import LatticeDistribution
from jaxdp_episodic.accountant.methods.certified.window import Direction

SPACING, COUNT = 0.01, 60.0


def plan(tilt, epsilon):
    """A window wide enough for the whole support, whatever the tilt."""
    return Direction(
        tilt=tilt,
        epsilon=epsilon,
        log_delta=-5.0,
        slope=tilt,
        log_share=-3.0,
        width=1e-3 * epsilon,
        low=0.0,
        high=0.0,
        log_cut=-60.0,
        up_tilt=tilt + 40,
        down_tilt=tilt - 40,
        given=True,
        only_bound=False,
        ranges=(),
        weights=(),
    )


def random_steps(seed):
    rng = np.random.default_rng(seed)
    index = np.arange(-9.0, 10.0)
    masses = rng.uniform(0.1, 1, 19) * np.exp(-0.3 * np.abs(index))
    return LatticeDistribution(index, index * SPACING, masses / masses.sum())


SCALE = 1 << 200


@functools.cache
def exact_power(masses):
    """Convolution in integers."""
    scale = SCALE
    whole = [round(Fraction(m) * scale) for m in masses]
    total = [scale]
    for _ in range(int(COUNT)):
        new = [0] * (len(total) + len(whole) - 1)
        for i, a in enumerate(total):
            for j, b in enumerate(whole):
                new[i + j] += a * b // scale
        total = new
    return total


def exact_log_delta(one, epsilon):
    """By exact convolution and a sum with 50 digits."""
    total, scale = exact_power(tuple(one.masses.tolist())), SCALE
    least = int(one.index[0]) * int(COUNT)
    with mpmath.workdps(50):
        delta = mpmath.mpf(0)
        for i, mass in enumerate(total):
            excess = (least + i) * mpmath.mpf(SPACING) - mpmath.mpf(epsilon)
            if excess > 0:
                delta += mpmath.mpf(mass) / scale * -mpmath.expm1(-excess)
        return float(mpmath.log(delta))


def row(one, tilt, epsilon):
    size, first = 1024, -512
    return hockey_stick.tilted_row(
        [one], [COUNT], plan(tilt, epsilon), 0.0, 0.0, 0.0, SPACING, first, size
    )


@pytest.mark.parametrize("seed, epsilon, tilt", [(0, 0.5, 1.0), (1, 1.003, 8.0)])
@pytest.mark.parametrize("small_rounding", [True, False])
def test_both_ends_hold_the_exact_delta(seed, epsilon, tilt, small_rounding):
    one = random_steps(seed)
    given = row(one, tilt, epsilon)
    given.small_rounding = small_rounding
    (few,) = transform.low_frequencies_of([given])
    assert (
        isinstance(few, low_frequencies.LowFrequencies) and len(few.coefficients) <= 64
    )
    truth = exact_log_delta(one, epsilon)
    (low, _), (high, _) = low_frequencies.certified_ends(
        [few] * 2, [epsilon] * 2, [False, True], of_epsilon=False
    )
    assert low <= truth <= high <= low + 1e-5
    (low, _), (high, estimate) = low_frequencies.certified_ends(
        [few] * 2, [truth] * 2, [False, True], of_epsilon=True
    )
    # the search aims beside the target by a share of the planned precision
    assert low <= epsilon <= high <= low + 1e-4 * epsilon
    assert abs(estimate.epsilon - epsilon) <= 1e-4 * epsilon


def test_cells_say_the_same():
    one, epsilon, tilt = random_steps(2), 0.7, 3.0
    (certified,) = transform.convolution_powers([row(one, tilt, epsilon)])
    truth = exact_log_delta(one, epsilon)
    for upper in (False, True):
        end, _ = hockey_stick.certified_log_delta(
            certified, epsilon, certify_upper=upper
        )
        assert abs(end - truth) <= 1e-5 and (end >= truth) == upper
        end, _ = hockey_stick.certified_epsilon(certified, truth, certify_upper=upper)
        assert abs(end - epsilon) <= 1e-5 and (end >= epsilon) == upper


def test_what_is_left_out_is_added():
    """With most frequencies cut the ends are far apart, and still hold the truth."""
    one, epsilon, tilt = random_steps(0), 0.5, 1.0
    truth = exact_log_delta(one, epsilon)
    given = row(one, tilt, epsilon)
    given.tolerance = 1.0
    (coarse,) = transform.low_frequencies_of([given])
    assert (
        isinstance(coarse, low_frequencies.LowFrequencies)
        and len(coarse.coefficients) == 8
    )
    (low, _), (high, _) = low_frequencies.certified_ends(
        [coarse] * 2, [epsilon] * 2, [False, True], of_epsilon=False
    )
    assert low <= truth <= high
    assert high - low > 1e-3
    # not so without what the rest is worth, somewhere
    held = []
    for epsilon in np.linspace(0.2, 0.8, 13):
        truth = exact_log_delta(one, epsilon)
        (low, _), (high, _) = low_frequencies.certified_ends(
            [coarse._replace(rest=0.0)] * 2,
            [epsilon] * 2,
            [False, True],
            of_epsilon=False,
        )
        held.append(low <= truth <= high)
    assert not all(held)


def test_masses_outside_the_window_and_infinite_ones_are_added():
    one, epsilon, tilt = random_steps(0), 0.5, 1.0
    (few,) = transform.low_frequencies_of([row(one, tilt, epsilon)])
    assert isinstance(few, low_frequencies.LowFrequencies)

    def ends(certified):
        lows = [few._replace(certified=certified)] * 2
        (low, _), (high, _) = low_frequencies.certified_ends(
            lows, [epsilon] * 2, [False, True], of_epsilon=False
        )
        return low, high

    low, high = ends(few.certified)
    wider = ends(few.certified._replace(truncated=(1e-3, 1e-3)))
    assert wider[0] < low and high < wider[1]
    _, with_infinite = ends(few.certified._replace(infinite=1e-3))
    assert math.exp(with_infinite) - math.exp(high) == pytest.approx(1e-3, rel=1e-6)
    moved = ends(few.certified._replace(shift=0.01))
    assert moved[0] < low and high < moved[1]


@pytest.mark.parametrize(
    "kernel", [transform.PLAIN, transform.DIFFERENCES, transform.AROUND_ATOM, "low"]
)
def test_laws_are_added_up_a_few_at_a_time(kernel, monkeypatch):
    """Of many different steps no more than some are on the circle at once."""
    dists = []
    for seed in range(7):
        index, losses, masses, *_ = random_steps(seed)
        masses[9] += 20.0 * (kernel != "low")
        dists.append(LatticeDistribution(index, losses, masses / masses.sum()))
    given = hockey_stick.tilted_row(
        dists, [9.0] * 7, plan(1.0, 0.2), 0.0, 0.0, 0.0, SPACING, -512, 1024
    )
    monkeypatch.setattr(transform, "_kernel_name", lambda row: kernel)
    found = []
    for together in (16, 2):
        for module in (transform, powers):
            monkeypatch.setattr(module, "MOST_TOGETHER", together)
        if kernel == "low":
            (low,) = transform.low_frequencies_of([given])
            assert isinstance(low, low_frequencies.LowFrequencies)
            found.append((low.coefficients, low.rest))
        else:
            (certified,) = transform.convolution_powers([given])
            found.append((certified.cells, max(certified.rounding)))
    (values, error), (again, other) = found
    np.testing.assert_allclose(again, values, rtol=0, atol=1e-14)
    assert other == pytest.approx(error, rel=0.5)

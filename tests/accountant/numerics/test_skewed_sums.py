"""Tails of sums of lognormals, against long integrals of the definition."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.interpolate import make_interp_spline
from scipy.stats import norm

from jaxdp_episodic.accountant.losses.allocation_tables import sum_tables
from jaxdp_episodic.accountant.numerics.lognormal_sums import axis_of, contours
from jaxdp_episodic.accountant.numerics.lognormal_terms import Sums
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
from rows import fast_and_slow

ROWS = json.loads((Path(__file__).parents[2] / "allocation.json").read_text())["rows"]


def tails(settings, place, *, finer=False):
    """Of (count, shift, rising), those that rise first; the same places of each."""
    terms = Sums(*np.array(settings, np.float64).T)
    end = np.full(len(settings), max(place))
    along = contours(axis_of(terms), end)
    which = np.repeat(np.arange(len(settings)), len(place))
    return along.log_tails(which, np.tile(place, len(settings)), finer=finer)


def sums(count, constant, shift, *, rising=True):
    """Each place by itself."""
    parts = []
    for n, k, s in np.broadcast(count, constant, shift):
        parts.append(tails([(n, s, rising)], np.array([abs(np.log(abs(k) / n))])))
    return np.concatenate(parts, axis=1)


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


@pytest.mark.parametrize("shift", [0.25, 0.45])
def test_rare_jumps_of_light_terms(shift):
    # Where one saddle's size falls off only behind 2/s; down to e^-76.
    table, _ = sum_tables(8, shift)
    place = np.linspace(0.1, 0.92, 10) * table.end
    found = table.at(place)[2] + place + np.log(8)  # of X, then of its logarithm
    assert found[-1] < -70
    true = log_density_of_eight(shift, place)
    np.testing.assert_allclose(found, true, rtol=0, atol=2e-10)


@pytest.mark.parametrize(("count", "shift"), [(3, 2.0), (40, 0.7), (40, 0.1)])
@pytest.mark.parametrize("kind", ["rising", "falling", "antipodal"])
def test_neighbours_share_contours(count, shift, kind):
    place = np.linspace(0.0, 6 * np.sqrt(np.log1p(np.expm1(shift**2) / count)), 12)
    up = kind != "falling"
    if kind == "antipodal":
        together = antipodal(count, shift, place, 5.0)
        each = [antipodal(count, shift, one, 5.0) for one in place]
    else:
        together = tails([(count, shift, up)], place)
        each = [tails([(count, shift, up)], one) for one in place[:, None]]
    for i in range(0, 12, 5):
        np.testing.assert_allclose(together[:, i], each[i][:, 0], atol=2e-11)


def test_sums_side_by_side():
    # Other numbers of contours, nodes and jumps: each as by itself.
    settings = [(40, 0.7, 1), (3, 0.1, 1), (1000, 2.5, 1), (4, 2.0, 0), (99, 0.3, 0)]
    place = np.linspace(0.0, 0.4, 5)
    together = np.split(tails(settings, place), len(settings), axis=1)
    for setting, rows in zip(settings, together, strict=True):
        np.testing.assert_allclose(rows, tails([setting], place), rtol=1e-13)


def test_single_epochs_of_the_reference():
    for steps, noise, epochs, direction, epsilon, delta in ROWS:
        if epochs > 1:
            continue
        if direction == "remove":
            ours = sums(steps, -steps * np.exp(epsilon), 1 / noise)[0] - np.log(steps)
        else:
            x = steps * np.exp(-epsilon)
            ours = sums(steps, x, 1 / noise, rising=False)[0] + epsilon - np.log(steps)
        assert np.exp(ours[0]) == pytest.approx(delta, rel=1e-10)


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


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("steps", "taken", "shift", "epsilon"),
    [
        (2, 2, 0.2, 0.5),
        (7, 2, 1.0, 0.2),
        (4, 2, 3.0, 0.6),
        pytest.param(3, 3, 0.7, 1.2, marks=pytest.mark.slow),
        pytest.param(12, 3, 1.4, 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_few_steps_by_definition(steps, taken, shift, epsilon, direction):
    g, idle = np.exp(epsilon), steps - taken
    if direction == "remove":
        ours = np.exp(sums(taken, idle - g * steps, shift)[0][0]) / steps
    else:
        below = sums(taken, steps / g - idle, shift, rising=False)
        ours = g * np.exp(below[0][0]) / steps
    true = allocation.add_remove(steps, taken, shift, epsilon, direction)
    assert ours == pytest.approx(true, rel=2e-9)


def test_both_sides_agree_at_the_mean():
    # E(X - n)_+ = E(n - X)_+, P(X > n) + P(X < n) = 1, one density: two contours.
    rng = np.random.default_rng(5)
    count = np.floor(np.exp(rng.uniform(np.log(2), np.log(1e6), 8)))
    shift = np.exp(-rng.uniform(np.log(0.3), np.log(10), 8))
    above, below = (sums(count, c * count, shift, rising=c < 0) for c in (-1.0, 1.0))
    np.testing.assert_allclose(above[0], below[0], atol=1e-8)
    np.testing.assert_allclose(np.exp(above[1]) + np.exp(below[1]), 1, rtol=1e-8)
    np.testing.assert_allclose(above[2], below[2], atol=1e-7)


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


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize(
    "shift",
    fast_and_slow([0.02, 0.108, 0.3, 1.0, 3.0], lambda shift: shift in (0.02, 0.3, 3)),
)
def test_two_lognormal_terms_far_out(shift, rising):
    # Given one term the other's gain is a price of Black and Scholes: all positive.
    core = np.sqrt(np.log1p(np.expm1(shift**2) / 2))
    place = core * np.array([0.0, 1.0, 4.0, 9.2])
    found = tails([(2, shift, rising)], place)[0]
    y = np.linspace(-20, 20, 200_001)
    weight = 2e-4 * norm.pdf(y)
    left = 2 * np.exp(place if rising else -place)[:, None] - np.exp(
        shift * y - shift**2 / 2
    )
    sign = 1 if rising else -1
    with np.errstate(divide="ignore", invalid="ignore"):
        d = -np.log(left) / shift
        price = sign * (
            norm.cdf(sign * (d + shift / 2))
            - np.maximum(left, 0) * norm.cdf(sign * (d - shift / 2))
        )
    price = np.where(left > 0, price, (1 - left) if rising else 0.0)
    # Small sums' places have all digits, far below the mean as well.
    rtol = 1e-7 if rising else 1e-10
    np.testing.assert_allclose(np.exp(found), price @ weight, rtol=rtol)


@pytest.mark.parametrize(("count", "shift"), [(4, 0.11), (30, 3.0), (1e6, 1.0)])
@pytest.mark.parametrize("rising", [True, False])
def test_other_contours_with_more_nodes_agree(count, shift, rising):
    place = np.linspace(0, 6, 20) * np.sqrt(np.log1p(np.expm1(shift**2) / count))
    one, other = (
        tails([(count, shift, rising)], place, finer=finer) for finer in (False, True)
    )
    np.testing.assert_allclose(one, other, atol=1e-8)


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

"""Brackets of means of sums of hyperbolic sines, against integrals by definition."""

import numpy as np
import pytest
from scipy.special import ndtr

from jaxdp_episodic.accountant.numerics.signed_sums import (
    MEANS,
    bounds_between,
    far_out,
    sinh_sums,
)


def gain_bounds(count, shift, tilt, threshold, y, beside=(), cells=640):
    """Lower and upper bound of the gain at y; other tilts may share the lattices."""
    for up in (False, True):
        tilts = np.array([tilt, *beside])
        bound, *_ = sinh_sums(count, shift, tilts, threshold, above=up, cells=cells)
        yield bound.gain(np.array([y]), above=up)[0]


def gain_of_two(shift, tilt, y):
    """``E(2 sinh(s z) + 2 sinh(s z') - y)_+``, z ~ N(-tilt, 1), one in closed form."""
    x, w = np.polynomial.legendre.leggauss(24)
    edges = np.linspace(-13.0, 13.0 + 2 * shift, 400)
    # Where one term alone reaches y, the other's part begins within 1 / y.
    away = np.geomspace(1e-14, 3.0, 60)
    reached = np.arcsinh(y / 2) / shift + tilt
    edges = np.sort(np.concatenate([edges, reached - away, reached + away]))
    half = 0.5 * np.diff(edges)[:, None]
    x, w = (edges[:-1, None] + half * (x + 1)).ravel(), (half * w).ravel()
    w = w * np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)
    left = y - 2 * np.sinh(shift * (x - tilt))
    start = np.arcsinh(left / 2) / shift + tilt
    up, down = (np.exp(shift**2 / 2 + s * shift * -tilt) for s in (1, -1))
    gain = up * ndtr(shift - start) - down * ndtr(-shift - start)
    return float(w @ (gain - left * ndtr(-start)))


@pytest.mark.parametrize("cells", [640, 256])
@pytest.mark.parametrize(
    ("shift", "tilt", "y"),
    [(1.0, 0.0, 0.0), (1.0, 2.0, 0.0), (0.2, 3.0, 0.1), (3.0, 1.0, 40.0), (1.0, 0, -9)],
)
def test_two_terms(shift, tilt, y, cells):
    true = gain_of_two(shift, tilt, y)
    for beside in ((), (tilt + 0.05, tilt + 0.1), (tilt - 0.1,)):
        low, high = gain_bounds(2, shift, tilt, y, y, beside, cells=cells)
        assert low <= true <= high
        assert high - low <= 2e-4 * (640 / cells) ** 2 * true


@pytest.mark.parametrize(("shift", "tilt", "y"), [(4.7, 0.9, 1.4e22), (9.0, 0.1, 1e30)])
def test_a_hinge_far_above_the_terms(shift, tilt, y):
    """Regression: points near 0 were lost in rounding, by more than e^700."""
    true = gain_of_two(shift, tilt, y)
    low, high = gain_bounds(2, shift, tilt, y, y)
    assert low <= true <= high
    assert high - low <= 1e-5 * true


def test_the_mean_is_kept_up_to_truncation():
    """Far from the hinge the gain is the distance of the mean."""
    for count in (2, 5):
        mean = -2 * count * np.exp(0.5 * 0.5**2) * np.sinh(0.5 * 0.3)
        for found in gain_bounds(count, 0.5, 0.3, 0.0, -1e4):
            assert found == pytest.approx(mean + 1e4, rel=1e-9)


@pytest.mark.slow
def test_random_settings_of_two_terms():
    rng = np.random.default_rng(3)
    for _ in range(60):
        shift, tilt = 10 ** rng.uniform(-2, 0.6), rng.uniform(0, 5)
        y = rng.choice([0.0, 1.0]) * rng.exponential() * shift
        true = gain_of_two(shift, tilt, y)
        if true < 1e-19 * shift:
            continue
        low, high = gain_bounds(2, shift, tilt, y, y, tilt + rng.uniform(-0.2, 0.2, 3))
        # the oracle is accurate to 1e-10
        assert low <= true * (1 + 1e-10), (shift, tilt, y)
        assert true * (1 - 1e-10) <= high, (shift, tilt, y)


def test_values_beyond_all_lattices_are_kept():
    """Regression: in a last cell they were added to values near 0, 1.3e-3 too low."""
    low, high = gain_bounds(46, 3.268, 0.5367, 0.0, 0.0)
    assert low <= high <= low * (1 + 1e-5)


def test_mass_beyond_a_lattice_is_placed_at_most_at_its_mean():
    widest, masses = 100, np.array([0.0, 1e-3])
    for mean in (-1.5 * MEANS * widest, -300.0, 300.0, 1.5 * MEANS * widest):
        pieces = far_out(2, masses, mean * masses, widest)
        # Much further out rounding is not bounded: moved nearer, or dropped below.
        if mean < -MEANS * widest:
            assert not pieces
            continue
        (piece,) = pieces
        known = min(mean, MEANS * widest)
        assert piece.first == round(known / 4)
        assert piece.moments[:, 0] == pytest.approx([0, known * 1e-3], rel=1e-15)


# --- Polynomials through brackets of a mean of exponentials ---


def means(x, seed):
    """``E e^{-x Z}`` of some Z with weights; convex and more."""
    rng = np.random.default_rng(seed)
    z, weight = rng.normal(0, 3, 7), rng.uniform(0, 1, 7)
    return np.exp(-np.multiply.outer(x, z)) @ weight


@pytest.mark.parametrize("cell", [1, 4, 7])
def test_the_bounds_contain_the_mean_and_are_close(cell):
    places = np.cumsum(np.linspace(0.05, 0.09, 10)) - 0.3
    x = np.linspace(places[cell], places[cell + 1], 11)
    for seed in range(20):
        true, known = means(x, seed), means(places, seed)[:, None]
        for off, close in ((0.0, 2e-2), (1e-4, 3e-2)):
            known_ends = (
                np.broadcast_to(known * (1 + sign * off), (len(places), len(x)))
                for sign in (-1, 1)
            )
            bounds = bounds_between(places, *known_ends, cell, x)
            assert np.all(bounds[0] <= true * (1 + 1e-13))
            assert np.all(true <= bounds[1] * (1 + 1e-13))
            assert np.all(bounds[1] - bounds[0] <= close * true)
    if 2 < cell < 6:  # with points on both sides
        exact = np.broadcast_to(known, (len(places), len(x)))
        low, high = bounds_between(places, exact, exact, cell, x)
        assert np.all(high - low <= 1e-7 * true)


def test_two_points_bound_from_one_side_only():
    places = np.array([0.0, 1.0])
    known = means(places, 1)[:, None] * np.ones((1, 3))
    x = np.array([0.0, 0.4, 1.0])
    low, high = bounds_between(places, known, known, 0, x)
    assert np.all(low == 0)
    assert high == pytest.approx(np.interp(x, places, known[:, 0]), rel=1e-12)

"""Polynomials through brackets of a mean of exponentials, against the mean itself."""

import numpy as np
import pytest

from jaxdp_episodic.accountant.numerics.signed_sums import bounds_between


def means(x, seed):
    """``E e^{-x Z}`` of some Z with weights; convex and more."""
    rng = np.random.default_rng(seed)
    z, weight = rng.normal(0, 3, 7), rng.uniform(0, 1, 7)
    return np.exp(-np.multiply.outer(x, z)) @ weight


@pytest.mark.parametrize("cell", range(1, 8))
def test_the_mean_is_between_and_nearly_met(cell):
    places = np.cumsum(np.linspace(0.05, 0.09, 10)) - 0.3
    x = np.linspace(places[cell], places[cell + 1], 11)
    for seed in range(20):
        true, known = means(x, seed), means(places, seed)[:, None]
        for off, close in ((0.0, 2e-2), (1e-4, 3e-2)):
            low, high = known * (1 - off), known * (1 + off)
            shape = (len(places), len(x))
            bounds = bounds_between(
                places,
                np.broadcast_to(low, shape),
                np.broadcast_to(high, shape),
                cell,
                x,
            )
            assert np.all(bounds[0] <= true * (1 + 1e-13))
            assert np.all(true <= bounds[1] * (1 + 1e-13))
            assert np.all(bounds[1] - bounds[0] <= close * true)
    if 2 < cell < 6:  # with places on both sides
        exact = np.broadcast_to(known, shape)
        low, high = bounds_between(places, exact, exact, cell, x)
        assert np.all(high - low <= 1e-7 * true)


def test_two_places_bound_from_one_side_only():
    places = np.array([0.0, 1.0])
    known = means(places, 1)[:, None] * np.ones((1, 3))
    x = np.array([0.0, 0.4, 1.0])
    low, high = bounds_between(places, known, known, 0, x)
    assert np.all(low == 0)
    assert high == pytest.approx(np.interp(x, places, known[:, 0]), rel=1e-12)

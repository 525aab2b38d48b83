"""Tables of functions that are known by their values alone."""

import numpy as np

from jaxdp_episodic.accountant.numerics.chebyshev_tables import tabulated


def test_what_is_rough_by_rounding_is_not_halved_without_end():
    asked = 0

    def evaluate(_, place, *, finer=False):
        nonlocal asked
        del finer
        asked += len(place)
        off = 1e-7 * np.sin(1e9 * place)
        return np.stack([-place, -2 * place, -3 * place + off])

    ends = np.array([1.0]), np.array([29.0])
    (table,) = tabulated(*ends, evaluate, most=10)
    # 60,000 where every rough panel is halved ten times.
    assert asked < 8_000
    place = np.linspace(0.0, 29.0, 99)
    exact = -np.arange(1.0, 4.0)[:, None] * place
    np.testing.assert_allclose(table.at(place), exact, atol=1e-6)


def test_what_cannot_be_computed_is_not_halved_without_end():
    """Nothing behind it is kept, and the answer up to it is the same."""
    asked = 0

    def evaluate(_, place, *, finer=False):
        nonlocal asked
        del finer
        asked += len(place)
        holes = np.abs(np.sin(3e3 * place)) < 0.1
        lost = np.where((place > 7.0) & (place < 20) & holes, np.nan, 0.0)
        return -np.arange(1.0, 4.0)[:, None] * place + lost

    ends = np.array([1.0]), np.array([29.0])
    (table,) = tabulated(*ends, evaluate, most=24)
    assert asked < 3_000  # 8,000 where they are halved 24 times
    place = np.linspace(0.0, 6.0, 99)
    exact = -np.arange(1.0, 4.0)[:, None] * place
    np.testing.assert_allclose(table.at(place), exact, atol=1e-9)


def test_what_cannot_be_computed_takes_no_halvings_from_what_is_rough():
    def turn(place):
        return 1e-3 * np.tanh(500 * (place - 2.2))

    def evaluate(_, place, *, finer=False):
        del finer
        lost = np.where((place > 4.0) & (place < 28.5), np.nan, 0.0)
        return -np.arange(1.0, 4.0)[:, None] * place + turn(place) + lost

    ends = np.array([1.0]), np.array([29.0])
    (table,) = tabulated(*ends, evaluate, most=10)
    place = np.linspace(0.0, 3.5, 9999)
    exact = -np.arange(1.0, 4.0)[:, None] * place + turn(place)
    # 1e-3 where the panel of the turn is halved three times
    np.testing.assert_allclose(table.at(place), exact, atol=1e-8)

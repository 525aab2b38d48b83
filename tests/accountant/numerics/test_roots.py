"""The search for the last point within a bound returns an evaluated point."""

from __future__ import annotations

import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.numerics.loops import by_blocks
from jaxdp_episodic.accountant.numerics.roots import largest_within

TOLERANCE = 1e-7
ROOTS = np.array([1.3, 2.0, 77.0, 1e-9, 3e12])
CURVES = {
    "logarithm": lambda x, root: np.log(x / root),
    "steep": lambda x, root: (x / root) ** 9 - 1,
    "flat": lambda x, root: np.cbrt(np.log(x / root)),
    "jump": lambda x, root: np.where(x <= root, -1.0, 1e6),
    "no number above": lambda x, root: np.where(x <= root, x / root - 2, np.nan),
    "infinite above": lambda x, root: np.where(x <= root, x / root - 2, np.inf),
}


@pytest.mark.parametrize("curve", CURVES)
def test_the_answer_is_just_below_the_root(curve):
    seen = {}

    def excess(x, index):
        value = CURVES[curve](x, ROOTS[index])
        seen.update({(i, at): v for i, at, v in zip(index, x, value, strict=True)})
        return value

    ends = ROOTS / 50, ROOTS * 1000
    found = largest_within(excess, ends[0], ends, slope=1.0, tolerance=TOLERANCE)
    assert np.all(found <= ROOTS)
    assert np.all(found >= ROOTS * (1 - 2 * TOLERANCE))
    assert all(seen[i, x] <= 0 for i, x in enumerate(found))


def test_a_root_beside_zeros_is_found_quickly():
    """Where a ratio rises from 0: its logarithm is steep."""
    turns = []

    def excess(x, index):
        turns.append(x)
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(x / ROOTS[index] - 1, 0.0) * 1e6)

    ends = ROOTS / 50, ROOTS * 1000
    found = largest_within(excess, ends[0], ends, slope=1.0, tolerance=TOLERANCE)
    root = ROOTS * (1 + 1e-6)
    assert np.all(found <= root) and np.all(found >= root * (1 - 2 * TOLERANCE))
    assert len(turns) <= 15  # bisection took 35


@pytest.mark.parametrize("whole", [1, -1])
def test_integers_are_searched_exactly(whole):
    """Also their inverses."""
    last = np.array([1, 2, 17, 1000, 123_456_789, 2**30])

    def excess(x, index):
        number = np.rint(x**whole)
        np.testing.assert_allclose(x**whole, number, rtol=1e-15)
        return whole * (number - last[index]) - 0.5

    ends = np.sort(np.array([1.0, 2.0**31]) ** whole)
    start = np.ones(last.size)
    found = largest_within(excess, start, ends, slope=0.5, tolerance=0, whole=whole)
    np.testing.assert_array_equal(found, last ** float(whole))


FALLING = {
    "logarithm": lambda x, root: np.log(root) - np.log(x),
    "Gaussian": lambda x, root: 1 - (x / root) ** 2,
    "steep": lambda x, root: -np.expm1(np.minimum(99 * np.log(x / root), 700)),
    "flat": lambda x, root: np.cbrt(root - x),
    "jump": lambda x, root: np.where(x < root, 1e6, -1.0),
    "kink": lambda x, root: np.where(x < root, root - x, 1e9 * (root - x)),
    "nothing above": lambda x, root: np.where(x < root, 1e-3, -np.inf),
    "no number below": lambda x, root: np.where(x < root, np.nan, root - x),
}


def smallest_within(function, size):
    """The smallest x with ``function(x) <= 0``, as `epsilon_of_profile` searches."""

    def excess(inverse, index):
        x = np.ones(size)
        x[index] = 1 / inverse
        return function(x, index)

    ends, start = (1e-36, 1e30), np.ones(size)
    with np.errstate(divide="ignore"):
        return 1 / largest_within(excess, start, ends, slope=1.0, tolerance=2e-15)


@pytest.mark.parametrize("curve", FALLING)
def test_the_smallest_point_within_was_evaluated(curve):
    roots = np.array([1.3, 2.0, 77.0, 1e-9, 3e12, 2.5e-29, 4e35])
    seen, turns = set(), 0

    def function(x, index):
        nonlocal turns
        value, turns = FALLING[curve](x, roots), turns + 1
        seen.update((i, x[i], value[i] <= 0) for i in index)
        return value[index]

    found = smallest_within(function, 7)
    np.testing.assert_allclose(found, roots, rtol=2e-14)  # log(1e35) rounds
    assert all((i, x, True) in seen for i, x in enumerate(found))
    assert turns < 140


def test_unreachable_bounds_are_infinite_and_always_met_ones_tiny():
    def function(x, index):
        return np.array([1.0, -1.0, np.nan])[index]

    found = smallest_within(function, 3)
    assert found[0] == found[2] == np.inf
    assert 0 < found[1] <= 1e-30


@pytest.mark.parametrize("rounded", [np.positive, lambda x: np.round(x, 14)])
def test_a_value_of_zero_ends_the_search(rounded):
    seen = []
    found = smallest_within(lambda x, _: seen.append(x) or rounded(5 - x), 1)
    np.testing.assert_allclose(found, 5, rtol=2e-15)
    assert len(seen) < 20  # bisecting the rest would take 50


def test_blocks_are_joined_in_order(engine):
    def both(x, *, block):
        return by_blocks(lambda a, b: (a, b[0] + b[1]), (x, (x, x[None])), block)

    x = np.arange(12.0)
    for block in (3, 12):
        first, second = float64_boundary(both, ("block",))(x, block=block)
        np.testing.assert_array_equal([first, second.reshape(-1)], [x, 2 * x])

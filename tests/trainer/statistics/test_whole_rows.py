"""Rows as integers: bounds that hold despite rounding, exact sums."""

import itertools

import numpy as np
import pytest

from jaxdp_episodic.trainer.statistics import terms as whole_rows
from jaxdp_episodic.trainer.statistics.mixed import MixedModel
from jaxdp_episodic.trainer.statistics.plda import (
    COUNTED,
    second_moment,
    sum_of_rows,
    sums_by_class,
    whole_rows as whole_units,
)
from jaxdp_episodic.trainer.statistics.terms import (
    PRODUCT_STEPS,
    STEPS,
    Terms,
    as_one,
    on_grid,
    outer_products,
    squares,
    times,
    totals,
    unit,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("width", [1, 50, 4_097])
def test_rows_have_norm_one_or_zero(width):
    rows = RNG.normal(size=(40, width)) * 10.0 ** RNG.integers(-25, 25, (40, 1))
    rows[3], rows[5, 0], rows[7, -1], rows[9] = 0.0, np.nan, -np.inf, 1e-31
    found = np.linalg.norm(unit(rows), axis=1)
    there = ~np.isin(np.arange(40), [3, 5, 7, 9])
    np.testing.assert_allclose(found, there, rtol=1e-12)
    directions = rows[there] / np.linalg.norm(rows[there], axis=1, keepdims=True)
    np.testing.assert_allclose(unit(rows)[there], directions, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 4_096])
@pytest.mark.parametrize("share", [1, 3, 1_000])
def test_no_rounding_exceeds_the_bound(width, share):
    """Rows whose entries all round up, and random rows."""
    most = STEPS**2 // share
    steps = np.sqrt(most) - 0.51 * np.sqrt(width)
    up = (np.floor(steps / np.sqrt(width) - 0.502) + 0.502) / steps
    rows = np.stack([np.full(width, up), *unit(RNG.normal(size=(20, width)))])
    whole = on_grid(rows, np.full(21, most))
    assert (squares(whole) <= most).all() and (squares(whole) > 0.8 * most).all()
    np.testing.assert_array_equal(whole, np.rint(whole))
    assert np.abs(whole / steps - rows).max() <= 0.501 / steps


def test_too_long_rows_become_zero():
    rows = np.array([[0.8, 0.7], [0.8, np.nan], [0.6, 0.8], [np.inf, 0.0]])
    found = on_grid(rows, STEPS**2).any(axis=1)
    np.testing.assert_array_equal(found, [False, False, True, False])


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_products_are_exact_in_any_order(size):
    """Against Python integers, which are exact; by places and in parts."""
    whole = on_grid(unit(RNG.normal(size=(9, 30))), STEPS**2)
    matrix = np.float32(RNG.normal(size=(30, 4)) * size)
    found = times(whole, matrix, float(STEPS))
    order = RNG.permutation(9)
    np.testing.assert_array_equal(
        times(whole[order], matrix, float(STEPS)), found[order]
    )
    columns = RNG.permutation(30)
    np.testing.assert_array_equal(
        times(whole[:, columns], matrix[columns], float(STEPS)), found
    )
    exact = whole @ matrix.astype(float)
    factor = found[0, 0] / exact[0, 0]
    np.testing.assert_allclose(found, factor * exact, rtol=1e-6, atol=1e-7 * factor)
    assert np.abs(found).max() > 2**40  # nearly all available digits
    assert not times(whole, 0 * matrix, float(STEPS)).any()
    column = np.full((30, 1), np.float32(size))  # far longer than its rows
    found, exact = times(whole, column, float(STEPS)), whole @ column.astype(float)
    np.testing.assert_allclose(found, found[0] / exact[0] * exact, rtol=1e-6)


def test_sums_are_exact_or_refused():
    whole = on_grid(unit(RNG.normal(size=(300, 5))), STEPS**2)
    exact = [[int(x) for x in row] for row in whole]
    expected = [
        [sum(row[i] * row[j] for row in exact) for j in range(5)] for i in range(5)
    ]
    assert outer_products(whole).tolist() == expected
    assert totals(whole).tolist() == [sum(row[i] for row in exact) for i in range(5)]
    assert outer_products(whole).dtype == np.int64
    assert np.trace(outer_products(whole)) == pytest.approx(
        300 * PRODUCT_STEPS, rel=1e-4
    )
    with pytest.raises(ValueError, match="sums must be below 2\\^53 to be exact"):
        outer_products(np.full((2, 2), 2.0**26))
    with pytest.raises(ValueError, match="sums must be below 2\\^53 to be exact"):
        totals(np.full((4, 2), 2.0**51))
    assert outer_products(np.zeros((0, 3))).shape == (3, 3)
    assert totals(np.zeros((0, 3))).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("number", "width", "rank"), [(1, 1, 1), (3, 5, 1), (3, 50, 5), (60, 50, 5)]
)
def test_the_rows_of_a_group_share_the_norm_bound(number, width, rank):
    """In Python integers; equal or different rows, with other groups beside them."""
    rows = unit(RNG.normal(size=(number, rank)) @ RNG.normal(size=(rank, width)))
    beside = unit(RNG.normal(size=(4, width)))
    groups = np.repeat([7, 2, 5], [2, number, 2])
    whole = as_one(np.concatenate([beside[:2], rows, beside[2:]]), groups)[2:-2]
    exact = [[int(x) for x in row] for row in whole]
    square = sum(
        sum(x * y for x, y in zip(a, b, strict=True)) ** 2 for a in exact for b in exact
    )
    assert 0.99 * PRODUCT_STEPS**2 < square <= PRODUCT_STEPS**2
    lengths = np.linalg.norm(whole, axis=1)
    np.testing.assert_allclose(whole / lengths[:, None], rows, atol=1e-2)
    order = RNG.permutation(number)
    np.testing.assert_array_equal(as_one(rows[order], 0 * order), whole[order])


@pytest.mark.parametrize("number", [1, 2, 1_000, 70_000])
def test_no_rounding_of_a_group_exceeds_its_bound(number, monkeypatch):
    """Rows that all round up, one among zeros, none, and a norm that is too small."""
    up = np.full((number, 2), 0.7)
    one = np.zeros((number, 3))
    one[-1, 0] = 1.0
    for shorter in (whole_rows._SHORTER, -0.1):  # then the rounded rows are too long
        monkeypatch.setattr(whole_rows, "_SHORTER", shorter)
        for rows in (up, one, 0 * one):
            whole = as_one(rows, np.zeros(number, np.int64))
            moment = outer_products(whole).astype(object)
            assert np.sum(moment * moment) <= PRODUCT_STEPS**2
            assert whole.any() == rows.any()
    assert not as_one(np.full((3, 2), np.nan), np.zeros(3)).any()
    assert as_one(np.zeros((0, 2)), np.zeros(0)).shape == (0, 2)


def contributions(row, share):
    """What a row of six numbers adds to each sum, and the largest squared norm."""
    rows, shares = np.float32([row]), np.array([share])
    model = MixedModel(powers=2, slopes=1, target_bound=1.0)
    state = model.initial(2)._replace(coefficients=np.ones(5, np.float32))
    whole = whole_units(rows)
    yield np.append(share * sum_of_rows(rows, shares), COUNTED), PRODUCT_STEPS**2
    yield share * model.pooled_moment(rows[:, :3], shares), PRODUCT_STEPS**2
    yield share * model.pair_moment(rows, shares, state), PRODUCT_STEPS**2
    for center in (np.zeros(6), 0.9 * np.eye(6)[0], np.full(6, 1e30)):
        moment = second_moment(whole, Terms((), shares), np.eye(6), center)
        yield share * moment, PRODUCT_STEPS**2
        for most in (STEPS**2, STEPS**2 // 2):
            sums = sums_by_class(whole, np.zeros(1, int), 1, most, np.eye(6), center)
            yield sums, most * STEPS**2


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38, np.nan, -np.inf])
def test_no_row_contributes_more_than_its_norm(value):
    """In Python integers, which do not overflow."""
    rng = np.random.default_rng(0)
    places = [0], [2], [0, 1, 2], [1, 4], [5], slice(None)
    for place, share in itertools.product(places, (1, 2, 7)):
        row = rng.normal(size=6)
        row[place] = value
        for total, most in contributions(row, share):
            assert sum(int(x) ** 2 for x in total.ravel()) <= most

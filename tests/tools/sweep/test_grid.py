"""Axes, and the settings by index."""

import itertools

import numpy as np
import pytest

from jaxdp_episodic.tools.sweep.description import Axis, Grid


def test_the_product_counts_the_last_axis_fastest():
    axes = (
        Axis(field="num_steps", values=[10, 20]),
        Axis(field="noise_multiplier", linspace=[1, 2, 3]),
        Axis(field="method", values=["rdp", "exact"]),
    )
    grid = Grid(axes)
    values = grid.values(np.arange(grid.size))
    expected = list(itertools.product([10, 20], [1.0, 1.5, 2.0], ["rdp", "exact"]))
    assert list(zip(*(c.tolist() for c in values.values()), strict=True)) == expected
    assert values["num_steps"].dtype == np.int64
    some = grid.values(np.array([5, 0]))
    assert some["noise_multiplier"].tolist() == [2.0, 1.0]
    assert grid.index({0: 1, 1: np.array([0, 2]), 2: 0}).tolist() == [6, 10]


def test_zipped_axes_move_together():
    axes = (
        Axis(field="a.size", values=[1, 2, 3], zip="sizes"),
        Axis(field="noise_multiplier", values=[1.0, 2.0]),
        Axis(field="b.size", values=[7, 8, 9], zip="sizes"),
    )
    grid = Grid(axes)
    assert grid.shape == (3, 2)
    values = grid.values(np.arange(grid.size))
    assert values["a.size"].tolist() == [1, 1, 2, 2, 3, 3]
    assert values["b.size"].tolist() == [7, 7, 8, 8, 9, 9]
    assert grid.names == ("a.size", "noise_multiplier", "b.size")


def test_a_grid_is_not_held_in_memory():
    axes = tuple(Axis(field=f"{c}.size", linspace=[1, 9, 10_000]) for c in "abcdefgh")
    with pytest.raises(ValueError, match="2\\*\\*53"):
        Grid(tuple(Axis(field=a.field, values=range_list(10_000)) for a in axes))
    grid = Grid(tuple(Axis(field=a.field, values=range_list(1000)) for a in axes[:5]))
    assert grid.size == 10**15
    values = grid.values(np.array([123_456_789_012_345]))
    assert [int(v[0]) for v in values.values()] == [124, 457, 790, 13, 346]


def range_list(number):
    return list(range(1, number + 1))


@pytest.mark.parametrize("field", ["num_steps", "bin.steps_per_epoch", "bin.times"])
def test_whole_numbers_are_rounded_and_kept_once(field):
    axis = Axis(field=field, geomspace=[1, 10, 20])
    assert axis.points().dtype == np.int64
    assert axis.points().tolist() == list(range(1, 11))
    falling = Axis(field="num_steps", linspace=[3, 1, 5])
    assert falling.points().tolist() == [3, 2, 1]
    np.testing.assert_array_equal(
        Axis(field="delta", geomspace=[1e-8, 1e-5, 4]).points(),
        np.geomspace(1e-8, 1e-5, 4),
    )


def test_corners_are_extremes():
    grid = Grid(
        (
            Axis(field="num_steps", values=[3, 9, 1]),
            Axis(field="method", values=["rdp", "exact"]),
            Axis(field="noise_multiplier", linspace=[1, 2, 100]),
        )
    )
    corners = grid.corners()
    assert set(zip(*(c.tolist() for c in corners.values()), strict=True)) == set(
        itertools.product([1, 9], ["rdp", "exact"], [1.0, 2.0])
    )


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "exactly one of"),
        ({"values": [1], "linspace": [1, 2, 3]}, "exactly one of"),
        ({"values": []}, "at least one"),
        ({"values": 3.0}, "must be a list"),
        ({"values": [[1.0]]}, "flat list"),
        ({"values": [1.0, float("nan")]}, "NaN"),
        ({"values": ["a"]}, "must be a number"),
        ({"linspace": [1, 2]}, "first, last, how_many"),
        ({"linspace": [1, 2, 0]}, "how_many must be a whole number >= 1"),
        ({"linspace": [1, float("inf"), 3]}, "finite"),
        ({"geomspace": [0, 1, 3]}, "must be > 0"),
        ({"linspace": [0, 1, 10**9]}, "at most"),
        ({"values": [1.0], "zip": 3}, "zip must be a string"),
    ],
)
def test_faulty_axes(fields, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        Axis(field="noise_multiplier", **fields)


def test_faulty_grids():
    axis = Axis(field="delta", values=[0.1])
    with pytest.raises(ValueError, match="at least one axis"):
        Grid(())
    with pytest.raises(ValueError, match="'delta' twice"):
        Grid((axis, axis))
    with pytest.raises(ValueError, match="equally long"):
        Grid(
            (
                Axis(field="delta", values=[0.1], zip="a"),
                Axis(field="epsilon", values=[1, 2], zip="a"),
            )
        )
    with pytest.raises(ValueError, match="given by values"):
        Axis(field="method", linspace=[0, 1, 2])
    with pytest.raises(TypeError, match="must be words"):
        Axis(field="method", values=["rdp", 3])
    with pytest.raises(ValueError, match="at most 12 axes"):
        Grid(tuple(Axis(field=f"l{i}.size", values=[1]) for i in range(13)))

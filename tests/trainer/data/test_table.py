"""Tables: row i is the i-th example of the tree."""

import numpy as np
import pytest

from jaxdp_episodic.trainer.data.scales import advice, scales_of
from jaxdp_episodic.trainer.data.table import ExampleTable


def small(**changes):
    arguments = {
        "features": np.arange(5.0)[:, None],
        "units": {"class": np.array(["b", "a", "b", "a", "a"])},
        **changes,
    }
    return ExampleTable.from_records(arguments.pop("features"), **arguments)


def test_records_are_sorted_into_tree_order():
    table = small(targets=np.arange(5) * 10)
    assert table.features[:, 0].tolist() == [1, 3, 4, 0, 2]
    assert np.array_equal(table.targets, [10, 30, 40, 0, 20])
    assert table.unit_column("class").tolist() == ["a", "a", "a", "b", "b"]
    assert table.class_places.tolist() == [0, 0, 0, 1, 1]
    assert table.level_names == ("class", "example")
    assert [c.tolist() for c in table.population.children_counts] == [[2], [3, 2]]
    assert table.features.dtype == np.float32


def test_features_and_targets_of_unequal_size_are_named():
    table = ExampleTable.from_records([[1, 2e3]], [9e4], units={"u": [0]})
    said = advice(table, are_scaled=False, are_bounded=False)
    assert "scales: " in said[0] and "up to 90,000, but" in said[1]
    few = [[0.01, 0.0], [-0.01, 0.0]]  # a constant is no feature of another size
    assert scales_of(ExampleTable.from_records(few, units={"u": [0, 0]})) == {}


def test_units_without_records_stay_on_the_public_list():
    table = small(public_units=["c", "a", "0", "b"])
    assert table.population.children_counts[1].tolist() == [0, 3, 2, 0]
    assert table.unit_column("class").tolist() == ["a", "a", "a", "b", "b"]
    for units, message in ((["a"], "'b' is missing"), ([*"abb"], "must not repeat")):
        with pytest.raises(ValueError, match=message):
            small(public_units=units)
    with pytest.raises(ValueError, match="one level of units"):
        small(units={"x": np.zeros(5, int), "y": np.zeros(5, int)}, public_units=[0])


def test_selected_and_left_out_levels():
    units = {"group": np.array([0, 0, 1, 1, 1]), "task": np.array([5, 6, 7, 7, 8])}
    table = small(units=units, targets=np.arange(5))
    chosen = table.select("task", [7, 6])
    assert chosen.features[:, 0].tolist() == [1, 2, 3]
    assert chosen.level_names == ("group", "task", "example")
    flat = table.without_level("group")
    assert flat.level_names == ("task", "example")
    assert flat.features[:, 0].tolist() == [0, 1, 2, 3, 4]
    few = table.take(np.array([0, 1, 4])).without_level("group")  # task 7 is empty
    assert few.population.children_counts[1].tolist() == [1, 1, 0, 1]
    assert few.unit_column("task").tolist() == [5, 6, 8]
    with pytest.raises(ValueError, match="ids must be units of 'task', got"):
        table.select("task", [9])
    with pytest.raises(ValueError, match="level must be one of"):
        table.select("pupil", [1])
    with pytest.raises(ValueError, match="level must be one of several"):
        flat.without_level("task")
    with pytest.raises(ValueError, match="ascending"):
        table.take(np.array([3, 0]))
    for array in (table.features, table.targets):
        assert not array.flags.writeable


def test_the_fingerprint_covers_everything():
    same = small().fingerprint
    assert small().fingerprint == same
    changed = [
        small(features=np.arange(5.0)[:, None] + 1e-3),
        small(features=np.arange(5)[:, None]),
        small(units={"class": np.array(["b", "a", "b", "a", "c"])}),
        small(units={"klass": np.array(["b", "a", "b", "a", "a"])}),
        small(targets=np.zeros(5)),
        small(example_level="pupil"),
        small(public_units=["a", "b", "c"]),
    ]
    assert len({same, *(t.fingerprint for t in changed)}) == len(changed) + 1
    # The order of units does not matter, the order within a unit does.
    order = np.array([1, 0, 3, 2, 4])
    names = np.array(["b", "a", "b", "a", "a"])
    moved = small(features=np.arange(5.0)[order, None], units={"class": names[order]})
    assert moved.fingerprint == same


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"features": np.full((5, 2), np.nan)}, ValueError, "finite, row 0 is not"),
        ({"features": np.array(list("abcde"))}, TypeError, "array of numbers"),
        ({"features": np.zeros((4, 1))}, ValueError, "same length"),
        ({"targets": [1, 2, 3, 4, np.nan]}, ValueError, "targets must be finite"),
        ({"units": {}}, ValueError, "at least one level"),
        ({"units": {"class": np.zeros(5)}}, TypeError, "integer or string ids"),
        ({"units": {"a": range(5), "b": [0] * 5}}, ValueError, "under two parents"),
        ({"features": np.ones((5, 0))}, ValueError, "features must have at least one"),
        ({"units": {"example": [1] * 5}}, ValueError, "units must not .* 'example'"),
        ({"units": {"class": ["a", "a\0", *"bbb"]}}, ValueError, "a trailing NUL"),
        ({"units": {"class": ["1", 1, "b", "b", "b"]}}, ValueError, "ids of one type"),
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=message):
        small(**changes)

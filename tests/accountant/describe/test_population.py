"""The tree as an object: sizes, names, descriptions, value semantics."""

import numpy as np
import pytest

from jaxdp_episodic.accountant.describe.population import Population


def test_units_levels_and_repr():
    population = Population.from_sizes(
        [[4, 2, 3], [4, 5]], level_names=("task", "class", "example")
    )
    assert population.num_levels == 3
    assert [population.num_units(j) for j in range(4)] == [1, 2, 5, 18]
    assert repr(population) == (
        "Population(levels=('task', 'class', 'example'), units=(2, 5, 18))"
    )


def test_value_semantics_and_read_only_arrays():
    population = Population.from_sizes([3, 4])
    assert population == Population.from_sizes(np.array([3, 4]))
    assert hash(population) == hash(Population.from_sizes([3, 4]))
    assert population != Population.from_sizes([4, 3])
    assert population != Population.from_sizes([3, 4], level_names=["a"])
    assert not any(count.flags.writeable for count in population.children_counts)


def test_ids_are_labels_that_do_not_count_in_equality():
    assert Population.from_ids(a=[1, 1, 2]) == Population.from_ids(a=["x", "x", "y"])


def test_paths_are_described_by_index_or_id():
    population = Population.from_sizes([[], [4, 0, 3], [4, 5]], level_names=["task"])
    assert population.describe_path(3, 0) == {"task": 1, "level 2": 0, "level 3": 0}
    assert population.describe_path(3, 4) == {"task": 1, "level 2": 2, "level 3": 4}
    assert population.describe_path(3, 15) == {"task": 2, "level 2": 4, "level 3": 15}
    assert population.describe_path(1, 0) == {"task": 0}


@pytest.mark.parametrize(("level", "index"), [(0, 0), (4, 0), (3, 16), (3, -1)])
def test_places_outside_the_tree_are_refused(level, index):
    population = Population.from_sizes([[], [4, 0, 3], [4, 5]])
    with pytest.raises(ValueError, match="must"):
        population.describe_path(level, index)


def test_levels_outside_the_tree_are_refused():
    population = Population.from_sizes([3, 4])
    for level in (-1, 3):
        with pytest.raises(ValueError, match="level must"):
            population.num_units(level)
    for used in (0, 3):
        with pytest.raises(ValueError, match="num_levels_used must lie in 1 .. 2"):
            population.distinct_paths(used)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("a", "a"), ValueError),
        (("step",), ValueError),
        (("",), ValueError),
        (("a", "b", "c"), ValueError),
        ((1,), TypeError),
    ],
)
def test_level_names_are_checked(names, error):
    with pytest.raises(error, match="level_names"):
        Population.from_sizes([3, 4], level_names=names)


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        ((), TypeError),
        (3, TypeError),
        (([2], [1]), ValueError),
        (([1, 1],), ValueError),
        (([2], [1, -1]), ValueError),
        (([2], [1, True]), TypeError),
    ],
)
def test_counts_must_fit_together(counts, error):
    with pytest.raises(error, match="children_counts"):
        Population(counts)


def test_ids_must_fit_the_tree():
    counts = (np.array([2]), np.array([3, 4]))
    with pytest.raises(ValueError, match=r"unit_ids\[0\] must have shape \(2,\)"):
        Population(counts, ("a",), (np.array([1, 2, 3]),))
    with pytest.raises(ValueError, match="at most 2 arrays"):
        Population(counts, ("a",), (np.arange(2), np.arange(7), np.arange(1)))


@pytest.mark.slow
def test_ten_million_records():
    rng = np.random.default_rng(0)
    pupil = np.arange(10_000_000)
    school = rng.integers(0, 100_000, pupil.size)
    population = Population.from_ids(authority=school % 97, school=school, pupil=pupil)
    assert repr(population).endswith("units=(97, 100000, 10000000))")
    assert population.distinct_paths().multiplicity.sum() == pupil.size

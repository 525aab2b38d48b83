"""Distinct paths and numbers of contributions against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp_episodic.describe import Poisson, Population, WithoutReplacement


def trees(depth):
    """Nested sizes of that many levels, with empty units; the first is not empty."""
    tree = st.lists(st.integers(0, 3), max_size=4)
    for _ in range(depth - 2):
        tree = st.lists(tree, max_size=3)
    return tree


def add_a_leaf(nested, depth):
    """The tree with one more primary unit, which fixes its depth."""
    branch: object = 2
    for _ in range(depth - 2):
        branch = [branch]
    return [*nested, branch]


ANY_TREE = st.integers(2, 4).flatmap(
    lambda depth: trees(depth).map(lambda tree: add_a_leaf(tree, depth))
)


def brute_paths(nested, num_levels, sizes=()):
    """(sizes of the sibling groups, number of units) for each group of units."""
    size = nested if isinstance(nested, int) else len(nested)
    sizes = (*sizes, max(size, 1))
    if len(sizes) == num_levels:
        return [(sizes, size)]
    if size == 0:
        return [(sizes + (1,) * (num_levels - len(sizes)), 0)]
    assert not isinstance(nested, int)
    return [p for child in nested for p in brute_paths(child, num_levels, sizes)]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(nested=ANY_TREE, data=st.data())
def test_distinct_paths_match_brute_force(nested, data):
    population = Population.from_sizes(nested)
    used = data.draw(st.integers(1, population.num_levels))
    expected: dict = {}
    for sizes, number in brute_paths(nested, used):
        expected[sizes] = expected.get(sizes, 0) + number
    paths = population.distinct_paths(used)
    found = dict(zip(map(tuple, paths.sizes.tolist()), paths.multiplicity, strict=True))
    assert found == expected
    assert list(found) == sorted(found)
    assert paths.multiplicity.sum() == population.num_units(used)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(nested=ANY_TREE)
def test_witnesses_lie_on_their_paths(nested):
    population = Population.from_sizes(nested)
    paths = population.distinct_paths()
    counts = population.children_counts
    for sizes, number, level, index in zip(*paths, strict=True):
        assert (level == population.num_levels) == (number > 0)
        above = (
            [] if level == 0 else list(population.describe_path(level, index).values())
        )
        # The sibling groups on the way: children of the root and of each unit passed.
        group_of = [0, *above]
        along = [int(counts[j][group_of[j]]) for j in range(level)]
        if number == 0:
            assert counts[level][group_of[-1]] == 0  # an empty unit
        padded = along + [1] * (population.num_levels - level)
        assert padded == sizes.tolist()


def test_the_witness_is_the_first_unit_of_its_path():
    paths = Population.from_sizes([0, 1, 5, 1, 5]).distinct_paths()
    assert paths.sizes.tolist() == [[5, 1], [5, 5]]
    assert paths.multiplicity.tolist() == [2, 10]
    assert paths.witness_index.tolist() == [0, 1]
    assert paths.witness_level.tolist() == [2, 2]


def test_an_empty_tree_still_has_the_path_of_the_first_to_join():
    paths = Population.from_sizes(0).distinct_paths()
    assert paths.sizes.tolist() == [[1]]
    assert paths.multiplicity.tolist() == [0]
    assert paths.witness_level.tolist() == [0]
    assert Population.from_sizes([[0], []]).distinct_paths().sizes.tolist() == [
        [2, 1, 1]
    ]


def test_a_hundred_thousand_distinct_paths():
    rng = np.random.default_rng(0)
    sizes = rng.permutation(np.arange(1, 100_001))
    paths = Population.from_sizes([sizes, sizes[:10]]).distinct_paths()
    assert len(paths.sizes) == 100_010
    assert paths.multiplicity.sum() == sizes.sum() + sizes[:10].sum()


def scheme_strategy(name):
    return st.one_of(
        st.just(Poisson(name, sampling_probability=0.5)),
        st.integers(1, 4).map(lambda size: WithoutReplacement(name, size=size)),
    )


def most_by_enumeration(nested, schemes):
    """Picks every possible sample below one unit and counts its last units."""
    number = nested if isinstance(nested, int) else len(nested)
    scheme = schemes[0]
    limit = number
    if isinstance(scheme, WithoutReplacement):
        limit = int(np.asarray(scheme.size))
    if len(schemes) == 1:
        return min(number, limit)
    assert not isinstance(nested, int)
    children = [most_by_enumeration(child, schemes[1:]) for child in nested]
    samples = itertools.combinations(children, min(limit, number))
    return max((sum(sample) for sample in samples), default=0)


def units_at(nested, level):
    if level == 0:
        return [nested]
    return [unit for child in nested for unit in units_at(child, level - 1)]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(nested=ANY_TREE, data=st.data())
def test_contributions_match_enumeration(nested, data):
    population = Population.from_sizes(nested)
    depth = population.num_levels
    schemes = [data.draw(scheme_strategy(f"l{j}")) for j in range(depth)]
    clip = data.draw(st.integers(2, depth))
    unit = data.draw(st.integers(1, clip - 1))
    expected = max(
        most_by_enumeration(tree, schemes[unit:clip]) for tree in units_at(nested, unit)
    )
    assert population.max_contributions(schemes, unit, clip) == max(expected, 1)


def test_contributions_of_arrays_of_sizes():
    population = Population.from_sizes([[[5, 1], [2]], [[3, 3, 3]]])
    schemes = [
        Poisson("a", sampling_probability=0.5),
        Poisson("b", sampling_probability=0.5),
        WithoutReplacement("c", size=[[1], [2], [9]]),
        WithoutReplacement("d", size=[1, 4]),
    ]
    most = population.max_contributions(schemes, 1, 4)
    one_by_one = [
        [
            population.max_contributions(
                [*schemes[:2], WithoutReplacement("c", size=c), schemes[3]], 1, 4
            )[j]
            for j in range(2)
        ]
        for c in (1, 2, 9)
    ]
    assert most.tolist() == one_by_one == [[2, 6], [3, 7], [3, 9]]
    assert population.max_contributions(schemes, 1, 2) == 2


@pytest.mark.parametrize(("unit", "clip"), [(0, 1), (1, 1), (2, 1), (1, 4), (True, 2)])
def test_contributions_refuse_wrong_levels(unit, clip):
    population = Population.from_sizes([[4, 2, 3], [4, 5]])
    schemes = [Poisson(n, sampling_probability=0.5) for n in "abc"]
    with pytest.raises((ValueError, TypeError), match=r"(unit|clip)_level must"):
        population.max_contributions(schemes, unit, clip)

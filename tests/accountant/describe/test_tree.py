"""Trees from sizes and ids; their paths and contributions against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.designs import Poisson, WithoutReplacement
from jaxdp_episodic.accountant.describe.population import Population
from oracles import trees


def counts_of(population):
    return [count.tolist() for count in population.children_counts]


@pytest.mark.parametrize(
    ("nested", "counts"),
    [
        (49, [[49]]),
        (np.array([12, 30, 7]), [[3], [12, 30, 7]]),
        ((np.array([4, 2]), np.array([5])), [[2], [2, 1], [4, 2, 5]]),
        ([[4, 0], [], (3.0,)], [[3], [2, 0, 1], [4, 0, 3]]),
        ([[[1], [2, 3]], [[]]], [[2], [2, 1], [1, 2, 0], [1, 2, 3]]),
    ],
)
def test_nested_sizes(nested, counts):
    assert counts_of(Population.from_sizes(nested)) == counts


ENDLESS: list = []
ENDLESS.append(ENDLESS)
COUNTS = np.array([2]), np.array([3, 4])
TWO = Population.from_sizes([3, 4])


INVALID = [
    *(
        (lambda nested=nested: Population.from_sizes(nested), message)
        for nested, message in [
            ([4, [2]], "same depth everywhere"),
            ([4, []], "same depth everywhere"),
            ([[], []], "at least one number"),
            ([[4, -1]], "whole number >= 0"),
            ([2**53, 2**53], "at most"),
            ([10**30], "sizes must fit into 64 bits"),
            ([[4, True]], "sizes must be"),
            (np.array([[True, False]]), "sizes must be"),
            (ENDLESS, "at most 32 levels"),
        ]
    ),
    *(
        (lambda ids=ids: Population.from_ids(**ids), message)
        for ids, message in [
            ({}, "one array per level"),
            ({"school": None, "pupil": [1]}, "one array per level"),
            ({"school": np.array([], int)}, "at least one record"),
            ({"school": [1, 2], "pupil": [1]}, "equally long"),
            ({"school": [1.0, 2.0]}, "integer or string ids"),
            ({"school": ["a", None]}, "integer or string ids"),
            ({"step": [1]}, "other than .'step'"),
        ]
    ),
    *(
        (lambda n=n: Population.from_sizes([3, 4], level_names=n), "level_names")
        for n in [("a", "a"), ("step",), ("a", "b", "c")]
    ),
    *(
        (lambda counts=counts: Population(counts), "children_counts")
        for counts in [(), 3, ([2], [1]), ([1, 1],), ([2], [1, -1]), ([2], [1, True])]
    ),
    (
        lambda: Population(COUNTS, ("a",), (np.array([1, 2, 3]),)),
        r"unit_ids\[0\] must have shape \(2,\)",
    ),
    (lambda: TWO.num_units(3), "level must"),
    (lambda: TWO.distinct_paths(0), "num_levels_used must be .* >= 1"),
    *(
        (lambda at=at: TWO.describe_path(*at), "must")
        for at in [(0, 0), (3, 0), (2, 7), (2, -1)]
    ),
    *(
        (lambda at=at: TWO.max_contributions([], *at), r"(unit|clip)_level must")
        for at in [(0, 1), (1, 1), (1, 4), (True, 2)]
    ),
]


@pytest.mark.parametrize(("make", "message"), INVALID, ids=range(len(INVALID)))
def test_invalid_trees_and_places_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_ids():
    """Repeated last ids are one unit; without ids every record is one."""
    three = Population.from_ids(
        authority=[7, 7, 3, 7], school=["b", "a", "c", "b"], pupil=[10, 11, 12, 10]
    )
    assert counts_of(three) == [[2], [1, 2], [1, 1, 1]]
    path = {"authority": 7, "school": "b", "pupil": 10}
    assert three.describe_path(3, 2) == path
    one = Population.from_ids(school=[5, 5, -2, 5])
    assert counts_of(one) == [[2], [1, 3]] and one.level_names == ("school",)
    assert one.describe_path(2, 3) == {"school": 5, "level 2": 3}
    every = Population.from_ids(authority=[1, 1, 1], school=[5, 6, 5], pupil=None)
    assert counts_of(every) == [[1], [2], [2, 1]]
    assert every.level_names == ("authority", "school", "pupil")
    assert counts_of(Population.from_ids(a=[1, 1, 1], b=[5, 6, 5])) == [[1], [2]]


def test_trees_compare_by_sizes_and_names_and_are_read_only():
    assert TWO == Population.from_sizes(np.array([3, 4]))
    assert [TWO.num_units(level) for level in range(3)] == [1, 2, 7]
    assert hash(TWO) == hash(Population.from_sizes([3, 4]))
    assert TWO != Population.from_sizes([4, 3])
    assert TWO != Population.from_sizes([3, 4], level_names=["a"])
    assert not any(count.flags.writeable for count in TWO.children_counts)
    assert Population.from_ids(a=[1, 1, 2]) == Population.from_ids(a=["x", "x", "y"])


def test_an_id_under_two_parents_is_refused():
    with pytest.raises(
        ValueError, match=r"class_ 0 lies under two parents, school 1 and 2.*global"
    ) as caught:
        Population.from_ids(school=[1, 1, 2], class_=[0, 1, 0], pupil=[1, 2, 3])
    assert "np.unique(np.stack([parent, child])" in str(caught.value)
    # The advice works.
    school, class_ = np.array([[1, 1, 2, 2], [0, 1, 0, 0]])
    made_global = np.unique(np.stack([school, class_]), axis=1, return_inverse=True)[1]
    population = Population.from_ids(
        school=school, class_=made_global.ravel(), pupil=None
    )
    assert counts_of(population) == [[2], [2, 1], [1, 1, 2]]


def test_ids_at_the_ends_of_their_type():
    ends = np.array([2**64 - 2, 2**64 - 1], np.uint64), np.array([-(2**63), 0])
    for ids in (*ends, np.array(["a", "b"], object)):
        population = Population.from_ids(school=np.array([*ids, *ids, ids[1]]))
        assert counts_of(population) == [[2], [2, 3]]
        assert population.unit_ids is not None
        assert population.unit_ids[0].tolist() == ids.tolist()


def nested_sizes(depth):
    """Nested sizes of ``depth`` levels with empty units; the first is not empty."""
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
    lambda depth: nested_sizes(depth).map(lambda tree: add_a_leaf(tree, depth))
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


@settings(derandomize=True, deadline=None, max_examples=60)
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


@settings(derandomize=True, deadline=None, max_examples=50)
@given(nested=ANY_TREE)
def test_the_example_unit_of_a_path_lies_on_it(nested):
    population = Population.from_sizes(nested)
    for sizes, number, level, index in zip(*population.distinct_paths(), strict=True):
        assert (level == population.num_levels) == (number > 0)
        path = population.describe_path(level, index).values() if level else ()
        # The sibling groups on the path: children of the root and of each unit.
        groups = [0, *path]
        along = [int(population.children_counts[j][groups[j]]) for j in range(level)]
        if number == 0:
            assert population.children_counts[level][groups[-1]] == 0  # empty
        assert along + [1] * (population.num_levels - level) == sizes.tolist()


def test_an_empty_tree_has_the_path_of_the_first_unit_to_join():
    paths = Population.from_sizes(0).distinct_paths()
    assert paths.sizes.tolist() == [[1]]
    assert paths.multiplicity.tolist() == [0]
    assert paths.witness_level.tolist() == [0]
    paths = Population.from_sizes([[0], []]).distinct_paths()
    assert paths.sizes.tolist() == [[2, 1, 1]]


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


@settings(derandomize=True, deadline=None, max_examples=25)
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
    twos = [WithoutReplacement(name, size=2) for name in "abc"]
    assert Population.from_sizes([[1, 2, 3]]).max_contributions(twos, 1, 3) == 4


# --- Populations: sizes, names, equality ---


def test_paths_are_described_by_index_or_id():
    population = Population.from_sizes([[], [4, 0, 3], [4, 5]], level_names=["task"])
    assert population.describe_path(3, 0) == {"task": 1, "level 2": 0, "level 3": 0}
    assert population.describe_path(3, 4) == {"task": 1, "level 2": 2, "level 3": 4}
    assert population.describe_path(3, 15) == {"task": 2, "level 2": 4, "level 3": 15}
    assert population.describe_path(1, 0) == {"task": 0}


@pytest.mark.parametrize("joins", [True, False])
def test_drawing_all_present_units_may_leave_out_one_that_joins(joins):
    """A unit that joins 9 units of which 9 are drawn replaces another one.

    This costs more than 9 of 9, so a Population does not state population_is_exact.
    """
    root = "root", tuple(range(10 if joins else 9))
    drawn = (trees.Scheme("without_replacement", 9),)
    design = trees.Design(root, drawn, 1, (0,), "add_remove", 0.5)
    table = {i: 1.0 if i == 0 else -1.0 for i in range(10)}
    worst = np.max(trees.enumerated(design)(table, np.exp([1.0])))

    def claimed(tree, **sizes):
        scheme = jde.WithoutReplacement("example", size=9, **sizes)
        step = jde.GaussianStep(scheme, noise_multiplier=2.0, population=tree)
        return jde.delta(step, num_steps=1, epsilon=1.0)

    assert worst <= claimed(Population.from_sizes(9))
    if_nobody_joins = claimed(None, population=9, population_is_exact=True)
    assert (worst > 2 * if_nobody_joins) == joins

"""The tree as an object: sizes, names, descriptions, value semantics."""

import itertools

import numpy as np
import pytest
from scipy.stats import norm

import jaxdp_episodic as jde
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


def test_ids_are_ignored_by_equality():
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
def test_counts_must_be_consistent(counts, error):
    with pytest.raises(error, match="children_counts"):
        Population(counts)


def test_ids_must_fit_the_tree():
    counts = (np.array([2]), np.array([3, 4]))
    with pytest.raises(ValueError, match=r"unit_ids\[0\] must have shape \(2,\)"):
        Population(counts, ("a",), (np.array([1, 2, 3]),))
    with pytest.raises(ValueError, match="at most 2 arrays"):
        Population(counts, ("a",), (np.arange(2), np.arange(7), np.arange(1)))


def hockey_stick(p, q, epsilon):
    """Sum of positive parts of p - e^epsilon q: densities on one fine grid."""
    return float(np.sum(np.maximum(p - np.exp(epsilon) * q, 0.0)))


def draw_of_nine(values, grid, noise):
    """Probabilities of the noisy sum over every set of 9 values, or of all values."""
    taken = [sum(s) for s in itertools.combinations(values, min(9, len(values)))]
    step = grid[1] - grid[0]
    density = np.mean([norm.pdf(grid, s, noise) for s in taken], axis=0)
    return density * step


@pytest.mark.parametrize(
    ("at_hand", "joins"), [([-1.0] * 9, True), ([-1.0] * 9, False)]
)
def test_drawing_all_present_units_may_leave_out_one_that_joins(at_hand, joins):
    # A unit that joins 9 units of which 9 are drawn replaces another one. This costs
    # more than 9 of 9, so a Population does not state population_is_exact.
    noise, epsilon = 2.0, 1.0
    other = [*at_hand, 1.0] if joins else at_hand[:-1]
    grid = np.linspace(-30, 15, 40_001)
    p, q = (draw_of_nine(values, grid, noise) for values in (other, at_hand))
    worst = max(hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon))

    def claimed(tree, **sizes):
        scheme = jde.WithoutReplacement("example", size=9, **sizes)
        step = jde.GaussianStep(scheme, noise_multiplier=noise, population=tree)
        return jde.delta(step, num_steps=1, epsilon=epsilon)

    by_tree = claimed(Population(children_counts=(np.array([9]),)))
    if_nobody_joins = claimed(None, population=9, population_is_exact=True)
    assert worst <= by_tree
    assert (worst > 2 * if_nobody_joins) == joins

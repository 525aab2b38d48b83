"""Rates along paths, inclusion, and bounds of contributions."""

import itertools

import numpy as np
import pytest

from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    PeopleBlocks,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.rates import (
    inclusion_rates,
    max_contributions,
    most_children_drawn,
    path_rates,
)

# Tombs, Kotevska, Young (2022), Example 3.1: two primary units, five secondary, 18
# examples, one unit drawn per stage.
EXAMPLE_31 = Population.from_sizes([[4, 2, 3], [4, 5]])
ONE_A_STAGE = MultistageSampling(
    *(WithoutReplacement(name, size=1) for name in ("primary", "secondary", "example"))
)


def test_example_31():
    inclusion = inclusion_rates(ONE_A_STAGE, EXAMPLE_31)
    rates = path_rates(ONE_A_STAGE, EXAMPLE_31)
    sizes = [4, 2, 3, 4, 5]
    expected = {(2, 3, n): 1 / (2 * 3 * n) for n in sizes[:3]}
    expected |= {(2, 2, n): 1 / (2 * 2 * n) for n in sizes[3:]}
    assert rates.paths is not None
    for path, rate in zip(rates.paths.sizes.tolist(), inclusion, strict=True):
        assert rate == pytest.approx(expected[tuple(path)], rel=1e-15)
    # The worst path is that of U_12.
    worst = int(inclusion.argmax())
    assert inclusion[worst] == pytest.approx(1 / 12, rel=1e-15)
    assert rates.paths.sizes[worst].tolist() == [2, 3, 2]
    # One unit per stage: one example is certainly drawn.
    assert rates.multiplicity @ inclusion == pytest.approx(1, rel=1e-14)
    place = (int(a[worst]) for a in rates.paths[2:])
    assert list(EXAMPLE_31.describe_path(*place).values()) == [0, 1, 4]


def test_without_a_population_the_specs_sizes_are_used():
    sampling = MultistageSampling(
        Poisson("school", sampling_probability=[[0.1], [0.2]]),
        WithoutReplacement("pupil", size=8, population=[4, 16, 40]),
    )
    rates = path_rates(sampling)
    assert rates.group_sizes[0] is None and rates.paths is None
    np.testing.assert_array_equal(rates.rates[0], [[[0.1]], [[0.2]]])
    np.testing.assert_array_equal(rates.rates[1], [[1], [0.5], [0.2]])
    np.testing.assert_array_equal(rates.clipped[1], [[True], [False], [False]])
    np.testing.assert_array_equal(rates.clipped[0], [False])
    expected = [[0.1, 0.05, 0.02], [0.2, 0.1, 0.04]]
    np.testing.assert_allclose(inclusion_rates(sampling), expected, rtol=1e-15)


def test_levels_below_the_protected_unit_need_no_size():
    sampling = MultistageSampling(
        Poisson("school", sampling_probability=0.1), WithoutReplacement("pupil", size=8)
    )
    assert path_rates(sampling, num_levels_used=1).num_levels == 1
    shallow = Population.from_sizes(12)
    assert path_rates(sampling, shallow, 1).multiplicity.tolist() == [12]
    with pytest.raises(ValueError, match="at least 2 levels"):
        path_rates(sampling, shallow)
    with pytest.raises(ValueError, match="level 'pupil': .* needs population="):
        path_rates(sampling)


def test_a_tree_of_other_levels_is_refused():
    named = Population.from_ids(task=[1, 1, 2], secondary=[1, 2, 3], example=None)
    with pytest.raises(ValueError, match=r"levels \('primary', .*got \('task'"):
        path_rates(ONE_A_STAGE, named)
    partly = Population.from_sizes([[4, 2]], level_names=["primary"])
    assert path_rates(ONE_A_STAGE, partly).num_levels == 3


def test_empty_units_keep_a_path_of_rate_one():
    population = Population.from_sizes([4, 0])
    sampling = MultistageSampling(
        WithoutReplacement("task", size=1), WithoutReplacement("example", size=2)
    )
    rates = path_rates(sampling, population)
    np.testing.assert_array_equal(rates.rates[1], [1.0, 0.5])
    assert rates.multiplicity.tolist() == [0, 4]


ADD, REPLACE = "add_remove", "replace_one"
NINE = Population.from_sizes(9)
EXACT = {"population": 9, "population_is_exact": True}
# Sizes, the scheme's population, a tree, the relation: is every unit surely drawn?
COVERED = [
    # A population is a lower bound, unless it is exact.
    ([9, 99], {"population": 9}, None, ADD, [False, False]),
    ([9, 99], {"population": 9}, None, REPLACE, [False, False]),
    ([8, 9, 10], EXACT, None, ADD, [False, True, True]),
    ([8, 9, 10], EXACT, None, REPLACE, [False, True, True]),
    # The given data may be the smaller neighbour; their sizes are not the exact one.
    ([8, 9, 10], {}, NINE, ADD, [False, False, True]),
    ([8, 9, 10], {}, NINE, REPLACE, [False, True, True]),
    ([9], EXACT, NINE, ADD, [False]),
]


@pytest.mark.parametrize(("size", "fields", "tree", "relation", "expected"), COVERED)
def test_rate_one_needs_a_size_that_no_neighbour_exceeds(
    size, fields, tree, relation, expected
):
    level = WithoutReplacement("a", size=size, **fields)
    rates = path_rates(MultistageSampling(level), tree)
    assert rates.covers_all(1, relation)[:, 0].tolist() == expected
    always = path_rates(MultistageSampling(Poisson("a", sampling_probability=1.0)))
    assert always.covers_all(1, relation).all()


def test_levels_above_the_protected_one_are_public_lists():
    sampling = MultistageSampling(
        WithoutReplacement("task", size=2), WithoutReplacement("example", size=5)
    )
    rates = path_rates(sampling, Population.from_sizes([4, 5]))
    np.testing.assert_array_equal(rates.covers_all(1, "add_remove"), [True, True])
    np.testing.assert_array_equal(rates.covers_all(2, "add_remove"), [True, False])


def grouped(**changes):
    fields = {
        "num_classes": 23,
        "ways": 5,
        "examples": WithoutReplacement("example", size=4, population=20),
    }
    return GroupedClasses(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"episodes": Poisson("episode", sampling_probability=0.16)}, (0.16, 1, 0.2)),
        ({"episodes": WithoutReplacement("episode", size=3)}, (3 / 4, 1, 0.2)),
        ({"episodes": WithoutReplacement("episode", size=9)}, (1, 1, 0.2)),
        ({"classes": Poisson("class", sampling_probability=0.16)}, (1, 0.16, 0.2)),
        ({"classes": WithoutReplacement("class", size=10)}, (1, 10 / 23, 0.2)),
    ],
)
def test_grouped_rates(changes, rates):
    design = grouped(**changes)
    found = path_rates(design)
    assert [rate.tolist() for rate in found.rates] == [[rate] for rate in rates]
    assert inclusion_rates(design) == pytest.approx(np.prod(rates), rel=1e-15)
    assert path_rates(design, num_levels_used=2).num_levels == 2
    groups = found.group_sizes
    assert [None if g is None else g.tolist() for g in groups] == [[4], [23], [20]]


def test_grouped_rates_of_unequal_classes():
    design = grouped(
        num_classes=4,
        ways=[2, 4],
        episodes=WithoutReplacement("episode", size=1),
        examples=WithoutReplacement("example", size=4),
    )
    classes = Population.from_sizes([20, 10, 10, 2], level_names=("class", "example"))
    rates = path_rates(design, classes)
    np.testing.assert_array_equal(rates.rates[0], [[0.5], [1.0]])
    np.testing.assert_array_equal(rates.rates[2], [1.0, 0.4, 0.2])
    assert rates.multiplicity.tolist() == [2, 20, 20]
    assert inclusion_rates(design, classes).shape == (2, 3)
    assert path_rates(design, classes, 2).multiplicity.tolist() == [4]
    with pytest.raises(ValueError, match="num_classes=4 units at its first level"):
        path_rates(design, Population.from_sizes([20, 10, 10]))
    with pytest.raises(ValueError, match="level 'example'.*needs population"):
        path_rates(design)


def test_independent_episodes():
    sampling = MultistageSampling(
        WithoutReplacement("class", size=5, population=100),
        WithoutReplacement("example", size=4, population=20),
    )
    design = IndependentEpisodes(sampling, num_episodes=[1, 10, 1_000])
    expected = 1 - (1 - 0.01) ** np.array([1.0, 10, 1_000])
    np.testing.assert_allclose(inclusion_rates(design), expected, rtol=1e-13)
    tiny = MultistageSampling(Poisson("a", sampling_probability=[1e-18, 0.0, 1.0]))
    found = inclusion_rates(IndependentEpisodes(tiny, num_episodes=7))
    np.testing.assert_allclose(found, [7e-18, 0, 1], rtol=1e-15)


def test_the_inclusion_in_blocks_counts_all_of_their_episodes():
    """Both draws are enumerated: an example is in an episode of its block by 1/2."""
    both = {"num_people": 4, "people_per_block": 2, "episodes_per_block": 2}
    half = {"sampling": WithoutReplacement("example", size=1, population=2)}
    poisson = Poisson("episode", sampling_probability=0.4)
    fixed = WithoutReplacement("episode", size=2)  # of four
    for episodes, drawn in ((poisson, [0.48, 0.16]), (fixed, [4 / 6, 1 / 6])):
        design = PeopleBlocks(episodes=episodes, **both, **half)
        true = drawn[0] / 2 + drawn[1] * 3 / 4
        assert true <= inclusion_rates(design) < 1.25 * true
        surely = inclusion_rates(PeopleBlocks(episodes=episodes, **both))
        assert sum(drawn) <= surely <= 1


def contributions(sampling, population=None, *, relation="add_remove", unit=1, clip=2):
    return max_contributions(
        sampling,
        population,
        unit_level=unit,
        clip_level=clip,
        neighboring_relation=relation,
    )


def test_public_bounds_of_contributions():
    sampling = MultistageSampling(
        Poisson("a", sampling_probability=0.1),
        WithoutReplacement("b", size=[3, 7], population=5),
        Poisson("c", sampling_probability=0.1, population=20),
    )
    # `population` without replacement is a lower bound, no limit on contributions.
    assert contributions(sampling).tolist() == [3, 7]
    assert contributions(sampling, clip=3).tolist() == [60, 140]
    assert contributions(sampling, unit=2, clip=3) == 20
    exact = WithoutReplacement("b", size=7, population=5, population_is_exact=True)
    assert contributions(MultistageSampling(sampling.levels[0], exact)) == 5
    huge = (WithoutReplacement(n, size=2**40) for n in ("a", "b", "c"))
    with pytest.raises(ValueError, match=r"at most 2\*\*53"):
        contributions(MultistageSampling(*huge), clip=3)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_the_children_drawn_of_a_given_unit_are_those_of_the_largest(relation):
    """Enumerates all draws of the children of all units of the tree."""
    tree = Population.from_sizes([[4, 2, 3], [4, 5], [], [1, 0]])
    sizes = [[4], [3, 2, 0, 2], [4, 2, 3, 4, 5, 1, 0]]
    for size in range(1, 7):
        given = {"size": size, "population": 2, "population_is_exact": True}
        poisson = {"sampling_probability": 0.1, "population": 2}
        for level, children in enumerate(sizes):
            names = ("a", "b", "c")
            fixed = MultistageSampling(*(WithoutReplacement(n, **given) for n in names))
            varied = MultistageSampling(*(Poisson(n, **poisson) for n in names))
            draws = [itertools.combinations(range(n), min(size, n)) for n in children]
            drawn = max(len(draw) for every in draws for draw in every)
            for sampling, most in ((fixed, drawn), (varied, max(children))):
                found = most_children_drawn(sampling, tree, level, relation)
                assert found == most
                assert found.dtype == np.int64


def test_a_unit_that_joins_may_be_larger_than_the_present_ones():
    tree = Population.from_sizes([2, 3])
    sampling = MultistageSampling(
        Poisson("a", sampling_probability=0.1), WithoutReplacement("b", size=7)
    )
    assert contributions(sampling, tree) == 7
    assert contributions(sampling, tree, relation="replace_one") == 3


def test_poisson_contributions_need_a_true_public_bound():
    def sampling(population):
        return MultistageSampling(
            Poisson("a", sampling_probability=0.1),
            Poisson("b", sampling_probability=0.1, population=population),
        )

    tree = Population.from_sizes([2, 3])
    assert contributions(sampling(10), tree) == 10
    assert contributions(sampling(None), tree, relation="replace_one") == 3
    with pytest.raises(ValueError, match="level 'b': .* must be a public upper bound"):
        contributions(sampling(None), tree)
    with pytest.raises(ValueError, match="'b': population must be an upper bound.* 3"):
        contributions(sampling(2), tree)


def test_a_claimed_bound_that_the_tree_exceeds_is_refused():
    """It would make the number of contributions, and hence epsilon, too small."""
    pupils = WithoutReplacement("b", size=8, population=2, population_is_exact=True)
    sampling = MultistageSampling(Poisson("a", sampling_probability=0.1), pupils)
    with pytest.raises(ValueError, match="must be an upper bound on the children"):
        contributions(sampling, Population.from_sizes([25, 60]))
    assert contributions(sampling) == 2

"""Laws of the clip units that hold a person, enumerated; bounds of people, blocks."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe import people_laws
from jaxdp_episodic.accountant.describe.people_laws import (
    Stage,
    fewer_binomials,
    log_binomial_law,
    log_drawn,
    log_held,
    log_reached_mean,
    log_reached_worst,
    log_unseen_groups,
    log_visible,
    probability_of_holding,
    tails_moved_up,
)


def coins(bound: float, rate: float) -> Stage:
    return Stage(bound, rate, 0, 0)


def fixed(bound: float, size: float, group: float) -> Stage:
    return Stage(bound, 0, size, group)


ONE_OF_TWO = fixed(1, 2, 20)
# Reference: exact rational arithmetic, 16 digits.
HOLDING = [
    ([fixed(4, 2, 20)], 0.3684210526315789),
    ([fixed(12, 5, 20), ONE_OF_TWO], 0.26714240970072245),
    ([coins(5, 1.0), ONE_OF_TWO], 1 - 0.9**5),
    ([], 1),
    *(([fixed(bound, 2, 20)], 1) for bound in (19, 30)),  # at most one other unit
    ([coins(3, 0.0), ONE_OF_TWO], 0),
    ([fixed(1, 1, 1e9)], 1e-9),
]


@pytest.mark.parametrize(("stages", "chance"), HOLDING)
def test_chances_of_the_reference_designs(stages: list[Stage], chance: float) -> None:
    assert probability_of_holding(stages) == pytest.approx(chance, rel=1e-14)


@pytest.mark.parametrize(("group", "bound", "size"), [(6, 2, 3), (5, 4, 2), (4, 4, 3)])
def test_draws_without_replacement(group: int, bound: int, size: int) -> None:
    law = np.exp(log_drawn(fixed(bound, size, group)))
    expected = stats.hypergeom.pmf(np.arange(len(law)), group, bound, size)
    np.testing.assert_allclose(law, expected, atol=1e-15)


def test_units_that_are_drawn_and_hold_her() -> None:
    """3 of 10 units; 4 can hold the person, each with probability 1/2."""
    law = np.exp(log_held(log_drawn(fixed(4, 3, 10)), 0.5))
    expected = [0.49583333333333335, 0.4125, 0.0875, 0.0041666666666666675]
    np.testing.assert_allclose(law, expected, rtol=1e-13)


def held_by_groups(classes, ways, bound) -> dict[tuple[int, ...], float]:
    """Chances of the numbers of her classes in all groups, over all partitions."""
    orders = list(itertools.permutations(range(classes)))
    found: Counter = Counter()
    for order in orders:
        held = [sum(i < bound for i in order[at : at + ways]) for at in range(classes)]
        found[tuple(held[: classes // ways * ways : ways])] += 1 / len(orders)
    return found


@pytest.mark.parametrize(
    ("classes", "ways", "bound"), [(5, 2, 3), (6, 3, 6), (5, 1, 2)]
)
def test_averages_over_all_partitions(classes: int, ways: int, bound: int) -> None:
    expected = np.zeros(classes // ways + 1)
    for held, chance in held_by_groups(classes, ways, bound).items():
        law = np.ones(1)
        for number in held:
            law = np.convolve(law, [0.7**number, 1 - 0.7**number])
        expected += chance * law
    mean = np.exp(log_reached_mean(classes, ways, bound, 0.3))
    np.testing.assert_allclose(mean, np.trim_zeros(expected, "b"), atol=1e-14)


@pytest.mark.parametrize(
    ("classes", "ways", "bound", "chance", "rate"),
    [
        (5, 2, 3, 0.3, 0.6),
        (6, 3, 4, 0.2, 1.0),
        (6, 2, 1, 1.0, 0.4),
        (7, 1, 2, 0.3, 0.6),
        (4, 2, 4, 0.5, 0),
    ],
)
def test_groups_that_are_not_seen_without_her(classes, ways, bound, chance, rate):
    """Over all partitions, and all sets of groups that are drawn without the person."""
    law = np.zeros((min(bound, classes // ways) + 1, bound + 1))
    for held, share in held_by_groups(classes, ways, bound).items():
        numbers = [a for a in held if a > 0]
        for unseen in itertools.product((0, 1), repeat=len(numbers)):
            weight = share
            for a, stays in zip(numbers, unseen, strict=True):
                seen = rate * (1 - chance) ** a
                weight *= 1 - seen if stays else seen
            law[sum(unseen), int(np.dot(numbers, unseen))] += weight
    found = np.exp(log_unseen_groups(classes, ways, bound, chance, rate))
    np.testing.assert_allclose(found, law, atol=1e-14)


def tails(number: float, log_none: float) -> np.ndarray:
    """Probabilities of j or more of a binomial distribution."""
    rate = -math.expm1(-log_none / max(number, 1))
    return stats.binom.sf(np.arange(-1, 60), number, rate)


@pytest.mark.parametrize("most", [20, 100, 1e9])
def test_merged_binomial_laws_are_larger_and_no_weight_is_lost(
    most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every distribution is matched to a larger one with the same weight."""
    monkeypatch.setattr(people_laws, "_MOST_TERMS", most)
    monkeypatch.setattr(people_laws, "_MOST_LAWS", most)
    rng = np.random.default_rng(0)
    number = np.append(rng.integers(1, 40, 60), 0)
    none = number * rng.gamma(2.0, 0.1, 61)
    weight = rng.dirichlet(np.ones(61))
    count, merged_none, log_weight = fewer_binomials(number, none, np.log(weight))
    kept = np.exp(log_weight)
    assert kept.sum() == pytest.approx(1.0, rel=1e-14)
    assert most > 1e3 or len(count) < 30
    for level in np.linspace(0, none.max(), 30):
        for least in (0, 10, 30):
            # Every upper set has at least as much weight after merging.
            before = weight[(number >= least) & (none >= level)].sum()
            after = kept[(count >= least) & (merged_none >= level)].sum()
            assert after >= before - 1e-14
    if most > 1e3:
        assert kept @ count == pytest.approx(weight @ number)
    endless = np.where(number > 0, np.inf, 0.0)  # Poisson rate 1
    _, raised, _ = fewer_binomials(number, endless, np.log(weight))
    assert sorted({*raised}) == [0, np.inf]
    larger = tails(30.0, 2.0)
    assert np.all(tails(20.0, 2.0) <= larger) and np.all(tails(30.0, 1.9) <= larger)


@pytest.mark.parametrize("bound", [1, 2, 4, 5])
def test_the_even_partition_is_the_worst(bound: int) -> None:
    worst = np.cumsum(np.exp(log_reached_worst(2, 3, bound, 0.4))[::-1])[::-1]
    for first in range(max(0, bound - 3), min(bound, 3) + 1):
        chances = [1 - 0.6**number for number in (first, bound - first)]
        law = np.convolve(*([1 - p, p] for p in chances))
        assert np.all(np.cumsum(law[::-1])[::-1] <= worst[: len(law)] + 1e-14)


def test_each_class_has_the_law_of_independent_groups() -> None:
    independent = log_binomial_law(192, 1 - 0.9**5)
    for law in log_reached_mean(964, 5, 964, 0.1), log_reached_worst(192, 5, 964, 0.1):
        np.testing.assert_allclose(law, independent, atol=1e-9)


def test_the_mean_number_of_groups_of_many_classes() -> None:
    law = np.exp(log_reached_mean(2305, 5, 2273, 1.0))
    missed = math.comb(2300, 2273) / math.comb(2305, 2273)
    assert law.sum() == pytest.approx(1, rel=1e-12)
    assert law @ np.arange(len(law)) == pytest.approx(461 * (1 - missed), rel=1e-12)
    rare = log_reached_mean(2000, 2, 2000, 1e-3)  # without underflow
    np.testing.assert_allclose(rare, log_binomial_law(1000, 0.001999), rtol=1e-12)


def test_visible_levels_are_compound_laws() -> None:
    stages = [fixed(2, 2, 5), coins(3, 0.25)]
    numbers, masses = log_visible(stages)
    expected = np.zeros(7)
    for drawn, weight in enumerate((3 / 10, 6 / 10, 1 / 10)):
        for j in range(3 * drawn + 1):
            binomial = math.comb(3 * drawn, j) * 0.25**j * 0.75 ** (3 * drawn - j)
            expected[j] += weight * binomial
    np.testing.assert_allclose(numbers, np.arange(7))
    np.testing.assert_allclose(np.exp(masses), expected, rtol=1e-13)
    assert [part.tolist() for part in log_visible([])] == [[1], [0]]


@pytest.mark.parametrize(
    ("number", "rate"), [(192, 0.975), (5000, 0.3), (1000, 1e-6), (3, 0.5), (7, 1.0)]
)
def test_tails_are_moved_upwards_only(number: int, rate: float) -> None:
    law = log_binomial_law(number, rate)
    values, masses = tails_moved_up(law)
    assert np.all(np.diff(values) > 0) and len(values) < 700
    np.testing.assert_allclose(np.exp(masses).sum(), 1.0, rtol=1e-12)
    # At least the distribution in stochastic order, and close to it.
    tail = np.cumsum(np.exp(law)[::-1])[::-1]
    kept = np.array([np.exp(masses[values >= k]).sum() for k in range(number + 1)])
    assert np.all(kept >= tail * (1 - 1e-11))
    assert np.all(kept <= tail * (1 + 1e-12) + 2e-17)


# --- Bounds of a person, blocks of people, and contradictory designs ---


W, P = jde.WithoutReplacement, jde.Poisson
EXAMPLES = W("example", size=2, population=20)
GROUPED = jde.GroupedClasses(
    num_classes=23,
    ways=5,
    episodes=P("episode", sampling_probability=0.25),
    examples=EXAMPLES,
)
BLOCKS = jde.PeopleBlocks(
    num_people=21,
    people_per_block=4,
    episodes=P("episode", sampling_probability=0.25),
    sampling=jde.MultistageSampling(
        W("class", size=5, population=23), W("example", size=2, population=4)
    ),
)
PEOPLE = jde.PersonBounds(examples=1, classes=12)


def person(
    design: object, people: object = PEOPLE, **fields: object
) -> jde.GaussianStep:
    fields = {"noise_multiplier": 2.0, "privacy_unit": "person"} | fields
    return jde.GaussianStep(design, people=people, **fields)


def test_blocks_are_whole_and_bounds_broadcast_with_the_step() -> None:
    assert BLOCKS.num_possible_episodes == 5  # the 21st person is left out
    assert BLOCKS.level_names == ("episode", "class", "example")
    assert BLOCKS.with_scheme(P("episode", sampling_probability=0.5)) != BLOCKS
    assert BLOCKS.with_scheme(W("class", size=1, population=23)).schemes[1].size == 1
    step = jde.GaussianStep(BLOCKS, noise_multiplier=1.0, people=PEOPLE)
    assert (step.privacy_unit, step.clip_unit) == ("person", "episode")
    bounds = jde.PersonBounds(examples=[[1], [2]], classes=np.arange(1, 4))
    assert person(GROUPED, bounds, noise_multiplier=1.0).shape == (2, 3)


EXACT = W("example", size=2, population=4, population_is_exact=True)
TREE = jde.Population.from_sizes([[3, 4], [5, 2]])
STAGES = jde.MultistageSampling(
    P("class", sampling_probability=0.1), P("example", sampling_probability=0.1)
)
DEEP = jde.MultistageSampling(*(P(n, sampling_probability=0.1) for n in "abcd"))
Bounds, M = jde.PersonBounds, [1.0, 2.0, 3.0]
HALF, QUARTER = P("class", sampling_probability=0.5), BLOCKS.episodes
BY_CLASS = jde.GroupedClasses(num_classes=23, ways=5, classes=HALF, examples=EXAMPLES)
SMALL = {"population": jde.Population.from_sizes([3, 4]), "clip_unit": "class"}
REFUSED = [
    (lambda: Bounds(), "at least one of"),
    (lambda: Bounds(examples=0), "examples must be a whole number >= 1"),
    (lambda: Bounds(classes=np.nan), "classes must be a whole number >= 1"),
    (lambda: Bounds(tasks=0), "tasks must be a whole number >= 1"),
    (
        lambda: person(GROUPED, Bounds(examples=[1, 2], classes=3), noise_multiplier=M),
        "people",
    ),
    (lambda: person(GROUPED, None), "bound on examples and classes"),
    (
        lambda: person(GROUPED, Bounds(examples=1, classes=2, tasks=3)),
        "must not bound others.*tasks",
    ),
    (lambda: person(GROUPED, privacy_unit="class"), "people must be None unless"),
    (lambda: person(GROUPED, 3), "PersonBounds or None"),
    (
        lambda: person(GROUPED, Bounds(examples=1, classes=24)),
        "people.classes must be at most .*num_classes",
    ),
    (
        lambda: person(EXACT, Bounds(examples=5)),
        "people.examples must be at most .*the exact population",
    ),
    (
        lambda: person(STAGES, Bounds(examples=1, classes=3), **SMALL),
        "people.classes must be at most .*the Population",
    ),
    (lambda: person(DEEP, PEOPLE, clip_unit="a"), "4 levels"),
    (lambda: person(BY_CLASS), "grouped"),
    (lambda: person(BLOCKS, population=TREE), "PeopleBlocks with a Population"),
    (lambda: person(BLOCKS, None, privacy_unit="class"), "covered: 'person'"),
    (
        lambda: jde.PeopleBlocks(num_people=3, people_per_block=4, episodes=QUARTER),
        "at most num_people",
    ),
]


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_contradictions_are_refused(make, match) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=match):
        make()


def test_a_person_may_join_a_class_that_is_smaller_than_the_bound() -> None:
    bounds = jde.PersonBounds(examples=9, classes=2)
    assert person(STAGES, bounds, **SMALL).people == bounds
    with pytest.raises(ValueError, match="people.examples"):
        person(STAGES, bounds, neighboring_relation="zero_out", **SMALL)

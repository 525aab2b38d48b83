"""The sampler against the exact distribution of every design.

Every check is a family of exact two-sided binomial tests of counts over independent
steps, with Bonferroni's correction: a correct sampler fails one check with a chance of
at most 1e-6 (seeds are fixed, so it fails always or never).
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.trainer.draw import Draw, EpisodeSampler
from oracles import draws as oracle
from oracles.draws import Inclusion, Tally, false_alarm
from oracles.trees import Scheme

FALSE_ALARMS = 1e-6
# Steps at which wrong samplers are rejected at 1e-28 or less: shuffled epochs, capped
# or padded batches, reused draws or partitions, small units dropped.
STEPS = 600

TWO_LEVELS = [3, 1, 0, 5]
THREE_LEVELS = [[3, 2, 0], [2, 4], [1]]
CLASS_SIZES = [3, 5, 2, 4, 0, 3, 2]


def poisson(rate):
    return Scheme("poisson", rate)


def subset(size):
    return Scheme("without_replacement", size)


def spec_of(name: str, scheme: Scheme) -> Poisson | WithoutReplacement:
    if scheme.kind == "poisson":
        return Poisson(name, sampling_probability=scheme.value)
    return WithoutReplacement(name, size=int(scheme.value))


class Case(NamedTuple):
    """A sampler, its number of examples, and the exact probabilities."""

    sampler: Any
    num_examples: int
    inclusion: Inclusion
    number_distribution: Any = None
    one_row: np.ndarray | None = None  # inclusion in a row, if rows are independent


def tree_case(nested, schemes, clip_level, number_distribution=None) -> Case:
    names = ("step", *(f"level{i + 1}" for i in range(len(schemes))))
    levels = [spec_of(n, s) for n, s in zip(names[1:], schemes, strict=True)]
    population = Population.from_sizes(nested)
    sampler = EpisodeSampler(
        MultistageSampling(*levels), population, clip_unit=names[clip_level]
    )
    inclusion = oracle.tree_inclusion(nested, schemes, clip_level)
    return Case(sampler, len(inclusion.in_step), inclusion, number_distribution)


def grouped_case(drawn, scheme, *, sizes=None, ways=3, size=2) -> Case:
    sizes = CLASS_SIZES if sizes is None else sizes
    field = {"episodes": "episode", "classes": "class"}[drawn]
    design: Any = GroupedClasses(
        num_classes=len(sizes),
        ways=ways,
        examples=WithoutReplacement("example", size=size),
        **{drawn: spec_of(field, scheme)},
    )
    sampler = EpisodeSampler(design, Population.from_sizes(sizes), clip_unit="episode")
    inclusion = oracle.grouped_inclusion(sizes, ways, drawn, scheme, size)
    number = len(sizes) // ways if drawn == "episodes" else len(sizes)
    dist = stats.rv_discrete(
        values=_group_numbers(scheme, number, 1 if drawn == "episodes" else ways)
    )
    return Case(sampler, sum(sizes), inclusion, dist)


def _group_numbers(scheme, number, ways):
    """Distribution of the number of episodes: values and probabilities."""
    values = np.arange(number // ways + 1)
    chances = np.zeros(len(values))
    for weight, sample in scheme.subsets(number):
        chances[len(sample) // ways] += weight
    return values, chances


def independent_case(nested, schemes, num_episodes) -> Case:
    levels = [spec_of(f"level{i}", s) for i, s in enumerate(schemes)]
    sampler = EpisodeSampler(
        IndependentEpisodes(MultistageSampling(*levels), num_episodes=num_episodes),
        Population.from_sizes(nested),
        clip_unit="episode",
    )
    one = oracle.tree_inclusion(nested, schemes, 0).in_step
    inclusion = oracle.independent_inclusion(one, num_episodes)
    return Case(sampler, len(one), inclusion, one_row=one)


CASES = {
    "examples-poisson": lambda: tree_case(24, [poisson(0.2)], 1, stats.binom(24, 0.2)),
    "examples-subset": lambda: tree_case(24, [subset(7)], 1),
    "examples-as-a-step": lambda: tree_case(24, [poisson(0.3)], 0),
    "tasks-poisson-subset": lambda: tree_case(
        TWO_LEVELS, [poisson(0.4), subset(2)], 1, stats.binom(4, 0.4)
    ),
    "examples-poisson-subset": lambda: tree_case(
        TWO_LEVELS, [poisson(0.4), subset(2)], 2
    ),
    "step-poisson-subset": lambda: tree_case(TWO_LEVELS, [poisson(0.4), subset(2)], 0),
    "tasks-subset-poisson": lambda: tree_case(TWO_LEVELS, [subset(2), poisson(0.6)], 1),
    "three-levels-top": lambda: tree_case(
        THREE_LEVELS, [poisson(0.5), subset(2), poisson(0.7)], 1, stats.binom(3, 0.5)
    ),
    "three-levels-middle": lambda: tree_case(
        THREE_LEVELS, [subset(2), poisson(0.6), subset(2)], 2
    ),
    "three-levels-last": lambda: tree_case(
        THREE_LEVELS, [poisson(0.6), poisson(0.7), subset(3)], 3
    ),
    "grouped-episodes-poisson": lambda: grouped_case("episodes", poisson(0.6)),
    "grouped-episodes-subset": lambda: grouped_case("episodes", subset(1)),
    "grouped-classes-poisson": lambda: grouped_case("classes", poisson(0.7)),
    "grouped-classes-subset": lambda: grouped_case("classes", subset(5)),
    "independent-subsets": lambda: independent_case(
        TWO_LEVELS, [subset(2), subset(2)], 100
    ),
    "independent-poisson": lambda: independent_case(
        TWO_LEVELS, [poisson(0.4), subset(2)], 100
    ),
    "independent-few": lambda: independent_case(
        THREE_LEVELS, [subset(2), poisson(0.5), poisson(0.5)], 3
    ),
}


def take(sampler, steps: int, seed: int) -> list[Draw]:
    generator = np.random.default_rng(seed)
    return [sampler.draw(generator) for _ in range(steps)]


def check(case: Case, steps: int, seed: int) -> float:
    """The false-alarm rate at which the sampler of the case is rejected."""
    drawn = take(case.sampler, steps, seed)
    found = oracle.incidence(drawn, case.num_examples)
    tallies = oracle.step_tallies(found, case.inclusion)
    if case.number_distribution is not None:
        tallies.append(oracle.number_tally(found.num_rows, case.number_distribution))
    if case.one_row is not None:
        pairs = np.rint(found.rows.T @ found.rows).astype(np.int64)
        tallies.append(Tally(pairs, len(found.rows), case.one_row))
    return false_alarm(*tallies)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, STEPS) for name in CASES),
        *(
            pytest.param(name, 40_000, marks=pytest.mark.slow)
            for name in CASES
            if not name.startswith("independent")
        ),
    ],
)
def test_inclusion_of_examples_and_pairs(name, steps):
    """Single examples, and pairs within a clip unit, across units, and across steps."""
    assert check(CASES[name](), steps, seed=1) > FALSE_ALARMS


# --- The whole distribution of tiny designs ---


def outcome(draw: Draw) -> tuple:
    """Contents of the drawn rows, regardless of the order of rows and slots."""
    rows = zip(draw.examples, draw.mask, strict=True)
    return tuple(sorted(tuple(np.sort(e[m]).tolist()) for e, m in rows))


TINY_TREES = [
    ([2, 0, 3], [poisson(0.4), subset(2)], 1),
    ([2, 0, 3], [subset(2), poisson(0.3)], 1),
    ([2, 0, 3], [subset(2), poisson(0.3)], 0),
    ([2, 3], [poisson(0.8), poisson(0.3)], 2),
    ([[2, 1], [0, 3]], [poisson(0.7), subset(1), subset(2)], 1),
    ([[2, 1], [1, 1]], [subset(1), poisson(0.5), subset(1)], 2),
    (6, [subset(3)], 1),
]


@pytest.mark.parametrize(("nested", "schemes", "clip_level"), TINY_TREES)
def test_distribution_of_tiny_trees(nested, schemes, clip_level):
    case = tree_case(nested, schemes, clip_level)
    dist = oracle.rows_distribution(oracle.numbered(nested), schemes, clip_level)
    outcomes = [outcome(draw) for draw in take(case.sampler, 1_000, seed=3)]
    assert abs(sum(dist.values()) - 1) < 1e-12
    assert false_alarm(oracle.outcome_tally(outcomes, dist)) > FALSE_ALARMS


@pytest.mark.parametrize(
    ("drawn", "scheme"),
    [
        ("episodes", poisson(0.4)),
        ("episodes", subset(1)),
        ("classes", poisson(0.6)),
        ("classes", subset(4)),
    ],
)
def test_distribution_of_tiny_grouped_classes(drawn, scheme):
    """Five classes, one of them empty, in pairs."""
    sizes = [2, 1, 0, 1, 3]
    case = grouped_case(drawn, scheme, sizes=sizes, ways=2, size=2)
    dist = oracle.grouped_rows_distribution(sizes, 2, drawn, scheme, 2)
    outcomes = [outcome(draw) for draw in take(case.sampler, 1_000, seed=4)]
    assert false_alarm(oracle.outcome_tally(outcomes, dist)) > FALSE_ALARMS


def test_distribution_of_tiny_independent_episodes():
    """Pairs of consecutive episodes of a step: independent, as of two steps."""
    schemes = [subset(1), subset(2)]
    case = independent_case([2, 3], schemes, 20)
    dist = oracle.content_distribution(oracle.numbered([2, 3]), schemes)
    pairs = {(a, b): dist[a] * dist[b] for a in dist for b in dist}
    rows = [
        tuple(np.sort(examples[mask]).tolist())
        for draw in take(case.sampler, 500, seed=5)
        for examples, mask in zip(draw.examples, draw.mask, strict=True)
    ]
    outcomes = list(zip(rows[::2], rows[1::2], strict=True))
    assert false_alarm(oracle.outcome_tally(outcomes, pairs)) > FALSE_ALARMS


@pytest.mark.parametrize("number", [1, 40])
def test_every_order_of_the_slots_is_equally_likely(number):
    """So support and query are exchangeable: 60 ordered triples of five examples."""
    case = independent_case([5], [subset(1), subset(3)], number)
    triples = [
        tuple(row)
        for draw in take(case.sampler, 2_400 // number, seed=6)
        for row in draw.examples.reshape(number, 3).tolist()
    ]
    dist = {order: 1 / 60 for order in itertools.permutations(range(5), 3)}
    assert false_alarm(oracle.outcome_tally(triples, dist)) > FALSE_ALARMS
    # A mistake: sorted slots, so that a unit's first examples are always its support.
    in_order = [tuple(sorted(triple)) for triple in triples]
    assert false_alarm(oracle.outcome_tally(in_order, dist)) < FALSE_ALARMS


def test_every_order_of_poisson_slots_is_equally_likely():
    case = tree_case([4, 4, 4], [poisson(1.0), poisson(0.8)], 1)
    orders = [
        tuple(examples[mask] - 4 * unit)
        for draw in take(case.sampler, 1_000, seed=7)
        for examples, mask, unit in zip(*draw[:3], strict=True)
    ]
    dist = {
        order: 0.8**size
        * 0.2 ** (4 - size)
        / len(list(itertools.permutations(range(size))))
        for size in range(5)
        for order in itertools.permutations(range(4), size)
    }
    assert abs(sum(dist.values()) - 1) < 1e-12
    assert false_alarm(oracle.outcome_tally(orders, dist)) > FALSE_ALARMS


def test_the_place_of_a_class_in_an_episode_is_uniform():
    """The label of a class within its episode is uniformly random."""
    case = grouped_case("classes", subset(4), sizes=[1] * 5, ways=2, size=1)
    drawn = take(case.sampler, 1_500, seed=8)
    first = np.concatenate([draw.examples[:, 0, 0] for draw in drawn])
    counts = np.bincount(first, minlength=5)
    assert false_alarm(Tally(counts, len(first), 1 / 5)) > FALSE_ALARMS


# --- Realistic sizes ---


def test_episodes_of_1800_classes():
    """Each class, each example, and each example at the first slot of its class."""
    steps, rate = 800, 64 / 360
    design = GroupedClasses(
        num_classes=1_800,
        ways=5,
        episodes=Poisson("episode", sampling_probability=rate),
        examples=WithoutReplacement("example", size=4),
    )
    population = Population.from_sizes([20] * 1_800)
    drawn = take(EpisodeSampler(design, population, clip_unit="episode"), steps, 10)
    episodes = np.concatenate([draw.examples for draw in drawn])
    assert len(episodes) > 40_000
    counts = np.bincount(episodes.reshape(-1), minlength=36_000)
    first = np.bincount(episodes[..., 0].reshape(-1), minlength=36_000)
    classes = np.bincount(episodes[..., 0].reshape(-1) // 20, minlength=1_800)
    number = np.array([len(draw.units) for draw in drawn])
    assert (
        false_alarm(
            Tally(counts, steps, rate / 5),
            Tally(first, steps, rate / 20),
            Tally(classes, steps, rate),
            oracle.number_tally(number, stats.binom(360, rate)),
        )
        > FALSE_ALARMS
    )


def test_schools_of_very_unequal_sizes():
    """Each school and each pupil; small schools give all, at their school's rate."""
    sizes = np.minimum(np.random.default_rng(11).geometric(1 / 13, 2_410) - 1, 188)
    assert sizes.min() == 0
    steps, rate = 800, 0.05
    sampling = MultistageSampling(
        Poisson("school", sampling_probability=rate),
        WithoutReplacement("pupil", size=8),
    )
    sampler = EpisodeSampler(sampling, Population.from_sizes(sizes), clip_unit="school")
    drawn = take(sampler, steps, seed=12)
    units = np.concatenate([draw.units for draw in drawn])
    mask = np.concatenate([draw.mask for draw in drawn])
    pupils = np.concatenate([draw.examples for draw in drawn])[mask]
    np.testing.assert_array_equal(mask.sum(axis=1), np.minimum(sizes[units], 8))
    chance = np.repeat(np.minimum(sizes, 8) / np.maximum(sizes, 1), sizes) * rate
    assert (
        false_alarm(
            Tally(np.bincount(units, minlength=2_410), steps, rate),
            Tally(np.bincount(pupils, minlength=sizes.sum()), steps, chance),
            oracle.number_tally(
                np.array([len(draw.units) for draw in drawn]), stats.binom(2_410, rate)
            ),
        )
        > FALSE_ALARMS
    )

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

from jaxdp_episodic import (
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    Poisson,
    Population,
    WithoutReplacement,
)
from jaxdp_episodic.trainer.draw import Draw, EpisodeSampler
from oracles import draws as oracle
from oracles.draws import Distribution, Tally, false_alarm
from oracles.trees import Scheme

FALSE_ALARMS = 1e-6


def poisson(rate):
    return Scheme("poisson", rate)


def subset(size):
    return Scheme("without_replacement", size)


def spec_of(name: str, scheme: Scheme) -> Poisson | WithoutReplacement:
    if scheme.kind == "poisson":
        return Poisson(name, sampling_probability=scheme.value)
    return WithoutReplacement(name, size=int(scheme.value))


class Case(NamedTuple):
    """A sampler, and the distribution of the contents of a step's rows."""

    sampler: Any
    dist: Distribution


def tree_case(nested, schemes, clip_level) -> Case:
    names = ("step", *(f"level{i + 1}" for i in range(len(schemes))))
    levels = [spec_of(n, s) for n, s in zip(names[1:], schemes, strict=True)]
    sampler = EpisodeSampler(
        MultistageSampling(*levels),
        Population.from_sizes(nested),
        clip_unit=names[clip_level],
    )
    tree = oracle.numbered(nested)
    return Case(sampler, oracle.rows_distribution(tree, schemes, clip_level))


def grouped_case(drawn, scheme, sizes=(2, 1, 0, 1, 3), ways=2, size=2) -> Case:
    """Five classes, one of them empty, in pairs."""
    field = {"episodes": "episode", "classes": "class"}[drawn]
    design: Any = GroupedClasses(
        num_classes=len(sizes),
        ways=ways,
        examples=WithoutReplacement("example", size=size),
        **{drawn: spec_of(field, scheme)},
    )
    tree = Population.from_sizes(list(sizes))
    sampler = EpisodeSampler(design, tree, clip_unit="episode")
    dist = oracle.grouped_rows_distribution(sizes, ways, drawn, scheme, size)
    return Case(sampler, dist)


def independent(nested, schemes, num_episodes):
    levels = [spec_of(f"level{i}", s) for i, s in enumerate(schemes)]
    return EpisodeSampler(
        IndependentEpisodes(MultistageSampling(*levels), num_episodes=num_episodes),
        Population.from_sizes(nested),
        clip_unit="episode",
    )


SMALL, DEEP, FLAT = [2, 0, 3], [[2, 1], [0, 3]], [[2, 1], [1, 1]]
TREES = {  # sizes, schemes, clip level
    "examples-poisson": (5, [poisson(0.3)], 1),
    "examples-subset": (6, [subset(3)], 1),
    "examples-as-a-step": (5, [poisson(0.3)], 0),
    "tasks-poisson-subset": (SMALL, [poisson(0.4), subset(2)], 1),
    "tasks-subset-poisson": (SMALL, [subset(2), poisson(0.3)], 1),
    "step-subset-poisson": (SMALL, [subset(2), poisson(0.3)], 0),
    "examples-poisson-subset": (SMALL, [poisson(0.4), subset(2)], 2),
    "examples-poisson-poisson": ([2, 3], [poisson(0.8), poisson(0.3)], 2),
    "three-levels-top": (DEEP, [poisson(0.7), subset(1), subset(2)], 1),
    "three-levels-middle": (FLAT, [subset(1), poisson(0.5), subset(1)], 2),
    "three-levels-last": (DEEP, [poisson(0.6), poisson(0.7), subset(2)], 3),
}
GROUPS = {  # what is drawn, and how
    "grouped-episodes-poisson": ("episodes", poisson(0.4)),
    "grouped-episodes-subset": ("episodes", subset(1)),
    "grouped-classes-poisson": ("classes", poisson(0.6)),
    "grouped-classes-subset": ("classes", subset(4)),
}


def case_of(name: str) -> Case:
    if name in TREES:
        return tree_case(*TREES[name])
    return grouped_case(*GROUPS[name])


def take(sampler, steps: int, seed: int) -> list[Draw]:
    generator = np.random.default_rng(seed)
    return [sampler.draw(generator) for _ in range(steps)]


def contents(draw: Draw) -> list[tuple]:
    """The examples of each row, regardless of the order of slots."""
    rows = zip(draw.examples, draw.mask, strict=True)
    return [tuple(np.sort(e[m]).tolist()) for e, m in rows]


def check(case: Case, steps: int, seed: int) -> float:
    """The false-alarm rate at which the sampler of the case is rejected.

    By the whole distribution of a step, and by the pairs of examples of which one is
    in a step and the other in the next one, which is independent.
    """
    outcomes = [tuple(sorted(contents(d))) for d in take(case.sampler, steps, seed)]
    examples = {e for rows in case.dist for row in rows for e in row}

    def members(rows):
        return np.isin(range(max(examples) + 1), list(itertools.chain(*rows)))

    present = np.array([members(rows) for rows in outcomes], int)
    single = sum(chance * members(rows) for rows, chance in case.dist.items())
    return false_alarm(
        oracle.outcome_tally(outcomes, case.dist),
        Tally(present[::2].T @ present[1::2], steps // 2, np.outer(single, single)),
    )


@pytest.mark.parametrize("steps", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*TREES, *GROUPS])
def test_the_distribution_of_a_step(name, steps):
    case = case_of(name)
    assert abs(sum(case.dist.values()) - 1) < 1e-12
    assert check(case, steps, seed=1) > FALSE_ALARMS


@pytest.mark.parametrize(
    ("nested", "schemes"),
    [([2, 3], [subset(1), subset(2)]), ([2, 0, 3], [poisson(0.5), subset(1)])],
)
def test_independent_episodes(nested, schemes):
    """Pairs of consecutive episodes of a step: independent, as of two steps."""
    sampler = independent(nested, schemes, 20)
    step = oracle.rows_distribution(oracle.numbered(nested), schemes, 0)
    dist = {row: chance for (row,), chance in step.items()}
    pairs = {(a, b): dist[a] * dist[b] for a in dist for b in dist}
    rows = [row for draw in take(sampler, 500, seed=5) for row in contents(draw)]
    outcomes = list(zip(rows[::2], rows[1::2], strict=True))
    assert false_alarm(oracle.outcome_tally(outcomes, pairs)) > FALSE_ALARMS


@pytest.mark.parametrize("number", [1, 40])
def test_every_order_of_the_slots_is_equally_likely(number):
    """So support and query are exchangeable: 60 ordered triples of five examples."""
    sampler = independent([5], [subset(1), subset(3)], number)
    triples = [
        tuple(row)
        for draw in take(sampler, 2_400 // number, seed=6)
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
    case = grouped_case("classes", subset(4), sizes=[1] * 5, size=1)
    drawn = take(case.sampler, 1_500, seed=8)
    first = np.concatenate([draw.examples[:, 0, 0] for draw in drawn])
    counts = np.bincount(first, minlength=5)
    assert false_alarm(Tally(counts, len(first), 1 / 5)) > FALSE_ALARMS


# --- Realistic sizes: a rate that is wrong by 3 % is found ---


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
    first = episodes[..., 0].reshape(-1)
    number = np.array([len(draw.units) for draw in drawn])
    tallies = [
        Tally(np.bincount(episodes.reshape(-1), minlength=36_000), steps, rate / 5),
        Tally(np.bincount(first, minlength=36_000), steps, rate / 20),
        Tally(np.bincount(first // 20, minlength=1_800), steps, rate),
    ]
    assert false_alarm(
        *tallies, oracle.number_tally(number, stats.binom(360, rate))
    ) > (FALSE_ALARMS)
    wrong = oracle.number_tally(number, stats.binom(360, rate / 1.03))
    assert false_alarm(wrong) < FALSE_ALARMS


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

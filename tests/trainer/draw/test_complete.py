"""Chances of complete contributions, against enumeration and against draws."""

import itertools
import math

import numpy as np
import pytest

from jaxdp_episodic import (
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    PeopleBlocks,
    Poisson,
    Population,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.draw.complete import Needs, mean_product
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler

SIZES = [1, 2, 4, 4, 5]
EPISODES = Needs.of(1, is_regression=False)


def examples(size=2, population=None):
    return WithoutReplacement("example", size=size, population=population)


def grouped(population=None, ways=2, **episodes):
    return GroupedClasses(
        num_classes=len(SIZES),
        ways=ways,
        examples=examples(population=population),
        **(episodes or {"episodes": Poisson("episode", sampling_probability=0.5)}),
    )


def sampler(sampling, sizes=SIZES, clip_unit="episode", names=("class",), **others):
    population = Population.from_sizes(sizes, level_names=names)
    return EpisodeSampler(
        sampling,
        population,
        clip_unit=clip_unit,
        population_is_accounted=True,
        **others,
    )


def test_mean_product_is_that_of_all_subsets():
    rng = np.random.default_rng(0)
    for values, number, size in (
        (rng.random(6), 6, 3),
        (rng.random(5), 8, 4),
        (np.repeat(rng.random(3), 3), 10, 5),
        (np.ones(4), 9, 2),
        (rng.random(4), 4, 4),
        (np.zeros(3), 3, 1),
        (rng.random(2), 5, 3),
    ):
        every = [*values, *np.zeros(number - len(values))]
        products = [math.prod(s) for s in itertools.combinations(every, size)]
        exact = math.fsum(products) / len(products)
        assert mean_product(values, number, size) == pytest.approx(exact, rel=1e-12)


@pytest.mark.slow
def test_mean_product_of_thousands():
    values = np.linspace(0.5, 1.0, 3_000)
    # Newton's identities in exact integers: values are k / (2 * 2999), shifted.
    whole = [2999 + k for k in range(3_000)]
    powers = [sum(w**p for w in whole) for p in range(6)]
    symmetric = [1]
    for k in range(1, 6):
        signed = [
            (-1) ** (i - 1) * symmetric[k - i] * powers[i] for i in range(1, k + 1)
        ]
        symmetric.append(sum(signed) // k)
    exact = symmetric[5] / (5998**5 * math.comb(3_000, 5))
    assert mean_product(values, 3_000, 5) == pytest.approx(exact, rel=1e-10)


def by_enumeration(slots):
    """Chance that a pair of classes draws two filled slots of each."""
    chance = [math.comb(size, 2) / math.comb(slots or size, 2) for size in SIZES[1:]]
    pairs = list(itertools.combinations([0.0, *chance], 2))
    return math.fsum(a * b for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("slots", [None, 6])
def test_grouped_episodes_by_enumeration(slots):
    slots_of = None if slots is None else "example"
    found = sampler(grouped(slots), slots_of=slots_of).complete_units(EPISODES)
    assert found.drawn == 1.0 and found.is_exact
    assert found.share == pytest.approx(by_enumeration(slots), rel=1e-12)
    epochs = grouped(slots, episodes=RandomAllocation("episode", steps_per_epoch=4))
    found = sampler(epochs, slots_of=slots_of).complete_units(EPISODES)
    assert found.complete == pytest.approx(0.5 * by_enumeration(slots), rel=1e-12)


def test_slots_of_classes():
    design = GroupedClasses(
        num_classes=8,
        ways=2,
        episodes=Poisson("episode", sampling_probability=1.0),
        examples=examples(),
    )
    found = sampler(design, slots_of="class", privacy_unit="class")
    found = found.complete_units(EPISODES)
    # Four of the eight places hold a class with two examples.
    assert found.share == pytest.approx((4 * 3) / (8 * 7), rel=1e-12)


@pytest.mark.parametrize(
    ("sampling", "sizes", "clip_unit", "names", "slots_of", "needs"),
    [
        (grouped(6), SIZES, "episode", ("class",), "example", EPISODES),
        (
            MultistageSampling(
                Poisson("school", sampling_probability=0.6), examples(3, 7)
            ),
            [2, 3, 5, 7, 0],
            "school",
            ("school",),
            "example",
            Needs.of(1, is_regression=True),
        ),
        (
            MultistageSampling(
                Poisson("school", sampling_probability=0.6),
                Poisson("pupil", sampling_probability=0.5, population=7),
            ),
            [2, 3, 5, 7, 0],
            "step",
            ("school", "pupil"),
            "pupil",
            Needs.of(1, is_regression=True),
        ),
        (
            MultistageSampling(
                WithoutReplacement("alphabet", size=2),
                WithoutReplacement("class", size=2),
                examples(2, 4),
            ),
            [[3, 4], [2, 4, 1], [4, 4, 4]],
            "step",
            ("alphabet", "class"),
            "example",
            EPISODES,
        ),
        (
            MultistageSampling(
                Poisson("alphabet", sampling_probability=0.5),
                Poisson("class", sampling_probability=0.7),
                examples(2),
            ),
            [[3, 4], [2, 4, 1], [4, 4, 4]],
            "alphabet",
            ("alphabet", "class"),
            None,
            EPISODES,
        ),
        (
            IndependentEpisodes(
                MultistageSampling(WithoutReplacement("class", size=3), examples(2, 6)),
                num_episodes=5,
            ),
            [6, 5, 6, 4, 1, 6],
            "episode",
            ("class",),
            "example",
            EPISODES,
        ),
        (
            MultistageSampling(
                Poisson("class", sampling_probability=0.5),
                Poisson("example", sampling_probability=0.4, population=4),
            ),
            [4, 2, 0],
            "class",
            ("class",),
            "example",
            Needs(),
        ),
        (
            MultistageSampling(
                Poisson("class", sampling_probability=0.5),
                Poisson("example", sampling_probability=0.4, population=4),
            ),
            [4, 2, 0],
            "example",
            ("class",),
            "example",
            Needs(),
        ),
    ],
)
def test_draws_are_as_often_complete(
    sampling, sizes, clip_unit, names, slots_of, needs
):
    """6 standard deviations: 2e-9 false alarms a row."""
    drawer = sampler(sampling, sizes, clip_unit, names, slots_of=slots_of)
    expected = drawer.complete_units(needs)
    generator = np.random.default_rng(7)
    found = np.array(
        [drawer.complete_in(drawer.draw(generator), needs) for _ in range(700)]
    )
    assert 0 < found.mean() < expected.drawn
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - expected.complete) < 6 * error


@pytest.mark.few(2)
@pytest.mark.parametrize("people_per_block", [1, 2])
@pytest.mark.parametrize("slots", [None, 6])
def test_blocks_of_people(people_per_block, slots):
    """Against draws, by 6 standard deviations and the estimate's own 12 %."""
    rng = np.random.default_rng(3)
    sizes = [8, 8, 8, 8]
    owners = Owners.from_ids(rng.integers(0, 5, 32), name="owners")
    design = PeopleBlocks(
        num_people=6,
        people_per_block=people_per_block,
        episodes=Poisson("episode", sampling_probability=1.0),
        sampling=MultistageSampling(
            WithoutReplacement("class", size=2),
            examples(2, slots),
        ),
    )
    drawer = sampler(
        design,
        sizes,
        owners=owners,
        among_slots=slots is not None,
        slots_of=None if slots is None else "example",
    )
    expected = drawer.complete_units(EPISODES)
    assert expected.is_exact == (people_per_block == 1)
    generator = np.random.default_rng(8)
    found = np.array(
        [drawer.complete_in(drawer.draw(generator), EPISODES) for _ in range(700)]
    )
    error = 6 * found.std() / math.sqrt(len(found))
    error += 0.0 if expected.is_exact else 0.12 * expected.complete
    assert 0 < found.mean() < expected.drawn
    assert abs(found.mean() - expected.complete) <= error + 1e-9

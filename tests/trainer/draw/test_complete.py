"""The share of complete contributions: counted draws against closed forms."""

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
from jaxdp_episodic.trainer.draw.complete import Needs, complete_in_draw
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler

SIZES = [1, 2, 4, 4, 5]
EPISODES, TASK = (Needs.of(1, is_regression=r) for r in (False, True))
HALF = Poisson("episode", sampling_probability=0.5)


def examples(size=2, population=None):
    return WithoutReplacement("example", size=size, population=population)


def grouped(population=None, num_classes=5, episodes=HALF):
    return GroupedClasses(
        num_classes=num_classes,
        ways=2,
        examples=examples(population=population),
        episodes=episodes,
    )


def by_enumeration(slots):
    """Probability that two drawn classes have two filled slots each."""
    chance = [math.comb(size, 2) / math.comb(slots or size, 2) for size in SIZES[1:]]
    pairs = list(itertools.combinations([0.0, *chance], 2))
    return math.fsum(a * b for a, b in pairs) / len(pairs)


def tree(*below, level="class", rate=0.5):
    return MultistageSampling(Poisson(level, sampling_probability=rate), *below)


POISSON_EXAMPLES = Poisson("example", sampling_probability=0.4, population=4)
EPOCHS = RandomAllocation("episode", steps_per_epoch=4)
# design, sizes, clip unit, level of the slots, requirements, complete share
SHARES = {
    "grouped": (grouped(), SIZES, "episode", None, EPISODES, by_enumeration(None)),
    "slots": (grouped(6), SIZES, "episode", "example", EPISODES, by_enumeration(6)),
    "epochs": (
        grouped(6, episodes=EPOCHS),
        SIZES,
        "episode",
        "example",
        EPISODES,
        by_enumeration(6),
    ),
    # Four of the eight places hold a class with two examples.
    "slots of classes": (
        grouped(num_classes=8),
        SIZES,
        "episode",
        "class",
        EPISODES,
        (4 * 3) / (8 * 7),
    ),
    "tasks": (
        tree(examples(3, 7), level="class"),
        [2, 3, 5, 7, 0],
        "class",
        "example",
        TASK,
        sum(math.comb(n, 3) for n in (3, 5, 7)) / math.comb(7, 3) / 5,
    ),
    "examples of classes": (
        tree(POISSON_EXAMPLES),
        [4, 2, 0],
        "class",
        "example",
        Needs(),
        sum(0.6 ** (4 - n) * (1 - 0.6**n) for n in (4, 2, 0)) / 3,
    ),
    "examples": (
        tree(POISSON_EXAMPLES),
        [4, 2, 0],
        "example",
        "example",
        Needs(),
        6 / 12,
    ),
    "independent": (
        IndependentEpisodes(
            MultistageSampling(WithoutReplacement("class", size=3), examples(2, 6)),
            num_episodes=5,
        ),
        [6, 6, 6],
        "episode",
        "example",
        EPISODES,
        1.0,
    ),
    "wasted": (grouped(), [1] * 5, "episode", None, EPISODES, 0.0),
}


def sampler(sampling, sizes, clip_unit, slots_of=None, **others):
    return EpisodeSampler(
        sampling,
        Population.from_sizes(sizes, level_names=("class",)),
        clip_unit=clip_unit,
        population_is_accounted=True,
        privacy_unit="class" if slots_of == "class" else None,
        slots_of=slots_of,
        **others,
    )


@pytest.mark.few(5)
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_complete_contributions_equal_closed_forms(name):
    """Within 6 standard deviations of the simulated clip units."""
    sampling, sizes, clip_unit, slots_of, needs, share = SHARES[name]
    found = sampler(sampling, sizes, clip_unit, slots_of).complete_units(needs)
    number = 200 if share > 0.45 else 4_000
    slack = 6 * math.sqrt(share * (1 - share) / number)
    assert abs(found.share - share) <= slack
    assert found.is_seen == (share > 0)
    assert found.most >= found.complete
    assert found.drawn * share <= found.most + slack * found.drawn


def test_complete_contributions_of_a_draw():
    """Complete: two classes with support and a query, and no null."""
    filled = [[3, 2], [3, 0], [2, 2], [1, 4], [4, 4]]
    mask = np.arange(4) < np.array(filled)[:, :, None]
    null = np.array([False, False, False, False, True])
    assert complete_in_draw(mask, None, EPISODES, 2) == 3
    assert complete_in_draw(mask, null, EPISODES, 2) == 2
    assert complete_in_draw(mask, None, EPISODES, 1) == 4
    # A clip unit with several episodes needs one complete episode.
    assert complete_in_draw(mask[None], None, EPISODES, 2) == 1
    assert complete_in_draw(mask[:, 0], None, TASK, 1) == 4
    assert complete_in_draw(mask[:, 0, 0], None, Needs(), 1) == 5
    assert complete_in_draw(mask[:0], None, EPISODES, 2) == 0


@pytest.mark.parametrize("among_slots", [False, True])
def test_blocks_of_one_person(among_slots):
    """Each of five people has two examples of all of four classes, one has nothing."""
    design = PeopleBlocks(
        num_people=6,
        people_per_block=1,
        episodes=Poisson("episode", sampling_probability=1.0),
        sampling=MultistageSampling(
            WithoutReplacement("class", size=2), examples(2, 3 if among_slots else None)
        ),
    )
    found = sampler(
        design,
        [10] * 4,
        "episode",
        "example" if among_slots else None,
        owners=Owners.from_ids(np.tile(np.arange(5), 8), name="owners"),
        among_slots=among_slots,
    ).complete_units(EPISODES)
    share = 5 / 6 * (1 / 9 if among_slots else 1)
    assert abs(found.share - share) < 6 * math.sqrt(share * (1 - share) / 200)

"""Slots under zero_out: drawn whether filled or not; a null zeroes the whole row.

And the share of complete contributions, counted, against closed forms.
"""

import itertools
import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw import EpisodeSampler, step_generator
from jaxdp_episodic.trainer.draw.complete import Needs, complete_in_draw, complete_units
from jaxdp_episodic.trainer.learners.episode import make_blocks

FILLED = [2, 5, 0, 4]  # filled slots of 5, in 4 tasks
SLOTS = 5
TASK = jde.Poisson("task", sampling_probability=0.5)
EXAMPLE = jde.WithoutReplacement("example", size=2, population=SLOTS)


def population(sizes, names=("task", "example")):
    return jde.Population.from_sizes(sizes, level_names=names)


def sampler(sizes=FILLED, **options):
    given = {"clip_unit": "task", "slots_of": "example", **options}
    return EpisodeSampler(
        jde.MultistageSampling(TASK, EXAMPLE), population(sizes), **given
    )


def draws(drawn_from, number, seed=0):
    return [drawn_from.draw(step_generator(seed, i)) for i in range(number)]


def test_the_draw_does_not_depend_on_which_slots_are_filled():
    """One generator draws the same slots, filled or not."""
    full, some = sampler([SLOTS] * 4), sampler()
    for each in (full, some):
        assert (each.expected_units, each.slot_shape) == (2.0, (2,))
    filled = np.array(FILLED)
    for whole, part in zip(draws(full, 100), draws(some, 100), strict=True):
        np.testing.assert_array_equal(whole.units, part.units)
        slot = whole.examples % SLOTS
        there = slot < filled[whole.units][:, None]
        np.testing.assert_array_equal(part.mask, there)
        # Two slots of every task are drawn; a row holds a null if one is empty.
        np.testing.assert_array_equal(part.holds_null, ~there.all(axis=1))
        assert not np.any(whole.holds_null)


def test_a_contribution_is_zero_if_any_drawn_slot_is_empty():
    features = np.arange(1.0, sum(FILLED) + 1, dtype=np.float32)
    data = ExampleTable(features[:, None], features, population(FILLED))
    for draw in draws(sampler(), 50):
        (block,) = make_blocks(draw, data, block_size=8)
        number = len(draw.units)
        expected = np.where(draw.holds_null, 0.0, 1.0)
        np.testing.assert_array_equal(block.unit_mask[:number], expected)
        assert not np.any(block.unit_mask[number:])
        assert not np.any(block.slot_mask[block.unit_mask == 0])
        assert not np.any(block.inputs[block.unit_mask == 0])


def test_null_units_of_the_protected_level_itself():
    task = jde.WithoutReplacement("task", size=6, population=6)
    example = jde.WithoutReplacement("example", size=2, population=2)
    drawn_from = EpisodeSampler(
        jde.MultistageSampling(task, example),
        population([3, 2, 4]),
        clip_unit="task",
        slots_of="task",
    )
    assert drawn_from.expected_units == drawn_from.max_units == 6
    for draw in draws(drawn_from, 20):
        assert sorted(draw.units) == [-1, -1, -1, 0, 1, 2]
        np.testing.assert_array_equal(draw.holds_null, draw.units < 0)
        assert np.all(draw.mask.sum(axis=1) == np.where(draw.holds_null, 0, 2))


@pytest.mark.parametrize("unit", ["class", "example"])
def test_grouped_classes(unit):
    design = jde.GroupedClasses(
        num_classes=7 if unit == "class" else 5,
        ways=2,
        episodes=jde.Poisson("episode", sampling_probability=1.0),
        examples=jde.WithoutReplacement("example", size=2, population=3),
    )
    sizes = [3, 3, 3, 4, 3] if unit == "class" else [3, 1, 3, 2, 3]
    drawn_from = EpisodeSampler(
        design,
        population(sizes, ("class", "example")),
        clip_unit="episode",
        slots_of=unit,
    )
    seen = set()
    for draw in draws(drawn_from, 60):
        complete = draw.mask.reshape(len(draw.mask), -1).all(axis=1)
        np.testing.assert_array_equal(draw.holds_null, ~complete)
        seen |= set(complete.tolist())
    assert seen == {True, False}


def test_invalid_slots_are_refused():
    with pytest.raises(ValueError, match="at least the number of children"):
        sampler([6, 2])
    levels = jde.MultistageSampling(
        TASK, jde.Poisson("example", sampling_probability=0.5)
    )
    with pytest.raises(ValueError, match="number of slots"):
        EpisodeSampler(levels, population(FILLED), clip_unit="task", slots_of="example")
    with pytest.raises(ValueError, match="slots_of"):
        sampler(slots_of="pupil")


# --- Complete contributions ---

SIZES = [1, 2, 4, 4, 5]
EPISODES, REGRESSION = (Needs.of(1, is_regression=r) for r in (False, True))


def examples(size=2, population=None):
    return jde.WithoutReplacement("example", size=size, population=population)


def grouped(population=None, num_classes=5):
    return jde.GroupedClasses(
        num_classes=num_classes,
        ways=2,
        examples=examples(population=population),
        episodes=jde.Poisson("episode", sampling_probability=0.5),
    )


def by_enumeration(slots):
    """Probability that two drawn classes have two filled slots each."""
    chance = [math.comb(size, 2) / math.comb(slots or size, 2) for size in SIZES[1:]]
    pairs = list(itertools.combinations([0.0, *chance], 2))
    return math.fsum(a * b for a, b in pairs) / len(pairs)


def tree(below):
    return jde.MultistageSampling(jde.Poisson("class", sampling_probability=0.5), below)


TWO_OF_SIX = jde.MultistageSampling(
    jde.WithoutReplacement("class", size=3), examples(2, 6)
)
INDEPENDENT = jde.IndependentEpisodes(TWO_OF_SIX, num_episodes=5)
POISSON_EXAMPLES = jde.Poisson("example", sampling_probability=0.4, population=4)
# design, sizes, clip unit, level of the slots, requirements, complete share
SHARES = {
    "grouped": (grouped(), SIZES, "episode", None, EPISODES, by_enumeration(None)),
    "independent": (INDEPENDENT, [6] * 3, "episode", "example", EPISODES, 1.0),
    "examples": (
        *(tree(POISSON_EXAMPLES), [4, 2, 0], "example", "example"),
        *(Needs(), 6 / 12),
    ),
    "slots": (grouped(6), SIZES, "episode", "example", EPISODES, by_enumeration(6)),
    # Four of the eight places hold a class with two examples.
    "slots of classes": (
        *(grouped(num_classes=8), SIZES, "episode", "class"),
        *(EPISODES, (4 * 3) / (8 * 7)),
    ),
    "wasted": (grouped(), [1] * 5, "episode", None, EPISODES, 0.0),
}


def units_of(sampling, sizes, clip_unit, slots_of, needs, **others):
    sampler = EpisodeSampler(
        sampling,
        population(sizes, ("class",)),
        clip_unit=clip_unit,
        population_is_accounted=True,
        privacy_unit="class" if slots_of == "class" else None,
        slots_of=slots_of,
        **others,
    )
    return complete_units(sampler, needs)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_complete_contributions_equal_closed_forms(name):
    """Within 6 standard deviations of the simulated clip units."""
    *asked, share = SHARES[name]
    found = units_of(*asked)
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
    assert complete_in_draw(mask[:, 0], None, REGRESSION, 1) == 4
    assert complete_in_draw(mask[:, 0, 0], None, Needs(), 1) == 5
    assert complete_in_draw(mask[:0], None, EPISODES, 2) == 0


@pytest.mark.parametrize("among_slots", [False, True])
def test_complete_blocks_of_one_person(among_slots):
    """Each of five people has two examples of all of four classes, one has nothing."""
    design = jde.PeopleBlocks(
        num_people=6,
        people_per_block=1,
        episodes=jde.Poisson("episode", sampling_probability=1.0),
        sampling=jde.MultistageSampling(
            jde.WithoutReplacement("class", size=2),
            examples(2, 3 if among_slots else None),
        ),
    )
    found = units_of(
        *(design, [10] * 4, "episode", "example" if among_slots else None, EPISODES),
        owners=Owners.from_ids(np.tile(np.arange(5), 8), name="owners"),
        among_slots=among_slots,
    )
    share = 5 / 6 * (1 / 9 if among_slots else 1)
    assert abs(found.share - share) < 6 * math.sqrt(share * (1 - share) / 200)

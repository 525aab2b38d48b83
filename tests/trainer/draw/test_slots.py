"""Slots under zero_out: drawn whether filled or not; a null zeroes the whole row."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw import EpisodeSampler, step_generator
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


def test_a_draw_with_a_null_is_marked():
    for draw in draws(sampler(), 200):
        # Two slots of every task are drawn; a row holds a null if one is empty.
        np.testing.assert_array_equal(draw.holds_null, draw.mask.sum(axis=1) < 2)
        of_task = np.repeat(np.arange(4), FILLED)
        owner = of_task[draw.examples]
        assert np.all((owner == draw.units[:, None]) | ~draw.mask)


def test_the_draw_does_not_depend_on_which_slots_are_filled():
    """One generator draws the same slots, filled or not."""
    full, some = sampler([SLOTS] * 4), sampler()
    assert (
        (full.expected_units, full.slot_shape)
        == (2.0, (2,))
        == (
            some.expected_units,
            some.slot_shape,
        )
    )
    filled = np.array(FILLED)
    for whole, part in zip(draws(full, 200), draws(some, 200), strict=True):
        np.testing.assert_array_equal(whole.units, part.units)
        slot = whole.examples % SLOTS
        there = slot < filled[whole.units][:, None]
        np.testing.assert_array_equal(part.mask, there)
        assert not np.any(whole.holds_null)


def test_frequencies_of_nulls():
    """A task with 2 of 5 slots filled holds no null with probability 1/10."""
    rows = [draw.holds_null[draw.units == 0] for draw in draws(sampler(), 2_000)]
    rows = np.concatenate(rows)
    assert 860 < len(rows) < 1_140
    # Within 3.7 standard deviations; 6.3 above.
    assert np.mean(~rows) == pytest.approx(0.1, abs=0.035)


def table(sizes):
    number = int(np.sum(sizes))
    features = np.arange(1.0, number + 1, dtype=np.float32)[:, None]
    return ExampleTable(features, features[:, 0], population(sizes))


def test_a_contribution_is_zero_if_any_drawn_slot_is_empty():
    data = table(FILLED)
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


def test_no_data_at_all():
    for draw in draws(sampler([0, 0, 0, 0]), 5):
        assert np.all(draw.holds_null) and not np.any(draw.mask)

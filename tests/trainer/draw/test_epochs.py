"""Epochs: each unit once, uniformly, independently; determined by the entropy.

Statistical checks are exact binomial tests with Bonferroni's correction: a correct
sampler fails one with probability at most 1e-6 (seeds are fixed).
"""

import functools
import itertools

import numpy as np
import pytest

from jaxdp_episodic import (
    GaussianStep,
    GroupedClasses,
    MultistageSampling,
    Poisson,
    Population,
    RandomAllocation,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.designs import block_lengths
from jaxdp_episodic.accountant.describe.step import steps_owed
from jaxdp_episodic.trainer.draw import EpisodeSampler, step_generator
from jaxdp_episodic.trainer.draw.generators import Keys, generator
from oracles.draws import false_alarm, outcome_tally

FALSE_ALARMS = 1e-6


def units(scheme, number, **settings):
    tree = Population.from_sizes(number, level_names=("unit",))
    return EpisodeSampler(scheme, tree, clip_unit="unit", **settings)


def bins(steps, times=1, name="unit"):
    return RandomAllocation(name, steps_per_epoch=steps, times=times)


def batches(steps, name="unit"):
    return ShuffledEpochs(name, steps_per_epoch=steps)


def grouped(episodes, num_classes=23, ways=5, **settings):
    design = GroupedClasses(
        num_classes=num_classes,
        ways=ways,
        episodes=episodes,
        examples=WithoutReplacement("example", size=2),
    )
    sizes = settings.pop("sizes", [4] * num_classes)
    tree = Population.from_sizes(sizes, level_names=("class", "example"))
    return EpisodeSampler(design, tree, clip_unit="episode", **settings)


def generator_of_epoch(entropy, epoch):
    return generator(Keys(entropy).new("epoch", epoch))


def drawn_step(sampler, entropy, step):
    """The draw of a step, counted from 1, of a seeded run."""
    epoch, place = divmod(step - 1, sampler.steps_per_epoch)
    members = sampler.begin_epoch(generator_of_epoch(entropy, epoch))[place]
    return sampler.draw(step_generator(entropy, step), members)


def places(sampler, number, entropy, epoch=0):
    """(number, times) the steps of an epoch that include each unit."""
    steps = sampler.begin_epoch(generator_of_epoch(entropy, epoch))
    found = [(unit, place) for place, s in enumerate(steps) for unit in s.tolist()]
    return np.array([place for _, place in sorted(found)]).reshape(number, -1)


# --- Every unit ---


@pytest.mark.parametrize(("steps", "times"), [(1, 1), (7, 3), (6, 6), (60, 2)])
def test_every_unit_takes_part_once_in_every_block_of_every_epoch(steps, times):
    sampler = units(bins(steps, times), 20)
    lengths = block_lengths(bins(steps, times))
    assert lengths.sum() == steps and len(lengths) == times
    assert np.all(np.diff(lengths) <= 0) and np.ptp(lengths) <= 1
    ends = np.cumsum(lengths)
    for epoch in range(3):
        drawn = [
            drawn_step(sampler, 9, epoch * steps + s).units for s in range(1, steps + 1)
        ]
        for start, end in zip(ends - lengths, ends, strict=True):
            together = np.concatenate(drawn[start:end])
            np.testing.assert_array_equal(np.sort(together), range(20))
    assert sampler.expected_units == 20 * times / steps
    assert sampler.max_units == 20


@pytest.mark.parametrize(("number", "steps"), [(20, 6), (3, 5), (0, 2)])
def test_shuffled_batches_are_cut_so_that_one_unit_changes_one_size(number, steps):
    sampler = units(batches(steps), number)
    drawn = [drawn_step(sampler, 1, step).units for step in range(1, steps + 1)]
    sizes = np.array([len(batch) for batch in drawn])
    np.testing.assert_array_equal(np.sort(np.concatenate(drawn)), range(number))
    assert np.all(np.diff(sizes) <= 0) and np.ptp(sizes) <= 1
    more = units(batches(steps), number + 1)
    bigger = np.array([len(drawn_step(more, 1, s).units) for s in range(1, steps + 1)])
    assert np.abs(bigger - sizes).sum() == 1
    assert sampler.max_units == max(sizes) and sampler.expected_units == number / steps


def test_levels_below_are_drawn_afresh_in_every_step():
    sampling = MultistageSampling(bins(2, times=2), WithoutReplacement("x", size=2))
    tree = Population.from_sizes([30] * 5, level_names=("unit", "x"))
    sampler = EpisodeSampler(sampling, tree, clip_unit="unit")
    first, second = (drawn_step(sampler, 8, step) for step in (1, 2))
    assert sampler.slot_shape == (2,)
    for draw in (first, second):
        np.testing.assert_array_equal(np.sort(draw.units), range(5))
        assert np.all(draw.examples // 30 == draw.units[:, None])
    order = np.argsort(first.units), np.argsort(second.units)
    assert not np.array_equal(first.examples[order[0]], second.examples[order[1]])


# --- Distributions ---


def rejected(outcomes, all_outcomes):
    """False-alarm rate at which equal probability of all outcomes is rejected."""
    dist = {outcome: 1 / len(all_outcomes) for outcome in all_outcomes}
    return false_alarm(outcome_tally(outcomes, dist))


def test_blocks_are_independent():
    sampler = units(bins(5, times=2), 2)
    found = [tuple(places(sampler, 2, seed).ravel().tolist()) for seed in range(1_500)]
    one = list(itertools.product(range(3), (3, 4)))
    every = [(*a, *b) for a, b in itertools.product(one, one)]
    assert rejected(found, every) > FALSE_ALARMS


def test_shuffled_batches_are_equally_likely():
    sampler = units(batches(3), 4)
    found = [tuple(places(sampler, 4, e).ravel().tolist()) for e in range(1_000)]
    every = sorted(set(itertools.permutations((0, 0, 1, 2))))
    assert rejected(found, every) > FALSE_ALARMS
    # Batches of fixed size are not independent.
    assert rejected(found, list(itertools.product(range(3), repeat=4))) < FALSE_ALARMS


def test_partitions_and_steps_of_episodes_are_independent():
    """Five classes in pairs, two steps: fifteen partitions, four placements."""
    sampler = grouped(bins(2, name="episode"), num_classes=5, ways=2)
    assert (sampler.expected_units, sampler.slot_shape) == (1, (2, 2))
    found = []
    for entropy in range(1_500):
        steps = sampler.begin_epoch(generator_of_epoch(entropy, 0))
        found.append(
            frozenset(
                (frozenset(group.tolist()), place)
                for place, groups in enumerate(steps)
                for group in groups
            )
        )
    four = itertools.combinations(itertools.combinations(range(5), 2), 2)
    every = [
        frozenset([(frozenset(a), i), (frozenset(b), j)])
        for a, b in four
        if not set(a) & set(b)
        for i, j in itertools.product(range(2), repeat=2)
    ]
    assert len(every) == 60
    assert rejected(found, every) > FALSE_ALARMS


# --- Functions of the entropy ---


def test_a_steps_draw_does_not_depend_on_order_or_sampler():
    sampler, other = units(bins(4), 30), units(bins(4), 30)
    forwards = [drawn_step(sampler, 2**40 + 1, step) for step in range(1, 13)]
    for step in (12, 3, 7, 1, 11):
        for a, b in zip(
            forwards[step - 1], drawn_step(other, 2**40 + 1, step), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(drawn_step(sampler, 3, 1).units, forwards[0].units)


def test_no_epoch_shares_a_stream_with_a_step():
    made = [generator_of_epoch(5, n) for n in range(4)]
    made += [step_generator(5, n) for n in (0, 1, 2, 3, 2**32, 2**32 + 1)]
    assert len({int(generator.integers(0, 2**62)) for generator in made}) == 10


# --- Slots ---


def test_an_episode_with_a_null_class_keeps_its_step_and_is_marked():
    sizes = [4] * 7  # nine slots for classes
    sampler = grouped(
        bins(2, name="episode"), num_classes=9, ways=3, sizes=sizes, slots_of="class"
    )
    drawn = [drawn_step(sampler, 6, step) for step in (1, 2)]
    null = np.concatenate([np.asarray(d.holds_null) for d in drawn])
    mask = np.concatenate([d.mask for d in drawn])
    assert len(null) == 3 and 1 <= null.sum() <= 2
    np.testing.assert_array_equal(null, ~mask.all(axis=(1, 2)))


# --- Refusals ---


def test_bad_input():
    step, members = step_generator(0, 1), np.zeros(1, np.int64)
    with pytest.raises(AssertionError):
        units(bins(3), 6).draw(step)
    with pytest.raises(AssertionError):
        units(Poisson("unit", sampling_probability=0.5), 6).draw(step, members)
    with pytest.raises(ValueError, match="steps_per_epoch of level"):
        units(bins([3, 4]), 6)


def test_shuffled_epochs_do_not_protect_slots():
    with pytest.raises(NotImplementedError, match="'unit' .* with ShuffledEpochs"):
        units(batches(3), 6, slots_of="unit")


# --- Charges ---


def test_an_unplanned_end_within_an_epoch_charges_all_of_it():
    of = functools.partial(GaussianStep, noise_multiplier=1.0)
    taken = np.arange(0, 33)
    owed = steps_owed(of(bins(10)), taken, 25)
    np.testing.assert_array_equal(owed[:11], [0] + [10] * 10)
    np.testing.assert_array_equal(owed[11:21], 20)
    np.testing.assert_array_equal(owed[21:26], 25)  # not beyond the plan
    np.testing.assert_array_equal(owed[26:], [30] * 5 + [40] * 2)
    plain = of(Poisson("unit", sampling_probability=0.5))
    np.testing.assert_array_equal(steps_owed(plain, taken, 25), taken)

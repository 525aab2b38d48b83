"""The rows of a draw, one per clip unit: of steps, of epochs, of blocks of people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.special import bdtrc

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    EpochScheme,
    GroupedClasses,
    PeopleBlocks,
    Poisson,
    RandomAllocation,
    Scheme,
    WithoutReplacement,
    block_lengths,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.draw.tree_draw import (
    NULL,
    Level,
    check_levels,
    draw_units,
    expected_total,
    largest_total,
    make_level,
)

Epoch = list[np.ndarray]
"""For each step of an epoch, (J, ...) units to draw below, in random order; secret."""


@dataclass(frozen=True)
class Rows:
    """How rows are drawn: (J, *inner_shape) units, below which examples are drawn."""

    expected: float  # mean number of rows
    largest: int  # largest possible number of rows
    # Returns the rows of a step; those of an `Epoch` if there are epochs.
    draw: Callable[[np.random.Generator], Any]
    levels: Sequence[Level] = ()  # drawn to form the rows
    # Axes that the design forms, before those of the levels drawn below.
    inner_shape: tuple[int, ...] = ()
    are_units: bool = False  # whether each row is one unit, the clip unit
    steps_per_epoch: int | None = None  # None: every step draws independently


def tree_rows(levels: Sequence[Level]) -> Rows:
    """Rows are the drawn units of the last level; without levels, the step once."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        return draw_units(levels, generator)

    sizes = expected_total(levels), largest_total(levels)
    return Rows(*sizes, draw, levels, are_units=bool(levels))


def fixed_rows(number: int) -> Rows:
    """Rows are a public number of episodes, each drawn from the root."""
    return Rows(float(number), number, lambda generator: np.zeros(number, np.int64))


def class_rows(design: GroupedClasses, num_filled: int) -> Rows:
    """Rows are groups of ``ways`` drawn classes, each class in at most one group."""
    ways, scheme = int(np.asarray(design.ways)), design.classes
    pool = int(np.asarray(design.num_classes))
    assert scheme is not None
    levels = (make_level(scheme, np.array([pool])),)

    def draw(generator: np.random.Generator) -> np.ndarray:
        # In uniformly random order, so consecutive classes are a random group.
        drawn = draw_units(levels, generator)
        groups = drawn[: len(drawn) // ways * ways].reshape(-1, ways)
        return np.where(groups < num_filled, groups, NULL)

    most = largest_total(levels) // ways
    return Rows(_mean_groups(scheme, pool, ways), most, draw, levels, (ways,))


def episode_rows(
    scheme: Scheme,
    pool: int,  # possible episodes
    # Draws a new partition, (pool, width) units: a row for each possible episode.
    partition: Callable[[np.random.Generator], np.ndarray],
    width: int,  # classes, or people, per episode
) -> Rows:
    """Rows are the drawn episodes of a new partition, by steps or by epochs."""
    level = make_level(scheme, np.array([pool]))
    if isinstance(scheme, EpochScheme):
        return epoch_rows(scheme, level, partition, (width,))

    def draw(generator: np.random.Generator) -> np.ndarray:
        drawn = draw_units((level,), generator)
        return partition(generator)[drawn]

    sizes = expected_total((level,)), largest_total((level,))
    return Rows(*sizes, draw, (level,), (width,))


def epoch_rows(
    scheme: EpochScheme,  # assigns units to steps
    level: Level,  # the units; its scheme is not used
    partition: Callable[[np.random.Generator], np.ndarray] | None = None,
    inner_shape: tuple[int, ...] = (),
) -> Rows:
    """Rows are units of the first level, or episodes of a partition, by epochs."""
    number, lengths = int(level.counts.sum()), block_lengths(scheme)
    steps, is_cut = int(lengths.sum()), not isinstance(scheme, RandomAllocation)

    def draw(generator: np.random.Generator) -> Epoch:
        assign = partial(shuffled, number, steps)
        if isinstance(scheme, RandomAllocation):
            assign = partial(allocated, number, lengths)
        epoch = assign(generator)
        if partition is None:
            return epoch
        groups = partition(generator)
        return [groups[rows] for rows in epoch]

    sizes = number * len(lengths) / steps, -(-number // steps) if is_cut else number
    by_unit = partition is None
    return Rows(*sizes, draw, (level,), inner_shape, by_unit, steps)


def _mean_groups(scheme: Scheme, pool: int, ways: int) -> float:
    """Returns the mean of ``floor(K / ways)``, K the number of drawn classes."""
    if isinstance(scheme, WithoutReplacement):
        return float(min(int(np.asarray(scheme.size)), pool) // ways)
    assert isinstance(scheme, Poisson)  # epoch schemes draw episodes
    # It is the sum of the chances of at least ``ways``, 2 ``ways``, ... classes.
    rate = float(np.asarray(scheme.sampling_probability))
    number = np.arange(ways, pool + 1, ways)
    return float(np.sum(bdtrc(number - 1, pool, rate)))


def allocated(
    number: int, block_lengths: np.ndarray, generator: np.random.Generator
) -> Epoch:
    """Assigns each of ``number`` units an independent uniform step of every block."""
    epoch = []
    for length in block_lengths.tolist():
        order = generator.permutation(number)
        steps = generator.integers(0, length, number)
        ends = np.cumsum(np.bincount(steps, minlength=length))
        epoch += np.split(order[np.argsort(steps, kind="stable")], ends[:-1])
    return epoch


def shuffled(number: int, steps: int, generator: np.random.Generator) -> Epoch:
    """Cuts a random order into batches; the first ``number % steps`` have one more."""
    # The accounting relies on this: adding or removing a unit changes one batch size.
    sizes = np.full(steps, number // steps) + (np.arange(steps) < number % steps)
    return np.split(generator.permutation(number), np.cumsum(sizes)[:-1])


def random_groups(
    design: GroupedClasses, num_filled: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns a new random partition of all classes, (G, ways); -1 for null classes."""
    ways, number = int(np.asarray(design.ways)), int(design.num_possible_episodes)
    order = generator.permutation(int(np.asarray(design.num_classes)))
    groups = order[: number * ways].reshape(-1, ways)
    return np.where(groups < num_filled, groups, NULL)


# --- Blocks of people: first the blocks are drawn, then their examples ---


def random_blocks(
    design: PeopleBlocks, num_known: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns (episodes, people per block) random indices of people; -1: no data."""
    size = int(np.asarray(design.people_per_block))
    order = generator.permutation(int(np.asarray(design.num_people)))
    blocks = order[: len(order) // size * size].reshape(-1, size)
    blocks = np.where(blocks < num_known, blocks, NULL)
    return np.repeat(blocks, int(np.asarray(design.episodes_per_block)), axis=0)


class BlockExamples:
    """Draws the classes and examples of an episode from its block."""

    def __init__(
        self,
        design: PeopleBlocks,
        population: Population,
        owners: Owners | None,
        # Whether to draw among a public number of slots, filled or not. If not, among
        # the classes with enough examples in the block.
        among_slots: bool,
        leaves_null: bool,  # whether an episode with an unfilled slot contributes zero
    ) -> None:
        if owners is None:
            raise ValueError("owners of the examples must be given for PeopleBlocks")
        if leaves_null and not among_slots:
            raise ValueError(
                "among_slots must be True under zero_out: which classes have enough "
                "examples in a block depends on the people in the data"
            )
        of_classes, of_examples = levels = _levels(design)
        check_levels([level.name for level in levels], population)
        listed = int(np.asarray(design.num_people))
        if len(owners.names) > listed:
            raise ValueError(
                "num_people must be at least the number of people in the data, "
                f"{len(owners.names)}, got {listed}"
            )
        sizes = population.children_counts[1]
        number = len(sizes)
        ways = int(np.asarray(of_classes.size))
        if ways > number:
            raise ValueError(
                f"level {of_classes.name!r}: size must be at most the number of "
                f"classes in the data, {number}, got {ways}"
            )
        # The class of each example, and the examples of each person.
        self._class_of = class_of = np.repeat(np.arange(number), sizes)
        order = np.argsort(owners.codes, kind="stable")
        ends = np.cumsum(np.bincount(owners.codes, minlength=len(owners.names)))
        self._own = np.split(order, ends[:-1])
        self._num_classes, self._leaves_null = number, leaves_null
        # Axes of an episode: its classes, and the examples of each.
        self.widths = ways, int(np.asarray(of_examples.size))
        self.slots = None
        if among_slots:
            stated = of_classes.population
            if stated is not None and int(np.asarray(stated)) != number:
                raise ValueError(
                    f"level {of_classes.name!r}: population must be the number of "
                    f"classes in the data, {number}, got {stated!r}"
                )
            counts = np.zeros((len(owners.names), number), np.int64)
            np.add.at(counts, (owners.codes, class_of), 1)
            self.slots = _checked_slots(of_examples, counts, design, owners)

    def fill(
        self, people: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Does what `fill_slots` does, for (J, people per block) indices of people."""
        ways, size = self.widths
        shape = len(people), ways, size
        examples, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for episode, block in enumerate(people):
            theirs = [self._own[person] for person in block[block >= 0]]
            there = np.concatenate([self._class_of[:0], *theirs])
            class_of, classes = self._class_of[there], np.arange(self._num_classes)
            if self.slots is None:
                counts = np.bincount(class_of, minlength=self._num_classes)
                classes = np.flatnonzero(counts >= size)
            for way, one in enumerate(generator.permutation(classes)[:ways]):
                filled = there[class_of == one]
                number = len(filled) if self.slots is None else self.slots
                slots = generator.choice(number, size, replace=False)
                drawn = filled[slots[slots < len(filled)]]
                examples[episode, way, : len(drawn)] = drawn
                mask[episode, way, : len(drawn)] = True
        is_null = np.logical_and(~mask.all(axis=(1, 2)), self._leaves_null)
        return examples, mask, is_null


def _levels(design: PeopleBlocks) -> tuple[WithoutReplacement, WithoutReplacement]:
    """Returns the schemes of classes and examples in a block; raises for others."""
    levels = () if design.sampling is None else design.sampling.levels
    drawn = [level for level in levels if isinstance(level, WithoutReplacement)]
    if len(levels) != 2 or len(drawn) != 2:
        raise NotImplementedError(
            "the sampler of PeopleBlocks supports only WithoutReplacement of "
            "classes and then of examples (others can be accounted); got "
            f"{design.sampling!r}"
        )
    return drawn[0], drawn[1]


def _checked_slots(
    scheme: WithoutReplacement, counts: np.ndarray, design: PeopleBlocks, owners: Owners
) -> int:
    """Returns the slots for a class in a block; they must hold any block's examples."""
    size = int(np.asarray(design.people_per_block))
    largest = -np.sort(-counts, axis=0)[:size].sum(axis=0)
    most = int(largest.max(initial=0))
    if scheme.population is None:
        raise ValueError(
            f"level {scheme.name!r}: population (the public number of slots for "
            "examples of one class in a block) must be given, got None"
        )
    slots = int(np.asarray(scheme.population))
    if slots < most:
        raise ValueError(
            f"level {scheme.name!r}: population must be at least the largest number of "
            f"examples of one class that {size} of the {len(owners.names)} people have "
            f"together, {most}, got {slots}"
        )
    _validation.whole_number(
        "size", int(np.asarray(scheme.size)), minimum=1, maximum=slots
    )
    return slots

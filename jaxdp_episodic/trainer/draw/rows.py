"""The rows of a draw, one per clip unit: of single steps, and of epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.special import bdtrc

from jaxdp_episodic.accountant.describe.designs import (
    EpochScheme,
    GroupedClasses,
    Poisson,
    RandomAllocation,
    Scheme,
    WithoutReplacement,
    block_lengths,
)
from jaxdp_episodic.trainer.draw.tree_draw import (
    NULL,
    Level,
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

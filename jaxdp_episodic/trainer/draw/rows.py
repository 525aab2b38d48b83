"""The rows of a draw, one per clip unit: of single steps, and of epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.designs import GroupedClasses, block_lengths
from jaxdp_episodic.accountant.describe.schemes import (
    EpochScheme,
    Poisson,
    RandomAllocation,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.trainer.draw.tree_draw import (
    NO_UNIT,
    NULL,
    Level,
    draw_units,
    expected_total,
    largest_total,
    make_level,
)

Epoch = list[np.ndarray]
"""For each step of an epoch, (J, ...) units to draw below, in random order; secret."""


class TreeRows:
    """Rows are the drawn units of one level; without levels, the whole step once."""

    def __init__(
        self, levels: Sequence[Level], inner_shape: tuple[int, ...] = ()
    ) -> None:
        # Axes that the design forms, before those of the levels drawn below.
        self.inner_shape = inner_shape
        self.levels = levels  # drawn to form the rows
        # Mean and largest possible number of rows.
        self.expected, self.largest = expected_total(levels), largest_total(levels)

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns (J, *inner_shape) units to draw below, and (J,) clip units."""
        units = draw_units(self.levels, generator)
        return units, units.copy() if self.levels else np.full(1, NO_UNIT)


class FixedRows:
    """Rows are a public number of episodes, each drawn from the root."""

    def __init__(self, number: int) -> None:
        self.inner_shape: tuple[int, ...] = ()
        self.levels: Sequence[Level] = ()
        self.expected, self.largest = float(number), number

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns the root once per episode."""
        return np.zeros(self.largest, np.int64), np.full(self.largest, NO_UNIT)


class GroupedRows(TreeRows):
    """Rows are groups of ``ways`` classes, each class in at most one group."""

    def __init__(self, design: GroupedClasses, num_filled: int) -> None:
        self._design, self._num_filled = design, num_filled
        ways = int(np.asarray(design.ways))
        self._by_episode = design.episodes is not None
        scheme: Any = design.episodes if self._by_episode else design.classes
        pool = design.num_possible_episodes if self._by_episode else design.num_classes
        pool = int(np.asarray(pool))
        super().__init__((make_level(scheme, np.array([pool])),), (ways,))
        if not self._by_episode:
            self.expected = _mean_groups(scheme, pool, ways)
            self.largest //= ways

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns the (J, ways) classes of the drawn groups."""
        ways = self.inner_shape[0]
        drawn = draw_units(self.levels, generator)
        if self._by_episode:
            groups = random_groups(self._design, self._num_filled, generator)[drawn]
        else:  # in uniformly random order, so consecutive classes are a random group
            groups = drawn[: len(drawn) // ways * ways].reshape(-1, ways)
            groups = np.where(groups < self._num_filled, groups, NULL)
        return groups, np.full(len(groups), NO_UNIT)


def _mean_groups(scheme: Scheme, pool: int, ways: int) -> float:
    """Returns the mean of ``floor(K / ways)``, K the number of drawn classes."""
    if isinstance(scheme, WithoutReplacement):
        return float(min(int(np.asarray(scheme.size)), pool) // ways)
    assert isinstance(scheme, Poisson)  # epoch schemes use `EpochRows`
    rate = float(np.asarray(scheme.sampling_probability))
    if rate in (0.0, 1.0):
        return float(int(pool * rate) // ways)
    # Binomial probabilities up to a factor, within 40 standard deviations of the mean.
    reach = 40.0 * math.sqrt(pool * rate * (1.0 - rate)) + 40.0
    low = max(0, math.floor(pool * rate - reach))
    high = min(pool, math.ceil(pool * rate + reach))
    number = np.arange(low, high + 1)
    ratios = (pool - number[:-1]) / (number[1:]) * (rate / (1.0 - rate))
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    weights = np.exp(logs - logs.max())
    return float(np.sum(weights * (number // ways)) / np.sum(weights))


class EpochRows:
    """Rows are units of the first level, or episodes of a partition, by epochs."""

    def __init__(
        self,
        scheme: EpochScheme,  # assigns units to steps
        level: Level,  # the units; its scheme is not used
        # Draws a new partition, a row for each episode; None: the units are the rows.
        partition: Callable[[np.random.Generator], np.ndarray] | None = None,
        width: int = 0,  # classes, or people, per episode
    ) -> None:
        self._scheme, self._partition = scheme, partition
        self._number = int(level.counts.sum())
        lengths = block_lengths(scheme)
        self.inner_shape: tuple[int, ...] = () if partition is None else (width,)
        self.levels = (level,)
        steps = self.steps_per_epoch = int(lengths.sum())
        self.expected = self._number * len(lengths) / steps
        is_cut = not isinstance(scheme, RandomAllocation)
        self.largest = -(-self._number // steps) if is_cut else self._number

    def begin(self, generator: np.random.Generator) -> Epoch:
        """Returns a newly drawn epoch."""
        if isinstance(self._scheme, RandomAllocation):
            epoch = allocated(self._number, block_lengths(self._scheme), generator)
        else:
            epoch = shuffled(self._number, self.steps_per_epoch, generator)
        if self._partition is None:
            return epoch
        groups = self._partition(generator)
        return [groups[rows] for rows in epoch]

    def draw(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of a step, and (J,) clip units."""
        by_unit = self._partition is None
        return rows, rows.copy() if by_unit else np.full(len(rows), NO_UNIT)


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

"""Epochs: the units of each step, drawn at the start of the epoch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.describe.designs import GroupedClasses, block_lengths
from jaxdp_episodic.accountant.describe.schemes import EpochScheme, RandomAllocation
from jaxdp_episodic.trainer.draw.tree_draw import NO_UNIT, NULL, Level

Epoch = list[np.ndarray]
"""For each step of an epoch, (J, ...) units to draw below, in random order; secret."""


class EpochRows:
    """Rows are units of the first level, or episodes of a partition, by epochs.

    Args:
      scheme: assigns units to steps.
      level: the units; its scheme is not used.
      partition: draws a new partition, one row of ``width`` per unit of the level (the
        episodes); None: the units themselves are the rows.
      width: classes, or people, per episode.

    Attributes as in `TreeRows`.
    """

    def __init__(
        self,
        scheme: EpochScheme,
        level: Level,
        partition: Callable[[np.random.Generator], np.ndarray] | None = None,
        width: int = 0,
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
    """Cuts a random order into batches; the first ``number % steps`` have one more.

    The accounting relies on this: adding or removing a unit changes one batch size.
    """
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

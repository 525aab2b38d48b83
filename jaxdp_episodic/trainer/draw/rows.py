"""The rows of a draw: one per clip unit of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.designs import GroupedClasses
from jaxdp_episodic.accountant.describe.schemes import (
    Poisson,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.trainer.draw.epochs import random_groups
from jaxdp_episodic.trainer.draw.tree_draw import (
    NO_UNIT,
    NULL,
    Level,
    draw_units,
    expected_total,
    largest_total,
    make_level,
)


class TreeRows:
    """Rows are the drawn units of one level; without levels, the whole step once.

    All kinds of rows have these attributes and a method `draw`; `EpochRows` draws at
    the start of an epoch.

    Attributes:
      inner_shape: axes of a row that the design forms, before the axes of the levels
        drawn below.
      expected: mean number of rows.
      largest: largest possible number of rows.
      levels: levels drawn to form the rows.
    """

    def __init__(self, levels: Sequence[Level]) -> None:
        self.inner_shape: tuple[int, ...] = ()
        self.levels = levels
        self.expected = expected_total(levels)
        self.largest = largest_total(levels)

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


class GroupedRows:
    """Rows are groups of ``ways`` classes, each class in at most one group."""

    def __init__(self, design: GroupedClasses, num_filled: int) -> None:
        self._design, self._num_filled = design, num_filled
        ways = int(np.asarray(design.ways))
        self._by_episode = design.episodes is not None
        self.inner_shape: tuple[int, ...] = (ways,)
        scheme: Any = design.episodes if self._by_episode else design.classes
        pool = design.num_possible_episodes if self._by_episode else design.num_classes
        pool = int(np.asarray(pool))
        self.levels: Sequence[Level] = (make_level(scheme, np.array([pool])),)
        self.expected = expected_total(self.levels)
        self.largest = largest_total(self.levels)
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

"""The rows of a draw: its clip units, as far down as the design itself forms them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxdp_episodic.describe.designs import CLASS, GroupedClasses, IndependentEpisodes
from jaxdp_episodic.describe.population import Population
from jaxdp_episodic.describe.schemes import (
    RESERVED_LEVEL_NAME,
    MultistageSampling,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.draw import tree_draw
from jaxdp_episodic.draw.tree_draw import Level

NO_UNIT = -1  # in place of a unit: the row was formed in the draw


def rows_and_levels(
    sampling: MultistageSampling | GroupedClasses | IndependentEpisodes,
    population: Population,
    clip_unit: str,
    slots_of: str | None = None,
) -> tuple[Rows, Sequence[Level]]:
    """Returns what forms the rows of a draw, and the levels drawn below them.

    With the level that has slots, some of which may be null; see `EpisodeSampler`.

    Raises:
      ValueError: a population whose levels or number of classes do not fit.
    """
    if isinstance(sampling, MultistageSampling):
        levels = tree_draw.make_levels(sampling.levels, population, slots_of)
        clip_level = (RESERVED_LEVEL_NAME, *sampling.level_names).index(clip_unit)
        return TreeRows(levels[:clip_level]), levels[clip_level:]
    if isinstance(sampling, IndependentEpisodes):
        levels = tree_draw.make_levels(sampling.sampling.levels, population, slots_of)
        return FixedRows(int(np.asarray(sampling.num_episodes))), levels
    tree_draw.check_levels(sampling.level_names[1:], population)
    classes, slots = population.num_units(1), int(np.asarray(sampling.num_classes))
    if classes > slots or (classes < slots and slots_of != CLASS):
        raise ValueError(
            f"population must have num_classes={sampling.num_classes} classes, got "
            f"{classes}"
        )
    examples = tree_draw.make_level(
        sampling.examples, population.children_counts[1], slots_of
    )
    return GroupedRows(sampling, classes), (examples,)


class Rows(Protocol):
    """How the rows come about.

    Attributes:
      inner_shape: axes of a row that the design forms, before those of the levels
        that are drawn below.
      expected: mean number of rows.
      largest: largest possible number of rows.
      levels: those that are drawn to form the rows.
    """

    inner_shape: tuple[int, ...]
    expected: float
    largest: int
    levels: Sequence[Level]

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns (J, *inner_shape) units to draw below, and the (J,) clip units."""
        ...


class TreeRows:
    """The drawn units of one level of the tree; of no level: the step, once."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self.inner_shape: tuple[int, ...] = ()
        self.levels = levels
        self.expected = tree_draw.expected_total(levels)
        self.largest = tree_draw.largest_total(levels)

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns the drawn units, twice; the root once where no level is drawn."""
        units = tree_draw.draw_units(self.levels, generator)
        return units, units.copy() if self.levels else np.full(1, NO_UNIT)


class FixedRows:
    """A public number of episodes, each of which starts at the root."""

    def __init__(self, number: int) -> None:
        self.inner_shape: tuple[int, ...] = ()
        self.levels: Sequence[Level] = ()
        self.expected, self.largest = float(number), number

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns the root once for each episode."""
        return np.zeros(self.largest, np.int64), np.full(self.largest, NO_UNIT)


class GroupedRows:
    """Groups of ``ways`` classes, each class in at most one."""

    def __init__(self, design: GroupedClasses, num_filled: int) -> None:
        self._num_filled = num_filled
        ways = int(np.asarray(design.ways))
        self._num_classes = int(np.asarray(design.num_classes))
        self._num_groups = int(design.num_possible_episodes)
        self._by_episode = design.episodes is not None
        self.inner_shape: tuple[int, ...] = (ways,)
        scheme: Any = design.episodes if self._by_episode else design.classes
        pool = self._num_groups if self._by_episode else self._num_classes
        self.levels: Sequence[Level] = (tree_draw.make_level(scheme, np.array([pool])),)
        self.expected = tree_draw.expected_total(self.levels)
        self.largest = tree_draw.largest_total(self.levels)
        if not self._by_episode:
            self.expected = _mean_groups(scheme, pool, ways)
            self.largest //= ways

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns the (J, ways) classes of the drawn episodes."""
        ways = self.inner_shape[0]
        drawn = tree_draw.draw_units(self.levels, generator)
        if self._by_episode:
            partition = generator.permutation(self._num_classes)
            groups = partition[: self._num_groups * ways].reshape(-1, ways)[drawn]
        else:  # drawn in uniformly random order, so that neighbours are a random group
            groups = drawn[: len(drawn) // ways * ways].reshape(-1, ways)
        groups = np.where(groups < self._num_filled, groups, tree_draw.NULL)
        return groups, np.full(len(groups), NO_UNIT)


def _mean_groups(scheme: Scheme, pool: int, ways: int) -> float:
    """Mean of ``floor(K / ways)``, K the number of drawn classes."""
    if isinstance(scheme, WithoutReplacement):
        return float(min(int(np.asarray(scheme.size)), pool) // ways)
    rate = float(np.asarray(scheme.sampling_probability))
    if rate in (0.0, 1.0):
        return float(int(pool * rate) // ways)
    # The binomial weights up to a factor, from 40 standard deviations around the mean.
    reach = 40.0 * math.sqrt(pool * rate * (1.0 - rate)) + 40.0
    low = max(0, math.floor(pool * rate - reach))
    high = min(pool, math.ceil(pool * rate + reach))
    number = np.arange(low, high + 1)
    ratios = (pool - number[:-1]) / (number[1:]) * (rate / (1.0 - rate))
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    weights = np.exp(logs - logs.max())
    return float(np.sum(weights * (number // ways)) / np.sum(weights))

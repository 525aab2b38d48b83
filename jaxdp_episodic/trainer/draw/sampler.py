"""Draws episodes: exactly what the accounted sampling says, from the same object.

On the host, in NumPy: a draw decides shapes, and takes well under a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    GroupedClasses,
    IndependentEpisodes,
    Sampling,
    checked_sampling,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    RESERVED_LEVEL_NAME,
    MultistageSampling,
    Poisson,
    Scheme,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.units import check_clip_unit
from jaxdp_episodic.trainer.draw.epochs import Epoch, EpochRows, random_groups
from jaxdp_episodic.trainer.draw.tree_draw import (
    NO_UNIT,
    NULL,
    Level,
    check_levels,
    check_public_sizes,
    draw_units,
    expected_total,
    fill_slots,
    largest_total,
    make_level,
    make_levels,
)


def rows_and_levels(
    sampling: Sampling,
    population: Population,
    clip_unit: str,
    slots_of: str | None = None,
) -> tuple[TreeRows | FixedRows | GroupedRows | EpochRows, Sequence[Level]]:
    """Returns what forms the rows of a draw, and the levels drawn below them.

    With the level that has slots, some of which may be null; see `EpisodeSampler`.

    Raises:
      ValueError: a population whose levels or number of classes do not fit.
      NotImplementedError: slots in shuffled epochs, or blocks of people.
    """
    epochs = epoch_scheme(sampling)
    if isinstance(sampling, MultistageSampling):
        if epochs is not None:
            if isinstance(epochs, ShuffledEpochs) and epochs.name == slots_of:
                raise NotImplementedError(
                    f"zero_out at level {slots_of!r} with ShuffledEpochs is not drawn: "
                    "its batches would be cut by a public number of slots, which the "
                    "scheme does not have; covered: RandomAllocation, or add_remove"
                )
            # A null slot picks a step of its own and contributes nothing there: who is
            # there is drawn by the same distribution without it.
            slots_of = None if epochs.name == slots_of else slots_of
        levels = make_levels(sampling.levels, population, slots_of)
        if epochs is not None:
            return EpochRows(epochs, levels[0]), levels[1:]
        clip_level = (RESERVED_LEVEL_NAME, *sampling.level_names).index(clip_unit)
        return TreeRows(levels[:clip_level]), levels[clip_level:]
    if isinstance(sampling, IndependentEpisodes):
        levels = make_levels(sampling.sampling.levels, population, slots_of)
        return FixedRows(int(np.asarray(sampling.num_episodes))), levels
    if isinstance(sampling, PeopleBlocks):
        raise NotImplementedError(
            "PeopleBlocks is accounted, not drawn; drawn are MultistageSampling, "
            "GroupedClasses and IndependentEpisodes"
        )
    check_levels(sampling.level_names[1:], population)
    classes, slots = population.num_units(1), int(np.asarray(sampling.num_classes))
    if classes > slots or (classes < slots and slots_of != CLASS):
        raise ValueError(
            f"population must have num_classes={sampling.num_classes} classes, got "
            f"{classes}"
        )
    examples = make_level(sampling.examples, population.children_counts[1], slots_of)
    if epochs is not None:
        pool = make_level(epochs, np.array([int(sampling.num_possible_episodes)]))
        return EpochRows(epochs, pool, sampling, classes), (examples,)
    return GroupedRows(sampling, classes), (examples,)


class TreeRows:
    """The drawn units of one level of the tree; of no level: the step, once.

    All kinds of rows have these attributes and a method `draw`; those of epochs draw
    at the start of one.

    Attributes:
      inner_shape: axes of a row that the design forms, before those of the levels
        that are drawn below.
      expected: mean number of rows.
      largest: largest possible number of rows.
      levels: those that are drawn to form the rows.
    """

    def __init__(self, levels: Sequence[Level]) -> None:
        self.inner_shape: tuple[int, ...] = ()
        self.levels = levels
        self.expected = expected_total(levels)
        self.largest = largest_total(levels)

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns (J, *inner_shape) units to draw below, and the (J,) clip units.

        They are the same; the root once where no level is drawn.
        """
        units = draw_units(self.levels, generator)
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
        """Returns the (J, ways) classes of the drawn episodes."""
        ways = self.inner_shape[0]
        drawn = draw_units(self.levels, generator)
        if self._by_episode:
            groups = random_groups(self._design, self._num_filled, generator)[drawn]
        else:  # drawn in uniformly random order, so that neighbours are a random group
            groups = drawn[: len(drawn) // ways * ways].reshape(-1, ways)
            groups = np.where(groups < self._num_filled, groups, NULL)
        return groups, np.full(len(groups), NO_UNIT)


def _mean_groups(scheme: Scheme, pool: int, ways: int) -> float:
    """Mean of ``floor(K / ways)``, K the number of drawn classes."""
    if isinstance(scheme, WithoutReplacement):
        return float(min(int(np.asarray(scheme.size)), pool) // ways)
    assert isinstance(scheme, Poisson)  # epochs have rows of their own
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


class Draw(NamedTuple):
    """What one step drew; J clip units, 0 included.

    Attributes:
      examples: (J, *slot_shape) int64, places of the drawn examples (units of the last
        level) in the population's order; 0 where masked.
      mask: (J, *slot_shape) bool, True where a slot holds a drawn example. On the last
        axis those come first, in uniformly random order, so that the first ``shots``
        of them are a random support. On the axes before it the drawn units come
        first, also in random order; one that has nothing below it keeps its slot.
      units: (J,) int64, place of each clip unit among all units of its level; -1 where
        it was formed in the draw (an episode, the step), or is null.
      holds_null: (J,) bool, whether a null slot was drawn: such a clip unit has to
        contribute zero. None stands for none.
    """

    examples: np.ndarray
    mask: np.ndarray
    units: np.ndarray
    holds_null: np.ndarray | None = None


class EpisodeSampler:
    """Draws what a sampling spec describes from a real population.

    Nothing is capped, skipped or reused: every unit that a Poisson draw picks is
    returned, a unit that has become empty is still drawn (and contributes masked
    slots), one with fewer children than asked for gives all it has, and every call
    draws afresh.

    The real sizes of ``population`` rule the draw. If the spec has a ``population`` of
    its own, a public number, it must not contradict them, because the step may be
    accounted by it: without replacement it must not exceed the children of any unit
    (equal them, if said to be exact), under Poisson not fall below them.

    Args:
      sampling: the spec that is accounted, all its numeric fields scalars; a single
        scheme is wrapped.
      population: the tree that is drawn from, with as many levels as the spec has (for
        `GroupedClasses`: classes and examples).
      clip_unit: the level whose units become the rows of a draw, or "step": one row.
        The two episodic designs know "episode" only.
      population_is_accounted: True says that the step is given this `Population`, whose
        sizes then replace those of the spec, which need not fit.
      privacy_unit: the level of the protected unit. Sizes below it, and below the clip
        unit, change nothing that is accounted and need not fit. None: all must.
      slots_of: under zero_out the protected level. The ``population`` of its scheme (or
        the ``num_classes`` of grouped classes) is then the number of slots that every
        unit one level up has; all are drawn alike, filled or not, see
        `Draw.holds_null`.

    Attributes:
      sampling: as given, a single scheme wrapped.
      population: as given.
      clip_unit: as given.
      slot_shape: one axis for each level below the clip unit. Its length is ``size``
        without replacement, the largest number of children under Poisson, and
        ``ways`` for the classes of an episode.
      expected_units: mean number of clip units in a draw.
      max_units: largest possible number of clip units in a draw.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a spec with arrays, an unknown level, or a population that does not
        fit the spec.
      NotImplementedError: a clip unit for which the design has no theorem.
    """

    def __init__(
        self,
        sampling: Sampling | Scheme,
        population: Population,
        *,
        clip_unit: str,
        population_is_accounted: bool = False,
        privacy_unit: str | None = None,
        slots_of: str | None = None,
    ) -> None:
        sampling = checked_sampling(sampling)
        if not isinstance(population, Population):
            raise TypeError(
                f"population must be a Population, got {_validation.shown(population)}"
            )
        check_clip_unit(sampling, clip_unit)
        self.sampling, self.population = sampling, population
        self.clip_unit = clip_unit
        _refuse_arrays(sampling)
        if slots_of is not None:
            _validation.choice("slots_of", slots_of, sampling.level_names)
        self._rows, self._below = rows_and_levels(
            sampling, population, clip_unit, slots_of
        )
        names = (RESERVED_LEVEL_NAME, *sampling.level_names)
        unit = names[-1] if privacy_unit is None else privacy_unit
        _validation.choice("privacy_unit", unit, names[1:])
        counted = names[: max(names.index(unit), names.index(clip_unit)) + 1]
        if not population_is_accounted:
            for level in (*self._rows.levels, *self._below):
                if level.scheme.name in counted:
                    check_public_sizes(level)
        widths = tuple(level.width for level in self._below)
        self.slot_shape: tuple[int, ...] = (*self._rows.inner_shape, *widths)
        self.expected_units: float = self._rows.expected
        self.max_units: int = self._rows.largest

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None where every step draws anew."""
        rows = self._rows
        return rows.steps_per_epoch if isinstance(rows, EpochRows) else None

    def begin_epoch(self, generator: np.random.Generator) -> Epoch:
        """Returns who takes part in which step of an epoch, freshly drawn.

        Raises:
          TypeError: anything but a NumPy ``Generator``.
          ValueError: a sampling that draws anew in every step.
        """
        _check_generator(generator)
        if not isinstance(self._rows, EpochRows):
            raise ValueError("the sampling has no epochs: every step draws anew")
        return self._rows.begin(generator)

    def draw(
        self, generator: np.random.Generator, members: np.ndarray | None = None
    ) -> Draw:
        """Returns a fresh draw, a function of the generator's state (and ``members``).

        Args:
          generator: source of randomness.
          members: of a sampling by epochs, who takes part in this step: an entry of
            `begin_epoch`. Of others None.

        Raises:
          TypeError: anything but a NumPy ``Generator``.
          ValueError: members that are missing, or not drawn by epochs.
        """
        _check_generator(generator)
        if isinstance(self._rows, EpochRows):
            if members is None:
                raise ValueError(
                    "members must be given for a sampling by epochs: an entry of "
                    "begin_epoch"
                )
            starts, units = self._rows.draw(members)
        elif members is not None:
            raise ValueError("members must be None where every step draws anew")
        else:
            starts, units = self._rows.draw(generator)
        examples, mask, null = fill_slots(starts, self._below, generator)
        return Draw(examples, mask, units, null)


def _check_generator(generator: object) -> None:
    if not isinstance(generator, np.random.Generator):
        raise TypeError(
            f"generator must be a numpy.random.Generator, got {generator!r}"
        )


def _refuse_arrays(sampling: Sampling) -> None:
    """A spec with arrays is many settings, and a run has one."""
    numbers: dict[str, Any] = {}
    for name in ("num_classes", "ways", "num_episodes"):
        numbers[name] = getattr(sampling, name, 0)
    for scheme in sampling.schemes:
        for field, value in scheme.numbers.items():
            numbers[f"{field} of level {scheme.name!r}"] = value
    for name, value in numbers.items():
        if np.ndim(value):
            raise ValueError(
                f"{name} must be a single number, because a run has one setting, got "
                f"an array of shape {np.shape(value)}"
            )

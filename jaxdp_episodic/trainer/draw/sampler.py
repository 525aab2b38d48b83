"""Draws episodes exactly as the accounted sampling describes, from the same object.

Draws run on the host in NumPy, because they decide shapes; one takes well under a
millisecond.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    OWNED,
    RESERVED_LEVEL_NAME,
    IndependentEpisodes,
    MultistageSampling,
    PeopleBlocks,
    Poisson,
    Sampling,
    Scheme,
    ShuffledEpochs,
    checked_sampling,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.step import checked_clip_unit
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.draw import rows, tree_draw
from jaxdp_episodic.trainer.draw.complete import Needs, complete_in_draw
from jaxdp_episodic.trainer.draw.tree_draw import Level, make_levels


def rows_and_levels(
    sampling: Sampling,
    population: Population,
    clip_unit: str,
    slots_of: str | None = None,
    num_people: int = 0,
) -> tuple[rows.Rows, Sequence[Level]]:
    """Returns the rows of a draw, and the levels drawn below them."""
    if isinstance(sampling, MultistageSampling):
        epochs = epoch_scheme(sampling)
        if epochs is not None and epochs.name == slots_of:
            if isinstance(epochs, ShuffledEpochs):
                raise NotImplementedError(
                    f"zero_out at level {slots_of!r} is not supported with "
                    "ShuffledEpochs: its batch sizes would depend on a public number "
                    "of slots, which it does not have; use RandomAllocation, or "
                    "add_remove"
                )
            # A null slot takes a step of its own and contributes nothing there, so
            # leaving it out does not change the distribution of the others.
            slots_of = None
        levels = make_levels(sampling.levels, population, slots_of)
        if epochs is not None:
            return rows.epoch_rows(epochs, levels[0]), levels[1:]
        clip_level = (RESERVED_LEVEL_NAME, *sampling.level_names).index(clip_unit)
        return rows.tree_rows(levels[:clip_level]), levels[clip_level:]
    if isinstance(sampling, IndependentEpisodes):
        levels = make_levels(sampling.sampling.levels, population, slots_of)
        return rows.fixed_rows(int(np.asarray(sampling.num_episodes))), levels
    episodes: Any = sampling.episodes
    if isinstance(sampling, PeopleBlocks):
        width, below = int(np.asarray(sampling.people_per_block)), ()
        partition = functools.partial(rows.random_blocks, sampling, num_people)
    else:
        tree_draw.check_levels(sampling.level_names[1:], population)
        classes, slots = population.num_units(1), int(np.asarray(sampling.num_classes))
        if classes > slots or (classes < slots and slots_of != CLASS):
            rule = "at least" if slots_of == CLASS else "exactly"
            raise ValueError(
                f"sampling.num_classes must be {rule} the number of classes in the "
                f"data, {classes}, got {slots}"
            )
        counts = population.children_counts[1]
        below = (tree_draw.make_level(sampling.examples, counts, slots_of),)
        if episodes is None:
            return rows.class_rows(sampling, classes), below
        width = int(np.asarray(sampling.ways))
        partition = functools.partial(rows.random_groups, sampling, classes)
    pool = int(sampling.num_possible_episodes)
    return rows.episode_rows(episodes, pool, partition, width), below


class Draw(NamedTuple):
    """The draw of one step with J clip units; J may be 0."""

    # (J, *slot_shape) int64, indices of the drawn examples (units of the last level) in
    # the population's order; 0 where masked.
    examples: np.ndarray
    # (J, *slot_shape) bool, True where a slot holds a drawn example. On the last axis
    # these come first, in uniformly random order, so the first ``shots`` of them are a
    # random support set. On the other axes the drawn units also come first, in random
    # order; a unit without anything drawn below keeps its slot.
    mask: np.ndarray
    # (J,) int64, index of each clip unit among all units of its level; -1 if the draw
    # formed it (an episode, the step) or it is null.
    units: np.ndarray
    # (J,) bool, whether a null slot was drawn; such a clip unit must contribute zero.
    # None: no clip unit has one.
    holds_null: np.ndarray | None = None


class EpisodeSampler:
    """Draws what a sampling spec describes from a real population.

    Nothing is capped, skipped or reused. Every unit that Poisson sampling selects is
    returned. A unit without children is still drawn (its slots are masked), a unit with
    fewer children than requested gives all of them, and every call draws again.

    The real sizes of ``population`` determine the draw. A public ``population`` in the
    spec must not contradict them, because the step may be accounted with it: see
    `check_public_sizes`.
    """

    def __init__(
        self,
        sampling: Sampling | Scheme,  # accounted, with scalar fields
        population: Population,  # with the levels of the spec, or classes and examples
        *,
        # Level whose units are the rows of a draw, or "step": one row. The two episodic
        # designs require "episode".
        clip_unit: str,
        # Whether the step has this `Population`, whose sizes replace those of the spec.
        population_is_accounted: bool = False,
        # Level of the protected unit. Sizes below both it and the clip unit are not
        # accounted and are not checked. None, "person": all are checked.
        privacy_unit: str | None = None,
        # Protected level under zero_out. The ``population`` of its scheme (or the
        # ``num_classes`` of grouped classes) is then the number of slots of every unit
        # one level up. Slots are drawn whether filled or not, see `Draw.holds_null`.
        slots_of: str | None = None,
        owners: Owners | None = None,  # of the examples, for `PeopleBlocks`
        # For `PeopleBlocks`: whether to draw among public slots, filled or not. If not,
        # among the classes with enough examples in the block, which is sound only if
        # every episode is accounted as containing the person, and not under zero_out.
        among_slots: bool = True,
    ) -> None:
        sampling = checked_sampling(sampling)
        checked_clip_unit(sampling, clip_unit)
        self.sampling, self.population = sampling, population
        self.clip_unit = clip_unit
        _refuse_arrays(sampling)
        if slots_of is not None:
            _validation.choice("slots_of", slots_of, sampling.level_names)
        self._blocks = None
        if isinstance(sampling, PeopleBlocks):
            self._blocks = rows.BlockExamples(
                sampling, population, owners, among_slots, slots_of is not None
            )
        num_people = 0 if owners is None else len(owners.names)
        self._rows, self._below = rows_and_levels(
            sampling, population, clip_unit, slots_of, num_people
        )
        names = (RESERVED_LEVEL_NAME, *sampling.level_names)
        unit = names[-1] if privacy_unit in (None, *OWNED) else str(privacy_unit)
        _validation.choice("privacy_unit", unit, names[1:])
        checked = names[: max(names.index(unit), names.index(clip_unit)) + 1]
        if not population_is_accounted:
            for level in (*self._rows.levels, *self._below):
                if level.scheme.name in checked:
                    tree_draw.check_public_sizes(level)
        widths = tuple(level.width for level in self._below)
        # One axis for each level below the clip unit.
        self.slot_shape: tuple[int, ...] = (*self._rows.inner_shape, *widths)
        if self._blocks is not None:
            self.slot_shape = self._blocks.widths
        # Mean and largest possible number of clip units in a draw.
        self.expected_units: float = self._rows.expected
        self.max_units: int = self._rows.largest
        # Steps of an epoch; None if every step draws independently.
        self.steps_per_epoch = self._rows.steps_per_epoch

    def draws(self, generator: np.random.Generator) -> Iterator[Draw]:
        """Yields draws without end, going through one epoch after another if any."""
        while True:
            if self.steps_per_epoch is None:
                yield self.draw(generator)
            else:
                for members in self.begin_epoch(generator):
                    yield self.draw(generator, members)

    def complete_in(self, draw: Draw, needs: Needs) -> int:
        """Returns the number of complete clip units in a draw of this sampler."""
        fewest = self.slot_shape[-2] if len(self.slot_shape) > 1 else 1
        # An episode needs two classes to tell apart; Poisson sampling may draw one.
        if len(self._below) > 1 and isinstance(self._below[-2].scheme, Poisson):
            fewest = 2
        return complete_in_draw(draw.mask, draw.holds_null, needs, fewest)

    def begin_epoch(self, generator: np.random.Generator) -> rows.Epoch:
        """Returns the units of each step of a newly drawn epoch."""
        return self._rows.draw(generator)

    def draw(
        self, generator: np.random.Generator, members: np.ndarray | None = None
    ) -> Draw:
        """Returns a new draw; with epochs, ``members`` are one of `begin_epoch`."""
        assert (members is None) == (self.steps_per_epoch is None)
        starts = self._rows.draw(generator) if members is None else members
        units = starts.copy()
        if not self._rows.are_units:
            units = np.full(len(starts), tree_draw.NO_UNIT)
        if self._blocks is not None:
            examples, mask, null = self._blocks.fill(starts, generator)
        else:
            examples, mask, null = tree_draw.fill_slots(starts, self._below, generator)
        return Draw(examples, mask, units, null)


def _refuse_arrays(sampling: Sampling) -> None:
    """Raises for a spec with arrays: it describes many settings, and a run has one."""
    numbers: dict[str, Any] = dict(sampling.numbers)
    for scheme in sampling.schemes:
        for field, value in scheme.numbers.items():
            numbers[f"{field} of level {scheme.name!r}"] = value
    for name, value in numbers.items():
        if np.ndim(value):
            raise ValueError(
                f"{name} must be a single number, because a run has one setting, got "
                f"an array of shape {np.shape(value)}"
            )

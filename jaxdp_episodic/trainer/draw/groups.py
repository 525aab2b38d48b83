"""The sampler of runs with correlated noise: each step draws from one group of units.

Units are assigned to groups at random, once a run and in secret, so that adding or
removing a unit does not change the distribution of the other units' groups. Where
groups must have public sizes, the slots of each parent are assigned evenly.
docs/proofs.md, "Correlated noise".
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    GroupedClasses,
    PeopleBlocks,
    Sampling,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.draw.complete import SEED, Needs
from jaxdp_episodic.trainer.draw.rows import Epoch
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler
from jaxdp_episodic.trainer.draw.tree_draw import NO_UNIT, random_places

Made = Callable[[Sampling, Population, Owners | None], EpisodeSampler]


class GroupSampler:
    """The samplers of all groups; its attributes are those of `EpisodeSampler`."""

    def __init__(
        self,
        step: GaussianStep,  # with bands
        population: Population,
        owners: Owners | None,  # for `PeopleBlocks`
        made: Made,  # returns the sampler of a group, or of all data
    ) -> None:
        assert step.bands is not None
        self._step, self._bands, self._made = step, step.bands, made
        self.population, self._owners = population, owners
        # The scheme of the grouped level; None if the design itself draws it.
        named = (one for one in step.design.schemes if one.name == step.bands.level)
        self._scheme: Any = next(named, None)
        # Whether each unit's group is drawn independently: no number is public.
        is_private = step.neighboring_relation == "add_remove"
        if step.neighboring_relation == "zero_out":
            is_private = self._scheme is None or self._scheme.population is None
        is_listed = (
            isinstance(step.design, GroupedClasses) and step.bands.level == CLASS
        )
        is_private = is_private and step.bands.level == step.privacy_unit
        self._is_independent = is_private and not is_listed
        whole = made(step.design, population, owners)
        self.deal(np.random.default_rng(SEED))  # only the sizes are used
        shapes = [one.slot_shape for one, _ in self._groups]
        if self._is_independent:  # a group may get all units of a parent
            shapes = [whole.slot_shape]
        self.slot_shape = tuple(map(max, zip(*shapes, strict=True)))
        self.max_units = whole.max_units
        each = [one.expected_units for one, _ in self._groups]
        self.expected_units = float(np.mean(each))

    def deal(self, generator: np.random.Generator) -> None:
        """Assigns all units to groups again, at random."""
        group = self._dealt(generator) % self._bands.count
        # A resumed run compares it: another NumPy may draw other groups.
        self.dealt = hashlib.sha256(group.astype("<i8").tobytes()).digest()
        self._groups = [self._group(j, group == j) for j in range(self._bands.count)]

    def _dealt(self, generator: np.random.Generator) -> np.ndarray:
        """Returns a number that decides the group of each unit, or of each owner."""
        step, level = self._step, self._bands.level
        if isinstance(step.design, PeopleBlocks):
            assert self._owners is not None
            places = generator.permutation(int(np.asarray(step.design.num_people)))
            return places[: len(self._owners.names)]
        names = self.population.level_names
        slots = filled = self.population.children_counts[names.index(level)]
        if self._is_independent:
            return generator.integers(self._bands.count, size=int(filled.sum()))
        if isinstance(step.design, GroupedClasses) and level == CLASS:
            slots = np.full(1, int(np.asarray(step.design.num_classes)))
        elif step.neighboring_relation == "zero_out" and level == step.privacy_unit:
            slots = np.full(len(filled), int(np.asarray(self._scheme.population)))
        return random_places(slots, filled, generator)

    def _design(self, index: int) -> Sampling:
        """Returns the sampling within a group, with the group's own sizes."""
        design, scheme = self._step.design, self._scheme

        def part(number: Any) -> int:
            return max(-(-(int(np.asarray(number)) - index) // self._bands.count), 1)

        if isinstance(design, PeopleBlocks):
            return dataclasses.replace(design, num_people=part(design.num_people))
        if isinstance(design, GroupedClasses) and self._bands.level == CLASS:
            classes = design.classes
            if classes is not None:
                classes = dataclasses.replace(classes, population=None)
            number = part(design.num_classes)
            return dataclasses.replace(design, num_classes=number, classes=classes)
        if scheme.population is None or self._is_independent:
            return design
        population = part(scheme.population)
        return design.with_scheme(dataclasses.replace(scheme, population=population))

    def _group(self, index: int, kept: np.ndarray) -> tuple[EpisodeSampler, np.ndarray]:
        """Returns the sampler of a group, and its examples' rows in the data."""
        names = self.population.level_names
        counts = list(self.population.children_counts)
        by_person = isinstance(self._step.design, PeopleBlocks)
        people, chosen = self._owners if by_person else None, kept
        if people is None:
            level = names.index(self._bands.level)
        else:
            level, kept = len(counts) - 1, chosen[people.codes]
        parents = np.repeat(np.arange(len(counts[level])), counts[level])
        counts[level] = np.bincount(parents[kept], minlength=len(counts[level]))
        for below in range(level + 1, len(counts)):
            everyone, counts[below] = counts[below], counts[below][kept]
            kept = np.repeat(kept, everyone)
        if people is not None:
            codes = np.cumsum(chosen) - 1
            people = Owners(codes[people.codes[kept]], people.names[chosen])
        tree = Population(tuple(counts), names)
        return self._made(self._design(index), tree, people), np.flatnonzero(kept)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch of all groups; None if the sampling has no epochs."""
        length = self._groups[0][0].steps_per_epoch
        return None if length is None else length * len(self._groups)

    def begin_epoch(self, generator: np.random.Generator) -> Epoch:
        """Returns the units of each step of an epoch; the groups take turns."""
        epochs = [sampler.begin_epoch(generator) for sampler, _ in self._groups]
        return [rows for turn in zip(*epochs, strict=True) for rows in turn]

    def draw(
        self, generator: np.random.Generator, members: np.ndarray | None, turn: int
    ) -> Draw:
        """Returns a draw from group ``turn % count``; its ``units`` are `NO_UNIT`."""
        sampler, rows = self._groups[turn % len(self._groups)]
        drawn = sampler.draw(generator, members)
        wide = [(0, 0)]
        for most, own in zip(self.slot_shape, drawn.mask.shape[1:], strict=True):
            wide.append((0, most - own))
        mask = np.pad(drawn.mask, wide)
        examples = np.zeros(mask.shape, np.int64)
        examples[mask] = rows[drawn.examples[drawn.mask]]
        units = np.full_like(drawn.units, NO_UNIT)
        return Draw(examples, mask, units, drawn.holds_null)

    def draws(self, generator: np.random.Generator) -> Iterator[Draw]:
        """Yields the draws of a simulated run, with newly drawn groups."""
        other, members = copy.copy(self), list[Any]()
        other.deal(generator)
        for turn in itertools.count():
            if not members:
                by_epoch = self.steps_per_epoch is not None
                members = other.begin_epoch(generator) if by_epoch else [None]
            yield other.draw(generator, members.pop(0), turn)

    def complete_in(self, draw: Draw, needs: Needs) -> int:
        """Returns how many clip units of a draw are complete."""
        return self._groups[0][0].complete_in(draw, needs)

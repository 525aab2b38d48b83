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
from jaxdp_episodic.accountant.describe.step import Bands, GaussianStep
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.draw.complete import SEED, CompleteUnits, Needs, simulated
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
        whole = made(step.design, population, owners)
        self.deal(np.random.default_rng(SEED))  # only the sizes are used
        shapes = [one.slot_shape for one, _ in self._groups]
        if _is_independent(step):  # a group may get all units of a parent
            shapes = [whole.slot_shape]
        self.slot_shape = tuple(map(max, zip(*shapes, strict=True)))
        self.max_units = whole.max_units
        each = [one.expected_units for one, _ in self._groups]
        self.expected_units = float(np.mean(each))

    def deal(self, generator: np.random.Generator) -> None:
        """Assigns all units to groups again, at random."""
        group = _dealt(self._step, self.population, self._owners, generator)
        # A resumed run compares it: another NumPy may draw other groups.
        self.dealt = hashlib.sha256(group.astype("<i8").tobytes()).digest()
        self._groups = [self._group(j, group == j) for j in range(self._bands.count)]

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
        tree, design = Population(tuple(counts), names), _design_of(self._step, index)
        return self._made(design, tree, people), np.flatnonzero(kept)

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

    def complete_units(self, needs: Needs) -> CompleteUnits:
        """Returns means over the groups, see `EpisodeSampler.complete_units`."""
        return simulated(self, needs)

    def complete_in(self, draw: Draw, needs: Needs) -> int:
        """Returns how many clip units of a draw are complete."""
        return self._groups[0][0].complete_in(draw, needs)


def _is_independent(step: GaussianStep) -> bool:
    """Whether each unit's group is drawn independently: no number is public."""
    assert step.bands is not None
    is_private = step.neighboring_relation == "add_remove"
    if step.neighboring_relation == "zero_out":
        is_private = _scheme(step) is None or _scheme(step).population is None
    is_listed = isinstance(step.design, GroupedClasses) and step.bands.level == CLASS
    return is_private and step.bands.level == step.privacy_unit and not is_listed


def _scheme(step: GaussianStep) -> Any:
    """The scheme of the grouped level; None if the design itself draws it."""
    level = step.bands.level if step.bands else ""
    return next((one for one in step.design.schemes if one.name == level), None)


def _dealt(
    step: GaussianStep,
    population: Population,
    owners: Owners | None,
    generator: np.random.Generator,
) -> np.ndarray:
    """Returns the group of each unit of the grouped level, or of each owner."""
    bands, design = step.bands, step.design
    assert bands is not None
    if isinstance(design, PeopleBlocks):
        assert owners is not None
        places = generator.permutation(int(np.asarray(design.num_people)))
        return places[: len(owners.names)] % bands.count
    filled = population.children_counts[population.level_names.index(bands.level)]
    if _is_independent(step):
        return generator.integers(bands.count, size=int(filled.sum()))
    slots = filled
    if isinstance(design, GroupedClasses) and bands.level == CLASS:
        slots = np.full(1, int(np.asarray(design.num_classes)))
    elif step.neighboring_relation == "zero_out" and bands.level == step.privacy_unit:
        slots = np.full(len(filled), int(np.asarray(_scheme(step).population)))
    return random_places(slots, filled, generator) % bands.count


def _design_of(step: GaussianStep, index: int) -> Sampling:
    """Returns the sampling within a group, with the group's own sizes."""
    bands, design = step.bands, step.design
    assert isinstance(bands, Bands)

    def part(number: Any) -> int:
        return max(-(-(int(np.asarray(number)) - index) // bands.count), 1)

    if isinstance(design, PeopleBlocks):
        return dataclasses.replace(design, num_people=part(design.num_people))
    if isinstance(design, GroupedClasses) and bands.level == CLASS:
        classes = design.classes
        if classes is not None:
            classes = dataclasses.replace(classes, population=None)
        number = part(design.num_classes)
        return dataclasses.replace(design, num_classes=number, classes=classes)
    scheme = _scheme(step)
    if scheme.population is None or _is_independent(step):
        return design
    changed: Any = {"population": part(scheme.population)}
    return design.with_scheme(dataclasses.replace(scheme, **changed))

"""Draws episodes within blocks of people: first the blocks, then their examples."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import PeopleBlocks, WithoutReplacement
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.draw import tree_draw


def random_blocks(
    design: PeopleBlocks, num_known: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns (episodes, people per block) random indices of people; -1: no data."""
    size = int(np.asarray(design.people_per_block))
    order = generator.permutation(int(np.asarray(design.num_people)))
    blocks = order[: len(order) // size * size].reshape(-1, size)
    blocks = np.where(blocks < num_known, blocks, tree_draw.NULL)
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
        tree_draw.check_levels([level.name for level in levels], population)
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

"""Draws episodes within blocks of people: first the blocks, then their examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import WithoutReplacement
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


@dataclass(frozen=True, eq=False)
class BlockExamples:
    """Draws the classes and examples of an episode from its block."""

    # Public number of slots for a class's examples in a block, drawn whether filled or
    # not. None: draw among the classes with enough examples in the block.
    slots: int | None
    ways: int  # classes per episode
    size: int  # examples per class of an episode
    num_classes: int  # of the data
    leaves_null: bool  # whether an episode with an unfilled slot must contribute zero
    # (P * C + 1,) int64, first index in ``order`` of each (person, class) pair.
    starts: np.ndarray
    order: np.ndarray  # (R,) the examples, sorted by person and class
    classes: np.ndarray  # (R,) the class of each entry of ``order``

    @classmethod
    def of(
        cls,
        design: PeopleBlocks,
        population: Population,
        owners: Owners | None,
        among_slots: bool,
        leaves_null: bool,
    ) -> BlockExamples:
        """Checks the design against the data, and sorts the examples by owner."""
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
        class_of = np.repeat(np.arange(number), sizes)
        order = np.lexsort((class_of, owners.codes))
        key = owners.codes[order] * number + class_of[order]
        counts = np.bincount(key, minlength=len(owners.names) * number)
        slots = None
        if among_slots:
            stated = of_classes.population
            if stated is not None and int(np.asarray(stated)) != number:
                raise ValueError(
                    f"level {of_classes.name!r}: population must be the number of "
                    f"classes in the data, {number}, got {stated!r}"
                )
            slots = _checked_slots(
                of_examples, counts.reshape(-1, number), design, owners
            )
        return cls(
            slots,
            ways,
            int(np.asarray(of_examples.size)),
            number,
            leaves_null,
            np.append(0, np.cumsum(counts)),
            order,
            class_of[order],
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Axes of an episode: its classes, and the examples of each."""
        return self.ways, self.size

    def fill(
        self, people: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Does what `fill_slots` does, for (J, people per block) indices of people."""
        shape = len(people), *self.widths
        draw = self._among_filled if self.slots is None else self._among_slots
        drawn = draw(people, generator).reshape(shape)
        # Drawn examples first; they are in random order already.
        order = np.argsort(drawn < 0, axis=-1, kind="stable")
        drawn = np.take_along_axis(drawn, order, axis=-1)
        mask = drawn >= 0
        is_null = np.logical_and(~mask.all(axis=(1, 2)), self.leaves_null)
        return np.maximum(drawn, 0), mask, is_null

    def _among_slots(
        self, people: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """Returns (J * ways, size) examples, -1 where a slot is not filled."""
        number = len(people)
        counts = np.full(number, self.num_classes)
        classes = tree_draw.without_replacement(counts, self.ways, generator).child
        people = np.repeat(people, self.ways, axis=0)  # (J * ways, b)
        first, count = self._ranges(people, classes[:, None])
        assert self.slots is not None
        public = np.full(len(people), self.slots)
        slot = tree_draw.without_replacement(public, self.size, generator).child
        slot = slot.reshape(len(people), self.size)
        ends = np.cumsum(count, axis=1)
        # The people of a block fill its slots one after another.
        owner = np.sum(slot[:, :, None] >= ends[:, None, :], axis=2)
        filled = slot < ends[:, -1:]
        owner = np.where(filled, owner, 0)
        begins = np.take_along_axis(first - ends + count, owner, axis=1)
        place = np.where(filled, begins + slot, 0)
        return np.where(filled, self.order[place], tree_draw.NULL)

    def _among_filled(
        self, people: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """Returns (J * ways, size) examples of classes with enough; -1: no class."""
        number, classes = len(people), np.arange(self.num_classes)
        first, _ = self._ranges(people, classes[:1])
        last, rest = self._ranges(people, classes[-1:])
        lengths = np.where(people < 0, 0, last + rest - first)
        row = np.repeat(np.arange(number), lengths.sum(axis=1))
        offset = np.arange(len(row)) - np.repeat(
            np.cumsum(lengths) - lengths.ravel(), lengths.ravel()
        )
        place = np.repeat(first.ravel(), lengths.ravel()) + offset
        key = row * self.num_classes + self.classes[place]
        shuffled = np.lexsort((generator.random(len(key)), key))
        place, key = place[shuffled], key[shuffled]
        groups, begins, counts = np.unique(key, return_index=True, return_counts=True)
        enough = counts >= self.size
        groups, begins = groups[enough], begins[enough]
        of_row = groups // self.num_classes
        chosen = np.lexsort((generator.random(len(groups)), of_row))
        rank = tree_draw.rank_within(of_row[chosen], number)
        kept, rank = chosen[rank < self.ways], rank[rank < self.ways]
        drawn = np.full((number * self.ways, self.size), tree_draw.NULL)
        drawn[of_row[kept] * self.ways + rank] = self.order[
            place[begins[kept][:, None] + np.arange(self.size)]
        ]
        return drawn

    def _ranges(
        self, people: np.ndarray, classes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns first index in ``order``, and number, of each person's examples."""
        key = np.where(people < 0, 0, people) * self.num_classes + classes
        first = self.starts[key]
        count = np.where(people < 0, 0, self.starts[key + 1] - first)
        return first, count


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

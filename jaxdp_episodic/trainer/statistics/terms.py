"""Of which rows a private statistic is a sum, and whose contribution each is in."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import BOUNDS, PersonBounds
from jaxdp_episodic.accountant.describe.schemes import OWNED
from jaxdp_episodic.trainer.config.training_start import MEANS, PEOPLE, StartConfig
from jaxdp_episodic.trainer.data.table import ExampleTable

# Each class is left out in turn, and the others' means must span a direction.
FEWEST_CLASSES = 3


class Terms(NamedTuple):
    """The terms of one sum.

    Attributes:
      rows: the examples of each term: () all, in their order; else (n,) indices, two
        arrays of them where the terms are pairs.
      shares: (n,) whole numbers >= 1: by what each term's contribution is divided.
      groups: (n,) codes of the contributions, the terms of one lying together, which
        are as long as may be where they are outer products, whatever the shares; None:
        shares alone say how long they are.
    """

    rows: tuple[np.ndarray, ...]
    shares: np.ndarray
    groups: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Contributors:
    """The protected units of a table; make it with `of`.

    Attributes:
      sizes: (C,) examples of each class.
      by_class: whether each class gives one contribution; else each example, or person.
      person: (R,) whose each example is, codes 0 .. P - 1, where people are protected.
      couples: whether people are paired, in place of examples within each class.
      slots: public number of what is paired, under zero_out: of people, or of each
        class's examples.
      most: public bound of a person's examples, where pairs need one.
    """

    sizes: np.ndarray
    by_class: bool
    person: np.ndarray | None = None
    couples: bool = False
    slots: int | None = None
    most: int | None = None

    @classmethod
    def of(
        cls,
        data: ExampleTable,
        config: StartConfig,
        *,
        privacy_unit: str,
        neighboring_relation: str,
        slots: int | None,
        people: PersonBounds | None,
    ) -> Contributors:
        """Returns those of a table; arguments as of `PrivateStatistics`."""
        sizes = np.asarray(data.population.children_counts[-1], np.int64)
        by_class, person = privacy_unit == data.level_names[-2], None
        data.check_copies(privacy_unit)
        if privacy_unit in OWNED:
            owners = data.owned(privacy_unit)
            if owners is None:
                raise ValueError(
                    f"data must have owners with privacy_unit={privacy_unit!r}, got a "
                    "table without"
                )
            codes = np.unique(owners.codes, return_inverse=True)[1]
            person = codes.reshape(-1).astype(np.int64)
        couples = person is not None and config.pairs == PEOPLE
        most = None
        if neighboring_relation != "zero_out" or by_class:
            slots = None
        elif person is not None and couples:
            number = int(person.max(initial=-1)) + 1
            slots = _enough("start.num_people", config.num_people, number, "people")
        else:
            largest = int(sizes.max(initial=0))
            population = f"population of {data.level_names[-1]!r}"
            slots = _enough(population, slots, largest, "examples in a class")
        if neighboring_relation == "add_remove" and person is not None and not couples:
            largest = int(np.bincount(person).max(initial=0))
            bound = _in_all(people, len(data.level_names))
            most = _enough("people", bound, largest, "examples of a person")
        return cls(sizes, by_class, person, couples, slots, most)

    @property
    def number(self) -> int:
        """How many contributions a sum of examples' has."""
        if self.by_class:
            return int(np.count_nonzero(self.sizes))
        if self.person is not None:
            return int(self.person.max(initial=-1)) + 1
        return int(self.sizes.sum())

    @property
    def classes(self) -> np.ndarray:
        """(R,) the class of each example."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def examples(self) -> Terms:
        """Every example; a unit's divided by their number, a person's as one."""
        if self.by_class:
            return Terms((), self.sizes[self.classes])
        if self.person is None:
            return Terms((), np.ones(self.sizes.sum(), np.int64))
        order = np.argsort(self.person, kind="stable")
        groups = self.person[order]
        return Terms((order,), np.bincount(groups)[groups], groups)

    def pairs(self, generator: np.random.Generator) -> Terms:
        """Disjoint random pairs of examples of a class, in a fresh order."""
        if self.person is not None and self.couples:
            return _pairs_of_couples(self.person, self.classes, self.slots, generator)
        first, second = _pairs_in_classes(self.sizes, self.slots, generator)
        shares = np.ones(len(first), np.int64)
        if self.by_class:
            owner = self.classes[first]
            shares = np.bincount(owner)[owner]
        elif self.most is not None:
            shares *= self.most
        elif self.person is not None:
            number = np.bincount(self.person)[self.person]
            shares = np.maximum(number[first], number[second])
        return Terms((first, second), shares)


def check_classes(data: ExampleTable, number: int, relation: str) -> None:
    """Refuses classes without releasable means, and warns of a private list."""
    classes = len(data.population.children_counts[-1])
    if not FEWEST_CLASSES <= classes <= number:
        raise ValueError(
            f"start.between={MEANS!r} takes at least {FEWEST_CLASSES} classes and at "
            f"most as many as there are features ({number}), got {classes}"
        )
    if relation == "add_remove" and not data.has_public_units:
        warnings.warn(
            f"start.between={MEANS!r} releases a sum for each of the "
            f"{data.level_names[-2]} units that the data have, so their number is not "
            "protected, though an example alone in its own changes it. Where there is "
            "a public list, give it (public_units; classes beside labels), or protect "
            "by 'zero_out'",
            stacklevel=4,
        )


def _in_all(people: PersonBounds | None, levels: int) -> int:
    """The public bound of a person's examples over all classes."""
    given, needed = {} if people is None else people.numbers, BOUNDS[:levels]
    if levels > len(BOUNDS) or not set(needed) <= set(given):
        raise ValueError(
            f"people must bound {' and '.join(needed)} of a person, got {people!r}"
        )
    return math.prod(
        _validation.whole_number(f"people.{name}", given[name]) for name in needed
    )


def _enough(name: str, given: int | None, number: int, what: str) -> int:
    """A public number, which the data must not be above."""
    if given is None or _validation.whole_number(name, given) < number:
        raise ValueError(
            f"{name} must allow for at least the {number} {what} that the data have, "
            f"by a public bound, got {given}"
        )
    return int(given)


def _pairs_in_classes(
    sizes: np.ndarray, slots: int | None, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of both of each pair, class by class.

    All slots are put into random order and paired, first with second and so on; a pair
    with an empty slot is none. Without slots the examples themselves are.
    """
    number = sizes if slots is None else np.full(len(sizes), slots)
    owner = np.repeat(np.arange(len(sizes)), number)  # a class's slots lie together
    begins = (np.cumsum(number) - number)[owner]
    order = np.lexsort((generator.random(len(owner)), owner)) - begins
    rank = np.arange(len(owner)) - begins
    first = np.flatnonzero((rank % 2 == 0) & (rank + 1 < number[owner]))
    both = np.stack([order[first], order[first + 1]], axis=1)
    owner = owner[first]
    there = (both < sizes[owner, None]).all(axis=1)
    both, owner = both[there], owner[there]
    rows = (np.cumsum(sizes) - sizes)[owner, None] + both
    return rows[:, 0], rows[:, 1]


def _pairs_of_couples(
    person: np.ndarray,
    classes: np.ndarray,
    slots: int | None,
    generator: np.random.Generator,
) -> Terms:
    """Pairs of examples of a class, one each of two people; a couple's are one group.

    All slots of people, or the people, are put into random order and paired, first with
    second and so on. In each class that both are in the first example of one goes with
    the first of the other, the second with the second, and so on.
    """
    number = int(person.max(initial=-1)) + 1 if slots is None else slots
    place = generator.permutation(number)[person]
    kept = np.flatnonzero(place < number // 2 * 2)  # one without a partner sits out
    place, classes, person = place[kept], classes[kept], person[kept]
    order = np.lexsort((classes, person))  # an example's turn among hers of the class
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - _begins(person[order], classes[order])
    order = np.lexsort((place, turn, classes, place // 2))
    begins = _begins(*(codes[order] for codes in (place // 2, classes, turn)))
    first = np.flatnonzero(np.arange(len(order)) != begins) - 1  # both are there
    couple = place[order[first]] // 2
    rows = kept[order[first]], kept[order[first + 1]]
    return Terms(rows, np.bincount(couple)[couple], couple)


def _begins(*codes: np.ndarray) -> np.ndarray:
    """For each place where the run of equal codes that it lies in begins."""
    number = len(codes[0])
    is_new = np.arange(number) == 0
    for one in codes:
        is_new[1:] |= one[1:] != one[:-1]
    return np.maximum.accumulate(np.where(is_new, np.arange(number), 0))

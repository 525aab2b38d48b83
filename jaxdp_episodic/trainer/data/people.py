"""Bounds of what people own: enforced before training, or found to hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import BOUNDS, PersonBounds
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable, unit_labels

# Begins what is hashed. The rule is as public as the bounds: it need not be secret, but
# must not look at anybody else.
_SALT = "jaxdp-episodic people 1"


@dataclass(frozen=True, eq=False, kw_only=True)
class Truncation(Spec):
    """What bounding people has left out: for the ledger.

    The numbers are those of private data, and no part of what may be published: under
    ``add_remove`` each tells that somebody is there.

    Attributes:
      bounds: public, and true of everybody from here on.
      people: who own an example.
      people_cut: who lost some of theirs.
      examples_kept: of all people.
      examples_dropped: of all people.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {"bounds": (PersonBounds,)}

    bounds: PersonBounds
    people: int
    people_cut: int
    examples_kept: int
    examples_dropped: int

    def __post_init__(self) -> None:
        numbers = ("people", "people_cut", "examples_kept", "examples_dropped")
        for name in numbers:
            value = _validation.whole_number(name, getattr(self, name), minimum=0)
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        bounds = ", ".join(f"{name}={n}" for name, n in self.bounds.numbers.items())
        number = self.examples_kept + self.examples_dropped
        if not self.examples_dropped:
            return f"none of {number:,} examples left out: all are within {bounds}"
        return (
            f"{self.examples_dropped:,} of {number:,} examples left out, of "
            f"{self.people_cut:,} of {self.people:,} people: all are within {bounds}"
        )


class Bounded(NamedTuple):
    """A table in which everybody is within the bounds, and what that took."""

    table: ExampleTable
    truncation: Truncation


def truncated(
    table: ExampleTable, bounds: PersonBounds, *, truncate: bool = True
) -> Bounded:
    """Returns the table without the examples of people beyond their bounds.

    Of the tasks that hold somebody's examples, of the classes within one, and of the
    examples within one of these, as many stay as the bounds allow: those whose hash is
    the smallest. It is made of the owner's id, the unit's id and, of an example, its
    place among the owner's own in the class: nothing that is in an example, nothing of
    other people. So tables that differ in one person's examples still differ in that
    person's alone; and where it is only what these contain that differs ("zero_out",
    "replace_one") the same ones stay. The hash is public and has no seed, so a run that
    is resumed finds the same table.

    Units that lose all of their examples stay on the list. Sizes are other ones than
    before: a ``population`` that a step states is that of the table returned.

    Args:
      table: with owners.
      bounds: numbers, no arrays. Without a bound of tasks, classes count in all tasks.
      truncate: False: somebody beyond the bounds is an error, and nothing is left out.

    Raises:
      ValueError: no owners, bounds that are arrays or of a level that is not there;
        with ``truncate=False`` somebody beyond the bounds.
      NotImplementedError: more than three levels.
    """
    _validation.flag("truncate", truncate)
    owners = owners_of(table)
    kept = _kept(table, owners, bounds, refuse=not truncate)
    cut = np.unique(owners.codes[~kept])
    truncation = Truncation(
        bounds=bounds,
        people=len(np.unique(owners.codes)),
        people_cut=len(cut),
        examples_kept=int(kept.sum()),
        examples_dropped=int(np.sum(~kept)),
    )
    return Bounded(table.take(np.flatnonzero(kept)) if cut.size else table, truncation)


def owners_of(table: ExampleTable) -> Owners:
    """Returns the owners of a table."""
    if table.owners is None:
        raise ValueError(
            "data must say whose the examples are, as the guarantee is for people: "
            "give owner=..., in Python owners=... of ExampleTable.from_records"
        )
    return table.owners


def fitting_bounds(table: ExampleTable) -> PersonBounds:
    """Returns the least bounds within which everybody is. They are *not public*.

    They are made of the data, and a guarantee that rests on them holds for nobody:
    somebody who joins with more moves them, and everybody's rates with them. Look at
    them to learn what public bounds would cost; state bounds that you knew before.
    """
    owners_of(table)
    found = table.people
    assert found is not None
    above = len(table.level_names) - 1
    return PersonBounds(
        examples=found.most_examples,
        classes=found.most_classes if above else None,
        tasks=found.most_tasks,
    )


def _kept(
    table: ExampleTable, owners: Owners, bounds: PersonBounds, *, refuse: bool
) -> np.ndarray:
    """(R,) bool: the examples that stay; bounds are kept from the top down."""
    if not isinstance(bounds, PersonBounds):
        raise TypeError(f"bounds must be PersonBounds, got {_validation.shown(bounds)}")
    depth = len(table.level_names)
    if depth > len(BOUNDS):
        raise NotImplementedError(
            f"people are bounded in data of up to {len(BOUNDS)} levels, got "
            f"{table.level_names}; leave one out: table.without_level(...)"
        )
    kept = np.ones(table.num_examples, bool)
    within = np.zeros(table.num_examples, np.int64)  # the unit of the level above
    for height in reversed(range(len(BOUNDS))):
        name = BOUNDS[height]
        most = bounds.numbers.get(name)
        if most is not None and np.ndim(most):
            raise ValueError(f"bounds.{name} must be one number, got an array")
        if height >= depth:
            if most is not None:
                raise ValueError(
                    f"bounds.{name} is for data with more levels than "
                    f"{table.level_names}, got {most}"
                )
            continue
        units = table.places(depth - height)
        if most is not None:
            # Ids are those of classes, and of what is above: an example has its class's
            # and its place among the owner's own.
            named, place = (units, depth - height) if height else (within, depth - 1)
            ids = np.zeros(1, np.int64)
            if place > 0:
                ids = unit_labels(table.population, place, place)
            rows = np.flatnonzero(kept)
            columns = owners.codes[rows], within[rows], units[rows]
            first, group, child = _beyond(*columns, int(most), name, refuse)
            if first.size:
                own = 0 * first if height else _ranks(group, np.arange(len(first)))
                described = zip(
                    owners.names[columns[0][first]].tolist(),
                    map(ids.item, named[rows[first]].tolist()),
                    own.tolist(),
                    strict=True,
                )
                hashes = [_hash(name, *one) for one in described]
                stays = np.ones(int(child.max()) + 1, bool)
                stays[child[first]] = _ranks(group, np.array(hashes, np.uint64)) < most
                kept[rows] = stays[child]
        if most is not None or name == "classes":
            within = units
    return kept


def _beyond(
    person: np.ndarray,
    within: np.ndarray,
    unit: np.ndarray,
    most: int,
    name: str,
    refuse: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First rows and groups of the units of groups with too many; all rows' units.

    A group is what the bound is of, a person in a unit above; a unit is counted once.
    """
    group, child = _numbered(person, within), _numbered(person, unit)
    first = np.unique(child, return_index=True)[1]
    group = group[first]
    size = np.bincount(group)[group]
    beyond = np.flatnonzero(size > most)
    if refuse and beyond.size:
        number = len(np.unique(person[first[beyond]]))
        raise ValueError(
            f"people must be within the bounds, {number:,} of "
            f"{len(np.unique(person)):,} are beyond {name}={most}, the largest with "
            f"{int(size.max()):,}: no guarantee holds for them; state larger bounds "
            "that are public, or truncate"
        )
    return first[beyond], group[beyond], child


def _numbered(person: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Each pair's number among all different ones."""
    keys = person * (int(unit.max(initial=0)) + 1) + unit
    return np.unique(keys, return_inverse=True)[1].reshape(-1)


def _ranks(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Each value's place, from 0, among those of its group."""
    order = np.lexsort((values, group))
    ordered = group[order]
    starts = np.flatnonzero(np.r_[True, np.diff(ordered) != 0])
    sizes = np.diff(np.r_[starts, len(group)])
    ranks = np.empty(len(group), np.int64)
    ranks[order] = np.arange(len(group)) - np.repeat(starts, sizes)
    return ranks


def _hash(*parts: int | str) -> int:
    text = json.dumps([_SALT, *parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

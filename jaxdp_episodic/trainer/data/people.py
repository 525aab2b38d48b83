"""Bounds on what each person owns: enforced by truncation, or measured."""

from __future__ import annotations

import collections
import hashlib
import json
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import BOUNDS, PersonBounds
from jaxdp_episodic.trainer.data.fields import CheckedSpec, Natural
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable, unit_labels

# Prefix of every hashed text. The rule may be as public as the bounds, but it must not
# depend on other people's data.
_SALT = "jaxdp-episodic people 1"


class Truncation(CheckedSpec):
    """What truncation to the bounds left out; recorded in the ledger.

    These counts describe private data and must not be published: under ``add_remove``
    each of them reveals who is in the data.

    Attributes:
      bounds: public bounds that hold for everybody after truncation.
      people: number of people who own an example.
      people_cut: number of people who lost some of their examples.
      examples_kept: number of examples kept, over all people.
      examples_dropped: number of examples dropped, over all people.
    """

    bounds: PersonBounds
    people: Natural
    people_cut: Natural
    examples_kept: Natural
    examples_dropped: Natural

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
    """A table in which everybody is within the bounds, and the truncation report."""

    table: ExampleTable
    truncation: Truncation


def truncated(
    table: ExampleTable, bounds: PersonBounds, *, truncate: bool = True
) -> Bounded:
    """Returns the table without the examples that exceed their owner's bounds.

    For each person, it keeps as many tasks, classes within a task, and examples within
    a class as the bounds allow: those with the smallest hashes. A hash covers the
    owner's id, the unit's id and, for an example, its rank among the owner's examples
    in the class. It covers no content of examples and nothing of other people. So
    tables that differ in one person's examples still differ in that person's examples
    only. If only their content differs ("zero_out", "replace_one"), the same examples
    are kept. The hash is public and has no seed, so a resumed run gets the same table.

    Units that lose all of their examples stay in the tree. Sizes change: a
    ``population`` in a step must describe the returned table.

    Args:
      table: a table with owners.
      bounds: numbers, not arrays. Without a bound on tasks, the bound on classes counts
        all tasks together.
      truncate: if False, a person beyond the bounds is an error and nothing is dropped.

    Raises:
      ValueError: no owners, bounds that are arrays, or a bound on a level that the
        table lacks; with ``truncate=False``, a person beyond the bounds.
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
    """Returns the owners of a table, or raises."""
    _validation.instance("table", table, ExampleTable, "an ExampleTable")
    if table.owners is None:
        raise ValueError(
            "data must name the owner of each example, because the guarantee protects "
            "people: set owner, or in Python owners=... of ExampleTable.from_records"
        )
    return table.owners


def fitting_bounds(table: ExampleTable) -> PersonBounds:
    """Returns the tightest bounds that hold for everybody. They are *not public*.

    They depend on the data, so a guarantee based on them is not valid: a person who
    joins with more examples changes them, and with them the rates of everybody. Use
    them to learn what public bounds would cost, and state bounds known in advance.
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
    """Returns (R,) bool: the examples to keep. Bounds are applied from the top down."""
    _validation.instance("bounds", bounds, PersonBounds, "PersonBounds")
    depth = len(table.level_names)
    if depth > len(BOUNDS):
        raise NotImplementedError(
            f"people are bounded in data of up to {len(BOUNDS)} levels, got "
            f"{table.level_names}; leave one out: table.without_level(...)"
        )
    kept = np.ones(table.num_examples, bool)
    within = [0] * table.num_examples  # unit that the bound counts in
    codes, names = owners.codes.tolist(), owners.names.tolist()
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
        units = table.places(depth - height).tolist()
        if most is not None:
            # Each unit of a person counts once. A group is all of a person's units in
            # one unit of the level above.
            groups = collections.defaultdict[Any, dict[int, list[int]]](dict)
            for row in np.flatnonzero(kept).tolist():
                groups[codes[row], within[row]].setdefault(units[row], []).append(row)
            beyond = {key: own for key, own in groups.items() if len(own) > most}
            if refuse and beyond:
                number = len({person for person, _ in beyond})
                largest = max(map(len, beyond.values()))
                raise ValueError(
                    f"people must be within the bounds, but {number:,} of "
                    f"{len(owners.present):,} exceed {name}={most}, the largest "
                    f"with {largest:,}: the guarantee would not hold for them; "
                    "state larger public bounds, or truncate"
                )
            # A class or task is hashed by its own id, an example by its class's id and
            # its rank among the owner's examples there.
            level, ids = depth - max(height, 1), [0]  # of data without classes
            if level > 0:
                ids = unit_labels(table.population, level, level).tolist()
            for (person, above), own in beyond.items():
                hashes = dict[int, int]()
                for rank, unit in enumerate(own):
                    place = (ids[unit], 0) if height else (ids[above], rank)
                    hashes[unit] = _hash(name, names[person], *place)
                for unit in sorted(own, key=hashes.__getitem__)[most:]:
                    kept[own[unit]] = False
        if most is not None or name == "classes":
            within = units
    return kept


def _hash(*parts: int | str) -> int:
    text = json.dumps([_SALT, *parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

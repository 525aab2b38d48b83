"""Canaries: units made up by the auditor, each in the data or not by a coin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.describe.designs import GroupedClasses
from jaxdp_episodic.describe.population import Population
from jaxdp_episodic.describe.schemes import MultistageSampling, Poisson
from jaxdp_episodic.describe.step import GaussianStep


class Canaries(NamedTuple):
    """A table with all canaries in it, and what becomes of those that are out.

    Attributes:
      table: all canaries in. Of an example they are added to the data; of a larger
        unit they are units of the data.
      rows: (n,) the canaries' rows in it.
      owner: (n,) which canary, from 0, each of these rows belongs to.
      substitutes: (n, ...) features in place of those of canaries that are out, under
        replace_one; None: the rows are left out (a larger unit stays on the public
        list, emptied).
      number: of canaries.
    """

    table: ExampleTable
    rows: np.ndarray
    owner: np.ndarray
    substitutes: np.ndarray | None
    number: int

    def data(self, is_in: np.ndarray) -> ExampleTable:
        """Returns the table with those canaries that are in, (number,) bool."""
        out = ~np.asarray(is_in, bool)[self.owner]
        if self.substitutes is not None:
            features = self.table.features.copy()
            features[self.rows[out]] = self.substitutes[out]
            return ExampleTable(features, self.table.targets, self.table.population)
        kept = np.ones(self.table.num_examples, bool)
        kept[self.rows[out]] = False
        return _some_rows(self.table, kept)


class _Chosen(NamedTuple):
    """Rows that were made canaries, in a table whose contents are not yet theirs."""

    table: ExampleTable
    rows: np.ndarray
    owner: np.ndarray
    others: tuple[np.ndarray, ...]


def gradient_canaries(
    data: ExampleTable,
    step: GaussianStep,
    number: int,
    generator: np.random.Generator,
) -> Canaries:
    """Returns canaries for `CanaryLearner`, which reads marks behind the features.

    The features become vectors with one more entry, the mark: ``k + 1`` in the rows of
    canary k, ``-(k + 1)`` in those of the others in its clip unit, so that a clip unit
    that is drawn without the canary contributes the opposite, as the theorem's worst
    case does. A single canary has everybody as others where one more contribution
    takes another's place.

    Args:
      data: of the run.
      step: of the run.
      number: of canaries, >= 1; in different clip units.
      generator: chooses the units.

    Raises:
      ValueError: more canaries than there are units for them.
    """
    chosen = _chosen(data, step, number, generator)
    table = chosen.table
    marks = np.zeros(table.num_examples, np.float32)
    for canary, rows in enumerate(chosen.others):
        marks[rows] = -(canary + 1)
    marks[chosen.rows] = chosen.owner + 1
    flat = table.features.reshape(table.num_examples, -1).astype(np.float32)
    marked = np.concatenate([flat, marks[:, None]], axis=1)
    substitutes = None
    if step.neighboring_relation == "replace_one":
        substitutes = marked[chosen.rows]
        substitutes[:, -1] *= -1
    table = ExampleTable(marked, table.targets, table.population)
    return Canaries(table, chosen.rows, chosen.owner, substitutes, number)


def input_canaries(
    data: ExampleTable,
    step: GaussianStep,
    number: int,
    generator: np.random.Generator,
) -> Canaries:
    """Returns canaries of unusual content, which the model's loss may give away.

    Their features are those of the unit (of an example: of one beside it), each row's
    entries shuffled; their targets, where there are any, are mirrored at the mean and
    three times as far away.

    Args:
      data: of the run.
      step: of the run.
      number: of canaries, >= 1.
      generator: chooses and makes them.

    Raises:
      ValueError: more canaries than there are units for them.
    """
    chosen = _chosen(data, step, number, generator)
    table, rows = chosen.table, chosen.rows
    features = table.features.copy()
    before = features[rows].copy()
    flat = before.reshape(len(rows), -1)
    features[rows] = generator.permuted(flat, axis=1).reshape(before.shape)
    targets = None
    if table.targets is not None:
        targets = table.targets.copy()
        mean = targets.mean()
        targets[rows] = mean - 3 * (targets[rows] - mean)
    replaces = step.neighboring_relation == "replace_one"
    table = ExampleTable(features, targets, table.population)
    return Canaries(table, rows, chosen.owner, before if replaces else None, number)


def _chosen(
    data: ExampleTable,
    step: GaussianStep,
    number: int,
    generator: np.random.Generator,
) -> _Chosen:
    """Rows of randomly chosen units in different clip units."""
    if step.neighboring_relation == "zero_out":
        raise NotImplementedError(
            "canaries for zero_out are not made: a null slot is no row that is left "
            "out; audit the mechanism, or a run under add_remove or replace_one"
        )
    array = _validation.integer_array("num_canaries", number, minimum=1)
    if array.ndim:
        raise ValueError(f"num_canaries must be one number, got {number!r}")
    names = list(data.level_names)
    _validation.choice("privacy_unit", step.privacy_unit, names)
    unit = names.index(str(step.privacy_unit))
    is_example = unit == len(names) - 1
    # A unit of this level has one canary: the clip unit or, lower down, an own parent.
    apart = _clip_place(step, names)
    apart = unit - is_example if apart is None else min(apart, unit - is_example)
    apart = max(apart, 0)
    places = _units_of_rows(data.population)
    homes = np.unique(places[apart])
    if number > len(homes):
        raise ValueError(
            f"num_canaries must be at most {len(homes)}, the number of units of level "
            f"{names[apart]!r}, each of which has room for one, got {number}"
        )
    homes = generator.choice(homes, number, replace=False)
    firsts = [generator.choice(np.flatnonzero(places[apart] == h)) for h in homes]
    if is_example and step.neighboring_relation == "add_remove":
        data, added = _with_copies(data, np.asarray(firsts))
        places = _units_of_rows(data.population)
        groups = [np.asarray([row]) for row in added]
    else:
        groups = [np.flatnonzero(places[unit] == places[unit][f]) for f in firsts]
    rows = np.concatenate(groups)
    owner = np.repeat(np.arange(number), [len(group) for group in groups])
    everyone = number == 1 and not _is_poisson(step)
    others = tuple(
        np.setdiff1d(
            np.arange(data.num_examples)
            if everyone
            else np.flatnonzero(places[apart] == places[apart][group[0]]),
            group,
        )
        for group in groups
    )
    return _Chosen(data, rows, owner, others)


def _clip_place(step: GaussianStep, names: list[str]) -> int | None:
    """The clip unit's place among the data's levels; None where it is formed anew."""
    clip = str(step.clip_unit)
    return names.index(clip) if clip in names else None


def _is_poisson(step: GaussianStep) -> bool:
    """True if the clip units are drawn by coins of their own."""
    if isinstance(step.design, GroupedClasses):
        return isinstance(step.design.episodes, Poisson)
    if not isinstance(step.design, MultistageSampling):
        return False
    names = step.design.level_names
    if step.clip_unit not in names:
        return False
    scheme = step.design.levels[names.index(str(step.clip_unit))]
    return isinstance(scheme, Poisson)


def _units_of_rows(population: Population) -> list[np.ndarray]:
    """For each level, (R,) the place of the unit that each row lies in."""
    counts = population.children_counts
    columns = []
    for level in range(population.num_levels):
        column = np.arange(population.num_units(level + 1))
        for below in counts[level + 1 :]:
            column = np.repeat(column, below)
        columns.append(column)
    return columns


def _with_copies(
    data: ExampleTable, rows: np.ndarray
) -> tuple[ExampleTable, np.ndarray]:
    """The table with a copy of each of these rows behind it, and the copies' rows."""
    rows = np.asarray(rows)
    times = np.ones(data.num_examples, np.int64)
    times[rows] += 1
    source = np.repeat(np.arange(data.num_examples), times)
    ends = np.cumsum(times)
    sizes = np.bincount(
        data.class_places,
        weights=times,
        minlength=len(data.population.children_counts[-1]),
    )
    table = _table(data, source, sizes.astype(np.int64))
    return table, ends[rows] - 1


def _some_rows(data: ExampleTable, kept: np.ndarray) -> ExampleTable:
    """The table with some rows only; emptied units stay."""
    sizes = np.bincount(
        data.class_places[kept], minlength=len(data.population.children_counts[-1])
    )
    return _table(data, np.flatnonzero(kept), sizes)


def _table(data: ExampleTable, rows: np.ndarray, sizes: np.ndarray) -> ExampleTable:
    """The rows as a table, with these numbers of examples in the units above them."""
    counts = (*data.population.children_counts[:-1], sizes)
    tree = Population(counts, data.population.level_names)
    targets = None if data.targets is None else data.targets[rows]
    return ExampleTable(data.features[rows], targets, tree)

"""Whether held-out data and training data have protected units in common."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.config.duplicates import shared_rows
from jaxdp_episodic.trainer.data.table import ExampleTable

# Share of held-out examples up to which those equal to the last bit to ones trained on
# may be so by chance: of the package's glyphs it is 1 of 4,000.
_MOST_EQUAL = 1e-3


def found_in_both(
    held_out: ExampleTable, trained: ExampleTable, step: GaussianStep
) -> tuple[str, str]:
    """Returns what two tables share, and what they may share by chance, in words."""
    if held_out.fingerprint == trained.fingerprint:
        return "all of the training data", ""
    unit, by_chance = str(step.privacy_unit), ""
    if protects_people(step):
        if held_out.owners is None or trained.owners is None:
            return "perhaps people in both: nobody knows whose the examples are", ""
        ours, theirs = held_out.owners.present, trained.owners.present
        unit = PERSON
        if ours.dtype.kind != theirs.dtype.kind:
            return "perhaps people in both: their names are of two kinds", ""
    else:
        same = shared_rows(held_out, trained)
        if same:
            found = f"{len(same):,} examples (rows) in both, such as row {same[0]}"
            if len(same) > _MOST_EQUAL * held_out.num_examples:
                return found, ""
            by_chance = found
        ours, theirs = (_names_of(table, unit) for table in (held_out, trained))
    both = _in_both(ours, theirs)
    if both:
        return f"{len(both):,} {unit!r} units in both, such as {both[0]!r}", by_chance
    return "", by_chance


def check_held_out(split: str, data: ExampleTable, trained: ExampleTable) -> None:
    """Warns of names and examples in both; refuses the training data themselves."""
    if data.fingerprint == trained.fingerprint:
        raise ValueError(
            f"held-out data ({split!r}) must be other data than those trained on, got "
            "the same units with the same examples"
        )

    def warn(what: str, common: Sequence[Any], of: int) -> None:
        if common:
            warnings.warn(
                f"{split!r} has {len(common):,} of its {of:,} {what} in common with "
                f"the training data, such as {common[0]!r}: where these are the same, "
                "its score is not that of held-out data",
                stacklevel=3,
            )

    if data.owners is not None and trained.owners is not None:
        people = data.owners.present
        warn("people", _in_both(people, trained.owners.present), len(people))
    if len(data.level_names) > 1 and data.level_names[-2] in trained.level_names:
        ours, theirs = (
            _names_of(one, one.level_names[-2:][0]) for one in (data, trained)
        )
        warn(f"{data.level_names[-2]} names", _in_both(ours, theirs), ours.size)
    warn("examples (rows)", shared_rows(data, trained), len(data.features))


def _in_both(ours: np.ndarray, theirs: np.ndarray) -> list[Any]:
    """The names in both, sorted; names of different types are never equal."""
    if ours.dtype.kind != theirs.dtype.kind:
        return []
    return np.intersect1d(ours, theirs).tolist()


def protects_people(step: GaussianStep) -> bool:
    """Returns whether the step protects a person with all of their examples."""
    return step.privacy_unit == PERSON or isinstance(step.design, PeopleBlocks)


def _names_of(data: ExampleTable, unit: str) -> np.ndarray:
    """Names of the units of a level; empty if they are only numbered."""
    names, ids = data.level_names, data.population.unit_ids or ()
    level = names.index(unit) if unit in names else len(ids)
    found = np.asarray(ids[level]) if level < len(ids) else np.empty(0)
    is_count = np.array_equal(found, np.arange(len(found)))
    return found[:0] if is_count else found

"""Whether held-out data have anybody in common with those trained on."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run.checks import shared_rows

# Share of held-out examples up to which those equal to the last bit to ones trained on
# may be so by chance: of the package's glyphs it is 1 of 4,000.
_MOST_EQUAL = 1e-3


def found_in_both(
    held_out: ExampleTable, trained: ExampleTable, step: GaussianStep
) -> tuple[str, str]:
    """Returns what of a step's protected units two tables share, in words.

    Units are told apart by their names, where they have any, and by their examples;
    people by their names alone, and must have some.

    Returns:
      What is in both, "" if nothing is; and what may be there by chance.
    """
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
    if ours.dtype.kind == theirs.dtype.kind:
        both = np.intersect1d(ours, theirs)
        if both.size:
            some = f"{both.size:,} {unit!r} units in both"
            return f"{some}, such as {both[0].item()!r}", by_chance
    return "", by_chance


def protects_people(step: GaussianStep) -> bool:
    """Whether somebody is protected with all that is hers."""
    return step.privacy_unit == PERSON or isinstance(step.design, PeopleBlocks)


def _names_of(data: ExampleTable, unit: str) -> np.ndarray:
    """Names of the units of a level; none where they are only counted."""
    names, ids = data.level_names, data.population.unit_ids or ()
    level = names.index(unit) if unit in names else len(ids)
    found = np.asarray(ids[level]) if level < len(ids) else np.empty(0)
    is_count = np.array_equal(found, np.arange(len(found)))
    return found[:0] if is_count else found

"""Which unit of a step is clipped, which is protected, and what small ones mean."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import Sampling, epoch_scheme
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.rates import PathRates
from jaxdp_episodic.accountant.describe.schemes import (
    EPISODE,
    PERSON,
    RESERVED_LEVEL_NAME,
    MultistageSampling,
    refuse_epochs,
)

SMALL_UNITS = ("error", "keep")


def checked_clip_unit(design: Sampling, clip_unit: str | None) -> str:
    """Returns the clip unit's level name, where it need not be named by default."""
    levels = design.level_names
    episodic = not isinstance(design, MultistageSampling)
    default = EPISODE if episodic else levels[0] if len(levels) == 1 else None
    clip_unit = default if clip_unit is None else clip_unit
    if clip_unit is None:
        raise ValueError(
            f"clip_unit must be one of {(RESERVED_LEVEL_NAME, *levels)} (whose "
            "contribution is clipped?), got None"
        )
    check_clip_unit(design, clip_unit)
    return clip_unit


def check_clip_unit(design: Sampling, clip_unit: str) -> None:
    """Refuses what is no level and not "step"; episodic designs clip episodes only."""
    levels = design.level_names
    _validation.choice("clip_unit", clip_unit, (RESERVED_LEVEL_NAME, *levels))
    if not isinstance(design, MultistageSampling) and clip_unit != EPISODE:
        raise NotImplementedError(
            f"clip_unit={clip_unit!r} with {type(design).__name__} has no theorem "
            "here; covered: clip_unit='episode'"
        )
    if clip_unit != levels[0]:
        refuse_epochs(f"clip_unit={clip_unit!r}", epoch_scheme(design))


def checked_privacy_unit(design: Sampling, privacy_unit: str | None) -> str:
    """Returns the privacy unit: a level's name, or a person's, on many paths."""
    levels = design.level_names
    in_blocks = isinstance(design, PeopleBlocks)
    default = PERSON if in_blocks else levels[-1]
    unit = default if privacy_unit is None else privacy_unit
    _validation.choice("privacy_unit", unit, (*levels, PERSON))
    if unit == PERSON:
        return unit
    if in_blocks:
        raise NotImplementedError(
            f"privacy_unit={unit!r} with PeopleBlocks has no theorem here; covered: "
            f"{PERSON!r}, of whom it is a part"
        )
    if not isinstance(design, MultistageSampling) and unit == EPISODE:
        raise NotImplementedError(
            f"privacy_unit='episode' with {type(design).__name__}: an episode "
            f"is drawn, not owned by anybody; covered: {levels[1:]}"
        )
    return unit


def checked_small_units(small_units: str | None, neighboring_relation: str) -> str:
    """Returns what is done with small units; the relation says what by default."""
    if small_units is None:
        return "error" if neighboring_relation == "replace_one" else "keep"
    _validation.choice("small_units", small_units, SMALL_UNITS)
    if neighboring_relation == "add_remove" and small_units == "error":
        raise ValueError(
            "small_units must be 'keep' under add_remove, got 'error': whether a unit "
            "is refused for its size would depend on who is in it"
        )
    return small_units


def refuse_small_units(
    rates: PathRates, names: tuple[str, ...], population: Population | None
) -> None:
    """Refuses units smaller than a draw, naming one."""
    for level, small in enumerate(rates.clipped):
        if not np.any(small):
            continue
        draw, group = rates.draw_sizes[level], rates.group_sizes[level]
        assert draw is not None and group is not None  # clipped says so
        draw, group, small = np.broadcast_arrays(draw, group, small)
        first = np.unravel_index(int(np.argmax(small)), small.shape)
        where, paths = "", rates.paths
        if population is not None and paths is not None and level:
            witness = int(paths.witness_level[first[-1]])
            if witness:  # else the root itself is empty
                index = int(paths.witness_index[first[-1]])
                unit = list(population.describe_path(witness, index).items())
                where = " in " + ", ".join(f"{k} {v!r}" for k, v in unit[:level])
        raise ValueError(
            f"level {names[level]!r}: size must be at most the population, got "
            f"size={draw[first]} of {group[first]}{where}; "
            "small_units='keep', of the step, lets such a unit give all it has"
        )

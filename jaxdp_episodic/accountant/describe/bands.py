"""Correlated noise in bands: the groups of units, and what a step draws from one."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import CLASS, GroupedClasses, Sampling
from jaxdp_episodic.accountant.describe.schemes import (
    EPISODE,
    OWNED,
    PERSON,
    MultistageSampling,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ONE, Spec


@dataclass(frozen=True, eq=False)
class Bands(Spec):
    """Correlated noise: later steps partly cancel it, and groups of units take turns.

    A fixed rule assigns every unit of one level to one of ``count`` groups, and step
    ``t`` samples only from group ``t % count``. A share of the noise of each step is
    subtracted from the next ``count - 1`` steps. A unit takes part in every
    ``count``-th step at most, so a run costs at most ``ceil(num_steps / count)`` steps
    of the unit's group. See docs/theory.md, "Correlated noise".

    Preconditions, in addition to those of the step and its sampling:

    * *The rule* uses only public facts of the unit, and never changes. Under
      ``add_remove`` it is a hash of the unit's public id, or the place on a public
      list; otherwise the place of the unit's slot within its parent. It may also be
      drawn once a run, in secret and independently of the data. A rule that uses the
      unit's content, or which units are present, is *not* covered.
    * *One noise multiplier* in all steps, and a number of steps fixed in advance.
    * *Fresh randomness* in every step (with `RandomAllocation`, in every epoch of every
      group).

    Attributes:
      count: number of bands and of groups, whole number >= 1; 1 is independent noise.
      level: the level whose units are grouped, at or above the protected level;
        "person" for `PeopleBlocks`.
      horizon: number of steps that the optimizer remembers, >= 1, or inf. The
        coefficients are fitted to it; the guarantee does not depend on it.

    Raises:
      ValueError: a number out of range.
    """

    singles = {
        "count": AT_LEAST_ONE,
        "horizon": _validation.reals("be >= 1", lambda a: a >= 1),
    }

    count: int
    _: KW_ONLY
    level: str
    horizon: float = 30.0

    def check_values(self) -> None:
        """Refuses a level that is no string."""
        _validation.instance("level", self.level, str, "the name of a level")


def grouped_levels(design: Sampling, privacy_unit: str) -> tuple[str, ...]:
    """Returns the levels whose units may be grouped."""
    if isinstance(design, PeopleBlocks):
        return (PERSON,)
    if privacy_unit in OWNED:
        return ()
    names = design.level_names[: design.level_names.index(privacy_unit) + 1]
    # The first level of an episodic design is the episodes, which are not data.
    return names if isinstance(design, MultistageSampling) else names[1:]


def in_group(
    design: Sampling, bands: Bands, privacy_unit: str, relation: str
) -> Sampling:
    """Returns the sampling within the smallest group."""
    count, level = bands.count, bands.level
    covered = grouped_levels(design, privacy_unit)
    if not covered and count > 1:
        raise NotImplementedError(
            f"bands with privacy_unit={privacy_unit!r}: the examples of one person may "
            "lie in several groups, which has no theorem; covered: PeopleBlocks with "
            "level='person', or people as a level of the sampling"
        )
    if covered and level not in covered:
        raise NotImplementedError(
            f"groups must be of level {' or '.join(map(repr, covered))} with "
            f"privacy_unit={privacy_unit!r}, so that a protected unit lies in one "
            f"group, got {level!r}"
        )
    if count == 1:
        return design
    if isinstance(design, PeopleBlocks):
        people = _part(design.num_people, count, PERSON, design.people_per_block)
        return _checked_episodes(dataclasses.replace(design, num_people=people))
    if isinstance(design, GroupedClasses) and level == CLASS:
        classes = _part(design.num_classes, count, CLASS, design.ways)
        scheme = design.classes
        if isinstance(scheme, WithoutReplacement):
            _part(design.num_classes, count, CLASS, scheme.size)
        if scheme is not None and scheme.population is not None:
            scheme = dataclasses.replace(scheme, population=classes)
        design = dataclasses.replace(design, num_classes=classes, classes=scheme)
        return _checked_episodes(design)
    scheme = next(one for one in design.schemes if one.name == level)
    if not isinstance(scheme, WithoutReplacement):
        return design  # it states the probability, or epoch, within a group
    if relation == "add_remove":
        raise NotImplementedError(
            f"bands by level {level!r}, sampled without replacement, under add_remove: "
            "the sizes of groups are private and have no public lower bound; covered: "
            "a Poisson scheme or RandomAllocation there, zero_out and replace_one"
        )
    if scheme.population is None:
        raise ValueError(
            f"bands by level {level!r} need its population, the number of units to be "
            "divided among the groups, got None"
        )
    # If count does not divide the population, groups differ in size by one.
    exact = scheme.population_is_exact and not (
        _validation.is_traced(scheme.population)
        or np.any(np.mod(scheme.population, count))
    )
    return design.with_scheme(
        dataclasses.replace(
            scheme,
            population=_part(scheme.population, count, level, scheme.size),
            population_is_exact=exact,
        )
    )


def _part(number: Any, count: int, level: str, least: Any) -> Any:
    """Returns the size of the smallest group; refuses one below ``least``."""
    part = number // count
    if any(map(_validation.is_traced, (part, least))):
        return part  # checked once the numbers are known
    if np.any(np.less(part, least)):
        raise ValueError(
            f"bands must leave every group as many units of level {level!r} as a step "
            f"samples, {np.max(least)}, got {count} groups of {np.min(number)}: the "
            f"smallest has {np.min(part)}"
        )
    return part


def _checked_episodes(design: GroupedClasses | PeopleBlocks) -> Sampling:
    """Returns the design; refuses a group with fewer episodes than a step draws."""
    episodes = design.episodes
    if isinstance(episodes, WithoutReplacement):
        _part(design.num_possible_episodes, 1, EPISODE, episodes.size)
    return design

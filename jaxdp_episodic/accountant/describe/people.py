"""Bounds for persons whose examples may be in many places of the tree."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import GroupedClasses, Sampling
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    ORIGINAL,
    OWNED,
    PERSON,
    MultistageSampling,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ONE, Spec

# The bounds, from the last level of the sampling upwards.
BOUNDS = ("examples", "classes", "tasks")


@dataclass(frozen=True, eq=False)
class PersonBounds(Spec):
    """Public bounds on one person's examples, for ``privacy_unit="person"``.

    A person owns a set of examples anywhere in the tree: in several classes and several
    tasks. Each field is a *public upper bound* that holds for everybody; the actual
    numbers may stay private. The guarantee does not hold for a person beyond the
    bounds. So enforce them before training, by a rule that looks at one person alone;
    every example has one owner. Under "zero_out" and "replace_one" the rule looks at
    the person's slots only, never at their content.

    With ``privacy_unit="original"`` the bounds are those of the copies of one example.

    A sampling of one level needs ``examples``; one of two levels ``examples`` and
    ``classes``; one of three levels all bounds; `GroupedClasses` the first two. A bound
    without a level in the sampling raises, because it would change the meaning of the
    others.

    Attributes:
      examples: largest number of one person's examples within one unit of the level
        above examples (a class), or in all without such a level. Whole number >= 1
        (scalar or array), as are all bounds.
      classes: largest number of units of the level above examples that have examples of
        one person, within one unit of the level above them (a task), or in all without
        such a level.
      tasks: largest number of units of the level above classes that have examples of
        one person.

    Raises:
      ValueError: no bound at all.
    """

    numeric = dict.fromkeys(BOUNDS, AT_LEAST_ONE)

    _: KW_ONLY
    examples: ArrayLike | None = None
    classes: ArrayLike | None = None
    tasks: ArrayLike | None = None

    def check_values(self) -> None:
        """Refuses a spec without any bound."""
        if not self.numbers:
            raise ValueError(f"give at least one of {BOUNDS}, got none")


def levels_of_people(sampling: Sampling) -> tuple[Scheme | None, ...]:
    """Returns the schemes of the levels in `BOUNDS`, the last level first."""
    if isinstance(sampling, GroupedClasses):
        return sampling.examples, None
    multistage = isinstance(sampling, MultistageSampling)
    drawn = sampling if multistage else sampling.sampling
    levels = () if drawn is None else drawn.levels
    if len(levels) > len(BOUNDS):
        raise NotImplementedError(
            f"people, or copies of examples, with {len(levels)} levels have no theorem "
            f"here; covered: up to {len(BOUNDS)} levels, the last one of examples"
        )
    return levels[::-1]


def bounds_with_copies(
    sampling: Sampling,
    privacy_unit: str | None,
    people: PersonBounds | None,
    copies: int,
) -> tuple[str | None, PersonBounds | None]:
    """Returns privacy unit and bounds if each class has ``copies`` copies.

    Copies of a class are other classes of the same unit one level up. Without a level
    of classes, copies are examples.
    """
    names = sampling.level_names
    if isinstance(sampling, PeopleBlocks):
        privacy_unit = PERSON
    if copies == 1 or (privacy_unit in names and privacy_unit not in names[-2:]):
        return privacy_unit, people  # all copies are in one unit
    if privacy_unit in names[:-1]:
        raise NotImplementedError(
            f"privacy_unit={privacy_unit!r} with rotations has no theorem here: its "
            f"copies are other units; covered: {names[-1]!r}, {PERSON!r} and "
            f"{names[:-2]}"
        )
    levels = levels_of_people(sampling)
    numbers = {name: 1 for name in BOUNDS[: len(levels)]}
    if privacy_unit == PERSON:
        numbers = {} if people is None else dict(people.numbers)
    # Without classes all copies are examples of the same unit.
    copied = "classes" if len(levels) > 1 else "examples"
    if copied in numbers:
        numbers[copied] = numbers[copied] * copies
    bounds = PersonBounds(**numbers) if numbers else None
    return PERSON if privacy_unit == PERSON else ORIGINAL, bounds


def check_people(
    sampling: Sampling,
    people: Any,
    privacy_unit: str,
    population: Population | None,
    neighboring_relation: str,
) -> None:
    """Refuses bounds that are missing, have no level or contradict the design."""
    kinds = PersonBounds | None
    _validation.instance("people", people, kinds, "a PersonBounds or None")
    if privacy_unit not in OWNED:
        if people is not None:
            raise ValueError(
                f"people must be None unless privacy_unit is one of {OWNED}, "
                f"got privacy_unit={privacy_unit!r}"
            )
        return
    is_grouped = isinstance(sampling, GroupedClasses)
    if is_grouped and sampling.classes is not None:
        raise NotImplementedError(
            f"privacy_unit={privacy_unit!r} with GroupedClasses(classes=...) has no "
            "theorem here: a sampled class affects how others are grouped; covered: "
            "GroupedClasses(episodes=...)"
        )
    if isinstance(sampling, PeopleBlocks) and population is not None:
        raise NotImplementedError(
            "PeopleBlocks with a Population has no theorem here; state the sizes "
            "within a block in sampling="
        )
    schemes = levels_of_people(sampling)
    if isinstance(sampling, PeopleBlocks) and people is None:
        return  # every episode of the block may hold the person
    needed = BOUNDS[: len(schemes)]
    given = () if people is None else tuple(people.numbers)
    missing = tuple(name for name in needed if name not in given)
    if missing or people is None:
        raise ValueError(
            f"privacy_unit={privacy_unit!r} needs people=PersonBounds(...) with a "
            f"public bound on {' and '.join(missing)}, got {given or None}"
        )
    needless = tuple(name for name in given if name not in needed)
    if needless:
        raise ValueError(
            f"people must not bound {' and '.join(needless)}: this sampling has no "
            f"such level; its bounds are {needed}"
        )
    # (bound, its largest value, the source of this limit).
    limits: list[tuple[str, Any, str]] = [
        (name, scheme.population, f"the exact population of level {scheme.name!r}")
        for name, scheme in zip(needed, schemes, strict=True)
        if isinstance(scheme, WithoutReplacement) and scheme.population_is_exact
    ]
    if is_grouped:
        limits.append(("classes", sampling.num_classes, "num_classes"))
    if population is not None:
        # Episodes are no level of the tree.
        above = int(not isinstance(sampling, MultistageSampling))
        counts = population.children_counts[: len(sampling.level_names) - above]
        for name, count in zip(BOUNDS, reversed(counts), strict=False):
            if name != "examples" or neighboring_relation != "add_remove":
                most = max(int(np.max(count, initial=0)), 1)
                limits.append((name, most, "the Population"))
    for name, most, what in limits:
        bound = people.numbers[name]
        if any(map(_validation.is_traced, (bound, most))):
            continue  # checked once the numbers are known
        if np.any(np.greater(bound, most)):
            raise ValueError(
                f"people.{name} must be at most {most!r} ({what}), got {bound!r}"
            )

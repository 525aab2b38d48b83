"""How many drawn clip units hold a person, computed for audits alone.

From the schemes and bounds as they are written, by the plain formulas of binomial and
hypergeometric draws; the accountant's laws are others, so that an audit finds a fault
in these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.people import BOUNDS
from jaxdp_episodic.accountant.describe.schemes import Poisson, Scheme
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep

# Clip units of one person that are counted; an audit's tables have no more branches.
_MOST_UNITS = 512
_NEGLIGIBLE = 1e-15

Law = dict[int, float]


def person_contributions(
    step: GaussianStep,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what a step may sum to where nobody but one person contributes.

    Each drawn clip unit that holds her contributes +1; without her 0, or -1 if she is
    replaced. She has as much as her bounds allow. Of blocks by epochs it is the step
    which her block's episode is given.

    Returns:
      (c,) chances, those below 1e-15 left out, and the (c,) sums with her and without
      her, in clip norms.

    Raises:
      NotImplementedError: a design in which she changes several steps of an epoch, or
        whose law has no such formula: `audit_person` draws these.
    """
    law = _number_of_units(step)
    numbers = np.array(sorted(n for n, p in law.items() if p > _NEGLIGIBLE), float)
    chances = np.array([law[int(number)] for number in numbers])
    replaced = -1.0 if step.neighboring_relation == "replace_one" else 0.0
    return chances / chances.sum(), numbers, replaced * numbers


def _number_of_units(step: GaussianStep) -> Law:
    """How many drawn clip units hold her."""
    design: Any = step.design
    bounds = {} if step.people is None else step.people.numbers
    bounds = {name: int(np.asarray(number)) for name, number in bounds.items()}
    is_epochs = epoch_scheme(design) is not None
    if isinstance(design, PeopleBlocks):
        inside: Any = design.sampling
        held = _held(_drawn_levels(step, inside.levels, bounds)) if bounds else 1.0
        number = int(np.asarray(design.episodes_per_block))
        if not is_epochs:
            drawn = _drawn(design.episodes, number, int(design.num_possible_episodes))
            return _thinned(drawn, held)
        if number == 1:
            return _binomial(1, held)
    elif not is_epochs and isinstance(design, IndependentEpisodes):
        held = _held(_drawn_levels(step, design.sampling.levels, bounds))
        return _binomial(int(np.asarray(design.num_episodes)), held)
    elif not is_epochs and isinstance(design, GroupedClasses):
        classes, ways = (int(np.asarray(n)) for n in (design.num_classes, design.ways))
        if bounds["classes"] == classes and design.episodes is not None:
            below = _drawn_levels(step, (design.examples,), bounds)
            held = 1 - (1 - _held(below)) ** ways
            drawn = _drawn(design.episodes, classes // ways, classes // ways)
            return _thinned(drawn, held)
    elif not is_epochs:
        levels = _drawn_levels(step, design.levels, bounds)
        clip = 0
        if step.clip_unit != STEP:
            clip = design.level_names.index(str(step.clip_unit)) + 1
        law: Law = {1: 1.0}
        for level in levels[:clip]:
            law = _below(law, level)
        return _thinned(law, _held(levels[clip:]))
    raise NotImplementedError(
        "of this design an audit of a person has no table of contributions; covered: "
        "jaxdp_episodic.audit.audit_person, which draws it"
    )


class _Level:
    """How many of her ``bound`` children of a drawn unit are drawn."""

    def __init__(self, scheme: Scheme, bound: int, group: int | None) -> None:
        self.law = _drawn(scheme, bound if group is None else min(bound, group), group)
        self.rate = None
        if isinstance(scheme, Poisson):
            self.rate = float(np.asarray(scheme.sampling_probability))
        self.bound = bound


def _drawn_levels(
    step: GaussianStep, schemes: Iterable[Scheme], bounds: dict[str, int]
) -> list[_Level]:
    """The levels of her examples, top to bottom; groups as small as any path's."""
    schemes = tuple(schemes)
    found = []
    for up, scheme in enumerate(reversed(schemes), start=1):
        group = scheme.population
        if isinstance(scheme, Poisson):
            group = None
        elif group is None:
            sizes = step.path_rates.group_sizes[-up]
            assert sizes is not None  # a draw without replacement has them
            group = np.min(sizes)
        size = None if group is None else int(np.asarray(group))
        found.append(_Level(scheme, bounds[BOUNDS[up - 1]], size))
    return found[::-1]


def _drawn(scheme: Any, of_hers: int, group: int | None) -> Law:
    """How many of hers are drawn among a group, by coins or without replacement."""
    if isinstance(scheme, Poisson):
        return _binomial(of_hers, float(np.asarray(scheme.sampling_probability)))
    assert group is not None
    size = min(int(np.asarray(scheme.size)), group)
    total, rest = math.comb(group, size), group - of_hers
    return {
        j: math.comb(of_hers, j) * math.comb(rest, size - j) / total
        for j in range(max(0, size - rest), min(of_hers, size) + 1)
    }


def _binomial(number: int, rate: float) -> Law:
    if number > _MOST_UNITS:
        raise NotImplementedError(
            f"an audit simulates at most {_MOST_UNITS} clip units of one person, got "
            f"up to {number:,}"
        )
    return {
        j: math.comb(number, j) * rate**j * (1 - rate) ** (number - j)
        for j in range(number + 1)
    }


def _below(law: Law, level: _Level) -> Law:
    """How many are drawn below a random number of drawn units."""
    found: Law = {}
    for number, chance in law.items():
        one: Law = {0: 1.0}
        if level.rate is not None:
            one = _binomial(number * level.bound, level.rate)
        else:
            for _ in range(number):
                one = _sum(one, level.law)
        for total, share in one.items():
            found[total] = found.get(total, 0.0) + chance * share
    return found


def _sum(one: Law, other: Law) -> Law:
    found: Law = {}
    for a, chance in one.items():
        for b, share in other.items():
            found[a + b] = found.get(a + b, 0.0) + chance * share
    return found


def _held(levels: list[_Level]) -> float:
    """The chance that a drawn unit shows one of her examples at least."""
    chance = 1.0
    for level in reversed(levels):
        chance = 1 - sum(p * (1 - chance) ** j for j, p in level.law.items())
    return chance


def _thinned(law: Law, chance: float) -> Law:
    """Each of a random number is kept with this chance."""
    found: Law = {}
    for number, weight in law.items():
        for kept, share in _binomial(number, chance).items():
            found[kept] = found.get(kept, 0.0) + weight * share
    return found

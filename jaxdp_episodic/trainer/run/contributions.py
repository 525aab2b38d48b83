"""How many contributions of a run are complete: shown, warned of or refused.

All of it follows from the sizes of the data, which may be private: never released.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import CLASS, GroupedClasses, Sampling
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import WithoutReplacement
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.trainer.draw.complete import CompleteUnits, Needs
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.learners.episode import Learner
from jaxdp_episodic.trainer.run.checks import level_of_slots
from jaxdp_episodic.trainer.run.run_files import PRIVATE

LEAST_SHARE = 1 / 3  # of the drawn contributions to be complete; below it one is warned
LEAST_IN_RUN = 1.0  # complete contributions in all; below it a run is refused
_BETTER = 1.1  # by this factor another setting must raise the share to be named


def needs_of(learner: Learner, shots: int) -> Needs:
    """Returns what an episode of a learner needs, to be complete."""
    has_episodes = getattr(learner, "couples_examples", True)
    return Needs.of(shots, learner.is_regression, has_episodes)


def checked(
    sampler: EpisodeSampler, needs: Needs, budget: PrivacyBudget
) -> CompleteUnits | None:
    """Returns how many contributions are complete; warns of few, refuses below one."""
    if not budget.takes_steps:
        return None
    units, step = sampler.complete_units(needs), budget.step
    number = budget.num_steps - len(budget.before)
    is_refused = not units.is_seen or units.most * number < LEAST_IN_RUN
    if units.share >= LEAST_SHARE and not is_refused:
        return units
    said = (
        f"sampling draws {in_words(units, str(step.clip_unit), number)}; any other "
        "contributes nothing, or little"
    )
    said += better_settings(units.share, step, sampler.population, needs)
    if is_refused:
        raise ValueError(
            f"{said}. A run must expect at least {LEAST_IN_RUN:g}: this one would "
            "spend its budget on noise alone; nothing was charged"
        )
    warnings.warn(said, stacklevel=3)
    return units


def in_words(units: CompleteUnits, clip_unit: str, num_steps: int) -> str:
    """Returns how many contributions are complete, in a step and in the run."""
    about = "" if units.complete == units.drawn else "about "
    in_all = units.complete * num_steps
    return (
        f"{units.drawn:.4g} contributions ({clip_unit}) a step on average, of which "
        f"{about}{_shown(units.complete, 2)} are complete, {_shown(in_all, 3)} in "
        f"{num_steps:,} steps"
    )


def _shown(number: float, digits: int) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.{digits}g}"


def found_in(records: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Returns how many contributions a log drew, and how many were complete."""
    noted = [r[PRIVATE] for r in records if "num_complete" in r.get(PRIVATE, {})]
    if not noted:
        return None
    drawn, complete = (
        sum(int(one[name]) for one in noted) for name in ("num_units", "num_complete")
    )
    return drawn, complete


def better_settings(
    share: float, step: GaussianStep, population: Population, needs: Needs
) -> str:
    """Returns a clause: which settings have more complete contributions."""
    other = ways_out(step, population, needs)
    better = [f"{v:.2g} {how}" for how, v in other.items() if v > _BETTER * share]
    if not better:
        return ""
    return f". The complete share is {share:.2g}; it would be {', '.join(better)}"


def ways_out(
    step: GaussianStep, population: Population, needs: Needs
) -> dict[str, float]:
    """Returns the share of complete contributions under other settings, by advice."""
    design: Any = step.design
    if isinstance(design, PeopleBlocks):
        return {}
    slots, last = level_of_slots(step), design.schemes[-1]
    is_grouped = isinstance(design, GroupedClasses)
    found = {}
    if slots is not None:  # the units that there are in place of slots
        if is_grouped and slots == CLASS:
            other = dataclasses.replace(design, num_classes=population.num_units(1))
        else:
            (scheme,) = (one for one in design.schemes if one.name == slots)
            other = design.with_scheme(dataclasses.replace(scheme, population=None))
        how = 'under neighboring_relation = "add_remove"'
        found[how] = _share(step, other, population, None, needs)
    is_sized = isinstance(last, WithoutReplacement)
    if is_sized and int(np.asarray(last.size)) > needs.examples:
        fewer = design.with_scheme(dataclasses.replace(last, size=needs.examples))
        how = f"with size = {needs.examples} of {last.name!r} in place of {last.size}"
        found[how] = _share(step, fewer, population, slots, needs)
    if is_grouped and int(np.asarray(design.ways)) > 2:
        two = dataclasses.replace(design, ways=2)
        how = f"with ways = 2 in place of {design.ways}"
        found[how] = _share(step, two, population, slots, needs)
    if is_grouped and slots is not None and slots == last.name:
        found |= _without_small(step, population, needs)
    return found


def _share(
    step: GaussianStep,
    design: Sampling,
    population: Population,
    slots_of: str | None,
    needs: Needs,
) -> float:
    sampler = EpisodeSampler(
        design,
        population,
        clip_unit=str(step.clip_unit),
        population_is_accounted=True,
        privacy_unit=step.privacy_unit,
        slots_of=slots_of,
    )
    return sampler.complete_units(needs).share


def _without_small(
    step: GaussianStep, population: Population, needs: Needs
) -> dict[str, float]:
    """Without classes so small that too few contributions would be complete."""
    design: Any = step.design
    ways, sizes = int(np.asarray(design.ways)), population.children_counts[1]

    @functools.cache
    def share(fewest: int) -> float:
        kept = sizes[sizes >= fewest]
        fewer = dataclasses.replace(design, num_classes=len(kept))
        tree = Population.from_sizes(kept.tolist(), level_names=population.level_names)
        return _share(step, fewer, tree, level_of_slots(step), needs)

    possible = [n for n in np.unique(sizes).tolist() if np.sum(sizes >= n) >= ways]
    # Larger classes are complete more often.
    place = bisect.bisect_left(possible, LEAST_SHARE, key=share)
    if place == len(possible):
        return {}
    how = (
        f"without the {np.sum(sizes < possible[place])} classes of fewer than "
        f"{possible[place]} (leave out such as are publicly known to be small)"
    )
    return {how: share(possible[place])}

"""What a user should know about a run besides its numbers, in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import GroupedClasses, epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    Poisson,
    RandomAllocation,
    Scheme,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import STEP, ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.accountant.report.protected import bounds_in_words
from jaxdp_episodic.accountant.report.rounding import upward


def caveats_of(
    run: ComposedSteps,
    level_runs: Mapping[str, ComposedSteps],
    epsilon_by_level: Mapping[str, float | str],
    delta: float,
) -> tuple[str, ...]:
    """Returns what the numbers of a report do not show at first sight.

    For each level, top to bottom: its epsilon, or why it has none; and the run with it
    as the privacy unit, where there is one.
    """
    found = []
    if any(part.noise_multiplier == 0 for part in run.gaussian_steps):
        found.append("noise_multiplier is 0: the sum is released as it is")
    return (
        *found,
        *_everybody_drawn(level_runs),
        *_large_delta(level_runs, delta),
        *_unprotected_levels(run, level_runs, epsilon_by_level),
        *_private_sizes(run),
        *_shuffled_epochs(run, delta),
    )


def preconditions_of(run: ComposedSteps, *, chooses: bool = False) -> tuple[str, ...]:
    """Returns what must be true for the guarantee and cannot be checked.

    Of a run that ``chooses`` its steps on the way the run has each of them.
    """
    first = run.gaussian_steps[0]
    clips = dict.fromkeys(part.clip_unit for part in run.gaussian_steps)
    clipped = " or ".join("step" if clip == STEP else f"{clip!r}" for clip in clips)
    found = [
        f"Locality: the clipped contribution of each {clipped} depends on nothing but "
        "what was drawn of it, the current model, public data and fresh randomness. "
        "Where examples interact (support and query, a softmax over classes, batch "
        "statistics), they do so within one clip unit.",
        *_who_is_where(first),
        "Choices: whatever chose saw releases and public facts alone; what could be "
        "chosen, its noise, rates and budget were fixed before the first release."
        if chooses
        else "Fixed in advance: rates, noise and the number of steps do not react to "
        "anything that was released.",
        _fresh_draws(run),
    ]
    schemes = [scheme for part in run.gaussian_steps for scheme in part.design.schemes]
    if any(isinstance(scheme, Poisson) for scheme in schemes):
        found.append(
            "Poisson draws: everything drawn is processed, without a cap, and an empty "
            "draw still releases noise."
        )
    if any(isinstance(scheme, RandomAllocation) for scheme in schemes):
        found.append(
            "Sums of bins: what a step releases is the sum over its bin, or that "
            "divided by a constant, never by the realised number; an empty bin still "
            "releases noise."
        )
    if any(isinstance(part.design, GroupedClasses) for part in run.gaussian_steps):
        how_often = "epoch" if _epoch_schemes(run) else "step"
        found.append(
            "Grouping: the partition of classes into episodes is drawn afresh in every "
            f"{how_often} and does not look at the data."
        )
    unit = first.privacy_unit
    if first.neighboring_relation == "replace_one":
        found.append(
            f"Replacement: one {unit!r} changes its content in place; a move to "
            "another group is a removal and an addition, and not covered."
        )
    elif first.neighboring_relation == "zero_out":
        is_block = isinstance(first.design, PeopleBlocks)
        slots = (
            first.design.level_names[-1] if unit == PERSON and not is_block else unit
        )
        found.append(
            f"Slots: how many slots for {slots!r} there are is public, draws are made "
            "among all of them, filled or not, and a contribution whose drawn content "
            "holds a null one is 0 as a whole. Masking the null is not enough. An "
            "epsilon at another level supposes the same of its slots."
        )
    elif any(isinstance(scheme, WithoutReplacement) for scheme in schemes):
        found.append(
            "Sizes: where children are drawn without replacement, their number is that "
            "in the larger of two neighbouring data sets or a lower bound of it, and "
            "no unit is left out for its size."
        )
    return tuple(found)


def _who_is_where(step: GaussianStep) -> list[str]:
    """What must be true of where a protected unit's data are."""
    unit, last = step.privacy_unit, step.design.level_names[-1]
    looks = "data" if step.neighboring_relation == "add_remove" else "slots"
    bounds = (
        f"Bounds of people: every {last!r} has one owner, and nobody owns more than "
        f"this: {bounds_in_words(step.people)}. These bounds are public, not read from "
        "the data, and enforced before training by a rule that looks at one person's "
        f"{looks} alone. Whoever is beyond them is not protected by this epsilon."
    )
    if isinstance(step.design, PeopleBlocks):
        blocks = (
            "Blocks: the partition of people into blocks looks at nobody's data, and "
            "nobody's leaving moves another one. An episode takes its data, and makes "
            "all its choices, from its own block and public facts."
        )
        among = (
            "Draws within blocks: each episode draws classes and examples afresh among "
            "public slots, filled or not, without a look at what is in them."
        )
        return [blocks] if step.people is None else [blocks, bounds, among]
    above = last if unit == PERSON else unit
    lists = (
        f"Public lists: the units above the level {above!r} are public. One that is "
        "emptied stays listed, is drawn at the same rate and contributes zero."
    )
    if unit != PERSON:
        return [
            lists,
            f"One path: every {unit!r} lies under exactly one path of the tree.",
        ]
    return [lists, bounds]


def _fresh_draws(run: ComposedSteps) -> str:
    """What must be drawn anew, and how often."""
    if not _epoch_schemes(run):
        return (
            "Fresh draws: every step draws anew and secretly; the same draws for an "
            "epoch are another design (RandomAllocation, ShuffledEpochs)."
        )
    return (
        "Fresh epochs: who takes part in which step is drawn anew and secretly in "
        "every epoch, never reused, and what is drawn below in every step. The number "
        "of steps is fixed in advance; a run that stops within an epoch for what it "
        "saw owes all of it."
    )


def _shuffled_epochs(run: ComposedSteps, delta: float) -> list[str]:
    """What random allocation, or Poisson sampling, would cost in place of shuffling."""
    found = []
    for part, count in zip(run.gaussian_steps, run.counts, strict=True):
        scheme = epoch_scheme(part.design)
        if not isinstance(scheme, ShuffledEpochs):
            continue
        steps = int(np.asarray(scheme.steps_per_epoch))
        others = {
            "independent bins (RandomAllocation)": RandomAllocation(
                scheme.name, steps_per_epoch=steps
            ),
            "coins (Poisson)": Poisson(scheme.name, sampling_probability=1 / steps),
        }
        costs = []
        for name, other in others.items():
            same = dataclasses.replace(part, sampling=part.design.with_scheme(other))
            value = float(epsilon(same, num_steps=count, delta=delta))
            costs.append(f"{value:.4g} by {name}")
        found.append(
            f"level {scheme.name!r}: no amplification is known for shuffled epochs and "
            f"none is counted; the same steps would cost epsilon {' or '.join(costs)}"
        )
    return found


def _epoch_schemes(run: ComposedSteps) -> list[Scheme]:
    found = [epoch_scheme(part.design) for part in run.gaussian_steps]
    return [scheme for scheme in found if scheme is not None]


def _everybody_drawn(level_runs: Mapping[str, ComposedSteps]) -> list[str]:
    """Levels where more children are asked for than there are."""
    found: dict[tuple[int, str], str] = {}
    for level, run in level_runs.items():
        for number, part in enumerate(run.gaussian_steps):
            rates = part.path_rates
            for name, clipped in zip(part.level_names_used, rates.clipped, strict=True):
                if (number, name) in found or not np.any(clipped):
                    continue
                where = f"step {number + 1}: " if len(run.gaussian_steps) > 1 else ""
                found[number, name] = where + _clipped_text(part, name, level, clipped)
    return list(found.values())


def _clipped_text(
    step: GaussianStep, name: str, level: str, clipped: np.ndarray
) -> str:
    text = (
        f"level {name!r}: size is above the population, so that everybody is drawn "
        "(rate 1)"
    )
    if step.population is None:
        return text
    units = step.path_rates.multiplicity
    number = int(units[np.broadcast_to(clipped, units.shape)].sum())
    if not number:
        return f"{text}, but only for units that join where nobody is now"
    return f"{text}, on the paths of {number} of {int(units.sum())} {level!r} units"


def _large_delta(level_runs: Mapping[str, ComposedSteps], delta: float) -> list[str]:
    found = []
    for level, run in level_runs.items():
        counts = [part.num_protected_units for part in run.gaussian_steps]
        units = max((count for count in counts if count is not None), default=0)
        if delta * units >= 1:
            found.append(
                f"level {level!r}: delta {delta:g} times {units} units is at least 1, "
                "so publishing one of them outright would satisfy it; take delta well "
                f"below {1 / units:.1e}"
            )
    return found


def _unprotected_levels(
    run: ComposedSteps,
    level_runs: Mapping[str, ComposedSteps],
    epsilon_by_level: Mapping[str, float | str],
) -> list[str]:
    """Infinite epsilons, and coarser levels that the headline says nothing about."""
    unit = str(run.gaussian_steps[0].privacy_unit)
    found = [
        f"level {level!r}: epsilon is infinite, no {level!r} is protected at all"
        for level, value in epsilon_by_level.items()
        if not isinstance(value, str) and math.isinf(value)
    ]
    levels = list(epsilon_by_level)
    coarser = [repr(level) for level in levels[: levels.index(unit)] if level != PERSON]
    if unit != PERSON and PERSON in levels:
        found.append(_of_a_person(unit, level_runs, epsilon_by_level[PERSON]))
    if coarser and unit != PERSON:
        found.append(
            f"epsilon protects a single {unit!r}; for a whole {' or '.join(coarser)} "
            "see the epsilon at that level"
        )
    return found


def _of_a_person(
    unit: str, level_runs: Mapping[str, ComposedSteps], value: float | str
) -> str:
    """What the run costs somebody with all that the bounds allow."""
    if isinstance(value, str):
        return f"epsilon protects a single {unit!r}; of a person none is known: {value}"
    whose = bounds_in_words(level_runs[PERSON].gaussian_steps[0].people)
    return (
        f"epsilon protects a single {unit!r}; that of a person ({whose}) is "
        f"{upward(value, 5, zeros=True)}, if nobody owns more"
    )


def _private_sizes(run: ComposedSteps) -> list[str]:
    """Under add_remove the sizes just above the protected level are private."""
    for part in run.gaussian_steps:
        if part.population is None or part.neighboring_relation != "add_remove":
            continue
        unit, schemes = str(part.privacy_unit), part.design.schemes
        if unit == PERSON:
            unit = schemes[-1].name  # whose units are hers
        last = {scheme.name: scheme for scheme in schemes}.get(unit)
        if isinstance(last, WithoutReplacement):
            return [
                f"under add_remove the number of {unit!r} units in each "
                "group is private, and this report is computed from it: it is about "
                "this data set and its neighbours, and not for publication"
            ]
    return []

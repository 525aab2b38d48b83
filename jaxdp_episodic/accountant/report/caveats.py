"""What a user should know about a run besides its numbers, in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import GroupedClasses, epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import (
    ORIGINAL,
    OWNED,
    PERSON,
    Poisson,
    RandomAllocation,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import STEP, ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.accountant.report.protected import (
    bounds_in_words,
    makes_one,
    step_of_bounds,
)
from jaxdp_episodic.accountant.report.rounding import upward


def preconditions_of(run: ComposedSteps, *, chooses: bool = False) -> tuple[str, ...]:
    """Returns what must be true for the guarantee and cannot be checked."""
    first = run.gaussian_steps[0]
    bounding = step_of_bounds(run.gaussian_steps)
    unit, last = str(first.privacy_unit), bounding.design.level_names[-1]
    relation, is_person = first.neighboring_relation, unit in OWNED
    designs = [part.design for part in run.gaussian_steps]
    # A scheme that takes everybody draws nothing.
    kinds = {
        type(scheme)
        for design in designs
        for scheme in design.schemes
        if np.min(getattr(scheme, "sampling_probability", 0.0)) < 1
    }
    in_blocks = isinstance(first.design, PeopleBlocks)
    in_epochs = any(map(epoch_scheme, designs))
    is_bounded = is_person and (first.people is not None or not in_blocks)
    bands = next((part.bands for part in run.gaussian_steps if part.bands), None)
    by_id = relation == "add_remove"
    rule = "its id, its place on a public list" if by_id else "its place"
    clips = dict.fromkeys(part.clip_unit for part in run.gaussian_steps)
    clipped = " or ".join("step" if c == STEP else f"{c!r}" for c in clips)
    above, slots = (last if is_person else unit), unit
    if is_person and not in_blocks:
        slots = last
    people = bounding.people
    bounds = f"this: {bounds_in_words(people)}"
    if people is not None and makes_one(people):
        bounds = "one"
    rows = (
        (
            kinds,
            f"Locality: the clipped contribution of each {clipped} depends only on "
            "what was drawn of it, the current model, public data and fresh "
            "randomness. Where examples interact (support and query, a softmax over "
            "classes, batch statistics), they do so within one clip unit.",
        ),
        (
            not kinds,
            f"Locality: the contribution of each {clipped} depends only on its own "
            "data, earlier releases, public data and fresh randomness.",
        ),
        (
            in_blocks,
            "Blocks: the partition of people into blocks looks at nobody's data, and "
            "nobody's leaving moves another one. An episode takes its data, and makes "
            "all its choices, from its own block and public facts.",
        ),
        (
            not in_blocks,
            f"Public lists: the units above the level {above!r} are public. One that "
            f"is emptied stays listed{', is drawn at the same rate' if kinds else ''} "
            "and contributes zero.",
        ),
        (
            not in_blocks and not is_person,
            f"One path: every {unit!r} lies under exactly one path of the tree.",
        ),
        (
            is_bounded and unit == PERSON,
            f"Bounds of people: every {last!r} has one owner, and nobody owns more "
            f"than {bounds}. These bounds are public, not read from the data, and "
            "enforced before training by a rule that looks at one person's "
            f"{'data' if relation == 'add_remove' else 'slots'} alone. This epsilon "
            "does not protect people beyond them.",
        ),
        (
            unit == ORIGINAL,
            f"Copies: every {last!r} belongs to one original, and no original has "
            f"more than {bounds}. Which examples are copies of one another is public; "
            "all of them come, go or change together. An epsilon of one copy alone "
            "protects nobody.",
        ),
        (
            is_bounded and in_blocks,
            "Draws within blocks: each episode draws classes and examples afresh "
            "among public slots, filled or not, without a look at what is in them.",
        ),
        (
            chooses,
            "Choices: whatever chose saw releases and public facts alone; what could "
            "be chosen, its noise, rates and budget were fixed before the first "
            "release.",
        ),
        (
            not chooses,
            f"Fixed in advance: {'rates, ' if kinds else ''}noise and the number of "
            "steps do not react to anything that was released.",
        ),
        (
            kinds and not in_epochs,
            "Fresh draws: every step draws anew, and its draws stay secret. Draws "
            "that are kept for an epoch need another accounting.",
        ),
        (
            kinds and in_epochs,
            "Fresh epochs: who takes part in which step is drawn anew and secretly in "
            "every epoch, never reused, and what is drawn below in every step. The "
            "number of steps is fixed in advance; a run that stops within an epoch "
            "for what it saw owes all of it.",
        ),
        (
            Poisson in kinds,
            "Poisson draws: everything drawn is processed, without a cap, and an "
            "empty draw still releases noise.",
        ),
        (
            RandomAllocation in kinds,
            "Sums of bins: what a step releases is the sum over its bin, or that "
            "divided by a constant, never by the realised number; an empty bin still "
            "releases noise.",
        ),
        (
            bands is not None,
            f"Groups: every {bands and bands.level!r} is in one of "
            f"{bands and bands.count} groups for the whole run, by {rule} or at "
            "random, not by its content or by who else is there. Steps draw from the "
            "groups in turn, by the number of steps charged, those given up included. "
            "All have one noise multiplier, and their number is fixed in advance: a "
            "run that ends for what it released owes its plan. No file holds sums "
            "without noise.",
        ),
        (
            any(isinstance(design, GroupedClasses) for design in designs),
            "Grouping: the partition of classes into episodes is drawn afresh in "
            f"every {'epoch' if in_epochs else 'step'} and does not look at the data.",
        ),
        (
            relation == "replace_one",
            f"Replacement: one {unit!r} changes its content in place; a move to "
            "another group is a removal and an addition, and not covered.",
        ),
        (
            relation == "zero_out",
            f"Slots: the number of slots for {slots!r} is public. "
            f"{'All of them are drawn alike, filled or not. ' if kinds else ''}A "
            "contribution with an empty slot in it is 0 as a whole; masking the empty "
            "slot is not enough. An epsilon at another level needs the same of its "
            "own slots.",
        ),
        (
            relation == "add_remove" and WithoutReplacement in kinds,
            "Sizes: where children are drawn without replacement, their number is "
            "that in the larger of two neighbouring data sets or a lower bound of it, "
            "and no unit is left out for its size.",
        ),
    )
    return tuple(text for holds, text in rows if holds)


def caveats_of(
    run: ComposedSteps,
    level_runs: Mapping[str, ComposedSteps],
    epsilon_by_level: Mapping[str, float | str],
    delta: float,
) -> tuple[str, ...]:
    """Returns what the numbers of a report do not show at first sight."""
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


def _shuffled_epochs(run: ComposedSteps, delta: float) -> list[str]:
    """What random allocation, or Poisson sampling, would cost in place of shuffling."""
    found = []
    for part, count in zip(run.gaussian_steps, run.counts, strict=True):
        scheme = epoch_scheme(part.design)
        if not isinstance(scheme, ShuffledEpochs):
            continue
        steps = int(np.asarray(scheme.steps_per_epoch))
        others = {
            "random allocation (RandomAllocation)": RandomAllocation(
                scheme.name, steps_per_epoch=steps
            ),
            "Poisson sampling (Poisson)": Poisson(
                scheme.name, sampling_probability=1 / steps
            ),
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
    coarser = [level for level in levels[: levels.index(unit)] if level != PERSON]
    if unit != PERSON and PERSON in levels:
        found.append(_of_a_person(unit, level_runs, epsilon_by_level[PERSON]))
    if coarser and unit != PERSON:
        is_known = any(isinstance(epsilon_by_level[level], float) for level in coarser)
        found.append(
            f"epsilon protects a single {unit!r}, not a whole "
            f"{' or '.join(map(repr, coarser))}"
            + "; see the epsilon at that level"
            * is_known
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
        if unit in OWNED:
            unit = schemes[-1].name  # whose units belong to one person
        last = {scheme.name: scheme for scheme in schemes}.get(unit)
        if isinstance(last, WithoutReplacement):
            return [
                f"under add_remove the number of {unit!r} units in each "
                "group is private, and this report is computed from it: it is about "
                "this data set and its neighbours, and not for publication"
            ]
    return []

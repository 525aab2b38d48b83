"""What is said of a run: numbers rounded safely, units in words, caveats."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

import numpy as np

from jaxdp_episodic.accountant.describe.designs import (
    ORIGINAL,
    OWNED,
    PERSON,
    GroupedClasses,
    PeopleBlocks,
    Poisson,
    RandomAllocation,
    ShuffledEpochs,
    WithoutReplacement,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.population import PersonBounds
from jaxdp_episodic.accountant.describe.step import STEP, ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon

# --- Numbers, rounded to the safe side ---


def _rounded(value: float, digits: int = 4, *, zeros: bool = False, how: str) -> str:
    """A number with ``digits`` significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=how).create_decimal(float(value))
    return f"{rounded:g}" if zeros else f"{float(rounded):.{digits}g}"


upward = functools.partial(_rounded, how=ROUND_CEILING)
downward = functools.partial(_rounded, how=ROUND_FLOOR)


# --- Who is protected ---


def protected_unit(*steps: GaussianStep) -> str:
    """Returns the protected unit in words, such as "one example"."""
    step = step_of_bounds(steps)
    return unit_in_words(str(step.privacy_unit), step.people)


def step_of_bounds(steps: Sequence[GaussianStep]) -> GaussianStep:
    """Returns the step with the largest bounds: statistics have bounds of 1."""

    def most(step: GaussianStep) -> float:
        bounds = {} if step.people is None else step.people.numbers
        return math.prod(float(np.max(bound)) for bound in bounds.values())

    return max(steps, key=most)


def unit_in_words(privacy_unit: str, people: PersonBounds | None) -> str:
    """Returns a privacy unit and its bounds in words."""
    if privacy_unit not in OWNED:
        return f"one {privacy_unit}"
    bounds, is_joined = bounds_in_words(people), makes_one(people)
    if privacy_unit == PERSON:
        of = " with all of their examples" if is_joined else f", {bounds}"
        return f"one person{of}"
    copies = bounds.replace("examples", "copies", 1)
    return f"one original example with {'all of its copies' if is_joined else copies}"


def changed_unit(privacy_unit: str, neighboring_relation: str) -> str:
    """Returns the difference of two neighbouring data sets in words."""
    whole, content, slots = {
        ORIGINAL: (
            "one example, with all of its copies,",
            "one example, and of all of its copies,",
            "the slots of one example and of all of its copies",
        ),
        PERSON: (
            "one person, with all of their examples,",
            "all examples of one person",
            "all slots of one person",
        ),
    }.get(privacy_unit, (one := f"one `{privacy_unit}`", one, f"{one} slot"))
    return {
        "add_remove": f"{whole} more or less",
        "replace_one": f"the content of {content} replaced",
        "zero_out": f"{slots} emptied or filled",
    }[neighboring_relation]


def makes_one(people: PersonBounds | None) -> bool:
    """Whether each person has at most one unit, as in statistics of joined examples."""
    return people is not None and not people.shape and people.numbers == {"examples": 1}


def bounds_in_words(people: PersonBounds | None) -> str:
    """Returns the bounds of a person in words."""
    if people is None:
        return "all examples"
    if people.shape:
        return "all examples within bounds that vary"
    found = []
    for several, one in (("tasks", "task"), ("classes", "class")):
        if several in people.numbers:
            number = int(people.numbers[several])
            where = " of each" if found else ""
            found.append(f"at most {number:,} {one if number == 1 else several}{where}")
    where = [f"in {', '.join(found)}"] if found else []
    if "examples" in people.numbers:
        inside = " in each" if found else ""
        where.append(f"at most {int(people.numbers['examples']):,}{inside}")
    return ", ".join(["all examples", *where])


# --- Preconditions and warnings ---


def preconditions_of(run: ComposedSteps, *, chooses: bool = False) -> tuple[str, ...]:
    """Returns the preconditions of the guarantee that cannot be checked."""
    first = run.gaussian_steps[0]
    bounding = step_of_bounds(run.gaussian_steps)
    unit, last = str(first.privacy_unit), bounding.design.level_names[-1]
    relation, is_person = first.neighboring_relation, unit in OWNED
    designs = [part.design for part in run.gaussian_steps]
    # A scheme that draws everybody does not sample.
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
    above, people = last if is_person else unit, bounding.people
    slots = last if is_person and not in_blocks else unit
    bounds = "one" if makes_one(people) else f"this: {bounds_in_words(people)}"
    rows = (
        (
            True,
            f"Locality: the clipped contribution of each {clipped} depends only on "
            "its own sampled content, the current model, public data and fresh "
            "randomness. If examples interact (support and query, a softmax over "
            "classes, batch statistics), they are in one clip unit."
            if kinds
            else f"Locality: the contribution of each {clipped} depends only on its "
            "own data, earlier releases, public data and fresh randomness.",
        ),
        (
            True,
            "Blocks: the partition of people into blocks does not depend on anybody's "
            "data, and if a person leaves, nobody moves to another block. The data and "
            "all choices of an episode come from its own block and public facts."
            if in_blocks
            else f"Public lists: the units above the level {above!r} are on a public "
            "list. An emptied one stays on it"
            f"{', sampled at the same rate' if kinds else ''}, and contributes zero.",
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
            f"{'data' if relation == 'add_remove' else 'slots'} only. This epsilon "
            "does not protect people beyond them.",
        ),
        (
            unit == ORIGINAL,
            f"Copies: every {last!r} belongs to one original, and no original has "
            f"more than {bounds}. Which examples are copies of one another is public; "
            "all are added, removed or changed together. An epsilon of one copy alone "
            "protects nobody.",
        ),
        (
            is_bounded and in_blocks,
            "Sampling within blocks: each episode samples classes and examples again "
            "among public slots, filled or not, without looking at their content.",
        ),
        (
            True,
            "Choices: the steps were chosen by releases and public facts only; the "
            "options, their noise, rates and budget were fixed before the first "
            "release."
            if chooses
            else f"Fixed in advance: {'rates, ' if kinds else ''}noise and the number "
            "of steps do not depend on releases.",
        ),
        (
            kinds,
            "Fresh epochs: every epoch assigns units to steps again and in secret, and "
            "every step samples again below that level. The number of steps is fixed "
            "in advance; a run that stops within an epoch because of its releases is "
            "charged the whole epoch."
            if in_epochs
            else "Fresh samples: every step samples again, and in secret. Samples "
            "that are kept for an epoch need another accounting.",
        ),
        (
            Poisson in kinds,
            "Poisson sampling: all sampled units are processed, without a limit on "
            "their number, and an empty sample still releases noise.",
        ),
        (
            RandomAllocation in kinds,
            "Sums: a step releases the sum over the units that are assigned to it, "
            "possibly divided by a constant, never by their actual number; a step "
            "without units still releases noise.",
        ),
        (
            bands is not None,
            f"Groups: every {bands and bands.level!r} is in one of "
            f"{bands and bands.count} groups for the whole run, by {rule} or at "
            "random, not by its content or by other units. Steps use the groups "
            "in turn, by the number of charged steps, including steps given up. All "
            "have one noise multiplier, and their number is fixed in advance: a run "
            "that stops because of its releases is charged its whole plan. No file "
            "contains sums without noise.",
        ),
        (
            any(isinstance(design, GroupedClasses) for design in designs),
            "Grouping: the partition of classes into episodes is formed again in "
            f"every {'epoch' if in_epochs else 'step'}, without looking at the data.",
        ),
        (
            relation == "replace_one",
            f"Replacement: one {unit!r} changes its content in place; a move to "
            "another group is a removal and an addition, and not covered.",
        ),
        (
            relation == "zero_out",
            f"Slots: the number of slots for {slots!r} is public. "
            f"{'All slots are sampled alike, filled or not. ' if kinds else ''}A "
            "contribution with an empty slot in it is 0 as a whole; masking the empty "
            "slot is not enough. An epsilon at another level needs the same for its "
            "own slots.",
        ),
        (
            relation == "add_remove" and WithoutReplacement in kinds,
            "Sizes: where children are sampled without replacement, their number is "
            "that in the larger of two neighbouring data sets or a lower bound on it, "
            "and no unit is left out because of its size.",
        ),
    )
    return tuple(text for holds, text in rows if holds)


def caveats_of(
    run: ComposedSteps,
    level_runs: Mapping[str, ComposedSteps],
    epsilon_by_level: Mapping[str, float | str],
    delta: float,
) -> tuple[str, ...]:
    """Returns warnings: facts that the numbers of a report do not show."""
    found = []
    if any(part.noise_multiplier == 0 for part in run.gaussian_steps):
        found.append("noise_multiplier is 0: the sum is released without noise")
    found += _everybody_drawn(level_runs)
    for level, same in level_runs.items():
        units = max(part.num_protected_units or 0 for part in same.gaussian_steps)
        if delta * units >= 1:
            found.append(
                f"level {level!r}: delta {delta:g} times {units} units is at least 1, "
                "so publishing the data of one of them would satisfy it; use delta "
                f"well below {1 / units:.1e}"
            )
    found += _unprotected_levels(run, level_runs, epsilon_by_level)
    return (*found, *_private_sizes(run), *_shuffled_epochs(run, delta))


def _shuffled_epochs(run: ComposedSteps, delta: float) -> Iterator[str]:
    """What random allocation or Poisson sampling would cost instead of shuffling."""
    for part, count in zip(run.gaussian_steps, run.counts, strict=True):
        scheme = epoch_scheme(part.design)
        if not isinstance(scheme, ShuffledEpochs):
            continue
        steps, costs = int(np.asarray(scheme.steps_per_epoch)), []
        for name, other in (
            ("random allocation", RandomAllocation(scheme.name, steps_per_epoch=steps)),
            ("Poisson sampling", Poisson(scheme.name, sampling_probability=1 / steps)),
        ):
            same = dataclasses.replace(part, sampling=part.design.with_scheme(other))
            value = float(epsilon(same, num_steps=count, delta=delta))
            costs.append(f"{upward(value)} by {name} ({type(other).__name__})")
        yield (
            f"level {scheme.name!r}: no amplification is known for shuffled epochs; "
            f"the same steps would cost epsilon {' or '.join(costs)}"
        )


def _everybody_drawn(level_runs: Mapping[str, ComposedSteps]) -> list[str]:
    """Levels at which a draw takes more children than there are."""
    found: dict[str, str] = {}
    for level, run in level_runs.items():
        for number, part in enumerate(run.gaussian_steps, start=1):
            where = f"step {number}: " if len(run.gaussian_steps) > 1 else ""
            units, clips = part.path_rates.multiplicity, part.path_rates.clipped
            for name, clipped in zip(part.level_names_used, clips, strict=True):
                if not np.any(clipped):
                    continue
                of_whom = ""
                if part.population is not None:
                    most = int(units[np.broadcast_to(clipped, units.shape)].sum())
                    of_whom = (
                        f", on the paths of {most} of {units.sum()} {level!r} units"
                    )
                    if not most:
                        of_whom = ", but only for units that join an empty parent"
                found.setdefault(f"{where}level {name!r}", of_whom)
    text = "size is above the population, so that all are drawn (rate 1)"
    return [f"{where}: {text}{of_whom}" for where, of_whom in found.items()]


def _unprotected_levels(
    run: ComposedSteps,
    level_runs: Mapping[str, ComposedSteps],
    epsilon_by_level: Mapping[str, float | str],
) -> Iterator[str]:
    """Infinite epsilons, and coarser levels that epsilon does not protect."""
    unit = str(run.gaussian_steps[0].privacy_unit)
    for one, value in epsilon_by_level.items():
        if not isinstance(value, str) and math.isinf(value):
            yield f"level {one!r}: epsilon is infinite, no {one!r} is protected at all"
    levels, single = list(epsilon_by_level), f"epsilon protects a single {unit!r}"
    if unit != PERSON and PERSON in levels:
        value = epsilon_by_level[PERSON]
        if isinstance(value, str):
            yield f"{single}; there is none for a person: {value}"
        else:
            whose = bounds_in_words(level_runs[PERSON].gaussian_steps[0].people)
            most = upward(value, 5, zeros=True)
            yield (
                f"{single}; that of a person ({whose}) is {most}, if nobody owns more"
            )
    coarser = [level for level in levels[: levels.index(unit)] if level != PERSON]
    if coarser:
        is_known = any(isinstance(epsilon_by_level[level], float) for level in coarser)
        there = "; see the epsilon at that level" if is_known else ""
        yield f"{single}, not a whole {' or '.join(map(repr, coarser))}{there}"


def _private_sizes(run: ComposedSteps) -> list[str]:
    """Whether the report uses private sizes, as under add_remove."""
    for part in run.gaussian_steps:
        if part.population is None or part.neighboring_relation != "add_remove":
            continue
        schemes, unit = part.design.schemes, str(part.privacy_unit)
        unit = schemes[-1].name if unit in OWNED else unit
        last = {scheme.name: scheme for scheme in schemes}.get(unit)
        if isinstance(last, WithoutReplacement):
            return [
                f"under add_remove the number of {unit!r} units in each "
                "group is private, and this report is computed from it: it is about "
                "this data set and its neighbours, and must not be published"
            ]
    return []

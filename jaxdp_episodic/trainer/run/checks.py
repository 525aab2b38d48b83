"""What a trainer refuses, or warns of, before its first draw.

How many contributions are complete follows from sizes that may be private: it is shown,
warned of or refused, and never released.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    ORIGINAL,
    OWNED,
    PERSON,
    GroupedClasses,
    MultistageSampling,
    PeopleBlocks,
    Sampling,
    WithoutReplacement,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.trainer.config.training_parts import FIXED, ClippingConfig
from jaxdp_episodic.trainer.data.splits import shared_rows
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.complete import CompleteUnits, Needs, complete_units
from jaxdp_episodic.trainer.draw.groups import GroupSampler
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.gradient.clipping import count_deviation
from jaxdp_episodic.trainer.gradient.precision import as_trained, training_dtype
from jaxdp_episodic.trainer.learners.episode import default_block_size
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics

# Most rows of a block on one device with discrete noise: 256 episodes of ten pictures
# of 28 x 28 take 8 MB.
_MOST_DISCRETE_ROWS = 256
# Most factor between the normalizer and the mean number of clip units, where a count of
# clip units is divided by it.
_FACTOR = 2.0
# Standard deviation of the noisy share, times the root of the rate, from which the
# logarithm of the clip norm wanders by more than 1.3.
_MOST_NOISE = 1.0
# Share of held-out examples that may equal training examples by chance, bit for bit: 1
# of 4,000 of the package's glyphs do.
_MOST_EQUAL = 1e-3
LEAST_SHARE = 1 / 3  # of the drawn contributions that are complete; below: a warning
LEAST_IN_RUN = 1.0  # complete contributions in the run; below it is refused
_BETTER = 1.1  # least factor of the share at which another setting is recommended


def check_data(step: GaussianStep, data: ExampleTable) -> None:
    """Refuses data of another population, types or owners than the step needs."""
    _validation.instance("step", step, GaussianStep, "a GaussianStep")
    _validation.instance("data", data, ExampleTable, "an ExampleTable")
    if step.population is not None and step.population != data.population:
        raise ValueError(
            "budget must be planned for the step with population=data.population (or "
            "with public bounds and no population): the units that are sampled must be "
            f"those that are accounted; got {step.population!r} against "
            f"{data.population!r}"
        )
    check_owners(step, data)
    kind = data.features.dtype
    if kind.kind not in "iuf":  # such as bfloat16, which NumPy does not have
        raise TypeError(
            f"data must have features of integers or floats, got {kind}; take "
            "features.astype(numpy.float32)"
        )


def check_start(
    budget: PrivacyBudget,
    start: PrivateStatistics | None,
    noise: str,
    data: ExampleTable,
) -> None:
    """Refuses statistics that are not those the budget charges first."""
    steps = () if start is None else start.steps
    planned = [
        dataclasses.replace(step, noise_multiplier=1.0) for step in budget.before
    ]
    if planned != list(steps):
        raise ValueError(
            "budget.before must be the steps of the private statistics that the run "
            f"starts with, got {len(planned)} steps for {len(steps)} statistics"
        )
    # A draw holds row numbers, which must mean the same in both tables.
    if start is not None and start.data is not data:
        if start.data.fingerprint != data.fingerprint:
            raise ValueError(
                "start must be made of the run's data, got statistics of another table "
                f"({start.data.population!r} against {data.population!r})"
            )
    if start is not None and start.noise != noise:
        raise ValueError(
            f"start must have noise={noise!r} as the run has, got {start.noise!r}"
        )


def level_of_slots(step: GaussianStep) -> str | None:
    """Returns the level with public slots under zero_out; else None."""
    if step.neighboring_relation != "zero_out":
        return None
    if step.population is not None:
        raise ValueError(
            "population must be None under zero_out, which needs a public number of "
            f"slots: give the level {step.privacy_unit!r} a population"
        )
    if step.privacy_unit in OWNED:
        return step.design.level_names[-1]  # a person's slots are there
    return str(step.privacy_unit)


def sampler_of(
    step: GaussianStep, data: ExampleTable, *, is_smaller: bool = False
) -> Any:
    """Returns the sampler of an accounted step; ``is_smaller``: a unit was removed."""
    # Such a draw must not depend on which slots are filled.
    among = step.people is not None or step.neighboring_relation == "zero_out"

    def made(design: Any, population: Any, owners: Any) -> EpisodeSampler:
        return EpisodeSampler(
            design,
            population,
            clip_unit=str(step.clip_unit),
            population_is_accounted=step.population is not None or is_smaller,
            privacy_unit=step.privacy_unit,
            slots_of=level_of_slots(step),
            owners=owners,
            among_slots=among,
        )

    if step.bands is None:
        return made(step.design, data.population, data.owners)
    return GroupSampler(step, data.population, data.owners, made)


def check_owners(step: GaussianStep, data: ExampleTable) -> None:
    """Refuses data without the owners that the step needs, or beyond its bounds."""
    unit = str(step.privacy_unit)
    if unit not in OWNED:
        data.check_copies(unit)
        return
    owners = data.owned(unit)
    if owners is None and unit == ORIGINAL:
        raise ValueError(
            f"data must say which examples are copies for privacy_unit={unit!r}: take "
            "with_rotations, or originals= of ExampleTable.from_records"
        )
    if owners is None:
        raise ValueError(
            f"data must say whose each example is for privacy_unit={unit!r}: give "
            "owner= where they are loaded, or owners= of ExampleTable.from_records"
        )
    if step.people is None:
        return
    found = data.spread(owners)
    for name, bound in step.people.numbers.items():
        most = getattr(found, f"most_{name}")
        if most is not None and most > int(np.asarray(bound)):
            raise ValueError(
                f"people.{name} must be at least what any person in the data has, "
                f"{most}, got {int(np.asarray(bound))}: truncate the data to the bound "
                "before training, or take a larger one"
            )


def check_targets(learner: Any, data: ExampleTable, step: GaussianStep) -> None:
    """Refuses labels that are places in a list of classes which units change."""
    if data.targets is not None:
        return
    if learner.is_regression:
        raise ValueError(
            "data must have targets for a learner of numbers (squared_error), got "
            "none: the place of a class among all classes is no number to predict, and "
            "moves when a class joins; name the column of the target"
        )
    if getattr(learner, "couples_examples", True):
        return  # its labels are places within the episode
    unit = str(step.privacy_unit)
    relation = step.neighboring_relation
    if relation != "replace_one" and unit in data.level_names[:-1]:
        raise ValueError(
            f"data must have targets for {type(learner).__name__} with privacy_unit="
            f"{unit!r} under {relation}: without them a label is the place of a class "
            "among all classes, which moves when somebody joins; give class numbers "
            "from a public list as targets"
        )
    if relation == "add_remove" and not data.has_public_units:
        warnings.warn(
            f"{type(learner).__name__} has an output for each {data.level_names[-2]} "
            "in the data. Their number is not protected, but a single example can "
            "change it. Give a public list of them (public_units; classes beside "
            "labels), or use neighboring_relation='zero_out'",
            stacklevel=3,
        )


def check_outputs(
    learner: Any, params: Any, inputs: jax.ShapeDtypeStruct, slot_shape: tuple[int, ...]
) -> None:
    """Refuses a model with fewer outputs than an episode has classes."""
    apply, ways = getattr(learner, "apply", None), getattr(learner, "ways", None)
    couples = getattr(learner, "couples_examples", True)
    if apply is None or ways is not None or learner.is_regression or not couples:
        return
    kind = training_dtype(params)
    outputs = jax.eval_shape(
        lambda params, inputs: apply(params, as_trained(inputs, kind)), params, inputs
    ).shape
    if len(outputs) != 2 or outputs[1] < slot_shape[-2]:
        raise ValueError(
            f"apply must return at least {slot_shape[-2]} logits for each input, one a "
            f"class of an episode, got shape {outputs} for one input"
        )


def check_finite(params: Any, step: int) -> None:
    """Refuses parameters that are not finite, which would waste all further steps."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            # On the host, as XLA would compile two functions for every shape.
            if not np.all(np.isfinite(np.asarray(leaf))):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"params must be finite, {name} is not after step {step}; begin a "
                    "new run with a smaller learning rate or a schedule"
                    if step
                    else f"params must be finite, got {name} with NaN or infinity"
                )


def warn_about_delta(step: GaussianStep, delta: float, data: ExampleTable) -> None:
    """Warns if delta would permit to publish one protected unit outright."""
    names = data.level_names
    if step.privacy_unit in OWNED:
        owners = data.owned(step.privacy_unit)
        units = 0 if owners is None else len(owners.names)
    elif step.privacy_unit in names:
        units = data.population.num_units(names.index(str(step.privacy_unit)) + 1)
    else:
        return
    if delta * units >= 1:
        warnings.warn(
            f"delta={delta:g} times {units} protected units is at least 1: to publish "
            "one unit outright would satisfy it; take delta well below "
            f"{1 / units:.1e}",
            stacklevel=3,
        )


def mean_units_are_public(step: GaussianStep, level: str | None = None) -> bool:
    """Whether the mean number of clip units discloses no unit of the level.

    ``level`` is the privacy unit by default.
    """
    if step.neighboring_relation == "replace_one":
        return True
    names, clip = step.design.level_names, step.clip_unit
    if clip == STEP or not isinstance(step.design, MultistageSampling):
        return True
    private = str(step.privacy_unit if level is None else level)
    # A person's examples are at the last level; the levels above are public lists.
    first_private = names.index(names[-1] if private in OWNED else private)
    if step.neighboring_relation == "zero_out" and epoch_scheme(step.design) is None:
        # slots are public, their content is not; an epoch has no slots
        first_private += 1
    return names.index(str(clip)) < first_private


def public_normalizer(
    value: float | None, step: GaussianStep, sampler: EpisodeSampler
) -> float:
    """Returns the divisor of a noised sum: public, never the drawn number.

    It is ``value``, or the mean number of clip units if that is public.
    """
    if value is not None:
        return _validation.float32_number("normalizer", value)
    if not mean_units_are_public(step):
        raise ValueError(
            "normalizer must be given: the mean number of clip units a step depends on "
            f"how many {str(step.privacy_unit)!r} units there are, which is private "
            f"under {step.neighboring_relation}; give a public guess of it"
        )
    return max(sampler.expected_units, 1e-6)


def checked_clipping(
    clipping: Any, normalizer: float, budget: PrivacyBudget, sampler: EpisodeSampler
) -> ClippingConfig:
    """Returns the clipping; refuses a normalizer by which a count would be no share."""
    if clipping is None:
        return ClippingConfig(kind=FIXED)
    _validation.instance("clipping", clipping, ClippingConfig, "a ClippingConfig")
    mean = sampler.expected_units
    if clipping.counts and budget.takes_steps and mean_units_are_public(budget.step):
        if not mean / _FACTOR <= normalizer <= _FACTOR * mean:
            raise ValueError(
                "normalizer must be about the mean number of clip units a step, "
                f"{mean:g}, if the clip norm follows a quantile: a count of clip units "
                f"is divided by it; got {normalizer:g}"
            )
    if clipping.counts:
        noise = count_deviation(clipping, budget.step.noise_multiplier) / normalizer
        if noise * math.sqrt(clipping.rate) > _MOST_NOISE:
            warnings.warn(
                f"count_noise={clipping.count_noise:g} gives the share of short "
                f"contributions a standard deviation of {noise:.2g} in each step: the "
                "clip norm will follow the noise more than the data; take a lower "
                "count_noise or rate",
                stacklevel=3,
            )
    return clipping


def rows_a_device(
    value: int | None, sampler: EpisodeSampler, num_devices: int, noise: str
) -> int:
    """Returns the number of clip units of a block on one device."""
    if noise == "discrete":
        num_devices, most = 1, min(default_block_size(sampler), _MOST_DISCRETE_ROWS)
    else:
        most = default_block_size(sampler, num_devices) // num_devices
    if value is None:
        return most
    rows = _validation.whole_number("block_size", value)
    return min(most, -(-rows // num_devices))


def found_in_both(
    held_out: ExampleTable, trained: ExampleTable, step: GaussianStep
) -> tuple[str, str]:
    """Returns in words what two tables share, and what they may share by chance."""
    if held_out.fingerprint == trained.fingerprint:
        return "all of the training data", ""
    unit, by_chance = str(step.privacy_unit), ""
    if protects_people(step):
        if held_out.owners is None or trained.owners is None:
            return "perhaps people in both: one of the two names no owners", ""
        unit = PERSON
        if len({_names_of(one, unit).dtype.kind for one in (held_out, trained)}) > 1:
            return "perhaps people in both: their names are of two kinds", ""
    else:
        same = shared_rows(held_out, trained)
        if same:
            found = f"{len(same):,} examples (rows) in both, such as row {same[0]}"
            if len(same) > _MOST_EQUAL * held_out.num_examples:
                return found, ""
            by_chance = found
    if both := _in_both(held_out, trained, unit):
        return f"{len(both):,} {unit!r} units in both, such as {both[0]!r}", by_chance
    return "", by_chance


def check_held_out(split: str, data: ExampleTable, trained: ExampleTable) -> None:
    """Warns of names and examples in both tables; refuses the training data."""
    if data.fingerprint == trained.fingerprint:
        raise ValueError(
            f"held-out data ({split!r}) must be other data than those trained on, got "
            "the same units with the same examples"
        )
    named = {f"{name} names": name for name in data.level_names[-2:-1]}
    common: dict[str, tuple[Sequence[Any], int]] = {
        what: (_in_both(data, trained, unit), len(_names_of(data, unit)))
        for what, unit in ({"people": PERSON} | named).items()
    }
    same = shared_rows(data, trained, reads=False)  # from disk, for a warning
    common["examples (rows)"] = same, len(data.features)
    for what, (both, of) in common.items():
        if both:
            warnings.warn(
                f"{split!r} has {len(both):,} of its {of:,} {what} in common with the "
                f"training data, such as {both[0]!r}: if these are the same, its score "
                "is not one on held-out data",
                stacklevel=2,
            )


def _in_both(data: ExampleTable, other: ExampleTable, unit: str) -> list[Any]:
    """The names in both tables, sorted; names of different types are never equal."""
    ours, theirs = _names_of(data, unit), _names_of(other, unit)
    if ours.dtype.kind != theirs.dtype.kind:
        return []
    return np.intersect1d(ours, theirs).tolist()


def protects_people(step: GaussianStep) -> bool:
    """Returns whether the step protects a person with all of their examples."""
    return step.privacy_unit == PERSON or isinstance(step.design, PeopleBlocks)


def _names_of(data: ExampleTable, unit: str) -> np.ndarray:
    """Names of the people, or of a level's units; empty if these are only numbered."""
    if unit == PERSON and data.owners is not None:
        return data.owners.present
    names, ids = data.level_names, data.population.unit_ids or ()
    level = names.index(unit) if unit in names else len(ids)
    every = found = np.asarray(ids[level]) if level < len(ids) else np.empty(0)
    if unit == ORIGINAL and data.originals is not None:
        every, found = data.originals.names, data.originals.present
    is_count = np.array_equal(every, np.arange(len(every)))
    return found[:0] if is_count else found


def checked_contributions(
    sampler: EpisodeSampler, needs: Needs, budget: PrivacyBudget
) -> CompleteUnits | None:
    """Returns how many contributions are complete; warns of few, refuses too few."""
    if not budget.takes_steps:
        return None
    units, step = complete_units(sampler, needs), budget.step
    number = budget.num_steps - len(budget.before)
    is_refused = not units.is_seen or units.most * number < LEAST_IN_RUN
    if units.share >= LEAST_SHARE and not is_refused:
        return units
    drawn = contributions_in_words(units, str(step.clip_unit), number)
    words = f"the run samples {drawn}; an incomplete one contributes little or nothing"
    words += better_settings(units.share, step, sampler.population, needs)
    if is_refused:
        raise ValueError(
            f"{words}. A run must expect at least {LEAST_IN_RUN:g}: this one would "
            "spend its budget on noise alone; nothing was charged"
        )
    warnings.warn(words, stacklevel=3)
    return units


def contributions_in_words(units: CompleteUnits, clip_unit: str, num_steps: int) -> str:
    """Returns in words how many contributions are complete, a step and in all."""
    about = "" if units.complete == units.drawn else "about "
    in_all = units.complete * num_steps
    return (
        f"{units.drawn:.4g} contributions ({clip_unit}) a step on average, of which "
        f"{about}{_shown(units.complete, 2)} are complete, {_shown(in_all, 3)} in "
        f"{num_steps:,} steps"
    )


def _shown(number: float, digits: int) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.{digits}g}"


def better_settings(
    share: float, step: GaussianStep, population: Population, needs: Needs
) -> str:
    """Returns a clause: which other settings have more complete contributions."""
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
    slots, last, found = level_of_slots(step), design.schemes[-1], {}

    def share(
        design: Sampling, slots: str | None = slots, tree: Population = population
    ) -> float:
        sampler = EpisodeSampler(
            design,
            tree,
            clip_unit=str(step.clip_unit),
            population_is_accounted=True,
            privacy_unit=step.privacy_unit,
            slots_of=slots,
        )
        return complete_units(sampler, needs).share

    is_grouped = isinstance(design, GroupedClasses)
    # Draws existing units instead of slots; add_remove may refuse bands.
    if slots is not None and not step.bands:
        if is_grouped and slots == CLASS:
            other = dataclasses.replace(design, num_classes=population.num_units(1))
        else:
            (scheme,) = (one for one in design.schemes if one.name == slots)
            other = design.with_scheme(dataclasses.replace(scheme, population=None))
        found['under neighboring_relation = "add_remove"'] = share(other, None)
    is_sized = isinstance(last, WithoutReplacement)
    if is_sized and int(np.asarray(last.size)) > needs.examples:
        fewer = design.with_scheme(dataclasses.replace(last, size=needs.examples))
        how = f"with size = {needs.examples} of {last.name!r} instead of {last.size}"
        found[how] = share(fewer)
    if not is_grouped:
        return found
    ways, sizes = int(np.asarray(design.ways)), population.children_counts[1]
    if ways > 2:
        how = f"with ways = 2 instead of {design.ways}"
        found[how] = share(dataclasses.replace(design, ways=2))

    @functools.cache
    def without_small(fewest: int) -> float:
        kept = sizes[sizes >= fewest]
        tree = Population.from_sizes(kept.tolist(), level_names=population.level_names)
        return share(dataclasses.replace(design, num_classes=len(kept)), tree=tree)

    if slots == last.name:
        possible = [n for n in np.unique(sizes).tolist() if np.sum(sizes >= n) >= ways]
        # The share rises with ``fewest``: larger classes are complete more often.
        place = bisect.bisect_left(possible, LEAST_SHARE, key=without_small)
        for fewest in possible[place : place + 1]:
            found[
                f"without the {np.sum(sizes < fewest)} classes of fewer than {fewest} "
                "(leave out only classes that are publicly known to be small)"
            ] = without_small(fewest)
    return found

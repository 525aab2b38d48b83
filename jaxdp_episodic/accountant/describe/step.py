"""One step of private training, correlated noise, and composed runs."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import KW_ONLY
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe import spec
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    EPISODE,
    ORIGINAL,
    OWNED,
    PERSON,
    RESERVED_LEVEL_NAME,
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    PeopleBlocks,
    Sampling,
    Scheme,
    WithoutReplacement,
    checked_sampling,
    epoch_scheme,
    refuse_epochs,
)
from jaxdp_episodic.accountant.describe.population import (
    PersonBounds,
    Population,
    check_people,
)
from jaxdp_episodic.accountant.describe.rates import (
    PathRates,
    Relation,
    path_rates,
)
from jaxdp_episodic.accountant.describe.releases import Release

STEP = RESERVED_LEVEL_NAME
# One band needs no level, whose name may then be empty.
_LevelName = functools.partial(
    _validation.instance, kinds=str, words="the name of a level"
)
_SmallUnits = functools.partial(_validation.choice, allowed=("error", "keep"))
_Horizon = spec.number(_validation.reals("be >= 1", lambda a: a >= 1))


class Bands(spec.Spec):
    """Correlated noise: later steps partly cancel it, and groups of units take turns.

    A fixed rule assigns every unit of one level to one of ``count`` groups, and step
    ``t`` samples only from group ``t % count``. A share of the noise of each step is
    subtracted from the next ``count - 1`` steps. A unit takes part in every
    ``count``-th step at most, so a run costs at most ``ceil(num_steps / count)`` steps
    of the unit's group.

    Preconditions, in addition to those of the step: the rule uses only public facts of
    the unit, or is drawn once a run, in secret, and never changes; one noise multiplier
    in all steps, whose number is fixed in advance; fresh randomness in every step. See
    the table in docs/theory.md, "Correlated noise".

    Attributes:
      count: number of bands and of groups, whole number >= 1; 1 is independent noise.
      level: the level whose units are grouped, at or above the protected level;
        "person" for `PeopleBlocks`.
      horizon: number of steps that the optimizer remembers, >= 1, or inf. The
        coefficients are fitted to it; the guarantee does not depend on it.
    """

    count: spec.Size
    _: KW_ONLY
    level: Annotated[str, _LevelName]
    horizon: Annotated[float, _Horizon] = 30.0


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
        scheme = design.classes
        least = getattr(scheme, "size", design.ways)
        classes = _part(design.num_classes, count, CLASS, least)
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
    part = _part(scheme.population, count, level, scheme.size)
    scheme = dataclasses.replace(scheme, population=part, population_is_exact=exact)
    return design.with_scheme(scheme)


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


class GaussianStep(spec.Spec):
    """One step of DP training: sampling, clipping, privacy unit and noise.

    The step releases the sum of the clipped contributions plus Gaussian noise of
    standard deviation ``noise_multiplier`` times the clip norm. Numeric fields, here
    and in ``sampling``, may be arrays. They broadcast together, so that one step
    describes one setting or many.

    The guarantee holds under the preconditions in the docstring of ``sampling`` and in
    docs/theory.md, which nothing checks. If examples interact (support and query, a
    softmax over classes, batch statistics) the clip unit must contain the whole
    interaction: the episode or task.

    Attributes:
      sampling: a `MultistageSampling`, `GroupedClasses`, `IndependentEpisodes` or
        `PeopleBlocks`. A single scheme becomes a `MultistageSampling` of one level.
      noise_multiplier: standard deviation of the noise in clip norms, >= 0.
      clip_unit: the level whose contributions are clipped, or "step" if the whole step
        is one contribution. Default: "episode" for episodic designs, and the only level
        of a one-level sampling. Otherwise it is required.
      privacy_unit: the protected unit. Either a level (default: the last one), or
        "person": all examples of a person, who may be in several units, at most as many
        as ``people`` says. `PeopleBlocks` protects people only. Or "original": an
        example with all its copies, such as rotations, which are examples of other
        classes: ``people=PersonBounds(examples=1, classes=4)`` for four rotations.
      neighboring_relation: "add_remove" (one unit more or less), "replace_one" (its
        content is replaced in place; a move to another group is not covered) or
        "zero_out" (its data become null). Under zero_out units are *slots*: all sizes
        count slots, which are sampled whether they are filled or not, and a
        contribution whose sampled content has a null is 0. If a null is only masked
        within a contribution, zero_out does *not* cover it. See docs/units.md.
      population: a `Population`, whose sizes replace those in ``sampling`` (under
        zero_out, numbers of slots). The path with the largest epsilon counts.
      small_units: what happens to a unit with fewer children than a sample takes.
        "error" raises (default under replace_one). "keep" samples all of its children
        (default under zero_out, where children are slots, and the only choice under
        add_remove, where refusing data because of its size would leak).
      people: the `PersonBounds` for privacy_unit="person" or "original".
      bands: `Bands` of correlated noise, see `banded`. None: independent noise.

    Raises:
      ValueError: an unknown level, a level without a size, missing bounds of a person,
        or a small unit with small_units="error".
      NotImplementedError: a combination that no theorem covers.
    """

    sampling: Sampling | Scheme
    _: KW_ONLY
    noise_multiplier: spec.NonNegatives
    clip_unit: str | None = None
    privacy_unit: str | None = None
    neighboring_relation: Relation = "add_remove"
    population: Population | None = None
    small_units: Annotated[str, _SmallUnits] | None = None
    people: PersonBounds | None = None
    bands: Bands | None = None

    def check_fields(self) -> None:
        """Fills in defaults, and checks what does not depend on known numbers."""
        object.__setattr__(self, "sampling", checked_sampling(self.sampling))
        super().check_fields()
        relation = self.neighboring_relation
        default = "error" if relation == "replace_one" else "keep"
        vars(self).update(
            clip_unit=checked_clip_unit(self.design, self.clip_unit),
            privacy_unit=checked_privacy_unit(self.design, self.privacy_unit),
            small_units=default if self.small_units is None else self.small_units,
        )
        unit = str(self.privacy_unit)
        check_people(self.design, self.people, unit, self.population, relation)
        if relation == "add_remove" and self.small_units == "error":
            raise ValueError(
                "small_units must be 'keep' under add_remove, got 'error': refusing a "
                "unit because of its size would reveal who is in it"
            )
        _ = self.in_group  # raises for bands without a theorem

    def check_values(self) -> None:
        """Refuses levels without a size, and units that are too small."""
        _ = self.path_rates
        if self.small_units == "error":
            _refuse_small_units(self)

    @functools.cached_property
    def design(self) -> Sampling:
        """``sampling`` as a design; the constructor has wrapped a single scheme."""
        return cast(Sampling, self.sampling)

    @property
    def in_group(self) -> GaussianStep:
        """With `Bands`: the step within the smallest group. Otherwise this step."""
        return self if self.bands is None else self._in_group

    @functools.cached_property
    def _in_group(self) -> GaussianStep:
        bands = cast(Bands, self.bands)
        if self.population is not None and bands.count > 1:
            raise NotImplementedError(
                "bands with a Population have no theorem here: state the sizes to be "
                "divided among the groups as population= of the levels"
            )
        drawn = in_group(
            self.design, bands, str(self.privacy_unit), self.neighboring_relation
        )
        return dataclasses.replace(self, sampling=drawn, bands=None)

    def uses(self, num_steps: Any) -> Any:
        """Returns the largest number of the run's steps that one unit can be in.

        With bands: ``ceil(num_steps / bands.count)``, the steps of the first group.
        """
        if self.bands is None:
            return num_steps
        # Not -(-n // count): unsigned integers have no negative.
        return num_steps // self.bands.count + (num_steps % self.bands.count > 0)

    @property
    def cycle(self) -> Any:
        """Steps after which a run may be repeated: an epoch of every group, or 1."""
        scheme = epoch_scheme(self.design)
        length = 1 if scheme is None else np.asarray(scheme.steps_per_epoch)
        return length if self.bands is None else length * self.bands.count

    @functools.cached_property
    def path_rates(self) -> PathRates:
        """Sampling rates of each level down to the privacy unit, along every path.

        For a person, whose examples may be on many paths: of all levels.
        """
        spec.refuse_traced(self)
        drawn = self.in_group.design
        levels = drawn.level_names
        used = len(levels)
        if self.privacy_unit not in OWNED:
            used = levels.index(str(self.privacy_unit)) + 1
        elif isinstance(drawn, PeopleBlocks) and self.people is None:
            used = 1  # without bounds every episode of the block may hold the person
        if isinstance(drawn, IndependentEpisodes):
            return path_rates(drawn.sampling, self.population, used - 1)
        return path_rates(drawn, self.population, used)

    @property
    def level_names_used(self) -> tuple[str, ...]:
        """Names of the levels in ``path_rates``, top to bottom."""
        names = self.design.level_names
        if isinstance(self.design, IndependentEpisodes):
            names = names[1:]  # the number of episodes is fixed: they have no rate
        return names[: self.path_rates.num_levels]

    @functools.cached_property
    def num_protected_units(self) -> int | None:
        """Number of protected units in the `Population`; None without one."""
        if self.population is None or self.privacy_unit in OWNED:
            return None
        return int(self.path_rates.multiplicity.sum())


def rate_places(step: GaussianStep) -> dict[str, str]:
    """Returns the field path of each scheme's rate, by the level's name."""
    fields = {scheme.rate_field for scheme in step.design.schemes}
    places = (where for where in step.all_numbers if where.rpartition(".")[2] in fields)
    names = (scheme.name for scheme in step.design.schemes)
    return dict(zip(names, places, strict=True))


def banded(step: GaussianStep, bands: Bands | None) -> GaussianStep:
    """Returns the step with correlated noise, which samples one group at a time.

    The rates of ``step`` are rates *within* a group; its sizes are those of all data.
    All functions accept the result. ``bands=None`` is independent noise.

    Raises:
      NotImplementedError: groups below the protected level; people in several groups; a
        level without replacement whose groups have no public size; a `Population`.
      ValueError: a group smaller than a sample.
    """
    _validation.instance("step", step, GaussianStep, "a GaussianStep")
    return dataclasses.replace(step, bands=bands)


class ComposedSteps(spec.Spec):
    """A run of several kinds of steps; made by `compose`.

    Attributes:
      steps: the steps; all that have a privacy unit or neighbouring relation have the
        same one.
      counts: how often each step is run: whole numbers >= 0, scalars or arrays.
    """

    called = "composed run"

    steps: tuple[GaussianStep | Release, ...]
    counts: tuple[spec.Counts, ...]

    def check_fields(self) -> None:
        """Checks that there is a count for each step, and one protection for all."""
        super().check_fields()
        if not self.steps or len(self.counts) != len(self.steps):
            raise ValueError(
                "compose needs at least one (step, count) pair, and a count for each "
                f"step, got {len(self.steps)} steps and {len(self.counts)} counts"
            )
        one_protection("composed steps", self.steps)
        gaussian = [step for step in self.gaussian_steps if step.population is not None]
        trees = [step.population for step in gaussian]
        if any(tree is not trees[0] and tree != trees[0] for tree in trees[1:]):
            raise ValueError("composed steps must have the same population, got others")
        depths = {
            # The episodes of grouped classes are no level of the tree.
            step.path_rates.num_levels - isinstance(step.design, GroupedClasses)
            for step in gaussian
        }
        if len(depths) > 1:
            levels = tuple(step.design.level_names for step in self.gaussian_steps)
            raise ValueError(
                "composed steps must reach the privacy unit by the same levels of the "
                f"population, got {levels}"
            )

    @property
    def gaussian_steps(self) -> tuple[GaussianStep, ...]:
        """The `GaussianStep` objects among the steps."""
        return tuple(step for step in self.steps if isinstance(step, GaussianStep))


OneStep = GaussianStep | Release
"""One step of a run."""
AnyStep = GaussianStep | Release | ComposedSteps
"""What the accountant accepts."""


def compose(*steps_and_counts: tuple[AnyStep, Any]) -> ComposedSteps:
    """Returns the run that consists of each step the given number of times.

    ``compose((step_a, 300), (step_b, 200))``. The order does not matter. A step may be
    a `GaussianStep`, a release or a composed run, which is then repeated as a whole:
    ``compose((run, 3), (release, 1))``. All steps must protect the same units: the same
    privacy unit and relation, if they have one, and the same `Population`. Each (step,
    count) pair starts its own epochs.

    Args:
      *steps_and_counts: pairs of a step and a count, a whole number >= 0. Counts
        broadcast with the steps' fields.

    Raises:
      TypeError: an argument that is not such a pair.
      ValueError: no pair, steps that protect different units, or a count out of range.
    """
    steps: list[OneStep] = []
    counts: list[Any] = []
    for pair in steps_and_counts:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"compose takes (step, count) pairs, got {pair!r}")
        step, count = pair
        spec.checked("each step of compose", step, AnyStep)
        if isinstance(step, ComposedSteps):
            times = _validation.integer_array("count", count, minimum=0)
            for inner, often in zip(step.steps, step.counts, strict=True):
                if isinstance(inner, GaussianStep):
                    _refuse_part_of_cycle(inner, often, times)
                # Both are at most 2**53: the float product errs by 1e-15 relative.
                if np.any(np.asarray(often, np.float64) * times > 2.0**53):
                    raise ValueError(
                        "each count of a composed run must be at most 2**53"
                    )
                steps.append(inner)
                counts.append(np.asarray(often, np.int64) * times)
        else:
            steps.append(step)
            counts.append(count)
    return ComposedSteps(tuple(steps), tuple(counts))


def parts_of(
    step: AnyStep, count: Any = 1
) -> tuple[tuple[OneStep, ...], tuple[Any, ...]]:
    """Returns the steps of a run and their counts; a step alone has this ``count``."""
    composed = isinstance(step, ComposedSteps)
    return (step.steps, step.counts) if composed else ((step,), (count,))


def steps_owed(step: GaussianStep, num_steps: ArrayLike, planned: int) -> np.ndarray:
    """Returns the steps to be charged: begun epochs are whole, up to the plan's end."""
    taken = np.asarray(num_steps, np.int64)
    if epoch_scheme(step.design) is None:
        return taken
    whole = -(-taken // step.cycle) * step.cycle
    return np.where(taken <= planned, np.minimum(whole, planned), whole)


def gaussian_parts(step: Any, what: str) -> tuple[GaussianStep, ...]:
    """Returns the steps of a run; raises unless all are `GaussianStep` objects."""
    parts, _ = parts_of(step)
    for part in parts:
        if isinstance(part, Release):
            raise NotImplementedError(
                f"{what} covers runs of GaussianStep only, got a {type(part).__name__}"
            )
        spec.checked("step", part, GaussianStep | ComposedSteps)
    return cast("tuple[GaussianStep, ...]", parts)


def _refuse_part_of_cycle(step: GaussianStep, count: Any, times: np.ndarray) -> None:
    """Refuses to repeat a run that ends within an epoch."""
    if np.any((np.mod(count, step.cycle) > 0) & (times > 1)):
        scheme = epoch_scheme(step.design)
        what = "a round of its groups" if scheme is None else f"epoch {scheme.name!r}"
        raise NotImplementedError(
            f"compose cannot repeat a run with part of {what} ({count!r} steps of "
            f"{step.cycle!r}): give one (step, count) pair for each repetition"
        )


def one_protection(what: str, steps: tuple[GaussianStep | Release, ...]) -> None:
    """Refuses steps with different privacy units or neighbouring relations."""
    for field in ("privacy_unit", "neighboring_relation"):
        values = (getattr(step, field, None) for step in steps)
        known = tuple(value for value in values if value is not None)
        if len(set(known)) > 1:
            raise ValueError(f"{what} must have the same {field}, got {known}")


def checked_clip_unit(design: Sampling, clip_unit: str | None) -> str:
    """Returns the clip unit: the given one, or the design's default."""
    levels = design.level_names
    units = (RESERVED_LEVEL_NAME, *levels)
    episodic = not isinstance(design, MultistageSampling)
    default = EPISODE if episodic else levels[0] if len(levels) == 1 else None
    clip_unit = default if clip_unit is None else clip_unit
    if clip_unit is None:
        raise ValueError(
            f"clip_unit must be one of {units}, whose contribution is clipped, got None"
        )
    _validation.choice("clip_unit", clip_unit, units)
    if episodic and clip_unit != EPISODE:
        raise NotImplementedError(
            f"clip_unit={clip_unit!r} with {type(design).__name__} has no theorem "
            "here; covered: clip_unit='episode'"
        )
    if clip_unit != levels[0]:
        refuse_epochs(f"clip_unit={clip_unit!r}", epoch_scheme(design))
    return clip_unit


def checked_privacy_unit(design: Sampling, privacy_unit: str | None) -> str:
    """Returns the privacy unit: the given one, or the design's default."""
    levels = design.level_names
    in_blocks = isinstance(design, PeopleBlocks)
    default = PERSON if in_blocks else levels[-1]
    unit = default if privacy_unit is None else privacy_unit
    _validation.choice("privacy_unit", unit, (*levels, *OWNED))
    if unit == PERSON or (unit == ORIGINAL and not in_blocks):
        return unit
    if in_blocks:
        raise NotImplementedError(
            f"privacy_unit={unit!r} with PeopleBlocks has no theorem here; covered: "
            f"{PERSON!r}"
        )
    if not isinstance(design, MultistageSampling) and unit == EPISODE:
        raise NotImplementedError(
            f"privacy_unit='episode' with {type(design).__name__}: episodes are "
            f"formed by the sampler and belong to nobody; covered: {levels[1:]}"
        )
    return unit


def _refuse_small_units(step: GaussianStep) -> None:
    """Raises if a unit is smaller than a draw, and names one."""
    rates, population = step.path_rates, step.population
    for level, small in enumerate(rates.clipped):
        if not np.any(small):
            continue
        draw, group = rates.draw_sizes[level], rates.group_sizes[level]
        assert draw is not None and group is not None  # else `clipped` is False
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
            f"level {step.level_names_used[level]!r}: size must be at most the "
            f"population, got size={draw[first]} of {group[first]}{where}; "
            "with small_units='keep' the step samples all children of such a unit"
        )

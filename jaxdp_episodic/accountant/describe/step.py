"""One step of private training, described once; several of them in one run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, cast, get_args

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.bands import Bands, in_group
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    Sampling,
    checked_sampling,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.mechanisms import RELEASES
from jaxdp_episodic.accountant.describe.people import PersonBounds, check_people
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.rates import (
    NEIGHBORING_RELATIONS,
    PathRates,
    path_rates,
)
from jaxdp_episodic.accountant.describe.releases import Release
from jaxdp_episodic.accountant.describe.schemes import (
    EPISODE,
    ORIGINAL,
    OWNED,
    PERSON,
    RESERVED_LEVEL_NAME,
    MultistageSampling,
    Scheme,
    refuse_epochs,
)
from jaxdp_episodic.accountant.describe.spec import (
    Check,
    Spec,
    frozen_number,
    refuse_traced,
    set_numbers,
)

STEP = RESERVED_LEVEL_NAME
SMALL_UNITS = ("error", "keep")


@dataclass(frozen=True, eq=False)
class GaussianStep(Spec):
    """How episodes are drawn, what is clipped, who is protected, how much noise.

    The step releases the sum of the clipped contributions plus Gaussian noise of
    standard deviation ``noise_multiplier`` times the clip norm. Numeric fields, here
    and in ``sampling``, may be arrays; they broadcast together, so one step is one
    setting or a million.

    The guarantee needs, beyond what the constructor can check:

    * Locality: a clipped contribution depends on the drawn content of its own unit,
      the current model, public data and fresh randomness, on nothing else. Where
      examples interact (support and query, a softmax over classes, batch statistics)
      the clip unit must hold the whole interaction, i.e. the episode or task.
    * Rates, noise and number of steps are fixed in advance; every step draws afresh.
    * What the docstring of ``sampling`` asks for.

    Attributes:
      sampling: a `MultistageSampling`, `GroupedClasses`, `IndependentEpisodes` or
        `PeopleBlocks`; a single scheme is wrapped.
      noise_multiplier: standard deviation of the noise in clip norms, >= 0.
      clip_unit: the level whose contributions are clipped, or "step" (the whole step is
        one contribution). Default: "episode" for the episodic designs, the only
        level of a one-level sampling; else it must be named.
      privacy_unit: the level of the protected unit; default: the last. Or "person":
        somebody whose examples may be in several units, in at most as many as
        ``people`` says; the default, and the only one, of `PeopleBlocks`. Where people
        are units of a level, each in one place, name that level. Or "original": an
        example with all of its copies, such as rotations, that are examples of other
        classes; ``people`` says in how many: four rotations of every class are
        ``PersonBounds(examples=1, classes=4)``.
      neighboring_relation: "add_remove" (one unit more or less), "replace_one" (its
        content changed in place; a move to another group is not covered) or
        "zero_out" (its data become null). Under zero_out units have *slots*, whose
        number is public and is what every size here means; the sampler draws slots,
        filled or not, and a contribution whose drawn content holds a null one is 0.
        One unit more or less is then a slot that is filled or not: choose it where
        sizes are private and an upper bound of them is public, or for less epsilon
        than under replace_one. A null that is only masked is *not* covered.
      population: a `Population`, whose sizes replace those of the specs; under zero_out
        of slots. The guarantee is that of the largest path.
      small_units: a unit with fewer children than a draw asks for is an error ("error",
        the default under replace_one) or gives all it has ("keep", the default under
        zero_out, where children are slots, and the only choice under add_remove, where
        refusing data by its size would itself leak).
      people: the `PersonBounds` of privacy_unit="person" or "original".
      bands: the `Bands` of correlated noise, see `banded`; None for independent noise.

    Raises:
      ValueError: an unknown level, a level without a size, bounds of a person that are
        missing, or a small unit where these are errors.
      NotImplementedError: a combination that no theorem covers.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "sampling": (
            MultistageSampling,
            *get_args(Scheme),
            GroupedClasses,
            IndependentEpisodes,
            PeopleBlocks,
        ),
        "population": (Population,),
        "people": (PersonBounds,),
        "bands": (Bands,),
    }

    numeric: ClassVar[Mapping[str, Check]] = {
        "noise_multiplier": _validation.nonnegative_array
    }

    sampling: Sampling | Scheme
    _: KW_ONLY
    noise_multiplier: float | np.ndarray
    clip_unit: str | None = None
    privacy_unit: str | None = None
    neighboring_relation: str = "add_remove"
    population: Population | None = None
    small_units: str | None = None
    people: PersonBounds | None = None
    bands: Bands | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", checked_sampling(self.sampling))
        set_numbers(self)
        _validation.choice(
            "neighboring_relation", self.neighboring_relation, NEIGHBORING_RELATIONS
        )
        clip_unit = _checked_clip_unit(self.design, self.clip_unit)
        privacy_unit = _checked_privacy_unit(self.design, self.privacy_unit)
        object.__setattr__(self, "clip_unit", clip_unit)
        object.__setattr__(self, "privacy_unit", privacy_unit)
        check_people(
            self.design,
            self.people,
            str(self.privacy_unit),
            self.population,
            self.neighboring_relation,
        )
        small_units = _checked_small_units(self.small_units, self.neighboring_relation)
        object.__setattr__(self, "small_units", small_units)
        _ = self.in_group  # refuses bands without a theorem
        if self.is_traced:
            return  # checked when they are known
        if small_units == "error":
            names = self.level_names_used
            _refuse_small_units(self.path_rates, names, self.population)
        _ = self.path_rates  # refuses a level without a size

    @functools.cached_property
    def design(self) -> Sampling:
        """``sampling``, which the constructor has made a design if it was a scheme."""
        return cast(Sampling, self.sampling)

    @property
    def in_group(self) -> GaussianStep:
        """The ordinary step of the smallest group of `Bands`; without any, this one."""
        return self if self.bands is None else self._in_group

    @functools.cached_property
    def _in_group(self) -> GaussianStep:
        if not isinstance(self.bands, Bands):
            shown = _validation.shown(self.bands)
            raise TypeError(f"bands must be a Bands or None, got {shown}")
        if self.population is not None and self.bands.count > 1:
            raise NotImplementedError(
                "bands with a Population have no theorem here: state the sizes that "
                "groups share out as population= of the levels"
            )
        drawn = in_group(
            self.design, self.bands, str(self.privacy_unit), self.neighboring_relation
        )
        return dataclasses.replace(self, sampling=drawn, bands=None)

    def uses(self, num_steps: Any) -> Any:
        """Returns the steps of ``num_steps`` that one unit can be in, at most.

        Those of the group that has most, ``ceil(num_steps / bands.count)``.
        """
        if self.bands is None:
            return num_steps
        # Not by -(-n // count), as unsigned numbers have no -n.
        return num_steps // self.bands.count + (num_steps % self.bands.count > 0)

    @property
    def cycle(self) -> Any:
        """After how many steps a run may be repeated: an epoch, of all groups; or 1."""
        scheme = epoch_scheme(self.design)
        length = 1 if scheme is None else np.asarray(scheme.steps_per_epoch)
        return length if self.bands is None else length * self.bands.count

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of all numeric fields."""
        parts = {"sampling": self.design.shape}
        if isinstance(self.people, PersonBounds):
            parts["people"] = self.people.shape
        return _validation.broadcast_shape(
            **{name: np.empty(shape, np.uint8) for name, shape in parts.items()},
            **self.numbers,
        )

    @functools.cached_property
    def path_rates(self) -> PathRates:
        """Rates at every level down to the privacy unit, along every distinct path.

        Of a person, whose examples may be on many paths: down to the last level.
        """
        refuse_traced(self)
        drawn = self.in_group.design
        levels = drawn.level_names
        used = len(levels)
        if self.privacy_unit not in OWNED:
            used = levels.index(str(self.privacy_unit)) + 1
        elif isinstance(drawn, PeopleBlocks) and self.people is None:
            used = 1  # nothing rests on how a block's episode draws
        if isinstance(drawn, IndependentEpisodes):
            return path_rates(drawn.sampling, self.population, used - 1)
        return path_rates(drawn, self.population, used)

    @property
    def level_names_used(self) -> tuple[str, ...]:
        """Names of the levels that ``path_rates`` has, top to bottom."""
        names = self.design.level_names
        if isinstance(self.design, IndependentEpisodes):
            names = names[1:]  # the episode itself is not drawn out of anything
        return names[: self.path_rates.num_levels]

    @functools.cached_property
    def num_protected_units(self) -> int | None:
        """How many units are protected, where a `Population` says so; else None."""
        if self.population is None or self.privacy_unit in OWNED:
            return None
        return int(self.path_rates.multiplicity.sum())


def banded(step: GaussianStep, bands: Bands | None) -> GaussianStep:
    """Returns the step with correlated noise: it draws from one group at a time.

    The rates of ``step`` are those *within* a group, its sizes those of all data: with
    ``Poisson("user", sampling_probability=0.2)`` and five groups of users, every step
    draws a fifth of one group. Every question then answers for it: a run of
    ``num_steps`` costs what ``ceil(num_steps / bands.count)`` steps within a group do.

    Args:
      step: the step.
      bands: see `Bands`; None for independent noise.

    Raises:
      NotImplementedError: groups below the protected level, or of people whose
        examples may lie in several; a level without replacement whose groups have no
        public size; a `Population`.
      ValueError: a group that is smaller than a draw.
    """
    return dataclasses.replace(step, bands=bands)


@dataclass(frozen=True, eq=False)
class ComposedSteps(Spec):
    """Different steps in one run; made by `compose`.

    Attributes:
      steps: the steps, all with the same privacy unit and neighbouring relation, where
        they have one.
      counts: how often each is taken: whole numbers >= 0, scalars or arrays.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "steps": (GaussianStep, *RELEASES)
    }

    traceable: ClassVar[tuple[str, ...]] = ("steps", "counts")

    steps: tuple[GaussianStep | Release, ...]
    counts: tuple[int | np.ndarray, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.steps, tuple) or not self.steps:
            raise ValueError("compose needs at least one (step, count) pair, got none")
        for step in self.steps:
            if not isinstance(step, GaussianStep | Release):
                raise TypeError(
                    "compose takes GaussianStep objects, releases and composed runs "
                    "(of disjoint parts each takes what is taken of all), got "
                    f"{_validation.shown(step)}"
                )
        if len(self.counts) != len(self.steps):
            raise ValueError(
                f"counts must have one entry a step ({len(self.steps)}), "
                f"got {len(self.counts)}"
            )
        counts = tuple(
            count
            if _validation.is_traced(count)
            else frozen_number(_validation.integer_array("count", count, minimum=0))
            for count in self.counts
        )
        object.__setattr__(self, "counts", counts)
        _check_composable(self.steps)
        _ = self.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of all fields and counts."""
        parts = {
            f"step {i}": np.empty(step.shape, np.uint8)
            for i, step in enumerate(self.steps)
        }
        counts = {f"count {i}": count for i, count in enumerate(self.counts)}
        return _validation.broadcast_shape(**parts, **counts)

    @property
    def gaussian_steps(self) -> tuple[GaussianStep, ...]:
        """Those of the steps that are no releases."""
        return tuple(step for step in self.steps if isinstance(step, GaussianStep))


OneStep = GaussianStep | Release
"""One step of a run."""
AnyStep = GaussianStep | Release | ComposedSteps
"""Whatever can be accounted."""


def compose(*steps_and_counts: tuple[AnyStep, Any]) -> ComposedSteps:
    """Returns the run that takes each step the given number of times.

    ``compose((step_a, 300), (step_b, 200))``. The order does not matter. A step may be
    a `GaussianStep`, a release (`LaplaceRelease`, `ApproximateDP`,
    `ZeroConcentratedDP`) or a composed run, which is then taken as often as a whole:
    ``compose((run, 3), (release, 1))``. The steps must protect the same units: the same
    privacy unit and relation, where they have one, and the same `Population`. Each path
    through the tree is composed first and the worst one taken last. Every pair begins
    epochs of its own.

    Args:
      *steps_and_counts: pairs of a step and a whole number >= 0; counts broadcast with
        the steps' fields.

    Raises:
      TypeError: an argument that is not such a pair.
      ValueError: no pair, steps that do not protect the same units, or a count out of
        range.
    """
    steps: list[OneStep] = []
    counts: list[Any] = []
    for pair in steps_and_counts:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"compose takes (step, count) pairs, got {pair!r}")
        step, count = pair
        if isinstance(step, ComposedSteps):
            times = _validation.integer_array("count", count, minimum=0)
            for inner, often in zip(step.steps, step.counts, strict=True):
                if isinstance(inner, GaussianStep):
                    _refuse_part_of_cycle(inner, often, times)
            steps += step.steps
            counts += [_multiplied(inner, times) for inner in step.counts]
        else:
            steps.append(step)
            counts.append(count)
    return ComposedSteps(tuple(steps), tuple(counts))


def steps_owed(step: GaussianStep, num_steps: ArrayLike, planned: int) -> np.ndarray:
    """Returns the steps that a run owes if it ends, or stands, after ``num_steps``."""
    taken = np.asarray(num_steps, np.int64)
    if epoch_scheme(step.design) is None:
        return taken
    whole = -(-taken // step.cycle) * step.cycle
    return np.where(taken <= planned, np.minimum(whole, planned), whole)


def gaussian_parts(step: Any, what: str) -> tuple[GaussianStep, ...]:
    """Returns the steps of a run, refused unless all are Gaussian."""
    parts = step.steps if isinstance(step, ComposedSteps) else (step,)
    for part in parts:
        if isinstance(part, Release):
            raise NotImplementedError(
                f"{what} covers runs of GaussianStep only, got a {type(part).__name__}"
            )
        if not isinstance(part, GaussianStep):
            raise TypeError(
                "step must be a GaussianStep or a composed run, "
                f"got {_validation.shown(step)}"
            )
    return cast("tuple[GaussianStep, ...]", parts)


def _refuse_part_of_cycle(step: GaussianStep, count: Any, times: np.ndarray) -> None:
    """Refuses to repeat a run that ends within an epoch: each time begins a new one."""
    if np.any((np.mod(count, step.cycle) > 0) & (times > 1)):
        scheme = epoch_scheme(step.design)
        what = "a round of its groups" if scheme is None else f"epoch {scheme.name!r}"
        raise NotImplementedError(
            f"compose cannot repeat a run with part of {what} ({count!r} steps of "
            f"{step.cycle!r}): give one (step, count) pair for each time it is taken"
        )


def _multiplied(count: Any, times: np.ndarray) -> np.ndarray:
    """The product of two counts; refused where it is not exact."""
    product = np.asarray(count, np.int64) * times
    # Both are at most 2**53, so the product in floats is right to a part in 10^15.
    if np.any(np.asarray(count, np.float64) * times > 2.0**53):
        raise ValueError("counts of a composed run must be at most 2**53 in all")
    return product


def _check_composable(steps: tuple[GaussianStep | Release, ...]) -> None:
    """Refuses steps that protect different units."""
    gaussian = [step for step in steps if isinstance(step, GaussianStep)]
    one_protection("composed steps", steps)
    trees = [step.population for step in gaussian if step.population is not None]
    if any(tree is not trees[0] and tree != trees[0] for tree in trees[1:]):
        raise ValueError("composed steps must have one and the same population")
    depths = {_depth_in_tree(s) for s in gaussian if s.population is not None}
    if len(depths) > 1:
        raise ValueError(
            "composed steps must reach the privacy unit by the same levels of the "
            f"population, got {tuple(s.design.level_names for s in gaussian)}"
        )


def one_protection(what: str, steps: tuple[GaussianStep | Release, ...]) -> None:
    """Refuses steps of several privacy units or relations, where they have one."""
    for field in ("privacy_unit", "neighboring_relation"):
        values = (getattr(step, field, None) for step in steps)
        known = tuple(value for value in values if value is not None)
        if len(set(known)) > 1:
            raise ValueError(f"{what} must have one {field}, got {known}")


def _depth_in_tree(step: GaussianStep) -> int:
    """The level of the population at which the protected units lie."""
    # The episodes of grouped classes are formed, not found in the tree.
    formed = isinstance(step.design, GroupedClasses)
    return step.path_rates.num_levels - formed


def _checked_clip_unit(design: Sampling, clip_unit: str | None) -> str:
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


def _checked_privacy_unit(design: Sampling, privacy_unit: str | None) -> str:
    """Returns the privacy unit: a level's name, or who may be on many paths."""
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
            f"{PERSON!r}, of whom it is a part"
        )
    if not isinstance(design, MultistageSampling) and unit == EPISODE:
        raise NotImplementedError(
            f"privacy_unit='episode' with {type(design).__name__}: an episode "
            f"is drawn, not owned by anybody; covered: {levels[1:]}"
        )
    return unit


def _checked_small_units(small_units: str | None, neighboring_relation: str) -> str:
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


def _refuse_small_units(
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

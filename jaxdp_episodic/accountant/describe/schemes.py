"""Specs of what is drawn at each level of a tree of units."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import (
    AT_LEAST_ONE,
    Check,
    Spec,
)

# The clip unit "step" means the whole step, so no level may be called that.
RESERVED_LEVEL_NAME = "step"
# Nor this: a privacy unit that may be in many places of the tree (`PersonBounds`).
PERSON = "person"
# Nor this: an example with all of its copies, each in a class of its own.
ORIGINAL = "original"
OWNED = (PERSON, ORIGINAL)
"""Privacy units that may be in many places of the tree, within `PersonBounds`."""
# Name of the level of episodes.
EPISODE = "episode"
# Levels of a sampling, and of a `Population`, at most.
MAX_LEVELS = 32
_RESERVED = (RESERVED_LEVEL_NAME, *OWNED)
# Letters of a level's name, at most: every message about it repeats it.
_LONGEST_NAME = 200


def checked_name(field: str, name: Any) -> str:
    """Returns the name of a level; refuses what is none, or reserved."""
    if not isinstance(name, str):
        raise TypeError(f"{field} must be a string, got {_validation.shown(name)}")
    if name in _RESERVED or not 1 <= len(name) <= _LONGEST_NAME:
        raise ValueError(
            f"{field} must be a non-empty string of at most {_LONGEST_NAME} letters "
            f"other than {_RESERVED}, got {_validation.shown(name)}"
        )
    return name


class LevelScheme(Spec):
    """Base of the schemes: of a level with a name, whose numeric fields broadcast."""

    # The field that says how many are drawn.
    rate_field: ClassVar[str]
    # A public number of units, where one is needed.
    population: Any = None

    def __post_init__(self) -> None:
        checked_name("name", getattr(self, "name", None))
        super().__post_init__()

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of the numeric fields."""
        return levels_shape([self])


@dataclass(frozen=True, eq=False)
class Poisson(LevelScheme):
    """Every child of a unit picked one level up is drawn independently.

    The draws are fresh and secret in every step, and *all* drawn children are
    processed: a cap on the realised batch, or shuffled epochs in its place, void the
    guarantee.

    Attributes:
      name: the level's name, e.g. ``"school"``.
      sampling_probability: scalar or array in [0, 1].
      population: a public *upper* bound of the number of children of any unit one
        level up, whole number >= 1 (scalar or array), or None. It is no part of the
        rate. It is needed only when contributions are clipped below the privacy unit,
        whose number of contributions it bounds, and at the protected level in training
        under ``zero_out``, where it is the number of slots.

    Raises:
      ValueError: a reserved name.
    """

    rate_field: ClassVar[str] = "sampling_probability"
    numeric: ClassVar[Mapping[str, Check]] = {
        "sampling_probability": _validation.probability_array,
        "population": AT_LEAST_ONE,
    }

    name: str
    _: KW_ONLY
    sampling_probability: ArrayLike
    population: ArrayLike | None = None


@dataclass(frozen=True, eq=False)
class WithoutReplacement(LevelScheme):
    """``size`` of the ``population`` children of each picked unit, all sets alike.

    Rate: ``min(size, population) / population``. A unit with fewer children than
    ``size`` gives all of them (rate 1).

    ``population`` is the number of children in the larger of the two neighbouring data
    sets, *or a public lower bound of it*, at every unit of the level above: a smaller
    value is safe, it only makes the rate larger. Under ``zero_out`` it is the number of
    *slots* that are drawn from, null ones included, a public upper bound of the filled
    ones. Fresh secret draws every step.

    Attributes:
      name: the level's name, e.g. ``"pupil"``.
      size: whole number >= 1 (scalar or array).
      population: whole number >= 1 (scalar or array), or None when the step is given
        a `Population`, whose sizes replace it.
      population_is_exact: states that ``population`` is the exact number of children,
        in the larger neighbour, of *every* unit one level up. Needed for the case
        ``size >= population`` to cost no more than full participation under
        ``add_remove``: a lower bound does not show that everybody is drawn, and
        drawing all but one costs more than drawing all. A `Population` does not state
        it at the protected level: it lists the data at hand, which somebody may join.

    Raises:
      ValueError: a reserved name, or an exact population that
        is not given.
    """

    rate_field: ClassVar[str] = "size"
    numeric: ClassVar[Mapping[str, Check]] = dict.fromkeys(
        ("size", "population"), AT_LEAST_ONE
    )
    flags: ClassVar[tuple[str, ...]] = ("population_is_exact",)

    name: str
    _: KW_ONLY
    size: ArrayLike
    population: ArrayLike | None = None
    population_is_exact: bool = False

    def check_values(self) -> None:
        """Refuses an exact population that is not given."""
        if self.population_is_exact and self.population is None:
            raise ValueError("population_is_exact=True needs a population, got None")


@dataclass(frozen=True, eq=False)
class RandomAllocation(LevelScheme):
    """Epochs: each unit takes part in one step of every epoch, at random.

    Also called balls and bins. At the start of every epoch each unit picks its step
    uniformly, independently of all others and in secret; so all units are seen in an
    epoch, and batches vary in size. A run of ``num_steps`` steps is as many whole
    epochs as fit and a part of one more, which is fixed in advance: a run that stops in
    the middle of an epoch *because of what it saw* is charged the whole one.

    Method "pld" and intervals are certified; the errors of "exact" are estimated, see
    docs/theory.md, "Epochs".

    Preconditions beyond those of `MultistageSampling`: the bins are drawn afresh in
    every epoch (the same bins in all of them are *not* covered), and what a step
    releases is a sum, or one divided by a constant, never by the realised batch size.

    Attributes:
      name: the level's name; the first level, and the one that is clipped.
      steps_per_epoch: whole number >= 1 (scalar or array).
      times: in how many steps of an epoch a unit takes part, whole number, 1 <= times
        <= steps_per_epoch: the epoch is cut into as many blocks of consecutive steps,
        the first ``steps_per_epoch % times`` of them one step longer, and each unit
        picks one step of every block.

    Raises:
      ValueError: a reserved name.

    Reference: Chua, Ghazi, Kamath, Kumar, Manurangsi, Sinha, Zhang (2024),
    arXiv:2412.16802; Feldman and Shenfeld (2025), arXiv:2502.08202.
    """

    rate_field: ClassVar[str] = "steps_per_epoch"
    numeric: ClassVar[Mapping[str, Check]] = dict.fromkeys(
        ("steps_per_epoch", "times"), AT_LEAST_ONE
    )

    name: str
    _: KW_ONLY
    steps_per_epoch: ArrayLike
    times: ArrayLike = 1

    def check_values(self) -> None:
        """Refuses more times than there are steps."""
        if np.any(np.greater(self.times, self.steps_per_epoch)):
            raise ValueError(
                "times must be at most steps_per_epoch, got "
                f"times={self.times!r}, steps_per_epoch={self.steps_per_epoch!r}"
            )


@dataclass(frozen=True, eq=False)
class ShuffledEpochs(LevelScheme):
    """Epochs in random order, cut into batches of (nearly) the same size.

    What most training loops do. *No amplification is known* for it: an epoch, begun or
    finished, costs what one step without any sampling does. `RandomAllocation` gives
    every unit as many steps and costs far less.

    Attributes:
      name: the level's name; the first level, and the one that is clipped.
      steps_per_epoch: whole number >= 1 (scalar or array).

    Raises:
      ValueError: a reserved name.

    Reference: Chua, Ghazi, Kamath, Kumar, Manurangsi, Sinha, Zhang (2024),
    arXiv:2403.17673: shuffling can cost far more than Poisson draws.
    """

    rate_field: ClassVar[str] = "steps_per_epoch"
    numeric: ClassVar[Mapping[str, Check]] = {"steps_per_epoch": AT_LEAST_ONE}

    name: str
    _: KW_ONLY
    steps_per_epoch: ArrayLike


EpochScheme = RandomAllocation | ShuffledEpochs
"""Schemes whose draws last for an epoch."""
Scheme = Poisson | WithoutReplacement | EpochScheme

_EPOCHS_COVERED = (
    "covered: it is the first level of a MultistageSampling, or the episodes= of a "
    "GroupedClasses or PeopleBlocks, and the level that is clipped; below it, draws "
    "that are fresh in every step"
)


class Design(Spec):
    """Base of what a step draws: levels, and schemes that draw them."""

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes of all levels that are drawn, top to bottom."""
        raise NotImplementedError

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of all numeric fields, those of the schemes included."""
        return levels_shape(self.schemes, **self.numbers)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class MultistageSampling(Design):
    """One scheme a level: children are drawn of every unit picked one level up.

    ``MultistageSampling(Poisson("school", ...), WithoutReplacement("pupil", ...))``
    draws schools, then pupils of each drawn school. What is clipped and who is
    protected is said by the step, not here.

    The guarantees that the accountant derives hold under these preconditions:

    * *Locality.* A clipped contribution is a function of its own unit's drawn content,
      the current model, public data and fresh randomness; never of other units, of
      data not drawn, or of realised sizes. Where contributions interact (support and
      query, a softmax over the ways, batch statistics) the clip unit must contain the
      whole interaction.
    * *Public unit lists.* Units above the protected one are on a public list. An
      emptied unit stays on it, is drawn at the same rate and contributes zero. Under
      ``add_remove`` units are not dropped because of their size.
    * *Slots.* Under ``zero_out`` the draws are made among public slots, whether they
      are filled or not, and a contribution whose drawn content holds a null is 0.
    * *One path each.* Every protected unit lies under exactly one path of the tree.
    * *Unequal units.* The guarantee is that of the path with the largest epsilon;
      give the step a `Population` to have every path evaluated, or a ``population``
      that is a lower bound for all units of its level.
    * *Fixed in advance.* Rates, noise and the number of steps do not react to what was
      released; the draws of every step are fresh and secret.

    Attributes:
      levels: the schemes, top to bottom, at least one, with different names.

    Raises:
      TypeError: a level that is not a scheme.
      ValueError: no level, repeated names, or fields that do not broadcast.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "levels": (Poisson, WithoutReplacement, RandomAllocation, ShuffledEpochs)
    }

    traceable: ClassVar[tuple[str, ...]] = ("levels",)

    levels: tuple[Scheme, ...]

    def __init__(self, *levels: Scheme) -> None:
        object.__setattr__(self, "levels", levels)
        if not levels:
            raise ValueError("MultistageSampling needs at least one level, got none")
        if len(levels) > MAX_LEVELS:
            raise ValueError(
                f"MultistageSampling takes at most {MAX_LEVELS} levels, "
                f"got {len(levels)}"
            )
        for position, level in enumerate(levels):
            check_scheme(f"level {position + 1}", level)
            if position:
                refuse_epochs(f"level {position + 1}", level)
        for name in self.level_names:
            if self.level_names.count(name) > 1:
                raise ValueError(f"level names must differ, got {name!r} twice")
        _ = self.shape  # refuses fields that do not broadcast

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MultistageSampling:
        """Returns the sampling with these fields."""
        levels = fields["levels"]
        if not isinstance(levels, tuple):
            raise TypeError(f"levels must be a list, got {_validation.shown(levels)}")
        return cls(*levels)

    @functools.cached_property
    def level_names(self) -> tuple[str, ...]:
        """The levels' names, top to bottom."""
        return tuple(level.name for level in self.levels)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes of all levels that are drawn, top to bottom: ``levels``."""
        return self.levels

    def with_scheme(self, scheme: Scheme) -> MultistageSampling:
        """Returns the sampling with another scheme at the level of that name."""
        return MultistageSampling(
            *(scheme if level.name == scheme.name else level for level in self.levels)
        )

    def __repr__(self) -> str:
        return f"MultistageSampling({', '.join(map(repr, self.levels))})"


def check_scheme(name: str, value: Any) -> None:
    """Refuses anything but a scheme."""
    if not isinstance(value, Scheme):
        raise TypeError(
            f"{name} must be a Poisson, WithoutReplacement, RandomAllocation or "
            f"ShuffledEpochs, got {_validation.shown(value)}"
        )


def check_named(field: str, scheme: Any, name: str) -> None:
    """Refuses what is not a scheme, or a scheme of another level."""
    check_scheme(field, scheme)
    if scheme.name != name:
        raise ValueError(f"{field} must be named {name!r}, got {scheme.name!r}")


def refuse_epochs(where: str, value: Any) -> None:
    """Refuses a scheme by epochs where no theorem has one."""
    if isinstance(value, EpochScheme):
        raise NotImplementedError(
            f"{where}: {type(value).__name__} has no theorem there; {_EPOCHS_COVERED}"
        )


def levels_shape(levels: Iterable[Any], **others: Any) -> tuple[int, ...]:
    """Returns the broadcast shape of all fields of the levels and of ``others``."""
    fields = {
        f"{level.name}.{field}": value
        for level in levels
        for field, value in level.numbers.items()
    }
    return _validation.broadcast_shape(**others, **fields)

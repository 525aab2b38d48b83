"""What a step samples: schemes of levels, and designs made of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, Self, get_args

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe import spec

# Names that no level may have. "step" is the clip unit of the whole step; the others
# are privacy units that may be in many places of the tree, within `PersonBounds`.
RESERVED_LEVEL_NAME = "step"
PERSON = "person"
# An example with all of its copies, each in another class.
ORIGINAL = "original"
OWNED = (PERSON, ORIGINAL)
# Names of the levels of episodic designs.
EPISODE = "episode"
CLASS = "class"
EXAMPLE = "example"
# Largest number of levels of a sampling and of a `Population`.
MAX_LEVELS = 32
_RESERVED = (RESERVED_LEVEL_NAME, *OWNED)
# Largest length of a level's name, which messages repeat.
_LONGEST_NAME = 200


def checked_name(field: str, name: Any) -> str:
    """Returns the name of a level; refuses reserved names and other types."""
    _validation.instance(field, name, str, "a string")
    if name in _RESERVED or not 1 <= len(name) <= _LONGEST_NAME:
        raise ValueError(
            f"{field} must be a non-empty string of at most {_LONGEST_NAME} letters "
            f"other than {_RESERVED}, got {_validation.shown(name)}"
        )
    return name


def refuse_repeats(field: str, names: Sequence[str], least: int = 0) -> None:
    """Refuses a name that is given twice, and fewer than ``least`` names: 0 or 1."""
    if len(set(names)) < len(names) or len(names) < least:
        rule = "be at least one name, all different" if least else "differ"
        raise ValueError(f"{field} must {rule}, got {_validation.shown(names)}")


class LevelScheme(spec.Spec):
    """Base of the schemes: a named level whose numeric fields broadcast."""

    # The field that sets the sampling rate.
    rate_field: ClassVar[str]
    # A public number of units, if the scheme needs one.
    population = None

    name: Annotated[str, checked_name]


class Poisson(LevelScheme):
    """Poisson sampling: samples every child of a sampled parent independently.

    Every step samples again and in secret, and *all* sampled children are processed. A
    limit on the batch size, or shuffled epochs instead of Poisson sampling, void the
    guarantee.

    Attributes:
      name: the level's name, e.g. ``"school"``.
      sampling_probability: scalar or array in [0, 1].
      population: a public *upper* bound on the number of children of any parent, whole
        number >= 1 (scalar or array), or None. The sampling does not depend on it. It
        is needed in two cases: if contributions are clipped below the privacy unit, it
        bounds their number; in training under ``zero_out``, at the protected level, it
        is the number of slots.
    """

    rate_field = "sampling_probability"

    _: KW_ONLY
    sampling_probability: spec.Probabilities
    population: spec.Sizes | None = None


class WithoutReplacement(LevelScheme):
    """Samples ``size`` of the ``population`` children of each sampled parent.

    All sets of this size are equally likely. The rate is
    ``min(size, population) / population``. All children of a parent with fewer than
    ``size`` are sampled (rate 1).

    Every step samples again and in secret.

    Attributes:
      name: the level's name, e.g. ``"pupil"``.
      size: whole number >= 1 (scalar or array).
      population: the number of children of every parent in the larger of the two
        neighbouring data sets, *or a public lower bound on it*, which is safe. Under
        ``zero_out`` the number of *slots* to sample from, empty ones included. Whole
        number >= 1 (scalar or array), or None if the step has a `Population`, whose
        sizes replace it.
      population_is_exact: states that ``population`` is the exact number of children of
        *every* parent in the larger neighbour. Under ``add_remove`` a sample with
        ``size >= population`` costs no more than full participation only if this is
        stated: sampling all but one costs more than sampling all. A `Population` does
        not state it at the protected level, because a unit may join.

    Raises:
      ValueError: a reserved name, or population_is_exact without a population.
    """

    rate_field = "size"

    _: KW_ONLY
    size: spec.Sizes
    population: spec.Sizes | None = None
    population_is_exact: Annotated[bool, _validation.flag] = False

    def check_values(self) -> None:
        """Refuses ``population_is_exact`` without a population."""
        if self.population_is_exact and self.population is None:
            raise ValueError("population_is_exact=True needs a population, got None")


class RandomAllocation(LevelScheme):
    """Random allocation: each unit is in one uniformly random step of every epoch.

    Also called balls and bins. At the start of every epoch the step of each unit is
    chosen uniformly, independently of all others and in secret. A run of ``num_steps``
    steps consists of whole epochs and possibly a part of one more, whose length is
    fixed in advance: docs/draws.md, "A part of an epoch".

    For two steps of an epoch or more, method "exact" returns the certified upper bound
    of "pld", and `PrivacyInfo` says so. See docs/theory.md, "Epochs", also for the
    preconditions: the same allocation in all epochs is *not* covered, nor are sums
    divided by the actual batch size.

    Attributes:
      name: the level's name. It must be the first level and the clip unit.
      steps_per_epoch: whole number >= 1 (scalar or array).
      times: number of steps of an epoch in which a unit takes part, whole number, 1 <=
        times <= steps_per_epoch. The epoch is divided into this many blocks of
        consecutive steps, the first ``steps_per_epoch % times`` of them one step
        longer, and each unit picks one step of every block.

    Reference: Chua, Ghazi, Kamath, Kumar, Manurangsi, Sinha, Zhang (2024),
    arXiv:2412.16802; Feldman and Shenfeld (2025), arXiv:2502.08202.
    """

    rate_field = "steps_per_epoch"
    at_most = (("times", "steps_per_epoch"),)

    _: KW_ONLY
    steps_per_epoch: spec.Sizes
    times: spec.Sizes = 1


class ShuffledEpochs(LevelScheme):
    """Shuffled epochs: batches of nearly equal size in random order.

    *No amplification is known* for it: an epoch, whether complete or not, costs as much
    as one step without sampling. `RandomAllocation` costs far less.

    Attributes:
      name: the level's name. It must be the first level and the clip unit.
      steps_per_epoch: whole number >= 1 (scalar or array).

    Reference: Chua, Ghazi, Kamath, Kumar, Manurangsi, Sinha, Zhang (2024),
    arXiv:2403.17673: shuffling can cost far more than Poisson sampling.
    """

    rate_field = "steps_per_epoch"
    # Steps of an epoch in which a unit takes part.
    times: ClassVar[int] = 1

    _: KW_ONLY
    steps_per_epoch: spec.Sizes


EpochScheme = RandomAllocation | ShuffledEpochs
"""Schemes that sample once per epoch."""
Scheme = Poisson | WithoutReplacement | EpochScheme

_EPOCHS_COVERED = (
    "covered: it is the first level of a MultistageSampling, or the episodes= of a "
    "GroupedClasses or PeopleBlocks, and the clip unit; the levels below it sample "
    "again in every step"
)


class Design(spec.Spec):
    """Base of the designs, whose fields hold the schemes of levels, top to bottom."""

    @functools.cached_property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes of all sampled levels, top to bottom."""
        found: list[Any] = []
        for name in spec.spec_fields(self):
            value: Any = getattr(self, name)
            values = value.schemes if isinstance(value, Design) else value
            values = values if isinstance(values, tuple) else (values,)
            found += [one for one in values if isinstance(one, Scheme)]
        return tuple(found)

    @functools.cached_property
    def level_names(self) -> tuple[str, ...]:
        """The levels' names, top to bottom."""
        return tuple(scheme.name for scheme in self.schemes)

    def with_scheme(self, scheme: Scheme) -> Self:
        """Returns the design with this scheme at the level of its name."""

        def placed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(placed, value))
            if isinstance(value, Design):
                return value.with_scheme(scheme)
            is_level = isinstance(value, Scheme) and value.name == scheme.name
            return scheme if is_level else value

        fields = {name: placed(getattr(self, name)) for name in spec.spec_fields(self)}
        return self.from_fields(fields)


class MultistageSampling(Design):
    """Multistage sampling: one scheme per level, for the children of sampled parents.

    ``MultistageSampling(Poisson("school", ...), WithoutReplacement("pupil", ...))``
    samples schools, then pupils of each sampled school. The step, not the sampling,
    says what is clipped and who is protected.

    The guarantee holds under the preconditions of docs/theory.md, which nothing checks:
    *locality* (a clipped contribution depends on its own unit's sampled content only),
    *public lists* of the units above the protected level (emptied ones stay), *slots*
    under ``zero_out``, *one path* to each protected unit, and rates, noise and number
    of steps *fixed in advance*. Every step samples again and in secret. If units are
    unequal, give the step a `Population`, to have every path evaluated, or a
    ``population`` that is a lower bound for all units of the level.

    Attributes:
      levels: the schemes, top to bottom; at least one, with different names.

    Raises:
      TypeError: a level that is not a scheme.
      ValueError: no level, repeated or reserved names, or fields that do not broadcast.
    """

    levels: tuple[Scheme, ...]

    def __init__(self, *levels: Scheme) -> None:
        object.__setattr__(self, "levels", levels)
        self.__post_init__()

    def check_fields(self) -> None:
        """Checks the levels one by one, and that their names differ."""
        if not 1 <= len(self.levels) <= MAX_LEVELS:
            raise ValueError(
                "MultistageSampling takes at least one level and at most "
                f"{MAX_LEVELS}, got {len(self.levels)}"
            )
        super().check_fields()
        for position, level in enumerate(self.levels[1:], start=2):
            refuse_epochs(f"level {position}", level)
        refuse_repeats("level names", self.level_names)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MultistageSampling:
        """Returns the sampling with these fields."""
        return cls(*_validation.instance("levels", fields["levels"], tuple, "a list"))

    def __repr__(self) -> str:
        return f"MultistageSampling({', '.join(map(repr, self.levels))})"


def _named(name: str, *kinds: type) -> spec.Kind:
    """Returns the kind of a scheme that must have this name."""

    def checked(field: str, scheme: Any) -> Any:
        spec.checked(field, scheme, Scheme)
        if scheme.name != name:
            raise ValueError(f"{field} must be named {name!r}, got {scheme.name!r}")
        if name != EPISODE:
            refuse_epochs(field, scheme)
        elif scheme.population is not None:
            raise ValueError(
                f"{field} must have population=None: the design determines the number "
                f"of episodes, got population={scheme.population!r}"
            )
        return scheme

    return spec.Kind(checked, specs=kinds)


def refuse_epochs(where: str, value: Any) -> None:
    """Refuses an epoch scheme in a place that no theorem covers."""
    if isinstance(value, EpochScheme):
        raise NotImplementedError(
            f"{where}: {type(value).__name__} has no theorem there; {_EPOCHS_COVERED}"
        )


def _within_episode(field: str, sampling: Any) -> MultistageSampling:
    """Returns the sampling of one episode; wraps a single scheme."""
    if isinstance(sampling, Scheme):
        sampling = MultistageSampling(sampling)
    if isinstance(sampling, Design) and not isinstance(sampling, MultistageSampling):
        raise NotImplementedError(
            f"{field}: {type(sampling).__name__} within an episode has no theorem "
            "here; covered: MultistageSampling, Poisson, WithoutReplacement"
        )
    spec.checked(field, sampling, MultistageSampling | Poisson | WithoutReplacement)
    refuse_epochs(f"{field} of an episode", sampling.levels[0])
    if EPISODE in sampling.level_names:
        raise ValueError(
            f"{field} must not have a level named {EPISODE!r}: it describes one "
            f"episode; got levels {sampling.level_names}"
        )
    return sampling


_FRESH = Poisson, WithoutReplacement
_Episodes = Annotated[Scheme, _named(EPISODE, *get_args(Scheme))]
_Classes = Annotated[Scheme, _named(CLASS, *_FRESH)]
_Examples = Annotated[WithoutReplacement, _named(EXAMPLE, *_FRESH)]
_WithinEpisode = Annotated[
    Any, spec.Kind(_within_episode, specs=(MultistageSampling, *_FRESH))
]


class PeopleBlocks(Design, kw_only=True):
    """Episodes within blocks of people: a person affects the episodes of one block.

    The public list of people (under ``zero_out``: of slots for people) is partitioned
    into ``floor(num_people / people_per_block)`` blocks; the remaining people are left
    out. A block forms ``episodes_per_block`` episodes out of its own people's data, and
    a step samples from the episodes of all blocks. The privacy unit is "person". A
    person may have any number of classes and examples, and no bound on them is needed.

    Preconditions beyond those of `MultistageSampling`:

    * *Partition.* It does not depend on anybody's data. It may be public and the same
      in all steps; with `RandomAllocation` and `ShuffledEpochs` it is kept for an
      epoch. Under ``add_remove``, if a person leaves, nobody moves to another block:
      the place stays on the list, or a hash of the name determines the block.
    * *Locality.* An episode's examples and all its choices depend only on its block's
      data and public facts. An example with several owners is used only if all of them
      are in the block, and is removed when any one of them leaves.
    * *Slots.* Under ``zero_out`` an episode's choices depend on slots only, whether
      filled or not. If they depend on the data (classes with enough drawings), use
      "replace_one".
    * *With bounds* (``people=`` of the step): each of a block's episodes samples
      classes and examples independently, among public slots, without looking at their
      content. If choices depend on the data, or if two episodes of a block divide
      classes or examples between them, give no bounds.

    Attributes:
      num_people: length of the public list of people, whole number >= 1.
      people_per_block: whole number, 1 <= people_per_block <= num_people.
      episodes: a scheme named "episode"; without replacement, its ``size`` is the
        number of episodes per step, out of those of all blocks.
      sampling: how an episode samples from its block, a `MultistageSampling` or a
        scheme. Its populations are those *within a block*. With `PersonBounds` it gives
        the probability that an episode holds the person. Without bounds, or without
        ``sampling``, every episode of the block may hold the person.
      episodes_per_block: whole number >= 1.

    Raises:
      ValueError: a wrong level name, or a population of episodes.
      NotImplementedError: epochs within a block.
    """

    at_most = (("people_per_block", "num_people"),)

    num_people: spec.Sizes
    people_per_block: spec.Sizes
    episodes: _Episodes
    sampling: _WithinEpisode | None = None
    episodes_per_block: spec.Sizes = 1

    @property
    def num_possible_episodes(self) -> np.ndarray:
        """Number of episodes of all blocks."""
        blocks = np.floor_divide(self.num_people, self.people_per_block)
        return blocks * np.asarray(self.episodes_per_block)


class GroupedClasses(Design, kw_only=True):
    """N-way episodes from one pool of classes; a class is in at most one of a step.

    Give either ``episodes`` or ``classes``.

    * ``episodes``: every step partitions *all* classes at random into
      ``floor(num_classes / ways)`` episodes (with public randomness that does not look
      at the data; the remaining classes are left out) and samples episodes of this
      partition. A Poisson scheme is the cheapest design known. With `RandomAllocation`
      or `ShuffledEpochs` the partition is fresh in every *epoch*, and each of its
      episodes is assigned to a step.
    * ``classes``: classes are sampled, then the sampled ones are grouped at random into
      episodes, and the remaining ones are dropped.

    ``examples`` samples support and query of each class in an episode together:
    ``size`` is shots plus queries, and the two are disjoint.

    Preconditions beyond those of `MultistageSampling`: each episode's contribution is
    clipped as a whole; an emptied class keeps its place in the partition, which is
    fresh in every step and does not look at the data. Under ``zero_out`` the pool
    consists of ``num_classes`` slots, and an episode contributes 0 if it has a null
    class or samples a null example.

    Attributes:
      num_classes: size of the public pool of classes, whole number >= 1.
      ways: classes per episode, whole number, 1 <= ways <= num_classes.
      episodes: a scheme named "episode"; without replacement, its ``size`` is the
        number of episodes per step, out of ``floor(num_classes / ways)``.
      classes: a scheme named "class", instead of ``episodes``.
      examples: a `WithoutReplacement` named "example"; ``population`` is the number of
        examples of a class (see there), or None if the step has a `Population` of
        classes and examples.

    Raises:
      ValueError: a wrong level name, both or neither of ``episodes`` and ``classes``,
        or a population that contradicts the design.
      NotImplementedError: Poisson sampling of examples.
    """

    at_most = (("ways", "num_classes"),)

    num_classes: spec.Sizes
    ways: spec.Sizes
    episodes: _Episodes | None = None
    classes: _Classes | None = None
    examples: _Examples

    def check_fields(self) -> None:
        """Checks each field, and that either episodes or classes are sampled."""
        if (self.episodes is None) == (self.classes is None):
            given = "neither" if self.episodes is None else "both"
            raise ValueError(f"give exactly one of episodes= and classes=, got {given}")
        super().check_fields()
        if isinstance(self.examples, Poisson):
            raise NotImplementedError(
                "GroupedClasses with examples=Poisson has no theorem here; covered: "
                "examples=WithoutReplacement('example', ...)"
            )

    def check_values(self) -> None:
        """Refuses populations and numbers of classes that contradict the design."""
        super().check_values()
        classes = self.classes
        if classes is None:
            return
        number, size = classes.population, getattr(classes, "size", self.ways)
        if number is not None and np.any(np.not_equal(number, self.num_classes)):
            raise ValueError(
                "classes must have population=None or num_classes, got "
                f"population={number!r}, num_classes={self.num_classes!r}"
            )
        if np.any(np.less(size, self.ways)):
            raise ValueError(
                "classes must sample at least `ways` classes to form an episode; "
                f"got size={size!r}, ways={self.ways!r}"
            )

    @functools.cached_property
    def level_names(self) -> tuple[str, ...]:
        """The levels' names, top to bottom."""
        return EPISODE, CLASS, EXAMPLE

    @property
    def num_possible_episodes(self) -> np.ndarray:
        """Episodes in one partition of all classes: ``floor(num_classes / ways)``."""
        return np.floor_divide(self.num_classes, self.ways)


class IndependentEpisodes(Design):
    """A public number of episodes per step, each sampled through all stages.

    An example can be in several episodes of a step, which is accounted for. Each
    episode's contribution is clipped as a whole. ``num_episodes`` is public and fixed
    in advance; the episodes are sampled independently of each other.

    Attributes:
      sampling: a `MultistageSampling` without a level named "episode", or one scheme.
        The preconditions in its docstring must hold for each episode.
      num_episodes: whole number >= 1 (scalar or array).

    Raises:
      ValueError: a level named "episode", or fields that do not broadcast.
      NotImplementedError: a sampling that is itself an episodic design.
    """

    sampling: _WithinEpisode
    _: KW_ONLY
    num_episodes: spec.Sizes

    @functools.cached_property
    def level_names(self) -> tuple[str, ...]:
        """The level "episode", then those of ``sampling``, top to bottom."""
        return EPISODE, *self.sampling.level_names


Sampling = MultistageSampling | GroupedClasses | IndependentEpisodes | PeopleBlocks


def checked_sampling(sampling: Any) -> Sampling:
    """Returns the design; a single scheme becomes a `MultistageSampling`."""
    spec.checked("sampling", sampling, Sampling | Scheme)
    return MultistageSampling(sampling) if isinstance(sampling, Scheme) else sampling


def epoch_scheme(sampling: Sampling) -> EpochScheme | None:
    """Returns the scheme that samples once per epoch; None if every step samples."""
    first = sampling.schemes[0]
    return first if isinstance(first, EpochScheme) else None


def block_lengths(scheme: EpochScheme) -> np.ndarray:
    """Returns the steps in each block of an epoch, in order."""
    steps = int(np.asarray(scheme.steps_per_epoch))
    times = int(np.asarray(scheme.times))
    return np.full(times, steps // times) + (np.arange(times) < steps % times)

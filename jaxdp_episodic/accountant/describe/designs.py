"""Episodic designs: grouped classes and independent episodes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.schemes import (
    EPISODE,
    Design,
    EpochScheme,
    MultistageSampling,
    Poisson,
    RandomAllocation,
    Scheme,
    ShuffledEpochs,
    WithoutReplacement,
    check_named,
    refuse_epochs,
    within_episode,
)
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ONE

# Names of the levels of episodic designs, below the episode.
CLASS = "class"
EXAMPLE = "example"

_GROUPED_COVERED = (
    "covered: episodes=Poisson('episode', ...), "
    "episodes=WithoutReplacement('episode', ...), "
    "episodes=RandomAllocation('episode', ...), "
    "episodes=ShuffledEpochs('episode', ...), classes=Poisson('class', ...) or "
    "classes=WithoutReplacement('class', ...), each with "
    "examples=WithoutReplacement('example', ...)"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupedClasses(Design):
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

    Preconditions beyond those of `MultistageSampling`: each episode's contribution (its
    gradient) is clipped as a whole; the list of classes is public, and an emptied class
    keeps its place in the partition; the partition is fresh in every step and does not
    look at the data. Under ``zero_out`` the pool consists of ``num_classes`` slots, and
    an episode contributes 0 if it has a null class or samples a null example. If
    classes are protected, the step is then the Poisson-sampled Gaussian mechanism.

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

    nested_specs = {
        "episodes": (Poisson, WithoutReplacement, RandomAllocation, ShuffledEpochs),
        "classes": (Poisson, WithoutReplacement),
        "examples": (Poisson, WithoutReplacement),
    }

    numeric = dict.fromkeys(("num_classes", "ways"), AT_LEAST_ONE)
    at_most = (("ways", "num_classes"),)

    num_classes: ArrayLike
    ways: ArrayLike
    episodes: Scheme | None = None
    classes: Scheme | None = None
    examples: WithoutReplacement

    def __post_init__(self) -> None:
        if (self.episodes is None) == (self.classes is None):
            given = "neither" if self.episodes is None else "both"
            raise ValueError(f"give exactly one of episodes= and classes=, got {given}")
        if self.episodes is not None:
            check_named("episodes", self.episodes, EPISODE)
        if self.classes is not None:
            check_named("classes", self.classes, CLASS)
            refuse_epochs("classes", self.classes)
        check_named("examples", self.examples, EXAMPLE)
        refuse_epochs("examples", self.examples)
        if isinstance(self.examples, Poisson):
            raise NotImplementedError(
                "GroupedClasses with examples=Poisson has no theorem here; "
                f"{_GROUPED_COVERED}"
            )
        super().__post_init__()

    def check_values(self) -> None:
        """Refuses populations and numbers of classes that contradict the design."""
        super().check_values()
        if self.episodes is not None and self.episodes.population is not None:
            raise ValueError(
                "episodes must have population=None: there are "
                "floor(num_classes / ways) episodes; got "
                f"population={self.episodes.population!r}"
            )
        classes = self.classes
        if classes is None:
            return
        if classes.population is not None and np.any(
            np.not_equal(classes.population, self.num_classes)
        ):
            raise ValueError(
                "classes must have population=None or num_classes, got "
                f"population={classes.population!r}, num_classes={self.num_classes!r}"
            )
        if isinstance(classes, WithoutReplacement) and np.any(
            np.less(classes.size, self.ways)
        ):
            raise ValueError(
                "classes must sample at least `ways` classes to form an episode; "
                f"got size={classes.size!r}, ways={self.ways!r}"
            )

    @functools.cached_property
    def level_names(self) -> tuple[str, ...]:
        """The levels' names, top to bottom."""
        return EPISODE, CLASS, EXAMPLE

    @property
    def num_possible_episodes(self) -> np.ndarray:
        """Episodes in one partition of all classes: ``floor(num_classes / ways)``."""
        return np.floor_divide(self.num_classes, self.ways)


@dataclass(frozen=True, eq=False, init=False)
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

    nested_specs = {"sampling": (MultistageSampling, Poisson, WithoutReplacement)}

    numeric = {"num_episodes": AT_LEAST_ONE}

    sampling: MultistageSampling
    num_episodes: ArrayLike

    def __init__(
        self, sampling: MultistageSampling | Scheme, *, num_episodes: ArrayLike
    ) -> None:
        object.__setattr__(self, "sampling", within_episode(sampling))
        object.__setattr__(self, "num_episodes", num_episodes)
        self.__post_init__()

    @functools.cached_property
    def level_names(self) -> tuple[str, ...]:
        """The level "episode", then those of ``sampling``, top to bottom."""
        return EPISODE, *self.sampling.level_names


Sampling = MultistageSampling | GroupedClasses | IndependentEpisodes | PeopleBlocks


def checked_sampling(sampling: Any) -> Sampling:
    """Returns the design; a single scheme becomes a `MultistageSampling`."""
    if isinstance(sampling, Scheme):
        return MultistageSampling(sampling)
    return _validation.instance(
        "sampling",
        sampling,
        Sampling,
        "a Poisson, WithoutReplacement, RandomAllocation, ShuffledEpochs, "
        "MultistageSampling, GroupedClasses, IndependentEpisodes or PeopleBlocks",
    )


def epoch_scheme(sampling: Sampling) -> EpochScheme | None:
    """Returns the scheme that samples once per epoch; None if every step samples."""
    first = sampling.schemes[0]
    return first if isinstance(first, EpochScheme) else None


def block_lengths(scheme: EpochScheme) -> np.ndarray:
    """Returns the steps in each block of an epoch, in order."""
    steps = int(np.asarray(scheme.steps_per_epoch))
    is_allocated = isinstance(scheme, RandomAllocation)
    times = int(np.asarray(scheme.times)) if is_allocated else 1
    return np.full(times, steps // times) + (np.arange(times) < steps % times)

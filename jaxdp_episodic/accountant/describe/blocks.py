"""Episodes made within blocks of people, so that a person is in one of them only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.schemes import (
    EPISODE,
    Design,
    MultistageSampling,
    Poisson,
    RandomAllocation,
    Scheme,
    ShuffledEpochs,
    WithoutReplacement,
    check_named,
    refuse_epochs,
)
from jaxdp_episodic.accountant.describe.spec import (
    AT_LEAST_ONE,
    Check,
    set_checked,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class PeopleBlocks(Design):
    """Episodes within blocks of people: a person can change the episodes of one block.

    The public list of people (under ``zero_out``: of slots of people) is partitioned
    into ``floor(num_people / people_per_block)`` blocks; a remainder sits out. A block
    makes ``episodes_per_block`` episodes out of its own people's data, and of all
    blocks' episodes a step draws some. The privacy unit is "person". However many
    classes and examples a person has, no bound of them is needed.

    Preconditions beyond those of `MultistageSampling`:

    * *Partition.* It does not look at anybody's data. It may be public, and the same in
      all steps; with `RandomAllocation` and `ShuffledEpochs` it stays for an epoch.
      Under ``add_remove`` a person's leaving moves nobody to another block: the place
      stays on the list, or blocks are hashes of names.
    * *Locality.* An episode takes its examples, and makes all its choices, from its
      block's data and public facts. An example with several owners has all of them in
      its block, or is left out, and goes when any one of them goes.
    * *Slots.* Under ``zero_out`` an episode's choices look at slots, filled or not.
      Where they look at the data (classes with enough drawings), say "replace_one".
    * *With bounds* (``people=`` of the step), which make the chance to be in an episode
      smaller than 1: classes and examples are drawn among public slots, filled or not,
      without a look at what is in them, for each of a block's episodes afresh. Where an
      episode's choices look at the data (classes with enough drawings in this block),
      or where two episodes of a block share out classes or examples, give no bounds.

    Attributes:
      num_people: length of the public list of people, whole number >= 1.
      people_per_block: whole number, 1 <= people_per_block <= num_people.
      episodes: a scheme named "episode"; without replacement, its ``size`` is the
        number of episodes a step, out of those of all blocks.
      sampling: how an episode draws from its block, a `MultistageSampling` or a scheme;
        its populations are those *within a block*. Bounds of how many classes and
        examples a person has (`PersonBounds`) then say how likely an episode holds
        her. Without bounds, or without it, every episode may hold her.
      episodes_per_block: whole number >= 1.

    Raises:
      ValueError: a wrong level name, a population that the design itself determines.
      NotImplementedError: epochs within a block.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "episodes": (Poisson, WithoutReplacement, RandomAllocation, ShuffledEpochs),
        "sampling": (MultistageSampling, Poisson, WithoutReplacement),
    }

    numeric: ClassVar[Mapping[str, Check]] = dict.fromkeys(
        ("num_people", "people_per_block", "episodes_per_block"), AT_LEAST_ONE
    )

    num_people: ArrayLike
    people_per_block: ArrayLike
    episodes: Scheme
    sampling: MultistageSampling | None = None
    episodes_per_block: ArrayLike = 1

    def __post_init__(self) -> None:
        for name, check in self.numeric.items():
            set_checked(self, check, name)
        check_named("episodes", self.episodes, EPISODE)
        if self.episodes.population is not None:
            raise ValueError(
                "episodes must have population=None: the blocks say how many there "
                f"are; got population={self.episodes.population!r}"
            )
        if np.any(np.greater(self.people_per_block, self.num_people)):
            raise ValueError(
                "people_per_block must be at most num_people, got people_per_block="
                f"{self.people_per_block!r}, num_people={self.num_people!r}"
            )
        object.__setattr__(self, "sampling", _checked_inside(self.sampling))
        _ = self.shape  # refuses fields that do not broadcast

    @property
    def level_names(self) -> tuple[str, ...]:
        """The level "episode", then those within a block, top to bottom."""
        return tuple(scheme.name for scheme in self.schemes)

    @property
    def num_possible_episodes(self) -> np.ndarray:
        """Episodes of all blocks, of which a step draws."""
        blocks = np.floor_divide(self.num_people, self.people_per_block)
        return blocks * np.asarray(self.episodes_per_block)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes of all levels that are drawn, top to bottom."""
        inside = () if self.sampling is None else self.sampling.levels
        return self.episodes, *inside

    def with_scheme(self, scheme: Scheme) -> PeopleBlocks:
        """Returns the design with another scheme at the level of that name."""
        if scheme.name == EPISODE:
            return dataclasses.replace(self, episodes=scheme)
        assert self.sampling is not None  # it has the level
        return dataclasses.replace(self, sampling=self.sampling.with_scheme(scheme))


def _checked_inside(sampling: Any) -> MultistageSampling | None:
    """The draw within a block, a single scheme wrapped."""
    if sampling is None:
        return None
    if isinstance(sampling, Scheme):
        sampling = MultistageSampling(sampling)
    if not isinstance(sampling, MultistageSampling):
        raise TypeError(
            "sampling must be a MultistageSampling, a scheme or None, "
            f"got {_validation.shown(sampling)}"
        )
    refuse_epochs("sampling of PeopleBlocks", sampling.levels[0])
    if EPISODE in sampling.level_names:
        raise ValueError(
            f"sampling must not have a level named {EPISODE!r}: it draws within an "
            f"episode of a block; got levels {sampling.level_names}"
        )
    return sampling

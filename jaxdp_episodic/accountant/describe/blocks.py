"""Blocks of people: every episode is formed within one block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

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
    within_episode,
)
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ONE


@dataclass(frozen=True, eq=False, kw_only=True)
class PeopleBlocks(Design):
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
    * *With bounds* (``people=`` of the step), which make the probability that an
      episode holds the person smaller than 1: each of a block's episodes samples
      classes and examples independently, among public slots, filled or not, without
      looking at their content. If an episode's choices depend on the data (classes
      with enough drawings in this block), or if two episodes of a block divide classes
      or examples between them, give no bounds.

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

    nested_specs = {
        "episodes": (Poisson, WithoutReplacement, RandomAllocation, ShuffledEpochs),
        "sampling": (MultistageSampling, Poisson, WithoutReplacement),
    }

    numeric = dict.fromkeys(
        ("num_people", "people_per_block", "episodes_per_block"), AT_LEAST_ONE
    )
    at_most = (("people_per_block", "num_people"),)

    num_people: ArrayLike
    people_per_block: ArrayLike
    episodes: Scheme
    sampling: MultistageSampling | None = None
    episodes_per_block: ArrayLike = 1

    def __post_init__(self) -> None:
        check_named("episodes", self.episodes, EPISODE)
        if self.episodes.population is not None:
            raise ValueError(
                "episodes must have population=None: the blocks determine the number "
                f"of episodes; got population={self.episodes.population!r}"
            )
        if self.sampling is not None:
            object.__setattr__(self, "sampling", within_episode(self.sampling))
        super().__post_init__()

    @property
    def num_possible_episodes(self) -> np.ndarray:
        """Number of episodes of all blocks."""
        blocks = np.floor_divide(self.num_people, self.people_per_block)
        return blocks * np.asarray(self.episodes_per_block)

"""The designs that a plan compares: what is drawn, what is clipped, what it yields."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    EXAMPLE,
    GroupedClasses,
    IndependentEpisodes,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    EPISODE,
    MultistageSampling,
    Poisson,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import STEP, Sampling

POISSON = "poisson"
EPOCHS = "epochs"
FIXED = "without replacement"
INDEPENDENT = "independent"
BLOCKS = "blocks"
SCHEMES = (POISSON, EPOCHS, FIXED, INDEPENDENT, BLOCKS)
_MAX_INDEPENDENT = 10**6  # episodes a step, which no pool of classes bounds


@dataclass(frozen=True, eq=False)
class Design:
    """One way to draw the episodes of a step, for any number of them."""

    name: str  # as it stands in tables and pictures
    scheme: str  # one of `SCHEMES`
    is_multistage: bool  # False if all examples of a drawn unit take part
    clip_unit: str  # whose contributions are clipped
    examples: int  # drawn of each unit: support and query
    most_episodes: int  # the most that a step can have
    # The sampling for (mean) numbers of episodes, a number or an array.
    sampling: Callable[[Any], Sampling]

    def is_rival_of(self, other: Design) -> bool:
        """Whether this is Poisson sampling of what the other design draws and clips."""
        ours, theirs = (
            (d.clip_unit, d.examples, d.is_multistage) for d in (self, other)
        )
        return self.scheme == POISSON and ours == theirs


def possible_designs(
    population: Population,
    *,
    ways: int | None,
    sizes: tuple[int, ...],
    stated_size: int | None,
    num_people: int | None = None,
) -> list[Design]:
    """Returns the designs of N-way episodes from a pool of classes, or of tasks."""
    unit, example = _levels(population, ways)
    num_units = population.num_units(1)
    level, poisson_name = EPISODE, "Poisson episodes"
    prefix, suffix = "grouped classes, ", ""
    if ways is None:
        level, poisson_name = unit, "Poisson"
        prefix, suffix = "", f", each {unit} clipped"
    most = num_units // (ways or 1)
    designs = []
    for size, is_multistage in _sizes(population, sizes, stated_size):
        examples = WithoutReplacement(example, size=size, population=stated_size)

        def drawn(scheme: Any, examples: Any = examples) -> Sampling:
            if ways is None:
                return MultistageSampling(scheme, examples)
            return GroupedClasses(
                num_classes=num_units, ways=ways, episodes=scheme, examples=examples
            )

        def poisson(number: Any, drawn: Any = drawn) -> Sampling:
            rate = np.minimum(np.asarray(number) / most, 1.0)[()]
            return drawn(Poisson(level, sampling_probability=rate))

        def epochs(number: Any, drawn: Any = drawn) -> Sampling:
            length = _whole(most / np.asarray(number, np.float64))
            return drawn(RandomAllocation(level, steps_per_epoch=length))

        def fixed(number: Any, drawn: Any = drawn) -> Sampling:
            everyone = num_units if ways is None else None
            return drawn(
                WithoutReplacement(level, size=_whole(number), population=everyone)
            )

        def independent(number: Any, examples: Any = examples) -> Sampling:
            units = WithoutReplacement(unit, size=ways or 1, population=num_units)
            return IndependentEpisodes(
                MultistageSampling(units, examples), num_episodes=_whole(number)
            )

        for name, scheme, clip, make in (
            (f"{prefix}{poisson_name}{suffix}", POISSON, level, poisson),
            ("Poisson, whole step clipped", POISSON, STEP, poisson),
            (f"{prefix}epochs{suffix}", EPOCHS, level, epochs),
            (f"{prefix}fixed number{suffix}", FIXED, level, fixed),
            ("independent episodes", INDEPENDENT, EPISODE, independent),
        ):
            if clip == STEP and ways is not None:
                continue
            title = _title(name, size, is_multistage, len(sizes))
            limit = _MAX_INDEPENDENT if scheme == INDEPENDENT else most
            designs.append(
                Design(title, scheme, is_multistage, clip, size, limit, make)
            )
    if num_people is not None:
        designs += _blocks(population, sizes, stated_size, num_people)
    return designs


def _blocks(
    population: Population,
    sizes: tuple[int, ...],
    stated_size: int | None,
    num_people: int,
) -> list[Design]:
    """Blocks of as few people as have, on average, what an episode draws."""
    fewest = stated_size or int(np.min(population.children_counts[1], initial=2**53))
    designs: list[Design] = []
    for size in sorted(set(sizes)) if fewest else ():
        people = math.ceil(size * num_people / fewest)
        most = num_people // people

        def blocks(number: Any, people: int = people, most: int = most) -> Sampling:
            rate = np.minimum(np.asarray(number) / most, 1.0)[()]
            return PeopleBlocks(
                num_people=num_people,
                people_per_block=people,
                episodes=Poisson(EPISODE, sampling_probability=rate),
            )

        if most:
            name = _title(f"blocks of {people:,} people", size, True, len(sizes))
            designs.append(Design(name, BLOCKS, True, EPISODE, size, most, blocks))
    return designs


def _levels(population: Any, ways: int | None) -> tuple[str, str]:
    """Names of the two levels of a tree that designs are known of."""
    if not isinstance(population, Population):
        raise TypeError(f"population must be a Population, got {population!r}")
    if population.num_levels != 2:
        raise NotImplementedError(
            "population must have two levels (classes or tasks, and examples), "
            f"got {population.num_levels}; leave out the upper ones"
        )
    if ways is not None:
        if ways > population.num_units(1):
            raise ValueError(
                f"ways must be at most the {population.num_units(1)} classes, "
                f"got {ways}"
            )
        return CLASS, EXAMPLE
    if not population.level_names:
        raise ValueError(
            "population must name its levels, for example levels = ['school', 'pupil']"
        )
    task, example = (*population.level_names, EXAMPLE)[:2]
    return task, example


def _sizes(
    population: Population, sizes: tuple[int, ...], stated_size: int | None
) -> list[tuple[int, bool]]:
    """The numbers of examples to try; the last one is all: no second stage."""
    everyone = int(np.max(population.children_counts[1], initial=1))
    if stated_size is not None:
        everyone = max(everyone, stated_size)
    tried = [(size, True) for size in sorted(set(sizes)) if size < everyone]
    return [*tried, (everyone, False)]


def _whole(number: Any) -> Any:
    return np.rint(number).astype(np.int64)[()]


def _title(name: str, size: int, is_multistage: bool, num_sizes: int) -> str:
    if not is_multistage:
        return f"{name}, all examples"
    return f"{name}, {size} examples" if num_sizes > 1 else name

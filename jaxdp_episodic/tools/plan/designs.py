"""The designs that a plan compares: what is drawn, what is clipped, what it yields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    EXAMPLE,
    GroupedClasses,
    IndependentEpisodes,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import EPISODE, STEP, Sampling

SCHEMES = ("poisson", "epochs", "without replacement", "independent")
POISSON, EPOCHS, FIXED, INDEPENDENT = SCHEMES


@dataclass(frozen=True, eq=False)
class Design:
    """One way to draw the episodes of a step, for any number of them.

    Attributes:
      name: as it stands in tables and pictures.
      scheme: one of `SCHEMES`.
      is_multistage: False if all examples of a drawn unit take part.
      clip_unit: whose contributions are clipped.
      examples: drawn of each unit: support and query.
      most_episodes: the most that a step can have.
      sampling: the sampling for (mean) numbers of episodes, a number or an array.
    """

    name: str
    scheme: str
    is_multistage: bool
    clip_unit: str
    examples: int
    most_episodes: int
    sampling: Callable[[Any], Sampling]

    def clipped_contributions(self, episodes: np.ndarray) -> np.ndarray:
        """Returns how many contributions are clipped in a step, on average."""
        return np.ones_like(episodes) if self.clip_unit == STEP else episodes

    def is_rival_of(self, other: Design) -> bool:
        """Whether this draws by coins what the other one draws and clips too."""
        ours, theirs = (
            (d.clip_unit, d.examples, d.is_multistage) for d in (self, other)
        )
        return self.scheme == POISSON and ours == theirs


def class_designs(
    population: Population,
    *,
    ways: int,
    sizes: tuple[int, ...],
    stated_size: int | None,
) -> list[Design]:
    """Returns the designs of N-way episodes from one pool of classes.

    Args:
      population: two levels, classes and examples.
      ways: classes an episode.
      sizes: numbers of examples drawn of each class, support and query.
      stated_size: public lower bound of a class's examples, or None.
    """
    num_classes = population.num_units(1)
    possible = num_classes // ways
    designs = []
    for size, is_multistage in _sizes(population, sizes, stated_size):
        examples = WithoutReplacement(EXAMPLE, size=size, population=stated_size)

        def grouped(scheme: Any, examples: Any = examples) -> GroupedClasses:
            return GroupedClasses(
                num_classes=num_classes, ways=ways, episodes=scheme, examples=examples
            )

        def independent(number: Any, examples: Any = examples) -> Sampling:
            classes = WithoutReplacement(CLASS, size=ways, population=num_classes)
            return IndependentEpisodes(
                MultistageSampling(classes, examples), num_episodes=_whole(number)
            )

        def poisson(number: Any, grouped: Any = grouped) -> Sampling:
            rate = np.minimum(np.asarray(number) / possible, 1.0)[()]
            return grouped(Poisson(EPISODE, sampling_probability=rate))

        def epochs(number: Any, grouped: Any = grouped) -> Sampling:
            length = _epoch_length(possible, number)
            return grouped(RandomAllocation(EPISODE, steps_per_epoch=length))

        def fixed(number: Any, grouped: Any = grouped) -> Sampling:
            return grouped(WithoutReplacement(EPISODE, size=_whole(number)))

        for name, scheme, most, make in (
            ("grouped classes, Poisson episodes", POISSON, possible, poisson),
            ("grouped classes, epochs", EPOCHS, possible, epochs),
            ("grouped classes, fixed number", FIXED, possible, fixed),
            ("independent episodes", INDEPENDENT, 10**6, independent),
        ):
            title = _title(name, size, is_multistage, len(sizes))
            designs.append(
                Design(title, scheme, is_multistage, EPISODE, size, most, make)
            )
    return designs


def task_designs(
    population: Population, *, sizes: tuple[int, ...], stated_size: int | None
) -> list[Design]:
    """Returns the designs of tasks that are units of the tree, such as schools.

    Args:
      population: two named levels, tasks and examples.
      sizes: numbers of examples drawn of each task, support and query.
      stated_size: public lower bound of a task's examples, or None.

    Raises:
      NotImplementedError: a tree of more than two levels.
    """
    task, example = task_levels(population)
    num_tasks = population.num_units(1)
    designs = []
    for size, is_multistage in _sizes(population, sizes, stated_size):
        examples = WithoutReplacement(example, size=size, population=stated_size)

        def poisson(number: Any, examples: Any = examples) -> Sampling:
            rate = np.minimum(np.asarray(number) / num_tasks, 1.0)[()]
            return MultistageSampling(
                Poisson(task, sampling_probability=rate), examples
            )

        def epochs(number: Any, examples: Any = examples) -> Sampling:
            length = _epoch_length(num_tasks, number)
            tasks = RandomAllocation(task, steps_per_epoch=length)
            return MultistageSampling(tasks, examples)

        def fixed(number: Any, examples: Any = examples) -> Sampling:
            size = _whole(number)
            tasks = WithoutReplacement(task, size=size, population=num_tasks)
            return MultistageSampling(tasks, examples)

        def independent(number: Any, examples: Any = examples) -> Sampling:
            one = WithoutReplacement(task, size=1, population=num_tasks)
            return IndependentEpisodes(
                MultistageSampling(one, examples), num_episodes=_whole(number)
            )

        for name, scheme, clip, most, make in (
            (f"Poisson, each {task} clipped", POISSON, task, num_tasks, poisson),
            ("Poisson, whole step clipped", POISSON, STEP, num_tasks, poisson),
            (f"epochs, each {task} clipped", EPOCHS, task, num_tasks, epochs),
            (f"fixed number, each {task} clipped", FIXED, task, num_tasks, fixed),
            ("independent episodes", INDEPENDENT, EPISODE, 10**6, independent),
        ):
            title = _title(name, size, is_multistage, len(sizes))
            designs.append(Design(title, scheme, is_multistage, clip, size, most, make))
    return designs


def task_levels(population: Population) -> tuple[str, str]:
    """Returns the names of the two levels of a tree of tasks.

    Raises:
      NotImplementedError: a tree of more than two levels.
      ValueError: levels without names.
    """
    if population.num_levels != 2:
        raise NotImplementedError(
            "plans are for trees of two levels (classes or tasks, and examples), got "
            f"{population.num_levels} levels; leave out the upper ones"
        )
    if len(population.level_names) == 1:
        return population.level_names[0], EXAMPLE
    if len(population.level_names) != 2:
        raise ValueError(
            "population must name its levels, for example levels = ['school', 'pupil']"
        )
    return population.level_names[0], population.level_names[1]


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


def _epoch_length(everyone: int, number: Any) -> Any:
    """Steps of an epoch in which as many take part in a step, on average."""
    return _whole(everyone / np.asarray(number, np.float64))


def _title(name: str, size: int, is_multistage: bool, num_sizes: int) -> str:
    if not is_multistage:
        return f"{name}, all examples"
    return f"{name}, {size} examples" if num_sizes > 1 else name

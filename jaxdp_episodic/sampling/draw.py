"""Draws episodes: exactly what the accounted sampling says, from the same object.

On the host, in NumPy: a draw decides shapes, and takes well under a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.sampling.designs import GroupedClasses, IndependentEpisodes
from jaxdp_episodic.sampling.population import Population
from jaxdp_episodic.sampling.schemes import (
    RESERVED_LEVEL_NAME,
    MultistageSampling,
    Poisson,
    Scheme,
    WithoutReplacement,
)

_NO_UNIT = -1


class Draw(NamedTuple):
    """What one step drew.

    Attributes:
      examples: (J, *slot_shape) int64, places of the drawn units of the last level in
        the population's order; 0 where masked.
      mask: (J, *slot_shape) bool, True where a slot holds a drawn unit. J is the number
        of clip units drawn, 0 included. Along every axis valid slots come first, in
        uniformly random order.
      units: (J,) int64, place of each clip unit among those of its level; -1 where the
        clip unit was formed in the draw (an episode, the step).
    """

    examples: np.ndarray
    mask: np.ndarray
    units: np.ndarray


def step_generator(entropy: int, step: int) -> np.random.Generator:
    """Returns the random generator of one step, a function of its arguments only.

    So a resumed run draws what the interrupted one would have drawn. PCG64DXSM is
    statistically strong, not cryptographically: an observer of many *draws* (which stay
    secret) could predict others.

    Args:
      entropy: whole number >= 0 of any size; 128 bits or more for a private run.
      step: whole number >= 0.
    """
    seed = np.random.SeedSequence(entropy, spawn_key=(step,))
    return np.random.Generator(np.random.PCG64DXSM(seed))


class EpisodeSampler:
    """Draws what a sampling spec describes from a real population.

    Nothing is capped, skipped or reused: every unit that a Poisson draw picks is
    returned, a unit that has become empty is still drawn (and contributes masked
    slots), and every call draws afresh. The sizes are those of ``population``; give the
    step the same one, so that these sizes are the ones that are accounted.

    Args:
      sampling: the spec that is accounted, all its numeric fields scalars.
      population: the tree that is drawn from, with as many levels as the spec has (for
        `GroupedClasses`: classes and examples).
      clip_unit: level whose units become the rows of a draw, or "step".

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a spec with arrays, an unknown level, or sizes in the spec that do not
        describe this population.
      NotImplementedError: a clip unit for which the design has no theorem.
    """

    def __init__(
        self,
        sampling: MultistageSampling | GroupedClasses | IndependentEpisodes | Scheme,
        population: Population,
        *,
        clip_unit: str,
    ) -> None:
        if isinstance(sampling, Poisson | WithoutReplacement):
            sampling = MultistageSampling(sampling)
        if not isinstance(
            sampling, MultistageSampling | GroupedClasses | IndependentEpisodes
        ):
            raise TypeError(f"sampling must be a sampling spec, got {sampling!r}")
        if not isinstance(population, Population):
            raise TypeError(f"population must be a Population, got {population!r}")
        if sampling.shape:
            raise ValueError(
                "sampling must describe one setting, its fields scalars, "
                f"got fields of shape {sampling.shape}"
            )
        names = (RESERVED_LEVEL_NAME, *sampling.level_names)
        if clip_unit not in names:
            raise ValueError(f"clip_unit must be one of {names}, got {clip_unit!r}")
        episodic = not isinstance(sampling, MultistageSampling)
        if episodic and clip_unit != "episode":
            raise NotImplementedError(
                f"clip_unit={clip_unit!r} with {type(sampling).__name__}: "
                "covered: clip_unit='episode'"
            )
        self.sampling, self.population, self.clip_unit = sampling, population, clip_unit
        if isinstance(sampling, GroupedClasses):
            self._design: Any = _Grouped(sampling, population)
        elif isinstance(sampling, IndependentEpisodes):
            self._design = _Independent(sampling, population)
        else:
            self._design = _Multistage(
                sampling.levels, population, names.index(clip_unit)
            )

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Shape of one clip unit's slots: one axis for each level below it."""
        return self._design.slot_shape

    @property
    def expected_units(self) -> float:
        """Mean number of clip units in a draw."""
        return self._design.expected_units

    @property
    def max_units(self) -> int:
        """Largest possible number of clip units in a draw."""
        return self._design.max_units

    def draw(self, generator: np.random.Generator) -> Draw:
        """Returns a fresh draw."""
        return self._design.draw(generator)


class _Level:
    """One level of the tree: where the children of each unit lie."""

    def __init__(self, scheme: Scheme, counts: np.ndarray) -> None:
        self.scheme = scheme
        self.counts = counts
        self.starts = np.cumsum(counts) - counts
        most = int(counts.max(initial=0))
        self.is_poisson = isinstance(scheme, Poisson)
        if isinstance(scheme, Poisson):
            self.rate = float(np.asarray(scheme.sampling_probability))
            self.width = most if self.rate > 0 else 0
        else:
            self.rate = math.nan
            self.width = min(int(np.asarray(scheme.size)), most)
        if isinstance(scheme, WithoutReplacement):
            _check_size(scheme, counts)

    def expected(self) -> np.ndarray:
        """(units,) mean number of children drawn of each unit."""
        if self.is_poisson:
            return self.counts * self.rate
        return np.minimum(self.counts, self.width)

    def largest(self) -> np.ndarray:
        """(units,) largest number of children drawn of each unit."""
        if self.is_poisson:
            return self.counts if self.rate > 0 else np.zeros_like(self.counts)
        return np.minimum(self.counts, self.width)

    def draw_number(
        self, parents: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """How many children of each parent are drawn, (n,)."""
        counts = self.counts[parents]
        if self.is_poisson:
            return generator.binomial(counts, self.rate)
        return np.minimum(counts, self.width)

    def draw(
        self,
        parents: np.ndarray,
        generator: np.random.Generator,
        width: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Children drawn of each parent: places (n, width), and how many of each (n,).

        Without a width, that of the largest number drawn.

        The first entries of a row are a uniformly random sequence of different
        children; what lies beyond the number means nothing.
        """
        counts = self.counts[parents]
        number = self.draw_number(parents, generator)
        if width is None:
            width = int(number.max(initial=0))
        local = _sequences(counts, number, width, generator)
        return self.starts[parents][:, None] + local, number


class _Multistage:
    """Draws of a tree, level by level."""

    def __init__(
        self, schemes: Sequence[Scheme], population: Population, clip_level: int
    ) -> None:
        levels = _levels(schemes, population)
        self._above, self._below = levels[:clip_level], levels[clip_level:]
        self.slot_shape = tuple(level.width for level in self._below)
        self.expected_units = _expected_total(self._above)
        self.max_units = int(_largest_total(self._above))

    def draw(self, generator: np.random.Generator) -> Draw:
        units = np.zeros(1, np.int64)
        for level in self._above:
            children, number = level.draw(units, generator)
            # Row-major: the children of each parent stay together.
            units = children[np.arange(children.shape[1]) < number[:, None]]
        examples, mask = _slots(units, self._below, generator)
        return Draw(examples, mask, units if self._above else np.full(1, _NO_UNIT))


class _Independent:
    """A fixed number of episodes, each drawn afresh through all levels."""

    def __init__(self, design: IndependentEpisodes, population: Population) -> None:
        self._levels = _levels(design.sampling.levels, population)
        self.slot_shape = tuple(level.width for level in self._levels)
        self.max_units = int(design.num_episodes)
        self.expected_units = float(self.max_units)

    def draw(self, generator: np.random.Generator) -> Draw:
        roots = np.zeros(self.max_units, np.int64)
        examples, mask = _slots(roots, self._levels, generator)
        return Draw(examples, mask, np.full(self.max_units, _NO_UNIT))


class _Grouped:
    """Classes in random groups, each class in at most one."""

    def __init__(self, design: GroupedClasses, population: Population) -> None:
        if population.num_levels != 2:
            raise ValueError(
                "population must have two levels, classes and examples, "
                f"got {population.num_levels}"
            )
        self._classes, self._ways = int(design.num_classes), int(design.ways)
        if population.num_units(1) != self._classes:
            raise ValueError(
                f"num_classes must be the population's number of classes, "
                f"{population.num_units(1)}, got {self._classes}"
            )
        self._by_episode = design.episodes is not None
        scheme = design.episodes if self._by_episode else design.classes
        pool = self._classes // self._ways if self._by_episode else self._classes
        self._first = _Level(scheme, np.array([pool]))  # type: ignore[arg-type]
        self._examples = _Level(design.examples, population.children_counts[1])
        self.slot_shape = (self._ways, self._examples.width)
        share = 1 if self._by_episode else self._ways
        self.max_units = int(self._first.largest()[0]) // share
        self.expected_units = float(self._first.expected()[0])
        if not self._by_episode:
            self.expected_units = _mean_groups(self._first, self._ways)

    def draw(self, generator: np.random.Generator) -> Draw:
        number = int(self._first.draw_number(np.zeros(1, np.int64), generator)[0])
        # A partition of all classes, of which `number` uniformly random groups are
        # drawn, is the first groups of one random order: the order is exchangeable.
        groups = number if self._by_episode else number // self._ways
        order = generator.permutation(self._classes)[: groups * self._ways]
        examples, mask = _slots(order, [self._examples], generator)
        shape = (groups, *self.slot_shape)
        return Draw(
            examples.reshape(shape), mask.reshape(shape), np.full(groups, _NO_UNIT)
        )


def _levels(schemes: Sequence[Scheme], population: Population) -> list[_Level]:
    if population.num_levels != len(schemes):
        raise ValueError(
            f"population must have {len(schemes)} levels, as the sampling, "
            f"got {population.num_levels}"
        )
    pairs = zip(schemes, population.children_counts, strict=True)
    return [_Level(scheme, counts) for scheme, counts in pairs]


def _slots(
    units: np.ndarray, levels: Sequence[_Level], generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """What is drawn below each unit, and its mask: (J, *widths)."""
    examples, mask = units, np.ones(len(units), bool)
    for level in levels:
        children, number = level.draw(examples.reshape(-1), generator, level.width)
        number = np.where(mask.reshape(-1), number, 0)
        shape = (*examples.shape, level.width)
        mask = (np.arange(level.width) < number[:, None]).reshape(shape)
        examples = np.where(mask, children.reshape(shape), 0)
    return examples, mask


def _sequences(
    counts: np.ndarray, number: np.ndarray, width: int, generator: np.random.Generator
) -> np.ndarray:
    """(n, width): random sequences of ``number[i]`` different values below counts[i].

    Floyd-style rejection where few of many are wanted; else the order of random keys.
    """
    rows, most = len(counts), int(counts.max(initial=0))
    used = int(number.max(initial=0))
    result = np.zeros((rows, width), np.int64)
    if used == 0:
        return result
    if rows == 1:
        result[0, :used] = generator.choice(most, used, replace=False, shuffle=True)
        return result
    if used * used > most:
        keys = generator.random((rows, most))
        keys[np.arange(most) >= counts[:, None]] = 2.0  # after all that exist
        result[:, :used] = np.argsort(keys, axis=1)[:, :used]
        return result
    # Few of many: redraw whole rows in which two of the wanted entries agree.
    todo = np.arange(rows)
    wanted = np.arange(used) < number[:, None]
    spread = most + np.arange(used)  # different values for entries that do not matter
    while todo.size:
        shape = (todo.size, used)
        bound = np.maximum(counts[todo], 1)[:, None]
        tried = generator.integers(0, np.broadcast_to(bound, shape))
        result[todo, :used] = tried
        ordered = np.sort(np.where(wanted[todo], tried, spread), axis=1)
        todo = todo[(np.diff(ordered, axis=1) == 0).any(axis=1)]
    return result


def _expected_total(levels: Sequence[_Level]) -> float:
    """Mean number of units drawn at the last of the levels."""
    weights = np.ones(1)
    for level in levels:
        drawn = level.expected().astype(np.float64)
        share = drawn / np.maximum(level.counts, 1)
        weights = np.repeat(weights * share, level.counts)
    return float(weights.sum())


def _largest_total(levels: Sequence[_Level]) -> float:
    """Largest possible number of units drawn at the last of the levels."""
    below = np.ones(int(levels[-1].counts.sum()) if levels else 1)
    for level in reversed(levels):
        sums = np.zeros(len(level.counts))
        limit = level.largest()
        for unit, (start, count) in enumerate(
            zip(level.starts.tolist(), level.counts.tolist(), strict=True)
        ):
            part = below[start : start + count]
            if limit[unit] < count:
                part = np.sort(part)[count - int(limit[unit]) :]
            sums[unit] = part.sum()
        below = sums
    return float(below[0])


def _mean_groups(level: _Level, ways: int) -> float:
    """Mean of floor(number of classes drawn / ways)."""
    pool = int(level.counts[0])
    if not level.is_poisson:
        return float(int(level.expected()[0]) // ways)
    if level.rate in (0.0, 1.0):
        return float(int(pool * level.rate) // ways)
    k = np.arange(pool + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, pool + 1)))])
    log_weight = log_factorial[pool] - log_factorial - log_factorial[::-1]
    log_weight += k * math.log(level.rate) + (pool - k) * math.log1p(-level.rate)
    return float(np.sum(np.exp(log_weight) * (k // ways)))


def _check_size(scheme: WithoutReplacement, counts: np.ndarray) -> None:
    """Refuses a public population that this tree contradicts.

    A lower bound that is not one would make the accounted rate too small.
    """
    if scheme.population is None or not counts.size:
        return
    claimed = int(np.asarray(scheme.population))
    if claimed > counts.min():
        raise ValueError(
            f"population of level {scheme.name!r} must be at most the number of "
            f"children of every unit, got {claimed} where a unit has {counts.min()}"
        )

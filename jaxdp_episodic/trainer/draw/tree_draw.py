"""Draws units of a tree, level by level, by Poisson sampling or without replacement.

In all functions ``counts`` is (n,) int64, the number of children of each of n units.
Drawn children are a ragged list without padding, see `Children`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.designs import (
    Poisson,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import Population, max_contributions

# Most gaps drawn at once: 2**20 gaps, each at most 2**42, sum without int64 overflow.
_MOST_GAPS = 2**20

# Measured costs in microseconds, used to choose the fastest algorithm.
_COST_OF_CHOICE = 6.0  # a call of NumPy's `choice`
_COST_OF_ROUND = 6.0  # a round of Floyd's algorithm
_COST_OF_ELEMENT = 0.04


class Children(NamedTuple):
    """Drawn children, grouped by their unit in order."""

    owner: np.ndarray  # (m,) int64, nondecreasing: index of each child's unit among n
    # (m,) int64, from 0, among all children of that unit. Those of one unit are
    # distinct and in uniformly random order.
    child: np.ndarray


def poisson(
    counts: np.ndarray, rate: float, generator: np.random.Generator
) -> Children:
    """Draws each child with probability ``rate``, in time linear in those drawn."""
    ends = np.cumsum(counts)
    drawn = _successes(int(counts.sum()), rate, generator)
    owner = np.searchsorted(ends, drawn, side="right")
    child = drawn - (ends - counts)[owner]
    return Children(owner, child[_shuffle_within(owner, len(counts), generator)])


def without_replacement(
    counts: np.ndarray, size: int, generator: np.random.Generator
) -> Children:
    """Draws ``min(size, count)`` children of each unit, each subset equally likely."""
    number = np.minimum(counts, size)
    most, total = int(number.max(initial=0)), float(number.sum())
    elements = (1 + most / 40) * most * len(counts)
    costs = {
        _unit_by_unit: _COST_OF_CHOICE * len(counts) + _COST_OF_ELEMENT * total,
        _round_by_round: _COST_OF_ROUND * most + _COST_OF_ELEMENT * elements,
        _all_then_cut: _COST_OF_ELEMENT * float(counts.sum()),
    }
    if len(counts) == 1 or most == 0:
        return _unit_by_unit(counts, number, generator)
    return min(costs, key=costs.__getitem__)(counts, number, generator)


def rank_within(owner: np.ndarray, number_of_owners: int) -> np.ndarray:
    """Returns (m,) for each entry the number of earlier entries with the same owner."""
    number = np.bincount(owner, minlength=number_of_owners)
    return np.arange(len(owner)) - (np.cumsum(number) - number)[owner]


def random_places(
    slots: np.ndarray, filled: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Returns distinct random slots of the parent for each existing unit."""
    # A resumed run deals its groups again from their key: no version may change this.
    owner = np.repeat(np.arange(len(slots)), slots)
    rank = rank_within(owner, len(slots))
    order = _shuffle_within(owner, len(slots), generator)
    return rank[order][rank < filled[owner]]


def _successes(total: int, rate: float, generator: np.random.Generator) -> np.ndarray:
    """Returns the indices of successes in ``total`` Bernoulli trials, increasing."""
    if rate == 0 or total == 0:
        return np.zeros(0, np.int64)
    if rate == 1:
        return np.arange(total)
    decay = -math.log1p(-rate)
    found, last = [], -1
    while last < total:
        mean = (total - last) * rate
        number = min(int(mean + 4.0 * math.sqrt(mean)) + 8, _MOST_GAPS)
        with np.errstate(over="ignore"):  # an infinite gap: no further success
            gaps = np.ceil(generator.standard_exponential(number) / decay)
        # An exponential variate of exactly 0 would give a gap of 0.
        found.append(last + np.cumsum(np.clip(gaps, 1, total + 1).astype(np.int64)))
        last = int(found[-1][-1])
    successes = np.concatenate(found)
    return successes[: np.searchsorted(successes, total)]


def _shuffle_within(
    owner: np.ndarray, number_of_owners: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns a uniformly random permutation within each owner's block of entries."""
    if number_of_owners == 1:
        return generator.permutation(len(owner))
    bits = 63 - number_of_owners.bit_length()
    while True:
        noise = generator.integers(0, 1 << bits, len(owner))
        keys = (owner << bits) | noise
        order = np.argsort(keys)
        ranked = keys[order]
        # Ties would keep their order. Without ties the order is uniform.
        if not np.any(ranked[1:] == ranked[:-1]):
            return order


def _unit_by_unit(
    counts: np.ndarray, number: np.ndarray, generator: np.random.Generator
) -> Children:
    """Calls NumPy once per unit: fastest for few units with many children."""
    parts = [
        generator.choice(count, size, replace=False)
        for count, size in zip(counts.tolist(), number.tolist(), strict=True)
        if size
    ]
    child = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Children(np.repeat(np.arange(len(counts)), number), child)


def _round_by_round(
    counts: np.ndarray, number: np.ndarray, generator: np.random.Generator
) -> Children:
    """Floyd's algorithm, one child of every unit per round: fastest for few of many."""
    # Before round t a unit has t distinct children; after it t + 1, a uniformly random
    # subset of its children 0 .. ``top[t]``. Bentley and Floyd (1987), Communications
    # of the ACM 30(9), 754-757.
    rounds = np.arange(int(number.max()))[:, None]
    wanted = rounds < number
    top = np.where(wanted, counts - number + rounds, 0)
    tried = generator.integers(0, top, endpoint=True)
    picked = tried.copy()
    for t in range(1, len(rounds)):
        is_taken = (picked[:t] == tried[t]).any(axis=0)
        np.copyto(picked[t], top[t], where=is_taken)
    owner = np.repeat(np.arange(len(counts)), number)
    child = picked.T[wanted.T]
    return Children(owner, child[_shuffle_within(owner, len(counts), generator)])


def _all_then_cut(
    counts: np.ndarray, number: np.ndarray, generator: np.random.Generator
) -> Children:
    """Shuffles all children and keeps the first: fastest for a large share of few."""
    owner = np.repeat(np.arange(len(counts)), counts)
    rank = rank_within(owner, len(counts))
    child = rank[_shuffle_within(owner, len(counts), generator)]
    kept = rank < number[owner]
    return Children(owner[kept], child[kept])


NULL = -1  # index of a drawn slot that holds no unit
NO_UNIT = -1  # unit of a row that the draw itself forms (an episode, the step)


@dataclass(frozen=True, eq=False)
class Level:
    """One level of the tree, and the scheme that draws its units."""

    scheme: Scheme  # with scalar fields
    # For each unit of the level above, the number of children (or slots) to draw from.
    counts: np.ndarray
    # Number of children that exist; slots from this index on are null. The same array
    # as ``counts``, unless these are a public number of slots.
    filled: np.ndarray

    @property
    def width(self) -> int:
        """Number of slots for one unit's drawn children, at least 1."""
        if isinstance(self.scheme, Poisson):
            return max(1, int(self.counts.max(initial=0)))
        # Also if a unit has fewer: real sizes may be private, and shapes are visible.
        return _size(self.scheme)

    @property
    def expected(self) -> np.ndarray:
        """Mean number of children drawn from each unit, float64."""
        if isinstance(self.scheme, Poisson):
            return self.counts * float(np.asarray(self.scheme.sampling_probability))
        return np.minimum(self.counts, _size(self.scheme)).astype(np.float64)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """Index of each unit's first child among all units of this level."""
        return np.cumsum(self.filled) - self.filled

    @functools.cached_property
    def _counts_and_null(self) -> np.ndarray:
        """``counts``, then the 0 children of a null unit, which has index -1."""
        return np.append(self.counts, 0)

    def draw(
        self, units: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws children of (n,) units of the level above, which may repeat or be null.

        Returns (m,) indices in this level, -1: null; and (m,) owners as in `Children`.
        """
        counts = self._counts_and_null[units]
        if isinstance(self.scheme, Poisson):
            rate = float(np.asarray(self.scheme.sampling_probability))
            drawn = poisson(counts, rate, generator)
        else:
            drawn = without_replacement(counts, _size(self.scheme), generator)
        parents = units[drawn.owner]
        children = self._starts[parents] + drawn.child
        is_null = drawn.child >= self.filled[parents]
        return np.where(is_null, NULL, children), drawn.owner


def _size(scheme: Scheme) -> int:
    assert isinstance(scheme, WithoutReplacement)  # epochs: see `epoch_rows`
    return int(np.asarray(scheme.size))


def make_level(
    scheme: Scheme, counts: np.ndarray, slots_of: str | None = None
) -> Level:
    """Returns a level; the level named ``slots_of`` draws among public slots."""
    if scheme.name != slots_of:
        return Level(scheme, counts, counts)
    if scheme.population is None:
        raise ValueError(
            f"level {scheme.name!r}: population (the public number of slots to sample "
            "from) must be given under zero_out, got None"
        )
    slots, most = int(np.asarray(scheme.population)), int(counts.max(initial=0))
    if slots < most:
        raise ValueError(
            f"level {scheme.name!r}: population (slots) must be at least the number of "
            f"children of every unit under zero_out, up to {most} here, got {slots}"
        )
    return Level(scheme, np.full(counts.shape, slots, np.int64), counts)


def make_levels(
    schemes: Sequence[Scheme], population: Population, slots_of: str | None = None
) -> list[Level]:
    """Returns all levels, top to bottom."""
    check_levels([scheme.name for scheme in schemes], population)
    pairs = zip(schemes, population.children_counts, strict=True)
    return [make_level(scheme, counts, slots_of) for scheme, counts in pairs]


def check_levels(names: Sequence[str], population: Population) -> None:
    """Raises if the population's levels differ from those of the sampling."""
    named = tuple(population.level_names)
    if population.num_levels != len(names) or named != tuple(names[: len(named)]):
        raise ValueError(
            f"population must have the {len(names)} levels {tuple(names)} of the "
            f"sampling, got {population.num_levels} levels, named {named}"
        )


def draw_units(levels: Sequence[Level], generator: np.random.Generator) -> np.ndarray:
    """Draws from the root; returns the units of the last level (no level: the root)."""
    units = np.zeros(1, np.int64)
    for level in levels:
        units, _ = level.draw(units, generator)
    return units


def fill_slots(
    starts: np.ndarray, levels: Sequence[Level], generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws below ``starts``; returns examples, mask and holds_null of a `Draw`."""
    # ``starts`` are (J, ...) units of the level above, -1: null. A drawn unit takes the
    # first free slot of its axis, even if nothing is drawn below it.
    shape = (*starts.shape, *(level.width for level in levels))
    units, slot = starts.reshape(-1), np.arange(starts.size)
    row = slot // max(starts.size // max(len(starts), 1), 1)
    holds_null = np.zeros(len(starts), bool)
    holds_null[row[units < 0]] = True
    for level in levels:
        units, owner = level.draw(units, generator)
        rank = rank_within(owner, len(slot))
        slot, row = slot[owner] * level.width + rank, row[owner]
        holds_null[row[units < 0]] = True
    examples, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    examples.reshape(-1)[slot] = np.maximum(units, 0)
    mask.reshape(-1)[slot] = units >= 0
    return examples, mask, holds_null


def expected_total(levels: Sequence[Level]) -> float:
    """Returns the mean number of units drawn at the last level; 1 without levels."""
    if not levels:
        return 1.0
    chances = np.ones(1)  # of each unit; the last level's may be very many
    for level in levels[:-1]:
        share = level.expected / np.maximum(level.counts, 1)
        chances = np.repeat(chances * share, level.filled)
    return float(np.sum(chances * levels[-1].expected))


def largest_total(levels: Sequence[Level]) -> int:
    """Returns the largest possible number of units drawn at the last level."""
    if any(not np.any(level.expected) for level in levels):
        return 0
    if not levels:
        return 1
    # Nothing is drawn below a null unit.
    counts = (*(level.filled for level in levels[:-1]), levels[-1].counts)
    schemes = tuple(level.scheme for level in levels)
    return int(max_contributions(counts, schemes))


def check_public_sizes(level: Level) -> None:
    """Raises if the tree contradicts a scheme's ``population``."""
    # If the step is accounted with this number, a false lower bound would understate
    # the rate, and a false upper bound would understate the sensitivity.
    scheme, has_slots = level.scheme, level.counts is not level.filled
    if scheme.population is None or not level.counts.size or has_slots:
        return
    claimed = int(np.asarray(scheme.population))
    # A person may join an empty unit and would be its only child.
    smallest = max(1, int(level.counts.min()))
    largest = max(1, int(level.counts.max()))
    if isinstance(scheme, Poisson):
        fits, rule = claimed >= largest, "at least"
    elif isinstance(scheme, WithoutReplacement) and scheme.population_is_exact:
        fits, rule = claimed == smallest == largest, "exactly"
    else:
        fits, rule = claimed <= smallest, "at most"
    if not fits:
        raise ValueError(
            f"level {scheme.name!r}: population must be {rule} the number of children "
            f"of every unit, {smallest} to {largest} here, got {claimed}; or leave it "
            "out: a step with the data's Population, which a training config makes, "
            "uses the real sizes"
        )

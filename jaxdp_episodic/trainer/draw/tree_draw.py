"""Draws down a tree of units, level by level; children by Poisson sampling or by size.

Everywhere ``counts`` is (n,) int64, the number of children of each of n units, and what
is drawn is a ragged list without padding, see `Children`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.population import (
    Population,
    max_contributions,
)
from jaxdp_episodic.accountant.describe.schemes import (
    Poisson,
    Scheme,
    WithoutReplacement,
)

# Successes whose gaps are drawn at a time: 2**20 gaps of at most 2**42 children sum
# without overflow.
_MOST_GAPS = 2**20

# Costs in microseconds, measured, by which the fastest algorithm is chosen.
_COST_OF_CHOICE = 6.0  # a call of NumPy's `choice`
_COST_OF_ROUND = 6.0  # a round of Floyd's algorithm
_COST_OF_ELEMENT = 0.04


class Children(NamedTuple):
    """Drawn children, those of the first unit first.

    Attributes:
      owner: (m,) int64, nondecreasing: to which of the n units a child belongs.
      child: (m,) int64, its index among the children of that unit, from 0; the children
        of one unit are different, and in uniformly random order.
    """

    owner: np.ndarray
    child: np.ndarray


def poisson(
    counts: np.ndarray, rate: float, generator: np.random.Generator
) -> Children:
    """Draws every child with probability ``rate``, in time linear in those drawn."""
    ends = np.cumsum(counts)
    drawn = _successes(int(ends[-1]) if len(ends) else 0, rate, generator)
    owner = np.searchsorted(ends, drawn, side="right")
    child = drawn - (ends - counts)[owner]
    return Children(owner, child[_shuffle_within(owner, len(counts), generator)])


def without_replacement(
    counts: np.ndarray, size: int, generator: np.random.Generator
) -> Children:
    """Draws ``min(size, count)`` children of each unit, uniformly among all subsets."""
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
    """Returns for each entry how many before it have the same owner, (m,)."""
    number = np.bincount(owner, minlength=number_of_owners)
    return np.arange(len(owner)) - (np.cumsum(number) - number)[owner]


def random_places(
    slots: np.ndarray, filled: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Returns different random slots, within its parent, of each unit that there is."""
    owner = np.repeat(np.arange(len(slots)), slots)
    rank = rank_within(owner, len(slots))
    order = _shuffle_within(owner, len(slots), generator)
    return rank[order][rank < filled[owner]]


def _successes(total: int, rate: float, generator: np.random.Generator) -> np.ndarray:
    """Indices of the successes among ``total`` independent trials, increasing."""
    if rate == 0 or total == 0:
        return np.zeros(0, np.int64)
    if rate == 1:
        return np.arange(total)
    decay = -math.log1p(-rate)
    found, last = [], -1
    while last < total:
        mean = (total - last) * rate
        number = min(int(mean + 4.0 * math.sqrt(mean)) + 8, _MOST_GAPS)
        with np.errstate(over="ignore"):  # a gap of inf: no further success
            gaps = np.ceil(generator.standard_exponential(number) / decay)
        # An exponential of exactly 0 would be a gap of 0.
        found.append(last + np.cumsum(np.clip(gaps, 1, total + 1).astype(np.int64)))
        last = int(found[-1][-1])
    successes = np.concatenate(found)
    return successes[: np.searchsorted(successes, total)]


def _shuffle_within(
    owner: np.ndarray, number_of_owners: int, generator: np.random.Generator
) -> np.ndarray:
    """A random permutation of all entries that keeps each owner's where they were."""
    if number_of_owners == 1:
        return generator.permutation(len(owner))
    bits = 63 - number_of_owners.bit_length()
    while True:
        noise = generator.integers(0, 1 << bits, len(owner))
        keys = (owner << bits) | noise
        order = np.argsort(keys)
        ranked = keys[order]
        # Equal keys would keep their order; given that none are, it is uniform.
        if not np.any(ranked[1:] == ranked[:-1]):
            return order


def _unit_by_unit(
    counts: np.ndarray, number: np.ndarray, generator: np.random.Generator
) -> Children:
    """Best for few units with many children."""
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
    """Best for few of many: Floyd's algorithm, a child of every unit each round.

    Reference: Bentley and Floyd (1987), Communications of the ACM 30(9), 754-757: in
    round t a set of t children becomes one of t + 1, a uniformly random subset of all
    children up to ``top[t]``.
    """
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
    """Best for many of few: puts all children in random order and keeps the first."""
    owner = np.repeat(np.arange(len(counts)), counts)
    rank = rank_within(owner, len(counts))
    child = rank[_shuffle_within(owner, len(counts), generator)]
    kept = rank < number[owner]
    return Children(owner[kept], child[kept])


NULL = -1  # index of a slot that is drawn and not filled
NO_UNIT = -1  # index of the unit of a row that was formed in the draw


@dataclass(frozen=True, eq=False)
class Level:
    """One level of a real tree and the scheme that draws its units."""

    scheme: Scheme  # with scalar fields
    # Number of children, or of slots for them, that are drawn from, for each unit of
    # the level above.
    counts: np.ndarray
    # Index of the first of these children among all units of this level.
    starts: np.ndarray
    filled: np.ndarray  # number of them that exist; what is drawn beyond them is null
    has_slots: bool  # whether ``counts`` are a public number of slots, not the children

    @property
    def width(self) -> int:
        """Slots for the children drawn of one unit, at least one.

        Without replacement the ``size``, even where there are fewer children: under
        ``add_remove`` real sizes are private, a shape is not.
        """
        if isinstance(self.scheme, Poisson):
            return max(1, int(self.counts.max(initial=0)))
        return _size(self.scheme)

    @property
    def expected(self) -> np.ndarray:
        """Mean number of children drawn of each unit, float64."""
        if isinstance(self.scheme, Poisson):
            return self.counts * float(np.asarray(self.scheme.sampling_probability))
        return np.minimum(self.counts, _size(self.scheme)).astype(np.float64)

    def draw(
        self, units: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws children of each of the units, which may repeat.

        Units (n,) are indices in the level above; -1 for a null one, which has no
        children. Returns (m,) indices of the children in this level, -1 for null ones,
        and (m,) which of the n units each belongs to, in the order of `Children`.
        """
        counts = np.append(self.counts, 0)[units]  # the last one of the null unit
        if isinstance(self.scheme, Poisson):
            rate = float(np.asarray(self.scheme.sampling_probability))
            drawn = poisson(counts, rate, generator)
        else:
            drawn = without_replacement(counts, _size(self.scheme), generator)
        parents = units[drawn.owner]
        children = self.starts[parents] + drawn.child
        is_null = drawn.child >= self.filled[parents]
        return np.where(is_null, NULL, children), drawn.owner


def _size(scheme: Scheme) -> int:
    assert isinstance(scheme, WithoutReplacement)  # epochs are drawn at their start
    return int(np.asarray(scheme.size))


def make_level(
    scheme: Scheme, counts: np.ndarray, slots_of: str | None = None
) -> Level:
    """Returns the level of these children; ``slots_of`` needs enough slots."""
    starts = np.cumsum(counts) - counts
    if scheme.name != slots_of:
        return Level(scheme, counts, starts, counts, has_slots=False)
    if scheme.population is None:
        raise ValueError(
            f"level {scheme.name!r}: population must be given under zero_out, the "
            "public number of slots that are drawn from; got None"
        )
    slots, most = int(np.asarray(scheme.population)), int(counts.max(initial=0))
    if slots < most:
        raise ValueError(
            f"level {scheme.name!r}: population must be at least the children of "
            f"every unit under zero_out (slots), up to {most} here, got {slots}"
        )
    public = np.full(counts.shape, slots, np.int64)
    return Level(scheme, public, starts, counts, has_slots=True)


def make_levels(
    schemes: Sequence[Scheme], population: Population, slots_of: str | None = None
) -> list[Level]:
    """Returns all levels, top to bottom; see `check_levels` and `make_level`."""
    check_levels([scheme.name for scheme in schemes], population)
    pairs = zip(schemes, population.children_counts, strict=True)
    return [make_level(scheme, counts, slots_of) for scheme, counts in pairs]


def check_levels(names: Sequence[str], population: Population) -> None:
    """Refuses a population with other levels than the sampling has."""
    named = tuple(population.level_names)
    if population.num_levels != len(names) or named != tuple(names[: len(named)]):
        raise ValueError(
            f"population must have the {len(names)} levels {tuple(names)} of the "
            f"sampling, got {population.num_levels} levels, named {named}"
        )


def draw_units(levels: Sequence[Level], generator: np.random.Generator) -> np.ndarray:
    """Returns the drawn units of the last level, from the root; no level: the root."""
    units = np.zeros(1, np.int64)
    for level in levels:
        units, _ = level.draw(units, generator)
    return units


def fill_slots(
    starts: np.ndarray, levels: Sequence[Level], generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws everything below the given units.

    ``starts`` (J, ...) are units of the level above the first of ``levels``, -1 for
    null. Returns (*starts.shape, *widths of the levels) int64 indices among the units
    of the last level, 0 where nobody was drawn, and the mask of those that were: a
    drawn unit has the first free slot of its axis, also where nobody is drawn below it.
    And (J,) whether a null was drawn.
    """
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
    # No chance for each of the last level's: there may be many more than of others.
    return float(np.sum(chances(levels[:-1]) * levels[-1].expected))


def chances(levels: Sequence[Level]) -> np.ndarray:
    """Returns the chance of each unit of the last level to be drawn; no level: 1."""
    result = np.ones(1)
    for level in levels:
        share = level.expected / np.maximum(level.counts, 1)
        result = np.repeat(result * share, level.filled)
    return result


def largest_total(levels: Sequence[Level]) -> int:
    """Returns the largest number of units that a draw can have at the last level."""
    if any(not np.any(level.expected) for level in levels):
        return 0
    if not levels:
        return 1
    # Below a null nothing is drawn.
    counts = (*(level.filled for level in levels[:-1]), levels[-1].counts)
    schemes = tuple(level.scheme for level in levels)
    return int(max_contributions(counts, schemes))


def check_public_sizes(level: Level) -> None:
    """Refuses a ``population`` of a scheme that this tree contradicts.

    Where the step is accounted by it, a false lower bound makes the accounted rate too
    small; a false upper bound the sensitivity.
    """
    scheme = level.scheme
    if scheme.population is None or not level.counts.size:
        return
    if level.has_slots:  # see `make_level`
        return
    claimed = int(np.asarray(scheme.population))
    # Somebody may join an empty unit, who is then its only child.
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
            f"of every unit, {smallest} to {largest} here, got {claimed}; or leave "
            "it out: a step that has the data's Population, as a training config makes "
            "it, goes by the real sizes"
        )

"""Draws down a tree of units, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxdp_episodic.describe import tree_paths
from jaxdp_episodic.describe.population import Population
from jaxdp_episodic.describe.schemes import Poisson, Scheme
from jaxdp_episodic.draw import child_draws

NULL = -1  # a slot that is drawn and not filled


@dataclass(frozen=True, eq=False)
class Level:
    """One level of a real tree and the scheme that draws its units.

    Attributes:
      scheme: with scalar fields.
      counts: number of children, or of slots for them, that are drawn from, for each
        unit of the level above.
      starts: place of the first of these children among all units of this level.
      filled: how many of them there are; what is drawn beyond them is null.
    """

    scheme: Scheme
    counts: np.ndarray
    starts: np.ndarray
    filled: np.ndarray

    @property
    def width(self) -> int:
        """Slots that hold whatever is drawn below one unit, at least one.

        Without replacement the ``size``, however few children there really are: under
        ``add_remove`` real sizes are private, a shape is not.
        """
        if isinstance(self.scheme, Poisson):
            return max(1, int(self.counts.max(initial=0)))
        return int(np.asarray(self.scheme.size))

    @property
    def expected(self) -> np.ndarray:
        """Mean number of children drawn of each unit, float64."""
        if isinstance(self.scheme, Poisson):
            return self.counts * float(np.asarray(self.scheme.sampling_probability))
        return np.minimum(self.counts, self.scheme.size).astype(np.float64)

    def draw(
        self, units: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws children of each of the units, which may repeat.

        Args:
          units: (n,) places among the units of the level above; -1 for a null one,
            which has no children.
          generator: source of randomness.

        Returns:
          (m,) places of the children among the units of this level, -1 for the null
          ones, and (m,) which of the n units each belongs to, in the order of
          `Children`.
        """
        counts = np.append(self.counts, 0)[units]  # the last one of the null unit
        if isinstance(self.scheme, Poisson):
            rate = float(np.asarray(self.scheme.sampling_probability))
            drawn = child_draws.poisson(counts, rate, generator)
        else:
            size = int(np.asarray(self.scheme.size))
            drawn = child_draws.without_replacement(counts, size, generator)
        parents = units[drawn.owner]
        children = self.starts[parents] + drawn.child
        is_null = drawn.child >= self.filled[parents]
        return np.where(is_null, NULL, children), drawn.owner


def make_level(
    scheme: Scheme, counts: np.ndarray, slots_of: str | None = None
) -> Level:
    """Returns the level whose units are the children that ``counts`` counts.

    Args:
      scheme: draws them.
      counts: of the children there are.
      slots_of: the level whose ``population`` is the number of slots of every unit
        one level up, or None.

    Raises:
      ValueError: no such number, or a unit with more children than slots.
    """
    starts = np.cumsum(counts) - counts
    if scheme.name != slots_of:
        return Level(scheme, counts, starts, counts)
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
    return Level(scheme, np.full(counts.shape, slots, np.int64), starts, counts)


def make_levels(
    schemes: Sequence[Scheme], population: Population, slots_of: str | None = None
) -> list[Level]:
    """Returns all levels, top to bottom; see `check_levels` and `make_level`."""
    check_levels([scheme.name for scheme in schemes], population)
    pairs = zip(schemes, population.children_counts, strict=True)
    return [make_level(scheme, counts, slots_of) for scheme, counts in pairs]


def check_levels(names: Sequence[str], population: Population) -> None:
    """Refuses a population with other levels than the sampling has.

    Raises:
      ValueError: another number of levels, or other names.
    """
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

    Args:
      starts: (J, ...) units of the level above the first of ``levels``, -1 for null.
      levels: the levels below, () if there are none.
      generator: source of randomness.

    Returns:
      (*starts.shape, *widths of the levels) int64 places among the units of the last
      level, 0 where nobody was drawn, and the mask of those that were. A drawn unit
      has the first free slot of its axis, also where nobody is drawn below it. And
      (J,) whether a null was drawn.
    """
    shape = (*starts.shape, *(level.width for level in levels))
    units, slot = starts.reshape(-1), np.arange(starts.size)
    row = slot // max(starts.size // max(len(starts), 1), 1)
    holds_null = np.zeros(len(starts), bool)
    holds_null[row[units < 0]] = True
    for level in levels:
        units, owner = level.draw(units, generator)
        rank = child_draws.rank_within(owner, len(slot))
        slot, row = slot[owner] * level.width + rank, row[owner]
        holds_null[row[units < 0]] = True
    examples, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    examples.reshape(-1)[slot] = np.maximum(units, 0)
    mask.reshape(-1)[slot] = units >= 0
    return examples, mask, holds_null


def expected_total(levels: Sequence[Level]) -> float:
    """Returns the mean number of units drawn at the last level; 1 without levels."""
    total, weights = 1.0, np.ones(1)  # of the units of one level: chance to be drawn
    for place, level in enumerate(levels):
        total = float(np.sum(weights * level.expected))
        if place + 1 < len(levels):
            share = level.expected / np.maximum(level.counts, 1)
            weights = np.repeat(weights * share, level.filled)
    return total


def largest_total(levels: Sequence[Level]) -> int:
    """Returns the largest number of units that a draw can have at the last level."""
    if any(not np.any(level.expected) for level in levels):
        return 0
    if not levels:
        return 1
    # Below a null nothing is drawn.
    counts = (*(level.filled for level in levels[:-1]), levels[-1].counts)
    schemes = tuple(level.scheme for level in levels)
    return int(tree_paths.max_contributions(counts, schemes))


def check_public_sizes(level: Level) -> None:
    """Refuses a ``population`` of a scheme that this tree shows to be wrong.

    Where the step is accounted by that number, a lower bound that is none makes the
    accounted rate too small; an upper bound that is none, the sensitivity.

    Raises:
      ValueError: naming both numbers.
    """
    scheme = level.scheme
    if scheme.population is None or not level.counts.size:
        return
    if level.counts is not level.filled:  # slots, see `make_level`
        return
    claimed = int(np.asarray(scheme.population))
    # Somebody may join an empty unit, who is then its only child.
    smallest = max(1, int(level.counts.min()))
    largest = max(1, int(level.counts.max()))
    if isinstance(scheme, Poisson):
        fits, rule = claimed >= largest, "at least"
    elif scheme.population_is_exact:
        fits, rule = claimed == smallest == largest, "exactly"
    else:
        fits, rule = claimed <= smallest, "at most"
    if not fits:
        raise ValueError(
            f"level {scheme.name!r}: population must be {rule} the number of children "
            f"of every unit, {smallest} to {largest} here, got {claimed}; or give the "
            "step the Population, whose sizes then hold, and say "
            "population_is_accounted=True"
        )

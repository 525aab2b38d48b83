"""How many clip units of a draw are complete: chances, from the sizes of a tree.

A clip unit is *complete* if it draws no null (under zero_out it would contribute zero)
and holds an episode in which every class has its support and a query; without episodes,
an example. What is drawn below different units is independent, so
chances go up the tree: a random subset's is a mean of products. Two of them are known
of every unit: that no null is drawn below it, and that it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.schemes import Poisson
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_mass
from jaxdp_episodic.trainer.draw.blocks import BlockExamples
from jaxdp_episodic.trainer.draw.tree_draw import Level, chances

_BLOCKS = 400  # of people, drawn where blocks are too many to count: 5 % of a chance
_UNSEEN = 3.0  # by the blocks drawn: a chance above this is seen once in 95 % (e^-3)
_SEED = 0  # of these blocks; none of a run's draws follows from it
_FEWEST_CLASSES = 2  # of an episode that draws them by coins: one tells nothing apart


class CompleteUnits(NamedTuple):
    """Mean numbers of drawn and complete clip units: private, from the data's sizes."""

    complete: float  # mean number
    drawn: float  # mean number
    is_exact: bool = True  # else an *estimate*, of blocks of people

    @property
    def share(self) -> float:
        """Complete ones of those drawn; 0 of none."""
        return self.complete / self.drawn if self.drawn else 0.0

    @property
    def most(self) -> float:
        """The mean number, or above it: where an estimate found none, 95 % sure."""
        unseen = 0.0 if self.is_exact or self.complete else _UNSEEN / _BLOCKS
        return self.complete + unseen * self.drawn


class Needs(NamedTuple):
    """What an episode needs."""

    # of each class, or of the task: support and a query. Without episodes 1
    examples: int = 1
    # levels of an episode: 2 of classes, 1 of a regression task, 0 without any
    axes: int = 0

    @classmethod
    def of(cls, shots: int, is_regression: bool, has_episodes: bool = True) -> Needs:
        """Returns what episodes of so many support examples need."""
        return cls(shots + 1, 1 if is_regression else 2) if has_episodes else cls()


def complete_in_tree(
    above: Sequence[Level], below: Sequence[Level], needs: Needs
) -> float:
    """Returns the mean number of complete units of the last of the levels ``above``."""
    if not below:
        return float(np.sum(chances(above)))
    complete = chances_below(below, needs)[1]
    return float(np.sum(chances(above) * complete))


def chances_below(
    levels: Sequence[Level], needs: Needs
) -> tuple[np.ndarray, np.ndarray]:
    """Returns of each unit above the first level: no null below; it is complete."""
    whole, complete = _of_examples(levels[-1], needs.examples)
    for height, level in enumerate(reversed(levels[:-1]), start=2):
        below = whole, complete
        if height <= needs.axes:
            whole = _of_children(level, below[0])
            complete = _of_children(level, below[1], fewest_classes(level))
        else:  # one episode is enough
            whole = _of_children(level, below[0])
            complete = whole - _of_children(level, below[0] - below[1])
    return whole, complete


def fewest_classes(level: Level) -> int:
    """Returns how many classes an episode has at least, if it is complete."""
    return _FEWEST_CLASSES if isinstance(level.scheme, Poisson) else level.width


def complete_in_draw(
    mask: np.ndarray, holds_null: np.ndarray | None, needs: Needs, fewest: int
) -> int:
    """Returns how many clip units of a draw are complete."""
    if not len(mask):
        return 0
    number = mask.sum(axis=-1) if mask.ndim > 1 else mask.astype(np.int64)
    complete = full = number >= needs.examples
    if needs.axes > 1:
        complete = np.all(full | (number == 0), axis=-1)
        complete &= full.sum(axis=-1) >= fewest
    complete = complete.reshape(len(mask), -1).any(axis=1)
    if holds_null is not None:
        complete &= ~holds_null
    return int(np.count_nonzero(complete))


def chance_of_group(level: Level, number: int, ways: int, needs: Needs) -> float:
    """Returns the chance that a group of ``ways`` of ``number`` places is complete."""
    whole, complete = chances_below([level], needs)
    if needs.axes:
        return mean_product(complete, number, ways)
    none = mean_product(whole - complete, number, ways)
    return mean_product(whole, number, ways) - none


def chance_in_blocks(
    blocks: BlockExamples,
    num_people: int,
    people_per_block: int,
    needs: Needs,
) -> tuple[float, bool]:
    """Returns the chance that a block's episode is complete, and if that is exact."""
    counts = np.diff(blocks.starts).reshape(-1, blocks.num_classes)
    known = len(counts)
    if people_per_block == 1 and known <= _BLOCKS:
        of_each = [_of_block(blocks, row, needs) for row in counts]
        return math.fsum(of_each) / num_people, True
    generator = np.random.default_rng(_SEED)
    total = 0.0
    for _ in range(_BLOCKS):
        people = generator.choice(num_people, people_per_block, replace=False)
        held = counts[people[people < known]].sum(axis=0)
        total += _of_block(blocks, held, needs)
    return total / _BLOCKS, False


def mean_product(values: np.ndarray, number: int, size: int) -> float:
    """Returns the mean product of ``size`` of ``number`` values, those not given 0."""
    positive, counts = np.unique(values[values > 0], return_counts=True)
    filled = int(counts.sum())
    chance = _all_among(filled, number, size)
    if not chance or not size:
        return chance
    if size == filled or len(positive) == 1:
        taken = counts if size == filled else size
        return chance * float(np.exp(np.sum(taken * np.log(positive))))
    # Of coins, given that so many fall: the coefficient of a product of polynomials.
    rate, product = size / filled, np.ones(1)
    for value, count in zip(positive.tolist(), counts.tolist(), strict=True):
        drawn = np.arange(min(size, count) + 1)
        mass = np.exp(_log_mass(drawn, count, rate)) * value**drawn
        product = np.convolve(product, mass)[: size + 1]
    total = math.exp(_log_mass(size, filled, rate))
    return chance * float(product[size]) / total


def _of_examples(level: Level, needed: int) -> tuple[np.ndarray, np.ndarray]:
    """The two chances of each unit that holds examples."""
    pairs = np.stack([level.filled, level.counts], axis=1)
    different, place = np.unique(pairs, axis=0, return_inverse=True)
    each = [_of_sizes(level, int(f), int(n), needed) for f, n in different]
    found = np.array(each, np.float64).reshape(-1, 2)[place.reshape(-1)]
    return found[:, 0], found[:, 1]


def _of_sizes(
    level: Level, filled: int, slots: int, needed: int
) -> tuple[float, float]:
    """The two chances of a unit with so many examples in so many slots."""
    if isinstance(level.scheme, Poisson):
        rate = float(np.asarray(level.scheme.sampling_probability))
        whole = (1.0 - rate) ** (slots - filled)
        few = np.arange(min(needed, filled + 1))
        enough = 1.0 - float(np.exp(_log_mass(few, filled, rate)).sum())
        return whole, whole * max(enough, 0.0)
    size = min(slots, level.width)
    whole = _all_among(filled, slots, size)
    return whole, whole if size >= needed else 0.0


def _of_children(level: Level, values: np.ndarray, fewest: int = 0) -> np.ndarray:
    """The mean product of each unit's drawn children; 0 of fewer than ``fewest``."""
    product = _by_coins if isinstance(level.scheme, Poisson) else _by_size
    known: dict[tuple[int, bytes], float] = {}  # many units are alike
    result = np.empty(len(level.counts))
    for unit, (start, filled, slots) in enumerate(
        zip(level.starts, level.filled, level.counts, strict=True)
    ):
        own = np.sort(values[start : start + filled])
        key = int(slots), own.tobytes()
        if key not in known:
            known[key] = product(level, own, int(slots), fewest)
        result[unit] = known[key]
    return result


def _by_size(level: Level, values: np.ndarray, slots: int, fewest: int) -> float:
    size = min(slots, level.width)
    return mean_product(values, slots, size) if size >= fewest else 0.0


def _by_coins(level: Level, values: np.ndarray, slots: int, fewest: int) -> float:
    assert isinstance(level.scheme, Poisson)
    rate = float(np.asarray(level.scheme.sampling_probability))
    # Coefficients: the chances of so many drawn children, all of them good.
    few = np.zeros(max(fewest, 1))
    few[0] = (1.0 - rate) ** (slots - len(values))
    total = few[0]
    for value in values.tolist():
        total *= 1.0 - rate + rate * value
        few[1:] = (1.0 - rate) * few[1:] + rate * value * few[:-1]
        few[0] *= 1.0 - rate
    return float(total - few[:fewest].sum())


def _of_block(blocks: BlockExamples, held: np.ndarray, needs: Needs) -> float:
    """The chance of an episode of a block that holds so many examples of each class."""
    if blocks.slots is None:
        return float(np.count_nonzero(held >= blocks.size) >= blocks.ways)
    slots, size = blocks.slots, blocks.size
    needed = size if blocks.leaves_null else min(needs.examples, size)

    def chance(filled: int) -> float:
        sets = (
            math.comb(filled, k) * math.comb(slots - filled, size - k)
            for k in range(needed, size + 1)
        )
        return sum(sets) / math.comb(slots, size)

    different, place = np.unique(held, return_inverse=True)
    values = np.array([chance(filled) for filled in different.tolist()])
    return mean_product(values[place], blocks.num_classes, blocks.ways)


def _log_mass(drawn: Any, number: int, rate: float) -> Any:
    return log_binomial_mass(np.asarray(drawn), np.asarray(number), np.asarray(rate))


def _all_among(filled: int, number: int, size: int) -> float:
    """The chance that so many of a number, drawn at once, are all filled."""
    if filled == number:
        return 1.0
    return math.comb(filled, size) / math.comb(number, size)

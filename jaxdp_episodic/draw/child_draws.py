"""Draws among the children of many units at once: by coins, or subsets of a size.

Everywhere ``counts`` is (n,) int64, the number of children of each of n units, and what
is drawn is a ragged list without padding, see `Children`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Coins are tossed at most so many successes at a time: 2**20 gaps of at most 2**42
# children sum without overflow.
_MOST_GAPS = 2**20

# Microseconds, measured: a call of `choice`, a turn of Floyd's algorithm, an element.
_CALL, _TURN, _ELEMENT = 6.0, 6.0, 0.04


class Children(NamedTuple):
    """Drawn children, those of the first unit first.

    Attributes:
      owner: (m,) int64, never falling: to which of the n units a child belongs.
      child: (m,) int64, its place among the children of that unit, from 0; the children
        of one unit are different, and in uniformly random order.
    """

    owner: np.ndarray
    child: np.ndarray


def poisson(
    counts: np.ndarray, rate: float, generator: np.random.Generator
) -> Children:
    """Draws every child by a coin of its own, the chance ``rate``.

    Only the drawn children cost time: from one success to the next it is a geometric
    number of coins.
    """
    ends = np.cumsum(counts)
    places = _successes(int(ends[-1]) if len(ends) else 0, rate, generator)
    owner = np.searchsorted(ends, places, side="right")
    child = places - (ends - counts)[owner]
    return Children(owner, child[_shuffle_within(owner, len(counts), generator)])


def without_replacement(
    counts: np.ndarray, size: int, generator: np.random.Generator
) -> Children:
    """Draws ``min(size, count)`` children of each unit, all subsets alike.

    One of three ways to do the same, whichever is the fastest for these sizes.
    """
    number = np.minimum(counts, size)
    most, total = int(number.max(initial=0)), float(number.sum())
    costs = {
        _unit_by_unit: _CALL * len(counts) + _ELEMENT * total,
        _turn_by_turn: _TURN * most + _ELEMENT * (1 + most / 40) * most * len(counts),
        _all_then_cut: _ELEMENT * float(counts.sum()),
    }
    if len(counts) == 1 or most == 0:
        return _unit_by_unit(counts, number, generator)
    return min(costs, key=costs.__getitem__)(counts, number, generator)


def rank_within(owner: np.ndarray, number_of_owners: int) -> np.ndarray:
    """Returns for each entry how many before it have the same owner, (m,)."""
    number = np.bincount(owner, minlength=number_of_owners)
    return np.arange(len(owner)) - (np.cumsum(number) - number)[owner]


def _successes(total: int, rate: float, generator: np.random.Generator) -> np.ndarray:
    """Places of the successes among ``total`` coins, rising."""
    if rate == 0 or total == 0:
        return np.zeros(0, np.int64)
    if rate == 1:
        return np.arange(total)
    decay = -math.log1p(-rate)
    found, last = [], -1
    while last < total:
        mean = (total - last) * rate
        number = min(int(mean + 4.0 * math.sqrt(mean)) + 8, _MOST_GAPS)
        with np.errstate(over="ignore"):  # a gap of inf is meant: no further success
            gaps = np.ceil(generator.standard_exponential(number) / decay)
        # An exponential of exactly 0 would be a gap of 0.
        places = last + np.cumsum(np.clip(gaps, 1, total + 1).astype(np.int64))
        found.append(places)
        last = int(places[-1])
    places = np.concatenate(found)
    return places[: np.searchsorted(places, total)]


def _shuffle_within(
    owner: np.ndarray, number_of_owners: int, generator: np.random.Generator
) -> np.ndarray:
    """A random order of all entries that keeps those of each owner in their stretch."""
    if number_of_owners == 1:
        return generator.permutation(len(owner))
    bits = 63 - number_of_owners.bit_length()
    while True:
        noise = generator.integers(0, 1 << bits, len(owner))
        keys = (owner << bits) | noise
        order = np.argsort(keys)
        ranked = keys[order]
        # Equal keys would keep their order: without them all orders are alike.
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


def _turn_by_turn(
    counts: np.ndarray, number: np.ndarray, generator: np.random.Generator
) -> Children:
    """Best for few of many: Floyd's algorithm, a child of every unit each turn.

    Reference: Bentley and Floyd (1987), Communications of the ACM 30(9), 754-757: in
    its turn t a set of t children becomes one of t + 1, a uniformly random subset of
    all children up to ``top[t]``.
    """
    turns = np.arange(int(number.max()))[:, None]
    wanted = turns < number
    top = np.where(wanted, counts - number + turns, 0)
    tried = generator.integers(0, top, endpoint=True)
    picked = tried.copy()
    for turn in range(1, len(turns)):
        is_taken = (picked[:turn] == tried[turn]).any(axis=0)
        np.copyto(picked[turn], top[turn], where=is_taken)
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

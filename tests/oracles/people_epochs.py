"""Epochs by random allocation in which a person is in several episodes, on a grid.

Each of m episodes is put into one of t steps. A contribution may depend on the step,
and later on the sign of the first release: the reaction that Theorem 5 allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_REACH = 5.0
REGIONS = 2


class Epoch(NamedTuple):
    """All placements and contents of an epoch, with their chances."""

    steps: int
    bins: np.ndarray
    columns: np.ndarray
    weights: np.ndarray

    @property
    def num_columns(self) -> int:
        """Of episodes with and without the person."""
        return 2 * self.bins.shape[1]


def epoch(steps: int, rates: Sequence[float], taken: int | None = None) -> Epoch:
    """Each episode holds the person with a chance of its own.

    Of the steps ``taken`` are observed, all by default.
    """
    number, bins, columns, weights = len(rates), [], [], []
    for placed in itertools.product(range(steps), repeat=number):
        for held in itertools.product((True, False), repeat=number):
            pairs = zip(held, rates, strict=True)
            chance = float(np.prod([r if h else 1 - r for h, r in pairs]))
            if chance > 0:
                bins.append(placed)
                columns.append([2 * i + (not held[i]) for i in range(number)])
                weights.append(chance / steps**number)
    taken = steps if taken is None else taken
    return Epoch(taken, np.array(bins), np.array(columns), np.array(weights))


def density(design: Epoch, table: np.ndarray, s: float, axis: np.ndarray) -> np.ndarray:
    """Of all releases, on the grid axis^t; `table` is (columns, t, regions)."""
    placed = design.bins[..., None] == np.arange(design.steps)
    means = s * np.einsum("nit,nitr->ntr", placed, table[design.columns])
    bells = np.exp(-((axis - means[..., None]) ** 2) / 2) * _width(axis)
    total = np.zeros(())
    for region in range(REGIONS):
        first = bells[:, 0, 0] * ((axis >= 0) == region) * design.weights[:, None]
        later = bells[:, 1, region]
        for step in range(2, design.steps):
            later = np.einsum("nx,ny->nxy", later, bells[:, step, region])
            later = later.reshape(len(later), -1)
        total = total + first.T @ later
    return total


def _width(axis: np.ndarray) -> float:
    return float((axis[1] - axis[0]) / np.sqrt(2 * np.pi))


def grid(design: Epoch, s: float, spacing: float) -> np.ndarray:
    """An axis that holds every release; its points stay off the border at 0."""
    high = _REACH + s * design.bins.shape[1]
    return spacing * (
        np.arange(-np.ceil(high / spacing), np.ceil(high / spacing)) + 0.5
    )


def other_world(table: np.ndarray, relation: str, replaced: np.ndarray) -> np.ndarray:
    """What the episodes contribute without the person, or with other data of hers."""
    other = table.copy()
    other[::2] = 0.0 if relation == "zero_out" else replaced[::2]
    return other


def masses(design: Epoch, tables, s: float, g: np.ndarray, axis: np.ndarray):
    """H_g of the first table's releases against the second's, and of these."""
    one, two = (density(design, table, s, axis) for table in tables)
    return tuple(
        np.array([np.maximum(a - each * b, 0.0).sum() for each in g])
        for a, b in ((one, two), (two, one))
    )


Tables = tuple[np.ndarray, np.ndarray]


def attack(
    rng: np.random.Generator,
    design: Epoch,
    relation: str,
    s: float,
    g: float,
    *,
    sign: int,
) -> Tables:
    """Contributions of both worlds that tell most; sign -1 is backward."""
    shape = (design.num_columns, design.steps, REGIONS)
    starts = [
        (np.ones(shape), -np.ones(shape)),
        tuple(rng.integers(-1, 2, shape).astype(float) for _ in range(2)),
    ]
    axis, ratio = grid(design, s, 0.5 if design.steps > 2 else 0.3), np.array([g])

    def worlds(start: Tables) -> Tables:
        return start[0], other_world(start[0], relation, start[1])

    def mass(start: Tables) -> float:
        return float(masses(design, worlds(start), s, ratio, axis)[sign < 0][0])

    return worlds(max((_ascended(start, relation, mass) for start in starts), key=mass))


def _ascended(start: Tables, relation: str, mass: Callable[[Tables], float]) -> Tables:
    """One sweep over all contributions, in place."""
    score = mass(start)
    for table, place in itertools.product(start, np.ndindex(start[0].shape)):
        unused = table is start[1] and (relation == "zero_out" or place[0] % 2 == 1)
        # The first release reacts to nothing.
        if unused or (place[1] == 0 and place[2] > 0):
            continue
        kept = table[place]
        for trial in (-1.0, -0.5, 0.0, 0.5, 1.0):
            table[place] = trial
            reached = mass(start)
            if reached > score:
                score, kept = reached, trial
        table[place] = kept
    return start

"""Walks over a tree of units stored as children counts, level by level.

Everywhere ``counts[j][u]`` is the number of children, at level ``j + 1``, of unit ``u``
of level ``j``; units are in depth-first order. The units of the last level are never
listed, only counted, so a tree of 10^7 examples costs what its classes cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.describe.schemes import Scheme, WithoutReplacement


class DistinctPaths(NamedTuple):
    """The different tuples ``(N_1, ..., N_l)`` along the paths to units of level ``l``.

    ``N_j`` is the number of siblings, itself included, of the unit that the path goes
    through at level ``j``. A unit without children counts as one of size 1, here and
    on every level below it: nobody is there, but somebody may join.

    Attributes:
      sizes: (P, l) int64, each >= 1, in lexicographic order, no two rows equal.
      multiplicity: (P,) int64, how many existing units of level ``l`` have that path;
        0 for a path that only leads to empty units.
      witness_level: (P,) int64, the level of one real unit on such a path: ``l``, or
        the level of an empty unit where the multiplicity is 0 (0: the root).
      witness_index: (P,) int64, the place of that unit among the units of its level.
    """

    sizes: np.ndarray
    multiplicity: np.ndarray
    witness_level: np.ndarray
    witness_index: np.ndarray


def distinct_paths(counts: Sequence[np.ndarray]) -> DistinctPaths:
    """Returns the distinct paths to the units of level ``len(counts)``."""
    num_levels = len(counts)
    parts = []
    # Rows of `table` are the distinct paths to units of level j; `code` says which of
    # them each unit has. Level 0 is one unit, the root, with the empty path.
    table = np.zeros((1, 0), np.int64)
    code = np.zeros(1, np.int64)
    for j, count in enumerate(counts):
        last = j == num_levels - 1
        if not last:
            empty = np.flatnonzero(count == 0)
            parts.append(_empty_paths(table, code, empty, level=j, width=num_levels))
        sizes = np.maximum(count, 1)
        values, value_code = np.unique(sizes, return_inverse=True)
        base = max(len(values), 1)
        key = code * base + value_code
        # Children only exist of units with a count; the last level keeps all paths.
        kept = np.arange(len(count)) if last else np.flatnonzero(count > 0)
        keys, inverse = np.unique(key[kept], return_inverse=True)
        table = np.column_stack([table[keys // base], values[keys % base]])
        if last:
            parts.append(_last_level(table, inverse, count, num_levels))
        else:
            code = np.repeat(inverse, count[kept])
    return _merged(parts)


def path_to_unit(counts: Sequence[np.ndarray], level: int, index: int) -> list[int]:
    """Returns the indices of the units on the way to a unit, from level 1 on."""
    path = [int(index)]
    for count in reversed(counts[1:level]):
        # As many units precede the parent as have their last child before this one.
        path.append(int(np.searchsorted(np.cumsum(count), path[-1], side="right")))
    return path[::-1]


def max_contributions(
    counts: Sequence[np.ndarray], schemes: Sequence[Scheme]
) -> np.ndarray:
    """Returns the most units that one draw can pick below one unit, at least 1.

    Args:
      counts: children counts from the level of that unit down to the level above the
        units that are counted.
      schemes: the scheme that draws the children, for each of ``counts``.
    """
    sizes = [s.size for s in schemes if isinstance(s, WithoutReplacement)]
    shape = np.broadcast_shapes(*map(np.shape, sizes))
    columns = [np.broadcast_to(size, shape).ravel() for size in sizes]
    rows = np.column_stack(columns) if columns else np.zeros((1, 0), np.int64)
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    best = np.array([_most_picked(counts, schemes, row) for row in distinct], np.int64)
    return best[inverse.ravel()].reshape(shape)[()]


def _empty_paths(
    table: np.ndarray, code: np.ndarray, empty: np.ndarray, *, level: int, width: int
) -> DistinctPaths:
    """Paths that end early, at units of ``level`` without children; ones below."""
    codes, first = np.unique(code[empty], return_index=True)
    sizes = np.ones((len(codes), width), np.int64)
    sizes[:, :level] = table[codes]
    zeros = np.zeros(len(codes), np.int64)
    return DistinctPaths(sizes, zeros, zeros + level, empty[first])


def _last_level(
    table: np.ndarray, inverse: np.ndarray, count: np.ndarray, level: int
) -> DistinctPaths:
    """Counts the units on each path and picks the first as its witness."""
    multiplicity = np.zeros(len(table), np.int64)
    np.add.at(multiplicity, inverse, count)
    starts = np.cumsum(count) - count
    real = multiplicity > 0
    # A reversed assignment leaves, for each path, the first parent; parents that
    # have children go last, so that they win over empty ones.
    parent = np.zeros(len(table), np.int64)
    for chosen in (np.flatnonzero(count == 0), np.flatnonzero(count > 0)):
        parent[inverse[chosen[::-1]]] = chosen[::-1]
    return DistinctPaths(
        table,
        multiplicity,
        np.where(real, level, level - 1),
        np.where(real, starts[parent], parent),
    )


def _merged(parts: Sequence[DistinctPaths]) -> DistinctPaths:
    """Joins lists of paths; the last list's witnesses come first."""
    if not any(len(part.sizes) for part in parts[:-1]):
        return parts[-1]  # sorted already, as every table is made from sorted keys
    joined = DistinctPaths(*map(np.concatenate, zip(*parts[::-1], strict=True)))
    sizes, first, inverse = np.unique(
        joined.sizes, axis=0, return_index=True, return_inverse=True
    )
    multiplicity = np.zeros(len(sizes), np.int64)
    np.add.at(multiplicity, inverse.ravel(), joined.multiplicity)
    return DistinctPaths(
        sizes, multiplicity, joined.witness_level[first], joined.witness_index[first]
    )


def _most_picked(
    counts: Sequence[np.ndarray], schemes: Sequence[Scheme], sizes: np.ndarray
) -> int:
    """`max_contributions` for one row of sizes, from the bottom of the tree up."""
    rows = iter(reversed(sizes))
    limits = [
        int(next(rows)) if isinstance(scheme, WithoutReplacement) else None
        for scheme in reversed(schemes)
    ]
    # What each unit can make: at the bottom every child makes one.
    values = counts[-1] if limits[0] is None else np.minimum(counts[-1], limits[0])
    for count, most in zip(reversed(counts[:-1]), limits[1:], strict=True):
        values = _sum_of_largest(values, count, most)
    return max(1, int(np.max(values, initial=0)))


def _sum_of_largest(
    values: np.ndarray, count: np.ndarray, most: int | None
) -> np.ndarray:
    """Sums the ``most`` largest values of each parent's children (None: all)."""
    parent = np.repeat(np.arange(len(count)), count)
    if most is not None:
        order = np.lexsort((-values, parent))
        starts = np.cumsum(count) - count
        rank = np.arange(len(values)) - starts[parent]
        values = np.where(rank < most, values[order], 0)
    total = np.concatenate([[0], np.cumsum(values)])
    ends = np.cumsum(count)
    return total[ends] - total[ends - count]

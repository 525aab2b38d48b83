"""Trees of units, stored as children counts: made from sizes or ids, and walked.

Everywhere ``counts[j][u]`` is the number of children, at level ``j + 1``, of unit ``u``
of level ``j``; units are in depth-first order. The units of the last level are never
listed, only counted, so a tree of 10^7 examples costs what its classes cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.schemes import (
    MAX_LEVELS,
    Scheme,
    WithoutReplacement,
)

# Units of a level, at most: what a float64 rate still tells apart.
_MAX_UNITS = 2**53

_HOW_TO_MAKE_GLOBAL = (
    "ids must be global and every unit must lie under one path; make ids that are "
    "local to their parent global first: in a file, parent/child in place of child; in "
    "Python np.unique(np.stack([parent, child]), axis=1, return_inverse=True)[1]"
)


def checked_counts(counts: Any) -> tuple[np.ndarray, ...]:
    """Returns children counts as read-only int64 arrays that fit together."""
    if not isinstance(counts, list | tuple) or not counts:
        raise TypeError(
            "children_counts must be a tuple of arrays, one a level, "
            f"got {_validation.shown(counts)}"
        )
    checked = []
    num_units = 1
    for level, count in enumerate(counts):
        name = f"children_counts[{level}]"
        array = _validation.integer_array(name, count, minimum=0)
        if array.shape != (num_units,):
            raise ValueError(
                f"{name} must have shape ({num_units},), one entry for each unit of "
                f"level {level}, got {array.shape}"
            )
        if array.sum(dtype=np.float64) > _MAX_UNITS:
            raise ValueError(f"{name} must sum to at most 2**53")
        array.setflags(write=False)
        checked.append(array)
        num_units = int(array.sum())
    return tuple(checked)


def checked_ids(ids: Any, counts: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Returns unit ids as read-only arrays, one entry for each unit of its level."""
    checked = tuple(np.array(column) for column in ids)
    for level, (column, count) in enumerate(zip(checked, counts, strict=False)):
        if column.shape != (int(count.sum()),):
            raise ValueError(
                f"unit_ids[{level}] must have shape ({int(count.sum())},), "
                f"got {column.shape}"
            )
        column.setflags(write=False)
    if len(checked) > len(counts):
        raise ValueError(
            f"unit_ids must be at most {len(counts)} arrays, got {len(checked)}"
        )
    return checked


def counts_from_sizes(nested: Any) -> tuple[np.ndarray, ...]:
    """Returns the children counts of a tree given by nested sizes."""
    counts: list[np.ndarray] = []
    items = [nested]
    while True:
        is_list = [_is_list(item) for item in items]
        if not all(is_list):
            break
        if len(counts) == MAX_LEVELS:
            raise ValueError(f"sizes must be nested at most {MAX_LEVELS} levels deep")
        counts.append(np.array([len(item) for item in items], np.int64))
        if all(_is_flat(item) for item in items) and sum(map(len, items)):
            leaves = np.concatenate(items)  # arrays: no need to list their elements
            counts.append(_validation.integer_array("sizes", leaves, minimum=0))
            return tuple(counts)
        items = [child for item in items for child in item]
        if not items:
            raise ValueError(
                "sizes must hold at least one number, or their depth is unknown; "
                f"got only empty lists at level {len(counts)}"
            )
    if any(is_list):
        raise ValueError(
            "sizes must be nested equally deep everywhere, got a number beside a list "
            f"at level {len(counts)}"
        )
    counts.append(_validation.integer_array("sizes", items, minimum=0))
    return tuple(counts)


def tree_from_ids(
    ids: Mapping[str, Any],
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Returns the children counts and the units' ids of a table of records."""
    names = list(ids)
    columns = [None if ids[n] is None else _id_column(n, ids[n]) for n in names]
    one_unit_a_record = len(names) == 1
    if len(names) > 1 and columns[-1] is None:
        columns.pop()
        one_unit_a_record = True
    present = [column for column in columns if column is not None]
    if not present or len(present) < len(columns):
        raise ValueError(
            "ids must be one array a level, top first; only the last of several may be "
            f"None; got {names}"
        )
    lengths = {name: len(column) for name, column in zip(names, present, strict=False)}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise ValueError(
            f"ids must be equally long arrays of at least one record, got {lengths}"
        )
    counts, unit_ids, unit_of_record = _nest(names, present)
    if one_unit_a_record:
        counts.append(np.bincount(unit_of_record, minlength=len(unit_ids[-1])))
    return tuple(counts), tuple(unit_ids)


def _nest(
    names: Sequence[str], columns: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Puts the units of each level in depth-first order, level by level."""
    counts: list[np.ndarray] = []
    unit_ids: list[np.ndarray] = []
    parent_of_record = np.zeros(len(columns[0]), np.int64)
    num_parents = 1
    for level, column in enumerate(columns):
        values, code = _unique_codes(column)
        parent = np.empty(len(values), np.int64)
        parent[code] = parent_of_record
        clash = parent[code] != parent_of_record
        if clash.any():
            record = int(np.argmax(clash))  # `parent` has its last record's parent
            above = unit_ids[-1]
            raise ValueError(
                f"{names[level]} {column[record].item()!r} lies under two parents, "
                f"{names[level - 1]} {above[parent_of_record[record]].item()!r} and "
                f"{above[parent[code[record]]].item()!r}; {_HOW_TO_MAKE_GLOBAL}"
            )
        # Stable: ids stay sorted within a parent, and sorted tables cost O(n).
        order = np.argsort(parent, kind="stable")
        position = np.empty(len(values), np.int64)
        position[order] = np.arange(len(values))
        counts.append(np.bincount(parent, minlength=num_parents))
        unit_ids.append(values[order])
        parent_of_record = position[code]
        num_parents = len(values)
    return counts, unit_ids, parent_of_record


def _unique_codes(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sorted different ids, and which of them each record has."""
    if column.dtype.kind != "U":
        low, high = int(column.min()), int(column.max())
        if high - low < 4 * len(column):
            # Dense ids: linear time where sorting 10^7 records takes seconds. Wide
            # integers first: 127 - (-128) does not fit where both ends do.
            wide = column.astype(np.uint64 if column.dtype.kind == "u" else np.int64)
            offset = (wide - wide.dtype.type(low)).astype(np.int64)
            seen = np.zeros(high - low + 1, bool)
            seen[offset] = True
            values = np.flatnonzero(seen).astype(wide.dtype) + wide.dtype.type(low)
            return values, (np.cumsum(seen) - 1)[offset]
    values, code = np.unique(column, return_inverse=True)
    return values, code


def _id_column(name: str, value: Any) -> np.ndarray:
    """Returns ids as a 1-D array of integers or strings."""
    array = np.asarray(value)
    if array.dtype.kind in "OT" and all(isinstance(item, str) for item in array.flat):
        array = array.astype(str)
    if array.dtype.kind not in "iuU":
        raise TypeError(
            f"{name} must be integer or string ids, got an array of {array.dtype}"
        )
    if array.ndim != 1:
        raise ValueError(
            f"{name} must be a 1-D array, one id a record, got shape {array.shape}"
        )
    return array


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (
        isinstance(value, np.ndarray) and value.ndim > 0
    )


def _is_flat(value: Any) -> bool:
    """True for a 1-D array of numbers."""
    return (
        isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iuf"
    )


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
      witness_index: (P,) int64, the number of that unit among the units of its level.
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

    ``counts`` are the children's from the level of that unit down to the level above
    the units that are counted, ``schemes`` what draws these children.
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

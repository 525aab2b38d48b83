"""Makes trees of units, as children counts, from nested sizes and from id tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic import _validation

_MAX_LEVELS = 32
_MAX_UNITS = 2**53  # what a float64 rate still tells apart

_HOW_TO_MAKE_GLOBAL = (
    "ids must be global and every unit must lie under one path; make ids that are "
    "local to their parent global first, e.g. np.unique(np.stack([parent, child]), "
    "axis=1, return_inverse=True)[1]"
)


def checked_counts(counts: Any) -> tuple[np.ndarray, ...]:
    """Returns children counts as read-only int64 arrays that fit together."""
    if not isinstance(counts, list | tuple) or not counts:
        raise TypeError(
            f"children_counts must be a tuple of arrays, one a level, got {counts!r}"
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
        if len(counts) == _MAX_LEVELS:
            raise ValueError(f"sizes must be nested at most {_MAX_LEVELS} levels deep")
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
        place = np.empty(len(values), np.int64)
        place[order] = np.arange(len(values))
        counts.append(np.bincount(parent, minlength=num_parents))
        unit_ids.append(values[order])
        parent_of_record = place[code]
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

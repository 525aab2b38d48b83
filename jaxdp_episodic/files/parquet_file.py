"""Parquet files: columns of plain cells, numbers, lists and files.

A small file can expand to billions of equal texts. So `parquet_batches`, which also
reads requests of unknown origin, keeps texts as dictionary indices and refuses nested
columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic._validation import prefixed
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.optional import require_pyarrow
from jaxdp_episodic.files.table_file import column_places

_BUFFER_BYTES = 2**20  # with a buffer, row groups are read in pieces, not whole
_BATCH_BYTES = 2**26  # largest memory of a batch
BATCH_ROWS = 2**16  # most rows of numbers or ids read at a time
_LIST_ITEM_BYTES = 16  # that Arrow takes for a list item which it decodes, about
# Field of the struct that holds an image's file in Hugging Face data sets.
_BYTES = "bytes"
PLAIN = "plain"  # kinds of columns
LISTS = "lists"
# Prefixes of Arrow's names of number types that become arrays directly.
_NUMBERS = ("int", "uint", "half", "float", "double", "bool")
_AS_OBJECTS = ("decimal", "string", "large_string", "dictionary")  # maybe numbers


@contextmanager
def _opened(
    path: Path, names: Sequence[str] | None, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yields pyarrow, and an open Parquet file that has these columns."""
    arrow, parquet = require_pyarrow(purpose="reading Parquet")
    check_plain_file(path)
    # What damaged files raise; Arrow's errors of values are ValueErrors.
    broken = (arrow.ArrowException, OSError, OverflowError, KeyError, IndexError)
    try:
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, **options) as file:
            there = file.schema_arrow.names
            column_places(there, there if names is None else names)
            yield arrow, file
    except broken as error:
        raise ValueError(f"must be a Parquet file: {error}") from None


def parquet_batches(
    path: Path, names: Sequence[str] | None, *, rows: int, max_bytes: int | None = None
) -> Iterator[tuple[list[str], list[list[Any]]]]:
    """Yields the columns of a Parquet file as plain values, some rows at a time."""
    with _opened(path, names) as (arrow, file):
        schema, meta = file.schema_arrow, file.metadata
        wanted = list(schema.names) if names is None else list(names)
        leaves = [meta.schema.column(i) for i in range(meta.num_columns)]
        kinds = parquet_columns(path)
        for name in wanted:
            if kinds[name] != PLAIN:
                said = f"column {name[:60]!r} must contain numbers or text"
                raise ValueError(f"{said}, has {str(schema.field(name).type)[:60]}")
        sizes = [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]
        total = max(sum(max(n, 0) for n in sizes), 8 * meta.num_rows * len(wanted))
        if max_bytes is not None and total > max_bytes:
            raise ValueError(f"more than max_bytes={max_bytes} bytes")
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        is_empty = not meta.num_rows
    yield wanted, [[] for _ in wanted]
    if is_empty:
        return
    with _opened(path, wanted, read_dictionary=texts) as (arrow, file):
        for batch in file.iter_batches(batch_size=rows, columns=wanted):
            yield wanted, [_cells(arrow, batch.column(name)) for name in wanted]


def parquet_columns(path: Path) -> dict[str, str]:
    """Returns the columns; each is `PLAIN`, `LISTS` (of numbers), or else empty."""
    plain, found = "integer floating boolean decimal null string large_string", {}
    with _opened(path, None) as (arrow, file):
        types, meta = arrow.types, file.metadata
        # Not Arrow's schema, which a file may contain too: its types can hide lists.
        leaves = map(meta.schema.column, range(meta.num_columns))
        lists = {x.path.partition(".")[0] for x in leaves if x.max_repetition_level > 0}
        for field in file.schema_arrow:
            kind = field.type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            is_one = any(getattr(types, f"is_{one}")(kind) for one in plain.split())
            inside = getattr(kind, "value_type", None)
            is_list = inside and (types.is_integer(inside) or types.is_floating(inside))
            is_plain = is_one and field.name not in lists
            found[field.name] = PLAIN if is_plain else LISTS if is_list else ""
    return found


def _cells(arrow: Any, column: Any) -> list[Any]:
    """Returns the values as Python objects; equal texts of a batch are one object."""
    if not arrow.types.is_dictionary(column.type):
        return column.to_pylist()
    words, indices = column.dictionary.to_pylist(), column.indices.to_pylist()
    return [None if index is None else words[index] for index in indices]


def record_batches(path: Path, names: Sequence[str], rows: int) -> Iterator[Any]:
    """Yields Arrow's batches of columns."""
    with prefixed(path), _opened(path, names) as (_, file):
        yield from file.iter_batches(batch_size=rows, columns=list(names))


def parquet_arrays(
    path: Path, names: Sequence[str], width: int | None = None
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yields records before, and columns of (lists of) numbers as (n, width)."""
    if (first := next(record_batches(path, names, 1), None)) is None:
        return
    probes = [_array(first.column(name), name, path, 0) for name in names]
    widths = [width or (0 if one.ndim > 2 else one.size) for one in probes]
    rows = _BATCH_BYTES // (_LIST_ITEM_BYTES * max(sum(widths), 1))
    before = 0
    for batch in record_batches(path, names, max(min(rows, BATCH_ROWS), 1)):
        columns = [_array(batch.column(name), name, path, before) for name in names]
        for name, column, one in zip(names, columns, widths, strict=True):
            if column.size != len(column) * one or not one:
                raise ValueError(
                    f"column {name[:60]!r} of {path} must have {one} numbers per row, "
                    "or lists of numbers of one length, has "
                    f"{column.shape[1:]} in a record"
                )
        yield before, [column.reshape(len(column), -1) for column in columns]
        before += batch.num_rows


def _array(values: Any, name: str, path: Path, first: int) -> np.ndarray:
    """Returns a column of numbers, or of (nested) lists of one length, as (n, ...)."""
    column, shape = f"{path}: column {name[:60]!r}", [len(values)]
    while values.null_count == 0 and hasattr(values.type, "value_type"):
        if not hasattr(values, "value_lengths"):  # a dictionary
            break
        lengths = np.unique(np.asarray(values.value_lengths()))
        if len(lengths) > 1:
            raise ValueError(f"{column} must have lists of equal length")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
    if values.null_count:
        what = "list" if hasattr(values, "value_lengths") else "number"
        record = first + np.flatnonzero(values.is_null())[0] // max(
            int(np.prod(shape[1:])), 1
        )
        raise ValueError(f"{column} has a missing {what} in record {record + 1}")
    kind = str(values.type)
    if kind.startswith(_NUMBERS):
        array = np.asarray(values.to_numpy(zero_copy_only=False))
    elif kind.startswith(_AS_OBJECTS):
        array = np.array(values.to_pylist(), object)
    else:
        raise ValueError(f"{column} must contain numbers, has {kind[:60]}")
    return array.reshape(shape)


def parquet_cells(path: Path, name: str, *, rows: int) -> Iterator[list[Any]]:
    """Yields the cells of a column, of image files as bytes; ``rows`` at a time."""
    for batch in record_batches(path, [name], rows):
        column = batch.column(name)
        is_struct = hasattr(column, "field") and _BYTES in column.type.names
        yield (column.field(_BYTES) if is_struct else column).to_pylist()

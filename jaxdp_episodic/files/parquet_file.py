"""Columns of untrusted Parquet files, in memory that does not depend on them.

Parquet packs a column of a billion equal texts into a few bytes, so what a file says of
its own size is no bound of what it becomes. Text is therefore kept as indices into a
dictionary, as it is in the file; nested columns are refused, or bounded by their items.
How many these are a child process reads from the file's footer: where a damaged
description of a column contradicts itself, Arrow ends the process that asks for it
(pyarrow 26).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.csv_file import column_places
from jaxdp_episodic.files.optional import require_pyarrow

_PRINT_ITEMS = """
import json, sys
from pyarrow import parquet
with parquet.ParquetFile(sys.argv[1]) as file:
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    chunks = ((g, g.column(i)) for g in groups for i in range(g.num_columns))
    found = [(c.path_in_schema, g.num_rows, c.num_values) for g, c in chunks]
print(json.dumps(found))
"""


class ColumnItems(NamedTuple):
    """Of a column in a row group."""

    path: str  # in the schema, with dots
    num_rows: int  # of the row group
    num_items: int  # of the column, more than rows only where lists hold several


def parquet_batches(
    path: Path,
    names: Sequence[str] | None,
    *,
    rows: int,
    max_bytes: int | None = None,
) -> Iterator[tuple[list[str], list[list[Any]]]]:
    """Yields the columns of a Parquet file as plain values, some rows at a time.

    Extension types run code in no pyarrow from 14.0.1 on.

    Args:
      path: the file.
      names: the columns; None: all. They must not be nested.
      rows: most rows at a time.
      max_bytes: most bytes that the columns may take, 8 a cell; None: no bound.

    Yields:
      The columns' names, and their cells; the first with no rows.

    Raises:
      OSError: no such file.
      ImportError: pyarrow is not installed.
      ValueError: no Parquet file, a damaged one, one with two columns of a name, or
        whose columns are lacking, too large or of a type that is no number or text;
        the message does not name the file.
    """
    arrow, parquet = require_pyarrow(purpose="reading Parquet")
    check_plain_file(path)
    # All that a damaged file can do, some of it without a name of its own.
    broken = (arrow.ArrowException, OSError, OverflowError, KeyError, IndexError)
    try:
        with parquet.ParquetFile(path) as plain:
            schema, meta = plain.schema_arrow, plain.metadata
            wanted = list(schema.names) if names is None else list(names)
            column_places(schema.names, wanted)
            # The file's own schema: Arrow's types, which it may add, can hide lists.
            leaves = [meta.schema.column(i) for i in range(meta.num_columns)]
            # What is not wanted is not read: a column of images may be beside it.
            lists = {
                leaf.path.partition(".")[0]
                for leaf in leaves
                if leaf.max_repetition_level > 0
            }
            for name in wanted:
                _check_type(arrow, schema.field(name), is_list=name in lists)
            _check_size(meta, len(wanted), max_bytes)
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        yield wanted, [[] for _ in wanted]
        if not meta.num_rows:
            return
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=rows, columns=wanted):
                yield wanted, [_cells(arrow, batch.column(name)) for name in wanted]
    except broken as error:
        raise ValueError(f"must be a Parquet file: {error}") from None


def _check_type(arrow: Any, field: Any, *, is_list: bool) -> None:
    """Refuses what is no number, truth value or text."""
    types, kind = arrow.types, field.type
    if types.is_dictionary(kind):
        kind = kind.value_type
    is_plain = (
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
    )
    if is_list or not is_plain:
        raise ValueError(
            f"column {field.name[:60]!r} must hold numbers or text, "
            f"holds {str(field.type)[:60]}"
        )


def _check_size(meta: Any, columns: int, max_bytes: int | None) -> None:
    """Refuses more than was asked for, by what bounds the reader."""
    groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
    total = sum(max(group.total_byte_size, 0) for group in groups)
    if max_bytes is not None and max(total, 8 * meta.num_rows * columns) > max_bytes:
        raise ValueError(f"more than max_bytes={max_bytes} bytes")


def _cells(arrow: Any, column: Any) -> list[Any]:
    """The values as Python has them; equal texts of a batch are one object."""
    if not arrow.types.is_dictionary(column.type):
        return column.to_pylist()
    words, indices = column.dictionary.to_pylist(), column.indices.to_pylist()
    return [None if index is None else words[index] for index in indices]


def column_items(path: Path) -> list[ColumnItems]:
    """Returns what each column of each row group is said to hold.

    Raises:
      ValueError: no Parquet file, or a damaged one.
    """
    # -P: nothing is imported from the folder that somebody happens to be in.
    command = (sys.executable, "-P", "-c", _PRINT_ITEMS, str(path.resolve()))
    child = subprocess.run(command, capture_output=True, check=False)
    if child.returncode:
        said = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"must be a Parquet file: damaged footer: {said}")
    return [ColumnItems(*found) for found in json.loads(child.stdout)]

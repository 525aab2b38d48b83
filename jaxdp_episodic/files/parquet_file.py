"""Columns of Parquet files from strangers, in memory that does not depend on them.

Parquet packs a column of a billion equal texts into a few bytes, so what a file says of
its own size is no bound of what it becomes. Text is therefore kept as places in a
dictionary, as it is in the file, and nested columns are bounded by their items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.parquet_footer import column_items

# Characters of a nested column that are made into Python's in one go.
_MOST_TEXT = 2**29
# Items of a nested column that are made into Python objects in one go.
_MOST_ITEMS = 2**22


def parquet_batches(
    arrow: Any,
    parquet: Any,
    path: Path,
    names: Sequence[str] | None,
    *,
    rows: int,
    max_bytes: int | None = None,
) -> Iterator[tuple[list[str], list[list[Any]]]]:
    """Yields the columns of a Parquet file as plain values, some rows at a time.

    Args:
      arrow: the module ``pyarrow``; extension types run code in none from 14.0.1 on.
      parquet: the module ``pyarrow.parquet``.
      path: the file.
      names: the columns, which must not be nested; None: all, nested ones too.
      rows: most rows at a time.
      max_bytes: most bytes that the columns may take, 8 a cell; None: no bound.

    Yields:
      The columns' names, and their cells; the first with no rows.

    Raises:
      OSError: no such file.
      ValueError: no Parquet file, a damaged one, one with two columns of a name, or
        whose columns are lacking, too large or of a type that is no number or text;
        the message does not name the file.
    """
    check_plain_file(path)
    # All that a damaged file can do, some of it without a name of its own.
    broken = (arrow.ArrowException, OSError, OverflowError, KeyError, IndexError)
    try:
        with parquet.ParquetFile(path) as plain:
            schema, meta = plain.schema_arrow, plain.metadata
            _check_names(list(schema.names))
            wanted = list(schema.names) if names is None else list(names)
            for name in wanted:
                if name not in schema.names:
                    hint = _validation.nearest(name, schema.names)
                    raise ValueError(f"no column {name!r}{hint}")
                _check_type(arrow, schema.field(name), nested=names is None)
            _check_size(meta, len(wanted), max_bytes)
            if _has_lists(meta):
                _check_items(path)
            texts = _text_leaves(meta)
        yield wanted, [[] for _ in wanted]
        if not meta.num_rows:
            return
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=rows, columns=wanted):
                columns = [_cells(arrow, batch.column(name), name) for name in wanted]
                yield wanted, columns
    except broken as error:
        raise ValueError(f"must be a Parquet file: {error}") from None


def _check_names(names: list[str]) -> None:
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(n for n in names if n in seen or seen.add(n))
        raise ValueError(f"two columns {twice[:60]!r}")


def _check_type(arrow: Any, field: Any, *, nested: bool) -> None:
    """Refuses what is no number, truth value or text."""
    types, kind = arrow.types, field.type
    if types.is_dictionary(kind):
        kind = kind.value_type
    inside = [kind.field(i) for i in range(kind.num_fields)]
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if nested and inside and (is_list or types.is_struct(kind)):
        for part in inside:
            _check_type(arrow, part, nested=True)
        return
    is_plain = (
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
        or _is_text(arrow, kind)
    )
    if not is_plain:
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


def _has_lists(meta: Any) -> bool:
    """By the file's own schema: Arrow's types, which a file may add, can hide them."""
    columns = [meta.schema.column(i) for i in range(meta.num_columns)]
    return any(column.max_repetition_level > 0 for column in columns)


def _check_items(path: Path) -> None:
    """Refuses lists of more items than are made into Python objects in one go."""
    for column in column_items(path):
        # As many as there are rows, unless lists hold more.
        if column.num_items > max(column.num_rows, _MOST_ITEMS):
            raise ValueError(
                f"column {column.path[:60]!r} must have at most {_MOST_ITEMS} items "
                "a row group"
            )


def _is_text(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return types.is_string(kind) or types.is_large_string(kind)


def _text_leaves(meta: Any) -> list[str]:
    """Paths of the columns that hold text, nested ones too."""
    columns = [meta.schema.column(i) for i in range(meta.num_columns)]
    return [c.path for c in columns if c.physical_type == "BYTE_ARRAY"]


def _cells(arrow: Any, column: Any, name: str) -> list[Any]:
    """The values as Python has them; equal texts of a batch are one object."""
    if not arrow.types.is_dictionary(column.type):
        if _longest_text(arrow, column) * len(column) > _MOST_TEXT:
            raise ValueError(
                f"column {name[:60]!r} must have at most {_MOST_TEXT} characters in "
                f"{len(column)} rows"
            )
        return column.to_pylist()
    words = column.dictionary.to_pylist()
    places = column.indices.to_pylist()
    return [None if place is None else words[place] for place in places]


def _longest_text(arrow: Any, array: Any) -> int:
    """Characters of the longest text in a nested array, read as dictionaries."""
    types, kind = arrow.types, array.type
    if types.is_dictionary(kind):
        return max((len(w) for w in array.dictionary.to_pylist() if w), default=0)
    if types.is_struct(kind):
        parts = [array.field(i) for i in range(kind.num_fields)]
    elif types.is_list(kind) or types.is_large_list(kind):
        parts = [array.values]
    else:
        parts = []
    return max((_longest_text(arrow, part) for part in parts), default=0)

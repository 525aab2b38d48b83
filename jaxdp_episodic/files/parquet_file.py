"""Columns of untrusted Parquet files, in memory that does not depend on them.

Parquet packs a column of a billion equal texts into a few bytes, so what a file says of
its own size is no bound of what it becomes. Text is therefore kept as places in a
dictionary, as it is in the file, and nested columns are bounded by their items.

How many these are is read from the footer here: Arrow's own accessor of a column's
description ends the process where a damaged file's description contradicts itself (as
of pyarrow 26). Of Thrift's compact protocol the few fields that are needed are read,
and what is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.columns import column_places
from jaxdp_episodic.files.optional import require_pyarrow

# Characters of a nested column that are made into Python's in one go.
_MOST_TEXT = 2**29
# Items of a nested column that are made into Python objects in one go.
_MOST_ITEMS = 2**22
# Longest footer that is read in Python, byte by byte, and how deep it may be nested.
_LONGEST, _DEEPEST = 2**24, 32
_MAGIC = b"PAR1"
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64 = range(1, 7)
_DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(7, 13)
# Fields of parquet.thrift: FileMetaData, RowGroup, ColumnChunk, ColumnMetaData.
_ROW_GROUPS, _COLUMNS, _NUM_ROWS, _META_DATA = 4, 1, 3, 3
_PATH_IN_SCHEMA, _NUM_VALUES = 3, 5
_CHUNK = {_META_DATA: {_PATH_IN_SCHEMA: {}, _NUM_VALUES: {}}}
_FILE = {_ROW_GROUPS: {_NUM_ROWS: {}, _COLUMNS: _CHUNK}}


class ColumnItems(NamedTuple):
    """Of a column in a row group.

    Attributes:
      path: in the schema, with dots.
      num_rows: of the row group.
      num_items: of the column, more than rows only where lists hold several.
    """

    path: str
    num_rows: int
    num_items: int


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
      names: the columns, which must not be nested; None: all, nested ones too.
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
            for name in wanted:
                _check_type(arrow, schema.field(name), nested=names is None)
            _check_size(meta, len(wanted), max_bytes)
            # The file's own schema: Arrow's types, which it may add, can hide lists.
            leaves = [meta.schema.column(i) for i in range(meta.num_columns)]
            # What is not wanted is not read: a column of images may be beside it.
            lists = {
                leaf.path.partition(".")[0]
                for leaf in leaves
                if leaf.max_repetition_level > 0
            }
            if lists & set(wanted):
                _check_items(path, wanted)
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        yield wanted, [[] for _ in wanted]
        if not meta.num_rows:
            return
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=rows, columns=wanted):
                columns = [_cells(arrow, batch.column(name), name) for name in wanted]
                yield wanted, columns
    except broken as error:
        raise ValueError(f"must be a Parquet file: {error}") from None


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
        or types.is_string(kind)
        or types.is_large_string(kind)
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


def _check_items(path: Path, wanted: Sequence[str]) -> None:
    """Refuses lists of more items than are made into Python objects in one go."""
    for column in column_items(path):
        if column.path.partition(".")[0] not in wanted:
            continue
        # As many as there are rows, unless lists hold more.
        if column.num_items > max(column.num_rows, _MOST_ITEMS):
            raise ValueError(
                f"column {column.path[:60]!r} must have at most {_MOST_ITEMS} items "
                "a row group"
            )


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


def column_items(path: Path) -> list[ColumnItems]:
    """Returns what each column of each row group is said to hold.

    Raises:
      OSError: a file that cannot be read.
      ValueError: no Parquet file, or a footer that is damaged or too long.
    """
    found = []
    file = _Thrift(_footer(path)).value(_STRUCT, _FILE)
    for group in _structs(file.get(_ROW_GROUPS, [])):
        rows = group.get(_NUM_ROWS)
        for chunk in _structs(group.get(_COLUMNS, [])):
            described = chunk.get(_META_DATA)
            if not isinstance(described, dict):
                raise ValueError("damaged footer: a column without a description")
            parts = described.get(_PATH_IN_SCHEMA, [])
            if not _all_are(bytes, parts):
                raise ValueError("damaged footer: a column without a path")
            items = described.get(_NUM_VALUES)
            if type(items) is not int:
                raise ValueError("damaged footer: a column without a number of items")
            name = b".".join(parts).decode("utf-8", "replace")
            found.append(ColumnItems(name, rows if type(rows) is int else 0, items))
    return found


def _footer(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 12:
            raise ValueError("must be a Parquet file: too short")
        file.seek(size - 8)
        end = file.read(8)
        length = int.from_bytes(end[:4], "little")
        if end[4:] != _MAGIC or length > size - 12:
            raise ValueError("must be a Parquet file: no footer at its end")
        if length > _LONGEST:
            raise ValueError(f"footer must have at most {_LONGEST} bytes, has {length}")
        file.seek(size - 8 - length)
        return file.read(length)


def _structs(value: Any) -> list[dict[int, Any]]:
    if not isinstance(value, list):
        raise ValueError("damaged footer: a list was expected")
    if not _all_are(dict, value):
        raise ValueError("damaged footer: a list of structs was expected")
    return value


def _all_are(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


class _Thrift:
    """A reader of Thrift's compact protocol."""

    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 0

    def value(self, kind: int, wanted: Mapping[int, Any] | None, depth: int = 0) -> Any:
        """A value: of structs the wanted fields, of lists nothing if none is wanted."""
        if depth > _DEEPEST:
            raise ValueError(f"damaged footer: deeper than {_DEEPEST} levels")
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in (_BYTE, _DOUBLE):
            return self._take(1 if kind == _BYTE else 8)
        if kind in (_I16, _I32, _I64):
            number = self._varint()
            # No wanted field is so short, and Arrow passes over what has another type.
            return None if kind == _I16 else (number >> 1) ^ -(number & 1)
        if kind == _BINARY:
            return self._take(self._varint())
        if kind in (_LIST, _SET):
            head = self._take(1)[0]
            count = self._varint() if head >> 4 == 15 else head >> 4
            items = (self._item(head & 0x0F, wanted, depth) for _ in range(count))
            # What is not wanted is passed over.
            return [one for one in items if wanted is not None]
        if kind == _MAP:
            count = self._varint()
            kinds = self._take(1)[0] if count else 0
            for _ in range(count):
                self._item(kinds >> 4, None, depth)
                self._item(kinds & 0x0F, None, depth)
            return None
        if kind == _STRUCT:
            return self._fields(wanted or {}, depth)
        raise ValueError(f"damaged footer: type {kind}")

    def _item(self, kind: int, wanted: Mapping[int, Any] | None, depth: int) -> Any:
        # In lists a truth value takes a byte of its own.
        kind = _BYTE if kind in (_TRUE, _FALSE) else kind
        return self.value(kind, wanted, depth + 1)

    def _fields(self, wanted: Mapping[int, Any], depth: int) -> dict[int, Any]:
        found, number = {}, 0
        while head := self._take(1)[0]:
            step = head >> 4
            number = number + step if step else self.value(_I32, None)
            value = self.value(head & 0x0F, wanted.get(number), depth + 1)
            if number in wanted:
                found[number] = value
        return found

    def _take(self, count: int) -> bytes:
        end = self._place + count
        if end > len(self._content):
            raise ValueError("damaged footer: it ends too early")
        part = self._content[self._place : end]
        self._place = end
        return part

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("damaged footer: a number of more than 64 bits")

"""How many items the columns of a Parquet file hold, read from its footer.

Arrow's own accessor of a column's description ends the process where a damaged file's
description contradicts itself (as of pyarrow 26). This one reads the few fields
that are needed, of Thrift's compact protocol, and refuses what it does not understand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

# Longest footer that is read in Python, byte by byte.
_LONGEST = 2**24
_DEEPEST = 32
_MAGIC = b"PAR1"
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64 = range(1, 7)
_DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(7, 13)
# Fields of parquet.thrift: FileMetaData, RowGroup, ColumnChunk, ColumnMetaData.
_ROW_GROUPS, _COLUMNS, _NUM_ROWS, _META_DATA = 4, 1, 3, 3
_PATH_IN_SCHEMA, _NUM_VALUES = 3, 5

T = TypeVar("T")


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


def column_items(path: Path) -> list[ColumnItems]:
    """Returns what each column of each row group is said to hold.

    Raises:
      OSError: a file that cannot be read.
      ValueError: no Parquet file, or a footer that is damaged or too long.
    """
    return _file(_Bytes(_footer(path)))


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


class _Bytes:
    """A reader of Thrift's compact protocol."""

    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 0

    def take(self, count: int) -> bytes:
        end = self._place + count
        if end > len(self._content):
            raise ValueError("damaged footer: it ends too early")
        part = self._content[self._place : end]
        self._place = end
        return part

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("damaged footer: a number of more than 64 bits")

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def text(self) -> str:
        return self.take(self.varint()).decode("utf-8", "replace")

    def items(self) -> tuple[int, int]:
        """Type and number of a list's items."""
        head = self.take(1)[0]
        count = head >> 4
        return head & 0x0F, self.varint() if count == 15 else count

    def fields(self) -> Iterator[tuple[int, int]]:
        """Numbers and types of a struct's fields; the caller takes their values."""
        number = 0
        while head := self.take(1)[0]:
            step, kind = head >> 4, head & 0x0F
            number = number + step if step else self.integer()
            yield number, kind

    def skip(self, kind: int, depth: int = 0) -> None:
        """Passes over a field's value."""
        if depth > _DEEPEST:
            raise ValueError(f"damaged footer: deeper than {_DEEPEST} levels")
        if kind in (_TRUE, _FALSE):
            return  # the type is the value
        if kind == _BYTE:
            self.take(1)
        elif kind in (_I16, _I32, _I64):
            self.varint()
        elif kind == _DOUBLE:
            self.take(8)
        elif kind == _BINARY:
            self.take(self.varint())
        elif kind in (_LIST, _SET):
            inner, count = self.items()
            for _ in range(count):
                self._skip_item(inner, depth + 1)
        elif kind == _MAP:
            count = self.varint()
            kinds = self.take(1)[0] if count else 0
            for _ in range(count):
                self._skip_item(kinds >> 4, depth + 1)
                self._skip_item(kinds & 0x0F, depth + 1)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        else:
            raise ValueError(f"damaged footer: type {kind}")

    def _skip_item(self, kind: int, depth: int) -> None:
        # In lists a truth value takes a byte of its own.
        self.skip(_BYTE if kind in (_TRUE, _FALSE) else kind, depth)

    def structs(self, kind: int, read: Callable[[_Bytes], T]) -> list[T]:
        """A list of structs."""
        if kind != _LIST:
            raise ValueError("damaged footer: a list was expected")
        inner, count = self.items()
        if inner != _STRUCT and count:
            raise ValueError("damaged footer: a list of structs was expected")
        return [read(self) for _ in range(count)]


def _file(source: _Bytes) -> list[ColumnItems]:
    groups: list[list[ColumnItems]] = []
    for number, kind in source.fields():
        if number == _ROW_GROUPS:
            groups = source.structs(kind, _row_group)
        else:
            source.skip(kind)
    return [column for group in groups for column in group]


def _row_group(source: _Bytes) -> list[ColumnItems]:
    columns: list[tuple[str, int]] = []
    num_rows = 0
    for number, kind in source.fields():
        if number == _COLUMNS:
            columns = source.structs(kind, _column_chunk)
        elif number == _NUM_ROWS and kind in (_I32, _I64):
            num_rows = source.integer()
        else:
            source.skip(kind)
    return [ColumnItems(path, num_rows, items) for path, items in columns]


def _column_chunk(source: _Bytes) -> tuple[str, int]:
    found: tuple[str, int] | None = None
    for number, kind in source.fields():
        if number == _META_DATA and kind == _STRUCT:
            found = _column_meta_data(source)
        else:
            source.skip(kind)
    if found is None:
        raise ValueError("damaged footer: a column without a description")
    return found


def _column_meta_data(source: _Bytes) -> tuple[str, int]:
    path: list[str] = []
    items: int | None = None
    for number, kind in source.fields():
        if number == _PATH_IN_SCHEMA and kind == _LIST:
            inner, count = source.items()
            if inner != _BINARY and count:
                raise ValueError("damaged footer: a column without a path")
            path = [source.text() for _ in range(count)]
        elif number == _NUM_VALUES and kind in (_I32, _I64):
            items = source.integer()
        else:
            source.skip(kind)
    if items is None:
        raise ValueError("damaged footer: a column without a number of items")
    return ".".join(path), items

"""Tables in files: CSV of unknown origin is read, with bounded lines.

JSON lines, CSV and Parquet are written row by row, completely or not at all.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.atomic import atomic_file
from jaxdp_episodic.files.json_file import MAX_LINE_BYTES, TOO_LONG, plain, repeated
from jaxdp_episodic.files.optional import require_pyarrow

SUFFIXES = (".jsonl", ".csv", ".parquet")

_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]*,[0-9]+")

Writer = Callable[[list[dict[str, Any]]], None]


def check_suffix(path: Path) -> None:
    """Raises for a file with another suffix."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(SUFFIXES)}")


@contextmanager
def writing(path: Path, columns: Mapping[str, str]) -> Iterator[Writer]:
    """Opens a table for writing in parts; the file appears when it is complete."""
    check_suffix(path)
    table: Any
    with ExitStack() as stack:
        file: Any = stack.enter_context(atomic_file(path))
        if path.suffix == ".csv":
            # Without a translation of line ends, which are the same on all systems.
            text = io.TextIOWrapper(file, "utf-8", "backslashreplace", newline="")
            stack.callback(text.detach)
            table = csv.writer(text, lineterminator="\n")
            table.writerow(columns)

            def write(rows: list[dict[str, Any]]) -> None:
                # repr of a float keeps all digits.
                table.writerows(
                    [
                        repr(v) if isinstance(v, float) else v
                        for v in map(row.get, columns)
                    ]
                    for row in rows
                )

        elif path.suffix == ".jsonl":

            def write(rows: list[dict[str, Any]]) -> None:
                kept = ({name: plain(row[name]) for name in columns} for row in rows)
                file.write("".join(json.dumps(row) + "\n" for row in kept).encode())

        else:
            arrow, parquet = require_pyarrow(purpose="Parquet")
            kinds = {n: getattr(arrow, kind)() for n, kind in columns.items()}
            schema = arrow.schema(list(kinds.items()))
            table = stack.enter_context(parquet.ParquetWriter(file, schema))
            texts = [name for name, kind in columns.items() if kind == "string"]

            def write(rows: list[dict[str, Any]]) -> None:
                cells = [row | {n: _text(row[n]) for n in texts} for row in rows]
                table.write_table(arrow.Table.from_pylist(cells, schema=schema))

        yield write


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return str(value).encode("utf-8", "backslashreplace").decode()


# --- CSV of unknown origin: UTF-8, a line of column names ---


def csv_lines(path: Path, *, errors: str = "strict") -> Iterator[tuple[int, Any]]:
    """Yields (line number, cells or error) of a CSV file; the first has the names."""
    check_plain_file(path)
    with path.open(newline="", encoding="utf-8-sig", errors=errors) as file:
        source = _Lines(file)
        try:
            first = next(source, "")
            # Spreadsheets of many countries write semicolons, and decimal commas.
            others = [one for one in ";\t|" if one in first and "," not in first]
            how: Any = {"strict": True, "delimiter": others[0] if others else ","}
            lines = csv.reader(itertools.chain([first], source), **how)
            header = next(lines, [])
        except csv.Error as error:
            raise ValueError(f"the line of names: {error}") from None
        yield source.number, header
        while True:
            try:
                cells = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                yield source.number, ValueError(f"line {source.number}: {error}")
                continue
            commas = filter(_DECIMAL_COMMA.fullmatch, cells) if others else ()
            if (number := next(iter(commas), None)) is not None:
                said = f"numbers must have decimal points, got {number[:60]!r}"
                yield source.number, ValueError(f"line {source.number}: {said}")
            elif len(cells) == len(header):
                yield source.number, cells
            elif cells:
                found = f"{len(cells)} fields under {len(header)} column names"
                yield source.number, ValueError(f"line {source.number}: {found}")


def read_csv_columns(
    path: Path, names: Sequence[str], *, max_bytes: int
) -> dict[str, list[Any]]:
    """Returns some columns of a CSV file as text."""
    check_plain_file(path)
    if path.stat().st_size > max_bytes:
        raise ValueError(f"must have at most max_bytes={max_bytes} bytes")
    lines = csv_lines(path)
    indices = column_places(next(lines)[1], names)  # errors in line 1 are raised
    columns: list[list[str]] = [[] for _ in names]
    for _, cells in lines:
        if isinstance(cells, ValueError):
            raise cells
        for column, index in zip(columns, indices, strict=True):
            column.append(cells[index])
    return dict(zip(names, columns, strict=True))


def column_places(names: Sequence[str], wanted: Iterable[str]) -> list[int]:
    """Returns the indices of the wanted columns among a file's columns."""
    if (twice := repeated(names)) is not None:
        raise ValueError(f"two columns {twice!r}")
    indices = {name: index for index, name in enumerate(names)}
    for name in wanted:
        if name not in indices:
            there = f"; the columns are {_validation.shown(list(names))}"
            hint = _validation.nearest(str(name), names) or there
            raise ValueError(f"no column {name!r}{hint}")
    return [indices[name] for name in wanted]


class _Lines:
    """The lines of a text file; a line that is too long raises an error."""

    def __init__(self, file: Any) -> None:
        self._file, self.number = file, 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        try:
            line = self._file.readline(MAX_LINE_BYTES + 1)
        except UnicodeDecodeError as error:
            message = f"not UTF-8 text: {error.reason}; save it as UTF-8"
            raise ValueError(message) from None
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(("\n", "\r")):
                line = self._file.readline(MAX_LINE_BYTES)
            raise csv.Error(TOO_LONG)
        return line

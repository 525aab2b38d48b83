"""CSV files of unknown origin: UTF-8, a line of column names, bounded line length."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.json_file import MAX_LINE_BYTES, TOO_LONG, repeated


def csv_lines(
    path: Path, *, errors: str = "strict"
) -> Iterator[tuple[int, list[str] | ValueError]]:
    """Yields (line number, cells or error) of a CSV file; the first has the names."""
    check_plain_file(path)
    with path.open(newline="", encoding="utf-8-sig", errors=errors) as file:
        source = _Lines(file)
        lines = csv.reader(source, strict=True)
        try:
            header = next(lines, [])
        except csv.Error as error:
            raise ValueError(f"the line of names: {error}") from None
        if len(header) == 1 and (others := set(header[0]) & set(";\t|")):
            said = f"cells must be separated by commas, not by {min(others)!r}"
            raise ValueError(f"{said}, and numbers must have decimal points")
        yield source.number, header
        while True:
            try:
                cells = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                yield source.number, ValueError(f"line {source.number}: {error}")
                continue
            if len(cells) == len(header):
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
    columns: list[list[str]] = [[] for _ in names]
    indices = None
    for _, cells in csv_lines(path):
        if isinstance(cells, ValueError):
            raise cells
        if indices is None:
            indices = column_places(cells, names)
            continue
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
            hint = _validation.nearest(name, names) or there
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

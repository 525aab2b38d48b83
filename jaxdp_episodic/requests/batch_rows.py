"""Rows of files of requests: JSON lines, CSV and Parquet from strangers.

A line that cannot be read is an error in its row; one that is too long is not kept.
"""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxdp_episodic.describe.serialization import refuse_hostile
from jaxdp_episodic.files.parquet_file import parquet_batches

SUFFIXES = (".jsonl", ".csv", ".parquet")
_ARROW_ROWS = 20_000  # at a time
_LONGEST_LINE = 2**24
_DEEPEST = 32  # of dotted names
# Never numbers, whatever they look like.
_TEXTS = frozenset(
    "type name id method calibrate level clip_unit privacy_unit neighboring_relation "
    "small_units file row_level".split()
)

Row = Mapping[str, Any] | Exception
# A row's number, its table, and how many bytes or characters it had.
Numbered = tuple[int, Row, int]


def reader_of(path: Path) -> Callable[[Path], Iterator[Numbered]]:
    """Returns what reads a file of this suffix.

    Raises:
      ValueError: another suffix.
    """
    check_suffix(path)
    readers = {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _arrow_rows}
    return readers[path.suffix]


def check_suffix(path: Path) -> None:
    """Refuses a file whose suffix is none of the three.

    Raises:
      ValueError: another suffix.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: the name must end in {', '.join(SUFFIXES)}")


def _json_rows(path: Path) -> Iterator[Numbered]:
    """The lines' numbers and tables; empty lines are skipped."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_LONGEST_LINE)
                yield number, ValueError(f"line {number}: longer than 16 MiB"), 0
            elif not line.isspace():
                yield number, _json_row(number, line), len(line)


def _json_row(number: int, line: bytes) -> Row:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        row = json.loads(text, object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        return ValueError(
            f"line {number}: not UTF-8 text: {error.reason} at byte {error.start}"
        )
    except json.JSONDecodeError as error:
        return ValueError(
            f"line {number}: not valid JSON: {error.msg} at column {error.colno}"
        )
    except RecursionError:
        return ValueError(f"line {number}: nested too deeply")
    except ValueError as error:  # a repeated key, an integer of thousands of digits
        return ValueError(f"line {number}: not valid JSON: {error}")
    if not isinstance(row, dict):
        return TypeError(f"line {number}: must be an object, got {str(row)[:60]!r}")
    return row


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError(f"the key {_twice([n for n, _ in pairs])!r} is there twice")
    return table


def _twice(names: list[str]) -> str | None:
    """The first name that is there again; cut short, as a stranger chose it."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name[:60]
        seen.add(name)
    return None


class _Lines:
    """The lines of a text file, those that are too long as errors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(_LONGEST_LINE + 1)
        if not line:
            raise StopIteration
        if len(line) > _LONGEST_LINE:
            while line and not line.endswith(("\n", "\r")):
                line = self._file.readline(_LONGEST_LINE)
            raise csv.Error("longer than 16 MiB")
        return line


def _csv_rows(path: Path) -> Iterator[Numbered]:
    """Row numbers from 1, the line of names apart, and tables."""
    # What is not UTF-8 becomes lone surrogates, which are found in their own row.
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = csv.reader(_Lines(file), strict=True)
        try:
            header = next(lines, [])
        except csv.Error as error:
            raise ValueError(f"{path.name}: the line of names: {error}") from None
        _check_header(path, header)
        paths = [_parts(name) for name in header]
        number = 0
        while True:
            try:
                cells = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                number += 1
                yield number, ValueError(f"line {lines.line_num}: {error}"), 0
                continue
            if cells:
                number += 1
                row = _csv_row(header, paths, cells, lines.line_num)
                yield number, row, sum(map(len, cells))


def _csv_row(
    header: list[str], paths: list[list[str]], cells: list[str], line: int
) -> Row:
    if len(cells) != len(header):
        return ValueError(
            f"line {line}: {len(cells)} fields under {len(header)} column names"
        )
    row: dict[str, Any] = {}
    try:
        for parts, cell in zip(paths, cells, strict=True):
            if cell:
                _put(row, parts, _cell(parts[-1], cell))
        refuse_hostile("a cell", row)
    except RecursionError:
        return ValueError(f"line {line}: a cell is nested too deeply")
    except ValueError as error:
        return ValueError(f"line {line}: {error}")
    return _listed(row)


def _arrow_rows(path: Path) -> Iterator[Numbered]:
    """Row numbers from 1, and tables."""
    arrow, parquet = pyarrow_modules()
    parts = parquet_batches(arrow, parquet, path, None, rows=_ARROW_ROWS)
    number, paths = 0, None
    try:
        for header, columns in parts:
            if paths is None:
                _check_header(path, header)
                paths = [_parts(name) for name in header]
            for cells in zip(*columns, strict=True):
                number += 1
                row: dict[str, Any] = {}
                try:
                    for place, cell in zip(paths, cells, strict=True):
                        if cell is not None:
                            _put(row, place, cell)
                except ValueError as error:
                    yield number, error, 0
                else:
                    yield number, _listed(row), 0
    except ValueError as error:
        name = path.name
        text = str(error)
        raise ValueError(text if text.startswith(name) else f"{name}: {text}") from None


def _check_header(path: Path, header: list[str]) -> None:
    twice = _twice(header)
    if not header or twice is not None:
        what = "no columns" if twice is None else f"two columns {twice!r}"
        raise ValueError(f"{path.name}: {what}")
    for name in header:
        if name.count(".") >= _DEEPEST:
            raise ValueError(
                f"{path.name}: column {name[:60]!r} has more than {_DEEPEST} parts"
            )


def _parts(name: str) -> list[str]:
    return name.split(".")


def _put(row: dict[str, Any], parts: list[str], cell: Any) -> None:
    """Puts a cell where its dotted name says."""
    table = row
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ValueError(f"column {'.'.join(parts)!r} lies below another value")
    if parts[-1] in table:
        raise ValueError(f"column {'.'.join(parts)!r} is both a value and a table")
    table[parts[-1]] = cell


def _listed(table: Any) -> Any:
    """Tables whose keys are 0, 1, ... as lists."""
    if not isinstance(table, dict):
        return table
    if "0" in table and all(key.isdecimal() for key in table):
        # Places left out are null, and refused where a level is expected.
        last = max(map(int, table))
        if last < 2 * len(table):
            return [_listed(table.get(str(place))) for place in range(last + 1)]
    return {key: _listed(value) for key, value in table.items()}


def _cell(name: str, cell: str) -> Any:
    """A cell of CSV: number, truth value, JSON or text."""
    if not cell.isprintable():
        raise ValueError("a cell holds characters that cannot be printed")
    if name in _TEXTS:
        return cell
    if cell[0] in "[{":
        return json.loads(cell, object_pairs_hook=_without_repeats)
    if cell in ("true", "false"):
        return cell == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell


def pyarrow_modules() -> tuple[Any, Any]:
    """Returns ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
      ImportError: it is not installed.
    """
    try:
        return importlib.import_module("pyarrow"), importlib.import_module(
            "pyarrow.parquet"
        )
    except ImportError:
        raise ImportError(
            "Parquet needs pyarrow: pip install 'jaxdp-episodic[sweep]'"
        ) from None

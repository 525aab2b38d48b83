"""Files of requests and answers: JSON lines, CSV, Parquet; handled in parts.

A file is a stranger's. A line that cannot be read is an error in its row, and the
answers replace an older file only when all of them are there.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic.accounting.batch import Answer, answer_requests

SUFFIXES = (".jsonl", ".csv", ".parquet")
_ROWS_AT_ONCE = 20_000
_LONGEST_LINE = 2**24
# Never numbers, whatever they look like.
_TEXTS = frozenset(
    "type name id method calibrate level clip_unit privacy_unit neighboring_relation "
    "small_units file row_level".split()
)
_COLUMNS = ("row", *Answer._fields)

Row = Mapping[str, Any] | Exception
Writer = Callable[[list[dict[str, Any]]], None]


class BatchResult(NamedTuple):
    """What became of a file of requests.

    Attributes:
      num_rows: rows that were read.
      num_errors: those that got an error.
      first_error: the first of these, with its row; None if there is none.
    """

    num_rows: int
    num_errors: int
    first_error: str | None


def answer_file(
    source: Path,
    out: Path,
    *,
    method: str = "rdp",
    on_rows: Callable[[int], None] | None = None,
) -> BatchResult:
    """Answers every row of a file of requests, in order, in bounded memory.

    The kinds of file are told by their suffixes, ``.jsonl``, ``.csv`` and ``.parquet``
    (pyarrow, of the extra ``[sweep]``), and may differ. JSON lines hold the nested keys
    of a request file; columns of the others have dotted names, ``step.sampling.type``,
    places of a list among the parts, ``step.sampling.levels.0.name``. Cells that are
    empty or null are left out; those of CSV that begin with ``[`` or ``{`` are JSON.
    In Parquet nested columns will do too.

    An answer is a row with ``row`` (from 1, the line for JSON lines), ``id``,
    ``quantity``, ``value``, ``method`` and ``error``, of which either the last or the
    three before it are null. Infinity is "inf" in JSON lines.

    Args:
      source: the requests.
      out: the answers; replaced when all of them are there, else left as it was.
      method: of rows that do not name one.
      on_rows: called with the number of rows answered so far.

    Raises:
      OSError: a file that cannot be read or written.
      ValueError: a suffix that is none of the three, a table without columns or with
        two of one name, ``out`` that is ``source``, an unknown ``method``.
      ImportError: Parquet without pyarrow.
    """
    rows = _reader(source)
    if out.exists() and source.exists() and out.samefile(source):
        raise ValueError(f"out must be another file than the requests, got {out}")
    number, failed, first = 0, 0, None
    with writing(out) as write:
        for block in _blocks(rows(source), _ROWS_AT_ONCE):
            answers = answer_requests(
                [row for _, row in block], method=method, base=source.parent
            )
            write(
                [
                    {"row": place, **answer._asdict()}
                    for (place, _), answer in zip(block, answers, strict=True)
                ]
            )
            number += len(block)
            bad = [(p, a) for (p, _), a in zip(block, answers, strict=True) if a.error]
            failed += len(bad)
            if bad and first is None:
                first = f"row {bad[0][0]}: {bad[0][1].error}"
            if on_rows is not None:
                on_rows(number)
    return BatchResult(number, failed, first)


@contextmanager
def writing(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[Writer]:
    """Opens a table for writing in parts; it is complete or not there.

    Args:
      path: ``.jsonl``, ``.csv`` or ``.parquet``.
      columns: name to Arrow type ("int64", "string", "float64"); None: those of
        answers.

    Yields:
      A function that appends rows, mappings with these keys.

    Raises:
      OSError: a file that cannot be written; an older one is left as it was.
      ValueError: another suffix.
      ImportError: Parquet without pyarrow.
    """
    _check_suffix(path)
    if columns is None:
        types = ("int64", "string", "string", "float64", "string", "string")
        columns = dict(zip(_COLUMNS, types, strict=True))
    opened = {".jsonl": _jsonl_writer, ".csv": _csv_writer, ".parquet": _arrow_writer}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write, close = opened[path.suffix](file, columns)
            yield write
            close()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _jsonl_writer(file: Any, columns: Mapping[str, str]) -> tuple[Writer, Any]:
    def write(rows: list[dict[str, Any]]) -> None:
        lines = [
            json.dumps({name: _json_number(row[name]) for name in columns}) + "\n"
            for row in rows
        ]
        file.write("".join(lines).encode())

    return write, lambda: None


def _csv_writer(file: Any, columns: Mapping[str, str]) -> tuple[Writer, Any]:
    # Rows are made into text first: the file is binary, to be the same everywhere.
    class Encoded:
        def write(self, text: str) -> int:
            return file.write(text.encode("utf-8", "backslashreplace"))

    table = csv.writer(Encoded(), lineterminator="\n")
    table.writerow(columns)

    def write(rows: list[dict[str, Any]]) -> None:
        # repr of a float keeps all its digits.
        table.writerows(
            [repr(v) if isinstance(v, float) else v for v in map(row.get, columns)]
            for row in rows
        )

    return write, lambda: None


def _arrow_writer(file: Any, columns: Mapping[str, str]) -> tuple[Writer, Any]:
    arrow, parquet = _pyarrow()
    types = {"int64": arrow.int64, "string": arrow.string, "float64": arrow.float64}
    schema = arrow.schema([(name, types[kind]()) for name, kind in columns.items()])
    table = parquet.ParquetWriter(file, schema)

    def write(rows: list[dict[str, Any]]) -> None:
        texts = [name for name, kind in columns.items() if kind == "string"]
        cells = [
            row | {n: None if row[n] is None else _text(row[n]) for n in texts}
            for row in rows
        ]
        table.write_table(arrow.Table.from_pylist(cells, schema=schema))

    return write, table.close


def _json_number(value: Any) -> Any:
    """The value, infinity as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _text(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


def _reader(path: Path) -> Callable[[Path], Iterator[tuple[int, Row]]]:
    _check_suffix(path)
    readers = {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _arrow_rows}
    return readers[path.suffix]


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: the name must end in {', '.join(SUFFIXES)}")


def _blocks(
    rows: Iterator[tuple[int, Row]], size: int
) -> Iterable[list[tuple[int, Row]]]:
    block: list[tuple[int, Row]] = []
    for row in rows:
        block.append(row)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The lines' numbers and tables; empty lines are skipped."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_LONGEST_LINE)
                yield number, ValueError(f"line {number}: longer than 16 MiB")
            elif not line.isspace():
                yield number, _json_row(number, line)


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
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return table


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Row numbers from 1, the line of names apart, and tables."""
    # What is not UTF-8 becomes lone surrogates, which are found in their own row.
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = csv.reader(file, strict=True)
        header = next(lines, [])
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
                yield number, ValueError(f"line {lines.line_num}: {error}")
                continue
            if cells:
                number += 1
                yield number, _csv_row(header, paths, cells, lines.line_num)


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
    except (ValueError, RecursionError) as error:
        return ValueError(f"line {line}: {error}")
    return _listed(row)


def _arrow_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Row numbers from 1, and tables."""
    arrow, parquet = _pyarrow()
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path.name}: not a Parquet file: {error}") from None
    with file:
        header = file.schema_arrow.names
        _check_header(path, header)
        paths = [_parts(name) for name in header]
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            columns = [column.to_pylist() for column in batch.columns]
            for cells in zip(*columns, strict=True):
                number += 1
                row: dict[str, Any] = {}
                try:
                    for parts, cell in zip(paths, cells, strict=True):
                        if cell is not None:
                            _put(row, parts, cell)
                except ValueError as error:
                    yield number, error
                else:
                    yield number, _listed(row)


def _check_header(path: Path, header: list[str]) -> None:
    twice = [name for name in header if header.count(name) > 1]
    if not header or twice:
        what = f"two columns {twice[0]!r}" if twice else "no columns"
        raise ValueError(f"{path.name}: {what}")


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


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module(
            "pyarrow.parquet"
        )
    except ImportError:
        raise ImportError(
            "Parquet needs pyarrow: pip install 'jaxdp-episodic[sweep]'"
        ) from None

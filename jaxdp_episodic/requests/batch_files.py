"""Files of requests and answers: JSON lines, CSV, Parquet; handled in parts.

A file is a stranger's. A line that cannot be read is an error in its row, and the
answers replace an older file only when all of them are there.
"""

from __future__ import annotations

import csv
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic.requests.batch import Answer, answer_requests
from jaxdp_episodic.requests.batch_rows import (
    Numbered,
    check_suffix,
    pyarrow_modules,
    reader_of,
)

_ROWS_AT_ONCE = 20_000
# Of text; what Python makes of it takes up to twenty times as much.
_BYTES_AT_ONCE = 2**25
_COLUMNS = ("row", *Answer._fields)

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
    rows = reader_of(source)
    if out.exists() and source.exists() and out.samefile(source):
        raise ValueError(f"out must be another file than the requests, got {out}")
    number, failed, first = 0, 0, None
    with writing(out) as write:
        for block in _blocks(rows(source), _ROWS_AT_ONCE):
            answers = answer_requests(
                [row for _, row, _ in block], method=method, base=source.parent
            )
            write(
                [
                    {"row": place, **answer._asdict()}
                    for (place, _, _), answer in zip(block, answers, strict=True)
                ]
            )
            number += len(block)
            bad = [
                (place, answer)
                for (place, _, _), answer in zip(block, answers, strict=True)
                if answer.error
            ]
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
    check_suffix(path)
    if columns is None:
        types = ("int64", "string", "string", "float64", "string", "string")
        columns = dict(zip(_COLUMNS, types, strict=True))
    opened = {".jsonl": _jsonl_writer, ".csv": _csv_writer, ".parquet": _arrow_writer}
    # Nobody can guess the name, and what is there already is not opened.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
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
    arrow, parquet = pyarrow_modules()
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


def _blocks(rows: Iterator[Numbered], size: int) -> Iterable[list[Numbered]]:
    block: list[Numbered] = []
    weight = 0
    for row in rows:
        block.append(row)
        weight += row[2]
        if len(block) == size or weight > _BYTES_AT_ONCE:
            yield block
            block, weight = [], 0
    if block:
        yield block

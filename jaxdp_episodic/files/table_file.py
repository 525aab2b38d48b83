"""Tables written row by row as JSON lines, CSV or Parquet, completely or not at all."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp_episodic.files.atomic import atomic_file
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.files.optional import require_pyarrow

SUFFIXES = (".jsonl", ".csv", ".parquet")

Writer = Callable[[list[dict[str, Any]]], None]


def check_suffix(path: Path) -> None:
    """Raises for a file with another suffix."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(SUFFIXES)}")


@contextmanager
def writing(path: Path, columns: Mapping[str, str]) -> Iterator[Writer]:
    """Opens a table for writing in parts; the file appears when it is complete."""
    check_suffix(path)
    opened = {".jsonl": _jsonl_writer, ".csv": _csv_writer, ".parquet": _arrow_writer}
    with atomic_file(path) as file:
        write, close = opened[path.suffix](file, columns)
        try:
            yield write
        finally:
            close()


def _jsonl_writer(file: Any, columns: Mapping[str, str]) -> tuple[Writer, Any]:
    def write(rows: list[dict[str, Any]]) -> None:
        kept = ({name: plain(row[name]) for name in columns} for row in rows)
        file.write("".join(json.dumps(row) + "\n" for row in kept).encode())

    return write, lambda: None


def _csv_writer(file: Any, columns: Mapping[str, str]) -> tuple[Writer, Any]:
    # The file is binary, so that line ends are the same on all systems.
    class Encoded:
        def write(self, text: str) -> int:
            return file.write(text.encode("utf-8", "backslashreplace"))

    table = csv.writer(Encoded(), lineterminator="\n")
    table.writerow(columns)

    def write(rows: list[dict[str, Any]]) -> None:
        # repr of a float keeps all digits.
        table.writerows(
            [repr(v) if isinstance(v, float) else v for v in map(row.get, columns)]
            for row in rows
        )

    return write, lambda: None


def _arrow_writer(file: Any, columns: Mapping[str, str]) -> tuple[Writer, Any]:
    arrow, parquet = require_pyarrow(purpose="Parquet")
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


def _text(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()

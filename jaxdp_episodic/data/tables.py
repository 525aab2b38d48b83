"""A user's records in a CSV or Parquet file."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.data.table import ExampleTable, id_array
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.files.parquet_file import parquet_batches

MAX_BYTES = 4 * 2**30  # of a CSV file, or of Parquet columns uncompressed
_ROWS = 2**16  # of Parquet at a time


def load_table(
    path: str | os.PathLike[str],
    *,
    groups: Sequence[str],
    features: Sequence[str],
    target: str | None = None,
    public_units: Sequence[Any] | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a file's records, one a row.

    Args:
      path: a file ``.csv`` (UTF-8, with a line of column names) or ``.parquet``.
      groups: columns of unit ids, top level first; they name the levels. Ids of a CSV
        are strings, as written: "07" is not "7".
      features: columns of numbers.
      target: column of numbers; None: the last group is the class.
      public_units: the public list of ids of the only group; those without a record
        are empty units, which stay when somebody's last record is taken away.
      max_bytes: most bytes of the file (CSV) or of its columns (Parquet).

    Returns:
      Levels ``groups`` and "example"; features (R, columns) float32.

    Raises:
      ImportError: a Parquet file without the extra ``[data]``.
      TypeError: one name where a list of names is meant.
      ValueError: another kind of file, an unknown column, a missing id, a cell that is
        no finite number, a file that is too large; the message says where.
    """
    file = Path(path)
    for name, columns in (("groups", groups), ("features", features)):
        if isinstance(columns, str):
            raise TypeError(f"{name} must be a list of column names, got {columns!r}")
        if not columns:
            raise ValueError(f"{name} must name at least one column, got none")
    if "example" in groups:
        raise ValueError(
            "groups must not name a column 'example', which is the level of the "
            f"records themselves, got {list(groups)}; rename the column"
        )
    wanted = [*groups, *features, *([] if target is None else [target])]
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"columns must be used once each, got {wanted}")
    suffix = file.suffix.lower()
    if suffix == ".csv":
        columns, first = _csv_columns(file, wanted, max_bytes), 2
    elif suffix == ".parquet":
        columns, first = _parquet_columns(file, wanted, max_bytes), 1
    else:
        raise ValueError(f"path must end in .csv or .parquet, got {str(file)!r}")
    if not columns[wanted[0]]:
        raise ValueError(f"{file} must have at least one record, has none")
    numbers = {
        name: _numbers(columns[name], name, file, first)
        for name in wanted[len(groups) :]
    }
    return ExampleTable.from_records(
        np.stack([numbers[name] for name in features], axis=1),
        None if target is None else numbers[target],
        units={name: _ids(columns[name], name, file, first) for name in groups},
        public_units=public_units,
    )


def _csv_columns(file: Path, wanted: Sequence[str], max_bytes: int) -> dict[str, list]:
    """The wanted columns of a CSV file, as text."""
    check_plain_file(file)
    if file.stat().st_size > max_bytes:
        raise ValueError(f"{file} must have at most max_bytes={max_bytes} bytes")
    columns: dict[str, list] = {name: [] for name in wanted}
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.reader(stream, strict=True)
            header = next(rows, [])
            _check_columns(file, wanted, header)
            places = [header.index(name) for name in wanted]
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(
                        f"line {rows.line_num} has {len(row)} cells, "
                        f"the header {len(header)}"
                    )
                for name, place in zip(wanted, places, strict=True):
                    columns[name].append(row[place])
    except (csv.Error, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{file} must be a CSV file in UTF-8: {error}") from error
    return columns


def _parquet_columns(
    file: Path, wanted: Sequence[str], max_bytes: int
) -> dict[str, list]:
    """The wanted columns of a Parquet file."""
    parquet = require("pyarrow.parquet", purpose="reading Parquet")
    arrow = require("pyarrow", purpose="reading Parquet")
    columns: dict[str, list] = {name: [] for name in wanted}
    parts = parquet_batches(
        arrow, parquet, file, wanted, rows=_ROWS, max_bytes=max_bytes
    )
    try:
        for names, cells in parts:
            for name, column in zip(names, cells, strict=True):
                columns[name] += column
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return columns


def _check_columns(file: Path, wanted: Sequence[str], names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        shown = _validation.shown(list(names))
        raise ValueError(f"{file} must name each column once, has {shown}")
    for name in wanted:
        if name not in names:
            close = _validation.nearest(name, names)
            raise ValueError(f"{file} has no column {name!r}{close}")


def _numbers(cells: Sequence[Any], name: str, file: Path, first: int) -> np.ndarray:
    """float64 of the cells, each a finite float32."""
    values = np.empty(len(cells))
    for row, cell in enumerate(cells):
        try:
            values[row] = float(cell)
        except (TypeError, ValueError, OverflowError):
            values[row] = np.nan
    bad = ~(np.abs(values) <= np.finfo(np.float32).max)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f"{name!r} must be finite numbers, got {_validation.shown(cells[row])} in "
            f"record {row + 1} (row {row + first}) of {file}"
        )
    return values


def _ids(cells: Sequence[Any], name: str, file: Path, first: int) -> np.ndarray:
    for row, cell in enumerate(cells):
        if cell is None or cell == "":
            raise ValueError(
                f"{name!r} must be an id, got nothing in record {row + 1} "
                f"(row {row + first}) of {file}"
            )
    try:
        return id_array(name, cells)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} (of {file})") from None

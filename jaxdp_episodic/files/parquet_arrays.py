"""Columns of Parquet files as arrays: numbers, lists of one length, files of bytes.

Nothing becomes an object of Python but files of bytes, so a column of images is read as
fast as the disk gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.csv_file import column_places
from jaxdp_episodic.files.optional import require_pyarrow
from jaxdp_episodic.files.parquet_file import column_items

_BUFFER_BYTES = 2**20  # with a buffer a row group is read bit by bit, not whole

BYTES = "bytes"
"""Of a struct as Hugging Face's data sets hold images: the field with the file."""


def parquet_kind(path: Path, name: str) -> str:
    """Returns what a column holds.

    Returns:
      "files" (bytes, or a struct with a field of them) or "lists" of numbers.

    Raises:
      OSError: no such file.
      ImportError: pyarrow is not installed.
      ValueError: no Parquet file, no such column, or one of another kind.
    """
    with _opened(path, [name]) as (arrow, file):
        kind = file.schema_arrow.field(name).type
        types = arrow.types
        if types.is_struct(kind) and kind.get_field_index(BYTES) >= 0:
            kind = kind.field(BYTES).type
        if types.is_binary(kind) or types.is_large_binary(kind):
            return "files"
        inside = kind
        while _is_list(types, inside):
            inside = inside.value_type
        if inside is not kind and (
            types.is_integer(inside) or types.is_floating(inside)
        ):
            return "lists"
        raise ValueError(
            f"column {name[:60]!r} of {path} must hold image files, or lists of "
            f"numbers, holds {str(kind)[:60]}"
        )


def parquet_numbers(
    path: Path, names: Sequence[str], *, rows: int, first: int = 0
) -> Iterator[np.ndarray]:
    """Yields (n, columns) float64: columns of numbers, from a row on.

    Raises:
      As `parquet_kind`; ValueError too for a missing cell.
    """
    for batch in record_batches(path, names, rows, first):
        yield np.stack(
            [_numbers(batch.column(name), name, path) for name in names], axis=1
        ).astype(np.float64)


def parquet_lists(
    path: Path, name: str, *, length: int, rows: int, first: int = 0
) -> Iterator[np.ndarray]:
    """Yields (n, length): a column whose lists, nested or not, have as many numbers.

    Raises:
      As `parquet_kind`; ValueError too for a list of another length.
    """
    # Checked before anything of the claimed size is made.
    for column in column_items(path):
        if column.path.split(".")[0] == name:
            if column.num_items != column.num_rows * length:
                raise ValueError(
                    f"column {name[:60]!r} of {path} must have {length} numbers a row, "
                    f"has {column.num_items} in {column.num_rows} rows"
                )
    for batch in record_batches(path, [name], rows, first):
        values = batch.column(name)
        number, sizes = len(values), np.ones(len(values), np.int64)
        while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
            if values.null_count:
                raise ValueError(f"column {name[:60]!r} of {path} has a missing list")
            inner = values.flatten()
            lengths = np.asarray(values.value_lengths())
            if lengths.size and lengths.min() != lengths.max():
                raise ValueError(
                    f"column {name[:60]!r} of {path} must have lists of one length"
                )
            sizes = sizes[:1] * lengths[:1]
            values = inner
        flat = _numbers(values, name, path)
        if flat.size != number * length:
            raise ValueError(
                f"column {name[:60]!r} of {path} must have {length} numbers a row"
            )
        yield flat.reshape(number, length)


def parquet_files(
    path: Path, name: str, *, rows: int, first: int = 0
) -> Iterator[list[bytes]]:
    """Yields a column of files, from a row on.

    Raises:
      As `parquet_kind`; ValueError too for a missing file.
    """
    for batch in record_batches(path, [name], rows, first):
        column = batch.column(name)
        if hasattr(column, "field"):
            column = column.field(BYTES)
        cells = column.to_pylist()
        if not all(isinstance(cell, bytes) for cell in cells):
            raise ValueError(f"column {name[:60]!r} of {path} has a missing image")
        yield cells


@contextmanager
def _opened(path: Path, names: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """pyarrow, and a Parquet file with these columns."""
    arrow, parquet = require_pyarrow(purpose="reading Parquet")
    check_plain_file(path)
    try:
        file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES)
        column_places(file.schema_arrow.names, names)
    except Exception as error:
        raise ValueError(f"{path} must be a Parquet file: {error}") from None
    try:
        with file:
            yield arrow, file
    except ValueError:  # some of Arrow's are
        raise
    except (arrow.ArrowException, OSError, OverflowError) as error:
        raise ValueError(f"{path} must be a Parquet file: {error}") from None


def record_batches(
    path: Path, names: Sequence[str], rows: int, first: int = 0
) -> Iterator[Any]:
    """Yields Arrow's batches of columns from a row on; none before it is read.

    Raises:
      As `parquet_kind`.
    """
    with _opened(path, names) as (_, file):
        before = 0
        for group in range(file.metadata.num_row_groups):
            number = file.metadata.row_group(group).num_rows
            skip = max(first - before, 0)
            before += number
            if skip >= number:
                continue
            for batch in file.iter_batches(
                batch_size=rows, row_groups=[group], columns=list(names)
            ):
                here = min(skip, batch.num_rows)
                skip -= here
                if here < batch.num_rows:
                    yield batch.slice(here)


def _is_list(types: Any, kind: Any) -> bool:
    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
    )


def _numbers(values: Any, name: str, path: Path) -> np.ndarray:
    if values.null_count:
        raise ValueError(f"column {name[:60]!r} of {path} has a missing number")
    array = np.asarray(values.to_numpy(zero_copy_only=False))
    if array.dtype.kind not in "biuf":
        raise ValueError(f"column {name[:60]!r} of {path} must hold numbers")
    return array

"""The finished table: one row a setting, columns the axes and the answer.

Parquet where pyarrow is installed, else NumPy's npz. Written and read in blocks, so
that memory does not grow with the sweep, and without time stamps: the same sweep makes
the same bytes.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxdp_episodic.files.archive import array_batches, write_npy_header
from jaxdp_episodic.files.atomic import atomic_path
from jaxdp_episodic.files.optional import require_pyarrow
from jaxdp_episodic.files.parquet_file import record_batches
from jaxdp_episodic.tools.sweep.description import described_grid
from jaxdp_episodic.tools.sweep.folder import NPZ, PARQUET, SweepFolder
from jaxdp_episodic.tools.sweep.grid import WORD_FIELDS, Grid

# NumPy's kinds of columns of numbers, and of words: its own, or Arrow's as objects.
_KINDS_OF = ("iufb", "UO")
_BLOCK = 1 << 20  # settings in memory at a time, and a row group of the Parquet file


def write_table(folder: SweepFolder) -> Path:
    """Makes the table of all shards, which must be there; returns its path."""
    has_pyarrow = importlib.util.find_spec("pyarrow") is not None
    path = folder.path / (PARQUET if has_pyarrow else NPZ)
    try:
        with atomic_path(path) as temporary:
            (_write_parquet if has_pyarrow else _write_npz)(temporary, folder)
    except ValueError:
        # Another process has made it meanwhile; see `SweepFolder.save`.
        if folder.table is None:
            raise
        return folder.table
    return path


def read_columns(
    path: Path, names: Sequence[str], *, num_rows: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yields some columns of a table, block after block, in the order of the rows.

    Args:
      path: ``table.parquet`` or ``table.npz``.
      names: of the columns.
      num_rows: how many rows the table must have; None: any number.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged, lacks a column, or has more or fewer rows.
      ImportError: pyarrow, of the extra ``[sweep]``, is not installed.
    """
    rows = 0
    read = _read_npz if path.suffix == ".npz" else _read_parquet
    try:
        for block in read(path, names):
            shapes = {column.shape for column in block.values()}
            odd = [
                name
                for name, column in block.items()
                if column.dtype.kind not in _KINDS_OF[name in WORD_FIELDS]
                or column.ndim != 1
            ]
            if odd or len(shapes) > 1:
                raise ValueError(f"column {(odd or names)[0]!r}")
            rows += next(iter(block.values())).size
            if num_rows is not None and rows > num_rows:
                break
            yield block
        if num_rows not in (None, rows):
            raise ValueError(f"it must have {num_rows:,} rows")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _columns(folder: SweepFolder) -> Iterator[dict[str, np.ndarray]]:
    """The table's columns, some chunks at a time."""
    grid = described_grid(folder.manifest["sweep"])
    kinds = {"num_steps": np.int64, "is_certified_bound": np.bool_}
    at_a_time = max(1, _BLOCK // folder.chunk_size)
    for first in range(0, folder.num_chunks, at_a_time):
        parts = []
        for number in range(first, min(first + at_a_time, folder.num_chunks)):
            part = folder.load(number)
            if part is None:
                raise ValueError(f"{folder.shard(number)} is missing or damaged")
            parts.append(part)
        answers, (start, _) = np.concatenate(parts), folder.range_of(first)
        yield grid.values(np.arange(start, start + len(answers))) | {
            name: column.astype(kinds.get(name, np.float64))
            for name, column in zip(folder.columns, answers.T, strict=True)
        }


def _write_parquet(path: Path, folder: SweepFolder) -> None:
    pyarrow, parquet = require_pyarrow(purpose="a Parquet table")
    writer = None
    try:
        for columns in _columns(folder):
            table = pyarrow.table(columns)
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _write_npz(path: Path, folder: SweepFolder) -> None:
    """An archive as `numpy.savez` makes it, but written in blocks and without dates."""
    grid = described_grid(folder.manifest["sweep"])
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for column in (*grid.names, *folder.columns):
            # The date of a ZipInfo is 1980 unless it is set.
            entry = zipfile.ZipInfo(f"{column}.npy")
            with archive.open(entry, "w", force_zip64=True) as file:
                for number, block in enumerate(_column(folder, grid, column)):
                    if number == 0:
                        write_npy_header(file, block.dtype, (folder.size,))
                    file.write(np.ascontiguousarray(block).tobytes())


def _column(folder: SweepFolder, grid: Grid, column: str) -> Iterator[np.ndarray]:
    """One column; the shards are read for the answers only."""
    if column in folder.columns:
        yield from (block[column] for block in _columns(folder))
        return
    for start in range(0, folder.size, _BLOCK):
        index = np.arange(start, min(start + _BLOCK, folder.size))
        yield grid.values(index)[column]


def _read_npz(path: Path, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    columns = [array_batches(path, name, axes=1, rows=_BLOCK) for name in names]
    for blocks in zip(*columns, strict=True):
        yield dict(zip(names, blocks, strict=True))


def _read_parquet(path: Path, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    for batch in record_batches(path, names, _BLOCK):
        columns = ((name, batch.column(name)) for name in names)
        yield {n: np.asarray(c.to_numpy(zero_copy_only=False)) for n, c in columns}

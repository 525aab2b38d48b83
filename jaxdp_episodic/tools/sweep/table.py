"""The finished table: one row a setting, columns the axes and the answer.

Parquet if pyarrow is installed, else NumPy's npz. Without time stamps: the same sweep
makes the same bytes. Memory does not grow with a Parquet table, which is written and
read in blocks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.files.archive import array_batches
from jaxdp_episodic.files.atomic import atomic_path
from jaxdp_episodic.files.optional import require_pyarrow
from jaxdp_episodic.files.parquet_file import record_batches
from jaxdp_episodic.tools.sweep.description import described_grid
from jaxdp_episodic.tools.sweep.folder import NPZ, PARQUET, SweepFolder
from jaxdp_episodic.tools.sweep.grid import WORD_FIELDS

# NumPy's kinds of columns of numbers, and of words: its own, or Arrow's as objects.
_KINDS_OF = ("iufb", "UO")
_BLOCK = 1 << 20  # settings in memory at a time, and a row group of the Parquet file


def write_table(folder: SweepFolder) -> Path:
    """Makes the table of all shards, which must be there; returns its path."""
    has_pyarrow = importlib.util.find_spec("pyarrow") is not None
    path = folder.path / (PARQUET if has_pyarrow else NPZ)
    try:
        with atomic_path(path) as temporary:
            if has_pyarrow:
                _write_parquet(temporary, folder)
            else:
                blocks = list(_columns(folder))
                columns: dict[str, Any] = {
                    name: np.concatenate([block[name] for block in blocks])
                    for name in blocks[0]
                }
                with open(temporary, "xb") as file:
                    np.savez(file, **columns)
    except ValueError:
        # Another process has made it meanwhile; see `SweepFolder.save`.
        if folder.table is None:
            raise
        return folder.table
    return path


def read_columns(
    path: Path, names: Sequence[str], *, num_rows: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yields some columns of a table, block after block, in the order of the rows."""
    rows = 0
    try:
        for block in _blocks(path, names):
            for name, column in block.items():
                is_odd = column.dtype.kind not in _KINDS_OF[name in WORD_FIELDS]
                if is_odd or column.shape != (next(iter(block.values())).size,):
                    raise ValueError(f"column {name!r}")
            rows += next(iter(block.values())).size
            if num_rows is not None and rows > num_rows:
                break
            yield block
        if num_rows not in (None, rows):
            raise ValueError(f"it must have {num_rows:,} rows")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _blocks(path: Path, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    if path.suffix == ".npz":
        columns = [array_batches(path, name, axes=1, rows=_BLOCK) for name in names]
        for blocks in zip(*columns, strict=True):
            yield dict(zip(names, blocks, strict=True))
        return
    for batch in record_batches(path, names, _BLOCK):
        columns = ((name, batch.column(name)) for name in names)
        yield {n: np.asarray(c.to_numpy(zero_copy_only=False)) for n, c in columns}


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

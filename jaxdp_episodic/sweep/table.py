"""The finished table: one row a setting, columns the axes and the answer.

Parquet where pyarrow is installed, else NumPy's npz. Written and read in blocks, so
that memory does not grow with the sweep, and without time stamps: the same sweep makes
the same bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from jaxdp_episodic.sweep.chunks import chunk_range
from jaxdp_episodic.sweep.description import described_grid
from jaxdp_episodic.sweep.files import atomic_path
from jaxdp_episodic.sweep.folder import TABLES, SweepFolder
from jaxdp_episodic.sweep.grid import QUANTITY, Grid

PARQUET, NPZ = TABLES
VALUE = "value"
# Settings a block: what is in memory at a time, and a row group of the Parquet file.
_BLOCK = 1 << 20


def value_name(description: dict[str, Any]) -> str:
    """Returns the name of the answers' column: the quantity, if there is just one."""
    fields = [axis["field"] for axis in description["axes"]]
    return VALUE if QUANTITY in fields else description[QUANTITY]


def write_table(folder: SweepFolder) -> Path:
    """Makes the table of all shards, which must be there; returns its path.

    Raises:
      ValueError: a shard that is missing or damaged.
      OSError: the disk is full, or the folder cannot be written.
    """
    has_pyarrow = importlib.util.find_spec("pyarrow") is not None
    path = folder.path / (PARQUET if has_pyarrow else NPZ)
    with atomic_path(path) as temporary:
        (_write_parquet if has_pyarrow else _write_npz)(temporary, folder)
    return path


def read_columns(path: Path, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    """Yields some columns of a table, block after block, in the order of the rows.

    Args:
      path: ``table.parquet`` or ``table.npz``.
      names: of the columns.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged, or lacks a column.
      ImportError: pyarrow, of the extra ``[sweep]``, is not installed.
    """
    if path.suffix == ".npz":
        yield from _read_npz(path, names)
        return
    for batch in _parquet_batches(path, names):
        columns = zip(names, batch.columns, strict=True)
        yield {
            name: np.asarray(c.to_numpy(zero_copy_only=False)) for name, c in columns
        }


def _blocks(folder: SweepFolder) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices and answers, some chunks at a time."""
    at_a_time = max(1, _BLOCK // folder.chunk_size)
    for first in range(0, folder.num_chunks, at_a_time):
        numbers = range(first, min(first + at_a_time, folder.num_chunks))
        parts = [folder.load(number) for number in numbers]
        for number, part in zip(numbers, parts, strict=True):
            if part is None:
                raise ValueError(f"{folder.shard(number)} is missing or damaged")
        start, _ = chunk_range(first, folder.size, folder.chunk_size)
        answers = np.concatenate([part for part in parts if part is not None])
        yield np.arange(start, start + answers.size), answers


def _columns(folder: SweepFolder) -> Iterator[dict[str, np.ndarray]]:
    """The table's columns, block after block."""
    description = folder.manifest["sweep"]
    grid, name = described_grid(description), value_name(description)
    for index, answers in _blocks(folder):
        if name == "num_steps":
            answers = answers.astype(np.int64)
        yield grid.values(index) | {name: answers}


def _write_parquet(path: Path, folder: SweepFolder) -> None:
    pyarrow, parquet = _arrow()
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
    description = folder.manifest["sweep"]
    name = value_name(description)
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for column in (*described_grid(description).names, name):
            # The date of a ZipInfo is 1980 unless it is set.
            entry = zipfile.ZipInfo(f"{column}.npy")
            with archive.open(entry, "w", force_zip64=True) as file:
                for number, block in enumerate(_column(folder, column)):
                    if number == 0:
                        header = {
                            "descr": npy.dtype_to_descr(block.dtype),
                            "fortran_order": False,
                            "shape": (folder.size,),
                        }
                        npy.write_array_header_1_0(file, header)
                    file.write(np.ascontiguousarray(block).tobytes())


def _column(folder: SweepFolder, column: str) -> Iterator[np.ndarray]:
    """One column; the shards are read for the answers only."""
    description = folder.manifest["sweep"]
    grid: Grid = described_grid(description)
    if column == value_name(description):
        for block in _columns(folder):
            yield block[column]
        return
    for start in range(0, folder.size, _BLOCK):
        index = np.arange(start, min(start + _BLOCK, folder.size))
        yield grid.values(index)[column]


def _read_npz(path: Path, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    try:
        with zipfile.ZipFile(path) as archive:
            files = [archive.open(f"{name}.npy") for name in names]
            kinds = [_npy_header(file) for file in files]
            size = kinds[0][0]
            for start in range(0, size, _BLOCK):
                rows = min(_BLOCK, size - start)
                yield {
                    name: np.frombuffer(file.read(rows * kind.itemsize), kind)
                    for name, file, (_, kind) in zip(names, files, kinds, strict=True)
                }
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _npy_header(file: Any) -> tuple[int, np.dtype]:
    """Length and type of the array that begins here; objects are refused."""
    if npy.read_magic(file) != (1, 0):
        raise ValueError("an array of a version that is not known")
    shape, _, kind = npy.read_array_header_1_0(file)
    if len(shape) != 1 or kind.hasobject:
        raise ValueError(f"an array of shape {shape} and type {kind}")
    return shape[0], kind


def _parquet_batches(path: Path, names: Sequence[str]) -> Iterator[Any]:
    pyarrow, parquet = _arrow()
    try:
        with parquet.ParquetFile(path) as file:
            lacking = set(names) - set(file.schema_arrow.names)
            if lacking:
                raise ValueError(f"no column {sorted(lacking)[0]!r}")
            yield from file.iter_batches(batch_size=_BLOCK, columns=list(names))
    except (pyarrow.ArrowInvalid, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _arrow() -> tuple[Any, Any]:
    try:
        return (
            importlib.import_module("pyarrow"),
            importlib.import_module("pyarrow.parquet"),
        )
    except ImportError as error:
        raise ImportError(
            "a Parquet table needs pyarrow, which is not installed or does not work; "
            "pip install 'jaxdp-episodic[sweep]' brings it"
        ) from error

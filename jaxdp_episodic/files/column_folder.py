"""Folders of ``.npy`` columns on the disk, and a manifest with their checksums.

    manifest.json            what every column is: type, shape, bytes, SHA-256
    train/features.npy       (R, ...), rows in the order of the tree of units
    train/targets.npy        (R,) float32, if there are any
    train/owners.npy         (R,) index of each example's owner, if they are known
    train/people.npy         ids of the owners
    train/level1.counts.npy  children of each unit of the level above, from the root on
    train/level1.ids.npy     ids of the units of the level, if they have some

The manifest is written last: a folder without one is not finished. What a column's file
holds is read by rows, never mapped into memory: pages that are mapped count as resident
for as long as nobody needs their memory, and a file that is cut off while it is mapped
ends the process. Whoever wants to map one may: they are plain files of NumPy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.files.archive import (
    check_items,
    check_plain_file,
    npy_header,
    write_npy_header,
)
from jaxdp_episodic.files.atomic import atomic_path, write_atomically
from jaxdp_episodic.files.json_file import read_json

MANIFEST = "manifest.json"
PROGRESS = "import.json"  # of an import that is not finished
_VERSION = 1  # of the manifest
_MAX_MANIFEST_BYTES = 2**20  # a few hundred for each column
_SPLIT = re.compile(r"[a-z][a-z0-9_]{0,40}", re.ASCII)
_NAME = re.compile(
    r"features|targets|owners|people|level[1-9][0-9]?\.(counts|ids)", re.ASCII
)
_SUM = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HASHED_AT_ONCE = 2**22  # bytes, between two calls of on_progress


class StoredColumn:
    """A column in a file: rows are read when they are asked for, by any thread.

    Attributes:
      path: of the file.
      dtype: of what it holds.
      shape: (R, ...).
      sha256: of the whole file, by the manifest.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype,
        shape: tuple[int, ...],
        sha256: str,
        offset: int,
    ) -> None:
        self.path, self.dtype, self.shape, self.sha256 = path, dtype, shape, sha256
        self._offset = offset
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()  # all threads share the position in the file

    def rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows ``first`` to ``last``, (last - first, ...)."""
        out = np.empty((last - first, *self.shape[1:]), self.dtype)
        self._read(first, out.reshape(-1).view(np.uint8))
        return out

    def gather(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Reads ``rows[i]`` into ``out[places[i]]``, in the order of the file.

        Both are (n,) integers; ``out`` (N, ...) is of this column's type, contiguous. A
        file that is shorter than it was raises `ValueError`.
        """
        if not rows.size:
            return
        target = out.reshape(len(out), -1).view(np.uint8)
        for i in np.argsort(rows, kind="stable").tolist():
            self._read(int(rows[i]), target[places[i]])

    def _read(self, row: int, out: np.ndarray) -> None:
        rest = out.data
        with self._lock:
            self._file.seek(self._offset + row * self._row_bytes)
            while rest:
                number = self._file.readinto(rest)
                if not number:
                    raise ValueError(
                        f"{self.path} ends within row {row}: it was cut off since it "
                        "was opened"
                    )
                rest = rest[number:]


@dataclass(frozen=True)
class StoredSplit:
    """The columns of one split, checked against the manifest."""

    columns: Mapping[str, StoredColumn]  # by name
    level_names: tuple[str, ...]  # of the tree, top to bottom
    encoding: str | None  # what the numbers of the features stand for; None: themselves
    made_from: Any  # as `write_manifest` was told


def is_complete(folder: Path) -> bool:
    """True if the folder has a manifest."""
    return (folder / MANIFEST).is_file()


def open_split(folder: Path, choose: Callable[[list[str]], str]) -> StoredSplit:
    """Returns one split of a folder, after a look at every file of all splits.

    Types, shapes and sizes are compared with the manifest, and of all columns but the
    features of the chosen split the checksums as well; `check_sums` compares all.

    ``choose`` is given the names of the splits, and returns one.

    Raises:
      OSError: a file that is missing or cannot be read.
      ValueError: a folder that was not finished, a manifest that is damaged, or a file
        that is not as the manifest says; the message has the path.
    """
    manifest = _manifest(folder)
    splits = manifest["splits"]
    chosen = choose(list(splits))
    opened = {}
    for split, described in splits.items():
        for name, entry in described["columns"].items():
            column = _opened(folder / split / f"{name}.npy", entry)
            if split == chosen:
                opened[name] = column
    small = {c.path: c.sha256 for name, c in opened.items() if name != "features"}
    compare_sums(small)
    found = splits[chosen]
    made_from = manifest.get("made_from")
    return StoredSplit(opened, tuple(found["levels"]), found["encoding"], made_from)


def check_sums(
    folder: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Compares every byte of a folder with the manifest; returns their number.

    Errors are those of `open_split`; progress is in bytes, those read and all.
    """
    columns = {
        column.path: column.sha256
        for split, described in _manifest(folder)["splits"].items()
        for name, entry in described["columns"].items()
        for column in [_opened(folder / split / f"{name}.npy", entry)]
    }
    compare_sums(columns, on_progress)
    return sum(os.stat(path).st_size for path in columns)


def create_column(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Makes the file of a column, of its whole size; returns where its rows begin.

    Raises:
      OSError: it cannot be written.
    """
    with path.open("wb") as file:
        write_npy_header(file, dtype, shape)
        offset = file.tell()
        file.truncate(offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return offset


def write_column(path: Path, values: np.ndarray) -> None:
    """Writes a whole column, and waits until it is on the disk."""
    with atomic_path(path) as temporary, temporary.open("xb") as file:
        write_npy_header(file, values.dtype, values.shape)
        file.write(np.ascontiguousarray(values).data)


def write_manifest(
    folder: Path,
    splits: Mapping[str, tuple[tuple[str, ...], str | None]],
    *,
    made_from: Mapping[str, Any],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Completes a folder: sums up its columns, and writes down what they are.

    Each split has its folder, with all columns on the disk, and names of levels and an
    encoding of its features. ``made_from`` are plain values, for a reader. Progress is
    in bytes, those read and all. Returns the manifest.
    """
    files = {split: sorted((folder / split).glob("*.npy")) for split in splits}
    sums = dict(_sums_of([p for paths in files.values() for p in paths], on_progress))
    described = {
        split: {
            "levels": list(levels),
            "encoding": encoding,
            "columns": {path.stem: _entry(path, sums[path]) for path in files[split]},
        }
        for split, (levels, encoding) in splits.items()
    }
    manifest = {"version": _VERSION, "made_from": dict(made_from), "splits": described}
    text = json.dumps(manifest, indent=2) + "\n"
    write_atomically(folder / MANIFEST, text)
    return manifest


def _entry(path: Path, sha256: str) -> dict[str, Any]:
    """What the manifest says of a column."""
    shape, dtype, _ = _header(path)
    size = os.stat(path).st_size
    return {"dtype": dtype.str, "shape": list(shape), "bytes": size, "sha256": sha256}


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape and type of a file, and where its rows begin."""
    check_plain_file(path)
    with path.open("rb") as file:
        shape, dtype, is_fortran = npy_header(file, str(path), os.stat(path).st_size)
        if is_fortran or not shape:
            raise ValueError(f"{path} must hold rows in C order")
        return shape, dtype, file.tell()


def _opened(path: Path, entry: Mapping[str, Any]) -> StoredColumn:
    """A column whose file is of the size, type and shape that the manifest says."""
    check_plain_file(path)
    size = os.stat(path).st_size
    if size != entry["bytes"]:
        how = "it is cut off" if size < entry["bytes"] else "it has grown"
        raise ValueError(
            f"{path} must have the {entry['bytes']} bytes that the manifest says, has "
            f"{size}: {how}"
        )
    shape, dtype, offset = _header(path)
    if dtype.str != entry["dtype"] or list(shape) != entry["shape"]:
        raise ValueError(
            f"{path} must hold {entry['dtype']} of shape {entry['shape']} as the "
            f"manifest says, holds {dtype.str} of shape {list(shape)}"
        )
    if not dtype.isnative:
        raise ValueError(f"{path} is of a machine of another byte order, {dtype.str}")
    return StoredColumn(path, dtype, shape, entry["sha256"], offset)


def compare_sums(
    columns: Mapping[Path, str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compares every byte of some columns with their checksums in the manifest."""
    for path, found in _sums_of(list(columns), on_progress):
        if found != columns[path]:
            raise ValueError(
                f"{path} has changed: its SHA-256 is {found}, that of the manifest "
                f"{columns[path]}"
            )


def _sums_of(
    paths: Sequence[Path], on_progress: Callable[[int, int], None]
) -> Iterator[tuple[Path, str]]:
    """The SHA-256 of each file."""
    total, done = sum(os.stat(path).st_size for path in paths), 0
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while part := file.read(_HASHED_AT_ONCE):
                digest.update(part)
                done += len(part)
                on_progress(done, total)
        yield path, digest.hexdigest()


def whole(column: StoredColumn) -> np.ndarray:
    """Returns all of a small column, each value one of its type."""
    values = column.rows(0, column.shape[0])
    check_items(values.reshape(-1).view(np.uint8), column.dtype, str(column.path))
    return values


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; anybody may have written it."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / PROGRESS).is_file():
            raise ValueError(
                f"{folder} is not finished: its import was broken off, and the same "
                "command goes on with it"
            )
        raise FileNotFoundError(
            f"{folder} must be a folder made by `jaxdp-episodic data import`: it has "
            f"no {MANIFEST}"
        )
    try:
        found = read_json(path, max_bytes=_MAX_MANIFEST_BYTES)
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise ValueError(f"version must be {_VERSION}")
        splits = found.get("splits")
        if not isinstance(splits, dict) or not splits:
            raise ValueError("splits must be a table")
        for split, described in splits.items():
            _check_split(split, described)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return found


def _check_split(split: str, described: Any) -> None:
    """Refuses a split that is not described as `write_manifest` does."""
    if not _SPLIT.fullmatch(split) or not isinstance(described, dict):
        raise ValueError(f"no split {split[:60]!r}")
    levels, columns = described.get("levels"), described.get("columns")
    if (
        not isinstance(levels, list)
        or not levels
        or not all(isinstance(name, str) for name in levels)
    ):
        raise ValueError(f"levels of {split} must be names")
    if not isinstance(columns, dict) or "features" not in columns:
        raise ValueError(f"columns of {split} must have features")
    for name, entry in columns.items():
        if not _NAME.fullmatch(name) or not isinstance(entry, dict):
            raise ValueError(f"no column {name[:60]!r}")
        shape, size = entry.get("shape"), entry.get("bytes")
        numbers = [*shape, size] if isinstance(shape, list) else [None]
        if (
            not all(type(n) is int and n >= 0 for n in numbers)
            or not isinstance(entry.get("dtype"), str)
            or not _SUM.fullmatch(str(entry.get("sha256")))
        ):
            raise ValueError(f"column {name} of {split} must have type, shape, sum")
    encoding = described.get("encoding")
    if encoding is not None and not isinstance(encoding, str):
        raise ValueError(f"encoding of {split} must be a name")

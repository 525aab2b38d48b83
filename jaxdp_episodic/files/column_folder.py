"""Folders of ``.npy`` columns on disk, and a manifest with their checksums.

    manifest.json            type, shape, bytes and SHA-256 of every column
    train/features.npy       (R, ...), rows in the order of the tree of units
    train/targets.npy        (R,) float32, optional
    train/owners.npy         (R,) index of each example's owner, optional
    train/people.npy         ids of the owners
    train/level1.counts.npy  number of children of each unit of the level above
    train/level1.ids.npy     ids of the units of the level, optional

The manifest is written last; a folder without one is incomplete. Columns are read by
rows and never memory-mapped: mapped pages count as resident memory until it is needed
elsewhere, and if a mapped file is truncated, the process is killed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.files.archive import check_plain_file, npy_header
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.json_file import read_json

MANIFEST = "manifest.json"
_VERSION = 1  # of the manifest
_MAX_MANIFEST_BYTES = 2**20  # a few hundred per column
_NAME = re.compile(r"\w[\w.]*")  # leads to no other folder
_HASHED_AT_ONCE = 2**22  # bytes between two calls of on_progress

OnProgress = Callable[[int, int], None]
"""Called with the bytes read so far, and the total."""


class StoredColumn:
    """A column in a file whose rows are read on demand, from any thread."""

    def __init__(self, path: Path, sha256: str = "") -> None:
        self.path, self.sha256 = path, sha256
        check_plain_file(path)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()  # all threads share the file position
        self.num_bytes = os.fstat(self._file.fileno()).st_size
        found = npy_header(self._file, str(path), self.num_bytes)
        self.shape, self.dtype, is_fortran = found
        if is_fortran or not self.shape:
            raise ValueError(f"{path} must have rows in C order")
        if not self.dtype.isnative:
            raise ValueError(f"{path} has another byte order than this machine")
        self._offset = self._file.tell()

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows with these numbers (n,); they are read in file order."""
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        values = np.empty((len(rows), *self.shape[1:]), self.dtype)
        row_bytes = (self.num_bytes - self._offset) // max(self.shape[0], 1)
        # Consecutive rows are read in one call.
        starts = np.flatnonzero(np.diff(ordered, prepend=-2) != 1).tolist()
        for first, last in itertools.pairwise([*starts, len(rows)]):
            rest = values[first:last].reshape(-1).view(np.uint8).data
            with self._lock:
                self._file.seek(self._offset + int(ordered[first]) * row_bytes)
                while rest:
                    number = self._file.readinto(rest)
                    if not number:
                        raise ValueError(
                            f"{self.path} ends within row {ordered[last - 1]}: it was "
                            "truncated after it was opened"
                        )
                    rest = rest[number:]
        if len(starts) > 1:
            values[order] = values.copy()
        return values


class StoredSplit(NamedTuple):
    """One split, checked against the manifest."""

    features: StoredColumn
    columns: Mapping[str, np.ndarray]  # the others, by name
    level_names: tuple[str, ...]  # of the tree, top to bottom
    encoding: str | None  # what the features' numbers encode; None: nothing
    made_from: Any  # argument of `write_manifest`


def is_complete(folder: Path) -> bool:
    """Returns whether the folder has a manifest."""
    return (folder / MANIFEST).is_file()


def stored_splits(folder: Path) -> tuple[str, ...]:
    """Returns the names of a folder's splits; errors as `open_split`."""
    return tuple(_manifest(folder)["splits"])


def open_split(folder: Path, split: str | None = None) -> StoredSplit:
    """Returns one split of a folder (None: the first), after checking all files."""
    manifest = _manifest(folder)
    splits = list(manifest["splits"])
    if split is not None and split not in splits:
        raise ValueError(
            f"split must be one of those in {folder}, {splits}, got {split!r}"
        )
    name = splits[0] if split is None else split
    columns, found = _all_columns(folder, manifest)[name], manifest["splits"][name]
    features = columns.pop("features")
    compare_sums(columns.values())
    others = {name: np.load(one.path) for name, one in columns.items()}
    levels, made_from = tuple(found["levels"]), manifest.get("made_from")
    return StoredSplit(features, others, levels, found["encoding"], made_from)


def check_sums(folder: Path, on_progress: OnProgress = lambda done, total: None) -> int:
    """Compares a folder's checksums with the manifest; returns the bytes read."""
    opened = _all_columns(folder, _manifest(folder)).values()
    columns = [column for split in opened for column in split.values()]
    compare_sums(columns, on_progress)
    return sum(column.num_bytes for column in columns)


def compare_sums(
    columns: Iterable[StoredColumn], on_progress: OnProgress = lambda done, total: None
) -> None:
    """Compares the checksums of some columns with the manifest."""
    for column, found in _sums_of(list(columns), on_progress):
        if found != column.sha256:
            raise ValueError(
                f"{column.path} has changed: its SHA-256 is {found}, the manifest says "
                f"{column.sha256}"
            )


def _sums_of(
    columns: list[StoredColumn], on_progress: OnProgress
) -> Iterator[tuple[StoredColumn, str]]:
    total, done = sum(column.num_bytes for column in columns), 0
    for column in columns:
        digest = hashlib.sha256()
        with column.path.open("rb", buffering=0) as file:
            while part := file.read(_HASHED_AT_ONCE):
                digest.update(part)
                done += len(part)
                on_progress(done, total)
        yield column, digest.hexdigest()


def write_rows(
    path: Path,
    dtype: np.dtype,
    shape: tuple[int, ...],
    parts: Iterable[tuple[np.ndarray, np.ndarray]],
) -> None:
    """Writes a column from parts, each with the row indices and the rows."""
    done, row_bytes = 0, int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    with path.open("wb") as file:
        described = np.lib.format.dtype_to_descr(dtype)
        header = {"descr": described, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        for places, batch in parts:
            if batch.shape[1:] != shape[1:] or batch.dtype != dtype:
                raise ValueError(
                    f"records must be {dtype} of shape {shape[1:]}, record {done} is "
                    f"{batch.dtype} of shape {batch.shape[1:]}"
                )
            # Consecutive rows are written in one call.
            breaks = np.flatnonzero(np.diff(places) != 1) + 1
            runs = np.split(places, breaks), np.split(batch, breaks)
            for run, rows in zip(*runs, strict=True):
                file.seek(start + (int(run[0]) if len(run) else 0) * row_bytes)
                file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
            done += len(batch)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(
    folder: Path,
    splits: Mapping[str, tuple[tuple[str, ...], str | None]],
    *,
    made_from: Mapping[str, Any],
    on_progress: OnProgress = lambda done, total: None,
) -> None:
    """Completes a folder: writes its manifest with the checksums of all columns."""
    files = [
        file for split in splits for file in sorted((folder / split).glob("*.npy"))
    ]
    sums = _sums_of([StoredColumn(file) for file in files], on_progress)
    described: dict[str, Any] = {
        split: {"levels": list(levels), "encoding": encoding, "columns": {}}
        for split, (levels, encoding) in splits.items()
    }
    for column, sha256 in sums:
        columns = described[column.path.parent.name]["columns"]
        columns[column.path.stem] = {
            "dtype": column.dtype.str,
            "shape": list(column.shape),
            "bytes": column.num_bytes,
            "sha256": sha256,
        }
    manifest = {"version": _VERSION, "made_from": dict(made_from), "splits": described}
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} must be a folder made by `jaxdp-episodic data import`, but has "
            f"no {MANIFEST}, which is written last"
        )
    try:
        found = read_json(path, max_bytes=_MAX_MANIFEST_BYTES)
        if found["version"] != _VERSION:
            raise ValueError(f"version must be {_VERSION}")
        for split, described in found["splits"].items():
            described.setdefault("encoding", None)
            _ = described["columns"]["features"], *described["levels"]
            for name in (split, *described["columns"]):
                if not _NAME.fullmatch(name):
                    raise ValueError(f"{name[:60]!r} must be a plain name")
            for entry in described["columns"].values():
                _ = [entry[key] for key in ("bytes", "dtype", "shape", "sha256")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return found


def _all_columns(
    folder: Path, manifest: Mapping[str, Any]
) -> dict[str, dict[str, StoredColumn]]:
    """Returns the columns by split; raises unless they match the manifest."""
    found: dict[str, dict[str, StoredColumn]] = {}
    for split, described in manifest["splits"].items():
        columns = found[split] = {}
        for name, entry in described["columns"].items():
            path, said = folder / split / f"{name}.npy", "according to the manifest"
            size, wanted = os.stat(path).st_size, entry["bytes"]
            if size != wanted:
                how = "it is truncated" if size < wanted else "it has grown"
                raise ValueError(
                    f"{path} must have {wanted} bytes {said}, has {size}: {how}"
                )
            column = columns[name] = StoredColumn(path, entry["sha256"])
            kind, shape = column.dtype.str, list(column.shape)
            if kind != entry["dtype"] or shape != entry["shape"]:
                raise ValueError(
                    f"{path} must have {entry['dtype']} of shape {entry['shape']} "
                    f"{said}, has {kind} of shape {shape}"
                )
    return found

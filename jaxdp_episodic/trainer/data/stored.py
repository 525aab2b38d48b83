"""Tables in folders of columns: written once, record by record, then read by rows.

Writing may be interrupted at any moment and resumed: ``import.json`` counts the records
after they are on the disk; the manifest, without which nothing reads the folder, is
written last.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.files.atomic import LOCK, locked, write_atomically
from jaxdp_episodic.files.column_folder import (
    PROGRESS,
    StoredColumn,
    create_column,
    is_complete,
    open_split,
    whole,
    write_column,
    write_manifest,
)
from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.data.stored_features import StoredFeatures
from jaxdp_episodic.trainer.data.table import ExampleTable

_SECONDS = 2.0  # between two syncs of the disk, and so at most lost by a crash

# Records (bytes, while checksums are computed) done, all, and what is being done.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one split, as they come."""

    # The table that they make, its features the records' numbers, from 0 in the order
    # in which they come.
    numbers: ExampleTable
    dtype: np.dtype  # of what is stored of each
    shape: tuple[int, ...]  # of it
    encoding: str | None  # see `StoredFeatures`
    # Yields what is stored, (n, *shape), from a given record.
    batches: Callable[[int], Iterator[np.ndarray]]
    stamp: Any  # plain values that differ where the source does

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of the whole column."""
        return (self.numbers.num_examples, *self.shape)


def load_stored(path: str | os.PathLike[str], split: str = TRAIN) -> ExampleTable:
    """Returns a split of a folder made by `jaxdp-episodic data import`.

    Its features stay on the disk, and are read by rows. They are, to the last bit, what
    the loader of the files that were imported makes of them.

    Args:
      path: the folder.
      split: its name.

    Raises:
      OSError: a file that is missing or cannot be read.
      ValueError: a folder that is not finished, an unknown split, or a file that is not
        as the manifest says; the message names it. Sizes and types are always compared;
        the checksum of the features by `jaxdp-episodic data check` only.
    """
    folder = Path(path)

    def chosen(splits: list[str]) -> str:
        if split in splits:
            return split
        raise ValueError(
            f"split must be one that {folder} has, {splits}, got {split!r}"
        )

    found = open_split(folder, chosen)
    columns = dict(found.columns)
    features = StoredFeatures(columns.pop("features"), found.encoding)
    targets = columns.pop("targets", None)
    owners = _owners(folder, columns.pop("owners", None), columns.pop("people", None))
    names = [f"level{j}" for j in range(1, len(columns) + 1)]
    counts, ids = (
        tuple(whole(columns[name + part]) for name in names if name + part in columns)
        for part in (".counts", ".ids")
    )
    values = None if targets is None else whole(targets)
    if values is not None:
        if values.dtype != np.float32 or not np.isfinite(values).all():
            raise ValueError(f"targets in {folder} must be finite float32")
    tree = Population(counts, found.level_names, ids)
    return ExampleTable(features, values, tree, owners)


def _owners(
    folder: Path, codes: StoredColumn | None, names: StoredColumn | None
) -> Owners | None:
    """Whose the examples are, if the folder says so."""
    if codes is None and names is None:
        return None
    if codes is None or names is None:
        raise ValueError(f"{folder} must have owners and people, has one of the two")
    try:
        return Owners(whole(codes), whole(names))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {error}") from None


def stored_splits(folder: Path) -> tuple[str, ...]:
    """Returns the names of the splits that a folder has; errors as `load_stored`."""
    found: list[str] = []

    def chosen(splits: list[str]) -> str:
        found.extend(splits)
        return splits[0]

    open_split(folder, chosen)
    return tuple(found)


def store(
    folder: Path,
    splits: Mapping[str, Records],
    *,
    made_from: Mapping[str, Any],
    on_progress: Progress = lambda done, total, what: None,
) -> int:
    """Writes tables into a folder, or resumes that; returns records found there.

    Args:
      folder: made if missing. It must be empty, or hold the beginning of the same.
      splits: name -> its records.
      made_from: plain values that say what they were made from, for a reader.
      on_progress: is told what is done.

    Raises:
      BlockingIOError: another process is writing there.
      FileExistsError: it holds something else, or is complete.
      OSError: the disk is full or fails.
      ValueError: what was begun there is of another source, or of other settings; or a
        record that cannot be read.
    """
    plan = _plan(splits, made_from)
    if folder.is_dir():
        _found(folder, plan, splits)  # what is refused is left without a lock
    with locked(folder):
        done = _found(folder, plan, splits) or _begun(folder, plan, splits)
        found = sum(done.values())
        total = sum(records.numbers.num_examples for records in splits.values())
        before = 0
        for split, records in splits.items():
            for number in _written(folder / split, records, done[split]):
                done[split] = number
                _save(folder, plan, done)
                on_progress(before + number, total, "records")
            before += records.numbers.num_examples
            _write_tree(folder / split, records.numbers)
        write_manifest(
            folder,
            {s: (r.numbers.level_names, r.encoding) for s, r in splits.items()},
            made_from=made_from,
            on_progress=lambda read, of: on_progress(read, of, "bytes summed up"),
        )
        (folder / PROGRESS).unlink()
        with suppress(OSError):  # Windows unlinks nothing that is open
            (folder / LOCK).unlink()
    return found


def _plan(splits: Mapping[str, Records], made_from: Mapping[str, Any]) -> str:
    """What is to be written: the same text for the same source and settings."""
    described = {
        split: [r.row_shape, r.dtype.str, r.encoding, r.stamp, r.numbers.fingerprint]
        for split, r in splits.items()
    }
    text = json.dumps([described, dict(made_from)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _found(
    folder: Path, plan: str, splits: Mapping[str, Records]
) -> dict[str, int] | None:
    """How many records of each split are there; None of an empty folder."""
    if is_complete(folder):
        raise FileExistsError(
            f"{folder} is complete; name another folder, or look at it with "
            "`jaxdp-episodic data check`"
        )
    path = folder / PROGRESS
    if path.is_file():
        try:
            state = parse_json(path.read_bytes())
            is_same = state["plan"] == plan
            done = {split: int(state["done"][split]) for split in splits}
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is damaged; remove {folder}") from None
        if not is_same:
            raise ValueError(
                f"{folder} was begun from other files, or with other settings; repeat "
                "the command as it was, remove the folder, or name another"
            )
        for split, number in done.items():
            file = folder / split / "features.npy"
            most = splits[split].numbers.num_examples
            if not 0 <= number <= most or (number and not file.is_file()):
                raise ValueError(f"{file} is gone or damaged; remove {folder}")
        return done
    others = {inside.name for inside in folder.iterdir()} - {LOCK}
    if others:
        raise FileExistsError(f"{folder} must be empty, it has {min(others)!r}")
    return None


def _begun(folder: Path, plan: str, splits: Mapping[str, Records]) -> dict[str, int]:
    """An import's first note: nothing is there yet."""
    needed = sum(
        int(np.prod(r.row_shape, dtype=np.int64)) * r.dtype.itemsize
        for r in splits.values()
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free", str(folder)
        )
    done = dict.fromkeys(splits, 0)
    _save(folder, plan, done)
    return done


def _save(folder: Path, plan: str, done: Mapping[str, int]) -> None:
    text = json.dumps({"plan": plan, "done": dict(done)}) + "\n"
    write_atomically(folder / PROGRESS, text)


def _written(folder: Path, records: Records, first: int) -> Iterator[int]:
    """Writes the features from record ``first``; yields how many are on the disk."""
    folder.mkdir(exist_ok=True)
    path, number = folder / "features.npy", records.numbers.num_examples
    if first == 0:
        create_column(path, records.dtype, records.row_shape)
    row_bytes = int(np.prod(records.shape, dtype=np.int64)) * records.dtype.itemsize
    start = os.stat(path).st_size - number * row_bytes
    row_of = np.empty(number, np.int64)  # of the column, in the order of the tree
    row_of[np.asarray(records.numbers.features).reshape(-1)] = np.arange(number)
    done, saved = first, time.monotonic()
    with path.open("r+b", buffering=0) as file:
        for batch in records.batches(first) if first < number else ():
            if batch.shape[1:] != records.shape or batch.dtype != records.dtype:
                raise ValueError(
                    f"records must be {records.dtype} of shape {records.shape}, record "
                    f"{done} is {batch.dtype} of shape {batch.shape[1:]}"
                )
            rows = row_of[done : done + len(batch)]
            # Consecutive rows are written by one call.
            breaks = np.flatnonzero(np.diff(rows) != 1) + 1
            parts = np.split(rows, breaks), np.split(batch, breaks)
            for some, part in zip(*parts, strict=True):
                file.seek(start + int(some[0]) * row_bytes)
                rest = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                while rest:
                    rest = rest[file.write(rest) :]
            done += len(batch)
            if time.monotonic() - saved > _SECONDS:
                os.fsync(file.fileno())
                yield done
                saved = time.monotonic()
        if done != number:
            raise ValueError(f"there must be {number} records, {done} came")
        os.fsync(file.fileno())
    yield done


def _write_tree(folder: Path, table: ExampleTable) -> None:
    tree = table.population
    columns = {f"level{j}.counts": c for j, c in enumerate(tree.children_counts, 1)}
    columns |= {f"level{j}.ids": i for j, i in enumerate(tree.unit_ids or (), 1)}
    if table.targets is not None:
        columns["targets"] = table.targets
    if table.owners is not None:
        columns |= {"owners": table.owners.codes, "people": table.owners.names}
    for name, values in columns.items():
        write_column(folder / f"{name}.npy", values)

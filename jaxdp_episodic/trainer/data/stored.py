"""Records read in parts, and tables stored in folders of columns."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic._validation import prefixed
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.files import column_folder
from jaxdp_episodic.files.atomic import LOCK, locked, sync_folder, sync_tree
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.data.table import ExampleTable, StoredFeatures, decoded

Part = tuple[np.ndarray, np.ndarray]  # row indices in a table, and their values


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one split, readable in parts."""

    # Their table; its features are the record numbers in the source.
    numbers: ExampleTable
    # Yields the values of the records with the given ascending numbers, in parts.
    read: Callable[[np.ndarray], Iterable[np.ndarray]]
    codes: str | None = None  # one of `ENCODINGS`, of values of 8 bits; None: numbers
    files: Sequence[Path] = ()  # of images, by record number

    @functools.cached_property
    def first(self) -> np.ndarray:
        """The kept values of the first record, (1, ...)."""
        if not self.numbers.num_examples:
            raise ValueError("there must be at least one example, got none")
        return next(iter(self.read(np.sort(self.numbers.features))))[:1].copy()

    @property
    def encoding(self) -> str | None:
        """What the kept values encode, see `StoredFeatures`."""
        return self.codes if self.first.dtype == np.uint8 else None

    def placed(self) -> Iterator[Part]:
        """Yields row indices in the table, and the values of the records there."""
        numbers = np.asarray(self.numbers.features).reshape(-1)
        order, done = np.argsort(numbers), 0
        for values in self.read(numbers[order]):
            yield order[done : done + len(values)], values
            done += len(values)
        if done != len(numbers):
            raise ValueError(f"there must be {len(numbers)} records, got {done}")

    def table(self, max_bytes: int | None = None) -> ExampleTable:
        """Returns the table with its features in memory."""
        number = self.numbers.num_examples
        dtype = self.first.dtype if self.encoding is None else np.dtype(np.float32)
        needed = number * self.first.size * dtype.itemsize
        if max_bytes is not None and needed > max_bytes:
            raise ValueError(
                f"the features must take at most max_bytes={max_bytes} bytes, "
                f"{number} examples take {needed}"
            )
        features = np.empty((number, *self.first.shape[1:]), dtype)
        for places, values in self.placed():
            if self.encoding is not None:
                values = decoded(values, self.encoding)
            features[places] = values
        return self.numbers.with_features(features)


def only(
    parts: Callable[[], Iterable[np.ndarray]], wanted: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields the wanted records from consecutive parts of a whole source."""
    first = 0
    for values in parts():
        low, high = np.searchsorted(wanted, [first, first + len(values)])
        if high > low:
            yield values[wanted[low:high] - first]
        first += len(values)


_UNFINISHED = ".part"  # suffix of a folder that is being written

# (done, total, unit): in records, or in bytes while checksums are computed.
Progress = Callable[[int, int, str], None]


def load_stored(path: str | os.PathLike[str], split: str = TRAIN) -> ExampleTable:
    """Returns a split of a folder made by `jaxdp-episodic data import`.

    Its features stay on disk and are read by rows. They are bit for bit what the loader
    of the imported files returns.

    Args:
      path: the folder.
      split: name of the split.

    Raises:
      OSError: a file that is missing or unreadable.
      ValueError: an unfinished folder, an unknown split, or a file that does not match
        the manifest; the message names it. Sizes and types are always compared;
        checksums of features only by `jaxdp-episodic data check`.
    """
    folder = Path(path)
    found = column_folder.open_split(folder, split)
    features = StoredFeatures(found.features, found.encoding)
    small, owners = found.columns, None
    if ("owners" in small) != ("people" in small):
        raise ValueError(f"{folder} must have both owners and people, has only one")
    if "owners" in small:
        with prefixed(folder):
            owners = Owners(small["owners"], small["people"])
    counts, ids = (
        tuple(small[n] for i in range(1, 100) if (n := f"level{i}.{kind}") in small)
        for kind in ("counts", "ids")
    )
    tree = Population(counts, found.level_names, ids)
    return ExampleTable(features, small.get("targets"), tree, owners)


def store(
    folder: Path,
    splits: Mapping[str, Records],
    *,
    made_from: Mapping[str, Any],
    on_progress: Progress = lambda done, total, what: None,
) -> None:
    """Writes tables into a folder; it appears complete or not at all."""
    if column_folder.is_complete(folder):
        raise FileExistsError(
            f"{folder} is already complete; name another folder, or check it with "
            "`jaxdp-episodic data check`"
        )
    if folder.is_dir() and (others := sorted(one.name for one in folder.iterdir())):
        raise FileExistsError(f"{folder} must be empty, but has {others[0]!r}")
    new = folder.with_name(folder.name + _UNFINISHED)
    with locked(new):
        try:
            for inside in new.iterdir():
                if inside.is_dir():
                    shutil.rmtree(inside)
            write_columns(new, splits, made_from, on_progress)
            (new / LOCK).unlink(missing_ok=True)
            sync_tree(new)
            if folder.is_dir():
                folder.rmdir()
            new.rename(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    sync_folder(folder.absolute().parent)


def write_columns(
    folder: Path,
    splits: Mapping[str, Records],
    made_from: Mapping[str, Any],
    on_progress: Progress = lambda done, total, what: None,
) -> None:
    """Writes tables into a folder, its manifest last."""
    total = sum(one.numbers.num_examples for one in splits.values())
    needed = sum(one.numbers.num_examples * one.first.nbytes for one in splits.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free", str(folder)
        )
    done = 0

    def counted(records: Records) -> Iterator[Part]:
        nonlocal done
        for places, values in records.placed():
            yield places, values
            done += len(places)
            on_progress(done, total, "records")

    for split, one in splits.items():
        inside, table, first = folder / split, one.numbers, one.first
        inside.mkdir(exist_ok=True)
        file, shape = inside / "features.npy", (table.num_examples, *first.shape[1:])
        file.unlink(missing_ok=True)  # readers of an old file keep it
        column_folder.write_rows(file, first.dtype, shape, counted(one))
        tree = table.population
        columns = {f"level{j}.counts": c for j, c in enumerate(tree.children_counts, 1)}
        columns |= {f"level{j}.ids": i for j, i in enumerate(tree.unit_ids or (), 1)}
        if table.targets is not None:
            columns["targets"] = table.targets
        if table.owners is not None:
            columns |= {"owners": table.owners.codes, "people": table.owners.names}
        for name, values in columns.items():
            np.save(inside / f"{name}.npy", values)
    column_folder.write_manifest(
        folder,
        {split: (r.numbers.level_names, r.encoding) for split, r in splits.items()},
        made_from=made_from,
        on_progress=lambda read, of: on_progress(read, of, "bytes summed up"),
    )

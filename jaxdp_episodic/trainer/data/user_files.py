"""A user's own files, which are not trusted: arrays (npz), records (CSV, Parquet)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import CLASS
from jaxdp_episodic.files.archive import array_headers, read_arrays
from jaxdp_episodic.files.csv_file import csv_lines, read_csv_columns
from jaxdp_episodic.files.parquet_file import parquet_batches
from jaxdp_episodic.trainer.data.column_names import (
    refuse_ids_as_names,
    refuse_numbers_as_names,
)
from jaxdp_episodic.trainer.data.ids import MAX_BYTES, id_array
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable

_PARQUET_ROWS = 2**16  # that are read at a time: the lists of one batch fit in memory


def load_npz(
    path: str | os.PathLike[str],
    *,
    levels: Sequence[str] = (),
    split: str | None = None,
    owner: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of an npz file of arrays; pickles are refused.

    The file holds either ``images`` (integers below 256 become [0, 1], an axis of
    channels is added if there is none) or ``features`` (as they are), in one of two
    layouts:

    * ``images[class, example, ...]``, with the classes' ids in ``classes`` (C,), or
      numbered;
    * ``images[record, ...]`` with ``labels`` (R,), the class ids of the records. An
      array ``classes`` beside them is the public list of classes: those without a
      record are empty classes, and stay when the last record of one is taken away.

    ``targets`` is optional, one number a record. Further arrays, with one entry a
    record or (first layout) a class, may name coarser levels, owners or the split.

    Args:
      path: the file.
      levels: names of arrays that are levels above the class, top first.
      split: keep only entries whose ``split`` array says so; None: all.
      owner: name of the array of owners, ids of people; None: not known.
      max_bytes: most bytes that the arrays may take uncompressed.

    Returns:
      Levels ``levels``, "class" and "example".

    Raises:
      TypeError: values or ids of the wrong type.
      ValueError: a file that is no npz, holds pickles or too much, or arrays that do
        not fit together.
    """
    arrays = read_arrays(Path(path), max_bytes=max_bytes)
    return arranged(arrays, path, levels, split, owner)


def arranged(
    arrays: dict[str, Any],
    path: Any,
    levels: Sequence[str] = (),
    split: str | None = None,
    owner: str | None = None,
) -> ExampleTable:
    """Returns the table of an npz file's arrays; see `load_npz`."""
    given = [name for name in ("images", "features") if name in arrays]
    if len(given) != 1:
        shapes = {name: array.shape for name, array in arrays.items()}
        raise ValueError(
            f"{path} must hold images or features, one of the two, and labels, has "
            f"{shapes}; rename them: np.savez(FILE, images=..., labels=...)"
        )
    values = arrays[given[0]]
    if not values.size:
        raise ValueError(f"{given[0]} in {path} must not be empty, got {values.shape}")
    grid: tuple[int, ...] = values.shape[:1]
    public = None
    if "labels" in arrays:
        labels, public = arrays["labels"], arrays.get("classes")
        if public is not None and (levels or split is not None):
            raise ValueError(
                f"classes beside labels in {path} is a public list, which is for one "
                "level of units and all records, got levels or split"
            )
    else:
        if values.ndim < (4 if given[0] == "images" else 3):
            raise ValueError(
                f"{given[0]} must be [class, example, ...], or come with an array "
                f"labels, the class of each; got shape {values.shape}, and no labels"
            )
        grid = values.shape[:2]
        labels = arrays.get("classes", np.arange(grid[0]))
        values = values.reshape(-1, *values.shape[2:])
    if given[0] == "images":
        values = scaled_images(values)
    wanted = (*levels, None if split is None else "split", owner)
    for name in wanted:
        if name is not None and name not in arrays:
            raise ValueError(f"{path} must hold {name}, has {list(arrays)}")
    columns = {name: _one_a_record(name, arrays[name], grid, path) for name in levels}
    columns["class"] = _one_a_record("labels or classes", labels, grid, path)
    owners = targets = None
    if owner is not None:
        ids = _one_a_record(owner, arrays[owner], grid, path)
        owners = Owners.from_ids(ids, name=f"{owner} in {path}")
    if "targets" in arrays:
        targets = _one_a_record("targets", arrays["targets"], grid, path)
    if split is not None:
        kept = _one_a_record("split", arrays["split"], grid, path) == split
        if not kept.any():
            raise ValueError(f"split must be one that {path} has, got {split!r}")
        values = values[kept]
        columns = {name: column[kept] for name, column in columns.items()}
        targets = None if targets is None else targets[kept]
        owners = None if owners is None else owners.take(kept)
    return ExampleTable.from_records(
        values,
        targets,
        units=columns,
        public_units=None if public is None else public.reshape(-1).tolist(),
        owners=owners,
    )


def refuse_unnamed(path: Path) -> None:
    """Refuses a file of arrays whose classes are numbered: there is no name to hash.

    Where one left, others would get its number, and with it perhaps another part.

    Raises:
      ValueError: neither ``labels`` nor ``classes``; and as `load_npz`.
    """
    if not {"labels", "classes"} & set(array_headers(path)):
        raise ValueError(
            f"{path} must hold classes, the ids of the classes, for these to be split "
            "by their names; a number in a file is none, as it changes when a class "
            "before it leaves"
        )


def load_table(
    path: str | os.PathLike[str],
    *,
    groups: Sequence[str] = (),
    features: Sequence[str],
    target: str | None = None,
    label: str | None = None,
    public_units: Sequence[Any] | None = None,
    owner: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a file's records, one a row.

    Args:
      path: a file ``.csv`` (UTF-8, with a line of column names, which must not be
        numbers unless plain whole ones: a record would look so) or ``.parquet``.
      groups: columns of unit ids, top level first; they name the levels. Ids of a CSV
        are strings, as written: "07" is not "7".
      features: columns of numbers.
      target: column of numbers; None: the last group is the class.
      label: column of classes, in place of ``groups``: its level is called "class",
        whatever its own name.
      public_units: the public list of ids of the only group; those without a record
        are empty units, which stay when somebody's last record is taken away.
      owner: column of owners, ids of people; None: not known.
      max_bytes: most bytes of the file (CSV) or of its columns (Parquet).

    Returns:
      Levels ``groups``, or "class", and "example"; features (R, columns) float32.

    Raises:
      ImportError: a Parquet file without pyarrow, of the extra ``[data]``.
      TypeError: one name where a list of names is meant.
      ValueError: another kind of file, an unknown column, a missing id or owner, a
        cell that is no finite number, a file that is too large, or one whose first
        line is a record; the message says where.
    """
    file = Path(path)
    if label is not None:
        if groups or target is not None:
            raise ValueError(
                "label must be left out with groups or a target: a column of classes "
                f"is all that it says, got {label!r}, {groups}, {target!r}"
            )
        groups = (label,)
    for name, columns in (("groups", groups), ("features", features)):
        if isinstance(columns, str):
            raise TypeError(f"{name} must be a list of column names, got {columns!r}")
        if not columns:
            what = "groups or label" if name == "groups" else name
            raise ValueError(f"{what} must name at least one column, got none")
    if "example" in groups and label is None:
        raise ValueError(
            "groups must not name a column 'example', which is the level of the "
            f"records themselves, got {list(groups)}; rename the column"
        )
    wanted = [
        *groups,
        *features,
        *(name for name in (target, owner) if name is not None),
    ]
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"columns must be used once each, got {wanted}")
    columns, first = columns_of(file, wanted, max_bytes=max_bytes)
    if not columns[wanted[0]]:
        raise ValueError(f"{file} must have at least one record, has none")
    if file.suffix.lower() == ".csv":
        ids = [*groups, *([] if owner is None else [owner])]
        by_name = {name: columns[name] for name in ids}
        refuse_ids_as_names(file, names_of_columns(file), by_name)
    numbers = {
        name: numbers_of(columns[name], name, file, first)
        for name in (*features, *([] if target is None else [target]))
    }
    return ExampleTable.from_records(
        np.stack([numbers[name] for name in features], axis=1),
        None if target is None else numbers[target],
        units={
            name if label is None else CLASS: ids_of(columns[name], name, file, first)
            for name in groups
        },
        public_units=public_units,
        owners=None if owner is None else owners_of(columns[owner], owner, file, first),
    )


def scaled_images(images: np.ndarray) -> np.ndarray:
    """Returns (R, H, W, channels) images: 8-bit integers become float32 in [0, 1].

    Raises:
      TypeError: images that are neither 8-bit, Boolean nor floating.
      ValueError: images that are not [record, H, W] or [record, H, W, channels].
    """
    if images.dtype == np.uint8:
        images = images.astype(np.float32) / 255
    elif images.dtype.kind not in "bf":
        raise TypeError(
            f"images must be uint8, bool or floating, got {images.dtype}; put numbers "
            "that are no pixels under the name features"
        )
    if images.ndim not in (3, 4):
        raise ValueError(
            "images must have height and width, and perhaps channels, "
            f"got shape {images.shape[1:]} each"
        )
    return images if images.ndim == 4 else images[..., None]


def _one_a_record(
    name: str, array: np.ndarray, grid: tuple[int, ...], path: Any
) -> np.ndarray:
    """An array with one entry a record, or one a class, as one entry a record."""
    if array.shape == grid:
        return array.reshape(-1)
    if array.shape == (math.prod(grid),):
        return array
    if len(grid) == 2 and array.shape == grid[:1]:
        return np.repeat(array, grid[1])
    raise ValueError(
        f"{name} in {path} must have one entry for each of {grid}, got {array.shape}"
    )


def parquet_columns(
    file: Path, wanted: Sequence[str], *, max_bytes: int | None = None
) -> dict[str, list[Any]]:
    """The wanted columns of a Parquet file."""
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    batches = parquet_batches(file, wanted, rows=_PARQUET_ROWS, max_bytes=max_bytes)
    for names, cells in batches:
        for name, column in zip(names, cells, strict=True):
            columns[name] += column
    return columns


def columns_of(
    file: Path, wanted: Sequence[str], *, max_bytes: int
) -> tuple[dict[str, list[Any]], int]:
    """Returns columns of a CSV or Parquet file, and the row of its first record.

    Raises:
      ValueError: another kind of file, one whose first line is a record, or as of its
        reader; the message has the path.
    """
    # A CSV file's first record is in its second line.
    readers = {".csv": (read_csv_columns, 2), ".parquet": (parquet_columns, 1)}
    suffix = file.suffix.lower()
    if suffix not in readers:
        raise ValueError(f"path must end in .csv or .parquet, got {str(file)!r}")
    read, first = readers[suffix]
    if suffix == ".csv":
        refuse_numbers_as_names(file, names_of_columns(file), wanted)
    try:
        return read(file, wanted, max_bytes=max_bytes), first
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def names_of_columns(file: Path) -> list[str]:
    """Returns the names of the columns of a CSV or Parquet file.

    Raises:
      OSError, ValueError: as of the readers.
    """
    if file.suffix.lower() == ".csv":
        try:
            _, cells = next(csv_lines(file), (1, []))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        assert not isinstance(cells, ValueError)  # a faulty line of names is raised
        return cells
    names, _ = next(parquet_batches(file, None, rows=1), ([], []))
    return list(names)


def numbers_of(cells: Sequence[Any], name: str, file: Path, first: int) -> np.ndarray:
    """Returns float64 of the cells of a column; ``first`` is the first record's row.

    Raises:
      ValueError: one that is no finite float32.
    """
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


def ids_of(cells: Sequence[Any], name: str, file: Path, first: int = 1) -> np.ndarray:
    """Returns the ids in a column; ``first`` is the row of the first record.

    Raises:
      TypeError, ValueError: a missing id, or ids of several types.
    """
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


def owners_of(cells: Sequence[Any], name: str, file: Path, first: int = 1) -> Owners:
    """Returns the owners in a column; ``first`` is the row of the first record.

    Raises:
      TypeError, ValueError: as `Owners.from_ids`.
    """
    try:
        return Owners.from_ids(
            cells,
            name=repr(name),
            where=lambda place: f"record {place + 1} (row {place + first})",
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} (of {file})") from None

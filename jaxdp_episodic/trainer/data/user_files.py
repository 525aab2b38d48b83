"""Users' files: arrays (npz), records (CSV, Parquet), and examples to predict."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import CLASS
from jaxdp_episodic.files import parquet_file
from jaxdp_episodic.files.archive import read_arrays
from jaxdp_episodic.files.json_file import repeated
from jaxdp_episodic.files.table_file import csv_lines, read_csv_columns
from jaxdp_episodic.trainer.data.folders import (
    decoded_parts,
    is_image_name,
    listed_classes,
    listed_images,
    of_files,
)
from jaxdp_episodic.trainer.data.owners import MAX_BYTES, Owners, id_array
from jaxdp_episodic.trainer.data.stored import Records, only
from jaxdp_episodic.trainer.data.table import (
    INVERTED,
    UNIT,
    ExampleTable,
    kept_numbers,
    numbered,
)

_BATCH_IMAGES = 256  # most images read at a time
_IMAGES = "images"  # array of an npz file


# --- npz ---


def load_npz(
    path: str | os.PathLike[str],
    *,
    levels: Sequence[str] = (),
    split: str | None = None,
    owner: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of an npz file of arrays; pickles are refused.

    The file contains either ``images`` (uint8 becomes float32 in [0, 1]; an axis of
    channels is added if there is none) or ``features`` (used as they are), in one of
    two layouts:

    * ``images[class, example, ...]``, with class ids in ``classes`` (C,), or numbered;
    * ``images[record, ...]`` with ``labels`` (R,), the class ids of the records. In
      this layout, an array ``classes`` is the public list of classes. Classes without a
      record are empty classes, so a class stays when its last record is removed.

    ``targets`` is optional, one number per record. More arrays, with one entry per
    record or (first layout) per class, may give coarser levels, owners or the split.

    Args:
      path: the file.
      levels: names of arrays that are levels above the class, top first.
      split: keep only entries whose ``split`` array has this value; None: all.
      owner: name of the array of ids of people who own the records; None: not known.
      max_bytes: largest uncompressed size of the arrays in bytes.

    Returns:
      Levels ``levels``, "class" and "example".

    Raises:
      TypeError: values or ids of the wrong type.
      ValueError: a file that is not npz, contains pickles or is too large, or arrays
        that do not fit together.
    """
    how = {"levels": levels, "split": split, "owner": owner}
    return npz_records(Path(path), **how, max_bytes=max_bytes).table()


def npz_records(
    path: Path,
    *,
    levels: Sequence[str] = (),
    split: str | None = None,
    owner: str | None = None,
    shape: tuple[int, ...] | None = None,  # of an example: labels may be missing
    must_be_named: bool = False,
    max_bytes: int = MAX_BYTES,
) -> Records:
    """Returns the records of an npz file; see `load_npz`."""
    arrays = read_arrays(path, max_bytes=max_bytes)
    if must_be_named:
        refuse_unnamed(path, arrays)
    given = [name for name in (_IMAGES, "features") if name in arrays]
    if len(given) != 1:
        shapes = {name: array.shape for name, array in arrays.items()}
        raise ValueError(
            f"{path} must contain labels and either images or features, has {shapes}; "
            "rename them: np.savez(FILE, images=..., labels=...)"
        )
    (name,) = given
    values, is_images, what = arrays[name], name == _IMAGES, f"{name} in {path}"
    if not values.size:
        raise ValueError(f"{what} must not be empty, got {values.shape}")
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{what} must be numbers, got {values.dtype}")
    axes = 1 if "labels" in arrays else 2
    if shape is not None:
        kinds = (shape, shape[:-1]) if is_images and shape[-1:] == (1,) else (shape,)
        axes = next((n for n in (1, 2) if values.shape[n:] in kinds), 0)
        if not axes:
            raise ValueError(
                f"{what} must be examples of shape {shape}, [record, ...] or [class, "
                f"example, ...], got {values.shape}"
            )
    elif values.ndim < axes + (1 + is_images if axes == 2 else 0):
        raise ValueError(
            f"{name} must be [class, example, ...], or come with an array labels (the "
            f"class of each record); got shape {values.shape} without labels"
        )
    grid, public = values.shape[:axes], None
    if axes == 1 and shape is None:
        public = arrays.get("classes")
        if public is not None and (levels or split is not None):
            raise ValueError(
                f"classes next to labels in {path} is a public list, which requires "
                "one level of units and all records: leave out levels and split"
            )
    for wanted in (*levels, None if split is None else "split", owner):
        if wanted is not None and wanted not in arrays:
            raise ValueError(f"{path} must hold {wanted}, has {list(arrays)}")
    arrays.setdefault("classes", np.arange(grid[0]))
    number = math.prod(grid)

    def column(name: str) -> np.ndarray:
        """Returns an array with one entry per record, repeating entries per class."""
        array = arrays[name]
        if array.shape in (grid, (number,)):
            return array.reshape(-1)
        if len(grid) == 2 and array.shape == grid[:1]:
            return np.repeat(array, grid[1])
        is_one_hot = array.ndim == 2 and array.dtype.kind in "biuf"
        hint = f"; of one-hot rows store {name}.argmax(axis=1)" if is_one_hot else ""
        said = f"{name} in {path} must have one entry for each of {grid}, got"
        raise ValueError(f"{said} {array.shape}{hint}")

    kept = np.arange(number)
    if split is not None:
        kept = np.flatnonzero(column("split") == split)
        if not kept.size:
            raise ValueError(f"split must be one that {path} has, got {split!r}")
    owners = None
    if owner is not None:
        owners = Owners.from_ids(column(owner), name=f"{owner} in {path}").take(kept)
    units = {level: column(level)[kept] for level in levels}
    # Labels of records, or of classes, which are numbered if they have no ids.
    if (by := "labels" if axes == 1 else "classes") in arrays:
        units[CLASS] = column(by)[kept]
    table = numbered(
        kept,
        column("targets")[kept] if "targets" in arrays else None,
        units=units,
        public_units=None if public is None else public.reshape(-1).tolist(),
        owners=owners,
    )
    values = values.reshape(number, *values.shape[axes:])
    whole = kept_numbers(what, as_images(values) if is_images else values)
    codes = UNIT if is_images else None
    return Records(table, functools.partial(only, lambda: [whole]), codes)


def refuse_unnamed(path: Path, arrays: Iterable[str]) -> None:
    """Raises if the classes of an npz file have no names to split them by."""
    if not {"labels", "classes"} & set(arrays):
        raise ValueError(
            f"{path} must have an array classes (class ids) to be split by class "
            "names; a class's number is not a name, because it changes when an earlier "
            "class is removed"
        )


def as_images(values: np.ndarray) -> np.ndarray:
    """Returns images as (R, H, W, channels), of codes of 8 bits or of floats."""
    if values.dtype.kind not in "bf" and values.dtype != np.uint8:
        said = f"images must be uint8, bool or floating, got {values.dtype}"
        raise TypeError(f"{said}; store numbers that are not pixels as features")
    if values.ndim not in (3, 4):
        raise ValueError(
            "images must have height, width and optionally channels, "
            f"got shape {values.shape[1:]} each"
        )
    if values.dtype.kind == "b":
        values = values * np.uint8(255)
    return values if values.ndim == 4 else values[..., None]


# --- CSV and Parquet ---


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
    """Returns the table of a CSV or Parquet file with one record per row.

    Args:
      path: a file ``.csv`` (UTF-8; the first line names the columns) or ``.parquet``. A
        column name that is a number, other than a plain whole number, is refused: it is
        probably a value of a record.
      groups: columns of unit ids, top level first; they name the levels. Ids in a CSV
        file are strings as written: "07" is not "7".
      features: columns of numbers; in a Parquet file also of lists of numbers, such as
        embeddings, all of one length in a column. They are put side by side.
      target: column of numbers to predict; None: the last group is the class.
      label: column of classes, instead of ``groups``; its level is named "class".
      public_units: the public list of ids of the only group. Ids without a record are
        empty units, so a unit stays when its last record is removed.
      owner: column of ids of people who own the records; None: not known.
      max_bytes: largest size in bytes of the file (CSV) or of its columns (Parquet).

    Returns:
      Levels ``groups``, or "class", and "example"; features (R, numbers) float32.

    Raises:
      ImportError: a Parquet file without pyarrow (extra ``[data]``).
      TypeError: one name instead of a list of names.
      ValueError: another kind of file, an unknown column, a missing id or owner, a cell
        that is not a finite number, a file that is too large, or one whose first line
        is a record; the message says where.
    """
    found = table_records(
        Path(path),
        groups=groups,
        features=features,
        target=target,
        label=label,
        public_units=public_units,
        owner=owner,
        max_bytes=max_bytes,
    )
    return found.table(max_bytes)


def table_records(
    path: Path,
    *,
    groups: Sequence[str] = (),
    features: Sequence[str] = (),
    images: str | None = None,
    target: str | None = None,
    label: str | None = None,
    public_units: Sequence[Any] | None = None,
    owner: str | None = None,
    shape: Sequence[int] = (),
    size: int | None = None,
    grey: bool = False,
    needs_units: bool = True,
    max_bytes: int = MAX_BYTES,
) -> Records:
    """Returns the records of a CSV or Parquet file; see `load_table`."""
    if label is not None:
        if groups or target is not None:
            raise ValueError(
                "label replaces groups and target: leave these out, got "
                f"{label!r}, {groups}, {target!r}"
            )
        groups = (label,)
    for name, columns in (("groups", groups), ("features", features)):
        if isinstance(columns, str):
            raise TypeError(f"{name} must be a list of column names, got {columns!r}")
    if bool(features) == (images is not None):
        said = "a table needs either features (columns of numbers) or images"
        got = f"got features={list(features)} and images={images!r}"
        raise ValueError(f"{said} (one column), {got}")
    small = [*groups, *(name for name in (target, owner) if name is not None)]
    is_short = needs_units and not groups
    if is_short or len({*small, *features}) < len(small) + len(features):
        raise ValueError(
            "groups must name columns (or label: at least one column), and every "
            "column may be used only once, got "
            f"{[*groups, *features, *small[len(groups) :]]}"
        )
    if "example" in groups and label is None:
        raise ValueError(
            "groups must not name a column 'example', which is the level of the "
            f"records themselves, got {list(groups)}; rename the column"
        )
    cells = columns_of(path, small, features, max_bytes=max_bytes)
    if _is_csv(path):
        ids = {name: cells[name] for name in small if name != target}
        refuse_ids_as_names(path, names_of_columns(path), ids)
    if images is None:
        parts = _number_parts(path, features, cells)
        codes, read = None, functools.partial(only, parts)
        number = len(cells[small[0]]) if small else sum(map(len, parts()))
    else:
        codes, read = UNIT, _read_images(path, images, tuple(shape), size, grey)
        number = len(cells[groups[0]])
    if not number:
        raise ValueError(f"{path} must have at least one record, has none")
    units = dict[str, np.ndarray]()
    for name in groups:
        for place, cell in enumerate(cells[name]):
            if cell is None or cell == "":
                where = _place(path, place)
                raise ValueError(f"{name!r} must be an id, got nothing in {where}")
        with _validation.prefixed(path):
            units[CLASS if label else name] = id_array(name, cells[name])
    public = None if not public_units else list(public_units)
    if public and not _is_csv(path) and next(iter(units.values())).dtype.kind in "iu":
        texts = (one for one in public if isinstance(one, str))
        if all(one.removeprefix("-").isdecimal() for one in texts):
            public = [int(one) if isinstance(one, str) else one for one in public]
    owners = None
    if owner is not None:
        where = functools.partial(_place, path)
        with _validation.prefixed(path):
            owners = Owners.from_ids(cells[owner], name=repr(owner), where=where)
    table = numbered(
        np.arange(number),
        None if target is None else numbers_of(cells[target], target, path),
        units=units,
        public_units=public,
        owners=owners,
    )
    return Records(table, read, codes)


def _number_parts(
    path: Path, features: Sequence[str], cells: Mapping[str, Sequence[Any]]
) -> Callable[[], Iterable[np.ndarray]]:
    """Returns a reader of columns of numbers, side by side (n, numbers), in parts."""
    if _is_csv(path):
        numbers = [numbers_of(cells[name], name, path) for name in features]
        values = np.stack(numbers, axis=1).astype(np.float32)
        return lambda: [values]

    def parts() -> Iterator[np.ndarray]:
        for before, columns in parquet_file.parquet_arrays(path, features):
            named = zip(features, columns, strict=True)
            numbers = [numbers_of(one, name, path, before) for name, one in named]
            yield np.concatenate(numbers, axis=1).astype(np.float32)

    return parts


def _read_images(
    path: Path, name: str, shape: tuple[int, ...], size: int | None, grey: bool
) -> Callable[[np.ndarray], Iterable[np.ndarray]]:
    """Returns the reader of a column of image files, or of lists of numbers."""
    first = next(parquet_file.parquet_cells(path, name, rows=1), [b""])[0]
    if isinstance(first, bytes):

        def cells() -> Iterator[np.ndarray]:
            parts = parquet_file.parquet_cells(path, name, rows=_BATCH_IMAGES)
            yield from (np.array(part, object) for part in parts)

        def files(wanted: np.ndarray) -> Iterator[io.BytesIO]:
            contents = itertools.chain.from_iterable(only(cells, wanted))
            for record, content in zip(wanted.tolist(), contents, strict=False):
                place = f"{name} in record {record + 1} of {path}"
                if not isinstance(content, bytes):
                    raise ValueError(f"{place} must be an image, got none")
                file = io.BytesIO(content)
                file.name = place  # in messages
                yield file

        return lambda wanted: decoded_parts(files(wanted), size, grey)
    if not isinstance(first, list):
        said = "must contain image files, or lists of numbers"
        has = "nothing" if first is None else type(first).__name__
        raise ValueError(f"{path}: column {name[:60]!r} {said}, has {has}")
    if not shape:
        said = f"shape must be given for the lists of numbers in column {name!r}"
        raise ValueError(f"{said} of {path}, for example 32 32 3")
    for side in shape:
        _validation.whole_number("shape", side)

    def images() -> Iterator[np.ndarray]:
        parts = parquet_file.parquet_arrays(path, [name], math.prod(shape))
        for before, (column,) in parts:
            values = as_images(column.reshape(len(column), *shape))
            yield kept_numbers(f"{name} in {path}", values, before)

    return functools.partial(only, images)


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _place(path: Path, place: int) -> str:
    """Returns the name of a record; the first one of a CSV file is in row 2."""
    return f"record {place + 1} (row {place + 1 + _is_csv(path)}) of {path}"


def columns_of(
    path: Path, small: Sequence[str], features: Sequence[str], *, max_bytes: int
) -> dict[str, list[Any]]:
    """Returns columns of a file; of features those of CSV only, which is read whole."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise ValueError(f"path must end in .csv or .parquet, got {str(path)!r}")
    wanted = [*small, *features] if _is_csv(path) else list(small)
    if _is_csv(path):
        refuse_numbers_as_names(path, names_of_columns(path), wanted)
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    with _validation.prefixed(path):
        if _is_csv(path):
            return read_csv_columns(path, wanted, max_bytes=max_bytes)
        for names, cells in parquet_file.parquet_batches(
            path, wanted, rows=parquet_file.BATCH_ROWS, max_bytes=max_bytes
        ):
            for name, column in zip(names, cells, strict=True):
                columns[name] += column
    return columns


def names_of_columns(path: Path) -> list[str]:
    """Returns the column names of a CSV or Parquet file."""
    if _is_csv(path):
        with _validation.prefixed(path):
            _, cells = next(csv_lines(path), (1, []))
        assert not isinstance(cells, ValueError)  # errors in line 1 are raised
        return cells
    return list(parquet_file.parquet_columns(path))


def numbers_of(
    cells: Sequence[Any] | np.ndarray, name: str, path: Path, before: int = 0
) -> np.ndarray:
    """Returns cells of a column as float64; ``before`` is the number of those above."""
    try:
        values = np.asarray(cells, np.float64)
    except (TypeError, ValueError, OverflowError):
        cells = np.asarray(cells, object)
        values = np.array([_number(cell) for cell in cells.flat]).reshape(cells.shape)
    bad = ~(np.abs(values) <= np.finfo(np.float32).max)
    if bad.any():
        row, *place = map(int, np.unravel_index(np.argmax(bad), bad.shape))
        cell = cells[row][place[0]] if place else cells[row]
        cell = cell.item() if isinstance(cell, np.generic) else cell
        raise ValueError(
            f"{name!r} must be finite numbers, got {_validation.shown(cell)} in "
            f"{_place(path, before + row)}"
        )
    return values


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


# --- Does the first line of a CSV file name its columns, or is it a record? ---
# Column names of features are published with a trained model, so a record in the first
# line would be published too. The messages give the column's number, not its text.


def refuse_numbers_as_names(
    file: Path, names: Sequence[str], used: Sequence[str]
) -> None:
    """Raises if a column name is a number, other than a plain whole number."""
    twice = repeated(names)
    if twice is not None and _is_number(twice):
        _refuse(file, names.index(twice), "and another are named by one number")
    is_there = set(used) <= set(names)
    for place, name in enumerate(names):
        if is_there and name not in used:
            continue
        bare = name.strip()
        if _is_number(name) and not (bare.isascii() and bare.isdecimal()):
            _refuse(file, place, "is named by a number, as in a record")
        if is_there and not bare:  # unused columns may be nameless, such as an index
            _refuse(file, place, "has no name")


def refuse_ids_as_names(
    file: Path, names: Sequence[str], ids: Mapping[str, Sequence[Any]]
) -> None:
    """Raises if the name of an id column occurs as an id in it."""
    if sorted(names) == sorted(map(str, range(len(names)))):
        return
    for name, cells in ids.items():
        if name in cells:
            _refuse(file, names.index(name), "has its name in a record below, too")


def _refuse(file: Path, place: int, what: str) -> NoReturn:
    raise ValueError(
        f"{file}: the first line must name the columns, but column {place + 1} {what}; "
        "add a line of names above the records or, if these are names, change them "
        "(a letter before a number is enough)"
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return "_" not in name  # "2019_2020" is a name, although Python parses it


# --- Examples in file order, for evaluation and prediction ---


class Examples(NamedTuple):
    """Examples in file order."""

    # File path relative to the common folder, or record number from 1.
    names: list[str]
    features: np.ndarray  # (n, *shape)
    units: np.ndarray | None  # (n,) ids of the class or task; None: not given
    targets: np.ndarray | None  # (n,) float32; None: not given


def read_examples(
    paths: Sequence[Path], *, shape: tuple[int, ...], source: Mapping[str, Any]
) -> Examples:
    """Returns the examples of class folders, of image files, or of one table."""
    if not paths:
        raise ValueError("there must be at least one file or folder, got none")
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
    first, suffix = paths[0], paths[0].suffix.lower()
    if suffix in (".npz", ".csv", ".parquet"):
        if len(paths) > 1:
            raise ValueError(f"{first} must be the only file, got {len(paths)}")
        if suffix == ".npz":
            found = npz_records(first, shape=shape, max_bytes=MAX_BYTES)
        else:
            found = _of_table(first, source)
    elif len(shape) != 3 or shape[2] not in (1, 3):
        raise ValueError(
            f"examples of shape {shape} must come in one .npz, .csv or .parquet file, "
            f"got {first}"
        )
    else:
        found = _listed(paths, shape[0] if shape[0] == shape[1] else None, shape[2] < 2)
        codes = INVERTED if source.get("inverted") else UNIT
        found = dataclasses.replace(found, codes=codes)
    if (given := found.first.shape[1:]) != shape:
        raise ValueError(f"{first} must give examples of shape {shape}, gives {given}")
    table = found.table(None if suffix == ".npz" else MAX_BYTES)
    order = np.argsort(np.asarray(found.numbers.features))
    names, units = [str(record + 1) for record in range(len(order))], None
    if found.files:
        is_in = first.is_dir()
        names = [one.name if is_in else str(one) for one in found.files]
    if len(table.level_names) > 1:
        units = table.unit_column(table.level_names[-2])[order]
        if found.files:
            pairs = zip(units.tolist(), names, strict=True)
            names = [f"{unit}/{name}" for unit, name in pairs]
    targets = None if table.targets is None else table.targets[order]
    return Examples(names, np.asarray(table.features)[order], units, targets)


def _listed(paths: Sequence[Path], size: int | None, grey: bool) -> Records:
    """Returns image files, with their classes if they lie in folders."""
    first, files = paths[0], list(paths)
    if not first.is_dir():
        for path in paths:
            if not is_image_name(path.name):
                raise ValueError(
                    f"{path} must be an image, a folder, or a file .npz, .csv or "
                    ".parquet"
                )
    elif len(paths) > 1:
        raise ValueError(f"{first} must be the only folder, got {len(paths)} paths")
    elif any(one.is_dir() and one.name[0] != "." for one in first.iterdir()):
        found = listed_classes(first, size=size, grey=grey)
        tree = found.numbers.population
        assert tree.unit_ids  # of folders, which have names
        classes = zip(tree.unit_ids[0], tree.children_counts[1], strict=True)
        if empty := [str(name) for name, number in classes if not number]:
            shown = _validation.shown(", ".join(empty))
            warnings.warn(
                f"{first}: skipping folders without images: {shown}", stacklevel=3
            )
        return found
    elif not (files := listed_images(first)):
        raise ValueError(f"{first} must hold images, or folders of them; it has none")
    table = numbered(np.arange(len(files)), units={})
    return of_files(files, table, size, grey, UNIT)


def _of_table(path: Path, source: Mapping[str, Any]) -> Records:
    """Returns the records of a CSV or Parquet file; class and target are optional."""
    features, label = source.get("features"), source.get("label")
    groups = source.get("groups") if label is None else [label]
    if not features or not groups:
        raise ValueError(
            f"{path}: the release was not trained on a table, so the columns to read "
            "are unknown; give an .npz file, or a folder of images if the release "
            "reads images"
        )
    there = names_of_columns(path)
    unit, target = str(groups[-1]), source.get("target")
    given: dict[str, Any] = {}
    if unit in there:
        given = {"groups": [unit]} if label is None else {"label": label}
    if isinstance(target, str) and target in there:
        given["target"] = target
    return table_records(
        path, features=features, needs_units=False, max_bytes=MAX_BYTES, **given
    )

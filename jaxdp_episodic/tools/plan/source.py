"""A source of data as the table ``[data]`` of a config, and what it says of itself."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.files.csv_file import csv_lines
from jaxdp_episodic.files.parquet_file import parquet_batches
from jaxdp_episodic.trainer.data.column_names import (
    refuse_ids_as_names,
    refuse_numbers_as_names,
)
from jaxdp_episodic.trainer.data.folders import (
    Images,
    decoded_image,
    listed_classes,
    listed_omniglot,
    split_folders,
)
from jaxdp_episodic.trainer.data.layouts import (
    CLASSES,
    CSV,
    MINI_IMAGENET,
    NPZ,
    OMNIGLOT,
    PARQUET,
    STORED,
    recognized,
)
from jaxdp_episodic.trainer.data.splits import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    ClassSplit,
)
from jaxdp_episodic.trainer.data.stored import load_stored, stored_splits
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import (
    load_npz,
    load_table,
    refuse_unnamed,
)

SHARE = 0.2  # of the classes to validate on, and to test on: three fifths train
SIZE = 28  # side to which pictures are brought, which the wavelets were measured at
_SALTS = 20  # keys of the hash that are tried until all parts have enough classes
_CLASSES = 5  # of a part at least: episodes are of so many by the field's custom
_LOOKED_AT = 64  # pictures that are decoded to see whether there are colours
_ROWS = 1_000  # records that are read to guess what the columns are
_DATA = "the data"
_LABELS = ("class", "label", "species", "category", "target", "y")  # of columns
_OMNIGLOT_NAME = re.compile(r"\d+_\d+\.\w+")  # number of the character, of the drawer


class Source(NamedTuple):
    """A source, described for a config.

    Attributes:
      layout: see `recognized`.
      table: ``[data]``; ``path`` relative to the config's folder.
      parts: of each split its data, without features where these are pictures.
      feature_shape: of an example.
      notes: of keys of ``[data]``, what they rest on.
    """

    layout: str
    table: dict[str, Any]
    parts: dict[str, ExampleTable]
    feature_shape: tuple[int, ...]
    notes: dict[str, str]


def described_source(path: Path, out: Path, **options: Any) -> Source:
    """Returns a source as the table of a config that is written to ``out``.

    Held out are a fifth of the classes to validate on and one to test on, by a hash of
    their names, where the source does not come in parts.

    Args:
      path: a folder of class folders, Omniglot's or mini-ImageNet's folders, a stored
        folder, an .npz, .csv or .parquet file.
      out: the config's file.
      **options: ``owner`` of any; ``size`` and ``grey`` of pictures; ``label``,
        ``features`` and ``target`` of a table. None where not given.

    Raises:
      ImportError: an extra that is not installed.
      OSError, TypeError, ValueError: a source that cannot be read.
    """
    layout = recognized(path)
    given = {name: value for name, value in options.items() if value is not None}
    allowed = {"owner"} if layout != STORED else set()
    if layout in (CLASSES, OMNIGLOT, MINI_IMAGENET):
        allowed |= {"size"} | ({"grey"} if layout == CLASSES else set())
    if layout in (CSV, PARQUET):
        allowed |= {"label", "features", "target"}
    for name in given:
        if name not in allowed:
            raise ValueError(f"{name} is for other sources than {layout}, {path}")
    where = os.path.relpath(path, out.absolute().parent).replace(os.sep, "/")
    if layout in (CLASSES, OMNIGLOT, MINI_IMAGENET):
        return _of_pictures(layout, path, where, given)
    if layout == STORED:
        parts = {split: load_stored(path, split) for split in stored_splits(path)}
        table = {"type": "Stored", "path": where}
        shape = parts[TRAIN].features.shape[1:]
        return Source(layout, table, parts, tuple(shape), {})
    notes: dict[str, str] = {}
    if layout == NPZ:
        table: dict[str, Any] = {"type": "Npz", "path": where, **given}
        data = load_npz(path, owner=given.get("owner"))
        try:
            refuse_unnamed(path)
        except ValueError as error:
            notes["path"] = f"nothing is held out, and no score is to be had: {error}"
            shape = tuple(data.features.shape[1:])
            return Source(layout, table, {TRAIN: data}, shape, notes)
    else:
        columns, notes = _columns(path, layout, given)
        table = {"type": "Table", "path": where, **columns}
        data = load_table(path, **columns)
    shape = tuple(data.features.shape[1:])
    table, parts = _split(table, data, notes)
    return Source(layout, table, parts, shape, notes)


def _of_pictures(
    layout: str, path: Path, where: str, given: Mapping[str, Any]
) -> Source:
    """Pictures are listed, and a few of them decoded."""
    owner, size = given.get("owner"), int(given.get("size", SIZE))
    notes: dict[str, str] = {}
    channels = {OMNIGLOT: 1, MINI_IMAGENET: 3}.get(layout, 0)
    if layout == MINI_IMAGENET:
        listed = {
            split: listed_classes(folder, size=size, owner=owner)
            for split, folder in split_folders(path).items()
        }
        _check_apart(path, listed)
    elif layout == OMNIGLOT:
        listed = {TRAIN: listed_omniglot(path, size=size, owner=owner)}
        for file in listed[TRAIN].paths:
            if not _OMNIGLOT_NAME.fullmatch(file.name):
                raise ValueError(
                    f"{path} must hold a folder of images for each class, but the "
                    f"images are deeper, such as {file}; name the folder whose folders "
                    f"are the classes, such as {file.parent.parent}"
                )
    else:
        listed = {TRAIN: listed_classes(path, size=size, owner=owner)}
    is_grey = _look_at(listed[TRAIN], size)
    table: dict[str, Any] = {"type": _TYPES[layout], "path": where, "size": size}
    if layout == CLASSES:
        table["grey"] = given.get("grey", is_grey)
        channels = 1 if table["grey"] else 3
        if "grey" not in given and is_grey:
            notes["grey"] = f"from {_DATA}: no colour in those pictures looked at"
    if owner is not None:
        table["owner"] = owner
    parts = {s: one.table(np.arange(len(one.paths))) for s, one in listed.items()}
    if layout != MINI_IMAGENET:
        table, parts = _split(table, parts[TRAIN], notes)
    return Source(layout, table, parts, (size, size, channels), notes)


_TYPES = {CLASSES: "ClassFolders", OMNIGLOT: "Omniglot", MINI_IMAGENET: "MiniImageNet"}


def _check_apart(path: Path, listed: Mapping[str, Images]) -> None:
    """Refuses splits that have classes in common: they tell nothing of new ones."""
    for split, found in listed.items():
        common = sorted(set(found.units["class"]) & set(listed[TRAIN].units["class"]))
        if split != TRAIN and common:
            raise ValueError(
                f"{path}: {split} must have other classes than {TRAIN}, as a model is "
                f"for new classes, but both have {str(common[0])!r} ({len(common)} in "
                f"all); name {split_folders(path)[TRAIN]}, whose classes are then "
                "split"
            )


def _look_at(found: Images, size: int) -> bool:
    """Whether a few pictures, from all over, have no colour; they must be readable."""
    places = np.linspace(0, len(found.paths) - 1, _LOOKED_AT).astype(int)
    pixels = [
        decoded_image(found.paths[i], size, False, found.paths[i])
        for i in np.unique(places).tolist()
    ]
    return all(np.array_equal(p.min(axis=-1), p.max(axis=-1)) for p in pixels)


def _split(
    table: dict[str, Any], data: ExampleTable, notes: dict[str, str]
) -> tuple[dict[str, Any], dict[str, ExampleTable]]:
    """The table with shares of its classes, and the parts.

    Each part has at least five classes with two examples, or its share of them where
    that is less, or two; the key of the hash is the first that does it. Who is trained
    on then follows from sizes: another key than the first is noted.
    """
    shares = {VALIDATION: SHARE, TEST: SHARE}
    wanted = min(_CLASSES, int(SHARE * len(_sizes(data))))
    tries = [(fewest, salt) for fewest in (wanted, 2) for salt in range(_SALTS)]
    for fewest, number in tries:
        salt = str(number) if number else ""
        split = ClassSplit(**shares, salt=salt)
        try:
            parts = {name: split.part(data, name) for name in SPLITS}
        except ValueError:
            continue
        if all(_num_filled(part) >= max(fewest, 2) for part in parts.values()):
            salted = {"split_salt": salt} if salt else {}
            if salt:
                notes["split_salt"] = (
                    f"from {_DATA}: the first that leaves every part enough classes; "
                    "private, as it says who is trained on: take one chosen before"
                )
            return {**table, **shares, **salted}, parts
    raise ValueError(
        f"{table['path']} must have classes to train on, to validate and to test on, "
        f"two of two examples each; of its {len(_sizes(data))} classes "
        f"{_num_filled(data)} have two examples, and parts that are drawn by a hash "
        "need some ten"
    )


def _num_filled(data: ExampleTable) -> int:
    """Classes with two examples or more."""
    return int(np.count_nonzero(_sizes(data) > 1))


def _sizes(data: ExampleTable) -> np.ndarray:
    """Examples of each class, or of each task."""
    return data.population.children_counts[-1]


def _columns(
    path: Path, layout: str, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The columns of a table: those given, the others as guessed from some records.

    Numbers are features, but for those that number the records.
    """
    records = _records(path, layout)
    if len(records) < 2:
        raise ValueError(f"{path} must have records below a line of column names")
    names, rows = records[0], records[1:]
    if len(names) == 1 and ";" in names[0]:
        raise ValueError(f"cells of {path} must be separated by commas, not by ;")
    cells = dict(zip(names, zip(*rows, strict=True), strict=True))
    others = {name: given[name] for name in ("target", "owner") if name in given}
    features, notes = tuple(given.get("features", ())), {}
    named = {*features, *others.values()}
    if layout == CSV:
        _check_names(path, names, cells, {*named, *filter(None, [given.get("label")])})
    for name in (*named, *filter(None, [given.get("label")])):
        if name not in names:
            raise ValueError(f"{path} has no column {name!r}; it has {list(names)}")
    free = {name: column for name, column in cells.items() if name not in named}
    label = given.get("label")
    if label is None:
        label = _label(path, free)
        notes["label"] = f"guessed from {_DATA}: the column whose values repeat"
    free.pop(label, None)
    if not features:
        features, left_out = _numeric(path, free)
        notes["features"] = f"guessed from {_DATA}: all columns of numbers"
        if left_out:
            notes["features"] += f" but {', '.join(left_out)}"
    if "target" in others:  # each task is a unit of the level that its column names
        notes = {"groups" if k == "label" else k: note for k, note in notes.items()}
        return {"groups": (label,), "features": features, **others}, notes
    return {"label": label, "features": features, **others}, notes


def _check_names(
    path: Path, names: Sequence[str], cells: Mapping[str, Sequence[Any]], used: set[str]
) -> None:
    """Refuses a record as the line of names, before an error shows what is in it."""
    numbers = {n for n, c in cells.items() if _are_numbers(c)}
    counting = {n for n in numbers if _counts(cells[n])}
    refuse_numbers_as_names(path, names, [*used, *(numbers - counting)])
    texts = {n: c for n, c in cells.items() if n not in numbers}
    refuse_ids_as_names(path, names, texts)


def _label(path: Path, cells: Mapping[str, Sequence[Any]]) -> str:
    """The one column whose values repeat: texts, else whole numbers."""
    texts = [n for n, c in cells.items() if not _are_numbers(c) and _repeats(c)]
    whole = [
        name
        for name, column in cells.items()
        if _are_numbers(column)
        and all(float(cell).is_integer() for cell in column)
        and _repeats(column)
    ]
    found = texts or whole
    by_name = [n for n in (*texts, *whole) if str(n).strip().lower() in _LABELS]
    if len(found) != 1 and len(by_name) == 1:
        found = by_name
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"no column of {path} has values that repeat, as the names of classes (or "
            f"tasks) do; it has {list(cells)}"
        )
    each = ", ".join(
        f"{name} ({len(set(cells[name]))} values in {len(cells[name])} records)"
        for name in found
    )
    raise ValueError(
        f"label must be given (--label COLUMN), which column of {path} names the class "
        f"(or task) of a record; values repeat in {each}"
    )


def _numeric(
    path: Path, cells: Mapping[str, Sequence[Any]]
) -> tuple[tuple[str, ...], list[str]]:
    """The columns of numbers, and those that only number the records.

    Raises:
      ValueError: none; or one of numbers with something else among them, which must
        not be left out in silence.
    """
    features, left_out = [], []
    for name, column in cells.items():
        if not _are_numbers(column):
            odd = [row for row, cell in enumerate(column) if not _are_numbers([cell])]
            if 2 * len(odd) < len(column):
                raise ValueError(
                    f"column {name!r} of {path} has numbers, but {column[odd[0]]!r} in "
                    f"record {odd[0] + 1}; fill it, or name others by --features"
                )
        elif _counts(column):
            left_out.append(f"{name}, which numbers the records")
        else:
            features.append(name)
    if not features:
        raise ValueError(
            f"{path} must have columns of numbers, to be features, beside the label; "
            f"others are {list(cells)}"
        )
    return tuple(features), left_out


def _records(path: Path, layout: str) -> list[Sequence[Any]]:
    """Column names, and the first records."""
    if layout == CSV:
        found: list[Sequence[Any]] = []
        for _, cells in itertools.islice(csv_lines(path), _ROWS):
            if isinstance(cells, ValueError):
                raise cells
            found.append(cells)
        return found
    batches = itertools.islice(parquet_batches(path, None, rows=_ROWS), 2)
    (names, _), *filled = batches  # the first has no rows
    return [names, *(row for _, cells in filled for row in zip(*cells, strict=True))]


def _are_numbers(cells: Sequence[Any]) -> bool:
    try:
        return all(np.isfinite(float(cell)) for cell in cells)
    except (TypeError, ValueError):
        return False


def _repeats(cells: Sequence[Any]) -> bool:
    return len(set(cells)) < len(cells)


def _counts(cells: Sequence[Any]) -> bool:
    """Whether these are successive whole numbers, in any order."""
    numbers = sorted(map(float, cells))
    return len(cells) > 2 and numbers == [numbers[0] + i for i in range(len(cells))]

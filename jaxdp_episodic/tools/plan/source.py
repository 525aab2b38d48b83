"""A source of data as the table ``[data]`` of a config, with its sizes."""

from __future__ import annotations

import collections
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.spec import spec_fields, spec_from_dict
from jaxdp_episodic.files import parquet_file
from jaxdp_episodic.files.column_folder import stored_splits
from jaxdp_episodic.files.table_file import column_places, csv_lines
from jaxdp_episodic.trainer.data import folders as layouts, user_files
from jaxdp_episodic.trainer.data.sources import LAYOUTS, SOURCES
from jaxdp_episodic.trainer.data.splits import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    ClassSplit,
    rows_held_out,
    with_rotations,
    without_rows,
)
from jaxdp_episodic.trainer.data.stored import Records
from jaxdp_episodic.trainer.data.table import ExampleTable

SHARE = 0.2  # share of the classes for validation, and for the test
SIZE = 28  # side of scaled pictures, in pixels; the wavelets were measured at it
WAYS = 5  # usual number of classes per episode in the field
_SALTS = 400  # keys of the hash that are tried until all parts have enough classes
_MANY = 100  # from this many classes, hardly any key gives exactly the wanted numbers
_PARTS = (1.0, 0.9, 0.75)  # share of its wanted classes that each part must get
_LOOKED_AT = 64  # pictures that are decoded to find colours
_ROWS = 1_000  # records that are read to guess the roles of columns
_DATA = "the data"
_LABELS = ("class", "label", "species", "category")  # of columns
_LIKELY_LABELS = (*_LABELS, "target", "y")  # these may be regression targets, too
_OMNIGLOT_NAME = re.compile(r"\d+_\d+\.\w+")  # number of the character, of the drawer


class Source(NamedTuple):
    """A source of data, described for a config."""

    layout: str  # see `recognized`
    table: dict[str, Any]  # ``[data]``; ``path`` relative to the config's folder
    parts: dict[str, ExampleTable]  # split -> data, without duplicates unless kept
    notes: dict[str, str]  # key of ``[data]`` -> how its value was chosen
    duplicates: tuple[str, ...] = ()  # names of training examples also held out
    keeps_duplicates: bool = False  # they stay in the training data


def described_source(
    path: Path,
    out: Path,
    *,
    ways: int | None = None,
    keep_duplicates: bool = False,
    **options: Any,
) -> Source:
    """Returns a source as the table of a config that is written to ``out``."""
    layout = layouts.recognized(path)
    kind = LAYOUTS[layout]
    known = spec_fields(kind)
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known:
            raise ValueError(f"--{name} is for other sources than {layout}, {path}")
    base = out.absolute().parent

    def relative(place: Path) -> str:
        return os.path.relpath(place, base).replace(os.sep, "/")

    held_out = {n: relative(given.pop(n)) for n in (VALIDATION, TEST) if n in given}
    rotated = {"rotations": True} if given.pop("rotations", False) else {}
    notes: dict[str, str] = {}
    files, own, data = list[Path](), {TRAIN}, None
    if layout == layouts.STORED:
        own = set(stored_splits(path))
    elif layout == layouts.NPZ:
        data = user_files.load_npz(path, **given)
        shape = data.features.shape[1:]
        if len(shape) == 3 and shape[0] in (1, 3, 4) and min(shape[1:]) > 4:
            raise ValueError(
                f"{path}: images must be height x width x channels, got {shape} each; "
                "save them as images.transpose(0, 2, 3, 1)"
            )
    elif "size" in known:
        given, listed = _pictures(layout, path, given, notes)
        own, data, files = set(listed), listed[TRAIN].numbers, listed[TRAIN].files
    else:
        given, notes = _columns(path, layout, given)
        data = user_files.load_table(path, **given)
    if VALIDATION in known and not held_out and data is not None:
        try:
            if layout == layouts.NPZ:
                with np.load(path) as arrays:
                    user_files.refuse_unnamed(path, arrays.files)
        except ValueError as error:
            notes["path"] = f"nothing is held out, and there is no score: {error}"
        else:
            held_out = _shares(data, ways, notes, path)
    table = {"type": kind.__name__, "path": relative(path)}
    table |= {**given, **held_out, **rotated}
    read: Any = spec_from_dict(SOURCES, {"version": 1, **table}, where="data")
    splits = [split for split in SPLITS if split in own | held_out.keys()]
    parts = {split: read.read(split, base) for split in splits}
    names = list[str]()
    if layout != layouts.STORED:
        train, *others = parts.values()
        rows = rows_held_out(train, others)
        if data is not None and files:  # features of a listing are places of its files
            split = getattr(read, "class_split", None)
            found = split.part(data, TRAIN) if split else data
            names = [str(files[int(found.features[row])]) for row in rows]
        elif rows.size:
            level = train.level_names[-2]
            ids = train.unit_column(level)[rows].tolist()
            names = [f"an example of {level} {one!r}" for one in ids]
        if rows.size and not keep_duplicates:
            parts[TRAIN] = without_rows(train, rows)
    if rotated:
        parts = {split: with_rotations(part) for split, part in parts.items()}
    keeps = bool(names) and keep_duplicates
    return Source(layout, table, parts, notes, tuple(names), keeps)


def _pictures(
    layout: str, path: Path, given: Mapping[str, Any], notes: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Records]]:
    """Keys of the table, and the listed pictures of each split."""
    owner, size = given.get("owner"), int(given.get("size", SIZE))
    list_of: Callable[..., Records] = layouts.listed_classes
    if layout == layouts.OMNIGLOT:
        list_of = layouts.listed_omniglot
    is_split = layout == layouts.MINI_IMAGENET
    folders = layouts.split_folders(path) if is_split else {TRAIN: path}
    listed = {s: list_of(one, size=size, owner=owner) for s, one in folders.items()}
    found = listed[TRAIN]
    for split, other in listed.items():
        ids = [one.numbers.unit_column("class").tolist() for one in (other, found)]
        common = sorted(set(ids[0]).intersection(ids[1]))
        if split != TRAIN and common:
            raise ValueError(
                f"{path}: {split} and {TRAIN} must have different classes, as models "
                f"are evaluated on new classes, but both have {str(common[0])!r} "
                f"({len(common)} in all); give {folders[TRAIN]}, whose classes are "
                "then split"
            )
    for file in found.files if layout == layouts.OMNIGLOT else ():
        if not _OMNIGLOT_NAME.fullmatch(file.name):
            raise ValueError(
                f"{path} must hold a folder of images for each class, but the images "
                f"are deeper, such as {file}; give the folder that holds the folders "
                f"of the classes, such as {file.parent.parent}"
            )
    fields: dict[str, Any] = {"size": size}
    if layout == layouts.CLASSES:
        fields["grey"] = given.get("grey", _are_grey(found, size))
        if "grey" not in given and fields["grey"]:
            notes["grey"] = f"from {_DATA}: a sample of the pictures has no colour"
    return fields | ({} if owner is None else {"owner": owner}), listed


def _are_grey(found: Records, size: int) -> bool:
    """Whether a sample of the pictures has no colour."""
    places = np.linspace(0, len(found.files) - 1, _LOOKED_AT).astype(int)
    paths = [found.files[i] for i in np.unique(places).tolist()]
    try:
        pixels = np.concatenate([*layouts.decoded_parts(paths, size, False)])
    except ValueError:  # the loader names all unreadable files
        return False
    return np.array_equal(pixels.min(axis=-1), pixels.max(axis=-1))


def _shares(
    data: ExampleTable, ways: int | None, notes: dict[str, str], path: Path
) -> dict[str, Any]:
    """The keys of ``[data]`` that hold out classes: shares, and a salt if needed."""
    sizes = data.population.children_counts[-1]
    ids = (data.population.unit_ids or ())[len(data.level_names) - 2]
    names = [name for name, size in zip(ids.tolist(), sizes, strict=True) if size > 1]
    if len(names) < 3:
        raise ValueError(
            f"{path}: {len(names)} of its {len(sizes)} classes (or tasks) have two "
            "examples, too few to train on some and to evaluate on others. Give "
            "held-out data by --validation PATH (and --test PATH), or train a "
            'classifier: learner.kind = "classifier" in a config (docs/training.md)'
        )
    classes, fifth = len(names), round(SHARE * len(names))
    # Validation and test classes, and ways. All stages of a run are compared if there
    # are more validation classes than ways.
    choices = [
        (max(fifth, each + 1), max(fifth, each), each)
        for each in ((ways,) if ways else range(WAYS, 1, -1))
    ]
    few = classes / 2 if classes >= 10 and not ways else 0  # to train on
    choices = [c for c in choices if classes - c[0] - c[1] >= max(c[2], few)]
    each = ways or 2
    for validation in (each + 1, each):  # without test classes
        if classes - validation >= max(each, validation):
            choices.append((validation, 0, each))
    if not choices:
        notes["path"] = notes["held out"] = (
            f"nothing is held out, and there is no score: {classes} classes are too "
            "few to hold some out; give held-out data by --validation PATH"
        )
        return {}
    validation, test, each = choices[0]
    wanted = {VALIDATION: validation, TEST: test, TRAIN: classes - validation - test}
    wanted = {name: number for name, number in wanted.items() if number}
    fewest = {VALIDATION: each + (validation > each), TEST: each, TRAIN: each}
    shares = {n: round(k / classes, 3) for n, k in wanted.items() if n != TRAIN}
    shares |= {n: SHARE for n in shares if wanted[n] == fifth}
    for part, number in itertools.product(_PARTS[classes >= _MANY :], range(_SALTS)):
        salt = str(number) if number else ""
        found = collections.Counter(
            map(ClassSplit(**shares, salt=salt).split_of, names)
        )
        least = {n: max(fewest[n], int(part * k)) for n, k in wanted.items()}
        if any(found[name] < number for name, number in least.items()):
            continue
        if not salt:
            return shares
        # It depends on sizes of the data.
        notes["split_salt"] = (
            f"from {_DATA}: the first that leaves every part enough classes; private, "
            "as it tells which classes are trained on: use one that was chosen before"
        )
        return shares | {"split_salt": salt}
    raise ValueError(
        f"{path}: no key of the hash splits its {len(names)} classes (or tasks) with "
        "two examples into large enough parts for training, validation and test; give "
        "held-out data by --validation PATH and --test PATH"
    )


def _columns(
    path: Path, layout: str, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The columns of a table and notes on them; missing roles are guessed."""
    others = {name: given[name] for name in ("target", "owner") if name in given}
    features, notes = tuple(given.get("features", ())), {}
    label = given.get("label")
    roles = {*others.values(), *([label] if label else [])}
    used = roles | {*features}
    kinds = parquet_file.parquet_columns(path) if layout == layouts.PARQUET else {}
    lists = [n for n, k in kinds.items() if k == parquet_file.LISTS and n not in roles]
    names, *rows = _records(path, kinds, used - {*lists}) or [()]
    if len(rows) < 1:
        raise ValueError(f"{path} must have records below a line of column names")
    cells = dict(zip(names, zip(*rows, strict=True), strict=True))
    if layout == layouts.CSV:
        # First, as later errors show names, which may be the cells of a record.
        numbers = {name for name, one in cells.items() if _are_numbers(one)}
        numbering = {name for name in numbers if _number_records(cells[name])}
        user_files.refuse_numbers_as_names(path, names, [*used, *(numbers - numbering)])
        texts = {name: one for name, one in cells.items() if name not in numbers}
        user_files.refuse_ids_as_names(path, names, texts)
    column_places([*names, *lists], used)
    free = {name: one for name, one in cells.items() if name not in used - {label}}
    if label is None:
        label = _label(path, free)
        notes["label"] = f"guessed from {_DATA}: the column whose values repeat"
    free.pop(label, None)
    if not features:
        features, left_out = _numeric(path, free, lists)
        but = f" but {', '.join(left_out)}" if left_out else ""
        notes["features"] = f"guessed from {_DATA}: all columns of numbers{but}"
    if "target" in others:  # the column of tasks becomes a level
        notes = {"groups" if k == "label" else k: note for k, note in notes.items()}
        return {"groups": (label,), "features": features, **others}, notes
    return {"label": label, "features": features, **others}, notes


def _label(path: Path, cells: Mapping[str, Sequence[Any]]) -> str:
    """The one column with repeated values: by name, of texts, or of whole numbers."""
    texts, whole = [], []
    for name, column in cells.items():
        if len(set(column)) == len(column):
            continue
        if not _are_numbers(column):
            texts.append(name)
        elif all(float(cell).is_integer() for cell in column):
            whole.append(name)
    found = texts or whole
    for names, may_be_taken in ((_LIKELY_LABELS, len(found) != 1), (_LABELS, True)):
        by_name = [n for n in (*texts, *whole) if str(n).strip().lower() in names]
        if len(by_name) == 1 and may_be_taken:
            found = by_name
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"{path} must have a column of text or whole numbers with repeated values, "
            f"the classes (or tasks); name another by --label, of {list(cells)}"
        )
    each = ", ".join(
        f"{name} ({len(set(cells[name]))} values in {len(cells[name])} records)"
        for name in found
    )
    raise ValueError(
        f"--label COLUMN must be given, the column of {path} with the class (or task) "
        f"of each record; values repeat in {each}"
    )


def _numeric(
    path: Path, cells: Mapping[str, Sequence[Any]], lists: Sequence[str]
) -> tuple[tuple[str, ...], list[str]]:
    """The columns of numbers, and those left out because they number the records."""
    features, left_out = [], []
    for name, column in cells.items():
        odd = []
        if not _are_numbers(column):
            odd = [row for row, cell in enumerate(column) if not _are_numbers([cell])]
        if not odd and _number_records(column):
            left_out.append(f"{name}, which numbers the records")
        elif not odd:
            features.append(name)
        elif 2 * len(odd) < len(column):
            raise ValueError(
                f"column {name!r} must hold numbers, got {column[odd[0]]!r} in record "
                f"{odd[0] + 1}; fill it, or name others by --features"
            )
    features += lists
    if not features:
        raise ValueError(
            f"{path} must have columns of numbers besides the label, as features; its "
            f"columns are {user_files.names_of_columns(path)}"
        )
    return tuple(features), left_out


def _records(path: Path, kinds: dict[str, str], used: Set[str]) -> list[Any]:
    """The column names, then the first records; no lists or files, unless used."""
    if path.suffix.lower() == ".csv":
        found: list[Sequence[Any]] = []
        for _, cells in itertools.islice(csv_lines(path), _ROWS):
            if isinstance(cells, ValueError):
                raise cells
            found.append(cells)
        return found
    kept = [n for n, k in kinds.items() if k == parquet_file.PLAIN or n in used] or None
    batches = parquet_file.parquet_batches(path, kept, rows=_ROWS)
    (names, _), *filled = itertools.islice(batches, 2)  # the first has no rows
    return [names, *(row for _, cells in filled for row in zip(*cells, strict=True))]


def _are_numbers(cells: Sequence[Any]) -> bool:
    try:
        return all(map(math.isfinite, map(float, cells)))
    except (TypeError, ValueError):
        return False


def _number_records(cells: Sequence[Any]) -> bool:
    """Whether these are consecutive whole numbers, in any order."""
    numbers = sorted(map(float, cells))
    return len(cells) > 2 and numbers == [numbers[0] + i for i in range(len(cells))]

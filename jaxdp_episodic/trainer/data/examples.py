"""Named examples from files, in file order, for evaluation and prediction."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data import folders, user_files
from jaxdp_episodic.trainer.data.owners import MAX_BYTES
from jaxdp_episodic.trainer.data.stored import Records
from jaxdp_episodic.trainer.data.table import INVERTED, UNIT, numbered

_TABLES = (".csv", ".parquet")


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
    if suffix == ".npz" or suffix in _TABLES:
        if len(paths) > 1:
            raise ValueError(f"{first} must be the only file, got {len(paths)}")
        if suffix == ".npz":
            found = user_files.npz_records(first, shape=shape, max_bytes=MAX_BYTES)
        else:
            found = _of_table(first, source)
    elif len(shape) != 3 or shape[2] not in (1, 3):
        raise ValueError(
            f"examples of shape {shape} must come in one .npz, .csv or .parquet file, "
            f"got {first}"
        )
    else:
        found = _images(paths, shape[0] if shape[0] == shape[1] else None, shape[2] < 2)
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


def _images(paths: Sequence[Path], size: int | None, grey: bool) -> Records:
    """Returns image files, with their classes if they lie in folders."""
    first, files = paths[0], list(paths)
    if not first.is_dir():
        for path in paths:
            if not folders.is_image_name(path.name):
                raise ValueError(
                    f"{path} must be an image, a folder, or a file .npz, .csv or "
                    ".parquet"
                )
    elif len(paths) > 1:
        raise ValueError(f"{first} must be the only folder, got {len(paths)} paths")
    elif any(one.is_dir() and one.name[0] != "." for one in first.iterdir()):
        found = folders.listed_classes(first, size=size, grey=grey)
        tree = found.numbers.population
        assert tree.unit_ids  # of folders, which have names
        classes = zip(tree.unit_ids[0], tree.children_counts[1], strict=True)
        if empty := [str(name) for name, number in classes if not number]:
            shown = _validation.shown(", ".join(empty))
            warnings.warn(
                f"{first}: skipping folders without images: {shown}", stacklevel=3
            )
        return found
    elif not (files := folders.listed_images(first)):
        raise ValueError(f"{first} must hold images, or folders of them; it has none")
    table = numbered(np.arange(len(files)), units={})
    return folders.of_files(files, table, size, grey, UNIT)


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
    there = user_files.names_of_columns(path)
    unit, target = str(groups[-1]), source.get("target")
    given: dict[str, Any] = {} if label is None else {"label": label}
    if unit not in there:
        given = {}
    elif label is None:
        given = {"groups": [unit]}
    if isinstance(target, str) and target in there:
        given["target"] = target
    return user_files.table_records(
        path, features=features, needs_units=False, max_bytes=MAX_BYTES, **given
    )

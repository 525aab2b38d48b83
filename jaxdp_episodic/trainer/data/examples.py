"""Named examples from files, in file order, for evaluation and prediction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import read_arrays
from jaxdp_episodic.trainer.data import folders, user_files
from jaxdp_episodic.trainer.data.owners import MAX_BYTES, id_array
from jaxdp_episodic.trainer.data.stored_features import CODE_VALUES, INVERTED, UNIT

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
        read = _of_arrays if suffix == ".npz" else _of_table
        return read(first, shape, source)
    if len(shape) != 3 or shape[2] not in (1, 3):
        raise ValueError(
            f"examples of shape {shape} must come in one .npz, .csv or .parquet file, "
            f"got {first}"
        )
    files, names, units = _images(paths)
    if 4 * len(files) * math.prod(shape) > MAX_BYTES:
        raise ValueError(
            f"images must take at most {MAX_BYTES} bytes, got {len(files)}"
        )
    size = shape[0] if shape[0] == shape[1] else None
    parts = folders.decoded_parts(files, size, shape[2] == 1, shape)
    codes = np.concatenate(list(parts))
    values = CODE_VALUES[INVERTED if source.get("inverted") else UNIT]
    return Examples(names, values[codes], units, None)


def _images(paths: Sequence[Path]) -> tuple[list[Path], list[str], np.ndarray | None]:
    """Returns image files, their names, and their classes if they lie in folders."""
    first = paths[0]
    if not first.is_dir():
        for path in paths:
            if not folders.is_image_name(path.name):
                raise ValueError(
                    f"{path} must be an image, a folder, or a file .npz, .csv or "
                    ".parquet"
                )
        return list(paths), [str(path) for path in paths], None
    if len(paths) > 1:
        raise ValueError(f"{first} must be the only folder, got {len(paths)} paths")
    if any(one.is_dir() and one.name[0] != "." for one in first.iterdir()):
        found = folders.listed_classes(first)
        tree = found.table.population
        assert tree.unit_ids  # of folders, which have names
        classes = zip(tree.unit_ids[0], tree.children_counts[1], strict=True)
        if empty := [str(name) for name, number in classes if not number]:
            shown = _validation.shown(", ".join(empty))
            warnings.warn(
                f"{first}: skipping folders without images: {shown}", stacklevel=3
            )
        units = found.table.unit_column("class")
        files = [found.paths[place] for place in found.table.features[:].tolist()]
        pairs = zip(units.tolist(), files, strict=True)
        return files, [f"{unit}/{path.name}" for unit, path in pairs], units
    files = folders.listed_images(first)
    if not files:
        raise ValueError(f"{first} must hold images, or folders of them; it has none")
    return files, [path.name for path in files], None


def _of_arrays(
    path: Path, shape: tuple[int, ...], source: Mapping[str, Any]
) -> Examples:
    """Returns the examples of an npz file: layout of `load_npz`, labels optional."""
    arrays = read_arrays(path, max_bytes=MAX_BYTES)
    name, values = user_files.images_or_features(path, arrays)
    is_images = name == "images"
    kinds = [shape, shape[:-1]] if is_images and shape[-1:] == (1,) else [shape]
    axes = next((n for n in (1, 2) if values.shape[n:] in kinds and values.size), 0)
    if not axes:
        raise ValueError(
            f"{name} in {path} must be examples of shape {shape}, [record, ...] or "
            f"[class, example, ...], got {values.shape}"
        )
    grid = values.shape[:axes]
    number = math.prod(grid)
    values = values.reshape(number, *values.shape[axes:])
    if is_images:
        values = user_files.scaled_images(values)
    units, targets = arrays.get("labels"), arrays.get("targets")
    if axes == 2:
        classes = arrays.get("classes")
        units = np.repeat(np.arange(grid[0]) if classes is None else classes, grid[1])
    for name, column in (("labels", units), ("targets", targets)):
        if column is not None and column.size != number:
            raise ValueError(
                f"{name} in {path} must be one for each of {number} records, got "
                f"{column.shape}"
            )
    return Examples(
        [str(record + 1) for record in range(number)],
        values,
        None if units is None else id_array("labels", units.reshape(-1)),
        None if targets is None else targets.reshape(-1).astype(np.float32),
    )


def _of_table(
    path: Path, shape: tuple[int, ...], source: Mapping[str, Any]
) -> Examples:
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
    others = [name for name in (unit, target) if name in there]
    cells = user_files.columns_of(path, others, features, max_bytes=MAX_BYTES)
    width, read = user_files.number_columns(path, features, cells)
    if (width,) != shape:
        raise ValueError(f"{path} must give examples of shape {shape}")
    parts, size = [], 0
    for part in read():
        parts.append(part)
        if (size := size + part.nbytes) > MAX_BYTES:
            raise ValueError(f"{path} must hold at most {MAX_BYTES} bytes")
    values = np.concatenate(parts)
    if not len(values):
        raise ValueError(f"{path} must have at least one record, has none")
    targets = units = None
    if isinstance(target, str) and target in others:
        targets = user_files.numbers_of(cells[target], target, path).astype(np.float32)
    if unit in others:
        units = user_files.ids_of(cells[unit], unit, path)
    return Examples(list(map(str, range(1, len(values) + 1))), values, units, targets)

"""A user's arrays in an npz file, which is not trusted."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.files.archive import read_arrays

MAX_BYTES = 4 * 2**30  # of the arrays, uncompressed


def load_npz(
    path: str | os.PathLike[str],
    *,
    levels: Sequence[str] = (),
    split: str | None = None,
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
    record or (first layout) a class, may name coarser levels or the split.

    Args:
      path: the file.
      levels: names of arrays that are levels above the class, top first.
      split: keep only entries whose ``split`` array says so; None: all.
      max_bytes: most bytes that the arrays may take uncompressed.

    Returns:
      Levels ``levels``, "class" and "example".

    Raises:
      TypeError: values or ids of the wrong type.
      ValueError: a file that is no npz, holds pickles or too much, or arrays that do
        not fit together.
    """
    arrays = read_arrays(Path(path), max_bytes=max_bytes)
    given = [name for name in ("images", "features") if name in arrays]
    if len(given) != 1:
        raise ValueError(
            f"{path} must hold images or features, one of the two, has {list(arrays)}"
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
        if values.ndim < 3:
            raise ValueError(
                f"{given[0]} must be [class, example, ...], or come with labels; "
                f"got shape {values.shape}"
            )
        grid = values.shape[:2]
        labels = arrays.get("classes", np.arange(grid[0]))
        values = values.reshape(-1, *values.shape[2:])
    if given[0] == "images":
        values = scaled_images(values)
    columns = {name: _column(arrays, name, grid, path) for name in levels}
    columns["class"] = _spread("labels or classes", labels, grid, path)
    targets = None
    if "targets" in arrays:
        targets = _spread("targets", arrays["targets"], grid, path)
    if split is not None:
        kept = _column(arrays, "split", grid, path) == split
        if not kept.any():
            raise ValueError(f"split must be one that {path} has, got {split!r}")
        values = values[kept]
        columns = {name: column[kept] for name, column in columns.items()}
        targets = None if targets is None else targets[kept]
    return ExampleTable.from_records(
        values,
        targets,
        units=columns,
        public_units=None if public is None else public.reshape(-1).tolist(),
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


def _column(arrays: dict[str, Any], name: str, grid: tuple[int, ...], path: Any) -> Any:
    if name not in arrays:
        raise ValueError(f"{path} must hold {name}, has {list(arrays)}")
    return _spread(name, arrays[name], grid, path)


def _spread(
    name: str, array: np.ndarray, grid: tuple[int, ...], path: Any
) -> np.ndarray:
    """One entry a record, of an array with one a record or one a class."""
    if array.shape == grid:
        return array.reshape(-1)
    if array.shape == (math.prod(grid),):
        return array
    if len(grid) == 2 and array.shape == grid[:1]:
        return np.repeat(array, grid[1])
    raise ValueError(
        f"{name} in {path} must have one entry for each of {grid}, got {array.shape}"
    )

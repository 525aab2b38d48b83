"""What can be imported: folders of images, npz archives, Parquet files."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import array_batches, array_headers, read_arrays
from jaxdp_episodic.files.parquet_arrays import (
    parquet_files,
    parquet_kind,
    parquet_lists,
    parquet_numbers,
)
from jaxdp_episodic.trainer.data.folders import (
    DECODING,
    Images,
    check_alike,
    decoded_image,
)
from jaxdp_episodic.trainer.data.splits import ClassSplit
from jaxdp_episodic.trainer.data.stored import Records
from jaxdp_episodic.trainer.data.stored_features import INVERTED, UNIT
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import (
    arranged,
    ids_of,
    owners_of,
    parquet_columns,
    scaled_images,
)

_BATCH_BYTES = 2**26  # most that a batch takes in memory
_BATCH_IMAGES = 256  # most that are decoded at a time
_BATCH_ROWS = 2**16  # most rows of numbers or ids
_BYTE = np.dtype(np.uint8)
_FLOAT = np.dtype(np.float32)


def image_records(found: Images) -> Records:
    """Returns the records of a listing of image files, which are decoded in threads."""
    first = found.pixels_of(found.paths[0])

    def batches(start: int) -> Iterator[np.ndarray]:
        def pixels(path: Path) -> np.ndarray:
            image = found.pixels_of(path)
            check_alike(path, image, found.paths[0], first.shape)
            return image

        yield from _decoded(found.paths[start:], pixels)

    digest = hashlib.sha256(DECODING.encode())
    for path in found.paths:
        digest.update(f"{path.parent.name}/{path.name} {_stamp(path)}\n".encode())
    numbers = found.table(np.arange(len(found.paths)))
    encoding = INVERTED if found.invert else UNIT
    return Records(numbers, _BYTE, first.shape, encoding, batches, digest.hexdigest())


def part_of_records(records: Records, parts: ClassSplit, split: str) -> Records:
    """Returns the records whose classes are in a split; all are read to come to them.

    Raises:
      ValueError: as `ClassSplit.part`; records without names of classes.
    """
    table = parts.part(records.numbers, split)
    kept = np.sort(np.asarray(table.features).reshape(-1))
    places = np.searchsorted(kept, np.asarray(table.features))

    def batches(start: int) -> Iterator[np.ndarray]:
        first = int(kept[start])
        for batch in records.batches(first):
            low, high = np.searchsorted(kept, [first, first + len(batch)])
            if high > low:
                yield batch[kept[low:high] - first]
            first += len(batch)

    stamp = [records.stamp, parts.to_dict(), split]
    return dataclasses.replace(
        records, numbers=table.with_features(places), batches=batches, stamp=stamp
    )


def npz_records(path: Path, *, owner: str | None = None) -> Records:
    """Returns the records of an npz file; see `load_npz`.

    Raises:
      As `load_npz`; ValueError too for images or features in Fortran's order.
    """
    headers = array_headers(path)
    small = [name for name in headers if name not in ("images", "features")]
    arrays = read_arrays(path, max_bytes=2**63, names=small)
    given = [name for name in headers if name not in small]
    axes = 1 if "labels" in headers else 2
    for name in given:
        shape = headers[name][0]
        number = int(np.prod(shape[:axes], dtype=np.int64))
        rows = np.arange(number).reshape(shape[:axes])
        arrays[name] = rows.reshape(*rows.shape, *(1,) * (len(shape) - axes))
    if len(given) == 1:  # row numbers are no pixels, whatever the array holds
        arrays["features"] = arrays.pop(given[0])
    numbers = arranged(arrays, path, owner=owner)
    shape, kind = headers[given[0]]
    empty = np.empty((0, *shape[axes:]), kind)
    is_images = given[0] == "images"
    item = (scaled_images(empty) if is_images else empty).shape[1:]
    if kind.kind not in "biuf":
        raise TypeError(f"{given[0]} in {path} must be numbers, got {kind}")
    what = f"{given[0]} in {path}"
    dtype = _as_stored(empty, 0, is_images, what).dtype
    size = max(int(np.prod(item, dtype=np.int64)) * kind.itemsize, 1)

    def batches(start: int) -> Iterator[np.ndarray]:
        rows = max(min(_BATCH_BYTES // size, _BATCH_ROWS), 1)
        parts = array_batches(path, given[0], axes=axes, rows=rows, first=start)
        return _stored(parts, item, start, is_images, what)

    encoding = UNIT if is_images and kind.kind != "f" else None
    return Records(numbers, dtype, item, encoding, batches, _stamp(path))


def parquet_records(
    path: Path,
    *,
    groups: Sequence[str],
    features: Sequence[str] = (),
    images: str | None = None,
    target: str | None = None,
    public_units: Sequence[str] = (),
    owner: str | None = None,
    shape: Sequence[int] = (),
    size: int | None = None,
    grey: bool = False,
) -> Records:
    """Returns the records of a Parquet file.

    Args:
      path: the file.
      groups: columns of unit ids, top level first.
      features: columns of numbers, as of `load_table`; or none, and ``images``.
      images: a column of image files (bytes, or Hugging Face's struct of them), or of
        lists of as many numbers, of 8 bits where they are pixels.
      target: column of numbers; None: the last group is the class.
      public_units: public list of ids of the only group.
      owner: column of owners, ids of people; None: not known.
      shape: of an image that is a list.
      size: side to which image files are brought; None: they are all alike.
      grey: one channel in place of three, of image files.

    Raises:
      ImportError: pyarrow is not installed.
      TypeError, ValueError: as `load_table`; or both or none of features and images.
    """
    if bool(features) == (images is not None):
        raise ValueError(
            "a Parquet file needs the names of columns of features, or of one of "
            f"images, got features={list(features)} and images={images!r}"
        )
    columns = [*groups, *(name for name in (target, owner) if name is not None)]
    if not groups or len(set([*columns, *features])) < len(columns) + len(features):
        raise ValueError(f"groups must be columns, each used once, got {list(groups)}")
    found = parquet_columns(path, columns)
    number = len(found[columns[0]])
    if not number:
        raise ValueError(f"{path} must have at least one record, has none")
    units = {name: ids_of(found[name], name, path) for name in groups}
    public: list[Any] | None = list(public_units) or None
    if public is not None and units[groups[0]].dtype.kind in "iu":
        public = [int(one) for one in public]
    targets = None
    if target is not None:
        parts = parquet_numbers(path, [target], rows=_BATCH_ROWS)
        targets = np.concatenate(list(parts))[:, 0]
    numbers = ExampleTable.from_records(
        np.arange(number),
        targets,
        units=units,
        public_units=public,
        owners=None if owner is None else owners_of(found[owner], owner, path),
    )
    item, dtype, encoding, batches = (
        _number_columns(path, features)
        if images is None
        else _image_column(path, images, tuple(shape), size, grey)
    )
    decoding = None if images is None else DECODING
    stamp = [_stamp(path), list(features), images, decoding]
    return Records(numbers, dtype, item, encoding, batches, stamp)


_Column = tuple[
    tuple[int, ...], np.dtype, str | None, Callable[[int], Iterator[np.ndarray]]
]


def _number_columns(path: Path, features: Sequence[str]) -> _Column:
    """Columns of numbers, (R, columns) float32."""
    rows = max(min(_BATCH_ROWS, _BATCH_BYTES // (8 * len(features))), 1)

    def batches(start: int) -> Iterator[np.ndarray]:
        parts = parquet_numbers(path, features, rows=rows, first=start)
        return _stored(parts, (len(features),), start, False, f"features in {path}")

    return (len(features),), _FLOAT, None, batches


def _image_column(
    path: Path, name: str, shape: tuple[int, ...], size: int | None, grey: bool
) -> _Column:
    """A column of images: files, or lists of numbers."""
    if parquet_kind(path, name) == "files":
        first = decoded_image(
            io.BytesIO(next(parquet_files(path, name, rows=1))[0]), size, grey, path
        )

        def files(start: int) -> Iterator[np.ndarray]:
            cells = itertools.chain.from_iterable(
                parquet_files(path, name, rows=_BATCH_IMAGES, first=start)
            )

            def pixels(content: bytes) -> np.ndarray:
                image = decoded_image(io.BytesIO(content), size, grey, path)
                check_alike(path, image, path, first.shape)
                return image

            yield from _decoded(cells, pixels)

        return first.shape, _BYTE, UNIT, files
    if not shape:
        raise ValueError(
            f"shape must be given for the lists of numbers in column {name!r} of "
            f"{path}, for example 32 32 3"
        )
    for side in shape:
        _validation.whole_number("shape", side)
    length = int(np.prod(shape, dtype=np.int64))
    probe = next(parquet_lists(path, name, length=length, rows=1))
    scaled = scaled_images(probe[:0].reshape(0, *shape))  # refuses other numbers
    # Arrow takes some 16 bytes for each item of a list that it decodes.
    rows = max(min(_BATCH_BYTES // (16 * length), _BATCH_ROWS), 1)

    def lists(start: int) -> Iterator[np.ndarray]:
        parts = parquet_lists(path, name, length=length, rows=rows, first=start)
        return _stored(parts, scaled.shape[1:], start, True, f"{name} in {path}")

    is_coded = probe.dtype.kind == "b" or probe.dtype == _BYTE
    dtype = _BYTE if is_coded else _FLOAT
    return scaled.shape[1:], dtype, UNIT if is_coded else None, lists


def _stored(
    parts: Iterable[np.ndarray],
    item: tuple[int, ...],
    first: int,
    is_images: bool,
    what: str,
) -> Iterator[np.ndarray]:
    """Parts of an array as they are stored; ``first`` is the row of the first one."""
    for part in parts:
        yield _as_stored(part.reshape(len(part), *item), first, is_images, what)
        first += len(part)


def _as_stored(batch: np.ndarray, first: int, is_images: bool, what: str) -> np.ndarray:
    """What `ExampleTable.from_records` makes of numbers; of images their codes."""
    if batch.dtype.kind == "b":
        return batch * np.uint8(255) if is_images else batch.astype(_FLOAT)
    if batch.dtype.kind in "iu":
        return batch.astype(batch.dtype.newbyteorder("="))
    with np.errstate(over="ignore"):  # infinity, which is refused
        values = batch.astype(_FLOAT)
    bad = ~np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if bad.any():
        row = first + int(np.argmax(bad))
        raise ValueError(f"{what} must be finite, record {row} is not")
    return values


def _decoded(items: Any, pixels: Callable[[Any], np.ndarray]) -> Iterator[np.ndarray]:
    """Images, decoded in batches by as many threads as there are cores."""
    iterator = iter(items)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode") as pool:
        while part := list(itertools.islice(iterator, _BATCH_IMAGES)):
            yield np.stack(list(pool.map(pixels, part)))


def _stamp(path: Path) -> list[int]:
    """Size and time of a file, which differ where it was changed."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]

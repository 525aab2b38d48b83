"""Tables from data sets loaded by Hugging Face or TFDS; neither is imported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data.owners import MAX_BYTES, Owners
from jaxdp_episodic.trainer.data.table import UNIT, ExampleTable, decoded
from jaxdp_episodic.trainer.data.user_files import as_images

# Weights of red, green and blue in grey, in units of 2^-16 (ITU-R BT.601, as Pillow).
_LUMA = (19595, 38470, 7471)


def from_huggingface(
    dataset: Any,
    *,
    features: str,
    label: str,
    target: str | None = None,
    owner: str | None = None,
    grey: bool | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a Hugging Face data set; reads all records into memory.

    Args:
      dataset: a ``datasets.Dataset``: one split of what ``load_dataset`` returns.
      features: column of inputs: images, or numbers of one shape.
      label: column of class ids; the data set's class names are used if it has any.
      target: column of numbers to predict; None: predict the class.
      owner: column of ids of people who own the records; None: not known.
      grey: for images with mixed channels: True converts all to one channel, False
        converts all to three; None leaves them unchanged.
      max_bytes: largest size of all inputs in bytes.

    Returns:
      Levels "class" and "example"; images as (R, H, W, channels) in [0, 1].

    Raises:
      TypeError: several splits at once, or values that are not numbers.
      ValueError: an unknown column, no record, too much data, a class id that is
        missing, unknown (-1) or has no name, inputs of different shapes, or a record
        without exactly one owner. The message names the column and the record, from 0.
    """
    if isinstance(dataset, Mapping):
        raise TypeError(f"dataset must be one split, got all of {list(dataset)}")
    kinds = getattr(dataset, "features", None) or {}
    names = getattr(kinds.get(label), "names", None)
    keys = {"features": features, "label": label, "target": target, "owner": owner}
    return _from_rows(dataset, keys, names, grey, max_bytes)


def from_tfds(
    dataset: Any,
    *,
    features: str = "image",
    label: str = "label",
    target: str | None = None,
    owner: str | None = None,
    grey: bool | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a TFDS data set; reads all records into memory.

    Args:
      dataset: a ``tf.data.Dataset`` of dictionaries (not ``as_supervised``), or its
        ``tfds.as_numpy``.
      features: key of the inputs.
      label: key of the class ids.
      target: key of the numbers to predict; None: predict the class.
      owner: key of the ids of people who own the records; None: not known.
      grey: as in `from_huggingface`.
      max_bytes: largest size of all inputs in bytes.

    Returns:
      Levels "class" and "example"; images as (R, H, W, channels) in [0, 1].

    Raises:
      TypeError, ValueError: as `from_huggingface`; also for records that are not
        dictionaries.
    """
    read = getattr(dataset, "as_numpy_iterator", None)
    keys = {"features": features, "label": label, "target": target, "owner": owner}
    rows = dataset if read is None else read()
    return _from_rows(rows, keys, None, grey, max_bytes)


def _from_rows(
    rows: Iterable[Any],
    keys: Mapping[str, str | None],
    names: list[str] | None,
    grey: bool | None,
    max_bytes: int,
) -> ExampleTable:
    """Returns the table of records given as dictionaries."""
    wanted = {what: key for what, key in keys.items() if key is not None}
    columns: dict[str, list[Any]] = {what: [] for what in wanted}
    inputs, total = columns["features"], 0
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"records must be dictionaries, got {type(row).__name__}")
        for what, key in wanted.items():
            if key not in row:
                raise ValueError(f"records must have {key!r}, have {list(row)}")
            where = f"{key!r} in record {number}"
            if what == "features":
                value = _numbers(_coloured(row[key], grey, where), key, number)
            elif what == "target":
                value = _numbers(row[key], key, number)
                if value.size != 1:
                    raise ValueError(f"{key!r} must be one number in record {number}")
                value = float(value.reshape(()))
            else:
                value = _id(row[key], names, where, what)
            columns[what].append(value)
        if inputs[-1].shape != inputs[0].shape:
            mixed = {inputs[0].ndim, inputs[-1].ndim} == {2, 3} and grey is None
            hint = "give grey=False (or True)" if mixed else "resize them first"
            raise ValueError(
                f"{keys['features']!r} must have one shape, got {inputs[-1].shape} in "
                f"record {number} and {inputs[0].shape} in record 0; {hint}"
            )
        total += inputs[-1].nbytes
        if total > max_bytes:
            raise ValueError(
                f"{keys['features']!r} must take at most max_bytes={max_bytes} bytes, "
                f"exceeds it at record {number}"
            )
    if not inputs:
        raise ValueError("dataset must have at least one record, got none")
    values = np.stack(inputs)
    if values.dtype == np.uint8 and values.ndim in (3, 4):
        values = decoded(as_images(values), UNIT)
    owners = columns.get("owner")
    return ExampleTable.from_records(
        values,
        np.array(columns["target"]) if "target" in columns else None,
        units={"class": columns["label"]},
        owners=None
        if owners is None
        else Owners.from_ids(owners, name=repr(keys["owner"])),
    )


def _coloured(value: Any, grey: bool | None, where: str) -> Any:
    """Returns an image with one channel if ``grey``, three if not; None: unchanged."""
    if grey is None:
        return value
    if hasattr(value, "convert"):  # of Pillow
        pixels = np.asarray(value.convert("L" if grey else "RGB"))
        return pixels[..., None] if grey else pixels
    pixels = np.asarray(value)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise ValueError(
            f"grey is for images of 1 or 3 channels, got shape {pixels.shape} as "
            f"{where}"
        )
    if grey and pixels.shape[2] == 3:
        mixed = pixels.astype(np.float64) @ np.array(_LUMA) / 2**16
        is_code = pixels.dtype.kind in "iu"
        mixed = np.floor(mixed + 0.5) if is_code else mixed
        pixels = mixed.astype(pixels.dtype)[..., None]
    return pixels if grey else np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def _numbers(value: Any, name: str, number: int) -> np.ndarray:
    """Returns a value of one record as an array of numbers."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, RecursionError):  # ragged, or nested endlessly
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name!r} must be numbers, got {_validation.shown(value)} in record "
            f"{number}"
        )
    return array


def _id(value: Any, names: list[str] | None, where: str, what: str) -> Any:
    """Returns an id as an integer or string; class ids are looked up in ``names``."""
    ids = "class ids" if what == "label" else "owners"
    if isinstance(value, np.generic | np.ndarray):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(
                f"{ids} must be UTF-8, got {value[:60]!r} as {where}"
            ) from None
    if what != "label" or names is None and value is not None:
        return value
    if names is None or type(value) is not int or not 0 <= value < len(names):
        rule = "given" if names is None else f"whole numbers in 0 .. {len(names) - 1}"
        raise ValueError(
            f"{ids} must be {rule}, got {_validation.shown(value)} as {where}; leave "
            "out records without a class"
        )
    return names[value]

"""Data sets that Hugging Face's datasets or TFDS have loaded.

Neither is imported: the caller has the data set in hand already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data.ids import MAX_BYTES
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.data.user_files import scaled_images


def from_huggingface(
    dataset: Any,
    *,
    features: str,
    label: str,
    target: str | None = None,
    owner: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a Hugging Face data set, read to the end.

    Args:
      dataset: a ``datasets.Dataset``, one split of what ``load_dataset`` returns.
      features: name of the column of inputs: images, or numbers of one shape.
      label: name of the column of class ids; named ones go by their name.
      target: name of the column of numbers to predict; None: the class.
      owner: name of the column of owners, ids of people; None: not known.
      max_bytes: most bytes of all inputs.

    Returns:
      Levels "class" and "example"; images as (R, H, W, channels) in [0, 1].

    Raises:
      TypeError: several splits at once, or values that are no numbers.
      ValueError: an unknown column, no record, too much data, a class id without a
        name (-1: not known), inputs of different shapes, or a record without one owner.
    """
    if isinstance(dataset, Mapping):
        raise TypeError(f"dataset must be one split, got all of {list(dataset)}")
    kinds = getattr(dataset, "features", None) or {}
    names = getattr(kinds.get(label), "names", None)
    keys = _Keys(features, label, target, owner)
    return _from_rows(dataset, keys, names, max_bytes)


def from_tfds(
    dataset: Any,
    *,
    features: str = "image",
    label: str = "label",
    target: str | None = None,
    owner: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> ExampleTable:
    """Returns the table of a TFDS data set, read to the end.

    Args:
      dataset: a ``tf.data.Dataset`` of dictionaries (not ``as_supervised``), or what
        ``tfds.as_numpy`` makes of it.
      features: key of the inputs.
      label: key of the class ids.
      target: key of the numbers to predict; None: the class.
      owner: key of the owners, ids of people; None: not known.
      max_bytes: most bytes of all inputs.

    Returns:
      Levels "class" and "example"; images as (R, H, W, channels) in [0, 1].

    Raises:
      TypeError: records that are no dictionaries, or values that are no numbers.
      ValueError: an unknown key, no record, too much data, inputs of different
        shapes, or a record without one owner.
    """
    read = getattr(dataset, "as_numpy_iterator", None)
    keys = _Keys(features, label, target, owner)
    return _from_rows(dataset if read is None else read(), keys, None, max_bytes)


class _Keys(NamedTuple):
    """What a record has, by the names of the loaders' arguments."""

    features: str
    label: str
    target: str | None
    owner: str | None


def _from_rows(
    rows: Iterable[Any], keys: _Keys, names: list[str] | None, max_bytes: int
) -> ExampleTable:
    """The table of dictionaries."""
    features, label, target, owner = keys
    inputs: list[np.ndarray] = []
    owners: list[Any] = []
    labels: list[Any] = []
    targets: list[float] = []
    total = 0
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"records must be dictionaries, got {type(row).__name__}")
        for key in keys:
            if key is not None and key not in row:
                raise ValueError(f"records must have {key!r}, have {list(row)}")
        inputs.append(_numbers(row[features], features, number))
        if inputs[-1].shape != inputs[0].shape:
            raise ValueError(
                f"{features!r} must be of one shape, got {inputs[-1].shape} in record "
                f"{number} and {inputs[0].shape} in record 0; resize them first"
            )
        labels.append(_id(row[label], names, number))
        if owner is not None:
            owners.append(_id(row[owner], None, number, "owners"))
        if target is not None:
            value = _numbers(row[target], target, number)
            if value.size != 1:
                raise ValueError(f"{target!r} must be one number in record {number}")
            targets.append(float(value.reshape(())))
        total += inputs[-1].nbytes
        if total > max_bytes:
            raise ValueError(
                f"{features!r} must take at most max_bytes={max_bytes} bytes, takes "
                f"more from record {number} on"
            )
    if not inputs:
        raise ValueError("dataset must have at least one record, got none")
    values = np.stack(inputs)
    if values.dtype == np.uint8 and values.ndim in (3, 4):
        values = scaled_images(values)
    return ExampleTable.from_records(
        values,
        None if target is None else np.array(targets),
        units={"class": labels},
        owners=None if owner is None else Owners.from_ids(owners, name=repr(owner)),
    )


def _numbers(value: Any, name: str, number: int) -> np.ndarray:
    """A value of one record as an array of numbers."""
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


def _id(
    value: Any, names: list[str] | None, number: int, what: str = "class ids"
) -> Any:
    """An integer or a string; Hugging Face writes -1 for a class that is not known."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(
                f"{what} must be UTF-8, got {value[:60]!r} in record {number}"
            ) from None
    if names is None:
        return value
    if type(value) is not int:
        raise TypeError(
            f"class ids must be whole numbers, got {_validation.shown(value)} in "
            f"record {number}"
        )
    if not 0 <= value < len(names):
        raise ValueError(
            f"class ids must lie in 0 .. {len(names) - 1}, got {value} in record "
            f"{number}; leave records without a class out"
        )
    return names[value]

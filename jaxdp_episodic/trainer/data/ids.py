"""Ids of units and of people, as they come from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Of all that one file from outside makes in memory, uncompressed, unless a call says
# otherwise: inputs of a table, or the ids of one level.
MAX_BYTES = 4 * 2**30


def id_array(name: str, ids: Any) -> np.ndarray:
    """Returns ids as an array that keeps apart what differs."""
    if isinstance(ids, list | tuple):
        check_text_size(name, ids)
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:  # ragged
        raise TypeError(f"{name} must be integer or string ids: {error}") from None
    if array is not ids and array.dtype.kind == "U":
        for record, one in enumerate(ids, start=1):
            if not isinstance(one, str) or one.endswith("\0"):
                raise ValueError(
                    f"{name} must be ids of one type, strings not ending in a NUL, got "
                    f"{one!r} in record {record}"
                )
    return array


def check_text_size(name: str, ids: Sequence[Any]) -> None:
    """Refuses ids whose array, each as long as the longest, takes over 4 GiB."""
    longest = max((len(one) for one in ids if isinstance(one, str)), default=0)
    if 4 * longest * len(ids) > MAX_BYTES:
        raise ValueError(
            f"{name} must be ids that take at most {MAX_BYTES} bytes, got "
            f"{len(ids)}, the longest of {longest} characters"
        )

"""Checks of arguments at the border: clear errors, nothing repaired.

Every message names the argument, the value and the allowed range. A wrong type is a
``TypeError``, a wrong value a ``ValueError``. Booleans are refused where a number is
meant, strings everywhere; NaN never passes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np


def real_array(name: str, value: Any) -> np.ndarray:
    """Returns ``value`` as a float64 array without NaN."""
    array = _numeric(name, value)
    # + 0.0: a noise multiplier of -0.0 passes ">= 0", and its inverse is -infinity.
    result = array.astype(np.float64) + 0.0
    if np.isnan(result).any():
        raise ValueError(f"{name} must not be NaN, got {_show(value)}")
    return result


def integer_array(name: str, value: Any, *, minimum: int) -> np.ndarray:
    """Returns ``value`` as an int64 array of whole numbers, each >= ``minimum``.

    Floats that are whole numbers (``1e6``) are accepted up to 2**53, beyond which a
    float no longer says which integer it means.
    """
    array = _numeric(name, value)
    allowed = f"{name} must be a whole number >= {minimum} and at most 2**53"
    if array.dtype.kind == "f" and not np.all(
        np.isfinite(array) & (array == np.floor(array))
    ):
        raise ValueError(f"{allowed}, got {_first_bad(value, _not_whole(array))}")
    bad = (array < minimum) | (array > 2**53)
    if bad.any():
        raise ValueError(f"{allowed}, got {_first_bad(value, bad)}")
    return array.astype(np.int64)


def probability_array(name: str, value: Any) -> np.ndarray:
    """Returns ``value`` as a float64 array with every element in [0, 1]."""
    array = real_array(name, value)
    return _in_range(name, value, array, (array >= 0) & (array <= 1), "lie in [0, 1]")


def nonnegative_array(name: str, value: Any) -> np.ndarray:
    """Returns ``value`` as a float64 array, every element >= 0 (``inf`` allowed)."""
    array = real_array(name, value)
    return _in_range(name, value, array, array >= 0, "be >= 0")


def positive_array(name: str, value: Any) -> np.ndarray:
    """Returns ``value`` as a float64 array with every element > 0 and finite."""
    array = real_array(name, value)
    good = (array > 0) & np.isfinite(array)
    return _in_range(name, value, array, good, "be > 0 and finite")


def open_unit_array(name: str, value: Any) -> np.ndarray:
    """Returns ``value`` as a float64 array with every element in (0, 1)."""
    array = real_array(name, value)
    return _in_range(name, value, array, (array > 0) & (array < 1), "lie in (0, 1)")


def order_array(name: str, value: Any) -> np.ndarray:
    """Returns Rényi orders as a float64 array, each finite and > 1."""
    array = real_array(name, value)
    good = (array > 1) & np.isfinite(array)
    return _in_range(name, value, array, good, "be > 1 and finite")


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Returns ``value`` if it is one of ``allowed``, else names the nearest."""
    options = tuple(allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {options}, got {value!r}")
    if value not in options:
        raise ValueError(
            f"{name} must be one of {options}, got {value!r}{nearest(value, options)}"
        )
    return value


def nearest(word: str, options: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the option closest to ``word``, or ""."""
    close = difflib.get_close_matches(word, list(options), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def broadcast_shape(**arrays: Any) -> tuple[int, ...]:
    """Returns the common shape of the named arrays, or names those that disagree."""
    try:
        return np.broadcast_shapes(*(np.shape(a) for a in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name}: {np.shape(a)}" for name, a in arrays.items())
        raise ValueError(f"shapes do not broadcast together: {shapes}") from None


def _numeric(name: str, value: Any) -> np.ndarray:
    """Converts to an integer or float array; refuses everything else."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: its mask would be lost")
    try:
        array = np.asarray(value)
    except ValueError:  # ragged nesting
        raise TypeError(
            f"{name} must be a number or a rectangular array of numbers, "
            f"got {_show(value)}"
        ) from None
    if array.dtype.kind not in "iuf" and array.size == 0 and array.dtype != object:
        array = array.astype(np.float64)
    if array.dtype.kind not in "iuf" or _holds_bool(value):
        raise TypeError(
            f"{name} must be a number or an array of numbers, got {_show(value)}"
        )
    return array


def _holds_bool(value: Any) -> bool:
    """True if a list or tuple hides a bool that NumPy would turn into 0 or 1."""
    if isinstance(value, list | tuple):
        return any(_holds_bool(v) for v in value)
    return isinstance(value, bool | np.bool_)


def _in_range(
    name: str, value: Any, array: np.ndarray, good: np.ndarray, rule: str
) -> np.ndarray:
    if not good.all():
        raise ValueError(f"{name} must {rule}, got {_first_bad(value, ~good)}")
    return array


def _not_whole(array: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return ~(np.isfinite(array) & (array == np.floor(array)))


def _first_bad(value: Any, bad: np.ndarray) -> str:
    """Shows the offending element, with its index when there are several."""
    array = np.asarray(value)
    if array.ndim == 0:
        return _show(value)
    index = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return f"{array[index]} at index {tuple(int(i) for i in index)}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

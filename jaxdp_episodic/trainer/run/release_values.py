"""Values of a release's description, which anybody may have written, by their keys."""

from __future__ import annotations

import math
from typing import Any

from jaxdp_episodic import _validation

_MOST_AXES = 8  # of an example
_MOST_NUMBERS = 2**30  # of an example, or a parameter
_TYPES = {"int": (int,), "float": (int, float), "bool": (bool,)}  # else texts


class _Table(dict[str, Any]):
    """An object of a file, which knows its name: a missing key is named in full."""

    name = ""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"missing key {f'{self.name}.{key}'.lstrip('.')!r}")


def table_of(name: str, value: Any) -> _Table:
    """Returns an object of a file; the outermost is called "it"."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be an object, got {_validation.shown(value)}")
    table = _Table(value)
    table.name = "" if name == "it" else name
    return table


def plain_value(name: str, value: Any, kind: str) -> Any:
    """Returns a text, number or flag of a file, of the type a field is declared of."""
    types = _TYPES.get(kind, (str,))
    if type(value) not in types or (kind == "float" and not math.isfinite(value)):
        wanted = (
            "a finite number" if kind == "float" else f"of type {types[0].__name__}"
        )
        raise TypeError(f"{name} must be {wanted}, got {_validation.shown(value)}")
    return value


def shape_of(name: str, value: Any, *, fewest: int = 0) -> tuple[int, ...]:
    """Returns a shape of at most `_MOST_NUMBERS` numbers."""
    fits = isinstance(value, list) and len(value) <= _MOST_AXES
    if not fits or not all(type(n) is int and n >= fewest for n in value):
        raise TypeError(f"{name} must be a shape, got {_validation.shown(value)}")
    if math.prod(max(n, 1) for n in value) > _MOST_NUMBERS:
        raise ValueError(f"{name} must be at most {_MOST_NUMBERS} numbers, got {value}")
    return tuple(value)

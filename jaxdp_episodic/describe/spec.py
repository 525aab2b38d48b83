"""What all specs share: value semantics and dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.describe import serialization


class Spec:
    """Base of the frozen dataclasses that describe sampling and steps.

    Subclasses are declared ``@dataclass(frozen=True, eq=False)`` and normalise their
    numeric fields in ``__post_init__`` with `frozen_number`.

    Specs compare by value, arrays element by element: equal means the same type, the
    same shapes and the same numbers. They are hashable, consistently with ``==``.
    """

    # Field -> the classes that a dictionary may describe there.
    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _value_key(self) == _value_key(other)

    def __hash__(self) -> int:
        return hash((type(self), _value_key(self)))

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON- and TOML-safe dictionary with "version" and "type"."""
        return serialization.spec_to_dict(self)

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str | None = None) -> Self:
        """Returns the spec that ``mapping`` describes; see `spec_from_dict`."""
        return serialization.spec_from_dict(cls, mapping, where=where)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the spec with these fields: the constructor by keyword."""
        return cls(**fields)


def frozen_number(array: np.ndarray) -> Any:
    """Returns a 0-d array as a Python number, any other one made read-only.

    Args:
      array: freshly made by a check of ``_validation``, so nobody else holds it.
    """
    if array.ndim == 0:
        return array.item()
    array.setflags(write=False)
    return array


def set_whole_numbers(
    spec: Spec, *names: str, minimum: int = 1, maximum: int | None = None
) -> None:
    """Checks fields of a frozen spec, each one whole number in a range."""
    for name in names:
        value = _validation.whole_number(
            name, getattr(spec, name), minimum=minimum, maximum=maximum
        )
        object.__setattr__(spec, name, value)


def set_positive(spec: Spec, *names: str) -> None:
    """Checks fields of a frozen spec, each one number > 0 and finite."""
    for name in names:
        array = _validation.positive_array(name, getattr(spec, name))
        object.__setattr__(spec, name, float(_validation.single(name, array)))


def check_flags(spec: Spec, *names: str) -> None:
    """Checks fields of a spec, each true or false."""
    for name in names:
        _validation.flag(name, getattr(spec, name))


def _value_key(value: Any) -> Any:
    """A hashable stand-in for a value that compares as the value does."""
    if isinstance(value, Spec):
        names = serialization.spec_fields(value)
        return tuple(_value_key(getattr(value, name)) for name in names)
    if isinstance(value, np.ndarray):
        # + 0 turns -0.0 into 0.0, whose bytes differ though the numbers are equal.
        return value.shape, (value + 0).tobytes()
    if isinstance(value, tuple):
        return tuple(_value_key(item) for item in value)
    return value

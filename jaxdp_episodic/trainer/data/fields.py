"""Checks of the fields of specs; see `Spec`."""

from __future__ import annotations

import functools
import math
import typing
from typing import Annotated, Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Check, Spec


@typing.dataclass_transform(eq_default=False, kw_only_default=True, frozen_default=True)
class CheckedSpec(Spec):
    """Base of specs whose fields are keywords."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__(kw_only=True)


def whole(minimum: int = 1, maximum: int | None = None) -> Check:
    """Returns a check for whole numbers in a range."""
    return functools.partial(_validation.whole_number, minimum=minimum, maximum=maximum)


def one_of(*options: str) -> Check:
    """Returns a check for one of some words."""
    return functools.partial(_validation.choice, allowed=options)


def within(
    low: float, high: float, ends: str = "[]", *, rule: str | None = None
) -> Check:
    """Returns a check for one number between two ends, "[" and "]" being closed."""
    rule = rule or f"lie in {ends[0]}{low:g}, {high:g}{ends[1]}"

    def is_good(value: np.ndarray) -> np.ndarray:
        above = value >= low if ends[0] == "[" else value > low
        return above & (value <= high if ends[1] == "]" else value < high)

    return functools.partial(_validation.one, check=_validation.reals(rule, is_good))


def text(name: str, value: Any) -> str:
    """Returns a non-empty string without NUL that encodes as UTF-8, or raises."""
    if not isinstance(value, str) or not value:
        shown = _validation.shown(value)
        raise TypeError(f"{name} must be a non-empty string, got {shown}")
    if "\0" in value or not value.isascii() and not is_unicode(value):
        raise ValueError(f"{name} must be text without NUL, got {value!r}")
    return value


def is_unicode(value: str) -> bool:
    """Returns whether a non-empty string encodes as UTF-8."""
    try:
        return bool(value.encode())
    except UnicodeEncodeError:  # a lone surrogate, as in JSON and in names of files
        return False


def listed(
    name: str,
    value: Any,
    kinds: tuple[type, ...] = (str,),
    *,
    least: int = 1,
    most: float = math.inf,
) -> tuple[Any, ...]:
    """Returns a tuple of ``least`` to ``most`` names, each of one of the types."""
    fits = isinstance(value, list | tuple) and all(
        isinstance(one, kinds) and not isinstance(one, bool) for one in value
    )
    if not fits or not least <= len(value) <= most:
        shown, limit = _validation.shown(value), f"at most {most} " * (most < math.inf)
        raise TypeError(f"{name} must be a list of {limit}names, got {shown}")
    return tuple(value)


def numbers(name: str, value: Any, *, most: int, check: Any, what: str) -> tuple:
    """Returns a tuple of 1 to ``most`` numbers that pass a check of `_validation`."""
    array = check(name, value)
    if array.ndim != 1 or not 1 <= array.size <= most:
        shown = _validation.shown(value)
        raise ValueError(f"{name} must be a list of 1 to {most} {what}, got {shown}")
    return tuple(array.tolist())


def set_fields(spec: Spec, **values: Any) -> None:
    """Sets fields of a frozen spec; for use in its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(spec, name, value)


Flag = Annotated[bool, _validation.flag]
Count = Annotated[int, whole()]
Natural = Annotated[int, whole(0)]
Text = Annotated[str, text]
Names = Annotated[tuple[str, ...], listed]
Positive = Annotated[float, within(0.0, float("inf"), "()", rule="be > 0 and finite")]
Float32 = Annotated[float, _validation.float32_number]

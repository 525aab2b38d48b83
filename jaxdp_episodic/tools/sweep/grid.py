"""Axes and the grid that they span, which is never held in memory.

A setting is a number, its index; the values of its fields are computed from it. Axes
combine as a product, the first one slowest. Axes with the same ``zip`` name move
together, as one axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.tools.sweep.fields import is_whole

AXIS_WAYS = ("values", "linspace", "geomspace")
METHOD = "method"
QUANTITY = "quantity"
WORD_FIELDS = (METHOD, QUANTITY)
"""Fields whose axis is a list of words."""

_MAX_SETTINGS = 2**53  # an index and the products that it is made of are exact
_MAX_VALUES = 10_000_000  # of an axis: these alone of a grid are in memory
_MAX_AXES = 12  # whose corners, 2**12 at most, are all checked
_MAX_LETTERS = 100  # of a word; the longest that means something has 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Axis(Spec):
    """The values that one field takes; give exactly one of the three ways to say them.

    Attributes:
      field: name of the field, e.g. "noise_multiplier" or "school.size".
      values: the values themselves: numbers, or words for "method" and "quantity".
      linspace: ``(first, last, how_many)``, evenly spaced, both ends included.
      geomspace: the same with a constant ratio; the ends are positive. Of a field of
        whole numbers both are rounded to the nearest, and what then comes twice is
        kept once.
      zip: axes of the same name here move together; None: a product with the others.
    """

    field: str
    values: Any = None
    linspace: Any = None
    geomspace: Any = None
    zip: str | None = None

    def __post_init__(self) -> None:
        for name in ("field", "zip"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "zip" and value is None):
                raise TypeError(
                    f"{name} must be a string, got {_validation.shown(value)}"
                )
        given = [name for name in AXIS_WAYS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {AXIS_WAYS}, got {given or 'none'}")
        way = given[0]
        if way == "values":
            object.__setattr__(self, way, self._checked_values())
        elif self.field in WORD_FIELDS:
            raise ValueError(f"{self.field} must be given by values, got {way}")
        else:
            object.__setattr__(self, way, _checked_ends(way, getattr(self, way)))

    @property
    def is_whole(self) -> bool:
        """True if the field takes whole numbers only."""
        return is_whole(self.field)

    @property
    def is_words(self) -> bool:
        """True if the field takes words."""
        return self.field in WORD_FIELDS

    def points(self) -> np.ndarray:
        """Returns the values, (K,): float64, int64 for whole numbers, or strings."""
        if self.values is not None:
            points = np.asarray(self.values)
            if self.is_words:
                return points
            whole = self.is_whole and np.all(points == np.rint(points))
            if whole:
                self._check_whole(points)
            return points.astype(int if whole else float)
        spaced = np.linspace if self.linspace is not None else np.geomspace
        first, last, number = self.linspace or self.geomspace
        with np.errstate(all="ignore"):  # ends so far apart are refused below
            points = spaced(first, last, number)
        if not np.isfinite(points).all():
            raise ValueError(f"axis {self.field!r} has ends too far apart")
        if not self.is_whole:
            return points
        self._check_whole(points)
        rounded = np.rint(points).astype(np.int64)
        # In the order of the axis, which may fall.
        return rounded[np.sort(np.unique(rounded, return_index=True)[1])]

    def _check_whole(self, points: np.ndarray) -> None:
        """Refuses numbers that would not survive as integers."""
        if np.any(np.abs(points.astype(float)) > _MAX_SETTINGS):
            raise ValueError(f"axis {self.field!r} must hold numbers up to 2**53")

    def _checked_values(self) -> tuple[Any, ...]:
        values = self.values
        if not isinstance(values, list | tuple | np.ndarray) or not len(values):
            shown = _validation.shown(values)
            raise TypeError(f"values must be a list with at least one, got {shown}")
        if self.is_words:
            if not all(isinstance(word, str) for word in values):
                raise TypeError(
                    f"values must be words, got {_validation.shown(values)}"
                )
            if max(map(len, values)) > _MAX_LETTERS:
                raise ValueError(f"values must have at most {_MAX_LETTERS} letters")
            return tuple(values)
        array = _validation.real_array("values", values)
        if array.ndim != 1:
            raise ValueError(f"values must be a flat list, got shape {array.shape}")
        if array.size > _MAX_VALUES:
            raise ValueError(
                f"values must be at most {_MAX_VALUES:,}, got {array.size:,}"
            )
        return tuple(np.asarray(values).tolist())


class Grid:
    """All settings of some axes, by index.

    Args:
      axes: at least one and at most 12, of different fields.

    Attributes:
      names: the fields, in the order of the axes.
      size: how many settings there are.
    """

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        if not axes:
            raise ValueError("a sweep needs at least one axis, got none")
        if len(axes) > _MAX_AXES:
            raise ValueError(f"a sweep has at most {_MAX_AXES} axes, got {len(axes)}")
        self.axes = axes
        self.names = tuple(axis.field for axis in axes)
        for name in self.names:
            if self.names.count(name) > 1:
                raise ValueError(f"axes must have different fields, got {name!r} twice")
        self._points = {axis.field: axis.points() for axis in axes}
        # Dimensions of the product, slowest first: the fields that move together.
        dimensions: dict[tuple[str, str], list[str]] = {}
        for axis in axes:
            key = ("field", axis.field) if axis.zip is None else ("zip", axis.zip)
            dimensions.setdefault(key, []).append(axis.field)
        self.dimensions = tuple(tuple(fields) for fields in dimensions.values())
        self.shape = tuple(self._length(fields) for fields in self.dimensions)
        self.size = math.prod(self.shape)
        if self.size > _MAX_SETTINGS:
            raise ValueError(f"a sweep has at most 2**53 settings, got {self.size:,}")

    def points(self, field: str) -> np.ndarray:
        """Returns the values of one axis, (K,)."""
        return self._points[field]

    def dimension_of(self, field: str) -> int:
        """Returns which dimension of the product moves a field."""
        return next(i for i, d in enumerate(self.dimensions) if field in d)

    def values(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """Returns every field's (n,) values at settings ``index``, (n,) int64."""
        along = np.unravel_index(index, self.shape)
        return {
            name: self._points[name][along[self.dimension_of(name)]]
            for name in self.names
        }

    def index(self, along: dict[int, Any]) -> np.ndarray:
        """Returns the settings at indices along all dimensions; these broadcast."""
        arrays = np.broadcast_arrays(*(along[i] for i in range(len(self.shape))))
        return np.ravel_multi_index(arrays, self.shape)

    def corners(self) -> dict[str, np.ndarray]:
        """Returns the settings where every field is at its smallest or largest.

        What fields demand of each other (at most as many ways as classes) is monotone
        in each, so it holds everywhere if it holds there. Of words all are taken.
        """
        ends = []
        for fields in self.dimensions:
            columns = [self._points[name] for name in fields]
            if any(column.dtype.kind == "U" for column in columns):
                ends.append(np.arange(columns[0].size))
            else:
                extremes = [(np.argmin(c), np.argmax(c)) for c in columns]
                ends.append(np.unique(extremes))
        corners = np.meshgrid(*ends, indexing="ij")
        return self.values(self.index(dict(enumerate(c.ravel() for c in corners))))

    def _length(self, fields: list[str] | tuple[str, ...]) -> int:
        lengths = {name: self._points[name].size for name in fields}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"zipped axes must be equally long, got {lengths}")
        return next(iter(lengths.values()))


def _checked_ends(name: str, ends: Any) -> tuple[float, float, int]:
    """First, last and number of an axis."""
    if not isinstance(ends, list | tuple) or len(ends) != 3:
        raise ValueError(
            f"{name} must be [first, last, how_many], got {_validation.shown(ends)}"
        )
    first, last = (_validation.real_array(name, end) for end in ends[:2])
    number = _validation.integer_array(f"{name}: how_many", ends[2], minimum=1)
    for end in (first, last, number):
        if end.ndim or not np.isfinite(end):
            raise ValueError(f"{name} must be three finite numbers, got {ends!r}")
    if name == "geomspace" and not (first > 0 and last > 0):
        raise ValueError(f"the ends of geomspace must be > 0, got {ends!r}")
    if number > _MAX_VALUES:
        raise ValueError(
            f"{name}: how_many must be at most {_MAX_VALUES:,}, got {ends[2]:,}"
        )
    return float(first), float(last), int(number)

"""Axes and their grid, which is never held in memory: a setting is its index.

Axes combine as a product, the first one slowest; axes with one ``zip`` name move
together. Fields are named as in the table of ``epsilon``: "noise_multiplier",
"school.size", "people.classes"; of a composed run "counts[0]", "steps[0].school.size".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.schemes import MultistageSampling, Scheme
from jaxdp_episodic.accountant.describe.spec import Check, Spec
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep

AXIS_WAYS = ("values", "linspace", "geomspace")
METHOD = "method"
QUANTITY = "quantity"
WORD_FIELDS = (METHOD, QUANTITY)
"""Fields whose axis is a list of words."""

_MAX_SETTINGS = 2**53  # an index and the products that it is made of are exact
_MAX_VALUES = 10_000_000  # of an axis: these alone of a grid are in memory
_MAX_AXES = 12  # whose corners, 2**12 at most, are all checked
_MAX_LETTERS = 100  # of a word; the longest that means something has 16

Path = tuple[str | int, ...]
"""Where a field is: keys of tables and indices of lists, from the step down."""


def _specs(spec: type[Spec]) -> Iterator[type[Spec]]:
    """A class, and all that a dictionary of it may describe inside."""
    yield spec
    for inside in spec.nested_specs.values():
        for one in inside:
            yield from _specs(one)


_NUMERIC = {spec.__name__: spec.numeric for spec in _specs(ComposedSteps)}
_CHECKS = {name: check for spec in _NUMERIC.values() for name, check in spec.items()}
_SCHEMES = tuple(scheme.__name__ for scheme in get_args(Scheme))
_PARTS = ("sampling", "levels", "episodes", "classes", "examples", "steps", "people")


def is_whole(field: str) -> bool:
    """True if a field takes whole numbers only."""
    name = field.rpartition(".")[2]
    if name == "num_steps" or name.startswith("counts["):
        return True
    return getattr(_CHECKS.get(name), "func", None) is _validation.integer_array


def check_of(field: str) -> Check | None:
    """The check for the values of a field, which are rounded later where whole."""
    check = _CHECKS.get(field.rpartition(".")[2])
    return _validation.positive_array if check and is_whole(field) else check


def wrapped(step: Any) -> Any:
    """Returns a step's table with every single scheme made a list of one level."""
    if not isinstance(step, Mapping):
        return step
    table = dict(step)
    if isinstance(table.get("steps"), list):
        table["steps"] = [wrapped(part) for part in table["steps"]]
    drawn = table.get("sampling")
    if isinstance(drawn, Mapping):
        table["sampling"] = wrapped(drawn)
        if drawn.get("type") in _SCHEMES:
            name = MultistageSampling.__name__
            table["sampling"] = {"type": name, "levels": [drawn]}
    return table


def numeric_fields(step: Any, path: Path = (), prefix: str = "") -> dict[str, Path]:
    """Returns where the numeric fields are in the wrapped table of a step."""
    found: dict[str, Path] = {}
    if not isinstance(step, Mapping):
        return found
    kind, name = str(step.get("type")), step.get("name")
    named = f"{prefix}{name}." if isinstance(name, str) else prefix
    counts = step.get("counts")
    if kind == ComposedSteps.__name__ and isinstance(counts, list):
        found |= {f"counts[{i}]": (*path, "counts", i) for i in range(len(counts))}
    found |= {named + field: (*path, field) for field in _NUMERIC.get(kind, ())}
    for part in _PARTS:
        value, below = step.get(part), (*path, part)
        if not isinstance(value, list):
            inner = f"{prefix}people." if part == "people" else prefix
            found |= numeric_fields(value, below, inner)
            continue
        for i, item in enumerate(value):
            inner = f"{prefix}steps[{i}]." if part == "steps" else prefix
            found |= numeric_fields(item, (*below, i), inner)
    return found


def dotted(path: Path) -> str:
    """Returns a path as errors write it, ``step.sampling.levels[1].size``."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return "step" + "".join(parts)


def filled(table: Any, path: Path, value: Any, *, over: bool = False) -> Any:
    """Returns a table with a value at a path that has none yet, or ``over`` its own."""
    if not path:
        return value if over or table is None else table
    head, *rest = path
    copy: Any = list(table) if isinstance(head, int) else dict(table)
    below = table[head] if isinstance(head, int) else table.get(head)
    copy[head] = filled(below, tuple(rest), value, over=over)
    return copy


def table_of(step: GaussianStep | ComposedSteps) -> dict[str, Any]:
    """Returns a step's dictionary form, in which populations stay what they are."""
    table = step.to_dict()
    parts = step.steps if isinstance(step, ComposedSteps) else (step,)
    for part, one in zip(parts, table.get("steps", [table]), strict=True):
        if isinstance(part, GaussianStep) and part.population is not None:
            one["population"] = part.population
    return table


@dataclass(frozen=True, eq=False, kw_only=True)
class Axis(Spec):
    """The values that one field takes, given in exactly one of three ways."""

    field: str  # its name, e.g. "noise_multiplier" or "school.size"
    values: Any = None  # numbers, or words for "method" and "quantity"
    linspace: Any = None  # (first, last, how_many), evenly spaced, both ends included
    # The same with a constant ratio. Whole numbers are rounded, and kept once.
    geomspace: Any = None
    zip: str | None = None  # axes of the same name here move together

    def __post_init__(self) -> None:
        for name, kinds in (("field", str), ("zip", str | None)):
            if not isinstance(value := getattr(self, name), kinds):
                shown = _validation.shown(value)
                raise TypeError(f"{name} must be a string, got {shown}")
        given = [name for name in AXIS_WAYS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {AXIS_WAYS}, got {given or 'none'}")
        (way,) = given
        if way != "values" and self.is_words:
            raise ValueError(f"{self.field} must be given by values, got {way}")
        checked = self._checked_values() if way == "values" else self._checked_ends(way)
        object.__setattr__(self, way, checked)

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
        points = np.asarray(self.values)
        if self.is_words:
            return points
        if self.values is None:
            spaced = np.linspace if self.linspace is not None else np.geomspace
            with np.errstate(all="ignore"):  # ends so far apart are refused below
                points = spaced(*(self.linspace or self.geomspace))
            if not np.isfinite(points).all():
                raise ValueError(f"axis {self.field!r} has ends too far apart")
        if not self.is_whole:
            return points.astype(float)
        if np.any(np.abs(points.astype(float)) > _MAX_SETTINGS):
            raise ValueError(f"axis {self.field!r} must hold numbers up to 2**53")
        if self.values is not None:
            return points.astype(int if np.all(points == np.rint(points)) else float)
        rounded = np.rint(points).astype(np.int64)
        # In the order of the axis, which may fall.
        return rounded[np.sort(np.unique(rounded, return_index=True)[1])]

    def _checked_values(self) -> tuple[Any, ...]:
        values, shown = self.values, _validation.shown(self.values)
        if not isinstance(values, list | tuple | np.ndarray) or not len(values):
            raise TypeError(f"values must be a list with at least one, got {shown}")
        if self.is_words:
            if not all(isinstance(word, str) for word in values):
                raise TypeError(f"values must be words, got {shown}")
            if max(map(len, values)) > _MAX_LETTERS:
                raise ValueError(f"values must have at most {_MAX_LETTERS} letters")
            return tuple(values)
        array = _validation.real_array("values", values)
        if array.ndim != 1:
            raise ValueError(f"values must be a flat list, got shape {array.shape}")
        _check_number_of("values", array.size)
        return tuple(np.asarray(values).tolist())

    def _checked_ends(self, name: str) -> tuple[float, float, int]:
        ends = getattr(self, name)
        if not isinstance(ends, list | tuple) or len(ends) != 3:
            shown = _validation.shown(ends)
            raise ValueError(f"{name} must be [first, last, how_many], got {shown}")
        first, last = (_validation.real_array(name, end) for end in ends[:2])
        number = _validation.integer_array(f"{name}: how_many", ends[2], minimum=1)
        if any(end.ndim or not np.isfinite(end) for end in (first, last, number)):
            raise ValueError(f"{name} must be three finite numbers, got {ends!r}")
        if name == "geomspace" and not (first > 0 and last > 0):
            raise ValueError(f"the ends of geomspace must be > 0, got {ends!r}")
        _check_number_of(f"{name}: how_many", int(number))
        return float(first), float(last), int(number)


def _check_number_of(name: str, number: int) -> None:
    if number > _MAX_VALUES:
        raise ValueError(f"{name} must be at most {_MAX_VALUES:,}, got {number:,}")


class Grid:
    """All settings of at least one and at most 12 axes, by index."""

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
        dimensions: dict[tuple[str, str], list[str]] = {}
        for axis in axes:
            key = ("field", axis.field) if axis.zip is None else ("zip", axis.zip)
            dimensions.setdefault(key, []).append(axis.field)
        # Of the product, slowest first: the fields that move together.
        self.dimensions = tuple(tuple(fields) for fields in dimensions.values())
        for fields in self.dimensions:
            lengths = {name: self._points[name].size for name in fields}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"zipped axes must be equally long, got {lengths}")
        self.shape = tuple(self._points[fields[0]].size for fields in self.dimensions)
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
        """Returns the settings where every field is at its smallest or largest."""
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

"""The description of a sweep: a request with axes in place of fields, and their grid.

The grid is never held in memory: a setting is an index.

Axes combine as a product, the first one slowest; axes with the same ``zip`` move
together. Fields have the names that ``epsilon`` prints: "noise_multiplier",
"school.size", "people.classes"; in a composed run "counts[0]", "steps[0].school.size".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import MultistageSampling, Scheme
from jaxdp_episodic.accountant.describe.spec import Spec, refuse_hostile
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.api import METHODS, check_method
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair, runs_of
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    Request,
    read_request,
)

AXIS_WAYS = ("values", "linspace", "geomspace")
METHOD = "method"
QUANTITY = "quantity"
WORD_FIELDS = (METHOD, QUANTITY)  # fields whose axis is a list of words
_MAX_SETTINGS = 2**53  # so that indices are exact
_MAX_VALUES = 10_000_000  # of an axis; all values of the axes are in memory
_MAX_AXES = 12  # all corners of the grid are checked, at most 2**12
_MAX_LETTERS = 100  # of a word; the longest known one has 16

# The place of a field: keys of tables and indices of lists, from the step down.
KeyPath = tuple[str | int, ...]


def _specs(spec: type[Spec]) -> Iterator[type[Spec]]:
    """A class, and all classes that its dictionary may contain."""
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


def wrapped(step: Any) -> Any:
    """Returns a step's table with each single scheme as a list of one level."""
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


def numeric_fields(
    step: Any, path: KeyPath = (), prefix: str = ""
) -> dict[str, KeyPath]:
    """Returns name -> path of the numeric fields in the wrapped table of a step."""
    found: dict[str, KeyPath] = {}
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


def filled(table: Any, path: KeyPath, value: Any, *, over: bool = False) -> Any:
    """Returns a table with a value at a path; an old one stays unless ``over``."""
    if not path:
        return value if over or table is None else table
    head, *rest = path
    copy: Any = list(table) if isinstance(head, int) else dict(table)
    below = table[head] if isinstance(head, int) else table.get(head)
    copy[head] = filled(below, tuple(rest), value, over=over)
    return copy


def table_of(step: GaussianStep | ComposedSteps) -> dict[str, Any]:
    """Returns a step's dictionary form, with populations as objects."""
    table = step.to_dict()
    parts = step.steps if isinstance(step, ComposedSteps) else (step,)
    for part, one in zip(parts, table.get("steps", [table]), strict=True):
        if isinstance(part, GaussianStep) and part.population is not None:
            one["population"] = part.population
    return table


@dataclass(frozen=True, eq=False, kw_only=True)
class Axis(Spec):
    """The values of one field, given in exactly one of three ways."""

    field: str  # e.g. "noise_multiplier" or "school.size"
    values: Any = None  # numbers, or words for "method" and "quantity"
    linspace: Any = None  # (first, last, how_many), evenly spaced, both ends included
    # The same with a constant ratio. Whole numbers are rounded, duplicates dropped.
    geomspace: Any = None
    zip: str | None = None  # axes with the same name here move together

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
            with np.errstate(all="ignore"):  # an overflow is refused below
                points = spaced(*(self.linspace or self.geomspace))
            if not np.isfinite(points).all():
                raise ValueError(f"axis {self.field!r} has ends too far apart")
        if not is_whole(self.field):
            return points.astype(float)
        if np.any(np.abs(points.astype(float)) > _MAX_SETTINGS):
            raise ValueError(f"axis {self.field!r} must hold numbers up to 2**53")
        if self.values is not None:
            return points.astype(int if np.all(points == np.rint(points)) else float)
        rounded = np.rint(points).astype(np.int64)
        # Keeps the order of the axis, which may be descending.
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
    """All settings of 1 to 12 axes, by index."""

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
        # Field -> the values of its axis, (K,).
        self.points = {axis.field: axis.points() for axis in axes}
        dimensions: dict[tuple[str, str], list[str]] = {}
        for axis in axes:
            key = ("field", axis.field) if axis.zip is None else ("zip", axis.zip)
            dimensions.setdefault(key, []).append(axis.field)
        # Dimensions of the product, slowest first: each a tuple of zipped fields.
        self.dimensions = tuple(tuple(fields) for fields in dimensions.values())
        for fields in self.dimensions:
            lengths = {name: self.points[name].size for name in fields}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"zipped axes must be equally long, got {lengths}")
        self.shape = tuple(self.points[fields[0]].size for fields in self.dimensions)
        self.size = math.prod(self.shape)
        if self.size > _MAX_SETTINGS:
            raise ValueError(f"a sweep has at most 2**53 settings, got {self.size:,}")

    def dimension_of(self, field: str) -> int:
        """Returns the dimension of the product that a field belongs to."""
        return next(i for i, d in enumerate(self.dimensions) if field in d)

    def values(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """Returns every field's (n,) values at settings ``index``, (n,) int64."""
        along = np.unravel_index(index, self.shape)
        return {n: self.points[n][along[self.dimension_of(n)]] for n in self.names}

    def index(self, along: dict[int, Any]) -> np.ndarray:
        """Returns the settings at (broadcast) indices along all dimensions."""
        arrays = np.broadcast_arrays(*(along[i] for i in range(len(self.shape))))
        return np.ravel_multi_index(arrays, self.shape)

    def corners(self) -> dict[str, np.ndarray]:
        """Returns the settings with each field at its smallest or largest value."""
        ends = []
        for fields in self.dimensions:
            columns = [self.points[name] for name in fields]
            extremes: Any = np.arange(columns[0].size)  # of words: all
            if all(column.dtype.kind != "U" for column in columns):
                extremes = [(np.argmin(c), np.argmax(c)) for c in columns]
            ends.append(np.unique(extremes))
        corners = np.meshgrid(*ends, indexing="ij")
        return self.values(self.index(dict(enumerate(c.ravel() for c in corners))))


# Quantity -> the fields of the request that it needs.
_NEEDS = {
    "epsilon": ("num_steps", "delta"),
    "delta": ("num_steps", "epsilon"),
    "noise_multiplier": ("num_steps", "epsilon", "delta"),
    "num_steps": ("epsilon", "delta"),
}
QUANTITIES = tuple(_NEEDS)
_TARGETS = ("num_steps", "delta", "epsilon")
_NOISE = "noise_multiplier"
_WORDS = {QUANTITY: QUANTITIES, METHOD: METHODS}
# Method -> settings per chunk, of calibrations and of epsilons or deltas: a few seconds
# on two cores, by NumPy and by compiled kernels.
_CHUNKS = {"rdp": (4096, 16384), "exact": (128, 1024), "pld": (32, 256)}
_COMPILED_CHUNKS = {"rdp": (16384, 65536), "exact": (2048, 16384), "pld": (32, 256)}
_MANY_CHUNKS = 4  # compiling pays for a sweep of this many of NumPy's chunks
# Memory of the kernels for one path of one setting, in bytes; an estimate.
_BYTES_A_ROW = 2048


@dataclass(frozen=True, eq=False, kw_only=True)
class Sweep(Spec):
    """A grid of settings, and the quantity to compute for each."""

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "axes": (Axis,),  # first, as their errors name them
        "step": (GaussianStep, ComposedSteps),
    }

    step: GaussianStep | ComposedSteps  # axes replace its numbers
    # For fields of the step, "num_steps", "delta", "epsilon", "method" and "quantity".
    axes: tuple[Axis, ...]
    quantity: str = "epsilon"  # one of `QUANTITIES`
    num_steps: Any = None  # None for a composed run, and if it is calibrated
    delta: Any = None
    epsilon: Any = None
    method: str | None = None  # see `jaxdp_episodic.epsilon`; None: its default
    memory_mib: int = 256  # bound on the arrays of a chunk; it limits the chunk size

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, METHOD, EpsilonRequest.method)
        _validation.whole_number("memory_mib", self.memory_mib)
        if self.step.shape:
            raise ValueError(
                "fields of the step must be numbers, as axes vary them, got fields of "
                f"shape {self.step.shape}"
            )
        _validation.choice(QUANTITY, self.quantity, QUANTITIES)
        check_method(str(self.method))
        for name, allowed in _WORDS.items():
            for word in self._words(name):
                _validation.choice(f"axis {name!r}", word, allowed)
        if not self.axes:
            raise ValueError("axes must be at least one table ([[axes]]), got none")
        for index, axis in enumerate(self.axes):
            _check_field(index, axis.field, self.paths)
            for quantity in self.quantities:
                unused = axis.field in _TARGETS and axis.field not in _NEEDS[quantity]
                if unused or axis.field.rpartition(".")[2] == _NOISE == quantity:
                    raise ValueError(
                        f"axes[{index}]: {axis.field!r} cannot be an axis with "
                        f"quantity={quantity!r}, which does not depend on it"
                    )
        for name in _TARGETS:
            self._check_target(name)
        self._check_values()

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str | None = None) -> Self:
        """Returns the sweep that ``mapping`` describes; see `spec_from_dict`."""
        # First, as the code below recurses as deep as the nesting.
        refuse_hostile(where or cls.__name__, mapping)
        if isinstance(mapping, Mapping):
            mapping = dict(mapping)
            if not isinstance(mapping.get("axes", ()), list | tuple):
                raise TypeError("axes must be a list of tables, each under [[axes]]")
            if "axes" in mapping:
                mapping["axes"] = _with_names(mapping["axes"], mapping.get("step"))
            if "step" in mapping:
                mapping["step"] = _with_first_values(mapping)
        try:
            return super().from_dict(mapping, where=where)
        except ValueError as error:
            # A typo in an axis's field also leaves the right field without a value.
            if "missing key" in str(error) and isinstance(mapping, Mapping):
                if paths := numeric_fields(mapping.get("step")):
                    for index, axis in _tables_of(mapping):
                        _check_field(index, axis["field"], paths)
            raise

    @cached_property
    def grid(self) -> Grid:
        """The settings."""
        return Grid(self.axes)

    @cached_property
    def paths(self) -> dict[str, KeyPath]:
        """Name -> path of the step's numeric fields."""
        return numeric_fields(table_of(self.step))

    @cached_property
    def quantities(self) -> tuple[str, ...]:
        """All quantities to compute."""
        return self._words(QUANTITY) or (self.quantity,)

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """All methods to use."""
        return self._words(METHOD) or (str(self.method),)

    @cached_property
    def chunk_size(self) -> int:
        """Number of settings that are evaluated together and saved as one shard."""
        step = self.step
        parts = step.steps if isinstance(step, ComposedSteps) else (step,)
        pairs = [dominating_pair(part) for part in parts]
        is_answer = [quantity in ("epsilon", "delta") for quantity in self.quantities]

        def least(chunks: Mapping[str, tuple[int, int]]) -> int:
            return min(chunks[method][i] for method in self.methods for i in is_answer)

        most = least(_CHUNKS)
        if self.grid.size >= _MANY_CHUNKS * most and all(p.compiles for p in pairs):
            most = least(_COMPILED_CHUNKS)
        rows = sum(pair.shape[-1] for pair in pairs)
        most = min(most, int(self.memory_mib) * 2**20 // _BYTES_A_ROW) // rows
        return 1 << (max(most, 1).bit_length() - 1)

    def request(self, quantity: str, method: str, values: Mapping[str, Any]) -> Request:
        """Returns the request for some settings: (n,) values for every axis."""
        given = {name: getattr(self, name) for name in _NEEDS[quantity]}
        given |= {name: v for name, v in values.items() if name in _TARGETS}
        step: Any = self.step
        inside = {self.paths[n]: v for n, v in values.items() if n in self.paths}
        if inside:
            table = table_of(step)
            for path, value in inside.items():
                table = filled(table, path, value, over=True)
            step = type(step).from_dict(table, where="step")
        given |= {"step": step, "method": method}
        if quantity in ("epsilon", "delta"):
            return EpsilonRequest(**given)
        return CalibrationRequest(calibrate=quantity, **given)

    def description(self) -> dict[str, Any]:
        """Returns the sweep as plain values for the manifest, populations as hashes."""
        return _without_sizes(self.to_dict())

    def _words(self, field: str) -> tuple[str, ...]:
        """The words that a field takes along its axis, if it has one."""
        found = [axis.values for axis in self.axes if axis.field == field]
        return tuple(dict.fromkeys(found[0])) if found else ()

    def _check_target(self, name: str) -> None:
        """Refuses a target that is missing, superfluous or a list."""
        value = getattr(self, name)
        needed = [q for q in self.quantities if name in _NEEDS[q]]
        if name == "num_steps" and isinstance(self.step, ComposedSteps):
            needed = []
        if needed and value is None and name not in self.grid.names:
            raise ValueError(f"{name} must be given with quantity={needed[0]!r}")
        if value is not None and not needed:
            raise ValueError(
                f"{name} must be left out with quantity={self.quantities[0]!r}"
                f"{' of a composed run' * (name == 'num_steps')}, got {value!r}"
            )
        if value is not None and np.ndim(value):
            raise ValueError(f"{name} must be a number, as axes vary it, got {value!r}")

    def _check_values(self) -> None:
        """Refuses values out of range: in each dimension, then at all corners."""
        grid, rows = self.grid, self.chunk_size
        first = {name: grid.points[name][:1] for name in grid.names}
        tries = {"": grid.corners()}
        for moving in grid.dimensions:
            named = "axis " + " and ".join(map(repr, moving)) + ": "
            tries = {named: {n: grid.points[n] for n in moving}, **tries}
        for prefix, columns in tries.items():
            for start in range(0, len(next(iter(columns.values()))), rows):
                some = {n: v[start : start + rows] for n, v in columns.items()}
                self._try(prefix, first | some)

    def _try(self, prefix: str, values: Mapping[str, np.ndarray]) -> None:
        """Builds the requests for some settings, without answering them."""
        try:
            for quantity in self.quantities:
                request = self.request(quantity, self.methods[0], values)
                step: Any = request.step  # of the sweep's own kind
                count = None if isinstance(step, ComposedSteps) else np.asarray(1)
                runs_of(step, count)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{prefix}{error}") from None


def read_sweep(path: str | Path) -> Sweep:
    """Returns the validated sweep in a TOML file."""
    # read_request uses only from_dict and the field step of the class.
    return read_request(path, Sweep)  # pyright: ignore[reportArgumentType]


def described_grid(description: Mapping[str, Any]) -> Grid:
    """Returns the grid of a `Sweep.description` that may come from a stranger."""
    axes = description.get("axes")
    if not isinstance(axes, list):
        raise TypeError(f"axes must be a list, got {_validation.shown(axes)}")
    tables = ({"version": 1, **a} if isinstance(a, Mapping) else a for a in axes)
    grid = Grid(tuple(Axis.from_dict(table) for table in tables))
    for name, allowed in _WORDS.items():
        _validation.choice(name, description.get(name), allowed)
        for word in grid.points[name].tolist() if name in grid.names else ():
            _validation.choice(f"axis {name!r}", word, allowed)
    for name in _TARGETS:
        value = description.get(name)
        if value is not None and _validation.real_array(name, value).ndim:
            raise ValueError(f"{name} must be a number, got {_validation.shown(value)}")
    return grid


def description_hash(description: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a description, as hexadecimal digits."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_field(index: int, field: str, paths: Mapping[str, Any]) -> None:
    """Refuses an unknown field of an axis, with the nearest known one."""
    known = (*paths, *_TARGETS, METHOD, QUANTITY)
    if field not in known:
        hint = _validation.nearest(field, known) or f"; the fields are {known}"
        raise ValueError(f"axes[{index}]: unknown field {field!r}{hint}")


def _tables_of(mapping: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The axes that are tables with a field, with their indices."""
    axes = mapping.get("axes")
    for index, axis in enumerate(axes if isinstance(axes, list | tuple) else ()):
        if isinstance(axis, Mapping) and isinstance(axis.get("field"), str):
            yield index, dict(axis)


def _with_names(axes: list[Any] | tuple[Any, ...], step: Any) -> list[Any]:
    """The axes with names in place of paths in the file."""
    names = {}
    for table in (step, wrapped(step)):
        for name, path in numeric_fields(table).items():  # "step.levels[1].size"
            parts = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
            names["step" + "".join(parts)] = name
    named = list(axes)  # reading them refuses those that are no tables
    for index, axis in _tables_of({"axes": axes}):
        named[index] = {**axis, "field": names.get(axis["field"], axis["field"])}
    return named


def _with_first_values(mapping: Mapping[str, Any]) -> Any:
    """The step's table, with the first value of an axis for each missing field."""
    step = wrapped(mapping.get("step"))
    paths = numeric_fields(step)
    for _, axis in _tables_of(mapping):
        name = axis["field"]
        check = _CHECKS.get(name.rpartition(".")[2]) if name in paths else None
        if check is not None and is_whole(name):
            check = _validation.positive_array  # it is rounded later
        given = next((axis[way] for way in AXIS_WAYS if way in axis), None)
        if check is not None and isinstance(given, list | tuple) and given:
            check(f"axis {name!r}", list(given if "values" in axis else given[:2]))
            step = filled(step, paths[name], given[0])
    if mapping.get(QUANTITY) == _NOISE and _NOISE in paths:
        step = filled(step, paths[_NOISE], 1.0)
    return step


def _without_sizes(value: Any) -> Any:
    """The same dictionary with every population replaced by its hash."""
    if isinstance(value, Mapping):
        if value.get("type") == Population.__name__:
            return {"type": Population.__name__, "sha256": description_hash(value)}
        return {name: _without_sizes(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_sizes(item) for item in value]
    return value

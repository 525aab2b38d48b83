"""The description of a sweep: a request with axes in place of fields, and their grid.

The grid is never held in memory: a setting is an index.

Axes combine as a product, the first one slowest; axes with the same ``zip`` move
together. Fields have the names that ``epsilon`` prints: "noise_multiplier",
"school.size", "people.classes"; in a composed run "counts[0]", "steps[0].school.size".
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.spec import Spec, mapped, refuse_hostile
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.api import METHODS
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair, runs_of
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    Request,
    read_request,
)
from jaxdp_episodic.trainer.data import fields

AXIS_WAYS = ("values", "linspace", "geomspace")
METHOD = "method"
QUANTITY = "quantity"
WORD_FIELDS = (METHOD, QUANTITY)  # fields whose axis is a list of words
_MAX_SETTINGS = 2**53  # so that indices are exact
_MAX_VALUES = 10_000_000  # of an axis; all values of the axes are in memory
_MAX_AXES = 12  # all corners of the grid are checked, at most 2**12
_MAX_LETTERS = 100  # of a word; the longest known one has 16


def _specs(spec: type[Spec]) -> Iterator[type[Spec]]:
    """A class, and all classes that its dictionary may contain."""
    yield spec
    for inside in spec.nested_specs.values():
        for one in inside:
            yield from _specs(one)


_NUMERIC = {spec.__name__: spec.numeric for spec in _specs(ComposedSteps)}
_WHOLE = {
    name
    for checks in _NUMERIC.values()
    for name, check in checks.items()
    if getattr(check, "func", None) is _validation.integer_array
}
_STEPS = ("steps", "parts")
_PARTS = ("sampling", "levels", "episodes", "classes", "examples", "people", *_STEPS)
# Way -> the check of its first and last number.
_ENDS = {
    "linspace": _validation.reals("have finite ends", np.isfinite),
    "geomspace": _validation.positive_array,
}


def is_whole(field: str) -> bool:
    """True if a field takes whole numbers only."""
    name = field.rpartition(".")[2]
    return name in _WHOLE or name == "num_steps" or name.startswith("counts[")


class Place(NamedTuple):
    """Where a step's table has a numeric field."""

    path: str  # as in `mapped`, for example "sampling.levels[1].size"
    table: dict[str, Any]  # the table that holds the field, or lacks it
    value: Any  # None if it is missing


def numeric_fields(
    step: Any, path: tuple[str, ...] = (), prefix: str = ""
) -> dict[str, Place]:
    """Returns name -> place of the numeric fields in the table of a step."""
    found: dict[str, Place] = {}
    if not isinstance(step, dict):
        return found
    kind, name, counts = str(step.get("type")), step.get("name"), step.get("counts")
    if kind == ComposedSteps.__name__ and isinstance(counts, list):
        own = {f"counts[{i}]": count for i, count in enumerate(counts)}
        found |= {place: Place(place, {}, count) for place, count in own.items()}
    named = f"{prefix}{name}." if isinstance(name, str) else prefix
    for field in _NUMERIC.get(kind, ()):
        where = ".".join((*path, field))
        found[named + field] = Place(where, step, step.get(field))
    for part in _PARTS:
        value = step.get(part)
        if not isinstance(value, list):
            inner = f"{prefix}people." if part == "people" else prefix
            found |= numeric_fields(value, (*path, part), inner)
            continue
        for i, item in enumerate(value):
            inner = f"{prefix}{part}[{i}]." if part in _STEPS else prefix
            found |= numeric_fields(item, (*path, f"{part}[{i}]"), inner)
    return found


class Axis(fields.CheckedSpec):
    """The values of one field, given in exactly one of three ways."""

    field: fields.Text  # e.g. "noise_multiplier" or "school.size"
    values: Any = None  # numbers, or words for "method" and "quantity"
    linspace: Any = None  # (first, last, how_many), evenly spaced, both ends included
    # The same with a constant ratio. Whole numbers are rounded, duplicates dropped.
    geomspace: Any = None
    zip: fields.Text | None = None  # axes with the same name here move together

    def check_values(self) -> None:
        """Refuses lists that are not of words or numbers, and several lists."""
        given = [name for name in AXIS_WAYS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {AXIS_WAYS}, got {given or 'none'}")
        (way,) = given
        if way != "values" and self.field in WORD_FIELDS:
            raise ValueError(f"{self.field} must be given by values, got {way}")
        given = getattr(self, way)
        if self.field in WORD_FIELDS:
            checked = fields.listed(way, given)
            if max(map(len, checked)) > _MAX_LETTERS:
                raise ValueError(f"values must have at most {_MAX_LETTERS} letters")
        elif way == "values":
            array = _validation.real_array(way, given)
            if array.ndim != 1 or not 1 <= array.size <= _MAX_VALUES:
                raise ValueError(
                    f"values must be a flat list of at least one number and at most "
                    f"{_MAX_VALUES:,}, got shape {array.shape}"
                )
            checked = tuple(np.asarray(given).tolist())
        elif not isinstance(given, list | tuple) or len(given) != 3:
            shown = _validation.shown(given)
            raise ValueError(f"{way} must be [first, last, how_many], got {shown}")
        else:
            ends = (_validation.one(way, end, _ENDS[way]) for end in given[:2])
            what = f"{way}: how_many"
            number = _validation.whole_number(what, given[2], maximum=_MAX_VALUES)
            checked = *ends, number
        object.__setattr__(self, way, checked)

    def points(self) -> np.ndarray:
        """Returns the values, (K,): float64, int64 for whole numbers, or strings."""
        points = np.asarray(self.values)
        if self.field in WORD_FIELDS:
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


class Grid:
    """All settings of 1 to 12 axes, by index."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        if not axes:
            raise ValueError("axes must be at least one table ([[axes]]), got none")
        if len(axes) > _MAX_AXES:
            raise ValueError(f"a sweep has at most {_MAX_AXES} axes, got {len(axes)}")
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
        self.dimensions = tuple(map(tuple, dimensions.values()))
        for names in self.dimensions:
            lengths = {name: self.points[name].size for name in names}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"zipped axes must be equally long, got {lengths}")
        self.shape = tuple(self.points[names[0]].size for names in self.dimensions)
        self.size = math.prod(self.shape)
        if self.size > _MAX_SETTINGS:
            raise ValueError(f"a sweep has at most 2**53 settings, got {self.size:,}")

    def words(self, field: str, default: Any) -> tuple[str, ...]:
        """Returns the words of an axis, each once, or the default without an axis."""
        words = self.points[field].tolist() if field in self.names else (default,)
        return tuple(dict.fromkeys(words))

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
        for names in self.dimensions:
            columns = [self.points[name] for name in names]
            extremes: Any = np.arange(columns[0].size)  # of words: all
            if all(column.dtype.kind != "U" for column in columns):
                extremes = [(np.argmin(c), np.argmax(c)) for c in columns]
            ends.append(np.unique(extremes))
        corners = np.meshgrid(*ends, indexing="ij")
        return self.values(self.index(dict(enumerate(c.ravel() for c in corners))))


# Quantity -> the fields of the request that it needs.
NEEDS = {
    "epsilon": ("num_steps", "delta"),
    "delta": ("num_steps", "epsilon"),
    "noise_multiplier": ("num_steps", "epsilon", "delta"),
    "num_steps": ("epsilon", "delta"),
}
QUANTITIES = tuple(NEEDS)
EVALUATED = ("epsilon", "delta")  # the others are calibrated
VALUE = "value"  # the column of answers if there are several quantities
# Columns for methods other than "rdp": fields of `PrivacyInfo`. The error of a
# calibrated value is NaN.
INFO = ("error", "is_certified_bound")
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


class Sweep(Spec, kw_only=True):
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
    method: str = EpsilonRequest.method  # see `jaxdp_episodic.epsilon`
    memory_mib: int = 256  # bound on the arrays of a chunk; it limits the chunk size

    def __post_init__(self) -> None:
        _validation.whole_number("memory_mib", self.memory_mib)
        if self.step.shape:
            raise ValueError(
                "fields of the step must be numbers, as axes vary them, got fields of "
                f"shape {self.step.shape}"
            )
        _check_words(self.grid, {QUANTITY: self.quantity, METHOD: self.method})
        for index, axis in enumerate(self.axes):
            _check_field(index, axis.field, self.paths)
            for quantity in self.quantities:
                unused = axis.field in _TARGETS and axis.field not in NEEDS[quantity]
                if unused or axis.field.rpartition(".")[2] == _NOISE == quantity:
                    raise ValueError(
                        f"axes[{index}]: {axis.field!r} cannot be an axis with "
                        f"quantity={quantity!r}, which does not depend on it"
                    )
        is_composed = isinstance(self.step, ComposedSteps)
        for name in _TARGETS:
            value: Any = getattr(self, name)
            is_count = is_composed and name == "num_steps"
            needed = [q for q in self.quantities if name in NEEDS[q] and not is_count]
            if needed and value is None and name not in self.grid.names:
                raise ValueError(f"{name} must be given with quantity={needed[0]!r}")
            if value is not None and not needed:
                raise ValueError(
                    f"{name} must be left out with quantity={self.quantities[0]!r}"
                    f"{' of a composed run' * is_count}, got {value!r}"
                )
            if value is not None and np.ndim(value):
                raise ValueError(
                    f"{name} must be a number, as axes vary it, got {value!r}"
                )
        self._check_values()

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str | None = None) -> Self:
        """Returns the sweep that ``mapping`` describes; see `spec_from_dict`."""
        # Axes may have paths in the file in place of names. The step may lack fields
        # that have an axis: their first values are filled in.
        where = where or cls.__name__
        # First, as the code below recurses as deep as the nesting.
        refuse_hostile(where, mapping)
        if not isinstance(mapping, Mapping) or "axes" not in mapping:
            return super().from_dict(mapping, where=where)
        table = {**mapping, "step": copy.deepcopy(mapping.get("step"))}
        places = numeric_fields(table["step"])
        names = {f"step.{place.path}": name for name, place in places.items()}
        single = ".sampling.", ".sampling.levels[0]."  # a single scheme is one level
        names |= {path.replace(*single): name for path, name in names.items()}
        table["axes"] = axes = _read_axes(mapping["axes"], f"{where}.axes", names)
        first = {axis.field: axis.points()[0].item() for axis in axes}
        if mapping.get(QUANTITY) == _NOISE:
            first[_NOISE] = 1.0
        for name in places.keys() & first.keys():
            places[name].table.setdefault(name.rpartition(".")[2], first[name])
        try:
            return super().from_dict(table, where=where)
        except ValueError as error:
            # A typo in an axis's field also leaves the right field without a value.
            if "missing key" in str(error) and places:
                for index, axis in enumerate(axes):
                    _check_field(index, axis.field, places)
            raise

    @cached_property
    def grid(self) -> Grid:
        """The settings."""
        return Grid(self.axes)

    @cached_property
    def paths(self) -> dict[str, str]:
        """Name -> path of the step's numeric fields."""
        places = numeric_fields(self.step.to_dict()).items()
        return {name: place.path for name, place in places if place.value is not None}

    @cached_property
    def quantities(self) -> tuple[str, ...]:
        """All quantities to compute."""
        return self.grid.words(QUANTITY, self.quantity)

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """All methods to use."""
        return self.grid.words(METHOD, self.method)

    @cached_property
    def chunk_size(self) -> int:
        """Number of settings that are evaluated together and saved as one shard."""
        step = self.step
        parts = step.steps if isinstance(step, ComposedSteps) else (step,)
        pairs = [dominating_pair(part) for part in parts]
        is_answer = [quantity in EVALUATED for quantity in self.quantities]

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
        given = {name: getattr(self, name) for name in NEEDS[quantity]}
        given |= {name: v for name, v in values.items() if name in _TARGETS}
        inside = {self.paths[n]: v for n, v in values.items() if n in self.paths}
        step = mapped(self.step, lambda path, number: inside.get(path, number))
        given |= {"step": step, "method": method}
        if quantity in EVALUATED:
            return EpsilonRequest(**given)
        return CalibrationRequest(calibrate=quantity, **given)

    def description(self) -> dict[str, Any]:
        """Returns the sweep as plain values for the manifest, populations as hashes."""
        return _without_sizes(self.to_dict())

    def _check_values(self) -> None:
        """Refuses values out of range: in each dimension, then at all corners."""
        grid, rows = self.grid, self.chunk_size
        first = {name: grid.points[name][:1] for name in grid.names}
        tries = {
            f"axis {' and '.join(map(repr, names))}": {n: grid.points[n] for n in names}
            for names in grid.dimensions
        }
        for place, columns in {**tries, "axes": grid.corners()}.items():
            starts = range(0, len(next(iter(columns.values()))), rows)
            for start, quantity in itertools.product(starts, self.quantities):
                some = {n: v[start : start + rows] for n, v in columns.items()}
                with _validation.prefixed(place):
                    request = self.request(quantity, self.methods[0], first | some)
                    step: Any = request.step  # of the sweep's own kind
                    count = None if isinstance(step, ComposedSteps) else np.asarray(1)
                    runs_of(step, count)


def read_sweep(path: str | Path) -> Sweep:
    """Returns the validated sweep in a TOML file."""
    # read_request uses only from_dict and the field step of the class.
    return read_request(path, Sweep)  # pyright: ignore[reportArgumentType]


def described_grid(description: Mapping[str, Any]) -> Grid:
    """Returns the grid of a `Sweep.description` that may come from a stranger."""
    grid = Grid(_read_axes(description.get("axes"), "axes", {}))
    _check_words(grid, description)
    for name in _TARGETS:
        value = description.get(name)
        if value is not None and _validation.real_array(name, value).ndim:
            raise ValueError(f"{name} must be a number, got {_validation.shown(value)}")
    return grid


def answer_columns(grid: Grid, description: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a sweep's computed columns."""
    words = {name: grid.words(name, description[name]) for name in _WORDS}
    column = VALUE if QUANTITY in grid.names else description[QUANTITY]
    has_info = {*words[METHOD]} != {"rdp"} and {*words[QUANTITY]} & {*EVALUATED}
    return (column, *INFO) if has_info else (column,)


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


def _check_words(grid: Grid, description: Mapping[str, Any]) -> None:
    """Refuses an unknown quantity or method, given as one or along an axis."""
    for name, allowed in _WORDS.items():
        _validation.choice(name, description.get(name), allowed)
        for word in grid.words(name, None) if name in grid.names else ():
            _validation.choice(f"axis {name!r}", word, allowed)


def _read_axes(axes: Any, where: str, names: Mapping[str, str]) -> tuple[Axis, ...]:
    """The axes of a file or a description, with names in place of paths in the file."""
    if not isinstance(axes, list | tuple):
        raise TypeError("axes must be a list of tables, each under [[axes]]")
    read = []
    for index, table in enumerate(axes):
        table = {"version": 1, **table} if isinstance(table, Mapping) else table
        axis = Axis.from_dict(table, where=f"{where}[{index}]")
        if axis.field in names:
            axis = dataclasses.replace(axis, field=names[axis.field])
        read.append(axis)
    return tuple(read)


def _without_sizes(value: Any) -> Any:
    """The same dictionary with every population replaced by its hash."""
    if isinstance(value, Mapping):
        if value.get("type") == Population.__name__:
            return {"type": Population.__name__, "sha256": description_hash(value)}
        return {name: _without_sizes(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_sizes(item) for item in value]
    return value

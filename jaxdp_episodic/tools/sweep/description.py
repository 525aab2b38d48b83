"""A sweep described: one request whose fields are replaced by axes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.serialization import refuse_hostile
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.api import METHODS, check_method
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair, run_of
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    Request,
    read_request,
)
from jaxdp_episodic.tools.sweep import grid as fields
from jaxdp_episodic.tools.sweep.grid import AXIS_WAYS, METHOD, QUANTITY, Axis, Grid

# What may be asked for, and the fields of the request that each answer needs.
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
# Settings a chunk of calibrations, and of answers: a few seconds' work on two cores,
# by NumPy, and by kernels that are compiled.
_CHUNKS = {"rdp": (4096, 16384), "exact": (128, 1024), "pld": (32, 256)}
_COMPILED_CHUNKS = {"rdp": (16384, 65536), "exact": (2048, 16384), "pld": (32, 256)}
# Chunks by NumPy from which on a sweep pays for compiling.
_MANY_CHUNKS = 4
# Bytes of one path of one setting, with all that the kernels make of it: an estimate.
_BYTES_A_ROW = 2048


@dataclass(frozen=True, eq=False, kw_only=True)
class Sweep(Spec):
    """A grid of settings, and what is asked of every one."""

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "axes": (Axis,),  # first, as their errors name them
        "step": (GaussianStep, ComposedSteps),
    }

    step: GaussianStep | ComposedSteps  # axes replace its numbers
    # Of fields of the step, and "num_steps", "delta", "epsilon", "method", "quantity".
    axes: tuple[Axis, ...]
    quantity: str = "epsilon"  # one of `QUANTITIES`
    num_steps: Any = None  # None for a composed run, and where it is sought
    delta: Any = None
    epsilon: Any = None
    method: str | None = None  # see `jaxdp_episodic.epsilon`; None: its default
    memory_mib: int = 256  # of the arrays of a chunk, at most: it sets their size

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, METHOD, EpsilonRequest.method)
        _validation.whole_number("memory_mib", self.memory_mib)
        if self.step.shape:
            raise ValueError(
                "the numbers of the step must not be lists, as axes say what varies; "
                f"got fields of shape {self.step.shape}"
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
        # Before names are filled in below, which recurses as deep as the nesting.
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
                if paths := fields.numeric_fields(mapping.get("step")):
                    for index, axis in _tables_of(mapping):
                        _check_field(index, axis["field"], paths)
            raise

    @cached_property
    def grid(self) -> Grid:
        """The settings."""
        return Grid(self.axes)

    @cached_property
    def paths(self) -> dict[str, fields.Path]:
        """Where the step's numeric fields are, by name."""
        return fields.numeric_fields(fields.table_of(self.step))

    @cached_property
    def quantities(self) -> tuple[str, ...]:
        """All quantities that are asked for."""
        return self._words(QUANTITY) or (self.quantity,)

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """All methods that answer."""
        return self._words(METHOD) or (str(self.method),)

    @cached_property
    def chunk_size(self) -> int:
        """How many settings are evaluated in one go, and saved as one shard."""
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
            table = fields.table_of(step)
            for path, value in inside.items():
                table = fields.filled(table, path, value, over=True)
            step = type(step).from_dict(table, where="step")
        given |= {"step": step, "method": method}
        if quantity in ("epsilon", "delta"):
            return EpsilonRequest(**given)
        return CalibrationRequest(calibrate=quantity, **given)

    def description(self) -> dict[str, Any]:
        """Returns what makes this sweep this sweep, for the manifest."""
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
            raise ValueError(
                f"{name} must be a number, as axes say what varies, got {value!r}"
            )

    def _check_values(self) -> None:
        """Refuses values out of range, one dimension after the other, then corners."""
        grid, rows = self.grid, self.chunk_size
        first = {name: grid.points(name)[:1] for name in grid.names}
        tries = {"": grid.corners()}
        for moving in grid.dimensions:
            named = "axis " + " and ".join(map(repr, moving)) + ": "
            tries = {named: {n: grid.points(n) for n in moving}, **tries}
        for prefix, columns in tries.items():
            for start in range(0, len(next(iter(columns.values()))), rows):
                some = {n: v[start : start + rows] for n, v in columns.items()}
                self._try(prefix, first | some)

    def _try(self, prefix: str, values: Mapping[str, np.ndarray]) -> None:
        """Builds everything that is asked at some settings, but for the answers."""
        try:
            for quantity in self.quantities:
                request = self.request(quantity, self.methods[0], values)
                step: Any = request.step  # of the sweep's own kind
                run_of(step, None if isinstance(step, ComposedSteps) else np.asarray(1))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{prefix}{error}") from None


def read_sweep(path: str | Path) -> Sweep:
    """Returns the sweep in a TOML file, fully validated; nothing is computed yet."""
    # read_request needs no more of the class than these two: from_dict and step.
    return read_request(path, Sweep)  # pyright: ignore[reportArgumentType]


def described_grid(description: Mapping[str, Any]) -> Grid:
    """Returns the grid of a `Sweep.description`, which anybody may have written."""
    axes = description.get("axes")
    if not isinstance(axes, list):
        raise TypeError(f"axes must be a list, got {_validation.shown(axes)}")
    tables = ({"version": 1, **a} if isinstance(a, Mapping) else a for a in axes)
    grid = Grid(tuple(Axis.from_dict(table) for table in tables))
    for name, allowed in _WORDS.items():
        _validation.choice(name, description.get(name), allowed)
        for word in grid.points(name).tolist() if name in grid.names else ():
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
    """Refuses the field of an axis that there is not, and names the nearest."""
    known = (*paths, *_TARGETS, METHOD, QUANTITY)
    if field not in known:
        hint = _validation.nearest(field, known) or f"; the fields are {known}"
        raise ValueError(f"axes[{index}]: unknown field {field!r}{hint}")


def _tables_of(mapping: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The axes that are tables with a field, and their places."""
    axes = mapping.get("axes")
    for index, axis in enumerate(axes if isinstance(axes, list | tuple) else ()):
        if isinstance(axis, Mapping) and isinstance(axis.get("field"), str):
            yield index, dict(axis)


def _with_names(axes: list[Any] | tuple[Any, ...], step: Any) -> list[Any]:
    """The axes with their type, and fields given as paths in the file by name."""
    names = {}
    for table in (step, fields.wrapped(step)):
        found = fields.numeric_fields(table)
        names |= {fields.dotted(path): name for name, path in found.items()}
    named = list(axes)  # what is no table is refused where specs are read
    for index, axis in enumerate(axes):
        if isinstance(axis, Mapping):
            named[index] = {"type": Axis.__name__, **axis}
    for index, axis in _tables_of({"axes": axes}):
        named[index]["field"] = names.get(axis["field"], axis["field"])
    return named


def _with_first_values(mapping: Mapping[str, Any]) -> Any:
    """The step's table, where fields left out have the first value of their axis."""
    step = fields.wrapped(mapping.get("step"))
    paths = fields.numeric_fields(step)
    for _, axis in _tables_of(mapping):
        name = axis["field"]
        check = fields.check_of(name) if name in paths else None
        given = next((axis[way] for way in AXIS_WAYS if way in axis), None)
        if check is not None and isinstance(given, list | tuple) and given:
            check(f"axis {name!r}", list(given if "values" in axis else given[:2]))
            step = fields.filled(step, paths[name], given[0])
    if mapping.get(QUANTITY) == _NOISE and _NOISE in paths:
        step = fields.filled(step, paths[_NOISE], 1.0)
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

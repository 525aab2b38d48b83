"""What a picture shows of a sweep: some settings along two or three of its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.tools.plots.labels import number, short_label
from jaxdp_episodic.tools.sweep.description import QUANTITIES, described_grid
from jaxdp_episodic.tools.sweep.folder import SweepFolder, read_manifest
from jaxdp_episodic.tools.sweep.grid import METHOD, QUANTITY, Grid
from jaxdp_episodic.tools.sweep.table import read_columns


class SweepTable:
    """A finished sweep, read as far as it is looked at.

    Args:
      folder: the sweep's.

    Attributes:
      path: of the table.
      grid: the settings.
      description: of the sweep.
      value: name of the answers' column.
    """

    def __init__(self, folder: Path) -> None:
        sweep = SweepFolder(folder, read_manifest(folder))
        if sweep.table is None:
            raise ValueError("the sweep is not finished: it has no table yet")
        self.path = sweep.table
        self.description: dict[str, Any] = sweep.manifest["sweep"]
        self.grid: Grid = described_grid(self.description)
        self.value = sweep.columns[0]

    def answers(self, index: np.ndarray) -> np.ndarray:
        """Returns the answers of settings, in the shape of ``index``."""
        wanted, back = np.unique(index, return_inverse=True)
        answers = np.empty(wanted.size)
        start = 0
        for block in read_columns(self.path, [self.value], num_rows=self.grid.size):
            column = block[self.value]
            low, high = np.searchsorted(wanted, (start, start + column.size))
            answers[low:high] = column[wanted[low:high] - start]
            start += column.size
            if start > wanted[-1]:
                break
        return answers[back].reshape(np.shape(index))

    def held(
        self, drawn: Sequence[str], fix: Mapping[str, str]
    ) -> tuple[dict[int, int], dict[str, Any]]:
        """Returns where the axes that are not drawn are held, by ``fix`` or by default.

        For each such dimension the index along it, and for each field there its value:
        of numbers the middle one, of words the first.
        """
        held: dict[int, int] = {}
        moving = {self.grid.dimension_of(field) for field in drawn}
        for field, text in fix.items():
            self.check_field("--fix", field)
            dimension = self.grid.dimension_of(field)
            if dimension in moving:
                raise ValueError(f"--fix: {field!r} is drawn, so it is not fixed")
            index = index_of("--fix", field, self.grid.points(field), text)
            if held.setdefault(dimension, index) != index:
                raise ValueError(f"--fix: {field!r} moves with a field fixed elsewhere")
        for dimension, fields in enumerate(self.grid.dimensions):
            if dimension in moving or dimension in held:
                continue
            points = self.grid.points(fields[0])
            held[dimension] = 0 if points.dtype.kind == "U" else points.size // 2
        values = {
            field: self.grid.points(field)[index]
            for dimension, index in sorted(held.items())
            for field in self.grid.dimensions[dimension]
        }
        return held, values

    def check_field(self, option: str, field: str) -> None:
        """Refuses what is no axis, with the nearest name."""
        if field not in self.grid.names:
            hint = _validation.nearest(field, self.grid.names)
            hint = hint or f"; the axes are {self.grid.names}"
            raise ValueError(f"{option}: unknown axis {field!r}{hint}")

    def quantity(self, held: Mapping[str, Any]) -> str:
        """Returns which quantity the answers are, where the axes are held."""
        return str(held.get(QUANTITY, self.description[QUANTITY]))

    def facts(self, held: Mapping[str, Any], drawn: Sequence[str]) -> str:
        """Returns what holds all over a picture, for its title."""
        facts = {k: number(v) for k, v in held.items() if k != QUANTITY}
        needed = {"epsilon": ("num_steps", "delta"), "delta": ("num_steps", "epsilon")}
        targets = needed.get(self.quantity(held), ("num_steps", "epsilon", "delta"))
        for name in targets:
            value = self.description.get(name)
            if value is not None and name not in (*drawn, *facts):
                facts[name] = number(value)
        if METHOD not in (*drawn, *facts):
            facts[METHOD] = self.description[METHOD]
        return ", ".join(f"{short_label(k)} = {v}" for k, v in facts.items())


def with_quantity(
    table: SweepTable, value: str | None, fix: Mapping[str, str]
) -> dict[str, str]:
    """Returns ``fix`` with the quantity that is to be drawn."""
    if value is None:
        return dict(fix)
    if QUANTITY in table.grid.names:
        return {**fix, QUANTITY: value}
    _validation.choice("--value", value, QUANTITIES)
    if value != table.value:
        raise ValueError(f"--value: the sweep asked for {table.value!r}, got {value!r}")
    return dict(fix)


def evenly_spaced(size: int, most: int) -> np.ndarray:
    """Returns at most ``most`` indices, evenly over ``size``, both ends included."""
    return np.unique(np.rint(np.linspace(0, size - 1, min(size, most))).astype(int))


def index_of(option: str, field: str, points: np.ndarray, text: str) -> int:
    """Returns the index of the value written as ``text`` among the points of a field.

    A number need be no more precise than a person reads it from a table. The option
    that gives it is for errors, which name the numbers that are closest.
    """
    if points.dtype.kind == "U":
        _validation.choice(f"{option} {field}", text, points.tolist())
        return points.tolist().index(text)
    value = number_of(option, field, text)
    gaps = np.abs(points - value)
    near = int(gaps.argmin())
    if gaps[near] <= 5e-3 * abs(value):
        return near
    gaps[near] = np.inf
    both = sorted({float(points[near]), float(points[gaps.argmin()])})
    closest = " and ".join(map(number, both))
    raise ValueError(f"{option}: {field!r} has no value {text}; the closest: {closest}")


def number_of(option: str, field: str, text: str) -> float:
    """Returns the number written as ``text``, or says whose value is none."""
    try:
        return float(text.replace("_", ""))
    except ValueError:
        raise ValueError(
            f"{option}: {field!r} must be a number, got {text!r}"
        ) from None

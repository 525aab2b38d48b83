"""Pictures of a finished sweep: which one, of what, and the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.tools.plots import drawing
from jaxdp_episodic.tools.plots.figures import SUFFIXES, matplotlib, save
from jaxdp_episodic.tools.plots.labels import ANSWERS, axis_label, number, short_label
from jaxdp_episodic.tools.plots.pareto import draw_pareto
from jaxdp_episodic.tools.plots.selection import (
    SweepTable,
    evenly_spaced,
    index_of,
    number_of,
    with_quantity,
)
from jaxdp_episodic.tools.sweep.grid import QUANTITY, Grid

KINDS = ("contours", "heatmap", "lines", "pareto")
_MIN_MAP_VALUES = 6  # an axis with fewer values makes lines rather than a map
_MAX_LINES = 6  # as many as `drawing` has styles
_MAX_PANELS = 3  # as many as a page is wide
_MAX_POINTS = 800  # drawn along an axis: about its pixels
_MAX_SORTED = 100_000  # values of an axis that are put in order, evenly picked


def draw(
    folder: Path,
    *,
    kind: str | None = None,
    x: str | None = None,
    y: str | None = None,
    value: str | None = None,
    by: str | None = None,
    fix: Mapping[str, str] | None = None,
    levels: Sequence[float] | None = None,
    mark: Mapping[str, str] | None = None,
    out: Path | None = None,
) -> tuple[Path, Path]:
    """Draws a picture of a finished sweep, as PNG and as SVG; returns the two files.

    The arguments are the options of the command ``plot``, see `cli.pictures.Plot`; of
    ``fix`` and ``mark`` fields and their values, as text.
    """
    if kind is not None:
        _validation.choice("--kind", kind, KINDS)
    matplotlib()  # or its absence is said before the work
    table = SweepTable(folder)
    fixed = with_quantity(table, value, fix or {})
    if kind == "pareto":
        if by is not None:
            raise ValueError(f"--by has no meaning with a Pareto front, got {by!r}")
        _refuse_on_lines(levels, mark)
        figure = draw_pareto(table, x, y, fixed)
    else:
        x, y, by = _chosen(table, kind, x, y, by, fixed)
        kind = kind or ("lines" if y is None else "contours")
        figure = _of_axes(table, kind, x, y, by, fixed, levels, mark)
    return _saved(figure, (folder / str(kind)) if out is None else out)


def _chosen(
    table: SweepTable,
    kind: str | None,
    x: str | None,
    y: str | None,
    by: str | None,
    fixed: Mapping[str, str],
) -> tuple[str, str | None, str | None]:
    """The fields that are drawn: those asked for, else the longest axes first."""
    given = {"--x": x, "--y": y, "--by": by}
    for option, field in (*given.items(), *(("--fix", f) for f in fixed)):
        if field is not None:
            table.check_field(option, field)
    taken = [field for field in given.values() if field is not None]
    used = [table.grid.dimension_of(field) for field in (*taken, *fixed)]
    if len(set(used)) < len(used):
        raise ValueError(
            "--x, --y, --by and --fix must be fields of different axes that do not "
            f"move together, got {(*taken, *fixed)}"
        )
    free = [d for d in range(len(table.grid.shape)) if d not in used]
    free.sort(key=lambda d: -table.grid.shape[d])
    numeric = [f for d in free if (f := _numeric_field(table, d)) is not None]
    if x is None:
        if not numeric:
            raise ValueError("there is no axis of numbers to be drawn across")
        x = numeric.pop(0)
    if table.grid.points(x).dtype.kind == "U":
        raise ValueError(f"--x must be an axis of numbers, got {x!r}")
    wants_map = kind in ("contours", "heatmap")
    if kind is None and numeric:
        lengths = [table.grid.points(f).size for f in (x, numeric[0])]
        wants_map = min(lengths) >= _MIN_MAP_VALUES
    if y is None and wants_map:
        if not numeric:
            raise ValueError(f"--kind {kind} needs two axes of numbers")
        y = numeric.pop(0)
    if y is not None and kind == "lines":
        raise ValueError(f"--y has no meaning with --kind lines, got {y!r}")
    if by is None:
        words = [
            table.grid.dimensions[d][0]
            for d in free
            if _numeric_field(table, d) is None and table.grid.shape[d] > 1
        ]
        rest = [*(w for w in words if w != QUANTITY), *numeric]
        by = rest[0] if rest else None
    return x, y, by


def _numeric_field(table: SweepTable, dimension: int) -> str | None:
    """The field that stands for a dimension, if it has numbers, more than one."""
    for field in table.grid.dimensions[dimension]:
        points = table.grid.points(field)
        if points.dtype.kind != "U" and points.min() < points.max():
            return field
    return None


def _of_axes(
    table: SweepTable,
    kind: str,
    x: str,
    y: str | None,
    by: str | None,
    fixed: Mapping[str, str],
    levels: Sequence[float] | None,
    mark: Mapping[str, str] | None,
) -> Any:
    """A figure over one or two axes, and some values of another."""
    grid = table.grid
    drawn = [field for field in (x, y, by) if field is not None]
    held, values = table.held(drawn, fixed)
    most = _MAX_LINES if y is None else _MAX_PANELS
    series = np.zeros(1, int)
    if by is not None:
        series = evenly_spaced(grid.points(by).size, most)
        series = series[np.argsort(grid.points(by)[series], kind="stable")]
    across, points = _ordered(grid.points(x))
    upward, y_points = (across, points) if y is None else _ordered(grid.points(y))
    places: dict[int, Any] = {d: np.asarray(place) for d, place in held.items()}
    places[grid.dimension_of(x)] = across
    names = (
        [f"{short_label(by)} = {number(grid.points(by)[s])}" for s in series]
        if by
        else [""]
    )
    labels = drawing.Labels(
        x=_axis_label(grid, x, across.size),
        y="" if y is None else _axis_label(grid, y, upward.size),
        value=ANSWERS[table.quantity(values)],
        by="" if by is None else _axis_label(grid, by, series.size),
        names=names,
        title=table.facts(values, drawn),
    )
    if y is not None and by is not None and series.size < grid.points(by).size:
        few = f"{series.size} of {grid.points(by).size:,} values of {short_label(by)}"
        labels = replace(labels, title=f"{labels.title}; {few}")
    if y is None:
        _refuse_on_lines(levels, mark)
        if by is not None:
            places[grid.dimension_of(by)] = series[:, None]
        answers = np.atleast_2d(table.answers(grid.index(places)))
        return drawing.lines(points, answers, labels)
    places[grid.dimension_of(y)] = upward[:, None]
    if by is not None:
        places[grid.dimension_of(by)] = series[:, None, None]
    answers = table.answers(grid.index(places)).reshape(-1, upward.size, across.size)
    panels = grid.points(by)[series] if by is not None else np.zeros(1)
    return drawing.maps(
        points,
        y_points,
        answers,
        labels,
        iso_lines=kind == "contours",
        levels=_checked_levels(levels),
        marks=_marks(mark, (x, y), by, panels) if mark else (),
    )


def _refuse_on_lines(
    levels: Sequence[float] | None, mark: Mapping[str, str] | None
) -> None:
    for option, given in (("--levels", levels), ("--mark", mark)):
        if given:
            raise ValueError(f"{option} is for contours and heat maps, got {given}")


def _checked_levels(levels: Sequence[float] | None) -> list[float] | None:
    """The levels in ascending order, each once."""
    if not levels:
        return None
    return np.unique(_validation.positive_array("--levels", list(levels))).tolist()


def _marks(
    mark: Mapping[str, str], axes: tuple[str, str], by: str | None, panels: np.ndarray
) -> list[tuple[int, float, float]]:
    """Panel, x and y of the stars that a mark asks for."""
    known = axes if by is None else (*axes, by)
    if set(mark) - set(known) or not set(axes) <= set(mark):
        raise ValueError(
            f"--mark must give {' and '.join(map(repr, axes))}"
            + (f", and may give {by!r}" if by else "")
            + f", got {list(mark)}"
        )
    across, up = (number_of("--mark", field, mark[field]) for field in axes)
    chosen = range(panels.size)
    if by is not None and by in mark:
        chosen = [index_of("--mark", by, panels, mark[by])]
    return [(panel, across, up) for panel in chosen]


def _axis_label(grid: Grid, field: str, num_drawn: int) -> str:
    """The label of an axis: the fields that move along it, and how much is drawn."""
    moving = grid.dimensions[grid.dimension_of(field)]
    others = ", ".join(other for other in moving if other != field)
    size = grid.points(field).size
    return (
        axis_label(field)
        + (f"; zipped with {others}" if others else "")
        + (f"; {num_drawn:,} of {size:,} values" if num_drawn < size else "")
    )


def _ordered(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of different values, ascending, and the values."""
    some = evenly_spaced(points.size, _MAX_SORTED)
    index = some[np.unique(points[some], return_index=True)[1]]
    index = index[evenly_spaced(index.size, _MAX_POINTS)]
    return index, points[index].astype(float)


def _saved(figure: Any, out: Path) -> tuple[Path, Path]:
    """Writes the figure twice; the files replace older ones whole."""
    if out.suffix and out.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"--out must end in .png or .svg, or in neither, got {out.name!r}"
        )
    png, svg = (out.with_suffix(suffix) for suffix in SUFFIXES)
    save(figure, png)
    save(figure, svg)
    return png, svg

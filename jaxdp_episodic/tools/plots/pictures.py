"""Pictures of a finished sweep: lines, maps, and Pareto fronts.

They can be read without colour: lines differ in dashes and markers, and maps use
"viridis" and have labelled iso-lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.tools.plots import figures
from jaxdp_episodic.tools.plots.figures import matplotlib
from jaxdp_episodic.tools.sweep.description import METHOD, NEEDS, QUANTITY, Grid
from jaxdp_episodic.tools.sweep.run import SweepFolder, read_columns, read_manifest

_MIN_MAP_VALUES = 6  # with fewer values on an axis the default is lines, not a map
_MAX_PANELS = 3  # side by side
_MAX_POINTS = 800  # drawn along an axis, about one per pixel
_MAX_DOTS = 20_000  # settings drawn beside a front, evenly chosen
_BLOCK = 1 << 20  # settings whose values are in memory at a time
_MAP = "viridis"
# Dashes and marker of each line; no two are equal.
_STYLES = (
    ("-", "o"),
    ((0, (5, 1.5)), "s"),
    ((0, (1, 1.2)), "^"),
    ((0, (5, 1.5, 1, 1.5)), "D"),
    ((0, (8, 2)), "v"),
    ((0, (3, 1, 1, 1, 1, 1)), "P"),
)
_MARKERS_A_LINE = 8  # about; more would hide the dashes
_LIGHTEST = 0.82  # lighter colours of the map cannot be seen on white
_LABELS = {
    "noise_multiplier": "noise multiplier (clip norms)",
    "num_steps": "number of steps",
    "delta": "delta (probability)",
    "epsilon": "epsilon (nats)",
    "num_classes": "classes in the pool (number)",
    "ways": "ways (classes an episode)",
    "num_episodes": "episodes a step (number)",
    "people.examples": "most examples of a person in a class (number)",
    "people.classes": "most classes of a person (number)",
    "people.tasks": "most tasks of a person (number)",
    "num_people": "people in all (number)",
    "people_per_block": "people in a block (number)",
}
_LABELS_OF_A_LEVEL = {
    "sampling_probability": "sampling probability of each {}",
    "size": "{}: drawn of each group (number)",
    "population": "{}: units in a group (number)",
}
# Labels of the answers.
_ANSWERS = {
    "epsilon": "epsilon (nats), upper bound",
    "delta": "delta (probability), upper bound",
    "noise_multiplier": "smallest noise multiplier (clip norms)",
    "num_steps": "largest number of steps",
}


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
    """Draws a picture of a finished sweep, as PNG and as SVG; returns the two files."""
    matplotlib()  # an error, if it is missing, comes before the work
    sweep, fixed = SweepTable(folder), dict(fix or {})
    if value is not None and QUANTITY in sweep.grid.names:
        fixed[QUANTITY] = value
    elif value not in (None, sweep.value):
        raise ValueError(
            f"--value must be {sweep.value!r}, as in the sweep, got {value!r}"
        )
    if kind != "pareto":
        x, y, by = _chosen(sweep, kind, x, y, by, fixed)
        kind = kind or ("lines" if y is None else "contours")
    elif by is not None:
        raise ValueError(f"--by has no meaning with a Pareto front, got {by!r}")
    for option, given in (("--levels", levels), ("--mark", mark)):
        if given and kind in ("lines", "pareto"):
            raise ValueError(f"{option} is for contours and heat maps, got {given}")
    out = (folder / kind) if out is None else out
    if out.suffix and out.suffix.lower() not in figures.SUFFIXES:
        raise ValueError(
            f"--out must end in .png or .svg, or in neither, got {out.name!r}"
        )
    if kind == "pareto":
        figure = _pareto(sweep, x, y, fixed)
    else:
        has_lines = kind == "contours"
        figure = _over_axes(sweep, str(x), y, by, fixed, levels, mark, has_lines)
    png, svg = (out.with_suffix(suffix) for suffix in figures.SUFFIXES)
    figures.save(figure, png)
    figures.save(figure, svg)
    return png, svg


class SweepTable:
    """A finished sweep: its grid, and the answers."""

    def __init__(self, folder: Path) -> None:
        sweep = SweepFolder(folder, read_manifest(folder))
        if sweep.table is None:
            raise ValueError("the sweep is not finished: it has no table yet")
        self.description: dict[str, Any] = sweep.manifest["sweep"]
        self.grid: Grid = sweep.grid
        self.value = sweep.columns[0]
        self.answers, start = np.empty(self.grid.size), 0  # in the settings' order
        for block in read_columns(sweep.table, [self.value], num_rows=self.grid.size):
            column = block[self.value]
            self.answers[start : start + column.size] = column
            start += column.size

    def held(
        self, drawn: Sequence[str], fix: Mapping[str, str]
    ) -> tuple[dict[int, int], dict[str, Any]]:
        """Returns the fixed index of each dimension not drawn, and the fixed values."""
        grid, held = self.grid, dict[int, int]()
        moving = {grid.dimension_of(field) for field in drawn}
        for field, text in fix.items():
            self.check_field("--fix", field)
            index = _index_of("--fix", field, grid.points[field], text)
            if held.setdefault(grid.dimension_of(field), index) != index:
                raise ValueError(f"--fix: {field!r} is zipped with a fixed field")
        for dimension, fields in enumerate(grid.dimensions):
            if dimension not in moving:
                middle = grid.points[fields[0]].size // 2
                held.setdefault(dimension, 0 if self.is_words(fields[0]) else middle)
        pairs = sorted(held.items())
        values = {f: grid.points[f][i] for d, i in pairs for f in grid.dimensions[d]}
        return held, values

    def is_words(self, field: str) -> bool:
        """Returns whether an axis has words in place of numbers."""
        return self.grid.points[field].dtype.kind == "U"

    def check_field(self, option: str, field: str) -> None:
        """Refuses a field that is no axis; the message has the nearest name."""
        if field not in self.grid.names:
            hint = _validation.nearest(field, self.grid.names)
            hint = hint or f"; the axes are {self.grid.names}"
            raise ValueError(f"{option}: unknown axis {field!r}{hint}")

    def quantity(self, held: Mapping[str, Any]) -> str:
        """Returns the quantity of the answers at these fixed values."""
        return str(held.get(QUANTITY, self.description[QUANTITY]))

    def title(self, held: Mapping[str, Any], drawn: Sequence[str]) -> str:
        """Returns the title: the values that are fixed in the picture."""
        facts = {k: v for k, v in held.items() if k != QUANTITY}
        for name in (*NEEDS[self.quantity(held)], METHOD):
            if name not in drawn and (value := self.description.get(name)) is not None:
                facts.setdefault(name, value)
        return ", ".join(f"{_short(k)} = {figures.number(v)}" for k, v in facts.items())

    def label(self, field: str, num_drawn: int) -> str:
        """Returns the label of an axis: its fields, and how many values are drawn."""
        moving = self.grid.dimensions[self.grid.dimension_of(field)]
        others = ", ".join(other for other in moving if other != field)
        size = self.grid.points[field].size
        return (
            axis_label(field)
            + (f"; zipped with {others}" if others else "")
            + (f"; {num_drawn:,} of {size:,} values" if num_drawn < size else "")
        )


def axis_label(field: str) -> str:
    """Returns the label of a field, with its unit."""
    place, _, name = field.rpartition(".")
    if field in _LABELS:
        return _LABELS[field]
    if name in _LABELS_OF_A_LEVEL and place:
        *phase, level = place.split(".")
        return ", ".join([_LABELS_OF_A_LEVEL[name].format(level), *phase])
    if name in _LABELS:
        return f"{_LABELS[name]}, {place}"
    return field.replace("_", " ")


def _short(field: str) -> str:
    """The label of an axis without its unit."""
    return axis_label(field).partition(" (")[0]


# --- What is drawn ---


def _chosen(
    sweep: SweepTable,
    kind: str | None,
    x: str | None,
    y: str | None,
    by: str | None,
    fixed: Mapping[str, str],
) -> tuple[str, str | None, str | None]:
    """The fields to draw: those given, then the longest axes."""
    grid, numeric, words = sweep.grid, list[str](), list[str]()
    named = [("--x", x), ("--y", y), ("--by", by), *(("--fix", f) for f in fixed)]
    given = [field for _, field in named if field is not None]
    for option, field in named:
        if field is not None:
            sweep.check_field(option, field)
    used = {grid.dimension_of(field) for field in given}
    if len(used) < len(given):
        raise ValueError(
            "--x, --y, --by and --fix must be different axes that are not zipped, got "
            f"{tuple(given)}"
        )
    free = set(range(len(grid.shape))) - used
    for dimension in sorted(free, key=lambda d: -grid.shape[d]):
        inside = grid.dimensions[dimension]
        numbers = [field for field in inside if not sweep.is_words(field)]
        if moving := [field for field in numbers if np.ptp(grid.points[field]) > 0]:
            numeric.append(moving[0])
        elif grid.shape[dimension] > 1 and inside[0] != QUANTITY:
            words.append(inside[0])
    x = x or next(iter(numeric), None)
    if x is None or sweep.is_words(x):
        raise ValueError(f"--x must be an axis of numbers, got {x!r}")
    numeric = [field for field in numeric if field != x]
    wants_map = kind in ("contours", "heatmap")
    if kind is None and numeric:
        lengths = [grid.points[f].size for f in (x, numeric[0])]
        wants_map = min(lengths) >= _MIN_MAP_VALUES
    if y is None and wants_map:
        if not numeric:
            raise ValueError(f"--kind {kind} needs two axes of numbers")
        y = numeric.pop(0)
    if y is not None and kind == "lines":
        raise ValueError(f"--y does not go with --kind lines, got {y!r}")
    return x, y, by or next(iter([*words, *numeric]), None)


def _over_axes(
    sweep: SweepTable,
    x: str,
    y: str | None,
    by: str | None,
    fixed: Mapping[str, str],
    levels: Sequence[float] | None,
    mark: Mapping[str, str] | None,
    has_iso_lines: bool,
) -> Any:
    """A figure over one or two axes, for some values of another one."""
    grid, drawn = sweep.grid, [field for field in (x, y, by) if field is not None]
    held, values = sweep.held(drawn, fixed)
    title, value = sweep.title(values, drawn), _ANSWERS[sweep.quantity(values)]
    across, points = _ordered(grid.points[x])
    up, y_points = _ordered(grid.points[y]) if y is not None else (np.zeros(1, int), [])
    labels = [sweep.label(x, across.size), value]
    some, names = np.zeros(1, int), [""]
    if by is not None:
        every = grid.points[by]
        some = _evenly(every.size, len(_STYLES) if y is None else _MAX_PANELS)
        some = some[np.argsort(every[some], kind="stable")]
        names = [figures.number(value) for value in every[some]]
    # The dimensions of a line: its row and its column; of a panel, three.
    places: dict[int, Any] = {**held, grid.dimension_of(x): across}
    if y is not None:
        places[grid.dimension_of(y)] = up[:, None]
    if by is not None:
        places[grid.dimension_of(by)] = some[:, None, None]
    answers = sweep.answers[grid.index(places)]
    answers = answers.reshape(some.size, up.size, across.size)
    if y is None:
        legend = sweep.label(by, some.size) if by is not None else ""
        return _lines(points, answers[:, 0], names, [*labels, title], legend)
    labels.insert(1, sweep.label(y, up.size))
    stars = list[tuple[int, float, float]]()
    if by is not None:
        names = [f"{_short(by)} = {name}" for name in names]
        if some.size < grid.points[by].size:
            title += f"; {some.size} of {grid.points[by].size:,} values of {_short(by)}"
    if levels:
        given = _validation.positive_array("--levels", list(levels))
        levels = np.unique(given).tolist()
    if mark:
        panels = np.zeros(1) if by is None else grid.points[by][some]
        stars = _stars(mark, (x, y), by, panels)
    axes = points, np.asarray(y_points)
    return _maps(axes, answers, names, [*labels, title], levels, stars, has_iso_lines)


def _stars(
    mark: Mapping[str, str], axes: tuple[str, str], by: str | None, panels: np.ndarray
) -> list[tuple[int, float, float]]:
    """Panel, x and y of each star."""
    known = axes if by is None else (*axes, by)
    if set(mark) - set(known) or not set(axes) <= set(mark):
        raise ValueError(
            f"--mark must give {' and '.join(map(repr, axes))}"
            + (f", and may give {by!r}" if by else "")
            + f", got {list(mark)}"
        )
    across, up = (_number_of("--mark", field, mark[field]) for field in axes)
    chosen = range(panels.size)
    if by is not None and by in mark:
        chosen = [_index_of("--mark", by, panels, mark[by])]
    return [(panel, across, up) for panel in chosen]


def _ordered(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the different values, sorted by value, and these values."""
    index = np.unique(points, return_index=True)[1]
    index = index[_evenly(index.size, _MAX_POINTS)]
    return index, points[index].astype(float)


def _evenly(size: int, most: int) -> np.ndarray:
    """At most ``most`` indices below ``size``, evenly spaced, both ends included."""
    return np.unique(np.rint(np.linspace(0, size - 1, min(size, most))).astype(int))


def _index_of(option: str, field: str, points: np.ndarray, text: str) -> int:
    """The index of the value written as ``text`` among the points of a field."""
    if points.dtype.kind == "U":
        _validation.choice(f"{option} {field}", text, points.tolist())
        return points.tolist().index(text)
    value = _number_of(option, field, text)
    near, *others = np.argsort(np.abs(points - value), kind="stable")
    if abs(points[near] - value) <= 5e-3 * abs(value):
        return int(near)
    both = sorted({float(points[index]) for index in (near, *others[:1])})
    closest = " and ".join(map(figures.number, both))
    raise ValueError(f"{option}: {field!r} has no value {text}; closest: {closest}")


def _number_of(option: str, field: str, text: str) -> float:
    try:
        return float(text.replace("_", ""))
    except ValueError:
        raise ValueError(
            f"{option}: {field!r} must be a number, got {text!r}"
        ) from None


# --- Figures ---


def _lines(
    x: np.ndarray, answers: np.ndarray, names: list[str], labels: list[str], legend: str
) -> Any:
    """A figure of lines: ``answers`` (lines, n) over ``x`` (n,), ascending."""
    figure = figures.new_figure(7.6, 4.6)
    axes = figure.subplots()
    scale = np.linspace(0.0, _LIGHTEST, len(answers))
    shades = matplotlib("matplotlib").colormaps[_MAP](scale)
    every = max(1, x.size // _MARKERS_A_LINE)
    drawn = []
    for row, line in enumerate(answers):
        dashes, marker = _STYLES[row % len(_STYLES)]
        known = line[np.isfinite(line)]
        style: dict[str, Any] = {"color": shades[row], "ls": dashes, "marker": marker}
        # Markers at different points, as lines may cover each other.
        begin = min(row * every // len(answers), x.size - 1)
        style |= {"lw": 1.7, "ms": 5, "markevery": (begin, every)}
        (made,) = axes.plot(x, np.where(np.isfinite(line), line, np.nan), **style)
        drawn.append((known[-1] if known.size else np.inf, row, made))
    if legend:
        drawn.sort(reverse=True)  # in the order of the lines' ends
        made, rows = [made for *_, made in drawn], [row for _, row, _ in drawn]
        style = {"frameon": False, "fontsize": 9, "title_fontsize": 9}
        style |= {"title": "\n".join(textwrap.wrap(legend, 18)), "handlelength": 3.5}
        style["loc"] = "outside right center"
        figure.legend(made, [names[row] for row in rows], **style)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    figures.scale_axis(axes, "x", x)
    finite = answers[np.isfinite(answers)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        axes.set_yscale("log")
        figures.plain_ticks(axes.yaxis, finite.min(), finite.max())
    elif finite.size and finite.min() >= 0:
        axes.set_ylim(bottom=0)
    figures.plain(axes)
    if finite.size < answers.size:
        figures.note(axes, "where a line ends, the answer is infinite")
    axes.set_title(labels[2], fontsize=10, loc="left")
    return figure


def _maps(
    points: tuple[np.ndarray, np.ndarray],
    answers: np.ndarray,
    names: Sequence[str],
    labels: Sequence[str],
    levels: Sequence[float] | None,
    stars: Sequence[tuple[int, float, float]],
    iso_lines: bool,
) -> Any:
    """A figure of maps (panels, m, n) over points (n,) and (m,), on one scale."""
    x, y = points
    finite = answers[np.isfinite(answers) & (answers > 0)]
    if not finite.size:
        raise ValueError("nothing can be drawn: no answer is finite and positive")
    low, high = float(finite.min()), float(finite.max())
    top, panels = high * 1.0000001, len(answers)
    figure = figures.new_figure({1: 6.8, 2: 9.4, 3: 12.6}[panels], 4.6)
    every = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    colors = matplotlib("matplotlib.colors")
    norm = (colors.LogNorm if high > 5 * low else colors.Normalize)(low, top)
    levels = levels or figures.round_levels(low, high)
    levels = [level for level in levels if low < level < high]
    has_lines, drawn = bool(iso_lines and levels), None
    effects = matplotlib("matplotlib.patheffects")
    outline = effects.withStroke(linewidth=3, foreground="white")
    for axes, panel, name in zip(every, answers, names, strict=True):
        axes.set_facecolor("#e4e4e4")
        known = np.ma.masked_invalid(np.where(panel > 0, panel, low))
        style: dict[str, Any] = {"cmap": _MAP, "norm": norm}
        if has_lines:
            bands = [low, *levels, top]
            drawn = axes.contourf(x, y, known, bands, alpha=0.75, **style)
        else:
            style |= {"shading": "nearest", "rasterized": True}
            drawn = axes.pcolormesh(x, y, known, **style)
        figures.scale_axis(axes, "x", x, crowd=panels)
        figures.scale_axis(axes, "y", y)
        if has_lines:  # after the scales, which rotate the labels
            dashes = [_STYLES[i % 4][0] for i in range(len(levels))]
            black: dict[str, Any] = {"colors": "black", "linewidths": 1.1}
            lines = axes.contour(x, y, known, levels, linestyles=dashes, **black)
            for text in axes.clabel(lines, fmt=figures.number, fontsize=9):
                text.set_path_effects([outline])
        if not np.isfinite(panel).all():
            figures.note(axes, "grey: infinite")
        axes.set_xlabel(labels[0])
        if panels > 1:
            axes.set_title(name, fontsize=10)
    for panel, across, up in stars:
        every[panel].plot(across, up, color="white", **figures.STAR)
    every[0].set_ylabel(labels[1])
    bar = figure.colorbar(drawn, ax=every, label=labels[2], pad=0.02)
    if levels:
        bar.set_ticks(levels, labels=[figures.number(level) for level in levels])
        bar.ax.minorticks_off()
    if panels > 1:
        figure.suptitle(labels[3], fontsize=10)
    else:
        title = ", ".join(filter(None, (names[0], labels[3])))
        every[0].set_title(title, fontsize=10, loc="left")
    return figure


# --- The Pareto front: settings that no other setting beats in both columns ---


def _pareto(
    sweep: SweepTable, x: str | None, y: str | None, fix: Mapping[str, str]
) -> Any:
    """A figure of the front, and of a selection of all settings."""
    grid = sweep.grid
    numeric = [field for field in grid.names if not sweep.is_words(field)]
    y = y or sweep.value
    if x is None:
        others = [field for field in numeric if field != y]
        if not others:
            raise ValueError("a Pareto front needs an axis of numbers besides --y")
        x = next((f for f in others if f.endswith("noise_multiplier")), others[0])
    for option, field in (("--x", x), ("--y", y)):
        if field not in (sweep.value, *numeric):
            sweep.check_field(option, field)
            raise ValueError(f"{option} must be a column of numbers, got {field!r}")
    if x == y:
        raise ValueError(f"--x and --y must differ, got {x!r} twice")
    fields = x, y
    if QUANTITY in grid.names:
        fix = {QUANTITY: str(grid.points[QUANTITY][0]), **fix}
    held = {f: v for f, v in sweep.held([], fix)[1].items() if f in fix}
    costs = ("epsilon", "delta", "noise_multiplier")  # smaller ones are better
    named = (sweep.description[QUANTITY] if f == sweep.value else f for f in fields)
    signs = np.where([name.rpartition(".")[2] in costs for name in named], 1.0, -1.0)
    every = max(1, grid.size // _MAX_DOTS)
    front, dots = np.empty((0, 2)), []
    for start in range(0, grid.size, _BLOCK):
        index = np.arange(start, min(start + _BLOCK, grid.size))
        columns = {**grid.values(index), sweep.value: sweep.answers[index]}
        for field, value in held.items():
            chosen = columns[field] == value
            columns = {name: column[chosen] for name, column in columns.items()}
            index = index[chosen]
        points = np.stack([columns[field] for field in fields], axis=1).astype(float)
        dots.append(points[index % every == 0])
        both = np.concatenate([front, points])
        front = both[figures.front_of(*(both * signs).T)]
    if not front.size:
        raise ValueError("no setting is finite in both columns")
    front = front[np.argsort(front[:, 0])]
    figure = figures.new_figure(6.8, 4.6)
    axes = figure.subplots()
    shown = np.concatenate(dots)
    few = f", 1 in {every:,}" if every > 1 else ""
    grey = {"ls": "", "marker": ".", "ms": 3, "color": "#b8b8b8"}
    axes.plot(*shown.T, label=f"settings{few}", **grey)
    blue: dict[str, Any] = {"color": "#00224e", "lw": 1.8, "marker": "o", "ms": 5}
    blue["markevery"] = max(1, len(front) // 12)
    # Steps, as nothing is known between two settings.
    blue["drawstyle"] = "steps-post" if signs[0] > 0 else "steps-pre"
    axes.plot(*front.T, label="Pareto front: no setting is better in both", **blue)
    for which, field, values, sign in zip("xy", fields, shown.T, signs, strict=True):
        is_answer = field == sweep.value
        label = _ANSWERS[sweep.quantity(held)] if is_answer else axis_label(field)
        better = "← better" if sign > 0 else "better →"
        getattr(axes, f"set_{which}label")(f"{label}   {better}")
        figures.scale_axis(axes, which, np.unique(values[np.isfinite(values)]))
    axes.legend(frameon=False, fontsize=9)
    figures.plain(axes)
    drawn = [field for field in (*fields, *grid.names) if field not in held]
    axes.set_title(sweep.title(held, drawn), fontsize=10, loc="left")
    return figure

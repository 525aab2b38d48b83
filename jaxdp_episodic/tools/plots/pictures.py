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
from jaxdp_episodic.tools.sweep.description import METHOD, QUANTITIES, QUANTITY, Grid
from jaxdp_episodic.tools.sweep.run import SweepFolder, read_columns, read_manifest

KINDS = ("contours", "heatmap", "lines", "pareto")
_MIN_MAP_VALUES = 6  # with fewer values on an axis the default is lines, not a map
_MAX_PANELS = 3  # side by side
_MAX_POINTS = 800  # drawn along an axis, about one per pixel
_MAX_DOTS = 20_000  # settings drawn beside a front, evenly chosen
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
    if kind is not None:
        _validation.choice("--kind", kind, KINDS)
    matplotlib()  # an error, if it is missing, comes before the work
    sweep = SweepTable(folder)
    fixed = dict(fix or {})
    if value is not None and QUANTITY in sweep.grid.names:
        fixed[QUANTITY] = value
    elif value is not None:
        _validation.choice("--value", value, QUANTITIES)
        if value != sweep.value:
            raise ValueError(
                f"--value must be {sweep.value!r}, as in the sweep, got {value!r}"
            )
    if kind == "pareto":
        if by is not None:
            raise ValueError(f"--by has no meaning with a Pareto front, got {by!r}")
        is_map, made = False, lambda: _pareto(sweep, x, y, fixed)
    else:
        x, y, by = _chosen(sweep, kind, x, y, by, fixed)
        kind, is_map = kind or ("lines" if y is None else "contours"), y is not None
        options = {"levels": levels, "mark": mark, "iso_lines": kind == "contours"}
        made = lambda: _over_axes(sweep, str(x), y, by, fixed, **options)  # noqa: E731
    for option, given in (("--levels", levels), ("--mark", mark)):
        if given and not is_map:
            raise ValueError(f"{option} is for contours and heat maps, got {given}")
    out = (folder / kind) if out is None else out
    if out.suffix and out.suffix.lower() not in figures.SUFFIXES:
        raise ValueError(
            f"--out must end in .png or .svg, or in neither, got {out.name!r}"
        )
    figure, files = made(), [out.with_suffix(suffix) for suffix in figures.SUFFIXES]
    for file in files:
        figures.save(figure, file)
    return files[0], files[1]


class SweepTable:
    """A finished sweep; its table is read in parts."""

    def __init__(self, folder: Path) -> None:
        sweep = SweepFolder(folder, read_manifest(folder))
        if sweep.table is None:
            raise ValueError("the sweep is not finished: it has no table yet")
        self.path = sweep.table
        self.description: dict[str, Any] = sweep.manifest["sweep"]
        self.grid: Grid = sweep.grid
        self.value = sweep.columns[0]

    def answers(self, index: np.ndarray) -> np.ndarray:
        """Returns the answers at settings ``index``, in its shape."""
        wanted, back = np.unique(index, return_inverse=True)
        answers, start = np.empty(wanted.size), 0
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
        """Returns the fixed index of each dimension not drawn, and the fixed values."""
        held: dict[int, int] = {}
        moving = {self.grid.dimension_of(field) for field in drawn}
        for field, text in fix.items():
            self.check_field("--fix", field)
            dimension = self.grid.dimension_of(field)
            index = _index_of("--fix", field, self.grid.points[field], text)
            if held.setdefault(dimension, index) != index:
                raise ValueError(f"--fix: {field!r} is zipped with a fixed field")
        for dimension, fields in enumerate(self.grid.dimensions):
            if dimension not in moving:
                middle = self.grid.points[fields[0]].size // 2
                held.setdefault(dimension, 0 if self.is_words(fields[0]) else middle)
        values = {
            field: self.grid.points[field][index]
            for dimension, index in sorted(held.items())
            for field in self.grid.dimensions[dimension]
        }
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
        facts = {k: figures.number(v) for k, v in held.items() if k != QUANTITY}
        needed = {"epsilon": ("num_steps", "delta"), "delta": ("num_steps", "epsilon")}
        targets = needed.get(self.quantity(held), ("num_steps", "epsilon", "delta"))
        for name in targets:
            value = self.description.get(name)
            if value is not None and name not in (*drawn, *facts):
                facts[name] = figures.number(value)
        if METHOD not in (*drawn, *facts):
            facts[METHOD] = self.description[METHOD]
        return ", ".join(f"{_short(k)} = {v}" for k, v in facts.items())

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
    grid = sweep.grid
    named = [("--x", x), ("--y", y), ("--by", by), *(("--fix", f) for f in fixed)]
    fields = [field for _, field in named if field is not None]
    for option, field in named:
        if field is not None:
            sweep.check_field(option, field)
    used = {grid.dimension_of(field) for field in fields}
    if len(used) < len(fields):
        raise ValueError(
            "--x, --y, --by and --fix must be different axes that are not zipped, got "
            f"{tuple(fields)}"
        )
    free = sorted(set(range(len(grid.shape))) - used, key=lambda d: -grid.shape[d])
    numeric, words = list[str](), list[str]()
    for inside in (grid.dimensions[dimension] for dimension in free):
        numbers = [field for field in inside if not sweep.is_words(field)]
        moving = [field for field in numbers if np.ptp(grid.points[field]) > 0]
        if moving:
            numeric.append(moving[0])
        elif grid.points[inside[0]].size > 1 and inside[0] != QUANTITY:
            words.append(inside[0])
    if x is None:
        if not numeric:
            raise ValueError("--x must be an axis of numbers, but there is none")
        x = numeric.pop(0)
    if sweep.is_words(x):
        raise ValueError(f"--x must be an axis of numbers, got {x!r}")
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
    *,
    levels: Sequence[float] | None,
    mark: Mapping[str, str] | None,
    iso_lines: bool,
) -> Any:
    """A figure over one or two axes, for some values of another one."""
    grid, drawn = sweep.grid, [field for field in (x, y, by) if field is not None]
    held, values = sweep.held(drawn, fixed)
    places: dict[int, Any] = {d: np.asarray(place) for d, place in held.items()}
    title, value = sweep.title(values, drawn), _ANSWERS[sweep.quantity(values)]
    across, points = _ordered(grid.points[x])
    places[grid.dimension_of(x)] = across
    labels = [sweep.label(x, across.size), value]
    series, names = np.zeros(1), [""]
    if by is not None:
        every = grid.points[by]
        some = _evenly(every.size, len(_STYLES) if y is None else _MAX_PANELS)
        some = some[np.argsort(every[some], kind="stable")]
        series, names = every[some], [figures.number(v) for v in every[some]]
        is_map = y is not None
        places[grid.dimension_of(by)] = some.reshape(-1, 1, *([1] * is_map))
        if y is not None and some.size < every.size:
            title += f"; {some.size} of {every.size:,} values of {_short(by)}"
    if y is None:
        answers = np.atleast_2d(sweep.answers(grid.index(places)))
        legend = sweep.label(by, series.size) if by is not None else ""
        return _lines(points, answers, names, [*labels, title], legend)
    upward, y_points = _ordered(grid.points[y])
    places[grid.dimension_of(y)] = upward[:, None]
    labels.insert(1, sweep.label(y, upward.size))
    answers = sweep.answers(grid.index(places)).reshape(-1, upward.size, across.size)
    if by is not None:
        names = [f"{_short(by)} = {name}" for name in names]
    if levels:
        given = _validation.positive_array("--levels", list(levels))
        levels = np.unique(given).tolist()
    stars = _stars(mark, (x, y), by, series) if mark else []
    labels.append(title)
    axes = points, y_points
    return _maps(axes, answers, names, labels, levels or None, stars, iso_lines)


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
    levels = figures.round_levels(low, high) if levels is None else levels
    levels = [level for level in levels if low < level < high]
    drawn = None
    for axes, panel, name in zip(every, answers, names, strict=True):
        axes.set_facecolor("#e4e4e4")
        known = np.ma.masked_invalid(np.where(panel > 0, panel, low))
        style: dict[str, Any] = {"cmap": _MAP, "norm": norm}
        if iso_lines and levels:
            bands = [low, *levels, top]
            drawn = axes.contourf(x, y, known, bands, alpha=0.75, **style)
        else:
            style |= {"shading": "nearest", "rasterized": True}
            drawn = axes.pcolormesh(x, y, known, **style)
        figures.scale_axis(axes, "x", x, crowd=panels)
        figures.scale_axis(axes, "y", y)
        if iso_lines and levels:  # after the scales, which rotate the labels
            _iso_lines(axes, x, y, known, levels)
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


def _iso_lines(
    axes: Any, x: np.ndarray, y: np.ndarray, known: Any, levels: list[float]
) -> None:
    """Draws labelled lines of equal answers, in black with a white outline."""
    effects = matplotlib("matplotlib.patheffects")
    dashes = [_STYLES[i % 4][0] for i in range(len(levels))]
    style: dict[str, Any] = {"colors": "black", "linewidths": 1.1, "linestyles": dashes}
    found = axes.contour(x, y, known, levels, **style)
    named = {level: figures.number(level) for level in levels}
    for text in axes.clabel(found, fmt=named, fontsize=9):
        text.set_path_effects([effects.withStroke(linewidth=3, foreground="white")])


# --- The Pareto front: settings that no other setting beats in both columns ---


def _pareto(
    sweep: SweepTable, x: str | None, y: str | None, fix: Mapping[str, str]
) -> Any:
    """A figure of the front, and of a selection of all settings."""
    grid = sweep.grid
    fields = _columns(sweep, x, y)
    if QUANTITY in grid.names and QUANTITY not in fix:
        fix = {**fix, QUANTITY: str(grid.points[QUANTITY][0])}
    held = {f: v for f, v in sweep.held([], fix)[1].items() if f in fix}
    costs = ("epsilon", "delta", "noise_multiplier")  # smaller ones are better
    named = (sweep.description[QUANTITY] if f == sweep.value else f for f in fields)
    signs = np.where([name.rpartition(".")[2] in costs for name in named], 1.0, -1.0)
    every = max(1, grid.size // _MAX_DOTS)
    front, dots, start = np.empty((0, 2)), [], 0
    names = [*grid.names, sweep.value]
    for block in read_columns(sweep.path, names, num_rows=grid.size):
        columns = [block[field] for field in fields]
        good = np.ones(columns[0].size, bool)
        for field, value in held.items():
            good &= block[field] == value
        rows = np.flatnonzero(good)
        points = np.stack([column[rows] for column in columns], axis=1).astype(float)
        dots.append(points[(rows + start) % every == 0])
        both = np.concatenate([front, points])
        front = both[figures.front_of(*(both * signs).T)]
        start += good.size
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


def _columns(sweep: SweepTable, x: str | None, y: str | None) -> tuple[str, str]:
    """The two columns to compare, both of numbers."""
    numeric = [field for field in sweep.grid.names if not sweep.is_words(field)]
    y = y or sweep.value
    others = [field for field in numeric if field != y]
    if x is None:
        if not others:
            raise ValueError("a Pareto front needs an axis of numbers besides --y")
        noises = [f for f in others if f.endswith("noise_multiplier")]
        x = (noises or others)[0]
    for option, field in (("--x", x), ("--y", y)):
        if field != sweep.value and field not in numeric:
            sweep.check_field(option, field)
            raise ValueError(f"{option} must be a column of numbers, got {field!r}")
    if x == y:
        raise ValueError(f"--x and --y must differ, got {x!r} twice")
    return x, y

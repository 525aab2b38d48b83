"""The Pareto front of a sweep: settings that no other one beats in both columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdp_episodic.tools.plots.drawing import scale_axis
from jaxdp_episodic.tools.plots.figures import new_figure, plain
from jaxdp_episodic.tools.plots.labels import ANSWERS, axis_label
from jaxdp_episodic.tools.plots.selection import SweepTable, evenly_spaced
from jaxdp_episodic.tools.sweep.grid import QUANTITY
from jaxdp_episodic.tools.sweep.table import read_columns

_MAX_DOTS = 20_000  # settings drawn beside the front, evenly picked
# Points of the front that are kept, evenly picked: where it has more, what is drawn may
# lie behind it by as much as the next point.
_MAX_FRONT = 100_000


def front_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the points (n,) that no other one beats, where smaller is better in both.

    Their indices, by ascending ``x``; of equal points the first.
    """
    order = np.lexsort((y, x))
    best = np.minimum.accumulate(y[order])
    first = np.concatenate([[True], best[1:] < best[:-1]])
    return order[first & np.isfinite(x[order]) & np.isfinite(y[order])]


def draw_pareto(
    table: SweepTable,
    x: str | None,
    y: str | None,
    fix: Mapping[str, str],
) -> Any:
    """Returns a figure of the front, and of the settings behind it.

    Across is the noise multiplier, or else the first axis, upwards what was asked for.
    """
    x, y = _columns(table, x, y)
    kept, signs = _kept(table, fix), (_sign(table, x), _sign(table, y))
    every = max(1, table.grid.size // _MAX_DOTS)
    front, dots, is_thinned = np.empty((0, 2)), [], False
    start = 0
    names, size = [*table.grid.names, table.value], table.grid.size
    for block in read_columns(table.path, names, num_rows=size):
        good = np.all([np.isin(block[f], v) for f, v in kept.items()], axis=0)
        good = np.flatnonzero(np.broadcast_to(good, block[x].shape))
        points = np.stack([block[x][good], block[y][good]], axis=1).astype(float)
        dots.append(points[(good + start) % every == 0])
        both = np.concatenate([front, points])
        front = both[front_of(both[:, 0] * signs[0], both[:, 1] * signs[1])]
        is_thinned |= len(front) > _MAX_FRONT
        front = front[evenly_spaced(len(front), _MAX_FRONT)]
        start += block[x].size
    if not front.size:
        raise ValueError("no setting is finite in both columns")
    held = {field: values[0] for field, values in kept.items()}
    front = front[np.argsort(front[:, 0])]
    names = (
        "settings" + (f", 1 in {every:,}" if every > 1 else ""),
        "Pareto front: no setting is better in both"
        + (", but between two points drawn" if is_thinned else ""),
    )
    return _figure(table, (x, y), front, np.concatenate(dots), signs, held, names)


def _columns(table: SweepTable, x: str | None, y: str | None) -> tuple[str, str]:
    """The two columns, which must be numbers."""
    numeric = [f for f in table.grid.names if table.grid.points(f).dtype.kind != "U"]
    y = y or table.value
    others = [field for field in numeric if field != y]
    if x is None:
        if not others:
            raise ValueError("a Pareto front needs an axis of numbers beside --y")
        noises = [f for f in others if f.endswith("noise_multiplier")]
        x = (noises or others)[0]
    for option, field in (("--x", x), ("--y", y)):
        if field != table.value and field not in numeric:
            table.check_field(option, field)
            raise ValueError(f"{option} must be a column of numbers, got {field!r}")
    if x == y:
        raise ValueError(f"--x and --y must differ, got {x!r} twice")
    return x, y


def _kept(table: SweepTable, fix: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Values that settings must have; of a quantity always one."""
    if QUANTITY in table.grid.names and QUANTITY not in fix:
        fix = {**fix, QUANTITY: str(table.grid.points(QUANTITY)[0])}
    _, values = table.held([], fix)
    return {f: np.asarray([v]) for f, v in values.items() if f in fix}


def _sign(table: SweepTable, field: str) -> float:
    """1 if little of a column is good, else -1."""
    asked = table.description[QUANTITY] if field == table.value else field
    is_cost = asked.rpartition(".")[2] in ("epsilon", "delta", "noise_multiplier")
    return 1.0 if is_cost else -1.0


def _figure(
    table: SweepTable,
    fields: tuple[str, str],
    front: np.ndarray,
    dots: np.ndarray,
    signs: tuple[float, float],
    held: Mapping[str, Any],
    names: tuple[str, str],
) -> Any:
    figure = new_figure(6.8, 4.6)
    axes = figure.subplots()
    axes.plot(*dots.T, ls="", marker=".", ms=3, color="#b8b8b8", label=names[0])
    few = max(1, len(front) // 12)
    axes.plot(
        *front.T,
        color="#00224e",
        lw=1.8,
        marker="o",
        ms=5,
        markevery=few,
        # What the next better point gives, until that is reached.
        drawstyle="steps-post" if signs[0] > 0 else "steps-pre",
        label=names[1],
    )
    for which, field, values, sign in zip("xy", fields, dots.T, signs, strict=True):
        answer = field == table.value
        label = ANSWERS[table.quantity(held)] if answer else axis_label(field)
        better = "← better" if sign > 0 else "better →"
        getattr(axes, f"set_{which}label")(f"{label}   {better}")
        scale_axis(axes, which, np.unique(values[np.isfinite(values)]))
    axes.legend(frameon=False, fontsize=9)
    plain(axes)
    drawn = [field for field in (*fields, *table.grid.names) if field not in held]
    axes.set_title(table.facts(held, drawn), fontsize=10, loc="left")
    return figure

"""Helpers for the pictures and tables of the scripts here.

Curves differ in dashes and markers as well as in colour (Okabe and Ito), so that they
can be told apart in grey.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ORANGE, BLUE, GREEN, SKY = "#D55E00", "#0072B2", "#009E73", "#56B4E9"
YELLOW, PINK, GREY, BLACK = "#E69F00", "#CC79A7", "#999999", "#000000"


def new_figure(
    columns: int = 1, *, size: tuple[float, float], font_size: float = 10.5, **grid: Any
) -> tuple[Any, list[Any]]:
    """Returns a figure of ``size`` inches and its panels, side by side.

    The other arguments are those of `matplotlib.pyplot.subplots`.
    """
    # Imported here, so that tables need no matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": font_size, "axes.titlesize": font_size + 0.5})
    figure, panels = plt.subplots(
        1, columns, figsize=size, layout="constrained", squeeze=False, **grid
    )
    return figure, list(panels[0])


def draw_curve(axes: Any, x: Any, y: Any, look: Sequence[str], **style: Any) -> None:
    """Draws a curve; ``look`` is its colour, dashes and marker."""
    color, line, marker = look
    style = {"markersize": 5.5, "markerfacecolor": "white", **style}
    axes.plot(x, y, color=color, linestyle=line or "none", marker=marker, **style)


def draw_runs(
    axes: Any,
    runs: Mapping[float, Any],
    look: Sequence[str],
    *,
    ends: str,
    **style: Any,
) -> None:
    """Draws the means of repeated runs, each with an error bar.

    ``ends`` is "range" (from the smallest to the largest run) or "std" (one standard
    deviation to each side).
    """
    color, line, marker = look
    values = [np.asarray(value) for value in runs.values()]
    means = np.array([value.mean() for value in values])
    if ends == "range":
        limits = np.array([(v.min(), v.max()) for v in values]).reshape(-1, 2).T
        bars = np.abs(limits - means)
    else:
        bars = np.array([v.std(ddof=1) if len(v) > 1 else 0.0 for v in values])
    axes.errorbar(
        list(runs),
        means,
        yerr=bars,
        color=color,
        linestyle=line or "none",
        marker=marker,
        **{
            "markersize": 5,
            "markerfacecolor": "white",
            "linewidth": 1.6,
            "capsize": 2.5,
            **style,
        },
    )


def draw_level(axes: Any, name: str, x: float, y: float, **style: Any) -> None:
    """Draws a horizontal line, with its name at ``x``."""
    axes.axhline(y, color="0.5", linewidth=1, linestyle=style.pop("linestyle", ":"))
    style = {"xytext": (0, 3), "color": "0.35", "fontsize": 8.5, **style}
    axes.annotate(name, (x, y), textcoords="offset points", **style)


def logarithmic(axes: Any, which: str, ticks: Sequence[float] | None = None) -> None:
    """Makes the axis "x" or "y" logarithmic, with plain numbers on it."""
    getattr(axes, f"set_{which}scale")("log")
    if ticks is not None:
        getattr(axes, f"set_{which}ticks")(ticks)
        getattr(axes, f"set_{which}ticks")([], minor=True)
    getattr(axes, f"{which}axis").set_major_formatter("{x:g}")


def save(figure: Any, path: Path, *, grid: str = "both", dpi: int = 150) -> None:
    """Finishes the panels, with lines of the axes ``grid``, and writes the picture."""
    from matplotlib import pyplot as plt

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(which="major", axis=grid, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def rounded(values: Any, digits: int = 7) -> Any:
    """Returns nested numbers, rounded to so many significant digits."""
    if isinstance(values, Mapping):
        return {key: rounded(value, digits) for key, value in values.items()}
    if np.ndim(values):
        return [rounded(value, digits) for value in values]
    return float(f"{float(values):.{digits}g}")

"""What the pictures of the scripts here have in common.

Curves differ by dashes and marker as well as by colour, so that they can be told apart
in grey; colours are those of Okabe and Ito.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DPI = 150


def new_figure(
    columns: int = 1, *, size: tuple[float, float], font_size: float = 10.5, **grid: Any
) -> tuple[Any, list[Any]]:
    """Returns a figure and its panels, side by side.

    Args:
      columns: number of panels.
      size: inches.
      font_size: points; titles are half a point larger.
      **grid: of `matplotlib.pyplot.subplots`.
    """
    # Here, so that the tables need no matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": font_size, "axes.titlesize": font_size + 0.5})
    figure, panels = plt.subplots(
        1, columns, figsize=size, layout="constrained", squeeze=False, **grid
    )
    return figure, list(panels[0])


def draw_curve(axes: Any, x: Any, y: Any, look: Sequence[str], **style: Any) -> None:
    """Draws a curve whose look is its colour, its dashes and its marker."""
    color, line, marker = look
    style = {"markersize": 5.5, "markerfacecolor": "white", **style}
    axes.plot(x, y, color=color, linestyle=line, marker=marker, **style)


def logarithmic(axes: Any, which: str, ticks: list[float] | None = None) -> None:
    """Makes the axis "x" or "y" logarithmic, with plain numbers on it."""
    getattr(axes, f"set_{which}scale")("log")
    if ticks is not None:
        getattr(axes, f"set_{which}ticks")(ticks)
        getattr(axes, f"set_{which}ticks")([], minor=True)
    getattr(axes, f"{which}axis").set_major_formatter("{x:g}")


def save(figure: Any, path: Path, *, grid: str = "both", dpi: int = _DPI) -> None:
    """Finishes the panels, with lines of the axes ``grid``, and writes the picture."""
    from matplotlib import pyplot as plt

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(which="major", axis=grid, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def write_table(table: dict[str, Any], path: Path, *, indent: int | None = 1) -> None:
    """Writes a table as JSON; its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=indent) + "\n", encoding="utf-8")


def path_option(doc: str | None, option: str, default: str) -> Path:
    """Returns the folder that a script's only option names."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(option, type=Path, default=Path(default), metavar="DIR")
    return next(iter(vars(parser.parse_args()).values()))


def rounded(values: Any, digits: int = 7) -> list[float]:
    """Returns values with so many digits, for a table that stays the same."""
    return [float(f"{value:.{digits}g}") for value in values]

"""The picture of a book: what each run took of the total."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdp_episodic.tools.plots.figures import (
    BLUE,
    VERMILION,
    check_suffix,
    new_figure,
    plain,
    save,
)

# Colours of neighbouring runs; more than so many are not named one by one.
_COLORS = (BLUE, "#56b4e9", VERMILION, "#f0c000", "#009e73", "#cc79a7")
_MOST_NAMED = 18
_HATCHES = ("", "//", "..")
_MOST_LETTERS = 30  # of a name: three stand side by side


def draw_book(
    totals: Sequence[tuple[str, float, float]],
    runs: Sequence[tuple[str, Sequence[float]]],
    path: str | Path,
    *,
    title: str = "",
) -> None:
    """Draws a bar for each currency, and in it what each run took."""
    path = check_suffix(path)
    rows = len(totals)
    legend = min(len(runs), _MOST_NAMED + 1)
    figure = new_figure(9.0, 1.5 + 0.55 * rows + 0.22 * ((legend + 2) // 3))
    axes = figure.add_subplot()
    heights = range(rows - 1, -1, -1)
    axes.barh(heights, [100.0] * rows, 0.55, color="white", edgecolor="#7f7f7f")
    at = [0.0] * rows
    for index, (name, took) in enumerate(runs):
        shares = [100 * v / t for v, (_, _, t) in zip(took, totals, strict=True)]
        if index == _MOST_NAMED:
            name = f"and {len(runs) - _MOST_NAMED:,} more"
        style: dict[str, Any] = {
            "color": _COLORS[index % len(_COLORS)],
            "hatch": _HATCHES[index // len(_COLORS) % len(_HATCHES)],
            "label": _short(name) if index <= _MOST_NAMED else None,
        }
        axes.barh(heights, shares, 0.55, left=at, edgecolor="white", lw=0.4, **style)
        at = [a + share for a, share in zip(at, shares, strict=True)]
    labels = [f"{name}\n{spent:.3g} of {total:.3g}" for name, spent, total in totals]
    axes.set_yticks(list(heights), labels, fontsize=9)
    axes.set_xlabel("% of the budget spent (white: left)")
    axes.set_xlim(0, 102)
    plain(axes, grid="x")
    if title:
        axes.set_title(title, fontsize=11, loc="left")
    if runs:
        where: dict[str, Any] = {"loc": "outside lower center", "ncols": 3}
        figure.legend(frameon=False, fontsize=9, **where)
    save(figure, path)


def _short(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else name[: _MOST_LETTERS - 1] + "…"

"""Lines and maps, readable in greyscale and by the colour-blind.

Lines differ by dashes and markers, not by colour alone; maps use "viridis", which is
perceptually even and falls in lightness, and carry labelled iso-lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic.tools.plots.figures import STAR, matplotlib, new_figure, note, plain
from jaxdp_episodic.tools.plots.labels import is_logarithmic, number, round_levels

_MAP = "viridis"
# Of the lines: no two share their dashes or their marker.
_STYLES = (
    ("-", "o"),
    ((0, (5, 1.5)), "s"),
    ((0, (1, 1.2)), "^"),
    ((0, (5, 1.5, 1, 1.5)), "D"),
    ((0, (8, 2)), "v"),
    ((0, (3, 1, 1, 1, 1, 1)), "P"),
)
_MARKERS_A_LINE = 8  # about; more would hide the dashes
_LIGHTEST = 0.82  # share of the map from dark to light that is seen on white


@dataclass(frozen=True)
class Labels:
    """The words of a picture."""

    x: str  # label of the axis across
    y: str  # of the axis upwards; empty for lines
    value: str  # of the answers
    by: str  # of what the lines or panels differ in; empty if there is one
    names: list[str]  # of the lines or panels
    title: str  # what holds all over the picture


def lines(x: np.ndarray, answers: np.ndarray, labels: Labels) -> Any:
    """Returns a figure of lines: ``answers`` (lines, n) over ``x`` (n,), ascending."""
    figure = new_figure(7.6, 4.6)
    axes = figure.subplots()
    shades = _colours(len(answers))
    every = max(1, x.size // _MARKERS_A_LINE)
    for row, (line, name) in enumerate(zip(answers, labels.names, strict=True)):
        dashes, marker = _STYLES[row % len(_STYLES)]
        axes.plot(
            x,
            np.where(np.isfinite(line), line, np.nan),
            color=shades[row],
            ls=dashes,
            lw=1.7,
            marker=marker,
            ms=5,
            # Not all at the same points, where lines may lie upon each other.
            markevery=(min(row * every // len(answers), x.size - 1), every),
            label=name.rpartition(" = ")[2],
        )
    if labels.by:
        _legend(figure, axes, answers, labels.by)
    axes.set_xlabel(labels.x)
    axes.set_ylabel(labels.value)
    scale_axis(axes, "x", x)
    finite = answers[np.isfinite(answers)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        axes.set_yscale("log")
        plain_ticks(axes.yaxis, finite.min(), finite.max())
    elif finite.size and finite.min() >= 0:
        axes.set_ylim(bottom=0)
    plain(axes)
    if not np.isfinite(answers).all():
        note(axes, "where a line ends, the answer is infinite")
    _title(axes, labels.title)
    return figure


def _legend(figure: Any, axes: Any, answers: np.ndarray, title: str) -> None:
    """A legend beside the lines, in the order in which they end."""
    handles, names = axes.get_legend_handles_labels()
    finite = [line[np.isfinite(line)] for line in answers]
    ends = [line[-1] if line.size else np.inf for line in finite]
    order = np.argsort(ends, kind="stable")[::-1]
    figure.legend(
        [handles[i] for i in order],
        [names[i] for i in order],
        title="\n".join(textwrap.wrap(title, 18)),
        loc="outside right center",
        frameon=False,
        fontsize=9,
        title_fontsize=9,
        handlelength=3.5,
    )


def maps(
    x: np.ndarray,
    y: np.ndarray,
    answers: np.ndarray,
    labels: Labels,
    *,
    iso_lines: bool,
    levels: Sequence[float] | None = None,
    marks: Sequence[tuple[int, float, float]] = (),
) -> Any:
    """Returns a figure of one or more maps with a common scale.

    Args:
      x: (n,) ascending.
      y: (m,) ascending.
      answers: (panels, m, n).
      labels: the words.
      iso_lines: bands between labelled iso-lines, in place of a continuous map.
      levels: of the iso-lines, ascending; None: round numbers. Those that no answer
        reaches are left out.
      marks: panel, x and y of stars.
    """
    finite = answers[np.isfinite(answers) & (answers > 0)]
    if not finite.size:
        raise ValueError("there is nothing to draw: no answer is finite and positive")
    low, high = float(finite.min()), float(finite.max())
    panels = len(answers)
    figure = new_figure({1: 6.8, 2: 9.4, 3: 12.6}[panels], 4.6)
    all_axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    colors = matplotlib("matplotlib.colors")
    logarithmic = high > 5 * low
    norm = (colors.LogNorm if logarithmic else colors.Normalize)(low, high * 1.0000001)
    levels = round_levels(low, high) if levels is None else levels
    levels = [level for level in levels if low < level < high]
    drawn = None
    for axes, panel, name in zip(all_axes, answers, labels.names, strict=True):
        axes.set_facecolor("#e4e4e4")
        known = np.ma.masked_invalid(np.where(panel > 0, panel, low))
        if iso_lines and levels:
            bands = [low, *levels, high * 1.0000001]
            drawn = axes.contourf(x, y, known, bands, cmap=_MAP, norm=norm, alpha=0.75)
        else:
            drawn = axes.pcolormesh(
                x, y, known, cmap=_MAP, norm=norm, shading="nearest", rasterized=True
            )
        scale_axis(axes, "x", x, crowd=panels)
        scale_axis(axes, "y", y)
        if levels and iso_lines:
            _iso_lines(axes, x, y, known, levels)
        if not np.isfinite(panel).all():
            note(axes, "grey: infinite")
        axes.set_xlabel(labels.x)
        if panels > 1:
            axes.set_title(name, fontsize=10)
    for panel, across, up in marks:
        all_axes[panel].plot(across, up, color="white", **STAR)
    all_axes[0].set_ylabel(labels.y)
    bar = figure.colorbar(drawn, ax=all_axes, label=labels.value, pad=0.02)
    if levels:
        bar.set_ticks(levels, labels=[number(level) for level in levels])
        bar.ax.minorticks_off()
    if panels > 1:
        figure.suptitle(labels.title, fontsize=10)
    else:
        _title(all_axes[0], ", ".join(filter(None, (labels.names[0], labels.title))))
    return figure


def _iso_lines(
    axes: Any, x: np.ndarray, y: np.ndarray, known: Any, levels: list[float]
) -> None:
    """Labelled lines of equal answers, dark on every shade of the map."""
    effects = matplotlib("matplotlib.patheffects")
    dashes = [_STYLES[i % 4][0] for i in range(len(levels))]
    found = axes.contour(
        x, y, known, levels, colors="black", linewidths=1.1, linestyles=dashes
    )
    named = {level: number(level) for level in levels}
    for text in axes.clabel(found, fmt=named, fontsize=9):
        text.set_path_effects([effects.withStroke(linewidth=3, foreground="white")])


def _colours(number_of: int) -> list[Any]:
    """Shades of the map from dark to light, without the lightest, on white."""
    colour_map = matplotlib("matplotlib").colormaps[_MAP]
    return [colour_map(v) for v in np.linspace(0.0, _LIGHTEST, max(number_of, 1))]


def scale_axis(axes: Any, which: str, points: np.ndarray, *, crowd: int = 1) -> None:
    """Makes the axis "x" or "y" logarithmic where that suits the points along it.

    Where ``crowd`` such axes share the room there are fewer numbers.
    """
    axis = getattr(axes, f"{which}axis")
    if is_logarithmic(points):
        getattr(axes, f"set_{which}scale")("log")
        plain_ticks(axis, points.min(), points.max(), crowd)


def plain_ticks(axis: Any, low: float, high: float, crowd: int = 1) -> None:
    """Plain numbers on a logarithmic axis, at 1, 2, 5 unless it is long."""
    ticker = matplotlib("matplotlib.ticker")
    # Panels are narrower than a picture of one, but not as much as they are many.
    decades = np.log10(high / low) * (1 + 0.5 * (crowd - 1))
    choices = {0.9: (1, 1.5, 2, 3, 4, 5, 7), 2.5: (1, 2, 5), 4.0: (1, 3)}
    steps = next((s for most, s in choices.items() if decades < most), (1,))
    axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(ticker.NullFormatter())


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=10, loc="left")

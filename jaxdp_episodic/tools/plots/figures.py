"""Helpers that all pictures share, and the pictures of an audit and of a book."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.files.atomic import atomic_file
from jaxdp_episodic.files.optional import require

SUFFIXES = (".png", ".svg")
_DPI = 150
# Colours that also differ in lightness (Okabe and Ito), for print in grey.
BLUE = "#0072b2"
VERMILION = "#d55e00"
DOTTED = (0, (1, 1.5))
STAR = {"marker": "*", "ms": 16, "ls": "", "mec": "black", "zorder": 5}


def matplotlib(module: str = "matplotlib.figure") -> Any:
    """Returns matplotlib, or a module of it."""
    return require(module, purpose="a picture", extra="plot")


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure; the size is in inches."""
    return matplotlib().Figure(figsize=(width, height), layout="constrained")


def plain(*panels: Any, grid: str = "both") -> None:
    """Gives axes a faint grid, and removes the frame at the top and the right."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=grid, alpha=0.25)


def note(axes: Any, text: str, *, inset: float = 0.02, size: float = 9) -> None:
    """Writes a short text in the upper left corner."""
    where = {"transform": axes.transAxes, "ha": "left", "va": "top"}
    axes.text(inset, 1 - inset, text, fontsize=size, **where)


def check_suffix(path: str | Path, option: str = "path") -> Path:
    """Returns the path of a picture; refuses other suffixes than .png and .svg."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{option} must end in .png or .svg, got {path.name!r}")
    return path


def save(figure: Any, path: Path, *, is_private: bool = False) -> None:
    """Writes a figure atomically; a private one only its owner may read."""
    kind = path.suffix[1:].lower() or "png"
    metadata = {"metadata": {"Date": None}} if kind == "svg" else {}
    with atomic_file(path, is_private=is_private) as file:
        figure.savefig(file, format=kind, dpi=_DPI, **metadata)


# --- Numbers, and the scales of axes ---


def number(value: object) -> str:
    """Returns a value as text for a legend or a title."""
    if isinstance(value, str):
        return value
    real = float(value)  # pyright: ignore[reportArgumentType]: a NumPy number
    if real == round(real) and 1000 <= abs(real) < 1e15:
        return f"{real:,.0f}"
    return f"{real:.3g}"


def is_logarithmic(points: np.ndarray) -> bool:
    """Returns whether values are spaced more evenly on a logarithmic scale."""
    ordered = np.sort(points)  # NaN last
    if not 0 < 5 * ordered[0] <= ordered[-1] < np.inf:
        return False
    gaps = np.diff(np.log(ordered)), np.diff(ordered)
    ratios, steps = (np.std(one) / np.mean(one) for one in gaps)
    return points.size == 2 or bool(ratios < steps)


def round_levels(low: float, high: float, most: int = 9) -> list[float]:
    """Returns at most ``most`` round numbers between two positive numbers."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        levels = [float(f"{m}e{e}") for e in exponents for m in digits]
        inside = [level for level in levels if low < level < high]
        if len(inside) <= most:
            break
    while len(inside) > most:
        inside = inside[::2]
    if len(inside) >= 3:
        return inside
    # The ends are close: evenly spaced numbers.
    even = matplotlib("matplotlib.ticker").MaxNLocator(most, steps=[1, 2, 5, 10])
    ticks = even.tick_values(low, high).tolist()
    return [float(f"{level:.12g}") for level in ticks if low < level < high]


def scale_axis(axes: Any, which: str, points: np.ndarray, *, crowd: int = 1) -> None:
    """Makes the axis "x" or "y" logarithmic if that suits the points along it."""
    axis = getattr(axes, f"{which}axis")
    if is_logarithmic(points):
        getattr(axes, f"set_{which}scale")("log")
        plain_ticks(axis, points.min(), points.max(), crowd)


def plain_ticks(axis: Any, low: float, high: float, crowd: int = 1) -> None:
    """Puts plain numbers on a logarithmic axis; ``crowd`` is the number of panels."""
    ticker = matplotlib("matplotlib.ticker")
    # Each of several panels is narrower than a single one, as if it had more decades.
    decades = (np.log10(high) - np.log10(low)) * (1 + 0.5 * (crowd - 1))
    choices = {0.9: (1, 1.5, 2, 3, 4, 5, 7), 2.5: (1, 2, 5), 4.0: (1, 3)}
    steps = next((s for most, s in choices.items() if decades < most), (1,))
    axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(ticker.NullFormatter())


def front_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the indices of points (n,) that no other beats; smaller is better."""
    order = np.lexsort((y, x))
    best = np.minimum.accumulate(y[order])
    first = np.concatenate([[True], best[1:] < best[:-1]])
    return order[first & np.isfinite(x[order]) & np.isfinite(y[order])]


_TIP_RIGHT = 5  # matplotlib's triangle with its tip, not its middle, at the value


def plot_audit(rows: Sequence[Any], path: str | Path, *, title: str = "") -> None:
    """Draws the claimed and audited epsilon of one or more `AuditRow`."""
    path = check_suffix(path)
    figure = new_figure(9.0, 1.7 + 0.42 * len(rows))
    axes = figure.add_subplot()
    heights = np.arange(len(rows))[::-1]
    exact = np.array([row.claimed_exact for row in rows])
    rdp = np.array([row.claimed_rdp for row in rows], float)
    audited = np.array([row.audited for row in rows])
    axes.hlines(heights, audited, exact, color="#bbbbbb", lw=2, zorder=1)
    style: dict[str, Any] = {"marker": _TIP_RIGHT, "ls": "", "color": BLUE, "ms": 7}
    axes.plot(audited, heights, label="audited (lower bound)", **style)
    axes.plot(exact, heights, "|", color="black", ms=13, mew=2, label="claimed, exact")
    if not np.isnan(rdp).all():
        style = {"color": VERMILION, "ms": 6, "mew": 1.6}
        axes.plot(rdp, heights, "x", label="claimed, RDP", **style)
    labels = [f"{row.name}\n{row.attacker}, delta {row.delta:.15g}" for row in rows]
    axes.set_yticks(heights, labels, fontsize=8)
    left = -0.02 * axes.get_xlim()[1]  # room for the marks of audits that found 0
    axes.set(xlabel="epsilon (nats)", xlim=(left, None), ylim=(-0.7, len(rows) - 0.3))
    plain(axes, grid="x")
    if title:
        axes.set_title(title, fontsize=11, loc="left", pad=26)  # above the legend
    where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(frameon=False, fontsize=8, ncols=3, **where)
    save(figure, path)


_COLORS = (BLUE, "#56b4e9", VERMILION, "#f0c000", "#009e73", "#cc79a7")  # of runs
_MOST_NAMED = 18  # runs in the legend
_HATCHES = ("", "//", "..")
_MOST_LETTERS = 30  # characters of a name; the legend has three columns


def draw_book(
    totals: Sequence[tuple[str, float, float]],
    runs: Sequence[tuple[str, Sequence[float]]],
    path: str | Path,
    *,
    title: str = "",
) -> None:
    """Draws a bar for each total, divided into what each run spent."""
    path = check_suffix(path, "--plot")
    rows, named = len(totals), min(len(runs), _MOST_NAMED + 1)
    figure = new_figure(9.0, 1.5 + 0.55 * rows + 0.22 * ((named + 2) // 3))
    axes = figure.add_subplot()
    heights = range(rows - 1, -1, -1)
    axes.barh(heights, [100.0] * rows, 0.55, color="white", edgecolor="#7f7f7f")
    at = [0.0] * rows
    for index, (name, spent) in enumerate(runs):
        shares = [100 * v / t for v, (_, _, t) in zip(spent, totals, strict=True)]
        if len(name) > _MOST_LETTERS:
            name = name[: _MOST_LETTERS - 1] + "…"
        if index == _MOST_NAMED:
            name = f"and {len(runs) - _MOST_NAMED:,} more"
        style: dict[str, Any] = {
            "color": _COLORS[index % len(_COLORS)],
            "hatch": _HATCHES[index // len(_COLORS) % len(_HATCHES)],
            "label": name if index <= _MOST_NAMED else None,
        }
        axes.barh(heights, shares, 0.55, left=at, edgecolor="white", lw=0.4, **style)
        at = [a + share for a, share in zip(at, shares, strict=True)]
    labels = [f"{name}\n{spent:.3g} of {total:.3g}" for name, spent, total in totals]
    axes.set_yticks(list(heights), labels, fontsize=9)
    axes.set(xlabel="% of the budget spent (white: left)", xlim=(0, 102))
    plain(axes, grid="x")
    if title:
        axes.set_title(title, fontsize=11, loc="left")
    if runs:
        figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    save(figure, path)

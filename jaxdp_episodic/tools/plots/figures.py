"""What all pictures share: matplotlib, the file, words for numbers, and scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.files.atomic import atomic_path, owner_only
from jaxdp_episodic.files.optional import require

SUFFIXES = (".png", ".svg")
_DPI = 150  # of pictures for a page
# Colours that differ in lightness too (Okabe and Ito), so that grey print keeps them.
BLUE = "#0072b2"
VERMILION = "#d55e00"
DOTTED = (0, (1, 1.5))
STAR = {"marker": "*", "ms": 16, "ls": "", "mec": "black", "zorder": 5}


def matplotlib(module: str = "matplotlib.figure") -> Any:
    """Returns matplotlib, or a module of it."""
    return require(module, purpose="a picture", extra="plot")


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of this size, in inches."""
    return matplotlib().Figure(figsize=(width, height), layout="constrained")


def plain(*panels: Any, grid: str = "both") -> None:
    """Gives axes a faint grid, and no frame to the right and above."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=grid, alpha=0.25)


def note(axes: Any, text: str, *, inset: float = 0.02, size: float = 9) -> None:
    """Writes a few words in the upper left corner."""
    where = {"transform": axes.transAxes, "ha": "left", "va": "top"}
    axes.text(inset, 1 - inset, text, fontsize=size, **where)


def check_suffix(path: str | Path) -> Path:
    """Returns the path of a picture."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path must end in .png or .svg, got {path.name!r}")
    return path


def save(figure: Any, path: Path, *, is_private: bool = False) -> None:
    """Writes a figure, whole or not at all; for its owner alone if private."""
    figure.dpi = _DPI
    # By itself `savefig` draws everything once more to lay it out, for each file.
    if layout := figure.get_layout_engine():
        layout.execute(figure)
        figure.set_layout_engine(None)
    kind = path.suffix[1:].lower() or "png"
    metadata = {"metadata": {"Date": None}} if kind == "svg" else {}
    opener = owner_only if is_private else None
    with atomic_path(path) as temporary, open(temporary, "xb", opener=opener) as file:
        figure.savefig(file, format=kind, dpi=_DPI, **metadata)


# --- Numbers, and the scales of axes ---


def number(value: object) -> str:
    """Returns a value for a legend or a title."""
    if isinstance(value, str):
        return value
    real = float(value)  # pyright: ignore[reportArgumentType]: a NumPy number
    if real == round(real) and 1000 <= abs(real) < 1e15:
        return f"{real:,.0f}"
    return f"{real:.3g}"


def is_logarithmic(points: np.ndarray) -> bool:
    """Returns whether positive values look even on a logarithmic scale."""
    if points.size < 2 or points.min() <= 0 or not np.isfinite(points).all():
        return False
    ordered = np.sort(points)
    if ordered[-1] < 5 * ordered[0]:
        return False
    if points.size == 2:
        return True
    ratios, steps = np.diff(np.log(ordered)), np.diff(ordered)
    return bool(_variation(ratios) < _variation(steps))


def round_levels(low: float, high: float, most: int = 9) -> list[float]:
    """Returns round numbers (1, 2, 5 times powers of ten) between two positive ones."""
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
    step = 10.0 ** math.floor(math.log10((high - low) / 2 or 1.0))
    even = np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step
    while even.size > most:
        even = even[::2]
    return [float(f"{level:.12g}") for level in even if low < level < high]


def _variation(gaps: np.ndarray) -> float:
    """The coefficient of variation."""
    return float(np.std(gaps) / np.mean(gaps)) if np.mean(gaps) > 0 else 0.0


def scale_axis(axes: Any, which: str, points: np.ndarray, *, crowd: int = 1) -> None:
    """Makes the axis "x" or "y" logarithmic where that suits the points along it."""
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


def front_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns which points (n,) are on the front where smaller is better in both."""
    order = np.lexsort((y, x))
    best = np.minimum.accumulate(y[order])
    first = np.concatenate([[True], best[1:] < best[:-1]])
    return order[first & np.isfinite(x[order]) & np.isfinite(y[order])]

"""What all pictures share: matplotlib when something is drawn, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Returns matplotlib, or a module of it.

    Raises:
      ImportError: matplotlib, of the extra ``[plot]``, is not installed.
    """
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
    """Returns the path of a picture.

    Raises:
      ValueError: it ends in neither ".png" nor ".svg".
    """
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

"""``jaxdp-episodic plot``: pictures of a finished sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxdp_episodic.cli.messages import (
    USER_ERROR,
    USER_ERRORS,
    complain,
    printable,
    reason,
)
from jaxdp_episodic.plots.pictures import draw

_Field = Annotated[str | None, tyro.conf.arg(metavar="FIELD")]


@dataclass(frozen=True)
class Plot:
    """Draw a finished sweep: iso-lines, a heat map, lines, or a Pareto front."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The folder that `sweep` made."""
    kind: Literal["contours", "heatmap", "lines", "pareto"] | None = None
    """Of picture; default: what suits the axes."""
    x: _Field = None
    """Across: an axis of the sweep."""
    y: _Field = None
    """Upwards: an axis; of a Pareto front also what was asked for. Not for lines."""
    value: _Field = None
    """Which quantity, if the sweep asks for several."""
    by: _Field = None
    """One coloured line, or one panel, for each of some values of this axis."""
    fix: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE")] = ()
    """Where the other axes are held; default: the middle value of each."""
    levels: Annotated[tuple[float, ...], tyro.conf.arg(metavar="NUMBER")] = ()
    """Of the iso-lines; default: round numbers."""
    mark: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=VALUE")] = ()
    """A star on a map: its place along x and y, and its panel if there are several."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The pictures, FILE.png and FILE.svg; default: DIR/KIND."""

    def run(self) -> int:
        """Draws; returns the exit code."""
        try:
            files = draw(
                self.folder,
                kind=self.kind,
                x=self.x,
                y=self.y,
                value=self.value,
                by=self.by,
                fix=dict(_assigned("--fix", text) for text in self.fix),
                levels=self.levels,
                mark=dict(_assigned("--mark", text) for text in self.mark),
                out=self.out,
            )
        except USER_ERRORS as error:
            complain(f"{self.folder}: {reason(error, self.folder)}")
            return USER_ERROR
        print(printable(", ".join(map(str, files))))
        return 0


def _assigned(option: str, text: str) -> tuple[str, str]:
    """Field and value of "FIELD=VALUE"."""
    field, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option} must be FIELD=VALUE, got {text!r}")
    return field, value

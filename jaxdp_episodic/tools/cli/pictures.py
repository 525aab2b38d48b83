"""``jaxdp-episodic curve`` and ``plot``: pictures of a run, and of a sweep."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxdp_episodic.accountant.report.protected import protected_unit
from jaxdp_episodic.tools.cli.command import (
    Command,
    File,
    Name,
    TomlFile,
    Whole,
    facts,
    option,
    waiting,
)
from jaxdp_episodic.tools.plots.curve import plot_curve, summary
from jaxdp_episodic.tools.plots.pictures import SUFFIXES, draw
from jaxdp_episodic.tools.requests.request import EpsilonRequest, caveats_on, steps_of
from jaxdp_episodic.tools.requests.request_file import read_request

_Field = Annotated[Name, option("FIELD")]
_Assigned = Annotated[tuple[str, ...], option("FIELD=VALUE")]


@dataclass
class Curve(Command):
    """The command ``curve``."""

    file: TomlFile
    """The request, as for `epsilon`; its delta or epsilon is not used."""
    out: Annotated[Path, option("FILE.png")]
    """The picture, .png or .svg. Its numbers are written beside it as .json."""
    num_steps: Whole = None
    """Number of steps; default: the file's."""
    method: Name = None
    """exact, pld or rdp; default: the file's."""

    def _lines(self) -> list[str]:
        request = read_request(
            self.file, EpsilonRequest, num_steps=self.num_steps, method=self.method
        )
        step = request.planned("curve")
        if self.out.suffix.lower() not in SUFFIXES:
            names = " or ".join(SUFFIXES)
            raise ValueError(f"--out must end in {names}, got {str(self.out)!r}")
        with waiting("privacy curve") as say:
            curve = plot_curve(
                step,
                self.out,
                num_steps=request.num_steps,
                method=request.method,
                on_part=lambda part, number, total: say(f"{number} of {total}: {part}"),
            )
        for caveat in caveats_on(request):
            warnings.warn(caveat, stacklevel=2)
        first = steps_of(request)[0]
        more = {
            "protected": f"{protected_unit(first)} ({first.neighboring_relation})",
            "written": f"{self.out}, {self.out.with_suffix('.json')}",
        }
        return facts(summary(curve) | more, 23)


@dataclass
class Plot(Command):
    """The command ``plot``."""

    folder: Annotated[tyro.conf.Positional[Path], option("DIR")]
    """The folder that `sweep` made."""
    kind: Literal["contours", "heatmap", "lines", "pareto"] | None = None
    """Kind of picture; default: the one that suits the axes."""
    x: _Field = None
    """The axis of the sweep that runs across."""
    y: _Field = None
    """The axis that runs upwards (not for lines). On a Pareto front also the answer."""
    value: _Field = None
    """The quantity to draw, if the sweep asks for several."""
    by: _Field = None
    """Draw a line or a panel for each of some values of this axis."""
    fix: _Assigned = ()
    """Values at which the other axes are held; default: the middle value of each."""
    levels: Annotated[tuple[float, ...], option("NUMBER")] = ()
    """Levels of the iso-lines; default: round numbers."""
    mark: _Assigned = ()
    """Draw a star on a map at this x and y; the panel may be named as well."""
    out: File = None
    """The pictures, FILE.png and FILE.svg; default: DIR/KIND."""

    def _lines(self) -> list[str]:
        given: dict[str, Any] = dict(vars(self))
        given |= {name: _assigned(name, getattr(self, name)) for name in _ASSIGNED}
        return [", ".join(map(str, draw(**given)))]


_ASSIGNED = ("fix", "mark")


def _assigned(name: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Fields and values of "FIELD=VALUE"."""
    for text in texts:
        if "=" not in text:
            raise ValueError(f"--{name} must be FIELD=VALUE, got {text!r}")
    return dict(text.split("=", 1) for text in texts)

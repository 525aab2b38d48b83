"""``jaxdp-episodic curve`` and ``plot``: pictures of a run, and of a sweep."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxdp_episodic.accountant.report.protected import protected_unit
from jaxdp_episodic.tools.cli.messages import (
    File,
    Name,
    TomlFile,
    Whole,
    option,
    reported,
    waiting,
)
from jaxdp_episodic.tools.cli.process import ended_by_sigterm
from jaxdp_episodic.tools.plots.curve import plot_curve, summary
from jaxdp_episodic.tools.plots.pictures import draw
from jaxdp_episodic.tools.requests.request import EpsilonRequest, caveats_on, steps_of
from jaxdp_episodic.tools.requests.request_file import read_request

_Field = Annotated[Name, option("FIELD")]


@dataclass(frozen=True)
class Curve:
    """Draw a run's whole privacy curve, and what an attacker could do with it."""

    file: TomlFile
    """The request: as for `epsilon`; its delta or epsilon is not used."""
    out: Annotated[Path, option("FILE.png")]
    """The picture, .png or .svg; its numbers go beside it, into a .json."""
    num_steps: Whole = None
    """Takes the place of the file's number of steps."""
    method: Name = None
    """Takes the place of the file's method: exact, pld or rdp."""

    def run(self) -> int:
        """Draws what a request describes; returns the exit code."""
        return reported(self.file, self._drawn, says_warnings=True)

    def _drawn(self) -> list[str]:
        """Draws, and returns what to say."""
        request = read_request(
            self.file, EpsilonRequest, num_steps=self.num_steps, method=self.method
        )
        step = request.planned("curve")
        with ended_by_sigterm(), waiting("privacy curve") as say:
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
        facts = summary(curve) | {
            "protected": f"{protected_unit(first)} ({first.neighboring_relation})",
            "written": f"{self.out}, {self.out.with_suffix('.json')}",
        }
        return [f"{name:<23}  {value}" for name, value in facts.items()]


@dataclass(frozen=True)
class Plot:
    """Draw a finished sweep: iso-lines, a heat map, lines, or a Pareto front."""

    folder: Annotated[tyro.conf.Positional[Path], option("DIR")]
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
    fix: Annotated[tuple[str, ...], option("FIELD=VALUE")] = ()
    """Where the other axes are held; default: the middle value of each."""
    levels: Annotated[tuple[float, ...], option("NUMBER")] = ()
    """Of the iso-lines; default: round numbers."""
    mark: Annotated[tuple[str, ...], option("FIELD=VALUE")] = ()
    """A star on a map: its place along x and y, and its panel if there are several."""
    out: File = None
    """The pictures, FILE.png and FILE.svg; default: DIR/KIND."""

    def run(self) -> int:
        """Draws; returns the exit code."""
        return reported(self.folder, self._drawn)

    def _drawn(self) -> list[str]:
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("fix", "mark"):
            options[name] = dict(_assigned(name, text) for text in options[name])
        return [", ".join(map(str, draw(**options)))]


def _assigned(name: str, text: str) -> tuple[str, str]:
    """Field and value of "FIELD=VALUE"."""
    field, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--{name} must be FIELD=VALUE, got {text!r}")
    return field, value

"""``curve``, ``plot``, ``sweep`` and ``explore``: pictures of runs and of grids."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from rich.console import Console

from jaxdp_episodic.accountant.report.protected import protected_unit
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.tools.cli.command import (
    PROGRAM,
    Command,
    File,
    Floats,
    Folder,
    Ints,
    Name,
    TomlFile,
    Whole,
    facts,
    option,
    reason,
    waiting,
)
from jaxdp_episodic.tools.explore.questions import start
from jaxdp_episodic.tools.explore.server import serve
from jaxdp_episodic.tools.plots.curve import plot_curve, summary
from jaxdp_episodic.tools.plots.pictures import draw
from jaxdp_episodic.tools.requests.request import (
    EpsilonRequest,
    caveats_on,
    read_request,
    steps_of,
)
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import (
    Outcome,
    RayEngine,
    collect,
    on_devices,
    run_sweep,
    saved_chunks,
)

_Field = Annotated[Name, option("FIELD")]
_Assigned = Annotated[tuple[str, ...], option("FIELD=VALUE ...", is_optional=True)]
_Kind = Union[Literal["contours", "heatmap", "lines", "pareto"], None]  # noqa: UP007


@dataclass
class Curve(Command):
    """The command ``curve``."""

    #: The request, as for `epsilon`; its delta or epsilon is not used.
    file: TomlFile
    #: The picture, .png or .svg. Its numbers are written beside it as .json.
    out: Annotated[Path, option("FILE.png")]
    #: Number of steps; default: the file's.
    num_steps: Whole = None
    #: exact, pld or rdp; default: the file's.
    method: Name = None

    def _lines(self) -> list[str]:
        request = read_request(
            self.file, EpsilonRequest, num_steps=self.num_steps, method=self.method
        )
        step = request.planned("curve")
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

    #: The folder that `sweep` made.
    folder: Annotated[tyro.conf.Positional[Path], option("DIR")]
    #: contours, heatmap, lines or pareto; default: the one that suits the axes.
    kind: Annotated[_Kind, option("NAME", is_optional=True)] = None
    #: The axis of the sweep that runs across.
    x: _Field = None
    #: The axis that runs upwards (not for lines). On a Pareto front also the answer.
    y: _Field = None
    #: The quantity to draw, if the sweep has several.
    value: _Field = None
    #: Draw a line or a panel for each of some values of this axis.
    by: _Field = None
    #: Fixed values of the other axes; default: the middle value of each.
    fix: _Assigned = ()
    #: Levels of the iso-lines; default: round numbers.
    levels: Annotated[tuple[float, ...], option("NUMBER ...", is_optional=True)] = ()
    #: Draw a star on a map at this x and y; the panel may be named as well.
    mark: _Assigned = ()
    #: The pictures, FILE.png and FILE.svg; default: DIR/KIND.
    out: File = None

    def _lines(self) -> list[str]:
        given: dict[str, Any] = dict(vars(self))
        for name in ("fix", "mark"):
            for text in given[name]:
                if "=" not in text:
                    raise ValueError(f"--{name} must be FIELD=VALUE, got {text!r}")
            given[name] = dict(text.split("=", 1) for text in given[name])
        return [", ".join(map(str, draw(**given)))]


@dataclass
class Sweep(Command):
    """The command ``sweep``."""

    #: The sweep: a request as for `epsilon`, with axes in place of numbers.
    file: TomlFile
    #: Folder for the table and the picture; made if missing.
    out: Folder
    #: Evaluate part I of N (from 1), for job arrays that share DIR.
    shard: Annotated[Name, option("I/N")] = None
    #: Only join the parts of job arrays into the table.
    collect: bool = False
    #: Evaluate on this machine, or on Ray workers.
    engine: Literal["local", "ray"] = "local"
    #: Ray cluster; "auto": the one running here; "local": start one.
    ray_address: Annotated[str, option("ADDRESS")] = "local"
    #: CPUs for each task on Ray.
    ray_cpus: Floats = 1.0
    #: GPUs for each task on Ray.
    ray_gpus: Floats = 0.0
    #: Restarts of a task whose worker was lost.
    ray_retries: Ints = 5

    _has_warnings = False  # the outcome has the warnings of all chunks

    def _lines(self) -> list[str]:
        try:
            outcome = self._outcome()
            picture = {} if outcome.table is None else {"picture": self._picture()}
        except OSError as error:  # a failing disk leaves saved chunks intact
            text = reason(error, str(self.file))
            raise OSError(text + self._after_interruption()) from error
        warned = [f"warning: {text}" for text in outcome.warnings]
        return [*facts(_facts(outcome) | picture), *warned]

    def _after_interruption(self) -> str:
        saved = saved_chunks(self.out)
        if saved is None:
            return ""
        done, of = saved
        return f"; {done} of {of} chunks are saved; the same command continues"

    def _outcome(self) -> Outcome:
        part = None
        if self.shard is not None:
            if self.collect:
                raise ValueError("--collect joins all shards, so leave out --shard")
            numbers = re.fullmatch(r"([1-9]\d{0,8})/(\d{1,9})", self.shard)
            if numbers is None or int(numbers[1]) > int(numbers[2]):
                raise ValueError(
                    f"--shard must be I/N with 1 <= I <= N, got {self.shard!r}"
                )
            part = int(numbers[1]), int(numbers[2])
        sweep = read_sweep(self.file)
        if self.collect:
            return collect(sweep, self.out)
        engine = on_devices
        if self.engine == "ray":
            engine = RayEngine(
                address=self.ray_address,
                num_cpus=self.ray_cpus,
                num_gpus=self.ray_gpus,
                max_retries=self.ray_retries,
            )
        console = Console(stderr=True)
        return run_sweep(sweep, self.out, engine=engine, part=part, console=console)

    def _picture(self) -> str:
        """Draws the default picture; the table is kept without one if that fails."""
        try:
            return ", ".join(map(str, draw(self.out)))
        except (ImportError, ValueError) as error:
            return f"none: {error}"


def _facts(outcome: Outcome) -> dict[str, str]:
    chunks = "1 chunk" if outcome.num_chunks == 1 else f"{outcome.num_chunks:,} chunks"
    evaluated = "nothing: all were there"
    if number := outcome.num_evaluated:
        rate = number / outcome.seconds
        evaluated = f"{number:,} in {outcome.seconds:,.1f} s, {rate:,.0f} a second"
    rows = {"settings": f"{outcome.size:,} in {chunks}", "evaluated": evaluated}
    return rows | ({} if outcome.table is None else {"table": str(outcome.table)})


_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">Explore privacy</a>
"""


@dataclass
class Explore(Command):
    """The command ``explore``."""

    #: The first design, a request as for `epsilon`; default: that of the README.
    file: Annotated[File, tyro.conf.Positional, option("[FILE.toml]")] = None
    #: Port at 127.0.0.1; default: a free one.
    port: int = 0
    #: Print the address and open no browser.
    no_browser: bool = False

    _has_signals = False  # the server handles them

    def _subject(self) -> Any:
        return self.file or "explore"

    def _lines(self) -> list[str]:
        with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-") as folder:
            page = Path(folder) / "open.html"

            def on_ready(address: str) -> None:
                print(f"explore: {address} (Ctrl-C ends it)", flush=True)
                if not self.no_browser and _has_screen():
                    # Every user of the machine can read a browser's command line, so
                    # the secret address is in a file that only its owner can read.
                    write_atomically(page, _REDIRECT.format(address), is_private=True)
                    webbrowser.open(page.as_uri())

            try:
                serve(start(self.file), port=self.port, on_ready=on_ready)
            except OverflowError as error:
                raise ValueError(
                    f"--port must be in 0-65535, got {self.port}"
                ) from error
            except KeyboardInterrupt:  # the usual end
                pass
        return ["ended"]


def _has_screen() -> bool:
    """False if a text browser would open in the server's own terminal."""
    return not sys.platform.startswith("linux") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )

"""``curve``, ``plot``, ``sweep`` and ``explore``: pictures of runs and of grids."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
import webbrowser
from pathlib import Path
from typing import Any

from jaxdp_episodic._progress import standard_error
from jaxdp_episodic.accountant.report.sentences import protected_unit
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.tools.cli import command
from jaxdp_episodic.tools.cli.flags import PROGRAM
from jaxdp_episodic.tools.explore.questions import start
from jaxdp_episodic.tools.explore.server import serve
from jaxdp_episodic.tools.plots.curve import plot_curve, summary
from jaxdp_episodic.tools.plots.pictures import draw
from jaxdp_episodic.tools.requests import request as requests
from jaxdp_episodic.tools.sweep import run
from jaxdp_episodic.tools.sweep.description import read_sweep


def do_curve(o: command.Options) -> list[str]:
    """The command ``curve``."""
    request = requests.read_request(
        o.file, requests.EpsilonRequest, num_steps=o.num_steps, method=o.method
    )
    step = request.planned("curve")
    with command.waiting("privacy curve"):
        how: Any = {"num_steps": request.num_steps, "method": request.method}
        curve = plot_curve(step, o.out, **how)
    for caveat in requests.caveats_on(request):
        warnings.warn(caveat, stacklevel=2)
    first = requests.steps_of(request)[0]
    more = {
        "protected": f"{protected_unit(first)} ({first.neighboring_relation})",
        "written": f"{o.out}, {o.out.with_suffix('.json')}",
    }
    return command.facts(summary(curve) | more, 23)


def do_plot(o: command.Options) -> list[str]:
    """The command ``plot``."""
    given = o.given("kind", "x", "y", "value", "by", "levels", "out", "fix", "mark")
    for name in given.keys() & {"fix", "mark"}:
        for text in given[name]:
            if "=" not in text:
                raise ValueError(f"--{name} must be FIELD=VALUE, got {text!r}")
        given[name] = dict(text.split("=", 1) for text in given[name])
    return [", ".join(map(str, draw(o.dir, **given)))]


def do_sweep(o: command.Options) -> list[str]:
    """The command ``sweep``."""

    def left_behind() -> str:
        if (saved := run.saved_chunks(o.out)) is None:
            return ""
        return "; {} of {} chunks are saved; the same command continues".format(*saved)

    o.left_behind, part = left_behind, None
    if o.shard is not None:
        if o.collect:
            raise ValueError("--collect joins all shards, so leave out --shard")
        numbers = re.fullmatch(r"([1-9]\d{0,8})/(\d{1,9})", o.shard)
        if numbers is None or int(numbers[1]) > int(numbers[2]):
            raise ValueError(f"--shard must be I/N with 1 <= I <= N, got {o.shard!r}")
        part = int(numbers[1]), int(numbers[2])
    sweep, rows = read_sweep(o.file), dict[str, str]()
    engine = None if o.collect else run.on_devices
    if engine is not None and o.engine == "ray":
        engine = run.RayEngine(o.ray_address, o.ray_cpus, o.ray_gpus, o.ray_retries)
    how = {"engine": engine, "part": part, "console": standard_error()}
    try:
        outcome = run.run_sweep(sweep, o.out, **how)
        if outcome.table is not None:  # it is kept if it cannot be drawn
            try:
                picture = ", ".join(map(str, draw(o.out)))
            except (ImportError, ValueError) as error:
                picture = f"none: {error}"
            rows = {"table": str(outcome.table), "picture": picture}
    except OSError as error:  # a failing disk leaves saved chunks intact
        raise OSError(command.reason(error, str(o.file)) + left_behind()) from error
    many, evaluated = outcome.num_chunks, "nothing: all were there"
    if number := outcome.num_evaluated:
        rate = number / outcome.seconds
        evaluated = f"{number:,} in {outcome.seconds:,.1f} s, {rate:,.0f} a second"
    chunks = "1 chunk" if many == 1 else f"{many:,} chunks"
    first = {"settings": f"{outcome.size:,} in {chunks}", "evaluated": evaluated}
    return [*command.facts(first | rows), *(f"warning: {w}" for w in outcome.warnings)]


_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">Explore privacy</a>
"""


def do_explore(o: command.Options) -> list[str]:
    """The command ``explore``."""
    o.subject = o.file or "explore"
    with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-") as folder:
        page = Path(folder) / "open.html"

        def on_ready(address: str) -> None:
            print(f"explore: {address} (Ctrl-C ends it)", flush=True)
            # Elsewhere a text browser would open in the server's own terminal.
            has_screen = not sys.platform.startswith("linux") or any(
                os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
            )
            if not o.no_browser and has_screen:
                # Every user of the machine can read a browser's command line, so the
                # secret address is in a file that only its owner can read.
                write_atomically(page, _REDIRECT.format(address), is_private=True)
                webbrowser.open(page.as_uri())

        try:
            with command.ended_by_sigterm():
                serve(start(o.file), port=o.port, on_ready=on_ready)
        except OverflowError as error:
            raise ValueError(f"--port must be in 0-65535, got {o.port}") from error
        except KeyboardInterrupt as end:  # Ctrl-C is the usual end
            if isinstance(end, command.Terminated):
                raise
    return ["ended"]

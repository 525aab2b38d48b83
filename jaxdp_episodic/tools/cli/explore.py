"""``jaxdp-episodic explore``: a local page on which designs are changed by hand."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.tools.cli.command import Command, File, option
from jaxdp_episodic.tools.cli.process import PROGRAM
from jaxdp_episodic.tools.explore.questions import start
from jaxdp_episodic.tools.explore.server import serve

_LEADS = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">Explore privacy</a>
"""


@dataclass
class Explore(Command):
    """The command ``explore``."""

    file: Annotated[File, tyro.conf.Positional, option("[FILE.toml]")] = None
    """The first design, a request as for `epsilon`; default: that of the README."""
    port: int = 0
    """Port at 127.0.0.1; default: a free one."""
    no_browser: bool = False
    """Print the address and open no browser."""

    _has_signals = False  # the server handles them

    def _subject(self) -> Any:
        return self.file or "explore"

    def _lines(self) -> list[str]:
        with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-") as folder:
            page = Path(folder) / "open.html"

            def on_ready(address: str) -> None:
                print(f"explore: {address} (Ctrl-C ends it)", flush=True)
                if not self.no_browser and _has_screen():
                    # A browser's command line can be read by everybody here; the file
                    # that leads it to the secret address only by its owner.
                    write_atomically(page, _LEADS.format(address), is_private=True)
                    webbrowser.open(page.as_uri())

            try:
                serve(start(self.file), port=self.port, on_ready=on_ready)
            except OverflowError as error:
                raise ValueError(
                    f"--port must be in 0-65535, got {self.port}"
                ) from error
            except KeyboardInterrupt:  # how it is meant to end
                pass
        return ["ended"]


def _has_screen() -> bool:
    """Elsewhere a browser of the terminal would take the place of the server."""
    return not sys.platform.startswith("linux") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )

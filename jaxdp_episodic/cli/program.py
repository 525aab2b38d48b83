"""Which commands there are, and what one call of the program does."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Sequence

import tyro

from jaxdp_episodic.cli.answers import Calibrate, Epsilon
from jaxdp_episodic.cli.audit import Audit
from jaxdp_episodic.cli.curve import Curve
from jaxdp_episodic.cli.messages import (
    INTERRUPTED,
    PROGRAM,
    TERMINATED,
    USER_ERROR,
    complain,
)
from jaxdp_episodic.cli.plan import Plan
from jaxdp_episodic.cli.plot import Plot
from jaxdp_episodic.cli.process import Terminated, keep_compiled_kernels
from jaxdp_episodic.cli.sweep import Sweep
from jaxdp_episodic.cli.train import Train
from jaxdp_episodic.cli.tune import Tune

Command = Epsilon | Calibrate | Curve | Sweep | Plot | Plan | Train | Tune | Audit


def main() -> None:
    """Entry point of the installed command; never returns."""
    keep_compiled_kernels()
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt as end:
        code = TERMINATED if isinstance(end, Terminated) else INTERRUPTED
        with contextlib.suppress(OSError):  # nobody may be left to read it
            sys.stdout.flush()
            sys.stderr.flush()
        # XLA's threads go on compiling: an interpreter that shuts down beside them
        # ends in a segmentation fault.
        os._exit(code)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code.

    Args:
      arguments: the command line without the program's name.

    Returns:
      0, or 2 after an error that the user can repair: one line on standard error.
    """
    if list(arguments) == ["--version"]:
        print(f"{PROGRAM} {_version()}")
        return 0
    try:
        command: Command = _parse(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return command.run()


def _parse(arguments: Sequence[str]) -> Command:
    """The command that the arguments name; a usage error is made one line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                Command,  # pyright: ignore[reportArgumentType]: a union is fine
                prog=PROGRAM,
                description=(
                    "Privacy accounting for episodic training, and training itself. "
                    "Examples of files are in configs/; --version prints the version."
                ),
                args=list(arguments),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if end.code:
            # A box: a title, the message, a rule, hints.
            lines = [
                re.sub("[│╭╮╰╯]", " ", line) for line in errors.getvalue().split("\n")
            ]
            message = " ".join(lines[1:]).split("───")[0]
            complain(f"{' '.join(message.split())} (see {PROGRAM} --help)")
            raise SystemExit(USER_ERROR) from None
        raise


def _version() -> str:
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(run from its sources, not installed)"

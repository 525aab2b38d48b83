"""Which commands there are, and what one call of the program does.

Only the module of the command that is called is imported, so that a question pays for
nothing that it does not need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Union

import tyro

from jaxdp_episodic.tools.cli.messages import (
    INTERRUPTED,
    PROGRAM,
    TERMINATED,
    USER_ERROR,
    complain,
)
from jaxdp_episodic.tools.cli.process import (
    Terminated,
    end_process,
    keep_compiled_kernels,
)

# Command -> its module, and the first words of its class, for the list of commands.
COMMANDS = {
    "epsilon": (
        "answers",
        "What a run costs in privacy: epsilon at a delta, or delta at an epsilon.",
    ),
    "report": (
        "report",
        "Say in plain words what a run protects, how well, and under which conditions.",
    ),
    "calibrate": (
        "answers",
        "Which noise, number of steps or rate keeps a run within a target epsilon.",
    ),
    "curve": (
        "pictures",
        "Draw a run's whole privacy curve, and what an attacker could do with it.",
    ),
    "explore": (
        "explore",
        "Open a local page: move designs by hand, see at once what they cost.",
    ),
    "sweep": (
        "sweep",
        "Evaluate a grid of settings into a table and a picture.\n\n"
        "May be killed at any time: the same command goes on where it was.",
    ),
    "plot": (
        "pictures",
        "Draw a finished sweep: iso-lines, a heat map, lines, or a Pareto front.",
    ),
    "plan": (
        "plan",
        "Search designs within a privacy and a compute budget; write one to train.",
    ),
    "data": (
        "data",
        "Keep data on the disk: import it into a folder to train on, or check one.",
    ),
    "init": (
        "init",
        "Read data, and write a commented config for them that runs as it is.\n\n"
        "What it counts in the data and writes down is marked: private, unless it was "
        "public\nbefore. Nothing is trained, and nothing released.",
    ),
    "train": (
        "train",
        "Train privately on episodes, and stop before the target epsilon is exceeded.",
    ),
    "tune": (
        "train",
        "Train a random number of times, release the best run, and charge the choice.",
    ),
    "predict": (
        "predict",
        "Say of examples which class they are of, or their values, by a run's release.",
    ),
    "book": (
        "book",
        "Keep one privacy budget for all that is ever run on a data set.",
    ),
    "audit": (
        "audit",
        "Try to disprove a claimed epsilon by drawing, or by canaries in training.",
    ),
}


def main() -> None:
    """Entry point of the installed command; never returns."""
    keep_compiled_kernels()
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt as end:
        code = TERMINATED if isinstance(end, Terminated) else INTERRUPTED
        # XLA's threads go on compiling: an interpreter that shuts down beside them
        # ends in a segmentation fault.
        end_process(code)
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
        command = parsed(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return command.run()


def parsed(arguments: Sequence[str]) -> Any:
    """Returns the command that the arguments name, an instance of its class.

    Raises:
      SystemExit: help was asked for; or a usage error, which was said in one line.
    """
    errors = io.StringIO()
    chosen: Any = Union[_classes(arguments)]  # noqa: UP007
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                chosen,
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


def _classes(arguments: Sequence[str]) -> tuple[type, ...]:
    """The class of the command that is called; for the others, one to list it."""
    called = arguments[0] if arguments else ""
    needs_all = called.startswith("--tyro-")  # completions of a shell
    classes = []
    for name, (module, words) in COMMANDS.items():
        if needs_all or name == called:
            home = importlib.import_module(f"jaxdp_episodic.tools.cli.{module}")
            classes.append(getattr(home, name.capitalize()))
        else:
            content = {"__doc__": words}
            classes.append(
                dataclasses.make_dataclass(name.capitalize(), (), namespace=content)
            )
    return tuple(classes)


def _version() -> str:
    metadata = importlib.import_module("importlib.metadata")  # slow, and rarely needed
    try:
        return metadata.version(PROGRAM)
    except metadata.PackageNotFoundError:
        return "(run from its sources, not installed)"

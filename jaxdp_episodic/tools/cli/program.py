"""Which commands there are, and what one call of the program does.

Only the module of the command that is called is imported, so that a question pays for
nothing that it does not need.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import tyro

from jaxdp_episodic import _validation
from jaxdp_episodic.tools.cli.command import (
    INTERRUPTED,
    TERMINATED,
    USER_ERROR,
    complain,
)
from jaxdp_episodic.tools.cli.process import (
    PROGRAM,
    Terminated,
    end_process,
    keep_compiled_kernels,
)

# Command -> its module, where a class has its name, and what it does.
COMMANDS = {
    "epsilon": (
        "answers",
        "Compute what a run costs in privacy: epsilon at a delta, or delta at an "
        "epsilon.",
    ),
    "report": (
        "report",
        "Say in plain words what a run protects, how well, and under which conditions.",
    ),
    "calibrate": (
        "answers",
        "Find the noise, number of steps or rate that keeps a run within a target.",
    ),
    "curve": (
        "pictures",
        "Draw a run's whole privacy curve, and what an attacker could do with it.",
    ),
    "explore": (
        "explore",
        "Open a local page on which you change a design and see what it costs.",
    ),
    "sweep": (
        "sweep",
        "Evaluate a grid of settings into a table and a picture. May be killed at any "
        "time: the same command goes on where it was.",
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
        "Import data into a folder on the disk to train on, or check such a folder.",
    ),
    "init": (
        "init",
        "Read data, and write a commented config for them that runs as it is. Nothing "
        "is trained or released. Numbers counted in the data are marked in the config: "
        "they are private, unless they were public before.",
    ),
    "train": (
        "train",
        "Train privately on episodes, and stop before the target epsilon is exceeded.",
    ),
    "log": (
        "log",
        "Print what a run was charged, and its private log, as JSON lines.",
    ),
    "tune": (
        "train",
        "Train a random number of times, release the best run, and charge the choice.",
    ),
    "predict": (
        "predict",
        "Predict the class or the value of examples with the release of a run.",
    ),
    "book": (
        "book",
        "Keep one privacy budget for all that is ever run on a data set.",
    ),
    "audit": (
        "audit",
        "Try to disprove a claimed epsilon by simulation, or by canaries in training.",
    ),
}
_CONFIG = (tyro.conf.FlagCreatePairsOff,)
_HELP = f"""usage: {PROGRAM} [--help] [--version] COMMAND ...

Privacy accounting for episodic training, and training itself. Examples of files are
in configs/; {PROGRAM} COMMAND --help lists the options of a command.

commands:
"""


def main() -> None:
    """Entry point of the installed command; never returns."""
    keep_compiled_kernels()
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt as end:
        # XLA's threads go on compiling: an interpreter that shuts down beside them
        # ends in a segmentation fault.
        end_process(TERMINATED if isinstance(end, Terminated) else INTERRUPTED)
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
    if arguments and arguments[0] in ("-h", "--help"):
        print(_HELP + "\n".join(itertools.starmap(_listed, COMMANDS.items())))
        return 0
    if list(arguments) == ["--version"]:
        print(PROGRAM, sys.modules["jaxdp_episodic"].__version__)
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
    name, *rest = arguments or [""]
    if name.startswith("--tyro-"):  # completions of a shell
        every = {name: _class(name) for name in COMMANDS}
        return tyro.extras.subcommand_cli_from_dict(
            every, prog=PROGRAM, args=arguments, config=_CONFIG
        )
    if name not in COMMANDS:
        close = _validation.nearest(name, COMMANDS)
        said = f"unknown command {name!r}{close}" if name else "no command was given"
        complain(f"{said} (see {PROGRAM} --help)")
        raise SystemExit(USER_ERROR)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                _class(name),
                prog=f"{PROGRAM} {name}",
                description=COMMANDS[name][1],
                args=rest,
                config=_CONFIG,
            )
    except SystemExit as end:
        if end.code:
            complain(f"{_message(errors.getvalue())} (see {PROGRAM} {name} --help)")
            raise SystemExit(USER_ERROR) from None
        raise


def _class(name: str) -> type:
    home = importlib.import_module(f"jaxdp_episodic.tools.cli.{COMMANDS[name][0]}")
    return getattr(home, name.capitalize())


def _listed(name: str, about: tuple[str, str]) -> str:
    """A command in the list of all."""
    first, others = f"  {name:<11}", 13 * " "
    return textwrap.fill(about[1], 88, initial_indent=first, subsequent_indent=others)


def _message(box: str) -> str:
    """The message in a box that tyro draws: below its title, above a rule."""
    rows = (row.strip("│ ") for row in box.splitlines()[1:])
    said = " ".join(itertools.takewhile(lambda row: row[:1] not in ("─", "╰"), rows))
    # tyro names what has no flag by its field, the help by capitals.
    return re.sub(r"'action\.(\w+)'", lambda found: repr(found[1].upper()), said)

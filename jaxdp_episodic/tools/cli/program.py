"""The commands, and the program: it imports only the command that is called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Union

import tyro

from jaxdp_episodic import _validation
from jaxdp_episodic.tools.cli.command import (
    INTERRUPTED,
    PROGRAM,
    TERMINATED,
    USER_ERROR,
    Terminated,
    end_process,
    keep_compiled_kernels,
    print_error,
)

COMMANDS = {
    "epsilon": "Compute the privacy cost of a run: epsilon at a delta, or the reverse.",
    "report": "Explain what a run protects, how strongly, and under which conditions.",
    "calibrate": "Find the noise, number of steps or sampling rate for a target "
    "epsilon.",
    "curve": "Draw delta against epsilon, and the success of membership attacks.",
    "explore": "Open a local page where you change a design and see its privacy cost.",
    "sweep": "Evaluate a grid of settings into a table and a picture. If it is killed, "
    "the same command continues.",
    "plot": "Draw a finished sweep: iso-lines, a heat map, lines, or a Pareto front.",
    "plan": "Search designs within a privacy and a compute budget; write "
    "the best config.",
    "data": "Import data into a folder that training reads from disk, or check one.",
    "init": "Read data and write a commented config that runs without edits. Nothing "
    "is trained or released. The config marks numbers that were counted in the "
    "data: they are private unless they were public before.",
    "train": "Train on episodes with differential privacy; stop before the target "
    "epsilon is exceeded.",
    "log": "Print the charges of a run and its private log as JSON lines.",
    "tune": "Search hyperparameters privately: train a random number of runs, release "
    "the best, and account for the choice.",
    "predict": "Predict the class or the value of examples with the release of a run.",
    "book": "Keep one privacy budget for everything that is run on a data set.",
    "audit": "Test a claimed epsilon by simulation or by canaries: a lower bound "
    "beside it.",
}
# Module -> the commands that it has, each a class of the same name.
_MODULES = {
    "answers": ("epsilon", "calibrate", "log"),
    "plan": ("report", "plan", "init"),
    "pictures": ("curve", "explore", "sweep", "plot"),
    "data": ("data",),
    "train": ("train", "tune", "predict"),
    "book": ("book",),
    "audit": ("audit",),
}
# Commands with actions; each action has a class of the same name.
ACTIONS = {"book": ("create", "charge", "show", "close"), "data": ("import", "check")}
_CONFIG = (tyro.conf.FlagCreatePairsOff,)
_HELP = f"""usage: {PROGRAM} [--help] [--version] COMMAND ...

Privacy accounting for episodic training, and training itself. Examples of files are
in configs/; {PROGRAM} COMMAND --help lists the options of a command.

commands:
"""
# How an option's annotation begins -> its type as messages name it.
_KINDS = {
    "Number": "a number",
    "Floats": "a number",
    "Whole": "a whole number",
    "Ints": "a whole number",
    "int": "a whole number",
    "Annotated[tuple[float": "numbers",
    "Annotated[tuple[int": "whole numbers",
}


def main() -> None:
    """Entry point of the installed command; never returns."""
    keep_compiled_kernels()
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt as end:
        # XLA's threads continue to compile. An ordinary exit beside them ends in a
        # segmentation fault.
        end_process(TERMINATED if isinstance(end, Terminated) else INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command line without the program's name; returns the exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_HELP + _listed(COMMANDS.items()))
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
      SystemExit: the help was printed (code 0), or the arguments are wrong.
    """
    name, *rest = arguments or [""]
    if name.startswith("--tyro-"):  # completions of a shell
        every = {name: _every(name) for name in COMMANDS}
        return tyro.extras.subcommand_cli_from_dict(
            every, prog=PROGRAM, args=arguments, config=_CONFIG
        )
    _check_word("command", name, COMMANDS, "")
    path, about = name, COMMANDS[name]
    if name in ACTIONS:
        action, *rest = rest or [""]
        if action in ("-h", "--help"):
            rows = ((one, str(_class(name, one).__doc__)) for one in ACTIONS[name])
            usage = (
                f"usage: {PROGRAM} {name} [--help] ACTION ...\n\n{about}\n\nactions:\n"
            )
            print(usage + _listed((one, doc.partition("\n")[0]) for one, doc in rows))
            raise SystemExit(0)
        _check_word(f"action of {name}", action, ACTIONS[name], f" {name}")
        path, command = f"{name} {action}", _class(name, action)
        about = inspect.cleandoc(str(command.__doc__))
    else:
        command = _class(name, name)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                command,
                prog=f"{PROGRAM} {path}",
                description=about,
                args=rest,
                config=_CONFIG,
            )
    except SystemExit as end:
        if end.code:
            message = _message(command, rest, errors.getvalue())
            print_error(f"{message} (see {PROGRAM} {path} --help)")
            raise SystemExit(USER_ERROR) from None
        raise


def _check_word(what: str, word: str, known: Iterable[str], path: str) -> None:
    """Refuses a word that is not one of the known ones."""
    if word in known:
        return
    message = f"no {what} was given"
    if word:
        message = f"unknown {what} {word!r}{_validation.nearest(word, known)}"
    print_error(f"{message} (see {PROGRAM}{path} --help)")
    raise SystemExit(USER_ERROR)


def _class(name: str, action: str) -> type:
    module = next(module for module, names in _MODULES.items() if name in names)
    home = importlib.import_module(f"jaxdp_episodic.tools.cli.{module}")
    return getattr(home, action.capitalize())


def _every(name: str) -> Any:
    """A command's class, or the union of its actions."""
    if name not in ACTIONS:
        return _class(name, name)
    kinds: Any = (
        Annotated[_class(name, one), tyro.conf.subcommand(one)] for one in ACTIONS[name]
    )
    return functools.reduce(lambda one, other: Union[one, other], kinds)  # noqa: UP007


def _listed(rows: Iterable[tuple[str, str]]) -> str:
    """One entry per name and description, wrapped to lines of 88 characters."""
    fold = functools.partial(textwrap.fill, width=88, subsequent_indent=13 * " ")
    return "\n".join(fold(t, initial_indent=f"  {name:<11}") for name, t in rows)


def _message(command: type, arguments: Sequence[str], box: str) -> str:
    """What is wrong with the arguments: tyro's message, with the option's value."""
    fields = {
        f"--{one.name.replace('_', '-')}": one for one in dataclasses.fields(command)
    }
    words = [word.partition("=")[0].replace("_", "-") for word in arguments]
    for word in words:
        if word.startswith("--") and word not in fields:
            return f"unknown option {word!r}{_validation.nearest(word, fields)}"
    text = " ".join(re.sub("[│─╭╮╰╯]|-{3,}", " ", box).split())
    text = text.partition(" For full helptext")[0].partition(" Argument helptext")[0]
    if found := re.search(r"Missing from [^:]*: (.*)", text):
        parts = found[1].split("(required)")[:-1]
        names = (re.match(r"(--\S+ )?\S+", part.strip()) for part in parts)
        return f"missing: {', '.join(name[0] for name in names if name)}"
    if found := re.search(r"Unrecognized options: (.*)", text):
        return f"unexpected argument {found[1]!r}"
    if found := re.search(r"(?:Error parsing|argument) '?(--[\w-]+)", text):
        option, place = found[1], words.index(found[1])
        own, after = arguments[place].partition("=")[2], arguments[place + 1 :]
        if not (own or after) or "Missing value" in text:
            return f"{option} needs a value"
        value, kind = own or after[0], str(fields[option].type)
        if choices := re.search(r"one of \((.*)\)", text):
            names = sorted(set(re.findall(r"'([\w-]+)'", choices[1])) - {"None"})
            close = _validation.nearest(value, names)
            return f"{option} must be one of {', '.join(names)}, got {value!r}{close}"
        for start, in_words in _KINDS.items():
            if kind.startswith(start):
                return f"{option} must be {in_words}, got {value!r}"
    return text

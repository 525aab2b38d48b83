"""What all commands share: their options, how they end, and what they print."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from jaxdp_episodic.tools.cli.process import PROGRAM, Terminated, ended_by_sigterm

# Exit codes: the last two are 128 and the signal's number, as shells have it.
USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
_MAX_MESSAGE = 2000  # letters of an error, so that it fits a screen
_MAX_WORD = 300  # letters of one word of it, which a file may have made
USER_ERRORS = (
    OSError,
    TypeError,
    ValueError,
    NotImplementedError,
    MemoryError,
    ImportError,  # an extra that is not installed
)
COMPUTING = "computing (the first question of a kind compiles)"


def option(metavar: str, *, may_lack: bool = False) -> Any:
    """Returns how the help shows an option; its text says what a missing one means."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="" if may_lack else None)


# Arguments that many commands have.
TomlFile = Annotated[tyro.conf.Positional[Path], option("FILE.toml")]
Folder = Annotated[Path, option("DIR")]
# Options that may be left out. Not `X | None`, which tyro checks with a module whose
# import takes a tenth of a second.
Number = Annotated[Union[float, None], option("FLOAT", may_lack=True)]  # noqa: UP007
Whole = Annotated[Union[int, None], option("INT", may_lack=True)]  # noqa: UP007
Name = Annotated[Union[str, None], option("NAME", may_lack=True)]  # noqa: UP007
File = Annotated[Union[Path, None], option("FILE", may_lack=True)]  # noqa: UP007
Names = Annotated[tuple[str, ...], option("NAME ...", may_lack=True)]
Ints = Annotated[int, option("INT")]
Floats = Annotated[float, option("FLOAT")]
# Texts, one each time it is given; of a tuple of paths the same module checks each.
Files = Annotated[tuple, tyro.conf.UseAppendAction, option("FILE")]


class UsageError(ValueError):
    """Options that do not go together: the error names no file."""


class Command:
    """A command: a dataclass of its options, and `_lines`, which does the work."""

    _code = 0  # exit code where nothing went wrong
    _has_warnings = True  # what the library warns of is printed below the lines
    _has_signals = True  # SIGTERM ends it as Ctrl-C does

    def _lines(self) -> list[str]:
        """Does the work, and returns the lines to print."""
        raise NotImplementedError

    def _subject(self) -> Any:
        """What errors are about: the first argument, a file."""
        return next(iter(vars(self).values()))

    def _left(self) -> str | None:
        """What an interruption has left; None: `main` ends the process."""
        return None

    def run(self) -> int:
        """Does the work and prints the outcome; an interruption may be raised."""
        signals = ended_by_sigterm() if self._has_signals else contextlib.nullcontext()
        try:
            with signals, noted() if self._has_warnings else empty() as said:
                lines = self._lines()
        except USER_ERRORS as error:
            subject = "" if isinstance(error, UsageError) else str(self._subject())
            text = reason(error, subject)
            complain(text if text.startswith(subject) else f"{subject}: {text}")
            return USER_ERROR
        except KeyboardInterrupt as end:
            if (left := self._left()) is None:
                raise
            is_terminated = isinstance(end, Terminated)
            complain(f"{'terminated' if is_terminated else 'interrupted'}{left}")
            return TERMINATED if is_terminated else INTERRUPTED
        if lines := [*lines, *(f"warning: {text}" for text in said)]:
            print(printable("\n".join(lines), keep="\n"))
        return self._code


@contextlib.contextmanager
def empty() -> Iterator[list[str]]:
    """Yields an empty list."""
    yield []


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Yields a list that holds, after the body, what the library warned of in it."""
    said: list[str] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield said
    jax = sys.modules.get("jax")  # without it none of them are JAX's
    home = None if jax is None else Path(str(jax.__file__)).parent
    ours = [w for w in caught if not home or not Path(w.filename).is_relative_to(home)]
    said += dict.fromkeys(str(w.message) for w in ours)


def complain(message: str) -> None:
    """Prints an error on standard error, in one line that fits a screen."""
    # An untrusted file may be quoted: a long name must not hide what is said of it.
    half = _MAX_WORD // 2
    message = " ".join(
        word if len(word) <= _MAX_WORD else f"{word[:half]}...{word[-half:]}"
        for word in message.split(" ")
    )
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 3] + "..."
    print(f"{PROGRAM}: error: {printable(message)}", file=sys.stderr)


def reason(error: BaseException, subject: str = "") -> str:
    """Returns what went wrong, in one line; ``subject`` is the command's own file."""
    if isinstance(error, OSError) and error.strerror:
        is_other = error.filename and str(error.filename) != subject
        return error.strerror + (f": {error.filename}" if is_other else "")
    if isinstance(error, MemoryError):
        return f"the grid does not fit into memory: {error}"
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def waiting(what: str = COMPUTING) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is under way, and for how long already."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    # Imported only where it is seen.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text, console = TextColumn("{task.description}", markup=False), Console(stderr=True)
    with Progress(
        *(SpinnerColumn(), text, TimeElapsedColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def printable(text: str, keep: str = "") -> str:
    """Returns the text with control characters escaped: names may be untrusted."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in text
    )


def aligned(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Returns rows of cells as lines of equal columns, ``left`` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def facts(
    rows: dict[str, str] | Sequence[tuple[str, str]], width: int = 0
) -> list[str]:
    """Returns a line for each name and what is said of it."""
    pairs = list(rows.items()) if isinstance(rows, dict) else rows
    width = width or max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {text}" for name, text in pairs]

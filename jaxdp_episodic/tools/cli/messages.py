"""How a command speaks: errors in one line, text that is safe on a terminal."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from jaxdp_episodic.tools.cli.process import PROGRAM, Terminated

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


def option(metavar: str) -> Any:
    """Returns what stands for an option's value in the help."""
    return tyro.conf.arg(metavar=metavar)


# The argument of every command that reads a file.
TomlFile = Annotated[tyro.conf.Positional[Path], option("FILE.toml")]
# Options that may be left out. Not `X | None`, which tyro checks with a module whose
# import takes a tenth of a second.
Number = Annotated[Union[float, None], option("FLOAT")]  # noqa: UP007
Whole = Annotated[Union[int, None], option("INT")]  # noqa: UP007
Name = Annotated[Union[str, None], option("NAME")]  # noqa: UP007
File = Annotated[Union[Path, None], option("FILE")]  # noqa: UP007
# Texts, one each time it is given; of a tuple of paths the same module checks each.
Files = Annotated[tuple, tyro.conf.UseAppendAction, option("FILE")]


def reported(
    file: Path,
    act: Callable[[], list[str]],
    *,
    interrupted: Callable[[], str] | str | None = None,
    says_warnings: bool = False,
) -> int:
    """Runs a command's work, and says what came of it or went wrong.

    Args:
      file: that the command was given, for errors.
      act: does the work, and returns the lines to print.
      interrupted: says what an interruption has left; None: `main` ends the process.
      says_warnings: print what the library warns of below the lines.

    Returns:
      The exit code.
    """
    catcher = warnings.catch_warnings(record=True, action="always")
    try:
        with catcher if says_warnings else contextlib.nullcontext() as caught:
            lines = act()
    except USER_ERRORS as error:
        said = reason(error, file)
        complain(said if said.startswith(str(file)) else f"{file}: {said}")
        return USER_ERROR
    except KeyboardInterrupt as end:
        if interrupted is None:
            raise
        terminated = isinstance(end, Terminated)
        left = interrupted if isinstance(interrupted, str) else interrupted()
        complain(f"{'terminated' if terminated else 'interrupted'}{left}")
        return TERMINATED if terminated else INTERRUPTED
    lines += [f"warning: {text}" for text in warnings_of(caught or [])]
    if lines:
        print(printable("\n".join(lines), keep="\n"))
    return 0


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


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is under way, and for how long already.

    Yields a function that changes the text. The line is on standard error and goes when
    the work is done; where there is no terminal nothing is shown.
    """
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


def reason(error: BaseException, file: Path) -> str:
    """Returns what went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        other = error.filename and Path(error.filename) != file
        return error.strerror + (f": {error.filename}" if other else "")
    if isinstance(error, MemoryError):
        return f"the grid does not fit into memory: {error}"
    return " ".join(str(error).split()) or type(error).__name__


def warnings_of(caught: list[warnings.WarningMessage]) -> list[str]:
    """Returns what the library warned of.

    JAX's own warnings (of a damaged cache entry) concern nobody.
    """
    jax = sys.modules.get("jax")  # without it none of them are JAX's
    home = None if jax is None else Path(str(jax.__file__)).parent
    ours = [w for w in caught if not home or not Path(w.filename).is_relative_to(home)]
    return list(dict.fromkeys(str(w.message) for w in ours))

"""How a command speaks: errors in one line, text that is safe on a terminal."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PROGRAM = "jaxdp-episodic"
USER_ERROR, INTERRUPTED, TERMINATED = 2, 130, 143
_LONGEST = 2000
USER_ERRORS = (
    OSError,
    TypeError,
    ValueError,
    NotImplementedError,
    MemoryError,
    ImportError,  # an extra that is not installed
)

# The argument of every command that reads a file.
TomlFile = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE.toml")]


def complain(message: str) -> None:
    """Prints an error on standard error, in one line that fits a screen."""
    if len(message) > _LONGEST:
        message = message[: _LONGEST - 3] + "..."  # a stranger's file may be quoted
    print(f"{PROGRAM}: error: {printable(message)}", file=sys.stderr)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is under way, and for how long already.

    Yields a function that changes the text. The line is on standard error and goes when
    the work is done; where there is no terminal nothing is shown.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def printable(text: str, keep: str = "") -> str:
    """Returns the text with control characters escaped: a stranger may choose names."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in text
    )


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
    home = Path(jax.__file__).parent
    ours = [w for w in caught if not Path(w.filename).is_relative_to(home)]
    return list(dict.fromkeys(str(w.message) for w in ours))

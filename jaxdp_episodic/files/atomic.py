"""Files that are there whole or not at all, even if the power fails."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: nothing there locks a file for as long as we live
    fcntl = None

# Between a file's name and a random word, in the name of what is not finished.
TEMPORARY = ".tmp-"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file by a temporary one in the same folder, which is then renamed.

    Args:
      path: of the file; replaced if it is there.
      write: is given the open temporary file.

    Raises:
      OSError: the disk is full or the folder cannot be written; ``path`` is as it was.
    """
    with atomic_path(path) as temporary, temporary.open("xb") as file:
        write(file)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives a temporary path, which becomes ``path`` if the body succeeds.

    Raises:
      OSError: see `write_atomically`.
    """
    temporary = path.with_name(path.name + TEMPORARY + secrets.token_hex(6))
    try:
        yield temporary
        _sync(temporary, os.O_RDWR)
        temporary.replace(path)
    except BaseException:
        # A full disk may refuse even this; what is left is never read.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if os.name != "nt":  # Windows does not open folders
        _sync(path.parent, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_locked_by_us(descriptor: int) -> bool:
    """Locks a file for as long as it is open; False if another process has it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

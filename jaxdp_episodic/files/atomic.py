"""Files written completely or not at all, and folders locked by one process."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows has no lock that lasts exactly as long as its process
    fcntl = None

# In the name of a temporary file, between its final name and a random suffix.
TEMPORARY = ".tmp-"
LOCK = ".lock"
_BINARY = getattr(os, "O_BINARY", 0)


def write_atomically(
    path: Path, content: str | bytes, *, is_private: bool = False
) -> None:
    """Writes a file as a temporary file in the same folder, then renames it."""
    with atomic_file(path, is_private=is_private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """Yields a temporary file that becomes ``path`` if the body succeeds."""
    opener = owner_only if is_private else None
    with atomic_path(path) as temporary, open(temporary, "xb", opener=opener) as file:
        yield file


def owner_only(path: str, flags: int) -> int:
    """Opens a file that only its owner can read; an opener for `open`."""
    return os.open(path, flags | _BINARY, 0o600)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path that is renamed to ``path`` if the body succeeds."""
    temporary = path.with_name(path.name + TEMPORARY + secrets.token_hex(6))
    try:
        yield temporary
        _sync(temporary, os.O_RDWR)
        temporary.replace(path)
    except BaseException:
        # A full disk may refuse even this; leftovers are never read.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces ``path`` if the body succeeds.

    Files of an existing folder that the new one lacks are copied into it.
    """
    word = secrets.token_hex(6)
    new, old = (
        path.with_name(f"{path.name}{TEMPORARY}{x}{word}") for x in ("", "old-")
    )
    new.mkdir(parents=True)
    try:
        yield new
        for file in new.iterdir():
            _sync(file, os.O_RDWR)
        sync_folder(new)
        if path.exists():
            for other in path.iterdir():
                if not (new / other.name).exists():
                    copy = shutil.copytree if other.is_dir() else shutil.copy2
                    copy(other, new / other.name)
            path.rename(old)
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Flushes a folder, and everything below it, to disk."""
    for path in folder.rglob("*"):
        sync_folder(path) if path.is_dir() else _sync(path, os.O_RDWR)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to disk."""
    if os.name != "nt":  # Windows does not open folders
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates a folder, and locks it against other processes and threads."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode("ascii", "replace") or "unknown"
            whose = "this" if owner == str(os.getpid()) else "another"
            message = f"{folder} is in use by {whose} process ({owner})"
            raise BlockingIOError(message) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)  # releases the lock

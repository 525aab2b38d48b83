"""SQLite databases of unknown origin: opened with safe settings, and checked."""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# SQLite errors caused by the system, not by the file.
_SYSTEM = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_AUTH: errno.EACCES,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    # Shared memory does not fit: the disk is full.
    sqlite3.SQLITE_IOERR_SHMSIZE: errno.ENOSPC,
}
_PAGE_SIZES = tuple(2**i for i in range(9, 17))
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@contextmanager
def refusing(path: Path, damaged: type[ValueError]) -> Iterator[None]:
    """Turns SQLite's errors into an OSError, or ``damaged`` for a damaged file."""
    try:
        yield
    except sqlite3.Error as error:
        whole = getattr(error, "sqlite_errorcode", 0)
        code = whole if whole in _SYSTEM else whole & 0xFF
        if code in _BUSY:
            raise BlockingIOError(f"{path} is in use by another process") from None
        if code in _SYSTEM:
            system = _SYSTEM[code]
            why = os.strerror(system) if code > 0xFF else error
            message = f"{path} cannot be read or written: {why}"
            raise OSError(system, message) from None
        raise damaged(f"{path} is damaged: {error}") from None
    except UnicodeDecodeError as error:
        raise damaged(f"{path} is damaged: {error}") from None


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Returns a connection to a file of unknown origin; mode "ro" or "rw"."""
    db = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=60.0,
        check_same_thread=False,
    )
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "temp_store = 2"):
        db.execute(f"PRAGMA {pragma}")
    return db


def refuse_lost_commits(path: Path) -> None:
    """Raises if a write-ahead log has an intact commit after a damaged frame."""
    # SQLite stops reading at the first frame with a wrong checksum. A crash leaves no
    # commit after such a frame. Format: sqlite.org/fileformat2.html, section 4.
    log = path.with_name(path.name + "-wal")
    for tries_left in (2, 1, 0):  # another process may be writing it
        found = _lost_commit(log)
        if not found:
            return
        if tries_left:
            time.sleep(0.1)
    raise ValueError(f"{log} is damaged: {found}")


def _lost_commit(log: Path) -> str:
    with suppress(FileNotFoundError), log.open("rb") as file:
        head = file.read(32)
        if len(head) < 32 or not any(head):
            return ""
        magic, _, size = struct.unpack(">3I", head[:12])
        order, sums = "<>"[magic & 1], struct.unpack(">2I", head[24:])
        is_known = magic in (0x377F0682, 0x377F0683) and size in _PAGE_SIZES
        if not is_known or _sums(order, head[:24], (0, 0)) != sums:
            return "its header has changed"
        is_broken = False
        while len(frame := file.read(24 + size)) == 24 + size:
            before, sums = sums, struct.unpack(">2I", frame[16:24])
            fits = frame[8:16] == head[16:24]  # not left from an older log
            fits = fits and _sums(order, frame[:8] + frame[24:], before) == sums
            if is_broken and fits and any(frame[4:8]):
                return "a frame before its last commit has changed"
            is_broken |= not fits
    return ""


def _sums(order: str, data: bytes, before: tuple[int, ...]) -> tuple[int, int]:
    """Returns SQLite's checksums of some bytes, continued from those before."""
    first, second = before
    for one, other in struct.iter_unpack(f"{order}2I", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second

"""SQLite databases of unknown origin: opened with safe settings, and checked."""

from __future__ import annotations

import errno
import functools
import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

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
_FRAMES_AT_ONCE = 1024  # of a write-ahead log, checked together
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
    try:
        file = open(log, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return ""
    with file:
        head = file.read(32)
        if len(head) < 32 or not any(head):
            return ""
        magic, _, size = struct.unpack(">3I", head[:12])
        if magic not in (0x377F0682, 0x377F0683) or size not in _PAGE_SIZES:
            return "its header has changed"
        order = np.dtype(">u4" if magic & 1 else "<u4")
        sums = _sums(np.frombuffer(head[:24], order)[None], np.zeros((1, 2), np.uint64))
        if sums.tolist() != [_big(head[24:])]:
            return "its header has changed"
        last, is_broken = np.array([_big(head[24:])], np.uint64), False
        while len(data := file.read((24 + size) * _FRAMES_AT_ONCE)) >= 24 + size:
            whole = len(data) // (24 + size) * (24 + size)
            frames = np.frombuffer(data[:whole], np.uint8).reshape(-1, 24 + size)
            words = np.concatenate([frames[:, :8], frames[:, 24:]], axis=1)
            ends = frames[:, 16:24].copy().view(">u4").astype(np.uint64)
            before = np.concatenate([last, ends])[:-1]
            own = (frames[:, 8:16] == np.frombuffer(head[16:24], np.uint8)).all(axis=1)
            fits = (_sums(words.view(order), before) == ends).all(axis=1)
            commits = own & fits & frames[:, 4:8].any(axis=1)
            broken = np.logical_or.accumulate(
                np.concatenate([[is_broken], ~(own & fits)])
            )
            if np.any(commits & broken[:-1]):
                return "a frame before its last commit has changed"
            is_broken, last = bool(broken[-1]), np.concatenate([last, ends])[-1:]
    return ""


def _big(data: bytes) -> list[int]:
    return list(struct.unpack(f">{len(data) // 4}I", data))


def _sums(words: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Returns SQLite's checksums of rows of words, each continuing from ``before``."""
    own, carried = _weights(words.shape[1] // 2)
    pairs = words.astype(np.uint64).reshape(len(words), -1)
    # uint64 arithmetic is modulo 2^64, a multiple of 2^32.
    return (pairs @ own + before @ carried) & np.uint64(0xFFFFFFFF)


@functools.lru_cache(maxsize=4)
def _weights(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of 2 n words, and of the sums before, in a row's two sums."""
    power, powers = [[1, 0], [0, 1]], []
    for _ in range(number + 1):
        powers.append(power)
        (a, b), (c, d) = power
        power = [[(a + b) % 2**32, (a + 2 * b) % 2**32] for a, b in ((a, b), (c, d))]
    # Row i of powers[k]: the effect of unit i of the two sums after k pairs.
    found = np.array(powers, np.uint64)
    first = found[number - 1 :: -1, 0] + found[number - 1 :: -1, 1]
    own = np.stack([first, found[number - 1 :: -1, 1]], axis=1)
    return own.reshape(-1, 2), found[number]

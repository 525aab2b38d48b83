"""The journal of releases: what each step let out, on the disk before it has effects.

A run that was killed goes on with its last checkpoint and these releases, which go
through the optimizer again: everything that follows from them is post-processing. No
private record is looked at, and no step that was released is taken twice, whatever has
changed in code, versions or machine. What was charged and is not here was never
released.

A file of records: ``step, base, length`` (little-endian 64-bit numbers), 8 bytes that
say which run's, 8 bytes of a hash of these, ``length`` bytes, and the SHA-256 of all of
this behind the hash before it; the first stands on the name of the run. It is emptied
when a checkpoint contains what is in it, and ``base`` is the step of that checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxdp_episodic.files.atomic import owner_only, sync_folder

MOST_BYTES = 2**28
"""Bytes of a journal above which a checkpoint is due, so that it is emptied."""

_HEAD = struct.Struct("<QQQ8s")
# Bytes of the hash of a run's name, in the head.
_RUN_BYTES = 8
# Bytes of a record's head with its own hash, and of the hash at its end.
_CHECK_BYTES = 8
_HEAD_BYTES = _HEAD.size + _CHECK_BYTES
_HASH_BYTES = 32


class Release(NamedTuple):
    """One record."""

    step: int  # its number
    base: int  # step of the checkpoint on which the journal stands
    data: bytes  # what was released; see `as_bytes`


class JournalError(ValueError):
    """A journal that is damaged, or another run's; the message says where."""


class Journal:
    """The open journal of a run; a context manager.

    Its folder is held by one process, and this file with it.

    Args:
      path: made if missing, readable by its owner only.
      run: random name of the run, as in its ledger.

    Attributes:
      path: as given.
      run: as given.

    Raises:
      JournalError: see `releases`.
      OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self._first = hashlib.sha256(b"jaxdp-episodic journal 2 " + run.encode())
        self._chain = self._first.digest()
        self._last = self._size = self._base = 0
        is_new = not path.exists()
        self._file = open(path, "a+b", buffering=0, opener=owner_only)  # noqa: SIM115
        try:
            if is_new:
                sync_folder(path.parent)
            for release, end, chain in _records(self._file, path, self._chain):
                self._last, self._size, self._chain = release.step, end, chain
                self._base = release.base
            os.ftruncate(self._file.fileno(), self._size)  # what a crash cut off
        except BaseException:
            self._file.close()
            raise

    @property
    def is_full(self) -> bool:
        """Whether a checkpoint is due for the journal's size."""
        return self._size >= MOST_BYTES

    def append(self, step: int, data: bytes) -> None:
        """Appends a release; when this returns it is on the disk.

        Raises:
          OSError: the disk is full. The step must have no effects: it is lost.
        """
        head = _head(step, self._base, len(data), self._first.digest()[:_RUN_BYTES])
        chain = hashlib.sha256(self._chain + head + data).digest()
        # Of a write that failed, or was interrupted, nothing stays.
        os.ftruncate(self._file.fileno(), self._size)
        for part in (head, data, chain):
            rest = memoryview(part)
            while rest:
                rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())
        self._chain, self._last = chain, step
        self._size += len(head) + len(data) + _HASH_BYTES

    def cut(self, through: int) -> None:
        """Empties the journal, if a checkpoint of step ``through`` contains all of it.

        Else it stays as it is: whoever reads it passes over what the checkpoint has.
        """
        if self._last > through:
            return
        if self._size:
            os.ftruncate(self._file.fileno(), 0)
            os.fsync(self._file.fileno())
        self._size, self._last, self._chain = 0, 0, self._first.digest()
        self._base = through

    def releases(self, after: int) -> Iterator[Release]:
        """Yields the releases of later steps than this, in order."""
        for release, *_ in _records(self._file, self.path, self._first.digest()):
            if release.step > after:
                yield release

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _records(
    file: Any, path: Path, chain: bytes
) -> Iterator[tuple[Release, int, bytes]]:
    """Yields the whole records of a journal, the place behind each, and its hash.

    What a crash cut off ends it: a last record that is too short, or whose bytes never
    reached the disk.

    Raises:
      JournalError: a record in the middle with another hash, or one of another run.
    """
    file.seek(0, os.SEEK_END)
    size, end, last, run = file.tell(), 0, 0, chain[:_RUN_BYTES]
    while end + _HEAD_BYTES <= size:
        file.seek(end)
        head = _read(file, _HEAD_BYTES)
        step, base, length, of_run = _HEAD.unpack(head[: _HEAD.size])
        after = end + _HEAD_BYTES + length + _HASH_BYTES
        if head != _head(step, base, length, of_run):
            if not any(head) and not any(_read(file, size - end - _HEAD_BYTES)):
                return  # the file had grown, and nothing else
            raise _damaged(path, end)
        if of_run != run:  # whole, so no write that was cut off
            raise JournalError(
                f"journal {path}: the record at byte {end:,}, of step {step}, is of "
                "another run; put this run's journal back, or without the file it goes "
                "on behind all that was charged"
            )
        if after > size:
            return
        data = _read(file, length)
        chain = hashlib.sha256(chain + head + data).digest()
        if _read(file, _HASH_BYTES) != chain or step <= last:
            if after == size:
                return
            raise _damaged(path, end)
        yield Release(step, base, data), after, chain
        end, last = after, step


def _head(step: int, base: int, length: int, run: bytes) -> bytes:
    """The head of a record, with its hash."""
    numbers = _HEAD.pack(step, base, length, run)
    return numbers + hashlib.sha256(numbers).digest()[:_CHECK_BYTES]


def _read(file: Any, length: int) -> bytes:
    """So many bytes, of which a call of the system may give fewer."""
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _damaged(path: Path, place: int) -> JournalError:
    return JournalError(
        f"journal {path}: the record at byte {place:,} is damaged, or of another "
        "version of this package, which can go on with it; without the file the run "
        "goes on behind all that was charged"
    )


def as_bytes(tree: Any) -> bytes:
    """Returns the arrays of a pytree, one after the other, as NumPy stores them."""
    file = io.BytesIO()
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        np.lib.format.write_array(file, np.asarray(leaf), allow_pickle=False)
    return file.getvalue()


def from_bytes(release: Release, like: Any) -> Any:
    """Returns the pytree whose `as_bytes` were released.

    Args:
      release: a record.
      like: pytree of arrays, or of their shapes and types; None for one array of any.

    Raises:
      JournalError: other shapes or types.
    """
    file, (leaves, structure) = io.BytesIO(release.data), jax.tree.flatten(like)
    arrays = []
    while file.tell() < len(release.data):
        arrays.append(np.lib.format.read_array(file, allow_pickle=False))
    if like is None:
        return arrays[0]
    found, wanted = (
        [f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in some]
        for some in (arrays, leaves)
    )
    if found != wanted:
        raise JournalError(
            f"step {release.step} released arrays of another model than this one: "
            f"{', '.join(found)}, for {', '.join(wanted)}; resume with the run's"
        )
    return jax.tree.unflatten(structure, arrays)

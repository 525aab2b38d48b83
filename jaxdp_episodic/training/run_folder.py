"""The folder of a run: whether one is in it, and that one process writes to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from jaxdp_episodic.report.ledger_file import has_charges

try:
    import fcntl
except ImportError:  # Windows: nothing there locks a file for as long as we live
    fcntl = None

LOG, CHECKPOINTS, LEDGER, LOCK = "log.jsonl", "checkpoints", "ledger.jsonl", ".lock"

_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


def files_of_a_run(folder: Path) -> list[str]:
    """Returns which of a run's files are in a folder.

    What an interrupted start leaves (an empty log, a checkpoint that was never
    completed, a ledger without a charge) is no run.
    """
    log, checkpoints = folder / LOG, folder / CHECKPOINTS
    found = [LOG] if log.exists() and log.stat().st_size else []
    if checkpoints.is_dir() and any(p.name.isdigit() for p in checkpoints.iterdir()):
        found.append(CHECKPOINTS)
    if has_charges(folder / LEDGER):
        found.append(LEDGER)
    return found


def refuse_other_files(folder: Path) -> None:
    """Refuses a folder in which a new run would mix with an older one.

    Raises:
      NotADirectoryError: no folder.
      FileExistsError: it holds a log, a complete checkpoint or a ledger with charges.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    found = files_of_a_run(folder)
    if found:
        raise FileExistsError(
            f"{folder} holds a run; resume it, or name another folder "
            f"({' and '.join(found)} would be mixed with the new run's)"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes and threads from training in a folder, which is made.

    The lock goes with the process, however that ends; the file stays. Whoever holds it
    may take it again further down its own calls.

    Raises:
      BlockingIOError: another run is training there; the message has its process id.
      OSError: a folder that cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve()
    if fcntl is None or place in _held.get():
        yield
        return
    descriptor = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode("ascii", "replace") or "unknown"
            raise BlockingIOError(
                f"{folder} is in use: another run (process {owner}) is training there"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        token = _held.set(_held.get() | {place})
        try:
            yield
        finally:
            _held.reset(token)
    finally:
        os.close(descriptor)  # which releases it

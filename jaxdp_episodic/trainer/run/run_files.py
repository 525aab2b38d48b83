"""The lock on a run's folder, and the log in the run's file.

Each record of the log has public values (step, epsilon, clip norm: functions of
settings and releases) and private parts, which `releasable_records` leaves out:

* ``"private"``: computed from training data without noise; nothing in the run depends
  on it
* ``"held_out"``, ``"stages"``: scores on held-out people, whom epsilon does not cover
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic.accountant.report.ledger_file import (
    STATE,
    STORE,
    LedgerError,
    RunFile,
)
from jaxdp_episodic.files import atomic
from jaxdp_episodic.files.json_file import json_lines

_OLD = ("ledger.jsonl", "journal", "log.jsonl", "checkpoints")

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


def files_of_a_run(folder: Path) -> list[str]:
    """Returns which files in a folder belong to a run with a charge or a state."""
    found = [name for name in _OLD if _has_content(folder / name)]
    if not (folder / STORE).exists():
        return found
    try:
        with RunFile(folder / STORE) as file:
            is_begun = any(file.charges()) or any(file.texts(STATE))
    except LedgerError:
        is_begun = True  # it is damaged, but must not be overwritten
    return [STORE, *found] if is_begun else found


def _has_content(path: Path) -> bool:
    """Whether a file of version 0.2 holds more than the beginning of a run."""
    if path.name == "ledger.jsonl" and path.exists():
        return b"\n1" in path.read_bytes()
    if path.is_dir():
        return any(one.name.isdigit() for one in path.iterdir())
    return path.exists() and path.stat().st_size > 0


def was_only_begun(folder: Path) -> bool:
    """Returns whether a run in the folder ended before its first charge."""
    is_there = (folder / STORE).exists() or (folder / "ledger.jsonl").exists()
    return is_there and not files_of_a_run(folder)


def refuse_without_run(folder: Path) -> None:
    """Raises FileNotFoundError if a folder has no run with a state."""
    found = files_of_a_run(folder)
    if STORE in found or "checkpoints" in found:
        return
    there = "no run: begin one there, without resume"
    if found:
        files = " and ".join(found)
        there = f"only {files} of a run, which cannot go on: begin another"
    raise FileNotFoundError(f"no complete checkpoint in {folder}, which has {there}")


def refuse_other_files(folder: Path) -> None:
    """Refuses a folder in which a new run would mix with another."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    found = files_of_a_run(folder)
    if found:
        raise FileExistsError(
            f"{folder} holds a run; resume it, or name another folder "
            f"({' and '.join(found)} would be mixed with the new run's)"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Locks a folder, which is made if missing; BlockingIOError: a run holds it."""
    _refuse_if_open(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(atomic.locked(folder))
        except OSError as error:
            if error.errno in _NO_LOCKS:
                why = f"{folder} is on a file system without locks: name a local one"
                raise OSError(error.errno, why) from None
            raise
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder as `held` does; nested calls lock it once."""
    path, before = folder.resolve(), _held.get()
    if path in before:
        yield
        return
    with held(folder):
        try:
            _held.set(before | {path})
            yield
        finally:
            _held.set(before)


_open: set[Path] = set()  # folders of the runs that trainers of this process have open


@contextmanager
def alone(folder: Path) -> Iterator[Path]:
    """Yields the run's file; BlockingIOError: another trainer here has it open."""
    _refuse_if_open(folder)
    path = folder.resolve()
    try:
        _open.add(path)
        yield folder / STORE
    finally:
        _open.discard(path)


def _refuse_if_open(folder: Path) -> None:
    if folder.resolve() in _open:
        raise BlockingIOError(
            f"the run in {folder} is open in another trainer of this process: close "
            "that trainer, or wait for the end of its train"
        )


def refuse_within_a_step(lock: Any) -> None:
    """Refuses the thread that holds the lock of its trainer's steps."""
    try:
        threading.Condition(lock).notify()  # fails unless this thread holds the lock
    except RuntimeError:
        return
    raise RuntimeError(
        "what a step calls (learner, rule, score, optimizer) must not call step, "
        "train, resume, release or close of its trainer"
    )


PRIVATE = "private"
HELD_OUT = "held_out"
STAGES = "stages"


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a run's log.

    Args:
      path: the run's folder or file, or JSON lines as in a release, whose last line is
        ignored if it was cut off.

    Raises:
      OSError: a file that cannot be read.
      ValueError: a damaged file.
    """
    if path.suffix != ".jsonl":
        with RunFile(path / STORE if path.is_dir() else path) as file:
            return file.log()
    records, cut_off = [], None
    for _, record, _ in json_lines(path):
        if cut_off is not None or isinstance(record, TypeError):
            raise ValueError(f"{path}, {cut_off or record}")
        if isinstance(record, Exception):
            cut_off = record  # an interrupted write, if nothing follows
        else:
            records.append(record)
    return records


_NOT_PUBLIC = (PRIVATE, HELD_OUT, STAGES)


def releasable_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the public part of each record that has one."""
    public = map(public_record, records)
    return [record for record in public if record.keys() - {"step"}]


def public_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the public part of a record."""
    return {key: value for key, value in record.items() if key not in _NOT_PUBLIC}


class StepProgress(NamedTuple):
    """A logged step, as ``on_step`` receives it.

    Attributes:
      step: number of completed steps.
      num_steps: number of steps that the run takes.
      public: the step's public record, for trackers that others see. Empty if epsilons
        were computed from private sizes: then nothing is public before the release.
      private_record: the step's full record, with "private", "held_out" and "stages".
    """

    step: int
    num_steps: int
    public: Mapping[str, Any]
    private_record: Mapping[str, Any]

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of ``public`` except the step, as trackers take them."""
        found = {k: v for k, v in self.public.items() if isinstance(v, int | float)}
        return {name: float(v) for name, v in found.items() if name != "step"}

"""What a run leaves while it goes: its folder, and in it ledger, checkpoints and log.

Every record of the log has three compartments, and which one a number belongs to is
decided where it is computed:

* top level: public. Step, epsilon, the clip norm of the next step where it follows a
  quantile: functions of the settings and of what was released.
* ``"private"``: computed from private training data without noise (loss, gradient
  norms, realised batch sizes, and seconds, which grow with the realised batch). Nothing
  of it may be released, and nothing of it steers the run.
* ``"held_out"``: results on held-out people. The training did not see them, so its
  epsilon does not cover them: releasing such a number discloses *their* data.
* ``"stages"``: likewise, of each stage that could be released; once, at the end.

`releasable_records` leaves the last three out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxdp_episodic.accountant.report.ledger_file import has_charges
from jaxdp_episodic.files import atomic
from jaxdp_episodic.files.json_file import json_lines, plain

LOG = "log.jsonl"
CHECKPOINTS = "checkpoints"
LEDGER = "ledger.jsonl"
JOURNAL = "journal"
EPOCH = "epoch"
BEST = "best.npz"

_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


def files_of_a_run(folder: Path) -> list[str]:
    """Returns which of a run's files are in a folder.

    What an interrupted start leaves (an empty log, a checkpoint that was never
    completed, a ledger without a charge) is no run.
    """
    checkpoints = folder / CHECKPOINTS
    files = (folder / name for name in (LOG, JOURNAL))
    found = [file.name for file in files if file.exists() and file.stat().st_size]
    if checkpoints.is_dir() and any(p.name.isdigit() for p in checkpoints.iterdir()):
        found.append(CHECKPOINTS)
    if has_charges(folder / LEDGER):
        found.append(LEDGER)
    return found


def was_only_begun(folder: Path) -> bool:
    """Whether a folder has a ledger and no run: one that ended before any charge."""
    return (folder / LEDGER).exists() and not files_of_a_run(folder)


def refuse_without_checkpoint(folder: Path) -> None:
    """Refuses to go on in a folder without a complete checkpoint; says what is there.

    Raises:
      FileNotFoundError: it has none.
    """
    found = files_of_a_run(folder)
    if CHECKPOINTS in found:
        return
    there = "no run: begin one there, without resume"
    if found:
        there = (
            f"only {' and '.join(found)} of a run, which cannot go on: begin another"
        )
    raise FileNotFoundError(f"no complete checkpoint in {folder}, which has {there}")


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
    path = folder.resolve()
    if path in _held.get():
        yield
        return
    with atomic.locked(folder):
        token = _held.set(_held.get() | {path})
        try:
            yield
        finally:
            _held.reset(token)


PRIVATE = "private"
HELD_OUT = "held_out"
STAGES = "stages"


class RunLog:
    """Appends records to a file; one JSON object a line, readable by the owner only.

    Args:
      path: the file; made with its folders' permissions, mode 600.
      keep_through: on a resume, records of later steps than this are dropped: of
        steps whose release is not on the disk. None keeps all.

    Attributes:
      last: the last record that was there; None if there was none.
    """

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        self._path = path
        self.last: Mapping[str, Any] | None = None
        if path.exists() and keep_through is not None:
            self.last = _rewrite(path, keep_through)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record; numbers that JSON lacks become strings."""
        self._file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Makes what was written survive a power failure."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a log; a last line cut off by a crash is left out.

    Raises:
      OSError: a file that cannot be read.
      ValueError: a line, other than the last, that is no JSON object.
    """
    records, cut_off = [], None
    for _, record, _ in json_lines(path):
        if cut_off is not None or isinstance(record, TypeError):
            raise ValueError(f"{path}, {cut_off or record}")
        if isinstance(record, Exception):
            cut_off = record  # in the middle of a write, if nothing follows
        else:
            records.append(record)
    return records


_NOT_PUBLIC = (PRIVATE, HELD_OUT, STAGES)


def releasable_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records without what was computed from anybody's data in the clear.

    Records that hold nothing but a step number after that are left out.
    """
    public = map(public_record, records)
    return [record for record in public if record.keys() - {"step"}]


def public_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the top level of a record, without its other compartments."""
    return {key: value for key, value in record.items() if key not in _NOT_PUBLIC}


def _rewrite(path: Path, keep_through: int) -> Mapping[str, Any] | None:
    """Drops the records of later steps, atomically; returns the last one."""
    kept = [r for r in read_log(path) if r.get("step", 0) <= keep_through]
    text = "".join(json.dumps(record) + "\n" for record in kept)
    atomic.write_atomically(path, text, is_private=True)
    return kept[-1] if kept else None


class StepProgress(NamedTuple):
    """What ``on_step`` is told of a step that was logged.

    Attributes:
      step: steps taken and charged.
      num_steps: steps that the run takes.
      public: the step's record in the public log, which may go to a tracker that others
        see. Empty where the accounting rests on private sizes: nothing of the run is
        then public before its release, the number of its steps neither.
      private_record: its record in the full log, with epsilon, and by name what was
        computed from private data ("private") and from held-out people ("held_out",
        "stages").
    """

    step: int
    num_steps: int
    public: Mapping[str, Any]
    private_record: Mapping[str, Any]

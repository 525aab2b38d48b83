"""The writing end of a run's ledger: append, sync, and only then go on."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from jaxdp_episodic.describe.step import GaussianStep
from jaxdp_episodic.files.atomic import atomic_path
from jaxdp_episodic.report.ledger_file import (
    CHARGE,
    MOST_DESCRIBED,
    Chain,
    LedgerError,
    LedgerMark,
    header,
    scan,
)
from jaxdp_episodic.training.budget import PrivacyBudget

try:
    import fcntl
except ImportError:  # Windows: nothing there locks a file for as long as we live
    fcntl = None

# An edit in the middle is found at the next seal, also without a checkpoint.
_STEPS_A_SEAL = 1000
_BINARY = getattr(os, "O_BINARY", 0)


class LedgerFile:
    """A ledger on the disk, held by one process; a context manager that seals it.

    Args:
      path: of a ledger; see `create_ledger`.
      contains: a mark that it must contain, or None.

    Attributes:
      content: what it said when it was opened.
      charged: steps charged that are on the disk.

    Raises:
      FileNotFoundError: there is none.
      BlockingIOError: another process holds it.
      LedgerError: one that is not intact.
      OSError: a file that cannot be read or written.
    """

    def __init__(self, path: Path, *, contains: LedgerMark | None = None) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | _BINARY)
        try:
            self._lock()
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                self.content, self._chain = scan(file, path, contains)
            self.charged = self.content.end.charged
            self._is_sealed = self.content.is_sealed
            self._in_doubt = False
            self._finish_last_line()
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def mark(self) -> LedgerMark:
        """The ledger as it is known to be on the disk."""
        chain = self._chain
        run = self.content.end.run
        return LedgerMark(run, self.charged, chain.num_bytes, chain.sha256())

    def charge(self, number: int = 1) -> None:
        """Charges steps like the one last described; they are on the disk afterwards.

        Raises:
          OSError: they may be on the disk or not, and nothing more can be charged until
            the ledger is opened again; or the file is no longer ours.
        """
        before = self.charged
        self._append(CHARGE * number, charges=number)
        if before // _STEPS_A_SEAL != self.charged // _STEPS_A_SEAL:
            self.seal()

    def note_opening(self, environment: Mapping[str, Any]) -> None:
        """Notes that this process begins, and on what."""
        record = {"opened": dict(environment), "charged": self.charged}
        self._append(self._chain.line(record))
        self._is_sealed = False

    def seal(self) -> None:
        """Closes the chain over what was charged."""
        self._append(self._chain.line({"charged": self.charged}))
        self._is_sealed = True

    def close(self) -> None:
        """Seals the ledger, if it can be, and lets it go."""
        try:
            if not self._is_sealed and not self._in_doubt:
                with suppress(
                    OSError
                ):  # a full disk: every charge is there all the same
                    self.seal()
        finally:
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, data: bytes, charges: int = 0) -> None:
        """Appends whole lines; when this returns they are on the disk."""
        if self._in_doubt:
            raise OSError(
                f"ledger {self._path}: an earlier write failed, what is on the disk is "
                "not known; open it again"
            )
        # After a failed write or sync nobody knows what the disk holds, and a second
        # sync of the same data may succeed without writing it.
        self._in_doubt = True
        self._refuse_foreign_changes()
        try:
            self._write(data)
        except KeyboardInterrupt:
            # Nothing failed. The rest is written, so that the run can end in order.
            written = os.fstat(self._descriptor).st_size - self._chain.num_bytes
            self._write(data[written:])
            self._count(data, charges)
            raise
        self._count(data, charges)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        os.fsync(self._descriptor)

    def _count(self, data: bytes, charges: int) -> None:
        """Counts what is on the disk now."""
        self._chain.add(data)
        self.charged += charges
        self._is_sealed = self._is_sealed and not charges
        self._in_doubt = False

    def _refuse_foreign_changes(self) -> None:
        """Refuses to go on in a file that somebody else has written to or replaced."""
        ours = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(ours, there):
            raise FileNotFoundError(
                f"ledger {self._path} was removed or replaced while the run used it"
            )
        if ours.st_size != self._chain.num_bytes:
            raise LedgerError(
                f"ledger {self._path} was changed while the run used it: it has "
                f"{ours.st_size:,} bytes instead of {self._chain.num_bytes:,}"
            )

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"ledger {self._path} is in use: another process charges to it"
            ) from None

    def _finish_last_line(self) -> None:
        """Repairs what a crash cut off: a charge stays one, another line goes."""
        cut = self.content.unfinished
        if not cut:
            return
        os.ftruncate(self._descriptor, self._chain.num_bytes)
        if CHARGE.startswith(cut):
            self.charge()
        else:
            os.fsync(self._descriptor)


def create_ledger(path: Path, budget: PrivacyBudget, *, is_seeded: bool) -> None:
    """Makes the ledger of a new run: complete or not there, readable by its owner.

    Args:
      path: of the file; a ledger without charges that is there is replaced.
      budget: of the run.
      is_seeded: draws and noise come from a seed that somebody knows.

    Raises:
      OSError: it cannot be written.
      ValueError: a step that takes more than 64 MiB to describe.
    """
    chain = Chain()
    first = header(
        secrets.token_hex(16),
        epsilon=budget.epsilon,
        delta=budget.delta,
        is_seeded=is_seeded,
    )
    lines = [chain.line(first)]
    chain.add(lines[0])
    lines.append(_described(chain, budget.step))
    with atomic_path(path) as temporary:
        with open(temporary, "xb", opener=_owner_only) as file:
            file.writelines(lines)


def _described(chain: Chain, step: GaussianStep) -> bytes:
    line = chain.line({"step": step.to_dict()})
    if len(line) > MOST_DESCRIBED // 2:
        raise ValueError(
            f"the ledger cannot describe the step: {len(line):,} bytes, mostly its "
            f"population, of at most {MOST_DESCRIBED // 2:,}; state public bounds of "
            "the sizes in the sampling instead"
        )
    return line


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags | _BINARY, 0o600)

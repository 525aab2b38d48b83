"""What a run has been charged: counted, refused beyond the budget, and on the disk.

The contract, whatever ends a process at whatever moment:

    released steps <= charged steps <= released steps + one per crash

A charge is appended to the run's ledger, and on the disk, before the step's sum is
computed; nothing is charged ahead. A step that was charged and interrupted before its
release (see `journal`) is given up: taken again it would be another release. The format
is `report.ledger_file`'s.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
)
from jaxdp_episodic.accountant.report.ledger_content import LedgerContent, LedgerMark
from jaxdp_episodic.accountant.report.ledger_file import (
    ADAPTIVE,
    CHARGE,
    ENDED,
    MOST_DESCRIBED,
    OPTION,
    Chain,
    LedgerError,
    header,
    opening,
    read_ledger,
    scan,
)
from jaxdp_episodic.files.atomic import is_locked_by_us, write_atomically
from jaxdp_episodic.trainer.run.checkpoint import Snapshot

# Steps between two seals: an edit of the file is found at the next one at the latest.
_STEPS_A_SEAL = 1000
_BINARY = getattr(os, "O_BINARY", 0)  # Windows alone has text files


class Ledger:
    """Counts the steps that were charged and refuses the one too many.

    Within `writing_to` every charge is in a file before it counts; elsewhere it is in
    memory only.

    Args:
      budget: of the run.
      charged: steps charged before.
      mark: of the file in which they are.

    Attributes:
      charged: number of steps charged.
      mark: of the file that was last written to; None if there was none.
    """

    def __init__(
        self, budget: PrivacyBudget, *, charged: int = 0, mark: LedgerMark | None = None
    ) -> None:
        if not 0 <= charged <= budget.permitted_steps:
            raise ValueError(
                "charged must lie in 0 .. permitted_steps "
                f"({budget.permitted_steps}), got {charged}"
            )
        self._budget = budget
        self.charged = self._begun = charged
        self.mark = mark
        self._file: LedgerFile | None = None

    @property
    def most(self) -> int:
        """Steps that the target permits."""
        return self._budget.permitted_steps

    def charge(self) -> int:
        """Charges one step, before its result exists; returns the number charged.

        Raises:
          BudgetExhaustedError: the step would exceed the target. Nothing is charged.
          OSError: the ledger could not be written. The step must not be taken.
        """
        if self.charged >= self.most:
            raise BudgetExhaustedError(
                f"step {self.charged + 1} would exceed epsilon={self._budget.epsilon:g}"
                f" at delta={self._budget.delta:g}: {self.most} steps are permitted"
            )
        self._begun = self.charged + 1
        if self._file is not None:
            self._charge_next(self._file)
        self.charged = self._begun
        return self.charged

    @contextmanager
    def writing_to(
        self, file: LedgerFile, environment: Mapping[str, Any]
    ) -> Iterator[None]:
        """Charges to a file; steps that only we know of are charged there first.

        Args:
          file: of this run.
          environment: of this process; see `described_opening`.

        Raises:
          FileExistsError: steps are charged there that this run knows nothing of.
          LedgerError: the file describes other steps than the budget's.
          OSError: it cannot be written.
        """
        self.refuse_other(file.content)
        if file.charged > self._begun:
            raise FileExistsError(
                f"the run has gone on: {file.charged} steps are charged in its ledger, "
                f"this run is at step {self._begun}; resume it again"
            )
        # One more than we count is a charge that was interrupted, or failed.
        self.charged = self._begun = max(self.charged, file.charged)
        file.note_opening(environment)
        while self.charged > file.charged:
            self._charge_next(file)
        self._file = file
        try:
            yield
        finally:
            self._file, self.mark = None, file.mark

    def refuse_other(self, content: LedgerContent) -> None:
        """Refuses a ledger whose steps are not those of this run, in its order.

        Raises:
          LedgerError: such a one.
        """
        budget, found = self._budget, content.groups
        planned = budget.phases if budget.before else budget.phases[-1:]
        pairs = list(zip(found, planned, strict=False))
        same = len(pairs) == len(found) and all(
            ours == theirs for (ours, _), (theirs, _) in pairs
        )
        full = all(count == most for (_, count), (_, most) in pairs[:-1])
        if not (same and full) or content.planned != budget.planned:
            raise LedgerError(
                "the ledger is of another run: it charges other steps than this one "
                "takes (another sampling, noise, population, privacy unit or number of "
                "epochs)"
            )

    def after(self, content: LedgerContent, charged: int) -> Self:
        """Returns the ledger that goes on with a file."""
        return type(self)(self._budget, charged=charged, mark=content.end)

    def _charge_next(self, file: Any) -> None:
        """Charges the run's next step to a file; describes it first, if it is new."""
        phases, end = self._budget.phases, 0
        for index, (step, count) in enumerate(phases):
            end += count
            if file.charged < end or index == len(phases) - 1:
                if index >= file.num_described:
                    file.describe(step)
                break
        file.charge()


def taken_up(
    path: Path, snapshot: Snapshot, ledger: Ledger, book: str | None
) -> Ledger:
    """Returns the ledger of a resumed run, of its file, its checkpoint and a new one.

    Raises:
      FileNotFoundError: no ledger.
      OSError: one that cannot be read.
      LedgerError: one that is damaged, or not this run's from its beginning on.
      ValueError: it is charged to another book than this, or to none.
    """
    if snapshot.ledger is None:
        raise LedgerError("the checkpoint was made without a ledger")
    try:
        content = read_ledger(path, checkpoint=snapshot.ledger)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the run's ledger {path} is gone: what was charged since its checkpoint "
            "is not known, and the run cannot go on"
        ) from None
    ledger.refuse_other(content)
    content.refuse_other_book(book)
    taken, charged, most = snapshot.charged_steps, content.charged, ledger.most
    if not taken <= charged <= most:
        raise LedgerError(
            f"ledger {path} has {charged} steps charged, of which the checkpoint "
            f"contains {taken} and the target permits {most}"
        )
    return ledger.after(content, charged)


class LedgerFile:
    """A ledger on the disk, held by one process; a context manager that seals it.

    Args:
      path: of a ledger; see `create_ledger`.
      contains: a mark that it must contain, or None.

    Attributes:
      content: what it said when it was opened.
      mark: the ledger as it is known to be on the disk.
      num_described: how many times it says what the steps that follow are.
      option: of a run that chooses, the one noted last.

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
            if not is_locked_by_us(self._descriptor):
                raise BlockingIOError(
                    f"ledger {path} is in use: another process charges to it"
                )
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                self.content, self._chain = scan(file, path, contains)
            # One attribute: whenever an interrupt comes, what it says is true.
            self.mark = self.content.end
            self.num_described = len(self.content.groups)
            self.option = self.content.options[-1] if self.content.options else None
            self._is_sealed = self.content.is_sealed
            self._in_doubt = False
            self._finish_last_line()
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def charged(self) -> int:
        """Steps charged that are on the disk."""
        return self.mark.charged

    def charge(self, number: int = 1, *, option: str | None = None) -> None:
        """Charges steps like the one last described; they are on the disk afterwards.

        With an option's name that is noted at once, if it is not the last one's.

        Raises:
          OSError: they may be on the disk or not, and nothing more can be charged until
            the ledger is opened again; or the file is no longer ours.
        """
        before, noted = self.charged, b""
        if option is not None and option != self.option:
            noted = self._chain.line({OPTION: option})
        self._append(noted + CHARGE * number, charges=number)
        self.option = option or self.option
        if before // _STEPS_A_SEAL != self.charged // _STEPS_A_SEAL:
            self.seal()

    def describe(self, step: GaussianStep) -> None:
        """Says what the steps that are charged next are."""
        self._append(_described(self._chain, {"step": step.to_dict()}))
        self.num_described += 1

    def note_opening(self, environment: Mapping[str, Any]) -> None:
        """Notes that this process begins, and with what."""
        self._append(self._chain.line(opening(environment, self.charged)))
        self._is_sealed = False

    def end(self) -> None:
        """Notes that a run that chooses has chosen to end."""
        self._append(self._chain.line({ENDED: True}))

    def seal(self) -> None:
        """Closes the chain over what was charged."""
        self._append(self._chain.line({"charged": self.charged}))
        self._is_sealed = True

    def close(self) -> None:
        """Seals the ledger, if it can be, and lets it go."""
        try:
            if not self._is_sealed and not self._in_doubt:
                with suppress(OSError):  # a full disk: the charges are there
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
        chain, number = self._chain, self.charged + charges
        chain.add(data)
        self.mark = LedgerMark(self.mark.run, number, chain.num_bytes, chain.sha256())
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


def create_ledger(
    path: Path,
    budget: PrivacyBudget | AdaptiveBudget,
    *,
    is_seeded: bool,
    run: str | None = None,
    book: str | None = None,
    search: str | None = None,
) -> str:
    """Makes the ledger of a new run, in place of one without charges.

    It is complete or not there, and readable by its owner. Returns the run's name.

    Raises:
      OSError: it cannot be written.
      ValueError: a step that takes more than 64 MiB to describe.
    """
    chain, run = Chain(), run or secrets.token_hex(16)
    target = {"epsilon": budget.epsilon, "delta": budget.delta}
    known = {"planned": budget.planned, "book": book, "search": search}
    start = chain.line(header(run, **target, is_seeded=is_seeded, **known))
    chain.add(start)
    chooses = isinstance(budget, AdaptiveBudget)
    described = budget if chooses else budget.phases[0][0]
    record = {ADAPTIVE if chooses else "step": described.to_dict()}
    write_atomically(path, start + _described(chain, record), is_private=True)
    return run


def _described(chain: Chain, record: Mapping[str, Any]) -> bytes:
    """The line that says what the steps that follow are."""
    line = chain.line(record)
    if len(line) > MOST_DESCRIBED // 2:
        raise ValueError(
            f"the ledger cannot describe the step: {len(line):,} bytes, mostly its "
            f"population, of at most {MOST_DESCRIBED // 2:,}; state public bounds of "
            "the sizes in the sampling instead"
        )
    return line

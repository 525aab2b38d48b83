"""What a run has been charged: counted, refused beyond the budget, and on the disk.

The contract, whatever ends a process at whatever moment:

    released steps <= charged steps <= released steps + one per crash

A charge is appended to the run's ledger, and on the disk, before anything of the step
is drawn or computed; nothing is charged ahead. A step that was charged and then lost is
taken again with the same draw and noise, which is the same release, and not charged
again; where it could come out differently it is given up (see
`jaxdp_episodic.training.environment`). The format is `report.ledger_file`'s.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp_episodic.describe.step import GaussianStep
from jaxdp_episodic.report.ledger_file import (
    LedgerContent,
    LedgerError,
    LedgerMark,
    read_ledger,
)
from jaxdp_episodic.training.budget import BudgetExhaustedError, PrivacyBudget
from jaxdp_episodic.training.checkpoint import Snapshot
from jaxdp_episodic.training.ledger_writer import LedgerFile


class Ledger:
    """Counts the steps that were charged and refuses the one too many.

    Within `writing_to` every charge is in a file before it counts; elsewhere it is in
    memory only.

    Args:
      budget: of the run.
      charged: steps charged before.
      mark: of the file in which they are.

    Attributes:
      charged: steps charged so far.
      mark: of the file that was last written to; None if there was none.
    """

    def __init__(
        self,
        budget: PrivacyBudget,
        *,
        charged: int = 0,
        mark: LedgerMark | None = None,
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

    def charge(self) -> int:
        """Charges one step, before its result exists; returns the number charged.

        Raises:
          BudgetExhaustedError: the step would exceed the target. Nothing is charged.
          OSError: the ledger could not be written. The step must not be taken.
        """
        if self.charged >= self._budget.permitted_steps:
            raise BudgetExhaustedError(
                f"step {self.charged + 1} would exceed epsilon="
                f"{self._budget.epsilon:g} at delta={self._budget.delta:g}: "
                f"{self._budget.permitted_steps} steps are permitted"
            )
        self._begun = self.charged + 1
        if self._file is not None:
            self._file.charge()
        self.charged = self._begun
        return self.charged

    @contextmanager
    def writing_to(
        self, file: LedgerFile, environment: Mapping[str, Any]
    ) -> Iterator[None]:
        """Charges to a file; steps that only we know of are charged there first.

        Args:
          file: of this run.
          environment: see `environment.described_environment`.

        Raises:
          FileExistsError: steps are charged there that this run knows nothing of.
          LedgerError: the file describes other steps than the budget's.
          OSError: it cannot be written.
        """
        refuse_other_step(file.content, self._budget.step)
        if file.charged > self._begun:
            raise FileExistsError(
                f"the run has gone on: {file.charged} steps are charged in its ledger, "
                f"this run is at step {self._begun}; resume it again"
            )
        # One more than we count is a charge that was interrupted, or failed.
        self.charged = self._begun = max(self.charged, file.charged)
        file.note_opening(environment)
        if self.charged > file.charged:
            file.charge(self.charged - file.charged)
        self._file = file
        try:
            yield
        finally:
            self._file, self.mark = None, file.mark


def refuse_other_step(content: LedgerContent, step: GaussianStep) -> None:
    """Refuses a ledger whose last steps are not those of this budget."""
    if content.groups[-1][0] != step:
        raise LedgerError(
            "the ledger is of another run: it charges other steps than this one takes "
            "(another sampling, noise, population or privacy unit)"
        )


def taken_up(
    path: Path,
    snapshot: Snapshot,
    budget: PrivacyBudget,
    environment: Mapping[str, Any],
) -> tuple[Ledger, int]:
    """Returns the ledger of a resumed run, and up to which step the run stands.

    That is less than what is charged where steps charged after the checkpoint are to be
    taken again, which they are if they come out the same to the last bit. If not, the
    same noise would be added to another sum, and the difference of the two would be
    free of noise: they are then given up, with a warning, and the run goes on behind
    them.

    Args:
      path: of the run's ledger.
      snapshot: its checkpoint.
      budget: its budget.
      environment: this process's; see `environment.described_environment`.

    Raises:
      FileNotFoundError: no ledger.
      OSError: one that cannot be read.
      LedgerError: one that is damaged, or not this run's from its beginning on.
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
    refuse_other_step(content, budget.step)
    taken, charged = snapshot.charged_steps, content.charged
    if not taken <= charged <= budget.permitted_steps:
        raise LedgerError(
            f"ledger {path} has {charged} steps charged, of which the checkpoint "
            f"contains {taken} and the target permits {budget.permitted_steps}"
        )
    ledger = Ledger(budget, charged=charged, mark=content.end)
    same = _comes_out_the_same(content, taken, environment)
    return ledger, taken if same else charged


def _comes_out_the_same(
    content: LedgerContent, taken: int, environment: Mapping[str, Any]
) -> bool:
    """Whether the steps charged after ``taken`` can be repeated; warns if not."""
    if content.charged == taken:
        return True
    ends = [opening.charged for opening in content.openings[1:]] + [content.charged]
    theirs = [
        opening.environment
        for opening, end in zip(content.openings, ends, strict=True)
        if end > max(taken, opening.charged)
    ]
    odd = {k for e in theirs for k in environment if e.get(k) != environment[k]}
    if environment["repeats"] and theirs and not odd:
        return True
    reason = "such devices do not give the same bits twice"
    if odd:
        reason = f"they were taken with another {', '.join(sorted(odd))}"
    warnings.warn(
        f"steps {taken + 1} to {content.charged} were charged, are in no checkpoint "
        f"and cannot be repeated bit for bit ({reason}): they are given up",
        stacklevel=4,
    )
    return False

"""What a run that chooses on the way has chosen, and was charged.

A choice is in the run's ledger, with its charge, before anything is drawn for it. So a
run that is resumed goes on with the choices that were made, and makes none again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
)
from jaxdp_episodic.accountant.report.ledger_content import LedgerContent, LedgerMark
from jaxdp_episodic.accountant.report.ledger_file import LedgerError
from jaxdp_episodic.trainer.run.ledger import Ledger


class AdaptiveLedger(Ledger):
    """Counts choices and their charges; refuses what there is no budget for.

    Args:
      budget: of the run, at its start.
      options: chosen so far; the last one may not be charged yet.
      charged: how many of them are.
      mark: as of `Ledger`.
      has_ended: the run has chosen to end.

    Attributes:
      options: as given, and those chosen since.
      now: the budget after all choices.
      has_ended: as given, or noted since.
    """

    def __init__(
        self,
        budget: AdaptiveBudget,
        options: Sequence[str] = (),
        *,
        charged: int = 0,
        mark: LedgerMark | None = None,
        has_ended: bool = False,
    ) -> None:
        self._start: AdaptiveBudget = budget
        # What the base asks of a planned budget this one answers, too.
        super().__init__(cast(PrivacyBudget, budget), charged=charged, mark=mark)
        self.options, self.now, self.has_ended = list[str](), budget, False
        self._before = budget
        for name in options:
            self.choose(name)
        self.has_ended = self._is_end_noted = has_ended

    @property
    def is_chosen(self) -> bool:
        """Whether the next charge's option is known."""
        return len(self.options) > self.charged

    @property
    def budget_charged(self) -> AdaptiveBudget:
        """The budget after all that was charged: without a choice that is not yet."""
        return self._before if self.is_chosen else self.now

    def choose(self, name: str) -> None:
        """Makes an option the next one to be charged.

        Raises:
          BudgetExhaustedError: more than is left, or against the rules of the budget.
            Nothing is charged.
          ValueError: no such option, or a run that has ended.
        """
        if self.has_ended:
            raise ValueError("the run has chosen to end, and takes no more steps")
        self.now.option(name)
        if not self.now.can(name):
            raise BudgetExhaustedError(
                f"option {name!r} cannot be taken any more, or not now; left are "
                f"{self.now.left_in_words()}"
            )
        self._before, self.now = self.now, self.now.charge(name)
        self.options.append(name)

    def end(self) -> None:
        """Notes that the run has chosen to end; it is on the disk afterwards.

        Raises:
          OSError: it could not be noted.
        """
        if self._file is not None and not self._is_end_noted:
            self._file.end()
            self._is_end_noted = True
        self.has_ended = True

    def refuse_other(self, content: LedgerContent) -> None:
        """Refuses the ledger of another run, or one with other choices than ours.

        Raises:
          LedgerError: such a one.
        """
        same = content.adaptive is not None and (
            content.adaptive.to_dict() == self._start.to_dict()
        )
        theirs, number = _chosen(content), min(len(self.options), content.charged)
        if not same or theirs[:number] != self.options[:number]:
            raise LedgerError(
                "the ledger is of another run: it has another budget, or other choices "
                "were made (other options, quotas, prices, noise or sampling)"
            )

    def after(self, content: LedgerContent, charged: int) -> Self:
        """Returns the ledger that goes on with a file, after so many charges."""
        return type(self)(
            self._start,
            _chosen(content),
            charged=charged,
            mark=content.end,
            has_ended=content.has_ended,
        )

    def _charge_next(self, file: Any) -> None:
        file.charge(option=self.options[file.charged])


def _chosen(content: LedgerContent) -> list[str]:
    """All choices in a ledger; at its end perhaps one that is not charged."""
    groups = zip(content.options, content.groups, strict=True)
    chosen = [name for name, (_, count) in groups for _ in range(count)]
    last = content.groups[-1:]
    return chosen + [name for name in content.options[-1:] if not last[0][1]]

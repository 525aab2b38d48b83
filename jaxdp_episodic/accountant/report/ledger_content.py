"""What a ledger says, and what follows for the accountant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp_episodic.accountant.describe.designs import steps_owed
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget


class Opening(NamedTuple):
    """A process began to charge."""

    charged: int  # steps charged before
    environment: Mapping[str, Any]  # what the steps' rounding depends on, plain values


class LedgerContent(NamedTuple):
    """What a ledger says.

    Attributes:
      run: the run's random name.
      target_epsilon: of the run; ``inf`` without privacy.
      delta: of the run.
      is_seeded: draws and noise came from a seed that somebody knows.
      planned: steps in epochs whose number was fixed in advance; None of others.
      groups: steps, and how many of each were charged, in order.
      openings: only those whose environment is not that of the one before.
      is_closed: the last process ended in order.
      adaptive: of a run that chooses on the way, its budget at the start; else None.
      options: of such a run the name of the option of each group.
      has_ended: such a run has chosen to end.
      book: name of the book that the run is charged to, by which it goes on; None of
        others, and of those that earlier versions began.
      search: of one run of a search the search's name, that of its entry in the book;
        None as of ``book``.
    """

    run: str
    target_epsilon: float
    delta: float
    is_seeded: bool
    planned: int | None
    groups: tuple[tuple[GaussianStep, int], ...]
    openings: tuple[Opening, ...]
    is_closed: bool
    adaptive: AdaptiveBudget | None = None
    options: tuple[str, ...] = ()
    has_ended: bool = False
    book: str | None = None
    search: str | None = None

    def refuse_other_book(self, book: str | None) -> None:
        """Refuses to go on with a run but by the book that it is charged to.

        Raises:
          ValueError: the run names another one than ``book``.
        """
        if self.book not in (None, book):
            given = "none" if book is None else f"{book[:12]}…"
            raise ValueError(
                f"book must be given: the run is charged to one, {self.book[:12]}…, as "
                f"its ledger says, got {given}"
            )

    @property
    def a_step(self) -> GaussianStep:
        """One of the run's steps: all protect the same units."""
        return self.groups[-1][0] if self.adaptive is None else self.adaptive.a_step

    @property
    def adaptive_taken(self) -> AdaptiveBudget | None:
        """Of a run that chose on the way: its budget after all that was charged.

        Raises:
          ValueError: more was charged than there was.
        """
        budget = self.adaptive
        if budget is not None:
            for name, (_, count) in zip(self.options, self.groups, strict=True):
                for _ in range(count):
                    budget = budget.charge(name)
        return budget

    @property
    def charged(self) -> int:
        """Steps charged."""
        return sum(count for _, count in self.groups)

    @property
    def owed(self) -> int:
        """Steps to account for: an epoch that was begun counts whole."""
        return sum(count for _, count in self.groups_owed())

    def run_charged(self) -> tuple[GaussianStep | ComposedSteps, int | None]:
        """Returns ``(step, num_steps)`` for the accountant: what is owed.

        That is what was charged, and within an epoch, unless the plan ended there, what
        is left of the epoch: the file does not know why its run ended.
        """
        groups = self.groups_owed()
        if len(groups) == 1:
            return groups[0]
        return compose(*groups), None

    def groups_owed(self) -> list[tuple[GaussianStep, int]]:
        """Returns ``groups``, those to account for in place of those charged.

        Of a run that chose on the way they are its budget, which is what it owes.

        Raises:
          NotImplementedError: a budget that is no fixed run's.
        """
        if self.adaptive is not None:
            fixed = self.adaptive.as_fixed()
            if fixed is None:
                raise NotImplementedError(
                    "a run that chose on the way has a guarantee of its own, which "
                    "is composed with others by a book alone: of such a ledger ask "
                    "by itself"
                )
            counts = map(int, fixed.counts)
            return list(zip(self.adaptive.options.values(), counts, strict=True))
        # The plan counts all groups: what the earlier ones leave is the last one's.
        left = (self.planned or 0) - sum(count for _, count in self.groups[:-1])
        planned = [0] * (len(self.groups) - 1) + [max(left, 0)]
        return [
            (step, int(steps_owed(step.design, count, number)))
            for (step, count), number in zip(self.groups, planned, strict=False)
        ]

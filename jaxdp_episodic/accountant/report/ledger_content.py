"""What a run's file says, and what follows for the accountant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    steps_owed,
)
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget


class Opening(NamedTuple):
    """A process began to charge."""

    charged: int  # steps charged before
    environment: Mapping[str, Any]  # what the steps' rounding depends on, plain values


class LedgerContent(NamedTuple):
    """What the file of a run says."""

    run: str  # its random name
    target_epsilon: float  # inf without privacy
    delta: float
    is_seeded: bool  # draws and noise came from a known seed
    planned: int | None  # number of steps in epochs, if it was fixed in advance
    groups: tuple[tuple[GaussianStep, int], ...]  # kinds of steps, and how many charged
    openings: tuple[Opening, ...]  # with an environment other than the one before
    is_closed: bool  # the last process ended in order
    adaptive: AdaptiveBudget | None = None  # budget of an adaptive run at its start
    options: tuple[str, ...] = ()  # of an adaptive run, the option of each group
    has_ended: bool = False  # an adaptive run has chosen to end
    book: str | None = None  # name of the book to which the run is charged
    search: str | None = None  # name of the search of which the run is part

    def refuse_other_book(self, book: str | None) -> None:
        """Raises ValueError if the run is charged to a book other than this one."""
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
    def choices(self) -> list[str]:
        """The charged options of an adaptive run, in order."""
        groups = zip(self.options, self.groups, strict=False)  # none of planned runs
        return [name for name, (_, count) in groups for _ in range(count)]

    @property
    def adaptive_taken(self) -> AdaptiveBudget | None:
        """The budget of an adaptive run after all charges; ValueError if exceeded."""
        budget = self.adaptive
        if budget is not None:
            for name in self.choices:
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
        """Returns ``(step, num_steps)`` for the accountant: what is owed."""
        groups = self.groups_owed()
        if len(groups) == 1:
            return groups[0]
        return compose(*groups), None

    def groups_owed(self) -> list[tuple[GaussianStep, int]]:
        """Returns the steps to account for: whole epochs; of adaptive runs the budget.

        An epoch that was begun counts whole: the file does not know why its run ended.
        NotImplementedError: an adaptive budget that no fixed run has.
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
            (step, int(steps_owed(step, count, number)))
            for (step, count), number in zip(self.groups, planned, strict=False)
        ]

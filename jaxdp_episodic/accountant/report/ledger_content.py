"""The content of a run's file, and the steps to be charged for it."""

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
    """A process that began to charge steps."""

    charged: int  # number of steps charged before
    environment: Mapping[str, Any]  # versions and hardware that affect rounding


class LedgerContent(NamedTuple):
    """The content of a run's file."""

    run: str  # its random name
    target_epsilon: float  # inf without privacy
    delta: float
    is_seeded: bool  # whether draws and noise have a known seed
    planned: int | None  # planned number of steps, with epoch schemes
    groups: tuple[tuple[GaussianStep, int], ...]  # steps and their charged counts
    openings: tuple[Opening, ...]  # those with a new environment
    is_closed: bool  # whether the last process ended in order
    adaptive: AdaptiveBudget | None = None  # budget of an adaptive run, without charges
    options: tuple[str, ...] = ()  # option of each group of an adaptive run
    has_ended: bool = False  # whether an adaptive run has chosen to end
    book: str | None = None  # name of the book that is charged for the run
    search: str | None = None  # name of the search that the run is part of

    def refuse_other_book(self, book: str | None) -> None:
        """Raises ValueError if the run is charged to a book other than this one."""
        if self.book not in (None, book):
            given = "none" if book is None else f"{book[:12]}…"
            raise ValueError(
                f"book must be {self.book[:12]}…, to which the ledger charges the run, "
                f"got {given}"
            )

    @property
    def a_step(self) -> GaussianStep:
        """One of the run's steps: all protect the same units."""
        return self.groups[-1][0] if self.adaptive is None else self.adaptive.a_step

    @property
    def choices(self) -> list[str]:
        """The charged options of an adaptive run, in order."""
        groups = zip(self.options, self.groups, strict=False)  # () for planned runs
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
        """Number of charged steps."""
        return sum(count for _, count in self.groups)

    @property
    def owed(self) -> int:
        """Number of steps to be charged: an epoch that has begun counts as a whole."""
        return sum(count for _, count in self.groups_owed())

    def run_charged(self) -> tuple[GaussianStep | ComposedSteps, int | None]:
        """Returns ``(step, num_steps)`` to be charged, for the accountant."""
        groups = self.groups_owed()
        if len(groups) == 1:
            return groups[0]
        return compose(*groups), None

    def groups_owed(self) -> list[tuple[GaussianStep, int]]:
        """Returns the steps to be charged: whole epochs; for adaptive runs the quotas.

        An epoch that has begun counts as a whole, because the file does not say why the
        run ended.
        """
        if self.adaptive is not None:
            fixed = self.adaptive.as_fixed()
            if fixed is None:
                raise NotImplementedError(
                    "only adaptive runs of quotas can be composed with others, except "
                    "in a book: use the ledger of this one by itself"
                )
            counts = map(int, fixed.counts)
            return list(zip(self.adaptive.options.values(), counts, strict=True))
        # The plan is for all groups: what the earlier ones leave is for the last one.
        left = (self.planned or 0) - sum(count for _, count in self.groups[:-1])
        planned = [0] * (len(self.groups) - 1) + [max(left, 0)]
        return [
            (step, int(steps_owed(step, count, number)))
            for (step, count), number in zip(self.groups, planned, strict=False)
        ]

"""What a ledger says, and what follows for the accountant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp_episodic.accountant.describe.designs import steps_owed
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose


class LedgerMark(NamedTuple):
    """A ledger up to one of its lines."""

    run: str  # the run's random name
    charged: int  # steps charged
    num_bytes: int  # length of the file up to there
    sha256: str  # of these bytes, in hexadecimal


class Opening(NamedTuple):
    """A process began to charge."""

    charged: int  # steps charged before
    environment: Mapping[str, Any]  # what the steps' rounding depends on, plain values


class LedgerContent(NamedTuple):
    """What a ledger says.

    Attributes:
      target_epsilon: of the run; ``inf`` without privacy.
      delta: of the run.
      is_seeded: draws and noise came from a seed that somebody knows.
      planned: steps in epochs whose number was fixed in advance; None of others.
      groups: steps, and how many of each were charged, in order.
      openings: only those whose environment is not that of the one before.
      end: the mark of the last whole line.
      unfinished: what stands after it: a line that a crash cut off. A charge cut off is
        counted in ``groups`` and not in ``end``.
      is_sealed: the last line is a seal, as a process that ends in order leaves it.
    """

    target_epsilon: float
    delta: float
    is_seeded: bool
    planned: int | None
    groups: tuple[tuple[GaussianStep, int], ...]
    openings: tuple[Opening, ...]
    end: LedgerMark
    unfinished: bytes
    is_sealed: bool

    @property
    def charged(self) -> int:
        """Steps charged, one that was cut off included."""
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
        """Returns ``groups``, those to account for in place of those charged."""
        # The plan counts all groups: what the earlier ones leave is the last one's.
        left = (self.planned or 0) - sum(count for _, count in self.groups[:-1])
        planned = [0] * (len(self.groups) - 1) + [max(left, 0)]
        return [
            (step, int(steps_owed(step.design, count, number)))
            for (step, count), number in zip(self.groups, planned, strict=False)
        ]

"""Texts about an adaptive run after each of its steps."""

from __future__ import annotations

import math

from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget, in_words
from jaxdp_episodic.accountant.report.caveats import preconditions_of
from jaxdp_episodic.accountant.report.rounding import upward

GUARANTEE = "guarantee"
TAKEN = "taken"

INFORMATION = "no guarantee; the same steps, had they been fixed in advance"

_PARTS = (
    "Parts: with several budgets the largest one counts. Their options use different "
    "parts of the data, and every protected unit is in one part."
)


def owed_by_plan(epsilon: float, delta: float, *, together: bool = False) -> str:
    """Returns the text for a fixed run that ended before its planned end."""
    return (
        "this cost holds if the end did not depend on what it released (a plan, a "
        "crash, a bill). A run that was stopped because of a release, such as a score, "
        f"costs its whole plan: epsilon {upward(epsilon, 5)} at delta "
        f"{delta:g}" + " together" * together
    )


def budget_in_words(budget: AdaptiveBudget) -> list[tuple[str, str]]:
    """Returns (name, text) pairs about the budget, the guarantee first."""
    taken = budget.epsilon_taken()
    known = upward(taken) if math.isfinite(taken) else "inf"
    so_far = [
        (
            "odometer",
            f"so far at most epsilon {upward(run.epsilon_so_far)}, whenever it is "
            f"read, at delta {upward(run.odometer_interval()[1])}; fixed before the "
            "first release",
        )
        for run in budget.runs
        if run.odometer is not None
    ]
    return [
        (
            GUARANTEE,
            f"epsilon {upward(budget.epsilon)} at delta {budget.delta:g}, however the "
            "steps are chosen and whenever the run ends; it does not change",
        ),
        *((TAKEN, text) for text in _spent(budget)),
        *so_far,
        ("information", f"epsilon {known} ({INFORMATION})"),
    ]


def adaptive_preconditions(budget: AdaptiveBudget) -> list[str]:
    """Returns the preconditions of the guarantee that cannot be checked."""
    every = budget.composed(dict.fromkeys(budget.options, 1))
    found = preconditions_of(every, chooses=True)
    return [*found, *([_PARTS] if len(budget.runs) > 1 else [])]


def _spent(budget: AdaptiveBudget) -> list[str]:
    """The charged and remaining uses of each option, and the price spent."""
    found = []
    for run in budget.runs:
        # Charged options come first.
        taken = sorted(run.taken.items(), key=lambda one: not one[1])
        each = in_words(
            f"{number:,} of {name!r} ({budget.most(name):,} left)"
            for name, number in taken
        )
        if run.budget is not None:
            each += f"; {run.spent:,} of {run.budget:,} spent"
        found.append(each)
    return found

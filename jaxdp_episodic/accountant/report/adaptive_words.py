"""What is said of a run that chooses on the way, after each of its steps."""

from __future__ import annotations

import math

from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget, in_words
from jaxdp_episodic.accountant.report.caveats import preconditions_of
from jaxdp_episodic.accountant.report.rounding import upward

GUARANTEE = "guarantee"
"""The name of what does not move."""

TAKEN = "taken"
"""The name of what was taken of each option."""

INFORMATION = "no guarantee; the same steps, had they been fixed in advance"
"""What the exact composition of the steps that were taken is."""

_PARTS = (
    "Parts: of several budgets the largest counts. The data of the options of one and "
    "those of another are apart, and every protected unit is in one of them."
)


def owed_by_plan(epsilon: float, delta: float, *, together: bool = False) -> str:
    """Returns what holds of a fixed run that ended before its plan did."""
    return (
        "this cost holds if the end did not depend on what it released (a plan, a "
        "crash, a bill). A run that was stopped because of a release, such as a score, "
        f"owes its plan: epsilon {upward(epsilon, 5)} at delta "
        f"{delta:g}" + " together" * together
    )


def budget_in_words(budget: AdaptiveBudget) -> list[tuple[str, str]]:
    """Returns pairs of a name and what is to be said, the guarantee first."""
    taken = budget.epsilon_taken()
    known = upward(taken) if math.isfinite(taken) else "inf"
    so_far = [
        (
            "odometer",
            f"up to now at most epsilon {upward(run.epsilon_so_far)}, whenever it is "
            f"read, at delta {upward(run.odometer_interval()[1])}; it was stated "
            "before the first release",
        )
        for run in budget.runs
        if run.odometer is not None
    ]
    return [
        (
            GUARANTEE,
            f"epsilon {upward(budget.epsilon)} at delta {budget.delta:g}, however the "
            "steps were chosen and whenever the run ends; it does not move",
        ),
        *((TAKEN, text) for text in _spent(budget)),
        *so_far,
        ("information", f"epsilon {known} ({INFORMATION})"),
    ]


def adaptive_preconditions(budget: AdaptiveBudget) -> list[str]:
    """Returns what must be true for the guarantee and cannot be checked, each once."""
    every = budget.composed(dict.fromkeys(budget.options, 1))
    found = preconditions_of(every, chooses=True)
    return [*found, *([_PARTS] if len(budget.runs) > 1 else [])]


def _spent(budget: AdaptiveBudget) -> list[str]:
    """What was taken of each part, what is left, and the price of it."""
    found = []
    for run in budget.runs:
        # What was taken is named first.
        taken = sorted(run.taken.items(), key=lambda one: not one[1])
        each = in_words(
            f"{number:,} of {name!r} ({budget.most(name):,} left)"
            for name, number in taken
        )
        if run.budget is not None:
            each += f"; {run.spent:,} of {run.budget:,} spent"
        found.append(each)
    return found

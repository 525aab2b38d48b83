"""Different steps in one run, as its ledger has them."""

from __future__ import annotations

from typing import Any

from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.accountant.report.ledger_file import (
    MOST_DESCRIBED,
    Chain,
    LedgerContent,
    LedgerError,
)


def step_line(chain: Chain, step: GaussianStep) -> bytes:
    """The line that says what the steps that follow are."""
    line = chain.line({"step": step.to_dict()})
    if len(line) > MOST_DESCRIBED // 2:
        raise ValueError(
            f"the ledger cannot describe the step: {len(line):,} bytes, mostly its "
            f"population, of at most {MOST_DESCRIBED // 2:,}; state public bounds of "
            "the sizes in the sampling instead"
        )
    return line


def charge_next(file: Any, budget: PrivacyBudget) -> None:
    """Charges the run's next step to a file; describes it first, if it is another."""
    phases, end = budget.phases, 0
    for place, (step, count) in enumerate(phases):
        end += count
        if file.charged < end or place == len(phases) - 1:
            if place >= file.num_described:
                file.describe(step)
            break
    file.charge()


def refuse_other_steps(content: LedgerContent, budget: PrivacyBudget) -> None:
    """Refuses a ledger whose steps are not those of this budget, in its order."""
    planned, found = budget.phases, content.groups
    if not budget.before:
        planned = planned[-1:]
    same = len(found) <= len(planned) and all(
        step == ours and (count == most or place == len(found) - 1)
        for place, ((step, count), (ours, most)) in enumerate(
            zip(found, planned, strict=False)
        )
    )
    if not same or content.planned != budget.planned:
        raise LedgerError(
            "the ledger is of another run: it charges other steps than this one takes "
            "(another sampling, noise, population, privacy unit or number of epochs)"
        )

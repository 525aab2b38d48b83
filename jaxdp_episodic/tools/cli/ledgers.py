"""``epsilon --ledger``: what runs were charged, and what that number does not show."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.accountant.report.adaptive_words import (
    INFORMATION,
    budget_in_words,
    owed_by_plan,
)
from jaxdp_episodic.accountant.report.ledger_content import LedgerContent
from jaxdp_episodic.accountant.report.ledger_file import (
    read_ledger,
    run_file,
)
from jaxdp_episodic.accountant.report.ledgers import LedgersContent
from jaxdp_episodic.accountant.report.protected import protected_unit
from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.tools.cli.command import facts

# Relative, above the tolerance of calibration: a run whose epsilon is further below its
# target than that has not taken all its steps.
_CALIBRATION_SLACK = 1e-3


def is_adaptive(path: Path) -> bool:
    """Returns whether a run's file says that it chooses; False of one that is none."""
    try:
        with run_file(path) as run:
            return "adaptive" in run.facts
    except (OSError, ValueError):
        return False  # whoever reads it says so


def adaptive_lines(path: Path, *, delta: float | None, as_json: bool) -> list[str]:
    """Returns what the ledger of a run that chose says, at its own delta or another."""
    content = read_ledger(path)
    budget = content.adaptive_taken
    assert budget is not None  # as the caller has seen
    if delta is not None:
        _validation.open_unit_array("delta", delta)
        budget = dataclasses.replace(budget, delta=delta)
    step, warned = budget.a_step, caveats_on_ledger(content)
    if not as_json:
        rows = [
            *budget_in_words(budget),
            ("protected", f"{protected_unit(step)} ({step.neighboring_relation})"),
            ("ended", "by its own choice" if content.has_ended else "not yet"),
        ]
        return [*facts(rows), *(f"warning: {text}" for text in warned)]
    prices = next((run for run in budget.runs if run.budget is not None), None)
    document = {
        "version": 1,
        "delta": budget.delta,
        "epsilon": plain(budget.epsilon),  # the guarantee
        "taken": budget.taken,
        "left": budget.left,
        "price": prices and {"spent": prices.spent, "budget": prices.budget},
        "odometers": [
            {"epsilon": run.epsilon_so_far, "delta": run.odometer_interval()[1]}
            for run in budget.runs
            if run.odometer is not None
        ],
        "information": {
            "epsilon": plain(budget.epsilon_taken()),
            "meaning": INFORMATION,
        },
        "has_ended": content.has_ended,
        "privacy_unit": step.privacy_unit,
        "neighboring_relation": step.neighboring_relation,
        "warnings": warned,
    }
    return [json.dumps(document, allow_nan=False)]


def caveats_on_ledgers(
    ledgers: LedgersContent, spent: Any | None, method: str
) -> list[str]:
    """Returns what an epsilon computed from ledgers does not show by itself."""
    said, are_several = [], len(ledgers.contents) > 1
    for name, content, beginning in zip(*ledgers, strict=True):
        named = f"{name}: " if are_several else ""
        said += [named + text for text in caveats_on_ledger(content)]
        if beginning is None:
            continue
        other = ledgers.names[beginning.of]
        if common := sum(beginning.charged):
            said.append(
                f"{name} has its first {common:,} steps in common with {other}: they "
                "are counted once"
            )
        if not beginning.is_all:
            said.append(
                f"{name} and {other} may have more in common: their processes have no "
                "names, so what both charged is counted twice"
            )
    if are_several:
        said.append(
            "composed as if all had been planned at the start: this is no guarantee if "
            "one run was designed in view of what another released; a book that is "
            "kept from the first run on gives one (jaxdp-episodic book)"
        )
    if ledgers.num_shared_epochs:
        said.append(
            "an epoch that several copies of a run continued is counted once for each "
            f"copy that released from it; counted so: {ledgers.num_shared_epochs:,}"
        )
    early = []
    for name, content in zip(ledgers.names, ledgers.contents, strict=True):
        own = spent
        if own is None or are_several:
            step, num_steps = content.run_charged()
            own = epsilon(step, num_steps=num_steps, delta=content.delta, method=method)
        if float(own) < content.target_epsilon * (1 - _CALIBRATION_SLACK):
            target = f"{content.target_epsilon:g} at delta {content.delta:g}"
            early.append(
                f"{name}: {content.charged:,} steps are charged, epsilon "
                f"{upward(float(own), 5)}; planned was {target}"
            )
    if early:
        early.append(owed_by_plan(*ledgers.planned, together=are_several))
    return said + early


def caveats_on_ledger(content: LedgerContent) -> list[str]:
    """What an epsilon computed from one ledger does not show by itself."""
    of_search = content.search is not None
    # Runs that choose have whole epochs only.
    owed = content.owed if content.adaptive is None else content.charged
    rows = {
        "not private: draws and noise came from a fixed seed; the answer holds for the "
        "same run with fresh entropy": content.is_seeded,
        "one run of a search: the search's own epsilon, in its release/privacy.md, "
        "counts the other runs and the choice among them; this one does not": of_search,
        f"{'the search as a whole' if of_search else 'the run'} is charged to the book "
        f"{content.book}, whose guarantee holds for all of its runs together "
        "(jaxdp-episodic book show); this one is of the run alone": (
            content.book is not None
        ),
        f"{content.charged:,} steps were charged, the last within an epoch, and "
        f"{owed:,} are accounted, to the end of the epoch or of the plan: an "
        "end that was not planned may depend on what was released": owed
        > content.charged,
        "the run was not closed in order: it goes on, or was killed; an older copy of "
        "its file says less than was charged": not content.is_closed,
    }
    return [text for text, holds in rows.items() if holds]

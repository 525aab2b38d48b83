"""``epsilon --ledger`` of a run that chose on the way: what it promises, and spent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.report.adaptive_words import (
    INFORMATION,
    budget_in_words,
)
from jaxdp_episodic.accountant.report.ledger_content import LedgerContent
from jaxdp_episodic.accountant.report.ledger_file import (
    ADAPTIVE,
    MOST_DESCRIBED,
    read_ledger,
)
from jaxdp_episodic.accountant.report.protected import protected_unit
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.tools.cli.messages import reported


def is_adaptive(path: Path) -> bool:
    """Returns whether a ledger, damaged or not, says it is of a run that chooses."""
    try:
        with open(path, "rb") as file:
            file.readline(MOST_DESCRIBED + 1)
            return file.read(len(ADAPTIVE) + 3) == f'{{"{ADAPTIVE}"'.encode()
    except OSError:
        return False  # whoever reads it says so


def print_choices(
    path: Path,
    *,
    delta: float | None,
    as_json: bool,
    caveats_on: Callable[[LedgerContent], list[str]],
) -> int:
    """Prints what the ledger of a run that chose says; returns the exit code.

    Args:
      path: of the ledger.
      delta: in place of the ledger's own.
      as_json: for a program.
      caveats_on: what the answer does not show by itself.
    """

    def answered() -> list[str]:
        content = read_ledger(path)
        budget = content.adaptive_taken
        assert budget is not None  # as the caller has seen
        if delta is not None:
            _validation.open_unit_array("delta", delta)
            budget = dataclasses.replace(budget, delta=delta)
        caveats = caveats_on(content)
        if as_json:
            return [json.dumps(_document(content, budget, caveats), allow_nan=False)]
        step = budget.a_step
        facts = [
            *budget_in_words(budget),
            ("protected", f"{protected_unit(step)} ({step.neighboring_relation})"),
            ("ended", "by its own choice" if content.has_ended else "not yet"),
        ]
        width = max(len(name) for name, _ in facts)
        lines = [f"{name:<{width}}  {text}" for name, text in facts]
        return lines + [f"warning: {text}" for text in caveats]

    return reported(path, answered)


def _document(
    content: LedgerContent, budget: AdaptiveBudget, caveats: list[str]
) -> dict[str, Any]:
    """The answer for a program."""
    step = budget.a_step
    prices = [run for run in budget.runs if run.budget is not None]
    stated = [run for run in budget.runs if run.odometer is not None]
    return {
        "version": 1,
        "delta": budget.delta,
        "epsilon": plain(budget.epsilon),  # the guarantee
        "taken": budget.taken,
        "left": budget.left,
        "price": {"spent": prices[0].spent, "budget": prices[0].budget}
        if prices
        else None,
        "odometers": [
            {"epsilon": run.epsilon_so_far, "delta": run.odometer_interval()[1]}
            for run in stated
        ],
        "information": {
            "epsilon": plain(budget.epsilon_taken()),
            "meaning": INFORMATION,
        },
        "has_ended": content.has_ended,
        "privacy_unit": step.privacy_unit,
        "neighboring_relation": step.neighboring_relation,
        "warnings": caveats,
    }

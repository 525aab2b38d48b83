"""How a run is told what comes next: its rule is asked, and held to its budget.

The rule is given releases and public facts, and nothing else reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.trainer.config.rules import Released, ScoreThen
from jaxdp_episodic.trainer.run.state import described_step
from jaxdp_episodic.trainer.run.validation import PrivateValidation


class RuleError(ValueError):
    """A rule raised, or returned what is no choice; nothing was charged for it."""


def asked(
    rule: Any, number: int, params: Any, scores: tuple[ScoreThen, ...], ledger: Any
) -> str | None:
    """Returns what a rule chooses after so many releases; None ends the run.

    Raises:
      RuleError: the rule raised, or asked for what there is not, or no more.
    """
    now, where = ledger.now, f"after {number:,} releases"
    last = ledger.options[-1] if ledger.options else None
    taken, left = MappingProxyType(now.taken), MappingProxyType(now.left)
    released = Released(number, params, scores, taken, left, last)
    try:
        choice = rule(released)
    except Exception as error:
        raise RuleError(
            f"rule raised {type(error).__name__} {where}: {error}; nothing was "
            "charged, and the run can go on with another rule"
        ) from error
    if choice is None:
        return None
    if not isinstance(choice, str) or choice not in now.options:
        raise RuleError(
            f"rule must return one of {sorted(now.options)}, or None to end the "
            f"run, got {_validation.shown(choice)} {where}"
        )
    if not now.can(choice):
        raise RuleError(
            f"rule asked {where} for {choice!r}, which cannot be taken any more, "
            f"or not now; left are {now.left_in_words()}"
        )
    return choice


def check_rule(budget: Any, rule: Any, checks: Mapping[str, Any]) -> bool:
    """Returns whether a run chooses; refuses a rule without such a budget."""
    adapts = isinstance(budget, AdaptiveBudget)
    if adapts and not callable(rule):
        raise TypeError(f"rule must be a function, got {_validation.shown(rule)}")
    if not adapts and (rule is not None or checks):
        raise TypeError(f"budget must be an AdaptiveBudget, got {type(budget)}")
    return adapts


def can_any(budget: AdaptiveBudget) -> bool:
    """Returns whether anything is left to choose."""
    return any(budget.can(name) for name in budget.options)


def scores_in(
    columns: Any, checks: Mapping[str, PrivateValidation]
) -> tuple[ScoreThen, ...]:
    """Returns the noisy scores that a state has."""
    if not checks:
        return ()
    names, found = list(checks), []
    arrays = (np.asarray(columns[name]) for name in ("release", "check", "value"))
    for release, check, value in zip(*arrays, strict=True):
        if release:
            name = names[check]
            found.append(ScoreThen(int(release), name, *checks[name].score(value)))
    return tuple(found)


def described_choices(
    budget: AdaptiveBudget, rule: Any, checks: Mapping[str, PrivateValidation]
) -> dict[str, Any]:
    """Returns what a run says of what it may choose, and by what."""
    adaptive = budget.to_dict() | {"runs": len(budget.runs)}
    # In stored runs the options stand beside these.
    taken = [name for name in budget.options if name in adaptive]
    if taken:
        raise ValueError(
            f"options must have other names than {sorted(adaptive)}, with which a run "
            f"describes itself, got {taken[0]!r}"
        )
    steps = {name: described_step(one) for name, one in budget.options.items()}
    return {
        "checks": {name: one.described() for name, one in checks.items()},
        "rule": getattr(rule, "to_dict", lambda: getattr(rule, "__name__", "?"))(),
        "adaptive": adaptive | steps,
    }

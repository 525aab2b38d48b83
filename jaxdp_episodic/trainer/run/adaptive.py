"""The trainer of adaptive runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.trainer.config.rules import Rule
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.trainer.run.validation import PrivateValidation


class AdaptiveTrainer(Trainer):
    """A private run that chooses each next step from what it has released.

    The options and their budget are fixed before the first step. An option is a step
    that trains, or a noisy score of held-out data. The rule sees releases and public
    facts only, so the guarantee is that of the worst possible rule. Everything else is
    as in `Trainer`.

    Args:
      learner: as of `Trainer`.
      params: as of `Trainer`.
      data: the private training data.
      budget: the options, and how often each may be taken. Options that train may
        differ in noise and sampling; those of ``budget.first`` are the steps of
        ``start``.
      rule: called before each release with a `Released`; returns the name of an option,
        or None to end the run. The run also ends when the budget permits no further
        option.
      checks: the validation of each option of ``budget.checks``.
      **arguments: as of `Trainer`, the same for all options.

    Raises:
      TypeError, ValueError: as of `Trainer`; or an option is not the step of its check,
        or of its statistic.
    """

    def __init__(
        self,
        learner: Any,
        params: Any,
        *,
        data: ExampleTable,
        budget: AdaptiveBudget,
        rule: Rule,
        checks: Mapping[str, PrivateValidation] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        if not isinstance(budget, AdaptiveBudget):
            raise TypeError(f"budget must be an AdaptiveBudget, got {type(budget)}")
        more = {"rule": rule, "checks": checks, **arguments}
        super().__init__(learner, params, data=data, budget=budget, **more)

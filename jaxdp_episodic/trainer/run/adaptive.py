"""A trainer whose next step is chosen on the way, by what was released."""

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
    """A private run that chooses on the way; see `Trainer` for all that is alike.

    What may be chosen is fixed before the first step: the options, each a step of its
    own that trains or a noisy score of held-out data, and how much of them the budget
    has. The rule is given releases and public facts, and nothing else reaches it. So
    the guarantee is that of the worst rule there could be, whatever this one does.

    Args:
      learner: as of `Trainer`.
      params: likewise.
      data: the private training data.
      budget: what may be chosen. Options that train may differ in noise and sampling;
        those of ``budget.first`` are the steps of ``start``.
      rule: asked before each release; see `Released`. None ends the run, as does a
        budget of which nothing can be taken any more.
      checks: for each option of ``budget.checks`` the validation that it is.
      **arguments: as of `Trainer`; the same for all options.

    Raises:
      TypeError, ValueError: as `Trainer`; an option that is neither a check's step nor
        one of the statistics where it should be.
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

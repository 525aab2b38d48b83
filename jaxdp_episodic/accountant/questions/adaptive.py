"""Runs that adapt: the worst of all strategies that a menu allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxdp_episodic.accountant.describe.menu import Menu
from jaxdp_episodic.accountant.describe.rule_book import RuleBook
from jaxdp_episodic.accountant.describe.step import ComposedSteps, compose
from jaxdp_episodic.accountant.questions import api, intervals


@dataclass(frozen=True, eq=False, init=False)
class AdaptiveRun(Menu):
    """A run that chooses each step in view of everything that it has released.

    ``AdaptiveRun(options={"slow": step, "check": release}, quotas={"slow": 40,
    "check": 5})``. What may be chosen is fixed here: the options, and how often each
    may be taken (quotas), or what each costs (prices) and how much may be spent
    (budget). Everything asked of it is about the worst *strategy*: one that picks each
    option in view of all releases before it, and of coins of its own, and stops when
    it likes. It must be given releases and public facts only: not losses that were not
    noised, not the sizes of draws.

    Immutable: `charge` returns a new run. What was taken changes what may be taken
    next, never the guarantee.

    Attributes:
      options: steps, releases, composed runs (taken as a whole; epochs must be whole)
        and other adaptive runs that have not begun, by name; each one setting, all
        about the same protected units.
      quotas: whole number >= 0 for each option: how often it may be taken, in any
        order, at any time. Costs what all of them composed cost, and nothing more.
      taken: how often each option has been taken.
      state: of the rules, None without any.

    Raises:
      TypeError: an option that is none.
      ValueError: options that protect different units, arrays of settings, names that
        are no options.
      NotImplementedError: part of an epoch as an option, or a release of which the
        Rényi divergences alone are known.
    """

    options: Mapping[str, Any]
    quotas: Mapping[str, int] | None = None
    prices: Mapping[str, int] | None = None
    budget: int | None = None
    blocks: Mapping[str, int] | None = None
    rules: RuleBook | None = None
    taken: Mapping[str, int] = field(default_factory=dict)
    state: str | None = None

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        quotas: Mapping[str, int] | None = None,
        prices: Mapping[str, int] | None = None,
        budget: int | None = None,
        blocks: Mapping[str, int] | None = None,
        rules: RuleBook | None = None,
        taken: Mapping[str, int] = MappingProxyType({}),
        state: str | None = None,
    ) -> None:
        if quotas is None:
            raise NotImplementedError("prices and rules are not here yet: give quotas")
        self._set(
            options=options,
            quotas=quotas,
            prices=prices,
            budget=budget,
            blocks=blocks,
            rules=rules,
            taken=taken,
            state=state,
        )
        self._check_taken()

    def __reduce__(self) -> Any:
        return type(self).from_dict, (self.to_dict(),)

    def epsilon(self, *, delta: Any) -> Any:
        """Returns epsilon of the worst strategy: an *upper bound*.

        Args:
          delta: in [0, 1], any shape.
        """
        return api.epsilon(self._composed(), delta=delta)

    def delta(self, *, epsilon: Any) -> Any:
        """Returns delta of the worst strategy: an *upper bound*.

        Args:
          epsilon: >= 0, nats, any shape.
        """
        return api.delta(self._composed(), epsilon=epsilon)

    def epsilon_interval(self, *, delta: Any) -> tuple[Any, Any]:
        """Returns certified lower and upper ends of the worst strategy's epsilon."""
        return intervals.epsilon_interval(self._composed(), delta=delta)

    def delta_interval(self, *, epsilon: Any) -> tuple[Any, Any]:
        """Returns certified lower and upper ends of the worst strategy's delta."""
        return intervals.delta_interval(self._composed(), epsilon=epsilon)

    def taken_composed(self) -> ComposedSteps | None:
        """Returns what was taken as a run of its own: information, no guarantee.

        None where nothing was taken yet.
        """
        pairs = [(self.options[name], n) for name, n in self.taken.items() if n]
        return compose(*pairs) if pairs else None

    def _composed(self) -> ComposedSteps:
        """All quotas used up: the worst strategy, in whatever order.

        Every move leaves the same function of the loss so far, and stopping never
        helps (docs/proofs.md, "Runs that adapt").
        """
        assert self.quotas is not None
        return compose(*((self.options[n], q) for n, q in self.quotas.items()))

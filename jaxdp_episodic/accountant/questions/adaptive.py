"""Adaptive runs: the guarantee over all strategies that choose among options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.runs import Menu, RuleBook, check_kind
from jaxdp_episodic.accountant.describe.spec import setting_of
from jaxdp_episodic.accountant.describe.step import ComposedSteps, compose
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Interval
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.strategies import (
    Game,
    as_deltas,
    default_prices,
    ends,
    largest_budget,
    largest_losses,
    odometer_ends,
    odometer_with_margin,
    part_of,
)

# The odometer computed by the library: the filter's epsilon plus a certified margin.
MARGIN = "margin"


class AdaptivityCost(NamedTuple):
    """The cost of choosing adaptively, at one delta.

    Attributes:
      epsilon: epsilon of the worst strategy.
      alone: epsilon of each option if the whole budget is spent on it.
      numbers: how often each option can be used in this case.
      ratio: ``epsilon`` divided by the largest of ``alone``.
      held_back: share of the budget that must remain unused for the worst strategy to
        cost no more than the largest of ``alone``.
    """

    epsilon: float
    alone: dict[str, float]
    numbers: dict[str, int]
    ratio: float
    held_back: float


class AdaptiveRun(Menu):
    """A run that may choose each step based on everything released before.

    ``AdaptiveRun(options={"slow": step, "check": release}, quotas={"slow": 40,
    "check": 5})``. The choices are fixed here: the options, and either how often each
    may be used (quotas), or what each costs (prices) and how much may be spent
    (budget). All results are about the worst *strategy*: one that picks each option
    based on all earlier releases and random numbers, and may stop at any time. A
    strategy may use releases and public facts only: no losses without noise, no batch
    sizes.

    Immutable: `charge` returns a new run. Charged options change what the run still
    allows, never the guarantee.

    Attributes:
      options: by name: steps, releases, composed runs (run as a whole; epochs must be
        complete) and other adaptive runs without charges; all for the same protected
        units. An adaptive run as an option is paid for when it begins. If it has
        quotas, other options may come between its own. If it has prices or rules, no
        other option at any level may begin before it ends. Fields may be arrays, which
        broadcast: each setting has its own worst strategy, and results have the
        options' shape. Only a run of one setting can be charged.
      quotas: how often each option may be used, in any order and at any time; whole
        numbers >= 0. The cost is exactly that of the composition of all quotas.
      prices: price of each option, whole numbers >= 1; with ``budget`` or a target.
      budget: the largest total price, whole number >= 1.
      blocks: number of uses of an option that one price pays for; default 1.
      rules: a `RuleBook` of the options that each state allows.
      odometer: epsilons that may be read during the run, one for each price spent from
        0 to the budget. The argument "margin" computes them for ``delta``.
      taken: how often each option has been charged.
      state: the current state of the rules; None without rules.

    Raises:
      TypeError: an option of the wrong type.
      ValueError: options that protect different units or do not broadcast, unknown
        names, or several settings where one is required, as with a target.
      NotImplementedError: part of an epoch as an option, or a release that is only
        known by its Rényi divergences.
    """

    also_read = ("epsilon", "delta")

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        quotas: Mapping[str, int] | None = None,
        prices: Mapping[str, int] | None = None,
        budget: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        blocks: Mapping[str, int] | None = None,
        rules: RuleBook | None = None,
        odometer: Any = None,
        taken: Mapping[str, int] = MappingProxyType({}),
        state: str | None = None,
    ) -> None:
        wants_margin = isinstance(odometer, str)
        if wants_margin:
            _validation.choice("odometer", odometer, (MARGIN,))
        limits: dict[str, Any] = {
            "quotas": quotas,
            "prices": prices,
            "budget": budget,
            "blocks": blocks,
            "rules": rules,
        }
        target = {"epsilon": epsilon, "delta": delta}
        check_kind({**limits, **target}, wants_margin=wants_margin)
        vars(self).update(
            limits, options=options, taken=taken, state=state, _answers={}
        )
        self.check_fields()
        for name, given in (("epsilon", epsilon), ("odometer", odometer)):
            if given is not None:
                self.one_setting(name)
        if delta is not None:
            delta = _validation.one("delta", delta, _validation.open_unit_array)
        if epsilon is not None and delta is not None:
            most = _validation.one("epsilon", epsilon, _validation.positive_array)
            if self.prices is None:
                found = default_prices(self.options, most, delta, blocks=rules is None)
                for name, table in zip(("prices", "blocks"), found, strict=True):
                    table = MappingProxyType(table) if table else None
                    object.__setattr__(self, name, table)
            object.__setattr__(self, "budget", largest_budget(self, most, delta))
        if wants_margin and delta is not None:
            odometer = odometer_with_margin(self, math.log(delta))
            if not np.isfinite(odometer).all():
                raise ValueError(
                    f"delta={delta:g} is too small for an odometer: it has no finite "
                    "certified epsilon"
                )
        if odometer is not None:
            self._set_odometer(odometer)
        self.check_values()

    def __reduce__(self) -> Any:
        return type(self).from_dict, (self.to_dict(),)

    def epsilon(self, *, delta: Any) -> Any:
        """Returns epsilon of the worst strategy, a certified *upper bound*.

        If the worst strategy is a composition, as with quotas, it is the result of
        `jaxdp_episodic.epsilon`, with its stated error.

        Args:
          delta: in [0, 1], any shape.
        """
        return self._answer("epsilon", delta, upper=True)

    def delta(self, *, epsilon: Any) -> Any:
        """Returns delta of the worst strategy, an *upper bound* like `epsilon`.

        Args:
          epsilon: >= 0, nats, any shape.
        """
        return self._answer("delta", epsilon, upper=True)

    def epsilon_interval(
        self, *, delta: Any, max_width: float | None = None
    ) -> tuple[Any, Any]:
        """Returns certified lower and upper ends of the worst strategy's epsilon.

        Args:
          delta: in [0, 1], any shape.
          max_width: target width in nats, without a guarantee; None means 1e-5 if that
            is quick, otherwise up to 1e-3. With a thousand states the time is limited
            to about 10 s: at a delta like 1e-100 the interval may be wide. Both ends
            are certified at any width.
        """
        width = max_width
        if width is not None:
            width = _validation.one("max_width", width, _validation.positive_array)
        return self._answer("epsilon", delta, width=width)

    def delta_interval(self, *, epsilon: Any) -> tuple[Any, Any]:
        """Returns certified lower and upper ends of the worst strategy's delta.

        Args:
          epsilon: >= 0, nats, any shape.
        """
        return self._answer("delta", epsilon)

    def _answer(
        self, kind: str, target: Any, *, upper: bool = False, width: float | None = None
    ) -> Any:
        """Both ends of epsilon or delta, or the upper one."""
        name, same = "delta" if kind == "epsilon" else "epsilon", self.composition()
        if same is not None:
            arguments = {name: target}
            if upper:
                return getattr(api, kind)(same, **arguments)
            arguments |= {"max_width": width} if kind == "epsilon" else {}
            low, high = getattr(api, f"{kind}_interval")(same, **arguments)
            return self._reached(low), high
        shares, amounts = _validation.probability_array, _validation.nonnegative_array
        targets = (shares if name == "delta" else amounts)(name, target)
        _validation.broadcast_shape(options=self, **{name: targets})
        settings = self.settings() if self.shape else (self,)
        number = np.arange(len(settings)).reshape(self.shape)

        def of_one(setting: int, at: float) -> Any:
            if (run := settings[setting]) is self:
                return self._ends(kind, at, width)
            found = run._answer(kind, at, upper=upper, width=width)
            return (found, found) if upper else found

        found = np.frompyfunc(of_one, 2, 2)(number, targets)
        low, high = (np.asarray(end, np.float64)[()] for end in found)
        return high if upper else (self._reached(low), high)

    def cost_of_adaptivity(self, *, delta: float) -> AdaptivityCost:
        """Returns the cost of choosing adaptively, compared with each option alone.

        Args:
          delta: in (0, 1), one number.

        Raises:
          NotImplementedError: without prices: quotas cost nothing.
        """
        self.one_setting("cost_of_adaptivity")
        if self.prices is None or self.budget is None:
            raise NotImplementedError(
                "the cost of adaptivity needs prices: quotas cost the same as their "
                "composition"
            )
        target = _validation.one("delta", delta, _validation.open_unit_array)
        state = None if self.rules is None else self.rules.start
        start = self._charged(dict.fromkeys(self.options, 0), state)
        numbers, alone = {name: start.most(name) for name in self.options}, {}
        for name, option in self.options.items():
            only = type(self)({name: option}, quotas={name: numbers[name]})
            alone[name] = float(only.epsilon(delta=target))
        worst, largest = float(self.epsilon(delta=target)), max(alone.values())
        if largest == 0:
            ratio = math.inf if worst > 0 else 1.0
            return AdaptivityCost(worst, alone, numbers, ratio, 0.0)
        smaller = largest_budget(start, largest * (1 + 1e-9), target)
        held_back = max(1 - smaller / self.budget, 0.0)
        return AdaptivityCost(worst, alone, numbers, worst / largest, held_back)

    @property
    def epsilon_so_far(self) -> float:
        """The odometer's epsilon for the price spent so far, valid at any time.

        It holds with the delta of `odometer_interval`, at any adaptively chosen moment.
        Other results do not: they are about the run as a whole.

        Raises:
          ValueError: the run has no odometer.
        """
        return self._stated()[self.spent]

    def odometer_interval(self) -> tuple[float, float]:
        """Returns certified ends of the delta with which the odometer holds.

        Whenever a strategy stops, with ``e`` the odometer's value then, and every event
        E: ``P(E) <= E'[exp(e); E] + delta`` (docs/proofs.md, "Runs that adapt").

        Raises:
          ValueError: the run has no odometer.
        """
        odometer = self._stated()
        found = self._kept("odometer", lambda: as_deltas(odometer_ends(self, odometer)))
        return float(self._reached(found.lower)), found.upper

    def _stated(self) -> tuple[float, ...]:
        """Returns the odometer; refuses a run without one."""
        if self.odometer is None:
            raise ValueError("odometer must be given when the run is created, got None")
        return self.odometer

    def taken_composed(self) -> ComposedSteps | None:
        """Returns the charged options as a composed run: information, no guarantee.

        None if nothing has been charged.

        Raises:
          NotImplementedError: a run with prices or rules was charged, whose own options
            are not known here.
        """
        parts = {n: part_of(self.options[n]) for n, k in self.taken.items() if k}
        for name, part in parts.items():
            if isinstance(part, Game):
                raise NotImplementedError(
                    f"option {name!r} was charged and is a run with prices or rules, "
                    "whose own options are not known here"
                )
        taken = [(part, self.taken[name]) for name, part in parts.items()]
        return compose(*taken) if taken else None

    def _kept(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Returns a cached result: results do not depend on charges."""
        answers: dict[Any, Any] = self.__dict__["_answers"]
        if key not in answers:
            answers[key] = compute()
        return answers[key]

    def composition(self) -> ComposedSteps | None:
        """Returns the composed run that is the worst strategy; None if it is not one.

        With quotas it is the composition of all of them, in any order: every move
        leaves the same function of the loss so far, and stopping early never increases
        the cost (docs/proofs.md, "Runs that adapt"). With prices it exists for a single
        option and for Gaussian steps without sampling.
        """
        nested = any(isinstance(o, AdaptiveRun) for o in self.options.values())
        if self.shape and (self.quotas is None or nested):
            return None  # it may exist for some settings only
        part = self._kept("part", lambda: part_of(self))
        return None if isinstance(part, Game) else part

    def _reached(self, lower: Any) -> Any:
        """A lower end; 0 if rules may prevent the use of all quotas."""
        return np.zeros_like(lower)[()] if self._may_forbid() else lower

    def _may_forbid(self) -> bool:
        """Whether quotas come with rules, which then count as free, here or within."""
        runs = (o for o in self.options.values() if isinstance(o, AdaptiveRun))
        here = self.quotas is not None and self.rules is not None
        return here or any(run._may_forbid() for run in runs)

    def settings(self) -> tuple[AdaptiveRun, ...]:
        """Returns one run for each setting, in the order of the flattened array."""
        every = (setting_of(self, i, self.shape) for i in np.ndindex(self.shape))
        return self._kept("settings", lambda: tuple(every))

    def _ends(self, kind: str, target: float, width: float | None) -> Interval:
        """Certified ends of epsilon or delta of one setting that is a game."""
        part = self._kept("part", lambda: part_of(self))
        if kind == "epsilon" and target >= 1:
            return Interval(0.0, 0.0)
        most, lost = self._kept("most lost", lambda: largest_losses(part))
        if kind == "delta" and math.isinf(target):
            return Interval(0.0, lost)
        if kind == "epsilon" and target == 0:
            return Interval(0.0, most)
        if kind == "delta" and target >= most:
            return Interval(0.0, 0.0)

        def solved() -> Interval:
            if kind == "delta":
                return as_deltas(ends(DeltaAt(np.asarray(target)), part))
            question = EpsilonAt(np.asarray(math.log(target)))
            found = ends(question, part, width=width)
            return Interval(found.lower, min(found.upper, most))

        return self._kept((kind, target, width), solved)

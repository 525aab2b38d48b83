"""Runs that adapt: the worst of all strategies that a menu allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import (
    chosen_device,
    engine_name,
    in_threads,
    num_cores,
)
from jaxdp_episodic.accountant.describe.menu import Menu, check_kind
from jaxdp_episodic.accountant.describe.rule_book import RuleBook
from jaxdp_episodic.accountant.describe.step import ComposedSteps, compose
from jaxdp_episodic.accountant.methods.adaptive.problem import Ends
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.strategies import (
    Game,
    as_deltas,
    default_prices,
    ends,
    largest_budget,
    largest_loss,
    lost_at_once,
    odometer_ends,
    odometer_with_margin,
    part_of,
)

# Of what may be asked for several settings at once.
_CHECKS = {
    "delta": _validation.probability_array,
    "epsilon": _validation.nonnegative_array,
}
# The odometer that is found: the filter's epsilon plus a certified margin.
MARGIN = "margin"


class AdaptivityCost(NamedTuple):
    """What the freedom to choose costs, at one delta.

    Attributes:
      epsilon: of the worst strategy.
      alone: epsilon of each option where the whole budget goes to it.
      numbers: how often each may be taken then.
      ratio: ``epsilon`` over the largest of ``alone``.
      held_back: share of the budget to be held back for the worst strategy to cost no
        more than the largest of ``alone``.
    """

    epsilon: float
    alone: dict[str, float]
    numbers: dict[str, int]
    ratio: float
    held_back: float


@dataclass(frozen=True, eq=False, init=False)
class AdaptiveRun(Menu):
    """A run that chooses each step in view of everything that it has released.

    ``AdaptiveRun(options={"slow": step, "check": release}, quotas={"slow": 40,
    "check": 5})``. What may be chosen is fixed here: the options, and how often each
    may be taken (quotas), or what each costs (prices) and how much may be spent
    (budget). Everything asked of it is about the worst *strategy*: one that picks each
    option in view of all releases before it, and of random numbers, and stops when it
    likes. It must be given releases and public facts only: not losses that were not
    noised, not the sizes of draws.

    Immutable: `charge` returns a new run. What was taken changes what may be taken
    next, never the guarantee.

    Attributes:
      options: steps, releases, composed runs (taken as a whole; epochs must be whole)
        and other adaptive runs that have not begun, by name; all about the same
        protected units. An adaptive run is paid for when it begins. One of quotas stays
        open beside whatever else is taken. While one of prices or rules is under way,
        nothing else is taken, at any level: it ends before. Fields may be arrays,
        which broadcast as everywhere: each setting has its own worst strategy, and
        answers have the options' shape; to be charged, a run must be of one setting.
      quotas: whole number >= 0 for each option: how often it may be taken, in any
        order, at any time. Costs what all of them composed cost, and nothing more.
      taken: how often each option has been taken.
      state: of the rules, None without any.

    Raises:
      TypeError: an option that is none.
      ValueError: options that protect different units or do not broadcast, names that
        are no options; several settings where there must be one, as with a target.
      NotImplementedError: part of an epoch as an option, or a release of which the
        Rényi divergences alone are known.
    """

    also_read: ClassVar[tuple[str, ...]] = ("epsilon", "delta")

    options: Mapping[str, Any]
    quotas: Mapping[str, int] | None = None
    prices: Mapping[str, int] | None = None
    budget: int | None = None
    blocks: Mapping[str, int] | None = None
    rules: RuleBook | None = None
    odometer: tuple[float, ...] | None = None
    taken: Mapping[str, int] = field(default_factory=dict)
    state: str | None = None

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
        check_kind(
            {"quotas": quotas, "prices": prices, "budget": budget, "blocks": blocks},
            (epsilon, delta),
            rules,
            wants_margin=wants_margin,
        )
        self._set(
            options=options,
            quotas=quotas,
            prices=prices,
            budget=budget,
            blocks=blocks,
            rules=rules,
            odometer=None if wants_margin or prices is None else odometer,
            taken=taken,
            state=state,
        )
        object.__setattr__(self, "_answers", {})
        for name, given in (("epsilon", epsilon), ("odometer", odometer)):
            if given is not None:
                self.one_setting(name)
        if delta is not None:
            checked = _validation.open_unit_array("delta", delta)
            delta = _validation.single("delta", checked)
        if epsilon is not None and delta is not None:
            checked = _validation.positive_array("epsilon", epsilon)
            self._find_budget(_validation.single("epsilon", checked), delta)
        if wants_margin and delta is not None:
            self._set_margin(delta)
        elif odometer is not None and self.odometer is None:
            object.__setattr__(self, "odometer", odometer)
            self._check_odometer()
        self._check_taken()

    def _set_margin(self, delta: float) -> None:
        """States the odometer "the epsilon of a budget of what is spent, plus c"."""
        found = odometer_with_margin(self, math.log(delta))
        if not np.isfinite(found).all():
            raise ValueError(
                f"delta={delta:g} is too small for an odometer: no finite epsilon is "
                "certified at it"
            )
        object.__setattr__(self, "odometer", tuple(found.tolist()))

    def _find_budget(self, epsilon: float, delta: float) -> None:
        """Sets the budget that a target allows, and prices where none were given."""
        if self.prices is None:
            prices, blocks = default_prices(
                self.options, epsilon, delta, blocks=self.rules is None
            )
            object.__setattr__(self, "prices", MappingProxyType(prices))
            blocks = MappingProxyType(blocks) if blocks else None
            object.__setattr__(self, "blocks", blocks)
        budget = largest_budget(self, epsilon, delta)
        object.__setattr__(self, "budget", budget)

    def __reduce__(self) -> Any:
        return type(self).from_dict, (self.to_dict(),)

    def epsilon(self, *, delta: Any) -> Any:
        """Returns epsilon of the worst strategy: an *upper bound*, certified.

        Of quotas, and wherever the worst strategy is a composition, it is that of
        `jaxdp_episodic.epsilon`, exact to its stated error.

        Args:
          delta: in [0, 1], any shape.
        """
        return self._answer("epsilon", delta, upper=True)

    def delta(self, *, epsilon: Any) -> Any:
        """Returns delta of the worst strategy: an *upper bound*, as of `epsilon`.

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
          max_width: nats that are aimed at; None is 1e-5 where that is quickly had, and
            else up to 1e-3. Of a thousand states no more than some 10 s are spent: at a
            delta like 1e-100 the ends may be far apart, each as sure as ever.
        """
        width = None
        if max_width is not None:
            checked = _validation.positive_array("max_width", max_width)
            width = _validation.single("max_width", checked)
        return self._answer("epsilon", delta, width=width)

    def delta_interval(self, *, epsilon: Any) -> tuple[Any, Any]:
        """Returns certified lower and upper ends of the worst strategy's delta.

        Args:
          epsilon: >= 0, nats, any shape.
        """
        return self._answer("delta", epsilon)

    def _answer(
        self,
        kind: str,
        target: Any,
        *,
        upper: bool = False,
        width: float | None = None,
    ) -> Any:
        """Both ends of epsilon or delta, or an upper bound; of settings in threads."""
        name, same = "delta" if kind == "epsilon" else "epsilon", self.composition()
        if same is not None:
            asked = {name: target}
            if upper:
                return getattr(api, kind)(same, **asked)
            asked |= {"max_width": width} if kind == "epsilon" else {}
            low, high = getattr(api, f"{kind}_interval")(same, **asked)
            return self._reached(low), high
        targets = _CHECKS[name](name, target)
        shape = _validation.broadcast_shape(
            options=np.empty(self.shape, np.uint8), **{name: targets}
        )
        settings = self.settings() if self.shape else (self,)
        number = np.arange(len(settings)).reshape(self.shape)
        both = [np.broadcast_to(a, shape).ravel().tolist() for a in (number, targets)]

        def of_one(pair: tuple[int, float]) -> Any:
            run, at = settings[pair[0]], pair[1]
            if run is not self:
                return run._answer(kind, at, upper=upper, width=width)
            found = (
                self._epsilon_ends(at, width)
                if kind == "epsilon"
                else self._delta_ends(at)
            )
            return found.upper if upper else (self._reached(found.lower), found.upper)

        pairs = list(zip(*both, strict=True))
        if not self.shape:
            each = list(map(of_one, pairs))
        else:
            workers = max(min(num_cores(), len(pairs)), 1)
            device = chosen_device() if engine_name() == "jax" else None
            each = in_threads(of_one, pairs, workers, device=device)
        found = np.array(each, np.float64)
        if upper:
            return found.reshape(shape)[()]
        low, high = found.reshape(len(pairs), 2).T
        return low.reshape(shape)[()], high.reshape(shape)[()]

    def cost_of_adaptivity(self, *, delta: float) -> AdaptivityCost:
        """Returns what the freedom to choose costs, beside each option alone.

        Args:
          delta: in (0, 1), one number.

        Raises:
          NotImplementedError: without prices: quotas cost nothing.
        """
        self.one_setting("cost_of_adaptivity")
        if self.prices is None or self.budget is None:
            raise NotImplementedError(
                "the cost of adaptivity is that of prices: quotas cost what their "
                "composition costs"
            )
        target = _validation.single(
            "delta", _validation.open_unit_array("delta", delta)
        )
        start, alone = self._as_begun(), {}
        numbers = {name: start.most(name) for name in self.options}
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
        """Epsilon that was stated for the price spent by now: read it when you like.

        It holds with the delta of `odometer_interval`, whatever moment is chosen. None
        of the other answers may be read so: they are about the run as a whole.

        Raises:
          ValueError: no odometer was stated.
        """
        if self.odometer is None:
            raise ValueError("odometer must be stated when the run is described")
        return self.odometer[self.spent]

    def odometer_interval(self) -> tuple[float, float]:
        """Returns certified ends of the delta with which the odometer holds.

        Whenever a strategy stops, with ``e`` the odometer's value then, and every event
        E: ``P(E) <= E'[exp(e); E] + delta`` (docs/proofs.md, "Runs that adapt").

        Raises:
          ValueError: no odometer was stated.
        """
        if (odometer := self.odometer) is None:
            raise ValueError("odometer must be stated when the run is described")

        def solved() -> Ends:
            return as_deltas(odometer_ends(self, odometer))

        found = self._kept("odometer", solved)
        return float(self._reached(found.lower)), found.upper

    def taken_composed(self) -> ComposedSteps | None:
        """Returns what was taken as a run of its own: information, no guarantee.

        None where nothing was taken yet.

        Raises:
          NotImplementedError: a run with prices or rules was taken: what was taken
            within it is not known here.
        """
        parts = {n: part_of(self.options[n]) for n, k in self.taken.items() if k}
        for name, part in parts.items():
            if isinstance(part, Game):
                raise NotImplementedError(
                    f"option {name!r} was taken, and is a run with prices or rules: "
                    "what was taken within it is not known here"
                )
        taken = [(part, self.taken[name]) for name, part in parts.items()]
        return compose(*taken) if taken else None

    def _as_begun(self) -> AdaptiveRun:
        """The run before anything was taken."""
        start = object.__new__(type(self))
        taken = MappingProxyType(dict.fromkeys(self.options, 0))
        state = None if self.rules is None else self.rules.start
        start.__dict__.update(self.__dict__, taken=taken, state=state)
        return start

    def _kept(self, key: Any, compute: Callable[[], Any]) -> Any:
        """An answer that was given before: it does not depend on what was taken."""
        answers: dict[Any, Any] = self.__dict__["_answers"]
        if key not in answers:
            answers[key] = compute()
        return answers[key]

    def _part(self) -> Any:
        """The run as an option is: composed, where its worst strategy is; or a game."""
        return self._kept("part", lambda: part_of(self))

    def _game(self) -> Game:
        return self._part()  # what is composed is answered before

    def composition(self) -> ComposedSteps | None:
        """Returns the composition that the worst strategy is, None where it is none.

        Of quotas, all of them used up, in whatever order: every move leaves the same
        function of the loss so far, and stopping never helps (docs/proofs.md, "Runs
        that adapt"). Of prices that of one option, or of Gaussians always drawn.
        """
        nested = any(isinstance(o, AdaptiveRun) for o in self.options.values())
        if self.shape and (self.quotas is None or nested):
            return None  # of some settings, maybe
        part = self._part()
        return None if isinstance(part, Game) else part

    def _reached(self, lower: Any) -> Any:
        """A lower end; 0 where rules may forbid to take all of somebody's quotas."""
        return np.zeros_like(lower)[()] if self._may_forbid() else lower

    def _may_forbid(self) -> bool:
        """Whether there are quotas with rules, here or within: they count as free."""
        runs = (o for o in self.options.values() if isinstance(o, AdaptiveRun))
        here = self.quotas is not None and self.rules is not None
        return here or any(run._may_forbid() for run in runs)

    def settings(self) -> tuple[AdaptiveRun, ...]:
        """Returns the runs of one setting each, in the order of a flattened array."""
        return self._kept("settings", self._apart)

    def _epsilon_ends(self, delta: float, width: float | None) -> Ends:
        if delta >= 1:
            return Ends(0.0, 0.0)
        if delta == 0:
            return Ends(0.0, self._most_lost())
        question = EpsilonAt(np.asarray(math.log(delta)))

        def solved() -> Ends:
            found = ends(question, self._game(), width=width)
            return Ends(found.lower, min(found.upper, self._most_lost()))

        return self._kept(("epsilon", delta, width), solved)

    def _delta_ends(self, epsilon: float) -> Ends:
        if math.isinf(epsilon):
            return Ends(0.0, lost_at_once(self._game()))
        if epsilon >= self._most_lost():
            return Ends(0.0, 0.0)

        def solved() -> Ends:
            return as_deltas(ends(DeltaAt(np.asarray(epsilon)), self._game()))

        return self._kept(("delta", epsilon), solved)

    def _most_lost(self) -> float:
        return self._kept("most lost", lambda: largest_loss(self._game()))


# A run may be an option of another.
AdaptiveRun.nested_specs = {
    **Menu.nested_specs,
    "options": (*Menu.nested_specs["options"], AdaptiveRun),
}

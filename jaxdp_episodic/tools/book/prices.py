"""What a book charges: mu-GDP with floors, or a place on a menu.

Fixed when the book is made. ``paid`` lists the prices of earlier runs, in order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
)
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.gdp_budget import (
    GdpBudget,
    GdpPrice,
    gdp_price,
    price_of_rdp,
)

# Of delta: what the floors of all runs may take, and the floor of a run, unless stated.
FLOORS_SHARE = 0.2
FLOOR_SHARE = 0.01
_FIELDS = ("mu", "floor")

AnyRun = ComposedSteps | AdaptiveRun
Price = Mapping[str, Any]


class BookExhaustedError(ValueError):
    """What a book has left does not suffice. Nothing was charged."""


@dataclass(frozen=True)
class GdpPrices:
    """Any runs, each charged mu and a floor of its own; see `GdpBudget`."""

    budget: GdpBudget

    @property
    def default_floor(self) -> float:
        """The floor of a run that states none: a hundredth of delta."""
        return FLOOR_SHARE * self.budget.delta

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; `prices_from_dict` reads them."""
        return {"kind": "gdp", "floors": self.budget.floors}

    def price(self, *parts: AnyRun, method: str, floor: float | None = None) -> Price:
        """Returns the price of a run at its floor, the largest over disjoint parts."""
        lost = self.default_floor if floor is None else floor
        each = [gdp_price(part, floor=lost, method=method) for part in parts]
        return {name: max(getattr(one, name) for one in each) for name in _FIELDS}

    def check(self, paid: Sequence[Price], price: Price) -> None:
        """Refuses a price that does not fit beside those paid."""
        before, wanted = _read(paid), GdpPrice(**price)
        if not self.budget.permits(before, wanted):
            left = dataclasses.asdict(self.budget.left(before))
            raise BookExhaustedError(
                f"the run costs {in_words(price)}, and the book has {in_words(left)} "
                "left: nothing was charged, nothing was drawn"
            )

    def spent(self, paid: Sequence[Price]) -> list[tuple[str, float, float]]:
        """Returns names of the currencies, what was spent, and the total of each."""
        before, total = _read(paid), self.budget
        amounts = float(sum(price.amount for price in before))
        floors = float(sum(price.floor for price in before))
        return [
            ("mu^2", amounts, float(total.total)),
            ("floor", floors, total.floors),
        ]

    def left(self, paid: Sequence[Price]) -> str:
        """Returns what is left, in words."""
        left = self.budget.left(_read(paid))
        return f"a run of mu {left.mu:.5g}; floors {left.floor:.3g}"


@dataclass(frozen=True, eq=False)
class MenuPrices:
    """Whole runs of a menu that was stated at the start; see `AdaptiveRun`."""

    menu: AdaptiveRun  # before anything was taken

    def __post_init__(self) -> None:
        self.menu.one_setting("menu")
        for name in self.menu.options:
            if not name.isprintable():
                raise ValueError(f"menu must have names that can be printed: {name!r}")

    def check_total(self, *, epsilon: float, delta: float, method: str) -> None:
        """Refuses a menu that costs more than the total; takes seconds."""
        same = self.menu.composition()
        if same is None:
            cost = float(self.menu.epsilon(delta=delta))
        else:
            cost = float(epsilon_of(same, delta=delta, method=method))
        if not cost <= epsilon:
            raise ValueError(
                f"epsilon={epsilon:g} is less than the menu costs, {cost:.5g} at "
                f"delta={delta:g}: take smaller quotas, or runs with more noise"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; `prices_from_dict` reads them."""
        kind = "prices" if self.menu.quotas is None else "quotas"
        return {"kind": kind, "menu": self.menu.to_dict()}

    def price(self, *parts: AnyRun, method: str, floor: float | None = None) -> Price:
        """Returns the option that a run is; more noise than it says is allowed."""
        del method
        run, *others = parts
        if others or isinstance(run, AdaptiveRun):
            raise NotImplementedError(
                "adaptive: a book with a menu has whole runs that are compositions, "
                "also runs that adapt within quotas on one part of the data; a book "
                "with mu-GDP prices charges any run"
            )
        if floor is not None:
            raise ValueError("floor is for a book with mu-GDP prices, got a menu")
        options = self.menu.options
        fitting = [name for name in options if _is_at_most(run, options[name])]
        for name in sorted(fitting, key=lambda name: options[name] != run):
            return {"option": name}
        raise ValueError(
            "the run is not on the book's menu, which was fixed when it was made: "
            + ", ".join(options)
        )

    def check(self, paid: Sequence[Price], price: Price) -> None:
        """Refuses an option that costs more than is left."""
        try:
            self._after([*paid, price])
        except ValueError as error:
            raise BookExhaustedError(
                f"{error}: nothing was charged, nothing was drawn"
            ) from None

    def spent(self, paid: Sequence[Price]) -> list[tuple[str, float, float]]:
        """Returns what limits the runs, what was taken of it, and all of it."""
        after, quotas = self._after(paid), self.menu.quotas
        if quotas is None:
            return [("price", float(after.spent), float(self.menu.budget or 0))]
        taken = after.taken
        return [(name, float(taken[name]), float(n)) for name, n in quotas.items()]

    def left(self, paid: Sequence[Price]) -> str:
        """Returns what is left, in words."""
        after, word = self._after(paid), " or " if self.menu.quotas is None else ", "
        return word.join(f"{name} {after.most(name)} times" for name in after.options)

    def _after(self, paid: Sequence[Price]) -> AdaptiveRun:
        """The menu after what was taken."""
        after = self.menu
        for price in paid:
            after = after.charge(price["option"])
        return after


Prices = GdpPrices | MenuPrices


def prices_from_dict(fields: Any, *, epsilon: float, delta: float) -> Prices:
    """Reads prices of any kind; raises KeyError, TypeError or ValueError."""
    if fields["kind"] == "base":
        raise ValueError(
            "prices are in base steps, which version 0.2 was the last to charge: read, "
            "charge and close this book with 0.2. A new book for these data is a "
            "budget of its own, and the two add up"
        )
    kinds = ("gdp", "quotas", "prices")
    if _validation.choice("kind of prices", fields["kind"], kinds) == "gdp":
        return GdpPrices(_budget(epsilon, delta, fields["floors"]))
    menu = AdaptiveRun.from_dict(fields["menu"])
    if any(menu.taken.values()) or menu.rules is not None:
        raise ValueError("menu must be one of quotas or prices that has not begun")
    return MenuPrices(menu)


def _read(paid: Sequence[Price]) -> list[GdpPrice]:
    return [GdpPrice(**price) for price in paid]


def price_of_search(
    prices: Prices, orders: Any, rdp: Any, *, floor: float | None = None
) -> Price:
    """Returns the price of what is known by its Rényi-DP; see `price_of_rdp`."""
    if not isinstance(prices, GdpPrices):
        raise NotImplementedError(
            "a search for hyperparameters is on no menu: a Rényi bound of it is all "
            "that is known; a book with mu-GDP prices charges it"
        )
    lost = prices.default_floor if floor is None else floor
    return dataclasses.asdict(price_of_rdp(orders, rdp, floor=lost))


def in_words(price: Price) -> str:
    """Returns a price as people read it."""
    if "option" in price:
        return f"one of {price['option']}"
    return f"mu {price['mu']:.5g}, floor {price['floor']:.3g}"


def merged(runs: Sequence[ComposedSteps]) -> ComposedSteps:
    """Returns the composition of runs; those steps that draw alone are counted up."""
    alone: dict[Any, int] = {}
    parts: list[tuple[Any, int]] = []
    for run in runs:
        for step, count in zip(run.steps, run.counts, strict=True):
            if isinstance(step, GaussianStep) and int(step.cycle) > 1:
                parts.append((step, int(count)))
            else:
                alone[step] = alone.get(step, 0) + int(count)
    return compose(*alone.items(), *parts)


# What they hold is searched for, and a book is read before every charge.
_budget = functools.lru_cache(maxsize=16)(GdpBudget)


def _is_at_most(run: ComposedSteps, option: Any) -> bool:
    """Whether a run is an option, or that with more noise, which is post-processing."""
    if not isinstance(option, ComposedSteps) or len(run.steps) != len(option.steps):
        return False
    counts = zip(run.counts, option.counts, strict=True)
    if any(int(ours) != int(theirs) for ours, theirs in counts):
        return False
    for ours, theirs in zip(run.steps, option.steps, strict=True):
        if isinstance(ours, GaussianStep) and isinstance(theirs, GaussianStep):
            if not ours.noise_multiplier >= theirs.noise_multiplier:
                return False
            ours = dataclasses.replace(ours, noise_multiplier=theirs.noise_multiplier)
        if ours != theirs:
            return False
    return True

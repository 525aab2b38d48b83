"""What a book charges for a run: mu-GDP with floors, or a menu with quotas.

Both kinds are fixed when the book is made. ``paid`` is what the runs before have paid,
in order; a price is a dictionary of plain values, as the book holds it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
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
# Times that one run of a menu can be taken: the composition is computed at once.
_MOST_TIMES = 1000

Price = Mapping[str, Any]


class BookExhaustedError(ValueError):
    """What a book has left does not suffice. Nothing was charged."""


@dataclass(frozen=True)
class GdpPrices:
    """Any runs, each charged mu and a floor of its own; see `GdpBudget`.

    Attributes:
      budget: of all runs together.
    """

    kind: ClassVar[str] = "gdp"

    budget: GdpBudget

    def price(
        self, run: ComposedSteps, *, method: str, floor: float | None = None
    ) -> Price:
        """Returns the price of a run, at its floor; see `gdp_price`."""
        lost = self.default_floor if floor is None else floor
        return dataclasses.asdict(gdp_price(run, floor=lost, method=method))

    def price_of_rdp(
        self, orders: Any, rdp: Any, *, floor: float | None = None
    ) -> Price:
        """Returns the price of what is known by its Rényi-DP; see `price_of_rdp`."""
        lost = self.default_floor if floor is None else floor
        return dataclasses.asdict(price_of_rdp(orders, rdp, floor=lost))

    @property
    def default_floor(self) -> float:
        """The floor of a run that states none: a hundredth of delta."""
        return FLOOR_SHARE * self.budget.delta

    def holds(self, paid: Sequence[Price]) -> bool:
        """Returns whether the prices do not exceed the total."""
        return self.budget.permits(_gdp(paid), GdpPrice(0.0, 0.0))

    def check(self, paid: Sequence[Price], price: Price) -> None:
        """Refuses a price that does not fit beside those paid."""
        before, wanted = _gdp(paid), GdpPrice(**price)
        if self.budget.permits(before, wanted):
            return
        left = self.budget.left(before)
        raise BookExhaustedError(
            f"the run costs mu {wanted.mu:.5g} and floor {wanted.floor:.3g}, and the "
            f"book has mu {left.mu:.5g} and floor {left.floor:.3g} left: nothing was "
            "charged, nothing was drawn"
        )

    def spent(self, paid: Sequence[Price]) -> list[tuple[str, float, float]]:
        """Returns names of the currencies, what was spent, and the total of each."""
        before = _gdp(paid)
        squares = sum(price.mu**2 for price in before)
        floors = sum(price.floor for price in before)
        total = self.budget
        return [("mu^2", squares, total.mu**2), ("floor", floors, total.floors)]

    def left(self, paid: Sequence[Price]) -> str:
        """Returns what is left, in words."""
        left = self.budget.left(_gdp(paid))
        return f"a run of mu {left.mu:.5g}; floors {left.floor:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; `prices_from_dict` reads them."""
        return {"kind": self.kind, "floors": self.budget.floors}

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any], *, epsilon: float, delta: float, method: str
    ) -> Self:
        """Reads what `to_dict` returned."""
        del method
        return cls(_budget(epsilon, delta, fields["floors"]))


class Option(NamedTuple):
    """A run on a menu.

    Attributes:
      name: of the option.
      run: what is charged each time.
      quota: how often it can be taken.
    """

    name: str
    run: ComposedSteps
    quota: int


@dataclass(frozen=True, eq=False)
class QuotaPrices:
    """Runs of a menu, each at most as often as its quota, in any order, at any time.

    Such a choice, however it depends on what was released, costs what all of the menu
    costs together: plain composition (docs/proofs.md, "One budget for a data set").

    Attributes:
      menu: its options, with different names.
      epsilon: that all of it must not exceed, at ``delta``.
      delta: in (0, 1).
      method: how it is computed; see `jaxdp_episodic.epsilon`.

    Raises:
      ValueError: no options, a name twice, a quota out of range, or a menu that costs
        more.
    """

    kind: ClassVar[str] = "quotas"

    menu: tuple[Option, ...]
    epsilon: float
    delta: float
    method: str

    def __post_init__(self) -> None:
        names = Counter(option.name for option in self.menu)
        if not names or max(names.values()) > 1:
            raise ValueError(
                f"a menu needs options with different names, got {[*names]}"
            )
        for name, _, quota in self.menu:
            _validation.whole_number(f"quota of {name}", quota, maximum=_MOST_TIMES)

    def check_total(self) -> None:
        """Refuses a menu that costs more than the total; takes seconds.

        Raises:
          ValueError: it does.
        """
        runs = [o.run for o in self.menu for _ in range(o.quota)]
        cost = float(epsilon_of(merged(runs), delta=self.delta, method=self.method))
        if not cost <= self.epsilon:
            raise ValueError(
                f"epsilon={self.epsilon:g} is less than the menu costs, {cost:.5g} at "
                f"delta={self.delta:g}: smaller quotas, or runs with more noise"
            )

    def price(
        self, run: ComposedSteps, *, method: str, floor: float | None = None
    ) -> Price:
        """Returns the option that a run is; more noise than it says is allowed."""
        del method
        if floor is not None:
            raise ValueError("floor is for a book with mu-GDP prices, got a menu")
        fitting = [option for option in self.menu if _is_at_most(run, option.run)]
        for option in sorted(fitting, key=lambda option: option.run != run):
            return {"option": option.name}
        raise ValueError(
            "the run is not on the book's menu, which was fixed when it was made: "
            + ", ".join(option.name for option in self.menu)
        )

    def price_of_rdp(
        self, orders: Any, rdp: Any, *, floor: float | None = None
    ) -> Price:
        """Refuses a search, which is known by its Rényi-DP alone."""
        raise NotImplementedError(
            "a search for hyperparameters is on no menu: its composition with other "
            "runs is not covered; a book with mu-GDP prices charges it"
        )

    def holds(self, paid: Sequence[Price]) -> bool:
        """Returns whether no option was taken more often than it may be."""
        quotas = {option.name: option.quota for option in self.menu}
        taken = Counter(one["option"] for one in paid)
        return all(number <= quotas[name] for name, number in taken.items())

    def check(self, paid: Sequence[Price], price: Price) -> None:
        """Refuses an option that was taken as often as it may be."""
        name = price["option"]
        quotas = {option.name: option.quota for option in self.menu}
        if name not in quotas:
            raise ValueError(f"{name!r} is not on the menu: {', '.join(quotas)}")
        taken = Counter(one["option"] for one in paid)[name]
        if taken >= quotas[name]:
            raise BookExhaustedError(
                f"{name!r} was taken {taken} times, and its quota is {quotas[name]}: "
                "nothing was charged, nothing was drawn"
            )

    def spent(self, paid: Sequence[Price]) -> list[tuple[str, float, float]]:
        """Returns names of the options, how often each was taken, and its quota."""
        taken = Counter(one["option"] for one in paid)
        return [(o.name, float(taken[o.name]), float(o.quota)) for o in self.menu]

    def left(self, paid: Sequence[Price]) -> str:
        """Returns what is left, in words."""
        spent = self.spent(paid)
        return ", ".join(f"{name} {quota - n:.0f} times" for name, n, quota in spent)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; `prices_from_dict` reads them."""
        menu = [
            {"name": o.name, "run": o.run.to_dict(), "quota": o.quota}
            for o in self.menu
        ]
        return {"kind": self.kind, "menu": menu}

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any], *, epsilon: float, delta: float, method: str
    ) -> Self:
        """Reads what `to_dict` returned."""
        menu = tuple(
            Option(one["name"], ComposedSteps.from_dict(one["run"]), one["quota"])
            for one in fields["menu"]
        )
        return cls(menu, epsilon, delta, method)


Prices = GdpPrices | QuotaPrices


def prices_from_dict(fields: Any, **totals: Any) -> Prices:
    """Reads prices of any kind.

    Raises:
      KeyError, TypeError, ValueError: it is no such description.
    """
    kinds = {cls.kind: cls for cls in (GdpPrices, QuotaPrices)}
    kind = _validation.choice("kind of prices", fields["kind"], kinds)
    return kinds[kind].from_dict(fields, **totals)


def merged(runs: Sequence[ComposedSteps]) -> ComposedSteps:
    """Returns the composition of runs; those steps that draw alone are counted up.

    Steps of epochs stay apart: every run begins its own.
    """
    alone: dict[Any, int] = {}
    parts: list[tuple[Any, int]] = []
    for run in runs:
        for step, count in zip(run.steps, run.counts, strict=True):
            if isinstance(step, GaussianStep) and epoch_scheme(step.design) is not None:
                parts.append((step, int(count)))
            else:
                alone[step] = alone.get(step, 0) + int(count)
    return compose(*alone.items(), *parts)


# Its mu is searched for, and a book is read before every charge.
_budget = functools.lru_cache(maxsize=16)(GdpBudget)


def _gdp(paid: Sequence[Price]) -> list[GdpPrice]:
    return [GdpPrice(**price) for price in paid]


def _is_at_most(run: ComposedSteps, option: ComposedSteps) -> bool:
    """Whether a run is an option, or that with more noise, which is post-processing."""
    if len(run.steps) != len(option.steps):
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

"""A budget for runs that are designed one after another: mu-GDP with floors.

A run with price (mu, floor) has ``delta(eps) <= floor + (1 - floor) D(mu, eps)`` for
all ``eps >= 0``, D the profile of N(mu, 1) against N(0, 1). Under composition the
squares of mu add up, and so do the floors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.describe.step import AnyStep
from jaxdp_episodic.accountant.losses.gaussian import log_gaussian_profile
from jaxdp_episodic.accountant.methods.adaptive.method import profiles_above
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import check_method, checked_runs
from jaxdp_episodic.accountant.questions.attacker import (
    lower_hull,
    mu_of_chords,
    mu_of_gaussians,
    upper_curve,
)
from jaxdp_episodic.accountant.questions.strategies import least_of_theorems, part_of
from jaxdp_episodic.accountant.questions.tuning import curve_to_epsilon

# Smallest floor of a run, far below any delta in use.
_SMALLEST_FLOOR = 1e-100
_checked_floor = _validation.reals(
    f"be one number in [{_SMALLEST_FLOOR:g}, 1)",
    lambda a: (a >= _SMALLEST_FLOOR) & (a < 1),
)
# Relative; exceeds the rounding errors of a profile and of the search for mu.
_ROUNDING = 1e-9
# Largest mu: beyond it delta is 1.
_MOST_MU = 100.0
# Number of deltas at which a Rényi DP curve is converted, and the largest of them.
_POINTS = 400
_LARGEST_DELTA = 0.9
# Relative tolerance of the search for the mu of a budget, which is rounded down.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class GdpPrice:
    """The price of a run: its share of a `GdpBudget`."""

    mu: float
    floor: float

    def __post_init__(self) -> None:
        _check_number(self, "mu")
        if not math.isfinite(self.mu):
            raise ValueError(f"mu must be finite, got {self.mu}: the run has no noise")
        _check_number(self, "floor", below=1)


@dataclass(frozen=True)
class GdpBudget:
    """A total (epsilon, delta), of which ``floors`` is for the floors of the runs."""

    epsilon: float
    delta: float
    floors: float

    def __post_init__(self) -> None:
        _check_number(self, "epsilon")
        if not 0 < self.epsilon < np.inf:
            raise ValueError(f"epsilon must be > 0 and finite, got {self.epsilon:g}")
        for name in ("delta", "floors"):
            share = getattr(self, name)
            share = _validation.one(name, share, _validation.open_unit_array)
            object.__setattr__(self, name, share)
        if not self.floors < self.delta:
            raise ValueError(
                f"floors must be below delta, {self.delta:g}, got {self.floors:g}"
            )
        _ = self.mu

    @functools.cached_property
    def mu(self) -> float:
        """The largest total mu of all runs, rounded down."""
        target = math.log((self.delta - self.floors) / (1 - self.floors))

        def excess(mu: np.ndarray, _: np.ndarray) -> np.ndarray:
            log_delta = float64_boundary(log_gaussian_profile)(mu, self.epsilon)
            return log_delta + _ROUNDING - target

        low, high = np.array([1e-30]), np.array([_MOST_MU])
        if excess(high, np.zeros(1, int)) <= 0:
            raise ValueError(
                f"epsilon={self.epsilon:g} at delta={self.delta:g} permits mu > "
                f"{_MOST_MU:g}, which gives no privacy; use a smaller one"
            )
        return float(largest_within(excess, low, high, tolerance=_TOLERANCE)[0])

    def left(self, prices: Iterable[GdpPrice]) -> GdpPrice:
        """Returns what remains after these prices, rounded down."""
        amount, floors = self._left(prices)
        if amount < 0 or floors < 0:
            raise ValueError("prices must not exceed the budget")
        mu, floor = math.sqrt(amount), float(floors)
        while Fraction(mu) ** 2 > amount:
            mu = math.nextafter(mu, 0.0)
        while Fraction(floor) > floors:
            floor = math.nextafter(floor, 0.0)
        return GdpPrice(mu, floor)

    def permits(self, prices: Iterable[GdpPrice], price: GdpPrice) -> bool:
        """Returns whether a further price is within the budget."""
        return min(self._left([*prices, price])) >= 0

    def _left(self, prices: Iterable[GdpPrice]) -> tuple[Fraction, Fraction]:
        amount, floors = Fraction(self.mu) ** 2, Fraction(self.floors)
        for price in prices:
            amount -= Fraction(price.mu) ** 2
            floors -= Fraction(price.floor)
        return amount, floors


def gdp_price(
    step: AnyStep | AdaptiveRun,
    *,
    num_steps: Any = None,
    floor: Any,
    method: str = "exact",
) -> GdpPrice:
    """Returns the price of a run with this floor, to be fixed before the run begins."""
    lost = _validation.one("floor", floor, _checked_floor)
    check_method(method)
    if isinstance(step, AdaptiveRun):
        step.one_setting("price")
        if num_steps is not None:
            raise ValueError(
                f"num_steps must be None for an AdaptiveRun, got {num_steps!r}"
            )
        same = step.composition()
        if same is None:

            def mu_of_path(problem: Problem) -> float:
                profiles = profiles_above(problem, lost)
                every = [_mu_of(lost, *one) for one in profiles or ()]
                return max(every, default=math.inf)

            # Certified for every strategy.
            return _price(float(least_of_theorems(part_of(step), mu_of_path)), lost)
        step = same
    runs, shape = checked_runs(step, num_steps)
    if shape:
        raise ValueError(f"a price needs one setting, got settings of shape {shape}")
    known = min(float(mu_of_gaussians(run)) for run in runs)
    if math.isfinite(known):
        return GdpPrice(known, 0.0)
    epsilons, deltas, _ = upper_curve(step, num_steps, method, lost)
    return price_of_curve(epsilons[:, 0], deltas[:, 0], floor=lost)


def price_of_curve(epsilons: np.ndarray, deltas: np.ndarray, *, floor: Any) -> GdpPrice:
    """Returns the price of a run from points of its privacy profile."""
    lost = _validation.one("floor", floor, _checked_floor)
    falls = np.all(np.diff(epsilons) >= 0) and np.all(np.diff(deltas) <= 0)
    if not (falls and epsilons[0] == 0 and np.all((deltas >= 0) & (deltas <= 1))):
        raise ValueError(
            "epsilons must start at 0 and not decrease, and deltas must lie in [0, 1] "
            "and not increase"
        )
    return _price(_mu_of(lost, epsilons, deltas), lost)


def _mu_of(floor: float, epsilons: np.ndarray, deltas: np.ndarray) -> float:
    """The mu for points of a privacy profile; inf if there is none."""
    # Slightly less than the floor, to cover rounding.
    given = floor * (1 - _ROUNDING)
    above = np.maximum(deltas - given, 0.0) / (1 - given) * (1 + _ROUNDING)
    if above[0] == 0:
        return 0.0
    if above[-1] > 0:
        return math.inf
    used = slice(int(np.argmax(above == 0)) + 1)
    g, d = lower_hull(np.exp(epsilons[used]), np.minimum(above[used], 1.0))
    return mu_of_chords(g, d) * (1 + _ROUNDING)


def _price(mu: float, floor: float) -> GdpPrice:
    if not math.isfinite(mu):
        raise ValueError(
            f"the run has no mu at floor={floor:g}: it has too little noise, or its "
            "delta stays above the floor; try a larger floor"
        )
    return GdpPrice(mu, floor)


def price_of_rdp(orders: Any, rdp: Any, *, floor: Any) -> GdpPrice:
    """Returns the price of a run from its Rényi DP curve."""
    lost = _validation.one("floor", floor, _checked_floor)
    deltas = np.geomspace(_LARGEST_DELTA, lost * (1 - 2 * _ROUNDING), _POINTS)
    epsilons = curve_to_epsilon(orders, rdp, delta=deltas)
    least = float(np.min(rdp)) * (1 + _ROUNDING)
    total_variation = math.sqrt(min(least / 2, -math.expm1(-least)))
    # A larger epsilon is a bound at the same delta, and a larger delta at the same
    # epsilon, so that both may be made monotone.
    epsilons = np.maximum.accumulate(np.append(0.0, epsilons))
    deltas = np.append(min(total_variation * (1 + _ROUNDING), 1.0), deltas)
    return price_of_curve(epsilons, np.minimum.accumulate(deltas), floor=lost)


def _check_number(described: Any, name: str, *, below: float = math.inf) -> None:
    """Checks a field that must be a number >= 0 and makes it a float."""
    value = getattr(described, name)
    if type(value) is not float or not value >= 0:  # books hold thousands
        checked = _validation.one(name, value, _validation.nonnegative_array)
        object.__setattr__(described, name, value := float(checked))
    if below < math.inf and value >= below:
        raise ValueError(f"{name} must lie in [0, {below:g}), got {value}")

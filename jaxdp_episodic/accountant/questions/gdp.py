"""What attackers can do, by the privacy profile; mu of Gaussian DP; budgets of mu."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.describe.step import AnyStep
from jaxdp_episodic.accountant.losses.allocated import lower_hull
from jaxdp_episodic.accountant.losses.gaussian import log_gaussian_profile
from jaxdp_episodic.accountant.methods.adaptive.method import profiles_above
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import (
    check_method,
    check_step,
    checked_runs,
    delta,
    epsilon,
    public_function,
)
from jaxdp_episodic.accountant.questions.strategies import least_of_theorems, part_of
from jaxdp_episodic.accountant.questions.tuning import curve_to_epsilon

# Smallest delta that is computed by default.
_SMALLEST_DELTA = 1e-15
# Up to this number of rates, the curve is computed only where they need it.
_FEW_RATES = 4
# Exceeds the rounding error of sums of a few numbers in [0, 1].
_ROUNDING = 2.0**-50
# Smallest normal number: below it float64 loses digits.
_LEAST_NORMAL = float(np.finfo(np.float64).tiny)
# Largest number of curve points times rates at once, to bound memory.
_BLOCK = 1 << 22
# Range of the last epsilon of a curve: below delta changes by less than 1e-8, and
# beyond e^epsilon would overflow.
_RANGE = 1e-8, 700.0
# First points of a curve, as shares of its last epsilon: 4 per decade.
_FIRST_POINTS = np.append(0.0, np.geomspace(1e-10, 1.0, 41))
# Target for the absolute error of the attacker's rates: above it points are added.
_ABSOLUTE = 8e-7
# The same, relative to the true positive or false negative rate.
_RELATIVE = 2e-4
# Largest number of rounds in which intervals are halved.
_ROUNDS = 12
# Smallest floor of a run, far below any delta in use.
_SMALLEST_FLOOR = 1e-100
_checked_floor = _validation.reals(
    f"be one number in [{_SMALLEST_FLOOR:g}, 1)",
    lambda a: (a >= _SMALLEST_FLOOR) & (a < 1),
)
# Relative; exceeds the rounding errors of a profile and of the search for mu.
_OF_PRICES = 1e-9
# Largest mu: beyond it delta is 1.
_MOST_MU = 100.0
# Number of deltas at which a Rényi DP curve is converted, and the largest of them.
_POINTS = 400
_LARGEST_DELTA = 0.9


@public_function(np.minimum)
def trade_off(
    step: AnyStep,
    *,
    false_positive_rate: Any,
    num_steps: Any = None,
    method: str = "exact",
) -> np.ndarray | np.float64:
    """Returns a lower bound on an attacker's false negative rate.

    The attacker sees the run's output and decides which of two neighbouring data sets
    it came from. At false positive rate ``a`` the false negative rate is at least

        f(a) = sup_{eps >= 0} max(0, 1 - delta(eps) - e^eps a,
                                  e^-eps (1 - delta(eps) - a)),

    which is convex, decreasing, symmetric and at most ``1 - a``. A *lower bound*: the
    supremum is over finitely many epsilons, at each of which ``delta`` plus its error
    is an upper bound. More epsilons would raise it by less than 1e-6, and by less than
    0.1 % of f and 1 - f if those are above 1e-12.

    Args:
      step: the step, or a run made by `compose`.
      false_positive_rate: in [0, 1], any shape.
      num_steps: see `jaxdp_episodic.epsilon`.
      method: how delta is computed; see `jaxdp_episodic.delta`.

    Returns:
      float64 in [0, 1] of the broadcast shape of step and ``num_steps``, followed by
      that of ``false_positive_rate``.

    Raises:
      ValueError: a step without ``num_steps``.

    Reference: Dong, Roth, Su (2022), arXiv:1905.02383, for the trade-off function of
    several (epsilon, delta) guarantees; Wasserman and Zhou (2010), arXiv:0811.2501, for
    a single one.
    """
    return _rates(step, false_positive_rate, num_steps, method)[0]


@public_function()
def true_positive_rate(
    step: AnyStep,
    *,
    false_positive_rate: Any,
    num_steps: Any = None,
    method: str = "exact",
) -> np.ndarray | np.float64:
    """Returns an upper bound on an attacker's true positive rate: ``1 - trade_off``.

    Accurate to 0.1 % even if it is as small as 1e-12, which ``1 - trade_off`` in
    float64 is not. Arguments, shape and errors as `trade_off`.
    """
    return _rates(step, false_positive_rate, num_steps, method)[1]


@public_function()
def advantage(
    step: AnyStep, *, num_steps: Any = None, method: str = "exact"
) -> np.ndarray | np.float64:
    """Returns the largest difference of true and false positive rate of an attacker.

    It is delta at epsilon 0, the total variation distance, plus its error: an *upper
    bound* on the advantage of any membership attack. 0 if nothing is sampled, 1 without
    noise. Arguments, shape and errors as `jaxdp_episodic.delta`.

    Reference: Kulynych, Gomez, Kaissis, Calmon, Troncoso (2024), "Attack-aware noise
    calibration for differential privacy".
    """
    return upper_delta(step, epsilon=0.0, num_steps=num_steps, method=method)


@public_function()
def upper_delta(
    step: AnyStep, *, epsilon: Any, num_steps: Any = None, method: str = "exact"
) -> Any:
    """Returns delta plus the error estimate of its method, an *upper bound*."""
    value, info = delta(
        step, epsilon=epsilon, num_steps=num_steps, method=method, return_info=True
    )
    if method != "exact":
        return value
    error = np.where(info.is_certified_bound, 0.0, info.error)
    return np.minimum(value * (1 + error) * (1 + _ROUNDING), 1.0)[()]


@public_function()
def gdp_mu(
    step: AnyStep,
    *,
    num_steps: Any = None,
    method: str = "exact",
    smallest_delta: float = 1e-12,
) -> np.ndarray | np.float64:
    """Returns mu of approximate Gaussian DP, down to ``smallest_delta``.

    With ``D(mu, .)`` the profile of N(mu, 1) against N(0, 1),
    ``delta(eps) <= max(D(mu, eps), smallest_delta)`` for *all* ``eps >= 0``. An *upper
    bound*, within 0.2 % of the smallest such mu; exact for Gaussian steps without
    sampling. It says nothing about deltas below ``smallest_delta``: a mu for *all*
    deltas is that of the run without sampling, because with probability
    ``rate^num_steps`` every step samples the unit, and this tail decides at the
    smallest deltas. So mu values of several runs may not be composed without their
    floors, which add up: see `GdpBudget`.

    Method: chords between points of delta are above the true curve, which is convex in
    ``e^epsilon``. Their dual ``f`` is convex and piecewise linear, and the Gaussian
    trade-off function ``Phi(Phi^-1(1 - a) - mu)`` is convex. So it suffices to compare
    the two at the kinks of ``f``, where they are equal at
    ``mu = Phi^-1(1 - a) - Phi^-1(f(a))``.

    Args:
      step: the step, or a run made by `compose`.
      num_steps: see `jaxdp_episodic.epsilon`.
      method: how delta is computed; see `jaxdp_episodic.delta`.
      smallest_delta: one number in [1e-100, 1).

    Returns:
      float64 of the broadcast shape, >= 0; ``inf`` without noise, and if mu is so large
      (about 16) that float64 rounds delta to 1.

    Raises:
      ValueError: a step without ``num_steps``.

    Reference: Dong, Roth, Su (2022), arXiv:1905.02383, for mu-GDP; Gomez, Kulynych,
    Kaissis, Calmon, Hayes, Balle, Honkela (2025), arXiv:2503.10945, for summarizing a
    curve by one mu.
    """
    floor = _validation.one("smallest_delta", smallest_delta, _checked_floor)
    known = _gaussian_mu(step, num_steps, method)
    if np.all(np.isfinite(known)):
        return known[()]
    depth = min(floor, _SMALLEST_DELTA)
    epsilons, deltas, shape = upper_curve(step, num_steps, method, depth)
    columns = zip(epsilons.T, deltas.T, strict=True)
    mu = np.array([_mu_of(e, d, floor) for e, d in columns])
    return np.minimum(mu.reshape(shape), known)[()]


def _gaussian_mu(step: Any, num_steps: Any, method: str) -> np.ndarray:
    """Mu of the settings whose worst path is a Gaussian, rounded up; else inf."""
    check_method(method)
    runs, shape = checked_runs(step, num_steps)
    least = np.full(shape, np.inf)
    for run in runs:
        shift = run.gaussian_shift() * (1 + _ROUNDING)
        known = ((shift > 0) | run.facts.loses_nothing) & (run.facts.log_kept == 0)
        least = np.minimum(least, np.where(known, shift, np.inf).max(axis=-1))
    return least


def _rates(
    step: Any, false_positive_rate: Any, num_steps: Any, method: str
) -> tuple[Any, Any]:
    """The smallest false negative and the largest true positive rate."""
    alpha = _validation.probability_array("false_positive_rate", false_positive_rate)
    rates = tuple(np.unique(alpha).tolist())
    few = rates if len(rates) <= _FEW_RATES else ()
    epsilons, deltas, shape = upper_curve(step, num_steps, method, _SMALLEST_DELTA, few)
    found = np.empty((2, epsilons.shape[1], alpha.size))
    block = max(1, _BLOCK // len(epsilons))
    for row, (eps, d) in enumerate(zip(epsilons.T, deltas.T, strict=True)):
        for start in range(0, alpha.size, block):
            part = slice(start, start + block)
            found[:, row, part] = attack_rates(
                eps[:, None], d[:, None], alpha.ravel()[part]
            )
    missed, caught = found.reshape(2, *shape, *alpha.shape)
    return missed[()], caught[()]


def attack_rates(
    epsilon: np.ndarray, delta: np.ndarray, alpha: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rates f and 1 - f at alpha, each computed without cancellation."""
    with np.errstate(over="ignore"):
        caught = delta + np.exp(epsilon) * alpha
    shrink = np.exp(-epsilon)
    missed = np.maximum(
        (1 - caught).max(axis=0) - _ROUNDING,
        (shrink * (1 - delta - alpha - _ROUNDING)).max(axis=0) * (1 - _ROUNDING),
    )
    mirrored = -np.expm1(-epsilon) + shrink * (delta + alpha)
    least = np.minimum(caught, mirrored).min(axis=0) * (1 + _ROUNDING)
    return np.maximum(missed, 0.0), np.minimum(least, 1.0)


def upper_curve(step: Any, num_steps: Any, *others: Any) -> Any:
    """Returns `_computed_curve`, cached because several quantities use one curve."""
    check_step(step)
    is_one = num_steps is None or isinstance(num_steps, int | np.integer)
    curve = _remembered_curve if is_one else _computed_curve
    return curve(step, num_steps, *others)


def _computed_curve(
    step: Any,
    num_steps: Any,
    method: str,
    floor: float,
    rates: tuple[float, ...] = (),
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Returns (K, settings) epsilons and *upper bounds* of delta, and the shape.

    Points are denser where an attacker's rates bend; with ``rates`` only where these
    false positive rates need them.
    """
    _, shape = checked_runs(step, num_steps)
    if 0 in shape:
        return np.zeros((1, 0)), np.zeros((1, 0)), shape
    # At larger epsilons delta is negligible and slow to compute.
    run: Any = {"num_steps": num_steps, "method": method}
    end = np.clip(epsilon(step, delta=floor / 100, **run), *_RANGE)
    two = np.multiply.outer([0.1, 0.5], end)
    if np.all(delta(step, epsilon=two, return_info=True, **run)[1].is_certified_bound):
        run["method"] = "pld"  # the same bounds, without failing to be exact first
    epsilons, deltas = np.zeros((2, 0, end.size))
    more = np.multiply.outer(_FIRST_POINTS, end.ravel())
    for _ in range(_ROUNDS):
        answer = upper_delta(step, epsilon=more.reshape(-1, *shape), **run)
        epsilons = np.concatenate([epsilons, more])
        deltas = np.concatenate([deltas, np.reshape(answer, more.shape)])
        order = np.argsort(epsilons, axis=0, kind="stable")
        epsilons = np.take_along_axis(epsilons, order, axis=0)
        # An upper bound at some epsilon holds at every larger epsilon.
        deltas = np.minimum.accumulate(np.take_along_axis(deltas, order, axis=0))
        bends = _bends(epsilons, deltas, floor, np.array(rates))
        # Settings with fewer such intervals divide others as well.
        bent = np.argsort(~bends, axis=0, kind="stable")[: bends.sum(axis=0).max()]
        if not bent.size:
            break
        middles = (epsilons[:-1] + epsilons[1:]) / 2
        more = np.take_along_axis(middles, bent, axis=0)
    return epsilons, deltas, shape


# Specs are immutable and hashed by identity.
_remembered_curve = functools.lru_cache(maxsize=2)(_computed_curve)


def _bends(
    epsilons: np.ndarray, deltas: np.ndarray, floor: float, rates: np.ndarray
) -> np.ndarray:
    """Whether (K - 1, settings) intervals are too long for the attacker's rates."""
    g = np.exp(epsilons)
    width = np.diff(g, axis=0)
    fall = -np.diff(deltas, axis=0)  # divided by width below: minus the slope
    fall = np.divide(fall, width, out=np.zeros_like(width), where=width > 0)
    # `fall` is a false positive rate, here at most the false negative rate
    # 1 - delta - g fall. Errors of delta at close points would look far steeper.
    fall = np.minimum(fall, (1 - deltas[:-1]) / (1 + g[:-1]))
    # Left of 1 the curve is mirrored: h(g) = 1 - g + g h(1/g).
    left = np.concatenate([1 - deltas[:1] - fall[:1], fall[:-1]])
    right = np.concatenate([fall[1:], np.zeros_like(fall[:1])])
    before, after = np.maximum(left - fall, 0.0), np.maximum(fall - right, 0.0)
    total = np.where(before + after > 0, before + after, 1.0)
    gap = before / total * after * width / 4
    caught = deltas[:-1] + g[:-1] * fall
    # caught - fall is the gain over guessing. If it is small, errors are relative to
    # it.
    scale = np.minimum(caught - fall, np.maximum(1 - caught, 1e-12))
    scale = np.where(deltas[1:] > floor, scale, np.minimum(scale, floor))
    allowed = np.minimum(_ABSOLUTE, _RELATIVE * np.maximum(scale, floor))
    bends = (deltas[:-1] > floor) & (gap > allowed)
    if not rates.size:
        return bends
    # An interval may have a lower true positive rate at one of the rates.
    at = rates[:, None, None]
    both = deltas + g * at, 1 - (1 - deltas - at) / g
    best = np.minimum(*both).min(axis=1, keepdims=True)
    ends = [np.minimum(rate[:, :-1], rate[:, 1:]) for rate in both]
    return bends & np.any(np.minimum(*ends) - 4 * gap < best - allowed, axis=0)


def _mu_of(epsilons: np.ndarray, deltas: np.ndarray, least: float = 0.0) -> float:
    """The smallest mu with ``D(mu, .)`` above points of a curve that exceed a delta.

    Rounded up; inf if there is none.
    """
    if deltas[0] <= least:
        return 0.0
    if deltas[-1] > least:
        return math.inf
    used = slice(int(np.argmax(deltas <= least)) + 1)
    g, d = np.exp(epsilons[used]), deltas[used]
    g[1:] = np.maximum(g[1:], math.nextafter(1, 2))  # it may round to 1
    g, d = np.stack((g, d))[:, lower_hull(g, d)]
    alpha = -np.diff(d) / np.diff(g)
    if alpha[-1] < _LEAST_NORMAL:  # underflow
        return math.inf
    found = steepness = 0.0
    if least > 0:
        end = math.log(g[-2] + (d[-2] - least) / alpha[-1]) + _ROUNDING
        found = _largest_mu(end, math.log(least)) * (1 + 2 * _OF_PRICES)
        # If D(found, .) is steeper at the end than a chord, it is steeper before the
        # end as well. As D is above the last chord there, it is above all these chords,
        # so their dual, which extends them beyond the end, need not be checked.
        steepness = 0.5 * math.erfc((end / found + found / 2) / math.sqrt(2))
    # f is symmetric about alpha = f(alpha), which is a kink as well.
    middle = float(np.max((1 - d) / (1 + g))) - _ROUNDING
    kink = (alpha < middle) & (alpha >= steepness * (1 - 1e-6))
    # 1 - f as a sum without cancellation: f itself may round to 1.
    caught = (d[:-1] + g[:-1] * alpha)[kink] * (1 + _ROUNDING)
    alpha, missed = np.append(alpha[kink], middle), np.append(1 - caught, middle)
    missed = np.where(missed < 0.5, missed - _ROUNDING, missed)
    caught = np.append(caught, 1 - middle)
    if np.any(missed <= 0) or np.any(alpha < _LEAST_NORMAL):
        return math.inf
    quantile = NormalDist().inv_cdf  # relative error below 1e-15
    for a, f, c in zip(alpha.tolist(), missed.tolist(), caught.tolist(), strict=True):
        found = max(found, (quantile(c) if f > 0.5 else -quantile(f)) - quantile(a))
    return found * (1 + _OF_PRICES)


def _largest_mu(epsilon: float, log_delta: float) -> float:
    """The largest mu with ``D(mu, epsilon)`` at most delta, rounded down; or inf."""

    def excess(mu: np.ndarray, _: np.ndarray) -> np.ndarray:
        return float64_boundary(log_gaussian_profile)(mu, epsilon) - log_delta

    ends, most = (1e-30, _MOST_MU), np.array([_MOST_MU])
    (found,) = largest_within(excess, most, ends, slope=1.0, tolerance=_OF_PRICES)
    return math.inf if found == _MOST_MU else float(found)


# --- A budget for runs that are designed one after another: mu-GDP with floors ---

# A run with price (mu, floor) has ``delta(eps) <= floor + (1 - floor) D(mu, eps)`` for
# all ``eps >= 0``, D the profile of N(mu, 1) against N(0, 1). Under composition the
# squares of mu add up, and so do the floors.


@dataclass(frozen=True)
class GdpPrice:
    """The price of a run: its share of a `GdpBudget`."""

    mu: float
    floor: float

    def __post_init__(self) -> None:
        for name in ("floor", "mu"):
            value = getattr(self, name)
            if type(value) is not float or not value >= 0:  # books hold thousands
                value = _validation.one(name, value, _validation.nonnegative_array)
                object.__setattr__(self, name, float(value))
        if self.floor >= 1:
            raise ValueError(f"floor must lie in [0, 1), got {self.floor}")
        if not math.isfinite(self.mu):
            raise ValueError(
                f"mu must be finite, got {self.mu}: the run has no mu at "
                f"floor={self.floor:g}, as it has too little noise, or its delta stays "
                "above the floor; try a larger floor"
            )


@dataclass(frozen=True)
class GdpBudget:
    """A total (epsilon, delta), of which ``floors`` is for the floors of the runs."""

    epsilon: float
    delta: float
    floors: float

    def __post_init__(self) -> None:
        amount, share = _validation.positive_array, _validation.open_unit_array
        checks = {"epsilon": amount, "delta": share, "floors": share}
        for name, check in checks.items():
            checked = _validation.one(name, getattr(self, name), check)
            object.__setattr__(self, name, checked)
        if not self.floors < self.delta:
            raise ValueError(
                f"floors must be below delta, {self.delta:g}, got {self.floors:g}"
            )
        _ = self.mu

    @functools.cached_property
    def mu(self) -> float:
        """The largest total mu of all runs, rounded down."""
        target = math.log((self.delta - self.floors) / (1 - self.floors))
        found = _largest_mu(self.epsilon, target - _OF_PRICES)
        if math.isinf(found):
            raise ValueError(
                f"epsilon={self.epsilon:g} at delta={self.delta:g} permits mu > "
                f"{_MOST_MU:g}, which gives no privacy; use a smaller one"
            )
        return found

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
                every = [_mu_above(lost, *one) for one in profiles or ()]
                return max(every, default=math.inf)

            # Certified for every strategy.
            return GdpPrice(float(least_of_theorems(part_of(step), mu_of_path)), lost)
        step = same
    known = _gaussian_mu(step, num_steps, method)
    if known.shape:
        raise ValueError(
            f"a price needs one setting, got settings of shape {known.shape}"
        )
    if math.isfinite(known):
        return GdpPrice(float(known), 0.0)
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
    return GdpPrice(_mu_above(lost, epsilons, deltas), lost)


def _mu_above(floor: float, epsilons: np.ndarray, deltas: np.ndarray) -> float:
    """The mu of a price with this floor."""
    # Slightly less than the floor, to cover rounding.
    given = floor * (1 - _OF_PRICES)
    above = np.maximum(deltas - given, 0.0) / (1 - given) * (1 + _OF_PRICES)
    return _mu_of(epsilons, np.minimum(above, 1.0))


def price_of_rdp(orders: Any, rdp: Any, *, floor: Any) -> GdpPrice:
    """Returns the price of a run from its Rényi DP curve."""
    lost = _validation.one("floor", floor, _checked_floor)
    deltas = np.geomspace(_LARGEST_DELTA, lost * (1 - 2 * _OF_PRICES), _POINTS)
    epsilons = curve_to_epsilon(orders, rdp, delta=deltas)
    least = float(np.min(rdp)) * (1 + _OF_PRICES)
    total_variation = math.sqrt(min(least / 2, -math.expm1(-least)))
    # A larger epsilon is a bound at the same delta, and a larger delta at the same
    # epsilon, so that both may be made monotone.
    epsilons = np.maximum.accumulate(np.append(0.0, epsilons))
    deltas = np.append(min(total_variation * (1 + _OF_PRICES), 1.0), deltas)
    return price_of_curve(epsilons, np.minimum.accumulate(deltas), floor=lost)

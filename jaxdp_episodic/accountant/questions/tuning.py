"""The cost of releasing the best of a random number of private runs.

Reference: Papernot and Steinke (2022), arXiv:2110.03620.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec, numbers
from jaxdp_episodic.accountant.methods.rdp import epsilons_at_orders
from jaxdp_episodic.accountant.questions.api import order_grid

# Largest log(1/gamma), so that gamma is a normal number.
_LARGEST_LOG = 700.0
# Number of bisections of log(1/gamma), to the last digit.
_BISECTIONS = 200
# Largest eta: beyond it the bisection is inexact. The distribution is practically a
# Poisson distribution far below.
_LARGEST_ETA = 1e30
# Largest mean.
_MOST_EXPECTED_RUNS = 1e12
# Largest mean for which a number of runs is drawn; beyond it this takes seconds.
_MOST_DRAWN_RUNS = 1e6

_some_runs = _validation.reals(
    "be > 0 and at most 1e12", lambda a: (a > 0) & (a <= _MOST_EXPECTED_RUNS)
)
_one_run = _validation.reals(
    "be >= 1 and at most 1e12", lambda a: (a >= 1) & (a <= _MOST_EXPECTED_RUNS)
)
_eta = _validation.reals(
    f"be > -1 and at most {_LARGEST_ETA:g}", lambda a: (a > -1) & (a <= _LARGEST_ETA)
)


class PoissonTrials(Spec, kw_only=True):
    """A Poisson number of runs; none with probability exp(-expected_runs)."""

    expected_runs: Annotated[ArrayLike, numbers(_some_runs)]

    @property
    def mean(self) -> np.ndarray:
        """The mean number of runs."""
        return np.asarray(self.expected_runs, np.float64)

    def draw(self, generator: np.random.Generator) -> int:
        """Returns one number of runs; all fields must be scalars."""
        return int(generator.poisson(_validation.single("each field", self.mean)))


class NegativeBinomialTrials(Spec, kw_only=True):
    """A truncated negative binomial number of runs, at least one."""

    expected_runs: Annotated[ArrayLike, numbers(_one_run)]
    eta: Annotated[ArrayLike, numbers(_eta)] = 0.0

    def check_values(self) -> None:
        """Refuses a mean that no distribution with this eta has."""
        reachable = _mean(np.full(self.shape, _LARGEST_LOG), self.eta)
        if np.any(reachable < self.expected_runs):
            raise ValueError(
                f"expected_runs must be at most {float(np.min(reachable)):.3g} with "
                f"eta={self.eta!r}, got {self.expected_runs!r}"
            )

    @functools.cached_property
    def log_inverse_gamma(self) -> np.ndarray:
        """``log(1/gamma)`` of the distribution, >= 0."""
        low, high = np.zeros(self.shape), np.full(self.shape, _LARGEST_LOG)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            within = _mean(middle, self.eta) <= self.expected_runs
            low, high = np.where(within, middle, low), np.where(within, high, middle)
        return np.asarray(low)

    @property
    def mean(self) -> np.ndarray:
        """The mean for this ``log_inverse_gamma``: ``expected_runs`` up to rounding."""
        return _mean(self.log_inverse_gamma, self.eta)

    def draw(self, generator: np.random.Generator) -> int:
        """Returns one number of runs; all fields must be scalars."""
        x = _validation.single("each field", self.log_inverse_gamma)
        eta = float(np.asarray(self.eta))
        if np.any(np.greater(self.expected_runs, _MOST_DRAWN_RUNS)):
            raise ValueError(
                "expected_runs must be at most 1e6 to be drawn, got "
                f"{self.expected_runs!r}"
            )
        ratio = -np.expm1(-x)
        scale = x if eta == 0 else np.expm1(eta * x) / eta
        probability = float(-np.expm1(-x) / scale) if x else 1.0  # of one run
        left, count = generator.random(), 1
        # Smaller probabilities do not change the sum.
        while left >= probability and probability > 1e-300:
            left -= probability
            probability *= ratio * (count + eta) / (count + 1)
            count += 1
        return count


Trials = PoissonTrials | NegativeBinomialTrials


def _mean(x: np.ndarray, eta: ArrayLike) -> np.ndarray:
    """Mean ``eta (1-gamma) / (gamma (1 - gamma^eta))``, including its limits."""
    safe_x = np.maximum(x, 1e-300)
    product = np.asarray(eta, np.float64) * safe_x
    flat = np.abs(product) < 1e-300
    safe = np.where(flat, 1.0, product)
    with np.errstate(over="ignore"):  # inf exceeds the largest mean
        shrink = np.where(flat, 1.0, safe / -np.expm1(-safe))
        return np.expm1(safe_x) / safe_x * shrink


# Rényi orders, dense enough that the best of them gives an epsilon within 0.1 % of that
# of the best real order.
DEFAULT_ORDERS = 1 + np.geomspace(1e-2, 1e5, 400)


def tuned_rdp(trials: Trials, orders: Any, rdp: Any) -> np.ndarray:
    """Returns the Rényi DP curve of releasing the best of a random number of runs."""
    words = "PoissonTrials or NegativeBinomialTrials"
    _validation.instance("trials", trials, Trials, words)
    grid = order_grid(orders)
    curve = _curve(rdp, grid)
    _validation.broadcast_shape(trials=trials, rdp=curve[..., 0])
    mean, t = trials.mean[..., None], grid - 1
    if isinstance(trials, PoissonTrials):
        # Papernot and Steinke (2022), Theorem 6, plus the event of no run. Delta at
        # each of these epsilons by the best order, (..., lambda).
        exponent = t * curve + grid * np.log1p(-1 / grid) - np.log(t)
        largest_epsilon = np.log1p(1 / t)[:, None]
        log_delta = (exponent[..., None, :] - t * largest_epsilon).min(axis=-1)
        # exp rounds to the nearest: round up, and never to 0.
        delta = np.nextafter(np.exp(np.minimum(log_delta, 0.0)), 2.0)
        moment = np.log(mean) + t * (curve + mean * np.minimum(delta, 1.0))
        tuned = np.logaddexp(-mean, moment) / t
    else:
        # Theorem 2, at the best auxiliary order.
        log_inverse_gamma = trials.log_inverse_gamma[..., None]
        price = (1 - 1 / grid) * curve + log_inverse_gamma / grid
        # At auxiliary order 1 the bound does not depend on the curve.
        best = np.minimum(price.min(axis=-1, keepdims=True), log_inverse_gamma)
        eta = np.asarray(trials.eta, np.float64)[..., None]
        tuned = curve + (1 + eta) * best + np.log(mean) / t
    # For each order the smallest value at this or a larger order.
    descending = np.argsort(-grid, kind="stable")
    smallest = np.minimum.accumulate(tuned[..., descending], axis=-1)
    return smallest[..., np.argsort(descending)]


def curve_to_epsilon(orders: Any, rdp: Any, *, delta: Any) -> np.ndarray | np.float64:
    """Returns epsilon of a mechanism with a known Rényi DP curve."""
    grid = order_grid(orders)
    curve = _curve(rdp, grid)
    target = _validation.open_unit_array("delta", delta)
    _validation.broadcast_shape(rdp=curve[..., 0], delta=target)
    values = epsilons_at_orders(curve, grid, np.log(target)[..., None]).min(axis=-1)
    return np.where((curve == 0).all(axis=-1), 0.0, values)[()]


def _curve(rdp: Any, orders: np.ndarray) -> np.ndarray:
    curve = _validation.nonnegative_array("rdp", rdp)
    if curve.shape[-1:] != orders.shape:
        raise ValueError(
            f"rdp must have the {orders.size} orders as its last axis, "
            f"got shape {curve.shape}"
        )
    return curve

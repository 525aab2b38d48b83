"""What choosing the best of several private runs costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.methods.rdp.method import epsilons_at_orders
from jaxdp_episodic.accountant.questions.api import order_grid, rdp
from jaxdp_episodic.accountant.questions.trial_counts import (
    NegativeBinomialTrials,
    PoissonTrials,
    Trials,
)

# Rényi orders, dense enough that the best of them costs less than 0.1 % more than the
# best real order.
DEFAULT_ORDERS = 1 + np.geomspace(1e-2, 1e5, 400)


def tuning_cost(
    step: GaussianStep | ComposedSteps,
    *,
    trials: Trials,
    delta: Any,
    num_steps: Any = None,
    orders: Any = None,
) -> np.ndarray | np.float64:
    """Returns epsilon of releasing the best of a random number of private runs."""
    grid = order_grid(DEFAULT_ORDERS if orders is None else orders)
    curve = run_rdp(step, grid, num_steps=num_steps)
    return curve_to_epsilon(grid, tuned_rdp(trials, grid, curve), delta=delta)


def run_rdp(
    step: GaussianStep | ComposedSteps, orders: np.ndarray, *, num_steps: Any = None
) -> np.ndarray:
    """Returns the Rényi-DP curve of one run, both directions: orders last."""
    if num_steps is None and not isinstance(step, ComposedSteps):
        raise ValueError("num_steps must be a whole number >= 0, got None")
    curve = np.asarray(rdp(step, orders))
    if num_steps is None:
        return curve
    counts = _validation.integer_array("num_steps", num_steps, minimum=0)[..., None]
    # No step loses nothing, also where a single one would lose everything.
    safe = np.where(counts == 0, 0.0, curve)
    return safe * counts


def tuned_rdp(trials: Trials, orders: Any, rdp: Any) -> np.ndarray:
    """Returns the Rényi-DP curve of releasing the best of a random number of runs."""
    if not isinstance(trials, PoissonTrials | NegativeBinomialTrials):
        raise TypeError(
            "trials must be PoissonTrials or NegativeBinomialTrials, "
            f"got {_validation.shown(trials)}"
        )
    grid = order_grid(orders)
    curve = _curve(rdp, grid)
    _validation.broadcast_shape(
        trials=np.empty(trials.shape, np.uint8),
        rdp=np.empty(curve.shape[:-1], np.uint8),
    )
    if isinstance(trials, PoissonTrials):
        tuned = _poisson(trials.mean[..., None], grid, curve)
    else:
        tuned = _negative_binomial(trials, grid, curve)
    return _smallest_of_larger_orders(tuned, grid)


def curve_to_epsilon(orders: Any, rdp: Any, *, delta: Any) -> np.ndarray | np.float64:
    """Returns epsilon of a mechanism that is known by its Rényi-DP at some orders."""
    grid = order_grid(orders)
    curve = _curve(rdp, grid)
    target = _validation.open_unit_array("delta", delta)
    _validation.broadcast_shape(rdp=np.empty(curve.shape[:-1], np.uint8), delta=target)
    values = epsilons_at_orders(curve, grid, np.log(target)[..., None]).min(axis=-1)
    return np.where((curve == 0).all(axis=-1), 0.0, values)[()]


def _negative_binomial(
    trials: NegativeBinomialTrials, orders: np.ndarray, curve: np.ndarray
) -> np.ndarray:
    """Theorem 2, at the best auxiliary order."""
    log_inverse_gamma = trials.log_inverse_gamma[..., None]
    price = (1 - 1 / orders) * curve + log_inverse_gamma / orders
    # At the auxiliary order 1 the curve does not count.
    best = np.minimum(price.min(axis=-1, keepdims=True), log_inverse_gamma)
    eta = np.asarray(trials.eta, np.float64)[..., None]
    return curve + (1 + eta) * best + np.log(trials.mean)[..., None] / (orders - 1)


def _poisson(mean: np.ndarray, orders: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Theorem 6, with the moment of the event that there is no run."""
    t = orders - 1
    largest_epsilon = np.log1p(1 / t)
    # Delta at each of these epsilons, from the best order: (..., lambda).
    exponent = t * curve + orders * np.log1p(-1 / orders) - np.log(t)
    log_delta = (exponent[..., None, :] - t * largest_epsilon[:, None]).min(axis=-1)
    # exp rounds to the nearest: up, and never to 0.
    delta = np.minimum(np.nextafter(np.exp(np.minimum(log_delta, 0.0)), 2.0), 1.0)
    moment = np.log(mean) + t * (curve + mean * delta)
    return np.logaddexp(-mean, moment) / t


def _smallest_of_larger_orders(values: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """At each order, the smallest value at this or a larger order."""
    descending = np.argsort(-orders, kind="stable")
    smallest = np.minimum.accumulate(values[..., descending], axis=-1)
    result = np.empty_like(smallest)
    result[..., descending] = smallest
    return result


def _curve(rdp: Any, orders: np.ndarray) -> np.ndarray:
    curve = _validation.nonnegative_array("rdp", rdp)
    if curve.shape[-1:] != orders.shape:
        raise ValueError(
            f"rdp must have the {orders.size} orders as its last axis, "
            f"got shape {curve.shape}"
        )
    return curve

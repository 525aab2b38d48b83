"""What choosing the best of several private runs costs.

A search trains ``K`` times, each time with hyperparameters drawn afresh from the same
public distribution, and releases the run with the best score, nothing of the others,
and not ``K``. If ``K`` follows one of the distributions of `trial_counts`, the whole
search is private, and not much less so than one run.
"""

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
    """Returns epsilon of releasing the best of a random number of private runs.

    Each run takes ``num_steps`` of ``step``. Choosing hyperparameters at random from a
    public distribution costs nothing, and the score by which runs are compared must be
    a function of what a run releases and of public data: see `tuned_rdp`.

    Args:
      step: the step of a single run, or a run made by `compose`.
      trials: the distribution of the number of runs.
      delta: in (0, 1).
      num_steps: whole number >= 0 of each run; of a composed run as of `epsilon`.
      orders: (A,) orders, each > 1; None: 400 from 1.01 to 100,001. Any grid gives an
        upper bound.

    Returns:
      float64 nats, an *upper bound*, of the broadcast shape of step, ``num_steps``,
      ``delta`` and ``trials``; ``inf`` without noise.

    Raises:
      ValueError: ``num_steps`` not given of a step.

    Reference: see `tuned_rdp` and `curve_to_epsilon`.
    """
    grid = order_grid(DEFAULT_ORDERS if orders is None else orders)
    curve = run_rdp(step, grid, num_steps=num_steps)
    return curve_to_epsilon(grid, tuned_rdp(trials, grid, curve), delta=delta)


def run_rdp(
    step: GaussianStep | ComposedSteps, orders: np.ndarray, *, num_steps: Any = None
) -> np.ndarray:
    """Returns the Rényi-DP curve of one run, both directions: orders last.

    Raises:
      ValueError: ``num_steps`` not given of a step, or out of range.
    """
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
    """Returns the Rényi-DP curve of releasing the best of a random number of runs.

    Let ``Q`` be ``(lambda, r(lambda))``-RDP for all the given orders, in both
    directions, its outputs totally ordered. ``A`` draws ``K``, runs ``Q`` that often
    with fresh randomness, and outputs the best of the outputs only. Then ``A`` is
    ``(lambda, r'(lambda))``-RDP with

    * `NegativeBinomialTrials` (Theorem 2): for every ``mu >= 1`` at which ``Q`` is
      ``(mu, r(mu))``-RDP,
      ``r' = r(lambda) + (1 + eta)(1 - 1/mu) r(mu) + (1 + eta) log(1/gamma)/mu
      + log(E[K])/(lambda - 1)``. The best ``mu`` among the orders and 1 is taken; it
      does not depend on ``lambda``.
    * `PoissonTrials` (Theorem 6): if ``Q`` is ``(e, d)``-DP with
      ``e = log(1 + 1/(lambda - 1))``, then ``r' = r(lambda) + E[K] d
      + log(E[K])/(lambda - 1)``. Here ``d`` comes from the curve. Where ``K = 0`` the
      output is a public one; that event adds ``exp(-E[K])`` to the moment
      ``exp((lambda - 1) r')``, without which the bound would fall below zero at means
      below 1.

    A Rényi divergence grows with its order, so each value is also a bound for all
    smaller orders, and the smallest such bound is taken.

    What the theorems need of a search: runs are independent given the data, with the
    same distribution (hyperparameters are drawn afresh from a fixed public
    distribution, not adapted to earlier runs); the score is a function of a run's
    output, which here is everything a run releases, and of public data; of runs with
    equal scores one is chosen without looking at anything else. Neither ``K`` nor
    another run is released.

    Args:
      trials: the distribution of the number of runs; its fields broadcast with the
        curves.
      orders: (A,) orders, each > 1 and finite.
      rdp: (..., A) Rényi-DP of one run at these orders, >= 0, nats.

    Returns:
      float64 nats of shape ``broadcast(trials.shape, rdp.shape[:-1]) + (A,)``, an
      *upper bound*.

    Raises:
      ValueError: orders or values out of range, or shapes that do not fit.

    Reference: Papernot and Steinke (2022), arXiv:2110.03620v2, Theorems 2 and 6.
    """
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
    """Returns epsilon of a mechanism that is known by its Rényi-DP at some orders.

    Args:
      orders: (A,) orders, each > 1 and finite.
      rdp: (..., A) Rényi-DP at these orders, >= 0, nats; ``inf`` where unknown.
      delta: in (0, 1); broadcasts with the leading axes of ``rdp``.

    Returns:
      float64 nats, an *upper bound*; ``inf`` if the curve is infinite everywhere.

    Raises:
      ValueError: a value out of range, or shapes that do not fit.

    Reference: Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Proposition 12.
    """
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

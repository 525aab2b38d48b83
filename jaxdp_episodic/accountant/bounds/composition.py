"""Composition of (epsilon, delta) guarantees: naive, strong, optimal.

The accountant composes whole privacy profiles; these functions know only two numbers of
a step, and are for comparison. They take

* ``epsilon`` >= 0 and ``delta`` in [0, 1] of one step, scalars or arrays,
* ``num_steps`` k, a whole number >= 0,
* ``slack`` in (0, 1), the part of the total delta that is spent on composition,

and return float64 of the broadcast shape. All results are *upper bounds*.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic.accountant.bounds.common import checked, smallest_epsilon
from jaxdp_episodic.accountant.numerics.binomial import (
    log_binomial_mass,
    log_binomial_tail,
    tail_over_mass,
)

# Factor that exceeds the rounding errors of a sum of a few products.
_ROUND_UP = 1 + 1e-14
# Log of the odds of a true answer above which they are scaled, as e^709 overflows.
_LARGEST_LOG_ODDS = 600.0
# Below it the rounding error of a product may not be a normal float.
_DEKKER_UNDERFLOWS = 1e-290


def compose_naive(epsilon: Any, delta: Any, *, num_steps: Any) -> tuple[Any, Any]:
    """Returns ``(k epsilon, k delta)``, the total of ``num_steps`` adaptive steps.

    Reference: Dwork, Kenthapadi, McSherry, Mironov and Naor (2006), "Our data,
    ourselves", Theorem 1.
    """
    eps, step_delta, k = checked(epsilon=epsilon, delta=delta, num_steps=num_steps)
    total, price = _product_up(k, eps), _product_up(k, step_delta)
    return total[()], np.minimum(price, 1.0)[()]


def compose_strong(
    epsilon: Any, delta: Any, *, num_steps: Any, slack: Any
) -> tuple[Any, Any]:
    """Returns (epsilon, delta) of strong composition, as first proved.

        eps' = eps sqrt(2 k log(1/slack)) + k eps (e^eps - 1)
        delta' = k delta + slack

    Epsilon may exceed that of `compose_naive`; it is ``inf`` if it overflows.

    Reference: Dwork, Rothblum and Vadhan (2010), "Boosting and differential privacy",
    Theorem III.3.
    """
    eps, step_delta, k, extra = checked(
        epsilon=epsilon, delta=delta, num_steps=num_steps, slack=slack
    )
    with np.errstate(over="ignore", invalid="ignore"):
        total = eps * np.sqrt(-2 * k * np.log(extra)) + k * eps * np.expm1(eps)
    total = np.where((k > 0) & (eps > 0), total * _ROUND_UP, 0.0)
    price = np.nextafter(_product_up(k, step_delta) + extra, 2.0)
    return total[()], np.minimum(price, 1.0)[()]


def compose_closed_form(
    epsilon: Any, delta: Any, *, num_steps: Any, slack: Any
) -> tuple[Any, Any]:
    """Returns (epsilon, delta) of strong composition, the smallest of three forms.

        eps' = min{ k eps,   a + eps sqrt(2k log(e + sqrt(k eps²)/slack)),
                    a + eps sqrt(2k log(1/slack)) },   a = k eps (e^eps - 1)/(e^eps + 1)
        delta' = 1 - (1 - delta)^k (1 - slack)

    Reference: Kairouz, Oh and Viswanath (2015), "The composition theorem for
    differential privacy", arXiv:1311.0776, Theorem 3.4.
    """
    eps, step_delta, k, extra = checked(
        epsilon=epsilon, delta=delta, num_steps=num_steps, slack=slack
    )
    finite = np.isfinite(eps)
    e = np.where(finite, eps, 0.0)
    drift = k * e * np.tanh(e / 2)
    gentle = np.log(np.e + np.sqrt(k) * e / extra)
    least = np.minimum(gentle, -np.log(extra))
    strong = (drift + e * np.sqrt(2 * k * least)) * _ROUND_UP
    total = np.minimum(_product_up(k, e), strong)
    total = np.where(finite | (k == 0), total, np.inf)
    return total[()], _total_delta(step_delta, k, extra)[()]


def compose_optimal_delta(
    epsilon: Any, delta: Any, *, num_steps: Any, total_epsilon: Any
) -> Any:
    """Returns the smallest total delta of ``num_steps`` (epsilon, delta)-DP steps.

        1 - (1 - delta)^k (1 - sum_j C(k,j) [e^{j eps} - e^{eps'} e^{(k-j) eps}]_+
                               / (1 + e^eps)^k)

    No step is worse than randomized response that reveals its input with probability
    ``delta``; the sum is the hockey-stick divergence of k such responses. It is
    computed as a difference of two binomial tails, at a cost that does not grow with k.

    ``total_epsilon`` is eps' >= 0 in nats. *Exact* given this guarantee of each step
    (some adaptive steps attain it), rounded up: by less than 1e-9 relative if delta is
    below 0.1, by more if the best event is near the mean.

    Reference: Kairouz, Oh and Viswanath (2015), arXiv:1311.0776, Theorem 3.3 (stated
    for a grid of eps'; between the grid points the same proof holds).
    """
    eps, step_delta, k, target = checked(
        epsilon=epsilon, delta=delta, num_steps=num_steps, total_epsilon=total_epsilon
    )
    pure = np.exp(_log_pure_delta(eps, k, target))
    pure = np.where(pure > 0, np.nextafter(pure, 2.0), 0.0)
    return _total_delta(step_delta, k, np.minimum(pure, 1.0))[()]


def compose_optimal_epsilon(
    epsilon: Any, delta: Any, *, num_steps: Any, total_delta: Any
) -> Any:
    """Returns the smallest total epsilon of ``num_steps`` (epsilon, delta)-DP steps.

    It is the smallest epsilon found, within 1e-7 relative, at which
    `compose_optimal_delta` does not exceed ``total_delta``, in [0, 1). ``inf`` if the
    deltas of the steps alone exceed it.

    Reference: Kairouz, Oh and Viswanath (2015), arXiv:1311.0776, Theorem 3.3.
    """
    eps, step_delta, k, total = checked(
        epsilon=epsilon, delta=delta, num_steps=num_steps, total_delta=total_delta
    )
    # The delta that the steps' own deltas leave: 1 - (1 - total) / (1 - delta)^k.
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(k > 0, k * np.log1p(-step_delta), 0.0)
        left = -np.expm1(np.log1p(-total) - kept)
        left = np.where((k == 0) | (step_delta == 0), total, left * (1 - 1e-12))
        log_left = np.where(left > 0, np.log(left), -np.inf)
        most = np.where(k > 0, k * eps, 0.0) * _ROUND_UP
    # If less than nothing is left, no epsilon is enough.
    largest = np.where((left < 0) & (k > 0), np.inf, most)
    flat_eps, flat_k = eps.ravel(), k.ravel()

    def log_delta(candidate: np.ndarray, index: np.ndarray) -> np.ndarray:
        return _log_pure_delta(flat_eps[index], flat_k[index], candidate)

    found = smallest_epsilon(log_delta, log_left.ravel(), largest.ravel())
    return found.reshape(largest.shape)[()]


def _product_up(k: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns ``k x``, rounded up unless it is exact; 0 if k is 0, even for x = inf."""
    times = np.where(k > 0, k, 1.0)
    value, error = _product(times, x)
    # Rounded up in any case if the error itself may underflow.
    inexact = (error > 0) | ((value < _DEKKER_UNDERFLOWS) & (times > 1) & (x > 0))
    value = np.where(inexact, np.nextafter(value, np.inf), value)
    return np.where(k > 0, value, 0.0)


def _product(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``x y`` rounded, and the exact product less that (Dekker, 1971)."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = x * y
        (a, b), (c, d) = (_halves(factor) for factor in (x, y))
        return value, ((a * c - value) + a * d + b * c) + b * d


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns two floats of at most 26 bits each whose sum is x (Veltkamp)."""
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def _total_delta(delta: np.ndarray, k: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """``1 - (1 - delta)^k (1 - extra)``, without cancellation and rounded up."""
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(k > 0, k * np.log1p(-delta), 0.0) + np.log1p(-extra)
    return np.minimum(-np.expm1(kept) * (1 + 1e-15), 1.0)


def _log_pure_delta(eps: np.ndarray, k: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the log of delta of k randomized responses, rounded up."""
    shown = (k > 0) & np.isinf(eps) & np.isfinite(target)
    some = (k > 0) & (eps > 0) & np.isfinite(eps) & np.isfinite(target)
    e, n = np.where(some, eps, 1.0), np.where(some, k, 1.0)
    goal = np.where(some, target, 0.0)
    hidden = some & (_above_product(goal, n, e) < 0)
    # The event: more than (n + eps'/eps) / 2 of the n answers are true. False answers
    # are counted, since they may be very rare.
    t = np.clip(np.floor((n + goal / e) / 2) + 1, 1.0, n)
    lies, near = n - t, np.minimum(e, _LARGEST_LOG_ODDS)
    odds = np.exp(-near)
    lie = odds / (1 + odds)
    mass = log_binomial_mass(lies, n, lie) - lies * (e - near)
    ratio = tail_over_mass(t, n, 1 / odds, side="upper")
    with np.errstate(divide="ignore", invalid="ignore"):
        most_are_true = log_binomial_tail(lies + 1, n, lie, side="lower")
        above = np.where(
            lies < n * lie,
            np.minimum(mass + np.log(ratio), 0.0),
            np.log1p(-np.exp(np.minimum(most_are_true, 0.0))),
        )
        lower = np.log(tail_over_mass(t, n, odds, side="lower"))
        below = _above_product(goal, 2 * t - n, e) + lower
        share = -np.expm1(np.minimum(mass + below - above, 0.0)) + 1e-13
        # If all answers must be true, there is one outcome, and nothing cancels.
        share = np.where(lies == 0, -np.expm1(below), share)
        above = np.where(lies == 0, mass, above)
        value = above + np.log(share) + 1e-10
    value = np.where(hidden, np.minimum(value, 0.0), -np.inf)
    return np.where(shown, 0.0, value)


def _above_product(goal: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns ``goal - x y``, rounded once if they are nearly equal."""
    value, error = _product(x, y)
    with np.errstate(invalid="ignore"):
        exact = (goal - value) - error
    # If the product's error is not finite, the plain difference is accurate enough.
    return np.where(np.isfinite(exact), exact, goal - value)

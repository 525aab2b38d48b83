"""Composition of (epsilon, delta) guarantees: naive, strong, optimal.

The accountant composes whole privacy profiles; these functions know only two numbers of
a step, and are for comparison: ``epsilon`` >= 0 and ``delta`` in [0, 1], scalars or
arrays. ``num_steps`` is k, a whole number >= 0. ``slack``, in (0, 1), is the part of
the total delta that is spent on composition. All results are float64 of the broadcast
shape, and *upper bounds*.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.bounds.common import checked
from jaxdp_episodic.accountant.describe.releases import ApproximateDP
from jaxdp_episodic.accountant.questions import api

# Factor that exceeds the rounding errors of a sum of a few products.
_ROUND_UP = 1 + 1e-14


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
    e = np.where(np.isfinite(eps), eps, 0.0)
    gentle = np.log(np.e + np.sqrt(k) * e / extra)
    spread = e * np.sqrt(2 * k * np.minimum(gentle, -np.log(extra)))
    strong = (k * e * np.tanh(e / 2) + spread) * _ROUND_UP
    total = np.minimum(_product_up(k, e), strong)
    total = np.where(np.isfinite(eps) | (k == 0), total, np.inf)
    # 1 - (1 - delta)^k (1 - slack), without cancellation and rounded up.
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(k > 0, k * np.log1p(-step_delta), 0.0) + np.log1p(-extra)
    price = np.minimum(-np.expm1(kept) * (1 + 1e-15), 1.0)
    return total[()], price[()]


def compose_optimal_delta(
    epsilon: Any, delta: Any, *, num_steps: Any, total_epsilon: Any
) -> Any:
    """Returns the smallest total delta of ``num_steps`` (epsilon, delta)-DP steps.

        1 - (1 - delta)^k (1 - sum_j C(k,j) [e^{j eps} - e^{eps'} e^{(k-j) eps}]_+
                               / (1 + e^eps)^k)

    No step is worse than randomized response that reveals its input with probability
    ``delta``: this is `jaxdp_episodic.delta` of k `ApproximateDP` releases, certified,
    usually within 1e-6 relative. Some adaptive steps attain the smallest one.

    ``total_epsilon`` is eps' >= 0 in nats.

    Reference: Kairouz, Oh and Viswanath (2015), arXiv:1311.0776, Theorem 3.3 (stated
    for a grid of eps'; between the grid points the same proof holds).
    """
    eps, step_delta, k, target = checked(
        epsilon=epsilon, delta=delta, num_steps=num_steps, total_epsilon=total_epsilon
    )
    step = ApproximateDP(eps, step_delta)
    return api.delta(step, num_steps=k, epsilon=target, method="pld")


def compose_optimal_epsilon(
    epsilon: Any, delta: Any, *, num_steps: Any, total_delta: Any
) -> Any:
    """Returns the smallest total epsilon of ``num_steps`` (epsilon, delta)-DP steps.

    Computed like `compose_optimal_delta`, for ``total_delta`` in [0, 1). ``inf`` if the
    deltas of the steps alone exceed it.

    Reference: Kairouz, Oh and Viswanath (2015), arXiv:1311.0776, Theorem 3.3.
    """
    eps, step_delta, k, total = checked(
        epsilon=epsilon, delta=delta, num_steps=num_steps, total_delta=total_delta
    )
    step = ApproximateDP(eps, step_delta)
    found = api.epsilon(step, num_steps=k, delta=total, method="pld")
    return np.where(np.isinf(found), found, np.minimum(found, _product_up(k, eps)))[()]


@functools.partial(np.vectorize, otypes=[np.float64])
def _product_up(k: float, x: float) -> float:
    """Returns ``k x``, rounded up unless it is exact; 0 if k is 0, even for x = inf."""
    if k == 0 or x == math.inf:
        return x if k else 0.0
    value, exact = k * x, Fraction(k) * Fraction(x)
    is_below = value < math.inf and Fraction(value) < exact
    return math.nextafter(value, math.inf) if is_below else value

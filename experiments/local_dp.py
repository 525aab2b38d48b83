"""Counting ones with a curator, without one, and with a shuffler: three models.

Each of ``n`` users has a bit:

* *Central*: the sum plus Laplace noise of scale ``1 / eps``.
* *Local*: everybody answers by randomized response; with ``Y`` answers of one the
  unbiased estimate is ``(Y - n p) / (q - p)``.
* *Shuffled*: local answers at the larger local epsilon that shuffling reduces to
  ``eps``.

`figures` draws their errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic.bounds import shuffled_epsilon

# Local epsilon above which shuffling is left out: its answers are almost all true.
LARGEST_LOCAL_EPSILON = 30.0
# Halvings of the range of local epsilons, on a logarithmic scale.
BISECTIONS = 18


def central_sum_error(epsilon: Any) -> Any:
    """Standard deviation of the central sum under ``replace_one``: ``sqrt(2) / eps``.

    In bits; *exact*, ``inf`` at epsilon 0.
    """
    with np.errstate(divide="ignore"):
        return (np.sqrt(2.0) / np.asarray(epsilon, np.float64))[()]


def local_sum_error(local_epsilon: Any, *, num_users: Any) -> Any:
    """Standard deviation of the local sum: ``sqrt(n) / (2 sinh(eps / 2))``.

    The variance of an answer, ``q p = 1/4 - ...``, over ``(q - p)²``; the same for all
    data. In bits; *exact*, ``inf`` at epsilon 0.
    """
    eps, n = np.asarray(local_epsilon, np.float64), np.asarray(num_users)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.where(n > 0, np.sqrt(n) * (0.5 / np.sinh(eps / 2)), 0.0)[()]


def simulate_sums(
    *,
    num_ones: int,
    num_users: int,
    epsilon: float,
    model: str,
    num_trials: int,
    seed: int,
) -> np.ndarray:
    """(num_trials,) unbiased estimates of the number of ones in independent trials.

    ``model`` is "central" (epsilon of the sum) or "local" (epsilon of every user).
    """
    rng = np.random.default_rng(seed)
    if model == "central":
        return num_ones + rng.laplace(scale=1 / epsilon, size=num_trials)
    truth, lie = 1 / (1 + np.exp(-epsilon)), np.exp(-epsilon) / (1 + np.exp(-epsilon))
    zeros = num_users - num_ones
    answers = rng.binomial(num_ones, truth, num_trials)
    answers = answers + rng.binomial(zeros, lie, num_trials)
    return (answers - num_users * lie) / np.tanh(epsilon / 2)


def local_epsilon_for_shuffled(
    epsilon: Any, *, num_users: Any, delta: Any, kind: str = "randomized_response"
) -> Any:
    """Largest local epsilon that shuffling brings down to ``epsilon`` at ``delta``.

    Found by bisection: the *upper bound* of ``kind`` was seen to stay within
    ``epsilon`` (> 0). At least epsilon, at most 30, within 1e-4 relative.
    """
    eps, n, small = np.broadcast_arrays(
        np.asarray(epsilon, np.float64), np.asarray(num_users), delta
    )
    low, high = (
        np.minimum(eps, LARGEST_LOCAL_EPSILON),
        np.full(eps.shape, LARGEST_LOCAL_EPSILON),
    )
    for _ in range(BISECTIONS):
        middle = np.sqrt(low * high)
        found = shuffled_epsilon(middle, num_users=n, delta=small, kind=kind)
        fits = np.asarray(found) <= eps
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return low[()]

"""Counting ones: with a trusted curator, without, and with a shuffler.

``n`` users hold a bit each; estimated is how many are ones.

* *Central*: the sum plus Laplace noise of scale ``1 / eps``.
* *Local*: everybody answers by randomized response; the number ``Y`` of ones answered
  gives the unbiased ``(Y - n p) / (q - p)``, whose error is of order ``sqrt(n) / eps``.
* *Shuffled*: the local answers, at the larger local epsilon that shuffling brings back
  to ``eps``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.shuffling import KINDS, shuffled_epsilon
from jaxdp_episodic.accountant.numerics.roots import largest_within

# Who adds the noise: a curator, or every user.
MODELS = ("central", "local")
# Local epsilon above which shuffling is not asked for: its answers are all but true.
_LARGEST_LOCAL_EPSILON = 30.0


def central_sum_error(epsilon: Any) -> Any:
    """Standard deviation of the central sum: ``sqrt(2) / eps``.

    At epsilon >= 0 in nats, scalar or array, under ``replace_one`` (a bit is changed).
    In bits; *exact*, ``inf`` at 0.
    """
    eps = _validation.nonnegative_array("epsilon", epsilon)
    with np.errstate(divide="ignore"):
        return (np.sqrt(2.0) / eps)[()]


def local_sum_error(local_epsilon: Any, *, num_users: Any) -> Any:
    """Standard deviation of the local sum: ``sqrt(n) / (2 sinh(eps / 2))``.

    The variance of an answer, ``q p = 1/4 - ...``, over ``(q - p)²``; the same for all
    data. ``local_epsilon`` >= 0 in nats and the whole number ``num_users`` >= 0
    broadcast. In bits; *exact*, ``inf`` at epsilon 0.
    """
    eps = _validation.nonnegative_array("local_epsilon", local_epsilon)
    n = _validation.integer_array("num_users", num_users, minimum=0)
    _validation.broadcast_shape(local_epsilon=eps, num_users=n)
    with np.errstate(divide="ignore", over="ignore"):
        single = np.where(eps > 0, 0.5 / np.sinh(eps / 2), np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, np.sqrt(n) * single, 0.0)[()]


def simulate_sums(
    *,
    num_ones: int,
    num_users: int,
    epsilon: float,
    model: str,
    num_trials: int,
    seed: int,
) -> np.ndarray:
    """Estimates of the number of ones in independent trials.

    Args:
      num_ones: how many users hold a one, in [0, num_users].
      num_users: n, whole number >= 1.
      epsilon: > 0 and finite: central, or local of every user.
      model: "central" or "local".
      num_trials: whole number >= 0.
      seed: whole number >= 0; the same seed gives the same estimates.

    Returns:
      (num_trials,) float64, unbiased.
    """
    _validation.choice("model", model, MODELS)
    n = int(_validation.integer_array("num_users", num_users, minimum=1))
    ones = int(_validation.integer_array("num_ones", num_ones, minimum=0))
    trials = int(_validation.integer_array("num_trials", num_trials, minimum=0))
    start = int(_validation.integer_array("seed", seed, minimum=0))
    eps = float(_validation.positive_array("epsilon", epsilon))
    if ones > n:
        raise ValueError(f"num_ones must be at most num_users = {n}, got {ones}")
    rng = np.random.default_rng(start)
    if model == "central":
        return ones + rng.laplace(scale=1 / eps, size=trials)
    truth, lie = 1 / (1 + np.exp(-eps)), np.exp(-eps) / (1 + np.exp(-eps))
    answers = rng.binomial(ones, truth, trials) + rng.binomial(n - ones, lie, trials)
    return (answers - n * lie) / np.tanh(eps / 2)


def local_epsilon_for_shuffled(
    epsilon: Any, *, num_users: Any, delta: Any, kind: str = "randomized_response"
) -> Any:
    """Largest local epsilon that shuffling brings down to ``epsilon`` at ``delta``.

    Args:
      epsilon: of the shuffled answers, > 0 and finite, nats, scalar or array.
      num_users: n, whole number >= 1.
      delta: in (0, 1).
      kind: the bound, as in `shuffled_delta`; "lower" is refused.

    Returns:
      float64 nats of the broadcast shape, at least epsilon and at most 30, rounded
      down by less than 1e-4 relative: a local epsilon whose *upper bound* was seen to
      stay within ``epsilon``.

    Raises:
      ValueError: a kind that is no upper bound.
    """
    _validation.choice("kind", kind, tuple(k for k in KINDS if k != "lower"))
    eps = _validation.positive_array("epsilon", epsilon)
    n = _validation.integer_array("num_users", num_users, minimum=1)
    small = _validation.open_unit_array("delta", delta)
    shape = _validation.broadcast_shape(epsilon=eps, num_users=n, delta=small)
    eps, n, small = (np.broadcast_to(a, shape).ravel() for a in (eps, n, small))

    def excess(local: np.ndarray, index: np.ndarray) -> np.ndarray:
        found = shuffled_epsilon(
            local, num_users=n[index], delta=small[index], kind=kind
        )
        return np.asarray(found) / eps[index] - 1

    high = np.full(eps.shape, _LARGEST_LOCAL_EPSILON)
    fits = excess(high, np.arange(eps.size)) <= 0
    low = np.where(fits, high, np.minimum(eps, high))
    result = largest_within(excess, low, np.where(fits, 0.0, high), tolerance=1e-4)
    return result.reshape(shape)[()]

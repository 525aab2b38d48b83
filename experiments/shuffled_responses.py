"""The exact delta of shuffled binary randomized response, at given data.

`jaxdp_episodic.bounds.shuffled_delta` bounds delta as if the output revealed which
messages are clones. The real output is the number of ones. For given data its
distribution is known, and so is the best event.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.common import checked
from jaxdp_episodic.accountant.bounds.shuffling import answers, two_values
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_mass

# Users up to which all data sets are tried: as many convolutions.
_MOST_ENUMERATED = 2_000
# Users up to which one data set is: a convolution of as many terms.
_MOST_CONVOLVED = 20_000


def exact_randomized_response_delta(
    local_epsilon: Any, *, num_users: Any, epsilon: Any, num_other_ones: Any = None
) -> Any:
    """Exact delta of shuffled binary randomized response, at one data set or the worst.

    The shuffled output is the number of ones: ``Binomial(k, q) + Binomial(n-1-k, p)``
    of the ``num_other_ones`` = k of the others who hold a one and of the rest, moved by
    the differing user's answer. Without k the largest delta over all k, which need not
    be attained where the others agree. *Exact* up to 1e-9 relative (and 1e-300
    absolute), the larger of both directions, for at most 20,000 users (2,000 without k;
    any number if k is 0 or n - 1) and eps0 <= 300. Arguments broadcast.

    Raises:
      NotImplementedError: too many users; names the bound that covers them.
    """
    eps0, n, eps = checked(
        local_epsilon__limited=local_epsilon, num_users=num_users, epsilon=epsilon
    )
    if num_other_ones is None:
        ones = None
        _check_users(n, _MOST_ENUMERATED, "num_other_ones=None")
    else:
        ones = _validation.integer_array("num_other_ones", num_other_ones, minimum=0)
        shape = _validation.broadcast_shape(num_users=n, num_other_ones=ones)
        eps0, n, eps, ones = (np.broadcast_to(a, shape) for a in (eps0, n, eps, ones))
        if np.any(ones >= n):
            raise ValueError("num_other_ones must be at most num_users - 1")
        _check_users(
            n[(ones > 0) & (ones < n - 1)], _MOST_CONVOLVED, "a mixed data set"
        )
    result = np.empty(eps0.shape)
    for i in np.ndindex(eps0.shape):
        counts = range(int(n[i])) if ones is None else (int(ones[i]),)
        result[i] = max(
            _counted(float(eps0[i]), int(n[i]), float(eps[i]), k) for k in counts
        )
    return result[()]


def _check_users(n: np.ndarray, most: int, what: str) -> None:
    if np.any(n > most):
        raise NotImplementedError(
            f"{what} with num_users={n.max():g}: enumerated up to {most:,} users; "
            "covered at any number: shuffled_delta(kind='randomized_response'), an "
            "upper bound, or num_other_ones=0"
        )


def _counted(eps0: float, n: int, eps: float, k: int) -> float:
    """Exact delta for k ones among the others."""
    if eps >= eps0:
        return 0.0
    if k in (0, n - 1):
        # The roles of the bits exchanged is the other direction.
        value = two_values(*(np.array(float(a)) for a in (eps0, n, eps)), side="upper")
        return float(np.exp(value))
    own, cross = (float(a) for a in answers(np.array(eps0)))
    first = np.exp(log_binomial_mass(np.arange(k + 1.0), np.array(k), np.array(own)))
    others = n - 1 - k
    second = log_binomial_mass(
        np.arange(others + 1.0), np.array(others), np.array(cross)
    )
    mass = np.convolve(first, np.exp(second))
    here, there = np.append(mass, 0.0), np.append(0.0, mass)  # answer 0, answer 1
    one, zero = own * there + cross * here, cross * there + own * here
    g = np.exp(eps)
    return max(
        float(np.maximum(a - g * b, 0.0).sum()) for a, b in ((one, zero), (zero, one))
    )

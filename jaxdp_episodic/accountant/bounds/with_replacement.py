"""Subsampling with replacement, where one unit may be drawn several times.

A unit drawn k times is k units that differ: what is needed of the mechanism is its
*group* profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.approximate_dp import (
    Profile,
    checked_delta,
    finite_epsilon,
    read_profile,
    unamplified_epsilon,
)
from jaxdp_episodic.accountant.bounds.mechanisms import Gaussian, Laplace, Mechanism
from jaxdp_episodic.accountant.numerics.binomial import (
    log_binomial_mass,
    log_binomial_tail,
)

GroupProfile = Callable[[int, np.ndarray], Any]
# -log of the chance of the multiplicities that are charged in full.
_CUT_EXPONENT = 100.0
# Multiplicities that are summed, at most: some seconds.
_MOST_MULTIPLICITIES = 100_000


def delta_with_replacement_subsampled(
    mechanism: Profile,
    *,
    size: int,
    population: int,
    epsilon: Any,
    group_profile: GroupProfile | None = None,
) -> Any:
    """Profile of a mechanism on m draws with replacement.

    With ``r = 1 - (1 - 1/n)^m`` and ``delta_k`` the profile when k units are replaced,

        delta'(eps') = sum_{k=1..m} C(m,k) (1/n)^k (1 - 1/n)^{m-k} delta_k(eps).

    Assumes: profiles under ``replace_one``, for which the result holds.

    Args:
      mechanism: as in `approximate_dp`.
      size: m, whole number >= 0.
      population: n, whole number >= 1.
      epsilon: eps', >= 0 and finite, nats, scalar or array.
      group_profile: from (k, epsilons) to the delta of replacing k units. Default: the
        exact one for Gaussian and Laplace noise, which is that of k times the
        sensitivity; else `group_delta`.

    Returns:
      float64 in [0, 1] of epsilon's shape; an *upper bound*. Multiplicities of chance
      below e^-100 are charged in full.

    Raises:
      ValueError: a mechanism of more than one setting.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 10.
    """
    m = int(_validation.integer_array("size", size, minimum=0))
    n = int(_validation.integer_array("population", population, minimum=1))
    target = finite_epsilon(epsilon)
    if isinstance(mechanism, Mechanism) and mechanism.shape:
        raise ValueError(
            f"mechanism must be one setting, got one of shape {mechanism.shape}"
        )
    if m == 0:
        return np.zeros(target.shape)[()]
    rate = 1.0 if n == 1 else -np.expm1(m * np.log1p(-1 / n))
    inner = np.asarray(unamplified_epsilon(target, rate=rate))
    grouped = group_profile or _default_group_profile(mechanism)
    first = last = m  # of one unit all draws are its own
    if n > 1:
        mean, third = m / n, _CUT_EXPONENT / 3
        most = third + np.sqrt(third**2 + 2 * _CUT_EXPONENT * mean)  # Bernstein
        first, last = 1, int(min(m, np.ceil(mean + most)))
    if last - first > _MOST_MULTIPLICITIES:
        raise ValueError(
            f"size must be at most about {_MOST_MULTIPLICITIES:,} times population"
        )
    total = np.zeros(target.shape)
    for k in range(first, last + 1):
        chance = np.exp(log_binomial_mass(np.array(k), np.array(m), np.array(1 / n)))
        total = total + chance * checked_delta(grouped(k, inner), inner.shape)
    if last < m:
        args = np.array(last + 1), np.array(m), np.array(1 / n)
        total = total + np.exp(log_binomial_tail(*args, side="upper"))
    return np.minimum(total * (1 + 1e-10), 1.0)[()]


def group_delta(mechanism: Profile, *, group_size: Any, epsilon: Any) -> Any:
    """Delta when ``k`` units differ, from the profile for one.

        delta_k(eps) <= (e^eps - 1) / (e^{eps/k} - 1) delta(eps / k)

    Of whole k >= 1 and finite epsilon >= 0; an *upper bound*, at most 1.

    Reference: Vadhan (2017), "The complexity of differential privacy", Lemma 2.2, as
    used by Balle, Barthe and Gaboardi (2018), Section 5.
    """
    k = _validation.integer_array("group_size", group_size, minimum=1)
    eps = finite_epsilon(epsilon)
    shape = _validation.broadcast_shape(group_size=k, epsilon=eps)
    one = np.broadcast_to(eps / k, shape)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # sum_{i<k} e^{i eps/k}; k at epsilon 0.
        chain = np.where(one > 0, np.exp(eps - one) * np.expm1(-eps), -1.0)
        chain = np.where(one > 0, chain / np.expm1(-one), k)
    delta = read_profile(mechanism, one)
    with np.errstate(invalid="ignore"):
        product = np.where(delta > 0, chain * delta * (1 + 1e-15), 0.0)
    return np.minimum(product, 1.0)[()]


def _default_group_profile(mechanism: Profile) -> GroupProfile:
    """Noise of k times the sensitivity where that is known, else the general bound."""
    if isinstance(mechanism, Gaussian | Laplace):
        (field,) = dataclasses.fields(mechanism)
        noise = getattr(mechanism, field.name)
        kind = type(mechanism)
        return lambda k, epsilon: kind(noise / k).delta(epsilon)
    return lambda k, epsilon: group_delta(mechanism, group_size=k, epsilon=epsilon)

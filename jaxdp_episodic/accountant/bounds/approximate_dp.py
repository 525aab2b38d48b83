"""Amplification by subsampling of (epsilon, delta) guarantees and privacy profiles.

All follow from advanced joint convexity (docs/amplification.md). With several sampling
stages the product of their rates is not always the rate: see docs/theory.md, "Why the
product rate alone is wrong".

Arguments may be arrays that broadcast: ``epsilon`` >= 0 in nats, ``delta`` and
``sampling_probability`` p in [0, 1], ``size`` m and ``population`` n whole numbers,
``0 <= m <= n``, ``n >= 1``. Results are float64 of the broadcast shape. A
``mechanism`` is a `Mechanism`, or its privacy profile: a function from epsilon to delta
that broadcasts and need not accept ``inf``. A profile outside [0, 1] raises
`ValueError`, a mechanism without a profile `NotImplementedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.common import checked, checked_one
from jaxdp_episodic.accountant.bounds.mechanisms import Mechanism
from jaxdp_episodic.accountant.numerics.binomial import (
    log_binomial_mass,
    log_binomial_tail,
)

Profile = Mechanism | Callable[[Any], Any]
# Factor that exceeds the rounding errors of a few products.
_ROUND_UP = 1 + 1e-15
# -log of the probability of the multiplicities with delta taken as 1.
_CUT_EXPONENT = 100.0
# Largest number of multiplicities that are summed, which takes some seconds.
_MOST_MULTIPLICITIES = 100_000


def amplified_epsilon(epsilon: Any, *, rate: Any) -> Any:
    """Returns ``log(1 + rate (e^epsilon - 1))``, without cancellation or overflow.

    ``rate``, in [0, 1], is the probability that the differing unit is sampled. *Exact*,
    rounded up by a few ulp; ``inf`` stays ``inf`` unless the rate is 0. For small
    epsilon it is about ``rate * epsilon``. (The lecture from which this formula is
    often copied has ``e^epsilon + 1`` in its approximation, a misprint.)

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 2.
    """
    eps, r = checked(epsilon=epsilon, rate=rate)
    small = eps <= 1
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        near = np.log1p(r * np.expm1(np.where(small, eps, 0.0)))
        far = np.logaddexp(np.log1p(-r), np.log(r) + eps)
    value = np.where(small, near, far)
    value = np.minimum(np.where(value > 0, value * _ROUND_UP, 0.0), eps)
    return np.where(r > 0, value, 0.0)[()]


def unamplified_epsilon(epsilon: Any, *, rate: Any) -> Any:
    """Returns ``log(1 + (e^epsilon - 1) / rate)``, the inverse of `amplified_epsilon`.

    It maps an epsilon of the subsampled mechanism to the epsilon at which the profile
    of the mechanism itself is needed. *Exact*, rounded down by a few ulp (a profile
    decreases). ``inf`` at rate 0.

    Reference: as `amplified_epsilon`.
    """
    eps, r = checked(epsilon=epsilon, rate=rate)
    small = eps <= 1
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        near = np.log1p(np.expm1(np.where(small, eps, 0.0)) / r)
        # (e^eps - (1 - r)) / r = e^eps (1 + (1-r)(1 - e^-eps) / r): no overflow.
        far = eps + np.log1p((1 - r) * -np.expm1(-eps) / r)
    value = np.maximum(np.where(small, near, far) * (1 - 1e-15), eps)
    return np.where(r > 0, value, np.inf)[()]


def amplify_without_replacement(
    epsilon: Any, delta: Any, *, size: Any, population: Any
) -> tuple[Any, Any]:
    """Returns the guarantee of a mechanism on a uniform subset of fixed size.

        eps' = log(1 + (m/n)(e^eps - 1)),   delta' = (m/n) delta.

    Assumes: the mechanism is (epsilon, delta)-DP under ``replace_one``; the subset is
    fresh and secret. Under ``add_remove`` the subsets of neighbours differ by a
    replacement, too, so the same holds there for data of at most ``population`` units.

    Returns:
      (epsilon, delta) of the subsampled mechanism, an *upper bound*.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 9; the
    lecture's claim.
    """
    return _amplified(epsilon, delta, _subset_rate(size, population))


def amplify_poisson(
    epsilon: Any, delta: Any, *, sampling_probability: Any
) -> tuple[Any, Any]:
    """Returns the guarantee of a mechanism on a Poisson sample, under ``add_remove``.

    Assumes: the mechanism is (epsilon, delta)-DP under ``add_remove``; every unit is
    Poisson sampled, freshly and in secret.

    Returns:
      (epsilon, delta) of the subsampled mechanism, an *upper bound*.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 8.
    """
    (p,) = checked(sampling_probability=sampling_probability)
    return _amplified(epsilon, delta, p)


def delta_poisson_subsampled(
    mechanism: Profile, *, sampling_probability: Any, epsilon: Any
) -> Any:
    """Returns the profile on a Poisson sample, ``p delta(log(1 + (e^eps - 1)/p))``.

    Assumes: the profile of the mechanism under ``add_remove``, in both directions.

    Returns:
      Delta at finite epsilons, an *upper bound* under ``add_remove``. It is attained if
      one pair of neighbours attains the mechanism's profile at all epsilon.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 8.
    """
    (p,) = checked(sampling_probability=sampling_probability)
    return _profile_at_rate(mechanism, p, epsilon)


def delta_without_replacement_subsampled(
    mechanism: Profile, *, size: Any, population: Any, epsilon: Any
) -> Any:
    """Returns the profile on a uniform subset, ``r delta(log(1 + (e^eps - 1)/r))``.

    Assumes: the profile of the mechanism under ``replace_one``. Additive noise of
    ``sigma`` clip norms is ``Gaussian(sigma / 2)`` there.

    Returns:
      Delta at finite epsilons under ``replace_one``, with ``r = m / n``; an *upper
      bound*.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 9.
    """
    return _profile_at_rate(mechanism, _subset_rate(size, population), epsilon)


def delta_with_replacement_subsampled(
    mechanism: Profile,
    *,
    size: int,
    population: int,
    epsilon: Any,
    group_profile: Callable[[int, np.ndarray], Any] | None = None,
) -> Any:
    """Returns the profile of a mechanism on m samples with replacement.

    A unit sampled k times makes k units of the sample differ. With ``r = 1 - (1 -
    1/n)^m`` and ``delta_k`` the profile when k units are replaced,

        delta'(eps') = sum_{k=1..m} C(m,k) (1/n)^k (1 - 1/n)^{m-k} delta_k(eps).

    Assumes: profiles under ``replace_one``; the result holds for it, too.

    Args:
      mechanism: as in all functions of this module, of one setting.
      size: m, whole number >= 0.
      population: n, whole number >= 1.
      epsilon: eps', >= 0 and finite, nats, scalar or array.
      group_profile: maps (k, epsilons) to the delta of replacing k units. Default: the
        exact one for Gaussian and Laplace noise, with k times the sensitivity;
        otherwise `group_delta`.

    Returns:
      float64 in [0, 1] of epsilon's shape; an *upper bound*. Multiplicities with a
      total probability below e^-100 are taken with delta 1.

    Raises:
      ValueError: a mechanism of more than one setting.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 10.
    """
    m, n = map(int, checked_one(size=size, population=population))
    (target,) = checked(finite_epsilon=epsilon)
    if isinstance(mechanism, Mechanism) and mechanism.shape:
        raise ValueError(
            f"mechanism must be one setting, got one of shape {mechanism.shape}"
        )
    if m == 0:
        return np.zeros(target.shape)[()]
    rate = 1.0 if n == 1 else -np.expm1(m * np.log1p(-1 / n))
    inner = np.asarray(unamplified_epsilon(target, rate=rate))
    first = last = m  # a population of one: every draw is this unit
    if n > 1:
        mean, third = m / n, _CUT_EXPONENT / 3
        most = third + np.sqrt(third**2 + 2 * _CUT_EXPONENT * mean)  # Bernstein
        first, last = 1, int(min(m, np.ceil(mean + most)))
    if last - first > _MOST_MULTIPLICITIES:
        raise ValueError(
            f"size must be at most about {_MOST_MULTIPLICITIES:,} times population"
        )
    total = np.zeros(target.shape)
    trials, chance = np.array(m), np.array(1 / n)
    for k in range(first, last + 1):
        if group_profile is not None:
            delta = _checked_delta(group_profile(k, inner), inner.shape)
        elif isinstance(mechanism, Mechanism) and mechanism.is_noise:
            delta = mechanism.of_group(k).delta(inner)
        else:
            delta = group_delta(mechanism, group_size=k, epsilon=inner)
        total = total + np.exp(log_binomial_mass(np.array(k), trials, chance)) * delta
    if last < m:
        beyond = log_binomial_tail(np.array(last + 1), trials, chance, side="upper")
        total = total + np.exp(beyond)
    return np.minimum(total * (1 + 1e-10), 1.0)[()]


def group_delta(mechanism: Profile, *, group_size: Any, epsilon: Any) -> Any:
    """Returns delta when ``k`` units differ, from the profile for one unit.

        delta_k(eps) <= (e^eps - 1) / (e^{eps/k} - 1) delta(eps / k)

    ``group_size`` is k, a whole number >= 1; epsilon is finite. An *upper bound*, at
    most 1.

    Reference: Vadhan (2017), "The complexity of differential privacy", Lemma 2.2, as
    used by Balle, Barthe and Gaboardi (2018), Section 5.
    """
    k, eps = checked(group_size=group_size, finite_epsilon=epsilon)
    one = eps / k
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # sum_{i<k} e^{i eps/k}; k at epsilon 0.
        chain = np.exp(eps - one) * np.expm1(-eps) / np.expm1(-one)
        chain = np.where(one > 0, chain, k)
        delta = _read(mechanism, one)
        product = np.where(delta > 0, chain * delta * _ROUND_UP, 0.0)
    return np.minimum(product, 1.0)[()]


def subsampled_response_epsilon(epsilon: Any, *, sampling_probability: Any) -> Any:
    """Returns epsilon of randomized response with probability p, else a random bit.

    It is ``2 artanh(p tanh(eps / 2))`` nats, *exact*. This is below the ``log(1 + p
    (e^eps - 1))`` that holds for any mechanism, because a random bit hides more than no
    answer. (Notes that give the probability of the true answer as ``(1 + a) / (2 + a)``
    mean ``e^eps = 1 + a``.)

    Reference: Warner (1965), for the response; docs/proofs.md for the sampling.
    """
    eps, p = checked(epsilon=epsilon, sampling_probability=sampling_probability)
    # 2 artanh(w) = log((1 + w) / (1 - w)); 1 - w without cancellation at large eps.
    lie = np.exp(-eps) / (1 + np.exp(-eps))  # (1 - tanh(eps / 2)) / 2
    w = p * np.tanh(eps / 2)
    with np.errstate(divide="ignore"):
        value = np.log1p(w) - np.log((1 - p) + 2 * p * lie)
        small = 2 * np.arctanh(np.minimum(w, 0.5))
    return np.where(w < 0.5, small, value)[()]


def advanced_joint_convexity(
    shared: Any, first: Any, second: Any, *, rate: float, epsilon: float
) -> tuple[float, float]:
    """Returns both sides' order and delta of advanced joint convexity, of finite pairs.

    See docs/amplification.md.

    Args:
      shared: mu0, (K,) probabilities.
      first: mu1, (K,).
      second: mu1', (K,).
      rate: r in (0, 1].
      epsilon: eps, >= 0 and finite.

    Returns:
      ``(eps', delta)``: ``eps' = log(1 + r (e^eps - 1))``, and the hockey-stick
      divergence of order ``e^eps'`` of ``(1-r) mu0 + r mu1`` from ``(1-r) mu0 + r
      mu1'``, computed by the theorem's right-hand side. *Exact* up to rounding.

    Raises:
      ValueError: distributions of different lengths or that do not sum to 1.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 2.
    """
    given = {"shared": shared, "first": first, "second": second}
    for name, value in given.items():
        given[name] = _validation.probability_array(name, value)
        if given[name].ndim != 1 or abs(given[name].sum() - 1) > 1e-9:
            raise ValueError(f"{name} must be a vector of probabilities that sum to 1")
    if len({dist.shape for dist in given.values()}) != 1:
        raise ValueError("shared, first and second must have the same length")
    eps, r = checked_one(finite_epsilon=epsilon, rate=rate)
    if r == 0:
        raise ValueError("rate must be one number in (0, 1], got 0")
    outer = float(amplified_epsilon(eps, rate=r))
    overlap = np.exp(outer - eps)
    other = (1 - overlap) * given["shared"] + overlap * given["second"]
    gain = np.maximum(given["first"] - np.exp(eps) * other, 0.0)
    return outer, float(r * gain.sum())


def _subset_rate(size: Any, population: Any) -> np.ndarray:
    m, n = checked(size=size, population=population)
    if np.any(m > n):
        raise ValueError(
            f"size must be at most population, got {size!r} of {population!r}"
        )
    return m / n


def _amplified(epsilon: Any, delta: Any, rate: np.ndarray) -> tuple[Any, Any]:
    eps, one, rate = checked(epsilon=epsilon, delta=delta, rate=rate)
    scaled = np.minimum(rate * one * _ROUND_UP, 1.0)
    return amplified_epsilon(eps, rate=rate), scaled[()]


def _profile_at_rate(mechanism: Profile, rate: np.ndarray, epsilon: Any) -> Any:
    rate, target = checked(rate=rate, finite_epsilon=epsilon)
    inner = unamplified_epsilon(target, rate=np.where(rate > 0, rate, 1.0))
    value = rate * _read(mechanism, np.asarray(inner)) * _ROUND_UP
    return np.minimum(value, 1.0)[()]


def _read(mechanism: Profile, epsilon: np.ndarray) -> np.ndarray:
    """Returns the checked profile of a mechanism at these epsilons."""
    if isinstance(mechanism, Mechanism):
        return np.asarray(mechanism.delta(epsilon))
    words = "a Mechanism or a function from epsilon to delta"
    _validation.instance("mechanism", mechanism, Callable, words)
    return _checked_delta(mechanism(epsilon), np.shape(epsilon))


def _checked_delta(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a profile's values, checked and broadcast with this shape."""
    delta = _validation.probability_array("the profile's delta", value)
    return np.broadcast_to(delta, np.broadcast_shapes(delta.shape, shape))

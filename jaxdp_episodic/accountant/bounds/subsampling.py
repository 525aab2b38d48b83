"""Amplification by subsampling: of guarantees, of privacy profiles, of RDP curves.

The first two follow from advanced joint convexity; docs/amplification.md has this and
the series for RDP. With several sampling stages the product of their rates is not
always the rate: see docs/theory.md, "Why the product rate alone is wrong".

Arguments may be arrays that broadcast: ``epsilon`` >= 0 in nats, ``delta`` and
``sampling_probability`` p in [0, 1], ``size`` m and ``population`` n whole numbers,
``0 <= m <= n``, ``n >= 1``. Results are float64 of the broadcast shape. A
``mechanism`` is a `Mechanism`, or its privacy profile: a function from epsilon to delta
that broadcasts and need not accept ``inf``. A profile outside [0, 1] raises
`ValueError`, a mechanism without a profile `NotImplementedError`.

For RDP the function goes from orders (K,) to RDP (..., K) as in `RdpCurve`, and
``orders`` are a scalar or array, each > 1 and at most ``MAX_ORDER``. Results are nats
of shape ``broadcast(mechanism, rates) + orders.shape``, ``np.float64`` if that is
``()``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.common import TINY, checked, checked_one
from jaxdp_episodic.accountant.bounds.mechanisms import Mechanism, RdpCurve, RdpTable
from jaxdp_episodic.accountant.numerics.binomial import (
    log_binomial,
    log_binomial_mass,
    log_binomial_tail,
)
from jaxdp_episodic.accountant.numerics.loops import logsumexp
from jaxdp_episodic.accountant.numerics.special import log_expm1

Profile = Mechanism | Callable[[Any], Any]
# Factor that exceeds the rounding errors of a few products.
_ROUND_UP = 1 + 1e-15
# -log of the probability of the multiplicities with delta taken as 1.
_CUT_EXPONENT = 100.0
# Largest number of multiplicities that are summed, which takes some seconds.
_MOST_MULTIPLICITIES = 100_000
# Largest order, which is also the number of terms of its series.
MAX_ORDER = 2**14
_checked_orders = _validation.reals(
    f"lie in (1, {MAX_ORDER}] for a series", lambda a: (a > 1) & (a <= MAX_ORDER)
)
# Terms (settings x series) in one block, which bounds memory to tens of megabytes.
_BLOCK_TERMS = 2**19


def amplified_epsilon(epsilon: Any, *, rate: Any) -> Any:
    """Returns ``log(1 + rate (e^epsilon - 1))``, without cancellation or overflow.

    ``rate``, in [0, 1], is the probability that the differing unit is sampled. *Exact*,
    rounded up by a few ulp; ``inf`` stays ``inf`` unless the rate is 0.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 2.
    """
    eps, r = checked(epsilon=epsilon, rate=rate)
    small = eps <= 1
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        near = np.log1p(r * np.expm1(np.where(small, eps, 0.0)))
        far = np.logaddexp(np.log1p(-r), np.log(r) + eps)
    value = np.where(small, near, far)
    return np.where(r > 0, np.clip(value * _ROUND_UP, TINY, eps), 0.0)[()]


def unamplified_epsilon(epsilon: Any, *, rate: Any) -> Any:
    """Returns ``log(1 + (e^epsilon - 1) / rate)``, the inverse of `amplified_epsilon`.

    *Exact*, rounded down by a few ulp, as a profile decreases. ``inf`` at rate 0.
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

    An *upper bound* if the mechanism is (epsilon, delta)-DP under ``replace_one``, and
    the subset is fresh and secret. Under ``add_remove`` it holds for data of at most
    ``population`` units: the subsets of neighbours differ by a replacement there, too.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 9.
    """
    return _amplified(epsilon, delta, rate=_subset_rate(size, population))


def amplify_poisson(
    epsilon: Any, delta: Any, *, sampling_probability: Any
) -> tuple[Any, Any]:
    """Returns the guarantee of a mechanism on a Poisson sample, under ``add_remove``.

    An *upper bound* if the mechanism is (epsilon, delta)-DP under ``add_remove``, and
    every unit is Poisson sampled, freshly and in secret.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 8.
    """
    return _amplified(epsilon, delta, sampling_probability=sampling_probability)


def delta_poisson_subsampled(
    mechanism: Profile, *, sampling_probability: Any, epsilon: Any
) -> Any:
    """Returns the profile on a Poisson sample, ``p delta(log(1 + (e^eps - 1)/p))``.

    An *upper bound*, at finite epsilons, if the profile holds under ``add_remove`` in
    both directions. It is attained if one pair of neighbours attains the profile at all
    epsilon.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 8.
    """
    return _profile_at(mechanism, epsilon, sampling_probability=sampling_probability)


def delta_without_replacement_subsampled(
    mechanism: Profile, *, size: Any, population: Any, epsilon: Any
) -> Any:
    """Returns the profile on a uniform subset, ``r delta(log(1 + (e^eps - 1)/r))``.

    With ``r = m / n``. An *upper bound*, at finite epsilons, under ``replace_one``, as
    the profile must be: noise of ``sigma`` clip norms is ``Gaussian(sigma / 2)`` there.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 9.
    """
    return _profile_at(mechanism, epsilon, rate=_subset_rate(size, population))


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

    The mechanism, size and population are of one setting (`ValueError` otherwise), and
    epsilon is finite.
    ``group_profile`` maps (k, epsilons) to the delta of replacing k units. Default: the
    exact one for Gaussian and Laplace noise; otherwise `group_delta`.

    Returns:
      float64 in [0, 1] of epsilon's shape; an *upper bound* under ``replace_one``, as
      the profiles must be. Multiplicities with a total probability below e^-100 are
      taken with delta 1.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 10.
    """
    m, n = map(int, checked_one(size=size, population=population))
    (target,) = checked(epsilon__finite=epsilon)
    if isinstance(mechanism, Mechanism) and mechanism.shape:
        raise ValueError(
            f"mechanism must be one setting, got one of shape {mechanism.shape}"
        )
    if m == 0:
        return np.zeros(target.shape)[()]
    first = last = m  # a population of one: every draw is this unit
    rate, third = 1.0, _CUT_EXPONENT / 3
    if n > 1:
        rate = -np.expm1(m * np.log1p(-1 / n))
        most = third + np.sqrt(third**2 + 2 * _CUT_EXPONENT * m / n)  # Bernstein
        first, last = 1, int(min(m, np.ceil(m / n + most)))
    inner = np.asarray(unamplified_epsilon(target, rate=rate))
    if last - first > _MOST_MULTIPLICITIES:
        raise ValueError(
            f"size must be at most about {_MOST_MULTIPLICITIES:,} times population"
        )
    total = np.zeros(target.shape)
    trials, chance = np.array(m), np.array(1 / n)
    for k in range(first, last + 1):
        if group_profile is not None:
            delta = _read(functools.partial(group_profile, k), inner)
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
    k, eps = checked(group_size=group_size, epsilon__finite=epsilon)
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

    It is ``2 artanh(p tanh(eps / 2))`` nats, *exact*. This is below
    `amplified_epsilon`, because a random bit hides more than no answer.

    Reference: Warner (1965), for the response; docs/proofs.md for the sampling.
    """
    eps, p = checked(epsilon=epsilon, sampling_probability=sampling_probability)
    # 2 artanh(w) = log((1 + w) / (1 - w)); 1 - w without cancellation at large eps.
    lie = np.exp(-eps) / (1 + np.exp(-eps))  # (1 - tanh(eps / 2)) / 2
    w = np.where(p > 0, np.clip(p * np.tanh(eps / 2), TINY, eps), 0.0)
    with np.errstate(divide="ignore"):
        value = np.log1p(w) - np.log((1 - p) + 2 * p * lie)
        small = 2 * np.arctanh(np.minimum(w, 0.5))
    return np.where(w < 0.5, small, value)[()]


def advanced_joint_convexity(
    shared: Any, first: Any, second: Any, *, rate: float, epsilon: float
) -> tuple[float, float]:
    """Returns both sides' order and delta of advanced joint convexity, of finite pairs.

    ``shared``, ``first`` and ``second`` are mu0, mu1 and mu1', (K,) probabilities that
    sum to 1 (`ValueError` otherwise); ``rate`` is r in (0, 1], ``epsilon`` is finite.

    Returns:
      ``(eps', delta)``: ``eps' = log(1 + r (e^eps - 1))``, and the hockey-stick
      divergence of order ``e^eps'`` of ``(1-r) mu0 + r mu1`` from ``(1-r) mu0 + r
      mu1'``, computed by the theorem's right-hand side. *Exact* up to rounding.

    Reference: Balle, Barthe and Gaboardi (2018), arXiv:1807.01647, Theorem 2.
    """
    given = {"shared": shared, "first": first, "second": second}
    for name, value in given.items():
        given[name] = _validation.probability_array(name, value)
        if given[name].ndim != 1 or abs(given[name].sum() - 1) > 1e-9:
            raise ValueError(f"{name} must be a vector of probabilities that sum to 1")
    if len({dist.shape for dist in given.values()}) != 1:
        raise ValueError("shared, first and second must have the same length")
    eps, r = checked_one(epsilon__finite=epsilon, rate=rate)
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
        got = f"{size!r} of {population!r}"
        raise ValueError(f"size must be at most population, got {got}")
    return m / n


def _amplified(epsilon: Any, delta: Any, **rate: Any) -> tuple[Any, Any]:
    eps, one, r = checked(epsilon=epsilon, delta=delta, **rate)
    return amplified_epsilon(eps, rate=r), _times(r, one)[()]


def _times(rate: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Returns an upper bound of ``rate * value``, above 0 if both are."""
    return np.where(rate > 0, np.clip(rate * value * _ROUND_UP, TINY, value), 0.0)


def _profile_at(mechanism: Profile, epsilon: Any, **rate: Any) -> Any:
    r, target = checked(**rate, epsilon__finite=epsilon)
    inner = unamplified_epsilon(target, rate=np.where(r > 0, r, 1.0))
    return _times(r, _read(mechanism, np.asarray(inner)))[()]


def _read(mechanism: Profile, epsilon: np.ndarray) -> np.ndarray:
    """Returns the checked profile of a mechanism at these epsilons."""
    if isinstance(mechanism, Mechanism):
        return np.asarray(mechanism.delta(epsilon))
    words = "a Mechanism or a function from epsilon to delta"
    _validation.instance("mechanism", mechanism, Callable, words)
    delta = _validation.probability_array("the profile's delta", mechanism(epsilon))
    return np.broadcast_to(delta, np.broadcast_shapes(delta.shape, epsilon.shape))


# --- RDP curves ---


def rdp_poisson_subsampled(
    mechanism: Mechanism | Callable[[Any], Any],
    *,
    sampling_probability: Any,
    orders: Any,
    bound: str = "general",
    outer_rate: Any = 1.0,
) -> Any:
    """Returns the RDP of a mechanism on a Poisson sample, under ``add_remove``.

    At whole orders ``a``, with ``p`` the sampling probability and ``r`` the curve,

        M = (1-p)^{a-1} (ap - p + 1) + C(a,2) (1-p)^{a-2} p² e^{r(2)}
            + c sum_{l=3}^a C(a,l) (1-p)^{a-l} p^l e^{(l-1) r(l)},    rdp = log M/(a-1)

    The ``bound`` is "general" (c = 3, for any mechanism), "tight" (c = 1, proved for
    mechanisms with `Mechanism.swaps_neighbours`) or "lower" (c = 1 for any mechanism).
    No valid bound is below "lower" if a single neighbouring pair attains the curve at
    all whole orders. "lower" is *not a guarantee*; it shows how loose a bound may be.

    Assumes: the curve bounds the RDP of one release, in both directions, when one
    clipped contribution is *added or removed*; each contribution is sampled
    independently, freshly and in secret in every step, and the other sampled units
    contribute whether or not the protected one is sampled (locality). ``outer_rate`` is
    the probability that the levels above the Poisson sampling include the unit.

    Returns:
      *Upper bound* for "general" and "tight", *lower bound* for "lower". 0 at rate 0;
      "tight" and "general" return the curve at rate 1.

    Raises:
      ValueError: an order that is not whole with ``bound="lower"`` (interpolation
        gives upper bounds only).
      NotImplementedError: "tight" for a mechanism without a proof of the moment
        condition, or "lower" with an outer rate.

    Reference: Zhu and Wang (2019), "Poisson subsampled Rényi differential privacy",
    ICML, PMLR 97 (tight: Theorem 8; lower and general: main results).
    """
    _validation.choice("bound", bound, ("general", "tight", "lower"))
    (rate,) = checked(sampling_probability=sampling_probability)
    base, alpha, outer = _curve(mechanism, orders, outer_rate)
    if bound == "tight" and not base.swaps_neighbours:
        raise NotImplementedError(
            f"bound='tight' with {type(base).__name__}: the nonnegativity of the odd "
            "moments E[(g/f - 1)^l] is proved for Gaussian, Laplace and "
            "RandomizedResponse, not for a curve; use bound='general'"
        )
    if bound == "lower" and np.any(outer != 1):
        raise NotImplementedError(
            "bound='lower' with outer_rate < 1: the factor of the outer levels is an "
            "upper bound only; covered: outer_rate=1"
        )
    fractional = alpha[alpha != np.floor(alpha)]
    if bound == "lower" and fractional.size:
        raise ValueError(
            "orders must be whole numbers for bound='lower' (interpolation gives upper "
            f"bounds only), got {fractional[0]}"
        )
    return _subsampled(base, rate, alpha, outer, bound)


def rdp_without_replacement_subsampled(
    mechanism: Mechanism | Callable[[Any], Any],
    *,
    sampling_rate: Any,
    orders: Any,
    outer_rate: Any = 1.0,
) -> Any:
    """Returns the RDP of a mechanism on a sample of fixed size without replacement.

    At whole orders ``a``, with ``p`` the rate, ``r`` the curve and ``r(inf)`` its
    limit (pure-DP epsilon; if that is infinite, the inner minima are 2),

        M = 1 + C(a,2) p² min{4 (e^{r(2)} - 1), e^{r(2)} min[2, (e^{r(inf)} - 1)²]}
            + sum_{j=3}^a C(a,j) p^j e^{(j-1) r(j)} min[2, (e^{r(inf)} - 1)^j].

    Assumes: the curve bounds the RDP of one release when one clipped contribution is
    *replaced* by another: noise of ``sigma`` clip norms is ``Gaussian(sigma / 2)``. The
    result holds for ``replace_one``, and for ``add_remove`` if another unit takes the
    removed unit's place in the sample. Sets are sampled fresh and secret in every step.

    ``sampling_rate`` is the size of the sample over the population, times the rates of
    the levels below the clipped contribution. ``outer_rate`` is the probability that
    the levels above include the unit.

    Returns:
      An *upper bound*. 0 at rate 0, the curve at rate 1.

    Reference: Wang, Balle and Kasiviswanathan (2019), "Subsampled Rényi differential
    privacy and analytical moments accountant", arXiv:1808.00087, Theorem 9.
    """
    (rate,) = checked(sampling_rate=sampling_rate)
    base, alpha, outer = _curve(mechanism, orders, outer_rate)
    return _subsampled(base, rate, alpha, outer, "without_replacement")


def _curve(
    mechanism: Any, orders: Any, outer_rate: Any
) -> tuple[Mechanism, np.ndarray, np.ndarray]:
    """Returns the checked mechanism, orders and outer rate."""
    if not isinstance(mechanism, Mechanism):
        words = "a Mechanism or a function from orders to RDP"
        _validation.instance("mechanism", mechanism, Callable, words)
        mechanism = RdpCurve(mechanism)
    (outer,) = checked(outer_rate=outer_rate)
    return mechanism, _checked_orders("orders", orders), outer


def _subsampled(
    mechanism: Mechanism,
    rate: np.ndarray,
    alpha: np.ndarray,
    outer: np.ndarray,
    series: str,
) -> Any:
    """Returns the RDP of all settings at all orders, computed in blocks."""
    shape = _validation.broadcast_shape(
        mechanism=np.empty(mechanism.shape), sampling=rate, outer_rate=outer
    )
    if 0 in shape + alpha.shape:
        return np.empty(shape + alpha.shape)
    orders = alpha.ravel()
    top = max(int(np.ceil(orders.max())), 2)
    table, size = mechanism.up_to(top), math.prod(mechanism.shape)
    numbers = np.arange(size).reshape(mechanism.shape)
    rows, rate, outer = (
        np.broadcast_to(a, shape).ravel() for a in (numbers, rate, outer)
    )
    unsampled = np.reshape(mechanism.rdp(orders), (size, orders.size))
    values = np.empty((rows.size, orders.size))
    at_once = max(1, _BLOCK_TERMS // top)
    for start in range(0, rows.size, at_once):
        part = slice(start, start + at_once)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            values[part] = _block(
                table.settings(rows[part]),
                rate[part, None],
                outer[part, None],
                orders,
                unsampled[rows[part]],
                series,
            )
    return values.reshape(shape + alpha.shape)[()]


def _block(
    mechanism: Mechanism,
    rate: np.ndarray,
    outer: np.ndarray,
    orders: np.ndarray,
    unsampled: np.ndarray,
    series: str,
) -> np.ndarray:
    """Returns the RDP (n, K) of n settings; rates (n, 1), ``unsampled`` (n, K)."""
    index = np.arange(2.0, max(np.ceil(orders.max()), 2.0) + 1)  # l
    exponent = (index - 1) * mechanism.rdp(index)
    limit = mechanism.pure_epsilon[..., None]
    log_terms = _log_series_terms(exponent, limit, index, series)
    log_p, log_q = np.log(rate), np.log1p(-rate)
    if series == "without_replacement":
        log_q = np.zeros_like(rate)  # that series has no such factor
    table = np.zeros((len(rate), len(index)))  # RDP at whole orders that are needed
    needed = np.unique([np.floor(orders), np.ceil(orders)])
    for order in needed[needed > 1]:
        some = index[index <= order]
        left = order - some
        log_power = np.where(left > 0, left * log_q, 0.0) + some * log_p
        # A draw of probability 0 costs nothing, even if its term is inf.
        term = log_power + log_binomial(np.full_like(some, order), some)
        term = np.where(log_power > -np.inf, term + log_terms[:, : len(some)], -np.inf)
        log_moment = np.logaddexp(0.0, logsumexp(term, axis=-1))
        table[:, len(some) - 1] = log_moment / (order - 1)
    rdp, t = RdpTable(table).rdp(orders), orders - 1
    if series != "lower":
        rdp = np.minimum(rdp, unsampled)
    thinned = np.logaddexp(0.0, np.log(outer) + log_expm1(t * rdp)) / t
    rdp = np.maximum(np.where(outer < 1, thinned, rdp), TINY)
    return np.where((rate > 0) & (outer > 0) & (unsampled > 0), rdp, 0.0)


def _log_series_terms(
    exponent: np.ndarray, pure_epsilon: np.ndarray, index: np.ndarray, series: str
) -> np.ndarray:
    """Returns the log of the terms of ``M - 1`` without their binomial factors."""
    if series in ("tight", "lower"):
        return log_expm1(exponent)
    if series == "general":
        # log(3 e^x - 1) with e^x factored out
        tripled = exponent + np.log(2 - np.expm1(-exponent))
        return np.where(index >= 3, tripled, log_expm1(exponent))
    log_limit = log_expm1(pure_epsilon)
    general = exponent + np.minimum(math.log(2.0), index * log_limit)
    second = np.minimum(math.log(4.0) + log_expm1(exponent), general)
    return np.where(index == 2, second, general)

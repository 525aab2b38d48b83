"""RDP of a subsampled mechanism that is known only by its RDP curve.

docs/amplification.md says how the published series are summed, and how they are
extended to orders that are not whole and to outer levels.

Both functions take a ``mechanism``, a `Mechanism` or a function from orders (K,) to RDP
(..., K) as in `RdpCurve`; rates in [0, 1], scalars or arrays that broadcast with it;
and ``orders``, a scalar or array, each > 1 and at most ``MAX_ORDER``. They return nats
of shape ``broadcast(mechanism, rates) + orders.shape``, ``np.float64`` if that is
``()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.common import checked
from jaxdp_episodic.accountant.bounds.mechanisms import Mechanism, RdpCurve
from jaxdp_episodic.accountant.numerics.binomial import log_binomial
from jaxdp_episodic.accountant.numerics.loops import logsumexp
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1

# Largest order, which is also the number of terms of its series.
MAX_ORDER = 2**14
_checked_orders = _validation.reals(
    f"lie in (1, {MAX_ORDER}] for a series", lambda a: (a > 1) & (a <= MAX_ORDER)
)
# Smallest normal number, to which positive results that underflow are rounded up.
_TINY = float(np.finfo(np.float64).tiny)


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

    with ``c = 3`` for any mechanism, and ``c = 1`` if all odd moments ``E_f[(g/f -
    1)^l]``, ``l >= 3``, of its neighbouring pairs are nonnegative. This is proved for
    the mechanisms with `Mechanism.swaps_neighbours`.

    Assumes: the curve bounds the RDP of one release, in both directions, when one
    clipped contribution is *added or removed*; each contribution is sampled
    independently, freshly and in secret in every step, and the other sampled units
    contribute whether or not the protected one is sampled (locality).

    The ``bound`` is "general" (c = 3), "tight" (c = 1) or "lower" (c = 1 for any
    mechanism). No valid bound is below "lower" if a single neighbouring pair attains
    the curve at all whole orders. "lower" is *not a guarantee*; it shows how loose a
    bound may be. ``outer_rate`` is the probability that the levels above the Poisson
    sampling include the unit.

    Returns:
      *Upper bound* for "general" and "tight", *lower bound* for "lower". 0 at rate 0;
      "tight" and "general" return the curve at rate 1.

    Raises:
      ValueError: an order that is not whole with ``bound="lower"`` (interpolation
        gives upper bounds only).
      NotImplementedError: "tight" for a mechanism without a proof of the moment
        condition, or "lower" with an outer rate.

    Reference: Zhu and Wang (2019), "Poisson subsampled Rényi differential privacy",
    ICML, PMLR 97 (tight: Theorem 8; lower and general: main results). A widely copied
    summary prints ``1/a`` for ``1/(a-1)``, which is too small already at rate 1.
    """
    _validation.choice("bound", bound, ("general", "tight", "lower"))
    base = _as_mechanism(mechanism)
    (rate,) = checked(sampling_probability=sampling_probability)
    (outer,) = checked(outer_rate=outer_rate)
    alpha = _checked_orders("orders", orders)
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
    return _subsampled(base, rate, alpha, outer, series=bound)


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
    *replaced* by another. For additive noise this is twice the clip norm: Gaussian
    noise of ``sigma`` times the clip norm is ``Gaussian(sigma / 2)`` here. The result
    holds for ``replace_one``, and for ``add_remove`` if another unit takes the removed
    unit's place in the sample. Sets of one size are sampled uniformly, fresh and secret
    in every step.

    ``sampling_rate`` is the size of the sample over the population, times the rates of
    the levels below the clipped contribution. ``outer_rate`` is the probability that
    the levels above include the unit.

    Returns:
      An *upper bound*. 0 at rate 0, the curve at rate 1.

    Reference: Wang, Balle and Kasiviswanathan (2019), "Subsampled Rényi differential
    privacy and analytical moments accountant", arXiv:1808.00087, Theorem 9.
    """
    base = _as_mechanism(mechanism)
    (rate,) = checked(sampling_rate=sampling_rate)
    (outer,) = checked(outer_rate=outer_rate)
    alpha = _checked_orders("orders", orders)
    return _subsampled(base, rate, alpha, outer, series="without_replacement")


def _as_mechanism(mechanism: Any) -> Mechanism:
    if isinstance(mechanism, Mechanism):
        return mechanism
    words = "a Mechanism or a function from orders to RDP"
    return RdpCurve(_validation.instance("mechanism", mechanism, Callable, words))


def _subsampled(
    mechanism: Mechanism,
    rate: np.ndarray,
    alpha: np.ndarray,
    outer: np.ndarray,
    *,
    series: str,
) -> Any:
    """Returns the RDP of all settings at all orders; one sum a setting and order."""
    shape = _validation.broadcast_shape(
        mechanism=np.empty(mechanism.shape), sampling=rate, outer_rate=outer
    )
    if 0 in shape + alpha.shape:
        return np.empty(shape + alpha.shape)
    orders = alpha.ravel()
    whole, above = np.floor(orders), np.ceil(orders)
    needed, place = np.unique([whole, above], return_inverse=True)
    index = np.arange(2.0, max(needed[-1], 2.0) + 1)  # l
    left = needed[:, None] - index
    chosen = log_binomial(np.maximum(needed[:, None], index), index)
    exponent = (index - 1) * mechanism.up_to(int(index[-1])).rdp(index)
    rates = np.broadcast_to(rate, shape)
    log_moment = np.empty((*shape, len(needed)))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_terms = np.broadcast_to(
            _log_series_terms(exponent, mechanism.pure_epsilon, index, series),
            (*shape, len(index)),
        )
        for at in np.ndindex(shape):
            log_p, log_q = np.log(rates[at]), np.log1p(-rates[at])
            if series == "without_replacement":
                log_q = 0.0  # that series has no such factor
            log_power = np.where(left > 0, left * log_q, 0.0) + index * log_p
            # A draw of probability 0 costs nothing, even if its term is inf.
            is_drawn = (left >= 0) & (log_power > -np.inf)
            term = np.where(is_drawn, log_power + chosen + log_terms[at], -np.inf)
            log_moment[at] = np.logaddexp(0.0, logsumexp(term, axis=-1))
        # At whole orders both neighbours are the order itself; avoids inf - inf.
        low, high = (log_moment[..., p] for p in place.reshape(2, -1))
        weight, t = orders - whole, orders - 1
        rdp = np.where(weight > 0, (1 - weight) * low + weight * high, low) / t
        unsampled = mechanism.rdp(orders)
        if series != "lower":
            rdp = np.minimum(rdp, unsampled)
        thinned = np.logaddexp(0.0, np.log(outer[..., None]) + log_expm1(t * rdp)) / t
    rdp = np.maximum(np.where(outer[..., None] < 1, thinned, rdp), _TINY)
    some = (rates > 0) & (outer > 0)
    rdp = np.where(some[..., None] & (unsampled > 0), rdp, 0.0)
    return rdp.reshape(shape + alpha.shape)[()]


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
    log_limit = log_expm1(pure_epsilon)[..., None]
    general = exponent + np.minimum(math.log(2.0), index * log_limit)
    second = np.minimum(math.log(4.0) + log_expm1(exponent), general)
    return np.where(index == 2, second, general)

"""RDP of a subsampled mechanism of which only the RDP curve is known.

With ``r`` the curve, ``p`` the rate and ``M(a) = e^{(a-1) rdp(a)}`` the moment of the
subsampled mechanism, both theorems bound ``M`` at whole orders by a series in ``p^l
e^{(l-1) r(l)}``. Here ``M - 1`` is summed, never ``M``: the 1 is removed by

    1 = (1-p)^{a-1} (ap - p + 1) + sum_{l=2}^a C(a,l) (1-p)^{a-l} p^l,

so that every remaining term is >= 0 and a rate of 1e-12 loses no digits. Everything
is a logarithm, so that ``(l-1) r(l)`` may be as large as a float.

What completes the theorems, each an upper bound of the same moment:

* *Orders that are not whole.* ``log M`` is convex in the order and 0 at order 1 (van
  Erven and Harremoës 2014, arXiv:1206.2459, Corollary 2): the chord between the whole
  neighbours.
* *Never looser than no subsampling.* The distributions compared are mixtures, over the
  same draws, of pairs that are neighbouring or equal, so joint quasi-convexity (the
  same paper, Theorem 13) gives ``rdp <= r``.
* *Outer levels.* A unit that is reached with probability ``outer_rate`` through levels
  above: ``M - 1`` is multiplied by it (joint convexity of the moment), after the two
  steps before.

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
from jaxdp_episodic.accountant._engine import (
    choose_engine,
    float64_boundary,
    using_choice,
)
from jaxdp_episodic.accountant.bounds.mechanisms import Mechanism, RdpCurve
from jaxdp_episodic.accountant.numerics.combinatorics import log_binomial
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    logsumexp,
    map_blocks,
    map_first,
    namespace,
)
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1

# Largest order: the series has as many terms.
MAX_ORDER = 2**14
# Terms (settings x orders x series) in one block: bounds memory to tens of megabytes.
_BLOCK_TERMS = 2**19
# Minimum number of terms for which compiling pays.
_BREAK_EVEN = 2 * 10**7


def rdp_poisson_subsampled(
    mechanism: Mechanism | Callable[[Any], Any],
    *,
    sampling_probability: Any,
    orders: Any,
    bound: str = "general",
    outer_rate: Any = 1.0,
) -> Any:
    """RDP of a mechanism run on a Poisson sample, under ``add_remove``.

    At whole orders ``a``, with ``p`` the sampling probability and ``r`` the curve,

        M = (1-p)^{a-1} (ap - p + 1) + C(a,2) (1-p)^{a-2} p² e^{r(2)}
            + c sum_{l=3}^a C(a,l) (1-p)^{a-l} p^l e^{(l-1) r(l)},    rdp = log M/(a-1)

    with ``c = 3`` for any mechanism and ``c = 1`` where all odd moments ``E_f[(g/f -
    1)^l]``, ``l >= 3``, of its neighbouring pairs are nonnegative. That is proved for
    the mechanisms with `Mechanism.swaps_neighbours`.

    Assumes: the curve bounds the RDP of one release, in both directions, when one
    clipped contribution is *added or removed*; each contribution is drawn
    independently, by fresh and secret coins in every step, and the drawn units
    contribute whether or not the protected one is drawn (locality).

    The ``bound`` is "general" (c = 3), "tight" (c = 1), or "lower": c = 1 for any
    mechanism, which no valid bound can fall below if a single neighbouring pair attains
    the curve at all whole orders. "lower" is *not a guarantee*; it shows how loose one
    may be. ``outer_rate`` is the probability that the levels above the Poisson draw
    reach the unit.

    Returns:
      *Upper bound* for "general" and "tight", *lower bound* for "lower". 0 at rate 0;
      "tight" and "general" at rate 1 return the curve.

    Raises:
      ValueError: an order that is not whole with ``bound="lower"`` (interpolation only
        bounds from above).
      NotImplementedError: "tight" for a mechanism without a proof of the moment
        condition, or "lower" with an outer rate.

    Reference: Zhu and Wang (2019), "Poisson subsampled Rényi differential privacy",
    ICML, PMLR 97 (tight: Theorem 8; lower and general: main results). A widely copied
    summary prints ``1/a`` for ``1/(a-1)``, which is too small already at rate 1.
    """
    _validation.choice("bound", bound, ("general", "tight", "lower"))
    base = _as_mechanism(mechanism)
    rate = _validation.probability_array("sampling_probability", sampling_probability)
    alpha = _checked_orders(orders)
    outer = _validation.probability_array("outer_rate", outer_rate)
    if bound == "tight" and not base.swaps_neighbours:
        raise NotImplementedError(
            f"bound='tight' with {type(base).__name__}: the nonnegativity of the odd "
            "moments E[(g/f - 1)^l] is proved for Gaussian, Laplace and "
            "RandomizedResponse, not for a curve; use bound='general'"
        )
    if bound == "lower":
        _check_lower_bound(alpha, outer)
    return _subsampled(base, rate, alpha, outer, series=bound)


def rdp_without_replacement_subsampled(
    mechanism: Mechanism | Callable[[Any], Any],
    *,
    sampling_rate: Any,
    orders: Any,
    outer_rate: Any = 1.0,
) -> Any:
    """RDP of a mechanism run on a sample of fixed size without replacement.

    At whole orders ``a``, with ``p`` the rate, ``r`` the curve and ``r(inf)`` its
    limit (pure-DP epsilon; if that is infinite, the inner minima are 2),

        M = 1 + C(a,2) p² min{4 (e^{r(2)} - 1), e^{r(2)} min[2, (e^{r(inf)} - 1)²]}
            + sum_{j=3}^a C(a,j) p^j e^{(j-1) r(j)} min[2, (e^{r(inf)} - 1)^j].

    Assumes: the curve is that of one release when one clipped contribution is
    *replaced* by another, which for additive noise is twice the clip norm: a Gaussian
    noise of ``sigma`` times the clip norm is ``Gaussian(sigma / 2)`` here. Holds for
    ``replace_one``, and for ``add_remove`` when the removed unit's place in the sample
    is taken by another. Sets of one size are drawn uniformly, fresh and secret in
    every step.

    ``sampling_rate`` is the size of the sample over the population, times the rates of
    the levels below the clipped contribution, ``outer_rate`` the probability that the
    levels above the draw reach the unit.

    Returns:
      An *upper bound*. 0 at rate 0, the curve at rate 1.

    Reference: Wang, Balle and Kasiviswanathan (2019), "Subsampled Rényi differential
    privacy and analytical moments accountant", arXiv:1808.00087, Theorem 9.
    """
    base = _as_mechanism(mechanism)
    rate = _validation.probability_array("sampling_rate", sampling_rate)
    alpha = _checked_orders(orders)
    outer = _validation.probability_array("outer_rate", outer_rate)
    return _subsampled(base, rate, alpha, outer, series="without_replacement")


def _as_mechanism(mechanism: Any) -> Mechanism:
    if isinstance(mechanism, Mechanism):
        return mechanism
    if callable(mechanism):
        return RdpCurve(mechanism)
    raise TypeError(
        "mechanism must be a Mechanism or a function from orders to RDP, got "
        f"{mechanism!r}"
    )


def _checked_orders(orders: Any) -> np.ndarray:
    alpha = _validation.order_array("orders", orders)
    if alpha.max(initial=2.0) > MAX_ORDER:
        raise ValueError(
            f"orders must lie in (1, {MAX_ORDER}] for a series, got {alpha.max()}"
        )
    return alpha


def _check_lower_bound(alpha: np.ndarray, outer: np.ndarray) -> None:
    if np.any(outer != 1):
        raise NotImplementedError(
            "bound='lower' with outer_rate < 1: the factor of the outer levels is an "
            "upper bound only; covered: outer_rate=1"
        )
    fractional = alpha[alpha != np.floor(alpha)]
    if fractional.size:
        raise ValueError(
            "orders must be whole numbers for bound='lower' (interpolation only bounds "
            f"from above), got {fractional[0]}"
        )


def _subsampled(
    mechanism: Mechanism,
    rate: np.ndarray,
    alpha: np.ndarray,
    outer: np.ndarray,
    *,
    series: str,
) -> Any:
    """Flattens settings and orders, runs the kernel, restores the shape."""
    shape = _validation.broadcast_shape(
        mechanism=np.empty(mechanism.shape), sampling=rate, outer_rate=outer
    )
    if 0 in shape + alpha.shape:
        return np.empty(shape + alpha.shape)
    flat = alpha.ravel()
    top = int(np.ceil(flat.max()))
    resolved = mechanism.up_to(top)
    size = math.prod(resolved.shape)

    def row_of(index: Any) -> np.ndarray:
        return np.broadcast_to(index, shape).ravel()

    # Settings refer to rows of the mechanism's parameters: a table is never copied.
    rows = row_of(np.arange(size).reshape(resolved.shape))
    flat_parameters = tuple(
        a.reshape(size, *a.shape[len(resolved.shape) :]) for a in resolved.parameters
    )
    whole = np.unique([np.floor(flat), np.ceil(flat)])
    below = np.searchsorted(whole, np.floor(flat))
    above = np.searchsorted(whole, np.ceil(flat))
    base_rdp = np.asarray(mechanism.rdp(flat)).reshape(size, flat.size)
    num_terms = max(top, 2) - 1
    with using_choice(choose_engine(rows.size * whole.size * num_terms, _BREAK_EVEN)):
        values = _series_at_orders(
            (rows, row_of(rate), row_of(outer)),
            flat_parameters,
            resolved.pure_epsilon.reshape(size),
            base_rdp,
            (flat, whole, below, above),
            curve=resolved.rdp_kernel,
            series=series,
            num_terms=num_terms,
        )
    return values.reshape(shape + alpha.shape)[()]


def _subsampled_kernel(
    settings: tuple[Array, Array, Array],
    parameters: tuple[Array, ...],
    pure_epsilon: Array,
    base_rdp: Array,
    order_grid: tuple[Array, Array, Array, Array],
    *,
    curve: Callable[..., Array],
    series: str,
    num_terms: int,
) -> Array:
    """RDP (N, K) of N settings at K orders.

    Args:
      settings: row of the mechanism, rate and outer rate, each (N,).
      parameters: of the mechanism, each (rows, trailing).
      pure_epsilon: (rows,).
      base_rdp: (rows, K), without sampling.
      order_grid: the orders (K,); the whole orders needed (W,), each >= 1; for each
        order the index of its lower and of its upper whole neighbour (K,).
      curve: kernel of the mechanism (static).
      series: "general", "tight", "lower" or "without_replacement" (static).
      num_terms: length of the longest series, l = 2 … num_terms + 1 (static).
    """
    orders, whole, below, above = order_grid
    xp = namespace(orders)
    below, above = below.astype(int), above.astype(int)
    weight = orders - whole[below]
    index = xp.arange(2, num_terms + 2, dtype=orders.dtype)  # l
    orders_at_once = max(1, min(whole.size, _BLOCK_TERMS // num_terms))
    settings_at_once = max(1, _BLOCK_TERMS // (num_terms * orders_at_once))

    def one_setting(setting: tuple[Array, Array, Array]) -> Array:
        row, rate, outer = setting
        row = row.astype(int)
        terms = (index - 1) * curve(index, *(a[row] for a in parameters))
        log_terms = _log_series_terms(terms, pure_epsilon[row], index, series)
        log_p = xp.log(rate)
        # log(1-p) = -log(1 + p/(1-p)): XLA's log1p is poor (3e-14) near -0.3, and the
        # error is multiplied by the order. Without replacement has no such factor.
        poisson = series != "without_replacement"
        log_q = -xp.log1p(rate / (1 - rate)) if poisson else 0.0

        def at_order(order: Array) -> Array:
            """``log(M - 1)`` at whole orders (...,); ``-inf`` at order 1."""
            order = order[..., None]
            left = order - index
            log_power = xp.where(left > 0, left * log_q, 0.0) + index * log_p
            # A draw of probability 0 costs nothing, be its cost inf: no inf - inf.
            possible = (left >= 0) & (log_power > -xp.inf)
            log_term = log_binomial(order, index) + log_power + log_terms
            return logsumexp(xp.moveaxis(xp.where(possible, log_term, -xp.inf), -1, 0))

        log_excess = map_blocks(at_order, whole, orders_at_once)
        log_moment = xp.logaddexp(0.0, log_excess)
        return _finish(
            log_moment[below],
            log_moment[above],
            weight,
            orders - 1,
            base_rdp[row],
            outer,
            capped=series != "lower",
            positive=(rate > 0) & (outer > 0),
        )

    return map_first(lambda *one: one_setting(one), *settings, batch=settings_at_once)


_series_at_orders = float64_boundary(
    _subsampled_kernel, ("curve", "series", "num_terms")
)


def _log_series_terms(
    exponent: Array, pure_epsilon: Array, index: Array, series: str
) -> Array:
    """Log of the terms of ``M - 1`` less the binomial part; ``exponent`` = (l-1) r(l).

    Poisson: ``c e^x - 1`` (the - 1 is the identity of the module's docstring).
    Without replacement: the minima of Theorem 9.
    """
    xp = namespace(exponent, index)
    if series in ("tight", "lower"):
        return log_expm1(exponent)
    if series == "general":
        # log(3 e^x - 1), with the e^x factored out
        tripled = exponent + xp.log(2 - xp.expm1(-exponent))
        return xp.where(index >= 3, tripled, log_expm1(exponent))
    log_limit = log_expm1(pure_epsilon)
    general = exponent + xp.minimum(math.log(2.0), index * log_limit)
    second = xp.minimum(math.log(4.0) + log_expm1(exponent), general)
    return xp.where(index == 2, second, general)


def _finish(
    log_moment_below: Array,
    log_moment_above: Array,
    weight: Array,
    t: Array,
    base_rdp: Array,
    outer: Array,
    *,
    capped: bool,
    positive: Array,
) -> Array:
    """Interpolates, caps by the unsampled curve, applies the outer rate: RDP (K,)."""
    xp = namespace(weight, t)
    # At whole orders the upper neighbour is the order itself; inf - inf must not arise.
    log_moment = xp.where(
        weight > 0,
        (1 - weight) * log_moment_below + weight * log_moment_above,
        log_moment_below,
    )
    rdp = log_moment / t
    if capped:
        rdp = xp.minimum(rdp, base_rdp)
    thinned = xp.logaddexp(0.0, xp.log(outer) + log_expm1(t * rdp)) / t
    rdp = xp.where(outer < 1, thinned, rdp)
    # What underflows is rounded up, except a cost that is exactly 0.
    rdp = xp.maximum(rdp, xp.finfo(rdp.dtype).tiny)
    return xp.where(positive & (base_rdp > 0), rdp, 0.0)

"""Moments of the privacy-loss distributions of one Gaussian step, by quadrature.

For a dominating pair (P, Q) and an order ``alpha = 1 + t``, ``t > 0``, the quantity is

    excess(t) = E_Q[(P/Q)^alpha] - 1 = E_Q[f_alpha(P/Q - 1)],
    f_a(v) = (1 + v)^a - 1 - a v >= 0.

The excess, not the moment, is summed: at small sampling rates it is 1e-15 and less
and would drown in the 1. The same function serves every design:

* sampled Gaussian, forward: ``E_Q[f_alpha(v)]``; backward, with the roles of P and Q
  exchanged: ``E_Q[f_{1-alpha}(v)]``, as ``E_P[(Q/P)^alpha] = E_Q[(P/Q)^{1-alpha}]``;
* a design whose forward and backward profile are the same function ``H_g(P || Q)``:
  ``E_Q[f_alpha(v) + f_{1-alpha}(v); v > 0]``. (Equation (1) of Sason and Verdú 2016,
  arXiv:1508.00335, writes the moment as an integral of the two profiles; its part in
  ``g > 1`` of the first is ``E_Q[f_alpha(v); v > 0]``, and of the second, for the
  profile of the exchanged pair, ``E_Q[f_{1-alpha}(v); v > 0]``.)

Everything is kept as a logarithm, so neither ``t = 4095`` nor a rate of 1e-12 leaves
the range of float64. Errors of the quadrature are below 1e-10 relative (measured
against mpmath and against much finer rules in the tests).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.losses.windows import antipodal_windows, sampled_windows
from jaxdp_episodic.numerics.combinatorics import log_binomial
from jaxdp_episodic.numerics.power_excess import (
    log_expm1,
    scaled_power_excess,
    scaled_power_excess_derivatives,
)
from jaxdp_episodic.numerics.quadrature import integrate_panels, lay_panels

# So far out float64 cannot place nodes within a bump; there the moment of rate 1, an
# upper bound because moments grow with the rate, takes the integral's place.
_FARTHEST_BUMP = 1e9
_LARGEST_EXPONENT = 600.0
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def log_excess_sampled(
    t: Array,
    sampling_probability: Array,
    shift: Array,
    *,
    direction: str,
    num_panels: int,
    nodes_per_panel: int,
    with_derivatives: bool = False,
) -> tuple[Array, ...]:
    """Log-excess of the sampled pair ``((1-p) N(0,1) + p N(shift,1), N(0,1))``.

    Args:
      t: (n,) order minus one, > 0.
      sampling_probability: (n,) p in (0, 1].
      shift: (n,) distance of the two means in units of the noise, > 0.
      direction: "forward" (P against Q), "backward" (Q against P) or "symmetric"
        (both profiles equal to the forward one, as under a swap).
      num_panels: panels of the quadrature.
      nodes_per_panel: nodes in each panel.
      with_derivatives: see Returns.

    Returns:
      ``(log_excess,)``, (n,): ``log(E_Q[(P/Q)^alpha] - 1)``, exact up to quadrature
      error. With derivatives, three arrays: the first two derivatives of the excess
      in t follow, each divided by the excess, good enough for a search.
    """
    t, p, s = jnp.broadcast_arrays(t, sampling_probability, shift)
    log_odds = jnp.log1p(-p) - jnp.log(p)  # -inf at p = 1
    turn = jnp.maximum(0.5 * s + log_odds / s, -1e300)
    windows, bumps = sampled_windows(t, turn, s, direction)
    floor = 0.5 * s if direction == "symmetric" else jnp.full_like(s, -jnp.inf)

    def log_parts(x: Array) -> tuple[Array, Array]:
        """Log-ratio of P to Q and log-density of Q at x."""
        log_ratio = _log_mixture_ratio(s * (x - 0.5 * s), p)
        return log_ratio, -0.5 * x * x - _LOG_SQRT_2PI

    excess = _log_integral(
        log_parts,
        windows,
        bumps,
        floor,
        t,
        direction,
        num_panels,
        nodes_per_panel,
        with_derivatives,
    )
    far = (1 + t) * s > _FARTHEST_BUMP
    return _unless_gaussian((p >= 1) | far, 0.5 * s * s, t, excess)


def log_excess_antipodal(
    t: Array,
    sampling_probability: Array,
    inner_rate: Array,
    shift: Array,
    *,
    num_panels: int,
    nodes_per_panel: int,
    with_derivatives: bool = False,
) -> tuple[Array, ...]:
    """Log-excess of the antipodal pair, both profiles equal to ``H_g(P || Q)``.

    ``P = (1-p) N(0) + p (1-r) N(-s) + p r N(s)``, ``Q = (1-p) N(0) + p N(-s)``, unit
    variances: a clip unit drawn with probability ``p`` whose contribution flips when
    the protected unit inside it is reached (probability ``r``).

    Args:
      t: (n,) order minus one, > 0.
      sampling_probability: (n,) p in (0, 1].
      inner_rate: (n,) r in (0, 1].
      shift: (n,) clip norm in units of the noise, > 0.
      num_panels: panels of the quadrature.
      nodes_per_panel: nodes in each panel.
      with_derivatives: see `log_excess_sampled`.

    Returns:
      As `log_excess_sampled`.
    """
    t, p, r, s = jnp.broadcast_arrays(t, sampling_probability, inner_rate, shift)
    log_p, log_q, log_r = jnp.log(p), jnp.log1p(-p), jnp.log(r)
    windows, bumps = antipodal_windows(t, log_p, log_q, log_r, s)

    def log_parts(x: Array) -> tuple[Array, Array]:
        """Log-ratio of P to Q and log-density of Q at x > 0."""
        # log of Q's density over that of N(0, 1)
        log_base = jnp.logaddexp(log_q, log_p - s * (x + 0.5 * s))
        # P/Q - 1 = r p (e^{sx} - e^{-sx}) e^{-s²/2} / base
        log_excess_ratio = (
            log_p
            + log_r
            + s * (x - 0.5 * s)
            + jnp.log(-jnp.expm1(-2 * s * x))
            - log_base
        )
        log_ratio = jnp.logaddexp(0.0, log_excess_ratio)
        return log_ratio, log_base - 0.5 * x * x - _LOG_SQRT_2PI

    excess = _log_integral(
        log_parts,
        windows,
        bumps,
        jnp.zeros_like(s),
        t,
        "symmetric",
        num_panels,
        nodes_per_panel,
        with_derivatives,
    )
    whole = (p >= 1) & (r >= 1)
    far = (1 + t) * s > _FARTHEST_BUMP
    return _unless_gaussian(whole | far, 2.0 * s * s, t, excess)


def log_excess_episodes(
    t: Array,
    episode_rate: Array,
    shift: Array,
    num_episodes: Array,
    *,
    num_panels: int,
    nodes_per_panel: int,
    with_derivatives: bool = False,
) -> tuple[Array, ...]:
    """Log-excess for independent episodes, each of which may hold the protected unit.

    With J ~ Binomial(B, eta) the number of episodes that hold it, ``e1 = P(J >= 1)``
    and ``w_k = P(J = k) / e1``, both profiles are the mixture over k of those of a swap
    with rate ``e1`` and shift ``k shift``; the excess is linear in the profiles.

    Args:
      t: (n,) order minus one, > 0.
      episode_rate: (n,) eta in (0, 1], the chance to be in one given episode.
      shift: (n,) shift of one swapped contribution, > 0.
      num_episodes: (n,) B, whole numbers >= 1 as floats. The cost grows with the
        largest B of the batch: all terms count, because the rare large k dominate the
        moments of high order.
      num_panels: panels of the quadrature.
      nodes_per_panel: nodes in each panel.
      with_derivatives: see `log_excess_sampled`.

    Returns:
      As `log_excess_sampled`.
    """
    t, eta, s, episodes = jnp.broadcast_arrays(t, episode_rate, shift, num_episodes)
    log_absent = jnp.log1p(-eta)  # -inf at eta = 1
    any_rate = -jnp.expm1(episodes * log_absent)

    def add_term(k: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        k = k.astype(s.dtype)
        count = jnp.minimum(k, episodes)
        log_weight = log_binomial(episodes, count) + count * jnp.log(eta)
        rest = episodes - count
        log_weight += jnp.where(rest > 0, rest * log_absent, 0.0) - jnp.log(any_rate)
        excess, *derivatives = log_excess_sampled(
            t,
            any_rate,
            count * s,
            direction="symmetric",
            num_panels=num_panels,
            nodes_per_panel=nodes_per_panel,
            with_derivatives=with_derivatives,
        )
        total, *sums = totals
        term = jnp.where(k <= episodes, log_weight + excess, -jnp.inf)
        larger = jnp.logaddexp(total, term)
        finite = jnp.where(jnp.isfinite(larger), larger, 0.0)
        old, new = jnp.exp(total - finite), jnp.exp(term - finite)
        means = (old * a + new * b for a, b in zip(sums, derivatives, strict=True))
        return larger, *means

    last = jnp.max(episodes).astype(jnp.int32)
    zeros = (jnp.zeros_like(s),) * (2 * with_derivatives)
    start = (jnp.full_like(s, -jnp.inf), *zeros)
    return jax.lax.fori_loop(1, last + 1, add_term, start)


def _unless_gaussian(
    is_gaussian: Array, scale: Array, t: Array, excess: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Replaces the integral where the pair is Gaussian, ``L(t) = scale t (1 + t)``."""
    exponent = scale * t * (1 + t)
    results = [log_expm1(exponent)]
    if len(excess) > 1:
        slope, inverse = scale * (1 + 2 * t), 1 / -jnp.expm1(-exponent)
        results += [slope * inverse, (2 * scale + slope * slope) * inverse]
    return tuple(
        jnp.where(is_gaussian, exact, integral)
        for exact, integral in zip(results, excess, strict=True)
    )


def _log_mixture_ratio(log_likelihood_ratio: Array, p: Array) -> Array:
    """``log(1 + p (e^l - 1))`` with full relative precision for every l and p."""
    log_p, log_q = jnp.log(p), jnp.log1p(-p)
    excess = p * jnp.expm1(jnp.minimum(log_likelihood_ratio, 700.0))
    central = jnp.abs(excess) <= 0.5
    # Elsewhere factor out the larger of the two terms (1 - p) + p e^l: near p = 1 and
    # l << 0 their sum is far below 1 and 1 + p (e^l - 1) has no digits left.
    gap = log_likelihood_ratio + log_p - jnp.maximum(log_q, -1e300)
    offset = jnp.where(gap > 0, log_likelihood_ratio + log_p, log_q)
    argument = jnp.where(central, excess, jnp.exp(-jnp.abs(gap)))
    return jnp.where(central, 0.0, offset) + jnp.log1p(argument)


def _log_integral(
    log_parts: Callable[[Array], tuple[Array, Array]],
    windows: tuple[Array, Array, Array],
    bumps: Array,
    floor: Array,
    t: Array,
    direction: str,
    num_panels: int,
    nodes_per_panel: int,
    with_derivatives: bool,
) -> tuple[Array, ...]:
    """``log of the integral of e^{b(x)} f(e^{y(x)} - 1)`` over x >= floor.

    ``y`` is the log-ratio and ``b`` the log-density. f is ``f_alpha`` (forward),
    ``f_{1-alpha}`` (backward) or their sum (symmetric). With derivatives, also the
    first two derivatives of the integral in t, divided by it.
    """
    # The panels are a choice of nodes, not part of the function: no gradient.
    windows, bumps, floor = jax.lax.stop_gradient((windows, bumps, floor))
    y, b = log_parts(jnp.maximum(bumps, floor))
    exponents = [b + (1 + t) * y] * (direction != "backward")
    exponents += [b - t * y] * (direction != "forward")
    # Large moments are scaled down by their size at the bumps. Were a bump missed by
    # far the sum would overflow to inf, which is the safe side.
    peak = jnp.max(jnp.concatenate(exponents), axis=0)
    peak = jax.lax.stop_gradient(jnp.maximum(peak - _LARGEST_EXPONENT, 0.0))

    def integrand(x: Array) -> tuple[Array, ...]:
        y, b = log_parts(x)
        if with_derivatives:
            return scaled_power_excess_derivatives(y, b - peak, t, direction)
        return (scaled_power_excess(y, b - peak, t, direction),)

    lefts, rights = lay_panels(*windows, floor, num_panels=num_panels)
    total, *derivatives = integrate_panels(
        integrand, lefts, rights, nodes_per_panel=nodes_per_panel
    )
    return jnp.log(total) + peak, *(d / total for d in derivatives)

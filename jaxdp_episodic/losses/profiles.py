"""Privacy profiles of one step: hockey-stick divergences of its dominating pair.

``H_g(P || Q) = sup_E P(E) - g Q(E)``, ``g = e^epsilon >= 1``. Each kernel returns the
pair ``(log h_forward, log h_backward)`` of the multistage theorem (docs/theory.md,
"Profiles"): upper bounds, for every pair of neighbours with T the larger one, of
``H_g(M(T) || M(T'))`` and of ``H_g(M(T') || M(T))``. They are *exact* for the
dominating pair, up to rounding (an error of the logarithm of 1e-15 times its size, or
of 1e-15 if that is more; see `log_sampled_profile` for where its backward losses end),
hence an *upper bound* for the mechanism.

The kernels are written in ``u = log g``, because g overflows at u = 709, and for
noise of unit variance: ``shift`` is how far the protected unit moves the sum, divided
by the noise's standard deviation. All arguments broadcast. A rate or shift of 0 gives
``-inf`` (no leak), an infinite shift the total variation of the draw alone; rates and
shifts in (0, 1e-60) are rounded *up* to 1e-60. All kernels are differentiable in every
real argument (`log_episodes_profile` in forward mode only, like every loop whose
length is not known in advance).

Reference: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 2 (advanced joint
convexity) and Theorems 8 to 10, for amplification by each scheme; Balle and Wang
(2018), arXiv:1805.06530, Theorem 8, for the Gaussian profile; Zhu, Dong, Wang (2022),
arXiv:2106.08567, for dominating pairs and their composition.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxdp_episodic.numerics.combinatorics import log_binomial
from jaxdp_episodic.numerics.special import (
    log_mills_difference,
    log_normal_density,
    log_saturating_tail,
)

# Shifts, rates and positions are kept in a range in which neither they nor their
# derivatives overflow. Every cut errs upwards.
_SMALLEST = 1e-60
_LARGEST = 1e100
# Stands for log 0 where -inf would poison a gradient: e^{-1e30} = 0.
_LOG_ZERO = -1e30
# Largest exponent that is exponentiated: its third power does not overflow, which
# the derivatives need.
_LARGEST_EXPONENT = 100.0
# Bound of the rounding of a difference times expm1 (XLA's is good to two of these).
_DIFFERENCE_ERROR = 4.0


def log_gaussian_profile(shift: ArrayLike, u: ArrayLike) -> Array:
    """``log D(shift, e^u)``, ``D(mu, g) = H_g(N(mu, 1) || N(0, 1))``; both directions.

    ``D = phi(t) (m(t) - m(t + mu))`` with ``t = u / mu - mu / 2`` and m the Mills
    ratio, a difference that keeps its digits at small shifts.

    Args:
      shift: (...,) mu >= 0.
      u: (...,) log g >= 0.

    Returns:
      (...,) nats; *exact* (Balle and Wang 2018, Theorem 8).
    """
    shift, u = jnp.broadcast_arrays(shift, u)
    mu = _positive(shift, _LARGEST)
    t = jnp.minimum(jnp.minimum(u, _LARGEST) / mu - 0.5 * mu, _LARGEST)
    return _where_positive(log_saturating_tail(t, mu), shift)


def log_sampled_profile(
    u: ArrayLike,
    outer_rate: ArrayLike,
    sampling_probability: ArrayLike,
    shift: ArrayLike,
) -> tuple[Array, Array]:
    """Profile of the sampled Gaussian pair ``((1-p) N(0,1) + p N(shift,1), N(0,1))``.

    With ``k = 1 - g (1 - p)`` the forward profile is ``r p D(s, 1 + (g-1)/p)`` and the
    backward one ``r k D(s, g p / k)``, 0 where ``k <= 0``. Holds under add_remove where
    single privacy units are clipped and drawn: by Poisson sampling with s the clip norm
    over the noise, without replacement with twice that.

    Args:
      u: (...,) log g >= 0.
      outer_rate: (...,) r in [0, 1], the chance that the unit above is drawn.
      sampling_probability: (...,) p in [0, 1]; at 1 the Gaussian mechanism itself.
      shift: (...,) s >= 0.

    Returns:
      Two arrays (...,) nats; *exact* for the pair, *upper bound* for the mechanism.
      The backward losses end at ``-log(1 - p)``, and k cancels there: the value is
      then the profile at a point nearby, below u by at most 2e-15 of it. It errs
      upwards.
    """
    u, outer, p, s = jnp.broadcast_arrays(u, outer_rate, sampling_probability, shift)
    rate = _positive(p, 1.0)
    forward = jnp.log(rate) + log_gaussian_profile(s, _inner_exponent(u, rate))
    # k = 1 - g (1 - p), as a difference of small numbers when p is small; it cancels
    # where the backward losses end, and must not come out too small there
    taken = (1 - rate) * jnp.expm1(jnp.minimum(u, _LARGEST_EXPONENT))
    k = rate - taken * (1 - _DIFFERENCE_ERROR * jnp.finfo(u.dtype).eps)
    alive = k > 0
    k = jnp.where(alive, k, 1.0)
    # log(g p / k) = log(1 + (g - 1) / k)
    small = u <= 1
    near = jnp.log1p(jnp.expm1(jnp.where(small, u, 1.0)) / k)
    inner = jnp.where(small, near, u + jnp.log(rate) - jnp.log(k))
    backward = jnp.log(k) + log_gaussian_profile(s, jnp.where(alive, inner, 1.0))
    backward = jnp.where(alive, backward, -jnp.inf)
    return _scaled(forward, outer, p, s), _scaled(backward, outer, p, s)


def log_swapped_profile(
    u: ArrayLike, outer_rate: ArrayLike, rate: ArrayLike, shift: ArrayLike
) -> tuple[Array, Array]:
    """Profile where one contribution is exchanged for another with probability eta.

    Both directions are ``r eta D(s, 1 + (g-1)/eta)``. Holds under both relations for
    draws without replacement at the clip level, and for a step clipped as a whole.

    Args:
      u: (...,) log g >= 0.
      outer_rate: (...,) r in [0, 1], the chance that the unit above is drawn.
      rate: (...,) eta in [0, 1], rate at the clip level and below it.
      shift: (...,) s >= 0, the full move: twice the clip norm over the noise.

    Returns:
      Two equal arrays (...,) nats; *exact* for the pair, *upper bound* for the
      mechanism (Balle, Barthe, Gaboardi 2018, Theorem 2).
    """
    u, outer, eta, s = jnp.broadcast_arrays(u, outer_rate, rate, shift)
    safe = _positive(eta, 1.0)
    log_h = jnp.log(safe) + log_gaussian_profile(s, _inner_exponent(u, safe))
    log_h = _scaled(log_h, outer, eta, s)
    return log_h, log_h


def log_antipodal_profile(
    u: ArrayLike,
    outer_rate: ArrayLike,
    sampling_probability: ArrayLike,
    inner_rate: ArrayLike,
    shift: ArrayLike,
) -> tuple[Array, Array]:
    """Profile of a unit drawn by Poisson sampling whose contribution may turn around.

    Both directions are ``r_out H_g(P || Q)`` with ``Q = (1-p) N(0) + p N(-s)`` and
    ``P = (1-p) N(0) + p (1-r) N(-s) + p r N(s)``, unit variances. Holds for Poisson
    sampling at the clip level where the privacy unit lies below it (reached with
    probability r), and under replace_one (r = 1).

    ``H_g(P || Q) = r h1(1 + (g-1)/r)`` with h1 the case r = 1. There P > g Q beyond t,
    ``e^{s t} = sqrt(g) e^theta``, ``sinh theta = (1-p)/p e^{s²/2} sinh(log(g)/2)``, and

        h1 = p phi(t-s) [(m(t-s) - m(t)) + e^{-2 theta} (m(t) - m(t+s))],

    m the Mills ratio: every term is positive, so nothing cancels.

    Args:
      u: (...,) log g >= 0.
      outer_rate: (...,) r_out in [0, 1], chance that the unit above is drawn.
      sampling_probability: (...,) p in [0, 1], at the clip level.
      inner_rate: (...,) r in [0, 1], below the clip level.
      shift: (...,) s >= 0, the clip norm over the noise.

    Returns:
      Two equal arrays (...,) nats; *exact* for the pair, *upper bound* for the
      mechanism.
    """
    u, outer, p, r, s = jnp.broadcast_arrays(
        u, outer_rate, sampling_probability, inner_rate, shift
    )
    inner, rate = _positive(r, 1.0), _positive(p, 1.0)
    width = _positive(s, _LARGEST)
    v = jnp.minimum(_inner_exponent(u, inner), _LARGEST)
    theta = _turning_angle(v, rate, width)
    t = jnp.minimum((0.5 * v + theta) / width, _LARGEST)
    turned = log_saturating_tail(t - width, width)
    kept = log_normal_density(t - width) - 2 * theta + log_mills_difference(t, width)
    log_h = jnp.log(inner) + jnp.log(rate) + jnp.logaddexp(turned, kept)
    log_h = _scaled(log_h, outer, p, r, s)
    return log_h, log_h


def log_episodes_profile(
    u: ArrayLike,
    episode_rate: ArrayLike,
    shift: ArrayLike,
    num_episodes: ArrayLike,
    num_terms: ArrayLike = math.inf,
) -> tuple[Array, Array]:
    """Profile of independent episodes, each of which may hold the protected unit.

    Both directions are ``sum_k P(J = k) D(k s, 1 + (g-1)/e1)`` over k = 1 … B, with
    ``J ~ Binomial(B, eta)`` the number of episodes that hold it, ``e1 = P(J >= 1)``.
    Holds under both relations.

    Args:
      u: (...,) log g >= 0.
      episode_rate: (...,) eta in [0, 1], the chance to be in one given episode.
      shift: (...,) s >= 0 of one swapped contribution: twice the clip norm over the
        noise.
      num_episodes: (...,) B, whole numbers >= 1 as floats. The cost grows with the
        largest B of the batch.
      num_terms: (...,) from 1: how many terms are kept, all B by default. Fewer give
        less, which is no bound of the mechanism.

    Returns:
      Two equal arrays (...,) nats; *exact* for the mixture, *upper bound* for the
      mechanism (Balle, Barthe, Gaboardi 2018, Theorems 2 and 10).
    """
    u, eta, s, episodes = jnp.broadcast_arrays(u, episode_rate, shift, num_episodes)
    episodes = jax.lax.stop_gradient(episodes)
    kept = jnp.minimum(episodes, num_terms)
    safe = _positive(eta, 1.0)
    certain = safe >= 1
    log_absent = jnp.log1p(-jnp.where(certain, 0.5, safe))
    log_absent = jnp.where(certain, _LOG_ZERO, log_absent)
    any_rate = jnp.maximum(-jnp.expm1(episodes * log_absent), _SMALLEST)
    inner = _inner_exponent(u, any_rate)

    def add_term(k: Array, total: Array) -> Array:
        index = k.astype(s.dtype)
        count = jnp.minimum(index, episodes)
        log_weight = log_binomial(episodes, count) + count * jnp.log(safe)
        log_weight += (episodes - count) * log_absent
        term = log_weight + log_gaussian_profile(count * s, inner)
        term = jnp.where(s > 0, term, _LOG_ZERO)
        return jnp.where(index <= kept, jnp.logaddexp(total, term), total)

    last = jnp.max(kept, initial=0.0).astype(jnp.int32)
    start = jnp.full_like(s, _LARGEST * _LOG_ZERO)
    log_h = jax.lax.fori_loop(1, last + 1, add_term, start)
    log_h = _where_positive(log_h, eta, s)
    return log_h, log_h


def _inner_exponent(u: Array, rate: Array) -> Array:
    """``log(1 + (e^u - 1) / rate)`` for rate in (0, 1], at every scale of u."""
    small = u <= 1
    near = jnp.log1p(jnp.expm1(jnp.where(small, u, 1.0)) / rate)
    # e^u overflows; (e^u - (1 - rate)) / rate in logarithms does not.
    large = jnp.where(small, 1.0, u)
    far = large + jnp.log1p(-(1 - rate) * jnp.exp(-large)) - jnp.log(rate)
    return jnp.where(small, near, far)


def _turning_angle(v: Array, p: Array, s: Array) -> Array:
    """``asinh((1-p)/p e^{s²/2} sinh(v/2))`` without overflow."""
    exponent = 0.5 * v + 0.5 * s * s - jnp.log(p)
    moderate = exponent <= _LARGEST_EXPONENT
    half_v, half_square = (jnp.where(moderate, 0.5 * a, 0.0) for a in (v, s * s))
    a = (1 - p) / jnp.where(moderate, p, 1.0) * jnp.exp(half_square) * jnp.sinh(half_v)
    # The same quantity in logarithms; 0 at p = 1 and at v = 0.
    huge = ~moderate & (p < 1) & (v > 0)
    log_a = jnp.where(huge, exponent, 0.0) - math.log(2.0)
    log_a += jnp.log1p(-jnp.where(huge, p, 0.5))
    log_a += jnp.log(-jnp.expm1(-jnp.where(huge, v, 1.0)))
    beyond = log_a > _LARGEST_EXPONENT
    power = jnp.exp(jnp.where(huge & ~beyond, log_a, 0.0))
    a = jnp.where(moderate, a, jnp.where(huge, power, 0.0))
    angle = jnp.log1p(a + a * a / (1 + jnp.sqrt(1 + a * a)))
    return jnp.where(huge & beyond, log_a + math.log(2.0), angle)


def _positive(value: Array, largest: float) -> Array:
    """The value kept within [1e-60, largest]; ``largest`` in place of 0."""
    clipped = jnp.clip(value, _SMALLEST, largest)
    return jnp.where(value > 0, clipped, jnp.full_like(value, min(largest, 1.0)))


def _where_positive(log_h: Array, *factors: Array) -> Array:
    """``log_h`` where all factors are positive, ``-inf`` elsewhere."""
    for factor in factors:
        log_h = jnp.where(factor > 0, log_h, -jnp.inf)
    return log_h


def _scaled(log_h: Array, outer_rate: Array, *factors: Array) -> Array:
    """``log(outer_rate h)``, ``-inf`` where the outer rate or a factor is 0."""
    log_outer = jnp.log(jnp.where(outer_rate > 0, outer_rate, 1.0))
    return _where_positive(log_outer + log_h, outer_rate, *factors)

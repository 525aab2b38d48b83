"""A first epsilon at a given delta, for which a first contour is laid.

Pure kernels: the batch is the last axis of every array.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic.accounting.exact.contour import (
    Transform,
    largest_center,
    transform,
)
from jaxdp_episodic.accounting.exact.mgf import Steps, core_variance
from jaxdp_episodic.accounting.profile import log_profile
from jaxdp_episodic.accounting.rdp.kernels import StepGroup
from jaxdp_episodic.accounting.run import EPISODES, SAMPLED, SWAPPED
from jaxdp_episodic.losses.profiles import (
    log_episodes_profile,
    log_gaussian_profile,
)

# Crossings from which a first epsilon is taken, relative to the order of Rényi's bound.
_FIRST_CROSSINGS = 1.25 ** np.arange(-8.0, 14.0)
# Of the bisection, from this share of Rényi's bound up to it.
_HALVINGS, _SMALLEST = 20, 1e-4
_LOG_NOTHING = -1e300


def first_epsilon(
    kinds: tuple[str, ...],
    log_delta: Array,
    highest: Array,
    order: Array,
    fields: tuple[StepGroup, ...],
    groups: tuple[Steps, ...],
) -> Array:
    """Roughly epsilon at the given delta, (n,), to lay a first contour for.

    By the saddle-point approximation of delta, at crossings about ``order - 1``, which
    gives Rényi's bound ``highest``. Where there is none, because rare large losses
    stand out from many small ones, by these two apart. Neither is a bound.

    Args:
      kinds: of the groups.
      log_delta: (n,) the target.
      highest: (n,) Rényi's bound of epsilon.
      order: (n,) at which that is reached.
      fields: of the steps, (K, n) each.
      groups: the laws of their losses.
    """
    core = core_variance(groups)
    near = _by_saddle_points(log_delta, jnp.maximum(order - 1, 1e-8), core, groups)
    apart = _by_jumps(kinds, log_delta, highest, core, fields)
    return jnp.where((near > 0) & (near < highest), near, apart)


def _by_jumps(
    kinds: tuple[str, ...],
    log_delta: Array,
    highest: Array,
    core: Array,
    fields: tuple[StepGroup, ...],
) -> Array:
    """Epsilon where the small losses' Gaussian or a single step reach delta.

    What one large loss alone gives is the sum of the steps' profiles.
    """
    mu = jnp.sqrt(jnp.maximum(core, 0.0))[None]

    def approximate(epsilon: Array) -> Array:
        # Gaussians of all groups side by side: compiled once.
        shifts, inner = [mu], [epsilon[None]]
        weights, others = [jnp.where(mu > 0, 0.0, _LOG_NOTHING)], []
        for kind, group in zip(kinds, fields, strict=True):
            log_count = jnp.log(jnp.maximum(group.count, 1e-300))
            if kind in (SAMPLED, SWAPPED):
                rate = jnp.maximum(group.rate, 1e-300)
                grown = jnp.expm1(jnp.minimum(epsilon, 500.0)) / rate
                shifts.append(group.shift)
                inner.append(jnp.log1p(grown))
                weights.append(log_count + jnp.log(group.outer_rate * rate))
                continue
            if kind == EPISODES:
                # As `episode_terms` left them: the numbers of episodes and of terms.
                sizes = group.inner_rate, group.num_episodes
                both = log_episodes_profile(epsilon, group.rate, group.shift, *sizes)
            else:
                arrays = group.outer_rate, group.rate, group.inner_rate, group.shift
                both = log_profile(epsilon, *arrays, group.num_episodes, kind=kind)
            others.append(jnp.maximum(*both) + log_count)
        once = log_gaussian_profile(jnp.concatenate(shifts), jnp.concatenate(inner))
        once = jnp.concatenate([once + jnp.concatenate(weights), *others])
        return jax.nn.logsumexp(jnp.maximum(once, _LOG_NOTHING), axis=0)

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        # First the scale, then the digits.
        middle = jnp.where(high > 2 * low, jnp.sqrt(low * high), 0.5 * (low + high))
        above = approximate(middle) > log_delta
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    start = (_SMALLEST * highest, highest)
    _, high = jax.lax.fori_loop(0, _HALVINGS, halve, start)
    return high


def _by_saddle_points(
    log_delta: Array, c: Array, core: Array, groups: tuple[Steps, ...]
) -> Array:
    """Epsilon where the saddle-point approximation is delta; NaN if it is nowhere."""
    largest = largest_center(log_delta, groups)
    c = jnp.minimum(c * _FIRST_CROSSINGS[:, None], largest)
    with_core = transform(c, core, groups)
    plain = transform(c, jnp.zeros_like(core), groups)
    at = Transform(
        *(
            jnp.where(with_core.valid, a, b)
            for a, b in zip(with_core, plain, strict=True)
        )
    )
    x = at.slope
    used = with_core.valid & (core > 0)
    mu = jnp.sqrt(jnp.where(core > 0, core, 1.0))
    known = jnp.where(used, log_gaussian_profile(mu, jnp.maximum(x, 0.0)), -1e300)
    approximate = at.log_value - c * x - 0.5 * jnp.log(2 * math.pi * at.curvature)
    approximate = jnp.logaddexp(approximate, known)
    # delta falls with c: the last point above it, and the next one
    above = (approximate >= log_delta) & (x > 0)
    index = jnp.arange(c.shape[0])[:, None]
    last = jnp.max(jnp.where(above, index, -1), axis=0)
    ends = jnp.stack([last, jnp.minimum(last + 1, c.shape[0] - 1)])
    ends = jnp.maximum(ends, 0)
    x, approximate = (jnp.take_along_axis(a, ends, axis=0) for a in (x, approximate))
    share = (approximate[0] - log_delta) / (approximate[0] - approximate[1])
    found = (last >= 0) & (share >= 0) & (share <= 1)
    return jnp.where(found, x[0] + share * (x[1] - x[0]), jnp.nan)

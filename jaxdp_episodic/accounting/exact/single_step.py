"""Epsilon and delta of a single step: read off its profile, no integral."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic._precision import float64_boundary
from jaxdp_episodic.accounting.profile import log_profile
from jaxdp_episodic.accounting.run import DominatingPair

_BISECTIONS = 80


def solve_single_step(
    quantity: str,
    target: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
) -> np.ndarray:
    """Returns epsilon or log(delta) of runs of one step, whichever of several it is.

    *Exact* up to the profile's rounding error, the larger of both directions.

    Args:
      quantity: "epsilon" or "log_delta".
      target: (n,) log(delta) or epsilon.
      pairs: dominating pairs with fields (n,).
      counts: (n,) each; exactly one of a setting's is 1, the others are 0.
    """
    value = np.full(target.shape, 0.0 if quantity == "epsilon" else -np.inf)
    for pair, count in zip(pairs, counts, strict=True):
        taken = np.flatnonzero(count == 1)
        if taken.size == 0:
            continue
        fields = [f[taken] for f in pair[1:]]
        outer, rate, inner, sensitivity, noise, episodes = fields
        value[taken] = _profile_kernel(quantity)(
            target[taken],
            outer,
            rate,
            inner,
            sensitivity / noise,
            episodes,
            kind=pair.kind,
        )
    return value


@functools.cache
def _profile_kernel(quantity: str) -> Callable[..., np.ndarray]:
    solve = _epsilon_of_profile if quantity == "epsilon" else _log_delta_of_profile
    return float64_boundary(jax.jit(solve, static_argnames="kind"))


def _log_delta_of_profile(
    epsilon: jax.Array, *fields: jax.Array, kind: str
) -> jax.Array:
    forward, backward = log_profile(epsilon, *fields, kind=kind)
    return jnp.minimum(jnp.maximum(forward, backward), 0.0)


def _epsilon_of_profile(
    log_delta: jax.Array, *fields: jax.Array, kind: str
) -> jax.Array:
    """Where the profile falls to delta, by bisection from above."""

    def excess(x: jax.Array) -> jax.Array:
        return _log_delta_of_profile(x, *fields, kind=kind) - log_delta

    def widen(_: int, high: jax.Array) -> jax.Array:
        return jnp.where(excess(high) > 0, high * 16.0, high)

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]):
        low, high = bracket
        # First the scale, then the digits.
        middle = jnp.where(
            high > 2 * low, jnp.sqrt(jnp.maximum(low, 1e-30) * high), 0.5 * (low + high)
        )
        above = excess(middle) > 0
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    high = jax.lax.fori_loop(0, 40, widen, jnp.full_like(log_delta, 1e-12))
    # Asked before the bisection, whose end may lie above the target by a rounding.
    unreached = excess(high) > 0
    bracket = (jnp.zeros_like(high), high)
    _, high = jax.lax.fori_loop(0, _BISECTIONS, halve, bracket)
    at_zero = excess(jnp.zeros_like(high)) <= 0
    return jnp.where(at_zero, 0.0, jnp.where(unreached, jnp.inf, high))

"""Epsilons within JAX programs: ours, and fifteen lines of anybody's own jnp.

A part of ``make bench``; docs/in_jax.md says what it shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp

import jaxdp_episodic as jde
from jaxdp_episodic import traced

ALPHAS, TERMS = jnp.arange(2.0, 65.0), jnp.arange(65.0)
SETTINGS = 20  # rates, and noise multipliers
COUNTS = (10_000, 1_000_000)
REPEATS = 3


def measure_in_jax(delta: float) -> dict[str, Any]:
    """Times of jitted batches of Rényi epsilons, and how often theirs are too small."""
    rates = np.float32(np.repeat(np.geomspace(1e-5, 0.1, SETTINGS), SETTINGS))
    noises = np.float32(np.tile(np.geomspace(0.5, 8, SETTINGS), SETTINGS))
    step = sampled_gaussian(np.float64(rates), np.float64(noises))
    results: dict[str, Any] = {"num_settings": rates.size}
    for count in COUNTS:

        def ours(rates: Any, noises: Any, count: int = count) -> Any:
            asked = {"delta": delta, "num_steps": count, "method": "rdp"}
            return traced.epsilon(sampled_gaussian(rates, noises), **asked)

        def theirs(rate: Any, noise: Any, count: int = count) -> Any:
            return anybodys_epsilon(rate, noise, float(count), delta)

        asked = {"delta": delta, "num_steps": count}
        true = jde.epsilon(step, **asked)
        proven = jde.epsilon(step, method="rdp", **asked)
        seconds, ours_found = timed(jax.jit(jax.vmap(ours)), rates, noises)
        their_seconds, found = timed(jax.jit(jax.vmap(theirs)), rates, noises)
        results[str(count)] = {
            "seconds": seconds,
            "their_seconds": their_seconds,
            "ours_below_proven": float(np.mean(ours_found < proven)),
            "theirs_below_proven": float(np.mean(found < proven)),
            "theirs_below_true": float(np.mean(found < true)),
        }
    return results


def sampled_gaussian(rate: Any, noise: Any) -> jde.GaussianStep:
    """The step that both know."""
    draw = jde.Poisson("example", sampling_probability=rate)
    return jde.GaussianStep(draw, noise_multiplier=noise)


def anybodys_epsilon(rate: Any, noise: Any, num_steps: float, delta: float) -> Any:
    """Epsilon by Rényi-DP at the orders 2 to 64, in the dtype of its arguments."""

    def log_moment(a: Any) -> Any:
        terms = gammaln(a + 1.0) - gammaln(TERMS + 1.0) - gammaln(a - TERMS + 1.0)
        terms += TERMS * jnp.log(rate) + (a - TERMS) * jnp.log1p(-rate)
        terms += TERMS * (TERMS - 1) / (2 * noise**2)
        return logsumexp(jnp.where(a >= TERMS, terms, -jnp.inf))

    curve = num_steps * jax.vmap(log_moment)(ALPHAS) / (ALPHAS - 1)
    best = curve + jnp.log1p(-1 / ALPHAS) - jnp.log(delta * ALPHAS) / (ALPHAS - 1)
    return jnp.maximum(best.min(), 0.0)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, np.ndarray]:
    """The best time of a warm call, and the answer."""
    answer = jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds), np.asarray(answer, np.float64)

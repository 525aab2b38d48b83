"""The hardened noise: contributions on an integer grid, discrete Gaussian noise.

A clipped contribution is rounded to whole grid steps, `GRID` of them to the clip norm.
Its norm is then checked in whole numbers, the sum is one of whole numbers, and the
noise is exactly discrete Gaussian: nothing that is released depends on
how floating-point numbers were rounded, and there is no number that only one of two
neighbours can give. What it costs is that of Gaussian noise of the same multiplier, by
`covering_variance`.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic.numerics.discrete_gaussian import (
    covering_variance,
    sample_discrete_gaussian,
)

# Squares of numbers up to 2^16 fit in 32 bits.
GRID = 60_000
"""Grid steps in a clip norm."""

LARGEST_NOISE = 1_000.0
"""Largest noise multiplier; with it the noise is within 64 bits many times over."""

MOST_UNITS = 2**22
"""Most clip units of a step: sums of the lower halves stay within 32 bits."""

# A sum is kept as two: multiples of 256, and the rest.
_HALF = 8
_BASE = 16
_CHUNK = 2**15


def no_sum(params: Any) -> Any:
    """Returns the empty sum: int32 pytree, (2, ...) for each leaf (...)."""
    return jax.tree.map(lambda leaf: jnp.zeros((2, *leaf.shape), jnp.int32), params)


def on_grid(contribution: Any, l2_clip_norm: Array) -> Any:
    """Returns a clipped contribution in whole grid steps, of an l2-norm <= `GRID`.

    Rounding to the nearest may lengthen a vector by half the diagonal of a cell, so it
    is shortened by as much before. One that is too long all the same, which clipping
    rules out, becomes zero: the bound holds in whole numbers, whatever float32 did.

    Args:
      contribution: pytree of float32, or float64, of norm <= C.
      l2_clip_norm: C > 0, scalar.

    Returns:
      int32 pytree, (2, ...) for each leaf (...): ``256 a + b`` is the number.
    """
    leaves, structure = jax.tree.flatten(contribution)
    steps = steps_in_norm(sum(leaf.size for leaf in leaves))
    # Divided first: no product that could leave float32's range.
    rounded = [jnp.round(leaf / l2_clip_norm * steps) for leaf in leaves]
    largest = jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in rounded])
    small = jnp.max(largest) <= GRID  # false for NaN too
    whole = [jnp.where(small, x, 0.0).astype(jnp.int32) for x in rounded]
    fits = small & _is_within_grid(whole)
    whole = [jnp.where(fits, x, 0) for x in whole]
    halves = [jnp.stack([x >> _HALF, x & (2**_HALF - 1)]) for x in whole]
    return jax.tree.unflatten(structure, halves)


def steps_in_norm(num_entries: int) -> float:
    """Returns how many grid steps a clip norm is before it is rounded.

    Raises:
      ValueError: so many entries that rounding takes half of the clip norm.
    """
    # Half the diagonal of a cell, and a little for float32.
    steps = GRID - 0.51 * math.sqrt(num_entries)
    if steps < GRID / 2:
        raise ValueError(
            f"noise='discrete' takes up to {GRID**2:,} parameters, got {num_entries:,}"
        )
    return steps


def check_units(rows: int) -> None:
    """Refuses more rows of clip units than sums have room for.

    Raises:
      ValueError: more than `MOST_UNITS`.
    """
    if rows > MOST_UNITS:
        raise ValueError(
            f"a step with discrete noise takes up to {MOST_UNITS:,} rows of clip "
            f"units, got {rows:,}"
        )


def released_sum(
    total: Any,
    seed: bytes,
    *,
    l2_clip_norm: float,
    noise_multiplier: float,
    normalizer: float,
    dtype: Any = np.float32,
) -> Any:
    """Returns the sum with discrete noise, in the contributions' unit, divided.

    The noise is that of `covering_variance` at ``noise_multiplier`` times `GRID` steps,
    the most that a contribution can be: as private as Gaussian noise of
    ``noise_multiplier`` clip norms, at any number of entries and steps that can be run
    (see `log_ratio_bound`). All that follows it is post-processing.

    Args:
      total: sums of what `on_grid` returned.
      seed: secret bytes, of this step alone.
      l2_clip_norm: C.
      noise_multiplier: in (0, 1000].
      normalizer: public divisor.
      dtype: of what is released.

    Returns:
      pytree of NumPy arrays, (...) for each leaf (2, ...).
    """
    halves, structure = jax.tree.flatten(jax.device_get(total))
    sizes = [leaf[0].size for leaf in halves]
    variance = covering_variance(noise_multiplier * GRID * (1 + 1e-12))
    noise = sample_discrete_gaussian(variance, sum(sizes), seed)
    unit = l2_clip_norm / steps_in_norm(sum(sizes)) / normalizer
    released = []
    for leaf, part in zip(halves, np.split(noise, np.cumsum(sizes)[:-1]), strict=True):
        whole = (
            (leaf[0].astype(np.int64) << _HALF) + leaf[1] + part.reshape(leaf.shape[1:])
        )
        released.append((whole * unit).astype(dtype))
    return jax.tree.unflatten(structure, released)


def step_seed(sampler_entropy: int, noise_key: np.ndarray, step: int) -> bytes:
    """Returns the 32 bytes from which a step's noise follows.

    Args:
      sampler_entropy: secret of the run, up to 256 bits; from the draws, which are
        never released, nothing of it can be learned by way of a hash.
      noise_key: (2,) uint32, secret of the run.
      step: the step's number.
    """
    words = (
        sampler_entropy.to_bytes(32, "little"),
        np.asarray(noise_key, "<u4").tobytes(),
        step.to_bytes(8, "little"),
    )
    return hashlib.sha3_256(b"discrete noise of a step" + b"".join(words)).digest()


def _is_within_grid(whole: list[Array]) -> Array:
    """Whether the sum of the squares is at most ``GRID**2``, exactly.

    Each entry is at most `GRID`. Sums are kept in base 2^16 so that none overflows.
    """
    high, low = _digits([jnp.square(x.reshape(-1).astype(jnp.uint32)) for x in whole])
    limit_high, limit_low = GRID**2 >> _BASE, GRID**2 & (2**_BASE - 1)
    return (high < limit_high) | ((high == limit_high) & (low <= limit_low))


def _digits(squares: list[Array]) -> tuple[Array, Array]:
    """Sum of numbers in base 2^16: the higher digits, at most 2^16, and the lowest."""
    most = jnp.uint32(2**_BASE)
    high = [x >> _BASE for x in squares]
    low = [x & (most - 1) for x in squares]
    highs, lows = jnp.concatenate(high), jnp.concatenate(low)
    while highs.size > 1:
        rest = -highs.size % _CHUNK if highs.size > _CHUNK else 0
        width = min(highs.size + rest, _CHUNK)
        # Up to 2^15 numbers below 2^16 each, and as many of at most 2^16.
        lows, highs = (
            jnp.sum(jnp.pad(x, (0, rest)).reshape(-1, width), axis=1, dtype=jnp.uint32)
            for x in (lows, highs)
        )
        highs = jnp.minimum(highs + (lows >> _BASE), most)
        lows = lows & (most - 1)
    return highs.reshape(()), lows.reshape(())

"""Scales one contribution to an l2-norm of at most C, by clipping or normalizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.trainer.gradient.discrete_noise import sum_of_squares
from jaxdp_episodic.trainer.gradient.precision import training_dtype

# A float32 sum of squares over 10^8 numbers is accurate to about 1e-6, and the scaled
# result to 3e-6 (at most 46 units: docs/proofs.md). Contributions are clipped to
# slightly less than the clip norm, so that rounding cannot exceed it. Discrete noise
# has its own allowance for the worst case.
_MARGIN = 1e-5
# Smallest and largest scale of a contribution's numbers. Both, and their reciprocals,
# are normal numbers of the type.
_SCALES = {"float32": (1e-30, 1e37), "float64": (1e-300, 1e307)}
# Sums of squares above this are accurate even if small squares underflow: for 10^10
# numbers the error is at most 1e-8 of the sum.
_SMALL = {"float32": 1e-20, "float64": 1e-200}


def clip_by_norm(contribution: Any, l2_clip_norm: Array) -> tuple[Any, Array, Array]:
    """Scales a pytree to an l2-norm of at most C > 0; non-finite ones become zero.

    Also returns the norm before (0 if not finite), and whether every entry was finite.
    """
    return _scaled(
        contribution, l2_clip_norm, lambda full, _, scale: jnp.minimum(full, scale)
    )


def scale_to_norm(contribution: Any, l2_clip_norm: Array) -> tuple[Any, Array, Array]:
    """Scales up, too: to C within 1e-5, never above; else like `clip_by_norm`."""
    # Zero stays zero, and contributions too short to measure become zero (float32
    # numbers below about 1e-40).

    def factor(full: Array, relative: Array, scale: Array) -> Array:
        is_measured = relative * relative > _SMALL[relative.dtype.name]
        return jnp.where(is_measured, full, 0.0)

    return _scaled(contribution, l2_clip_norm, factor)


def _scaled(
    contribution: Any, l2_clip_norm: Array, factor_of: Callable[..., Array]
) -> tuple[Any, Array, Array]:
    """Returns a contribution times ``factor_of(full, relative, scale) / scale``."""
    dtype = training_dtype(contribution)
    leaves = [jnp.asarray(leaf, dtype) for leaf in jax.tree.leaves(contribution)]
    scale, relative, finite = _measured(leaves)
    bound = jnp.asarray(l2_clip_norm, dtype) * (1 - _MARGIN)
    # Each factor is in the type's range; their product may not be.
    unit, factor = 1 / scale, factor_of(bound / relative, relative, scale)
    leaves = [jnp.where(finite, leaf * unit * factor, 0.0) for leaf in leaves]
    norm = jnp.where(finite, scale * relative, 0.0)
    return jax.tree.unflatten(jax.tree.structure(contribution), leaves), norm, finite


def _measured(leaves: list[Array]) -> tuple[Array, Array, Array]:
    """Returns a scale, the l2-norm divided by it, and whether all are finite."""
    squares = sum_of_squares(leaves)

    def directly() -> tuple[Array, Array, Array]:
        root = jnp.sqrt(squares)
        return jnp.ones_like(root), root, jnp.isfinite(root)

    def scaled() -> tuple[Array, Array, Array]:
        # Squares of large entries overflow and those of small ones underflow, so first
        # divide by the largest. The scale and its reciprocal must be normal numbers,
        # because processors may flush subnormal ones to zero.
        each = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves]
        largest = jnp.max(jnp.stack(each))
        scale = jnp.clip(largest, *_SCALES[squares.dtype.name])
        root = jnp.sqrt(sum_of_squares([x / scale for x in leaves]))
        return scale, root, jnp.isfinite(root)

    # Scaling takes two more passes over all numbers and is rarely needed.
    is_plain = (squares > _SMALL[squares.dtype.name]) & jnp.isfinite(squares)
    return jax.lax.cond(is_plain, directly, scaled)

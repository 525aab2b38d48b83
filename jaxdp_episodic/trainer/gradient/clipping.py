"""One contribution, scaled to an l2-norm of at most C: clipped, or normalized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.trainer.gradient.discrete_noise import sum_of_squares
from jaxdp_episodic.trainer.gradient.precision import training_dtype

# Float32 sums of squares over 10^8 numbers are good to about 1e-6, and what is made of
# them to 3e-6 (46 units at worst: docs/proofs.md): contributions are clipped to a bit
# less than the clip norm, so that rounding cannot exceed it. For the worst that a sum
# may be rounded discrete noise has room of its own.
_MARGIN = 1e-5
# Least and largest scale of a contribution's numbers: normal ones of its type, as are
# their reciprocals.
_SCALES = {"float32": (1e-30, 1e37), "float64": (1e-300, 1e307)}
# Sum of squares of a contribution above which those that vanish make no difference: of
# 10^10 numbers, 1e-8 of it.
_SMALL = {"float32": 1e-20, "float64": 1e-200}


def clip_by_norm(contribution: Any, l2_clip_norm: Array) -> tuple[Any, Array, Array]:
    """Scales a contribution to an l2-norm of at most C; non-finite ones become zero.

    Args:
      contribution: pytree of float arrays, one clip unit's.
      l2_clip_norm: C > 0, scalar.

    Returns:
      ``(clipped, norm, is_finite)``: pytree, float64 if a leaf is, else float32; norm
      before clipping (0 where not finite, ``inf`` above the type's range), and whether
      every entry was finite.
    """
    return _scaled(
        contribution, l2_clip_norm, lambda full, _, scale: jnp.minimum(full, scale)
    )


def scale_to_norm(contribution: Any, l2_clip_norm: Array) -> tuple[Any, Array, Array]:
    """Scales a contribution to an l2-norm of C, but for a margin of 1e-5, never above.

    Zero stays zero, and what is too short to be measured becomes zero: of float32
    numbers below about 1e-40. So does what is not finite. Arguments and what is
    returned are those of `clip_by_norm`; the norm is that before scaling.
    """

    def factor(full: Array, relative: Array, scale: Array) -> Array:
        is_measured = relative * relative > _SMALL[relative.dtype.name]
        return jnp.where(is_measured, full, 0.0)

    return _scaled(contribution, l2_clip_norm, factor)


def _scaled(
    contribution: Any, l2_clip_norm: Array, factor_of: Callable[..., Array]
) -> tuple[Any, Array, Array]:
    """A contribution times ``factor_of(full, relative norm, scale) / scale``."""
    dtype = training_dtype(contribution)
    leaves = [jnp.asarray(leaf, dtype) for leaf in jax.tree.leaves(contribution)]
    scale, relative, finite = _measured(leaves)
    bound = jnp.asarray(l2_clip_norm, dtype) * (1 - _MARGIN)
    # Each of the two factors is in range; their product may not be.
    unit, factor = 1 / scale, factor_of(bound / relative, relative, scale)
    leaves = [jnp.where(finite, leaf * unit * factor, 0.0) for leaf in leaves]
    norm = jnp.where(finite, scale * relative, 0.0)
    return jax.tree.unflatten(jax.tree.structure(contribution), leaves), norm, finite


def _measured(leaves: list[Array]) -> tuple[Array, Array, Array]:
    """A scale, the l2-norm in units of it, and whether every entry is finite."""
    squares = sum_of_squares(leaves)

    def directly() -> tuple[Array, Array, Array]:
        root = jnp.sqrt(squares)
        return jnp.ones_like(root), root, jnp.isfinite(root)

    def scaled() -> tuple[Array, Array, Array]:
        # Squares of large entries overflow and those of small ones vanish: scale by
        # the largest first. The scale and its reciprocal must be normal numbers:
        # processors may take subnormal ones for zero.
        each = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves]
        largest = jnp.max(jnp.stack(each))
        scale = jnp.clip(largest, *_SCALES[squares.dtype.name])
        root = jnp.sqrt(sum_of_squares([x / scale for x in leaves]))
        return scale, root, jnp.isfinite(root)

    # Rarely scaled, which takes two more passes over all numbers.
    is_plain = (squares > _SMALL[squares.dtype.name]) & jnp.isfinite(squares)
    return jax.lax.cond(is_plain, directly, scaled)

"""Scales contributions to an l2-norm of at most C, which may follow a quantile.

If C follows a quantile of the contributions' norms, each clip unit contributes, in
addition to its gradient g of norm at most C, a number b: 1/2 if the norm before
clipping was at most C, -1/2 if it was larger or not finite, and 0 if the unit is empty.
The step releases the sums of g / C and of b / r, with noise of the same standard
deviation in all coordinates. Together they are one vector per unit, of norm at most
sqrt(1 + 1 / (4 r^2)). The noise multiplier is relative to this norm, so epsilon is the
same as without b (docs/proofs.md, "A clip norm that follows the data").

On the grid, C is `GRID` steps, and 1 / (2 r) is rounded down to whole steps, so the
bound holds for the numbers that are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.config.training_parts import NORMALIZE, ClippingConfig
from jaxdp_episodic.trainer.gradient.discrete_noise import GRID, sum_of_squares
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
# Makes up for the rounding of a square root, which must not make the noise smaller.
_ROUNDED = 1 + 1e-12


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


# --- A clip norm that follows a quantile ---


def steps_of_vote(clipping: ClippingConfig) -> int:
    """Returns |b| / r in grid steps (a clip norm has `GRID`); 0 without a count."""
    return int(GRID / (2 * clipping.count_noise)) if clipping.counts else 0


def longest(clipping: ClippingConfig) -> float:
    """Returns the largest norm of a clip unit's contribution, in clip norms."""
    vote = steps_of_vote(clipping)
    return math.sqrt(1 + (vote / GRID) ** 2) * _ROUNDED if vote else 1.0


def count_deviation(clipping: ClippingConfig, noise_multiplier: Any) -> float:
    """Returns the standard deviation of the noise on the sum of the b."""
    ratio = GRID / (2 * steps_of_vote(clipping))
    return ratio * longest(clipping) * float(noise_multiplier)


def vote(unit: Any, norm: Array, finite: Array, l2_clip_norm: Array) -> Array:
    """Returns 2 b of a drawn clip unit, int32; 0 if all of its slots are masked."""
    is_short = finite & ~(norm > l2_clip_norm)
    held = jnp.any(getattr(unit, "slot_mask", jnp.ones((1,), jnp.float32)) > 0)
    return jnp.where(held, jnp.where(is_short, 1, -1), 0).astype(jnp.int32)


def released_share(
    clipping: ClippingConfig,
    votes: Any,
    noise: np.ndarray,
    expected_units: float,
    *,
    is_discrete: bool,
    weight: int = 1,
) -> np.ndarray:
    """Returns the noised share of contributions of norm at most C, float32 scalar."""
    # With bands the weight of the votes is at most the length that the noise hides.
    steps = steps_of_vote(clipping)
    if is_discrete:
        # Exact whole numbers; the division is post-processing. A vote is 2 b.
        total = (weight * steps * int(votes) + int(noise)) / (2 * weight * steps)
    else:
        total = int(votes) / 2 + float(noise) * GRID / (2 * steps)
    return np.asarray(0.5 + total / expected_units, np.float32)


def next_clip_norm(
    clipping: ClippingConfig,
    bounds: tuple[float, float],
    l2_clip_norm: float,
    share: float,
) -> float:
    """Returns the next clip norm, which depends only on what the step released."""
    change = clipping.rate * (clipping.quantile - float(share))
    logarithm = math.log(l2_clip_norm) + change
    low, high = bounds
    return math.exp(min(max(logarithm, math.log(low)), math.log(high)))


def clipped_and_noised(clipping: ClippingConfig, noise: str, step: GaussianStep) -> str:
    """Returns, for a privacy statement, what a step does to gradients and their sum."""
    deviation = longest(clipping) * float(step.noise_multiplier)
    scaled, norm, count = "clipped", "the clip norm", ""
    if clipping.kind == NORMALIZE:
        scaled, norm = "scaled to one norm", "this norm"
    if clipping.counts:
        scaled += f", to a norm that followed the {clipping.quantile:g} quantile"
        count = (
            f", and noise of {count_deviation(clipping, step.noise_multiplier):.5g} to "
            "the count of those that were at most that long"
        )
    if step.bands is not None:
        number, level = step.bands.count, step.bands.level
        count += (
            f". The noise is correlated: it was added to weighted sums of {number} "
            "steps in a row (the squares of the weights add up to 1), and each step's "
            f"own sum was computed from these. Steps drew from {number} groups of "
            f"`{level}` units in turn"
        )
    return (
        f"the gradient of each drawn `{step.clip_unit}` was {scaled}, and {noise} "
        f"of {deviation:.5g} times {norm} was added to their sum{count}"
    )

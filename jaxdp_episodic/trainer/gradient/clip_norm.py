"""A clip norm that follows a quantile of the contributions' norms, by a noised count.

In addition to its gradient g, of norm at most C, a clip unit contributes b: 1/2 if the
norm before clipping was at most C, -1/2 if it was larger or not finite, and 0 if the
unit is empty. The step releases the sums of g / C and of b / r, with noise of the same
standard deviation in all coordinates. Together they are one vector per unit, of norm at
most sqrt(1 + 1 / (4 r^2)). The noise multiplier is relative to this norm, so epsilon is
the same as without b (docs/proofs.md, "A clip norm that follows the data").

On the grid, C is `GRID` steps, and 1 / (2 r) is rounded down to whole steps, so the
bound holds for the numbers that are summed.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.config.training_parts import NORMALIZE, ClippingConfig
from jaxdp_episodic.trainer.gradient.discrete_noise import GRID

# Makes up for the rounding of a square root, which must not make the noise smaller.
_ROUNDED = 1 + 1e-12


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

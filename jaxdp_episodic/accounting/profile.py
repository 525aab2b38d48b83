"""The exact privacy profile of a single step, read off its dominating pair."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic._precision import float64_boundary
from jaxdp_episodic.accounting.run import (
    ANTIPODAL,
    SAMPLED,
    SWAPPED,
    dominating_pair,
)
from jaxdp_episodic.describe.step import GaussianStep
from jaxdp_episodic.losses import profiles

DIRECTIONS = ("forward", "backward", "both")


def privacy_profile(
    step: GaussianStep, epsilon: Any, *, direction: str = "both"
) -> np.ndarray | np.float64:
    """Returns delta of a *single* step at the given epsilon.

    *Exact* for the step's dominating pair, hence an upper bound for the step; for the
    designs of the multistage theorem there are data sets that reach it. It is not to
    be added up over steps: for those use `epsilon` and `delta`.

    Args:
      step: one step, not a composed run.
      epsilon: >= 0, nats; any shape that broadcasts with the step.
      direction: "forward" (the larger data set against the smaller), "backward" or
        "both" (the larger delta).

    Returns:
      float64 in [0, 1] of the broadcast shape; with a `Population` the worst path's.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range.

    Reference: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647, and the theorems in
    docs/theory.md, "Profiles" and "Other designs".
    """
    if not isinstance(step, GaussianStep):
        raise TypeError(f"step must be a GaussianStep, got {step!r}")
    target = _validation.nonnegative_array("epsilon", epsilon)
    _validation.choice("direction", direction, DIRECTIONS)
    shape = _validation.broadcast_shape(
        step=np.empty(step.shape, np.uint8), epsilon=target
    )
    pair = dominating_pair(step)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        shift = pair.sensitivity / pair.noise_multiplier
    shift = np.where(np.isnan(shift), np.inf, shift)
    forward, backward = _kernel()(
        target[..., None],
        pair.outer_rate,
        pair.rate,
        pair.inner_rate,
        shift,
        pair.num_episodes,
        kind=pair.kind,
    )
    chosen = {
        "forward": forward,
        "backward": backward,
        "both": np.maximum(forward, backward),
    }[direction]
    worst = np.broadcast_to(np.exp(chosen).max(axis=-1), shape)
    return np.float64(worst) if worst.ndim == 0 else np.array(worst)


@functools.cache
def _kernel() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return float64_boundary(jax.jit(log_profile, static_argnames="kind"))


def log_profile(
    u: jax.Array,
    outer_rate: jax.Array,
    rate: jax.Array,
    inner_rate: jax.Array,
    shift: jax.Array,
    num_episodes: jax.Array,
    *,
    kind: str,
) -> tuple[jax.Array, jax.Array]:
    """The profile kernel of one kind, fields broadcast together."""
    arrays = (u, outer_rate, rate, inner_rate, shift, num_episodes)
    u, outer_rate, rate, inner_rate, shift, num_episodes = jnp.broadcast_arrays(*arrays)
    if kind == SAMPLED:
        return profiles.log_sampled_profile(u, outer_rate, rate, shift)
    if kind == SWAPPED:
        return profiles.log_swapped_profile(u, outer_rate, rate, shift)
    if kind == ANTIPODAL:
        return profiles.log_antipodal_profile(u, outer_rate, rate, inner_rate, shift)
    return profiles.log_episodes_profile(u, rate, shift, num_episodes)

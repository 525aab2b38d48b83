"""How a release changes the state of a run: post-processing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.gradient.clip_norm import next_clip_norm
from jaxdp_episodic.trainer.run.state import TrainingState


def updater(
    optimizer: optax.GradientTransformation,
    clipping: ClippingConfig,
    l2_clip_norm: float,
    noise_deviation: float,
) -> Callable[[TrainingState, Any], TrainingState]:
    """Returns the compiled ``(state, released) -> state``."""
    bounds = clipping.bounds(l2_clip_norm)
    moved = _compiled_update(optimizer)

    def update(state: TrainingState, released: Any) -> TrainingState:
        gradient, norm = released, l2_clip_norm
        if clipping.counts:
            gradient, norm = released.gradient, float(state.clip_norm)
        deviation = noise_deviation * norm
        params, kept = moved(state.params, state.optimizer_state, gradient, deviation)
        # What is left as it was is the very same: see `PrivateStatistics.table`.
        state = state._replace(params=params, optimizer_state=kept)
        if not clipping.counts:
            return state
        norm = next_clip_norm(clipping, bounds, norm, float(released.share))
        return state._replace(clip_norm=jnp.asarray(norm, jnp.float32))

    return update


@functools.lru_cache(maxsize=8)  # a run that is resumed or repeated compiles nothing
def _compiled_update(optimizer: optax.GradientTransformation) -> Any:
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def moved(
        params: Any, kept: Any, gradient: Any, noise_deviation: Any
    ) -> tuple[Any, Any]:
        # Optax mixes types; a caller's strict promotion is about the caller's code.
        with jax.numpy_dtype_promotion("standard"):
            updates, kept = optimizer.update(
                gradient, kept, params, noise_deviation=noise_deviation
            )
            return optax.apply_updates(params, updates), kept

    return moved

"""What a release does to the state of a run: post-processing, whenever it is done."""

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
    """Returns the compiled ``(state, released) -> state``; types stay.

    The optimizer gets the noise's deviation in each coordinate, if it takes any: the
    one given, which is that at a clip norm of 1, times the clip norm. Where the
    clipping counts, a `Counted` is released and the state gets the next clip norm.

    Raises:
      ValueError: a first clip norm that is not between the bounds of its clipping.
    """
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

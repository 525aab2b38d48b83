"""What changes from step to step, and how an optimizer changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp_episodic.training.checkpoint import as_arrays


class TrainingState(NamedTuple):
    """What changes from step to step.

    Attributes:
      params: pytree of float arrays.
      optimizer_state: of the optax optimizer.
    """

    params: Any
    optimizer_state: Any


def initial_state(
    optimizer: optax.GradientTransformation, params: Any
) -> TrainingState:
    """Returns the state before the first step.

    Gradients are float32, and so is what the optimizer keeps, also of parameters of
    lower precision: it would change its type at the first step, and come back rounded
    from a checkpoint.

    Args:
      optimizer: an optax optimizer.
      params: pytree of arrays.
    """

    def in_float32(leaf: Any) -> Any:
        low = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.float32) if low else leaf

    kept = optimizer.init(jax.tree.map(in_float32, params))
    return TrainingState(params, as_arrays(kept))


def updater(
    optimizer: optax.GradientTransformation,
) -> Callable[[TrainingState, Any], TrainingState]:
    """Returns the compiled ``(state, gradient) -> state``; parameters keep their type.

    Args:
      optimizer: an optax optimizer.
    """

    def update(state: TrainingState, gradient: Any) -> TrainingState:
        # Optax mixes types; a caller's strict promotion is about the caller's code.
        with jax.numpy_dtype_promotion("standard"):
            updates, kept = optimizer.update(
                gradient, state.optimizer_state, state.params
            )
            return TrainingState(optax.apply_updates(state.params, updates), kept)

    return jax.jit(update)

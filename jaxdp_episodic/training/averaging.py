"""An average of the parameters along a run: post-processing, so it costs nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxdp_episodic.requests.training_parts import checked_decay


class Averaged(NamedTuple):
    """State of an optimizer that `averaged` wraps.

    Attributes:
      inner: the optimizer's own state.
      sums: float32 pytree: what the parameters were, weighted.
      weight: sum of the weights, by which the sums are divided.
    """

    inner: Any
    sums: Any
    weight: Array


def averaged(
    optimizer: optax.GradientTransformation, decay: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer, keeping an exponential average of the parameters.

    After t steps it is the mean of the parameters after each, the one i steps back
    with weight ``decay^i``: weights sum to 1, so the start leaves no trace in it. It is
    what `Trainer.params` returns; gradients are taken at the last parameters.

    Args:
      optimizer: an optax optimizer.
      decay: in [0, 1); 0 averages nothing.

    Raises:
      ValueError: a decay out of range.
    """
    rate = checked_decay(decay)
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Averaged:
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return Averaged(optimizer.init(params), sums, jnp.zeros((), jnp.float32))

    def update(
        updates: Any, state: Any, params: Any = None, **others: Any
    ) -> tuple[Any, Averaged]:
        moves, inner = optimizer.update(updates, state.inner, params, **others)
        moved = optax.apply_updates(params, moves)
        sums = jax.tree.map(
            lambda s, p: rate * s + (1 - rate) * p.astype(jnp.float32),
            state.sums,
            moved,
        )
        return moves, Averaged(inner, sums, rate * state.weight + (1 - rate))

    return optax.GradientTransformationExtraArgs(init, update)


def average_of(params: Any, optimizer_state: Any) -> Any:
    """Returns the average of the parameters; without one, or steps, these themselves.

    Args:
      params: the last parameters, whose types the average gets.
      optimizer_state: of the optimizer, which may be an `averaged` one.
    """
    if not isinstance(optimizer_state, Averaged) or not optimizer_state.weight > 0:
        return params
    weight = optimizer_state.weight
    return jax.tree.map(
        lambda s, p: (s / weight).astype(p.dtype), optimizer_state.sums, params
    )

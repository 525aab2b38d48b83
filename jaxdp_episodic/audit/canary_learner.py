"""A learner whose contributions shout which canaries were drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxdp_episodic.training.episode import Episode

MODEL, CANARIES = "model", "canaries"
# An episode without the canary, in the same clip unit as one with it, must not
# outshout that one.
_OPPOSITE = 0.01
# Contributions are much longer than the clip norm, so that clipping must do its part.
_LOUDNESS = 1e4


@dataclass(frozen=True)
class CanaryLearner:
    """Wraps a learner; gradient canaries in its episodes replace its gradient.

    The parameters get an entry "canaries", one number each. The gradient of an episode
    with marks (see `gradient_canaries`) points along these numbers, and has nothing of
    the model's: the worst contribution that clipping lets through. Episodes without
    marks contribute what they always do.

    Attributes:
      learner: what is wrapped.
      feature_shape: of an example, before marks were put behind its features.
      feature_dtype: name of its type.
      num_canaries: how many there are.
      l2_clip_norm: C of the run.
    """

    learner: Any
    feature_shape: tuple[int, ...]
    feature_dtype: str
    num_canaries: int
    l2_clip_norm: float

    @property
    def is_regression(self) -> bool:
        """As the wrapped learner."""
        return self.learner.is_regression

    @property
    def couples_examples(self) -> bool:
        """As the wrapped learner."""
        return getattr(self.learner, "couples_examples", True)

    @property
    def ways(self) -> int | None:
        """As the wrapped learner, if it says so."""
        return getattr(self.learner, "ways", None)

    def params(self, params: Any) -> dict[str, Any]:
        """Returns the parameters with those of the canaries."""
        return {MODEL: params, CANARIES: jnp.zeros(self.num_canaries, jnp.float32)}

    def loss(self, params: Any, episode: Episode) -> Array:
        """The wrapped learner's loss, or where there are canaries a loud plane."""
        episode, marks = self._without_marks(episode)
        direction = self._direction(marks)
        has_canary = jnp.any(direction != 0)
        own = self.learner.loss(params[MODEL], episode)
        slope = _LOUDNESS * self.l2_clip_norm * direction
        loud = jax.lax.stop_gradient(own) + jnp.dot(slope, params[CANARIES])
        return jnp.where(has_canary, loud, own)

    def predict(self, params: Any, episode: Episode) -> Array:
        """The wrapped learner's predictions."""
        return self.learner.predict(params[MODEL], self._without_marks(episode)[0])

    def _without_marks(self, episode: Episode) -> tuple[Episode, Array]:
        """The episode as it would be, and the marks of all that is in it."""

        def plain(inputs: Array) -> Array:
            size = math.prod(self.feature_shape)
            flat = inputs.reshape(-1, size + 1)[:, :-1]
            return flat.reshape(-1, *self.feature_shape).astype(self.feature_dtype)

        parts = (
            (episode.support_inputs, episode.support_mask),
            (episode.query_inputs, episode.query_mask),
        )
        marks = [jnp.where(mask > 0, inputs[..., -1], 0.0) for inputs, mask in parts]
        bare = episode._replace(
            support_inputs=plain(episode.support_inputs),
            query_inputs=plain(episode.query_inputs),
        )
        return bare, jnp.concatenate([jnp.ravel(mark) for mark in marks])

    def _direction(self, marks: Array) -> Array:
        """(num_canaries,) 1 of a canary that is there, a bit of -1 of its others."""
        which = jnp.round(jnp.abs(marks)).astype(jnp.int32)
        slots = jnp.zeros(self.num_canaries + 1, jnp.float32)
        there = slots.at[jnp.where(marks > 0, which, 0)].set(1.0)[1:]
        beside = slots.at[jnp.where(marks < 0, which, 0)].set(1.0)[1:]
        return jnp.where(there > 0, 1.0, -_OPPOSITE * beside)


class Recorded(NamedTuple):
    """State of an optimizer that `recording` wraps.

    Attributes:
      inner: the optimizer's own state.
      canaries: (num_canaries,) what the last released gradient says about them.
    """

    inner: Any
    canaries: Array


def recording(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns the optimizer, keeping the canaries' part of the last noised gradient."""

    def init(params: Any) -> Recorded:
        return Recorded(optimizer.init(params), jnp.zeros_like(params[CANARIES]))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Recorded]:
        moves, inner = optimizer.update(updates, state.inner, params)
        return moves, Recorded(inner, updates[CANARIES])

    return optax.GradientTransformation(init, update)

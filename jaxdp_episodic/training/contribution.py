"""From what was drawn of one clip unit to its contribution, before clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.training.blocks import Block
from jaxdp_episodic.training.episode import (
    Episode,
    classification_episode,
    regression_episode,
)
from jaxdp_episodic.training.learners import Learner


def to_episode(unit: Block, *, shots: int, is_regression: bool) -> Episode:
    """Returns the episode in one row of a block whose slots are one episode's."""
    if is_regression:
        return regression_episode(
            unit.inputs, unit.targets, unit.slot_mask, shots=shots
        )
    return classification_episode(unit.inputs, unit.slot_mask, shots=shots)


def contribution_loss(
    learner: Learner, slot_shape: tuple[int, ...], *, shots: int
) -> Callable[[Any, Block], Array]:
    """Returns ``loss(params, unit)``, whose gradient is one clip unit's contribution.

    The clip unit must hold at least one whole episode, because within an episode every
    support example changes every term of the loss: were a part of it clipped, one
    example would move all parts (locality; docs/theory.md, "The setting and its
    preconditions"). A clip unit that holds several episodes contributes the mean
    over those of its own that were drawn. (The number of slots would not do: under
    Poisson it is the largest number of children of *any* unit, so one unit's growth
    would move everybody's contribution.) Of a learner that couples nothing
    (`Supervised`) any unit may be clipped, a single example too.

    Args:
      learner: see `Learner`. An episode of classes takes two axes of slots (class,
        example), one of a regression task takes one.
      slot_shape: of the sampler.
      shots: support examples, of each class or of the task; 0 without episodes.

    Raises:
      TypeError: shots of the wrong type.
      ValueError: a clip unit smaller than an episode, one with no room for a query, or
        episodes of another number of classes than the learner is for.
    """
    if not getattr(learner, "couples_examples", True):
        if shots != 0:
            raise ValueError(
                f"shots must be 0 with {type(learner).__name__}, which has no support, "
                f"got {shots!r}"
            )
        return _supervised_loss(learner, slot_shape)
    _validation.integer_array("shots", shots, minimum=1)
    axes = 1 if learner.is_regression else 2
    if len(slot_shape) < axes:
        raise ValueError(
            f"clip_unit must contain a whole episode of {type(learner).__name__} "
            f"({axes} level(s) below it: support and query interact), got one with "
            f"{len(slot_shape)} level(s) below it; clip the episode or task"
        )
    if slot_shape[-1] <= shots:
        raise ValueError(
            "shots must be less than the examples drawn (some must be queries), "
            f"got shots={shots} of {slot_shape[-1]}"
        )
    _check_ways(learner, slot_shape)
    around, within = slot_shape[:-axes], slot_shape[-axes:]
    number = math.prod(around)

    def episode_loss(params: Any, unit: Block) -> Array:
        episode = to_episode(unit, shots=shots, is_regression=learner.is_regression)
        return learner.loss(params, episode)

    if not around:
        return episode_loss

    def mean_loss(params: Any, unit: Block) -> Array:
        def flat(array: Array) -> Array:
            return array.reshape(number, *within, *array.shape[len(slot_shape) :])

        unit_mask = jnp.ones(number, jnp.float32)
        episodes = Block(
            flat(unit.inputs), flat(unit.targets), flat(unit.slot_mask), unit_mask
        )
        # Recomputed one by one in the backward pass: memory of one episode.
        one = jax.checkpoint(lambda episode: episode_loss(params, episode))
        losses = jax.lax.map(one, episodes)
        there = jnp.any(episodes.slot_mask.reshape(number, -1) > 0, axis=1)
        total = jnp.sum(jnp.where(there, losses, 0.0))
        return total / jnp.maximum(jnp.sum(there.astype(jnp.float32)), 1.0)

    return mean_loss


def _check_ways(learner: Learner, slot_shape: tuple[int, ...]) -> None:
    """Refuses episodes of another number of classes than the learner is for."""
    ways = None if learner.is_regression else getattr(learner, "ways", None)
    if ways is not None and ways != slot_shape[-2]:
        raise ValueError(
            "ways must be the number of classes of the episodes that are drawn, "
            f"{slot_shape[-2]}, got a {type(learner).__name__} with ways={ways}"
        )


def _supervised_loss(
    learner: Learner, slot_shape: tuple[int, ...]
) -> Callable[[Any, Block], Array]:
    """Mean loss over all examples in the clip unit; they are the queries."""
    number = math.prod(slot_shape)
    kind = jnp.float32 if learner.is_regression else jnp.int32

    def loss(params: Any, unit: Block) -> Array:
        inputs = unit.inputs.reshape(number, *unit.inputs.shape[len(slot_shape) :])
        targets = unit.targets.reshape(number).astype(kind)
        mask = unit.slot_mask.reshape(number)
        nobody = (inputs[:0], targets[:0], mask[:0])
        return learner.loss(params, Episode(*nobody, inputs, targets, mask))

    return loss

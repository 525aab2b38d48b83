"""Predictions from an episode alone, by learners that nothing was trained for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.trainer.config.training_parts import EUCLIDEAN
from jaxdp_episodic.trainer.gradient.precision import at_least_float32
from jaxdp_episodic.trainer.learners.episode import Episode
from jaxdp_episodic.trainer.learners.learners import ProtoNet


def as_they_are(params: Any, inputs: Array) -> Array:
    """Returns the inputs (n, ...) as rows (n, D); there are no parameters."""
    return inputs.reshape(len(inputs), -1)


def untrained(learner: Any, ways: int) -> Any:
    """Returns the learner that does nothing but look at the features as they are.

    Nearest class mean, by the learner's distance if it has one; of numbers `Ridge`.
    """
    if isinstance(learner, ProtoNet):
        return dataclasses.replace(learner, apply=as_they_are, resplits=False)
    if learner.is_regression:
        return Ridge()
    distance = getattr(learner, "distance", EUCLIDEAN)
    return ProtoNet(as_they_are, ways=ways, distance=distance)


@dataclass(frozen=True)
class Ridge:
    """Ridge regression on the support of a task, which knows of no other task.

    The penalty is the mean squared distance of the support's inputs from their mean: in
    a direction of average variance the slope is shrunk as by one example at the mean,
    whatever the features' unit. A support of one example predicts its target.
    """

    is_regression: ClassVar[bool] = True

    def predict(self, params: Any, episode: Episode) -> Array:
        """(Q,) predictions; there are no parameters, and a support of none gives 0."""
        mask = episode.support_mask
        number = jnp.maximum(jnp.sum(mask), 1.0)
        rows, queries = (
            at_least_float32(as_they_are(params, inputs))
            for inputs in (episode.support_inputs, episode.query_inputs)
        )
        # A row that is not there may hold anything.
        rows = jnp.where(mask[:, None] > 0, rows, 0.0)
        targets = jnp.where(mask > 0, episode.support_targets, 0.0)
        middle, mean = jnp.sum(rows, axis=0) / number, jnp.sum(targets) / number
        rows = jnp.where(mask[:, None] > 0, rows - middle, 0.0)
        # Dual form: there may be more features than examples.
        products = rows @ rows.T
        penalty = jnp.trace(products) / number
        penalty = jnp.where(penalty > 0, penalty, 1.0)  # all inputs are the same
        among = products + penalty * jnp.eye(len(mask), dtype=rows.dtype)
        weights = jnp.linalg.solve(among, jnp.where(mask > 0, targets - mean, 0.0))
        return mean + (queries - middle) @ (rows.T @ weights)

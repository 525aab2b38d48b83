"""Learners: the loss of an episode and its predictions.

A learner is a frozen dataclass around a pure function ``apply(params, inputs)`` of any
framework. Its loss couples all support and query examples of an episode, so the episode
is the smallest unit whose gradient may be clipped. Only `Supervised` and `Classifier`
couple nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.config.training_parts import (
    COSINE,
    CROSS_ENTROPY,
    DISTANCES,
    EMBEDS,
    EUCLIDEAN,
    HIDDEN,
    LOGITS,
    LOSSES,
    SQUARED_ERROR,
)
from jaxdp_episodic.trainer.gradient.precision import at_least_float32
from jaxdp_episodic.trainer.learners.episode import Episode, classification_episode
from jaxdp_episodic.trainer.learners.models import parted

Apply = Callable[[Any, Array], Array]

ABSENT = -1e9  # logit of a class without support; its softmax is 0
# Weight of the logits next to features of norm 1. Chosen with validation and test
# scores of six development sets in view; 0.05 to 0.2 did no harm. Only mnist and the
# phosphor icons were held back (experiments/kinds_of_data.py).
_LOGITS_WEIGHT = 0.1
_SHORT = 1e-6  # embeddings of norm far below this are not scaled to norm 1
_function = functools.partial(_validation.instance, kinds=Callable, words="a function")
_positive = functools.partial(_validation.one, check=_validation.positive_array)


@dataclass(frozen=True)
class ProtoNet:
    """Prototypical networks: the class with the nearest mean support embedding.

    A class without support is left out of the softmax, and so are its queries.

    Reference: Snell, Swersky, Zemel (2017), arXiv:1703.05175, Equation 2.

    Attributes:
      apply: ``(params, inputs (n, *features)) -> (n, embedding)``.
      ways: classes per episode, at least 1.
      distance: "euclidean" (squared), or "cosine": embeddings and prototypes are scaled
        to norm 1.
      temperature: factor > 0 of the logits, which are negative distances, or cosines.
      resplits: train on every example as support. The loss is the mean over all
        rotations of a class's examples, in sampled order, through support and query.
        Each sampled example is used several times, within its clip unit. Requires the
        layout of `classification_episode`.
    """

    apply: Apply
    ways: int
    distance: str = EUCLIDEAN
    temperature: float = 1.0
    resplits: bool = False
    is_regression: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _function("apply", self.apply)
        _validation.whole_number("ways", self.ways)
        _validation.choice("distance", self.distance, DISTANCES)
        _positive("temperature", self.temperature)
        _validation.flag("resplits", self.resplits)

    def loss(self, params: Any, episode: Episode) -> Array:
        """Returns the mean cross-entropy of the queries."""
        embedded = self._embedded(params, episode)
        if not self.resplits:
            return self._loss(embedded)

        def slots(support: Array, query: Array) -> Array:
            rows = [a.reshape(self.ways, -1, *a.shape[1:]) for a in (support, query)]
            return jnp.concatenate(rows, axis=1)

        inputs = slots(embedded.support_inputs, embedded.query_inputs)
        mask = slots(embedded.support_mask, embedded.query_mask)
        shots = len(episode.support_mask) // self.ways
        losses = []
        for by in range(mask.shape[1]):
            rolled = (jnp.roll(array, by, axis=1) for array in (inputs, mask))
            losses.append(self._loss(classification_episode(*rolled, shots=shots)))
        return jnp.mean(jnp.stack(losses))

    def predict(self, params: Any, episode: Episode) -> Array:
        """Returns logits of the queries, (Q, ways)."""
        return self._logits(self._embedded(params, episode))[0]

    def embedding(self, params: Any, inputs: Array) -> Array:
        """Returns (n, embedding) of inputs (n, *features); prototypes are its means."""
        embedded = at_least_float32(self.apply(params, inputs))
        if embedded.ndim != 2 or len(embedded) != len(inputs):
            raise ValueError(
                f"apply must return embeddings of shape (n, size) for n={len(inputs)} "
                f"inputs, got {embedded.shape}"
            )
        return _unit(embedded) if self.distance == COSINE else embedded

    def _embedded(self, params: Any, episode: Episode) -> Episode:
        """Returns the episode with embeddings instead of inputs."""
        number = len(episode.support_inputs)
        inputs = jnp.concatenate([episode.support_inputs, episode.query_inputs])
        embedded = self.embedding(params, inputs)
        return episode._replace(
            support_inputs=embedded[:number], query_inputs=embedded[number:]
        )

    def _loss(self, embedded: Episode) -> Array:
        logits, count = self._logits(embedded)
        mask = jnp.where(count[embedded.query_targets] > 0, embedded.query_mask, 0.0)
        return _mean_loss(CROSS_ENTROPY, logits, embedded.query_targets, mask)

    def _logits(self, embedded: Episode) -> tuple[Array, Array]:
        """Returns logits (Q, ways), and how many support examples classes have."""
        support = embedded.support_inputs
        weights = jax.nn.one_hot(
            embedded.support_targets, self.ways, dtype=support.dtype
        )
        weights *= embedded.support_mask[:, None]
        count, sums = jnp.sum(weights, axis=0), weights.T @ support
        if self.distance == COSINE:
            logits = embedded.query_inputs @ _unit(sums).T
        else:
            prototypes = sums / jnp.maximum(count, 1.0)[:, None]
            # Not |q|^2 - 2 q.p + |p|^2, which cancels for near points.
            apart = embedded.query_inputs[:, None, :] - prototypes[None]
            logits = -jnp.sum(jnp.square(apart), axis=-1)
        return jnp.where(count > 0, self.temperature * logits, ABSENT), count


@dataclass(frozen=True)
class MAML:
    """Model-agnostic meta-learning: gradient steps on the support, loss on the queries.

    An episode without support contributes nothing.

    Reference: Finn, Abbeel, Levine (2017), arXiv:1703.03400, Algorithm 1.

    Attributes:
      apply: ``(params, inputs (n, *features)) -> (n, ways)`` logits or (n, 1) values.
      inner_steps: gradient steps on the support, at least 1.
      inner_learning_rate: step size of the inner steps, > 0.
      first_order: treat the inner gradients as constants (section 5.2 of the paper).
      checkpoint: recompute each inner step in the backward pass: less memory, more
        time.
      task_loss: "cross_entropy" or "squared_error".
    """

    apply: Apply
    inner_steps: int = 3
    inner_learning_rate: float = 0.1
    first_order: bool = False
    checkpoint: bool = False
    task_loss: str = CROSS_ENTROPY

    def __post_init__(self) -> None:
        _function("apply", self.apply)
        _validation.flag("first_order", self.first_order)
        _validation.flag("checkpoint", self.checkpoint)
        _validation.whole_number("inner_steps", self.inner_steps)
        _positive("inner_learning_rate", self.inner_learning_rate)
        _validation.choice("task_loss", self.task_loss, LOSSES)

    @property
    def is_regression(self) -> bool:
        """Whether the loss is squared error."""
        return self.task_loss == SQUARED_ERROR

    def loss(self, params: Any, episode: Episode) -> Array:
        """Returns the mean query loss after adaptation."""
        has_support = jnp.any(episode.support_mask > 0)
        mask = jnp.where(has_support, episode.query_mask, 0.0)
        outputs = self.predict(params, episode)
        return _mean_loss(self.task_loss, outputs, episode.query_targets, mask)

    def predict(self, params: Any, episode: Episode) -> Array:
        """Returns outputs for the queries after adaptation: (Q, ways) or (Q,)."""
        return _outputs(self, self.adapt(params, episode), episode.query_inputs)

    def adapt(self, params: Any, episode: Episode) -> Any:
        """Returns the parameters after the inner steps on the support."""
        inner, whole = self._adapted_part(params)

        def support_loss(inner: Any) -> Array:
            outputs = _outputs(self, whole(inner), episode.support_inputs)
            targets, mask = episode.support_targets, episode.support_mask
            return _mean_loss(self.task_loss, outputs, targets, mask)

        def descend(inner: Any) -> Any:
            gradient = jax.grad(support_loss)(inner)
            if self.first_order:
                gradient = jax.lax.stop_gradient(gradient)
            return jax.tree.map(
                lambda p, g: p - self.inner_learning_rate * g, inner, gradient
            )

        if self.checkpoint:
            descend = jax.checkpoint(descend)
        for _ in range(self.inner_steps):
            inner = descend(inner)
        return whole(inner)

    def _adapted_part(self, params: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Returns what the inner steps change, and how it becomes all parameters."""
        return params, lambda inner: inner


@dataclass(frozen=True)
class ANIL(MAML):
    """Almost no inner loop: MAML that adapts only the head.

    Reference: Raghu, Raghu, Bengio, Vinyals (2020), arXiv:1909.09157.

    Attributes:
      head: keys of the adapted part in the nested dictionary of parameters, such as
        "head" or "decoder/last".
    """

    head: str = "head"

    def _adapted_part(self, params: Any) -> tuple[Any, Callable[[Any], Any]]:
        head = tuple(self.head.split("/"))
        inner, whole = parted(params, lambda path: path[: len(head)] == head)
        if not inner:
            raise ValueError(
                f"head must name a part of the parameters, got {self.head!r}; at the "
                f"top there are {tuple(params)}"
            )
        return inner, whole


@dataclass(frozen=True)
class Supervised:
    """Plain supervised learning: a mean loss over examples that do not interact.

    With examples as clip units this is DP-SGD (Abadi et al. 2016, arXiv:1607.00133).

    Attributes:
      apply: ``(params, inputs (n, *features)) -> (n, classes)`` logits, or (n, 1)
        values. It must treat each input independently: no batch statistics.
      task_loss: "cross_entropy" or "squared_error".
    """

    apply: Apply
    task_loss: str = CROSS_ENTROPY
    couples_examples: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _function("apply", self.apply)
        _validation.choice("task_loss", self.task_loss, LOSSES)

    @property
    def is_regression(self) -> bool:
        """Whether the loss is squared error."""
        return self.task_loss == SQUARED_ERROR

    def loss(self, params: Any, episode: Episode) -> Array:
        """Returns the mean loss of the queries; the support is ignored."""
        outputs = _outputs(self, params, episode.query_inputs)
        targets, mask = episode.query_targets, episode.query_mask
        return _mean_loss(self.task_loss, outputs, targets, mask)

    def predict(self, params: Any, episode: Episode) -> Array:
        """Returns outputs for the queries: (Q, classes), or (Q,) values."""
        return _outputs(self, params, episode.query_inputs)


@dataclass(frozen=True, kw_only=True)
class Classifier(Supervised):
    """A classifier of the training classes that tells new classes apart by prototypes.

    It is trained like `Supervised`: examples do not interact and may be clipped singly.
    It predicts the classes of an episode like a `ProtoNet`.

    Attributes:
      features: ``(params, inputs (n, *features)) -> (n, units)``, the input of the last
        layer; required unless ``embed`` is "logits".
      embed: what prototypes are means of: "logits", "features", or "both": features of
        norm 1 next to 0.1 times the logits. Uninformative logits are small, so that
        "both" is then close to the features alone.
      ways: classes per episode, at least 1.
      distance: as in `ProtoNet`.
    """

    features: Apply | None = None
    embed: str = LOGITS
    ways: int
    distance: str = EUCLIDEAN

    def __post_init__(self) -> None:
        _validation.choice("task_loss", self.task_loss, (CROSS_ENTROPY,))
        _validation.choice("embed", self.embed, EMBEDS)
        if self.features is None and self.embed != LOGITS:
            raise ValueError(f"features must be given with embed={self.embed!r}")
        _ = self._prototypes  # checks ways and distance

    def predict(self, params: Any, episode: Episode) -> Array:
        """Returns logits of the queries among the episode's classes, (Q, ways)."""
        return self._prototypes.predict(params, episode)

    def embedding(self, params: Any, inputs: Array) -> Array:
        """Returns (n, embedding) of inputs (n, *features); prototypes are its means."""
        return self._prototypes.embedding(params, inputs)

    @property
    def _prototypes(self) -> ProtoNet:
        return ProtoNet(self._embedded, ways=self.ways, distance=self.distance)

    def _embedded(self, params: Any, inputs: Array) -> Array:
        if self.features is None or self.embed == LOGITS:
            return self.apply(params, inputs)
        features = at_least_float32(self.features(params, inputs))
        if self.embed == HIDDEN:
            return features
        logits = at_least_float32(self.apply(params, inputs))
        parts = [_unit(features), _LOGITS_WEIGHT * logits]
        return jnp.concatenate(parts, axis=-1)


def _unit(rows: Array) -> Array:
    """Returns rows of norm 1; shorter for tiny rows, so that gradients are bounded."""
    squares = jnp.sum(jnp.square(rows), axis=-1, keepdims=True)
    return rows / jnp.sqrt(squares + _SHORT**2)


def _outputs(learner: Any, params: Any, inputs: Array) -> Array:
    """Returns outputs as float32 or wider; values lose their last axis, of size 1."""
    outputs = at_least_float32(learner.apply(params, inputs))
    if not learner.is_regression:
        if outputs.ndim != 2:
            raise ValueError(
                f"apply must return logits of shape (n, classes), got {outputs.shape}"
            )
        return outputs
    # Values (n,) would broadcast against targets (n, 1), and silently change the loss.
    if outputs.ndim != 2 or outputs.shape[1] != 1:
        raise ValueError(
            "apply must return values of shape (n, 1) with task_loss="
            f"{SQUARED_ERROR!r}, got {outputs.shape}"
        )
    return outputs[:, 0]


def _mean_loss(task_loss: str, outputs: Array, targets: Array, mask: Array) -> Array:
    """Returns the mean over examples that exist; 0 if there are none."""
    if task_loss == SQUARED_ERROR:
        losses = jnp.square(outputs - targets)
    else:
        logs = jax.nn.log_softmax(outputs)
        losses = -jnp.take_along_axis(logs, targets[:, None], axis=-1)[:, 0]
    losses = jnp.where(mask > 0, losses, 0.0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(mask), 1.0)


def as_they_are(params: Any, inputs: Array) -> Array:
    """Returns the inputs (n, ...) as rows (n, D); ``params`` is ignored."""
    return inputs.reshape(len(inputs), -1)


def untrained(learner: Any, ways: int) -> Any:
    """Returns a learner without parameters, as a baseline on the unchanged features."""
    # Classes: nearest class mean, by the learner's distance if it has one.
    if isinstance(learner, ProtoNet):
        return dataclasses.replace(learner, apply=as_they_are, resplits=False)
    if learner.is_regression:
        return Ridge()
    distance = getattr(learner, "distance", EUCLIDEAN)
    return ProtoNet(as_they_are, ways=ways, distance=distance)


@dataclass(frozen=True)
class Ridge:
    """Ridge regression on the support of a single task."""

    # The penalty is the mean squared distance of the support's inputs from their mean.
    # So in a direction of average variance the slope shrinks as if there were one more
    # example at the mean, whatever the unit of the features. A support of one example
    # predicts its target.
    is_regression: ClassVar[bool] = True

    def predict(self, params: Any, episode: Episode) -> Array:
        """Returns (Q,) predictions; 0 without support. ``params`` is ignored."""
        mask = episode.support_mask
        number = jnp.maximum(jnp.sum(mask), 1.0)
        rows, queries = (
            at_least_float32(as_they_are(params, inputs))
            for inputs in (episode.support_inputs, episode.query_inputs)
        )
        # A masked row may hold any value.
        rows = jnp.where(mask[:, None] > 0, rows, 0.0)
        targets = jnp.where(mask > 0, episode.support_targets, 0.0)
        middle, mean = jnp.sum(rows, axis=0) / number, jnp.sum(targets) / number
        rows = jnp.where(mask[:, None] > 0, rows - middle, 0.0)
        # Dual form, because there may be more features than examples.
        products = rows @ rows.T
        penalty = jnp.trace(products) / number
        penalty = jnp.where(penalty > 0, penalty, 1.0)  # all inputs are equal
        among = products + penalty * jnp.eye(len(mask), dtype=rows.dtype)
        weights = jnp.linalg.solve(among, jnp.where(mask > 0, targets - mean, 0.0))
        return mean + (queries - middle) @ (rows.T @ weights)


# Scale of the factor's initial entries, in initial standard deviations of a weight. At
# 0 its gradient vanishes; 0.03 to 1 did equally well on the tasks of docs/published.md.
_FIRST_FACTOR = 0.3
# Smallest variance of the noise and of a weight, in squared units of the targets. Keeps
# the covariance of a task's targets positive definite in float32.
_LEAST_VARIANCE = 1e-4


@dataclass(frozen=True)
class BayesianRegression:
    """Bayesian linear regression per task, with a learned Gaussian prior on weights.

    With z(x) = (1, features of x) a task has

        y = z(x)' w + e,  w ~ N(mean, factor factor' + scale I),  e ~ N(0, variance).

    The loss is the negative mean log density of all targets of an episode, of support
    and queries together. Queries are predicted with the posterior mean of w.

    Reference: Harrison, Sharma, Pavone (2018), Meta-learning priors for efficient
    online Bayesian regression, arXiv:1807.08912; here with a covariance of low rank and
    the density of all targets.

    Attributes:
      apply: ``(params, inputs (n, *features)) -> (n, k)`` features.
      rank: columns of the factor, at least 1: directions in which tasks differ most.
    """

    apply: Apply
    rank: int = 3
    is_regression: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _function("apply", self.apply)
        _validation.whole_number("rank", self.rank)

    def initial(
        self, params: Any, size: int, *, scale: float, noise: float, seed: int = 0
    ) -> dict[str, Any]:
        """Returns initial parameters, close to a ridge regression of each task alone.

        Args:
          params: parameters of ``apply``.
          size: number of features, k.
          scale: standard deviation > 0 of a weight.
          noise: standard deviation > 0 of a target around its task's line.
          seed: seed of the initial factor, which is public.
        """
        shape = (size + 1, self.rank)
        factor = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
        prior = {
            "mean": jnp.zeros(size + 1, jnp.float32),
            "factor": _FIRST_FACTOR * scale * factor,
            "log_scale": jnp.float32(2 * math.log(scale)),
            "log_variance": jnp.float32(2 * math.log(noise)),
        }
        return {"model": params, "prior": prior}

    def loss(self, params: Any, episode: Episode) -> Array:
        """Returns the negative mean log density of the existing targets, or 0."""
        inputs, targets, mask = (
            jnp.concatenate([support, query])
            for support, query in zip(episode[:3], episode[3:], strict=True)
        )
        prior = params["prior"]
        rows = self._rows(params, inputs) * mask[:, None]
        residuals = mask * (targets - rows @ prior["mean"])
        lower = jnp.linalg.cholesky(_covariance_of_targets(prior, rows, mask))
        whitened = jax.scipy.linalg.solve_triangular(lower, residuals, lower=True)
        logs = jnp.log(jnp.diagonal(lower)) + math.log(2 * math.pi) / 2
        total = jnp.sum(jnp.square(whitened)) / 2 + jnp.sum(mask * logs)
        return total / jnp.maximum(jnp.sum(mask), 1.0)

    def predict(self, params: Any, episode: Episode) -> Array:
        """Returns (Q,) posterior means of the queries' values."""
        prior, mask = params["prior"], episode.support_mask
        support = self._rows(params, episode.support_inputs) * mask[:, None]
        query = self._rows(params, episode.query_inputs)
        residuals = mask * (episode.support_targets - support @ prior["mean"])
        among = _covariance_of_targets(prior, support, mask)
        weights = jnp.linalg.solve(among, residuals)
        return query @ prior["mean"] + _covariance(prior, query, support) @ weights

    def _rows(self, params: Any, inputs: Array) -> Array:
        """Returns (n, k + 1): a 1, then the features."""
        found = at_least_float32(self.apply(params["model"], inputs))
        found = found.reshape(len(inputs), -1)
        return jnp.concatenate([jnp.ones_like(found[:, :1]), found], axis=1)


def _covariance(prior: Any, rows: Array, others: Array) -> Array:
    """Returns (n, m) the prior covariance of the lines' values."""
    scale = _LEAST_VARIANCE + jnp.exp(prior["log_scale"])
    low = rows @ prior["factor"] @ (others @ prior["factor"]).T
    return low + scale * rows @ others.T


def _covariance_of_targets(prior: Any, rows: Array, mask: Array) -> Array:
    """Returns (n, n) prior covariance; absent targets are independent, variance 1."""
    noise = _LEAST_VARIANCE + jnp.exp(prior["log_variance"])
    return _covariance(prior, rows, rows) + jnp.diag(jnp.where(mask > 0, noise, 1.0))

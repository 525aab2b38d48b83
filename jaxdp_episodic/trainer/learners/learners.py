"""Learners: what an episode teaches.

A learner is a frozen dataclass around a pure function ``apply(params, inputs)``, of any
framework. Its loss couples all support and query examples of an episode, so the episode
is the smallest unit whose gradient may be clipped; `Supervised` alone couples nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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
from jaxdp_episodic.trainer.learners.episode import Episode

Apply = Callable[[Any, Array], Array]

ABSENT = -1e9  # logit of a class without support: its softmax is 0
# Logits beside features of norm 1. Chosen with validation and test scores of six
# development sets in view, where 0.05 to 0.2 do no harm; only mnist and the phosphor
# icons were kept for the end (experiments/kinds_of_data.py).
_BESIDE_FEATURES = 0.1
_SHORT = 1e-6  # norm of an embedding below which it is not scaled to norm 1


@dataclass(frozen=True)
class ProtoNet:
    """Prototypical networks: the class whose mean support embedding is nearest.

    A class without support takes no part: neither in the softmax nor by its queries.

    Reference: Snell, Swersky, Zemel (2017), arXiv:1703.05175, Equation 2.

    Attributes:
      apply: ``(params, inputs (n, *features)) -> (n, embedding)``.
      ways: classes an episode, at least 1.
      distance: "euclidean" (squared), or "cosine": embeddings are scaled to norm 1,
        and so are prototypes.
      temperature: factor > 0 of the logits, which are minus distances, or cosines.
      resplits: train on every example as support: the mean over all rotations of a
        class's examples, in the order drawn, through support and query. What was drawn
        is used several times over, within its clip unit. Needs the layout of
        `classification_episode`.
    """

    apply: Apply
    ways: int
    distance: str = EUCLIDEAN
    temperature: float = 1.0
    resplits: bool = False
    is_regression: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _validation.integer_array("ways", self.ways, minimum=1)
        _validation.choice("distance", self.distance, DISTANCES)
        _validation.positive_array("temperature", self.temperature)
        _validation.flag("resplits", self.resplits)

    def loss(self, params: Any, episode: Episode) -> Array:
        """Mean cross-entropy of the queries."""
        embedded = self._embedded(params, episode)
        if not self.resplits:
            return self._loss(embedded)
        number = (len(episode.support_mask) + len(episode.query_mask)) // self.ways
        losses = [self._loss(self._rotated(embedded, r)) for r in range(number)]
        return jnp.mean(jnp.stack(losses))

    def predict(self, params: Any, episode: Episode) -> Array:
        """Logits of the queries, (Q, ways)."""
        return self._logits(self._embedded(params, episode))

    def embedding(self, params: Any, inputs: Array) -> Array:
        """(n, embedding) of inputs (n, *features), whose means are prototypes."""
        embedded = at_least_float32(self.apply(params, inputs))
        if embedded.ndim != 2 or len(embedded) != len(inputs):
            raise ValueError(
                f"apply must return embeddings of shape (n, size) for n={len(inputs)} "
                f"inputs, got {embedded.shape}"
            )
        return _unit(embedded) if self.distance == COSINE else embedded

    def _embedded(self, params: Any, episode: Episode) -> Episode:
        """The episode with embeddings in place of its inputs."""
        number = len(episode.support_inputs)
        inputs = jnp.concatenate([episode.support_inputs, episode.query_inputs])
        embedded = self.embedding(params, inputs)
        return episode._replace(
            support_inputs=embedded[:number], query_inputs=embedded[number:]
        )

    def _loss(self, embedded: Episode) -> Array:
        has_support = _support_count(embedded, self.ways) > 0
        mask = jnp.where(has_support[embedded.query_targets], embedded.query_mask, 0.0)
        logits = self._logits(embedded)
        return _mean_loss(CROSS_ENTROPY, logits, embedded.query_targets, mask)

    def _logits(self, embedded: Episode) -> Array:
        weights = _support_weights(embedded, self.ways)
        count = _support_count(embedded, self.ways)
        sums = weights.T @ embedded.support_inputs
        if self.distance == COSINE:
            logits = embedded.query_inputs @ _unit(sums).T
        else:
            prototypes = sums / jnp.maximum(count, 1.0)[:, None]
            # Differences, not |q|^2 - 2 q.p + |p|^2, which cancels for near points.
            apart = embedded.query_inputs[:, None, :] - prototypes[None]
            logits = -jnp.sum(jnp.square(apart), axis=-1)
        return jnp.where(count > 0, self.temperature * logits, ABSENT)

    def _rotated(self, embedded: Episode, by: int) -> Episode:
        """The episode with every class's examples rotated by this many slots."""
        ways, shots = self.ways, len(embedded.support_mask) // self.ways

        def rotated(support: Array, query: Array) -> list[Array]:
            rows = [a.reshape(ways, -1, *a.shape[1:]) for a in (support, query)]
            both = jnp.roll(jnp.concatenate(rows, axis=1), by, axis=1)
            parts = both[:, :shots], both[:, shots:]
            return [part.reshape(-1, *support.shape[1:]) for part in parts]

        first, rest = rotated(embedded.support_inputs, embedded.query_inputs)
        masks = rotated(embedded.support_mask, embedded.query_mask)
        support = first, embedded.support_targets, masks[0]
        return Episode(*support, rest, embedded.query_targets, masks[1])


@dataclass(frozen=True)
class MAML:
    """Model-agnostic meta-learning: a few gradient steps on the support, then queries.

    An episode without support contributes nothing.

    Reference: Finn, Abbeel, Levine (2017), arXiv:1703.03400, Algorithm 1.

    Attributes:
      apply: ``(params, inputs (n, *features)) -> (n, ways)`` logits or (n, 1) values.
      inner_steps: gradient steps on the support, at least 1.
      inner_learning_rate: their step size, > 0.
      first_order: treat the inner gradients as constants (the paper, section 5.2).
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
        _validation.integer_array("inner_steps", self.inner_steps, minimum=1)
        _validation.positive_array("inner_learning_rate", self.inner_learning_rate)
        _validation.choice("task_loss", self.task_loss, LOSSES)

    @property
    def is_regression(self) -> bool:
        """True for squared error."""
        return self.task_loss == SQUARED_ERROR

    def loss(self, params: Any, episode: Episode) -> Array:
        """Mean query loss after adaptation."""
        has_support = jnp.any(episode.support_mask > 0)
        mask = jnp.where(has_support, episode.query_mask, 0.0)
        outputs = self.predict(params, episode)
        return _mean_loss(self.task_loss, outputs, episode.query_targets, mask)

    def predict(self, params: Any, episode: Episode) -> Array:
        """Outputs for the queries after adaptation: (Q, ways), or (Q,) values."""
        adapted = self.adapt(params, episode)
        return _outputs(self.task_loss, self.apply(adapted, episode.query_inputs))

    def adapt(self, params: Any, episode: Episode) -> Any:
        """Returns the parameters after the inner steps on the support."""
        return self._descend(params, lambda inner: inner, episode)

    def _descend(
        self, inner: Any, whole: Callable[[Any], Any], episode: Episode
    ) -> Any:
        """Gradient steps on the support loss, in the part ``inner`` of the whole."""

        def support_loss(inner: Any) -> Array:
            outputs = self.apply(whole(inner), episode.support_inputs)
            return _mean_loss(
                self.task_loss,
                _outputs(self.task_loss, outputs),
                episode.support_targets,
                episode.support_mask,
            )

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
        return inner


@dataclass(frozen=True)
class ANIL(MAML):
    """Almost no inner loop: MAML that adapts the head only.

    Reference: Raghu, Raghu, Bengio, Vinyals (2020), arXiv:1909.09157.

    Attributes:
      head: where the adapted parameters are in the nested dictionary of parameters, by
        its keys: "head", or "decoder/last".
    """

    head: str = "head"

    def adapt(self, params: Any, episode: Episode) -> Any:
        """Returns the parameters with the head after the inner steps."""
        path = self.head.split("/")

        def whole(head: Any) -> Any:
            return _replaced(params, path, head)

        return whole(self._descend(_found(params, path), whole, episode))


@dataclass(frozen=True)
class Supervised:
    """Plain supervised learning: a mean over examples that do not interact.

    With clipped examples this is DP-SGD (Abadi et al. 2016, arXiv:1607.00133).

    Attributes:
      apply: ``(params, inputs (n, *features)) -> (n, classes)`` logits, or (n, 1)
        values. It must treat every input on its own: no batch statistics.
      task_loss: "cross_entropy" or "squared_error".
    """

    apply: Apply
    task_loss: str = CROSS_ENTROPY
    couples_examples: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _validation.choice("task_loss", self.task_loss, LOSSES)

    @property
    def is_regression(self) -> bool:
        """True for squared error."""
        return self.task_loss == SQUARED_ERROR

    def loss(self, params: Any, episode: Episode) -> Array:
        """Mean loss of the queries; the support is not looked at."""
        outputs = self._answers(params, episode)
        return _mean_loss(
            self.task_loss, outputs, episode.query_targets, episode.query_mask
        )

    def predict(self, params: Any, episode: Episode) -> Array:
        """Outputs for the queries: (Q, classes), or (Q,) values."""
        return self._answers(params, episode)

    def _answers(self, params: Any, episode: Episode) -> Array:
        return _outputs(self.task_loss, self.apply(params, episode.query_inputs))


@dataclass(frozen=True, kw_only=True)
class Classifier(Supervised):
    """A classifier of the training classes, which tells others apart by prototypes.

    It learns as `Supervised` does: examples that do not interact may be clipped one by
    one. New classes are those of episodes, told apart as by a `ProtoNet`.

    Attributes:
      features: ``(params, inputs (n, *features)) -> (n, units)``, what the last layer
        sees; None: there is no use for them.
      embed: what prototypes are taken of: "logits", "features", or "both", features of
        norm 1 beside a tenth of the logits. Logits that say nothing are small, and
        then "both" is next to the features alone.
      ways: classes an episode, at least 1.
      distance: as of `ProtoNet`.
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
        _ = self._prototypes  # refuses what it does

    def predict(self, params: Any, episode: Episode) -> Array:
        """Logits of the queries among the classes of the episode, (Q, ways)."""
        return self._prototypes.predict(params, episode)

    def embedding(self, params: Any, inputs: Array) -> Array:
        """(n, embedding) of inputs (n, *features), whose means are prototypes."""
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
        parts = [_unit(features), _BESIDE_FEATURES * logits]
        return jnp.concatenate(parts, axis=-1)


def _found(params: Any, path: Sequence[str]) -> Any:
    """The part of nested dictionaries at a path."""
    for depth, key in enumerate(path):
        if not isinstance(params, Mapping) or key not in params:
            options = tuple(params) if isinstance(params, Mapping) else ()
            raise ValueError(
                f"head must name a part of the parameters, got {'/'.join(path)!r}; "
                f"at {'/'.join(path[:depth]) or 'the top'} there are {options}"
            )
        params = params[key]
    return params


def _replaced(params: Any, path: Sequence[str], part: Any) -> Any:
    """Nested dictionaries with another part at a path."""
    if not path:
        return part
    return {**params, path[0]: _replaced(params[path[0]], path[1:], part)}


def _unit(rows: Array) -> Array:
    """Rows scaled to norm 1; short ones less, so that gradients stay bounded."""
    squares = jnp.sum(jnp.square(rows), axis=-1, keepdims=True)
    return rows / jnp.sqrt(squares + _SHORT**2)


def _support_weights(embedded: Episode, ways: int) -> Array:
    """(S, ways): 1 where a support example is there and of the class."""
    kind = embedded.support_inputs.dtype
    of_class = jax.nn.one_hot(embedded.support_targets, ways, dtype=kind)
    return of_class * embedded.support_mask[:, None]


def _support_count(embedded: Episode, ways: int) -> Array:
    return jnp.sum(_support_weights(embedded, ways), axis=0)


def _outputs(task_loss: str, outputs: Array) -> Array:
    """At least float32; values lose their last axis, which must be of size 1."""
    outputs = at_least_float32(outputs)
    if task_loss == CROSS_ENTROPY:
        if outputs.ndim != 2:
            raise ValueError(
                f"apply must return logits of shape (n, classes), got {outputs.shape}"
            )
        return outputs
    # (n,) would broadcast against (n, 1) targets, and silently be another loss.
    if outputs.ndim != 2 or outputs.shape[1] != 1:
        raise ValueError(
            "apply must return values of shape (n, 1) with task_loss="
            f"{SQUARED_ERROR!r}, got {outputs.shape}"
        )
    return outputs[:, 0]


def _mean_loss(task_loss: str, outputs: Array, targets: Array, mask: Array) -> Array:
    """Mean over the examples that are there; 0 if none is."""
    if task_loss == SQUARED_ERROR:
        losses = jnp.square(outputs - targets)
    else:
        logs = jax.nn.log_softmax(outputs)
        losses = -jnp.take_along_axis(logs, targets[:, None], axis=-1)[:, 0]
    losses = jnp.where(mask > 0, losses, 0.0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(mask), 1.0)


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


# Size of the factor's first entries, in first standard deviations of a weight. At 0 its
# gradient vanishes; from .03 to 1 the tasks of docs/published.md ended alike.
_FIRST_FACTOR = 0.3
# Least variance of the noise and of a weight, in squared units of the targets: keeps
# the covariance of a task's targets positive definite in float32.
_LEAST_VARIANCE = 1e-4


@dataclass(frozen=True)
class BayesianRegression:
    """Each task's line in features, of a Gaussian prior that is learned.

    With z(x) = (1, features of x) a task has

        y = z(x)' w + e,  w ~ N(mean, factor factor' + scale I),  e ~ N(0, variance),

    and the loss is minus the mean log density of all targets of an episode, support and
    queries alike: what the prior says of tasks, whatever is held back of them. Queries
    are predicted by the posterior mean of w.

    Reference: Harrison, Sharma, Pavone (2018), Meta-learning priors for efficient
    online Bayesian regression, arXiv:1807.08912; here with a covariance of low rank and
    with the density of all targets.

    Attributes:
      apply: ``(params, inputs (n, *features)) -> (n, k)`` features.
      rank: columns of the factor, at least 1: directions in which tasks differ most.
    """

    apply: Apply
    rank: int = 3
    is_regression: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validation.integer_array("rank", self.rank, minimum=1)

    def initial(
        self, params: Any, size: int, *, scale: float, noise: float, seed: int = 0
    ) -> dict[str, Any]:
        """Returns the first parameters: nearly a ridge regression of each task alone.

        Args:
          params: of ``apply``.
          size: k, features.
          scale: standard deviation > 0 of a weight.
          noise: standard deviation > 0 of a target around its task's line.
          seed: of the factor, which is public.
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
        """Minus the mean log density of the targets that are there; 0 of none."""
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
        """(Q,) posterior means of the queries' values."""
        prior, mask = params["prior"], episode.support_mask
        support = self._rows(params, episode.support_inputs) * mask[:, None]
        query = self._rows(params, episode.query_inputs)
        residuals = mask * (episode.support_targets - support @ prior["mean"])
        among = _covariance_of_targets(prior, support, mask)
        weights = jnp.linalg.solve(among, residuals)
        return query @ prior["mean"] + _covariance(prior, query, support) @ weights

    def _rows(self, params: Any, inputs: Array) -> Array:
        """(n, k + 1): a 1, then the features."""
        found = at_least_float32(self.apply(params["model"], inputs))
        found = found.reshape(len(inputs), -1)
        return jnp.concatenate([jnp.ones_like(found[:, :1]), found], axis=1)


def _covariance(prior: Any, rows: Array, others: Array) -> Array:
    """(n, m): of the lines' values, a priori."""
    scale = _LEAST_VARIANCE + jnp.exp(prior["log_scale"])
    low = rows @ prior["factor"] @ (others @ prior["factor"]).T
    return low + scale * rows @ others.T


def _covariance_of_targets(prior: Any, rows: Array, mask: Array) -> Array:
    """(n, n): a priori; those that are absent are independent, of variance 1."""
    noise = _LEAST_VARIANCE + jnp.exp(prior["log_variance"])
    return _covariance(prior, rows, rows) + jnp.diag(jnp.where(mask > 0, noise, 1.0))

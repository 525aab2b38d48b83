"""Regression of each task by Bayes' rule, with a prior that all tasks teach."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.gradient.precision import at_least_float32
from jaxdp_episodic.trainer.learners.episode import Episode

Apply = Callable[[Any, Array], Array]

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

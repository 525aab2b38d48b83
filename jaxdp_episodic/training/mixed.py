"""A private mixed model from its sums: what is noised, and what follows from it.

Each task (a school) has an intercept and slopes of its own around those of all,

    y = d(x)' (coefficients) + z(x)' b + e,  b ~ N(0, covariance),  e ~ N(0, variance),

with d(x) = (1, x, x^2, ...) and z(x) = (1, the first features). Two statistics say all
of it: the second moment of (d, y) over all examples, and over pairs of examples of one
task the products of their residuals, whose mean is ``z_i' (covariance) z_j``: what the
two share is the task. Both are least squares whose rows are scaled by their inputs
alone, which is a weight and no bias. A new task's b is predicted from its support.

Reference: Laird, Ware (1982), doi:10.2307/2529876 (the model, and its best linear
unbiased prediction).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.requests.training_start import MOST_SLOPES, StartConfig
from jaxdp_episodic.training.episode import Episode
from jaxdp_episodic.training.plda import (
    MARGIN,
    OF_NOISE,
    noise_edge,
    outer_products,
    unit,
)

# Of the residual's deviation: where residuals of a pair are cut.
_CUT = 2.0
# Of the mean eigenvalue: a ridge where there is no noise.
_SINGULAR = 1e-6
# Of the whole variance around the pooled line: least that is an example's own.
_LEAST_OWN = 0.05


class Mixed(NamedTuple):
    """What the statistics have come to; a function of what was released.

    Attributes:
      coefficients: (p,) float32, of d(x).
      covariance: (k, k) float32, of a task's own intercept and slopes.
      variance: () float32, of an example around its task's line; before the second
        statistic, around that of all.
      spread: (k, k) float32: the weighed mean of z z'.
    """

    coefficients: Any
    covariance: Any
    variance: Any
    spread: Any

    def released(self) -> dict[str, Any]:
        """The part that predictions need."""
        return {
            "coefficients": self.coefficients,
            "covariance": self.covariance,
            "variance": self.variance,
        }


@dataclass(frozen=True)
class MixedModel:
    """Predicts a task's values by the line of all, and its own deviation from that.

    Attributes:
      powers: of each feature that d(x) has, at least 1.
      slopes: features, the first ones, whose slope differs from task to task.
      target_bound: public bound > 0 of the targets' size; predictions are cut to it.
    """

    powers: int = 2
    slopes: int = 1
    target_bound: float = 1.0
    is_regression: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validation.integer_array("powers", self.powers, minimum=1)
        _validation.integer_array("slopes", self.slopes, minimum=0)
        if self.slopes > MOST_SLOPES:
            raise ValueError(f"slopes must be at most {MOST_SLOPES}, got {self.slopes}")
        _validation.positive_array("target_bound", self.target_bound)

    @classmethod
    def of(cls, config: StartConfig) -> MixedModel:
        """Returns the learner of a config's mixed model."""
        return cls(config.powers, config.slopes, config.target_bound)

    def loss(self, params: Any, episode: Episode) -> Array:
        """Mean squared error of the queries."""
        errors = jnp.square(self.predict(params, episode) - episode.query_targets)
        number = jnp.maximum(jnp.sum(episode.query_mask), 1.0)
        return jnp.sum(errors * episode.query_mask) / number

    def predict(self, params: Any, episode: Episode) -> Array:
        """(Q,) predictions by ``{"start": {"coefficients", …}, "model": {}}``."""
        start = params["start"]
        mask = episode.support_mask
        rows, own = self._rows(episode.support_inputs)
        own = own * mask[:, None]
        bound = self.target_bound
        targets = jnp.clip(episode.support_targets, -bound, bound)
        off = mask * (targets - rows @ start["coefficients"])
        among = own @ start["covariance"] @ own.T
        among = among + start["variance"] * jnp.eye(len(mask), dtype=jnp.float32)
        deviation = start["covariance"] @ own.T @ jnp.linalg.solve(among, off)
        rows, own = self._rows(episode.query_inputs)
        found = rows @ start["coefficients"] + own @ deviation
        return jnp.clip(found, -bound, bound)

    def initial(self, num_features: int) -> Mixed:
        """Returns what is known before the first release: nothing.

        Raises:
          ValueError: more slopes than features.
        """
        if self.slopes > num_features:
            raise ValueError(
                f"slopes must be at most the {num_features} features, got {self.slopes}"
            )
        own = (1 + self.slopes,) * 2
        return Mixed(
            jnp.zeros(1 + self.powers * num_features, jnp.float32),
            jnp.zeros(own, jnp.float32),
            jnp.ones((), jnp.float32),
            jnp.zeros(own, jnp.float32),
        )

    def pooled_moment(self, rows: Any, weights: Any) -> np.ndarray:
        """(p + 1, p + 1) the weighted sum of outer products of ``(d, y) / sqrt(2)``.

        Args:
          rows: (n, D + 1) features, then the target, which is cut to its bound. d is
            scaled to norm 1, and y, as a part of its bound, by the same factor.
          weights: (n,).
        """
        return outer_products(self._pooled_rows(rows, weights))

    @functools.partial(jax.jit, static_argnums=0)
    def _pooled_rows(self, rows: Array, weights: Array) -> Array:
        lines, _ = self._rows(rows[:, :-1])
        lines = unit(lines)  # the first entry is the factor, as that of d is 1
        values = self._cut(rows[:, -1], self.target_bound) * lines[:, 0]
        return _weighed(jnp.concatenate([lines, values[:, None]], axis=1), weights)

    def pair_moment(self, rows: Any, weights: Any, state: Mixed) -> np.ndarray:
        """The weighted sum of outer products of ``(z z', r r) / sqrt(2)`` of pairs.

        Args:
          rows: (n, 2 D + 2) features and target of one, then of the other. Both z are
            scaled to norm 1, and the residuals r, cut, by the same factors.
          weights: (n,).
          state: of the releases before.

        Returns:
          (m + 1, m + 1) with m entries of a symmetric matrix, those beside the
          diagonal times sqrt(2).
        """
        return outer_products(self._pair_rows(rows, weights, state))

    @functools.partial(jax.jit, static_argnums=0)
    def _pair_rows(self, rows: Array, weights: Array, state: Mixed) -> Array:
        half, scaled = rows.shape[1] // 2, []
        cut = _CUT * jnp.sqrt(state.variance)
        for part in (rows[:, :half], rows[:, half:]):
            lines, own = self._rows(part[:, :-1])
            own = unit(own)
            target = self.target_bound * self._cut(part[:, -1], self.target_bound)
            off = self._cut(target - lines @ state.coefficients, cut)
            scaled.append((own, off * own[:, 0]))
        (one, first), (other, second) = scaled
        products = one[:, :, None] * other[:, None, :]
        products = (products + products.transpose(0, 2, 1)) / 2
        above, factors = _above(1 + self.slopes)
        entries = products[:, *above] * factors.astype(np.float32)
        return _weighed(
            jnp.concatenate([entries, (first * second)[:, None]], axis=1), weights
        )

    def with_line(self, state: Mixed, moment: np.ndarray, noise: float) -> Mixed:
        """The line of all, and the variance around it, of a noised pooled moment."""
        whole = 2 * moment
        lines, towards = whole[:-1, :-1], whole[:-1, -1]
        count = max(float(whole[0, 0]), 1.0)  # of the weights
        coefficients = _ridge(lines, towards, 2 * noise_edge(len(whole), noise))
        off = np.append(-coefficients, 1.0)
        variance = max(float(off @ whole @ off) / count, 1e-3)
        bound, number = self.target_bound, 1 + self.slopes
        return state._replace(
            coefficients=jnp.asarray(bound * coefficients, jnp.float32),
            variance=jnp.asarray(bound**2 * variance, jnp.float32),
            spread=jnp.asarray(lines[:number, :number] / count, jnp.float32),
        )

    def with_tasks(self, state: Mixed, moment: np.ndarray, noise: float) -> Mixed:
        """How tasks differ, of a noised moment of pairs; what is left is examples'."""
        whole = float(state.variance)
        entries = _ridge(
            moment[:-1, :-1], moment[:-1, -1], noise_edge(len(moment), noise)
        )
        number = 1 + self.slopes
        above, factors = _above(number)
        covariance = np.zeros((number, number))
        covariance[above] = _CUT**2 * whole * entries / factors
        covariance = covariance + np.triu(covariance, 1).T
        values, vectors = np.linalg.eigh(covariance)
        covariance = (vectors * np.maximum(values, 0.0)) @ vectors.T
        among = np.sum(covariance * np.asarray(state.spread, np.float64))
        own = max(whole - among, _LEAST_OWN * whole)
        return state._replace(
            covariance=jnp.asarray(covariance, jnp.float32),
            variance=jnp.asarray(own, jnp.float32),
        )

    def _rows(self, inputs: Array) -> tuple[Array, Array]:
        """``d(x)``, (n, p), and ``z(x)``, (n, k), of inputs (n, ...)."""
        flat = inputs.reshape(len(inputs), -1).astype(jnp.float32)
        one = jnp.ones((len(flat), 1), jnp.float32)
        powers = [flat**power for power in range(1, self.powers + 1)]
        own = flat[:, : self.slopes]
        return jnp.concatenate([one, *powers], axis=1), jnp.concatenate([one, own], 1)

    @staticmethod
    def _cut(values: Array, bound: Any) -> Array:
        """Values as parts of a bound, cut to [-1, 1]; 0 where there is no number."""
        return jnp.nan_to_num(jnp.clip(values / bound, -1.0, 1.0), nan=0.0)


def _weighed(rows: Array, weights: Array) -> Array:
    """Rows / sqrt(2), of norm at most 1, times the roots of their weights."""
    rows = rows / math.sqrt(2)
    norms = jnp.linalg.norm(rows, axis=1, keepdims=True)
    rows = jnp.where(jnp.isfinite(norms), rows, 0.0) / jnp.fmax(norms, 1.0)
    return rows * ((1 - MARGIN) * jnp.sqrt(weights))[:, None]


def _ridge(matrix: np.ndarray, towards: np.ndarray, edge: float) -> np.ndarray:
    """Least squares by normal equations under noise whose largest eigenvalue is known.

    Eigenvalues below zero are the noise's; to all a part of ``edge`` is added.
    """
    values, vectors = np.linalg.eigh(matrix)
    floor = _SINGULAR * max(values.mean(), 0.0) + OF_NOISE * edge
    values = np.maximum(values, 0.0) + floor
    if not (values > 0).all():
        raise ValueError(
            "a mixed model needs examples, and pairs of examples of a task; got none, "
            "and no noise in their place"
        )
    return vectors @ ((vectors.T @ towards) / values)


def _above(number: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Places of a symmetric matrix's entries, and their factors in its norm."""
    above = np.triu_indices(number)
    return above, np.where(above[0] == above[1], 1.0, math.sqrt(2))

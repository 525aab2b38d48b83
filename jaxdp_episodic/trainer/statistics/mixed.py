"""A private mixed model: its sums, and what is computed from their noised values.

Each task (a school) has its own intercept and slopes around those of all tasks,

    y = d(x)' (coefficients) + z(x)' b + e,  b ~ N(0, covariance),  e ~ N(0, variance),

with d(x) = (1, x, x^2, ...) and z(x) = (1, the first features). Two statistics suffice.
The first is the second moment of (d, y) over all examples. The second uses pairs of
examples i and j of one task: the mean product of their residuals is
``z_i' (covariance) z_j``, because the task is all that they share. Both are
least-squares problems whose rows are scaled by a function of their inputs, which only
weights them and causes no bias. A new task's b is predicted from its support.

Reference: Laird, Ware (1982), doi:10.2307/2529876 (the model, and its best linear
unbiased prediction).
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.config.training_parts import MOST_SLOPES, StartConfig
from jaxdp_episodic.trainer.learners.episode import Episode
from jaxdp_episodic.trainer.statistics.plda import RIDGE_OF_NOISE, noise_edge
from jaxdp_episodic.trainer.statistics.terms import STEPS, on_grid, outer_products, unit

# Bound that residuals of a pair are clipped to, in standard deviations of a residual.
_CUT = 2.0
# Ridge of the normal equations without noise, divided by the mean eigenvalue.
_RIDGE = 1e-6
# Smallest share of the variance around the pooled line that belongs to single examples.
_LEAST_OWN = 0.05
# Smallest variance around the pooled line, in squared target bounds.
_LEAST_VARIANCE = 1e-3


class Mixed(NamedTuple):
    """The results of the statistics so far; a function of what was released."""

    coefficients: Any  # (p,) float32, of d(x)
    covariance: Any  # (k, k) float32, of a task's intercept and slopes
    # () float32, of an example around its task's line; before the second statistic,
    # around the line of all tasks.
    variance: Any
    second_moment: Any  # (k, k) float32: weighted mean of z z'

    def released(self) -> dict[str, Any]:
        """Returns the part that predictions need."""
        names = "coefficients", "covariance", "variance"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class MixedModel:
    """Predicts a task's values by the line of all tasks plus the task's deviation.

    Attributes:
      powers: number of powers of each feature in d(x), at least 1.
      slopes: number of features, the first ones, whose slope differs between tasks.
      target_bound: public bound > 0 on the absolute value of targets; targets and
        predictions are clipped to it.
    """

    powers: int = 2
    slopes: int = 1
    target_bound: float = 1.0
    is_regression: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validation.whole_number("powers", self.powers)
        _validation.whole_number("slopes", self.slopes, minimum=0, maximum=MOST_SLOPES)
        bound = _validation.positive_array("target_bound", self.target_bound)
        _validation.single("target_bound", bound)

    @classmethod
    def of(cls, config: StartConfig) -> MixedModel:
        """Returns the learner of a config's mixed model."""
        return cls(config.powers, config.slopes, config.target_bound)

    def loss(self, params: Any, episode: Episode) -> Array:
        """Returns the mean squared error of the queries."""
        errors = jnp.square(self.predict(params, episode) - episode.query_targets)
        number = jnp.maximum(jnp.sum(episode.query_mask), 1.0)
        return jnp.sum(errors * episode.query_mask) / number

    def predict(self, params: Any, episode: Episode) -> Array:
        """Predicts (Q,) with ``{"start": {"coefficients", …}, "model": {}}``."""
        start = params["start"]
        mask = episode.support_mask
        rows, own = self._rows(episode.support_inputs)
        own = own * mask[:, None]
        bound = self.target_bound
        targets = jnp.clip(episode.support_targets, -bound, bound)
        residuals = mask * (targets - rows @ start["coefficients"])
        among = own @ start["covariance"] @ own.T
        among = among + start["variance"] * jnp.eye(len(mask), dtype=jnp.float32)
        deviation = start["covariance"] @ own.T @ jnp.linalg.solve(among, residuals)
        rows, own = self._rows(episode.query_inputs)
        found = rows @ start["coefficients"] + own @ deviation
        return jnp.clip(found, -bound, bound)

    def initial(self, num_features: int) -> Mixed:
        """Returns the state before the first release."""
        if self.slopes > num_features:
            raise ValueError(
                f"slopes must be at most the number of features, {num_features}, got "
                f"{self.slopes}"
            )
        own = (1 + self.slopes,) * 2
        return Mixed(
            jnp.zeros(1 + self.powers * num_features, jnp.float32),
            jnp.zeros(own, jnp.float32),
            jnp.ones((), jnp.float32),
            jnp.zeros(own, jnp.float32),
        )

    def pooled_moment(self, rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Returns the sum of outer products of ``(d, y) / sqrt(2)``, (p + 1, p + 1).

        Args:
          rows: (n, D + 1) features, then the target, which is clipped to its bound. d
            is scaled to norm 1; y, divided by its bound, is scaled by the same factor.
          shares: (n,) divisors; see `sum_of_rows`.
        """
        with np.errstate(all="ignore"):  # rows without a finite norm become zero
            lines, _ = self._rows(rows[:, :-1].astype(np.float64), np)
            lines = unit(lines)  # the first entry, before 1, is now the factor
            values = self._cut(rows[:, -1], self.target_bound, np) * lines[:, 0]
        return _products(np.concatenate([lines, values[:, None]], axis=1), shares)

    def pair_moment(
        self, rows: np.ndarray, shares: np.ndarray, state: Mixed
    ) -> np.ndarray:
        """Returns the sum of outer products of ``(z z', r r) / sqrt(2)`` over pairs.

        Args:
          rows: (n, 2 D + 2) features and target of one example, then of the other. Both
            z are scaled to norm 1; the clipped residuals r by the same factors.
          shares: see `pooled_moment`.
          state: state after the earlier release.

        Returns:
          (m + 1, m + 1) int64, for the m entries of a symmetric matrix on and above the
          diagonal, those above it times sqrt(2).
        """
        half, scaled = rows.shape[1] // 2, []
        cut = _CUT * math.sqrt(float(state.variance))
        coefficients = np.asarray(state.coefficients, np.float64)
        for part in (rows[:, :half], rows[:, half:]):
            with np.errstate(all="ignore"):
                lines, own = self._rows(part[:, :-1].astype(np.float64), np)
                bound = self.target_bound
                residuals = bound * self._cut(part[:, -1], bound, np)
                # Term by term: another order of summation may round differently.
                for column, coefficient in zip(lines.T, coefficients, strict=True):
                    residuals = residuals - column * coefficient
                own = unit(own)
                scaled.append((own, self._cut(residuals, cut, np) * own[:, 0]))
        (one, first), (other, second) = scaled
        products = one[:, :, None] * other[:, None, :]
        products = (products + products.transpose(0, 2, 1)) / 2
        above, factors = _above(1 + self.slopes)
        entries = products[:, *above] * factors
        values = (first * second)[:, None]
        return _products(np.concatenate([entries, values], axis=1), shares)

    def with_line(self, state: Mixed, moment: np.ndarray, noise: float) -> Mixed:
        """Returns the state with the pooled line and the variance around it."""
        whole = 2 * moment
        lines, towards = whole[:-1, :-1], whole[:-1, -1]
        count = max(float(whole[0, 0]), 1.0)  # sum of the weights
        coefficients = _ridge(lines, towards, 2 * noise_edge(len(whole), noise))
        residual = np.append(-coefficients, 1.0)
        variance = float(residual @ whole @ residual) / count
        variance = max(variance, _LEAST_VARIANCE)
        bound, number = self.target_bound, 1 + self.slopes
        return state._replace(
            coefficients=jnp.asarray(bound * coefficients, jnp.float32),
            variance=jnp.asarray(bound**2 * variance, jnp.float32),
            second_moment=jnp.asarray(lines[:number, :number] / count, jnp.float32),
        )

    def with_tasks(self, state: Mixed, moment: np.ndarray, noise: float) -> Mixed:
        """Returns the state with the tasks' covariance, given a moment of pairs.

        The rest of the variance is that of single examples.
        """
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
        among = np.sum(covariance * np.asarray(state.second_moment, np.float64))
        own = max(whole - among, _LEAST_OWN * whole)
        return state._replace(
            covariance=jnp.asarray(covariance, jnp.float32),
            variance=jnp.asarray(own, jnp.float32),
        )

    def _rows(self, inputs: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """Returns ``d(x)``, (n, p), and ``z(x)``, (n, k), of inputs (n, ...)."""
        flat = inputs.reshape(len(inputs), math.prod(inputs.shape[1:]))
        one = xp.ones((len(flat), 1), flat.dtype)
        # Products always round the same; power functions may not.
        powers = itertools.accumulate([flat] * self.powers, operator.mul)
        own = flat[:, : self.slopes]
        return xp.concatenate([one, *powers], axis=1), xp.concatenate([one, own], 1)

    @staticmethod
    def _cut(values: Any, bound: Any, xp: Any) -> Any:
        """Returns values divided by a bound and clipped to [-1, 1]; NaN becomes 0."""
        return xp.nan_to_num(xp.clip(values / bound, -1.0, 1.0), nan=0.0)


def _products(rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Returns the sum of outer products of rows / sqrt(2) of norm <= 1, on the grid."""
    return outer_products(on_grid(rows / math.sqrt(2), STEPS**2 // shares))


def _ridge(matrix: np.ndarray, towards: np.ndarray, edge: float) -> np.ndarray:
    """Solves noised normal equations; ``edge`` is the noise's largest eigenvalue."""
    # Negative eigenvalues come from noise and are set to 0; a part of it is added.
    values, vectors = np.linalg.eigh(matrix)
    floor = _RIDGE * max(values.mean(), 0.0) + RIDGE_OF_NOISE * edge
    values = np.maximum(values, 0.0) + floor
    if not (values > 0).all():
        raise ValueError(
            "a mixed model needs examples, and pairs of examples of a task, or noise; "
            "the data have none"
        )
    return vectors @ ((vectors.T @ towards) / values)


def _above(number: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Returns indices of a symmetric matrix's entries, and factors in its norm."""
    above = np.triu_indices(number)
    return above, np.where(above[0] == above[1], 1.0, math.sqrt(2))

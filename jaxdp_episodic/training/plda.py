"""A private PLDA from its sums: what is noised, and what follows from it.

What each gives is float32, of norm a little less than 1; sums and noise are float64, on
the host. In float32 tens of thousands of terms round by more than that little: whoever
is missing changes how all others are rounded.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# Rows are cut to a little less than norm 1, so that rounding cannot exceed it.
MARGIN = 1e-5
ROWS = 4096  # a product; always as many, so that it is compiled once
# Of the noise's largest eigenvalue: what is added to those of a covariance.
OF_NOISE = 0.7
# Variance within classes that is left in a whitened direction, of its mean.
_LEFT = 1.2
# Directions that must stand out of the noise, or none is weighed.
_FEWEST = 8
# Of the mean eigenvalue: where there is neither noise nor variance.
_SINGULAR = 1e-4


class Start(NamedTuple):
    """What the statistics have come to; a function of what was released.

    Attributes:
      mean: (D,) float32, of the features.
      count: () float32: how many examples, or classes, there are, about.
      whitening: (D, D) float32: as far as the stages have come.
      projection: (D, d) float32: what the features are multiplied by; zero before the
        last statistic.
    """

    mean: Any
    count: Any
    whitening: Any
    projection: Any

    def released(self) -> dict[str, Any]:
        """The part that predictions need."""
        return {"mean": self.mean, "projection": self.projection}


def projected(features: Array, mean: Array, projection: Array) -> Array:
    """Returns the projected features, (n, d) of norm 1, or 0.

    Args:
      features: (n, ...), flattened and scaled to norm 1 first.
      mean: (D,) is taken off.
      projection: (D, d).
    """
    flat = unit(features.reshape(len(features), -1).astype(jnp.float32))
    return unit((flat - mean) @ projection)


def unit(rows: Array) -> Array:
    """Rows scaled to norm 1; those that are not finite, or too short, are zero."""
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    # Every entry by itself: a compiled maximum may pass over NaN.
    fits = jnp.isfinite(rows).all(axis=1, keepdims=True) & (largest > 1e-30)
    scaled = jnp.where(fits, rows, 0.0) / jnp.where(fits, largest, 1.0)
    norms = jnp.linalg.norm(scaled, axis=1, keepdims=True)
    return scaled / jnp.maximum(norms, 1.0)  # the largest entry is 1, or all are 0


_compiled_unit = jax.jit(unit)


def unit_rows(features: np.ndarray) -> np.ndarray:
    """Rows of an array on the host, scaled to norm 1."""
    all_alike = np.ones(len(features), np.float32)
    parts = [
        np.asarray(_compiled_unit(rows)) for rows, _ in chunks(features, all_alike)
    ]
    return np.concatenate(parts)[: len(features)]


def chunks(
    features: Any, weights: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and what they count, `ROWS` at a time; behind the last one zeros."""
    for start in range(0, max(len(features), 1), ROWS):
        rows = features[start : start + ROWS].astype(np.float32, copy=False)
        shares = weights[start : start + ROWS]
        rest = ROWS - len(rows)
        if rest:
            rows = np.concatenate([rows, np.zeros((rest, rows.shape[1]), np.float32)])
            shares = np.concatenate([shares, np.zeros(rest, np.float32)])
        yield rows, shares


def sum_of(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The sum of arrays, at least one, in their order."""
    return functools.reduce(operator.add, parts)


def sum_with_count(rows: Any, weights: Any) -> np.ndarray:
    """(D + 1,) float64: the weighted sum of ``(x, 1) / sqrt(2)``, x of norm <= 1."""
    return np.sum(np.asarray(_with_count(rows, weights), np.float64), axis=0)


@jax.jit
def _with_count(rows: Array, weights: Array) -> Array:
    rows = jnp.concatenate([unit(rows), jnp.ones((len(rows), 1), jnp.float32)], axis=1)
    return weights[:, None] * rows * ((1 - MARGIN) / math.sqrt(2))


def second_moment(rows: Any, weights: Any, center: Any, whitening: Any) -> np.ndarray:
    """(D, D) the weighted sum of outer products of whitened rows of norm 1."""
    return outer_products(_whitened_rows(rows, weights, center, whitening))


def outer_products(rows: Any) -> np.ndarray:
    """(D, D) float64: the sum of the outer products of rows (n, D)."""
    wide = np.asarray(rows, np.float64)
    return wide.T @ wide


@jax.jit
def _whitened_rows(
    rows: Array, weights: Array, center: Array, whitening: Array
) -> Array:
    highest = jax.lax.Precision.HIGHEST
    white = unit(jnp.matmul(rows - center, whitening, precision=highest))
    return white * ((1 - MARGIN) * jnp.sqrt(weights))[:, None]


def with_noise(total: np.ndarray, normal: Array, noise: float) -> np.ndarray:
    """Adds normal numbers, ``noise`` times as large, to a float64 sum.

    What comes out has float32's digits, as the noise has: the sum's own, below them,
    would stand there without any.
    """
    if not noise:
        return total
    noised = total + noise * np.asarray(normal, np.float64)
    return noised.astype(np.float32).astype(np.float64)


@functools.partial(jax.jit, static_argnums=1)
def symmetric_noise(key: Array, number: int) -> Array:
    """(D, D) noise that is independent in an orthonormal basis of symmetric matrices.

    So the diagonal has variance 1 and each other entry half of it.
    """
    normal = jax.random.normal(key, (number, number), jnp.float32)
    above = jnp.triu(normal, 1) / math.sqrt(2)
    return above + above.T + jnp.diag(jnp.diag(normal))


def with_mean(state: Start, noised: np.ndarray) -> Start:
    """The mean: a noised sum over a noised count, which is taken to be at least 1."""
    count = max(math.sqrt(2) * noised[-1], 1.0)
    mean = math.sqrt(2) * noised[:-1] / count
    return state._replace(
        mean=jnp.asarray(mean, jnp.float32), count=jnp.asarray(count, jnp.float32)
    )


def whitened(state: Start, moment: np.ndarray, noise: float) -> Start:
    """One more stage: directions of large variance within classes are shrunk.

    Eigenvalues below zero are the noise's; to all is added a part of the largest that
    noise alone would have (the edge of Wigner's semicircle), so that no direction is
    stretched for what may be noise.
    """
    number = len(moment)
    values, vectors = np.linalg.eigh(moment)
    floor = _SINGULAR * max(values.mean(), 0.0) + OF_NOISE * noise_edge(number, noise)
    values = np.maximum(values, 0.0) + floor
    if not (values > 0).all():
        raise ValueError(
            "the covariance within classes is zero: no pair of examples of a class "
            "is of two different ones"
        )
    scales = vectors / np.sqrt(values)
    whitening = np.asarray(state.whitening, np.float64) @ scales
    whitening *= math.sqrt(number) / np.linalg.norm(whitening)
    return state._replace(whitening=jnp.asarray(whitening, jnp.float32))


def weighed_projection(
    state: Start, moment: np.ndarray, noise: float, dimensions: int
) -> Start:
    """The directions of most variance between classes, by Wiener's weights.

    What is left of the variance within classes has, in rows of norm 1, about a part
    1/D in each direction; that and the noise are taken off each eigenvalue. Where
    next to nothing stands out of them, the leading directions count alike.
    """
    number = len(moment)
    count = max(float(state.count), 1.0)  # 0 where the mean was given up
    values, vectors = np.linalg.eigh(moment / count)
    order = np.argsort(-values)[:dimensions]
    nothing = _LEFT / number + noise_edge(number, noise) / count
    shares = 1 - nothing / np.maximum(values[order], 1e-12)
    weights = np.sqrt(np.maximum(shares, 0.0))
    if np.count_nonzero(weights) < min(_FEWEST, len(weights)):
        weights = np.ones_like(weights)
    whitening = np.asarray(state.whitening, np.float64)
    projection = whitening @ (vectors[:, order] * weights)
    return state._replace(projection=jnp.asarray(projection, jnp.float32))


def noise_edge(number: int, noise: float) -> float:
    """About the largest eigenvalue of symmetric noise (Wigner's semicircle)."""
    return noise * math.sqrt(2 * number)

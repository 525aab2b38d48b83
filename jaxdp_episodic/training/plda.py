"""A private PLDA from its sums: what is noised, and what follows from it.

The sums are float32 on the device, as a step's are; what is made of what was released
is post-processing, in float64 on the host.
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
_ROWS = 4096  # a product; always as many, so that it is compiled once
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
    fits = jnp.isfinite(largest) & (largest > 1e-30)
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
    features: np.ndarray, weights: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and what they count, `_ROWS` at a time; behind the last one zeros."""
    for start in range(0, max(len(features), 1), _ROWS):
        rows = features[start : start + _ROWS].astype(np.float32, copy=False)
        shares = weights[start : start + _ROWS]
        rest = _ROWS - len(rows)
        if rest:
            rows = np.concatenate([rows, np.zeros((rest, rows.shape[1]), np.float32)])
            shares = np.concatenate([shares, np.zeros(rest, np.float32)])
        yield rows, shares


def sum_of(parts: Iterable[Array]) -> Array:
    """The sum of arrays, at least one, in their order."""
    return functools.reduce(operator.add, parts)


@jax.jit
def sum_with_count(rows: Array, weights: Array) -> Array:
    """(D + 1,) the weighted sum of ``(x, 1) / sqrt(2)``, x of norm at most 1."""
    rows = jnp.concatenate([unit(rows), jnp.ones((len(rows), 1), jnp.float32)], axis=1)
    return jnp.sum(weights[:, None] * rows, axis=0) * ((1 - MARGIN) / math.sqrt(2))


@jax.jit
def second_moment(
    rows: Array, weights: Array, center: Array, whitening: Array
) -> Array:
    """(D, D) the weighted sum of outer products of whitened rows of norm 1."""
    highest = jax.lax.Precision.HIGHEST
    white = unit(jnp.matmul(rows - center, whitening, precision=highest))
    white = white * ((1 - MARGIN) * jnp.sqrt(weights))[:, None]
    return jnp.matmul(white.T, white, precision=highest)


@jax.jit
def with_symmetric_noise(total: Array, key: Array, noise: Array | float) -> Array:
    """Adds symmetric noise: independent in an orthonormal basis of symmetric matrices.

    So the diagonal has the noise's variance and each other entry half of it.
    """
    normal = jax.random.normal(key, total.shape, jnp.float32)
    above = jnp.triu(normal, 1) / math.sqrt(2)
    return total + jnp.float32(noise) * (above + above.T + jnp.diag(jnp.diag(normal)))


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
    count = float(state.count)
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

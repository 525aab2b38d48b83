"""Randomized response of one bit: its forms, and what sampling does to it exactly.

Every form keeps the bit with some probability and otherwise sends a fair coin:

    keep probability w:  P(true answer) = (1 + w) / 2,   epsilon = 2 artanh(w).

The usual form tells the truth with probability ``e^eps / (1 + e^eps)``, so ``w =
tanh(eps / 2)``. The linear form of lecture notes has ``(1 + a) / (2 + a)`` and ``1 / (2
+ a)``, so ``w = a / (2 + a)`` and it is ``log(1 + a)``-private, not a-private. Run only
with probability p, and a fair coin sent otherwise, any of them has ``p w`` for ``w``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation


def truth_probability(epsilon: Any) -> Any:
    """``e^eps / (1 + e^eps)``: the true answer in the usual form.

    Args:
      epsilon: >= 0, nats, scalar or array; ``inf`` always tells the truth.

    Returns:
      float64 of the same shape, in [1/2, 1]; *exact*.

    Raises:
      TypeError: not a number.
      ValueError: negative or NaN.

    Reference: Warner (1965), "Randomized response".
    """
    eps = _validation.nonnegative_array("epsilon", epsilon)
    return (1 / (1 + np.exp(-eps)))[()]


def keep_probability(epsilon: Any) -> Any:
    """``tanh(eps / 2)``: chance that the bit is kept and no coin is sent.

    Args:
      epsilon: privacy of the response, >= 0, nats, scalar or array.

    Returns:
      float64 of the same shape, in [0, 1]; *exact*.

    Raises:
      TypeError: not a number.
      ValueError: negative or NaN.
    """
    return np.tanh(_validation.nonnegative_array("epsilon", epsilon) / 2)[()]


def epsilon_of_keep_probability(probability: Any) -> Any:
    """``2 artanh(w)``: privacy of keeping the bit with probability w, else a coin.

    Args:
      probability: w in [0, 1], scalar or array.

    Returns:
      float64 nats of the same shape, ``inf`` at 1; *exact*.

    Raises:
      TypeError: not a number.
      ValueError: outside [0, 1] or NaN.
    """
    w = _validation.probability_array("probability", probability)
    with np.errstate(divide="ignore"):
        return (2 * np.arctanh(w))[()]


def linear_truth_probability(parameter: Any) -> Any:
    """``(1 + a) / (2 + a)``: the true answer in the linear form.

    Args:
      parameter: a >= 0, scalar or array (lecture notes call it epsilon).

    Returns:
      float64 of the same shape, in [1/2, 1]; *exact*.

    Raises:
      TypeError: not a number.
      ValueError: negative or NaN.
    """
    return ((1 + linear_keep_probability(parameter)) / 2)[()]


def linear_keep_probability(parameter: Any) -> Any:
    """``a / (2 + a)``: the linear form as a mixture of the bit and a fair coin.

    Args:
      parameter: a >= 0, scalar or array.

    Returns:
      float64 of the same shape, in [0, 1]; *exact*.

    Raises:
      TypeError: not a number.
      ValueError: negative or NaN.
    """
    a = _validation.nonnegative_array("parameter", parameter)
    with np.errstate(divide="ignore"):
        return (1 / (1 + 2 / a))[()]


def linear_epsilon(parameter: Any) -> Any:
    """``log(1 + a)``: privacy of the linear form.

    Args:
      parameter: a >= 0, scalar or array.

    Returns:
      float64 nats of the same shape; *exact*, below a.

    Raises:
      TypeError: not a number.
      ValueError: negative or NaN.
    """
    return np.log1p(_validation.nonnegative_array("parameter", parameter))[()]


def subsampled_linear_parameter(parameter: Any, *, sampling_probability: Any) -> Any:
    """Parameter of the linear form that equals a sampled one: ``2ap / (2 + a - ap)``.

    With probability p the response is run, else a fair coin is sent. The result is the
    linear form again, with this parameter (about ``a p``).

    Args:
      parameter: a >= 0, scalar or array.
      sampling_probability: p in [0, 1].

    Returns:
      float64 of the broadcast shape; *exact*. Its privacy is `linear_epsilon` of it.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range.
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

    ``2 artanh(p tanh(eps / 2))``: *exact*, and below the ``log(1 + p (e^eps - 1))``
    that holds for any mechanism, because a coin hides more than silence does.

    Args:
      epsilon: >= 0, nats, scalar or array.
      sampling_probability: p in [0, 1].

    Returns:
      float64 nats of the broadcast shape.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range.
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
    """Distribution of the answer for each bit.

    Args:
      truth: chance of the true answer in [0, 1], scalar or array.

    Returns:
      float64 of shape ``truth.shape + (2, 2)``: row the bit, column the answer.

    Raises:
      TypeError: not a number.
      ValueError: outside [0, 1] or NaN.
    """
    q = _validation.probability_array("truth", truth)
    return np.stack([np.stack([q, 1 - q], -1), np.stack([1 - q, q], -1)], -2)

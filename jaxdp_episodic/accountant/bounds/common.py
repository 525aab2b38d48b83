"""Checks of arguments by name, and the search for epsilon, for all bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ONE, AT_LEAST_ZERO, Check

# Smallest normal number, to which positive results that underflow are rounded up.
TINY = float(np.finfo(np.float64).tiny)
# Halvings of the logarithm of epsilon, to 1e-7 relative.
_HALVINGS = 28
# Answers below this share of the largest epsilon are rounded up to it.
_SMALLEST_SHARE = 1e-9

# The names of the arguments of each check. What follows "__" is another range of them.
_NAMES: dict[Check, str] = {
    _validation.nonnegative_array: "epsilon local_epsilon total_epsilon rho noise_std "
    "noise_stds strong_convexity diameter",
    _validation.positive_array: "noise_std__positive learning_rate learning_rates "
    "lipschitz smoothness",
    _validation.probability_array: "delta rate outer_rate sampling_probability "
    "sampling_rate",
    _validation.open_unit_array: "delta__inside slack",
    _validation.reals(
        "lie in [0, 1)", lambda a: (a >= 0) & (a < 1)
    ): "delta__below_1 total_delta",
    _validation.reals(
        "be >= 0 and finite", lambda a: (a >= 0) & np.isfinite(a)
    ): "epsilon__finite",
    # The exponential of twice as much is a float64.
    _validation.reals(
        "lie in [0, 300] (above it shuffling does not help)",
        lambda a: (a >= 0) & (a <= 300),
    ): "local_epsilon__limited",
    AT_LEAST_ZERO: "size num_steps",
    AT_LEAST_ONE: "population group_size num_users num_examples batch_size",
}
_CHECKS = {name: check for check, names in _NAMES.items() for name in names.split()}


def checked(**arguments: Any) -> list[np.ndarray]:
    """Returns checked arguments as float64 arrays that are broadcast to one shape."""
    arrays = {}
    for key, value in arguments.items():
        name = key.partition("__")[0]
        arrays[name] = np.asarray(_CHECKS[key](name, value), np.float64)
    shape = _validation.broadcast_shape(**arrays)
    return [np.broadcast_to(array, shape) for array in arrays.values()]


def checked_one(**arguments: Any) -> list[float]:
    """Returns checked arguments, each a single number."""
    return [
        float(_validation.one(key.partition("__")[0], value, _CHECKS[key]))
        for key, value in arguments.items()
    ]


def smallest_epsilon(
    log_delta: Callable[[np.ndarray, np.ndarray], np.ndarray],
    log_target: np.ndarray,
    largest: np.ndarray,
) -> np.ndarray:
    """Returns the smallest epsilon found with ``log_delta <= log_target``.

    Args:
      log_delta: maps epsilons (m,) and the indices (m,) of their settings to ``log
        delta`` (m,), which decreases in epsilon.
      log_target: (n,).
      largest: (n,) an epsilon >= 0 that meets the target, or ``inf`` if none does.

    Returns:
      (n,) epsilons, ``inf`` where ``largest`` is. *Upper bound* of the solution, within
      1e-7 relative or 1e-9 of ``largest``.
    """
    largest = np.asarray(largest, np.float64)
    result = np.maximum(largest, 0.0)
    index = np.flatnonzero(np.isfinite(largest) & (largest > 0))
    for share in (0.0, _SMALLEST_SHARE):
        least = share * largest[index]
        met = log_delta(least, index) <= log_target[index]
        result[index[met]] = least[met]
        index = index[~met]
    low, high = _SMALLEST_SHARE * largest[index], largest[index]
    for _ in range(_HALVINGS if index.size else 0):
        middle = low * np.sqrt(high / low)
        met = log_delta(middle, index) <= log_target[index]
        low, high = np.where(met, low, middle), np.where(met, middle, high)
    result[index] = high
    return result

"""Checks of arguments by name, and the search for epsilon, for all bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation

# Smallest normal number, to which positive results that underflow are rounded up.
TINY = float(np.finfo(np.float64).tiny)
# Halvings of the logarithm of epsilon, to 1e-7 relative.
_HALVINGS = 28
# Answers below this share of the largest epsilon are rounded up to it.
_SMALLEST_SHARE = 1e-9

# Each check, and the names of the arguments that it checks; see `_CALLED`.
_NAMES: tuple[tuple[Callable[[str, Any], np.ndarray], str], ...] = (
    (
        _validation.nonnegative_array,
        "epsilon local_epsilon total_epsilon rho noise_std noise_stds strong_convexity "
        "diameter",
    ),
    (  # the exponential of twice as much is a float64
        _validation.reals(
            "lie in [0, 300] (above it shuffling does not help)",
            lambda a: (a >= 0) & (a <= 300),
        ),
        "limited_local_epsilon",
    ),
    (
        _validation.probability_array,
        "delta rate outer_rate sampling_probability sampling_rate",
    ),
    (
        _validation.positive_array,
        "positive_noise_std learning_rate learning_rates lipschitz smoothness",
    ),
    (_validation.open_unit_array, "delta_in_between slack"),
    (
        _validation.reals("lie in [0, 1)", lambda a: (a >= 0) & (a < 1)),
        "delta_below_1 total_delta",
    ),
    (
        _validation.reals("be >= 0 and finite", lambda a: (a >= 0) & np.isfinite(a)),
        "finite_epsilon",
    ),
    (functools.partial(_validation.integer_array, minimum=0), "size num_steps"),
    (
        functools.partial(_validation.integer_array, minimum=1),
        "population group_size num_users num_examples batch_size",
    ),
)
_CHECKS = {name: check for check, names in _NAMES for name in names.split()}
# Names in the table for a second range of an argument, and the argument's name.
_CALLED = {
    "limited_local_epsilon": "local_epsilon",
    "finite_epsilon": "epsilon",
    "delta_in_between": "delta",
    "delta_below_1": "delta",
    "positive_noise_std": "noise_std",
}


def checked(**arguments: Any) -> list[np.ndarray]:
    """Returns checked arguments as float64 arrays that are broadcast to one shape."""
    arrays = {}
    for key, value in arguments.items():
        name = _CALLED.get(key, key)
        arrays[name] = np.asarray(_CHECKS[key](name, value), np.float64)
    shape = _validation.broadcast_shape(**arrays)
    return [np.broadcast_to(array, shape) for array in arrays.values()]


def checked_one(**arguments: Any) -> list[float]:
    """Returns checked arguments, each a single number."""
    return [
        float(_validation.one(_CALLED.get(key, key), value, _CHECKS[key]))
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

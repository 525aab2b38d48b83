"""What all bounds share: checks of arguments by name, and the search for epsilon."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.numerics.roots import largest_within

# Relative tolerance of the search.
_TOLERANCE = 1e-7
# Share of the largest epsilon to which smaller answers are rounded up.
_SMALLEST_SHARE = 1e-9


def _below_one(name: str, value: Any) -> np.ndarray:
    array = _validation.probability_array(name, value)
    if np.any(array == 1):
        raise ValueError(f"{name} must lie in [0, 1), got {_validation.shown(value)}")
    return array


def _finite(name: str, value: Any) -> np.ndarray:
    array = _validation.nonnegative_array(name, value)
    if np.isinf(array).any():
        raise ValueError(f"{name} must be finite, got {_validation.shown(value)}")
    return array


_PROBABILITY = _validation.probability_array
_NONNEGATIVE = _validation.nonnegative_array
_POSITIVE = _validation.positive_array
_FROM_0 = functools.partial(_validation.integer_array, minimum=0)
_FROM_1 = functools.partial(_validation.integer_array, minimum=1)
# Argument -> its check. "finite_epsilon" and "delta_below_1" are epsilon and delta.
_CHECKS: dict[str, Callable[[str, Any], np.ndarray]] = {
    "epsilon": _NONNEGATIVE,
    "finite_epsilon": _finite,
    "local_epsilon": _NONNEGATIVE,
    "total_epsilon": _NONNEGATIVE,
    "delta": _PROBABILITY,
    "delta_in_between": _validation.open_unit_array,
    "delta_below_1": _below_one,
    "total_delta": _below_one,
    "slack": _validation.open_unit_array,
    "rate": _PROBABILITY,
    "outer_rate": _PROBABILITY,
    "sampling_probability": _PROBABILITY,
    "sampling_rate": _PROBABILITY,
    "size": _FROM_0,
    "population": _FROM_1,
    "group_size": _FROM_1,
    "num_steps": _FROM_0,
    "num_users": _FROM_1,
    "num_examples": _FROM_1,
    "batch_size": _FROM_1,
    "rho": _NONNEGATIVE,
    "noise_std": _NONNEGATIVE,
    "noise_stds": _NONNEGATIVE,
    "positive_noise_std": _POSITIVE,
    "positive_rho": _POSITIVE,
    "learning_rate": _POSITIVE,
    "learning_rates": _POSITIVE,
    "lipschitz": _POSITIVE,
    "smoothness": _POSITIVE,
    "strong_convexity": _NONNEGATIVE,
    "diameter": _NONNEGATIVE,
}
# Rows of the table above that are another argument within another range.
_CALLED = {
    "finite_epsilon": "epsilon",
    "delta_in_between": "delta",
    "delta_below_1": "delta",
    "positive_noise_std": "noise_std",
    "positive_rho": "rho",
}


def checked(**arguments: Any) -> list[np.ndarray]:
    """Returns arguments, checked by their names, as float64 arrays of one shape."""
    arrays = {}
    for key, value in arguments.items():
        name = _CALLED.get(key, key)
        arrays[name] = np.asarray(_CHECKS[key](name, value), np.float64)
    shape = _validation.broadcast_shape(**arrays)
    return [np.broadcast_to(array, shape) for array in arrays.values()]


def checked_one(**arguments: Any) -> list[float]:
    """Returns arguments, checked by their names, each one number."""
    found = []
    for key, value in arguments.items():
        name = _CALLED.get(key, key)
        array = _CHECKS[key](name, value)
        if array.ndim:
            raise ValueError(f"{name} must be a number, got {_validation.shown(value)}")
        found.append(float(array))
    return found


def smallest_epsilon(
    log_delta: Callable[[np.ndarray, np.ndarray], np.ndarray],
    log_target: np.ndarray,
    largest: np.ndarray,
) -> np.ndarray:
    """Smallest epsilon that was seen to have ``log_delta <= log_target``.

    Args:
      log_delta: maps epsilons (m,) and the indices (m,) of the elements meant to
        ``log delta`` (m,), decreasing in epsilon.
      log_target: (n,).
      largest: (n,) an epsilon >= 0 where the target holds, or ``inf`` where it is
        attained nowhere.

    Returns:
      (n,) epsilons, ``inf`` where ``largest`` is. *Upper bound* of the solution within
      1e-7 relative (or 1e-9 of ``largest``).
    """
    largest = np.asarray(largest, np.float64)
    result = np.maximum(largest, 0.0)
    index = np.flatnonzero(np.isfinite(largest) & (largest > 0))
    for share in (0.0, _SMALLEST_SHARE):
        least = share * largest[index]
        met = log_delta(least, index) <= log_target[index]
        result[index[met]] = least[met]
        index = index[~met]

    # As a function of 1/epsilon the excess increases, as the search wants it.
    def excess(inverse: np.ndarray, active: np.ndarray) -> np.ndarray:
        rows = index[active]
        value = log_delta(1 / inverse, rows) - log_target[rows]
        return np.maximum(value, -1e6)

    if index.size:
        # A secant far out of the bracket may overflow; it is replaced by the middle.
        low = 1 / largest[index]
        with np.errstate(over="ignore"):
            inverse = largest_within(
                excess, low, low / _SMALLEST_SHARE, tolerance=_TOLERANCE
            )
        result[index] = np.minimum(1 / inverse, largest[index])
    return result

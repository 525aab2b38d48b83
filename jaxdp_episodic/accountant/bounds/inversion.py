"""From a decreasing delta to the epsilon that meets a target."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.numerics.roots import largest_within

# Relative tolerance of the search.
_TOLERANCE = 1e-7
# Share of the largest epsilon to which smaller answers are rounded up.
_SMALLEST_SHARE = 1e-9


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
    searched = np.isfinite(largest) & (largest > 0)
    result = np.where(searched, largest, np.maximum(largest, 0.0))
    index = np.flatnonzero(searched)
    if index.size == 0:
        return result
    at_zero = log_delta(np.zeros(index.size), index) <= log_target[index]
    result[index[at_zero]] = 0.0
    index = index[~at_zero]
    floor = _SMALLEST_SHARE * largest[index]
    at_floor = log_delta(floor, index) <= log_target[index]
    result[index[at_floor]] = floor[at_floor]
    index = index[~at_floor]

    # As a function of 1/epsilon the excess increases, as the search wants it.
    def excess(inverse: np.ndarray, active: np.ndarray) -> np.ndarray:
        rows = index[active]
        value = log_delta(1 / inverse, rows) - log_target[rows]
        return np.maximum(value, -1e6)

    # A secant far out of the bracket may overflow; it is replaced by the middle.
    with np.errstate(over="ignore"):
        inverse = largest_within(
            excess,
            1 / largest[index],
            1 / (_SMALLEST_SHARE * largest[index]),
            tolerance=_TOLERANCE,
        )
    result[index] = np.minimum(1 / inverse, largest[index])
    return result

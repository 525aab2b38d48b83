"""Coefficients of correlated noise, and the noise that an optimizer keeps of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

# Starts of the search: decay a and exponent gamma of the family. (1, 1/2) would be the
# closed form of Fichtenberger, Henzinger and Upadhyay (2023), arXiv:2202.11205.
_STARTS = ((0.99, 0.5), (0.7, 0.3))
# Absolute, of an error that is at least 1.
_TOLERANCE = 1e-10


def band_error(
    coefficients: np.ndarray, num_steps: int, horizon: float, restarts: int = 0
) -> float:
    """Returns the deviation of the noise in what an optimizer remembers.

    It is the root mean square over all steps, relative to the noise of one release. At
    step t the optimizer weights step j by ``(1 - 1/horizon)^(t - j)``: ``horizon=inf``
    means prefix sums, and ``horizon=1`` a single decoded step. A restart empties the
    memory of encoder and decoder; ``restarts`` of them are spaced evenly.
    """
    from scipy.signal import lfilter

    impulse = np.zeros(num_steps)
    impulse[0] = 1.0
    memory = [1.0, 1.0 / horizon - 1.0]
    with np.errstate(over="ignore", invalid="ignore"):  # too large is inf
        kernel = np.convolve(coefficients, memory)
        fresh = np.cumsum(np.asarray(lfilter([1.0], kernel, impulse)) ** 2)
        before, parts = 0.0, []  # variance at the last restart
        for part in np.array_split(fresh, min(restarts + 1, num_steps)):
            ages = np.arange(1, len(part) + 1)
            parts.append(fresh[: len(part)] + before * memory[1] ** (2 * ages))
            before = parts[-1][-1]
        return float(np.sqrt(np.mean(np.concatenate(parts))))


@functools.lru_cache(maxsize=256)
def band_coefficients(count: int, num_steps: int, horizon: float) -> np.ndarray:
    """Returns (count,) coefficients of norm 1, the first one positive; read-only.

    They minimize `band_error` over the family ``(1 - a x)^-gamma``, truncated to
    ``count`` terms, for a run of ``num_steps`` steps and an optimizer that remembers
    ``horizon`` of them. docs/theory.md, "Correlated noise".
    """
    if count == 1:
        return np.ones(1)
    from scipy.optimize import minimize

    def family(point: Any) -> np.ndarray:
        # The search moves a logit and a logarithm, so it cannot leave the family.
        decay, exponent = 1 / (1 + np.exp(-point[0])), np.exp(point[1])
        k = np.arange(1, count)
        found = np.cumprod([1.0, *(decay * (k - 1 + exponent) / k)])
        return found / np.linalg.norm(found)

    def error(point: np.ndarray) -> float:
        found = band_error(family(point), num_steps, horizon)
        return found if np.isfinite(found) else np.inf

    starts = [[np.log(a / (1 - a)), np.log(gamma)] for a, gamma in _STARTS]
    options = {"xatol": 1e-6, "fatol": _TOLERANCE, "maxiter": 2000}
    how: Any = {"method": "Nelder-Mead", "options": options}
    fits = [minimize(error, start, **how) for start in starts]
    found = family(min(fits, key=lambda fit: fit.fun).x)
    found.setflags(write=False)
    return found

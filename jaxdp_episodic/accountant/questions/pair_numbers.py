"""What every dominating pair of a step needs: shifts, products of rates, relations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxdp_episodic.accountant.describe.step import GaussianStep

# A rate of 1, on its path axis.
ALWAYS = np.ones(1)


def is_zeroing(step: GaussianStep) -> bool:
    """Whether a protected unit's data become null."""
    return step.neighboring_relation == "zero_out"


def shift_of(step: GaussianStep, sensitivity: np.ndarray | float) -> np.ndarray:
    """Returns how far a protected unit changes the sum, in deviations of the noise.

    ``sensitivity`` is in clip norms; without noise the shift is inf.
    """
    noise = np.asarray(step.noise_multiplier, np.float64)[..., None]
    with np.errstate(divide="ignore", over="ignore"):
        return np.divide(sensitivity, noise)


def product(rates: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the product of rates, 1 of none; with a path axis."""
    result = np.ones(1)
    for rate in rates:
        result = result * rate
    return result

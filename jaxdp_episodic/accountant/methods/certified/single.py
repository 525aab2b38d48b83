"""Certified ends of epsilon and delta of a single step, read off its profile."""

from __future__ import annotations

import math

import numpy as np

from jaxdp_episodic.accountant.losses.protocols import Profile
from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.single_step import epsilon_of_profile

# Relative distances from the computed profile's solution at which ends are tried.
_DISTANCES = 1e-15 * 4.0 ** np.arange(26)


def epsilon_ends(loss: Profile, log_delta: float, upper: float) -> tuple[float, float]:
    """Ends of epsilon of one step with scalar fields, at most ``upper``."""
    epsilon = float(epsilon_of_profile(np.array([log_delta]), _row(loss))[0])
    epsilon = min(epsilon, upper)
    away = _DISTANCES * (epsilon if epsilon > 0 else upper)
    tried = np.concatenate([epsilon - away[::-1], [epsilon], epsilon + away])
    tried = np.maximum(tried, 0.0)
    low, high = log_delta_ends(loss, tried)
    # Each point is certified by itself: no monotonicity is used.
    high = min([upper, *tried[high <= log_delta].tolist()])
    low = max([0.0, *tried[low >= log_delta].tolist()])
    return min(low, high), high


def log_delta_ends(loss: Profile, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of log(delta) of one step at (k,) epsilons >= 0."""
    # The computed profile is one whose losses are displaced by no more than
    # `lattice.displacement` and rounding: it is read off as far to either side.
    nats = lattice.displacement(loss) + lattice.loss_rounding(epsilon)
    number = len(epsilon)
    shifted = np.concatenate([np.maximum(epsilon - nats, 0.0), epsilon + nats])
    (both,) = lattice.evaluate_tails([loss], [shifted])
    low, high = np.full((2, number), -math.inf)
    change = np.tile(lattice.displacement_error(nats), 2)
    for own in both:
        error = own.profile_error + change * own.scaled + 1e-300
        above, below = own.profile + error, own.profile - error
        most = np.log(above[:number])
        alive = below[number:] > 0
        least = np.log(np.where(alive, below[number:], 1.0))
        high = np.maximum(high, most + 1e-15 * (1 + np.abs(most)))
        least = np.where(alive, least - 1e-15 * (1 + np.abs(least)), -math.inf)
        low = np.maximum(low, least)
    return low, np.minimum(high, 0.0)


def _row(loss: Profile) -> Profile:
    return loss.map(np.atleast_1d)

"""Certified ends of epsilon and delta of a single step, read off its profile.

No lattice: the profile is known up to rounding, which `lattice` bounds, so that
the ends are within some 1e-13 of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.certified.interval_state import Setting
from jaxdp_episodic.accountant.methods.single_step import epsilon_of_profile

# Relative distances from the computed profile's solution at which ends are tried.
_DISTANCES = 1e-15 * 4.0 ** np.arange(26)


def is_single(setting: Setting) -> bool:
    """Whether the setting is one step, taken once."""
    return len(setting.steps) == 1 and setting.steps[0].count == 1


def narrow(settings: Sequence[Setting]) -> None:
    """Narrows the ends of settings of one step each."""
    mechanisms: dict[type, list[Setting]] = {}
    for s in settings:
        mechanisms.setdefault(type(s.steps[0].loss), []).append(s)
    for group in mechanisms.values():
        of_epsilon = [s for s in group if s.target.of_epsilon]
        if of_epsilon:
            _narrow_epsilon(of_epsilon)
        of_delta = [s for s in group if not s.target.of_epsilon]
        if of_delta:
            points = [np.array([s.target.given]) for s in of_delta]
            for s, (low, high) in zip(
                of_delta, _log_profiles(of_delta, points), strict=True
            ):
                s.lower = max(s.lower, float(low[0]))
                s.upper = max(min(s.upper, float(high[0])), s.lower)


def _narrow_epsilon(settings: Sequence[Setting]) -> None:
    losses = [s.steps[0].loss for s in settings]
    log_delta = np.array([s.target.given for s in settings])
    every = type(losses[0]).stack(losses)
    near = epsilon_of_profile(log_delta, every)
    points = []
    for s, epsilon in zip(settings, near, strict=True):
        epsilon = min(float(epsilon), s.upper)
        away = _DISTANCES * (epsilon if epsilon > 0 else s.upper)
        tried = np.concatenate([epsilon - away[::-1], [epsilon], epsilon + away])
        points.append(np.maximum(tried, 0.0))
    for s, tried, goal, (low, high) in zip(
        settings, points, log_delta, _log_profiles(settings, points), strict=True
    ):
        # Each point is certified by itself: no monotonicity is used.
        s.upper = min([s.upper, *tried[high <= goal].tolist()])
        s.lower = max([s.lower, *tried[low >= goal].tolist()])
        s.upper = max(s.upper, s.lower)


def _log_profiles(
    settings: Sequence[Setting], points: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Certified ends of log(delta) at some epsilons >= 0 of each setting.

    The computed profile is that of a distribution whose losses are displaced by no more
    than `lattice.displacement` and rounding: it is read off as far to either side.
    """
    losses = [s.steps[0].loss for s in settings]
    displaced = [
        lattice.displacement(loss) + lattice.loss_rounding(p)
        for loss, p in zip(losses, points, strict=True)
    ]
    shifted = [
        np.concatenate([np.maximum(p - nats, 0.0), p + nats])
        for p, nats in zip(points, displaced, strict=True)
    ]
    result = []
    for p, nats, tails in zip(
        points, displaced, lattice.evaluate_tails(losses, shifted), strict=True
    ):
        low, high = np.full(len(p), -math.inf), np.full(len(p), -math.inf)
        change = np.tile(lattice.displacement_error(nats), 2)
        for own in tails:
            error = own.profile_error + change * own.scaled + 1e-300
            above, below = own.profile + error, own.profile - error
            most = np.log(above[: len(p)])
            alive = below[len(p) :] > 0
            least = np.log(np.where(alive, below[len(p) :], 1.0))
            high = np.maximum(high, most + 1e-15 * (1 + np.abs(most)))
            least = np.where(alive, least - 1e-15 * (1 + np.abs(least)), -math.inf)
            low = np.maximum(low, least)
        result.append((low, np.minimum(high, 0.0)))
    return result

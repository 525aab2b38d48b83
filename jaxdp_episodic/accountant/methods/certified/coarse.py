"""A coarse distribution of one step's loss, with which lattices are planned.

An *estimate*: it decides how wide certified intervals become, never whether they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import Hints
from jaxdp_episodic.accountant.methods.certified.lattice import (
    Tails,
    bin_masses,
    merged_losses,
)

# Nats at which the loss of every mechanism is evaluated: eight a decade.
_ANY_LOSSES = np.geomspace(1e-10, 1e4, 113)
# Standard deviations of a Gaussian loss up to which there are points about its mean.
_LARGEST_DEVIATION = 12.0
# Shift up to which evenly spaced points cover a Gaussian loss from 0 on.
_LARGEST_SHIFT = 100.0
# Points about the mean of the loss of a larger shift, and further ones beyond.
_POINTS_ABOUT_MEAN = 97
_FAR_POINTS = 160
# Smallest point, relative to the scale of small losses.
_LEAST_LOSS = 1e-4


class CoarseLoss(NamedTuple):
    """One step's loss, coarsely: b cells in order, the atom at 0 one of them.

    Attributes:
      mass, log_ratio: (b,) P-mass of each cell and ``log(P / Q)`` of it.
      edges: (b + 1,) between the cells.
      above: (b + 1,) P-mass above each edge.
      count: how often the step is taken.
    """

    mass: np.ndarray
    log_ratio: np.ndarray
    edges: np.ndarray
    above: np.ndarray
    count: float


def coarse_points(hints: Hints) -> np.ndarray:
    """Losses of either sign, 0 among them, that are the edges of the cells."""
    shift = float(hints.furthest)
    furthest = shift * (0.5 * shift + _LARGEST_DEVIATION)
    if shift <= _LARGEST_SHIFT:
        gaussian = np.linspace(0.0, furthest, 45 + 2 * int(shift))[1:]
    else:
        # The loss is about shift² / 2, far from 0 in its deviations; a geometric grid
        # for what is between, and for multiples of the shift.
        mean, deviations = 0.5 * shift * shift, _LARGEST_DEVIATION * shift
        near = np.linspace(mean - deviations, mean + deviations, _POINTS_ABOUT_MEAN)
        gaussian = np.union1d(near, np.geomspace(1e3, 2 * furthest, _FAR_POINTS))
    # smaller losses are negligible, and there are no larger ones
    least = _LEAST_LOSS * float(hints.rate) * min(float(hints.shift), 1.0)
    inside = (_ANY_LOSSES >= least) & (_ANY_LOSSES <= 2 * furthest)
    positive = np.union1d(_ANY_LOSSES[inside], gaussian)
    return np.concatenate([-positive[::-1], [0.0], positive])


def coarse_loss(
    points: np.ndarray, own: Tails, other: Tails, count: float
) -> CoarseLoss:
    """One step's loss by cells between the points, and the atom at 0."""
    bins = bin_masses(points, own, other)
    mass, log_ratio = merged_losses(points, bins)
    zero = int(np.searchsorted(points, 0.0))
    above = bins.above + np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    return CoarseLoss(
        np.insert(mass, zero, bins.atom),
        np.insert(log_ratio, zero, 0.0),
        np.insert(points, zero, 0.0),
        np.insert(above, zero, above[zero]),
        count,
    )


def log_moment(coarse: CoarseLoss, tilts: np.ndarray) -> np.ndarray:
    """``log E_P exp(c L)`` at many c, without cancellation near 0."""
    alive = coarse.mass > 0
    mass, loss = coarse.mass[alive], coarse.log_ratio[alive]
    exponent = tilts[:, None] * loss
    largest = exponent.max(-1, initial=0.0)
    # e^x - 1 keeps the digits of small moments, e^(x - largest) does not overflow.
    near = largest <= 600
    small = np.expm1(exponent[near]) @ mass
    result = np.empty(len(tilts))
    result[near] = np.log1p(np.maximum(small, -1 + 1e-15))
    largest = largest[~near]
    large = np.exp(exponent[~near] - largest[:, None]) @ mass
    result[~near] = np.log(large) + largest
    return result


def peak(coarse: CoarseLoss) -> float:
    """Where a narrow peak would be: the median, or 0 if an atom there is heavier."""
    median = int(np.searchsorted(np.cumsum(coarse.mass), 0.5))
    median = min(median, len(coarse.mass) - 1)
    atom = float(coarse.mass[coarse.log_ratio == 0].max(initial=0.0))
    return 0.0 if atom >= coarse.mass[median] else float(coarse.log_ratio[median])

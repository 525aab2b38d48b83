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

# Losses at which every step is looked at first, and up to how many standard
# deviations of the Gaussian loss others are put among them.
_PILOT_LOSSES = np.geomspace(1e-10, 1e4, 113)
_LARGEST_DEVIATION = 12.0
# Moves up to which points are laid evenly over all Gaussian losses, and their number
# where the losses of a larger one are far away.
_LARGEST_MOVE, _BUMP_POINTS, _FAR_POINTS = 100.0, 97, 160
# Smallest point, relative to the scale of small losses.
_LEAST_LOSS = 1e-4


class Pilot(NamedTuple):
    """One step's loss, coarsely: b cells in order, the atom at 0 one of them.

    Attributes:
      mass, loss: (b,) P-mass of each cell and its loss as a whole.
      edges: (b + 1,) between the cells.
      above: (b + 1,) P-mass above each edge.
    """

    mass: np.ndarray
    loss: np.ndarray
    edges: np.ndarray
    above: np.ndarray


def pilot_points(hints: Hints) -> np.ndarray:
    """Losses of either sign, 0 among them, at which a pilot is evaluated."""
    move = float(hints.furthest)
    furthest = move * (0.5 * move + _LARGEST_DEVIATION)
    if move <= _LARGEST_MOVE:
        gaussian = np.linspace(0.0, furthest, 45 + 2 * int(move))[1:]
    else:
        # Points about the bump, which is far from 0 and narrow; and a geometric grid
        # for what is between them and for multiples of the move.
        middle, deviations = 0.5 * move * move, _LARGEST_DEVIATION * move
        bump = np.linspace(middle - deviations, middle + deviations, _BUMP_POINTS)
        gaussian = np.union1d(bump, np.geomspace(1e3, 2 * furthest, _FAR_POINTS))
    # smaller losses are negligible, and there are no larger ones
    least = _LEAST_LOSS * float(hints.rate) * min(float(hints.shift), 1.0)
    near = (_PILOT_LOSSES >= least) & (_PILOT_LOSSES <= 2 * furthest)
    positive = np.union1d(_PILOT_LOSSES[near], gaussian)
    return np.concatenate([-positive[::-1], [0.0], positive])


def pilot_of(points: np.ndarray, own: Tails, other: Tails) -> Pilot:
    """One step's loss by cells between the points, and the atom at 0."""
    pilot = bin_masses(points, own, other)
    mass, loss = merged_losses(points, pilot)
    zero = int(np.searchsorted(points, 0.0))
    above = pilot.above + np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    return Pilot(
        np.insert(mass, zero, pilot.atom),
        np.insert(loss, zero, 0.0),
        np.insert(points, zero, 0.0),
        np.insert(above, zero, above[zero]),
    )


def log_moment(pilot: Pilot, tilts: np.ndarray) -> np.ndarray:
    """``log E_P exp(c L)`` at many c, without cancellation near 0."""
    alive = pilot.mass > 0
    mass, loss = pilot.mass[alive], pilot.loss[alive]
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


def bulk(pilot: Pilot) -> float:
    """Where a spike is: the median loss, or 0 if an atom there is heavier."""
    middle = int(np.searchsorted(np.cumsum(pilot.mass), 0.5))
    middle = min(middle, len(pilot.loss) - 1)
    atom = float(pilot.mass[pilot.loss == 0].max(initial=0.0))
    return 0.0 if atom >= pilot.mass[middle] else float(pilot.loss[middle])

"""Steps whose losses are finitely many: grid points beside them, and no tails.

Differences of tails would know the mass of each bin to some 1e-15 of all, over the
spacing; an atom's own mass is known to as much of itself. So the lattice has grid
points only on either side of every atom, and what is between is empty.
"""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accountant.losses.protocols import FiniteValues, Profile
from jaxdp_episodic.accountant.methods.certified.grid import FURTHEST
from jaxdp_episodic.accountant.methods.certified.lattice import BinMasses

# Relative rounding error of the split of an atom.
_SPLIT_ERROR = 4e-15


def best_center(loss: Profile, tilt: float, sign: int) -> float | None:
    """The forward loss of the heaviest atom of one direction, tilted; or None.

    It is put on the lattice, where the upper and lower distribution are exact.
    """
    if not isinstance(loss, FiniteValues):
        return None
    losses, log_masses = loss.values()
    # backward the masses are those of the other distribution, and losses change their
    # sign
    weight = log_masses + (tilt if sign > 0 else -1 - tilt) * losses
    return float(losses[int(np.argmax(weight))])


def grid_beside(loss: Profile, center: float, spacing: float) -> np.ndarray | None:
    """Numbers j of the grid points ``center + j spacing`` on either side of every atom.

    None where the losses are not finitely many, none where they are too far away.
    """
    if not isinstance(loss, FiniteValues):
        return None
    below = np.floor((loss.values()[0] - center) / spacing)
    if np.abs(below).max() > FURTHEST:
        return np.empty(0)
    return np.unique(np.concatenate([below, below + 1, [-1.0, 0.0, 1.0]]))


def bin_masses_of_atoms(
    points: np.ndarray, loss: Profile, sign: int
) -> BinMasses | None:
    """`lattice.bin_masses` of one direction; None where losses are not finitely many.

    An atom at a point is in the bin that begins there.
    """
    if not isinstance(loss, FiniteValues):
        return None
    losses, log_masses = loss.values()
    if sign < 0:
        losses, log_masses = -losses, log_masses - losses
    mass = np.exp(log_masses)
    error = float(loss.profile_error()) * (1 + np.abs(log_masses) + np.abs(losses))
    return bins_of_masses(points, losses, mass, (error + _SPLIT_ERROR) * mass)


def bins_of_masses(
    points: np.ndarray, losses: np.ndarray, mass: np.ndarray, error: np.ndarray
) -> BinMasses:
    """The same of (J,) atoms, their masses and bounds of the errors of these."""
    cell = np.searchsorted(points, losses, side="right") - 1
    under, over = cell < 0, cell >= len(points) - 1
    inside = ~under & ~over
    cell, atoms = cell[inside], losses[inside]
    start = points[cell]
    share = np.expm1(start - atoms) / np.expm1(start - points[cell + 1])

    def summed(weights: np.ndarray) -> np.ndarray:
        return np.bincount(cell, weights, minlength=len(points) - 1)

    gain = mass[over] @ -np.expm1(points[-1] - losses[over])
    return BinMasses(
        bottom=summed((1 - share) * mass[inside]),
        top=summed(share * mass[inside]),
        top_error=summed(share * error[inside]),
        mass_error=summed(error[inside]),
        atom=0.0,
        atom_error=0.0,
        above=float(mass[over].sum()),
        above_error=float(error[over].sum()),
        above_gain=max(float(gain - error[over].sum()), 0.0),
        below=float((mass + error)[under].sum()),
    )

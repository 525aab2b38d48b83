"""The upper and the lower lattice distribution of each step, in one direction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.certified import atoms, lattice, lower
from jaxdp_episodic.accountant.methods.certified.hockey_stick import LatticeDistribution
from jaxdp_episodic.accountant.methods.certified.interval_state import Setting
from jaxdp_episodic.accountant.methods.certified.lattice import BinMasses, Tails


class StepDistribution(NamedTuple):
    """A lattice distribution of one step, its mass at infinity, its losses' move."""

    finite: LatticeDistribution
    infinite: float
    move: float

    @property
    def total(self) -> float:
        """All of the mass: 1 up to rounding, or less in a lower distribution."""
        return float(self.finite.masses.sum()) + self.infinite


def bin_masses_of_steps(
    s: Setting, sign: int
) -> list[tuple[np.ndarray, np.ndarray, BinMasses]]:
    """Lattice numbers, points and the masses of the bins between them, of each step."""
    result = []
    for step, index, points, tails in zip(
        s.steps, s.grids, s.points, s.tails, strict=True
    ):
        if sign < 0:
            index, points = -index[::-1], -points[::-1]
        bins = atoms.bin_masses_of_atoms(points, step.loss, sign)
        if bins is None:
            forward, backward = tails
            if sign < 0:
                forward, backward = (
                    Tails(*(a[::-1] for a in t)) for t in (backward, forward)
                )
            bins = lattice.bin_masses(points, forward, backward)
        result.append((index, points, bins))
    return result


def upper_distribution(
    index: np.ndarray, points: np.ndarray, bins: BinMasses
) -> StepDistribution:
    """On the grid points; its hockey-stick curve is nowhere below the true one."""
    masses, infinite = lattice.upper_masses(points, bins)
    return StepDistribution(
        LatticeDistribution(index, points[::2], masses), infinite, 0.0
    )


def lower_distribution(
    index: np.ndarray, points: np.ndarray, bins: BinMasses, tilt: float
) -> StepDistribution:
    """On moved grid points; its hockey-stick curve is nowhere above the true one."""
    masses, move = lower.lower_distribution(points, bins, tilt)
    return StepDistribution(
        LatticeDistribution(index, points[::2] + move, masses), 0.0, move
    )

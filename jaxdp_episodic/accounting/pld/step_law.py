"""The two laws of each step of a setting, in one direction, between its knots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accounting.pld import atoms, lattice, lower
from jaxdp_episodic.accounting.pld.hockey_stick import LatticeLaw
from jaxdp_episodic.accounting.pld.interval_state import Setting
from jaxdp_episodic.accounting.pld.lattice import FineLaw, Tails


class StepLaw(NamedTuple):
    """One law of one step; its infinite mass, and how far all its losses are moved."""

    law: LatticeLaw
    infinite: float
    move: float

    @property
    def total(self) -> float:
        """All of the mass: 1 up to rounding, or less in a lower law."""
        return float(self.law.masses.sum()) + self.infinite


def fine_laws(s: Setting, sign: int) -> list[tuple[np.ndarray, np.ndarray, FineLaw]]:
    """Lattice numbers, points and the law between them, of each step."""
    result = []
    for step, index, points, tails in zip(
        s.steps, s.knots, s.points, s.tails, strict=True
    ):
        if sign < 0:
            index, points = -index[::-1], -points[::-1]
        law = atoms.law_of_atoms(points, step.loss, sign)
        if law is None:
            forward, backward = tails
            if sign < 0:
                forward, backward = (
                    Tails(*(a[::-1] for a in t)) for t in (backward, forward)
                )
            law = lattice.fine_law(points, forward, backward)
        result.append((index, points, law))
    return result


def upper_law(index: np.ndarray, points: np.ndarray, law: FineLaw) -> StepLaw:
    """The law on the knots whose profile is nowhere below the true one."""
    masses, infinite = lattice.upper_masses(points, law)
    return StepLaw(LatticeLaw(index, points[::2], masses), infinite, 0.0)


def lower_law(
    index: np.ndarray, points: np.ndarray, law: FineLaw, tilt: float
) -> StepLaw:
    """The law on knots that are moved whose profile is nowhere above the true one."""
    masses, move = lower.lower_law(points, law, tilt)
    return StepLaw(LatticeLaw(index, points[::2] + move, masses), 0.0, move)

"""A setting between the refinements that narrow its certified interval."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.protocols import Profile
from jaxdp_episodic.accountant.methods.certified.coarse import CoarseLoss
from jaxdp_episodic.accountant.methods.certified.lattice import Tails
from jaxdp_episodic.accountant.methods.certified.window import (
    Direction,
    Estimate,
    Target,
)

# First width of a plan over the width that is enough: plans overestimate it.
FIRST_SCALE = 1.2


class Step(NamedTuple):
    """One step of one setting, with scalar fields, and how often it is taken."""

    loss: Profile
    count: float


class Tolerance(NamedTuple):
    """Width that is enough (see `Target`), and the cells of a lattice it is worth."""

    absolute: float
    relative: float
    most_cells: int


@dataclass
class Setting:
    """The state of one setting: its interval, and the plan of the next lattice.

    Attributes:
      steps, target: what is composed, and what is asked.
      lower, upper: the certified ends found.
      most_cells: of a lattice.
      scale: share of the planned width that the next lattice is laid for.
      next_tolerances: widths to try after this one.
      lead: index of the direction with the larger answer.
      coarse: losses of each direction, of each step.
      signs: 1 for the forward direction, -1 for the mirrored one.
      known: of each direction the estimate of the last refinement.
      uppers: of each direction the upper end found.
      plans, centers, spacing, grids, points, tails: of the current lattice.
      least_spacing: below which no lattice is laid.
      out_of_memory, last_attempt: why there may be no further lattice.
      has_no_estimate: whether the lattice is planned from the coarse losses alone.
      contradicted: whether certified ends crossed, or mass was missing.
      tolerance_since: number of refinements when the tolerance was set.
    """

    steps: tuple[Step, ...]
    target: Target
    lower: float
    upper: float
    most_cells: int
    scale: float = FIRST_SCALE
    next_tolerances: list[Tolerance] = field(default_factory=list)
    lead: int = 0
    coarse: list[list[CoarseLoss]] = field(default_factory=list)
    signs: list[int] = field(default_factory=list)
    known: list[Estimate | None] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    plans: list[Direction] = field(default_factory=list)
    centers: list[float] = field(default_factory=list)
    spacing: float = 0.0
    grids: list[np.ndarray] = field(default_factory=list)
    points: list[np.ndarray] = field(default_factory=list)
    tails: list[tuple[Tails, Tails]] = field(default_factory=list)
    least_spacing: float = 0.0
    out_of_memory: bool = False
    last_attempt: bool = False
    has_no_estimate: bool = True
    refinements: int = 0
    contradicted: bool = False
    tolerance_since: int = 0

    def __post_init__(self) -> None:
        self._first = self.lower, self.upper

    def revert_ends(self, why: str) -> None:
        """Reverts to the initial ends, for good, as a certified end must be wrong."""
        warnings.warn(
            f"{why}: a fault of the certified method, please report it with the "
            "question that was asked; the answer is Rényi's bound instead",
            RuntimeWarning,
            stacklevel=2,
        )
        self.lower, self.upper = self._first
        self.uppers = [self.upper] * len(self.uppers)
        self.contradicted = self.out_of_memory = True
        self.next_tolerances = []

    def set_tolerance(self, tolerance: Tolerance) -> None:
        """Asks for another width, keeping the ends and estimates found before."""
        absolute, relative, self.most_cells = tolerance
        self.target = self.target._replace(absolute=absolute, relative=relative)
        self.scale, self.out_of_memory = FIRST_SCALE, False
        self.least_spacing, self.last_attempt = 0.0, False
        self.tolerance_since = self.refinements

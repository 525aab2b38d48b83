"""What a recursion is asked about: options on one path, for either end.

And Rényi's filter of them, which says where to look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.protocols import FiniteValues, Profile
from jaxdp_episodic.accountant.methods.adaptive.graph import Graph
from jaxdp_episodic.accountant.methods.adaptive.kernel import (
    Kernel,
    Spacing,
    kernel_of,
    with_failure,
)
from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.closed_form import one_gaussian, shift_error
from jaxdp_episodic.accountant.methods.question import Question
from jaxdp_episodic.accountant.methods.rdp.method import rdp_curve
from jaxdp_episodic.accountant.methods.run import Run

# Orders at which Rényi's filter is computed.
_ORDERS = 1 + np.geomspace(0.05, 500.0, 40)
# Relative rounding error of Rényi's bound.
RDP_ROUNDING = 1e-9
# Rounding of a logarithm, relative to 1 and its size.
_ROUNDING = 1e-15
# Heaviest atoms of a loss, for which a lattice is laid.
_MOST_ATOMS = 4
# Share of a loss by which the lattice's points are below it.
_BESIDE = 1e-11
# Nats beyond which losses of a lattice are not looked at.
FURTHEST = 100.0
# Rounding of a point of the lattice, relative.
_POINT_ROUNDING = 2.3e-16


class Side(NamedTuple):
    """Options as they are taken for one end: scalar losses and counts, one a step.

    Attributes:
      losses, counts: for each option.
      log_kept: for each option, of everything being lost at once.
      displaced: for each option, nats by which its losses may be off.
      mass_error: for each option, error of its ``log H_g``.
    """

    losses: tuple[tuple[Profile, ...], ...]
    counts: tuple[tuple[float, ...], ...]
    log_kept: tuple[float, ...]
    displaced: tuple[float, ...]
    mass_error: tuple[float, ...]

    def kernels(
        self, spacing: Spacing, *, backward: bool, tilt: float, up: bool
    ) -> list[Kernel]:
        """Of all options; see `kernel_of`."""
        which = {"backward": backward, "tilt": tilt, "up": up}
        return [
            with_failure(
                kernel_of(losses, counts, spacing, **which), kept, spacing.step, up=up
            )
            for losses, counts, kept in zip(
                self.losses, self.counts, self.log_kept, strict=True
            )
        ]


class Problem(NamedTuple):
    """A graph and its options, on one path.

    Attributes:
      graph: the states.
      runs: of the options, each of one setting.
      upper, lower: the options for either end.
      orientations: forward and backward, or forward alone where they are alike.
    """

    graph: Graph
    runs: tuple[Run, ...]
    upper: Side
    lower: Side
    orientations: tuple[bool, ...]

    @classmethod
    def of(cls, graph: Graph, runs: Sequence[Run]) -> Problem:
        """The problem of these options, each a run of one setting and path."""
        for run in runs:
            run.refuse("pld")
        flat = tuple(run.flattened((1,)) for run in runs)
        alike = all(run.is_symmetric for run in flat)
        upper, lower = (_side(flat, up=up) for up in (True, False))
        return cls(graph, flat, upper, lower, (False,) if alike else (False, True))


def _side(runs: Sequence[Run], *, up: bool) -> Side:
    columns: list[tuple[Any, ...]] = []
    for run in runs:
        reached = run.in_reach() if up else run
        kept = reached.kept()
        log_kept = float(reached.log_kept()[0])
        if not up and run.has_too_little_noise[0]:
            log_kept = 0.0  # only an upper bound of what is lost at once is known
        bounding = kept.certified(up=up)
        pairs = zip(kept.losses, bounding.losses, kept.counts, strict=True)
        for one, other, count in pairs:
            if other is not one and count[0] > 0:
                log_kept += float(count[0] * other.log_kept()[0])
        mass_error, displaced = (float(e[0]) for e in bounding.certified_error())
        losses, counts = _steps_of(bounding, up=up)
        displaced += sum(
            n * (lattice.displacement(loss) + _POINT_ROUNDING * FURTHEST)
            for loss, n in zip(losses, counts, strict=True)
        )
        columns.append((losses, counts, log_kept, displaced, mass_error))
    return Side(*zip(*columns, strict=True))


def _steps_of(run: Run, *, up: bool) -> tuple[tuple[Profile, ...], tuple[float, ...]]:
    """What loses anything, with scalar fields; several Gaussians as one."""
    shift = float(run.gaussian_shift()[0])
    if shift > 0:
        # The shift is rounded.
        shift *= 1 + shift_error(run) * (1 if up else -1)
        return (one_gaussian(np.asarray(shift)),), (1.0,)
    taken: list[tuple[Any, float]] = [
        (loss.map(lambda field: np.float64(field[0])), float(count[0]))
        for loss, count in zip(run.losses, run.counts, strict=True)
        if count[0] > 0 and not loss.loses_nothing[0]
    ]
    losses = tuple(loss.kept_in_range() for loss, _ in taken)
    return losses, tuple(count for _, count in taken)


def atoms_of(problem: Problem) -> np.ndarray:
    """Sizes of losses that have a probability of their own, the largest first."""
    sizes: set[float] = set()
    for loss in (loss for losses in problem.lower.losses for loss in losses):
        if isinstance(loss, FiniteValues):
            values, log_masses = loss.values()
            order = np.argsort(-log_masses)[:_MOST_ATOMS]
            sizes |= set(np.abs(values[order]).tolist())
        elif loss.may_have_atoms:
            sizes |= {float(loss.largest_loss(backward=b)) for b in (False, True)}
    known = np.array(sorted(x for x in sizes if 0 < x < math.inf))
    return known[::-1]


def aligned(spacing: float, atoms: np.ndarray) -> float:
    """A spacing, little smaller, whose lattice has the atoms on it, or close by.

    An atom off the lattice costs the lower end up to a whole cell.
    """
    if not atoms.size or atoms[0] < spacing:
        return spacing
    least = math.ceil(atoms[0] / spacing)
    tried = atoms[0] / np.arange(least, least + max(least // 4, 1) + 1)
    places = atoms / tried[:, None]
    off = np.abs(places - np.rint(places)).max(axis=1)
    # Just above a point: what is just below one counts as the point before.
    return float(tried[np.argmin(np.round(off, 6))]) * (1 - _BESIDE)


class Filter(NamedTuple):
    """Rényi's filter of one orientation: at each order the most that is collected.

    An *upper bound* of the worst strategy, at every order (Feldman and Zrnic 2021).
    Here it says where to look, and what stands where nothing better is found.
    """

    orders: np.ndarray
    rdp: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> dict[bool, Filter]:
        """The filter of a problem's options in each of its orientations."""
        names = ["backward" if b else "forward" for b in problem.orientations]
        curves = [[rdp_curve(_ORDERS, r, name) for name in names] for r in problem.runs]
        most = problem.graph.most(np.array(curves))
        pairs = zip(problem.orientations, most, strict=True)
        return {backward: cls(_ORDERS, rdp) for backward, rdp in pairs}

    def epsilon(self, log_delta: float) -> tuple[float, float]:
        """Epsilon, and the order at which it is found.

        Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Proposition 12.
        """
        a = self.orders
        found = self.rdp + np.log1p(-1 / a) - (log_delta + np.log(a)) / (a - 1)
        best = int(np.argmin(found))
        return max(float(found[best]), 0.0), float(a[best])

    def log_delta(self, epsilon: float) -> tuple[float, float]:
        """``log(delta)``, and the order: the same read the other way."""
        a = self.orders
        found = (a - 1) * (self.rdp - epsilon + np.log1p(-1 / a)) - np.log(a)
        best = int(np.argmin(found))
        return min(float(found[best]), 0.0), float(a[best])

    def answer(self, question: Question, log_lost: float) -> float:
        """*Upper bound* of one target's answer, with what is lost at once."""
        target = float(question.target)
        if question.is_epsilon:
            found = self.epsilon(target)[0]
            found += RDP_ROUNDING * (1 + abs(found))
            return found if log_lost == -math.inf else math.inf
        found = self.log_delta(target)[0]
        found += RDP_ROUNDING * (1 + abs(found))
        return min(float(np.logaddexp(found, log_lost)), 0.0)

    def bound(self, x: np.ndarray) -> np.ndarray:
        """*Upper bounds* of delta at many epsilons."""
        a = self.orders[:, None]
        log_delta = (a - 1) * (self.rdp[:, None] - x + np.log1p(-1 / a)) - np.log(a)
        return np.exp(np.minimum(log_delta.min(axis=0), 0.0)) * (1 + RDP_ROUNDING)


class Ends(NamedTuple):
    """Certified ends, of epsilon in nats or of log(delta)."""

    lower: float
    upper: float

"""The worst strategy's divergences at all g >= 1, from above: what a price rests on."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.method import Solver
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem
from jaxdp_episodic.accountant.methods.adaptive.reading import curve_of
from jaxdp_episodic.accountant.methods.question import EpsilonAt

# Width of epsilon that the spacing aims at, nats, and its share of a move's one: of
# second order in the spacing, as in `Solver`.
_WIDTH = 2e-4
_ERROR = 0.1
# Least number of points of a window, and the largest.
_LEAST_POINTS = 1_000
_MOST_POINTS = 2**17
# Points of all transforms of one row, at most: some 10 s.
_MOST_WORK = 2e9


class Profile(NamedTuple):
    """*Upper bounds* of ``H_g`` at ``log g = 0, h, 2 h, ...``.

    Chords in g between them lie above the truth too, which is convex; beyond the last
    point it is no more than there. The truth at log g is within
    ``e^mass_error`` times these bounds at ``log g - displaced``.

    Attributes:
      step: h, nats.
      values: (n,) falling.
      displaced: nats.
      mass_error: of the logarithm.
    """

    step: float
    values: np.ndarray
    displaced: float
    mass_error: float


def profiles_above(
    problem: Problem, least: float, step: float | None = None
) -> dict[bool, Profile] | None:
    """The profile of each orientation; None where so little is never reached.

    Args:
      problem: of one path.
      least: in (0, 1), the divergence to which it is to be known.
      step: of the points; None: as fine as that costs little.
    """
    solver = Solver(EpsilonAt(np.asarray(math.log(least))), problem)
    errors = tuple(solver.errors[True])
    if solver.known is not None:
        if solver.known.upper > 0:
            return None
        return {b: Profile(1.0, np.zeros(1), *errors) for b in problem.orientations}
    moves = problem.graph.moves
    transforms = sum(map(len, moves)) + len(moves)
    most = max(min(_MOST_POINTS, _MOST_WORK / transforms), _LEAST_POINTS)
    found = {}
    for backward, view in solver.views.items():
        reach = view.left + view.right
        if step is None:
            longest = float(problem.graph.most(np.ones(len(problem.runs))))
            fine = min(math.sqrt(_WIDTH / (_ERROR * longest)), reach / _LEAST_POINTS)
            spacing, is_aligned = max(fine, reach / most), False
        else:
            spacing, is_aligned = step, True
        curves = []
        # Rounding is relative to the largest values: of one here, of the other there.
        for tilt in sorted({0.0, view.tilt}):
            tilted = view._replace(tilt=tilt)
            window = solver.window(tilted, spacing, is_aligned=is_aligned)
            row = solver.row(backward, window, up=True)
            curves.append(curve_of(row, window, up=True).values)
        values = np.minimum.accumulate(np.minimum.reduce(curves))
        found[backward] = Profile(window.step, values, *errors)
    return found

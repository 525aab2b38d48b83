"""An epsilon that may be read at any moment: a function of the price spent."""

# Reference: docs/proofs.md, "Runs that adapt".

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.curve import Curve
from jaxdp_episodic.accountant.methods.adaptive.method import Solver
from jaxdp_episodic.accountant.methods.adaptive.problem import (
    RDP_ROUNDING,
    Ends,
    Filter,
    Problem,
)
from jaxdp_episodic.accountant.methods.adaptive.recursion import Row, Window
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt, Question

# Relative width of u that is enough.
_ENOUGH = 1e-3
# Points of all transforms of one end that are usually spent on a lattice for it.
_WORK = 5e7
# Least width of a window to the right of the largest epsilon, nats.
_LEAST_RIGHT = 1.0
# Factor of a tilt that was too steep.
_FLATTER = 0.7
# Tilt below which no smaller one is tried.
_LEAST_TILT = 1.0
# Margin above the one found, relative: for the rounding of sums.
_ROUNDING = 1e-12
# Logarithm of a delta that is too small to matter: no larger epsilon is looked at.
_LOG_NEGLIGIBLE = -100.0


def solver_of(question: Question, problem: Problem, width: float) -> Solver:
    """A solver that knows where to look, and how finely."""
    solver = Solver(question, problem)
    if solver.known is None:
        solver.begin()
        solver.refine(width, usual_work=_WORK)
    return solver


def odometer_delta(problem: Problem, epsilons: Sequence[float]) -> Ends:
    """Certified ends of ``log u(0, 1)``, of the larger orientation."""
    largest = max(epsilons[spent] for spent in problem.graph.spent)
    # Smaller epsilons hold with more: by no more than the delta at the largest of them.
    filters = Filter.of(problem).values()
    most = max(each.epsilon(_LOG_NEGLIGIBLE)[0] for each in filters)
    is_capped, largest = largest > most, min(largest, most)
    epsilons = np.minimum(epsilons, most).tolist()
    solver = solver_of(DeltaAt(np.asarray(largest)), problem, _ENOUGH)
    if solver.known is not None:
        # Of a delta that is not computed nothing follows for smaller epsilons.
        asked = solver.question
        is_nothing = solver.known.upper == asked.nothing
        return Ends(asked.nothing, asked.nothing if is_nothing else asked.everything)
    lower, upper = -math.inf, -math.inf
    for backward in problem.orientations:
        window, above, payoff = _seen(solver, backward, epsilons, largest)
        (row,) = solver.rows(backward, window, False, payoff=payoff, offset=largest)
        curve = Curve.of(above, window, up=True)
        upper = max(upper, solver.upper_end(curve))
        below = Curve.of(row, window, up=False)
        lower = max(lower, solver.lower_end(below, curve))
    if is_capped:
        more = math.exp(_LOG_NEGLIGIBLE) * (1 + RDP_ROUNDING) + solver.lost
        sure = math.exp(lower) - more
        lower = math.log(sure) if sure > 0 else -math.inf
    return Ends(min(lower, upper), upper)


def filter_epsilons(
    problem: Problem, log_delta: float, budgets: Mapping[int, int]
) -> np.ndarray:
    """*Upper bounds* of the worst strategy's epsilon of each smaller budget."""
    question = EpsilonAt(np.asarray(log_delta))
    return solver_of(question, problem, _ENOUGH / 10).ends_of(budgets)


def margin(problem: Problem, epsilons: Sequence[float], log_delta: float) -> float:
    """The least c, certified, at which ``epsilons + c`` has ``u(0, 1) <= delta``."""
    # (1 - e^(eps + c) g)_+ is the payoff at e^c g: one recursion says all.
    largest = max(epsilons[spent] for spent in problem.graph.spent)
    solver = solver_of(EpsilonAt(np.asarray(log_delta)), problem, _ENOUGH / 10)
    if solver.known is not None:
        return 0.0 if solver.known.upper == 0 else math.inf
    found = 0.0
    for backward in problem.orientations:
        window, row, _ = _seen(solver, backward, epsilons, largest)
        end = solver.upper_end(Curve.of(row, window, up=True))
        found = max(found, end - largest)
    return found * (1 + _ROUNDING) + _ROUNDING


def _seen(
    solver: Solver, backward: bool, epsilons: Sequence[float], largest: float
) -> tuple[Window, Row, Callable[[int], np.ndarray]]:
    """A window in which the row from above keeps its digits, that row, the payoff."""
    view, spent = solver.views[backward], solver.problem.graph.spent
    right = max(view.right, largest + _LEAST_RIGHT)
    view = view._replace(right=right, at=largest)
    while True:
        # The largest epsilon is a point, where u may have a kink.
        step = min(solver.spacing, view.left + right)
        if largest > 0:
            step = largest / math.ceil(largest / step)
        window = solver.window(view, step, is_aligned=True)
        x = window.points
        below = np.where(x < 0, np.exp(np.minimum(x, 0.0)), 0.0)

        def payoff(
            state: int, x: np.ndarray = x, below: np.ndarray = below
        ) -> np.ndarray:
            """Of stopping in a state: ``(1 - e^(x - gap))_+ - (1 - e^x)_+``."""
            gap = largest - epsilons[spent[state]]
            inside = (x >= 0) & (x < gap)
            above = np.where(inside, -np.expm1(np.where(inside, x - gap, -1.0)), 0.0)
            return above - below * math.expm1(-gap)

        (row,) = solver.rows(backward, window, True, payoff=payoff, offset=largest)
        at = np.argmin(np.abs(window.points - largest))
        if row.error < _ENOUGH * row.values[at] or view.tilt < _LEAST_TILT:
            return window, row, payoff
        # The largest values are elsewhere: values fall less steeply than tilted.
        view = view._replace(tilt=_FLATTER * view.tilt)

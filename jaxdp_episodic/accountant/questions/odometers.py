"""Odometers of a menu: what they hold with, and the margin that makes one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxdp_episodic.accountant.describe.menu import Menu
from jaxdp_episodic.accountant.methods.adaptive.odometer import (
    filter_epsilons,
    margin,
    odometer_delta,
)
from jaxdp_episodic.accountant.methods.adaptive.problem import Ends
from jaxdp_episodic.accountant.questions.strategies import (
    game_of,
    game_of_budgets,
    least_of_theorems,
    problems_by_theorem,
)


def odometer_ends(menu: Menu, odometer: Sequence[float]) -> Ends:
    """Certified ends of the logarithm of the delta with which an odometer holds."""
    game = game_of(menu)
    if not game.steps:
        return Ends(-math.inf, -math.inf)
    found = []
    for above, below in problems_by_theorem(game):
        each = [odometer_delta(problem, odometer) for problem in above]
        lower = [odometer_delta(p, odometer).lower for p in below]
        lower = lower or [ends.lower for ends in each]
        found.append(Ends(max(lower), max(ends.upper for ends in each)))
    return Ends(min(e.lower for e in found), min(e.upper for e in found))


def odometer_with_margin(menu: Menu, log_delta: float) -> np.ndarray:
    """The odometer "epsilon of a budget of what is spent, plus c"; 0 of nothing.

    Whatever the function is, c makes it one that holds with delta.
    """
    assert menu.prices is not None and menu.budget is not None
    game = game_of(menu)
    if not game.steps:
        return np.zeros(menu.budget + 1)
    budgets = game_of_budgets(menu, menu.budget)
    epsilons = least_of_theorems(
        budgets, lambda problem: filter_epsilons(problem, log_delta, budgets.budgets)
    )
    if not np.isfinite(epsilons).all():
        return epsilons
    # A larger budget's epsilon is no smaller; what was found may be, by rounding.
    stated = np.maximum.accumulate(epsilons)
    found = least_of_theorems(
        game, lambda problem: margin(problem, stated.tolist(), log_delta)
    )
    epsilons = stated + float(found)
    # Of nothing that was released.
    epsilons[0] = 0.0
    return epsilons

"""What a run that adapts costs in a book: the price of its worst strategy.

It is fixed before the run begins, whatever is chosen on the way, and nothing of it is
given back. The run's own profile is computed as whole, path by path; as it may be used
in one go with others, it is compared at all g >= 1 and in both orientations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.step import AnyStep
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem
from jaxdp_episodic.accountant.methods.adaptive.profile import Profile, profiles_above
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.strategies import (
    Game,
    part_of,
    problems_by_theorem,
)


def worst_of(run: AdaptiveRun, num_steps: Any) -> AnyStep | AdaptiveRun:
    """Returns the composition that its worst strategy is; else the run itself.

    Raises:
      ValueError: a run of several settings, or taken several times.
    """
    run.one_setting("price")
    if num_steps is not None:
        raise ValueError(f"num_steps must be None of an AdaptiveRun, got {num_steps!r}")
    same = run.composition()
    return run if same is None else same


def worst_mu(
    run: AdaptiveRun, floor: float, mu_of: Callable[[np.ndarray, np.ndarray], float]
) -> float:
    """Returns the mu that is proven to be enough for any strategy; inf without one.

    Args:
      run: of one setting, of which no composition is the worst strategy.
      floor: in (0, 1).
      mu_of: of points of a curve, epsilons and upper bounds of delta.
    """

    def of_path(problem: Problem) -> float:
        profiles = profiles_above(problem, floor)
        if profiles is None:
            return math.inf
        return max(mu_of(*_points(one)) for one in profiles.values())

    return _least_of_theorems(run, of_path)


def _points(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Epsilons and upper bounds of delta there, errors included."""
    epsilons = profile.step * np.arange(len(profile.values)) + profile.displaced
    deltas = np.minimum(profile.values * math.exp(profile.mass_error), 1.0)
    # Left of g = 1 the divergence is at most 1 - g more than there.
    first = min(float(deltas[0]) + profile.displaced, 1.0)
    return np.append(0.0, epsilons), np.append(first, deltas)


def _least_of_theorems(run: AdaptiveRun, of_path: Callable[[Problem], float]) -> float:
    """Each theorem holds by itself; of its paths the dearest counts."""
    game = part_of(run)
    assert isinstance(game, Game)
    return min(max(map(of_path, above)) for above, _ in problems_by_theorem(game))

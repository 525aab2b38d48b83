"""What a search over hyperparameters costs, and what each run may cost."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accounting.tuning import (
    DEFAULT_ORDERS,
    curve_to_epsilon,
    run_rdp,
    tuned_rdp,
)
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.training.budget import public_view
from jaxdp_episodic.training.run import plan
from jaxdp_episodic.training.search_space import Search

_BISECTIONS = 14
# The smallest share of the whole epsilon that is tried for a run.
_SMALLEST_SHARE = 1e-4


class SearchBudget(NamedTuple):
    """The charge of a search.

    Attributes:
      run_epsilon: of each run; nats, at the search's delta.
      epsilon: of the whole search, *upper bound*; nats.
      is_public: False if it was computed from private sizes.
    """

    run_epsilon: float
    epsilon: float
    is_public: bool


def search_budget(search: Search, base: Path | None = None) -> SearchBudget:
    """Returns what a search costs; with a target, the largest runs that it permits.

    Runs whose privacy differs (other numbers of steps, other sampling) are calibrated
    to the same epsilon. A run with hyperparameters drawn at random is a mixture of
    them, whose Rényi divergence is at most the largest of theirs at each order.

    Args:
      search: the search.
      base: folder that paths of the data are relative to.

    Raises:
      ValueError: no run however private keeps the search within its target.
    """
    data = search.config({}, 1.0).data.load("train", base)
    settings = search.settings
    if settings.run_epsilon is not None:
        total, is_public = _total(search, settings.run_epsilon, data)
        return SearchBudget(settings.run_epsilon, total, is_public)
    assert settings.epsilon is not None  # exactly one is given
    low, high = settings.epsilon * _SMALLEST_SHARE, settings.epsilon
    least, is_public = _total(search, low, data)
    if not least <= settings.epsilon:
        raise ValueError(
            f"epsilon={settings.epsilon:g} at delta={settings.delta:g} is too small "
            f"for a search with {settings.trials!r}: runs of epsilon {low:.2g} make "
            f"it {least:.4g}; expect fewer runs, or a smaller eta"
        )
    best = SearchBudget(low, least, is_public)
    for _ in range(_BISECTIONS):
        middle = float(np.sqrt(low * high))
        total, is_public = _total(search, middle, data)
        if total <= settings.epsilon:
            low, best = middle, SearchBudget(middle, total, is_public)
        else:
            high = middle
    return best


def _total(
    search: Search, run_epsilon: float, data: ExampleTable
) -> tuple[float, bool]:
    """Epsilon of the search with such runs; whether it rests on public facts."""
    curve = np.zeros(DEFAULT_ORDERS.size)
    is_public = True
    for values in search.variants():
        budget = plan(search.config(values, run_epsilon), data)
        one = run_rdp(budget.step, DEFAULT_ORDERS, num_steps=budget.num_steps)
        curve = np.maximum(curve, one)
        is_public &= public_view(budget) is not None
    settings = search.settings
    tuned = tuned_rdp(settings.trials, DEFAULT_ORDERS, curve)
    return float(curve_to_epsilon(DEFAULT_ORDERS, tuned, delta=settings.delta)), (
        is_public
    )

"""Estimates how many clip units per draw are complete, from simulated draws.

A clip unit is *complete* if it contains no null slot (under zero_out it would
contribute zero) and an episode in which every class has its support and a query. If
there are no episodes, it needs one example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import gammaincinv

# Clip units to simulate. The first number suffices if at least half of them are
# complete.
_FIRST = 200
_MOST = 4_000
_MOST_DRAWS = 4_000
_MOST_SLOTS = 2_000_000  # over all draws; about 0.3 s
_CONFIDENCE = 0.99  # of the upper bound on a Poisson mean, given its count
SEED = 0  # of the simulated draws, which are independent of a run's draws


class CompleteUnits(NamedTuple):
    """Mean numbers of clip units per draw; private, because they depend on the data."""

    complete: float  # mean number of complete clip units; *estimate*
    drawn: float  # mean number of drawn clip units; exact
    most: float  # *upper bound* on the mean number of complete ones, 99 % confidence
    is_seen: bool  # whether any simulated clip unit was complete

    @property
    def share(self) -> float:
        """Complete clip units divided by drawn ones; 0 if none is drawn."""
        return self.complete / self.drawn if self.drawn else 0.0


class Needs(NamedTuple):
    """The smallest content of a complete clip unit."""

    # Examples of each class or task: support and one query. 1 without episodes.
    examples: int = 1
    # Axes of an episode: 2 with classes, 1 for a regression task, 0 without episodes.
    axes: int = 0

    @classmethod
    def of(cls, shots: int, is_regression: bool, has_episodes: bool = True) -> Needs:
        """Returns the needs of episodes with ``shots`` support examples."""
        return cls(shots + 1, 1 if is_regression else 2) if has_episodes else cls()


def counted(
    draws: Iterable[tuple[int, int]], slot_shape: tuple[int, ...], mean: float
) -> CompleteUnits:
    """Returns means from simulated draws, each (clip units, complete clip units)."""
    # The shape of a unit limits the work; ``mean`` is the exact mean number of units.
    drawn = complete = 0
    enough = min(_MOST, max(_MOST_SLOTS // max(math.prod(slot_shape), 1), _FIRST))
    for number, (units, full) in enumerate(draws, start=1):
        drawn, complete = drawn + units, complete + full
        is_clear = drawn >= _FIRST and 2 * complete >= drawn
        if is_clear or drawn >= enough or number >= _MOST_DRAWS:
            break
    largest = float(gammaincinv(complete + 1, _CONFIDENCE))
    share, most = (min(n / max(drawn, 1), 1.0) for n in (complete, largest))
    return CompleteUnits(share * mean, mean, most * mean, complete > 0)


def complete_in_draw(
    mask: np.ndarray, holds_null: np.ndarray | None, needs: Needs, fewest: int
) -> int:
    """Returns the number of complete clip units in a draw."""
    if not len(mask):
        return 0
    number = mask.sum(axis=-1) if mask.ndim > 1 else mask.astype(np.int64)
    complete = full = number >= needs.examples
    if needs.axes > 1:
        complete = np.all(full | (number == 0), axis=-1)
        complete &= full.sum(axis=-1) >= fewest
    complete = complete.reshape(len(mask), -1).any(axis=1)
    if holds_null is not None:
        complete &= ~holds_null
    return int(np.count_nonzero(complete))

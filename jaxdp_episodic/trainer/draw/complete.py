"""How many clip units of a run's draws are complete, counted in simulated draws.

A clip unit is *complete* if it draws no null (under zero_out it would contribute zero)
and holds an episode in which every class has its support and a query; without episodes,
an example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import gammaincinv

# Clip units that are simulated. If half of the first ones are complete, these are
# enough.
_FIRST = 200
_MOST = 4_000
_MOST_DRAWS = 4_000
_MOST_SLOTS = 2_000_000  # of all draws: some 0.3 s
_CONFIDENCE = 0.99  # of the upper bound of a mean, by its Poisson count
SEED = 0  # of the simulated draws; none of a run's draws follows from it


class CompleteUnits(NamedTuple):
    """Mean numbers of drawn and complete clip units: private, from the data's sizes."""

    complete: float  # mean number; an *estimate*
    drawn: float  # mean number
    most: float  # *upper bound* of the mean number at 99 % confidence
    is_seen: bool  # whether any was complete

    @property
    def share(self) -> float:
        """Complete ones of those drawn; 0 of none."""
        return self.complete / self.drawn if self.drawn else 0.0


class Needs(NamedTuple):
    """What an episode needs."""

    # of each class, or of the task: support and a query. Without episodes 1
    examples: int = 1
    # levels of an episode: 2 of classes, 1 of a regression task, 0 without any
    axes: int = 0

    @classmethod
    def of(cls, shots: int, is_regression: bool, has_episodes: bool = True) -> Needs:
        """Returns what episodes of so many support examples need."""
        return cls(shots + 1, 1 if is_regression else 2) if has_episodes else cls()


def counted(
    draws: Iterable[tuple[int, int]], slot_shape: tuple[int, ...], mean: float
) -> CompleteUnits:
    """Counts simulated draws, each (clip units, complete ones); their mean is known."""
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
    """Returns how many clip units of a draw are complete."""
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

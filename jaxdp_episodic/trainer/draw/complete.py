"""Estimates how many clip units per draw are complete, from simulated draws.

A clip unit is *complete* if it contains no null slot (under zero_out it would
contribute zero) and an episode in which every class has its support and a query. If
there are no episodes, it needs one example.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

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


def complete_units(sampler: Any, needs: Needs) -> CompleteUnits:
    """Returns means of a sampler's draws, by simulation."""
    # The shape of a unit limits the work.
    slots = max(math.prod(sampler.slot_shape), 1)
    enough = min(_MOST, max(_MOST_SLOTS // slots, _FIRST))
    drawn = complete = 0
    draws = sampler.draws(np.random.default_rng(SEED))
    for draw in itertools.islice(draws, _MOST_DRAWS):
        drawn += len(draw.mask)
        complete += sampler.complete_in(draw, needs)
        is_clear = drawn >= _FIRST and 2 * complete >= drawn
        if is_clear or drawn >= enough:
            break
    mean = sampler.expected_units  # exact
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

"""From laws of numbers of contributions to pairs, at every setting of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.people_laws import Stage
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.losses.gaussian_mixture import GaussianMixtureLoss
from jaxdp_episodic.accountant.losses.people import PeopleLoss, ReplacedPeopleLoss
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.questions.pair_numbers import (
    ALWAYS,
    is_zeroing,
    shift_of,
)

# Most clip units of one person: laws, and the sums of a pair, have as many terms.
MOST_UNITS = 20_000
# Most numbers of units that count times the largest of them: an epsilon then takes some
# 20 s and 2 GB (93 x 360, a person in every class of the glyphs, take 2 s).
MOST_TERMS = 300_000
# Most values of a law, of 8 bytes each in some ten arrays.
_MOST_LISTED = 10_000_000


class Mixture(NamedTuple):
    """A pair's numbers at one setting; see `PeopleLoss`."""

    outer: float  # factor of both profiles
    inner: float  # chance of each of a component's contributions
    cover: float  # chance of any, where those of others hide it; else 1
    counts: np.ndarray  # of the components
    log_weights: np.ndarray  # of them, summing up to ``cover``


class Settings:
    """The different settings of a step, but for its noise, and what each comes to.

    Attributes:
      stages: levels whose fields are arrays, with a path axis.
    """

    def __init__(
        self, step: GaussianStep, stages: Sequence[Stage], *numbers: Any
    ) -> None:
        self._step, self.stages = step, tuple(stages)
        columns = [field for stage in stages for field in stage]
        columns += [column(number) for number in numbers]
        arrays = np.broadcast_arrays(np.ones(1), *columns)
        table = np.stack([array.reshape(-1) for array in arrays], axis=1)
        rows, inverse = np.unique(table, axis=0, return_inverse=True)
        self._inverse = inverse.reshape(arrays[0].shape)
        self._rows = []
        for row in rows[:, 1:].tolist():
            start = 4 * len(self.stages)
            read = tuple(Stage(*row[i : i + 4]) for i in range(0, start, 4))
            self._rows.append((read, *row[start:]))

    def each(self, function: Callable[..., float]) -> np.ndarray:
        """The number that a setting's stages, and other numbers, come to."""
        values = np.array([function(*row) for row in self._rows], np.float64)
        return values[self._inverse]

    def pair(
        self,
        theorem: Callable[..., Mixture],
        *,
        leaves: bool = False,
        visible: np.ndarray = ALWAYS,
    ) -> PrivacyLoss:
        """The pair of the mixtures of a theorem, which has them of a setting.

        ``leaves``: nothing takes a unit's place; ``visible`` is one more factor of both
        profiles.
        """
        (outer, inner, cover), counts, weights = self._spread(theorem)
        kind = PeopleLoss if is_zeroing(self._step) or leaves else ReplacedPeopleLoss
        shift, outer = shift_of(self._step, 1.0), outer * visible
        return kind(outer, inner, cover, shift, counts, weights)

    def hidden_pair(
        self, theorem: Callable[..., Mixture], visible: np.ndarray, rate: np.ndarray
    ) -> PrivacyLoss:
        """The pair of as many contributions as the counts are, none of them seen.

        Args:
          theorem: of a setting: ``cover`` is the chance of any contribution.
          visible: a factor of both profiles.
          rate: chance that there may be any.
        """
        (_, _, some), counts, weights = self._spread(theorem)
        shifts = tuple(shift_of(self._step, count) for count in counts)
        return GaussianMixtureLoss(visible, rate * some, shifts, weights)

    def _spread(self, theorem: Callable[..., Mixture]) -> tuple[Any, Any, Any]:
        """Numbers, counts and log-weights of all settings, as arrays."""
        found = [theorem(*row) for row in self._rows]
        size = max((len(mixture.counts) for mixture in found), default=1)
        most = max((mixture.counts[-1] for mixture in found), default=1.0)
        if size * most > MOST_TERMS:
            raise NotImplementedError(
                f"a person in up to {most:,.0f} clip units, in {size:,} numbers of "
                f"them that count, has more than {MOST_TERMS:,} terms to be summed; "
                "smaller bounds, or PeopleBlocks, have few"
            )
        counts = np.ones((len(found), size))
        weights = np.full((len(found), size), -np.inf)
        for row, mixture in enumerate(found):
            # What fills up equals the last one, so that shifts ascend.
            counts[row] = mixture.counts[-1]
            counts[row, : len(mixture.counts)] = mixture.counts
            weights[row, : len(mixture.counts)] = mixture.log_weights
        numbers = np.array([mixture[:3] for mixture in found]).reshape(-1, 3)
        spread = (
            tuple(one[self._inverse] for one in table.T)
            for table in (numbers, counts, weights)
        )
        return tuple(spread)  # pyright: ignore[reportReturnType]: three of them


def column(number: Any) -> np.ndarray:
    """Returns a field as floats with a path axis."""
    return np.asarray(number, np.float64)[..., None]


def refuse_many(*bounds: Any) -> None:
    """Refuses bounds whose product is more than can be summed."""
    units = 1.0
    for bound in bounds:
        units = units * np.asarray(bound, np.float64)
    if np.max(units, initial=0) > MOST_UNITS:
        raise NotImplementedError(
            f"a person in more than {MOST_UNITS:,} clip units has no sum that is short "
            f"enough to be computed; people bounds them by {np.max(units):,.0f}"
        )


def refuse_long(name: str, number: np.ndarray) -> None:
    """Refuses laws of more values than are listed."""
    most = float(np.max(number, initial=0))
    if most > _MOST_LISTED:
        raise NotImplementedError(
            f"people.{name} must be at most {_MOST_LISTED:,}, where as many can be "
            f"drawn: how many are is listed; got {most:,.0f}"
        )

"""From laws of numbers of contributions to pairs, at every setting of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.people_laws import (
    Stage,
    chance_of_any,
    log_binomial_law,
    log_unseen_groups,
    merged,
    merged_upwards,
    mixed,
)
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.losses.gaussian_mixtures import GaussianMixtureLoss
from jaxdp_episodic.accountant.losses.people import (
    PeopleLoss,
    ReplacedPeopleLoss,
    ReplacedUnitLoss,
)
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
# Products of a law of groups, which take a second; and its entries.
_MOST_PRODUCTS = 50_000_000
_MOST_CELLS = 2_000_000
# Most values of a law, of 8 bytes each in some ten arrays.
_MOST_LISTED = 10_000_000


class Mixture(NamedTuple):
    """A pair's numbers at one setting; see `PeopleLoss`."""

    outer: float  # factor of both profiles
    inner: float | np.ndarray  # chance of a component's contributions; or of each one's
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
        coin: np.ndarray | None = None,
    ) -> PrivacyLoss:
        """The pair of the mixtures of a theorem, which has them of a setting.

        ``leaves``: nothing takes a unit's place; ``visible`` is one more factor of both
        profiles, ``coin`` one of all contributions at once that is not seen.
        """
        (outer, inner, cover), counts, weights, shares = self._spread(theorem)
        kind = PeopleLoss if is_zeroing(self._step) or leaves else ReplacedPeopleLoss
        shift, outer = shift_of(self._step, 1.0), outer * visible
        parts = (outer, inner, cover, shift, counts, weights, shares)
        return kind(*parts) if coin is None else ReplacedUnitLoss(*parts, coin)

    def hidden_pair(
        self, theorem: Callable[..., Mixture], visible: np.ndarray, rate: np.ndarray
    ) -> PrivacyLoss:
        """The pair of as many contributions as the counts are, none of them seen.

        Args:
          theorem: of a setting: ``cover`` is the chance of any contribution.
          visible: a factor of both profiles.
          rate: chance that there may be any.
        """
        (_, _, some), counts, weights, _ = self._spread(theorem)
        shifts = tuple(shift_of(self._step, count) for count in counts)
        return GaussianMixtureLoss(visible, rate * some, shifts, weights)

    def _spread(self, theorem: Callable[..., Mixture]) -> tuple[Any, Any, Any, Any]:
        """Numbers, counts, log-weights and shares of all settings, as arrays."""
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
        shares, numbers = np.ones((len(found), size)), np.ones((len(found), 3))
        for row, mixture in enumerate(found):
            inner = np.max(mixture.inner)
            numbers[row] = mixture.outer, inner, mixture.cover
            # What fills up equals the last one, so that shifts ascend.
            counts[row] = mixture.counts[-1]
            counts[row, : len(mixture.counts)] = mixture.counts
            weights[row, : len(mixture.counts)] = mixture.log_weights
            if inner > 0:
                shares[row, : len(mixture.counts)] = mixture.inner / inner
        spread = (
            tuple(one[self._inverse] for one in table.T)
            for table in (numbers, counts, weights, shares)
        )
        return tuple(spread)  # pyright: ignore[reportReturnType]: four of them


def theorem_a(
    units: np.ndarray, masses: np.ndarray, rate: float, chance: float
) -> Mixture:
    """Coins: n, those that are not seen without her, each hold her or are not drawn.

    Args:
      units: numbers of units that can hold her, one of which is visible.
      masses: their log-masses.
      rate: of the coins.
      chance: that a drawn one holds her.
    """
    share = 1 - rate + rate * chance
    laws = [log_binomial_law(number, share) for number in units]
    inner = rate * chance / share if share > 0 else 0.0
    return Mixture(1.0, inner, 1.0, *merged(mixed(laws, masses)))


def theorem_a_of_groups(
    classes: float, ways: float, bound: float, chance: float, rate: float
) -> Mixture:
    """The same of groups by coins, averaged over partitions; left-over classes sit out.

    Components are how many of her groups are not seen without her, and how many of her
    classes these hold: spread evenly, and each group's chance their mean, they are
    drawn the most often (docs/proofs.md, "Classes in groups"). Where there are too many
    to be listed all her groups are as full as they can be.

    Args:
      classes: all of them.
      ways: classes in a group.
      bound: classes that can hold her.
      chance: that a class of hers that takes part shows her.
      rate: of the coins.
    """
    groups, fullest = classes // ways, min(ways, bound)
    most = min(bound, groups) + 1
    products = most * (fullest + 1) * (bound + 1)
    cells = max(most, fullest + 1) * (bound + 1)
    exact = bound >= classes or ways == 1
    if exact or products > _MOST_PRODUCTS or cells > _MOST_CELLS:
        held = chance_of_any(fullest, chance)
        return theorem_a(np.array([min(bound, groups)]), np.zeros(1), rate, held)
    table = log_unseen_groups(classes, ways, bound, chance, rate)
    number, held = np.nonzero(table > -np.inf)
    # -log of the chance that a group with so many of her classes is not drawn, given
    # that it is not seen without her.
    odds = rate / (1 - rate) if rate < 1 else np.inf
    shown = chance_of_any(np.arange(1.0, fullest + 2), chance)
    missed = np.append(0.0, np.log1p(np.where(shown > 0, odds, 0.0) * shown))
    each, more = np.divmod(held, np.maximum(number, 1))
    log_none = (number - more) * missed[each]
    log_none += more * np.where(more > 0, missed[each + (more > 0)], 0.0)
    count, none, weight = merged_upwards(number, log_none, table[number, held])
    inner = -np.expm1(-none / np.maximum(count, 1))
    return Mixture(1.0, inner, 1.0, count, weight)


def covered(law: np.ndarray, worst: np.ndarray, inner: float = 1.0) -> Mixture:
    """Theorems 1 and 2: components are how many units hold her, or would.

    Args:
      law: of that number.
      worst: the largest of the laws of which ``law`` is a mean: cover may be taken for
        less than it is.
      inner: chance that a unit that would hold her is drawn.
    """
    counts, masses = merged(law)
    some = counts > 0
    reached = float(np.exp(masses[some]).sum())
    cover = min(max(float(np.exp(worst[1:]).sum()), reached), 1.0)
    if not reached > 0:
        return Mixture(0.0, inner, 1.0, np.ones(1), np.zeros(1))
    weights = masses[some] + np.log(cover / reached)
    return Mixture(min(reached / cover, 1.0), inner, cover, counts[some], weights)


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

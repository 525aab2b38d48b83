"""Pairs of one clipped contribution, and of several that hold the protected unit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic.accountant.describe import people_laws as laws
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import GroupedClasses
from jaxdp_episodic.accountant.describe.people import BOUNDS, levels_of_people
from jaxdp_episodic.accountant.describe.people_laws import (
    Stage,
    chance_of_holding,
    log_binomial_law,
    log_drawn,
    log_visible,
    merged,
    mixed,
)
from jaxdp_episodic.accountant.describe.rates import (
    max_contributions,
    most_children_drawn,
)
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    Scheme,
)
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep
from jaxdp_episodic.accountant.losses import people
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    GaussianMixtureLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss

Pairs = tuple[PrivacyLoss, ...]

# A rate of 1, on its path axis.
ALWAYS = np.ones(1)
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
# Most parts of a mixture of Gaussians whose sum is taken at once: 60 take 2 s.
_MOST_HIDDEN = 64
# Coins up to which Theorem A is taken without a look at Theorem 2, whose epsilon was
# larger in all of 320 settings below 0.44; at 0.5 it was smaller in one, by 8 per cent.
_RARE = 0.2


def column(number: Any) -> np.ndarray:
    """Returns a field as floats with a path axis."""
    return np.asarray(number, np.float64)[..., None]


def shift_of(noise: Any, sensitivity: np.ndarray | float) -> np.ndarray:
    """Returns how far a unit changes the sum, in deviations of the noise."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.divide(sensitivity, column(noise))


def product(rates: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the product of rates, 1 of none; with a path axis."""
    return functools.reduce(np.multiply, rates, ALWAYS)


# --- One clipped contribution at most holds the unit: "Profiles" ---


def one_contribution(
    step: GaussianStep,
    coin: np.ndarray | None,
    inner: np.ndarray = ALWAYS,
    *,
    outer: np.ndarray = ALWAYS,
    is_unit: bool = False,
    norms: np.ndarray | float = 1.0,
) -> PrivacyLoss:
    """The rows of the multistage theorem."""
    relation, drawn = step.neighboring_relation, coin is not None
    rate = inner if coin is None else coin
    shift = shift_of(step.noise_multiplier, norms)
    twice = shift_of(step.noise_multiplier, 2.0 * norms)
    match relation, drawn, is_unit:
        case "zero_out", False, _:
            # If the unit is not drawn another contribution takes its place: not the
            # sampled pair, even where the unit itself is clipped.
            return ZeroedGaussianLoss(outer, ALWAYS, inner, shift)
        case "zero_out", True, False:
            return ZeroedGaussianLoss(outer, rate, inner, shift)
        case "zero_out" | "add_remove", True, True:
            return SampledGaussianLoss(outer, rate, shift)
        case _, True, _:
            return AntipodalGaussianLoss(outer, rate, inner, shift)
        case "add_remove", False, True:
            # If all children are drawn there is no other to be swapped for: C, not 2C.
            level = step.path_rates.num_levels
            everyone = step.path_rates.covers_all(level, relation)
            return SampledGaussianLoss(outer, rate, np.where(everyone, shift, twice))
    return SwappedGaussianLoss(outer, inner, twice)


# --- Several contributions may hold the unit ("People"): laws ---


class Mixture(NamedTuple):
    """The numbers of a pair of mixtures at one setting; see `PeopleLoss`."""

    outer: float  # factor of both profiles
    inner: float | np.ndarray  # chance of a component's contributions; or of each one's
    cover: float  # chance of any, where those of others hide it; else 1
    counts: np.ndarray  # of the components
    log_weights: np.ndarray  # of them, summing up to ``cover``


class Mixtures(NamedTuple):
    """`Mixture` of all settings: arrays with a path axis, or a tuple of them."""

    outer: np.ndarray
    inner: np.ndarray
    cover: np.ndarray
    counts: tuple[np.ndarray, ...]
    log_weights: tuple[np.ndarray, ...]
    shares: tuple[np.ndarray, ...]  # of ``inner``, which is the largest


class Settings:
    """The different settings of levels and other numbers, and what each comes to."""

    def __init__(self, stages: Sequence[Stage], *numbers: Any) -> None:
        self.stages = tuple(stages)
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

    def mixtures(self, theorem: Callable[..., Mixture]) -> Mixtures:
        """The mixtures that a theorem has of the settings, as arrays."""
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
        each: list[Any] = [one[self._inverse] for one in numbers.T]
        lists: list[Any] = [
            tuple(one[self._inverse] for one in table.T)
            for table in (counts, weights, shares)
        ]
        return Mixtures(*each, *lists)


def theorem_a(
    units: np.ndarray, masses: np.ndarray, rate: float, chance: float
) -> Mixture:
    """Coins: n, those that are not seen without her, each hold her or are not drawn."""
    share = 1 - rate + rate * chance
    laws = [log_binomial_law(number, share) for number in units]
    inner = rate * chance / share if share > 0 else 0.0
    return Mixture(1.0, inner, 1.0, *merged(mixed(laws, masses)))


def theorem_a_of_groups(
    classes: float, ways: float, bound: float, chance: float, rate: float
) -> Mixture:
    """The same for Poisson-sampled groups, averaged over partitions."""
    groups, fullest = classes // ways, min(ways, bound)
    most = min(bound, groups) + 1
    products = most * (fullest + 1) * (bound + 1)
    cells = max(most, fullest + 1) * (bound + 1)
    exact = bound >= classes or ways == 1
    if exact or products > _MOST_PRODUCTS or cells > _MOST_CELLS:
        held = laws.chance_of_any(fullest, chance)
        return theorem_a(np.array([min(bound, groups)]), np.zeros(1), rate, held)
    table = laws.log_unseen_groups(classes, ways, bound, chance, rate)
    number, held = np.nonzero(table > -np.inf)
    # -log of the chance that a group with so many of her classes is not drawn, given
    # that it is not seen without her.
    odds = rate / (1 - rate) if rate < 1 else np.inf
    shown = laws.chance_of_any(np.arange(1.0, fullest + 2), chance)
    missed = np.append(0.0, np.log1p(np.where(shown > 0, odds, 0.0) * shown))
    each, more = np.divmod(held, np.maximum(number, 1))
    log_none = (number - more) * missed[each]
    log_none += more * np.where(more > 0, missed[each + (more > 0)], 0.0)
    count, none, weight = laws.merged_upwards(number, log_none, table[number, held])
    inner = -np.expm1(-none / np.maximum(count, 1))
    return Mixture(1.0, inner, 1.0, count, weight)


def covered(law: np.ndarray, worst: np.ndarray, inner: float = 1.0) -> Mixture:
    """Theorems 1 and 2: components are how many units hold her, or would."""
    counts, masses = merged(law)
    some = counts > 0
    reached = float(np.exp(masses[some]).sum())
    cover = min(max(float(np.exp(worst[1:]).sum()), reached), 1.0)
    if not reached > 0:
        return Mixture(0.0, inner, 1.0, np.ones(1), np.zeros(1))
    weights = masses[some] + np.log(cover / reached)
    return Mixture(min(reached / cover, 1.0), inner, cover, counts[some], weights)


def hidden(numbers: np.ndarray, masses: np.ndarray) -> Mixture:
    """Theorem M: ``cover`` is the chance of any contribution, none of which is seen."""
    some = numbers > 0
    chance = float(np.exp(masses[some]).sum())
    if not chance > 0:
        return Mixture(1.0, 1.0, 0.0, np.ones(1), np.zeros(1))
    shares = masses[some] - np.log(chance)
    return Mixture(1.0, 1.0, min(chance, 1.0), numbers[some], shares)


def drawn_of(law: np.ndarray, size: float, units: float) -> np.ndarray:
    """The law of how many of a random number of units are drawn, of all units."""
    numbers, masses = merged(law)
    drawn = [log_drawn(Stage(number, 0.0, size, units)) for number in numbers]
    return mixed(drawn, masses)


def person_stages(step: GaussianStep) -> tuple[Stage, ...]:
    """The levels of which a person has bounds, top to bottom, worst of all paths."""
    if step.people is None:
        return ()
    rates, stages = step.path_rates, []
    schemes = levels_of_people(step.design)
    for up, (name, scheme) in enumerate(zip(BOUNDS, schemes, strict=False), start=1):
        if scheme is None:
            continue
        bound, zero = column(step.people.numbers[name]), np.zeros(1)
        draw, group = rates.draw_sizes[-up], rates.group_sizes[-up]
        _refuse_long(name, bound if draw is None else np.minimum(bound, draw))
        if draw is not None and group is not None:
            # Where fewer are stated than are drawn, others may have as many or more,
            # and all that are drawn may be hers.
            fewest = np.maximum(np.min(group, axis=-1, keepdims=True), draw)
            stages.append(Stage(bound, zero, draw, fewest))
            continue
        if scheme.population is not None:
            # That of coins is a public bound of anybody's.
            bound = np.minimum(bound, column(scheme.population))
        rate = np.max(rates.rates[-up], axis=-1, keepdims=True)
        stages.append(Stage(bound, rate, zero, zero))
    return tuple(reversed(stages))


def stages_below(
    step: GaussianStep, sampling: MultistageSampling, unit: int, clip: int
) -> list[Stage]:
    """The levels below a unit; of draws without replacement all that are drawn."""
    stages, zero = [], np.zeros(1)
    for level in range(unit, clip):
        scheme = sampling.levels[level]
        children = most_children_drawn(
            sampling, step.population, level, step.neighboring_relation
        )
        coins = isinstance(scheme, Poisson)
        rate = column(scheme.sampling_probability) if coins else ALWAYS
        stages.append(Stage(column(children), rate, zero, zero))
    return stages


def refuse_many(*bounds: Any) -> None:
    """Refuses bounds whose product is more than can be summed."""
    units = product([np.asarray(bound, np.float64) for bound in bounds])
    if np.max(units, initial=0) > MOST_UNITS:
        raise NotImplementedError(
            f"a person in more than {MOST_UNITS:,} clip units has no sum that is short "
            f"enough to be computed; people bounds them by {np.max(units):,.0f}"
        )


def _refuse_long(name: str, number: np.ndarray) -> None:
    """Refuses laws of more values than are listed."""
    most = float(np.max(number, initial=0))
    if most > _MOST_LISTED:
        raise NotImplementedError(
            f"people.{name} must be at most {_MOST_LISTED:,}, where as many can be "
            f"drawn: how many are is listed; got {most:,.0f}"
        )


# --- Several contributions may hold the unit: "People" ---


def mixture_pair(
    step: GaussianStep,
    settings: Settings,
    theorem: Any,
    *,
    leaves: bool = False,
    visible: np.ndarray = ALWAYS,
    coin: np.ndarray | None = None,
) -> PrivacyLoss:
    """The pair of what a theorem says of each setting."""
    outer, inner, cover, *lists = settings.mixtures(theorem)
    shift = shift_of(step.noise_multiplier, 1.0)
    parts: Any = (outer * visible, inner, cover, shift, *lists)
    if coin is not None:
        seen: Any = (*parts, coin)
        return people.ReplacedUnitLoss(*seen)
    if leaves or step.neighboring_relation == "zero_out":
        return people.PeopleLoss(*parts)
    return people.ReplacedPeopleLoss(*parts)


def _hidden_pair(
    step: GaussianStep,
    settings: Settings,
    theorem: Any,
    visible: np.ndarray = ALWAYS,
    rate: np.ndarray = ALWAYS,
) -> PrivacyLoss:
    """The pair of contributions none of which is seen: ``rate`` is that of any."""
    found = settings.mixtures(theorem)
    shifts = tuple(shift_of(step.noise_multiplier, count) for count in found.counts)
    return GaussianMixtureLoss(visible, rate * found.cover, shifts, found.log_weights)


def _by_coins(
    step: GaussianStep,
    settings: Settings,
    hiding_contents: Any,
    hiding_units: Any,
    only_a: ArrayLike,
) -> Pairs:
    """Theorem A, and 2 unless A is known to be the smaller one at every setting."""
    pair = mixture_pair(step, settings, hiding_contents)
    if np.all(only_a):
        return (pair,)
    return pair, mixture_pair(step, settings, hiding_units)


def contributions(step: GaussianStep, sampling: MultistageSampling) -> Pairs:
    """Pairs of a unit above what is clipped, under one path."""
    *above, rate = step.path_rates.rates
    outer, unit = product(above), len(above) + 1
    relation = step.neighboring_relation
    clip = sampling.level_names.index(str(step.clip_unit)) + 1
    most = max_contributions(
        sampling,
        step.population,
        unit_level=unit,
        clip_level=clip,
        neighboring_relation=relation,
    )
    below = stages_below(step, sampling, unit, clip)
    has_coin = isinstance(sampling.levels[unit - 1], Poisson)
    # As if every contribution were drawn whenever the unit is.
    drawn = (rate, ALWAYS) if has_coin else (None, rate)
    certain = one_contribution(
        step, *drawn, outer=outer, is_unit=True, norms=column(most)
    )
    reacts = not has_coin and relation == "add_remove"
    many = math.prod(float(np.max(stage.bound, initial=1)) for stage in below)
    is_certain = all(np.all(stage.rate == 1) for stage in below)
    if reacts or is_certain or many > MOST_UNITS:
        return (certain,)
    settings = Settings(below, most)

    def all_hidden(stages: Any, most: float) -> Mixture:
        counts, masses = log_visible(stages)
        return hidden(np.minimum(counts, most), masses)

    def last_hidden(stages: Any, _: float) -> Mixture:
        counts, masses = log_visible(stages[:-1])
        return Mixture(1.0, stages[-1].rate, 1.0, counts * stages[-1].bound, masses)

    if not has_coin:
        return certain, mixture_pair(step, settings, last_hidden, visible=outer * rate)
    if relation == "replace_one":
        # The unit's own coin is hidden too, as the others' do not look at it.
        pair = mixture_pair(step, settings, last_hidden, visible=outer, coin=rate)
        return certain, pair
    return (_hidden_pair(step, settings, all_hidden, outer, rate),)


def tree_of_person(step: GaussianStep, sampling: MultistageSampling) -> Pairs:
    """Clip units of a tree: levels above them are visible."""
    stages = person_stages(step)
    if step.clip_unit == STEP:
        # The whole step is one contribution, which holds her or not.
        chance = Settings(stages).each(chance_of_holding)
        return (one_contribution(step, None, chance),)
    clip = sampling.level_names.index(str(step.clip_unit))
    coins = isinstance(sampling.levels[clip], Poisson)
    leaves = step.neighboring_relation == "add_remove"
    if leaves and not coins and len(sampling.levels) == 1:
        # docs/proofs.md, "A sample of fixed size, from which a person is gone".
        def exchanged(stages: Any) -> Mixture:
            found = hidden(*merged(log_drawn(stages[0])))
            if not found.cover > 0:
                return found
            # One of hers is there, and one of others is not.
            return found._replace(counts=2 * found.counts)

        settings = Settings(stages)
        parts = settings.each(lambda stages: len(exchanged(stages).counts))
        if np.max(parts, initial=0) <= _MOST_HIDDEN:
            return (_hidden_pair(step, settings, exchanged),)
    is_last = coins and clip == len(sampling.levels) - 1
    return _clip_units(step, stages, clip, coins, is_last=is_last)


def blocks_of_people(step: GaussianStep, design: PeopleBlocks) -> Pairs:
    """Episodes of blocks of people: hers alone can hold her."""
    rate, size = _drawn_by(design.episodes)
    coins = isinstance(design.episodes, Poisson)
    units, number = design.num_possible_episodes, design.episodes_per_block
    if np.all(np.equal(number, 1)):
        chance = chance_of_episode(step)
        share = column(np.minimum(size, units) / units)
        drawn = (column(rate), chance) if coins else (None, share * chance)
        return (one_contribution(step, *drawn),)
    episodes = Stage(*map(column, (number, rate, size, units)))
    return _clip_units(step, (episodes, *person_stages(step)), 0, coins)


def _clip_units(
    step: GaussianStep,
    stages: Sequence[Stage],
    clip: int,
    coins: bool,
    *,
    is_last: bool = False,
) -> Pairs:
    """Units at a level, of which all below may hold her, and all above are visible."""
    refuse_many(*(stage.bound for stage in stages[: clip + 1]))
    settings, unit = Settings(stages), stages[clip]

    def chance(stages: Any) -> float:
        return chance_of_holding(stages[clip + 1 :])

    def hiding_contents(stages: Any) -> Mixture:
        counts, masses = log_visible(stages[:clip])
        unit, held = stages[clip], chance(stages)
        return theorem_a(counts * unit.bound, masses, unit.rate, held)

    def hiding_units(stages: Any) -> Mixture:
        counts, masses = log_visible(stages[:clip])
        unit, held = stages[clip], chance(stages)
        each = [log_binomial_law(n * unit.bound, held) for n in counts]
        return covered(mixed(each, masses), each[-1], unit.rate)

    def revealing_units(stages: Any) -> Mixture:
        counts, masses = log_visible(stages[:clip])
        held = laws.log_held(log_drawn(stages[clip]), chance(stages))
        each = laws.sums_of(held, counts)
        return covered(mixed(each, masses), each[-1])

    if is_last:  # Theorem M
        # Nobody reacts: what is not drawn is not there, nor is what has left.
        leaves = step.neighboring_relation == "add_remove"
        return (mixture_pair(step, settings, hiding_contents, leaves=leaves),)
    if not coins:  # Theorem 1
        return (mixture_pair(step, settings, revealing_units),)
    only_a = (settings.each(chance) == 1) | _are_rare(unit.rate, unit.bound)
    return _by_coins(step, settings, hiding_contents, hiding_units, only_a)


def groups_of_person(step: GaussianStep, design: GroupedClasses) -> Pairs:
    """Classes put into episodes at random, afresh in every step."""
    assert step.people is not None and design.episodes is not None  # checked
    bound = step.people.numbers["classes"]
    refuse_many(np.minimum(bound, design.num_possible_episodes))
    rate, size = _drawn_by(design.episodes)
    given = (design.num_classes, design.ways, bound, rate, size)
    settings = Settings(person_stages(step), *given)

    def held(stages: Any, classes: float, ways: float, bound: float) -> Any:
        """The laws of how many episodes would hold her: on average, and at worst."""
        chance = chance_of_holding(stages)
        worst = laws.log_reached_worst(classes // ways, ways, bound, chance)
        if classes > laws.MOST_AVERAGED:
            return worst, worst
        return laws.log_reached_mean(classes, ways, bound, chance), worst

    def hiding_contents(stages: Any, *of: Any) -> Mixture:
        classes, ways, bound, rate, _ = of
        chance = chance_of_holding(stages)
        return theorem_a_of_groups(classes, ways, bound, chance, rate)

    def hiding_units(stages: Any, *of: Any) -> Mixture:
        mean, worst = held(stages, *of[:3])
        return covered(mean, worst, inner=of[3])

    def revealing_units(stages: Any, *of: Any) -> Mixture:
        mean, worst = held(stages, *of[:3])
        mean, worst = (drawn_of(law, of[4], of[0] // of[1]) for law in (mean, worst))
        return covered(mean, worst)

    if not isinstance(design.episodes, Poisson):  # Theorem 1
        return (mixture_pair(step, settings, revealing_units),)
    # Of a person in every class units are as many, and as likely, as they seem.
    everywhere = bound == design.num_classes
    only_a = _are_rare(rate, np.where(everywhere, design.num_possible_episodes, 0))
    return _by_coins(step, settings, hiding_contents, hiding_units, only_a)


def chance_of_episode(step: GaussianStep) -> np.ndarray:
    """The chance that what is drawn from all, as a whole, holds the person."""
    return Settings(person_stages(step)).each(chance_of_holding)


def _are_rare(rate: Any, units: Any) -> np.ndarray:
    """Where Theorem A is less than Theorem 2 of several units by coins: see `_RARE`."""
    return np.less_equal(rate, _RARE) & np.greater(units, 1)


def _drawn_by(scheme: Scheme) -> tuple[Any, Any]:
    """Rate of coins, or size of a sample: what is not there is 0."""
    rate = getattr(scheme, "sampling_probability", 0.0)
    return rate, getattr(scheme, "size", 0.0)

"""Dominating pairs of a person who may be in several clip units of a step.

Several theorems may hold of one design, none of them the best at all settings; each
makes a pair of its own, and the least answer of a whole run is taken at the end
(docs/theory.md, "People"). In its terms: m units by coins are Theorems A and 2, units
without replacement Theorem 1, examples that are clipped one by one Theorem M, and what
is in one unit at most has the rows of the multistage theorem.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import GroupedClasses
from jaxdp_episodic.accountant.describe.people import BOUNDS, levels_of_people
from jaxdp_episodic.accountant.describe.people_laws import (
    MOST_AVERAGED,
    Stage,
    chance_of_any,
    chance_of_holding,
    log_binomial_law,
    log_drawn,
    log_held,
    log_reached_mean,
    log_reached_worst,
    log_visible,
    merged,
    mixed,
    sums_of,
)
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.questions.mixture_tables import (
    Mixture,
    Settings,
    column,
    covered,
    refuse_long,
    refuse_many,
    theorem_a,
    theorem_a_of_groups,
)
from jaxdp_episodic.accountant.questions.pair_numbers import (
    ALWAYS,
    is_zeroing,
    shift_of,
)

# Coins up to which Theorem A is taken without a look at Theorem 2, whose epsilon was
# larger in all of 320 settings below 0.44; at 0.5 it was smaller in one, by 8 per cent.
_RARE = 0.2


# Most parts of a mixture of Gaussians whose sum is taken at once: 60 take 2 s.
_MOST_HIDDEN = 64


def in_one_place(step: GaussianStep) -> GaussianStep:
    """Returns a step whose people have one example each as one of examples."""
    people, names = step.people, step.design.level_names
    if people is None or isinstance(step.design, PeopleBlocks):
        return step
    if any(np.any(np.greater(bound, 1)) for bound in people.numbers.values()):
        return step
    return dataclasses.replace(step, privacy_unit=names[-1], people=None)


def people_pairs(step: GaussianStep) -> tuple[PrivacyLoss, ...]:
    """Returns pairs of a person, each of which dominates one step.

    Of designs that draw anew in every step, but for independent episodes.

    Raises:
      NotImplementedError: more clip units of one person than a sum can have terms.
    """
    if isinstance(step.design, GroupedClasses):
        return _grouped_classes(step, step.design)
    if isinstance(step.design, PeopleBlocks):
        return _people_blocks(step, step.design)
    assert isinstance(step.design, MultistageSampling)
    return _tree(step, step.design)


def chance_of_episode(step: GaussianStep) -> np.ndarray:
    """Returns the chance that what is drawn from all, as a whole, holds the person."""
    return Settings(step, _stages(step)).each(chance_of_holding)


def units_of_epoch(step: GaussianStep) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many units of an epoch can hold the person, and with what chance.

    Of a partition that is kept for an epoch the worst: as many episodes, and as many of
    her classes in each, as there can be.
    """
    design, people = step.design, step.people
    if isinstance(design, PeopleBlocks):
        return column(design.episodes_per_block), chance_of_episode(step)
    assert people is not None  # checked
    if not isinstance(design, GroupedClasses):
        settings = Settings(step, _stages(step))
        number = column(people.numbers[BOUNDS[len(settings.stages) - 1]])
        return number, settings.each(lambda stages: chance_of_holding(stages[1:]))
    bound = people.numbers["classes"]
    settings = Settings(step, _stages(step), design.ways, bound)
    number = np.minimum(bound, design.num_possible_episodes)
    return column(number), settings.each(
        lambda stages, ways, bound: chance_of_any(
            min(ways, bound), chance_of_holding(stages)
        )
    )


def _tree(step: GaussianStep, sampling: MultistageSampling) -> tuple[PrivacyLoss, ...]:
    """Clip units of a tree: levels above them are visible."""
    if step.clip_unit == STEP:
        # The whole step is one contribution, which holds her or not.
        return (_one_unit(step, None, chance_of_episode(step)),)
    clip = sampling.level_names.index(str(step.clip_unit))
    settings = Settings(step, _stages(step))
    refuse_many(*(stage.bound for stage in settings.stages[: clip + 1]))

    def hiding_contents(stages: tuple[Stage, ...]) -> Mixture:
        numbers, masses = log_visible(stages[:clip])
        unit, chance = stages[clip], chance_of_holding(stages[clip + 1 :])
        return theorem_a(numbers * unit.bound, masses, unit.rate, chance)

    def hiding_units(stages: tuple[Stage, ...]) -> Mixture:
        numbers, masses = log_visible(stages[:clip])
        unit, chance = stages[clip], chance_of_holding(stages[clip + 1 :])
        laws = [log_binomial_law(n * unit.bound, chance) for n in numbers]
        return covered(mixed(laws, masses), laws[-1], unit.rate)

    def revealing_units(stages: tuple[Stage, ...]) -> Mixture:
        numbers, masses = log_visible(stages[:clip])
        chance = chance_of_holding(stages[clip + 1 :])
        laws = sums_of(log_held(log_drawn(stages[clip]), chance), numbers)
        return covered(mixed(laws, masses), laws[-1])

    leaves = step.neighboring_relation == "add_remove"
    if not isinstance(sampling.levels[clip], Poisson):
        alone = leaves and len(sampling.levels) == 1
        return (
            (alone and _sampled_examples(settings)) or settings.pair(revealing_units),
        )
    if clip == len(sampling.levels) - 1:
        # Nobody reacts: what is not drawn is not there, nor is what has left.
        return (settings.pair(hiding_contents, leaves=leaves),)
    unit = settings.stages[clip]
    always = settings.each(lambda stages: chance_of_holding(stages[clip + 1 :])) == 1
    if np.all(always | _are_rare(unit.rate, unit.bound)):
        return (settings.pair(hiding_contents),)
    return settings.pair(hiding_contents), settings.pair(hiding_units)


def _sampled_examples(settings: Settings) -> PrivacyLoss | None:
    """A sample of a fixed size, hers replaced by others where she is not there.

    See docs/proofs.md, "A sample of fixed size, from which a person is gone". None
    where the mixture has too many parts.
    """

    def exchanged(stages: tuple[Stage, ...]) -> Mixture:
        counts, masses = merged(log_drawn(stages[0]))
        some = counts > 0
        chance = min(float(np.exp(masses[some]).sum()), 1.0)
        if not chance > 0:
            return Mixture(1.0, 1.0, 0.0, np.ones(1), np.zeros(1))
        # One of hers is there, and one of others is not.
        return Mixture(
            1.0, 1.0, chance, 2 * counts[some], masses[some] - np.log(chance)
        )

    parts = settings.each(lambda stages: len(exchanged(stages).counts))
    if np.max(parts, initial=0) > _MOST_HIDDEN:
        return None
    return settings.hidden_pair(exchanged, ALWAYS, ALWAYS)


def _grouped_classes(
    step: GaussianStep, design: GroupedClasses
) -> tuple[PrivacyLoss, ...]:
    """Classes put into episodes at random, afresh in every step."""
    assert step.people is not None and design.episodes is not None  # checked
    bound = step.people.numbers["classes"]
    refuse_many(np.minimum(bound, design.num_possible_episodes))
    settings = Settings(
        step,
        _stages(step),
        design.num_classes,
        design.ways,
        bound,
        *_drawn_by(design.episodes),
    )

    def laws(
        chance: float, classes: float, ways: float, bound: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of how many episodes would hold her: on average, and at worst."""
        worst = log_reached_worst(classes // ways, ways, bound, chance)
        if classes > MOST_AVERAGED:
            return worst, worst
        return log_reached_mean(classes, ways, bound, chance), worst

    def hiding_contents(
        stages: Any, classes: float, ways: float, bound: float, rate: float, _: float
    ) -> Mixture:
        return theorem_a_of_groups(
            classes, ways, bound, chance_of_holding(stages), rate
        )

    def hiding_units(
        stages: Any, classes: float, ways: float, bound: float, rate: float, _: float
    ) -> Mixture:
        chance = chance_of_holding(stages)
        return covered(*laws(chance, classes, ways, bound), inner=rate)

    def revealing_units(
        stages: Any, classes: float, ways: float, bound: float, _: float, size: float
    ) -> Mixture:
        chance = chance_of_holding(stages)
        mean, worst = (
            _drawn_of(law, size, classes // ways)
            for law in laws(chance, classes, ways, bound)
        )
        return covered(mean, worst)

    if not isinstance(design.episodes, Poisson):
        return (settings.pair(revealing_units),)
    rare = _are_rare(
        design.episodes.sampling_probability,
        # Of a person in every class units are as many, and as likely, as they seem.
        np.where(bound == design.num_classes, design.num_possible_episodes, 0),
    )
    if np.all(rare):
        return (settings.pair(hiding_contents),)
    return settings.pair(hiding_contents), settings.pair(hiding_units)


def _people_blocks(step: GaussianStep, design: PeopleBlocks) -> tuple[PrivacyLoss, ...]:
    """Episodes of blocks of people: hers alone can hold her."""
    rate, size = _drawn_by(design.episodes)
    units, number = design.num_possible_episodes, design.episodes_per_block
    chance = chance_of_episode(step)
    if np.all(np.equal(number, 1)):
        if isinstance(design.episodes, Poisson):
            return (_one_unit(step, column(rate), chance),)
        share = column(np.minimum(size, units) / units)
        return (_one_unit(step, None, share * chance),)
    refuse_many(number)
    settings = Settings(step, _stages(step), number, units, rate, size)

    def hiding_units(
        stages: Any, number: float, _: float, rate: float, __: float
    ) -> Mixture:
        law = log_binomial_law(number, chance_of_holding(stages))
        return covered(law, law, rate)

    def revealing_units(
        stages: Any, number: float, units: float, _: float, size: float
    ) -> Mixture:
        drawn = log_drawn(Stage(number, 0.0, size, units))
        law = log_held(drawn, chance_of_holding(stages))
        return covered(law, law)

    if not isinstance(design.episodes, Poisson):
        return (settings.pair(revealing_units),)
    pair = coins_pair(step, column(number), column(rate), chance)
    if np.all((chance == 1) | _are_rare(column(rate), column(number))):
        return (pair,)
    return pair, settings.pair(hiding_units)


def coins_pair(
    step: GaussianStep,
    number: np.ndarray,
    rate: np.ndarray,
    chance: np.ndarray,
    *,
    leaves: bool = False,
) -> PrivacyLoss:
    """Returns the pair of units by coins, each of which holds the person by itself.

    Args:
      step: of which the noise and the relation are.
      number: of the units that can hold her; arrays have a path axis.
      rate: of the coins.
      chance: that a drawn one holds her.
      leaves: where it leaves no other contribution in its place.
    """
    refuse_many(number)
    settings = Settings(step, (), *(a[..., 0] for a in (number, rate, chance)))

    def hiding_contents(_: Any, number: float, rate: float, chance: float) -> Mixture:
        return theorem_a(np.array([number]), np.zeros(1), rate, chance)

    return settings.pair(hiding_contents, leaves=leaves)


def _are_rare(rate: Any, units: Any) -> np.ndarray:
    """Where Theorem A is less than Theorem 2 of several units by coins: see `_RARE`."""
    return np.less_equal(rate, _RARE) & np.greater(units, 1)


def _one_unit(
    step: GaussianStep, rate: np.ndarray | None, chance: np.ndarray
) -> PrivacyLoss:
    """One unit at most holds her: drawn by a coin, or seen to be there."""
    always = ALWAYS if rate is None else rate
    if is_zeroing(step):
        return ZeroedGaussianLoss(ALWAYS, always, chance, shift_of(step, 1.0))
    if rate is None:
        return SwappedGaussianLoss(ALWAYS, chance, shift_of(step, 2.0))
    return AntipodalGaussianLoss(ALWAYS, rate, chance, shift_of(step, 1.0))


def _drawn_of(law: np.ndarray, size: float, units: float) -> np.ndarray:
    """The law of how many of a random number of units are drawn, of all units."""
    numbers, masses = merged(law)
    drawn = [log_drawn(Stage(number, 0.0, size, units)) for number in numbers]
    return mixed(drawn, masses)


def _drawn_by(scheme: Scheme) -> tuple[Any, Any]:
    """Rate of coins, or size of a sample: what is not there is 0."""
    if isinstance(scheme, WithoutReplacement):
        return 0.0, scheme.size
    assert isinstance(scheme, Poisson)
    return scheme.sampling_probability, 0.0


def _stages(step: GaussianStep) -> tuple[Stage, ...]:
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
        refuse_long(name, bound if draw is None else np.minimum(bound, draw))
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

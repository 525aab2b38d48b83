"""Pairs of a unit of which several contributions are clipped, each by itself.

The unit lies above what is clipped, under one path: how many of its contributions a
step draws is a random number J, and the draws within a unit are nobody else's. Where it
has a coin of its own, nobody reacts to it, and the pair is the mixture of the Gaussians
of J (docs/theory.md, "People", Theorem M); else what a step draws of the levels above
what is clipped is taken for visible.
"""

from __future__ import annotations

import math

import numpy as np

from jaxdp_episodic.accountant.describe.people_laws import Stage, log_visible
from jaxdp_episodic.accountant.describe.rates import (
    max_contributions,
    most_children_drawn,
)
from jaxdp_episodic.accountant.describe.schemes import MultistageSampling, Poisson
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.questions.mixture_tables import (
    MOST_UNITS,
    Mixture,
    Settings,
    column,
)
from jaxdp_episodic.accountant.questions.pair_numbers import (
    ALWAYS,
    is_zeroing,
    product,
    shift_of,
)


def contribution_pairs(
    step: GaussianStep, sampling: MultistageSampling
) -> tuple[PrivacyLoss, ...]:
    """Returns pairs of a unit above what is clipped, each of which dominates.

    Raises:
      ValueError: a number of contributions without a public bound.
    """
    unit = step.path_rates.num_levels
    clip = sampling.level_names.index(str(step.clip_unit)) + 1
    most = column(
        max_contributions(
            sampling,
            step.population,
            unit_level=unit,
            clip_level=clip,
            neighboring_relation=step.neighboring_relation,
        )
    )
    below = _stages(step, sampling, unit, clip)
    outer, rate = product(step.path_rates.rates[:-1]), step.path_rates.rates[-1]
    has_coin = isinstance(sampling.levels[unit - 1], Poisson)
    certain = _always_all(step, has_coin, outer, rate, most)
    reacts = not has_coin and step.neighboring_relation == "add_remove"
    many = math.prod(float(np.max(stage.bound, initial=1)) for stage in below)
    if reacts or many > MOST_UNITS or all(np.all(s.rate == 1) for s in below):
        return (certain,)
    settings = Settings(step, below, most[..., 0])
    if has_coin and step.neighboring_relation != "replace_one":
        return (settings.hidden_pair(_hidden, outer, rate),)
    if has_coin:
        return certain, settings.pair(_visible, visible=outer, coin=rate)
    return certain, settings.pair(_visible, visible=outer * rate)


def _always_all(
    step: GaussianStep,
    has_coin: bool,
    outer: np.ndarray,
    rate: np.ndarray,
    most: np.ndarray,
) -> PrivacyLoss:
    """As if every contribution were drawn whenever the unit is."""
    if has_coin:
        if step.neighboring_relation == "replace_one":
            return AntipodalGaussianLoss(outer, rate, ALWAYS, shift_of(step, most))
        return SampledGaussianLoss(outer, rate, shift_of(step, most))
    if is_zeroing(step):
        # If the unit is not drawn another one takes its place.
        return ZeroedGaussianLoss(outer, ALWAYS, rate, shift_of(step, most))
    if step.neighboring_relation == "replace_one":
        return SwappedGaussianLoss(outer, rate, shift_of(step, 2 * most))
    # If all units are drawn there is no other to be swapped for: C, not 2C.
    everyone = step.path_rates.covers_all(
        step.path_rates.num_levels, step.neighboring_relation
    )
    sensitivity = np.where(everyone, 1.0, 2.0) * most
    return SampledGaussianLoss(outer, rate, shift_of(step, sensitivity))


def _hidden(stages: tuple[Stage, ...], most: float) -> Mixture:
    """Theorem M: all draws within the unit are hidden; J may be so large at most."""
    numbers, masses = log_visible(stages)
    numbers = np.minimum(numbers, most)
    some = numbers > 0
    chance = float(np.exp(masses[some]).sum())
    if not chance > 0:
        return Mixture(1.0, 1.0, 0.0, np.ones(1), np.zeros(1))
    shares = masses[some] - np.log(chance)
    return Mixture(1.0, 1.0, min(chance, 1.0), numbers[some], shares)


def _visible(stages: tuple[Stage, ...], _: float) -> Mixture:
    """Of the draws within the unit only the last, of what is clipped, is hidden.

    And the unit's own coin, as the others' do not look at it.
    """
    *above, last = stages
    numbers, masses = log_visible(above)
    return Mixture(1.0, last.rate, 1.0, numbers * last.bound, masses)


def _stages(
    step: GaussianStep, sampling: MultistageSampling, unit: int, clip: int
) -> list[Stage]:
    """The levels below the unit; of draws without replacement all that are drawn."""
    stages, zero = [], np.zeros(1)
    for level in range(unit, clip):
        scheme = sampling.levels[level]
        children = most_children_drawn(
            sampling, step.population, level, step.neighboring_relation
        )
        rate = np.ones(1)
        if isinstance(scheme, Poisson):
            rate = column(scheme.sampling_probability)
        stages.append(Stage(column(children), rate, zero, zero))
    return stages

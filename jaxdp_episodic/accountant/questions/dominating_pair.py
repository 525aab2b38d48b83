"""From a step to its dominating pair: which theorem holds, with which numbers.

This is the one place where the description of a step meets the theorems. Every method
takes the result, a `losses.privacy_loss.PrivacyLoss`, whatever the design was. In the
multistage theorem (docs/theory.md, "Profiles") ``c`` is the clip level and ``L`` the
privacy unit's; the levels above ``c`` only scale delta (``outer_rate``), level ``c``
and those below it amplify.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.mechanisms import TruncatedPoissonRelease
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    MultistageSampling,
    Poisson,
    RandomAllocation,
    ShuffledEpochs,
)
from jaxdp_episodic.accountant.describe.spec import refuse_traced
from jaxdp_episodic.accountant.describe.step import (
    STEP,
    AnyStep,
    ComposedSteps,
    GaussianStep,
    OneStep,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.independent_episodes import (
    IndependentEpisodesLoss,
    ZeroedEpisodesLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.numerics.loops import namespace
from jaxdp_episodic.accountant.questions.contribution_pairs import contribution_pairs
from jaxdp_episodic.accountant.questions.epoch_pairs import (
    allocated_uses,
    drawn_pairs,
    shuffled_epoch,
)
from jaxdp_episodic.accountant.questions.pair_numbers import (
    ALWAYS,
    is_zeroing,
    product,
    shift_of,
)
from jaxdp_episodic.accountant.questions.people_pairs import (
    chance_of_episode,
    in_one_place,
    people_pairs,
)
from jaxdp_episodic.accountant.questions.release_pair import (
    pair_of_release,
    uses_of_truncated,
)

# Most independent episodes of a step: a bound sums as many terms.
MOST_EPISODES = 1_000_000


def dominating_pair(step: OneStep) -> PrivacyLoss:
    """Returns a dominating pair of one step: the first of `dominating_pairs`."""
    return dominating_pairs(step)[0]


def dominating_pairs(step: OneStep) -> tuple[PrivacyLoss, ...]:
    """Returns dominating pairs of one step, for every setting and every path.

    Each of several, by different theorems, dominates by itself: the least answer that
    any of them gives of a whole run is one of the run.

    Of `RandomAllocation` the pair of one step alone, of `ShuffledEpochs` that of an
    epoch, begun or finished: what a run of them uses is said by `runs_of`.

    The fields of each are float64 and broadcast together to ``(*step.shape, P)``, the
    last axis over the distinct paths (P = 1 without a `Population`, and of a person).

    Raises:
      ValueError: contributions clipped below the privacy unit, of which no public
        bound of the number is known.
      NotImplementedError: more independent episodes, or clip units of a person, than a
        sum can have terms.
    """
    refuse_traced(step)
    if not isinstance(step, GaussianStep):
        return (pair_of_release(step),)
    step = in_one_place(step)
    scheme = epoch_scheme(step.design)
    if isinstance(scheme, RandomAllocation):
        return drawn_pairs(step, step.path_rates.rates[0])
    if isinstance(scheme, ShuffledEpochs):
        return (shuffled_epoch(step),)
    if isinstance(step.design, IndependentEpisodes):
        return (_independent_episodes(step, step.design),)
    if step.privacy_unit == PERSON:
        return people_pairs(step)
    if isinstance(step.design, GroupedClasses):
        return (_grouped_classes(step, step.design),)
    assert isinstance(step.design, MultistageSampling)
    return _multistage(step, step.design)


def run_of(step: AnyStep, num_steps: np.ndarray | None) -> Run:
    """Returns the first of `runs_of`: an upper bound wherever it stands alone."""
    return runs_of(step, num_steps)[0]


def runs_of(step: AnyStep, num_steps: np.ndarray | None) -> tuple[Run, ...]:
    """Returns runs of a step, or of composed ones, with a path axis.

    Each by itself bounds what the steps cost; the least answer counts. Composed steps
    go by the theorem of the same number in each of them.
    """
    refuse_traced(step)
    if not isinstance(step, ComposedSteps):
        assert num_steps is not None  # the callers check
        return tuple(Run(*zip(*uses, strict=True)) for uses in _uses(step, num_steps))
    return runs_of_parts(step.steps, step.counts)


def runs_of_parts(
    steps: Sequence[OneStep], counts: Sequence[ArrayLike]
) -> tuple[Run, ...]:
    """Returns the runs of composed steps, whose counts may be real numbers."""
    parts = [_uses(*part) for part in zip(steps, counts, strict=True)]
    runs = []
    for theorem in range(max(map(len, parts))):
        uses = [use for part in parts for use in part[min(theorem, len(part) - 1)]]
        runs.append(Run(*zip(*uses, strict=True)))
    return tuple(runs)


def _uses(
    step: OneStep, num_steps: ArrayLike
) -> list[list[tuple[PrivacyLoss, np.ndarray]]]:
    """The pairs that steps of one kind use, and how often: epochs, not their steps.

    A list for each theorem.
    """
    count = np.asarray(num_steps, np.float64)[..., None]
    if isinstance(step, TruncatedPoissonRelease):
        return [uses_of_truncated(step, count)]
    if not isinstance(step, GaussianStep):
        return [[(pair_of_release(step), count)]]
    step = in_one_place(step)
    scheme = epoch_scheme(step.design)
    if isinstance(scheme, RandomAllocation):
        return allocated_uses(step, scheme, count)
    if isinstance(scheme, ShuffledEpochs):
        # An epoch that was begun costs as much as a finished one.
        count = np.ceil(count / np.asarray(scheme.steps_per_epoch)[..., None])
    return [[(pair, count)] for pair in dominating_pairs(step)]


def _multistage(
    step: GaussianStep, sampling: MultistageSampling
) -> tuple[PrivacyLoss, ...]:
    """The rows of the multistage theorem."""
    if step.clip_unit in sampling.level_names[step.path_rates.num_levels :]:
        return contribution_pairs(step, sampling)
    return (_one_contribution(step, sampling),)


def _one_contribution(step: GaussianStep, sampling: MultistageSampling) -> PrivacyLoss:
    """What is clipped is the protected unit, or above it."""
    levels = step.path_rates
    last = levels.num_levels
    add_remove = step.neighboring_relation == "add_remove"
    shift = shift_of(step, 1.0)
    if step.clip_unit == STEP:
        everything = product(levels.rates)
        if is_zeroing(step):
            return ZeroedGaussianLoss(ALWAYS, ALWAYS, everything, shift)
        return SwappedGaussianLoss(ALWAYS, everything, shift_of(step, 2.0))
    clip = sampling.level_names.index(str(step.clip_unit)) + 1
    outer = product(levels.rates[: clip - 1])
    rate, inner = levels.rates[clip - 1], product(levels.rates[clip:])
    single = clip == last and add_remove
    if isinstance(sampling.levels[clip - 1], Poisson):
        if is_zeroing(step) and clip < last:
            return ZeroedGaussianLoss(outer, rate, inner, shift)
        if single or is_zeroing(step):
            return SampledGaussianLoss(outer, rate, shift)
        return AntipodalGaussianLoss(outer, rate, inner, shift)
    if is_zeroing(step):
        # If the unit is not drawn another contribution takes its place: not the sampled
        # pair, even where the unit itself is clipped.
        return ZeroedGaussianLoss(outer, ALWAYS, rate * inner, shift)
    if single:
        # If all children are drawn there is no other to be swapped for: C, not 2C.
        everyone = levels.covers_all(clip, step.neighboring_relation)
        return SampledGaussianLoss(
            outer, rate, shift_of(step, np.where(everyone, 1.0, 2.0))
        )
    return SwappedGaussianLoss(outer, rate * inner, shift_of(step, 2.0))


def coins_of(step: OneStep) -> tuple[Poisson, ...]:
    """Returns the levels of a step of which `drawn_by_coins` is the pair, else none.

    What is protected is clipped, and everything drawn by coins.
    """
    if not isinstance(step, GaussianStep) or step.clip_unit != step.privacy_unit:
        return ()
    if step.population is not None or step.people is not None:
        return ()
    if step.neighboring_relation not in ("add_remove", "zero_out"):
        return ()
    levels = getattr(step.design, "levels", ())
    coins = tuple(level for level in levels if isinstance(level, Poisson))
    is_level = step.privacy_unit in step.design.level_names
    return coins if is_level and len(coins) == len(levels) else ()


def drawn_by_coins(step: GaussianStep) -> SampledGaussianLoss:
    """Returns the pair of a step that has `coins_of`; its numbers may be traced.

    Fields are of the step's own shapes, without an axis for paths.
    """
    last = step.design.level_names.index(str(step.privacy_unit))
    rates: list[Any] = [coin.sampling_probability for coin in coins_of(step)]
    noise: Any = step.noise_multiplier
    with np.errstate(divide="ignore", over="ignore"):
        shift = namespace(noise).divide(1.0, noise)
    outer = math.prod(rates[:last], start=1.0)
    return SampledGaussianLoss(outer, rates[last], shift)


def _grouped_classes(step: GaussianStep, sampling: GroupedClasses) -> PrivacyLoss:
    """Grouped classes: a class is in at most one episode of a step."""
    episode_rate, class_rate, *below = step.path_rates.rates
    inner = product(below)
    if is_zeroing(step):
        shift = shift_of(step, 1.0)
        if not isinstance(sampling.episodes, Poisson):
            return ZeroedGaussianLoss(
                ALWAYS, ALWAYS, episode_rate * class_rate * inner, shift
            )
        if not below:
            return SampledGaussianLoss(ALWAYS, episode_rate, shift)
        return ZeroedGaussianLoss(ALWAYS, episode_rate, inner, shift)
    if isinstance(sampling.episodes, Poisson):
        # Given the public partition: a Poisson draw of clip units. A class below its
        # episode is protected at inner rate 1, with the antipodal pair: an emptied
        # class changes its episode, it does not remove it (under zero_out it does).
        return AntipodalGaussianLoss(ALWAYS, episode_rate, inner, shift_of(step, 1.0))
    rate = episode_rate * class_rate * inner
    return SwappedGaussianLoss(ALWAYS, rate, shift_of(step, 2.0))


def _independent_episodes(
    step: GaussianStep, design: IndependentEpisodes
) -> PrivacyLoss:
    """Independent episodes: the unit may be in several."""
    episodes = np.asarray(design.num_episodes, np.float64)[..., None]
    if np.max(episodes, initial=0) > MOST_EPISODES:
        raise NotImplementedError(
            f"num_episodes must be at most {MOST_EPISODES:,} (the bound sums "
            f"as many terms), got {np.max(episodes):,.0f}"
        )
    person = step.privacy_unit == PERSON
    rate = chance_of_episode(step) if person else product(step.path_rates.rates)
    if is_zeroing(step):
        return ZeroedEpisodesLoss(ALWAYS, rate, shift_of(step, 1.0), episodes)
    return IndependentEpisodesLoss(ALWAYS, rate, shift_of(step, 2.0), episodes)

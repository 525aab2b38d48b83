"""From a step to its dominating pair: which theorem holds, with which numbers.

This is the one place where the description of a step meets the theorems. Every method
takes the result, a `losses.privacy_loss.PrivacyLoss`, whatever the design was. In the
multistage theorem (docs/theory.md, "Profiles") ``c`` is the clip level and ``L`` the
privacy unit's; the levels above ``c`` only scale delta (``outer_rate``), level ``c``
and those below it amplify.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.mechanisms import TruncatedPoissonRelease
from jaxdp_episodic.accountant.describe.rates import max_contributions
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    MultistageSampling,
    Poisson,
    RandomAllocation,
    ShuffledEpochs,
)
from jaxdp_episodic.accountant.describe.step import (
    STEP,
    AnyStep,
    ComposedSteps,
    GaussianStep,
    OneStep,
)
from jaxdp_episodic.accountant.losses.allocated_antipodal import AllocatedAntipodalLoss
from jaxdp_episodic.accountant.losses.allocated_gaussian import AllocatedGaussianLoss
from jaxdp_episodic.accountant.losses.antipodal_gaussian import AntipodalGaussianLoss
from jaxdp_episodic.accountant.losses.independent_episodes import (
    IndependentEpisodesLoss,
    ZeroedEpisodesLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.swapped_gaussian import SwappedGaussianLoss
from jaxdp_episodic.accountant.losses.zeroed_gaussian import ZeroedGaussianLoss
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions.release_pair import (
    pair_of_release,
    uses_of_truncated,
)

# Most independent episodes of a step: a bound sums as many terms.
MOST_EPISODES = 1_000_000
# Relative; more than a square root and a division are rounded by, together.
_ROUNDED_UP = 2.0**-51
# A rate of 1, on its path axis.
_ALWAYS = np.ones(1)


def dominating_pair(step: OneStep) -> PrivacyLoss:
    """Returns the dominating pair of one step, for every setting and every path.

    Of `RandomAllocation` the pair of one step alone, of `ShuffledEpochs` that of an
    epoch, begun or finished: what a run of them uses is said by `run_of`.

    Its fields are float64 and broadcast together to ``(*step.shape, P)``, the last
    axis over the distinct paths (P = 1 without a `Population`).

    Raises:
      ValueError: contributions clipped below the privacy unit, of which no public
        bound of the number is known.
      NotImplementedError: more independent episodes than a sum can have terms.
    """
    if not isinstance(step, GaussianStep):
        return pair_of_release(step)
    if step.privacy_unit == PERSON:
        raise NotImplementedError("privacy_unit='person' is not accounted yet")
    if isinstance(step.design, IndependentEpisodes):
        return _independent_episodes(step, step.design)
    scheme = epoch_scheme(step.design)
    if isinstance(scheme, RandomAllocation):
        return _drawn_pair(step, step.path_rates.rates[0])
    if isinstance(scheme, ShuffledEpochs):
        return _shuffled_epoch(step)
    if isinstance(step.design, GroupedClasses):
        return _grouped_classes(step, step.design)
    return _multistage(step, step.design)


def run_of(step: AnyStep, num_steps: np.ndarray | None) -> Run:
    """Returns the run of a step, or of composed ones, with a path axis."""
    if not isinstance(step, ComposedSteps):
        assert num_steps is not None  # the callers check
        return Run(*zip(*_uses(step, num_steps), strict=True))
    uses = [
        use
        for part, count in zip(step.steps, step.counts, strict=True)
        for use in _uses(part, count)
    ]
    return Run(*zip(*uses, strict=True))


def _uses(step: OneStep, num_steps: ArrayLike) -> list[tuple[PrivacyLoss, np.ndarray]]:
    """The pairs that steps of one kind use, and how often: epochs, not their steps."""
    count = np.asarray(num_steps, np.float64)[..., None]
    if isinstance(step, TruncatedPoissonRelease):
        return uses_of_truncated(step, count)
    if not isinstance(step, GaussianStep):
        return [(dominating_pair(step), count)]
    scheme = epoch_scheme(step.design)
    if isinstance(scheme, RandomAllocation):
        return _allocated(step, scheme, count)
    if isinstance(scheme, ShuffledEpochs):
        # An epoch that was begun costs as much as a finished one.
        count = np.ceil(count / np.asarray(scheme.steps_per_epoch)[..., None])
    return [(dominating_pair(step), count)]


def shared_epoch(
    step: GaussianStep, num_steps: int, looks: int
) -> tuple[GaussianStep, int]:
    """Returns ``(step, num_steps)`` of what an epoch costs whose draws are used again.

    Copies of a run that part within an epoch of random allocation have the same secret
    bins: together they are one epoch, its noise divided by the root of the looks at a
    bin (docs/proofs.md, "The same bins in every epoch"). Of shuffled epochs nothing
    rests on the order being secret: each look is an epoch of its own.

    Args:
      step: in epochs, all its fields scalars.
      num_steps: of the epoch.
      looks: how often the same step of it was released at most.

    Raises:
      NotImplementedError: bins that are used again where no theorem has them.
    """
    scheme = epoch_scheme(step.design)
    if looks == 1:
        return step, num_steps
    if isinstance(scheme, ShuffledEpochs):
        return step, int(np.asarray(scheme.steps_per_epoch)) * looks
    if not _is_whole(step):
        raise NotImplementedError(
            f"{looks} looks at the same bins of an epoch have no theorem with "
            f"privacy_unit={step.privacy_unit!r} under {step.neighboring_relation}; "
            "covered: add_remove and zero_out of what is allocated"
        )
    noise = np.asarray(step.noise_multiplier) / math.sqrt(looks) * (1 - _ROUNDED_UP)
    return dataclasses.replace(step, noise_multiplier=float(noise)), num_steps


def _allocated(
    step: GaussianStep, scheme: RandomAllocation, count: np.ndarray
) -> list[tuple[PrivacyLoss, np.ndarray]]:
    """Whole blocks, and a part of one more; an epoch is ``times`` blocks.

    Of a block of b steps the first alone is a Poisson draw at rate 1/b.
    """
    steps, times = (
        np.asarray(n, np.float64)[..., None]
        for n in (scheme.steps_per_epoch, scheme.times)
    )
    epochs, left = np.divmod(count, steps)
    short, num_long = np.divmod(steps, times)
    # The first `num_long` blocks of an epoch have one step more.
    in_long = num_long * (short + 1)
    is_long = left < in_long
    whole_long = np.where(is_long, np.floor(left / (short + 1)), num_long)
    rest = np.where(is_long, left - whole_long * (short + 1), left - in_long)
    whole_short = np.where(is_long, 0.0, np.floor(rest / short))
    part = np.where(is_long, rest, rest - whole_short * short)
    part_of = np.where(is_long, short + 1, short)
    uses: list[tuple[PrivacyLoss, np.ndarray]] = []
    for bins, taken, number in (
        (short, short, epochs * (times - num_long) + whole_short),
        (short + 1, short + 1, epochs * num_long + whole_long),
        (part_of, part, (part > 0) * 1.0),
    ):
        many, one = number * (taken > 1), number * (taken == 1)
        if np.any(many):
            uses += _blocks(step, bins, taken, many)
        if np.any(one):
            uses.append((_drawn_pair(step, 1 / bins), one))
    return uses or [(_drawn_pair(step, 1 / steps), count)]


def _drawn_pair(step: GaussianStep, rate: np.ndarray) -> PrivacyLoss:
    """The pair of a Poisson draw of the clipped units."""
    inner, shift = _inner_rate(step), _shift(step, 1.0)
    if _is_whole(step):
        return SampledGaussianLoss(_ALWAYS, rate, shift)
    return AntipodalGaussianLoss(_ALWAYS, rate, inner, shift)


def _blocks(
    step: GaussianStep, bins: np.ndarray, taken: np.ndarray, number: np.ndarray
) -> list[tuple[PrivacyLoss, np.ndarray]]:
    """Blocks, or parts of one, of which two steps or more are taken.

    Two antipodal steps of two are a Gaussian of shift sqrt(2) s:
    ``(A_1 + A_2) / (B_1 + B_2) = e^{s (x_1 + x_2)}``, ``D_2(g) = D(sqrt(2) s, g)``.
    """
    pairs = np.zeros_like(number) if _is_whole(step) else number * (bins == 2)
    others = number - pairs
    uses: list[tuple[PrivacyLoss, np.ndarray]] = []
    if np.any(others):
        uses.append((_allocated_pair(step, bins, taken), others))
    if np.any(pairs):
        shift = _shift(step, np.sqrt(2.0))
        uses.append((SwappedGaussianLoss(_ALWAYS, _inner_rate(step), shift), pairs))
    return uses


def _allocated_pair(
    step: GaussianStep, bins: np.ndarray, taken: np.ndarray
) -> PrivacyLoss:
    """The pair of a block of an epoch, or of a part of it."""
    inner, shift = _inner_rate(step), _shift(step, 1.0)
    if _is_whole(step):
        return AllocatedGaussianLoss(_ALWAYS, shift, bins, taken)
    return AllocatedAntipodalLoss(_ALWAYS, inner, shift, bins, taken)


def _is_whole(step: GaussianStep) -> bool:
    """Whether a unit takes its whole contribution along: none is left in its place."""
    grouped = isinstance(step.design, GroupedClasses)
    whole = step.path_rates.num_levels == (2 if grouped else 1)
    if grouped:
        return whole and _zeroes(step)
    return whole and step.neighboring_relation != "replace_one"


def _inner_rate(step: GaussianStep) -> np.ndarray:
    """The product of the rates below the level that is drawn by epochs."""
    _, *below = step.path_rates.rates
    return _product(below[1:] if isinstance(step.design, GroupedClasses) else below)


def _multistage(step: GaussianStep, sampling: MultistageSampling) -> PrivacyLoss:
    """The rows of the multistage theorem."""
    levels = step.path_rates
    last = levels.num_levels
    add_remove = step.neighboring_relation == "add_remove"
    if step.clip_unit == STEP:
        everything = _product(levels.rates)
        if _zeroes(step):
            return _zeroed(_ALWAYS, _ALWAYS, everything, _shift(step, 1.0))
        return SwappedGaussianLoss(_ALWAYS, everything, _shift(step, 2.0))
    clip = sampling.level_names.index(str(step.clip_unit)) + 1
    contributions = np.ones(1)
    if clip > last:
        # Clipped below the protected unit: the unit contributes k clip norms.
        contributions = _contributions(step, sampling, last, clip)
        clip = last
    outer = _product(levels.rates[: clip - 1])
    rate, inner = levels.rates[clip - 1], _product(levels.rates[clip:])
    single = clip == last and add_remove
    if isinstance(sampling.levels[clip - 1], Poisson):
        shift = _shift(step, contributions)
        if _zeroes(step) and clip < last:
            return _zeroed(outer, rate, inner, shift)
        if single or _zeroes(step):
            return SampledGaussianLoss(outer, rate, shift)
        return AntipodalGaussianLoss(outer, rate, inner, shift)
    if _zeroes(step):
        # If the unit is not drawn another contribution takes its place: not the sampled
        # pair, even where the unit itself is clipped.
        return _zeroed(outer, _ALWAYS, rate * inner, _shift(step, contributions))
    if single:
        # If all children are drawn there is no other to be swapped for: C, not 2C.
        everyone = levels.covers_all(clip, step.neighboring_relation)
        sensitivity = np.where(everyone, 1.0, 2.0) * contributions
        return SampledGaussianLoss(outer, rate, _shift(step, sensitivity))
    return SwappedGaussianLoss(outer, rate * inner, _shift(step, 2 * contributions))


def _grouped_classes(step: GaussianStep, sampling: GroupedClasses) -> PrivacyLoss:
    """Grouped classes: a class is in at most one episode of a step."""
    episode_rate, class_rate, *below = step.path_rates.rates
    inner = _product(below)
    if _zeroes(step):
        shift = _shift(step, 1.0)
        if not isinstance(sampling.episodes, Poisson):
            return _zeroed(_ALWAYS, _ALWAYS, episode_rate * class_rate * inner, shift)
        if not below:
            return SampledGaussianLoss(_ALWAYS, episode_rate, shift)
        return _zeroed(_ALWAYS, episode_rate, inner, shift)
    if isinstance(sampling.episodes, Poisson):
        # Given the public partition: a Poisson draw of clip units. A class below its
        # episode is protected at inner rate 1, with the antipodal pair: an emptied
        # class changes its episode, it does not remove it (under zero_out it does).
        return AntipodalGaussianLoss(_ALWAYS, episode_rate, inner, _shift(step, 1.0))
    rate = episode_rate * class_rate * inner
    return SwappedGaussianLoss(_ALWAYS, rate, _shift(step, 2.0))


def _shuffled_epoch(step: GaussianStep) -> PrivacyLoss:
    """An epoch in random order, without amplification (docs/theory.md, "Epochs")."""
    inner = _inner_rate(step)
    if _zeroes(step):
        # Order and batches are those of the slots: only one step's sum changes.
        return _zeroed(_ALWAYS, _ALWAYS, inner, _shift(step, 1.0))
    if _is_whole(step):
        # The last unit takes the place of the one that left (2 clip norms), and leaves
        # its own batch (one more): two steps, sqrt(4 + 1) together.
        return SampledGaussianLoss(_ALWAYS, _ALWAYS, _shift(step, np.sqrt(5.0)))
    return SwappedGaussianLoss(_ALWAYS, inner, _shift(step, 2.0))


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
    rate = _product(step.path_rates.rates)
    if _zeroes(step):
        return ZeroedEpisodesLoss(_ALWAYS, rate, _shift(step, 1.0), episodes)
    return IndependentEpisodesLoss(_ALWAYS, rate, _shift(step, 2.0), episodes)


def _zeroes(step: GaussianStep) -> bool:
    return step.neighboring_relation == "zero_out"


def _zeroed(
    outer: np.ndarray, rate: np.ndarray, inner: np.ndarray, shift: np.ndarray
) -> PrivacyLoss:
    """The zeroed pair; see docs/proofs.md, "The zero-out relation"."""
    return ZeroedGaussianLoss(outer, rate, inner, shift)


def _contributions(
    step: GaussianStep, sampling: MultistageSampling, unit_level: int, clip_level: int
) -> np.ndarray:
    """(..., 1) the most clipped contributions of one protected unit in a step."""
    bound = max_contributions(
        sampling,
        step.population,
        unit_level=unit_level,
        clip_level=clip_level,
        neighboring_relation=step.neighboring_relation,
    )
    return np.asarray(bound, np.float64)[..., None]


def _shift(step: GaussianStep, sensitivity: np.ndarray | float) -> np.ndarray:
    """How far a protected unit changes the sum, in deviations of the noise.

    ``sensitivity`` is that in clip norms. Without noise it is inf.
    """
    noise = np.asarray(step.noise_multiplier, np.float64)[..., None]
    with np.errstate(divide="ignore", over="ignore"):
        return np.divide(sensitivity, noise)


def _product(rates: tuple[np.ndarray, ...] | list[np.ndarray]) -> np.ndarray:
    result = np.ones(1)
    for rate in rates:
        result = result * rate
    return result

"""What epochs cost: whole blocks of them, parts of one, and shuffled ones."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.designs import GroupedClasses, epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    MultistageSampling,
    RandomAllocation,
    ShuffledEpochs,
)
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.losses.allocated_antipodal import AllocatedAntipodalLoss
from jaxdp_episodic.accountant.losses.allocated_gaussian import AllocatedGaussianLoss
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.questions.pair_numbers import (
    ALWAYS,
    is_zeroing,
    product,
    shift_of,
)
from jaxdp_episodic.accountant.questions.people_pairs import coins_pair, units_of_epoch

# Relative; more than a square root and a division are rounded by, together.
_ROUNDED_UP = 2.0**-51


class _Units(NamedTuple):
    """What a protected unit has in an epoch."""

    is_whole: bool  # a contribution is taken along: none is left in its place
    number: np.ndarray  # of the units that are allocated, each by itself
    inner: np.ndarray  # chance that a drawn one holds what is protected
    # The same chance, seen: what a unit holds says nothing of its step.
    outer: np.ndarray = ALWAYS

    @classmethod
    def all_of(cls, step: GaussianStep) -> list[_Units]:
        """What holds of a step in epochs; under zero_out two things.

        Where protected slots are null a unit that holds one is 0, and which do is the
        same either way: given that, it is there or not as a whole.
        """
        units = cls.of(step)
        if units.is_whole or not is_zeroing(step):
            return [units]
        return [units, cls(True, units.number, ALWAYS, units.inner)]

    @classmethod
    def of(cls, step: GaussianStep) -> _Units:
        """Those of a step in epochs."""
        grouped = isinstance(step.design, GroupedClasses)
        leaves = is_zeroing(step)
        if step.privacy_unit == PERSON:
            number, inner = units_of_epoch(step)
            whole = bool(np.all(inner == 1))
            if isinstance(step.design, MultistageSampling):
                leaves |= step.neighboring_relation == "add_remove"
                whole &= len(step.design.levels) == 1 or is_zeroing(step)
            return cls(whole and leaves, number, inner)
        _, *below = step.path_rates.rates
        inner = product(below[1:] if grouped else below)
        whole = step.path_rates.num_levels == (2 if grouped else 1)
        leaves |= not grouped and step.neighboring_relation == "add_remove"
        return cls(whole and leaves, ALWAYS, inner)


def allocated_uses(
    step: GaussianStep, scheme: RandomAllocation, count: np.ndarray
) -> list[list[tuple[PrivacyLoss, np.ndarray]]]:
    """Returns the pairs of steps in random allocation, and how often each is used.

    A list for each theorem.
    """
    return [_uses(step, units, scheme, count) for units in _Units.all_of(step)]


def drawn_pairs(step: GaussianStep, rate: np.ndarray) -> tuple[PrivacyLoss, ...]:
    """Returns the pairs of a Poisson draw of the clipped units, each by itself."""
    return tuple(_drawn_pair(step, units, rate) for units in _Units.all_of(step))


def _uses(
    step: GaussianStep, units: _Units, scheme: RandomAllocation, count: np.ndarray
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
            uses += _blocks(step, units, bins, taken, many)
        if np.any(one):
            uses.append((_drawn_pair(step, units, 1 / bins), one))
    return uses or [(_drawn_pair(step, units, 1 / steps), count)]


def _drawn_pair(step: GaussianStep, units: _Units, rate: np.ndarray) -> PrivacyLoss:
    """The pair of a Poisson draw of the clipped units, each by itself."""
    shift = shift_of(step, 1.0)
    if np.any(units.number > 1):
        chance = units.inner * units.outer
        return coins_pair(step, units.number, rate, chance, leaves=units.is_whole)
    if units.is_whole:
        return SampledGaussianLoss(units.outer, rate, shift)
    return AntipodalGaussianLoss(ALWAYS, rate, units.inner, shift)


def _blocks(
    step: GaussianStep,
    units: _Units,
    bins: np.ndarray,
    taken: np.ndarray,
    number: np.ndarray,
) -> list[tuple[PrivacyLoss, np.ndarray]]:
    """Blocks, or parts of one, of which two steps or more are taken.

    Of m units as many blocks of one, each with the root of m as its shift: noise is
    shared out among them (docs/proofs.md, "People").

    Two antipodal steps of two are a Gaussian of shift sqrt(2) s:
    ``(A_1 + A_2) / (B_1 + B_2) = e^{s (x_1 + x_2)}``, ``D_2(g) = D(sqrt(2) s, g)``.
    """
    number, root = number * units.number, np.sqrt(units.number)
    root = np.where(units.number > 1, root * (1 + _ROUNDED_UP), 1.0)
    pairs = np.zeros_like(number) if units.is_whole else number * (bins == 2)
    others = number - pairs
    uses: list[tuple[PrivacyLoss, np.ndarray]] = []
    if np.any(others):
        shift = shift_of(step, root)
        if units.is_whole:
            loss = AllocatedGaussianLoss(units.outer, shift, bins, taken)
        else:
            loss = AllocatedAntipodalLoss(ALWAYS, units.inner, shift, bins, taken)
        uses.append((loss, others))
    if np.any(pairs):
        shift = shift_of(step, np.sqrt(2.0) * root)
        uses.append((SwappedGaussianLoss(ALWAYS, units.inner, shift), pairs))
    return uses


def shuffled_epoch(step: GaussianStep) -> PrivacyLoss:
    """Returns the pair of an epoch in random order, without amplification.

    See docs/theory.md, "Epochs". Several units of a person may all be in one step.
    """
    units = _Units.of(step)
    inner = np.where(units.number > 1, 1.0, units.inner)
    if is_zeroing(step):
        # Order and batches are those of the slots: only the units' own sums change.
        return ZeroedGaussianLoss(ALWAYS, ALWAYS, inner, shift_of(step, units.number))
    if units.is_whole:
        # The last unit takes the place of the one that left (2 clip norms), and leaves
        # its own batch (one more): two steps, sqrt(4 + 1) together.
        shift = shift_of(step, np.sqrt(5.0) * units.number)
        return SampledGaussianLoss(ALWAYS, ALWAYS, shift)
    return SwappedGaussianLoss(ALWAYS, inner, shift_of(step, 2.0 * units.number))


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
    if step.privacy_unit == PERSON or not _Units.of(step).is_whole:
        raise NotImplementedError(
            f"{looks} looks at the same bins of an epoch have no theorem with "
            f"privacy_unit={step.privacy_unit!r} under {step.neighboring_relation}; "
            "covered: add_remove and zero_out of what is allocated"
        )
    noise = np.asarray(step.noise_multiplier) / math.sqrt(looks) * (1 - _ROUNDED_UP)
    return dataclasses.replace(step, noise_multiplier=float(noise)), num_steps

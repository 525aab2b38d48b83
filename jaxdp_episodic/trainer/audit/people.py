"""Audits of one person with all of her examples: the sampler of training draws.

A canary person has her examples in many classes. Each drawn clip unit that holds one
contributes a whole clip norm, and what the others contribute is the auditor's choice;
whether she is in the data shows in the noised sum. Nothing here knows the laws of how
many clip units hold her, or which theorem is claimed: the draws are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    MultistageSampling,
    Poisson,
)
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep
from jaxdp_episodic.trainer.audit.confidence import check_confidence
from jaxdp_episodic.trainer.audit.release import (
    CHOOSING_SHARE,
    DELTAS,
    ReleaseAudit,
    claimed_epsilons,
    score_bounds,
)
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler
from jaxdp_episodic.trainer.run.checks import check_owners, sampler_of

Contribute = Callable[[Draw], np.ndarray]
"""From a draw to the (J,) contributions of its clip units, in clip norms."""

# Different sums of which the likelihood ratio is made; more add little to it.
_MOST_SUMS = 512


class World(NamedTuple):
    """One of two neighbouring data sets, as what is drawn and what is contributed.

    Attributes:
      sampler: draws from its data.
      contribute: what each drawn clip unit adds to the sum.
    """

    sampler: EpisodeSampler
    contribute: Contribute

    def runs(
        self, number: int, num_steps: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Returns the (number, num_steps) sums of fresh runs, in clip norms."""
        return np.array([self._run(num_steps, generator) for _ in range(number)])

    def _run(self, num_steps: int, generator: np.random.Generator) -> list[float]:
        length, sums = self.sampler.steps_per_epoch, []
        members: list[Any] = [None] * num_steps
        if length is not None:
            epochs = range(-(-num_steps // length))
            begun = [self.sampler.begin_epoch(generator) for _ in epochs]
            members = [one for epoch in begun for one in epoch][:num_steps]
        for who in members:
            sums.append(float(self._contributed(self.sampler.draw(generator, who))))
        return sums

    def _contributed(self, draw: Draw) -> float:
        found = np.asarray(self.contribute(draw), np.float64)
        if np.any(np.abs(found) > 1):
            raise ValueError("contributions must be at most 1 clip norm")
        if draw.holds_null is not None:
            found = np.where(draw.holds_null, 0.0, found)
        return found.sum()


def audit_person(
    step: GaussianStep,
    data: ExampleTable,
    *,
    person: int = 0,
    others: float = 0.0,
    num_steps: int = 1,
    deltas: Sequence[float] = DELTAS,
    num_draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Draws runs with a person and without her; bounds the epsilon of a step below.

    A clip unit that holds her contributes +1 clip norm. Without her it is null
    (``zero_out``), or holds another content in her place that contributes -1
    (``replace_one``), or is what comes when her examples have left (``add_remove``).
    Units that do not hold her contribute ``others``: where that is below 0, who is
    drawn in her place tells that she was not.

    Args:
      step: what is claimed, with ``privacy_unit="person"``; one setting, with noise.
      data: with all of her examples, and owners.
      person: her place on the list of people; who has most examples costs most.
      others: in [-1, 1], of clip units of a public list those which could hold her.
      num_steps: of a run, at most a few.
      deltas: at which the claim is tested; all bounds hold together.
      num_draws: runs with her, and as many without, at least 100.
      confidence: of all bounds together, in [0.5, 1).
      seed: of the draws and of the noise.
      on_draws: is called now and then with the number of runs drawn since, of twice
        ``num_draws``.

    Returns:
      The claim and the bounds, *lower bounds* of epsilon.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: another privacy unit, a number out of range, data that do not fit.
    """
    if step.privacy_unit != PERSON:
        raise ValueError(
            f"step must have privacy_unit={PERSON!r}, got {step.privacy_unit!r}"
        )
    if not -1 <= others <= 1:
        raise ValueError(f"others must lie in [-1, 1], got {others!r}")
    check_owners(step, data)
    claimed = claimed_epsilons(step, num_steps, deltas)
    return audit_worlds(
        *worlds_of(step, data, person, others),
        noise_multiplier=float(np.asarray(step.noise_multiplier)),
        claimed=claimed,
        num_steps=num_steps,
        deltas=deltas,
        num_draws=num_draws,
        confidence=confidence,
        seed=seed,
        on_draws=on_draws,
    )


def audit_worlds(
    with_person: World,
    without: World,
    *,
    noise_multiplier: float,
    claimed: Sequence[float] | np.ndarray,
    num_steps: int = 1,
    deltas: Sequence[float] = DELTAS,
    num_draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Audits two neighbouring data sets of whatever contributions.

    The first runs choose the score, the likelihood ratio of the mixtures of Gaussians
    around the sums that they had, and the events; the others are counted. Arguments and
    errors are those of `audit_person`.
    """
    number = _validation.whole_number("num_draws", num_draws, minimum=100)
    num_steps = _validation.whole_number("num_steps", num_steps)
    check_confidence(confidence)
    levels = np.atleast_1d(_validation.open_unit_array("deltas", list(deltas)))
    claims = np.atleast_1d(_validation.nonnegative_array("claimed", list(claimed)))
    if claims.shape != levels.shape:
        raise ValueError(
            f"claimed must have one epsilon a delta, got shapes {claims.shape} and "
            f"{levels.shape}"
        )
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier must be > 0, got {noise_multiplier!r}")
    generator = np.random.default_rng(seed)
    choosing = int(CHOOSING_SHARE * number)
    # Steps that draw anew are independent; those of epochs are not.
    is_joint = with_person.sampler.steps_per_epoch is not None
    means, choice, counted = [], [], []
    for world in (with_person, without):
        sums = world.runs(number, num_steps, generator) / noise_multiplier
        released = sums + generator.normal(size=sums.shape)
        means.append(sums[:choosing] if is_joint else sums[:choosing].reshape(-1, 1))
        choice.append(released[:choosing])
        counted.append(released[choosing:])
        if on_draws is not None:
            on_draws(number)
    ratio = _likelihood_ratio(*means)
    chosen, scores = ((ratio(there), ratio(gone)) for there, gone in (choice, counted))
    return ReleaseAudit(claims, score_bounds(chosen, scores, levels, confidence))


def worlds_of(
    step: GaussianStep, data: ExampleTable, person: int, others: float
) -> tuple[World, World]:
    """Returns the data with a person, and without her; see `audit_person`."""
    owners = data.owners
    assert owners is not None  # `check_owners`
    hers = owners.codes == person
    if not np.any(hers):
        raise ValueError(f"person must have an example in the data, got {person!r}")
    her_units = _units_that_react(step, data, hers)

    def contribute(hers: np.ndarray, own: float) -> Contribute:
        def contributions(draw: Draw) -> np.ndarray:
            shown = hers[draw.examples] & draw.mask
            holds = shown.any(axis=tuple(range(1, shown.ndim)))
            reacts = her_units is None or np.isin(draw.units, her_units)
            return np.where(holds, own, np.where(reacts, others, 0.0))

        return contributions

    sampler = sampler_of(step, data)
    there = World(sampler, contribute(hers, 1.0))
    if step.neighboring_relation == "replace_one":
        return there, World(sampler, contribute(hers, -1.0))
    # Sizes that are accounted are those with her.
    left = data.take(np.flatnonzero(~hers))
    gone = np.zeros(left.num_examples, bool)
    return there, World(sampler_of(step, left, is_smaller=True), contribute(gone, 0.0))


def _units_that_react(
    step: GaussianStep, data: ExampleTable, hers: np.ndarray
) -> np.ndarray | None:
    """Units of the clip level whose other contents contribute; None: all.

    Where each has its own coin those of others would be a noise of their own.
    """
    design = step.design
    if not isinstance(design, MultistageSampling) or step.clip_unit == STEP:
        return None
    level = design.level_names.index(str(step.clip_unit)) + 1
    if not isinstance(design.levels[level - 1], Poisson):
        return None
    if level == len(design.levels):  # an example of hers has no other content
        return np.zeros(0, np.int64)
    return np.unique(data.places(level)[hers])


def _likelihood_ratio(
    with_person: np.ndarray, without: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """The log-likelihood ratio of releases, by (n, t) sums of each side.

    Of releases of several times t steps the sum of theirs.
    """
    mixtures = [_mixture(sums) for sums in (with_person, without)]

    def ratio(released: np.ndarray) -> np.ndarray:
        blocks = released.reshape(-1, with_person.shape[1])
        logs = []
        for means, weights in mixtures:
            exponents = blocks @ means.T + (weights - 0.5 * (means**2).sum(axis=1))
            peak = exponents.max(axis=1, keepdims=True)
            logs.append(np.log(np.exp(exponents - peak).sum(axis=1)) + peak[:, 0])
        return (logs[0] - logs[1]).reshape(len(released), -1).sum(axis=1)

    return ratio


def _mixture(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most frequent of these sums, and the logarithms of their frequencies."""
    means, counts = np.unique(sums, axis=0, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_MOST_SUMS]
    return means[most], np.log(counts[most] / counts[most].sum())

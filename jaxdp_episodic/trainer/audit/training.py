"""Audits of real runs: canaries in the data of the trainer that users train with."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import block_lengths, epoch_scheme
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.trainer.audit.canaries import (
    Canaries,
    gradient_canaries,
    input_canaries,
)
from jaxdp_episodic.trainer.audit.confidence import check_confidence
from jaxdp_episodic.trainer.audit.in_out import (
    OnStep,
    Training,
    falls_of_losses,
    on_data,
    released_ratios,
    training_of_config,
)
from jaxdp_episodic.trainer.audit.one_run import Guesses, best_guesses
from jaxdp_episodic.trainer.audit.release import (
    CHOOSING_SHARE,
    DELTAS,
    ReleaseAudit,
    score_bounds,
)
from jaxdp_episodic.trainer.audit.statistics import audit_statistics
from jaxdp_episodic.trainer.data.table import ExampleTable

__all__ = [
    "GRADIENT",
    "INPUT",
    "KINDS",
    "OnStep",
    "Training",
    "TrainingAudit",
    "audit_run",
    "audit_statistics",
    "audit_steps",
    "training_of_config",
]

GRADIENT = "gradient"
INPUT = "input"
KINDS = (GRADIENT, INPUT)


class TrainingAudit(NamedTuple):
    """The claim about a run, and what its canaries show.

    Attributes:
      kind: "gradient": the attacker sees every noised gradient, "input": the first and
        the last parameters only.
      privacy_unit: of which the canaries are.
      num_steps: of the run.
      claimed_rdp: epsilon of the run by Rényi-DP; *upper bound*.
      claimed_exact: by the method "exact"; *upper bound*.
      guesses: what the attacker got right, and the *lower bound* that follows.
    """

    kind: str
    privacy_unit: str
    num_steps: int
    claimed_rdp: float
    claimed_exact: float
    guesses: Guesses

    @property
    def is_violated(self) -> bool:
        """True if the run disproves a claim, up to the audit's confidence."""
        return self.guesses.disproves(min(self.claimed_rdp, self.claimed_exact))


def audit_run(
    training: Training,
    *,
    kind: str = GRADIENT,
    num_canaries: int = 100,
    num_steps: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> TrainingAudit:
    """Trains once with canaries, each in or out by a coin, and guesses the coins.

    Gradient canaries replace their clip unit's contribution by one that is as long as
    clipping allows, each along a direction of its own; the attacker sees every noised
    gradient (white box) and adds up likelihood ratios. Input canaries are data unlike
    the others; the attacker sees how much their loss fell (black box).

    Args:
      training: the run.
      kind: "gradient" or "input".
      num_canaries: more of them prove more, but share the clip units.
      num_steps: fewer or more gradient steps than the run's; the claim is about these.
      confidence: of the lower bound.
      seed: of the canaries and coins. The training itself is never seeded.
      on_step: is called after every step.

    Raises:
      ValueError: more canaries than there are units for them, a number out of range, or
        gradient canaries in a run of statistics alone.
      NotImplementedError: input canaries for episodes with levels within.
    """
    _validation.choice("kind", kind, KINDS)
    check_confidence(confidence)  # before the training, not after it
    steps, first = training.budget.num_steps, len(training.budget.before)
    if num_steps is not None:
        steps = first + _validation.whole_number("num_steps", num_steps)
    if kind == GRADIENT and steps == first:
        raise ValueError(
            "kind must be 'input', or 'step', for a run of private statistics alone, "
            f"which has no gradients, got {kind!r}"
        )
    generator = np.random.default_rng(seed)
    step = training.budget.step
    make = gradient_canaries if kind == GRADIENT else input_canaries
    canaries = make(training.data, step, num_canaries, generator)
    is_in = generator.random(canaries.number) < 0.5
    data = canaries.data(is_in)
    if kind == GRADIENT:
        scores = released_ratios(training, canaries, data, steps, on_step).sum(axis=0)
    else:
        scores = falls_of_losses(training, canaries, data, steps, generator, on_step)
    claims = _claims(training, canaries, data, steps)
    guesses = best_guesses(
        scores, is_in, delta=training.budget.delta, confidence=confidence
    )
    unit = str(step.privacy_unit)
    return TrainingAudit(kind, unit, steps, *claims, guesses)


def audit_steps(
    training: Training,
    *,
    num_draws: int = 2_000,
    deltas: tuple[float, ...] = DELTAS,
    confidence: float = 0.95,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> ReleaseAudit:
    """Audits a single step of the trainer by the steps of two runs with one canary.

    Every step draws afresh, and a gradient canary's contribution does not depend on the
    parameters: the steps of a run on data with the canary, and of one on data without,
    are independent draws of the step's mechanism, in and out. What is tested is the
    whole of `Trainer.step`: sampler, blocks, clipping, noise, keys. Of a design by
    epochs a whole epoch is audited instead of a step, and claimed.

    Args:
      training: the run.
      num_draws: steps (or epochs) of each of the two runs, at least 100.
      deltas: at which the claim is tested; all bounds hold together.
      confidence: of the bounds.
      seed: chooses the canary. The training itself is never seeded.
      on_step: is called after every step.
    """
    draws = _validation.whole_number("num_draws", num_draws, minimum=100)
    check_confidence(confidence)
    scheme = epoch_scheme(training.budget.step.design)
    lengths = np.ones(1, int) if scheme is None else block_lengths(scheme)
    length = int(lengths.sum())
    steps = draws * length
    generator = np.random.default_rng(seed)
    training = _without_start(training)
    canaries = gradient_canaries(training.data, training.budget.step, 1, generator)
    ratios = []
    for before, is_in in ((0, True), (steps, False)):
        data = canaries.data(np.asarray([is_in]))

        def tell(taken: int, _: int, before: int = before) -> None:
            if on_step is not None:
                on_step(before + taken, 2 * steps)

        found = released_ratios(training, canaries, data, steps, tell)
        ratios.append(found[:, 0].reshape(draws, -1).sum(axis=1))
    choosing = int(CHOOSING_SHARE * draws)
    choice, counted = zip(*((r[:choosing], r[choosing:]) for r in ratios), strict=True)
    bounds = score_bounds(choice, counted, deltas, confidence)
    steps_in_and_out = [on_data(training.budget.step, t) for t in _tables(canaries)]
    claimed = np.max(
        [epsilon(one, num_steps=length, delta=deltas) for one in steps_in_and_out],
        axis=0,
    )
    return ReleaseAudit(claimed, bounds)


def _without_start(training: Training) -> Training:
    """The run's gradient steps, on made-up features: no canary's gradient sees them."""
    if training.start is None:
        return training
    data = training.data
    size = training.start(data).dimensions
    features = np.zeros((data.num_examples, size), np.float32)
    features[:, 0] = 1.0
    table = data.with_features(features)
    budget = dataclasses.replace(training.budget, before=())
    return dataclasses.replace(training, data=table, budget=budget, start=None)


def _claims(
    training: Training, canaries: Canaries, data: ExampleTable, num_steps: int
) -> tuple[float, float]:
    """Claimed epsilon, by RDP and exactly; the largest for any outcome of the coins."""
    steps = [
        on_data(training.budget.step, table) for table in (data, *_tables(canaries))
    ]
    budget = training.budget
    runs = [
        dataclasses.replace(budget, step=step).run(num_steps)
        for step in dict.fromkeys(steps)
    ]
    by_rdp, exactly = (
        max(float(epsilon(run, method=method, delta=budget.delta)) for run in runs)
        for method in ("rdp", "exact")
    )
    return by_rdp, exactly


def _tables(canaries: Canaries) -> tuple[ExampleTable, ExampleTable]:
    """The data with all canaries and with none: the largest and smallest sizes."""
    everyone = np.ones(canaries.number, bool)
    return canaries.data(everyone), canaries.data(~everyone)

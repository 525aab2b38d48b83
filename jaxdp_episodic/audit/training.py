"""Audits of real runs: canaries in the data of the trainer that users train with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.answers import epsilon
from jaxdp_episodic.accounting.step import GaussianStep
from jaxdp_episodic.audit.canaries import (
    Canaries,
    gradient_canaries,
    input_canaries,
)
from jaxdp_episodic.audit.canary_learner import CanaryLearner, recording
from jaxdp_episodic.audit.one_run import Guesses, best_guesses
from jaxdp_episodic.audit.probes import canary_losses
from jaxdp_episodic.audit.release import DELTAS, ReleaseAudit, score_bound
from jaxdp_episodic.audit.worst_case import log_likelihood_ratio, worst_case
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.sampling.designs import GroupedClasses
from jaxdp_episodic.sampling.draw import EpisodeSampler
from jaxdp_episodic.sampling.schemes import (
    MultistageSampling,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.training.budget import PrivacyBudget
from jaxdp_episodic.training.config import TrainingConfig, built_model
from jaxdp_episodic.training.run import plan
from jaxdp_episodic.training.trainer import Trainer

GRADIENT, INPUT = "gradient", "input"
KINDS = (GRADIENT, INPUT)
_CHOOSING = 0.3

OnStep = Callable[[int, int], None]
"""``on_step(taken, of)``, called after every step."""


@dataclass(frozen=True, eq=False)
class Training:
    """A run as an auditor needs it: what `Trainer` takes, before canaries go in.

    Attributes:
      learner: see `Trainer`, as all below.
      params: initial parameters.
      data: without canaries.
      budget: the claim: its step, its delta and its number of steps.
      shots: support examples.
      optimizer: of the run.
      l2_clip_norm: C.
      normalizer: or None.
      block_size: or None.
      make_trainer: the trainer, or one with a fault that an audit should find.
    """

    learner: Any
    params: Any
    data: ExampleTable
    budget: PrivacyBudget
    shots: int
    optimizer: optax.GradientTransformation
    l2_clip_norm: float
    normalizer: float | None = None
    block_size: int | None = None
    make_trainer: Callable[..., Trainer] = Trainer

    def trainer(
        self,
        data: ExampleTable,
        *,
        num_steps: int,
        learner: Any,
        params: Any,
        optimizer: optax.GradientTransformation,
        seed: int | None,
    ) -> Trainer:
        """Returns the trainer on other data, for so many steps with the same noise."""
        budget = self.budget
        budget = PrivacyBudget(
            on_data(budget.step, data),
            budget.epsilon,
            budget.delta,
            num_steps,
            num_steps,
        )
        return self.make_trainer(
            learner,
            params,
            data=data,
            budget=budget,
            shots=self.shots,
            optimizer=optimizer,
            l2_clip_norm=self.l2_clip_norm,
            normalizer=self.normalizer,
            block_size=self.block_size,
            seed=seed,
        )


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
        return self.guesses.epsilon > min(self.claimed_rdp, self.claimed_exact)


def training_of_config(
    config: TrainingConfig, base: Path | None = None, *, privacy_unit: str | None = None
) -> Training:
    """Returns the run of a training config, for audits.

    Args:
      config: the run; its step's noise is calibrated as for training.
      base: folder that paths in the config are relative to.
      privacy_unit: protect, and audit, another unit than the config's, at the noise
        of the config.
    """
    data = config.data.load("train", base)
    budget = plan(config, data)
    if not budget.is_private:
        raise ValueError(
            "epsilon must be finite for an audit, got inf: the run claims nothing"
        )
    step = budget.step
    sampler = EpisodeSampler(
        step.design, data.population, clip_unit=str(step.clip_unit)
    )
    ways = None if config.learner.is_regression else sampler.slot_shape[-2]
    learner, params = built_model(config, data.features.shape[1:], ways)
    if privacy_unit is not None:
        step = dataclasses.replace(step, privacy_unit=privacy_unit, small_units=None)
        budget = dataclasses.replace(budget, step=step)
    return Training(
        learner,
        params,
        data,
        budget,
        config.learner.shots,
        config.optimizer.build(budget.num_steps),
        config.l2_clip_norm,
        config.normalizer,
        config.block_size,
    )


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
      num_steps: fewer or more than the run's; the claim is about so many.
      confidence: of the lower bound.
      seed: of the canaries and coins. The training itself is never seeded.
      on_step: is called after every step.

    Raises:
      ValueError: more canaries than there are units for them, or a number out of range.
      NotImplementedError: input canaries for episodes with levels within.
    """
    _validation.choice("kind", kind, KINDS)
    steps = _num_steps(training, num_steps)
    generator = np.random.default_rng(seed)
    step = training.budget.step
    make = gradient_canaries if kind == GRADIENT else input_canaries
    canaries = make(training.data, step, num_canaries, generator)
    is_in = generator.random(canaries.number) < 0.5
    data = canaries.data(is_in)
    attack = _gradient_scores if kind == GRADIENT else _input_scores
    scores = attack(training, canaries, data, steps, generator, on_step)
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
    are so many independent draws of the step's mechanism in its two worlds. What is
    tested is the whole of `Trainer.step`: sampler, blocks, clipping, noise, keys.

    Args:
      training: the run.
      num_draws: steps of each of the two runs, at least 100.
      deltas: at which the claim is tested; all bounds hold together.
      confidence: of the bounds.
      seed: chooses the canary. The training itself is never seeded.
      on_step: is called after every step.
    """
    number = _validation.integer_array("num_draws", num_draws, minimum=100)
    if number.ndim:
        raise ValueError(f"num_draws must be one number, got {num_draws!r}")
    generator = np.random.default_rng(seed)
    canaries = gradient_canaries(training.data, training.budget.step, 1, generator)
    steps = int(number)
    ratios = []
    for place, world in enumerate((True, False)):
        data = canaries.data(np.asarray([world]))

        def tell(taken: int, _: int, place: int = place) -> None:
            if on_step is not None:
                on_step(place * steps + taken, 2 * steps)

        found = _released_ratios(training, canaries, data, steps, tell)
        ratios.append(found[:, 0])
    choosing = int(_CHOOSING * steps)
    pilot = ratios[0][:choosing], ratios[1][:choosing]
    rest = ratios[0][choosing:], ratios[1][choosing:]
    bounds = tuple(
        score_bound(
            pilot, rest, delta=delta, confidence=confidence, share=1 / len(deltas)
        )
        for delta in deltas
    )
    claimed = np.max(
        [
            epsilon(on_data(training.budget.step, table), num_steps=1, delta=deltas)
            for table in _tables(canaries)
        ],
        axis=0,
    )
    return ReleaseAudit(claimed, bounds)


def on_data(step: GaussianStep, data: ExampleTable) -> GaussianStep:
    """Returns the step with the sizes that the data have, where it states sizes.

    A unit that is out is empty. Sizes that the step states of levels within the privacy
    unit do not hold then, and its privacy does not rest on them: they are left out.
    """
    if step.population is not None:
        return dataclasses.replace(step, population=data.population)
    design = step.sampling
    if isinstance(design, GroupedClasses):
        if design.examples.name == step.privacy_unit:
            return step
        within = dataclasses.replace(design.examples, population=None)
        return dataclasses.replace(
            step, sampling=dataclasses.replace(design, examples=within)
        )
    if not isinstance(design, MultistageSampling):
        return step
    names = [level.name for level in design.levels]
    depth = names.index(str(step.privacy_unit)) + 1
    within = map(_without_size, design.levels[depth:])
    return dataclasses.replace(
        step, sampling=MultistageSampling(*design.levels[:depth], *within)
    )


def _without_size(level: Poisson | WithoutReplacement) -> Poisson | WithoutReplacement:
    if isinstance(level, WithoutReplacement):
        return dataclasses.replace(level, population=None)
    return level


def _gradient_scores(
    training: Training,
    canaries: Canaries,
    data: ExampleTable,
    num_steps: int,
    _: np.random.Generator,
    on_step: OnStep | None,
) -> np.ndarray:
    """Each canary's sum of the steps' log-likelihood ratios."""
    return _released_ratios(training, canaries, data, num_steps, on_step).sum(axis=0)


def _released_ratios(
    training: Training,
    canaries: Canaries,
    data: ExampleTable,
    num_steps: int,
    on_step: OnStep | None,
) -> np.ndarray:
    """(num_steps, canaries) log-likelihood ratios of what every step releases."""
    learner = CanaryLearner(
        training.learner,
        training.data.features.shape[1:],
        str(training.data.features.dtype),
        canaries.number,
        training.l2_clip_norm,
    )
    trainer = training.trainer(
        data,
        num_steps=num_steps,
        learner=learner,
        params=learner.params(training.params),
        optimizer=recording(training.optimizer),
        seed=None,
    )
    step = trainer.budget.step
    deviation = training.l2_clip_norm * float(step.noise_multiplier)
    branches = worst_case(step)
    rows = []
    for taken in range(1, num_steps + 1):
        trainer.step()
        state: Any = trainer.state.optimizer_state
        released = np.asarray(state.canaries, np.float64) * trainer.normalizer
        rows.append(log_likelihood_ratio(branches, released / deviation))
        if on_step is not None:
            on_step(taken, num_steps)
    return np.stack(rows)


def _input_scores(
    training: Training,
    canaries: Canaries,
    data: ExampleTable,
    num_steps: int,
    generator: np.random.Generator,
    on_step: OnStep | None,
) -> np.ndarray:
    """How much each canary's loss fell in the run."""
    trainer = training.trainer(
        data,
        num_steps=num_steps,
        learner=training.learner,
        params=training.params,
        optimizer=training.optimizer,
        seed=None,
    )
    for taken in range(1, num_steps + 1):
        trainer.step()
        if on_step is not None:
            on_step(taken, num_steps)
    before, after = canary_losses(
        training.learner,
        (training.params, trainer.params),
        canaries,
        slot_shape=trainer.sampler.slot_shape,
        shots=training.shots,
        generator=generator,
    )
    return before - after


def _claims(
    training: Training, canaries: Canaries, data: ExampleTable, num_steps: int
) -> tuple[float, float]:
    """Claimed epsilon, by RDP and exactly; the largest for any outcome of the coins."""
    steps = [
        on_data(training.budget.step, table) for table in (data, *_tables(canaries))
    ]
    distinct = list(dict.fromkeys(steps))
    run: dict[str, Any] = {"num_steps": num_steps, "delta": training.budget.delta}
    by_rdp, exactly = (
        max(float(epsilon(step, method=method, **run)) for step in distinct)
        for method in ("rdp", "exact")
    )
    return by_rdp, exactly


def _tables(canaries: Canaries) -> tuple[ExampleTable, ExampleTable]:
    """The data with all canaries and with none: the largest and smallest sizes."""
    everyone = np.ones(canaries.number, bool)
    return canaries.data(everyone), canaries.data(~everyone)


def _num_steps(training: Training, num_steps: int | None) -> int:
    if num_steps is None:
        return training.budget.num_steps
    array = _validation.integer_array("num_steps", num_steps, minimum=1)
    if array.ndim:
        raise ValueError(f"num_steps must be one number, got {num_steps!r}")
    return int(array)

"""A run with its canaries in the data, or out, and what its releases say of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxdp_episodic.accounting.budget import PrivacyBudget
from jaxdp_episodic.audit.canaries import Canaries, CanaryLearner, recording
from jaxdp_episodic.audit.run_tables import blocks_of_run
from jaxdp_episodic.audit.worst_case import log_likelihood_ratio, worst_case
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.describe.designs import GroupedClasses, epoch_scheme
from jaxdp_episodic.describe.schemes import (
    MultistageSampling,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.describe.step import GaussianStep
from jaxdp_episodic.draw.sampler import EpisodeSampler
from jaxdp_episodic.training.assemble import Tables, plan
from jaxdp_episodic.training.config import TrainingConfig, built_model
from jaxdp_episodic.training.episode import Block, block_of, to_episode
from jaxdp_episodic.training.trainer import Trainer

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
      noise: "gaussian" or "discrete".
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
    noise: str = "gaussian"
    make_trainer: Callable[..., Trainer] = Trainer

    def trainer(
        self,
        data: ExampleTable,
        *,
        num_steps: int,
        learner: Any = None,
        params: Any = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Trainer:
        """Returns the unseeded trainer on other data, with the same noise.

        Args:
          data: the canaries' table, with some of them in.
          num_steps: of the run.
          learner: in place of the run's, as are ``params`` and ``optimizer``.
          params: None for the run's.
          optimizer: None for the run's.
        """
        budget = dataclasses.replace(
            self.budget,
            step=on_data(self.budget.step, data),
            num_steps=num_steps,
            permitted_steps=num_steps,
        )
        return self.make_trainer(
            learner or self.learner,
            self.params if params is None else params,
            data=data,
            budget=budget,
            shots=self.shots,
            optimizer=optimizer or self.optimizer,
            l2_clip_norm=self.l2_clip_norm,
            normalizer=self.normalizer,
            block_size=self.block_size,
            noise=self.noise,
            seed=None,
        )


def training_of_config(
    config: TrainingConfig, base: Path | None = None, *, privacy_unit: str | None = None
) -> Training:
    """Returns the run of a training config, for audits.

    Args:
      config: the run; its step's noise is calibrated as for training.
      base: folder that paths in the config are relative to.
      privacy_unit: protect, and audit, another unit than the config's, at the noise
        of the config.

    Raises:
      NotImplementedError: a run that starts with private statistics.
    """
    data = Tables(config, base).load("train")
    budget = plan(config, data)
    if budget.before:
        raise NotImplementedError(
            "an audit of a run covers gradient steps, got one that starts with private "
            "statistics; audit their releases by audit_release"
        )
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
        float(config.l2_clip_norm or 1.0),
        config.normalizer,
        config.block_size,
        config.noise,
    )


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
    within = (
        dataclasses.replace(level, population=None)
        if isinstance(level, WithoutReplacement)
        else level
        for level in design.levels[depth:]
    )
    return dataclasses.replace(
        step, sampling=MultistageSampling(*design.levels[:depth], *within)
    )


def released_ratios(
    training: Training,
    canaries: Canaries,
    data: ExampleTable,
    num_steps: int,
    on_step: OnStep | None,
) -> np.ndarray:
    """Takes steps with gradient canaries, and returns what each release says of them.

    Args:
      training: the run.
      canaries: of `gradient_canaries`.
      data: the canaries' table, with some of them in.
      num_steps: to be taken, unseeded.
      on_step: is called after every step.

    Returns:
      (num_steps, canaries) log-likelihood ratios, large where the canary seems to be
      in; of epochs one row a block of them. An audit stands with any score; this one is
      strong.
    """
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
    )
    step = trainer.budget.step
    deviation = training.l2_clip_norm * float(step.noise_multiplier)
    released = []
    for _ in _steps_of(trainer, on_step):
        state: Any = trainer.state.optimizer_state
        sums = np.asarray(state.canaries, np.float64) * trainer.normalizer
        released.append(sums / deviation)
    is_shuffled = isinstance(epoch_scheme(step.design), ShuffledEpochs)
    if is_shuffled and canaries.number == 1:
        # All of a batch but the canary contribute the opposite.
        batch = trainer.sampler.expected_units / float(step.noise_multiplier)
        released = [release + batch for release in released]
    branches, rows, start = worst_case(step), [], 0
    for length, taken in blocks_of_run(step, num_steps):
        part = np.stack(released[start : start + taken], axis=-1)
        part = part if length > 1 else part[..., 0]
        block = branches._replace(block=length, taken=taken)
        rows.append(log_likelihood_ratio(block, part))
        start += taken
    return np.stack(rows)


def _steps_of(trainer: Trainer, on_step: OnStep | None) -> Iterator[int]:
    """Takes all steps of a run, one by one."""
    number = trainer.budget.num_steps
    for taken in range(1, number + 1):
        trainer.step()
        yield taken
        if on_step is not None:
            on_step(taken, number)


def falls_of_losses(
    training: Training,
    canaries: Canaries,
    data: ExampleTable,
    num_steps: int,
    generator: np.random.Generator,
    on_step: OnStep | None,
) -> np.ndarray:
    """Trains with input canaries; returns (canaries,) by how much each one's loss fell.

    Arguments are those of `released_ratios`, with canaries of `input_canaries`;
    ``generator`` chooses their companions when the model is asked about them.
    """
    trainer = training.trainer(data, num_steps=num_steps)
    for _ in _steps_of(trainer, on_step):
        pass
    before, after = canary_losses(
        training.learner,
        (training.params, trainer.params),
        canaries,
        slot_shape=trainer.sampler.slot_shape,
        shots=training.shots,
        generator=generator,
    )
    return before - after


# Each canary is asked about among several random companions.
_CONTEXTS = 8


def canary_losses(
    learner: Any,
    params: Sequence[Any],
    canaries: Canaries,
    *,
    slot_shape: tuple[int, ...],
    shots: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """Returns each canary's loss under each of several parameters.

    An episode is made around every canary, whether it was in or out: an example is its
    only query, a larger unit is learned from and asked by its own examples. The mean
    over a few episodes with other companions.

    Args:
      learner: of the run.
      params: several parameters.
      canaries: with all contents.
      slot_shape: of the run's sampler.
      shots: support examples.
      generator: picks the companions.

    Returns:
      (len(params), number) float64.

    Raises:
      NotImplementedError: clip units that are more than one episode.
    """
    axes = 1 if learner.is_regression else 2
    if len(slot_shape) != axes:
        raise NotImplementedError(
            "input canaries need clip units that are one episode (of slots "
            f"{'(example,)' if axes == 1 else '(class, example)'}), got slots of shape "
            f"{slot_shape}"
        )
    total = np.zeros((len(params), canaries.number))
    slots_of = _task if axes == 1 else _classes
    make = functools.partial(slots_of, canaries.table.class_places, generator)
    groups = [canaries.rows[canaries.owner == c] for c in range(canaries.number)]

    @jax.jit
    def losses(one: Any, block: Block) -> Any:
        def loss(unit: Block) -> Any:
            episode = to_episode(unit, shots=shots, is_regression=learner.is_regression)
            return learner.loss(one, episode)

        return jax.lax.map(loss, block)

    for _ in range(_CONTEXTS):
        slots = np.stack([make(rows, slot_shape, shots) for rows in groups])
        block = block_of(canaries.table, slots, slots >= 0, np.ones(len(slots)))
        for place, one in enumerate(params):
            total[place] += np.asarray(losses(one, block), np.float64)
    return total / _CONTEXTS


def _task(
    places: np.ndarray,
    generator: np.random.Generator,
    rows: np.ndarray,
    slot_shape: tuple[int, ...],
    shots: int,
) -> np.ndarray:
    """(n,) rows of one task, -1 where a slot stays empty; ``rows`` are the canary's."""
    task = np.flatnonzero(places == places[rows[0]])
    slots = np.full(slot_shape, -1)
    if len(rows) == 1 and len(task) > 1:  # an example: learned from the others
        support = generator.permutation(np.setdiff1d(task, rows))[:shots]
        slots[: len(support)] = support
        slots[shots] = rows[0]
    else:
        own = generator.permutation(rows)[: slot_shape[0]]
        slots[: len(own)] = own
    return slots


def _classes(
    places: np.ndarray,
    generator: np.random.Generator,
    rows: np.ndarray,
    slot_shape: tuple[int, ...],
    shots: int,
) -> np.ndarray:
    """(ways, n) rows of an episode of classes, likewise."""
    ways, number = slot_shape
    own = np.unique(places[rows])
    is_example = len(rows) == 1 and np.sum(places == own[0]) > 1
    asked = generator.permutation(own)[:ways]
    others = np.setdiff1d(np.unique(places), own)
    fill = generator.permutation(others)[: ways - len(asked)]
    slots = np.full(slot_shape, -1)
    for way, class_ in enumerate([*asked, *fill]):
        members = np.flatnonzero(places == class_)
        if is_example:
            members = np.setdiff1d(members, rows)
        most = shots if is_example or way >= len(asked) else number
        members = generator.permutation(members)[:most]
        slots[way, : len(members)] = members
    if is_example:
        slots[0, shots] = rows[0]
    return slots

"""A run with its canaries in the data, or out, and what its releases say of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optax

from jaxdp_episodic.accountant.describe.designs import IndependentEpisodes, epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.trainer.audit.canaries import Canaries, CanaryLearner, recording
from jaxdp_episodic.trainer.audit.canary_losses import canary_losses
from jaxdp_episodic.trainer.audit.simulation import log_likelihood_ratio
from jaxdp_episodic.trainer.audit.worst_case import blocks_of_run, worst_case
from jaxdp_episodic.trainer.config.training_config import DISCRETE, TrainingConfig
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run.assemble import Tables, run_parts, statistics_of
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics

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
      l2_clip_norm: C; of the first step, if it follows a quantile.
      normalizer: or None.
      block_size: or None.
      noise: "discrete" or "gaussian".
      clipping: or None.
      start: makes the private statistics of a table that the run begins with, the
        budget's ``before``; None: it does not.
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
    noise: str = DISCRETE
    clipping: ClippingConfig | None = None
    start: Callable[[ExampleTable], PrivateStatistics] | None = None
    make_trainer: Callable[..., Trainer] = Trainer

    def trainer(self, data: ExampleTable, *, num_steps: int) -> Trainer:
        """Returns the unseeded trainer on the canaries' table, with the same noise."""
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        make, start = parts.pop("make_trainer"), self.start
        parts |= {
            "data": data,
            "budget": dataclasses.replace(
                self.budget,
                step=on_data(self.budget.step, data),
                num_steps=num_steps,
                permitted_steps=num_steps,
            ),
            "start": None if start is None else start(data),
        }
        return make(parts.pop("learner"), parts.pop("params"), **parts)


def training_of_config(
    config: TrainingConfig, base: Path | None = None, *, privacy_unit: str | None = None
) -> Training:
    """Returns the run of a training config, for audits, its noise calibrated.

    Paths in the config are relative to ``base``. ``privacy_unit`` is another unit than
    the config's, which is then claimed to be protected by the config's noise.

    Raises:
      NotImplementedError: another privacy unit than the config's for a run that begins
        with private statistics.
      ValueError: a run that claims nothing.
    """
    data = Tables(config, base).load("train")
    parts = run_parts(config, data)
    budget, step = parts["budget"], parts["budget"].step
    if budget.before and privacy_unit not in (None, step.privacy_unit):
        raise NotImplementedError(
            "a run that begins with private statistics is audited for the unit that "
            f"it protects, {step.privacy_unit!r}, got {privacy_unit!r}"
        )
    if not budget.is_private:
        raise ValueError(
            "epsilon must be finite for an audit, got inf: the run claims nothing"
        )
    if privacy_unit is not None:
        step = dataclasses.replace(step, privacy_unit=privacy_unit, small_units=None)
        parts["budget"] = dataclasses.replace(budget, step=step)
    if parts["start"] is not None:
        parts["start"] = functools.partial(statistics_of, config, step)
    return Training(data=data, **parts)


class MarkedStatistics:
    """Statistics of a table whose rows end with marks, which only the learner sees.

    All but the data and the projected table is that of the statistics without marks.
    """

    def __init__(
        self, make: Callable[[ExampleTable], PrivateStatistics], data: ExampleTable
    ) -> None:
        self.data = data
        self._inner = make(data.with_features(data.features[:, :-1]))
        self.dimensions = self._inner.dimensions + 1
        self._made: tuple[Any, ExampleTable] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def table(self, state: Any) -> ExampleTable:
        """Returns the projected features, then the marks; made once for a state."""
        seen = self._inner.table(state)
        if self._made is None or self._made[0] is not seen:
            rows = np.concatenate([seen.features, self.data.features[:, -1:]], axis=1)
            self._made = seen, seen.with_features(rows)
        return self._made[1]


def on_data(step: GaussianStep, data: ExampleTable) -> GaussianStep:
    """Returns the step with the sizes that the data have, where it states sizes.

    A unit that is out is empty: sizes that the step states of levels within the privacy
    unit do not hold then. Its privacy does not rest on them, and they are left out.
    """
    if step.population is not None:
        return dataclasses.replace(step, population=data.population)
    design, unit = step.design, str(step.privacy_unit)
    if isinstance(design, IndependentEpisodes) or step.privacy_unit == PERSON:
        return step
    within = design.level_names[design.level_names.index(unit) + 1 :]
    for scheme in design.schemes:
        if scheme.name in within and isinstance(scheme, WithoutReplacement):
            changed = dataclasses.replace(scheme, population=None)
            design = design.with_scheme(changed)
    return dataclasses.replace(step, sampling=design)


def released_ratios(
    training: Training,
    canaries: Canaries,
    data: ExampleTable,
    num_steps: int,
    on_step: OnStep | None,
) -> np.ndarray:
    """Takes steps with gradient canaries, and returns scores of each release.

    Args:
      training: the run.
      canaries: of `gradient_canaries`.
      data: the canaries' table, with some of them in.
      num_steps: to be taken, unseeded.
      on_step: is called after every step.

    Returns:
      (gradient steps, canaries) log-likelihood ratios, large where the canary seems to
      be in; of epochs one row a block of them. An audit is valid with any score; this
      one is strong, but ignores private statistics.
    """
    statistics: Any = None
    shape = training.data.features.shape[1:]
    kind = str(training.data.features.dtype)
    if training.start is not None:
        statistics = MarkedStatistics(training.start, data)
        shape, kind = (statistics.dimensions - 1,), "float32"
    longest = training.l2_clip_norm
    if training.clipping is not None:
        _, longest = training.clipping.bounds(longest)
    learner = CanaryLearner(training.learner, shape, kind, canaries.number, longest)
    marked = dataclasses.replace(
        training,
        learner=learner,
        params=learner.params(training.params),
        optimizer=recording(training.optimizer),
        start=None if statistics is None else (lambda _: statistics),
    )
    trainer = marked.trainer(data, num_steps=num_steps)
    step = trainer.budget.step
    deviation = trainer.noise_deviation
    released = []
    first = len(training.budget.before)
    for taken in _steps_of(trainer, on_step):
        if taken <= first:
            continue
        state: Any = trainer.state.optimizer_state
        sums = np.asarray(state.canaries, np.float64) * trainer.normalizer
        released.append(sums / deviation)
        deviation = trainer.noise_deviation  # of the next one
    is_shuffled = isinstance(epoch_scheme(step.design), ShuffledEpochs)
    if is_shuffled and canaries.number == 1:
        # All of a batch but the canary contribute the opposite.
        batch = trainer.sampler.expected_units / float(step.noise_multiplier)
        released = [release + batch for release in released]
    if step.privacy_unit == PERSON:
        # The more of her, the larger the sums; nobody else is on her axis.
        return np.stack(released)
    branches, rows, later = worst_case(step), [], iter(released)
    for length, taken in blocks_of_run(step, num_steps - first):
        part = np.stack(list(itertools.islice(later, taken)), axis=-1)
        part = part if length > 1 else part[..., 0]
        block = branches._replace(block=length, taken=taken)
        rows.append(log_likelihood_ratio(block, part))
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
    """Trains with input canaries; returns the fall of each one's loss, (canaries,).

    Arguments are those of `released_ratios`, with canaries of `input_canaries`;
    ``generator`` chooses the companions in the episodes of each loss.
    """
    trainer = training.trainer(data, num_steps=num_steps)
    for _ in _steps_of(trainer, on_step):
        pass
    learner, first = training.learner, training.params
    if training.start is not None:
        statistics = training.start(data)
        learner = statistics.learner(learner)
        first = {"start": statistics.initial().released(), "model": first}
    before, after = canary_losses(
        learner,
        (first, trainer.params),
        canaries,
        slot_shape=trainer.sampler.slot_shape,
        shots=training.shots,
        generator=generator,
    )
    return before - after

"""Trains privately on episodes, and stops before the target epsilon is exceeded."""

from __future__ import annotations

import dataclasses
import secrets as system_entropy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.step import STEP, GaussianStep
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.sampling.designs import GroupedClasses, IndependentEpisodes
from jaxdp_episodic.sampling.draw import EpisodeSampler, step_generator
from jaxdp_episodic.training.blocks import (
    Block,
    default_block_size,
    make_blocks,
    prefetched,
)
from jaxdp_episodic.training.budget import Ledger, PrivacyBudget
from jaxdp_episodic.training.checkpoint import (
    Checkpoints,
    Secrets,
    Snapshot,
    as_arrays,
)
from jaxdp_episodic.training.contribution import contribution_loss
from jaxdp_episodic.training.evaluation import Evaluation
from jaxdp_episodic.training.private_gradient import PrivateGradient
from jaxdp_episodic.training.run_log import HELD_OUT, PRIVATE, RunLog

# Gradients of single examples are small and quick: many side by side.
_SINGLE_EXAMPLES_AT_ONCE = 64


class TrainingState(NamedTuple):
    """What changes from step to step.

    Attributes:
      params: pytree of float arrays.
      optimizer_state: of the optax optimizer.
    """

    params: Any
    optimizer_state: Any


class StepProgress(NamedTuple):
    """What a progress display is told after every step.

    Attributes:
      step: steps taken and charged.
      num_steps: steps that the run takes.
      epsilon: spent so far, nats.
      record: the log record of the step, private compartments included.
    """

    step: int
    num_steps: int
    epsilon: float
    record: Mapping[str, Any]


class Trainer:
    """One private run: the draws, the clipped and noised steps, and their ledger.

    The step in ``budget`` is the description that is accounted, and its ``sampling`` is
    the very object that draws: there is no second copy of a rate. Each call of `step`
    charges the budget first, then draws, clips, sums, adds noise and updates.

    Args:
      learner: `ProtoNet`, `MAML`, `ANIL`, `Supervised`, or anything with their methods.
      params: the initial parameters, a pytree. They must not depend on private data.
      data: the private training data.
      budget: of `plan_budget`, for a step with ``population=data.population``; or
        without one, its ``sampling`` then stating public bounds of the sizes, which
        the data must keep.
      shots: support examples, of each class or of the task; 0 for `Supervised`.
      optimizer: an optax optimizer; it sees noised gradients only.
      l2_clip_norm: C > 0, bound of each clip unit's contribution.
      normalizer: public constant > 0 by which the noised sum is divided. Default: the
        mean number of clip units a step, where that is public.
      block_size: clip units that are worked off in one go; memory grows with it, the
        result does not depend on it. Default: enough for almost every draw.
      devices: over which a block is spread. Default: all local devices.
      seed: None takes draws and noise from the operating system's entropy. A fixed seed
        makes the run repeatable and *not private*: whoever knows it can subtract the
        noise.
      settings: further plain values that must not change when a run is resumed, such as
        a description of the optimizer.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range; a budget for another population; a clip unit
        that does not contain what interacts.
    """

    def __init__(
        self,
        learner: Any,
        params: Any,
        *,
        data: ExampleTable,
        budget: PrivacyBudget,
        shots: int,
        optimizer: optax.GradientTransformation,
        l2_clip_norm: float,
        normalizer: float | None = None,
        block_size: int | None = None,
        devices: Sequence[Any] | None = None,
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        _check_population(budget.step, data)
        self.learner, self.data, self.budget = learner, data, budget
        self.l2_clip_norm = _positive("l2_clip_norm", l2_clip_norm)
        step = budget.step
        self.sampler = EpisodeSampler(
            step.design, data.population, clip_unit=str(step.clip_unit)
        )
        loss = contribution_loss(learner, self.sampler.slot_shape, shots=shots)
        self.normalizer = _normalizer(normalizer, step, self.sampler)
        self._devices = list(jax.local_devices() if devices is None else devices)
        self._block_size = _block_size(block_size, self.sampler, len(self._devices))
        couples = getattr(learner, "couples_examples", True)
        self._gradient = PrivateGradient(
            loss,
            devices=self._devices,
            units_at_once=1 if couples else _SINGLE_EXAMPLES_AT_ONCE,
        )
        self._optimizer = optimizer
        self._secrets = _secrets(seed)
        self.ledger = Ledger(budget)
        params = as_arrays(params)
        self.state = TrainingState(params, as_arrays(optimizer.init(params)))
        self._update = jax.jit(self._apply_gradient)
        self.is_seeded = seed is not None
        self.run = {
            "step": _described(step),
            "target": {
                "epsilon": str(budget.epsilon),
                "delta": budget.delta,
                "num_steps": budget.num_steps,
            },
            "l2_clip_norm": self.l2_clip_norm,
            "normalizer": self.normalizer,
            "shots": shots,
            "learner": _plain_fields(learner),
            "data": data.fingerprint,
            "seed": "from the operating system" if seed is None else seed,
            "settings": dict(settings or {}),
        }

    @property
    def params(self) -> Any:
        """The parameters as they stand."""
        return self.state.params

    @property
    def num_steps_taken(self) -> int:
        """Steps charged so far; every one of them was taken."""
        return self.ledger.charged

    def step(self, blocks: list[Block] | None = None) -> dict[str, Any]:
        """Charges and takes one step; returns its private diagnostics.

        Args:
          blocks: what `draw_blocks` made for this step; None makes them here.

        Returns:
          Realised number of units, mean loss, mean norm before clipping and the share
          clipped. They come from private data without noise: see `run_log`.

        Raises:
          BudgetExhaustedError: the step would exceed the target; nothing happened.
        """
        number = self.ledger.charge()
        blocks = self.draw_blocks(number) if blocks is None else blocks
        key = jax.random.fold_in(
            jax.random.wrap_key_data(jax.numpy.asarray(self._secrets.noise_key)), number
        )
        gradient, diagnostics = self._gradient(
            self.state.params,
            blocks,
            key,
            l2_clip_norm=self.l2_clip_norm,
            noise_multiplier=float(self.budget.step.noise_multiplier),
            normalizer=self.normalizer,
        )
        self.state = self._update(self.state, gradient)
        return diagnostics

    def draw_blocks(self, step: int) -> list[Block]:
        """Returns the blocks of a step, a function of the run's entropy and ``step``.

        Drawing them twice is the same draw, so a resumed run repeats what it repeats.
        """
        generator = step_generator(self._secrets.sampler_entropy, step)
        return make_blocks(
            self.sampler.draw(generator),
            self.data,
            block_size=self._block_size,
            num_shards=len(self._devices),
        )

    def train(
        self,
        folder: Path,
        *,
        evaluations: Mapping[str, Evaluation] | None = None,
        evaluate_every: int | None = None,
        checkpoint_every: int = 100,
        log_every: int = 1,
        on_step: Callable[[StepProgress], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Takes all steps of the budget; leaves a log and checkpoints in ``folder``.

        Goes on where the run stands: call `resume` first to go on with a checkpoint.
        An interruption (Ctrl-C) commits a checkpoint before it is raised again.

        Args:
          folder: made if missing; ``log.jsonl`` and ``checkpoints/`` in it. Both are
            private.
          evaluations: by name ("validation"), on held-out data; run before the first
            step, every ``evaluate_every`` steps and after the last.
          evaluate_every: None evaluates at the two ends only.
          checkpoint_every: steps between checkpoints; there is one after the last step.
          log_every: steps between log records.
          on_step: is called after every logged step.

        Returns:
          The log's records, those of earlier parts of a resumed run not included.
        """
        folder.mkdir(parents=True, exist_ok=True)
        start, last = self.num_steps_taken, self.budget.num_steps
        log_path = folder / "log.jsonl"
        records: list[dict[str, Any]] = []
        spent = _spent(self.budget, start, last, log_every)
        with (
            Checkpoints(folder / "checkpoints") as checkpoints,
            RunLog(log_path, keep_through=start) as log,
        ):

            def note(record: dict[str, Any]) -> None:
                records.append(record)
                log.write(record)

            def commit() -> None:
                log.sync()
                if checkpoints.latest != self.num_steps_taken:
                    checkpoints.save(self.snapshot())

            if checkpoints.latest is None:
                note({"step": 0, "epsilon": 0.0, **self._evaluate(evaluations)})
                commit()
            try:
                for blocks in prefetched(self.draw_blocks, start + 1, last):
                    begun = time.perf_counter()
                    diagnostics = self.step(blocks)
                    step = self.num_steps_taken
                    at_end = step == last
                    held_out = {}
                    if at_end or (evaluate_every and step % evaluate_every == 0):
                        held_out = self._evaluate(evaluations)
                    if step in spent or held_out:
                        private: dict[str, Any] = dict(diagnostics)
                        private["seconds"] = time.perf_counter() - begun
                        epsilon = spent.get(step)
                        if epsilon is None:
                            epsilon = float(self.budget.spent(step))
                        note(
                            {
                                "step": step,
                                "epsilon": epsilon,
                                PRIVATE: private,
                                **held_out,
                            }
                        )
                        if on_step is not None:
                            on_step(StepProgress(step, last, epsilon, records[-1]))
                    if at_end or step % checkpoint_every == 0:
                        commit()
            except KeyboardInterrupt:
                commit()
                raise
        return records

    def snapshot(self) -> Snapshot:
        """Returns the run as it stands, secrets included."""
        return Snapshot(self.state, self.num_steps_taken, self._secrets, self.run)

    def resume(self, folder: Path) -> int:
        """Takes up the latest checkpoint in ``folder``; returns its number of steps.

        From there on the run is bit for bit the one that was interrupted, on the same
        machine and devices.

        Raises:
          FileNotFoundError: there is none.
          RunMismatchError: it is of a run with other settings; the message says which.
          ValueError: it is damaged.
        """
        path = folder / "checkpoints"
        if not path.is_dir():
            raise FileNotFoundError(f"no complete checkpoint in {path}")
        with Checkpoints(path) as checkpoints:
            snapshot = checkpoints.restore(self.state, self.run)
        self.state = TrainingState(*snapshot.state)
        self._secrets = snapshot.secrets
        self.ledger = Ledger(self.budget, charged=snapshot.charged_steps)
        return snapshot.charged_steps

    def _evaluate(self, evaluations: Mapping[str, Evaluation] | None) -> dict[str, Any]:
        if not evaluations:
            return {}
        return {
            HELD_OUT: {
                name: evaluation(self.learner, self.state.params)._asdict()
                for name, evaluation in evaluations.items()
            }
        }

    def _apply_gradient(self, state: TrainingState, gradient: Any) -> TrainingState:
        # Optax mixes types; a caller's strict promotion is about the caller's code.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = self._optimizer.update(
                gradient, state.optimizer_state, state.params
            )
        return TrainingState(
            optax.apply_updates(state.params, updates), optimizer_state
        )


def _check_population(step: GaussianStep, data: ExampleTable) -> None:
    """Refuses a budget for other sizes; public bounds the sampler holds to the data."""
    if step.population is not None and step.population != data.population:
        raise ValueError(
            "budget must be planned for the step with population=data.population (or "
            "public bounds and no population), so that the units that are drawn are "
            f"those that are accounted; got {step.population!r} against "
            f"{data.population!r}"
        )


def _normalizer(
    value: float | None, step: GaussianStep, sampler: EpisodeSampler
) -> float:
    """The divisor of the noised sum: a public number, never the realised count."""
    if value is not None:
        return _positive("normalizer", value)
    names = step.design.level_names
    clip, unit = step.clip_unit, step.privacy_unit
    episodic = isinstance(step.design, GroupedClasses | IndependentEpisodes)
    above = clip == STEP or episodic or names.index(str(clip)) < names.index(str(unit))
    if not above and step.neighboring_relation == "add_remove":
        raise ValueError(
            "normalizer must be given: the mean number of clip units a step depends on "
            f"how many {unit!r} units there are, which is private under add_remove; "
            "give a public guess of it"
        )
    return max(sampler.expected_units, 1e-6)


def _block_size(value: int | None, sampler: EpisodeSampler, num_devices: int) -> int:
    if value is None:
        return default_block_size(sampler, num_devices)
    array = _validation.integer_array("block_size", value, minimum=1)
    return num_devices * -(-int(array) // num_devices)


def _positive(name: str, value: Any) -> float:
    array = _validation.positive_array(name, value)
    if array.ndim:
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(array)


def _secrets(seed: int | None) -> Secrets:
    if seed is None:
        key = np.frombuffer(system_entropy.token_bytes(8), np.uint32)
        return Secrets(system_entropy.randbits(256), key)
    entropy = int(_validation.integer_array("seed", seed, minimum=0))
    sampler, noise = np.random.SeedSequence(entropy).spawn(2)
    words = sampler.generate_state(8, np.uint32)
    return Secrets(
        int.from_bytes(words.tobytes(), "little"), noise.generate_state(2, np.uint32)
    )


def _spent(
    budget: PrivacyBudget, start: int, last: int, log_every: int
) -> dict[int, float]:
    """Epsilon after each step that is logged, in one vectorized call."""
    steps = np.arange(start + 1, last + 1)
    steps = steps[(steps % log_every == 0) | (steps == last)]
    if not steps.size:
        return {}
    spent = np.asarray(budget.spent(steps))
    return dict(zip(steps.tolist(), spent.tolist(), strict=True))


def _described(step: GaussianStep) -> dict[str, Any]:
    """The step without its population, which the data's fingerprint stands for."""
    return {
        "sampling": step.design.to_dict(),
        "noise_multiplier": step.noise_multiplier,
        "clip_unit": step.clip_unit,
        "privacy_unit": step.privacy_unit,
        "neighboring_relation": step.neighboring_relation,
        "small_units": step.small_units,
    }


def _plain_fields(learner: Any) -> dict[str, Any]:
    """A learner's type and those of its fields that are plain values."""
    plain: dict[str, Any] = {"type": type(learner).__name__}
    if dataclasses.is_dataclass(learner):
        for field in dataclasses.fields(learner):
            value = getattr(learner, field.name)
            if isinstance(value, bool | int | float | str):
                plain[field.name] = value
    return plain

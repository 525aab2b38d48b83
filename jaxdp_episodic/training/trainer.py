"""Trains privately on episodes, and stops before the target epsilon is exceeded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.budget import PrivacyBudget
from jaxdp_episodic.data.stored_features import StoredFeatures
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.draw.generators import step_generator
from jaxdp_episodic.draw.sampler import EpisodeSampler
from jaxdp_episodic.requests.training_config import NOISES
from jaxdp_episodic.training import checks, episode, run_files
from jaxdp_episodic.training.checkpoint import (
    TrainingState,
    as_arrays,
    initial_state,
    new_secrets,
    updater,
)
from jaxdp_episodic.training.description import (
    described_environment,
    described_run,
    described_types,
)
from jaxdp_episodic.training.evaluation import Evaluation, evaluated
from jaxdp_episodic.training.ledger import create_ledger
from jaxdp_episodic.training.loop import take_all_steps
from jaxdp_episodic.training.private_gradient import (
    PrivateGradient,
    checked_noise,
)
from jaxdp_episodic.training.processes import all_processes
from jaxdp_episodic.training.run_files import HELD_OUT, StepProgress
from jaxdp_episodic.training.standing import Standing
from jaxdp_episodic.training.statistics import PrivateStatistics

_SINGLE_EXAMPLES_AT_ONCE = 64  # small and quick gradients: many side by side
_EVERY = ("evaluate_every", "checkpoint_every", "log_every")


class Trainer(Standing):
    """One private run: the draws, the clipped and noised steps, and their ledger.

    The step in ``budget`` is the description that is accounted, and its ``sampling`` is
    the very object that draws: there is no second copy of a rate. Each call of `step`
    charges the budget first, then draws, clips, sums, adds noise and updates.

    After ``jax.distributed.initialize`` all processes train one run: each makes the
    same trainer and calls `resume`, `train` and `step` as all others do. The first one
    has the run's files, secrets and optimizer state, and its average of parameters; the
    others work off their shares of each step, and have the same ``state.params``.

    Args:
      learner: `ProtoNet`, `MAML`, `ANIL`, `Supervised`, or anything with their methods.
      params: the initial parameters, a pytree. They must not depend on private data.
        Where one is float64 all is computed in float64, noise too; else in float32.
      data: the private training data.
      budget: of `plan_budget`, for a step with ``population=data.population``; or
        without one, its ``sampling`` then stating public bounds of the sizes, which
        the data must keep.
      shots: support examples, of each class or of the task; 0 for `Supervised`.
      optimizer: of optax; it sees noised gradients only, and their ``noise_deviation``.
      l2_clip_norm: C > 0, bound of each clip unit's contribution.
      normalizer: public constant > 0 by which the noised sum is divided. Default: the
        mean number of clip units a step, where that is public.
      block_size: clip units that are worked off in one go; memory grows with it, the
        result does not depend on it. Default, and most: enough for almost every draw.
      devices: over which a block is spread. Default: all local devices.
      noise: "gaussian"; or "discrete", hardened against attacks on
        low-order bits: see `discrete_noise`. The budget is the same.
      seed: None takes draws and noise from the operating system's entropy. A fixed seed
        makes the run repeatable and *not private*: whoever knows it can subtract the
        noise.
      settings: further plain values that must not change when a run is resumed, such as
        a description of the optimizer.
      start: private statistics of ``data`` to release first, the budget's ``before``;
        learner and model then see the features that they project.

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
        noise: str = "gaussian",
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        start: PrivateStatistics | None = None,
    ) -> None:
        step = budget.step
        checks.check_population(step, data)
        checks.check_features(data)
        checks.check_targets(learner, data, step)
        self.learner, self.data = learner, data
        self.l2_clip_norm = _validation.float32_number("l2_clip_norm", l2_clip_norm)
        _validation.choice("noise", noise, NOISES)
        checked_noise(step.noise_multiplier, noise == "discrete")
        checks.check_start(budget, start, noise, data)
        self._start = start
        self._judged = learner if start is None else start.learner(learner)
        checks.warn_about_delta(step, budget.delta, data)
        self.sampler = EpisodeSampler(
            step.design,
            data.population,
            clip_unit=str(step.clip_unit),
            population_is_accounted=step.population is not None,
            privacy_unit=step.privacy_unit,
            slots_of=checks.level_of_slots(step),
        )
        loss = episode.contribution_loss(learner, self.sampler.slot_shape, shots=shots)
        if start is None:  # else the model sees what the statistics project
            loss = episode.loss_on_codes(loss, episode.code_of(data))
        params = as_arrays(params)
        checks.check_finite(params, 0)
        inputs = checks.seen_by_model(data, start)
        checks.check_outputs(learner, params, inputs, self.sampler.slot_shape)
        self.normalizer = checks.public_normalizer(normalizer, budget, self.sampler)
        self.has_default_normalizer = normalizer is None and budget.takes_steps
        self._devices = list(jax.local_devices() if devices is None else devices)
        number = len(self._devices) * all_processes().count
        rows = checks.rows_a_device(block_size, self.sampler, number, noise)
        self._block_size = rows * len(self._devices)
        exact = noise == "discrete"
        couples = getattr(learner, "couples_examples", True)
        gradient = PrivateGradient(
            loss,
            devices=self._devices,
            units_at_once=1 if couples else _SINGLE_EXAMPLES_AT_ONCE,
            noise=noise,
        )
        statistics = () if start is None else start.initial()
        deviation = float(step.noise_multiplier) * self.l2_clip_norm / self.normalizer
        self._update = updater(optimizer, deviation)
        self.is_seeded = seed is not None
        run = described_run(
            budget,
            data,
            learner,
            seed=seed,
            l2_clip_norm=self.l2_clip_norm,
            normalizer=self.normalizer,
            shots=shots,
            noise=noise,
            settings=dict(settings or {}),
            **described_types(params),
        )
        super().__init__(
            gradient,
            initial_state(optimizer, params, statistics),
            new_secrets(seed),
            run,
            budget,
            described_environment(
                self._devices, rows if exact else self._block_size, sums_are_exact=exact
            ),
            noise,
        )

    def step(self, blocks: list[episode.Block] | None = None) -> dict[str, Any]:
        """Charges and takes one step; returns its private diagnostics.

        The charge is on the disk only while `train` runs; steps taken outside of it are
        written to the ledger of a folder when `train` opens it.

        Args:
          blocks: what `draw_blocks` made for this step; None makes them here.

        Returns:
          Realised number of units, mean loss, mean norm before clipping and the share
          clipped. They come from private data without noise: see `RunLog`.

        Raises:
          BudgetExhaustedError: the step would exceed the target; nothing happened.
          OSError: the ledger could not be written; the step was not taken.
          RunEndedError: another process has ended.
        """
        self._join()
        with self._processes.together():
            return self._step(blocks)

    def _step(self, blocks: list[episode.Block] | None) -> dict[str, Any]:
        state, taken = self._now
        # A step that was broken off is charged already, and the same release again.
        number = taken + 1 if taken < self.ledger.charged else self.ledger.charge()
        self._processes.meet()  # the first has charged
        if number <= len(self.budget.before):
            return self._release_statistic(state, number)
        blocks = self.draw_blocks(number) if blocks is None else blocks
        gradient, diagnostics = self._gradient(
            state.params,
            blocks,
            self._noise_key(number),
            l2_clip_norm=self.l2_clip_norm,
            noise_multiplier=float(self.budget.step.noise_multiplier),
            normalizer=self.normalizer,
        )
        if self._processes.is_first:
            state = self._update(state, gradient)
        params = self._shared(state.params)
        self._now = (state._replace(params=params), number)
        return diagnostics

    def _release_statistic(self, state: TrainingState, number: int) -> dict[str, Any]:
        """Takes a step of the start, which has no diagnostics."""
        assert self._start is not None
        if self._processes.is_first:
            start = self._start.release(
                state.start,
                number - 1,
                step_generator(self._secrets.sampler_entropy, number),
                self._noise_key(number),
                float(self.budget.before[number - 1].noise_multiplier),
            )
            state = self._gradient.on_devices(state._replace(start=start))
        self._now = (state._replace(start=self._shared(state.start)), number)
        return {}

    def draw_blocks(self, step: int) -> list[episode.Block]:
        """Returns the blocks of a step, a function of the run's entropy and ``step``.

        Drawing them twice is the same draw, so a resumed run repeats what it repeats.
        Of several processes each gets its share.
        """
        self._join()  # or each would draw from entropy of its own
        start = self._start
        return episode.make_blocks(
            self.sampler.draw_step(
                self._secrets.sampler_entropy, step, first=len(self.budget.before) + 1
            ),
            self.data if start is None else start.table(self.state.start),
            block_size=self._block_size,
            num_shards=len(self._devices),
            share=(self._processes.index, self._processes.count),
        )

    @contextmanager
    def _drawn(self) -> Iterator[Iterator[list[episode.Block] | None]]:
        """What each step from here on is given; statistics are given nothing."""
        taken, before = self.num_steps_taken, len(self.budget.before)
        first = max(taken, before) + 1
        last = self.budget.num_steps
        with closing(episode.prefetched(self.draw_blocks, first, last)) as ahead:
            yield itertools.chain(itertools.repeat(None, first - taken - 1), ahead)

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
        An interruption (Ctrl-C) commits the last step that was finished, its evaluation
        and record included, before it is raised again.

        Args:
          folder: made if missing; ``ledger.jsonl``, ``log.jsonl`` and ``checkpoints/``
            in it. All are private. No other run's may be there.
          evaluations: by name ("validation"), on held-out data; run before the first
            step, every ``evaluate_every`` steps and after the last.
          evaluate_every: None evaluates at the two ends only.
          checkpoint_every: steps between checkpoints; there is one after the last step.
          log_every: steps between log records.
          on_step: is called after every logged step.

        Returns:
          The log's records, those of earlier parts of a resumed run not included; in
          other processes than the first, which write nothing, none.

        Raises:
          BlockingIOError: another run is training in the folder.
          FileExistsError: it holds another run, or a later state of this one.
          LedgerError: its ledger is damaged, or was changed in the meantime.
          OSError: the disk is full, or something cannot be written. What is there can
            be gone on with.
          RunEndedError: another process has ended; the last step is committed.
          RunMismatchError: another process has another run; nothing was charged.
          ValueError: the parameters are no longer finite.
        """
        every = evaluate_every, checkpoint_every, log_every
        for name, often in zip(_EVERY, every, strict=True):
            _validation.whole_number(name, 1 if often is None else often)
        self._join()
        with self._processes.together(), self._drawn() as drawn:
            if not self._processes.is_first:
                for blocks in drawn:
                    self.step(blocks)
                self._processes.meet()  # the first has committed
                return []
            with run_files.locked(folder):
                if self._folder != folder.resolve():
                    run_files.refuse_other_files(folder)
                    path = folder / run_files.LEDGER
                    create_ledger(path, self.budget, is_seeded=self.is_seeded)
                    self._folder = folder.resolve()
                records = take_all_steps(
                    self,
                    drawn,
                    folder,
                    lambda: self._evaluate(evaluations),
                    every,
                    on_step,
                )
            self._processes.meet()
            return records

    def resume(self, folder: Path) -> int:
        """Takes up the latest checkpoint in ``folder``; returns its number of steps.

        From there on the run is bit for bit the one that was interrupted, on the same
        machine and devices: steps charged since then are taken again with the same draw
        and noise. Where they could come out differently they are given up instead, with
        a warning, and counted as taken.

        Raises:
          FileNotFoundError: there is none, or the run's ledger is gone.
          RunMismatchError: it is of a run with other settings; the message says which.
          LedgerError: the ledger is damaged, edited, rolled back or another run's.
          RunEndedError: another process has ended.
          ValueError: the checkpoint is damaged, or this trainer has taken steps of its
            own, which the checkpoint's ledger knows nothing of; or steps are to be
            taken again, and features on the disk are no longer those of their checksum.
        """
        if self.ledger.charged:
            raise ValueError(
                "resume must come before a trainer's first step, got one that has "
                f"charged {self.ledger.charged}: the ledger would forget them; make a "
                "new trainer, or call train to go on with this one"
            )
        with self._processes.together():
            self._agree()
            if self._processes.is_first:
                self._take_up(folder)
            self._share()
            features = self.data.features
            if self.num_steps_taken < self.num_steps_charged and isinstance(
                features, StoredFeatures
            ):
                features.check()  # or the same noise would be added to another sum
        return self._num_resumed

    def _evaluate(self, evaluations: Mapping[str, Evaluation] | None) -> dict[str, Any]:
        scores = evaluated(evaluations or {}, self._judged, self.params)
        return {HELD_OUT: scores} if scores else {}

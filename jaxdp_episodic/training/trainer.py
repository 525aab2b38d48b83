"""Trains privately on episodes, and stops before the target epsilon is exceeded."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.budget import PrivacyBudget, SpentAhead
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.draw.generators import step_generator
from jaxdp_episodic.draw.sampler import EpisodeSampler
from jaxdp_episodic.training import checks, run_files
from jaxdp_episodic.training.checkpoint import (
    Checkpoints,
    Snapshot,
    TrainingState,
    as_arrays,
    initial_state,
    new_secrets,
    noise_key,
    released_params,
    updater,
)
from jaxdp_episodic.training.description import described_environment, described_run
from jaxdp_episodic.training.episode import (
    Block,
    contribution_loss,
    make_blocks,
    prefetched,
)
from jaxdp_episodic.training.evaluation import Evaluation, evaluated
from jaxdp_episodic.training.ledger import Ledger, create_ledger, taken_up
from jaxdp_episodic.training.private_gradient import (
    NOISES,
    PrivateGradient,
    checked_noise,
    checked_setting,
)
from jaxdp_episodic.training.run_files import HELD_OUT, PRIVATE, StepProgress
from jaxdp_episodic.training.statistics import PrivateStatistics

_SINGLE_EXAMPLES_AT_ONCE = 64  # small and quick gradients: many side by side
_EVERY = ("evaluate_every", "checkpoint_every", "log_every")


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
      optimizer: of optax; it sees noised gradients only, and their ``noise_deviation``.
      l2_clip_norm: C > 0, bound of each clip unit's contribution.
      normalizer: public constant > 0 by which the noised sum is divided. Default: the
        mean number of clip units a step, where that is public.
      block_size: clip units that are worked off in one go; memory grows with it, the
        result does not depend on it. Default, and most: enough for almost every draw.
      devices: over which a block is spread. Default: all local devices.
      noise: "gaussian", in float32; or "discrete", hardened against attacks on
        low-order bits: see `discrete_noise`. The budget is the same.
      seed: None takes draws and noise from the operating system's entropy. A fixed seed
        makes the run repeatable and *not private*: whoever knows it can subtract the
        noise.
      settings: further plain values that must not change when a run is resumed, such as
        a description of the optimizer.
      start: private statistics to release first, the budget's ``before``; learner and
        model then see the features that they project.

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
        self.learner, self.data, self.budget = learner, data, budget
        self.l2_clip_norm = checked_setting("l2_clip_norm", l2_clip_norm)
        self.noise = _validation.choice("noise", noise, NOISES)
        checked_noise(step.noise_multiplier, noise == "discrete")
        checks.check_start(budget, start, noise)
        self._start = start
        self._judged = learner if start is None else start.learner(learner)
        checks.warn_about_delta(step, budget.delta, data)
        self.sampler = EpisodeSampler(
            step.design,
            data.population,
            clip_unit=str(step.clip_unit),
            slots_of=checks.level_of_slots(step),
        )
        loss = contribution_loss(learner, self.sampler.slot_shape, shots=shots)
        params = as_arrays(params)
        checks.check_finite(params, 0)
        inputs = checks.seen_by_model(data, start)
        checks.check_outputs(learner, params, inputs, self.sampler.slot_shape)
        self.normalizer = checks.public_normalizer(normalizer, step, self.sampler)
        self.has_default_normalizer = normalizer is None
        self._devices = list(jax.local_devices() if devices is None else devices)
        self._block_size = checks.chosen_block_size(
            block_size, self.sampler, len(self._devices)
        )
        self._environment = described_environment(self._devices, self._block_size)
        couples = getattr(learner, "couples_examples", True)
        self._gradient = PrivateGradient(
            loss,
            devices=self._devices,
            units_at_once=1 if couples else _SINGLE_EXAMPLES_AT_ONCE,
            noise=noise,
        )
        self._secrets = new_secrets(seed)
        self.ledger = Ledger(budget)
        statistics = () if start is None else start.initial()
        state = initial_state(optimizer, params, statistics)
        # One attribute: whenever an interrupt comes, the two belong together.
        self._now = (self._gradient.on_devices(state), 0)
        self._folder: Path | None = None
        deviation = float(step.noise_multiplier) * self.l2_clip_norm / self.normalizer
        self._update = updater(optimizer, deviation)
        self.is_seeded = seed is not None
        self.run = described_run(
            budget,
            data,
            learner,
            seed=seed,
            l2_clip_norm=self.l2_clip_norm,
            normalizer=self.normalizer,
            shots=shots,
            noise=noise,
            settings=dict(settings or {}),
        )

    @property
    def state(self) -> TrainingState:
        """Parameters and optimizer state as they stand."""
        return self._now[0]

    @property
    def params(self) -> Any:
        """The parameters to evaluate and release; see `released_params`."""
        return released_params(self.state)

    @property
    def num_steps_taken(self) -> int:
        """Steps up to which the run stands, those given up by `resume` included."""
        return self._now[1]

    @property
    def num_steps_charged(self) -> int:
        """Steps charged so far: those taken, and those to take again first.

        Those are steps that were broken off, or that came after the checkpoint that was
        resumed. `step` takes them with the same draw and noise, uncharged.
        """
        return self.ledger.charged

    def step(self, blocks: list[Block] | None = None) -> dict[str, Any]:
        """Charges and takes one step; returns its private diagnostics.

        The charge is on the disk only while `train` runs; steps taken outside of it are
        written to the ledger of a folder when `train` opens it.

        Args:
          blocks: what `draw_blocks` made for this step; None makes them here.

        Returns:
          Realised number of units, mean loss, mean norm before clipping and the share
          clipped. They come from private data without noise: see `run_log`.

        Raises:
          BudgetExhaustedError: the step would exceed the target; nothing happened.
          OSError: the ledger could not be written; the step was not taken.
        """
        state, taken = self._now
        # A step that was broken off is charged already, and the same release again.
        number = taken + 1 if taken < self.ledger.charged else self.ledger.charge()
        if number <= len(self.budget.before):
            return self._release_statistic(state, number)
        blocks = self.draw_blocks(number) if blocks is None else blocks
        gradient, diagnostics = self._gradient(
            state.params,
            blocks,
            noise_key(self._secrets, number, self.noise),
            l2_clip_norm=self.l2_clip_norm,
            noise_multiplier=float(self.budget.step.noise_multiplier),
            normalizer=self.normalizer,
        )
        self._now = (self._update(state, gradient), number)
        return diagnostics

    def _release_statistic(self, state: TrainingState, number: int) -> dict[str, Any]:
        """Takes a step of the start, which has no diagnostics."""
        assert self._start is not None
        start = self._start.release(
            state.start,
            number - 1,
            step_generator(self._secrets.sampler_entropy, number),
            noise_key(self._secrets, number, self.noise),
            float(self.budget.before[number - 1].noise_multiplier),
        )
        self._now = (self._gradient.on_devices(state._replace(start=start)), number)
        return {}

    def draw_blocks(self, step: int) -> list[Block]:
        """Returns the blocks of a step, a function of the run's entropy and ``step``.

        Drawing them twice is the same draw, so a resumed run repeats what it repeats.
        """
        start = self._start
        return make_blocks(
            self.sampler.draw_step(
                self._secrets.sampler_entropy, step, first=len(self.budget.before) + 1
            ),
            self.data if start is None else start.table(self.state.start),
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
          The log's records, those of earlier parts of a resumed run not included.

        Raises:
          BlockingIOError: another run is training in the folder.
          FileExistsError: it holds another run, or a later state of this one.
          LedgerError: its ledger is damaged, or was changed in the meantime.
          OSError: the disk is full, or something cannot be written. What is there can
            be gone on with.
          ValueError: the parameters are no longer finite.
        """
        every = evaluate_every, checkpoint_every, log_every
        for name, often in zip(_EVERY, every, strict=True):
            _validation.whole_number(name, 1 if often is None else often)
        with run_files.locked(folder):
            if self._folder != folder.resolve():
                run_files.refuse_other_files(folder)
                path = folder / run_files.LEDGER
                create_ledger(path, self.budget, is_seeded=self.is_seeded)
                self._folder = folder.resolve()
            return self._train_in(folder, evaluations, every, on_step)

    def _train_in(
        self,
        folder: Path,
        evaluations: Mapping[str, Evaluation] | None,
        every: tuple[int | None, int, int],
        on_step: Callable[[StepProgress], None] | None,
    ) -> list[dict[str, Any]]:
        """`train` in a folder that is locked and holds this run or none."""
        start, last = self._now[1], self.budget.num_steps
        spent = SpentAhead(self.budget)
        first = max(start, len(self.budget.before)) + 1
        ahead = prefetched(self.draw_blocks, first, last)
        drawn = itertools.chain(itertools.repeat(None, first - start - 1), ahead)

        def is_due(place: int, step: int) -> bool:
            often = every[place]
            is_end = step in (last, len(self.budget.before))
            return is_end or (often is not None and step % often == 0)

        with run_files.opened_records(
            folder, self.ledger, self._environment, self.snapshot
        ) as files:
            if start == 0 and not run_files.read_log(folder / run_files.LOG):
                files.note({"step": 0, "epsilon": 0.0, **self._evaluate(evaluations)})
            # The last step whose evaluation and record are there as well.
            complete = self.snapshot()
            try:
                for blocks in drawn:
                    begun = time.perf_counter()
                    diagnostics = self.step(blocks)
                    step = self._now[1]
                    held_out = {}
                    if is_due(0, step):
                        held_out = self._evaluate(evaluations)
                    progress = None
                    if is_due(2, step) or held_out:
                        private: dict[str, Any] = dict(diagnostics)
                        private["seconds"] = time.perf_counter() - begun
                        epsilon = spent.at(step)
                        public = {"step": step, "epsilon": epsilon}
                        files.note({**public, PRIVATE: private, **held_out})
                        progress = StepProgress(step, last, epsilon, files.noted[-1])
                    complete = self.snapshot()
                    if on_step is not None and progress is not None:
                        on_step(progress)
                    if is_due(1, step):
                        files.commit(complete)
            except KeyboardInterrupt as interrupt:
                # Whoever calls `train` again takes the rest again, charged already.
                self._now = (complete.state, complete.charged_steps)
                files.commit_if_possible(complete, interrupt)
                raise
            return files.noted

    def snapshot(self) -> Snapshot:
        """Returns the run as it stands, secrets included.

        It counts the steps that its state contains: one that was charged and broken
        off is repeated with the same draw and noise.
        """
        state, taken = self._now
        return Snapshot(state, taken, self._secrets, self.run)

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
          ValueError: the checkpoint is damaged, or this trainer has taken steps of its
            own, which the checkpoint's ledger knows nothing of.
        """
        if self.ledger.charged:
            raise ValueError(
                "resume must come before a trainer's first step, got one that has "
                f"charged {self.ledger.charged}: the ledger would forget them; make a "
                "new trainer, or call train to go on with this one"
            )
        path = folder / run_files.CHECKPOINTS
        if not path.is_dir():
            raise FileNotFoundError(f"no complete checkpoint in {path}")
        with Checkpoints(path) as checkpoints:
            snapshot = checkpoints.restore(self.state, self.run)
        self.ledger, taken = taken_up(
            folder / run_files.LEDGER, snapshot, self.budget, self._environment
        )
        state = self._gradient.on_devices(TrainingState(*snapshot.state))
        self._secrets = snapshot.secrets
        self._now = (state, taken)
        self._folder = folder.resolve()
        return snapshot.charged_steps

    def _evaluate(self, evaluations: Mapping[str, Evaluation] | None) -> dict[str, Any]:
        scores = evaluated(evaluations or {}, self._judged, self.params)
        return {HELD_OUT: scores} if scores else {}

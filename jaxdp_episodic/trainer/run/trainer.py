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
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.trainer.config.training_config import DISCRETE, NOISES
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys, generator
from jaxdp_episodic.trainer.draw.sampler import Draw
from jaxdp_episodic.trainer.gradient.noise import checked_noise
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.learners import episode
from jaxdp_episodic.trainer.run import checks, contributions, run_files
from jaxdp_episodic.trainer.run.description import described_run
from jaxdp_episodic.trainer.run.draws import DrawSecret, PreparedStep, RunDraws
from jaxdp_episodic.trainer.run.evaluation import Evaluation
from jaxdp_episodic.trainer.run.loop import take_all_steps
from jaxdp_episodic.trainer.run.run_files import StepProgress
from jaxdp_episodic.trainer.run.run_state import RunState
from jaxdp_episodic.trainer.run.selection import Scoring, choosing_split
from jaxdp_episodic.trainer.run.stages import Stages
from jaxdp_episodic.trainer.run.state import (
    TrainingState,
    as_arrays,
    initial_state,
)
from jaxdp_episodic.trainer.run.update import updater
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics

# Clipped examples whose gradients one vectorized pass computes; episodes one by one.
_EXAMPLES_AT_ONCE = 64


class Trainer(RunState):
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
      l2_clip_norm: C > 0, bound of each clip unit's contribution; in the first step, if
        it follows a quantile of their norms.
      normalizer: public constant > 0 by which the noised sum is divided. Default: the
        mean number of clip units a step, where that is public.
      block_size: clip units whose gradients are computed in one call; memory grows with
        it, the result does not. Default, and most: enough for almost every draw.
      devices: that share a block. Default: all local devices.
      clipping: what is made of C; None: longer contributions are scaled to it.
      noise: "discrete", hardened against attacks on low-order bits, or "gaussian":
        see `PrivateGradient`. The budget is the same.
      seed: None makes draws and noise of every step from fresh entropy of the operating
        system, which is kept nowhere. A fixed seed makes the run repeatable and *not
        private*: whoever knows it can subtract the noise.
      settings: further plain values that describe the run, such as a description of the
        optimizer; `resume` warns where they have changed.
      start: private statistics of ``data`` to release first, the budget's ``before``;
        learner and model then see the features that they project.
      truncation: what bounding people has left out of ``data``, for the ledger.

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
        clipping: ClippingConfig | None = None,
        noise: str = DISCRETE,
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        start: PrivateStatistics | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        step = budget.step
        checks.check_population(step, data)
        checks.check_owners(step, data)
        checks.check_features(data)
        checks.check_targets(learner, data, step)
        self.learner, self.data, self.truncation = learner, data, truncation
        self.l2_clip_norm = _validation.float32_number("l2_clip_norm", l2_clip_norm)
        _validation.choice("noise", noise, NOISES)
        checked_noise(step.noise_multiplier, noise)
        checks.check_start(budget, start, noise, data)
        checks.warn_about_delta(step, budget.delta, data)
        self.sampler = sampler = checks.sampler_of(step, data)
        loss = episode.contribution_loss(learner, self.sampler.slot_shape, shots=shots)
        if start is None:  # else the model sees what the statistics project
            loss = episode.loss_on_codes(loss, episode.code_of(data))
        self.needs = contributions.needs_of(learner, shots)
        self.complete_units = contributions.checked(self.sampler, self.needs, budget)
        params = as_arrays(params)
        ways = getattr(learner, "ways", [1, 1, *self.sampler.slot_shape][-2])
        self._stages = Stages(learner, start, params, ways)
        checks.check_finite(params, 0)
        inputs = checks.seen_by_model(data, start)
        checks.check_outputs(learner, params, inputs, self.sampler.slot_shape)
        self.normalizer = checks.public_normalizer(normalizer, budget, self.sampler)
        clipping = checks.checked_clipping(clipping, self.normalizer, budget, sampler)
        self.has_default_normalizer = normalizer is None and budget.takes_steps
        self._devices = list(jax.local_devices() if devices is None else devices)
        number = len(self._devices) * all_processes().count
        rows = checks.rows_a_device(block_size, self.sampler, number, noise)
        self._block_size = rows * len(self._devices)
        couples = getattr(learner, "couples_examples", True)
        gradient = PrivateGradient(
            loss,
            clipping=clipping,
            devices=self._devices,
            units_at_once=1 if couples else _EXAMPLES_AT_ONCE,
            noise=noise,
        )
        self._start, statistics = start, () if start is None else start.initial()
        self._noise_multiplier = float(step.noise_multiplier)
        deviation = gradient.deviation(self._noise_multiplier) / self.normalizer
        self._update = updater(optimizer, clipping, self.l2_clip_norm, deviation)
        keys = Keys(seed)
        first = len(budget.before) + 1
        self._draws = RunDraws(self.sampler, keys, all_processes(), first)
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
            clipping=clipping,
        )
        first_norm = self.l2_clip_norm if clipping.counts else None
        state = initial_state(optimizer, params, statistics, first_norm)
        super().__init__(gradient, state, keys, run, budget, noise)

    def step(self, prepared: PreparedStep | None = None) -> dict[str, Any]:
        """Charges and takes one step; returns its private diagnostics.

        Charge and release are on the disk only while `train` runs; steps taken outside
        of it are in the file of a folder when `train` opens it.

        Args:
          prepared: what was made ahead for this step; None makes it here.

        Returns:
          Realised numbers of units and of complete ones, mean loss and norm before
          clipping, the share clipped: of private data without noise, see `read_log`.

        Raises:
          BudgetExhaustedError: the step would exceed the target; nothing happened.
          ValueError: what was prepared is of another step; nothing happened.
          OSError: the ledger could not be written; the step was not taken.
          RunEndedError: another process has ended.
        """
        self._join()
        with self._processes.together():
            return self._step(prepared)

    def _step(self, prepared: PreparedStep | None) -> dict[str, Any]:
        self._give_up_unreleased()
        state, taken = self._now
        number = taken + 1
        if prepared is not None and prepared.step != number:
            raise ValueError(
                f"prepared must be of step {number}, got that of step {prepared.step}: "
                "another step was taken, or given up, in between"
            )
        if number > self.ledger.charged:
            if self._store is not None and number <= self.budget.permitted_steps:
                self._draws.keep(self._store, number)
            self.ledger.charge()
        self._processes.meet()  # the first has charged
        if number <= len(self.budget.before):
            return self._release_statistic(state, number)
        if prepared is None:
            prepared = self._prepared(number, self._draws.secret(number))
        gradient, diagnostics = self._gradient(
            state.params,
            prepared.blocks,
            prepared.noise,
            l2_clip_norm=self.clip_norm,
            noise_multiplier=self._noise_multiplier,
            normalizer=self.normalizer,
        )
        if self._processes.is_first:
            state = self._let_out(state, number, gradient)
        self._processes.meet()  # or others would wait for one that has failed
        params, norm = self._shared((state.params, state.clip_norm))
        state = state._replace(clip_norm=norm)
        self._now = (state._replace(params=params), number)
        if self._store is not None:
            self._end_epoch(self._store, number)
        return {**diagnostics, "num_complete": prepared.complete}

    def _release_statistic(self, state: TrainingState, number: int) -> dict[str, Any]:
        """Takes a step of the start, which has no diagnostics."""
        assert self._start is not None
        if self._processes.is_first:
            noised = self._start.noised_sum(
                state.start,
                number - 1,
                generator(self._keys.new("draw", number)),
                self._keys.new("noise", number),
                float(self.budget.before[number - 1].noise_multiplier),
            )
            state = self._let_out(state, number, noised)
        self._processes.meet()
        self._now = (state._replace(start=self._shared(state.start)), number)
        return {}

    def _after(self, state: TrainingState, number: int, released: Any) -> TrainingState:
        if number > len(self.budget.before):
            return self._update(state, self._gradient.on_devices(released))
        assert self._start is not None
        noise = float(self.budget.before[number - 1].noise_multiplier)
        start = self._start.with_sum(state.start, number - 1, released, noise)
        return self._gradient.on_devices(state._replace(start=start))

    def draw_blocks(self, step: int) -> list[episode.Block]:
        """Returns the blocks of a fresh draw, as one step makes it.

        Of several processes, which all call it, each gets its share.
        """
        self._join()  # or each would draw from entropy of its own
        return self._blocks(self._draws.draw(self._draws.secret(step)))

    def _blocks(self, draw: Draw) -> list[episode.Block]:
        start = self._start
        return episode.make_blocks(
            draw,
            self.data if start is None else start.table(self.state.start),
            block_size=self._block_size,
            num_shards=len(self._devices),
            share=(self._processes.index, self._processes.count),
        )

    def _prepared(self, step: int, secret: DrawSecret) -> PreparedStep:
        """What a step needs: its draw, and noise, which depends on nobody's data."""
        noise = None
        if self._processes.is_first:
            noise = self._gradient.noise(
                self.state.params, self._keys.new("noise", step), self._noise_multiplier
            )
        draw = self._draws.draw(secret)
        complete = self.sampler.complete_in(draw, self.needs)
        return PreparedStep(step, self._blocks(draw), noise, complete)

    @contextmanager
    def ahead(self) -> Iterator[Iterator[PreparedStep | None]]:
        """What each of the steps to come is given; statistics are given nothing."""
        taken, before = self.num_steps_taken, len(self.budget.before)
        first = max(taken, before) + 1
        # Here and not in the other thread: processes share the secrets in one order.
        steps = range(first, self.budget.num_steps + 1)
        secrets = ((step, self._draws.secret(step)) for step in steps)
        with closing(episode.prefetched(self._prepared, secrets)) as ahead:
            yield itertools.chain(itertools.repeat(None, first - taken - 1), ahead)

    def train(
        self,
        folder: Path,
        *,
        evaluations: Mapping[str, Evaluation] | None = None,
        evaluate_every: int | None = None,
        select: bool | None = None,
        checkpoint_every: int = 100,
        log_every: int = 1,
        on_step: Callable[[StepProgress], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Takes all steps of the budget; leaves ``run.sqlite`` in ``folder``.

        Goes on after the steps that were taken: for those of a folder call `resume`.
        An interruption (Ctrl-C) commits the last step that was released before it is
        raised again; one that was charged and not released yet is given up.

        Args:
          folder: made if missing; ``run.sqlite`` is in it, with all that the run is,
            private. No other run's may be there.
          evaluations: by name, on held-out data; run before the first step, after the
            statistics, every ``evaluate_every`` steps and after the last.
          evaluate_every: None: steps are scored after the last alone.
          select: what is `released` is the simplest stage within a standard error of
            the best on "validation", else on the first that is not "test"; which must
            have nobody in common with the training data. False: the last stage is.
            None: that is so where people are protected, who may be in both.
          checkpoint_every: steps after which the state is saved; it is after the last
            step, too, and whenever the releases since exceed 256 MiB.
          log_every: steps between log records.
          on_step: is called after every logged step, with a `StepProgress`: for a
            progress bar, or a tracker such as TensorBoard.

        Returns:
          The log's records, those of earlier parts of a resumed run not included; in
          other processes than the first, which write nothing, none.

        Raises:
          BlockingIOError: another run is training in the folder.
          FileExistsError: it holds another run, or a later state of this one.
          LedgerError: its file is damaged, or was changed in the meantime.
          OSError: the disk is full, or something cannot be written. What is there can
            be gone on with.
          RunEndedError: another process has ended; the last step is committed.
          RunMismatchError: another process has another run; nothing was charged.
          ValueError: the parameters are no longer finite; the run has another folder;
            stages are to be chosen by data that are in both parts.
        """
        if evaluate_every is not None:
            _validation.whole_number("evaluate_every", evaluate_every)
        _validation.whole_number("checkpoint_every", checkpoint_every)
        _validation.whole_number("log_every", log_every)
        every = evaluate_every, checkpoint_every, log_every
        self._join()
        with self._processes.together():
            if not self._processes.is_first:
                with self.ahead() as ahead:
                    for prepared in ahead:
                        self.step(prepared)
                self._processes.meet()  # the first has committed
                return []
            with run_files.locked(folder):
                self.begin(folder)
                choosing_split(self, evaluations or {}, select)  # before any charge
                with self.opened(folder) as store:
                    scoring = Scoring(self, store, evaluations, select=select)
                    records = take_all_steps(self, store, scoring, every, on_step)
            self._processes.meet()
            return records

    def resume(self, folder: Path, *, book: str | None = None) -> int:
        """Resumes a run after the last step that was released; returns its number.

        The state is the one saved last and what was released since, which goes
        through the optimizer again. Steps that were charged and not released are given
        up, with a warning, and counted as taken; of a run with a seed they are taken
        again. Models, versions, machines may have changed: nothing is released twice.

        Args:
          folder: of the run.
          book: name of the book that it is charged to, if any.

        Raises:
          FileNotFoundError: there is none.
          RunMismatchError: it is of a run with other settings; the message says which.
          LedgerError: its file is damaged, edited or another run's.
          RunEndedError: another process has ended.
          ValueError: this trainer has taken steps of its own, which the file knows
            nothing of; the run is charged to another book.
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
                self._take_up(folder, book)
            self._share()
        return self.num_steps_taken

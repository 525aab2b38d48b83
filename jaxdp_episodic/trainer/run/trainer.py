"""Trains privately on episodes, and stops before the target epsilon is exceeded."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.questions.budget import BudgetExhaustedError
from jaxdp_episodic.trainer.config.training_adaptive import Rule, ScoreThen
from jaxdp_episodic.trainer.config.training_parts import DISCRETE, ClippingConfig
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.learners import episode
from jaxdp_episodic.trainer.run import loop, run_files
from jaxdp_episodic.trainer.run.checks import check_finite
from jaxdp_episodic.trainer.run.evaluation import Evaluation, PrivateValidation
from jaxdp_episodic.trainer.run.ledger import (
    Ledger,
    ask_rule,
    check_rule,
    check_run,
    described_opening,
    described_run,
    described_versions,
    resumed_run,
    scores_in,
)
from jaxdp_episodic.trainer.run.mechanisms import (
    DrawSecret,
    PreparedStep,
    SharedParts,
    TrainingState,
    array_types,
    mechanisms_of,
    released_params,
)
from jaxdp_episodic.trainer.run.release import write_release
from jaxdp_episodic.trainer.run.report import run_statement
from jaxdp_episodic.trainer.run.store import RunStore, create_store
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics


class Trainer:
    """One private run: samples, clips and adds noise, and charges every step.

    The step in ``budget`` is what is accounted, and its ``sampling`` is the object that
    samples: no rate is written down twice. `step` charges the budget, and only then
    computes the clipped sum, adds noise and updates.

    After ``jax.distributed.initialize`` all processes train one run: each makes the
    same trainer and calls the same methods. The first one has the run's files, secrets
    and optimizer state; all have the same ``state.params``.

    Args:
      learner: `ProtoNet`, `MAML`, `ANIL`, `Supervised`, or anything with their methods.
      params: initial parameters, a pytree, which must not depend on private data. If
        one is float64 everything is computed in float64, else in float32.
      data: the private training data.
      budget: of `plan_budget`, for a step with ``population=data.population``, or
        without a population: then its ``sampling`` states public bounds of the sizes,
        which the data must keep.
      shots: support examples, of each class or of the task; 0 for `Supervised`.
      optimizer: of optax; it sees noised gradients only, and their ``noise_deviation``.
      l2_clip_norm: C > 0, the (first) bound of each clip unit's contribution.
      normalizer: public constant > 0 by which the noised sum is divided. Default: the
        mean number of clip units a step, if that is public.
      block_size: clip units whose gradients are computed in one call. Memory grows with
        it, the result does not. Default and maximum: almost every sample fits.
      devices: that share a block. Default: all local devices.
      clipping: how contributions are bounded; None: longer ones are scaled to C.
      noise: "discrete", hardened against attacks on low-order bits, or "gaussian": see
        `PrivateGradient`. The budget is the same.
      seed: None: fresh entropy of the operating system for each step. With a seed the
        run is repeatable and *not private*: whoever knows the seed can subtract the
        noise.
      settings: plain values that describe the run; `resume` warns if they have changed.
      start: private statistics of ``data`` to release first, the budget's ``before``.
        Learner and model then see projected features.
      truncation: what was left out of ``data`` to bound people, for the run's file.
      rule: see `AdaptiveTrainer`, as for ``checks``.
      checks: see ``rule``.
      folder: for the charges of `step`; None: that of `train` or `resume`, if any.

    Attributes:
      run: what the run is, as plain values.
      ledger: counts the charges; other processes than the first have a copy in memory.
      selection: what `train` has chosen to release; None before its end.
      has_private_scores: whether held-out data are protected, and scored with noise.

    Raises:
      TypeError, ValueError: a wrong type; a value out of range; another population.
    """

    def __init__(
        self,
        learner: Any,
        params: Any,
        *,
        data: ExampleTable,
        budget: Any,
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
        rule: Rule | None = None,
        checks: Mapping[str, PrivateValidation] = MappingProxyType({}),
        folder: Path | None = None,
    ) -> None:
        norm = _validation.float32_number("l2_clip_norm", l2_clip_norm)
        params, keys = jax.tree.map(jnp.asarray, params), Keys(seed)
        check_finite(params, 0)
        _validation.instance("start", start, PrivateStatistics | None, "statistics")
        check_rule(budget, rule, checks)
        self._rule, self.checks = rule, dict(checks)
        self.has_private_scores = bool(checks)
        self.processes = all_processes()
        self.parts = SharedParts(
            learner=learner,
            params=params,
            data=data,
            shots=shots,
            optimizer=optimizer,
            l2_clip_norm=norm,
            normalizer=normalizer,
            block_size=block_size,
            devices=tuple(jax.local_devices() if devices is None else devices),
            clipping=clipping,
            noise=noise,
            start=start,
            keys=keys,
            processes=self.processes,
            turn=lambda number: self.ledger.turn(number),
        )
        self.learner, self.data, self.truncation = learner, data, truncation
        self.l2_clip_norm, self.budget, self.noise = norm, budget, noise
        self.mechanisms = mechanisms_of(self.parts, budget, self.checks)
        gradients = (m for m in self.mechanisms.values() if hasattr(m, "sampler"))
        self._main = main = next(gradients)
        self.sampler, self.normalizer = main.sampler, main.normalizer
        self.complete_units = main.complete_units
        self._gradient: PrivateGradient = main.gradient
        self.has_default_normalizer = normalizer is None and budget.takes_steps
        self.run: dict[str, Any] = described_run(self, seed, rule, settings)
        self._one_step = threading.Lock()  # two at once would share one charge
        self._trained_by: int | None = None  # the thread in which `train` runs
        # One attribute, so that an interrupt cannot separate state and step number.
        self._now = (self._gradient.on_devices(main.initial_state(budget)), 0)
        self.ledger, self.versions = Ledger(budget), described_versions()
        self.recipe: Mapping[str, Any] = {}
        self._is_joined = self.is_tried = self._is_half_resumed = False
        self._last_release = 0  # number of the last released step
        self.selection: loop.Selection | None = None
        self._given, self._name = folder if self.processes.is_first else None, ""
        self._folder: Path | None = None
        self._by_hand: ExitStack | None = None  # closes the file that `step` opened
        self._store: RunStore | None = None

    @property
    def is_seeded(self) -> bool:
        """True if samples and noise follow from a seed, so that nothing is private."""
        return self.parts.keys.is_seeded

    @property
    def state(self) -> TrainingState:
        """Parameters and optimizer state after the last step."""
        return self._now[0]

    @property
    def params(self) -> Any:
        """The parameters to evaluate and release; see `released_params`."""
        return released_params(self.state)

    def stages(self) -> tuple[loop.Stage, ...]:
        """The stages that the run has now, the simplest first: post-processing."""
        has_stepped = self.num_steps_taken > len(self.budget.before)
        return loop.stages_of(self, has_stepped)

    def stages_after(self, step: int, params: Any) -> tuple[loop.Stage, ...]:
        """The stages that use the parameters after an earlier gradient step."""
        return tuple(loop.stages_with(self, params, f"@{step}"))

    @property
    def released(self) -> loop.Stage:
        """The stage that is released: what `train` has chosen, else the last one."""
        chosen = self.selection
        if chosen is None or chosen.step != self.num_steps_taken:
            return self.stages()[-1]
        return chosen.stage

    @property
    def num_steps_taken(self) -> int:
        """Number of completed steps: released ones, and those given up."""
        return self._now[1]

    @property
    def scores(self) -> tuple[ScoreThen, ...]:
        """The noisy scores released so far; in the first process only."""
        return scores_in(self.state.scores, self.checks)

    @property
    def has_ended(self) -> bool:
        """Whether the run is over."""
        return self.ledger.is_over(self.num_steps_taken)

    @property
    def num_steps_charged(self) -> int:
        """Number of charged steps: completed ones, and perhaps an interrupted one."""
        return self.ledger.charged

    @property
    def has_public_accounting(self) -> bool:
        """False if epsilons were computed from private sizes; see `public_budget`."""
        return self.ledger.is_public

    @property
    def clipping(self) -> ClippingConfig:
        """How contributions are bounded."""
        return self._gradient.clipping

    @property
    def clip_norm(self) -> float:
        """The clip norm of the next step, known before the step is charged."""
        return self._main.clip_norm(self.state)

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the noise in each coordinate of the next step's sum."""
        return self._gradient.deviation(self._main.noise_multiplier) * self.clip_norm

    def release(self, folder: Path) -> list[Path]:
        """Writes what may be published of the run; returns the files. See `Release`.

        It covers all charged steps, and contains nothing that was computed from private
        sizes. Files of the same names are replaced together. Other processes than the
        first write none.

        Raises:
          OSError, ValueError: a file cannot be written; the run has no folder.
        """
        if not self.processes.is_first:
            return []
        self.close()
        if self._folder is None:
            raise ValueError(
                "release must come after train, resume, or steps of a Trainer with a "
                "folder: the log is there"
            )
        return write_release(folder, self, self._folder, run_statement(self))

    def begin(
        self,
        folder: Path,
        *,
        name: str | None = None,
        book: str | None = None,
        search: str | None = None,
    ) -> str:
        """Makes the file of a new run, once; returns the run's name."""
        if self._folder != folder.resolve():
            if self.ledger.mark is not None:
                raise ValueError(
                    f"folder must be the run's own, {self._folder}, got {folder}: its "
                    "file is there"
                )
            run_files.refuse_other_files(folder)
            names = {"run": name, "book": book, "search": search}
            path, is_seeded = folder / run_files.STORE, self.is_seeded
            self._name = create_store(path, self.budget, is_seeded=is_seeded, **names)
            self._folder = folder.resolve()
        return self._name if self.ledger.mark is None else self.ledger.mark.run

    def dry_run(self, evaluations: Mapping[str, Evaluation] | None = None) -> None:
        """Computes on zeros all that the run will compute; charges and samples nothing.

        `train` and `step` do this before their first charge, and reuse what it
        compiles. All processes call it; ``evaluations`` are those of `train`. It raises
        what model, learner, optimizer or device raise, with a note on what was tried.
        """
        self._join()
        with self.processes.together():
            loop.try_out(self, evaluations or {})

    def step(self, prepared: PreparedStep | None = None) -> dict[str, Any]:
        """Charges and takes one step; returns its private diagnostics.

        Charge and release are on disk if the trainer has a folder: its own, or that of
        `train` or `resume`. Otherwise they are in memory until `train` writes them.

        Args:
          prepared: what was made ahead for this step; None: it is made here.

        Returns:
          *Private* numbers without noise, such as the mean loss and the share clipped.

        Raises:
          BudgetExhaustedError: the step would exceed the target; nothing happened.
          ValueError: what was prepared is of another step; nothing happened.
          OSError: the charge could not be written; the step was not taken.
          RunEndedError: another process has ended.
          RuntimeError: a step of this trainer has not ended, or another thread runs
            `train`; nothing happened.
        """
        self._join()
        with self._one_at_a_time(), self.processes.together():
            if not self.is_tried:
                loop.try_out(self, {})
            folder, most = self._folder or self._given, self.budget.permitted_steps
            is_over = self.num_steps_taken >= most or self.ledger.has_ended
            if folder and self._store is None and not is_over:
                self._open_by_hand(folder)
            private = self._step(prepared)
            if self._by_hand is not None and (store := self._store):
                record = self.public_record(self.num_steps_taken)
                store.note({**record, run_files.PRIVATE: private})
                if store.is_full:
                    self.save(store)
            return private

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Refuses calls during a step: it may wait for them, in whatever thread."""
        if self._trained_by not in (None, threading.get_ident()):
            raise RuntimeError(
                "another thread runs train of this trainer: call step, train, resume, "
                "release and close after its end"
            )
        if self._one_step.locked():
            raise RuntimeError(
                "what a step calls (learner, rule, score, optimizer), and other "
                "threads until its end, must not call step, train, resume, release or "
                "close of its trainer"
            )
        with self._one_step:
            yield

    def _open_by_hand(self, folder: Path) -> None:
        with ExitStack() as stack:
            stack.enter_context(run_files.locked(folder))
            self.begin(folder)
            store = stack.enter_context(self.opened(folder))
            stack.callback(self.save, store)
            if not store.log():
                store.note(self.public_record(self.num_steps_taken))
            self._by_hand = stack.pop_all()

    def close(self) -> None:
        """Saves the state and closes the file that `step` opened, if any."""
        with self._one_at_a_time(), self._by_hand or nullcontext():
            self._by_hand = None

    def _step(self, prepared: PreparedStep | None) -> dict[str, Any]:
        """Charges the next step, releases it, and applies the release to the state."""
        name = self.choose()
        state, taken = self._now
        number = taken + 1
        if name is None:
            raise BudgetExhaustedError("the run has chosen to end, or spent its budget")
        if prepared is not None and prepared.step != number:
            raise ValueError(
                f"prepared must be of step {number}, got that of step {prepared.step}: "
                "another step was taken or given up in between"
            )
        if number > self.ledger.charged:
            if self._store is not None and number <= self.budget.permitted_steps:
                self._main.draws.write_secrets(self._store, number)
            self.ledger.charge()
        self.processes.meet()  # the first process has charged
        mechanism = self.mechanisms[name]
        try:
            released, private = None, {}
            if self.processes.is_first or mechanism.is_joint:
                released, private = mechanism.release(state, number, prepared)
            if self.processes.is_first:
                if self._store is not None:  # before anybody else has the release
                    leaves = jax.device_get(jax.tree.leaves(released))
                    self._store.release(number, leaves)
                    self._last_release = number
                state = self._applied(mechanism, number, released)
            self.processes.meet()  # else the others wait for a process that failed
        except Exception as error:
            if self.processes.is_first and self._last_release < number:
                error.add_note(self.ledger.cost_of(number, self.is_seeded))
            raise
        fields = {name: getattr(state, name) for name in mechanism.shared_fields}
        self._now = (state._replace(**self._shared(fields)), number)
        if self._store is not None:
            self._main.draws.erase_secrets(self._store, number)
        return private

    def choose(self) -> str | None:
        """Returns the next step's option, chosen once; None: the run is over."""
        self._join()
        with self.processes.together():
            if self._store is not None and self.num_steps_taken < self.ledger.charged:
                self._apply_releases(self._store)
            self._give_up_unreleased()
            return self.ledger.next_after(self.num_steps_taken, self._asked)

    def _asked(self) -> str | None:
        """Returns what the rule chooses in the first process."""
        is_first = self.processes.is_first
        return self.processes.shared_value(
            ask_rule(self._rule, self) if is_first else None
        )

    def draw_blocks(self, step: int) -> list[episode.Block]:
        """Returns blocks of a fresh sample; one process of several gets its share."""
        self._join()  # else each process would draw its own
        main = self._main
        return main.blocks(self.state, main.draws.draw(main.draws.secret(step)))

    @contextmanager
    def ahead(self) -> Iterator[Iterator[PreparedStep | None]]:
        """Yields what was prepared for each step to come; None if nothing can be."""
        if self._rule is not None:
            yield (None for _ in iter(self.choose, None))
            return
        taken, before = self.num_steps_taken, len(self.budget.before)
        first, main = max(taken, before) + 1, self._main
        # In this thread: all processes must share the secrets in the same order.
        steps = range(first, self.budget.num_steps + 1)
        secrets = ((step, main.draws.secret(step)) for step in steps)

        def prepare(step: int, secret: DrawSecret) -> PreparedStep:
            return main.prepared(self.state, step, secret)

        with closing(episode.prefetched(prepare, secrets)) as ahead:
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
        on_step: Callable[[run_files.StepProgress], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Takes all steps of the budget; leaves ``run.sqlite`` in ``folder``.

        It goes on after the steps that this trainer has taken; for those of a folder
        call `resume` first. An interruption (Ctrl-C) saves the state after the last
        released step.

        Args:
          folder: made if missing; of this run alone. Its ``run.sqlite`` is private.
          evaluations: by name, on held-out data; run before the first step, after the
            statistics, every ``evaluate_every`` steps and after the last.
          evaluate_every: None: steps are scored after the last one only.
          select: whether `released` is the best stage on "validation", else on the
            first split that is not "test", and not the last stage. That split must
            share nobody with the training data. None: True, unless people are
            protected.
          checkpoint_every: steps between saved states; one is also saved after the last
            step, and whenever the releases since exceed 256 MiB.
          log_every: steps between log records.
          on_step: called after every logged step, with a `StepProgress`: for a progress
            bar, or a tracker such as TensorBoard.

        Returns:
          The log's records since the start or `resume`; none in other processes than
          the first, which write nothing.

        Raises:
          FileExistsError: the folder holds another run, or a later state of this one.
          LedgerError: its file is damaged, or was changed in the meantime.
          OSError: something cannot be written, or another process has the folder. The
            run can be resumed.
          RunEndedError: another process has ended; the last step is committed.
          RunMismatchError: another process has another run; nothing was charged.
          ValueError: the parameters are no longer finite, the run has another folder,
            or the data that choose a stage share somebody with the training data.
        """
        every = evaluate_every, checkpoint_every, log_every
        names = "evaluate_every", "checkpoint_every", "log_every"
        for name, value in zip(names, every, strict=True):
            _validation.whole_number(name, 1 if value is None else value)
        self.close()
        self._join()
        scored = dict(evaluations or {})
        with self._training(), self.processes.together():
            if not self.processes.is_first:
                loop.try_out(self, {})
                with self.ahead() as ahead:
                    for prepared in ahead:
                        self.step(prepared)
                self.processes.meet()  # the first process has committed
                return []
            with run_files.locked(folder):
                self.begin(folder)
                # Before any charge.
                choosing = loop.choosing_split(self, scored, select)
                loop.try_out(self, scored)
                with self.opened(folder) as store:
                    scoring = loop.Scoring(self, store, scored, *choosing)
                    records = loop.take_all_steps(self, store, scoring, every, on_step)
            self.processes.meet()
            return records

    @contextmanager
    def _training(self) -> Iterator[None]:
        with self._one_at_a_time():
            self._trained_by = threading.get_ident()
        try:
            yield
        finally:
            self._trained_by = None

    def public_record(self, step: int) -> dict[str, Any]:
        """Returns the public part of a step's log record."""
        norm = {"clip_norm": self.clip_norm} if self.clipping.counts else {}
        return {"step": step, **self.ledger.record(step, self.scores), **norm}

    def resume(self, folder: Path, *, book: str | None = None) -> int:
        """Continues the run of a folder; returns the number of its completed steps.

        Steps that were charged and not released are given up, with a warning, and count
        as completed; with a seed they are repeated. Nothing is released twice. A run
        that has released nothing may go on with a model of other shapes.

        Args:
          folder: of the run.
          book: name of the book that it is charged to, if any.

        Raises:
          FileNotFoundError: there is none.
          RunMismatchError: it is of a run with other settings; the message says which.
          LedgerError: its file is damaged, edited or another run's.
          RunEndedError: another process has ended.
          ValueError: this trainer has taken steps of its own; another book.
        """
        with self._one_at_a_time(), self.processes.together():
            if self.ledger.charged or self._store is not None:
                raise ValueError(
                    "resume must come before a trainer's first step, got one that has "
                    f"charged {self.ledger.charged}: the ledger would forget them; "
                    "make a new trainer, or call train to go on with this one"
                )
            self._agree()
            if self.processes.is_first:
                run_files.refuse_without_run(folder)
                with run_files.locked(folder):
                    run_files.import_old_run(folder, self.state)
                    with closing(RunStore(folder / run_files.STORE)) as store:
                        self._take_up(store, book)
                    self._folder = folder.resolve()
            self._share()
        return self.num_steps_taken

    def _take_up(self, store: RunStore, book: str | None) -> None:
        """Takes up the run in a file."""
        state, kinds = self.state, array_types(self.state)
        saved, ledger = resumed_run(store, self.budget, self.run, kinds, book)
        # If what follows ends, steps would be drawn without the run's secrets.
        self._is_half_resumed, self.ledger = True, ledger
        self._last_release = saved.last_release
        if saved.kinds == kinds:  # else nothing was released
            state = jax.tree.unflatten(jax.tree.structure(state), saved.arrays)
        self._now = (self._gradient.on_devices(state), saved.taken)
        self._apply_releases(store)
        self._main.draws.read_secrets(store, self.num_steps_taken + 1)
        self._is_half_resumed = False

    @contextmanager
    def opened(self, folder: Path) -> Iterator[RunStore]:
        """Opens the folder's file for charges and releases; applies its releases."""
        with closing(RunStore(folder / run_files.STORE)) as store:
            self.ledger.check(store)
            saved, taken = store.saved(), self.num_steps_taken
            if saved is not None and saved.taken > taken:
                raise FileExistsError(
                    f"{folder} has a checkpoint of step {saved.taken}, this run is at "
                    f"step {taken}; resume it again"
                )
            opening = described_opening(self.run, self.versions, self.truncation)
            if store.mark.charged < self.ledger.charged:  # steps taken without a file
                self._main.draws.write_secrets(store, self.ledger.charged)
            with self.ledger.writing_to(store, opening):
                self._apply_releases(store)
                self._main.draws.erase_secrets(store, self.num_steps_taken)
                self.save(store)
                store.drop_log(self.num_steps_taken)
                try:
                    self._store = store
                    yield store
                finally:
                    self._store = None

    def save(self, store: RunStore) -> None:
        """Commits the state after the last step."""
        state, taken = self._now
        check_finite(state.params, taken)
        kept = jax.device_get(jax.tree.leaves(state)), self.run, array_types(state)
        store.save(taken, *kept, self._last_release)
        if self.has_ended:  # by its plan, or by its own choice
            self._main.draws.erase_secrets(store, taken, is_over=True)

    def _applied(self, mechanism: Any, number: int, released: Any) -> TrainingState:
        """Returns the state after a release, which is post-processing."""
        after = mechanism.apply(self.state, number, released)
        state = self._gradient.on_devices(after)
        if after.start is self.state.start:
            # The same object: see `PrivateStatistics.table`.
            state = state._replace(start=after.start)
        self._last_release = number
        return state

    def _apply_releases(self, store: RunStore) -> None:
        """Applies the releases that the state lacks; gives up other charged steps."""
        for number, arrays in store.releases(after=self.num_steps_taken):
            mechanism = self.mechanisms[self.ledger.name_of(number)]
            released = mechanism.as_release(self.state, arrays)
            self._now = (self._applied(mechanism, number, released), number)
        self._give_up_unreleased()

    def _give_up_unreleased(self) -> None:
        """Gives up steps that were charged and interrupted before their release."""
        # To repeat one would be an uncharged release; with a seed it is the same one.
        (state, taken), charged = self._now, self.ledger.charged
        if taken == charged:
            return
        self._gradient.forget()  # no later release depends on a lost step's noise
        if self.is_seeded:
            return
        self._now = (state, charged)
        many, one = f"steps {taken + 1} to {charged} were", f"step {charged} was"
        text = "charged and interrupted before the release: given up, counted as taken"
        warnings.warn(f"{many if charged - taken > 1 else one} {text}", stacklevel=2)

    def _shared(self, tree: Any) -> Any:
        """The first process's arrays, on this process's devices."""
        shared = self.processes.shared(tree)
        return shared if shared is tree else self._gradient.on_devices(shared)

    def _join(self) -> None:
        """Makes the trainers of all processes one run, once."""
        if self._is_half_resumed:
            raise ValueError("resume did not end: make a new trainer, and resume again")
        if not self._is_joined:
            with self.processes.together():
                self._agree()
                self._share()

    def _agree(self) -> None:
        """Refuses processes whose run is not the first one's."""
        kinds = array_types(self.state.params)
        check_run(self.processes, {**self.run, **self.versions, "parameters": kinds})

    def _share(self) -> None:
        """Gives all processes the first one's parameters, choices and counts."""
        self.processes.meet()  # else others wait for a process that could not resume
        ledger, state = self.ledger, self.state
        own = [self.num_steps_taken, ledger.charged, ledger.options, ledger.has_ended]
        taken, charged, options, has_ended = self.processes.shared_value(own)
        params, start, norm = self._shared((state.params, state.start, state.clip_norm))
        if not self.processes.is_first:
            how = {"charged": charged, "has_ended": has_ended}
            self.ledger = Ledger(self.budget, options, **how)
            state = state._replace(params=params, start=start, clip_norm=norm)
            self._now = (state, taken)
        self._is_joined = True

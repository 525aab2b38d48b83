"""State and ledger of a run, in every process; resuming from the disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp_episodic.accountant.questions.budget import (
    PrivacyBudget,
    SpentAhead,
    public_budget,
)
from jaxdp_episodic.accountant.report.ledger_file import LedgerError, content_of
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.gradient.private_gradient import (
    Counted,
    PrivateGradient,
)
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.checks import check_finite
from jaxdp_episodic.trainer.run.description import (
    agreed,
    described_opening,
    described_versions,
    refuse_other_run,
)
from jaxdp_episodic.trainer.run.draws import RunDraws
from jaxdp_episodic.trainer.run.importer import import_old_run
from jaxdp_episodic.trainer.run.ledger import Ledger
from jaxdp_episodic.trainer.run.release import write_release
from jaxdp_episodic.trainer.run.said import said_of
from jaxdp_episodic.trainer.run.selection import Selection
from jaxdp_episodic.trainer.run.stages import Stage, Stages
from jaxdp_episodic.trainer.run.state import (
    TrainingState,
    kinds_of,
    refuse_other_state,
    released_params,
)
from jaxdp_episodic.trainer.run.store import RunStore, create_store


class RunState:
    """A run's state and the number of steps in it, which `Trainer` advances.

    Where there are several processes the first one's is the run's, and the others are
    given what their shares of the steps need: before the first of them the parameters,
    and private statistics that were released; for each the secret of its draw.

    Args:
      gradient: of the steps, which knows the devices.
      state: before the first step.
      keys: of the run.
      run: what it is; see `described_run`.
      budget: of the run.
      noise: "gaussian" or "discrete".

    Attributes:
      run: what the run is.
      ledger: counts its charges; in other processes than the first a copy in memory.
      versions: of what this process computes with; see `described_versions`.
      recipe: how examples become what the model sees, and what the model is, as plain
        values; of a run from a config. They are for its release; see `load_release`.
      selection: what `train` has chosen to release; None before its end.
      has_private_scores: held-out data are protected, too, and scored with noise.
    """

    _draws: RunDraws
    _noise_multiplier: float
    _stages: Stages
    truncation: Truncation | None
    has_private_scores = False

    def __init__(
        self,
        gradient: PrivateGradient,
        state: TrainingState,
        keys: Keys,
        run: Mapping[str, Any],
        budget: PrivacyBudget,
        noise: str,
    ) -> None:
        self.run, self.budget, self.noise = run, budget, noise
        self.ledger, self.versions = self._new_ledger(), described_versions()
        self.recipe: Mapping[str, Any] = {}
        self._gradient, self._keys = gradient, keys
        # One attribute: whenever an interrupt comes, the two belong together.
        self._now = (gradient.on_devices(state), 0)
        self._processes = all_processes()
        self._has_agreed = self._is_joined = False
        self.selection: Selection | None = None
        self._folder: Path | None = None
        self._name = ""
        self._store: RunStore | None = None

    def _new_ledger(self, charged: int = 0) -> Ledger:
        return Ledger(self.budget, charged=charged)

    @property
    def is_seeded(self) -> bool:
        """True if draws and noise follow from a seed, so that nothing is private."""
        return self._keys.is_seeded

    @property
    def state(self) -> TrainingState:
        """Parameters and optimizer state after the last step."""
        return self._now[0]

    @property
    def params(self) -> Any:
        """The parameters to evaluate and release; see `released_params`."""
        return released_params(self.state)

    def stages(self) -> tuple[Stage, ...]:
        """What the run has now, the simplest first: see `Stage`.

        All of it is post-processing of what was charged.
        """
        has_stepped = self.num_steps_taken > len(self.budget.before)
        return self._stages.of(self.state, has_stepped=has_stepped)

    def stages_after(self, step: int, params: Any) -> tuple[Stage, ...]:
        """What parameters after an earlier gradient step can be used as."""
        return tuple(self._stages.stepped(params, f"@{step}"))

    @property
    def released(self) -> Stage:
        """The stage that is released: in the first process what `train` has chosen.

        The last, where there was no choice, or steps were taken since.
        """
        chosen = self.selection
        if chosen is None or chosen.step != self.num_steps_taken:
            return self.stages()[-1]
        return chosen.stage

    @property
    def num_steps_taken(self) -> int:
        """Steps in the state, those given up included."""
        return self._now[1]

    @property
    def has_ended(self) -> bool:
        """Whether the run takes no more steps, whatever comes."""
        return self.num_steps_taken >= self.budget.num_steps

    @property
    def num_steps_charged(self) -> int:
        """Steps charged: those taken, and perhaps one that was interrupted."""
        return self.ledger.charged

    @property
    def has_public_accounting(self) -> bool:
        """False if epsilons were computed from private sizes; see `public_budget`."""
        return public_budget(self.budget) is not None

    def accounting(self) -> Callable[[int], dict[str, Any]]:
        """Returns what says, of a step, what the log's public part has besides."""
        spent = SpentAhead(self.budget)
        return lambda step: {"epsilon": spent.at(step) if step else 0.0}

    @property
    def clipping(self) -> ClippingConfig:
        """What is made of contributions; of a run that was given none, "fixed"."""
        return self._gradient.clipping

    @property
    def clip_norm(self) -> float:
        """The clip norm of the next step: the run's, or what its releases made of it.

        It is known before the step is charged and drawn.
        """
        found = self.state.clip_norm
        return self.run["l2_clip_norm"] if isinstance(found, tuple) else float(found)

    @property
    def noise_deviation(self) -> float:
        """Of the noise in each coordinate of the next step's sum."""
        return self._gradient.deviation(self._noise_multiplier) * self.clip_norm

    def release(self, folder: Path) -> list[Path]:
        """Writes what may be published of the run, as the command does; see `Release`.

        The parameters that `released` has, the statement of the run's privacy, the
        public log, and what `load_release` needs. It speaks of all steps that were
        charged, and leaves out whatever was computed from private sizes. Of a book,
        which it knows nothing of, `run_training` says more.

        Args:
          folder: made if missing; files of these names are replaced, all at once.

        Returns:
          The files; in other processes than the first, which write nothing, none.

        Raises:
          OSError: a file that cannot be written.
          ValueError: a run that was not trained in a folder, where its log is.
        """
        if not self._processes.is_first:
            return []
        if self._folder is None:
            raise ValueError(
                "release must come after train or resume: the log is there"
            )
        return write_release(folder, self, self._folder, said_of(self))

    def begin(
        self,
        folder: Path,
        *,
        name: str | None = None,
        book: str | None = None,
        search: str | None = None,
    ) -> str:
        """Makes the file of a new run in a folder, which this process holds.

        Nothing is charged. Where the run has its file there nothing happens.

        Args:
          folder: see `Trainer.train`.
          name: of the run; None: a random one.
          book: name of the one that the run is charged to, if any.
          search: name of the one that it is one run of, if any.

        Returns:
          The run's name.

        Raises:
          FileExistsError: another run is there.
          OSError: it cannot be written.
          ValueError: the run has another folder.
        """
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
        mark = self.ledger.mark
        return self._name if mark is None else mark.run

    @contextmanager
    def opened(self, folder: Path) -> Iterator[RunStore]:
        """Charges and releases steps by way of the folder's file.

        First takes what it has released, and saves the state.
        """
        with closing(RunStore(folder / run_files.STORE)) as store:
            self.ledger.check(store)
            saved, taken = store.saved(), self.num_steps_taken
            if saved is not None and saved.taken > taken:
                raise FileExistsError(
                    f"{folder} has a checkpoint of step {saved.taken}, this run is at "
                    f"step {taken}; resume it again"
                )
            opening = described_opening(self.run, self.versions, self.truncation)
            if store.mark.charged < self.ledger.charged:  # of steps taken elsewhere
                self._draws.keep(store, self.ledger.charged)
            with self.ledger.writing_to(store, opening):
                self._take_releases(store)
                self._end_epoch(store, self.num_steps_taken)
                self.save(store)
                store.drop_log(self.num_steps_taken)
                self._store = store
                try:
                    yield store
                finally:
                    self._store = None

    def save(self, store: RunStore) -> None:
        """Commits the state after the last step.

        Raises:
          ValueError: the parameters are not finite.
          OSError: it cannot be written; an earlier state is there, and the releases.
        """
        state, taken = self._now
        check_finite(state.params, taken)
        arrays = jax.device_get(jax.tree.leaves(state))
        store.save(taken, arrays, self.run, kinds_of(state))

    def _let_out(self, state: TrainingState, number: int, released: Any) -> Any:
        """The state after a release, which is on the disk before it has effects."""
        if self._store is not None:
            leaves = jax.device_get(jax.tree.leaves(released))
            self._store.release(number, leaves)
        return self._after(state, number, released)

    def _after(self, state: TrainingState, number: int, released: Any) -> TrainingState:
        """The state that follows from a release: post-processing, whenever it is."""
        raise NotImplementedError

    def _released_like(self, number: int) -> Any:
        """Shapes and types of what a step releases; None of a statistic."""
        if number <= len(self.budget.before):
            return None
        dtype, params = training_dtype(self.state.params), self.state.params
        gradient = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params
        )
        if not self._gradient.clipping.counts:
            return gradient
        return Counted(gradient, jax.ShapeDtypeStruct((), np.float32))

    def _take_releases(self, store: RunStore) -> None:
        """Takes the releases after the state; gives up other charged steps."""
        for number, arrays in store.releases(after=self.num_steps_taken):
            if number > self.ledger.charged:
                raise LedgerError(
                    f"{store.path} has a release of step {number}, and "
                    f"{self.ledger.charged} steps charged"
                )
            like, released = self._released_like(number), arrays[0]
            if like is not None:
                structure = jax.tree.structure(like)
                found = list(kinds_of(arrays).values())
                wanted = list(kinds_of(jax.tree.leaves(like)).values())
                if found != wanted:
                    raise LedgerError(
                        f"step {number} released arrays of another model than this "
                        f"one: {', '.join(found)}, for {', '.join(wanted)}; resume "
                        "with the run's"
                    )
                released = jax.tree.unflatten(structure, arrays)
            self._now = (self._after(self.state, number, released), number)
        self._give_up_unreleased()

    def _give_up_unreleased(self) -> None:
        """Gives up steps that were charged and interrupted before their release.

        Taken again they would be another release, with another draw and other noise,
        that nobody charged. Those of a seed would be the same release.
        """
        state, taken = self._now
        charged = self.ledger.charged
        if taken == charged or self.is_seeded:
            return
        self._now = (state, charged)
        which = f"step {charged} was"
        if charged - taken > 1:
            which = f"steps {taken + 1} to {charged} were"
        warnings.warn(
            f"{which} charged and broken off before the release: given up, and counted "
            "as taken",
            stacklevel=2,
        )

    def _end_epoch(self, store: RunStore, step: int) -> None:
        """Forgets an epoch on the disk that ends with this step."""
        self._draws.end(store, step, is_last=step >= self.budget.num_steps)

    def _shared(self, tree: Any) -> Any:
        """The first process's arrays, on this one's devices."""
        shared = self._processes.shared(tree)
        return shared if shared is tree else self._gradient.on_devices(shared)

    def _take_up(self, folder: Path, book: str | None) -> None:
        """Takes up what a folder's file has."""
        run_files.refuse_without_run(folder)
        with run_files.locked(folder):
            path = folder / run_files.STORE
            if not path.exists():
                import_old_run(folder, self.state)
            with closing(RunStore(path)) as store:
                content, saved = content_of(store), store.saved()
                if saved is None:
                    raise LedgerError(f"{path} has charges, and no checkpoint")
                refuse_other_run(saved.run, self.run)
                refuse_other_state(saved.kinds, kinds_of(self.state))
                ledger = self._new_ledger()
                ledger.refuse_other(content)
                content.refuse_other_book(book)
                taken, charged, most = saved.taken, content.charged, ledger.most
                if not taken <= charged <= most:
                    raise LedgerError(
                        f"{path} has {charged} steps charged, of which the checkpoint "
                        f"contains {taken} and the target permits {most}"
                    )
                state = jax.tree.unflatten(jax.tree.structure(self.state), saved.arrays)
                self.ledger = ledger.after(content, store.mark)
                self._now = (self._gradient.on_devices(state), taken)
                self._folder = folder.resolve()
                self._take_releases(store)
                self._draws.take_up(store, self.num_steps_taken + 1)

    def _join(self) -> None:
        """Makes the trainers of all processes one run, once."""
        if not self._is_joined:
            with self._processes.together():
                self._agree()
                self._share()

    def _agree(self) -> None:
        """Refuses processes with another run than the first; asked once."""
        if self._has_agreed:
            return
        leaves = jax.tree.leaves(self.state.params)
        kinds = [f"{leaf.dtype} {leaf.shape}" for leaf in leaves]
        agreed(self._processes, {**self.run, **self.versions, "parameters": kinds})
        self._has_agreed = True

    def _share(self) -> None:
        """Gives all processes the parameters, clip norm and counts of the first one."""
        self._processes.meet()  # or others would wait for one that could not resume
        taken, charged = self._processes.shared_value(
            [self.num_steps_taken, self.ledger.charged]
        )
        state = self.state
        params, start, norm = self._shared((state.params, state.start, state.clip_norm))
        if not self._processes.is_first:
            self.ledger = self._new_ledger(charged)
            state = state._replace(params=params, start=start, clip_norm=norm)
            self._now = (state, taken)
        self._is_joined = True

"""State and ledger of a run, in every process; resuming from the disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp_episodic.accountant.questions.budget import (
    PrivacyBudget,
    SpentAhead,
    public_budget,
)
from jaxdp_episodic.accountant.report.ledger_file import LedgerError
from jaxdp_episodic.files.atomic import TEMPORARY
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.gradient.private_gradient import (
    Counted,
    PrivateGradient,
)
from jaxdp_episodic.trainer.gradient.processes import all_processes
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.checkpoint import (
    Checkpoints,
    Snapshot,
    TrainingState,
    released_params,
)
from jaxdp_episodic.trainer.run.description import agreed, described_versions
from jaxdp_episodic.trainer.run.draws import RunDraws
from jaxdp_episodic.trainer.run.journal import (
    Journal,
    JournalError,
    as_bytes,
    from_bytes,
)
from jaxdp_episodic.trainer.run.ledger import Ledger, create_ledger, taken_up
from jaxdp_episodic.trainer.run.release import write_release
from jaxdp_episodic.trainer.run.said import said_of
from jaxdp_episodic.trainer.run.selection import Selection
from jaxdp_episodic.trainer.run.stages import Stage, Stages


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
        self._journal: Journal | None = None

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
        return write_release(folder, self, self._folder / run_files.LOG, said_of(self))

    def snapshot(self) -> Snapshot:
        """Returns the run after its last step, without secrets of draws or noise."""
        return Snapshot(*self._now, self.run)

    def begin(
        self,
        folder: Path,
        *,
        name: str | None = None,
        book: str | None = None,
        search: str | None = None,
    ) -> str:
        """Makes the ledger of a new run in a folder, which this process holds.

        Nothing is charged. Where the run has its ledger there nothing happens.

        Args:
          folder: see `Trainer.train`.
          name: of the run; None: a random one.
          book: name of the one that the run is charged to, if any.
          search: name of the one that it is one run of, if any.

        Returns:
          The run's name.

        Raises:
          FileExistsError: another run is there.
          OSError: the ledger cannot be written.
          ValueError: the run has another folder.
        """
        if self._folder != folder.resolve():
            if self.ledger.mark is not None:
                raise ValueError(
                    f"folder must be the run's own, {self._folder}, got {folder}: its "
                    "ledger is there"
                )
            run_files.refuse_other_files(folder)
            for left in (run_files.EPOCH, run_files.BEST):
                (folder / left).unlink(missing_ok=True)
            names = {"run": name, "book": book, "search": search}
            path, is_seeded = folder / run_files.LEDGER, self.is_seeded
            self._name = create_ledger(path, self.budget, is_seeded=is_seeded, **names)
            self._folder = folder.resolve()
        mark = self.ledger.mark
        return self._name if mark is None else mark.run

    @contextmanager
    def journaling(self, folder: Path, run: str) -> Iterator[Journal]:
        """Releases steps by way of the folder's journal; first takes what is in it.

        ``run`` is the run's random name, as in its ledger.
        """
        for path in folder.glob(run_files.EPOCH + TEMPORARY + "*"):
            path.unlink()  # of a process that was killed while it wrote the file
        with Journal(folder / run_files.JOURNAL, run) as journal:
            self._take_releases(journal)
            self._end_epoch(folder, self.num_steps_taken)
            self._journal = journal
            try:
                yield journal
            finally:
                self._journal = None

    def _let_out(self, state: TrainingState, number: int, released: Any) -> Any:
        """The state after a release, which is in the journal before it has effects."""
        if self._journal is not None:
            self._journal.append(number, as_bytes(released))
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

    def _take_releases(self, journal: Journal) -> None:
        """Takes the releases after the state; gives up other charged steps."""
        taken = self.num_steps_taken
        for release in journal.releases(after=taken):
            state, number = self.state, release.step
            if release.base > taken:
                raise JournalError(
                    f"the journal stands on the checkpoint of step {release.base}, the "
                    f"latest is of step {taken}: put the other one back, or give up "
                    f"what followed by removing {journal.path}"
                )
            if number > self.ledger.charged:
                raise LedgerError(
                    f"the journal has a release of step {number}, and the ledger "
                    f"{self.ledger.charged} steps charged: the ledger was rolled back"
                )
            released = from_bytes(release, self._released_like(number))
            self._now = (self._after(state, number, released), number)
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

    def keep_epoch(self, folder: Path, run: str, step: int) -> None:
        """Keeps who takes part in a step's epoch, before anything of it is charged."""
        self._draws.keep(folder / run_files.EPOCH, run, step)

    def _end_epoch(self, folder: Path, step: int) -> None:
        """Forgets an epoch on the disk that ends with this step."""
        is_last = step >= self.budget.num_steps
        self._draws.end(folder / run_files.EPOCH, step, is_last=is_last)

    def _shared(self, tree: Any) -> Any:
        """The first process's arrays, on this one's devices."""
        shared = self._processes.shared(tree)
        return shared if shared is tree else self._gradient.on_devices(shared)

    def _take_up(self, folder: Path, book: str | None) -> None:
        """Takes up checkpoint, ledger, journal and epoch in a folder."""
        run_files.refuse_without_checkpoint(folder)
        with (
            run_files.locked(folder),
            Checkpoints(folder / run_files.CHECKPOINTS) as checkpoints,
        ):
            snapshot = checkpoints.restore(self.state, self.run)
            path = folder / run_files.LEDGER
            self.ledger = taken_up(path, snapshot, self._new_ledger(), book)
            state = type(self.state)(*snapshot.state)
            state = self._gradient.on_devices(state)
            self._now = (state, snapshot.charged_steps)
            self._folder = folder.resolve()
            assert self.ledger.mark is not None
            run = self.ledger.mark.run
            with Journal(folder / run_files.JOURNAL, run) as journal:
                self._take_releases(journal)
            path = folder / run_files.EPOCH
            self._draws.take_up(path, run, self.num_steps_taken + 1)

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

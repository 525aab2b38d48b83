"""The steps of a run in its folder: each taken, noted, judged and committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp_episodic.accountant.questions.budget import SpentAhead
from jaxdp_episodic.trainer.run import checks, run_files
from jaxdp_episodic.trainer.run.checkpoint import Checkpoints
from jaxdp_episodic.trainer.run.description import described_opening
from jaxdp_episodic.trainer.run.journal import Journal
from jaxdp_episodic.trainer.run.ledger import LedgerFile
from jaxdp_episodic.trainer.run.run_files import PRIVATE, RunLog, StepProgress


def take_all_steps(
    run: Any,
    folder: Path,
    evaluate: Callable[[], dict[str, Any]],
    every: tuple[int | None, int, int],
    on_step: Callable[[StepProgress], None] | None,
) -> list[dict[str, Any]]:
    """Takes a trainer's steps in a folder that is locked and holds its run or none.

    At an interruption, or the end of another process, the last step that was released
    is committed. Its evaluation, if it was broken off, is made up for when the run goes
    on.

    Args:
      run: a `Trainer`.
      folder: with its ledger.
      evaluate: returns what belongs to the log's records.
      every: steps between evaluations (None: at the ends), checkpoints and records.
      on_step: is called after every record.

    Returns:
      The records.
    """
    budget = run.budget
    last, before = budget.num_steps, len(budget.before)
    spent = SpentAhead(budget)

    def is_due(place: int, step: int) -> bool:
        often = every[place]
        return step in (last, before) or (often is not None and step % often == 0)

    noted: list[dict[str, Any]] = []
    with _opened(run, folder) as (log, journal, commit):

        def note(record: dict[str, Any]) -> None:
            noted.append(record)
            log.write(record)

        start, told = run.num_steps_taken, log.last_step
        if told is None and start == 0:
            note({"step": 0, "epsilon": 0.0, **evaluate()})
        elif (told is None or told < start) and (is_due(0, start) or is_due(2, start)):
            held_out = evaluate() if is_due(0, start) else {}
            note({"step": start, "epsilon": spent.at(start), **held_out})
        try:
            with run.ahead() as ahead:
                for prepared in ahead:
                    begun = time.perf_counter()
                    diagnostics = run.step(prepared)
                    step = run.num_steps_taken
                    held_out = evaluate() if is_due(0, step) else {}
                    progress = None
                    if is_due(2, step) or held_out:
                        private: dict[str, Any] = dict(diagnostics)
                        private["seconds"] = time.perf_counter() - begun
                        epsilon = spent.at(step)
                        public = {"step": step, "epsilon": epsilon}
                        note({**public, PRIVATE: private, **held_out})
                        progress = StepProgress(step, last, epsilon, noted[-1])
                    if on_step is not None and progress is not None:
                        on_step(progress)
                    if is_due(1, step) or journal.is_full:
                        commit()
            commit()
        except (KeyboardInterrupt, ConnectionError) as end:
            try:
                commit()
            except Exception as error:  # of the disk, or of Orbax, cut off in a save
                step = run.num_steps_taken  # an earlier one is there, and the journal
                end.add_note(f"no checkpoint of step {step}: {error}")
            raise
    return noted


@contextmanager
def _opened(
    run: Any, folder: Path
) -> Iterator[tuple[RunLog, Journal, Callable[[], None]]]:
    """A run's log and journal, and what makes a checkpoint, the log before it.

    Charges go to the run's ledger meanwhile. The ledger comes first, then a checkpoint:
    whatever has a log can be gone on with.

    Raises:
      FileExistsError: the folder's run has gone on since this one was taken up.
      LedgerError: the ledger is damaged or another run's.
      OSError: something cannot be read or written.
    """
    with LedgerFile(folder / run_files.LEDGER, contains=run.ledger.mark) as ledger:
        name, charged = ledger.mark.run, run.ledger.charged
        if ledger.charged < charged:  # of steps taken elsewhere
            run.keep_epoch(folder, name, charged)
        with (
            run.ledger.writing_to(ledger, described_opening(run.versions)),
            Checkpoints(folder / run_files.CHECKPOINTS) as checkpoints,
            run.journaling(folder, name) as journal,
        ):
            checkpoints.remove_unfinished()

            def save() -> None:
                state, taken, _, _ = snapshot = run.snapshot()
                checks.check_finite(state.params, taken)
                if checkpoints.latest != taken:
                    checkpoints.save(snapshot._replace(ledger=ledger.mark))
                journal.cut(taken)

            taken = run.num_steps_taken
            if (checkpoints.latest or 0) > taken:
                raise FileExistsError(
                    f"{folder} has a checkpoint of step {checkpoints.latest}, this run "
                    f"is at step {taken}; resume it again"
                )
            save()
            with RunLog(folder / run_files.LOG, keep_through=taken) as log:

                def commit() -> None:
                    log.sync()
                    save()

                yield log, journal, commit

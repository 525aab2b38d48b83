"""The steps of a run in its folder: each taken, noted, judged and committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp_episodic.trainer.run import checks, run_files
from jaxdp_episodic.trainer.run.checkpoint import Checkpoints
from jaxdp_episodic.trainer.run.description import described_opening
from jaxdp_episodic.trainer.run.journal import Journal
from jaxdp_episodic.trainer.run.ledger import LedgerFile
from jaxdp_episodic.trainer.run.run_files import (
    HELD_OUT,
    PRIVATE,
    RunLog,
    StepProgress,
    public_record,
)


def take_all_steps(
    run: Any,
    folder: Path,
    evaluate: Callable[[], dict[str, Any]],
    every: tuple[int | None, int, int],
    on_step: Callable[[StepProgress], None] | None,
) -> list[dict[str, Any]]:
    """Takes a trainer's steps in its folder, which is locked; returns log records.

    At an interruption, or the end of another process, the last step that was released
    is committed. Its evaluation, if interrupted, is repeated when the run resumes.

    Args:
      run: a `Trainer`.
      folder: with its ledger.
      evaluate: returns scores for a record.
      every: steps between evaluations (None: before the first step and after the last),
        checkpoints and records.
      on_step: is called after every record.
    """
    budget = run.budget
    last, before = budget.num_steps, len(budget.before)
    accounted, is_public = run.accounting(), run.has_public_accounting

    def is_due(often: int | None, step: int) -> bool:
        return step in (last, before) or (often is not None and step % often == 0)

    evaluate_every, checkpoint_every, log_every = every

    def public(step: int) -> dict[str, Any]:
        norm = {"clip_norm": run.clip_norm} if run.clipping.counts else {}
        return {"step": step, **accounted(step), **norm}

    noted: list[dict[str, Any]] = []
    with _opened(run, folder) as (log, journal, commit):

        def note(record: dict[str, Any]) -> None:
            noted.append(record)
            log.write(record)

        start, logged = run.num_steps_taken, log.last_step
        if logged is None and start == 0:
            note({**public(0), **evaluate()})
        elif logged is None or logged < start:
            is_evaluated = is_due(evaluate_every, start)
            if is_evaluated or is_due(log_every, start):
                held_out = evaluate() if is_evaluated else {}
                note({**public(start), **held_out})
        try:
            with run.ahead() as ahead:
                for prepared in ahead:
                    begun = time.perf_counter()
                    diagnostics = run.step(prepared)
                    step = run.num_steps_taken
                    held_out = evaluate() if is_due(evaluate_every, step) else {}
                    if is_due(log_every, step) or held_out:
                        seconds = time.perf_counter() - begun
                        private = {**diagnostics, "seconds": seconds}
                        note({**public(step), PRIVATE: private, **held_out})
                        if on_step is not None:
                            shown = public_record(noted[-1]) if is_public else {}
                            on_step(StepProgress(step, last, shown, noted[-1]))
                    if is_due(checkpoint_every, step) or journal.is_full:
                        commit()
            step = run.num_steps_taken
            if step != last and noted and HELD_OUT not in noted[-1]:
                # A run that chose to end has not known before that this is the last.
                if held_out := evaluate():
                    epsilon = accounted(step)["epsilon"]
                    note({"step": step, "epsilon": epsilon, **held_out})
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
    """A run's log and journal, and a function that syncs the log and checkpoints.

    Charges go to the run's ledger meanwhile. The ledger is opened first, then comes a
    checkpoint: whatever has a log can be resumed.

    Raises:
      FileExistsError: the folder's run has gone on since this one was resumed.
      LedgerError: the ledger is damaged or another run's.
      OSError: something cannot be read or written.
    """
    with LedgerFile(folder / run_files.LEDGER, contains=run.ledger.mark) as ledger:
        name, charged = ledger.mark.run, run.ledger.charged
        opening = described_opening(run.run, run.versions, run.truncation)
        if ledger.charged < charged:  # of steps taken elsewhere
            run.keep_epoch(folder, name, charged)
        with (
            run.ledger.writing_to(ledger, opening),
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

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
    PRIVATE,
    STAGES,
    RunLog,
    StepProgress,
    public_record,
)
from jaxdp_episodic.trainer.run.selection import Scoring


def take_all_steps(
    run: Any,
    folder: Path,
    scoring: Scoring,
    every: tuple[int | None, int, int],
    on_step: Callable[[StepProgress], None] | None,
) -> list[dict[str, Any]]:
    """Takes a trainer's steps in its folder, which is locked; returns log records.

    At an interruption, or the end of another process, the last step that was released
    is committed. Its evaluation, if interrupted, is repeated when the run resumes.

    Args:
      run: a `Trainer`.
      folder: with its ledger.
      scoring: scores for records, and the choice of what is released.
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

        def evaluate(step: int) -> dict[str, Any]:
            is_evaluated = step == 0 or is_due(evaluate_every, step)
            return scoring.now(is_last=step == last) if is_evaluated else {}

        run.selection = None
        start, noted_last = run.num_steps_taken, log.last or {}
        if noted_last.get("step", -1) < start:
            held_out = evaluate(start)
            if held_out or is_due(log_every, start):
                note({**public(start), **held_out})
        try:
            with run.ahead() as ahead:
                for prepared in ahead:
                    begun = time.perf_counter()
                    diagnostics = run.step(prepared)
                    step = run.num_steps_taken
                    held_out = evaluate(step)
                    if is_due(log_every, step) or held_out:
                        seconds = time.perf_counter() - begun
                        private = {**diagnostics, "seconds": seconds}
                        note({**public(step), PRIVATE: private, **held_out})
                        if on_step is not None:
                            shown = public_record(noted[-1]) if is_public else {}
                            on_step(StepProgress(step, last, shown, noted[-1]))
                    if is_due(checkpoint_every, step) or journal.is_full:
                        commit()
            if run.selection is None or run.selection.step != run.num_steps_taken:
                # The run ended before, or has not known that this step is the last.
                step, chosen = run.num_steps_taken, scoring.choose()
                if STAGES not in (noted[-1] if noted else noted_last) and chosen.scores:
                    held_out = scoring.now(is_last=True)
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
    checkpoint: whatever has a log can be resumed. Errors are those of `Trainer.train`.
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

"""The steps of a run in its folder: each taken, noted, judged and committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp_episodic.accounting.budget import SpentAhead
from jaxdp_episodic.training import checks, run_files
from jaxdp_episodic.training.checkpoint import Checkpoints, Snapshot
from jaxdp_episodic.training.episode import Block
from jaxdp_episodic.training.ledger import LedgerFile
from jaxdp_episodic.training.run_files import PRIVATE, RunLog, StepProgress


def take_all_steps(
    run: Any,
    drawn: Iterable[list[Block] | None],
    folder: Path,
    evaluate: Callable[[], dict[str, Any]],
    every: tuple[int | None, int, int],
    on_step: Callable[[StepProgress], None] | None,
) -> list[dict[str, Any]]:
    """Takes a trainer's steps in a folder that is locked and holds its run or none.

    An interruption, or the end of another process, goes back to the last step whose
    evaluation and record are there as well, and commits it.

    Args:
      run: a `Trainer`.
      drawn: what each of its steps is given.
      folder: with its ledger.
      evaluate: returns what belongs to the log's records.
      every: steps between evaluations (None: at the ends), checkpoints and records.
      on_step: is called after every record.

    Returns:
      The records.
    """
    start, budget = run.num_steps_taken, run.budget
    last, before = budget.num_steps, len(budget.before)
    spent = SpentAhead(budget)

    def is_due(place: int, step: int) -> bool:
        often = every[place]
        return step in (last, before) or (often is not None and step % often == 0)

    noted: list[dict[str, Any]] = []
    with _opened(run, folder) as (log, commit):

        def note(record: dict[str, Any]) -> None:
            noted.append(record)
            log.write(record)

        if start == 0 and not run_files.read_log(folder / run_files.LOG):
            note({"step": 0, "epsilon": 0.0, **evaluate()})
        complete = run.snapshot()
        try:
            for blocks in drawn:
                begun = time.perf_counter()
                diagnostics = run.step(blocks)
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
                complete = run.snapshot()
                if on_step is not None and progress is not None:
                    on_step(progress)
                if is_due(1, step):
                    commit(complete)
        except (KeyboardInterrupt, ConnectionError) as end:
            # Whoever calls `train` again takes the rest again, charged already.
            run.go_back_to(complete)
            try:
                commit(complete)
            except Exception as error:  # of the disk, or of Orbax, cut off in a save
                step = complete.charged_steps  # an earlier one is there
                end.add_note(f"no checkpoint of step {step}: {error}")
            raise
    return noted


@contextmanager
def _opened(
    run: Any, folder: Path
) -> Iterator[tuple[RunLog, Callable[[Snapshot], None]]]:
    """A run's log, and what makes a checkpoint, with the log up to it on the disk.

    Charges go to the run's ledger meanwhile. The ledger comes first, then a checkpoint:
    whatever has a log can be gone on with.

    Raises:
      FileExistsError: the folder's run has gone on since this one was taken up.
      LedgerError: the ledger is damaged or another run's.
      OSError: something cannot be read or written.
    """
    with (
        LedgerFile(folder / run_files.LEDGER, contains=run.ledger.mark) as ledger,
        run.ledger.writing_to(ledger, run.environment),
        Checkpoints(folder / run_files.CHECKPOINTS) as checkpoints,
    ):
        checkpoints.remove_unfinished()
        now, latest = run.snapshot(), checkpoints.latest
        if latest is None:
            checkpoints.save(now._replace(ledger=ledger.mark))
        elif latest > now.charged_steps:
            raise FileExistsError(
                f"{folder} has a checkpoint of step {latest}, this run is at "
                f"step {now.charged_steps}; resume it again"
            )

        def commit(snapshot: Snapshot) -> None:
            checks.check_finite(snapshot.state.params, snapshot.charged_steps)
            log.sync()
            if checkpoints.latest != snapshot.charged_steps:
                checkpoints.save(snapshot._replace(ledger=ledger.mark))

        with RunLog(folder / run_files.LOG, keep_through=now.charged_steps) as log:
            yield log, commit

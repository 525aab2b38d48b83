"""The steps of a run in its folder: each taken, noted, judged and committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxdp_episodic.accounting.budget import SpentAhead
from jaxdp_episodic.training import run_files
from jaxdp_episodic.training.episode import Block
from jaxdp_episodic.training.run_files import PRIVATE, StepProgress


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

    with run_files.opened_records(
        folder, run.ledger, run.environment, run.snapshot
    ) as files:
        if start == 0 and not run_files.read_log(folder / run_files.LOG):
            files.note({"step": 0, "epsilon": 0.0, **evaluate()})
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
                    files.note({**public, PRIVATE: private, **held_out})
                    progress = StepProgress(step, last, epsilon, files.noted[-1])
                complete = run.snapshot()
                if on_step is not None and progress is not None:
                    on_step(progress)
                if is_due(1, step):
                    files.commit(complete)
        except (KeyboardInterrupt, ConnectionError) as end:
            # Whoever calls `train` again takes the rest again, charged already.
            run.go_back_to(complete)
            files.commit_if_possible(complete, end)
            raise
        return files.noted

"""The steps of a run in its folder: each taken, noted, judged and committed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxdp_episodic.trainer.run.run_files import (
    PRIVATE,
    STAGES,
    StepProgress,
    public_record,
)
from jaxdp_episodic.trainer.run.selection import Scoring
from jaxdp_episodic.trainer.run.store import RunStore


def take_all_steps(
    run: Any,
    store: RunStore,
    scoring: Scoring,
    every: tuple[int | None, int, int],
    on_step: Callable[[StepProgress], None] | None,
) -> list[dict[str, Any]]:
    """Takes a trainer's steps; returns the records of its log.

    At an interruption, or the end of another process, the last step that was released
    is committed. Its evaluation, if interrupted, is repeated when the run resumes.

    Args:
      run: a `Trainer`.
      store: its open file.
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

    def note(record: dict[str, Any]) -> None:
        noted.append(record)
        store.note(record)

    def evaluate(step: int) -> dict[str, Any]:
        is_evaluated = step == 0 or is_due(evaluate_every, step)
        return scoring.now(is_last=step == last) if is_evaluated else {}

    run.selection = None
    start, noted_last = run.num_steps_taken, (store.log() or [{}])[-1]
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
                if is_due(checkpoint_every, step) or store.is_full:
                    run.save(store)
        if run.selection is None or run.selection.step != run.num_steps_taken:
            # The run ended before, or has not known that this step is the last.
            step, chosen = run.num_steps_taken, scoring.choose()
            if STAGES not in (noted[-1] if noted else noted_last) and chosen.scores:
                held_out = scoring.now(is_last=True)
                epsilon = accounted(step)["epsilon"]
                note({"step": step, "epsilon": epsilon, **held_out})
        run.save(store)
    except (KeyboardInterrupt, ConnectionError) as end:
        try:
            run.save(store)
        except Exception as error:  # an earlier one is there, and the releases
            end.add_note(f"no checkpoint of step {run.num_steps_taken}: {error}")
        raise
    return noted

"""The loop over a run's steps, and their trial on zeros before anything is charged.

`Trainer.step` takes one step, in this order:

    RunDraws.write_secrets    what a resumed run needs, in the run's file
    RunStore.charge           by `Ledger.charge`: a commit
    mechanism.release         the draw (or what was made ahead), the sum, the noise
    RunStore.release          a commit; no other code has seen the release before
    mechanism.apply           the state that follows
    RunDraws.erase_secrets    after an epoch, or the run

In between come evaluations and saved states (`RunStore.save`), which use released
parameters only, and log records, whose private parts nothing in the run depends on.
Whatever ends a process leaves the file after one of the commits; `Trainer.resume` then
applies releases that the saved state lacks, and gives up a step that was charged and
not released.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxdp_episodic.trainer.run.evaluation import Evaluation
from jaxdp_episodic.trainer.run.release import described_release, flat_params
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
    """Takes the remaining steps of a `Trainer`; returns the records of its log."""
    last, before = run.budget.num_steps, len(run.budget.before)
    evaluate_every, checkpoint_every, log_every = every
    noted: list[dict[str, Any]] = []

    def is_due(often: int | None, step: int) -> bool:
        return step in (last, before) or (often is not None and step % often == 0)

    def note(record: dict[str, Any]) -> None:
        noted.append(record)
        store.note(record)

    def evaluate(step: int) -> dict[str, Any]:
        is_evaluated = step == 0 or is_due(evaluate_every, step)
        return scoring.now(is_last=step == last) if is_evaluated else {}

    run.selection = None
    step, noted_last = run.num_steps_taken, (store.log() or [{}])[-1]
    if noted_last.get("step", -1) < step:
        held_out = evaluate(step)
        if held_out or is_due(log_every, step):
            note({**run.public_record(step), **held_out})
    try:
        with run.ahead() as ahead:
            for prepared in ahead:
                begun = time.perf_counter()
                private = run.step(prepared)
                step = run.num_steps_taken
                held_out = evaluate(step)
                if is_due(log_every, step) or held_out:
                    private |= {"seconds": time.perf_counter() - begun}
                    note({**run.public_record(step), PRIVATE: private, **held_out})
                    if on_step is not None:
                        public = public_record(noted[-1])
                        shown = public if run.has_public_accounting else {}
                        on_step(StepProgress(step, last, shown, noted[-1]))
                if is_due(checkpoint_every, step) or store.is_full:
                    run.save(store)
        step = run.num_steps_taken
        if run.selection is None or run.selection.step != step:
            # The run had ended before, or only now turns out to have.
            chosen = scoring.choose()
            if STAGES not in (noted[-1] if noted else noted_last) and chosen.scores:
                epsilon = {"epsilon": run.public_record(step)["epsilon"]}
                note({"step": step, **epsilon, **scoring.now(is_last=True)})
        run.save(store)
    except (KeyboardInterrupt, ConnectionError) as end:
        try:
            run.save(store)
        except Exception as error:  # the file has an earlier state and the releases
            end.add_note(f"no checkpoint of step {run.num_steps_taken}: {error}")
        raise
    return noted


def try_out(run: Any, evaluations: Mapping[str, Evaluation]) -> None:
    """Tries the steps to come of a `Trainer`, once, and evaluations at every call.

    All processes call it. It uses no data, key or noise of the run.
    """
    if (run.is_tried and not evaluations) or run.has_ended:
        return
    with _explained("describing the release"):
        flat_params(run.params)
        json.dumps(described_release(run))
    for split, evaluation in evaluations.items():
        for name, learner, params in run.stages_to_come():
            with _explained(f"tracing the score of {name!r} on {split!r}"):
                evaluation.trace(learner, params)
    if run.is_tried:
        return
    run.processes.meet()  # else others would wait for a process that failed
    state = run.state
    with np.errstate(all="ignore"):
        for name, mechanism in run.mechanisms.items():
            with _explained(f"running the step {name!r} on zeros"):
                state = mechanism.try_out(state)
    run.processes.meet()
    run.is_tried = True


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Adds to an error what was tried, and that nothing was charged."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"This was found {doing}, before anything was charged: repair the model, "
            "learner or optimizer, and start again."
        )
        raise

"""Runs on zeros all that a run will compute, before anything is charged.

No data, key or noise of the run is used: an error here has cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxdp_episodic.trainer.run.evaluation import Evaluation
from jaxdp_episodic.trainer.run.release import described_release, flat_params


def try_out(run: Any, evaluations: Mapping[str, Evaluation], *, is_tried: bool) -> None:
    """Tries the evaluations and, unless ``is_tried``, the steps to come of a `Trainer`.

    All processes call it.
    """
    if run.has_ended:
        return
    for name, mechanism in run.mechanisms.items():
        with _explained(f"tracing the step {name!r}"):
            mechanism.trace(run.state)
    with _explained("describing the release"):
        flat_params(run.params)
        json.dumps(described_release(run))
    for split, evaluation in evaluations.items():
        for name, learner, params in run.stages_to_come():
            with _explained(f"tracing the score of {name!r} on {split!r}"):
                evaluation.trace(learner, params)
    if is_tried:
        return
    run.processes.meet()  # else others would wait for a process that failed
    state = run.state
    with np.errstate(all="ignore"):
        for name, mechanism in run.mechanisms.items():
            with _explained(f"running the step {name!r} on zeros"):
                state = mechanism.try_out(state)
    run.processes.meet()


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

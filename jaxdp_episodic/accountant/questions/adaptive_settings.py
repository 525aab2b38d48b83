"""Runs that adapt, of several settings: each has a worst strategy of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import (
    chosen_device,
    engine_name,
    in_threads,
    num_cores,
)


def of_settings(run: Any, question: str, **asked: Any) -> Any:
    """Returns the answers of a run's settings, as many at once as there are cores.

    Transforms leave the other threads running.

    Args:
      run: an `AdaptiveRun`, whose shape and the targets' broadcast.
      question: the method that each setting is asked, about one target.
      asked: its arguments, the first the targets.
    """
    (name, value), *more = asked.items()
    check = {
        "delta": _validation.probability_array,
        "epsilon": _validation.nonnegative_array,
    }[name]
    targets = check(name, value)
    shape = _validation.broadcast_shape(
        options=np.empty(run.shape, np.uint8), **{name: targets}
    )
    settings = run.settings()
    number = np.broadcast_to(np.arange(len(settings)).reshape(run.shape), shape)
    at = np.broadcast_to(targets, shape).ravel().tolist()
    found = in_threads(
        lambda pair: getattr(settings[pair[0]], question)(
            **{name: pair[1]}, **dict(more)
        ),
        list(zip(number.ravel().tolist(), at, strict=True)),
        max(min(num_cores(), len(at)), 1),
        device=chosen_device() if engine_name() == "jax" else None,
    )
    if not question.endswith("interval"):
        return np.array(found, np.float64).reshape(shape)
    lower, upper = np.array(found, np.float64).reshape(len(at), 2).T
    return lower.reshape(shape), upper.reshape(shape)

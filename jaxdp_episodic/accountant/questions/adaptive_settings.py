"""Runs that adapt, of several settings: each has a worst strategy of its own."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import (
    VARIABLE,
    chosen_device,
    engine_name,
    in_threads,
    num_cores,
    sharing_cores,
)
from jaxdp_episodic.accountant.methods.adaptive.problem import Ends

# Seconds of work from which on processes are worth their start, some 0.4 s each.
_WORTH_PROCESSES = 3.0
# What a process runs: it finds modules where its parent does.
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from jaxdp_episodic.accountant.questions.adaptive_settings import serve; "
    "serve({workers})"
)


class _Asked(NamedTuple):
    """One question about one setting."""

    setting: Any  # an `AdaptiveRun`
    question: str
    arguments: dict[str, Any]

    def answer(self) -> Any:
        return getattr(self.setting, self.question)(**self.arguments)


def of_settings(run: Any, question: str, **asked: Any) -> Any:
    """Returns the answers of a run's settings, as many at once as there are cores.

    In threads; from some seconds of work on in processes, which do not wait for each
    other between transforms. The answers are the same.

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
    each = [
        _Asked(settings[i], question, {name: target, **dict(more)})
        for i, target in zip(number.ravel().tolist(), at, strict=True)
    ]
    workers = max(min(num_cores(), len(each)), 1)
    on_jax = engine_name() == "jax"
    if workers > 1 and not on_jax:
        begun = time.perf_counter()
        each[0].answer()
        left = (time.perf_counter() - begun) * (len(each) - 1)
        if left > _WORTH_PROCESSES:
            _keep_answers(each[1:], workers)
    device = chosen_device() if on_jax else None
    found = in_threads(_Asked.answer, each, workers, device=device)
    if not question.endswith("interval"):
        return np.array(found, np.float64).reshape(shape)
    lower, upper = np.array(found, np.float64).reshape(len(at), 2).T
    return lower.reshape(shape), upper.reshape(shape)


def _keep_answers(each: Sequence[_Asked], workers: int) -> None:
    """Lets processes answer; the settings keep that, and are asked by the caller.

    What a process raises, or leaves when it ends, the caller meets when it asks again.
    """
    workers = min(workers, len(each))
    program = _PROGRAM.format(path=sys.path, workers=workers)
    parts = [each[i::workers] for i in range(workers)]

    def answers(part: Sequence[_Asked]) -> list[Any]:
        asked = pickle.dumps([tuple(one) for one in part])
        try:
            done = _run([sys.executable, "-c", program], asked)
            return pickle.loads(done)  # of our own process
        except (OSError, TypeError, EOFError, pickle.UnpicklingError):
            return []  # TypeError: no interpreter is known

    for part, found in zip(parts, in_threads(answers, parts, workers), strict=True):
        for asked, (kept, said) in zip(part, found, strict=False):
            _kept_by(asked.setting).update(kept)
            for text, category in said:
                warnings.warn(text, category, stacklevel=2)


def _run(command: Sequence[str], given: bytes) -> bytes:
    """What a program writes."""
    done = subprocess.run(
        command,
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, VARIABLE: engine_name()},
    )
    return done.stdout


def _kept_by(setting: Any) -> dict[Any, Any]:
    """The answers that a setting keeps."""
    return setting.__dict__["_answers"]


def serve(workers: int) -> None:
    """Answers what comes on the standard input.

    Args:
      workers: that share the cores.
    """
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    found = []
    with sharing_cores(workers):
        for asked in (_Asked(*one) for one in pickle.load(sys.stdin.buffer)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with contextlib.suppress(Exception):  # the parent asks, and raises it
                    asked.answer()
            kept = _kept_by(asked.setting).items()
            ends = {key: answer for key, answer in kept if isinstance(answer, Ends)}
            found.append((ends, [(str(one.message), one.category) for one in said]))
    with output:
        pickle.dump(found, output)

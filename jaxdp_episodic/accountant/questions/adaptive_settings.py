"""Runs that adapt, of several settings: each has a worst strategy of its own."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
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
    """Lets processes answer; their settings keep that, and are asked by the caller.

    What a process raises, the caller meets when it asks again.
    """
    processes = [p for p in (_started(workers) for _ in range(workers)) if p]
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def ask(asked: _Asked) -> Any:
        process = idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(tuple(asked), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)  # of our own process
        except (OSError, EOFError, pickle.UnpicklingError):
            asked.answer()  # here, as the process has ended
            return {}, []
        finally:
            idle.put(process)

    found: list[Any] = []
    try:
        if processes:
            found = in_threads(ask, each, len(processes))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for asked, (kept, said) in zip(each, found, strict=bool(processes)):
        _kept_by(asked.setting).update(kept)
        for text, category in said:
            warnings.warn(text, category, stacklevel=2)


def _kept_by(setting: Any) -> dict[Any, Any]:
    """The answers that a setting keeps."""
    return setting.__dict__["_answers"]


def _started(workers: int) -> Any:
    """A process that serves; None where none can be had."""
    program = _PROGRAM.format(path=sys.path, workers=workers)
    with contextlib.suppress(OSError, TypeError):  # TypeError: no interpreter is known
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, VARIABLE: engine_name()},
        )


def serve(workers: int) -> None:
    """Answers what comes on the standard input, until that ends.

    Args:
      workers: that share the cores.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with sharing_cores(workers), answers:
        while True:
            try:
                asked = _Asked(*pickle.load(sys.stdin.buffer))
            except EOFError:
                return
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with contextlib.suppress(Exception):  # the parent asks, and raises it
                    asked.answer()
            texts = [(str(one.message), one.category) for one in said]
            kept = _kept_by(asked.setting).items()
            ends = {key: found for key, found in kept if isinstance(found, Ends)}
            pickle.dump((ends, texts), answers)
            answers.flush()

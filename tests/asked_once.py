"""A cache of answers: each question about a run is answered once.

Tests of training and tools ask for the same few budgets hundreds of times. Answers are
tested in `tests/accountant`, where nothing is cached.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from jaxdp_episodic.accountant import _engine
from jaxdp_episodic.accountant.methods.run import Answer
from jaxdp_episodic.accountant.questions import calibration, worst_path

_answer = worst_path.answer
_kept: dict[bytes, Answer] = {}


def _answered_once(question: Any, runs: Sequence[Any], method: str) -> Answer:
    """Like `worst_path.answer`, a function of these arguments and of the engine."""
    asked = question, runs, method, _engine.engine_name()
    try:
        key = pickle.dumps(asked)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _answer(question, runs, method)  # a lambda has no name to compare
    if key not in _kept:
        _kept[key] = _answer(question, runs, method)
    return copy.deepcopy(_kept[key])


@contextmanager
def asked_once() -> Iterator[None]:
    """Caches answers of questions and of noise calibrations within this block."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (worst_path, calibration):
            patch.setattr(module, "answer", _answered_once)
        yield

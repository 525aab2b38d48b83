"""Fuzzes a reader in another process; a case that ends the process is kept."""

from __future__ import annotations

import collections
import faulthandler
import multiprocessing
import shutil
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck

from fuzzing.targets import Target, outcome, targets

CASE, FAILED = "case.txt", "failed.txt"
LONGEST = 60.0  # seconds after which a case counts as one that never ends


def fuzzed(
    target: Target, cases: int, folder: Path, longest: float | None = None
) -> dict[str, Any]:
    """Returns the number of cases by outcome, and the first failure.

    Before a case is read it is left in the empty ``folder``, in the file `CASE`: its
    number, and Python's expression for it; the smallest that failed is in `FAILED`.
    A case that takes ``longest`` seconds ends this process.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    number, slowest, failure = 0, 0.0, None

    def run(case: Any) -> None:
        nonlocal number, slowest, failure
        number += 1
        (folder / CASE).write_text(f"{number}\n{_expression(case)}\n")
        if longest is not None:
            faulthandler.dump_traceback_later(longest, exit=True)
        start = time.perf_counter()
        try:
            outcomes[outcome(target, case, folder)] += 1
        except Exception:
            # Recorded here, as Hypothesis may be unable to print the case. It tries
            # smaller and smaller ones: the last is the smallest.
            failure = traceback.format_exc()
            shutil.copy(folder / CASE, folder / FAILED)
            raise
        slowest = max(slowest, time.perf_counter() - start)

    test = hypothesis.settings(
        max_examples=cases,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )(hypothesis.given(target.cases)(run))
    start = time.perf_counter()
    try:
        test()
    except Exception:
        failure = failure or traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    return {
        "target": target.name,
        "cases": number,
        "outcomes": dict(sorted(outcomes.items())),
        "slowest_seconds": round(slowest, 3),
        "seconds": round(time.perf_counter() - start, 1),
        "failure": failure,
    }


def fuzzed_in_child(name: str, cases: int, folder: Path) -> dict[str, Any]:
    """Runs `fuzzed` in another process; reports a case that ends that process.

    A case that takes `LONGEST` seconds ends its process.
    """
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(_fuzzed, name, cases, folder).result()
        except BrokenProcessPool:
            kept = folder / CASE
    number = int(kept.read_text().partition("\n")[0]) if kept.exists() else 0
    return {
        "target": name,
        "cases": number,
        "outcomes": {},
        "slowest_seconds": 0.0,
        "seconds": round(time.perf_counter() - start, 1),
        "failure": f"case {number} ended the process, or took {LONGEST:g} s",
    }


def _fuzzed(name: str, cases: int, folder: Path) -> dict[str, Any]:
    (target,) = (target for target in targets() if target.name == name)
    return fuzzed(target, cases, folder, longest=LONGEST)


def _expression(case: Any) -> str:
    """Python's expression for a case, which `ast.literal_eval` reads if it can."""
    try:
        return ascii(case)
    except (RecursionError, ValueError) as error:
        return f"# too deep or too large to be written: {type(error).__name__}"

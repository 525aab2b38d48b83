"""Fuzzes every reader of files and descriptions, and says what became of each case.

``python experiments/trust/fuzz.py --cases 100000 --out DIR`` writes ``fuzz.json`` and
``fuzz.md``. Cases are drawn by Hypothesis, the same in every run. A case may be
accepted, or refused with a clear error (`TypeError`, `ValueError`,
`NotImplementedError`, `OSError`, with a message); anything else ends the program with
exit code 1, after the smallest such case has been printed.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzzing.targets import Target, outcome, targets  # noqa: E402 - found by the path

SLOWEST = 5.0  # seconds that a case of a few hundred bytes may take


def fuzzed(target: Target, cases: int) -> dict[str, Any]:
    """Returns how many cases of a target came to what, and the first that failed."""
    outcomes: collections.Counter[str] = collections.Counter()
    slowest = 0.0

    def run(case: Any) -> None:
        nonlocal slowest
        start = time.perf_counter()
        outcomes[outcome(target, case, folder)] += 1
        slowest = max(slowest, time.perf_counter() - start)

    test = hypothesis.settings(
        max_examples=cases,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )(hypothesis.given(target.cases)(run))
    start, failure = time.perf_counter(), None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            test()
        except Exception:
            failure = traceback.format_exc()
    return {
        "target": target.name,
        "cases": sum(outcomes.values()),
        "outcomes": dict(sorted(outcomes.items())),
        "slowest_seconds": round(slowest, 3),
        "seconds": round(time.perf_counter() - start, 1),
        "failure": failure,
    }


def markdown(results: list[dict[str, Any]]) -> str:
    """Returns the results as a table."""
    refused = [name for r in results for name in r["outcomes"] if name != "accepted"]
    columns = ["accepted", *dict.fromkeys(sorted(refused))]
    lines = [
        f"| reader | cases | {' | '.join(columns)} | slowest case, s |",
        f"|---|{'---:|' * (len(columns) + 2)}",
    ]
    for result in results:
        counts = [f"{result['outcomes'].get(name, 0):,}" for name in columns]
        cells = [f"{result['cases']:,}", *counts, f"{result['slowest_seconds']:.3f}"]
        lines.append(f"| {result['target']} | {' | '.join(cells)} |")
    total = sum(result["cases"] for result in results)
    failed = sum(result["failure"] is not None for result in results)
    lines += ["", f"{total:,} cases, {failed} readers with another error."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Fuzzes, prints, writes; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fuzzes every reader of files.")
    parser.add_argument("--cases", type=int, default=100_000, help="of all readers")
    parser.add_argument("--only", help="readers whose name holds this")
    parser.add_argument("--out", type=Path, help="folder for fuzz.json and fuzz.md")
    options = parser.parse_args()
    chosen = [t for t in targets() if not options.only or options.only in t.name]
    whole = sum(target.weight for target in chosen)
    results = []
    for target in chosen:
        share = math.ceil(options.cases * target.weight / whole)
        result = fuzzed(target, share)
        results.append(result)
        print(json.dumps({k: v for k, v in result.items() if k != "failure"}))
        if result["failure"]:
            print(result["failure"], file=sys.stderr)
        sys.stdout.flush()
    print(markdown(results))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        summary = {
            "cases": sum(result["cases"] for result in results),
            "python": platform.python_version(),
            "hypothesis": hypothesis.__version__,
            "results": results,
        }
        (options.out / "fuzz.json").write_text(json.dumps(summary, indent=1) + "\n")
        (options.out / "fuzz.md").write_text(markdown(results))
    slow = [r["target"] for r in results if r["slowest_seconds"] > SLOWEST]
    for name in slow:
        print(f"{name}: a case took more than {SLOWEST} s", file=sys.stderr)
    return int(bool(slow) or any(result["failure"] for result in results))


if __name__ == "__main__":
    sys.exit(main())

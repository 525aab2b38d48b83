"""Fuzzes every reader of files and descriptions, and reports the cases that fail.

``python experiments/trust/fuzz.py --cases 100000 --out DIR`` writes ``fuzz.json``.
Hypothesis draws the cases, the same in every run. A case may be accepted, or refused
with a clear error (`TypeError`, `ValueError`, `NotImplementedError`, `OSError`, with a
message). Otherwise the exit code is 1, and ``DIR/READER.case`` has the smallest failing
case. Each reader runs in its own process: a case that ends it, or never ends, fails.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzzing.children import CASE, FAILED, fuzzed_in_child  # noqa: E402 - found by the path
from fuzzing.targets import Target, targets  # noqa: E402 - the same

SLOWEST = 5.0  # seconds that a case of a few hundred bytes may take


def result_of(target: Target, cases: int, out: Path) -> dict[str, Any]:
    """Fuzzes a reader in a process of its own; keeps the case that failed."""
    with tempfile.TemporaryDirectory() as name:
        result = fuzzed_in_child(target.name, cases, Path(name))
        left = [Path(name) / file for file in (FAILED, CASE)]
        case = next((file for file in left if file.exists()), None)
        if result["failure"] and case is not None:
            shutil.copy(case, out / f"{target.name.replace(' ', '_')}.case")
    return result


def main() -> int:
    """Fuzzes, prints, writes; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fuzzes every reader of files.")
    parser.add_argument("--cases", type=int, default=100_000, help="of all readers")
    parser.add_argument("--only", default="", help="readers whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("results/fuzz"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [target for target in targets() if options.only in target.name]
    if not chosen:
        parser.error(f"--only: no reader has {options.only!r} in its name")
    whole = sum(target.weight for target in chosen)
    results: list[dict[str, Any]] = []
    for target in chosen:
        cases = math.ceil(options.cases * target.weight / whole)
        result = result_of(target, cases, options.out)
        results.append(result)
        print(json.dumps({k: v for k, v in result.items() if k != "failure"}))
        if result["failure"]:
            print(result["failure"], file=sys.stderr)
        sys.stdout.flush()
        done = sum(result["cases"] for result in results)
        document = {**provenance(), "cases": done, "results": results}
        text = json.dumps(document, indent=1) + "\n"
        (options.out / "fuzz.json").write_text(text)
    failed = sum(result["failure"] is not None for result in results)
    cases = sum(result["cases"] for result in results)
    print(f"{cases:,} cases, {failed} readers with another error")
    slow = [r["target"] for r in results if r["slowest_seconds"] > SLOWEST]
    for name in slow:
        print(f"{name}: a case took more than {SLOWEST} s", file=sys.stderr)
    return int(bool(slow) or any(result["failure"] for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""Plants every classic fault in the library's own code; reports which check notices.

``python experiments/trust/mutations.py --out results/mutations`` runs each check twice,
on the code as it is and with the fault planted, and writes ``mutations.json`` after
every fault. A fault counts as caught only if the same check finds nothing without it.
The exit code is 1 if one was not caught. ``--quick`` uses as little effort as the tests
do, ``--only`` selects faults by words in their names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from mutation.faults import FAULTS  # noqa: E402 - found by the path
from mutation.verdicts import FULL, QUICK, Check, Verdict  # noqa: E402 - the same


def main() -> int:
    """Plants all faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=[""])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    effort = QUICK if arguments.quick else FULL
    chosen = [f for f in FAULTS if any(word in f.name for word in arguments.only)]
    if not chosen:
        parser.error(f"--only: no fault has {arguments.only!r} in its name")
    path, about, rows = arguments.out / "mutations.json", provenance(), []
    known: dict[Check, Verdict] = {}
    for fault in chosen:
        if fault.check not in known:
            known[fault.check] = fault.check(effort)
        sound, begun = known[fault.check], time.perf_counter()
        faulty = fault.verdict(effort)
        row = {
            "fault": fault.name,
            "planted": fault.code.splitlines(),
            "caught_by": fault.caught_by,
            "check": fault.check.__name__,
            "is_caught": faulty.is_caught and not sound.is_caught,
            "reason": fault.reason,
            "without": sound._asdict(),
            "with": faulty._asdict(),
            "seconds": round(time.perf_counter() - begun, 1),
        }
        rows.append(row)
        caught = all(r["is_caught"] for r in rows)
        head = {"version": 1, **about, "effort": effort._asdict(), "all_caught": caught}
        text = json.dumps({**head, "faults": rows}, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
        word = "caught" if row["is_caught"] else "NOT CAUGHT"
        print(f"{word}: {fault.name}: {faulty.evidence}", flush=True)
    return 0 if all(r["is_caught"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Plants every classic fault in the library's own code; says which check noticed.

``python experiments/trust/mutations.py --out results/mutations`` runs each check twice,
on the code as it is and with the fault planted, and writes ``mutations.md`` and
``mutations.json`` after every fault. A fault counts as caught only if the same check
finds nothing without it. The exit code is 1 if one was not caught.

``--quick`` takes as little effort as the tests do; ``--only`` takes the faults whose
name contains one of some words, and ``--add`` keeps what the folder says of others, by
the same effort. The faults are in ``tests/mutation/faults.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from mutation.faults import FAULTS, Fault  # noqa: E402 - found by the path
from mutation.verdicts import FULL, QUICK, Check, Effort, Verdict  # noqa: E402 - the same


class Found(NamedTuple):
    """What became of one fault.

    Attributes:
      fault: that was planted.
      sound: what its check says of the code as it is.
      faulty: and with the fault.
      seconds: that the second took.
    """

    fault: Fault
    sound: Verdict
    faulty: Verdict
    seconds: float

    @property
    def is_caught(self) -> bool:
        """True if the check tells the two apart."""
        return self.faulty.is_caught and not self.sound.is_caught


def found(fault: Fault, effort: Effort, known: dict[Check, Verdict]) -> Found:
    """Runs a fault's check without it, unless that is known, and with it."""
    if fault.check not in known:
        known[fault.check] = fault.check(effort)
    begun = time.perf_counter()
    faulty = fault.verdict(effort)
    return Found(fault, known[fault.check], faulty, time.perf_counter() - begun)


def document(
    rows: Sequence[Found], effort: Effort, kept: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the rows, and those that are kept, as plain values for JSON."""
    about = provenance()
    day, version = about["date"], about["versions"]["jaxdp-episodic"]
    own = {row.fault.name for row in rows}
    kept = [fault for fault in kept if fault["fault"] not in own]
    return {
        "version": 1,
        **about,
        "effort": effort._asdict(),
        "all_caught": all(row.is_caught for row in rows)
        and all(fault["is_caught"] for fault in kept),
        "faults": [
            *kept,
            *(
                {
                    "fault": row.fault.name,
                    "date": day,
                    "version": version,
                    "planted": row.fault.code.splitlines(),
                    "caught_by": row.fault.caught_by,
                    "check": row.fault.check.__name__,
                    "is_caught": row.is_caught,
                    "reason": row.fault.reason,
                    "without": row.sound._asdict(),
                    "with": row.faulty._asdict(),
                    "seconds": round(row.seconds, 1),
                }
                for row in rows
            ),
        ],
    }


def markdown(rows: Sequence[Found]) -> str:
    """Returns the table, and below it what was planted."""
    lines = [
        "| fault | caught by | with the fault | without it | why |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        who = row.fault.caught_by if row.is_caught else "**not caught**"
        cells = (
            row.fault.name,
            f"{who}: {row.fault.check.__name__.replace('_', ' ')}",
            row.faulty.evidence,
            row.sound.evidence,
            row.fault.reason,
        )
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    lines += ["", "What was planted:", ""]
    for row in rows:
        lines += [f"{row.fault.name}:", "", "```diff", row.fault.code, "```", ""]
    return "\n".join(lines)


def kept_rows(path: Path, effort: Effort) -> list[dict[str, Any]]:
    """What a file says of faults that are planted still, each with its date."""
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["effort"] != effort._asdict():
        raise SystemExit(f"{path} was made with another effort, {old['effort']}")
    about = {"date": old["date"], "version": old["versions"]["jaxdp-episodic"]}
    names = {fault.name for fault in FAULTS}
    return [{**about, **row} for row in old["faults"] if row["fault"] in names]


def write(
    out: Path, rows: Sequence[Found], effort: Effort, kept: Sequence[dict[str, Any]]
) -> None:
    """Leaves what was found so far."""
    text = json.dumps(document(rows, effort, kept), indent=1, allow_nan=False)
    (out / "mutations.json").write_text(text + "\n", encoding="utf-8")
    (out / "mutations.md").write_text(markdown(rows), encoding="utf-8")


def main() -> int:
    """Plants all faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--add", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    effort = QUICK if arguments.quick else FULL
    chosen = [f for f in FAULTS if any(word in f.name for word in arguments.only)]
    path = arguments.out / "mutations.json"
    kept = kept_rows(path, effort) if arguments.add else []
    if not chosen:
        parser.error(f"--only: no fault has {arguments.only!r} in its name")
    rows: list[Found] = []
    known: dict[Check, Verdict] = {}
    for fault in chosen:
        rows.append(found(fault, effort, known))
        write(arguments.out, rows, effort, kept)
        word = "caught" if rows[-1].is_caught else "NOT CAUGHT"
        print(f"{word}: {fault.name}: {rows[-1].faulty.evidence}", flush=True)
    return 0 if all(row.is_caught for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

r"""Runs the accountant tests of dp-accounting, opacus and jax-privacy against ours.

Give the checkouts that you have; nothing is downloaded, and nothing of them is copied:

    python experiments/peers/run_suites.py --dp-accounting PATH --opacus PATH \
        --jax-privacy PATH

Each suite runs in a process of its own with our accountants in the place of theirs
(`plugin`); the tests that do not pass run once more as they are. What a test says of
ours (`verdicts`):

* passed;
* ours tighter: the answer is smaller than the test expects, and lies where the peer's
  own answer goes on a finer grid, or was checked against mpmath;
* not expressible: an event, a relation or a function that ours does not have;
* failed: anything else.

Needs what `make bench` installs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ("passed", "tighter", "not expressible", "failed")


class Suite(NamedTuple):
    """A test file of a peer.

    Attributes:
      peer: whose.
      label: what it is called in the table.
      place: of the file in the checkout; later versions may have another.
      package: the folder of the checkout that goes on the path.
      stand_ins: which of ours are put in place.
    """

    peer: str
    label: str
    place: str
    package: str
    stand_ins: str


_DP = "python/dp_accounting"
SUITES = (
    Suite(
        "dp-accounting",
        "RDP accountant",
        f"{_DP}/dp_accounting/rdp/rdp_privacy_accountant_test.py",
        _DP,
        "dp_accounting",
    ),
    Suite(
        "dp-accounting",
        "PLD accountant",
        f"{_DP}/dp_accounting/pld/pld_privacy_accountant_test.py",
        _DP,
        "dp_accounting",
    ),
    Suite("opacus", "accountants", "opacus/tests/accountants_test.py", "", "opacus"),
    Suite("opacus", "PRV values", "opacus/tests/prv_accountant.py", "", "opacus"),
    *(
        Suite("jax-privacy", label, f"tests/{place}_test.py", "", "dp_accounting")
        for label, place in (
            ("training accountants", "accounting/analysis"),
            ("calibration", "accounting/calibrate"),
            ("events", "experimental/accounting"),
            ("execution plans", "experimental/execution_plan"),
            ("events", "accounting"),
            ("execution plans", "execution_plan"),
        )
    ),
)


def main() -> None:
    """Runs what there is, prints the table; exits with 1 where a test failed.

    A suite that cannot be collected is named below the table, and counts as failed.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for peer in ("--dp-accounting", "--opacus", "--jax-privacy"):
        parser.add_argument(peer, type=Path, metavar="PATH", help="a checkout")
    parser.add_argument("--out", type=Path, help="folder for every test's verdict")
    parser.add_argument("--only", default="", help="pytest's -k")
    arguments = parser.parse_args()
    rows, failed, not_run = [], 0, []
    for suite in SUITES:
        checkout = getattr(arguments, suite.peer.replace("-", "_"))
        if checkout is None or not (checkout / suite.place).is_file():
            continue
        try:
            found = run(suite, checkout, suite.stand_ins, pattern=arguments.only)
            others = [n for n, (outcome, _) in found.items() if outcome != "passed"]
            again = run(suite, checkout, "", names=others) if others else {}
        except NotRunError as error:
            print(f"{suite.peer}, {suite.label}: {error}\n", flush=True)
            not_run.append(f"{suite.peer} {version(checkout, suite)}, {suite.label}")
            continue
        if not found:
            continue
        # A test that fails with the peer's own accountant says nothing of ours.
        broken = sorted(n for n, (outcome, _) in again.items() if outcome == "failed")
        counted = {n: v for n, v in found.items() if n not in broken}
        counts = Counter(outcome for outcome, _ in counted.values())
        rows.append((suite, version(checkout, suite), counts, len(counted)))
        report(suite, counted, broken)
        failed += counts["failed"]
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            name = f"{suite.peer}-{suite.place.replace('/', '-')}.json"
            (arguments.out / name).write_text(json.dumps(counted, indent=1))
    if not rows and not not_run:
        parser.error("give the path of at least one checkout")
    print(table(rows))
    for name in not_run:
        print(f"\nNot run, see above: {name}")
    sys.exit(failed > 0 or bool(not_run))


class NotRunError(Exception):
    """A suite that pytest cannot collect or finish: what it printed."""


def run(
    suite: Suite,
    checkout: Path,
    stand_ins: str,
    *,
    pattern: str = "",
    names: list[str] | None = None,
) -> dict[str, tuple[str, str]]:
    """The verdict on every test of a suite.

    Raises:
      NotRunError: it cannot be collected.
    """
    package = checkout.resolve() / suite.package
    with tempfile.TemporaryDirectory() as folder:
        verdicts = Path(folder) / "verdicts.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "experiments.peers.plugin"]
            + ["-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull]
            + ["--import-mode=importlib", *(["-k", pattern] if pattern else [])]
            + [str(checkout.resolve() / suite.place)],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PEER_STAND_INS": stand_ins,
                "PEER_ONLY": json.dumps(names or []),
                "PEER_VERDICTS": str(verdicts),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if not verdicts.is_file() or done.returncode not in (0, 1, 5):
            said = f"{done.stdout}{done.stderr}".strip()
            raise NotRunError(f"{suite.place} did not run:\n{said}")
        return {n: tuple(v) for n, v in json.loads(verdicts.read_text()).items()}


def version(checkout: Path, suite: Suite) -> str:
    """What the checkout says of its version."""
    for place in (f"{_DP}/VERSION", "opacus/version.py", "pyproject.toml"):
        file = checkout / place
        if file.is_file():
            said = re.search(r"(\d+\.\d+[\w.]*)", _version_line(file))
            return said[1] if said else "?"
    return "?"


def _version_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if re.match(r"(__)?version", line)]
    return (named or lines)[-1 if not named else 0]


def report(suite: Suite, found: dict[str, tuple[str, str]], broken: list[str]) -> None:
    """What is not simply passed, by name."""
    print(f"{suite.peer}, {suite.label}: {suite.place}")
    for name, (outcome, why) in found.items():
        if outcome != "passed":
            print(f"  {outcome:16} {name}\n{'':19}{why}")
    for name in broken:
        print(f"  {'fails with theirs':16} {name}")
    print(flush=True)


def table(rows: list[tuple[Suite, str, Counter[str], int]]) -> str:
    """The summary, as Markdown."""
    lines = [
        "| peer | suite | tests | passed | ours tighter | not expressible | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for suite, number, counts, total in rows:
        cells = [str(counts[outcome]) for outcome in OUTCOMES]
        lines.append(
            f"| {suite.peer} {number} | {suite.label} | {total} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Writes the results of `make trust` into the documentation.

``python experiments/trust/page.py --results results/trust`` copies the results to
``docs/tables``, draws ``docs/images/trust_audit.png``, and writes the tables of
``docs/trust.md``, ``docs/audit.md`` and ``docs/guarantees.md``, each between two
comments that name it. Without ``--results`` the tables are those of ``docs/tables``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxdp_episodic.accountant.report.sentences import downward, upward
from jaxdp_episodic.audit import AuditRow, EpsilonBound, Guesses
from jaxdp_episodic.tools.plots.figures import plot_audit

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("trust.md", "audit.md", "guarantees.md")
# Result -> its file below the folder of results.
RESULTS = {
    "audit": "audit/audit.json",
    "allocation": "allocation/allocation.json",
    "mutations": "mutations/mutations.json",
    "kills": "kills/summary.json",
    "distributed": "distributed/summary.json",
    "fuzz": "fuzz/fuzz.json",
}
# Beginning of an attacker's name who audits a person, and its end where no
# contributions are known that come near the claim.
PERSON, UNATTAINED = "a person", "not attained"
DESIGN = re.compile(r"(?P<design>.*) \((?P<rates>.*)\), T=(?P<steps>\d+)")

Row = dict[str, Any]
Results = dict[str, Row]


def tables(results: Results) -> dict[str, str]:
    """Returns the tables of the pages by their names."""
    rows = results["audit"]["rows"]
    games = [row for row in rows if DESIGN.fullmatch(row["name"])]
    trained = [row for row in rows if not DESIGN.fullmatch(row["name"])]
    return {
        "summary": summary(results, games, trained),
        "runs": runs(trained),
        "faults": faults(results["mutations"]["faults"]),
        "kills": moments(results["kills"]),
        "distributed": moments(results["distributed"]),
    }


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def summary(results: Results, games: list[Row], trained: list[Row]) -> str:
    """The table of all attempts: what, how often, and the result."""
    draws, fuzz = results["audit"]["draws"], results["fuzz"]
    pairs, found = results["allocation"], results["mutations"]["faults"]
    tries = results["mutations"]["effort"]["releases"]
    kills, several = results["kills"]["facts"], results["distributed"]["facts"]
    failed = sum(result["failure"] is not None for result in fuzz["results"])
    most = max(abs(row["deviations"]) for row in pairs["rows"] if row["is_attained"])
    least = math.floor(100 * min(map(share, games)))
    refuted = sum(row["is_refuted"] for row in pairs["rows"]) or "no"
    attackers = {(row["name"], row["attacker"]) for row in trained}
    lines = f"""
audit games of designs, people included | {len(games)} designs, {draws["games"]:,} \
runs of each with the unit and as many without | {disproved(games)}; where the claim \
is attained at least {least}% of it is shown
pairs of random allocation, simulated | {len(pairs["rows"])} values of delta, \
{pairs["draws"]:,} runs each | {refuted} claim refuted; at most {most:.1f} standard \
errors from the exact value
audits of the trainer | {len(attackers)} audits, by canaries and by \
{draws["steps of the trainer"]:,} steps with and without the unit | {disproved(trained)}
planted faults | {len(found)} faults, audits by {tries:,} releases with the unit and \
as many without | {sum(f["is_caught"] for f in found)} caught
kill -9 at random moments of training | {kills["processes killed"]} kills, \
{kills["runs finished"]} runs | {kills["violations"]} violations of the ledger's \
contract
kill -9 of one of several processes | {several["processes killed"]} kills | \
{several["violations"]} violations
hostile input | {fuzz["cases"]:,} broken files, {len(fuzz["results"])} readers | \
{failed} readers with anything but a clear error
"""
    head = ["what", "how often", "what was found"]
    return table(head, [line.split(" | ") for line in lines.strip().splitlines()])


def disproved(rows: list[Row]) -> str:
    """The number of claims that an audit disproved."""
    number = sum(row["is_violated"] for row in rows)
    return f"{number or 'no'} claim{'s' if number > 1 else ''} disproved"


def share(row: Row) -> float:
    """The audited share of a claim; 1 if the claim is not attained."""
    return 1.0 if UNATTAINED in row["attacker"] else row["share_of_exact"]


def shown(row: Row) -> str:
    """A lower bound, and its share of the exact claim."""
    return f"{downward(row['audited'])} ({row['share_of_exact']:.0%})"


def runs(rows: list[Row]) -> str:
    """The table of audits of the trainer, each at its most informative delta."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        old = best.setdefault((row["name"], row["attacker"]), row)
        if row["share_of_exact"] > old["share_of_exact"]:
            best[row["name"], row["attacker"]] = row
    head = ["run", "attacker", "delta", "claimed, exact", "audited"]
    lines = (
        [*key, f"{row['delta']:g}", upward(row["claimed_exact"]), shown(row)]
        for key, row in best.items()
    )
    return table(head, lines)


def faults(found: list[Row]) -> str:
    """The planted faults, one paragraph for each check that noticed them."""
    noticed: dict[str, list[str]] = {}
    for fault in found:
        who = fault["caught_by"] if fault["is_caught"] else "**not caught**"
        noticed.setdefault(who, []).append(fault["fault"])
    lines = (f"* {who}: {'; '.join(names)}." for who, names in noticed.items())
    return "\n".join(wrapped(line, "  ") for line in lines)


def moments(found: Row) -> str:
    """The results of the kills of a rig, and their moments."""
    facts = [f"{name}: {value:,}" for name, value in found["facts"].items()]
    facts += [f"killed {name}: {n:,}" for name, n in found["moments"].items()]
    return wrapped("; ".join(facts).capitalize() + ".", "")


def wrapped(line: str, indent: str) -> str:
    """Returns a paragraph in lines of the pages' width."""
    words: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, width=120, subsequent_indent=indent, **words)


def picture(rows: list[Row], path: Path) -> None:
    """Draws the audits, each at one delta."""
    drawn = []
    for row in rows:
        evidence = row["evidence"]
        kind: Any = Guesses if "num_canaries" in evidence else EpsilonBound
        is_step = not DESIGN.fullmatch(row["name"]) and kind is EpsilonBound
        if not is_step or row["delta"] == 1e-2:
            values = [row[k] for k in AuditRow._fields[:5]]
            drawn.append(AuditRow._make([*values, kind(**evidence)]))
    plot_audit(drawn, path, title="Claimed and audited epsilon")


def filled(text: str, parts: dict[str, str]) -> str:
    """Returns a page with these tables between the comments that name them."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{parts[match[2]]}\n\n{match[3]}"

    comments = r"(<!-- trust: (\w+) -->).*?(<!-- end of trust -->)"
    return re.sub(comments, part, text, flags=re.DOTALL)


def read_tables() -> Results:
    """Returns the results that are committed."""
    return {
        name: json.loads((DOCS / "tables" / f"trust_{name}.json").read_text("utf-8"))
        for name in RESULTS
    }


def main() -> None:
    """Copies, draws and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if options.results is not None:
        for name, path in RESULTS.items():
            target = DOCS / "tables" / f"trust_{name}.json"
            shutil.copy(options.results / path, target)
    results = read_tables()
    picture(results["audit"]["rows"], DOCS / "images" / "trust_audit.png")
    for name in PAGES:
        page = DOCS / name
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text, tables(results)), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Puts the results of `make trust` into the documentation.

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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxdp_episodic.audit import AuditRow, EpsilonBound, Guesses
from jaxdp_episodic.tools.plots.audit import plot_audit
from jaxdp_episodic.trainer.audit.report import downward, upward

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("trust.md", "audit.md", "guarantees.md")
RESULTS = {
    "audit": "audit/audit.json",
    "allocation": "allocation/allocation.json",
    "mutations": "mutations/mutations.json",
    "kills": "kills/summary.json",
    "distributed": "distributed/summary.json",
    "fuzz": "fuzz/fuzz.json",
}
COMMANDS = {
    "audit": "experiments/trust/audit.py",
    "allocation": "experiments/trust/allocation.py",
    "mutations": "experiments/trust/mutations.py",
    "kills": "experiments/trust/kill_training.py",
    "distributed": "experiments/trust/kill_distributed.py",
    "fuzz": "experiments/trust/fuzz.py",
}
# Beginning of an attacker's name who audits a person, and its end where no
# contributions are known that come near the claim.
PERSON, UNATTAINED = "a person", "not attained"
DESIGN = re.compile(r"(?P<design>.*) \((?P<rates>.*)\), T=(?P<steps>\d+)")
AUDITED = re.compile(r"audited (\S+) (\S+) claimed (\S+) at delta (\S+)")

Results = dict[str, dict[str, Any]]


def tables(results: Results) -> dict[str, str]:
    """Returns the tables of the pages by their names."""
    audit, kills, fuzz = results["audit"], results["kills"], results["fuzz"]
    return {
        "summary": summary(results),
        "provenance": provenance(results),
        "designs": designs(audit["rows"]),
        "allocation": allocation(results["allocation"]["rows"]),
        "runs": runs(audit["rows"]),
        "faults": faults(results["mutations"]["faults"]),
        "kills": moments(kills),
        "distributed": moments(results["distributed"]),
        "readers": readers(fuzz["results"]),
    }


def moments(found: dict[str, Any]) -> str:
    """What came of the kills of a rig, and when they were."""
    facts = [[name, f"{value:,}"] for name, value in found["facts"].items()]
    facts += [[f"killed {name}", f"{n:,}"] for name, n in found["moments"].items()]
    return table(["", ""], facts)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def summary(results: Results) -> str:
    """What was done, how often, and what was found."""
    audit, fuzz, pairs = results["audit"], results["fuzz"], results["allocation"]
    draws, rows = audit["draws"], audit["rows"]
    found = results["mutations"]["faults"]
    caught = sum(fault["is_caught"] for fault in found)
    kills, several = results["kills"]["facts"], results["distributed"]["facts"]
    failed = sum(result["failure"] is not None for result in fuzz["results"])
    games = [row for row in rows if DESIGN.fullmatch(row["name"])]
    most = max(abs(row["deviations"]) for row in pairs["rows"] if row["is_attained"])
    lines = [
        [
            "audit games of designs, people included",
            f"{len(games)} designs, {draws['games']:,} runs of each with the unit and "
            "as many without",
            f"{disproved(games)}; where the claim is attained at least "
            f"{math.floor(100 * min(map(share, games)))}% of it is shown",
        ],
        [
            "pairs of random allocation, simulated",
            f"{len(pairs['rows'])} values of delta, {pairs['draws']:,} runs each",
            f"{sum(row['is_refuted'] for row in pairs['rows']) or 'no'} claim refuted; "
            f"at most {most:.1f} standard errors from the exact value",
        ],
    ]
    trained = [row for row in rows if not DESIGN.fullmatch(row["name"])]
    lines += [
        [
            "audits of the trainer",
            f"{len({(r['name'], r['attacker']) for r in trained})} audits, by canaries "
            f"and by {draws['steps of the trainer']:,} steps with and without the unit",
            disproved(trained),
        ],
        ["planted faults", f"{len(found)} faults", f"{caught} caught"],
        [
            "kill -9 at random moments of training",
            f"{kills['processes killed']} kills, {kills['runs finished']} runs",
            f"{kills['violations']} violations of the ledger's contract",
        ],
        [
            "kill -9 of one of several processes",
            f"{several['processes killed']} kills",
            f"{several['violations']} violations",
        ],
        [
            "hostile input",
            f"{fuzz['cases']:,} broken files, {len(fuzz['results'])} readers",
            f"{failed} readers with anything but a clear error",
        ],
    ]
    return table(["what", "how often", "what was found"], lines)


def allocation(rows: list[dict[str, Any]]) -> str:
    """Simulated deltas against the claims, the epsilons of one pair in a line."""
    relations = {"add_remove": "add, remove", "replace_one": "replace one"}
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        relation = relations[row["relation"]]
        if row["rate"] < 1:
            relation = f"drawn below, {row['rate']:g}"
        run = f"{row['steps']}, {row['noise']:g}, {row['num_steps']}"
        lines.setdefault((relation, run, row["direction"]), []).append(row)
    head = ["unit", "steps an epoch, noise, steps", "direction", "epsilon"]
    head += ["delta claimed", "simulated"]
    head += ["with 1 % less noise", "with 1 % more"]
    return table(head, ([*key, *pair(found)] for key, found in lines.items()))


def pair(rows: list[dict[str, Any]]) -> list[str]:
    """One pair's epsilons and deltas, and the ranges of the standard errors."""
    epsilons = ", ".join(f"{row['epsilons'][0]:g}" for row in rows)
    deltas = f"{rows[0]['claimed']:.3g} to {rows[-1]['claimed']:.3g}"
    if not all(row["is_attained"] for row in rows):
        return [epsilons, f"at most {deltas}", "below", "", ""]
    less, more = zip(*(row["deviations_planted"] for row in rows), strict=True)
    found = [row["deviations"] for row in rows]
    ranges = [f"{min(found):+.1f} to {max(found):+.1f}"]
    ranges += [f"{min(side):+.0f} to {max(side):+.0f}" for side in (less, more)]
    return [epsilons, deltas, *ranges]


def disproved(rows: list[dict[str, Any]]) -> str:
    """How many claims an audit disproved."""
    number = sum(row["is_violated"] for row in rows)
    return f"{number or 'no'} claim{'s' if number > 1 else ''} disproved"


def provenance(results: Results) -> str:
    """By which command, when and on what."""
    rows = []
    for name, command in COMMANDS.items():
        found = results[name]
        # Faults may have been added later.
        older = found.get("faults", [])
        days = {found["date"], *(one.get("date", found["date"]) for one in older)}
        own = "jaxdp-episodic"
        releases = {found["versions"][own]}
        releases |= {one.get("version", found["versions"][own]) for one in older}
        versions = {**found["versions"], own: ", ".join(sorted(releases))}
        words = ", ".join(f"{k} {v}" for k, v in versions.items() if v)
        rows.append([f"`{command}`", ", ".join(sorted(days)), found["machine"], words])
    return table(["command", "date", "machine", "versions"], rows)


def share(row: dict[str, Any]) -> float:
    """What is shown of the claim about a person; 1 where it is not attained."""
    return 1.0 if UNATTAINED in row["attacker"] else row["share_of_exact"]


def designs(rows: list[dict[str, Any]]) -> str:
    """Audit games, a design a line."""
    lines = []
    for row in rows:
        if match := DESIGN.fullmatch(row["name"]):
            run = f"{match['rates']}, {match['steps']}"
            numbers = upward(row["claimed_exact"]), shown(row)
            lines.append([match["design"], row["attacker"], run, *numbers])
    head = ["design", "protected", "noise, steps", "claimed, exact", "audited"]
    return table(head, lines)


def shown(row: dict[str, Any]) -> str:
    """A lower bound, and its share of the exact claim."""
    return f"{downward(row['audited'])} ({row['share_of_exact']:.0%})"


def runs(rows: list[dict[str, Any]]) -> str:
    """Audits of the trainer, each at the delta at which it shows most."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["name"], row["attacker"]
        if DESIGN.fullmatch(row["name"]):
            continue
        if key not in best or row["share_of_exact"] > best[key]["share_of_exact"]:
            best[key] = row
    head = ["run", "attacker", "delta", "claimed, exact", "audited"]
    lines = (
        [*key, f"{row['delta']:g}", upward(row["claimed_exact"]), shown(row)]
        for key, row in best.items()
    )
    return table(head, lines)


def faults(found: list[dict[str, Any]]) -> str:
    """What was planted and who noticed."""
    head = ["fault", "caught by", "with the fault", "without it"]
    rows = []
    for fault in found:
        who = fault["caught_by"] if fault["is_caught"] else "**not caught**"
        evidence = [
            AUDITED.sub(r"\1 \2 \3 (delta \4)", fault[which]["evidence"])
            for which in ("with", "without")
        ]
        rows.append([fault["fault"], who, *evidence])
    return table(head, rows)


def readers(results: list[dict[str, Any]]) -> str:
    """What became of the broken files."""
    rows = [
        [
            result["target"],
            f"{result['cases']:,}",
            f"{result['outcomes'].get('accepted', 0):,}",
            f"{result['cases'] - result['outcomes'].get('accepted', 0):,}",
            f"{result['slowest_seconds']:.2f}",
        ]
        for result in results
    ]
    head = ["reader", "cases", "accepted", "refused, clearly", "slowest case, s"]
    return table(head, rows)


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the audits; of several deltas one."""
    drawn = []
    for row in rows:
        evidence = row["evidence"]
        kind: Any = Guesses if "num_canaries" in evidence else EpsilonBound
        if not DESIGN.fullmatch(row["name"]) and kind is EpsilonBound:
            if row["delta"] != 1e-2:
                continue
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

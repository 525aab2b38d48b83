"""The library audits itself: every design simulated, real runs with canaries.

``python experiments/trust/audit.py --out results/audit`` simulates designs, one step
2e8 times and a hundred steps 10^8 times, with the protected unit and as often without,
and trains with canaries; it writes ``audit.json``, ``audit.md`` and ``audit.png`` after
every audit, so that an interrupted run leaves what it has. Its exit code is 1 if a
claim was disproved, or an audit of the dominating pair of tasks, grouped classes or
examples explains less than 80 % of exact epsilon.

``--draws`` and ``--long-draws`` set the number of runs of one step and of 100 steps;
``--epochs`` audits the designs by epochs instead, one epoch and one and a half, with
the latter number of runs (a tenth where an epoch has twenty steps); ``--people`` audits
a person with all of her examples instead, by ``--person-draws`` runs of the sampler
that trains, and as many on data without her; its exit code is also 1 if less than 80 %
of an epsilon is shown that contributions are known to come near. ``--only`` takes
the audits whose name contains a word; ``--resume`` keeps those that the folder has
already, made with the same numbers by the same versions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from page import ASKED, PAIR, PERSON, UNATTAINED
from people import person_audits
from provenance import provenance
from simulated import DELTA, Audits, epoch_cases, mechanism_cases, simulations

from jaxdp_episodic.audit import (
    KINDS,
    AuditRow,
    EpsilonBound,
    Guesses,
    Training,
    audit_document,
    audit_markdown,
    audit_run,
    audit_steps,
    release_rows,
    training_of_config,
)
from jaxdp_episodic.tools.plots.audit import plot_audit
from jaxdp_episodic.training import TrainingConfig

ENOUGH, MANY, MANY_OF_PERSON = 0.8, 5 * 10**7, 10**4

# Changes to configs that are shipped. A run has less to compute; where single steps are
# audited, and thousands of them are taken, there are few units, drawn often.
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GLYPHS = "glyphs_5w1s.toml"
SMALL_CONVOLUTION = {"model.channels": [8], "model.embedding": 16}
GLYPHS_RUN: dict[str, Any] = {
    **SMALL_CONVOLUTION,
    "num_steps": 100,
    "step.sampling.episodes.sampling_probability": 0.2,
}
GLYPHS_STEP: dict[str, Any] = {
    **SMALL_CONVOLUTION,
    "data.small": True,
    "step.sampling.num_classes": 40,
}
SINUSOIDS = "sinusoids.toml"
SMALL_NETWORK = {"model.channels": [20]}
SINUSOIDS_RUN: dict[str, Any] = {
    **SMALL_NETWORK,
    "num_steps": 200,
    "normalizer": 100,
    "data.num_tasks": 2_000,
    "step.sampling.levels.0.sampling_probability": 0.05,
}
SINUSOIDS_STEP: dict[str, Any] = {
    **SMALL_NETWORK,
    "normalizer": 20,
    "data.num_tasks": 40,
    "step.sampling.levels.0.sampling_probability": 0.5,
}


def training_audits(step_draws: int) -> Audits:
    """Runs of the trainer with canaries, for examples and for tasks."""
    audits: Audits = {}

    def add_run(name: str, run: Callable[[], Training], kind: str, number: int) -> None:
        def audit() -> list[AuditRow]:
            found = audit_run(run(), kind=kind, num_canaries=number)
            attacker = f"one run, {number} {kind} canaries"
            claims = found.claimed_rdp, found.claimed_exact
            evidence = found.guesses
            return [AuditRow(name, attacker, evidence.delta, *claims, evidence)]

        audits[f"{name}, {kind}"] = audit

    def add_steps(name: str, run: Callable[[], Training], noise: str) -> None:
        def audit() -> list[AuditRow]:
            changed = with_noise(run(), 1.0, noise)
            found = audit_steps(changed, num_draws=step_draws)
            return release_rows(name, found, f"{step_draws:,} steps with a canary")

        audits[name] = audit

    for name, run, canaries in (
        ("glyphs, an example", partial(training, GLYPHS, GLYPHS_RUN), 300),
        ("sinusoids, a task", partial(training, SINUSOIDS, SINUSOIDS_RUN), 500),
    ):
        for kind in KINDS:
            add_run(name, run, kind, canaries)
    glyphs = partial(training, GLYPHS, GLYPHS_STEP)
    add_steps("glyphs, an example, one step, noise 1", glyphs, "gaussian")
    sinusoids = partial(training, SINUSOIDS, SINUSOIDS_STEP)
    add_steps("sinusoids, a task, one step, noise 1", sinusoids, "gaussian")
    add_steps("sinusoids, a task, one step, discrete noise 1", sinusoids, "discrete")
    return audits


def training(name: str, changes: Mapping[str, Any]) -> Training:
    """The run of a shipped config, with some fields, by dotted names, changed."""
    mapping = tomllib.loads((CONFIGS / name).read_text(encoding="utf-8"))
    for field, value in changes.items():
        *above, last = field.split(".")
        table: Any = mapping
        for key in above:
            table = table[int(key) if key.isdigit() else key]
        table[last] = value
    mapping = {"type": "TrainingConfig", **mapping}
    return training_of_config(TrainingConfig.from_dict(mapping), CONFIGS)


def with_noise(run: Training, multiplier: float, noise: str) -> Training:
    """The run with other noise: one step at the noise of a whole run shows little."""
    step = dataclasses.replace(run.budget.step, noise_multiplier=multiplier)
    budget = dataclasses.replace(run.budget, step=step)
    return dataclasses.replace(run, budget=budget, noise=noise)


Found = dict[str, list[AuditRow]]
"""Rows by the audit's name."""


def write(
    out: Path, found: Found, seconds: dict[str, float], draws: dict[str, int]
) -> None:
    """Leaves what was found so far."""
    rows = [row for some in found.values() for row in some]
    document = audit_document(
        rows,
        **provenance(),
        delta=DELTA,
        confidence=0.95,
        draws=draws,
        seconds={name: round(seconds[name], 1) for name in found},
        num_rows={name: len(some) for name, some in found.items()},
    )
    text = json.dumps(document, indent=1, allow_nan=False)
    # All of it or nothing, for `read`.
    (out / "audit.json.new").write_text(text + "\n", encoding="utf-8")
    (out / "audit.json.new").replace(out / "audit.json")
    (out / "audit.md").write_text(audit_markdown(rows), encoding="utf-8")
    plot_audit(rows, out / "audit.png", title="Claimed and audited epsilon")


def read(out: Path, draws: dict[str, int]) -> tuple[Found, dict[str, float]]:
    """What an interrupted run left, and the seconds each audit took."""
    path = out / "audit.json"
    try:
        return _read(json.loads(path.read_text(encoding="utf-8")), draws)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise SystemExit(f"{path} cannot be resumed: {error!r}") from error


def _read(
    document: dict[str, Any], draws: dict[str, int]
) -> tuple[Found, dict[str, float]]:
    same = {"draws": draws, "versions": provenance()["versions"], "delta": DELTA}
    for name, wanted in same.items():
        if document[name] != wanted:
            raise ValueError(f"made with {name} {document[name]}, not {wanted}")
    if sum(document["num_rows"].values()) != len(document["rows"]):
        raise ValueError("rows are missing")
    rows = iter(document["rows"])

    def row() -> AuditRow:
        fields = next(rows)
        evidence = fields["evidence"]
        kind = EpsilonBound if "hits" in evidence else Guesses
        claims = fields["claimed_rdp"], fields["claimed_exact"]
        names = fields["name"], fields["attacker"], fields["delta"]
        return AuditRow(*names, *claims, kind(**evidence))

    found = {
        name: [row() for _ in range(number)]
        for name, number in document["num_rows"].items()
    }
    return found, document["seconds"]


def falls_short(row: AuditRow) -> bool:
    """True where an audit of what is accounted explains too little of it.

    Of independent episodes it is shown for the bound's sake alone: their epsilon at the
    second rates, 0.07, is too small. Nor is it asked of few draws.
    """
    evidence = row.evidence
    if row.attacker.startswith(PERSON) and isinstance(evidence, EpsilonBound):
        is_asked = UNATTAINED not in row.attacker
        return is_asked and evidence.num_draws > MANY_OF_PERSON and row.share < ENOUGH
    is_asked = row.name.startswith(ASKED) and PAIR in row.attacker
    is_short = isinstance(evidence, EpsilonBound) and evidence.num_draws < MANY
    return is_asked and not is_short and row.share < ENOUGH


def attacked(audits: Audits, asked: argparse.Namespace, draws: dict[str, int]) -> int:
    """Makes these audits, in this order; returns the exit code."""
    asked.out.mkdir(parents=True, exist_ok=True)
    found: Found = {}
    seconds: dict[str, float] = {}
    if asked.resume and (asked.out / "audit.json").exists():
        found, seconds = read(asked.out, draws)
        found = {name: rows for name, rows in found.items() if name in audits}
    for name in audits:
        if asked.only not in name or name in found:
            continue
        begun = time.perf_counter()
        rows = audits[name]()
        seconds[name] = time.perf_counter() - begun
        found[name] = rows
        found = {one: found[one] for one in audits if one in found}
        write(asked.out, found, seconds, draws)
        for row in rows:
            print(
                f"{row.name}: {row.attacker}: {row.audited:.4f} of "
                f"{row.claimed_exact:.4f} at {row.delta:g} ({seconds[name]:.0f} s)",
                flush=True,
            )
    rows = [row for some in found.values() for row in some]
    bad = [row for row in rows if row.is_violated or falls_short(row)]
    for row in bad:
        word = "VIOLATED" if row.is_violated else "short"
        print(f"{word}: {row.name}, {row.attacker}", file=sys.stderr)
    assert all(math.isfinite(row.claimed_exact) for row in rows)
    assert np.isfinite([row.audited for row in rows]).all()
    return 1 if bad else 0


def main() -> int:
    """Audits everything that is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=float, default=2e8)
    parser.add_argument("--long-draws", type=float, default=1e8)
    parser.add_argument("--step-draws", type=float, default=5_000)
    parser.add_argument("--person-draws", type=float, default=1e5)
    parser.add_argument("--epochs", action="store_true")
    parser.add_argument("--people", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    one, several = int(asked.draws), int(asked.long_draws)
    if asked.epochs:
        audits = simulations(epoch_cases(several))
        return attacked(audits, asked, {"epochs": several})
    if asked.people:
        number = int(asked.person_draws)
        return attacked(person_audits(number), asked, {"people": number})
    steps = int(asked.step_draws)
    draws = {"one step": one, "100 steps": several, "steps of the trainer": steps}
    audits = simulations(mechanism_cases(one, several)) | training_audits(steps)
    # A hundred steps take longest, and come last.
    order = sorted(audits, key=lambda name: name.endswith("T=100"))
    return attacked({name: audits[name] for name in order}, asked, draws)


if __name__ == "__main__":
    sys.exit(main())

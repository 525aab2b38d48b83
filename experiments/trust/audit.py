"""Audits of the library: the game of every design, and real runs with canaries.

``python experiments/trust/audit.py --out results/audit`` plays the audit game of every
kind of design, people included, ``--draws`` times with the protected unit and as often
without, and trains with canaries (``--step-draws`` steps where single steps are
audited). It writes ``audit.json`` after every audit, which ``page.py`` draws. The exit
code is 1 if a claim was disproved, or if a game shows less than half of a claim that
known contributions nearly attain. ``--only`` takes the audits with a word.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from audit_designs import DELTA, Audits, game_audits
from page import DESIGN, UNATTAINED
from provenance import provenance

from jaxdp_episodic.audit import (
    KINDS,
    AuditRow,
    EpsilonBound,
    Training,
    audit_document,
    audit_run,
    audit_steps,
    release_rows,
    training_of_config,
)
from jaxdp_episodic.training import TrainingConfig

# Share of an attained claim that a game of many draws has to show.
ENOUGH = 0.5
MANY = 10**4

# Changes to configs that are shipped. A run has less to compute; where single steps are
# audited, and thousands of them are taken, there are few units, drawn often.
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GLYPHS, SINUSOIDS = "glyphs_5w1s.toml", "sinusoids.toml"
RATE = "step.sampling.levels.0.sampling_probability"
CHANGES: dict[str, dict[str, Any]] = {
    GLYPHS: {"model.channels": [8], "model.embedding": 16},
    SINUSOIDS: {"model.channels": [20]},
}
RUNS: dict[str, dict[str, Any]] = {
    GLYPHS: {"num_steps": 100, "step.sampling.episodes.sampling_probability": 0.2},
    SINUSOIDS: {
        "num_steps": 200,
        "normalizer": 100,
        "data.num_tasks": 2_000,
        RATE: 0.05,
    },
}
STEPS: dict[str, dict[str, Any]] = {
    GLYPHS: {"data.small": True, "step.sampling.num_classes": 40},
    SINUSOIDS: {"normalizer": 20, "data.num_tasks": 40, RATE: 0.5},
}


def training_audits(step_draws: int) -> Audits:
    """Runs of the trainer with canaries, for examples and for tasks."""

    def of_run(name: str, config: str, kind: str, number: int) -> list[AuditRow]:
        run = training(config, RUNS[config])
        found = audit_run(run, kind=kind, num_canaries=number)
        attacker, guesses = f"one run, {number} {kind} canaries", found.guesses
        claims = found.claimed_rdp, found.claimed_exact
        return [AuditRow(name, attacker, guesses.delta, *claims, guesses)]

    def of_steps(name: str, config: str, noise: str) -> list[AuditRow]:
        changed = with_noise(training(config, STEPS[config]), 1.0, noise)
        found = audit_steps(changed, num_draws=step_draws)
        return release_rows(name, found, f"{step_draws:,} steps with a canary")

    audits: Audits = {}
    for name, config, canaries in (
        ("glyphs, an example", GLYPHS, 300),
        ("sinusoids, a task", SINUSOIDS, 500),
    ):
        for kind in KINDS:
            audits[f"{name}, {kind}"] = partial(of_run, name, config, kind, canaries)
    for name, config, noise in (
        ("glyphs, an example, one step, noise 1", GLYPHS, "gaussian"),
        ("sinusoids, a task, one step, noise 1", SINUSOIDS, "gaussian"),
        ("sinusoids, a task, one step, discrete noise 1", SINUSOIDS, "discrete"),
    ):
        audits[name] = partial(of_steps, name, config, noise)
    return audits


def training(name: str, changes: Mapping[str, Any]) -> Training:
    """The run of a shipped config, with changes by dotted names."""
    mapping = tomllib.loads((CONFIGS / name).read_text(encoding="utf-8"))
    for field, value in (CHANGES[name] | dict(changes)).items():
        *above, last = field.split(".")
        table: Any = mapping
        for key in above:
            table = table[int(key) if key.isdigit() else key]
        table[last] = value
    return training_of_config(TrainingConfig.from_dict(mapping), CONFIGS)


def with_noise(run: Training, multiplier: float, noise: str) -> Training:
    """The run with less noise, as one step at the noise of a whole run shows little."""
    step = dataclasses.replace(run.budget.step, noise_multiplier=multiplier)
    budget = dataclasses.replace(run.budget, step=step)
    return dataclasses.replace(run, budget=budget, noise=noise)


def falls_short(row: AuditRow) -> bool:
    """Whether a game of many draws shows too little of an attained claim."""
    evidence = row.evidence
    if not isinstance(evidence, EpsilonBound) or UNATTAINED in row.attacker:
        return False
    is_game = DESIGN.fullmatch(row.name) is not None
    return is_game and evidence.num_draws > MANY and row.share < ENOUGH


def main() -> int:
    """Runs the chosen audits; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=float, default=1e5)
    parser.add_argument("--step-draws", type=float, default=5_000)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    steps, number = int(options.step_draws), int(options.draws)
    draws = {"games": number, "steps of the trainer": steps}
    audits = game_audits(number) | training_audits(steps)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[AuditRow] = []
    seconds: dict[str, float] = {}
    for name in (name for name in audits if options.only in name):
        begun = time.perf_counter()
        found = audits[name]()
        seconds[name] = round(time.perf_counter() - begun, 1)
        rows += found
        about = provenance() | {"delta": DELTA, "confidence": 0.95, "draws": draws}
        document = audit_document(rows, **about, seconds=seconds)
        text = json.dumps(document, indent=1, allow_nan=False)
        (options.out / "audit.json").write_text(text + "\n", encoding="utf-8")
        for row in found:
            print(
                f"{row.name}: {row.attacker}: {row.audited:.4f} of "
                f"{row.claimed_exact:.4f} at {row.delta:g} ({seconds[name]:.0f} s)",
                flush=True,
            )
    bad = [row for row in rows if row.is_violated or falls_short(row)]
    for row in bad:
        word = "VIOLATED" if row.is_violated else "short"
        print(f"{word}: {row.name}, {row.attacker}", file=sys.stderr)
    assert all(math.isfinite(row.claimed_exact) for row in rows)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

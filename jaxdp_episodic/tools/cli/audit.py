"""``jaxdp-episodic audit``: an empirical lower bound next to the claimed epsilon."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from rich.console import Console

from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.accountant.report.rounding import downward, upward
from jaxdp_episodic.tools.cli.messages import (
    Name,
    Number,
    TomlFile,
    Whole,
    option,
    reported,
)
from jaxdp_episodic.tools.cli.process import PROGRAM, use_all_cores
from jaxdp_episodic.tools.plots.audit import plot_audit
from jaxdp_episodic.tools.requests.request import EpsilonRequest
from jaxdp_episodic.tools.requests.request_file import read_request
from jaxdp_episodic.trainer.audit.report import (
    AuditRow,
    audit_document,
    audit_markdown,
    release_rows,
)
from jaxdp_episodic.trainer.config.training_config import read_config

VIOLATED = 3  # exit code
DOCUMENT = "audit.json"
TABLE = "audit.md"
PICTURE = "audit.png"
# Runs of the game with the unit, and as many without: some ten seconds.
_MECHANISM_DRAWS = 20_000
# Steps with the canary, and as many without.
_STEP_DRAWS = 2_000

Kind = Literal["mechanism", "step", "gradient", "input"]


@dataclass(frozen=True)
class Audit:
    """Try to disprove a claimed epsilon by drawing, or by canaries in training."""

    file: TomlFile
    """A request, as for `epsilon`; with another --kind a run, as for `train`."""
    out: Annotated[Path, option("DIR")]
    """Folder for audit.json, audit.md and audit.png; made if missing."""
    kind: Kind = "mechanism"
    """mechanism: draw with a unit and without it. Canaries in the trainer: step (one
    step, and the private statistics, many times), gradient (a run, white box), input (a
    run, black box)."""
    draws: Whole = None
    """Runs with the unit (20,000), or of step: steps with the canary (2,000)."""
    canaries: Annotated[int, option("INT")] = 100
    """Canaries in a run (gradient, input)."""
    num_steps: Whole = None
    """Takes the place of the file's number of steps."""
    delta: Number = None
    """Takes the place of the file's delta (mechanism)."""
    privacy_unit: Annotated[Name, option("LEVEL")] = None
    """Audit the protection of another unit than the run's (step, gradient, input)."""
    confidence: Annotated[float, option("FLOAT")] = 0.95
    """Of every lower bound."""
    seed: Annotated[int, option("INT")] = 0
    """Of the game, or of canaries and coins; training itself is not seeded."""

    def run(self) -> int:
        """Audits; returns 0, or 3 if the claim is disproved."""
        rows: list[AuditRow] = []

        def audited() -> list[str]:
            self.out.mkdir(parents=True, exist_ok=True)
            attempt = self._mechanism if self.kind == "mechanism" else self._canaries
            rows.extend(attempt(Console(stderr=True)))
            self._write(rows)
            return self._lines(rows)

        left = "; nothing is kept of an audit that did not end"
        code = reported(self.file, audited, interrupted=left)
        return code or (VIOLATED if any(row.is_violated for row in rows) else 0)

    def _mechanism(self, console: Console) -> list[AuditRow]:
        """Plays the game of what the request describes."""
        if self.privacy_unit is not None:
            raise ValueError("--privacy-unit goes with a run; a request names its own")
        request = read_request(
            self.file, EpsilonRequest, delta=self.delta, num_steps=self.num_steps
        )
        if request.delta is None:
            raise ValueError("an audit needs a delta; give --delta, or one in the file")
        draws = _MECHANISM_DRAWS if self.draws is None else self.draws
        steps: Any = request.num_steps
        for name, value in (("delta", request.delta), ("num_steps", steps)):
            if np.ndim(value):
                raise ValueError(f"{name} must be one number for an audit, got a list")
        step = request.planned("audit")
        if step.shape:
            raise ValueError(
                "step must be one setting for an audit, its fields numbers and no "
                f"lists, got shape {step.shape}"
            )
        # Imported here: Flax costs a second, which bad input should not pay.
        from jaxdp_episodic.trainer.audit.game import audit_mechanism, total_draws

        with ProgressBar(console, "draws", total_draws(draws)) as progress:
            audit = audit_mechanism(
                step,
                deltas=(float(np.asarray(request.delta)),),
                num_steps=None if steps is None else int(steps),
                num_draws=draws,
                confidence=self.confidence,
                seed=self.seed,
                on_draws=progress.advance,
            )
        return release_rows(self.file.stem, audit, "two data sets, drawn")

    def _canaries(self, console: Console) -> list[AuditRow]:
        """Trains with canaries as the config says."""
        if self.delta is not None:
            raise ValueError("--delta goes with --kind mechanism; a run names its own")
        use_all_cores()
        # Imported here: Flax costs a second.
        from jaxdp_episodic.trainer.audit.statistics import audit_statistics
        from jaxdp_episodic.trainer.audit.training import (
            audit_run,
            audit_steps,
            training_of_config,
        )

        training = training_of_config(
            read_config(self.file), self.file.parent, privacy_unit=self.privacy_unit
        )
        chosen: dict[str, Any] = {"confidence": self.confidence, "seed": self.seed}
        if self.kind == "step":
            if self.num_steps is not None:
                text = "--num-steps does not go with --kind step: give --draws"
                raise ValueError(text)
            draws = _STEP_DRAWS if self.draws is None else self.draws
            rows = []
            if training.start is not None:
                with ProgressBar(console, "releases", 2 * draws) as progress:
                    found = audit_statistics(
                        training, num_draws=draws, on_draws=progress.advance, **chosen
                    )
                what = f"{len(training.budget.before)} private statistics, a canary"
                rows += release_rows(self.file.stem, found, what)
            if training.budget.num_steps == len(training.budget.before):
                return rows
            with ProgressBar(console, "steps", 2 * draws) as progress:
                found = audit_steps(
                    training, num_draws=draws, on_step=_shown(progress), **chosen
                )
            what = "one step, gradient canary"
            return rows + release_rows(self.file.stem, found, what)
        if self.draws is not None:
            raise ValueError("--draws does not go with one run: give --canaries")
        total = self.num_steps or training.budget.num_steps
        with ProgressBar(console, "steps", total) as progress:
            audit = audit_run(
                training,
                kind=self.kind,
                num_canaries=self.canaries,
                num_steps=self.num_steps,
                on_step=_shown(progress),
                **chosen,
            )
        return [
            AuditRow(
                self.file.stem,
                f"one run, {audit.guesses.num_canaries} {audit.kind} canaries "
                f"({audit.privacy_unit})",
                audit.guesses.delta,
                audit.claimed_rdp,
                audit.claimed_exact,
                audit.guesses,
            )
        ]

    def _write(self, rows: list[AuditRow]) -> None:
        """Leaves the numbers, a table and, if matplotlib is there, a picture."""
        document = audit_document(
            rows, program=PROGRAM, kind=self.kind, seed=self.seed, file=self.file.name
        )
        text = json.dumps(document, indent=1, allow_nan=False)
        (self.out / DOCUMENT).write_text(text + "\n", encoding="utf-8")
        (self.out / TABLE).write_text(audit_markdown(rows), encoding="utf-8")
        if importlib.util.find_spec("matplotlib") is not None:
            plot_audit(rows, self.out / PICTURE, title=self.file.stem)

    def _lines(self, rows: list[AuditRow]) -> list[str]:
        """What is printed: claims rounded up, audits down."""
        lines = []
        for row in rows:
            rdp = "" if row.claimed_rdp is None else f" ({upward(row.claimed_rdp)} RDP)"
            lines.append(
                f"{row.attacker}, delta {row.delta:g}: audited "
                f"{downward(row.audited)}, claimed {upward(row.claimed_exact)}{rdp}"
                + _verdict(row)
            )
        sure = f"{100 * self.confidence:.10g}% confidence each"
        return [*lines, f"{sure}; written: {self.out}"]


def _verdict(row: AuditRow) -> str:
    if row.is_violated:
        return "  VIOLATED"
    if row.is_above:
        # At 95% confidence one in twenty exact claims that hold is above, too.
        return "  above the claim, but not with 99.99%: repeat it with more draws"
    return ""


def _shown(progress: ProgressBar) -> Callable[[int, int], None]:
    return lambda taken, _: progress.show(taken)

"""``jaxdp-episodic audit``: an empirical lower bound next to the claimed epsilon."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import numpy as np
from rich.console import Console

from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.accountant.report.rounding import downward, upward
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.cli.command import (
    PROGRAM,
    Command,
    Floats,
    Folder,
    Ints,
    Name,
    Number,
    TomlFile,
    Whole,
    option,
    use_all_cores,
)
from jaxdp_episodic.tools.plots.figures import plot_audit
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request
from jaxdp_episodic.trainer.audit.report import (
    AuditRow,
    audit_document,
    audit_markdown,
    release_rows,
)
from jaxdp_episodic.trainer.config.training_config import read_config

VIOLATED = 3  # exit code
_MECHANISM_DRAWS = 20_000  # simulations with the unit, and as many without: about 10 s
_FEWEST_DRAWS = 100
_STEP_DRAWS = 2_000  # steps with the canary, and as many without


_Kind = Union[Literal["mechanism", "step", "gradient", "input"], None]  # noqa: UP007


@dataclass
class Audit(Command):
    """The command ``audit``."""

    #: A request, as for `epsilon`, or a run, as for `train`.
    file: TomlFile
    #: Folder for audit.json, audit.md and audit.png; made if missing.
    out: Folder
    #: mechanism (default of a request): simulate it with and without a unit.
    #: step (default of a run): repeat one step, and the private statistics, with
    #: a canary. gradient, input: train one run with canaries (white box, black
    #: box).
    kind: Annotated[_Kind, option("NAME", is_optional=True)] = None
    #: Simulations with the unit (default: 20,000). With --kind step: steps with the
    #: canary (default: 2,000).
    draws: Whole = None
    #: Canaries in a run (gradient, input).
    canaries: Ints = 100
    #: Number of steps; default: the file's.
    num_steps: Whole = None
    #: Delta; default: the file's (mechanism).
    delta: Number = None
    #: Privacy unit to audit; default: the run's (step, gradient, input).
    privacy_unit: Annotated[Name, option("LEVEL")] = None
    #: Confidence of every lower bound.
    confidence: Floats = 0.95
    #: Seed of the simulation, or of the choice of canaries; training is not seeded.
    seed: Ints = 0

    def _lines(self) -> list[str]:
        self.out.mkdir(parents=True, exist_ok=True)
        if self.draws is not None and self.draws < _FEWEST_DRAWS:
            raise ValueError(
                f"--draws must be at least {_FEWEST_DRAWS}, got {self.draws}"
            )
        if self.kind is None:
            self.kind = "step" if "data" in read_toml(self.file) else "mechanism"
        attempt = self._mechanism if self.kind == "mechanism" else self._canaries
        rows = attempt(Console(stderr=True))
        document = audit_document(
            rows, program=PROGRAM, kind=self.kind, seed=self.seed, file=self.file.name
        )
        text = json.dumps(document, indent=1, allow_nan=False)
        (self.out / "audit.json").write_text(text + "\n", encoding="utf-8")
        (self.out / "audit.md").write_text(audit_markdown(rows), encoding="utf-8")
        if importlib.util.find_spec("matplotlib") is not None:
            plot_audit(rows, self.out / "audit.png", title=self.file.stem)
        self._code = VIOLATED if any(row.is_violated for row in rows) else 0
        sure = f"{100 * self.confidence:.10g}% confidence each"
        lines = [line for row in rows for line in _lines_of(row)]
        return [*lines, f"{sure}; written: {self.out}"]

    def _after_interruption(self) -> str:
        return "; nothing was written"

    def _mechanism(self, console: Console) -> list[AuditRow]:
        """Simulates the mechanism of a request."""
        if self.privacy_unit is not None:
            raise ValueError(
                "--privacy-unit is for the config of a run; a request names its own"
            )
        request = read_request(
            self.file, EpsilonRequest, delta=self.delta, num_steps=self.num_steps
        )
        if request.delta is None:
            raise ValueError("delta must be given, by --delta or in the file")
        steps: Any = request.num_steps
        step = request.planned("audit")
        for name, value in (("delta", request.delta), ("num_steps", steps)):
            if np.ndim(value):
                raise ValueError(f"{name} must be one number for an audit, got a list")
        if step.shape:
            raise ValueError(
                "step must be one setting for an audit, without lists, got shape "
                f"{step.shape}"
            )
        # Imported here: Flax costs a second, which bad input should not pay.
        from jaxdp_episodic.trainer.audit.game import audit_mechanism, total_draws

        draws = _MECHANISM_DRAWS if self.draws is None else self.draws
        with ProgressBar(console, "draws", total_draws(draws)) as progress:
            audit = audit_mechanism(
                step,
                deltas=(float(np.asarray(request.delta)),),
                num_steps=None if steps is None else int(steps),
                num_draws=draws,
                on_draws=progress.advance,
                **self._chosen,
            )
        return release_rows(self.file.stem, audit, "two data sets, drawn")

    @property
    def _chosen(self) -> dict[str, Any]:
        return {"confidence": self.confidence, "seed": self.seed}

    def _canaries(self, console: Console) -> list[AuditRow]:
        """Trains with canaries, as the training config describes."""
        if self.delta is not None:
            raise ValueError("--delta is for --kind mechanism; a run names its own")
        use_all_cores()
        # Imported here: Flax costs a second.
        from jaxdp_episodic.trainer.audit.training import audit_run, training_of_config

        training = training_of_config(
            read_config(self.file), self.file.parent, privacy_unit=self.privacy_unit
        )
        if self.kind == "step":
            return self._step(training, console)
        if self.draws is not None:
            raise ValueError(f"--draws is not for --kind {self.kind}; give --canaries")
        total = self.num_steps or training.budget.num_steps
        with ProgressBar(console, "steps", total) as progress:
            audit = audit_run(
                training,
                kind=str(self.kind),
                num_canaries=self.canaries,
                num_steps=self.num_steps,
                on_step=_shown(progress),
                **self._chosen,
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

    def _step(self, training: Any, console: Console) -> list[AuditRow]:
        """Repeats one step, and the private statistics before it, with a canary."""
        # Imported here: Flax costs a second.
        from jaxdp_episodic.trainer.audit.training import audit_statistics, audit_steps

        if self.num_steps is not None:
            raise ValueError("--num-steps is not for --kind step; give --draws")
        draws = _STEP_DRAWS if self.draws is None else self.draws
        before = len(training.budget.before)
        rows = []
        if training.start is not None:
            with ProgressBar(console, "releases", 2 * draws) as progress:
                found = audit_statistics(
                    training, num_draws=draws, on_draws=progress.advance, **self._chosen
                )
            what = f"{before} private statistics, a canary"
            rows += release_rows(self.file.stem, found, what)
        if training.budget.num_steps > before:
            with ProgressBar(console, "steps", 2 * draws) as progress:
                found = audit_steps(
                    training, num_draws=draws, on_step=_shown(progress), **self._chosen
                )
            what = "one step, gradient canary"
            rows += release_rows(self.file.stem, found, what)
        return rows


def _lines_of(row: AuditRow) -> list[str]:
    """The result and the verdict. Claims are rounded up, audited bounds down."""
    rdp = "" if row.claimed_rdp is None else f" ({upward(row.claimed_rdp)} RDP)"
    audited, claimed = downward(row.audited), upward(row.claimed_exact)
    head = f"{row.attacker}, delta {row.delta:g}: audited {audited}, claimed {claimed}"
    shown = f"{audited} was shown"
    if row.is_violated:
        verdict = f"VIOLATED: the claim of {upward(row.claimed)} is disproved, {shown}"
    elif row.is_above:
        # At 95% confidence this happens to one in twenty claims that are exact.
        verdict = (
            f"{shown}, which is above the claim, but not with 99.99% confidence: "
            "repeat the audit with more draws"
        )
    else:
        verdict = f"the claim of {claimed} is not disproved: {shown}"
    return [head + rdp, f"  {verdict}"]


def _shown(progress: ProgressBar) -> Callable[[int, int], None]:
    return lambda taken, _: progress.show(taken)

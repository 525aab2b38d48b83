"""``jaxdp-episodic audit``: an empirical lower bound next to the claimed epsilon."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic._progress import ProgressBar, standard_error
from jaxdp_episodic.accountant.report.sentences import downward, upward
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.cli.command import Options, use_all_cores
from jaxdp_episodic.tools.cli.flags import PROGRAM
from jaxdp_episodic.tools.plots.figures import plot_audit
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request
from jaxdp_episodic.trainer.audit import bounds
from jaxdp_episodic.trainer.config.training_config import read_config

VIOLATED = 3  # exit code
_MECHANISM_DRAWS = 20_000  # simulations with the unit, and as many without: about 10 s
_FEWEST_DRAWS = 100
_CANARIES = 100  # in a run
_KINDS_OF = {  # the kinds of audits that an option is for
    "draws": ("mechanism", "step"),
    "canaries": ("gradient", "input"),
    "delta": ("mechanism",),
    "privacy_unit": ("step", "gradient", "input"),
    "num_steps": ("mechanism", "gradient", "input"),
}
_STEP_DRAWS = 2_000  # steps with the canary, and as many without


def do_audit(o: Options) -> list[str]:
    """The command ``audit``."""
    o.left_behind = lambda: "; nothing was written"
    if o.kind is None:
        o.kind = "step" if "data" in read_toml(o.file) else "mechanism"
    o.refuse_others(o.kind, _KINDS_OF, "--kind ")
    _validation.whole_number("--seed", o.seed, minimum=0)
    if o.draws is not None:
        _validation.whole_number("--draws", o.draws, minimum=_FEWEST_DRAWS)
    o.out.mkdir(parents=True, exist_ok=True)
    rows = (_mechanism if o.kind == "mechanism" else _canaries)(o)
    document = bounds.audit_document(
        rows, program=PROGRAM, kind=o.kind, seed=o.seed, file=o.file.name
    )
    text = json.dumps(document, indent=1, allow_nan=False)
    (o.out / "audit.json").write_text(text + "\n", encoding="utf-8")
    (o.out / "audit.md").write_text(bounds.audit_markdown(rows), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        plot_audit(rows, o.out / "audit.png", title=o.file.stem)
    o.code = VIOLATED if any(row.is_violated for row in rows) else 0
    lines = []
    for row in rows:  # claims are rounded up, audited bounds down
        rdp = "" if row.claimed_rdp is None else f" ({upward(row.claimed_rdp)} RDP)"
        audited, claimed = downward(row.audited), upward(row.claimed_exact)
        head = f"{row.attacker}, delta {row.delta:.15g}: audited {audited}, claimed "
        shown = f"{audited} was shown"
        if row.is_violated:
            claim = upward(row.claimed)
            verdict = f"VIOLATED: the claim of {claim} is disproved, {shown}"
        elif row.is_above:
            # At 95% confidence this happens to one in twenty claims that are exact.
            verdict = (
                f"{shown}, which is above the claim, but not with 99.99% confidence: "
                "repeat the audit with more draws"
            )
        else:
            verdict = f"the claim of {claimed} is not disproved: {shown}"
        lines += [f"{head}{claimed}{rdp}", f"  {verdict}"]
    return [*lines, f"{100 * o.confidence:.10g}% confidence each; written: {o.out}"]


def _mechanism(o: Options) -> list[bounds.AuditRow]:
    """Simulates the mechanism of a request."""
    request = read_request(o.file, EpsilonRequest, delta=o.delta, num_steps=o.num_steps)
    if request.delta is None:
        raise ValueError("delta must be given, by --delta or in the file")
    steps: Any = request.num_steps
    step = request.planned("audit")
    for name, value in (("delta", request.delta), ("num_steps", steps)):
        if np.ndim(value):
            raise ValueError(f"{name} must be one number for an audit, got a list")
    if step.shape:
        said = "step must be one setting for an audit, without lists"
        raise ValueError(f"{said}, got shape {step.shape}")
    from jaxdp_episodic.trainer.audit.game import audit_mechanism, total_draws

    draws = _MECHANISM_DRAWS if o.draws is None else o.draws
    with ProgressBar(standard_error(), "draws", total_draws(draws)) as progress:
        audit = audit_mechanism(
            step,
            deltas=(float(np.asarray(request.delta)),),
            num_steps=None if steps is None else int(steps),
            num_draws=draws,
            on_draws=progress.advance,
            confidence=o.confidence,
            seed=o.seed,
        )
    return bounds.release_rows(o.file.stem, audit, "two data sets, drawn")


def _canaries(o: Options) -> list[bounds.AuditRow]:
    """Trains with canaries, as the training config describes."""
    use_all_cores()
    from jaxdp_episodic.trainer.audit.training import audit_run, training_of_config

    training = training_of_config(
        read_config(o.file), o.file.parent, privacy_unit=o.privacy_unit
    )
    if o.kind == "step":
        return _step(o, training)
    total = o.num_steps or training.budget.num_steps
    with ProgressBar(standard_error(), "steps", total) as progress:
        audit = audit_run(
            training,
            kind=o.kind,
            num_canaries=_CANARIES if o.canaries is None else o.canaries,
            num_steps=o.num_steps,
            on_step=lambda taken, _: progress.show(taken),
            confidence=o.confidence,
            seed=o.seed,
        )
    guesses = audit.guesses
    canaries = f"{guesses.num_canaries} {audit.kind} canaries ({audit.privacy_unit})"
    claimed = audit.claimed_rdp, audit.claimed_exact
    named = o.file.stem, f"one run, {canaries}"
    return [bounds.AuditRow(*named, guesses.delta, *claimed, guesses)]


def _step(o: Options, training: Any) -> list[bounds.AuditRow]:
    """Repeats one step, and the private statistics before it, with a canary."""
    from jaxdp_episodic.trainer.audit.training import audit_statistics, audit_steps

    draws = _STEP_DRAWS if o.draws is None else o.draws
    how = {"num_draws": draws, "confidence": o.confidence, "seed": o.seed}
    rows, before = [], len(training.budget.before)
    if training.start is not None:
        with ProgressBar(standard_error(), "releases", 2 * draws) as progress:
            found = audit_statistics(training, on_draws=progress.advance, **how)
        what = f"{before} private statistics, a canary"
        rows += bounds.release_rows(o.file.stem, found, what)
    if training.budget.num_steps > before:
        with ProgressBar(standard_error(), "steps", 2 * draws) as progress:
            found = audit_steps(training, on_step=lambda n, _: progress.show(n), **how)
        rows += bounds.release_rows(o.file.stem, found, "one step, gradient canary")
    return rows

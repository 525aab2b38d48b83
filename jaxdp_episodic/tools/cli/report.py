"""``jaxdp-episodic report``: a run's privacy in plain words."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.report.in_words import adaptive_in_words, report_in_words
from jaxdp_episodic.accountant.report.ledger_file import read_ledger
from jaxdp_episodic.accountant.report.report import privacy_report, single_run
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.cli.answers import caveats_on_ledger
from jaxdp_episodic.tools.cli.command import Command, TomlFile, waiting
from jaxdp_episodic.tools.plan.question import read_plan
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config


@dataclass
class Report(Command):
    """The command ``report``."""

    #: A request, as for `epsilon`; or a run, as for `train`, whose data are read; or a
    #: plan, as for `plan`: then the report is on the recommended run; or the folder of
    #: a run that was trained: then it is on what was charged.
    file: TomlFile

    def _lines(self) -> list[str]:
        if self.file.is_dir() or self.file.suffix in (".sqlite", ".jsonl"):
            with waiting():
                return [_of_run(self.file)]
        keys = read_toml(self.file).keys()
        with waiting():
            if "episode" in keys:  # a plan
                return [_of_plan(self.file)]
            if "learner" in keys:  # a run
                return [_of_config(read_config(self.file), self.file.parent)]
            return [_of_request(read_request(self.file, EpsilonRequest))]


def _of_request(request: EpsilonRequest) -> str:
    if request.delta is None:
        raise ValueError("a report needs a delta, got a request with an epsilon")
    step: Any = request.planned("report")
    run = single_run(step, request.num_steps)
    delta = np.asarray(request.delta)
    return report_in_words(privacy_report(run, delta=delta, method=request.method), run)


def _of_run(path: Path) -> str:
    content = read_ledger(path)
    notes = [f"{content.charged:,} steps are charged.", *caveats_on_ledger(content)]
    budget = content.adaptive_taken
    if budget is not None:
        return adaptive_in_words(budget, notes)
    run = single_run(*content.run_charged())
    report = privacy_report(run, delta=np.asarray(content.delta))
    return "\n".join([report_in_words(report, run), "", *(f"* {t}" for t in notes)])


def _of_plan(file: Path) -> str:
    # Imported here: it draws.
    from jaxdp_episodic.tools.cli.plan import CONFIG, planned

    description = read_plan(file)
    for table in ("data", "train"):
        if getattr(description, table) is None:
            raise ValueError(
                f"a plan without the table {table} recommends no run to report on"
            )
    with tempfile.TemporaryDirectory() as folder:
        said = planned(description, file.parent, Path(folder))
        config = Path(folder, CONFIG)
        if not config.exists():
            why = [line for line in said if line.startswith("no config")]
            raise ValueError("; ".join(["a plan recommends no run here", *why]))
        return _of_config(read_config(config), config.parent)


def _of_config(config: TrainingConfig, base: Path) -> str:
    """The words of a run before it begins, if training would begin it."""
    # Imported here: Flax costs a second, which a request should not pay.
    from jaxdp_episodic.trainer.run.assemble import (
        Tables,
        adaptive_plan_of,
        checked_run,
    )
    from jaxdp_episodic.trainer.run.report import (
        adaptive_methods,
        bounded,
        opening,
        people_of,
        report_of_budget,
    )

    checks: dict[str, Any] = {}
    trainer: Any = None
    budget: Any
    if config.adaptive is not None:
        tables = Tables(config, base, keeps_features=False)
        _, truncation = config.training_data(base)
        budget, checks = adaptive_plan_of(config, tables)
    else:
        trainer, tables = checked_run(config, base)
        budget, truncation = trainer.budget, tables.truncation
    lines = opening(is_private=budget.is_private, is_seeded=config.seed is not None)
    if not budget.is_private:
        return "\n".join(lines)
    bounds = [] if truncation is None else [bounded(truncation, for_release=False)]
    if trainer is None:
        fixed = [name for name, check in checks.items() if check.fixed]
        said = adaptive_methods(budget, config.noise, fixed, config.clipping)
        return "\n".join([*lines[2:], adaptive_in_words(budget, [*said, *bounds])])
    people = people_of(trainer.data, str(budget.step.privacy_unit))
    report, run = report_of_budget(
        budget,
        budget.num_steps,
        people,
        has_default_normalizer=config.normalizer is None and budget.takes_steps,
    )
    words = "\n\n".join([report_in_words(report, run, people), *bounds])
    return "\n".join([*lines[2:], words])

"""``jaxdp-episodic plan``: which design to run within privacy and compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools.cli.command import Command, Folder, TomlFile, aligned
from jaxdp_episodic.tools.plan.pipelines import Pipeline, recommended_pipeline
from jaxdp_episodic.tools.plan.plan import (
    CONFIG,
    TABLE,
    advice,
    make_plan,
    training_config,
    write_table,
)
from jaxdp_episodic.tools.plan.plan import Plan as Candidates
from jaxdp_episodic.tools.plan.question import PlanDescription, read_plan
from jaxdp_episodic.tools.plots.plan import draw_plan
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.data.splits import SPLITS

PICTURE = "plan.png"


@dataclass
class Plan(Command):
    """The command ``plan``."""

    #: The plan: data or sizes, the target, the episodes, how much to compute.
    file: TomlFile
    #: Folder for the table, the picture and the config; made if missing.
    out: Folder

    def _lines(self) -> list[str]:
        return planned(read_plan(self.file), self.file.parent, self.out)


def planned(description: PlanDescription, base: Path, out: Path) -> list[str]:
    """Searches, writes into a folder, and returns what to say."""
    pipeline = recommended_pipeline(description)
    asked = target = description.request
    if pipeline is not None:
        asked = pipeline.left_for_steps(asked)
    plan = make_plan(asked, description.population)
    out.mkdir(parents=True, exist_ok=True)
    write_table(out / TABLE, plan)
    written = [str(out / TABLE)]
    config = training_config(plan, description)
    if config is not None:
        if pipeline is not None:
            config = pipeline.config(config)
        config = relocated(config, base)
        TrainingConfig.from_dict({"type": "TrainingConfig", **config}, where="config")
        write_atomically(out / CONFIG, _comment(plan, pipeline) + to_toml(config))
        written.append(str(out / CONFIG))
    draws = pipeline is None or pipeline.learner is None  # episodes, of a design
    lines = _table(plan, draws)
    if pipeline is not None:
        lines += ["", *pipeline.lines]
        if asked is not target:
            lines += [f"steps are planned with what is left, {asked.epsilon:.4g}"]
    try:
        title = f"epsilon {target.epsilon:g} at delta {target.delta:g}"
        draw_plan(plan, out / PICTURE, title=title, draws=draws)
        written.append(str(out / PICTURE))
    except ImportError as error:
        lines.append(f"no picture: {error}")
    lines += [f"{name}: {why}" for name, why in plan.gains.items()]
    lines += [f"left out: {name}: {why}" for name, why in plan.left_out.items()]
    lines += advice(plan, asked, description.population)
    if _rests_on_private_sizes(description, pipeline):
        lines.append(
            "note: the plan used sizes of the data, which are private under "
            "add_remove; so is everything written here. Give episode.population, a "
            "public lower bound, to avoid it where examples are protected"
        )
    if config is None:
        lines.append(
            "no config: the file has no data, or no table train, or does not say what "
            "an episode draws within its block of people"
        )
    return [*lines, f"written: {', '.join(written)}"]


def _rests_on_private_sizes(
    description: PlanDescription, pipeline: Pipeline | None
) -> bool:
    """True if somebody's presence changes the plan: a size, or the number of tasks."""
    request = description.request
    if request.neighboring_relation != "add_remove":
        return False
    if pipeline is not None and pipeline.weighed:
        return True  # by how many there are
    tasks = description.population.level_names[:1]
    counts_tasks = request.episode.ways is None and request.privacy_unit in tasks
    return request.episode.population is None or counts_tasks


def relocated(config: dict[str, Any], base: Path) -> dict[str, Any]:
    """Returns the config with absolute paths, which hold from anywhere."""
    moved = {}
    for part, keys in (("data", ("path", *SPLITS)), ("features", ("path", "cache"))):
        table = config.get(part, {})
        paths = {k: table[k] for k in keys if isinstance(table.get(k), str)}
        if paths:
            absolute = {k: str((base / path).resolve()) for k, path in paths.items()}
            moved[part] = {**table, **absolute}
    return config | moved


def _comment(plan: Candidates, pipeline: Pipeline | None) -> str:
    head = "# Written by `jaxdp-episodic plan`.\n"
    if pipeline is not None:
        head += f"# {pipeline.name}: {pipeline.reason}.\n"
        if pipeline.learner is not None:  # no episode is drawn
            return head + "\n"
    best = plan.recommended
    return (
        f"{head}"
        f"# {plan.designs[int(plan.design[best])].name}: "
        f"{plan.episodes_per_step[best]:,.6g} episodes a step, signal to noise "
        f"{plan.signal_to_noise[best]:.4g} at a noise multiplier of about "
        f"{plan.noise_multiplier[best]:.4g}, which `train` calibrates.\n\n"
    )


def _table(plan: Candidates, draws: bool) -> list[str]:
    """The best of each design side by side; marked is the one that is recommended."""
    names = "design,episodes,complete,steps,noise,signal/noise,effective steps"
    rows = [("", *names.split(","))]
    for index, design in enumerate(plan.designs):
        if not np.any(plan.design == index):
            continue
        best = plan.best_of(index)
        is_best = int(plan.design[plan.recommended]) == index
        rows.append(
            (
                "*" if is_best and draws else "",
                design.name,
                f"{plan.episodes_per_step[best]:,.4g}",
                f"{plan.complete_per_step[best]:,.3g}",
                f"{int(plan.num_steps[best]):,}",
                f"{plan.noise_multiplier[best]:.4g}",
                f"{plan.signal_to_noise[best]:.4g}",
                f"{plan.effective_steps[best]:.3g}",
            )
        )
    best = "* recommended" if draws else "no design is recommended, as below"
    counts = (
        f"{best}; {plan.design.size:,} candidates, {int(plan.is_on_front.sum()):,} on "
        "the front of signal to noise, steps and episodes"
    )
    return [*aligned(rows, left=2), "", counts]

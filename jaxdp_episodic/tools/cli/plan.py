"""``jaxdp-episodic plan``: which design to run within privacy and compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools.cli.messages import TomlFile, aligned, option, reported
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


@dataclass(frozen=True)
class Plan:
    """Search designs within a privacy and a compute budget; write one to train."""

    file: TomlFile
    """The plan: data or sizes, the target, the episodes, how much to compute."""
    out: Annotated[Path, option("DIR")]
    """Folder for the table, the picture and the config; made if missing."""

    def run(self) -> int:
        """Plans; returns the exit code."""

        def said() -> list[str]:
            return self.planned(read_plan(self.file))

        return reported(self.file, said, says_warnings=True)

    def planned(self, description: PlanDescription) -> list[str]:
        """Searches, writes, and returns what to say."""
        pipeline = recommended_pipeline(description)
        asked = description.request
        if pipeline is not None:
            asked = pipeline.left_for_steps(asked)
        plan = make_plan(asked, description.population)
        self.out.mkdir(parents=True, exist_ok=True)
        write_table(self.out / TABLE, plan)
        written = [str(self.out / TABLE), *self._config(plan, description, pipeline)]
        target = description.request
        lines = _table(plan)
        if pipeline is not None:
            lines += ["", f"pipeline: {pipeline.name}: {pipeline.reason}"]
            lines += pipeline.comparison()
            if asked is not target:
                lines += [f"steps are planned with what is left, {asked.epsilon:.4g}"]
        try:
            title = f"epsilon {target.epsilon:g} at delta {target.delta:g}"
            draw_plan(plan, self.out / PICTURE, title=title)
        except ImportError as error:
            lines.append(f"no picture: {error}")
        else:
            written.append(str(self.out / PICTURE))
        lines += [f"{name}: {why}" for name, why in plan.gains.items()]
        lines += [f"left out: {name}: {why}" for name, why in plan.left_out.items()]
        lines += advice(plan, asked, description.population)
        if _rests_on_private_sizes(description, pipeline):
            lines.append(
                "note: planned with sizes of the data that are private under "
                "add_remove; so is everything written here (episode.population, a "
                "public lower bound, avoids it for protected examples)"
            )
        if str(self.out / CONFIG) not in written:
            lines.append(
                "no config: the file has no data, or no table train, or does not say "
                "what an episode draws within its block of people"
            )
        return [*lines, f"written: {', '.join(written)}"]

    def _config(
        self, plan: Candidates, description: PlanDescription, pipeline: Pipeline | None
    ) -> list[str]:
        """Writes the recommended config, which the trainer's reader has accepted."""
        config = training_config(plan, description)
        if config is None:
            return []
        if pipeline is not None:
            config = pipeline.config(config)
        config = _relocated(config, self.file.parent)
        TrainingConfig.from_dict({"type": "TrainingConfig", **config}, where="config")
        text = _comment(plan, pipeline) + to_toml(config)
        write_atomically(self.out / CONFIG, text)
        return [str(self.out / CONFIG)]


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


def _relocated(config: dict[str, Any], base: Path) -> dict[str, Any]:
    """The config with absolute paths: they hold from anywhere."""
    paths = {"data": ("path", *SPLITS), "features": ("path", "cache")}
    moved = {
        part: {
            key: str((base / value).resolve())
            if key in paths[part] and isinstance(value, str)
            else value
            for key, value in config[part].items()
        }
        for part in paths
        if part in config
    }
    return config | moved


def _comment(plan: Candidates, pipeline: Pipeline | None) -> str:
    best = plan.recommended
    head = "# Written by `jaxdp-episodic plan`.\n"
    if pipeline is not None:
        head += f"# {pipeline.name}: {pipeline.reason}.\n"
        if pipeline.learner is not None:  # no episode is drawn
            return head + "\n"
    return (
        f"{head}"
        f"# {plan.designs[int(plan.design[best])].name}: "
        f"{plan.episodes_per_step[best]:,.6g} episodes a step, signal to noise "
        f"{plan.signal_to_noise[best]:.4g} at a noise multiplier of about "
        f"{plan.noise_multiplier[best]:.4g}, which `train` calibrates.\n\n"
    )


def _table(plan: Candidates) -> list[str]:
    """The best of each design side by side, the recommended one marked."""
    rows = [
        ("", "design", "episodes", "complete", "steps", "noise", "signal/noise")
        + ("effective steps",)
    ]
    for index, design in enumerate(plan.designs):
        if not (plan.design == index).any():
            continue
        best = plan.best_of(index)
        is_best = int(plan.design[plan.recommended]) == index
        rows.append(
            (
                "*" if is_best else "",
                design.name,
                f"{plan.episodes_per_step[best]:,.4g}",
                f"{plan.complete_per_step[best]:,.3g}",
                f"{int(plan.num_steps[best]):,}",
                f"{plan.noise_multiplier[best]:.4g}",
                f"{plan.signal_to_noise[best]:.4g}",
                f"{plan.effective_steps[best]:.3g}",
            )
        )
    front = int(plan.is_on_front.sum())
    return [
        *aligned(rows, left=2),
        "",
        f"* recommended; {plan.design.size:,} candidates, {front:,} on the front of "
        "signal to noise, steps and episodes",
    ]

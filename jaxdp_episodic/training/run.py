"""One command's worth: from a config to a checkpoint, a log, a report and a release."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from jaxdp_episodic.accounting.answers import epsilon
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.sampling.designs import GroupedClasses, IndependentEpisodes
from jaxdp_episodic.sampling.schemes import MultistageSampling, WithoutReplacement
from jaxdp_episodic.training.budget import PrivacyBudget, plan_budget
from jaxdp_episodic.training.config import TrainingConfig, built_model, num_parameters
from jaxdp_episodic.training.evaluation import Evaluation, Score
from jaxdp_episodic.training.export import export_run
from jaxdp_episodic.training.report import (
    draw_report,
    markdown_report,
    privacy_statement,
)
from jaxdp_episodic.training.run_log import HELD_OUT, read_log
from jaxdp_episodic.training.trainer import StepProgress, Trainer

LOG, REPORT, PICTURE, RELEASE = "log.jsonl", "report.md", "report.png", "release"
_SECONDS_BETWEEN_LINES = 10.0
_EVERYTHING = 2**40  # more examples than any unit has


class Result(NamedTuple):
    """What a run came to.

    Attributes:
      trainer: with the final parameters in ``trainer.params``.
      epsilon: spent, nats; *upper bound*.
      epsilon_without_last_stage: what the same noise and steps would cost if the draw
        of the examples were not counted.
      scores: last score on every held-out part.
      folder: where everything is.
    """

    trainer: Trainer
    epsilon: float
    epsilon_without_last_stage: float
    scores: Mapping[str, Score]
    folder: Path

    def __str__(self) -> str:
        budget = self.trainer.budget
        lines = [
            f"{name:<12}{score.name} {score.mean:.4f}   (95 % interval {score.low:.4f} "
            f"to {score.high:.4f}, {score.num_episodes:,} held-out episodes)"
            for name, score in self.scores.items()
        ]
        spent = f"{self.epsilon:.5g}" if budget.is_private else "inf (not private)"
        lines.append(
            f"{'epsilon':<12}{spent}   (target {budget.epsilon:g}, delta "
            f"{budget.delta:g}, one {budget.step.privacy_unit})"
        )
        if self.epsilon_without_last_stage > 1.001 * self.epsilon:
            lines.append(
                f"{'':<12}{self.epsilon_without_last_stage:.5g} for the same noise if "
                "the draw of the examples were not counted"
            )
        lines += [
            f"{'report':<12}{self.folder / REPORT}",
            f"{'to release':<12}{self.folder / RELEASE}",
        ]
        return "\n".join(lines)


def run_training(
    config: TrainingConfig,
    folder: Path,
    *,
    resume: bool = False,
    title: str = "Training run",
    base: Path | None = None,
    console: Console | None = None,
) -> Result:
    """Trains as the config says; everything that it leaves is in ``folder``.

    ``checkpoints/``, ``log.jsonl``, ``report.md`` and ``report.png`` are private;
    ``release/`` is what may be published.

    Args:
      config: the run.
      folder: made if missing. It must not hold another run.
      resume: go on with the checkpoint in ``folder``.
      title: of the report.
      base: folder that paths in the config are relative to.
      console: where progress is shown; None: standard error.

    Raises:
      OSError: a file that cannot be read or written.
      ValueError: bad data, a target that permits no step, a folder that holds a run
        (without ``resume``) or another one (with it).
      TypeError: something of the wrong type.
    """
    console = console or Console(stderr=True)
    _check_folder(folder, resume)
    data = config.data.load("train", base)
    evaluations = _evaluations(config, base)
    budget = plan(config, data)
    learner, params = built_model(config, data.features.shape[1:], _ways(config))
    trainer = Trainer(
        learner,
        params,
        data=data,
        budget=budget,
        shots=config.learner.shots,
        optimizer=config.optimizer.build(budget.num_steps),
        l2_clip_norm=config.l2_clip_norm,
        normalizer=config.normalizer,
        block_size=config.block_size,
        seed=config.seed,
        settings={
            "model": config.model.to_dict(),
            "optimizer": config.optimizer.to_dict(),
        },
    )
    if resume:
        console.print(f"resumed after step {trainer.resume(folder):,}")
    _announce(console, trainer, num_parameters(params))
    with _Display(console, budget) as display:
        display.start_at(trainer.num_steps_taken)
        trainer.train(
            folder,
            evaluations=evaluations,
            evaluate_every=config.evaluation.every if config.evaluation else None,
            checkpoint_every=config.checkpoint_every,
            on_step=display.show,
        )
    return _finish(trainer, folder, title, console)


def plan(config: TrainingConfig, data: ExampleTable) -> PrivacyBudget:
    """Returns the budget of a config: its step with the data's sizes, calibrated."""
    return plan_budget(
        config.step.step(data.population),
        epsilon=config.epsilon,
        delta=config.delta,
        num_steps=config.num_steps,
    )


def _finish(trainer: Trainer, folder: Path, title: str, console: Console) -> Result:
    """Report, picture and release of a run that took all its steps."""
    budget, taken = trainer.budget, trainer.num_steps_taken
    spent = float(budget.spent(taken))
    records = read_log(folder / LOG)
    statement = privacy_statement(budget, taken, is_seeded=trainer.is_seeded)
    uncounted = epsilon_without_last_stage(budget, taken)
    facts = {
        "steps": taken,
        "epsilon spent": _number(spent),
        "epsilon without counting the draw of examples": _number(uncounted),
        "target": f"epsilon {budget.epsilon:g}, delta {budget.delta:g}",
        "noise multiplier": budget.step.noise_multiplier,
        "clip norm": trainer.l2_clip_norm,
        "protected": f"one {budget.step.privacy_unit} "
        f"({budget.step.neighboring_relation})",
        "clipped": f"each {budget.step.clip_unit}",
        "mean units a step": trainer.sampler.expected_units,
    }
    picture = None
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: matplotlib, of the extra [plot], is not installed")
    else:
        picture = PICTURE
        draw_report(records, folder / PICTURE, target_epsilon=budget.epsilon)
    page = markdown_report(
        records, title=title, facts=facts, statement=statement, picture=picture
    )
    (folder / REPORT).write_text(page, encoding="utf-8")
    export_run(
        folder / RELEASE,
        params=trainer.params,
        statement=statement,
        log=folder / LOG,
        facts=facts,
    )
    scores = next((r[HELD_OUT] for r in reversed(records) if HELD_OUT in r), {})
    return Result(
        trainer,
        spent,
        uncounted,
        {name: Score(**s) for name, s in scores.items()},
        folder,
    )


def epsilon_without_last_stage(budget: PrivacyBudget, num_steps: int) -> float:
    """Returns epsilon of the same noise if all examples of a drawn unit took part.

    What the last stage of the draw is worth: the same steps, the last level drawn
    whole. *Upper bound*, as `PrivacyBudget.spent`.
    """
    step = budget.step
    everything = {"size": _EVERYTHING, "population_is_exact": False}
    if isinstance(step.design, GroupedClasses):
        examples = dataclasses.replace(step.design.examples, **everything)
        whole: Any = dataclasses.replace(step.design, examples=examples)
    else:
        inner: Any = getattr(step.design, "sampling", step.design)
        *above, last = inner.levels
        if isinstance(last, WithoutReplacement):
            last = dataclasses.replace(last, **everything)
        else:
            last = dataclasses.replace(last, sampling_probability=1.0)
        whole = MultistageSampling(*above, last)
        if isinstance(step.design, IndependentEpisodes):
            whole = dataclasses.replace(step.design, sampling=whole)
    step = dataclasses.replace(step, sampling=whole, small_units="keep")
    return float(epsilon(step, num_steps=num_steps, delta=budget.delta))


def _number(value: float) -> float | str:
    """The value, infinity as JSON can hold it."""
    return value if math.isfinite(value) else "inf"


def _check_folder(folder: Path, resume: bool) -> None:
    """Refuses to write over a run."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    if not resume and (folder / LOG).exists():
        raise FileExistsError(
            f"{folder} holds a run; resume it, or name another folder"
        )


def _ways(config: TrainingConfig) -> int | None:
    """Classes an episode; None for regression."""
    if config.learner.is_regression:
        return None
    design = config.step.sampling
    if isinstance(design, GroupedClasses):
        return int(np.asarray(design.ways))
    # The last level but one: its draw is the classes of an episode.
    levels = getattr(getattr(design, "sampling", design), "levels", ())
    size = getattr(levels[-2], "size", None) if len(levels) > 1 else None
    if size is None:
        raise ValueError(
            "classification needs a sampling whose last level but one draws a fixed "
            "number of classes (ways): GroupedClasses, or WithoutReplacement there"
        )
    return int(size)


def _evaluations(config: TrainingConfig, base: Path | None) -> dict[str, Evaluation]:
    wanted = config.evaluation
    if wanted is None:
        return {}
    return {
        split: Evaluation(
            config.data.load(split, base),
            ways=_ways(config),
            shots=config.learner.shots,
            queries=wanted.queries,
            num_episodes=wanted.num_episodes,
        )
        for split in wanted.splits
    }


def _announce(console: Console, trainer: Trainer, size: int) -> None:
    budget, step = trainer.budget, trainer.budget.step
    console.print(
        f"{size:,} parameters; {budget.num_steps:,} steps with "
        f"{trainer.sampler.expected_units:.1f} clip units ({step.clip_unit}) on "
        f"average; noise multiplier {step.noise_multiplier:.5g}",
        highlight=False,
    )
    if budget.is_private:
        console.print(
            f"protected: one {step.privacy_unit} ({step.neighboring_relation}), "
            f"epsilon <= {budget.epsilon:g} at delta {budget.delta:g}; step "
            f"{budget.permitted_steps:,} is the last that this permits",
            highlight=False,
        )
    else:
        console.print(
            "[bold]not private[/bold]: epsilon is infinite, there is no noise"
        )
    if trainer.is_seeded:
        console.print(
            "[bold]not private[/bold]: draws and noise come from a fixed seed"
        )


class _Rate(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        """Returns the column's text."""
        return Text(f"{task.speed or 0:.1f} steps/s")


class _Display:
    """A bar on a terminal; elsewhere a line every few seconds."""

    def __init__(self, console: Console, budget: PrivacyBudget) -> None:
        self._console, self._target = console, f"{budget.epsilon:g}"
        self._total = budget.num_steps
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"epsilon {{task.fields[epsilon]:.3f}} of {self._target}"),
            _Rate(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=self._total, epsilon=0.0)
        self._begun = self._last = 0.0
        self._first: int | None = None

    def start_at(self, step: int) -> None:
        """Says where a resumed run stands."""
        self._bar.update(self._task, completed=step)

    def show(self, progress: StepProgress) -> None:
        """Is called after every step."""
        self._bar.update(self._task, completed=progress.step, epsilon=progress.epsilon)
        now = time.monotonic()
        if self._first is None:  # the first step compiles: the clock starts after it
            self._begun = self._last = now
            self._first = progress.step
        if self._console.is_terminal or now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        taken = progress.step - self._first
        left = (now - self._begun) / taken * (self._total - progress.step)
        self._console.print(
            f"step {progress.step:,} of {self._total:,}, epsilon "
            f"{progress.epsilon:.3f} of {self._target}, "
            f"{taken / (now - self._begun):.1f} steps/s, {left:,.0f} s left",
            highlight=False,
        )

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()

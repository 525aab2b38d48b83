"""The loop over a run's steps: trial, scores, and the choice of what is released.

`Trainer.step` takes one step, in this order:

    RunDraws.write_secrets    what a resumed run needs, in the run's file
    RunStore.charge           by `Ledger.charge`: a commit
    mechanism.release         the draw (or what was made ahead), the sum, the noise
    RunStore.release          a commit; no other code has seen the release before
    mechanism.apply           the state that follows
    RunDraws.erase_secrets    after an epoch, or the run

In between come evaluations and saved states (`RunStore.save`), which use released
parameters only, and log records, whose private parts nothing in the run depends on.
Whatever ends a process leaves the file after one of the commits; `Trainer.resume` then
applies releases that the saved state lacks, and gives up a step that was charged and
not released.

Which stage is released at the end may depend on held-out data that are not for testing.
The run's guarantee does not cover these. Of the training data the choice sees releases
only.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp_episodic.trainer.config.training_parts import BOTH, HIDDEN, LOGITS
from jaxdp_episodic.trainer.learners.learners import Classifier, untrained
from jaxdp_episodic.trainer.run.checks import found_in_both, protects_people
from jaxdp_episodic.trainer.run.evaluation import (
    Calibration,
    EpisodeScores,
    Evaluation,
    Reliability,
    Score,
    calibrated,
    digits,
    reliability,
)
from jaxdp_episodic.trainer.run.mechanisms import array_types, released_params
from jaxdp_episodic.trainer.run.release import described_release, flat_params
from jaxdp_episodic.trainer.run.run_files import (
    HELD_OUT,
    PRIVATE,
    STAGES,
    StepProgress,
    public_record,
)
from jaxdp_episodic.trainer.run.store import BEST, RunStore

_VALIDATION = "validation"
_TEST = "test"


def take_all_steps(
    run: Any,
    store: RunStore,
    scoring: Scoring,
    every: tuple[int | None, int, int],
    on_step: Callable[[StepProgress], None] | None,
) -> list[dict[str, Any]]:
    """Takes the remaining steps of a `Trainer`; returns the records of its log."""
    last, before = run.budget.num_steps, len(run.budget.before)
    evaluate_every, checkpoint_every, log_every = every
    noted: list[dict[str, Any]] = []

    def is_due(often: int | None, step: int) -> bool:
        return step in (last, before) or (often is not None and step % often == 0)

    def note(record: dict[str, Any]) -> None:
        noted.append(record)
        store.note(record)

    def evaluate(step: int) -> dict[str, Any]:
        is_evaluated = step == 0 or is_due(evaluate_every, step)
        return scoring.now(is_last=step == last) if is_evaluated else {}

    run.selection = None
    step, noted_last = run.num_steps_taken, (store.log() or [{}])[-1]
    if noted_last.get("step", -1) < step:
        held_out = evaluate(step)
        if held_out or is_due(log_every, step):
            note({**run.public_record(step), **held_out})
    try:
        with run.ahead() as ahead:
            for prepared in ahead:
                begun = time.perf_counter()
                private = run.step(prepared)
                step = run.num_steps_taken
                held_out = evaluate(step)
                if is_due(log_every, step) or held_out:
                    private |= {"seconds": time.perf_counter() - begun}
                    note({**run.public_record(step), PRIVATE: private, **held_out})
                    if on_step is not None:
                        public = public_record(noted[-1])
                        shown = public if run.has_public_accounting else {}
                        on_step(StepProgress(step, last, shown, noted[-1]))
                if is_due(checkpoint_every, step) or store.is_full:
                    run.save(store)
        step = run.num_steps_taken
        if run.selection is None or run.selection.step != step:
            # The run had ended before, or only now turns out to have.
            chosen = scoring.choose()
            if STAGES not in (noted[-1] if noted else noted_last) and chosen.scores:
                epsilon = {"epsilon": run.public_record(step)["epsilon"]}
                note({"step": step, **epsilon, **scoring.now(is_last=True)})
        run.save(store)
    except (KeyboardInterrupt, ConnectionError) as end:
        try:
            run.save(store)
        except Exception as error:  # the file has an earlier state and the releases
            end.add_note(f"no checkpoint of step {run.num_steps_taken}: {error}")
        raise
    return noted


def try_out(run: Any, evaluations: Mapping[str, Evaluation]) -> None:
    """Tries the steps to come of a `Trainer`, once, and evaluations at every call.

    All processes call it. It uses no data, key or noise of the run.
    """
    if (run.is_tried and not evaluations) or run.has_ended:
        return
    with _explained("describing the release"):
        flat_params(run.params)
        json.dumps(described_release(run))
    for split, evaluation in evaluations.items():
        # With parameters as they are now.
        for name, learner, params in stages_of(run, run.budget.takes_steps):
            with _explained(f"tracing the score of {name!r} on {split!r}"):
                evaluation.trace(learner, params)
    if run.is_tried:
        return
    run.processes.meet()  # else others would wait for a process that failed
    state = run.state
    with np.errstate(all="ignore"):
        for name, mechanism in run.mechanisms.items():
            with _explained(f"running the step {name!r} on zeros"):
                state = mechanism.try_out(state)
    run.processes.meet()
    run.is_tried = True


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Adds to an error what was tried, and that nothing was charged."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"This was found {doing}, before anything was charged: repair the model, "
            "learner or optimizer, and start again."
        )
        raise


# --- Which stage is released ---


class Selection(NamedTuple):
    """What is released, and why.

    Attributes:
      stage: the released stage.
      step: number of completed steps at the choice.
      split: the held-out split that chose it; None: no choice, it is the last stage.
      reason: why no choice was made; "" if one was.
      scores: of each stage, in order, on each split.
      behind: by how much each compared stage is behind the best, and the standard
        error; see `EpisodeScores.ahead_of`. Empty without a choice.
      num_classes: classes (tasks) of the split on which stages were compared.
      calibration: temperatures fitted on that split; None without a choice, or if the
        learner has no probabilities.
      reliability: of these probabilities, on each split.
    """

    stage: Stage
    step: int
    split: str | None
    reason: str
    scores: Mapping[str, Mapping[str, Score]]
    behind: Mapping[str, tuple[float, float]]
    num_classes: int = 0
    calibration: Calibration | None = None
    reliability: Mapping[str, Reliability] = MappingProxyType({})

    @property
    def words(self) -> str:
        """What the privacy statement says of the choice."""
        name = repr(self.stage.name)
        if self.split is None:
            return (
                f"The run released its last stage, {name}. It made no choice among its "
                f"stages: {self.reason}."
            )
        also = " The temperatures of probabilities fit these data, too."
        return (
            f"The run released the stage {name}: of {', '.join(map(repr, self.behind))}"
            f" it is the best on the held-out data {self.split!r}."
            f"{also if self.calibration else ''} **Whoever is in those data is not "
            "protected**: the guarantee is about the training data, and covers nothing "
            "that the choice discloses of the held-out data."
        )

    def without_step(self) -> Selection:
        """Returns it without step numbers, which disclose how many steps there were."""
        name, behind = self.stage.name.partition("@")[0], self.behind
        names = dict.fromkeys(key.partition("@")[0] for key in behind)
        stage = self.stage._replace(name=name)
        return self._replace(stage=stage, behind=dict.fromkeys(names, (0.0, 0.0)))

    def table(self) -> list[str]:
        """Returns the scores of the stages as lines of Markdown."""
        splits = list(next(iter(self.scores.values()), {}))
        if not splits:
            return []
        what = next(iter(self.scores[self.stage.name].values())).name
        lines = ["", f"Every stage's {what}:", ""]
        lines += [f"| {' | '.join(['stage', *splits, 'behind the best'])} |"]
        lines += [f"|{'---|' * (len(splits) + 2)}"]
        for name, scores in self.scores.items():
            apart = " ± ".join(map(digits, self.behind.get(name, ())))
            shown = f"**{name}**" if name == self.stage.name else name
            cells = [shown, *(digits(one.mean) for one in scores.values()), apart]
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    def reliability_table(self) -> list[str]:
        """Returns the reliability of the probabilities as lines of Markdown."""
        if self.calibration is None:
            return []
        errors = (f"{r.error:.3f} on {n}" for n, r in self.reliability.items())
        return [
            "",
            f"Probabilities are calibrated for {self.calibration}. Expected "
            f"calibration error: {', '.join(errors)} (0: a share p of the predictions "
            "with probability p is right).",
        ]

    def record(self) -> dict[str, Any]:
        """Returns its part of a log record: the name is public, the scores are not."""
        scores = {
            name: {split: score._asdict() for split, score in of_stage.items()}
            for name, of_stage in self.scores.items()
        }
        behind = {name: list(pair) for name, pair in self.behind.items()}
        stages = {"split": self.split, "scores": scores, "behind": behind}
        return {"released": self.stage.name, STAGES: stages}


class Scoring:
    """Scores a run while it trains, and chooses a stage at its end."""

    def __init__(
        self,
        run: Any,
        store: RunStore,
        evaluations: Mapping[str, Evaluation],
        split: str | None,
        reason: str,
    ) -> None:
        self._run, self._evaluations = run, evaluations
        self.split, self.reason = split, reason  # see `choosing_split`
        self._known: dict[str, dict[str, EpisodeScores]] = {}
        # Step and parameters of the best score so far.
        self._best: tuple[int, Any] | None = None
        self._store = store
        kept = None if self.split is None else store.kept(BEST)
        if kept is None or kept[0] > run.num_steps_taken:
            return
        like = jax.tree.leaves(run.params)
        if array_types(kept[1]) == array_types(like):  # else the run has warned of it
            structure = jax.tree.structure(run.params)
            self._best = kept[0], jax.tree.unflatten(structure, kept[1])

    def now(self, *, is_last: bool) -> dict[str, Any]:
        """Scores the newest stage; returns that part of a log record."""
        if not self._evaluations:
            return {}
        stages = self._run.stages()
        stage = stages[-1 if self._run.num_steps_taken else 0]
        scores = self._of(stage)
        if stage.name == STEPS and not is_last and self.split is not None:
            best, step = -np.inf, self._run.num_steps_taken
            if self._best is not None:
                before, params = self._best
                earlier = Stage(f"{STEPS}@{before}", stage.learner, params)
                best = self._of(earlier)[self.split].value
            if self._best is None or scores[self.split].value > best:
                self._best = step, stage.params
                leaves = jax.device_get(jax.tree.leaves(stage.params))
                self._store.keep(BEST, step, leaves)
        record_part = {
            "stage": stage.name,
            HELD_OUT: {name: one.score()._asdict() for name, one in scores.items()},
        }
        return record_part | (self.choose().record() if is_last else {})

    def choose(self) -> Selection:
        """Chooses among the stages that exist."""
        taken, stages = self._run.num_steps_taken, self._run.stages()
        chosen, early, behind, number = stages[-1], (), {}, 0
        if self._best is not None and self._best[0] < taken:
            early = self._run.stages_after(*self._best)
        scores = {stage.name: self._of(stage) for stage in (*stages, *early)}
        if self.split is not None:
            by_split = {name: one[self.split] for name, one in scores.items()}
            names = list(by_split)  # the simplest first
            if not by_split[names[0]].has_other_classes:
                # The same few classes in all episodes say little about others: only
                # what is released without a choice is compared with the features.
                names = list(dict.fromkeys((names[0], chosen.name)))
            released, behind = best_of({name: by_split[name] for name in names})
            number = by_split[released].num_classes
            by_name = {stage.name: stage for stage in (*stages, *early)}
            chosen = by_name[released]
        calibration, curves, (_, learner, params) = None, {}, chosen
        if self.split is not None:  # no other data may fit the temperatures
            calibration = calibrated(self._evaluations[self.split], learner, params)
        if calibration is not None:
            fitted = calibration.temperature
            curves = {
                name: reliability(one, learner, params, fitted(one.shots))
                for name, one in self._evaluations.items()
            }
        shown = {
            name: {split: one.score() for split, one in of_stage.items()}
            for name, of_stage in scores.items()
            if of_stage
        }
        self._run.selection = Selection(
            *(chosen, taken, self.split, self.reason, shown, behind, number),
            calibration,
            curves,
        )
        return self._run.selection

    def _of(self, stage: Stage) -> dict[str, EpisodeScores]:
        """A stage's scores, computed once (those of steps once after each step)."""
        name = stage.name
        if name.startswith(STEPS) and "@" not in name:
            name = f"{name}@{self._run.num_steps_taken}"
        if name not in self._known:
            self._known[name] = {
                split: evaluation.episodes(stage.learner, stage.params)
                for split, evaluation in self._evaluations.items()
            }
        return self._known[name]


def choosing_split(
    run: Any, evaluations: Mapping[str, Evaluation], select: bool | None
) -> tuple[str | None, str]:
    """Returns the split that chooses a stage; or None, and the reason."""
    others = [name for name in evaluations if name != _TEST]
    split = _VALIDATION if _VALIDATION in others else next(iter(others), None)
    step = run.budget.step
    if not evaluations:
        return None, "nothing was scored on held-out data"
    if select is False:
        return None, "the choice was turned off"
    if split is None:
        return None, f"{_TEST!r} alone was scored, and nothing is chosen by that"
    if run.has_private_scores:  # the guarantee covers them too
        return None, "held-out data are protected here, and scored with noise"
    if select is None and protects_people(step):
        return None, (
            "people are protected, and may be in the held-out data too, unless the "
            "run's settings say that none is"
        )
    found, _ = found_in_both(evaluations[split].data, run.data, step)
    if found:
        raise ValueError(
            f"{split!r} must have nobody in common with the training data to choose a "
            f"stage by it, got {found}: no guarantee would cover what the choice "
            "discloses of them; set select = false of the evaluation, or separate the "
            "data"
        )
    return split, ""


def best_of(
    scores: Mapping[str, EpisodeScores],
) -> tuple[str, dict[str, tuple[float, float]]]:
    """Returns the best's name (the first of equal ones), and its `ahead_of` each."""
    best = max(scores, key=lambda name: scores[name].value)
    return best, {  # infinitely ahead of a score that is not finite
        name: scores[best].ahead_of(one) if np.isfinite(one.value) else (np.inf, 0.0)
        for name, one in scores.items()
    }


FEATURES = "features"
INITIAL = "initial"
STEPS = "steps"


class Stage(NamedTuple):
    """Something that a run can release: ``evaluation(learner, params)`` scores it.

    Attributes:
      name: "features" (no private data: nearest class mean, or `Ridge` on each task's
        support), "initial" (the network before any step), "mean" (the mean subtracted;
        for a mixed model the line of all tasks), "within" (whitened within classes),
        "statistics", "steps" (parameters after gradient steps, or their average),
        "steps@N" (after step N); for a `Classifier` also "steps/logits" and the like,
        for other embeddings.
      learner: makes the predictions.
      params: its released parameters.
    """

    name: str
    learner: Any
    params: Any


def stages_of(run: Any, has_stepped: bool) -> tuple[Stage, ...]:
    """Returns the stages of a `Trainer`'s state, the simplest first."""
    parts, state = run.parts, run.state
    ways = getattr(parts.learner, "ways", [1, 1, *run.sampler.slot_shape][-2])
    simple = untrained(parts.learner, ways)
    found = [Stage(FEATURES, simple, {})]
    if parts.start is not None:
        on_features = parts.start.learner(simple)
        for name, released in parts.start.stages(state.start).items():
            found.append(Stage(name, on_features, {"start": released, "model": {}}))
    elif jax.tree.leaves(parts.params):
        found.append(Stage(INITIAL, parts.learner, parts.params))
    if has_stepped:
        found += stages_with(run, released_params(state))
    return tuple(found)


def stages_with(run: Any, params: Any, at: str = "") -> list[Stage]:
    """Returns those of parameters after gradient steps; the run's own is the last."""
    parts, learners = run.parts, dict[str, Any]()
    learner, start = parts.learner, parts.start
    if isinstance(learner, Classifier) and learner.features is not None:
        # A model with one layer has the examples' own features as its inputs.
        has_more = isinstance(parts.params, Mapping) and len(parts.params) > 1
        for embed in (LOGITS, HIDDEN, BOTH) if has_more else (LOGITS, BOTH):
            if embed != learner.embed:
                other = dataclasses.replace(learner, embed=embed)
                learners[f"{STEPS}/{embed}"] = other
    learners[STEPS] = learner
    return [
        Stage(f"{name}{at}", one if start is None else start.learner(one), params)
        for name, one in learners.items()
    ]

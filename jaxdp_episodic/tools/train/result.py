"""What comes of a run: its page, its picture, what may be released, its numbers."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console

from jaxdp_episodic.accountant.report.adaptive_words import (
    GUARANTEE,
    budget_in_words,
)
from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.optional import installing
from jaxdp_episodic.tools.book.book import Paid
from jaxdp_episodic.tools.plots.run import draw_reliability, draw_run
from jaxdp_episodic.tools.train.booked import facts_of_book, statement_of_book
from jaxdp_episodic.trainer.run.adaptive import AdaptiveTrainer
from jaxdp_episodic.trainer.run.contributions import found_in
from jaxdp_episodic.trainer.run.evaluation import Score
from jaxdp_episodic.trainer.run.release import write_release
from jaxdp_episodic.trainer.run.report import (
    SEEDED,
    markdown_report,
    meaning_of,
    said_of,
)
from jaxdp_episodic.trainer.run.run_files import HELD_OUT, PRIVATE, read_log
from jaxdp_episodic.trainer.run.selection import Selection
from jaxdp_episodic.trainer.run.trainer import Trainer

REPORT = "report.md"
PICTURE = "report.png"
RELIABILITY = "reliability.png"
RELEASE = "release"


class Result(NamedTuple):
    """What a run came to."""

    trainer: Trainer  # what is released is ``trainer.released``
    epsilon: float  # spent, nats; *upper bound*
    # What the same noise and steps would cost if the draw of the examples were not
    # counted.
    epsilon_without_last_stage: float
    # Of what is released, on every held-out part; in the first process alone.
    scores: Mapping[str, Score]
    folder: Path  # where everything is
    # As ``scores``, of the same run without noise, if it was asked for.
    without_noise: Mapping[str, Score] = MappingProxyType({})
    selection: Selection | None = None  # of the stage; in the first process alone

    def __str__(self) -> str:
        budget, lines = self.trainer.budget, []
        for name, score in self.scores.items():
            lines.append(f"{name:<12}{score}")
            if name in self.without_noise:
                bare = self.without_noise[name].mean
                lines.append(f"{'':<12}{bare:.4f} without noise, not private")
        if self.selection is not None:
            lines += _stages_in_lines(self.selection)
        spent = upward(self.epsilon, 5) if budget.is_private else "inf (not private)"
        if self.trainer.is_seeded and budget.is_private:
            spent += f" were it not seeded; not private: {SEEDED}"
        trainer, what = self.trainer, f"target {budget.epsilon:g}"
        if isinstance(trainer, AdaptiveTrainer):
            what = "guarantee"
        unit = budget.step.privacy_unit
        lines.append(
            f"{'epsilon':<12}{spent}   ({what}, delta {budget.delta:g}, one {unit})"
        )
        if isinstance(trainer, AdaptiveTrainer) and budget.is_private:
            words = budget_in_words(trainer.ledger.budget_charged)
            lines += [f"{name:<12}{text}" for name, text in words if name != GUARANTEE]
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


def _stages_in_lines(selection: Selection) -> list[str]:
    """What each stage scores, and which is released, for a terminal."""
    splits = next(iter(selection.scores.values()), {})
    lines, released = [], selection.stage.name
    if splits:
        head = "".join(f"{split:>12}" for split in splits)
        lines.append(f"{'stages':<12}{'':<12}{head}")
    for name, scores in selection.scores.items():
        means = "".join(f"{score.mean:>12.4f}" for score in scores.values())
        mark = "   is released" if name == released else ""
        lines.append(f"{'':<12}{name:<12}{means}{mark}")
    if selection.split is None:
        why = f"the last stage, {released}; no choice was made: {selection.reason}"
    else:
        compared, number = list(selection.behind), selection.num_classes
        first = selection.scores[released][selection.split]
        units = "tasks" if first.name == "rmse" else "classes"
        on = f"{number} {units} of {selection.split!r}, which is not protected"
        if len(compared) < len(selection.scores):
            why = (
                f"{released}; {' and '.join(compared)} alone were compared, on all "
                f"{on}: hold out more {units} to compare every stage"
            )
        else:
            why = f"{released}, the best on {on}; compared: {', '.join(compared)}"
    lines.append(f"{'released':<12}{why}")
    if selection.split is not None:
        lines += [f"{'':<12}{text}" for text in _without_effect(selection)]
    return lines


def _without_effect(selection: Selection) -> list[str]:
    """Of each stage that scores no better than the one before: that it does not."""
    scores, said = selection.scores, []
    whole = [name for name in scores if not {"@", "/"} & set(name)]
    for before, name in itertools.pairwise(whole):
        old, new = (scores[one][str(selection.split)] for one in (before, name))
        is_better = new.mean < old.mean if new.name == "rmse" else new.mean > old.mean
        if not is_better:
            said.append(
                f"{name!r} gained nothing on {before!r} ({new.mean:.4f} after "
                f"{old.mean:.4f}): its share of the budget bought nothing here"
            )
    return said


def finished(
    trainer: Trainer,
    folder: Path,
    title: str,
    console: Console,
    without_noise: Mapping[str, Mapping[str, Any]],
    paid: Paid | None = None,
) -> Result:
    """Report, picture and release of a run that took all its steps."""
    records = read_log(folder)
    said, selection = said_of(trainer), trainer.selection
    if paid is not None:
        said = said.with_more(facts_of_book(paid), statement_of_book(paid))
    private_facts, found = said.facts, found_in(records)
    if found is not None:
        drawn, complete = found
        words = f"{complete:,} of {drawn:,} that took part were complete"
        console.print(f"contributions (private): {words}", highlight=False)
        private_facts = {**private_facts, "contributions": words}
    for split, score in without_noise.items():
        value = f"{score['name']} {score['mean']:.4f}, not private"
        private_facts = {**private_facts, f"{split} without noise": value}
    picture, stages = None, []
    if selection is not None:
        stages = [*selection.table(), *selection.reliability_table()]
    if importlib.util.find_spec("matplotlib") is None:
        console.print(
            f"no picture: {installing('plot')} brings matplotlib",
            highlight=False,
            markup=False,
        )
    else:
        picture = PICTURE
        draw_run(
            folder / PICTURE,
            epsilons=[(r["step"], float(r["epsilon"])) for r in records],
            stages={} if selection is None else selection.scores,
            released=trainer.released.name,
            losses=[
                (r["step"], r[PRIVATE]["mean_loss"])
                for r in records
                if "mean_loss" in r.get(PRIVATE, {})
            ],
            scores=[(r["step"], r[HELD_OUT]) for r in records if HELD_OUT in r],
            target_epsilon=trainer.budget.epsilon,
            without_noise=without_noise,
            meaning=meaning_of(trainer),
            is_guarantee=isinstance(trainer, AdaptiveTrainer),
        )
        if selection is not None and selection.reliability:
            draw_reliability(folder / RELIABILITY, selection.reliability)
            stages += ["", f"![accuracy against probability]({RELIABILITY})"]
    page = markdown_report(
        records,
        title=title,
        facts=private_facts,
        statement=said.statement,
        picture=picture,
        stages=stages,
    )
    write_atomically(folder / REPORT, page, is_private=True)
    write_release(folder / RELEASE, trainer, folder, said)
    scores = {} if selection is None else selection.scores.get(selection.stage.name, {})
    bare = {name: Score(**score) for name, score in without_noise.items()}
    numbers = said.epsilon, said.uncounted
    return Result(trainer, *numbers, scores, folder, bare, selection)

"""What comes of a run: its page, its picture, what may be released, its numbers."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.questions.attacker import true_positive_rate
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, public_budget
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.tools.book.check_in import Paid
from jaxdp_episodic.tools.plots.run import draw_run
from jaxdp_episodic.tools.train.booked import facts_of_book, statement_of_book
from jaxdp_episodic.trainer.config.training_parts import NORMALIZE
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.adaptive import AdaptiveTrainer
from jaxdp_episodic.trainer.run.adaptive_report import (
    adaptive_facts,
    adaptive_statement,
)
from jaxdp_episodic.trainer.run.evaluation import Score
from jaxdp_episodic.trainer.run.report import (
    export_run,
    markdown_report,
    people_of,
    privacy_statement,
    released_facts,
)
from jaxdp_episodic.trainer.run.run_files import HELD_OUT, PRIVATE, read_log
from jaxdp_episodic.trainer.run.trainer import Trainer

REPORT = "report.md"
PICTURE = "report.png"
RELEASE = "release"
SEEDED = "draws and noise come from a fixed seed"
_FALSE_ALARMS = 0.01  # false positive rate at which an attack is described
_ALL_EXAMPLES = 2**40  # a size above that of any unit: all of its examples are drawn


class Result(NamedTuple):
    """What a run came to."""

    trainer: Trainer  # with the final parameters in ``trainer.params``
    epsilon: float  # spent, nats; *upper bound*
    # What the same noise and steps would cost if the draw of the examples were not
    # counted.
    epsilon_without_last_stage: float
    # Last score on every held-out part; in the first process alone.
    scores: Mapping[str, Score]
    folder: Path  # where everything is
    # As ``scores``, of the same run without noise, if it was asked for.
    without_noise: Mapping[str, Score] = MappingProxyType({})

    def __str__(self) -> str:
        budget, lines = self.trainer.budget, []
        chose = isinstance(self.trainer, AdaptiveTrainer)
        what = "guarantee" if chose else "target"
        for name, score in self.scores.items():
            lines.append(f"{name:<12}{score}")
            if name in self.without_noise:
                bare = self.without_noise[name].mean
                lines.append(f"{'':<12}{bare:.4f} without noise, not private")
        spent = f"{self.epsilon:.5g}" if budget.is_private else "inf (not private)"
        if self.trainer.is_seeded and budget.is_private:
            spent += f" were it not seeded; not private: {SEEDED}"
        lines.append(
            f"{'epsilon':<12}{spent}   ({what} {budget.epsilon:g}, delta "
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


class _Said(NamedTuple):
    """What a run says of itself, for its page and for its release.

    Attributes:
      epsilon: spent, or guaranteed.
      uncounted: see `Result`.
      facts: of the page.
      statement: of the page.
      released: facts, and the statement, of the release.
      has_public_epsilon: whether the log's epsilons are for release.
      meaning: of the protection, in a sentence.
    """

    epsilon: float
    uncounted: float
    facts: dict[str, Any]
    statement: str
    released: tuple[dict[str, Any], str]
    has_public_epsilon: bool
    meaning: str


def finished(
    trainer: Trainer,
    folder: Path,
    title: str,
    console: Console,
    without_noise: Mapping[str, Mapping[str, Any]],
    paid: Paid | None = None,
) -> Result:
    """Report, picture and release of a run that took all its steps."""
    records = read_log(folder / run_files.LOG)
    if isinstance(trainer, AdaptiveTrainer):
        said = _said_of_choices(trainer)
    else:
        said = _said_of_plan(trainer)
    if paid is not None:
        said = _with_book(said, paid)
    private_facts = said.facts
    for split, score in without_noise.items():
        value = f"{score['name']} {score['mean']:.4f}, not private"
        private_facts = {**private_facts, f"{split} without noise": value}
    picture = None
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: matplotlib, of the extra [plot], is not installed")
    else:
        picture = PICTURE
        draw_run(
            folder / PICTURE,
            epsilons=[(r["step"], float(r["epsilon"])) for r in records],
            losses=[
                (r["step"], r[PRIVATE]["mean_loss"])
                for r in records
                if "mean_loss" in r.get(PRIVATE, {})
            ],
            scores=[(r["step"], r[HELD_OUT]) for r in records if HELD_OUT in r],
            target_epsilon=trainer.budget.epsilon,
            without_noise=without_noise,
            meaning=said.meaning,
            is_guarantee=isinstance(trainer, AdaptiveTrainer),
        )
    page = markdown_report(
        records,
        title=title,
        facts=private_facts,
        statement=said.statement,
        picture=picture,
    )
    write_atomically(folder / REPORT, page, is_private=True)
    facts, statement = said.released
    export_run(
        folder / RELEASE,
        params=trainer.params,
        statement=statement,
        log=folder / run_files.LOG,
        facts=facts,
        has_public_epsilon=said.has_public_epsilon,
    )
    last = next((r[HELD_OUT] for r in reversed(records) if HELD_OUT in r), {})
    scores, bare = (
        {name: Score(**s) for name, s in each.items()} for each in (last, without_noise)
    )
    return Result(trainer, said.epsilon, said.uncounted, scores, folder, bare)


def _with_book(said: _Said, paid: Paid) -> _Said:
    """What is said of a run, and of the book that it is in."""
    words, own = statement_of_book(paid), facts_of_book(paid)
    facts, statement = said.released
    return said._replace(
        facts=said.facts | own,
        statement=said.statement + words,
        released=(facts | own, statement + words),
    )


def _said_of_plan(trainer: Trainer) -> _Said:
    """What is said of a run that was fixed in advance."""
    budget, taken = trainer.budget, trainer.num_steps_charged
    spent = float(budget.spent(taken))
    how = {
        "is_seeded": trainer.is_seeded,
        "has_default_normalizer": trainer.has_default_normalizer,
        "noise": trainer.noise,
        "clipping": trainer.clipping,
        "truncation": trainer.truncation,
        "people": people_of(trainer.data, str(budget.step.privacy_unit)),
    }
    uncounted = epsilon_without_last_stage(budget, taken)
    facts: dict[str, Any] = {
        "steps": taken,
        "epsilon spent": spent,
        **_uncounted(budget, uncounted),
        "target": f"epsilon {budget.epsilon:g}, delta {budget.delta:g}",
        "noise": trainer.noise,
        "protected": f"one {budget.step.privacy_unit} "
        f"({budget.step.neighboring_relation})",
    }
    if budget.before:
        noises = [float(step.noise_multiplier) for step in budget.before]
        facts["noise multipliers of statistics"] = noises
    if budget.num_steps > len(budget.before):
        facts |= {
            "noise multiplier": budget.step.noise_multiplier,
            "clip norm": _clip_norm(trainer),
            "clipped": f"each {budget.step.clip_unit}",
            "mean units a step": trainer.sampler.expected_units,
        }
    if trainer.is_seeded or not budget.is_private:
        facts["not private"] = SEEDED if budget.is_private else "there is no noise"
    facts = plain(facts)
    released = privacy_statement(budget, taken, for_release=True, **how)
    return _Said(
        spent,
        uncounted,
        facts,
        privacy_statement(budget, taken, **how),
        (released_facts(facts, budget), released),
        public_budget(budget) is not None,
        _meaning(trainer),
    )


def _said_of_choices(trainer: AdaptiveTrainer) -> _Said:
    """What is said of a run that chose on the way; its facts are public."""
    budget, facts = trainer.ledger.now, adaptive_facts(trainer.ledger.now)
    facts |= {"noise": trainer.noise, "clip norm": _clip_norm(trainer)}
    if trainer.is_seeded or not budget.is_private:
        facts["not private"] = SEEDED if budget.is_private else "there is no noise"
    facts = plain(facts)
    statement, released = (
        adaptive_statement(
            budget,
            is_seeded=trainer.is_seeded,
            noise=trainer.noise,
            fixed=[name for name, check in trainer.checks.items() if check.fixed],
            clipping=trainer.clipping,
            truncation=trainer.truncation,
            for_release=for_release,
        )
        for for_release in (False, True)
    )
    unit = budget.step.privacy_unit
    meaning = f"Protected is every single {unit}, however the run chose its steps."
    if "not private" in facts:
        meaning = "not private"
    epsilon = budget.epsilon
    return _Said(epsilon, epsilon, facts, statement, (facts, released), True, meaning)


def _clip_norm(trainer: Trainer) -> float | str:
    """The clip norm in words, of a run in which it was not one number for all."""
    clipping, first = trainer.clipping, trainer.l2_clip_norm
    if clipping.kind == NORMALIZE:
        return f"{first:g}, of all contributions"
    if not clipping.counts:
        return first
    return (
        f"{first:g} at first, {trainer.clip_norm:.4g} at last: by the "
        f"{clipping.quantile:g} quantile"
    )


def _uncounted(budget: PrivacyBudget, value: float) -> dict[str, float]:
    """What others would charge, who do not count the draw of an example."""
    if budget.step.privacy_unit == PERSON:
        return {}
    return {"epsilon without counting the draw of examples": value}


def _meaning(trainer: Trainer) -> str:
    """What the protection means for one unit, in a sentence."""
    budget, taken = trainer.budget, trainer.num_steps_charged
    unit = budget.step.privacy_unit
    if not budget.is_private or trainer.is_seeded:
        return "not private"
    found = true_positive_rate(budget.run(taken), false_positive_rate=_FALSE_ALARMS)
    rate = np.ceil(1000 * float(found)) / 10
    return (
        f"Protected is every single {unit} ({budget.step.neighboring_relation}). "
        "Whoever sees all releases,\nand knows all the rest, detects that it was there "
        f"with probability at most {rate:.1f} %,\nif false alarms are to come in "
        f"{100 * _FALSE_ALARMS:g} % of the cases (by guessing: "
        f"{100 * _FALSE_ALARMS:g} %)."
    )


def epsilon_without_last_stage(budget: PrivacyBudget, num_steps: int) -> float:
    """Returns epsilon of the same noise if all examples of a drawn unit took part.

    What the last stage of the draw is worth: the same steps, the last level drawn
    whole. *Upper bound*, as `PrivacyBudget.spent`; where people are protected that
    itself, as others count no draw of theirs at all.
    """
    if budget.step.privacy_unit == PERSON:
        return float(budget.spent(num_steps))
    step, last = budget.step, budget.step.design.schemes[-1]
    if isinstance(last, WithoutReplacement):
        last = dataclasses.replace(last, size=_ALL_EXAMPLES, population_is_exact=False)
    else:  # Poisson, or epochs
        last = Poisson(last.name, sampling_probability=1.0, population=last.population)
    step = dataclasses.replace(
        step, sampling=step.design.with_scheme(last), small_units="keep"
    )
    owed = budget.owed(num_steps)
    return float(dataclasses.replace(budget, step=step).spent(owed))

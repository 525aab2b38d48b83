"""What a run says of itself: its facts, and the statements of its privacy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.schemes import (
    OWNED,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.attacker import true_positive_rate
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, public_budget
from jaxdp_episodic.accountant.report.adaptive_words import (
    budget_in_words,
    owed_by_plan,
)
from jaxdp_episodic.accountant.report.in_words import FALSE_ALARMS
from jaxdp_episodic.accountant.report.protected import protected_unit
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.trainer.config.training_parts import NORMALIZE
from jaxdp_episodic.trainer.run.checks import mean_units_are_public
from jaxdp_episodic.trainer.run.report import (
    adaptive_statement,
    people_of,
    privacy_statement,
)

SEEDED = "draws and noise come from a fixed seed"
_ALL_EXAMPLES = 2**40  # a size above that of any unit: all of its examples are drawn
_UNITS = "mean units a step"


class Said(NamedTuple):
    """What a run says of itself, for its page and for its release.

    Attributes:
      epsilon: spent, or guaranteed.
      uncounted: see `Result`.
      facts: of the page.
      statement: of the page.
      released: facts, and the statement, of the release.
      has_public_epsilon: whether the log's epsilons are for release.
    """

    epsilon: float
    uncounted: float
    facts: dict[str, Any]
    statement: str
    released: tuple[dict[str, Any], str]
    has_public_epsilon: bool

    def with_more(self, own: Mapping[str, Any], words: str) -> Said:
        """Returns the same with facts and words added, which are for release too."""
        facts, statement = self.released
        return self._replace(
            facts={**self.facts, **own},
            statement=self.statement + words,
            released=({**facts, **own}, statement + words),
        )


def said_of(trainer: Any) -> Said:
    """Returns what a trainer's run says of itself, after the steps that were charged.

    It speaks of every step that was charged, and of none that is to come.
    """
    how: dict[str, Any] = {
        name: getattr(trainer, name)
        for name in ("is_seeded", "noise", "clipping", "truncation")
    }
    chose = isinstance(trainer.budget, AdaptiveBudget)
    said = _of_choices(trainer, how) if chose else _of_plan(trainer, how)
    selection = trainer.selection
    if selection is None:
        return said
    if not said.has_public_epsilon:  # nor is the number of steps
        selection = selection.without_step()
    return said.with_more({"stage": selection.stage.name}, f"\n{selection.words}\n")


def _of_plan(trainer: Any, how: dict[str, Any]) -> Said:
    """What is said of a run that was fixed in advance."""
    budget, taken = trainer.budget, trainer.num_steps_charged
    step, spent = budget.step, float(budget.spent(taken))
    uncounted = epsilon_without_last_stage(budget, taken)
    rows = (
        (True, "steps", taken),
        (True, "epsilon spent", spent),
        # What others would charge, who do not count the draw of an example.
        (
            step.privacy_unit not in OWNED,
            "epsilon without counting the draw of examples",
            uncounted,
        ),
        (True, "target", f"epsilon {budget.epsilon:g}, delta {budget.delta:g}"),
        (True, "noise", trainer.noise),
        (True, "protected", f"{protected_unit(step)} ({step.neighboring_relation})"),
        (
            budget.is_private and taken < budget.num_steps,
            "ended early",
            owed_by_plan(budget.epsilon, budget.delta),
        ),
        (
            budget.before,
            "noise multipliers of statistics",
            [float(one.noise_multiplier) for one in budget.before],
        ),
    )
    facts = {name: value for is_said, name, value in rows if is_said}
    if budget.num_steps > len(budget.before):
        facts |= {
            "noise multiplier": step.noise_multiplier,
            "clip norm": _clip_norm(trainer),
            "clipped": f"each {step.clip_unit}",
            _UNITS: trainer.sampler.expected_units,
        }
    facts = plain(facts | _not_private(trainer, budget))
    how |= {
        "has_default_normalizer": trainer.has_default_normalizer,
        "people": people_of(trainer.data, str(step.privacy_unit)),
    }
    shown, released = (
        privacy_statement(budget, taken, for_release=for_release, **how)
        for for_release in (False, True)
    )
    public = released_facts(facts, budget), released
    is_public = trainer.has_public_accounting
    return Said(spent, uncounted, facts, shown, public, is_public)


def _of_choices(trainer: Any, how: dict[str, Any]) -> Said:
    """What is said of a run that chose on the way; its facts are public."""
    budget = trainer.ledger.budget_charged
    step, facts = budget.step, dict[str, Any]()
    for name, text in budget_in_words(budget):
        facts[name] = f"{facts[name]}; {text}" if name in facts else text
    facts |= {
        "protected": f"{protected_unit(step)} ({step.neighboring_relation})",
        "clipped": f"each {step.clip_unit}",
        "noise": trainer.noise,
        "clip norm": _clip_norm(trainer),
    }
    facts = plain(facts | _not_private(trainer, budget))
    how["fixed"] = [name for name, check in trainer.checks.items() if check.fixed]
    shown, released = (
        adaptive_statement(budget, for_release=for_release, **how)
        for for_release in (False, True)
    )
    epsilon = budget.epsilon
    return Said(epsilon, epsilon, facts, shown, (facts, released), True)


def _not_private(trainer: Any, budget: Any) -> dict[str, str]:
    """Why a run is not private, if it is not."""
    if not budget.is_private:
        return {"not private": "there is no noise"}
    return {"not private": SEEDED} if trainer.is_seeded else {}


def _clip_norm(trainer: Any) -> float | str:
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


def meaning_of(trainer: Any) -> str:
    """Returns what the protection of a run means for one unit, in a sentence."""
    budget, taken = trainer.budget, trainer.num_steps_charged
    unit = budget.step.privacy_unit
    if not budget.is_private or trainer.is_seeded:
        return "not private"
    if isinstance(budget, AdaptiveBudget):
        return f"Every single {unit} is protected, however the run chose its steps."
    found = true_positive_rate(budget.run(taken), false_positive_rate=FALSE_ALARMS)
    rate = np.ceil(1000 * float(found)) / 10
    alarms = f"{100 * FALSE_ALARMS:g} %"
    return (
        f"Every single {unit} is protected ({budget.step.neighboring_relation}). "
        "Whoever sees all releases,\nand knows all the rest, detects that it was there "
        f"with probability at most {rate:.1f} %,\nif false alarms are to come in "
        f"{alarms} of the cases (by guessing: {alarms})."
    )


def epsilon_without_last_stage(budget: PrivacyBudget, num_steps: int) -> float:
    """Returns epsilon of the same noise if all examples of a drawn unit took part.

    What the last stage of the draw is worth: the same steps, the last level drawn
    whole. *Upper bound*, as `PrivacyBudget.spent`; where people are protected that
    itself, as others count no draw of theirs at all.
    """
    if budget.step.privacy_unit in OWNED:
        return float(budget.spent(num_steps))
    step, last = budget.step, budget.step.design.schemes[-1]
    if isinstance(last, WithoutReplacement):
        last = dataclasses.replace(last, size=_ALL_EXAMPLES, population_is_exact=False)
    else:  # Poisson, or epochs
        last = Poisson(last.name, sampling_probability=1.0, population=last.population)
    sampling = step.design.with_scheme(last)
    whole = dataclasses.replace(step, sampling=sampling, small_units="keep")
    owed = budget.owed(num_steps)
    return float(dataclasses.replace(budget, step=whole).spent(owed))


def released_facts(facts: Mapping[str, Any], budget: PrivacyBudget) -> dict[str, Any]:
    """Returns those facts of a run that hold no private number of units."""
    hidden: set[str] = set()
    if not mean_units_are_public(budget.step):
        hidden.add(_UNITS)
    if public_budget(budget) is None:  # the noise was calibrated to private sizes
        hidden |= {"steps", "noise multiplier", _UNITS}
        hidden |= {name for name in facts if name.startswith("epsilon ")}
    return {name: value for name, value in facts.items() if name not in hidden}

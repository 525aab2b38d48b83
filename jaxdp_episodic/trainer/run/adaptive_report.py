"""What a run that chose on the way says of its privacy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.report.adaptive_words import (
    adaptive_preconditions,
    budget_in_words,
)
from jaxdp_episodic.accountant.report.protected import changed_unit, protected_unit
from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.trainer.config.training_config import DISCRETE
from jaxdp_episodic.trainer.config.training_parts import FIXED, ClippingConfig
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.run.report import bounded, opening


def adaptive_statement(
    budget: AdaptiveBudget,
    *,
    is_seeded: bool = False,
    noise: str = DISCRETE,
    fixed: Sequence[str] = (),
    clipping: ClippingConfig | None = None,
    truncation: Truncation | None = None,
    for_release: bool = False,
) -> str:
    """Returns what is protected, how well, why, and under which conditions.

    Args:
      budget: of the run, after all that was charged.
      is_seeded: the run's draws and noise came from a seed that somebody knows.
      noise: "discrete" or "gaussian".
      fixed: the checks that look at the same episodes each time.
      clipping: of the run; None: longer contributions were clipped.
      truncation: what bounding people has left out.
      for_release: without the numbers of it, which are private.

    Returns:
      Markdown. Epsilon in it is an *upper bound*; all else of it is public.
    """
    lines = opening(is_private=budget.is_private, is_seeded=is_seeded)
    if not budget.is_private:
        return "\n".join(lines) + "\n"
    step, clipping = budget.a_step, clipping or ClippingConfig(kind=FIXED)
    changed = changed_unit(str(step.privacy_unit), step.neighboring_relation)
    lines += [
        "Whoever sees everything that this run released can hardly tell it from the "
        f"run with {changed} in its data: the two are ({upward(budget.epsilon)}, "
        f"{budget.delta:g})-indistinguishable.",
        "",
        "The run chose its steps on the way, in view of what it had released. What it "
        "could choose was fixed before the first one, and the guarantee is that of the "
        "worst way to choose. So it is the same after every step, and also where the "
        "run ended early.",
        "",
        *_menu(budget),
        "",
        " ".join(adaptive_methods(budget, noise, fixed, clipping)),
        "",
        f"Released are {'the noised sums, ' * bool(budget.first)}the parameters "
        f"{'and the clip norm ' * clipping.counts}after every step, the noisy scores, "
        "and what was chosen. Not released, and not covered: the full log, which "
        "examples each step drew, and scores without noise, by which nothing was "
        "chosen.",
        *(
            ["", bounded(truncation, for_release=for_release)]
            if truncation is not None
            else []
        ),
        "",
        "```",
        *(f"{name:<12} {text}" for name, text in budget_in_words(budget)),
        "",
        "Must be true, unchecked",
        *(f"  * {text}" for text in adaptive_preconditions(budget)),
        "```",
    ]
    return "\n".join(lines) + "\n"


def adaptive_methods(
    budget: AdaptiveBudget,
    noise: str,
    fixed: Sequence[str],
    clipping: ClippingConfig | None,
) -> list[str]:
    """Returns how such a run protects, and what it does not; sentences.

    Arguments are those of `adaptive_statement`.
    """
    unit = budget.a_step.privacy_unit
    said = []
    if unit != PERSON:
        said.append(
            f"Protected is one `{unit}`, not a person: somebody who has several is "
            "protected less, by as much as they are."
        )
    if noise == DISCRETE:
        rounding = "discrete Gaussian noise, to sums that are whole numbers"
    else:
        rounding = "float64 Gaussian noise; its low-order bits are not hardened"
    said.append(f"Added is {rounding}.")
    if clipping is not None and clipping.counts:
        said.append(
            "Contributions are clipped to a norm that follows the "
            f"{clipping.quantile:g} quantile of theirs, by a count in the same noise."
        )
    said += [
        f"The episodes of `{name}` are the same each time: everybody is in every draw, "
        "and its secrecy is not counted on."
        for name in fixed
    ]
    return said


def adaptive_facts(budget: AdaptiveBudget) -> dict[str, Any]:
    """Returns what a run that chose has spent, for its page and its release."""
    step, said = budget.step, dict[str, str]()
    for name, text in budget_in_words(budget):
        said[name] = f"{said[name]}; {text}" if name in said else text
    return {
        **said,
        "protected": f"{protected_unit(step)} ({step.neighboring_relation})",
        "clipped": f"each {step.clip_unit}",
    }


def _menu(budget: AdaptiveBudget) -> list[str]:
    """What could be chosen, as a table."""
    lines = ["| option | noise multiplier | of each | taken |", "|---|---|---|---|"]
    for name, step in budget.options.items():
        kind = "score" if name in budget.checks else "contribution"
        lines.append(
            f"| {name} | {float(step.noise_multiplier):.5g} | `{step.clip_unit}`: its "
            f"{kind} | {budget.taken[name]:,} |"
        )
    return lines

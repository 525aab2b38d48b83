"""The report of a run: a page and a picture; and the statement of its privacy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.describe.step import GaussianStep
from jaxdp_episodic.report.privacy_statement import PrivacyReport
from jaxdp_episodic.report.report import privacy_report
from jaxdp_episodic.training.budget import PrivacyBudget, public_view
from jaxdp_episodic.training.checks import mean_units_are_public
from jaxdp_episodic.training.run_log import HELD_OUT


def privacy_statement(
    budget: PrivacyBudget,
    num_steps: int,
    *,
    is_seeded: bool = False,
    has_default_normalizer: bool = False,
    for_release: bool = False,
    noise: str = "gaussian",
) -> str:
    """Returns what is protected, how well, why, and under which conditions.

    Args:
      budget: of the run.
      num_steps: steps that were taken; the statement speaks of these.
      is_seeded: the run's draws and noise came from a seed that somebody knows.
      has_default_normalizer: the divisor was the mean number of clip units a step. At
        levels where that is private no epsilon is given.
      for_release: leave out whatever was computed from private sizes.
      noise: "gaussian" or "discrete"; see `Trainer`.

    Returns:
      Markdown. Epsilon in it is an *upper bound*.
    """
    lines = ["# Privacy of this run", ""]
    if not budget.is_private:
        lines += [
            "**Not private**: it was trained without noise (epsilon is infinite)."
        ]
        return "\n".join(lines) + "\n"
    if is_seeded:
        lines += [
            "**Not private**: the draws and the noise came from a fixed seed, and "
            "whoever knows it can subtract the noise. What follows holds for the same "
            "run with fresh entropy.",
            "",
        ]
    if for_release:
        view = public_view(budget)
        if view is None:
            return "\n".join([*lines, *_without_sizes(budget)]) + "\n"
        budget = view
    report = privacy_report(budget.step, num_steps=num_steps, delta=budget.delta)
    if budget.step.neighboring_relation == "zero_out":
        report = _without_finer_levels(report)
    if has_default_normalizer:
        report = _without_private_divisor(report, budget.step)
    words = _in_words(report, budget, noise)
    return "\n".join([*lines, *words, "", "```", str(report), "```"]) + "\n"


def _without_finer_levels(report: PrivacyReport) -> PrivacyReport:
    """The report without levels below the one whose slots were drawn.

    Their units have no slots: one that is null would change the rates.
    """
    names = list(report.epsilon_by_level)
    finer = names[names.index(report.privacy_unit) + 1 :]
    reason = f"only slots of the level {report.privacy_unit!r} were drawn"
    levels = dict(report.epsilon_by_level) | dict.fromkeys(finer, reason)
    return dataclasses.replace(report, epsilon_by_level=levels)


def _without_private_divisor(
    report: PrivacyReport, step: GaussianStep
) -> PrivacyReport:
    """The report without epsilons at levels where the divisor is private."""
    reason = (
        "the divisor was the mean number of clip units a step, which is private at "
        "this level; give normalizer"
    )
    levels: dict[str, float | str] = {
        level: value
        if isinstance(value, str) or mean_units_are_public(step, level)
        else reason
        for level, value in report.epsilon_by_level.items()
    }
    return dataclasses.replace(report, epsilon_by_level=levels)


def _without_sizes(budget: PrivacyBudget) -> list[str]:
    """What may be said where the noise was calibrated to private sizes."""
    unit = budget.step.privacy_unit
    return [
        f"Trained for ({budget.epsilon:g}, {budget.delta:g})-differential privacy of "
        f"one `{unit}` more or less, among data sets whose groups have the sizes of "
        "this one or of its neighbours.",
        "",
        f"How many `{unit}` units there are in each group is private, and the "
        "accounting of this run used it. Its noise, the number of its steps and what "
        "it spent are therefore not for publication and not in this folder; that the "
        "noise itself was chosen by these numbers is covered by no epsilon. A "
        "`population` in every draw without replacement, a public lower bound, lets "
        "the accounting rest on public facts alone.",
    ]


def _in_words(report: PrivacyReport, budget: PrivacyBudget, noise: str) -> list[str]:
    kind, law = (
        "Gaussian noise",
        "The low-order bits of float32 noise are not hardened.",
    )
    if noise == "discrete":
        kind = "discrete Gaussian noise"
        law = "Sums and noise were whole numbers, whose low-order bits tell nothing."
    unit, clip = report.privacy_unit, report.clip_units[0]
    changed = {
        "add_remove": f"one `{unit}` more or less",
        "replace_one": f"the content of one `{unit}` replaced",
        "zero_out": f"one more of the public slots for a `{unit}` empty, or filled,",
    }[report.neighboring_relation]
    return [
        f"Whoever sees everything that this run released can hardly tell it from the "
        f"run with {changed} in the training data: the two are "
        f"({_up(report.epsilon)}, {report.delta:g})-indistinguishable. The target was "
        f"epsilon <= {budget.epsilon:g}.",
        "",
        f"It holds because in each of {sum(report.num_steps):,} steps the gradient of "
        f"each drawn `{clip}` was clipped, {kind} of "
        f"{report.noise_multipliers[0]:.5g} times the clip norm was added to their "
        "sum, and who was drawn stayed secret: the object that drew is the one that is "
        f"accounted. {law}",
        "",
        "Released are the parameters after every step. Not released, and not covered: "
        "checkpoints (they hold the noise key), the full log (it holds losses and "
        "norms of private data) and scores on held-out data, which disclose the people "
        "in them.",
    ]


def _up(value: float) -> str:
    """Four digits, rounded up."""
    if not np.isfinite(value) or value == 0:
        return f"{value:g}"
    scale = 10.0 ** (3 - int(np.floor(np.log10(value))))
    return f"{np.ceil(value * scale) / scale:g}"


def markdown_report(
    records: Sequence[Mapping[str, Any]],
    *,
    title: str,
    facts: Mapping[str, Any],
    statement: str,
    picture: str | None,
) -> str:
    """Returns the run's page. It shows private diagnostics: not for release."""
    scores = [r for r in records if HELD_OUT in r]
    lines = [
        f"# {title}",
        "",
        "*Private: this page shows losses of private training data and scores on "
        "held-out people. What may be released is in `release/`.*",
        "",
    ]
    if picture:
        lines += [f"![loss, score and epsilon against the step]({picture})", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    if scores:
        lines += ["", "| step | epsilon | on | score | 95 % interval | episodes |"]
        lines += ["|---|---|---|---|---|---|"]
        for record in scores:
            for split, score in record[HELD_OUT].items():
                lines.append(
                    f"| {record['step']:,} | {float(record['epsilon']):.4g} | "
                    f"{split} | "
                    f"{score['name']} {score['mean']:.4f} | "
                    f"{score['low']:.4f} to {score['high']:.4f} | "
                    f"{score['num_episodes']:,} |"
                )
    return "\n".join([*lines, "", statement.replace("# Privacy", "## Privacy", 1)])

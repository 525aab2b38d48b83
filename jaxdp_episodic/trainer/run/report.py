"""What a run says of itself: its page, the statement of its privacy, its release.

What may leave the house is a function of what the noised steps released and of public
settings: parameters, statement, public log. The checkpoint, the full log and the page
are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp_episodic.accountant.describe.people import BOUNDS, PersonBounds
from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, public_budget
from jaxdp_episodic.accountant.report.adaptive_words import owed_by_plan
from jaxdp_episodic.accountant.report.privacy_statement import PrivacyReport
from jaxdp_episodic.accountant.report.protected import bounds_in_words, changed_unit
from jaxdp_episodic.accountant.report.report import privacy_report
from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.files.archive import read_arrays
from jaxdp_episodic.trainer.config.training_config import DISCRETE
from jaxdp_episodic.trainer.config.training_parts import FIXED, ClippingConfig
from jaxdp_episodic.trainer.config.training_start import contribution_norm
from jaxdp_episodic.trainer.data.people import Truncation, fitting_bounds
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.clip_norm import clipped_and_noised
from jaxdp_episodic.trainer.run.checks import mean_units_are_public
from jaxdp_episodic.trainer.run.run_files import HELD_OUT


def privacy_statement(
    budget: PrivacyBudget,
    num_steps: int,
    *,
    is_seeded: bool = False,
    has_default_normalizer: bool = False,
    for_release: bool = False,
    noise: str = DISCRETE,
    clipping: ClippingConfig | None = None,
    people: PersonBounds | None = None,
    truncation: Truncation | None = None,
) -> str:
    """Returns what is protected, how well, why, and under which conditions.

    Args:
      budget: of the run.
      num_steps: steps that were taken; the statement speaks of these or, if that is
        more, of those owed (`PrivacyBudget.owed`).
      is_seeded: the run's draws and noise came from a seed that somebody knows.
      has_default_normalizer: the divisor was the mean number of clip units a step. At
        levels where that is private no epsilon is given.
      for_release: leave out whatever was computed from private sizes.
      noise: "discrete" or "gaussian"; see `Trainer`.
      clipping: of the run; None: longer contributions were clipped.
      people: what the people in the data own, where that is known and less than a
        person is protected. It is private.
      truncation: what bounding people has left out.

    Returns:
      Markdown. Epsilon in it is an *upper bound*.
    """
    lines = opening(is_private=budget.is_private, is_seeded=is_seeded)
    if not budget.is_private:
        return "\n".join(lines) + "\n"
    if for_release:
        public = public_budget(budget)
        if public is None:
            return "\n".join([*lines, *_without_sizes(budget)]) + "\n"
        budget = public
    owed = int(budget.owed(num_steps))
    if owed != num_steps:
        lines += [
            f"It ended after {num_steps:,} steps, within an epoch and not by its plan, "
            f"and is charged for {owed:,}: the end may depend on what was released.",
            "",
        ]
    shown = None if for_release else people
    report, _ = report_of_budget(
        budget, owed, shown, has_default_normalizer=has_default_normalizer
    )
    kind = clipping or ClippingConfig(kind=FIXED)
    words = _in_words(report, budget, num_steps, noise, kind)
    if people is not None:
        words += ["", _of_a_person(report, people, for_release=for_release)]
    if truncation is not None:
        words += ["", bounded(truncation, for_release=for_release)]
    return "\n".join([*lines, *words, "", "```", str(report), "```"]) + "\n"


def report_of_budget(
    budget: PrivacyBudget,
    owed: int,
    people: PersonBounds | None = None,
    *,
    has_default_normalizer: bool = False,
) -> tuple[PrivacyReport, ComposedSteps]:
    """Returns the report of a run's first steps, and these; see `privacy_statement`.

    Levels of which the way it trains covers nothing have no epsilon.
    """
    run = _run(budget, owed)
    report = privacy_report(run, delta=budget.delta, people=people)
    if budget.step.neighboring_relation == "zero_out":
        report = _without_finer_levels(report)
    if has_default_normalizer:
        report = _without_private_divisor(report, budget.step)
    return report, run


def people_of(data: ExampleTable, unit: str) -> PersonBounds | None:
    """Returns what people own where less than one is protected, and owners are known.

    It is private.
    """
    if data.owners is None or unit == PERSON or len(data.level_names) > len(BOUNDS):
        return None
    return fitting_bounds(data)


def _of_a_person(
    report: PrivacyReport, people: PersonBounds, *, for_release: bool
) -> str:
    """What a run that protects less than a person means for one."""
    unit = report.privacy_unit
    less = f"Protected is one `{unit}`, not a person: somebody who has several "
    if for_release:
        return f"{less}is protected less, by as much as they are."
    found = report.epsilon_by_level.get(PERSON)
    if isinstance(found, float):
        own = f"epsilon {upward(found)}"
    else:
        own = f"no epsilon is known ({found})"
    return (
        f"{less}is protected less. For somebody who owns as much as anybody does here, "
        f"{_where(people)}: {own}."
    )


def _where(people: PersonBounds) -> str:
    """Bounds without the words "all examples, "."""
    return bounds_in_words(people).partition(", ")[2]


def opening(*, is_private: bool, is_seeded: bool) -> list[str]:
    """Returns how a statement begins: where a run is not private, with that."""
    lines = ["# Privacy of this run", ""]
    if not is_private:
        return [
            *lines,
            "**Not private**: it was trained without noise (epsilon is infinite).",
        ]
    if is_seeded:
        lines += [
            "**Not private**: the draws and the noise came from a fixed seed, and "
            "whoever knows it can subtract the noise. What follows holds for the same "
            "run with fresh entropy.",
            "",
        ]
    return lines


def bounded(truncation: Truncation, *, for_release: bool) -> str:
    """Returns how people were bounded; numbers of the data are not for release."""
    words = (
        f"Everybody's examples are within bounds, {_where(truncation.bounds)}: what "
        "was beyond them was left out before training, by a rule that looks at one "
        "person alone and at nothing in an example."
    )
    return words if for_release else f"{words} Here: {truncation}."


def _run(budget: PrivacyBudget, num_steps: int) -> ComposedSteps:
    """The steps that were taken, equal ones together; the first if none was."""
    run = budget.run(num_steps)
    counts: dict[Any, int] = {}
    for step, count in zip(run.steps, run.counts, strict=True):
        counts[step] = counts.get(step, 0) + int(count)
    taken = {step: count for step, count in counts.items() if count}
    return compose(*(taken or dict.fromkeys(run.steps[:1], 0)).items())


def _without_finer_levels(report: PrivacyReport) -> PrivacyReport:
    """The report without levels below the one whose slots were drawn.

    Their units have no slots: one that is null would change the rates.
    """
    names = list(report.epsilon_by_level)
    if report.privacy_unit == PERSON:
        return report  # the slots are those of the last level
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
    unit = counted = budget.step.privacy_unit
    if unit == PERSON:
        counted = budget.step.design.level_names[-1]
    return [
        f"Trained for ({budget.epsilon:g}, {budget.delta:g})-differential privacy of "
        f"one `{unit}` more or less, among data sets whose groups have the sizes of "
        "this one or of its neighbours.",
        "",
        f"How many `{counted}` units there are in each group is private, and the "
        "accounting of this run used it. Its noise, the number of its steps and what "
        "it spent are therefore not for publication and not in this folder; that the "
        "noise itself was chosen by these numbers is covered by no epsilon. A "
        "`population` in every draw without replacement, a public lower bound, lets "
        "the accounting rest on public facts alone.",
    ]


def _reasons(
    budget: PrivacyBudget, num_steps: int, kind: str, clipping: ClippingConfig
) -> list[str]:
    """Why the guarantee holds: the statistics, then the steps."""
    statistics = min(len(budget.before), num_steps)
    reasons = []
    if statistics:
        noises = dict.fromkeys(
            f"{step.noise_multiplier * contribution_norm(step):.5g} for each "
            f"{step.clip_unit}"
            for step in budget.before[:statistics]
        )
        reasons.append(
            f"{statistics} statistics of all of the data were released once, sums to "
            f"which nobody gives more than norm 1, with {kind} of standard deviation "
            + ", ".join(noises)
        )
    if num_steps > statistics:
        clipped = clipped_and_noised(clipping, kind, budget.step)
        reasons.append(
            f"in each of {num_steps - statistics:,} steps {clipped}, and who was drawn "
            "stayed secret: the object that drew is the one that is accounted"
        )
    return reasons


def _in_words(
    report: PrivacyReport,
    budget: PrivacyBudget,
    num_steps: int,
    noise: str,
    clipping: ClippingConfig,
) -> list[str]:
    kind = "Gaussian noise"
    bits = "The noise was float64 Gaussian; its low-order bits are not hardened."
    if noise == DISCRETE:
        kind = "discrete Gaussian noise"
        bits = "Sums and noise were whole numbers, whose low-order bits tell nothing."
    changed = changed_unit(report.privacy_unit, report.neighboring_relation)
    epsilon, early = report.epsilon, ""
    if num_steps < budget.num_steps:
        epsilon = max(budget.epsilon, epsilon)
        owed = owed_by_plan(budget.epsilon, budget.delta)
        early = (
            f" It ended after {num_steps:,} of {budget.num_steps:,} steps, which alone "
            f"are epsilon {upward(report.epsilon)}: {owed}."
        )
    return [
        f"Whoever sees everything that this run released can hardly tell it from the "
        f"run with {changed} in the training data: the two are "
        f"({upward(epsilon)}, {report.delta:g})-indistinguishable. The target "
        f"was epsilon <= {budget.epsilon:g}.{early}",
        "",
        "It holds because "
        + "; and because ".join(_reasons(budget, num_steps, kind, clipping))
        + f". {bits}",
        "",
        f"Released are {'the noised sums and ' * bool(budget.before)}the parameters "
        f"{'and the clip norm ' * clipping.counts}after every step. Not released, and "
        "not covered: the full log (it holds losses and norms of private data), which "
        "examples each step drew, and scores on held-out data, which disclose the "
        "people in them. Sizes stated here were given by the config; where they were "
        "counted in the data, they are not covered.",
    ]


def markdown_report(
    records: Sequence[Mapping[str, Any]],
    *,
    title: str,
    facts: Mapping[str, Any],
    statement: str,
    picture: str | None,
    stages: Sequence[str] = (),
) -> str:
    """Returns the run's page. It shows private diagnostics: not for release.

    ``stages`` are lines of a table of their scores.
    """
    scores = [r for r in records if HELD_OUT in r]
    lines = [
        f"# {title}",
        "",
        "*Private: this page shows losses of private training data and scores on "
        "held-out people. What may be released is in `release/`.*",
        "",
    ]
    if picture:
        lines += [f"![stages; loss, score and epsilon against the step]({picture})", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += stages
    if scores:
        lines += ["", "| step | epsilon | stage | on | score | 95 % interval |"]
        lines += ["|---|---|---|---|---|---|"]
        for record in scores:
            for split, score in record[HELD_OUT].items():
                lines.append(
                    f"| {record['step']:,} | {float(record['epsilon']):.4g} | "
                    f"{record.get('stage', '')} | {split} | "
                    f"{score['name']} {score['mean']:.4f} | "
                    f"{score['low']:.4f} to {score['high']:.4f} |"
                )
    return "\n".join([*lines, "", statement.replace("# Privacy", "## Privacy", 1)])


_HEADER_BYTES = 1 << 20  # most that headers of arrays may take


def load_parameters(path: Path, like: Any) -> Any:
    """Returns exported parameters in the structure of ``like``; never unpickles.

    Raises:
      OSError: a file that cannot be read.
      ValueError: no npz file of numbers, a larger one than parameters need, or other
        names or shapes than ``like`` has.
    """
    wanted = flat_params(like)
    # Twice as many bytes as doubles need.
    most = 16 * sum(leaf.size for leaf in wanted.values()) + _HEADER_BYTES
    arrays = read_arrays(path, max_bytes=most)
    if wanted.keys() != arrays.keys():
        odd = sorted(wanted.keys() ^ arrays.keys())
        raise ValueError(f"{path}: parameters differ in {odd[:5]}")
    for name, leaf in wanted.items():
        if arrays[name].shape != leaf.shape:
            raise ValueError(
                f"{path}: {name} must have shape {leaf.shape}, got {arrays[name].shape}"
            )
    leaves = [jax.numpy.asarray(arrays[n], v.dtype) for n, v in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def flat_params(params: Any) -> dict[str, Any]:
    """The leaves by their path, e.g. ``"layers/0/kernel"``, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }


def flat_arrays(params: Any) -> dict[str, Any]:
    """The leaves as an npz file can hold them: of bfloat16 as float32."""
    return {
        path: np.asarray(leaf, np.float32) if leaf.dtype == jax.numpy.bfloat16 else leaf
        for path, leaf in flat_params(params).items()
    }

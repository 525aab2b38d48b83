"""What a run says of itself: the statement of its privacy, its page, its parameters.

What may leave the house is a function of what the noised steps released and of public
settings: parameters, statement, public log. The checkpoint, the full log and the page
are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp_episodic.accountant.describe.people import BOUNDS, PersonBounds
from jaxdp_episodic.accountant.describe.schemes import OWNED, PERSON
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, public_budget
from jaxdp_episodic.accountant.report.adaptive_words import (
    adaptive_preconditions,
    budget_in_words,
    owed_by_plan,
)
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

_FIXED = ClippingConfig(kind=FIXED)
# What is added, and what its low-order bits tell.
_NOISES = {
    True: (
        "discrete Gaussian noise",
        "Sums and noise were whole numbers, whose low-order bits tell nothing.",
    ),
    False: (
        "Gaussian noise",
        "The noise was float64 Gaussian; its low-order bits are not hardened.",
    ),
}


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
    head = "\n".join(opening(is_private=budget.is_private, is_seeded=is_seeded))
    public = public_budget(budget) if for_release and budget.is_private else budget
    if not budget.is_private or public is None:
        return _page([head, *([] if public else _without_sizes(budget))])
    budget, clipping = public, clipping or _FIXED
    owed = int(budget.owed(num_steps))
    report, _ = report_of_budget(
        budget,
        owed,
        None if for_release else people,
        has_default_normalizer=has_default_normalizer,
    )
    kind, bits = _NOISES[noise == DISCRETE]
    epsilon, early = report.epsilon, ""
    if num_steps < budget.num_steps:
        epsilon = max(budget.epsilon, epsilon)
        early = (
            f" It ended after {num_steps:,} of {budget.num_steps:,} steps, which alone "
            f"are epsilon {upward(report.epsilon)}: "
            f"{owed_by_plan(budget.epsilon, budget.delta)}."
        )
    reasons = "; and because ".join(_reasons(budget, num_steps, kind, clipping))
    paragraphs = [
        head,
        f"It ended after {num_steps:,} steps, within an epoch and not by its plan, and "
        f"is charged for {owed:,}: the end may depend on what was released."
        if owed != num_steps
        else "",
        f"{_guarantee(report, epsilon, 'the training data')} The target was epsilon "
        f"<= {budget.epsilon:g}.{early}",
        f"It holds because {reasons}. {bits}",
        f"Released are {'the noised sums and ' * bool(budget.before)}the parameters "
        f"{'and the clip norm ' * clipping.counts}after every step. Not released, and "
        "not covered: the full log (it holds losses and norms of private data), which "
        "examples each step drew, and scores on held-out data, which disclose the "
        "people in them. Sizes stated here were given by the config; where they were "
        "counted in the data, they are not covered.",
        people and _of_a_person(report, people, for_release=for_release),
        truncation and bounded(truncation, for_release=for_release),
    ]
    return _page(paragraphs, str(report))


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
    """Returns the same of a run that chose on the way.

    Args:
      budget: of the run, after all that was charged.
      is_seeded: see `privacy_statement`, as ``noise``, ``clipping``, ``truncation``.
      noise: "discrete" or "gaussian".
      fixed: the checks that look at the same episodes each time.
      clipping: of the run.
      truncation: what bounding people has left out.
      for_release: without the numbers of it, which are private.

    Returns:
      Markdown. Epsilon in it is an *upper bound*; all else of it is public.
    """
    head = "\n".join(opening(is_private=budget.is_private, is_seeded=is_seeded))
    if not budget.is_private:
        return _page([head])
    clipping = clipping or _FIXED
    menu = ["| option | noise multiplier | of each | taken |", "|---|---|---|---|"]
    menu += [
        f"| {name} | {float(step.noise_multiplier):.5g} | `{step.clip_unit}`: its "
        f"{'score' if name in budget.checks else 'contribution'} | "
        f"{budget.taken[name]:,} |"
        for name, step in budget.options.items()
    ]
    paragraphs = [
        head,
        _guarantee(budget.a_step, budget.epsilon, "its data", budget.delta),
        "The run chose its steps on the way, in view of what it had released. What it "
        "could choose was fixed before the first one, and the guarantee is that of the "
        "worst way to choose. So it is the same after every step, and also where the "
        "run ended early.",
        "\n".join(menu),
        " ".join(adaptive_methods(budget, noise, fixed, clipping)),
        f"Released are {'the noised sums, ' * bool(budget.first)}the parameters "
        f"{'and the clip norm ' * clipping.counts}after every step, the noisy scores, "
        "and what was chosen. Not released, and not covered: the full log, which "
        "examples each step drew, and scores without noise, by which nothing was "
        "chosen.",
        truncation and bounded(truncation, for_release=for_release),
    ]
    facts = [f"{name:<12} {text}" for name, text in budget_in_words(budget)]
    unchecked = [f"  * {text}" for text in adaptive_preconditions(budget)]
    block = [*facts, "", "Must be true, unchecked", *unchecked]
    return _page(paragraphs, "\n".join(block))


def adaptive_methods(
    budget: AdaptiveBudget,
    noise: str,
    fixed: Sequence[str],
    clipping: ClippingConfig | None,
) -> list[str]:
    """Returns how a run that chooses protects, and what it does not; sentences.

    Arguments are those of `adaptive_statement`.
    """
    unit = budget.a_step.privacy_unit
    rounding = "discrete Gaussian noise, to sums that are whole numbers"
    if noise != DISCRETE:
        rounding = "float64 Gaussian noise; its low-order bits are not hardened"
    clipping = clipping or _FIXED
    sentences = [
        unit != PERSON and f"{_not_a_person(unit)}, by as much as they are.",
        f"Added is {rounding}.",
        clipping.counts
        and "Contributions are clipped to a norm that follows the "
        f"{clipping.quantile:g} quantile of theirs, by a count in the same noise.",
        *(
            f"The episodes of `{name}` are the same each time: everybody is in every "
            "draw, and its secrecy is not counted on."
            for name in fixed
        ),
    ]
    return [sentence for sentence in sentences if sentence]


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


def report_of_budget(
    budget: PrivacyBudget,
    owed: int,
    people: PersonBounds | None = None,
    *,
    has_default_normalizer: bool = False,
) -> tuple[PrivacyReport, ComposedSteps]:
    """Returns the report of a run's first steps, and these; see `privacy_statement`.

    Equal steps stand together. Levels of which the way it trains covers nothing have no
    epsilon: below the one whose slots were drawn, as units there have no slots, and one
    that is null would change the rates; and where the divisor is private.
    """
    taken, counts = budget.run(owed), dict[Any, int]()
    for step, count in zip(taken.steps, taken.counts, strict=True):
        counts[step] = counts.get(step, 0) + int(count)
    counts = {step: count for step, count in counts.items() if count}
    run = compose(*(counts or dict.fromkeys(taken.steps[:1], 0)).items())
    report = privacy_report(run, delta=budget.delta, people=people)
    levels: dict[str, float | str] = dict(report.epsilon_by_level)
    unit, step = report.privacy_unit, budget.step
    # Slots of people are those of the last level.
    if step.neighboring_relation == "zero_out" and unit not in OWNED:
        finer = list(levels)[list(levels).index(unit) + 1 :]
        reason = f"only slots of the level {unit!r} were drawn"
        levels |= dict.fromkeys(finer, reason)
    if has_default_normalizer:
        reason = (
            "the divisor was the mean number of clip units a step, which is private at "
            "this level; give normalizer"
        )
        levels |= {
            level: reason
            for level, value in levels.items()
            if not isinstance(value, str) and not mean_units_are_public(step, level)
        }
    return dataclasses.replace(report, epsilon_by_level=levels), run


def people_of(data: ExampleTable, unit: str) -> PersonBounds | None:
    """Returns what people own where less than one is protected, and owners are known.

    It is private.
    """
    if data.owners is None or unit == PERSON or len(data.level_names) > len(BOUNDS):
        return None
    return fitting_bounds(data)


def _page(paragraphs: Iterable[str | None], block: str = "") -> str:
    """Paragraphs, those that are empty left out, and a block as it is."""
    texts = [text.strip() for text in paragraphs if text]
    return "\n\n".join([*texts, *([f"```\n{block}\n```"] if block else [])]) + "\n"


def _guarantee(
    protected: PrivacyReport | GaussianStep,
    epsilon: float,
    data: str,
    delta: float | None = None,
) -> str:
    unit, relation = str(protected.privacy_unit), protected.neighboring_relation
    delta = protected.delta if isinstance(protected, PrivacyReport) else delta
    return (
        "Whoever sees everything that this run released can hardly tell it from the "
        f"run with {changed_unit(unit, relation)} in {data}: the two are "
        f"({upward(epsilon)}, {delta:g})-indistinguishable."
    )


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


def _without_sizes(budget: PrivacyBudget) -> list[str]:
    """What may be said where the noise was calibrated to private sizes."""
    unit = counted = budget.step.privacy_unit
    if unit in OWNED:
        counted = budget.step.design.level_names[-1]
    return [
        f"Trained for ({budget.epsilon:g}, {budget.delta:g})-differential privacy of "
        f"one `{unit}` more or less, among data sets whose groups have the sizes of "
        "this one or of its neighbours.",
        f"How many `{counted}` units there are in each group is private, and the "
        "accounting of this run used it. Its noise, the number of its steps and what "
        "it spent are therefore not for publication and not in this folder; that the "
        "noise itself was chosen by these numbers is covered by no epsilon. A "
        "`population` in every draw without replacement, a public lower bound, lets "
        "the accounting rest on public facts alone.",
    ]


def _not_a_person(unit: Any) -> str:
    return (
        f"Protected is one `{unit}`, not a person: somebody who has several is "
        "protected less"
    )


def _of_a_person(
    report: PrivacyReport, people: PersonBounds, *, for_release: bool
) -> str:
    """What a run that protects less than a person means for one."""
    less = _not_a_person(report.privacy_unit)
    if for_release:
        return f"{less}, by as much as they are."
    found = report.epsilon_by_level.get(PERSON)
    own = f"no epsilon is known ({found})"
    if isinstance(found, float):
        own = f"epsilon {upward(found)}"
    return (
        f"{less}. For somebody who owns as much as anybody does here, "
        f"{_where(people)}: {own}."
    )


def _where(people: PersonBounds) -> str:
    """Bounds without the words "all examples, "."""
    return bounds_in_words(people).partition(", ")[2]


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
    scores = [
        f"| {record['step']:,} | {float(record['epsilon']):.4g} | "
        f"{record.get('stage', '')} | {split} | {score['name']} {score['mean']:.4f} | "
        f"{score['low']:.4f} to {score['high']:.4f} |"
        for record in records
        for split, score in record.get(HELD_OUT, {}).items()
    ]
    if scores:
        lines += ["", "| step | epsilon | stage | on | score | 95 % interval |"]
        lines += ["|---|---|---|---|---|---|", *scores]
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

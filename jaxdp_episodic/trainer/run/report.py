"""A run's privacy in words: facts, statement and the private page.

The statement for release contains only what follows from releases and public settings.
The page and the full log are private.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.designs import (
    ORIGINAL,
    OWNED,
    PERSON,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import BOUNDS, PersonBounds
from jaxdp_episodic.accountant.describe.step import GaussianStep, compose
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, public_budget
from jaxdp_episodic.accountant.questions.gdp import true_positive_rate
from jaxdp_episodic.accountant.report import in_words
from jaxdp_episodic.accountant.report.report import (
    CONDITIONS,
    PrivacyReport,
    listed,
    privacy_report,
)
from jaxdp_episodic.accountant.report.sentences import (
    bounds_in_words,
    changed_unit,
    protected_unit,
    upward,
)
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.trainer.config.training_parts import (
    DISCRETE,
    FIXED,
    GAUSSIAN,
    GIVEN,
    NORMALIZE,
    ClippingConfig,
    contribution_norm,
)
from jaxdp_episodic.trainer.data.people import Truncation, fitting_bounds
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.clipping import clipped_and_noised
from jaxdp_episodic.trainer.run.checks import mean_units_are_public
from jaxdp_episodic.trainer.run.evaluation import digits
from jaxdp_episodic.trainer.run.run_files import HELD_OUT

SEEDED = "draws and noise come from a fixed seed"
_ALL_EXAMPLES = 2**40  # larger than any unit: all of its examples are drawn
_UNITS = "mean units a step"
_WIDTH = 88  # characters of a line of a block
_FIXED = ClippingConfig(kind=FIXED)
_JOINED = {
    PERSON: " A contribution is what all examples of one person add together.",
    ORIGINAL: " A contribution is what one example and its copies add together.",
}
_REPLACED = (
    " Where one contribution may replace another, the two are at most sqrt(2) apart, "
    "and the noise multiplier below is sqrt(2) times the standard deviation."
)
# Of each kind of noise: its name, and a sentence on its low-order bits.
_NOISES = {
    DISCRETE: (
        "discrete Gaussian noise",
        "Sums and noise are whole numbers, whose low-order bits reveal nothing.",
    ),
    GAUSSIAN: (
        "Gaussian noise",
        "The noise is float64 Gaussian; its low-order bits are not hardened.",
    ),
}


class RunStatement(NamedTuple):
    """The facts and statements of a run, for its page and for its release."""

    epsilon: float  # spent; of an adaptive run, guaranteed
    uncounted: float  # see `epsilon_without_last_stage`
    facts: dict[str, Any]  # of the private page
    statement: str  # of the private page
    released: tuple[dict[str, Any], str]  # facts and statement of the release


def run_statement(trainer: Any, *more: tuple[Mapping[str, Any], str]) -> RunStatement:
    """Returns a run's facts and statements so far; ``more`` is added to both."""
    budget, taken = trainer.budget, trainer.num_steps_charged
    names = "is_seeded noise clipping truncation".split()
    how: dict[str, Any] = {name: getattr(trainer, name) for name in names}
    adapts = isinstance(budget, AdaptiveBudget)
    if adapts:
        budget = trainer.ledger.budget_charged
        spent = uncounted = budget.epsilon
        how["fixed"] = [name for name, check in trainer.checks.items() if check.fixed]
    else:
        spent = float(budget.spent(taken))
        uncounted = epsilon_without_last_stage(budget, taken)
        how |= {
            "num_steps": taken,
            "has_default_normalizer": trainer.has_default_normalizer,
            "people": people_of(trainer.data, str(budget.step.privacy_unit)),
        }
    facts = _facts(trainer, budget, spent, uncounted)
    public = facts if adapts else _released_facts(facts, budget)
    shown, released = (
        privacy_statement(budget, for_release=for_release, **how)
        for for_release in (False, True)
    )
    selection = trainer.selection
    if selection is not None:
        if not trainer.has_public_accounting:  # nor is the number of steps public
            selection = selection.without_step()
        more = ({"stage": selection.stage.name}, f"\n{selection.words}\n"), *more
    for own, words in more:
        facts, public = {**facts, **own}, {**public, **own}
        shown, released = shown + words, released + words
    return RunStatement(spent, uncounted, facts, shown, (public, released))


def _facts(trainer: Any, budget: Any, spent: float, uncounted: float) -> dict[str, Any]:
    """The table of a run's facts."""
    step, adapts = budget.step, isinstance(budget, AdaptiveBudget)
    facts: dict[str, Any] = {}
    if adapts:
        for name, text in in_words.budget_in_words(budget):
            facts[name] = f"{facts[name]}; {text}" if name in facts else text
    else:
        taken = trainer.num_steps_charged
        facts |= {"steps": taken, "epsilon spent": spent}
        if step.privacy_unit not in OWNED:
            # For comparison with accountants that do not count the draw of examples.
            facts["epsilon without counting the draw of examples"] = uncounted
        facts["target"] = f"epsilon {budget.epsilon:.15g}, delta {budget.delta:.15g}"
        if budget.is_private and taken < budget.num_steps:
            facts["ended early"] = in_words.owed_by_plan(budget.epsilon, budget.delta)
        if budget.before:
            noises = [one.noise_multiplier for one in budget.before]
            facts["noise multipliers of statistics"] = list(map(float, noises))
    facts["noise"] = trainer.noise
    facts["protected"] = f"{protected_unit(step)} ({step.neighboring_relation})"
    if budget.takes_steps:
        facts["clip norm"] = _clip_norm(trainer)
        facts["clipped"] = f"each {step.clip_unit}"
        if not adapts:
            facts["noise multiplier"] = step.noise_multiplier
            facts[_UNITS] = trainer.sampler.expected_units
        if step.bands is not None:
            facts["bands"] = f"{step.bands.count}, of groups of {step.bands.level}"
    if trainer.is_seeded or not budget.is_private:
        facts["not private"] = SEEDED if budget.is_private else "there is no noise"
    return plain(facts)


def _released_facts(facts: Mapping[str, Any], budget: PrivacyBudget) -> dict[str, Any]:
    """The facts of a planned run that disclose no private number of units."""
    hidden: set[str] = set()
    if not mean_units_are_public(budget.step):
        hidden.add(_UNITS)
    if public_budget(budget) is None:  # the noise was calibrated to private sizes
        hidden |= {"steps", "noise multiplier", _UNITS}
        hidden |= {name for name in facts if name.startswith("epsilon ")}
    return {name: value for name, value in facts.items() if name not in hidden}


def _clip_norm(trainer: Any) -> float | str:
    clipping, first = trainer.clipping, trainer.l2_clip_norm
    if clipping.kind == NORMALIZE:
        return f"{first:g}, of all contributions"
    if not clipping.counts:
        return first
    last = f"{trainer.clip_norm:.4g} at last"
    return f"{first:g} at first, {last}: by the {clipping.quantile:g} quantile"


def meaning_of(trainer: Any) -> str:
    """Returns in words what the protection means for one unit."""
    budget, taken = trainer.budget, trainer.num_steps_charged
    unit = budget.step.privacy_unit
    if not budget.is_private or trainer.is_seeded:
        return "not private"
    if isinstance(budget, AdaptiveBudget):
        return f"Every single {unit} is protected, however the run chose its steps."
    false_alarms = in_words.FALSE_ALARMS
    found = true_positive_rate(budget.run(taken), false_positive_rate=false_alarms)
    rate = np.ceil(1000 * float(found)) / 10
    alarms = f"{100 * false_alarms:g} %"
    return (
        f"Every single {unit} is protected ({budget.step.neighboring_relation}). "
        "Somebody who sees all releases and knows\nall other data detects its presence "
        f"with probability at most {rate:.1f} %,\nat a false alarm rate of {alarms} "
        f"(guessing: {alarms})."
    )


def epsilon_without_last_stage(budget: PrivacyBudget, num_steps: int) -> float:
    """Returns epsilon if all examples of a drawn unit took part, an *upper bound*."""
    if budget.step.privacy_unit in OWNED:
        return float(budget.spent(num_steps))
    step = budget.step.in_group
    last = step.design.schemes[-1]
    if isinstance(last, WithoutReplacement):
        last = dataclasses.replace(last, size=_ALL_EXAMPLES, population_is_exact=False)
    else:  # Poisson, or epochs
        last = Poisson(last.name, sampling_probability=1.0, population=last.population)
    sampling = step.design.with_scheme(last)
    whole = dataclasses.replace(step, sampling=sampling, small_units="keep")
    charged = int(budget.owed(num_steps))
    before = min(charged, len(budget.before))
    charged = before + budget.step.uses(charged - before)
    return float(dataclasses.replace(budget, step=whole).spent(charged))


# --- The statement ---


def privacy_statement(
    budget: PrivacyBudget | AdaptiveBudget,
    num_steps: int = 0,
    *,
    is_seeded: bool = False,
    has_default_normalizer: bool = False,
    for_release: bool = False,
    noise: str = DISCRETE,
    clipping: ClippingConfig | None = None,
    people: PersonBounds | None = None,
    truncation: Truncation | None = None,
    fixed: Sequence[str] = (),
) -> str:
    """Returns what a run protects, how well and on what conditions (Markdown).

    Epsilon in it is an *upper bound*. ``budget`` is a plan, of which ``num_steps`` were
    charged, or an adaptive budget after all charges. With ``for_release`` the statement
    leaves out what was computed from private sizes, such as ``people``, which is what
    people in the data own. ``fixed`` names the checks that use the same episodes each
    time.
    """
    clipping, adapts = clipping or _FIXED, isinstance(budget, AdaptiveBudget)
    texts = ["\n".join(opening(is_private=budget.is_private, is_seeded=is_seeded))]
    if not budget.is_private:
        return _page(texts)
    about_people = list[str]()
    if isinstance(budget, AdaptiveBudget):
        first, has_drawn = budget.first, True
        texts += _of_adaptive(budget, noise, fixed, clipping)
        block = "\n".join(
            [
                textwrap.fill(f"{name:<12} {text}", _WIDTH, subsequent_indent=13 * " ")
                for name, text in in_words.budget_in_words(budget)
                if name != in_words.TAKEN  # which the table says
            ]
            + listed(CONDITIONS, in_words.adaptive_preconditions(budget))
        )
    else:
        public = public_budget(budget) if for_release else budget
        if public is None:
            return _page(texts + _unsized(budget))
        first, has_drawn = public.before, num_steps > len(public.before)
        report = report_of_budget(
            public,
            int(public.owed(num_steps)),
            None if for_release else people,
            has_default_normalizer=has_default_normalizer,
        )
        texts += _of_plan(public, num_steps, report, noise, clipping)
        block = str(report)
        if people is not None:
            about_people = [_of_a_person(report, people, for_release=for_release)]
    texts.append(
        f"The run released {'the noised sums and ' * bool(first)}the parameters"
        f"{' and the clip norm' * clipping.counts} after every step"
        f"{', the noisy scores, and its choices' * adapts}. The guarantee does not "
        "cover what is not released: the full log, which holds losses and norms of "
        f"private data; {'which examples each step drew; ' * has_drawn}and scores on "
        f"held-out data{' without noise' * adapts}, which reveal something about the "
        "people in these. Sizes in this statement come from the config. If they were "
        "counted in the data, the guarantee does not cover them."
    )
    texts += about_people
    if truncation:
        texts.append(bounded(truncation, for_release=for_release))
    return _page(texts, block)


def _of_plan(
    budget: PrivacyBudget,
    num_steps: int,
    report: PrivacyReport,
    noise: str,
    clipping: ClippingConfig,
) -> list[str]:
    """Paragraphs about a plan."""
    texts, num_charged = list[str](), int(budget.owed(num_steps))
    if num_charged != num_steps:
        texts.append(
            f"It ended after {num_steps:,} steps, within an epoch and not by its plan, "
            f"and is charged for {num_charged:,}: the end may depend on what was "
            "released."
        )
    before = min(len(budget.before), num_steps)
    is_early, epsilon = num_steps < budget.num_steps, report.epsilon
    if is_early:
        epsilon = max(budget.epsilon, epsilon)
    kind, bits = _NOISES[noise]
    words = _guarantee(report, epsilon, "the training data", report.delta)
    words += f" The target was epsilon <= {budget.epsilon:.15g}."
    if is_early:
        words += (
            f" It ended after {num_steps:,} of {budget.num_steps:,} steps, which alone "
            f"cost epsilon {upward(report.epsilon)}: "
            f"{in_words.owed_by_plan(budget.epsilon, budget.delta)}."
        )
    texts.append(words)
    deviations, replaced = dict[str, list[str]](), ""
    for step in budget.before[:before]:
        deviation = step.noise_multiplier * (norm := contribution_norm(step))
        replaced = _REPLACED if norm < 1 else replaced
        deviations.setdefault(str(step.clip_unit), []).append(f"{deviation:.5g}")
    joined = _JOINED.get(str(budget.step.privacy_unit), "")
    noises = (f"{', '.join(each)} for each {of}" for of, each in deviations.items())
    if before:
        texts.append(
            f"Each of {before} private statistics is one sum over all of the data, in "
            f"which each contribution has norm 1 or less. To the sums {kind} was added,"
            f" of standard deviation {'; '.join(noises)}."
            f"{joined * (GIVEN in deviations)}{replaced}"
        )
    if num_steps > before:
        texts.append(
            f"In each of {num_steps - before:,} gradient steps "
            f"{clipped_and_noised(clipping, kind, budget.step)}. The draws are secret, "
            "and the sampler that made them is the one that is accounted."
        )
    return [*texts, bits]


def _of_adaptive(
    budget: AdaptiveBudget, noise: str, fixed: Sequence[str], clipping: ClippingConfig
) -> list[str]:
    """Paragraphs about an adaptive budget."""
    given = dict.fromkeys(budget.first, "the contribution")
    given |= dict.fromkeys(budget.checks, "the score")
    menu = ["| option | noise multiplier | clipped | taken |", "|---|---|---|---|"]
    menu += [
        f"| {name} | {float(step.noise_multiplier):.5g} | "
        f"{given.get(name, 'the gradient')} of each `{step.clip_unit}` | "
        f"{budget.taken[name]:,} |"
        for name, step in budget.options.items()
    ]
    return [
        _guarantee(budget.a_step, budget.epsilon, "its data", budget.delta),
        "The run chose each step in view of its earlier releases. The options were "
        "fixed before the first step, and the guarantee holds for the worst way to "
        "choose among them. So it is the same after every step, and also if the run "
        "ended early.",
        "\n".join(menu),
        " ".join(adaptive_methods(budget, noise, fixed, clipping)),
    ]


def adaptive_methods(
    budget: AdaptiveBudget,
    noise: str,
    fixed: Sequence[str],
    clipping: ClippingConfig | None,
) -> list[str]:
    """Returns sentences on how an adaptive run protects, and what it does not."""
    unit, texts = budget.a_step.privacy_unit, list[str]()
    if unit != PERSON:
        texts.append(_not_a_person(unit))
    texts.append(_NOISES[noise][1])
    if clipping is not None and clipping.counts:
        texts.append(
            "Contributions are clipped to a norm that follows the "
            f"{clipping.quantile:g} quantile of their norms, by a count with the same "
            "noise."
        )
    return texts + [
        f"The episodes of `{name}` are the same each time. Every protected unit is in "
        "each of them, and the accounting does not rely on a secret draw."
        for name in fixed
    ]


def opening(*, is_private: bool, is_seeded: bool) -> list[str]:
    """Returns the first lines of a statement, which say so if a run is not private."""
    lines = ["# Privacy of this run", ""]
    if not is_private:
        line = "**Not private**: it was trained without noise (epsilon is infinite)."
        return [*lines, line]
    if is_seeded:
        lines += [
            "**Not private**: the draws and the noise came from a fixed seed. Anybody "
            "who knows the seed can subtract the noise. The rest of this statement "
            "holds for the same run with fresh randomness.",
            "",
        ]
    return lines


def bounded(truncation: Truncation, *, for_release: bool) -> str:
    """Returns how people's data were bounded; numbers of the data only if private."""
    words = (
        f"Each person's examples are within bounds, {_where(truncation.bounds)}. "
        "Examples beyond these bounds were left out before training, by a rule that "
        "looks at one person at a time and at no example's content."
    )
    return words if for_release else f"{words} Here: {truncation}."


def report_of_budget(
    budget: PrivacyBudget,
    num_charged: int,
    people: PersonBounds | None = None,
    *,
    has_default_normalizer: bool = False,
) -> PrivacyReport:
    """Returns the report of a run's first ``num_charged`` steps."""
    taken, counts = budget.run(num_charged), Counter[Any]()
    for step, count in zip(taken.steps, taken.counts, strict=True):
        counts[step] += int(count)
    run = compose(*(+counts or dict.fromkeys(taken.steps[:1], 0)).items())
    report = privacy_report(run, delta=budget.delta, people=people)
    levels: dict[str, float | str] = dict(report.epsilon_by_level)
    unit, step = report.privacy_unit, budget.step
    # Units below the protected level have no slots: an empty one would change the
    # rates. People's slots are those of the last level.
    if step.neighboring_relation == "zero_out" and unit not in OWNED:
        finer = list(levels)[list(levels).index(unit) + 1 :]
        reason = f"only slots of the level {unit!r} were drawn"
        levels |= dict.fromkeys(finer, reason)
    if unit == PERSON and budget.before:
        levels.pop(GIVEN, None)  # all that a person contributes: the person again
    if has_default_normalizer:
        reason = (
            "the divisor was the mean number of clip units a step, which is private at "
            "this level; set normalizer"
        )
        levels |= {
            level: reason
            for level, value in levels.items()
            if not isinstance(value, str) and not mean_units_are_public(step, level)
        }
    return dataclasses.replace(report, epsilon_by_level=levels)


def people_of(data: ExampleTable, unit: str) -> PersonBounds | None:
    """Returns what people own (private), if less than a person is protected."""
    if data.owners is None or unit == PERSON or len(data.level_names) > len(BOUNDS):
        return None
    return fitting_bounds(data)


def _page(texts: Sequence[str], block: str = "") -> str:
    """Paragraphs, and a block of code if there is one."""
    shown = [text.strip() for text in texts]
    if block:
        shown.append(f"```\n{block}\n```")
    return "\n\n".join(shown) + "\n"


def _guarantee(
    protected: PrivacyReport | GaussianStep, epsilon: float, data: str, delta: float
) -> str:
    unit, relation = str(protected.privacy_unit), protected.neighboring_relation
    return (
        f"This run is ({upward(epsilon)}, {delta:.15g})-differentially private. Compare"
        f" it with a run with {changed_unit(unit, relation)} in {data}: every outcome "
        "is at most e^epsilon times as likely, plus delta. (So epsilon is in nats, the "
        "unit of natural logarithms.)"
    )


def _unsized(budget: PrivacyBudget) -> list[str]:
    """The statement's paragraphs if the noise was calibrated to private sizes."""
    unit = counted = budget.step.privacy_unit
    if unit in OWNED:
        counted = budget.step.design.level_names[-1]
    return [
        f"This run was trained for ({budget.epsilon:.15g}, {budget.delta:.15g})-"
        f"differential privacy of one `{unit}` more or less, among data sets whose "
        "groups have the sizes of this one or of its neighbours.",
        f"How many `{counted}` units each group has is private, and the accounting used"
        " it. The noise, the number of steps and the epsilon spent are therefore not "
        "for publication, and not in this folder. No epsilon covers that the noise was "
        "chosen by these numbers. To let the accounting rest on public facts alone, "
        "give every draw without replacement a `population`, a public lower bound.",
    ]


def _not_a_person(unit: Any) -> str:
    return (
        f"The guarantee protects one `{unit}`, not a person. A person with several is "
        "protected less."
    )


def _of_a_person(
    report: PrivacyReport, people: PersonBounds, *, for_release: bool
) -> str:
    less = _not_a_person(report.privacy_unit)
    if for_release:
        return less
    found = report.epsilon_by_level.get(PERSON)
    own = f"no epsilon is known ({found})"
    if isinstance(found, float):
        own = f"epsilon {upward(found)}"
    return f"{less} For the person with most data here, {_where(people)}: {own}."


def _where(people: PersonBounds) -> str:
    """Bounds without the words "all examples, "."""
    return bounds_in_words(people).partition(", ")[2]


# --- The page ---


def markdown_report(
    records: Sequence[Mapping[str, Any]],
    *,
    title: str,
    facts: Mapping[str, Any],
    statement: str,
    picture: str | None,
    stages: Sequence[str] = (),
) -> str:
    """Returns the run's private page; ``stages`` are lines of a table of scores."""
    lines = [
        f"# {title}",
        "",
        "*Private: this page shows losses of private training data and scores on "
        "held-out people. Only the folder `release/` may be published.*",
        "",
    ]
    if picture:
        lines += [f"![stages; loss, score and epsilon against the step]({picture})", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {_shown(name, value)} |" for name, value in facts.items()]
    lines += stages
    scores = [
        f"| {record['step']:,} | {upward(float(record['epsilon']))} | "
        f"{record.get('stage', '')} | {split} | {score['name']} "
        f"{digits(score['mean'])} | {digits(score['low'])} to {digits(score['high'])} |"
        for record in records
        for split, score in record.get(HELD_OUT, {}).items()
    ]
    if scores:
        lines += ["", "| step | epsilon | stage | on | score | 95 % interval |"]
        lines += ["|---|---|---|---|---|---|", *scores]
    return "\n".join([*lines, "", statement.replace("# Privacy", "## Privacy", 1)])


def _shown(name: str, value: Any) -> str:
    """A fact with five digits; an epsilon is rounded up."""
    if isinstance(value, list):
        return ", ".join(_shown(name, one) for one in value)
    if not isinstance(value, float):
        return str(value)
    return upward(value, 5) if name.startswith("epsilon") else f"{value:.5g}"

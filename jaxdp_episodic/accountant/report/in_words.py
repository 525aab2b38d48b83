"""A privacy report in plain words, for readers who do not know epsilon."""

from __future__ import annotations

import functools
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.designs import OWNED, WithoutReplacement
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions import gdp
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget, in_words
from jaxdp_episodic.accountant.report.report import PrivacyReport
from jaxdp_episodic.accountant.report.sentences import (
    changed_unit,
    preconditions_of,
    protected_unit,
    upward,
)

GUARANTEE = "guarantee"
TAKEN = "taken"
INFORMATION = "no guarantee; the same steps, had they been fixed in advance"
_PARTS = (
    "Parts: with several budgets the largest one counts. Their options use different "
    "parts of the data, and every protected unit is in one part."
)
_ANSWER = (
    "You must make sure of these: no program can check them all. docs/guarantees.md "
    "explains them."
)
FALSE_ALARMS = 0.01

_WIDTH = 88  # characters per line
# Points of the privacy curve of an adaptive run; more would lower the bound by 1 %.
_POINTS = 9
# Relative; closer epsilons of two levels count as equal.
_APART = 1e-3
Block = str | list[str]  # a line, or several, between two empty lines


def report_in_words(report: PrivacyReport) -> str:
    """Returns the report as Markdown."""
    rows, unknown = {}, list[str]()
    for level, value in report.epsilon_by_level.items():
        if isinstance(value, str):
            unknown.append(f"No epsilon is known for one whole `{level}` ({value}).")
        else:
            shares = _attacks(report.level_runs[level], method=report.method)
            rows[level] = _epsilon(value), *map(_percent, shares)
    blocks = _opening(
        protected=report.protected,
        released=f"what the {sum(report.num_steps):,} steps of this run release",
        changed=changed_unit(report.privacy_unit, report.neighboring_relation),
        cost=f"{_epsilon(report.epsilon)} at delta {report.delta:.15g}",
        attacks=rows[report.privacy_unit][1:],
    )
    if len(rows) > 1:
        table = [
            "| one | epsilon | right answers, if equally likely | found with "
            f"{100 * FALSE_ALARMS:g} % false alarms |",
            "|---|---|---|---|",
            *(f"| {level} | {' | '.join(cells)} |" for level, cells in rows.items()),
        ]
        blocks += ["## Whom else it protects, and how well", table]
    blocks += [*unknown, *_reversals(report)]
    return _page(blocks + _conditions(report.preconditions, report.warnings))


def adaptive_in_words(budget: AdaptiveBudget, facts: Sequence[str] = ()) -> str:
    """Returns the report of an adaptive run before it begins, as Markdown."""
    step = budget.a_step
    blocks = _opening(
        protected=protected_unit(step),
        released="whatever this run releases",
        changed=changed_unit(str(step.privacy_unit), step.neighboring_relation),
        cost=f"{_epsilon(budget.epsilon)} at delta {budget.delta:.15g}",
        # With several runs each unit is in the data of one run.
        attacks=map(_percent, np.max([_attacks(run) for run in budget.runs], axis=0)),
    )
    table = ["| what | noise multiplier | clipped | at most |", "|---|---|---|---|"]
    for name, number in budget.left.items():
        option = budget.options[name]
        noise = f"{float(option.noise_multiplier):.5g}"
        table.append(f"| {name} | {noise} | each {option.clip_unit} | {number:,} |")
    blocks += [
        "## What is chosen on the way",
        "The run may choose its steps based on what it has released. Its options are "
        "fixed before the first one, and the statements above hold for the worst "
        "strategy: they are the same wherever the run ends.",
        table,
    ]
    return _page(blocks + _conditions(adaptive_preconditions(budget), facts))


def _opening(
    protected: str, released: str, changed: str, cost: str, attacks: Iterable[str]
) -> list[Block]:
    """The sections on who is protected, and how well: two attacks' success rates."""
    right, found = attacks
    alarms = f"{100 * FALSE_ALARMS:g} %"
    return [
        "# Privacy in words",
        "## What is protected",
        f"This protects {protected}: {released} would be nearly as likely "
        f"with {changed} in the training data. This holds whatever else an "
        "attacker knows, and whatever is done with the release.",
        "## How well",
        f"Epsilon is {cost}; smaller is better. "
        "Suppose that an attacker sees everything that is released, knows all of the "
        "rest of the data, and asks whether the data were changed in this way:",
        [
            f"* If both were equally likely, at most {right} of the answers are right; "
            "without the release 50 % are.",
            f"* With a false alarm in {alarms} of the cases in which nothing was "
            f"changed, at most {found} of the changes are found; without the release "
            f"{alarms} are.",
        ],
    ]


def _conditions(preconditions: Iterable[str], warnings: Iterable[str]) -> list[Block]:
    """The sections of preconditions and warnings."""
    needed, noted = ([f"* {t}" for t in texts] for texts in (preconditions, warnings))
    also: list[Block] = ["## Also to note", noted] if noted else []
    return ["## It holds if", _ANSWER, needed, *also]


def _attacks(run: Any, **how: Any) -> tuple[float, float]:
    """Shares of right answers and of detected changes, for the worst strategy."""
    same = run.composition() if isinstance(run, AdaptiveRun) else run
    if same is not None:
        found = gdp.true_positive_rate(same, false_positive_rate=FALSE_ALARMS, **how)
        return 0.5 + float(gdp.advantage(same, **how)) / 2, float(found)
    # Each point of the curve gives a bound; beyond the last one it is 1 or more.
    epsilons = np.linspace(0.0, -math.log(FALSE_ALARMS), _POINTS)
    deltas = run.delta(epsilon=epsilons)
    _, found = gdp.attack_rates(epsilons, deltas, np.asarray(FALSE_ALARMS))
    return 0.5 + float(deltas[0]) / 2, float(found)


def _epsilon(value: float) -> str:
    return "infinite" if math.isinf(value) else upward(value, 4, zeros=True)


def _percent(share: float) -> str:
    """A share in percent, rounded up to a tenth."""
    return f"{min(np.ceil(1000 * share) / 10, 100.0):g} %"


def _reversals(report: PrivacyReport) -> Iterator[Block]:
    """Sections that explain why a unit costs more than a coarser one, if it does."""
    # A person, or an original, may be in several of the coarser units.
    values = report.epsilon_by_level.items()
    known = {k: v for k, v in values if isinstance(v, float) and k not in OWNED}
    steps = report.level_runs[report.privacy_unit].gaussian_steps
    for coarse, fine in itertools.combinations(known, 2):
        if known[fine] > known[coarse] * (1 + _APART):
            reasons = [text for step in steps for text in _reasons(step, coarse, fine)]
            yield f"## Why one {fine} costs more than one {coarse}"
            yield [f"* {reason}" for reason in dict.fromkeys(reasons)]


def _reasons(step: GaussianStep, coarse: str, fine: str) -> Iterator[str]:
    """Reasons why a step hides a unit better than one of its parts."""
    names, clip = list(step.design.level_names), str(step.clip_unit)
    depth = names.index(clip) if clip in names else -1  # the whole step is clipped
    if coarse in names and names.index(coarse) < depth:
        yield (
            f"The sampling above the clip unit `{clip}` may be visible: the "
            f"contributions of everything drawn from a `{coarse}` may show that it was "
            f"drawn. Its draw amplifies the privacy of a whole `{coarse}`. For one "
            f"`{fine}` of a unit that stays it only multiplies delta. "
            f'With `clip_unit = "{coarse}"` it would amplify both.'
        )
    schemes = {scheme.name: scheme for scheme in step.design.schemes}
    is_replaced = isinstance(schemes.get(fine), WithoutReplacement) or (
        fine in names and names.index(fine) > depth
    )
    if step.neighboring_relation == "add_remove" and is_replaced:
        yield (
            f"If a `{fine}` leaves, it is replaced: another one is drawn in its place, "
            "or its clip unit gives another contribution. The two may differ by twice "
            f"the clip norm. If a `{coarse}` leaves, its contributions vanish without "
            "a replacement."
        )


def _page(blocks: Iterable[Block]) -> str:
    """Joins blocks; wraps lines other than rows of tables and headings."""
    fill = functools.partial(textwrap.fill, width=_WIDTH, break_on_hyphens=False)

    def wrapped(text: str) -> str:
        line = " ".join(text.splitlines())  # the name of a level may break lines
        if line.startswith(("|", "#")):
            return line
        return fill(line, subsequent_indent="  " * line.startswith("* "))

    every = ([block] if isinstance(block, str) else block for block in blocks)
    return "\n\n".join("\n".join(map(wrapped, lines)) for lines in every)


# --- An adaptive run after each of its steps ---


def owed_by_plan(epsilon: float, delta: float, *, together: bool = False) -> str:
    """Returns the text for a fixed run that ended before its planned end."""
    return (
        "this cost holds if the end did not depend on what it released (a plan, a "
        "crash, a bill). A run that was stopped because of a release, such as a score, "
        f"costs its whole plan: epsilon {upward(epsilon, 5)} at delta "
        f"{delta:.15g}" + " together" * together
    )


def budget_in_words(budget: AdaptiveBudget) -> list[tuple[str, str]]:
    """Returns (name, text) pairs about the budget, the guarantee first."""
    guaranteed = (
        f"epsilon {upward(budget.epsilon)} at delta {budget.delta:.15g}, however the "
        "steps are chosen and whenever the run ends; it does not change"
    )
    found, so_far = [(GUARANTEE, guaranteed)], []
    for run in budget.runs:
        # Charged options come first.
        taken = sorted(run.taken.items(), key=lambda one: not one[1])
        each = in_words(
            f"{number:,} of {name!r} ({budget.most(name):,} left)"
            for name, number in taken
        )
        if run.budget is not None:
            each += f"; {run.spent:,} of {run.budget:,} spent"
        found.append((TAKEN, each))
        if run.odometer is not None:
            read = (
                f"so far at most epsilon {upward(run.epsilon_so_far)}, whenever it is "
                f"read, at delta {upward(run.odometer_interval()[1])}; fixed before "
                "the first release"
            )
            so_far.append(("odometer", read))
    known = f"epsilon {upward(budget.epsilon_taken())} ({INFORMATION})"
    return [*found, *so_far, ("information", known)]


def adaptive_preconditions(budget: AdaptiveBudget) -> list[str]:
    """Returns the preconditions of the guarantee that cannot be checked."""
    every = budget.composed(dict.fromkeys(budget.options, 1))
    return [*preconditions_of(every, chooses=True), *[_PARTS] * (len(budget.runs) > 1)]

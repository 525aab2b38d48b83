"""``epsilon``, ``calibrate`` and ``log``: requests, and what runs were charged."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.runs import parts_of
from jaxdp_episodic.accountant.describe.step import STEP, ComposedSteps
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.accountant.report import in_words
from jaxdp_episodic.accountant.report.sentences import downward, protected_unit, upward
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.files.table_file import check_suffix
from jaxdp_episodic.tools.cli import command
from jaxdp_episodic.tools.cli.flags import UsageError
from jaxdp_episodic.tools.requests import batch, request as requests
from jaxdp_episodic.tools.sweep.description import numeric_fields
from jaxdp_episodic.trainer.run import ledger_file, ledgers as runs

_FACTS = ("epsilon", "delta", "num_steps")
_FOR = {  # what an option is for
    "delta": ("FILE.toml", "--ledger"),
    "num_steps": ("FILE.toml",),
    "json": ("FILE.toml", "--ledger"),
    "out": ("--batch", "--per-unit"),
    "method": ("--batch", "--ledger"),
}


def do_epsilon(o: command.Options) -> list[str]:
    """The command ``epsilon``."""
    o.subject = o.file or o.batch or next(iter(o.ledger), "")
    sources = {"FILE.toml": o.file, "--batch": o.batch, "--ledger": o.ledger}
    source, *others = [name for name, value in sources.items() if value] or [""]
    if others or not source:
        raise UsageError(
            "give exactly one of FILE.toml, --batch FILE and --ledger FILE"
        )
    o.refuse_others(source, {"per_unit": ("FILE.toml",)})
    asked = "--per-unit" if o.per_unit else source
    o.refuse_others(asked, _FOR)
    if asked in _FOR["out"]:
        if o.out is None:
            raise UsageError(f"{asked} needs --out FILE")
        o.left_behind = lambda: "; nothing was written"
        # Before the work, so that a wrong name costs no time.
        check_suffix(o.out)
        o.out.parent.mkdir(parents=True, exist_ok=True)
        if not o.batch:
            return [*_per_unit(o), f"written: {o.out}"]
        with command.waiting("answering") as say:
            number, failed, first = batch.answer_file(
                o.batch,
                o.out,
                method=o.method or "rdp",
                on_rows=lambda rows: say(f"{rows:,} rows answered"),
            )
        lines = [f"{number:,} rows, {failed:,} with an error"]
        lines += [f"the first: {first}"] if first else []
        return [*lines, f"written: {o.out}"]
    if o.ledger:
        return _of_ledgers(o)
    given = {"delta": o.delta, "num_steps": o.num_steps}
    return _of_file(o, requests.EpsilonRequest, **given)


def do_calibrate(o: command.Options) -> list[str]:
    """The command ``calibrate``."""
    return _of_file(o, requests.CalibrationRequest)


def do_log(o: command.Options) -> list[str]:
    """The command ``log``."""
    with ledger_file.refusing(o.dir), ledger_file.run_file(o.dir) as file:
        records = [{"kind": "run", **file.facts}]
        for name, text, _ in file.steps.values():
            records.append({"kind": "step", "name": name, "step": json.loads(text)})
        for opening in file.openings():
            records.append({"kind": "opening", "charged": 0, **opening})
        for charge in file.charges():
            row = {"kind": "charge", "number": charge.number}
            row |= {"step": file.steps[charge.step][0], "process": charge.session}
            records.append(row | {"hash": charge.hash.hex()})
        records += [{"kind": "log", **record} for record in file.log()]
    return [json.dumps(record, allow_nan=False) for record in records]


def _per_unit(o: command.Options) -> list[str]:
    """Writes each protected unit's own epsilon."""
    given = {"delta": o.delta, "num_steps": o.num_steps}
    request = requests.read_request(o.file, requests.EpsilonRequest, **given)
    if request.delta is None:
        raise ValueError("--per-unit computes epsilons: the request needs a delta")
    columns, rounding = batch.unit_budgets(
        request.planned("--per-unit"),
        num_steps=request.num_steps,
        delta=request.delta,
        method=request.method,
    )
    batch.write_columns(o.out, columns)
    epsilons = columns["epsilon"]
    largest = upward(float(epsilons.max(initial=0.0)), 5)
    lines = [f"{epsilons.size:,} units, largest epsilon {largest}"]
    if rounding:
        share = upward(rounding, 2)
        lines.append(f"rates are rounded up, by at most {share} of their value")
    if requests.steps_of(request)[0].neighboring_relation == "add_remove":
        lines.append("private: under add_remove the table discloses sizes")
    return lines


def _of_file(o: command.Options, kind: Any, **given: Any) -> list[str]:
    """Answers the request in a file; ``given`` replaces its keys."""
    with _validation.recorded_warnings() as warned, command.waiting():
        request = requests.read_request(o.file, kind, **given)
        answer = request.answer()
    return _answer_lines(request, answer, warned, as_json=o.json)


def _of_ledgers(o: command.Options) -> list[str]:
    """Answers what the charged steps of some runs cost together."""
    with command.waiting():
        ledgers = runs.read_ledgers(list(o.ledger))
    alone = ledgers.contents[0] if len(o.ledger) == 1 else None
    if alone is not None and (budget := alone.adaptive_taken) is not None:
        if o.method is not None:
            raise UsageError("--method does not go with an adaptive run")
        return _adaptive_lines(alone, budget, o)
    with _validation.recorded_warnings() as warned, command.waiting():
        step, num_steps = ledgers.run_charged()
        request = requests.EpsilonRequest(
            step=step,
            num_steps=num_steps,
            delta=ledgers.delta if o.delta is None else o.delta,
            method=o.method or "exact",
        )
        answer = request.answer()
        # An epsilon at another delta cannot be compared with the plan's target.
        spent = answer if o.delta is None else None
        caveats = _caveats_on_ledgers(ledgers, spent, request.method)
    target, at = ledgers.planned
    planned = {"planned": {"epsilon": plain(target), "delta": at}}
    lines = [*warned, *caveats]
    return _answer_lines(request, answer, lines, as_json=o.json, more=planned)


def _answer_lines(
    request: requests.Request,
    answer: Any,
    warned: list[str],
    *,
    as_json: bool,
    more: dict[str, Any] | None = None,
) -> list[str]:
    """The answer with warnings, as a table or as JSON; ``more`` goes into the JSON."""
    caveats = [*warned, *requests.caveats_on(request)]
    if as_json:
        document = _document(request, answer, caveats) | (more or {})
        return [json.dumps(document, allow_nan=False)]
    lines = command.facts(_facts(request, answer if np.ndim(answer) == 0 else None))
    if np.ndim(answer):  # one row per setting: the fields that vary, then the answer
        places = numeric_fields(request.step.to_dict()).items()
        given = {name: place.value for name, place in places}
        given |= {name: getattr(request, name) for name in _FACTS}
        varying = {name: v for name, v in given.items() if np.size(v) != 1}
        varying.pop(request.quantity, None)  # a field that the answer replaces
        columns = {
            name: list(map(_shown, np.broadcast_to(v, answer.shape).ravel().tolist()))
            for name, v in varying.items()
        }
        answers = answer.ravel().tolist()
        columns[_label(request)] = [_rounded(request, value) for value in answers]
        rules = ["-" * max(map(len, [n, *cells])) for n, cells in columns.items()]
        cells = zip(*columns.values(), strict=True)
        lines += ["", *command.aligned([tuple(columns), rules, *cells])]
    return lines + [f"warning: {caveat}" for caveat in caveats]


def _document(
    request: requests.Request, answer: Any, caveats: list[str]
) -> dict[str, Any]:
    """The answer as JSON: arrays as nested lists, infinity as "inf"."""
    steps = requests.steps_of(request)
    names = ("calibrate", "level", "num_steps", "delta", "epsilon")
    question = {name: getattr(request, name, None) for name in names}
    people = (step.people.numbers for step in steps if step.people is not None)
    question["people"] = next(people, None)
    return {
        "version": 1,
        **{name: plain(v) for name, v in question.items() if v is not None},
        request.quantity: plain(answer),
        "shape": list(request.shape),
        "method": request.method,
        "privacy_unit": next((step.privacy_unit for step in steps), None),
        "clip_unit": list(dict.fromkeys(step.clip_unit for step in steps)),
        "neighboring_relation": _relation(request),
        "warnings": caveats,
    }


def _relation(request: requests.Request) -> str | None:
    """The relation of the run; None if no part of it names one."""
    named = (part.neighboring_relation for part in parts_of(request.step))
    return next((relation for relation in named if relation is not None), None)


def _facts(request: requests.Request, answer: Any) -> dict[str, str]:
    """The facts of an answer by name, the answer itself first unless it is a grid."""
    steps = requests.steps_of(request)
    rows = {}
    if answer is not None:
        rows[_label(request)] = f"{_rounded(request, answer)}   ({request.nature})"
    for name in _FACTS:
        value = getattr(request, name)
        if value is not None and np.ndim(value) == 0:
            is_target = name == "epsilon" and request.quantity != "delta"
            rows[name.replace("_", " ")] = _shown(value) + " (target)" * is_target
    if isinstance(request.step, ComposedSteps):
        counts = request.step.counts
        rows["num steps"] = " + ".join(str(np.asarray(c).tolist()) for c in counts)
    if isinstance(request.step, AdaptiveRun):
        rows["chosen among"] = ", ".join(request.step.options)
    if len(steps) == 1 and request.quantity != "noise_multiplier":
        noise = steps[0].noise_multiplier
        rows |= {"noise multiplier": f"{noise:g}"} if np.ndim(noise) == 0 else {}
    unit = protected_unit(*steps) if steps else "one unit"
    rows["protected"] = f"{unit} ({_relation(request) or 'as claimed'})"
    if clipped := dict.fromkeys(str(step.clip_unit) for step in steps):
        units = ["the whole step" if c == STEP else f"each {c}" for c in clipped]
        rows["clipped"] = ", then ".join(units)
    return rows | {"method": request.method}


def _label(request: requests.Request) -> str:
    level = getattr(request, "level", None)
    return request.quantity.replace("_", " ") + (f" of {level}" if level else "")


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.15g}"


def _rounded(request: requests.Request, value: float) -> str:
    """A few digits of the answer, rounded to the safe side."""
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    rounded = downward if request.quantity == "rate" else upward
    return rounded(value, 5, zeros=True)


# Relative. If a run's epsilon is further below its target than this, some planned steps
# were not charged. Larger than the tolerance of calibration.
_CALIBRATION_SLACK = 1e-3


def _adaptive_lines(
    content: ledger_file.LedgerContent, budget: AdaptiveBudget, o: command.Options
) -> list[str]:
    """The privacy cost in an adaptive run's ledger, at its delta or another."""
    if o.delta is not None:
        _validation.open_unit_array("delta", o.delta)
        budget = dataclasses.replace(budget, delta=o.delta)
    step, warned = budget.a_step, caveats_on_ledger(content)
    if not o.json:
        rows = [
            *in_words.budget_in_words(budget),
            ("protected", f"{protected_unit(step)} ({step.neighboring_relation})"),
            ("ended", "by its own choice" if content.has_ended else "not yet"),
        ]
        return [*command.facts(rows), *(f"warning: {text}" for text in warned)]
    prices = [run for run in budget.runs if run.budget is not None]
    document = {
        "version": 1,
        "delta": budget.delta,
        "epsilon": plain(budget.epsilon),  # the guarantee
        "taken": budget.taken,
        "left": budget.left,
        "price": next(({"spent": r.spent, "budget": r.budget} for r in prices), None),
        "odometers": [
            {"epsilon": run.epsilon_so_far, "delta": run.odometer_interval()[1]}
            for run in budget.runs
            if run.odometer is not None
        ],
        "information": {
            "epsilon": plain(budget.epsilon_taken()),
            "meaning": in_words.INFORMATION,
        },
        "has_ended": content.has_ended,
        "privacy_unit": step.privacy_unit,
        "neighboring_relation": step.neighboring_relation,
        "warnings": warned,
    }
    return [json.dumps(document, allow_nan=False)]


def _caveats_on_ledgers(
    ledgers: runs.LedgersContent, spent: Any | None, method: str
) -> list[str]:
    """Warnings that belong to an epsilon computed from ledgers."""
    caveats, are_several = [], len(ledgers.contents) > 1
    for name, content, beginning in zip(*ledgers, strict=True):
        named = f"{name}: " if are_several else ""
        caveats += [named + text for text in caveats_on_ledger(content)]
        if beginning is None:
            continue
        other = ledgers.names[beginning.of]
        if common := sum(beginning.charged):
            caveats.append(
                f"{name} has its first {common:,} steps in common with {other}: they "
                "are counted once"
            )
        if not beginning.is_all:
            caveats.append(
                f"{name} and {other} may have more steps in common: their processes "
                "have no names, so steps that both charged are counted twice"
            )
    if are_several:
        caveats.append(
            "composed as if all runs had been planned at the start: this is no "
            "guarantee if one run was designed in view of what another released; a "
            "book that is kept from the first run on gives one (jaxdp-episodic book)"
        )
    if ledgers.num_shared_epochs:
        caveats.append(
            "an epoch that several copies of a run continued is counted once for each "
            f"copy that released from it; counted so: {ledgers.num_shared_epochs:,}"
        )
    early = []
    for name, content in zip(ledgers.names, ledgers.contents, strict=True):
        if (own := spent) is None or are_several:
            step, num_steps = content.run_charged()
            own = epsilon(step, num_steps=num_steps, delta=content.delta, method=method)
        if float(own) < content.target_epsilon * (1 - _CALIBRATION_SLACK):
            target = f"{content.target_epsilon:.15g} at delta {content.delta:.15g}"
            early.append(
                f"{name}: {_validation.steps_are(content.charged)} charged, epsilon "
                f"{upward(float(own), 5)}; planned was {target}"
            )
    if early:
        early.append(in_words.owed_by_plan(*ledgers.planned, together=are_several))
    return caveats + early


def caveats_on_ledger(content: ledger_file.LedgerContent) -> list[str]:
    """Returns warnings that belong to an epsilon computed from one ledger."""
    of_search = content.search is not None
    # An adaptive run has whole epochs only.
    accounted = content.owed if content.adaptive is None else content.charged
    rows = {
        "not private: draws and noise came from a fixed seed; the answer holds for the "
        "same run with fresh entropy": content.is_seeded,
        "one run of a search: the search's own epsilon, in its release/privacy.md, "
        "counts the other runs and the choice among them; this one does not": of_search,
        f"{'the search as a whole' if of_search else 'the run'} is charged to the book "
        f"{content.book}, whose guarantee holds for all of its runs together "
        "(jaxdp-episodic book show); this one is of the run alone": (
            content.book is not None
        ),
        f"{content.charged:,} steps were charged, the last within an epoch, and "
        f"{accounted:,} are accounted, to the end of the epoch or of the plan: an "
        "end that was not planned may depend on what was released": accounted
        > content.charged,
        "the run was not closed: it is running or was killed; an older copy of its "
        "file shows fewer steps than were charged": not content.is_closed,
    }
    return [text for text, holds in rows.items() if holds]

"""An answer as text: a table for a person, a document for a program."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.menu import parts_of
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.serialization import spec_fields
from jaxdp_episodic.accountant.describe.spec import Spec
from jaxdp_episodic.accountant.describe.step import STEP, ComposedSteps
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.report.protected import protected_unit
from jaxdp_episodic.accountant.report.rounding import downward, upward
from jaxdp_episodic.files.json_file import plain
from jaxdp_episodic.tools.cli.command import aligned, facts
from jaxdp_episodic.tools.requests.request import CalibrationRequest, Request, steps_of


def answer_document(
    request: Request, answer: Any, caveats: list[str]
) -> dict[str, Any]:
    """Returns the answer for a program: arrays as nested lists, infinity as "inf"."""
    units = {part.privacy_unit for part in steps_of(request)}
    names = ("calibrate", "level", "num_steps", "delta", "epsilon")
    asked = {name: plain(getattr(request, name, None)) for name in names}
    bounds = (step.people for step in steps_of(request))
    people = next((one for one in bounds if one is not None), None)
    asked["people"] = None if people is None else plain(people.numbers)
    return {
        "version": 1,
        **{name: value for name, value in asked.items() if value is not None},
        request.quantity: plain(answer),
        "shape": list(request.shape),
        "method": request.method,
        "privacy_unit": next(iter(units), None),
        "clip_unit": list(dict.fromkeys(step.clip_unit for step in steps_of(request))),
        "neighboring_relation": _relation(request),
        "warnings": caveats,
    }


def _relation(request: Request) -> str | None:
    """The relation of the run, or None where no part of it names one."""
    named = (part.neighboring_relation for part in parts_of(request.step))
    return next((relation for relation in named if relation is not None), None)


def answer_table(request: Request, answer: Any, caveats: list[str]) -> str:
    """Returns the answer for a person."""
    varying = {k: v for k, v in _numbers(request) if np.size(v) != 1}
    varying.pop(request.quantity, None)  # of the step, replaced by the answer
    lines = facts(_facts(request, answer if np.ndim(answer) == 0 else None))
    if np.ndim(answer):
        lines += ["", *_grid(request, answer, varying)]
    lines += [f"warning: {caveat}" for caveat in caveats]
    return "\n".join(lines)


def _facts(request: Request, answer: Any) -> dict[str, str]:
    """Names and what is said, the answer first unless it is a grid."""
    steps = steps_of(request)
    rows = {}
    if answer is not None:
        rows[_label(request)] = f"{_rounded(request, answer)}   ({request.nature})"
    for name in ("epsilon", "delta", "num_steps"):
        value = getattr(request, name)
        if value is not None and np.ndim(value) == 0:
            is_target = name == "epsilon" and isinstance(request, CalibrationRequest)
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
    clipped = dict.fromkeys(str(step.clip_unit) for step in steps)
    if clipped:
        units = ["the whole step" if c == STEP else f"each {c}" for c in clipped]
        rows["clipped"] = ", then ".join(units)
    return rows | {"method": request.method}


def _grid(request: Request, answer: np.ndarray, varying: dict[str, Any]) -> list[str]:
    """One row a setting: the fields that vary, then the answer."""
    columns = {
        name: [
            _shown(v) for v in np.broadcast_to(values, answer.shape).ravel().tolist()
        ]
        for name, values in varying.items()
    }
    columns[_label(request)] = [_rounded(request, v) for v in answer.ravel().tolist()]
    rules = ["-" * max(map(len, [name, *cells])) for name, cells in columns.items()]
    return aligned([tuple(columns), rules, *zip(*columns.values(), strict=True)])


def _numbers(value: Any, name: str = "", prefix: str = "") -> list[tuple[str, Any]]:
    """All numeric fields of a request, named as in its file: "school.size"."""
    if value is None or isinstance(value, Population | AdaptiveRun | str | bool):
        return []
    if isinstance(value, Spec):
        level = getattr(value, "name", None)
        prefix += f"{level}." if level else f"{name}." if name.endswith("]") else ""
        parts = [_numbers(getattr(value, n), n, prefix) for n in spec_fields(value)]
    elif isinstance(value, tuple):
        parts = [_numbers(v, f"{name}[{i}]", prefix) for i, v in enumerate(value)]
    else:
        return [(prefix + name, value)]
    return [found for part in parts for found in part]


def _label(request: Request) -> str:
    if isinstance(request, CalibrationRequest) and request.level is not None:
        return f"rate of {request.level}"
    return request.quantity.replace("_", " ")


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _rounded(request: Request, value: float) -> str:
    """A few digits of the answer, rounded to the private side."""
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    rounded = downward if request.quantity == "rate" else upward
    return rounded(value, 5, zeros=True)

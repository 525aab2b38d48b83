"""What is said about the privacy of one run, and how it reads."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_WIDTH = 88
SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class WorstPath:
    """The path through the tree that decides epsilon.

    Attributes:
      units: level name to id (or place) of the units on one such path, top to bottom.
        It ends above the protected level if nobody is there now: a unit without
        children, which somebody may join. None without a `Population`.
      sizes: level name to the number of units drawn from there; levels that have no
        size are left out.
      rates: for each step of the run, level name to rate.
      inclusion_rate: chance to take part in a step, averaged over the run's steps.
      epsilon: of the privacy unit on this path; nats.
      num_units: protected units on such a path; None without a `Population`.
    """

    units: Mapping[str, Any] | None
    sizes: Mapping[str, int]
    rates: tuple[Mapping[str, float], ...]
    inclusion_rate: float
    epsilon: float
    num_units: int | None


@dataclass(frozen=True, eq=False)
class PrivacyReport:
    """Epsilon at every level, its distribution over units, and what it rests on.

    Every epsilon is an *upper bound*, in nats, at the same ``delta``; rates are exact
    for exact sizes, else upper bounds. Made by `privacy_report`.

    Attributes:
      privacy_unit: level of the protected unit.
      clip_units: level (or "step") whose contributions are clipped, for each step.
      neighboring_relation: "add_remove" or "replace_one".
      method: how epsilon is computed.
      delta: the delta.
      num_steps: how often each step of the run is taken.
      noise_multipliers: of each step.
      epsilon: at the privacy unit: that of the worst path.
      epsilon_by_level: level name to epsilon with that level as the privacy unit, or to
        the reason why it has none.
      num_units: protected units; None without a `Population`, like the following.
      num_paths: distinct paths to them, those that lead to empty units included.
      inclusion_rate_quantiles: share of the units ("min", "5%", ..., "max") to the
        smallest chance to take part in a step that so many units do not exceed. Units
        that may join are not counted. None also if there are no units.
      epsilon_quantiles: the same for epsilon.
      rate_rounding: epsilons of the single units were computed with rates rounded up
        by at most this share; 0 if exact. Epsilon itself is not affected.
      worst_path: the path that decides epsilon.
      unit_epsilons: (num_units,) epsilon of each protected unit, in the order of the
        `Population`; None if not asked for.
      warnings: what the numbers do not show at first sight.
      preconditions: what must be true and the library cannot check.
    """

    privacy_unit: str
    clip_units: tuple[str, ...]
    neighboring_relation: str
    method: str
    delta: float
    num_steps: tuple[int, ...]
    noise_multipliers: tuple[float, ...]
    epsilon: float
    epsilon_by_level: Mapping[str, float | str]
    num_units: int | None
    num_paths: int | None
    inclusion_rate_quantiles: Mapping[str, float] | None
    epsilon_quantiles: Mapping[str, float] | None
    rate_rounding: float
    worst_path: WorstPath
    unit_epsilons: np.ndarray | None
    warnings: tuple[str, ...]
    preconditions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON, with "version" and "type".

        Numbers that JSON lacks are the strings "inf" and "-inf", which Python's
        ``float`` reads; what does not apply is None. In "epsilon_by_level" each level
        has either an "epsilon" or a "not_covered" with the reason.
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["worst_path"] = vars(self.worst_path)
        fields["epsilon_by_level"] = {
            level: {"not_covered" if isinstance(value, str) else "epsilon": value}
            for level, value in self.epsilon_by_level.items()
        }
        return {"version": SCHEMA_VERSION, "type": "PrivacyReport", **_plain(fields)}

    def __str__(self) -> str:
        return "\n".join([
            *_headline(self),
            "",
            *_levels(self),
            *_distribution(self),
            "",
            *_worst(self),
            *_listed("Warnings", self.warnings),
            *_listed("What must be true, and cannot be checked here", self.preconditions),
        ])


def _headline(report: PrivacyReport) -> list[str]:
    """Epsilon, delta, who is protected, and the run."""
    relation = {"add_remove": "added or removed", "replace_one": "replaced"}
    rows = [
        ("protected", f"one {report.privacy_unit}, {relation[_relation(report)]}"),
        ("epsilon", f"{_number(report.epsilon)} at delta {_number(report.delta)}"),
        ("method", f"{report.method} (upper bound)"),
    ]
    steps = zip(
        report.num_steps, report.noise_multipliers, report.clip_units, strict=True
    )
    for count, noise, clip in steps:
        text = f"{count} with noise multiplier {_number(noise)}, clipping each {clip}"
        rows.append(("steps", text.replace("each step", "the whole step")))
    return ["Privacy report", *_aligned(rows)]


def _levels(report: PrivacyReport) -> list[str]:
    rows = [
        (level, f"not covered: {value}" if isinstance(value, str) else _number(value))
        for level, value in report.epsilon_by_level.items()
    ]
    return ["Epsilon by privacy unit", *_aligned(rows)]


def _distribution(report: PrivacyReport) -> list[str]:
    """Quantiles over units, side by side; nothing without a population."""
    rates, epsilons = report.inclusion_rate_quantiles, report.epsilon_quantiles
    if rates is None or epsilons is None:
        return []
    title = (
        f"Over {report.num_units} units ({report.privacy_unit}) on "
        f"{report.num_paths} distinct paths"
    )
    rows = [("share", "inclusion rate", "epsilon")]
    rows += [(q, _number(rates[q]), _number(epsilons[q])) for q in rates]
    if report.rate_rounding:
        up = _number(100 * report.rate_rounding)
        rows.append(("", "", f"(rates rounded up by at most {up} %)"))
    return ["", title, *_aligned(rows)]


def _worst(report: PrivacyReport) -> list[str]:
    """The worst path, named."""
    worst = report.worst_path
    rows = []
    if worst.units is not None:
        names = ", ".join(f"{k} {v!r}" for k, v in worst.units.items()) or "the root"
        rows.append(("units", names if worst.num_units else f"{names} (empty now)"))
        rows.append(("protected units there", str(worst.num_units)))
    if worst.sizes:
        sizes = ", ".join(f"{k} {v}" for k, v in worst.sizes.items())
        rows.append(("drawn out of", sizes))
    for rates in worst.rates:
        text = ", ".join(f"{k} {_number(v)}" for k, v in rates.items())
        rows.append(("rates", text))
    rows.append(("inclusion rate", _number(worst.inclusion_rate)))
    rows.append(("epsilon", _number(worst.epsilon)))
    return ["Worst path", *_aligned(rows)]


def _listed(title: str, texts: tuple[str, ...]) -> list[str]:
    if not texts:
        return []
    marked = [
        textwrap.fill(t, _WIDTH, initial_indent="  * ", subsequent_indent="    ")
        for t in texts
    ]
    return ["", title, *marked]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of columns, indented; the last column is wrapped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=False)
        head = "  " + "".join(cell.ljust(width + 2) for cell, width in cells)
        lines.append(
            textwrap.fill(
                row[-1],
                _WIDTH,
                initial_indent=head,
                subsequent_indent=" " * len(head),
                break_on_hyphens=False,
            )
        )
    return lines


def _relation(report: PrivacyReport) -> str:
    return report.neighboring_relation


def _number(value: float) -> str:
    """Five digits, rounded up: what is printed is a bound as well."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    text = f"{value:.5g}"
    if float(text) >= value:
        return text
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 4)
    return f"{value + step / 2:.5g}"


def _plain(value: Any) -> Any:
    """Tuples as lists, NumPy as Python, infinities as strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

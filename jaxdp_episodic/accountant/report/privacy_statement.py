"""What is said about the privacy of one run, and how it reads."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.files.json_file import plain

SCHEMA_VERSION = 1
CONDITIONS = "It holds if (nothing checks this)"
_WIDTH = 88  # letters a line


@dataclass(frozen=True, eq=False)
class WorstPath:
    """The path through the tree that decides epsilon.

    Attributes:
      units: level name to id (or index) of the units on one such path, top to bottom.
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
class UnitDistribution:
    """Chance to take part and epsilon over the protected units of a `Population`.

    Units that may join where nobody is now are not counted, except as paths. A
    quantile is the smallest value that at least this share of them do not exceed;
    its names are "min", "5%", "25%", "50%", "75%", "95%" and "max".

    Attributes:
      num_units: protected units.
      num_paths: distinct paths, those included that lead to nobody.
      inclusion_rate_quantiles: name to chance to take part in a step, averaged over
        the run's steps. Empty if there are no units, as the next.
      epsilon_quantiles: name to epsilon; *upper bounds*, nats.
      rate_rounding: these epsilons and ``unit_epsilons`` were computed with rates
        rounded up by at most this share; 0 if not at all.
      unit_epsilons: (num_units,) epsilon of each protected unit, in the order of the
        `Population`; *upper bounds*, nats. None if not asked for.
    """

    num_units: int
    num_paths: int
    inclusion_rate_quantiles: Mapping[str, float]
    epsilon_quantiles: Mapping[str, float]
    rate_rounding: float
    unit_epsilons: np.ndarray | None


@dataclass(frozen=True, eq=False)
class PrivacyReport:
    """Epsilon at every level, its distribution over units, and what it rests on.

    Every epsilon is an *upper bound*, in nats, at the same ``delta``; rates are exact
    for exact sizes, else upper bounds. Made by `privacy_report`.

    Attributes:
      privacy_unit: level of the protected unit, or "person".
      protected: the same in words; of a person also which of their examples.
      clip_units: level (or "step") whose contributions are clipped, for each step.
      neighboring_relation: "add_remove", "replace_one" or "zero_out".
      method: how epsilon is computed.
      delta: the delta.
      num_steps: how often each step of the run is taken.
      noise_multipliers: of each step.
      epsilon: at the privacy unit: the largest of all paths.
      epsilon_by_level: level name to epsilon with that level as the privacy unit, or to
        the reason why it has none; "person" first, where bounds of people are known.
      worst_path: the path that decides epsilon; None of a person, who may be on many.
      warnings: what the numbers do not show at first sight.
      preconditions: what must be true and the library cannot check.
      distribution: rates and epsilons over the units; None without a `Population`.
    """

    privacy_unit: str
    protected: str
    clip_units: tuple[str, ...]
    neighboring_relation: str
    method: str
    delta: float
    num_steps: tuple[int, ...]
    noise_multipliers: tuple[float, ...]
    epsilon: float
    epsilon_by_level: Mapping[str, float | str]
    worst_path: WorstPath | None
    warnings: tuple[str, ...]
    preconditions: tuple[str, ...]
    distribution: UnitDistribution | None

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON, with "version" and "type".

        Numbers that JSON lacks are the strings "inf" and "-inf", which Python's
        ``float`` reads; what does not apply is None. In "epsilon_by_level" each level
        has either an "epsilon" or a "not_covered" with the reason.
        """
        fields = dict(vars(self))
        for name in ("worst_path", "distribution"):
            if fields[name] is not None:
                fields[name] = vars(fields[name])
        fields["epsilon_by_level"] = {
            level: {"not_covered" if isinstance(value, str) else "epsilon": value}
            for level, value in self.epsilon_by_level.items()
        }
        return {"version": SCHEMA_VERSION, "type": "PrivacyReport", **plain(fields)}

    def __str__(self) -> str:
        lines = [
            *_headline(self),
            "",
            *_levels(self),
            *_distribution(self),
            *_worst(self),
            *listed("Warnings", self.warnings),
            *listed(CONDITIONS, self.preconditions),
        ]
        return "\n".join(lines)


def _upward(value: float) -> str:
    return upward(value, 5, zeros=True)


def _headline(report: PrivacyReport) -> list[str]:
    """Epsilon, delta, who is protected, and the run."""
    rows = [
        ("protected", f"{report.protected} ({report.neighboring_relation})"),
        ("epsilon", f"{_upward(report.epsilon)} at delta {report.delta:g}"),
        ("method", f"{report.method} (upper bound)"),
    ]
    steps = zip(
        report.num_steps, report.noise_multipliers, report.clip_units, strict=True
    )
    for count, noise, clip in steps:
        text = f"{count:,} with noise multiplier {noise:g}, clipping each {clip}"
        rows.append(("steps", text.replace("each step", "the whole step")))
    return ["Privacy report", *_aligned(rows)]


def _levels(report: PrivacyReport) -> list[str]:
    rows = [
        (level, f"not covered: {value}" if isinstance(value, str) else _upward(value))
        for level, value in report.epsilon_by_level.items()
    ]
    return ["Epsilon by privacy unit", *_aligned(rows)]


def _distribution(report: PrivacyReport) -> list[str]:
    """Quantiles over units, side by side; nothing without a population."""
    units = report.distribution
    if units is None or not units.epsilon_quantiles:
        return []
    title = (
        f"Over {units.num_units:,} units ({report.privacy_unit}) on "
        f"{units.num_paths:,} distinct paths"
    )
    rows = [("share", "inclusion rate", "epsilon")]
    for name, epsilon in units.epsilon_quantiles.items():
        rate = f"{units.inclusion_rate_quantiles[name]:.5g}"
        rows.append((name, rate, _upward(epsilon)))
    lines = ["", title, *_aligned(rows)]
    if units.rate_rounding:
        share = _upward(100 * units.rate_rounding)
        lines.append(f"  (epsilons here: with rates rounded up by at most {share} %)")
    return lines


def _worst(report: PrivacyReport) -> list[str]:
    """The path with the largest epsilon, named."""
    worst = report.worst_path
    if worst is None:
        return []
    rates = [", ".join(f"{k} {v:.5g}" for k, v in r.items()) for r in worst.rates]
    if worst.units is None and worst.inclusion_rate == 1:
        return []  # nothing is drawn, and nobody is named
    rows = []
    if worst.units is not None:
        names = ", ".join(f"{k} {v!r}" for k, v in worst.units.items()) or "the root"
        rows.append(("units", names if worst.num_units else f"{names} (empty now)"))
        rows.append(("protected units there", str(worst.num_units)))
    if worst.sizes:
        sizes = ", ".join(f"{k} {v}" for k, v in worst.sizes.items())
        rows.append(("drawn out of", sizes))
    rows += [("rates", text) for text in dict.fromkeys(rates)]
    rows.append(("inclusion rate", f"{worst.inclusion_rate:.5g}"))
    rows.append(("epsilon", _upward(worst.epsilon)))
    return ["", "Path with the largest epsilon", *_aligned(rows)]


def listed(title: str, texts: Sequence[str]) -> list[str]:
    """A title and texts as a wrapped list; nothing without texts."""
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

"""`PrivacyReport`: the privacy of one run, and its text."""

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
_WIDTH = 88  # characters per line


@dataclass(frozen=True, eq=False)
class WorstPath:
    """The path through the tree with the largest epsilon.

    Attributes:
      units: level name to id (or index) of the units on one such path, top to bottom.
        It ends above the protected level if there is no protected unit now: a unit
        without children, which one may join. None without a `Population`.
      sizes: level name to the number of children there; without levels of unknown size.
      rates: for each step of the run, level name to rate.
      inclusion_rate: probability of taking part in a step, averaged over the steps.
      epsilon: epsilon of the privacy unit on this path, nats.
      num_units: number of protected units on such paths; None without a `Population`.
    """

    units: Mapping[str, Any] | None
    sizes: Mapping[str, int]
    rates: tuple[Mapping[str, float], ...]
    inclusion_rate: float
    epsilon: float
    num_units: int | None


@dataclass(frozen=True, eq=False)
class UnitDistribution:
    """Inclusion rates and epsilons over the protected units of a `Population`.

    Units that may join an empty parent are not counted, except as paths. A quantile is
    the smallest value that at least this share of the units does not exceed; the names
    are "min", "5%", "25%", "50%", "75%", "95%" and "max".

    Attributes:
      num_units: protected units.
      num_paths: distinct paths, including paths without units.
      inclusion_rate_quantiles: name to probability of taking part in a step, averaged
        over the run's steps. Empty without units, like the next one.
      epsilon_quantiles: name to epsilon; *upper bounds*, nats.
      rate_rounding: largest relative amount by which rates were rounded up for these
        epsilons and ``unit_epsilons``; 0 for none.
      unit_epsilons: (num_units,) epsilon of each protected unit, in the order of the
        `Population`; *upper bounds*, nats. None without ``per_unit=True``.
    """

    num_units: int
    num_paths: int
    inclusion_rate_quantiles: Mapping[str, float]
    epsilon_quantiles: Mapping[str, float]
    rate_rounding: float
    unit_epsilons: np.ndarray | None


@dataclass(frozen=True, eq=False)
class PrivacyReport:
    """Epsilon at every level, its distribution over units, and its preconditions.

    Every epsilon is an *upper bound*, in nats, at the same ``delta``. Rates are exact
    for exact sizes and upper bounds otherwise. Made by `privacy_report`.

    Attributes:
      privacy_unit: level of the protected unit, or "person".
      protected: the protected unit in words; for a person with the bounds.
      clip_units: level (or "step") whose contributions are clipped, for each step.
      neighboring_relation: "add_remove", "replace_one" or "zero_out".
      method: how epsilon is computed.
      delta: the delta.
      num_steps: count of each step of the run.
      noise_multipliers: of each step.
      epsilon: epsilon of the privacy unit, the largest over all paths.
      epsilon_by_level: level name to epsilon with that level as the privacy unit, or to
        the reason why there is none; "person" first, if bounds of people are known.
      worst_path: the path with the largest epsilon; None for people, who may be on many
        paths.
      warnings: facts that the numbers do not show.
      preconditions: preconditions that the library cannot check.
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

        Infinite numbers are the strings "inf" and "-inf", which Python's ``float``
        reads; values that do not apply are None. In "epsilon_by_level" each level has
        either an "epsilon" or a "not_covered" with the reason.
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
    """The lines of epsilon, delta, the protected unit and the steps."""
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
    """The table of quantiles over units; empty without a population."""
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
    """The lines of the path with the largest epsilon."""
    worst = report.worst_path
    if worst is None:
        return []
    rates = [", ".join(f"{k} {v:.5g}" for k, v in r.items()) for r in worst.rates]
    if worst.units is None and worst.inclusion_rate == 1:
        return []  # nothing is sampled, and no unit has a name
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
    """Returns a title and texts as a wrapped list; [] without texts."""
    if not texts:
        return []
    marked = [
        textwrap.fill(t, _WIDTH, initial_indent="  * ", subsequent_indent="    ")
        for t in texts
    ]
    return ["", title, *marked]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligns rows of cells and wraps the last column."""
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

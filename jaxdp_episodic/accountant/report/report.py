"""The privacy report of a run: epsilon at every level and over all units."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    EPISODE,
    ORIGINAL,
    OWNED,
    PERSON,
    MultistageSampling,
)
from jaxdp_episodic.accountant.describe.population import PersonBounds, distinct_paths
from jaxdp_episodic.accountant.describe.rates import inclusion_along
from jaxdp_episodic.accountant.describe.runs import refuse_disjoint
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
)
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Run
from jaxdp_episodic.accountant.questions import worst_path as path_rows
from jaxdp_episodic.accountant.questions.api import check_method
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of
from jaxdp_episodic.accountant.report.sentences import (
    caveats_of,
    preconditions_of,
    protected_unit,
    upward,
)
from jaxdp_episodic.files.json_file import plain

SCHEMA_VERSION = 1
CONDITIONS = "It holds if (nothing checks this)"
_WIDTH = 88  # characters per line
# Quantiles by their names, as shares of the units.
_PERCENTS = {f"{percent}%": percent / 100 for percent in (5, 25, 50, 75, 95)}
_QUANTILES = {"min": 0.0, **_PERCENTS, "max": 1.0}
# Largest number of distinct paths with an epsilon; with more, rates are rounded up.
_MAX_PATHS = 8192
# The same for "pld", which takes tens of milliseconds per path.
_MAX_CERTIFIED_PATHS = 512
# Fewer paths are computed in blocks that NumPy answers sooner than JAX compiles.
_COMPILED_PATHS = 5000
_NOT_COMPILED = 1000


@dataclass(frozen=True, eq=False)
class WorstPath:
    """The path through the tree with the largest epsilon.

    Attributes:
      units: level name to id (or index) of the units on one such path, top to bottom;
        only down to a unit without children. None without a `Population`.
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

    A quantile is the smallest value that at least this share of the units does not
    exceed; the names are "min", "5%", "25%", "50%", "75%", "95%" and "max".

    Attributes:
      num_units: protected units.
      num_paths: distinct paths, including paths without units.
      inclusion_rate_quantiles: name to probability of taking part in a step, averaged
        over the run's steps. Empty without units, like the next one.
      epsilon_quantiles: name to epsilon; *upper bounds*, nats.
      rate_rounding: largest relative amount by which rates were rounded up; 0 for none.
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
      level_runs: level name to the run with that level as the privacy unit, for the
        levels with an epsilon; not in the dictionary.
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
    level_runs: Mapping[str, ComposedSteps] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON, with "version" and "type".

        Infinite numbers are the strings "inf" and "-inf". In "epsilon_by_level" each
        level has either an "epsilon" or a "not_covered" with the reason.
        """
        fields = dict(vars(self))
        del fields["level_runs"]
        for name in ("worst_path", "distribution"):
            if fields[name] is not None:
                fields[name] = vars(fields[name])
        fields["epsilon_by_level"] = {
            level: {"not_covered" if isinstance(value, str) else "epsilon": value}
            for level, value in self.epsilon_by_level.items()
        }
        return {"version": SCHEMA_VERSION, "type": "PrivacyReport", **plain(fields)}

    def __str__(self) -> str:
        rows = [
            ("protected", f"{self.protected} ({self.neighboring_relation})"),
            ("epsilon", f"{_upward(self.epsilon)} at delta {self.delta:.15g}"),
            ("method", f"{self.method} (upper bound)"),
        ]
        counted = zip(self.num_steps, self.noise_multipliers, strict=True)
        for (count, noise), clip in zip(counted, self.clip_units, strict=True):
            text = f"{count:,} with noise multiplier {noise:g}, clipping each {clip}"
            rows.append(("steps", text.replace("each step", "the whole step")))
        levels = [
            (level, f"not covered: {v}" if isinstance(v, str) else _upward(v))
            for level, v in self.epsilon_by_level.items()
        ]
        lines = [
            *("Privacy report", *_aligned(rows)),
            *("", "Epsilon by privacy unit", *_aligned(levels)),
            *_quantile_lines(self),
            *_worst_lines(self.worst_path),
            *listed("Warnings", self.warnings),
            *listed(CONDITIONS, self.preconditions),
        ]
        return "\n".join(lines)


def privacy_report(
    step: AnyStep,
    *,
    delta: Any,
    num_steps: Any = None,
    method: str = "exact",
    per_unit: bool = False,
    people: PersonBounds | None = None,
) -> PrivacyReport:
    """Returns the epsilons of a run at every level and over all units.

    Epsilon at the privacy unit is that of `epsilon`. All epsilons are *upper bounds*.
    Those of the worst paths are as tight as ``method``. If a `Population` has very many
    distinct paths, those of the other units are computed with slightly larger rates
    (see `UnitDistribution`): above 8,192 paths, with method "pld" above 512.

    A report is about one setting: every field must be a scalar. It is computed from the
    sizes of the `Population`; if these are private, so is the report.

    Args:
      step: the step, or a run made by `compose`.
      delta: in (0, 1), one number; the same at every level.
      num_steps: whole number >= 0; None for a composed run, which has its own counts.
      method: how epsilon is computed; see `epsilon`.
      per_unit: whether to return the epsilon of each protected unit; needs a
        `Population`.
      people: public bounds of one person's examples, single numbers. The report of a
        run that protects a smaller unit then also has the epsilon of a person. A run
        that protects people has its own bounds.

    Raises:
      ValueError: a value out of range, an array field, ``num_steps`` missing for a step
        or given for a composed run, ``per_unit`` without units of a `Population`, or
        ``people`` for a run with its own.
    """
    check_method(method)
    refuse_disjoint(step, "privacy_report")
    run = _single_run(step, num_steps)
    target = np.asarray(_validation.one("delta", delta, _validation.open_unit_array))
    _validation.flag("per_unit", per_unit)
    if per_unit and _tree_step(run) is None:
        raise ValueError(
            "per_unit=True needs a step with a Population whose units are protected"
        )
    first = run.gaussian_steps[0]
    if people is not None:
        _validation.instance("people", people, PersonBounds, "a PersonBounds or None")
        if first.privacy_unit == PERSON:
            raise ValueError(
                f"people must be None with privacy_unit={PERSON!r}: the step has its "
                f"own, got {people!r}"
            )
        if people.shape:
            raise ValueError(f"people must be bounds of one setting, got {people!r}")
    ask = functools.partial(path_rows.answer, EpsilonAt(np.log(target)), method=method)
    accounted, worst, distribution = runs_of(run, None), None, None
    spent = float(ask(accounted).value)
    if first.privacy_unit not in OWNED:
        worst = _worst_path(run, accounted, ask, spent)
        # Each theorem's run is a bound: use the first for the other paths.
        most = _MAX_CERTIFIED_PATHS if method == "pld" else _MAX_PATHS
        distribution = _distribution(run, accounted[0], ask, spent, per_unit, most)
    by_level, level_runs = _by_level(run, ask, spent, people)
    return PrivacyReport(
        privacy_unit=str(first.privacy_unit),
        protected=protected_unit(*run.gaussian_steps),
        clip_units=tuple(str(part.clip_unit) for part in run.gaussian_steps),
        neighboring_relation=first.neighboring_relation,
        method=method,
        delta=float(target),
        num_steps=tuple(int(count) for count in run.counts),
        noise_multipliers=tuple(float(s.noise_multiplier) for s in run.gaussian_steps),
        epsilon=spent,
        epsilon_by_level=by_level,
        worst_path=worst,
        warnings=caveats_of(run, level_runs, by_level, float(target)),
        preconditions=preconditions_of(run),
        distribution=distribution,
        level_runs=level_runs,
    )


def _single_run(step: Any, num_steps: Any) -> ComposedSteps:
    """Returns a run of scalar fields as a composed run; raises for arrays."""
    gaussian_parts(step, "privacy_report")
    if isinstance(step, ComposedSteps) != (num_steps is None):
        raise ValueError(
            "num_steps must be None for a composed run, which has its own counts "
            "(compose((run, 2)) is the run twice), and a whole number >= 0 for a step, "
            f"got {num_steps!r}"
        )
    if num_steps is not None:
        steps = _validation.integer_array("num_steps", num_steps, minimum=0)
        step = compose((step, steps))
    if step.shape != ():
        raise ValueError(
            "a report needs one setting: every field of the step and num_steps must be "
            f"scalars, got fields of shape {step.shape}"
        )
    return step


def _path_epsilons(runs: Sequence[Run], paths: np.ndarray, ask: Any) -> np.ndarray:
    """(P,) epsilons of these paths, which are treated as settings."""
    blocks = -(-len(paths) // _NOT_COMPILED) if len(paths) < _COMPILED_PATHS else 1
    found = []
    for some in np.array_split(paths, blocks):
        values = ask([run.take_paths(some).with_axis() for run in runs]).value
        found.append(np.broadcast_to(values, some.shape))
    return np.concatenate(found)


def _worst_path(
    run: ComposedSteps, accounted: Sequence[Run], ask: Any, spent: float
) -> WorstPath:
    """The path with the largest epsilon; among equal ones, that with most units."""
    if len(accounted) == 1:
        front = path_rows.undominated_paths(accounted[0])
    else:  # several theorems hold: any path may be the worst
        front = np.arange(max(one.shape[-1] for one in accounted))
    most = int(front[0])
    if len(front) > 1:
        most = int(front[np.argmax(_path_epsilons(accounted, front, ask))])
    step = _tree_step(run)
    multiplicity = (step or run.gaussian_steps[0]).path_rates.multiplicity
    alike = (path_rows.equal_paths(one, most) for one in accounted)
    equal = functools.reduce(np.intersect1d, alike)
    index = int(equal[np.argmax(multiplicity[equal])])
    rates: list[dict[str, float]] = []
    sizes: dict[str, int] = {}
    for part in run.gaussian_steps:
        names, along = part.level_names_used, part.path_rates
        rates.append(
            {n: float(_at(r, index)) for n, r in zip(names, along.rates, strict=True)}
        )
        for name, group in zip(names, along.group_sizes, strict=True):
            if group is not None:
                sizes.setdefault(name, int(_at(group, index)))
    units = None
    if step is not None:
        tree, paths = step.population, step.path_rates.paths
        assert tree is not None and paths is not None  # both or none
        level, unit = paths.witness_level[index], paths.witness_index[index]
        known = tree.describe_path(level, unit).values() if level else ()
        units = dict(zip(tree_levels(step), known, strict=False))
    return WorstPath(
        units=units,
        sizes=sizes,
        rates=tuple(rates),
        inclusion_rate=float(_at(_inclusion_rates(run), index)),
        epsilon=spent,
        num_units=None if step is None else int(multiplicity[index]),
    )


def _by_level(
    run: ComposedSteps, ask: Any, spent: float, people: PersonBounds | None
) -> tuple[dict[str, float | str], dict[str, ComposedSteps]]:
    """Epsilon with each level as the privacy unit, or the reason for none."""
    values: dict[str, float | str] = {}
    runs: dict[str, ComposedSteps] = {}
    unit = run.gaussian_steps[0].privacy_unit
    persons = (PERSON,) if people is not None or unit == PERSON else ()
    for level in (*persons, *tree_levels(run.gaussian_steps[0])):
        if level == unit:
            values[level], runs[level] = spent, run
            continue
        own = {"privacy_unit": level, "people": people if level == PERSON else None}
        try:
            steps = (dataclasses.replace(step, **own) for step in run.gaussian_steps)
            same = ComposedSteps(tuple(steps), run.counts)
            values[level], runs[level] = float(ask(runs_of(same, None)).value), same
        except (ValueError, NotImplementedError) as error:
            values[level] = str(error)
    return values, runs


def _distribution(
    run: ComposedSteps,
    accounted: Run,
    ask: Any,
    largest: float,
    per_unit: bool,
    most: int,
) -> UnitDistribution | None:
    """Rates and epsilons over the units of the population, if there is one."""
    step = _tree_step(run)
    if step is None:
        return None
    fewer, index, rounding = path_rows.rounded_up(accounted, most)
    epsilons = _path_epsilons([fewer], np.arange(fewer.shape[-1]), ask)[index]
    # The largest epsilon bounds that of every path, also where rounding exceeds it.
    epsilons = np.minimum(epsilons, largest)
    units, paths = step.path_rates.multiplicity, step.path_rates.paths
    inclusion = np.broadcast_to(_inclusion_rates(run), units.shape)
    of_units = None
    if per_unit:
        assert step.population is not None and paths is not None  # both or none
        counts = step.population.children_counts[: paths.sizes.shape[1]]
        of_units = np.repeat(epsilons[distinct_paths(counts)[1]], counts[-1])
    return UnitDistribution(
        num_units=int(units.sum()),
        num_paths=len(units),
        inclusion_rate_quantiles=_quantiles(inclusion, units),
        epsilon_quantiles=_quantiles(np.broadcast_to(epsilons, units.shape), units),
        rate_rounding=rounding,
        unit_epsilons=of_units,
    )


def _quantiles(values: np.ndarray, units: np.ndarray) -> dict[str, float]:
    """For each share, the smallest value that this share of units does not exceed."""
    if not units.any():
        return {}
    shares = list(_QUANTILES.values())
    found = np.quantile(values, shares, weights=units, method="inverted_cdf")
    return dict(zip(_QUANTILES, found.tolist(), strict=True))


def _inclusion_rates(run: ComposedSteps) -> np.ndarray:
    """(P,) probability that a protected unit takes part, averaged over the steps."""
    counts = np.array([float(count) for count in run.counts])
    weights = counts if counts.any() else np.ones(len(counts))
    rates = [
        inclusion_along(s.path_rates, s.design) / (s.bands.count if s.bands else 1)
        for s in run.gaussian_steps
    ]
    return np.average(np.broadcast_arrays(*rates), axis=0, weights=weights)


def _tree_step(run: ComposedSteps) -> GaussianStep | None:
    """The first step with a population; all populations are equal."""
    parts = (part for part in run.gaussian_steps if part.privacy_unit not in OWNED)
    return next((part for part in parts if part.population is not None), None)


def tree_levels(step: GaussianStep) -> tuple[str, ...]:
    """Returns the names of the levels of units; episodes are no units."""
    names = step.design.level_names
    if not isinstance(step.design, MultistageSampling):
        names = tuple(name for name in names if name != EPISODE)
    return (*names[:-2], ORIGINAL) if step.privacy_unit == ORIGINAL else names


def _at(array: np.ndarray, index: int) -> Any:
    """The entry of one path in a (P,) or (1,) array."""
    return array[..., index if array.shape[-1] > 1 else 0]


# --- Its text ---


_upward = functools.partial(upward, digits=5, zeros=True)


def _quantile_lines(report: PrivacyReport) -> list[str]:
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


def _worst_lines(worst: WorstPath | None) -> list[str]:
    """The lines of the path with the largest epsilon."""
    # At rate 1 nothing is sampled; without a population no unit has a name.
    if worst is None or (worst.units is None and worst.inclusion_rate == 1):
        return []
    rates = [", ".join(f"{k} {v:.5g}" for k, v in r.items()) for r in worst.rates]
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
    wrapper = textwrap.TextWrapper(_WIDTH, "  * ", "    ")
    return ["", title, *map(wrapper.fill, texts)] if texts else []


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligns rows of cells and wraps the last column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=False)
        head = "  " + "".join(cell.ljust(width + 2) for cell, width in cells)
        wrapper = textwrap.TextWrapper(_WIDTH, head, " " * len(head))
        wrapper.break_on_hyphens = False
        lines.append(wrapper.fill(row[-1]))
    return lines

"""One round of narrowing certified ends: lattices are laid, laws composed, read off.

Settings go through a round together, so that kernels see batches: one evaluation of
the profiles for each kind of step, one transform for each size of lattice. A setting
whose ends stay too far apart comes back with a smaller scale and better estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accounting import loss_knots, loss_lattice, loss_plan
from jaxdp_episodic.accounting.loss_bracket import (
    Bracket,
    Row,
    certified_epsilon,
    certified_log_delta,
    convolution_powers,
    sum_window,
    tilted_row,
)
from jaxdp_episodic.accounting.loss_lattice import Tails
from jaxdp_episodic.accounting.loss_plan import Direction, Estimate, RoughLaw, Target
from jaxdp_episodic.accounting.resolution import SAMPLED

# Memory: cells of the largest lattice (32 MiB for an array, about 20 of them live).
LARGEST_LATTICE = 2**22
_MOST_KNOTS = 2**19
_FEW_CELLS = 2**14
# The masses of a law add up to 1 within this, or its tails were wrong.
_MASS_CHECK = 1e-6


class Step(NamedTuple):
    """One step of one setting: the kind, the fields of its kernel, how often."""

    kind: str
    fields: tuple[float, ...]
    count: float


@dataclass
class Setting:
    """One setting on its way."""

    steps: tuple[Step, ...]
    target: Target
    lower: float
    upper: float
    scale: float = 0.7
    laws: list[list[RoughLaw]] = field(default_factory=list)
    signs: list[int] = field(default_factory=list)
    known: list[Estimate | None] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    plans: list[Direction] = field(default_factory=list)
    centers: list[float] = field(default_factory=list)
    spacing: float = 0.0
    knots: list[np.ndarray] = field(default_factory=list)
    points: list[np.ndarray] = field(default_factory=list)
    tails: list[tuple[Tails, Tails]] = field(default_factory=list)
    least_spacing: float = 0.0
    out_of_memory: bool = False
    last_attempt: bool = False
    rounds: int = 0


def _evaluate(
    settings: Sequence[Setting], points: Sequence[Sequence[np.ndarray]]
) -> list[list[tuple[Tails, Tails]]]:
    """Tails of every step of every setting at its points: one batch for each kind."""
    where: dict[str, list[tuple[int, int]]] = {}
    for i, setting in enumerate(settings):
        for k, step in enumerate(setting.steps):
            where.setdefault(step.kind, []).append((i, k))
    result: list[list[Any]] = [[None] * len(s.steps) for s in settings]
    for kind, places in where.items():
        fields = [settings[i].steps[k].fields for i, k in places]
        tails = loss_lattice.evaluate_tails(
            kind, fields, [points[i][k] for i, k in places]
        )
        for (i, k), value in zip(places, tails, strict=True):
            result[i][k] = value
    return result


def look_roughly(settings: list[Setting]) -> None:
    """Fills in the rough laws of both directions."""
    points = [
        [
            loss_plan.rough_points(s.fields[3], s.fields[1], s.fields[4])
            for s in setting.steps
        ]
        for setting in settings
    ]
    for setting, grids, tails in zip(
        settings, points, _evaluate(settings, points), strict=True
    ):
        both = list(zip(grids, tails, strict=True))
        setting.laws = [[loss_plan.rough_law(g, f, b) for g, (f, b) in both]]
        setting.signs = [1]
        if any(s.kind == SAMPLED for s in setting.steps):
            setting.laws.append([loss_plan.rough_law(g, b, f) for g, (f, b) in both])
            setting.signs.append(-1)
        setting.known = [None] * len(setting.signs)
        setting.uppers = [setting.upper] * len(setting.signs)


def lay_lattices(settings: list[Setting]) -> None:
    """Chooses spacing, offsets and knots of every setting and evaluates the tails."""
    for s in settings:
        counts = [step.count for step in s.steps]
        s.plans = _plans(s, counts)
        medians = [
            loss_plan.bulk(law) if step.kind == SAMPLED else 0.0
            for law, step in zip(s.laws[0], s.steps, strict=True)
        ]
        s.spacing = min(
            loss_knots.choose_spacing(laws, counts, [sign * m for m in medians], plan)
            for laws, plan, sign in zip(s.laws, s.plans, s.signs, strict=True)
        )
        s.centers = medians
        # The coarsest lattice that the window allows, as the last attempt.
        least = max(plan.high - min(plan.low, plan.epsilon) for plan in s.plans)
        least = max(least * 1.001 / (LARGEST_LATTICE - 16), s.least_spacing)
        s.last_attempt = s.spacing <= least
        s.spacing = max(s.spacing, least, 1e-12 * max(abs(c) for c in medians))
    _center_spikes(settings)
    for s in settings:
        s.knots, s.points = [], []
        for k, step in enumerate(s.steps):
            ends = [
                tuple(sorted(sign * e for e in plan.ranges[k]))
                for plan, sign in zip(s.plans, s.signs, strict=True)
            ]
            span = min(e[0] for e in ends), max(e[1] for e in ends)
            index = loss_knots.choose_knots(
                [
                    (laws[k], plan.weights[k], plan, sign)
                    for laws, plan, sign in zip(s.laws, s.plans, s.signs, strict=True)
                ],
                1 / len(s.steps),
                step.count,
                s.spacing,
                s.centers[k],
                span,
                _MOST_KNOTS,
            )
            s.out_of_memory |= len(index) == 0
            knots = s.centers[k] + index * s.spacing
            points = np.empty(max(2 * len(knots) - 1, 0))
            if len(knots):
                points[::2], points[1::2] = knots, loss_knots.splits(knots)
            s.knots.append(index)
            s.points.append(points)
    able = [s for s in settings if not s.out_of_memory]
    for s, tails in zip(able, _evaluate(able, [s.points for s in able]), strict=True):
        s.tails = tails


def _plans(s: Setting, counts: list[float]) -> list[Direction]:
    """Plans of the directions; one that is far below the other may be coarse."""
    plans = [
        loss_plan.plan_direction(laws, counts, s.target, s.scale, known)
        for laws, known in zip(s.laws, s.known, strict=True)
    ]
    if len(plans) == 1:
        return plans
    result = []
    for i, (plan, other) in enumerate(zip(plans, reversed(plans), strict=True)):
        if s.target.log_delta is None:
            low = other.log_delta - 0.5 * min(-other.log_delta, 20.0) - 2.0
            spare = -low if plan.log_delta < low else 0.0
        else:
            spare = max(0.3 * other.epsilon - 0.5 * plan.epsilon - plan.width, 0.0)
        if spare > 0:
            plan = loss_plan.plan_direction(
                s.laws[i], counts, s.target, s.scale, s.known[i], spare
            )
        result.append(plan)
    return result


def _center_spikes(settings: list[Setting]) -> None:
    """Moves the offsets to the merged loss of the spike's own bin.

    A spike narrower than the spacing would cost the lower law a whole bin if it were
    off the lattice.
    """
    able = settings
    for _ in range(3):
        points = []
        for s in able:
            half = 0.5 * s.spacing
            points.append([np.array([c - half, c + 1.5 * half]) for c in s.centers])
        for s, grids, tails in zip(able, points, _evaluate(able, points), strict=True):
            for k, (grid, (own, other)) in enumerate(zip(grids, tails, strict=True)):
                law = loss_lattice.fine_law(grid, own, other)
                mass, loss = loss_lattice.merged_losses(grid, law)
                if mass[0] > 1e-3 and grid[0] < loss[0] < grid[1]:
                    s.centers[k] = float(loss[0])


def compose(settings: list[Setting]) -> None:
    """Composes both laws of both directions and narrows the ends."""
    rows: dict[int, list[Row]] = {}
    for s in settings:
        s.rounds += 1
        if s.out_of_memory:
            continue
        mine: list[Row] = []
        for sign, plan in zip(s.signs, s.plans, strict=True):
            mine += _tilted_rows(s, plan, sign)
        excess = max((row.size for row in mine), default=0) / LARGEST_LATTICE
        if len(mine) == 2 * len(s.plans) and excess <= 1:
            rows[id(s)] = mine
        elif excess > 1 and not s.last_attempt:
            # The plan took the window for shorter: once more, on a coarser lattice.
            s.least_spacing = s.spacing * excess
        else:
            s.out_of_memory = True
    brackets = iter(convolution_powers([row for mine in rows.values() for row in mine]))
    for s in settings:
        if id(s) not in rows:
            continue
        for i in range(len(s.signs)):
            upper, lower = next(brackets), next(brackets)
            low, high, s.known[i] = _ends(s.target, upper, lower)
            s.lower = max(s.lower, low)
            s.uppers[i] = min(s.uppers[i], high)
        s.upper = min(s.upper, max(s.uppers))
        # Certified ends do not cross. If they did one were wrong: the larger is kept.
        s.lower, s.upper = min(s.lower, s.upper), max(s.lower, s.upper)
        # A direction that lies below the other one is done with.
        keep = [i for i, high in enumerate(s.uppers) if high > s.lower]
        for name in ("laws", "signs", "known", "uppers"):
            setattr(s, name, [getattr(s, name)[i] for i in keep])


def _tilted_rows(s: Setting, plan: Direction, sign: int) -> list[Row]:
    """Upper and lower law of one direction, tilted; none if they are not laws."""
    parts = []
    for index, points, (forward, backward) in zip(
        s.knots, s.points, s.tails, strict=True
    ):
        if sign < 0:
            index, points = -index[::-1], -points[::-1]
            forward, backward = (
                Tails(*(a[::-1] for a in t)) for t in (backward, forward)
            )
        law = loss_lattice.fine_law(points, forward, backward)
        above, infinite = loss_lattice.upper_masses(points, law)
        below = loss_lattice.lower_masses(points, law)
        total = float(above.sum()) + infinite
        if not (abs(total - 1) < _MASS_CHECK and float(below.sum()) < 1 + _MASS_CHECK):
            return []
        parts.append((index, points[::2], above, below, infinite))
    counts = [step.count for step in s.steps]
    offset = sum(t * sign * c for t, c in zip(counts, s.centers, strict=True))
    moved = sum(
        step.count * float(loss_lattice.displacement(step.kind, step.fields))
        for step in s.steps
    )
    low, high = sum_window(parts, counts, plan)
    first = math.floor((low - offset) / s.spacing) - 2
    cells = math.ceil((high - offset) / s.spacing) + 2 - first
    size = 2 ** max(math.ceil(math.log2(min(max(cells, 16), 2**40))), 8)
    if size < _FEW_CELLS and size.bit_length() % 2 == 0:
        size *= 2  # fewer sizes, each of which is compiled
    # What a power of two leaves over lies to both sides.
    first -= (size - cells) // 2
    rows = []
    for choice in (2, 3):
        laws = [(p[0], p[1], p[choice]) for p in parts]
        infinite = 0.0
        if choice == 2:
            infinite = sum(t * p[4] for t, p in zip(counts, parts, strict=True))
        lattice = offset, moved, s.spacing, first, size
        rows.append(tilted_row(laws, counts, plan, infinite, *lattice))
    return rows


def _ends(
    target: Target, upper: Bracket, lower: Bracket
) -> tuple[float, float, Estimate]:
    """Certified ends of one direction's answer, and an estimate for the next round."""
    if target.log_delta is not None:
        solve, given = certified_epsilon, target.log_delta
    else:
        assert target.epsilon is not None  # one of the two is given
        solve, given = certified_log_delta, target.epsilon
    low, _ = solve(lower, given, certify_upper=False)
    high, estimate = solve(upper, given, certify_upper=True)
    return low, high, estimate

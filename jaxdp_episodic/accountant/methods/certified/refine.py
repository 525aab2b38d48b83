"""One refinement of certified intervals: lattices are laid and losses composed.

Settings are refined together, so that kernels see batches: one evaluation of the
profiles for each mechanism, one transform for each size of lattice. A setting whose
ends stay too far apart is refined again with a smaller scale and better estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.protocols import BoundingPair, FiniteValues
from jaxdp_episodic.accountant.methods.certified import atoms, lower, window
from jaxdp_episodic.accountant.methods.certified import grid as loss_grid
from jaxdp_episodic.accountant.methods.certified import lattice as loss_lattice
from jaxdp_episodic.accountant.methods.certified.coarse import (
    coarse_loss,
    coarse_points,
    peak,
)
from jaxdp_episodic.accountant.methods.certified.hockey_stick import (
    CertifiedDistribution,
    Row,
    certified_epsilon,
    certified_log_delta,
    chernoff_epsilon,
    chernoff_log_delta,
    sum_window,
    tilted_row,
)
from jaxdp_episodic.accountant.methods.certified.interval_state import Setting, Step
from jaxdp_episodic.accountant.methods.certified.lattice import (
    BinMasses,
    LatticeDistribution,
    Tails,
)
from jaxdp_episodic.accountant.methods.certified.low_frequencies import (
    LowFrequencies,
    certified_ends,
)
from jaxdp_episodic.accountant.methods.certified.transform import transformed
from jaxdp_episodic.accountant.methods.certified.window import Direction, Estimate

# Grid points of one step's loss, at most.
_MOST_GRID_POINTS = 2**19
# Least share of Chernoff's bound of epsilon that epsilon is expected to be.
_SURE_SHARE = 0.3
# P-mass of a bin above which a peak may be in it.
_PEAK_MASS = 1e-3
# Moves of a center, at most; share of the spacing that its last one may be.
_MOST_MOVES = 3
_NEAR_PEAK = 0.02
# Most that the total mass of a distribution deviates from 1, or its tails are wrong.
_MASS_CHECK = 1e-6
# Deviation that is more than rounding on too fine a lattice.
_MASS_ROUNDING = 1e-2
# Relative distance by which rounding may let ends cross.
_CROSSING = 1e-9
# Mass by which rounding may let an upper distribution fall short of 1.
_LACKING = 1e-9


def _evaluate(
    settings: Sequence[Setting], points: Sequence[Sequence[np.ndarray]]
) -> list[list[tuple[Tails, Tails]]]:
    """Tails of every step of every setting at its points: one batch a mechanism."""
    where: dict[type, list[tuple[int, int]]] = {}
    for i, setting in enumerate(settings):
        for k, step in enumerate(setting.steps):
            if len(points[i][k]):  # of finitely many losses no tails are needed
                where.setdefault(type(step.loss), []).append((i, k))
    result: list[list[Any]] = [[None] * len(s.steps) for s in settings]
    for members in where.values():
        tails = loss_lattice.evaluate_tails(
            [settings[i].steps[k].loss for i, k in members],
            [points[i][k] for i, k in members],
        )
        for (i, k), value in zip(members, tails, strict=True):
            result[i][k] = value
    return result


def evaluate_coarsely(settings: list[Setting]) -> None:
    """Fills in the coarse losses of both directions."""
    points = [
        [coarse_points(s.loss.hints()) for s in setting.steps] for setting in settings
    ]
    for setting, grids, tails in zip(
        settings, points, _evaluate(settings, points), strict=True
    ):
        steps = list(zip(grids, tails, setting.steps, strict=True))
        setting.coarse = [[coarse_loss(g, f, b, s.count) for g, (f, b), s in steps]]
        setting.signs = [1]
        if not all(s.loss.is_symmetric for s in setting.steps):
            backward = [coarse_loss(g, b, f, s.count) for g, (f, b), s in steps]
            setting.coarse.append(backward)
            setting.signs.append(-1)
        setting.known = [None] * len(setting.signs)
        setting.uppers = [setting.upper] * len(setting.signs)


def lay_grids(settings: list[Setting]) -> None:
    """Chooses spacing, offsets and grid of every setting and evaluates the tails."""
    for s in settings:
        s.plans = _plans(s)
        s.centers = []
        for coarse, step in zip(s.coarse[0], s.steps, strict=True):
            center = 0.0 if step.loss.is_symmetric else peak(coarse)
            lead = s.plans[s.lead].tilt, s.signs[s.lead]
            atom = atoms.best_center(step.loss, *lead)
            s.centers.append(center if atom is None else atom)
        s.spacing = min(
            loss_grid.choose_spacing(coarse, [sign * c for c in s.centers], plan)
            for coarse, plan, sign in zip(s.coarse, s.plans, s.signs, strict=True)
        )
        # The coarsest lattice that the window allows, as the last attempt.
        least = max(
            plan.high - min(plan.low, plan.epsilon)
            for plan in s.plans
            if not plan.only_bound
        )
        finest = [
            float(step.loss.least_spacing())
            for step in s.steps
            if isinstance(step.loss, BoundingPair)
        ]
        least = max(least * 1.001 / (s.most_cells - 16), s.least_spacing, *finest)
        s.last_attempt = s.spacing <= least
        s.spacing = max(s.spacing, least, 1e-12 * max(abs(c) for c in s.centers))
    _center_peaks(settings)
    for s in settings:
        s.grids, s.points = [], []
        for k, step in enumerate(s.steps):
            s.grids.append(_grid_of(s, k, step))
            s.out_of_memory |= len(s.grids[k]) == 0
            s.points.append(
                loss_grid.with_splits(s.centers[k] + s.grids[k] * s.spacing)
            )
    able = [s for s in settings if not s.out_of_memory]
    points = [
        [
            np.empty(0) if isinstance(step.loss, FiniteValues) else p
            for step, p in zip(s.steps, s.points, strict=True)
        ]
        for s in able
    ]
    for s, tails in zip(able, _evaluate(able, points), strict=True):
        s.tails = tails


def _grid_of(s: Setting, k: int, step: Step) -> np.ndarray:
    """Lattice numbers of one step's grid points; none where they would be too many."""
    found = atoms.grid_beside(step.loss, s.centers[k], s.spacing)
    if found is not None:
        return found
    ends = [
        tuple(sorted(sign * e for e in plan.ranges[k]))
        for plan, sign in zip(s.plans, s.signs, strict=True)
    ]
    return loss_grid.choose_grid(
        [
            (coarse[k], plan.weights[k], plan, sign)
            for coarse, plan, sign in zip(s.coarse, s.plans, s.signs, strict=True)
        ],
        1 / len(s.steps),
        s.spacing,
        s.centers[k],
        (min(e[0] for e in ends), max(e[1] for e in ends)),
        _MOST_GRID_POINTS,
    )


def _plans(s: Setting) -> list[Direction]:
    """Plans of both directions; of one far below the other only a bound is planned."""
    plans = [
        window.plan_direction(coarse, s.target, s.scale, known)
        for coarse, known in zip(s.coarse, s.known, strict=True)
    ]
    answers = [p.epsilon if s.target.of_epsilon else p.log_delta for p in plans]
    s.lead = int(np.argmax(answers))
    if len(plans) == 1:
        return plans
    ceiling = _ceiling(s, max(answers))
    other = 1 - s.lead
    if answers[other] < ceiling:
        plans[other] = window.plan_direction(
            s.coarse[other], s.target, s.scale, s.known[other], ceiling
        )
    return plans


def _ceiling(s: Setting, expected: float) -> float:
    """A value that the larger direction's answer surely exceeds, with room to spare."""
    of_epsilon = s.target.of_epsilon
    if s.lower > (0.0 if of_epsilon else -math.inf):
        return 0.9 * s.lower if of_epsilon else s.lower - 1.0
    # Chernoff's bound may be far above the answer.
    if of_epsilon:
        return _SURE_SHARE * expected
    return expected - 0.5 * min(-expected, 20.0) - 3.0


def _center_peaks(settings: list[Setting]) -> None:
    """Moves each center to ``log(P / Q)`` of the bin about it.

    A peak narrower than the spacing would cost the lower distribution a whole bin if it
    were not at a point of the lattice.
    """
    # Atoms are their centers, and of a symmetric loss the bin about 0 is centered.
    moving = [
        (i, k)
        for i, s in enumerate(settings)
        for k, step in enumerate(s.steps)
        if not (isinstance(step.loss, FiniteValues) or step.loss.is_symmetric)
    ]
    for _ in range(_MOST_MOVES):
        points = [[np.empty(0)] * len(s.centers) for s in settings]
        for i, k in moving:
            half = 0.5 * settings[i].spacing
            points[i][k] = settings[i].centers[k] + np.array([-half, half])
        evaluated, before, moving = _evaluate(settings, points), moving, []
        for i, k in before:
            s, grid = settings[i], points[i][k]
            bins = loss_lattice.bin_masses(grid, *evaluated[i][k])
            mass, loss = loss_lattice.merged_losses(grid, bins)
            if mass[0] > _PEAK_MASS and grid[0] < loss[0] < grid[1]:
                if abs(loss[0] - s.centers[k]) > _NEAR_PEAK * s.spacing:
                    moving.append((i, k))
                s.centers[k] = float(loss[0])


def compose(settings: list[Setting]) -> None:
    """Composes the distributions of both directions and narrows the ends."""
    jobs: list[_Job] = []
    for s in settings:
        s.refinements += 1
        s.has_no_estimate = all(known is None for known in s.known)
        if not s.out_of_memory:
            jobs += _jobs(s)
    sums = transformed([job.row for job in jobs])
    for job, end in zip(jobs, _ends(jobs, sums), strict=True):
        s = job.setting
        if end is None:
            s.out_of_memory = True
        elif job.upper:
            high, s.known[job.direction] = end
            s.uppers[job.direction] = min(s.uppers[job.direction], high)
        else:
            s.lower = max(s.lower, end[0])
    for s in settings:
        if s.has_no_estimate and any(s.known):
            # What did not fit a window planned coarsely may fit one by an estimate.
            s.least_spacing, s.last_attempt = 0.0, False
        s.upper = min(s.upper, max(s.uppers))
        # Relative to epsilon; absolute for log(delta).
        slack = _CROSSING * (abs(s.lower) + (not s.target.of_epsilon))
        if s.upper < s.lower - slack:
            s.revert_ends("certified ends cross")
            continue
        s.lower, s.upper = min(s.lower, s.upper), max(s.lower, s.upper)
        # A direction that surely lies below the other one is dropped.
        keep = [i for i, high in enumerate(s.uppers) if high > s.lower]
        keep = keep or [int(np.argmax(s.uppers))]
        for name in ("coarse", "signs", "known", "uppers"):
            setattr(s, name, [getattr(s, name)[i] for i in keep])


class _Job(NamedTuple):
    """One distribution of one direction of a setting, of which one end is asked for."""

    setting: Setting
    direction: int
    upper: bool
    row: Row


def _jobs(s: Setting) -> list[_Job]:
    """Both distributions of the larger direction, the upper one of the other.

    A direction for which Chernoff's bound is enough gets that here, and no job.
    """
    jobs: list[_Job] = []
    most_cells = 0
    for i, (sign, plan) in enumerate(zip(s.signs, s.plans, strict=True)):
        uppers, lowers = [], []
        for index, points, bins in _bin_masses(s, sign):
            masses, infinite = loss_lattice.upper_masses(points, bins)
            grid = points[::2]
            uppers.append(LatticeDistribution(index, grid, masses, infinite))
            if i == s.lead:
                masses, shift = lower.lower_distribution(points, bins, plan.tilt)
                lowers.append(
                    LatticeDistribution(index, grid + shift, masses, 0.0, shift)
                )
        deviation = max(
            *(abs(u.total - 1) for u in uppers), *(low.total - 1 for low in lowers), 0.0
        )
        if any(u.total < 1 - _LACKING for u in uppers):
            s.revert_ends("an upper distribution lacks mass")
            return []
        if not deviation < _MASS_CHECK:
            # Errors of the masses grow with the inverse of the spacing and the number
            # of bins: a coarser lattice helps, unless the tails themselves are wrong.
            coarser = s.spacing * math.sqrt(10 * deviation / _MASS_CHECK)
            s.out_of_memory = not deviation < _MASS_ROUNDING
            s.least_spacing, s.last_attempt = coarser, False
            return []
        row, cells = _tilted_row(s, plan, sign, uppers)
        if plan.only_bound:
            of_epsilon = s.target.of_epsilon
            bound = chernoff_epsilon if of_epsilon else chernoff_log_delta
            s.uppers[i] = min(s.uppers[i], bound(row.certified, s.target.given))
            continue
        jobs.append(_Job(s, i, True, row))
        most_cells = max(most_cells, cells)
        if lowers:
            row, cells = _tilted_row(s, plan, sign, lowers)
            jobs.append(_Job(s, i, False, row))
            most_cells = max(most_cells, cells)
    if most_cells <= s.most_cells:
        return jobs
    # The window in cells changes a little with the lattice.
    excess = 1.01 * most_cells / s.most_cells
    if s.last_attempt and s.least_spacing > 0:
        s.out_of_memory = True
    else:
        # The plan underestimated the window: once more, on a coarser lattice.
        s.least_spacing, s.last_attempt = s.spacing * excess, False
    return []


def _bin_masses(
    s: Setting, sign: int
) -> list[tuple[np.ndarray, np.ndarray, BinMasses]]:
    """Lattice numbers, points and the masses of the bins between them, of each step."""
    result = []
    for step, index, points, tails in zip(
        s.steps, s.grids, s.points, s.tails, strict=True
    ):
        if sign < 0:
            index, points = -index[::-1], -points[::-1]
        bins = atoms.bin_masses_of_atoms(points, step.loss, sign)
        if bins is None:
            own, other = tails
            if sign < 0:
                own, other = (Tails(*(a[::-1] for a in t)) for t in (other, own))
            bins = loss_lattice.bin_masses(points, own, other)
        result.append((index, points, bins))
    return result


def _tilted_row(
    s: Setting, plan: Direction, sign: int, dists: list[LatticeDistribution]
) -> tuple[Row, int]:
    """One direction's tilted distributions in the window of their sum; its cells."""
    counts = [step.count for step in s.steps]
    offset = math.fsum(
        t * (sign * c + dist.shift)
        for t, c, dist in zip(counts, s.centers, dists, strict=True)
    )
    displaced = sum(
        step.count * loss_lattice.displacement(step.loss) for step in s.steps
    )
    infinite = sum(t * dist.infinite for t, dist in zip(counts, dists, strict=True))
    low, high, plan = sum_window(dists, counts, plan)
    cells = math.ceil((high - low) / s.spacing) + 6
    size = 2 ** max(math.ceil(math.log2(min(max(cells, 16), 2**40))), 8)
    # Cells added to reach a power of two lie on both sides.
    first = math.floor((low - offset) / s.spacing) - 2 - (size - cells) // 2
    lattice = infinite, offset, displaced, s.spacing, first, size
    return tilted_row(dists, counts, plan, *lattice), cells


def _ends(
    jobs: list[_Job], sums: list[LowFrequencies | CertifiedDistribution | None]
) -> list[tuple[float, Estimate] | None]:
    """Certified ends, and estimates for the next refinement."""
    result: list[tuple[float, Estimate] | None] = [None] * len(jobs)
    by_frequencies: dict[bool, list[int]] = {}
    for i, (job, dist) in enumerate(zip(jobs, sums, strict=True)):
        target = job.setting.target
        if isinstance(dist, LowFrequencies):
            by_frequencies.setdefault(target.of_epsilon, []).append(i)
        elif dist is not None:
            end = certified_epsilon if target.of_epsilon else certified_log_delta
            result[i] = end(dist, target.given, certify_upper=job.upper)
    for of_epsilon, members in by_frequencies.items():
        ends = certified_ends(
            [dist for i in members if isinstance(dist := sums[i], LowFrequencies)],
            [jobs[i].setting.target.given for i in members],
            [jobs[i].upper for i in members],
            of_epsilon=of_epsilon,
        )
        for i, end in zip(members, ends, strict=True):
            result[i] = end
    return result

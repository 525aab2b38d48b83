"""Certified ends of epsilon and delta of the worst strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.curve import Curve, View
from jaxdp_episodic.accountant.methods.adaptive.finite import ends_of_finite
from jaxdp_episodic.accountant.methods.adaptive.kernel import Spacing
from jaxdp_episodic.accountant.methods.adaptive.problem import (
    FURTHEST,
    RDP_ROUNDING,
    Ends,
    Filter,
    Problem,
    aligned,
    atoms_of,
)
from jaxdp_episodic.accountant.methods.adaptive.recursion import (
    Pass,
    Row,
    Window,
    solve,
)
from jaxdp_episodic.accountant.methods.question import EpsilonAt, Question

# Points of the first, coarse windows.
_COARSE_POINTS = 800
# Ratio of two orientations' windows up to which one coarse pass serves both.
_ALIKE = 3.0
# Logarithm of deltas that a pass without any tilt resolves.
_LEAST_LOG_BOTH = -20.0
# Width of epsilon that is enough if no other is asked for, nats.
_ENOUGH = 1e-5
# The same of delta, relative.
_ENOUGH_OF_DELTA = 1e-4
# Either, for which more work is done than usual.
AT_MOST = 1e-3
# Points of all transforms of one end, usually: some 0.15 s.
_USUAL_WORK = 1.1e7
# The same, at most, of all passes of one question: 5 s.
_MOST_WORK = 2.5e8
# Points of a window for which there is work in any case, however many the states.
_SURE_POINTS = 4000
# Most points of a window.
_MOST_POINTS = 2.0**19
# Part of the share that may be lost by what is left out of kernels: less than what
# falls away at the right end of a window.
_LEFT_OUT = 0.01
# Share of a width for which a spacing is chosen.
_CLOSER = 0.8
# Refinements of one question, at most.
_MOST_REFINEMENTS = 8
# Logarithm of a delta below which masses may underflow.
_LEAST_LOG_SIZE = -550.0
# Rounding, over what is looked at, from which on a smaller tilt is tried.
_VISIBLE = 1e-4
# Factor of a tilt that was too steep.
_FLATTER = 0.75
# Variance that a move has too much and too little, over the squared spacing; a guess:
# a sixth each if all were even within cells, and few strategies take the most moves.
_SPREAD = 0.04
# Tilts that are tried, at most.
_MOST_TRIALS = 6
# Of a whole profile: width of epsilon that the spacing aims at, nats, and its share of
# a move's squared spacing.
_WIDTH_OF_PROFILE = 2e-4
_ERROR_OF_PROFILE = 0.1
# Least number of points of its window, and the largest.
_LEAST_POINTS_OF_PROFILE = 1_000
_MOST_POINTS_OF_PROFILE = 2**17
# Points of all transforms of one row of it, at most: some 10 s.
_MOST_WORK_OF_PROFILE = 2e9


class Solver:
    """The passes of one question: coarse ones, then finer ones where they say.

    The question is one target: log(delta) < 0 and finite, or epsilon >= 0 and finite.

    Attributes:
      known: the ends where no pass is needed; else None.
      views: of each orientation where its answer is; near: without what counts for
        nothing in it.
      uppers: of each orientation the upper end found, at first Rényi's.
      lower: the lower end found, of the orientation whose upper one is the largest.
    """

    def __init__(self, question: Question, problem: Problem) -> None:
        self.question, self.problem = question, problem
        # By how much losses and masses may be off along a path, and what it loses.
        costs = [
            getattr(side, field)
            for field in ("displaced", "mass_error", "log_kept")
            for side in (problem.lower, problem.upper)
        ]
        costs.append([1.0] * len(problem.runs))
        *errors, _, lost, self.most_moves = problem.graph.most(np.abs(costs).T).tolist()
        self.errors = {False: errors[::2], True: errors[1::2]}
        self.atoms = atoms_of(problem)
        self.filters = Filter.of(problem)
        self.lower = question.nothing
        self.transforms = sum(len(moves) + 1 for moves in problem.graph.moves)
        self.spacings = dict.fromkeys(problem.orientations, math.inf)
        self.work_left = max(_MOST_WORK, _SURE_POINTS * self.transforms)
        # Of the answer, relative, what may be lost by looking at less than everything.
        self.share = _ENOUGH
        # Of everything being lost at once, at most.
        self.lost = -math.expm1(-lost) * (1 + RDP_ROUNDING)
        self.log_lost = math.log(self.lost) if self.lost else -math.inf
        self.uppers = {
            b: of.answer(question, self.log_lost) for b, of in self.filters.items()
        }
        self.views = {
            b: View.expected(question, self.filters, b, self.lost) for b in self.filters
        }
        self.near = dict(self.views)
        self.known = self._without_passes()

    def _without_passes(self) -> Ends | None:
        """The ends where nothing, or everything, may be lost."""
        asked, problem = self.question, self.problem
        if not any(problem.upper.losses) and not any(problem.upper.log_kept):
            return Ends(asked.nothing, asked.nothing)
        views = self.views.values()
        if not np.isfinite(np.array(list(views))).all():
            return Ends(asked.nothing, asked.everything)
        if self.question.is_epsilon and self.log_lost >= float(asked.target):
            return Ends(asked.nothing, asked.everything)
        if max(v.log_size for v in views) < _LEAST_LOG_SIZE:
            # Masses behind it would underflow: Rényi's bound stands.
            return Ends(asked.nothing, max(self.uppers.values()))
        return None

    @property
    def spacing(self) -> float:
        """The finest that was looked at."""
        return min(self.spacings.values())

    @property
    def expected(self) -> float:
        """Where the answer is expected; an estimate."""
        return max(map(self._expected_at, self.views))

    def _expected_at(self, backward: bool) -> float:
        view = self.views[backward]
        return view.at if self.question.is_epsilon else view.log_size

    @property
    def lead(self) -> bool:
        """The orientation whose upper end is the larger."""
        return max(self.uppers, key=lambda b: self.uppers[b])

    @property
    def width(self) -> float:
        """Of epsilon in nats, of delta relative."""
        upper = max(self.uppers.values())
        return 0.0 if upper == self.lower else upper - self.lower

    def answer(self, width: float | None, *, at_least: float = -math.inf) -> Ends:
        """Certified ends of epsilon or log(delta) of the worst strategy.

        Args:
          width: that is aimed at: of epsilon in nats, of delta relative. None is 1e-5,
            or 1e-4 of delta, where that is quickly had, and else 1e-3 of either. Work
            has a bound, though: at a tiny delta the upper end may be Rényi's.
          at_least: an upper end below it need not be a close one.
        """
        if self.known is not None:
            return self.known
        exact = ends_of_finite(self.question, self.problem)
        if exact is not None:
            return exact
        enough = _ENOUGH if self.question.is_epsilon else _ENOUGH_OF_DELTA
        self.share = min(width or enough, _ENOUGH)
        self.begin()
        if max(self.uppers.values()) > at_least:
            self.refine(width or enough, width or AT_MOST)
        upper = max(self.uppers.values())
        return Ends(min(self.lower, upper), upper)

    def begin(self) -> None:
        """Coarse passes, which say where the answer is and how wide the ends are."""
        if self._are_alike():
            return self._begin_with_both()
        lead = max(self.views, key=self._expected_at)
        for backward, view in self.views.items():
            best, rows = math.inf, list[Row]()
            window = view.window(1.0)
            for _ in range(_MOST_TRIALS):
                tried = self.window(view, view.reach / _COARSE_POINTS)
                ends = (True, False) if backward == lead else (True,)
                found = self.rows(backward, tried, *ends)
                # Where the tilt is too steep the largest values are elsewhere.
                at = np.argmin(np.abs(tried.points - view.at))
                error = found[0].error / max(found[0].values[at], 1e-300)
                if rows and not error < best:
                    break
                best, window, rows = error, tried, found
                if error < _VISIBLE or not view.tilt:
                    break
                view = view._replace(tilt=_FLATTER * view.tilt)
            self._begun(backward, window, *rows)

    def _are_alike(self) -> bool:
        """Whether one coarse pass, with no tilt, serves two orientations."""
        rights = [view.right for view in self.views.values()]
        least = min(view.log_size for view in self.views.values())
        is_wide = max(rights) < _ALIKE * min(rights)
        return len(rights) == 2 and is_wide and least > _LEAST_LOG_BOTH

    def _begin_with_both(self) -> None:
        """One pass: left of g = 1 a row is the other orientation's, times g."""
        view = self.views[False]._replace(tilt=0.0, left=self.views[True].right)
        window = self.window(view, view.reach / _COARSE_POINTS)
        (row,) = self.rows(False, window, True)
        self._begun(False, window, row)
        other = Window(window.step, 1 - window.first - window.size, window.size, -1, 0)
        self._begun(True, other, row._replace(values=row.values[::-1]))

    def _begun(
        self, backward: bool, window: Window, row: Row, below: Row | None = None
    ) -> None:
        """What coarse rows say, from above and maybe from below."""
        curve = Curve.of(row, window, up=True)
        self.uppers[backward] = min(self.uppers[backward], self.upper_end(curve))
        if below is not None:
            self.lower = self.lower_end(Curve.of(below, window, up=False), curve)
        # Not a bound: where the curve is, and how steep.
        seen = Curve.of(row._replace(error=0.0), window, up=True)
        view = self.views[backward].seen(self.question, seen, self.lost)
        self.views[backward] = view
        self.near[backward] = view.narrowed(row, window, self.share)
        self.spacings[backward] = window.step

    def refine(
        self, enough: float, at_most: float = math.inf, usual_work: float = _USUAL_WORK
    ) -> None:
        """Finer passes until the ends are close enough, or the work is too much.

        Args:
          enough: a width for which usual work is done.
          at_most: a width for which all that may be done is.
          usual_work: points of all transforms of one end.
        """
        for _ in range(_MOST_REFINEMENTS):
            view, has_lower = self.near[self.lead], self.lower > self.question.nothing
            if self.width <= enough or self.known is not None:
                return
            if view.at > FURTHEST and has_lower:
                return
            reach = view.reach * self.transforms
            finer = max(self._spacing_for(enough), reach / usual_work)
            finer = max(
                min(finer, self._spacing_for(at_most)),
                view.reach / _MOST_POINTS,
                reach / max(self.work_left, 1.0),
            )
            if finer > 0.75 * self.spacings[self.lead]:
                return
            self.work_left -= reach / finer
            self._look(finer)

    def _spacing_for(self, width: float) -> float:
        """A spacing at which the ends are expected to be so close: an estimate."""
        # Both ends' errors are of second order in the spacing.
        wide, least, spacing = self.width, 0.05, self.spacings[self.lead]
        if wide <= width:
            return spacing
        if self.lower == self.question.nothing:
            # No lower end yet, and moves that spread losses too much, and too little.
            tilt, least = self.views[self.lead].tilt, 0.15
            slope = tilt if self.question.is_epsilon else tilt**2
            wide = max(slope, 1.0) * _SPREAD * self.most_moves * spacing**2
        share = math.sqrt(_CLOSER * width / max(wide, width))
        return max(min(share, 0.7), least) * spacing

    def _look(self, spacing: float) -> None:
        """One pass for each end that may count, on windows of a spacing."""
        lead = self.lead
        for backward in sorted(self.uppers, key=lambda b: b != lead):
            if backward != lead and self.uppers[backward] <= self.lower:
                continue
            window = self.window(self.near[backward], spacing)
            ends = (True, False) if backward == lead else (True,)
            above, *below = self.rows(backward, window, *ends)
            curve = Curve.of(above, window, up=True)
            self.spacings[backward] = min(window.step, self.spacings[backward])
            self.uppers[backward] = min(self.uppers[backward], self.upper_end(curve))
            for row in below:
                lower = self.lower_end(Curve.of(row, window, up=False), curve)
                self.lower = max(self.lower, lower)

    def largest_budget(self, log_delta: float, width: float, of: dict[int, int]) -> int:
        """The largest budget whose delta, at the question's epsilon, is certified.

        The graph is one of all budgets, ``of`` some states. The first that is too large
        ends a pass, as delta grows. ``width`` of log(delta) is enough to look with.
        """
        most = max(of.values())
        if self.known is not None:
            return most * (self.known.upper <= log_delta)
        self.begin()
        self.refine(width)
        within = dict.fromkeys(self.uppers, 0)
        # Where the end of the largest is within, so are those of all others.
        for backward in [b for b, end in self.uppers.items() if end > log_delta]:
            view = self.views[backward]
            window = self.window(view, min(self.spacing, view.reach))

            def is_too_large(
                state: int, row: Row, window: Window = window, way: bool = backward
            ) -> bool:
                if state not in of:
                    return False
                found = self.upper_end(Curve.of(row, window, up=True))
                if found <= log_delta:
                    within[way] = of[state]
                return found > log_delta

            self.rows(backward, window, True, visit=is_too_large)
            most = min(most, within[backward])
        return most

    def window(self, view: View, spacing: float, *, is_aligned: bool = False) -> Window:
        """The window of a view, on a lattice that has the options' atoms."""
        return view.window(spacing if is_aligned else aligned(spacing, self.atoms))

    def rows(
        self,
        backward: bool,
        window: Window,
        *ends: bool,
        visit: Callable[[int, Row], bool] | None = None,
        payoff: Callable[[int], np.ndarray] | None = None,
        offset: float = 0.0,
    ) -> list[Row]:
        """The rows of the start, from above (True) or from below; see `solve`.

        With an offset the points are ``log g`` plus it.
        """
        of = self.filters[backward]
        # A loss further than the answer's whole view has too little mass to count.
        cells = max(
            2 * window.size, math.ceil(self.views[backward].reach / window.step)
        )
        reach = min(cells, int(FURTHEST / window.step))
        left_out = math.log(_LEFT_OUT * self.share / self.most_moves)
        spacing = Spacing(window.step, reach, self.views[backward].log_size, left_out)
        passes = [
            Pass(
                (self.problem.upper if up else self.problem.lower).kernels(
                    spacing, backward=backward, tilt=window.tilt, up=up
                ),
                window,
                up,
                # No state is worth more than the first, as going on never loses.
                lambda x: np.minimum(of.bound(x - offset) + self.lost, 1.0),
                payoff,
            )
            for up in ends
        ]
        seen = None if visit is None else lambda state, rows: visit(state, rows[0])
        return solve(self.problem.graph, passes, seen)

    def upper_end(self, curve: Curve) -> float:
        """The upper end that a curve from above says."""
        return curve.upper_end(self.question, *self.errors[True])

    def lower_end(self, curve: Curve, above: Curve) -> float:
        """The lower end that curves from below and above say."""
        return curve.lower_end(above, self.question, *self.errors[False])


class Profile(NamedTuple):
    """*Upper bounds* of ``H_g`` at ``log g = 0, h, 2 h, ...``: what a price rests on.

    Chords in g between them lie above the truth too, which is convex; beyond the last
    point it is no more than there. The truth at log g is within
    ``e^mass_error`` times these bounds at ``log g - displaced``.

    Attributes:
      step: h, nats.
      values: (n,) falling.
      displaced: nats.
      mass_error: of the logarithm.
    """

    step: float
    values: np.ndarray
    displaced: float
    mass_error: float

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Epsilons and upper bounds of delta there, errors included."""
        epsilons = self.step * np.arange(len(self.values)) + self.displaced
        deltas = np.minimum(self.values * math.exp(self.mass_error), 1.0)
        # Left of g = 1 the divergence is at most 1 - g more than there.
        first = min(float(deltas[0]) + self.displaced, 1.0)
        return np.append(0.0, epsilons), np.append(first, deltas)


def profiles_above(problem: Problem, least: float) -> list[Profile] | None:
    """The profile of each orientation; None where so little is never reached.

    Args:
      problem: of one path.
      least: in (0, 1), the divergence to which it is to be known.
    """
    solver = Solver(EpsilonAt(np.asarray(math.log(least))), problem)
    errors = tuple(solver.errors[True])
    if solver.known is not None:
        nothing = Profile(1.0, np.zeros(1), *errors)
        return None if solver.known.upper > 0 else [nothing]
    most = _MOST_WORK_OF_PROFILE / solver.transforms
    most = max(min(_MOST_POINTS_OF_PROFILE, most), _LEAST_POINTS_OF_PROFILE)
    fine = math.sqrt(_WIDTH_OF_PROFILE / (_ERROR_OF_PROFILE * solver.most_moves))
    found = []
    for backward, view in solver.views.items():
        spacing = max(
            min(fine, view.reach / _LEAST_POINTS_OF_PROFILE), view.reach / most
        )
        curves = []
        # Rounding is relative to the largest values: of one here, of the other there.
        for tilt in sorted({0.0, view.tilt}):
            window = solver.window(view._replace(tilt=tilt), spacing)
            (row,) = solver.rows(backward, window, True)
            curves.append(Curve.of(row, window, up=True).values)
        values = np.minimum.accumulate(np.minimum.reduce(curves))
        found.append(Profile(window.step, values, *errors))
    return found

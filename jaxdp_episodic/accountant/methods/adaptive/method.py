"""Certified ends of epsilon and delta of the worst strategy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

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
from jaxdp_episodic.accountant.methods.adaptive.reading import (
    Curve,
    curve_of,
    lower_end,
    upper_end,
)
from jaxdp_episodic.accountant.methods.adaptive.recursion import (
    Pass,
    Row,
    Window,
    solve,
)
from jaxdp_episodic.accountant.methods.adaptive.view import (
    View,
    are_alike,
    expected_view,
    lengthened,
    narrowed,
    seen_view,
    window_of,
)
from jaxdp_episodic.accountant.methods.question import Question

# Points of the first, coarse windows.
_COARSE_POINTS = 800
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


class Solver:
    """The passes of one question: coarse ones, then finer ones where they say.

    The question is one target: log(delta) < 0 and finite, or epsilon >= 0 and finite.

    Attributes:
      known: the ends where no pass is needed; else None.
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
            b: expected_view(question, self.filters, b, self.lost) for b in self.filters
        }
        # The same without what counts for nothing in this question's answer.
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
        return self.found()

    def begin(self) -> None:
        """Coarse passes, which say where the answer is and how wide the ends are."""
        if are_alike(self.views):
            return self._begin_with_both()
        waiting, lead = dict(self.views), max(self.views, key=self._expected_at)
        best: dict[bool, tuple[float, Window, list[Row]]] = {}
        for trial in range(_MOST_TRIALS):
            windows = {
                backward: self.window(view, (view.left + view.right) / _COARSE_POINTS)
                for backward, view in waiting.items()
            }
            size = max(window.size for window in windows.values())
            passes = {
                (backward, up): self.side(backward, lengthened(window, size), up=up)
                for backward, window in windows.items()
                for up in ((True, False) if backward == lead else (True,))
            }
            rows = solve(self.problem.graph, list(passes.values()))
            for backward, view in list(waiting.items()):
                here = [
                    r for r, (b, _) in zip(rows, passes, strict=True) if b == backward
                ]
                window = passes[backward, True].window
                at = np.argmin(np.abs(window.points - view.at))
                # Where the tilt is too steep the largest values are elsewhere.
                error = here[0].error / max(here[0].values[at], 1e-300)
                if is_better := backward not in best or error < best[backward][0]:
                    best[backward] = error, window, here
                waiting[backward] = view._replace(tilt=_FLATTER * view.tilt)
                is_last = trial == _MOST_TRIALS - 1 or not view.tilt
                if is_last or error < _VISIBLE or not is_better:
                    del waiting[backward]
                    self._begun(backward, *best[backward][1:])
            if not waiting:
                return

    def _begin_with_both(self) -> None:
        """One pass for both orientations, where no values need be multiplied up.

        Left of g = 1 a row is the other orientation's, times g.
        """
        ahead, back = self.views[False], self.views[True]
        view = ahead._replace(tilt=0.0, left=back.right)
        window = self.window(view, (view.left + view.right) / _COARSE_POINTS)
        row = self.row(False, window, up=True)
        self._begun(False, window, [row])
        other = Window(window.step, 1 - window.first - window.size, window.size, -1, 0)
        self._begun(True, other, [row._replace(values=row.values[::-1])])

    def _begun(self, backward: bool, window: Window, rows: list[Row]) -> None:
        """What coarse rows say, from above and maybe from below."""
        row, *low = rows
        curve = curve_of(row, window, up=True)
        self.uppers[backward] = min(self.uppers[backward], self.upper_end(curve))
        for below in low:
            self.lower = self.lower_end(curve_of(below, window, up=False), curve)
        # Not a bound: where the curve is, and how steep.
        seen = curve_of(row._replace(error=0.0), window, up=True)
        view = seen_view(self.question, self.views[backward], seen, self.lost)
        self.views[backward] = view
        self.near[backward] = narrowed(view, row, window, self.share)
        self.spacings[backward] = window.step

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
            window = self.window(view, min(self.spacing, view.right + view.left))

            def is_too_large(
                state: int, row: Row, window: Window = window, way: bool = backward
            ) -> bool:
                if state not in of:
                    return False
                found = self.upper_end(curve_of(row, window, up=True))
                if found <= log_delta:
                    within[way] = of[state]
                return found > log_delta

            self.row(backward, window, up=True, visit=is_too_large)
            most = min(most, within[backward])
        return most

    @property
    def lead(self) -> bool:
        """The orientation whose upper end is the larger."""
        return max(self.uppers, key=lambda b: self.uppers[b])

    @property
    def width(self) -> float:
        """Of epsilon in nats, of delta relative."""
        upper = max(self.uppers.values())
        return 0.0 if upper == self.lower else upper - self.lower

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
            reach = (view.left + view.right) * self.transforms
            finer = max(self._spacing_for(enough), reach / usual_work)
            finer = max(
                min(finer, self._spacing_for(at_most)),
                (view.left + view.right) / _MOST_POINTS,
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

    def found(self) -> Ends:
        """The ends."""
        upper = max(self.uppers.values())
        return Ends(min(self.lower, upper), upper)

    def _look(self, spacing: float) -> None:
        """One pass for each end that may count, on windows of a spacing."""
        lead = self.lead
        window = self.window(self.near[lead], spacing)
        sides = [self.side(lead, window, up=up) for up in (True, False)]
        curve, below = (
            curve_of(row, window, up=one.up)
            for one, row in zip(sides, solve(self.problem.graph, sides), strict=True)
        )
        self.spacings[lead] = window.step
        self.uppers[lead] = min(self.uppers[lead], self.upper_end(curve))
        self.lower = max(self.lower, self.lower_end(below, curve))
        for other in self.uppers:
            if other != lead and self.uppers[other] > self.lower:
                window = self.window(self.near[other], spacing)
                self.spacings[other] = min(window.step, self.spacings[other])
                row = self.row(other, window, up=True)
                upper = self.upper_end(curve_of(row, window, up=True))
                self.uppers[other] = min(self.uppers[other], upper)

    def window(self, view: View, spacing: float, *, is_aligned: bool = False) -> Window:
        """The window of a view, on a lattice that has the options' atoms."""
        step = spacing if is_aligned else aligned(spacing, self.atoms)
        return window_of(view, step)

    def row(
        self,
        backward: bool,
        window: Window,
        *,
        up: bool,
        visit: Callable[[int, Row], bool] | None = None,
        payoff: Callable[[int], np.ndarray] | None = None,
        offset: float = 0.0,
    ) -> Row:
        """The row of the start, from above or from below; see `solve`.

        With an offset the points are ``log g`` plus it.
        """
        one = self.side(backward, window, up=up, payoff=payoff, offset=offset)
        seen = None if visit is None else lambda state, rows: visit(state, rows[0])
        return solve(self.problem.graph, [one], seen)[0]

    def side(
        self,
        backward: bool,
        window: Window,
        *,
        up: bool,
        payoff: Callable[[int], np.ndarray] | None = None,
        offset: float = 0.0,
    ) -> Pass:
        """What `solve` takes for one side."""
        of = self.filters[backward]
        taken = self.problem.upper if up else self.problem.lower
        reach = min(2 * window.size, int(FURTHEST / window.step))
        left_out = math.log(_LEFT_OUT * self.share / self.most_moves)
        log_size = self.views[backward].log_size
        spacing = Spacing(window.step, reach, log_size, left_out)
        return Pass(
            taken.kernels(spacing, backward=backward, tilt=window.tilt, up=up),
            window,
            up,
            # No state is worth more than the first, as going on never loses.
            lambda x: np.minimum(of.bound(x - offset) + self.lost, 1.0),
            payoff,
        )

    def upper_end(self, curve: Curve) -> float:
        """The upper end that a curve from above says."""
        return upper_end(self.question, curve, *self.errors[True])

    def lower_end(self, curve: Curve, above: Curve) -> float:
        """The lower end that curves from below and above say."""
        return lower_end(self.question, curve, above, *self.errors[False])

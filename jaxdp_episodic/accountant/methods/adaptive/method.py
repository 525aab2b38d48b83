"""Certified ends of epsilon and delta of the worst strategy."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.kernel import Spacing, kernel_of
from jaxdp_episodic.accountant.methods.adaptive.problem import (
    FURTHEST,
    RDP_ROUNDING,
    Filter,
    Problem,
)
from jaxdp_episodic.accountant.methods.adaptive.recursion import (
    Curve,
    Pass,
    Row,
    Window,
    solve,
)
from jaxdp_episodic.accountant.methods.certified.plan import aligned
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Interval, Question

_BESIDE = 1e-11  # share of a loss by which lattice points are below it
_COARSE_POINTS = 800  # points of the first, coarse windows
_ENOUGH = 1e-5  # default width of epsilon, nats
_ENOUGH_OF_DELTA = 1e-4  # default width of delta, relative
# Width of either, up to which more than the usual work is done.
AT_MOST = 1e-3
# Usual points of all transforms of one end: some 0.3 s.
_USUAL_WORK = 2.5e7
# Largest number of points of all passes of one question: 5 s.
_MOST_WORK = 2.5e8
# Points of a window that are always allowed, however many states there are.
_SURE_POINTS = 4000
_MOST_POINTS = 2.0**19  # largest number of points of a window
# Share of the answer that truncating kernels may lose.
_LEFT_OUT = 1e-9
_CLOSER = 0.8  # share of a width for which a spacing is chosen
_MOST_REFINEMENTS = 8  # largest number of refinements of one question
# No further refinement is tried if the last one left more than this share of the width.
_STALLED = 0.97
# Logarithm of a delta below which probabilities may underflow.
_LEAST_LOG_SIZE = -550.0
# Relative rounding error above which a smaller tilt is tried.
_VISIBLE = 1e-4
_FLATTER = 0.75  # factor of a tilt that was too steep
_MOST_TRIALS = 5  # largest number of tilts that are tried before 0
# Logarithm of the smallest delta that a pass without a tilt resolves.
_LEAST_LOG_FLAT = -20.0
# Largest exponent of a weight over the window: float64 ends at 700.
_MOST_EXPONENT = 300.0
# Smallest distance of the ends of a window from the answer, nats.
_LEAST_REACH = 1e-3
# Share of delta to which values have decreased at the window's right end.
_RIGHT_SHARE = 1e-6
_LEFT_VALUE = 1e-6  # value to which they have decreased at its left end
_SLOPE_NATS = 0.05  # distance for a difference quotient, nats
_MOST_TILT = 100.0  # largest tilt, per nat
# Of a profile: points per nat and root of moves; fewest, most, most of a row: some 10 s
_POINTS_OF_PROFILE = 22, 1e3, 2.0**17, 2e9


class View(NamedTuple):
    """The range in which one orientation's curve is computed."""

    at: float  # the expected (or given) epsilon
    log_size: float  # the expected (or given) log(delta)
    tilt: float  # minus the slope of log(delta) there
    left: float  # nats from g = 1 to the left end of the window
    right: float  # nats from g = 1 to the right end of the window

    @classmethod
    def expected(cls, question: Question, of: Filter, other: Filter) -> View:
        """Returns the view that Rényi's filters predict; not finite if they fail."""
        at = log_size = float(question.target)
        found, tilt = of.best(question)
        at, log_size = (found, log_size) if question.is_epsilon else (at, found)
        if not (math.isfinite(at) and math.isfinite(log_size)):
            return cls(at, log_size, 0.0, 0.0, 0.0)
        right = max(of.epsilon(log_size + math.log(_RIGHT_SHARE)), at)
        left = other.epsilon(math.log(_LEFT_VALUE))
        left, right = (min(x + _LEAST_REACH, FURTHEST) for x in (left, right))
        return cls(at, log_size, min(tilt, _MOST_TILT), left, right)

    @property
    def reach(self) -> float:
        """The window's length, nats."""
        return self.left + self.right

    def window(self, step: float) -> Window:
        """Returns the window for a lattice spacing; its weights fit float64."""
        first = -math.ceil(self.left / step)
        size = math.ceil(self.right / step) - first + 3
        tilt = min(self.tilt, _MOST_EXPONENT / (step * size))
        return Window(step, first, size, tilt, min(self.at, self.right))

    def seen(self, question: Question, curve: Curve) -> View:
        """Returns the view that follows from a coarse curve."""
        at = self.at
        if question.is_epsilon:
            at = min(curve.epsilon_above(math.exp(self.log_size)), at)
        log_values = np.log(curve.values + 1e-300)
        log_size, beside = np.interp([at, at + _SLOPE_NATS], curve.x, log_values)
        small = np.flatnonzero(log_values <= log_size + math.log(_RIGHT_SHARE))
        end = int(small[0]) if small.size else len(curve.x) - 1
        right = float(curve.x[end])
        # Less than the slope for a heavy tail, which would dominate if tilted.
        tilt = (log_size - beside) / _SLOPE_NATS
        if right > at + _SLOPE_NATS:
            tilt = min(tilt, (log_size - log_values[end]) / (right - at))
        right = min(max(right, at) + _LEAST_REACH, FURTHEST)
        log_size, tilt = min(float(log_size), 0.0), float(np.clip(tilt, 0, _MOST_TILT))
        return View(at, log_size, tilt, self.left, right)


class Solver:
    """The passes for one question: coarse ones, then finer ones where they matter."""

    def __init__(self, question: Question, problem: Problem) -> None:
        self.question, self.problem = question, problem
        # Sums along a path: errors of losses, and infinite losses.
        costs = [
            [abs(getattr(option, field)) for option in options]
            for field in ("displaced", "log_kept")
            for options in (problem.lower, problem.upper)
        ]
        costs.append([1.0] * len(problem.runs))
        below, above, _, lost, self.most_moves = problem.graph.most(
            np.array(costs).T
        ).tolist()
        self.displaced = {False: below, True: above}
        self.atoms = problem.atoms()
        self.filters = Filter.of(problem)
        self.lower = question.nothing
        self.transforms = sum(len(moves) + 1 for moves in problem.graph.moves)
        self.spacings = dict.fromkeys(problem.orientations, math.inf)
        # Upper bound of the probability of an infinite loss.
        self.lost = min(-math.expm1(-lost) * (1 + RDP_ROUNDING), 1.0)
        log_lost = math.log(self.lost) if self.lost else -math.inf
        self.uppers, self.views = {}, {}
        for b, of in self.filters.items():
            self.uppers[b] = of.answer(question, log_lost)
            other = self.filters.get(not b, of)
            self.views[b] = self._tilted(View.expected(question, of, other))
        self.known = self._without_passes(log_lost)

    def _tilted(self, view: View) -> View:
        """Weighs both ends of a window alike if values do not decrease to 0."""
        if self.lost and view.reach:
            tilt = min(-math.log(self.lost) / view.reach, _MOST_TILT)
            view = view._replace(tilt=tilt if view.log_size < _LEAST_LOG_FLAT else 0.0)
        return view

    def _without_passes(self, log_lost: float) -> Interval | None:
        """Returns the ends if the answer is trivial, or beyond float64."""
        asked, upper = self.question, self.problem.upper
        loses = any(option.losses or option.log_kept for option in upper)
        if not (self.most_moves and loses):
            return Interval(asked.nothing, asked.nothing)
        views = self.views.values()
        if not np.isfinite(np.array(list(views))).all():
            return Interval(asked.nothing, asked.everything)
        if asked.is_epsilon and log_lost >= float(asked.target):
            return Interval(asked.nothing, asked.everything)
        if max(v.log_size for v in views) < _LEAST_LOG_SIZE:
            # Probabilities would underflow, so the Rényi bound is the answer.
            return Interval(asked.nothing, max(self.uppers.values()))
        return None

    @property
    def lead(self) -> bool:
        """The orientation with the larger upper end."""
        return max(self.uppers, key=lambda b: self.uppers[b])

    @property
    def width(self) -> float:
        """The width of epsilon in nats, or of delta relative."""
        upper = max(self.uppers.values())
        return 0.0 if upper == self.lower else upper - self.lower

    def answer(self, width: float | None, *, at_least: float = -math.inf) -> Interval:
        """Returns certified ends of epsilon or log(delta) of the worst strategy."""
        if self.known is not None:
            return self.known
        enough = _ENOUGH if self.question.is_epsilon else _ENOUGH_OF_DELTA
        self.begin()
        if max(self.uppers.values()) > at_least:
            self.refine(width or enough, width or AT_MOST)
        upper = max(self.uppers.values())
        return Interval(min(self.lower, upper), upper)

    def begin(self) -> None:
        """Runs coarse passes, which locate the answer and show the ends' width."""
        lead = self.lead
        for backward, view in self.views.items():
            # Without a tilt larger deltas keep their digits, and some heavy tails.
            tilt = view.tilt if view.log_size < _LEAST_LOG_FLAT else 0.0
            window, row = self._trials(backward, view._replace(tilt=tilt))
            self._found(backward, window, row, below=backward == lead)
            # No bound, only position and slope; left of it rounding may be larger.
            curve = Curve.of(row._replace(error=0.0), window, up=True)
            curve = Curve(curve.x, np.maximum.accumulate(curve.values[::-1])[::-1])
            view = self._tilted(view.seen(self.question, curve))
            if view.tilt > window.tilt:
                view = view._replace(tilt=self._trials(backward, view)[0].tilt)
            self.views[backward] = view

    def _trials(self, backward: bool, view: View) -> tuple[Window, Row]:
        """A coarse pass from above, with the first tilt that does not show rounding."""
        window = self.window(view, view.reach / _COARSE_POINTS)
        return self.flattened(backward, window, view.at, _VISIBLE)

    def flattened(
        self, backward: bool, window: Window, at: float, enough: float, **how: Any
    ) -> tuple[Window, Row]:
        """Returns a row from above with the first tilt whose rounding is small at x."""
        found = []
        for tilt in [window.tilt * _FLATTER**i for i in range(_MOST_TRIALS)] + [0.0]:
            one = window._replace(tilt=tilt)
            row = self.row(backward, one, **how)
            value = float(row.values[np.argmin(np.abs(one.points - at))])
            if value <= row.error and self.question.is_epsilon:
                # No loss may be as large as x: read it where the answer would be.
                delta = math.exp(float(self.question.target))
                end = min(Curve.of(row, one, up=True).epsilon_above(delta), at)
                value = delta * math.exp(one.tilt * (end - one.center))
            found.append((row.error / max(value, 1e-300), one, row))
            if found[-1][0] < enough or not tilt:
                break
        return min(found, key=operator.itemgetter(0))[1:]

    def _found(
        self, backward: bool, window: Window, above: Row, *, below: bool
    ) -> None:
        """Updates the ends from a row from above, and from one ``below`` if wanted."""
        curve = Curve.of(above, window, up=True)
        self.spacings[backward] = min(window.step, self.spacings[backward])
        self.uppers[backward] = min(self.uppers[backward], self.upper_end(curve))
        if below:
            lower = Curve.of(self.row(backward, window, up=False), window, up=False)
            self.lower = max(self.lower, self.lower_end(lower, curve))

    def refine(self, enough: float, at_most: float = math.inf) -> None:
        """Runs finer passes until the ends are close enough, or too much work."""
        before, work = math.inf, max(_MOST_WORK, _SURE_POINTS * self.transforms)
        for number in range(_MOST_REFINEMENTS):
            # Finer lattices do not help if rounding keeps the ends apart.
            if number > 1 and self.width >= _STALLED * before:
                return
            before = self.width
            lead, view = self.lead, self.views[self.lead]
            if self.width <= enough or view.at > FURTHEST:
                return
            reach = view.reach * self.transforms
            finer = max(self._spacing_for(enough), reach / _USUAL_WORK)
            finer = min(finer, self._spacing_for(at_most))
            finer = max(finer, view.reach / _MOST_POINTS, reach / max(work, 1.0))
            if finer > 0.75 * self.spacings[lead]:
                return
            work -= reach / finer
            for backward in sorted(self.uppers, key=lambda b: b != lead):
                # Each end that may matter.
                if backward == lead or self.uppers[backward] > self.lower:
                    window = self.window(self.views[backward], finer)
                    row = self.row(backward, window)
                    self._found(backward, window, row, below=backward == lead)

    def _spacing_for(self, width: float) -> float:
        """*Estimates* the spacing that gives this width."""
        if self.width <= width:
            return self.spacings[self.lead]
        # Both ends' errors are of second order in the spacing.
        share = math.sqrt(_CLOSER * width / self.width)
        # Without a lower end the width says little.
        least = 0.15 if self.lower == self.question.nothing else 0.05
        return min(max(share, least), 0.7) * self.spacings[self.lead]

    def window(self, view: View, spacing: float) -> Window:
        """Returns the window of a view, with atoms at lattice points."""
        found = aligned(spacing, self.atoms, np.ones(len(self.atoms)))
        # Just above a point: an atom just below one would count as the point before.
        return view.window(found * (1 - _BESIDE))

    def row(
        self,
        backward: bool,
        window: Window,
        *,
        up: bool = True,
        visit: Callable[[int, Row], None] | None = None,
        payoff: Callable[[int], np.ndarray] | None = None,
        offset: float = 0.0,
    ) -> Row:
        """Returns the row of the start, from above or from below; see `solve`."""
        of, view, step = self.filters[backward], self.views[backward], window.step
        # A loss beyond the whole view of the answer has a negligible probability.
        cells = max(2 * window.size, math.ceil(view.reach / step))
        left_out = math.log(_LEFT_OUT / self.most_moves)
        reach = min(cells, int(FURTHEST / step))
        spacing = Spacing(
            step, reach, view.log_size, left_out, backward, window.tilt, up
        )
        options = self.problem.upper if up else self.problem.lower
        kernels = [kernel_of(one, spacing) for one in options]

        def beyond(x: np.ndarray) -> np.ndarray:
            """No state has a larger value than the first: continuing never loses."""
            return np.minimum(of.bound(x - offset) + self.lost, 1.0)

        one = Pass(kernels, window, up, beyond, payoff)
        return solve(self.problem.graph, one, visit)

    def ends_of(self, states: Mapping[int, int]) -> np.ndarray:
        """Returns the *upper ends* of states, given each one's place in the array."""
        found = np.full(len(states), self.question.nothing)
        if self.known is not None:
            found[1:] = self.known.upper
            return found
        for backward, view in self.views.items():
            window = self.window(view, min(*self.spacings.values(), view.reach))

            def read(state: int, row: Row, window: Window = window) -> None:
                place = states.get(state)
                if place is not None and row.values[-window.first :].any():
                    end = self.upper_end(Curve.of(row, window, up=True))
                    found[place] = max(found[place], end)

            self.row(backward, window, visit=read)
        return found

    def upper_end(self, curve: Curve) -> float:
        """Returns the upper end that follows from a curve from above."""
        return curve.upper_end(self.question, self.displaced[True])

    def lower_end(self, curve: Curve, above: Curve) -> float:
        """Returns the lower end that follows from curves from below and above."""
        return curve.lower_end(above, self.question, self.displaced[False])


def profiles_above(
    problem: Problem, least: float
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Returns epsilons and *upper bounds* of delta there, for each orientation.

    None if the recursion has no answer at delta ``least``.
    """
    solver = solver_of(EpsilonAt(np.asarray(math.log(least))), problem, math.inf)
    if solver.known is not None:
        return None if solver.known.upper > 0 else [(np.zeros(1), np.zeros(1))]
    displaced = solver.displaced[True]
    found, (density, fewest, most, work) = [], _POINTS_OF_PROFILE
    for backward, view in solver.views.items():
        wanted = density * view.reach * math.sqrt(solver.most_moves)
        points = max(fewest, min(wanted, most, work / solver.transforms))
        curves, spacing = [], view.reach / points
        # Rounding is relative to the largest values, which the tilt moves.
        for tilt in sorted({0.0, view.tilt}):
            window = solver.window(view._replace(tilt=tilt), spacing)
            row = solver.row(backward, window)
            curves.append(Curve.of(row, window, up=True))
            if not tilt and row.error < _VISIBLE * least:
                break
        values = np.minimum.accumulate(np.minimum.reduce([c.values for c in curves]))
        deltas = np.minimum(values, 1.0)
        # For g < 1, the divergence is at most that at 1, plus 1 - g.
        first = min(float(deltas[0]) + displaced, 1.0)
        x = np.append(0.0, curves[0].x + displaced)
        found.append((x, np.append(first, deltas)))
    return found


# Reference: docs/proofs.md, "Runs that adapt".

_ENOUGH_READ = 1e-3  # wanted relative width of u
# Smallest distance of a window's right end from the largest epsilon, nats.
_LEAST_RIGHT = 1.0
# Largest epsilon of an odometer, nats, that counts as 0: a lattice must hold it.
_TINY = 1e-6
_ROUNDING = 1e-12  # relative margin for the rounding of sums
# Logarithm of a negligible delta: larger epsilons are not considered.
_LOG_NEGLIGIBLE = -100.0


def solver_of(
    question: Question, problem: Problem, width: float = _ENOUGH_READ / 10
) -> Solver:
    """Returns a solver that has located the answer, with a suitable spacing."""
    solver = Solver(question, problem)
    if solver.known is None:
        solver.begin()
        solver.refine(width)
    return solver


def odometer_delta(problem: Problem, epsilons: Sequence[float]) -> Interval:
    """Returns certified ends of ``log u(0, 1)``, of the larger orientation."""
    largest = max(epsilons[spent] for spent in problem.graph.spent)
    # Capped epsilons hold with a larger delta, by at most the delta at the cap.
    filters = Filter.of(problem).values()
    most = max(each.epsilon(_LOG_NEGLIGIBLE) for each in filters)
    is_capped, largest = largest > most, min(largest, most)
    epsilons = np.minimum(epsilons, most).tolist()
    # Tiny ones count as 0: delta rises, by at most expm1 of the largest.
    risen = math.expm1(largest) if largest < _TINY else 0.0
    if risen:
        epsilons, largest = [0.0] * len(epsilons), 0.0
    solver = solver_of(DeltaAt(np.asarray(largest)), problem, _ENOUGH_READ)
    if solver.known is not None:
        # If delta is not computed, nothing follows for smaller epsilons.
        asked = solver.question
        is_nothing = solver.known.upper == asked.nothing
        return Interval(
            asked.nothing, asked.nothing if is_nothing else asked.everything
        )
    lower, upper = -math.inf, -math.inf
    for backward in problem.orientations:
        window, above, payoff = _seen(solver, backward, epsilons, largest)
        row = solver.row(backward, window, up=False, payoff=payoff, offset=largest)
        curve = Curve.of(above, window, up=True)
        upper = max(upper, solver.upper_end(curve))
        below = Curve.of(row, window, up=False)
        lower = max(lower, solver.lower_end(below, curve))
    if is_capped or risen:
        more = math.exp(_LOG_NEGLIGIBLE) * (1 + RDP_ROUNDING) + solver.lost + risen
        sure = math.exp(lower) - more
        lower = math.log(sure) if sure > 0 else -math.inf
    return Interval(min(lower, upper), upper)


def margin(problem: Problem, epsilons: Sequence[float], log_delta: float) -> float:
    """The least c, certified, at which ``epsilons + c`` has ``u(0, 1) <= delta``."""
    # (1 - e^(eps + c) g)_+ is the payoff at e^c g, so one recursion gives all c.
    largest = max(epsilons[spent] for spent in problem.graph.spent)
    if largest < _TINY:  # a c that is enough for 0 is enough
        epsilons, largest = [0.0] * len(epsilons), 0.0
    solver = solver_of(EpsilonAt(np.asarray(log_delta)), problem)
    if solver.known is not None:
        return 0.0 if solver.known.upper == 0 else math.inf
    found = 0.0
    for backward in problem.orientations:
        window, row, _ = _seen(solver, backward, epsilons, largest)
        end = solver.upper_end(Curve.of(row, window, up=True))
        found = max(found, end - largest)
    return found * (1 + _ROUNDING) + _ROUNDING


def _seen(
    solver: Solver, backward: bool, epsilons: Sequence[float], largest: float
) -> tuple[Window, Row, Callable[[int], np.ndarray]]:
    """Returns a window with an accurate row from above, that row, and the payoff."""
    view, spent = solver.views[backward], solver.problem.graph.spent
    right = max(view.right, largest + _LEAST_RIGHT)
    # The largest epsilon is a lattice point, since u may have a kink there.
    step = min(*solver.spacings.values(), view.left + right)
    if largest > 0:
        step = largest / math.ceil(largest / step)
    window = view._replace(right=right, at=largest).window(step)

    def payoff(state: int) -> np.ndarray:
        """Of stopping in a state, ``(1 - e^(x - gap))_+``."""
        gap = largest - epsilons[spent[state]]
        return -np.expm1(np.minimum(window.points - gap, 0.0))

    how = {"payoff": payoff, "offset": largest}
    # Rounding is larger where a margin is read, further out.
    window, row = solver.flattened(backward, window, largest, _ENOUGH_READ**2, **how)
    return window, row, payoff

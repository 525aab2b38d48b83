"""How many times a base, composed with itself, is a bound of a run; certified.

The run from above and the base from below are put on one lattice of losses. Their
profiles are linear in g between its points, and constant beyond the last, so what holds
at all points holds at every g >= 1; and as it holds in both directions, at every g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.graph import ONCE, Graph
from jaxdp_episodic.accountant.methods.adaptive.kernel import (
    Kernel,
    Spacing,
    kernel_of,
    with_failure,
)
from jaxdp_episodic.accountant.methods.adaptive.problem import (
    FURTHEST,
    Problem,
    aligned,
    atoms_of,
)
from jaxdp_episodic.accountant.methods.adaptive.profile import profiles_above
from jaxdp_episodic.accountant.methods.rdp.method import rdp_curve
from jaxdp_episodic.accountant.methods.run import Run

# Spacing of the lattice in deviations of the run's loss: an error of second order, of
# a thousandth of a price or less where the loss is nearly Gaussian.
_SPACING = 1 / 40
# Least spacing, nats: a window has at most some hundred thousand cells.
_LEAST_SPACING = 1e-4
# Largest spacing, nats.
_MOST_SPACING = 0.05
# Nats beyond which a loss counts as infinite (of the run), or as none (of the base):
# its exponential would be no number of float64.
_FURTHEST_OF_SUMS = 600.0
# Logarithm of the mass, over the floor, that is left out of a lattice.
_LOG_LEFT_OUT = -32.0
# Order at which a loss's variance is read off Rényi's divergence, and its mean.
_ORDER = 1.01
# Rounding of a sum of masses, relative, for each cell and one time.
_ROUNDING = 1e-15
# First share of a number by which the next one that is tried is larger.
_FIRST_SHARE = 0.01


def least_number(
    graph: Graph, runs: Sequence[Run], base: Run, *, floor: float, most: int
) -> float:
    """The smallest n with ``H_g(run) <= floor + (1 - floor) H_g(base, n times)``.

    For all g >= 0 and both directions. An *upper end*: of smaller n it is not proven.

    Args:
      graph: of the run, which is any strategy; `ONCE` of one that is fixed.
      runs: the graph's options, each of one setting and path.
      base: likewise, taken once.
      floor: in (0, 1).
      most: the largest n.

    Returns:
      n >= 0; inf where it is more than ``most``.
    """
    problem = Problem.of(graph, [*runs, base])
    found = _Comparison(problem, floor)
    if found.holds(0):
        return 0.0
    if not found.may_hold(most):
        return math.inf
    low, high = 0, min(found.guess, most)
    stride = max(math.ceil(_FIRST_SHARE * high), 1)
    while not found.holds(high):
        if high == most:
            return math.inf
        low, high, stride = high, min(high + stride, most), 2 * stride
    while high - low > 1:
        # From a guess that is enough downwards, in steps that grow, then by halves.
        tried = max(high - stride, low + 1) if low == 0 else (low + high) // 2
        if found.holds(tried):
            high, stride = tried, 2 * stride
        else:
            low = tried
    return float(high)


class _Comparison:
    """A run, from above, and a base, from below, on one lattice."""

    def __init__(self, problem: Problem, floor: float) -> None:
        self.problem, self.floor = problem, floor
        # Of either direction: what a loss is on average, and its variance about twice.
        order = np.array([_ORDER])
        costs = [
            [rdp_curve(order, one, way) for one in problem.runs]
            for way in ("forward", "backward")
        ]
        means = [
            float(max(np.max(problem.graph.most(np.stack(each))) for each in costs)),
            float(max(np.max(each[-1]) for each in costs)),
        ]
        deviation = math.sqrt(2 * means[0]) if math.isfinite(means[0]) else math.inf
        step = min(max(_SPACING * deviation, _LEAST_SPACING), _MOST_SPACING)
        step = aligned(step, atoms_of(problem))
        log_size = math.log(floor)
        self.spacing = Spacing(step, int(FURTHEST / step), log_size, _LOG_LEFT_OUT)
        ratio = means[0] / means[1] if means[1] > 0 else math.inf
        self.guess = max(round(min(ratio, 1e15)), 1)
        self.above = self._above()
        upper = problem.upper
        self.displaced, self.mass_error = (
            float(problem.graph.most(np.asarray(each)))
            for each in (upper.displaced, upper.mass_error)
        )

    def _above(self) -> dict[bool, np.ndarray]:
        """Of each orientation bounds at ``log g = 0, h, ...``; beyond, the last one."""
        problem, h = self.problem, self.spacing.step
        if problem.graph != ONCE:
            found = profiles_above(problem, self.floor, h)
            if found is None:
                return dict.fromkeys(problem.orientations, np.ones(1))
            return {backward: one.values for backward, one in found.items()}
        above = {}
        for backward in problem.orientations:
            run = self._kernel(0, 1, backward=backward)
            above[backward] = _profile(run, h, _last(run, h), up=True)
        return above

    def may_hold(self, number: int) -> bool:
        """Whether the base loses everything at once with chance enough for the run."""
        lost = -math.expm1(number * self.problem.lower.log_kept[-1])
        most = max(float(values[-1]) for values in self.above.values())
        return most <= self.floor + (1 - self.floor) * lost

    def holds(self, number: int) -> bool:
        """Whether that many of the base are proven to be enough."""
        lower = self.problem.lower
        displaced = self.displaced + number * lower.displaced[-1]
        scaled = self.mass_error + number * lower.mass_error[-1]
        # A profile moved by s nats moves by (e^s - 1) P(loss > ...) at most; so does
        # a divergence of at most 1 that is scaled. Both are taken twice.
        moved = 2 * (math.expm1(displaced) + math.expm1(scaled))
        given = self.floor * (1 - _ROUNDING) - moved
        if given <= 0:
            return False
        h = self.spacing.step
        for backward, above in self.above.items():
            base = self._kernel(-1, number, backward=backward)
            last = max(_last(base, h), len(above) - 1)
            above = np.pad(above, (0, last + 1 - len(above)), mode="edge")
            below = _profile(base, h, last, up=False)
            if not np.all(above <= given + (1 - self.floor) * below):
                return False
        return True

    def _kernel(self, which: int, number: int, *, backward: bool) -> Kernel:
        """Of the run (0) from above, or of the base (-1) from below."""
        up = which == 0
        side = self.problem.upper if up else self.problem.lower
        kernel = kernel_of(
            side.losses[which],
            [number * count for count in side.counts[which]],
            self.spacing,
            backward=backward,
            tilt=0.0,
            up=up,
        )
        log_kept = number * side.log_kept[which]
        return with_failure(kernel, log_kept, self.spacing.step, up=up)


def _last(kernel: Kernel, step: float) -> int:
    """The furthest point behind which a kernel's profile is constant."""
    last = max(kernel.first + len(kernel.masses), 1)
    return min(last, int(_FURTHEST_OF_SUMS / step))


def _profile(kernel: Kernel, step: float, last: int, *, up: bool) -> np.ndarray:
    """(last + 1,) bounds of ``H_g`` at ``log g = 0, h, ..., last h``.

    With ``A_j = sum over i > j of p_i e^(-(i - j) h)`` it is the mass at infinity and
    ``(e^h - 1)`` times the sum of all A_i, i >= j: a sum of what is not negative.
    """
    masses, infinite = np.zeros(last + 1), kernel.infinite
    index = kernel.first + np.arange(len(kernel.masses))
    inside = (index > 0) & (index <= last)
    masses[index[inside]] = kernel.masses[inside]
    if up:
        infinite += float(kernel.masses[index > last].sum())
    log_g = step * np.arange(last + 1)
    weighted = masses * np.exp(-log_g)
    after = np.zeros(last + 1)
    after[:-1] = np.cumsum(weighted[:0:-1])[::-1]
    each = after * np.exp(log_g)
    found = infinite + math.expm1(step) * np.cumsum(each[::-1])[::-1]
    error = _ROUNDING * (2 * last + _FURTHEST_OF_SUMS)
    return found * (1 + error) if up else np.minimum(found, 1.0) * (1 - error)

"""Certified ends of one setting: plan, lattice, ends, at most three times.

Reference: docs/theory.md, "Certified".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import (
    BoundingPair,
    FiniteValues,
    Profile,
)
from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.certified.plan import (
    LEAST_LOG_DELTA,
    RARE_WIDTH,
    CoarseLoss,
    Estimate,
    Plan,
    Target,
    aligned,
    coarse_points,
    first_guess,
    graded_grid,
    log_weight,
    make_plan,
    with_splits,
)
from jaxdp_episodic.accountant.methods.run import Interval
from jaxdp_episodic.accountant.numerics.lattice_sums import (
    LOG_ERROR,
    SUMS_ERROR,
    LatticeSum,
    Summand,
    lattice_sum,
    tilted,
)

# Nats beyond which weights of cells are 0 in float64.
_LARGEST_EXPONENT = 745.0
# Relative error of a sum of weighted cells: that of the largest exponents that matter.
_WEIGHT_ERROR = 1e-13
_MOST_STEPS = 60  # largest number of steps of a search for epsilon
# Factor of the distance, by the slope, at which a certified epsilon is first tried.
_STEP_MARGIN = 1.01
_NEAR = 1e-13  # relative distance of epsilons below which a search ends


def certified_epsilon(
    log_delta_at: Callable[[float], float],
    log_delta: float,
    near: float,
    step: float,
    *,
    up: bool,
) -> float:
    """Returns a certified epsilon from certified deltas, the first that is tried."""
    # Each one is certified by itself: no monotonicity is assumed.
    sign, tried = (1 if up else -1), near
    for _ in range(_MOST_STEPS):
        if sign * (log_delta - log_delta_at(tried)) >= 0:
            return tried
        tried = near + sign * step
        step *= 2
        if tried <= 0:
            break
    return math.inf if up else 0.0


class Curve(NamedTuple):
    """One end of the hockey-stick curve of a sum of losses."""

    whole: LatticeSum  # the sum's finite losses
    infinite: float  # probability of an infinite loss
    up: bool  # whether it is the upper or the lower end
    weights: np.ndarray  # (2, n) e^{-c x} and e^{-(1 + c) x}

    @classmethod
    def of(cls, whole: LatticeSum, infinite: float, *, up: bool) -> Curve:
        """Computes the weights."""
        step = whole.tilt * whole.spacing
        number = min(len(whole.cells), math.ceil(_LARGEST_EXPONENT / step) + 1)
        x = whole.spacing * np.arange(number)
        weights = np.exp(-whole.tilt * x)
        return cls(whole, infinite, up, np.stack([weights, weights * np.exp(-x)]))

    def estimate(self, epsilon: float) -> tuple[float, float]:
        """*Estimates* log(delta) of finite losses, and minus its slope."""
        (total, beyond), exponent = self._sums(epsilon)
        slope = min(beyond / max(total, 1e-300), 10 / self.whole.spacing)
        return math.log(max(total, 1e-300)) + exponent, slope

    def estimated_epsilon(self, log_delta: float, near: float) -> float:
        """*Estimates* the epsilon at a delta of finite losses, by Newton's method."""
        low = max(self.whole.start, 0.0)
        high = self.whole.start + self.whole.spacing * len(self.whole.cells)
        if self.estimate(low)[0] <= log_delta:
            return low
        at = min(max(near, low), high)
        for _ in range(_MOST_STEPS):
            value, slope = self.estimate(at)
            low, high = (at, high) if value > log_delta else (low, at)
            following = at + (value - log_delta) / max(slope, 1e-300)
            if abs(following - at) <= _NEAR * (at + 1e-9):
                break
            at = following if low < following < high else 0.5 * (low + high)
        return at

    def log_delta(self, epsilon: float) -> float:
        """Returns log(delta) at an epsilon >= 0, rounded to the safe side."""
        sum_, sign = self.whole, 1 if self.up else -1
        at = epsilon - sign * sum_.shift
        bound = self.chernoff(epsilon) if self.up else 0.0
        if self.up and at < sum_.start:
            return bound  # losses below the window are missing
        at = max(at, sum_.start)
        (total, beyond), exponent = self._sums(at)
        rounded = _WEIGHT_ERROR * (total + 2 * beyond)
        total += sign * (rounded + self._slack())
        if not total > 0:
            return 0.0 if self.up else -math.inf
        value = math.log(total) + exponent
        value += sign * _exponent_error(sum_, value, at)
        if not self.up:
            return min(value, 0.0)
        return min(_with_infinite(value, self.infinite), bound)

    def epsilon(self, log_delta: float, near: float) -> float:
        """Returns the epsilon at a delta, rounded safely, near an estimate."""
        slope = self.estimate(near)[1] or 1 / self.whole.spacing  # no cell is beyond
        step = min(_STEP_MARGIN * abs(self.log_delta(near) - log_delta), 1.0) / slope
        step = max(step, _NEAR * (near + 1e-300))
        return certified_epsilon(self.log_delta, log_delta, near, step, up=self.up)

    def _sums(self, epsilon: float) -> tuple[tuple[float, float], float]:
        """Returns tilted delta, minus its derivative, and the exponent of both."""
        sum_ = self.whole
        exponent = sum_.log_moment - sum_.tilt * epsilon
        first = max(math.floor((epsilon - sum_.start) / sum_.spacing) + 1, 0)
        gap = max(sum_.start + first * sum_.spacing - epsilon, 0.0)
        cells = np.maximum(sum_.cells[first : first + self.weights.shape[1]], 0.0)
        # np.sum, since a BLAS product would wake its threads.
        ones, decays = (
            float(np.sum(cells * weights[: len(cells)])) for weights in self.weights
        )
        ones *= math.exp(-sum_.tilt * gap)
        decays *= math.exp(-(1 + sum_.tilt) * gap)
        return (max(ones - decays, 0.0), decays), exponent

    def _slack(self) -> float:
        """Bounds the error of ``sum of p_i k(x_i - eps)``."""
        # The sum of k over a lattice is at most e^w plus the integral 1 / (c (1 + c))
        # over the spacing; that of k² has the integral 1 / (2 c (1 + c) (1 + 2 c)).
        sum_ = self.whole
        c, number = sum_.tilt, len(sum_.cells)
        most = math.exp(log_weight(c))
        integral = 1 / (sum_.spacing * c * (1 + c))
        weights = min(most + integral, most * number)
        squares = min(most**2 + 0.5 * integral / (1 + 2 * c), most**2 * number)
        single, together = sum_.rounding
        rounding = min(single * weights, together * math.sqrt(squares))
        below, above = sum_.outside
        # Losses above the window are missing, losses outside are aliased into it.
        truncated = above if self.up else below + above
        return (most * truncated + rounding) * (1 + SUMS_ERROR)

    def chernoff(self, epsilon: float) -> float:
        """*Upper bound* of log(delta) without the cells."""
        whole = self.whole
        bound = whole.log_moment - whole.tilt * (epsilon - whole.shift)
        bound += log_weight(whole.tilt)
        bound += _exponent_error(whole, bound, epsilon)
        return _with_infinite(bound, self.infinite)


def _with_infinite(log_delta: float, infinite: float) -> float:
    lost = math.log(max(infinite, 1e-300))
    return min(float(np.logaddexp(log_delta, lost)) + LOG_ERROR, 0.0)


def _exponent_error(whole: LatticeSum, log_delta: float, epsilon: float) -> float:
    """Bounds the error of log(delta) from rounded probabilities and exponents."""
    large = abs(whole.log_moment) + whole.tilt * abs(epsilon)
    return whole.relative + LOG_ERROR * (1 + abs(log_delta) + 1e-3 * large)


_MOST_PLANS = 3  # largest number of plans of one direction
# P-probability of a bin above which there may be a peak in it.
_PEAK_MASS = 1e-3
# Largest number of moves of a center, and the share of the spacing that ends them.
_MOST_MOVES = 6
_NEAR_PEAK = 3e-8
# Distance of the center from the peak: a share of the spacing, plus nats for rounding.
_BESIDE_PEAK = 1e-7
_LEAST_BESIDE = 2e-14
# Length of a lattice over that of the window estimated from the coarse losses.
_SPARE_LENGTH = 1.03
_LITTLE = 0.8  # factor of the spacing above which another plan is not tried
# Smallest spacing, relative to the largest loss: neighbouring points differ.
_LEAST_SPACING = 1e-12
# Largest number of atoms of a step that shall be lattice points.
_MOST_ANCHORS = 8
_HEAVY = 1e-4  # smallest tilted probability of such an atom
# Share by which an anchor is below the (rounded) largest loss.
_BESIDE = 1e-11
# An atom within this share of the spacing counts as a lattice point.
_AT_POINT = 1e-9
# Largest excess of an upper distribution's total over 1: beyond, tails are inaccurate.
_MOST_MASS = 1e-2
# Largest amount by which rounding may make a total differ from 1.
_LACKING = 1e-9
# Nats of log(delta) by which Chernoff's bound of epsilon is first moved.
_NEAR_CHERNOFF = 1e-3
# More than any number of probabilities that underflow.
_UNDERFLOW = 1e-300
# Thresholds for the largest loss, as shares of the expected epsilon.
_THRESHOLDS = np.linspace(0.0, 1.0, 129)


class Step(NamedTuple):
    """One step of one setting, with scalar fields, and the number of such steps."""

    loss: Profile
    count: float


class Direction(NamedTuple):
    """The steps in one direction, and their coarse losses."""

    steps: Sequence[Step]
    backward: bool  # whether P and Q are exchanged
    coarse: list[CoarseLoss]  # of each step
    guess: Estimate
    most: float  # *upper bound* of the answer


class Lattice(NamedTuple):
    """The upper and lower distributions of all steps on one lattice."""

    spacing: float  # of the lattice, nats
    offset: float  # of the sums
    uppers: list[Summand]  # of each step
    lowers: list[Summand]  # of each step
    infinite: float  # upper probability of an infinite loss of the sum
    displaced: float  # bound of the error of the sum's losses, nats


def certified_ends(
    steps: Sequence[Step], target: Target, unknown: Interval, most_cells: int
) -> Interval:
    """Returns the ends of the larger direction's answer, within ``unknown``."""
    is_symmetric = all(step.loss.is_symmetric for step in steps)
    backward = (False,) if is_symmetric else (False, True)
    directions = [_direction(steps, target, backward=b) for b in backward]
    # One of these two is the same in both directions.
    directions.sort(key=lambda d: d.guess.epsilon + d.guess.log_delta, reverse=True)
    low = high = unknown.lower
    for direction in directions:
        ends = Interval(unknown.lower, min(direction.most, unknown.upper))
        if ends.upper > max(low, LEAST_LOG_DELTA):
            ends = _narrowed(direction, target, ends, low, most_cells)
        low, high = max(low, ends.lower), max(high, ends.upper)
    return Interval(low, high)


def _direction(steps: Sequence[Step], target: Target, *, backward: bool) -> Direction:
    """Evaluates the steps coarsely."""
    coarse, uppers, infinite, displaced, are_whole = [], [], 0.0, 0.0, True
    for loss, count in steps:
        # A bin beyond the largest loss would have none of it, but raise its upper end.
        ends = [float(loss.largest_loss(backward=b)) for b in (not backward, backward)]
        ends = np.array([-1, 1]) * ends * (1 + 1e-12)
        grid = np.union1d(coarse_points(loss.hints()), ends[np.isfinite(ends)])
        points = with_splits(grid)
        tails = lattice.evaluate_tails(loss, points, backward=backward)
        bins = lattice.bin_masses(points, *tails)
        coarse.append(CoarseLoss.of(points, bins, count))
        masses, lost = lattice.upper_masses(points, bins)
        uppers.append(Summand(grid, grid, masses, count))
        are_whole &= _is_whole(masses, lost)
        infinite += count * lost
        displaced += _displacement(Step(loss, count), grid)
    guess = first_guess(coarse, target)
    most = math.inf if target.of_epsilon else 0.0
    if are_whole:
        whole, *_ = tilted(uppers, guess.slope)
        whole = whole._replace(shift=whole.shift + displaced)
        bound = Curve(whole, infinite, True, np.empty(0)).chernoff
        if not target.of_epsilon:
            most = min(most, bound(target.given))
        else:
            step = _NEAR_CHERNOFF / whole.tilt
            most = certified_epsilon(bound, target.given, guess.epsilon, step, up=True)
    return Direction(steps, backward, coarse, guess, most)


def _is_whole(masses: np.ndarray, infinite: float) -> bool:
    """Whether the total of an upper distribution is 1; False if it is NaN."""
    return bool(1 - _LACKING <= masses.sum() + infinite <= 1 + _MOST_MASS)


def _displacement(step: Step, points: np.ndarray) -> float:
    """Bounds how far computed losses are from the true ones, over all such steps."""
    rounded = float(lattice.loss_rounding(np.abs(points).max()))
    return step.count * (lattice.displacement(step.loss) + rounded)


def _narrowed(
    direction: Direction, target: Target, ends: Interval, enough: float, most_cells: int
) -> Interval:
    """Narrows the ends by at most three plans, until upper <= ``enough``."""
    known, scale, coarser, before = direction.guess, 1.0, 1.0, math.inf
    for trial in range(_MOST_PLANS):
        plan = make_plan(direction.coarse, target, known, scale)
        least = _SPARE_LENGTH * plan.length / most_cells
        if target.of_epsilon and known.doubt and least > plan.spacing:
            # Rare losses lengthen a window that has too few cells already.
            plan = make_plan(direction.coarse, target, known, scale, RARE_WIDTH)
            least = _SPARE_LENGTH * plan.length / most_cells
        spacing = coarser * max(least, plan.spacing)
        if not spacing <= max(plan.spacing, _LITTLE * before):
            break  # no much finer lattice is possible, or the length is NaN
        plan = plan._replace(spacing=spacing, widest=max(plan.widest, spacing))
        laid = _lattice(direction, plan)
        found = laid and _ends(laid, plan, target, most_cells)
        if not found:
            coarser *= 2
            continue
        (low, high), estimate = found
        ends = Interval(max(ends.lower, low), min(ends.upper, high))
        wanted, width = target.enough(ends.lower), ends.upper - ends.lower
        if width <= wanted or ends.upper <= enough:
            return ends
        if not estimate.slope > 0:
            break  # the window was empty
        share = min(max(0.5 * wanted / width, 0.01), 0.7)
        # The error of atoms off the lattice is of first order in the spacing. Otherwise
        # the errors of a first plan say little.
        has_atoms = any(isinstance(s.loss, FiniteValues) for s in direction.steps)
        scale *= share**2 if has_atoms else share if trial else 0.7
        known, before = estimate, spacing
    return ends._replace(lower=max(ends.lower, _by_one_loss(direction, target, ends)))


def _by_one_loss(direction: Direction, target: Target, ends: Interval) -> float:
    """*Lower bound* of the answer: the event that some loss is above a threshold."""
    # Close if few draws lose much: a lattice is too coarse for the other losses then.
    most = direction.guess.epsilon
    most = min(most, ends.upper) if target.of_epsilon else most
    at = most * _THRESHOLDS
    log_none, log_q = np.zeros(len(at)), np.full(len(at), -math.inf)
    for step in direction.steps:
        own, _ = lattice.evaluate_tails(step.loss, at, backward=direction.backward)
        above = (own.profile + own.scaled) * (1 - LOG_ERROR)
        above = np.clip(above - own.profile_error - own.scaled_error, 0.0, 1.0)
        log_none += step.count * np.log1p(-above)
        # Q's probability of the event is at most the sum of those of all draws.
        beyond = step.count * (own.scaled + own.scaled_error) + _UNDERFLOW
        log_q = np.logaddexp(log_q, np.log(beyond) - at)
    p = -np.expm1(log_none) * (1 - LOG_ERROR)
    log_q += LOG_ERROR * (1 + np.abs(log_q))
    off = sum(_displacement(step, at) for step in direction.steps)
    if target.of_epsilon:
        found = np.log(p - math.exp(target.given)) - log_q - off
    else:
        found = np.log(p - np.exp(target.given + off + log_q))
    return float(np.nanmax(found, initial=-math.inf)) - LOG_ERROR


def _lattice(direction: Direction, plan: Plan) -> Lattice | None:
    """Lays out both distributions of every step; None if rounding dominates one."""
    steps, backward = direction.steps, direction.backward
    anchors, distances, weights = [], [], []
    for step, coarse in zip(steps, direction.coarse, strict=True):
        places, weight = _anchors(step.loss, coarse, plan.tilt, backward=backward)
        anchors.append(places.tolist())
        distances.append(places[1:] - places[0])
        weights.append(step.count * weight[1:])
    spacing = max(plan.spacing, _LEAST_SPACING * float(np.abs(plan.ranges).max()))
    spacing = aligned(spacing, np.concatenate(distances), np.concatenate(weights))
    uppers, lowers, offsets = [], [], []
    infinite = displaced = 0.0
    for step, each, span in zip(steps, anchors, plan.ranges, strict=True):
        center = _centered(step.loss, each, spacing, backward=backward)
        if isinstance(step.loss, lattice.Finite):
            losses, _ = lattice.atoms_of(step.loss, backward=backward)
            if isinstance(step.loss, BoundingPair):
                losses = losses[(losses >= span[0]) & (losses <= span[1])]
            below = np.floor((losses - center) / spacing)
            grid = np.unique(np.add.outer([-1.0, 0.0, 1.0, 2.0], below))
            displaced += step.count * _AT_POINT * spacing
        else:
            terms = float(np.max(getattr(step.loss, "num_terms", 1.0)))
            places = [center, *each[1:]]
            grid = graded_grid(places, spacing, plan.widest, span, terms)
        points = with_splits(center + grid * spacing)
        slack = _AT_POINT * spacing
        bins = lattice.bins_of_step(points, step.loss, backward=backward, slack=slack)
        masses, lost = lattice.upper_masses(points, bins)
        if not _is_whole(masses, lost):
            return None
        uppers.append(Summand(grid, points[::2], masses, step.count))
        masses = lattice.lower_masses(points, bins)
        if not masses.sum() <= 1 + _LACKING:
            return None
        lowers.append(Summand(grid, points[::2], masses, step.count))
        offsets.append(step.count * center)
        infinite += step.count * lost
        displaced += _displacement(step, points)
    offset = math.fsum(offsets)
    return Lattice(spacing, offset, uppers, lowers, infinite, displaced)


def _anchors(
    loss: Profile, coarse: CoarseLoss, tilt: float, *, backward: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns atoms, heaviest first, with tilted probabilities; or a peak."""
    # Off the lattice an atom would cost the lower distribution up to a whole cell.
    peak = 0.0 if loss.is_symmetric else coarse.center
    only_peak = np.array([peak]), np.ones(1)
    if isinstance(loss, FiniteValues):
        places, log_mass = lattice.atoms_of(loss, backward=backward)
    elif loss.may_have_atoms:
        ends = [float(loss.largest_loss(backward=b)) for b in (backward, not backward)]
        places = np.array([ends[0], -ends[1]]) * (1 - _BESIDE)
        places = places[np.isfinite(places)]
        if not len(places):
            return only_peak
        own, other = loss.log_tails(np.abs(places))[:: -1 if backward else 1]
        above, below = np.logaddexp(*own), np.logaddexp(*other)
        log_mass = np.where(places > 0, above, below + places)
    else:
        return only_peak
    moment = float(coarse.log_moment(np.array([tilt]))[0])
    weight = np.exp(log_mass + tilt * places - moment / coarse.count)
    order = np.argsort(-weight)
    order = order[weight[order] > _HEAVY][:_MOST_ANCHORS]
    return (places[order], weight[order]) if len(order) else only_peak


def _centered(
    loss: Profile, anchors: Sequence[float], spacing: float, *, backward: bool
) -> float:
    """Returns the first anchor; a peak is moved to ``log(P / Q)`` of its bin."""
    # Off the lattice a peak narrower than the spacing would cost a whole bin.
    center = anchors[0]
    if isinstance(loss, lattice.Finite) or len(anchors) > 1:
        return center
    # The bin around 0 of a symmetric loss is centered already.
    for _ in range(0 if loss.is_symmetric else _MOST_MOVES):
        grid = center + np.array([-0.5, 0.5]) * spacing
        bins = lattice.bins_of_step(grid, loss, backward=backward)
        (mass,), (at,) = lattice.merged_losses(grid, bins)
        if not (mass > _PEAK_MASS and grid[0] < at < grid[1]):
            break
        moved, center = abs(at - center), float(at)
        if moved <= _NEAR_PEAK * spacing:
            break
    # Slightly towards 0: as ``E_Q[P / Q] = 1``, the other losses leave more room for
    # gaps on that side. Without room the cell beside the peak would keep nothing of it.
    return center - math.copysign(_BESIDE_PEAK * spacing + _LEAST_BESIDE, center)


def _ends(
    laid: Lattice, plan: Plan, target: Target, most_cells: int
) -> tuple[Interval, Estimate] | None:
    """Returns certified ends and an estimate; None if there are too many cells."""
    curves, window = [], (plan.tilt, plan.log_cut, plan.epsilon, most_cells)
    for summands, infinite, up in (
        (laid.lowers, 0.0, False),
        (laid.uppers, laid.infinite, True),
    ):
        whole = lattice_sum(summands, laid.spacing, laid.offset, *window)
        if whole is None:
            return None
        whole = whole._replace(shift=whole.shift + laid.displaced)
        curves.append(Curve.of(whole, infinite, up=up))
    lower_curve, upper = curves
    if not target.of_epsilon:
        log_delta, slope = upper.estimate(target.given)
        low, high = (c.log_delta(target.given) for c in (lower_curve, upper))
        return Interval(low, high), Estimate(target.given, log_delta, slope)
    at = upper.estimated_epsilon(target.given, plan.epsilon)
    estimate = Estimate(at, target.given, upper.estimate(at)[1])
    ends = (c.epsilon(target.given, at) for c in (lower_curve, upper))
    return Interval(*ends), estimate

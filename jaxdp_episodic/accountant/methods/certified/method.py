"""The "pld" method: certified intervals by composing privacy loss distributions.

References: docs/theory.md, "Certified"; docs/proofs.md, "The two ends of an interval";
Koskela, Jälkö, Honkela (2020), arXiv:1906.03049; Zhu, Dong, Wang (2022),
arXiv:2106.08567.
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np

from jaxdp_episodic.accountant._engine import using_choice
from jaxdp_episodic.accountant.losses.privacy_loss import BoundingPair, Bounds, Profile
from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.certified.composition import (
    Step,
    certified_ends,
    certified_epsilon,
)
from jaxdp_episodic.accountant.methods.certified.plan import Target
from jaxdp_episodic.accountant.methods.rdp import at_most_total_variation, rdp_bound
from jaxdp_episodic.accountant.methods.run import (
    Answer,
    Interval,
    Question,
    Run,
    epsilon_of_profile,
    one_gaussian,
    shift_error,
)

# Distance of the first certified epsilons from that of the computed profile, relative.
_NEAR = 1e-15


def epsilon_ends(loss: Profile, log_delta: float, upper: float) -> Interval:
    """Returns certified ends of one step's epsilon; fields must be scalars."""
    row = loss.map(np.atleast_1d)
    near = min(float(epsilon_of_profile(np.array([log_delta]), row)[0]), upper)
    ends = []
    for up in (False, True):

        def log_delta_at(epsilon: float, up: bool = up) -> float:
            return float(log_delta_ends(loss, np.array([epsilon]))[up][0])

        step = _NEAR * max(near, lattice.displacement(loss))
        ends.append(certified_epsilon(log_delta_at, log_delta, near, step, up=up))
    return Interval(*ends)


def log_delta_ends(loss: Profile, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns certified ends of log(delta) of one step at (k,) epsilons >= 0."""
    # The computed profile is that of losses displaced by at most `lattice.displacement`
    # and rounding, so it is evaluated that far to either side.
    nats = lattice.displacement(loss) + lattice.loss_rounding(epsilon)
    number = len(epsilon)
    shifted = np.concatenate([np.maximum(epsilon - nats, 0.0), epsilon + nats])
    both = lattice.evaluate_tails(loss, shifted)
    low, high = np.full((2, number), -math.inf)
    change = np.tile(lattice.displacement_error(nats), 2)
    for own in both:
        error = own.profile_error + change * own.scaled + 1e-300
        above, below = own.profile + error, own.profile - error
        # For g < 1, H_g is at most H_1 + 1 - g.
        most = np.log(above[:number] + np.maximum(nats - epsilon, 0.0))
        alive = below[number:] > 0
        least = np.log(np.where(alive, below[number:], 1.0))
        high = np.maximum(high, most + 1e-15 * (1 + np.abs(most)))
        least = np.where(alive, least - 1e-15 * (1 + np.abs(least)), -math.inf)
        low = np.maximum(low, least)
    return low, np.minimum(high, 0.0)


# Default width of epsilon, as a share of it.
DEFAULT_EPSILON_SHARE = 1e-4
# Default width of epsilon in nats, if that is larger.
DEFAULT_EPSILON_WIDTH = 1e-7
DEFAULT_DELTA_SHARE = 1e-3  # default width of delta, as a share of it
# Cells of the largest lattice: 32 MiB for an array, about 20 of them at a time.
LARGEST_LATTICE = 2**22
# Cells of the largest lattice for the default widths.
_USUAL_LATTICE = 2**20
# Share of the lower and of the upper end's width for the lattice if bounding pairs of
# random allocation use the rest.
_SHARE_OF_LATTICE = (0.3, 0.1)
# Number of steps for which rounding errors alone are nats of log(delta).
_MOST_STEPS = 1e14
_LARGEST_SHIFT = 1e6  # deviations, beyond which single losses need a lattice each
_RDP_ROUNDING = 1e-13  # relative rounding error of the Rényi bound
# log(delta) below which the probabilities behind it underflow.
_LEAST_LOG_DELTA = -550.0
# Relative distance by which rounding may make ends cross.
_CROSSING = 1e-9


def pld_answer(question: Question, run: Run) -> Answer:
    """Returns the certified *upper bound* at every setting and path, and widths."""
    lower, upper = pld_bounds(question, run)
    with np.errstate(invalid="ignore"):  # both infinite
        width = np.where(upper == lower, 0.0, upper - lower)
    if not question.is_epsilon:  # a share of delta
        width = -np.expm1(-width)
    return Answer(upper, width, np.ones(upper.shape, bool))


def pld_bounds(
    question: Question, run: Run, *, width: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns certified ends of epsilon or log(delta) of a composed run.

    ``width`` is the wanted width: nats of epsilon, or a share of delta.

    Raises: ValueError: the width of epsilon cannot be reached with the largest lattice.
    """
    shape = np.broadcast_shapes(np.shape(question.target), run.shape)
    target = np.broadcast_to(np.asarray(question.target, np.float64), shape)
    question, run = question.at(target.reshape(-1)), run.flattened(shape)
    with using_choice("numpy"):
        if not any(isinstance(loss, Bounds) for loss in run.losses):
            lower, upper = _bounds(question, run, width)
        else:
            lower = _end_of_bounding_run(question, run, width, up=False)
            upper = _end_of_bounding_run(question, run, width, up=True)
            upper = np.maximum(upper, lower)
        absolute, relative = _tolerances(question, width)
        enough = np.maximum(absolute, relative * (lower if question.is_epsilon else 1))
        settled = run.facts.is_unprotected | run.facts.loses_nothing
        with np.errstate(invalid="ignore"):  # both infinite
            left = np.flatnonzero(~settled & ~(upper - lower <= enough))
        if left.size:
            bound = rdp_end(question.at(question.target[left]), run.take(left))
            upper[left] = np.maximum(np.minimum(upper[left], bound), lower[left])
    if width is not None and question.is_epsilon:
        missed = np.isfinite(upper) & (upper - lower > width)
        if np.any(missed):
            raise ValueError(
                f"max_width {width:g} cannot be reached: the ends of epsilon are "
                f"{np.max((upper - lower)[missed]):.3g} apart on a lattice of at most "
                f"{LARGEST_LATTICE:,} cells"
            )
    return lower.reshape(shape), upper.reshape(shape)


def _end_of_bounding_run(
    question: Question, run: Run, width: float | None, *, up: bool
) -> np.ndarray:
    """Returns one end of a run, from pairs that bound some of its steps."""
    bounding = run.certified(up=up)
    pairs = zip(bounding.losses, bounding.counts, run.losses, strict=True)
    # The caller knows infinite losses of the other steps.
    new = [(one, count) for one, count, old in pairs if isinstance(old, Bounds)]
    log_kept = Run(*zip(*new, strict=True)).facts.log_kept
    left = question.given_kept(log_kept, up=up)
    left = left.at(np.where(np.isneginf(left.target), -1.0, left.target))
    from_tables = any(isinstance(loss, BoundingPair) for loss in bounding.losses)
    share = _SHARE_OF_LATTICE[up] if from_tables else 1.0
    end = _bounds(left, bounding, width, share)[up]
    return question.with_failure(end, log_kept, up=up)


def _bounds(
    question: Question, run: Run, width: float | None, share: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns both ends of one run; the wanted width is multiplied by ``share``."""
    # The Rényi bound is rarely needed: it is computed where an end is missing.
    nothing = run.facts.loses_nothing
    upper = np.where(nothing, question.nothing, question.everything)
    upper = at_most_total_variation(question, run, upper)
    lower = np.full(upper.shape, question.nothing)
    absolute, relative = (share * each for each in _tolerances(question, width))
    open_ = ~(run.facts.is_unprotected | nothing)
    shift = np.where(open_, run.gaussian_shift(), 0.0)
    in_range = sum(run.counts) < _MOST_STEPS
    for loss, count in zip(run.losses, run.counts, strict=True):
        in_range &= (loss.hints().furthest < _LARGEST_SHIFT) | (count == 0)
    open_ &= in_range | (shift > 0)
    if question.is_epsilon:
        open_ &= (question.target > _LEAST_LOG_DELTA) & (upper > absolute)
    steps = _steps_of(run)
    shift_off = shift_error(run)
    most = _USUAL_LATTICE if width is None else LARGEST_LATTICE
    for i in np.flatnonzero(open_).tolist():
        given = float(question.target[i])
        target = Target(given, question.is_epsilon, absolute, relative)
        known = Interval(question.nothing, float(upper[i]))
        if shift[i] > 0:
            # The shift is rounded, so a smaller and a larger one are used.
            scaled = (shift[i] * (1 - shift_off), shift[i] * (1 + shift_off))
            pairs = (Step(one_gaussian(each), 1.0) for each in scaled)
            less, more = (_ends((one,), target, known, most) for one in pairs)
            found = Interval(less.lower, more.upper)
        else:
            found = _ends(steps[i], target, known, most)
        lower[i], upper[i] = found
    return lower, upper


def rdp_end(question: Question, run: Run) -> np.ndarray:
    """Returns the Rényi bound plus its rounding error."""
    upper = np.array(rdp_bound(question, run)[0])
    upper = upper + _RDP_ROUNDING * np.where(np.isfinite(upper), np.abs(upper), 0.0)
    return upper if question.is_epsilon else np.minimum(upper, 0.0)


def _tolerances(question: Question, width: float | None) -> tuple[float, float]:
    """Returns the wanted width: absolute, and as a share of the answer."""
    if not question.is_epsilon:
        return 0.0, DEFAULT_DELTA_SHARE if width is None else width
    if width is None:
        return DEFAULT_EPSILON_WIDTH, DEFAULT_EPSILON_SHARE
    return width, 0.0


def _steps_of(run: Run) -> list[tuple[Step, ...]]:
    """Returns the steps of every setting that have a loss; equal ones are merged."""
    rows: list[dict[Any, Step]] = [{} for _ in range(run.shape[0])]
    for loss, count in zip(run.losses, run.counts, strict=True):
        if np.any(count != np.rint(count)):
            raise ValueError("counts must be whole numbers")
        for i in np.flatnonzero(~loss.loses_nothing & (count > 0)).tolist():
            one: Any = loss.map(lambda field, i=i: field[i])
            which = type(one), *(float(field) for field in one.fields)
            before = rows[i][which].count if which in rows[i] else 0.0
            rows[i][which] = Step(one, before + float(count[i]))
    return [tuple(row.values()) for row in rows]


def _are_exhausted(steps: tuple[Step, ...], epsilon: float) -> bool:
    """Whether pairs of opposite losses lose epsilon at most, by exact arithmetic."""
    most = Fraction(0)
    for loss, count in steps:
        sizes = getattr(loss, "losses", ())  # of a `FiniteLoss`; more may be rounded
        if len(sizes) != 2 or sizes[0] != -sizes[1]:
            return False
        most += Fraction(abs(float(sizes[0]))) * int(count)
    return Fraction(epsilon) >= most


def _ends(
    steps: tuple[Step, ...], target: Target, known: Interval, most_cells: int
) -> Interval:
    """Returns the ends of one setting, or ``known`` if they cannot be computed."""
    try:
        # Overflows give inf or NaN, by which no end is changed.
        with np.errstate(all="ignore"):
            first, *others = steps
            if not target.of_epsilon and _are_exhausted(steps, target.given):
                return Interval(-math.inf, -math.inf)
            if others or first.count > 1:
                found = certified_ends(steps, target, known, most_cells)
            elif target.of_epsilon:
                found = epsilon_ends(first.loss, target.given, known.upper)
            else:
                found = log_delta_ends(first.loss, np.array([target.given]))
            low, high = np.ravel(found).tolist()
    except ArithmeticError:
        return known
    # Relative to epsilon; absolute for log(delta).
    if high < low - _CROSSING * (abs(low) + (not target.of_epsilon)):
        warnings.warn(
            "certified ends cross: a fault of the certified method, please report it "
            "with the question that was asked; the answer is Rényi's bound instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return known
    # min and max never return NaN as their second argument.
    high = min(known.upper, high)
    return Interval(min(high, max(known.lower, low)), high)

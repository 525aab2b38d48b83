"""Solves settings by contour integrals, with as many nodes as the error requires."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import (
    Chunks,
    Kernel,
    choose_engine,
    in_chunks,
    jitted,
    on_jax,
)
from jaxdp_episodic.accountant.losses.gaussian import (
    SMALLEST,
    inner_exponent,
    near_gaussian_profile,
)
from jaxdp_episodic.accountant.methods import rdp
from jaxdp_episodic.accountant.methods.exact import integral, mgf
from jaxdp_episodic.accountant.methods.exact.mgf import LOG_ZERO, Bulk, Steps
from jaxdp_episodic.accountant.methods.run import DeltaAt, Group, Question, Run
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    namespace,
    rows_at,
    where_needed,
)

# Of one pass; a chunk of it takes JAX as long as NumPy some five settings.
KERNEL = Kernel("exact", numpy_seconds=2e-3, compile_seconds=10.0, least=16)
# Largest relative error estimate of an answer that is called exact.
TOLERANCE = 1e-6
# Nats below delta at which loss distributions are truncated. With a lower value rare
# large losses keep the contour nearer to 0, where more of the integrand cancels.
CUT = 50.0
# Nats by which the truncated probability must be below delta.
CUT_MARGIN = 30.0
# Settings in a chunk. JAX compiles the pass for one size on each kind of device.
_CHUNKS = Chunks(numpy=8, cpu=(64,), accelerator=(4096,))
# Nodes of a loss distribution in JAX's passes.
_LOSS_NODES = 112
# Nodes of the contour in a block of JAX's passes.
_BLOCK = 32
# Largest number of such blocks.
_MOST_BLOCKS = 32
# Passes with more nodes of a loss distribution run on NumPy; few settings need them.
_MOST_LOSS_NODES = 144
# Nats of log(delta) between the epsilon of the contour and the answer above which the
# error may exceed its estimate.
NEAR = 3.0
# The same, above which the error is unknown.
_FAR = 10.0
# Largest ratio of the epsilon of the contour to the answer.
LARGEST_RATIO = 2.0
# Error of log(delta), in nats, above which an answer is not used as the next guess.
USELESS = 0.5
# Error of log(delta), in nats, above which an answer does not even say whether the last
# guess was too large.
_NO_SIGN = 10.0


class Pass(NamedTuple):
    """Numbers of nodes of a loss distribution and of the contour, and its end."""

    loss_nodes: int
    contour_nodes: int
    fall: float = integral.FALL  # nats; see `integral.lay_contour`


# Tried one after another while the error of a setting is too large. Hard settings need
# more nodes of the contour, hardly ever of the losses. Nine in ten settings need the
# first pass only.
PASSES = (
    Pass(112, 97, 24.0),
    Pass(128, 177, 34.0),
    Pass(144, 449),
    Pass(192, 1025),
    Pass(384, 1025),
)
# Enough nodes to compare delta with its target.
COMPARISON = Pass(112, 21, 14.0)
# An answer is final if its error is at most this share of `TOLERANCE`: the errors of
# both directions may add up.
SETTLED = 0.5
# A pass is skipped if it has less than this share of the nodes expected to be needed.
_HOPEFUL_SHARE = 0.8


@dataclass
class ContourSolver:
    """Solves a batch of (n,) settings by contour integrals, in either direction."""

    question: Question
    run: Run  # truncated
    bound: np.ndarray  # the Rényi bound; epsilon's may be inf before the first pass
    order: np.ndarray  # the order of that bound
    goal: np.ndarray  # log(delta), or a guess: distributions are truncated below it
    log_added: np.ndarray  # logarithm of the delta of the terms left out of the run
    # Where a Rényi bound says that delta is less backward, at the forward epsilon.
    backward_is_less: np.ndarray
    # Where parts of a distribution lie too far apart for a contour.
    lie_apart: np.ndarray

    def surely_less(self, asked: np.ndarray, least: np.ndarray) -> np.ndarray:
        """Where the backward answer is below ``least``, by few nodes; where asked."""
        epsilon, goal = self.question.target, least
        if self.question.is_epsilon:
            epsilon, goal = least, self.question.target
            asked = asked & (epsilon > 0)
        less = np.zeros(epsilon.shape, bool)
        index = np.flatnonzero(asked)
        if index.size:
            there = epsilon[index]
            log_delta, error, *_ = self._pass(
                DeltaAt(there), index, there, COMPARISON, backward=True
            )
            # An error estimate of a nat or more is not reliable.
            less[index] = (error < 1) & (log_delta + error < goal[index])
        return less

    def solve(
        self, wanted: np.ndarray, *, backward: bool, least: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values and errors of one direction, by as many passes as necessary.

        Settings whose answer is surely below ``least`` are not refined.
        """
        shape = self.bound.shape
        value, error = np.full(shape, np.nan), np.full(shape, np.inf)
        initial = np.full(shape, -1.0)  # negative: the kernel guesses
        if not self.question.is_epsilon:
            initial = self.question.target
        elif least is not None:
            initial = np.clip(least, 0.0, self.bound)
        least = np.full(shape, -np.inf) if least is None else least
        far = np.zeros(shape, bool)
        # Number of nodes needed, by the last error: twice as many nodes square it.
        expected = np.zeros(shape)
        # Backward, few settings are left after the comparison.
        skipped = self.question.is_epsilon and backward
        for effort in PASSES[skipped:]:
            scale = self.question.scale(value)
            settled = error <= SETTLED * TOLERANCE * scale
            # The other direction's answer is larger.
            settled |= value + error <= least
            least_nodes = np.minimum(
                _HOPEFUL_SHARE * expected, PASSES[-1].contour_nodes
            )
            hopeful = far | (least_nodes <= effort.contour_nodes)
            index = np.flatnonzero(wanted & ~settled & hopeful & ~self.lie_apart)
            if index.size == 0:
                continue
            question = self.question.at(self.question.target[index])
            found = self._pass(question, index, initial[index], effort, backward)
            new_value, new_error, *_ = found
            if question.is_epsilon:
                judged = self._judged(index, initial[index] < 0, found)
                new_value, new_error, far[index], initial[index] = judged
            else:
                # A delta this small may be due to truncation.
                lost = new_value < self.goal[index] - CUT + CUT_MARGIN
                new_error = np.where(lost, np.inf, new_error)
            new_error = np.where(far[index] | np.isnan(new_error), np.inf, new_error)
            # The error's logarithm is about proportional to the number of nodes.
            share = new_error / question.scale(new_value)
            known = (share > SETTLED * TOLERANCE) & (share < 0.5)
            growth = math.log(SETTLED * TOLERANCE) / np.log(np.where(known, share, 0.1))
            expected[index] = np.where(known, effort.contour_nodes * growth, 0.0)
            better = ~(new_error > error[index])
            value[index] = np.where(better, new_value, value[index])
            error[index] = np.where(better, new_error, error[index])
            if not question.is_epsilon:
                # With a higher cut less of the integrand cancels.
                known = np.isfinite(value) & (error < 0.1)
                self.goal = np.where(known, value - 1.0, self.goal)
        return value, error

    def _judged(
        self, index: np.ndarray, are_first: np.ndarray, found: tuple[np.ndarray, ...]
    ) -> tuple[np.ndarray, ...]:
        """Epsilons of a pass, errors, whether contours lay too far, the next epsilons.

        Keeps the Rényi bounds of the pass; ``are_first``: of contours by a first guess.
        """
        value, log_error, slope, used, bound, order, less = found
        self.bound[index], self.order[index] = bound, order
        self.backward_is_less[index] = less > 0
        # The bound of a first guess that failed is at orders below
        # `Steps.largest_center`, and may be far too large.
        failed = np.any(are_first) & ~(log_error < USELESS) & (bound > 0)
        if np.any(failed):
            poor = index[failed]
            question = self.question.at(self.question.target[poor])
            asked = question, self.run.take(poor)
            with rdp.bounding_few(poor.size):
                self.bound[poor], self.order[poor] = rdp.rdp_bound(*asked, loose=True)
        value = np.maximum(value, 0.0)
        # delta falls with epsilon: a sum that rises has not converged.
        falls = slope > 0
        error = np.where(falls, log_error / np.where(falls, slope, 1.0), np.inf)
        # 0 is exact where delta is below its target there.
        error = np.where(falls & (log_error == 0), 0.0, error)
        # The contour of a larger epsilon ends where that integrand is negligible, and
        # may miss the contribution of small losses: its answer is only the next guess.
        distance = np.abs(value - used) * np.abs(slope)
        error = np.where(distance > NEAR, 10.0 * error, error)
        far = (distance > _FAR) | (used > LARGEST_RATIO * value)
        # If there is no answer, the guess was too large. A poor answer says little
        # more, but helps to place the next contour.
        known = np.isfinite(error) & ~np.isnan(value)
        lowest = np.where(log_error >= _NO_SIGN, 0.5 * used, 0.0)
        poor = np.where(known, np.clip(value, lowest, 2.0 * used), 0.5 * used)
        closer = np.where(known & (log_error < USELESS), value, poor)
        bound = self.bound[index]
        closer = np.maximum(np.fmin(closer, bound), 0.0)  # NaN: nothing is known
        nothing = bound == 0  # epsilon is 0 without a contour
        value, error = np.where(nothing, 0.0, (value, error))
        return value, error, far & ~nothing, closer

    def _pass(
        self,
        question: Question,
        index: np.ndarray,
        initial: np.ndarray,
        effort: Pass,
        backward: bool,
    ) -> tuple[np.ndarray, ...]:
        """Results of `one_pass` for some settings, with the terms left out added."""
        part, added = self.run.take(index), self.log_added[index]
        target, groups = question.target, part.groups()
        if question.is_epsilon:
            # The target is lowered by the delta of the terms that were left out.
            added = np.minimum(added - target, -1e-12)
            target = target + np.log1p(-np.exp(added))
        # The truncated probability of all steps together is far below delta.
        cut = np.minimum(self.goal[index], 0.0)
        cut = cut - np.log(np.maximum(sum(part.counts), 1.0)) - CUT
        back = np.full(index.shape, float(backward))
        bound = self.bound[index], self.order[index]
        arrays = (target, initial, *bound, cut, back, groups)
        losses, counts = zip(*groups, strict=True)
        kinds = tuple(zip(map(type, losses), map(len, counts), strict=True))
        engine, program = "numpy", one_pass
        if effort.loss_nodes <= _MOST_LOSS_NODES:
            engine = choose_engine(index.size, KERNEL._replace(what=kinds), losses)
        nodes, number, block, most = effort.loss_nodes, 1, effort.contour_nodes, 1
        if engine == "jax":
            program = functools.partial(on_jax, jitted(one_pass, ("shape",)))
            number = max(round(effort.contour_nodes / _BLOCK), 1)
            nodes, block, most = _LOSS_NODES, _BLOCK, _MOST_BLOCKS
        held = float(not question.is_epsilon)
        shape = Shape(nodes, block, most)
        program = functools.partial(program, number, effort.fall, held, shape=shape)
        with np.errstate(all="ignore"):
            result = in_chunks(program, arrays, _CHUNKS, engine)
        value, error, *rest, apart = result
        self.lie_apart[index] |= apart > 0
        with np.errstate(invalid="ignore"):  # NaN: not found with these nodes
            if not question.is_epsilon:
                value = np.logaddexp(value, added)
                added = np.where(np.isneginf(added), added, added - value)
            # The terms left out may be 0. An epsilon of 0 is exact without them.
            counts = (error != 0) & ~np.isneginf(added)
            error = error + np.where(counts, np.exp(np.minimum(added, 0.0)), 0.0)
        return (value, error, *rest)


class Shape(NamedTuple):
    """What a pass is compiled for."""

    loss_nodes: int
    block: int  # number of contour nodes in a block
    most: int  # largest number of blocks


class Found(NamedTuple):
    """Results of a pass; (n,) arrays."""

    value: Array  # epsilon, or log(delta)
    error: Array  # estimate of the error of log(delta), in nats
    slope: Array  # ``-d log(delta) / d epsilon``
    used: Array  # the epsilon of the contour
    bound: Array  # the Rényi bound of epsilon
    order: Array  # the order of that bound
    backward_is_less: Array  # 1 where delta is known to be less backward, else 0
    lie_apart: Array  # 1 where there is no answer; see `mgf.Steps`


def one_pass(
    number: Array | int,
    fall: Array | float,
    is_held: Array | float,
    target: Array,
    initial: Array,
    bound: Array,
    order: Array,
    log_cut: Array,
    backward: Array,
    groups: tuple[Group, ...],
    *,
    shape: Shape,
) -> Found:
    """One pass over (n,) settings: lays a contour for each and integrates along it.

    Where ``initial`` is negative, a first epsilon is computed.
    """
    xp = namespace(target, groups[0].count)
    number = xp.asarray(number).astype(np.int32)
    every: list[Steps] = []
    apart, largest = False, xp.full_like(target, 1e12)
    for group in groups:
        one = mgf.steps_of(xp, group, backward, log_cut, shape.loss_nodes)
        every.append(one)
        apart = apart | one.lie_apart
        largest = xp.minimum(largest, one.largest_center)
    steps = tuple(every)
    bulk, known = mgf.bulk_of(xp, steps), initial >= 0
    given = target, bound, largest, groups, steps, bulk
    initial, bound, order = where_needed(
        xp,
        known,
        xp.array([initial, bound, order]),
        functools.partial(first_epsilon, xp, *given),
    )
    contour = integral.lay_contour(xp, initial, steps, fall, bulk, largest)
    blocks, held = integral.Blocks(number, shape.block, shape.most), is_held > 0
    found = integral.search(xp, target, initial, bound, contour, steps, blocks, held)
    less = xp.zeros_like(target)
    if len(groups) == len(groups[0].count) == 1 and groups[0].loss.nodes_exchange:
        c = (order - 1) * ORDER_FACTORS
        exchanged = functools.partial(mgf.exchanged_moments, xp, c, steps[0])
        moments = where_needed(xp, known, xp.full_like(c, xp.inf), exchanged)
        bounds = rdp.log_delta_at(xp.maximum(found.value, 0.0), c, moments)
        less = xp.where(xp.any(bounds < target, axis=0), 1.0, 0.0)
    error = xp.where(apart, xp.inf, found.log_error)
    rest = found.slope, initial, bound, order, less, xp.where(apart, 1.0, 0.0)
    return Found(found.value, error, *rest)


# --- A first epsilon, before there is a contour ---

# Orders minus 1 that are tried, relative to the approximate best order minus 1. In 400
# random settings the approximation was 0.4 to 40 times the best one.
_ORDERS_TRIED = 1.75 ** np.arange(-8.0, 5.0)
# Least approximate order minus 1.
_LEAST_ORDER = 1e-12
# Largest approximate order minus 1.
_LARGEST_ORDER = 1e12
# Orders minus 1 at which the backward direction is bounded, relative to the forward
# direction's best. The best one is far above if only forward has rare large losses.
ORDER_FACTORS = np.array([1.0, 1.6, 4.0, 16.0, 64.0])[:, None]
# Smallest epsilon that is searched for, relative to the Rényi bound.
_SMALLEST = 1e-4
# Number of settings up to which one round of many points is faster on NumPy than
# several rounds of few points.
_FEW = 4
_POINTS = 5  # in a round
_ROUNDS = 3  # of so many points
_MANY_POINTS = 101  # in one round
# Rounding error of the logarithm of a run's moment.
_MOMENT_ROUNDING = 1e-6


def first_epsilon(
    xp: Any,
    log_delta: Array,
    highest: Array,
    largest: Array,
    fields: tuple[Group, ...],
    groups: tuple[Steps, ...],
    bulk: Bulk,
) -> Array:
    """A first epsilon, no bound; a Rényi bound below ``highest``, its order: (3, n)."""
    # By the saddle-point approximation of delta. If that fails, because rare large
    # losses are far from the others, by the sum of the deltas of both parts.
    guess = xp.exp(rdp.first_order(xp, fields, -log_delta))
    guess = xp.clip(guess, _LEAST_ORDER, _LARGEST_ORDER)
    c = xp.minimum(guess * _ORDERS_TRIED[:, None], largest)
    moments = mgf.real_moments(xp, c, groups)
    bounds = rdp.epsilon_at(log_delta, c, moments[0])
    # Moments below 1 come from too few nodes.
    bounds = xp.where(moments[0] > -_MOMENT_ROUNDING, bounds, xp.inf)
    best = xp.where(xp.isnan(bounds), xp.inf, bounds).argmin(axis=0)[None]
    order, found = rows_at(xp.array([c, moments[0]]), best)
    order = 1 + order[0]
    # This bound may become the answer, so it includes the quadrature error: a multiple
    # of the difference from the checking rule.
    again = mgf.real_moments(xp, order[None] - 1, groups, by_check=True)[0]
    moment = xp.maximum(found, again) + mgf.CHECK_FACTOR * xp.abs(found - again)
    moment = xp.where(moment > -_MOMENT_ROUNDING, moment, xp.inf)
    bound = rdp.epsilon_at(log_delta, order - 1, moment[0])
    bound = xp.where(bound >= 0, bound, xp.where(bound < 0, 0.0, xp.inf))
    highest = xp.minimum(highest, bound)
    near = _by_saddle_points(xp, log_delta, c, moments, bulk, groups)
    near = where_needed(
        xp,
        (near > 0) & (near < highest),
        near,
        functools.partial(_by_jumps, xp),
        (log_delta, highest, bulk.variance, fields),
    )
    return xp.array([near, highest, order])


def _by_jumps(
    xp: Any,
    log_delta: Array,
    highest: Array,
    variance: Array,
    fields: tuple[Group, ...],
) -> Array:
    """Epsilon at which the bulk's delta plus the steps' forward deltas is delta."""
    # Those of sampled Gaussians with similar losses.
    mu = xp.sqrt(xp.maximum(variance, 0.0))
    bulk = mu, xp.ones_like(mu), xp.where(mu > 0, 0.0, LOG_ZERO)
    rows = [xp.array(bulk)[:, None]]
    for group in fields:
        hints, one = group.loss.hints(), xp.ones_like(group.count)
        often = group.count * group.loss.outer_rate * hints.rate
        odds = xp.maximum(hints.odds * one, SMALLEST)
        often = xp.log(xp.maximum(often, 1e-300))
        rows.append(xp.array([hints.shift * one, odds, often]))
    shift, odds, often = xp.concatenate(rows, axis=1)[:, :, None]

    def excess(epsilon: Array) -> Array:
        """log(delta) at (G, n) epsilons, minus the goal."""
        inner = inner_exponent(xp, epsilon, odds)
        every = xp.maximum(often + near_gaussian_profile(xp, shift, inner), LOG_ZERO)
        peak = every.max(axis=0)
        return xp.log(xp.exp(every - peak).sum(axis=0)) + peak - log_delta

    low, points, rounds = _SMALLEST * highest, _POINTS, _ROUNDS
    if xp is np and np.size(highest) <= _FEW:
        points, rounds = _MANY_POINTS, 1
    kinds = {"num_points": points, "num_refinements": rounds}
    return integral.log_crossing(xp, excess, low, highest, **kinds)


def _by_saddle_points(
    xp: Any,
    log_delta: Array,
    c: Array,
    moments: Array,
    bulk: Bulk,
    groups: tuple[Steps, ...],
) -> Array:
    """Epsilon at which the saddle-point approximation equals delta; NaN if none."""
    variance = bulk.variance
    both, valid = integral.transform(xp, c, bulk, groups, moments)
    log_value, x, curvature = xp.where(valid, both[:, 0], both[:, 1])
    used = valid & (variance > 0)
    mu = xp.sqrt(xp.where(variance > 0, variance, 1.0))
    known = xp.where(used, near_gaussian_profile(xp, mu, xp.maximum(x, 0.0)), LOG_ZERO)
    approximate = log_value - c * x - 0.5 * xp.log(2 * math.pi * curvature)
    approximate = xp.logaddexp(approximate, known)
    # delta falls with c: the last point above it, and the next one
    above = (approximate >= log_delta) & (x > 0)
    index = xp.arange(c.shape[0])[:, None]
    last = xp.where(above, index, -1).max(axis=0)
    ends = xp.array([last, xp.minimum(last + 1, c.shape[0] - 1)])
    ends = xp.maximum(ends, 0)
    found = rows_at(xp.array([x, approximate, c]), ends)
    (x, end), (value, other), (low, high) = found
    # The slope of log(delta) is about -c, and c linear in between.
    drop = (value - log_delta) / (value - other)
    rise = (high + low) * drop
    share = rise / (low + xp.sqrt(low * low + (high - low) * rise))
    crossed = (last >= 0) & (drop >= 0) & (drop <= 1)
    return xp.where(crossed, x + share * (end - x), xp.nan)

"""The "rdp" method: Rényi DP of a run, and its conversion at the best order.

Pure kernels, and then what calls them. References: docs/theory.md, "From profiles to
answers"; Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Proposition 12.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import (
    Chunks,
    Kernel,
    choose_engine,
    in_chunks,
    jitted,
    on_cpu,
    on_jax,
    using_choice,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    BoundingPair,
    MomentRule,
    Profile,
    Quadrature,
)
from jaxdp_episodic.accountant.methods.run import (
    Answer,
    Group,
    Question,
    Run,
    delta_of_profile,
)
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    by_blocks,
    map_arrays,
    namespace,
    sigmoid,
    taken,
)

# Shift beyond which no order has a moment that small losses dominate.
_LARGE_SHIFT = 1e3


def first_order(xp: Any, groups: tuple[Group, ...], budget: Array | float) -> Array:
    """Returns an initial log t of the best order: the smaller of two approximations."""
    # One is where small losses spend the budget. The other is where rate^alpha e^{alpha
    # (alpha-1) shift²/2} dominates; from beyond that jump a search would have to
    # bisect.
    curvature, jump = 0.0, xp.inf
    for group in groups:
        hints = group.loss.hints()
        rate, s = hints.rate, hints.shift
        # The variance of the privacy loss is of order rate² if losses are small. For
        # large shifts a loss of s²/2 has the probability `rate`.
        growth = xp.expm1(xp.minimum(s * s, 30.0))
        variance = rate * (s**2 + 0.25 * s**4)
        small = xp.minimum(rate**2 * growth, variance)
        variance = xp.where(s > _LARGE_SHIFT, variance, small)
        curvature += xp.sum(group.count * group.loss.outer_rate * variance, axis=0)
        half, log_rate = 0.5 * s * s, xp.log(hints.odds)

        def reaching(log_excess: Array, b: Array = log_rate - half, half: Any = half):
            """Solves ``alpha log_rate + alpha (alpha-1) s²/2 = log_excess``."""
            root = xp.sqrt(xp.maximum(b * b + 4 * half * log_excess, 0.0))
            return xp.where(b < 0, (root - b) / (2 * half), xp.inf)

        # The order at which the jump has spent the budget, or inf.
        counts = xp.maximum(group.count, 1e-300)
        log_outer = xp.log(group.loss.outer_rate)
        top = reaching(-log_outer)  # where M - 1 = 1, and growth slows down
        steepness = xp.maximum((top - 1) * (log_rate + top * s * s), 1.0)
        # t L' = count M steepness = budget; plus one nat, to start on the steep side.
        needed = xp.log(budget) - xp.log(counts * steepness) + 1.0
        beyond = xp.maximum(top, xp.sqrt(2 * budget / counts) / s)
        last = reaching(xp.minimum(needed, 0.0) - log_outer)
        last = xp.where(needed > 0, beyond, last)
        # Below order 2 small losses dominate the moment.
        jump = xp.minimum(jump, xp.min(xp.where(last > 2, last, xp.inf), axis=0))
    smooth = 0.5 * (xp.log(2.0 * budget) - xp.log(curvature))
    return xp.minimum(smooth, xp.log(jump - 1))


# The direction of reported values: the larger one of each step, a bound of both.
LARGER = "larger"


def log_moment(
    t: Array, groups: tuple[Group, ...], rule: MomentRule
) -> tuple[Array, ...]:
    """Returns ``L(t)`` of the whole run, (n,) >= 0; exact up to quadrature.

    For the direction `LARGER` it is an upper bound of both directions' values.
    """
    xp = namespace(t, groups[0].count)
    totals: list[Array] = [xp.zeros_like(t)] * (3 if rule.with_derivatives else 1)
    for group in groups:
        shape = group.count.shape
        loss = group.loss.map(lambda a: a.reshape(-1))
        orders = xp.broadcast_to(t, shape).reshape(-1)
        excess, *ratios = _log_excess(loss, orders, rule)
        log_odds = excess + xp.log(loss.outer_rate)
        parts = [xp.logaddexp(0.0, log_odds)]
        if rule.with_derivatives:
            # M = 1 + r E: M'/M = E'/E (1 - 1/M), and so on
            first, second = ratios
            slope = sigmoid(log_odds) * first
            curvature = sigmoid(log_odds) * second - slope * slope
            parts += [slope, xp.maximum(curvature, 0.0)]
        for i, part in enumerate(parts):
            totals[i] = totals[i] + xp.sum(group.count * part.reshape(shape), axis=0)
    return tuple(totals)


def _log_excess(loss: Any, t: Array, rule: MomentRule) -> tuple[Array, ...]:
    """Computes `Moments.log_excess`; the larger one for `LARGER`."""
    if rule.direction != LARGER:
        return loss.log_excess(t, rule)
    forward = loss.log_excess(t, rule._replace(direction="forward"))
    if loss.is_symmetric or loss.forward_is_larger:
        return forward
    backward = loss.log_excess(t, rule._replace(direction="backward"))
    xp = namespace(t)
    is_forward = forward[0] >= backward[0]
    slopes = zip(forward[1:], backward[1:], strict=True)
    # (The maximum with NaN is NaN.)
    return xp.maximum(forward[0], backward[0]), *(
        xp.where(is_forward, one, other) for one, other in slopes
    )


# Quadrature of the answer: relative error 1e-10 in rdp.
FINE = Quadrature(32, 16)
# Quadrature of the search for the order: it resolves the phase transition of the
# sampled Gaussian, a cliff of L(t) with the best order at its foot.
COARSE = Quadrature(16, 10)
# Trapezoidal rules in place of these, if every mechanism has one. With 32 nats a moment
# at rate 1e-12 and noise 0.4 has a relative error of -4e-10, with 40 nats of -1e-12.
LATTICE = Quadrature(0, 0, 40.0)
_COARSE_LATTICE = Quadrature(0, 0, 18.0)


def moments(
    t: Array, groups: tuple[Group, ...], *, rule: MomentRule, block: int
) -> tuple[Array, ...]:
    """Computes `log_moment` by blocks of settings; NaN beyond a lattice."""

    def part(t: Array, groups: tuple[Group, ...]) -> tuple[Array, ...]:
        xp, found = namespace(t, groups[0].count), log_moment(t, groups, rule)
        if rule.quadrature.num_panels:
            return found
        known = (xp.log(t) <= _log_lattice_end(groups)) & xp.isfinite(found[0])
        return xp.where(known, found[0], xp.nan), *found[1:]

    return by_blocks(part, (t, groups), block)


def _log_lattice_end(groups: tuple[Group, ...]) -> Array:
    """Returns (n,) the log of the largest t for which all trapezoidal rules hold."""
    # Finite: with little noise there is none, and it is below any order.
    xp = namespace(groups[0].count)
    ends = [xp.min(g.loss.largest_on_lattice(LATTICE), axis=0) for g in groups]
    return xp.log(xp.maximum(functools.reduce(xp.minimum, ends), 1e-40))


def epsilon_at(log_delta: Array, t: Array, value: Array) -> Array:
    """*Upper bound* of epsilon that follows from ``value``, L(t)."""
    xp = namespace(log_delta, t, value)
    return (value - log_delta - xp.log1p(t)) / t - xp.log1p(1 / t)


def log_delta_at(epsilon: Array, t: Array, value: Array) -> Array:
    """*Upper bound* of log(delta) that follows from ``value``, L(t)."""
    xp = namespace(epsilon, t, value)
    return value - t * (epsilon + xp.log1p(1 / t)) - xp.log1p(t)


# --- The search for the best order ---

# Largest number of Newton steps for log t: three or four usually, dozens at a cliff.
_MOST_STEPS = 48
_FIRST_STEP = 1.0  # largest first step; a long one might cross a cliff
_TOLERANCE = 1e-13  # of log t after the last step: gradients at that order need it
_NARROW = 1e-9  # width of a bracket of log t that ends the search
# Largest logarithm of the derivative over its target for a last step.
_CLOSE = 0.1
_LOOSE = 1e-2  # error of log t after the last step of a loose search
# Range of log t; e^90 is beyond every useful order.
_LOG_T_RANGE = (-90.0, 90.0)


class _Search(NamedTuple):
    """State of the search for the best order; arrays are (n,)."""

    log_t: np.ndarray
    step: np.ndarray
    low: np.ndarray
    high: np.ndarray
    best: np.ndarray
    best_log_t: np.ndarray

    def improved(
        self,
        moment: tuple[np.ndarray, ...],
        target: np.ndarray,
        end: np.ndarray,
        is_epsilon: bool,
        loose: bool,
    ) -> tuple[_Search, np.ndarray]:
        """The state after a step, and where the search has ended."""
        log_t, low, high, t = self.log_t, self.low, self.high, np.exp(self.log_t)
        value, first, second = moment
        if is_epsilon:
            cost = epsilon_at(target, t, value)
            spent = np.maximum(t * first - value, 0.0) + np.log1p(t)
            slope = t * (t * second + 1 / (1 + t)) / spent
            gap = np.log(spent) - np.log(-target)
        else:
            cost = log_delta_at(target, t, value)
            paid = target + np.log1p(1 / t)
            slope = t * second / first + 1 / ((1 + t) * paid)
            gap = np.log(first) - np.log(paid)
        better = cost < self.best
        too_high = ~(gap <= 0)  # NaN is an overflow
        low, high = np.where(too_high, (low, log_t), (log_t, high))
        # Near a cliff the slope of the part behind it would stop the search far away.
        most = np.clip(2 * np.abs(self.step), _FIRST_STEP, 4.0)
        step = np.clip(-gap / np.maximum(slope, 0.05), -most, most)
        proposal = log_t + np.where(np.isfinite(step), step, -1.0)
        inside = (proposal > low) & (proposal < high)
        # Newton's method may alternate between two points: after a change of sign a
        # step must be at most half of the last one.
        alternates = self.step * step < 0
        alternates &= 2 * np.abs(step) > np.abs(self.step)
        proposal = np.where(inside & ~alternates, proposal, 0.5 * (low + high))
        # Newton's last step has an error of about its square, at a cliff too.
        newton = -gap / slope
        near = log_t + newton
        last = (near > low) & (near < high) & (np.abs(gap) < _CLOSE)
        error = newton * newton * np.maximum(slope, 1.0)
        last &= error < (_LOOSE if loose else _TOLERANCE)
        # The best order needs more nodes than there are, or another scale.
        beyond = (log_t + step >= end) | np.isnan(value)
        best = np.where(better, log_t, self.best_log_t)
        best = np.where(last, near, np.where(beyond, end, best))
        cost = np.where(better, cost, self.best)
        new = _Search(proposal, proposal - log_t, low, high, cost, best)
        return new, last | beyond | (high - low < _NARROW)


class Solver(NamedTuple):
    """Solves a batch of (n,) settings by one kind of quadrature."""

    target: np.ndarray  # log(delta), epsilon or an order
    groups: tuple[Group, ...]
    direction: str
    on_lattice: bool

    def moments(
        self, t: np.ndarray, index: Any, quadrature: Quadrature, derivatives: bool
    ) -> tuple[np.ndarray, ...]:
        """Computes `moments` of the settings ``index``, on the engine for all."""
        losses = [group.loss for group in self.groups]
        kinds = tuple((type(g.loss).__name__, len(g.count)) for g in self.groups)
        kernel = _KERNEL._replace(what=(self.direction, self.on_lattice, kinds))
        # JAX computes a whole chunk, even for the few settings left in a search.
        few = t.size < min(self.target.size, _KERNEL.least)
        engine = "numpy" if few else choose_engine(self.target.size, kernel, losses)
        program: Any = moments
        if engine == "jax":
            program = functools.partial(on_jax, jitted(moments, ("rule", "block")))
        block = _CPU_BLOCK if engine == "jax" and on_cpu() else 0
        rule = MomentRule(self.direction, quadrature, derivatives)
        program = functools.partial(program, rule=rule, block=block)
        part = t, taken(self.groups, index)
        with np.errstate(all="ignore"):
            return in_chunks(program, part, _CHUNKS, engine)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """The divergences at orders, one for each setting; and the orders."""
        t, rule = self.target - 1, LATTICE if self.on_lattice else FINE
        (value,) = self.moments(t, slice(None), rule, False)
        return value / t, self.target

    def best(self, *, is_epsilon: bool, loose: bool) -> tuple[np.ndarray, np.ndarray]:
        """The smallest epsilon or log(delta) over orders > 1, and the order."""
        # Newton's method in log t for the bound's derivative, which increases, within a
        # bracket. Any order gives a valid bound, so an error of the search only raises
        # it.
        target, groups, shape = self.target, self.groups, self.target.shape
        rules, budget, high = (FINE, COARSE), 10.0, np.full(shape, _LOG_T_RANGE[1])
        if is_epsilon:
            budget, high = -target, np.minimum(-target, high)
        low, end = np.full(shape, _LOG_T_RANGE[0]), high + 1
        if self.on_lattice:
            rules, end = (LATTICE, _COARSE_LATTICE), _log_lattice_end(groups)
            high = np.minimum(high, end)
        log_t = np.clip(first_order(np, groups, budget), low, high)
        worst = np.full(shape, np.inf)
        state = _Search(log_t, 0 * log_t, low, high, worst, log_t.copy())
        # Without steps all orders are equally good.
        idle = sum(np.sum(group.count, axis=0) for group in groups) == 0
        left = np.flatnonzero(~idle)
        for _ in range(_MOST_STEPS):
            if not left.size:
                break
            old, goal, last = taken((state, target, end), left)
            moment = self.moments(np.exp(old.log_t), left, rules[1], True)
            new, settled = old.improved(moment, goal, last, is_epsilon, loose)
            for every, part in zip(state, new, strict=True):
                every[left] = part
            left = left[~settled]
        log_t, t = state.best_log_t, np.exp(state.best_log_t)
        (value,) = self.moments(t, slice(None), rules[0], False)
        if self.on_lattice:
            value = np.where((log_t < end) | idle, value, np.nan)
        if is_epsilon:
            return np.maximum(epsilon_at(target, t, value), 0.0), 1 + t
        return np.minimum(log_delta_at(target, t, value), 0.0), 1 + t


# --- The method ---

# Nats by which the estimated total variation may exceed delta and is still computed.
NEAR = 3.0
_ROUNDING = 1e-12  # rounding error of the profiles' logarithms, nats
# Number of profiles below which NumPy computes them: compiling them takes 0.3 to 1 s.
_FEW_PROFILES = 8192


def at_most_total_variation(
    question: Question, run: Run, value: np.ndarray
) -> np.ndarray:
    """Lowers epsilons or log(deltas), *upper bounds*, to the total variation.

    Where the total variation is at most delta, epsilon is 0. It is computed where an
    estimate, by similar sampled Gaussians, says that it may be.
    """
    target = np.broadcast_to(question.target, value.shape)
    log_delta = target if question.is_epsilon else value
    asked = (value > 0) if question.is_epsilon else np.isfinite(value)
    total = np.zeros(run.shape)
    for loss, count in zip(run.losses, run.counts, strict=True):
        hints = loss.hints()
        one = loss.outer_rate * hints.rate * np.minimum(0.4 * hints.shift, 1.0)
        total = total + np.where(loss.loses_nothing, 0.0, count * one)
    with np.errstate(divide="ignore"):
        asked &= np.log(total) < log_delta + NEAR
    chosen = np.flatnonzero(asked & ~run.facts.is_unprotected)
    if not chosen.size:
        return value
    some = run.flattened(value.shape).take(chosen)
    log_same = np.zeros(chosen.shape)
    with np.errstate(divide="ignore"), bounding_few(chosen.size, _FEW_PROFILES):
        for loss, count in zip(some.losses, some.counts, strict=True):
            one = np.zeros(chosen.shape)
            if isinstance(loss, Profile) and not isinstance(loss, BoundingPair):
                one = delta_of_profile(np.zeros(chosen.shape), loss.kept_in_range())
            taken = (count > 0) & ~loss.loses_nothing
            same = np.log1p(-np.exp(np.minimum(one, 0.0)))
            log_same += np.where(taken, count * np.where(taken, same, 0.0), 0.0)
        bound = np.minimum(np.log(-np.expm1(log_same)) + _ROUNDING, 0.0)
    lowered = value.reshape(-1).copy()
    if question.is_epsilon:
        lowered[chosen[bound <= target.reshape(-1)[chosen]]] = 0.0
    else:
        lowered[chosen] = np.minimum(lowered[chosen], bound)
    return lowered.reshape(value.shape)


# Settings computed side by side on the CPU: their arrays fit its cache.
_CPU_BLOCK = 64
# Settings in a call of the kernel, which JAX compiles for one size.
_CHUNKS = Chunks(_CPU_BLOCK, (16 * _CPU_BLOCK,), (16384,))
_KERNEL = Kernel("rdp", numpy_seconds=1e-4, compile_seconds=4.0, least=1024)
# Number of settings, left over by trapezoidal rules, below which NumPy computes panels:
# a setting takes it 1 ms, and compiling 10 s.
_FEW_ON_PANELS = 512


def rdp_answer(question: Question, run: Run) -> Answer:
    """*Upper bound* at every setting and path; its error is unknown, so ``inf``."""
    value, _ = rdp_bound(question, run)
    unknown = np.full(value.shape, np.inf)
    return Answer(value, unknown, np.zeros(value.shape, bool))


def rdp_bound(
    question: Question, run: Run, *, loose: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bound and its order, at every setting and path."""
    # A loose bound ends the search for the order sooner: half of 200 random settings
    # were less than 1e-10 above the other, 99 % less than 4e-4, the worst 1e-2.
    ends, kinds = (question.nothing, question.everything), {"loose": loose}
    solve = functools.partial(Solver.best, is_epsilon=question.is_epsilon, **kinds)
    value, order = _evaluate(solve, question.target, run, ends)
    return at_most_total_variation(question, run, value), order


def bounding_few(
    settings: int, least: int = _KERNEL.least
) -> contextlib.AbstractContextManager[None]:
    """Uses NumPy for bounds that help another method, if they are few."""
    # Compiling moments takes 2 to 4 s of CPU; so many settings take NumPy 0.1 s.
    few = settings < least
    return using_choice("numpy") if few else contextlib.nullcontext()


def rdp_curve(orders: np.ndarray, run: Run, direction: str) -> np.ndarray:
    """Returns ``D_alpha`` of one direction of the composed pair, nats; broadcasts."""
    # If the loss may be infinite, so is the divergence.
    value, _ = _evaluate(Solver.curve, orders, run, (0.0, np.inf), direction)
    return value


def _evaluate(
    solve: Callable[[Solver], tuple[np.ndarray, np.ndarray]],
    target: np.ndarray,
    run: Run,
    ends: tuple[float, float],
    direction: str = LARGER,
) -> tuple[np.ndarray, np.ndarray]:
    """Solves every setting; ``ends`` are the trivial answers."""
    shape = np.broadcast_shapes(np.shape(target), run.shape)
    if 0 in shape:
        return np.zeros(shape), np.zeros(shape)
    nothing, everything = ends
    # Every array is broadcast to all settings, constants without a copy.
    whole = run
    if run.shape != shape:
        whole = run.map(lambda a: np.broadcast_to(a, shape) if np.size(a) > 1 else a)
    no_loss, no_noise = run.facts.loses_nothing, run.facts.is_unprotected
    flat_target = np.broadcast_to(np.asarray(target, np.float64), shape).reshape(-1)
    size = flat_target.size
    groups = map_arrays(lambda a: np.broadcast_to(a, (len(a), size)), whole.groups())
    on_lattice = direction != "backward" and all(g.loss.has_lattice for g in groups)
    solver = Solver(flat_target, groups, direction, on_lattice)
    with np.errstate(all="ignore"):
        value, order = map(np.array, solve(solver))
        left = np.flatnonzero(np.isnan(value))
        if on_lattice and left.size:
            some, rest = taken((flat_target, groups), left)
            with bounding_few(left.size, _FEW_ON_PANELS):
                found = solve(Solver(some, rest, direction, on_lattice=False))
            value[left], order[left] = found
    value, order = value.reshape(shape), order.reshape(shape)
    value = np.where(no_loss, nothing, np.where(no_noise, everything, value))
    order = np.where(no_loss | no_noise, np.inf, order)
    # A NaN would compare as safe in the wrong direction, so it becomes the upper end.
    return np.where(np.isnan(value), everything, value), order


def answer_at_orders(
    question: Question, run: Run, orders: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """*Upper bounds* by the best of some orders (K,), and its index."""
    # Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Proposition 12.
    run = run.in_reach()
    endless, log_kept, run = np.isinf(orders), run.facts.log_kept, run.kept()
    target = question.given_kept(log_kept).target[..., None]
    curve = rdp_curve(np.where(endless, 2.0, orders), run.with_axis(), LARGER)
    curve = np.where(endless, run.facts.most_lost[..., None], curve)
    if question.is_epsilon:
        values = epsilons_at_orders(curve, orders, target)
    else:
        t = orders - 1
        with np.errstate(invalid="ignore"):  # inf - inf where nothing is protected
            gap = curve - target + np.log1p(-1 / orders)
            values = np.where(gap == 0, 0.0, t * gap) - np.log(orders)
            values = np.where(endless, np.where(gap <= 0, -np.inf, 0.0), values)
        values = np.minimum(values, 0.0)
    values = np.where(np.isnan(values), question.everything, values)
    nothing_lost = (curve == 0).all(axis=-1, keepdims=True)
    values = np.where(nothing_lost, question.nothing, values)
    answer = values.min(axis=-1)
    if np.any(log_kept):
        answer = question.with_failure(answer, log_kept)
    if question.is_epsilon:
        answer = np.where(question.target >= 0, 0.0, answer)
    nothing = run.facts.loses_nothing & (log_kept == 0)
    answer = np.where(nothing, question.nothing, answer)
    return answer, values.argmin(axis=-1)


def epsilons_at_orders(
    curve: np.ndarray, orders: np.ndarray, log_delta: np.ndarray
) -> np.ndarray:
    """Returns (..., K) epsilons >= 0 that follow from a curve's value at each order."""
    t = orders - 1
    with np.errstate(invalid="ignore"):  # inf - inf where nothing is protected
        penalty = np.where(np.isinf(t), 0.0, (log_delta + np.log(orders)) / t)
        return np.maximum(curve + np.log1p(-1 / orders) - penalty, 0.0)

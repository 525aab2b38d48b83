"""The targets of a calibration, and how far from them the settings are."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import engine_name
from jaxdp_episodic.accountant.describe.step import OneStep
from jaxdp_episodic.accountant.losses.protocols import Tabulated
from jaxdp_episodic.accountant.methods.closed_form import have_closed_form
from jaxdp_episodic.accountant.methods.question import EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of
from jaxdp_episodic.accountant.questions.paths import undominated_paths
from jaxdp_episodic.accountant.questions.worst_path import CONTOUR, answer

# Lower estimate of d log epsilon / d log(1 / noise).
_OF_NOISE = 0.9
# Lower estimate of d log epsilon / d log(number of steps).
OF_STEPS = 0.45
# Largest and smallest first step of a bracket, in these logarithms.
_FARTHEST = np.log(16.0)
_NEAREST = 5e-4
# Noise multipliers that are searched.
_LEAST_NOISE = 1e-9
MOST_NOISE = 1e18
# Nats of a target above which Rényi's bound meets it where nothing else is quick: below
# it certified ends of little noise take some tenths of a second.
_LARGE = 50.0
# The same of what has tables, whose certified ends take up to a minute: up to it no
# contour was seen to fail, at 30 of 100 slots of replaced units it does.
_LARGE_OF_TABLES = 20.0
# Shift, in deviations of the noise, from which on several steps take long: a Poisson
# step's contour fails from 13.
_FURTHEST = 9.5
# Relative rounding of orders next to 1 in Rényi's bound, for each nat of a target: no
# bracket closes in on less (from 1e12 nats searches took 10, then 33 and 56 calls).
_ROUNDING_OF_ORDERS = 0.1 * 2.0**-52
# Relative distance to a noise below which nothing can be computed that ends a search:
# 1e-7 takes 17 evaluations more, of epochs of half a second each.
_AT_JUMP = 1e-2
# Largest relative tolerance.
COARSEST = 0.1


class Targets:
    """The targets of one calibration, flattened, and the run that is to meet them.

    With ``loose`` bounds of the "rdp" method are ones that are found sooner: see
    `rdp_bound`.
    """

    def __init__(
        self,
        step: OneStep,
        epsilon: Any,
        delta: Any,
        num_steps: Any,
        method: str,
        *,
        loose: bool = False,
    ) -> None:
        targets = {
            "epsilon": _validation.positive_array("epsilon", epsilon),
            "delta": _validation.positive_share_array("delta", delta),
            "num_steps": _validation.integer_array("num_steps", num_steps, minimum=0),
        }
        self.shape = _validation.broadcast_shape(
            step=np.empty(step.shape, np.uint8), **targets
        )
        self.size = int(np.prod(self.shape))
        flat = {k: self._flat(v.astype(np.float64)) for k, v in targets.items()}
        self.epsilon, self.delta = flat["epsilon"], flat["delta"]
        self.num_steps = flat["num_steps"]
        self.step, self.method, self._loose = step, method, loose
        self.runs = runs_of(step, targets["num_steps"])
        for run in self.runs:
            run.refuse(method)
        # Where a large target is met by Rényi's bound, which goes on as it began.
        self.by_renyi = np.zeros(self.size, bool)
        # The best order less 1, times the inverse noise at which it was found.
        self.orders = [np.full((self.size, run.shape[-1]), np.nan) for run in self.runs]

    def inverse_noise(
        self,
        start: np.ndarray,
        tolerance: float,
        among: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The largest inverse noise within the target, and where none is; (n,).

        Of some elements only, where ``among`` has their indices.
        """

        def excess(inverse_noise: np.ndarray, active: np.ndarray) -> np.ndarray:
            elements = active if among is None else among[active]
            return self.excess(elements, inverse_noise=inverse_noise)

        tolerances = self.reached(tolerance)
        if among is not None:
            tolerances = tolerances[among]
        ends = 1 / MOST_NOISE, 1 / _LEAST_NOISE
        low, high, ends = bracket(excess, start, *ends, _OF_NOISE)
        found = largest_within(
            excess, low, high, tolerance=tolerances, at_jump=_AT_JUMP, ends=ends
        )
        return found, low == 0

    def reached(self, tolerance: float) -> np.ndarray:
        """The tolerance, or a larger one where targets are too large for it."""
        rounded = np.minimum(_ROUNDING_OF_ORDERS * self.epsilon, COARSEST)
        return np.maximum(tolerance, rounded)

    def excess(
        self,
        active: np.ndarray,
        *,
        step: OneStep | None = None,
        inverse_noise: np.ndarray | None = None,
        num_steps: np.ndarray | None = None,
    ) -> np.ndarray:
        """``log(epsilon / target)`` of some elements, with something changed."""
        runs = self.runs
        if step is not None or num_steps is not None:
            steps = self.num_steps.copy()
            steps[active] = self.num_steps[active] if num_steps is None else num_steps
            runs = runs_of(step or self.step, steps.reshape(self.shape))
        runs = [self._taken(run, active) for run in runs]
        if inverse_noise is not None:
            runs = [run.scaled(inverse_noise[:, None]) for run in runs]
        runs = [run.in_reach() for run in runs]
        guess = None
        # Compiled kernels find a first guess for less than a second contour takes.
        if not all(loss.compiles for run in runs for loss in run.losses):
            guess = self.epsilon[active]
        question = EpsilonAt(np.log(self.delta[active]), guess)
        if inverse_noise is not None and self.follows_orders:
            found = [
                self._near(question, run, orders, active, inverse_noise[:, None])
                for run, orders in zip(runs, self.orders, strict=True)
            ]
            value = np.minimum.reduce(found).max(axis=-1)
        else:
            value = self._epsilon(question, runs, active)
        with np.errstate(divide="ignore"):
            return np.log(value) - np.log(self.epsilon[active])

    def _epsilon(
        self, question: EpsilonAt, runs: list[Run], active: np.ndarray
    ) -> np.ndarray:
        """Epsilon with its error; of large targets by what is quick, an upper bound."""
        losses = [loss for run in runs for loss in run.losses]
        have_tables = any(isinstance(loss, Tabulated) for loss in losses)
        least = _LARGE_OF_TABLES if have_tables else _LARGE
        large = (self.epsilon[active] > least) & (self.method != "rdp")
        for run in runs:
            self.by_renyi[active] |= large & _has_little_noise(run)
        by_renyi = self.by_renyi[active]
        quick = large & ~by_renyi & (self.method == "exact")
        value = np.empty(active.size)
        for method, where in (
            ("rdp", by_renyi),
            (CONTOUR, quick),
            (self.method, ~by_renyi & ~quick),
        ):
            chosen = np.flatnonzero(where)
            if not chosen.size:
                continue
            parts = [
                run.map(lambda f, chosen=chosen: f if len(f) == 1 else f[chosen])
                for run in runs
            ]
            found = answer(question.take(chosen), parts, method)
            value[chosen] = found.value
            if self.method == "exact" and method != "rdp":
                # The error estimate of an epsilon is added to it.
                value[chosen] += np.where(found.is_certified, 0.0, found.error)
            if method == CONTOUR:
                by_bound = found.is_certified & np.isposinf(found.error)
                self.by_renyi[active[chosen]] = by_bound
        return value

    @functools.cached_property
    def follows_orders(self) -> bool:
        """Whether nothing but orders is sought, from one noise to the next."""
        if self.method != "rdp" or engine_name() == "jax":
            return False
        return all(
            np.all(np.isinf(run.most_lost) | run.loses_nothing)
            and not np.any(run.log_kept())
            for run in self.runs
        )

    def _near(
        self,
        question: EpsilonAt,
        run: Run,
        orders: np.ndarray,
        active: np.ndarray,
        inverse_noise: np.ndarray,
    ) -> np.ndarray:
        """Upper bounds of epsilon by Rényi-DP, at orders near those of other noises.

        On the paths of which the worst is one; of several runs on each.
        """
        alone = len(self.runs) == 1
        kept = undominated_paths(run) if alone else np.arange(run.num_paths)
        entries = np.ix_(active, kept)
        near = 1 + orders[entries] / inverse_noise
        question = question.at(question.target[:, None])
        value, order = rdp_bound(
            question, run.take_paths(kept), near=near, loose=self._loose
        )
        orders[entries] = (order - 1) * inverse_noise
        return value

    def needs_no_noise(self) -> np.ndarray:
        """Where no noise is needed: nothing is drawn on any path, or no step taken."""
        nothing = [run.loses_nothing.all(axis=-1) for run in self.runs]
        nothing = np.logical_or.reduce(np.broadcast_arrays(*nothing))
        return np.broadcast_to(nothing, self.shape).reshape(-1)

    def initial_noise(self) -> np.ndarray:
        """Initial noise: the Gaussian mechanism with the amplified sensitivity."""
        square, first = 0.0, self.runs[0]
        for loss, count in zip(first.losses, first.counts, strict=True):
            hints = loss.hints()
            square = square + count * np.square(hints.rate * hints.furthest)
        square = np.broadcast_to(np.max(square, axis=-1), self.shape).reshape(-1)
        scale = np.sqrt(2 * square * -np.log(self.delta))
        with np.errstate(over="ignore"):  # of a target near 0: the largest one
            return np.clip(0.5 + scale / self.epsilon, 0.1, 1e9)

    def shaped(self, values: np.ndarray) -> Any:
        """The flat answers in the targets' shape; a NumPy scalar if 0-d."""
        return values.reshape(self.shape)[()]

    def _flat(self, array: np.ndarray) -> np.ndarray:
        return np.broadcast_to(array, self.shape).reshape(-1)

    def _taken(self, run: Run, active: np.ndarray) -> Run:
        """The arrays at some of the flattened settings, (len(active), P)."""
        shape = self.shape or (1,)
        index = np.unravel_index(active, shape)

        def take(field: np.ndarray) -> np.ndarray:
            if np.size(field) == 1:
                return np.reshape(field, (1, 1))
            return np.broadcast_to(field, (*shape, field.shape[-1]))[index]

        return run.map(take)


def _has_little_noise(run: Run) -> np.ndarray:
    """Where steps have too little noise for the contour or its tables, but need it."""
    little = np.zeros(run.shape, bool)
    for loss, count in zip(run.losses, run.counts, strict=True):
        taken = (count > 0) & ~loss.loses_nothing
        limit, several = _FURTHEST, run.num_steps > 1
        if isinstance(loss, Tabulated):
            limit, several = loss.slow_shift, True
        little |= taken & several & (loss.hints().furthest > limit)
    if np.any(little):
        little &= ~((run.gaussian_shift() > 0) | have_closed_form(run))
    return np.asarray(little.any(axis=-1))


def bracket(
    excess: Any, start: np.ndarray, floor: float, ceiling: float, slope: float
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Steps out from ``start`` by growing factors until the sign changes.

    The first one is as far as the excess says, if its logarithm rises by ``slope``.

    Returns ``(low, high)`` and the excess at both; ``low = 0`` where even the floor
    exceeds the target, and ``high = 0`` (finished) there and where even the ceiling
    does not.
    """
    everywhere = np.arange(start.size)
    start = np.clip(start, floor, ceiling)
    value = excess(start, everywhere)
    within = value <= 0
    low, high = np.where(within, start, 0.0), np.where(within, 0.0, start)
    values = np.where(within, value, np.nan), np.where(within, np.nan, value)
    active = everywhere
    far = np.minimum(np.abs(np.nan_to_num(value, nan=np.inf)), slope * _FARTHEST)
    factor = np.exp(np.maximum(far / slope, _NEAREST))
    while active.size:
        upward = low[active] > 0
        edge = np.where(upward, low[active], high[active])
        grown = factor[active]
        x = np.where(upward, edge * grown, edge / grown)
        x = np.clip(np.rint(x) if floor == 1.0 else x, floor, ceiling)
        value = excess(x, active)
        ok = value <= 0
        low[active] = np.where(ok, x, low[active])
        high[active] = np.where(ok, high[active], x)
        values[0][active] = np.where(ok, value, values[0][active])
        values[1][active] = np.where(ok, values[1][active], value)
        at_end = np.where(upward, x >= ceiling, x <= floor)
        unfinished = (low[active] == 0) | (high[active] == 0)
        active = active[unfinished & ~at_end]
        factor = np.minimum(factor * factor, 1e4)
    never = low == 0
    return np.where(never, 0.0, low), np.where(never, 0.0, high), values

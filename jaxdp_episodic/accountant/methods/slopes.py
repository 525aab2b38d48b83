"""How log(delta) at an epsilon changes with a run: of moved runs, all else held fixed.

What a method chooses for a run, a contour, a direction or an order, is chosen once and
kept: the answer does not depend on it, or is stationary in it. So log(delta) of a moved
run is a smooth function of the move, but for rounding, and has differences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic.accountant._engine import (
    choose_engine,
    float64_boundary,
    jitted,
    on_jax,
    using_engine,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.losses.protocols import Nodes, Profile, Tabulated
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact.changes import log_delta_changes
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.question import EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.kernels import FINE
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound, rdp_curve
from jaxdp_episodic.accountant.methods.rdp.moments import LARGER, log_moment
from jaxdp_episodic.accountant.methods.run import Group, Run
from jaxdp_episodic.accountant.methods.single_step import slope_of_profile
from jaxdp_episodic.accountant.numerics.loops import map_arrays, namespace

# Nodes of the losses and of the contour, nats by which the integrand falls along it,
# tried in turn; and the error estimate of log(delta) up to which no more are tried.
_PASSES = ((112, 97, 24.0), (144, 353, contours.FALL), (192, 769, contours.FALL))
_ENOUGH = 1e-9
# Largest error estimate of log(delta) with which a difference is one; and the same of
# mechanisms with tables, whose estimated errors it includes.
_LARGEST_ERROR = 1e-7
_LARGEST_OF_TABLES = 1e-5
# Relative error of epsilon up to which a direction, or a path, is taken to attain it;
# the least epsilon, in nats, that it is relative to; and nats of log(delta) beyond it.
ATTAINED = 2e-6
_SMALLEST_EPSILON = 1e-3
_LEFT_OUT = 1e-8
# Nats below delta at which the distributions are truncated, as in `exact`; and by which
# terms of a mixture that are left out are rarer than there.
_CUT = 50.0
_TERMS_CUT = 12.0
# Count of steps not taken, and a change of log(delta) above what these add.
_SMALLEST_COUNT = 1e-300
_NO_CHANGE = 1e-200
# Factors of the center and of the end of a second contour, which has other nodes.
_OTHER = (0.98, 1.1)
# Steps to an order of more digits, and the largest of the logarithm of order - 1.
_ORDER_STEPS = 2
_FURTHEST = 1e-3
# Settings in a call of the kernels.
_CHUNKS = Chunks(32, (1, 8, 64), (8, 512, 4096))
# Minimum number of moves for which compiling pays: a minute, against a millisecond of
# CPU time for the five of a setting.
_BREAK_EVEN = 300_000


class Moves(NamedTuple):
    """What is known about ``log(delta)`` at some epsilon."""

    log_delta: np.ndarray  # (n,) by the rule that follows; NaN: not known
    slope: np.ndarray  # (n,) ``-d log(delta) / d epsilon``
    error: np.ndarray  # (n,) estimate of the error of ``log_delta``, nats
    quotients: np.ndarray  # (P, R, n) of ``log_delta``


class Moved(NamedTuple):
    """Runs near one of (n,) settings; counts may be real numbers."""

    runs: list[Run]  # at m moves of each of P parameters, (m n,)
    weights: np.ndarray  # (P, m, R, n), of R quotients of what is there less here

    def take(self, index: np.ndarray) -> Moved:
        """Returns some of the settings."""
        _, m, _, n = self.weights.shape
        rows = (np.arange(m)[:, None] * n + index).reshape(-1)
        return Moved([run.take(rows) for run in self.runs], self.weights[..., index])

    def quotients(self, here: np.ndarray, kernel: Callable[[Run], Any]) -> np.ndarray:
        """(P, ..., R, n) of (..., n) numbers and a kernel of runs, to (..., m n)."""
        shape = *here.shape[:-1], -1, here.shape[-1]
        found = np.empty((len(self.runs), *here.shape[:-1], *self.weights.shape[2:]))
        for i, (run, weights) in enumerate(zip(self.runs, self.weights, strict=True)):
            with np.errstate(invalid="ignore"):  # NaN: not known
                there = kernel(run).reshape(shape) - here[..., None, :]
            found[i] = np.einsum("...mn,mrn->...rn", there, weights)
        return found


def moves_by_contour(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    moved: Moved,
    *,
    by_nodes: bool = False,
    other: bool = False,
) -> Moves:
    """Log(delta) of a run and of runs near it at the epsilon of an exact answer.

    By the contour integral of the direction that has this delta.

    Args:
      epsilon: > 0 and finite, (n,); it or log_delta is the answer to the other one.
      log_delta: (n,).
      run: (n,).
      moved: near it.
      by_nodes: see `changes.log_delta_changes`; only of losses whose nodes are as many
        wherever they are.
      other: by a second contour. Powers of a moment have no unique continuation to real
        exponents where the two disagree.

    Raises:
      NotImplementedError: a mechanism without `Nodes`.
    """
    if lacking := [loss for loss in run.losses if not isinstance(loss, Nodes)]:
        name = type(lacking[0]).__name__.removesuffix("Loss")
        raise NotImplementedError(
            f"{name} has no nodes to differentiate with method='exact'; method='rdp' "
            "covers it"
        )
    largest, enough = _LARGEST_ERROR, _ENOUGH
    if any(isinstance(loss, Tabulated) for loss in run.losses):
        largest = enough = _LARGEST_OF_TABLES
    # Terms are left out that add nothing in as many steps as the run has.
    goal = np.minimum(log_delta, 0.0) - _TERMS_CUT
    most = [np.maximum(count, 1.0) for count in run.counts]
    kept, many = _truncated(run, goal, most)
    parts = []
    for one in moved.runs:
        times = one.shape[0] // epsilon.size
        parts.append(
            _truncated(one, np.tile(goal, times), [np.tile(n, times) for n in most])[0]
        )
    moved = moved._replace(runs=parts)
    nothing = np.full((*moved.weights.shape[:1], *moved.weights.shape[2:]), np.nan)
    size = epsilon.size
    best = Moves(np.full(size, np.nan), np.ones(size), np.full(size, np.inf), nothing)
    for backward in (False,) if run.is_symmetric else (False, True):
        # Where one direction's delta is this one the other one's is not larger.
        index = np.flatnonzero(np.isnan(best.log_delta) & ~many)
        for rule in _PASSES:
            if not index.size:
                break
            at, target = epsilon[index], log_delta[index]
            how = backward, other, by_nodes
            some = kept.take(index), moved.take(index)
            found = _on_one_contour(at, target, *some, how, rule)
            scale = np.maximum(at, _SMALLEST_EPSILON) * found.slope
            gap, error = np.abs(found.log_delta - target), found.error
            better = gap <= ATTAINED * scale + error + _LEFT_OUT
            better &= error < np.minimum(best.error[index], largest)
            for field, part in zip(best, found, strict=True):
                field[..., index[better]] = part[..., better]
            # More nodes may say more, or that this is not the direction.
            index = index[~(error <= enough)]
    return best


def _truncated(
    run: Run, goal: np.ndarray, most: list[np.ndarray]
) -> tuple[Run, np.ndarray]:
    """A run without terms that add nothing; and where too many are left."""
    losses, many = [], np.zeros(goal.shape, bool)
    for loss, count, times in zip(run.losses, run.counts, most, strict=True):
        kept, _, too_many = cast(Nodes, loss).truncated(goal, times)
        losses.append(kept)
        many |= too_many & (count > 0)
    # A step that is not taken may be taken by the moved runs: its contour is laid too.
    counts = tuple(np.maximum(count, _SMALLEST_COUNT) for count in run.counts)
    return Run(tuple(losses), counts), many


def moves_by_profile(
    epsilon: np.ndarray, log_delta: np.ndarray, run: Run, moved: Moved
) -> Moves:
    """The same of runs of one step, by its profile.

    Exactly one count of a setting is 1, the others are 0, in all runs.
    """
    slope = np.ones(epsilon.size)

    def tails(run: Run) -> np.ndarray:
        """Of both directions, (2, ...)."""
        at = np.tile(epsilon, run.shape[0] // epsilon.size)
        both = np.full((2, at.size), np.nan)
        for loss, count in zip(run.losses, run.counts, strict=True):
            taken = np.flatnonzero(count == 1)
            if not taken.size:
                continue
            one = cast(Profile, loss.map(lambda f, r=taken: f[r]).kept_in_range())
            _prepare(one)
            with np.errstate(all="ignore"):
                both[:, taken] = [tail for tail, _ in one.log_tails(at[taken])]
            if at.size == slope.size:
                _, slope[taken] = slope_of_profile(at[taken], one)
        return both

    here = tails(run)
    quotients = moved.quotients(here, tails)
    larger = np.argmax(here, axis=0)
    value = np.take_along_axis(here, larger[None], axis=0)[0]
    quotients = np.take_along_axis(quotients, larger[None, None, None], axis=1)[:, 0]
    scale = np.maximum(epsilon, _SMALLEST_EPSILON) * slope
    attained = np.abs(value - log_delta) <= ATTAINED * scale + _LEFT_OUT
    return Moves(np.where(attained, value, np.nan), slope, 0 * slope, quotients)


def moves_at_order(
    epsilon: np.ndarray, log_delta: np.ndarray, run: Run, moved: Moved
) -> Moves:
    """The same of answers by Rényi-DP: the bound at the order that is best for it."""
    value, order = rdp_bound(EpsilonAt(log_delta), run)
    known = np.isfinite(order) & (np.abs(value - epsilon) <= ATTAINED * epsilon)
    t, groups = np.where(known, order, 2.0) - 1, run.groups()
    evaluations = moved.weights.shape[0] * moved.weights.shape[1] + 1
    engine = choose_engine(evaluations * epsilon.size, _BREAK_EVEN, run.losses)
    with using_engine(engine):
        for _ in range(_ORDER_STEPS):
            # A slope at a held order wants more digits of it than the bound does.
            arrays = epsilon, t, groups
            (step,) = in_chunks(lambda part: (_newton(*part),), arrays, _CHUNKS)
            t = t * np.exp(np.clip(np.nan_to_num(step), -_FURTHEST, _FURTHEST))

    def at_order(run: Run) -> np.ndarray:
        shape = run.shape[0] // t.size, t.size
        curve = rdp_curve(np.tile(1 + t, shape[0]), run, LARGER).reshape(shape)
        with np.errstate(divide="ignore", invalid="ignore"):  # NaN: not known
            found = t * (curve - epsilon + np.log(t / (1 + t))) - np.log1p(t)
        return found.reshape(-1)

    value = at_order(run)
    # Total variation may bound it by less than any order.
    known &= np.abs(value - log_delta) <= ATTAINED * t * epsilon + _LEFT_OUT
    quotients = moved.quotients(value, at_order)
    return Moves(np.where(known, value, np.nan), t, 0 * t, quotients)


@float64_boundary
def _newton(epsilon: Any, t: Any, groups: tuple[Group, ...]) -> Any:
    """Newton's step in log t to the order - 1 of least delta at an epsilon."""
    xp = namespace(t)
    _, slope, bend = log_moment(t, groups, MomentRule(LARGER, FINE, True))
    slope = slope - epsilon + xp.log(t / (1 + t))
    return -slope / (t * bend + 1 / (1 + t))


def _prepare(loss: Any) -> None:
    if isinstance(loss, Tabulated):
        loss.prepare()


def _on_one_contour(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    moved: Moved,
    how: tuple[bool, bool, bool],
    rule: tuple[int, int, float],
) -> Moves:
    """The moves by integrals on the contour of the first one."""
    for loss in (*run.losses, *(loss for one in moved.runs for loss in one.losses)):
        _prepare(loss)
    log_cut = np.minimum(log_delta, 0.0) - _CUT
    log_cut -= np.log(np.maximum(run.num_steps, 1.0))
    backward, *others = how
    groups, size = run.groups(), epsilon.size
    # The moves of a setting stay together, on an axis before the last.
    there = map_arrays(
        lambda a: a.reshape(*a.shape[:-1], -1, size),
        tuple(one.groups() for one in moved.runs),
    )
    # Powers of two, each of which is compiled.
    terms = tuple(
        1
        << (
            int(max(np.max(one[i].loss.num_terms) for one in (groups, *there))) - 1
        ).bit_length()
        for i in range(len(groups))
    )
    arrays = epsilon, log_cut, 0 * log_cut + backward, groups, there, moved.weights
    evaluations = moved.weights.shape[0] * moved.weights.shape[1] + 1
    engine = choose_engine(evaluations * size, _BREAK_EVEN, run.losses)
    with using_engine(engine):
        kernel = _kernel(terms, rule, *others, compiled=engine == "jax")
        found = in_chunks(lambda part: kernel(*part), arrays, _CHUNKS)
    value, error, slope, quotients = found
    quotients = np.where(np.abs(quotients) < _NO_CHANGE, 0.0, quotients)
    good = np.isfinite(value) & np.isfinite(error) & (slope > 0)
    value, slope, error = (
        np.where(good, *pair)
        for pair in ((value, np.nan), (slope, 1.0), (error, np.inf))
    )
    return Moves(value, slope, error, quotients)


def _kernel(
    terms: tuple[int, ...],
    rule: tuple[int, int, float],
    other: bool,
    by_nodes: bool,
    *,
    compiled: bool,
) -> Callable[..., Any]:
    """The moves of one chunk: its parts are jitted one by one."""
    loss_nodes, contour_nodes, fall = rule

    def part(kernel: Any, *static: str) -> Any:
        return jitted(kernel, static) if compiled else kernel

    lay_nodes = part(steps_of, "num_nodes", "num_terms")
    solve = part(log_delta_changes, "num_nodes", "by_nodes")

    def steps(groups: tuple[Group, ...], *how: Any) -> Any:
        return tuple(
            lay_nodes(group, *how, num_terms=number, num_nodes=loss_nodes)
            for group, number in zip(groups, terms, strict=True)
        )

    def call(
        epsilon: Any, log_cut: Any, backward: Any, groups: Any, moved: Any, weights: Any
    ) -> Any:
        xp = namespace(epsilon)
        here = steps(groups, backward, log_cut)
        contour = part(contours.lay_contour)(epsilon, here, fall)
        if other:
            center, end = contour.center * _OTHER[0], contour.end * _OTHER[1]
            contour = contour._replace(center=center, end=end)
        # All moves of all settings of the chunk, side by side.
        moved = map_arrays(lambda a: a.reshape(*a.shape[:-2], -1), moved)
        how = map_arrays(lambda a: xp.tile(a, weights.shape[1]), (backward, log_cut))
        there = tuple(steps(one, *how) for one in moved)
        asked = epsilon, contour, here, there, weights
        return solve(*asked, num_nodes=contour_nodes, by_nodes=by_nodes)

    if compiled:
        return functools.partial(on_jax, call)

    def on_numpy(*arrays: Any) -> Any:
        with np.errstate(all="ignore"):
            return call(*arrays)

    return on_numpy

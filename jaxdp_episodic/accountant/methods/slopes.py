"""How log(delta) at an epsilon changes with a run: of moved runs, all else held fixed.

What a method chooses for a run, a contour, a direction or an order, is chosen once and
kept: the answer does not depend on it, or is stationary in it. So log(delta) of a moved
run is a smooth function of the move, but for rounding, and has differences.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic.accountant._engine import (
    choose_engine,
    engine_name,
    float64_boundary,
    jitted,
    on_jax,
    using_engine,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.losses.protocols import Nodes, Profile, Tabulated
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import integral
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.question import EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.kernels import FINE
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound, rdp_curve
from jaxdp_episodic.accountant.methods.rdp.moments import LARGER, log_moment
from jaxdp_episodic.accountant.methods.run import Group, Run
from jaxdp_episodic.accountant.methods.single_step import slope_of_profile
from jaxdp_episodic.accountant.numerics.loops import map_arrays, namespace

# Nodes of the losses and of the contour, nats by which the integrand falls along it,
# tried in turn.
_PASSES = ((112, 97, 24.0), (144, 353, contours.FALL), (192, 769, contours.FALL))
# Largest error estimate of log(delta) with which a difference is taken: but for
# rounding its relative error was at most half of that, of 1,700 random ones. And
# the same of mechanisms with tables, whose estimated errors it includes.
LARGEST_ERROR = 1e-7
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
# Count of steps not taken.
_SMALLEST_COUNT = 1e-300
# Factors of the center and of the end of a second contour, which has other nodes.
_OTHER = (0.98, 1.1)
# Steps to an order of more digits, and the largest of the logarithm of order - 1.
_ORDER_STEPS = 2
_FURTHEST = 1e-3
# Settings in a call of the kernels.
_CHUNKS = Chunks(32, (1, 8, 64), (8, 512, 4096))
# Minimum number of evaluations for which compiling pays: half a minute, against half a
# millisecond of CPU time for the five of a setting.
_BREAK_EVEN = 150_000


class Moves(NamedTuple):
    """What is known about ``log(delta)`` at some epsilon; arrays (n,)."""

    log_delta: np.ndarray  # (M, n) of the runs, by one rule; NaN: not known
    slope: np.ndarray  # ``-d log(delta) / d epsilon`` of the first one
    rounding: np.ndarray  # estimate of the errors of ``log_delta`` that are not smooth


def moves_by_contour(
    epsilon: np.ndarray, log_delta: np.ndarray, runs: Run, *, other: bool = False
) -> Moves:
    """Log(delta) of a run and of runs near it at the epsilon of an exact answer.

    By the contour integral of the direction that has this delta.

    Args:
      epsilon: > 0 and finite, (n,); it or log_delta is the answer to the other one.
      log_delta: (n,).
      runs: the run and M - 1 moved ones, (M n,), whose counts may be real numbers.
      other: by a second contour. Powers of a moment have no unique continuation to real
        exponents where the two disagree.

    Raises:
      NotImplementedError: a mechanism without `Nodes`.
    """
    if lacking := [loss for loss in runs.losses if not isinstance(loss, Nodes)]:
        name = type(lacking[0]).__name__.removesuffix("Loss")
        raise NotImplementedError(
            f"{name} has no nodes to differentiate with method='exact'; method='rdp' "
            "covers it"
        )
    size, times = epsilon.size, runs.shape[0] // epsilon.size
    has_tables = any(isinstance(loss, Tabulated) for loss in runs.losses)
    largest = _LARGEST_OF_TABLES if has_tables else LARGEST_ERROR
    # Terms are left out that add nothing in as many steps as the run has.
    goal = np.tile(np.minimum(log_delta, 0.0) - _TERMS_CUT, times)
    losses, many = [], np.zeros(size, bool)
    for loss, count in zip(runs.losses, runs.counts, strict=True):
        most = np.tile(np.maximum(count[:size], 1.0), times)
        kept, _, too_many = cast(Nodes, loss).truncated(goal, most)
        losses.append(kept)
        many |= too_many[:size] & (count[:size] > 0)
    # A step that is not taken may be taken by the moved runs: its contour is laid too.
    counts = tuple(np.maximum(count, _SMALLEST_COUNT) for count in runs.counts)
    runs = Run(tuple(losses), counts)
    best = Moves(np.full((times, size), np.nan), np.ones(size), np.zeros(size))
    for backward in (False,) if runs.is_symmetric else (False, True):
        # Where one direction's delta is this one the other one's is not larger.
        index = np.flatnonzero(np.isnan(best.log_delta[0]) & ~many)
        for rule in _PASSES:
            if not index.size:
                break
            at, target = epsilon[index], log_delta[index]
            some = runs.take(_rows(runs, size, index))
            found, error = _on_one_contour(at, target, some, (backward, other), rule)
            scale = np.maximum(at, _SMALLEST_EPSILON) * found.slope
            gap, good = np.abs(found.log_delta[0] - target), error <= largest
            good &= np.isfinite(gap) & (found.slope > 0)
            attained = good & (gap <= ATTAINED * scale + error + _LEFT_OUT)
            for field, part in zip(best, found, strict=True):
                field[..., index[attained]] = part[..., attained]
            # More nodes may say more, or that this is not the direction.
            index = index[~good]
    return best


def moves_by_profile(epsilon: np.ndarray, log_delta: np.ndarray, runs: Run) -> Moves:
    """The same of runs of one step, by its profile.

    Exactly one count of a setting is 1, the others are 0, in all runs.
    """
    size = epsilon.size
    values = np.full((runs.shape[0] // size, size), np.nan)
    slope = np.ones(size)
    for loss, count in zip(runs.losses, runs.counts, strict=True):
        taken = np.flatnonzero(count[:size] == 1)
        if not taken.size:
            continue
        rows, at = _rows(runs, size, taken), epsilon[taken]
        every = cast(Profile, loss.map(lambda f, r=rows: f[r]).kept_in_range())
        _prepare(every)
        with np.errstate(all="ignore"):
            tails = every.log_tails(np.tile(at, len(values)))
        both = np.stack([tail for tail, _ in tails]).reshape(2, -1, taken.size)
        larger = np.argmax(both[:, :1], axis=0)[None]
        values[:, taken] = np.take_along_axis(both, larger, axis=0)[0]
        first = every.map(lambda f, n=taken.size: f[:n])
        _, slope[taken] = slope_of_profile(at, first)
    scale = np.maximum(epsilon, _SMALLEST_EPSILON) * slope
    attained = np.abs(values[0] - log_delta) <= ATTAINED * scale + _LEFT_OUT
    return Moves(np.where(attained, values, np.nan), slope, 0 * slope)


def moves_at_order(epsilon: np.ndarray, log_delta: np.ndarray, runs: Run) -> Moves:
    """The same of answers by Rényi-DP: the bound at the order that is best for it."""
    size, times = epsilon.size, runs.shape[0] // epsilon.size
    first = runs.take(np.arange(size))
    value, order = rdp_bound(EpsilonAt(log_delta), first)
    known = np.isfinite(order) & (np.abs(value - epsilon) <= ATTAINED * epsilon)
    t, groups = np.where(known, order, 2.0) - 1, first.groups()
    with using_engine(choose_engine(runs.shape[0], _BREAK_EVEN, runs.losses)):
        for _ in range(_ORDER_STEPS):
            # A slope at a held order wants more digits of it than the bound does.
            arrays = epsilon, t, groups
            (step,) = in_chunks(lambda part: (_newton(*part),), arrays, _CHUNKS)
            t = t * np.exp(np.clip(np.nan_to_num(step), -_FURTHEST, _FURTHEST))
    curve = rdp_curve(np.tile(1 + t, times), runs, LARGER).reshape(times, size)
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN: not known
        values = t * (curve - epsilon + np.log(t / (1 + t))) - np.log1p(t)
    # Total variation may bound it by less than any order.
    known &= np.abs(values[0] - log_delta) <= ATTAINED * t * epsilon + _LEFT_OUT
    return Moves(np.where(known, values, np.nan), t, 0 * t)


@float64_boundary
def _newton(epsilon: Any, t: Any, groups: tuple[Group, ...]) -> Any:
    """Newton's step in log t to the order - 1 of least delta at an epsilon."""
    xp = namespace(t)
    _, slope, bend = log_moment(t, groups, MomentRule(LARGER, FINE, True))
    slope = slope - epsilon + xp.log(t / (1 + t))
    return -slope / (t * bend + 1 / (1 + t))


def _rows(runs: Run, size: int, index: np.ndarray) -> np.ndarray:
    """Where some of n settings are in each of the runs, (M n,)."""
    return (np.arange(0, runs.shape[0], size)[:, None] + index).reshape(-1)


def _prepare(loss: Any) -> None:
    if isinstance(loss, Tabulated):
        loss.prepare()


def _on_one_contour(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    runs: Run,
    place: tuple[bool, bool],
    rule: tuple[int, int, float],
) -> tuple[Moves, np.ndarray]:
    """The moves by integrals on the contour of the first one, and that one's error."""
    backward, other = place
    for loss in runs.losses:
        _prepare(loss)
    log_cut = np.minimum(log_delta, 0.0) - _CUT
    log_cut -= np.log(np.maximum(runs.num_steps[: epsilon.size], 1.0))
    # The runs of a setting stay together, on an axis before the last.
    groups = map_arrays(
        lambda a: a.reshape(*a.shape[:-1], -1, epsilon.size), runs.groups()
    )
    # Powers of two, each of which is compiled.
    terms = tuple(
        1 << (int(np.max(group.loss.num_terms)) - 1).bit_length() for group in groups
    )
    arrays = epsilon, log_cut, 0 * log_cut + backward, groups
    engine = choose_engine(runs.shape[0], _BREAK_EVEN, runs.losses)
    with using_engine(engine):
        *found, error = in_chunks(
            lambda part: _of_chunk(part, terms, rule, other), arrays, _CHUNKS
        )
    return Moves(*found), error


def _of_chunk(
    arrays: Any, terms: tuple[int, ...], rule: tuple[int, int, float], other: bool
) -> tuple[np.ndarray, ...]:
    """The moves of one chunk, and the error: its parts are jitted one by one."""
    (loss_nodes, contour_nodes, fall), compiled = rule, engine_name() == "jax"

    def part(kernel: Any, *static: str) -> Any:
        return jitted(kernel, static) if compiled else kernel

    lay_nodes = part(steps_of, "num_nodes", "num_terms", "checked")
    solve = part(integral.log_delta, "num_nodes")

    def steps(groups: tuple[Group, ...], *how: Any, checked: bool) -> Any:
        fixed = {"num_nodes": loss_nodes, "checked": checked}
        return tuple(
            lay_nodes(group, *how, num_terms=number, **fixed)
            for group, number in zip(groups, terms, strict=True)
        )

    def call(epsilon: Any, log_cut: Any, backward: Any, groups: Any) -> Any:
        xp, times = namespace(epsilon), groups[0].count.shape[-2] - 1
        first = map_arrays(lambda a: a[..., 0, :], groups)
        here = steps(first, backward, log_cut, checked=True)
        contour = part(contours.lay_contour)(epsilon, here, fall)
        if other:
            center, end = contour.center * _OTHER[0], contour.end * _OTHER[1]
            contour = contour._replace(center=center, end=end)
        found = solve(epsilon, contour, here, num_nodes=contour_nodes)
        values = found.value[None]
        if times:
            # All moves of all settings of the chunk, side by side.
            rest = map_arrays(
                lambda a: a[..., 1:, :].reshape(*a.shape[:-2], -1), groups
            )
            epsilon, contour, *how = map_arrays(
                lambda a: xp.tile(a, times), (epsilon, contour, backward, log_cut)
            )
            there = steps(rest, *how, checked=False)
            moved, *_ = solve(epsilon, contour, there, num_nodes=contour_nodes)
            values = xp.concatenate([values, moved.reshape(times, -1)])
        return values, found.slope, found.rounding, found.log_error

    if compiled:
        return on_jax(call, *arrays)
    with np.errstate(all="ignore"):
        return call(*arrays)

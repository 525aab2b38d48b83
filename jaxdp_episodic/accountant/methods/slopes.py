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
    engine_name,
    float64_boundary,
    jitted,
    on_jax,
    using_engine,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.losses.protocols import Nodes, Profile, Tabulated
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import integral
from jaxdp_episodic.accountant.methods.exact.contour import FALL, Contour, lay_contour
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.question import EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.kernels import FINE
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound, rdp_curve
from jaxdp_episodic.accountant.methods.rdp.moments import LARGER, log_moment
from jaxdp_episodic.accountant.methods.run import Group, Run
from jaxdp_episodic.accountant.numerics.loops import map_arrays, namespace

# Nodes of the losses and of the contour, nats by which the integrand falls along it,
# tried in turn. The first is enough for four in five, and takes less than the second.
_PASSES = ((112, 57, 20.0), (112, 97, 24.0), (144, 353, FALL), (192, 769, FALL))
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
# Rows of a solution, of its contour, of its direction and of its pass.
_ROWS = len(integral.Solution._fields) + len(Contour._fields) + 2
# Steps to an order of more digits, and the largest of the logarithm of order - 1.
_ORDER_STEPS = 2
_FURTHEST = 1e-3
# Settings in a call of the kernels.
_CHUNKS = Chunks(128, (1, 8, 64), (8, 512, 4096))
# Minimum number of evaluations for which compiling pays: half a minute, against half a
# millisecond of CPU time for five.
_BREAK_EVEN = 150_000


class Moves(NamedTuple):
    """``log(delta)`` of runs at some epsilon, and of runs near them; arrays (n,)."""

    log_delta: np.ndarray  # NaN: not known
    slope: np.ndarray  # ``-d log(delta) / d epsilon``; NaN where the former is
    rounding: np.ndarray  # estimate of the errors of ``log_delta`` that are not smooth
    # From some settings, (m,), and runs near theirs, (M m,), to their ``log_delta`` by
    # the same rule, (M, m). Of `moves_by_contour` on a second contour if asked for.
    of: Callable[..., np.ndarray]


def moves_by_contour(epsilon: np.ndarray, log_delta: np.ndarray, run: Run) -> Moves:
    """Log(delta) of a run and of runs near it at the epsilon of an exact answer.

    By the contour integral of the direction that has this delta. Powers of a moment
    have no unique continuation to real exponents where two contours disagree.

    Args:
      epsilon: > 0 and finite, (n,); it or log_delta is the answer to the other one.
      log_delta: (n,).
      run: (n,); counts of those near it may be real numbers.

    Raises:
      NotImplementedError: a mechanism without `Nodes`.
    """
    if lacking := [loss for loss in run.losses if not isinstance(loss, Nodes)]:
        name = type(lacking[0]).__name__.removesuffix("Loss")
        raise NotImplementedError(
            f"{name} has no nodes to differentiate with method='exact'; method='rdp' "
            "covers it"
        )
    has_tables = any(isinstance(loss, Tabulated) for loss in run.losses)
    largest = _LARGEST_OF_TABLES if has_tables else LARGEST_ERROR
    goal = np.minimum(log_delta, 0.0)
    log_cut = goal - _CUT - np.log(np.maximum(run.num_steps, 1.0))

    def kept(index: np.ndarray, runs: Run) -> tuple[Run, np.ndarray]:
        """The runs without terms that add nothing in as many steps as the run has."""
        times, losses = runs.shape[0] // index.size, []
        many = np.zeros(runs.shape[0], bool)
        for loss, count in zip(runs.losses, run.counts, strict=True):
            here = np.tile(count[index], times)
            asked = np.tile(goal[index] - _TERMS_CUT, times), np.maximum(here, 1.0)
            loss, _, too_many = cast(Nodes, loss).truncated(*asked)
            losses.append(loss)
            many |= too_many & (here > 0)
        # A step that is not taken may be taken by moved runs: its contour is laid too.
        counts = tuple(np.maximum(count, _SMALLEST_COUNT) for count in runs.counts)
        return Run(tuple(losses), counts), many

    every, many = kept(np.arange(epsilon.size), run)
    best = np.full((_ROWS, epsilon.size), np.nan)
    for side in (0.0,) if run.is_symmetric else (0.0, 1.0):
        # Where one direction's delta is this one the other one's is not larger.
        index = np.flatnonzero(np.isnan(best[0]) & ~many)
        for number, rule in enumerate(_PASSES):
            if not index.size:
                break
            at, way = epsilon[index], np.full(index.shape, side)
            asked = at, log_cut[index], way, ()
            value, error, slope, *_ = found = _on_contours(
                asked, every.take(index), rule
            )
            scale = np.maximum(at, _SMALLEST_EPSILON) * slope
            gap, good = np.abs(value - log_delta[index]), error <= largest
            good &= np.isfinite(gap) & (slope > 0)
            attained = good & (gap <= ATTAINED * scale + error + _LEFT_OUT)
            rows = np.vstack([found, way, 0 * way + number])
            best[:, index[attained]] = rows[:, attained]
            # More nodes may say more, or that this is not the direction.
            index = index[~good]
    value, _, slope, rounding, *laid, backward, passes = best

    def of(index: np.ndarray, runs: Run, *, other: bool = False) -> np.ndarray:
        times, (near, _) = runs.shape[0] // index.size, kept(index, runs)
        values = np.full((times, index.size), np.nan)
        for number in np.flatnonzero(np.isin(range(len(_PASSES)), passes[index])):
            part = np.flatnonzero(passes[index] == number)
            contour = Contour(*laid)
            if other:
                center, end = contour.center * _OTHER[0], contour.end * _OTHER[1]
                contour = contour._replace(center=center, end=end)
            some, asked = index[part], (epsilon, log_cut, backward, contour)
            asked = map_arrays(lambda a, some=some: np.tile(a[some], times), asked)
            rows = _rows(index, part, times)
            found = _on_contours(asked, near.take(rows), _PASSES[number])
            # The first contour's error was looked at when it was chosen.
            known = not other or found[1] <= largest
            values[:, part] = np.where(known, found[0], np.nan).reshape(times, -1)
        return values

    return Moves(value, slope, rounding, of)


def moves_by_profile(epsilon: np.ndarray, log_delta: np.ndarray, run: Run) -> Moves:
    """The same of runs of one step, by its profile.

    Exactly one count of a setting is 1, the others are 0, in all runs.
    """

    def tails(index: np.ndarray, runs: Run) -> np.ndarray:
        """Both directions' profiles and tails, (2, 2, M, m)."""
        times = runs.shape[0] // index.size
        found = np.full((2, 2, times, index.size), np.nan)
        for loss, count in zip(runs.losses, run.counts, strict=True):
            taken = np.flatnonzero(count[index] == 1)
            if not taken.size:
                continue
            rows = _rows(index, taken, times)
            every = cast(Profile, loss.map(lambda f, r=rows: f[r]).kept_in_range())
            _prepare(every)
            with np.errstate(all="ignore"):
                both = every.log_tails(np.tile(epsilon[index[taken]], times))
            found[..., taken] = np.array(both).reshape(2, 2, times, -1)
        return found

    here = tails(np.arange(epsilon.size), run)[:, :, 0]
    larger = np.argmax(here[:, 0], axis=0)
    value, tail = np.take_along_axis(here, larger[None, None], axis=0)[0]
    with np.errstate(invalid="ignore"):  # beyond the largest loss
        slope = np.exp(tail - value)
        scale = np.maximum(epsilon, _SMALLEST_EPSILON) * slope
        attained = np.abs(value - log_delta) <= ATTAINED * scale + _LEFT_OUT
    value, slope = np.where(attained, (value, slope), np.nan)

    def of(index: np.ndarray, runs: Run) -> np.ndarray:
        both = tails(index, runs)[:, 0]
        return np.take_along_axis(both, larger[None, None, index], axis=0)[0]

    return Moves(value, slope, 0 * epsilon, of)


def moves_at_order(epsilon: np.ndarray, log_delta: np.ndarray, run: Run) -> Moves:
    """The same of answers by Rényi-DP: the bound at the order that is best for it."""
    value, order = rdp_bound(EpsilonAt(log_delta), run)
    known = np.isfinite(order) & (np.abs(value - epsilon) <= ATTAINED * epsilon)
    t, groups = np.where(known, order, 2.0) - 1, run.groups()
    with using_engine(choose_engine(epsilon.size, _BREAK_EVEN, run.losses)):
        for _ in range(_ORDER_STEPS):
            # A slope at a held order wants more digits of it than the bound does.
            arrays = epsilon, t, groups
            (step,) = in_chunks(lambda part: (_newton(*part),), arrays, _CHUNKS)
            t = t * np.exp(np.clip(np.nan_to_num(step), -_FURTHEST, _FURTHEST))

    def of(index: np.ndarray, runs: Run) -> np.ndarray:
        at, times = t[index], runs.shape[0] // index.size
        curve = rdp_curve(np.tile(1 + at, times), runs, LARGER).reshape(times, -1)
        with np.errstate(divide="ignore", invalid="ignore"):  # NaN: not known
            gap = curve - epsilon[index] + np.log(at / (1 + at))
        return at * gap - np.log1p(at)

    (value,) = of(np.arange(epsilon.size), run)
    # Total variation may bound it by less than any order.
    known &= np.abs(value - log_delta) <= ATTAINED * t * epsilon + _LEFT_OUT
    value, slope = np.where(known, (value, t), np.nan)
    return Moves(value, slope, 0 * t, of)


@float64_boundary
def _newton(epsilon: Any, t: Any, groups: tuple[Group, ...]) -> Any:
    """Newton's step in log t to the order - 1 of least delta at an epsilon."""
    xp = namespace(t)
    _, slope, bend = log_moment(t, groups, MomentRule(LARGER, FINE, True))
    slope = slope - epsilon + xp.log(t / (1 + t))
    return -slope / (t * bend + 1 / (1 + t))


def _rows(index: np.ndarray, part: np.ndarray, times: int) -> np.ndarray:
    """Where a part of settings is in each of so many runs of them, (times m,)."""
    return (np.arange(times)[:, None] * index.size + part).reshape(-1)


def _prepare(loss: Any) -> None:
    if isinstance(loss, Tabulated):
        loss.prepare()


def _on_contours(
    asked: tuple[Any, ...], runs: Run, rule: tuple[int, int, float]
) -> np.ndarray:
    """Solutions and contours of runs, (n,): those laid for them, or those asked for.

    ``asked`` are epsilon, the level of the cut, the direction and the contour, or ().
    """
    for loss in runs.losses:
        _prepare(loss)
    groups = runs.groups()
    # Powers of two, each of which is compiled.
    terms = tuple(
        1 << (int(np.max(group.loss.num_terms)) - 1).bit_length() for group in groups
    )
    kernel = functools.partial(_of_chunk, terms, rule)
    with using_engine(choose_engine(runs.shape[0], _BREAK_EVEN, runs.losses)):
        return np.array(in_chunks(kernel, (*asked, groups), _CHUNKS))


def _of_chunk(
    terms: tuple[int, ...], rule: tuple[int, int, float], arrays: Any
) -> tuple[np.ndarray, ...]:
    """Those of one chunk: its parts are jitted one by one."""
    (number, contour_nodes, fall), compiled = rule, engine_name() == "jax"

    def part(kernel: Any, *static: str) -> Any:
        return jitted(kernel, static) if compiled else kernel

    lay_nodes = part(steps_of, "num_nodes", "num_terms", "checked")
    solve = part(integral.log_delta, "num_nodes")

    def call(
        epsilon: Any, log_cut: Any, backward: Any, contour: Any, groups: Any
    ) -> Any:
        fixed = {"num_nodes": number, "checked": not contour}
        steps = tuple(
            lay_nodes(group, backward, log_cut, num_terms=most, **fixed)
            for group, most in zip(groups, terms, strict=True)
        )
        contour = contour or part(lay_contour)(epsilon, steps, fall)
        return *solve(epsilon, contour, steps, num_nodes=contour_nodes), *contour

    if compiled:
        return on_jax(call, *arrays)
    with np.errstate(all="ignore"):
        return call(*arrays)

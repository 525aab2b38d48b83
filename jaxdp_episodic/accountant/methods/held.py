"""How log(delta) at an epsilon changes with a run: of moved runs, all else held fixed.

What a method chooses for a run, a contour, a direction or an order, is chosen once and
kept. The answer does not depend on it, or is stationary in it, so log(delta) of moved
runs is a smooth function, up to rounding, and has differences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.losses.protocols import Nodes
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import integral
from jaxdp_episodic.accountant.methods.exact.contour import FALL, Contour, lay_contour
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.kernels import FINE
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound, rdp_curve
from jaxdp_episodic.accountant.methods.rdp.moments import LARGER, log_moment
from jaxdp_episodic.accountant.methods.run import Run

# Points of the quotient in widths: about a number, and above one that is at 0.
_POINTS = np.array([[-2.0, -1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]).T
# Weights of fourth order of the values there less that in the middle.
_WEIGHTS = np.array([[1.0, -8.0, 8.0, -1.0], [48.0, -36.0, 16.0, -3.0]]).T / 12
# Weights of second order.
_CHECK = np.array([[0.0, -0.5, 0.5, 0.0], [2.0, -0.5, 0.0, 0.0]]).T
# Nats by which log(delta) should change at most in the widths that are tried.
_NATS = (0.03, 0.3, 1e-3, 0.1)
# The same by "rdp", which is known to rounding and bends within a hundredth of a nat.
_NATS_OF_RDP = (3e-4, 3e-6, 0.01, 1e-3)
# Largest width, as a share of a number.
LARGEST_SHARE = 2e-2
# Relative error of a quotient over the square of what one of second order is off; that
# of log(delta) = -x²/2 - log(x) is 14 |log(delta)|.
_ERROR_OVER_SQUARE = 300.0
# Relative error with which no other width is tried, and largest one that is returned.
_ENOUGH = 1e-8
LARGEST_ERROR = 1e-6
# Rounding of log(delta), relative to 1 and its size; share of its estimate that counts.
_ROUNDING = 1e-15
_ROUNDED = 0.03
# Nodes of the losses and of the contour, nats by which the integrand falls along it.
_PASSES = ((112, 57, 20.0), (144, 353, FALL), (192, 769, FALL))
# Largest error estimate of log(delta) of which a difference is taken.
_OF_INTEGRALS = 1e-7
# Relative error of epsilon up to which a direction or path is taken to attain it, the
# least epsilon, in nats, that it is relative to, and nats of log(delta) beyond it.
ATTAINED = 2e-6
_SMALLEST_EPSILON = 1e-3
_LEFT_OUT = 1e-8
# Nats below delta at which distributions are cut, and terms of mixtures left out.
_CUT = 50.0
_TERMS_CUT = 12.0
# Count of steps that are not taken: their contour is laid too.
_SMALLEST_COUNT = 1e-300
# Factors of the center and of the end of a second contour, which has other nodes.
_OTHER = (0.98, 1.1)
# Newton steps to the best order, and the largest one of log(order - 1).
_ORDER_STEPS = 2
_FURTHEST = 1e-3
# Settings in a call of NumPy's kernels.
_CHUNKS = Chunks(128, (1,), (1,))


class Moves(NamedTuple):
    """``log(delta)`` of runs at some epsilon, and of runs near them; arrays (n,)."""

    log_delta: np.ndarray  # NaN: not known
    slope: np.ndarray  # ``-d log(delta) / d epsilon``
    rounding: np.ndarray  # errors of ``log_delta`` that are not smooth
    # From settings (m,) and runs near theirs, (4 m,), to their ``log_delta``, (4, m).
    of: Callable[[np.ndarray, Run], np.ndarray]
    # Nats by which log(delta) should change at most in the widths that are tried.
    nats: tuple[float, ...] = _NATS


@np.errstate(divide="ignore", invalid="ignore")
def best_quotient(
    changes: Callable[[np.ndarray, np.ndarray], np.ndarray],
    widths: Sequence[Callable[[np.ndarray], np.ndarray]],
    at_end: np.ndarray,
    rounding: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The difference quotient that is known best, and its relative error; (n,).

    Args:
      changes: from indices, (m,), and displacements of these, (4, m), to what the
        function changes by, (4, m).
      widths: to be tried in turn, (n,) each, from what was found before, NaN at first.
      at_end: 1 where displacements must be positive, else 0.
      rounding: of the function, (n,).
    """
    found, best = np.full((2, at_end.size), np.array([[np.nan], [np.inf]]))
    rounding = np.broadcast_to(rounding, found.shape)
    for width_of in widths:
        width = width_of(found)
        good = np.isfinite(width) & (width > 0) & ~(best <= _ENOUGH)
        if not np.any(good):
            continue
        left = np.flatnonzero(good)
        # By a power of two a number moves exactly.
        step, end = np.exp2(np.floor(np.log2(width[left]))), at_end[left]
        values = changes(left, _POINTS[:, end] * step)
        change, other = (
            np.einsum("kn,kn->n", weights[:, end], values)
            for weights in (_WEIGHTS, _CHECK)
        )
        size, apart = np.abs(change), np.abs(change - other)
        agree = apart <= rounding[left]
        off = _ERROR_OVER_SQUARE * np.where(agree, 0.0, apart / size) ** 2
        off = np.where((size == 0) & agree, 0.0, off + rounding[left] / size)
        better = left[off < best[left]]
        found[better] = (change / step)[off < best[left]]
        best[better] = off[off < best[left]]
    return found, best


def _is_attained(
    value: np.ndarray, log_delta: np.ndarray, epsilon: np.ndarray, slope: np.ndarray
) -> np.ndarray:
    """Where a direction's log(delta) is that of the answer, up to its error."""
    scale = np.maximum(epsilon, _SMALLEST_EPSILON) * slope
    return np.abs(value - log_delta) <= ATTAINED * scale + _LEFT_OUT


def moves_by_contour(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    *,
    other: bool = False,
) -> Moves:
    """Of exact answers of several steps: on the contour of the larger direction.

    Or on another one, which has other nodes.

    Raises:
      NotImplementedError: a mechanism without `Nodes`.
    """
    if lacking := [loss for loss in run.losses if not isinstance(loss, Nodes)]:
        name = type(lacking[0]).__name__.removesuffix("Loss")
        raise NotImplementedError(
            f"{name} has no nodes to differentiate with method='exact'; method='rdp' "
            "covers it"
        )
    goal = np.minimum(log_delta, 0.0)
    cut = goal - _CUT - np.log(np.maximum(run.num_steps, 1.0))

    def solved(
        runs: Run, index: np.ndarray, number: int, side: np.ndarray, laid: tuple = ()
    ) -> np.ndarray:
        """Solutions and contours, (10, n), of runs of the settings of an index."""
        losses = []
        for loss, count in zip(runs.losses, run.counts, strict=True):
            # Terms are left out that add nothing in as many steps as the run has.
            asked = goal[index] - _TERMS_CUT, np.maximum(count[index], 1.0)
            loss, *_ = cast(Nodes, loss).truncated(*asked)
            losses.append(loss)
        counts = tuple(np.maximum(count, _SMALLEST_COUNT) for count in runs.counts)
        arrays = (
            epsilon[index],
            cut[index],
            side,
            laid,
            Run(tuple(losses), counts).groups(),
        )
        terms = [int(np.max(group.loss.num_terms)) for group in arrays[-1]]
        kernel = functools.partial(_on_contour, _PASSES[number], terms, other)
        with using_engine("numpy"), np.errstate(all="ignore"):
            return np.array(in_chunks(kernel, arrays, _CHUNKS))

    best, passes = np.full((11, epsilon.size), np.nan), np.zeros(epsilon.size, int)
    for side in (0.0,) if run.is_symmetric else (0.0, 1.0):
        # Where one direction's delta is this one the other one's is not larger.
        index = np.flatnonzero(np.isnan(best[0]))
        for number in range(len(_PASSES)):
            if not index.size:
                break
            way = np.full(index.size, side)
            found = solved(run.take(index), index, number, way)
            value, error, slope = found[:3]
            good = (error <= _OF_INTEGRALS) & np.isfinite(value) & (slope > 0)
            near = _is_attained(value, log_delta[index], epsilon[index], slope)
            some = np.flatnonzero(good & near)
            best[:, index[some]] = np.vstack([found, way])[:, some]
            passes[index[some]] = number
            # More nodes may say more, or that this is not the direction.
            index = index[~good]
    value, _, slope, rounding, *laid, backward = best

    def of(index: np.ndarray, runs: Run) -> np.ndarray:
        values = np.full((runs.shape[0] // index.size, index.size), np.nan)
        for number in np.unique(passes[index]).tolist():
            part = np.flatnonzero(passes[index] == number)
            several = np.arange(len(values))[:, None] * index.size + part
            every = np.tile(index[part], len(values))
            contour = Contour(*(one[every] for one in laid))
            near = runs.take(several.reshape(-1))
            found = solved(near, every, number, backward[every], contour)
            values[:, part] = found[0].reshape(len(values), -1)
        return values

    rounding = _ROUNDING * (1 + np.abs(value)) + _ROUNDED * rounding
    return Moves(value, slope, rounding, of)


def _on_contour(
    rule: tuple[int, int, float],
    terms: Sequence[int],
    other: bool,
    arrays: Any,
) -> tuple[np.ndarray, ...]:
    """Solutions of a chunk on contours that are laid, or on given ones."""
    epsilon, log_cut, backward, contour, groups = arrays
    fixed = {"num_nodes": rule[0], "checked": not contour}
    steps = tuple(
        steps_of(group, backward, log_cut, num_terms=most, **fixed)
        for group, most in zip(groups, terms, strict=True)
    )
    if not contour:
        contour = lay_contour(epsilon, steps, rule[2])
        if other:
            center, end = contour.center * _OTHER[0], contour.end * _OTHER[1]
            contour = contour._replace(center=center, end=end)
    found: Any = integral.log_delta(epsilon, contour, steps, num_nodes=rule[1])
    return *found, *contour


def moves_of_one_step(epsilon: np.ndarray, log_delta: np.ndarray, run: Run) -> Moves:
    """Of exact answers of one step, which are smooth up to rounding."""

    def answers(at: np.ndarray, runs: Run) -> np.ndarray:
        with using_engine("numpy"):
            return exact_answer(DeltaAt(at.reshape(-1)), runs).value.reshape(at.shape)

    def of(index: np.ndarray, runs: Run) -> np.ndarray:
        times = runs.shape[0] // index.size
        return answers(np.tile(epsilon[index], (times, 1)), runs)

    def changes(left: np.ndarray, displaced: np.ndarray) -> np.ndarray:
        runs = run.take(np.tile(left, len(displaced)))
        return answers(epsilon[left] + displaced, runs) - value[left]

    def width(found: np.ndarray, change: float) -> np.ndarray:
        steep = np.where(found < 0, -found, 1 + 1 / epsilon)
        return np.minimum(change / steep, LARGEST_SHARE * epsilon)

    value = answers(epsilon, run)
    rounding = _ROUNDING * (1 + np.abs(value))
    widths = [functools.partial(width, change=change) for change in _NATS]
    found, error = best_quotient(changes, widths, np.zeros(value.size, int), rounding)
    known = (error < LARGEST_ERROR) & _is_attained(value, log_delta, epsilon, -found)
    value, slope = np.where(known, (value, -found), np.nan)
    return Moves(value, slope, rounding, of)


def moves_at_order(epsilon: np.ndarray, log_delta: np.ndarray, run: Run) -> Moves:
    """Of answers by Rényi-DP: the bound at the order that is best for it."""
    value, order = rdp_bound(EpsilonAt(log_delta), run)
    known = np.isfinite(order) & (np.abs(value - epsilon) <= ATTAINED * epsilon)
    t, groups = np.where(known, order, 2.0) - 1, run.groups()
    with using_engine("numpy"):
        for _ in range(_ORDER_STEPS):
            # A slope at a held order wants more digits of it than the bound does.
            (step,) = in_chunks(_newton, (epsilon, t, groups), _CHUNKS)
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
    return Moves(value, slope, _ROUNDING * (1 + np.abs(value)), of, _NATS_OF_RDP)


def _newton(arrays: Any) -> tuple[np.ndarray]:
    """Newton's step in log t to the order - 1 of least delta at an epsilon."""
    epsilon, t, groups = arrays
    with np.errstate(all="ignore"):
        _, slope, bend = log_moment(t, groups, MomentRule(LARGER, FINE, True))
        slope = slope - epsilon + np.log(t / (1 + t))
        return (-slope / (t * bend + 1 / (1 + t)),)

"""How log(delta) at an epsilon changes with a run: of moved runs, all else held fixed.

What a method chooses for a run, a contour, a direction or an order, is chosen once and
kept: the answer does not depend on it, or is stationary in it. So log(delta) of a moved
run is a smooth function of the move, but for rounding, and has differences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic.accountant._engine import (
    choose_engine,
    jitted,
    on_jax,
    using_engine,
)
from jaxdp_episodic.accountant.losses.protocols import Nodes, Profile, Tabulated
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import integral
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.question import Question
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound, rdp_curve
from jaxdp_episodic.accountant.methods.rdp.moments import LARGER
from jaxdp_episodic.accountant.methods.run import Group, Run
from jaxdp_episodic.accountant.methods.single_step import slope_of_profile

# Nodes of the losses and of the contour, tried in turn, and the error estimate of
# log(delta) up to which no more are tried.
_PASSES = ((112, 161), (144, 353), (192, 769))
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
# Count of steps not taken.
_SMALLEST_COUNT = 1e-300
# Factors of the center and of the end of a second contour, which has other nodes.
_OTHER_CENTER = 0.98
_OTHER_END = 1.1
# Settings in a call of the kernels.
_CHUNKS = Chunks(8, (1, 8, 64), (8, 512, 4096))
# Minimum number of evaluations for which compiling pays.
_BREAK_EVEN = 30_000


class Moves(NamedTuple):
    """What is known about ``log(delta)`` at some epsilon; arrays (n,)."""

    log_delta: np.ndarray  # of the run, by the rule of the moved ones; NaN: not known
    slope: np.ndarray  # ``-d log(delta) / d epsilon``
    error: np.ndarray  # estimate of the error of ``log_delta``, nats
    moved: np.ndarray  # (M, n) of each of the moved runs


def moves_by_contour(
    question: Question,
    answer: np.ndarray,
    run: Run,
    moved: Sequence[Run],
    *,
    other: bool = False,
) -> Moves:
    """Log(delta) of (n,) moved runs near the epsilon of an exact answer.

    By the contour integral of the direction that has this delta.

    Args:
      question: what was asked; its epsilon, or the answer's, is > 0 and finite.
      answer: what was answered.
      run: the run asked about.
      moved: runs near it, whose counts may be real numbers.
      other: by a second contour. Powers of a moment have no unique continuation to real
        exponents where the two disagree.

    Raises:
      NotImplementedError: a mechanism without `Nodes`.
    """
    for loss in run.losses:
        if not isinstance(loss, Nodes):
            name = type(loss).__name__.removesuffix("Loss")
            raise NotImplementedError(
                f"{name} has no distribution of losses to differentiate with method="
                "'exact'; method='rdp' covers it"
            )
    epsilon, log_delta = _both(question, answer)
    (first, many), *others = (
        _truncated(one, log_delta, run.counts) for one in (run, *moved)
    )
    # A step that is not taken may be taken by the moved runs: its contour is laid too.
    counts = tuple(np.maximum(count, _SMALLEST_COUNT) for count in first.counts)
    every = [Run(first.losses, counts), *(kept for kept, _ in others)]
    has_tables = any(isinstance(loss, Tabulated) for loss in run.losses)
    largest, enough = _LARGEST_ERROR, _ENOUGH
    if has_tables:
        largest = enough = _LARGEST_OF_TABLES
    size = epsilon.size
    rows = np.zeros((len(moved), size))
    best = Moves(np.full(size, np.nan), np.ones(size), np.full(size, np.inf), rows)
    for backward in (False,) if run.is_symmetric else (False, True):
        # Where one direction's delta is this one the other one's is not larger.
        index = np.flatnonzero(np.isnan(best.log_delta) & ~many)
        for sizes in _PASSES:
            if not index.size:
                break
            found = _on_one_contour(
                epsilon[index],
                log_delta[index],
                [one.take(index) for one in every],
                (backward, other),
                sizes,
            )
            scale = np.maximum(epsilon[index], _SMALLEST_EPSILON) * found.slope
            gap = np.abs(found.log_delta - log_delta[index])
            error = found.error
            attained = gap <= ATTAINED * scale + error + _LEFT_OUT
            better = attained & (error < np.minimum(best.error[index], largest))
            for field, part in zip(best, found, strict=True):
                field[..., index[better]] = part[..., better]
            # More nodes may say more, or that this is not the direction.
            index = index[~(error <= enough)]
    return best


def moves_by_profile(
    question: Question, answer: np.ndarray, run: Run, moved: Sequence[Run]
) -> Moves:
    """The same of runs of one step, by its profile.

    Exactly one count of a setting is 1, the others are 0, in all runs.
    """
    epsilon, log_delta = _both(question, answer)
    value, slope = np.full(epsilon.size, np.nan), np.ones(epsilon.size)
    rows = np.zeros((len(moved), epsilon.size))
    for i, count in enumerate(run.counts):
        taken = np.flatnonzero(count == 1)
        if not taken.size:
            continue

        def one(run: Run, i: int = i, taken: np.ndarray = taken) -> Profile:
            loss = run.losses[i].map(lambda field: field[taken]).kept_in_range()
            return cast(Profile, loss)

        def profiles(loss: Profile, at: np.ndarray = epsilon[taken]) -> np.ndarray:
            _prepare(loss)
            with np.errstate(all="ignore"):
                return np.stack([tail for tail, _ in loss.log_tails(at)])

        here = profiles(one(run))
        direction = np.argmax(here, axis=0)[None]
        value[taken], slope[taken] = slope_of_profile(epsilon[taken], one(run))
        for row, other in zip(rows, moved, strict=True):
            both = profiles(one(other))
            row[taken] = np.take_along_axis(both, direction, axis=0)[0]
    scale = np.maximum(epsilon, _SMALLEST_EPSILON) * slope
    attained = np.abs(value - log_delta) <= ATTAINED * scale + _LEFT_OUT
    return Moves(np.where(attained, value, np.nan), slope, 0 * slope, rows)


def moves_at_order(
    question: Question, answer: np.ndarray, run: Run, moved: Sequence[Run]
) -> Moves:
    """The same of answers by Rényi-DP: the bound at the order that is best for it."""
    epsilon, log_delta = _both(question, answer)
    value, order = rdp_bound(question, run)
    known = np.isfinite(order) & (np.abs(value - answer) <= ATTAINED * np.abs(answer))
    order = np.where(known, order, 2.0)
    t = order - 1

    def bound(run: Run) -> np.ndarray:
        gap = rdp_curve(order, run, LARGER) - epsilon + np.log1p(-1 / order)
        return t * gap - np.log(order)

    here = bound(run)
    # Total variation may bound it by less than any order.
    known &= np.abs(here - log_delta) <= ATTAINED * t * epsilon + _LEFT_OUT
    rows = np.array([bound(one) for one in moved]).reshape(-1, epsilon.size)
    return Moves(np.where(known, here, np.nan), t, 0 * t, rows)


def _both(question: Question, answer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Epsilon and log(delta)."""
    if question.is_epsilon:
        return answer, question.target
    return question.target, answer


def _prepare(loss: Any) -> None:
    if isinstance(loss, Tabulated):
        loss.prepare()


def _truncated(
    run: Run, log_delta: np.ndarray, counts: Sequence[np.ndarray]
) -> tuple[Run, np.ndarray]:
    """The run without terms that add nothing in so many steps, and where that fails."""
    goal = np.minimum(log_delta, 0.0) - _TERMS_CUT
    losses, too_many = [], np.zeros(goal.shape, bool)
    for loss, count in zip(run.losses, counts, strict=True):
        kept, _, many = cast(Nodes, loss).truncated(goal, np.maximum(count, 1.0))
        losses.append(kept)
        too_many |= many & (count > 0)
    return run.with_losses(tuple(losses)), too_many


def _on_one_contour(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    runs: Sequence[Run],
    place: tuple[bool, bool],
    sizes: tuple[int, int],
) -> Moves:
    """The moves by integrals on the contour of the first one."""
    backward, other = place
    for loss in (loss for run in runs for loss in run.losses):
        _prepare(loss)
    log_cut = np.minimum(log_delta, 0.0) - _CUT
    log_cut -= np.log(np.maximum(runs[0].num_steps, 1.0))
    groups = [one.groups() for one in runs]
    arrays = epsilon, log_cut, 0 * log_cut + backward, groups
    # Powers of two, each of which is compiled.
    terms = tuple(
        1 << (int(max(np.max(g.loss.num_terms) for g in kind)) - 1).bit_length()
        for kind in zip(*groups, strict=True)
    )
    engine = choose_engine(log_delta.size * len(runs), _BREAK_EVEN, runs[0].losses)
    with using_engine(engine):
        kernel = _kernel(terms, sizes, other, compiled=engine == "jax")
        value, error, slope, *rows = in_chunks(
            lambda part: kernel(*part), arrays, _CHUNKS
        )
    good = np.isfinite(value) & np.isfinite(error) & (slope > 0)
    return Moves(
        np.where(good, value, np.nan),
        np.where(good, slope, 1.0),
        np.where(good, error, np.inf),
        np.array(rows).reshape(-1, log_delta.size),
    )


def _kernel(
    terms: tuple[int, ...], sizes: tuple[int, int], other: bool, *, compiled: bool
) -> Callable[..., Any]:
    """Value, error, slope and the moved values of one chunk: jitted one by one."""
    loss_nodes, contour_nodes = sizes

    def run(kernel: Any, *static: str) -> Any:
        return jitted(kernel, static) if compiled else kernel

    def call(
        epsilon: Any,
        log_cut: Any,
        backward: Any,
        groups: list[tuple[Group, ...]],
    ) -> tuple[Any, ...]:
        lay_nodes = run(steps_of, "num_nodes", "num_terms")
        solve = run(integral.log_delta, "num_nodes")

        def steps(groups: tuple[Group, ...], **checked: bool) -> Any:
            rules = [{"num_nodes": loss_nodes, "num_terms": number} for number in terms]
            return tuple(
                lay_nodes(group, backward, log_cut, **rule, **checked)
                for group, rule in zip(groups, rules, strict=True)
            )

        # Compiled for moved runs, too, are the kernels that check their nodes.
        unchecked = {} if compiled else {"checked": False}

        here = steps(groups[0])
        contour = run(contours.lay_contour)(epsilon, here)
        if other:
            contour = contour._replace(
                center=contour.center * _OTHER_CENTER, end=contour.end * _OTHER_END
            )
        solution = solve(epsilon, contour, here, num_nodes=contour_nodes)
        values = [
            solve(
                epsilon, contour, steps(one, **unchecked), num_nodes=contour_nodes
            ).value
            for one in groups[1:]
        ]
        return solution.value, solution.log_error, solution.slope, *values

    if compiled:
        return functools.partial(on_jax, call)

    def on_numpy(*arrays: Any) -> tuple[Any, ...]:
        with np.errstate(all="ignore"):
            return call(*arrays)

    return on_numpy

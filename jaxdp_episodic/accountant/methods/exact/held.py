"""Derivatives of exact answers, by difference quotients on one contour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant._engine import Chunks, in_chunks
from jaxdp_episodic.accountant.losses.privacy_loss import Bounds, Nodes
from jaxdp_episodic.accountant.methods.exact.integral import Blocks, lay_contour, search
from jaxdp_episodic.accountant.methods.exact.mgf import bulk_of, steps_of
from jaxdp_episodic.accountant.methods.exact.solver import CUT, PASSES
from jaxdp_episodic.accountant.methods.run import Question, Run

# Numbers of settings whose arrays fit the cache of a CPU.
_CHUNKS = Chunks(numpy=8, cpu=(8,), accelerator=(8,))
# Relative error of a quotient due to curvature, over the squared relative distance from
# the answer.
_ERROR_OVER_SQUARE = 10.0
# Relative error of a quotient over the relative error of delta by the integral.
_OF_INTEGRAL = 30.0
# Largest relative error of a quotient.
_LARGEST_ERROR = 3e-7
# Rounding error of log(delta), nats.
_ROUNDING = 1e-14


def held_change(
    sides: Sequence[tuple[Question, Run]], answer: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Change of the answer from the first side to the second; NaN if unknown.

    The two sides are close to the setting of the answer and symmetric about it. Each is
    a question and a run of (n,) settings.
    """
    found = np.full(answer.shape, np.nan)
    (question, run), (_, other) = sides
    wanted = wanted & np.isfinite(answer) & ((answer > 0) | (not question.is_epsilon))
    wanted &= _is_plain_integral(run) & _is_plain_integral(other)
    for effort in PASSES[:3]:
        for backward in (False,) if run.is_symmetric else (False, True):
            left = np.flatnonzero(wanted & np.isnan(found))
            if not left.size:
                return found
            some = [(q.take(left), run.take(left)) for q, run in sides]
            found[left] = _change(some, answer[left], effort, float(backward))
    return found


def _is_plain_integral(run: Run) -> np.ndarray:
    """Where the answer of a run is a contour integral without special cases."""
    if not all(
        isinstance(loss, Nodes)
        and not isinstance(loss, Bounds)
        and loss.compiles
        and type(loss).num_terms is Nodes.num_terms
        for loss in run.losses
    ):
        return np.zeros(run.shape, bool)
    nothing, unprotected, too_little, log_kept = run.facts
    found = ~(nothing | unprotected | too_little) & (log_kept == 0)
    found &= (run.num_steps > 1) & np.isposinf(run.most_lost)
    return found & ~(run.gaussian_shift() > 0)


@np.errstate(all="ignore")
def _change(sides: Any, answer: np.ndarray, effort: Any, backward: float) -> np.ndarray:
    """`held_change` in one direction, with the numbers of nodes of ``effort``."""
    is_epsilon = sides[0][0].is_epsilon
    targets = [question.target for question, _ in sides]
    epsilons = [answer, answer] if is_epsilon else targets
    goals = targets if is_epsilon else [answer, answer]
    run = sides[1][1]
    cut = np.minimum(goals[0], 0.0) - np.log(np.maximum(run.num_steps, 1.0)) - CUT
    groups = tuple(run.groups() for _, run in sides)
    arrays = (*epsilons, cut, np.full(answer.shape, backward), groups)

    def on_chunk(
        low: Any, high: Any, cut: Any, backward: Any, groups: Any
    ) -> tuple[np.ndarray, ...]:
        size: Any = {"num_nodes": effort.loss_nodes, "num_terms": 1}
        each = [
            tuple(steps_of(g, backward, cut, **size) for g in side) for side in groups
        ]
        bulks = [bulk_of(steps) for steps in each]
        contour = lay_contour(high, each[1], effort.fall, bulks[1])
        blocks, parts = Blocks(1, effort.contour_nodes, 1), []
        for epsilon, steps, bulk in zip((low, high), each, bulks, strict=True):
            # Contour and epsilon are the same on both sides: nothing is searched for.
            # What is subtracted is each side's: without its atom the integrand decays.
            variance = np.where(contour.bulk.variance > 0, bulk.variance, 0.0)
            own = contour._replace(bulk=bulk._replace(variance=variance))
            value, error, slope = search(
                cut, epsilon, epsilon, own, steps, blocks, True
            )
            # A contour says nothing there; see `mgf.Steps`.
            apart = np.any([one.lie_apart for one in steps], axis=0)
            parts += value, np.where(apart, np.inf, error), slope
        return tuple(parts)

    low, error, slope, high, other, other_slope = in_chunks(on_chunk, arrays, _CHUNKS)
    change = high - low
    if is_epsilon:
        change = change - (goals[1] - goals[0])
    # Far from the answer by this direction: the answer is the other direction's.
    middle = 0.5 * (high - goals[1] + low - goals[0])
    off = _ERROR_OVER_SQUARE * (2 * middle / change) ** 2
    off += _OF_INTEGRAL * np.maximum(error, other) + _ROUNDING / np.abs(change)
    if is_epsilon:
        change = 2 * change / (slope + other_slope)
    return np.where(off <= _LARGEST_ERROR, change, np.nan)

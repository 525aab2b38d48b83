"""Certified intervals of epsilon and delta; exact profiles of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.describe.step import AnyStep, OneStep
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss, Profile
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.run import (
    Answer,
    DeltaAt,
    EpsilonAt,
    Question,
    Run,
)
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.questions.api import (
    DIRECTIONS,
    check_step,
    checked_runs,
    delta_of,
    log_of,
    of_worst_part,
    on_engine,
)
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pairs
from jaxdp_episodic.accountant.questions.worst_path import end_values, undominated_paths


@on_engine
@of_worst_part
def privacy_profile(
    step: OneStep,
    epsilon: Any,
    *,
    direction: str = "both",
    engine: str | None = None,
) -> np.ndarray | np.float64:
    """Returns delta of a *single* step at the given epsilon.

    *Exact* for the step's dominating pair, hence an upper bound for the step; for the
    designs of the multistage theorem there are data sets that reach it. It is not to
    be added up over steps: for those use `epsilon` and `delta`.

    Args:
      step: one step or release, not a composed run.
      epsilon: >= 0, nats; any shape that broadcasts with the step.
      direction: "forward" (the larger data set against the smaller), "backward" or
        "both" (the larger delta).
      engine: see `jaxdp_episodic.epsilon`.

    Returns:
      float64 in [0, 1] of the broadcast shape; with a `Population` the largest.

    Reference: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647, and the theorems in
    docs/theory.md, "Profiles" and "Other designs".
    """
    if not isinstance(step, OneStep):
        raise TypeError(
            f"step must be a GaussianStep or a release, got {_validation.shown(step)}"
        )
    target = _validation.nonnegative_array("epsilon", epsilon)
    _validation.choice("direction", direction, DIRECTIONS)
    shape = _validation.broadcast_shape(
        step=np.empty(step.shape, np.uint8), epsilon=target
    )
    every = [
        _worst_profile(target[..., None], loss, direction)
        for loss in dominating_pairs(step)
    ]
    least = np.minimum.reduce(np.broadcast_arrays(*every)).max(axis=-1)
    worst = np.broadcast_to(np.exp(least), shape)
    return np.float64(worst) if worst.ndim == 0 else np.array(worst)


def _worst_profile(target: np.ndarray, loss: PrivacyLoss, direction: str) -> np.ndarray:
    """The logarithm of delta of one pair, on each path."""
    Run((loss,), (np.ones(1),)).refuse("exact")
    finite = np.where(np.isinf(target), 1e300, target)
    at_end = np.isinf(target) & ~loss.is_unprotected
    log_kept = np.where(loss.is_unprotected, 0.0, loss.log_kept())
    forward, backward = (
        DeltaAt(target)
        .with_failure(Answer(log_profile, target, target), log_kept)
        .value
        for log_profile in (
            np.where(at_end, -np.inf, profile)
            for profile in _log_profiles(finite, loss)
        )
    )
    return {
        "forward": forward,
        "backward": backward,
        "both": np.maximum(forward, backward),
    }[direction]


def _profiles_kernel(u: Array, loss: Profile) -> tuple[Array, Array]:
    (forward, _), (backward, _) = loss.log_tails(u)
    return forward, backward


_log_profiles = float64_boundary(_profiles_kernel)


@on_engine
@of_worst_part
def epsilon_interval(
    step: AnyStep,
    *,
    delta: Any,
    num_steps: Any = None,
    max_width: float | None = None,
    engine: str | None = None,
) -> tuple[Any, Any]:
    """Returns certified lower and upper ends of epsilon at the given delta.

    The true epsilon of the composed dominating pair lies between them, rounding
    errors included. (The upper end is one for the mechanism as well.) Privacy-loss
    distributions are rounded pessimistically and optimistically and composed by FFT;
    tails cut off and round-off are bounded and added. With a `Population` both ends
    are those of the largest epsilon over the paths.

    Args:
      step: a step, a release, or a run made by `compose`.
      delta: in [0, 1]. At 0 the ends are 0 and the largest loss, unless nothing is lost
        or everything may be.
      num_steps: whole number >= 0; of a composed run as of `epsilon`.
      max_width: largest width of the interval in nats, > 0. None aims at 1e-4 of
        epsilon or 1e-7, whichever is larger, and promises nothing: where memory or
        rounding is in the way (more than about 1e9 steps, deltas far below 1e-12 of
        rare units) the ends are as far apart as they are.
      engine: see `jaxdp_episodic.epsilon`.

    Returns:
      ``(lower, upper)``, float64 nats of the broadcast shape; ``(0, inf)``, which says
      nothing, without noise, ``(0, 0)`` where nothing is drawn.

    Raises:
      ValueError: a width that cannot be met within the memory
        that the computation may use.

    Reference: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi (2022), arXiv:2207.04380.
    """
    check_step(step)
    delta = _validation.probability_array("delta", delta)
    if max_width is not None:
        checked = _validation.positive_array("max_width", max_width)
        # Smaller shares of an answer would underflow.
        max_width = max(_validation.single("max_width", checked), 1e-290)
    runs, shape = checked_runs(step, num_steps, delta=delta)
    return _least_ends(EpsilonAt(log_of(delta)), runs, shape, max_width)


@on_engine
@of_worst_part
def delta_interval(
    step: AnyStep,
    *,
    epsilon: Any,
    num_steps: Any = None,
    engine: str | None = None,
) -> tuple[Any, Any]:
    """Returns certified lower and upper ends of delta at the given epsilon.

    See `epsilon_interval`; aims at a relative width of 1e-3, without a promise.

    Args:
      step: a step, a release, or a run made by `compose`.
      epsilon: >= 0, nats.
      num_steps: whole number >= 0; of a composed run as of `epsilon`.
      engine: see `jaxdp_episodic.epsilon`.

    Returns:
      ``(lower, upper)``, float64 in [0, 1] of the broadcast shape.
    """
    check_step(step)
    target = _validation.nonnegative_array("epsilon", epsilon)
    runs, shape = checked_runs(step, num_steps, epsilon=target)
    lower, upper = _least_ends(DeltaAt(target), runs, shape, None)
    return delta_of(lower, up=False)[()], delta_of(upper, up=True)[()]


def _least_ends(
    question: Question,
    runs: Sequence[Run],
    shape: tuple[int, ...],
    width: float | None,
) -> tuple[Any, Any]:
    """Both ends, the largest over the paths of the least over the runs."""
    question = question.at(np.broadcast_to(question.target, shape)[..., None])
    both = [_ends(question, run, width, alone=len(runs) == 1) for run in runs]
    ends = []
    for each in zip(*both, strict=True):
        least = np.minimum.reduce(np.broadcast_arrays(*each))
        ends.append(np.array(np.broadcast_to(least.max(axis=-1), shape))[()])
    return ends[0], ends[1]


def _ends(
    question: Question, run: Run, width: float | None, *, alone: bool
) -> list[np.ndarray]:
    """Both ends for each path; of a run ``alone`` for those that may be the worst."""
    run.refuse("pld")
    if alone:
        run = run.take_paths(undominated_paths(run))
    # Of steps with too little noise only an upper bound is known.
    runs = run.kept(), run.in_reach()
    inside = question.inside()
    nothing = np.zeros(())
    ends: list[np.ndarray] = []
    both: tuple[np.ndarray, np.ndarray] | None = None
    for i, up in enumerate((False, True)):
        asked, log_kept = runs[up].kept(), runs[up].log_kept()
        left = inside.given_kept(log_kept, up=up)
        hopeless = np.isneginf(left.target)
        left = left.at(np.where(hopeless, -1.0, left.target))
        # Targets differ, by rounding, only where a loss may be infinite.
        if both is None or np.any(log_kept) or np.any(run.is_unprotected):
            both = pld_bounds(left, asked, width=width)
        found = Answer(both[i], nothing, nothing)
        end = inside.with_failure(found, log_kept, up=up).value
        at_end = question.at_end(runs[True].most_lost)
        if np.any(at_end):
            limit = end_values(question, runs[True])
            # At delta 0 the largest loss is an upper end only.
            known = ~np.isfinite(limit) | (limit == 0) | (not question.is_epsilon)
            known &= question.is_epsilon | ~run.has_too_little_noise
            limit = np.where(known | up, limit, question.nothing)
            end = np.where(at_end, limit, end)
        ends.append(end)
    return ends

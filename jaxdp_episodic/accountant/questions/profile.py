"""The exact privacy profile of a single step, read off its dominating pair."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.describe.step import OneStep
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss, Profile
from jaxdp_episodic.accountant.methods.run import Answer, DeltaAt, Run
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.questions.api import (
    DIRECTIONS,
    of_worst_part,
    on_engine,
)
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pairs


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

"""Bounds by the total variation distance of a run, where they are below Rényi-DP's."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic.accountant.losses.protocols import BoundingPair, Profile
from jaxdp_episodic.accountant.methods.question import Question
from jaxdp_episodic.accountant.methods.run import Group, Run
from jaxdp_episodic.accountant.methods.single_step import delta_of_profile
from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# Nats by which the estimated total variation may exceed delta and yet be computed.
NEAR = 3.0
# Rounding error of the profiles' logarithms, nats.
_ROUNDING = 1e-12


def at_most_total_variation(
    question: Question, run: Run, value: np.ndarray
) -> np.ndarray:
    """Epsilons or log(deltas), *upper bounds*, lowered where it says so."""
    target = np.broadcast_to(question.target, value.shape)
    log_delta = target if question.is_epsilon else value
    asked = (value > 0) if question.is_epsilon else np.isfinite(value)
    asked &= _log_estimate(run) < log_delta + NEAR
    chosen = np.flatnonzero(asked & ~run.is_unprotected)
    if not chosen.size:
        return value
    bound = _log_total_variation(run.flattened(value.shape).take(chosen))
    lowered = value.reshape(-1).copy()
    if question.is_epsilon:
        lowered[chosen[bound <= target.reshape(-1)[chosen]]] = 0.0
    else:
        lowered[chosen] = np.minimum(lowered[chosen], bound)
    return lowered.reshape(value.shape)


def may_be_less(log_delta: Array, groups: tuple[Group, ...]) -> Array:
    """Where total variation may be less than a delta, by an approximation; (n,)."""
    xp = namespace(log_delta)
    total = sum(xp.sum(g.count * estimate(g.loss), axis=0) for g in groups)
    return xp.log(total) < log_delta + NEAR


def _log_estimate(run: Run) -> np.ndarray:
    """An approximation of the logarithm of the total variation."""
    total = np.zeros(run.shape)
    for loss, count in zip(run.losses, run.counts, strict=True):
        one = estimate(loss)
        total = total + np.where(loss.loses_nothing, 0.0, count * one)
    with np.errstate(divide="ignore"):
        return np.log(total)


def estimate(loss: Any) -> Array:
    """An approximation of the total variation of one step."""
    hints = loss.hints()
    share = namespace(hints.shift).minimum(0.4 * hints.shift, 1.0)
    return loss.outer_rate * hints.rate * share


def _log_total_variation(run: Run) -> np.ndarray:
    """Upper bound of the logarithm of the total variation, (n,)."""
    log_same = np.zeros(run.shape)
    for loss, count in zip(run.losses, run.counts, strict=True):
        one = np.zeros(run.shape)
        if isinstance(loss, Profile) and not isinstance(loss, BoundingPair):
            one = delta_of_profile(np.zeros(run.shape), loss.kept_in_range())
        taken = (count > 0) & ~loss.loses_nothing
        with np.errstate(divide="ignore"):
            same = np.log1p(-np.exp(np.minimum(one, 0.0)))
        log_same = log_same + np.where(taken, count * np.where(taken, same, 0.0), 0.0)
    with np.errstate(divide="ignore"):
        return np.minimum(np.log(-np.expm1(log_same)) + _ROUNDING, 0.0)

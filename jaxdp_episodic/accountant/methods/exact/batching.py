"""Batching of settings: epsilons on one contour, mixtures in sums of one length.

A contour costs its nodes, at which the moments are summed; to ask at one more epsilon
costs next to nothing.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from jaxdp_episodic.accountant._engine import engine_name
from jaxdp_episodic.accountant.losses.protocols import Nodes
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# Nats of log(delta) between the epsilon that a contour is laid for and the answer above
# which the error may exceed its estimate.
NEAR = 3.0
# Largest ratio of the epsilon that a contour is laid for to the answer.
LARGEST_RATIO = 2.0
# As `NEAR`: distance from a contour's own epsilon beyond which the error is unknown.
_FAR = 10.0
# Error of log(delta) above which an answer is no guess of the right one.
USELESS = 0.5
# Above which it does not even say that the last guess was too large.
_NO_SIGN = 10.0
# Largest number of epsilons on one contour.
_MOST_EPSILONS = 16
# Settings times terms by which sums may be padded to the next length: each length is
# compiled, which takes longer, but once a process.
_MOST_PADDED = 100_000


def shared_contours(
    epsilon: np.ndarray, run: Run, log_delta: np.ndarray, alone: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which settings share a contour, and for which it is laid.

    Settings (n,) whose log(delta) are within `NEAR` nats may share one, but not those
    ``alone``: indices (E, G) of the settings of each contour, columns padded with their
    last one, and (G,) of the one that it is laid for. E is 1 or 16, as it is compiled.
    """
    number = _numbers(run)
    columns: list[list[int]] = []
    first = -1
    for i in np.lexsort((epsilon, number)).tolist():
        if (
            first < 0
            or alone[i]
            or number[i] != number[first]
            or len(columns[-1]) == _MOST_EPSILONS
            or epsilon[i] > LARGEST_RATIO * epsilon[first]
            or log_delta[first] - log_delta[i] > NEAR
        ):
            columns.append([])
            first = -1 if alone[i] else i
        columns[-1].append(i)
    most = 1 if len(columns) == len(epsilon) else _MOST_EPSILONS
    members = [column + column[-1:] * (most - len(column)) for column in columns]
    middle = [column[len(column) // 2] for column in columns]
    return np.array(members).T, np.array(middle)


def judged_epsilon(
    value: Array, log_error: Array, slope: Array, used: Array
) -> tuple[Array, ...]:
    """Epsilon, its error, whether its contour was laid too far away, the next guess.

    ``used`` is the epsilon that the contour was laid for. A contour for a larger one
    ends where its integrand is negligible, and may miss what small losses add further
    out at an epsilon as small as theirs: the answer is then only the next guess.
    """
    xp = namespace(value, slope)
    value = xp.maximum(value, 0.0)
    # delta falls with epsilon: a sum that does not has not converged.
    falls = slope > 0
    error = xp.where(falls, log_error / xp.where(falls, slope, 1.0), xp.inf)
    # 0 is exact where delta is below its target there.
    error = xp.where(falls & (log_error == 0), 0.0, error)
    distance = xp.abs(value - used) * xp.abs(slope)
    error = xp.where(distance > NEAR, 10.0 * error, error)
    far = (distance > _FAR) | (used > LARGEST_RATIO * value)
    # Without an answer the guess was too large; a poor one says little but that.
    known = xp.isfinite(error) & ~xp.isnan(value)
    lowest = xp.where(log_error >= _NO_SIGN, 0.5 * used, 0.0)
    poor = xp.where(known, xp.clip(value, lowest, 2.0 * used), 0.5 * used)
    return value, error, far, xp.where(known & (log_error < USELESS), value, poor)


def _numbers(run: Run) -> np.ndarray:
    """One number for each run of a flattened batch, the same for the same run."""
    fields: list[np.ndarray] = []
    run.map(lambda field: fields.append(field) or field)
    order = np.lexsort(fields)
    new = np.any([np.diff(field[order]) != 0 for field in fields], axis=0)
    number = np.empty(order.shape, np.int64)
    number[order] = np.concatenate([[0], np.cumsum(new)])
    return number


def shared_lengths(
    run: Run, index: np.ndarray, *, padded: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of terms of n settings of a run, and lengths to which sums are padded.

    (n,) each; ``padded``: all sums are as long as the longest one.
    """
    terms = np.ones(index.shape)
    for loss in run.losses:
        number = cast(Nodes, loss).num_terms
        one = number.size == 1
        number = np.broadcast_to(number, index.shape) if one else number[index]
        terms = np.maximum(terms, number)
    # 1, 2, 3, 4, 6, 8, 12, ...
    unit = np.exp2(np.maximum(np.floor(np.log2(terms)) - 1, 0))
    lengths = unit * np.ceil(terms / unit)
    if padded:
        lengths = np.full(index.shape, lengths.max())
    elif engine_name() == "jax":
        lengths = _padded(lengths)
    return terms, lengths


def _padded(lengths: np.ndarray) -> np.ndarray:
    """Fewer different lengths: those of few settings become the next longer one."""
    longer, which, number = np.unique(lengths, return_inverse=True, return_counts=True)
    waiting = 0
    for i in range(len(longer) - 1):
        waiting += number[i]
        if waiting * (longer[i + 1] - longer[i]) <= _MOST_PADDED:
            which[which == i] = i + 1
        else:
            waiting = 0
    return longer[which]

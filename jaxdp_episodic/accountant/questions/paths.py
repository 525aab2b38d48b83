"""Fewer paths to evaluate: those that can be the worst, without near duplicates.

A tree of unequal units has as many dominating pairs as distinct paths, often 10^5. On
every path the pair is of the same kind and differs in its rates and its sensitivity
only, and its profile never falls when one of these grows. For the rates: a smaller one
mixes both distributions with the same third one, and ``H_g`` is jointly convex with
``H_g(Z || Z) = 0``; for independent episodes, the number of visits grows with the rate.
For the sensitivity: means further apart are easier to tell apart. Hence

* a path that another one exceeds in nothing needs no evaluation to find the worst;
* rates may be rounded *up* to make paths equal: the result is an upper bound.

Both hold for a composed run if they hold for each of its steps, because every
divergence that is used here is monotone in the profile.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.methods.run import Run

# Rates are rounded up to powers of exp(spacing); the finest, 0.1 %, is tried first.
_FINEST_SPACING = 2.0**-10
# Factor of each further spacing.
_COARSER = 2.0**0.5
# Relative; above the rounding errors of log and exp of a rate above 1e-300.
_ROUNDING_MARGIN = 1e-12
# Comparisons of numbers after which paths are kept that may be dominated.
_MOST_COMPARISONS = 10**8


def undominated_paths(run: Run) -> np.ndarray:
    """Returns the paths among which the worst one is, whatever is asked.

    Every other path is at most as costly as one of these, in each setting. *Exact*: no
    worst path is lost; some of those returned may be dominated all the same, where
    finding that out would take long.

    int64 indices, ascending, at least one if there is one; the run may have setting
    axes.
    """
    columns = _columns(run)
    if columns.shape[1] == 0:
        return np.arange(min(run.num_paths, 1))
    first, _ = _distinct(columns)
    # Ranks order as the numbers do, are cheap to compare and can be added: a path
    # with the largest sum is exceeded by no other.
    ranks = np.stack([_ranks(column) for column in columns[first].T], axis=1)
    left = first[np.argsort(-ranks.sum(axis=1), kind="stable")]
    kept = []
    budget = _MOST_COMPARISONS
    while left.size and budget > 0:
        best = left[0]
        kept.append(best)
        left = left[(columns[left] > columns[best]).any(axis=1)]
        budget -= left.size * columns.shape[1] + 1
    return np.sort(np.concatenate([np.array(kept, np.int64), left]))


def equal_paths(run: Run, path: int) -> np.ndarray:
    """Returns the paths that cost what one path costs because their pairs are equal."""
    columns = _columns(run)
    return np.flatnonzero((columns == columns[path]).all(axis=1))


def rounded_up(run: Run, most: int) -> tuple[Run, np.ndarray, float]:
    """Returns a run on at most ``most`` paths that are at least as costly.

    Equal paths become one. If more than ``most`` are left, their rates are rounded up
    to a grid, as fine a one as will do.

    Args:
      run: on all its paths.
      most: whole number >= 1. Exceeded only by paths that no rounding makes equal.

    Returns:
      ``(fewer, group, excess)``: path ``i`` of the run is at most as costly as path
      ``group[i]`` of ``fewer``; no rate there is larger by more than the factor
      ``1 + excess``, which is 1 if equal paths were few enough.
    """
    first, group = _distinct(_columns(run))
    if len(first) <= most:
        return run.take_paths(first), group, 0.0
    spacing = _FINEST_SPACING
    while True:
        coarse = run.with_losses(tuple(_rounded(loss, spacing) for loss in run.losses))
        first, group = _distinct(_columns(coarse))
        # From a spacing of 1024 on every rate above 0 has become 1.
        if len(first) <= most or spacing > 1024:
            excess = float(np.expm1(spacing)) if spacing < 700 else np.inf
            return coarse.take_paths(first), group, excess + 2 * _ROUNDING_MARGIN
        spacing *= _COARSER


def _columns(run: Run) -> np.ndarray:
    """(P, D) the numbers that differ between paths; more is never cheaper."""
    paths = run.num_paths
    parts = [np.zeros((paths, 0))]
    for loss in run.losses:
        for field in loss.fields:
            if np.shape(field)[-1:] not in ((), (1,)):
                column = np.moveaxis(field, -1, 0).reshape(paths, -1)
                parts.append(column[:, (column != column[:1]).any(axis=0)])
    return np.concatenate(parts, axis=1)


def _distinct(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each set of equal rows, and the set of each row."""
    code = np.zeros(len(columns), np.int64)
    first = np.arange(min(len(columns), 1))
    for column in columns.T:
        ranks = _ranks(column)
        # Below P * P, so no overflow.
        _, first, code = np.unique(
            code * (ranks.max(initial=0) + 1) + ranks,
            return_index=True,
            return_inverse=True,
        )
    return first, code


def _ranks(column: np.ndarray) -> np.ndarray:
    return np.unique(column, return_inverse=True)[1]


def _rounded(loss: PrivacyLoss, spacing: float) -> PrivacyLoss:
    """The loss with each rate that varies rounded up to a power of exp(spacing)."""

    def up(rate: np.ndarray) -> np.ndarray:
        if rate.shape[-1] == 1:
            return rate
        with np.errstate(divide="ignore"):  # log(0) = -inf is meant: 0 stays 0
            power = np.ceil(np.log(rate) / spacing) * spacing
        raised = np.minimum(np.exp(power) * (1 + _ROUNDING_MARGIN), 1.0)
        return np.maximum(raised, rate)

    rates = {name: up(rate) for name, rate in loss.rates.items()}
    return dataclasses.replace(loss, **rates)

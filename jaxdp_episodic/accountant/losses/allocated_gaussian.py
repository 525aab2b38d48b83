"""Random allocation, add/remove: a unit takes part in one secret step of an epoch.

With t steps in the epoch, of which j are run, the pair is ``P = sum_{i<=j} N(s e_i)/t
+ (1 - j/t) N(0)`` against ``Q = N(0)`` on R^j; its likelihood ratio is

    W = ((t - j) + A_1 + ... + A_j) / t,   A_i = e^{s x_i - s²/2}, x_i ~ N(0, 1),

so that ``t H_g(P || Q) = E(X - x)_+`` with X the sum of the A, ``x = g t - (t - j)``,
and ``t H_g(Q || P) = g E(y - X)_+`` with ``y = t/g - (t - j)``. The same pair serves
zero_out of what is allocated.

Reference: docs/proofs.md, "Random allocation"; Chua et al. (2024), arXiv:2412.16802;
Feldman and Shenfeld (2025), arXiv:2502.08202, for the pair.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.allocated import (
    Asked,
    TabulatedAllocation,
    crowded,
    nodes_from,
    tails_from,
)
from jaxdp_episodic.accountant.losses.allocated_bounds import AllocatedBoundingLoss
from jaxdp_episodic.accountant.losses.allocated_moments import sum_excess
from jaxdp_episodic.accountant.losses.allocation_tables import (
    by_setting,
    prepare_sums,
    sum_tables,
)
from jaxdp_episodic.accountant.losses.gaussian import scaled
from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.losses.privacy_loss import Tails
from jaxdp_episodic.accountant.losses.protocols import Profile
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.numerics.chebyshev_tables import Table
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, on_host

# Number of losses at which the range of a distribution is looked for.
_TRIED = 600
# Distance of nodes near the mode of log W, in standard deviations of a Gaussian of the
# same peak: 5 a deviation, so that the trapezoidal rule has all digits.
_OF_WIDTH = 0.2
# Relative correction of masses above which a distribution is not used.
_LARGEST_CORRECTION = 1e-5
# The mass beyond a table must be delta e^-14 at most: 36 nats above the nodes' cut,
# which is 50 nats below log(delta).
_BEYOND_CUT = 36.0


@dataclass(frozen=True)
class AllocatedGaussianLoss(TabulatedAllocation):
    """``W = ((slots - steps) + A_1 + ... + A_steps) / slots``.

    Attributes:
      outer_rate: see `PrivacyLoss`; that the unit holds what is protected.
      shift: s >= 0.
      slots: t, whole number, the steps of an epoch.
      steps: j, whole number, 2 <= j <= t, those that are run.
    """

    shift: Array
    slots: Array
    steps: Array
    is_symmetric: ClassVar[bool] = False
    slow_shift: ClassVar[float] = 9.5  # at 10 a table was seen to take 8 s

    def certified(self, *, up: bool) -> Profile:
        """A finite pair that dominates this one, or is dominated, by convex order."""
        return self.bounding_pair(AllocatedBoundingLoss, up=up)

    def largest_loss(self, *, backward: bool) -> Array:
        """For a part of an epoch: W is at least ``(slots - steps) / slots``."""
        if not backward:
            return super().largest_loss(backward=backward)
        with np.errstate(divide="ignore"):
            least = (self.slots - self.steps) / self.slots
            return np.broadcast_to(-np.log(least), self.shape)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """By tables of the sum; its relative error is `profile_error`, an estimate."""
        xp = namespace(u, *self.fields)
        u, outer, s, t, j = xp.broadcast_arrays(u, *self.fields)
        j = xp.maximum(j, 2.0)  # where none is run nobody asks
        t = xp.maximum(t, j)
        rows = functools.partial(by_setting, _tails)
        both = tails_from(on_host(rows, u.shape, u, s, t, j, number=4))
        return scaled(both[0], outer), scaled(both[1], outer)

    def profile_error_at(self, u: Array) -> Array:
        """Larger at large u: sums of a few terms of little weight lose digits there."""

        def error(u: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
            above, below, _ = _log_ratios(u, t, j)
            upper, lower = sum_tables(round(j), s)
            gain, _, loss, _ = _tails(u, s, t, j)
            # The error of each direction counts in proportion to its share of delta.
            share = np.exp([gain, loss] - np.maximum(gain, loss))
            errors = [upper.further_error(above), lower.further_error(below)]
            return np.max(share * errors, axis=0)[None]

        return np.maximum(super().profile_error_at(u), self._by_setting(error, u))

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`: along the logarithm of the sum."""
        fields = (self.shift, self.slots, self.steps)
        return nodes_from(_node_rows, rule, *fields)

    def with_little_noise(self) -> SampledGaussianLoss:
        """See `TabulatedAllocation`."""
        return SampledGaussianLoss(self.outer_rate, self._drawn_rate, self.shift)

    _excess = staticmethod(sum_excess)

    @staticmethod
    def _prepare(settings: list[tuple[int, int, float]]) -> None:
        prepare_sums((j, s) for _, j, s in settings)

    @staticmethod
    def _tables(s: float, _: float, j: float) -> list[Table]:
        return list(sum_tables(round(j), s))


def _log_ratios(
    u: np.ndarray, t: float, j: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``|log(x / j)|`` of each direction; whether backward losses reach u."""
    if t == j:  # far out e^-u has too few digits
        return u, u, np.ones(u.shape, bool)
    ratio = np.expm1(-u) * (t / j)
    reached = ratio > -1
    below = -np.log1p(np.where(reached, ratio, 0.0))
    return np.log1p(np.expm1(u) * (t / j)), below, reached


def _tails(u: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
    """The four rows of `log_tails` at u >= 0."""
    with np.errstate(all="ignore"):
        above, below, reached = _log_ratios(u, t, j)
        upper, lower = sum_tables(round(j), s)
        high, low = upper.at(above), lower.at(below)
        # Beyond the table's end its last value is an upper bound of the profile.
        end = lower.end
        end = end if t == j else -np.log1p(np.expm1(-end) * (j / t))
        loss = low[0] + np.minimum(u, end) - math.log(t)
        # Q(W < 1/g) less the profile.
        tail = low[1] + np.log(-np.expm1(np.minimum(loss - low[1], 0.0)))
        return np.stack(
            [
                high[0] - math.log(t),
                high[1] + u,
                np.where(reached, loss, -np.inf),
                np.where(reached, tail, -np.inf),
            ]
        )


def _log_density(
    y: np.ndarray, s: float, t: float, j: float
) -> tuple[np.ndarray, np.ndarray]:
    """``log W`` at ``y = log(X / j)``, and Q's log-density of y."""
    upper, lower = sum_tables(round(j), s)
    high, low = upper.at(y)[2], lower.at(-y)[2]
    density = np.where(y >= 0, high, low) + y + math.log(j)
    return np.log1p(np.expm1(y) * (j / t)), density


def _loss_distribution(
    asked: Asked, s: float, t: float, j: float
) -> tuple[np.ndarray, ...]:
    """Losses ``log W``, Q-masses, and widths of ``y = log(X / j)``."""
    upper, lower = sum_tables(round(j), s)
    first, last = (math.asinh(y / upper.core) for y in (-lower.end, upper.end))
    tried = upper.core * np.sinh(np.linspace(first, last, _TRIED))
    loss, density = _log_density(tried, s, t, j)
    kept = np.flatnonzero(np.maximum(density, density + loss) > asked.log_cut - 10)
    if not len(kept):
        nothing = np.full(asked.size, np.nan)
        return nothing, nothing, nothing
    ends = (
        float(tried[max(kept[0] - 1, 0)]),
        float(tried[min(kept[-1] + 1, _TRIED - 1)]),
    )
    # Nodes are closer near the mode; how close follows from the density there.
    mode = np.argmax(density)
    gap = _OF_WIDTH * math.exp(-density[mode]) / math.sqrt(2 * math.pi)
    y, width = crowded(
        asked.size, ends, float(tried[mode]), gap, between=asked.checking
    )
    loss, density = _log_density(y, s, t, j)
    mass = np.exp(density) * width
    if asked.checking:
        mass = mass * (1 + np.where(y >= 0, upper.off_at(y), -lower.off_at(-y)))
    # P and Q have mass 1: what is missing is rounding error.
    change = _correction(loss, mass)
    if not np.all(np.abs(change) < _LARGEST_CORRECTION):
        mass = mass * np.nan
    return loss, mass * (1 + change), width


def _correction(loss: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Relative changes of the masses after which both P and Q sum to 1."""
    tilt, ratio = 1 / (1 + np.exp(loss)), np.exp(loss)
    matrix = np.array([[np.sum(mass * k * f) for k in (1.0, tilt)] for f in (1, ratio)])
    fix = np.linalg.solve(matrix, 1.0 - np.array([np.sum(mass), mass @ ratio]))
    return fix[0] + fix[1] * tilt


def _node_rows(asked: Asked, s: float, t: float, j: float) -> np.ndarray:
    """The rows of `nodes_from`."""
    loss, mass, width = _loss_distribution(asked, s, t, j)
    table = sum_tables(round(j), s)[asked.backward]
    profile, tail, _ = table.at(np.array([table.end]))[:3, 0]
    # Of the direction's second distribution the mass counts g times.
    gain, scale = (profile, table.end) if asked.backward else (profile - np.log(t), 0.0)
    log_beyond = np.logaddexp(gain, tail + scale)
    if not (asked.checking or log_beyond < asked.log_cut + _BEYOND_CUT):
        mass = mass * np.nan
    weight = mass if asked.backward else mass * np.exp(loss)
    sign, order = (-1.0, [0, -1]) if asked.backward else (1.0, [-1, 0])
    with np.errstate(divide="ignore"):
        ends = np.log(weight[order] / width[order])
    return np.concatenate(
        [sign * loss, weight, ends, sign * loss[order], width.max(keepdims=True)]
    )

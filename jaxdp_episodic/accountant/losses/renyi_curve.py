"""Mechanisms of which only Rényi divergences are known, at some orders or all.

References: van Erven and Harremoës (2014), arXiv:1206.2459, Corollary 2; Bun and
Steinke (2016), arXiv:1605.02065, Definitions 1.1 and 8.1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import excess_of
from jaxdp_episodic.accountant.losses.privacy_loss import Hints, MomentRule, Moments
from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# Smallest moment, so that logarithms are finite.
_SMALLEST_MOMENT = 1e-100
# Largest rho with a bound: its square does not overflow.
_LARGEST_RHO = 1e140


@dataclass(frozen=True)
class RenyiCurveLoss(Moments):
    """Upper bounds at some orders, and chords of the log-moment; plus ``rho alpha``."""

    rho: Array  # >= 0
    # Of the rest of the divergence, which a (xi, rho)-zCDP mechanism bounds by xi.
    most: Array  # at order inf; inf if unknown
    t: tuple[Array, ...]  # orders minus 1, ascending, all finite
    log_moments: tuple[Array, ...]  # ``t D_{1+t}`` of both directions, >= 0
    is_symmetric: ClassVar[bool] = True
    # Padding is an infinite moment at order inf, which is no bound.
    padding: ClassVar[dict[str, float]] = {"t": np.inf, "log_moments": np.inf}

    @classmethod
    def of_orders(cls, orders: np.ndarray, rdp: np.ndarray) -> Self:
        """From divergences, inf allowed, at ascending (A,) orders."""
        # Divergences increase with the order: each later one is a bound, too.
        most: Any = rdp[-1] if np.isinf(orders[-1]) else np.inf
        rdp = np.minimum.accumulate(rdp[::-1])[::-1]
        known = np.isfinite(orders) & np.isfinite(rdp)
        # If no finite order is known, that of order inf is used at order 2 too.
        t, rdp = (orders[known] - 1, rdp[known]) if known.any() else (np.ones(1), most)
        fields = (tuple(np.full(1, value) for value in one) for one in (t, t * rdp))
        return cls(np.ones(1), np.zeros(1), np.full(1, most), *fields)

    @property
    def loses_nothing(self) -> Array:
        """Whether all divergences are 0."""
        rest = np.max(np.stack([self.most, *self.log_moments]), axis=0)
        return np.equal(self.rho, 0) & np.equal(rest, 0)

    @property
    def is_unprotected(self) -> Array:
        """Whether all divergences are infinite, or beyond the range."""
        rest = np.min(np.stack([self.most, *self.log_moments]), axis=0)
        return np.isinf(rest) | np.greater(self.rho, _LARGEST_RHO)

    def kept_in_range(self) -> Self:
        """See `PrivacyLoss`: moments are raised above 0."""
        raised = tuple(np.maximum(m, _SMALLEST_MOMENT) for m in self.log_moments)
        rho = np.minimum(self.rho, _LARGEST_RHO)
        return dataclasses.replace(super().kept_in_range(), rho=rho, log_moments=raised)

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: the divergence of order inf."""
        return np.where(np.equal(self.rho, 0), self.most, np.inf)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: about the same divergence at the first order."""
        xp = namespace(*self.fields)
        first, order = self.log_moments[0], self.t[0]
        square = xp.minimum(2 * first / (order * (1 + order)), 1e6)
        return Hints.unsampled(xp.sqrt(square + 2 * self.rho))

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; an *upper bound*."""
        xp = namespace(t, *self.fields)
        ends = xp.stack([xp.zeros_like(t), *(a + 0 * t for a in self.t)])
        values = xp.stack([xp.zeros_like(t), *(a + 0 * t for a in self.log_moments)])
        index = xp.sum(ends < t, axis=0)[None]  # of the end above t
        left, low = (xp.take_along_axis(a, index - 1, 0)[0] for a in (ends, values))
        index = xp.minimum(index, ends.shape[0] - 1)
        right, high = (xp.take_along_axis(a, index, 0)[0] for a in (ends, values))
        known = (t <= right) & xp.isfinite(right) & xp.isfinite(high)
        width = xp.where(known, right - left, 1.0)
        rise = xp.where(known, high - low, 0.0) / width
        # No divergence exceeds that of order inf.
        most = t * self.most
        chord = xp.where(known, low + rise * (t - left), xp.inf)
        value = xp.minimum(chord, most)
        slope = xp.where(chord < most, rise, self.most)
        value = xp.maximum(value, _SMALLEST_MOMENT) + t * self.rho * (1 + t)
        slope, bend = slope + self.rho * (1 + 2 * t), 2 * self.rho
        return excess_of(value, slope, bend, rule.with_derivatives)


class ZeroConcentratedLoss(RenyiCurveLoss):
    """(xi, rho)-zCDP: ``xi + rho alpha`` at every order."""

    is_symmetric: ClassVar[bool] = True

    @classmethod
    def of(cls, rho: Array, xi: Array) -> Self:
        """Besides rho the divergence is at most xi: at order 2, and at order inf."""
        return cls(np.ones(1), rho, xi, (np.ones(1),), (xi,))

"""Zero-concentrated DP: ``D_alpha <= xi + rho alpha`` for every alpha > 1."""

# Reference: Bun and Steinke (2016), arXiv:1605.02065, Definitions 1.1 and 8.1.

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import excess_of
from jaxdp_episodic.accountant.losses.privacy_loss import Hints, MomentRule
from jaxdp_episodic.accountant.losses.protocols import Moments
from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# Range of rho in which its squares neither vanish nor overflow; above it, no bound.
_SMALLEST_RHO = 1e-40
_LARGEST_RHO = 1e140


@dataclass(frozen=True)
class ZeroConcentratedLoss(Moments):
    """``log E_Q[(P/Q)^{1+t}] = t (xi + rho (1 + t))``: an upper bound, not a pair."""

    rho: Array  # >= 0; inf is no protection
    xi: Array  # >= 0; inf is no protection
    is_symmetric: ClassVar[bool] = True

    @property
    def loses_nothing(self) -> Array:
        """Where no divergence is above 0."""
        return np.equal(self.rho, 0) & np.equal(self.xi, 0)

    @property
    def is_unprotected(self) -> Array:
        """Where nothing is known, or next to nothing."""
        return np.greater(np.maximum(self.rho, self.xi), _LARGEST_RHO)

    def kept_in_range(self) -> Self:
        """Returns divergences that kernels can compute with."""
        rho = np.clip(self.rho, _SMALLEST_RHO, _LARGEST_RHO)
        xi = np.minimum(self.xi, _LARGEST_RHO)
        return dataclasses.replace(super().kept_in_range(), rho=rho, xi=xi)

    def largest_loss(self, *, backward: bool) -> Array:
        """Xi where rho is 0."""
        return np.where(np.equal(self.rho, 0), self.xi, np.inf)

    def hints(self) -> Hints:
        """The Gaussian with about the same divergences."""
        xp = namespace(*self.fields)
        return Hints.unsampled(xp.sqrt(2 * (self.rho + self.xi)))

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; closed form."""
        xp = namespace(t, *self.fields)
        t, rho, xi = xp.broadcast_arrays(t, self.rho, self.xi)
        slope = xi + rho * (1 + 2 * t)
        log_moment = t * (xi + rho * (1 + t))
        return excess_of(log_moment, slope, 2 * rho, rule.with_derivatives)

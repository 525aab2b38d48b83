"""Randomized response: the dominating pair of any (epsilon, delta)-DP mechanism.

Reference: Kairouz, Oh, Viswanath (2015), arXiv:1311.0776, Theorem 3.3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import (
    FiniteValues,
    Hints,
    MomentRule,
    Moments,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace
from jaxdp_episodic.accountant.numerics.special import log_expm1


@dataclass(frozen=True)
class RandomizedResponseLoss(FiniteValues, Moments):
    """A bit that is true with probability ``e^eps / (1 + e^eps)``, given no failure."""

    epsilon: Array  # >= 0, the size of both losses; inf means no protection
    failure: Array  # in [0, 1], probability of an infinite loss
    is_symmetric: ClassVar[bool] = True

    @property
    def loses_nothing(self) -> Array:
        """Whether the answer is a random bit, given no failure."""
        return np.equal(self.epsilon, 0) & np.ones(self.shape, bool)

    @property
    def is_unprotected(self) -> Array:
        """Whether every answer is true."""
        return np.greater(self.epsilon, self.LARGEST_LOSS) | np.zeros(self.shape, bool)

    def kept_in_range(self) -> Self:
        """See `PrivacyLoss`."""
        epsilon = np.clip(self.epsilon, self.SMALLEST_LOSS, self.LARGEST_LOSS)
        return dataclasses.replace(super().kept_in_range(), epsilon=epsilon)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: losses with about the same variance, or mean."""
        xp = namespace(*self.fields)
        return Hints.unsampled(xp.minimum(self.epsilon, xp.sqrt(2 * self.epsilon)))

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: epsilon, in both directions."""
        return self.epsilon + np.zeros(self.shape)

    def log_kept(self) -> Array:
        """See `PrivacyLoss`."""
        with np.errstate(divide="ignore"):
            return np.log1p(-self.failure) + super().log_kept()

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`.

        The profile is ``(e^eps - g) / (1 + e^eps)``, the tail ``g / (1 + e^eps)``, if g
        < e^eps.
        """
        xp = namespace(u, *self.fields)
        u, epsilon = xp.broadcast_arrays(u, self.epsilon)
        inside = u < epsilon
        gap = xp.where(inside, u - epsilon, -1.0)
        log_truth = -xp.log1p(xp.exp(-epsilon))
        profile = xp.where(inside, xp.log(-xp.expm1(gap)) + log_truth, -xp.inf)
        tails = profile, xp.where(inside, gap + log_truth, -xp.inf)
        return tails, tails

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """See `FiniteValues`: of a true and of a false answer."""
        losses = np.array([self.epsilon, -self.epsilon], np.float64)
        return losses, np.minimum(losses, 0.0) - np.log1p(np.exp(-self.epsilon))

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """``(e^{t eps} - 1) (1 - e^{-(1+t) eps}) / (1 + e^{-eps})``; exact."""
        xp = namespace(t, *self.fields)
        epsilon, rise, fall = self.epsilon, t * self.epsilon, (1 + t) * self.epsilon
        excess = log_expm1(rise) + xp.log(-xp.expm1(-fall)) - xp.log1p(xp.exp(-epsilon))
        if not rule.with_derivatives:
            return (excess,)
        share = xp.expm1(-rise) * xp.expm1(-fall)
        both = xp.exp(-rise - fall)
        first = epsilon * (1 - both) / share
        return excess, first, epsilon * epsilon * (1 + both) / share

"""Random allocation, add/remove: a unit takes part in one secret step of an epoch.

With t steps in the epoch, of which j are run, the pair is ``P = sum_{i<=j} N(s e_i)/t
+ (1 - j/t) N(0)`` against ``Q = N(0)`` on R^j; its likelihood ratio is

    W = ((t - j) + A_1 + ... + A_j) / t,   A_i = e^{s x_i - s²/2}, x_i ~ N(0, 1).

The same pair serves zero_out of what is allocated. Its distribution has no closed form:
answers are the certified ends of two finite pairs, one above and one below.

Reference: docs/proofs.md, "Random allocation"; Chua et al. (2024), arXiv:2412.16802;
Feldman and Shenfeld (2025), arXiv:2502.08202, for the pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.allocated import AllocatedLoss
from jaxdp_episodic.accountant.losses.allocated_bounds import AllocatedBoundingLoss
from jaxdp_episodic.accountant.losses.allocated_moments import sum_excess
from jaxdp_episodic.accountant.losses.protocols import Profile
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.numerics.loops import Array


@dataclass(frozen=True)
class AllocatedGaussianLoss(AllocatedLoss):
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
    _excess = staticmethod(sum_excess)

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

    def with_little_noise(self) -> SampledGaussianLoss:
        """The slot revealed: see `AllocatedLoss`."""
        return SampledGaussianLoss(self.outer_rate, self._drawn_rate, self.shift)

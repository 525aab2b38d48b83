"""Random allocation under add_remove, and zero_out of what is allocated."""

# Reference: docs/proofs.md, "Random allocation"; Chua et al. (2024), arXiv:2412.16802;
# Feldman and Shenfeld (2025), arXiv:2502.08202, for the pair.

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
    """``W = ((slots - steps) + A_1 + ... + A_steps) / slots``."""

    shift: Array  # s >= 0
    slots: Array  # t, whole number, the steps of an epoch
    steps: Array  # j, whole number, 2 <= j <= t, those that are run
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

"""Privacy losses with finitely many values, of mechanisms with finitely many outcomes.

References: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 8, for Poisson
sampling; Kairouz, Oh, Viswanath (2015), arXiv:1311.0776, Theorem 3.3, for randomized
response; docs/proofs.md, "Laplace noise".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import log_excess_of_atoms
from jaxdp_episodic.accountant.losses.privacy_loss import (
    FiniteValues,
    Hints,
    MomentRule,
    Moments,
    Tails,
    tails_of_values,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace


@dataclass(frozen=True)
class FiniteLoss(FiniteValues, Moments):
    """Finitely many losses, and the logarithms of their probabilities under P."""

    losses: tuple[Array, ...]  # of either sign, finite; without protection huge
    log_masses: tuple[Array, ...]  # under P; Q's probabilities are e^-loss times these
    failure: Array  # in [0, 1], probability that everything is revealed instead
    is_symmetric: ClassVar[bool] = False
    padding: ClassVar[dict[str, float]] = {"losses": 0.0, "log_masses": -np.inf}

    @property
    def loses_nothing(self) -> Array:
        """Whether 0 is the only loss, given no failure."""
        return np.equal(self.largest_size, 0)

    @property
    def is_unprotected(self) -> Array:
        """Whether a loss exceeds the range of the kernels."""
        return np.greater(self.largest_size, self.LARGEST_LOSS)

    def kept_in_range(self) -> Self:
        """See `PrivacyLoss`: losses that are not 0 are raised in size."""
        least, most = self.SMALLEST_LOSS, self.LARGEST_LOSS
        sizes = (np.clip(np.abs(y), least * (y != 0), most) for y in self.losses)
        losses = tuple(map(np.copysign, sizes, self.losses))
        return dataclasses.replace(super().kept_in_range(), losses=losses)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: losses with about the same variance, or mean."""
        xp = namespace(*self.fields)
        loss, mass = self._atoms(self.shape)
        size = xp.minimum(xp.abs(loss), self.LARGEST_LOSS)
        largest = xp.max(xp.where(mass > -xp.inf, size, 0.0), axis=0)
        deviation = xp.sqrt(xp.maximum(xp.sum(xp.exp(mass) * size**2, axis=0), 1e-120))
        one, furthest = xp.ones_like(largest), xp.minimum(largest, xp.sqrt(2 * largest))
        shift = xp.minimum(xp.minimum(deviation, xp.sqrt(2 * deviation)), furthest)
        return Hints(one, one, shift, furthest)

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: the largest loss, backward minus the smallest."""
        sign = -1.0 if backward else 1.0
        pairs = zip(self.losses, self.log_masses, strict=True)
        none = np.full(self.shape, -np.inf)
        found = [np.where(np.isneginf(m), none, sign * y) for y, m in pairs]
        largest = np.max(found, axis=0)
        return np.where(largest > self.LARGEST_LOSS, np.inf, largest)

    def log_kept(self) -> Array:
        """See `PrivacyLoss`."""
        with np.errstate(divide="ignore"):
            return np.log1p(-self.failure) + super().log_kept()

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`: ``E[(1 - e^{u - L})_+]``, and ``E[e^{u - L}; L > u]``."""
        xp = namespace(u, *self.fields)
        u = xp.broadcast_to(u, np.broadcast_shapes(np.shape(u), self.shape))
        loss, mass = self._atoms(u.shape)
        return tails_of_values(u, loss, mass), tails_of_values(u, -loss, mass - loss)

    def profile_error(self) -> Array:
        """See `Profile`: Q's log-probabilities have rounding errors of the losses."""
        return super().profile_error() + 4e-16 * self.largest_size

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """See `FiniteValues`: without those of probability 0."""
        losses, log_masses = np.array(self.losses), np.array(self.log_masses)
        occurs = log_masses > -np.inf
        return losses[occurs], log_masses[occurs]

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact."""
        return log_excess_of_atoms(*self._atoms(t.shape), t, rule)

    def _atoms(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Returns losses and log-probabilities, each as one array."""
        return self.stacked(self.losses, shape), self.stacked(self.log_masses, shape)

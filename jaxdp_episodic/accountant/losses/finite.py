"""Privacy losses with finitely many values, of mechanisms with finitely many outcomes.

References: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 8, for Poisson
sampling; docs/proofs.md, "Laplace noise".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    LARGEST_EXPONENT,
    ROUNDING,
    with_rounding,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    FiniteValues,
    Hints,
    MomentRule,
    Moments,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, logsumexp, namespace
from jaxdp_episodic.accountant.numerics.special import log_expm1, scaled_power_excess


@dataclass(frozen=True)
class FiniteLoss(FiniteValues, Moments):
    """Finitely many losses, and the logarithms of their probabilities under P."""

    losses: tuple[Array, ...]  # of either sign, finite
    log_masses: tuple[Array, ...]  # under P; Q's probabilities are e^-loss times these
    is_symmetric: ClassVar[bool] = False
    padding: ClassVar[dict[str, float]] = {"losses": 0.0, "log_masses": -np.inf}

    @property
    def loses_nothing(self) -> Array:
        """Whether 0 is the only loss."""
        return np.equal(self.largest_size, 0)

    @property
    def is_unprotected(self) -> Array:
        """Whether a loss exceeds the range of the kernels."""
        return np.greater(self.largest_size, self.LARGEST_LOSS)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: losses with about the same variance, or mean."""
        xp = namespace(*self.fields)
        variance, largest = 0.0, 0.0
        for loss, mass in zip(self.losses, self.log_masses, strict=True):
            variance = variance + xp.exp(mass) * loss * loss
            largest = xp.maximum(largest, xp.where(mass > -xp.inf, xp.abs(loss), 0.0))
        deviation = xp.sqrt(xp.maximum(variance, 1e-120))
        one = xp.ones_like(deviation)
        furthest = xp.minimum(largest, xp.sqrt(2 * largest))
        shift = xp.minimum(xp.minimum(deviation, xp.sqrt(2 * deviation)), furthest)
        return Hints(one, one, shift, furthest)

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: the largest loss, backward minus the smallest."""
        sign = -1.0 if backward else 1.0
        pairs = zip(self.losses, self.log_masses, strict=True)
        found = [np.where(np.isneginf(m), -np.inf, sign * y) for y, m in pairs]
        return np.max(np.stack(np.broadcast_arrays(*found)), axis=0)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`: ``E[(1 - e^{u - L})_+]``, and ``E[e^{u - L}; L > u]``."""
        xp = namespace(u, *self.fields)
        u = xp.broadcast_to(u, np.broadcast_shapes(np.shape(u), self.shape))
        loss, mass = self._atoms(u.shape)
        return tails_of_values(u, loss, mass), tails_of_values(u, -loss, mass - loss)

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


def log_excess_of_atoms(
    loss: Array, log_mass: Array, t: Array, rule: MomentRule
) -> tuple[Array, ...]:
    """Computes `Moments.log_excess` of (J, n) losses with P's log-probabilities."""
    xp = namespace(loss, log_mass, t)
    base = log_mass - loss  # log-probabilities under Q
    direction = rule.direction
    largest = xp.max(xp.where(log_mass > -xp.inf, xp.abs(loss), 0.0), axis=0)
    power = -t if direction == "backward" else 1 + t
    peak = xp.max(base + power * loss, axis=0) - LARGEST_EXPONENT
    peak = xp.maximum(peak, 0.0)
    parts = scaled_power_excess(loss, base - peak, t, direction)
    value, *slopes = (xp.sum(part, axis=0) for part in parts)
    # Q's log-probabilities have rounding errors as large as those of the losses. If
    # they are large use ``M - 1 <= E[e^(t L) - 1; L > 0]``, with probabilities of at
    # most 1.
    gain, mass = loss, log_mass
    if direction == "backward":
        gain, mass = -loss, xp.minimum(base + ROUNDING * largest, 0.0)
    above = gain > 0
    part = mass + log_expm1(t * xp.where(above, gain, 1.0))
    most = logsumexp(xp.where(above, part, -xp.inf))
    found = (xp.log(value) + peak,), (1 + t) * largest, (most,)
    (excess,) = with_rounding(*found)
    return excess, *(slope / value for slope in slopes * rule.with_derivatives)


def tails_of_values(u: Array, loss: Array, log_mass: Array) -> Tails:
    """Returns the tails at u of losses, first axis, with log-probabilities."""
    xp = namespace(u, loss, log_mass)
    above = loss > u
    gap = xp.where(above, u - loss, -1.0)
    return (
        logsumexp(xp.where(above, log_mass + xp.log(-xp.expm1(gap)), -xp.inf)),
        logsumexp(xp.where(above, log_mass + gap, -xp.inf)),
    )

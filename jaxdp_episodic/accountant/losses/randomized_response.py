"""Randomized response: the dominating pair of any (epsilon, delta)-DP mechanism.

With probability ``failure`` everything is lost; else the pair is a bit told truthfully
with odds ``e^epsilon`` against its opposite. Every (epsilon, failure)-DP mechanism is
dominated by it, in both directions, and it is (epsilon, failure)-DP itself.

Reference: Kairouz, Oh, Viswanath (2015), "The composition theorem for differential
privacy", arXiv:1311.0776, Theorem 3.3 (and its proof for the pair).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule, collected
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    PrivacyLoss,
    Tails,
)
from jaxdp_episodic.accountant.numerics.combinatorics import log_binomial
from jaxdp_episodic.accountant.numerics.loops import Array, map_first, namespace
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1

# Kernels compute with losses in this range; beyond it there is no protection.
_SMALLEST_LOSS, _LARGEST_LOSS = 1e-20, 1e70
# Largest number of true answers over which the closed form sums.
_MOST_STEPS = 1_000_000
# Rounding of a logarithm, relative to 1 and its size.
_ROUNDING = 1e-15
# Rounding of the loss itself, relative to its size.
_MOVE = 4e-16


@dataclass(frozen=True)
class RandomizedResponseLoss(PrivacyLoss):
    """``e^eps / (1 + e^eps)`` of the truth, given that not everything is lost.

    Attributes:
      outer_rate: see `PrivacyLoss`; always 1.
      epsilon: >= 0, what an answer loses; inf is no protection.
      failure: in [0, 1], probability that everything is lost at once. It enters
        `log_kept` alone: profiles, moments and nodes are those of the rest.
    """

    epsilon: Array
    failure: Array
    states_largest: ClassVar[bool] = True

    @property
    def loses_nothing(self) -> Array:
        """Where the answer is a fair coin, and nothing fails."""
        return np.equal(self.epsilon, 0) & np.equal(self.failure, 0)

    @property
    def is_unprotected(self) -> Array:
        """Where every answer is true."""
        return np.greater(self.epsilon, _LARGEST_LOSS) | np.zeros(self.shape, bool)

    def kept_in_range(self) -> Self:
        """Returns an epsilon that kernels can compute with."""
        epsilon = np.clip(self.epsilon, _SMALLEST_LOSS, _LARGEST_LOSS)
        return dataclasses.replace(super().kept_in_range(), epsilon=epsilon)

    def hints(self) -> Hints:
        """The Gaussian whose losses have about the same variance, or mean."""
        xp = namespace(*self.fields)
        move = xp.minimum(self.epsilon, xp.sqrt(2 * self.epsilon))
        one = xp.ones_like(move)
        return Hints(one, one, move, move)

    def largest_loss(self, *, backward: bool) -> Array:
        """Epsilon, in both directions."""
        del backward
        return self.epsilon + np.zeros(self.shape)

    def log_kept(self) -> Array:
        """See `PrivacyLoss`."""
        with np.errstate(divide="ignore"):
            return np.log1p(-self.failure) + np.zeros(self.shape)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """``(e^eps - g) / (1 + e^eps)`` and ``g / (1 + e^eps)`` where g < e^eps."""
        xp = namespace(u, *self.fields)
        u, epsilon = xp.broadcast_arrays(u, self.epsilon)
        inside = u < epsilon
        gap = xp.where(inside, u - epsilon, -1.0)
        log_truth = -xp.log1p(xp.exp(-epsilon))
        tails = (
            xp.where(inside, xp.log(-xp.expm1(gap)) + log_truth, -xp.inf),
            xp.where(inside, gap + log_truth, -xp.inf),
        )
        return tails, tails

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """See `PrivacyLoss`: the truth and the lie."""
        losses = np.array([self.epsilon, -self.epsilon], np.float64)
        return losses, np.minimum(losses, 0.0) - np.log1p(np.exp(-self.epsilon))

    @property
    def num_values(self) -> float:
        """Two: the truth and the lie."""
        return 2

    def tail_displacement(self, u: Array) -> Array:
        """The loss is as far off as it is rounded."""
        xp = namespace(u, *self.fields)
        return _MOVE * self.epsilon + xp.zeros_like(u)

    @property
    def composes_by(self) -> Array | None:
        """Epsilon."""
        return self.epsilon

    def composed(
        self, target: float, count: float, *, of_epsilon: bool
    ) -> tuple[float, float]:
        """See `PrivacyLoss`: a binomial sum.

        Of T answers j are true with probability ``p_j``, and lose ``L_j = (2j - T)
        epsilon``. With the tails ``A_j`` of p and ``S_j = E[(1 - e^{L_{j-1} - L})_+]``,
        delta at ``L_j - d``, ``0 < d <= 2 epsilon``, is ``S_{j+1} + (1 - e^{-d}) (A_j -
        S_{j+1})``, all terms positive.
        """
        if count > _MOST_STEPS:
            return np.nan, np.inf
        index = np.arange(int(count) + 1, dtype=np.float64)
        width = 2 * self.epsilon
        # p_j = C(T, j) e^{-(T-j) epsilon} / (1 + e^{-epsilon})^T
        log_mass = log_binomial(np.float64(count), index)
        log_mass = log_mass - (count - index) * self.epsilon
        log_mass = log_mass - count * np.log1p(np.exp(-self.epsilon))
        log_tail = np.logaddexp.accumulate(log_mass[::-1])[::-1]
        log_step = np.log(-np.expm1(-width))
        summed = np.logaddexp.accumulate((log_tail - index * width)[::-1])[::-1]
        log_knot = np.append(log_step + index * width + summed, -np.inf)
        place = (2 * index - count) * self.epsilon
        sizes = count + np.abs(log_mass).max() + count * width
        if of_epsilon:
            # The last breakpoint above the target: delta falls from S_j at L_{j-1}.
            j = int(np.searchsorted(-log_knot[:-1], -target, side="right")) - 1
            if j < 0:
                return 0.0, 0.0
            log_above, log_low = log_tail[j], log_knot[j + 1]
            share = np.exp(target - log_above) - np.exp(log_low - log_above)
            # Below 0 by rounding: the upper end of the interval.
            whole = max(-np.expm1(log_low - log_above), 0.0)
            share = share / whole if whole > 0 else 0.0
            share = min(max(share, 0.0), 1.0 - 1e-16)
            value = place[j] + np.log1p(-share)
        else:
            j = int(np.searchsorted(place, target, side="right"))
            if j > count:
                return -np.inf, 0.0
            log_above, log_low = log_tail[j], log_knot[j + 1]
            share = -np.expm1(target - place[j])
            whole = max(-np.expm1(log_low - log_above), 0.0)
            log_rest = np.log(share * whole) + log_above
            value = float(np.logaddexp(log_low, log_rest))
        # Of the sums, and of the places on which the loss is rounded.
        log_delta = target if of_epsilon else value
        slope = (1 - share) * whole * np.exp(log_above - log_delta)
        error = _ROUNDING * sizes
        misplaced = _ROUNDING * (abs(place[j]) + abs(target if not of_epsilon else 0))
        if of_epsilon:
            error = (error / slope if slope > 0 else np.inf) + misplaced
            return max(float(value), 0.0), float(error)
        return value, float(error + slope * misplaced)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """``(e^{t eps} - 1) (1 - e^{-(1+t) eps}) / (1 + e^{-eps})``; closed form."""
        xp = namespace(t, *self.fields)
        t, epsilon = xp.broadcast_arrays(t, self.epsilon)
        rise, fall = t * epsilon, (1 + t) * epsilon
        log_excess = (
            log_expm1(rise) + xp.log(-xp.expm1(-fall)) - xp.log1p(xp.exp(-epsilon))
        )
        if not rule.with_derivatives:
            return (log_excess,)
        share = xp.expm1(-rise) * xp.expm1(-fall)
        both = xp.exp(-rise - fall)
        first = epsilon * (1 - both) / share
        return log_excess, first, epsilon * epsilon * (1 + both) / share

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `PrivacyLoss`: two atoms, on the real line."""
        xp = namespace(*self.fields, rule.log_cut)
        epsilon = xp.broadcast_to(self.epsilon, rule.log_cut.shape)
        truth = 1 / (1 + xp.exp(-epsilon))
        loss = xp.stack([epsilon, -epsilon], axis=1)
        weight = xp.stack([truth, truth * xp.exp(-epsilon)], axis=1)
        return atoms(loss, weight)


def atoms(loss: Array, weight: Array) -> LossNodes:
    """The nodes of atoms alone, real (V, J, n) losses and weights; nothing is cut."""

    def one(loss: Array, weight: Array) -> LossNodes:
        xp = namespace(loss, weight)
        nothing = xp.zeros_like(loss[:2])
        return collected(
            (loss, xp.zeros_like(loss)),
            (weight, xp.zeros_like(weight)),
            nothing - xp.inf,
            nothing,
        )

    return map_first(one, loss, weight)

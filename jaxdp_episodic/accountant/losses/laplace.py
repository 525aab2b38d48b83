"""The Poisson sampled Laplace mechanism.

References: docs/proofs.md, "Laplace noise" and "Moments"; Balle, Barthe, Gaboardi
(2018), arXiv:1807.01647v2, Theorems 3 and 8; Mironov (2017), arXiv:1702.07476,
Proposition 6, for moments without sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    excess_of,
    log_excess_of_atoms,
    log_integral,
    sum_of,
    with_rounding,
)
from jaxdp_episodic.accountant.losses.gaussian import (
    sampled_displacement,
    sampled_tails,
    scaled,
)
from jaxdp_episodic.accountant.losses.loss_nodes import Rate, real_log_mixture
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Moments,
    NoisyLoss,
    Profile,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace

_LOG_2 = math.log(2.0)
_LOG_4 = math.log(4.0)
# Rounding error of u, relative to the largest loss: nine units in the last place.
_LOSS_ROUNDING = 2e-15
# Distance from an end of the losses at which the integrand of a moment is at most e^-40
# of that at the end: it decreases at least by half the distance.
_FURTHEST = 80.0
# Length of the panels far from the ends, up to a factor of about 1. P/Q, as a function
# of complex losses, has its zeros at a distance of pi.
_FAR_LENGTH = 6.0
# The same next to an end, where the exponent changes by alpha times the distance: nats.
_NEAR_NATS = 6.0


@dataclass(frozen=True)
class LaplaceLoss(NoisyLoss, Profile, Moments):
    """``(1-p) Lap(0) + p Lap(shift)`` against ``Lap(0)``."""

    rate: Array  # p in [0, 1]
    shift: Array  # s >= 0
    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True

    def hints(self) -> Hints:
        """See `PrivacyLoss`: losses with about the same variance, or mean."""
        xp = namespace(*self.fields)
        shift = xp.minimum(self.shift, xp.sqrt(2 * self.shift))
        return Hints(self.rate, self.rate, shift, shift)

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: ``log(1 - p + p e^s)``, backward minus that of -s."""
        sign = -1.0 if backward else 1.0
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            rate = np.maximum(self.rate, 1e-300)
            finite = np.minimum(self.shift, 1e300)
            loss = sign * real_log_mixture(sign * finite, Rate.of(rate))
            loss = np.where(np.equal(self.rate, 0), 0.0, loss)
        # Without noise the backward loss is still bounded if p < 1.
        bare = np.isinf(self.shift) & (self.rate > 0) & (not backward)
        return np.where(bare, np.inf, loss)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`: those of `sampled_tails`.

        Without sampling, the profile is ``1 - e^{(u-s)/2}`` and the tail ``e^{(u-s)/2}
        / 2`` for u < s.
        """
        xp = namespace(u, *self.fields)
        u, outer, p, s = xp.broadcast_arrays(u, *self.fields)

        def base(u: Array) -> Tails:
            inside = u < s
            half = xp.where(inside, 0.5 * (u - s), -1.0)
            return (
                xp.where(inside, xp.log(-xp.expm1(half)), -xp.inf),
                xp.where(inside, half - _LOG_2, -xp.inf),
            )

        both = sampled_tails(base, u, p)
        forward, backward = (scaled(tails, outer, p, s) for tails in both)
        return forward, backward

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`: u is inexact near the atom at the largest loss."""
        xp = namespace(u, *self.fields)
        share = self.rate - (1 - self.rate) * xp.expm1(-u)
        rounding = _LOSS_ROUNDING * xp.minimum(self.shift, self.LARGEST_LOSS) * share
        return rounding + 2 * sampled_displacement(u, self.rate)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`: atoms at both ends, and panels from either to the middle."""
        xp = namespace(t, *self.fields)
        t, _, p, s = xp.broadcast_arrays(t, *self.fields)
        rate, zero = Rate.of(p), xp.zeros_like(s)
        y = real_log_mixture(xp.stack([s, -s]), rate)
        log_masses = y - xp.stack([s, zero]) - _LOG_2
        found = log_excess_of_atoms(y, log_masses, t, rule)
        edges = _edges(1 + t, s, rule.quadrature.num_panels)
        for sign in (1.0, -1.0):

            def log_parts(depth: Array, sign: float = sign) -> tuple[Array, Array]:
                """Returns log P/Q and Q's log-density, at a distance from an end."""
                loss = sign * (s - depth)
                return real_log_mixture(loss, rate), -0.5 * (loss + s) - _LOG_4

            panels = edges[:-1], edges[1:]
            part = log_integral(log_parts, panels, zero[None], zero, t, rule)
            found = sum_of(found, part)
        if rule.direction == "forward":
            # As in `unless_gaussian`: moments are convex in P, and no loss exceeds s.
            most, *slopes = excess_of(t * s, s, 0.0, rule.with_derivatives)
            found = with_rounding(found, s * (1 + t), (rate.log + most, *slopes))
        return found


def _edges(alpha: Array, s: Array, num_panels: int) -> Array:
    """Panel edges (num_panels + 1, n): distances from s or -s, at most s."""
    # B log(1 + (c / B) (e^v - 1)) at equally spaced v: proportional to e^v - 1 next to
    # the end and to v far from it.
    xp, near = namespace(alpha, s), _NEAR_NATS / (_FAR_LENGTH * alpha)
    furthest = xp.expm1(xp.minimum(s, _FURTHEST) / _FAR_LENGTH)
    shares = np.arange(num_panels + 1.0)[:, None] / num_panels
    v = shares * xp.log1p(furthest / near)
    return xp.minimum(_FAR_LENGTH * xp.log1p(near * xp.expm1(v)), s)

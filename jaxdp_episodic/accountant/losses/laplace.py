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
    LARGEST_EXPONENT,
    excess_of,
    with_rounding,
)
from jaxdp_episodic.accountant.losses.gaussian import (
    sampled_displacement,
    sampled_tails,
    scaled,
)
from jaxdp_episodic.accountant.losses.loss_nodes import (
    Rate,
    real_log_mixture,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Moments,
    NoisyLoss,
    Profile,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    namespace,
)
from jaxdp_episodic.accountant.numerics.quadrature import integrate_panels
from jaxdp_episodic.accountant.numerics.special import scaled_power_excess

_LOG_2 = math.log(2.0)
_LOG_4 = math.log(4.0)
# Rounding error of u, relative to the largest loss: nine units in the last place.
_LOSS_ROUNDING = 2e-15
# Panels have equal lengths in this factor times the distance from the end of the
# losses, plus the change of the exponent, in nats. The integrand decreases at least by
# half the distance, and by the exponent.
_NATS_PER_UNIT = 2.0
# Backward, the integrand at the largest losses y has no exponent, and bends where y is
# 1 / alpha: this factor times the change of log(1 + alpha y) is added there.
_NATS_PER_BEND = 4.0
# Length of all panels in this measure: there the integrand is e^-35 of that at the end.
_LAST_EDGE = 210.0
# Bisections for an edge, which need not be accurate.
_EDGE_BISECTIONS = 14


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
        """See `Moments`: two atoms and an integral; exact up to quadrature error."""
        xp = namespace(t, *self.fields)
        t, _, p, s = xp.broadcast_arrays(t, *self.fields)
        rate = Rate.of(p)
        found = _excess(t, rate, s, rule)
        if rule.direction == "forward":
            # As in `unless_gaussian`: moments are convex in P, and no loss exceeds s.
            most, *slopes = excess_of(t * s, s, 0.0, rule.with_derivatives)
            found = with_rounding(found, s * (1 + t), (rate.log + most, *slopes))
        return found


def _excess(t: Array, p: Rate, s: Array, rule: MomentRule) -> tuple[Array, ...]:
    """Returns the excess from its atoms, and panels from either end to the middle."""
    xp = namespace(t, p.rate, s)
    direction, quadrature, with_derivatives = rule

    def log_parts(loss: Array) -> tuple[Array, Array]:
        """Returns log P/Q and Q's log-density at a loss without sampling."""
        return real_log_mixture(loss, p), -0.5 * (loss + s) - _LOG_4

    ends = xp.stack([-s, s])
    y = real_log_mixture(ends, p)
    b = xp.stack([xp.full_like(s, -_LOG_2), -s - _LOG_2])
    power = -t if direction == "backward" else 1 + t
    peak = xp.maximum(xp.max(b + power * y, axis=0) - LARGEST_EXPONENT, 0.0)

    def values(y: Array, b: Array) -> tuple[Array, ...]:
        found = scaled_power_excess(y, b - peak, t, direction)
        return found[: 3 if with_derivatives else 1]

    sums = [xp.sum(value, axis=0) for value in values(y, b)]
    bends = direction == "backward", False
    edges = [
        _edges(1 + t, p, sign * s, quadrature.num_panels, bent)
        for sign, bent in zip((1.0, -1.0), bends, strict=True)
    ]
    for sign, depth in zip((1.0, -1.0), edges, strict=True):

        def integrand(depth: Array, sign: float = sign) -> tuple[Array, ...]:
            return values(*log_parts(sign * (s - depth)))

        parts = integrate_panels(
            integrand, depth[:-1], depth[1:], nodes_per_panel=quadrature.nodes_per_panel
        )
        sums = [a + part for a, part in zip(sums, parts, strict=True)]
    total, *derivatives = sums
    return xp.log(total) + peak, *(d / total for d in derivatives)


def _edges(alpha: Array, p: Rate, end: Array, num_panels: int, bends: bool) -> Array:
    """Returns panel edges (num_panels + 1, n): distances from the end s or -s."""
    xp = namespace(alpha, p.rate, end)
    s, sign, last_y = xp.abs(end), xp.sign(end), real_log_mixture(end, p)

    def spent(d: Array) -> Array:
        y = real_log_mixture(sign * (s - d), p)
        nats = alpha * xp.abs(last_y - y)
        if bends:
            nats = _NATS_PER_BEND * (xp.log1p(alpha * last_y) - xp.log1p(alpha * y))
        return _NATS_PER_UNIT * d + nats

    most = xp.minimum(spent(s), _LAST_EDGE)
    shares = xp.arange(1, num_panels + 1, dtype=s.dtype)[:, None] / num_panels
    goal = most * shares
    # Bracket: distances for the steepest exponent, and for a constant one.
    steepest = _NATS_PER_UNIT + (_NATS_PER_BEND if bends else 1.0) * alpha
    start = (xp.log(goal / steepest), xp.log(goal / _NATS_PER_UNIT))

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = spent(xp.minimum(xp.exp(middle), s)) >= goal
        return xp.where(above, low, middle), xp.where(above, middle, high)

    low, _ = fori_loop(xp, 0, _EDGE_BISECTIONS, halve, start)
    edge = xp.minimum(xp.exp(low), s)
    # The last edge is the middle, if `_LAST_EDGE` reaches it.
    last = xp.where(spent(s) <= _LAST_EDGE, s, edge[-1])
    return xp.concatenate([0 * edge[:1], edge[:-1], last[None]])

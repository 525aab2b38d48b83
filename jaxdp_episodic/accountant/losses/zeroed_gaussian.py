"""The zeroed Gaussian: a contribution that is 0 if a null record is reached.

It holds under zero_out (docs/proofs.md, "The zero-out relation"). With unit variances,
the clip unit drawn with probability p and the protected unit reached inside a drawn
one with probability r, the two profiles are those of two *different* pairs,

    forward   H_g(P1 || Q1),  P1 = (1-p) N(0) + p (1-r) N(-s) + p r N(s)
                              Q1 = (1-p+pr) N(0) + p (1-r) N(-s)
    backward  H_g(Q2 || P2),  P2 = (1-p) N(0) + p N(s)
                              Q2 = (1-p+pr) N(0) + p (1-r) N(s):

forward the contributions without the protected unit pull the other way, backward the
same way. ``r = 1`` is the sampled pair; ``p = 1`` is what holds without replacement.
The forward profile is the larger one (docs/proofs.md, "Moments").

Both likelihood ratios are 1 at ``x = s/2`` and grow. One joint distribution has both
profiles:
its losses above 0 are those of (P1, Q1) at ``x > s/2``, its losses below 0 those of
(P2, Q2) at ``x < s/2``, and what is missing to mass 1 is an atom at loss 0. In the
second half ``x = s - w``, so that both are half-lines that begin at s/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    log_integral,
    sum_of,
    unless_gaussian,
)
from jaxdp_episodic.accountant.losses.gaussian import (
    LARGEST,
    GaussianLoss,
    gaussian_tails,
    inner_exponent,
    positive,
    scaled,
)
from jaxdp_episodic.accountant.losses.integration_paths import Pair, half_line_points
from jaxdp_episodic.accountant.losses.loss_nodes import (
    FURTHEST_LEFT,
    LossNodes,
    NodeRule,
    collected,
    log_normal,
)
from jaxdp_episodic.accountant.losses.privacy_loss import Hints, MomentRule, Tails
from jaxdp_episodic.accountant.losses.protocols import Nodes
from jaxdp_episodic.accountant.losses.sampled import CANCELLATION, weight_left
from jaxdp_episodic.accountant.losses.zeroed_densities import (
    LOG_ZERO,
    ZeroedLogs,
    log_rest,
    lower_windows,
    path_kinks,
    upper_windows,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import polar, times
from jaxdp_episodic.accountant.numerics.loops import Array, map_first, namespace
from jaxdp_episodic.accountant.numerics.special import (
    log_mills,
    log_mills_difference,
    log_normal_density,
    log_normal_tail,
    log_saturating_tail,
)

# Logarithm of kappa in `_log_ratio_terms` below which it is 0: e^-745 underflows.
_LEAST_LOG_KAPPA = -700.0


@dataclass(frozen=True)
class ZeroedGaussianLoss(GaussianLoss, Nodes):
    """A clip unit's contribution, drawn at random, that is 0 where a null is reached.

    Attributes:
      outer_rate: see `PrivacyLoss`.
      rate: p in [0, 1], at the clip level under Poisson sampling; else 1.
      inner_rate: r in [0, 1], that the protected unit is reached, given the former.
      shift: s >= 0, the clip norm over the noise.
    """

    rate: Array
    inner_rate: Array
    shift: Array
    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True

    def hints(self) -> Hints:
        """P/Q grows like ``p r / (1 - p + p r) e^{sx}`` in the end."""
        xp = namespace(*self.fields)
        rate = self.rate * self.inner_rate
        odds = rate / xp.maximum(1 - self.rate, self.rate)
        return Hints(rate, odds, self.shift, self.shift)

    def largest_loss(self, *, backward: bool) -> Array:
        """Q2 over P2 is at most ``(1-p+pr) / (1-p)``."""
        p, r = np.broadcast_arrays(self.rate, self.inner_rate)
        bounded = (p < 1) if backward else np.zeros(p.shape, bool)
        rest = np.where(bounded, 1 - p, 1.0)
        return np.where(bounded, np.log1p(p * r / rest), np.inf)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `_forward` and `_backward`.

        Where the backward losses end, k cancels; it errs upwards, see
        `tail_displacement`.
        """
        xp = namespace(u, *self.fields)
        u, outer, p, r, s = xp.broadcast_arrays(u, *self.fields)
        rate, inner = positive(p, 1.0), positive(r, 1.0)
        forward = _forward(u, rate, inner, positive(s, LARGEST))
        backward = _backward(u, rate, inner, s)
        return scaled(forward, outer, p, r, s), scaled(backward, outer, p, r, s)

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`; as of the sampled pair."""
        xp = namespace(u, *self.fields)
        rate = self.rate * self.inner_rate
        largest = rate / xp.maximum(1 - self.rate + rate, 1e-300)
        displaced = CANCELLATION * xp.minimum(-xp.expm1(-u), largest)
        return xp.where(self.rate < 1, displaced, 0.0)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact up to quadrature error: two half-lines."""
        xp = namespace(t, *self.fields)
        t, p, r, s = xp.broadcast_arrays(t, self.rate, self.inner_rate, self.shift)
        logs = ZeroedLogs.of(p, r, s)
        upper, lower = (
            log_integral(
                log_parts, *windows(t, logs, s, rule.direction), 0.5 * s, t, rule
            )
            for log_parts, windows in (
                (logs.upper, upper_windows),
                (logs.lower, lower_windows),
            )
        )
        excess = sum_of(upper, lower)
        whole = (p >= 1) & (r >= 1)
        rounds = xp.where(p < 1, 0.0, 1.0) if rule.direction == "backward" else 1.0
        weight, scale = logs.reached, 0.5 * s * s
        return unless_gaussian(whole, weight, scale, t, excess, rounds=rounds)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`; two half-lines."""
        backward, log_cut, height, num_nodes, _ = rule
        xp = namespace(*self.fields, backward, log_cut, height)
        s = self.shift
        logs = ZeroedLogs.of(self.rate, self.inner_rate, s)
        upper_kinks, lower_kinks, lower_rise = path_kinks(logs, s)
        floor = 0.5 * s
        reach = xp.sqrt(-2 * log_cut)
        seen = xp.sqrt(2 * xp.maximum(logs.reached - log_cut, 1.0))
        high = xp.maximum(xp.maximum(reach, s + seen), floor + 2.0)
        # Beyond it Q2 has a mass of 1e-19: losses below are negligible.
        most = floor - FURTHEST_LEFT
        ends = (
            xp.where(backward > 0, xp.minimum(high, most), high),
            xp.where(backward > 0, s + reach, xp.minimum(s + reach, s - FURTHEST_LEFT)),
        )

        def points(end: Array, kinks: tuple[Array, ...], rise: Array) -> tuple:
            return half_line_points(floor, end, kinks, rise, s, height, num_nodes)

        above, above_element = points(ends[0], upper_kinks, xp.maximum(*upper_kinks))
        below, below_element = points(ends[1], lower_kinks, lower_rise)
        # x = s - w on the mirror image of the path, which is run through backwards.
        below = (s - below[0], below[1])
        below_element = (below_element[0], -below_element[1])
        upper = (above, above_element, *map_first(logs.upper_complex, above))
        lower = (below, below_element, *map_first(logs.lower_complex, below))
        sign, forward = 1 - 2 * backward, 1 - backward

        def weighted(x: Pair, element: Pair, y: Pair, base: Pair) -> Pair:
            normal = log_normal(x)
            density = polar(
                normal[0] + base[0] + forward * y[0],
                sign * (normal[1] + base[1]) + forward * y[1],
            )
            return times(density, (element[0], sign * element[1]))

        def finish(upper: tuple[Pair, ...], lower: tuple[Pair, ...]) -> LossNodes:
            halves = zip(weighted(*upper), weighted(*lower), strict=True)
            re, im = (xp.concatenate(pair) for pair in halves)
            (above, _, above_y, _), (below, _, below_y, _) = upper, lower
            loss = (
                sign * xp.concatenate([above_y[0], below_y[0]]),
                xp.concatenate([above_y[1], below_y[1]]),
            )
            ends = logs.upper(above[0][-1]), logs.lower(s - below[0][-1])
            y, base = (xp.stack(pair) for pair in zip(*ends, strict=True))
            return collected(loss, (re, im), base + forward * y, sign * y)

        return map_first(finish, upper, lower)

    def gaussian_shift(self) -> Array:
        """The shift, where the unit is always reached."""
        xp = namespace(*self.fields)
        always = (self.rate >= 1) & (self.inner_rate >= 1)
        return xp.where(always, self.shift, 0.0)


# --- Profiles ---


def _forward(u: Array, p: Array, r: Array, s: Array) -> Tails:
    """Profile and tail of P1 against Q1, for positive p, r and s.

    P1 > g Q1 beyond ``t = s/2 + (A1 + A2)/s``, where

        A1 = log(1 + (g-1) (1-p+pr) / (pr)),  A2 = log((1 + sqrt(1 + kappa)) / 2),
        kappa = 4 (g-1) (1-r)/r e^{-s² - 2 A1},

    and with the Mills ratio m and ``X = p r phi(t-s)``, the density of N(s) there,

        h = X [(m(t-s) - m(t)) + (1 - e^{-A2}) (m(t) - m(t+s))],
        G = m(t) [X e^{-A2} + (1-p) phi(t)] + m(t+s) [X (1 - e^{-A2}) + p(1-r) phi(t+s)]

    (the densities of P1 and of g Q1 are the same at t): every term is positive.
    """
    xp = namespace(u, p, r, s)
    a1, a2, log_share = _log_ratio_terms(u, p, r, s)
    x = xp.minimum((a1 + a2) / s - 0.5 * s, LARGEST)  # t - s
    t = xp.maximum(x + s, 0.5 * s)
    log_p, log_r = xp.log(p), xp.log(r)
    reached = log_p + log_r
    density = log_normal_density(x)
    moved = density + log_share + log_mills_difference(t, s)
    profile = reached + xp.logaddexp(log_saturating_tail(x, s), moved)
    absent = log_rest(p)
    near = log_mills(t) + reached + density - a2
    far = log_mills(t + s) + reached + density + log_share
    tail = xp.logaddexp(near, far)
    tail = xp.logaddexp(tail, absent + log_normal_tail(t))
    kept = log_p + log_rest(r) + log_normal_tail(t + s)
    return profile, xp.logaddexp(tail, kept)


def _log_ratio_terms(
    u: Array, p: Array, r: Array, s: Array
) -> tuple[Array, Array, Array]:
    """A1, A2 and ``log(1 - e^{-A2})``, for p and r in (0, 1]."""
    xp = namespace(u, p, r, s)
    a1 = inner_exponent(u, p * r / ((1 - p) + p * r))
    a1 = xp.minimum(a1, LARGEST)
    some = (u > 0) & (r < 1)
    log_g1 = xp.where(some, u, 1.0)
    log_g1 = xp.minimum(log_g1 + xp.log(-xp.expm1(-log_g1)), LARGEST)
    log_odds = xp.log1p(-xp.where(some, r, 0.5)) - xp.log(r)
    log_kappa = math.log(4.0) + log_g1 + log_odds - s * s - 2 * a1
    some = some & (log_kappa > _LEAST_LOG_KAPPA)
    kappa = xp.exp(xp.where(some, log_kappa, 0.0))
    rise = kappa / (2 * (1 + xp.sqrt(1 + kappa)))  # e^{A2} - 1
    rise = xp.where(some, rise, 1.0)
    a2 = xp.log1p(rise)
    share = xp.where(some, xp.log(rise) - a2, LOG_ZERO)
    return a1, xp.where(some, a2, 0.0), share


def _backward(u: Array, p: Array, r: Array, s: Array) -> Tails:
    """Profile and tail of Q2 against P2, for positive p and r.

    With ``k = pr - (g-1)(1-p)``, and D and G of the Gaussian at ``1 + (g-1)/k``,

        h = k D,   -dh/du = g (1-p) (D + G) + k g / (g-1+r) G.
    """
    xp = namespace(u, p, r, s)
    k = weight_left(u, p * r, 1 - p)
    alive = k > 0
    k = xp.where(alive, k, 1.0)
    # 1 + (g-1)/k = p (g - 1 + r) / k
    small = u <= 1
    near = xp.log1p(xp.expm1(xp.where(small, u, 1.0)) / k)
    large = xp.where(small, 1.0, u)
    far = large + xp.log1p(-(1 - r) * xp.exp(-large)) + xp.log(p) - xp.log(k)
    inner = xp.where(alive, xp.where(small, near, far), 1.0)
    profile, tail = gaussian_tails(s, inner)
    absent = xp.minimum(u, 700.0) + log_rest(p) + xp.logaddexp(profile, tail)
    # g / (g - 1 + r), without the cancellation
    slope = -xp.log(r + (1 - r) * -xp.expm1(-u))
    whole = xp.logaddexp(xp.where(p < 1, absent, -xp.inf), xp.log(k) + slope + tail)
    return (
        xp.where(alive, xp.log(k) + profile, -xp.inf),
        xp.where(alive, whole, -xp.inf),
    )

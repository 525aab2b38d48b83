"""The antipodal Gaussian: a drawn contribution whose sign may flip.

``Q = (1-p) N(0) + p N(-s)`` and ``P = (1-p) N(0) + p (1-r) N(-s) + p r N(s)``, unit
variances: a clip unit drawn with probability p whose contribution flips when the
protected unit inside it is reached (probability r). Both directions are ``H_g(P ||
Q)``. It holds for Poisson sampling at the clip level where the privacy unit lies below
it, and under replace_one (r = 1).

Reference: docs/proofs.md; Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2,
Theorem 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxdp_episodic.accountant.losses.excess import log_integral, unless_gaussian
from jaxdp_episodic.accountant.losses.gaussian import (
    LARGEST,
    GaussianLoss,
    drawn_tails,
    inner_exponent,
    positive,
    scaled,
)
from jaxdp_episodic.accountant.losses.integration_paths import Pair, half_line_points
from jaxdp_episodic.accountant.losses.loss_nodes import (
    LOG_SQRT_2PI,
    LossNodes,
    NodeRule,
    Rate,
    log_normal,
    mirrored,
    sampled_ends,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MixturePair,
    MomentRule,
    Tails,
)
from jaxdp_episodic.accountant.losses.protocols import Nodes
from jaxdp_episodic.accountant.losses.sampled import LARGEST_EXPONENT
from jaxdp_episodic.accountant.losses.windows import (
    Windows,
    rising_kink,
    settle,
    three_bumps,
    transitions,
    windows_around,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    expm1_complex,
    log_add_complex,
    log_complex,
)
from jaxdp_episodic.accountant.numerics.loops import Array, map_first, namespace
from jaxdp_episodic.accountant.numerics.special import (
    log_add,
    log_mills,
    log_mills_difference,
    log_normal_density,
    log_normal_tail,
    log_saturating_tail,
)


@dataclass(frozen=True)
class AntipodalGaussianLoss(GaussianLoss, Nodes):
    """``(1-p) N(0) + p (1-r) N(-s) + p r N(s)`` against ``(1-p) N(0) + p N(-s)``.

    Attributes:
      outer_rate: see `PrivacyLoss`.
      rate: p in [0, 1], at the clip level.
      inner_rate: r in [0, 1], below the clip level.
      shift: s >= 0, the clip norm over the noise.
    """

    rate: Array
    inner_rate: Array
    shift: Array
    is_symmetric: ClassVar[bool] = True

    def hints(self) -> Hints:
        """P/Q grows like ``r p / (1-p) e^{sx}``."""
        xp = namespace(*self.fields)
        rate = self.rate * self.inner_rate
        odds = rate / xp.maximum(1 - self.rate, 1e-20)
        return Hints(rate, odds, self.shift, self.shift)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """``H_g(P || Q) = r h1(1 + (g-1)/r)``, h1 the case r = 1; two equal pairs.

        There P > g Q beyond t, ``e^{s t} = sqrt(g) e^theta``, ``sinh theta =
        (1-p)/p e^{s²/2} sinh(log(g)/2)``, and with m the Mills ratio

            h1 = p phi(t-s) [(m(t-s) - m(t)) + e^{-2 theta} (m(t) - m(t+s))],
            g Q(x > t) = p phi(t-s) [(1 - e^{-2 theta}) m(t) + e^{-2 theta} m(t+s)]
                         + (1-p) phi(t) m(t):

        every term is positive, so nothing cancels.
        """
        xp = namespace(u, *self.fields)
        u, outer, p, r, s = xp.broadcast_arrays(u, *self.fields)
        inner, rate = positive(r, 1.0), positive(p, 1.0)
        width = positive(s, LARGEST)
        v = xp.minimum(inner_exponent(u, inner), LARGEST)
        theta = _turning_angle(v, rate, width)
        t = xp.minimum((0.5 * v + theta) / width, LARGEST)
        turned = log_saturating_tail(t - width, width)
        density = log_normal_density(t - width)
        kept = density - 2 * theta + log_mills_difference(t, width)
        profile = xp.log(rate) + xp.logaddexp(turned, kept)
        middle = xp.log(-xp.expm1(-2 * theta)) + log_mills(t)
        beyond = xp.logaddexp(middle, log_mills(t + width) - 2 * theta)
        tail = xp.log(rate) + density + beyond
        tail = xp.logaddexp(tail, xp.log1p(-rate) + log_normal_tail(t))
        tails = scaled(drawn_tails((profile, tail), u, inner), outer, p, r, s)
        return tails, tails

    def mixture(self) -> MixturePair:
        """See `PrivacyLoss`: not drawn; drawn and not reached; reached."""
        p, r, s = float(self.rate), float(self.inner_rate), float(self.shift)
        chances = 1 - p, p * (1 - r), p * r
        return MixturePair(chances, (0.0, -s, s), (0.0, -s, -s), threshold=0.0)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact up to quadrature error."""
        xp = namespace(t, *self.fields)
        t, p, r, s = xp.broadcast_arrays(t, self.rate, self.inner_rate, self.shift)
        log_p, log_q, log_r = xp.log(p), xp.log1p(-p), xp.log(r)
        windows = _windows(t, log_p, log_q, log_r, s)

        def log_parts(x: Array) -> tuple[Array, Array]:
            """Log-ratio of P to Q and log-density of Q at x > 0."""
            # log of Q's density over that of N(0, 1)
            log_base = log_add(log_q, log_p - s * (x + 0.5 * s))
            # P/Q - 1 = r p (e^{sx} - e^{-sx}) e^{-s²/2} / base
            gained = log_p + log_r + s * (x - 0.5 * s) + xp.log(-xp.expm1(-2 * s * x))
            return log_add(
                0.0, gained - log_base
            ), log_base - 0.5 * x * x - LOG_SQRT_2PI

        symmetric, floor = rule._replace(direction="symmetric"), xp.zeros_like(s)
        excess = log_integral(log_parts, *windows, floor, t, symmetric)
        whole = (p >= 1) & (r >= 1)
        weight, scale = _mixed(t, log_p, log_q, log_r, s)
        rounds = 2 * s * s / scale
        return unless_gaussian(whole, weight, scale, t, excess, rounds=rounds)

    def gaussian_shift(self) -> Array:
        """Twice the shift, where the unit always is on either side."""
        xp = namespace(*self.fields)
        always = (self.rate >= 1) & (self.inner_rate >= 1)
        return xp.where(always, 2 * self.shift, 0.0)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`."""
        _, log_cut, height, num_nodes, _ = rule
        xp = namespace(*self.fields, log_cut, height)
        s, r = self.shift, self.inner_rate
        p, log_r = Rate.of(self.rate), xp.log(r)
        kinks = _kinks(p.log, xp.log1p(-self.rate), log_r, s)
        kinks = tuple(xp.clip(t, 0.0, 1e9) for t in kinks)
        floor = xp.zeros_like(s)
        _, high, _ = sampled_ends(p, s, log_cut)

        rise = xp.maximum(*kinks)
        x, element = half_line_points(floor, high, kinks, rise, s, height, num_nodes)

        def ratio(x: Pair) -> tuple[Pair, Pair]:
            base = log_add_complex(
                p.log_rest, (p.log - s * (x[0] + 0.5 * s), -s * x[1])
            )
            shrunk = expm1_complex(-2 * s * x[0], -2 * s * x[1])
            rise = log_complex(-shrunk[0], -shrunk[1])
            excess = (
                p.log + log_r + s * (x[0] - 0.5 * s) + rise[0] - base[0],
                s * x[1] + rise[1] - base[1],
            )
            return log_add_complex(xp.zeros_like(s), excess), base

        y, base = map_first(ratio, x)

        def finish(x: Pair, element: Pair, y: Pair, base: Pair) -> LossNodes:
            normal = log_normal(x)
            density = (base[0] + normal[0], base[1] + normal[1])
            end = x[0][-1]
            (end_loss, _), _ = ratio((end, xp.zeros_like(end)))
            return mirrored(y, density, element, -0.5 * end * end, end_loss)

        return map_first(finish, x, element, y, base)


def _turning_angle(v: Array, p: Array, s: Array) -> Array:
    """``asinh((1-p)/p e^{s²/2} sinh(v/2))`` without overflow."""
    xp = namespace(v, p, s)
    exponent = 0.5 * v + 0.5 * s * s - xp.log(p)
    moderate = exponent <= LARGEST_EXPONENT
    half_v, half_square = (xp.where(moderate, 0.5 * a, 0.0) for a in (v, s * s))
    a = (1 - p) / xp.where(moderate, p, 1.0) * xp.exp(half_square) * xp.sinh(half_v)
    # The same quantity in logarithms; 0 at p = 1 and at v = 0.
    huge = ~moderate & (p < 1) & (v > 0)
    log_a = xp.where(huge, exponent, 0.0) - math.log(2.0)
    log_a += xp.log1p(-xp.where(huge, p, 0.5))
    log_a += xp.log(-xp.expm1(-xp.where(huge, v, 1.0)))
    beyond = log_a > LARGEST_EXPONENT
    power = xp.exp(xp.where(huge & ~beyond, log_a, 0.0))
    a = xp.where(moderate, a, xp.where(huge, power, 0.0))
    angle = xp.log1p(a + a * a / (1 + xp.sqrt(1 + a * a)))
    return xp.where(huge & beyond, log_a + math.log(2.0), angle)


def _kinks(log_p: Array, log_q: Array, log_r: Array, s: Array) -> tuple[Array, Array]:
    """Where Q's density changes its bump, and where P/Q starts to rise."""
    xp = namespace(log_p, log_q, log_r, s)
    # Q's density leaves N(-s) for N(0) where p e^{-sx-s²/2} = 1 - p.
    base_kink = xp.clip((log_p - log_q) / s - 0.5 * s, -1e300, 1e300)
    kink = rising_kink(log_q, log_p + log_r, log_p, s)
    return base_kink, kink


def _mixed(
    t: Array, log_p: Array, log_q: Array, log_r: Array, s: Array
) -> tuple[Array, Array]:
    """Log-weight and scale of a Gaussian of a larger excess; see `unless_gaussian`.

    Reached or not is a mixture of pairs that are 2s apart. Where the unit mostly is not
    drawn that is four times as much as a loss is: Q's density is at least ``(1-p)
    phi(x)``, and ``Q f(v)`` falls as Q grows, so with ``rho = r p / (1-p)`` and R the
    ratio of N(s) to N(0) it is at most ``(1-p) f(rho R)``; and ``f(rho v) <= f(v) rho``
    for rho below 1, ``rho^max(2, alpha)`` above.
    """
    xp = namespace(t, log_p, log_q, log_r, s)
    log_rate, half = log_p + log_r, 0.5 * s * s
    log_rho = log_rate - xp.maximum(log_q, -1e300)
    added = xp.maximum(log_rho, 0.0) * xp.maximum(t, 1.0)
    # (e^4x - 1) / (e^x - 1) is at least this.
    less = added <= xp.maximum(math.log(4.0), 3 * half * t * (1 + t))
    weight = log_rate + xp.where(less, added, 0.0)
    return weight, xp.where(less, half, 4 * half)


def _windows(
    t: Array, log_p: Array, log_q: Array, log_r: Array, s: Array
) -> tuple[Windows, Array]:
    """Where the integrand of the antipodal pair has weight; x > 0."""
    xp = namespace(t, log_p, log_q, log_r, s)
    alpha = 1 + t
    zero = xp.zeros_like(s)
    base_kink, kink = _kinks(log_p, log_q, log_r, s)
    knee = xp.maximum(kink - xp.log(alpha) / s, 0.0)
    kept = xp.log1p(-xp.exp(log_r)) + log_p
    slope = three_bumps(log_q, kept, log_r + log_p, base_kink, t, s)
    top_slope = (2 * alpha - 1) * s
    middle = xp.clip(base_kink, 2 * s, 3 * s), xp.clip(knee, s, 3 * s)
    centers = [zero, *middle, top_slope]
    starts = xp.stack([top_slope, alpha * s, zero])
    return windows_around(
        centers,
        transitions(knee, kink, s),
        transitions(base_kink, base_kink, s),
        between=lambda: settle(slope, starts, zero, top_slope),
    )

"""The base of mechanisms with Gaussian noise, and Poisson sampling of a pair."""

# References: Balle and Wang (2018), arXiv:1805.06530, Theorem 8, for the profile of the
# Gaussian mechanism; Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 8, and
# Zhu, Dong, Wang (2022), arXiv:2106.08567, Theorem 11, for Poisson sampling.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    Moments,
    NoisyLoss,
    Profile,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, at, namespace
from jaxdp_episodic.accountant.numerics.special import (
    log_normal_density,
    saturating_tail,
)

# Range of shifts, rates and thresholds for which neither they nor their derivatives
# overflow. Clipping to this range never lowers a profile.
SMALLEST = 1e-60
LARGEST = 1e100
# Nats u from which 1 + (e^u - 1) / rate is e^u / rate in float64.
_LARGEST_GAIN = 300.0


class GaussianLoss(NoisyLoss, Profile, Moments):
    """Base of the mechanisms with Gaussian noise."""

    may_have_atoms: ClassVar[bool] = False

    def hints(self) -> Hints:
        """See `PrivacyLoss`: the product of the rates, and the shift."""
        rate = self.rate_within
        return Hints(rate, rate, self.shift, self.shift)


def gaussian_tails(shift: Array, u: Array) -> Tails:
    """Returns the `Tails` of ``N(shift, 1)`` against ``N(0, 1)``, alike both ways."""
    # With t = u / mu - mu / 2 and the Mills ratio m the profile is phi(t) (m(t) - m(t +
    # mu)), and the tail phi(t) m(t + mu). This form keeps its digits if mu is small.
    t, mu = _threshold(shift, u)
    profile, mills = saturating_tail(t, mu)
    tail = log_normal_density(t) + namespace(mills).log(mills)
    return where_positive(profile, shift), where_positive(tail, shift)


def log_gaussian_profile(shift: Array, u: Array) -> Array:
    """Returns the logarithm of the profile alone; see `gaussian_tails`."""
    return gaussian_tails(shift, u)[0]


def near_gaussian_profile(shift: Array, u: Array) -> Array:
    """Approximates `log_gaussian_profile` for searches, to .12 nats if delta < .3."""
    # By m(x) = pi / ((pi - 1) x + sqrt(x² + 2 pi)): Boyd (1959), to 1 % for x >= 0.
    # Left of t = -1/2 the profile is near 1.
    t, mu = _threshold(shift, u)
    xp = namespace(t)
    x = xp.maximum(t, -0.5)
    ends = xp.stack([x, x + mu])
    roots = xp.sqrt(ends * ends + 2 * math.pi)
    slope = (math.pi - 1) + ends.sum(axis=0) / roots.sum(axis=0)
    below = ((math.pi - 1) * ends + roots).prod(axis=0)
    found = log_normal_density(x) + xp.log(math.pi * mu * slope / below)
    return xp.where(t < x, xp.maximum(found, -0.5 * xp.exp(-0.5 * t * t)), found)


def _threshold(shift: Array, u: Array) -> tuple[Array, Array]:
    """Returns t = u / mu - mu / 2, where the loss is u, and the shift mu in range."""
    xp = namespace(shift, u)
    mu = positive(shift, LARGEST)
    return xp.minimum(xp.minimum(u, LARGEST) / mu - 0.5 * mu, LARGEST), mu


def drawn_tails(tails: Tails, u: Array, rate: Array) -> Tails:
    """Returns tails of ``(1-p) Q + p P`` against Q from P's at `inner_exponent`."""
    # Balle, Barthe, Gaboardi (2018), Theorem 2 ("advanced joint convexity").
    xp = namespace(u, rate)
    # log of g over e^inner_exponent, without cancellation.
    slope = -xp.log1p((1 - rate) / rate * -xp.expm1(-u))
    return xp.log(rate) + tails[0], tails[1] + slope


def inner_exponent(u: Array, rate: Array) -> Array:
    """Returns ``log(1 + (e^u - 1) / rate)`` for a rate in (0, 1] and any u >= 0."""
    # Further up it grows as u.
    xp = namespace(u, rate)
    low = xp.minimum(u, _LARGEST_GAIN)
    return xp.log1p(xp.expm1(low) / rate) + (u - low)


def positive(value: Array, largest: float) -> Array:
    """Clips positive values to [1e-60, largest]; others become min(largest, 1)."""
    xp = namespace(value)
    clipped = xp.minimum(xp.maximum(value, SMALLEST), largest)
    return xp.where(value > 0, clipped, min(largest, 1.0))


def where_positive(log_h: Array, *factors: Array) -> Array:
    """Returns ``log_h`` where all factors are positive, else ``-inf``."""
    xp = namespace(log_h)
    for factor in factors:
        log_h = xp.where(factor > 0, log_h, -xp.inf)
    return log_h


def scaled(tails: Tails, outer_rate: Array, *factors: Array) -> Tails:
    """Returns tails times the outer rate; ``-inf`` where that or a factor is 0."""
    xp = namespace(tails[0], outer_rate)
    log_outer = xp.log(xp.where(outer_rate > 0, outer_rate, 1.0))
    profile, tail = (
        where_positive(log_outer + tail, outer_rate, *factors) for tail in tails
    )
    return profile, tail


# --- Poisson sampling: tails of ``(1 - p) Q + p P`` against Q ---

# Largest argument of exp, in nats: its third power, which derivatives need, is finite.
LARGEST_EXPONENT = 100.0
# Relative rounding error of ``rest * expm1(u)``, in units of the float64 epsilon. XLA's
# expm1 alone has an error of two units.
_DIFFERENCE_ERROR = 4.0
# Error of u, in nats, over ``min(1 - 1/g, rate)``, for backward tails. Near the largest
# loss ``1 - g (1 - p)`` cancels, so the computed profile is that of a slightly
# different u. Nine units of the float64 epsilon.
CANCELLATION = 2e-15


def sampled_tails(
    base: Callable[[Array], Tails], u: Array, rate: Array
) -> tuple[Tails, Tails]:
    """Returns the tails of ``(1-p) Q + p P`` against Q, forward and backward.

    ``base`` computes the tails of P against Q, of which D is the profile. Forward the
    profile is ``p D(1 + (g-1)/p)``; backward it is ``k D(g p / k)`` with ``k = 1 - g
    (1-p)``, and 0 if k is negative.
    """
    # Near the largest backward loss k cancels. `weight_left` rounds it up, so the
    # profile is that of a slightly smaller u, which is an upper bound.
    xp = namespace(u, rate)
    p = positive(rate, 1.0)
    drawn = inner_exponent(u, p)
    k = weight_left(u, p, 1 - p)
    alive = k > 0
    k = xp.where(alive, k, 1.0)
    # log(g p / k) = log(1 + (g - 1) / k)
    small = u <= 1
    near = xp.log1p(xp.expm1(xp.where(small, u, 1.0)) / k)
    inner = xp.where(small, near, u + xp.log(p) - xp.log(k))
    inner = xp.where(alive, inner, 1.0)
    both = base(xp.stack([drawn, inner]))
    tails, (profile, tail) = at(both, 0), at(both, 1)
    forward = drawn_tails(tails, u, p)
    # The tail -dh/du is g (1-p) D + G, G the tail of P against Q, without cancellation.
    log_rest = xp.log1p(-xp.where(p < 1, p, 0.0))
    lost = xp.where(p < 1, xp.minimum(u, 700.0) + log_rest + profile, -xp.inf)
    backward = (
        xp.where(alive, xp.log(k) + profile, -xp.inf),
        xp.where(alive, xp.logaddexp(lost, tail), -xp.inf),
    )
    return forward, backward


def weight_left(u: Array, rate: Array, rest: Array) -> Array:
    """Returns ``rate - (e^u - 1) rest``, rounded up where it cancels."""
    xp = namespace(u, rate, rest)
    lost = rest * xp.expm1(xp.minimum(u, LARGEST_EXPONENT))
    return rate - lost * (1 - _DIFFERENCE_ERROR * xp.finfo(u.dtype).eps)


def sampled_displacement(u: Array, rate: Array) -> Array:
    """Bounds the error of u, in nats, in the backward tails of `sampled_tails`."""
    xp = namespace(u, rate)
    displaced = CANCELLATION * xp.minimum(-xp.expm1(-u), rate)
    return xp.where(rate < 1, displaced, 0.0)

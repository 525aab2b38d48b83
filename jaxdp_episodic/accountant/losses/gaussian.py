"""The base of mechanisms with Gaussian noise, and the tails that they share."""

# Reference: Balle and Wang (2018), arXiv:1805.06530, Theorem 8, for the profile.

from __future__ import annotations

from typing import ClassVar

from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    Moments,
    NoisyLoss,
    Profile,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace
from jaxdp_episodic.accountant.numerics.special import (
    log_mills,
    log_normal_density,
    log_saturating_tail,
)

# Range of shifts, rates and thresholds in which neither they nor their derivatives
# overflow. Clipping to it never lowers a profile.
SMALLEST = 1e-60
LARGEST = 1e100


class GaussianLoss(NoisyLoss, Profile, Moments):
    """Base of the mechanisms with Gaussian noise."""

    may_have_atoms: ClassVar[bool] = False

    def hints(self) -> Hints:
        """The rates' product and the shift."""
        rate = self._inner_rate
        return Hints(rate, rate, self._shift, self._shift)


def gaussian_tails(shift: Array, u: Array) -> Tails:
    """Both directions' profile and tail of ``N(shift, 1)`` against ``N(0, 1)``."""
    # With t = u / mu - mu / 2 and the Mills ratio m the profile is phi(t) (m(t) - m(t +
    # mu)), which keeps its digits at small shifts.
    t, mu = _threshold(shift, u)
    tail = log_normal_density(t) + log_mills(t + mu)
    return _profile(t, mu, shift), where_positive(tail, shift)


def log_gaussian_profile(shift: Array, u: Array) -> Array:
    """``log D(shift, e^u)``; see `gaussian_tails`."""
    return _profile(*_threshold(shift, u), shift)


def _threshold(shift: Array, u: Array) -> tuple[Array, Array]:
    """Where the loss is u, less the shift; and the shift."""
    xp = namespace(shift, u)
    mu = positive(shift, LARGEST)
    return xp.minimum(xp.minimum(u, LARGEST) / mu - 0.5 * mu, LARGEST), mu


def _profile(t: Array, mu: Array, shift: Array) -> Array:
    return where_positive(log_saturating_tail(t, mu), shift)


def drawn_tails(tails: Tails, u: Array, rate: Array) -> Tails:
    """Tails of a mechanism that runs with probability ``rate`` only, Q being shared."""
    # Balle, Barthe, Gaboardi (2018), Theorem 2.
    xp = namespace(u, rate)
    # g over g of the mechanism, without the cancellation of u - inner_exponent
    slope = -xp.log1p((1 - rate) / rate * -xp.expm1(-u))
    return xp.log(rate) + tails[0], tails[1] + slope


def inner_exponent(u: Array, rate: Array) -> Array:
    """``log(1 + (e^u - 1) / rate)`` for rate in (0, 1], at every scale of u."""
    xp = namespace(u, rate)
    small = u <= 1
    near = xp.log1p(xp.expm1(xp.where(small, u, 1.0)) / rate)
    # e^u overflows; (e^u - (1 - rate)) / rate in logarithms does not.
    large = xp.where(small, 1.0, u)
    far = large + xp.log1p(-(1 - rate) * xp.exp(-large)) - xp.log(rate)
    return xp.where(small, near, far)


def positive(value: Array, largest: float) -> Array:
    """The value kept within [1e-60, largest]; ``largest`` in place of 0."""
    xp = namespace(value)
    clipped = xp.clip(value, SMALLEST, largest)
    return xp.where(value > 0, clipped, xp.full_like(value, min(largest, 1.0)))


def where_positive(log_h: Array, *factors: Array) -> Array:
    """``log_h`` where all factors are positive, ``-inf`` elsewhere."""
    xp = namespace(log_h)
    for factor in factors:
        log_h = xp.where(factor > 0, log_h, -xp.inf)
    return log_h


def scaled(tails: Tails, outer_rate: Array, *factors: Array) -> Tails:
    """Tails times the outer rate; ``-inf`` where that or a factor is 0."""
    xp = namespace(tails[0], outer_rate)
    log_outer = xp.log(xp.where(outer_rate > 0, outer_rate, 1.0))
    profile, tail = (
        where_positive(log_outer + tail, outer_rate, *factors) for tail in tails
    )
    return profile, tail

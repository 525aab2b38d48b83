"""The base of mechanisms with Gaussian noise; Poisson sampling of any mechanism."""

# Reference: Balle and Wang (2018), arXiv:1805.06530, Theorem 8, for the profile; Balle,
# Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 8, and Zhu, Dong, Wang (2022),
# arXiv:2106.08567, Theorem 11, for sampling.

from __future__ import annotations

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


# --- Poisson sampling: tails of ``(1 - p) Q + p P`` against Q ---

# Largest argument of exp, nats: e^300, which derivatives need, does not overflow.
LARGEST_EXPONENT = 100.0
# Relative rounding error of a difference times expm1, in units of the float64 epsilon
# (XLA's expm1 is good to two of these).
_DIFFERENCE_ERROR = 4.0
# Displacement of backward losses, nats, over ``min(1 - 1/g, rate)``: where the loss is
# the largest, ``1 - g (1 - p)`` cancels, and the profile that is computed is the one at
# a loss nearby. Nine units of the float64 epsilon.
CANCELLATION = 2e-15


def sampled_tails(
    base: Callable[[Array], Tails],
    u: Array,
    rate: Array,
) -> tuple[Tails, Tails]:
    """With ``k = 1 - g (1-p)``: ``p D(1 + (g-1)/p)`` forward, ``k D(g p / k)`` back."""
    # Where the backward losses end a difference cancels: there the value is the profile
    # at a point nearby, which errs upwards.
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
    # -dh/du = g (1-p) D + G: both parts are positive
    log_rest = xp.log1p(-xp.where(p < 1, p, 0.0))
    lost = xp.where(p < 1, xp.minimum(u, 700.0) + log_rest + profile, -xp.inf)
    backward = (
        xp.where(alive, xp.log(k) + profile, -xp.inf),
        xp.where(alive, xp.logaddexp(lost, tail), -xp.inf),
    )
    return forward, backward


def weight_left(u: Array, rate: Array, rest: Array) -> Array:
    """``rate - (e^u - 1) rest``, an upper bound: it cancels where the losses end."""
    xp = namespace(u, rate, rest)
    lost = rest * xp.expm1(xp.minimum(u, LARGEST_EXPONENT))
    return rate - lost * (1 - _DIFFERENCE_ERROR * xp.finfo(u.dtype).eps)


def sampled_displacement(u: Array, rate: Array) -> Array:
    """Bound, nats, of the displacement of the backward tails of `sampled_tails`."""
    xp = namespace(u, rate)
    displaced = CANCELLATION * xp.minimum(-xp.expm1(-u), rate)
    return xp.where(rate < 1, displaced, 0.0)

"""Poisson sampling of any mechanism: tails of ``(1 - p) Q + p P`` against Q."""

# Reference: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 8; Zhu, Dong,
# Wang (2022), arXiv:2106.08567, Theorem 11.

from __future__ import annotations

from collections.abc import Callable

from jaxdp_episodic.accountant.losses.gaussian import (
    drawn_tails,
    inner_exponent,
    positive,
)
from jaxdp_episodic.accountant.losses.privacy_loss import Tails
from jaxdp_episodic.accountant.numerics.loops import Array, at, namespace

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

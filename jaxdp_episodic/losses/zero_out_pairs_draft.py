"""Draft, NumPy only: profile, loss and moments of the *zeroed* pair of zero_out.

One pair of profiles serves every design under the zero-out relation (docs/proofs.md,
"The zero-out relation"). With unit variances, the clip unit drawn with probability
``p`` and the protected unit reached inside a drawn one with probability ``r``:

    forward   H_g(P1 || Q1),  P1 = (1-p) N(0) + p(1-r) N(-s) + p r N(s)
                              Q1 = (1-p+pr) N(0) + p(1-r) N(-s)
    backward  H_g(Q2 || P2),  P2 = (1-p) N(0) + p N(s)
                              Q2 = (1-p+pr) N(0) + p(1-r) N(s)

Two different pairs: forward the contributions without the protected unit pull the other
way, backward the same way. ``r = 1`` is the sampled pair in both directions; ``p = 1``
is what holds without replacement and for a step clipped as a whole.

Both likelihood ratios are 1 at ``x = s/2``. The losses above 0 are those of (P1, Q1) at
``x > s/2``, the losses below 0 those of (P2, Q2) at ``x < s/2``, and what is missing to
mass 1 is an atom at loss 0 (`log_atom`).
"""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.numerics import special
from jaxdp_episodic.numerics.quadrature import gauss_legendre

_SMALLEST = 1e-60
_LARGEST = 1e100
_LARGEST_EXPONENT = 100.0
_LOG_ZERO = -1e30
_DIFFERENCE_ERROR = 4.0
_LOG_SQRT_2PI = 0.5 * np.log(2 * np.pi)


def log_profile(u, outer_rate, p, r, s):
    """``(log h_forward, log h_backward)`` of the zeroed pair, times ``outer_rate``.

    Forward, P1 > g Q1 beyond ``t = s/2 + (A1 + A2)/s``, where

        A1 = log(1 + (g-1) (1-p+pr) / (pr)),  A2 = log((1 + sqrt(1 + kappa)) / 2),
        kappa = 4 (g-1) (1-r)/r e^{-s²-2 A1},

    are sums of positive terms, and with the Mills ratio m

        h_forward = p r phi(t-s) [(m(t-s) - m(t)) + (1 - e^{-A2}) (m(t) - m(t+s))].

    Backward, with ``k = pr - (g-1)(1-p)``: ``k D(s, 1 + (g-1)/k)``, 0 where k <= 0.

    Args:
      u: (...,) log g >= 0.
      outer_rate: (...,) r_out in [0, 1], a factor on the profile.
      p: (...,) in [0, 1], chance of the clip unit under Poisson sampling; 1 otherwise.
      r: (...,) in [0, 1], chance that the protected unit is reached, given the former.
      s: (...,) >= 0, norm of the protected unit's contribution over the noise.

    Returns:
      Two arrays (...,) nats, exact up to rounding. Where k cancels (the backward losses
      end at ``log((1-p+pr)/(1-p))``) the value errs upwards.
    """
    u, outer, p, r, s = np.broadcast_arrays(
        *(np.asarray(a, np.float64) for a in (u, outer_rate, p, r, s))
    )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        rate, inner = _positive(p, 1.0), _positive(r, 1.0)
        width = _positive(s, _LARGEST)
        forward = _log_forward(u, rate, inner, width)
        backward = _log_backward(u, rate, inner, width)
        log_outer = np.log(np.where(outer > 0, outer, 1.0))
        alive = (outer > 0) & (p > 0) & (r > 0) & (s > 0)
        return (
            np.where(alive, log_outer + forward, -np.inf),
            np.where(alive, log_outer + backward, -np.inf),
        )


def log_episodes_profile(u, episode_rate, s, num_episodes):
    """The same for independent episodes: a mixture over how many are zeroed.

    ``sum_k P(J = k)/e1 h(p = 1, r = e1, k s)`` in each direction, ``J ~ Binomial(B,
    eta)``, ``e1 = P(J >= 1)``.

    Args:
      u: (...,) log g >= 0.
      episode_rate: (...,) eta in [0, 1], the chance to be in one given episode.
      s: (...,) >= 0 of one contribution (*not* of a swap).
      num_episodes: B, a whole number >= 1.

    Returns:
      Two arrays (...,) nats.
    """
    u, eta, s = np.broadcast_arrays(
        *(np.asarray(a, np.float64) for a in (u, episode_rate, s))
    )
    forward = np.full(u.shape, -np.inf)
    backward = np.full(u.shape, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        safe = _positive(eta, 1.0)
        log_absent = np.where(safe >= 1, _LOG_ZERO, np.log1p(-np.minimum(safe, 1.0)))
        any_rate = np.maximum(-np.expm1(num_episodes * log_absent), _SMALLEST)
        log_binomial = 0.0
        for k in range(1, num_episodes + 1):
            log_binomial += np.log(num_episodes - k + 1) - np.log(k)
            log_weight = log_binomial + k * np.log(safe)
            log_weight = log_weight + (num_episodes - k) * log_absent - np.log(any_rate)
            one, two = log_profile(u, 1.0, 1.0, any_rate, k * s)
            forward = np.logaddexp(forward, log_weight + one)
            backward = np.logaddexp(backward, log_weight + two)
    return np.where(eta > 0, forward, -np.inf), np.where(eta > 0, backward, -np.inf)


def log_atom(p, r, s):
    """``log A``, ``A = p(1-r) (1 - Q(s/2) - Q(3s/2))``: the mass at loss 0.

    Q is the upper normal tail; ``1 - Q(a) - Q(b) = (1/2 - Q(a)) + (1/2 - Q(b))`` is a
    sum of positive numbers. With a factor ``r_out`` it is ``r_out A + 1 - r_out``.
    """
    from scipy.special import erf  # draft: the port has erf of its namespace

    root = np.sqrt(8.0)
    mass = 0.5 * (erf(s / root) + erf(3 * s / root))
    with np.errstate(divide="ignore"):
        return np.log(p) + np.log1p(-np.asarray(r)) + np.log(mass)


def log_parts(x, p, r, s):
    """Loss and log-density of Q of the joint law at x; no cancellation.

    Above ``x = s/2`` they are ``log(P1/Q1)`` and ``log Q1``, below it ``log(P2/Q2)``
    and ``log Q2``. The loss increases in x over the whole line, from
    ``log((1-p)/(1-p+pr))`` (-inf at p = 1) through 0 at ``s/2`` to inf.

    Returns:
      (...,) loss, (...,) log-density of Q.
    """
    x, p, r, s = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (x, p, r, s)))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_null = np.log((1 - p) + p * r)
        log_kept = np.log(p) + np.log1p(-r)
        log_reached = np.log(p) + np.log(r)
        tilt = s * (x - 0.5 * s)  # log of N(s) over N(0)
        up = tilt > 0
        high, low = np.where(up, tilt, 1.0), np.where(up, -1.0, tilt)
        base1 = np.logaddexp(log_null, log_kept - high - s * s)
        base2 = np.logaddexp(log_null, log_kept + low)
        excess = log_reached + high + np.log(-np.expm1(-high)) - base1
        above = np.logaddexp(0.0, excess)
        missing = np.exp(log_reached + np.log(-np.expm1(low)) - base2)
        direct = np.logaddexp(np.log1p(-p), np.log(p) + low) - base2
        below = np.where(missing < 0.5, np.log1p(-np.minimum(missing, 0.5)), direct)
        loss = np.where(up, above, np.where(tilt < 0, below, 0.0))
        base = np.where(up, base1, base2)
        return loss, base - 0.5 * x * x - _LOG_SQRT_2PI


def turning_points(p, r, s):
    """Where the loss changes its slope, for laying panels.

    Returns:
      Three positions: ``x1 >= s/2``, where ``P1/Q1 = 2`` (the loss is exponentially
      small before it and ``s (x - x1)``, up to twice as steep, after it); the two
      transitions of the bounded part, of log P2 and of log Q2, which matter where they
      are below s/2 (between them the loss has slope s, outside it is flat).
    """
    p, r, s = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (p, r, s)))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        a1, a2 = _angles(np.log(2.0) + 0 * p, p, r, s)[:2]
        first = 0.5 * s + (a1 + a2) / s
        top = 0.5 * s + (np.log1p(-p) - np.log(p)) / s
        log_null = np.log((1 - p) + p * r)
        bottom = 0.5 * s + (log_null - np.log(p) - np.log1p(-r)) / s
    return first, top, bottom


def _angles(u, p, r, s):
    """A1, A2 and log(1 - e^{-A2}), for p and r in (0, 1]."""
    null = (1 - p) + p * r
    a1 = np.minimum(_inner_exponent(u, p * r / null), _LARGEST)
    some = (u > 0) & (r < 1)
    log_g1 = np.where(some, u, 1.0)
    log_g1 = log_g1 + np.log(-np.expm1(-log_g1))
    log_odds = np.log1p(-np.where(some, r, 0.5)) - np.log(r)
    log_kappa = np.log(4.0) + log_g1 + log_odds - s * s - 2 * a1
    some = some & (log_kappa > -700.0)
    kappa = np.exp(np.where(some, log_kappa, 0.0))
    rise = kappa / (2 * (1 + np.sqrt(1 + kappa)))  # e^{A2} - 1
    a2 = np.where(some, np.log1p(rise), 0.0)
    return a1, a2, np.where(some, np.log(rise) - a2, _LOG_ZERO)


def _log_forward(u, p, r, s):
    a1, a2, log_share = _angles(u, p, r, s)
    x = np.minimum((a1 + a2) / s - 0.5 * s, _LARGEST)  # t - s
    zeroed = _log_saturating_tail(x, s)
    t = np.maximum(x + s, 0.5 * s)
    moved = _log_normal_density(x) + log_share + _log_mills_difference(t, s)
    return np.log(p) + np.log(r) + np.logaddexp(zeroed, moved)


def _log_backward(u, p, r, s):
    taken = (1 - p) * np.expm1(np.minimum(u, _LARGEST_EXPONENT))
    k = p * r - taken * (1 - _DIFFERENCE_ERROR * np.finfo(np.float64).eps)
    alive = k > 0
    k = np.where(alive, k, 1.0)
    # 1 + (g-1)/k = p (g - 1 + r) / k
    small = u <= 1
    near = np.log1p(np.expm1(np.where(small, u, 1.0)) / k)
    far = u + np.log1p(-(1 - r) * np.exp(-u)) + np.log(p) - np.log(k)
    inner = np.where(small, near, far)
    inner = np.where(alive, inner, 1.0)
    t = np.minimum(np.minimum(inner, _LARGEST) / s - 0.5 * s, _LARGEST)
    log_h = np.log(k) + _log_saturating_tail(t, s)
    return np.where(alive, log_h, -np.inf)


# --- NumPy twins of `numerics.special` and `losses.profiles`, for the port to drop ---


def _inner_exponent(u, rate):
    small = u <= 1
    near = np.log1p(np.expm1(np.where(small, u, 1.0)) / rate)
    large = np.where(small, 1.0, u)
    far = large + np.log1p(-(1 - rate) * np.exp(-large)) - np.log(rate)
    return np.where(small, near, far)


def _positive(value, largest):
    clipped = np.clip(value, _SMALLEST, largest)
    return np.where(value > 0, clipped, np.full_like(value, min(largest, 1.0)))


def _log_normal_density(x):
    return -0.5 * x * x - _LOG_SQRT_2PI


def _polynomial(coefficients, x):
    total = np.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


def _mills_ratio(x):
    scale = x + 3 / (x + 3)
    return _polynomial(special._MILLS_RATIO, 1 - 8 / (x + 5)) / scale


def _mills_slope(x):
    scale = 1 / (x + 3 / (x + 3))
    return _polynomial(special._MILLS_SLOPE, 1 - 8 / (x + 5)) * scale * scale


def _log_mills_difference(x, width):
    narrow = width <= np.maximum(1.0, 0.5 * x)
    short = np.where(narrow & (width > 0), width, 1.0)
    long = np.where(narrow, 2.0 + np.abs(x), width)
    nodes, weights = (np.asarray(a) for a in gauss_legendre(special._SLOPE_NODES))
    column = (nodes.size,) + (1,) * np.ndim(x)
    slopes = _mills_slope(x + short * nodes.reshape(column))
    integral = np.log(short) + np.log(np.sum(slopes * weights.reshape(column), axis=0))
    direct = np.log(_mills_ratio(x) - _mills_ratio(x + long))
    return np.where(width > 0, np.where(narrow, integral, direct), -np.inf)


def _log_saturating_tail(x, width):
    right = x >= -1.0
    above = np.where(right, x, 0.0)
    below = np.where(right, -1.0, x)
    direct = _log_normal_density(above) + _log_mills_difference(above, width)
    reach = np.maximum(below + width, 0.0)
    missing = _mills_ratio(-below) + _mills_ratio(reach)
    complement = np.log1p(-np.exp(_log_normal_density(below)) * missing)
    return np.where(right, direct, complement)

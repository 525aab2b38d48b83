"""The Gaussian mechanism with Poisson sampling, and the base of all Gaussian noise."""

# References: Balle and Wang (2018), arXiv:1805.06530, Theorem 8, for the profile of the
# Gaussian mechanism; Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorems 2, 8
# and 9, and Zhu, Dong, Wang (2022), arXiv:2106.08567, Theorem 11, for Poisson sampling;
# Mironov, Talwar, Zhang (2019), arXiv:1908.10530, Theorem 5, for its Rényi divergence.

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses import excess
from jaxdp_episodic.accountant.losses.loss_nodes import (
    FURTHEST_LEFT,
    LossNodes,
    NodeRule,
    Rate,
    collected,
    log_mixture,
    log_normal,
    path_points,
    real_log_mixture,
    weighted,
    whole_line,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Moments,
    Nodes,
    NoisyLoss,
    Profile,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    at,
    fori_loop,
    namespace,
    sigmoid,
    stop_gradient,
    stored,
)
from jaxdp_episodic.accountant.numerics.special import (
    LOG_SQRT_2PI,
    REMAINDER,
    SLOPE,
    SMALL,
    log1p_bounded,
    log_normal_density,
    polynomial,
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
    xp, some = namespace(shift, u), shift > 0
    mu = xp.where(some, xp.minimum(xp.maximum(shift, SMALLEST), LARGEST), 1.0)
    t = xp.minimum(xp.minimum(u, LARGEST) / mu - 0.5 * mu, LARGEST)
    profile, mills = saturating_tail(t, mu)
    tail = log_normal_density(t) + xp.log(mills)
    return xp.where(some, profile, -xp.inf), xp.where(some, tail, -xp.inf)


def log_gaussian_profile(shift: Array, u: Array) -> Array:
    """Returns the logarithm of the profile alone; see `gaussian_tails`."""
    return gaussian_tails(shift, u)[0]


def near_gaussian_profile(xp: Any, shift: Array, u: Array) -> Array:
    """Approximates `log_gaussian_profile` for searches, to .12 nats if delta < .3."""
    # By m(x) = pi / ((pi - 1) x + sqrt(x² + 2 pi)): Boyd (1959), to 1 % for x >= 0.
    # Left of t = -1/2 the profile is near 1.
    mu = xp.minimum(xp.maximum(shift, SMALLEST), LARGEST)
    t = xp.minimum(xp.minimum(u, LARGEST) / mu - 0.5 * mu, LARGEST)
    x = xp.maximum(t, -0.5)
    ends = xp.stack([x, x + mu])
    roots = xp.sqrt(ends * ends + 2 * math.pi)
    slope = (math.pi - 1) + ends.sum(axis=0) / roots.sum(axis=0)
    below = ((math.pi - 1) * ends + roots).prod(axis=0)
    found = -0.5 * x * x - LOG_SQRT_2PI + xp.log(math.pi * mu * slope / below)
    return xp.where(t < x, xp.maximum(found, -0.5 * xp.exp(-0.5 * t * t)), found)


def drawn_tails(tails: Tails, u: Array, rate: Array) -> Tails:
    """Returns tails of ``(1-p) Q + p P`` against Q from P's at `inner_exponent`."""
    # Balle, Barthe, Gaboardi (2018), Theorem 2 ("advanced joint convexity").
    xp = namespace(u, rate)
    # log of g over e^inner_exponent, without cancellation.
    slope = -xp.log1p((1 - rate) / rate * -xp.expm1(-u))
    return xp.log(rate) + tails[0], tails[1] + slope


def inner_exponent(xp: Any, u: Array, rate: Array) -> Array:
    """Returns ``log(1 + (e^u - 1) / rate)`` for a rate in (0, 1] and any u >= 0."""
    # Further up it grows as u.
    low = xp.minimum(u, _LARGEST_GAIN)
    return xp.log1p(xp.expm1(low) / rate) + (u - low)


def positive(value: Array, largest: float) -> Array:
    """Clips positive values to [1e-60, largest]; others become min(largest, 1)."""
    xp = namespace(value)
    clipped = xp.minimum(xp.maximum(value, SMALLEST), largest)
    return xp.where(value > 0, clipped, min(largest, 1.0))


def scaled(tails: Tails, outer_rate: Array, *factors: Array) -> Tails:
    """Returns tails times the outer rate; ``-inf`` where that or a factor is 0."""
    xp, some = namespace(tails[0], outer_rate), outer_rate > 0
    log_outer = xp.log(xp.where(some, outer_rate, 1.0))
    for factor in factors:
        some = some & (factor > 0)
    profile, tail = (xp.where(some, log_outer + part, -xp.inf) for part in tails)
    return profile, tail


# --- Poisson sampling: tails of ``(1 - p) Q + p P`` against Q ---

# Largest argument of exp, in nats: its third power, which derivatives need, is finite.
_LARGEST_GROWTH = 100.0
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
    drawn = inner_exponent(xp, u, p)
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
    lost = rest * xp.expm1(xp.minimum(u, _LARGEST_GROWTH))
    return rate - lost * (1 - _DIFFERENCE_ERROR * xp.finfo(u.dtype).eps)


def sampled_displacement(u: Array, rate: Array) -> Array:
    """Bounds the error of u, in nats, in the backward tails of `sampled_tails`."""
    xp = namespace(u, rate)
    displaced = CANCELLATION * xp.minimum(-xp.expm1(-u), rate)
    return xp.where(rate < 1, displaced, 0.0)


# --- The mechanism ---

# Number of nodes less than the rule's. Measured: with 64 instead of 112 the first pass
# settles as many settings.
_SPARED = 48
# Least number of nodes, unless 3/4 of the rule's are fewer.
_FEWEST = 60
# Sampling rate above which most losses are not near log(1 - rate).
_LARGEST_BULK_RATE = 0.99


@dataclass(frozen=True)
class SampledGaussianLoss(GaussianLoss, Nodes):
    """``(1-p) N(0, 1) + p N(shift, 1)`` against ``N(0, 1)``."""

    rate: Array  # p in [0, 1]
    shift: Array  # s >= 0
    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True
    nodes_exchange: ClassVar[bool] = True
    has_lattice: ClassVar[bool] = True

    def largest_loss(self, *, backward: bool) -> Array:
        """``-log(1 - p)`` backward: P's density is at least ``1 - p`` times Q's."""
        bounded = (self.rate < 1) & backward
        return np.where(bounded, -np.log1p(-np.where(bounded, self.rate, 0.0)), np.inf)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """With ``k = 1 - g (1-p)``: ``p D(s, 1 + (g-1)/p)`` and ``k D(s, g p / k)``."""
        xp = namespace(u, *self.fields)
        u, outer, p, s = xp.broadcast_arrays(u, *self.fields)
        both = sampled_tails(lambda inner: gaussian_tails(s, inner), u, p)
        forward, backward = (scaled(tails, outer, p, s) for tails in both)
        return forward, backward

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`."""
        return sampled_displacement(u, self.rate)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; *exact* up to quadrature error."""
        return mixture_excess(t, self.rate, self.shift, rule)

    def largest_on_lattice(self, rule: Quadrature) -> Array:
        """See `Moments`."""
        digits, s = rule.lattice, self.shift
        length = (_MOST_NODES - 2) * _spacing(s, digits) - 2 * _reach(digits)
        end = length / s - 1
        # Orders below 2 need the nodes of order 2: their integrand may be near v².
        return namespace(s).where(end < 1, 0.0, end)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`."""
        # 60 nodes give 2e-9 of epsilon up to shifts of 2, 120 give 1e-8 of M up to 4.
        s, p, backward = self.shift, Rate.of(self.rate), rule.backward
        xp, cut = namespace(s, rule.log_cut), rule.log_cut
        reach = xp.sqrt(-2 * cut)
        high = xp.maximum(reach, s + xp.sqrt(2 * xp.maximum(p.log - cut, 1.0)))
        kink = xp.clip(0.5 * s + (p.log_rest - p.log) / s, -20.0, 1e9)
        # Left of it P/Q is near 1 - p and Q's probability negligible.
        low = xp.where(backward > 0, -reach, xp.maximum(-reach, FURTHEST_LEFT))
        fewer = max(rule.num_nodes - _SPARED, _FEWEST)
        number = min(3 * rule.num_nodes // 4, fewer)
        line = stored(xp, whole_line(low, high, kink, s, number))
        nowhere = xp.full_like(s, -xp.inf)
        x, element = path_points(line, nowhere, kink, s, rule.height, last=s)
        y = stored(xp, log_mixture((s * (x[0] - 0.5 * s), s * x[1]), p))
        loss, weight = weighted(y, log_normal(x), element, backward)
        ends = xp.stack([x[0][:, 0], x[0][:, -1]], axis=1)
        end_loss = real_log_mixture(s * (ends - 0.5 * s), p)
        end_log_weight = -0.5 * ends**2 + (1 - backward) * end_loss
        end_loss = (1 - 2 * backward) * end_loss
        return stored(xp, collected(loss, weight, end_log_weight, end_loss))

    def bulk(self) -> tuple[Array, Array]:
        """See `Nodes`: the loss if the unit is not drawn, unless it mostly is."""
        # With an outer rate there are two losses without the unit.
        xp, outer = namespace(self.outer_rate, self.rate), self.outer_rate
        concentrated = (outer >= 1) & (self.rate < _LARGEST_BULK_RATE)
        undrawn = xp.log1p(-xp.where(concentrated, self.rate, 0.0))
        return undrawn, xp.where(outer < 1, outer * self.rate, 0.0)

    def gaussian_shift(self) -> Array:
        """The shift if the unit is always drawn, else 0."""
        xp = namespace(self.rate, self.shift)
        return xp.where(self.rate >= 1, self.shift, 0.0)


def mixture_excess(
    t: Array, sampling_probability: Array, shift: Array, rule: MomentRule
) -> tuple[Array, ...]:
    """Log-excess of the sampled pair and its derivatives, each (n,); see `Moments`."""
    xp = namespace(t, sampling_probability, shift)
    t, p, s = xp.broadcast_arrays(t, sampling_probability, shift)
    rate = Rate.of(p)
    panels, _, digits = rule.quadrature
    if not panels:
        found = lattice_excess(t, p, s, digits, rule.with_derivatives)
    else:
        log_odds = rate.log_rest - rate.log  # hardly any at p = 1
        kink = xp.maximum(0.5 * s + log_odds / s, -1e300)
        windows = _windows(t, kink, s, rule.direction)
        floor = 0.5 * s if rule.direction == "symmetric" else xp.full_like(s, -xp.inf)

        def log_parts(x: Array) -> tuple[Array, Array]:
            """Log-ratio of P to Q and log-density of Q at x."""
            log_ratio = real_log_mixture(s * (x - 0.5 * s), rate)
            return log_ratio, -0.5 * x * x - LOG_SQRT_2PI

        found = excess.log_integral(log_parts, *windows, floor, t, rule)
    rounds = float(rule.direction != "backward")
    return excess.unless_gaussian(
        p >= 1, rate.log, 0.5 * s * s, t, found, rounds=rounds
    )


def _windows(
    t: Array, kink: Array, s: Array, direction: str
) -> tuple[excess.Windows, Array]:
    """Windows outside of which the integrand of the sampled pair is negligible."""
    xp = namespace(t, kink, s)
    alpha = 1 + t
    zero = xp.zeros_like(s)
    knee = kink - xp.log(alpha) / s  # alpha v = 1
    centers = [zero]
    between: Callable[[], Array] | None = None
    if direction != "backward":
        steepest = alpha * s

        def rise(x: Array) -> tuple[Array, Array]:
            share = sigmoid(s * (x - kink))
            slope = steepest * share
            return slope, s * slope * (1 - share)

        starts = xp.stack([steepest, zero])
        between = functools.partial(excess.settle, rise, starts, zero, steepest)
        low, high = xp.minimum(alpha, 2) * s, xp.maximum(alpha, 2) * s
        centers += [steepest, xp.clip(kink, low, high), 2 * s]
    if direction != "forward":
        centers += [xp.clip(knee, s, 2 * s)]
    if direction == "backward":

        def fall(x: Array) -> Array:
            return -t * s * sigmoid(s * (x - kink))

        centers += [excess.only_root(fall, -t * s, zero)]
    return excess.windows_around(
        centers, excess.transitions(knee, kink, s), between=between
    )


# --- Its Rényi moments ---

# Rényi moments as sums over equally spaced nodes, as accurate as panels with ten times
# as many.

# Largest number of nodes: panels take no more. It keeps ``e^{s x}`` from overflowing:
# s x <= 240.
_MOST_NODES = 512
# Rows of nodes in a pass of the loop, with and without derivatives. With twice as many
# XLA would split each pass among threads, which takes longer than the pass.
_ROWS = {True: 4, False: 2}
# Shift below which e^u - 1 is carried from pass to pass, not e^u: below it rounding
# grows by e^5 at most, and above it nodes where e^u is near 1 have little weight.
_SMALL_STEP = 0.5


def _spacing(s: Array, digits: Array | float) -> Array:
    """Spacing of nodes for a relative quadrature error of e^-digits."""
    # With spacing h the error is e^{-2 pi a / h} times the integral at the height a,
    # which may be at most that of the first zero of P/Q, pi / s.
    xp = namespace(s)
    height = xp.minimum(math.pi / s, xp.sqrt(2 * digits))
    return 2 * math.pi * height / (digits + 0.5 * height * height)


def _reach(digits: Array | float) -> Array:
    """Distance from the nearest peak beyond which less than e^-digits is left."""
    return namespace(digits).sqrt(2 * digits + 8)


def lattice_excess(
    t: Array, p: Array, s: Array, digits: Array | float, with_derivatives: bool
) -> tuple[Array, ...]:
    """The log-excess, (n,), and with derivatives its first two; see `Moments`."""
    xp, alpha, rate = namespace(t, p, s), 1 + t, Rate.of(p)
    spacing, reach = stop_gradient(xp, _spacing(s, digits)), _reach(digits)
    # Peaks lie between 0 and this: (1 + v)^alpha peaks at alpha s, v² at 2s.
    last = stop_gradient(xp, xp.maximum(alpha, 2.0) * s)
    number = xp.ceil((last + 2 * reach) / spacing) + 1
    # An order that is NaN must not change the number of nodes of the others.
    number = xp.where(number < _MOST_NODES, number, _MOST_NODES)
    # Large moments are scaled down by their size at the peak.
    top = alpha * s
    peak = alpha * real_log_mixture(s * (top - 0.5 * s), rate) - 0.5 * top * top
    peak = stop_gradient(xp, xp.maximum(peak - excess.LARGEST_EXPONENT, 0.0))
    odds = p / xp.maximum(1 - p, 1e-300)

    def values(x: Array, grown: Array, base: Array) -> tuple[Array, ...]:
        """The integrand at x, given ``e^{s (x - s/2)} - 1`` and Q's density."""
        v, w = p * grown, odds * (1 + grown)
        central, drawn = xp.abs(v) <= 0.5, w > 1
        # The larger of (1 - p) and p e^l is factored out of their sum.
        offset = xp.where(drawn, s * (x - 0.5 * s) + rate.log, rate.log_rest)
        inner = xp.where(drawn, 1 / xp.where(drawn, w, 1.0), w)
        y = log1p_bounded(xp.where(central, v, inner))
        y = y + xp.where(central, 0.0, offset)
        z, density = t * y, base * (1 + v)
        # A factor on the density while z is small: rounding then cancels.
        short = z <= 1
        log_power = y + z - 0.5 * x * x - (LOG_SQRT_2PI + peak)
        power = xp.exp(xp.where(short, z, log_power))
        power = xp.where(short, density * power, power)
        # (1+v) (e^z - 1 - z), and the slope of f at t = 0
        rest = power - density * (1 + z)
        near = density * (z * z) * polynomial(REMAINDER, z)
        rest = xp.where(xp.abs(z) < SMALL, near, rest)
        near = base * (y * y) * polynomial(SLOPE, y)
        slope = xp.where(xp.abs(y) < SMALL, near, density * y - base * v)
        value = rest + t * slope
        if not with_derivatives:
            return (value,)
        return value, y * (rest + density * z) + slope, y * y * power

    rows = np.max(number) if xp is np else _ROWS[with_derivatives]
    first = spacing * np.arange(float(rows))[:, None] - reach
    grown = xp.expm1(s * (first - 0.5 * s))
    base = xp.exp(-0.5 * first * first - (LOG_SQRT_2PI + peak))
    if xp is np:
        totals = values(first, grown, base)
    else:
        stride = rows * spacing
        more, narrower = xp.expm1(s * stride), xp.exp(-stride * stride)
        falls = xp.exp(-stride * (first + 0.5 * stride))
        # Large steps: e^u is carried, as e^u - 1 loses its digits next to -1. Small
        # steps: e^u - 1 is carried, as it has full precision about 0.
        is_small = s < _SMALL_STEP
        added, taken = xp.where(is_small, more, 0.0), xp.where(is_small, 0.0, 1.0)
        carried = xp.where(is_small, grown, xp.exp(s * (first - 0.5 * s)))

        def add(i: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            carried, base, falls, totals = state
            found = values(first + stride * xp.float64(i), carried - taken, base)
            totals = tuple(a + b for a, b in zip(totals, found, strict=True))
            carried, base = carried * (1 + more) + added, base * falls
            return carried, base, falls * narrower, totals

        passes = xp.ceil(xp.max(number) / rows).astype(np.int32)
        nothing = (xp.zeros_like(base),) * (3 if with_derivatives else 1)
        state = carried, base, falls, nothing
        *_, totals = fori_loop(xp, 0, passes, add, state)
    total, *derivatives = (spacing * xp.sum(a, axis=0) for a in totals)
    return xp.log(total) + peak, *(d / total for d in derivatives)

"""The Poisson-sampled Gaussian mechanism; at p = 1 the Gaussian mechanism."""
# Reference: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorems 2, 8 and 9;
# Mironov, Talwar, Zhang (2019), arXiv:1908.10530, Theorem 5, for its Rényi divergence.

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    LARGEST_EXPONENT,
    Windows,
    log_integral,
    only_root,
    settle,
    transitions,
    unless_gaussian,
    windows_around,
)
from jaxdp_episodic.accountant.losses.gaussian import (
    GaussianLoss,
    gaussian_tails,
    sampled_displacement,
    sampled_tails,
    scaled,
)
from jaxdp_episodic.accountant.losses.loss_nodes import (
    FURTHEST_LEFT,
    LOG_SQRT_2PI,
    LossNodes,
    NodeRule,
    Rate,
    gaussian_loss,
    log_mixture,
    nodes_on_line,
    real_log_mixture,
    sampled_ends,
    undrawn_loss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    MomentRule,
    Nodes,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    namespace,
    sigmoid,
    stop_gradient,
)
from jaxdp_episodic.accountant.numerics.power_excess import REMAINDER, SLOPE, SMALL
from jaxdp_episodic.accountant.numerics.special import log1p_bounded, polynomial

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


def largest_order(s: Array, digits: float) -> Array:
    """Largest t for which `_MOST_NODES` are enough; <= 0 if there is none."""
    length = (_MOST_NODES - 2) * _spacing(s, digits) - 2 * _reach(digits)
    end = length / s - 1
    # Orders below 2 need the nodes of order 2: their integrand may be near v².
    return namespace(s).where(end < 1, 0.0, end)


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
    peak = stop_gradient(xp, xp.maximum(peak - LARGEST_EXPONENT, 0.0))
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

    def at(x: Array) -> tuple[Array, Array]:
        log_density = -0.5 * x * x - (LOG_SQRT_2PI + peak)
        return xp.expm1(s * (x - 0.5 * s)), xp.exp(log_density)

    rows = np.max(number) if xp is np else _ROWS[with_derivatives]
    first = spacing * np.arange(float(rows))[:, None] - reach
    grown, base = at(first)
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


# Number of nodes less than the rule's. Measured: with 64 instead of 112 the first pass
# settles as many settings.
_SPARED = 48
# Least number of nodes, unless 3/4 of the rule's are fewer.
_FEWEST = 60


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
        return largest_order(self.shift, rule.lattice)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`."""
        # 60 nodes give 2e-9 of epsilon up to shifts of 2, 120 give 1e-8 of M up to 4.
        xp = namespace(self.shift, rule.log_cut)
        s, p = self.shift, Rate.of(self.rate)
        low, high, kink = sampled_ends(p, s, rule.log_cut)
        fewer = max(rule.num_nodes - _SPARED, _FEWEST)
        # Left of it P/Q is near 1 - p and Q's probability negligible.
        low = xp.where(rule.backward > 0, low, xp.maximum(low, FURTHEST_LEFT))
        return nodes_on_line(
            (low, high),
            kink,
            s,
            rule._replace(num_nodes=min(3 * rule.num_nodes // 4, fewer)),
            lambda x: log_mixture(gaussian_loss(x, s), p),
            lambda x: real_log_mixture(s * (x - 0.5 * s), p),
        )

    def largest_node(self, log_cut: np.ndarray) -> np.ndarray:
        """See `Nodes`: the Gaussian's, or 40, as log(1 - p) > -37 if p < 1."""
        # Nodes may lie two standard deviations beyond the ends of `sampled_ends`.
        reach = np.sqrt(-2 * np.minimum(log_cut, -18.0)) + 2.0
        return np.maximum(self.shift * (reach + 0.5 * self.shift), 40.0)

    def bulk_loss(self) -> Array:
        """See `Nodes`: the loss if the unit is not drawn, unless it mostly is."""
        return undrawn_loss(self.outer_rate, self.rate)

    def bulk_width(self) -> Array:
        """See `Nodes`: with an outer rate there are two losses without the unit."""
        xp = namespace(self.outer_rate, self.rate)
        return xp.where(self.outer_rate < 1, self.outer_rate * self.rate, 0.0)

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
        excess = lattice_excess(t, p, s, digits, rule.with_derivatives)
    else:
        log_odds = rate.log_rest - rate.log  # hardly any at p = 1
        kink = xp.maximum(0.5 * s + log_odds / s, -1e300)
        windows = _windows(t, kink, s, rule.direction)
        floor = 0.5 * s if rule.direction == "symmetric" else xp.full_like(s, -xp.inf)

        def log_parts(x: Array) -> tuple[Array, Array]:
            """Log-ratio of P to Q and log-density of Q at x."""
            log_ratio = real_log_mixture(s * (x - 0.5 * s), rate)
            return log_ratio, -0.5 * x * x - LOG_SQRT_2PI

        excess = log_integral(log_parts, *windows, floor, t, rule)
    rounds = float(rule.direction != "backward")
    return unless_gaussian(p >= 1, rate.log, 0.5 * s * s, t, excess, rounds=rounds)


def _windows(t: Array, kink: Array, s: Array, direction: str) -> tuple[Windows, Array]:
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
        between = functools.partial(settle, rise, starts, zero, steepest)
        low, high = xp.minimum(alpha, 2) * s, xp.maximum(alpha, 2) * s
        centers += [steepest, xp.clip(kink, low, high), 2 * s]
    if direction != "forward":
        centers += [xp.clip(knee, s, 2 * s)]
    if direction == "backward":

        def fall(x: Array) -> Array:
            return -t * s * sigmoid(s * (x - kink))

        centers += [only_root(fall, -t * s, zero)]
    return windows_around(centers, transitions(knee, kink, s), between=between)

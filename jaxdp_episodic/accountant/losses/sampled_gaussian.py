"""The sampled Gaussian; at p = 1 the Gaussian mechanism."""

# Reference: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorems 2, 8 and 9;
# Mironov, Talwar, Zhang (2019), arXiv:1908.10530, Theorem 5, for its Rényi divergence.

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.excess import log_integral, unless_gaussian
from jaxdp_episodic.accountant.losses.gaussian import (
    GaussianLoss,
    gaussian_tails,
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
    MixturePair,
    MomentRule,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.losses.protocols import Nodes
from jaxdp_episodic.accountant.losses.sampled import sampled_displacement, sampled_tails
from jaxdp_episodic.accountant.losses.sampled_lattice import (
    largest_order,
    lattice_excess,
)
from jaxdp_episodic.accountant.losses.windows import (
    Windows,
    only_root,
    settle,
    transitions,
    windows_around,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, sigmoid

# Nodes by which a distribution has fewer than is asked for. Measured: with 64 of 112
# the first pass settles as many settings.
_SPARED = 48
# Nodes that it has at least, unless 3/4 of what is asked for are fewer.
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
        """The density with the unit is at least ``1 - p`` of that without."""
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

    def mixture(self) -> MixturePair:
        """See `PrivacyLoss`."""
        return MixturePair.sampled(float(self.rate), float(self.shift))

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact up to quadrature error."""
        return mixture_excess(t, self.rate, self.shift, rule)

    def largest_on_lattice(self, rule: Quadrature) -> Array:
        """See `Moments`."""
        return largest_order(self.shift, rule.lattice)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`."""
        # 60 nodes give 2e-9 of epsilon up to shifts of 2, 120 give 1e-8 of M up to 4.
        xp = namespace(*self.fields, rule.backward, rule.log_cut)
        s, p = self.shift, Rate.of(self.rate)
        low, high, kink = sampled_ends(p, s, rule.log_cut)
        fewer = max(rule.num_nodes - _SPARED, _FEWEST)
        # There P/Q is near 1 - p, and lower losses are negligible.
        low = xp.where(rule.backward > 0, low, xp.maximum(low, FURTHEST_LEFT))
        return nodes_on_line(
            (low, high),
            kink,
            s,
            rule._replace(num_nodes=min(3 * rule.num_nodes // 4, fewer)),
            lambda x: log_mixture(gaussian_loss(x, s), p),
            lambda x: real_log_mixture(s * (x - 0.5 * s), p),
        )

    def bulk_loss(self) -> Array:
        """The loss of not being drawn, where that is the rule."""
        return undrawn_loss(self.outer_rate, self.rate)

    def bulk_width(self) -> Array:
        """Below an outer rate, losses of not being drawn are at two places."""
        xp = namespace(*self.fields)
        return xp.where(self.outer_rate < 1, self.outer_rate * self.rate, 0.0)

    def gaussian_shift(self) -> Array:
        """The shift, where the unit is always drawn."""
        xp = namespace(*self.fields)
        return xp.where(self.rate >= 1, self.shift, 0.0)


def mixture_excess(
    t: Array, sampling_probability: Array, shift: Array, rule: MomentRule
) -> tuple[Array, ...]:
    """Log-excess of the sampled pair, and its derivatives; all (n,)."""
    xp = namespace(t, sampling_probability, shift)
    t, p, s = xp.broadcast_arrays(t, sampling_probability, shift)
    rate = Rate.of(p)
    if digits := rule.quadrature.lattice:
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
    """Where the integrand of the sampled pair has weight."""
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

"""A mixture of Gaussians: contributions of several sizes, each with its probability.

The pair is ``P = (1-p) N(0, 1) + p sum_i w_i N(c_i, 1)``, all ``c_i > 0``, against
``Q = N(0, 1)``. With the increasing ``L(x) = log sum_i w_i e^{c_i x - c_i²/2}``, m the
Mills ratio and x where ``L(x) = u``, the profile of the mechanism that always runs is

    H_g(sum_i w_i N(c_i) || N(0)) = sum_i w_i phi(x - c_i) (m(x - c_i) - m(x)),

and with x where ``L(x) = -u`` and ``v_i = w_i e^{c_i x - c_i²/2 + u}``, whose sum is 1,

    H_g(N(0) || sum_i w_i N(c_i)) = sum_i v_i phi(x) (m(-x) - m(c_i - x)):

sums of positive terms, exact at the loss that x really has. Sampling is that of
`losses.sampled`.

In the plane P / Q has no zero below a height of pi / max c_i, where all its terms lie
in one half-plane, nor right of the *kink*, from where on the largest shift's term
outweighs all others together: there the path of `nodes` may rise.

Reference: Choquette-Choo, Ganesh, Steinke, Thakurta (2023), arXiv:2310.15526, Corollary
4.7, that a mixture of vectors is dominated by that of their norms.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import log_integral, unless_gaussian
from jaxdp_episodic.accountant.losses.gaussian import scaled
from jaxdp_episodic.accountant.losses.integration_paths import Pair
from jaxdp_episodic.accountant.losses.loss_nodes import (
    FURTHEST_LEFT,
    LOG_SQRT_2PI,
    LossNodes,
    NodeRule,
    Rate,
    nodes_on_line,
    real_log_mixture,
    undrawn_loss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MixturePair,
    MomentRule,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.losses.protocols import Moments, Nodes, Profile
from jaxdp_episodic.accountant.losses.sampled import sampled_displacement, sampled_tails
from jaxdp_episodic.accountant.losses.windows import (
    Windows,
    only_root,
    settle,
    transitions,
    windows_around,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    expm1_complex,
    log1p_complex,
    log_complex,
    polar,
)
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    logsumexp,
    namespace,
)
from jaxdp_episodic.accountant.numerics.special import (
    log_mills,
    log_mills_difference,
    log_normal_density,
    log_saturating_tail,
)

# Most steps of Newton's method for the x of a loss, on a convex function: one for each
# kink at most, and a few more for the digits.
_NEWTON_STEPS = 60
# The same for the position of the kink.
_KINK_STEPS = 30


@dataclass(frozen=True)
class GaussianMixtureLoss(Profile, Moments, Nodes):
    """``(1-p) N(0) + p sum_i w_i N(shift_i)`` against ``N(0)``.

    Attributes:
      outer_rate: see `PrivacyLoss`; always 1.
      rate: p in [0, 1].
      shifts: each > 0, ascending.
      log_weights: logarithms of the w_i, which add up to 1.
    """

    rate: Array
    shifts: tuple[Array, ...]
    log_weights: tuple[Array, ...]
    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True
    nodes_exchange: ClassVar[bool] = True
    may_have_atoms: ClassVar[bool] = False
    padding: ClassVar[dict[str, float]] = {"shifts": 1.0, "log_weights": -np.inf}

    @property
    def loses_nothing(self) -> Array:
        """Where nothing is drawn, or the noise is infinite."""
        return np.equal(self.chance, 0) | np.equal(self._largest(), 0)

    @property
    def is_unprotected(self) -> Array:
        """Where there is (nearly) no noise."""
        return ~self.loses_nothing & (self._largest() > self.LARGEST_LOSS)

    def kept_in_range(self) -> Self:
        """Returns rates and shifts that kernels can compute with."""
        least, most = self.SMALLEST_LOSS, self.LARGEST_LOSS
        shifts = tuple(np.clip(s, least, most) for s in self.shifts)
        return dataclasses.replace(super().kept_in_range(), shifts=shifts)

    def hints(self) -> Hints:
        """The largest shift."""
        largest = self._largest()
        return Hints(self.rate, self.rate, largest, largest)

    def largest_loss(self, *, backward: bool) -> Array:
        """The density with the unit is at least ``1 - p`` of that without."""
        rate = self.rate + np.zeros(self.shape)
        bounded = (rate < 1) & backward
        return np.where(bounded, -np.log1p(-np.where(bounded, rate, 0.0)), np.inf)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See the module's docstring."""
        xp = namespace(u, *self.fields)
        u = xp.broadcast_to(u, np.broadcast_shapes(np.shape(u), self.shape))
        shift, log_weight = self._components(u.shape)
        outer, p = (xp.broadcast_to(a, u.shape) for a in (self.outer_rate, self.rate))
        safe = xp.where(p > 0, p, 1.0)

        def forward(u: Array) -> Tails:
            x = _position(u, shift, log_weight)
            near = log_weight + log_saturating_tail(x - shift, shift)
            density = logsumexp(log_weight + log_normal_density(x - shift))
            return logsumexp(near), density + log_mills(x)

        def backward(u: Array) -> Tails:
            x = _position(-u, shift, log_weight)
            tilted = log_weight + shift * (x - 0.5 * shift)
            share = tilted - logsumexp(tilted)
            beyond = log_normal_density(x) + log_mills(shift - x)
            return logsumexp(share + log_lost(-x, shift)), logsumexp(share + beyond)

        both = sampled_tails(forward, u, safe, backward)
        first, second = (scaled(tails, outer, p) for tails in both)
        return first, second

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`."""
        return sampled_displacement(u, self.rate)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact up to quadrature error."""
        xp = namespace(t, *self.fields)
        shift, log_weight = self._components(t.shape)
        rate = Rate.of(xp.broadcast_to(self.rate, t.shape))
        panels = rule.quadrature.num_panels * (2 + len(self.shifts))
        finer = Quadrature(panels, rule.quadrature.nodes_per_panel)

        def log_parts(x: Array) -> tuple[Array, Array]:
            """Log-ratio of P to Q and log-density of Q at x."""
            spread = (len(shift), *(1,) * (x.ndim - 1), -1)
            loss = _loss(x, shift.reshape(spread), log_weight.reshape(spread))
            return real_log_mixture(loss, rate), -0.5 * x * x - LOG_SQRT_2PI

        windows, bumps = _windows(t, shift, log_weight, rate, rule.direction)
        floor = xp.full_like(t, -xp.inf)
        own = rule._replace(quadrature=finer)
        excess = log_integral(log_parts, windows, bumps, floor, t, own)
        weight, never = rate.log + log_weight, xp.zeros_like(t) > 0
        bounded = (rate.rate < 1) & (rule.direction == "backward")
        rounds = xp.where(bounded, 0.0, 1.0)
        return unless_gaussian(
            never, weight, 0.5 * shift * shift, t, excess, rounds=rounds
        )

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`; as of the sampled Gaussian."""
        xp = namespace(*self.fields, rule.backward, rule.log_cut)
        shift, log_weight = self._components(self.shape)
        rate = Rate.of(self.rate + xp.zeros(self.shape))
        kink = _kink(shift, log_weight, rate)
        columns = shift[:, None], log_weight[:, None]
        reach = xp.sqrt(-2 * rule.log_cut)
        above = xp.maximum(rate.log + log_weight - rule.log_cut[:, None], 1.0)
        high = xp.maximum(reach, xp.max(shift + xp.sqrt(2 * above), axis=1))
        low = xp.where(rule.backward > 0, -reach, xp.maximum(-reach, FURTHEST_LEFT))
        return nodes_on_line(
            (low, high),
            kink,
            shift[-1],
            rule,
            lambda x: _complex_loss(x, *columns, rate, kink),
            lambda x: real_log_mixture(_loss(x, *columns), rate),
        )

    def mixture(self) -> MixturePair:
        """See `PrivacyLoss`."""
        shift, log_weight = self._components(())
        rate, without = float(self.rate), (0.0,) * (len(shift) + 1)
        return MixturePair(
            (1 - rate, *(rate * np.exp(log_weight)).tolist()),
            (0.0, *shift.tolist()),
            without,
            float(_position(np.zeros(()), shift, log_weight)),
        )

    def bulk_loss(self) -> Array:
        """The loss of not being drawn, where that is the rule."""
        return undrawn_loss(self.outer_rate, self.rate)

    def _components(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Shifts, ascending, and log-weights, with a first axis for the components."""
        xp = namespace(*self.fields)
        shift, log_weight = (
            self.stacked(a, shape) for a in (self.shifts, self.log_weights)
        )
        # Padding components equal the last one.
        largest = xp.max(xp.where(log_weight > -xp.inf, shift, 0.0), axis=0)
        return xp.where(log_weight > -xp.inf, shift, largest), log_weight

    def _largest(self) -> Array:
        xp = namespace(*self.fields)
        largest = xp.zeros(())
        for shift, weight in zip(self.shifts, self.log_weights, strict=True):
            largest = xp.maximum(largest, xp.where(weight > -xp.inf, shift, 0.0))
        return largest


def _loss(x: Array, shift: Array, log_weight: Array) -> Array:
    """``log sum_i w_i e^{c_i x - c_i²/2}``, the components first."""
    xp = namespace(x, shift)
    tilt = shift * (x - 0.5 * shift)
    small = xp.max(xp.abs(tilt), axis=0) < 0.5
    near = xp.sum(xp.exp(log_weight) * xp.expm1(xp.where(small, tilt, 0.0)), axis=0)
    return xp.where(small, xp.log1p(near), logsumexp(log_weight + tilt))


def _kink(shift: Array, log_weight: Array, rate: Rate) -> Array:
    """From where on the largest shift has half of P's density or more; (n,)."""
    xp = namespace(shift)
    every = xp.concatenate([xp.zeros_like(shift[:1]), shift])
    weight = xp.concatenate([rate.log_rest[None], rate.log + log_weight])
    weight = xp.maximum(weight - 0.5 * every * every, -1e300)
    largest = shift[-1]
    is_largest = every >= largest
    top = logsumexp(xp.where(is_largest, weight, -xp.inf))
    gap = xp.where(is_largest, 1.0, largest - every)
    kinks = xp.where(is_largest, -xp.inf, (weight - top) / gap)
    start = xp.clip(xp.max(kinks, axis=0), -1e9, 1e9)

    def improve(_: Any, x: Array) -> Array:
        """Newton's method on a concave function, from its left."""
        others = xp.where(is_largest, -xp.inf, weight + every * x)
        total = logsumexp(others)
        mean = xp.sum(xp.exp(others - total) * every, axis=0)
        return xp.minimum(x + (total - top - largest * x) / (largest - mean), 1e9)

    return xp.maximum(fori_loop(xp, 0, _KINK_STEPS, improve, start), -20.0)


def _complex_loss(
    x: Pair, shift: Array, log_weight: Array, rate: Rate, kink: Array
) -> Pair:
    """``log(1 - p + p sum_i w_i e^{c_i x - c_i²/2})`` on a path; x is (J, n)."""
    xp = namespace(x[0], shift)
    tilt, angle = shift * (x[0] - 0.5 * shift), shift * x[1]
    log_share = rate.log + log_weight
    # Without cancellation where the loss is small ...
    gained = expm1_complex(xp.minimum(tilt, 1.0), angle)
    near = tuple(xp.sum(xp.exp(log_share) * part, axis=0) for part in gained)
    is_near = (xp.max(tilt, axis=0) < 1.0) & (near[0] ** 2 + near[1] ** 2 < 0.25)
    near = log1p_complex(*(xp.where(is_near, part, 0.0) for part in near))
    # ... elsewhere by the largest term, behind the kink with its angle.
    terms = log_share + tilt
    most = xp.maximum(xp.max(terms, axis=0), rate.log_rest)
    common = xp.where(x[0] > kink, shift[-1] * x[1], 0.0)
    re, im = polar(rate.log_rest - most, -common)
    parts = polar(terms - most, angle - common)
    re, im = log_complex(re + xp.sum(parts[0], axis=0), im + xp.sum(parts[1], axis=0))
    return (
        xp.where(is_near, near[0], most + re),
        xp.where(is_near, near[1], common + im),
    )


def _position(loss: Array, shift: Array, log_weight: Array) -> Array:
    """The x at which the loss is what is given."""
    xp = namespace(loss, shift)
    # Every component alone is a lower bound, the largest an upper one.
    alone = (loss + 0.5 * shift * shift - xp.maximum(log_weight, -1e300)) / shift
    high = xp.min(alone, axis=0)
    low = xp.min(loss / shift + 0.5 * shift, axis=0)

    def improve(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        x, _ = state
        tilted = log_weight + shift * (x - 0.5 * shift)
        share = xp.exp(tilted - logsumexp(tilted))
        slope = xp.sum(share * shift, axis=0)
        moved = x - (_loss(x, shift, log_weight) - loss) / slope
        moved = xp.clip(moved, low, high)
        return moved, xp.abs(moved - x)

    def settled(state: tuple[Array, Array]) -> bool:
        x, moved = state
        return bool(np.all(moved <= 4e-16 * np.abs(x)))

    start = (xp.maximum(high, low), xp.full_like(loss, xp.inf))
    return fori_loop(xp, 0, _NEWTON_STEPS, improve, start, settled)[0]


def log_lost(t: Array, width: Array) -> Array:
    """``log(phi(t) (m(t) - m(t + width)))`` for any t and any width > 0."""
    xp = namespace(t, width)
    t, width = xp.broadcast_arrays(t, width)
    # Left of -1, and t + width as well: -expm1(z) + phi(t) (m(-t-width) - m(-t)), z =
    # width (t + width / 2).
    left = (t < -1) & (t + width < 0)
    edge = xp.where(left, t, -2.0)
    step = xp.where(left, width, 1.0)
    z = step * (edge + 0.5 * step)
    rest = log_normal_density(edge) + log_mills_difference(-edge - step, step)
    inside = xp.log(-xp.expm1(z) + xp.exp(rest))
    return xp.where(left, inside, log_saturating_tail(xp.where(left, 0.0, t), width))


def _windows(
    t: Array, shift: Array, log_weight: Array, rate: Rate, direction: str
) -> tuple[Windows, Array]:
    """Where the integrand has weight; see `sampled_gaussian`.

    A bump sits where x is the slope of the exponent, which is alpha times a mean of the
    shifts, 0 among them.
    """
    xp = namespace(t, shift)
    alpha, zero, largest = 1 + t, xp.zeros_like(t), shift[-1]
    every = xp.concatenate([zero[None], shift])
    weight = xp.concatenate([rate.log_rest[None], rate.log + log_weight])

    def mean(x: Array) -> tuple[Array, Array]:
        """Mean and variance of the shifts, weighted as they are at x; x is (k, n)."""
        terms = weight[:, None] + every[:, None] * (x - 0.5 * every[:, None])
        share = xp.exp(terms - logsumexp(terms))
        first = xp.sum(share * every[:, None], axis=0)
        return first, xp.sum(share * (every[:, None] - first) ** 2, axis=0)

    centers = [zero, *shift, *(2 * shift)]
    if direction == "forward":

        def rise(x: Array) -> tuple[Array, Array]:
            first, second = mean(x)
            return alpha * first, alpha * second

        top = alpha * largest
        centers += [*settle(rise, alpha * every, zero, top), top]
    else:

        def fall(x: Array) -> Array:
            return -t * mean(x[None])[0][0]

        centers += [only_root(fall, -t * largest, zero)]
    kinks = []
    for i in range(len(every) - 1):
        gap = xp.maximum(every[i + 1] - every[i], 1e-6 * largest)
        height = 0.5 * (every[i + 1] ** 2 - every[i] ** 2)
        kink = (
            xp.maximum(weight[i], -1e6) - xp.maximum(weight[i + 1], -1e6) + height
        ) / gap
        kink = xp.clip(kink, -1e12, 1e12)
        kinks.append(transitions(kink - xp.log(alpha) / gap, kink, gap))
    return windows_around(centers, *kinks)

"""Mechanisms whose dominating pairs are mixtures of Gaussians on a line.

Each constructs one or two `Half` pairs, which compute profiles, moments and nodes.
References: docs/theory.md; docs/proofs.md; Balle, Barthe, Gaboardi (2018),
arXiv:1807.01647v2, Theorem 2.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    MOST_NODES,
    excess_of,
    sum_of,
    unless_gaussian,
)
from jaxdp_episodic.accountant.losses.gaussian import (
    CANCELLATION,
    LARGEST,
    GaussianLoss,
    SampledGaussianLoss,
    mixture_excess,
    positive,
    scaled,
)
from jaxdp_episodic.accountant.losses.loss_nodes import (
    LossNodes,
    NodeRule,
    log_normal,
    two_sided,
)
from jaxdp_episodic.accountant.losses.mixture_halves import (
    LOG_ZERO,
    PROFILE_ERROR,
    Half,
    Sheet,
    log_rest,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Bounds,
    Hints,
    MomentRule,
    Nodes,
    NoisyLoss,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, stored
from jaxdp_episodic.accountant.numerics.special import LOG_SQRT_2PI

# Largest order, minus 1, for which moments of a "fall" are computed; beyond it they are
# inf. There the largest losses begin more than 16 / shift from the kink, within a width
# of 1 / shift, where panels are 20 / shift long: moments were up to 5e-5 too small.
_LARGEST_FALLING_T = 4e5
# Log-weight below which a component has no influence on where searches start.
_RARE = -70.0


class MixtureLoss(GaussianLoss, Nodes):
    """Base of the mechanisms whose pairs consist of `Half` pairs."""

    forward_is_larger: ClassVar[bool] = True
    has_lattice: ClassVar[bool] = True
    MOVE: ClassVar[float] = 1.0  # distance that weight moves, over the shift

    @abc.abstractmethod
    def halves(self, *fields: Array) -> tuple[Half, ...]:
        """Returns the forward and the backward half, or one for both directions."""

    @functools.cached_property
    def _both_halves(self) -> tuple[Half, ...]:
        return self._halves_of(self.shape)

    def both_halves(self, shape: tuple[int, ...] | None = None) -> tuple[Half, ...]:
        """Returns `halves` of the fields, broadcast and clipped for kernels."""
        # JAX's arrays must not outlive the branch or loop that computes them.
        if shape is None and namespace(*self.fields) is np:
            return self._both_halves
        return self._halves_of(self.shape if shape is None else shape)

    def _halves_of(self, shape: tuple[int, ...]) -> tuple[Half, ...]:
        xp, kept = namespace(*self.fields), []
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if np.shape(value) != shape:
                value = xp.broadcast_to(value, shape)
            most = 1.0 if field.name.endswith("rate") else LARGEST
            kept.append(positive(value, most))
        return self.halves(*kept)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: the last moved component over Q's component at 0."""
        xp, half = namespace(*self.fields), self.both_halves()[0]
        odds = self.rate_within / xp.maximum(xp.exp(half.q_zero), 1e-20)
        return Hints(self.rate_within, odds, self.shift, self.shift)

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: finite backward for a "fall" if Q keeps N(0)."""
        half = self.both_halves()[-1]
        return half.largest_loss() if backward else np.full(self.shape, np.inf)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`."""
        xp = namespace(u, *self.fields)
        shape = np.broadcast_shapes(np.shape(u), self.shape)
        u = xp.minimum(xp.broadcast_to(u, shape), LARGEST)
        factors = [xp.broadcast_to(rate, shape) for rate in self.rates.values()]
        factors.append(xp.broadcast_to(self.shift, shape))
        found = [scaled(half.tails(u), *factors) for half in self.both_halves(shape)]
        return found[0], found[-1]

    def profile_error(self) -> Array:
        """See `Profile`."""
        return np.full(self.shape, PROFILE_ERROR)

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`: u is inexact near the largest backward loss."""
        xp = namespace(u, *self.fields)
        largest = -xp.expm1(-self.largest_loss(backward=True))
        displaced = CANCELLATION * xp.minimum(-xp.expm1(-u), largest)
        return xp.where(largest < 1, displaced, 0.0)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact up to quadrature error."""
        xp = namespace(t, *self.fields)
        loss, backward = self, rule.direction == "backward"
        if self.shape != t.shape:
            loss = self.map(lambda field: xp.broadcast_to(field, t.shape))
        half, *others = halves = loss.both_halves()
        ways = ["forward", "backward"] if others else ["symmetric"]
        excess: Any = None
        for one, way in zip(halves, ways[:: 1 - 2 * backward], strict=True):
            own = one.excess(t, rule._replace(direction=way), one.floor())
            excess = own if excess is None else sum_of(excess, own)
        start, end = half.moves
        is_gaussian, last = (len(start) == 1) & (half.move[0] >= 0), halves[-1]
        ends = last.falls & (last.q_zero > 0.5 * LOG_ZERO) & backward
        if last.falls and backward:
            excess = xp.where(t > _LARGEST_FALLING_T, xp.inf, excess[0]), *excess[1:]
        return unless_gaussian(
            is_gaussian,
            half.move,
            0.5 * (end - start) ** 2,
            t,
            excess,
            rounds=xp.where(ends, 0.0, 1.0),
        )

    def largest_on_lattice(self, rule: Quadrature) -> Array:
        """See `Moments`."""
        xp, largest = namespace(*self.fields), []
        for half in self.both_halves():
            most = xp.max(half.centers, axis=0)
            ends = most, 2 * most - xp.min(half.centers, axis=0)  # of orders 1 and 2
            least, next_ = (half.half_line(x, rule.lattice).number for x in ends)
            t = (MOST_NODES - least) / (next_ - least)
            largest.append(xp.where(t < 1, 0.0, t))
        return xp.min(xp.stack(largest), axis=0)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`: from two half-lines, or one and its mirror image."""
        xp, halves = namespace(rule.backward, *self.fields), self.both_halves()

        def joined(*a: Array) -> Array:
            return xp.concatenate(a, axis=-1)

        first, many = 1 - rule.backward, len(halves)
        above = whole = joined(first, 1 - first)
        if many == 1:
            whole, above = 1 + 0 * first, joined(1 + 0 * first, 0 * first)
        cut, height = (joined(*[a] * many) for a in (rule.log_cut, rule.height))
        rows = max(len(half.centers) for half in halves)
        sheet = Sheet(*map(joined, *(half.sheet(rows) for half in halves)))
        path = sheet.path(whole, rule._replace(log_cut=cut, height=height))
        parts = xp.split(path[0][0][:, -1], many, axis=-1)
        ends = (half.log_parts(x) for half, x in zip(halves, parts, strict=True))
        given = *path, tuple(map(joined, *ends))
        x, element, y, base, end = (
            tuple(joined(*[a] * (3 - many)) for a in pair) for pair in given
        )
        density: Any = tuple(map(xp.add, log_normal(x), base))
        log_weight = end[1] + LOG_SQRT_2PI + above * end[0]
        end_loss = (2 * above - 1) * end[0]
        return stored(xp, two_sided(y, density, element, above, log_weight, end_loss))

    def gaussian_shift(self) -> Array:
        """See `Nodes`: one component that moves as a whole."""
        xp = namespace(*self.fields)
        alone = self.terms_of_profile == 1
        whole = alone & (self.rate_within >= 1) & ~self.loses_nothing
        return xp.where(whole, self.MOVE * self.shift, 0.0)


@dataclass(frozen=True)
class SwappedGaussianLoss(MixtureLoss):
    """A contribution that is replaced by another one with probability eta."""

    # Both profiles equal the forward one of the sampled Gaussian. For both relations,
    # for sampling without replacement and steps that are clipped as a whole.

    rate: Array  # eta in [0, 1], at the clip level and below it
    shift: Array  # s >= 0, the full move: twice the clip norm over the noise
    is_symmetric: ClassVar[bool] = True

    def halves(self, rate: Array, shift: Array) -> tuple[Half]:
        """See `MixtureLoss`."""
        move = namespace(rate).log(rate)
        return (Half.rising(shift[None], move[None], 0 * rate, log_rest(rate)),)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; panels of the sampled Gaussian need fewer operations."""
        if not rule.quadrature.num_panels:
            return super().log_excess(t, rule)
        symmetric = rule._replace(direction="symmetric")
        return mixture_excess(t, self.rate, self.shift, symmetric)


@dataclass(frozen=True)
class AntipodalGaussianLoss(MixtureLoss):
    """A sampled contribution whose sign may flip."""

    # P = (1-p) N(0) + p (1-r) N(-s) + p r N(s), Q = (1-p) N(0) + p N(-s).

    rate: Array  # p in [0, 1], of the clip unit
    inner_rate: Array  # r in [0, 1], within the clip unit
    shift: Array  # s >= 0, the clip norm over the noise
    is_symmetric: ClassVar[bool] = True
    MOVE: ClassVar[float] = 2.0

    def halves(self, rate: Array, inner_rate: Array, shift: Array) -> tuple[Half]:
        """See `MixtureLoss`."""
        xp = namespace(rate, inner_rate)
        drawn, rest = xp.log(rate), log_rest(rate)
        move, kept = drawn + xp.log(inner_rate), drawn + log_rest(inner_rate)
        one = -shift[None], shift[None], move[None], rest, drawn[None], rest, kept[None]
        return (Half("turn", *one),)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; at most a bound of docs/proofs.md, "Very little noise"."""
        xp, found = namespace(t, *self.fields), super().log_excess(t, rule)
        if not rule.quadrature.num_panels:  # what overflows there is left to panels
            return found
        half = self.both_halves(t.shape)[0]
        size, lost = 0.5 * half.high[0] ** 2, -half.q_zero
        single = t * (size * (1 + t) + lost), size * (1 + 2 * t) + lost
        moved, *slopes = excess_of(*single, 2 * size, rule.with_derivatives)
        bound = xp.logaddexp(half.q_low[0] + moved, t * lost + xp.log(t * (1 + lost)))
        pairs = zip(found, (bound, *slopes), strict=True)
        return tuple(xp.where(bound < found[0], b, a) for a, b in pairs)


@dataclass(frozen=True)
class ZeroedGaussianLoss(MixtureLoss):
    """A sampled contribution that is 0 if it is that of a null record."""

    # The two directions have different pairs (docs/proofs.md, "The zero-out relation"):
    # forward P1 = (1-p) N(0) + p (1-r) N(-s) + p r N(s) against Q1 = (1-p+pr) N(0) + p
    # (1-r) N(-s); backward Q2 = (1-p+pr) N(0) + p (1-r) N(s) against P2 = (1-p) N(0) +
    # p N(s).

    rate: Array  # p in [0, 1], of the clip unit under Poisson sampling; else 1
    inner_rate: Array  # r in [0, 1], of the privacy unit if the clip unit is sampled
    shift: Array  # s >= 0, the clip norm over the noise
    is_symmetric: ClassVar[bool] = False

    def halves(self, rate: Array, inner_rate: Array, shift: Array) -> tuple[Half, Half]:
        """See `MixtureLoss`."""
        xp = namespace(rate, inner_rate)
        drawn, absent = xp.log(rate), log_rest(rate)
        move = (drawn + xp.log(inner_rate))[None]
        kept = (drawn + log_rest(inner_rate))[None]
        null = xp.log((1 - rate) + rate * inner_rate)
        low = -shift[None]
        up = Half.rising(shift[None], move, null, absent, low, kept)
        fall = low, low[:0], move, absent, drawn[None], null, kept
        return up, Half("fall", *fall)


@dataclass(frozen=True)
class GaussianMixtureLoss(MixtureLoss):
    """``(1-p) N(0) + p sum_i w_i N(shift_i)`` against ``N(0)``."""

    # A mixture of vectors is dominated by the mixture of their norms: Choquette-Choo et
    # al. (2023), arXiv:2310.15526, Corollary 4.7.

    rate: Array  # p in [0, 1]
    shifts: tuple[Array, ...]  # each > 0, ascending
    log_weights: tuple[Array, ...]  # of the w_i, which add up to 1
    is_symmetric: ClassVar[bool] = False
    padding: ClassVar[dict[str, float]] = {"shifts": 1.0, "log_weights": -np.inf}

    @property
    def terms_of_profile(self) -> int:
        """See `Profile`: every shift."""
        return len(self.shifts)

    def kept_in_range(self) -> Self:
        """See `PrivacyLoss`."""
        rate = super(NoisyLoss, self).kept_in_range().rate
        least, most = self.SMALLEST_LOSS, self.LARGEST_LOSS
        shifts = tuple(np.clip(s, least, most) for s in self.shifts)
        return dataclasses.replace(self, rate=rate, shifts=shifts)

    def _halves_of(self, shape: tuple[int, ...]) -> tuple[Half, ...]:
        xp = namespace(*self.fields)
        shift, weight = (
            self.stacked(a, shape) for a in (self.shifts, self.log_weights)
        )
        return self.halves(xp.broadcast_to(self.rate, shape), shift, weight)

    def halves(self, rate: Array, shift: Array, weight: Array) -> tuple[Half, ...]:
        """See `MixtureLoss`."""
        xp = namespace(rate, shift)
        rate, shift = positive(rate, 1.0), positive(shift, LARGEST)
        # Padding: components without a weight are placed at the largest shift.
        there = weight > 0.5 * LOG_ZERO
        most = xp.max(xp.where(there, shift, 0.0), axis=0)
        shift = xp.where(there, shift, most)
        move = xp.log(rate) + xp.maximum(weight, LOG_ZERO)
        none, rest = xp.full_like(move, LOG_ZERO), log_rest(rate)
        up = Half.rising(shift, move, 0 * rate, rest)
        return up, Half("fall", -shift, shift[:0], move, rest, move, 0 * rate, none)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: the mean shift, and the largest one that is not rare."""
        xp, mean, furthest = namespace(*self.fields), 0.0, 0.0
        for shift, weight in zip(self.shifts, self.log_weights, strict=True):
            mean = mean + xp.exp(weight) * shift
            often = weight > _RARE
            furthest = xp.maximum(furthest, xp.where(often, shift, 0.0))
        return super().hints()._replace(shift=mean, furthest=furthest)

    def bulk(self) -> tuple[Array, Array]:
        """See `Nodes`: as if there were one shift."""
        return SampledGaussianLoss(self.outer_rate, self.rate, self.shift).bulk()

    @property
    def shift(self) -> Array:
        """The largest shift with a weight."""
        xp = namespace(*self.fields)
        parts = zip(self.shifts, self.log_weights, strict=True)
        there = [xp.where(weight > -xp.inf, shift, 0.0) for shift, weight in parts]
        return functools.reduce(xp.maximum, there)


@dataclass(frozen=True)
class ReplacedMixtureLoss(GaussianMixtureLoss):
    """``(1-p) N(0) + p sum_i w_i N(shift_i)`` against its mirror image."""

    is_symmetric: ClassVar[bool] = True
    MOVE: ClassVar[float] = 2.0

    def halves(self, rate: Array, shift: Array, weight: Array) -> tuple[Half, ...]:
        """See `MixtureLoss`."""
        up, fall = super().halves(rate, shift, weight)
        move, rest = up.move, up.p_zero
        return (Half("turn", fall.low, up.high, move, rest, move, rest, fall.p_low),)

    def bulk(self) -> tuple[Array, Array]:
        """See `Nodes`: without the unit the loss is near 0."""
        return super(GaussianMixtureLoss, self).bulk()


# --- A Poisson sample of clip units, truncated at random to a largest batch size ---
# Reference: docs/proofs.md, "A truncated Poisson sample".


@dataclass(frozen=True)
class TruncatedGaussianLoss(GaussianLoss, Bounds):
    """A truncated Poisson sample under add_remove: a mixture of two pairs.

    If the other units do not fill the batch, the pair is that of Poisson sampling; if
    they do, the unit takes the place of another one.
    """

    log_whole: Array  # log of the probability that the others do not fill the batch
    log_cut: Array  # log of the probability that they do
    rate: Array  # in [0, 1], of the Poisson sample
    cut_rate: Array  # r in [0, 1], of the unit in a full batch
    shift: Array  # s >= 0, the clip norm over the noise
    sure: Array  # factor of whole, cut, cut_rate that makes lower bounds
    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True

    @property
    def chance(self) -> Array:
        """Probability that the unit is in the batch."""
        xp = namespace(*self.fields)
        whole = xp.exp(self.log_whole) * self.rate
        return whole + xp.exp(self.log_cut) * self.cut_rate

    @functools.cached_property
    def loses_nothing(self) -> Array:
        """Whether neither pair that can occur loses."""
        return np.equal(self.largest_loss(backward=False), 0)

    def parts(self) -> tuple[GaussianLoss, GaussianLoss]:
        """Returns the pairs if the batch is not full, and if it is."""
        one = self.outer_rate
        return (
            SampledGaussianLoss(one, self.rate, self.shift),
            SampledGaussianLoss(one, self.cut_rate, 2 * self.shift),
        )

    def certified(self, *, up: bool) -> Self:
        """See `Bounds`: the fields are upper bounds; times ``sure`` lower ones."""
        if up:
            return self
        with np.errstate(divide="ignore"):
            less = np.log(self.sure)
        whole, cut = self.log_whole + less, self.log_cut + less
        rate = self.cut_rate * self.sure
        return dataclasses.replace(self, log_whole=whole, log_cut=cut, cut_rate=rate)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: replacing another unit has the largest shift."""
        xp = namespace(*self.fields)
        swap = xp.where(self.log_cut > -xp.inf, 2 * self.shift, self.shift)
        return Hints(self.chance, self.chance, self.shift, swap)

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: the larger one of the pairs that can occur."""
        most = 0.0
        logs = self.log_whole, self.log_cut
        for log_weight, part in zip(logs, self.parts(), strict=True):
            lost = np.where(part.loses_nothing, 0, part.largest_loss(backward=backward))
            most = np.maximum(most, np.where(log_weight > -np.inf, lost, 0.0))
        return np.asarray(most)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`: means over the two pairs."""
        xp = namespace(u, *self.fields)

        def mean(whole: Array, cut: Array) -> Array:
            return xp.logaddexp(self.log_whole + whole, self.log_cut + cut)

        both = zip(*(part.log_tails(u) for part in self.parts()), strict=True)
        forward, backward = (tuple(map(mean, *tails)) for tails in both)
        return forward, backward

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`: the larger one."""
        whole, cut = (part.tail_displacement(u) for part in self.parts())
        return namespace(u, *self.fields).maximum(whole, cut)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`: the mean, as moments are linear in the profile."""
        (whole, *first), (cut, *second) = (
            part.log_excess(t, rule) for part in self.parts()
        )
        whole, cut = self.log_whole + whole, self.log_cut + cut
        return sum_of((whole, *first), (cut, *second))


@dataclass(frozen=True)
class ReplacedTruncatedLoss(TruncatedGaussianLoss):
    """A truncated Poisson sample under replace_one."""

    is_symmetric: ClassVar[bool] = True

    def parts(self) -> tuple[GaussianLoss, GaussianLoss]:
        """Returns the antipodal and the swapped pair."""
        one = self.outer_rate
        return (
            AntipodalGaussianLoss(one, self.rate, one, self.shift),
            SwappedGaussianLoss(one, self.cut_rate, 2 * self.shift),
        )


@dataclass(frozen=True)
class ZeroedTruncatedLoss(TruncatedGaussianLoss):
    """A truncated Poisson sample under zero_out."""

    is_symmetric: ClassVar[bool] = False

    def parts(self) -> tuple[GaussianLoss, GaussianLoss]:
        """Returns the sampled pair, and the zeroed one in place of another unit."""
        one = self.outer_rate
        return (
            SampledGaussianLoss(one, self.rate, self.shift),
            ZeroedGaussianLoss(one, one, self.cut_rate, self.shift),
        )

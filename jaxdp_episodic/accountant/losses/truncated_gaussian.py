"""A Poisson sample of the clip unit, cut to a fixed size at random; Gaussian noise."""

# Reference: docs/proofs.md, "A Poisson sample that is cut".

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import sum_of
from jaxdp_episodic.accountant.losses.gaussian import GaussianLoss
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Bounds,
    Hints,
    MomentRule,
    Tails,
)
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_tail
from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# Relative increase of the weights: twice the error of binomial tails, 1e-10.
_RAISED = 2e-10


@dataclass(frozen=True)
class TruncatedGaussianLoss(GaussianLoss, Bounds):
    """``whole`` of a Poisson step's pair and ``cut`` of a swap's, under add_remove."""

    whole: Array  # that the others do not fill the batch
    cut: Array  # that they do
    rate: Array  # in [0, 1], of the Poisson sample
    cut_rate: Array  # r in [0, 1], that the unit is in a full batch
    shift: Array  # s >= 0, the clip norm over the noise
    sure: Array  # share of whole, cut, cut_rate that is a lower bound
    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True

    @property
    def chance(self) -> Array:
        """That the unit is in the batch."""
        return self.whole * self.rate + self.cut * self.cut_rate

    def parts(self) -> tuple[GaussianLoss, GaussianLoss]:
        """The pair if the batch is not full, and if it is."""
        one = self.outer_rate
        return (
            SampledGaussianLoss(one, self.rate, self.shift),
            SampledGaussianLoss(one, self.cut_rate, 2 * self.shift),
        )

    def certified(self, *, up: bool) -> Self:
        """See `Bounds`: its fields are upper bounds; below with the lower ones."""
        if up:
            return self
        names = "whole", "cut", "cut_rate"
        less = {name: getattr(self, name) * self.sure for name in names}
        return dataclasses.replace(self, **less)

    def hints(self) -> Hints:
        """The unit in the batch; a swap is the largest shift."""
        xp = namespace(*self.fields)
        swap = xp.where(self.cut > 0, 2 * self.shift, self.shift)
        return Hints(self.chance, self.chance, self.shift, swap)

    def largest_loss(self, *, backward: bool) -> Array:
        """The larger one's, of those that occur."""
        most = 0.0
        for weight, part in zip((self.whole, self.cut), self.parts(), strict=True):
            lost = np.where(part.loses_nothing, 0, part.largest_loss(backward=backward))
            most = np.maximum(most, np.where(weight > 0, lost, 0.0))
        return np.asarray(most)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`: weighted means."""
        xp = namespace(u, *self.fields)
        whole, cut = (part.log_tails(u) for part in self.parts())
        log_whole, log_cut = xp.log(self.whole), xp.log(self.cut)

        def mean(a: Tails, b: Tails) -> Tails:
            profile, tail = (
                xp.logaddexp(log_whole + x, log_cut + y)
                for x, y in zip(a, b, strict=True)
            )
            return profile, tail

        return mean(whole[0], cut[0]), mean(whole[1], cut[1])

    def tail_displacement(self, u: Array) -> Array:
        """The larger one's."""
        whole, cut = (part.tail_displacement(u) for part in self.parts())
        return namespace(u, *self.fields).maximum(whole, cut)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`: linear in the profiles, so a mean like them."""
        xp = namespace(t, *self.fields)
        (whole, *first), (cut, *second) = (
            part.log_excess(t, rule) for part in self.parts()
        )
        whole, cut = xp.log(self.whole) + whole, xp.log(self.cut) + cut
        return sum_of((whole, *first), (cut, *second))


@dataclass(frozen=True)
class ReplacedTruncatedLoss(TruncatedGaussianLoss):
    """The same under replace_one."""

    is_symmetric: ClassVar[bool] = True

    def parts(self) -> tuple[GaussianLoss, GaussianLoss]:
        """The antipodal and the swapped pair."""
        one = self.outer_rate
        return (
            AntipodalGaussianLoss(one, self.rate, one, self.shift),
            SwappedGaussianLoss(one, self.cut_rate, 2 * self.shift),
        )


@dataclass(frozen=True)
class ZeroedTruncatedLoss(TruncatedGaussianLoss):
    """The same under zero_out."""

    is_symmetric: ClassVar[bool] = False

    def parts(self) -> tuple[GaussianLoss, GaussianLoss]:
        """The sampled pair and, drawn in somebody's place, the zeroed one."""
        one = self.outer_rate
        return (
            SampledGaussianLoss(one, self.rate, self.shift),
            ZeroedGaussianLoss(one, one, self.cut_rate, self.shift),
        )


def cut_weights(
    population: np.ndarray, batch_size: np.ndarray, rate: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``P(M < b)``, ``P(M >= b)``, r, and the share of each that is a lower bound."""
    # r = E[q b / (M + 1) | M >= b] = b P(Binomial(N, q) > b) / (N P(M >= b)); the share
    # is within 1e-9 of 1, but for populations of 1e8 whose batch is hardly ever full.
    n, b, q = np.broadcast_arrays(population, batch_size, rate)
    inside = (q > 0) & (q < 1)
    p = np.where(inside, q, 0.5)
    others = n - 1
    never, always = q <= 0, others >= b

    def weights(side: str, other: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        whole = np.exp(log_binomial_tail(others - b + 1, others, 1 - p, side=side))
        cut, beneath = (
            np.exp(log_binomial_tail(b, others, p, side=one)) for one in (side, other)
        )
        joint = np.exp(log_binomial_tail(b + 1, n, p, side=side)) * b / n
        whole = np.where(inside, whole, np.where(never, b > 0, ~always))
        cut = np.where(inside, cut, np.where(never, b <= 0, always))
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = np.where(inside, joint / beneath, np.where(never, 0.0, b / n))
        # With the unit at least b + 1 are drawn.
        drawn = np.minimum(np.where(np.isnan(drawn), np.inf, drawn), q * b / (b + 1))
        return whole, cut, drawn

    whole, cut, drawn = weights("upper", "lower")
    whole, cut = (np.minimum(weight * (1 + _RAISED), 1.0) for weight in (whole, cut))
    drawn = np.minimum(drawn * (1 + 2 * _RAISED), q)
    sure = np.ones(n.shape)
    for most, least in zip((whole, cut, drawn), weights("lower", "upper"), strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(most > 0, least / most * (1 - 2 * _RAISED), 1.0)
        sure = np.minimum(sure, np.where(np.isnan(share), 0.0, share))
    return whole, cut, drawn, np.where(inside, sure, 1 - 4 * _RAISED)

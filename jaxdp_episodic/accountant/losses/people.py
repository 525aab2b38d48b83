"""What a step tells of a person who may be in several of its clip units."""

# Reference: docs/proofs.md, "People in many units".

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses import people_moments, people_nodes
from jaxdp_episodic.accountant.losses.excess import LARGE_LOSS
from jaxdp_episodic.accountant.losses.gaussian import GaussianLoss, positive, scaled
from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.losses.mixture_halves import PROFILE_ERROR
from jaxdp_episodic.accountant.losses.people_components import Components
from jaxdp_episodic.accountant.losses.privacy_loss import Hints, MomentRule, Tails
from jaxdp_episodic.accountant.losses.protocols import Nodes
from jaxdp_episodic.accountant.losses.sampled import sampled_displacement
from jaxdp_episodic.accountant.numerics.loops import Array, logsumexp

# Components are left out up to this share of delta, which is then added to it.
_TRUNCATED_SHARE = 1e-9
# Displacement of losses by the rounding of a root, over 1 + u: the largest of 400 that
# were compared with 50 digits. Of large losses methods add more.
_ROOT_ROUNDING = 4e-16
# Rounding of the logarithm of a mass over the square that is in it and not in the mass:
# a unit in the last place. Delta at 5,000 shifts was 3e-11 too small, a hundredth.
_SQUARE_ROUNDING = 2.0**-52


@dataclass(frozen=True)
class PeopleLoss(GaussianLoss, Nodes):
    """Contributions of a person that are 0 where the person's slots are null."""

    # XLA takes half a minute to compile sums of all lengths; NumPy shortens each sum to
    # what counts, and answers in a tenth of a second.

    inner_rate: Array  # q in [0, 1], the largest chance that a unit holds the person
    cover_rate: Array  # e in [0, 1], the sum of the weights; 1 covers nothing
    shift: Array  # s >= 0 of one contribution, the clip norm over the noise
    counts: tuple[Array, ...]  # whole numbers n_i >= 0, as floats; >= 1 where e < 1
    log_weights: tuple[Array, ...]  # of the components
    shares: tuple[Array, ...]  # in [0, 1], chances over q
    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True
    padding: ClassVar[dict[str, float]] = {
        "counts": 1.0,
        "log_weights": -np.inf,
        "shares": 1.0,
    }
    compiles: ClassVar[bool] = False
    # Beyond it rounded squares of shifts are no longer far below the losses.
    LARGEST_LOSS: ClassVar[float] = 1e3

    @property
    def loses_nothing(self) -> Array:
        """Where nothing is drawn, nobody is in it, or the noise is infinite."""
        return super().loses_nothing | np.equal(self._largest_count(), 0)

    def log_kept(self) -> Array:
        """With too little noise any contribution loses everything."""
        seen = np.minimum(self.outer_rate * self.hints().rate * (1 + 1e-12), 1.0)
        with np.errstate(divide="ignore"):
            bare = np.where(self.has_too_little_noise, np.log1p(-seen), -np.inf)
        return np.where(self.is_unprotected, bare, 0.0)

    def hints(self) -> Hints:
        """The mean number of contributions where there are any."""
        rate, mean, most = np.zeros(()), np.zeros(()), np.zeros(())
        for n, log_weight, q in self._parts():
            weight, expected = np.exp(log_weight), n * q
            some = -np.expm1(n * np.log1p(-np.minimum(q, 1 - 1e-16)))
            rate, mean = rate + weight * some, mean + weight * expected
            draws = np.minimum(n, expected + 8 * np.sqrt(expected) + 3)
            most = np.maximum(most, np.where(weight > 0, draws, 0.0))
        rate = np.minimum(rate, 1.0)
        number = np.maximum(mean / np.maximum(rate, 1e-300), 1.0)
        return Hints(rate, rate, self.shift * number, self.shift * most)

    def largest_loss(self, *, backward: bool) -> Array:
        """``(1-e) + e / b_0``, b_0 the chance of no contribution at all."""
        q, e = np.broadcast_arrays(self.inner_rate, self.cover_rate)
        rest = np.zeros(())
        bounded = (q < 1) & (backward and not self.is_symmetric)
        for n, weight, chance in self._parts():
            one = -n * np.log1p(-np.where(bounded, chance, 0.0))
            rest = np.maximum(rest, np.where(weight > -np.inf, one, 0.0))
        loss = np.where(rest < 1, np.log1p(e * np.expm1(np.minimum(rest, 1.0))), rest)
        return np.where(bounded, loss, np.inf)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`: weighted sums of the components'."""
        shape = np.broadcast_shapes(np.shape(u), self.shape)
        u, e, parts = self._components(u, shape)
        factors = self.outer_rate, self.chance, self.shift, self._largest_count()
        factors = [np.broadcast_to(factor, shape) for factor in factors]
        found = []
        for half in parts.halves(e, replaced=self.is_symmetric):
            both = half.tails(u + np.zeros_like(half.q_zero))
            profile, tail = (logsumexp(parts.log_weight + a) for a in both)
            found.append(scaled((profile, tail), *factors))
        return found[0], found[-1]

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`: that of the sampled pair, and of a root's rounding."""
        sampled = sampled_displacement(u, 1.0 - 1e-16 + 0 * self.inner_rate)
        return sampled + _ROOT_ROUNDING * (1 + np.minimum(u, LARGE_LOSS))

    def profile_error(self) -> Array:
        """See `Profile`; squares of all shifts together are added and taken off."""
        most = self._largest_count() * self.shift
        return PROFILE_ERROR + _SQUARE_ROUNDING * most * most

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact up to quadrature error."""
        t, e, parts = self._components(t, np.broadcast_shapes(np.shape(t), self.shape))
        return people_moments.log_excess(t, parts, e, rule, replaced=self.is_symmetric)

    def truncated(
        self, log_goal: np.ndarray, count: np.ndarray
    ) -> tuple[Self, np.ndarray, np.ndarray]:
        """Leaves out components that add a billionth of ``e^log_goal`` at most."""
        shape = np.broadcast_shapes(self.shape, np.shape(log_goal), np.shape(count))
        weights = self.stacked(self.log_weights, shape)
        with np.errstate(divide="ignore"):
            log_count = np.log(count)
        least = log_goal + np.log(_TRUNCATED_SHARE) - log_count
        order = np.argsort(weights, axis=0)
        lost = np.logaddexp.accumulate(np.take_along_axis(weights, order, axis=0))
        gone = lost <= least
        log_added = log_count + np.max(np.where(gone, lost, -np.inf), axis=0)
        left_out = np.zeros(weights.shape, bool)
        np.put_along_axis(left_out, order, gone, axis=0)
        weights = np.where(left_out, -np.inf, weights)
        kept = dataclasses.replace(self, log_weights=tuple(weights))
        return kept, log_added, np.zeros(shape, bool)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`."""
        e, parts = self._components(self.shift, self.shape)[1:]
        return people_nodes.nodes(parts, e, rule, replaced=self.is_symmetric)

    def _components(
        self, u: Array, shape: tuple[int, ...]
    ) -> tuple[Array, Array, Components]:
        """U and e of a shape, and the components."""
        u, q, e, s = (
            np.broadcast_to(a, shape)
            for a in (u, self.inner_rate, self.cover_rate, self.shift)
        )
        count, weight, share = (
            self.stacked(a, shape) for a in (self.counts, self.log_weights, self.shares)
        )
        weight = np.where(share > 0, weight, -np.inf)
        q, e = positive(positive(q, 1.0) * share, 1.0), positive(e, 1.0)
        s = np.clip(np.where(s > 0, s, 1.0), self.SMALLEST_LOSS, self.LARGEST_LOSS)
        return u, e, Components.of(count, weight - np.log(e), q, s)

    def _largest_count(self) -> Array:
        largest = np.zeros(())
        for n, weight, q in self._parts():
            is_there = (weight > -np.inf) & (q > 0)
            largest = np.maximum(largest, np.where(is_there, n, 0.0))
        return largest

    def _parts(self) -> Iterator[tuple[Array, Array, Array]]:
        """Counts, log-weights and chances of the components, one by one."""
        parts = zip(self.counts, self.log_weights, self.shares, strict=True)
        for count, log_weight, share in parts:
            yield count, log_weight, self.inner_rate * share


@dataclass(frozen=True)
class ReplacedPeopleLoss(PeopleLoss):
    """The same where the contributions are replaced by others; symmetric."""

    is_symmetric: ClassVar[bool] = True


@dataclass(frozen=True)
class ReplacedUnitLoss(ReplacedPeopleLoss):
    """Replaced contributions of a unit that is drawn by a coin of its own, not seen."""

    coin_rate: Array  # of that coin
    is_symmetric: ClassVar[bool] = True

    def hints(self) -> Hints:
        """Where the coin has drawn the unit."""
        drawn = super().hints()
        rate = drawn.rate * self.coin_rate
        return drawn._replace(rate=rate, odds=rate)

    def _components(
        self, u: Array, shape: tuple[int, ...]
    ) -> tuple[Array, Array, Components]:
        u, e, parts = super()._components(u, shape)
        coin = positive(np.broadcast_to(self.coin_rate, shape), 1.0)
        return u, e, parts.drawn_by(coin)

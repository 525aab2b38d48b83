"""Independent episodes: a mixture over the number of episodes that hold the unit.

References: docs/proofs.md, "Independent episodes"; Balle, Barthe, Gaboardi (2018),
arXiv:1807.01647v2, Theorems 2 and 10.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.gaussian import GaussianLoss, positive, scaled
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    MixtureLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule, collected
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Nodes,
    Tails,
)
from jaxdp_episodic.accountant.numerics.binomial import log_binomial
from jaxdp_episodic.accountant.numerics.loops import Array, logsumexp
from jaxdp_episodic.accountant.numerics.special import log_expm1

# Largest number of terms of a loss distribution; with more there is no exact answer.
MOST_TERMS = 200
# Terms of a moment this many nats below the sum are left out: hundreds add up to 1e-13.
_NEGLIGIBLE_NATS = 36.0
# Terms are left out up to this share of delta, which is then added to delta.
_TRUNCATED_SHARE = 1e-9
_AT_ONCE = 512  # terms times settings of tails that are computed at once
_LOST_NATS = 46.0  # terms this far below a sum, all together, change no digit of it
# Logarithm below which a tail may be wrong: nobody asks for less than e^-745.
_LEAST_LOG_TAIL = -1500.0
# Largest log-density at which a distribution is truncated, relative to its peak.
_LEAST_CUT = -18.0


@dataclass(frozen=True)
class IndependentEpisodesLoss(GaussianLoss, Nodes):
    """Swaps of J contributions, J ~ Binomial(episodes, rate) episodes with the unit."""

    # Not compiled: most of the terms are negligible, and NumPy leaves these out.

    rate: Array  # eta in [0, 1], probability that a given episode holds the unit
    shift: Array  # s >= 0 of one swapped contribution
    num_episodes: Array  # B, whole numbers >= 1 as floats
    # Largest J that is not truncated.
    kept: Array = np.inf  # pyright: ignore[reportAssignmentType]: broadcasts
    is_symmetric: ClassVar[bool] = True
    compiles: ClassVar[bool] = False

    @property
    def chance(self) -> Array:
        """Probability that at least one episode holds the unit."""
        with np.errstate(divide="ignore"):
            absent = self.num_episodes * np.log1p(-self.rate)
        return self.outer_rate * -np.expm1(absent)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: one swap; at most 8 deviations more than expected."""
        expected = self.num_episodes * self.rate
        draws = np.minimum(self.num_episodes, expected + 8 * np.sqrt(expected) + 3)
        return Hints(self.rate, self.rate, self.shift, self.shift * draws)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`."""
        u, outer, eta, s, episodes, kept = np.broadcast_arrays(u, *self.fields)
        kept, safe = np.minimum(episodes, kept), positive(eta, 1.0)
        log_any = np.log(_log_weight(episodes, episodes, safe)[1])
        last = int(np.max(kept, initial=0.0))
        block, k, left = max(_AT_ONCE // max(s.size, 1), 1), 0, s > 0
        if last > _AT_ONCE:
            most, _ = needed_terms(episodes, 1 - safe, 0 * s + _LEAST_LOG_TAIL)
            k = max(int(np.min(episodes - most)) - 1, 0)
        sums = [np.full((4 - 2 * self.is_symmetric, *s.shape), -np.inf)]
        least = sums[0]
        # Blocks of terms, until the rest, at most P(J > k), is lost in rounding.
        while k < last and np.any(left):
            count = np.arange(k + 1.0, min(k + block, last) + 1)
            count = count.reshape(-1, *(1,) * s.ndim)
            number = np.minimum(count, episodes)
            log_weight, any_rate = _log_weight(episodes, number, safe)
            both = self._one(any_rate, number * s).log_tails(u)
            terms = log_weight + np.array(both[: 2 - self.is_symmetric])
            used = (s > 0) & (count <= kept)
            terms = np.where(used, terms.reshape(-1, *used.shape), -np.inf)
            sums.append(logsumexp(terms, axis=1))
            k, least = k + block, np.logaddexp(least, sums[-1])
            found = np.maximum(np.min(least, axis=0), _LEAST_LOG_TAIL)
            rest = _log_binomial_tail(episodes, safe, 0 * s + k)
            left = (s > 0) & (k < kept) & (rest > found - _LOST_NATS + log_any)
        # All blocks at once: logarithms of partial sums would be rounded.
        both = logsumexp(np.array(sums)).reshape(-1, 2, *s.shape)
        found = [scaled((pair[0], pair[1]), outer, eta, s) for pair in both]
        return found[0], found[-1]

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`: the mean over J, as moments are linear in the profile."""
        # A term that an answer leaves out is bounded by the Gaussian's excess times e1.
        t, _, eta, s, episodes, _ = np.broadcast_arrays(t, *self.fields)
        number = np.maximum(episodes, 1.0).astype(np.int64)
        start = np.cumsum(number) - number
        index = np.repeat(np.arange(t.size), number)
        count = 1.0 + np.arange(index.size) - start[index]
        log_weight, any_rate = _log_weight(episodes[index], count, eta[index])
        log_any, order, shift = np.log(any_rate), 1 + t[index], count * s[index]
        gaussian = 0.5 * shift * shift * order * t[index]
        upper = log_weight + log_any + log_expm1(gaussian)
        # At whole orders, the last and the first term of the binomial expansion. Under
        # zero_out P's and Q's means may be two shifts apart.
        last = order * log_any + log_expm1(gaussian * (1 if self.is_symmetric else 4))
        first = 2 * log_any + log_expm1(shift * shift)
        size = np.maximum(first + np.log(0.5 * order * t[index]), last)
        size = np.minimum(log_weight + size, upper)

        def largest(values: np.ndarray) -> np.ndarray:
            return np.maximum.reduceat(values, start)[index]

        found = np.zeros((1 + 2 * rule.with_derivatives, index.size))
        found[0], left = -np.inf, np.full(index.shape, True)
        # Terms that matter by these sizes; and others that may not be negligible.
        for some, known in ((size, size), (upper, found[0])):
            used = left & (some > largest(known) - _NEGLIGIBLE_NATS)
            one = self._one(any_rate[used], shift[used])
            found[:, used] = one.log_excess(t[index[used]], rule)
            found[0][used] += log_weight[used]
            left &= ~used
        found[0] = np.where(left, upper, found[0])
        peak = np.maximum.reduceat(found[0], start)
        finite = np.where(np.isfinite(peak), peak, 0.0)
        share, found[0] = np.exp(found[0] - finite[index]), 1.0
        found = np.where(share > 0, share * found, 0.0)
        total, *sums = np.add.reduceat(found, start, axis=1)
        return np.log(total) + finite, *(part / total for part in sums)

    def _one(self, any_rate: Array, shift: Array) -> MixtureLoss:
        """Returns the pair of k episodes with the unit, sampled at P(J >= 1)."""
        one = np.ones_like(any_rate)
        return SwappedGaussianLoss(one, any_rate, shift)

    @property
    def num_terms(self) -> Array:
        """See `Nodes`: terms that are not truncated."""
        return np.minimum(self.kept, self.num_episodes)

    def truncated(
        self, log_goal: np.ndarray, count: np.ndarray
    ) -> tuple[Self, np.ndarray, np.ndarray]:
        """Returns the mechanism without terms that add nothing to delta.

        Also the log of the delta that these add in ``count`` steps at most, 1e-9 of the
        goal, and whether ``log_goal`` needs more terms than are possible.
        """
        least = log_goal + np.log(_TRUNCATED_SHARE) - np.log(np.maximum(count, 1.0))
        terms, log_tail = needed_terms(self.num_episodes, self.rate, least)
        with np.errstate(divide="ignore"):
            log_added = np.log(count) + log_tail
        kept = np.minimum(terms, MOST_TERMS)
        return dataclasses.replace(self, kept=kept), log_added, terms > MOST_TERMS

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`: the mixture of the nodes of all terms."""
        backward, log_cut, height, num_nodes, num_terms = rule
        terms = np.arange(1.0, num_terms + 1)[:, None]
        k = np.minimum(terms, self.num_terms)
        log_weight, any_rate = _log_weight(self.num_episodes, k, self.rate)
        # Terms rarer than the truncated probability are left out.
        used = (terms <= self.num_terms) & (log_weight > log_cut[:, None])
        weight = np.where(used, np.exp(log_weight), 0.0)
        log_cut = np.minimum(log_cut[:, None] - log_weight, _LEAST_CUT)

        def flat(a: Array) -> Array:
            """Reshapes (..., terms, m) to (..., terms m) after broadcasting."""
            wide = np.broadcast_to(a, (*a.shape[:-2], *k.shape))
            return wide.reshape(*a.shape[:-2], -1)

        cuts = flat(backward[None]), flat(log_cut), flat(height[:, None])
        one = self._one(flat(any_rate[None]), flat(k * self.shift))
        part = one.nodes(NodeRule(*cuts, num_nodes))

        def apart(a: Array) -> Array:
            """Reshapes (V, J, terms m) to (V, terms J, m)."""
            wide = a.reshape(*a.shape[:2], *k.shape)
            return np.swapaxes(wide, 1, 2).reshape(len(a), -1, k.shape[1])

        each = np.repeat(weight, part.loss[0].shape[1], axis=1)
        ends = np.repeat(np.log(weight), 2, axis=1)
        return collected(
            (apart(part.loss[0]), apart(part.loss[1])),
            (apart(part.weight[0]) * each, apart(part.weight[1]) * each),
            apart(part.end_log_weight) + ends,
            apart(part.end_loss),
        )


@dataclass(frozen=True)
class ZeroedEpisodesLoss(IndependentEpisodesLoss):
    """The same under zero_out: with a null unit an episode contributes 0."""

    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True

    def _one(self, any_rate: Array, shift: Array) -> ZeroedGaussianLoss:
        one = np.ones_like(any_rate)
        return ZeroedGaussianLoss(one, one, any_rate, shift)


def _log_weight(episodes: Array, k: Array, rate: Array) -> tuple[Array, Array]:
    """Returns ``log(P(J = k) / P(J >= 1))`` for a binomial J, and P(J >= 1)."""
    rest, log_absent = episodes - k, np.log1p(-rate)  # -inf at rate 1
    any_rate = -np.expm1(episodes * log_absent)
    log_weight = log_binomial(episodes, k) + k * np.log(rate)
    log_weight += np.where(rest > 0, rest * log_absent, 0.0) - np.log(any_rate)
    return log_weight, any_rate


def needed_terms(
    episodes: np.ndarray, rate: np.ndarray, log_goal: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest k with a bound of ``log P(J > k)`` below the goal; both."""
    mean = episodes * rate
    terms = np.minimum(np.maximum(np.ceil(mean), 1.0), episodes)
    log_tail = _log_binomial_tail(episodes, rate, terms)
    for _ in range(MOST_TERMS + 1):
        short = (log_tail > log_goal) & (terms < episodes)
        if not short.any():
            break
        terms = np.where(short, terms + np.maximum(1, np.floor(0.05 * terms)), terms)
        terms = np.minimum(terms, episodes)
        log_tail = _log_binomial_tail(episodes, rate, terms)
    return terms, np.where(terms >= episodes, -np.inf, log_tail)


def _log_binomial_tail(
    episodes: np.ndarray, rate: np.ndarray, terms: np.ndarray
) -> np.ndarray:
    """Bound of ``log P(J >= k + 1)``, J binomial: Chernoff and Hoeffding (1963)."""
    share = np.minimum((terms + 1) / episodes, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = share * np.log(share / rate)
        rest = (1 - share) * np.log((1 - share) / (1 - rate))
    entropy = entropy + np.where(share >= 1, 0.0, rest)
    return np.where(share > rate, -episodes * entropy, 0.0)

"""Independent episodes: a mixture over the number of episodes that hold the unit.

References: docs/proofs.md, "Independent episodes"; Balle, Barthe, Gaboardi (2018),
arXiv:1807.01647v2, Theorems 2 and 10.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import sum_of
from jaxdp_episodic.accountant.losses.gaussian import (
    SMALLEST,
    GaussianLoss,
    positive,
    scaled,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    MixtureLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.loss_nodes import (
    LossNodes,
    NodeRule,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Nodes,
    Tails,
)
from jaxdp_episodic.accountant.numerics.binomial import log_binomial
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    map_first,
    namespace,
)
from jaxdp_episodic.accountant.numerics.special import Pair, log_expm1

# Largest number of terms of a loss distribution; with more there is no exact answer.
MOST_TERMS = 200
# Terms of a moment this many nats below the sum are left out: hundreds add up to 1e-13.
_NEGLIGIBLE_NATS = 36.0
# Terms are left out up to this share of delta, which is then added to delta.
_TRUNCATED_SHARE = 1e-9
_AT_ONCE = 512  # terms times settings that NumPy computes at once
_LOST_NATS = 46.0  # terms this far below a sum, all together, change no digit of it
# Logarithm below which a tail may be wrong: nobody asks for less than e^-745.
_LEAST_LOG_TAIL = -1500.0
# Largest log-density at which a distribution is truncated, relative to its peak.
_LEAST_CUT = -18.0
# Replaces log 0 where a difference of two of them would be NaN.
_LOG_NOTHING = -1e130


@dataclass(frozen=True)
class IndependentEpisodesLoss(GaussianLoss, Nodes):
    """Swaps of J contributions, J ~ Binomial(episodes, rate) episodes with the unit."""

    # Moments need all terms, since rare large J dominate high orders.

    rate: Array  # eta in [0, 1], probability that a given episode holds the unit
    shift: Array  # s >= 0 of one swapped contribution
    num_episodes: Array  # B, whole numbers >= 1 as floats
    # Largest J that is not truncated.
    kept: Array = np.inf  # pyright: ignore[reportAssignmentType]: broadcasts
    is_symmetric: ClassVar[bool] = True

    @property
    def chance(self) -> Array:
        """Probability that at least one episode holds the unit."""
        with np.errstate(divide="ignore"):
            absent = self.num_episodes * np.log1p(-self.rate)
        return self.outer_rate * -np.expm1(absent)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: one swap; at most 8 deviations more than expected."""
        xp, expected = namespace(*self.fields), self.num_episodes * self.rate
        draws = xp.minimum(self.num_episodes, expected + 8 * xp.sqrt(expected) + 3)
        return Hints(self.rate, self.rate, self.shift, self.shift * draws)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`."""
        xp = namespace(u, *self.fields)
        u, outer, eta, s, episodes, kept = xp.broadcast_arrays(u, *self.fields)
        kept = xp.minimum(episodes, kept)
        safe = positive(eta, 1.0)
        directions, nothing = 2 - self.is_symmetric, _LOG_NOTHING

        def add_terms(index: Array, totals: tuple[Pair, ...]) -> tuple[Pair, ...]:
            """Adds the terms k = index."""
            index = index.astype(s.dtype).reshape((-1,) + (1,) * s.ndim)
            count = xp.minimum(index, episodes)
            log_weight, any_rate = _log_weight(episodes, count, safe)
            both = self._one(any_rate, count * s).log_tails(u)
            used = (s > 0) & (index <= kept)
            terms = [log_weight + term for tails in both[:directions] for term in tails]
            return tuple(
                _added(total, xp.where(used, term, nothing))
                for total, term in zip(totals, terms, strict=True)
            )

        start = ((xp.full_like(s, nothing), xp.zeros_like(s)),) * (2 * directions)
        last = xp.max(kept, initial=0.0).astype(int)
        if xp is np:
            # Blocks of terms, until the rest, at most P(J > k), is lost in rounding.
            block, k, parts, left = max(_AT_ONCE // max(s.size, 1), 1), 0, start, s > 0
            if last > _AT_ONCE:
                most, _ = needed_terms(episodes, 1 - safe, 0 * s + _LEAST_LOG_TAIL)
                k = max(int(np.min(episodes - most)) - 1, 0)
            log_any = np.log(_log_weight(episodes, episodes, safe)[1])
            while k < last and np.any(left):
                index = np.arange(k + 1, min(k + block, int(last)) + 1)
                parts, k = add_terms(index, parts), k + block
                least = np.min([a + np.log(b + SMALLEST) for a, b in parts], axis=0)
                least = np.maximum(least, _LEAST_LOG_TAIL) - _LOST_NATS + log_any
                rest = _log_binomial_tail(episodes, safe, 0 * s + k)
                left = (s > 0) & (k < kept) & (rest > least)
        else:
            parts = fori_loop(xp, 1, last + 1, add_terms, start)
        # Sums are kept with their scale: logarithms of partial sums would be rounded.
        sums = [peak + xp.log(xp.maximum(total, SMALLEST)) for peak, total in parts]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        found = [scaled(pair, outer, eta, s) for pair in pairs]
        return found[0], found[-1]

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`: the mean over J, as moments are linear in the profile."""
        xp = namespace(t, *self.fields)
        t, _, eta, s, episodes, _ = xp.broadcast_arrays(t, *self.fields)
        if xp is np:
            return self._excess_by_setting(t, eta, s, episodes, rule)

        def add_term(k: Array, total: tuple[Array, ...]) -> tuple[Array, ...]:
            count = xp.minimum(k.astype(s.dtype), episodes)
            log_weight, any_rate = _log_weight(episodes, count, eta)
            excess, *slopes = self._one(any_rate, count * s).log_excess(t, rule)
            term = xp.where(k <= episodes, log_weight + excess, -xp.inf)
            return sum_of(total, (term, *slopes))

        zeros = (xp.zeros_like(s),) * (2 * rule.with_derivatives)
        last = xp.max(episodes).astype(int)
        return fori_loop(xp, 1, last + 1, add_term, (xp.full_like(s, -xp.inf), *zeros))

    def _excess_by_setting(
        self, t: Array, eta: Array, s: Array, episodes: Array, rule: MomentRule
    ) -> tuple[Array, ...]:
        """Computes `log_excess` from the terms that matter in each setting."""
        # A term that an answer leaves out is bounded by the Gaussian's excess times e1.
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
        found[0] = -np.inf

        def evaluate(used: np.ndarray) -> None:
            one = self._one(any_rate[used], shift[used])
            found[:, used] = one.log_excess(t[index[used]], rule)
            found[0][used] += log_weight[used]

        used = size > largest(size) - _NEGLIGIBLE_NATS
        evaluate(used)
        # Terms that may not be negligible.
        missed = ~used & (upper > largest(found[0]) - _NEGLIGIBLE_NATS)
        if np.any(missed):
            evaluate(missed)
        found[0] = np.where(used | missed, found[0], upper)
        peak = np.maximum.reduceat(found[0], start)
        finite = np.where(np.isfinite(peak), peak, 0.0)
        share, found[0] = np.exp(found[0] - finite[index]), 1.0
        found = np.where(share > 0, share * found, 0.0)
        total, *sums = np.add.reduceat(found, start, axis=1)
        return np.log(total) + finite, *(part / total for part in sums)

    def _one(self, any_rate: Array, shift: Array) -> MixtureLoss:
        """Returns the pair of k episodes with the unit, sampled at P(J >= 1)."""
        one = namespace(any_rate, shift).ones_like(any_rate)
        return SwappedGaussianLoss(one, any_rate, shift)

    @property
    def num_terms(self) -> Array:
        """See `Nodes`: terms that are not truncated."""
        return namespace(*self.fields).minimum(self.kept, self.num_episodes)

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
        xp = namespace(*self.fields, log_cut, height)
        terms = xp.arange(1, num_terms + 1, dtype=log_cut.dtype)[:, None]
        kept = xp.minimum(self.kept, self.num_episodes)
        k = xp.minimum(terms, kept)
        log_weight, any_rate = _log_weight(self.num_episodes, k, self.rate)
        # Terms rarer than the truncated probability are left out.
        used = (terms <= kept) & (log_weight > log_cut[:, None])
        weight = xp.where(used, xp.exp(log_weight), 0.0)
        log_cut = xp.minimum(log_cut[:, None] - log_weight, _LEAST_CUT)

        def flat(a: Array) -> Array:
            """Reshapes (..., terms, m) to (..., terms m) after broadcasting."""
            wide = xp.broadcast_to(a, (*a.shape[:-2], *k.shape))
            return wide.reshape(*a.shape[:-2], -1)

        cuts = flat(backward[None]), flat(log_cut), flat(height[:, None])
        one = self._one(flat(any_rate[None]), flat(k * self.shift))
        parts = one.nodes(NodeRule(*cuts, num_nodes))
        return map_first(_mixed, parts, weight, used)


@dataclass(frozen=True)
class ZeroedEpisodesLoss(IndependentEpisodesLoss):
    """The same under zero_out: with a null unit an episode contributes 0."""

    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True

    def _one(self, any_rate: Array, shift: Array) -> ZeroedGaussianLoss:
        one = namespace(any_rate, shift).ones_like(any_rate)
        return ZeroedGaussianLoss(one, one, any_rate, shift)


def _log_weight(episodes: Array, k: Array, rate: Array) -> tuple[Array, Array]:
    """Returns ``log(P(J = k) / P(J >= 1))`` for a binomial J, and P(J >= 1)."""
    xp, rest = namespace(episodes, k, rate), episodes - k
    log_absent = xp.log1p(-rate)  # -inf at rate 1
    any_rate = -xp.expm1(episodes * log_absent)
    log_weight = log_binomial(episodes, k) + k * xp.log(rate)
    log_weight += xp.where(rest > 0, rest * log_absent, 0.0) - xp.log(any_rate)
    return log_weight, any_rate


def _added(total: Pair, terms: Array) -> Pair:
    """Adds (k, ...) terms to a sum kept as its largest logarithm and a factor."""
    xp = namespace(terms)
    higher = xp.maximum(total[0], xp.max(terms, axis=0))
    ratio = total[1] * xp.exp(total[0] - higher)
    return higher, ratio + xp.sum(xp.exp(terms - higher), axis=0)


def _mixed(part: LossNodes, weight: Array, used: Array) -> LossNodes:
    """Returns the mixture of the nodes of all terms, (J, terms m)."""
    xp = namespace(part.mass, weight, used)
    num_terms, size = weight.shape

    def apart(a: Array) -> Array:
        """Reshapes (J, terms m) to (J, terms, m)."""
        return a.reshape(-1, num_terms, size)

    def nodes(a: Array) -> Array:
        """Reshapes (J, terms, m) to (terms J, m)."""
        return xp.swapaxes(a, 0, 1).reshape(-1, size)

    def mixed(a: Array) -> Array:
        return xp.sum(a.reshape(num_terms, size) * weight, axis=0)

    def smallest(a: Array) -> Array:
        return xp.min(xp.where(used, a.reshape(num_terms, size), xp.inf), axis=0)

    return LossNodes(
        (nodes(apart(part.loss[0])), nodes(apart(part.loss[1]))),
        (nodes(apart(part.weight[0]) * weight), nodes(apart(part.weight[1]) * weight)),
        mixed(part.mass),
        mixed(part.size),
        smallest(part.right),
        smallest(part.left),
        nodes(apart(part.end_log_weight) + xp.log(weight)),
        nodes(apart(part.end_loss)),
    )


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

"""Moments of independent episodes in NumPy, from the terms that are not negligible.

In ``sum_k P(J = k)/… E_k`` each setting has its own terms, far from the peak of which
nothing counts. So the terms of a batch are chosen one by one, which compiled loops
cannot do (`independent_episodes` has theirs: all terms).

A term that is left out counts with an upper bound: a profile ``e1 D(ks, 1 + (g-1)/e1)``
is at most ``e1 D(ks, g)``, and moments are linear in profiles, so its excess is at most
``e1`` times the Gaussian's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.numerics.combinatorics import log_binomial
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1

# Largest number of terms of a loss distribution; settings that need more have no exact
# answer.
MOST_TERMS = 200
# Terms that many nats below the sum are left out: hundreds of them are 1e-13 of it.
_NEGLIGIBLE_NATS = 36.0
# The same in the search for the best order, which needs about 1e-7.
_NEGLIGIBLE_IN_SEARCH = 18.0
# Fewest nodes per panel of the quadrature of an answer; with fewer it is a search.
_NODES_OF_ANSWER = 12


class Terms(NamedTuple):
    """All terms of all settings, setting by setting; (m,) arrays but the first ones.

    Attributes:
      start: (n,) index of each setting's first term.
      number: (n,) how many it has.
      setting: index of the setting.
      count: k, the number of episodes with the unit.
      shift: of them together.
      any_rate: e1 of the setting.
      log_weight: ``log(P(J = k) / e1)``.
      upper: upper bound of the logarithm of the term.
      size: an approximation of it.
    """

    start: np.ndarray
    number: np.ndarray
    setting: np.ndarray
    count: np.ndarray
    shift: np.ndarray
    any_rate: np.ndarray
    log_weight: np.ndarray
    upper: np.ndarray
    size: np.ndarray

    @classmethod
    def of(
        cls, t: np.ndarray, eta: np.ndarray, s: np.ndarray, episodes: np.ndarray
    ) -> Terms:
        """The terms k = 1 … B of settings, (n,)."""
        number = np.maximum(episodes, 1.0).astype(np.int64)
        start = np.cumsum(number) - number
        setting = np.repeat(np.arange(t.size), number)
        count = 1.0 + np.arange(setting.size) - start[setting]
        log_absent = np.log1p(-eta)  # -inf at eta = 1
        any_rate = -np.expm1(episodes * log_absent)
        log_any = np.log(any_rate)[setting]
        rest = episodes[setting] - count
        log_weight = log_binomial(episodes[setting], count)
        log_weight += count * np.log(eta)[setting] - log_any
        log_weight += np.where(rest > 0, rest * log_absent[setting], 0.0)
        shift, order = count * s[setting], 1 + t[setting]
        gaussian = log_expm1(0.5 * shift * shift * order * t[setting])
        # At whole orders, the last and the first term of the binomial expansion.
        last = order * log_any + gaussian
        first = 2 * log_any + log_expm1(shift * shift)
        first += np.log(0.5 * order * t[setting])
        return cls(
            start,
            number,
            setting,
            count,
            shift,
            any_rate[setting],
            log_weight,
            log_weight + log_any + gaussian,
            log_weight + np.minimum(np.maximum(first, last), log_any + gaussian),
        )

    def largest(self, values: np.ndarray) -> np.ndarray:
        """(n,) largest of (m,) values in each setting."""
        return np.maximum.reduceat(values, self.start)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """(n,) sums of (m,) values in each setting."""
        return np.add.reduceat(values, self.start)

    def strided(self) -> tuple[np.ndarray, np.ndarray]:
        """Which terms stand for all that count, and for how many each does; (m,).

        One for each standard deviation: so the trapezoidal rule sums a Gaussian to
        1e-8. All of them where the terms end before they fall off.
        """
        peak = self.largest(self.size)[self.setting]
        near = self.size > peak - _NEGLIGIBLE_IN_SEARCH
        share = np.where(near, np.exp(self.size - peak), 0.0)
        mass = self.sum(share)
        mean = self.sum(share * self.count) / mass
        offset = self.count - mean[self.setting]
        deviation = np.sqrt(self.sum(share * offset * offset) / mass)
        ends = near[self.start] | near[self.start + self.number - 1]
        stride = np.where(ends, 1.0, np.maximum(np.floor(deviation), 1.0))
        stride = stride[self.setting]
        return near & (self.count % stride == 0), stride


def log_excess(
    excess_of_one: Callable[..., tuple[np.ndarray, ...]], terms: Terms, rule: MomentRule
) -> tuple[np.ndarray, ...]:
    """`Moments.log_excess` of a mixture; an *upper bound*, exact to 1e-13.

    With few nodes, as for a search, its error is about 1e-7. ``excess_of_one`` maps
    settings, their e1 and shifts to the excess of one term.
    """
    parts = [np.full(terms.size.shape, f) for f in (-np.inf, 0.0, 0.0)]
    parts = parts[: 3 if rule.with_derivatives else 1]

    def evaluate(used: np.ndarray) -> None:
        found = excess_of_one(
            terms.setting[used], terms.any_rate[used], terms.shift[used]
        )
        for part, value in zip(parts, found, strict=True):
            part[used] = value
        parts[0][used] += terms.log_weight[used]

    if rule.quadrature.nodes_per_panel < _NODES_OF_ANSWER:
        used, stride = terms.strided()
        evaluate(used)
        parts[0] = parts[0] + np.log(stride)
    else:
        peak = terms.largest(terms.size)
        used = terms.size > peak[terms.setting] - _NEGLIGIBLE_NATS
        evaluate(used)
        # Terms that turn out not to be negligible.
        least = terms.largest(parts[0])[terms.setting] - _NEGLIGIBLE_NATS
        missed = ~used & (terms.upper > least)
        if np.any(missed):
            evaluate(missed)
        parts[0] = np.where(used | missed, parts[0], terms.upper)
    peak = terms.largest(parts[0])
    finite = np.where(np.isfinite(peak), peak, 0.0)
    share = np.exp(parts[0] - finite[terms.setting])
    total = terms.sum(share)
    means = (
        terms.sum(np.where(share > 0, share * part, 0.0)) / total for part in parts[1:]
    )
    return np.log(total) + finite, *means


def needed_terms(
    episodes: np.ndarray, rate: np.ndarray, log_goal: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Smallest k with a bound of ``log P(Binomial(B, rate) > k)`` below the goal.

    Returns k and the bound (Chernoff's, with the relative entropy), ``-inf`` if all
    terms are kept.
    """
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
    """Bound of ``log P(Binomial(B, rate) >= k + 1)``: Chernoff and Hoeffding (1963)."""
    share = np.minimum((terms + 1) / episodes, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = share * np.log(share / rate)
        rest = (1 - share) * np.log((1 - share) / (1 - rate))
    entropy = entropy + np.where(share >= 1, 0.0, rest)
    return np.where(share > rate, -episodes * entropy, 0.0)

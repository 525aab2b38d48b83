"""How many terms of the sum over independent episodes the exact accountant needs."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accounting.run import EPISODES, DominatingPair

# Most terms of a sum; settings that need more have no exact answer.
MOST_TERMS = 200
# Terms left out may add this share of delta, which is then added.
_CUT_SHARE = 1e-9


def cut_terms(
    goal: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
) -> tuple[tuple[DominatingPair, ...], np.ndarray, np.ndarray]:
    """Cuts the sums of independent episodes.

    Args:
      goal: (n,) a logarithm of delta, or below it.
      pairs: dominating pairs with fields (n,).
      counts: (n,) each.

    Returns:
      The pairs, where ``inner_rate`` (it is 1) takes the number of episodes instead
      and ``num_episodes`` the number of terms; (n,) an upper bound of the logarithm of
      what the terms left out add to delta; (n,) where there are too many terms.
    """
    log_added = np.full(goal.shape, -np.inf)
    too_many = np.zeros(goal.shape, bool)
    cut = []
    for pair, count in zip(pairs, counts, strict=True):
        if pair.kind != EPISODES:
            cut.append(pair)
            continue
        least = goal + np.log(_CUT_SHARE) - np.log(np.maximum(count, 1.0))
        terms, log_tail = _needed_terms(pair.num_episodes, pair.rate, least)
        too_many |= terms > MOST_TERMS
        with np.errstate(divide="ignore"):
            log_added = np.logaddexp(log_added, np.log(count) + log_tail)
        terms = np.minimum(terms, MOST_TERMS)
        cut.append(pair._replace(inner_rate=pair.num_episodes, num_episodes=terms))
    return tuple(cut), log_added, too_many


def _needed_terms(
    episodes: np.ndarray, rate: np.ndarray, log_goal: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Smallest k with a bound of ``log P(Binomial(B, rate) > k)`` below the goal.

    Returns k and the bound (Chernoff's, with the relative entropy), ``-inf`` if all
    terms are kept.
    """
    mean = episodes * rate
    terms = np.minimum(np.maximum(np.ceil(mean), 1.0), episodes)
    for _ in range(MOST_TERMS + 1):
        log_tail = _log_binomial_tail(episodes, rate, terms)
        short = (log_tail > log_goal) & (terms < episodes)
        if not short.any():
            break
        terms = np.where(short, terms + np.maximum(1, np.floor(0.05 * terms)), terms)
        terms = np.minimum(terms, episodes)
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

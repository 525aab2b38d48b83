"""What a run loses at the least with little noise: a sum of large losses.

A step that moves the sum by k units of s deviations loses about ``(k s)²/2 + k s z``, z
standard normal, so a run loses ``S s²/2 + sqrt(S) s z``, S the sum of all k².
"""

from __future__ import annotations

import numpy as np
from scipy import optimize, special, stats

# Nats above epsilon from which on all of a loss counts: e^-40 is nothing.
_ENOUGH = 40.0
# Rarer sums are left out.
_LEAST_LOG_CHANCE = -80.0
# Bound of the rounding of a log-chance.
_ROUNDING = 1e-8


def sums_of_hits(num_steps: int, chance: float, square: float = 1.0):
    """S and log-chances, where a step moves by sqrt(square) with a probability."""
    hits = np.arange(num_steps + 1.0)
    return likely(square * hits, stats.binom.logpmf(hits, num_steps, chance))


def sums_of_episodes(num_steps: int, num_episodes: int, chance: float, square: float):
    """The same where a step moves by as many units as it has episodes with the unit."""
    number = np.arange(num_episodes + 1)
    one = np.zeros(num_episodes**2 + 1)
    one[number**2] = stats.binom.pmf(number, num_episodes, chance)
    total = np.ones(1)
    for _ in range(num_steps):
        total = np.convolve(total, one)
    with np.errstate(divide="ignore"):
        return likely(square * np.arange(len(total)), np.log(total))


def likely(sums: np.ndarray, log_chance: np.ndarray):
    """Those that are not too rare."""
    kept = log_chance > _LEAST_LOG_CHANCE
    return sums[kept], log_chance[kept]


def log_delta(epsilon: float, sums, noise: float, slack: float) -> float:
    """A lower bound of log(delta): the chance of a loss ``slack + 40`` nats larger."""
    total, log_chance = sums
    s = 1 / noise
    goal = epsilon + slack + _ENOUGH
    # Without a hit nothing is lost.
    some = total > 0
    z = (goal - 0.5 * s * s * total[some]) / (s * np.sqrt(total[some]))
    terms = log_chance[some] + special.log_ndtr(-z)
    return float(np.logaddexp.reduce(terms)) + np.log1p(-np.exp(-_ENOUGH)) - _ROUNDING


def epsilon(delta: float, sums, noise: float, slack: float) -> float:
    """A lower bound of epsilon; 0 where delta covers all that may be lost."""
    goal = np.log(delta)
    high = (0.5 / noise**2) * sums[0].max() + 40 / noise * np.sqrt(sums[0].max())
    low = 0.0
    if log_delta(low, sums, noise, slack) < goal:
        return 0.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        above = log_delta(middle, sums, noise, slack) >= goal
        low, high = (middle, high) if above else (low, middle)
    return low


def epsilon_of_hits(delta, num_steps, chance, shift, log_odds, log_rest) -> float:
    """Epsilon itself, of steps whose K hits are Gaussians that overlap with nothing."""
    spread = 45 * np.sqrt(num_steps * chance) + 400
    low = max(int(num_steps * chance - spread), 1)  # no hit, no loss
    hits = np.arange(low, min(int(num_steps * chance + spread), num_steps) + 1.0)
    log_chance = stats.binom.logpmf(hits, num_steps, chance)
    mean = hits * (log_odds + 0.5 * shift**2) + (num_steps - hits) * log_rest
    width = shift * np.sqrt(np.maximum(hits, 1e-300))

    def excess(epsilon: float) -> float:
        """Of log(delta), the hockey-stick divergence of a mixture of Gaussians."""
        above = (mean - epsilon) / width
        more = special.log_ndtr(above)
        less = epsilon - mean + 0.5 * width**2 + special.log_ndtr(above - width)
        terms = log_chance + more + np.log(-np.expm1(np.minimum(less - more, -1e-16)))
        return float(special.logsumexp(terms)) - np.log(delta)

    return optimize.brentq(excess, 1.0, mean.max() + 40 * width.max(), xtol=1e-9)

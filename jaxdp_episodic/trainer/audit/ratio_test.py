"""An exact test of ``p <= e^epsilon q + delta`` by counts of two independent draws.

Two intervals, each with half of the error, waste a good part of it: both chances must
be badly off at once. Here the two counts are ordered by one score, and the probability
of an outcome at least as extreme is computed from the two binomial distributions, at
every value of the unknown q that its own interval allows (Berger and Boos 1994). It is
bounded from above on every cell of a grid, so nothing is left to an approximation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from jaxdp_episodic.accountant.numerics.binomial import log_binomial_tail

# Share of the error spent on the interval of q; the rest is spent on the test.
NUISANCE = 0.02
# Width of a cell of q and of a block of counts, in standard deviations of the count.
# The bound is valid for any; a finer grid makes it tighter and slower.
_CELL_WIDTH = 0.08
# Counts more standard deviations than this beyond the interval share one block.
_TAIL_DEVIATIONS = 6.0
_MOST_TESTS = 30  # values of epsilon; the largest one disproved is valid at any end
# Tolerance of the search for epsilon, in standard deviations of the score.
_TOLERANCE = 0.01
LEAST_ERROR = 1e-12  # of a bound; the tests compare errors down to it
# Relative margin of each cell's ends, against the rounding of 1 - q.
_OUTWARD = 1e-7


def score(
    hits: np.ndarray | int,
    false_hits: np.ndarray | int,
    num_draws: float,
    *,
    delta: float,
    error: float,
) -> np.ndarray:
    """Returns the ratio ``g`` that a normal test of this error just rejects.

    ``hits - n delta = g y + z sd``, where y is ``false_hits + 1``, z the normal
    quantile of the error and sd the standard deviation of the difference. It increases
    with ``hits`` and decreases with ``false_hits``: an order of all outcomes, and an
    *estimate* of the bound that `log_ratio_bound` gives.

    The counts, (...,), need not be whole; delta lies in [0, 1), the error in (0, 1/2].
    0 where they show nothing.
    """
    z = _quantile(error)
    x, y = np.asarray(hits, np.float64), np.asarray(false_hits, np.float64) + 1
    gain = x - num_draws * delta
    own, cross = _variance(x, num_draws, z), _variance(y, num_draws, z)
    rest = gain**2 - z * z * own
    possible = (gain > 0) & (rest > 0)
    under_root = gain**2 * cross + y * y * own - z * z * own * cross
    root = z * np.sqrt(np.where(possible, under_root, 0.0))
    return np.where(possible, rest / np.where(possible, gain * y + root, 1.0), 0.0)


def log_ratio_lower_bound(
    hits: int,
    false_hits: int,
    num_draws: int,
    false_chances: Sequence[float],
    *,
    delta: float,
    error: float,
) -> float:
    """Returns the largest epsilon found that the counts disprove.

    Args:
      hits: of the event among ``num_draws`` draws where it is likely.
      false_hits: among as many where it is not.
      num_draws: of each.
      false_chances: an interval of q that fails with probability ``NUISANCE * error``
        at most.
      delta: in [0, 1).
      error: in [1e-12, 1/2], of the bound.

    Returns:
      nats, >= 0; a *lower bound* of ``log((p - delta) / q)`` that fails with
      probability ``error`` at most; 0 where the counts show nothing.

    Reference: Barnard (1945), Nature 156, 177; Berger and Boos (1994), "P values
    maximized over a confidence set for the nuisance parameter", JASA 89(427).
    """
    settings = {"delta": delta, "error": error}
    ratio = float(score(hits, false_hits, num_draws, **settings))
    if not ratio > 1:
        return 0.0
    level = (1 - NUISANCE) * error
    starts, firsts = _edge_of_outcomes(
        ratio, hits, false_hits, false_chances, num_draws, **settings
    )
    low, high = _cells(false_hits, num_draws, false_chances)
    fewer = _chance_of_fewer(starts[1:], num_draws, low)
    # The change of epsilon that moves the score by one standard deviation.
    own = hits * (1 - hits / num_draws)
    deviation = math.sqrt(own + ratio**2 * max(false_hits, 1))
    scale = deviation / (ratio * max(false_hits, 1))

    def margin(epsilon: float) -> float:
        """Normal quantile of the p-value at epsilon, less the one that is asked for."""
        chance = _worst_chance(firsts, num_draws, high, fewer, epsilon, delta)
        return _deviations(chance) - _deviations(level)

    return _largest(margin, math.log(ratio), scale)


def _largest(margin: Callable[[float], float], start: float, scale: float) -> float:
    """About the largest epsilon whose margin is not negative; 0 if none is found.

    The margin is nonincreasing in epsilon, and may be constant on intervals.
    """
    low, high = (0.0, math.inf), (math.inf, -math.inf)  # bracket: epsilon, its margin
    epsilon, step = start, 0.1 * scale
    for _ in range(_MOST_TESTS):
        found = margin(epsilon)
        if found >= 0:
            low = epsilon, found
        else:
            high = epsilon, found
        if 0 <= found <= _TOLERANCE or high[0] - low[0] <= _TOLERANCE * scale:
            break
        if math.isinf(high[0]) or low[0] == 0:  # no bracket yet: double the step
            step *= 2
            down = max(high[0] - step, 0.5 * high[0])
            epsilon = low[0] + step if math.isinf(high[0]) else down
        else:
            share = low[1] / (low[1] - high[1])
            epsilon = low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
    return low[0]


def _deviations(chance: float) -> float:
    return -NormalDist().inv_cdf(min(max(chance, 1e-300), 1 - 1e-15))


def _quantile(error: float) -> float:
    return max(NormalDist().inv_cdf(1 - error), 0.0)


def _variance(count: np.ndarray, num_draws: float, z: float) -> np.ndarray:
    """Of a count; raised by z²/4, with which the score is monotone in both counts."""
    return np.maximum(count * (1 - count / num_draws), 0.0) + 0.25 * z * z


def _edge_of_outcomes(
    ratio: float,
    hits: int,
    false_hits: int,
    false_chances: Sequence[float],
    num_draws: int,
    *,
    delta: float,
    error: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The outcomes whose score is at least ``ratio``, as a staircase from outside.

    At ``starts[b]`` false hits or more (the first is 0) it takes ``firsts[b]`` hits:
    rounded down within each block, which lets in more outcomes.
    """
    deviation = math.sqrt(false_hits + 1)
    step = max(1, int(_CELL_WIDTH * deviation))
    reach = _TAIL_DEVIATIONS * deviation + 20
    begin = max(0, int(num_draws * false_chances[0] - reach))
    end = min(num_draws, int(num_draws * false_chances[1] + reach))
    starts = np.arange(begin, end + 1, step, dtype=np.float64)
    starts = starts if begin == 0 else np.concatenate([[0.0], starts])
    z = _quantile(error)
    middle = num_draws * delta + ratio * (starts + 1)
    variance = ratio**2 * _variance(starts + 1, num_draws, z) + 0.25 * z * z
    # Larger root of (x - middle)² = z² (x - x²/n + variance), without cancellation.
    lead, half = 1 + z * z / num_draws, middle + 0.5 * z * z
    under_root = middle * (1 - middle / num_draws) + 0.25 * z * z + lead * variance
    root = z * np.sqrt(np.maximum(under_root, 0.0))
    firsts = np.ceil((half + root) / lead * (1 - 1e-12) - 1e-6)
    if begin:  # the block of all smaller counts: as if every outcome were extreme
        firsts[0] = 0
    # The counts that were seen are among the outcomes, whatever is rounded.
    here = int(np.searchsorted(starts, false_hits, side="right")) - 1
    firsts[here] = min(firsts[here], hits)
    return starts, np.minimum.accumulate(firsts[::-1])[::-1]


def _cells(
    false_hits: int, num_draws: int, false_chances: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends of the cells into which the interval of q is cut."""
    low, high = false_chances
    width = _CELL_WIDTH * math.sqrt(false_hits + 1) / num_draws
    edges = np.linspace(low, high, 1 + max(1, math.ceil((high - low) / width)))
    return edges[:-1] * (1 - _OUTWARD), np.minimum(edges[1:] * (1 + _OUTWARD), 1.0)


def _chance_of_fewer(
    counts: np.ndarray, num_draws: int, chance: np.ndarray
) -> np.ndarray:
    """(cells, counts) upper bounds of ``P(false hits < count)``."""
    # Where 1 - q rounds to 1 the tail cannot be computed: its bound is 1.
    none = chance < 1e-15
    rest = 1 - np.where(none, 0.5, chance)
    tail = log_binomial_tail(
        num_draws - counts + 1, np.asarray(num_draws), rest[:, None], side="upper"
    )
    return np.where(none[:, None], 1.0, np.exp(tail))


def _worst_chance(
    firsts: np.ndarray,
    num_draws: int,
    high: np.ndarray,
    fewer: np.ndarray,
    epsilon: float,
    delta: float,
) -> float:
    """Upper bound of the chance of an outcome beyond the staircase, at any cell.

    In a cell the hits are as likely as at its upper end, false hits as at its lower.
    Summed by parts: ``sum_b P(y in block b) s_b``, with ``s_b`` the chance of at least
    ``firsts[b]`` hits, falling in b, is ``sum_b (s_b - s_{b+1}) P(y < start_{b+1})``.
    """
    chance = math.exp(epsilon) * high + delta
    sure = chance >= 1 - 1e-12
    tail = log_binomial_tail(
        firsts,
        np.asarray(num_draws),
        np.where(sure, 0.5, chance)[:, None],
        side="upper",
    )
    tail = np.where(sure[:, None], firsts <= num_draws, np.exp(tail))
    tail = np.maximum.accumulate(tail[:, ::-1], axis=1)[:, ::-1]
    total = tail[:, -1] + np.sum((tail[:, :-1] - tail[:, 1:]) * fewer, axis=1)
    return float(min(total.max(), 1.0))

"""From counts and scores to lower bounds of epsilon, with a stated confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxdp_episodic import _validation

# Counts disprove a claim at this confidence only. Exact claims leave no room: at 95 %
# the audits of a faultless mechanism would disprove one in twenty.
VERDICT_CONFIDENCE = 0.9999
# Share of the draws by which score and event are chosen; the others are counted.
CHOOSING_SHARE = 0.3
MOST_TRIALS = 10**10
# Relative margin of each confidence limit, against rounding, which is below 1e-9 for
# up to `MOST_TRIALS`.
_OUTWARD = 1e-7
# Thresholds that are tried for an event.
_MOST_THRESHOLDS = 2000

FORWARD = "forward"
BACKWARD = "backward"


class EpsilonBound(NamedTuple):
    """What counts say about epsilon at one delta.

    Attributes:
      epsilon: nats, >= 0; a *lower bound* that holds with the stated confidence.
      delta: at which it holds.
      confidence: of the bound.
      direction: "forward": the event is likelier with the unit, "backward": without.
      threshold: the event is a score above it (forward) or below it (backward).
      hits: how often the event came where it is likely.
      false_hits: how often it came where it is not.
      num_draws: draws of each of the two.
    """

    epsilon: float
    delta: float
    confidence: float
    direction: str
    threshold: float
    hits: int
    false_hits: int
    num_draws: int

    def disproves(self, claim: float) -> bool:
        """Returns whether the counts refute a claimed epsilon with 99.99 % confidence.

        A bound above the claim alone does not: of exact claims that hold, the bounds at
        a confidence of 95 % exceed one in twenty.
        """
        if not self.epsilon > claim:
            return False
        error = 1 - max(VERDICT_CONFIDENCE, self.confidence)
        counts = self.hits, self.false_hits, self.num_draws
        return bool(log_ratio_bound(*counts, delta=self.delta, error=error) > claim)


def clopper_pearson(
    successes: np.ndarray | int, trials: np.ndarray | int, *, error: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exact one-sided confidence bounds of a probability, both of them.

    ``low`` is the p at which this many successes or more have probability ``error``,
    ``high`` the p at which this many or fewer do: each alone fails with probability
    ``error`` at most.

    Args:
      successes: (...,) whole numbers in [0, trials].
      trials: (...,) whole numbers >= 1, up to 1e10.
      error: in (0, 1/2], of each side.

    Returns:
      ``(low, high)``, float64 of the broadcast shape; moved outwards by 1e-7 of
      themselves, against rounding.

    Raises:
      TypeError: counts that are no numbers.
      ValueError: a number out of range.

    Reference: Clopper and Pearson (1934), Biometrika 26(4), 404-413.
    """
    k = _validation.integer_array("successes", successes, minimum=0)
    n = _validation.integer_array("trials", trials, minimum=1)
    _validation.broadcast_shape(successes=k, trials=n)
    k, n = (a.astype(np.float64) for a in np.broadcast_arrays(k, n))
    if np.any(k > n) or np.any(n > MOST_TRIALS):
        raise ValueError(
            f"successes must be at most trials, and these at most {MOST_TRIALS:,}, "
            f"got {successes!r} of {trials!r}"
        )
    if not 0 < error <= 0.5:
        raise ValueError(f"error must lie in (0, 1/2], got {error!r}")
    # Where there is no tail the quantile is 0 or 1; the arguments must be > 0 anyway.
    low = special.betaincinv(np.maximum(k, 0.5), n - k + 1, error) * (1 - _OUTWARD)
    high = special.betainccinv(k + 1, np.maximum(n - k, 0.5), error) * (1 + _OUTWARD)
    return np.where(k > 0, low, 0.0), np.where(k < n, np.minimum(high, 1.0), 1.0)


def log_ratio_bound(
    hits: np.ndarray | int,
    false_hits: np.ndarray | int,
    num_draws: int,
    *,
    delta: float,
    error: float,
) -> np.ndarray:
    """Returns a lower bound of ``log((p - delta) / q)`` that fails by ``error``."""
    # p <= e^epsilon q + delta of any event that was chosen without these draws; each of
    # the two limits by Clopper and Pearson fails with half of the error.
    for name, counts in {"hits": hits, "false_hits": false_hits}.items():
        if np.any(np.asarray(counts) > num_draws):
            raise ValueError(
                f"{name} must be at most num_draws, {num_draws:,}, got {counts}"
            )
    if not 0 <= delta < 1:
        raise ValueError(f"delta must lie in [0, 1), got {delta!r}")
    low, _ = clopper_pearson(hits, num_draws, error=0.5 * error)
    _, high = clopper_pearson(false_hits, num_draws, error=0.5 * error)
    return np.log(np.maximum(low - delta, high) / high)


def score_bounds(
    choice: tuple[np.ndarray, np.ndarray],
    counted: tuple[np.ndarray, np.ndarray],
    deltas: Sequence[float] | np.ndarray,
    confidence: float = 0.95,
) -> tuple[EpsilonBound, ...]:
    """Returns the bound at each delta that scores of independent releases show.

    The event is a score above a threshold (forward), or below it (backward).

    Args:
      choice: scores ``(with the unit, without)``, by which the events are chosen.
      counted: others, equally many of both, that are counted.
      deltas: each in (0, 1).
      confidence: of all bounds together.

    Raises:
      ValueError: unequal numbers of scores, or NaN among them.
    """
    if len(counted[0]) != len(counted[1]) or len(choice[0]) != len(choice[1]):
        raise ValueError(
            "scores must be equally many with and without the unit, got "
            f"{len(counted[0])} and {len(counted[1])}"
        )
    if any(np.isnan(scores).any() for scores in (*choice, *counted)):
        raise ValueError("scores must not be NaN")
    number, error = len(counted[0]), (1 - confidence) / len(deltas)
    # Events that no choosing draw contradicts are rare: the counts that are to come
    # are estimated with one more.
    scale = number / len(choice[0])
    bounds = []
    for delta in map(float, deltas):
        found = []
        for direction, sign in ((FORWARD, 1.0), (BACKWARD, -1.0)):
            there, gone = (np.sort(sign * scores) for scores in choice[:: int(sign)])
            edges = _thresholds(np.concatenate([there, gone]))
            hits, misses = (
                scale * (len(one) - np.searchsorted(one, edges, "right"))
                for one in (there, gone)
            )
            misses = np.minimum(misses + scale, number).astype(int)
            values = log_ratio_bound(
                hits.astype(int), misses, number, delta=delta, error=error
            )
            best = int(np.argmax(values))
            found.append((float(values[best]), direction, sign * float(edges[best])))
        _, direction, threshold = max(found)
        sign = 1 if direction == FORWARD else -1
        hits, misses = (
            int(np.sum(sign * scores > sign * threshold)) for scores in counted[::sign]
        )
        value = log_ratio_bound(hits, misses, number, delta=delta, error=error)
        event = direction, threshold, hits, misses, number
        bounds.append(EpsilonBound(float(value), delta, confidence, *event))
    return tuple(bounds)


def _thresholds(scores: np.ndarray) -> np.ndarray:
    """Scores to be tried as thresholds, more of the large ones."""
    scores = np.unique(scores)
    if len(scores) <= _MOST_THRESHOLDS:
        return scores
    ranks = np.geomspace(1, len(scores), _MOST_THRESHOLDS)
    return scores[len(scores) - np.unique(ranks.astype(int))]


def check_confidence(confidence: float) -> None:
    """Refuses a confidence out of [0.5, 1)."""
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence must lie in [0.5, 1), got {confidence!r}")

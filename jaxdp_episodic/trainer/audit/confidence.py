"""From counts to a lower bound of epsilon that holds with a stated confidence."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.audit import ratio_test

# Counts disprove a claim at this confidence only. Exact claims leave no room: at 95 %
# the audits of a faultless mechanism would disprove one in twenty.
VERDICT_CONFIDENCE = 0.9999
MOST_TRIALS = 10**10
# Relative margin of each confidence limit, against rounding, which is below 1e-9 for
# up to `MOST_TRIALS`.
_OUTWARD = 1e-7

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
        """True if the counts refute a claimed epsilon with 99.99 % confidence.

        A bound above the claim alone does not: of exact claims that hold, the bounds at
        a confidence of 95 % exceed one in twenty.
        """
        if not self.epsilon > claim:
            return False
        error = 1 - max(VERDICT_CONFIDENCE, self.confidence)
        error = max(error, ratio_test.LEAST_ERROR)
        counts = self.hits, self.false_hits, self.num_draws
        return _single_bound(*counts, delta=self.delta, error=error) > claim


@functools.lru_cache(maxsize=1024)
def _single_bound(*counts: int, delta: float, error: float) -> float:
    """`log_ratio_bound` of one event: reports, tables and exit codes ask for it."""
    return float(log_ratio_bound(*counts, delta=delta, error=error))


def clopper_pearson(
    successes: np.ndarray | int, trials: np.ndarray | int, *, error: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exact one-sided confidence bounds of a chance, both of them.

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
    # Where there is no tail the quantile is 0 or 1; the arguments must be > 0 all the
    # same.
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
    """Returns a lower bound of ``log((p - delta) / q)`` by the counts of an event.

    An (epsilon, delta)-private mechanism has ``p <= e^epsilon q + delta`` for the
    probabilities p and q of any event on neighbouring data, so this is a *lower bound*
    of epsilon that fails with probability ``error`` at most. The event must have been
    chosen without looking at the draws that are counted here.

    Both counts are tested at once, exactly: see `ratio_test`. Clopper and Pearson's
    interval for each alone, with half of the error, would show less.

    Args:
      hits: (...,) counts of the event among ``num_draws`` draws where it is likely.
      false_hits: (...,) counts among as many draws where it is not.
      num_draws: of each.
      delta: in [0, 1).
      error: in [1e-12, 1/2], of each bound.

    Returns:
      (...,) nats, not below 0. Takes about a second for each.

    Raises:
      TypeError: counts that are no numbers.
      ValueError: a number out of range.
    """
    x = _validation.integer_array("hits", hits, minimum=0)
    y = _validation.integer_array("false_hits", false_hits, minimum=0)
    _validation.broadcast_shape(hits=x, false_hits=y)
    for name, counts in {"hits": x, "false_hits": y}.items():
        if np.any(counts > num_draws):
            raise ValueError(
                f"{name} must be at most num_draws, {num_draws:,}, got {counts}"
            )
    if not 0 <= delta < 1:
        raise ValueError(f"delta must lie in [0, 1), got {delta!r}")
    least = ratio_test.LEAST_ERROR
    if not least <= error <= 0.5:
        raise ValueError(f"error must lie in [{least:g}, 1/2], got {error!r}")
    x, y = np.broadcast_arrays(x, y)
    low, high = clopper_pearson(y, num_draws, error=0.5 * ratio_test.NUISANCE * error)
    bounds = [
        ratio_test.log_ratio_lower_bound(
            int(hit), int(false), num_draws, limits, delta=delta, error=error
        )
        for hit, false, *limits in zip(x.flat, y.flat, low.flat, high.flat, strict=True)
    ]
    return np.reshape(np.asarray(bounds, np.float64), x.shape)


def best_event(
    events: Mapping[str, tuple[np.ndarray, np.ndarray]],
    num_draws: int,
    *,
    num_later: int,
    delta: float,
    error: float,
) -> tuple[str, int]:
    """Returns direction and index of the event with the largest expected bound.

    A choice, not a bound: it takes a normal distribution in place of the exact ones,
    and must be followed by counts of fresh draws.

    Events are direction -> (k,) counts among ``num_draws`` where each is likely, and
    (k,) counts, or estimates of them, where it is not; ``num_later`` are to be counted.
    """
    scale, found = num_later / num_draws, []
    for direction, counts in events.items():
        hits, false_hits = (scale * np.asarray(count) for count in counts)
        ratio = ratio_test.score(hits, false_hits, num_later, delta=delta, error=error)
        index = int(np.argmax(ratio))
        found.append((float(ratio[index]), direction, index))
    return max(found)[1:]


def event_bound(
    hits: int,
    false_hits: int,
    num_draws: int,
    *,
    delta: float,
    confidence: float,
    direction: str,
    threshold: float,
    share: float = 1.0,
) -> EpsilonBound:
    """Returns the bound that counts of a chosen event show; see `EpsilonBound`.

    No draw that is counted may have chosen the event. ``share`` is the part of the
    error ``1 - confidence`` that this bound may take, where several hold together.
    """
    counts, error = (hits, false_hits, num_draws), share * (1 - confidence)
    value = float(log_ratio_bound(*counts, delta=delta, error=error))
    event = direction, float(threshold)
    return EpsilonBound(value, float(delta), confidence, *event, *counts)


def check_confidence(confidence: float) -> None:
    """Refuses a confidence out of [0.5, 1)."""
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence must lie in [0.5, 1), got {confidence!r}")

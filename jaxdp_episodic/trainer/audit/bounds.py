"""Lower bounds of epsilon, with a confidence, from counts, scores or guesses.

Tables compare them with claims: claimed epsilons, lower bounds and the gaps between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.numerics.binomial import (
    log_binomial_mass,
    log_binomial_tail,
)
from jaxdp_episodic.accountant.report.sentences import downward, upward
from jaxdp_episodic.files.json_file import plain

# Counts disprove a claim at this confidence only: at 95 % one in twenty audits of a
# correct mechanism with an exact claim would disprove it.
VERDICT_CONFIDENCE = 0.9999
# Share of the draws that choose score and event; the others are counted.
CHOOSING_SHARE = 0.3
MOST_TRIALS = 10**10
# Relative margin of each confidence limit for rounding errors, which are below 1e-9 up
# to `MOST_TRIALS`.
_OUTWARD = 1e-7
_LARGEST_EPSILON = 64.0  # nats; m guesses prove log(m / 3) at most, docs/audit.md
_BISECTIONS = 60  # of [0, 64], to a width of 6e-17
# Most thresholds that are tried for an event.
_MOST_THRESHOLDS = 2000
_delta = _validation.reals("lie in [0, 1)", lambda a: (a >= 0) & (a < 1))
_error = _validation.reals("lie in (0, 1/2]", lambda a: (a > 0) & (a <= 0.5))
_confidence = _validation.reals("lie in [0.5, 1)", lambda a: (a >= 0.5) & (a < 1))

FORWARD = "forward"
BACKWARD = "backward"


class EpsilonBound(NamedTuple):
    """What counts show about epsilon at one delta.

    Attributes:
      epsilon: nats, >= 0; a *lower bound* that holds with the stated confidence.
      delta: at which it holds.
      confidence: of the bound.
      direction: "forward": the event is more probable with the unit, "backward":
        without.
      threshold: the event is a score above it (forward) or below it (backward).
      hits: number of events on the side where it is more probable.
      false_hits: number of events on the other side.
      num_draws: runs on each side.
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

        A bound above the claim is not enough: for a correct exact claim one in twenty
        bounds at 95 % confidence exceeds it.
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

    ``low`` is the p at which so many successes or more have probability ``error``,
    ``high`` the p at which so many or fewer have it. Each alone fails with probability
    ``error`` at most.

    Args:
      successes: (...,) whole numbers in [0, trials].
      trials: (...,) whole numbers >= 1, up to 1e10.
      error: in (0, 1/2], of each side.

    Returns:
      ``(low, high)``, float64 of the broadcast shape; each moved outwards by 1e-7 of
      itself, for rounding errors.

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
    _validation.one("error", error, _error)
    # For k = 0 and k = n the results are replaced below; the arguments must be > 0.
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
    """Returns a lower bound of ``log((p - delta) / q)``; it fails with ``error``."""
    # p <= e^epsilon q + delta for any event that was chosen without these draws. Each
    # of the two Clopper-Pearson limits fails with half of the error.
    for name, counts in {"hits": hits, "false_hits": false_hits}.items():
        if np.any(np.asarray(counts) > num_draws):
            raise ValueError(
                f"{name} must be at most num_draws, {num_draws:,}, got {counts}"
            )
    _validation.one("delta", delta, _delta)
    low, _ = clopper_pearson(hits, num_draws, error=0.5 * error)
    _, high = clopper_pearson(false_hits, num_draws, error=0.5 * error)
    return np.log(np.maximum(low - delta, high) / high)


def score_bounds(
    choice: tuple[np.ndarray, np.ndarray],
    counted: tuple[np.ndarray, np.ndarray],
    deltas: Sequence[float] | np.ndarray,
    confidence: float = 0.95,
) -> tuple[EpsilonBound, ...]:
    """Returns the lower bound at each delta that scores of independent releases show.

    The event is a score above a threshold (forward), or below it (backward).

    Args:
      choice: scores ``(with the unit, without)`` that choose the events.
      counted: other scores, equally many of both, that are counted.
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
    check_confidence(confidence)
    _validation.whole_number("the number of deltas", len(deltas))
    number, error = len(counted[0]), (1 - confidence) / len(deltas)
    # False hits are estimated with one more, as events without any seem too good.
    scale = number / len(choice[0])
    bounds = []
    for delta in map(float, deltas):
        found = []
        for direction, sign in ((FORWARD, 1), (BACKWARD, -1)):
            there, gone = (np.sort(sign * scores) for scores in choice[::sign])
            edges = np.unique(np.concatenate([there, gone]))
            if len(edges) > _MOST_THRESHOLDS:  # mostly the large ones
                ranks = np.geomspace(1, len(edges), _MOST_THRESHOLDS).astype(int)
                edges = edges[len(edges) - np.unique(ranks)]
            hits, misses = (
                scale * (len(one) - np.searchsorted(one, edges, "right"))
                for one in (there, gone)
            )
            misses = np.minimum(misses + scale, number).astype(int)
            values = log_ratio_bound(
                hits.astype(int), misses, number, delta=delta, error=error
            )
            best = int(np.argmax(values))
            found.append((values[best], direction, sign, edges[best]))
        _, direction, sign, edge = max(found)
        hits, misses = (int(np.sum(sign * one > edge)) for one in counted[::sign])
        value = log_ratio_bound(hits, misses, number, delta=delta, error=error)
        event = direction, float(sign * edge), hits, misses, number
        bounds.append(EpsilonBound(float(value), delta, confidence, *event))
    return tuple(bounds)


def check_confidence(confidence: float) -> None:
    """Refuses a confidence outside [0.5, 1)."""
    _validation.one("confidence", confidence, _confidence)


class Guesses(NamedTuple):
    """What an attacker guessed about canaries, and what that proves.

    Attributes:
      epsilon: nats, >= 0; a *lower bound* that holds with the stated confidence.
      delta: at which it holds.
      confidence: of the bound, including the choice of the number of guesses.
      num_canaries: number of canaries.
      num_guesses: canaries about which the attacker guessed.
      num_correct: correct guesses.
    """

    epsilon: float
    delta: float
    confidence: float
    num_canaries: int
    num_guesses: int
    num_correct: int

    def disproves(self, claim: float) -> bool:
        """True if the guesses refute a claimed epsilon, at the bound's confidence.

        One run never comes near an exact claim, so no higher confidence is needed.
        """
        return self.epsilon > claim


def one_run_p_value(
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    *,
    epsilon: float,
    delta: float,
) -> float:
    """Returns the probability of so many correct guesses under (epsilon, delta)-DP.

    Each of m canaries is included with probability 1/2, independently. From the output
    of one run an attacker guesses for at most r canaries, for v of them correctly. With
    ``W ~ Binomial(r, e^epsilon / (1 + e^epsilon))``,

        P(v or more right) <= P(W >= v) + 2 m delta max_i P(v > W >= v - i) / i,

    for i = 1 ... m.

    Args:
      num_canaries: m >= 1.
      num_guesses: r in [0, m], fixed in advance.
      num_correct: v in [0, r].
      epsilon: >= 0.
      delta: in [0, 1].

    Returns:
      An *upper bound* of the probability, at most 1.

    Reference: Steinke, Nasr, Jagielski (2023), "Privacy Auditing with One (1) Training
    Run", arXiv:2305.08846, Theorem 5.2 and Algorithm 1 (for white and black box).
    """
    whole = _validation.whole_number
    m = whole("num_canaries", num_canaries)
    r = whole("num_guesses", num_guesses, minimum=0, maximum=m)
    v = whole("num_correct", num_correct, minimum=0, maximum=r)
    epsilon = _validation.one("epsilon", epsilon, _validation.nonnegative_array)
    delta = _validation.one("delta", delta, _validation.probability_array)
    chance, trials = np.asarray(1 / (1 + np.exp(-epsilon))), np.asarray(float(r))
    if v == 0:
        return 1.0
    tail = float(np.exp(log_binomial_tail(np.asarray(v), trials, chance, side="upper")))
    below = np.arange(v - 1, -1, -1)  # W = v - 1, v - 2, ..., so i = 1, 2, ...
    within = np.cumsum(np.exp(log_binomial_mass(below, trials, chance)))
    slope = float(np.max(within / np.arange(1, v + 1)))
    # The factor covers rounding errors of the probabilities.
    return min(tail + 2 * m * delta * slope * (1 + 1e-9), 1.0)


def one_run_epsilon(
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    *,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Returns the epsilon that so many correct guesses in one run disprove.

    It is the largest epsilon whose `one_run_p_value` is at most ``1 - confidence``: a
    *lower bound* of the run's epsilon that fails with that probability at most; 0 if
    there is none. The number of guesses must be fixed in advance; see `best_guesses`.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a number out of range.
    """
    check_confidence(confidence)
    _validation.one("delta", delta, _delta)

    def disproved(epsilon: float) -> bool:
        p_value = one_run_p_value(
            num_canaries, num_guesses, num_correct, epsilon=epsilon, delta=delta
        )
        return p_value <= 1 - confidence

    low, high = 0.0, _LARGEST_EPSILON
    if not disproved(low):
        return 0.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if disproved(middle) else (low, middle)
    return low


def best_guesses(
    scores: np.ndarray,
    is_in: np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
    fractions: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 1.0),
) -> Guesses:
    """Guesses by scores: the highest are in, the lowest are out, the rest not guessed.

    Several shares of guesses are tried, and the confidence of each is raised so that
    the best one may be chosen (Bonferroni). Half of the guesses are "in", half "out".

    Args:
      scores: (m,) one for each canary, computed without ``is_in``; large means in.
      is_in: (m,) bool, whether each canary was included.
      delta: in [0, 1).
      confidence: of the result.
      fractions: shares of the canaries that are guessed, fixed in advance.

    Returns:
      The guesses with the largest lower bound.
    """
    scores, is_in = _validation.real_array("scores", scores), np.asarray(is_in)
    if is_in.dtype != bool or scores.shape != is_in.shape or scores.ndim != 1:
        raise ValueError(
            "scores and is_in must be numbers and booleans of one shape (m,), got "
            f"shapes {scores.shape} and {is_in.shape} ({is_in.dtype})"
        )
    check_confidence(confidence)
    number = len(scores)
    order = np.argsort(scores, kind="stable")
    each = 1 - (1 - confidence) / len(fractions)
    found = []
    for fraction in fractions:
        half = max(int(fraction * number / 2), 1) if number > 1 else 0
        right = int(is_in[order[number - half :]].sum() + (~is_in[order[:half]]).sum())
        bound = one_run_epsilon(number, 2 * half, right, delta=delta, confidence=each)
        found.append(Guesses(bound, delta, confidence, number, 2 * half, right))
    return max(found, key=lambda guesses: guesses.epsilon)


# --- Claims and audits ---


class ReleaseAudit(NamedTuple):
    """What calls of a mechanism show about its epsilon; arrays over deltas.

    Attributes:
      claimed: (k,) epsilon at each delta; *upper bounds* if the claim is true.
      bounds: one for each delta; together they hold with the stated confidence.
    """

    claimed: np.ndarray
    bounds: tuple[EpsilonBound, ...]

    @property
    def is_violated(self) -> bool:
        """Whether the calls disprove the claim at any delta with 99.99 % confidence."""
        pairs = zip(self.bounds, self.claimed, strict=True)
        return any(bound.disproves(float(claim)) for bound, claim in pairs)


class AuditRow(NamedTuple):
    """One claim and its audit.

    Attributes:
      name: of the design or run.
      attacker: what was audited.
      delta: of the claim.
      claimed_rdp: nats, *upper bound*; None if it was not computed.
      claimed_exact: nats, *upper bound*.
      evidence: the audit, whose ``epsilon`` is a *lower bound*.
    """

    name: str
    attacker: str
    delta: float
    claimed_rdp: float | None
    claimed_exact: float
    evidence: EpsilonBound | Guesses

    @property
    def audited(self) -> float:
        """The lower bound, nats."""
        return self.evidence.epsilon

    @property
    def gap(self) -> float:
        """Difference between the exact claim and the lower bound, nats."""
        return self.claimed_exact - self.audited

    @property
    def share(self) -> float:
        """Lower bound divided by the exact claim; 0 if nothing is claimed."""
        return self.audited / self.claimed_exact if self.claimed_exact > 0 else 0.0

    @property
    def claimed(self) -> float:
        """The smallest claim, nats."""
        rdp = math.inf if self.claimed_rdp is None else self.claimed_rdp
        return min(self.claimed_exact, rdp)

    @property
    def is_above(self) -> bool:
        """True if the lower bound exceeds a claim, which may be chance."""
        return self.audited > self.claimed

    @property
    def is_violated(self) -> bool:
        """True if the audit disproves a claim; see the evidence's ``disproves``."""
        return self.evidence.disproves(self.claimed)


def release_rows(name: str, audit: ReleaseAudit, attacker: str) -> list[AuditRow]:
    """Returns one row for each delta."""
    return [
        AuditRow(name, attacker, bound.delta, None, float(claim), bound)
        for claim, bound in zip(audit.claimed, audit.bounds, strict=True)
    ]


def audit_document(rows: Sequence[AuditRow], **facts: Any) -> dict[str, Any]:
    """Returns the rows as plain values for JSON; infinite numbers as strings."""
    found = "audited", "gap", "is_above", "is_violated"
    described = [
        row._asdict()
        | {name: getattr(row, name) for name in found}
        | {"share_of_exact": row.share, "evidence": row.evidence._asdict()}
        for row in rows
    ]
    is_violated = any(row.is_violated for row in rows)
    return plain({"version": 1, **facts, "is_violated": is_violated, "rows": described})


def audit_markdown(rows: Sequence[AuditRow]) -> str:
    """Returns the rows as a Markdown table; claims rounded up, lower bounds down."""
    lines = [
        "| design | attacker | delta | claimed, RDP | claimed, exact | audited | gap "
        "| audited / exact |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rdp = "" if row.claimed_rdp is None else upward(row.claimed_rdp)
        mark = " above" if row.is_above else ""
        mark = " **violated**" if row.is_violated else mark
        lines.append(
            f"| {row.name} | {row.attacker} | {row.delta:.15g} | {rdp} | "
            f"{upward(row.claimed_exact)} | {downward(row.audited)}{mark} | "
            f"{upward(row.gap)} | {row.share:.1%} |"
        )
    return "\n".join(lines) + "\n"

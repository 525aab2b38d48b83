"""Auditing with one run: many canaries, each in or out at random, and guesses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.numerics.binomial import (
    log_binomial_mass,
    log_binomial_tail,
)
from jaxdp_episodic.trainer.audit.bounds import check_confidence

_LARGEST_EPSILON = 64.0  # m guesses prove about log(m / 3) at most, docs/audit.md
_BISECTIONS = 60  # halve [0, 64] down to 6e-17


class Guesses(NamedTuple):
    """What an attacker guessed about canaries, and what it proves.

    Attributes:
      epsilon: nats, >= 0; a *lower bound* that holds with the stated confidence.
      delta: at which it holds.
      confidence: of the bound, the choice among numbers of guesses included.
      num_canaries: canaries that were in or out.
      num_guesses: canaries that were not abstained from.
      num_correct: right ones among them.
    """

    epsilon: float
    delta: float
    confidence: float
    num_canaries: int
    num_guesses: int
    num_correct: int

    def disproves(self, claim: float) -> bool:
        """True if the guesses refute a claimed epsilon, at the bound's confidence.

        One run never comes near an exact claim, so no more confidence is asked for.
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
    """Returns the chance of this many right guesses under (epsilon, delta)-privacy.

    Each of m canaries is included by a fair coin of its own; from the output of one
    run an attacker guesses at most r of the coins and is right v times. With
    ``W ~ Binomial(r, e^epsilon / (1 + e^epsilon))``,

        P(v or more right) <= P(W >= v) + 2 m delta max_i P(v > W >= v - i) / i,

    i over 1 ... m.

    Args:
      num_canaries: m >= 1.
      num_guesses: r in [0, m], fixed in advance.
      num_correct: v in [0, r].
      epsilon: >= 0.
      delta: in [0, 1].

    Returns:
      An *upper bound* of the probability, at most 1.

    Reference: Steinke, Nasr, Jagielski (2023), "Privacy Auditing with One (1) Training
    Run", arXiv:2305.08846, Theorem 5.2 and Algorithm 1 (white and black box alike).
    """
    whole = _validation.whole_number
    m = whole("num_canaries", num_canaries)
    r = whole("num_guesses", num_guesses, minimum=0, maximum=m)
    v = whole("num_correct", num_correct, minimum=0, maximum=r)
    chance, trials = np.asarray(1 / (1 + np.exp(-epsilon))), np.asarray(float(r))
    if v == 0:
        return 1.0
    tail = float(np.exp(log_binomial_tail(np.asarray(v), trials, chance, side="upper")))
    below = np.arange(v - 1, -1, -1)  # W = v - 1, v - 2, ..., so i = 1, 2, ...
    within = np.cumsum(np.exp(log_binomial_mass(below, trials, chance)))
    slope = float(np.max(within / np.arange(1, v + 1)))
    # Rounding of the masses, upwards.
    return min(tail + 2 * m * delta * slope * (1 + 1e-9), 1.0)


def one_run_epsilon(
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    *,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Returns the epsilon that this many right guesses in one run disprove.

    The largest epsilon whose `one_run_p_value` is at most ``1 - confidence``: a *lower
    bound* of the run's epsilon that fails with that probability at most; 0 if there is
    none. The number of guesses must be fixed in advance, see `best_guesses`.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a number out of range.
    """
    check_confidence(confidence)
    if not 0 <= delta < 1:
        raise ValueError(f"delta must lie in [0, 1), got {delta!r}")

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
    """Guesses from scores: the highest are in, the lowest out, the rest abstained from.

    Several shares of guesses are tried, and the confidence of each is raised so that
    the best may be taken (Bonferroni). Half of the guesses are "in", half "out".

    Args:
      scores: (m,) one a canary, computed without its coin; large means in.
      is_in: (m,) bool, the coins.
      delta: in [0, 1).
      confidence: of the answer.
      fractions: shares of the canaries that are guessed, fixed in advance.

    Returns:
      The best of them.
    """
    scores, is_in = np.asarray(scores, np.float64), np.asarray(is_in)
    if is_in.dtype != bool or scores.shape != is_in.shape or scores.ndim != 1:
        raise ValueError(
            "scores and is_in must be numbers and booleans of one shape (m,), got "
            f"shapes {scores.shape} and {is_in.shape} ({is_in.dtype})"
        )
    if np.isnan(scores).any():
        raise ValueError("scores must not be NaN")
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

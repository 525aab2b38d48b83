"""Privacy amplification by shuffling the messages of n local randomizers.

Each of ``n`` users sends one message of an ``eps0``-locally private randomizer, and a
trusted shuffler permutes them at random. Neighbours replace one user's value.
docs/amplification.md has the proof, and says which results of later papers are not
used.

``local_epsilon`` is eps0 >= 0 in nats, at most 300 except for the closed form.
``num_users`` is n, a whole number >= 1, up to 1e9 and more. Both may be arrays; results
are float64 of the broadcast shape. They hold under ``replace_one``, in both directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.common import checked, smallest_epsilon
from jaxdp_episodic.accountant.numerics.binomial import (
    ROUNDING_OF_WEIGHTS,
    log_binomial_mass,
    log_shifted_hockey_stick,
)
from jaxdp_episodic.accountant.numerics.loops import logsumexp
from jaxdp_episodic.accountant.questions.api import delta_of, log_of

# Kinds of bound, see `shuffled_delta`.
KINDS = ("upper", "randomized_response", "lower")
# Largest number of blocks in which clone counts are summed.
_BLOCKS = 1024
# -log of the probability that a clone count lies outside the blocks, at each end.
_TAIL_EXPONENT = 80.0
# Exceeds the relative error of a binomial probability at n = 1e12.
_ROUNDING = 1e-9
# Settings that are evaluated together, which bounds memory to some megabytes.
_ROWS = 16
# Smaller local epsilons are raised to it in upper bounds: its exponential is not 1.
_SMALLEST_LOCAL_EPSILON = 1e-15


def shuffled_epsilon_closed_form(
    local_epsilon: Any, *, num_users: Any, delta: Any
) -> Any:
    """Returns epsilon of n shuffled ``eps0``-private messages, in closed form.

        log(1 + (e^eps0 - 1)/(e^eps0 + 1) (8 sqrt(e^eps0 log(4/delta)/n) + 8 e^eps0/n))

    if ``eps0 <= log(n / (16 log(2 / delta)))``. Otherwise, and if that exceeds
    ``eps0``, it returns ``eps0``, since shuffling cannot increase epsilon.

    ``delta`` lies in (0, 1). An *upper bound* for any randomizers, including different
    and adaptive ones.

    Reference: Feldman, McMillan and Talwar (2021), "Hiding among the clones",
    arXiv:2012.12803, Theorem 3.1.
    """
    eps0, n, delta = checked(
        local_epsilon=local_epsilon, num_users=num_users, delta__inside=delta
    )
    with np.errstate(divide="ignore", over="ignore"):
        log_n = np.log(n)
        allowed = eps0 <= log_n - np.log(16 * (np.log(2.0) - np.log(delta)))
        safe = np.where(allowed, eps0, 0.0)
        crowd = np.exp(safe - log_n)
        slack = 8 * np.sqrt(crowd * (np.log(4.0) - np.log(delta))) + 8 * crowd
        closed = np.log1p(np.tanh(safe / 2) * slack) * (1 + 1e-15)
    return np.where(allowed, np.minimum(closed, eps0), eps0)[()]


def shuffled_delta(
    local_epsilon: Any, *, num_users: Any, epsilon: Any, kind: str = "upper"
) -> Any:
    """Returns delta of n shuffled ``eps0``-private messages at a given epsilon.

    The ``kind`` is one of

    * "upper": an *upper bound* for any randomizers, including different and adaptive
      ones;
    * "randomized_response": an *upper bound* for binary randomized response on any
      data, the smaller of "upper" and of the bound by its own clones;
    * "lower": a *lower bound* on delta of the worst randomizer, by responses over two
      and three values.

    Summing clone counts in blocks costs a fraction of a percent of delta.

    Reference: Feldman, McMillan and Talwar (2021), arXiv:2012.12803, Section 3;
    (2023), arXiv:2208.04591, for the clones of randomized response.
    """
    _validation.choice("kind", kind, KINDS)
    eps0, n, eps = checked(
        local_epsilon__limited=local_epsilon, num_users=num_users, epsilon=epsilon
    )
    logs = _log_delta(eps0.ravel(), n.ravel(), eps.ravel(), kind)
    return delta_of(logs, up=kind != "lower").reshape(eps0.shape)[()]


def shuffled_epsilon(
    local_epsilon: Any, *, num_users: Any, delta: Any, kind: str = "upper"
) -> Any:
    """Returns epsilon of n shuffled ``eps0``-private messages at a given delta.

    It is the smallest epsilon found, to 1e-7 relative, at which `shuffled_delta` does
    not exceed ``delta``, in [0, 1). It is at most ``eps0``, and ``eps0`` at delta 0. An
    *upper bound*; for "lower" a *lower bound*, rounded down by the tolerance.

    Reference: see `shuffled_delta`.
    """
    _validation.choice("kind", kind, KINDS)
    every = checked(
        local_epsilon__limited=local_epsilon, num_users=num_users, delta__below_1=delta
    )
    shape, (eps0, n, target) = every[0].shape, (each.ravel() for each in every)

    def log_delta(epsilon: np.ndarray, index: np.ndarray) -> np.ndarray:
        return _log_delta(eps0[index], n[index], epsilon, kind)

    found = smallest_epsilon(log_delta, log_of(target), np.where(target > 0, eps0, 0.0))
    if kind == "lower":
        found = found * (1 - 2e-7)
        found = np.where(found <= 2e-9 * eps0, 0.0, found)
    return np.where(target > 0, found, eps0).reshape(shape)[()]


def _log_delta(
    eps0: np.ndarray, n: np.ndarray, eps: np.ndarray, kind: str
) -> np.ndarray:
    """Returns ``log delta`` of flat settings, (m,)."""
    result = np.full(eps0.shape, -np.inf)
    index = np.flatnonzero(eps < eps0)  # else delta is 0
    eps0 = eps0 if kind == "lower" else np.maximum(eps0, _SMALLEST_LOCAL_EPSILON)
    for start in range(0, index.size, _ROWS):
        rows = index[start : start + _ROWS]
        arguments = eps0[rows], n[rows], eps[rows]
        if kind == "lower":
            two = two_values(*arguments, side="lower")
            found = np.maximum(two, _three_values(*arguments))
        else:
            found = _clones(*arguments, chance=np.exp(-eps0[rows]))
        if kind == "randomized_response":
            # More clones hide better, but summing their counts in blocks costs more of
            # a small delta: at n = 1e7 and eps0 = 0.01 the general bound is smaller.
            all_ = _clones(*arguments, chance=2 * answers(eps0[rows])[1])
            found = np.minimum(found, all_)
        result[rows] = found
    rounding = -_ROUNDING if kind == "lower" else _ROUNDING
    return np.minimum(result + rounding, 0.0)


def _clones(
    eps0: np.ndarray, n: np.ndarray, eps: np.ndarray, *, chance: np.ndarray
) -> np.ndarray:
    """Upper bound: each block of clone counts has the delta of its smallest count."""
    own, cross = answers(eps0)
    starts, lengths = _blocks(n - 1, chance)
    # Upper bound of a block's probability: geometric, by log-concavity.
    trials, p = (n - 1)[:, None], chance[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (trials - starts) / (starts + 1)
        slope = np.log(ratio * (p / -np.expm1(np.log(p))))
    log_mass = log_binomial_mass(starts, trials, p) + _log_geometric(slope, lengths)
    log_stick = log_shifted_hockey_stick(
        starts,
        np.array(1.0),
        own[:, None],
        cross[:, None],
        np.expm1(eps)[:, None],
        side="upper",
    )
    with np.errstate(divide="ignore"):
        gain = own - cross + ROUNDING_OF_WEIGHTS - np.expm1(eps) * cross
        log_gain = np.log(np.maximum(gain, 0.0))
    cut = log_gain - _TAIL_EXPONENT + np.log(2.0)
    return np.logaddexp(logsumexp(log_mass + log_stick, axis=-1), cut)


def two_values(
    eps0: np.ndarray, n: np.ndarray, eps: np.ndarray, *, side: str
) -> np.ndarray:
    """Log-delta of randomized response if the others' bits agree, both directions."""
    own, cross = answers(eps0)
    rise = np.expm1(eps)
    return np.maximum(
        *(
            log_shifted_hockey_stick(n - 1, odds, own, cross, rise, side=side)
            for odds in (np.exp(-eps0), np.exp(eps0))
        )
    )


def _three_values(eps0: np.ndarray, n: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """Lower bound: response over {0, 1, 2}; all others hold 2, user 1 has 0 or 1."""
    b = 1 / (np.exp(eps0) + 2)
    chance = 2 * b
    starts, lengths = _blocks(n - 1, chance)  # m - 1
    last = starts + np.maximum(lengths, 1) - 1
    # Lower bound of a block's probability: the chord, by log-concavity.
    trials, p = (n - 1)[:, None], chance[:, None]
    first, final = (log_binomial_mass(k, trials, p) for k in (starts, last))
    slope = (final - first) / np.maximum(last - starts, 1.0)
    log_mass = first + _log_geometric(slope, lengths)
    odds = (chance / (1 - chance))[:, None]
    # P(m others) / P(m - 1 others), largest at the start of the block.
    ratio = np.maximum(trials - starts, 0.0) / (starts + 1) * odds
    second = 0.5 * b[:, None] * ratio  # as 1 - b - b e^eps0 = b
    own = (b * np.exp(eps0))[:, None] + second
    cross = b[:, None] + second
    log_stick = log_shifted_hockey_stick(
        last, np.array(1.0), own, cross, np.expm1(eps)[:, None], side="lower"
    )
    return logsumexp(log_mass + log_stick, axis=-1)


def answers(eps0: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probabilities of the true and of the false answer."""
    return 1 / (1 + np.exp(-eps0)), np.exp(-eps0) / (1 + np.exp(-eps0))


def _blocks(trials: np.ndarray, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns first counts and lengths (m, blocks); ``e^-80`` is left at each end."""
    mean = trials * chance
    down = np.sqrt(2 * _TAIL_EXPONENT * mean)
    third = _TAIL_EXPONENT / 3
    up = third + np.sqrt(third**2 + 2 * _TAIL_EXPONENT * mean)  # Bernstein
    low = np.maximum(np.floor(mean - down), 0.0)
    high = np.minimum(np.ceil(mean + up), trials)
    share = np.arange(_BLOCKS + 1) / _BLOCKS
    edges = low[:, None] + np.floor(share * (high - low + 1)[:, None])
    return edges[:, :-1], np.diff(edges, axis=1)


def _log_geometric(slope: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns ``log(1 + e^s + ... + e^{(l-1) s})``; ``-inf`` for an empty block."""
    slope = np.clip(slope, -700.0, 700.0)
    # The sum is e^{(l-1) s} times the one with -s: nothing overflows.
    size = np.maximum(np.abs(slope), 1e-12)
    with np.errstate(divide="ignore"):
        total = np.log(np.expm1(-lengths * size) / np.expm1(-size))
    larger = np.maximum(slope, 0.0) * np.maximum(lengths - 1, 0.0)
    return np.where(lengths > 0, total + larger, -np.inf)

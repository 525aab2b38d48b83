"""The discrete Gaussian: exact samples, and how much they hide.

``N_Z(0, V)`` has probabilities proportional to ``exp(-x^2 / (2 V))`` on the integers
(Canonne, Kamath and Steinke 2020). Added to integers it leaves no low-order bits that
could tell two sums apart, and no probability is computed in floating point: a sample is
a function of uniform bits that has exactly this distribution.
"""

from __future__ import annotations

import decimal
import hashlib
import math
from decimal import Decimal
from fractions import Fraction
from functools import cache

import numpy as np

SMOOTHING = 16
"""Variance, in squared grid steps, by which discrete noise exceeds what it stands for.
"""

LARGEST_VARIANCE = 2**52
"""Beyond it squares of samples leave 64 bits."""

# Comparisons closer than this are decided by exact arithmetic; float64 exponentials
# and sums of a few of them are good to 2^-50.
_DOUBT = 2.0**-40
_WORD = 2.0**-64
_AT_ONCE = 2**17
# Quotients above it have probability 2^-65 in all; exact arithmetic takes them up.
_QUOTIENTS = 10


def covering_variance(deviation: float) -> int:
    """Returns V such that ``N_Z(0, V)`` hides integers as ``N(0, deviation^2)`` does.

    ``V = ceil(deviation^2) + SMOOTHING``. For integers ``m``, round a sample of
    ``N(m, V - 16)`` at random: to the integer ``z`` with probability proportional to
    ``exp(-(z - y)^2 / 32)``. The distribution of ``z`` is ``N_Z(m, V)`` up to the two
    normalizations, which are within ``1 +- eta``, ``eta = 2 sum_k exp(-32 pi^2 k^2)``
    (Poisson summation; the smoothing argument of Micciancio and Regev 2007). Rounding
    is post-processing, so whatever holds for continuous noise, of any mixture of
    integer sums over any number of steps, holds for discrete noise up to
    `log_ratio_bound`.

    Args:
      deviation: in grid steps, >= 0, finite.

    Raises:
      ValueError: a negative deviation, or one of more than 2^26.
    """
    if not 0 <= deviation <= math.isqrt(LARGEST_VARIANCE):
        raise ValueError(f"deviation must be in [0, 2**26], got {deviation!r}")
    return math.ceil(Fraction(deviation) ** 2) + SMOOTHING


def log_ratio_bound(num_entries: int, num_steps: int = 1) -> float:
    """Returns how far likelihoods of discrete noise are from rounded continuous noise.

    Where continuous noise is (epsilon, delta)-private, discrete noise of
    `covering_variance` is (epsilon + 2 b, delta exp(b))-private, ``b`` this bound.

    Args:
      num_entries: of the integer sum, >= 1.
      num_steps: of the run, >= 1.

    Returns:
      Nats (*upper bound*): about 1e-136 for each entry and step.
    """
    # Two normalizations in the ratio, each within 1 +- eta; 5 pays for the other terms.
    eta = math.exp(-2 * math.pi**2 * SMOOTHING)
    return 5.0 * eta * num_entries * num_steps


def sample_discrete_gaussian(variance: int, count: int, seed: bytes) -> np.ndarray:
    """Returns independent samples of ``N_Z(0, variance)``, (count,) int64.

    *Exact*: a rejection sampler (after Karney 2016) whose every comparison is decided
    in float64 only where it is clear there, and by exact arithmetic otherwise. The
    uniform bits are SHAKE-256 of the seed. The time taken depends on the samples.

    Args:
      variance: V, a whole number in [1, 2^52].
      count: >= 0.
      seed: at least 16 secret bytes, never used for other samples.

    Raises:
      TypeError: a variance that is no whole number.
      ValueError: one out of range, a negative count or a short seed.
    """
    if not isinstance(variance, int):
        raise TypeError(f"variance must be a whole number, got {variance!r}")
    if not 1 <= variance <= LARGEST_VARIANCE:
        raise ValueError(f"variance must be in [1, 2**52], got {variance}")
    if count < 0:
        raise ValueError(f"count must be >= 0, got {count}")
    if len(seed) < 16:
        raise ValueError(f"seed must have at least 16 bytes, got {len(seed)}")
    bits = _Bits(seed)
    parts = [np.zeros(0, np.int64)]
    missing = count
    while missing > 0:
        # Seven of ten candidates are kept.
        some = min(_AT_ONCE, missing + missing // 2 + 16)
        kept = _candidates(variance, some, bits)[:missing]
        parts.append(kept)
        missing -= len(kept)
    return np.concatenate(parts)


class _Bits:
    """Uniform bits that follow from a seed."""

    def __init__(self, seed: bytes) -> None:
        self._seed = hashlib.sha3_256(seed).digest()
        self._calls = 0

    def words(self, count: int) -> np.ndarray:
        """The next words, (count,) uint64."""
        label = self._calls.to_bytes(8, "little")
        self._calls += 1
        stream = hashlib.shake_256(self._seed + label).digest(8 * count)
        return np.frombuffer(stream, "<u8")

    def extension(self, place: int) -> _Extension:
        """More bits behind one word of the latest call."""
        label = self._calls.to_bytes(8, "little") + place.to_bytes(8, "little")
        return _Extension(self._seed + label)


class _Extension:
    """A uniform number in [0, 1) of which more and more bits are looked at."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def digits(self, word: int, num_bits: int) -> int:
        """The first 64 bits, which are given, and ``num_bits`` more."""
        more = hashlib.shake_256(self._seed).digest(num_bits // 8)
        return (word << num_bits) | int.from_bytes(more, "big")


def _candidates(variance: int, count: int, bits: _Bits) -> np.ndarray:
    """The accepted ones of so many candidates.

    A candidate is ``+-(t k + j)`` with ``t = ceil(sqrt(V))``, the quotient ``k`` of
    probability proportional to ``exp(-k^2 / 2)`` and ``j`` uniform below ``t``. It is
    accepted with probability ``exp(-(x^2 - k^2 V) / (2 V)) <= 1``.
    """
    width = math.isqrt(variance - 1) + 1
    quotients = _quotients(count, bits)
    # Words beyond the last multiple of the width would favour small remainders.
    words = bits.words(count)
    fair = words <= np.uint64(2**64 - 1 - 2**64 % width)
    places = (words % np.uint64(width)).astype(np.int64)
    value = width * quotients + places
    excess = value * value - quotients * quotients * variance
    accepted = fair & _below_exponential(excess, 2 * variance, count, bits)
    negative = (bits.words(count) & np.uint64(1)).astype(bool)
    accepted &= ~(negative & (value == 0))  # zero counts once
    return np.where(negative, -value, value)[accepted]


def _quotients(count: int, bits: _Bits) -> np.ndarray:
    """Whole numbers k >= 0 with probability proportional to exp(-k^2 / 2)."""
    words = bits.words(count)
    uniform = words * _WORD
    steps = np.array([float(c) for c in _cumulative(40)])
    quotients = np.searchsorted(steps, uniform, side="right")
    above = np.abs(steps[np.minimum(quotients, _QUOTIENTS)] - uniform)
    below = np.abs(uniform - steps[np.maximum(quotients - 1, 0)])
    doubtful = (np.minimum(above, below) < _DOUBT) | (quotients > _QUOTIENTS)
    for place in np.flatnonzero(doubtful):
        more = bits.extension(int(place))
        quotients[place] = _exact_quotient(int(words[place]), more)
    return quotients.astype(np.int64)


def _below_exponential(
    excess: np.ndarray, denominator: int, count: int, bits: _Bits
) -> np.ndarray:
    """Whether uniform numbers are below ``exp(-excess / denominator)``, (count,)."""
    words = bits.words(count)
    uniform = words * _WORD
    chance = np.exp(-excess / denominator)
    below = uniform < chance
    for place in np.flatnonzero(np.abs(uniform - chance) < _DOUBT):
        more = bits.extension(int(place))
        exponent = Fraction(int(excess[place]), denominator)
        below[place] = _exactly_below(int(words[place]), exponent, more)
    return below


def _exactly_below(word: int, exponent: Fraction, more: _Extension) -> bool:
    """Whether a uniform number is below ``exp(-exponent)``."""
    if exponent == 0:
        return True
    num_bits = 128
    while True:
        low, high, digits = _between(word, num_bits, more)
        with decimal.localcontext(prec=digits):
            chance = (-Decimal(exponent.numerator) / exponent.denominator).exp()
            error = Decimal(10) ** (5 - digits)
            if high < chance - error:
                return True
            if low > chance + error:
                return False
        num_bits *= 2


def _exact_quotient(word: int, more: _Extension) -> int:
    """The quotient that a uniform number stands for."""
    num_bits = 128
    while True:
        low, high, digits = _between(word, num_bits, more)
        error = Decimal(10) ** (5 - digits)
        for quotient, step in enumerate(_cumulative(digits)):
            if high < step - error:
                return quotient
            if low <= step + error:
                break  # too near to tell
        num_bits *= 2


def _between(
    word: int, num_bits: int, more: _Extension
) -> tuple[Decimal, Decimal, int]:
    """Ends of the interval in which a uniform number lies, and digits to compare to."""
    total = 64 + num_bits
    digits = int(total * math.log10(2)) + 20
    known = more.digits(word, num_bits)
    with decimal.localcontext(prec=digits):
        unit = Decimal(2) ** -total
        return known * unit, (known + 1) * unit, digits


@cache
def _cumulative(digits: int) -> tuple[Decimal, ...]:
    """Probabilities of quotients up to k, to that many digits, k = 0, 1, ..."""
    with decimal.localcontext(prec=digits + 10):
        # exp(-k^2 / 2) is below 10^-(digits + 10) from this k on.
        last = math.isqrt(5 * (digits + 10)) + 2
        terms = [(-Decimal(k * k) / 2).exp() for k in range(last)]
        total = sum(terms, Decimal(0))
        sums, so_far = [], Decimal(0)
        for term in terms:
            so_far += term
            sums.append(so_far / total)
        return tuple(sums)

"""Exact samples of the discrete Gaussian, and the Gaussian noise that it replaces.

Reference: Canonne, Kamath, Steinke (2020), arXiv:2004.00010; docs/proofs.md,
"Discrete noise"; Marsaglia and Tsang (2000) for the ziggurat.
"""

from __future__ import annotations

import decimal
import itertools
import math
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

SMOOTHING = 16
"""Variance of discrete noise minus that of Gaussian noise, in squared grid steps."""

LARGEST_VARIANCE = 2**112
"""Beyond this, samples could exceed 64 bits: ten deviations have probability 1e-22."""

# Comparisons closer than this use exact arithmetic. Float64 exponentials of exponents
# below 64, and sums of a few of them, have errors below 2^-44.
_DOUBT = 2.0**-40
_LAYERS = 256  # one byte of each random word chooses the layer
# Standard deviations at which the layers end; the tail has probability 1e-23.
_END = 10.0
# Log2 of the largest number of blocks in a layer; 32 bits of a word choose the block.
_BLOCK_BITS = 17
# Remaining bits of a word, for the position within a block.
_SPARE_BITS = 23
# First guess of the area of the layers, divided by that under the curve. It exceeds 1
# because widths are whole numbers.
_FIRST_EXCESS = 1.01
# Number of bisections of that ratio, to 1e-4 or better.
_HALVINGS = 7
# Candidates made at once, so that their arrays fit into a processor's cache.
_AT_ONCE = 2**15


def covering_variance(deviation: float) -> int:
    """Returns V so that ``N_Z(0, V)`` hides integers as ``N(0, deviation^2)`` does."""
    # If a sample of N(m, V - 16) is rounded at random to z, with probability
    # proportional to exp(-(z - y)^2 / 32), the result is N_Z(m, V) up to
    # `log_ratio_bound` (Micciancio and Regev 2007).
    if not 0 <= deviation <= math.isqrt(LARGEST_VARIANCE) - SMOOTHING:
        raise ValueError(f"deviation must be in [0, 2**56 - 16], got {deviation!r}")
    return math.ceil(Fraction(deviation) ** 2) + SMOOTHING


def log_ratio_bound(num_entries: int, num_steps: int = 1) -> float:
    """Bounds log likelihood ratios of discrete over continuous noise, in nats."""
    # If continuous noise is (epsilon, delta)-DP, discrete noise is (epsilon + 2 b,
    # delta exp(b))-DP for this bound b, about 1e-136 per entry and step. The ratio has
    # two normalizations, each within 1 +- eta; 5 covers the other terms.
    eta = math.exp(-2 * math.pi**2 * SMOOTHING)
    return 5.0 * eta * num_entries * num_steps


def sample_discrete_gaussian(
    variance: int, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns independent samples of ``N_Z(0, variance)``, (count,) int64."""
    # *Exact* if the generator's bits are uniform: a comparison that float64 cannot
    # decide with certainty uses exact arithmetic.
    if not isinstance(variance, int):
        raise TypeError(f"variance must be a whole number, got {variance!r}")
    if not 1 <= variance <= LARGEST_VARIANCE:
        raise ValueError(f"variance must be in [1, 2**112], got {variance}")
    if count < 0:
        raise ValueError(f"count must be >= 0, got {count}")
    layers, samples, done = _layers(variance), np.empty(count, np.int64), 0
    while done < count:
        missing = count - done
        # Nearly all candidates are kept.
        some = min(_AT_ONCE, missing + missing // 64 + 16)
        kept = _candidates(layers, some, generator)[:missing]
        samples[done : done + len(kept)] = kept
        done += len(kept)
    return samples


class _Layers:
    """Stacked layers of equal area that cover the curve exp(-x^2 / (2 V)).

    A layer is as wide as the curve at the layer's bottom. The last number of the lowest
    layer also represents the tail, whose area is much smaller.
    """

    def __init__(self, variance: int, excess: float) -> None:
        """Builds layers of ``excess`` times the area under the curve."""
        self.variance, self._deviation = variance, math.sqrt(variance)
        end = math.ceil(_END * self._deviation)
        self.shift = max(0, end.bit_length() - _BLOCK_BITS)
        needed = math.sqrt(math.pi / 2) * self._deviation / 2**self.shift
        self._area = excess * needed / _LAYERS
        widths, sure, bottoms = [(end >> self.shift) + 1], [], [0.0]
        for place in range(_LAYERS):
            top = bottoms[-1] + self._area / widths[place]
            bottoms.append(top)
            # The curve's width at the top, rounded down and up by a margin.
            sure.append(self._reach(top * (1 + _DOUBT)) + 1)
            beyond = self._reach(top * (1 - _DOUBT)) + 1
            widths.append((beyond >> self.shift) + 1)
        self.widths = np.array(widths[:-1], np.uint64)
        self.surplus = np.uint64(2**32) % self.widths
        self.sure = np.array(sure, np.int64)
        self.bottoms = np.array(bottoms)
        self.last = (widths[0] << self.shift) - 1

    def _reach(self, height: float) -> int:
        """Returns the x, rounded down, at which the curve has this height, or -1."""
        if height >= 1:
            return -1
        return int(math.sqrt(-2 * math.log(height)) * self._deviation)

    @property
    def cover(self) -> bool:
        """Whether the layers reach above the curve, whose height at 0 is 1."""
        return bool(self.bottoms[-1] * (1 - _DOUBT) >= 1)

    @cached_property
    def exact_bottoms(self) -> list[Fraction]:
        """`bottoms`, without rounding errors."""
        area = Fraction(self._area)
        heights = (area / int(width) for width in self.widths)
        return list(itertools.accumulate(heights, initial=Fraction(0)))


@lru_cache(maxsize=32)  # enough for a run, including its private statistics
def _layers(variance: int) -> _Layers:
    """Returns layers that cover the curve with little excess."""
    low, high = 1.0, _FIRST_EXCESS
    while not (found := _Layers(variance, high)).cover:
        low, high = high, 1 + 2 * (high - 1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = _Layers(variance, middle)
        if tried.cover:
            high, found = middle, tried
        else:
            low = middle
    return found


def _words(count: int, generator: np.random.Generator) -> np.ndarray:
    """Returns uniform words, (count,) uint64."""
    most = np.iinfo(np.uint64).max
    return generator.integers(0, most, count, dtype=np.uint64, endpoint=True)


def _candidates(
    layers: _Layers, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns the accepted ones of ``count`` candidates, each made from one word."""
    # Bits of a word: 8 for the layer, one for the sign, 23 for the position within a
    # block, and 32 for the block.
    words = _words(count, generator)
    layer = (words & np.uint64(_LAYERS - 1)).astype(np.intp)
    blocks = (words >> np.uint64(32)) * layers.widths[layer]
    # Rejects a part of the 2^32 values that would favour some blocks (Lemire 2019).
    fair = (blocks & np.uint64(2**32 - 1)) >= layers.surplus[layer]
    value = (blocks >> np.uint64(32)).astype(np.int64)
    if layers.shift:
        value = (value << layers.shift) + _positions(words, layers.shift, generator)
    accepted = value < layers.sure[layer]
    open_ones = np.flatnonzero(~accepted)
    accepted[open_ones] = _below_curve(
        layers, layer[open_ones], value[open_ones], generator
    )
    # The lowest layer alone has the tail.
    is_last = (value[open_ones] == layers.last) & (layer[open_ones] == 0)
    for place in open_ones[is_last]:
        found = _from_tail(layers, generator)
        accepted[place] = found is not None
        value[place] = layers.last if found is None else found
    negative = (words & np.uint64(_LAYERS)).astype(bool)
    accepted &= fair & (~negative | (value != 0))  # zero counts once
    return np.where(negative, -value, value)[accepted]


def _positions(
    words: np.ndarray, num_bits: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns positions within blocks, from spare bits of the words if they suffice."""
    if num_bits <= _SPARE_BITS:
        words = words >> np.uint64(32 - _SPARE_BITS)
    else:
        words = _words(len(words), generator)
    return (words & np.uint64(2**num_bits - 1)).astype(np.int64)


def _below_curve(
    layers: _Layers,
    layer: np.ndarray,
    value: np.ndarray,
    generator: np.random.Generator,
) -> np.ndarray:
    """Returns whether points at uniform heights in their layers are below the curve."""
    words = _words(len(value), generator)
    bottom, top = layers.bottoms[layer], layers.bottoms[layer + 1]
    height = bottom + (top - bottom) * (words * 2.0**-64)
    curve = np.exp(-0.5 * np.square(value / math.sqrt(layers.variance)))
    below = height < curve
    for place in np.flatnonzero(np.abs(height - curve) < _DOUBT):
        start, end = layers.exact_bottoms[layer[place] : layer[place] + 2]
        exponent = Fraction(int(value[place]) ** 2, 2 * layers.variance)
        word = int(words[place])
        below[place] = _is_below(start, end - start, word, exponent, generator)
    return below


def _from_tail(layers: _Layers, generator: np.random.Generator) -> int | None:
    """Returns a number of the tail, or None if the candidate is rejected."""
    # A proposal is uniform within a step of one deviation; each step is half as likely
    # as the one before. The tail falls faster, by exp(-10) per step.
    step = math.isqrt(layers.variance - 1) + 1
    start, chance = layers.last, Fraction(1, 2 * step)
    while int(generator.integers(2)):
        start, chance = start + step, chance / 2
    value = start + int(generator.integers(step))
    height = layers.exact_bottoms[1] * chance
    word = int(_words(1, generator)[0])
    exponent = Fraction(value * value, 2 * layers.variance)
    return value if _is_below(Fraction(0), height, word, exponent, generator) else None


def _is_below(
    bottom: Fraction,
    height: Fraction,
    word: int,
    exponent: Fraction,
    generator: np.random.Generator,
) -> bool:
    """Returns whether ``bottom + height u < exp(-exponent)``, exponent >= 0; exact."""
    known, num_bits = word, 64
    while True:
        for more in _words(num_bits // 64, generator):
            known = (known << 64) | int(more)
        num_bits *= 2
        digits = int(num_bits * math.log10(2)) + 20
        low = bottom + height * known / 2**num_bits
        high = low + height / 2**num_bits
        with decimal.localcontext(prec=digits):
            curve = (-Decimal(exponent.numerator) / exponent.denominator).exp()
            error = Decimal(10) ** (5 - digits)
            if Decimal(high.numerator) / high.denominator < curve - error:
                return True
            if Decimal(low.numerator) / low.denominator > curve + error:
                return False

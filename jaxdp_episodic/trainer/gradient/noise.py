"""The noise of a release: drawn once, used once.

"discrete" is an exact discrete Gaussian on whole numbers, which hides their sums as
ideal Gaussian noise would. "gaussian" is float64 noise: the ziggurat method of
`numpy.random.Generator` on a ChaCha20 stream. It uses 61 of the 64 random bits per
number: 8 for one of 256 layers, a sign, and 52 for the place within the layer. At the
edge of a layer, and beyond 3.65 standard deviations, it uses more words of 53 bits. Its
tail ends at 12.2 standard deviations, which ideal noise exceeds with probability
2e-34. Unlike ideal noise, it takes only finitely many values.

Correlated noise has an encoder of sums into releases, and its decoder. With whole
coefficients k, whole sums X and discrete noise, step t computes

    y_t = sum_i k_i X_(t-i) + noise,    h_t = (y_t - sum_(i>0) k_i h_(t-i)) / k_0.

The noise protects the y. The run's file and the optimizer get h_t, a function of the y.
Only the memory of one process holds the sums without noise. It is cleared when a step
is given up, and lost with the process; later steps then start with an empty memory, at
the same privacy cost (docs/proofs.md, "Correlated noise").
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.config.training_parts import DISCRETE
from jaxdp_episodic.trainer.gradient.discrete_gaussian import (
    covering_variance,
    sample_discrete_gaussian,
)

LARGEST_NOISE = 1e6
"""Largest multiplier of discrete noise, so that sums plus noise fit into 64 bits."""

_DRAWN_FOR = ("kind", "noise_multiplier", "shapes")
# By which products and norms are raised: rounding must not make noise too small.
_ROUNDED = 1 + 1e-12
# k_0; the others are rounded to whole numbers, which adds at most 2e-5 of the noise.
_FIRST = 256
# Exclusive bound of the sum of all |k|: below it, sums are exact in float64.
_MOST = 2**15


class Noise:
    """The noise of one release, drawn ahead by `PrivateGradient.noise`; used once."""

    def __init__(
        self, kind: str, noise_multiplier: float, leaves: list[np.ndarray]
    ) -> None:
        self.kind, self.noise_multiplier = kind, noise_multiplier
        self._shapes = [leaf.shape for leaf in leaves]
        self._unused = [leaves]

    def use(
        self, kind: str, noise_multiplier: float, shapes: Sequence[tuple[int, ...]]
    ) -> list[np.ndarray]:
        """Returns the arrays, once, if they were drawn for these settings."""
        drawn_for = self.kind, self.noise_multiplier, self._shapes
        wanted = kind, noise_multiplier, list(shapes)
        for name, own, other in zip(_DRAWN_FOR, drawn_for, wanted, strict=True):
            if own != other:
                raise ValueError(
                    f"noise must be drawn for {name} {_validation.shown(other)}, got "
                    f"noise for {_validation.shown(own)}"
                )
        try:
            return self._unused.pop()  # atomic: no other thread can pop it too
        except IndexError:
            raise ValueError(
                "noise must be used only once, because the same noise cancels from the "
                "difference of two sums; draw new noise with another key"
            ) from None

    def __reduce__(self) -> NoReturn:
        raise TypeError("noise is used once, so it must not be copied")


def checked_noise(noise_multiplier: Any, kind: str, longer: float = 1.0) -> float:
    """Returns a supported multiplier; bands make a contribution ``longer``."""
    value = _validation.float32_number("noise_multiplier", noise_multiplier, zero=True)
    if kind == DISCRETE and value * longer > LARGEST_NOISE:
        raise ValueError(
            "noise_multiplier of discrete noise must be at most "
            f"{LARGEST_NOISE / longer:g}, got {noise_multiplier!r}"
        )
    return value


def drawn_noise(
    kind: str, deviation: float, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Returns independent noise, (count,): float64, or int64 grid steps if discrete."""
    # Discrete noise hides whole numbers at least as well as Gaussian noise of this
    # standard deviation, for any feasible number of entries and steps: see
    # `covering_variance` and `log_ratio_bound`.
    if kind != DISCRETE:
        return deviation * generator.standard_normal(count)
    if not deviation:
        return np.zeros(count, np.int64)
    variance = covering_variance(deviation * _ROUNDED)
    return sample_discrete_gaussian(variance, count, generator)


class BandMemory:
    """Encoder and decoder of a run's correlated noise, with their memory."""

    def __init__(self, coefficients: Sequence[float], *, is_discrete: bool) -> None:
        given = _validation.real_array("coefficients", coefficients)
        if given.ndim != 1 or not given.size or not given[0] > 0:
            raise ValueError(
                f"coefficients must be a list whose first is > 0, got {coefficients!r}"
            )
        # The norm is rounded up: a contribution with its shares in all releases is this
        # many times as long. The weight is that of a count, which is in one release
        # only: a whole number <= norm.
        if is_discrete:
            given = np.rint(_FIRST * given / given[0])
            self.norm = math.sqrt(np.sum(given**2)) * _ROUNDED
            self.weight = math.isqrt(int(np.sum(given**2)))
        else:
            given = given / (np.linalg.norm(given) * _ROUNDED)
            self.norm, self.weight = 1.0, 1
        if np.sum(np.abs(given)) >= _MOST:
            raise ValueError(
                f"coefficients of {len(given)} bands must have a sum below "
                f"{_MOST // _FIRST} times the first one, or sums are not exact"
            )
        if np.any(np.abs(np.roots(given[::-1])) <= 1):
            raise ValueError(
                "coefficients must have their roots outside the unit circle, or the "
                f"decoded noise grows without end, got {coefficients!r}"
            )
        # Whole numbers for discrete noise; otherwise numbers of norm <= 1.
        kept = given.astype(np.int64) if is_discrete else given
        self.coefficients: list[Any] = kept.tolist()
        self.clear()

    def clear(self) -> None:
        """Empties the memory of encoder and decoder."""
        self._sums: list[list[np.ndarray]] = []  # the latest one first
        self._decoded: list[list[np.ndarray]] = []
        self._process = os.getpid()
        self._rises = self._rising()
        # Standard deviation of the noise of the next decoded sum, in noise multipliers.
        self.rise = next(self._rises)

    def release(
        self, sums: list[np.ndarray], noise: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns the decoded sums, float64; ``noise`` was drawn for ``norm``."""
        if self._process != os.getpid():
            raise RuntimeError(
                "a run with bands must continue in the process that began it: two "
                "processes would both release the sums in its memory; resume the run"
            )
        first, *later = self.coefficients
        released = [first * x + n for x, n in zip(sums, noise, strict=True)]
        for k, past in zip(later, self._sums, strict=False):
            released = [y + k * x for y, x in zip(released, past, strict=True)]
        decoded = [y.astype(np.float64) for y in released]
        for k, past in zip(later, self._decoded, strict=False):
            decoded = [h - k * x for h, x in zip(decoded, past, strict=True)]
        decoded = [h / first for h in decoded]
        self._sums = [sums, *self._sums][: len(later)]
        self._decoded = [decoded, *self._decoded][: len(later)]
        self.rise = next(self._rises)
        return decoded

    def _rising(self) -> Iterator[float]:
        """Yields the values of `rise`, from the first release on."""
        first, *later = self.coefficients
        past, square = [1 / first], 0.0
        while True:
            square += past[0] ** 2
            yield self.norm * math.sqrt(square)
            new = -sum(k * f for k, f in zip(later, past, strict=False)) / first
            past = [new, *past][: max(len(later), 1)]

    def __reduce__(self) -> NoReturn:
        raise TypeError("bands hold sums without noise, which must not be copied")

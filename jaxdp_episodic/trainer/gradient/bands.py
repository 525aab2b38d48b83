"""Correlated noise: what encodes sums into releases, and decodes these again.

With whole coefficients k, whole sums X and discrete noise, step t releases

    y_t = sum_i k_i X_(t-i) + noise,    h_t = (y_t - sum_(i>0) k_i h_(t-i)) / k_0.

The y are what the noise protects; h_t, a function of these, is what the run's file and
the optimizer get. The sums are in the memory of one process alone. It ends with the
process, or when a step is given up: later steps then begin anew, at the same price
(docs/training.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

_FIRST = 256  # k_0, which makes the others whole: it costs 2e-5 of the noise
_MOST = 2**15  # of the sum of all |k|: above it sums are not exact in float64
_ROUNDED = 1 + 1e-12  # rounding must not make a column longer than it says


class BandMemory:
    """Encoder and decoder of a run's correlated noise, with their memory.

    Attributes:
      coefficients: whole numbers for discrete noise; else numbers of norm <= 1.
      norm: of the coefficients, rounded up, by which a contribution is longer.
      weight: of a count, which is in one release only: at most the norm.
      rise: deviation of the next decoded sum's noise, where that of a single release is
        ``norm`` noise multipliers.
    """

    def __init__(self, coefficients: Sequence[float], *, is_discrete: bool) -> None:
        given = np.asarray(coefficients, np.float64)
        if given.ndim != 1 or not given.size or not given[0] > 0:
            raise ValueError(f"coefficients must begin above 0, got {coefficients!r}")
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
        kept = given.astype(np.int64) if is_discrete else given
        self.coefficients: list[Any] = kept.tolist()
        self.clear()

    def clear(self) -> None:
        """Forgets all sums and what was decoded: the next release begins anew."""
        self._sums: list[list[np.ndarray]] = []  # the latest one first
        self._decoded: list[list[np.ndarray]] = []
        self._process = os.getpid()
        self._rises = self._rising()
        self.rise = next(self._rises)

    def release(
        self, sums: list[np.ndarray], noise: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns the decoded sums, float64, with noise drawn for ``norm`` times."""
        if self._process != os.getpid():
            raise RuntimeError(
                "a run with bands must go on in the process that began it: its memory "
                "in two processes would be released twice; resume it instead"
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
        """The deviations of decoded noise, from the first release on."""
        first, *later = self.coefficients
        past, square = [1 / first], 0.0
        while True:
            square += past[0] ** 2
            yield self.norm * math.sqrt(square)
            new = -sum(k * f for k, f in zip(later, past, strict=False)) / first
            past = [new, *past][: max(len(later), 1)]

    def __reduce__(self) -> NoReturn:
        raise TypeError("bands hold sums without noise, which are not copied")

"""The noise of a release: drawn once, used once.

"discrete" is an exact discrete Gaussian on whole numbers, which hides their sums as
ideal Gaussian noise would. "gaussian" is float64 noise: the ziggurat method of
`numpy.random.Generator` on a ChaCha20 stream. It uses 61 of the 64 random bits per
number: 8 for one of 256 layers, a sign, and 52 for the place within the layer. At the
edge of a layer, and beyond 3.65 standard deviations, it uses more words of 53 bits. Its
tail ends at 12.2 standard deviations, which ideal noise exceeds with probability
2e-34. Unlike ideal noise, it takes only finitely many values.
"""

from __future__ import annotations

from collections.abc import Sequence
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
# A product that is rounded down must not be smaller than stated.
_ROUNDED = 1 + 1e-12


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

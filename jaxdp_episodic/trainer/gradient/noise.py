"""The noise of a release, of both kinds: drawn once, used once.

"discrete" is the exact discrete Gaussian on whole numbers, which hides their sums as
ideal Gaussian noise would. "gaussian" is float64: `numpy.random.Generator` with its
ziggurat, on the stream of ChaCha20. Of the 64 random bits of a number 61 count: one of
256 layers, a sign, and 52 for the place within the layer; where the curve cuts a layer,
and beyond 3.65 deviations, further words of 53 bits. The tail goes on to 12.2
deviations, which ideal noise exceeds in 2 of 10^34. It is a finite set all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.config.training_parts import DISCRETE
from jaxdp_episodic.trainer.gradient.discrete_gaussian import (
    covering_variance,
    sample_discrete_gaussian,
)

LARGEST_NOISE = 1e6
"""Largest multiplier of discrete noise; with it sums and noise are within 64 bits."""

_DRAWN_FOR = ("kind", "noise_multiplier", "shapes")
# A product that was rounded down must not be less than it says.
_ROUNDED = 1 + 1e-12


class Noise:
    """The noise of one release, drawn ahead by `PrivateGradient.noise`; taken once."""

    def __init__(
        self, kind: str, noise_multiplier: float, leaves: list[np.ndarray]
    ) -> None:
        self.kind, self.noise_multiplier = kind, noise_multiplier
        self._shapes = [leaf.shape for leaf in leaves]
        self._unused = [leaves]

    def taken(
        self, kind: str, noise_multiplier: float, shapes: Sequence[tuple[int, ...]]
    ) -> list[np.ndarray]:
        """Returns the leaves, once, for the settings that they were drawn for."""
        drawn_for = self.kind, self.noise_multiplier, self._shapes
        asked = kind, noise_multiplier, list(shapes)
        for name, own, other in zip(_DRAWN_FOR, drawn_for, asked, strict=True):
            if own != other:
                raise ValueError(
                    f"noise must be drawn for {name} {_validation.shown(other)}, got "
                    f"some for {_validation.shown(own)}"
                )
        try:
            return self._unused.pop()  # at once: no other thread finds it there
        except IndexError:
            raise ValueError(
                "noise must be used once: from two sums with the same noise the noise "
                "can be subtracted; draw other noise with another key"
            ) from None


def checked_noise(noise_multiplier: Any, kind: str, longer: float = 1.0) -> float:
    """Returns a noise multiplier that the noise can have; see `PrivateGradient`.

    With bands a contribution is ``longer`` by the norm of their coefficients.
    """
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
    """Returns independent noise, (count,): float64, or of "discrete" int64.

    Discrete noise hides whole numbers as Gaussian noise of this deviation does, at any
    number of entries and steps that can be run: see `covering_variance` and
    `log_ratio_bound`.

    Args:
      kind: "discrete" or "gaussian".
      deviation: >= 0; 0 is no noise. Of discrete noise in whole steps of its grid.
      count: of the entries.
      generator: of this noise alone.
    """
    if kind != DISCRETE:
        return deviation * generator.standard_normal(count)
    if not deviation:
        return np.zeros(count, np.int64)
    variance = covering_variance(deviation * _ROUNDED)
    return sample_discrete_gaussian(variance, count, generator)

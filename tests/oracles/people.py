"""What Theorem A claims about a person in many units, as plain mixtures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from oracles import mixtures


def theorem_a(
    rates: Sequence[tuple[float, float]], relation: str, s: float, g: np.ndarray
) -> np.ndarray:
    """(2, G) profiles, forward and backward, of coins: (p, r) of each unit.

    Which units show others is seen; given that, the other ones hold the person or
    nobody, and add up on one side.
    """
    weights: dict[tuple[float, ...], float] = {}
    for shown in itertools.product((False, True), repeat=len(rates)):
        weight, law = 1.0, np.ones(1)
        for is_shown, (p, r) in zip(shown, rates, strict=True):
            other = p * (1 - r)
            weight *= other if is_shown else 1 - other
            if not is_shown and other < 1:
                hers = p * r / (1 - other)
                law = np.convolve(law, [1 - hers, hers])
        weights[tuple(law)] = weights.get(tuple(law), 0.0) + weight
    total = np.zeros((2, len(g)))
    for law, weight in weights.items():
        top = {float(j): w for j, w in enumerate(law) if w > 0}
        bottom = (
            {0.0: 1.0} if relation == "zero_out" else {-j: w for j, w in top.items()}
        )
        if weight > 0:
            total += weight * np.array(mixtures.hockey_sticks(top, bottom, s, g))
    return total

"""What the theorems about people in many units claim, as plain mixtures, and laws.

A claim is two lists of visible parts, forward and backward, each a weight and two
measures on multiples of s. Nothing is simplified to half lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oracles import mixtures
from oracles.mixtures import Mixture

# Parts of less weight are left out: an absolute error.
_NEGLIGIBLE = 1e-17


class Part(NamedTuple):
    """A visible part: with this weight, `top` against `bottom`."""

    weight: float
    top: Mixture
    bottom: Mixture


class Claim(NamedTuple):
    """Parts of both directions; the forward top is with the person."""

    forward: list[Part]
    backward: list[Part]


def profiles(claim: Claim, s: float, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward profile, for every g >= 1."""
    g = np.atleast_1d(np.asarray(g, dtype=float))
    return _profile(claim.forward, s, g), _profile(claim.backward, s, g)


def _profile(parts: list[Part], s: float, g: np.ndarray) -> np.ndarray:
    total = np.zeros_like(g)
    for weight, top, bottom in parts:
        if weight > _NEGLIGIBLE:
            total += weight * mixtures.hockey_stick(top, bottom, s, g)
    return total


# --- Claims ---


def scaled(*parts: tuple[float, Claim]) -> Claim:
    """Claims of what is visible, with their chances."""
    ways: tuple[list[Part], list[Part]] = ([], [])
    for weight, claim in parts:
        for found, side in zip(ways, claim, strict=True):
            found += [part._replace(weight=weight * part.weight) for part in side]
    return Claim(*ways)


def line(law: Sequence[float], sign: int = 1) -> Mixture:
    """The law of a number of contributions, all of them on one side."""
    return {float(sign * j): float(w) for j, w in enumerate(law) if w > 0}


def visible_laws(laws: list[tuple[float, Sequence[float]]], relation: str) -> Claim:
    """Theorem R: with each weight a law of J, given what the other units show."""
    if relation == "zero_out":
        nothing = {0.0: 1.0}
        return Claim(
            [Part(w, line(law), nothing) for w, law in laws],
            [Part(w, nothing, line(law)) for w, law in laws],
        )
    parts = [Part(w, line(law), line(law, -1)) for w, law in laws]
    return Claim(parts, parts)


def theorem_a(rates: Sequence[tuple[float, float]], relation: str) -> Claim:
    """Coins: the pairs (p, r) of the units; which of them show others is seen."""
    parts: dict[tuple[float, ...], float] = {}
    for shown in itertools.product((False, True), repeat=len(rates)):
        weight, inner = 1.0, []
        for is_shown, (p, r) in zip(shown, rates, strict=True):
            other = p * (1 - r)
            weight *= other if is_shown else 1 - other
            if not is_shown and weight > 0:
                inner.append(p * r / (1 - other))
        if weight > 0:
            law = tuple(poisson_binomial(inner))
            parts[law] = parts.get(law, 0.0) + weight
    return visible_laws([(w, law) for law, w in parts.items()], relation)


# --- Laws ---


def poisson_binomial(rates: Sequence[float]) -> list[float]:
    """Law of the number of successes."""
    law = np.ones(1)
    for rate in rates:
        law = np.convolve(law, [1 - rate, rate])
    return [float(w) for w in law]

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


def _mixed(*pairs: tuple[float, Mixture]) -> Mixture:
    total: Mixture = {}
    for weight, mixture in pairs:
        for mean, chance in mixture.items():
            total[mean] = total.get(mean, 0.0) + weight * chance
    return total


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


def theorem_m(law: Sequence[float], relation: str) -> Claim:
    """Nobody reacts: the mixture over J."""
    return visible_laws([(1.0, law)], relation)


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


# --- Composition ---


def composed(
    claim: Claim, s: float, num_steps: int, epsilons: np.ndarray, *, forward: bool
) -> np.ndarray:
    """Delta of several steps, at every epsilon; extrapolated in the lattice's spacing.

    The error is 1e-4 of it where it is above 1e-9, 1e-3 where losses are few.
    """
    fine, coarse = (
        chords(_pair(claim, s, spacing, forward=forward), spacing, num_steps, epsilons)
        for spacing in (0.01, 0.02)
    )
    return (4 * fine - coarse) / 3


def _pair(claim: Claim, s: float, spacing: float, *, forward: bool) -> np.ndarray:
    """The profile at e^(k spacing), |k| <= n; below 1 from the other direction."""
    ratio = np.exp(spacing * np.arange(1 + round(_FARTHEST / spacing)))
    sides = profiles(claim, s, ratio)
    high, low = sides if forward else sides[::-1]
    return np.concatenate([(1 - 1 / ratio + low / ratio)[:0:-1], high])


def chords(
    values: np.ndarray, spacing: float, num_steps: int, epsilons: np.ndarray
) -> np.ndarray:
    """Delta of several steps of the pair with this profile on a lattice; from above."""
    count = len(values) // 2
    losses = spacing * np.arange(-count, count + 1)
    ratio = np.exp(losses)
    # Slopes are minus the mass of Q above; the first chord begins at g = 0.
    slopes = np.diff(values, prepend=1.0) / np.diff(ratio, prepend=0.0)
    masses = np.maximum(np.diff(slopes, append=0.0), 0.0) * ratio
    # Sums within 40 standard deviations are told apart.
    mean = float(masses @ losses)
    deviation = np.sqrt(num_steps * float(masses @ (losses - mean) ** 2))
    width = 1 << int(np.ceil(np.log2(2 * count + 1 + 40 * deviation / spacing)))
    folded = np.zeros(width)
    np.add.at(folded, np.arange(len(masses)) % width, masses)
    total = np.maximum(np.fft.irfft(np.fft.rfft(folded) ** num_steps, width), 0.0)
    sums = spacing * (np.arange(width) - count * num_steps)
    window = width * spacing
    sums += window * np.round((num_steps * mean - sums) / window)
    excess = np.maximum(-np.expm1(np.minimum(epsilons[:, None] - sums, 0.0)), 0.0)
    return 1 - (1 - values[-1]) ** num_steps + excess @ total


# Losses of a step beyond it are infinite.
_FARTHEST = 12.0

"""What the theorems about people in many units claim, as plain mixtures, and laws.

A claim is two lists of visible parts, forward and backward, each a weight and two
measures on multiples of s; `profiles` integrates them. Nothing is simplified to half
lines and nothing of the library is used. Two directions everywhere.

Letters: s = contribution's norm over the noise, p = coin of a clip unit, r = chance
that a drawn unit holds the person, m = number of units that can hold her, J = number
of drawn units that do, R = the set of units that would if drawn, e = P(R not empty).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import comb
from scipy.stats import binom, hypergeom

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


def smallest(claims: Sequence[Claim], s: float, g: np.ndarray):
    """The least of several claims, direction by direction and at every g."""
    pairs = [profiles(claim, s, g) for claim in claims]
    return tuple(np.min([pair[i] for pair in pairs], axis=0) for i in (0, 1))


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
    """Theorem R: with each weight a law of J, given what the other units show.

    One law is Theorem M, laws of certain numbers are Theorem 3.
    """
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


def theorem_3(law: Sequence[float], relation: str) -> Claim:
    """Nothing is hidden: J is seen."""
    return visible_laws([(w, [0.0] * j + [1.0]) for j, w in enumerate(law)], relation)


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


def theorem_a_equal(m: int, p: float, r: float, relation: str) -> Claim:
    """Coins, m units alike."""
    theta = p * r / (1 - p + p * r) if r else 0.0
    return visible_laws(
        [(_bin(m, p * (1 - r))[m - n], _bin(n, theta)) for n in range(m + 1)], relation
    )


def theorem_2(
    law: Sequence[float],
    p: float,
    relation: str,
    *,
    cover: float | None = None,
    fixed_classes: bool = False,
) -> Claim:
    """Coins, the exchange hidden: `law` is that of |R|, `cover` a bound of e.

    `fixed_classes`: the smaller backward row of add_remove. Without independent
    contents nothing is hidden: `cover` 1.
    """
    e = 1 - law[0] if cover is None else cover
    rows = [(w / e, _bin(k, p)) for k, w in enumerate(law) if k >= 1 and w > 0]
    return _covered(rows, e, relation, fixed_classes=fixed_classes)


def theorem_1(law: Sequence[float], relation: str, *, cover: float | None = None):
    """Coupling: `law` is that of J, which is seen where it is not 0."""
    return theorem_2(law, 1.0, relation, cover=cover)


def _covered(rows, e: float, relation: str, *, fixed_classes: bool) -> Claim:
    """Pairs (1-e)X + eB against (1-e)X + eB', X the worst of what takes the place."""
    nothing, forward, backward = {0.0: 1.0}, [], []
    for weight, law in rows:
        up, down = line(law), line(law, -1)
        if relation == "zero_out":
            top, bottom = (
                _mixed((1 - e, down), (e, up)),
                _mixed((1 - e, down), (e, nothing)),
            )
            forward.append(Part(weight, top, bottom))
            backward.append(Part(weight, _mixed((1 - e, up), (e, nothing)), up))
            continue
        mixed = _mixed((1 - e, down), (e, up))
        forward.append(Part(weight, mixed, down))
        # Without her, the law is that given R empty: what she is exchanged for.
        backward.append(Part(weight, down, mixed) if fixed_classes else forward[-1])
    return Claim(forward, backward)


def removed_examples(law: Sequence[float]) -> Claim:
    """add_remove, examples drawn without replacement and clipped one by one."""
    return theorem_2(law, 1.0, "add_remove", fixed_classes=True)


def theorem_ab(m: int, p: float, r: float, share: float) -> Claim:
    """zero_out by coins: frames of Theorem A, and a share of the cover of Theorem 2."""
    none, seen = (1 - r) ** m, _bin(m, p)
    claim = Claim([], [])
    for shown, weight in enumerate(_bin(m, p * (1 - r))):
        n = m - shown
        inner = _bin(n, p * r / (1 - p + p * r))
        cover = [
            share * none * seen[shown + j] * float(binom.pmf(shown, shown + j, 1 - r))
            / (1 - none) * (1 - (j == 0) * (1 - r) ** n)
            for j in range(n + 1)
        ]  # fmt: skip
        rest = {0.0: weight - share * none * seen[shown]}
        held = _mixed((weight, line(inner)), (-share * none * seen[shown], {0.0: 1.0}))
        for parts, sign in ((claim.forward, -1), (claim.backward, 1)):
            hidden = (1.0, line(cover, sign))
            pair = _mixed((1.0, held), hidden), _mixed((1.0, rest), hidden)
            parts.append(Part(1.0, *(pair if sign < 0 else pair[::-1])))
    return claim


# --- Laws ---


def _bin(n: int, p: float) -> list[float]:
    return [float(w) for w in binom.pmf(range(n + 1), n, p)]


def poisson_binomial(rates: Sequence[float]) -> list[float]:
    """Law of the number of successes."""
    law = np.ones(1)
    for rate in rates:
        law = np.convolve(law, [1 - rate, rate])
    return [float(w) for w in law]


def reached(population: int, examples: int, size: int) -> float:
    """One of a person's examples of a class is among those drawn."""
    size = min(size, population)
    return 1 - float(comb(population - examples, size) / comb(population, size))


def without_replacement(law: Sequence[float], num_units: int, size: int) -> list[float]:
    """Law of J = |S and R|: `size` of `num_units` units drawn, |R| with this law."""
    total = np.zeros(len(law))
    for k, weight in enumerate(law):
        total[: k + 1] += weight * hypergeom.pmf(range(k + 1), num_units, k, size)
    return [float(w) for w in total]


def chosen_classes(num_classes: int, hers: int, ways: int, rho: float) -> float:
    """A unit that draws `ways` classes holds her, who is in `hers` of them."""
    missed = hypergeom.pmf(range(ways + 1), num_classes, hers, ways)
    return 1 - float(missed @ (1 - rho) ** np.arange(ways + 1))


def even_groups(num_groups: int, hers: int, rho: float) -> list[float]:
    """Law of |R| where her classes are spread evenly: the worst partition."""
    each, more = divmod(hers, num_groups)
    counts = [each + 1] * more + [each] * (num_groups - more)
    return poisson_binomial([1 - (1 - rho) ** a for a in counts])


def average_groups(num_classes: int, ways: int, hers: int, rho: float) -> list[float]:
    """Law of |R| over all partitions, drawn afresh, group by group."""
    groups = num_classes // ways
    places = [ways] * groups + [num_classes - ways * groups]
    laws: dict[int, np.ndarray] = {0: np.ones(1)}
    for i, size in enumerate(places):
        grown: dict[int, np.ndarray] = {}
        for used, law in laws.items():
            for a in range(min(size, hers - used) + 1):
                rate = 1 - (1 - rho) ** a if i < groups else 0.0
                part = comb(size, a) * np.convolve(law, [1 - rate, rate])
                grown[used + a] = grown.get(used + a, 0.0) + part
        laws = grown
    return [float(w) for w in (laws[hers] / comb(num_classes, hers))[: groups + 1]]


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
    """Delta of several steps of the pair with this profile on a lattice; from above.

    The profile is replaced by its chords, whose pair loses lattice values only; the
    sum of the steps is a power of a discrete transform (Doroshenko et al. 2022).
    """
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

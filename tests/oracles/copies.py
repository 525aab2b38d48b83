"""What a step truly costs an example with copies in several classes, by enumeration.

All draws of a small design are listed with fractions.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

Law = dict[int, Fraction]
"""Chances of sums of contributions, in clip norms."""


class Copies(NamedTuple):
    """Grouped classes by coins; one example has a copy in some of the classes."""

    classes: int
    ways: int
    rate: Fraction  # of each episode's coin
    drawn: int  # examples of a class
    size: int  # of a class, copies included
    copies: int  # classes that hold one
    relation: str


def _placed(design: Copies) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """How many classes with a copy each group has, with its chance."""
    groups = design.classes // design.ways
    places = range(design.classes)
    total = Fraction(1, math.comb(design.classes, design.copies))
    found: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for chosen in itertools.combinations(places, design.copies):
        counts = [0] * groups
        for place in chosen:
            if place // design.ways < groups:  # left-over classes sit out
                counts[place // design.ways] += 1
        found[tuple(sorted(counts, reverse=True))] += total
    yield from found.items()


def _laws(
    design: Copies, counts: tuple[int, ...], beside: tuple[int, ...]
) -> tuple[Law, Law]:
    """The sums with the example and without, given the partition."""
    missed = 1 - Fraction(design.drawn, design.size)
    joint: dict[tuple[int, int], Fraction] = {(0, 0): Fraction(1)}
    for place, number in enumerate(counts):
        if not number:
            continue
        other = beside[place % len(beside)]
        holds = 1 - missed**number
        # Without it: a null empties the contribution; what is left in its place gives
        # as a group that does not hold it; what replaces it pulls the other way.
        instead = {"zero_out": 0, "add_remove": other, "replace_one": -1}
        outcomes = (
            (1 - design.rate, 0, 0),
            (design.rate * (1 - holds), other, other),
            (design.rate * holds, 1, instead[design.relation]),
        )
        grown: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
        for (first, second), chance in joint.items():
            for share, more, less in outcomes:
                grown[first + more, second + less] += chance * share
        joint = grown
    with_it: Law = defaultdict(Fraction)
    without: Law = defaultdict(Fraction)
    for (first, second), chance in joint.items():
        with_it[first] += chance
        without[second] += chance
    return with_it, without


def _tail(point: float) -> float:
    return 0.5 * math.erfc(point / math.sqrt(2))


def divergence(p: Law, q: Law, shift: float, g: float) -> float:
    """The hockey-stick divergence of two mixtures of unit normals on a line."""
    terms = {k: float(p.get(k, 0)) - g * float(q.get(k, 0)) for k in {*p, *q}}
    centres = np.array([k * shift for k in terms])
    weights = np.array(list(terms.values()))

    def density(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)[..., None]
        return np.sum(weights * np.exp(-0.5 * (x - centres) ** 2), axis=-1)

    grid = np.linspace(centres.min() - 14, centres.max() + 14, 8001)
    signs = np.sign(density(grid))
    edges = [-np.inf]
    for at in np.flatnonzero(signs[:-1] * signs[1:] < 0):
        low, high = grid[at], grid[at + 1]
        for _ in range(60):
            middle = (low + high) / 2
            same = np.sign(density(np.array(middle))) == signs[at]
            low, high = (middle, high) if same else (low, middle)
        edges.append(low)
    edges.append(np.inf)
    total = 0.0
    for low, high in itertools.pairwise(edges):
        mass = sum(
            w * (_tail(low - c) - _tail(high - c))
            for w, c in zip(weights, centres, strict=True)
        )
        total += max(mass, 0.0)
    return total


def attained(design: Copies, noise: float, g: float) -> np.ndarray:
    """(2,) the largest delta of one step forward and backward, over strategies."""
    best = np.zeros(2)
    for beside in ((0,), (-1,), (1,), (-1, 1), (1, -1), (0, -1)):
        both = np.zeros(2)
        for counts, chance in _placed(design):
            p, q = _laws(design, counts, beside)
            values = divergence(p, q, 1 / noise, g), divergence(q, p, 1 / noise, g)
            both += float(chance) * np.array(values)
        best = np.maximum(best, both)
    return best

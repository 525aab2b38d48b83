"""Every draw of small designs in which a person is in many units, and the worst data.

A drawn clip unit has a content: its label and its examples' names; names that begin
with "x" are the person's. A law maps a draw to its chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from oracles import mixtures

Content = tuple[str, tuple[str, ...]]
ContentLaw = dict[Content, float]
Law = dict[tuple[Content, ...], float]

ALL = ("all", 0.0)
RELATIONS = ("zero_out", "replace_one", "add_remove")


def is_held(content: Content) -> bool:
    """One of the person's examples is in it."""
    return any(name.startswith("x") for name in content[1])


def without_person(examples: Iterable[str]) -> tuple[str, ...]:
    """What is left when the person's examples are gone."""
    return tuple(name for name in examples if not name.startswith("x"))


# --- Laws ---


def subsets(items: Sequence, scheme: tuple[str, float]) -> list[tuple[float, tuple]]:
    """Samples and their chances; a scheme is ("coins", p), ("draw", n) or ALL."""
    kind, value = scheme
    if kind == "all":
        return [(1.0, tuple(items))]
    if kind == "draw":
        samples = list(itertools.combinations(items, min(int(value), len(items))))
        return [(1 / len(samples), sample) for sample in samples]
    return [
        (value**n * (1 - value) ** (len(items) - n), sample)
        for n in range(len(items) + 1)
        for sample in itertools.combinations(items, n)
        if 0 < value < 1 or n == value * len(items)
    ]


def added(law: dict, key, chance: float) -> None:
    """One more way to come to `key`."""
    law[key] = law.get(key, 0.0) + chance


def joint(laws: Sequence[dict]) -> dict:
    """Independent draws side by side; keys are tuples of the keys."""
    total: dict = {}
    for parts in itertools.product(*(law.items() for law in laws)):
        key = tuple(sorted(key for key, _ in parts))
        added(total, key, float(np.prod([w for _, w in parts])))
    return total


def unit_law(
    label: str, classes: Sequence[Sequence[str]], ways: tuple, shots: tuple
) -> ContentLaw:
    """The content of a unit: classes, and examples of each, drawn by these schemes."""
    law: ContentLaw = {}
    for weight, drawn in subsets(range(len(classes)), ways):
        choices = [subsets(classes[i], shots) for i in drawn]
        for picked in itertools.product(*choices):
            names = [name for _, sample in picked for name in sample]
            # A drawn class shows itself, with or without examples.
            names += [f"class{i}" for i in drawn]
            chance = weight * float(np.prod([w for w, _ in picked]))
            added(law, (label, tuple(sorted(names))), chance)
    return law


def drawn_units(units: Sequence[ContentLaw], scheme: tuple[str, float]) -> Law:
    """Units drawn by a scheme, the content of each drawn for itself."""
    total: Law = {}
    for weight, drawn in subsets(range(len(units)), scheme):
        for contents, chance in joint([units[i] for i in drawn]).items():
            added(total, contents, weight * chance)
    return total


def averaged(laws: Sequence[tuple[float, Law]]) -> Law:
    """A mixture of laws."""
    total: Law = {}
    for weight, law in laws:
        for draw, chance in law.items():
            added(total, draw, weight * chance)
    return total


def summed(laws: Sequence[Law]) -> Law:
    """Independent draws whose units are summed."""
    flat: Law = {}
    for draws, chance in joint(laws).items():
        units = tuple(sorted(c for draw in draws for c in draw))
        added(flat, units, chance)
    return flat


def partitions(num_classes: int, ways: int) -> list[tuple[tuple[int, ...], ...]]:
    """All ways to fill groups; whoever is left over sits out."""
    starts = range(0, num_classes - ways + 1, ways)
    found = {
        tuple(sorted(tuple(sorted(order[i : i + ways])) for i in starts))
        for order in itertools.permutations(range(num_classes))
    }
    return sorted(found)


# --- Releases ---


class Release(NamedTuple):
    """Both worlds: counts of the columns in each draw, and the draws' chances."""

    columns: list
    held: np.ndarray
    top: tuple[np.ndarray, np.ndarray]
    bottom: tuple[np.ndarray, np.ndarray]


def release(law: Law, relation: str, without: Law | None = None) -> Release:
    """The step with the person, and without her or with other data of hers."""
    if relation == "add_remove":
        if without is None:
            raise ValueError("add_remove needs the law without the person")
        other = without
    elif relation == "zero_out":
        other = averaged([])
        for draw, chance in law.items():
            added(other, tuple(c for c in draw if not is_held(c)), chance)
    else:
        other = {
            tuple((f"{c[0]}'", c[1]) if is_held(c) else c for c in draw): w
            for draw, w in law.items()
        }
    columns = sorted({c for each in (law, other) for draw in each for c in draw})
    place = {content: i for i, content in enumerate(columns)}

    def counts(each: Law):
        table = np.zeros((len(each), len(columns)), dtype=int)
        for row, draw in zip(table, each, strict=True):
            np.add.at(row, [place[content] for content in draw], 1)
        return table, np.fromiter(each.values(), float)

    held = np.array([is_held(content) for content in columns], dtype=bool)
    return Release(columns, held, counts(law), counts(other))


def divergences(step: Release, table: np.ndarray, s: float, g: np.ndarray):
    """Both true divergences of contributions on a line, in clip norms; exact."""

    def mixture(world) -> mixtures.Mixture:
        counts, weights = world
        means, place = np.unique(np.round(counts @ table, 9), return_inverse=True)
        chances = np.bincount(place.ravel(), weights)
        return dict(zip(means.tolist(), chances.tolist(), strict=True))

    return mixtures.hockey_sticks(mixture(step.top), mixture(step.bottom), s, g)


# --- The worst contributions ---


# Contributions to choose from, in halves of the clip norm.
MOVES = np.arange(-2, 3)
_UNIT = 0.5


class _Integral:
    """The positive mass of a signed mixture of the moves, on a coarse grid."""

    def __init__(self, step: Release, s: float, sign: int, g: float):
        worlds = (step.top, step.bottom)[::sign]
        self.counts = np.concatenate([counts for counts, _ in worlds])
        self.weights = np.concatenate([worlds[0][1], -g * worlds[1][1]])
        self.most = int(self.counts.sum(axis=1).max()) * int(MOVES.max())
        means = s * _UNIT * np.arange(-self.most, self.most + 1)
        spacing = 0.15
        axis = np.arange(means[0] - 4, means[-1] + 4, spacing)
        self.kernel = np.exp(-((axis - means[:, None]) ** 2) / 2)
        self.kernel *= spacing / np.sqrt(2 * np.pi)

    def __call__(self, sums: np.ndarray) -> np.ndarray:
        """For several tables, (tables, draws), the mass of each."""
        found = np.stack(
            [
                np.bincount(row, self.weights, len(self.kernel))
                for row in sums + self.most
            ]
        )
        return np.maximum(found @ self.kernel, 0.0).sum(axis=1)


def attack(
    rng: np.random.Generator,
    step: Release,
    s: float,
    g: float,
    *,
    sign: int,
    starts: int = 4,
) -> np.ndarray:
    """Contributions of the columns that tell most; sign -1 is backward."""
    integral = _Integral(step, s, sign, g)
    best, best_table = -1.0, np.zeros(len(step.columns), int)
    for number in range(starts):
        table, value = _start(rng, step, number), -1.0
        for _ in range(4):
            before = value
            for i in rng.permutation(len(table)):
                moved = np.outer(MOVES - table[i], integral.counts[:, i])
                values = integral(integral.counts @ table + moved)
                k = int(np.argmax(values))
                if values[k] > value:
                    value, table[i] = values[k], MOVES[k]
            if value <= before * (1 + 1e-9):
                break
        if value > best:
            best, best_table = value, table
    return best_table * _UNIT


def _start(rng: np.random.Generator, step: Release, number: int) -> np.ndarray:
    """The person's contents at +1 and all others at -1, 0, +1; then at random."""
    up = MOVES[-1]
    if number >= 3:
        return rng.choice(MOVES, size=len(step.columns))
    changed = np.array([str(content[0]).endswith("'") for content in step.columns])
    table = np.where(step.held, up, (number - 1) * up)
    return np.where(step.held & changed, -up, table)


def attained(
    rng: np.random.Generator,
    step: Release,
    s: float,
    g: np.ndarray,
    *,
    aims: Sequence[float] | np.ndarray,
    starts: int = 4,
) -> tuple[np.ndarray, np.ndarray]:
    """The largest divergences found, forward and backward, at every g; true ones."""
    found = np.zeros((2, len(g)))
    for sign, aim in itertools.product((1, -1), aims):
        table = attack(rng, step, s, aim, sign=sign, starts=starts)
        found = np.maximum(found, divergences(step, table, s, g))
    return found[0], found[1]

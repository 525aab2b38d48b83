"""Exact releases of grouped classes and of independent episodes, by enumeration.

And of an example with copies in several classes: all draws are listed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from oracles import mixtures, trees

Groups = frozenset[frozenset[int]]


class GroupedDesign(NamedTuple):
    """A pool of classes, how episodes are drawn from it, and who is protected."""

    pool: tuple
    ways: int
    draw: str
    value: float
    examples: trees.Scheme
    path: tuple[int, ...]
    relation: str
    s: float
    emptied: bool = False

    def neighbours(self) -> tuple[tuple, tuple]:
        """The larger (or original) pool and its neighbour."""
        name, classes = self.pool
        if self.emptied:
            i = self.path[0]
            emptied = (classes[i][0], ())
            return self.pool, (name, (*classes[:i], emptied, *classes[i + 1 :]))
        return self.as_step().neighbours()

    def as_step(self) -> trees.Design:
        """The same pool, unit and relation as a plain tree."""
        return trees.Design(self.pool, (), 0, self.path, self.relation, self.s)


def groupings(drawn: tuple[int, ...], ways: int) -> dict[Groups, float]:
    """Uniformly random episodes of `ways` classes; the left-overs are dropped."""
    found: dict[Groups, float] = {}
    weight = 1 / math.factorial(len(drawn))
    used = len(drawn) // ways * ways
    for order in itertools.permutations(drawn):
        groups = frozenset(frozenset(order[i : i + ways]) for i in range(0, used, ways))
        found[groups] = found.get(groups, 0.0) + weight
    return found


def drawn_groups(
    number: int, ways: int, drawn: str, scheme: trees.Scheme
) -> dict[Groups, float]:
    """Sets of drawn episodes; ``drawn`` is "episodes" or "classes"."""
    found: dict[Groups, float] = defaultdict(float)
    if drawn == "episodes":
        for groups, weight in groupings(tuple(range(number)), ways).items():
            every = sorted(groups, key=sorted)
            for share, sample in scheme.subsets(len(every)):
                found[frozenset(every[i] for i in sample)] += weight * share
    else:
        for weight, classes in scheme.subsets(number):
            for groups, share in groupings(classes, ways).items():
                found[groups] += weight * share
    return found


class _Pool:
    """One neighbour with its draws enumerated."""

    def __init__(self, design: GroupedDesign, pool: tuple) -> None:
        below = [trees.contents(unit, (design.examples,)) for unit in pool[1]]
        kind = (
            "without_replacement" if design.draw == "without_replacement" else "poisson"
        )
        drawn = "classes" if design.draw == "poisson" else "episodes"
        scheme = trees.Scheme(kind, design.value)
        self.draws = drawn_groups(len(below), design.ways, drawn, scheme)
        self.contents: dict[frozenset[int], trees.Distribution] = {}
        for group in {group for groups in self.draws for group in groups}:
            self.contents[group] = {}
            for each in itertools.product(*(below[i].items() for i in sorted(group))):
                key = frozenset(content for content, _ in each)
                self.contents[group][key] = float(np.prod([w for _, w in each]))

    def mixed(self, table: dict) -> mixtures.Mixture:
        """Mixture of the release when the grouping stays secret."""
        total: mixtures.Mixture = {}
        for groups, weight in self.draws.items():
            sums: mixtures.Mixture = {0.0: 1.0}
            for group in groups:
                episode: mixtures.Mixture = defaultdict(float)
                for content, share in self.contents[group].items():
                    episode[table[content]] += share
                sums = mixtures.convolved(sums, episode)
            for value, chance in sums.items():
                total[value] = total.get(value, 0.0) + weight * chance
        return total


def grouped(design: GroupedDesign):
    """All contents, and table, g -> both divergences of the enumerated step; exact."""
    first, second = (_Pool(design, pool) for pool in design.neighbours())
    keys = {c for pool in (first, second) for d in pool.contents.values() for c in d}

    def divergences(table: dict, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        other = design.as_step().neighbours_table(table)
        return mixtures.hockey_sticks(
            first.mixed(table), second.mixed(other), design.s, g
        )

    return sorted(keys, key=repr), divergences


def worst_grouped_tables(design: GroupedDesign, keys: list) -> list[dict]:
    """+1 where the protected unit is reached, -1 (0 in other episodes) where not."""
    own = design.pool[1][design.path[0]]
    private: frozenset = design.as_step().private_leaves()
    zeroed = design.relation == "zero_out"
    if zeroed:
        private = frozenset(trees.names(trees.unit_at(design.pool, design.path)))
    tables = []
    for sign in (-1.0, 1.0) if zeroed else (-1.0,):
        table = {}
        for key in keys:
            drawn = set(trees.content_names(key))
            if drawn & private:
                replaced = any(str(t).endswith("'") for t in drawn & private)
                table[key] = -1.0 if replaced else 1.0
            elif design.draw == "partition" and own[0] not in drawn:
                table[key] = 0.0
            else:
                table[key] = sign
        tables.append(table)
    return tables


def independent(step: trees.Design, number: int):
    """All contents, and table, g -> both divergences of so many episodes; exact.

    Each is drawn afresh through all levels; the step is clipped as a whole.
    """
    first, second = (trees.prepare(tree, step.schemes, 0) for tree in step.neighbours())

    def power(one: mixtures.Mixture) -> mixtures.Mixture:
        total: mixtures.Mixture = {0.0: 1.0}
        for _ in range(number):
            total = mixtures.convolved(total, one)
        return total

    def divergences(table: dict[Any, float], g: np.ndarray):
        one, two = power(first(table)), power(second(step.neighbours_table(table)))
        return mixtures.hockey_sticks(one, two, step.s, g)

    return trees.all_contents(step), divergences


# --- Copies in several classes ---


class Copies(NamedTuple):
    """Grouped classes by coins; one example has a copy in some of the classes."""

    classes: int
    ways: int
    rate: Fraction  # of each episode's coin
    drawn: int  # examples of a class
    size: int  # of a class, copies included
    copies: int  # classes that hold one
    relation: str


def _placed(design: Copies) -> Counter[tuple[int, ...]]:
    """In how many ways the groups hold so many classes with a copy each."""
    number, groups = design.classes, design.classes // design.ways
    found: Counter = Counter()
    for chosen in itertools.combinations(range(number), design.copies):
        counts = [0] * number
        for place in chosen:
            counts[place // design.ways] += 1
        found[tuple(sorted(counts[:groups], reverse=True))] += 1  # others sit out
    return found


def _worlds(
    design: Copies, counts: tuple[int, ...], beside: tuple[int, ...]
) -> list[mixtures.Mixture]:
    """The sums with the example and without, given the partition.

    Without it: a null empties the contribution; what is left in its place gives as a
    group that does not hold it; what replaces it pulls the other way.
    """
    rate, missed = float(design.rate), 1 - design.drawn / design.size
    worlds: list[mixtures.Mixture] = [{0.0: 1.0}, {0.0: 1.0}]
    for place, number in enumerate(filter(None, counts)):
        other = beside[place % len(beside)]
        holds = 1 - missed**number
        instead = {"zero_out": 0, "add_remove": other, "replace_one": -1}
        for i, hers in enumerate((1, instead[design.relation])):
            group: mixtures.Mixture = defaultdict(float)
            for value, chance in ((0, 1 - rate), (other, rate * (1 - holds))):
                group[value] += chance
            group[hers] += rate * holds
            worlds[i] = mixtures.convolved(worlds[i], group)
    return worlds


def attained_by_copies(design: Copies, noise: float, g: float) -> np.ndarray:
    """(2,) the largest delta of one step forward and backward, over strategies."""
    best, placed = np.zeros(2), _placed(design)
    for beside in ((0,), (-1,), (1,), (-1, 1), (1, -1), (0, -1)):
        both = np.zeros(2)
        for counts, ways in placed.items():
            worlds = _worlds(design, counts, beside)
            values = mixtures.hockey_sticks(*worlds, 1 / noise, np.array([g]))
            both += ways / placed.total() * np.concatenate(values)
        best = np.maximum(best, both)
    return best

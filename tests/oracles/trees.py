"""Exact release distributions of one step on small trees, by enumeration.

A node above the last level is (name, children), one of the last a name. The content of
a clip unit is (name, frozenset of its drawn children's contents).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from oracles import mixtures

Content = Any
Distribution = dict[Any, float]


class Scheme(NamedTuple):
    """How children are drawn: "poisson" with a probability, or a size."""

    kind: str
    value: float

    def subsets(self, population: int) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Every sample of range(population), with its probability."""
        everyone = range(population)
        if self.kind == "without_replacement":
            samples = list(
                itertools.combinations(everyone, min(int(self.value), population))
            )
            yield from ((1 / len(samples), sample) for sample in samples)
            return
        for size in range(population + 1):
            weight = self.value**size * (1 - self.value) ** (population - size)
            if weight > 0:
                for sample in itertools.combinations(everyone, size):
                    yield weight, sample


class Design(NamedTuple):
    """A step on a tree, a private unit in it, and the relation that hides it."""

    root: tuple
    schemes: tuple[Scheme, ...]
    clip_level: int
    path: tuple[int, ...]
    relation: str
    s: float

    def neighbours(self) -> tuple[tuple, tuple]:
        """The larger (or original) tree and its neighbour; slots stay in zero_out."""
        if self.relation == "zero_out":
            return self.root, self.root
        return self.root, _edited(self.root, self.path, self.relation == "replace_one")

    def path_sizes(self) -> list[int]:
        """Number of siblings, itself included, at each level down the path."""
        sizes, node = [], self.root
        for position in self.path:
            sizes.append(len(node[1]))
            node = node[1][position]
        return sizes

    def private_leaves(self) -> frozenset:
        """Names of the examples inside the privacy unit, in either neighbour."""
        node = unit_at(self.root, self.path)
        return frozenset({*_leaves(node), *_leaves(_renamed(node))})

    def neighbours_table(self, table: dict) -> dict:
        """What the neighbour's contents contribute: nulls, zero, in zero_out."""
        if self.relation != "zero_out":
            return table
        private = frozenset(names(unit_at(self.root, self.path)))
        return {
            content: 0.0 if private & set(content_names(content)) else value
            for content, value in table.items()
        }


def unit_at(root: Any, path: tuple[int, ...]) -> Any:
    """The unit to which positions lead."""
    for position in path:
        root = root[1][position]
    return root


def names(node: Any) -> Iterator[Any]:
    """Names of a unit, of all units below it and of its examples."""
    if isinstance(node, tuple):
        yield node[0]
        for child in node[1]:
            yield from names(child)
    else:
        yield node


def content_names(content: Any) -> Iterator[Any]:
    """Names in a drawn content, be it of a unit or of an episode of classes."""
    if isinstance(content, frozenset):
        for part in content:
            yield from content_names(part)
    elif isinstance(content, tuple):
        yield content[0]
        yield from content_names(content[1])
    else:
        yield content


def _renamed(node: Any) -> Any:
    """The unit with every example's value changed."""
    if isinstance(node, tuple):
        return node[0], tuple(_renamed(child) for child in node[1])
    return f"{node}'"


def _edited(node: Any, path: tuple[int, ...], replace: bool) -> Any:
    """The tree without the unit at `path`, or with its value changed in place."""
    name, children = node
    here, rest = path[0], path[1:]
    if rest:
        middle = (_edited(children[here], rest, replace),)
    else:
        middle = (_renamed(children[here]),) if replace else ()
    return name, (*children[:here], *middle, *children[here + 1 :])


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, tuple):
        for child in node[1]:
            yield from _leaves(child)
    else:
        yield node


def contents(node: Any, schemes: tuple[Scheme, ...]) -> Distribution:
    """Probability of every drawn content of one unit; schemes of the levels below."""
    if not isinstance(node, tuple):
        return {node: 1.0}
    name, children = node
    below = [contents(child, schemes[1:]) for child in children]
    result: Distribution = {}
    for weight, sample in schemes[0].subsets(len(children)):
        for drawn in itertools.product(*(below[i].items() for i in sample)):
            key = name, frozenset(content for content, _ in drawn)
            chance = weight * float(np.prod([w for _, w in drawn]))
            result[key] = result.get(key, 0.0) + chance
    return result


def clip_units(node: Any, depth: int) -> list[Any]:
    """The units `depth` levels down."""
    if depth == 0:
        return [node]
    return [unit for child in node[1] for unit in clip_units(child, depth - 1)]


def all_contents(design: Design) -> list[Content]:
    """Every content that a clip unit can have, in either neighbour."""
    found: dict[Content, None] = {}
    for tree in design.neighbours():
        for unit in clip_units(tree, design.clip_level):
            found |= dict.fromkeys(contents(unit, design.schemes[design.clip_level :]))
    return list(found)


Release = Callable[[dict[Content, float]], mixtures.Mixture]


def prepare(tree: Any, schemes: tuple[Scheme, ...], clip_level: int) -> Release:
    """Enumerate the draws once; give the release's mixture for any table."""
    if clip_level == 0:
        drawn = list(contents(tree, schemes).items())

        def leaf(table: dict[Content, float]) -> mixtures.Mixture:
            result: mixtures.Mixture = {}
            for content, weight in drawn:
                value = table[content]
                result[value] = result.get(value, 0.0) + weight
            return result

        return leaf
    children = [prepare(child, schemes[1:], clip_level - 1) for child in tree[1]]
    samples = list(schemes[0].subsets(len(children)))

    def inner(table: dict[Content, float]) -> mixtures.Mixture:
        below = [child(table) for child in children]
        total: mixtures.Mixture = {}
        for weight, sample in samples:
            sums = {0.0: weight}
            for i in sample:
                sums = mixtures.convolved(sums, below[i])
            for value, chance in sums.items():
                total[value] = total.get(value, 0.0) + chance
        return total

    return inner


def enumerated(design: Design):
    """Enumerate a design once; then table, g -> both divergences, exact."""
    first, second = (
        prepare(tree, design.schemes, design.clip_level) for tree in design.neighbours()
    )

    def divergences(table: dict[Content, float], g: np.ndarray):
        one, two = first(table), second(design.neighbours_table(table))
        return mixtures.hockey_sticks(one, two, design.s, g)

    return divergences

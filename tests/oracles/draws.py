"""Exact distributions of the draws of small designs, and exact tests of counts.

Trees are nested lists of sizes; examples are numbered depth first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from oracles.trees import Scheme

Distribution = dict[Any, float]


def numbered(nested: Any) -> Any:
    """The tree with every size replaced by the list of its examples' numbers."""
    counter = itertools.count()

    def walk(node: Any) -> list:
        if isinstance(node, int):
            return [next(counter) for _ in range(node)]
        return [walk(child) for child in node]

    return walk(nested)


# --- Distributions by enumeration ---


def _product(
    dists: Iterable[Distribution], join: Callable[[tuple], Any]
) -> Distribution:
    """Distribution of a function of independent draws."""
    result: Distribution = {}
    for outcome in itertools.product(*(dist.items() for dist in dists)):
        key = join(tuple(value for value, _ in outcome))
        weight = math.prod(probability for _, probability in outcome)
        result[key] = result.get(key, 0.0) + weight
    return result


def _mixture(parts: Iterable[tuple[float, Distribution]]) -> Distribution:
    result: Distribution = {}
    for weight, dist in parts:
        for key, probability in dist.items():
            result[key] = result.get(key, 0.0) + weight * probability
    return result


def _union(parts: tuple) -> tuple:
    return tuple(sorted(itertools.chain.from_iterable(parts)))


def content_distribution(node: Any, schemes: Sequence[Scheme]) -> Distribution:
    """Distribution of the sorted tuple of examples drawn below a node of `numbered`."""
    if not schemes:
        return {(node,): 1.0}
    below = [content_distribution(child, schemes[1:]) for child in node]
    return _mixture(
        (weight, _product([below[i] for i in sample], _union))
        for weight, sample in schemes[0].subsets(len(node))
    )


def rows_distribution(
    node: Any, schemes: Sequence[Scheme], clip_level: int
) -> Distribution:
    """Distribution of the sorted tuple of the drawn clip units' contents."""
    if clip_level == 0:
        dist = content_distribution(node, schemes)
        return {(content,): probability for content, probability in dist.items()}
    below = [rows_distribution(child, schemes[1:], clip_level - 1) for child in node]
    return _mixture(
        (weight, _product([below[i] for i in sample], _union))
        for weight, sample in schemes[0].subsets(len(node))
    )


def grouped_rows_distribution(
    sizes: Sequence[int], ways: int, drawn: str, scheme: Scheme, size: int
) -> Distribution:
    """The same for grouped classes, ``drawn`` "episodes" or "classes"."""
    classes = numbered(list(sizes))
    draw = [Scheme("without_replacement", size)]
    contents = [content_distribution(examples, draw) for examples in classes]

    def contents_of(groups: Iterable[Sequence[int]]) -> Distribution:
        rows = [_product([contents[c] for c in group], _union) for group in groups]
        return _product(rows, lambda parts: tuple(sorted(parts)))

    def cut(order: Sequence[int]) -> list[Sequence[int]]:
        last = len(order) // ways * ways
        return [order[i : i + ways] for i in range(0, last, ways)]

    parts = []
    if drawn == "episodes":
        for order in itertools.permutations(range(len(sizes))):
            groups = cut(order)
            share = 1 / math.factorial(len(sizes))
            for weight, sample in scheme.subsets(len(groups)):
                parts.append((share * weight, contents_of([groups[i] for i in sample])))
    else:
        for weight, sample in scheme.subsets(len(sizes)):
            share = weight / math.factorial(len(sample))
            for order in itertools.permutations(sample):
                parts.append((share, contents_of(cut(order))))
    return _mixture(parts)


# --- Exact tests ---


class Tally(NamedTuple):
    """Counts, each binomial with its own probability; dependent on each other or not.

    Attributes:
      counts: array of whole numbers.
      trials: number of independent trials behind each.
      probability: broadcasts with ``counts``.
    """

    counts: np.ndarray
    trials: int
    probability: np.ndarray | float


def false_alarm(*tallies: Tally) -> float:
    """The smallest rate of false alarms at which these counts are rejected."""
    smallest, number = 1.0, 0
    for tally in tallies:
        dist = stats.binom(tally.trials, np.clip(tally.probability, 0.0, 1.0))
        tail = np.minimum(dist.cdf(tally.counts), dist.sf(np.asarray(tally.counts) - 1))
        smallest = min(smallest, 2.0 * float(np.min(tail)))
        number += np.size(tally.counts)
    return min(1.0, smallest * number)


def number_tally(num_rows: np.ndarray, dist: Any) -> Tally:
    """How often a step has at most k rows, for every k; ``dist`` is SciPy's."""
    low, high = dist.support()
    values = np.arange(max(low, 0), high + 1)
    at_most = (num_rows[:, None] <= values).sum(axis=0)
    return Tally(at_most, len(num_rows), dist.cdf(values))


def outcome_tally(outcomes: Sequence[Any], dist: Distribution) -> Tally:
    """How often every outcome of a distribution, and any other, came."""
    seen = {key: 0 for key in dist}
    strange = 0
    for outcome in outcomes:
        if outcome in seen:
            seen[outcome] += 1
        else:
            strange += 1
    return Tally(
        np.array([*seen.values(), strange]),
        len(outcomes),
        np.array([*(dist[key] for key in seen), 0.0]),
    )

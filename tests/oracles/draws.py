"""Exact distributions of the draws of small designs, and exact tests of counts.

Trees are nested lists of sizes; examples are numbered depth first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from oracles import trees
from oracles.episodes import drawn_groups
from oracles.trees import Scheme

Distribution = dict[Any, float]


def numbered(nested: Any) -> Any:
    """Sizes as a tree of `trees`; examples are numbered depth first."""
    counter, units = itertools.count(), itertools.count()

    def walk(node: Any) -> tuple:
        name = f"unit {next(units)}"
        if isinstance(node, int):
            return name, tuple(next(counter) for _ in range(node))
        return name, tuple(walk(child) for child in node)

    return walk(nested)


# --- Distributions by enumeration ---


def rows_distribution(tree: Any, schemes: tuple, clip_level: int) -> Distribution:
    """Distribution of the sorted tuple of the drawn clip units' sorted examples."""
    result: Distribution = {}
    for content, chance in trees.contents(tree, schemes).items():
        key = _rows([[unit] for unit in trees.clip_units(content, clip_level)])
        result[key] = result.get(key, 0.0) + chance
    return result


def _rows(units: Iterable[Iterable[Any]]) -> tuple:
    """Of each row the examples in some contents; units' names are no numbers."""
    rows = ([x for c in row for x in trees.content_names(c)] for row in units)
    return tuple(
        sorted(tuple(sorted(x for x in r if isinstance(x, int))) for r in rows)
    )


def grouped_rows_distribution(
    sizes: Sequence[int], ways: int, drawn: str, scheme: Scheme, size: int
) -> Distribution:
    """The same for grouped classes, ``drawn`` "episodes" or "classes"."""
    draw = (Scheme("without_replacement", size),)
    below = [trees.contents(examples, draw) for examples in numbered(list(sizes))[1]]
    result: Distribution = {}
    for groups, chance in drawn_groups(len(sizes), ways, drawn, scheme).items():
        places = [i for group in groups for i in group]
        for drawn_below in itertools.product(*(below[i].items() for i in places)):
            contents = {i: c for i, (c, _) in zip(places, drawn_below, strict=True)}
            key = _rows([contents[i] for i in group] for group in groups)
            weight = chance * math.prod(w for _, w in drawn_below)
            result[key] = result.get(key, 0.0) + weight
    return result


# --- Exact tests ---


class Tally(NamedTuple):
    """Counts of so many trials, each binomial; dependent on each other or not."""

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

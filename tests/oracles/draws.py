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


# --- Inclusion of single examples and of pairs, by formulas ---


class Inclusion(NamedTuple):
    """Probabilities of examples i and j; the diagonals are those of one example."""

    in_step: np.ndarray  # (R, R), both are drawn in a step
    in_row: np.ndarray  # (R, R), both are drawn in one and the same clip unit


def pair_rate(scheme: Scheme, number: int) -> float:
    """Chance that two given children of ``number`` are both drawn."""
    if scheme.kind == "poisson":
        return scheme.value**2
    size = min(scheme.value, number)
    return size * (size - 1) / (number * (number - 1))


def _paths(nested: Any) -> list[list[tuple[int, int]]]:
    """For each example the (place, number of siblings) at every level."""
    if isinstance(nested, int):
        return [[(place, nested)] for place in range(nested)]
    return [
        [(place, len(nested)), *path]
        for place, child in enumerate(nested)
        for path in _paths(child)
    ]


def tree_inclusion(
    nested: Any, schemes: Sequence[Scheme], clip_level: int
) -> Inclusion:
    """Of a multistage draw: paths that part at a level are drawn as a pair there."""
    paths = _paths(nested)
    in_step = np.zeros((len(paths), len(paths)))
    in_row = np.zeros_like(in_step)
    for i, one in enumerate(paths):
        for j, two in enumerate(paths):
            chance, parted = 1.0, len(schemes)
            for level, (scheme, a, b) in enumerate(zip(schemes, one, two, strict=True)):
                if parted < level:
                    chance *= scheme.rate(a[1]) * scheme.rate(b[1])
                elif a[0] == b[0]:
                    chance *= scheme.rate(a[1])
                else:
                    chance *= pair_rate(scheme, a[1])
                    parted = level
            in_step[i, j] = chance
            in_row[i, j] = chance if parted >= clip_level else 0.0
    return Inclusion(in_step, in_row)


def grouped_inclusion(
    sizes: Sequence[int], ways: int, drawn: str, scheme: Scheme, size: int
) -> Inclusion:
    """Of grouped classes: a pair of classes is grouped together, apart, or not at all.

    T classes take part, in whole groups. Given T two classes are together with chance
    ``T (ways - 1) / (N (N - 1))`` and apart with ``T (T - ways) / (N (N - 1))``.
    """
    n = len(sizes)
    if drawn == "episodes":
        most = n // ways
        groups, weights = np.array([most]), np.ones(1)
        both = pair_rate(scheme, most) if most > 1 else 0.0
        one = scheme.rate(most)
    else:
        number = np.arange(n + 1)
        if scheme.kind == "poisson":
            weights = stats.binom.pmf(number, n, scheme.value)
        else:
            weights = (number == min(scheme.value, n)).astype(float)
        groups, one, both = number // ways, 1.0, 1.0
    taking_part = groups * ways
    single = one * np.sum(weights * taking_part) / n
    pairs = n * (n - 1)
    together = one * np.sum(weights * taking_part * (ways - 1)) / pairs
    apart = both * np.sum(weights * taking_part * (taking_part - ways)) / pairs
    scheme_below = Scheme("without_replacement", size)
    class_of = np.repeat(np.arange(n), sizes)
    number_of = np.asarray(sizes)[class_of]
    rate = np.minimum(size, number_of) / number_of
    in_step = (together + apart) * rate[:, None] * rate
    in_row = together * rate[:, None] * rate
    for i, j in itertools.product(range(len(class_of)), repeat=2):
        if class_of[i] == class_of[j]:
            below = rate[i] if i == j else pair_rate(scheme_below, number_of[i])
            in_step[i, j] = in_row[i, j] = single * below
    return Inclusion(in_step, in_row)


def independent_inclusion(episode: np.ndarray, num_episodes: int) -> Inclusion:
    """Of independent episodes, from the (R, R) inclusion in one of them."""
    single = np.diagonal(episode)
    neither = 1 - single[:, None] - single + episode
    absent = (1 - single) ** num_episodes
    in_step = 1 - absent[:, None] - absent + neither**num_episodes
    np.fill_diagonal(in_step, 1 - absent)
    return Inclusion(in_step, 1 - (1 - episode) ** num_episodes)


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


class Incidence(NamedTuple):
    """Who was in which step and row, from S draws."""

    steps: np.ndarray  # (S, R) whether an example was in a step
    rows: np.ndarray  # (all rows, R) whether it was in a row
    num_rows: np.ndarray  # (S,) rows of each step
    together: np.ndarray  # (S, R, R) whether two examples were in one row of a step


def incidence(draws: Sequence[Any], num_examples: int) -> Incidence:
    """Collects draws that have fields ``examples`` and ``mask``."""
    num_rows = np.array([len(draw.mask) for draw in draws])
    width = max(math.prod(draw.mask.shape[1:]) for draw in draws)
    examples = np.concatenate([d.examples.reshape(len(d.mask), width) for d in draws])
    mask = np.concatenate([d.mask.reshape(len(d.mask), width) for d in draws])
    rows = np.zeros((len(mask), num_examples), np.float32)
    row, slot = np.nonzero(mask)
    np.add.at(rows, (row, examples[row, slot]), 1)
    assert rows.max(initial=0) <= 1, "an example twice in one row"
    owner = np.repeat(np.arange(len(draws)), num_rows)
    steps = np.zeros((len(draws), num_examples), bool)
    np.logical_or.at(steps, owner, rows > 0)
    together = np.zeros((len(draws), num_examples, num_examples), bool)
    for chunk in np.array_split(np.arange(len(rows)), max(1, len(rows) // 20_000)):
        pairs = (rows[chunk, :, None] * rows[chunk, None, :]) > 0
        np.logical_or.at(together, owner[chunk], pairs)
    return Incidence(steps, rows, num_rows, together)


def step_tallies(found: Incidence, expected: Inclusion) -> list[Tally]:
    """Single and joint inclusion, within a step, within a row, and across two steps."""
    number = len(found.steps)
    present = found.steps.astype(np.float32)
    half = number // 2
    first, second = present[: 2 * half : 2], present[1 : 2 * half : 2]
    single = np.diagonal(expected.in_step)
    again = found.together[: 2 * half : 2] & found.together[1 : 2 * half : 2]
    return [
        Tally(_whole(present.T @ present), number, expected.in_step),
        Tally(found.together.sum(axis=0), number, expected.in_row),
        Tally(_whole(first.T @ second), half, single[:, None] * single),
        Tally(again.sum(axis=0), half, expected.in_row**2),
    ]


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


def _whole(array: np.ndarray) -> np.ndarray:
    """Counts that float32 products hold exactly, below 2**24."""
    assert array.max(initial=0) < 2**24
    return np.rint(array).astype(np.int64)

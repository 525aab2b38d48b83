"""Exact releases under the zero-out relation, by enumeration, and the rows claimed.

The protected unit's data become null; its slot stays and is drawn as before. So both
neighbours have the same tree and the same draws, and they differ in the table of
contributions only: what holds the protected unit is zero in the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom

from oracles import adversary, episodes, mixtures, trees

Table = adversary.Table


class Row(NamedTuple):
    """The zeroed pair of a design: a factor on delta, p, r and the shift."""

    outer: float
    p: float
    r: float
    s: float


# --- What is null ---


def names(node: Any) -> Iterator[Any]:
    """Names of a unit, of all units below it and of its examples."""
    if isinstance(node, tuple):
        yield node[0]
        for child in node[1]:
            yield from names(child)
    else:
        yield node


def private_names(root: tuple, path: tuple[int, ...]) -> frozenset:
    """Names of the protected unit and of everything in it."""
    return frozenset(names(adversary._at(root, path)))


def nulled(table: Table, private: frozenset) -> Table:
    """The table of the neighbour: what holds a null contributes nothing."""
    return {
        content: 0.0 if private & set(_drawn(content)) else value
        for content, value in table.items()
    }


def _drawn(content: Any) -> Iterator[Any]:
    """Names in a drawn content, be it of a unit or of an episode of classes."""
    if isinstance(content, frozenset):
        for part in content:
            yield from _drawn(part)
    elif isinstance(content, tuple):
        yield content[0]
        yield from _drawn(content[1])
    else:
        yield content


# --- Trees ---


def all_contents(design: trees.Design) -> list[trees.Content]:
    """Every content that a clip unit can have."""
    found: dict[trees.Content, None] = {}
    for unit in trees.clip_units(design.root, design.clip_level):
        below = design.schemes[design.clip_level :]
        found |= dict.fromkeys(trees.contents(unit, below))
    return list(found)


def enumerated(design: trees.Design):
    """Enumerate a design once; then table, g -> both divergences, exact."""
    release = trees.prepare(design.root, design.schemes, design.clip_level)
    private = private_names(design.root, design.path)

    def divergences(table: Table, g: np.ndarray):
        return _both(release(table), release(nulled(table, private)), design.s, g)

    return divergences


def _both(one: mixtures.Mixture, two: mixtures.Mixture, s: float, g: np.ndarray):
    return mixtures.hockey_sticks(one, two, s, g)


def row_of(design: trees.Design) -> Row:
    """The theorem: which zeroed pair dominates this path."""
    unit, clip, s = len(design.path), design.clip_level, design.s
    rates = [
        scheme.rate(size)
        for scheme, size in zip(design.schemes, design.path_sizes(), strict=False)
    ]
    if clip > unit:
        s, clip = s * max(1, trees._most_contributions(design)), unit
    outer = float(np.prod(rates[: max(clip - 1, 0)]))
    p = rates[clip - 1] if clip else 1.0
    r = float(np.prod(rates[clip:unit]))
    if clip == 0 or design.schemes[clip - 1].kind == "without_replacement":
        return Row(outer, 1.0, p * r, s)
    return Row(outer, p, r, s)


def kind_of(design: trees.Design) -> str:
    """Name of the row, for counting."""
    unit, clip = len(design.path), design.clip_level
    if clip == 0:
        return "step"
    kind = design.schemes[min(clip, unit) - 1].kind
    place = "at" if clip == unit else "above" if clip < unit else "below"
    return f"{kind}, clipped {place} the unit"


def claimed(row: Row, g: np.ndarray):
    """Both profiles of the zeroed pair, from its mixtures."""
    outer, p, r, s = row
    forward = mixtures.hockey_stick(
        {0.0: 1 - p, -1.0: p * (1 - r), 1.0: p * r},
        {0.0: 1 - p + p * r, -1.0: p * (1 - r)},
        s,
        g,
    )
    backward = mixtures.hockey_stick(
        {0.0: 1 - p + p * r, 1.0: p * (1 - r)}, {0.0: 1 - p, 1.0: p}, s, g
    )
    return outer * forward, outer * backward


def worst_tables(design: trees.Design) -> dict[str, Table]:
    """The two worst cases of the proof.

    What holds the protected unit contributes +1. Forward, all else of its outer unit
    contributes -1, backward +1; the other units of a Poisson draw, whose sum is shared,
    contribute 0. Other outer units pull away, which sets their draws apart.
    """
    private = private_names(design.root, design.path)
    clip, unit = design.clip_level, len(design.path)
    level = min(clip, unit)
    own = frozenset(names(adversary._at(design.root, design.path[:level])))
    near = frozenset(
        names(adversary._at(design.root, design.path[: max(level - 1, 0)]))
    )
    poisson = level > 0 and design.schemes[level - 1].kind == "poisson"
    tables: dict[str, Table] = {"forward": {}, "backward": {}}
    for content in all_contents(design):
        drawn = set(_drawn(content))
        for direction, sign in (("forward", -1.0), ("backward", 1.0)):
            if drawn & private:
                value = 1.0
            elif clip == 0 or drawn & own:
                value = sign
            elif drawn & near:
                value = 0.0 if poisson else sign
            else:
                value = -sign
            tables[direction][content] = value
    return tables


# --- Grouped classes and independent episodes ---


def grouped(design: episodes.GroupedDesign, *, reveal: bool = False):
    """All contents, and table, g -> both divergences of the enumerated step; exact."""
    pool = episodes._Pool(design, design.pool)
    private = private_names(design.pool, design.path)
    keys = {c for dist in pool.contents.values() for c in dist}

    def divergences(table: Table, g: np.ndarray):
        other = nulled(table, private)
        if not reveal:
            return _both(pool.mixed(table), pool.mixed(other), design.s, g)
        totals = np.zeros((2, len(g)))
        for groups, weight in pool.draws.items():
            one, two = pool.release(groups, table), pool.release(groups, other)
            totals += weight * np.array(_both(one, two, design.s, g))
        return totals[0], totals[1]

    return sorted(keys, key=repr), divergences


def grouped_row(design: episodes.GroupedDesign) -> Row:
    """Poisson over a fresh partition: an episode's coin; else all is one rate."""
    rate, r_in = design.rates()
    if design.draw == "partition":
        return Row(1.0, rate, r_in, design.s)
    return Row(1.0, 1.0, rate * r_in, design.s)


def worst_grouped_tables(design: episodes.GroupedDesign, keys: list) -> list[Table]:
    """As `worst_tables`."""
    private = private_names(design.pool, design.path)
    own = frozenset(names(design.pool[1][design.path[0]]))
    tables: list[Table] = [{}, {}]
    for key in keys:
        drawn = set(_drawn(key))
        for table, sign in zip(tables, (-1.0, 1.0), strict=True):
            far = design.draw == "partition" and not drawn & own
            table[key] = 1.0 if drawn & private else 0.0 if far else sign
    return tables


def independent(design: episodes.IndependentDesign):
    """All contents, and table, g -> both divergences of the enumerated step; exact."""
    step = design.as_step()
    release = trees.prepare(step.root, design.schemes, 0)
    private = private_names(step.root, step.path)

    def power(one: mixtures.Mixture) -> mixtures.Mixture:
        total: mixtures.Mixture = {0.0: 1.0}
        for _ in range(design.num_episodes):
            total = mixtures.convolved(total, one)
        return total

    def divergences(table: Table, g: np.ndarray):
        one, two = power(release(table)), power(release(nulled(table, private)))
        return _both(one, two, design.s, g)

    return all_contents(step), divergences


def episode_rate(design: episodes.IndependentDesign) -> float:
    """The chance to be in one given episode."""
    pairs = zip(design.schemes, design.as_step().path_sizes(), strict=False)
    return float(np.prod([scheme.rate(size) for scheme, size in pairs]))


def independent_claim(num_episodes: int, eta: float, s: float, g: np.ndarray):
    """A mixture of zeroed pairs over how many episodes hold the protected unit."""
    counts = range(1, num_episodes + 1)
    any_rate = -np.expm1(num_episodes * np.log1p(-eta)) if eta < 1 else 1.0
    parts = [
        (
            binom.pmf(k, num_episodes, eta) / any_rate,
            claimed(Row(1.0, 1.0, any_rate, k * s), g),
        )
        for k in counts
    ]
    return tuple(sum(w * pair[i] for w, pair in parts) for i in (0, 1))

"""Every draw of small designs in which a person is in many units, and the worst data.

Each family draws the numbers of a random design, and lists its draws with the person
and without her. `facts` describes the design to whoever is asked for a bound.
A drawn clip unit has a content: its label and its examples' names; names that begin
with "x" are the person's. A law maps a draw to its chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from oracles import mixtures, trees
from oracles.episodes import groupings

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
    number = len(items) if kind == "all" else value
    drawn = trees.Scheme(
        "poisson" if kind == "coins" else "without_replacement", number
    )
    return [
        (chance, tuple(items[i] for i in sample))
        for chance, sample in drawn.subsets(len(items))
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
    every = groupings(tuple(range(num_classes)), ways)
    return sorted(tuple(sorted(tuple(sorted(g)) for g in groups)) for groups in every)


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


# --- Random designs ---


MOST_DRAWS = 1_500
MOST_COLUMNS = 26

Classes = list[tuple[str, ...]]
# The draws with the person and without her, and what describes the design.
Built = tuple[list[Law], dict[str, Any]]


class Case(NamedTuple):
    """An enumerated design and its description."""

    family: str
    relation: str
    s: float
    release: Release
    facts: dict[str, Any]


def random_case(rng: np.random.Generator, family: str) -> Case:
    """A design of a family; what is too large is drawn again."""
    while True:
        relation = str(rng.choice(RELATIONS))
        s = float(rng.choice([0.3, 0.7, 1.2, 2.5]))
        (law, without), facts = FAMILIES[family](rng)
        if len(law) > MOST_DRAWS or len(without) > MOST_DRAWS:
            continue
        step = release(law, relation, without)
        if len(step.columns) <= MOST_COLUMNS:
            return Case(family, relation, s, step, facts)


def _coin(rng: np.random.Generator) -> float:
    """A chance of being drawn."""
    return float(rng.choice([0.1, 0.3, 0.5, 0.8, 1.0]))


def _either(rng: np.random.Generator, coins: float, size: float = 1.0):
    """Coins with this chance, or a sample of a fixed size."""
    return ("coins", _coin(rng)) if rng.random() < coins else ("draw", size)


def _a_class(name: str, hers: int, size: int) -> tuple[str, ...]:
    """Names of a class's examples."""
    return tuple(f"x{name}{i}" for i in range(hers)) + tuple(
        f"o{name}{i}" for i in range(size - hers)
    )


def _with_and_without(classes: Sequence[tuple[str, ...]]) -> tuple[Classes, Classes]:
    """The classes, and the same without the person; they stay."""
    return list(classes), [without_person(examples) for examples in classes]


# --- Tasks, whose classes and examples are drawn ---


class Inner(NamedTuple):
    """What is drawn within a task: classes (scheme, number), examples (number, of)."""

    ways: tuple[str, float]
    num_classes: int
    shots: int
    size: int


def _inner(rng: np.random.Generator) -> Inner:
    number, size = int(rng.integers(1, 3)), int(rng.integers(2, 4))
    ways = ALL
    if number > 1 and rng.random() < 0.6:
        ways = ("draw", 1.0) if rng.random() < 0.6 else ("coins", 0.4)
    return Inner(ways, number, int(rng.integers(1, size)), size)


def _task(name: str, inner: Inner, hers: int, each: int) -> Classes:
    return [
        _a_class(f"{name}{i}", each if i < hers else 0, inner.size)
        for i in range(inner.num_classes)
    ]


def _tasks(rng, inner: Inner, most: int) -> tuple[list[Classes], dict[str, int]]:
    """Tasks that can hold the person; her bounds."""
    each = int(rng.integers(1, inner.size + (rng.random() < 0.3)))
    hers = [int(rng.integers(1, inner.num_classes + 1)) for _ in range(most)]
    if rng.random() < 0.6:
        hers = [hers[0]] * most
    tasks = [_task(str(i), inner, a, each) for i, a in enumerate(hers)]
    return tasks, {"examples": each, "classes": max(hers), "tasks": most}


def _tasks_drawn(tasks: list[Classes], inner: Inner, scheme) -> list[Law]:
    """Tasks as clip units."""
    worlds = zip(*map(_with_and_without, tasks), strict=True)
    shots = ("draw", inner.shots)
    return [
        drawn_units(
            [unit_law(str(i), c, inner.ways, shots) for i, c in enumerate(world)],
            scheme,
        )
        for world in worlds
    ]


def coin_tasks(rng: np.random.Generator) -> Built:
    """Tasks by coins, clipped."""
    inner, p = _inner(rng), _coin(rng)
    tasks, bounds = _tasks(rng, inner, int(rng.integers(1, 4)))
    facts = {"p": p, "inner": inner, "bounds": bounds}
    return _tasks_drawn(tasks, inner, ("coins", p)), facts


def fixed_size_tasks(rng: np.random.Generator) -> Built:
    """Some tasks of all, without replacement, clipped."""
    inner = _inner(rng)
    tasks, bounds = _tasks(rng, inner, int(rng.integers(1, 4)))
    others = int(rng.integers(0, 3))
    size = int(rng.integers(1, len(tasks) + others + 1))
    tasks += [_task(f"o{i}", inner, 0, 1) for i in range(others)]
    facts = {"size": size, "num_tasks": len(tasks), "inner": inner, "bounds": bounds}
    return _tasks_drawn(tasks, inner, ("draw", size)), facts


def classes_below_tasks(rng: np.random.Generator) -> Built:
    """Tasks drawn, which is seen; classes clipped, by coins or one of each task's."""
    inner = _inner(rng)._replace(ways=ALL)
    found, bounds = _tasks(rng, inner, int(rng.integers(1, 3)))
    most, each, number = bounds["classes"], bounds["examples"], len(found)
    tasks = [_task(str(i), inner, most, each) for i in range(number)]
    above, within = _either(rng, 0.5), _either(rng, 0.6)
    seen, shots = subsets(range(number), above), ("draw", inner.shots)
    laws = []
    for world in zip(*map(_with_and_without, tasks), strict=True):
        drawn = []
        for task, classes in zip(tasks, world, strict=True):
            units = [
                unit_law(task[i][0], [c], ALL, shots) for i, c in enumerate(classes)
            ]
            drawn.append(drawn_units(units, within))
        laws.append(averaged([(w, summed([drawn[i] for i in d])) for w, d in seen]))
    facts = {"above": above, "within": within, "inner": inner, "bounds": bounds}
    return laws, facts | {"num_tasks": number}


def independent_episodes(rng: np.random.Generator) -> Built:
    """Episodes drawn afresh, from all classes, each for itself."""
    inner = Inner(("draw", float(rng.integers(1, 3))), int(rng.integers(2, 4)), 1, 2)
    hers, number = int(rng.integers(1, inner.num_classes + 1)), int(rng.integers(2, 4))
    laws = []
    for classes in _with_and_without(_task("", inner, hers, 1)):
        one = unit_law("", classes, inner.ways, ("draw", inner.shots))
        laws.append(drawn_units([one] * number, ALL))
    bounds = {"examples": 1, "classes": hers}
    return laws, {"episodes": number, "inner": inner, "bounds": bounds}


# --- Classes in groups ---


def grouped_classes(rng: np.random.Generator) -> Built:
    """Classes in groups, made afresh; the groups by coins or some of all."""
    num, ways = int(rng.integers(2, 6)), int(rng.integers(1, 3))
    hers, size, each = int(rng.integers(1, num + 1)), 2, 1
    scheme = _either(rng, 0.7, float(rng.integers(1, num // ways + 1)))
    classes = [_a_class(str(i), each if i < hers else 0, size) for i in range(num)]
    every = partitions(num, ways)
    laws = []
    for pool in _with_and_without(classes):
        drawn = [
            drawn_units(
                [
                    unit_law(str(g), [pool[i] for i in g], ALL, ("draw", 1))
                    for g in groups
                ],
                scheme,
            )
            for groups in every
        ]
        laws.append(averaged([(1 / len(drawn), law) for law in drawn]))
    bounds = {"examples": each, "classes": hers}
    facts = {"num_classes": num, "ways": ways, "scheme": scheme, "size": size}
    return laws, facts | {"bounds": bounds}


# --- Blocks of people ---


def blocks(rng: np.random.Generator) -> Built:
    """The person's block and another; an episode of each, or two of hers."""
    hers, others = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    slots = _a_class("", hers, hers + others)
    size, scheme = int(rng.integers(1, others + 1)), _either(rng, 0.7)
    laws = []
    for pool in (slots, without_person(slots)):
        units = [
            unit_law(str(i), [each], ALL, ("draw", size))
            for i, each in enumerate([pool, ("b0", "b1")])
        ]
        laws.append(drawn_units(units, scheme))
    return laws, {"scheme": scheme, "hers": hers, "slots": len(slots), "size": size}


def episodes_of_a_block(rng: np.random.Generator) -> Built:
    """Two episodes of the person's block by coins, their examples disjoint or not."""
    hers, p = int(rng.integers(1, 3)), _coin(rng)
    slots, disjoint = _a_class("", hers, hers + 2), bool(rng.random() < 0.5)
    laws = []
    for pool in (slots, without_person(slots)):
        law: Law = {}
        for one in pool:
            rest = [name for name in pool if name != one] if disjoint else pool
            for two in rest:
                chance = 1 / (len(pool) * len(rest))
                units = [{("", (name,)): 1.0} for name in (one, two)]
                for draw, weight in drawn_units(units, ("coins", p)).items():
                    added(law, draw, chance * weight)
        laws.append(law)
    facts = {"p": p, "hers": hers, "slots": len(slots), "disjoint": disjoint}
    return laws, facts


# --- Examples clipped one by one ---


def examples_alone(rng: np.random.Generator) -> Built:
    """Examples clipped one by one, by coins or some of all of them."""
    hers, others = int(rng.integers(1, 4)), int(rng.integers(0, 4))
    pool = _a_class("", hers, hers + others)
    scheme = _either(rng, 0.4, float(rng.integers(1, len(pool) + 1)))
    laws = [
        drawn_units([{(name, (name,)): 1.0} for name in each], scheme)
        for each in (pool, without_person(pool))
    ]
    return laws, {"scheme": scheme, "hers": hers, "population": len(pool)}


def examples_in_classes(rng: np.random.Generator) -> Built:
    """Classes drawn, which is seen; in each, examples clipped one by one."""
    num, each, size = 2, int(rng.integers(1, 3)), int(rng.integers(2, 4))
    hers = int(rng.integers(1, num + 1))
    above = _either(rng, 0.5)
    below = _either(rng, 0.5, float(rng.integers(1, size + 1)))
    classes = [_a_class(str(i), each if i < hers else 0, size) for i in range(num)]
    seen = subsets(range(num), above)
    laws = []
    for pool in _with_and_without(classes):
        units = [drawn_units([{(n, (n,)): 1.0} for n in c], below) for c in pool]
        laws.append(averaged([(w, summed([units[i] for i in d])) for w, d in seen]))
    facts = {"above": above, "below": below, "num_classes": num, "size": size}
    return laws, facts | {"bounds": {"examples": each, "classes": hers}}


FAMILIES: dict[str, Callable[[np.random.Generator], Built]] = {
    family.__name__: family
    for family in (
        coin_tasks,
        fixed_size_tasks,
        classes_below_tasks,
        independent_episodes,
        grouped_classes,
        blocks,
        episodes_of_a_block,
        examples_alone,
        examples_in_classes,
    )
}

"""Random small designs in which a person is in many units, enumerated.

Each family draws the numbers of a design, and enumerates its draws with the person and
without her. `facts` describes the design to whoever is asked for a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from oracles import people_draws
from oracles.people_draws import (
    ALL,
    Law,
    Release,
    added,
    averaged,
    drawn_units,
    subsets,
    summed,
    unit_law,
    without_person,
)

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
        relation = str(rng.choice(people_draws.RELATIONS))
        s = float(rng.choice([0.3, 0.7, 1.2, 2.5]))
        (law, without), facts = FAMILIES[family](rng)
        if len(law) > MOST_DRAWS or len(without) > MOST_DRAWS:
            continue
        step = people_draws.release(law, relation, without)
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
    partitions = people_draws.partitions(num, ways)
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
            for groups in partitions
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

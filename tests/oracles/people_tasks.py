"""Random designs of tasks, whose classes and examples are drawn, and the claims.

Each family draws the numbers of a design, enumerates its draws with the person and
without her, and says what every theorem that covers it claims. The facts describe the
design to whoever is to be asked for a bound of his own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from oracles import people
from oracles.people import Claim
from oracles.people_draws import (
    ALL,
    Law,
    added,
    averaged,
    drawn_units,
    is_held,
    subsets,
    summed,
    unit_law,
    without_person,
)


def coin(rng: np.random.Generator) -> float:
    """A chance of being drawn."""
    return float(rng.choice([0.1, 0.3, 0.5, 0.8, 1.0]))


def a_class(name: str, hers: int, size: int) -> tuple[str, ...]:
    """Names of a class's examples."""
    return tuple(f"x{name}{i}" for i in range(hers)) + tuple(
        f"o{name}{i}" for i in range(size - hers)
    )


def emptied(classes: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The classes without the person; they stay."""
    return [without_person(examples) for examples in classes]


Built = tuple[Law, Law, list[Claim], dict[str, Any]]


# --- Tasks, whose classes and examples are drawn ---


class _Task(NamedTuple):
    classes: list[tuple[str, ...]]
    rate: float


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


def _task(name: str, inner: Inner, hers: int, each: int) -> _Task:
    classes = [
        a_class(f"{name}{i}", each if i < hers else 0, inner.size)
        for i in range(inner.num_classes)
    ]
    rho = people.reached(inner.size, each, inner.shots)
    kind, value = inner.ways
    if kind == "coins":
        return _Task(classes, 1 - (1 - value * rho) ** hers)
    ways = inner.num_classes if kind == "all" else int(value)
    return _Task(classes, people.chosen_classes(inner.num_classes, hers, ways, rho))


def _tasks(rng, inner: Inner, most: int) -> tuple[list[_Task], dict[str, int]]:
    """Tasks that can hold the person; her bounds."""
    each = int(rng.integers(1, inner.size + (rng.random() < 0.3)))
    hers = [int(rng.integers(1, inner.num_classes + 1)) for _ in range(most)]
    if rng.random() < 0.6:
        hers = [hers[0]] * most
    tasks = [_task(str(i), inner, a, each) for i, a in enumerate(hers)]
    return tasks, {"examples": each, "classes": max(hers), "tasks": most}


def _unit_laws(tasks: list[_Task], inner: Inner, *, gone: bool):
    return [
        unit_law(
            str(i),
            emptied(task.classes) if gone else task.classes,
            inner.ways,
            ("draw", inner.shots),
        )
        for i, task in enumerate(tasks)
    ]


def coin_claims(rates, p: float, relation: str, *, fixed: bool) -> list[Claim]:
    """Theorems A, 2 and 3, of the chances themselves and of the largest."""
    law = people.poisson_binomial(rates)
    most = people.poisson_binomial([max(rates)] * len(rates))
    claims = [
        people.theorem_a([(p, r) for r in rates], relation),
        people.theorem_2(law, p, relation, fixed_classes=fixed),
        people.theorem_2(most, p, relation),
        people.theorem_3(people.poisson_binomial([p * r for r in rates]), relation),
    ]
    if relation == "zero_out" and len(set(rates)) == 1 and rates[0] < 1:
        claims += [people.theorem_ab(len(rates), p, rates[0], 1.0)]
    return claims


def coin_tasks(rng: np.random.Generator, relation: str) -> Built:
    """Tasks by coins, clipped."""
    inner, p = _inner(rng), coin(rng)
    tasks, bounds = _tasks(rng, inner, int(rng.integers(1, 4)))
    laws = [
        drawn_units(_unit_laws(tasks, inner, gone=gone), ("coins", p))
        for gone in (False, True)
    ]
    fixed = relation == "add_remove" and inner.ways[0] == "all"
    claims = coin_claims([t.rate for t in tasks], p, relation, fixed=fixed)
    return laws[0], laws[1], claims, {"p": p, "inner": inner, "bounds": bounds}


def fixed_size_tasks(rng: np.random.Generator, relation: str) -> Built:
    """Some tasks of all, without replacement, clipped."""
    inner = _inner(rng)
    tasks, bounds = _tasks(rng, inner, int(rng.integers(1, 4)))
    others = int(rng.integers(0, 3))
    size = int(rng.integers(1, len(tasks) + others + 1))
    tasks = tasks + [_task(f"o{i}", inner, 0, 1) for i in range(others)]
    laws = [
        drawn_units(_unit_laws(tasks, inner, gone=gone), ("draw", size))
        for gone in (False, True)
    ]
    law = law_of_j(laws[0])
    claims = [people.theorem_1(law, relation), people.theorem_3(law, relation)]
    facts = {"size": size, "num_tasks": len(tasks), "inner": inner, "bounds": bounds}
    return laws[0], laws[1], claims, facts


def law_of_j(law: Law) -> list[float]:
    """By counting."""
    counts: dict[int, float] = {}
    for draw, chance in law.items():
        added(counts, sum(map(is_held, draw)), chance)
    return [counts.get(j, 0.0) for j in range(max(counts) + 1)]


def classes_below_tasks(rng: np.random.Generator, relation: str) -> Built:
    """Tasks drawn, which is seen; classes clipped, by coins or one of each task's."""
    inner = _inner(rng)._replace(ways=ALL)
    found, bounds = _tasks(rng, inner, int(rng.integers(1, 3)))
    most, each, num_tasks = bounds["classes"], bounds["examples"], len(found)
    tasks = [_task(str(i), inner, most, each) for i in range(num_tasks)]
    above = ("coins", coin(rng)) if rng.random() < 0.5 else ("draw", 1.0)
    within = ("coins", coin(rng)) if rng.random() < 0.6 else ("draw", 1.0)
    seen = subsets(range(num_tasks), above)
    laws = []
    for gone in (False, True):
        drawn = [_classes_drawn(task, inner, within, gone=gone) for task in tasks]
        laws.append(averaged([(w, summed([drawn[i] for i in d])) for w, d in seen]))
    rho = people.reached(inner.size, each, inner.shots)
    options = [
        (w, _claims_below(len(d), most, rho, inner, within, relation))
        for w, d in seen
        if d
    ]
    claims = [people.scaled(*((w, both[i]) for w, both in options)) for i in range(2)]
    facts = {"above": above, "within": within, "inner": inner, "bounds": bounds}
    return laws[0], laws[1], claims, facts | {"num_tasks": num_tasks}


def _classes_drawn(task: _Task, inner: Inner, within, *, gone: bool) -> Law:
    """The classes of one task as clip units."""
    classes = emptied(task.classes) if gone else task.classes
    shots = ("draw", inner.shots)
    units = [
        unit_law(task.classes[i][0], [c], ALL, shots) for i, c in enumerate(classes)
    ]
    return drawn_units(units, within)


def _claims_below(seen: int, hers: int, rho: float, inner: Inner, within, relation):
    """Two claims, given how many of the person's tasks are seen to be drawn."""
    if within[0] == "coins":
        fixed = relation == "add_remove"
        return coin_claims([rho] * (seen * hers), within[1], relation, fixed=fixed)[:2]
    law = people.poisson_binomial([rho] * hers)
    one, total = people.without_replacement(law, inner.num_classes, 1), [1.0]
    for _ in range(seen):
        total = [float(w) for w in np.convolve(total, one)]
    return [people.theorem_1(total, relation), people.theorem_3(total, relation)]


def independent_episodes(rng: np.random.Generator, relation: str) -> Built:
    """Episodes drawn afresh, from all classes, each for itself."""
    inner = Inner(("draw", float(rng.integers(1, 3))), int(rng.integers(2, 4)), 1, 2)
    hers, number = int(rng.integers(1, inner.num_classes + 1)), int(rng.integers(2, 4))
    task = _task("", inner, hers, 1)
    laws = []
    for classes in (task.classes, emptied(task.classes)):
        one = unit_law("", classes, inner.ways, ("draw", inner.shots))
        laws.append(drawn_units([one] * number, ALL))
    law = people.poisson_binomial([task.rate] * number)
    claims = [people.theorem_1(law, relation), people.theorem_3(law, relation)]
    facts = {
        "episodes": number,
        "inner": inner,
        "bounds": {"examples": 1, "classes": hers},
    }
    return laws[0], laws[1], claims, facts

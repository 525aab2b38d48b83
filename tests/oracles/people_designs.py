"""Random small designs in which a person is in many units, enumerated, and the claims.

Each family draws the numbers of a design, enumerates its draws with the person and
without her, and says what every theorem that covers it claims. `facts` describes the
design to whoever is to be asked for a bound of his own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from oracles import people, people_draws
from oracles.people import Claim, Part
from oracles.people_draws import Law, Release

MOST_DRAWS = 1_500
MOST_COLUMNS = 26


class Case(NamedTuple):
    """An enumerated design, the theorems' claims for it, and its description."""

    family: str
    relation: str
    s: float
    release: Release
    claims: list[Claim]
    facts: dict[str, Any]


def random_case(rng: np.random.Generator, family: str | None = None) -> Case:
    """A design of a family; what is too large is drawn again."""
    names = list(FAMILIES)
    family = names[rng.integers(len(names))] if family is None else family
    while True:
        relation = str(rng.choice(people_draws.RELATIONS))
        s = float(rng.choice([0.3, 0.7, 1.2, 2.5]))
        law, without, claims, facts = FAMILIES[family](rng, relation)
        if len(law) > MOST_DRAWS or len(without) > MOST_DRAWS:
            continue
        step = people_draws.release(law, relation, without)
        if len(step.columns) <= MOST_COLUMNS:
            return Case(family, relation, s, step, claims, facts)


def scaled(*parts: tuple[float, Claim]) -> Claim:
    """Claims of what is visible, with their chances."""
    ways: tuple[list[Part], list[Part]] = ([], [])
    for weight, claim in parts:
        for found, side in zip(ways, claim, strict=True):
            found += [part._replace(weight=weight * part.weight) for part in side]
    return Claim(*ways)


def _coin(rng: np.random.Generator) -> float:
    return float(rng.choice([0.1, 0.3, 0.5, 0.8, 1.0]))


def _class(name: str, hers: int, size: int) -> tuple[str, ...]:
    return tuple(f"x{name}{i}" for i in range(hers)) + tuple(
        f"o{name}{i}" for i in range(size - hers)
    )


def _emptied(classes):
    return [people_draws.without_person(examples) for examples in classes]


Built = tuple[Law, Law, list[Claim], dict[str, Any]]


# --- Tasks, whose classes and examples are drawn ---


class _Task(NamedTuple):
    classes: list[tuple[str, ...]]
    rate: float


class _Inner(NamedTuple):
    """What is drawn within a task: classes (scheme, number), examples (number, of)."""

    ways: tuple[str, float]
    num_classes: int
    shots: int
    size: int


def _inner(rng: np.random.Generator) -> _Inner:
    number, size = int(rng.integers(1, 3)), int(rng.integers(2, 4))
    ways = ("all", 0.0)
    if number > 1 and rng.random() < 0.6:
        ways = ("draw", 1.0) if rng.random() < 0.6 else ("coins", 0.4)
    return _Inner(ways, number, int(rng.integers(1, size)), size)


def _task(name: str, inner: _Inner, hers: int, each: int) -> _Task:
    classes = [
        _class(f"{name}{i}", each if i < hers else 0, inner.size)
        for i in range(inner.num_classes)
    ]
    rho = people.reached(inner.size, each, inner.shots)
    kind, value = inner.ways
    if kind == "coins":
        return _Task(classes, 1 - (1 - value * rho) ** hers)
    ways = inner.num_classes if kind == "all" else int(value)
    return _Task(classes, people.chosen_classes(inner.num_classes, hers, ways, rho))


def _tasks(rng, inner: _Inner, most: int) -> tuple[list[_Task], dict[str, int]]:
    """Tasks that can hold the person; her bounds."""
    each = int(rng.integers(1, inner.size + (rng.random() < 0.3)))
    hers = [int(rng.integers(1, inner.num_classes + 1)) for _ in range(most)]
    if rng.random() < 0.6:
        hers = [hers[0]] * most
    tasks = [_task(str(i), inner, a, each) for i, a in enumerate(hers)]
    return tasks, {"examples": each, "classes": max(hers), "tasks": most}


def _unit_laws(tasks: list[_Task], inner: _Inner, *, gone: bool):
    return [
        people_draws.unit_law(
            str(i),
            _emptied(task.classes) if gone else task.classes,
            inner.ways,
            ("draw", inner.shots),
        )
        for i, task in enumerate(tasks)
    ]


def _coin_claims(rates, p: float, relation: str, *, fixed: bool) -> list[Claim]:
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
    inner, p = _inner(rng), _coin(rng)
    tasks, bounds = _tasks(rng, inner, int(rng.integers(1, 4)))
    laws = [
        people_draws.drawn_units(_unit_laws(tasks, inner, gone=gone), ("coins", p))
        for gone in (False, True)
    ]
    fixed = relation == "add_remove" and inner.ways[0] == "all"
    claims = _coin_claims([t.rate for t in tasks], p, relation, fixed=fixed)
    return laws[0], laws[1], claims, {"p": p, "inner": inner, "bounds": bounds}


def fixed_size_tasks(rng: np.random.Generator, relation: str) -> Built:
    """Some tasks of all, without replacement, clipped."""
    inner = _inner(rng)
    tasks, bounds = _tasks(rng, inner, int(rng.integers(1, 4)))
    others = int(rng.integers(0, 3))
    size = int(rng.integers(1, len(tasks) + others + 1))
    tasks = tasks + [_task(f"o{i}", inner, 0, 1) for i in range(others)]
    laws = [
        people_draws.drawn_units(_unit_laws(tasks, inner, gone=gone), ("draw", size))
        for gone in (False, True)
    ]
    law = _law_of_j(laws[0])
    claims = [people.theorem_1(law, relation), people.theorem_3(law, relation)]
    facts = {"size": size, "num_tasks": len(tasks), "inner": inner, "bounds": bounds}
    return laws[0], laws[1], claims, facts


def _law_of_j(law: Law) -> list[float]:
    """By counting."""
    counts: dict[int, float] = {}
    for draw, chance in law.items():
        people_draws.added(counts, sum(map(people_draws.is_held, draw)), chance)
    return [counts.get(j, 0.0) for j in range(max(counts) + 1)]


def classes_below_tasks(rng: np.random.Generator, relation: str) -> Built:
    """Tasks drawn, which is seen; classes clipped, by coins or some of each task's."""
    inner = _inner(rng)._replace(ways=("all", 0.0))
    tasks, bounds = _tasks(rng, inner, int(rng.integers(1, 3)))
    tasks = [_task(str(i), inner, bounds["classes"], bounds["examples"]) for i in range(len(tasks))]
    above = ("coins", _coin(rng)) if rng.random() < 0.5 else ("draw", 1.0)
    within = ("coins", _coin(rng)) if rng.random() < 0.6 else ("draw", 1.0)
    rho = people.reached(inner.size, bounds["examples"], inner.shots)
    laws, claims = [], []
    for gone in (False, True):
        units = [
            [
                people_draws.unit_law(f"{i}.{j}", [c], ("all", 0), ("draw", inner.shots))
                for j, c in enumerate(_emptied(task.classes) if gone else task.classes)
            ]
            for i, task in enumerate(tasks)
        ]
        laws.append(
            people_draws.averaged([
                (
                    weight,
                    people_draws.summed(
                        [people_draws.drawn_units(units[i], within) for i in drawn]
                    ),
                )
                for weight, drawn in people_draws.subsets(range(len(tasks)), above)
            ])
        )
    for choice in range(2):
        parts = []
        for weight, drawn in people_draws.subsets(range(len(tasks)), above):
            number = len(drawn) * bounds["classes"]
            if not number:
                continue
            if within[0] == "coins":
                fixed = relation == "add_remove"
                options = _coin_claims([rho] * number, within[1], relation, fixed=fixed)
            else:
                one = people.without_replacement(
                    people.poisson_binomial([rho] * bounds["classes"]), inner.num_classes, 1
                )
                law = [1.0]
                for _ in drawn:
                    law = list(np.convolve(law, one))
                options = [people.theorem_1(law, relation), people.theorem_3(law, relation)]
            parts.append((weight, options[choice]))
        claims.append(scaled(*parts))
    facts = {"above": above, "within": within, "inner": inner, "bounds": bounds, "num_tasks": len(tasks)}
    return laws[0], laws[1], claims, facts


def independent_episodes(rng: np.random.Generator, relation: str) -> Built:
    """Episodes drawn afresh, from all classes, each for itself."""
    inner = _Inner(("draw", float(rng.integers(1, 3))), int(rng.integers(2, 4)), 1, 2)
    hers, number = int(rng.integers(1, inner.num_classes + 1)), int(rng.integers(2, 4))
    task = _task("", inner, hers, 1)
    laws = []
    for classes in (task.classes, _emptied(task.classes)):
        one = people_draws.unit_law("", classes, inner.ways, ("draw", inner.shots))
        laws.append(people_draws.drawn_units([one] * number, ("all", 0)))
    law = people.poisson_binomial([task.rate] * number)
    claims = [people.theorem_1(law, relation), people.theorem_3(law, relation)]
    facts = {"episodes": number, "inner": inner, "bounds": {"examples": 1, "classes": hers}}
    return laws[0], laws[1], claims, facts


# --- Classes in groups ---


def grouped_classes(rng: np.random.Generator, relation: str) -> Built:
    """Classes in groups, fixed or made afresh; the groups by coins or some of all."""
    num, ways = int(rng.integers(2, 6)), int(rng.integers(1, 3))
    hers, size, each = int(rng.integers(1, num + 1)), 2, 1
    scheme = ("coins", _coin(rng))
    if rng.random() < 0.3:
        scheme = ("draw", float(rng.integers(1, num // ways + 1)))
    classes = [_class(str(i), each if i < hers else 0, size) for i in range(num)]
    all_of = people_draws.partitions(num, ways)
    fresh = bool(rng.random() < 0.6)
    chosen = all_of if fresh else [all_of[rng.integers(len(all_of))]]
    laws = []
    for pool in (classes, _emptied(classes)):
        drawn = [
            people_draws.drawn_units(
                [
                    people_draws.unit_law(str(g), [pool[i] for i in g], ("all", 0), ("draw", 1))
                    for g in partition
                ],
                scheme,
            )
            for partition in chosen
        ]
        laws.append(people_draws.averaged([(1 / len(chosen), law) for law in drawn]))
    rho, groups = people.reached(size, each, 1), num // ways
    worst = people.even_groups(groups, min(hers, ways * groups), rho)
    law = people.average_groups(num, ways, hers, rho) if fresh else worst
    if scheme[0] == "coins":
        claims = [people.theorem_2(law, scheme[1], relation, cover=1 - worst[0])]
        crude = people.theorem_a_equal(
            min(hers, groups), scheme[1], 1 - (1 - rho) ** min(ways, hers), relation
        )
        held = [[1 - (1 - rho) ** sum(i < hers for i in g) for g in p] for p in chosen]
        exact = [people.theorem_a([(scheme[1], r) for r in rates], relation) for rates in held]
        claims += [crude, scaled(*((1 / len(chosen), claim) for claim in exact))]
    else:
        law_j, worst_j = (
            people.without_replacement(each_law, groups, int(scheme[1]))
            for each_law in (law, worst)
        )
        claims = [people.theorem_1(law_j, relation, cover=1 - worst_j[0])]
    bounds = {"examples": each, "classes": hers}
    facts = {"num_classes": num, "ways": ways, "scheme": scheme, "size": size, "fresh": fresh, "bounds": bounds}
    return laws[0], laws[1], claims, facts


# --- Blocks of people ---


def blocks(rng: np.random.Generator, relation: str) -> Built:
    """The person's block and another; an episode of each, or two of hers."""
    hers, others = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    slots = _class("", hers, hers + others)
    size = int(rng.integers(1, others + 1))
    scheme = ("coins", _coin(rng)) if rng.random() < 0.7 else ("draw", 1.0)
    laws, rho = [], people.reached(len(slots), hers, size)
    for pool in (slots, people_draws.without_person(slots)):
        pools = [pool, ("b0", "b1")]
        units = [
            people_draws.unit_law(str(i), [each], ("all", 0), ("draw", size))
            for i, each in enumerate(pools)
        ]
        laws.append(people_draws.drawn_units(units, scheme))
    if scheme[0] == "coins":
        claims = [people.theorem_2([1 - rho, rho], scheme[1], relation)]
    else:
        claims = [people.theorem_1([1 - rho / 2, rho / 2], relation)]
    return laws[0], laws[1], claims, {"scheme": scheme, "reached": rho, "num_blocks": 2}


def episodes_of_a_block(rng: np.random.Generator, relation: str) -> Built:
    """Two episodes of the person's block by coins, their examples disjoint or not."""
    hers, p = int(rng.integers(1, 3)), _coin(rng)
    slots, disjoint = _class("", hers, hers + 2), bool(rng.random() < 0.5)
    laws, of_r = [], [0.0] * 3
    for pool in (slots, people_draws.without_person(slots)):
        law: Law = {}
        for one in pool:
            rest = [name for name in pool if name != one] if disjoint else pool
            for two in rest:
                chance = 1 / (len(pool) * len(rest))
                units = [{("", frozenset({name})): 1.0} for name in (one, two)]
                for draw, weight in people_draws.drawn_units(units, ("coins", p)).items():
                    people_draws.added(law, draw, chance * weight)
                if pool is slots:
                    of_r[sum(name.startswith("x") for name in (one, two))] += chance
        laws.append(law)
    claims = [people.theorem_2(of_r, p, relation, cover=1.0)]
    claims += [people.theorem_m(people.poisson_binomial([p, p]), relation)]
    if not disjoint:
        rate = hers / len(slots)
        claims += _coin_claims([rate, rate], p, relation, fixed=False)
    return laws[0], laws[1], claims, {"p": p, "hers": hers, "slots": len(slots), "disjoint": disjoint}


# --- Examples clipped one by one ---


def examples_alone(rng: np.random.Generator, relation: str) -> Built:
    """Examples clipped one by one, by coins or some of all of them."""
    hers, others = int(rng.integers(1, 4)), int(rng.integers(0, 4))
    pool = _class("", hers, hers + others)
    by_coins = bool(rng.random() < 0.4)
    scheme = ("coins", _coin(rng)) if by_coins else ("draw", float(rng.integers(1, len(pool) + 1)))
    laws = [
        people_draws.drawn_units([{(name, frozenset({name})): 1.0} for name in each], scheme)
        for each in (pool, people_draws.without_person(pool))
    ]
    law = _law_of_j(laws[0])
    # Without her examples nobody takes their place where coins decide.
    alike = "zero_out" if by_coins and relation == "add_remove" else relation
    claims = [people.theorem_3(law, alike)]
    if by_coins:
        claims = [people.theorem_m(law, alike)]
    elif relation == "add_remove":
        claims = [people.removed_examples(law)]
    else:
        claims += [people.theorem_1(law, relation)]
    return laws[0], laws[1], claims, {"scheme": scheme, "hers": hers, "population": len(pool)}


FAMILIES: dict[str, Callable[[np.random.Generator, str], Built]] = {
    "coin_tasks": coin_tasks,
    "fixed_size_tasks": fixed_size_tasks,
    "classes_below_tasks": classes_below_tasks,
    "independent_episodes": independent_episodes,
    "grouped_classes": grouped_classes,
    "blocks": blocks,
    "episodes_of_a_block": episodes_of_a_block,
    "examples_alone": examples_alone,
}

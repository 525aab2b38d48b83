"""Random small designs in which a person is in many units, enumerated, and the claims.

Each family draws the numbers of a design, enumerates its draws with the person and
without her, and says what every theorem that covers it claims. `facts` describes the
design to whoever is to be asked for a bound of his own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from oracles import people, people_draws, people_tasks
from oracles.people import Claim
from oracles.people_draws import ALL, Law, Release
from oracles.people_tasks import Built, a_class, coin, coin_claims, emptied, law_of_j

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


# --- Classes in groups ---


def grouped_classes(rng: np.random.Generator, relation: str) -> Built:
    """Classes in groups, fixed or made afresh; the groups by coins or some of all."""
    num, ways = int(rng.integers(2, 6)), int(rng.integers(1, 3))
    hers, size, each = int(rng.integers(1, num + 1)), 2, 1
    scheme = ("coins", coin(rng))
    if rng.random() < 0.3:
        scheme = ("draw", float(rng.integers(1, num // ways + 1)))
    classes = [a_class(str(i), each if i < hers else 0, size) for i in range(num)]
    all_of = people_draws.partitions(num, ways)
    fresh = bool(rng.random() < 0.6)
    chosen = all_of if fresh else [all_of[rng.integers(len(all_of))]]
    laws = []
    for pool in (classes, emptied(classes)):
        drawn = [
            people_draws.drawn_units(
                [
                    people_draws.unit_law(
                        str(g), [pool[i] for i in g], ALL, ("draw", 1)
                    )
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
        exact = [
            people.theorem_a([(scheme[1], r) for r in rates], relation)
            for rates in held
        ]
        claims += [crude, people.scaled(*((1 / len(chosen), claim) for claim in exact))]
    else:
        law_j, worst_j = (
            people.without_replacement(each_law, groups, int(scheme[1]))
            for each_law in (law, worst)
        )
        claims = [people.theorem_1(law_j, relation, cover=1 - worst_j[0])]
    bounds = {"examples": each, "classes": hers}
    facts = {
        "num_classes": num,
        "ways": ways,
        "scheme": scheme,
        "size": size,
        "fresh": fresh,
        "bounds": bounds,
    }
    return laws[0], laws[1], claims, facts


# --- Blocks of people ---


def blocks(rng: np.random.Generator, relation: str) -> Built:
    """The person's block and another; an episode of each, or two of hers."""
    hers, others = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    slots = a_class("", hers, hers + others)
    size = int(rng.integers(1, others + 1))
    scheme = ("coins", coin(rng)) if rng.random() < 0.7 else ("draw", 1.0)
    laws, rho = [], people.reached(len(slots), hers, size)
    for pool in (slots, people_draws.without_person(slots)):
        pools = [pool, ("b0", "b1")]
        units = [
            people_draws.unit_law(str(i), [each], ALL, ("draw", size))
            for i, each in enumerate(pools)
        ]
        laws.append(people_draws.drawn_units(units, scheme))
    if scheme[0] == "coins":
        claims = [people.theorem_2([1 - rho, rho], scheme[1], relation)]
    else:
        claims = [people.theorem_1([1 - rho / 2, rho / 2], relation)]
    facts = {"scheme": scheme, "hers": hers, "slots": len(slots), "size": size}
    return laws[0], laws[1], claims, facts


def episodes_of_a_block(rng: np.random.Generator, relation: str) -> Built:
    """Two episodes of the person's block by coins, their examples disjoint or not."""
    hers, p = int(rng.integers(1, 3)), coin(rng)
    slots, disjoint = a_class("", hers, hers + 2), bool(rng.random() < 0.5)
    laws, of_r = [], [0.0] * 3
    for pool in (slots, people_draws.without_person(slots)):
        law: Law = {}
        for one in pool:
            rest = [name for name in pool if name != one] if disjoint else pool
            for two in rest:
                chance = 1 / (len(pool) * len(rest))
                units = [{("", (name,)): 1.0} for name in (one, two)]
                for draw, weight in people_draws.drawn_units(
                    units, ("coins", p)
                ).items():
                    people_draws.added(law, draw, chance * weight)
                if pool is slots:
                    of_r[sum(name.startswith("x") for name in (one, two))] += chance
        laws.append(law)
    claims = [people.theorem_2(of_r, p, relation, cover=1.0)]
    claims += [people.theorem_m(people.poisson_binomial([p, p]), relation)]
    if not disjoint:
        rate = hers / len(slots)
        claims += coin_claims([rate, rate], p, relation, fixed=False)
    return (
        laws[0],
        laws[1],
        claims,
        {"p": p, "hers": hers, "slots": len(slots), "disjoint": disjoint},
    )


# --- Examples clipped one by one ---


def examples_alone(rng: np.random.Generator, relation: str) -> Built:
    """Examples clipped one by one, by coins or some of all of them."""
    hers, others = int(rng.integers(1, 4)), int(rng.integers(0, 4))
    pool = a_class("", hers, hers + others)
    by_coins = bool(rng.random() < 0.4)
    scheme = (
        ("coins", coin(rng))
        if by_coins
        else ("draw", float(rng.integers(1, len(pool) + 1)))
    )
    laws = [
        people_draws.drawn_units([{(name, (name,)): 1.0} for name in each], scheme)
        for each in (pool, people_draws.without_person(pool))
    ]
    law = law_of_j(laws[0])
    # Without her examples nobody takes their place where coins decide.
    alike = "zero_out" if by_coins and relation == "add_remove" else relation
    claims = [people.theorem_3(law, alike)]
    if by_coins:
        claims = [people.theorem_m(law, alike)]
    elif relation == "add_remove":
        claims = [people.removed_examples(law)]
    else:
        claims += [people.theorem_1(law, relation)]
    return (
        laws[0],
        laws[1],
        claims,
        {"scheme": scheme, "hers": hers, "population": len(pool)},
    )


def examples_in_classes(rng: np.random.Generator, relation: str) -> Built:
    """Classes drawn, which is seen; in each, examples clipped one by one."""
    num, each, size = 2, int(rng.integers(1, 3)), int(rng.integers(2, 4))
    hers = int(rng.integers(1, num + 1))
    above = ("coins", coin(rng)) if rng.random() < 0.5 else ("draw", 1.0)
    by_coins = bool(rng.random() < 0.5)
    shots = int(rng.integers(1, size + 1))
    below = ("coins", coin(rng)) if by_coins else ("draw", float(shots))
    classes = [a_class(str(i), each if i < hers else 0, size) for i in range(num)]
    seen = people_draws.subsets(range(num), above)
    laws = []
    for pool in (classes, emptied(classes)):
        units = [
            people_draws.drawn_units([{(n, (n,)): 1.0} for n in names], below)
            for names in pool
        ]
        laws.append(
            people_draws.averaged(
                [(w, people_draws.summed([units[i] for i in d])) for w, d in seen]
            )
        )
    alike = "zero_out" if by_coins and relation == "add_remove" else relation
    always = [0.0] * each + [1.0]
    parts = []
    for weight, drawn in seen:
        number = sum(i < hers for i in drawn)
        if not by_coins:
            law = [1.0]
            for _ in range(number):
                one = people.without_replacement(always, size, shots)
                law = [float(w) for w in np.convolve(law, one)]
            claim = people.theorem_1(law, relation)
            if relation == "add_remove":
                claim = people.removed_examples(law)
        else:
            law = people.poisson_binomial([below[1]] * (number * each))
            claim = people.theorem_m(law, alike)
        if number:
            parts.append((weight, claim))
    facts = {"above": above, "below": below, "num_classes": num, "size": size}
    bounds = {"examples": each, "classes": hers}
    return laws[0], laws[1], [people.scaled(*parts)], facts | {"bounds": bounds}


FAMILIES: dict[str, Callable[[np.random.Generator, str], Built]] = {
    "coin_tasks": people_tasks.coin_tasks,
    "fixed_size_tasks": people_tasks.fixed_size_tasks,
    "classes_below_tasks": people_tasks.classes_below_tasks,
    "independent_episodes": people_tasks.independent_episodes,
    "grouped_classes": grouped_classes,
    "blocks": blocks,
    "episodes_of_a_block": episodes_of_a_block,
    "examples_alone": examples_alone,
    "examples_in_classes": examples_in_classes,
}

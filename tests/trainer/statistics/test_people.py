"""Private statistics: one unit changes sums by the sensitivity at most.

Small tables, every example, class or person, every order of pairs: some coupling of the
orders with and without the unit must change no sum by more than the stated sensitivity.
"""

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from jaxdp_episodic import PersonBounds
from jaxdp_episodic.trainer.config.training_parts import StartConfig
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.statistics.mixed import MixedModel
from jaxdp_episodic.trainer.statistics.plda import COUNTED, Start
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics
from jaxdp_episodic.trainer.statistics.terms import PRODUCT_STEPS

RNG = np.random.default_rng(0)
BOUNDS = PersonBounds(classes=2, examples=2)
# For each unit the classes of its examples. Two classes have four and three: one person
# has two in one class, one has one in each.
PLACES = {
    "person": {0: [0, 0, 1], 1: [0, 1], 2: [1], 3: [0]},
    "example": {unit: [unit % 2] for unit in range(7)},
    "class": {0: [0] * 4, 1: [1] * 3, 2: [2]},
}
SLOTS = 4
# The squared sensitivities of a sum over examples, and of one over pairs.
SQUARES = {"zero_out": (1, 1), "add_remove": (1, 2), "replace_one": (2, 2)}
LEARNED = {
    "plda": Start(
        np.float32([0, 0.2, 0]), np.float32(4), np.diag(np.float32([1, 2, 3])), None
    ),
    "mixed": MixedModel(powers=1)
    .initial(3)
    ._replace(coefficients=np.float32([0.1, 0.3, 0, 0])),
}


def table(people):
    """The table of ``{person: [(class, features and target), ...]}``."""
    rows = [(c, p, *x) for p, own in people.items() for c, x in own]
    classes, owners, *columns = map(np.array, zip(*rows, strict=True))
    features, targets = np.stack(columns[:-1], axis=1), columns[-1]
    return ExampleTable.from_records(
        np.float32(features), targets, units={"class": classes}, owners=owners
    )


def content(places=PLACES["person"]):
    return {
        p: [(c, RNG.normal(size=4).clip(-1, 1)) for c in own]
        for p, own in places.items()
    }


def alike(people):
    """Each unit's rows are equal, so that they add up."""
    return {p: [(c, own[0][1]) for c, _ in own] for p, own in people.items()}


def statistics(
    people,
    kind="plda",
    pairs="class",
    relation="zero_out",
    *,
    unit="person",
    bounds=BOUNDS,
):
    return PrivateStatistics(
        table(people),
        StartConfig(kind=kind, pairs=pairs, powers=1, num_people=SLOTS),
        privacy_unit=unit,
        neighboring_relation=relation,
        slots=SLOTS,
        people=bounds,
    )


class Order:
    """Replaces a generator: yields given orders in turn."""

    def __init__(self, order):
        self.order = order

    def permutation(self, number):
        return np.array(self.order[:number])

    def random(self, number):
        return np.concatenate(self.order)[:number]


def sums(own, name):
    """Every sum of a statistic, by its bytes, with its number of orders."""
    state = LEARNED["plda" if own._mixed is None else "mixed"]
    if name != "pairs":
        total = own._total(name, state, own._units.examples())
        return {total.tobytes(): (total, 1)}
    who, pairings = own._units, Counter()
    if who.couples:
        orders = itertools.permutations(range(who.slots or who.number))
    else:
        slots = who.sizes if who.slots is None else [who.slots] * len(who.sizes)
        each = [list(itertools.permutations(range(size))) for size in slots]
        orders = itertools.product(*each)
    terms_of = {}
    for order in orders:
        terms = own._terms("pairs", Order(order))
        both = np.sort(np.stack(terms.rows), axis=0)
        key = both[:, np.lexsort(both)].tobytes()  # the pairs, regardless of order
        pairings[key] += 1
        terms_of[key] = terms
    found = {}
    for key, terms in terms_of.items():
        total = own._total("pairs", state, terms)
        before = found.get(total.tobytes(), (total, 0))[1]
        found[total.tobytes()] = total, before + pairings[key]
    return found


def is_coupled(ones, others, most):
    """Whether orders can be matched so that matched sums are within the sensitivity."""
    totals = [sum(n for _, n in side.values()) for side in (ones, others)]
    whole = math.lcm(*totals)
    numbers = [
        [n * whole // total for _, n in side.values()]
        for side, total in zip((ones, others), totals, strict=True)
    ]
    unit = math.gcd(*itertools.chain(*numbers))
    rows, columns = (
        [
            x
            for (x, _), n in zip(side.values(), each, strict=True)
            for _ in range(n // unit)
        ]
        for side, each in zip((ones, others), numbers, strict=True)
    )
    near = [[distance(a, b) <= most * PRODUCT_STEPS**2 for b in columns] for a in rows]
    return bool((maximum_bipartite_matching(csr_matrix(near)) >= 0).all())


def distance(one, other):
    """The squared distance of two sums, without overflow."""
    return sum(int(d) ** 2 for d in (one - other).ravel())


def neighbours(people, person, relation, instead=()):
    """Neighbouring tables: without a unit, or with its content replaced."""
    if relation != "replace_one":
        return [{p: own for p, own in people.items() if p != person}]
    turned = [(c, np.roll(x, 1) * [1, 1, 1, -1]) for c, x in people[person]]
    return [{**people, person: own} for own in instead or [turned]]


def holds(people, *asked, relation, names, least=1.0, instead=(), **more):
    """Whether no unit changes a sum by more than the stated sensitivity.

    ``least``: a fraction of the squared sensitivity to test instead.
    """
    own = statistics(people, *asked, relation, **more)
    squares = SQUARES[relation]
    if more.get("unit") == "class" and relation == "add_remove":
        squares = 1, 1  # other pairs stay as they are
    all_sums = {name: sums(own, name) for name in names}
    for person in people:
        for other in neighbours(people, person, relation, instead):
            beside = statistics(other, *asked, relation, **more)
            for name in names:
                most = least * squares[name == "pairs"]
                if not is_coupled(all_sums[name], sums(beside, name), most):
                    return False
    return True


@pytest.mark.few(12)
@pytest.mark.parametrize("relation", SQUARES)
@pytest.mark.parametrize(
    ("unit", "pairs"), [("person", "people"), *((unit, "class") for unit in PLACES)]
)
@pytest.mark.parametrize("kind", ["plda", "mixed"])
def test_no_unit_changes_a_sum_by_more_than_the_sensitivity(
    kind, unit, pairs, relation, monkeypatch
):
    """Also if rows are read two at a time: all of a person's together."""
    monkeypatch.setattr("jaxdp_episodic.trainer.statistics.statistics._ROWS", 2)
    names = ("mean", "all", "pairs")[kind == "mixed" :]
    people = content(PLACES[unit])
    for one in (people, alike(people)):
        assert holds(one, kind, pairs, relation=relation, names=names, unit=unit)


@pytest.mark.few(6)
@pytest.mark.parametrize("relation", SQUARES)
@pytest.mark.parametrize(
    ("names", "pairs"), [(("mean", "all", "pairs"), "class"), (("pairs",), "people")]
)
def test_some_person_nearly_attains_the_sensitivity(names, pairs, relation):
    """The first of three people in both classes, far from the other two."""
    rows = np.array([[0, 0, 1, 0], [1, 0.01, 0, 0], [1, -0.01, 0, 0]])
    people = {p: [(0, rows[p]), (1, rows[p])] for p in range(3)}
    others = np.array([1, 0.03, 0, 0]), -rows[0]
    more = {
        "relation": relation,
        "bounds": PersonBounds(classes=2, examples=1),
        "instead": [[(0, row), (1, row)] for row in others],
    }
    for name in names:
        assert holds(people, "plda", pairs, names=[name], **more)
        assert not holds(people, "plda", pairs, names=[name], least=0.99, **more)


def test_other_pairs_that_take_a_persons_place_keep_their_weights():
    """Weights by people's own counts would fail here under add_remove."""
    rows = [(1, 0.01, 0, 0), (1, -0.01, 0, 0)]
    people = {1 + i: [(i // 2, np.array(rows[i % 2]))] for i in range(6)}
    people[0] = [(c, np.eye(4)[2]) for c in range(3)]
    assert holds(people, "plda", "class", relation="add_remove", names=["pairs"])


def test_couples_give_exactly_the_possible_pairs():
    """In three classes the first couple has 2, 1, 1 and 1, 1, 3 examples."""
    numbers = {0: (2, 1, 1), 1: (1, 1, 3), 2: (1, 0, 1), 3: (1, 1, 1)}
    places = {p: np.repeat(range(3), n).tolist() for p, n in numbers.items()}
    own = statistics(content(places), pairs="people", relation="replace_one")
    (first, second), shares, groups = own._terms("pairs", Order([1, 0, 3, 2]))
    owners, classes = own.data.owners.codes, own.data.class_places
    couples = sorted(map(tuple, np.sort([owners[first], owners[second]], 0).T))
    assert couples == 3 * [(0, 1)] + 2 * [(2, 3)]
    np.testing.assert_array_equal(classes[first], classes[second])
    assert len({*first.tolist(), *second.tolist()}) == 10
    assert shares.tolist() == [3] * 3 + [2] * 2
    assert np.ptp(groups[:3]) == np.ptp(groups[3:]) == 0
    # People are counted, not their examples.
    assert own._total("mean", None, own._units.examples())[-1] == 4 * COUNTED


COUPLES = {"config": StartConfig(pairs="people")}
ZERO_OUT = {"neighboring_relation": "zero_out"}
NOBODYS = dataclasses.replace(table(content()), owners=None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"people": None}, "people must bound the examples and classes .* got None"),
        ({"people": PersonBounds(examples=1, classes=2)}, "at least the 3 .* got 2"),
        (ZERO_OUT, "population of .* must .* 4 examples in a class"),
        (ZERO_OUT | COUPLES, "start.num_people must .* the 4 people"),
        (COUPLES | {"privacy_unit": "example"}, "is for privacy_unit='person'"),
        ({"data": NOBODYS}, "data must have owners"),
    ],
)
def test_bad_people(change, complaint):
    arguments = {
        "data": table(content()),
        "config": StartConfig(),
        "privacy_unit": "person",
        "neighboring_relation": "add_remove",
        "people": BOUNDS,
        "slots": 3,
        **change,
    }
    with pytest.raises(ValueError, match=complaint):
        PrivateStatistics(**arguments)

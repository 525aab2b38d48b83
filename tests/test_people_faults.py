"""Planted faults about people: what is tempting to claim, and is exceeded.

Each test makes a claim that a theorem does not make, and finds contributions that
exceed it; where there is one, the sound claim beside it holds.
"""

from __future__ import annotations

import numpy as np
import pytest

from oracles import mixtures, people, people_draws, people_epochs

ROUNDING = 1 + 1e-6

HERS, OTHER, THIRD = ((name,) for name in ("x", "o", "z"))


def _unit(label: str, rate: float) -> people_draws.ContentLaw:
    """A unit that holds the person with this chance, and else one other content."""
    return {(label, HERS): rate, (label, OTHER): 1 - rate}


def _units_drawn(rates, scheme) -> people_draws.Law:
    units = [_unit(str(i), rate) for i, rate in enumerate(rates)]
    return people_draws.drawn_units(units, scheme)


def _found(law, relation: str, s: float, epsilon: float, without=None):
    """The largest divergence found at one epsilon, forward and backward."""
    step = people_draws.release(law, relation, without)
    rng, g = np.random.default_rng(0), np.exp([epsilon])
    found = people_draws.attained(
        rng, step, s, g, aims=g, lattice=people_draws.QUARTERS
    )
    return found[0][0], found[1][0]


def _claimed(claim: people.Claim, s: float, epsilon: float):
    forward, backward = people.profiles(claim, s, np.exp([epsilon]))
    return forward[0], backward[0]


def test_mixture_of_the_number_drawn_where_others_react():
    law = _units_drawn([0.1], people_draws.ALL)
    found = _found(law, "zero_out", 1.0, 1.0)
    claim = _claimed(people.theorem_m([0.9, 0.1], "zero_out"), 1.0, 1.0)
    assert found == pytest.approx([7.72e-3, 2.07e-4], rel=2e-3)
    assert claim == pytest.approx([2.07e-4, 0.0], rel=2e-3)
    # Nobody reacts where coins draw what is clipped, or it surely holds her.
    sure = _units_drawn([1.0, 1.0], ("coins", 0.3))
    claim = _claimed(
        people.theorem_m(people.poisson_binomial([0.3, 0.3]), "zero_out"), 1.0, 1.0
    )
    assert _found(sure, "zero_out", 1.0, 1.0) == pytest.approx(claim, rel=1e-6)


def test_mixture_where_examples_are_exchanged():
    """Of three examples two are drawn: who takes her place shows that she is not."""
    law = people_draws.drawn_units([{(n, (n,)): 1.0} for n in "xyz"], ("draw", 2))
    found = _found(law, "zero_out", 1.0, 1.5)
    claim = _claimed(people.theorem_m([1 / 3, 2 / 3], "zero_out"), 1.0, 1.5)
    assert found[0] > 1.5 * claim[0]
    assert found[1] > 1.5 * claim[1]


def test_worst_case_of_opposite_signs():
    law, s, epsilon = _units_drawn([0.1, 0.1], people_draws.ALL), 3.0, 3.0
    step = people_draws.release(law, "zero_out")
    opposite = np.where(step.held, 1.0, -1.0)
    planted = people_draws.divergences(step, opposite, s, np.exp([epsilon]))[0][0]
    assert planted == pytest.approx(0.00996, rel=1e-3)
    assert _found(law, "zero_out", s, epsilon)[0] > 10 * planted


def test_smaller_backward_row_where_drawn_classes_show_her():
    """One task draws one of two classes; she is one of two examples of the first."""
    law, without = (
        people_draws.drawn_units(
            [people_draws.unit_law("t", classes, ("draw", 1), ("draw", 1))],
            people_draws.ALL,
        )
        for classes in ([("x", "a"), ("b",)], [("a",), ("b",)])
    )
    found = _found(law, "add_remove", 2.0, 0.4, without)
    planted, sound = (
        people.theorem_2([0.75, 0.25], 1.0, "add_remove", fixed_classes=fixed)
        for fixed in (True, False)
    )
    assert found[1] == pytest.approx(0.11501, rel=1e-4)
    assert _claimed(planted, 2.0, 0.4)[1] == 0.0
    assert max(found) <= ROUNDING * _claimed(sound, 2.0, 0.4)[1]


def test_law_given_that_she_is_not_drawn():
    """Without her any of two units is drawn; given J = 0 more often the other one."""
    law = _units_drawn([0.5, 0.0], ("draw", 1))
    without = _units_drawn([0.0, 0.0], ("draw", 1))
    of_j = [0.75, 0.25]
    found = _found(law, "add_remove", 1.0, 0.25, without)
    planted = _claimed(people.removed_examples(of_j), 1.0, 0.25)
    assert found[1] > 5 * planted[1]
    sound = _claimed(people.theorem_1(of_j, "add_remove"), 1.0, 0.25)
    assert max(found) <= ROUNDING * sound[1]


def test_chance_in_blocks_whose_draw_looks_at_content():
    """She is taken with chance 0.1; else the other one that her content names."""
    p, other = 0.5, {}
    law = {(): 1 - p, (("", HERS),): 0.1 * p, (("", OTHER),): 0.9 * p}
    other = {(): 1 - p, (("", ("x'",)),): 0.1 * p, (("", THIRD),): 0.9 * p}
    found = _found(law, "add_remove", 1.0, 1.0, other)
    planted, sound = (
        people.theorem_2([1 - r, r], p, "replace_one") for r in (0.1, 1.0)
    )
    assert _claimed(planted, 1.0, 1.0)[0] == pytest.approx(1.16e-4, rel=5e-3)
    assert found[0] == pytest.approx(0.0934, rel=1e-3)
    assert found[0] == pytest.approx(_claimed(sound, 1.0, 1.0)[0], rel=1e-6)


def _one_of_two() -> people_draws.Law:
    """Two disjoint episodes, of which always exactly one holds the person."""
    return {(("0", HERS), ("1", OTHER)): 0.5, (("0", OTHER), ("1", HERS)): 0.5}


def test_independence_of_disjoint_episodes():
    found = _found(_one_of_two(), "zero_out", 2.0, 0.1)
    claims = [
        _claimed(claim, 2.0, 0.1)
        for claim in (
            people.theorem_a_equal(2, 1.0, 0.5, "zero_out"),
            people.theorem_2(people.poisson_binomial([0.5, 0.5]), 1.0, "zero_out"),
            people.theorem_2([0.0, 1.0], 1.0, "zero_out", cover=1.0),
        )
    ]
    assert found == pytest.approx([0.6666, 0.6666], rel=1e-4)
    assert [c[0] for c in claims] == pytest.approx([0.5714, 0.5713, 0.6666], abs=1e-4)


def test_independence_of_disjoint_episodes_of_an_epoch():
    """Noise split between two episodes, each of which holds her half of the time."""
    s, g = 4.0, np.exp([0.1])
    losses = 0.05 * np.arange(1 + 20 * 12)

    def row(ratio):  # the library's, of an epoch of one step at noise split in two
        return people.profiles(
            people.theorem_1([0.5, 0.5], "replace_one"), s * 2**0.5, ratio
        )[0]

    half = row(np.exp(losses))
    pair = np.concatenate([(1 - np.exp(-losses) * (1 - half))[:0:-1], half])
    planted = people.chords(pair, 0.05, 2, np.log(g))[0]
    design = people_epochs.epoch(2, {(True, False): 0.5, (False, True): 0.5})
    found = _found(_one_of_two(), "zero_out", s, 0.1)[0]
    assert found > 1.2 * planted
    # In two steps as well.
    axis = people_epochs.grid(design, s, 0.1)
    up = np.ones((design.num_columns, 2, people_epochs.REGIONS))
    up[1::2] = 0.0
    zeroed = people_epochs.other_world(up, "zero_out", up)
    assert people_epochs.masses(design, (up, zeroed), s, g, axis)[0][0] > 1.2 * planted


def test_average_of_a_partition_that_is_kept():
    """Two of four classes, in one group or in both; 100 steps of all groups."""
    s, steps, epsilons = 0.1, 100, np.array([4.0, 8.0])
    law = people.average_groups(4, 2, 2, 1.0)
    assert law == pytest.approx([0.0, 1 / 3, 2 / 3])
    planted = people.composed(
        people.theorem_2(law, 1.0, "zero_out"), s, steps, epsilons, forward=True
    )
    # Kept, the group that holds her contributes in every step: a shift of 10 s or 20 s.
    kept = sum(
        weight * mixtures.gaussian(k * s * steps**0.5, np.exp(epsilons))
        for k, weight in enumerate(law)
        if k
    )
    assert planted == pytest.approx([0.0339, 2.91e-5], rel=5e-3)
    assert kept == pytest.approx([0.0567, 3.30e-4], rel=5e-3)
    worst = people.theorem_2(people.even_groups(2, 2, 1.0), 1.0, "zero_out")
    sound = people.composed(worst, s, steps, epsilons, forward=True)
    assert np.all(kept <= sound)


def _greedy(units: list[str], *, cap: int, null: str = "") -> list[str]:
    """Accept a unit unless it holds somebody who was accepted `cap` times."""
    used: dict[str, int] = {}
    kept = []
    for unit in units:
        if null and null in unit:
            continue
        if all(used.get(person, 0) < cap for person in unit):
            kept.append(unit)
            used |= {person: used.get(person, 0) + 1 for person in unit}
    return kept


def test_greedy_caps():
    """Without x every later decision flips: four contributions of four change."""
    units = ["xa", "ab", "bc", "cd"]
    worlds = [
        {
            tuple(
                (u, HERS if "x" in u else OTHER) for u in _greedy(units, cap=1, null=n)
            ): 1.0
        }
        for n in ("", "x")
    ]
    found = _found(worlds[0], "add_remove", 1.0, 1.0, worlds[1])
    claim = _claimed(people.theorem_3([0.0, 1.0], "zero_out"), 1.0, 1.0)
    assert found[0] == pytest.approx(mixtures.gaussian(4.0, np.exp(1.0)))
    assert found[0] > 5 * claim[0]


def test_total_number_of_examples():
    """Four in one class of 20, two drawn, or one in each of four classes."""
    in_one, in_four = people.reached(20, 4, 2), [people.reached(20, 1, 2)] * 4
    for rates, p, s, epsilon, planted in (
        ([in_one], 1.0, 4.0, 0.5, people.poisson_binomial(in_four)),
        (in_four, 0.5, 0.5, 0.5, [1 - in_one, in_one]),
    ):
        claim = _claimed(people.theorem_2(planted, p, "zero_out"), s, epsilon)
        found = _found(_units_drawn(rates, ("coins", p)), "zero_out", s, epsilon)
        assert found[0] > 1.05 * claim[0]


@pytest.mark.parametrize(
    ("kept", "other", "relation", "shift", "s"),
    [
        # She has an example in each of two classes and keeps one, by its content.
        ((HERS, OTHER), (OTHER, THIRD), "replace_one", 4, 0.25),
        ((HERS, OTHER), (OTHER, None), "zero_out", 3, 0.5),
        # She is dropped for having two classes; nulls are not counted.
        ((OTHER, OTHER), (None, None), "zero_out", 2, 0.5),
    ],
)
def test_truncation_that_looks_at_contents(kept, other, relation, shift, s):
    worlds = [
        {tuple((str(i), c) for i, c in enumerate(held) if c is not None): 1.0}
        for held in (kept, other)
    ]
    found = _found(worlds[0], "add_remove", s, 1.0, worlds[1])
    claim = _claimed(people.theorem_3([0.0, 1.0], relation), s, 1.0)
    exact = mixtures.gaussian(shift * s, np.exp(1.0))
    assert found[0] == pytest.approx(exact, rel=1e-6)
    assert found[0] > 15 * claim[0]


def test_one_coin_for_what_is_drawn_at_two_levels():
    """A task by a coin, which is seen; in it her class and another one by coins."""
    p, above = 0.5, 0.3
    below = _units_drawn([1.0], ("coins", p))
    seen = people_draws.summed([below, {(("o", OTHER),): 1.0}])
    law = people_draws.averaged([(above, seen), (1 - above, {(): 1.0})])
    s, epsilon = 3.0, 0.5
    found = _found(law, "zero_out", s, epsilon)
    planted = people.theorem_a_equal(1, p * above, 1.0, "zero_out")
    sound = people.theorem_a_equal(1, p, 1.0, "zero_out")
    assert found[0] > 1.02 * _claimed(planted, s, epsilon)[0]
    assert found[0] <= ROUNDING * above * _claimed(sound, s, epsilon)[0]

"""Distributions of the clip units that hold a person, against enumerated draws."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.accountant.describe import people_laws
from jaxdp_episodic.accountant.describe.people_laws import (
    Stage,
    fewer_binomials,
    log_binomial_law,
    log_drawn,
    log_held,
    log_reached_mean,
    log_reached_worst,
    log_unseen_groups,
    log_visible,
    mixed,
    probability_of_holding,
    sums_of,
    tails_moved_up,
)


def coins(bound: float, rate: float) -> Stage:
    return Stage(bound, rate, 0, 0)


def fixed(bound: float, size: float, group: float) -> Stage:
    return Stage(bound, 0, size, group)


def test_chances_of_the_reference_designs() -> None:
    """Reference: exact rational arithmetic, 16 digits."""
    one_of_two = fixed(1, 2, 20)
    assert probability_of_holding([fixed(4, 2, 20)]) == pytest.approx(
        0.3684210526315789, rel=1e-14
    )
    assert probability_of_holding([fixed(12, 5, 20), one_of_two]) == pytest.approx(
        0.26714240970072245, rel=1e-14
    )
    assert probability_of_holding([coins(5, 1.0), one_of_two]) == pytest.approx(
        1 - 0.9**5, rel=1e-14
    )
    assert probability_of_holding([]) == 1
    assert probability_of_holding([fixed(19, 2, 20)]) == 1  # only one other unit
    assert (
        probability_of_holding([fixed(30, 2, 20)]) == 1
    )  # the bound exceeds the class
    assert probability_of_holding([coins(3, 0.0), one_of_two]) == 0
    assert probability_of_holding([fixed(1, 1, 1e9)]) == pytest.approx(1e-9, rel=1e-12)


@pytest.mark.parametrize(("group", "bound", "size"), [(6, 2, 3), (5, 4, 2), (4, 4, 3)])
def test_draws_without_replacement(group: int, bound: int, size: int) -> None:
    sets = list(itertools.combinations(range(group), size))
    counts = Counter(sum(unit < bound for unit in drawn) for drawn in sets)
    law = np.exp(log_drawn(fixed(bound, size, group)))
    expected = [counts[j] / len(sets) for j in range(len(law))]
    np.testing.assert_allclose(law, expected, atol=1e-15)


def test_units_that_are_drawn_and_hold_her() -> None:
    """3 of 10 units; 4 can hold the person, each with probability 1/2."""
    law = np.exp(log_held(log_drawn(fixed(4, 3, 10)), 0.5))
    expected = [0.49583333333333335, 0.4125, 0.0875, 0.0041666666666666675]
    np.testing.assert_allclose(law, expected, rtol=1e-13)


def hits_by_enumeration(
    classes: int, ways: int, bound: int, chance: float
) -> np.ndarray:
    """The distribution of groups that hold a person, over all partitions and draws."""
    groups = classes // ways
    law = np.zeros(groups + 1)
    orders = list(itertools.permutations(range(classes)))
    for order in orders:
        place = {unit: where // ways for where, unit in enumerate(order)}
        for shown in itertools.product((0, 1), repeat=bound):
            hit = {place[unit] for unit in range(bound) if shown[unit]}
            hit = {group for group in hit if group < groups}
            weight = chance ** sum(shown) * (1 - chance) ** (bound - sum(shown))
            law[len(hit)] += weight / len(orders)
    return law


@pytest.mark.parametrize(
    ("classes", "ways", "bound"), [(5, 2, 3), (6, 3, 6), (5, 1, 2)]
)
def test_averages_over_all_partitions(classes: int, ways: int, bound: int) -> None:
    mean = np.exp(log_reached_mean(classes, ways, bound, 0.3))
    expected = hits_by_enumeration(classes, ways, bound, 0.3)
    np.testing.assert_allclose(mean[: len(expected)], expected, atol=1e-14)


@pytest.mark.parametrize(
    ("classes", "ways", "bound", "chance", "rate"),
    [
        (5, 2, 3, 0.3, 0.6),
        (6, 3, 4, 0.2, 1.0),
        (6, 2, 1, 1.0, 0.4),
        (7, 1, 2, 0.3, 0.6),
        (4, 2, 4, 0.5, 0),
    ],
)
def test_groups_that_are_not_seen_without_her(
    classes: int, ways: int, bound: int, chance: float, rate: float
) -> None:
    """Over all partitions, and all sets of groups that are drawn without the person."""
    groups = classes // ways
    law = np.zeros((min(bound, groups) + 1, bound + 1))
    orders = list(itertools.permutations(range(classes)))
    for order in orders:
        held = Counter(
            where // ways for where, unit in enumerate(order) if unit < bound
        )
        numbers = [a for group, a in held.items() if group < groups]
        for unseen in itertools.product((0, 1), repeat=len(numbers)):
            weight = 1 / len(orders)
            for a, stays in zip(numbers, unseen, strict=True):
                seen = rate * (1 - chance) ** a
                weight *= 1 - seen if stays else seen
            kept = [a for a, stays in zip(numbers, unseen, strict=True) if stays]
            law[len(kept), sum(kept)] += weight
    found = np.exp(log_unseen_groups(classes, ways, bound, chance, rate))
    np.testing.assert_allclose(found, law, atol=1e-14)


def tails(number: float, log_none: float) -> np.ndarray:
    """Probabilities of j or more of a binomial distribution."""
    rate = -math.expm1(-log_none / max(number, 1))
    return stats.binom.sf(np.arange(-1, 60), number, rate)


@pytest.mark.parametrize("most", [20, 100, 1e9])
def test_merged_binomial_laws_are_larger_and_no_weight_is_lost(
    most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every distribution is matched to a larger one with the same weight."""
    monkeypatch.setattr(people_laws, "_MOST_TERMS", most)
    monkeypatch.setattr(people_laws, "_MOST_LAWS", most)
    rng = np.random.default_rng(0)
    number = np.append(rng.integers(1, 40, 60), 0)
    none = number * rng.gamma(2.0, 0.1, 61)
    weight = rng.dirichlet(np.ones(61))
    count, merged_none, log_weight = fewer_binomials(number, none, np.log(weight))
    kept = np.exp(log_weight)
    assert kept.sum() == pytest.approx(1.0, rel=1e-14)
    assert most > 1e3 or len(count) < 30
    for level in np.linspace(0, none.max(), 30):
        for least in (0, 10, 30):
            # Every upper set has at least as much weight after merging.
            before = weight[(number >= least) & (none >= level)].sum()
            after = kept[(count >= least) & (merged_none >= level)].sum()
            assert after >= before - 1e-14
    if most > 1e3:
        assert kept @ count == pytest.approx(weight @ number)
    larger = tails(30.0, 2.0)
    assert np.all(tails(20.0, 2.0) <= larger) and np.all(tails(30.0, 1.9) <= larger)


def test_reference_values_of_partitions() -> None:
    """23 classes in episodes of 5; 12 hold the person, each with probability 1/10."""
    worst = np.exp(log_reached_worst(4, 5, 12, 0.1))
    mean = np.exp(log_reached_mean(23, 5, 12, 0.1))
    known = [
        [
            0.282429536481,
            0.419963810076,
            0.234177350886,
            0.058035722076,
            0.005393580481,
        ],
        [
            0.33432463129947204,
            0.4297015602740744,
            0.19611848161288878,
            0.03737131163021421,
            0.0024840151833504793,
        ],
    ]
    np.testing.assert_allclose([worst, mean], known, rtol=1e-12)


@pytest.mark.parametrize("bound", [1, 2, 4, 5])
def test_the_even_partition_is_the_worst(bound: int) -> None:
    worst = np.cumsum(np.exp(log_reached_worst(2, 3, bound, 0.4))[::-1])[::-1]
    for first in range(max(0, bound - 3), min(bound, 3) + 1):
        chances = [1 - 0.6**number for number in (first, bound - first)]
        one, other = ([1 - p, p] for p in chances)
        law = np.convolve(one, other)
        assert np.all(np.cumsum(law[::-1])[::-1] <= worst[: len(law)] + 1e-14)


def test_each_class_has_the_law_of_independent_groups() -> None:
    mean = log_reached_mean(964, 5, 964, 0.1)
    independent = log_binomial_law(192, 1 - 0.9**5)
    np.testing.assert_allclose(mean, independent, atol=1e-9)
    np.testing.assert_allclose(
        log_reached_worst(192, 5, 964, 0.1), independent, atol=1e-9
    )


def test_visible_levels_are_compound_laws() -> None:
    stages = [fixed(2, 2, 5), coins(3, 0.25)]
    numbers, masses = log_visible(stages)
    expected = np.zeros(7)
    for drawn, weight in enumerate((3 / 10, 6 / 10, 1 / 10)):
        for j in range(3 * drawn + 1):
            binomial = math.comb(3 * drawn, j) * 0.25**j * 0.75 ** (3 * drawn - j)
            expected[j] += weight * binomial
    np.testing.assert_allclose(numbers, np.arange(7))
    np.testing.assert_allclose(np.exp(masses), expected, rtol=1e-13)
    nothing = log_visible([])
    assert nothing[0] == [1] and nothing[1] == [0]


def test_sums_of_drawn_numbers() -> None:
    one = np.log([0.5, 0.25, 0.25])
    laws = [np.exp(law) for law in sums_of(one, np.array([0.0, 2.0]))]
    np.testing.assert_allclose(laws[0], [1.0])
    np.testing.assert_allclose(laws[1], np.convolve(np.exp(one), np.exp(one)))
    both = np.exp(mixed([np.log(laws[0]), np.log(laws[1])], np.log([0.5, 0.5])))
    np.testing.assert_allclose(both.sum(), 1.0)


@pytest.mark.parametrize(
    ("number", "rate"), [(192, 0.975), (5000, 0.3), (1000, 1e-6), (3, 0.5), (7, 1.0)]
)
def test_tails_are_moved_upwards_only(number: int, rate: float) -> None:
    law = log_binomial_law(number, rate)
    values, masses = tails_moved_up(law)
    assert np.all(np.diff(values) > 0) and len(values) < 700
    np.testing.assert_allclose(np.exp(masses).sum(), 1.0, rtol=1e-12)
    # At least the distribution in stochastic order, and close to it.
    tail = np.cumsum(np.exp(law)[::-1])[::-1]
    kept = np.array([np.exp(masses[values >= k]).sum() for k in range(number + 1)])
    assert np.all(kept >= tail * (1 - 1e-11))
    assert np.all(kept <= tail * (1 + 1e-12) + 2e-17)

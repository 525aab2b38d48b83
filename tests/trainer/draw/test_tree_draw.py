"""Draws below many units at once: all algorithms have the same distribution."""

import itertools

import numpy as np
import pytest

from jaxdp_episodic.trainer.draw import tree_draw
from oracles.draws import Tally, false_alarm, outcome_tally

FALSE_ALARMS = 1e-6
# Sizes at which each of the three algorithms is chosen.
WAYS = {
    "one unit of many children": [1_000],
    "few units of many children": [100_000, 3, 0, 200_000],
    "many units, few of many": [30] * 400 + [2, 0, 1],
    "many units, most of few": [4, 0, 1, 3, 5] * 60,
    "nobody": [0, 0, 0],
    "no unit": [],
}


def lists(drawn, number):
    return [drawn.child[drawn.owner == unit].tolist() for unit in range(number)]


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
def test_subsets(counts, size):
    counts = np.array(counts, np.int64)
    drawn = tree_draw.without_replacement(counts, size, np.random.default_rng(0))
    assert drawn.owner.dtype == drawn.child.dtype == np.int64
    assert np.all(np.diff(drawn.owner) >= 0)
    for count, children in zip(counts, lists(drawn, len(counts)), strict=True):
        assert len(children) == len(set(children)) == min(size, count)
        assert all(0 <= child < count for child in children)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.7, 1.0])
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
def test_coins(counts, rate):
    counts = np.array(counts, np.int64)
    drawn = tree_draw.poisson(counts, rate, np.random.default_rng(0))
    assert drawn.owner.dtype == drawn.child.dtype == np.int64
    assert np.all(np.diff(drawn.owner) >= 0)
    for count, children in zip(counts, lists(drawn, len(counts)), strict=True):
        assert len(children) == len(set(children)) <= count
        assert all(0 <= child < count for child in children)
        assert rate != 1 or len(children) == count
        assert rate != 0 or not children


def test_ranks():
    owner = np.array([0, 0, 2, 2, 2, 5])
    ranks = tree_draw.rank_within(owner, 7)
    np.testing.assert_array_equal(ranks, [0, 1, 0, 1, 2, 0])


@pytest.mark.parametrize(
    "counts",
    [[4] * 1_000, [4] * 1_000 + [400], [4] + [100_000]],
    ids=["most of few", "few of many", "unit by unit"],
)
def test_sequences_of_children_are_uniform(counts):
    """All 24 ordered triples of four children; false alarms: 1e-6."""
    generator = np.random.default_rng(1)
    counts = np.array(counts, np.int64)
    found: list[tuple] = []
    while len(found) < 4_000:
        drawn = tree_draw.without_replacement(counts, 3, generator)
        small = counts[drawn.owner] == 4
        found += map(tuple, drawn.child[small].reshape(-1, 3).tolist())
    dist = {order: 1 / 24 for order in itertools.permutations(range(4), 3)}
    assert false_alarm(outcome_tally(found, dist)) > FALSE_ALARMS


def test_coins_are_independent():
    """All 2^5 patterns over two units and an empty one; false alarms: 1e-6."""
    generator = np.random.default_rng(2)
    counts, rate = np.array([2, 0, 3]), 0.3
    starts = np.array([0, 2, 2])
    patterns = []
    for _ in range(8_000):
        drawn = tree_draw.poisson(counts, rate, generator)
        patterns.append(tuple(np.sort(starts[drawn.owner] + drawn.child).tolist()))
    dist = {
        pattern: rate**size * (1 - rate) ** (5 - size)
        for size in range(6)
        for pattern in itertools.combinations(range(5), size)
    }
    assert false_alarm(outcome_tally(patterns, dist)) > FALSE_ALARMS


def test_rare_coins_among_many_children():
    """Deciles of 10^7 children at rate 1e-4, in 200 draws; false alarms: 1e-6."""
    generator = np.random.default_rng(3)
    counts = np.array([4_000_000, 6_000_000])
    places = []
    for _ in range(200):
        drawn = tree_draw.poisson(counts, 1e-4, generator)
        places.append(drawn.owner * 4_000_000 + drawn.child)
    tenths = np.bincount(np.concatenate(places) // 1_000_000, minlength=10)
    assert false_alarm(Tally(tenths, 200 * 1_000_000, 1e-4)) > FALSE_ALARMS

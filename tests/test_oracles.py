"""The enumeration of trees agrees with a listing of every whole sample.

The other oracles are held against each other by the tests of the library: each of its
numbers is compared with two of them.
"""

import collections

import numpy as np
import pytest

from oracles import adversary, trees


def test_release_matches_a_listing_of_every_whole_sample():
    rng = np.random.default_rng(3)
    for _ in range(30):
        design = adversary.random_design(rng, num_levels=3, max_units=2)
        table = adversary.random_table(rng, trees.all_contents(design), extreme=False)
        for tree in design.neighbours():
            left: dict[float, float] = collections.defaultdict(float)
            fast = trees.prepare(tree, design.schemes, design.clip_level)(table)
            for mean, weight in fast.items():
                left[round(round(mean, 12), 9)] += weight
            assert sum(left.values()) == pytest.approx(1.0, rel=1e-12)
            for sample, weight in trees.contents(tree, design.schemes).items():
                units = trees.clip_units(sample, design.clip_level)
                total = sum(table[unit] for unit in units)
                left[round(round(total, 12), 9)] -= weight
            assert max(map(abs, left.values())) < 1e-12

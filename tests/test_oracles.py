"""The oracles agree with published tables and with the definitions in many digits.

The library is not used here: these tests validate the oracles of the other tests.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

from oracles import adversary, mixtures, moments, precise, trees

TABLES = json.loads((Path(__file__).parent / "reference.json").read_text())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sampled_gaussian_matches_the_reference_table(direction):
    rows = TABLES["sampled_gaussian_rdp"]
    assert len(rows) == 42
    for row in rows:
        shift, alpha = 1 / row["noise_multiplier"], row["alpha"]
        log_moment = moments.fine(
            "sampled", row["sampling_probability"], shift, alpha, direction=direction
        )
        actual = moments.rdp_from_log_moment(log_moment, alpha)
        # Both the division 1 / noise and the result are rounded to double.
        assert actual == pytest.approx(float(row[f"rdp_{direction}"]), rel=2e-15)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("p", "shift", "alpha"),
    [
        (0.3, 0.001, 4096.0),
        (1.0, 1.3, 7.7),
        (1e-12, 0.5, 2.5),
        (0.999999, 2.0, 12.0),
        (0.02, 4.0, 4.5),
    ],
)
def test_fine_quadrature_matches_sixty_digits(p, shift, alpha):
    r_in = 0.03
    with mp.workdps(precise.DIGITS):
        sampled = precise.sampled_pair(p, shift)
        symmetric = precise.symmetric_pair(p, r_in, shift)
        pairs = [
            (
                moments.fine("swapped", p, shift, alpha),
                precise.mp_excess(*sampled, alpha, mp.mpf(shift) / 2),
            ),
            (
                moments.fine("antipodal", p, shift, alpha, inner=r_in),
                precise.mp_excess(*symmetric, alpha, 0),
            ),
        ]
        for direction, pair in (("forward", sampled), ("backward", sampled[::-1])):
            found = moments.fine("sampled", p, shift, alpha, direction=direction)
            pairs.append((found, precise.mp_excess(*pair, alpha)))
        for log_value, exact in pairs:
            high = float(log_value)
            value = mp.mpf(high) + mp.mpf(float(log_value - np.longdouble(high)))
            # Relative where the logarithm is above 1.
            assert abs(value - mp.log(exact)) < 1e-13 * max(1, mp.log(exact))


@pytest.mark.few(1)
@pytest.mark.parametrize("g", [4.0, 1.0, 1.3])
def test_mixture_divergence_matches_integration_of_its_definition(g):
    pairs = [precise.sampled_pair(0.2, 1.5), precise.symmetric_pair(0.3, 0.25, 0.8)]
    for top, bottom in (*pairs, precise.mirrored(*pairs[0])):
        exact = float(precise.mp_hockey_stick(top, bottom, g))
        by_tails, _ = precise.mp_tails(top, bottom, mp.log(g))
        assert float(by_tails) == pytest.approx(exact, rel=1e-13, abs=1e-30)
        plain = [{float(m): float(w) for w, m in side} for side in (top, bottom)]
        actual = mixtures.hockey_stick(plain[0], plain[1], 1.0, np.array([g]))
        assert actual[0] == pytest.approx(exact, rel=1e-9, abs=1e-15)


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

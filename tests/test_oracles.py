"""The oracles agree with each other, with published tables and with the theorem.

The library is not used here: these tests validate the oracles of
the other tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

from oracles import adversary, mixtures, moments, precise, trees

TABLES = json.loads((Path(__file__).parent / "reference.json").read_text())


def _relative(log_value, reference) -> float:
    """Error of a log, relative where it is above 1, against a 60-digit value."""
    with mp.workdps(precise.DIGITS):
        high = float(log_value)
        value = mp.mpf(high) + mp.mpf(float(log_value - np.longdouble(high)))
        return float(abs(value - mp.log(reference)) / max(1, mp.log(reference)))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sampled_gaussian_matches_the_reference_table(direction):
    rows = TABLES["sampled_gaussian_rdp"]
    assert len(rows) == 42
    for row in rows:
        shift, alpha = 1 / row["noise_multiplier"], row["alpha"]
        log_moment = moments.fine_sampled_gaussian(
            row["sampling_probability"], shift, alpha, direction=direction
        )
        actual = moments.rdp_from_log_moment(log_moment, alpha)
        # Both the division 1 / noise and the result are rounded to double.
        assert actual == pytest.approx(float(row[f"rdp_{direction}"]), rel=2e-15)


SETTINGS = [
    (0.3, 0.001, 4096.0),
    (1.0, 1.3, 7.7),
    *(
        pytest.param(*setting, marks=pytest.mark.slow)  # up to seconds each
        for setting in (
            (1e-12, 0.5, 2.5),
            (0.01, 1.0, 1.25),
            (1e-6, 20.0, 1.001),
            (0.999999, 2.0, 12.0),
            (0.02, 4.0, 30.0),
        )
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("p", "shift", "alpha"), SETTINGS)
def test_fine_quadrature_matches_sixty_digits(p, shift, alpha):
    _check_fine_quadrature(p, 0.03, shift, alpha)


@pytest.mark.slow
def test_fine_quadrature_matches_sixty_digits_at_random():
    rng = np.random.default_rng(7)
    for _ in range(40):
        p, r_in = 10 ** rng.uniform(-12, 0), 10 ** rng.uniform(-4, 0)
        if rng.random() < 0.3:
            p = float(rng.choice([1.0, 1 - 10 ** rng.uniform(-9, -1)]))
        shift, alpha = 10 ** rng.uniform(-3, 1.3), 1 + 10 ** rng.uniform(-3, 3.6)
        _check_fine_quadrature(p, r_in, shift, alpha)


def _check_fine_quadrature(p, r_in, shift, alpha):
    for direction in ("forward", "backward"):
        log_moment = moments.fine_sampled_gaussian(p, shift, alpha, direction=direction)
        exact = precise.mp_sampled_gaussian(p, shift, alpha, direction=direction)
        assert _relative(log_moment, exact) < 1e-13
    ratio = moments.sampled_ratio(p, shift)
    cuts = moments.breakpoints(ratio, alpha, shift / 2)
    exact = precise.mp_swapped(p, shift, alpha, cuts)
    assert _relative(moments.fine_swapped(p, shift, alpha), exact) < 1e-13
    cuts = moments.breakpoints(moments.symmetric_ratio(p, r_in, shift), alpha, 0.0)
    exact = precise.mp_symmetric(p, r_in, shift, alpha, cuts)
    assert _relative(moments.fine_symmetric(p, r_in, shift, alpha), exact) < 1e-13


def _identity_cuts(top: float) -> list[float]:
    return [0.0, *np.geomspace(1e-3, top, 24)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eta", "shift", "alpha"),
    [(0.05, 1.0, 4.5), pytest.param(1.0, 0.4, 1.5, marks=pytest.mark.slow)],
)
def test_densities_and_profiles_give_the_same_moment(eta, shift, alpha):
    with mp.workdps(precise.DIGITS):

        def profile(g):
            return eta * precise.mp_gaussian_profile(shift, 1 + (g - 1) / mp.mpf(eta))

        cuts = _identity_cuts(40.0)
        exact = precise.mp_moment_from_profiles(profile, profile, alpha, cuts)
    assert _relative(moments.fine_swapped(eta, shift, alpha), exact) < 1e-13


@pytest.mark.slow
def test_independent_episodes_match_the_profile_identity():
    count, eta, shift, alpha = 2, 0.1, 0.4, 3.5
    with mp.workdps(precise.DIGITS):
        rate = mp.mpf(eta)
        reached = 1 - (1 - rate) ** count

        def profile(g):
            inner = 1 + (g - 1) / reached
            return mp.fsum(
                mp.binomial(count, k)
                * rate**k
                * (1 - rate) ** (count - k)
                * precise.mp_gaussian_profile(2 * k * mp.mpf(shift), inner)
                for k in range(1, count + 1)
            )

        cuts = _identity_cuts(40.0)
        exact = precise.mp_moment_from_profiles(profile, profile, alpha, cuts)
    actual = moments.fine_independent_episodes(count, eta, shift, alpha)
    # The inner rate 1 - (1 - eta)^B is rounded to double.
    assert _relative(actual, exact) < 1e-13


@pytest.mark.parametrize(
    "g", [*(pytest.param(g, marks=pytest.mark.slow) for g in (1.0, 1.3)), 4.0]
)
def test_mixture_divergence_matches_integration_of_its_definition(g):
    pairs = [precise.sampled_pair(0.2, 1.5), precise.symmetric_pair(0.3, 0.25, 0.8)]
    for top, bottom in (*pairs, pairs[0][::-1]):
        exact = float(precise.mp_hockey_stick(top, bottom, g))
        plain = [{float(m): float(w) for w, m in side} for side in (top, bottom)]
        actual = mixtures.hockey_stick(plain[0], plain[1], 1.0, np.array([g]))
        assert actual[0] == pytest.approx(exact, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("sigma", [0.5, 3.0, 50.0])
def test_conversion_finds_the_minimum_over_real_orders(sigma):
    def rdp(alpha):
        return alpha / (2 * sigma**2)

    alphas = 1 + np.geomspace(1e-3, 1e5, 400_001)
    scan = rdp(alphas) + np.log1p(-1 / alphas)
    scan -= (np.log(1e-5) + np.log(alphas)) / (alphas - 1)
    assert moments.rdp_to_epsilon(rdp, 1e-5) == pytest.approx(scan.min(), rel=1e-8)
    assert moments.rdp_to_epsilon(rdp, 1e-5) <= scan.min() * (1 + 1e-12)


def _clipped(content, depth):
    """Contents of the drawn clip units in the whole step's content."""
    if depth == 0:
        return [content]
    return [unit for child in content[1] for unit in _clipped(child, depth - 1)]


def test_release_matches_a_listing_of_every_whole_sample():
    rng = np.random.default_rng(3)
    for _ in range(40):
        design = adversary.random_design(rng, num_levels=3, max_units=2)
        table = adversary.random_table(rng, trees.all_contents(design), extreme=False)
        for tree in design.neighbours():
            fast = trees.prepare(tree, design.schemes, design.clip_level)(table)
            slow: dict[float, float] = {}
            for sample, weight in trees.contents(tree, design.schemes).items():
                units = _clipped(sample, design.clip_level)
                total = round(sum(table[unit] for unit in units), 12)
                slow[total] = slow.get(total, 0.0) + weight
            assert sum(fast.values()) == pytest.approx(1.0, rel=1e-12)
            merged: dict[float, float] = {}
            for mean, weight in fast.items():
                key = round(mean, 9)
                merged[key] = merged.get(key, 0.0) + weight
            for mean, weight in slow.items():
                merged[round(mean, 9)] = merged.get(round(mean, 9), 0.0) - weight
            assert max(map(abs, merged.values())) < 1e-12

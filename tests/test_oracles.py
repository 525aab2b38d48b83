"""The oracles agree with each other, with published tables and with the theorem.

Nothing of the library is used here: these tests say that the measuring instruments of
the other tests are right.
"""

from __future__ import annotations

import json
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

from oracles import adversary, episodes, mixtures, moments, precise, trees

TABLES = json.loads((Path(__file__).parent / "reference.json").read_text())
G = np.exp(adversary.LOG_GS)
SOUND = 1 + 1e-9


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


def test_claims_match_the_mixture_divergence():
    p, s = 0.15, 0.9
    top, bottom = {0.0: 1 - p, 1.0: p}, {0.0: 1.0}
    forward, backward = mixtures.claimed_sampled(p, s, G)
    np.testing.assert_allclose(
        mixtures.hockey_stick(top, bottom, s, G), forward, rtol=1e-9
    )
    np.testing.assert_allclose(
        mixtures.hockey_stick(bottom, top, s, G), backward, rtol=1e-9, atol=1e-15
    )


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


EXTREMES = adversary.extreme_designs()


@pytest.mark.parametrize("name", EXTREMES)
def test_structured_worst_case_reaches_every_row_at_every_epsilon(name):
    design = EXTREMES[name]
    row, *claim = trees.claimed(design, G)
    assert row == name.split("/")[0]
    true = trees.enumerated(design)(adversary.worst_table(design), G)
    assert adversary.worst_ratio(true, tuple(claim)) <= SOUND
    ratios = [
        t / np.where(c > 1e-9, c, np.inf) for t, c in zip(true, claim, strict=True)
    ]
    judged = np.max(claim, axis=0) > 1e-9
    assert judged.sum() >= 3
    assert np.max(ratios, axis=0)[judged].min() > 0.999


def test_random_designs_never_exceed_their_claim():
    rng = np.random.default_rng(20)
    for i in range(60):
        design = adversary.random_design(
            rng, num_levels=2 + i % 2, below_unit=i % 4 == 0
        )
        _, ratio = adversary.ratio_of(design)
        keys = trees.all_contents(design)
        tables = [
            adversary.worst_table(design),
            adversary.random_table(rng, keys),
            adversary.random_table(rng, keys, extreme=False),
        ]
        assert max(map(ratio, tables)) <= SOUND, design
        if i % 6 == 0:
            assert adversary.climb(rng, ratio, tables[1])[0] <= SOUND, design


def test_a_small_unit_is_charged_for_the_larger_one_it_is_swapped_with():
    """Clipped below a class: k counts any class's contributions, not the own ones."""
    root = ("root", (("small", ("x", "y")), ("large", (1, 2, 3))))
    one, all_of_them = (trees.Scheme("without_replacement", n) for n in (1, 3))
    schemes = (one, all_of_them)
    design = trees.Design(root, schemes, 2, (0,), "replace_one", 1.2)
    table = dict.fromkeys(trees.all_contents(design), -1.0) | {"x": 1.0, "y": 1.0}
    true = trees.enumerated(design)(table, G)
    _, *claim = trees.claimed(design, G)
    assert adversary.worst_ratio(true, tuple(claim)) <= SOUND
    own = mixtures.claimed_swapped(0.5, 2 * 2 * design.s, G)
    assert adversary.worst_ratio(true, (own, own)) > 1.01


@pytest.mark.slow
def test_climbing_from_random_contributions_finds_the_worst_case():
    rng = np.random.default_rng(5)
    for name in (
        "wor/add_remove/task",
        "poisson/add_remove/task",
        "step/add_remove/deep",
    ):
        design = EXTREMES[name]
        _, ratio = adversary.ratio_of(design)
        keys = trees.all_contents(design)
        starts = (adversary.random_table(rng, keys) for _ in range(4))
        assert max(adversary.climb(rng, ratio, t)[0] for t in starts) > 0.999


def test_naive_product_rate_is_caught():
    caught = set()
    for name, design in EXTREMES.items():
        if not name.endswith("outer"):
            continue
        sizes = zip(design.schemes, design.path_sizes(), strict=True)
        inclusion = float(np.prod([scheme.rate(size) for scheme, size in sizes]))
        naive = mixtures.naive_product_rate(inclusion, design.s, G)
        true = trees.enumerated(design)(adversary.worst_table(design), G)
        if adversary.worst_ratio(true, (naive, naive)) > 1.1:
            caught.add(name.split("/")[0])
    assert caught >= {"wor", "wor_last"}


def test_counterexample_to_the_product_rate():
    """10 tasks, 1 drawn; 40 examples, 20 drawn; each example clipped; 2C/noise = 1."""
    g, s = np.exp([0.5, 1.0]), 0.5
    # Every other task's examples contribute +1, x's classmates -1, x itself +1.
    larger = {20.0: 0.9, -18.0: 0.05, -20.0: 0.05}
    truth = mixtures.hockey_stick(larger, {20.0: 0.9, -20.0: 0.1}, s, g)
    np.testing.assert_allclose(truth, [7.994e-3, 2.887e-3], rtol=1e-4)
    claim, _ = mixtures.claimed_sampled(0.5, 2 * s, g, r_out=0.1)
    np.testing.assert_allclose(truth, claim, rtol=1e-9)
    naive = mixtures.naive_product_rate(0.05, s, g)
    np.testing.assert_allclose(naive, [2.19e-4, 1.19e-5], rtol=5e-3)


def test_a_unit_that_vanishes_when_emptied_breaks_the_claim():
    """Two classes, one drawn, one holding only x: units must stay on the list."""
    root = ("root", (("a", ("x",)), ("b", ("y", "z"))))
    schemes = (trees.Scheme("without_replacement", 1),) * 2
    design = trees.Design(root, schemes, 1, (0, 0), "add_remove", 1.0)
    table = dict.fromkeys(trees.all_contents(design), 1.0)
    table["a", frozenset({"x"})] = -1.0
    vanished = trees.prepare(("root", root[1][1:]), schemes, 1)(table)
    kept = trees.prepare(root, schemes, 1)(table)
    # Both draw x with probability 1/2, so only the outer draw tells them apart.
    g = np.exp([1.0])
    true = mixtures.hockey_stick(kept, vanished, 1.0, g)
    design = design._replace(clip_level=2)
    _, forward, _ = trees.claimed(design, g)
    assert true[0] > forward[0]


def _grouped(draw, value, path, relation, **options):
    pool = (
        "pool",
        (("a", (0, 1, 2)), ("b", (3, 4)), ("c", (5, 6)), ("d", (7, 8))),
    )
    examples = trees.Scheme("without_replacement", 1)
    return episodes.GroupedDesign(
        pool, 2, draw, value, examples, path, relation, 1.0, **options
    )


GROUPED = [
    (_grouped("partition", 0.4, (0, 0), "add_remove"), True),
    (_grouped("partition", 0.4, (0, 0), "replace_one"), True),
    (_grouped("partition", 0.4, (0,), "replace_one"), True),
    (_grouped("partition", 0.4, (0,), "add_remove", emptied=True), True),
    (_grouped("partition", 0.4, (0,), "add_remove"), False),
    (_grouped("without_replacement", 1, (0, 0), "add_remove"), True),
    (_grouped("without_replacement", 1, (0, 0), "replace_one"), True),
    (_grouped("without_replacement", 1, (0,), "replace_one"), True),
    (_grouped("poisson", 0.4, (0, 0), "add_remove"), False),
    (_grouped("poisson", 0.4, (0,), "replace_one"), False),
]


@pytest.mark.parametrize(("design", "tight"), GROUPED)
def test_grouped_classes(design, tight):
    rng = np.random.default_rng(8)
    keys, divergences = episodes.grouped(design)
    claim = episodes.grouped_claim(design, G)
    tables = [episodes.worst_grouped_table(design, keys)]
    tables += [adversary.random_table(rng, keys) for _ in range(5)]
    ratios = [adversary.worst_ratio(divergences(t, G), claim) for t in tables]
    assert max(ratios) <= SOUND
    assert max(ratios) > (0.999 if tight else 0.1)


def test_grouped_classes_with_the_partition_revealed():
    design = GROUPED[0][0]
    keys, divergences = episodes.grouped(design, reveal=True)
    true = divergences(episodes.worst_grouped_table(design, keys), G)
    ratio = adversary.worst_ratio(true, episodes.grouped_claim(design, G))
    assert 0.999 < ratio <= SOUND


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("num_episodes", [1, 2, 4])
def test_independent_episodes(num_episodes, relation):
    rng = np.random.default_rng(9)
    root = EXTREMES["wor/add_remove/task"].root
    schemes = (trees.Scheme("poisson", 0.3), trees.Scheme("without_replacement", 1))
    design = episodes.IndependentDesign(
        root, schemes, num_episodes, (0, 0), relation, 0.6
    )
    keys, divergences = episodes.independent(design)
    claim = episodes.independent_claim(design, G)
    tables = [adversary.worst_table(design.as_step())]
    tables += [adversary.random_table(rng, keys) for _ in range(5)]
    ratios = [adversary.worst_ratio(divergences(t, G), claim) for t in tables]
    assert max(ratios) <= SOUND
    assert max(ratios) > (0.999 if num_episodes == 1 else 0.5)

"""The exact test of two counts, held against sums over all outcomes by SciPy."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.audit import ratio_test
from jaxdp_episodic.trainer.audit.confidence import clopper_pearson, log_ratio_bound

CASES = [
    (900, 50, 10_000, 1e-3),
    (40, 3, 5_000, 0.0),
    (3_000, 2, 10**8, 1e-5),
    (60, 0, 400, 0.02),
    (390, 3, 400, 1e-3),
    (90_000, 0, 90_000, 0.1),  # told apart every time
]


def by_intervals(hits, false_hits, num_draws, delta, error):
    """Half of the error for each chance, as a plain audit does."""
    low, _ = clopper_pearson(hits, num_draws, error=0.5 * error)
    _, high = clopper_pearson(false_hits, num_draws, error=0.5 * error)
    return math.log((float(low) - delta) / float(high))


def chance_of_so_high_a_score(case, epsilon, false_chance, error):
    """Summed over the false hits, the hits' tail from SciPy."""
    hits, false_hits, n, delta = case
    settings = {"delta": delta, "error": error}
    least = ratio_test.score(hits, false_hits, n, **settings) * (1 - 1e-12)
    spread = math.sqrt(n * false_chance)
    first = max(0, int(n * false_chance - 9 * spread - 20))
    y = np.arange(first, int(n * false_chance + 9 * spread + 20))
    low, high = np.zeros(y.shape), np.full(y.shape, n + 1.0)
    while np.any(high - low > 1):  # the fewest hits with such a score
        middle = np.floor(0.5 * (low + high))
        enough = ratio_test.score(middle, y, n, **settings) >= least
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    chance = math.exp(epsilon) * false_chance + delta
    tail = stats.binom.sf(high - 1, n, min(chance, 1.0))
    return float(np.sum(stats.binom.pmf(y, n, false_chance) * tail))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("error", [0.05, pytest.param(0.002, marks=pytest.mark.slow)])
def test_no_false_chance_makes_the_counts_likelier_than_the_error(case, error):
    hits, false_hits, n, delta = case
    bound = float(log_ratio_bound(hits, false_hits, n, delta=delta, error=error))
    share = ratio_test.NUISANCE
    low, high = clopper_pearson(false_hits, n, error=0.5 * share * error)
    most = min(float(high), (1 - delta) / math.exp(bound))
    chances = np.linspace(max(float(low), most * 1e-6), most, 40)
    found = max(chance_of_so_high_a_score(case, bound, q, error) for q in chances)
    # Not above the level; and not far below, or the bound would waste what was seen.
    assert 0.65 * error <= found <= (1 - share) * error


@pytest.mark.parametrize("case", CASES)
def test_it_shows_more_than_two_intervals_do(case):
    hits, false_hits, n, delta = case
    found = float(log_ratio_bound(hits, false_hits, n, delta=delta, error=0.05))
    assert by_intervals(*case, 0.05) < found
    assert found < math.log((hits / n - delta) / (max(false_hits, 0.5) / n))


@pytest.mark.parametrize("delta", [0.0, 0.1])
@pytest.mark.parametrize("n", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_it_fails_as_seldom_as_it_says(n, delta):
    """Every outcome's bound; its chance to miss is summed over all of them."""
    error = 0.1
    x, y = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    bounds = log_ratio_bound(x, y, n, delta=delta, error=error)
    assert (bounds > 0).any()
    for q in (0.001, 0.03, 0.1, 0.3, 0.6, 0.85):
        for epsilon in (0.0, 0.2, 1.0, 3.0):
            p = math.exp(epsilon) * q + delta
            if p <= 1:
                mass = stats.binom.pmf(x, n, p) * stats.binom.pmf(y, n, q)
                assert mass[bounds > epsilon].sum() <= error


def test_the_score_orders_outcomes_as_it_must():
    n, settings = 200, {"delta": 0.01, "error": 0.01}
    x, y = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    score = ratio_test.score(x, y, n, **settings)
    assert np.all(np.diff(score, axis=0) >= -1e-12)
    assert np.all(np.diff(score, axis=1) <= 1e-12)


@pytest.mark.parametrize(
    ("n", "false_hits", "delta"),
    [
        (4_776_648, 6, 0.99999),
        (18_215_573, 6, 0.99999),
        (1_872_704_992, 5, 0.99999),
        (1_116_794_610, 4, 1 - 1e-7),
    ],
)
def test_what_was_seen_counts_beside_a_delta_of_nearly_one(n, false_hits, delta):
    """Rounding of n delta left the outcome itself out, and the bound was too large."""
    error = 0.05
    bound = float(log_ratio_bound(n, false_hits, n, delta=delta, error=error))
    assert bound > 0
    # At p = 1 every draw hits, and only the false hits are left to chance.
    chance = (1 - delta) / math.exp(bound)
    assert stats.binom.cdf(false_hits, n, chance) <= error


def test_so_small_an_error_is_not_clipped():
    bound = float(log_ratio_bound(1_000, 0, 1_000, delta=0.0, error=1e-12))
    surer = float(log_ratio_bound(1_000, 0, 1_000, delta=0.0, error=1e-9))
    assert 0 < bound < surer
    # At p = 1 no false hit in n draws is likelier than the error.
    assert (1 - math.exp(-bound)) ** 1_000 <= 1e-12

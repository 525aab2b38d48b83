import math

import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.trainer.audit.bounds import clopper_pearson, log_ratio_bound


@pytest.mark.parametrize("trials", [1, 2, 17, 1_000, 10**6, 10**8])
@pytest.mark.parametrize("error", [0.5, 0.1, 0.0125, 1e-6])
def test_the_ends_are_where_the_tails_are_the_error(trials, error):
    """By binomial tails in place of the quantiles of the beta distribution."""
    rng = np.random.default_rng(trials)
    chosen = [0, 1, 2, 5, 100, trials - 1, trials, *rng.integers(0, trials + 1, 20)]
    k = np.unique(np.clip(chosen, 0, trials))
    low, high = clopper_pearson(k, trials, error=error)
    assert low[0] == 0
    assert high[-1] == 1
    rows, above = k[1:, None], k[:-1, None]
    # The ends themselves are on the safe side; a little further in is not any more.
    inwards = np.array([1.0, 1 + 3e-7])
    chances = np.minimum(low[1:, None] * inwards, 1.0)
    tails = stats.binom.sf(rows - 1, trials, chances)
    assert np.all(tails[:, 0] <= error * (1 + 1e-9))
    assert np.all(tails[:, 1] >= error * (1 - 1e-9))
    tails = stats.binom.cdf(above, trials, high[:-1, None] / inwards)
    is_below_one = high[:-1] < 1
    assert np.all(tails[is_below_one, 0] <= error * (1 + 1e-9))
    assert np.all(tails[:, 1] >= error * (1 - 1e-9))


def test_the_intervals_fail_as_seldom_as_they_say():
    """Summed over all outcomes, not simulated: the exact chance to miss the truth."""
    trials, error = 40, 0.05
    k = np.arange(trials + 1)
    low, high = clopper_pearson(k, trials, error=error)
    for chance in (0.001, 0.03, 0.2, 0.5, 0.83, 0.999):
        mass = stats.binom.pmf(k, trials, chance)
        assert mass[low > chance].sum() <= error
        assert mass[high < chance].sum() <= error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((5, 4, 0.05), "successes"),
        ((-1, 4, 0.05), "successes"),
        ((1, 0, 0.05), "trials"),
        ((1, 4, 0.0), "error"),
        ((1, 4, 0.7), "error"),
    ],
)
def test_bad_counts_are_refused(arguments, complaint):
    *counts, error = arguments
    with pytest.raises(ValueError, match=complaint):
        clopper_pearson(*counts, error=error)


def test_nothing_is_shown_by_an_event_that_a_mechanism_may_allow_itself():
    assert log_ratio_bound(900, 0, 10_000, delta=0.1, error=0.025) == 0
    assert log_ratio_bound(50, 900, 10_000, delta=1e-3, error=0.025) == 0
    assert log_ratio_bound(0, 0, 10_000, delta=0.0, error=0.025) == 0


def test_a_bound_fails_as_seldom_as_it_says():
    """Summed over all outcomes of a mechanism at the edge of its claim."""
    trials, error, delta = 60, 0.1, 0.05
    p, q = 0.6, 0.2
    truth = math.log((p - delta) / q)
    hits, misses = np.indices((trials + 1, trials + 1))
    mass = stats.binom.pmf(hits, trials, p) * stats.binom.pmf(misses, trials, q)
    bounds = log_ratio_bound(hits, misses, trials, delta=delta, error=error)
    assert mass[bounds > truth].sum() <= error
    assert mass[bounds > 0.3 * truth].sum() > 0.5  # and it shows something


@pytest.mark.parametrize(
    ("counts", "settings", "complaint"),
    [
        ((1_500, 0), {}, "^hits must be at most num_draws, 1,000"),
        ((5, 1_001), {}, "^false_hits must be at most"),
        ((-5, 0), {}, "^successes must"),
        ((5.7, 0), {}, "^successes must"),
        ((5, math.nan), {}, "^successes must"),
        ((5, 0), {"delta": 1.0}, "^delta must lie in"),
        ((5, 0), {"delta": math.nan}, "^delta must lie in"),
        ((5, 0), {"error": 1.2}, "^error must lie in"),
    ],
)
def test_bad_arguments_of_a_bound_are_refused(counts, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        log_ratio_bound(*counts, 1_000, **{"delta": 0.0, "error": 0.05, **settings})

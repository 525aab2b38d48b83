import bisect
import json
import math

import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.accountant.report.sentences import downward, upward
from jaxdp_episodic.trainer.audit.bounds import (
    AuditRow,
    EpsilonBound,
    Guesses,
    audit_document,
    audit_markdown,
    best_guesses,
    clopper_pearson,
    log_ratio_bound,
    one_run_epsilon,
    one_run_p_value,
    score_bounds,
)


@pytest.mark.parametrize("trials", [1, 17, 1_000, 10**8])
@pytest.mark.parametrize("error", [0.5, 0.0125, 1e-6])
def test_interval_ends_have_the_stated_tails(trials, error):
    """Checked by binomial tails instead of beta quantiles."""
    rng = np.random.default_rng(trials)
    chosen = [0, 1, 2, 5, 100, trials - 1, trials, *rng.integers(0, trials + 1, 20)]
    k = np.unique(np.clip(chosen, 0, trials))
    low, high = clopper_pearson(k, trials, error=error)
    assert low[0] == 0
    assert high[-1] == 1
    rows, above = k[1:, None], k[:-1, None]
    # The ends err on the safe side, by little: points further inside do not hold.
    inwards = np.array([1.0, 1 + 3e-7])
    chances = np.minimum(low[1:, None] * inwards, 1.0)
    tails = stats.binom.sf(rows - 1, trials, chances)
    assert np.all(tails[:, 0] <= error * (1 + 1e-9))
    assert np.all(tails[:, 1] >= error * (1 - 1e-9))
    tails = stats.binom.cdf(above, trials, high[:-1, None] / inwards)
    is_below_one = high[:-1] < 1
    assert np.all(tails[is_below_one, 0] <= error * (1 + 1e-9))
    assert np.all(tails[:, 1] >= error * (1 - 1e-9))


def test_events_that_delta_permits_prove_nothing():
    assert log_ratio_bound(900, 0, 10_000, delta=0.1, error=0.025) == 0
    assert log_ratio_bound(50, 900, 10_000, delta=1e-3, error=0.025) == 0
    assert log_ratio_bound(0, 0, 10_000, delta=0.0, error=0.025) == 0


def test_bounds_keep_their_confidence():
    """Summed over all outcomes of a mechanism whose claim is tight."""
    trials, error, delta = 60, 0.1, 0.05
    p, q = 0.6, 0.2
    truth = math.log((p - delta) / q)
    hits, misses = np.indices((trials + 1, trials + 1))
    mass = stats.binom.pmf(hits, trials, p) * stats.binom.pmf(misses, trials, q)
    bounds = log_ratio_bound(hits, misses, trials, delta=delta, error=error)
    assert mass[bounds > truth].sum() <= error
    assert mass[bounds > 0.3 * truth].sum() > 0.5  # and the bound is positive


def by_definition(m, r, v, epsilon, delta):
    """The theorem's bound, term by term with SciPy."""
    dist = stats.binom(r, 1 / (1 + math.exp(-epsilon)))
    mass = dist.pmf(np.arange(v))
    slopes = [mass[max(v - i, 0) :].sum() / i for i in range(1, m + 1)]
    return min(dist.sf(v - 1) + 2 * m * delta * max(slopes), 1.0)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize(
    ("m", "r", "v"), [(1, 1, 1), (10, 4, 3), (40, 40, 31), (100, 30, 30), (60, 20, 0)]
)
def test_the_p_value_equals_the_theorems(m, r, v, delta):
    for epsilon in (0.0, 0.3, 2.0, 9.0):
        found = one_run_p_value(m, r, v, epsilon=epsilon, delta=delta)
        wanted = by_definition(m, r, v, epsilon, delta)
        assert found == pytest.approx(wanted, rel=1e-7)


def test_epsilon_is_where_the_p_value_equals_the_error():
    found = one_run_epsilon(1_000, 100, 95, delta=1e-5)
    assert one_run_p_value(1_000, 100, 95, epsilon=found, delta=1e-5) <= 0.05
    assert one_run_p_value(1_000, 100, 95, epsilon=found + 1e-6, delta=1e-5) > 0.05
    assert one_run_epsilon(1_000, 100, 52, delta=1e-5) == 0
    # All guesses right without abstaining: the limit of one run is about log(r).
    assert one_run_epsilon(1_000, 1_000, 1_000, delta=0.0) == pytest.approx(
        -math.log(math.expm1(-math.log(0.05) / 1_000)), rel=1e-6
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 0.0), (1.0, 0.01)])
def test_a_true_claim_is_rarely_rejected(epsilon, delta):
    """Randomized response that reveals its input with probability delta."""
    runs, m = 2_000, 60
    rng = np.random.default_rng(7)
    keeps = rng.random((runs, m)) < 1 / (1 + math.exp(-epsilon))
    leaks = rng.random((runs, m)) < delta
    right = keeps | leaks
    # The attacker guesses first where the secret is revealed. More right guesses
    # never prove less, so the least number of them that rejects suffices.
    number = right.sum(axis=1)
    least = bisect.bisect_right(
        range(m + 1), epsilon, key=lambda v: one_run_epsilon(m, m, v, delta=delta)
    )
    accused = int(np.sum(number >= least))
    # 5 % are allowed, plus three standard deviations of 2,000 runs.
    assert accused / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    if delta == 0:  # where the theorem is tight
        assert accused > 0


def test_guesses_use_the_most_extreme_scores():
    rng = np.random.default_rng(0)
    is_in = rng.random(400) < 0.5
    scores = rng.normal(size=400) + 6.0 * is_in
    found = best_guesses(scores, is_in, delta=1e-5)
    assert found.epsilon > 3
    assert found.num_correct == found.num_guesses
    # Random guesses prove nothing, nor do scores of the opposite sign.
    assert best_guesses(rng.normal(size=400), is_in, delta=1e-5).epsilon < 0.5
    assert best_guesses(-scores, is_in, delta=1e-5).epsilon == 0


@pytest.mark.slow
def test_choosing_the_number_of_guesses_is_corrected_for():
    rng, runs, accused = np.random.default_rng(1), 400, 0
    for _ in range(runs):
        is_in = rng.random(60) < 0.5
        accused += best_guesses(rng.normal(size=60), is_in, delta=0.0).epsilon > 0
    assert accused <= 0.05 * runs + 3 * math.sqrt(runs * 0.05 * 0.95)


def ratio(hits, false_hits, *, delta=0.0, error=0.05):
    return log_ratio_bound(hits, false_hits, 1_000, delta=delta, error=error)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: clopper_pearson(5, 4, error=0.05), "^successes"),
        (lambda: clopper_pearson(1, 0, error=0.05), "^trials"),
        (lambda: clopper_pearson(1, 4, error=0.7), "^error"),
        (lambda: ratio(1_500, 0), "^hits must be at most num_draws, 1,000"),
        (lambda: ratio(5, 1_001), "^false_hits must be at most"),
        (lambda: ratio(5.7, 0), "^successes must"),
        (lambda: ratio(5, 0, delta=1.0), "^delta must lie in"),
        (lambda: ratio(5, 0, delta=math.nan), "^delta must not be NaN"),
        (lambda: one_run_epsilon(10, 11, 5, delta=1e-5), "num_guesses"),
        (lambda: one_run_epsilon(10, 5, 6, delta=1e-5), "num_correct"),
        (lambda: one_run_epsilon(0, 0, 0, delta=1e-5), "num_canaries"),
        (lambda: best_guesses([0.0, math.nan], np.arange(2) > 0, delta=0.0), "NaN"),
        (lambda: one_run_p_value(9, 5, 4, epsilon=-1.0, delta=0.0), "^epsilon must be"),
        (lambda: one_run_p_value(9, 5, 4, epsilon=1.0, delta=2.0), "^delta .* got 2.0"),
        (lambda: score_bounds(*2 * [(np.ones(9),) * 2], []), "^the number of deltas"),
        (lambda: score_bounds(*2 * [(np.ones(9),) * 2], [0.1], 1.0), "^confidence"),
        (lambda: best_guesses(np.zeros(2), np.zeros(2), delta=0.0), "booleans"),
    ],
)
def test_bad_numbers_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()


def bound(epsilon):
    return EpsilonBound(epsilon, 1e-5, 0.95, "forward", 1.5, 900, 20, 10_000)


def row(audited=1.2, exact=2.0, rdp=2.5):
    return AuditRow("a design", "fixed data", 1e-5, rdp, exact, bound(audited))


def test_gap_and_share_of_a_row():
    one = row()
    assert one.gap == pytest.approx(0.8)
    assert one.share == pytest.approx(0.6)
    assert not one.is_violated
    assert row(audited=2.1).is_violated
    assert row(audited=2.1, exact=3.0, rdp=2.05).is_violated
    assert not row(rdp=None).is_violated
    assert row(audited=0.0, exact=0.0, rdp=0.0).share == 0


def test_a_bound_above_the_claim_within_error_rejects_nothing():
    found = EpsilonBound(1.0, 0.0, 0.95, "forward", 1.5, 400, 100, 10_000)
    bound_here = float(log_ratio_bound(400, 100, 10_000, delta=0.0, error=0.05))
    surely = float(log_ratio_bound(400, 100, 10_000, delta=0.0, error=1e-4))
    assert surely < bound_here - 0.1
    found = found._replace(epsilon=bound_here)
    for claim, is_above, is_violated in (
        (bound_here + 1e-3, False, False),
        (bound_here - 1e-3, True, False),
        (surely + 1e-3, True, False),
        (surely - 1e-3, True, True),
    ):
        one = AuditRow("x", "fixed data", 0.0, None, claim, found)
        assert (one.is_above, one.is_violated) == (is_above, is_violated)
        mark = "violated" if is_violated else "above" if is_above else ""
        assert mark in audit_markdown([one])


def test_the_document_is_json():
    guesses = Guesses(0.5, 1e-5, 0.95, 100, 20, 18)
    rows = [row(), AuditRow("run", "one run", 1e-5, math.inf, math.inf, guesses)]
    text = json.dumps(audit_document(rows, seed=0), allow_nan=False)
    document = json.loads(text)
    assert document["seed"] == 0
    assert document["is_violated"] is False
    assert document["rows"][0]["evidence"]["hits"] == 900
    assert document["rows"][1]["claimed_exact"] == "inf"
    assert document["rows"][1]["evidence"]["num_correct"] == 18


def test_claims_are_rounded_up_and_audits_down():
    assert upward(1.23401) == "1.235"
    assert downward(1.23499) == "1.234"
    assert upward(0.0) == downward(0.0) == "0"
    assert upward(math.inf) == "inf"
    table = audit_markdown([row(), row(audited=2.1)])
    assert table.count("violated") == 1
    assert len(table.splitlines()) == 4

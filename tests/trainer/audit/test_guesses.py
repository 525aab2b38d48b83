import bisect
import math

import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.trainer.audit.bounds import (
    best_guesses,
    one_run_epsilon,
    one_run_p_value,
)


def brute_force(m, r, v, epsilon, delta):
    """The theorem's bound, term by term with SciPy."""
    chance = 1 / (1 + math.exp(-epsilon))
    dist = stats.binom(r, chance)
    slopes = [
        sum(dist.pmf(k) for k in range(max(v - i, 0), v)) / i for i in range(1, m + 1)
    ]
    return min(dist.sf(v - 1) + 2 * m * delta * max(slopes), 1.0)


@pytest.mark.parametrize(
    ("delta", "epsilon", "m", "r", "v"),
    # Every delta meets every epsilon, and all counts.
    [
        pytest.param(
            delta, epsilon, *counts, marks=[pytest.mark.slow] * ((i + j + k) % 4 > 0)
        )
        for i, delta in enumerate([0.0, 1e-5, 1e-2])
        for j, epsilon in enumerate([0.0, 0.3, 2.0, 9.0])
        for k, counts in enumerate(
            [(1, 1, 1), (10, 4, 3), (40, 40, 31), (100, 30, 30), (60, 20, 0)]
        )
    ],
)
def test_the_p_value_is_the_theorems(m, r, v, epsilon, delta):
    found = one_run_p_value(m, r, v, epsilon=epsilon, delta=delta)
    assert found == pytest.approx(brute_force(m, r, v, epsilon, delta), rel=1e-7)


def test_the_epsilon_is_where_the_p_value_is_the_error():
    found = one_run_epsilon(1_000, 100, 95, delta=1e-5)
    assert one_run_p_value(1_000, 100, 95, epsilon=found, delta=1e-5) <= 0.05
    assert one_run_p_value(1_000, 100, 95, epsilon=found + 1e-6, delta=1e-5) > 0.05
    assert one_run_epsilon(1_000, 100, 52, delta=1e-5) == 0
    # All right without abstaining: the known limit of one run, log(r) or so.
    assert one_run_epsilon(1_000, 1_000, 1_000, delta=0.0) == pytest.approx(
        -math.log(math.expm1(-math.log(0.05) / 1_000)), rel=1e-6
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 0.0), (1.0, 0.01)])
@pytest.mark.parametrize("m", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_a_mechanism_that_is_as_private_as_it_says_is_rarely_accused(epsilon, delta, m):
    """Randomized response that gives itself away with probability delta."""
    runs = 2_000
    rng = np.random.default_rng(7)
    coins = rng.random((runs, m)) < 0.5
    keeps = rng.random((runs, m)) < 1 / (1 + math.exp(-epsilon))
    leaks = rng.random((runs, m)) < delta
    right = keeps | leaks
    # The attacker guesses first where the secret is plain to see. More right guesses
    # never prove less, so that the least number that accuses says it all.
    number = right.sum(axis=1)
    least = bisect.bisect_right(
        range(m + 1), epsilon, key=lambda v: one_run_epsilon(m, m, v, delta=delta)
    )
    accused = int(np.sum(number >= least))
    # 5 % are allowed; three standard deviations of 2,000 runs more.
    assert accused / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    if delta == 0:  # where the theorem is tight
        assert accused > 0
    assert coins.any()


def test_guesses_take_the_ends_of_the_scores():
    rng = np.random.default_rng(0)
    is_in = rng.random(400) < 0.5
    scores = rng.normal(size=400) + 6.0 * is_in
    found = best_guesses(scores, is_in, delta=1e-5)
    assert found.epsilon > 3
    assert found.num_correct == found.num_guesses
    # Guesses at random prove nothing, nor do scores of the opposite sign.
    assert best_guesses(rng.normal(size=400), is_in, delta=1e-5).epsilon < 0.5
    assert best_guesses(-scores, is_in, delta=1e-5).epsilon == 0


@pytest.mark.slow
@pytest.mark.parametrize("runs", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_choosing_the_number_of_guesses_is_paid_for(runs):
    rng = np.random.default_rng(1)
    accused = 0
    for _ in range(runs):
        is_in = rng.random(60) < 0.5
        accused += best_guesses(rng.normal(size=60), is_in, delta=0.0).epsilon > 0
    assert accused <= 0.05 * runs + 3 * math.sqrt(runs * 0.05 * 0.95)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((10, 11, 5), "num_guesses"),
        ((10, 5, 6), "num_correct"),
        ((0, 0, 0), "num_canaries"),
    ],
)
def test_bad_numbers_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        one_run_epsilon(*arguments, delta=1e-5)


def test_bad_scores_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        best_guesses(np.array([0.0, np.nan]), np.array([True, False]), delta=0.0)
    with pytest.raises(ValueError, match="booleans"):
        best_guesses(np.zeros(2), np.zeros(2), delta=0.0)

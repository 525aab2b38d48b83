"""Counting ones in three models: errors against simulation."""

import numpy as np
import pytest
from local_dp import (
    central_sum_error,
    local_epsilon_for_shuffled,
    local_sum_error,
    simulate_sums,
)

from jaxdp_episodic.bounds import shuffled_epsilon

TRIALS = 4_000


@pytest.mark.parametrize("n", [10, 10_000, 10_000_000])
@pytest.mark.parametrize("epsilon", [0.1, 2.0])
@pytest.mark.parametrize("model", ["central", "local"])
def test_errors_by_simulation(n, epsilon, model):
    """Mean within 5 standard errors, spread within 15 % (false alarms below 1e-6)."""
    ones = n // 3
    sums = simulate_sums(
        num_ones=ones,
        num_users=n,
        epsilon=epsilon,
        model=model,
        num_trials=TRIALS,
        seed=7,
    )
    expected = (
        central_sum_error(epsilon)
        if model == "central"
        else local_sum_error(epsilon, num_users=n)
    )
    assert sums.shape == (TRIALS,)
    assert abs(sums.mean() - ones) < 5 * expected / np.sqrt(TRIALS)
    assert sums.std() == pytest.approx(expected, rel=0.15)


def test_rates_of_the_lecture():
    n = np.array([100, 10_000])
    local = local_sum_error(0.01, num_users=n)
    np.testing.assert_allclose(local, np.sqrt(n) / 0.01, rtol=1e-4)
    assert central_sum_error(0.01) == pytest.approx(np.sqrt(2) / 0.01)
    assert local_sum_error(0.0, num_users=5) == np.inf
    assert local_sum_error(np.inf, num_users=5) == 0
    assert local_sum_error(0.0, num_users=0) == 0
    assert central_sum_error(0.0) == np.inf


@pytest.mark.slow
def test_local_epsilon_is_the_largest_that_fits():
    n = np.array([2, 100])
    local = local_epsilon_for_shuffled(0.5, num_users=n, delta=1e-6)
    assert np.all(local >= 0.5)
    within, beyond = (
        shuffled_epsilon(local * f, num_users=n, delta=1e-6, kind="randomized_response")
        for f in (1, 1.001)
    )
    assert np.all(within <= 0.5) and np.all(beyond > 0.5)
    any_ = local_epsilon_for_shuffled(0.5, num_users=n, delta=1e-6, kind="upper")
    assert np.all(any_ <= local * (1 + 1e-3))

"""Shuffling: against enumeration of the clones, of the answers, and each other."""

import numpy as np
import pytest
import scipy.stats
from shuffled_responses import (
    exact_randomized_response_delta,
)

from jaxdp_episodic.accountant.numerics.binomial import log_shifted_hockey_stick
from jaxdp_episodic.bounds import (
    KINDS,
    shuffled_delta,
    shuffled_epsilon,
    shuffled_epsilon_closed_form,
)
from rows import fast_and_slow


def answered(eps0, n, eps, ones):
    """Shuffled answers by convolution over the users, one after the other."""
    truth = 1 / (1 + np.exp(-eps0))
    dists = {bit: [1 - truth, truth] if bit else [truth, 1 - truth] for bit in (0, 1)}
    others = np.array([1.0])
    for bit in [1] * ones + [0] * (n - 1 - ones):
        others = np.convolve(others, dists[bit])
    zero, one = (np.convolve(others, dists[bit]) for bit in (0, 1))
    g = np.exp(eps)
    return max(np.maximum(a - g * b, 0).sum() for a, b in ((one, zero), (zero, one)))


def random_settings(count, most_users, seed):
    rng = np.random.default_rng(seed)
    n = np.floor(10 ** rng.uniform(0, np.log10(most_users), count)).astype(int)
    eps0 = 10 ** rng.uniform(-2, 0.9, count)
    return eps0, n, eps0 * rng.uniform(0, 1, count)


def test_exact_answers_by_enumeration():
    rng = np.random.default_rng(2)
    for eps0, n, eps in zip(*random_settings(60, 200, 2), strict=True):
        ones = int(rng.integers(n))
        value = exact_randomized_response_delta(
            eps0, num_users=n, epsilon=eps, num_other_ones=ones
        )
        expected = answered(eps0, n, eps, ones)
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("count", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_upper_exact_lower_in_order(count):
    """The exact value at random data, and at data that agree."""
    eps0, n, eps = random_settings(count, 500, 3)
    ones = np.random.default_rng(3).integers(0, n)
    upper, response, lower = (
        shuffled_delta(eps0, num_users=n, epsilon=eps, kind=k) for k in KINDS
    )
    for k in (ones, np.zeros_like(n), n - 1):
        exact = exact_randomized_response_delta(
            eps0, num_users=n, epsilon=eps, num_other_ones=k
        )
        assert np.all(response * (1 + 1e-9) + 1e-14 >= exact)
    agree = exact  # all others hold a one
    assert np.all(lower >= agree * (1 - 1e-8) - 1e-14)
    assert np.all(upper * (1 + 1e-9) + 1e-14 >= response)
    assert np.all(upper * (1 + 1e-9) + 1e-14 >= lower)


@pytest.mark.slow
@pytest.mark.parametrize("n", [200, 2_000])
@pytest.mark.parametrize(("eps0", "share"), [(0.3, 0.2), (1.0, 0.1), (4.0, 0.3)])
def test_worst_data_at_2000_users(n, eps0, share):
    """Every data set there is, in both directions, below the bound for all."""
    eps = eps0 * share
    worst = exact_randomized_response_delta(eps0, num_users=n, epsilon=eps)
    exact = max(answered(eps0, n, eps, k) for k in range(0, n, max(1, n // 20)))
    assert worst >= exact * (1 - 1e-9)
    bound = shuffled_delta(eps0, num_users=n, epsilon=eps, kind="randomized_response")
    assert bound >= worst


@pytest.mark.parametrize("n", [100_000, 10_000_000])
@pytest.mark.parametrize(("eps0", "delta"), [(0.5, 1e-6), (3.0, 1e-6), (3.0, 1e-12)])
def test_blocks_cost_little(n, eps0, delta):
    """Where a block holds many clone counts: the sum over every single one."""
    eps = shuffled_epsilon(eps0, num_users=n, delta=delta)
    chance = np.exp(-eps0)
    spread = np.sqrt(n * chance * (1 - chance))
    c = np.arange(
        max(0, int(n * chance - 10 * spread)), min(n, int(n * chance + 10 * spread))
    ).astype(float)
    own = 1 / (1 + np.exp(-eps0))
    sticks = log_shifted_hockey_stick(
        c,
        np.array(1.0),
        np.array(own),
        np.array(1 - own),
        np.expm1(eps),
        side="lower",
    )
    exact = np.sum(scipy.stats.binom.pmf(c, n - 1, chance) * np.exp(sticks))
    value = shuffled_delta(eps0, num_users=n, epsilon=eps)
    assert exact * (1 - 1e-7) <= value <= exact * 1.01


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", fast_and_slow(KINDS, lambda kind: kind != "lower"))
def test_epsilon_inverts_delta(kind):
    n = np.array([30, 10**9])[:, None]
    eps0 = np.array([0.1, 1.0, 4.0])
    delta = 1e-6
    eps = shuffled_epsilon(eps0, num_users=n, delta=delta, kind=kind)
    assert eps.shape == (2, 3) and eps.dtype == np.float64
    at, beside = (
        shuffled_delta(eps0, num_users=n, epsilon=eps * f, kind=kind)
        for f in (1, 1 - 1e-6)
    )
    if kind == "lower":
        assert np.all((at >= delta) | (eps == 0))
    else:
        assert np.all(at <= delta)
        assert np.all((beside >= delta) | (eps == eps0))
    one = shuffled_epsilon(1.0, num_users=30, delta=delta, kind=kind)
    assert isinstance(one, np.float64) and one == eps[0, 1]


@pytest.mark.slow
def test_randomized_response_is_never_above_the_bound_for_any_randomizer():
    """Where its own bound is above, by its blocks: 2.6 % at the first setting."""
    n = np.array([10**7, 10**7, 10**9, 10**12])
    eps0 = np.array([0.01, 0.02, 0.001, 0.0001])
    any_, response = (
        shuffled_epsilon(eps0, num_users=n, delta=1e-6, kind=k) for k in KINDS[:2]
    )
    assert np.all(response <= any_)
    eps = np.geomspace(1e-8, 1e-4, 20)
    any_, response = (
        shuffled_delta(0.01, num_users=10**7, epsilon=eps, kind=k) for k in KINDS[:2]
    )
    assert np.all(response <= any_)


def test_edges():
    for kind in KINDS:
        assert shuffled_delta(0.0, num_users=10, epsilon=0.0, kind=kind) == 0
        assert shuffled_delta(1.0, num_users=10, epsilon=1.0, kind=kind) == 0
        alone = shuffled_delta(1.0, num_users=1, epsilon=0.0, kind=kind)
        low, high = np.tanh(0.5) * (1 - 1e-8), np.tanh(0.5) * (1 + 1e-8)
        assert low <= alone <= high
        assert shuffled_epsilon(1.0, num_users=10**6, delta=0.0, kind=kind) == 1
        assert 0 <= shuffled_delta(100.0, num_users=50, epsilon=1.0, kind=kind) <= 1
    # Where the condition of the closed form fails, the local epsilon itself.
    assert shuffled_epsilon_closed_form(3.0, num_users=10, delta=1e-6) == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_users": 0}, ValueError),
        ({"num_users": 2.5}, ValueError),
        ({"local_epsilon": -1}, ValueError),
        ({"local_epsilon": 1e3}, ValueError),
        ({"epsilon": np.nan}, ValueError),
        ({"kind": "exact"}, ValueError),
        ({"local_epsilon": "1"}, TypeError),
        ({"local_epsilon": [1, 2], "epsilon": [0, 0, 0]}, ValueError),
    ],
)
def test_refused(change, error):
    setting = {"local_epsilon": 1.0, "num_users": 10, "epsilon": 0.5, **change}
    with pytest.raises(error):
        shuffled_delta(setting.pop("local_epsilon"), **setting)


def test_too_many_users_for_enumeration():
    with pytest.raises(NotImplementedError, match="kind='randomized_response'"):
        exact_randomized_response_delta(1.0, num_users=2_001, epsilon=0.5)
    with pytest.raises(NotImplementedError, match="mixed"):
        exact_randomized_response_delta(
            1.0, num_users=10**6, epsilon=0.5, num_other_ones=5
        )
    value = exact_randomized_response_delta(
        1.0, num_users=10**9, epsilon=1e-4, num_other_ones=0
    )
    assert 0 < value < 1e-4
    with pytest.raises(ValueError, match="num_other_ones"):
        exact_randomized_response_delta(
            1.0, num_users=10, epsilon=0.5, num_other_ones=10
        )

"""Composition: against the sums at 60 digits, and Gaussian limits."""

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.bounds import (
    compose_closed_form,
    compose_naive,
    compose_optimal_delta,
    compose_optimal_epsilon,
    compose_strong,
    smallest_epsilon,
)


def published_delta(eps, k, total):
    """The sum of the theorem, literally."""
    with mp.workdps(60):
        e, t = mp.mpf(eps), mp.mpf(total)
        terms = (
            mp.binomial(k, j) * max(0, mp.exp(j * e) - mp.exp(t + (k - j) * e))
            for j in range(k + 1)
        )
        return float(mp.fsum(terms) / (1 + mp.exp(e)) ** k)


@pytest.mark.slow
def test_optimal_at_60_digits():
    rng = np.random.default_rng(0)
    for _ in range(200):
        k = int(10 ** rng.uniform(0, 2.3))
        eps = 10 ** rng.uniform(-3, 0.5)
        total = k * eps * rng.uniform(0, 1) ** 2
        value = compose_optimal_delta(eps, 0.0, num_steps=k, total_epsilon=total)
        exact = published_delta(eps, k, total)
        assert value >= exact * (1 - 1e-12)
        assert value <= exact * (1 + 1e-8) + 1e-13 * (exact > 1e-6)


def test_optimal_of_steps_with_large_epsilons():
    """Epsilons of 10 to 1,500 a step; totals near their sum or between two values."""
    value = compose_optimal_delta(35.0, 1e-12, num_steps=22, total_epsilon=769.3421)
    assert value == pytest.approx(0.4820621372879, rel=1e-9)
    rng = np.random.default_rng(5)
    for i in range(30):
        k = int(10 ** rng.uniform(0, 1.7))
        eps = 10 ** rng.uniform(1, 3.2)
        total = k * eps - 10 ** rng.uniform(-6, 1)
        if i % 2:
            total = max(k * eps - 2 * eps * rng.uniform(0, 3), 0.0)
        value = compose_optimal_delta(eps, 0.0, num_steps=k, total_epsilon=total)
        exact = published_delta(eps, k, total)
        assert exact * (1 - 1e-15) <= value <= exact * (1 + 1e-9)


@pytest.mark.slow
def test_order_of_the_bounds():
    """1,000 settings: optimal <= closed form <= strong, and optimal <= naive."""
    rng = np.random.default_rng(1)
    k = np.floor(10 ** rng.uniform(0, 6, 1_000))
    eps = 10 ** rng.uniform(-4, 0.3, 1_000)
    slack = 10 ** rng.uniform(-12, -2, 1_000)
    delta = slack * rng.uniform(0, 1, 1_000) / k
    closed, total = compose_closed_form(eps, delta, num_steps=k, slack=slack)
    strong, strong_total = compose_strong(eps, delta, num_steps=k, slack=slack)
    naive, naive_total = compose_naive(eps, delta, num_steps=k)
    best = compose_optimal_epsilon(eps, delta, num_steps=k, total_delta=total)
    assert np.all(best <= closed * (1 + 1e-6))
    assert np.all(closed <= np.minimum(strong, naive) * (1 + 1e-9))
    assert np.all(naive_total <= total)
    assert np.all(total <= strong_total * (1 + 1e-12))
    again = compose_optimal_delta(eps, delta, num_steps=k, total_epsilon=best)
    assert np.all(again <= total * (1 + 1e-9))


def test_many_small_steps_are_gaussian():
    """k steps of mu/sqrt(k) answer like one Gaussian: delta within a percent."""
    k, mu = 10**6, 1.0
    value = compose_optimal_delta(
        mu / np.sqrt(k), 0.0, num_steps=k, total_epsilon=np.array([0.5, 1, 3])
    )
    phi = np.vectorize(lambda x: float(mp.ncdf(x)))
    eps = np.array([0.5, 1, 3])
    gaussian = phi(mu / 2 - eps / mu) - np.exp(eps) * phi(-mu / 2 - eps / mu)
    np.testing.assert_allclose(value, gaussian, rtol=1e-2)


def test_composition_at_extremes():
    assert compose_naive(1.0, 0.3, num_steps=0) == (0, 0)
    assert compose_naive(np.inf, 0.3, num_steps=0) == (0, 0)
    assert compose_naive(1.0, 0.3, num_steps=10) == (10, 1)
    assert compose_optimal_delta(1.0, 0.0, num_steps=0, total_epsilon=0.0) == 0
    assert compose_optimal_delta(0.0, 0.0, num_steps=9, total_epsilon=0.0) == 0
    assert compose_optimal_delta(np.inf, 0.0, num_steps=1, total_epsilon=5.0) == 1
    assert compose_optimal_delta(1.0, 1.0, num_steps=1, total_epsilon=9.0) == 1
    assert compose_optimal_delta(1.0, 0.0, num_steps=3, total_epsilon=3.0) == 0
    assert compose_optimal_epsilon(1.0, 0.1, num_steps=3, total_delta=0.1) == np.inf
    three = compose_optimal_epsilon(1.0, 0.0, num_steps=3, total_delta=0.0)
    assert three == pytest.approx(3, rel=1e-12)
    assert compose_optimal_epsilon(np.inf, 0.0, num_steps=1, total_delta=0.1) == np.inf
    with pytest.raises(ValueError, match="slack"):
        compose_strong(1.0, 0.0, num_steps=1, slack=0.0)
    with pytest.raises(ValueError, match="num_steps"):
        compose_naive(1.0, 0.0, num_steps=-1)
    with pytest.raises(ValueError, match="broadcast"):
        compose_naive([1.0, 2.0], 0.0, num_steps=[1, 2, 3])
    with pytest.raises(TypeError):
        compose_naive("1", 0.0, num_steps=1)


# --- The smallest epsilon of a decreasing delta ---


def test_known_inverse_from_above():
    """1,000 targets for ``log delta = -scale * epsilon``."""
    rng = np.random.default_rng(0)
    scale = 10 ** rng.uniform(-2, 3, 1_000)
    answer = 10 ** rng.uniform(-3, 2, 1_000)
    found = smallest_epsilon(
        lambda eps, rows: -scale[rows] * eps, -scale * answer, np.full(1_000, 100.0)
    )
    assert np.all(scale * found >= scale * answer)
    np.testing.assert_allclose(found, answer, rtol=3e-7)


def test_smallest_epsilon_at_extremes():
    target = np.log(np.array([0.5, 0.5, 0.5, 0.5]))
    largest = np.array([np.inf, 0.0, 2.0, 3.0])
    start = np.array([0.0, 0.0, np.log(0.4), 0.0])

    def log_delta(eps, rows):
        return start[rows] - np.where(eps >= 3, np.inf, 0.0)

    found = smallest_epsilon(log_delta, target, largest)
    # Unreachable; always met; met at 0; met only at the last jump.
    assert found[0] == np.inf and found[1] == 0 and found[2] == 0
    assert 3 * (1 - 1e-6) <= found[3] <= 3


def test_no_settings():
    empty = np.zeros(0)
    assert smallest_epsilon(lambda e, r: e, empty, empty).shape == (0,)

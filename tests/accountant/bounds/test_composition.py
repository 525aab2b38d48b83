"""Composition: against the sums at 60 digits, and Gaussian limits."""

import functools
from fractions import Fraction

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
from oracles.finite_distributions import assert_between, stick, worst_pair

COUNT = 1_000


def published_delta(eps, k, total):
    """The sum of the theorem, literally."""
    with mp.workdps(60):
        e, t = mp.mpf(eps), mp.mpf(total)
        terms = (
            mp.binomial(k, j) * max(0, mp.exp(j * e) - mp.exp(t + (k - j) * e))
            for j in range(k + 1)
        )
        return float(mp.fsum(terms) / (1 + mp.exp(e)) ** k)


def test_optimal_at_60_digits():
    """Small epsilons, and 10 to 1,500 a step; totals also near their sum."""
    value = compose_optimal_delta(35.0, 1e-12, num_steps=22, total_epsilon=769.3421)
    assert value == pytest.approx(0.4820621372879, rel=1e-9)
    rng = np.random.default_rng(0)
    for i in range(90):
        k = int(10 ** rng.uniform(0, 1.7))
        eps = 10 ** (rng.uniform(-3, 0.5) if i % 3 else rng.uniform(1, 3.2))
        total = k * eps * rng.uniform(0, 1) ** 2
        if i % 3 == 0:
            near = [10 ** rng.uniform(-6, 1), 2 * eps * rng.uniform(0, 3)]
            total = max(k * eps - near[i % 2], 0.0)
        value = compose_optimal_delta(eps, 0.0, num_steps=k, total_epsilon=total)
        exact = published_delta(eps, k, total)
        above = exact * (1e-7 if eps < 10 else 1e-5) + 1e-13 * (exact > 1e-6)
        assert exact * (1 - 1e-12) <= value <= exact + above


def test_many_small_steps_are_gaussian():
    """k steps of mu/sqrt(k) answer like one Gaussian: delta within a percent."""
    k, mu, eps = 10**6, 1.0, np.array([0.5, 1, 3])
    step = mu / np.sqrt(k)
    value = compose_optimal_delta(step, 0.0, num_steps=k, total_epsilon=eps)
    phi = np.vectorize(lambda x: float(mp.ncdf(x)))
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
    empty = np.zeros(0)
    assert smallest_epsilon(lambda e, r: e, empty, empty).shape == (0,)


# --- Enumerated outputs, and fractions ---


def enumerated_delta(epsilon, delta, num_steps, total):
    """Hockey stick of the product of worst-case pairs: all 4^k outputs of k steps."""
    first, second = worst_pair(epsilon, delta)
    p = q = np.ones((len(epsilon), 1))
    for _ in range(num_steps):
        p = (p[:, :, None] * first[:, None, :]).reshape(len(epsilon), -1)
        q = (q[:, :, None] * second[:, None, :]).reshape(len(epsilon), -1)
    return stick(p, q, total)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_composition_by_enumeration(num_steps):
    """200 settings for each number of steps: "optimal" is exact, others are above."""
    rng = np.random.default_rng(30 + num_steps)
    count = COUNT // 5
    eps = 10 ** rng.uniform(-2, 0.5, count)
    delta = 10 ** rng.uniform(-8, -1, count) * rng.integers(0, 2, count)
    slack = 10 ** rng.uniform(-8, -1, count)
    total = num_steps * eps * rng.uniform(0, 1.05, count)
    exact = functools.partial(enumerated_delta, eps, delta, num_steps)
    value = compose_optimal_delta(eps, delta, num_steps=num_steps, total_epsilon=total)
    assert_between(0, exact(total), value)
    np.testing.assert_allclose(value, exact(total), rtol=1e-7, atol=1e-12)
    for bound in (compose_strong, compose_closed_form):
        at, price = bound(eps, delta, num_steps=num_steps, slack=slack)
        assert_between(0, exact(at), price)
    at, price = compose_naive(eps, delta, num_steps=num_steps)
    assert_between(0, exact(at), price)
    failing = -np.expm1(num_steps * np.log1p(-delta))
    target = failing + (1 - failing) * 10 ** rng.uniform(-6, -0.1, count)
    smallest = compose_optimal_epsilon(
        eps, delta, num_steps=num_steps, total_delta=target
    )
    assert np.all(exact(smallest) <= target * (1 + 1e-9))
    below = smallest * (1 - 1e-5)
    assert np.all((exact(below) > target * (1 - 1e-9)) | (smallest == 0))


def test_sums_are_rounded_up():
    """Against fractions: a total is never below the real one, and within three ulp."""
    rng = np.random.default_rng(36)
    k = np.floor(10 ** rng.uniform(0, 9, COUNT))
    eps, delta = 10 ** rng.uniform(-6, 1, COUNT), 10 ** rng.uniform(-15, -10, COUNT)
    slack = 10 ** rng.uniform(-12, -2, COUNT)
    total, price = compose_naive(eps, delta, num_steps=k)
    _, more = compose_strong(eps, delta, num_steps=k, slack=slack)
    for row in range(COUNT):
        steps, d = int(k[row]), Fraction(delta[row])
        for value, exact in (
            (total[row], steps * Fraction(eps[row])),
            (price[row], steps * d),
            (more[row], steps * d + Fraction(slack[row])),
        ):
            assert exact <= Fraction(value) <= exact * (1 + Fraction(3, 2**52))

"""Privacy amplification by iteration, against runs whose law is known.

Exact Gaussian runs, searched splits, and the distributions of projected noisy runs
followed step by step.
"""

import functools

import numpy as np
import pytest
import scipy.special

from jaxdp_episodic.accountant.bounds import iteration
from jaxdp_episodic.bounds import (
    Gaussian,
    bounded_iteration_rdp,
    full_batch_rho,
    one_pass_rho,
    optimal_noise_stds,
    rho_to_epsilon,
)
from oracles.finite_distributions import assert_between

COUNT = 150


def test_published_constants():
    """Theorem 23: alpha 2 L² / (sigma² (n + 1 - t)) at constant steps and noise."""
    n, lipschitz, sigma = 50, 0.7, 1.3
    rho = one_pass_rho(
        learning_rates=np.full(n, 0.1),
        noise_stds=sigma,
        lipschitz=lipschitz,
        smoothness=2.0,
        strong_convexity=0.0,
    )
    expected = 2 * lipschitz**2 / (sigma**2 * (n + 1 - np.arange(1, n + 1)))
    np.testing.assert_allclose(rho, expected, rtol=1e-11)


def test_upper_bound_of_exact_gaussian_runs():
    """300 runs on quadratic losses, whose last iterate is Gaussian: exact <= bound.

    Loss ``m/2 theta² - y theta``: the step is ``(1 - eta m) theta + eta y + noise``;
    changing y by 2 L moves the last iterate by ``s_t C_t`` under the noise of *all*
    steps. At t = 1 nothing precedes and the two agree.
    """
    rng = np.random.default_rng(1)
    for _ in range(300):
        steps, curvature = int(rng.integers(1, 30)), 10 ** rng.uniform(-1, 1)
        lipschitz, batch = 10 ** rng.uniform(-1, 1), int(rng.integers(1, 9))
        eta = rng.uniform(0.01, 0.6, steps) / curvature
        noise = rng.uniform(0, 3, steps) * (rng.random(steps) > 0.2) + 0.1
        c = np.abs(1 - eta * curvature)
        carry = np.array([np.prod(c[i + 1 :]) for i in range(steps)])
        variance = np.sum((eta * noise * carry) ** 2)
        exact = (2 * eta * lipschitz / batch * carry) ** 2 / (2 * variance)
        bound = one_pass_rho(
            learning_rates=eta,
            noise_stds=noise,
            lipschitz=lipschitz,
            smoothness=curvature,
            strong_convexity=curvature,
            batch_size=batch,
        )
        assert np.all(bound >= exact * (1 - 1e-12))
        assert bound[0] == pytest.approx(exact[0], rel=1e-10)


def test_a_single_target_needs_noise_in_the_last_step():
    setting = {"lipschitz": 1.0, "smoothness": 1.0, "strong_convexity": 0.0}
    best = optimal_noise_stds(0.5, learning_rates=np.full(20, 0.1), **setting)
    assert np.all(best[:-1] == 0)
    assert best[-1] == pytest.approx(2.0)
    shrinking = 0.5 / np.sqrt(np.arange(1, 21))
    best = optimal_noise_stds(0.5, learning_rates=shrinking, **setting)
    assert np.all(best > 0)
    rho = one_pass_rho(learning_rates=shrinking, noise_stds=best, **setting)
    np.testing.assert_allclose(rho, 0.5, rtol=1e-10)


def test_rho_to_epsilon():
    rho = 10.0 ** np.linspace(-8, 4, 40)[:, None]
    delta = np.array([1e-3, 1e-8, 1e-15])
    eps = rho_to_epsilon(rho, delta=delta)
    assert eps.shape == (40, 3)
    alpha = 1 + 10.0 ** np.linspace(-6, 9, 60_001)
    for i in range(0, 40, 3):
        for j in range(3):
            curve = rho[i, 0] * alpha + np.log1p(-1 / alpha)
            curve -= (np.log(delta[j]) + np.log(alpha)) / (alpha - 1)
            expected = max(curve.min(), 0.0)
            assert eps[i, j] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    # Above the exact epsilon of a Gaussian with this rho.
    sigma = 1 / np.sqrt(2 * rho)
    assert np.all(Gaussian(np.broadcast_to(sigma, eps.shape)).delta(eps) <= delta)
    assert rho_to_epsilon(0.0, delta=0.1) == 0
    assert rho_to_epsilon(np.inf, delta=0.1) == np.inf


BOUNDED = {"lipschitz": 1.0, "smoothness": 2.0, "learning_rate": 0.05}


def test_full_batch_is_composition_then_constant():
    steps = np.array([0, 1, 7, 10**3, 10**5, 10**7, 10**9])
    rho, free = (
        full_batch_rho(
            num_steps=steps,
            num_examples=100,
            noise_std=0.5,
            strong_convexity=0.0,
            diameter=diameter,
            **BOUNDED,
        )
        for diameter in (1.0, np.inf)
    )
    composed = 2 * steps / (100 * 0.5) ** 2
    np.testing.assert_allclose(rho[:4], composed[:4], rtol=1e-9)
    settled = 4 * 1.0 / (100 * 0.05 * 0.5**2)
    np.testing.assert_allclose(rho[4:], settled, rtol=1e-3)
    np.testing.assert_allclose(free, composed, rtol=1e-9)


def test_invalid_arguments_are_refused():
    good = {
        "learning_rates": np.full(3, 0.1),
        "noise_stds": 1.0,
        "lipschitz": 1.0,
        "smoothness": 1.0,
        "strong_convexity": 0.0,
    }
    for change, word in (
        ({"learning_rates": np.full(3, 2.1)}, "2 / smoothness"),
        ({"learning_rates": 0.1}, "vector"),
        ({"noise_stds": [1.0, 2.0]}, "noise_stds"),
        ({"strong_convexity": 1.1}, "strong_convexity"),
        ({"lipschitz": 0.0}, "lipschitz"),
    ):
        with pytest.raises(ValueError, match=word):
            one_pass_rho(**{**good, **change})
    for missing in ("smoothness", "strong_convexity"):
        with pytest.raises(TypeError, match=missing):
            one_pass_rho(**{k: v for k, v in good.items() if k != missing})
    with pytest.raises(TypeError, match="diameter"):
        full_batch_rho(
            num_steps=1, num_examples=1, noise_std=1.0, strong_convexity=0.0, **BOUNDED
        )
    with pytest.raises(ValueError, match="batch_size"):
        bounded_iteration_rdp(
            orders=[2.0],
            num_steps=1,
            num_examples=5,
            batch_size=6,
            noise_std=1.0,
            strong_convexity=0.0,
            diameter=1.0,
            **BOUNDED,
        )


# --- Runs followed step by step ---


def test_last_iterate_of_noise_schedules():
    """The spread of a run step by step; no schedule can be made cheaper."""
    rng = np.random.default_rng(60)
    for _ in range(COUNT):
        length, beta = int(rng.integers(1, 20)), 10 ** rng.uniform(-1, 1)
        setting = {
            "learning_rates": rng.uniform(0.05, 1.9, length) / beta,
            "smoothness": beta,
            "strong_convexity": beta * rng.choice([0.0, 0.1, 0.5]),
        }
        lipschitz, size = 10 ** rng.uniform(-1, 1), int(rng.integers(1, 9))
        target = 10 ** rng.uniform(-2, 1, length)
        best = optimal_noise_stds(
            target, lipschitz=lipschitz, batch_size=size, **setting
        )
        eta = setting["learning_rates"]
        slopes = (np.abs(1 - eta * setting["strong_convexity"]), np.abs(1 - eta * beta))
        variance = 0.0
        for factor, noise in zip(np.maximum(*slopes), eta * best, strict=True):
            variance = factor**2 * variance + noise**2
        value = iteration.final_variance(noise_stds=best, **setting)
        assert value == pytest.approx(variance, rel=1e-10)
        price = functools.partial(
            one_pass_rho, lipschitz=lipschitz, batch_size=size, **setting
        )
        assert np.all(price(noise_stds=best) <= target * (1 + 1e-9))
        used = np.flatnonzero(best > 1e-6 * best.max())
        less = best.copy()
        less[rng.choice(used)] *= 0.999
        assert np.any(price(noise_stds=less) > target)


class ProjectedRuns:
    """Noisy runs on an interval [0, D]: densities by Gauss-Legendre quadrature.

    After a step the iterate has atoms at both ends and a density between. Example i
    has the gradient ``m x + u_i``; the protected one's u is the least or the largest
    for which gradients stay within L = 1.
    """

    def __init__(self, rng, count, points=60):
        self.count = count
        self.steps = rng.integers(1, 40, count)
        self.examples = rng.integers(1, 12, count)
        self.diameter = 10 ** rng.uniform(-1, 0.7, count)
        self.spread = self.diameter * 10 ** rng.uniform(-0.8, 0.5, count)  # eta sigma
        curved = rng.random(count) < 0.5
        self.convexity = np.where(curved, rng.uniform(0, 1, count) / self.diameter, 0.0)
        self.smoothness = np.where(curved, self.convexity, 1.0)
        self.rate = rng.uniform(0.05, 1.9, count) / self.smoothness
        # Steps of at most a few diameters, as in practice.
        self.rate = np.minimum(self.rate, 3 * self.diameter)
        self.extremes = np.array([-np.ones(count), 1 - self.convexity * self.diameter])
        share = rng.choice([0.0, 1.0, 0.5], count)
        self.others = share * self.extremes[0] + (1 - share) * self.extremes[1]
        half, weight = np.polynomial.legendre.leggauss(points)
        self.nodes = (half + 1) / 2 * self.diameter[:, None]
        self.weight = weight / 2 * self.diameter[:, None]
        self.start = rng.integers(0, points + 2, count)

    def transition(self, pull):
        """(count, states, states): a step of gradient ``m x + pull``, projected."""
        column = [a[:, None] for a in (0 * self.diameter, self.diameter)]
        x = np.concatenate([column[0], self.nodes, column[1]], axis=1)
        eta, m, noise = (a[:, None] for a in (self.rate, self.convexity, self.spread))
        mean = (x - eta * (m * x + pull[:, None]))[:, :, None]
        noise = noise[:, :, None]
        z = (self.nodes[:, None, :] - mean) / noise
        inside = np.exp(-z * z / 2) / np.sqrt(2 * np.pi) / noise
        below = scipy.special.ndtr(-mean / noise)
        above = scipy.special.ndtr((mean - self.diameter[:, None, None]) / noise)
        return np.concatenate([below, inside * self.weight[:, None, :], above], axis=2)

    def rdp(self, batch, orders):
        """(count, K) of the last iterate, the larger of both directions."""
        dists = []
        drawn = (batch / self.examples)[:, None, None]
        without = self.transition(self.others)
        for own in self.extremes:
            pull = self.others + (own - self.others) / batch
            matrix = drawn * self.transition(pull) + (1 - drawn) * without
            dist = np.zeros(matrix.shape[:2])
            dist[np.arange(self.count), self.start] = 1
            for step in range(self.steps.max()):
                moved = np.einsum("si,sij->sj", dist, matrix)
                dist = np.where((step < self.steps)[:, None], moved, dist)
            np.testing.assert_allclose(dist.sum(axis=1), 1, atol=1e-9)
            dists.append(np.maximum(dist, 1e-300)[..., None])
        one, two = np.log(dists)
        moments = [
            scipy.special.logsumexp(orders * a + (1 - orders) * b, axis=1)
            for a, b in ((one, two), (two, one))
        ]
        return np.maximum(*moments) / (orders - 1)

    def setting(self, row):
        """Arguments of the bounds."""
        return {
            "num_steps": int(self.steps[row]),
            "num_examples": int(self.examples[row]),
            "learning_rate": float(self.rate[row]),
            "noise_std": float(self.spread[row] / self.rate[row]),
            "lipschitz": 1.0,
            "smoothness": float(self.smoothness[row]),
            "strong_convexity": float(self.convexity[row]),
            "diameter": float(self.diameter[row]),
        }


def test_projected_runs_with_full_batches():
    runs = ProjectedRuns(np.random.default_rng(62), COUNT)
    orders = np.array([1.5, 2.0, 8.0])
    exact = runs.rdp(runs.examples, orders)
    rho = np.array([full_batch_rho(**runs.setting(row)) for row in range(COUNT)])
    bound = rho[:, None] * orders
    assert_between(0, exact, bound, rtol=1e-7, atol=1e-9)
    assert np.max(exact / bound) > 0.9


def test_projected_runs_with_random_batches():
    count = 40
    runs = ProjectedRuns(np.random.default_rng(63), count)
    batch = np.ceil(runs.examples * np.random.default_rng(64).uniform(0, 1, count))
    orders = np.array([1.5, 2.0, 8.0])
    exact = runs.rdp(batch, orders)
    bound = np.array(
        [
            bounded_iteration_rdp(
                orders=orders, batch_size=int(batch[row]), **runs.setting(row)
            )
            for row in range(count)
        ]
    )
    assert_between(0, exact, bound, rtol=1e-7, atol=1e-9)
    assert np.max(exact / bound) > 0.3

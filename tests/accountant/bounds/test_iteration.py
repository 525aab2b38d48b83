"""Privacy amplification by iteration: exact Gaussian runs, and searched splits."""

import numpy as np
import pytest

from jaxdp_episodic.bounds import (
    Gaussian,
    bounded_iteration_rdp,
    contraction_factors,
    full_batch_rho,
    one_pass_rho,
    optimal_noise_stds,
    rho_to_epsilon,
)


def random_run(rng):
    steps = int(rng.integers(1, 30))
    beta = 10 ** rng.uniform(-1, 1)
    m = beta * rng.uniform(0, 1) * rng.integers(0, 2)
    eta = rng.uniform(0.01, 2, steps) / beta
    sigma = rng.uniform(0, 3, steps) * (rng.random(steps) > 0.2)
    return {
        "learning_rates": eta,
        "noise_stds": sigma,
        "lipschitz": 10 ** rng.uniform(-1, 1),
        "smoothness": beta,
        "strong_convexity": m,
        "batch_size": int(rng.integers(1, 9)),
    }


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


def test_best_parts_by_random_search():
    """1,000 runs: no random split of the difference is cheaper than the optimum.

    With parts a_i: z_t = s - a_t, z_i = c_i z_{i-1} - a_i, all z >= 0, z_T = 0.
    """
    rng = np.random.default_rng(0)
    for _ in range(1_000):
        run = random_run(rng)
        rho = one_pass_rho(**run)
        eta, sigma = run["learning_rates"], run["noise_stds"]
        c = contraction_factors(
            eta, smoothness=run["smoothness"], strong_convexity=run["strong_convexity"]
        )
        t = int(rng.integers(len(eta)))
        s = 2 * eta[t] * run["lipschitz"] / run["batch_size"]
        w = (eta * sigma) ** 2
        if not np.any(w[t:] > 0):
            assert rho[t] == np.inf
            continue
        carry = np.array([np.prod(c[i + 1 :]) for i in range(len(eta))])
        best = w[t:] * carry[t:]
        if np.sum(best * carry[t:]) < 1e-200:
            continue
        best *= s * carry[t] / np.sum(best * carry[t:])
        z, cost = s, 0.0
        for i, a in enumerate(best, start=t):
            z = (z if i == t else c[i] * z) - a
            cost += a**2 / (2 * w[i]) if a > 0 else 0.0
            assert z >= -1e-9 * s
        assert abs(z) <= 1e-9 * s
        assert rho[t] == pytest.approx(cost, rel=1e-8)
        other = best * rng.uniform(0.2, 5, best.size)
        if np.sum(other * carry[t:]) < 1e-200:
            continue
        other *= s * carry[t] / np.sum(other * carry[t:])
        noisy = w[t:] > 0
        worse = np.sum(other[noisy] ** 2 / (2 * w[t:][noisy]))
        assert worse >= rho[t] * (1 - 1e-9)


def test_upper_bound_of_exact_gaussian_runs():
    """1,000 runs on quadratic losses, whose last iterate is Gaussian: exact <= bound.

    Loss ``m/2 theta² - y theta``: the step is ``(1 - eta m) theta + eta y + noise``;
    changing y by 2 L moves the last iterate by ``s_t C_t`` under the noise of *all*
    steps. At t = 1 nothing precedes and the two agree.
    """
    rng = np.random.default_rng(1)
    for _ in range(1_000):
        run = random_run(rng)
        run["strong_convexity"] = run["smoothness"] = 10 ** rng.uniform(-1, 1)
        run["learning_rates"] = rng.uniform(0.01, 0.6, len(run["learning_rates"]))
        run["learning_rates"] /= run["smoothness"]
        run["noise_stds"] = run["noise_stds"] + 0.1
        eta = run["learning_rates"]
        c = np.abs(1 - eta * run["smoothness"])
        carry = np.array([np.prod(c[i + 1 :]) for i in range(len(eta))])
        variance = np.sum((eta * run["noise_stds"] * carry) ** 2)
        shift = 2 * eta * run["lipschitz"] / run["batch_size"] * carry
        exact = shift**2 / (2 * variance)
        bound = one_pass_rho(**run)
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
    rho = full_batch_rho(
        num_steps=steps,
        num_examples=100,
        noise_std=0.5,
        strong_convexity=0.0,
        diameter=1.0,
        **BOUNDED,
    )
    composed = 2 * steps / (100 * 0.5) ** 2
    assert rho[0] == 0
    np.testing.assert_allclose(rho[1:4], composed[1:4], rtol=1e-9)
    settled = 4 * 1.0 / (100 * 0.05 * 0.5**2)
    np.testing.assert_allclose(rho[4:], settled, rtol=1e-3)
    free = full_batch_rho(
        num_steps=steps,
        num_examples=100,
        noise_std=0.5,
        strong_convexity=0.0,
        diameter=np.inf,
        **BOUNDED,
    )
    np.testing.assert_allclose(free, composed, rtol=1e-9)


def test_random_batches():
    steps = np.array([0, 1, 100, 10**7, 10**9])
    setting = {
        "orders": [1.5, 2.0, 8.0],
        "num_examples": 1_000,
        "noise_std": 0.5,
        "strong_convexity": 0.0,
        "diameter": 1.0,
        **BOUNDED,
    }
    rdp = bounded_iteration_rdp(num_steps=steps, batch_size=50, **setting)
    assert rdp.shape == (5, 3) and np.all(rdp[0] == 0)
    assert np.all(np.diff(rdp, axis=0)[:2] > 0)
    np.testing.assert_allclose(rdp[3], rdp[4], rtol=1e-12)
    # Full batches: no sampling, hence the composition of Gaussians, and
    # above the bound without a split.
    whole = bounded_iteration_rdp(num_steps=steps, batch_size=1_000, **setting)
    full = full_batch_rho(
        num_steps=steps,
        num_examples=1_000,
        noise_std=0.5,
        strong_convexity=0.0,
        diameter=1.0,
        **BOUNDED,
    )
    orders = np.array(setting["orders"])
    np.testing.assert_allclose(whole[1:3], full[1:3, None] * orders, rtol=1e-8)
    assert np.all(whole[3:] >= full[3:, None] * orders * (1 - 1e-9))
    assert np.all(whole[3:] <= 2.1 * full[3:, None] * orders)


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
        ({"strong_convexity": -1.0}, "strong_convexity"),
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


@pytest.mark.slow
def test_full_batch_above_exact_quadratic_runs():
    """Strongly convex quadratics without projection: exact rho of the last iterate.

    All steps use the changed example: it moves the last iterate by ``s sum c^i``, noise
    ``w sum c^{2i}``, which the bound without a diameter attains.
    """
    rng = np.random.default_rng(4)
    for _ in range(1_000):
        m, steps = 10 ** rng.uniform(-1, 0.2), int(rng.integers(1, 200))
        eta, n = rng.uniform(0.01, 0.9) / m, int(rng.integers(1, 50))
        sigma, diameter = rng.uniform(0.1, 2), 10 ** rng.uniform(-2, 3)
        c = (1 - eta * m) ** np.arange(steps)
        moved = 2 * eta / n * c.sum()
        exact = moved**2 / (2 * (eta * sigma) ** 2 * (c**2).sum())
        setting = {
            "num_steps": steps,
            "num_examples": n,
            "learning_rate": eta,
            "noise_std": sigma,
            "lipschitz": 1.0,
            "smoothness": m,
            "strong_convexity": m,
        }
        free = full_batch_rho(**setting, diameter=np.inf)
        assert free == pytest.approx(exact, rel=1e-9)
        bound = full_batch_rho(**setting, diameter=diameter)
        assert bound <= free * (1 + 1e-12)
        # A diameter that the runs never reach changes nothing.
        if diameter > 2 * moved:
            assert bound >= exact * (1 - 1e-9)

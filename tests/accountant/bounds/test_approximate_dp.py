"""Subsampling of (epsilon, delta): identities, edges, and values at 60 digits."""

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.bounds import (
    Gaussian,
    Laplace,
    RandomizedResponse,
    RdpTable,
    advanced_joint_convexity,
    amplified_epsilon,
    amplify_poisson,
    amplify_without_replacement,
    delta_poisson_subsampled,
    delta_with_replacement_subsampled,
    delta_without_replacement_subsampled,
    group_delta,
    subsampled_response_epsilon,
    unamplified_epsilon,
)


def stick(first, second, g):
    return np.maximum(first - g * second, 0).sum()


def test_joint_convexity_identity():
    """1,000 random mixtures: both sides of the identity, computed separately."""
    rng = np.random.default_rng(2)
    for _ in range(1_000):
        shared, first, second = rng.dirichlet(np.ones(6) * 0.5, 3)
        r, eps = rng.uniform(0.01, 1), rng.uniform(0, 4)
        outer, delta = advanced_joint_convexity(
            shared, first, second, rate=r, epsilon=eps
        )
        one, two = ((1 - r) * shared + r * dist for dist in (first, second))
        assert delta == pytest.approx(stick(one, two, np.exp(outer)), abs=1e-13)


def test_group_delta_covers_more_noise_for_less():
    eps, k = np.array([0.0, 0.1, 1.0, 5.0]), np.array([1, 2, 7, 40])[:, None]
    for mechanism, grouped in (
        (Gaussian(3.0), Gaussian(3.0 / k)),
        (Laplace(2.0), Laplace(2.0 / k)),
    ):
        bound = group_delta(mechanism, group_size=k, epsilon=eps)
        assert np.all(bound >= grouped.delta(eps) * (1 - 1e-12))
        np.testing.assert_allclose(bound[0], mechanism.delta(eps), rtol=1e-13)


def test_epsilons_at_60_digits():
    rates = np.array([1e-15, 1e-6, 0.3, 1 - 1e-12, 1.0])
    for eps in (0.0, 1e-14, 1e-3, 1.0, 1.0 + 1e-12, 30.0, 900.0):
        for r in rates:
            with mp.workdps(60):
                rise = mp.expm1(mp.mpf(eps))
                up = float(mp.log1p(mp.mpf(r) * rise))
                down = float(mp.log1p(rise / mp.mpf(r)))
            value = amplified_epsilon(eps, rate=r)
            assert up * (1 - 1e-16) <= value <= up * (1 + 1e-13) + 1e-300
            inner = unamplified_epsilon(eps, rate=r)
            assert down * (1 - 1e-12) <= inner <= down * (1 + 3e-16)
    assert amplified_epsilon(np.inf, rate=0.1) == np.inf
    assert amplified_epsilon(np.inf, rate=0.0) == 0
    assert unamplified_epsilon(1.0, rate=0.0) == np.inf


def test_guarantee_agrees_with_the_lecture():
    eps, delta = amplify_without_replacement(1.0, 1e-5, size=50, population=1_000)
    assert eps == pytest.approx(np.log(1 + 0.05 * (np.e - 1)), rel=1e-14)
    assert delta == pytest.approx(5e-7, rel=1e-14)
    assert amplify_poisson(1.0, 1e-5, sampling_probability=0.05) == (eps, delta)
    assert amplify_poisson(1.0, 1e-5, sampling_probability=1.0)[0] == 1
    assert amplify_poisson(1.0, 1e-5, sampling_probability=0.0) == (0, 0)
    # The misprint "+ 1" for "- 1" would not go to 0 with epsilon.
    assert amplify_poisson(0.0, 0.0, sampling_probability=0.5) == (0, 0)


def test_with_replacement_edges():
    gaussian = Gaussian(1.0)
    kwargs = {"population": 10, "epsilon": 0.5}
    assert delta_with_replacement_subsampled(gaussian, size=0, **kwargs) == 0
    once = delta_with_replacement_subsampled(gaussian, size=1, **kwargs)
    subset = delta_without_replacement_subsampled(gaussian, size=1, **kwargs)
    assert once == pytest.approx(subset, rel=1e-9)
    alone = delta_with_replacement_subsampled(
        gaussian, size=3, population=1, epsilon=0.5
    )
    assert alone == pytest.approx(Gaussian(1 / 3).delta(0.5), rel=1e-9)
    big = delta_with_replacement_subsampled(
        Gaussian(2.0), size=10**6, population=10**6, epsilon=1.0
    )
    assert 0 < big < 1


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="size"):
        amplify_without_replacement(1.0, 0.0, size=11, population=10)
    with pytest.raises(ValueError, match="sampling_probability"):
        amplify_poisson(1.0, 0.0, sampling_probability=1.1)
    with pytest.raises(ValueError, match="delta"):
        amplify_poisson(1.0, -0.1, sampling_probability=0.5)
    with pytest.raises(NotImplementedError, match="profile"):
        delta_poisson_subsampled(
            RdpTable(np.ones(3)), sampling_probability=0.5, epsilon=1.0
        )
    with pytest.raises(ValueError, match="profile"):
        delta_poisson_subsampled(lambda e: e + 2, sampling_probability=0.5, epsilon=1.0)
    with pytest.raises(TypeError, match="mechanism"):
        delta_poisson_subsampled(3, sampling_probability=0.5, epsilon=1.0)
    with pytest.raises(ValueError, match="one setting"):
        delta_with_replacement_subsampled(
            RandomizedResponse([1.0, 2.0]), size=1, population=2, epsilon=1.0
        )


def test_sampling_randomized_response_at_60_digits():
    """The mixture of the response and a fair coin, by its two probabilities."""
    rng = np.random.default_rng(1)
    eps, p = 10 ** rng.uniform(-6, 2, 1_000), rng.uniform(0, 1, 1_000)
    p[:100] = 1 - 10 ** rng.uniform(-15, -2, 100)
    values = subsampled_response_epsilon(eps, sampling_probability=p)
    for value, e, q in zip(values, eps, p, strict=True):
        with mp.workdps(60):
            truth = mp.mpf(q) / (1 + mp.exp(-mp.mpf(e))) + (1 - mp.mpf(q)) / 2
            exact = float(mp.log(truth / (1 - truth)))
        assert value == pytest.approx(exact, rel=1e-12)
    assert np.all(values <= amplified_epsilon(eps, rate=p) * (1 + 1e-12))
    assert subsampled_response_epsilon(np.inf, sampling_probability=1.0) == np.inf
    half = subsampled_response_epsilon(np.inf, sampling_probability=0.5)
    assert half == pytest.approx(np.log(3))
    with pytest.raises(ValueError, match=">= 0"):
        subsampled_response_epsilon(-0.1, sampling_probability=0.5)

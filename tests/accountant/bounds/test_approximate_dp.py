"""Subsampling of (epsilon, delta): identities, edges, and values at 60 digits."""

import functools
import itertools

import mpmath as mp
import numpy as np
import pytest
import scipy.stats

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
from oracles.finite_distributions import (
    assert_between,
    random_distributions,
    stick,
    worst_pair,
    worst_stick,
)

COUNT = 400


def test_joint_convexity_identity():
    """300 random mixtures: both sides of the identity, computed separately."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        shared, first, second = rng.dirichlet(np.ones(6) * 0.5, 3)
        r, eps = rng.uniform(0.01, 1), rng.uniform(0, 4)
        outer, delta = advanced_joint_convexity(
            shared, first, second, rate=r, epsilon=eps
        )
        one, two = ((1 - r) * shared + r * dist for dist in (first, second))
        assert delta == pytest.approx(stick(one, two, outer), abs=1e-13)


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
    assert amplified_epsilon(np.inf, rate=[0.1, 0.0]).tolist() == [np.inf, 0]
    assert min(amplify_poisson(1e-200, 1e-200, sampling_probability=1e-200)) > 0
    assert unamplified_epsilon(1.0, rate=0.0) == np.inf


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
    with pytest.raises(ValueError, match="delta"):
        amplify_poisson(1.0, -0.1, sampling_probability=0.5)
    with pytest.raises(NotImplementedError, match="profile"):
        delta_poisson_subsampled(
            RdpTable(np.ones(3)), sampling_probability=0.5, epsilon=1.0
        )
    with pytest.raises(ValueError, match="profile"):
        delta_poisson_subsampled(lambda e: e + 2, sampling_probability=0.5, epsilon=1.0)
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


# --- Random settings, against finite pairs and enumerated samples ---


def test_guarantees_of_the_worst_mechanism():
    """Poisson and fixed size: attained by response that fails with chance delta."""
    rng = np.random.default_rng(10)
    eps, delta = 10 ** rng.uniform(-3, 0.5, COUNT), 10 ** rng.uniform(-9, -0.5, COUNT)
    population = rng.integers(1, 10_000, COUNT)
    size = np.ceil(population * rng.uniform(0, 1, COUNT) ** 3).astype(int)
    rate = (size / population)[:, None]
    there, gone = worst_pair(eps, delta)
    total, price = amplify_poisson(eps, delta, sampling_probability=rate[:, 0])
    mixed = (1 - rate) * gone + rate * there
    exact = worst_stick([(mixed, gone)], total)
    assert_between(0, exact, price)
    np.testing.assert_allclose(stick(mixed, gone, total), price, rtol=1e-7, atol=1e-14)
    # If another unit replaces the one not drawn: any distribution between the two.
    again = amplify_without_replacement(eps, delta, size=size, population=population)
    assert np.array_equal(again[0], total) and np.array_equal(again[1], price)
    for share in (0.0, 1.0, rng.uniform(0, 1, (COUNT, 1))):
        rest = share * there + (1 - share) * gone
        pair = [((1 - rate) * rest + rate * dist) for dist in (there, gone)]
        assert_between(0, worst_stick([tuple(pair)], total), price)


def test_profiles_of_random_mechanisms():
    """Three neighbouring distributions at random: drawn or not, or replaced."""
    rng = np.random.default_rng(11)
    rest, here, there = np.moveaxis(random_distributions(rng, 6, COUNT, 3), 1, 0)
    rest[::4] = there[::4]
    eps = rng.uniform(0, 2, COUNT) ** 2
    population = rng.integers(1, 100, COUNT)
    size = np.ceil(population * rng.uniform(0, 1, COUNT)).astype(int)
    rate = (size / population)[:, None]
    mixed = (1 - rate) * rest + rate * here
    bound = delta_poisson_subsampled(
        lambda e: worst_stick([(rest, here)], e),
        sampling_probability=rate[:, 0],
        epsilon=eps,
    )
    exact = worst_stick([(mixed, rest)], eps)
    attained = delta_poisson_subsampled(
        lambda e: stick(here, rest, e), sampling_probability=rate[:, 0], epsilon=eps
    )
    assert_between(attained, exact, bound)
    np.testing.assert_allclose(stick(mixed, rest, eps), attained, rtol=1e-9, atol=1e-14)
    bound = delta_without_replacement_subsampled(
        lambda e: worst_stick([(rest, here), (rest, there), (here, there)], e),
        size=size,
        population=population,
        epsilon=eps,
    )
    exact = worst_stick([(mixed, (1 - rate) * rest + rate * there)], eps)
    attained = np.where(np.arange(COUNT) % 4, 0.0, rate[:, 0]) * stick(
        here, there, unamplified_epsilon(eps, rate=rate[:, 0])
    )
    assert_between(attained, exact, bound, rtol=1e-9)


def counted_ones(rng, most):
    """(400, most + 1, 8): outputs of mechanisms that depend on the number of ones.

    Close counts have close distributions, so that profiles and group profiles are not
    trivial.
    """
    walk = np.cumsum(rng.normal(size=(COUNT, most + 1, 8)), axis=1)
    weights = np.exp(rng.uniform(0.1, 1.5, (COUNT, 1, 1)) * walk)
    return weights / weights.sum(axis=-1, keepdims=True)


def test_enumerated_samples_with_replacement():
    """All samples with replacement of up to 12 bits."""
    rng = np.random.default_rng(12)
    dists = counted_ones(rng, 6)
    population = rng.integers(2, 13, COUNT)
    size = np.minimum(rng.integers(1, 7, COUNT), population)
    ones = np.floor(rng.uniform(0, 1, COUNT) * population).astype(int)
    counts, eps = np.arange(7), rng.uniform(0, 1.5, COUNT) ** 2
    few, many, n, m = (a[:, None] for a in (ones, ones + 1, population, size))
    draws = [
        np.einsum("sc,sco->so", scipy.stats.binom.pmf(counts, m, k / n), dists)
        for k in (few, many)
    ]
    exact, attained = worst_stick([tuple(draws)], eps), 0.0
    for row in range(0, COUNT, 4):  # one at a time would take long

        def profile(k, epsilon, own=dists[row, : size[row] + 1]):
            pairs = itertools.combinations(range(len(own)), 2)
            near = [(own[a], own[b]) for a, b in pairs if b - a <= k]
            return worst_stick(near, epsilon)

        bound, generic = (
            delta_with_replacement_subsampled(
                functools.partial(profile, 1),
                size=int(size[row]),
                population=int(population[row]),
                epsilon=eps[row],
                group_profile=grouped,
            )
            for grouped in (profile, None)
        )
        assert exact[row] <= bound * (1 + 1e-9) + 1e-14
        assert bound <= generic * (1 + 1e-9) + 1e-14
        attained = max(attained, exact[row] / max(bound, 1e-9))
    assert attained > 0.8

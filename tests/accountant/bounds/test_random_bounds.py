"""Subsampling, stages, composition, responses: 1,000 random settings of each.

Every bound against an independent oracle: finite pairs whose hockey sticks are sums of
their outputs, whole protocols enumerated, quadrature of densities. None calls the
library. Where a known worst case attains a bound the test asks for equality there, so
that a bound that is merely large fails too.
"""

import functools
import itertools
from fractions import Fraction

import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxdp_episodic.accountant.bounds import approximate_dp, composition
from jaxdp_episodic.bounds import (
    Gaussian,
    Laplace,
    delta_with_replacement_subsampled,
)
from oracles.finite_distributions import (
    assert_between,
    random_distributions,
    stick,
    worst_pair,
    worst_stick,
)

COUNT = 1_000


# --- Subsampling of (epsilon, delta) and of profiles ---


def test_guarantees_of_the_worst_mechanism():
    """Poisson and fixed size: attained by response that fails with chance delta."""
    rng = np.random.default_rng(10)
    eps, delta = 10 ** rng.uniform(-3, 0.5, COUNT), 10 ** rng.uniform(-9, -0.5, COUNT)
    population = rng.integers(1, 10_000, COUNT)
    size = np.ceil(population * rng.uniform(0, 1, COUNT) ** 3).astype(int)
    rate = (size / population)[:, None]
    there, gone = worst_pair(eps, delta)
    total, price = approximate_dp.amplify_poisson(
        eps, delta, sampling_probability=rate[:, 0]
    )
    mixed = (1 - rate) * gone + rate * there
    exact = worst_stick([(mixed, gone)], total)
    assert_between(0, exact, price)
    np.testing.assert_allclose(stick(mixed, gone, total), price, rtol=1e-7, atol=1e-14)
    # If another unit replaces the one not drawn: any distribution between the two.
    again = approximate_dp.amplify_without_replacement(
        eps, delta, size=size, population=population
    )
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
    bound = approximate_dp.delta_poisson_subsampled(
        lambda e: worst_stick([(rest, here)], e),
        sampling_probability=rate[:, 0],
        epsilon=eps,
    )
    exact = worst_stick([(mixed, rest)], eps)
    attained = approximate_dp.delta_poisson_subsampled(
        lambda e: stick(here, rest, e), sampling_probability=rate[:, 0], epsilon=eps
    )
    assert_between(attained, exact, bound)
    np.testing.assert_allclose(stick(mixed, rest, eps), attained, rtol=1e-9, atol=1e-14)
    bound = approximate_dp.delta_without_replacement_subsampled(
        lambda e: worst_stick([(rest, here), (rest, there), (here, there)], e),
        size=size,
        population=population,
        epsilon=eps,
    )
    exact = worst_stick([(mixed, (1 - rate) * rest + rate * there)], eps)
    attained = np.where(np.arange(COUNT) % 4, 0.0, rate[:, 0]) * stick(
        here, there, approximate_dp.unamplified_epsilon(eps, rate=rate[:, 0])
    )
    assert_between(attained, exact, bound, rtol=1e-9)


class CountedOnes:
    """1,000 mechanisms on multisets of bits that depend on the number of ones.

    Each has a distribution of 8 outputs for every count; close counts have close
    distributions, so that profiles and group profiles are not trivial.
    """

    def __init__(self, rng, most):
        walk = np.cumsum(rng.normal(size=(COUNT, most + 1, 8)), axis=1)
        weights = np.exp(rng.uniform(0.1, 1.5, (COUNT, 1, 1)) * walk)
        self.dists = weights / weights.sum(axis=-1, keepdims=True)
        self.most = most

    def group_profile(self, distance, epsilon, reach=None):
        """Worst hockey stick of two counts at most this far apart, (COUNT,)."""
        reach = np.full(COUNT, self.most) if reach is None else reach
        worst = np.zeros(np.shape(epsilon))
        for a, b in itertools.combinations(range(self.most + 1), 2):
            if b - a <= np.max(distance):
                value = worst_stick([(self.dists[:, a], self.dists[:, b])], epsilon)
                counted = (b - a <= distance) & (b <= reach)
                worst = np.where(counted, np.maximum(worst, value), worst)
        return worst

    def output(self, chances):
        """Mixture by the probability (COUNT, most + 1) of every count."""
        return np.einsum("sc,sco->so", chances, self.dists)


def test_enumerated_samples():
    """All samples of up to 12 bits: Poisson, without and with replacement."""
    rng = np.random.default_rng(12)
    mechanisms = CountedOnes(rng, 6)
    population = rng.integers(2, 13, COUNT)
    size = np.minimum(rng.integers(1, 7, COUNT), population)
    ones = np.floor(rng.uniform(0, 1, COUNT) * population).astype(int)
    counts, eps = np.arange(7), rng.uniform(0, 1.5, COUNT) ** 2
    table = [a[:, None] for a in (ones, ones + 1, population, size)]
    few, many, n, m = table
    subsets = [
        mechanisms.output(scipy.stats.hypergeom.pmf(counts, n, k, m))
        for k in (few, many)
    ]
    draws = [
        mechanisms.output(scipy.stats.binom.pmf(counts, m, k / n)) for k in (few, many)
    ]
    bound = approximate_dp.delta_without_replacement_subsampled(
        lambda e: mechanisms.group_profile(1, e, size),
        size=size,
        population=population,
        epsilon=eps,
    )
    exact = worst_stick([tuple(subsets)], eps)
    assert_between(0, exact, bound, rtol=1e-9)
    assert np.max(exact / np.maximum(bound, 1e-9)) > 0.8
    exact, attained = worst_stick([tuple(draws)], eps), 0.0
    for row in range(0, COUNT, 4):  # one at a time would take long
        part = CountedOnes.__new__(CountedOnes)
        part.dists, part.most = mechanisms.dists[row : row + 1], size[row]

        def profile(k, epsilon, part=part):
            pairs = itertools.combinations(range(part.most + 1), 2)
            near = [
                (part.dists[0, a], part.dists[0, b]) for a, b in pairs if b - a <= k
            ]
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
    # Poisson: up to 6 bits, one more or less.
    p, few = rng.uniform(0, 1, COUNT), np.minimum(ones, 5)[:, None]
    pair = [
        mechanisms.output(scipy.stats.binom.pmf(counts, k, p[:, None]))
        for k in (few, few + 1)
    ]
    bound = approximate_dp.delta_poisson_subsampled(
        lambda e: mechanisms.group_profile(1, e), sampling_probability=p, epsilon=eps
    )
    exact = worst_stick([tuple(pair)], eps)
    assert_between(0, exact, bound, rtol=1e-9)
    assert np.max(exact / np.maximum(bound, 1e-9)) > 0.8


def pieces(shift, points):
    """Points (COUNT, 3 points) and weights of the line split at 0 and at the shift."""
    half, weight = np.polynomial.legendre.leggauss(points)
    edges = [np.full_like(shift, -9), 0 * shift, shift, shift + 9]
    grids = [a + (b - a) * (half + 1) / 2 for a, b in itertools.pairwise(edges)]
    sizes = [(b - a) / 2 * weight for a, b in itertools.pairwise(edges)]
    return np.concatenate(grids, axis=-1), np.concatenate(sizes, axis=-1)


def test_sampled_noise_by_quadrature():
    """Gaussian and Laplace noise: the densities of the sampled pair integrated.

    The bound is the forward profile, and no less than the backward one. The kink where
    the integrand meets 0 is what the quadrature's 2e-4 is for.
    """
    rng = np.random.default_rng(14)
    shift, p = rng.uniform(0.2, 3, (COUNT, 1)), rng.uniform(0.01, 1, (COUNT, 1))
    eps = rng.uniform(0, 1, COUNT) * np.log1p(p[:, 0] * np.expm1(shift[:, 0]))
    x, size = pieces(shift, 500)
    for mechanism, noise in (
        (Gaussian(1 / shift[:, 0]), lambda z: np.exp(-z * z / 2) / np.sqrt(2 * np.pi)),
        (Laplace(0.25 / shift[:, 0]), lambda z: 2 * np.exp(-4 * np.abs(z))),
    ):
        plain, moved = noise(x) * size, noise(x - shift) * size
        mixed = (1 - p) * plain + p * moved
        bound = approximate_dp.delta_poisson_subsampled(
            mechanism, sampling_probability=p[:, 0], epsilon=eps
        )
        forward, backward = stick(mixed, plain, eps), stick(plain, mixed, eps)
        np.testing.assert_allclose(bound, forward, rtol=2e-4, atol=2e-4)
        assert np.all(backward <= bound * (1 + 2e-4) + 2e-4)


# --- Composition ---


def enumerated_delta(epsilon, delta, num_steps, total):
    """Hockey stick of the product of worst-case pairs: all 4^k outputs of k steps."""
    first, second = worst_pair(epsilon, delta)
    p = q = np.ones((len(epsilon), 1))
    for _ in range(num_steps):
        p = (p[:, :, None] * first[:, None, :]).reshape(len(epsilon), -1)
        q = (q[:, :, None] * second[:, None, :]).reshape(len(epsilon), -1)
    return stick(p, q, total)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_composition_by_enumeration(num_steps):
    """200 settings for each number of steps: "optimal" is exact, others are above."""
    rng = np.random.default_rng(30 + num_steps)
    count = COUNT // 5
    eps = 10 ** rng.uniform(-2, 0.5, count)
    delta = 10 ** rng.uniform(-8, -1, count) * rng.integers(0, 2, count)
    slack = 10 ** rng.uniform(-8, -1, count)
    total = num_steps * eps * rng.uniform(0, 1.05, count)
    exact = functools.partial(enumerated_delta, eps, delta, num_steps)
    value = composition.compose_optimal_delta(
        eps, delta, num_steps=num_steps, total_epsilon=total
    )
    assert_between(0, exact(total), value)
    np.testing.assert_allclose(value, exact(total), rtol=1e-7, atol=1e-12)
    for bound in (composition.compose_strong, composition.compose_closed_form):
        at, price = bound(eps, delta, num_steps=num_steps, slack=slack)
        assert_between(0, exact(at), price)
    at, price = composition.compose_naive(eps, delta, num_steps=num_steps)
    assert_between(0, exact(at), price)
    failing = -np.expm1(num_steps * np.log1p(-delta))
    target = failing + (1 - failing) * 10 ** rng.uniform(-6, -0.1, count)
    smallest = composition.compose_optimal_epsilon(
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
    total, price = composition.compose_naive(eps, delta, num_steps=k)
    _, more = composition.compose_strong(eps, delta, num_steps=k, slack=slack)
    for row in range(COUNT):
        steps, d = int(k[row]), Fraction(delta[row])
        for value, exact in (
            (total[row], steps * Fraction(eps[row])),
            (price[row], steps * d),
            (more[row], steps * d + Fraction(slack[row])),
        ):
            assert exact <= Fraction(value) <= exact * (1 + Fraction(3, 2**52))

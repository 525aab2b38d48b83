"""Subsampling, stages, composition, responses: 1,000 random settings of each.

Every bound against an independent oracle: finite pairs whose hockey sticks are sums of
their outputs, whole protocols enumerated, quadrature of densities. None calls the
library. Where a known worst case attains a bound the test asks for equality there, so
that a bound that is merely large fails too.
"""

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.special
import scipy.stats
from local_dp import (
    central_sum_error,
    local_sum_error,
)
from tombs_multistage import (
    multistage_delta,
    multistage_guarantee,
    tombs_multistage,
)

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.bounds import approximate_dp, composition
from jaxdp_episodic.accountant.bounds.mechanisms import Gaussian, Laplace
from jaxdp_episodic.accountant.bounds.with_replacement import (
    delta_with_replacement_subsampled,
    group_delta,
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
    # Another unit in the place of the one not drawn: any distribution between the two.
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
    """1,000 mechanisms on multisets of bits that see the number of ones only.

    Each has a distribution (of 8 outputs) for every count; counts that are close have
    distributions that are, so that neither a profile nor its groups are trivial.
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
        """Mixture over the chance (COUNT, most + 1) of every count."""
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
    assert_between(0, worst_stick([tuple(subsets)], eps), bound, rtol=1e-9)
    exact = worst_stick([tuple(draws)], eps)
    for row in range(0, COUNT, 4):  # one by one it takes long
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
    # Poisson: up to 6 bits, one more or less.
    p, few = rng.uniform(0, 1, COUNT), np.minimum(ones, 5)[:, None]
    pair = [
        mechanisms.output(scipy.stats.binom.pmf(counts, k, p[:, None]))
        for k in (few, few + 1)
    ]
    bound = approximate_dp.delta_poisson_subsampled(
        lambda e: mechanisms.group_profile(1, e), sampling_probability=p, epsilon=eps
    )
    assert_between(0, worst_stick([tuple(pair)], eps), bound, rtol=1e-9)


def test_group_profiles_of_random_chains():
    rng = np.random.default_rng(13)
    chains = CountedOnes(rng, 6)
    k, eps = rng.integers(1, 7, COUNT), rng.uniform(0, 4, COUNT)
    bound = group_delta(lambda e: chains.group_profile(1, e), group_size=k, epsilon=eps)
    exact = chains.group_profile(k, eps)
    assert_between(0, exact, bound)
    assert np.max(exact / np.maximum(bound, 1e-6)) > 0.9
    one = group_delta(lambda e: chains.group_profile(1, e), group_size=1, epsilon=eps)
    np.testing.assert_allclose(one, chains.group_profile(1, eps), rtol=1e-12)


def pieces(shift, points):
    """Grids (COUNT, 3 points) of a line cut at 0 and at the shift, and its weights."""
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


# --- Several stages ---


def task_sums(values, size, clip):
    """One task's contribution over every draw of its examples; {sum: chance}."""
    size = min(size, len(values))
    draws = list(itertools.combinations(values, size))
    dist = {}
    for draw in draws:
        total = max(-1, min(1, sum(draw))) if clip else sum(draw)
        dist[total] = dist.get(total, 0.0) + 1 / len(draws)
    return dist


def step_sums(tasks, num_drawn, size, clip):
    """Distribution of the step's sum: every draw of tasks and of their examples."""
    dists = [task_sums(values, size, clip) for values in tasks]
    chosen = list(itertools.combinations(dists, num_drawn))
    total = {}
    for combination in chosen:
        one = {0: 1 / len(chosen)}
        for dist in combination:
            terms = itertools.product(one.items(), dist.items())
            one = {}
            for (a, p), (b, q) in terms:
                one[a + b] = one.get(a + b, 0.0) + p * q
        for a, p in one.items():
            total[a] = total.get(a, 0.0) + p
    return total


class SteppedNoise:
    """Sums on the whole numbers plus two-sided geometric noise, and its profile."""

    outputs = np.arange(-60, 61)

    def __init__(self, scale):
        self.scale = scale

    def dist(self, sums):
        """Distribution of the noisy sum; the tails are counted at the ends."""
        ratio = math.exp(-1 / self.scale)
        total = np.zeros(self.outputs.shape)
        for value, chance in sums.items():
            noise = ratio ** np.abs(self.outputs - value) * (1 - ratio) / (1 + ratio)
            noise[[0, -1]] /= 1 - ratio
            total += chance * noise
        return total

    def profile(self, epsilon):
        """Of replacing one contribution of [-1, 1]: sums at most 2 apart."""
        near = [(self.dist({0: 1}), self.dist({d: 1})) for d in (1, 2)]
        return worst_stick(near, np.asarray(epsilon))


def random_tree(rng):
    """Tasks of examples in {-1, 0, 1}; one example replaced, or removed."""
    tasks, examples = rng.integers(2, 4), rng.integers(2, 5)
    values = rng.integers(-1, 2, (tasks, examples))
    if rng.random() < 0.5:  # classmates that give the task's draw away
        values[0], values[1:] = 1, -1
    values[0, 0] = 1
    other = [list(v) for v in values]
    other[0] = [*other[0][1:], *([-1] if rng.random() < 0.5 else [])]
    drawn = int(rng.integers(1, tasks + 1)), int(rng.integers(1, examples + 1))
    sampling = jde.MultistageSampling(
        jde.WithoutReplacement("task", size=drawn[0], population=int(tasks)),
        jde.WithoutReplacement("example", size=drawn[1], population=int(examples)),
    )
    return [list(v) for v in values], other, drawn, sampling


def test_enumerated_trees():
    """Every draw of 1,000 trees of two stages, clipped at either: delta and claim."""
    rng = np.random.default_rng(20)
    tightest, refused = 0.0, 0
    for _ in range(COUNT):
        one, two, drawn, sampling = random_tree(rng)
        unit = ("task", "example")[int(rng.integers(2))]
        mechanism = SteppedNoise(rng.uniform(0.5, 4))
        dists = [
            mechanism.dist(step_sums(t, *drawn, unit == "task")) for t in (one, two)
        ]
        setting = {"sampling": sampling, "clip_unit": unit}
        eps = rng.uniform(0, 1, 3) * 2 / mechanism.scale
        bound = multistage_delta(mechanism.profile, epsilon=eps, **setting)
        exact = worst_stick([tuple(dists)], eps)
        assert_between(0, exact, bound, rtol=1e-9)
        tightest = max(tightest, *(exact / np.maximum(bound, 1e-6)))
        if unit == "task" or drawn[0] == len(one):
            claim = tombs_multistage(mechanism.profile, epsilon=eps, **setting)
            np.testing.assert_allclose(claim, bound, rtol=1e-12)
        else:
            refused += 1
            with pytest.raises(NotImplementedError, match="multistage_delta"):
                tombs_multistage(mechanism.profile, epsilon=eps, **setting)
        total, price = multistage_guarantee(eps, mechanism.profile(eps), **setting)
        assert_between(0, worst_stick([tuple(dists)], total), price, rtol=1e-9)
    assert tightest > 0.99
    assert refused > 100


# --- Composition ---


def enumerated_delta(epsilon, delta, num_steps, total):
    """Hockey stick of the product of worst pairs: all 4^k outputs of k steps."""
    first, second = worst_pair(epsilon, delta)
    p = q = np.ones((len(epsilon), 1))
    for _ in range(num_steps):
        p = (p[:, :, None] * first[:, None, :]).reshape(len(epsilon), -1)
        q = (q[:, :, None] * second[:, None, :]).reshape(len(epsilon), -1)
    return stick(p, q, total)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_composition_by_enumeration(num_steps):
    """200 settings of each number of steps: optimal is exact, the others above."""
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


def test_published_strong_composition():
    """The two closed forms, literally, with up to a million steps."""
    rng = np.random.default_rng(37)
    k = np.floor(10 ** rng.uniform(0, 6, COUNT))
    eps, slack = 10 ** rng.uniform(-3, 0.5, COUNT), 10 ** rng.uniform(-12, -1, COUNT)
    delta = slack * rng.uniform(0, 1, COUNT) / k
    strong, price = composition.compose_strong(eps, delta, num_steps=k, slack=slack)
    closed, total = composition.compose_closed_form(
        eps, delta, num_steps=k, slack=slack
    )
    spread = eps * np.sqrt(2 * k * np.log(1 / slack))
    expected = spread + k * eps * (np.exp(eps) - 1)
    np.testing.assert_allclose(strong, expected, rtol=1e-11)
    np.testing.assert_allclose(price, k * delta + slack, rtol=1e-14)
    drift = (np.exp(eps) - 1) * eps * k / (np.exp(eps) + 1)
    other = eps * np.sqrt(2 * k * np.log(np.e + np.sqrt(k * eps**2) / slack))
    expected = np.minimum.reduce([k * eps, drift + other, drift + spread])
    np.testing.assert_allclose(closed, expected, rtol=1e-11)
    np.testing.assert_allclose(total, 1 - (1 - delta) ** k * (1 - slack), atol=1e-9)
    exact = composition.compose_optimal_delta(
        eps, delta, num_steps=k, total_epsilon=np.minimum(closed, strong)
    )
    assert_between(0, exact, total, rtol=1e-9)


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


# --- Counting in three models ---


def test_errors_of_sums_from_the_distributions():
    """Spread of the unbiased local estimate, from the number of ones."""
    rng = np.random.default_rng(41)
    eps, n = 10 ** rng.uniform(-2, 1, COUNT), rng.integers(1, 60, COUNT)
    ones = np.floor(rng.uniform(0, 1, COUNT) * (n + 1)).astype(int)
    local, central = local_sum_error(eps, num_users=n), central_sum_error(eps)
    for row in range(COUNT):
        true = 1 / (1 + np.exp(-eps[row]))
        dist = np.convolve(
            scipy.stats.binom.pmf(np.arange(ones[row] + 1), ones[row], true),
            scipy.stats.binom.pmf(
                np.arange(n[row] - ones[row] + 1), n[row] - ones[row], 1 - true
            ),
        )
        estimate = (np.arange(n[row] + 1) - n[row] * (1 - true)) / (2 * true - 1)
        assert dist @ estimate == pytest.approx(ones[row], abs=1e-9 * local[row])
        spread = np.sqrt(dist @ (estimate - ones[row]) ** 2)
        assert local[row] == pytest.approx(spread, rel=1e-9)
    np.testing.assert_allclose(central, scipy.stats.laplace(scale=1 / eps).std())

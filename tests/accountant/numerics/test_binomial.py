"""Binomial numbers, masses, tails and shifted hockey sticks, with many digits."""

import functools
import math

import mpmath as mp
import numpy as np
import pytest
import scipy.stats

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.numerics import binomial
from jaxdp_episodic.accountant.numerics.binomial import (
    log_binomial_mass,
    log_binomial_tail,
    log_shifted_hockey_stick,
    tail_over_mass,
)

RNG_SEED = 20260101
log_binomial = float64_boundary(binomial.log_binomial)


def random_distributions(count, most_trials, seed=RNG_SEED):
    rng = np.random.default_rng(seed)
    n = np.floor(10 ** rng.uniform(0, np.log10(most_trials), count))
    p = 10 ** rng.uniform(-3, -0.01, count)
    spread = np.sqrt(n * p * (1 - p))
    t = np.clip(np.rint(n * p + 5 * rng.normal(size=count) * spread), 0, n)
    return t, n, p


def test_mass_at_60_digits():
    for k, n, p in zip(*random_distributions(100, 1e9), strict=True):
        with mp.workdps(60):
            exact = (
                mp.loggamma(n + 1)
                - mp.loggamma(k + 1)
                - mp.loggamma(n - k + 1)
                + k * mp.log(mp.mpf(p))
                + (n - k) * mp.log(1 - mp.mpf(p))
            )
            assert abs(log_binomial_mass(k, n, p) - float(exact)) < 1e-10


@pytest.mark.parametrize(
    "k, n, p, exact",
    [
        *((0, 0, 0.3, 0), (0, 5, 0, 0), (5, 5, 1, 0)),
        *((1, 5, 0, -np.inf), (6, 5, 0.5, -np.inf), (-1, 5, 0.5, -np.inf)),
    ],
)
def test_mass_at_the_edges(k, n, p, exact):
    assert log_binomial_mass(*(np.array(float(a)) for a in (k, n, p))) == exact


def test_tail_brackets_scipy():
    t, n, p = random_distributions(1_000, 1e5)
    low, high = (log_binomial_tail(t, n, p, side=s) for s in ("lower", "upper"))
    exact = scipy.stats.binom.logsf(t - 1, n, p)
    fine = np.isfinite(exact)
    assert fine.mean() > 0.95
    assert np.all(low[fine] <= exact[fine] + 1e-10)
    assert np.all(high[fine] >= exact[fine] - 1e-10)
    far = np.abs(t - n * p) > np.sqrt(n * p * (1 - p))
    np.testing.assert_allclose(low[far], high[far], rtol=0, atol=1e-10)


def test_ratio_by_its_series():
    for n, t, p in ((10**9, 500_100_000, 0.5), (10**6, 1_200, 1e-3), (50, 49, 0.9)):
        j = np.arange(1, min(n - t, 300_000) + 1)
        steps = (n - t - j + 1) / (t + j) * (p / (1 - p))
        exact = 1 + np.exp(np.cumsum(np.log(steps))).sum()
        for side in ("lower", "upper"):
            args = (np.array(float(a)) for a in (t, n, p / (1 - p)))
            assert tail_over_mass(*args, side=side) == pytest.approx(exact, rel=1e-9)


def test_hockey_stick_by_summation():
    rng = np.random.default_rng(RNG_SEED)
    for _ in range(150):
        c = int(10 ** rng.uniform(0, 2.5)) - 1
        p = rng.uniform(0.02, 0.98)
        eps0 = 10 ** rng.uniform(-2, 1)
        g = np.exp(eps0 * rng.uniform(0, 1.1))
        own, cross = np.exp(eps0) / (1 + np.exp(eps0)), 1 / (1 + np.exp(eps0))
        f = scipy.stats.binom.pmf(np.arange(-1, c + 2), c, p)
        first, second = (
            a * f[:-1] + b * f[1:] for a, b in ((own, cross), (cross, own))
        )
        exact = np.maximum(first - g * second, 0).sum()
        for side in ("lower", "upper"):
            given = map(np.array, (float(c), p / (1 - p), own, cross, g - 1))
            value = np.exp(log_shifted_hockey_stick(*given, side=side))
            assert value == pytest.approx(exact, rel=1e-7, abs=1e-13)


@functools.cache
def log_comb(n: int, k: int) -> float:
    with mp.workdps(40):
        return float(mp.log(math.comb(n, k)))


def test_logarithms_of_binomial_coefficients(engine):
    n, k = np.meshgrid(np.arange(0, 41), np.arange(-1, 41), indexing="ij")
    ends = np.unique(np.geomspace(1, 4096, 60).astype(int))
    k = np.concatenate([k.ravel(), ends, 4096 - ends])
    n = np.concatenate([n.ravel(), np.full(2 * len(ends), 4096)])
    inside, values = (k >= 0) & (k <= n), log_binomial(n, k)
    pairs = zip(n[inside].tolist(), k[inside].tolist(), strict=True)
    expected = [log_comb(*pair) for pair in pairs]
    np.testing.assert_allclose(values[inside], expected, rtol=1e-14, atol=2e-15)
    assert np.all(values[~inside] == -np.inf)

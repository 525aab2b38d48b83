"""The discrete Gaussian against its definition, and against the continuous one."""

import itertools
import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from scipy import stats

import jaxdp_episodic as jde
from jaxdp_episodic.numerics import discrete_gaussian
from jaxdp_episodic.numerics.discrete_gaussian import (
    LARGEST_VARIANCE,
    SMOOTHING,
    covering_variance,
    log_ratio_bound,
    sample_discrete_gaussian,
)

SEED = bytes(range(32))


def probabilities(variance, reach):
    """Of the integers from -reach to reach; the rest is below 1e-30."""
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-(x**2) / (2 * variance))
    return x, weights / weights.sum()


# --- Samples ---


@pytest.mark.parametrize("variance", [1, 2, 3, 4, 10, 17, 100, 3_001])
def test_frequencies_are_those_of_the_definition(variance):
    """One false alarm in 10^6 for each variance."""
    count = 400_000
    samples = sample_discrete_gaussian(variance, count, SEED)
    x, chances = probabilities(variance, 12 * math.isqrt(variance) + 12)
    expected = count * chances
    # Where few are expected the two tails are counted together.
    tail = expected < 20
    seen = np.array([(samples == value).sum() for value in x[~tail]])
    seen = np.append(seen, count - seen.sum())
    expected = np.append(expected[~tail], expected[tail].sum())
    assert stats.chisquare(seen, expected).pvalue > 1e-6


@pytest.mark.parametrize("variance", [60_000**2, LARGEST_VARIANCE])
def test_large_variances(variance):
    samples = sample_discrete_gaussian(variance, 200_000, SEED)
    assert stats.kstest(samples / math.sqrt(variance), "norm").pvalue > 1e-6
    # Low-order bits are fair: the grid has no holes.
    for modulus in (2, 3, 7, 256):
        seen = np.bincount(samples % modulus, minlength=modulus)
        assert stats.chisquare(seen).pvalue > 1e-6


@pytest.mark.parametrize("variance", [1, 7, 10**6, 60_000**2 + 1])
def test_exact_arithmetic_decides_as_float64_does(variance, monkeypatch):
    """Both look at the same bits: where float64 is sure, it is right."""
    fast = sample_discrete_gaussian(variance, 1_500, SEED)
    monkeypatch.setattr(discrete_gaussian, "_DOUBT", 2.0)
    np.testing.assert_array_equal(sample_discrete_gaussian(variance, 1_500, SEED), fast)


@pytest.mark.parametrize("exponent", [Fraction(1, 3), Fraction(7)])
def test_more_bits_are_looked_at_until_it_is_clear(exponent):
    """Of a word whose 64 bits leave it open, and of its neighbours."""
    more = discrete_gaussian._Extension(SEED)
    with mp.workdps(120):
        chance = mp.exp(-mp.mpf(exponent.numerator) / exponent.denominator)
        word = int(mp.floor(chance * 2**64))
        truth = mp.mpf(more.digits(word, 256)) / mp.mpf(2) ** 320 < chance
    words = (word - 1, word, word + 1)
    answers = [discrete_gaussian._exactly_below(w, exponent, more) for w in words]
    assert answers == [True, truth, False]


def test_the_ends_of_the_words():
    more = discrete_gaussian._Extension(SEED)
    assert discrete_gaussian._exactly_below(2**64 - 1, Fraction(0), more)
    assert discrete_gaussian._exact_quotient(0, more) == 0
    # The chance of a greater height is exp(-81 / 2) / 2, of one more exp(-50) / 2.
    assert discrete_gaussian._exact_quotient(2**64 - 1, more) in (9, 10)


def test_samples_follow_from_the_seed_alone():
    one = sample_discrete_gaussian(50, 1_000, SEED)
    np.testing.assert_array_equal(sample_discrete_gaussian(50, 1_000, SEED), one)
    other = sample_discrete_gaussian(50, 1_000, SEED[:-1] + b"!")
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.2
    assert one.dtype == np.int64
    assert sample_discrete_gaussian(50, 0, SEED).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 3, SEED), ValueError, r"variance must be in \[1, 2\*\*52\], got 0"),
        ((2**53, 3, SEED), ValueError, "variance must be in"),
        ((1.5, 3, SEED), TypeError, "variance must be a whole number"),
        ((1, -1, SEED), ValueError, "count must be >= 0"),
        ((1, 1, b"short"), ValueError, "at least 16 bytes"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        sample_discrete_gaussian(*arguments)


# --- What it hides ---


def rounded_likelihood(z, mean, variance):
    """Of a continuous sample that is rounded at random, by the trapezoidal rule."""
    spread, total = variance - SMOOTHING, mp.mpf(0)
    for i in range(-100 * 4, 100 * 4 + 1):
        y = mp.mpf(i) / 4
        density = mp.exp(-((y - mean) ** 2) / (2 * spread))
        kernels = [mp.exp(-((n - y) ** 2) / (2 * SMOOTHING)) for n in range(-200, 201)]
        total += density * kernels[200 + z] / sum(kernels)
    return total / 4 / mp.sqrt(2 * mp.pi * spread)


@pytest.mark.slow
def test_rounded_continuous_noise_is_discrete_noise():
    """To 40 digits (136 are claimed), at a few integers."""
    with mp.workdps(50):
        variance = 41
        total = mp.nsum(lambda n: mp.exp(-(n**2) / (2 * variance)), [-mp.inf, mp.inf])
        for mean, z in ((0, -5), (0, 0), (3, 4)):
            truth = mp.exp(-mp.mpf((z - mean) ** 2) / (2 * variance)) / total
            found = rounded_likelihood(z, mean, variance)
            assert abs(found / truth - 1) < mp.mpf(10) ** -40


def hockey_stick(upper, lower, epsilon):
    return np.maximum(upper - math.exp(epsilon) * lower, 0).sum()


def mixture(variance, weights, reach):
    """Of sums 0, 1, ... with these probabilities, and discrete noise."""
    x = np.arange(-reach, reach + 1)
    dist = np.zeros(x.size)
    for mean, weight in weights.items():
        shifted = np.exp(-((x - mean) ** 2) / (2 * variance))
        dist += weight * shifted / shifted.sum()
    return dist


@pytest.mark.parametrize(
    ("grid", "noise", "rate"),
    list(itertools.product([1, 4, 30], [0.5, 1.0, 3.0], [0.1, 0.5, 1.0])),
)
def test_a_sampled_release_costs_no_more_than_is_accounted(grid, noise, rate):
    """Enumeration of one step, both directions, contributions of up to ``grid``."""
    variance = covering_variance(noise * grid)
    reach = 40 * math.isqrt(variance) + grid
    without = mixture(variance, {0: 1.0}, reach)
    step = jde.GaussianStep(
        jde.MultistageSampling(jde.Poisson("example", sampling_probability=rate)),
        noise_multiplier=noise,
    )
    for contribution in {grid, -grid, 1}:
        present = mixture(variance, {0: 1 - rate, contribution: rate}, reach)
        for epsilon in (0.01, 0.3, 1.0, 3.0):
            accounted = jde.delta(step, num_steps=1, epsilon=epsilon)
            for pair in ((present, without), (without, present)):
                found = hockey_stick(*pair, epsilon)
                assert found <= accounted * (1 + 1e-9) + 1e-14


@pytest.mark.slow
def test_two_steps_cost_no_more_than_is_accounted():
    """A task replaced by its opposite; enumeration of both steps."""
    grid, noise, rate = 30, 1.0, 0.4
    step = jde.GaussianStep(
        jde.MultistageSampling(jde.Poisson("task", sampling_probability=rate)),
        noise_multiplier=noise,
        neighboring_relation="replace_one",
    )
    variance = covering_variance(noise * grid)
    one = mixture(variance, {0: 1 - rate, grid: rate}, 600)
    other = mixture(variance, {0: 1 - rate, -grid: rate}, 600)
    for epsilon in (0.1, 0.5, 2.0):
        accounted = jde.delta(step, num_steps=2, epsilon=epsilon)
        found = hockey_stick(np.outer(one, one), np.outer(other, other), epsilon)
        assert 0.5 * accounted <= found <= accounted * (1 + 1e-9) + 1e-14


def test_without_the_smoothing_it_would_cost_more():
    """The tests above would notice: at coarse grids discrete noise hides less."""
    grid, noise = 1, 0.5
    step = jde.GaussianStep(
        jde.MultistageSampling(jde.Poisson("example", sampling_probability=1.0)),
        noise_multiplier=noise,
    )
    bare = noise**2 * grid**2
    pair = (mixture(bare, {grid: 1.0}, 60), mixture(bare, {0: 1.0}, 60))
    deltas = [
        hockey_stick(*pair, epsilon) / jde.delta(step, num_steps=1, epsilon=epsilon)
        for epsilon in np.linspace(0.1, 4, 9)
    ]
    assert max(deltas) > 1.02


def test_variances_cover_deviations():
    assert covering_variance(0.0) == SMOOTHING
    assert covering_variance(3.0) == 9 + SMOOTHING
    assert covering_variance(1.1) == 2 + SMOOTHING
    deviation = 0.1 * 60_000 + 1e-9
    assert covering_variance(deviation) >= deviation**2 + SMOOTHING
    for wrong in (-1.0, math.nan, math.inf, 2.0**27):
        with pytest.raises(ValueError, match="deviation must be in"):
            covering_variance(wrong)
    assert 0 < log_ratio_bound(10**9, 2**31) < 1e-115
    with mp.workdps(200):
        eta = 2 * mp.nsum(
            lambda k: mp.exp(-2 * mp.pi**2 * SMOOTHING * k**2), [1, mp.inf]
        )
        assert mp.log((1 + eta) / (1 - eta)) <= log_ratio_bound(1)
